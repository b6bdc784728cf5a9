"""The threads that wait for gloo's messages."""

from __future__ import annotations

import time

from zeroshard.comm.cpu import gloo_peers


class _SlowToGo:
    """A job that takes a while to be freed, as connections do."""

    def __init__(self, freed: list[bool]) -> None:
        self._freed = freed

    def __call__(self) -> None:
        pass

    def __del__(self) -> None:
        time.sleep(0.3)
        self._freed.append(True)


def test_a_thread_is_busy_until_its_job_is_freed() -> None:
    waiters, freed = gloo_peers.Waiters(), list[bool]()
    waiters.run(_SlowToGo(freed))
    assert gloo_peers._wait_for_jobs(20.0)
    assert freed == [True], "at exit the process would abort in it"
    waiters.close()
