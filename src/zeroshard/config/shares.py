"""What may be said in `Config.shares`, before the ranks are known."""

from __future__ import annotations

import math
from typing import Any

__all__ = ["check_shares"]

_SLACK = 1e-6  # of the sum of numbers that are written with a few digits


def check_shares(shares: Any) -> Any:
    """Return `shares` as they were given: numbers, "memory", "auto", or None. Raises ValueError
    naming the first thing that is wrong.
    """
    if shares is None or shares in ("memory", "auto"):
        return shares
    if isinstance(shares, str) or not isinstance(shares, (list, tuple)):
        raise ValueError(
            f"shares={shares!r} is not a list of a number per data parallel rank, 'memory' or"
            " 'auto'"
        )
    for rank, share in enumerate(shares):
        if isinstance(share, bool) or not isinstance(share, (int, float)):
            raise ValueError(f"shares[{rank}]={share!r} is not a number")
        if not math.isfinite(share) or share < 0:
            raise ValueError(f"shares[{rank}]={share} is not a share: give 0 or more")
    total = math.fsum(shares)
    if not shares or abs(total - 1) > _SLACK:
        raise ValueError(
            f"shares={list(shares)} sum to {total:.7g}: the shares of all ranks must sum to 1"
        )
    return tuple(map(float, shares))
