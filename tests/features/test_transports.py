"""One contract, every transport."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.support.harness import run_ranks
from tests.support.inside import patient_pools
from tests.support.transport_cases import CASES, fill
from tests.support.transports import SPECS, Spec, opened
from zeroshard.comm.transport import ReduceRequest


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.label)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_every_transport_keeps_the_contract(case: Callable[..., None], spec: Spec) -> None:
    run_ranks(spec.world_size, case, spec, timeout=30)


def _two_sums_under_way(rank: int, world: int, spec: Spec) -> None:
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


def test_sums_of_two_units_are_on_their_way_between_nodes_of_one_rank() -> None:
    """They travel in fp32, and their buckets are half as large."""
    spec = Spec("two_level2_columns", 2, "gloo", node_size=1, two_level=True)
    run_ranks(2, _two_sums_under_way, spec, timeout=30)


def _refused_dtype(rank: int, world: int, spec: Spec) -> str:
    """Sum integers of 16 bits, which the backend refuses; return how that is told."""
    ranges = spec.cut(*[64] * world)
    with opened(spec, rank) as transport:
        buffer = fill(transport, "a", 0, 64 * world, torch.int16)
        request, out = ReduceRequest("layer.7", ranges, torch.int16), torch.zeros(64)
        with pytest.raises(RuntimeError, match="Invalid scalar type") as raised:
            transport.reduce(request, buffer, out, accumulate=False).wait()
    assert type(raised.value) is RuntimeError
    return "".join(raised.value.__notes__)


def test_what_a_backend_refuses_is_raised_as_it_is_with_the_unit() -> None:
    """No peer is said to have ended."""
    spec = Spec("native2", 2, "nccl")
    assert run_ranks(2, _refused_dtype, spec, timeout=30) == ["in the reduce of layer.7"] * 2
