"""Accelerators: the backend's own collectives, or the ordered exchange on request.

Equal shares go through one all-gather (in place: our slice of `out` is the input) and one
reduce-scatter. Shares that are unequal, or in another order than the ranks (columns), which those
do not take, go through one broadcast or one reduce per rank that owns something, and these are one
call where the backend groups them. With ``ordered=True`` a reduce is an all-to-all of slices and
the sum by the tree on arrival, which takes any shares as they are, costs the same bytes, and gives
the bits of every other transport; the native reduce sums in the backend's order and, for bf16 and
fp16, in the wire's dtype.

[Note: sums in fp16] Numbers that each rank can represent may add up to more than 65504. So a native
reduce of fp16 halves them k = ceil(log2 N) times before, and doubles the sum as often in fp32: it
overflows only where a rank's own number has, as where sums are formed in fp32, and every transport
skips the same steps. With 3 ranks, k = 2: 57344 on each is 3 x 14336 = 43008 on the wire, 172032
afterwards. Powers of two change no bit, but of numbers below 2^(k - 14), which lose up to k of
their last bits; those below 2^(k - 25) are lost. A loss scale that grows keeps above that.

What is gathered or broadcast travels as bytes: a backend has no type for all that PyTorch has
(NCCL none for int16, uint16 and complex numbers), and moves bits the same.

Invariant: every rank makes the same calls in the same order (the engine's identity check tells when
not). On accelerators a collective is one operation of the stream that is current when it starts
(``async_op=False``, as FSDP2 calls it): no stream of the backend's own, and no wait of the host,
which a timeout would make a poll of milliseconds. Small messages go over the control plane, beside
the device and its streams. A hang on the device is told by ``control.py``; on CPU backends, where
the host waits for collectives, it ends in StallError.

Cost per rank, N equal shares, buffer of B bytes: gather and reduce receive ``B (N-1)/N`` each; a
temporary slice per reduce, N of them when ordered, which one kernel sums where Triton is installed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, ReduceScatterOptions

from zeroshard.comm.cpu.control import PeerControl, StallWatch
from zeroshard.comm.groups import group_all_gather, group_reduce_scatter, has_timed_out, make_group
from zeroshard.comm.levels import PrivateWindow
from zeroshard.comm.ordered import sum_parts
from zeroshard.comm.transport import CommSpec, ReduceRequest, Work
from zeroshard.core.digest import Digest, holders
from zeroshard.core.layout import Range
from zeroshard.core.placement import Mesh
from zeroshard.errors import PeerLostError, StallError, StateError
from zeroshard.memory import Pool

_log = logging.getLogger(__name__)
_RESET = "engine.reset()"


@dataclass(frozen=True)
class _BufferCut:
    """The ranks' shares of a buffer; worked out once, since with many ranks it takes longer than a
    collective's start.
    """

    ranges: Sequence[Range]  # kept, so that no other cut takes its id
    is_equal: bool  # equal shares in the order of ranks, as the backend's own collectives take them
    numel: int  # of the other ranks' shares
    numel_between: int  # of those on other nodes


class _Cuts:
    """The cuts that one rank has met."""

    def __init__(self, rank: int, mesh: Mesh) -> None:
        self.others = [other for other in range(mesh.size) if other != rank]
        self.far = [other for other in self.others if not mesh.same_node(other, rank)]
        self.known: dict[int, _BufferCut] = {}  # by id of the ranges

    def of(self, ranges: Sequence[Range]) -> _BufferCut:
        """Return the cut into `ranges`."""
        if (known := self.known.get(id(ranges))) is not None:
            return known
        sizes = [stop - start for start, stop in ranges]
        cut = _BufferCut(
            ranges,
            len(set(sizes)) == 1 and list(ranges) == sorted(ranges),
            sum(sizes[rank] for rank in self.others),
            sum(sizes[rank] for rank in self.far),
        )
        if isinstance(ranges, tuple):  # a segment's; others are made for one call
            self.known[id(ranges)] = cut
        return cut


class NativeTransport:
    """A Transport over a process group's native collectives (NCCL; any backend that has them,
    for tests).
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        spec: CommSpec,
        control: PeerControl,
        reduce_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`reduce_group`: the same ranks, for reduces; None: `group` is for both."""
        self.control = control
        self.name = "nccl"
        self.rank = group.rank()
        self.size = group.size()
        self.one_sided = False
        self.keyed = False
        self.traffic = control.traffic
        self.ordered = bool(spec.ordered)
        self._group, self._reduce_group = group, reduce_group or group
        self._device = device
        # whether the host waits for collectives; else the current stream orders them
        self._async_op = host_waits(device)
        self.device_sum: Callable[[torch.Tensor], None] | None = None
        if not self._async_op:
            self.device_sum = self._add_up
        self._to_gather, self._to_sum = AllgatherOptions(), ReduceScatterOptions()
        self._to_gather.asyncOp = self._to_sum.asyncOp = self._async_op
        self._mesh = spec.mesh
        self._pool = Pool(spec.pool_bytes)
        self._temporaries = Pool(spec.pool_bytes)
        self._under_way: list[NativeWork] = []
        # given up, perhaps not over: a collective that has been started cannot be recalled
        self._left: list[NativeWork] = []
        self._num_started = 0  # collectives, on the group of now
        self._cuts = _Cuts(self.rank, spec.mesh)

    def window(
        self,
        key: str,
        ranges: Sequence[Range],
        dtype: torch.dtype,
        device: torch.device,
        *,
        replicated: bool,
    ) -> PrivateWindow:
        assert len(ranges) == self.size, (key, ranges, self.size)
        return PrivateWindow(self, key, ranges, dtype, device, replicated=replicated)

    def register(self, key: str) -> None: ...

    def all_gather(
        self, key: str, local: torch.Tensor, ranges: Sequence[Range], out: torch.Tensor
    ) -> Work:
        cut = self._cuts.known.get(id(ranges)) or self._cuts.of(ranges)
        itemsize = out.element_size()
        self.traffic.add(
            "all_gather", "nccl", cut.numel * itemsize, between=cut.numel_between * itemsize
        )
        works: list[Any] = []
        what, under_way = f"gather of {key}", self._under_way
        try:
            if not cut.is_equal:
                own = out[slice(*ranges[self.rank])]
                if own.data_ptr() != local.data_ptr():
                    own.copy_(local)
                works = self._each(self._group, self._send_share, out, ranges)
            elif out.numel():
                share, whole = local, out
                if out.dtype is not torch.uint8:
                    share, whole = local.view(torch.uint8), out.view(torch.uint8)
                work = group_all_gather(self._group, whole, share, self._to_gather)
                self._num_started += 1
                if self._async_op:
                    works = [work]
                elif work is not None:
                    work.wait()  # the current stream does, where the backend has not let it
        except RuntimeError as error:
            explain(error, what, self.control)
            raise
        return NativeWork(self.control, under_way, what, works, None, [local, out], is_gather=True)

    def grad_buffer(
        self, key: str, numel: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        for work in tuple(self._under_way):
            if work.is_gather:
                continue
            if self._pool.has_room(numel * dtype.itemsize):
                break
            work.wait()
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
        codec, dtype, ranges = request.codec, request.wire_dtype, request.wire_ranges
        exchanges = self.ordered or codec is not None  # codes cannot be summed by the backend
        assert exchanges or not request.sums, request
        numel = request.wire_numel
        start, stop = ranges[self.rank]
        data = self._pool.take(numel, dtype, out.device).zero_() if buffer is None else buffer
        assert data.dtype == dtype and data.numel() == numel, (request, data.dtype, data.numel())
        own = stop - start
        loan = self._temporaries.take(own * (self.size if exchanges else 1), dtype, out.device)
        # [Note: sums in fp16]
        halvings = 0 if exchanges or dtype is not torch.float16 else (self.size - 1).bit_length()
        works: list[Any] = []
        arrived, what = loan, f"reduce of {request.key}"
        if halvings:
            data.mul_(0.5**halvings)
        try:
            if exchanges:
                works = [self._all_to_all(data, arrived.view(self.size, own), ranges)]
            elif not (self._cuts.known.get(id(ranges)) or self._cuts.of(ranges)).is_equal:
                works = self._each(self._reduce_group, self._sum_share, data, ranges)
                arrived = data[start:stop]
            elif numel:
                work = group_reduce_scatter(self._reduce_group, loan, data, self._to_sum)
                self._num_started += 1
                works = self._to_wait_for(work)
        except RuntimeError as error:
            explain(error, what, self.control)
            raise
        num_bytes = own * dtype.itemsize
        self.traffic.add(
            "reduce_scatter",
            "nccl",
            num_bytes * len(self._cuts.others),
            between=num_bytes * len(self._cuts.far),
        )

        def finish() -> None:
            total = arrived.float().mul_(2.0**halvings) if halvings else arrived
            sum_parts(
                arrived.view(self.size, own) if exchanges else [total],
                out,
                codec=codec,
                node_size=self._mesh.node_size if self.ordered else None,
                accumulate=accumulate,
                sums=request.sums,
            )
            self._temporaries.give(loan)
            self._pool.give(data)

        alive = [data, arrived, out]
        return NativeWork(
            self.control, self._under_way, what, works, finish, alive, is_gather=False
        )

    def _to_wait_for(self, work: Any) -> list[Any]:
        """Return what the host waits for of a collective that has started; else let the current
        stream wait, where the backend has not done so.
        """
        if self._async_op or work is None:
            return [work]
        work.wait()
        return []

    def _all_to_all(
        self, data: torch.Tensor, arrived: torch.Tensor, ranges: Sequence[Range]
    ) -> Any:
        """Send each rank's slice to that rank; theirs of ours become the rows of `arrived`."""
        group, asynchronous = self._reduce_group, self._async_op
        if list(ranges) != sorted(ranges):
            slices = [data[start:stop] for start, stop in ranges]
            work = dist.all_to_all([*arrived], slices, group=group, async_op=asynchronous)
        else:
            sizes = [arrived.shape[1]] * self.size, [stop - start for start, stop in ranges]
            rows = arrived.view(-1)
            work = dist.all_to_all_single(rows, data, *sizes, group=group, async_op=asynchronous)
        self._num_started += 1
        return work

    def _add_up(self, tensor: torch.Tensor) -> None:
        try:
            dist.all_reduce(tensor, group=self._reduce_group)
            self._num_started += 1
        except RuntimeError as error:
            explain(error, "sum on the device", self.control)
            raise

    def _send_share(self, share: torch.Tensor, owner: int) -> Any:
        share = share.view(torch.uint8)
        group, asynchronous = self._group, self._async_op
        work = dist.broadcast(share, group=group, group_src=owner, async_op=asynchronous)
        self._num_started += 1
        return work

    def _sum_share(self, share: torch.Tensor, owner: int) -> Any:
        group, asynchronous = self._reduce_group, self._async_op
        work = dist.reduce(share, group=group, group_dst=owner, async_op=asynchronous)
        self._num_started += 1
        return work

    def _each(
        self,
        group: dist.ProcessGroup,
        start: Callable[[torch.Tensor, int], Any],
        data: torch.Tensor,
        ranges: Sequence[Range],
    ) -> list[Any]:
        """Start a collective in place for each rank's share of `data`: as one call, if the backend
        groups them.
        """
        owners = [rank for rank, (first, last) in enumerate(ranges) if last > first]
        backend = group._get_backend(self._device)
        if self._async_op or not (backend.supports_coalescing and owners):
            return [start(data[slice(*ranges[owner])], owner) for owner in owners]
        try:
            with dist.distributed_c10d._coalescing_manager(group, self._device):
                for owner in owners:
                    start(data[slice(*ranges[owner])], owner)
        except BaseException:
            # torch would let its group collect calls from here on, and start none
            if dist.distributed_c10d._world.pg_coalesce_state.pop(group, None) is not None:
                group._end_coalescing(self._device)
            raise
        return []  # the current stream orders them

    def begin_write(self) -> None:
        for work in [work for work in self._under_way if work.is_gather]:
            work.wait()

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        data = tensor.detach()
        flat = (
            data.contiguous() if data.device == self._device else data.to(self._device).contiguous()
        )
        work = self._send_share(flat.view(-1), source)
        what = f"broadcast from rank {source}"
        NativeWork(self.control, [], what, [work], None, [flat], is_gather=False).wait()
        if flat.data_ptr() != data.data_ptr():
            data.copy_(flat)
        if self.rank != source:
            num_bytes = flat.numel() * flat.element_size()
            self.traffic.add(
                "broadcast", "nccl", num_bytes, between=num_bytes * (source in self._cuts.far)
            )

    def watch(self, digest: Digest, is_idle: Callable[[], bool]) -> None:
        if self.control.notices is not None:  # there are peers
            watch = StallWatch(self.control, self.control.notices, digest, is_idle)
            self.control.attach(watch)

    progress = None

    def give_up(self) -> None:
        self._left += self._under_way
        self._under_way = []
        self.control.give_up()

    def abandon(self) -> None:
        """See Transport. Where some ranks have started a collective more than others, what follows
        would meet what was left: then the ranks of all groups beside this one connect anew.

        Raises StateError, on every rank, where the device waits for what was left and the backend
        cannot abort it.
        """
        self.give_up()
        self.control.abandon()
        ranks = dist.get_process_group_ranks(self._group)
        told = self.control.agree({}, _RESET, value=[self._num_started, ranks])
        started: dict[tuple[int, ...], list[int]] = {}  # by group: of its ranks
        for number, members in told:
            started.setdefault(tuple(members), []).append(number)
        unlike = [group for group, numbers in started.items() if len(set(numbers)) > 1]
        left, self._left = self._left, []
        if not unlike:
            # all ranks have started these: they end, and only then may their memory be released
            for work in left:
                work.end()
            for pool in (self._pool, self._temporaries):
                pool.take_back()
            return
        shown = holders([str(number) for number in started[unlike[0]]], unlike[0])
        said = f"{_RESET}: some ranks had started more collectives than others ({shown})"
        if not self._async_op:
            try:
                for group in {self._group, self._reduce_group}:
                    group._get_backend(self._device).abort()
            except (AttributeError, RuntimeError) as error:
                raise StateError(
                    f"{said}, which wait on the device for ever, and this backend cannot abort"
                    f" them ({str(error)[:80]}): start the job again from its last checkpoint"
                ) from error
        _log.warning(
            "%s: they connect anew. Collectives of the program's own on the group that shard() took"
            " fail from here on, or meet what was left there: make another group for them",
            said,
        )
        # connected by its first collective: other groups may have left something on the device
        exchange = partial(self.control.exchange, call=_RESET)
        backend = str(dist.get_backend_config(self._group))
        is_shared = self._reduce_group is self._group
        self._group, self._num_started = make_group(ranks, exchange, backend=backend), 0
        self._reduce_group = (
            self._group if is_shared else make_group(ranks, exchange, backend=backend)
        )
        self._pool.clear()
        self._temporaries.clear()

    def close(self) -> None:
        self.control.close()
        self._under_way, self._left = [], []
        self._pool.clear()
        self._temporaries.clear()


