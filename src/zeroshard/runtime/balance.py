"""``fraction="auto"``: the share of the optimizer on the host at which host and device finish a
step together (Offload++, Twin-Flow).

It starts from what a short probe says of the link and of both memories, and from the memory that
the device has left; then every step is measured, and the cut between the two parts (core/split.py)
moves to where both would have taken the same time::

    step        1      2      3      4      5 ...
    device    ======  ====   ====
    host      ==      ====   ====                 the cut stays once a move would be less than two
                                                  hundredths

Moving the cut re-cuts pieces, masters and moments where they lie, and changes no bit. Each rank
decides by itself: what rests where is its own affair. Cost: what crosses over is copied once;
nothing once the cut stays.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from zeroshard.core.split import balanced
from zeroshard.memory import bounce_buffer, synchronize
from zeroshard.tier.link import Link

_log = logging.getLogger("zeroshard")
_PROBE_BYTES = 4 << 20  # of a link that takes a sixty-fourth of it within a millisecond
_ADAM_BYTES = 28  # that a step of one element moves through memory: four numbers in, three out
_SETTLED = 0.02
_MOVES = 3  # at most: what is measured is never the same twice
_PATIENCE = 3  # measurements that one move takes
CHOSE = (
    "offload.fraction='auto' chose %.3f: the device's part of the step takes %.1f ms, the host's"
    " %.1f ms"
)


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """Return the least of a few timings of `action`."""
    best = float("inf")
    for _ in range(4):
        begin = time.perf_counter()
        action()
        synchronize(device)
        best = min(best, time.perf_counter() - begin)
    return max(best, 1e-9)


def first_fraction(device: torch.device, link: Link, *, least: float) -> float:
    """Return where to begin: from the bandwidths of the link and of both memories, at least
    `least`.
    """
    near = torch.zeros(_PROBE_BYTES, dtype=torch.uint8, device=device)
    host = bounce_buffer(_PROBE_BYTES, torch.uint8, device).zero_()
    device_s = _seconds(lambda: near.add_(1), device) / _PROBE_BYTES * _ADAM_BYTES / 2
    host_s = _seconds(lambda: host.add_(1), torch.device("cpu")) / _PROBE_BYTES * _ADAM_BYTES / 2

    def copy_s(num_bytes: int) -> float:
        return (
            _seconds(
                lambda: link.copy(near[:num_bytes], host[:num_bytes], "to_device").wait(), device
            )
            / num_bytes
        )

    link_s = copy_s(_PROBE_BYTES // 64)
    if link_s * _PROBE_BYTES < 64e-3:
        link_s = copy_s(_PROBE_BYTES)
    link_s *= 4  # fp32 weights back
    return balanced(0.5, device_s, max(host_s, link_s), least=least)


@dataclass
class Balance:
    """Where the cut is, and what the steps since it moved have taken."""

    fraction: float
    least: float = 0.0
    settled: bool = False

    def __post_init__(self) -> None:
        self._targets: list[float] = []
        self._moves = 0
        self._skip = 1  # the first step makes the moments

    def after_step(self, device_s: float, other_s: float) -> float | None:
        """Take note of a step; return the fraction to move to, if it should move."""
        if self.settled or device_s <= 0 or other_s <= 0:
            return None
        if self._skip:
            self._skip -= 1
            return None
        self._targets.append(balanced(self.fraction, device_s, other_s, least=self.least))
        if len(self._targets) < _PATIENCE:
            return None
        target, self._targets = statistics.median(self._targets), []
        if abs(target - self.fraction) < _SETTLED or self._moves == _MOVES:
            self.settled = True
            _log.info(CHOSE, self.fraction, device_s * 1e3, other_s * 1e3)
            return None
        self.fraction = target
        self._moves += 1
        self._skip = 1
        return target
