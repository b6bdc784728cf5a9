"""The content of another program's checkpoint, as an import finds it, in several formats.

Ranges and strides are in row order. A tensor may stay a view of a mapped file until it is written.

Pickles are read as data: torch files through torch's own restricted reader, the rest by a machine
that calls nothing.

Invariant: no code runs that a pickle chose; names are unique, pieces lie inside their parameter;
`notes` lists what was skipped.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import methodcaller
from pathlib import Path
from reprlib import repr as brief
from typing import IO, Any

import torch

from zeroshard.checkpoint.manifest import BUFFER, ParameterEntry, TensorEntry, row_stride
from zeroshard.checkpoint.shard_files import Stored, dtype_code
from zeroshard.core.placement import STATE, VALUE
from zeroshard.core.values import encode, no_tensors, require_dense
from zeroshard.errors import CheckpointError

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict")
STEP_KEYS = ("step", "global_step", "iteration")
_OPTIONS = (
    "lr", "initial_lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov",
    "amsgrad", "maximize",
)  # fmt: skip
# prefixes of DistributedDataParallel and torch.compile
_WRAPPERS = ("module.", "_orig_mod.")
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of batch norm: buffers


@dataclass
class NamedOptimizer:
    """An optimizer's state by the names of the parameters."""

    name: str  # of its class
    groups: list[dict[str, Any]]  # options, and "params": names
    state: dict[str, dict[str, Any]] = field(default_factory=dict)


