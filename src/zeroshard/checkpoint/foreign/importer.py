"""What an import has found in somebody else's checkpoint, on its way to become a step of ours;
and the state_dicts that several formats hold.

Ranges and strides are in row order. A tensor may stay where it is (a view of a mapped file) until
it is written.

Invariant: names are unique, pieces lie inside their parameter; what was found and is not taken is
said in `notes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch

from zeroshard.checkpoint.manifest import BUFFER, STATE, VALUE, ParameterEntry, TensorEntry
from zeroshard.checkpoint.shards import Stored, dtype_code
from zeroshard.checkpoint.values import encode
from zeroshard.errors import CheckpointError

__all__ = [
    "MODEL_KEYS",
    "OPTIMIZER_KEYS",
    "STEP_KEYS",
    "Intake",
    "NamedOptimizer",
    "optimizer_class",
    "take_state",
]

MODEL_KEYS = ("model", "state_dict", "model_state_dict", "module")
OPTIMIZER_KEYS = ("optimizer", "optim", "optimizer_state_dict")
STEP_KEYS = ("step", "global_step", "iteration")
_OPTIONS = (
    "lr",
    "initial_lr",
    "betas",
    "eps",
    "weight_decay",
    "momentum",
    "dampening",
    "nesterov",
    "amsgrad",
    "maximize",
)
# what DistributedDataParallel and torch.compile put before every name
_WRAPPERS = ("module.", "_orig_mod.")
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of batch norm: buffers


@dataclass
class NamedOptimizer:
    """An optimizer's state by the names of the parameters."""

    name: str  # of its class
    groups: list[dict[str, Any]]  # options, and "params": names
    state: dict[str, dict[str, Any]] = field(default_factory=dict)


