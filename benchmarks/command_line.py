"""The command line of ``zeroshard bench``.

What it does not do: import torch. Only the worker processes do.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.plan import CONTENDERS, OFFLOAD_CONTENDERS, OFFLOAD_PARTS, SIZES

__all__ = ["add_commands"]


def add_commands(bench: argparse.ArgumentParser) -> None:
    """Add the subcommands to the parser of ``zeroshard bench``."""
    kinds = bench.add_subparsers(dest="bench", metavar="WHAT", required=True)
    _add_step(kinds)
    _add_overhead(kinds)
    _add_checkpoint(kinds)
    _add_disk(kinds)
    _add_codec(kinds)
    _add_offload(kinds)
    _add_inference(kinds)
    report = kinds.add_parser(
        "report",
        help="print saved results as markdown",
        **_epilog("zeroshard bench report results.json"),
    )
    report.add_argument("files", type=Path, nargs="+", metavar="FILE")
    report.add_argument(
        "--json", action="store_true", help="print medians, intervals and verdicts as JSON instead"
    )
    report.set_defaults(handler=_report)


def _epilog(example: str, names: Iterable[str] = ()) -> Any:
    """Return what a parser needs to end its help with the names it knows and an example."""
    text = f"example:\n  {example}"
    if names:
        known = textwrap.fill(
            ", ".join(names), 78, initial_indent="  ", subsequent_indent="  ",
            break_on_hyphens=False, break_long_words=False,
        )  # fmt: skip
        text = f"names (benchmarks/plan.py says what each is):\n{known}\n\n{text}"
    return {"formatter_class": argparse.RawDescriptionHelpFormatter, "epilog": text}


def _add_step(kinds: Any) -> None:
    step = kinds.add_parser(
        "step",
        help="time of a training step, memory, bytes on the wire",
        **_epilog(
            "zeroshard bench step --sizes medium --contenders zero3,torch-ddp,fsdp2", CONTENDERS
        ),
    )
    _add_what(step, CONTENDERS)
    step.add_argument(
        "--warmup",
        type=_count(1),
        default=8,
        help="steps before the first turn (default and least: 8)",
    )
    step.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="FILE",
        help="train on the bytes of these files, not on random tokens",
    )
    step.add_argument(
        "--profile", action="store_true", help="also record which operators take the time"
    )
    step.add_argument(
        "--traces",
        type=Path,
        metavar="DIR",
        help="the same, and what torch's profiler sees of three steps of each contender, for"
        " Chrome's trace viewer (engine.trace() is another thing: contenders zero3+trace, ...)",
    )
    _add_common(step, steps=5)
    step.set_defaults(handler=_step)


def _add_overhead(kinds: Any) -> None:
    overhead = kinds.add_parser(
        "overhead",
        help="what the engine costs in one process: microseconds per unit and step, and the ratio",
        **_epilog("zeroshard bench overhead --sizes medium"),
    )
    overhead.add_argument(
        "--sizes",
        type=_names(SIZES),
        default=["medium"],
        metavar="NAME,...",
        help="for the ratio (default: medium)",
    )
    overhead.add_argument(
        "--threads", type=_count(1), help="threads for the ratio (default: cores)"
    )
    overhead.add_argument(
        "--fake-world",
        type=_count(2),
        metavar="RANKS",
        help=(
            "instead: the CPU time of the engine itself beside FSDP2's, one thread of one rank of"
            " a fake process group of RANKS"
        ),
    )
    _add_common(overhead, steps=20)
    overhead.set_defaults(handler=_overhead)


def _add_checkpoint(kinds: Any) -> None:
    checkpoint = kinds.add_parser(
        "checkpoint",
        help="saving and loading beside the disk itself and torch.distributed.checkpoint",
        **_epilog("zeroshard bench checkpoint --gigabytes 4 --folder /mnt/nvme"),
    )
    checkpoint.add_argument(
        "--gigabytes", type=float, default=1.0, help="size of the state (default: 1)"
    )
    checkpoint.add_argument(
        "--rounds", type=_count(1), default=12, help="rounds that count (default: 12)"
    )
    checkpoint.add_argument(
        "--folder", type=Path, help="where to write (default: the temporary folder)"
    )
    checkpoint.add_argument(
        "--warm", action="store_true", help="leave files in the page cache before reading"
    )
    checkpoint.add_argument(
        "--out", type=Path, metavar="FILE", help="save everything measured as JSON"
    )
    checkpoint.add_argument(
        "--json", action="store_true", help="print that JSON instead of a table"
    )
    checkpoint.set_defaults(handler=_checkpoint)


def _add_codec(kinds: Any) -> None:
    codec = kinds.add_parser(
        "codec",
        help="encoding and decoding beside a copy in memory, and the wires on which they pay",
        **_epilog("zeroshard bench codec --codecs int8 --dtypes bf16"),
    )
    codec.add_argument(
        "--codecs",
        type=_names(("int8", "int4", "fp8")),
        default=["int8", "int4", "fp8"],
        metavar="NAME,...",
        help="default: all",
    )
    codec.add_argument(
        "--dtypes",
        type=_names(("fp32", "bf16", "fp16")),
        default=["fp32", "bf16"],
        metavar="NAME,...",
        help="default: fp32,bf16",
    )
    codec.add_argument(
        "--block", type=_count(1), default=256, help="elements that share a scale (default: 256)"
    )
    codec.add_argument(
        "--elements",
        type=_count(1),
        default=1 << 24,
        metavar="N",
        help="of the tensor (default: 16 Mi)",
    )
    codec.add_argument(
        "--rounds", type=_count(1), default=12, help="rounds that count (default: 12)"
    )
    codec.add_argument("--threads", type=_count(1), default=1, help="default: 1")
    codec.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    codec.add_argument("--out", type=Path, metavar="FILE", help="save everything measured as JSON")
    codec.add_argument("--json", action="store_true", help="print that JSON instead of a table")
    codec.set_defaults(handler=_codec)


def _codec(arguments: argparse.Namespace) -> int:
    from benchmarks.codec import Options, run

    a = arguments
    return run(
        Options(a.codecs, a.dtypes, a.block, a.elements, a.rounds, a.threads, a.device),
        out=a.out,
        as_json=a.json,
    )


def _add_disk(kinds: Any) -> None:
    disk = kinds.add_parser(
        "disk",
        help="the disk tier beside the disk itself and fio",
        **_epilog("zeroshard bench disk --path /mnt/nvme"),
    )
    disk.add_argument(
        "--path",
        type=Path,
        metavar="DIR",
        help="a directory on the disk to measure (default: the temporary folder)",
    )
    disk.add_argument(
        "--size",
        type=_count(1),
        default=3 << 29,
        metavar="BYTES",
        help="of the states; twice that is needed (default: 1.5 GiB)",
    )
    disk.add_argument(
        "--rounds", type=_count(1), default=12, help="rounds that count (default: 12)"
    )
    disk.add_argument(
        "--queue-depth", type=_count(1), default=8, help="requests in flight (default: 8)"
    )
    disk.add_argument("--verify", action="store_true", help="with the disk tier's checksums")
    disk.add_argument("--out", type=Path, metavar="FILE", help="save everything measured as JSON")
    disk.add_argument("--json", action="store_true", help="print that JSON instead of a table")
    disk.set_defaults(handler=_disk)


def _add_inference(kinds: Any) -> None:
    inference = kinds.add_parser(
        "inference",
        help="generation with weights on disk and host, beside Accelerate and DeepSpeed",
        **_epilog("zeroshard bench inference --path /mnt/nvme --layers 32 --width 2048"),
    )
    add = inference.add_argument
    text = "a directory on the disk to measure (default: the temporary folder)"
    add("--path", type=Path, metavar="DIR", help=text)
    text = "contenders (benchmarks/inference.py names them; default: those on disk)"
    add("--contenders", type=lambda text: text.split(","), metavar="NAME,...", help=text)
    text = "prompts that are generated at a time (default: 1,32)"
    add("--batches", type=_counts, default=[1, 32], metavar="N,...", help=text)
    add("--layers", type=_count(1), default=16, help="of the model (default: 16)")
    add("--width", type=_count(64), default=1024, help="of the model (default: 1024)")
    add("--tokens", type=_count(1), default=8, help="per prompt and turn (default: 8)")
    add("--rounds", type=_count(1), default=5, help="rounds that count (default: 5)")
    add("--out", type=Path, metavar="FILE", help="save everything measured as JSON")
    add("--json", action="store_true", help="print that JSON instead of a table")
    inference.set_defaults(handler=_inference)


def _counts(text: str) -> list[int]:
    return [_count(1)(word) for word in text.split(",")]


def _add_offload(kinds: Any) -> None:
    offload = kinds.add_parser(
        "offload",
        help=(
            "states on host and disk: steps, memory per tier, the host step and the disk step by"
            " themselves, the largest model"
        ),
        **_epilog(
            "zeroshard bench offload --parts steps --disk-path /mnt/nvme",
            {**OFFLOAD_PARTS, **OFFLOAD_CONTENDERS},
        ),
    )
    offload.add_argument(
        "--parts",
        type=_names(OFFLOAD_PARTS),
        default=list(OFFLOAD_PARTS),
        metavar="NAME,...",
        help="what to measure (default: all)",
    )
    _add_what(offload, OFFLOAD_CONTENDERS)
    offload.add_argument(
        "--disk-path",
        type=Path,
        metavar="DIR",
        help="a directory on the disk to use (default: the temporary folder)",
    )
    offload.add_argument(
        "--elements",
        type=_count(1),
        default=1 << 25,
        metavar="N",
        help="stepped by the host step and the disk step (default: 32 Mi)",
    )
    offload.add_argument(
        "--card-gib",
        type=float,
        metavar="GIB",
        help="memory of the card for the largest model (default: all it has)",
    )
    offload.add_argument(
        "--largest-s",
        type=float,
        default=120.0,
        metavar="S",
        help="for the largest model, per tier (default: 120)",
    )
    _add_common(offload, steps=2)
    offload.set_defaults(handler=_offload, warmup=8, data=[], profile=False, traces=None)


def _add_what(parser: argparse.ArgumentParser, contenders: Any) -> None:
    """What to measure and on how many ranks: options of all that compare whole steps."""
    parser.add_argument(
        "--sizes",
        type=_names(SIZES),
        default=["medium"],
        metavar="NAME,...",
        help=f"of {', '.join(SIZES)} (default: medium)",
    )
    parser.add_argument(
        "--precision",
        type=_names(("fp32", "bf16")),
        default=["fp32"],
        metavar="NAME,...",
        help="fp32, bf16 or both (default: fp32)",
    )
    parser.add_argument(
        "--contenders",
        type=_names(contenders),
        metavar="NAME,...",
        help="default: all that the project compares",
    )
    parser.add_argument(
        "--nproc", type=_count(1), default=2, help="ranks of each contender (default: 2)"
    )
    parser.add_argument(
        "--threads", type=_count(1), help="threads per rank (default: cores / ranks)"
    )
    parser.add_argument(
        "--alive",
        type=_count(2),
        help=(
            "contenders whose processes live at the same time; 2 is strictly A B A B (default: by"
            " size)"
        ),
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--deepspeed-python",
        metavar="PATH",
        help="interpreter for the DeepSpeed contenders, where theirs is another one",
    )


def _add_common(parser: argparse.ArgumentParser, *, steps: int) -> None:
    parser.add_argument(
        "--pairs",
        type=_count(1),
        help="A/B pairs per comparison (default: 12, or 30 for the targets of a few percent)",
    )
    parser.add_argument(
        "--steps", type=_count(1), default=steps, help=f"timed steps per turn (default: {steps})"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="save everything measured, raw numbers included, as JSON",
    )
    parser.add_argument("--json", action="store_true", help="print that JSON instead of tables")


def _names(known: Any) -> Any:
    """An argparse type: names separated by commas, each one of `known`."""

    def names(text: str) -> list[str]:
        chosen = text.split(",")
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return list(dict.fromkeys(chosen))

    return names


def _count(least: int) -> Any:
    """An argparse type: a whole number, at least `least`."""

    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return count


def _step(arguments: argparse.Namespace) -> int:
    from benchmarks.commands import step

    threads = arguments.threads or max(1, len(os.sched_getaffinity(0)) // arguments.nproc)
    return step(arguments, threads=threads)


def _offload(arguments: argparse.Namespace) -> int:
    from benchmarks.commands import offload

    threads = arguments.threads or max(1, len(os.sched_getaffinity(0)) // arguments.nproc)
    return offload(arguments, threads=threads)


def _overhead(arguments: argparse.Namespace) -> int:
    if arguments.fake_world is not None:
        from benchmarks.fake_world import Options, run

        rounds = arguments.pairs or Options.rounds
        options = Options(arguments.fake_world, steps=arguments.steps, rounds=rounds)
        return run(options, out=arguments.out, as_json=arguments.json)
    from benchmarks.commands import overhead

    return overhead(arguments, threads=arguments.threads or len(os.sched_getaffinity(0)))


def _checkpoint(arguments: argparse.Namespace) -> int:
    from benchmarks.checkpoint import run

    size = int(arguments.gigabytes * 1e9)
    return run(
        num_bytes=size,
        rounds=arguments.rounds,
        folder=arguments.folder,
        warm=arguments.warm,
        out=arguments.out,
        as_json=arguments.json,
    )


def _disk(arguments: argparse.Namespace) -> int:
    from benchmarks.disk import Options, run

    options = Options(
        path=arguments.path,
        num_bytes=arguments.size,
        rounds=arguments.rounds,
        queue_depth=arguments.queue_depth,
        verify=arguments.verify,
    )
    return run(options, out=arguments.out, as_json=arguments.json)


def _inference(arguments: argparse.Namespace) -> int:
    from benchmarks.inference import DEFAULT, Options, run

    options = Options(
        path=arguments.path,
        contenders=arguments.contenders or DEFAULT,
        batches=arguments.batches,
        layers=arguments.layers,
        width=arguments.width,
        tokens=arguments.tokens,
        rounds=arguments.rounds,
    )
    return run(options, out=arguments.out, as_json=arguments.json)


def _report(arguments: argparse.Namespace) -> int:
    from benchmarks.commands import report

    return report(arguments.files, as_json=arguments.json)
