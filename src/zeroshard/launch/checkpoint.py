"""``zeroshard checkpoint``: show, verify, export and import checkpoints.

``show`` reads manifests only. ``verify`` reads every byte and lists all damage. ``export`` and
``import`` never change their source. torch is imported when a command needs it, never by ``show``.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zeroshard.core.untrusted import printable
from zeroshard.errors import CheckpointError
from zeroshard.launch.console import cell, say
from zeroshard.launch.options import UsageError

__all__ = ["add_parser"]

EXPORTS = ("hf", "torch", "dcp")
IMPORTS = ("auto", "torch", "hf", "dcp", "deepspeed")
DTYPES = ("fp32", "bf16", "fp16")
_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def add_parser(commands: Any) -> None:
    """Add ``checkpoint`` and its subcommands to the `commands` of an argument parser."""
    text = "show, verify, export and import checkpoints"
    checkpoint = _add_kind(commands, "checkpoint", text, "zeroshard checkpoint show runs/gpt")
    kinds = checkpoint.add_subparsers(dest="checkpoint", metavar="WHAT", required=True)
    text = "what is in a checkpoint"
    show = _add_kind(kinds, "show", text, "zeroshard checkpoint show runs/gpt --step 1000")
    _add_source(show, "DIR")
    show.set_defaults(handler=_show)
    text = "read every byte, and list all that is damaged"
    verify = _add_kind(kinds, "verify", text, "zeroshard checkpoint verify runs/gpt --all")
    _add_source(verify, "DIR")
    verify.add_argument("--all", action="store_true", help="every step in DIR, not only the newest")
    verify.set_defaults(handler=_verify)
    _add_export(kinds)
    _add_import(kinds)


def _add_export(kinds: Any) -> None:
    export = _add_kind(
        kinds,
        "export",
        "write a checkpoint as others read it",
        "zeroshard checkpoint export runs/gpt exported --to hf --dtype bf16",
    )
    _add_source(export, "SRC")
    text = "what to write: a directory, or a file for torch; it must not be there yet"
    export.add_argument("out", type=Path, metavar="OUT", help=text)
    text = "hf: safetensors for from_pretrained; torch: one file for torch.load; dcp: a directory"
    text += " for torch.distributed.checkpoint"
    export.add_argument("--to", choices=EXPORTS, required=True, help=text)
    text = "of the parameters (default: as they were saved)"
    export.add_argument("--dtype", choices=DTYPES, help=text)
    text = "with hf, of each file, like 5GB or 500MiB (default: 5GB)"
    size = 5 * 10**9
    export.add_argument("--max-shard-size", type=_size, default=size, metavar="SIZE", help=text)
    export.set_defaults(handler=_export)


def _add_import(kinds: Any) -> None:
    parser = _add_kind(
        kinds,
        "import",
        "make a checkpoint of ours from another library's",
        "zeroshard checkpoint import deepspeed_run runs/gpt",
    )
    parser.add_argument("source", type=Path, metavar="SRC", help="a file, or a directory")
    text = "the directory of checkpoints in which the step is written"
    parser.add_argument("out", type=Path, metavar="OUT_DIR", help=text)
    text = "what SRC is (default: auto, what it looks like)"
    parser.add_argument("--from", dest="format", choices=IMPORTS, default="auto", help=text)
    text = "number of the step that is written (default: what SRC says, or 0)"
    parser.add_argument("--step", type=_count, metavar="N", help=text)
    text = "names of tensors that are buffers, where SRC does not say, like '*.inv_freq'"
    names: Any = {"type": lambda text: text.split(","), "default": [], "metavar": "PATTERN,..."}
    parser.add_argument("--buffers", help=text, **names)
    text = "class of the optimizer, where SRC does not say (default: AdamW for Adam's states)"
    parser.add_argument("--optimizer", metavar="CLASS", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_import)


def _add_kind(kinds: Any, name: str, text: str, example: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(
        name,
        help=text,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"example:\n  {example}",
    )
    return parser


def _add_source(parser: argparse.ArgumentParser, name: str) -> None:
    text = "a directory of checkpoints, or one step in it"
    parser.add_argument("source", type=Path, metavar=name, help=text)
    parser.add_argument("--step", type=_count, metavar="N", help="which step (default: the newest)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _count(text: str) -> int:
    """An argparse type: a whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _size(text: str) -> int:
    """An argparse type: a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]i?b|)", text.lower())
    if match is None or float(match[1]) * _UNITS[match[2]] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 5GB or 500MiB")
    return int(float(match[1]) * _UNITS[match[2]])


# ------------------------------------------------------------------ choosing a step


def _choose(source: Path, step: int | None) -> Path:
    """Return the directory of the step that is meant."""
    from zeroshard.checkpoint.steps import list_steps
    from zeroshard.checkpoint.summary import is_step

    source.stat()  # a missing or closed directory is an error of the system's, and it says which
    if not source.is_dir():
        raise UsageError(f"{source} is a file; a checkpoint is a directory")
    if is_step(source) and step is not None:
        raise UsageError(f"{source} is one step already: --step goes with the directory above it")
    if is_step(source):
        return source.resolve()
    steps = list_steps(source)
    if not steps:
        raise CheckpointError(f"{source} holds no checkpoint")
    if step is not None and step not in steps:
        raise UsageError(f"{source} holds no step {step}; it has {_numbers(list(steps))}")
    return steps[max(steps) if step is None else step]


def _numbers(steps: list[int]) -> str:
    """Return at most six numbers in words."""
    texts = list(map(str, steps))
    if len(texts) > 6:
        return f"{', '.join(texts[:3])}, ... {', '.join(texts[-2:])} ({len(texts)} in all)"
    return ", ".join(texts)


@contextmanager
def _progress(what: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal's stderr; yield a function that adds bytes to it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    text = TextColumn("{task.description}")
    columns = (text, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=num_bytes)
        yield lambda count: bar.advance(task, count)


def _print_json(data: Any) -> None:
    print(json.dumps(data, indent=1))


# ------------------------------------------------------------------ show


def _show(arguments: argparse.Namespace) -> int:
    from zeroshard.checkpoint.steps import list_steps, read_manifest
    from zeroshard.checkpoint.summary import is_step, summarize

    path = _choose(arguments.source, arguments.step)
    steps = [] if is_step(arguments.source) else list(list_steps(arguments.source))
    summary = {"path": str(path), "steps": steps, **summarize(read_manifest(path))}
    if arguments.json:
        _print_json(summary)
    else:
        _print_summary(summary)
    return 0


def _print_summary(summary: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    parameters, optimizer = summary["parameters"], summary["optimizer"]
    groups = [] if optimizer is None else optimizer["groups"]
    facts = {
        "checkpoint": summary["path"],
        "steps here": _numbers(summary["steps"]),
        "step": str(summary["step"]),
        "written by": f"{summary['written_by']}, {summary['world']} rank(s), {summary['policy']}",
        "precision": summary["precision"],
        "size": f"{decimal(summary['bytes'])} in {len(summary['files'])} file(s)",
        "parameters": (
            f"{parameters['count']}, {parameters['elements']:,} elements ({parameters['trained']}"
            f" trained, {parameters['tied']} tied)"
        ),
        "optimizer": (
            "none" if optimizer is None else f"{optimizer['class']}, {len(groups)} param group(s)"
        ),
        "states": "; ".join(f"{name} ({how})" for name, how in summary["states"].items()),
    }
    for name, fact in facts.items():
        if fact:
            say(f"{name:11} {fact}")
    for title, rows in (("tensors", summary["tensors"]), ("files", summary["files"])):
        table = Table(title=title, title_justify="left")
        for key in rows[0] if rows else ():
            is_number = key in ("bytes", "tensors")
            table.add_column(key, justify="right" if is_number else "left", no_wrap=True)
        for row in rows:
            cells = row.items()
            table.add_row(*(cell(decimal(one) if key == "bytes" else one) for key, one in cells))
        if rows:
            Console(soft_wrap=True).print(table)


# ------------------------------------------------------------------ verify


def _verify(arguments: argparse.Namespace) -> int:
    from zeroshard.checkpoint.steps import list_steps
    from zeroshard.checkpoint.summary import is_step

    if arguments.all and (arguments.step is not None or is_step(arguments.source)):
        raise UsageError(
            "--all means every step of a directory of checkpoints: it goes neither with --step nor"
            " with one step"
        )
    chosen = _choose(arguments.source, arguments.step)
    paths = list(list_steps(arguments.source).values()) if arguments.all else [chosen]
    results = [_verify_step(path) for path in paths]
    if arguments.json:
        _print_json({"checkpoints": results})
    else:
        for result in results:
            _print_result(result)
    wrong = [damage for result in results for damage in result["damage"]]
    if not wrong:
        return 0
    names = ", ".join(result["path"] for result in results if result["damage"])
    if all(damage["unreadable"] for damage in wrong):
        raise OSError(
            f"{names}: {len(wrong)} place(s) could not be read, so nobody knows whether they are"
            " right"
        )
    raise CheckpointError(
        f"{names}: damaged in {len(wrong)} place(s); load(fallback='previous') passes over such a"
        " step"
    )


def _verify_step(path: Path) -> dict[str, Any]:
    from zeroshard.checkpoint.steps import read_manifest
    from zeroshard.checkpoint.verify import verify

    try:
        num_bytes, num_files = (manifest := read_manifest(path)).total_bytes(), len(manifest.files)
    except CheckpointError:
        num_bytes, num_files = 0, 0
    with _progress(f"verify {path.name}", num_bytes) as progress:
        damage = verify(path, progress)
    found = [asdict(one) for one in damage]
    return {"path": str(path), "bytes": num_bytes, "files": num_files, "damage": found}


def _print_result(result: dict[str, Any]) -> None:
    from rich.filesize import decimal

    if not result["damage"]:
        size = f"{decimal(result['bytes'])} in {result['files']} file(s)"
        say(f"{result['path']}: every byte is right ({size})")
    for damage in result["damage"]:
        say(damage["what"])


# ------------------------------------------------------------------ export and import


def _export(arguments: argparse.Namespace) -> int:
    from zeroshard.checkpoint.export import export
    from zeroshard.checkpoint.steps import read_manifest
    from zeroshard.core.precision import parse_dtype

    path, out = _choose(arguments.source, arguments.step), arguments.out
    manifest = read_manifest(path)
    read = [entry.num_bytes for entry in manifest.tensors if entry.kind == "value"]
    if arguments.to != "hf":
        read += [one.num_bytes for one in manifest.tensors if one.kind.startswith("state.")]
    dtype = None if arguments.dtype is None else parse_dtype(arguments.dtype)
    options: Any = {"dtype": dtype, "max_shard_bytes": arguments.max_shard_size}
    with _progress(f"export {path.name}", sum(read)) as progress:
        export(path, out, arguments.to, progress=progress, **options)
    files = sorted(out.iterdir()) if out.is_dir() else [out]
    num_bytes = sum(file.stat().st_size for file in files)
    if arguments.json:
        names = [file.name for file in files]
        facts = {"path": str(out), "format": arguments.to, "step": manifest.step, "files": names}
        _print_json(facts | {"bytes": num_bytes})
        return 0
    size = f"{num_bytes} bytes in {len(files)} file(s)"
    print(f"{out}: step {manifest.step} of {path.parent}, {size}")
    if arguments.to == "hf":
        print(
            "config.json is not among them, since a checkpoint does not hold it: copy the model's"
            " beside the weights for from_pretrained()"
        )
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from zeroshard.checkpoint.foreign import import_checkpoint

    done = import_checkpoint(
        arguments.source,
        arguments.out,
        format=arguments.format,
        step=arguments.step,
        buffers=arguments.buffers,
        optimizer=arguments.optimizer,
    )
    if arguments.json:
        _print_json(asdict(done) | {"path": str(done.path)})
        return 0
    optimizer = "without an optimizer's state: load it with strict=False"
    if done.optimizer:
        optimizer = f"with the state of {done.optimizer}"
    say(f"{done.path}: {done.num_parameters} parameters, {done.num_bytes} bytes, {optimizer}")
    for note in done.notes:
        sys.stderr.write(f"zeroshard: {printable(note)}\n")
    return 0
