"""A link of known bandwidth and latency, one worker per direction, so that overlap can be measured
without an accelerator.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import torch

from zeroshard.core.work import Work
from zeroshard.tier.store import Direction


class Paced:
    """A pretended link: `bytes_per_s` each way and `latency_s` per copy, kept by workers that
    sleep.

    With ``overlap=False`` a copy is over when `copy` returns, which is how the same work is timed
    without overlap.
    """

    def __init__(self, bytes_per_s: float, latency_s: float = 0.0, *, overlap: bool = True) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self.overlaps = overlap
        self.busy_s = 0.0  # both directions together
        self._ways: dict[Direction, _Way] = {}

    def copy(self, out: torch.Tensor, source: torch.Tensor, direction: Direction) -> Work:
        seconds = self._latency_s + source.numel() * source.element_size() / self._bytes_per_s
        self.busy_s += seconds
        way = self._ways.get(direction)
        if way is None:
            way = self._ways[direction] = _Way(direction)
        work = way.start(lambda: out.copy_(source), seconds)
        if not self.overlaps:
            work.wait()
        return work

    def close(self) -> None:
        for way in self._ways.values():
            way.close()
        self._ways.clear()


class _PacedWork:
    def __init__(self) -> None:
        self._over = threading.Event()
        self.error: BaseException | None = None

    def finish(self) -> None:
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
        if self.error is not None:
            raise self.error

    def done(self) -> bool:
        return self._over.is_set()


class _Way:
    """One direction: a worker that makes each copy last as long as the link would."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], object], float, _PacedWork] | None] = (
            queue.SimpleQueue()
        )
        self._free_at = 0.0  # when the wire is free again
        self._thread = threading.Thread(target=self._run, name=f"zeroshard-{name}", daemon=True)
        self._thread.start()

    def start(self, job: Callable[[], object], seconds: float) -> _PacedWork:
        work = _PacedWork()
        self._jobs.put((job, seconds, work))
        return work

    def _run(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, seconds, work = entry
            self._free_at = max(self._free_at, time.perf_counter()) + seconds
            time.sleep(max(0.0, self._free_at - time.perf_counter()))
            try:
                job()
            except BaseException as error:
                work.error = error
            work.finish()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
