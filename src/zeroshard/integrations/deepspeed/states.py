"""One whole parameter's fp32 master, gradient or optimizer state: read on every rank, or set.

    pieces of this rank    (start, stop, numbers)     in the order of the parameter's memory
    exchange               who holds which range      the lowest rank that holds one sends it
    all-reduce             of the bits, 0 elsewhere   every rank has the whole

Cost: a message per rank and an all-reduce of the parameter. The ``safe_*_local_*`` functions read
and write this rank's pieces alone, joined, and send nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from zeroshard.integrations.deepspeed.owners import engine_of

__all__ = [
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
]

_CALL = "deepspeed.utils.safe_get_full_*()"


@dataclass(frozen=True)
class _Piece:
    """Elements [start, stop) of one parameter that rest on this rank."""

    start: int
    stop: int
    numbers: torch.Tensor


# ---------------------------------------------------------------------- whole parameters


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return the fp32 master of `param` [its shape], on every rank; None for a plain parameter.
    Collective.
    """
    engine = engine_of(param)
    if engine is None:
        return None
    engine.states.finish_step()
    return _whole(engine, param, list(_masters(engine, param)))


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return the averaged gradient of `param`, as the step will take it; None where no rank used
    it, or the step has taken it. Collective.
    """
    engine = engine_of(param)
    if engine is None:
        return param.grad
    if not engine.states.has_pending_gradients:
        return None
    grad = engine.full_grad(param)
    return None if grad is None else grad.float()


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return state `optim_state_key` ("exp_avg", ...) of `param`; None before the first step, and
    for a key that the optimizer does not have. Collective.
    """
    engine = engine_of(param)
    if engine is None:
        return None
    engine.states.finish_step()
    return _whole(engine, param, list(_states(engine, param, optim_state_key)))


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the fp32 master of `param`, and with it the weight, to `value` [its shape], which is the
    same on every rank. Collective.
    """
    engine = _owner(param)
    flat = _in_memory_order(engine, param, value)
    _set_masters(engine, param, lambda start, stop: flat[start:stop])


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set the averaged gradient of `param` to `value`. Collective; StateError without one."""
    engine = _owner(param)
    if safe_get_full_grad(param) is None:
        raise zs.StateError(
            f"a parameter of shape {tuple(param.shape)} has no gradient to set: run a backward that"
            " uses it first"
        )
    flat = _in_memory_order(engine, param, value)
    for shard in _shards(engine, param):
        shard.set_grad(flat[shard.piece.start : shard.piece.stop])


def safe_set_full_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Set state `optim_state_key` of `param` to `value`. Collective; StateError before a step."""
    engine = _owner(param)
    flat = _in_memory_order(engine, param, value)
    _set_states(engine, param, optim_state_key, lambda start, stop: flat[start:stop])


# ---------------------------------------------------------------------- this rank's part


def safe_get_local_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the master, 1-D; empty where it has none."""
    engine = engine_of(param)
    return None if engine is None else _joined(_masters(engine, param))


def safe_get_local_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return this rank's part of the averaged gradient. Collective, the first time in a step."""
    if safe_get_full_grad(param) is None:
        return None
    engine = _owner(param)
    grads = ((shard, shard.grad()) for shard in _shards(engine, param))
    return _joined(
        _Piece(shard.piece.start, shard.piece.stop, grad)
        for shard, grad in grads
        if grad is not None
    )


def safe_get_local_optimizer_state(
    param: nn.Parameter, optim_state_key: str
) -> torch.Tensor | None:
    """Return this rank's part of an optimizer state; empty where it has none."""
    engine = engine_of(param)
    return None if engine is None else _joined(_states(engine, param, optim_state_key))


def safe_set_local_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the master, and with it the weight. Collective."""
    engine = _owner(param)
    take = _Cut(value)
    _set_masters(engine, param, lambda start, stop: take(stop - start))


def safe_set_local_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Set this rank's part of the averaged gradient. Collective, the first time in a step."""
    safe_get_full_grad(param)
    take = _Cut(value)
    for shard in _shards(_owner(param), param):
        shard.set_grad(take(shard.piece.stop - shard.piece.start))


def safe_set_local_optimizer_state(
    param: nn.Parameter, value: torch.Tensor, optim_state_key: str
) -> None:
    """Set this rank's part of an optimizer state. Collective."""
    engine = _owner(param)
    take = _Cut(value)
    _set_states(engine, param, optim_state_key, lambda start, stop: take(stop - start))


