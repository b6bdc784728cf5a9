"""The threads that wait for gloo's messages."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any
from unittest import mock

import torch

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


class _Work:
    """A message of gloo's, which has arrived."""

    def __init__(self, tensors: list[torch.Tensor], *_: int) -> None:
        self.tensors = tensors

    def wait(self, timeout: Any) -> None:
        pass


def test_a_message_is_freed_before_its_arrival_is_told() -> None:
    """A loaded machine runs the thread later: what it held would outlive the engine's close()."""
    messages, freed, told = weakref.WeakSet[_Work](), list[bool](), threading.Event()

    def wake() -> None:
        freed.append(not messages)
        told.set()

    def send(*args: Any) -> _Work:
        messages.add(work := _Work(*args))
        return work

    waiters, connections = gloo_peers.Waiters(), mock.Mock(send=send)
    transfer = gloo_peers.Transfer("a gather", waiters, wake, members=[0, 1])
    transfer.send(connections, 1, torch.ones(4), tag=0)
    transfer.start()
    assert told.wait(300) and freed == [True]
    waiters.close()
