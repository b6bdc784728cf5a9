"""What rests on this rank, for those who write it outside a step: averages, loaded weights, the
step's own publish.

    with rest.rewriting():          every rank is done reading the weights
        ... write masters() or pieces() ...
                                    the weights follow the masters, and every rank may read them
                                    again

Invariant: what rests is written only between ``before_writing()`` and ``publish()``. Cost: that of
a step's publish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from zeroshard.comm.levels import Transports
from zeroshard.core.residency import UnitState
from zeroshard.core.work import wait_on_host
from zeroshard.errors import ConfigError
from zeroshard.runtime.faults import Faults
from zeroshard.runtime.weights import Weights
from zeroshard.state.state import State

__all__ = ["Rest", "RestingPiece"]


@dataclass(frozen=True)
class RestingPiece:
    """Elements ``start`` to ``stop`` of one parameter, in the order in which its memory holds
    them, at rest on this rank, on whatever tier.
    """

    name: str
    parameter: nn.Parameter
    stride: tuple[int, ...]
    start: int
    stop: int
    state: State
    place: slice  # in the state
    # which of `Rest.masters()` it lies in, and where; None for a frozen parameter's weight
    master: tuple[int, slice] | None

    @property
    def tensor(self) -> torch.Tensor:
        """The numbers [stop - start] of a state that lies on the device."""
        return self.state.whole[self.place]

    def borrowed(self, *, write: bool = False) -> AbstractContextManager[torch.Tensor]:
        """Lend the numbers [stop - start]; written only inside ``Engine.states.rewriting()``."""
        return self.state.borrowed(self.place.start, self.place.stop, write=write)

    def write(self, numbers: torch.Tensor) -> None:
        """Write `numbers` [stop - start], of any dtype, here; only inside
        ``Engine.states.rewriting()``. What was there is not read.
        """
        if self.state.on_device:
            self.tensor.copy_(numbers)
            return
        source = numbers.to(self.state.dtype)
        for work in self.state.write(self.place.start, self.place.stop, source):
            wait_on_host(work)


class Rest:
    """The masters and weights at rest of one engine."""

    def __init__(self, weights: Weights, *, transports: Transports, faults: Faults) -> None:
        self._weights = weights
        self._faults = faults
        self._transports = transports

    def before_writing(self) -> None:
        """Finish the gathers under way and wait until every rank is done reading the weights."""
        self._weights.finish_gathers()
        for unit in self._weights.units:
            if unit.residency.state is UnitState.FULL:
                unit.check_memory()
        self._transports.begin_write()

    def publish(self, *, frozen: bool = False, everything: bool = True) -> None:
        """The masters (and `frozen` weights) have been written: cast them into the weights and
        let every rank read those.

        A step has brought what rests on another tier by itself: `everything` False.
        """
        with torch.no_grad():
            for unit in self._weights.units:
                for segment in unit.segments if frozen else unit.trainable:
                    segment.publish(everything=everything)
                    if self._transports.main.flat.size > 1 or not unit.cells.optim.is_sharded:
                        # a peer may wait for it before this rank comes to this unit; or the weights
                        # are in use as they are
                        segment.wait_uploads()
        self._weights.invalidate(frozen=frozen)

    @contextmanager
    def rewriting(self) -> Iterator[None]:
        """Write to `masters` and `pieces` inside; then the weights follow, as after a step.
        Collective.

        A StorageError inside ends the body, and is raised on every rank after what is collective.
        """
        self.before_writing()
        with self._faults.noted(lost=True):
            yield
        for unit in self._weights.units:
            for segment in unit.trainable:
                if segment.grad is not None:
                    segment.grad.bucket.reset_residual()  # of gradients of other weights
        self.publish(frozen=True)
        if any(segment.keeps_writes for unit in self._weights.units for segment in unit.segments):
            self.before_writing()  # before anybody writes to these, everybody has read them
        self._faults.agree()

    @contextmanager
    def swapped(self, exchange: Callable[[], None]) -> Iterator[None]:
        """Let averages rest in the place of the masters inside, where nothing that needs trained
        numbers may run: `exchange` puts them there, and back. Collective, at both ends.
        """
        self._weights.availability.check_trained()
        self._swap(exchange, entering=True)
        try:
            with self._weights.availability.swapped():
                yield
        finally:
            self._swap(exchange, entering=False)

    def _swap(self, exchange: Callable[[], None], *, entering: bool) -> None:
        """Exchange the masters, and let the weights follow. Where that fails the masters are the
        trained ones again, the weights may be either, and only a load helps.
        """
        has_begun = is_exchanged = False
        try:
            with torch.no_grad(), self.rewriting():
                has_begun = True
                exchange()
                is_exchanged = True
        except BaseException:
            if has_begun == is_exchanged == entering:
                exchange()
            if has_begun or not entering:  # else nothing has changed
                reason = "the weights may be those of the average"
                self._faults.lose("EMA.swapped() ended by an exception", reason)
            raise

    def masters(self) -> list[torch.Tensor]:
        """Return this rank's part of the fp32 masters of all trained parameters, flat, a tensor
        per segment in unit order.

        Raises ConfigError where masters rest on another tier, StateError where they are not there
        or are averages.
        """
        self._weights.availability.check_trained()
        states = [
            segment.master
            for unit in self._weights.units
            for segment in unit.trainable
            if segment.master is not None
        ]
        if not all(state.on_device for state in states):
            raise ConfigError(
                "the masters rest on another tier and are not to be had as tensors (zs.EMA needs"
                " them): leave offload.optimizer on the device"
            )
        return [state.whole for state in states]

    def pieces(self, *, share: bool) -> Iterator[RestingPiece]:
        """Yield what rests here of every parameter: the master where there is one, else the weight.

        With `share`, of what rests on every rank only this rank's share: all ranks' pieces together
        are then every element once.
        """
        number = -1
        for unit in self._weights.units:
            for segment in unit.segments:
                layout, has_master = segment.flat.layout, segment.master is not None
                number += has_master
                flat = segment.flat
                target, held = (
                    (flat.rest, flat.rest_span)
                    if segment.master is None
                    else (segment.master, flat.stepped)
                )
                # the rest comes from them
                by_peers = segment.master is None and not (
                    flat.replicated and flat.stepped == flat.rest_span
                )
                mine = flat.own_span if share or by_peers else held
                base = mine[0] - held[0]
                for piece in layout.pieces_in(mine):
                    span = slice(base + piece.shard_start, base + piece.shard_stop)
                    yield RestingPiece(
                        piece.name,
                        segment.parameters[piece.index],
                        segment.flat.strides[piece.index],
                        piece.start,
                        piece.stop,
                        target,
                        span,
                        (number, span) if has_master else None,
                    )
