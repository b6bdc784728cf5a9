"""The masters and weights at rest, for those who write them outside a step: averages, loaded
weights, the step's own publish.

    with rest.rewriting():          every rank is done reading the weights
        ... write masters() or pieces ...
                                    the weights follow the masters, and every rank may read them
                                    again

Invariant: what rests is written only between ``before_writing()`` and ``publish()``. Cost: a step's
publish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from zeroshard.comm.levels import Transports
from zeroshard.core.residency import UnitState
from zeroshard.errors import ConfigError, StateError
from zeroshard.runtime.context import Faults
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.weights import Weights


class Rest:
    """The masters and weights at rest of one engine."""

    def __init__(self, weights: Weights, *, transports: Transports, faults: Faults) -> None:
        self._weights = weights
        self._faults = faults
        self._transports = transports
        self._segments = list(weights.segments)
        self._trained = [segment for segment in self._segments if segment.bucket is not None]
        # segments with weights from other tiers that are waited for here: a peer may wait for them
        # before this rank comes to the unit, or the weights are in use as they are
        self._awaited = set[Segment]()
        for unit in weights.units:
            waits = transports.main.flat.size > 1 or not unit.cells.optim.is_sharded
            self._awaited.update(one for one in unit.segments if waits and one.steps_elsewhere)

    def before_writing(self) -> None:
        """Finish the gathers under way, take what the user has written to whole weights into the
        masters, and wait until every rank is done reading the weights.
        """
        self._weights.finish_gathers()
        for unit in self._weights.units:
            if unit.residency.state is UnitState.FULL:
                unit.check_memory()
        self.take_writes(ends=True)
        self._transports.begin_write()

    def take_writes(self, *, ends: bool = False) -> None:
        """Let the masters follow what the user has written to whole weights; `ends`: the weights
        are written next. Raises StateError where a write is lost.
        """
        for segment, written in self._written(ends=ends):
            segment.take_writes(written)

    def _written(self, *, ends: bool = False) -> list[tuple[Segment, list[str]]]:
        """Return the parameters to which the user has written since they were published, or since
        this was asked last, by segment; `ends`: see FlatWeights.written.
        """
        out = []
        for unit in self._weights.units:
            for segment in unit.segments:
                if not segment.may_be_written:
                    continue
                # where a step still writes, what is there is not what was published
                coming = segment.is_coming
                written = [] if coming else segment.flat.written(ends=ends and not segment.lags)
                if segment.flat.replicated:
                    written += segment.user_view.written()
                if written:
                    out.append((segment, written))
        return out

    def publish(self, *, frozen: bool = False, everything: bool = True) -> None:
        """The masters (and `frozen` weights) have been written: cast them into the weights and
        let every rank read those.

        A step has brought what rests on another tier by itself: `everything` False.
        """
        segments = self._segments if frozen else self._trained
        with torch.no_grad():
            apart = [segment for segment in segments if segment.own_master is not None]
            casts = [pair for one in apart for pair in one.follow(everything=everything)]
            if casts:  # one kernel for all on an accelerator
                torch._foreach_copy_([to for to, _ in casts], [master for _, master in casts])
            for segment in segments:
                if segment.flat.publishes or segment.steps_elsewhere:
                    segment.publish()
                if segment in self._awaited:
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
                if segment.bucket is not None:
                    segment.bucket.reset_residual()  # of gradients of other weights
        self.publish(frozen=True)
        if any(segment.keeps_writes for segment in self._weights.segments):
            self._weights.finish_gathers()
            self._transports.begin_write()  # before the user writes to these, all have read them
        self._faults.agree()

    @contextmanager
    def swapped(self, exchange: Callable[[], None]) -> Iterator[None]:
        """Let averages rest in the place of the masters inside, where nothing that needs trained
        numbers may run: `exchange` puts them there, and back. Collective, at both ends.
        """
        self._weights.availability.check_trained()
        self._swap(exchange, entering=True)
        written: list[tuple[Segment, list[str]]] = []
        try:
            with self._weights.availability.swapped():
                yield
        finally:
            written = self._written()
            self._swap(exchange, entering=False)
        if written:
            raise StateError(
                f"parameter {written[0][1][0]!r} was written to inside EMA.swapped(), and the write"
                " is lost: edit it after that context"
            )

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
                reason = "the weights may be the average's"
                self._faults.lose("EMA.swapped() ended by an exception", reason)
            raise

    def masters(self) -> list[torch.Tensor]:
        """Return this rank's part of the fp32 masters of all trained parameters, flat, a tensor
        per segment in unit order.

        Raises ConfigError where masters rest on another tier, StateError where they are not there
        or are averages.
        """
        self._weights.availability.check_trained()
        states = [segment.master for segment in self._trained if segment.master is not None]
        # also on a rank with none of them elsewhere
        contexts = [segment.flat.context for segment in self._trained]
        off_device = any("optimizer" in one.tiering.away for one in contexts)
        if off_device or any(one.precision.master is not torch.float32 for one in contexts):
            raise ConfigError(
                "zs.EMA needs the fp32 masters as device tensors: leave offload.optimizer on the"
                " device, and master= out of the precision"
            )
        return [state.whole for state in states]
