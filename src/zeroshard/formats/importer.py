"""The content of another program's checkpoint, as an import finds it, in several formats.

Ranges and strides are in row order. A tensor may stay a view of a mapped file until it is written.

Invariant: names are unique, pieces lie inside their parameter; `notes` lists what was skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import methodcaller
from typing import Any

import torch

from zeroshard.checkpoint.manifest import (
    BUFFER,
    STATE,
    VALUE,
    ParameterEntry,
    TensorEntry,
    row_stride,
)
from zeroshard.checkpoint.shard_files import Stored, dtype_code
from zeroshard.checkpoint.values import encode, no_tensors, require_dense
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
    aliases = _aliases(state)
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


def _aliases(state: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the first name of each tensor, and the others that stand for the very same memory."""
    seen: dict[Any, str] = {}
    found: dict[str, tuple[str, ...]] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        _code(tensor, name)
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        key: Any = memory if tensor.numel() else name
        first = seen.setdefault(key, name)
        found[first] = (*found[first], name) if first in found else ()
    return found


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
