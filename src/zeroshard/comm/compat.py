"""The two collectives that torch 2.13 renamed, under their new names on every torch, without a
warning on any.

Everything else in torch.distributed is called where it is used. No state, no patching.
"""

from __future__ import annotations

from typing import Any

from torch import distributed as dist

__all__ = ["all_gather_single", "reduce_scatter_single"]

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)
