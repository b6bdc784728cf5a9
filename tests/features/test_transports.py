"""One contract, every transport."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from tests.support.harness import on_ranks, run_ranks
from tests.support.inside import patient_pools
from tests.support.transport_cases import CASES, fill
from tests.support.transports import CPU, SPECS, Spec, opened
from zeroshard.comm.transport import ReduceRequest


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.label)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_transport_keeps_the_contract(case: Callable[..., None], spec: Spec) -> None:
    run_ranks(spec.world_size, case, spec, timeout=30)


@on_ranks(2, timeout=30)
def test_sums_of_two_units_are_on_their_way_between_nodes_of_one_rank(
    rank: int, world: int
) -> None:
    """They travel in fp32, and their buckets are half as large."""
    spec = Spec("two_level2_columns", 2, "gloo", node_size=1, two_level=True)
    numel, dtype = 256 << 10, torch.bfloat16
    ranges = spec.cut(*[numel // world] * world)
    both = 2 * numel * dtype.itemsize  # as of an engine whose largest unit has `numel` elements
    with patient_pools(), opened(spec, rank, pool_bytes=both) as transport:
        if rank:
            transport.control.exchange(b"")  # rank 0 has begun
        works = [
            transport.reduce(
                ReduceRequest(key, ranges, dtype),
                fill(transport, key, 0, numel, dtype),
                torch.empty(numel // world),
                accumulate=False,
            )
            for key in ("a", "b")
        ]
        if not rank:
            transport.control.exchange(b"")
        for work in works:
            work.wait()


@on_ranks(2, timeout=30)
def test_what_a_backend_refuses_is_raised_as_it_is_with_the_unit(rank: int, world: int) -> None:
    """No peer is said to have ended. Sum integers of 16 bits, which the backend refuses; see how
    that is told.
    """
    spec = Spec("native2", 2, "nccl")
    ranges = spec.cut(*[64] * world)
    with opened(spec, rank) as transport:
        buffer = fill(transport, "a", 0, 64 * world, torch.int16)
        request, out = ReduceRequest("layer.7", ranges, torch.int16), torch.zeros(64)
        with pytest.raises(RuntimeError, match="Invalid scalar type") as raised:
            transport.reduce(request, buffer, out, accumulate=False).wait()
    assert type(raised.value) is RuntimeError
    found = "".join(raised.value.__notes__)
    assert found == "in the reduce of layer.7"


@on_ranks(2, timeout=150)
def test_sums_go_on_where_a_gather_of_mapped_memory_begins(rank: int, world: int) -> None:
    """A peer may need the buffer that it waits for. Begin a gather of mapped memory again and again
    while a sum is under way; see whether it has ended so, without a wait.
    """
    spec = next(one for one in SPECS if one.label == "shm2")
    ranges, out = spec.cut(*[64] * world), torch.empty(64)
    with opened(spec, rank) as transport:
        window = transport.window("w", ranges, torch.float32, CPU, replicated=False)
        transport.begin_write()
        window.publish()
        window.gather().wait()
        request = ReduceRequest("a", ranges, torch.float32)
        if rank:
            transport.control.exchange(b"")  # rank 0 has begun
        buffer = fill(transport, "a", 0, 64 * world, torch.float32)
        work = transport.reduce(request, buffer, out, accumulate=False)
        if not rank:
            transport.control.exchange(b"")
        deadline = time.monotonic() + 100
        while not work._pending.done and time.monotonic() < deadline:  # type: ignore[attr-defined]
            window.gather()
            time.sleep(0.01)
        ended: bool = work._pending.done  # type: ignore[attr-defined]
        work.wait()
        transport.control.exchange(b"")
    assert ended
