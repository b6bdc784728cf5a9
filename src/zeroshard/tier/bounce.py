"""Copies between a tensor and a worker's bounce buffer.

    HostBytes     host memory: the disk uses it itself where it is aligned, else a plain copy
    LinkedBytes   an accelerator's memory (or a test's link): through a pinned buffer and the link

[Note: device and disk] A transfer runs later, in another thread. So an event waits for the stream
that was current when it was started; the copies run on the store's own stream, and the worker waits
for each before it reuses its buffer. When the transfer's `wait` returns, the bytes are valid on
every stream.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from zeroshard.memory import Mark, has_streams
from zeroshard.system.device import Device
from zeroshard.tier.link import Direct, Direction, Link
from zeroshard.tier.staging import Memory, Staging


class Bytes(Protocol):
    """A tensor as bytes, for one transfer."""

    def straight(self, start: int, stop: int, align: int) -> memoryview | None:
        """Return bytes [start, stop) if the disk can use them in place, aligned to `align`."""

    def put(self, start: int, memory: Memory, low: int, num_bytes: int) -> None:
        """Copy `num_bytes` of `memory` from `low` to byte `start` of the tensor, and wait."""

    def get(self, start: int, memory: Memory, low: int, num_bytes: int) -> None:
        """The other way."""


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    # a single element may have any stride
    return tensor.detach().as_strided(tensor.shape, (1,)).view(torch.uint8)


class _HostBytes:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor  # keeps the memory alive
        self._address = tensor.data_ptr()
        # Not through numpy: its arrays forbid torch to resize the storage, which is how gathered
        # weights are released.
        buffer = (ctypes.c_ubyte * tensor.nbytes).from_address(self._address)
        self._view = memoryview(buffer).cast("B")

    def straight(self, start: int, stop: int, align: int) -> memoryview | None:
        return None if (self._address + start) % align else self._view[start:stop]

    def put(self, start: int, memory: Memory, low: int, num_bytes: int) -> None:
        # without the GIL, and in this thread alone
        ctypes.memmove(self._address + start, memory.address + low, num_bytes)

    def get(self, start: int, memory: Memory, low: int, num_bytes: int) -> None:
        ctypes.memmove(memory.address + low, self._address + start, num_bytes)


class _LinkedBytes:
    def __init__(
        self, tensor: torch.Tensor, carry: Callable[[torch.Tensor, torch.Tensor, Direction], None]
    ) -> None:
        self._bytes = _flat(tensor)
        self._carry = carry

    def straight(self, start: int, stop: int, align: int) -> memoryview | None:
        return None

    def put(self, start: int, memory: Memory, low: int, num_bytes: int) -> None:
        source = memory.tensor(low, num_bytes, torch.uint8)
        self._carry(self._bytes[start : start + num_bytes], source, "to_device")

    def get(self, start: int, memory: Memory, low: int, num_bytes: int) -> None:
        out = memory.tensor(low, num_bytes, torch.uint8)
        self._carry(out, self._bytes[start : start + num_bytes], "to_host")


class BounceBuffers:
    """Decides for each tensor, and owns the stream of the copies on an accelerator."""

    def __init__(self, device: torch.device, link: Link, staging: Staging) -> None:
        self._link = link
        self._staging = staging
        self._pretended = device.type == "cpu" and not isinstance(link, Direct)
        self._starting = threading.Lock()  # a link is not asked from two threads at once
        self._stream: Any = None
        if has_streams(device):
            self._stream = Device.of(device).make_stream()

    def of(self, tensor: torch.Tensor) -> Bytes:
        """Return `tensor` as bytes; on an accelerator, once the current stream's work has run."""
        if tensor.device.type == "cpu":
            if self._pretended and not self._staging.owns(tensor):
                return _LinkedBytes(tensor, self._carry)
            return _HostBytes(tensor)
        if self._stream is None:
            return _LinkedBytes(tensor, self._carry)
        before = Mark(tensor.device)

        def carry(out: torch.Tensor, source: torch.Tensor, direction: Direction) -> None:
            before.wait(self._stream)
            self._carry(out, source, direction)

        return _LinkedBytes(tensor, carry)

    def _carry(self, out: torch.Tensor, source: torch.Tensor, direction: Direction) -> None:
        # which only inference mode may change, and that is a matter of threads
        inference = out.is_inference()
        with self._starting, self._on_stream(), torch.inference_mode(inference):
            work = self._link.copy(out, source, direction)
        synchronize = getattr(work, "synchronize", work.wait)  # an enqueued copy: of its own event
        synchronize()

    def _on_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        return Device.of(self._stream.device).stream(self._stream)
