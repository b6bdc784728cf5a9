"""One whole parameter's fp32 master, gradient or optimizer state: read on every rank, or set.

    pieces of this rank    (start, stop, numbers)     in the order of the parameter's memory
    exchange               who holds which range      the lowest rank that holds one sends it
    broadcast              of each range              every rank has the whole

Of a DTensor these are the pieces of what this rank has of it; whole values are whole over the
DTensor's mesh, too.

Cost: a message per rank and a broadcast per piece of the parameter. With ``local=True`` this
rank's pieces alone are read and written, joined, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from zeroshard.core.digest import digest_of
from zeroshard.core.placement import STATE, VALUE
from zeroshard.errors import ConfigError, StateError
from zeroshard.optim.sealed import Guarded, SealedGrad
from zeroshard.optim.shards import ParamShard
from zeroshard.optim.tiles import is_apart
from zeroshard.runtime.access import StateAccess
from zeroshard.runtime.engine import Engine, states_of
from zeroshard.runtime.released import written_to
from zeroshard.runtime.segment_states import RestingPiece
from zeroshard.state.local import local_of, part_within, whole_of

# --------------------------------------------------------------------------------- optimizer states
# ``optimizer.state`` of a sharded optimizer, with the numbers of what rests off the device.
#
#     engine.optimizer.state[p]        exp_avg: one NaN, expanded, where it rests on another tier
#     OptimizerStates(engine)[p]       exp_avg: its numbers, a copy
#
# Keys are the entries of the optimizer's param groups: this rank's shards. Invariant: no NaN stands
# for a number, no step is under way when one is read, and a write to a copy raises. Cost: a copy of
# one shard's states each time that it is asked for; nothing is sent, and nothing is kept.


class CopiedState(Guarded, torch.Tensor):
    """A copy of a state that rests off the device. Results of torch's functions are plain."""

    @classmethod
    def _use(cls, func: Any, types: Iterable[type], args: Any, kwargs: dict[str, Any]) -> Any:
        if written_to(func, args, kwargs, cls):
            raise StateError(
                "a state of the optimizer that rests on the host or on disk was written to, in a"
                " copy: set it with zeroshard.ParameterStates(engine, param).set_state(key, value)"
                " (DeepSpeed's safe_set_full_optimizer_state(param, value, key))"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


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
            raise StateError("this engine holds no optimizer's states")
        states.join_step()
        return optimizer.state

    def __getitem__(self, tensor: torch.Tensor) -> Mapping[str, Any]:
        """Return the states of a shard, {} before its first step. What rests on the device is the
        optimizer's own and may be changed.
        """
        own = self._joined().get(tensor, {})
        away = states_of(self._engine).optimizer_states(tensor)
        copies = {key: numbers.as_subclass(CopiedState) for key, numbers in away.items()}
        return MappingProxyType({**own, **copies}) if copies else own

    def __contains__(self, tensor: object) -> bool:
        return tensor in self._joined()

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._joined())

    def __len__(self) -> int:
        return len(self._joined())

    def __repr__(self) -> str:
        return repr({tuple(tensor.shape): dict(state) for tensor, state in self.items()})


# --------------------------------------------------------------------------------- parameter states

_CALL = "ParameterStates"
_Part = Callable[[int, int], torch.Tensor]  # the numbers of elements [start, stop)


