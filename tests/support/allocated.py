"""How many bytes this process holds at the peak of some code: every allocation of torch's CPU
allocator, as its profiler reports them, operations' own scratch included, and the memory that the
engine maps past it (shared windows and slots, the host tier).

It asks the engine nothing, and knows nothing of what is planned. Memory that the kernel may take at
any moment (idle ``Pages``) is not held: such tensors are made by the allocator here. A step on the
host runs in the thread that asks for it. Cost: a run is about twice as slow. Memory that ranks
share counts for the rank that reserved it, until it unmaps it; other mapped memory until the end
of the block. Scratch that codecs keep for ever is made anew.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch.autograd.profiler import profile

from zeroshard import memory
from zeroshard.comm import codec, memfd, select
from zeroshard.optim import runner


class _AtOnce:
    """An executor without threads, of which the profiler sees one only."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def submit(self, job: Any, *args: Any) -> Future[Any]:
        """Do `job` now."""
        out: Future[Any] = Future()
        out.set_result(job(*args))
        return out

    def shutdown(self, wait: bool = True) -> None:
        """There is nothing to wait for."""


class _Unseen:
    """Gloo connections whose calls are made by another thread: a message that is under way when
    the profiler ends would crash it (torch 2.13).
    """

    def __init__(self, connections: Any) -> None:
        self._connections = connections
        self._thread = ThreadPoolExecutor(1)

    def send(self, *args: Any) -> Any:
        """Start sending."""
        return self._thread.submit(self._connections.send, *args).result()

    def recv(self, *args: Any) -> Any:
        """Start receiving."""
        return self._thread.submit(self._connections.recv, *args).result()


class AllocatedBytes:
    """Use it as a context from before the model is built; `peak` counts from `watch` on.

    with AllocatedBytes() as allocated:
        ... build and shard
        allocated.watch()
        ... steps
    allocated.peak
    """

    def __init__(self) -> None:
        self.peak = 0
        self._begins_at = 0
        self._mapped: list[tuple[int, int]] = []  # when, bytes
        self._profiler: Any = profile(profile_memory=True)
        self._stack = ExitStack()

    def __enter__(self) -> AllocatedBytes:
        reserve, map_pages, connections = memfd.reserve, memory.map_pages, select.Connections
        ours: dict[int, int] = {}  # inode -> bytes that this rank has reserved

        def reserved(fd: int, start: int, stop: int) -> None:
            self._map(stop - start)
            inode = os.fstat(fd).st_ino
            ours[inode] = ours.get(inode, 0) + stop - start
            reserve(fd, start, stop)

        def shared(fd: int, num_bytes: int) -> torch.Tensor:
            """Map `fd` past torch, whose profiler would count it once more."""
            if num_bytes == 0:
                return torch.empty(0, dtype=torch.uint8)
            view = memoryview(mmap.mmap(fd, num_bytes))
            reserved_here = ours.pop(os.fstat(fd).st_ino, 0)
            weakref.finalize(view, self._map, -reserved_here).atexit = False
            return torch.frombuffer(view, dtype=torch.uint8)

        def mapped(num_bytes: int) -> Any:
            self._map(num_bytes)
            return map_pages(num_bytes)

        def empty(pages: Any, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(numel, dtype=dtype, device=device)

        def connected(*args: Any, **kwargs: Any) -> Any:
            return _Unseen(connections(*args, **kwargs))

        self._stack.enter_context(mock.patch.object(codec, "_kept", codec._Kept()))
        self._stack.enter_context(mock.patch.object(memfd, "reserve", reserved))
        self._stack.enter_context(mock.patch.object(memfd, "map_bytes", shared))
        self._stack.enter_context(mock.patch.object(memory, "map_pages", mapped))
        self._stack.enter_context(mock.patch.object(select, "Connections", connected))
        self._stack.enter_context(mock.patch.object(memory.Pages, "empty", empty))
        self._stack.enter_context(mock.patch.object(runner, "ThreadPoolExecutor", _AtOnce))
        self._profiler.__enter__()
        return self

    def _map(self, num_bytes: int) -> None:
        self._mapped.append((time.time_ns(), num_bytes))

    def watch(self) -> None:
        """Look for the peak from here on."""
        self._begins_at = time.time_ns()

    def __exit__(self, *exception: Any) -> None:
        self._profiler.__exit__(*exception)
        self._stack.close()
        events = [
            (event.start_ns(), event.nbytes())
            for event in self._profiler.kineto_results.events()
            if event.name() == "[memory]"
        ]
        held = 0
        for at, num_bytes in sorted(events + self._mapped, key=lambda one: one[0]):
            held += num_bytes
            if at >= self._begins_at:
                self.peak = max(self.peak, held)
