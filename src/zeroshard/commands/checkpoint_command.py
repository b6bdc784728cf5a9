"""``zeroshard checkpoint``: show, verify, export and import checkpoints.

``show`` reads manifests only. ``verify`` reads every byte and lists all damage. ``export`` and
``import`` never change their source. torch is imported when a command needs it, never by ``show``.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zeroshard.core.sizes import parse_bytes
from zeroshard.errors import CheckpointError, ConfigError
from zeroshard.terminal import (
    JSON,
    Option,
    Subcommand,
    Table,
    UsageError,
    count,
    listed,
    note,
    print_json,
    progress,
    say,
    say_facts,
)

EXPORTS = ("hf", "torch", "dcp")
IMPORTS = ("auto", "torch", "hf", "dcp", "deepspeed")
DTYPES = ("fp32", "bf16", "fp16")


def _size(text: str) -> int:
    """An option's type: a number of bytes, with a unit or without."""
    try:
        return int(text) if text.isdecimal() and int(text) else parse_bytes(text, "")
    except ConfigError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 5GB or 500MiB") from None


# ------------------------------------------------------------------ choosing a step


def _choose(source: Path, step: int | None) -> Path:
    """Return the directory of the step that is meant."""
    from zeroshard.checkpoint.steps import is_step, list_steps, saved_order

    source.stat()  # a missing or closed directory is an error of the system's, and it says which
    if not source.is_dir():
        raise UsageError(f"{source} is a file; a checkpoint is a directory")
    if is_step(source) and step is not None:
        raise UsageError(f"{source} is one step already: --step goes with the directory above it")
    if is_step(source):
        return source.resolve()
    steps = list_steps(source)
    if not steps and step is None and (source / "latest").exists():  # of save_checkpoint()
        from zeroshard.deepspeed.checkpoint_tags import step_of

        if (found := step_of(source, None)) is not None:
            return found
    if not steps:
        raise CheckpointError(f"{source} holds no checkpoint")
    if step is not None and step not in steps:
        raise UsageError(f"{source} holds no step {step}; it has {_numbers(list(steps))}")
    return steps[saved_order(source)[-1][1] if step is None else step]


def _numbers(steps: list[int]) -> str:
    """Return at most six numbers in words."""
    texts = list(map(str, steps))
    if len(texts) > 6:
        return f"{', '.join(texts[:3])}, ... {', '.join(texts[-2:])} ({len(texts)} in all)"
    return ", ".join(texts)


# ------------------------------------------------------------------ show


def _show(arguments: argparse.Namespace) -> int:
    from zeroshard.checkpoint.steps import is_step, list_steps, read_manifest, summarize

    path = _choose(arguments.source, arguments.step)
    steps = [] if is_step(arguments.source) else list(list_steps(arguments.source))
    summary = {"path": str(path), "steps": steps, **summarize(read_manifest(path))}
    if arguments.json:
        print_json(summary)
    else:
        _print_summary(summary)
    return 0


def _print_summary(summary: dict[str, Any]) -> None:
    from rich.filesize import decimal

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
    say_facts(facts.items(), width=11)
    for title, rows in (("tensors", summary["tensors"]), ("files", summary["files"])):
        cells = [
            [decimal(one) if key == "bytes" else one for key, one in row.items()] for row in rows
        ]
        if rows:
            Table(tuple(rows[0]), cells, title, text=("kind", "dtype", "name")).print()


# ------------------------------------------------------------------ verify


def _verify(arguments: argparse.Namespace) -> int:
    from zeroshard.checkpoint.steps import is_step, list_steps

    if arguments.all and (arguments.step is not None or is_step(arguments.source)):
        raise UsageError(
            "--all means every step of a directory of checkpoints: it goes neither with --step nor"
            " with one step"
        )
    chosen = _choose(arguments.source, arguments.step)
    paths = list(list_steps(arguments.source).values()) if arguments.all else [chosen]
    results = [_verify_step(path) for path in paths]
    if arguments.json:
        print_json({"checkpoints": results})
    else:
        from rich.filesize import decimal

        for result in results:
            if not result["damage"]:
                size = f"{decimal(result['bytes'])} in {result['files']} file(s)"
                say(f"{result['path']}: every byte is right ({size})")
            for damage in result["damage"]:
                say(damage["what"])
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
    from zeroshard.checkpoint.step_reader import verify
    from zeroshard.checkpoint.steps import read_manifest

    try:
        num_bytes, num_files = (manifest := read_manifest(path)).total_bytes(), len(manifest.files)
    except CheckpointError:
        num_bytes, num_files = 0, 0
    with progress(f"verify {path.name}", num_bytes, is_bytes=True) as bar:
        damage = verify(path, bar.advance)
    found = [asdict(one) for one in damage]
    return {"path": str(path), "bytes": num_bytes, "files": num_files, "damage": found}


# ------------------------------------------------------------------ export and import


