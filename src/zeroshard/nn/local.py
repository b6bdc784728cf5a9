"""The local tensors of parameters, for those above `runtime`; state/local.py has them."""

from __future__ import annotations

from zeroshard.state.local import is_dtensor, local_of, part_of

__all__ = ["is_dtensor", "local_of", "part_of"]
