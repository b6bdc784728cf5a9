"""Several optimizers over one model: matrices by Muon, everything else by AdamW.

    zs.shard(model, [muon, adamw])       muon     groups 0, 1        state of its parameters
                                         adamw    group 2            state of its parameters
    JointOptimizer                       all      groups 0, 1, 2     both

Each of them stays the object that it was, with its own schedulers. To the engine they are one, with
all param groups numbered through; whatever depends on the class asks for the optimizer of a group
or of a parameter. A step is one: the first ``step()`` finishes the gradients, and when each
has stepped once the weights follow.

Invariant: between the first ``step()`` and the last nothing else is done with the engine. Cost:
nothing for one optimizer, which is used as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from zeroshard.errors import ConfigError, StateError
from zeroshard.optim.copies import TileOptimizer, is_elementwise
from zeroshard.state.local import part_of

INTERRUPTED = (
    "the last optimizer.step() did not finish: call engine.reset() on every rank after an exception"
)


class _States(MutableMapping[torch.Tensor, dict[str, Any]]):
    """The states of several optimizers, each where its own keeps it: none is added here."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def _holder(self, tensor: torch.Tensor) -> dict[torch.Tensor, dict[str, Any]]:
        for one in self._optimizers:
            if tensor in one.state:
                return one.state
        raise KeyError(tensor)

    def __getitem__(self, tensor: torch.Tensor) -> dict[str, Any]:
        return self._holder(tensor)[tensor]

    def __setitem__(self, tensor: torch.Tensor, state: dict[str, Any]) -> None:
        self._holder(tensor)[tensor] = state

    def __delitem__(self, tensor: torch.Tensor) -> None:
        del self._holder(tensor)[tensor]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return chain.from_iterable(one.state for one in self._optimizers)

    def __len__(self) -> int:
        return sum(len(one.state) for one in self._optimizers)

    def clear(self) -> None:
        for one in self._optimizers:
            one.state.clear()


class JointOptimizer(torch.optim.Optimizer):
    """Several optimizers as one: ``engine.optimizer`` of an engine that has several."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # not the base's: groups, hooks and state are the optimizers' own
        self.optimizers, self.defaults = tuple(optimizers), {}
        # by id of each parameter that is in a group now
        self.owners = {
            id(parameter): one
            for one in self.optimizers
            for group in one.param_groups
            for parameter in group["params"]
        }

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """All groups, in order, which are the optimizers' own objects."""
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> MutableMapping[torch.Tensor, dict[str, Any]]:  # type: ignore[override]
        """All states."""
        return _States(self.optimizers)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Let each of them step, in order."""
        for one in self.optimizers:
            one.step() if closure is None else one.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients."""
        for one in self.optimizers:
            one.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return one for each of them, in order."""
        return {"optimizers": [one.state_dict() for one in self.optimizers]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each of them its own back."""
        for one, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            one.load_state_dict(state)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise StateError: groups are added to one of them, before ``shard()``."""
        raise StateError(
            "engine.optimizer stands for several optimizers: call engine.close(), add the group to"
            " one of them and shard() again"
        )

    def __getattr__(self, name: str) -> Any:  # the base's own hooks
        raise AttributeError(
            f"engine.optimizer stands for several optimizers and has no {name!r}: register hooks on"
            " each of engine.optimizer.optimizers"
        )

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self.optimizers))}]"


# ------------------------------------------------------------------------------- of one and of many


def joined(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
) -> torch.optim.Optimizer:
    """Return one optimizer in the place of a list of several; one alone as it is. Raises
    ConfigError for an empty list, and for other things in it.
    """
    if isinstance(optimizer, JointOptimizer):
        return type(optimizer)(optimizer.optimizers)
    if not isinstance(optimizer, list | tuple):
        return optimizer  # type: ignore[return-value]  # whatever it is, others look at it
    if not optimizer:
        raise ConfigError("optimizer is an empty list: give one or more, or None")
    seen: dict[int, int] = {}
    for index, one in enumerate(optimizer):
        if not isinstance(one, torch.optim.Optimizer) or isinstance(one, JointOptimizer):
            raise ConfigError(
                f"optimizer {index} of the list is a {type(one).__name__}, not a"
                " torch.optim.Optimizer"
            )
        if seen.setdefault(id(one), index) != index:
            raise ConfigError(
                f"optimizers {seen[id(one)]} and {index} of the list are the same"
                f" {type(one).__name__}: give each optimizer once"
            )
    return optimizer[0] if len(optimizer) == 1 else JointOptimizer(optimizer)


def each_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers that `optimizer` stands for."""
    return optimizer.optimizers if isinstance(optimizer, JointOptimizer) else (optimizer,)


