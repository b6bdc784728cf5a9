"""The manifest of a checkpoint: where each tensor is stored, and the hash of every byte. Pure data;
docs/checkpoint-format.md describes it.

The types of the fields are checked by pydantic, from the annotations of the dataclasses below; how
they fit together is checked by `_check`.

Invariant: `parse` returns a consistent Manifest (ranges inside shapes, every byte of a file in one
tensor, names without directories) or raises CheckpointError. The last line of the file is the hash
of all before it. Nothing is unpickled, and text with values that would take too much memory is
refused before it is parsed. Cost of reading: 5 us and 1.2 KB per tensor.
"""

from __future__ import annotations

import gc
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import isfinite, prod
from reprlib import repr as brief
from sys import intern
from typing import Annotated, Any, TypeVar

import xxhash
from pydantic import (
    AfterValidator,
    FailFast,
    Field,
    InstanceOf,
    PlainValidator,
    Strict,
    TypeAdapter,
    ValidationError,
)

from zeroshard.core.boxes import Box, check_boxes
from zeroshard.core.layout import Range
from zeroshard.errors import CheckpointError
from zeroshard.system.safe_files import is_deeper

FORMAT = "zeroshard checkpoint"
VERSION = 2  # of a step with boxes, or states of parts; others are of version 1, as before

