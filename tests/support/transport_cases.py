"""The contract of a Transport, as functions that every rank runs. Each is called on every
transport by test_contract.py.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from dataclasses import replace

import torch

from tests.support.transports import CPU, Spec, length, made, opened, values
from tests.unit.comm.test_ordered import bits, naive_sum
from zeroshard.comm.transport import ReduceRequest, Transport
from zeroshard.core.layout import Range, end_of
from zeroshard.core.placement import Mesh
from zeroshard.errors import PlanMismatch, StateError, StorageError

MOVED = (torch.int16, torch.uint16, torch.uint64, torch.float8_e4m3fn, torch.complex64, torch.bool)
LINKS = ("shared_memory", "gloo", "nccl", "local")


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(bits(actual), bits(expected))


def fill(transport: Transport, key: str, seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Borrow a buffer and put this rank's numbers in it."""
    buffer = transport.grad_buffer(key, numel, dtype, CPU)
    assert buffer.shape == (numel,) and buffer.dtype == dtype
    buffer.copy_(values(1000 * seed + transport.rank, numel, dtype))
    return buffer


def expected_sum(
    spec: Spec,
    seed: int,
    ranges: tuple[Range, ...],
    rank: int,
    dtype: torch.dtype,
    *,
    absent: tuple[int, ...] = (),
) -> torch.Tensor:
    """Return what `fill`ed buffers sum to on `rank`."""
    numel, own = end_of(ranges), slice(*ranges[rank])
    parts = [
        None if r in absent else values(1000 * seed + r, numel, dtype)[own]
        for r in range(spec.world_size)
    ]
    return naive_sum(parts, length(ranges[rank]), spec.node_size)


