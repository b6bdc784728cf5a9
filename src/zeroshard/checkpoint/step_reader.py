"""One step, on disk or in memory, opened to be read: any range of any part of a parameter, in any
memory order, and every other tensor by its key; its names beside an engine's; and `verify`, which
reads a step whole and reports everything that is wrong.

Invariant: everything that is returned has been verified. Cost: the bytes that are asked for, plus
at most a chunk at either end of each range. The reader does not know an engine.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from zeroshard.checkpoint.kept import KeptStep
from zeroshard.checkpoint.manifest import Manifest, ShardEntry, TensorEntry, digest
from zeroshard.checkpoint.rank_part import (
    RESERVED,
    Experts,
    Stateful,
    names_of,
    parameters_of,
    persistent_buffers,
)
from zeroshard.checkpoint.shard_files import OpenShards, ShardReader, describe_range, read_span
from zeroshard.checkpoint.steps import MANIFEST, StepFiles, StepGone
from zeroshard.core.boxes import Span
from zeroshard.core.placement import STATE, VALUE
from zeroshard.core.values import decode
from zeroshard.errors import CheckpointError
from zeroshard.memory import Trimmer
from zeroshard.optim.several import class_name
from zeroshard.runtime.ema import EMA
from zeroshard.runtime.engine import Engine, states_of
from zeroshard.runtime.whole import extra_modules

_T = TypeVar("_T")


class StepReader:
    """The tensors of the step in `path`, or of one that is kept in memory; `stack` closes its
    files. Raises CheckpointError.
    """

    def __init__(
        self, step: Path | KeptStep, stack: ExitStack, trimmer: Trimmer, *, verify: bool
    ) -> None:
        options: Any = {"verify": verify}
        if isinstance(step, KeptStep):
            self.path, self.manifest, self.text_hash = step.path, *step.manifest()
            options["open_file"] = step.open_file
        else:
            self.path, files = step, StepFiles(step, stack)
            self.manifest, text = files.manifest()
            self.text_hash = digest(text)
            files.check(self.manifest)
            options["open_file"] = files.open
        self.pieces = self.manifest.pieces()  # by parameter and kind
        self.loose = self.manifest.loose()
        self._shards = OpenShards(self.path, self.manifest, stack, **options)
        self._trimmer, self._trimmed = trimmer, 0

    @property
    def bytes_read(self) -> int:
        """The bytes read so far."""
        return self._shards.bytes_read

    def fetch(self, key: str) -> torch.Tensor:
        """Return the tensor called `key`, which is no piece of a parameter."""
        return self.whole(self.loose[key])

    def whole(self, entry: TensorEntry) -> torch.Tensor:
        """Return all of the tensor of `entry` [its shape]."""
        return self._shards.read(entry, 0, entry.numel).view(entry.shape)

    def identity(self, rank: int, value: Any) -> str:
        """Return a text that is the same for encoded values of two ranks, tensors included, where
        they are the same.
        """

        def with_content(found: dict[str, Any]) -> Any:
            key = found.get("$tensor", found.get("$array"))
            entry = self.loose.get(f"{key}@{rank}")
            return found if entry is None else [found, entry.dtype, entry.shape, entry.hashes]

        return json.dumps(json.loads(json.dumps(value), object_hook=with_content))

    def range(self, name: str, kind: str, wanted: Span) -> torch.Tensor:
        """Return the elements `wanted` of a parameter's `kind` [wanted.numel]."""
        entry, pieces = self.manifest.parameters[name], self.pieces.get((name, kind), ())
        return read_span(self._shards, entry, pieces, wanted, f"{kind} of parameter {name!r}")

    def held(self, read: Callable[[], _T], *, again: bool) -> Callable[[], _T]:
        """Read and verify now; return a function that returns the result, or rereads (`again`)."""
        if again:
            read()
            self.release_memory()
            return read
        result = read()
        return lambda: result

    def release_memory(self) -> None:
        """Release the memory that a piece was read into."""
        self._shards.pages.clear()
        self._trimmer.passed(self.bytes_read - self._trimmed)
        self._trimmed = self.bytes_read


# ----------------------------------------------------------------------------------- matching names
# Parameters, param groups and states of a checkpoint are matched with an engine's by name.
#
# Other pipeline stages have parameters of their own: their names are expected there, and a param
# group has the names of this stage alone.
#
# Invariant: nothing is read but the manifest. `misfits` is empty, or says all that does not fit.


