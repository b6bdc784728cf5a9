"""How bytes get from the device to the host and back.

    Direct      CPU: there is no link, a copy is a copy, done when it returns
    Enqueued    CUDA: a copy on the current stream (the caller chooses the lane,
                runtime/streams.py), from or into pinned memory
    Paced       tests: a link of known bandwidth and latency, one worker per direction, so that
                overlap can be measured without an accelerator

Invariant: copies in one direction take effect in the order in which they were started. A link moves
bytes; it does not allocate.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

from zeroshard.core.work import DoneWork, Work

__all__ = ["Direct", "Direction", "Enqueued", "Link", "Paced", "link_of"]

Direction = Literal["to_host", "to_device"]


class Link(Protocol):
    """The way between device and host."""

    overlaps: bool  # whether anything may go on while a copy is under way

    def copy(self, out: torch.Tensor, source: torch.Tensor, direction: Direction) -> Work:
        """Start ``out.copy_(source)``."""

    def close(self) -> None:
        """Give back threads. Idempotent."""


def link_of(device: torch.device) -> Link:
    """Return what `device` needs."""
    return Direct() if device.type == "cpu" else Enqueued(device)


class Direct:
    """Device and host are the same memory."""

    overlaps = True

    def copy(self, out: torch.Tensor, source: torch.Tensor, direction: Direction) -> Work:
        out.copy_(source)
        return DoneWork()

    def close(self) -> None: ...


class _Event:
    """A copy that was enqueued on a stream."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = torch.get_device_module(device).Event()
        self._event.record()

    def wait(self) -> None:
        self._event.wait()

    def done(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()


class Enqueued:
    """Copies on the current stream; the host side is pinned memory."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, out: torch.Tensor, source: torch.Tensor, direction: Direction) -> Work:
        out.copy_(source, non_blocking=True)
        return _Event(self._device)

    def close(self) -> None: ...


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
