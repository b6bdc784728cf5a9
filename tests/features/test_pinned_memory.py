"""Pinned memory is of our own making: exact, registered once and unregistered once, and kept while
copies read it.

No driver is here: a register that counts stands for it, and looks into the system's own list of
mappings.
"""

from __future__ import annotations

import functools
import gc
import logging
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.support.training import batch, make_model, two_groups
from zeroshard import memory
from zeroshard.memory.host_pages import PinnedPages
from zeroshard.runtime.engine import states_of
from zeroshard.tier import store, stores, transfer

CPU, DEVICE = torch.device("cpu"), torch.device("cuda", 0)


def _mappings() -> list[tuple[int, int]]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines]
    return [(int(low, 16), int(high, 16)) for low, high in spans]


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class Register:
    """A driver that only keeps account."""

    def __init__(self, *, limit_bytes: int = 1 << 40) -> None:
        self.live: dict[int, int] = {}
        self.num_registered = 0
        self._limit_bytes = limit_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes that are registered now."""
        return sum(self.live.values())

    def register(self, address: int, num_bytes: int) -> None:
        if self.num_bytes + num_bytes > self._limit_bytes:
            raise RuntimeError("out of memory (2)")
        assert address % mmap.PAGESIZE == 0 and self._is_mapped(address, num_bytes)
        for other, size in self.live.items():
            end = other + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
            assert address >= end or address + num_bytes <= other, "two share a page"
        self.live[address] = num_bytes
        self.num_registered += 1

    def unregister(self, address: int) -> None:
        assert self._is_mapped(address, self.live.pop(address)), "unmapped before"

    def _is_mapped(self, address: int, num_bytes: int) -> bool:
        covered = address
        for low, high in _mappings():
            if low <= covered < high:
                covered = high
        return covered >= address + num_bytes


class Copy:
    """A copy that is over when the test says so."""

    def __init__(self, device: Any = None) -> None:
        self.is_over = False
        self.num_waits = 0

    def done(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True
        self.num_waits += 1


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Register:
    """A register in the place of the driver's."""
    counts = Register()
    _install(counts, monkeypatch)
    return counts


def _install(register: Register, monkeypatch: pytest.MonkeyPatch) -> PinnedPages:
    pages = PinnedPages(register)
    monkeypatch.setattr(memory, "pinned_pages", lambda: pages)
    return pages


def test_pinned_memory_has_the_bytes_that_were_asked_for_and_they_are_resident(
    register: Register,
) -> None:
    before = _resident_bytes()
    view = memory.host_memory(101 << 20, pinned=True)
    assert register.live == {memory.address_of(view): 101 << 20} and len(view) == 101 << 20
    assert (100 << 20) < _resident_bytes() - before < (105 << 20)
    part = view[5:7]
    del view
    assert register.num_bytes == 101 << 20  # a slice keeps all of it
    del part
    assert not register.live and _resident_bytes() - before < (5 << 20)


