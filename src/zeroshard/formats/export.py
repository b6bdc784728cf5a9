"""Export a step: Transformers (safetensors), one torch file, or torch.distributed.checkpoint.

Exported are the values (the fp32 master of a trained parameter, the weight of a frozen one) and
rank 0's persistent buffers; for torch and DCP also the optimizer's state and what the
``get_extra_state()`` of modules had returned. Tied parameters are stored under their first name in
safetensors files, and under each of their names in the others.

Invariant: every byte read is verified; the output gets its final name when all of it is on disk.
Cost of ``hf``: one pass, and memory for one chunk (for a parameter that is channels_last, or was
cut along other axes of a mesh, its size). ``torch`` and ``dcp`` hold the whole checkpoint in
memory.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from zeroshard.checkpoint.manifest import (
    BUFFER,
    ITEMSIZE,
    Manifest,
    ParameterEntry,
    TensorEntry,
    row_stride,
)
from zeroshard.checkpoint.rank_part import OF_MODULES, ExtraStates, whole_states
from zeroshard.checkpoint.shard_files import (
    DTYPES,
    OpenShards,
    as_bytes,
    copy_common,
    dtype_code,
    header_of,
    published,
    stored_span,
    write_new,
)
from zeroshard.checkpoint.steps import StepFiles
from zeroshard.core.boxes import Span, part_at
from zeroshard.core.placement import STATE, VALUE, Part
from zeroshard.core.values import decode
from zeroshard.errors import CheckpointError, ConfigError
from zeroshard.system.safe_files import NotReadable, from_json, read_file

_MOST_BYTES = 1 << 24  # of a config.json
Format = Literal["hf", "torch", "dcp"]
FORMATS: tuple[Format, ...] = ("hf", "torch", "dcp")


def export(
    step: Path,
    out: Path,
    to: Format,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    config: Path | None = None,
    progress: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write the step in the directory `step` to `out`, a new directory (a file for ``torch``).

    Parameters are converted to `dtype` (default: as they were saved), the rest keeps its own.
    `max_shard_bytes` and `config` are for ``hf``: a new file begins where one would have more
    bytes, and ``config.json`` is a copy of the file `config` (default: the file of the Transformers
    model which was saved, in the dtype of the export; none where it was another model). `progress`
    is told how many bytes were read.

    Raises CheckpointError for a damaged or incomplete checkpoint, for values that `dtype` cannot
    hold and where the disk is full; ConfigError where `out` is there, or `config` is no JSON.
    Nothing is left behind then.
    """
    with ExitStack() as stack:
        given = None
        if config is not None:
            try:
                given = read_file(config, _MOST_BYTES)
                is_config = isinstance(from_json(given), dict)
            except NotReadable as error:
                raise ConfigError(f"--config: {config} cannot be read: {error}") from None
            if not is_config:
                raise ConfigError(f"--config: {config} is no config.json: it holds no JSON object")
        source = _ExportedStep(step, dtype, stack, progress)
        items = source.items()
        num_bytes = sum(item.num_bytes for item in items)
        if to == "hf":
            with published(out, num_bytes) as working:
                _write_hf(source, items, working, max_shard_bytes)
                text = _saved_config(source, items) if given is None else given
                if text:
                    write_new(working / "config.json", len(text), [text])
        else:
            write = _write_torch if to == "torch" else _write_dcp
            num_bytes += sum(
                entry.num_bytes
                for entry in source.manifest.tensors
                if entry.parameter is not None and entry.kind.startswith(STATE)
            )
            with published(out, num_bytes) as working:
                write(source, items, working)


def whole_weights(
    step: Path, *, dtype: torch.dtype | None = None, frozen: bool = True
) -> dict[str, torch.Tensor]:
    """Return the weights and buffers of the step in the directory `step`, on CPU, tied ones under
    each of their names; without `frozen` no frozen parameter. Raises CheckpointError.
    """
    with ExitStack() as stack:
        source = _ExportedStep(step, dtype, stack, lambda num_bytes: None)
        held = source.manifest.parameters
        left_out = {name for name in held if not (frozen or held[name].trained)}
        return _model_state(source, [one for one in source.items() if one.name not in left_out])


@dataclass(frozen=True)
class _Item:
    """A parameter or a buffer on its way out."""

    name: str
    dtype: str  # there, as safetensors calls it
    entry: ParameterEntry
    pieces: tuple[TensorEntry, ...]  # in the order of their ranges; they cover it

    @property
    def num_bytes(self) -> int:
        return self.entry.numel * ITEMSIZE[self.dtype]


