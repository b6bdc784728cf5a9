"""Read weights in Transformers' format (safetensors, one file or an index), pieces per rank.

A piece is a range of a parameter's elements, so it lies in a range of rows of the tensor in the
file: at most two rows more than the piece are read. No rank holds a whole parameter, except where
its memory is not in row order (channels_last).

Of a DTensor the rank's own part is read: its columns of its rows.

Invariant: everything is compared (missing, unexpected, shapes, two tensors for one parameter)
before anything is written. Nothing is unpickled. Cost: ``LoadReport.bytes_read``; replicated
weights are read whole on every rank, and so are tensors of all names of a tied parameter, to be
compared, where the files hold several.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from zeroshard.checkpoint.manifest import row_stride
from zeroshard.checkpoint.rank_part import (
    Experts,
    names_of,
    persistent_buffers,
    whole_parts,
)
from zeroshard.checkpoint.shard_files import copy_common
from zeroshard.core.boxes import Span
from zeroshard.core.placement import Part
from zeroshard.errors import CheckpointError, ConfigError
from zeroshard.nn.deferred import allocate
from zeroshard.runtime.engine import Engine, states_of
from zeroshard.state.local import local_of, part_of
from zeroshard.system.safe_files import NotReadable, open_file, read_json

_INDEX = "model.safetensors.index.json"
_BLOCK = 1 << 22  # elements of two tensors that are compared at a time


@dataclass
class LoadReport:
    """The result of `load_pretrained` on this rank."""

    # parameters and persistent buffers that the files lack
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)  # tensors in the files that the model lacks
    bytes_read: int = 0


def load_pretrained(
    target: nn.Module | Engine,
    directory: str | Path,
    *,
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
) -> LoadReport:
    """Fill a sharded model (give its engine; collective) or a plain one from safetensors files.

    `directory` holds ``model.safetensors``, or ``model.safetensors.index.json`` and the files it
    names; it may be one file, too. A tensor that several files hold is read from the file that the
    index says. `rename` maps a name in the files to the model's. Tied parameters are read under
    whichever of their names is there. Numbers are converted to the dtype at rest (fp32 masters take
    an fp32 file's full precision). Optimizer state is left alone.

    Raises CheckpointError naming missing and unexpected tensors (only reported with `strict` off),
    tensors of another shape, and two tensors for one parameter, before anything is changed;
    PlanMismatch where another rank does, or where `rename` gives other names there. Nothing is
    downloaded: `directory` lies on this machine. Other arguments are a ConfigError.
    """
    _check_arguments(target, directory)
    report = LoadReport()
    model = target.module if isinstance(target, Engine) else target
    experts = Experts.of(target) if isinstance(target, Engine) else Experts(model, {})
    with ExitStack() as stack:
        together: AbstractContextManager[Any] = nullcontext()
        if isinstance(target, Engine):
            together = states_of(target).peers.together("zs.load_pretrained()")
        with together as meeting:
            files = _TensorFiles(Path(directory), rename or (lambda name: name), stack)
            found = _match(model, files, report, experts)
            both = {"missing": report.missing, "unexpected": report.unexpected}
            if strict and (report.missing or report.unexpected):
                parts = [f"{what} {_some(names)}" for what, names in both.items() if names]
                raise CheckpointError(
                    f"{directory} does not fit {type(model).__name__}: {'; '.join(parts)};"
                    " strict=False loads what fits"
                )
            own = experts.divided()  # of these each rank misses others
            said = {what: ", ".join(n for n in both[what] if n not in own) for what in both}
            if meeting is not None:
                meeting.compare(said | {"names of the tensors, digest": files.digest()})
        with torch.no_grad():
            for buffer, name in found.buffers:
                files.fill(name, buffer)
            if isinstance(target, Engine):
                _fill_engine(target, experts, files, found)
            else:
                present = [
                    parameter
                    for parameter in model.parameters()
                    if id(parameter) in found.parameters
                ]
                allocate(*map(local_of, present))  # deferred ones
                for parameter in present:
                    files.fill(found.parameters[id(parameter)], parameter)
    report.bytes_read = files.bytes_read
    return report


def _fill_engine(engine: Engine, experts: Experts, files: _TensorFiles, found: _Matches) -> None:
    parts = whole_parts(engine, experts)
    with states_of(engine).rewriting():
        for piece in states_of(engine).resting_pieces():
            name = found.parameters.get(id(piece.parameter))
            if name is not None:
                part, _ = parts[piece.name]
                own = Part.whole(part.sizes)
                rows = Span.of_all(own, row_stride(own.sizes))
                wanted = Span(own, piece.stride, piece.start, piece.stop)
                if wanted.order == rows.order:
                    piece.write(files.read(name, part, piece.start, piece.stop))
                else:
                    block = files.read(name, part, 0, part.numel)
                    numbers = block.new_empty(wanted.numel)
                    copy_common(numbers, wanted, block, rows)
                    piece.write(numbers)
    states_of(engine).overwritten(found.parameters)


class _TensorFiles:
    """The tensors of all files, by the model's names."""

    def __init__(self, path: Path, rename: Callable[[str], str], stack: ExitStack) -> None:
        self.bytes_read = 0
        # model's name -> open file, name there, which file
        self._tensors: dict[str, tuple[Any, str, Path]] = {}
        for file, opened, there in open_tensors(path, stack):
            name = rename(there)
            if name in self._tensors:
                _, other, before = self._tensors[name]
                raise CheckpointError(
                    f"two tensors are for {name!r}: {other!r} in {before} and {there!r} in {file};"
                    " give them different names with rename=, or name one file"
                )
            self._tensors[name] = (opened, there, file)

    def names(self) -> Iterable[str]:
        return self._tensors

    def digest(self) -> str:
        """Return what differs where a tensor of the files has another name in the model."""
        names = sorted((name, there) for name, (_, there, _) in self._tensors.items())
        return sha256(repr(names).encode(errors="surrogatepass")).hexdigest()[:16]

    def require_equal(self, name: str, other: str, part: Part) -> None:
        """Raise CheckpointError where part of two tensors for one parameter, `name` and `other`,
        is not the same.
        """
        for start in range(0, part.numel, _BLOCK):
            stop = min(start + _BLOCK, part.numel)
            first, second = (self.read(one, part, start, stop) for one in (name, other))
            if not torch.equal(first, second.to(first.dtype)):
                files = [self._tensors[one][2] for one in (name, other)]
                raise CheckpointError(
                    f"{name!r} in {files[0]} and {other!r} in {files[1]} differ, and are one tied"
                    " parameter of the model: untie it, or leave one tensor out of the files"
                )

    def shape(self, name: str) -> tuple[int, ...]:
        file, there, _ = self._tensors[name]
        return tuple(file.get_slice(there).get_shape())

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Fill `tensor`, or the local part of a DTensor."""
        part, here = part_of(name, tensor), local_of(tensor)
        if part.numel:
            here.copy_(self.read(name, part, 0, part.numel).view(part.sizes))

    def read(self, name: str, part: Part, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` of a part of a tensor, in row order, 1-D, in the file's
        dtype. It has elements.
        """
        file, there, _ = self._tensors[name]
        if not part.shape:
            rows: torch.Tensor = file.get_tensor(there)
            self.bytes_read += rows.numel() * rows.element_size()
            return rows.reshape(-1)[start:stop]
        # the rows of the first dimension that has several
        axis = next((axis for axis, size in enumerate(part.sizes) if size > 1), 0)
        row = prod(part.sizes[axis + 1 :])
        first, last = start // row, -(-stop // row)
        box = [slice(at, at + size) for at, size in zip(part.start, part.sizes, strict=True)]
        box[axis] = slice(part.start[axis] + first, part.start[axis] + last)
        rows = file.get_slice(there)[tuple(box)]
        self.bytes_read += rows.numel() * rows.element_size()
        return rows.reshape(-1)[start - first * row : stop - first * row]


def open_tensors(path: Path, stack: ExitStack) -> Iterator[tuple[Path, Any, str]]:
    """Open the safetensors files that `path` is, holds or indexes until `stack` ends; yield the
    file, what `safe_open` returns for it, and the name of each tensor.

    A tensor that the index places in one file is not yielded from the others. Raises
    CheckpointError.
    """
    files, weight_map = _weight_files(path)
    for file in files:
        try:
            open_file(file).close()  # a pipe would be waited for
            opened = stack.enter_context(safe_open(file, framework="pt"))
        except (SafetensorError, NotReadable, OSError) as error:
            raise CheckpointError(f"{file} cannot be read as safetensors: {error}") from error
        for name in opened.keys():  # noqa: SIM118 (not a dict)
            if weight_map.get(name, file.name) == file.name:
                yield file, opened, name


def _check_arguments(target: object, directory: object) -> None:
    """Raise ConfigError for anything but an engine or a module, and a path."""
    models = (nn.Module, Engine)
    if not isinstance(target, models) or not isinstance(directory, (str, Path)):
        swapped = " (target comes first, then directory)" if isinstance(directory, models) else ""
        raise ConfigError(
            f"load_pretrained() takes an Engine or a module and a path, not a"
            f" {type(target).__name__} and a {type(directory).__name__}{swapped}"
        )


def _weight_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the safetensors files that `path` is, holds or indexes, and the index: a tensor's name
    -> its file's. Raises CheckpointError.
    """
    if path.is_file() and path.suffix == ".safetensors":
        return [path], {}
    index = path / _INDEX
    if index.is_file():
        try:
            weight_map = dict(read_json(index)["weight_map"])
            names = sorted(set(weight_map.values()))
            outside = [name for name in names if Path(name).name != name]
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            what = f"{index} is not an index of safetensors files"
            raise CheckpointError(f"{what}: {error!r}") from error
        if outside:
            raise CheckpointError(f"{index} names a file outside its directory: {outside[0]!r}")
        return [path / name for name in names], weight_map
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"], {}
    if not path.exists():
        hub = re.fullmatch(r"[\w.-]+/[\w.-]+", str(path)) is not None
        raise CheckpointError(
            f"{path} is not on this machine, and load_pretrained() downloads nothing: give it a"
            " directory of safetensors"
            + (f" (`hf download {path} --local-dir DIR` makes one)" if hub else "")
        )
    raise CheckpointError(f"{path} holds neither model.safetensors nor {_INDEX}")


@dataclass
class _Matches:
    # id of the parameter -> name in the files
    parameters: dict[int, str] = field(default_factory=dict)
    buffers: list[tuple[torch.Tensor, str]] = field(default_factory=list)


def _match(model: nn.Module, files: _TensorFiles, report: LoadReport, experts: Experts) -> _Matches:
    """Find every parameter and persistent buffer; raise CheckpointError for another shape."""
    left = dict.fromkeys(files.names())
    found = _Matches()
    names_by_id, divided = names_of(model), experts.divided()
    for parameter in model.parameters():
        local = names_by_id[id(parameter)]
        names = [experts.name(name) for name in local]
        whole = experts.part(local[0], Part.whole(tuple(parameter.shape)))
        here = [name for name in names if name in left]
        for name in here:
            del left[name]
            _require_shape(name, whole.shape, files)
        for name in here[1:]:
            files.require_equal(here[0], name, whole)
        if here:
            found.parameters[id(parameter)] = here[0]
        else:
            report.missing.append(names[0])
    for name, buffer in persistent_buffers(model).items():
        if name in left:
            del left[name]
            _require_shape(name, tuple(buffer.shape), files)
            found.buffers.append((buffer, name))
        else:
            report.missing.append(name)
    report.unexpected = [name for name in left if name not in divided]
    return found


def _require_shape(name: str, shape: tuple[int, ...], files: _TensorFiles) -> None:
    there = files.shape(name)
    if there != shape:
        raise CheckpointError(
            f"tensor {name!r} is {list(there)} in the files and {list(shape)} in the model"
        )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) for name in names[:3]) + more
