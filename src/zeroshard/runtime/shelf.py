"""Where activations between units are kept from a forward to its backward: the protocol.

`Here` leaves them where they are; nn/inputs.py has one for other tiers, which sharding/api.py hands
down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["Here", "Shelf", "Shelves"]


class Shelf(Protocol):
    """Keeps some tensors."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Keep `tensor`; return what stands for it."""

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor that `pack` gave this for."""

    def ahead(self) -> None:
        """Start bringing everything back."""


# of a tier and a directory: makes shelves. Raises ConfigError
Shelves = Callable[[str, str | None], Callable[[], Shelf]]


class Here:
    """Keeps tensors where they are."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return `tensor`."""
        return tensor

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor."""
        kept: torch.Tensor = packed
        return kept

    def ahead(self) -> None:
        """It is here."""
