"""Tensors inside whatever modules and functions pass around."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from types import CellType
from typing import Any

import torch
from torch import nn

_MOST_OBJECTS = 1000  # that `tensors_within` looks into: an object may lead to all there is
_PLAIN_ATOMS: frozenset[type] = frozenset((str, bytes, int, float, complex, bool, type(None)))
_ATOMS: tuple[type, ...] = (*_PLAIN_ATOMS, type, torch.dtype, torch.device, torch.Size, nn.Module)


def is_cache(value: Any) -> bool:
    """Whether `value` is a key-value cache, which a second run of a forward would fill twice."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return every tensor in `value`: a tensor, or nested lists, tuples, dicts (Transformers'
    outputs among them), dataclasses.
    """
    found: list[torch.Tensor] = []
    parts: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, (list, tuple)):
        parts = value
    elif hasattr(value, "__dataclass_fields__"):
        parts = [getattr(value, name, None) for name in value.__dataclass_fields__]
    for part in parts:
        if type(part) is torch.Tensor:
            found.append(part)
        elif type(part) not in _PLAIN_ATOMS:
            found += tensors_in(part)
    return found


def tensors_within(value: Any) -> list[torch.Tensor]:
    """Return every tensor that `tensors_in` finds, and those in attributes of objects of any
    class (torch's distributions), in sets and closures.

    Modules are not looked into. Each object is visited once, and not more than a thousand of them.
    """
    found, waiting, seen = list[torch.Tensor](), [value], set[int]()
    while waiting and len(seen) < _MOST_OBJECTS:
        item = waiting.pop()
        if type(item) in _PLAIN_ATOMS:
            continue
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif not isinstance(item, _ATOMS) and id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, dict):
                waiting.extend(item.values())
            elif isinstance(item, (list, tuple, set, frozenset, deque)):
                waiting.extend(item)
            else:
                waiting.extend(_attributes_of(item))
    return found


def _attributes_of(value: Any) -> list[Any]:
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
