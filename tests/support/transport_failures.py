"""Ranks that are late, gone, or in another order: what the failure tests run."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from tests.support.transport_cases import check_sum, expected_sum, fill, same
from tests.support.transports import CPU, Spec, opened, values
from zeroshard.comm.cpu.links import MessageKind
from zeroshard.comm.cpu.slots import Contribution
from zeroshard.comm.transport import CommSpec, ReduceRequest, Transport, Window
from zeroshard.core.layout import end_of
from zeroshard.core.placement import Mesh
from zeroshard.errors import ConfigError, PeerLostError, PlanMismatch, StallError, StateError


def opposite_order_needs_one_buffer(rank: int, world_size: int, spec: Spec) -> int:
    """Even ranks run units up, odd ranks down, all with a pool that holds one buffer; return how
    many slots that took.
    """
    ranges, numel, keys = spec.cut(*[640] * world_size), 640 * world_size, "abcdef"
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
        return 0 if spec.two_level else len(transport.collectives.slots.slots)  # type: ignore[attr-defined]


def a_rank_ahead_leaves_for_a_collective(rank: int, world_size: int, spec: Spec) -> int:
    """Rank 0 is relieved, runs ahead and blocks in a collective of the program's own, while rank 1
    still needs two buffers. Return how many slots that took.
    """
    ranges, numel, works = spec.cut(640, 640), 1280, []
    store = dist.distributed_c10d._get_default_store()
    left = store.add("ranks that left", 0)
    with opened(spec, rank, pool_bytes=1) as transport:

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
        return most


def looks_while_waiting(rank: int, world_size: int, spec: Spec) -> int:
    """Wait half a second for rank 0, with another transport to serve; return how often this rank
    looked for records meanwhile.
    """
    with opened(spec, rank) as transport, opened(spec, rank):
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
        return looks


def a_slow_rank_costs_no_copies(rank: int, world_size: int, spec: Spec) -> tuple[int, int]:
    """The last rank is slow in every step; return how often anything was copied out, and how
    many slots there are.
    """
    copied = 0

    def copy_out(part: Contribution) -> None:
        nonlocal copied
        copied += 1
        original(part)

    ranges, numel = spec.cut(*[640] * world_size), 640 * world_size
    original, Contribution.copy_out = Contribution.copy_out, copy_out  # type: ignore[method-assign]
    try:
        with opened(spec, rank, pool_bytes=1) as transport:
            for step in range(8):
                buffer = fill(transport, "unit", step, numel, torch.float32)
                if rank == world_size - 1:
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


def a_late_rank_is_named(rank: int, world_size: int, spec: Spec) -> None:
    """The last rank comes late; whoever waits says for which key and rank, and all can go on
    after `abandon`.
    """
    late, ranges = world_size - 1, spec.cut(*[64] * world_size)
    with opened(spec, rank) as transport:
        window = transport.window("layer.7", ranges, torch.float32, CPU, replicated=False)
        transport.control.exchange(b"")
        transport.control.stall_timeout_s = 0.4
        for operation in _waiting_operations(transport, window, ranges):
            if rank != late:
                try:
                    operation()
                except StallError as error:
                    assert f"rank(s) [{late}]" in str(error), error
                    assert (
                        "layer.7" in str(error)
                        or "exchange" in str(error)
                        or "finish reading" in str(error)
                    ), error
                else:
                    raise AssertionError(f"{operation} did not stall")
            else:
                time.sleep(0.7)
            _meet(transport)


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


# in a child of the dead rank: who learns of the death by the end of a connection learns it later
# than that
SOCKETS_LIVE_ON_S = 20.0


def a_dead_rank_is_an_error(rank: int, world_size: int, spec: Spec, operation: int) -> float | None:
    """The last rank is killed; return how long the others waited for the PeerLostError."""
    ranges = spec.cut(*[64] * world_size)
    with opened(spec, rank) as transport:
        window = transport.window("layer.7", ranges, torch.float32, CPU, replicated=True)
        transport.control.exchange(b"")
        if rank == world_size - 1:
            time.sleep(0.3)
            if spec.name == "shared_memory":
                _leave_a_child_with_our_sockets(transport)
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            _waiting_operations(transport, window, ranges)[operation]()
        except PeerLostError as error:
            assert (
                "layer.7" in str(error)
                or "exchange" in str(error)
                or "finish reading" in str(error)
            ), error
            return time.monotonic() - begin
    return None


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


def kill_yourself_with_memory_mapped(rank: int, world_size: int, spec: Spec) -> None:
    """Map 96 MB of windows and slots, then die all at once."""
    numel = 8 << 20
    ranges = spec.cut(*[numel // world_size] * world_size)
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


def memory_and_descriptors_come_back(rank: int, world_size: int, spec: Spec) -> None:
    """Windows, slots and transports leave no descriptor and no mapping, and do not touch
    /dev/shm.
    """
    numel = 1 << 20
    ranges = spec.cut(*[numel // world_size] * world_size)
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


def a_read_never_sees_half_a_write(rank: int, world_size: int, spec: Spec, slow: int) -> None:
    """Steps with delays in every place: reads before begin_write see the old epoch, reads after
    publish the new one.
    """
    numel = 64 * 256 * world_size
    ranges = spec.cut(*[64 * 256] * world_size)
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


def writing_without_begin_write_is_noticed(rank: int, world_size: int, spec: Spec) -> bool:
    """Rank 1 publishes in the middle of rank 0's copy; return whether rank 0 noticed."""
    ranges = spec.cut(*[64] * world_size)
    with opened(spec, rank) as transport:
        window = transport.window("w", ranges, torch.float32, CPU, replicated=False)
        window.publish()
        noticed = False
        transport.control.exchange(b"")
        if rank == 0:
            copies = _SlowCopies(transport, window)
            try:
                copies.run()
            except StateError as error:
                noticed = "begin_write" in str(error)
        else:
            transport.control.exchange(b"now")
            window.publish()
            transport.control.exchange(b"published")
        transport.control.exchange(b"")
        return noticed


