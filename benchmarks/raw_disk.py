"""The disk itself, as Python sees it: plain threads with preadv and pwritev on aligned memory, past
the page cache. `disk` and the disk step of `offload` are measured beside it.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroshard.core.layout import round_up
from zeroshard.tier.disk import DiskStore
from zeroshard.tier.swapdir import BLOCK, read_blocks, write_blocks
from zeroshard.tier.transfer import Memory

__all__ = ["NUM_GROUPS", "NUM_STATES", "REQUEST_BYTES", "Options", "Raw"]

NUM_STATES = 3
REQUEST_BYTES = 2 << 20
NUM_GROUPS = 3  # in memory
_GROUP = 16 << 20  # bytes of each state that are read, and written, together


@dataclass(frozen=True)
class Options:
    """What is measured."""

    path: Path | None
    num_bytes: int  # of the states, all together
    rounds: int
    queue_depth: int
    verify: bool

    @property
    def state_bytes(self) -> int:
        """Bytes of one state, whole blocks."""
        return round_up(max(self.num_bytes // NUM_STATES, 1), BLOCK)

    @property
    def group_bytes(self) -> int:
        """Bytes of each state in one group."""
        return min(_GROUP, self.state_bytes)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the buffers that each contender reads into and writes from."""
        return NUM_GROUPS * NUM_STATES * self.group_bytes


class Raw:
    """Plain threads on one file per state."""

    def __init__(self, store: DiskStore, options: Options) -> None:
        self._state_bytes = options.state_bytes
        files = [
            store.files.create(f"raw {index}", options.state_bytes, direct=store.direct)
            for index in range(NUM_STATES)
        ]
        self.fds = [fd for fd, _ in files]
        self.paths = [store.path / name for _, name in files]
        # per thread; little memory would all stay in caches
        places = max(1, options.ring_bytes // REQUEST_BYTES // options.queue_depth)
        self._memories = [
            Memory(places * REQUEST_BYTES, pinned=False) for _ in range(options.queue_depth)
        ]
        for memory in self._memories:
            memory.tensor(0, places * REQUEST_BYTES // 4, torch.float32).normal_()

    def turn(self, kind: str) -> None:
        requests: queue.SimpleQueue[tuple[Callable[[int, memoryview, int], None], int, int]] = (
            queue.SimpleQueue()
        )
        for start in range(0, self._state_bytes, REQUEST_BYTES):
            for do in (read_blocks,) * (kind != "write") + (write_blocks,) * (kind != "read"):
                for fd in self.fds:
                    requests.put((do, fd, start))
        failed: list[BaseException] = []
        threads = [
            threading.Thread(target=self._work, args=(requests, memory, failed))
            for memory in self._memories
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]

    def _work(
        self,
        requests: queue.SimpleQueue[tuple[Callable[[int, memoryview, int], None], int, int]],
        memory: Memory,
        failed: list[BaseException],
    ) -> None:
        try:
            for place in itertools.cycle(range(0, memory.num_bytes, REQUEST_BYTES)):
                do, fd, start = requests.get_nowait()
                size = min(REQUEST_BYTES, self._state_bytes - start)
                do(fd, memory.view[place : place + size], start)
        except queue.Empty:
            return
        except OSError as error:
            failed.append(error)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