CHUNK_BYTES = 4 << 20
BUFFER = "buffer/"  # before the name of one
MAX_BYTES = 512 << 20  # of a manifest's text
MAX_CHUNK_BYTES = 1 << 30  # a reader needs that much memory
MAX_HEADER_BYTES = 100_000_008  # safetensors reads no longer ones
# of states in JSON: core/values.py writes three levels for one of Python's, a hundred times
MAX_DEPTH = 320
ITEMSIZE = {  # by safetensors' names
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4,
    "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip

SHARD_NAME = re.compile(r"rank-\d{5,9}-of-\d{5,9}\.safetensors")
_TAIL = re.compile(r'\n "hash": "([0-9a-f]{32})"\n\}\n')
_HEAD = re.compile(
    rb'\{\n "format": "[^"]*",\n "version": \d+,\n "step": \d+,\n(?: "branch": (\d{1,18}),)?'
)
HEAD_BYTES = 256
_TAIL_BYTES = len('\n "hash": ""\n}\n') + 32


def digest(data: Any) -> str:
    """Return the hash of `data` (bytes, or anything with a buffer) as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def num_chunks(num_bytes: int, chunk_bytes: int) -> int:
    """Return in how many chunks a tensor of `num_bytes` is hashed; an empty one in none."""
    return -(-num_bytes // chunk_bytes)


def shard_name(rank: int, world: int) -> str:
    """Return the name of the file of one of `world` ranks."""
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


CUT = "@cut"  # after a key: which tensors of a state are cut with its parameter
_RANGED = re.compile(r"(.+)@(\d+):(\d+)", re.DOTALL)


def ranged(key: str, start: int, stop: int) -> str:
    """Return under which name an optimizer's state `key` of elements [start, stop) of a parameter
    is saved, that is kept of these alone.
    """
    return f"{key}@{start}:{stop}"


def range_in(name: str, numel: int) -> tuple[str, Range]:
    """Return the key and the elements that a state was kept of: all `numel` if not `ranged`."""
    found = _RANGED.fullmatch(name)
    return (found[1], (int(found[2]), int(found[3]))) if found else (name, (0, numel))


def row_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stride of a tensor of `shape` in row order."""
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


# ------------------------------------------------------------------ types of the fields


def _bounded(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) > 64:
        raise ValueError(f"a shape of {len(shape)} dimensions")
    if prod(size for size in shape if size) >= 1 << 63:
        raise ValueError(f"a shape of {list(shape)} is too large")
    return shape


def _with_elements(box: Box) -> Box:
    if not 0 < len(box) <= 64:
        raise ValueError(f"a box of {len(box)} dimensions")
    if any(start >= stop for start, stop in box):
        raise ValueError(f"a box without elements: {brief(box)}")
    return box


_T = TypeVar("_T")
# of a list of millions, the first error ends the validation
_List = Annotated[tuple[_T, ...], FailFast()]
_Whole = Annotated[int, Strict(), Field(ge=0, lt=1 << 63)]
_Positive = Annotated[_Whole, Field(ge=1)]
_Flag = Annotated[bool, Strict()]
_Text = InstanceOf[str]  # as JSON has it, with surrogates that pydantic's own `str` refuses
_Word = Annotated[_Text, AfterValidator(intern)]  # one that many entries have
_Shape = Annotated[_List[_Whole], AfterValidator(_bounded)]
_Box = Annotated[_List[tuple[_Whole, _Whole]], AfterValidator(_with_elements)]


# ------------------------------------------------------------------ entries


@dataclass(frozen=True)
class ShardEntry:
    """A file of pieces."""

    name: _Text
    bytes: _Whole
    header_bytes: _Whole  # the eight of the length included; the data starts there
    header_hash: _Text


@dataclass(frozen=True)
class ParameterEntry:
    """A parameter. Ranges count its elements in the memory order of `stride`."""

    shape: _Shape
    stride: _Shape
    trained: _Flag
    aliases: _List[_Text] = ()  # other names of a tied one

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file: a range of one `kind` of a parameter, or a tensor of its own."""

    file: _Whole
    offset: _Whole  # bytes from the start of the data
    dtype: _Word
    shape: _Shape
    hashes: _List[_Text]  # one per chunk
    kind: _Word  # of a parameter: "value", "state.exp_avg", "ema", ...
    parameter: _Word | None = None
    start: _Whole = 0
    stop: _Whole = 0
    box: _Box = ()  # of the parameter; `start` and `stop` count its elements; (): all of it

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

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are written: of a loose tensor no range, of a whole one no box."""
        last = 6 if self.parameter is None else 10 if self.box else 9
        return {name: getattr(self, name) for name in self.__slots__[:last]}


_PARAMETER = TypeAdapter(ParameterEntry)


def _entries(raw: Any) -> dict[str, ParameterEntry]:
    """Validate one after another: of a whole dictionary pydantic would collect every error."""
    return {
        name: _PARAMETER.validate_python({"stride": (), **one} if isinstance(one, dict) else one)
        for name, one in _require(dict, raw).items()
    }


Entries = Annotated[dict[str, ParameterEntry], PlainValidator(_entries)]


@dataclass(frozen=True)
class Manifest:
    """The content of one checkpoint."""

    step: _Whole
    world: _Positive
    written_by: _Text
    policy: _Text
    precision: _Text
    files: _List[ShardEntry]
    parameters: Entries
    tensors: _List[TensorEntry]
    # "class", "groups" (of "params" and "options"), "scalars" (by parameter)
    optimizer: dict[_Text, Any] | None
    # by name: {"same": value} or {"ranks": [value, ...]}
    states: dict[_Text, Any] = field(default_factory=dict)
    chunk_bytes: _Positive = CHUNK_BYTES
    # where each rank was along the axes of the mesh; () where all were data parallel
    places: _List[_Text] = ()
    # of a run with leaves: what its bits depend on (runtime/access.py)
    curve: dict[_Text, _Text] = field(default_factory=dict)
    model_config: _Text = ""  # of a Transformers model: the text of its config.json
    # how often the run had gone back below a step that was there: of two steps, the one on the
    # later branch was saved last, and on one branch the one with the higher number
    branch: _Whole = 0

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
        for name in ("places", "curve", "model_config", "branch"):
            if not plain[name]:
                del plain[name]
        scalars = {} if self.optimizer is None else self.optimizer["scalars"]
        keys = chain.from_iterable(scalars.values())
        has_parts = any(key.endswith(CUT) or _RANGED.fullmatch(key) for key in keys)
        version = VERSION if has_parts or any(entry.box for entry in self.tensors) else 1
        head = ("step", "branch")  # which `branch_of` reads
        data = {"format": FORMAT, "version": version}
        data |= {name: plain.pop(name) for name in head if name in plain}
        data |= plain
        data["files"] = [vars(file) for file in self.files]
        data["parameters"] = {
            name: {k: v for k, v in vars(entry).items() if v != ()} | {"shape": entry.shape}
            for name, entry in self.parameters.items()
        }
        data["tensors"] = [entry.to_json() for entry in self.tensors]
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

    @staticmethod
    def branch_of(text: bytes) -> int | None:
        """Return the branch that the first `HEAD_BYTES` of a manifest say, without a look at its
        hash; None where they are not a manifest's.
        """
        found = _HEAD.match(text)
        return None if found is None else int(found[1] or 0)

    @classmethod
    def of_ranks(cls, heading: dict[str, Any], indices: Sequence[dict[str, Any]]) -> Manifest:
        """Return the manifest of a step: the `heading` of a rank, the `indices` of all in order
        (`RankPart`).
        """
        states: dict[str, Any] = dict(indices[0]["states"])
        for name, value in states.items():
            if "same" not in value:
                states[name] = {"ranks": [index["states"][name]["own"] for index in indices]}
        optimizer = heading["optimizer"]
        if optimizer is not None:
            scalars = dict[str, Any]()
            for index in reversed(indices):
                for name, numbers in index["scalars"].items():
                    scalars.setdefault(name, {}).update(numbers)
            optimizer = {**optimizer, "scalars": scalars}
        files = [index["file"] for index in indices]
        tensors = [entry for index in indices for entry in index["tensors"]]
        tables = {"optimizer": optimizer, "files": files, "tensors": tensors, "states": states}
        return cls.build({**heading, **tables})

    @classmethod
    def build(cls, raw: Any) -> Manifest:
        """Return the manifest of JSON with fields of their types; how they fit together is not
        checked. Raises ValueError.
        """
        try:
            return _MANIFEST.validate_python(raw)
        except ValidationError as error:
            raise ValueError(_first(error)) from None


_MANIFEST = TypeAdapter(Manifest)


# ------------------------------------------------------------------ text


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
        raise CheckpointError(f"{where} is not JSON: {error!s:.300}") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise CheckpointError(f"{where} is not a zeroshard checkpoint")
    version = raw.get("version")
    if type(version) is not int or version < 1:
        raise CheckpointError(f"{where} makes no sense: its format version is {brief(version)}")
    if version > VERSION:
        writer = brief(raw.get("written_by"))
        raise CheckpointError(
            f"{where} has format version {brief(version)}, written by {writer}, and this zeroshard"
            f" reads versions up to {VERSION}: use a newer zeroshard"
        )
    try:
        _ = raw["states"], raw["chunk_bytes"]  # optional in Manifest, not in a file
        manifest = Manifest.build(raw)
        del raw  # half of the memory
        _check(manifest)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error!s:.300}"  # names in it may be of any length
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


