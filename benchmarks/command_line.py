"""The command line of ``zeroshard bench``.

What it does not do: import torch. Only the worker processes do.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from benchmarks.plan import CONTENDERS, OFFLOAD_CONTENDERS, OFFLOAD_PARTS, SIZES
from zeroshard.launch.cli import BENCH
from zeroshard.terminal import JSON, Option, Subcommand, count, listed, made, one_of

__all__ = ["add_commands"]


def add_commands(bench: argparse.ArgumentParser) -> None:
    """Add the subcommands to the parser of ``zeroshard bench``."""
    replace(BENCH, commands=COMMANDS).declare(bench)


def _known(names: Iterable[str]) -> str:
    """Return the names that a command knows, as its help ends with."""
    known = textwrap.fill(
        ", ".join(names), 78, initial_indent="  ", subsequent_indent="  ",
        break_on_hyphens=False, break_long_words=False,
    )  # fmt: skip
    return f"names (benchmarks/plan.py says what each is):\n{known}\n\n"


# ------------------------------------------------------------------ what runs


def _measured(module: str) -> Callable[[argparse.Namespace], int]:
    """Return the handler of a command that a module of benchmarks measures, by its Options."""

    def run(arguments: argparse.Namespace) -> int:
        found = import_module(f"benchmarks.{module}")
        options = made(found.Options, arguments)
        return int(found.run(options, out=arguments.out, as_json=arguments.json))

    return run


def _compared(name: str) -> Callable[[argparse.Namespace], int]:
    """Return the handler of a command that compares whole steps on some ranks."""

    def run(arguments: argparse.Namespace) -> int:
        from benchmarks import commands

        threads = arguments.threads or max(1, len(os.sched_getaffinity(0)) // arguments.nproc)
        # those of them without these options take the defaults of `step`
        own = {"warmup": 8, "data": [], "profile": False, "traces": None}
        own |= {"optimizer": "adamw", **vars(arguments)}
        return int(getattr(commands, name)(argparse.Namespace(**own), threads=threads))

    return run


def _overhead(arguments: argparse.Namespace) -> int:
    if arguments.world is not None:
        arguments.rounds = arguments.pairs or 12
        return _measured("fake_world")(arguments)
    arguments.nproc = 1
    return _compared("overhead")(arguments)


def _report(arguments: argparse.Namespace) -> int:
    from benchmarks.commands import report

    return report(arguments.files, as_json=arguments.json)


# ------------------------------------------------------------------ options

_OUT = Option("--out FILE", "save everything measured, raw numbers included, as JSON", Path)
_JSON = replace(JSON, help="print that JSON instead of a table")
_ROUNDS = Option("--rounds N", "rounds that count (default: 12)", count(1), 12)
_DEVICE = Option("--device", choices=("cpu", "cuda"), default="cpu")
_DISK = Option("--path DIR", "a directory on the disk to measure (default: the temporary folder)",
               Path)  # fmt: skip
_SIZES = Option("--sizes NAME,...", f"of {', '.join(SIZES)} (default: medium)",
                listed(one_of(SIZES)), ["medium"])  # fmt: skip
_CONTENDERS = Option("--contenders NAME,...", "default: all that the project compares",
                     listed(one_of(CONTENDERS)))  # fmt: skip


def _pairs(steps: int) -> tuple[Option, ...]:
    """Return the options of commands that compare pairs of turns, of so many `steps`."""
    return (
        Option("--pairs N", "A/B pairs per comparison (default: 12, or 30 for the targets of a few"
               " percent)", count(1)),
        Option("--steps N", f"timed steps per turn (default: {steps})", count(1), steps),
        _OUT, _JSON,
    )  # fmt: skip


# what to measure and on how many ranks: options of all that compare whole steps
_WHAT = (
    _SIZES,
    Option("--precision NAME,...", "fp32, bf16 or both (default: fp32)",
           listed(one_of(("fp32", "bf16"))), ["fp32"]),
    Option("--nproc N", "ranks of each contender (default: 2)", count(1), 2),
    Option("--threads N", "threads per rank (default: cores / ranks)", count(1)),
    Option("--alive N", "contenders whose processes live at the same time; 2 is strictly A B A B"
           " (default: by size)", count(2)),
    _DEVICE,
    Option("--max-norm NORM", "to which all clip (default: 1; inf: equal losses)", float, 1.0),
    Option("--deepspeed-python PATH", "interpreter for the DeepSpeed contenders, where theirs is"
           " another one"),
)  # fmt: skip
_STEP = (
    _CONTENDERS, *_WHAT,
    Option("--warmup N", "steps before the first turn (default and least: 8)", count(1), 8),
    Option("--optimizer NAME", "adamw (default), or muon for matrices of the blocks",
           one_of(("adamw", "muon")), "adamw"),
    Option("--data FILE ...", "train on their bytes, not on random tokens", default=[]),
    Option("--profile", "also record which operators take the time"),
    Option("--traces DIR", "the same, and what torch's profiler sees of three steps of each"
           " contender, for Chrome's trace viewer (engine.trace() is another thing: contenders"
           " zero3+trace, ...)", Path),
    *_pairs(5),
)  # fmt: skip
_OFFLOAD = (
    Option("--parts NAME,...", "what to measure (default: all)", listed(one_of(OFFLOAD_PARTS)),
           list(OFFLOAD_PARTS)),
    replace(_CONTENDERS, type=listed(one_of(OFFLOAD_CONTENDERS))), *_WHAT,
    replace(_DISK, written="--disk-path DIR"),
    Option("--elements N", "stepped by the host step and the disk step (default: 32 Mi)", count(1),
           1 << 25),
    Option("--card-gib GIB", "memory of the card for the largest model (default: all it has)",
           float),
    Option("--largest-s S", "for the largest model, per tier (default: 120)", float, 120.0),
    *_pairs(2),
)  # fmt: skip
_OVERHEAD = (
    replace(_SIZES, help="for the ratio (default: medium)"),
    Option("--threads N", "threads for the ratio (default: cores)", count(1)),
    Option("--fake-world RANKS", "instead: the CPU time of the engine itself beside FSDP2's, one"
           " thread of one rank of a fake process group of RANKS", count(2), dest="world"),
    *_pairs(20),
)  # fmt: skip
_CHECKPOINT = (
    Option("--gigabytes N", "size of the state (default: 1)", float, 1.0),
    _ROUNDS,
    Option("--folder DIR", "where to write (default: the temporary folder)", Path),
    Option("--warm", "leave files in the page cache before reading"),
    _OUT, _JSON,
)  # fmt: skip
_DISK_TIER = (
    _DISK,
    Option("--size BYTES", "of the states; twice that is needed (default: 1.5 GiB)", count(1),
           3 << 29, dest="num_bytes"),
    _ROUNDS,
    Option("--queue-depth N", "requests in flight (default: 8)", count(1), 8),
    Option("--verify", "with the disk tier's checksums"),
    _OUT, _JSON,
)  # fmt: skip
_CODEC = (
    Option("--codecs NAME,...", "default: all", listed(one_of(("int8", "int4", "fp8"))),
           ["int8", "int4", "fp8"]),
    Option("--dtypes NAME,...", "default: fp32,bf16", listed(one_of(("fp32", "bf16", "fp16"))),
           ["fp32", "bf16"]),
    Option("--block N", "elements that share a scale (default: 256)", count(1), 256),
    Option("--elements N", "of the tensor (default: 16 Mi)", count(1), 1 << 24, dest="numel"),
    _ROUNDS,
    Option("--threads N", "default: 1", count(1), 1),
    _DEVICE, _OUT, _JSON,
)  # fmt: skip
_INFERENCE = (
    _DISK,
    Option("--contenders NAME,...", "contenders (benchmarks/inference.py names them; default: those"
           " on disk)", listed(str)),
    Option("--batches N,...", "prompts that are generated at a time (default: 1,32)",
           listed(count(1)), [1, 32]),
    Option("--layers N", "of the model (default: 16)", count(1), 16),
    Option("--width N", "of the model (default: 1024)", count(64), 1024),
    Option("--tokens N", "per prompt and turn (default: 8)", count(1), 8),
    replace(_ROUNDS, help="rounds that count (default: 5)", default=5),
    _OUT, _JSON,
)  # fmt: skip
_LEAVES = (
    Option("--nproc N", "ranks (default: 2)", count(1), 2),
    Option("--leaves V", "of a step of all ranks, a multiple of the ranks (default: 8)",
           default="8"),
    replace(_ROUNDS, help="steps of each that count (default: 12)"),
    Option("--layers N", "of the model (default: 6)", count(1), 6),
    Option("--width N", "of the model (default: 256)", count(4), 256),
    Option("--batch N", "sequences of 64 tokens in a leaf (default: 2)", count(1), 2),
    Option("--transport", choices=("auto", "shared_memory", "gloo", "nccl"), default="auto"),
    _OUT, _JSON,
)  # fmt: skip
_KERNELS = (
    Option("FILE ...", "traces of bench step --traces DIR", type=Path, dest="files"),
    Option("--steps N", "steps of a trace (default: 3)", count(1), 3),
    Option("--gap-us US", "gaps longer than this are shown (default: 50)", float, 50.0),
    Option("--top N", "kernels and gaps that are shown (default: 12)", count(1), 12),
    _OUT, _JSON,
)  # fmt: skip
_RESULTS = (
    Option("FILE ...", type=Path, dest="files"),
    replace(JSON, help="print medians, intervals and verdicts as JSON instead"),
)
COMMANDS = (
    Subcommand(
        "step", "time of a training step, memory, bytes on the wire",
        "zeroshard bench step --sizes medium --contenders zero3,torch-ddp,fsdp2",
        _STEP, _compared("step"), epilog=_known(CONTENDERS),
    ),
    Subcommand(
        "overhead",
        "what the engine costs in one process: microseconds per unit and step, and the ratio",
        "zeroshard bench overhead --sizes medium", _OVERHEAD, _overhead,
    ),
    Subcommand(
        "checkpoint",
        "saving and loading beside the disk itself and torch.distributed.checkpoint",
        "zeroshard bench checkpoint --gigabytes 4 --folder /mnt/nvme",
        _CHECKPOINT, _measured("checkpoint"),
    ),
    Subcommand(
        "disk", "the disk tier beside the disk itself and fio",
        "zeroshard bench disk --path /mnt/nvme", _DISK_TIER, _measured("disk"),
    ),
    Subcommand(
        "codec", "encoding and decoding beside a copy in memory, and the wires on which they pay",
        "zeroshard bench codec --codecs int8 --dtypes bf16", _CODEC, _measured("codec"),
    ),
    Subcommand(
        "offload",
        "states on host and disk: steps, memory per tier, the host step and the disk step by"
        " themselves, the largest model",
        "zeroshard bench offload --parts steps --disk-path /mnt/nvme",
        _OFFLOAD, _compared("offload"), epilog=_known({**OFFLOAD_PARTS, **OFFLOAD_CONTENDERS}),
    ),
    Subcommand(
        "inference",
        "generation with weights on disk and host, beside Accelerate and DeepSpeed",
        "zeroshard bench inference --path /mnt/nvme --layers 32 --width 2048",
        _INFERENCE, _measured("inference"),
    ),
    Subcommand(
        "leaves",
        "the tree over leaves beside plain accumulation: time, bytes on the wire, sums held",
        "zeroshard bench leaves --nproc 2 --leaves 8", _LEAVES, _measured("leaves"),
    ),
    Subcommand(
        "kernels", "kernels by name and gaps of a GPU's step, from traces of bench step",
        "zeroshard bench kernels traces/*.json.gz", _KERNELS, _measured("kernels"),
    ),
    Subcommand(
        "report", "print saved results as markdown", "zeroshard bench report results.json",
        _RESULTS, _report,
    ),
)  # fmt: skip