class Importer:
    """A checkpoint in the making."""

    def __init__(self, buffers: Sequence[str] = (), optimizer_name: str | None = None) -> None:
        self.optimizer_name = optimizer_name  # of its class, as the user gave it
        self.step: int | None = None
        self.parameters: dict[str, ParameterEntry] = {}
        self.stored: list[Stored] = []
        self.optimizer: dict[str, Any] | None = None
        self.model_config = ""  # the text of a config.json
        self.notes: list[str] = []  # skipped entries and guesses
        self._buffers = tuple(buffers)  # patterns of their names
        self._names: set[str] = set()

    def parameter(
        self, name: str, shape: Iterable[int], *, trained: bool = True, aliases: Iterable[str] = ()
    ) -> None:
        """Declare a parameter; its pieces follow."""
        sizes = tuple(shape)
        for one in (name, *aliases):
            self._new(one)
        self.parameters[name] = ParameterEntry(sizes, row_stride(sizes), trained, tuple(aliases))

    def piece(self, name: str, kind: str, start: int, tensor: torch.Tensor) -> None:
        """Add a "value" or "state.KEY" of a parameter, in row order, from element `start` on."""
        stop = start + tensor.numel()
        assert 0 <= start <= stop <= self.parameters[name].numel, (name, kind, start, stop)
        if start < stop:
            entry = TensorEntry.piece(name, kind, start, stop, _code(tensor, name))
            self.stored.append((entry, tensor))

    def check(self, where: str) -> None:
        """Raise CheckpointError, naming the source, where a parameter has elements without value,
        or without a state that others of its elements have.
        """
        kinds: dict[tuple[str | None, str], int] = {(name, VALUE): 0 for name in self.parameters}
        for entry, _ in self.stored:
            if entry.parameter is not None:
                key = entry.parameter, entry.kind
                kinds[key] = kinds.get(key, 0) + entry.numel
        for (name, kind), count in kinds.items():
            if name is not None and count != (numel := self.parameters[name].numel):
                raise CheckpointError(
                    f"{where} holds {count} of the {numel} elements of {kind} of {name!r}"
                )

    def buffer(self, name: str, tensor: torch.Tensor) -> None:
        """Take the buffer called `name` into the checkpoint."""
        self._new(name)
        shape, code = tuple(tensor.shape), _code(tensor, name)
        self.stored.append((TensorEntry.loose(f"{BUFFER}{name}@0", shape, code), tensor))

    def is_buffer(self, name: str, tensor: torch.Tensor) -> bool:
        """Guess whether a tensor of a state_dict, which does not say, is a buffer."""
        is_named = any(fnmatchcase(name, pattern) for pattern in self._buffers)
        is_integer = not (tensor.is_floating_point() or tensor.is_complex())
        return is_named or is_integer or name.rpartition(".")[2] in _STATISTICS

    def optimizer_numbers(
        self,
        name: str,
        groups: Sequence[Mapping[str, Any]],
        scalars: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Declare the optimizer: class, param groups by name, and scalars by parameter."""

        def options(group: Mapping[str, Any]) -> dict[str, Any]:
            known = [key for key in _OPTIONS if key in group]
            return {
                key: encode(_plain(group[key]), f"param group: {key}", no_tensors) for key in known
            }

        self.optimizer = {
            "class": self.optimizer_name or name,
            "groups": [
                {"params": list(group["params"]), "options": options(group)} for group in groups
            ],
            "scalars": {
                parameter: {
                    key: encode(value, f"state {key!r} of {parameter!r}", no_tensors)
                    for key, value in numbers.items()
                }
                for parameter, numbers in scalars.items()
            },
        }

    def _new(self, name: str) -> None:
        if not name or name in self._names:
            raise CheckpointError(
                f"the name {name!r} stands there twice" if name else "a tensor has no name"
            )
        self._names.add(name)


def take_state(
    importer: Importer, state: Mapping[str, Any], optimizer: NamedOptimizer | None
) -> None:
    """Take a model's state_dict (tied parameters share memory) and named optimizer state."""
    state, optimizer = _unwrapped(state, optimizer, importer.notes)
    # the first name of each tensor, and the others that stand for the very same memory
    seen: dict[Any, str] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, tensor in state.items():
        if isinstance(tensor, torch.Tensor):
            _code(tensor, name)
            memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            first = seen.setdefault(memory if tensor.numel() else name, name)
            aliases[first] = (*aliases[first], name) if first in aliases else ()
    first_of = {alias: first for first, others in aliases.items() for alias in (first, *others)}
    problem = None if optimizer is None else _problem(state, first_of, optimizer)
    if optimizer is not None and problem:
        importer.notes.append(f"the optimizer's state is not taken: {problem}")
        optimizer = None
    trained = set(aliases)  # without an optimizer: all of them
    if optimizer is not None:
        trained = {first_of[name] for group in optimizer.groups for name in group["params"]}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            importer.notes.append(
                f"{name!r} is not taken: it is a {type(tensor).__name__}, not a tensor"
            )
        elif first_of[name] != name:
            continue
        elif (optimizer is None or name not in trained) and importer.is_buffer(name, tensor):
            importer.buffer(name, tensor)
        else:
            is_trained = name in trained
            importer.parameter(name, tensor.shape, trained=is_trained, aliases=aliases[name])
            importer.piece(name, VALUE, 0, tensor)
    if optimizer is not None:
        scalars: dict[str, dict[str, Any]] = {}
        for name, values in optimizer.state.items():
            for key, value in values.items():
                if is_flat_state(value):
                    importer.piece(first_of[name], f"{STATE}{key}", 0, value)
                else:
                    scalars.setdefault(first_of[name], {})[key] = value
        groups = _renamed(optimizer.groups, first_of.__getitem__)
        importer.optimizer_numbers(optimizer.name, groups, scalars)


def is_flat_state(value: Any) -> bool:
    """Return whether a value of an optimizer's state has elements of its own for each weight."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _problem(
    state: Mapping[str, Any], first_of: Mapping[str, str], optimizer: NamedOptimizer
) -> str:
    """Return why an optimizer's state does not go with these parameters; nothing where it does."""
    in_groups = (name for group in optimizer.groups for name in group["params"])
    for name in (*optimizer.state, *in_groups):
        if name not in first_of:
            return f"it names {name!r}, which the model's state lacks"
    for name, values in optimizer.state.items():
        shape = state[name].shape
        for key, value in values.items():
            if is_flat_state(value) and value.shape != shape:
                there = f"{key!r} of {name!r} has shape {list(value.shape)}"
                return f"{there}, and the parameter {list(shape)}"
    return ""


def _unwrapped(
    state: Mapping[str, Any], optimizer: NamedOptimizer | None, notes: list[str]
) -> tuple[Mapping[str, Any], NamedOptimizer | None]:
    """Remove a wrapper's prefix from all names."""
    for prefix in _WRAPPERS * 2:
        if not state or not all(name.startswith(prefix) for name in state):
            continue
        notes.append(f"every name begins with {prefix!r}, which is taken off")
        state = {name.removeprefix(prefix): value for name, value in state.items()}
        if optimizer is not None:
            groups = _renamed(optimizer.groups, methodcaller("removeprefix", prefix))
            named = {name.removeprefix(prefix): values for name, values in optimizer.state.items()}
            optimizer = NamedOptimizer(optimizer.name, groups, named)
    return state, optimizer


def _renamed(
    groups: Iterable[Mapping[str, Any]], rename: Callable[[str], str]
) -> list[dict[str, Any]]:
    return [{**group, "params": [rename(name) for name in group["params"]]} for group in groups]


def optimizer_class(groups: Sequence[Mapping[str, Any]], keys: Iterable[str]) -> str | None:
    """Return the name of torch's class with such param groups and state, or None if unknown."""
    decoupled = {
        group["decoupled_weight_decay"] for group in groups if "decoupled_weight_decay" in group
    }
    present = set(keys)
    if {"exp_avg", "exp_avg_sq"} <= present:
        return "Adam" if decoupled == {False} else "AdamW"
    return "SGD" if "momentum_buffer" in present else None


def _code(tensor: torch.Tensor, name: str) -> str:
    """Return safetensors' name of a tensor's dtype. Raises CheckpointError if it is not dense."""
    require_dense(tensor, repr(name))
    return dtype_code(tensor.dtype, repr(name))


def _plain(value: Any) -> Any:
    """Return an option as a number: a learning rate may be a tensor."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


# ----------------------------------------------------------------------------- pickles read as data
# A pickle is a program for a small stack machine. The machine here knows the instructions that make
# plain values; a class or function is represented by its *name*, and a call of one by a `Pickled`.
# An unexpected name ends the reading. Early Pythons 3.11 (3.11.2 of Debian 12) pickle a member of
# an enum as a call of ``builtins.getattr``: both readers accept that for the enums that the caller
# names, and for nothing else.
#
# Cost: a few microseconds per instruction; torch files are mapped.


@dataclass(frozen=True)
class Name:
    """A class, a function or a constant that the pickle refers to."""

    name: str


@dataclass(eq=False)
class Pickled:
    """Stands for the object that `name(*args)` would have made, with `state`."""

    name: str
    args: tuple[Any, ...]
    state: Any = None


_MARK = object()
_VALUES = (  # they push their argument
    "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "LONG4", "BINFLOAT", "BINBYTES",
    "BINBYTES8", "SHORT_BINBYTES", "BINUNICODE", "BINUNICODE8", "SHORT_BINUNICODE",
)  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_NOTHING = {"PROTO", "FRAME"}
_GETATTR = "builtins.getattr"
_GETATTR_OF_OLD = "__builtin__.getattr"  # in pickles of protocol 2


def read_restricted(
    data: bytes,
    allowed: Container[str],
    where: str,
    enums: Mapping[str, Mapping[str, int]] | None = None,
) -> Any:
    """Return the value of a pickle; `where` names the pickle in errors. Raises CheckpointError.

    `allowed` are the full names that may occur; `enums` are, by the full name of each enum among
    them, its members' values by name.
    """
    machine = _PickleMachine(allowed, where, enums or {})
    try:
        for instruction, argument, _ in pickletools.genops(data):
            if instruction.name == "STOP":
                return machine.stack.pop()
            machine.run(instruction.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where} makes no sense: {type(error).__name__}: {error}") from None
    raise CheckpointError(f"{where} ends too early")


class _PickleMachine:
    def __init__(
        self, allowed: Container[str], where: str, enums: Mapping[str, Mapping[str, int]]
    ) -> None:
        self.stack: list[Any] = []
        self._allowed = allowed
        self._enums = enums
        self._where = where
        self._memo: dict[int, Any] = {}
        self._rest: dict[str, Callable[[Any], None]] = {
            "MARK": lambda argument: self.stack.append(_MARK),
            "EMPTY_LIST": lambda argument: self.stack.append([]),
            "EMPTY_DICT": lambda argument: self.stack.append({}),
            "EMPTY_SET": lambda argument: self.stack.append(set()),
            "TUPLE": lambda argument: self.stack.append(tuple(self._marked())),
            "TUPLE1": lambda argument: self._tuple(1),
            "TUPLE2": lambda argument: self._tuple(2),
            "TUPLE3": lambda argument: self._tuple(3),
            "APPEND": lambda argument: self._extend([self.stack.pop()]),
            "APPENDS": lambda argument: self._extend(self._marked()),
            "ADDITEMS": lambda argument: self._add(self._marked()),
            "SETITEM": lambda argument: self._set([self.stack.pop(-2), self.stack.pop()]),
            "SETITEMS": lambda argument: self._set(self._marked()),
            "GLOBAL": lambda argument: self._name(*argument.split(" ")),
            "STACK_GLOBAL": lambda argument: self._name(self.stack.pop(-2), self.stack.pop()),
            "REDUCE": lambda argument: self._call(),
            "NEWOBJ": lambda argument: self._call(),
            "BUILD": lambda argument: self._build(self.stack.pop()),
            "MEMOIZE": lambda argument: self._memo.__setitem__(len(self._memo), self.stack[-1]),
            **dict.fromkeys(
                ("PUT", "BINPUT", "LONG_BINPUT"),
                lambda argument: self._memo.__setitem__(argument, self.stack[-1]),
            ),
            **dict.fromkeys(
                ("GET", "BINGET", "LONG_BINGET"),
                lambda argument: self.stack.append(self._memo[argument]),
            ),
        }

    def run(self, instruction: str, argument: Any) -> None:
        if instruction in _VALUES:
            self.stack.append(argument)
        elif instruction in _CONSTANTS:
            self.stack.append(_CONSTANTS[instruction])
        elif instruction in self._rest:
            self._rest[instruction](argument)
        elif instruction not in _NOTHING:
            raise CheckpointError(
                f"{self._where} holds the pickle instruction {instruction}, which is not for data:"
                " refused"
            )

    def _marked(self) -> list[Any]:
        """Pop the values above the last mark, and the mark."""
        found: list[Any] = []
        while (value := self.stack.pop()) is not _MARK:
            found.append(value)
        return found[::-1]

    def _tuple(self, size: int) -> None:
        if len(self.stack) < size:
            raise ValueError("too few values for a tuple")
        self.stack[-size:] = [tuple(self.stack[-size:])]

    def _extend(self, values: list[Any]) -> None:
        self._container(list).extend(values)

    def _add(self, values: list[Any]) -> None:
        self._container(set).update(values)

    def _set(self, pairs: list[Any]) -> None:
        self._container(dict).update(zip(pairs[::2], pairs[1::2], strict=True))

    def _container(self, kind: type[Any]) -> Any:
        if type(self.stack[-1]) is not kind:
            raise ValueError(f"a {type(self.stack[-1]).__name__} is filled as a {kind.__name__}")
        return self.stack[-1]

    def _name(self, module: str, name: str) -> None:
        full = f"{module}.{name}"
        if full in (_GETATTR, _GETATTR_OF_OLD) and self._enums:
            full = _GETATTR
        elif full not in self._allowed:
            raise CheckpointError(
                f"{self._where} asks for {full}, which has no place in it: refused, and nothing of"
                " it was run"
            )
        self.stack.append(Name(full))

    def _call(self) -> None:
        args, what = self.stack.pop(), self.stack.pop()
        if not isinstance(what, Name) or not isinstance(args, tuple):
            raise ValueError("something is called that is no name")
        self.stack.append(self._member(args) if what.name == _GETATTR else Pickled(what.name, args))

    def _member(self, args: tuple[Any, ...]) -> Pickled:
        """Return the record of an enum's member, as a call of the enum would be recorded."""
        owner, name = args if len(args) == 2 else (None, None)
        known = self._enums.get(owner.name, {}) if isinstance(owner, Name) else {}
        if owner is None or not isinstance(name, str) or name not in known:
            raise CheckpointError(
                f"{self._where} asks for {_attribute(args)}, which is no enum's member known here:"
                " refused, and nothing of it was run"
            )
        return Pickled(owner.name, (known[name],))

    def _build(self, state: Any) -> None:
        if not isinstance(self.stack[-1], Pickled):
            raise ValueError("something is filled that is no object")
        self.stack[-1].state = state


def _attribute(args: tuple[Any, ...]) -> str:
    """Describe the attribute that a call of ``getattr`` asks for."""
    if len(args) != 2:
        return f"getattr with {len(args)} arguments"
    return f"attribute {brief(args[1])} of {brief(args[0])}"


def require_file(path: Path) -> None:
    """Raise CheckpointError where `path` is there and no file: a pipe would be waited for."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} cannot be read: it is not a file")


# ------------------------------------------------------------------ torch


def load_tensors(
    source: Path | IO[bytes],
    where: str,
    classes: Iterable[tuple[Any, str]] = (),
    enums: Mapping[Any, Mapping[str, int]] | None = None,
) -> Any:
    """Return the content of a torch file; the tensors of a path are mapped, not read.

    `where` names it in errors; `classes` are stand-ins for further classes, each with the full name
    of what it stands for; `enums` are, by the stand-in of each enum among them, its members' values
    by name.

    Raises CheckpointError for a file that is damaged (each record is read once for its checksum),
    or that asks for anything but tensors and plain values.
    """
    if isinstance(source, Path):
        require_file(source)
    mapped = isinstance(source, Path) and zipfile.is_zipfile(source)

    def member(*args: Any) -> Any:
        """Stand in for ``builtins.getattr``."""
        owner, name = args if len(args) == 2 else (None, None)
        known = enums.get(owner, {}) if enums and isinstance(owner, type) else {}
        if owner is None or not isinstance(name, str) or name not in known:
            raise ValueError(
                f"it asks for {_attribute(args)}, which is no enum's member known here"
            )
        return owner(known[name])

    stand_ins: list[Any] = [*classes, (member, _GETATTR)] if enums else list(classes)
    try:
        _check_sums(source)
        with torch.serialization.safe_globals(stand_ins):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{where} is refused, and nothing of it was run: {_reason(error)}"
        ) from None


def _check_sums(source: Path | IO[bytes]) -> None:
    """Raise ValueError where a record of a torch file has not the checksum that its archive says,
    which torch does not look at. A file that was saved without them has zeros.
    """
    if not zipfile.is_zipfile(source):
        return
    with zipfile.ZipFile(source) as archive:
        records = [one for one in archive.infolist() if one.compress_type == zipfile.ZIP_STORED]
        size = archive.start_dir
        if sum(record.file_size for record in records) > size:
            raise ValueError("the records of its archive overlap")
        for record in (one for one in records if one.CRC):
            with archive.open(record) as data:
                try:
                    while data.read(1 << 20):
                        pass
                except zipfile.BadZipFile:
                    raise ValueError(
                        f"it is damaged: the checksum of {record.filename!r} does not fit"
                    ) from None
    if not isinstance(source, Path):
        source.seek(0)


def _reason(error: Exception) -> str:
    """Return torch's message in one line."""
    text = " ".join(str(error).split())
    asked = re.search(r"\bGLOBAL (\S+)", text)
    if asked is not None:
        return f"it asks for {asked[1]}, which has no place in it"
    start = max(text.find("WeightsUnpickler error:"), 0)
    return text[start:].split(". ")[0] or type(error).__name__
