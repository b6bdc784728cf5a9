"""Other checkpoints as a step of ours: a torch state_dict, Transformers' safetensors,
torch.distributed.checkpoint, DeepSpeed's ZeRO 1, 2 and 3.

    recognise the format . read it (never running code that it chose) . write one file of pieces and
    a manifest . commit

The step has one rank and the row ``ddp``; ``zeroshard.load`` reads it into any other. Strides are
those of contiguous tensors; buffers are guessed in formats that do not name them
(`Importer.is_buffer`). Without optimizer state that names its parameters the step has none, and
``load(strict=False)`` reads the weights.

Invariant: torch's files are opened with ``weights_only=True``, other pickles are read as data
(restricted_unpickler.py). Cost: files are mapped, not read into memory, but for DCP's, which are
held whole.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from zeroshard.checkpoint.kept import next_branch
from zeroshard.checkpoint.manifest import Manifest, shard_name
from zeroshard.checkpoint.shard_files import WRITTEN_BY, shard_bytes, write_new, write_shard
from zeroshard.checkpoint.steps import (
    MANIFEST,
    begin_step,
    commit,
    list_steps,
    remember_steps,
    remove_tree,
    require_space,
    settle,
    step_path,
)
from zeroshard.core.precision import PRECISIONS
from zeroshard.errors import CheckpointError, ConfigError
from zeroshard.formats.dcp import read_dcp
from zeroshard.formats.deepspeed import read_deepspeed
from zeroshard.formats.importer import (
    MODEL_KEYS,
    OPTIMIZER_KEYS,
    STEP_KEYS,
    Importer,
    NamedOptimizer,
    optimizer_class,
    take_state,
)
from zeroshard.formats.pretrained import open_tensors
from zeroshard.formats.restricted_unpickler import load_tensors
from zeroshard.system.safe_files import NotReadable, read_json


@dataclass(frozen=True)
class Imported:
    """The result of `import_checkpoint`."""

    path: Path
    step: int
    format: str
    num_parameters: int
    num_bytes: int
    optimizer: str | None  # the name of its class
    notes: list[str]  # skipped entries and guesses


def import_checkpoint(
    source: Path,
    directory: Path,
    *,
    format: str = "auto",
    step: int | None = None,
    buffers: Sequence[str] = (),
    optimizer: str | None = None,
) -> Imported:
    """Write the content of `source` as a step in `directory`.

    `step` is its number (default: what the source says, or 0). `buffers` are patterns of the names
    of tensors that are buffers, beyond those that are recognised. `optimizer` is the name of the
    optimizer's class, where the source does not say or says another.

    Raises CheckpointError for a source that is damaged, hostile or incomplete, ConfigError where
    the format is unknown or the step is there already.
    """
    format = recognise(source) if format == "auto" else format
    with ExitStack() as stack:
        importer = Importer(buffers, optimizer)
        READERS[format](source, importer, stack)
        importer.check(str(source))
        number = (importer.step or 0) if step is None else step
        path, num_bytes = _write(importer, directory, number, format)
    name = None if importer.optimizer is None else importer.optimizer["class"]
    return Imported(path, number, format, len(importer.parameters), num_bytes, name, importer.notes)


def recognise(source: Path) -> str:
    """Return which format `source` has. Raises ConfigError where it has none that is known."""
    if not source.is_dir():
        if not source.exists():
            raise FileNotFoundError(2, "No such file or directory", str(source))
        return "hf" if source.suffix == ".safetensors" else "torch"
    if any(source.glob("model*.safetensors*")):
        return "hf"
    if (source / ".metadata").is_file():
        return "dcp"
    patterns = ("global_step*", "*model_states.pt")
    if (source / "latest").is_file() or any(any(source.glob(one)) for one in patterns):
        return "deepspeed"
    raise ConfigError(
        f"{source} is no checkpoint that is known here (torch, Transformers, DCP, DeepSpeed);"
        " --from says which it is"
    )


def _write(importer: Importer, directory: Path, step: int, format: str) -> tuple[Path, int]:
    metadata = {"format": "zeroshard", "step": str(step)}
    num_bytes = shard_bytes(importer.stored, metadata)
    above = next(one for one in (directory, *directory.absolute().parents) if one.is_dir())
    require_space(above, num_bytes, f"step {step} in {directory}")  # before anything is made there
    with begin_step(directory, step, secrets.token_hex(4), num_bytes) as working:
        try:
            if step in list_steps(directory):
                raise ConfigError(
                    f"{directory} already holds step {step}: choose another with --step, or"
                    " another directory"
                )
            path = working / shard_name(0, 1)
            file, tensors = write_shard(path, 0, importer.stored, metadata)
            manifest = Manifest(
                step=step,
                world=1,
                written_by=f"{WRITTEN_BY}, imported ({format})",
                policy="ddp",
                precision=PRECISIONS["fp32"].describe(),
                files=(file,),
                parameters=importer.parameters,
                tensors=tuple(tensors),
                optimizer=importer.optimizer,
                model_config=importer.model_config,
                branch=next_branch(directory, step),
            )
            text = manifest.dump()
            Manifest.parse(text, "what was imported")
            write_new(working / MANIFEST, len(text), [text])
            settle(directory, commit(working, directory, step))
            remember_steps(directory)
            return step_path(directory, step), manifest.total_bytes()
        except BaseException:
            remove_tree(working)
            raise


# ------------------------------------------------------------------ torch


def _read_torch(source: Path, importer: Importer) -> None:
    read_tree(load_tensors(source, str(source)), importer, str(source))


def read_tree(content: Any, importer: Importer, where: str) -> None:
    """Take a state_dict, or a dictionary with one beside optimizer state and a step number."""
    if not isinstance(content, dict):
        raise CheckpointError(f"{where} holds a {type(content).__name__}, not a state_dict")
    model = next((content[key] for key in MODEL_KEYS if isinstance(content.get(key), dict)), None)
    if model is None:
        if not any(isinstance(value, torch.Tensor) for value in content.values()):
            keys = ", ".join(map(repr, content))
            raise CheckpointError(
                f"{where} holds no state_dict under one of {', '.join(MODEL_KEYS)}: it has {keys}"
            )
        take_state(importer, _named(content, where), None)
        return
    step = next((content[key] for key in STEP_KEYS if key in content), None)
    importer.step = int(step) if isinstance(step, int | torch.Tensor) and int(step) >= 0 else None
    found = next((content[key] for key in OPTIMIZER_KEYS if content.get(key)), None)
    optimizer = None if found is None else _named_optimizer(found, content, importer)
    take_state(importer, _named(model, where), optimizer)


def _named(state: dict[Any, Any], where: str) -> dict[str, Any]:
    if not all(isinstance(name, str) for name in state):
        raise CheckpointError(f"{where} makes no sense: a state_dict has a key that is no name")
    return state


def _named_optimizer(
    found: Any, content: Mapping[str, Any], importer: Importer
) -> NamedOptimizer | None:
    """Return optimizer state that names its parameters (torch's or our format), else None."""
    state, groups = found, content.get("param_groups")
    if isinstance(found, dict):
        inner = found.get("state"), found.get("param_groups")
        if isinstance(inner[0], dict) and isinstance(inner[1], list):
            state, groups = inner
    try:
        names = [*state, *(name for group in groups or () for name in group["params"])]
        if any(isinstance(name, int) for name in names):
            importer.notes.append(
                "the optimizer's state is not taken: it numbers its parameters (torch's"
                " get_optimizer_state_dict names them)"
            )
            return None
        keys = {key for values in state.values() for key in values}
        name = importer.optimizer_name or content.get("optimizer_class")
        name = name or optimizer_class(groups or (), keys)
        if name is not None and groups:
            named = {str(one): dict(values) for one, values in state.items()}
            return NamedOptimizer(str(name), list(groups), named)
    except (TypeError, KeyError, AttributeError, ValueError):
        pass
    importer.notes.append("the optimizer's state is not taken: its form is not known here")
    return None


# ------------------------------------------------------------------ Transformers


def _read_hf(source: Path, importer: Importer, stack: ExitStack) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for path, opened, name in open_tensors(source, stack):
        if name in tensors:
            raise CheckpointError(f"{path} holds {name!r}, as another file of the checkpoint does")
        try:
            tensors[name] = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    take_state(importer, tensors, None)
    config = source / "config.json"
    if source.is_dir() and config.is_file():
        try:
            importer.model_config = json.dumps(read_json(config))
        except NotReadable as error:
            importer.notes.append(f"config.json is not taken: {error}")


def _read_dcp(source: Path, importer: Importer) -> None:
    wanted = {*MODEL_KEYS, *OPTIMIZER_KEYS, *STEP_KEYS, "param_groups", "optimizer_class"}
    read_tree(read_dcp(source, wanted), importer, str(source))


READERS: dict[str, Callable[[Path, Importer, ExitStack], None]] = {
    "torch": lambda source, importer, stack: _read_torch(source, importer),
    "hf": _read_hf,
    "dcp": lambda source, importer, stack: _read_dcp(source, importer),
    "deepspeed": lambda source, importer, stack: read_deepspeed(source, importer),
}
