"""What makes a race of streams visible: lanes that start late, and memory that is overwritten the
moment it is given back.

A run under either must give the bits of an undisturbed one. On CUDA, `slow_lanes` lets compute run
ahead of every gather and reduce, and `slow_compute` lets them run ahead of compute; `Poisoner`
writes NaN, in compute's order, to what the engine frees, so that a lane that still reads it reads
NaN. On the CPU nothing is enqueued, and a poisoned run shows that nobody reads what was released.

It patches the engine's classes while a context is open, and knows where the engine drops memory:
weights by ``resize_(0)``, gradients when a reduce starts or ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from zeroshard.core.work import Work
from zeroshard.runtime.bucket import Bucket, Reduction
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.streams import AcceleratorStreams, Lane
from zeroshard.runtime.unit import Unit

NAN_BYTE = 0xFF  # a NaN in fp32, bf16 and fp16
# an allocator hands out the block that came back last, or the one before; CUDA's the smallest of
# those that are large enough, and of as many bytes there may be several
NUM_BLOCKS = {"cuda": 16}
CYCLES = 10_000_000  # about five milliseconds: the host must be on its way within them


class ForgetfulReduction(Reduction):
    """A reduce that holds its bucket until that is asked for, and nothing else."""

    def __init__(self, flight: Any, buffer: Any, loan: Any, uses: Any) -> None:
        super().__init__(flight, buffer, loan, ())

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name == "buffer":
            self.buffer = None
        return value


@contextmanager
def tiles_without_marks() -> Iterator[None]:
    """Leave no mark behind tiles that the step's thread steps on the device."""
    bring = Segment.bring

    def unmarked(self: Segment, start: int, stop: int, *args: Any) -> list[Work]:
        return [] if stop <= self.aliased else bring(self, start, stop, *args)

    with mock.patch.object(Segment, "bring", unmarked):
        yield


@contextmanager
def slow_lanes(streams: type, sleep: Callable[[], None]) -> Iterator[None]:
    """Call `sleep` at the start of whatever `streams` puts on the gather or the reduce lane."""
    on: Any = streams.on  # type: ignore[attr-defined]

    @contextmanager
    def slowly(self: Any, lane: Lane) -> Iterator[None]:
        with on(self, lane):
            sleep()
            yield

    with mock.patch.object(streams, "on", slowly):
        yield


@contextmanager
def slow_compute(sleep: Callable[[], None]) -> Iterator[None]:
    """Call `sleep` before every unit computes: its gather has been waited for."""
    attach = Unit.attach

    def slowly(self: Unit) -> None:
        attach(self)
        sleep()

    with mock.patch.object(Unit, "attach", slowly):
        yield


@contextmanager
def disturbed(device: torch.device | str, late: str, cycles: int = CYCLES) -> Iterator[Poisoner]:
    """Let CUDA's ``"lanes"`` or ``"compute"`` start late, and overwrite what is given back."""
    poisoner, sleep = Poisoner(device), partial(torch.cuda._sleep, cycles)
    slow = slow_lanes(AcceleratorStreams, sleep) if late == "lanes" else slow_compute(sleep)
    with slow, poisoner.poisoning():
        yield poisoner


class Poisoner:
    """Overwrites memory on `device` that the engine gives back."""

    def __init__(self, device: torch.device | str) -> None:
        self.num_released = 0  # gathered buffers
        self.num_dropped = 0  # gradients
        self._device = torch.device(device)

    @contextmanager
    def poisoning(self) -> Iterator[None]:
        """Overwrite what any engine gives back inside."""
        resize = torch.UntypedStorage.resize_

        def released(storage: Any, num_bytes: int) -> Any:
            if not num_bytes and storage.nbytes() and storage.device.type == self._device.type:
                self.num_released += 1
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).fill_(
                    NAN_BYTE
                )
            return resize(storage, num_bytes)

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", released))
            for name in ("reduce", "reduce_inside", "wait"):
                dropping = self._then_struck(getattr(Bucket, name))
                stack.enter_context(mock.patch.object(Bucket, name, dropping))
            yield

    def _then_struck(self, method: Any) -> Any:
        """Return `method` of a Bucket, followed by a strike at memory of its sizes."""

        def struck(bucket: Bucket, *args: Any, **options: Any) -> Any:
            sizes = {bucket.num_bytes, *bucket.bytes_by_tier().values()}
            had_reduction = bucket.in_flight
            result = method(bucket, *args, **options)
            if had_reduction or bucket.in_flight:
                self.num_dropped += 1
                for num_bytes in sizes:
                    self._strike(num_bytes)
            return result

        return struck

    def _strike(self, num_bytes: int) -> None:
        """Take memory of that size, as the next one who allocates would, and overwrite it."""
        blocks = [
            torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            for _ in range(NUM_BLOCKS.get(self._device.type, 2))
        ]
        for block in blocks:
            block.fill_(NAN_BYTE)
