"""Which elements of a state rest on the device and which on another tier, and in which tiles the others are stepped.

Offload++ (Twin-Flow) steps a fraction of the optimizer state on the host and the rest on the device at the same time. Here the fraction is
one cut through all segments laid one after another in unit order::

    unit 0 | unit 1 | unit 2 | unit 3 | unit 4          fraction 0.4: the last 40% of the elements rest on the host
    <------- device -------->|<--- other tier ---

The end of the model goes to the other tier because its gradients come first in backward and its weights are needed last in the next forward:
both ways over the link there is the most time.

Invariant: cuts fall on multiples of `align`; the bytes off the device are the fraction's within one `align`. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.core.layout import ALIGN, Range

__all__ = ["splits", "tiles"]


def splits(numels: Sequence[int], fraction: float, align: int = ALIGN) -> list[int]:
    """Return, per segment of `numels` elements (multiples of `align`), how many of its first elements rest on the device.

    `fraction` in [0, 1] of all elements rest on the other tier.
    """
    assert 0.0 <= fraction <= 1.0, fraction
    total = sum(numels)
    left = total - round(fraction * total / align) * align
    out = []
    for numel in numels:
        here = max(0, min(numel, left))
        left -= here
        out.append(here)
    return out


def tiles(split: int, numel: int, tile_numel: int) -> list[Range]:
    """Return [split, numel) cut into ranges of at most `tile_numel` elements, counted from `split`."""
    assert tile_numel > 0 and 0 <= split <= numel, (split, numel, tile_numel)
    return [(start, min(start + tile_numel, numel)) for start in range(split, numel, tile_numel)]