class _Cut:
    """Takes one piece after the other from a 1-D tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self._left = value.reshape(-1)

    def __call__(self, numel: int) -> torch.Tensor:
        if numel > self._left.numel():
            raise zs.ConfigError("value has fewer elements than this rank's part of the parameter")
        taken, self._left = self._left[:numel], self._left[numel:]
        return taken


# ---------------------------------------------------------------------- what rests, and where


def _owner(param: nn.Parameter) -> zs.Engine:
    engine = engine_of(param)
    if engine is None:
        raise zs.ConfigError(
            f"a parameter of shape {tuple(param.shape)} belongs to no engine: give its model to"
            " initialize() first"
        )
    return engine


def _masters(engine: zs.Engine, param: nn.Parameter) -> Iterator[_Piece]:
    for piece in engine.states.resting_pieces():
        if piece.parameter is param:
            with piece.borrowed() as numbers:
                yield _Piece(piece.start, piece.stop, numbers.detach().float().clone())


def _shards(engine: zs.Engine, param: nn.Parameter) -> list[Any]:
    return [shard for shard in engine.states.stepped_pieces() if shard.parameter is param]


def _states(engine: zs.Engine, param: nn.Parameter, key: str) -> Iterator[_Piece]:
    assert engine.optimizer is not None
    for shard in _shards(engine, param):
        value = engine.optimizer.state.get(shard.tensor, {}).get(key)
        if not isinstance(value, torch.Tensor) or value.shape != shard.tensor.shape:
            continue
        start, stop = shard.piece.start, shard.piece.stop
        found = engine.states.optimizer_state(shard, key, start, stop)
        with ExitStack() as stack:
            numbers = stack.enter_context(found()) if callable(found) else found
            yield _Piece(start, stop, numbers.detach().float().clone())


def _set_masters(
    engine: zs.Engine, param: nn.Parameter, part: Callable[[int, int], torch.Tensor]
) -> None:
    engine.states.finish_step()
    with torch.no_grad(), engine.states.rewriting():
        for piece in engine.states.resting_pieces():
            if piece.parameter is param:
                piece.write(part(piece.start, piece.stop))


def _set_states(
    engine: zs.Engine, param: nn.Parameter, key: str, part: Callable[[int, int], torch.Tensor]
) -> None:
    optimizer = engine.optimizer
    if optimizer is None:
        raise zs.StateError("this engine has no optimizer, and so no optimizer state")
    engine.states.finish_step()
    keys = [optimizer.state.get(shard.tensor, {}).keys() for shard in _shards(engine, param)]
    lacking = sorted({str(one) for held in keys if key not in held for one in held} | {""})
    lacks = any(key not in held for held in keys)
    answers = engine.exchange(json.dumps([lacks, lacking[1:]]).encode(), _CALL)
    for rank_lacks, held in map(json.loads, answers):
        if rank_lacks:  # on every rank
            raise zs.StateError(
                f"the optimizer has no state {key!r} of this parameter; it has"
                f" {', '.join(map(repr, held)) or 'none before its first step'}"
            )

    def replace(shard: Any) -> None:
        if shard.parameter is param:
            state = optimizer.state[shard.tensor]
            numbers = part(shard.piece.start, shard.piece.stop)
            state[key] = numbers.detach().to(shard.tensor.device, state[key].dtype, copy=True)

    engine.states.set_states(replace)


def _joined(pieces: Iterable[_Piece]) -> torch.Tensor:
    parts = [piece.numbers.reshape(-1) for piece in pieces]
    return torch.cat(parts) if parts else torch.empty(0)


def _whole(engine: zs.Engine, param: nn.Parameter, pieces: list[_Piece]) -> torch.Tensor | None:
    """Return the whole tensor that the ranks' `pieces` are; None where no rank has any."""
    ranges = [(piece.start, piece.stop) for piece in pieces]
    answers = engine.exchange(json.dumps(ranges).encode(), _CALL)
    everyone = [json.loads(answer) for answer in answers]
    if not any(everyone):
        return None
    flat = torch.zeros(param.numel(), dtype=torch.float32, device=param.device)
    for piece in pieces:
        flat[piece.start : piece.stop] = piece.numbers
    for earlier in everyone[: engine.rank]:  # who sends these
        for start, stop in earlier:
            flat[start:stop] = 0
    if engine.world > 1:
        dist.all_reduce(flat.view(torch.int32))  # of the bits: -0.0 + 0.0 would be 0.0
    return flat.as_strided(param.shape, _stride(engine, param))


def _in_memory_order(engine: zs.Engine, param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """Return the elements of `value` as the parameter's memory holds them, 1-D."""
    shape = tuple(param.shape)
    if value.numel() != prod(shape):
        raise zs.ConfigError(f"value has shape {tuple(value.shape)}, the parameter {shape}")
    dense = torch.empty_strided(
        shape, _stride(engine, param), dtype=torch.float32, device=param.device
    )
    dense.copy_(value.detach().view(shape))
    return dense.as_strided((dense.numel(),), (1,))


def _stride(engine: zs.Engine, param: nn.Parameter) -> tuple[int, ...]:
    return engine.states.parameter_layouts()[id(param)][0]
