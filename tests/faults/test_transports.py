"""Late ranks, dead ranks, short memory, races: what must be an error, and what must not."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import on_ranks, run_ranks, spawn_ranks
from tests.support.training import logged
from tests.support.transport_cases import check_sum, expected_sum, fill, same
from tests.support.transports import CPU, MAPPED, PAIRED, Spec, opened, values
from zeroshard.comm import memfd
from zeroshard.comm.cpu.gloo_peers import Connections
from zeroshard.comm.cpu.links import MessageKind
from zeroshard.comm.cpu.slots import Contribution
from zeroshard.comm.select import make_transport
from zeroshard.comm.transport import CommSpec, ReduceRequest, Transport, Window
from zeroshard.core.layout import end_of
from zeroshard.core.placement import Mesh
from zeroshard.errors import ConfigError, PeerLostError, PlanMismatch, StallError, StateError

SHM2, SHM4 = Spec("shm2", 2, "shared_memory"), Spec("shm4", 4, "shared_memory")
GLOO2, MIXED4 = Spec("gloo2", 2, "gloo"), Spec("mixed4", 4, "mixed", host_size=2)
TWO_LEVEL4 = Spec("two_level4", 4, "mixed", host_size=2, node_size=2, two_level=True)


def over(*specs: Spec) -> pytest.MarkDecorator:
    """Run a test on the ranks of each of `specs`."""
    rows = [pytest.param(spec.world_size, spec, id=spec.label) for spec in specs]
    return pytest.mark.parametrize(("world", "spec"), rows)


@over(*PAIRED, TWO_LEVEL4)
@on_ranks(timeout=30)
def test_opposite_order_with_a_pool_of_one_does_not_deadlock(
    rank: int, world: int, spec: Spec
) -> None:
    """Even ranks run units up, odd ranks down, all with a pool that holds one buffer."""
    ranges, numel, keys = spec.cut(*[640] * world), 640 * world, "abcdef"
    with opened(spec, rank, pool_bytes=1) as transport:
        outs = {key: torch.zeros(640) for key in keys}
        expected = {key: torch.zeros(640) for key in keys}
        for step in range(2):
            works = []
            for key in keys if rank % 2 == 0 else keys[::-1]:
                seed = step * 100 + ord(key)
                buffer = fill(transport, key, seed, numel, torch.float32)
                works.append(
                    transport.reduce(
                        ReduceRequest(key, ranges, torch.float32),
                        buffer,
                        outs[key],
                        accumulate=True,
                    )
                )
                expected[key] = expected[key] + expected_sum(
                    spec, seed, ranges, rank, torch.float32
                )
            for work in works:
                work.wait()
        for key in keys:
            check_sum(spec, outs[key], expected[key], torch.float32)
        transport.control.exchange(b"")
        if spec.name == "shared_memory":
            assert len(transport.collectives.slots.slots) == 1  # type: ignore[attr-defined]


@on_ranks(2, timeout=30)
def test_a_rank_that_blocks_elsewhere_ahead_of_the_others_does_not_end_them(rank: int) -> None:
    """Rank 0 is relieved, runs ahead and blocks in a collective of the program's own, while rank 1
    still needs two buffers.
    """
    ranges, numel, works = SHM2.cut(640, 640), 1280, []
    store = dist.distributed_c10d._get_default_store()
    left = store.add("ranks that left", 0)
    with opened(SHM2, rank, pool_bytes=1) as transport:

        def reduce(key: str, buffer: torch.Tensor) -> None:
            request = ReduceRequest(key, ranges, torch.float32)
            works.append(transport.reduce(request, buffer, torch.zeros(640), accumulate=False))

        for key in "abc" if rank == 0 else "bac":
            buffer = fill(transport, key, ord(key), numel, torch.float32)
            # it computes, and serves the other rank meanwhile, however late that is
            while rank == 1 and key == "a" and store.add("ranks that left", 0) == left:
                transport.control.serve()  # type: ignore[attr-defined]
                time.sleep(0.01)
            reduce(key, buffer)
        most = len(transport.collectives.slots.slots)  # type: ignore[attr-defined]
        store.add("ranks that left", 1 - rank)
        dist.barrier()
        for work in works:
            work.wait()
        transport.control.exchange(b"")
    assert most == rank + 1  # slots


@on_ranks(2, timeout=30)
def test_a_waiting_rank_sleeps_also_where_it_serves_another_transport(rank: int) -> None:
    """Wait half a second for rank 0, with another transport to serve."""
    with opened(SHM2, rank) as transport, opened(SHM2, rank):
        links = transport.control.dispatcher.links  # type: ignore[attr-defined]
        looks, receive = 0, links.receive

        def counted(timeout_s: float, beside: Sequence[int] = ()) -> Any:
            nonlocal looks
            looks += 1
            return receive(timeout_s, beside)

        links.receive = counted
        if rank == 0:
            time.sleep(0.5)
        transport.control.exchange(b"")
    assert rank == 0 or looks < 60  # some twenty: at first, ten times a second, and at the end


def _a_slow_rank_costs_no_copies(rank: int, world: int, spec: Spec) -> tuple[int, int]:
    """The last rank is slow in every step; return how often anything was copied out, and how
    many slots there are.
    """
    copied = 0

    def copy_out(part: Contribution) -> None:
        nonlocal copied
        copied += 1
        original(part)

    ranges, numel = spec.cut(*[640] * world), 640 * world
    original, Contribution.copy_out = Contribution.copy_out, copy_out  # type: ignore[method-assign]
    try:
        with opened(spec, rank, pool_bytes=1) as transport:
            for step in range(8):
                buffer = fill(transport, "unit", step, numel, torch.float32)
                if rank == world - 1:
                    time.sleep(0.02)
                out = torch.zeros(640)
                work = transport.reduce(
                    ReduceRequest("unit", ranges, torch.float32), buffer, out, accumulate=False
                )
                if step % 2:
                    work.wait()
            transport.control.exchange(b"")
            return copied, len(transport.collectives.slots.slots)  # type: ignore[attr-defined]
    finally:
        Contribution.copy_out = original  # type: ignore[method-assign]


def test_a_slow_rank_costs_neither_copies_nor_slots() -> None:
    assert run_ranks(2, _a_slow_rank_costs_no_copies, SHM2, timeout=30) == [(0, 1), (0, 1)]


def test_ranks_stuck_on_one_slow_rank_need_no_more_slots() -> None:
    results = run_ranks(4, _a_slow_rank_costs_no_copies, SHM4, timeout=30)
    assert [slots for _, slots in results] == [1] * 4


@over(GLOO2, SHM2, SHM4, MIXED4)
@on_ranks(timeout=30)
def test_a_late_rank_is_named_with_its_key_and_all_can_go_on(
    rank: int, world: int, spec: Spec
) -> None:
    """The last rank comes late; whoever waits says for which key and rank, and all can go on
    after `abandon`.
    """
    late, ranges = world - 1, spec.cut(*[64] * world)
    with opened(spec, rank) as transport:
        window = transport.window("layer.7", ranges, torch.float32, CPU, replicated=False)
        transport.control.exchange(b"")
        transport.control.stall_timeout_s = 0.4
        for operation in _waiting_operations(transport, window, ranges):
            if rank != late:
                with pytest.raises(StallError, match=WAITED_FOR) as told:
                    operation()
                assert f"rank(s) [{late}]" in str(told.value)
            else:
                time.sleep(0.7)
            _meet(transport)


WAITED_FOR = "layer.7|exchange|finish reading"


def _waiting_operations(
    transport: Transport, window: Window, ranges: tuple[tuple[int, int], ...]
) -> list[Callable[[], object]]:
    numel = end_of(ranges)

    def reduce() -> None:
        buffer = fill(transport, "layer.7", 0, numel, torch.float32)
        transport.reduce(
            ReduceRequest("layer.7", ranges, torch.float32),
            buffer,
            torch.zeros(64),
            accumulate=False,
        ).wait()

    def gather() -> None:
        window.publish()
        window.gather(torch.empty(numel)).wait()

    operations: list[Callable[[], object]] = [
        reduce,
        gather,
        lambda: transport.control.exchange(b""),
    ]
    if transport.name == "shared_memory":
        operations.append(transport.begin_write)  # without near peers there is nobody to wait for
    return operations


def _meet(transport: Transport) -> None:
    transport.control.stall_timeout_s, before = 300.0, transport.control.stall_timeout_s
    transport.abandon()
    transport.control.stall_timeout_s = before


@on_ranks(2, timeout=30)
def test_a_rank_in_reset_keeps_no_buffer_from_one_that_still_gathers(rank: int) -> None:
    """Rank 1 sends its parts of two gathers and gives up; rank 0, with a pool of one, gathers."""
    store = dist.distributed_c10d._get_default_store()
    given_up = store.add("ranks that gave up", 0)
    ranges, whole = SHM2.cut(640, 640), values(1, 1280)
    with opened(SHM2, rank, pool_bytes=1 if rank == 0 else None) as transport:
        transport.control.exchange(b"")
        while rank == 0 and store.add("ranks that gave up", 0) == given_up:
            time.sleep(0.01)
        gathers = [(torch.zeros(1280), key) for key in "ab"]
        works = [
            transport.all_gather(key, whole[slice(*ranges[rank])], ranges, out)
            for out, key in gathers
        ]
        if rank == 0:
            for work in works:
                work.wait()
            assert all(torch.equal(out, whole) for out, _ in gathers)
        else:
            transport.give_up()
            store.add("ranks that gave up", 1)
        transport.abandon()


@over(GLOO2, Spec("gloo3", 3, "gloo"), MIXED4)
@on_ranks(timeout=30)
def test_ranks_that_connect_anew_all_have_before_one_goes_on(
    rank: int, world: int, spec: Spec
) -> None:
    """The last rank is slow to connect anew; see what it has done when the others hang up."""
    store = dist.distributed_c10d._get_default_store()
    key = f"{spec.label} has connected anew"
    before = store.add(key, 0)
    renewed = Connections.renewed

    def slowly(*args: Any, **options: Any) -> Connections:
        new = renewed(*args, **options)
        time.sleep(0.3)
        store.add(key, 1)
        return new

    with opened(spec, rank) as transport:
        transport.control.exchange(b"")  # each has read the count
        if rank == world - 1:
            Connections.renewed = slowly  # type: ignore[method-assign]
        try:
            transport.abandon()
        finally:
            Connections.renewed = renewed  # type: ignore[method-assign]
        assert store.add(key, 0) == before + 1


# in a child of the dead rank: who learns of the death by the end of a connection learns it later
# than that
SOCKETS_LIVE_ON_S = 20.0


def _a_dead_rank_is_an_error(rank: int, world: int, spec: Spec, operation: int) -> float:
    """The last rank is killed; return how long the others waited for the PeerLostError."""
    ranges = spec.cut(*[64] * world)
    with opened(spec, rank) as transport:
        window = transport.window("layer.7", ranges, torch.float32, CPU, replicated=True)
        transport.control.exchange(b"")
        if rank == world - 1:
            time.sleep(0.3)
            if spec.name == "shared_memory":
                _leave_a_child_with_our_sockets(transport)
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        with pytest.raises(PeerLostError, match=WAITED_FOR):
            _waiting_operations(transport, window, ranges)[operation]()
        return time.monotonic() - begin


def _leave_a_child_with_our_sockets(transport: Transport) -> None:
    """Do what a data loader's worker does: live on for a while with everything that was open."""
    kept = {sock.fileno() for sock in transport.control.dispatcher.links._sockets.values()}  # type: ignore[attr-defined]
    if os.fork() == 0:
        for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
            if descriptor not in kept:  # the harness waits for its pipe to close
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        time.sleep(SOCKETS_LIVE_ON_S)
        os._exit(0)


