"""Reads and writes under way, and the worker threads that do them (ZeRO-Infinity, section 6.3).

A transfer's pieces are done by free threads, at most `queue_depth` at a time. A transfer that
touches units of an earlier one of the same storage starts after it, unless both read::

    write [0, 6000)   ====            both change block 1: one after the other
    write [6000, 9000)    ===
    read  [20000, 24000)      ====    at the same time as either

Invariant: a piece that a thread has taken waits for no other piece, so nothing can deadlock. A
transfer that has ended keeps no tensor alive. Who starts one may be interrupted at any line by a
signal's handler that raises: all that is counted is counted by the workers. Cost: about 20 µs of
interpreter per piece.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from zeroshard.errors import StorageError
from zeroshard.tier.pieces import DiskPiece
from zeroshard.tier.staging import Memory

# One worker's buffer for unaligned transfers, allocated at the first call. Not from the staging
# pool: whoever waits for a transfer may hold all of that.
Scratch = Callable[[], Memory]


class TierTransfer:
    """A read or write of one storage, as a Work; `beside` lists the storage's transfers."""

    def __init__(
        self,
        pieces: Sequence[DiskPiece],
        run: Callable[[DiskPiece, Scratch], None],
        *,
        writes: bool,
        beside: list[TierTransfer],
    ) -> None:
        self.pieces = pieces
        self.writes = writes
        self.beside = beside
        self.num_left = len(pieces)
        self.num_blockers = 0
        self.followers: list[TierTransfer] = []
        self._run: Callable[[DiskPiece, Scratch], None] | None = run
        self._error: BaseException | None = None
        self._over = threading.Event()

    def wait(self) -> None:
        self._over.wait()
        if isinstance(self._error, StorageError):
            raise self._error.with_traceback(None)  # or each wait would lengthen it
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._over.is_set()

    def wait_end(self) -> None:
        """Wait for the end, failed or not."""
        self._over.wait()

    def conflicts(self, other: TierTransfer) -> bool:
        """Whether one must wait for the other."""
        if not (self.writes or other.writes):
            return False
        mine, theirs = self.pieces, other.pieces
        return mine[0].low < theirs[-1].high and theirs[0].low < mine[-1].high

    def attempt(self, piece: DiskPiece, scratch: Scratch) -> None:
        """Do one piece, unless another one has failed."""
        if self._error is None and self._run is not None:
            try:
                self._run(piece, scratch)
            except BaseException as error:  # surfaces at `wait`; a worker must not end
                if isinstance(error, StorageError):
                    _clear_tracebacks(error)
                self._error = error

    def end(self) -> None:
        """Release its tensors and let `wait` return."""
        self._run = None
        self._over.set()


def _clear_tracebacks(error: BaseException) -> None:
    """Remove the tracebacks: their frames refer to the tensors."""
    error.__traceback__ = None
    if error.__cause__ is not None:
        error.__cause__.__traceback__ = None


class Workers:
    """`num_threads` daemon threads for the transfers of one store."""

    def __init__(self, num_threads: int, scratch_bytes: int, *, pinned: bool) -> None:
        # a piece; (): open what is new; None: end
        self._jobs: queue.SimpleQueue[tuple[TierTransfer, DiskPiece] | tuple[()] | None]
        self._jobs, self._new = queue.SimpleQueue(), deque[TierTransfer]()
        self._lock = threading.Lock()  # not of `stop`, which the garbage collector may call
        self._num_open = 0  # transfers that were started and have not ended
        self._stopping = False
        self._threads: list[threading.Thread] = []
        for index in range(num_threads):
            job = (functools.cache(partial(Memory, scratch_bytes, pinned=pinned)),)
            name = f"zeroshard-disk-{index}"
            thread = threading.Thread(target=self._work, args=job, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def start(self, transfer: TierTransfer) -> None:
        """Start `transfer` once those under way beside it that it must wait for have ended."""
        assert not self._stopping, "the store is closed"
        self._new.append(transfer)
        self._jobs.put(())

    def _open_new(self) -> None:
        with self._lock:
            while self._new:
                transfer = self._new.popleft()
                self._num_open += 1
                blockers = [other for other in transfer.beside if transfer.conflicts(other)]
                for other in blockers:
                    other.followers.append(transfer)
                transfer.num_blockers = len(blockers)
                transfer.beside.append(transfer)
                if not blockers:
                    self._submit(transfer)
            self._end_threads()

    def wait_ends(self, transfers: list[TierTransfer]) -> None:
        """Wait for the end of every transfer that was started and is in a storage's list, or will
        be.
        """
        with self._lock:
            now = [*transfers, *(one for one in tuple(self._new) if one.beside is transfers)]
        for transfer in now:
            transfer.wait_end()

    def stop(self) -> None:
        """Let the threads end after the last transfer, waiting ones included."""
        self._stopping = True
        self._jobs.put(())

    def join(self) -> None:
        """Wait for the threads to end."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _submit(self, transfer: TierTransfer) -> None:
        for piece in transfer.pieces:
            self._jobs.put((transfer, piece))

    def _work(self, scratch: Scratch) -> None:
        while (job := self._jobs.get()) is not None:
            if not job:
                self._open_new()
                continue
            transfer, piece = job
            transfer.attempt(piece, scratch)
            self._finish_piece(transfer)

    def _finish_piece(self, transfer: TierTransfer) -> None:
        with self._lock:
            transfer.num_left -= 1
            if transfer.num_left:
                return
            transfer.beside.remove(transfer)
            for follower in transfer.followers:
                follower.num_blockers -= 1
                if not follower.num_blockers:
                    self._submit(follower)
            transfer.followers = []
            self._num_open -= 1
            self._end_threads()
        transfer.end()

    def _end_threads(self) -> None:
        if self._stopping and not self._num_open:
            for _ in self._threads:
                self._jobs.put(None)
