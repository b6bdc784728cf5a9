"""Tensors inside whatever modules and functions pass around."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["tensors_in"]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in `value`: a tensor, or nested lists, tuples, dicts (Transformers' outputs among them), dataclasses."""
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