@dataclass(frozen=True)
class Wanted:
    """The state that a load is to bring."""

    states: dict[str, Stateful]  # into these
    elsewhere: set[str]  # names that other stages have
    frozen: bool  # whether into frozen parameters, too
    generators: bool = True  # whether into the random generators, too


class Match:
    """The names that the step in `saved` and an engine have in common."""

    def __init__(self, saved: StepReader, engine: Engine, experts: Experts, wanted: Wanted) -> None:
        self.misfits: list[str] = []
        self.skipped: list[str] = []
        self.left_alone: list[str] = []  # frozen parameters, where they are not asked for
        self._saved = saved
        self._engine = engine
        self._states = wanted.states
        self._elsewhere = wanted.elsewhere
        # the name there of each parameter, by id
        self.there: dict[int, str] = self._match_parameters(experts, frozen=wanted.frozen)
        # the saved options of each param group; None: there are none to load
        self.groups: list[dict[str, Any]] | None = self._match_groups()
        self._check_states()

    def averages(self, name: str) -> bool:
        """Whether the checkpoint has an average for the state `name`."""
        is_saved = any(kind == name for _, kind in self._saved.pieces)
        return is_saved and isinstance(self._states.get(name), EMA)

    def _match_parameters(self, experts: Experts, *, frozen: bool) -> dict[int, str]:
        """Return each parameter's name in the checkpoint, by id, and collect what does not fit."""
        saved = self._saved.manifest.parameters
        by_any_name = {one: name for name, entry in saved.items() for one in (name, *entry.aliases)}
        left = dict.fromkeys(saved)
        found: dict[int, str] = {}
        parameters = list(self._engine.module.parameters())
        mine = parameters_of(self._engine, experts)
        own = names_of(self._engine.module)  # which checkpoints had where hooks give others
        for parameter, (name, entry) in zip(parameters, mine.items(), strict=True):
            names = [name, *entry.aliases, *own[id(parameter)]]
            known = [alias for alias in dict.fromkeys(names) if alias in by_any_name]
            if not (frozen or entry.trained):
                self.left_alone.append(name)
                left.pop(by_any_name[known[0]] if known else name, None)
                continue
            if not known:
                self.misfits.append(f"parameter {name!r} is not in the checkpoint")
                continue
            there = by_any_name[known[0]]
            left.pop(there, None)
            shape = saved[there].shape
            if shape == entry.shape:
                found[id(parameter)] = there
                continue
            self.misfits.append(
                f"parameter {name!r} is {list(shape)} in the checkpoint and {list(entry.shape)}"
                " in the model"
            )
        # imports from some formats hold buffers as parameters
        module = self._engine.module
        known_here = {*persistent_buffers(module), *extra_modules(module), *self._elsewhere}
        self.misfits += [
            f"parameter {other!r} of the checkpoint is not in the model"
            for other in left
            if not known_here & {other, *saved[other].aliases}
        ]
        return found

    def _match_groups(self) -> list[dict[str, Any]] | None:
        optimizer, saved = self._engine.optimizer, self._saved.manifest.optimizer
        if optimizer is None or saved is None:
            if optimizer is not None:
                self.misfits.append(
                    "the checkpoint has no optimizer state: it was saved without an optimizer"
                )
            elif saved is not None:
                self.skipped.append("the optimizer's state: this engine has no optimizer")
            return None
        name = class_name(optimizer)
        if saved["class"] != name:
            self.misfits.append(f"the optimizer was {saved['class']} and is {name}")
            return None
        mine = [
            [self.there.get(id(parameter), "?") for parameter in group]
            for group in states_of(self._engine).param_groups()
        ]
        found = [self._options(index, group, saved["groups"]) for index, group in enumerate(mine)]
        if None in found:
            self.misfits.append(
                f"optimizer param group {found.index(None)} holds other parameters here than in the"
                " checkpoint: no optimizer state is loaded"
            )
            return None
        return [
            {key: decode(value, self._saved.fetch) for key, value in (options or {}).items()}
            for options in found
        ]

    def _options(
        self, index: int, mine: list[str], groups: list[dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Return the saved options of the group that holds the parameters `mine`, None where there
        is none such; of an empty group those in its place.
        """
        if not mine:
            return dict(groups[index]["options"]) if index < len(groups) else {}
        with_mine = [group for group in groups if not set(mine).isdisjoint(group["params"])]
        entries = self._saved.manifest.parameters
        there = [
            name
            for group in with_mine
            for name in group["params"]
            if name in mine or self._elsewhere.isdisjoint((name, *entries[name].aliases))
        ]
        options = [dict(group["options"]) for group in with_mine]
        is_one = bool(options) and all(other == options[0] for other in options)
        return options[0] if is_one and sorted(there) == sorted(mine) else None

    def _check_states(self) -> None:
        for name in self._states:
            if name not in self._saved.manifest.states and not self.averages(name):
                self.misfits.append(f"states[{name!r}] is not in the checkpoint")
        kinds = {kind for _, kind in self._saved.pieces if kind != VALUE}
        averages = {kind for kind in kinds if not kind.startswith(STATE)}
        for name in sorted(averages | self._saved.manifest.states.keys()):
            if name not in self._states and name not in RESERVED:
                self.skipped.append(f"states[{name!r}]: not asked for")


# ----------------------------------------------------------------------------- every byte of a step
# If nothing is reported, every byte of every file has the hash in the manifest, and the manifest
# the one in its own last line. Cost: one pass over the bytes; memory for one chunk.

# ELOOP: a link, which no save leaves
_NOT_THERE = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENOTDIR)


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong."""

    file: str
    what: str
    parameter: str | None = None
    kind: str | None = None  # of the tensor
    unreadable: bool = False  # the system refused to read: the bytes may be right


def verify(step: Path, progress: Callable[[int], None] = lambda num_bytes: None) -> list[Damage]:
    """Return everything wrong with a step, by file; `progress(n)` is called after n bytes. Raises
    StepGone where another save has taken its place.
    """
    with ExitStack() as stack:
        try:
            files = StepFiles(step, stack)
            manifest, _ = files.manifest()
        except StepGone:
            raise
        except CheckpointError as error:
            return [Damage(MANIFEST, str(error), unreadable=_refused(error))]
        found: list[Damage] = []
        tensors: dict[int, list[TensorEntry]] = {}
        for entry in manifest.tensors:
            tensors.setdefault(entry.file, []).append(entry)
        for number, file in enumerate(manifest.files):
            found += _check_file(files, file, tensors.get(number, []), manifest, progress)
        expected = {MANIFEST, *(file.name for file in manifest.files)}
        found += [
            Damage(name, f"{step / name} does not belong to the checkpoint")
            for name in files.names()
            if name not in expected
        ]
        return found


def _check_file(
    files: StepFiles,
    file: ShardEntry,
    tensors: list[TensorEntry],
    manifest: Manifest,
    progress: Callable[[int], None],
) -> Iterator[Damage]:
    """Yield the damage of one file; after a wrong size or header still check each tensor."""
    path, size = files.path / file.name, file.bytes
    options: Any = {"chunk_bytes": manifest.chunk_bytes, "open_file": files.open}
    try:
        with ShardReader(path, file, **options):
            pass
    except StepGone:
        raise
    except CheckpointError as error:
        yield Damage(file.name, str(error), unreadable=_refused(error))
        if error.__cause__ is not None or path.is_symlink() or not path.is_file():
            return
        size = path.stat().st_size
    with ShardReader(path, replace(file, bytes=size), verify=False, **options) as reader:
        for entry in tensors:
            yield from _check_tensor(reader, entry, size - file.header_bytes)
            progress(entry.num_bytes)


def _check_tensor(reader: ShardReader, entry: TensorEntry, data_bytes: int) -> Iterator[Damage]:
    """Yield the damage of a tensor in a file with so many bytes of data."""
    path, tensor, refused = reader.path, describe_range(entry, 0, entry.num_bytes), False
    try:
        if entry.offset + entry.num_bytes > data_bytes:
            found = [f"{path} ends before the end of {tensor}"]
        else:
            found = [f"{path} is damaged: {what}" for what in reader.check(entry)]
    except CheckpointError as error:
        found, refused = [f"{error} ({tensor})"], _refused(error)
    for what in found:
        yield Damage(path.name, what, entry.parameter, entry.kind, refused)


def _refused(error: CheckpointError) -> bool:
    """Return whether the operating system refused to read a file that is there."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno not in _NOT_THERE