@pytest.mark.parametrize(
    ("spec", "operation"),
    [
        (SHM2, 0),
        pytest.param(SHM2, 3, marks=pytest.mark.slow),
        (GLOO2, 2),
        pytest.param(MIXED4, 1, marks=pytest.mark.slow),
        pytest.param(TWO_LEVEL4, 0, marks=pytest.mark.slow),
        pytest.param(TWO_LEVEL4, 1, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(
        value,
        "label",
        ("reduce", "gather", "exchange", "begin_write")[value] if isinstance(value, int) else "",
    ),
)
def test_a_dead_rank_is_an_error_before_its_sockets_close(spec: Spec, operation: int) -> None:
    results = spawn_ranks(spec.world_size, _a_dead_rank_is_an_error, spec, operation, timeout=50)
    assert results[-1].exitcode == -9
    for result in results[:-1]:
        assert result.result is not None and result.result < SOCKETS_LIVE_ON_S, result


@over(GLOO2, SHM2, MIXED4, TWO_LEVEL4, Spec("native2", 2, "nccl"))
@on_ranks(timeout=30)
def test_payloads_of_different_calls_never_meet_and_both_calls_are_named_on_every_rank(
    rank: int, world: int, spec: Spec
) -> None:
    """Rank 0 is in another call than the others, which all are told. All can go on."""
    told = re.escape("rank 0 is in zs.save(), rank 1 is in zs.load()")
    call = "zs.save()" if rank == 0 else "zs.load()"
    with opened(spec, rank) as transport:
        with pytest.raises(PlanMismatch, match=told):
            transport.control.exchange(b"x" * 300 * (rank + 1), call)
        assert transport.control.exchange(bytes([rank]), "zs.load()") == [
            bytes([other]) for other in range(world)
        ]


@over(SHM2, SHM4, GLOO2, Spec("gloo3", 3, "gloo"))
@on_ranks(timeout=30)
def test_ranks_that_wait_for_each_other_in_different_calls_are_told_at_once_on_every_rank(
    rank: int, world: int, spec: Spec
) -> None:
    """Rank 0 saves while the others do something else that needs rank 0."""
    ranges = spec.cut(*[64] * world)
    others = (
        "the reduce of layer.7",
        "the gather of layer.7",
        "exchange()",
        "the writing of new weights",
    )
    with opened(spec, rank) as transport:
        window = transport.window("layer.7", ranges, torch.float32, CPU, replicated=True)
        transport.control.exchange(b"")
        operations = _waiting_operations(transport, window, ranges)
        assert len(operations) == (4 if spec.name == "shared_memory" else 3)
        for operation, other in zip(operations, others, strict=False):
            with pytest.raises(PlanMismatch, match=r"rank 0 is in zs\.save\(\)") as told:
                if rank == 0:
                    transport.control.exchange(b"", "zs.save()")
                else:
                    operation()
            assert re.search(rf"rank \d is in {re.escape(other)}", str(told.value)), told.value
            transport.abandon()


@on_ranks(4, timeout=30)
def test_a_rank_whose_exchange_can_end_is_told_of_different_calls_in_its_next_one(
    rank: int, world: int
) -> None:
    """Rank 1's payload for an exchange comes late to the last rank while rank 0 and rank 2,
    which have it, are in different calls already.
    """
    last = world - 1
    with opened(SHM4, rank) as transport:
        links = transport.control.dispatcher.links  # type: ignore[attr-defined]
        send = links.send

        def send_late(peer: int, kind: MessageKind, *args: int, **options: object) -> None:
            if rank == 1 and peer == last and kind is MessageKind.EXCHANGE:
                time.sleep(0.3)
            send(peer, kind, *args, **options)

        links.send = send_late
        assert [bytes([other]) for other in range(world)] == transport.control.exchange(
            bytes([rank])
        )
        links.send = send
        with pytest.raises(PlanMismatch, match=r"rank 0 is in zs\.save\(\)") as told:
            (
                transport.control.exchange(b"", "zs.save()")
                if rank == 0
                else transport.broadcast(torch.zeros(4), source=0)
            )
        assert "a broadcast from rank 0" in str(told.value)
        transport.abandon()


def _kill_yourself_with_memory_mapped(rank: int, world: int, spec: Spec) -> None:
    """Map 96 MB of windows and slots, then die all at once."""
    numel = 8 << 20
    ranges = spec.cut(*[numel // world] * world)
    with opened(spec, rank) as transport:
        for name, replicated in (("a", False), ("b", True)):
            transport.window(name, ranges, torch.float32, CPU, replicated=replicated).local.fill_(
                1.0
            )
        fill(transport, "a", 0, numel, torch.float32)
        for sock in transport.control.dispatcher.links._sockets.values():  # type: ignore[attr-defined]
            print(
                *(
                    bytes(name).decode()
                    for name in (sock.getsockname(), sock.getpeername())
                    if name
                ),
                flush=True,
            )
        transport.control.exchange(b"")
        os.kill(os.getpid(), signal.SIGKILL)


def test_nothing_is_left_after_kill_9() -> None:
    before = _files()
    results = spawn_ranks(2, _kill_yourself_with_memory_mapped, SHM2, timeout=30)
    assert [result.exitcode for result in results] == [-9, -9]
    left, deadline = _files() - before, time.monotonic() + 300
    while (left := left & _files()) and time.monotonic() < deadline:
        time.sleep(0.1)  # tests that run beside this one have files of their own for a while
    assert not left
    names = {
        name.strip("\0")
        for result in results
        for name in result.stdout.split()
        if "zeroshard-" in name
    }
    assert names
    with open("/proc/net/unix") as sockets:
        text = sockets.read()
    assert not [name for name in names if name in text]


def _files() -> set[str]:
    return {
        f"{folder}/{name}"
        for folder in ("/dev/shm", "/tmp")
        for name in os.listdir(folder)
        if "zeroshard" in name or "torch_" in name
    }


@over(*MAPPED)
@on_ranks(timeout=30)
def test_memory_and_descriptors_come_back_and_dev_shm_is_not_used(
    rank: int, world: int, spec: Spec
) -> None:
    """Windows, slots and transports leave no descriptor and no mapping, and do not touch
    /dev/shm.
    """
    numel = 1 << 20
    ranges = spec.cut(*[numel // world] * world)
    _use(spec, rank, ranges)  # what torch opens once
    gc.collect()  # what earlier tests left in cycles
    gc.disable()
    try:
        files, shared = _settled_descriptors(), os.statvfs("/dev/shm").f_bavail
        for _ in range(3):
            _use(spec, rank, ranges)
        assert _settled_descriptors() == files
        with open("/proc/self/maps") as maps:
            assert "memfd:zeroshard" not in maps.read()
    finally:
        gc.enable()
    with opened(spec, rank) as transport:
        before = _descriptors()
        windows = [
            transport.window(f"w{i}", ranges, torch.float32, CPU, replicated=i % 2 == 0)
            for i in range(6)
        ]
        assert _descriptors() == before  # not one open descriptor per window
        with open("/proc/self/maps") as maps:
            assert "memfd:zeroshard" in maps.read()
        assert abs(os.statvfs("/dev/shm").f_bavail - shared) * 4096 < 6 * numel * 4 // 2
        transport.control.exchange(b"")
        del windows


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _settled_descriptors() -> int:
    """Return the count once it has stayed the same for 0.3 s: threads of transports that were
    closed before may still close theirs.
    """
    counts = [_descriptors()]
    while len(counts) < 100 and counts[-6:] != [counts[-1]] * 6:
        time.sleep(0.05)
        counts.append(_descriptors())
    return counts[-1]


def _use(spec: Spec, rank: int, ranges: tuple[tuple[int, int], ...]) -> None:
    with opened(spec, rank) as transport:
        window = transport.window("w", ranges, torch.float32, CPU, replicated=True)
        window.publish()
        window.gather().wait()
        buffer = fill(transport, "w", 0, end_of(ranges), torch.float32)
        out = torch.zeros(ranges[rank][1] - ranges[rank][0])
        transport.reduce(
            ReduceRequest("w", ranges, torch.float32), buffer, out, accumulate=False
        ).wait()
        del buffer  # a loan keeps the slot's memory mapped
        window.close()
        transport.control.exchange(b"")


@over(*PAIRED, TWO_LEVEL4)
@pytest.mark.parametrize("slow", [0, 1])
@on_ranks(timeout=30)
def test_a_read_never_sees_half_a_write(rank: int, world: int, spec: Spec, slow: int) -> None:
    """Steps with delays in every place: reads before begin_write see the old epoch, reads after
    publish the new one.
    """
    if spec.name != "shared_memory":
        slow = -1  # two-sided gathers are made by all ranks together
    numel = 64 * 256 * world
    ranges = spec.cut(*[64 * 256] * world)
    with opened(spec, rank) as transport:
        window = transport.window("w", ranges, torch.float32, CPU, replicated=False)
        for step in range(12):
            delay = (step * 7 + rank * 5 + slow) % 4 * 0.003
            expected = torch.full((numel,), float(step))
            if rank == slow:  # this rank evaluates between backward and step
                time.sleep(delay)
                for _ in range(3):
                    _read(window, expected)
                    time.sleep(0.002)
            transport.begin_write()
            window.local.fill_(-1.0)
            time.sleep(delay)
            window.local.fill_(step + 1.0)
            window.publish()
            _read(window, expected + 1)
        transport.control.exchange(b"")


def _read(window: Window, expected: torch.Tensor) -> None:
    if window.aliased:
        window.gather().wait()
        assert window.full is not None and same(window.full, expected)
    out = torch.empty_like(expected)
    window.gather(out).wait()
    assert same(out, expected)


@on_ranks(2, timeout=30)
def test_publishing_during_a_copy_is_noticed(rank: int, world: int) -> None:
    """Rank 1 publishes in the middle of rank 0's copy."""
    spec = Spec("shm2_copying", 2, "shared_memory", alias=False)
    ranges = spec.cut(*[64] * world)
    with opened(spec, rank) as transport:
        window = transport.window("w", ranges, torch.float32, CPU, replicated=False)
        window.publish()
        transport.control.exchange(b"")
        if rank == 0:
            with pytest.raises(StateError, match="begin_write"):
                _gather_slowly(transport, window)
        else:
            transport.control.exchange(b"now")
            window.publish()
            transport.control.exchange(b"published")
        transport.control.exchange(b"")


def _gather_slowly(transport: Transport, window: Window) -> None:
    """Gather, and let the peer publish after the first copy."""
    collect = transport.control.dispatcher.collect  # type: ignore[attr-defined]
    calls = 0

    def collect_late(timeout_s: float) -> bool:
        nonlocal calls
        calls += 1
        # the first is progress before the copy, the second the look at the epoch after it
        if calls == 2:
            transport.control.dispatcher.collect = collect  # type: ignore[attr-defined]
            transport.control.exchange(b"now")
            transport.control.exchange(b"published")
        return bool(collect(timeout_s))

    transport.control.dispatcher.collect = collect_late  # type: ignore[attr-defined]
    try:
        window.gather(torch.empty(128)).wait()
    finally:
        transport.control.dispatcher.collect = collect  # type: ignore[attr-defined]


@over(*PAIRED, TWO_LEVEL4)
@on_ranks(timeout=30)
def test_windows_that_differ_are_refused_by_all_ranks(rank: int, world: int, spec: Spec) -> None:
    with opened(spec, rank) as transport:
        for key, share, dtype in (
            ("a", 64 + 64 * rank, torch.float32),
            (f"b{rank}", 64, torch.float32),
        ):
            ranges = spec.cut(*[share] * world)
            with pytest.raises(PlanMismatch, match=f"window {key}"):
                transport.window(key, ranges, dtype, CPU, replicated=False)
        window = transport.window(
            "c", spec.cut(*[64] * world), torch.float32, CPU, replicated=False
        )
        window.publish()
        window.gather(torch.empty(64 * world)).wait()
        transport.control.exchange(b"")


@over(*MAPPED)
@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("short", [0, 1])
@on_ranks(timeout=30)
def test_memory_short_on_one_rank_is_an_error_on_all(
    rank: int, world: int, spec: Spec, replicated: bool, short: int
) -> None:
    """The last reservation of one rank fails; all ranks refuse the window and the transport
    stays usable.
    """

    def no_memory(fd: int, start: int, stop: int) -> None:
        raise OSError(28, "No space left on device")

    with opened(spec, rank) as transport:
        ranges = spec.cut(*[64] * world)
        gc.collect()  # what earlier tests left in cycles
        before = _settled_descriptors()
        reserve = no_memory if rank == short else memfd.reserve
        with (
            mock.patch.object(memfd, "reserve", reserve),
            pytest.raises(ConfigError, match="No space left") as told,
        ):
            transport.window("w", ranges, torch.float32, CPU, replicated=replicated)
        assert f"rank(s) [{short}]" in str(told.value)
        assert _settled_descriptors() == before
        window = transport.window("w", ranges, torch.float32, CPU, replicated=replicated)
        window.local.copy_(values(3, end_of(ranges))[slice(*ranges[rank])])
        window.publish()
        out = torch.empty(end_of(ranges))
        window.gather(out).wait()
        assert same(out, values(3, end_of(ranges)))
        transport.control.exchange(b"")


@on_ranks(2, timeout=30)
def test_without_memfd_on_one_rank_all_use_gloo_and_say_so_once(rank: int, world: int) -> None:
    """The last rank cannot make a memfd; all take gloo, and rank 0 says so."""

    def refuse(num_bytes: int, *, reserved: bool = True) -> int:
        raise OSError(38, "Function not implemented")

    spec = CommSpec(Mesh(1, world))
    create = refuse if rank == world - 1 else memfd.create
    with logged() as records, mock.patch.object(memfd, "create", create):
        transport = make_transport(None, CPU, spec)
        assert transport.control.exchange(bytes([rank])) == [bytes([r]) for r in range(world)]
        transport.close()
        with pytest.raises(ConfigError, match="Function not implemented"):  # asked for by name
            make_transport(None, CPU, replace(spec, name="shared_memory"))
    assert transport.name == "gloo" and len(records) == (rank == 0)
    assert rank > 0 or ("rank 1" in records[0] and "slower" in records[0])


IN_A_CALL = """
import contextlib, datetime, time
import torch.distributed as dist
from zeroshard.comm.cpu.gloo_peers import Waiters

store = dist.TCPStore("127.0.0.1", 0, 1, True)
other = store.clone()

def look():
    with contextlib.suppress(RuntimeError):
        other.wait(["never set"], datetime.timedelta(seconds=0.2))

waiters = Waiters()
waiters.run(look)
time.sleep(0.05)
"""


def test_a_thread_inside_a_call_of_the_store_does_not_abort_the_end_of_a_program() -> None:
    command = [sys.executable, "-c", IN_A_CALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