class NativeWork:
    """Collectives under way, None for those that the stream orders, and what remains to be done
    after them. It is in the list `under_way` until they have ended.
    """

    def __init__(
        self,
        control: PeerControl,
        under_way: list[NativeWork],
        what: str,
        works: list[Any],
        after: Callable[[], None] | None,
        alive: list[torch.Tensor],
        *,
        is_gather: bool,
    ) -> None:
        self.is_gather = is_gather
        self._control = control
        self._under_way = under_way
        under_way.append(self)
        self._what = what
        self._works = list(filter(None, works))
        self._after = after
        self._alive = alive  # the collectives' memory, until they are waited for
        self._is_finished = False

    def wait(self) -> None:
        """Do the rest after the collectives, on an accelerator on the stream that they are on: a
        flight waits where it has started them. Releases what they used.
        """
        if self._is_finished:
            return
        limit = _limit(0, self._control.stall_timeout_s)
        for work in self._works:
            try:
                work.wait(limit)
            except RuntimeError as error:
                explain(error, self._what, self._control)
                raise
        if self._after is not None:
            self._after()
        self._works, self._alive, self._after, self._is_finished = [], [], None, True
        if self in self._under_way:
            self._under_way.remove(self)

    def done(self) -> bool:
        return self._is_finished or all(work.is_completed() for work in self._works)

    def end(self) -> None:
        """Wait for the collectives alone, whatever they end by, and release what they used."""
        works, self._works, self._after = self._works, [], None
        for work in works:
            with suppress(RuntimeError):
                work.wait(_limit(0, self._control.stall_timeout_s))
        self.wait()


def host_waits(device: torch.device) -> bool:
    """Whether the host waits for collectives on `device`; else its streams order them."""
    return device.type == "cpu"


# a timedelta of days and seconds, made once
_limit = lru_cache(maxsize=16)(timedelta)

# of gloo ("Connection closed by peer", "Pair is not connected") and NCCL ("remote process exited or
# there was a network error", "communicator was aborted")
_LOST = re.compile("connect|socket|broken pipe|remote process|network|aborted", re.IGNORECASE)


def explain(error: RuntimeError, what: str, control: PeerControl) -> None:
    """Raise StallError or PeerLostError where `error` of the collective `what` is one of a limit of
    time or of a connection; else note `what` in it.
    """
    said = str(error)
    text = said.split("\n")[0].split("] ")[-1][:160]
    others = [peer for peer in range(control.size) if peer != control.rank]
    if has_timed_out(error):
        raise StallError(
            f"{what}: one of ranks {others} did not come within {control.stall_timeout_s:g} s"
            f" ({text}){control.explain_stall()}"
        ) from error
    if _LOST.search(said):
        raise PeerLostError(
            f"{what}: one of ranks {others} has ended or given up ({text})"
        ) from error
    error.add_note(f"in the {what}")
