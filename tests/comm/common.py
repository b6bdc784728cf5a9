"""The transports under test, and what the cases share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch

from zeroshard.comm.select import make_transport
from zeroshard.comm.transport import Transport
from zeroshard.core.layout import Range

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Spec:
    """One way to make a transport. `host_size` ranks pretend to share a host."""

    label: str
    world_size: int
    name: str
    alias: bool = True
    host_size: int | None = None
    ordered: bool | None = None

    @property
    def native(self) -> bool:
        return self.name == "nccl"

    @property
    def exact(self) -> bool:
        return not self.native or bool(self.ordered)

    def link(self, rank: int, peer: int) -> str:
        """Return the link class between two ranks."""
        if self.native:
            return "nccl"
        host_size = {"gloo": 1, "mixed": self.host_size}.get(self.name, self.world_size)
        assert host_size is not None
        return "shared_memory" if rank // host_size == peer // host_size else "gloo"


SPECS = [
    Spec("one_process", 1, "one_process"),
    Spec("forced_alone", 1, "nccl"),
    Spec("gloo2", 2, "gloo"),
    Spec("gloo3", 3, "gloo"),
    Spec("gloo4", 4, "gloo"),
    Spec("shm2", 2, "shared_memory"),
    Spec("shm4", 4, "shared_memory"),
    Spec("shm2_copying", 2, "shared_memory", alias=False),
    Spec("shm4_copying", 4, "shared_memory", alias=False),
    Spec("mixed4", 4, "mixed", host_size=2),
    Spec("native2", 2, "nccl"),
    Spec("native3", 3, "nccl"),
    Spec("native3_ordered", 3, "nccl", ordered=True),
]
PAIRED = [spec for spec in SPECS if spec.name in ("gloo", "shared_memory", "mixed")]
MAPPED = [spec for spec in SPECS if spec.name == "shared_memory"]


@contextmanager
def opened(
    spec: Spec, rank: int, *, stall_timeout_s: float = 20.0, pool_bytes: int | None = None, node_size: int | None = None
) -> Iterator[Transport]:
    """Make `spec`'s transport over the default group, and close it."""
    transport = make_transport(
        None,
        name=spec.name,
        ordered=spec.ordered,
        alias=spec.alias,
        host_id=None if spec.host_size is None else str(rank // spec.host_size),
        stall_timeout_s=stall_timeout_s,
        pool_bytes=pool_bytes,
        node_size=node_size,
    )
    assert transport.name == spec.name, (transport.name, spec)
    assert (transport.rank, transport.size) == (rank, spec.world_size)
    try:
        yield transport
    finally:
        transport.close()


def cut(*shares: int) -> tuple[Range, ...]:
    """Return the ranges of contiguous `shares`."""
    ends = [sum(shares[:count]) for count in range(len(shares) + 1)]
    return tuple(pairwise(ends))


def cuts(world_size: int) -> list[tuple[Range, ...]]:
    """Return equal shares, unequal ones, and ones that are empty first, last and everywhere but once."""
    unequal = [64 * (1 + 3 * rank % 5) for rank in range(world_size)]
    return [
        cut(*[192] * world_size),
        cut(*unequal),
        cut(*[0 if rank % 2 == 0 and world_size > 1 else 128 for rank in range(world_size)]),
        cut(*[64] * (world_size - 1), 0 if world_size > 1 else 64),
        cut(*[320 if rank == world_size // 2 else 0 for rank in range(world_size)]),
    ]


def values(seed: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the same random numbers on every rank, both zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(numel, generator=generator) * 8
    data[::7], data[3::7] = -0.0, 0.0
    return data.to(dtype)


def length(span: Range) -> int:
    return span[1] - span[0]
