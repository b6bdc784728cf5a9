"""When the streamed step runs: at once, beside the device's own step, or one step late.

    at once    optimizer.step():  [ tiles ][ device ]    nothing rests on the device: no thread is
                                                         needed
    beside     optimizer.step():  [ device ]             Twin-Flow (Offload++): two parts at the
                                  [ tiles  ]             same time
    into       optimizer.step()  forward                 a unit's forward waits for its own tiles
    forward              [ tiles    ....  ]              (Segment.settle): exact, and the first
                                                         units' weights are there while the last are
                                                         stepped
    late       forward, backward t+1, step t+1 ...       ZeRO-Offload, section 5.2: one-step delayed
                    [ tiles of step t ]                  parameter update

Late means: the update that the gradients of step t ask for is in the weights from the forward t+2
on. Step t+1 first waits for it.

Invariant: at most one step is under way; whoever reads masters or moments joins it first, and
whoever changes a gradient that it reads (``zero_grad(set_to_none=False)``, a backward without
``zero_grad()``) waits for it. An error inside surfaces in `join`.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch

from zeroshard.optim.streamed import StepJob, Streamed

__all__ = ["StepRunner"]


class StepRunner:
    """Runs the jobs of one engine's streamed step."""

    def __init__(
        self,
        streamed: Streamed,
        *,
        beside: bool,
        into_forward: bool,
        delayed_update: int | None,
        device: torch.device,
    ) -> None:
        self.streamed = streamed
        self._beside = beside
        self._into_forward = into_forward
        self._stream = (
            None if device.type == "cpu" else torch.get_device_module(device).Stream(device)
        )
        self._device = device
        self._delayed_update = delayed_update
        self.num_steps = 0
        self.was_late = False  # the last step that was started ends one step late
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    @property
    def is_late(self) -> bool:
        """Whether the next step is applied one step late."""
        return self._delayed_update is not None and self.num_steps >= self._delayed_update

    def start(self, job: StepJob | None) -> None:
        """Begin a step; the one before has been joined. None: this rank cannot take it, and only
        counts it as the others do.
        """
        assert self._under_way is None
        self.was_late = self.is_late
        self.num_steps += 1
        if job is None:
            self._under_way = Future()
            self._under_way.set_result(None)
            return
        if not (self._beside or self._into_forward or self.is_late):
            self.streamed.run(job)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="zeroshard-step")
        if not self.was_late:
            for tile, _, _ in job.tiles:
                tile.segment.stepped.clear()
        ready = None
        if self._stream is not None:
            ready = torch.get_device_module(self._device).Event()
            ready.record()  # the weights' last readers come before the first write
        over = threading.Event()
        for _, resting, _ in job.tiles:
            resting.lend(partial(self._wait_until, over))
        self._under_way = self._pool.submit(self._run, job, ready, over)

    def _wait_until(self, over: threading.Event) -> None:
        over.wait()
        if self._stream is not None:
            torch.get_device_module(self._device).current_stream(self._device).wait_stream(
                self._stream
            )

    def _run(self, job: StepJob, ready: Any, over: threading.Event) -> None:
        segments = [tile.segment for tile, _, _ in job.tiles]
        try:
            if self._stream is None:
                self.streamed.run(job)
                return
            with torch.get_device_module(self._device).stream(self._stream):
                self._stream.wait_event(ready)
                self.streamed.run(job)
        finally:
            for segment in segments:
                segment.stepped.set()
            over.set()

    def end_of_step(self) -> None:
        """The device's own step is over: wait for the tiles, unless they may go on into what
        follows.
        """
        if not (self.was_late or self._into_forward):
            self.join()

    @property
    def has_failed(self) -> bool:
        """Whether the step under way is over, by an exception that `join` raises."""
        return (
            self._under_way is not None
            and self._under_way.done()
            and self._under_way.exception() is not None
        )

    @property
    def is_under_way(self) -> bool:
        """Whether there is a step that has not been joined."""
        return self._under_way is not None

    def join(self) -> None:
        """Wait for the step under way, if there is one. Raises what it raised."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Wait, and end the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._pool, self._under_way = None, None