_encode = json.JSONEncoder(allow_nan=False).encode


def _spread(value: Any) -> str:
    """Return JSON with one line per item of a list or object."""
    if not value or not isinstance(value, list | dict):
        return _encode(value)
    if isinstance(value, list):
        (first, last), keys = "[]", [""] * len(value)
    else:
        (first, last), keys = "{}", [f"{json.dumps(key)}: " for key in value]
        value = value.values()
    lines = [f"  {key}{_encode(item)}" for key, item in zip(keys, value, strict=True)]
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


_WRONG = {  # pydantic's types of errors
    "bool_type": "neither true nor false", "dataclass_type": "no object", "dict_type": "no object",
    "is_instance_of": "no text", "tuple_type": "no list",
}  # fmt: skip


def _first(error: ValidationError) -> str:
    """Return the first of pydantic's errors in one line."""
    first = error.errors(include_url=False)[0]
    name, kind, value = ("", *first["loc"])[-1], first["type"], brief(first["input"])
    if kind in _WRONG:
        return f"{value} is {_WRONG[kind]}"
    if kind in ("greater_than_equal", "int_type", "less_than"):
        what = "a size" if isinstance(name, int) else name
        least = int(name in ("world", "chunk_bytes"))
        return f"{what} is {value}, not a whole number from {least}"
    if kind == "missing":
        return f"not enough values to unpack: {value}" if name == 1 else f"{name!r} is missing"
    return first["msg"].removeprefix("Value error, ")


# ------------------------------------------------------------------ consistency


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
        # a stride must leave out no element, and hold none twice
        expected, fits = 1, len(parameter.stride) == len(parameter.shape)
        for step, size in sorted(zip(parameter.stride, parameter.shape, strict=False)):
            fits &= size == 1 or step == expected or not parameter.numel
            expected *= size
        if not fits:
            raise ValueError(
                f"{brief(name)} of shape {list(parameter.shape)} has stride"
                f" {list(parameter.stride)}"
            )
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
    if entry.parameter is None:
        if entry.stop or entry.box:
            raise ValueError(f"{entry.key} has a range, and is of no parameter")
    else:
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
    _require(str, manifest.optimizer["class"])
    for group in _require(list, manifest.optimizer["groups"]):
        if _require(dict, group["options"]).keys() & {"params", "param_names"}:
            raise ValueError("the options of a param group name its parameters")
        _check_depth(group["options"])
        for name in _require(list, group["params"]):
            _parameter(manifest, name)
    for name, scalars in _require(dict, manifest.optimizer["scalars"]).items():
        _parameter(manifest, name)
        _check_depth(_require(dict, scalars))


def _check_states(manifest: Manifest) -> None:
    for name, state in manifest.states.items():
        is_same = _require(dict, state).keys() == {"same"}
        of_each = (
            state.keys() == {"ranks"} and len(_require(list, state["ranks"])) == manifest.world
        )
        if not is_same and not of_each:
            raise ValueError(
                f"the state {brief(name)} is neither the same on all ranks nor one for each of"
                f" {manifest.world}"
            )
        _check_depth(state)


def _parameter(manifest: Manifest, name: Any) -> ParameterEntry:
    if _require(str, name) not in manifest.parameters:
        raise ValueError(f"there is no parameter {brief(name)}")
    return manifest.parameters[name]


def _check_depth(value: Any) -> None:
    """Raise ValueError for values nested too deep for recursive functions."""
    if is_deeper(value, MAX_DEPTH):
        raise ValueError(f"values are nested more than {MAX_DEPTH} deep")


_KINDS: dict[type, str] = {dict: "object", list: "list", str: "text"}


def _require(kind: type[_T], value: Any) -> _T:
    if not isinstance(value, kind):
        raise ValueError(f"{brief(value)} is no {_KINDS[kind]}")
    return value