def test_states_on_the_host_are_registered_to_the_byte_and_unregistered_once(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (stores, transfer):
        pinned: Callable[..., memoryview] = functools.partial(_pinned, memory.host_memory)
        monkeypatch.setattr(module, "host_memory", pinned)
    model = make_model(width=48)
    optimizer = two_groups(model)
    offload = zs.Offload(weight="host", grad="host", optimizer="host")
    engine = zs.shard(model, optimizer, stage=3, offload=offload, precision="bf16")

    for step in range(3):
        model(*batch(0, step)).backward()
        assert register.num_bytes == _on_host(engine) > 0
        optimizer.step()
        states_of(engine).join_step()
        assert register.num_bytes == _on_host(engine) > 0
        optimizer.zero_grad()
    registered = register.num_registered
    model(*batch(0, 3)).backward()
    optimizer.step()
    states_of(engine).join_step()
    assert register.num_registered == registered  # a step registers nothing anew
    engine.close()
    del engine, optimizer, model
    gc.collect()
    assert not register.live


def _on_host(engine: zs.Engine) -> int:
    return sum(tiers.get("host", 0) for tiers in engine.memory().tiers.values())


def _pinned(
    host_memory: Callable[..., memoryview], num_bytes: int, *, pinned: bool, align: int = 1
) -> memoryview:
    return host_memory(num_bytes, pinned=True, align=min(align, mmap.PAGESIZE))


def test_what_copies_still_read_is_unregistered_only_when_they_are_over(
    register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "Mark", Copy)
    enqueued = store.Enqueued(DEVICE)
    view = memory.host_memory(1 << 20, pinned=True)
    there = torch.frombuffer(view[4096:8192], dtype=torch.float32)
    copies: list[Any] = [
        enqueued.copy(torch.empty(1024), there, "to_device"),
        enqueued.copy(there, torch.ones(1024), "to_host"),
        enqueued.copy(torch.empty(4), torch.ones(4), "to_device"),  # has nothing to do with it
    ]
    del view
    assert [copy.num_waits for copy in copies] == [0, 0, 0] and register.live
    del there
    assert [copy.num_waits for copy in copies] == [1, 1, 0] and not register.live


def test_what_travels_is_lent_again_when_its_copies_are_over(register: Register) -> None:
    def lend(numel: int) -> torch.Tensor:
        return memory.bounce_buffer(numel, torch.float32, DEVICE)

    first, second = lend(1024), lend(1024)
    assert register.num_bytes == 8192 and first.data_ptr() != second.data_ptr()
    copy: Any = Copy()
    memory.note_copy(first[512:], copy)
    at, other = first.data_ptr(), second.data_ptr()
    del first, second
    third = lend(1000)
    assert third.data_ptr() == other  # the first is still being read
    fourth = lend(1024)
    assert fourth.data_ptr() not in (at, other) and register.num_bytes == 3 * 4096
    copy.is_over = True
    del fourth
    assert lend(1024).data_ptr() == at and register.num_registered == 3
    assert memory.bounce_buffer(0, torch.float32, DEVICE).numel() == 0


def test_what_is_kept_for_lending_is_what_was_in_use_at_one_time(register: Register) -> None:
    def lend(num_pages: int) -> torch.Tensor:
        return memory.bounce_buffer(num_pages * mmap.PAGESIZE, torch.uint8, DEVICE)

    def pages() -> int:
        return register.num_bytes // mmap.PAGESIZE

    lend(10)
    lend(100)
    assert pages() == 100  # there was no room for the ten beside it
    lend(10)
    assert pages() == 100 and register.num_registered == 2
    both = lend(100), lend(10)
    assert pages() == 110
    del both
    lend(10), lend(100)
    assert pages() == 110 and register.num_registered == 3


def test_where_the_driver_refuses_the_reason_is_logged_once_and_torch_serves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    register = Register(limit_bytes=8192)
    pages = _install(register, monkeypatch)
    asked: list[tuple[int, bool]] = []
    empty = torch.empty

    def torch_empty(numel: int, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        asked.append((numel * dtype.itemsize, pin_memory))
        return empty(numel, dtype=dtype)

    monkeypatch.setattr(torch, "empty", torch_empty)
    kept = memory.host_memory(8192, pinned=True)
    with caplog.at_level(logging.WARNING):
        assert len(memory.host_memory(100_000, pinned=True)) == 100_000
        assert memory.bounce_buffer(8, torch.float32, DEVICE).numel() == 8
    assert asked == [(100_000, True), (32, True)]
    assert len(caplog.records) == 1
    assert "100000 bytes" in caplog.text and "out of memory (2)" in caplog.text
    assert "RLIMIT_MEMLOCK" in caplog.text and "torch's pinned allocator" in caplog.text
    del kept
    assert not register.live and pages.take(1) is None


def test_a_forked_child_copies_no_pinned_page_and_unregisters_none(register: Register) -> None:
    view = memory.host_memory(1 << 20, pinned=True)
    view[:3] = b"abc"
    child = os.fork()
    if not child:
        code = 1
        try:
            is_empty = bytes(view[:3]) == b"\0\0\0"
            del view
            code = 0 if is_empty and register.live else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert bytes(view[:3]) == b"abc" and register.live


def test_on_the_cpu_nothing_is_pinned(register: Register) -> None:
    memory.host_memory(8192)
    assert memory.bounce_buffer(8, torch.float32, CPU).numel() == 8
    assert not register.num_registered