class ParameterStates:
    """The states of `param`, one of `engine`'s parameters.

    Every method is collective, except that reading with ``local=True`` sends nothing (the first
    read of a gradient in a step does). Whole values have the parameter's shape and are fp32; local
    ones are this rank's part of them, 1-D, in the order of the parameter's memory.
    """

    def __init__(self, engine: Engine, param: nn.Parameter) -> None:
        named = engine.module.named_parameters()
        name = next((name for name, one in named if one is param), None)
        if name is None:
            raise ConfigError(
                f"a parameter of shape {tuple(param.shape)} is none of this engine's: take one of"
                " engine.module.parameters()"
            )
        self._engine = engine
        self._param, self._name = param, name

    @property
    def _states(self) -> StateAccess:
        """The states as they rest now: a repartition may have moved them."""
        return states_of(self._engine)

    # ------------------------------------------------------------------ reading

    def master(self, *, local: bool = False) -> torch.Tensor:
        """Return the fp32 master."""
        self._states.finish_step()
        value = self._read("the master", VALUE, local)
        assert value is not None
        return value

    def grad(self, *, local: bool = False) -> torch.Tensor | None:
        """Return the averaged gradient as the step will take it; None where no rank used the
        parameter, or the step has taken the gradient.
        """
        self._states.check_open(trained=True)
        if not self._states.has_pending_gradients:
            return None
        whole = self._engine.full_grad(self._param)
        if whole is None or not local:
            return None if whole is None else whole.float()
        grads = (shard.grad() for shard in self._shards())
        return _joined(grad for grad in grads if grad is not None)

    def state(self, key: str, *, local: bool = False) -> torch.Tensor | None:
        """Return state `key` ("exp_avg", ...) of the optimizer; None before the first step, and
        for a key that it does not have, or has in another shape than the parameter's.
        """
        self._states.finish_step()
        return self._read(f"state {key!r}", f"{STATE}{key}", local)

    # ------------------------------------------------------------------ writing

    def set_master(self, value: torch.Tensor, *, local: bool = False) -> None:
        """Set the master, and with it the weight, to `value`, the same on every rank where it is
        whole.
        """
        part = self._parts(value, local)
        self._compare("the master", value, local)
        self._states.finish_step()
        with torch.no_grad(), self._states.rewriting():
            for piece in self._pieces(VALUE):
                piece.write(part(piece.start, piece.stop))

    def set_grad(self, value: torch.Tensor, *, local: bool = False) -> None:
        """Set the averaged gradient. One that is not finite skips the step, as one of a backward
        does. Raises StateError without one, and where the user has assigned ``.grad``, which the
        step takes.
        """
        with torch._C.DisableTorchFunctionSubclass():
            grad = self._param.grad
        if grad is not None and not isinstance(grad, SealedGrad):
            raise StateError(
                f"a parameter of shape {tuple(self._param.shape)} has a .grad that was assigned by"
                " hand, which the step takes: assign the value to it instead"
            )
        if self.grad() is None:
            raise StateError(
                f"a parameter of shape {tuple(self._param.shape)} has no gradient to set: run a"
                " backward that uses it first"
            )
        part = self._parts(value, local)
        self._compare("the gradient", value, local)
        for shard in self._shards():
            shard.set_grad(part(shard.piece.start, shard.piece.stop))
        self._states.gradient_set()

    def set_state(self, key: str, value: torch.Tensor, *, local: bool = False) -> None:
        """Set state `key` of the optimizer. Raises StateError before the first step, and for a key
        that it does not have, or has in another shape than the parameter's.
        """
        optimizer, part = self._engine.optimizer, self._parts(value, local)
        if optimizer is None:
            raise StateError("this engine has no optimizer, and so no optimizer state")
        self._compare(f"state {key!r}", value, local)
        self._states.finish_step()
        tables = self._states.tables()
        keys = [optimizer.state.get(shard.tensor, {}).keys() for shard in self._shards()]
        with self._states.peers.together(_CALL, refusal=StateError):
            if any(key not in names for names in keys):
                held = sorted({str(one) for names in keys if key not in names for one in names})
                raise StateError(
                    f"the optimizer has no state {key!r} of this parameter; it has"
                    f" {', '.join(map(repr, held)) or 'none before its first step'}"
                )
            found = (part for one in tables for part in one.numbers().get(self._name, {}).values())
            if any(is_apart(part.get(key)) for part in found):
                raise StateError(
                    f"the optimizer's state {key!r} of this parameter has another shape: set it in"
                    " engine.optimizer.state on the rank that owns the parameter"
                )

        def replace(shard: ParamShard) -> None:
            if shard.parameter is self._param:
                state = optimizer.state[shard.tensor]
                numbers = part(shard.piece.start, shard.piece.stop)
                state[key] = numbers.detach().to(shard.tensor.device, state[key].dtype, copy=True)

        self._states.set_states(replace)

    # ------------------------------------------------------------------ pieces

    def _shards(self) -> list[ParamShard]:
        return [shard for shard in self._states.stepped_pieces() if shard.parameter is self._param]

    def _pieces(self, kind: str) -> list[RestingPiece]:
        return [
            piece
            for table in self._states.tables()
            if any(one is self._param for one in table.segment.parameters)
            for piece in table.pieces((kind,))
            if piece.parameter is self._param
        ]

    def _compare(self, what: str, value: torch.Tensor, local: bool) -> None:
        """Raise PlanMismatch where ranks set another state, or other numbers where these are whole.
        Collective.
        """
        # groups of ranks that hold other experts set other numbers
        alike = not local and not self._states.own_places
        asked = {"parameter": self._name, "set": what}
        if alike:
            asked["the numbers"] = digest_of(local_of(value.detach()).float())
        self._states.peers.agree(asked, _CALL)

    def _read(self, what: str, kind: str, local: bool) -> torch.Tensor | None:
        """Return this rank's part of one kind, or the whole tensor that the ranks' parts are: None
        where no rank has any.
        """
        pieces, numbers = self._pieces(kind), []
        for piece in pieces:
            with piece.borrowed() as here:
                numbers.append(here.detach().float().clone())
        if local:
            return _joined(numbers)
        ranges = [(piece.start, piece.stop) for piece in pieces]
        asked = {"parameter": self._name, "read": what}
        everyone = self._states.peers.agree(asked, _CALL, value=ranges)
        if not any(everyone):
            return None
        param, mine = self._param, local_of(self._param)
        flat = torch.zeros(mine.numel(), dtype=torch.float32, device=param.device)
        for piece, here in zip(pieces, numbers, strict=True):
            flat[piece.start : piece.stop] = here
        known: list[list[int]] = []
        for rank, ranges in enumerate(everyone):
            for span in ranges:
                if span not in known:  # else a lower rank has sent it
                    known.append(span)
                    self._states.transport.broadcast(flat[slice(*span)], rank)
        return whole_of(param, flat.as_strided(mine.shape, self._stride()))

    # ------------------------------------------------------------------ values to set

    def _parts(self, value: torch.Tensor, local: bool) -> _Part:
        """Return how to cut `value` into the pieces of this rank."""
        if local:
            left = value.reshape(-1)

            def taken(start: int, stop: int) -> torch.Tensor:
                nonlocal left
                if stop - start > left.numel():
                    raise ConfigError(
                        "value has fewer elements than this rank's part of the parameter"
                    )
                part, left = left[: stop - start], left[stop - start :]
                return part

            return taken
        param, shape = self._param, tuple(self._param.shape)
        if value.numel() != prod(shape):
            raise ConfigError(f"value has shape {tuple(value.shape)}, the parameter {shape}")
        here = local_of(part_within(param, value.detach().view(shape)))
        dense = torch.empty_strided(
            here.shape, self._stride(), dtype=torch.float32, device=param.device
        )
        dense.copy_(here)
        flat = dense.as_strided((dense.numel(),), (1,))
        return lambda start, stop: flat[start:stop]

    def _stride(self) -> tuple[int, ...]:
        return self._states.parameter_layouts()[id(self._param)][1]


def _joined(numbers: Iterable[torch.Tensor]) -> torch.Tensor:
    parts = [part.reshape(-1) for part in numbers]
    return torch.cat(parts) if parts else torch.empty(0)
