"""Tensors inside whatever modules and functions pass around."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import CellType
from typing import Any

import torch
from torch import nn

_MOST_OBJECTS = 1000  # that `tensors_within` looks into: an object may lead to all there is
_ATOMS = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    torch.dtype,
    torch.device,
    torch.Size,
    nn.Module,
)


def is_cache(value: Any) -> bool:
    """Whether `value` is a key-value cache, which a second run of a forward would fill twice."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in `value`: a tensor, or nested lists, tuples, dicts (Transformers'
    outputs among them), dataclasses.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            yield from tensors_in(getattr(value, name, None))


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor that `tensors_in` finds, and those in attributes of objects of any
    class (torch's distributions), in sets and closures.

    Modules are not looked into. Each object is visited once, and not more than a thousand of them.
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    waiting, seen = [value], set[int]()
    while waiting and len(seen) < _MOST_OBJECTS:
        item = waiting.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif not isinstance(item, _ATOMS) and id(item) not in seen:
            seen.add(id(item))
            waiting.extend(_parts_of(item))


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return list(value)
    if callable(value) and getattr(value, "__closure__", None):
        return [cell.cell_contents for cell in value.__closure__ if cell != CellType()]
    parts = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        parts += [
            getattr(value, name, None)
            for name in ((slots,) if isinstance(slots, str) else slots)
            if not name.startswith("__")
        ]
    return parts
