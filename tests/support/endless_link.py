"""A link between device and host whose copies end only when somebody waits for them, so that
overlap is an order of events and not a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from zeroshard.core.work import Work
from zeroshard.tier.store import Direction


class Endless:
    """A link that never finishes a copy by itself: `wait` makes it, after those before it in its
    direction.

    A copy is in flight until somebody waits for it. Bytes are read from the source when the copy
    ends, so a source that is changed or freed too early shows in the weights.
    """

    def __init__(self, *, overlaps: bool) -> None:
        self.overlaps = overlaps
        self.started: dict[Direction, int] = {"to_host": 0, "to_device": 0}
        self.ended: dict[Direction, int] = {"to_host": 0, "to_device": 0}
        self._pending: dict[Direction, list[_Copy]] = {"to_host": [], "to_device": []}
        self._lock = threading.Lock()

    def copy(self, out: torch.Tensor, source: torch.Tensor, direction: Direction) -> Work:
        with self._lock:
            self.started[direction] += 1
            work = _Copy(self, direction, lambda: out.copy_(source))
            self._pending[direction].append(work)
        if not self.overlaps:
            work.wait()
        return work

    def finish(self, copy: _Copy) -> None:
        with self._lock:
            while not copy.over:
                first = self._pending[copy.direction].pop(0)
                first.job()
                first.over = True
                self.ended[copy.direction] += 1

    def in_flight(self, direction: Direction) -> int:
        return self.started[direction] - self.ended[direction]

    def close(self) -> None: ...


class _Copy:
    def __init__(self, link: Endless, direction: Direction, job: Callable[[], object]) -> None:
        self.link, self.direction, self.job, self.over = link, direction, job, False

    def wait(self) -> None:
        self.link.finish(self)

    def done(self) -> bool:
        return self.over
