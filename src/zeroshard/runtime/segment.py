"""A segment: the parameters of one unit that share dtype and trainability.

They lie in one flat buffer. The segment knows where their weights and masters rest, and how stepped
masters become weights: cast here, or brought from another tier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch

from zeroshard.core.layout import Piece, round_up
from zeroshard.core.placement import Tier
from zeroshard.core.resting import AtRest, is_weight, num_shared, tiles
from zeroshard.core.work import DoneWork, Work
from zeroshard.errors import StateError, StorageError
from zeroshard.memory import cast_for, mark
from zeroshard.runtime.bucket import Bucket
from zeroshard.runtime.context import SegmentPlan
from zeroshard.runtime.flat_weights import FlatWeights
from zeroshard.runtime.parameters import Parameters
from zeroshard.state.state import DeviceMemory, State, flatten
from zeroshard.tier.store import Storage, Store

_TILE = 1 << 20  # elements that pass from one tier to another at a time


class Segment:
    """The parameters of one unit that share dtype and trainability."""

    def __init__(
        self,
        plan: SegmentPlan,
        flat: FlatWeights,
        bucket: Bucket | None,
        *,
        split: int,
    ) -> None:
        """`bucket`: of trainable segments only."""
        self.names = tuple(plan.members)
        self.parameters = tuple(plan.members.values())
        self.parts = plan.parts  # of the parameters, that are here
        self.given = tuple(parameter.dtype for parameter in self.parameters)  # before shard()
        self.flat = flat
        self.key = flat.key  # what it is called in collectives
        self.bucket = bucket
        self.master: State | None = None  # what the optimizer steps
        self.own_master: State | None = None  # the same, unless it is the weights themselves
        self.weight = flat.weight  # the weights that follow from it
        self.split = split  # how many elements of the master rest on the device
        # how many elements of the master, from its start, are those weights themselves
        self.aliased = 0
        self.lags = False  # whether the weights may be a step behind the master
        self.writes_weights = False  # whether to write the master is to write the weights
        # whether a step may bring weights here from another tier, and has, or still does
        self.steps_elsewhere = bool(flat.context.tiering.away)
        self._unpublished = False
        self.step = threading.Event()  # set while no step on another tier is under way
        self.step.set()
        # by range: masters that edits have overwritten since the last step, as the step left them
        self._overwritten: dict[tuple[int, int], torch.Tensor] = {}
        # weights on their way back from a step on another tier, and what they are copied from
        self.uploads: list[tuple[Work, object]] = []
        # what the user sees
        self.user_view = Parameters(self.names, self.parameters, flat.dtype)
        self.rewritten = True  # frozen weights: since they were gathered last
        self.may_be_written = False  # whether `take_writes` has anything to look for

    @property
    def has_news(self) -> bool:
        """Whether a gather brings anything: frozen weights that every rank keeps whole stay as they
        are when others are stepped.
        """
        return self.bucket is not None or not self.flat.replicated or self.rewritten

    def take_news(self) -> bool:
        """Return whether a gather that begins brings anything."""
        has_news, self.rewritten = self.has_news, False
        return has_news

    @cached_property
    def keeps_writes(self) -> bool:
        """Whether its parameters may be written to wherever they can be read, alike on every rank:
        every rank keeps them whole, on the device, and no step writes to them.
        """
        return self.bucket is None and self.flat.replicated and not self.flat.buffer.is_ours

    @cached_property
    def is_whole(self) -> bool:
        """Whether every rank keeps the parameters whole, and what is written to them, alike on
        every rank, is trained on: they are the masters, or the masters follow (`take_writes`).
        """
        is_late = self.flat.context.tiering.delayed_update is not None
        if self.bucket is not None and (is_late or self.bucket.precision.has_remainders):
            return False
        return self.flat.replicated and not self.flat.buffer.is_ours

    def watch(self, *, strict: bool) -> None:
        """Look for what the user writes to weights that are not the masters, and on the CPU, or on
        a device where the user is `strict`, also for writes that count no version.
        """
        flat = self.flat
        by_value = (strict or flat.buffer.device.type == "cpu") and flat.rest.on_device
        if flat.replicated:
            self.may_be_written = self.own_master is not None
            if by_value and self.may_be_written:
                flat.watch(flat.stepped)
        elif by_value and flat.is_local and (flat.layout.num_shards > 1 or self.own_master):
            self.may_be_written = True
            flat.watch(flat.own_span)

    def take_writes(self, written: Sequence[str]) -> None:
        """Let the master follow the weights, to which the user has `written`, by parameter. Raises
        StateError where that is lost.
        """
        if not self.is_whole:
            reached = " and has reached other ranks" if self.flat.is_local else ""
            raise StateError(
                f"parameter {written[0]!r} was written to outside engine.gathered(writeback=True),"
                f" which is lost{reached}: edit it inside of that, and load a checkpoint"
            )
        if self.own_master is not None:
            with torch.no_grad():
                self._edit_master(self.own_master, self.flat.buffer.views)

    @property
    def master_is_weight(self) -> bool:
        """Whether the optimizer steps the weights themselves."""
        return self.master is not None and self.aliased == self.master.numel

    @property
    def stepped_pieces(self) -> tuple[Piece, ...]:
        """The pieces that this rank's optimizer steps."""
        return self.flat.layout.pieces_in(self.flat.stepped)

    def move_split(self, split: int, *, with_gradient: bool) -> None:
        """Let the optimizer's state rest on the device up to element `split`, and `with_gradient`
        the gradients to come, too: they rest where they are read. `make_master` follows.
        """
        self.split = split
        if with_gradient and self.bucket is not None:
            self.bucket.accumulator.move(split)

    def make_master(
        self,
        memory: DeviceMemory,
        *,
        dtype: torch.dtype,
        store: Store | None,
        apart: bool = False,
        remainder: Storage | None = None,
    ) -> None:
        """Take the weights as master where they have its dtype and lie where it rests; else
        allocate one, zeros on the device, undefined elsewhere.

        The first `split` elements rest on the device, the others in `store`. `apart`: never the
        weights themselves, which are to lag behind. `remainder`: the master, which is written and
        read together with the weights.
        """
        if remainder is not None:
            self.master = self.own_master = State(None, remainder)
            self.writes_weights = True
            return
        weight, split = self.weight, self.split
        self.lags = apart
        there = Tier.DEVICE if weight.away is None else weight.away.tier
        followed = AtRest(self.flat.dtype, weight.numel, weight.split, there)
        rests = AtRest(dtype, weight.numel, split, Tier.DEVICE if store is None else store.tier)
        self.aliased = 0 if apart else num_shared(followed, rests)
        if not apart and is_weight(followed, rests):
            self.master, self.own_master = weight, None
            return
        storage = (
            None
            if store is None or rests.away is None
            else store.allocate(f"{self.key} master", weight.numel - split, dtype)
        )
        if self.aliased:
            assert weight.tensor is not None
            near = weight.tensor[:split]
        else:
            near = memory.empty(split, dtype).zero_()  # padding is published, too
        self.master = State(near, storage, link=memory.link)
        self.own_master = None if self.master_is_weight else self.master

    def store(self, values: Sequence[torch.Tensor], *, edits: bool = False) -> None:
        """Write `values` (one per parameter, any float dtype) into the weights at rest and the
        master, or bring them into the master as `edits` of the weights.
        """
        with torch.no_grad():
            if edits and self.own_master is not None:  # first: it may be read with the weights
                self._edit_master(self.own_master, values)
            if self.flat.replicated:
                for view, value in zip(self.flat.buffer.views, values, strict=True):
                    view.copy_(value)
                # a peer's slice may have been written to since, by the model itself
                self.rewritten = self.rewritten and not self.keeps_writes
            else:
                _fill(self.flat.rest, self.flat.layout.pieces_in(self.flat.rest_span), values)
            if self.own_master is not None and not edits:
                _fill(self.own_master, self.stepped_pieces, values)

    def _edit_master(self, master: State, weights: Sequence[torch.Tensor]) -> None:
        """Let the master follow edited `weights`: see [Note: masters of edited weights] in
        docs/design/engine.md.
        """
        for piece in self.stepped_pieces:
            own = flatten(weights[piece.index])[piece.start : piece.stop]
            for low, high in tiles(piece.shard_start, piece.shard_stop, _TILE):
                with master.borrowed(low, high, write=False) as held:
                    new = own[low - piece.shard_start : high - piece.shard_start].to(held.device)
                    is_same = held.to(new.dtype) == new
                    if is_same.all():
                        continue
                    left = self._overwritten.get((low, high))
                    if left is None:  # by the last step
                        left = self._overwritten[low, high] = held.clone()
                    put_back = torch.where(left.to(new.dtype) == new, left, new.to(held.dtype))
                    edited = torch.where(is_same, held, put_back)
                master.put(low, high, edited)

    def follow(self, *, everything: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Cast its own master into the weights at rest, where one of them lies elsewhere; return
        weights on the device and their masters, which the caller casts. `publish` follows.

        A step leaves out (not `everything`) what was stepped in tiles: each has brought its weights
        itself, or still will.
        """
        casts, master = list[tuple[torch.Tensor, torch.Tensor]](), self.own_master
        assert master is not None, self.key
        if self.writes_weights:
            return casts
        in_tiles = self.bucket is not None and self.bucket.accumulator.tiered
        spans = [] if in_tiles and not everything else [(self.aliased, master.split)]
        if everything:
            spans += tiles(master.split, master.numel, _TILE)
        to, near = self.weight.tensor, master.tensor
        for start, end in spans:
            if start == end:
                continue
            if to is None or near is None or end > min(len(to), len(near)):
                with self._noting(), master.borrowed(start, end, write=False) as numbers:
                    for work in self.weight.write(start, end, numbers.to(self.flat.dtype)):
                        work.wait()
            elif end - start == master.numel:  # no call for views of it
                casts.append((to, near))
            else:
                casts.append((to[start:end], near[start:end]))
        return casts

    def publish(self) -> None:
        """Let the peers read the weights, which follow the master."""
        # what an earlier step brought is written over
        self._unpublished = self.steps_elsewhere and (not self.step.is_set() or bool(self.uploads))
        if not self._unpublished:
            self.flat.publish()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note that weights could not be written, instead of raising it: the peers wait for what
        follows.
        """
        try:
            yield
        except StorageError as error:
            self.flat.note(error, lost=True)

    @property
    def is_coming(self) -> bool:
        """Whether weights are on their way here from a step on another tier."""
        if not self.steps_elsewhere:
            return False
        # set after the last of them is added
        return self._unpublished or not self.step.is_set() or bool(self.uploads)

    def bring(
        self, start: int, stop: int, master: torch.Tensor, stays: bool, uses: object
    ) -> list[Work]:
        """Start casting stepped masters (do they stay as they are meanwhile?) into the weights;
        `wait_uploads` waits for it, and holds what the step `uses` until then: memory of compute.
        """
        if stop <= self.aliased:  # the weights themselves were stepped, in the caller's stream
            stepped = mark(self.flat.full.device)
            return [] if stepped is None else self._sent([stepped], uses)
        source = cast_for(self.flat.full, master, self.flat.dtype, copy=not stays)
        return self._sent(self.weight.write(start, stop, source), (source, uses))

    def can_bring_from_rest(self, start: int, stop: int) -> bool:
        """Whether stepped masters may go into the weights as they are, from where they rest."""
        return self.master_is_weight or (
            self.master is not None
            and self.flat.dtype is self.weight.dtype is self.master.dtype
            and stop <= self.weight.split
        )

    def bring_from_rest(self, start: int, stop: int) -> list[Work]:
        """Start copying stepped masters into the weights from where they rest."""
        if self.own_master is None:
            return []
        assert self.weight.tensor is not None
        return self._sent(self.own_master.read(start, stop, self.weight.tensor[start:stop]), None)

    def _sent(self, works: list[Work], source: object) -> list[Work]:
        self.uploads += [(work, source) for work in works if not isinstance(work, DoneWork)]
        return works

    def wait_uploads(self) -> None:
        """Return when the weights that a step has sent here are here."""
        if not self.is_coming:
            return
        with self.flat.probe.waiting("host", self.key):
            self.step.wait()
            uploads, self.uploads = self.uploads, []
            for work, _ in uploads:
                with self._noting():
                    work.wait()
        self._unpublished = False
        self.flat.publish()

    def renew(self, store_of: Callable[[Tier], Store | None]) -> None:
        """Let what rests here on other tiers rest in memory of its own again, its contents
        undefined. Raises StorageError.
        """
        for state in dict.fromkeys((self.weight, self.master or self.weight)):
            store = None if state.away is None else store_of(state.away.tier)
            if store is not None:
                state.renew(store)

    def invalidate(self, *, frozen: bool) -> None:
        """Trained weights have been rewritten by a step, or they and `frozen` ones by a writeback
        or a load.
        """
        if self.flat.column is not None:
            self.flat.release_column()
        self.rewritten |= frozen
        if not frozen:
            self._overwritten.clear()

    def forget_overwritten(self) -> None:
        """Let go of the masters that edits have overwritten."""
        self._overwritten.clear()

    def close(self) -> None:
        """Give back the memory of weights and masters, which rest elsewhere now; the parameters
        have been pointed elsewhere.
        """
        self.user_view.leave_memory()
        self.flat.close()
        for state in (self.weight, self.master):
            if state is not None:
                state.release()
        if self.bucket is not None:
            self.bucket.accumulator.release_idle()

    def heal(self) -> None:
        """Make released parameters read as NaN again; what was on its way is lost."""
        self.rewritten = True
        self.user_view.heal()


def _fill(state: State, pieces: Sequence[Piece], values: Sequence[torch.Tensor]) -> None:
    """Write the `pieces` of `values` into a state at rest, a tile at a time where that is
    another tier.
    """
    if state.on_device:
        for piece in pieces:
            state.whole[piece.shard_start : piece.shard_stop].copy_(
                flatten(values[piece.index])[piece.start : piece.stop]
            )
        return
    for start, stop in tiles(0, state.numel, round_up(_TILE, state.align)):
        target = torch.zeros(stop - start, dtype=state.dtype)
        for piece in pieces:
            low, high = max(piece.shard_start, start), min(piece.shard_stop, stop)
            if low < high:
                first = piece.start - piece.shard_start
                target[low - start : high - start].copy_(
                    flatten(values[piece.index])[first + low : first + high]
                )
        for work in state.write(start, stop, target):
            getattr(work, "synchronize", work.wait)()
