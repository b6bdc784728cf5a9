"""Which elements of a state rest on the device and which on another tier, and their tiles.

Offload++ (Twin-Flow) steps a fraction of the optimizer state on the host and the rest on the device
at the same time. The fraction is one cut through all segments, in unit order::

    unit 0 | unit 1 | unit 2 | unit 3 | unit 4          fraction 0.4: the last 40% of the elements
    <------- device -------->|<--- other tier ---       rest on the host

The end of the model leaves because its gradients come first in backward and its weights are needed
last in the next forward. Cuts fall on multiples of `align`. Pure arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroshard.core.layout import ALIGN, Range


def splits(numels: Sequence[int], fraction: float, align: int = ALIGN) -> list[int]:
    """Return how many first elements of each segment of `numels` rest on the device.

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
    """Return [split, numel) in ranges of at most `tile_numel` elements."""
    assert tile_numel > 0 and 0 <= split <= numel, (split, numel, tile_numel)
    return [(start, min(start + tile_numel, numel)) for start in range(split, numel, tile_numel)]


def balanced(fraction: float, device_s: float, other_s: float, *, least: float = 0.0) -> float:
    """Return the fraction at which device and other tier would take the same time.

    `device_s` and `other_s` are what the step of each part took.
    ``balanced(0.5, 1.0, 3.0) == 0.25``: three quarters at the device's speed take 1.5, a quarter at
    the other's 1.5. At least `least` (what the device has no room for) and a hundredth of either
    side remain, to be measured.
    """
    assert 0.0 < fraction < 1.0 and device_s > 0 and other_s > 0, (fraction, device_s, other_s)
    device_speed, other_speed = (1.0 - fraction) / device_s, fraction / other_s
    return min(max(other_speed / (device_speed + other_speed), least, 0.01), 0.99)