def class_name(optimizer: torch.optim.Optimizer | None) -> str:
    """Return the name of its class: "AdamW", or "Muon + AdamW"."""
    if isinstance(optimizer, JointOptimizer):
        return " + ".join(type(one).__name__ for one in optimizer.optimizers)
    return type(optimizer).__name__


def owner(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> torch.optim.Optimizer:
    """Return the one that a `parameter` of the model was given to."""
    if isinstance(optimizer, JointOptimizer):
        return optimizer.owners[id(parameter)]
    return optimizer


def owners_of_groups(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the one that has each param group."""
    return [one for one in each_of(optimizer) for _ in one.param_groups]


def groups_of(optimizer: torch.optim.Optimizer, one: torch.optim.Optimizer) -> slice:
    """Return which of the param groups `one` has."""
    begin = owners_of_groups(optimizer).index(one)
    return slice(begin, begin + len(one.param_groups))


def title(optimizer: torch.optim.Optimizer, one: torch.optim.Optimizer) -> str:
    """Return what errors call `one`: "Muon (optimizer 0)", and of one alone "the optimizer"."""
    if not isinstance(optimizer, JointOptimizer):
        return "the optimizer"
    index = [other is one for other in optimizer.optimizers].index(True)
    return f"{type(one).__name__} (optimizer {index})"


def check_parameters(
    optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], *, whole: bool
) -> None:
    """Raise ConfigError unless `optimizer` holds all trainable `parameters` (by qualified name)
    and no others, and each of several holds its own; frozen ones may be in it. With ranks that own
    `whole` ones, what steps a DTensor with a part on each rank has to be elementwise.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    held: dict[int, torch.optim.Optimizer] = {}
    for one in each_of(optimizer):
        of = "optimizer" if one is optimizer else f"{title(optimizer, one)}:"
        for index, group in enumerate(one.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ConfigError(
                        f"{of} param group {index} holds a parameter of shape"
                        f" {tuple(parameter.shape)} that is not one of this model's: build the"
                        " optimizer from model.parameters() of the model given to shard()"
                    )
                if (other := held.setdefault(id(parameter), one)) is not one:
                    raise ConfigError(
                        f"parameter {names[id(parameter)]!r} is in {title(optimizer, other)} and in"
                        f" {title(optimizer, one)}: give it to one of them"
                    )
    missing = [
        name
        for name, parameter in parameters.items()
        if parameter.requires_grad and id(parameter) not in held
    ]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        where = "not in the optimizer: add it"
        if isinstance(optimizer, JointOptimizer):
            where = f"in none of the optimizers ({class_name(optimizer)}): add it to one"
        raise ConfigError(
            f"parameter {missing[0]!r}{more} is trainable but {where}, or set"
            " requires_grad=False before shard()"
        )
    for name, parameter in parameters.items() if whole else ():
        its = owner(optimizer, parameter) if parameter.requires_grad else None
        if its is not None and not (is_elementwise(its) or part_of(name, parameter).is_whole):
            raise ConfigError(
                f"parameter {name!r} is a DTensor, and each rank has a part of it:"
                f" {class_name(its)} goes by whole parameters, and the numbers of a step of the"
                " parts are others. Give it to an elementwise optimizer, for example"
                " torch.optim.AdamW, or leave it whole"
            )


# -------------------------------------------------------------------------------------------- steps


def tile_optimizer(optimizer: torch.optim.Optimizer, *, off_device: bool) -> TileOptimizer:
    """Return what steps tiles in the place of `optimizer`."""
    make = _JointTileOptimizer if isinstance(optimizer, JointOptimizer) else TileOptimizer
    return make(optimizer, off_device=off_device)


class _JointTileOptimizer(TileOptimizer):
    """Steps tiles in which parameters of several optimizers lie."""

    def __init__(self, optimizer: torch.optim.Optimizer, *, off_device: bool) -> None:
        self._parts = [
            (TileOptimizer(one, off_device=off_device), groups_of(optimizer, one))
            for one in each_of(optimizer)
        ]

    def step(
        self,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        states: dict[torch.Tensor, dict[str, Any]],
    ) -> dict[torch.Tensor, dict[str, Any]]:
        after: dict[torch.Tensor, dict[str, Any]] = {}
        for part, groups in self._parts:
            every = range(groups.start, groups.stop)
            mine = {at: parameters[index] for at, index in enumerate(every) if index in parameters}
            held: dict[torch.Tensor, dict[str, Any]]
            held = {one: states[one] for members in mine.values() for one in members}
            after |= part.step(mine, held) if mine else {}
        return after


@dataclass(eq=False)
class OptimizerStep:
    """One step: how far it has come."""

    optimizer: torch.optim.Optimizer
    has_begun: bool = False  # real gradients stand in the place of sealed ones
    is_broken: bool = False  # the tiles' part of it has raised
    in_closure: bool = False
    # of several optimizers
    stepping: torch.optim.Optimizer | None = None  # its step() is under way, or has raised
    stepped: list[torch.optim.Optimizer] = field(default_factory=list)
    # of each by id, where what rests off the device, or another rank, has begun to step with them
    options: dict[int, str] = field(default_factory=dict)
    cleared: list[Callable[[], None]] = field(default_factory=list)  # zero_grad() after their step

    def call(self, closure: Callable[[], Any]) -> Any:
        """Return what the user's closure does."""
        self.in_closure = True
        try:
            return closure()
        finally:
            self.in_closure = False

    @property
    def unfinished(self) -> str | None:
        """The reason to refuse anything else, if the step has begun and not ended."""
        if not self.has_begun or self.in_closure:
            return None
        if self.stepping is not None or not self.stepped:
            return INTERRUPTED
        done, left = (
            " and ".join(
                title(self.optimizer, one)
                for one in each_of(self.optimizer)
                if (one in self.stepped) is has_stepped
            )
            for has_stepped in (True, False)
        )
        return (
            f"{done} stepped and {left} did not: a step ends when each of the optimizers has"
            " stepped once; call the step() that is missing, or engine.reset() on every rank"
        )

    def check_turn(self, one: torch.optim.Optimizer, closure: object) -> None:
        """Raise StateError where `one` of several optimizers cannot step now."""
        if closure is not None:
            raise StateError(
                f"{title(self.optimizer, one)}: step(closure) of one of several optimizers would"
                " step the others without their gradients: call the closure yourself, then step()"
                " of each"
            )
        if one in self.stepped or self.stepping not in (None, one):
            raise StateError(self.unfinished or INTERRUPTED)
        if self.options.get(id(one), _options(one)) != _options(one):
            raise StateError(
                f"options of {title(self.optimizer, one)} have changed since the first of the"
                " optimizers stepped, when steps of what rests off the device, and of ranks without"
                " data in engine.join(), began: change them before, or after its own step()"
            )

    def zero_grad(self, one: torch.optim.Optimizer, zero_grad: Callable[[], None]) -> bool:
        """Take a `zero_grad` of `one`, between its step and the end of the whole step, for later;
        return False where it is not to be taken.
        """
        if not self.stepped or self.stepping is not None:
            return False
        if one not in self.stepped:
            raise StateError(
                f"zero_grad() of {title(self.optimizer, one)} before its step(), of a step that"
                " others have begun: call step() first"
            )
        self.cleared.append(zero_grad)
        return True

    def begins(self, one: torch.optim.Optimizer, *, elsewhere: bool) -> None:
        """The gradients of `one` are there; `elsewhere`: a part of the step goes on by itself."""
        self.stepping = one
        if elsewhere:
            self.hold_options()

    def hold_options(self) -> None:
        """Let each of several step with the options that it has now."""
        if not self.options:
            self.options = {id(each): _options(each) for each in each_of(self.optimizer)}

    def ends(self, one: torch.optim.Optimizer) -> bool:
        """`one` has stepped: return whether all have now."""
        self.stepping = None
        if one not in self.stepped:
            self.stepped.append(one)
        return len(self.stepped) == len(each_of(self.optimizer))


def _options(optimizer: torch.optim.Optimizer) -> str:
    return repr(
        [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in optimizer.param_groups
        ]
    )
