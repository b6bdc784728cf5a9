"""When the streamed step runs: at once, beside the device's own step, or one step late.

    at once    optimizer.step():  [ tiles ][ device ]                        nothing rests on the device: no thread is needed
    beside     optimizer.step():  [ device ]                                 Twin-Flow (Offload++): two parts at the same time
                                  [ tiles  ]
    late       forward, backward t+1, step t+1 ...                           ZeRO-Offload, section 5.2: one-step delayed parameter update
                    [ tiles of step t ]

Late means: the update that the gradients of step t ask for is in the weights from the forward t+2 on. Step t+1 first waits for it.

Invariant: at most one step is under way; whoever reads masters or moments joins it first. An error inside surfaces in `join`.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from zeroshard.optim.streamed import StepJob, Streamed

__all__ = ["StepRunner"]


class StepRunner:
    """Runs the jobs of one engine's streamed step."""

    def __init__(self, streamed: Streamed, *, beside: bool, delayed_update: int | None) -> None:
        self._streamed = streamed
        self._beside = beside
        self._delayed_update = delayed_update
        self._steps = 0
        self.was_late = False  # the last step that was started ends one step late
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: Future[None] | None = None

    @property
    def is_late(self) -> bool:
        """Whether the next step is applied one step late."""
        return self._delayed_update is not None and self._steps >= self._delayed_update

    def start(self, job: StepJob) -> None:
        """Begin a step; the one before has been joined."""
        assert self._under_way is None
        self.was_late = self.is_late
        if not (self._beside or self.is_late):
            self._streamed.run(job)
        else:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="zeroshard-step")
            self._under_way = self._pool.submit(self._streamed.run, job)
        self._steps += 1

    def join(self) -> bool:
        """Wait for the step under way; return whether there was one. Raises what it raised."""
        under_way, self._under_way = self._under_way, None
        if under_way is None:
            return False
        under_way.result()
        return True

    def close(self) -> None:
        """Wait, and end the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
        self._pool, self._under_way = None, None
