"""The manifest of a checkpoint: what is stored where, and the hash of every byte. Pure data;
docs/checkpoint-format.md describes it.

Invariant: `parse` returns a consistent Manifest (ranges inside shapes, every byte of a file in one
tensor, names without directories) or raises CheckpointError. The last line of the file is the hash
of all before it. Nothing is unpickled, and text whose values would take too much memory is refused
before it is parsed. Cost of reading: 6 us and 1.2 KB per tensor.
"""

from __future__ import annotations

import gc
import json
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import isfinite, prod
from reprlib import repr as brief
from sys import intern
from typing import Any

import xxhash

from zeroshard.core.boxes import Box, check_boxes
from zeroshard.errors import CheckpointError

__all__ = [
    "BUFFER", "CHUNK_BYTES", "FORMAT", "ITEMSIZE", "SHARD_NAME", "STATE", "VALUE", "VERSION",
    "Manifest", "ParameterEntry", "ShardEntry", "TensorEntry", "digest", "num_chunks", "row_stride",
]  # fmt: skip

FORMAT = "zeroshard checkpoint"
VERSION = 2  # of a step with boxes; one without is of version 1, as before there were boxes

CHUNK_BYTES = 4 << 20
# kinds of tensors: STATE and BUFFER go before the key or name
VALUE, STATE, BUFFER = "value", "state.", "buffer/"
MAX_BYTES = 512 << 20  # of a manifest's text
MAX_CHUNK_BYTES = 1 << 30  # a reader needs that much memory
MAX_HEADER_BYTES = 100_000_008  # safetensors reads no longer ones
# of states in JSON: values.py writes three levels for one of Python's, a hundred times
MAX_DEPTH = 320
ITEMSIZE = {  # by safetensors' names
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4,
    "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip

SHARD_NAME = re.compile(r"rank-\d{5,9}-of-\d{5,9}\.safetensors")
_TAIL = re.compile(r'\n "hash": "([0-9a-f]{32})"\n\}\n')
_TAIL_BYTES = len('\n "hash": ""\n}\n') + 32


def digest(data: Any) -> str:
    """Return the hash of `data` (bytes, or anything with a buffer) as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def num_chunks(num_bytes: int, chunk_bytes: int) -> int:
    """Return in how many chunks a tensor of `num_bytes` is hashed; an empty one in none."""
    return -(-num_bytes // chunk_bytes)


def row_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stride of a tensor of `shape` in row order."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass(frozen=True)
class ShardEntry:
    """A file of pieces."""

    name: str
    bytes: int
    header_bytes: int  # the eight of the length included; the data starts there
    header_hash: str


@dataclass(frozen=True)
class ParameterEntry:
    """A parameter. Ranges count its elements in the memory order of `stride`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    trained: bool
    aliases: tuple[str, ...] = ()  # other names of a tied one

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file: a range of one `kind` of a parameter, or a tensor of its own."""

    file: int
    offset: int  # bytes from the start of the data
    dtype: str
    shape: tuple[int, ...]
    hashes: tuple[str, ...]  # one per chunk
    kind: str  # of a parameter: "value", "state.exp_avg", "ema", ...
    parameter: str | None = None
    start: int = 0
    stop: int = 0
    box: Box = ()  # of the parameter, whose elements `start` and `stop` count; (): all of it

    @classmethod
    def piece(
        cls, name: str, kind: str, start: int, stop: int, dtype: str, box: Box = ()
    ) -> TensorEntry:
        """Return the entry of elements ``[start, stop)`` of a parameter, or of a box of it, not yet
        in a file.
        """
        return cls(0, 0, dtype, (stop - start,), (), kind, name, start, stop, box)

    @classmethod
    def loose(cls, kind: str, shape: tuple[int, ...], dtype: str) -> TensorEntry:
        """Return the entry of a tensor that is no piece of a parameter, not yet in a file."""
        return cls(0, 0, dtype, shape, (), kind)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.numel * ITEMSIZE[self.dtype]

    @property
    def key(self) -> str:
        """Its name in the safetensors file."""
        if self.parameter is None:
            return self.kind
        box = ",".join(f"{start}:{stop}" for start, stop in self.box)
        return f"{self.parameter}|{self.kind}|{self.start}:{self.stop}" + (f"|{box}" if box else "")


@dataclass(frozen=True)
class Manifest:
    """The content of one checkpoint."""

    step: int
    world: int
    written_by: str
    policy: str
    precision: str
    files: tuple[ShardEntry, ...]
    parameters: dict[str, ParameterEntry]
    tensors: tuple[TensorEntry, ...]
    # "class", "groups" (of "params" and "options"), "scalars" (by parameter)
    optimizer: dict[str, Any] | None
    # by name: {"same": value} or {"ranks": [value, ...]}
    states: dict[str, Any] = field(default_factory=dict)
    chunk_bytes: int = CHUNK_BYTES
    # where each rank was along the axes of the mesh; () where all were data parallel
    places: tuple[str, ...] = ()

    def pieces(self) -> dict[tuple[str, str], list[TensorEntry]]:
        """Return the pieces by (parameter, kind), in the order of their boxes and ranges."""
        found: dict[tuple[str, str], list[TensorEntry]] = {}
        for entry in self.tensors:
            if entry.parameter is not None:
                found.setdefault((entry.parameter, entry.kind), []).append(entry)
        for entries in found.values():
            entries.sort(key=lambda entry: (entry.box, entry.start))
        return found

    def loose(self) -> dict[str, TensorEntry]:
        """Return the tensors that are no pieces, by kind."""
        return {entry.kind: entry for entry in self.tensors if entry.parameter is None}

    def total_bytes(self) -> int:
        """The bytes of all files of the step."""
        return sum(file.bytes for file in self.files)

    def dump(self) -> bytes:
        """Return the text of the manifest, its hash in the last line."""
        tables = ("files", "parameters", "tensors")  # the last keys
        plain = {name: value for name, value in vars(self).items() if name not in tables}
        if not self.places:
            del plain["places"]
        version = VERSION if any(entry.box for entry in self.tensors) else 1
        data = {"format": FORMAT, "version": version, **plain}
        data["files"] = [asdict(file) for file in self.files]
        data["parameters"] = {
            name: {k: v for k, v in asdict(entry).items() if v != ()} | {"shape": entry.shape}
            for name, entry in self.parameters.items()
        }
        data["tensors"] = [_lean(entry) for entry in self.tensors]
        lines = [f" {json.dumps(key)}: {_spread(value)}" for key, value in data.items()]
        body = ("{\n" + ",\n".join(lines) + ",").encode()
        if _parsed_bytes(body) > _most_bytes(body):
            raise CheckpointError(
                "the states hold too many small values for a manifest: keep them in tensors or"
                " numpy arrays, which have files of their own"
            )
        return body + f'\n "hash": "{digest(body)}"\n}}\n'.encode()

    @classmethod
    def parse(cls, data: bytes, where: str) -> Manifest:
        """Read what `dump` wrote; `where` names it in errors. Raises CheckpointError."""
        if len(data) > MAX_BYTES:
            raise CheckpointError(
                f"{where} has {len(data)} bytes, more than the {MAX_BYTES} that a manifest may have"
            )
        found = _TAIL.fullmatch(data[-_TAIL_BYTES:].decode("latin-1"))
        if found is None or digest(memoryview(data)[:-_TAIL_BYTES]) != found[1]:
            raise CheckpointError(f"{where} is damaged: its hash does not fit its text")
        if _parsed_bytes(data) > _most_bytes(data):
            raise CheckpointError(
                f"{where} holds more values than a save writes: reading its {len(data)} bytes would"
                f" take {_parsed_bytes(data)} of memory"
            )
        with _no_collection():
            return _parse(data, where)


def _parsed_bytes(text: bytes) -> int:
    """Estimate the memory of the values in `text`; brackets alone take 20 times their length."""
    return 64 * text.count(b",") + 150 * (text.count(b"[") + text.count(b"{"))


def _most_bytes(text: bytes) -> int:
    """Return the memory limit of a manifest's values; tables of tensors take 6 times their text."""
    return 8 * len(text) + (128 << 20)


def _parse(text: bytes, where: str) -> Manifest:
    try:
        raw = json.loads(
            text, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not JSON: {_cut(error)}") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise CheckpointError(f"{where} is not a zeroshard checkpoint")
    _check_version(raw, where)
    try:
        manifest = _build(raw)
        _check(manifest)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {_cut(error)}"
        raise CheckpointError(f"{where} makes no sense: {what}") from None
    return manifest


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector: it would take half of the time and find nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _lean(entry: TensorEntry) -> dict[str, Any]:
    out = asdict(entry)
    if entry.parameter is None:
        del out["parameter"], out["start"], out["stop"]
    if not entry.box:
        del out["box"]
    return out


def _spread(value: Any) -> str:
    """Return JSON with one line per item of a list or object."""
    if not value or not isinstance(value, list | dict):
        return json.dumps(value, allow_nan=False)
    if isinstance(value, list):
        (first, last), keys = "[]", [""] * len(value)
    else:
        (first, last), keys = "{}", [f"{json.dumps(key)}: " for key in value]
        value = value.values()
    lines = [
        f"  {key}{json.dumps(item, allow_nan=False)}" for key, item in zip(keys, value, strict=True)
    ]
    return f"{first}\n" + ",\n".join(lines) + f"\n {last}"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {brief(twice)} stands there twice")
    return out


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):  # NaN, Infinity, 1e999: those have a form of their own
        raise ValueError(f"{text} is no number")
    return number


def _cut(error: Exception) -> str:
    """Return an error's text, cut off: names from the file may be of any length."""
    return f"{error!s:.300}"


def _check_version(raw: dict[str, Any], where: str) -> None:
    version = raw.get("version")
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{where} makes no sense: its format version is {brief(version)}")
    if version > VERSION:
        writer = brief(raw.get("written_by"))
        raise CheckpointError(
            f"{where} has format version {brief(version)}, written by {writer}, and this zeroshard"
            f" reads versions up to {VERSION}: use a newer zeroshard"
        )


def _build(raw: dict[str, Any]) -> Manifest:
    return Manifest(
        step=_whole(raw["step"], "step"),
        world=_whole(raw["world"], "world", least=1),
        written_by=_text(raw["written_by"]),
        policy=_text(raw["policy"]),
        precision=_text(raw["precision"]),
        files=tuple(
            ShardEntry(
                _text(f["name"]),
                _whole(f["bytes"], "bytes"),
                _whole(f["header_bytes"], "header_bytes"),
                _text(f["header_hash"]),
            )
            for f in _list(raw["files"])
        ),
        parameters={
            name: ParameterEntry(
                _wholes(p["shape"]),
                _wholes(p.get("stride", [])),
                _flag(p["trained"]),
                tuple(_text(a) for a in _list(p.get("aliases", []))),
            )
            for name, p in _object(raw["parameters"]).items()
        },
        tensors=tuple(_tensor(t) for t in _list(raw["tensors"])),
        optimizer=None if raw["optimizer"] is None else _object(raw["optimizer"]),
        states=_object(raw["states"]),
        chunk_bytes=_whole(raw["chunk_bytes"], "chunk_bytes", least=1),
        places=tuple(_text(place) for place in _list(raw.get("places", []))),
    )


def _tensor(raw: dict[str, Any]) -> TensorEntry:
    loose = (
        _whole(raw["file"], "file"),
        _whole(raw["offset"], "offset"),
        intern(_text(raw["dtype"])),
        _wholes(raw["shape"]),
        tuple(_text(h) for h in _list(raw["hashes"])),
        intern(_text(raw["kind"])),
    )
    if "parameter" not in raw:
        return TensorEntry(*loose)
    start, stop = _whole(raw["start"], "start"), _whole(raw["stop"], "stop")
    box = _box(raw["box"]) if "box" in raw else ()
    return TensorEntry(*loose, intern(_text(raw["parameter"])), start, stop, box)


def _box(raw: Any) -> Box:
    if not 0 < len(_list(raw)) <= 64:
        raise ValueError(f"a box of {len(raw)} dimensions")
    box = []
    for ends in raw:
        start, stop = _wholes(ends)
        if start >= stop:
            raise ValueError(f"a box without elements: {brief(raw)}")
        box.append((start, stop))
    return tuple(box)


def _check(manifest: Manifest) -> None:
    """Raise ValueError for an inconsistent manifest."""
    if not 0 < manifest.chunk_bytes <= MAX_CHUNK_BYTES:
        raise ValueError(f"chunks of {manifest.chunk_bytes} bytes")
    if len(manifest.files) != manifest.world:
        raise ValueError(f"{manifest.world} ranks wrote {len(manifest.files)} files")
    for file in manifest.files:
        if not SHARD_NAME.fullmatch(file.name):
            raise ValueError(f"{brief(file.name)} is no name of a file of pieces")
        if not 8 <= file.header_bytes <= min(file.bytes, MAX_HEADER_BYTES):
            raise ValueError(
                f"{file.name} has {file.bytes} bytes and a header of {file.header_bytes}"
            )
    if len({file.name for file in manifest.files}) != len(manifest.files):
        raise ValueError("a file stands there twice")
    for name, parameter in manifest.parameters.items():
        _check_stride(name, parameter)
    for entry in manifest.tensors:
        _check_tensor(manifest, entry)
    if manifest.places and (
        len(manifest.places) != manifest.world or len(set(manifest.places)) != manifest.world
    ):
        raise ValueError(f"{len(manifest.places)} places for {manifest.world} ranks")
    for (name, kind), entries in manifest.pieces().items():
        for one, other in pairwise(entries):
            if other.box == one.box and other.start < one.stop:
                raise ValueError(f"pieces of {kind} of {name!r} overlap at {other.start}")
        check_boxes(
            manifest.parameters[name].shape,
            {entry.box for entry in entries},
            f"the boxes of {kind} of {brief(name)}",
        )
    if len(manifest.loose()) != sum(entry.parameter is None for entry in manifest.tensors):
        raise ValueError("a tensor stands there twice")
    _check_places(manifest)
    _check_optimizer(manifest)
    _check_states(manifest)


def _check_stride(name: str, parameter: ParameterEntry) -> None:
    """Raise ValueError for a stride that would leave out elements, or hold one twice."""
    expected, fits = 1, len(parameter.stride) == len(parameter.shape)
    for step, size in sorted(zip(parameter.stride, parameter.shape, strict=False)):
        fits &= size == 1 or step == expected or not parameter.numel
        expected *= size
    if not fits:
        raise ValueError(
            f"{brief(name)} of shape {list(parameter.shape)} has stride {list(parameter.stride)}"
        )


def _check_tensor(manifest: Manifest, entry: TensorEntry) -> None:
    if entry.file >= len(manifest.files) or entry.dtype not in ITEMSIZE:
        raise ValueError(
            f"{entry.key} lies in file {entry.file} of {len(manifest.files)}, as {entry.dtype!r}"
        )
    file = manifest.files[entry.file]
    if file.header_bytes + entry.offset + entry.num_bytes > file.bytes:
        raise ValueError(f"{entry.key} ends behind the end of {file.name}")
    if len(entry.hashes) != num_chunks(entry.num_bytes, manifest.chunk_bytes):
        raise ValueError(f"{entry.key} has {len(entry.hashes)} hashes for {entry.num_bytes} bytes")
    if entry.parameter is not None:
        parameter = _parameter(manifest, entry.parameter)
        numel = prod(stop - start for start, stop in entry.box) if entry.box else parameter.numel
        is_range = 0 <= entry.start <= entry.stop <= numel
        if not is_range or entry.shape != (entry.stop - entry.start,):
            shape = list(parameter.shape)
            raise ValueError(f"{entry.key} does not fit a parameter of shape {shape}")


def _check_places(manifest: Manifest) -> None:
    """Raise ValueError for bytes of a file that belong to two tensors, or to none."""
    ends = [0] * len(manifest.files)
    for entry in sorted(manifest.tensors, key=lambda one: (one.file, one.offset, one.num_bytes)):
        if entry.num_bytes and entry.offset != ends[entry.file]:
            raise ValueError(
                f"{entry.key} lies at byte {entry.offset} of the data, and the tensor before it"
                f" ends at {ends[entry.file]}"
            )
        ends[entry.file] += entry.num_bytes
    for file, end in zip(manifest.files, ends, strict=True):
        if file.header_bytes + end != file.bytes:
            raise ValueError(
                f"{file.name} has {file.bytes} bytes, and its tensors end at"
                f" {file.header_bytes + end}"
            )


def _check_optimizer(manifest: Manifest) -> None:
    if manifest.optimizer is None:
        return
    _text(manifest.optimizer["class"])
    for group in _list(manifest.optimizer["groups"]):
        if _object(group["options"]).keys() & {"params", "param_names"}:
            raise ValueError("the options of a param group name its parameters")
        _check_depth(group["options"])
        for name in _list(group["params"]):
            _parameter(manifest, name)
    for name, scalars in _object(manifest.optimizer["scalars"]).items():
        _parameter(manifest, name)
        _check_depth(_object(scalars))


def _check_states(manifest: Manifest) -> None:
    for name, state in manifest.states.items():
        is_same = _object(state).keys() == {"same"}
        of_each = state.keys() == {"ranks"} and len(_list(state["ranks"])) == manifest.world
        if not is_same and not of_each:
            raise ValueError(
                f"the state {brief(name)} is neither the same on all ranks nor one for each of"
                f" {manifest.world}"
            )
        _check_depth(state)


def _parameter(manifest: Manifest, name: Any) -> ParameterEntry:
    if _text(name) not in manifest.parameters:
        raise ValueError(f"there is no parameter {brief(name)}")
    return manifest.parameters[name]


def _check_depth(value: Any) -> None:
    """Raise ValueError for values nested too deep for recursive functions."""
    level = [value]
    for _ in range(MAX_DEPTH):
        nested = [item for item in level if isinstance(item, list | dict)]
        lists = [item if isinstance(item, list) else item.values() for item in nested]
        level = [item for items in lists for item in items]
        if not level:
            return
    raise ValueError(f"values are nested more than {MAX_DEPTH} deep")


def _whole(value: Any, what: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value < 1 << 63:
        raise ValueError(f"{what} is {brief(value)}, not a whole number from {least}")
    return value


def _wholes(values: Any) -> tuple[int, ...]:
    if len(_list(values)) > 64:
        raise ValueError(f"a shape of {len(values)} dimensions")
    out = tuple(_whole(value, "a size") for value in values)
    if prod(size for size in out if size) >= 1 << 63:
        raise ValueError(f"a shape of {list(out)} is too large")
    return out


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{brief(value)} is no object")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{brief(value)} is no list")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{brief(value)} is no text")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{brief(value)} is neither true nor false")
    return value