class Intake:
    """A checkpoint in the making."""

    def __init__(self, buffers: Sequence[str] = (), optimizer_name: str | None = None) -> None:
        self.optimizer_name = optimizer_name  # of its class, by who asked for the import
        self.step: int | None = None
        self.parameters: dict[str, ParameterEntry] = {}
        self.stored: list[Stored] = []
        self.optimizer: dict[str, Any] | None = None
        self.notes: list[str] = []  # what is not taken, and what was guessed
        self._buffers = tuple(buffers)  # patterns of their names
        self._names: set[str] = set()

    def parameter(
        self, name: str, shape: Iterable[int], *, trained: bool = True, aliases: Iterable[str] = ()
    ) -> None:
        """Declare a parameter; its pieces follow."""
        sizes = tuple(shape)
        for one in (name, *aliases):
            self._new(one)
        stride = tuple(prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
        self.parameters[name] = ParameterEntry(sizes, stride, trained, tuple(aliases))

    def piece(self, name: str, kind: str, start: int, tensor: torch.Tensor) -> None:
        """Add a "value" or "state.KEY" of a parameter, in row order, from element `start` on."""
        stop = start + tensor.numel()
        assert 0 <= start <= stop <= self.parameters[name].numel, (name, kind, start, stop)
        if start < stop:
            self.stored.append(
                (
                    TensorEntry(
                        0, 0, _code(tensor, name), (stop - start,), (), kind, name, start, stop
                    ),
                    tensor,
                )
            )

    def buffer(self, name: str, tensor: torch.Tensor) -> None:
        """Take the buffer called `name` into the checkpoint."""
        self._new(name)
        self.stored.append(
            (
                TensorEntry(
                    0, 0, _code(tensor, name), tuple(tensor.shape), (), f"{BUFFER}{name}@0"
                ),
                tensor,
            )
        )

    def is_buffer(self, name: str, tensor: torch.Tensor) -> bool:
        """Guess whether a tensor of a state_dict, which does not say, is a buffer."""
        named = any(fnmatchcase(name, pattern) for pattern in self._buffers)
        return (
            named
            or not (tensor.is_floating_point() or tensor.is_complex())
            or name.rpartition(".")[2] in _STATISTICS
        )

    def optimizer_numbers(
        self,
        name: str,
        groups: Sequence[Mapping[str, Any]],
        scalars: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Declare the optimizer: class, param groups by name, and scalars by parameter."""
        self.optimizer = {
            "class": self.optimizer_name or name,
            "groups": [
                {
                    "params": list(group["params"]),
                    "options": {
                        key: encode(_plain(group[key]), f"param group: {key}", _no_tensors)
                        for key in _OPTIONS
                        if key in group
                    },
                }
                for group in groups
            ],
            "scalars": {
                parameter: {
                    key: encode(value, f"state {key!r} of {parameter!r}", _no_tensors)
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


def take_state(intake: Intake, state: Mapping[str, Any], optimizer: NamedOptimizer | None) -> None:
    """Take a model's state_dict (tied parameters share memory) and named optimizer state."""
    state, optimizer = _unwrapped(state, optimizer, intake.notes)
    aliases = _aliases(state)
    first_of = {alias: first for first, others in aliases.items() for alias in (first, *others)}
    problem = None if optimizer is None else _problem(state, first_of, optimizer)
    if optimizer is not None and problem:
        intake.notes.append(f"the optimizer's state is not taken: {problem}")
        optimizer = None
    trained = (
        None
        if optimizer is None
        else {first_of[name] for group in optimizer.groups for name in group["params"]}
    )
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            intake.notes.append(
                f"{name!r} is not taken: it is a {type(tensor).__name__}, not a tensor"
            )
        elif first_of[name] != name:
            continue
        elif (trained is None or name not in trained) and intake.is_buffer(name, tensor):
            intake.buffer(name, tensor)
        else:
            intake.parameter(
                name,
                tensor.shape,
                trained=trained is None or name in trained,
                aliases=aliases[name],
            )
            intake.piece(name, VALUE, 0, tensor)
    if optimizer is not None:
        _take_optimizer(intake, optimizer, first_of)


def _take_optimizer(intake: Intake, optimizer: NamedOptimizer, first_of: Mapping[str, str]) -> None:
    scalars: dict[str, dict[str, Any]] = {}
    for name, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                intake.piece(first_of[name], f"{STATE}{key}", 0, value)
            else:
                scalars.setdefault(first_of[name], {})[key] = value
    groups = [
        {**group, "params": [first_of[name] for name in group["params"]]}
        for group in optimizer.groups
    ]
    intake.optimizer_numbers(optimizer.name, groups, scalars)


def _problem(
    state: Mapping[str, Any], first_of: Mapping[str, str], optimizer: NamedOptimizer
) -> str:
    """Return why an optimizer's state does not go with these parameters; nothing where it does."""
    for name in (
        *optimizer.state,
        *(name for group in optimizer.groups for name in group["params"]),
    ):
        if name not in first_of:
            return f"it names {name!r}, which the model's state lacks"
    for name, values in optimizer.state.items():
        for key, value in values.items():
            if (
                isinstance(value, torch.Tensor)
                and value.dim() > 0
                and value.shape != state[name].shape
            ):
                return (
                    f"{key!r} of {name!r} has shape {list(value.shape)}, and the parameter"
                    f" {list(state[name].shape)}"
                )
    return ""


def _unwrapped(
    state: Mapping[str, Any], optimizer: NamedOptimizer | None, notes: list[str]
) -> tuple[Mapping[str, Any], NamedOptimizer | None]:
    """Take off what stands before every name."""
    for prefix in _WRAPPERS * 2:
        if not state or not all(name.startswith(prefix) for name in state):
            continue
        notes.append(f"every name begins with {prefix!r}, which is taken off")
        state = {name.removeprefix(prefix): value for name, value in state.items()}
        if optimizer is not None:
            groups = [
                {**group, "params": [name.removeprefix(prefix) for name in group["params"]]}
                for group in optimizer.groups
            ]
            named = {name.removeprefix(prefix): values for name, values in optimizer.state.items()}
            optimizer = NamedOptimizer(optimizer.name, groups, named)
    return state, optimizer


def _aliases(state: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the first name of each tensor, and the others that stand for the very same memory."""
    seen: dict[Any, str] = {}
    found: dict[str, tuple[str, ...]] = {}
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        _code(tensor, name)
        key: Any = (
            (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if tensor.numel()
            else name
        )
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
    if (
        tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_meta
        or tensor.is_nested
    ):
        what = (
            "quantized"
            if tensor.is_quantized
            else "meta"
            if tensor.is_meta
            else "nested"
            if tensor.is_nested
            else tensor.layout
        )
        raise CheckpointError(f"{name!r} is a {what} tensor, which has no form in a checkpoint")
    return dtype_code(tensor.dtype, repr(name))


def _plain(value: Any) -> Any:
    """Return an option as a number: a learning rate may be a tensor."""
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value


def _no_tensors(path: str, tensor: torch.Tensor) -> str:
    raise CheckpointError(
        f"{path} is a tensor of shape {list(tensor.shape)}, which has no place in a checkpoint"
    )
