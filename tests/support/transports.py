"""The transports under test, and what the cases share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from tests.support.hosts import pretended_host
from zeroshard.comm.levels import Levels, PrivateWindow, ReadyHop, Start
from zeroshard.comm.select import make_levels
from zeroshard.comm.transport import CommSpec, ReduceRequest, Transport, Window
from zeroshard.core.digest import Digest
from zeroshard.core.layout import Range
from zeroshard.core.placement import Mesh, Scope
from zeroshard.core.route import Axis
from zeroshard.runtime.flight import Flight
from zeroshard.runtime.streams import Streams

BOTH = (Axis.NODE, Axis.LOCAL)


class TwoLevels:
    """A Transport over all ranks of a mesh, each collective in two levels."""

    one_sided = False

    def __init__(self, levels: Levels) -> None:
        self.levels = levels
        self.name, self.keyed = levels.name, levels.keyed
        self.rank, self.size = levels.flat.rank, levels.flat.size
        self.control, self.traffic = levels.flat.control, levels.flat.traffic
        self._last: dict[str, Flight] = {}

    def _begin(self, key: str, *steps: ReadyHop) -> Flight:
        """Start an operation, once the one before of its key has started all levels: the engine
        waits for that before, too.
        """
        if key in self._last:
            self._last[key].wait()
        flight = self._last[key] = Flight([steps], Streams(), "gather", self.levels)
        flight.go()
        return flight

    def window(self, *args: Any, replicated: bool) -> Window:
        window, _ = self.levels.memory(*args, Scope.FULL if replicated else Scope.SHARD)
        assert isinstance(window, PrivateWindow), window
        window._transport = self
        return window

    def register(self, key: str) -> None:
        for transport in self.levels:
            transport.register(key)

    def all_gather(
        self, key: str, local: torch.Tensor, ranges: Sequence[Range], out: torch.Tensor
    ) -> Flight:
        starts: list[Start] = self.levels.gathers(BOTH, key, local, ranges, out)
        return self._begin(f"gather {key}", *map(ReadyHop, starts))

    def grad_buffer(
        self, key: str, numel: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self.levels.inside.grad_buffer(key, numel, dtype, device)

    def return_buffer(self, buffer: torch.Tensor) -> None:
        self.levels.inside.return_buffer(buffer)

    def reduce(
        self,
        request: ReduceRequest,
        buffer: torch.Tensor | None,
        out: torch.Tensor,
        *,
        accumulate: bool,
    ) -> Flight:
        both, of_columns = self.levels.node_sum(request), self.levels.reduce_inside(request)
        inside = partial(both.inside, of_columns, buffer, out, accumulate=accumulate)
        between = ReadyHop(partial(both.between, None), unused=both.unused)
        return self._begin(f"reduce {request.key}", ReadyHop(inside), between)

    def begin_write(self) -> None:
        for key, flight in self._last.items():
            if key.startswith("gather "):
                flight.wait()
        self.levels.begin_write()

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        self.levels.flat.broadcast(tensor, source)

    def watch(self, digest: Digest, is_idle: Callable[[], bool]) -> None: ...

    def progress(self) -> None:
        for progress in self.levels.progress:
            progress()

    def give_up(self) -> None:
        self._last.clear()
        self.levels.give_up()

    def abandon(self) -> None:
        self._last.clear()
        self.levels.abandon()

    def close(self) -> None:
        self.levels.close()


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
    node_size: int | None = None
    two_level: bool | None = None

    def cut(self, *shares: int) -> tuple[Range, ...]:
        """Return the ranges of each rank's contiguous `shares`, dealt out as this transport
        wants them.
        """
        order = Mesh.of(self.world_size, self.node_size).column_order
        dealt = dict(zip(order, cut(*(shares[rank] for rank in order)), strict=True))
        return tuple(dealt[rank] for rank in range(self.world_size))

    def cuts(self) -> list[tuple[Range, ...]]:
        """Return equal shares, unequal ones, and ones that are empty first, last and everywhere
        but once.
        """
        size = self.world_size
        return [
            self.cut(*[192] * size),
            self.cut(*[64 * (1 + 3 * rank % 5) for rank in range(size)]),
            self.cut(*[0 if rank % 2 == 0 and size > 1 else 128 for rank in range(size)]),
            self.cut(*[64] * (size - 1), 0 if size > 1 else 64),
            self.cut(*[320 if rank == size // 2 else 0 for rank in range(size)]),
        ]

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
    Spec("flat_mesh4", 4, "mixed", host_size=2, node_size=2, two_level=False),
    Spec("two_level4_gloo", 4, "gloo", node_size=2, two_level=True),
    Spec("two_level4_shm", 4, "shared_memory", node_size=2, two_level=True),
    Spec("two_level4_mixed", 4, "mixed", host_size=2, node_size=2, two_level=True),
    Spec("two_level4_columns", 4, "gloo", node_size=1, two_level=True),
    Spec("two_level4_native", 4, "nccl", ordered=True, node_size=2, two_level=True),
]
PAIRED = [
    spec for spec in SPECS if spec.name in ("gloo", "shared_memory", "mixed") and not spec.two_level
]
MAPPED = [spec for spec in PAIRED if spec.name == "shared_memory"]


def made(spec: Spec, rank: int, *, pool_bytes: int | None = None) -> Transport:
    """Make `spec`'s transport over the default group."""
    with pretended_host(None if spec.host_size is None else rank // spec.host_size):
        levels = make_levels(
            None,
            CPU,
            CommSpec(
                Mesh.of(spec.world_size, spec.node_size),
                name=spec.name,
                ordered=spec.ordered,
                alias=spec.alias,
                pool_bytes=pool_bytes,
                two_level=spec.two_level,
            ),
        )
    transport: Transport = TwoLevels(levels) if levels.is_deep else levels.flat
    assert transport.name == spec.name or spec.node_size, (transport.name, spec)
    assert (transport.rank, transport.size) == (rank, spec.world_size)
    return transport


@contextmanager
def opened(spec: Spec, rank: int, **options: Any) -> Iterator[Transport]:
    """Make `spec`'s transport over the default group, and close it."""
    transport = made(spec, rank, **options)
    try:
        yield transport
    finally:
        transport.close()


def cut(*shares: int) -> tuple[Range, ...]:
    """Return the ranges of contiguous `shares`."""
    ends = [sum(shares[:count]) for count in range(len(shares) + 1)]
    return tuple(pairwise(ends))


def values(seed: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the same random numbers on every rank, both zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(numel, generator=generator) * 8
    data[::7], data[3::7] = -0.0, 0.0
    return data.to(dtype)


def length(span: Range) -> int:
    return span[1] - span[0]