class _ExportedStep:
    """The step that is read: its tensors, verified, in row order, in the dtype they shall have."""

    def __init__(
        self,
        path: Path,
        dtype: torch.dtype | None,
        stack: ExitStack,
        progress: Callable[[int], None],
    ) -> None:
        self.path = path
        files = StepFiles(path, stack)
        self.manifest: Manifest = files.manifest()[0]
        self._dtype = dtype
        self._progress = progress
        self._shards = OpenShards(path, self.manifest, stack, open_file=files.open)
        self._pieces, self._loose = self.manifest.pieces(), self.manifest.loose()

    def items(self) -> list[_Item]:
        """Return all parameters and rank 0's buffers. Raises CheckpointError where one has gaps."""
        found = [self._item(name, VALUE, self._dtype) for name in self.manifest.parameters]
        for key, entry in self._loose.items():
            if key.startswith(BUFFER) and key.endswith("@0"):
                name = key.removeprefix(BUFFER).removesuffix("@0")
                shape = ParameterEntry(entry.shape, row_stride(entry.shape), trained=False)
                flat = replace(entry, start=0, stop=entry.numel)
                found.append(_Item(name, entry.dtype, shape, (flat,)))
        return found

    def extra_states(self) -> dict[str, Any]:
        """Return what modules' ``get_extra_state()`` had returned, of each the first rank's."""
        saved = self.manifest.states.get(OF_MODULES, {"same": {}})
        return ExtraStates.decoded(saved, lambda rank, key: self.fetch(key, rank))

    def fetch(self, key: str, rank: int = 0) -> torch.Tensor:
        """Return a tensor of its own, that `rank` has saved."""
        entry = self._loose[f"{key}@{rank}"]
        return self._shards.read(entry, 0, entry.numel).view(entry.shape).clone()

    def optimizer_state(self, name: str) -> dict[str, _Item]:
        """Return the tensors of the optimizer's state of a parameter, by key."""
        kinds = [kind for other, kind in self._pieces if other == name and kind.startswith(STATE)]
        return {kind.removeprefix(STATE): self._item(name, kind, None) for kind in kinds}

    def rows(self, item: _Item) -> Iterator[torch.Tensor]:
        """Yield a tensor in row order, 1-D, a chunk at a time, each valid until the next."""
        is_cut = any(piece.box for piece in item.pieces)
        in_rows = item.entry.stride == row_stride(item.entry.shape) or item.entry.numel < 2
        if in_rows and not is_cut:
            for _, chunk in self._chunks(item):
                yield chunk
        else:
            yield self.whole(item).view(-1)

    def whole(self, item: _Item) -> torch.Tensor:
        """Return a tensor in memory of its own, contiguous."""
        shape = item.entry.shape
        out = torch.empty(shape, dtype=DTYPES[item.dtype])
        whole = Span.of_all(Part.whole(shape), row_stride(shape))
        for span, chunk in self._chunks(item):
            copy_common(out, whole, chunk, span)
        return out

    def _item(self, name: str, kind: str, dtype: torch.dtype | None) -> _Item:
        entry = self.manifest.parameters[name]
        pieces = tuple(piece for piece in self._pieces.get((name, kind), ()) if piece.numel)
        for box in {piece.box for piece in pieces} or {()}:  # which are all of it, together
            numel = part_at(entry.shape, box).numel
            ends = [(piece.start, piece.stop) for piece in pieces if piece.box == box]
            edges = [0, *(edge for each in ends for edge in each), numel]
            for stop, start in list(pairwise(edges))[::2]:
                if stop != start:
                    raise CheckpointError(
                        f"{self.path} lacks elements {stop} to {start} of {kind} of parameter"
                        f" {name!r}{list(box) if box else ''}"
                    )
        code = pieces[0].dtype if pieces else "F32"
        if dtype is not None and DTYPES[code].is_floating_point:
            code = dtype_code(dtype, name)
        return _Item(name, code, entry, pieces)

    def _chunks(self, item: _Item) -> Iterator[tuple[Span, torch.Tensor]]:
        """Yield the elements of a tensor in the order of its memory, and which those are."""
        for piece in item.pieces:
            span = stored_span(item.entry, piece)
            # a chunk at a time is read, and so hashed, once
            step = max(1, self.manifest.chunk_bytes // ITEMSIZE[piece.dtype])
            for start in range(0, piece.numel, step):
                stop = min(start + step, piece.numel)
                chunk = self._shards.read(piece, start, stop)
                self._progress(chunk.numel() * chunk.element_size())
                here = replace(span, start=span.start + start, stop=span.start + stop)
                yield here, _converted(chunk, DTYPES[item.dtype], item.name)


def _converted(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    if values.dtype is dtype:
        return values
    out = values.to(dtype)
    if not out.isfinite().all() and bool((values.isfinite() & ~out.isfinite()).any()):
        largest = values[values.isfinite()].abs().max().item()
        raise CheckpointError(
            f"parameter {name!r} has a value of {largest:g}, more than {dtype} holds: export to"
            " bf16 or fp32"
        )
    return out


# ------------------------------------------------------------------ Transformers


def _write_hf(source: _ExportedStep, items: list[_Item], directory: Path, max_bytes: int) -> None:
    directory.mkdir()
    groups = _split(items, max_bytes)
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        if len(groups) == 1:
            name = "model.safetensors"
        entries = [(item.name, item.dtype, item.entry.shape, item.num_bytes) for item in group]
        header = header_of(entries, {"format": "pt"})
        total = len(header) + sum(item.num_bytes for item in group)
        write_new(directory / name, total, _parts(source, header, group))
        weight_map |= {item.name: name for item in group}
    if len(groups) > 1:
        size = sum(item.num_bytes for item in items)
        index = {
            "metadata": {"total_size": size},
            "weight_map": dict(sorted(weight_map.items())),
        }
        text = (json.dumps(index, indent=2) + "\n").encode()
        write_new(directory / "model.safetensors.index.json", len(text), [text])


def _saved_config(source: _ExportedStep, items: list[_Item]) -> bytes:
    """Return the config.json of the model that was saved, with the dtype that its parameters have
    in the export; nothing of a model that had none.
    """
    if not source.manifest.model_config:
        return b""
    try:
        fields = dict(from_json(source.manifest.model_config.encode()))
    except (TypeError, ValueError, NotReadable) as odd:
        raise CheckpointError(
            f"{source.path} makes no sense: its model_config: {_one_line(odd)}"
        ) from None
    parameters = source.manifest.parameters
    dtypes = {DTYPES[item.dtype] for item in items if item.name in parameters}
    floating = {dtype for dtype in dtypes if dtype.is_floating_point}
    if len(floating) == 1:
        key = "torch_dtype" if "torch_dtype" in fields else "dtype"
        fields[key] = str(floating.pop()).removeprefix("torch.")
    return (json.dumps(fields, indent=2, sort_keys=True) + "\n").encode()


def _parts(source: _ExportedStep, header: bytes, group: list[_Item]) -> Iterator[Any]:
    yield header
    for item in group:
        for chunk in source.rows(item):
            yield as_bytes(chunk)


def _split(items: list[_Item], max_bytes: int) -> list[list[_Item]]:
    """Return `items` in files of at most `max_bytes`, in order; a larger item gets its own file."""
    groups: list[list[_Item]] = [[]]
    filled = 0
    for item in items:
        if groups[-1] and filled + item.num_bytes > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += item.num_bytes
    return groups


# ------------------------------------------------------------------ torch


def _model_state(source: _ExportedStep, items: list[_Item]) -> dict[str, torch.Tensor]:
    """Return a state_dict; the names of a tied parameter share one tensor."""
    state: dict[str, torch.Tensor] = {}
    for item in items:
        tensor = source.whole(item)
        for name in (item.name, *item.entry.aliases):
            state[name] = tensor
    return state


def _optimizer_state(
    source: _ExportedStep,
) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return the optimizer's state by parameter and key, and its param groups."""
    saved = source.manifest.optimizer
    assert saved is not None

    def decoded(values: dict[str, Any]) -> dict[str, Any]:
        return {key: decode(value, source.fetch) for key, value in values.items()}

    try:
        state = {
            name: whole_states(decoded(scalars), source.manifest.parameters[name].shape)
            for name, scalars in saved["scalars"].items()
        }
        groups = [
            {**decoded(group["options"]), "params": list(group["params"])}
            for group in saved["groups"]
        ]
    except (KeyError, TypeError, ValueError, AttributeError) as odd:
        raise CheckpointError(
            f"{source.path} makes no sense: its optimizer: {type(odd).__name__}: {odd}"
        ) from None
    for name in source.manifest.parameters:
        for key, item in source.optimizer_state(name).items():
            state.setdefault(name, {})[key] = source.whole(item)
    return state, groups


def _write_torch(source: _ExportedStep, items: list[_Item], path: Path) -> None:
    model = {**_model_state(source, items), **source.extra_states()}
    content: dict[str, Any] = {"model": model, "step": source.manifest.step}
    if source.manifest.optimizer is not None:
        content["optimizer"], content["param_groups"] = _optimizer_state(source)
        content["optimizer_class"] = source.manifest.optimizer.get("class")
    try:
        with path.open("xb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, RuntimeError) as error:  # torch says RuntimeError where the disk is full
        _raise_interrupt(error)
        raise CheckpointError(f"{path} cannot be written: {_one_line(error)}") from error


# ------------------------------------------------------------------ torch.distributed.checkpoint


def _write_dcp(source: _ExportedStep, items: list[_Item], directory: Path) -> None:
    """Write "model" and "optimizer" as torch's get_*_state_dict functions would give them."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    model = {**_model_state(source, items), **source.extra_states()}
    content: dict[str, Any] = {"model": model, "step": source.manifest.step}
    if source.manifest.optimizer is not None:
        state, groups = _optimizer_state(source)
        content["optimizer"] = {"state": state, "param_groups": groups}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group: no_dist says so
            save(content, storage_writer=FileSystemWriter(directory), no_dist=True)
    except CheckpointException as error:  # a BaseException, and its text is a traceback
        causes = [failure[0] for failure in error.failures.values()]
        for cause in causes:
            _raise_interrupt(cause)
        raise CheckpointError(
            f"{directory} cannot be written: {_one_line(causes[0] if causes else error)}"
        ) from error


def _raise_interrupt(error: BaseException) -> None:
    """Raise the Ctrl-C that has ended torch's writing: torch makes an error of its own from it."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, KeyboardInterrupt):
            raise inner
        inner = inner.__context__


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