class _SlowCopies:
    """A gather that lets the peer publish after its first copy."""

    def __init__(self, transport: Transport, window: Window) -> None:
        self.transport = transport
        self.window = window

    def run(self) -> None:
        transport, collect = self.transport, self.transport.control.dispatcher.collect  # type: ignore[attr-defined]
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
            self.window.gather(torch.empty(128)).wait()
        finally:
            transport.control.dispatcher.collect = collect  # type: ignore[attr-defined]


def different_windows_are_refused_by_all(rank: int, world_size: int, spec: Spec) -> None:
    with opened(spec, rank) as transport:
        for key, share, dtype in (
            ("a", 64 + 64 * rank, torch.float32),
            (f"b{rank}", 64, torch.float32),
        ):
            try:
                transport.window(key, spec.cut(*[share] * world_size), dtype, CPU, replicated=False)
            except PlanMismatch as error:
                assert f"window {key}" in str(error)
            else:
                raise AssertionError("no PlanMismatch")
        window = transport.window(
            "c", spec.cut(*[64] * world_size), torch.float32, CPU, replicated=False
        )
        window.publish()
        window.gather(torch.empty(64 * world_size)).wait()
        transport.control.exchange(b"")


def memory_short_on_one_rank_is_an_error_on_all(
    rank: int, world_size: int, spec: Spec, replicated: bool, short: int
) -> None:
    """The last reservation of one rank fails; all ranks refuse the window and the transport
    stays usable.
    """
    from zeroshard.comm import memfd

    def no_memory(fd: int, start: int, stop: int) -> None:
        raise OSError(28, "No space left on device")

    with opened(spec, rank) as transport:
        ranges = spec.cut(*[64] * world_size)
        gc.collect()  # what earlier tests left in cycles
        before, reserve = _settled_descriptors(), memfd.reserve
        if rank == short:
            memfd.reserve = no_memory
        try:
            transport.window("w", ranges, torch.float32, CPU, replicated=replicated)
        except ConfigError as error:
            assert f"rank(s) [{short}]" in str(error), error
            assert "No space left" in str(error)
        else:
            raise AssertionError("no ConfigError")
        finally:
            memfd.reserve = reserve
        assert _settled_descriptors() == before
        window = transport.window("w", ranges, torch.float32, CPU, replicated=replicated)
        window.local.copy_(values(3, end_of(ranges))[slice(*ranges[rank])])
        window.publish()
        out = torch.empty(end_of(ranges))
        window.gather(out).wait()
        assert same(out, values(3, end_of(ranges)))
        transport.control.exchange(b"")