def _export(arguments: argparse.Namespace) -> int:
    from zeroshard.checkpoint.steps import read_manifest
    from zeroshard.core.precision import parse_dtype
    from zeroshard.formats.export import export

    path, out = _choose(arguments.source, arguments.step), arguments.out
    manifest = read_manifest(path)
    read = [entry.num_bytes for entry in manifest.tensors if entry.kind == "value"]
    if arguments.to != "hf":
        read += [one.num_bytes for one in manifest.tensors if one.kind.startswith("state.")]
    dtype = None if arguments.dtype is None else parse_dtype(arguments.dtype)
    if arguments.config is not None and arguments.to != "hf":
        raise UsageError("--config goes with --to hf: the other formats hold no config.json")
    options: Any = {
        "dtype": dtype, "max_shard_bytes": arguments.max_shard_size, "config": arguments.config
    }  # fmt: skip
    with progress(f"export {path.name}", sum(read), is_bytes=True) as bar:
        export(path, out, arguments.to, progress=bar.advance, **options)
    files = sorted(out.iterdir()) if out.is_dir() else [out]
    num_bytes = sum(file.stat().st_size for file in files)
    if arguments.json:
        names = [file.name for file in files]
        facts = {"path": str(out), "format": arguments.to, "step": manifest.step, "files": names}
        print_json(facts | {"bytes": num_bytes})
        return 0
    size = f"{num_bytes} bytes in {len(files)} file(s)"
    print(f"{out}: step {manifest.step} of {path.parent}, {size}")
    if arguments.to == "hf" and "config.json" not in {file.name for file in files}:
        note(
            "config.json is not among them, since this model had none when it was saved:"
            " --config FILE adds one for from_pretrained()"
        )
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from zeroshard.formats import import_checkpoint

    done = import_checkpoint(
        arguments.source,
        arguments.out,
        format=arguments.format,
        step=arguments.step,
        buffers=arguments.buffers,
        optimizer=arguments.optimizer,
    )
    if arguments.json:
        print_json(asdict(done))
        return 0
    optimizer = "without an optimizer's state: load it with strict=False"
    if done.optimizer:
        optimizer = f"with the state of {done.optimizer}"
    say(f"{done.path}: {done.num_parameters} parameters, {done.num_bytes} bytes, {optimizer}")
    for line in done.notes:
        note(line)
    return 0


# ------------------------------------------------------------------ the commands

_STEP = Option("--step N", "which step (default: the one saved last)", count(0))
_DIR = Option("DIR", "a directory of checkpoints, or one step in it", Path, dest="source")

_SHOW = Subcommand(
    "show", "what is in a checkpoint", "zeroshard checkpoint show runs/gpt --step 1000",
    (_DIR, _STEP, JSON), _show,
)  # fmt: skip
_VERIFY_OPTIONS = (
    _DIR,
    _STEP,
    JSON,
    Option("--all", "every step in DIR, not only the newest"),
)  # fmt: skip
_VERIFY = Subcommand(
    "verify", "read every byte, and list all that is damaged",
    "zeroshard checkpoint verify runs/gpt --all", _VERIFY_OPTIONS, _verify,
)  # fmt: skip
_EXPORT_OPTIONS = (
    replace(_DIR, written="SRC"),
    _STEP,
    JSON,
    Option("OUT", "what to write: a directory, or a file for torch; it must not be there yet", Path,
           dest="out"),
    Option("--to", "hf: safetensors for from_pretrained; torch: one file for torch.load; dcp: a"
           " directory for torch.distributed.checkpoint", choices=EXPORTS, required=True),
    Option("--dtype", "of the parameters (default: as they were saved)", choices=DTYPES),
    Option("--max-shard-size SIZE", "with hf, of each file, like 5GB or 500MiB (default: 5GB)",
           _size, 5 * 10**9),
    Option("--config FILE", "with hf, the model's config.json (default: as of the Transformers"
           " model which was saved)", Path),
)  # fmt: skip
_EXPORT = Subcommand(
    "export", "write a checkpoint as others read it",
    "zeroshard checkpoint export runs/gpt exported --to hf --dtype bf16", _EXPORT_OPTIONS, _export,
)  # fmt: skip
_IMPORT_OPTIONS = (
    Option("SRC", "a file, or a directory", Path, dest="source"),
    Option("OUT_DIR", "the directory of checkpoints in which the step is written", Path,
           dest="out"),
    Option("--from", "what SRC is (default: auto, what it looks like)", choices=IMPORTS,
           default="auto", dest="format"),
    Option("--step N", "number of the step that is written (default: what SRC says, or 0)",
           count(0)),
    Option("--buffers PATTERN,...", "names of tensors that are buffers, where SRC does not say,"
           " like '*.inv_freq'", listed(str), []),
    Option("--optimizer CLASS", "class of the optimizer, where SRC does not say (default: AdamW for"
           " Adam's states)"),
    JSON,
)  # fmt: skip
_IMPORT = Subcommand(
    "import", "make a checkpoint of ours from another library's",
    "zeroshard checkpoint import deepspeed_run runs/gpt", _IMPORT_OPTIONS, _import,
)  # fmt: skip
COMMAND = Subcommand(
    "checkpoint", "show, verify, export and import checkpoints",
    "zeroshard checkpoint show runs/gpt", commands=(_SHOW, _VERIFY, _EXPORT, _IMPORT),
)  # fmt: skip
