"""The transport of a world of one: windows are already whole, a reduce is a cast.

Invariant: same protocol, same bits as one rank's part of any other transport (the sum of one
contribution). Cost: no bytes, no messages; `traffic` counts calls under the link class "local".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from zeroshard.comm.ordered import sum_parts
from zeroshard.comm.private_window import PrivateWindow
from zeroshard.comm.ranks import Ranks
from zeroshard.comm.transport import CommSpec, DoneWork, ReduceRequest, Traffic, Work
from zeroshard.core.digest import Digest
from zeroshard.core.layout import Range
from zeroshard.memory import Pool


class OneProcess:
    """A Transport without peers."""

    def __init__(self, spec: CommSpec, traffic: Traffic | None = None) -> None:
        self.name = "one_process"
        self.rank = 0
        self.size = 1
        self.one_sided = True
        self.keyed = True
        self.traffic = Traffic() if traffic is None else traffic
        self.device_sum: Callable[[torch.Tensor], None] | None = lambda tensor: None
        self.control = Ranks()
        self._pool = Pool(spec.pool_bytes)

    def window(
        self,
        key: str,
        ranges: Sequence[Range],
        dtype: torch.dtype,
        device: torch.device,
        *,
        replicated: bool,
    ) -> PrivateWindow:
        assert len(ranges) == 1, (key, ranges)
        return PrivateWindow(self, key, ranges, dtype, device, replicated=True, aliased=True)

    def register(self, key: str) -> None: ...

    def grad_buffer(
        self, key: str, numel: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self._pool.take(numel, dtype, device)

    def return_buffer(self, buffer: torch.Tensor) -> None:
        self._pool.give(buffer)

    def reduce(
        self,
        request: ReduceRequest,
        buffer: torch.Tensor | None,
        out: torch.Tensor,
        *,
        accumulate: bool,
    ) -> Work:
        sum_parts(
            [buffer],
            out,
            codec=request.codec,
            node_size=None,
            accumulate=accumulate,
            sums=request.sums,
        )
        self.traffic.add("reduce_scatter", "local", 0)
        if buffer is not None:
            self._pool.give(buffer)
        return DoneWork()

    def all_gather(
        self, key: str, local: torch.Tensor, ranges: Sequence[Range], out: torch.Tensor
    ) -> Work:
        if out.data_ptr() != local.data_ptr():
            out.copy_(local)
        self.traffic.add("all_gather", "local", 0)
        return DoneWork()

    def begin_write(self) -> None: ...

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        assert source == 0, source

    def watch(self, digest: Digest, is_idle: Callable[[], bool]) -> None: ...

    def progress(self) -> None: ...

    def give_up(self) -> None: ...

    def abandon(self) -> None: ...

    def close(self) -> None:
        self._pool.clear()
