"""``optimizer.state`` of a sharded optimizer, with the numbers of what rests off the device.

    engine.optimizer.state[p]        exp_avg: one NaN, expanded, where it rests on another tier
    OptimizerStates(engine)[p]       exp_avg: its numbers, a copy

Keys are the entries of the optimizer's param groups: this rank's shards. Invariant: no NaN stands
for a number, no step is under way when one is read, and a write to a copy raises. Cost: a copy of
one shard's states each time that it is asked for; nothing is sent, and nothing is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch

from zeroshard.errors import StateError
from zeroshard.runtime.engine import Engine, states_of
from zeroshard.runtime.released import written_to


class CopiedState(torch.Tensor):
    """A copy of a state that rests off the device. Results of torch's functions are plain."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if written_to(func, args, kwargs or {}, cls):
            raise StateError(
                "a state of the optimizer that rests on the host or on disk was written to, in a"
                " copy: set it with zeroshard.ParameterStates(engine, param).set_state(key, value)"
                " (DeepSpeed's safe_set_full_optimizer_state(param, value, key))"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class OptimizerStates(Mapping[torch.Tensor, Mapping[str, Any]]):
    """``optimizer.state`` of an engine with the numbers of what rests on the host or on disk: by
    entry of the optimizer's param groups, which are this rank's shards. Reading sends nothing.

    What rests off the device is copied when it is asked for, and a write to a copy raises
    StateError: `ParameterStates` sets the states of a parameter. Raises StateError where the engine
    has no optimizer or is closed.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def _joined(self) -> Mapping[torch.Tensor, dict[str, Any]]:
        """Return the optimizer's own entries, when no step is under way."""
        states, optimizer = states_of(self._engine), self._engine.optimizer
        if optimizer is None or states.is_closed:
            raise StateError("this engine has no optimizer whose states it holds")
        states.join_step()
        return optimizer.state

    def __getitem__(self, tensor: torch.Tensor) -> Mapping[str, Any]:
        """Return the states of a shard, {} before its first step. What rests on the device is the
        optimizer's own and may be changed.
        """
        own, states = self._joined().get(tensor, {}), states_of(self._engine)
        shards = (one for one in states.stepped_pieces() if one.tensor is tensor)
        shard = next(shards, None)
        pieces = {} if shard is None else states.optimizer_states(shard)[0]
        copies = {}
        for key, piece in pieces.items():
            with piece.borrowed() as numbers:
                if numbers.data_ptr() != own[key].data_ptr():
                    copies[key] = numbers.detach().clone().as_subclass(CopiedState)
        return MappingProxyType({**own, **copies}) if copies else own

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._joined()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._joined())

    def __len__(self) -> int:
        return len(self._joined())

    def __repr__(self) -> str:
        return repr({tuple(tensor.shape): dict(state) for tensor, state in self.items()})
