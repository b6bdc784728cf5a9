"""The transports of two levels as one Transport, whose operations are flights of the engine's: the
contract suite runs on it as on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from zeroshard.comm.levels import Levels, PrivateWindow, ReadyHop, Start
from zeroshard.comm.transport import ReduceRequest, Window
from zeroshard.core.digest import Digest
from zeroshard.core.layout import Range
from zeroshard.core.placement import Scope
from zeroshard.core.route import Axis
from zeroshard.runtime.flight import Flight
from zeroshard.runtime.streams import NoStreams

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
        flight = self._last[key] = Flight([steps], NoStreams(), "gather", self.levels)
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