def without_memfd_all_use_gloo(rank: int, world_size: int) -> tuple[str, list[str]]:
    """The last rank cannot make a memfd; return the transport "auto" takes and what was logged."""
    import logging

    from zeroshard.comm import memfd
    from zeroshard.comm.select import make_transport

    def refuse(num_bytes: int, *, reserved: bool = True) -> int:
        raise OSError(38, "Function not implemented")

    spec = CommSpec(Mesh(1, world_size))
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroshard").addHandler(handler)
    create = memfd.create
    if rank == world_size - 1:
        memfd.create = refuse
    try:
        transport = make_transport(None, CPU, spec)
        assert transport.control.exchange(bytes([rank])) == [bytes([r]) for r in range(world_size)]
        transport.close()
        try:
            make_transport(None, CPU, replace(spec, name="shared_memory"))
        except ConfigError as error:
            assert "Function not implemented" in str(error)
        else:
            raise AssertionError("shared_memory was asked for by name and silently replaced")
    finally:
        memfd.create = create
        logging.getLogger("zeroshard").removeHandler(handler)
    return transport.name, records


def payloads_of_different_calls_never_meet(rank: int, world_size: int, spec: Spec) -> str:
    """Rank 0 is in another call than the others; return what was raised. All can go on."""
    call = "zs.save()" if rank == 0 else "zs.load()"
    with opened(spec, rank) as transport:
        try:
            transport.control.exchange(b"x" * 300 * (rank + 1), call)
        except PlanMismatch as error:
            assert transport.control.exchange(bytes([rank]), "zs.load()") == [
                bytes([other]) for other in range(world_size)
            ]
            return str(error)
    raise AssertionError("no PlanMismatch")


def the_next_call_is_told_where_a_payload_is_late(
    rank: int, world_size: int, spec: Spec
) -> tuple[list[bytes], str]:
    """Rank 1's payload for an exchange comes late to the last rank while rank 0 and rank 2,
    which have it, are in different calls already.
    """
    last = world_size - 1
    with opened(spec, rank) as transport:
        links = transport.control.dispatcher.links  # type: ignore[attr-defined]
        send = links.send

        def send_late(peer: int, kind: MessageKind, *args: int, **options: object) -> None:
            if rank == 1 and peer == last and kind is MessageKind.EXCHANGE:
                time.sleep(0.3)
            send(peer, kind, *args, **options)

        links.send = send_late
        exchanged = transport.control.exchange(bytes([rank]))
        links.send = send
        try:
            (
                transport.control.exchange(b"", "zs.save()")
                if rank == 0
                else transport.broadcast(torch.zeros(4), source=0)
            )
        except PlanMismatch as error:
            said = str(error)
        transport.abandon()
    return exchanged, said


def waiting_in_different_calls_is_told_at_once(rank: int, world_size: int, spec: Spec) -> list[str]:
    """Rank 0 saves while the others do something else that needs rank 0; return what was raised
    each time.
    """
    ranges = spec.cut(*[64] * world_size)
    said = []
    with opened(spec, rank) as transport:
        window = transport.window("layer.7", ranges, torch.float32, CPU, replicated=True)
        transport.control.exchange(b"")
        for operation in _waiting_operations(transport, window, ranges):
            try:
                if rank == 0:
                    transport.control.exchange(b"", "zs.save()")
                else:
                    operation()
            except PlanMismatch as error:
                said.append(str(error))
            transport.abandon()
    return said