def check_sum(spec: Spec, actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    if spec.exact or (spec.world_size <= 2 and dtype == torch.float32):
        assert same(actual, expected)
    else:
        torch.testing.assert_close(
            actual, expected, rtol=1e-5 if dtype == torch.float32 else 0.02, atol=0.2
        )


def gather_brings_every_slice(rank: int, world_size: int, spec: Spec) -> None:
    with opened(spec, rank) as transport:
        for number, ranges in enumerate(spec.cuts()):
            for replicated in (False, True):
                dtype = torch.bfloat16 if number % 2 else torch.float32
                _gather_epochs(transport, f"w{number} {replicated}", ranges, replicated, dtype)


def a_write_waits_for_gathers_under_way(rank: int, world_size: int, spec: Spec) -> None:
    """Rank 0 is late, so that the others' gathers are still waiting for it when they begin to
    write.
    """
    ranges = spec.cuts()[0]
    numel, own = end_of(ranges), slice(*ranges[rank])
    with opened(spec, rank) as transport:
        window = transport.window("w", ranges, torch.float32, CPU, replicated=False)
        transport.begin_write()
        window.local.copy_(values(1, numel)[own])
        if rank == 0:
            time.sleep(0.1)
        window.publish()
        out = torch.empty(numel)
        work = window.gather(out)
        transport.begin_write()
        window.local.copy_(values(2, numel)[own])
        window.publish()
        if rank:
            time.sleep(0.1)
        work.wait()
        assert same(out, values(1, numel))
        transport.control.exchange(b"")


def _gather_epochs(
    transport: Transport, key: str, ranges: tuple[Range, ...], replicated: bool, dtype: torch.dtype
) -> None:
    numel, own = end_of(ranges), slice(*ranges[transport.rank])
    window = transport.window(key, ranges, dtype, CPU, replicated=replicated)
    assert window.local.shape == (length(ranges[transport.rank]),) and not window.local.any()
    assert not replicated or (window.full is not None and window.full.shape == (numel,))
    for epoch in range(3):
        whole = values(epoch, numel, dtype)
        transport.begin_write()
        window.local.copy_(whole[own])
        window.publish()
        for _ in range(2):
            out = torch.full((numel,), 7.0, dtype=dtype)
            window.gather(out).wait()
            assert same(out, whole)
        if window.full is not None:
            window.gather().wait()
            assert same(window.full, whole)
    kept = window.full
    window.close()
    transport.control.exchange(b"")
    assert kept is None or same(kept, whole)


def reduce_is_the_canonical_sum(rank: int, world_size: int, spec: Spec) -> None:
    with opened(spec, rank) as transport:
        for number, ranges in enumerate(spec.cuts()):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                for accumulate in (False, True):
                    seed = 10 * number + accumulate
                    buffer = fill(transport, f"unit {number}", seed, end_of(ranges), dtype)
                    before = values(5, length(ranges[rank]))
                    out = before.clone()
                    work = transport.reduce(
                        ReduceRequest(f"unit {number}", ranges, dtype),
                        buffer,
                        out,
                        accumulate=accumulate,
                    )
                    work.wait()
                    work.wait()
                    assert work.done()
                    total = expected_sum(spec, seed, ranges, rank, dtype)
                    check_sum(spec, out, before + total if accumulate else total, dtype)


def a_sum_in_fp16_overflows_only_where_a_rank_has(rank: int, world_size: int, spec: Spec) -> None:
    with opened(spec, rank) as transport:
        for number, ranges in enumerate(spec.cuts()):
            for accumulate in (False, True):
                key, numel = f"unit {number}", end_of(ranges)
                buffer = transport.grad_buffer(key, numel, torch.float16, CPU)
                buffer.copy_(torch.tensor([57344.0, -61440.0, 32768.0, 3.0] * (numel // 4)))
                if rank == world_size - 1:
                    buffer[2::4] = float("inf")
                own = length(ranges[rank])
                out = torch.ones(own)
                request = ReduceRequest(key, ranges, torch.float16)
                transport.reduce(request, buffer, out, accumulate=accumulate).wait()
                one = torch.tensor([57344.0, -61440.0, float("inf"), 3.0])
                assert same(out, (one * world_size + accumulate).repeat(own // 4))


def node_size_shapes_the_sum(rank: int, world_size: int, spec: Spec) -> None:
    numel = 64 * world_size
    for node_size in [size for size in (1, 2, world_size) if world_size % size == 0]:
        mesh = replace(spec, node_size=node_size)
        ranges = mesh.cut(*[64] * world_size)
        with opened(mesh, rank) as transport:
            buffer = fill(transport, "unit", 1, numel, torch.float32)
            out = torch.empty(64)
            transport.reduce(
                ReduceRequest("unit", ranges, torch.float32), buffer, out, accumulate=False
            ).wait()
            parts: list[torch.Tensor | None] = [
                values(1000 + r, numel)[slice(*ranges[rank])] for r in range(world_size)
            ]
            check_sum(spec, out, naive_sum(parts, 64, node_size), torch.float32)


def none_contributes_zeros(rank: int, world_size: int, spec: Spec) -> None:
    with opened(spec, rank) as transport:
        for seed, ranges in enumerate(spec.cuts()):
            for absent in (
                (0,),
                (world_size - 1,),
                tuple(range(world_size)),
                tuple(range(1, world_size)),
            ):
                buffer = (
                    None
                    if rank in absent
                    else fill(transport, "unit", seed, end_of(ranges), torch.bfloat16)
                )
                out = torch.full((length(ranges[rank]),), 3.0)
                transport.reduce(
                    ReduceRequest("unit", ranges, torch.bfloat16), buffer, out, accumulate=False
                ).wait()
                check_sum(
                    spec,
                    out,
                    expected_sum(spec, seed, ranges, rank, torch.bfloat16, absent=absent),
                    torch.bfloat16,
                )


def keys_interleave_and_the_nth_meets_the_nth(rank: int, world_size: int, spec: Spec) -> None:
    ranges, numel = spec.cut(*[128] * world_size), 128 * world_size
    with opened(spec, rank, pool_bytes=64 << 10) as transport:
        windows = [
            transport.window(f"w{i}", ranges, torch.float32, CPU, replicated=False)
            for i in range(3)
        ]
        for index, window in enumerate(windows):
            window.local.copy_(values(index, numel)[slice(*ranges[rank])])
            window.publish()
        works, outs, gathered = [], [], []
        for turn in range(3):
            for index, window in enumerate(windows):
                out, full = torch.zeros(128), torch.empty(numel)
                buffer = fill(transport, f"w{index}", 10 * turn + index, numel, torch.float32)
                works.append(
                    transport.reduce(
                        ReduceRequest(f"w{index}", ranges, torch.float32),
                        buffer,
                        out,
                        accumulate=False,
                    )
                )
                works.append(window.gather(full))
                outs.append((10 * turn + index, out))
                gathered.append((index, full))
        for work in reversed(works):
            work.wait()
        for seed, out in outs:
            check_sum(
                spec, out, expected_sum(spec, seed, ranges, rank, torch.float32), torch.float32
            )
        assert all(same(full, values(index, numel)) for index, full in gathered)


def loose_tensors_are_gathered(rank: int, world_size: int, spec: Spec) -> None:
    with opened(spec, rank) as transport:
        for seed, ranges in enumerate(spec.cuts()):
            whole = values(seed, end_of(ranges))
            out, inside = torch.full_like(whole, 7.0), torch.full_like(whole, 7.0)
            inside[slice(*ranges[rank])] = whole[slice(*ranges[rank])]
            works = [
                transport.all_gather("sum", whole[slice(*ranges[rank])].clone(), ranges, out),
                transport.all_gather("sum", inside[slice(*ranges[rank])], ranges, inside),
            ]
            for work in works:
                work.wait()
            assert same(out, whole) and same(inside, whole)


def bits_of_any_dtype_are_moved(rank: int, world_size: int, spec: Spec) -> None:
    """Also of those in which a backend cannot compute."""
    with opened(spec, rank) as transport:
        for dtype in MOVED:
            for ranges in spec.cuts()[:2]:
                whole = torch.arange(end_of(ranges)).to(dtype)
                out = torch.zeros(end_of(ranges)).to(dtype)
                own = whole[slice(*ranges[rank])].clone()
                transport.all_gather("codes", own, ranges, out).wait()
                assert same(out, whole), dtype
            number = torch.tensor(float(rank)).to(dtype)
            transport.broadcast(number, world_size - 1)
            assert same(number.view(1), torch.tensor([world_size - 1.0]).to(dtype)), dtype


def exchange_brings_every_payload(rank: int, world_size: int, spec: Spec) -> None:
    with opened(spec, rank) as transport:
        for size in (0, 1, 247, 248, 249, 5000, 100_000):
            assert transport.control.exchange(bytes([rank]) * size) == [
                bytes([r]) * size for r in range(world_size)
            ]
            mixed = transport.control.exchange(b"x" * (size * rank))
            assert mixed == [b"x" * (size * r) for r in range(world_size)]


def broadcast_copies_from_the_source(rank: int, world_size: int, spec: Spec) -> None:
    with opened(spec, rank) as transport:
        for source in range(world_size):
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
                tensor = torch.full((5, 3), rank, dtype=torch.float32).to(dtype)
                transport.broadcast(tensor, source)
                assert torch.equal(
                    tensor, torch.full((5, 3), source, dtype=torch.float32).to(dtype)
                )
            strided = torch.full((6, 4), float(rank)).t()[1:3]
            transport.broadcast(strided, source)
            assert (strided == source).all()
            transport.broadcast(torch.empty(0), source)
        large = torch.full((4_300_000,), float(rank))  # more than one piece
        transport.broadcast(large, world_size - 1)
        assert (large == world_size - 1).all()


def traffic_is_what_came_from_others(rank: int, world_size: int, spec: Spec) -> None:
    ranges, numel = (
        spec.cut(*[64 * (r + 1) for r in range(world_size)]),
        32 * world_size * (world_size + 1),
    )
    with opened(spec, rank) as transport:
        window = transport.window("w", ranges, torch.bfloat16, CPU, replicated=False)
        window.publish()
        transport.control.exchange(b"")
        transport.traffic.reset()
        window.gather(torch.empty(numel, dtype=torch.bfloat16)).wait()
        out = torch.zeros(length(ranges[rank]))
        buffer = fill(transport, "w", 0, numel, torch.bfloat16)
        transport.reduce(
            ReduceRequest("w", ranges, torch.bfloat16), buffer, out, accumulate=False
        ).wait()
        transport.control.exchange(b"four")
        transport.broadcast(torch.zeros(10), 0)
        expected: dict[tuple[str, str], int] = {}
        between: dict[str, int] = {}
        mesh = Mesh.of(world_size, spec.node_size)
        columns = [
            sum(length(ranges[member]) for member in mesh.column(peer))
            for peer in range(world_size)
        ]
        for peer in range(world_size):
            if peer == rank:
                continue
            link, near = spec.link(rank, peer), mesh.same_node(rank, peer)
            # small messages never touch a device
            control_link = "shared_memory" if spec.native else link
            gathered, reduced = 2 * length(ranges[peer]), 2 * length(ranges[rank])
            if spec.two_level and near:
                gathered, reduced = 2 * columns[peer], 2 * columns[rank]
            elif spec.two_level:
                in_column = peer in mesh.column(rank)
                # node sums travel in fp32
                gathered, reduced = (gathered, 2 * reduced) if in_column else (0, 0)
            for operation, num_bytes in (
                ("all_gather", gathered),
                ("reduce_scatter", reduced),
                ("exchange", 4),
                ("broadcast", 40 if peer == 0 else 0),
            ):
                over = operation, control_link if operation == "exchange" else link
                expected[over] = expected.get(over, 0) + num_bytes
                between[operation] = between.get(operation, 0) + (0 if near else num_bytes)
        assert {k: v for k, v in transport.traffic.bytes.items() if v} == {
            k: v for k, v in expected.items() if v
        }
        assert {k: v for k, v in transport.traffic.between.items() if v} == {
            k: v for k, v in between.items() if v
        }
        reduces = sum(
            calls
            for (operation, _), calls in transport.traffic.calls.items()
            if operation == "reduce_scatter"
        )
        assert reduces == (
            2
            if spec.two_level
            else len(transport.traffic.calls.keys() & {("reduce_scatter", link) for link in LINKS})
        )
        if window.aliased:
            transport.traffic.reset()
            window.gather().wait()
            assert sum(transport.traffic.bytes.values()) == 2 * (numel - length(ranges[rank]))
            assert {link for _, link in transport.traffic.bytes} <= {"mapped", "local"}


def works_finish_without_being_waited_for(rank: int, world_size: int, spec: Spec) -> None:
    ranges = spec.cut(*[64] * world_size)
    with opened(spec, rank) as transport:
        buffer = fill(transport, "unit", 0, 64 * world_size, torch.float32)
        out = torch.zeros(64)
        work = transport.reduce(
            ReduceRequest("unit", ranges, torch.float32), buffer, out, accumulate=False
        )
        deadline = time.monotonic() + 300
        # gloo's native works only say so once they are waited for
        while not work.done() and not spec.native:
            assert time.monotonic() < deadline
            assert transport.progress is not None
            transport.progress()
        work.wait()
        check_sum(spec, out, expected_sum(spec, 0, ranges, rank, torch.float32), torch.float32)
        transport.control.exchange(b"")


def buffers_return_to_the_pool(rank: int, world_size: int, spec: Spec) -> None:
    ranges, numel = spec.cut(*[1024] * world_size), 1024 * world_size
    addresses = set()
    with opened(spec, rank) as transport:
        for step in range(50):
            unused = transport.grad_buffer("unused", numel, torch.float32, CPU)
            transport.return_buffer(unused)
            buffer = fill(transport, "unit", step, numel, torch.float32)
            addresses.add(buffer.data_ptr())
            out = torch.empty(1024)
            transport.reduce(
                ReduceRequest("unit", ranges, torch.float32), buffer, out, accumulate=False
            ).wait()
    assert len(addresses) <= 3, len(addresses)


def abandon_forgets_what_was_under_way(rank: int, world_size: int, spec: Spec) -> None:
    ranges, numel = spec.cut(*[64] * world_size), 64 * world_size
    with opened(spec, rank, pool_bytes=64 << 10) as transport:
        window = transport.window("w", ranges, torch.float32, CPU, replicated=True)
        for turn in range(3):
            if not spec.native:  # native collectives cannot be left half done
                for key in ("a", "b")[: 1 + rank % 2]:
                    buffer = fill(transport, key, 77, numel, torch.float32)
                    transport.reduce(
                        ReduceRequest(key, ranges, torch.float32),
                        buffer,
                        torch.zeros(64),
                        accumulate=False,
                    )
                if rank == 0:
                    window.publish()
                if rank == world_size - 1:
                    # where rank 0 publishes, without begin_write(), just while this copies
                    with contextlib.suppress(StateError):
                        window.gather()
                    transport.grad_buffer("left on loan", numel, torch.float32, CPU)
            transport.abandon()
            transport.begin_write()
            whole = values(turn, numel)
            window.local.copy_(whole[slice(*ranges[rank])])
            window.publish()
            window.gather().wait()
            assert window.full is not None and same(window.full, whole)
            for key in ("a", "b"):
                out = torch.empty(64)
                buffer = fill(transport, key, turn, numel, torch.float32)
                transport.reduce(
                    ReduceRequest(key, ranges, torch.float32), buffer, out, accumulate=False
                ).wait()
                check_sum(
                    spec, out, expected_sum(spec, turn, ranges, rank, torch.float32), torch.float32
                )
            assert transport.control.exchange(bytes([rank])) == [
                bytes([r]) for r in range(world_size)
            ]


def comparison_names_the_first_difference(rank: int, world_size: int, spec: Spec) -> None:
    with opened(spec, rank) as transport:
        transport.control.agree({"units": "ab12", "policy": "cd34"}, "agree()")
        if world_size == 1:
            return
        try:
            transport.control.agree(
                {"units": "ab12", "policy": "cd34" if rank else "ffff", "last": str(rank)},
                "agree()",
            )
        except PlanMismatch as error:
            assert (
                "'policy'" in str(error)
                and "rank 0: policy = ffff" in str(error)
                and "last" not in str(error)
            )
        else:
            raise AssertionError("no PlanMismatch")
        transport.control.exchange(b"")


def what_fails_on_one_rank_fails_on_all(rank: int, world_size: int, spec: Spec) -> None:
    with opened(spec, rank) as transport:
        try:
            with transport.control.together("together()", "writing", refusal=StorageError):
                if rank == world_size - 1:
                    raise OSError("disk on fire")
        except StorageError as error:
            at = "" if rank == world_size - 1 else f"rank {world_size - 1}: "
            assert str(error) == f"{at}writing: OSError: disk on fire"
        else:
            raise AssertionError("no StorageError")
        transport.control.exchange(b"")


def closing_twice_is_closing_once(rank: int, world_size: int, spec: Spec) -> None:
    with opened(spec, rank) as transport:
        transport.control.exchange(b"")
        transport.close()
        transport.close()


def dropping_it_leaves_no_thread(rank: int, world_size: int, spec: Spec) -> None:
    before = set(threading.enumerate())
    ranges = spec.cut(*[64] * world_size)
    transport = made(spec, rank)
    for key in ("a", "b"):
        out = torch.empty(64)
        buffer = fill(transport, key, 0, 64 * world_size, torch.float32)
        transport.reduce(
            ReduceRequest(key, ranges, torch.float32), buffer, out, accumulate=False
        ).wait()
    transport.control.exchange(b"")
    del transport  # nobody closes it
    deadline = time.monotonic() + 300
    while (left := set(threading.enumerate()) - before) and time.monotonic() < deadline:
        # more than once: a thread that is still reporting its last transfer keeps the transport
        gc.collect()
        left.pop().join(0.05)
    assert not left, left


CASES = [
    gather_brings_every_slice,
    a_write_waits_for_gathers_under_way,
    reduce_is_the_canonical_sum,
    a_sum_in_fp16_overflows_only_where_a_rank_has,
    node_size_shapes_the_sum,
    none_contributes_zeros,
    keys_interleave_and_the_nth_meets_the_nth,
    loose_tensors_are_gathered,
    bits_of_any_dtype_are_moved,
    exchange_brings_every_payload,
    broadcast_copies_from_the_source,
    traffic_is_what_came_from_others,
    works_finish_without_being_waited_for,
    buffers_return_to_the_pool,
    abandon_forgets_what_was_under_way,
    comparison_names_the_first_difference,
    what_fails_on_one_rank_fails_on_all,
    closing_twice_is_closing_once,
    dropping_it_leaves_no_thread,
]
