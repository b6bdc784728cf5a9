"""Pickles of other programs read as data: torch files through torch's own restricted reader, the
rest by a machine that calls nothing.

A pickle is a program for a small stack machine. The machine here knows the instructions that make
plain values; a class or function is represented by its *name*, and a call of one by a `Pickled`. An
unexpected name ends the reading. Early Pythons 3.11 (3.11.2 of Debian 12) pickle a member of an
enum as a call of ``builtins.getattr``: both readers accept that for the enums that the caller
names, and for nothing else.

Invariant: no code runs that a pickle chose. Cost: a few microseconds per instruction; torch files
are mapped.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief
from typing import IO, Any

import torch

from zeroshard.errors import CheckpointError


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
