"""Which engine holds a parameter, and the attributes that DeepSpeed's users read on one.

Under stage 3 DeepSpeed hangs ``ds_id``, ``ds_shape``, ``ds_numel`` and ``ds_status`` on every
parameter, and programs tell by them whether a parameter must be gathered before it is read. A
released parameter keeps its shape here, so only the status says something new.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from enum import Enum

from torch import nn

import zeroshard as zs

__all__ = [
    "ZeroParamStatus", "ZeroParamType", "engine_of", "in_one_order", "mark", "own", "release",
    "unmark", "was_used",
]  # fmt: skip

_ATTRIBUTES = ("ds_id", "ds_shape", "ds_numel", "ds_status")
# by id of the parameter: its place in the module
_owners: weakref.WeakKeyDictionary[zs.Engine, dict[int, int]] = weakref.WeakKeyDictionary()
_numbers = itertools.count()
_used: list[bool] = []  # whether any engine was made in this process


def was_used() -> bool:
    """Whether `own` was ever called."""
    return bool(_used)


class ZeroParamStatus(Enum):
    """Whether the whole parameter is in memory."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class ZeroParamType(Enum):
    """Where a parameter lies, in DeepSpeed's words; every parameter of ours is PARTITIONED or
    NORMAL.
    """

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


def own(engine: zs.Engine) -> None:
    """Note that `engine` holds its module's parameters."""
    _used[:] = [True]
    parameters = engine.module.parameters()
    _owners[engine] = {id(parameter): place for place, parameter in enumerate(parameters)}


def release(engine: zs.Engine) -> None:
    """Note that it holds them no more."""
    _owners.pop(engine, None)


def engine_of(parameter: object) -> zs.Engine | None:
    """Return the engine that holds `parameter`, or None for a plain one."""
    return next((engine for engine, held in _owners.items() if id(parameter) in held), None)


def in_one_order(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return each parameter once, in an order that is the same on every rank.

    Transformers gathers a set, whose order is each rank's own. Plain parameters of one shape keep
    the order in which they come: a set may exchange them until initialize() takes rank 0's values.
    """

    def key(parameter: nn.Parameter) -> tuple[tuple[int, ...], str, int]:
        places = (held.get(id(parameter)) for held in _owners.values())
        place = next((place for place in places if place is not None), -1)
        return tuple(parameter.shape), str(parameter.dtype), place

    return sorted({id(parameter): parameter for parameter in parameters}.values(), key=key)


def mark(parameters: Iterable[nn.Parameter]) -> None:
    """Give parameters that rest in shards the attributes of DeepSpeed's."""
    for parameter in parameters:
        vars(parameter).update(
            ds_id=next(_numbers),
            ds_shape=parameter.shape,
            ds_numel=parameter.numel(),
            ds_status=ZeroParamStatus.NOT_AVAILABLE,
        )


def unmark(parameters: Iterable[nn.Parameter]) -> None:
    """Take them off again."""
    for parameter in parameters:
        for name in _ATTRIBUTES:
            vars(parameter).pop(name, None)
