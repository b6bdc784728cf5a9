"""The duration of each part of a step on a machine, and its bound: a latency and a bandwidth for
each class of link. Every assumption is here and in docs/planner.md.

    collective    steps x latency + bytes / bandwidth, inside nodes and between them
    other tiers   latency + bytes / the slowest of host link, this rank's share of the host's
                  memory, and of the disk; a sum that comes to rest there is read once more, to know
                  whether it is finite (state/norms.py: RunningSum)
    compute       FLOPs / achieved FLOP/s: those counted in a traced pass, or, of a decoder, 2 per
                  parameter and token forward, 4 backward (2 for what is frozen), 2 once more where
                  recomputed, and attention's share
    casts, codecs, the optimizer's step on the device
                  bytes read and written / bandwidth of its memory

A ring over N ranks has N - 1 steps (NCCL's model, src/graph/tuning.cc). Bytes are the hops' own.
FLOPs of attention: arXiv 2204.02311, appendix B.

Where the device is the host itself, what moves inside a node is copied and added by the cores that
compute, and what comes from other nodes is copied by them out of and into sockets. Copies between
device and host are theirs as well (tier/store.py: Direct), and so is a part of every read and write
of the disk: the kernel's work, and the threads that wait for it. Weights that rest sharded on one
such node are read where they lie, in memory that all ranks map: their gather takes no time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from zeroshard.core.layout import Piece, Slot
from zeroshard.core.placement import Scope, Tier
from zeroshard.core.policy import Policy
from zeroshard.core.route import Axis, Hop, Kind, Lane
from zeroshard.core.shares import newton_schulz
from zeroshard.core.timeline import COMPUTE, LaneTask
from zeroshard.core.wire import Formats
from zeroshard.planner.exact import LaidOut, LaidOutGroup
from zeroshard.planner.machine import Machine
from zeroshard.planner.model import ModelShape, Training

# ---------------------------------------------------------------------- activations along tp and pp
#     tp   an all-reduce of tokens x hidden after each row-cut matrix: 2 a layer in the forward, 2
#          in the backward (arXiv 1909.08053, section 3), 2 more where the forward is recomputed;
#          one after the embedding in the forward, one before the output layer in the backward.
#          Sequence parallelism makes each a reduce-scatter and an all-gather, of the same bytes.
#     pp   tokens x hidden to the next stage, and its gradient back
#
# A rank of n receives (n - 1) / n of a reduce-scatter and as much of an all-gather, in n - 1 steps
# each. Compute waits for all of ``tp``'s: the next matrix needs it.


def activation_bytes(model: ModelShape, training: Training) -> int:
    """Return the bytes of what one layer hands to the next of a micro-batch; 0: not known."""
    if model.decoder is None:
        return 0
    size = training.formats(None).weight.bytes_per_element
    return round(model.decoder.hidden * training.tokens * size)


@dataclass(frozen=True)
class TensorParallel:
    """The ranks along ``tp`` of one stage, in one node or in several."""

    ranks: int
    nodes: int = 1
    is_first: bool = True  # the stage has the embedding
    is_last: bool = True  # ... and the output layer

    def all_reduces(self, layers: int, training: Training) -> tuple[int, int]:
        """Return how many a forward and a backward of `layers` layers have."""
        if self.ranks == 1:
            return 0, 0
        again = 2 * layers if training.checkpointing else 0
        return 2 * layers + self.is_first, 2 * layers + again + self.is_last

    def received(self, num_bytes: int) -> int:
        """Return the bytes that a rank receives in one all-reduce of `num_bytes`."""
        return round(2 * num_bytes * (self.ranks - 1) / self.ranks)

    def step_bytes(self, model: ModelShape, training: Training) -> int:
        """Return the bytes that a rank with the layers of `model` receives in a step."""
        layers = 0 if model.decoder is None else model.decoder.layers
        count = sum(self.all_reduces(layers, training)) * training.micro_batches
        return count * self.received(activation_bytes(model, training))

    def seconds(self, num_bytes: int, machine: Machine) -> float:
        """Return how long one all-reduce of `num_bytes` takes: a ring, through all nodes."""
        if self.ranks == 1:
            return 0.0
        speeds, between = machine.speeds, self.nodes - 1
        rate = speeds.network if between else speeds.local
        inside = self.ranks - self.nodes
        latency = 2 * (between * speeds.network_latency + inside * speeds.local_latency)
        moved = self.received(num_bytes)
        return latency + moved / (rate * speeds.bandwidth_efficiency)


ALONE = TensorParallel(1)


# ----------------------------------------------------------------------------------- a step's parts

STEP, TENSOR = "optimizer step", "tensor parallelism"
_LINKS = {"local": "links inside nodes", "network": "links between nodes"}
_LATENCY, _HOST_LINK, _HOST, _DISK = "latency of collectives", "host link", "host memory", "disk"
_CORES = "cores"  # the resource; an accelerator's compute shares none


@dataclass(frozen=True)
class Durations:
    """The durations of one model's parts, per rank."""

    laid_out: LaidOut
    machine: Machine
    training: Training
    tensor: TensorParallel = ALONE

    # ------------------------------------------------------------------------------ compute

    @cached_property
    def _flops(self) -> float:
        """Achieved FLOP/s."""
        return self.machine.flops(self.training.precision) * self.machine.speeds.compute_efficiency

    @cached_property
    def _attention(self) -> tuple[float, ...]:
        """Attention's FLOPs of one forward, by unit."""
        decoder = self.laid_out.model.decoder
        if decoder is None:
            return (0.0,) * len(self.laid_out.model.units)
        width = decoder.layers * decoder.heads * decoder.head_dim
        flops = 4.0 * width * self.training.sequence * self.training.tokens
        return tuple(flops * part for part in self._layers)

    @cached_property
    def _layers(self) -> tuple[float, ...]:
        """Each unit's part of the layers: units of repeated shapes have one, by their size."""
        units = self.laid_out.model.units
        counts = Counter(self.laid_out.alike)
        least = min(2, max(counts.values()))
        sizes = [
            unit.numel if counts[kind] >= least else 0
            for unit, kind in zip(units, self.laid_out.alike, strict=True)
        ]
        return tuple(size / sum(sizes) for size in sizes)

    @cached_property
    def _all_reduces(self) -> tuple[tuple[float, float], ...]:
        """Seconds of each unit's all-reduces along ``tp``, in its forward and its backward."""
        model, tensor = self.laid_out.model, self.tensor
        if tensor.ranks == 1 or model.decoder is None:
            return ((0.0, 0.0),) * len(model.units)
        one = tensor.seconds(activation_bytes(model, self.training), self.machine)
        forward, backward = tensor.all_reduces(model.decoder.layers, self.training)
        ahead, back = forward - tensor.is_first, backward - tensor.is_last
        out = [(one * ahead * part, one * back * part) for part in self._layers]
        out[0] = (out[0][0] + one * tensor.is_first, out[0][1])
        out[-1] = (out[-1][0], out[-1][1] + one * tensor.is_last)
        return tuple(out)

    @cached_property
    def _used(self) -> float:
        """The part of the parameters that one token uses."""
        model = self.laid_out.model
        return 1.0 if model.used_numel is None else model.used_numel / model.numel

    def compute(self, unit: int) -> tuple[LaneTask, LaneTask]:
        """Return the forward and the backward of `unit`; without seconds where the model's FLOPs
        are not known (``ModelShape.is_timed``).
        """
        model, tokens = self.laid_out.model, self.training.tokens
        forward, backward = model.counted(unit)
        if model.tokenwise:  # each token meets every parameter; what is looked up is not multiplied
            groups = model.units[unit].groups
            numel = sum(group.numel - group.looked_up for group in groups) * self._used
            attention = self._attention[unit]
            forward = 2.0 * numel * tokens + attention
            backward = 2.0 * (numel + self._trained(unit)) * tokens + 2 * attention
            backward += forward if self.training.checkpointing else 0.0

        def task(name: str, flops: float, waits: float) -> LaneTask:
            return LaneTask("compute", name, flops / self._flops + waits, takes=self.cores)

        ahead, back = self._all_reduces[unit]
        return task("forward", forward, ahead), task("backward", backward, back)

    def _trained(self, unit: int) -> float:
        """Return the trained elements of `unit` that a token is multiplied by."""
        groups = self.laid_out.model.units[unit].groups
        return sum(g.numel - g.looked_up for g in groups if g.trained) * self._used

    def weights_s(self, unit: int) -> float:
        """Return the seconds of the part of a backward of `unit` that brings its weights'
        gradients, which zero-bubble schedules run by itself.
        """
        if not self.laid_out.model.tokenwise:  # nothing that was counted is cut into stages
            return 0.0
        return 2.0 * self._trained(unit) * self.training.tokens / self._flops

    def tensor_s(self) -> float:
        """Return the seconds of a step's all-reduces along ``tp``, which are part of `compute`."""
        return self.training.micro_batches * sum(map(sum, self._all_reduces))

    def compute_s(self) -> float:
        """Return the seconds of all forwards and backwards of a step."""
        counts = Counter(self.laid_out.alike)
        return self.training.micro_batches * sum(
            count * task.duration for kind, count in counts.items() for task in self.compute(kind)
        )

    # ------------------------------------------------------------------------------ hops

    @property
    def cores(self) -> tuple[str, ...]:
        """The resource that everything takes that the device's own cores do, where it is the host:
        compute on an accelerator shares none.
        """
        return () if self.machine.accelerator else (_CORES,)

    def hop(self, hop: Hop, numel: int, *, mapped: bool) -> Iterator[LaneTask]:
        """Yield what a hop of a buffer of `numel` elements is: a task, and a copy of what has come
        from other nodes where the device is the host. `mapped`: a gather moves nothing.
        """
        if mapped and hop.kind is Kind.ALL_GATHER:
            yield LaneTask(hop.lane, hop.kind.value, 0.0, hop.link_bytes(numel).total)
        elif hop.axis is not None:
            yield from self._collective(hop, numel)
        elif hop.lane == "host":
            held, moved = hop.held_bytes(hop.target, numel), hop.tier_bytes(numel)
            # an addition reads two and writes one, and what is added up is read once more
            yield self.on_host(hop.kind.value, 4 * held, moved.read + moved.write)
        elif hop.kind in (Kind.READ, Kind.WRITE):
            moved = hop.tier_bytes(numel)
            disk = Tier.DISK in (hop.source.tier, hop.target.tier)
            yield from self.transfer(hop.lane, hop.kind.value, moved.read + moved.write, disk=disk)
        else:
            elements = hop.held_bytes(hop.target, numel) / hop.wire.bytes_per_element
            num_bytes = elements * (4 + hop.wire.bytes_per_element)  # from or to fp32, at most
            yield self.in_memory(hop.lane, hop.kind.value, num_bytes)

    def in_memory(
        self, lane: Lane, name: str, num_bytes: float, bound_by: str = COMPUTE
    ) -> LaneTask:
        """Return the task of reading and writing `num_bytes` of the device's memory."""
        speeds = self.machine.speeds
        seconds = num_bytes / (speeds.memory * speeds.bandwidth_efficiency)
        return LaneTask(lane, name, seconds, takes=self.cores, bound_by=bound_by)

    def _collective(self, hop: Hop, numel: int) -> Iterator[LaneTask]:
        speeds, mesh, moved = self.machine.speeds, hop.mesh, hop.link_bytes(numel)
        local, nodes = mesh.node_size - 1, mesh.num_nodes - 1
        latency = {
            Axis.LOCAL: local * speeds.local_latency,
            Axis.NODE: nodes * speeds.network_latency,
            # one ring through all nodes
            Axis.FLAT: mesh.num_nodes * local * speeds.local_latency
            + nodes * speeds.network_latency,
        }[hop.axis or Axis.FLAT]
        times = {
            "local": moved.inside / (speeds.local * speeds.bandwidth_efficiency),
            "network": moved.between / (speeds.network * speeds.bandwidth_efficiency),
        }
        slowest = max(times, key=lambda link: times[link])
        bound_by = _LATENCY if latency > times[slowest] else _LINKS[slowest]
        takes = tuple(link for link in times if times[link] > 0)
        if moved.inside:
            takes += self.cores
        seconds = latency + times[slowest]
        yield LaneTask(hop.lane, hop.kind.value, seconds, moved.total, takes, bound_by)
        if moved.between and self.cores:  # out of one socket, and into another
            yield self.in_memory(hop.lane, "copy", 4 * moved.between)

    def transfer(
        self, lane: Lane, name: str, num_bytes: float, *, disk: bool
    ) -> tuple[LaneTask, ...]:
        """Return a copy of `num_bytes` between this rank's device, the host and the disk; of the
        disk, where the device is the host, the cores' part of it by itself.
        """
        speeds, ranks = self.machine.speeds, self.machine.node_size
        times = {
            _HOST_LINK: num_bytes / speeds.host_link,
            _HOST: num_bytes * ranks / speeds.host,
            _DISK: num_bytes * ranks / speeds.disk if disk else 0.0,
        }
        slowest = max(times, key=lambda link: times[link])
        latency = speeds.disk_latency if disk else speeds.host_latency
        seconds = latency + times[slowest] / speeds.bandwidth_efficiency
        if not disk:
            return (LaneTask(lane, name, seconds, num_bytes, self.cores, slowest),)
        worked = min(num_bytes * speeds.disk_core_s, seconds) if self.cores else 0.0
        moved = LaneTask(lane, name, seconds - worked, num_bytes, ("disk",), slowest)
        work = LaneTask(lane, "copy", worked, takes=self.cores, bound_by=_DISK)
        return (moved, work) if worked else (moved,)

    def arrive(self, hop: Hop, numel: int) -> LaneTask:
        """Return the pass over a sum that `hop` has written to another tier."""
        return self.in_memory(hop.lane, "sum", hop.held_bytes(hop.target, numel))

    def on_host(self, name: str, num_bytes: float, on_disk: float = 0.0) -> LaneTask:
        """Return the task of the host's cores that read and write `num_bytes` of its memory, and
        `on_disk` of the disk.
        """
        speeds, ranks = self.machine.speeds, self.machine.node_size
        here, there = num_bytes * ranks / speeds.host, on_disk * ranks / speeds.disk
        bound_by = _DISK if there > here else STEP if name == "step" else _HOST
        takes = (*self.cores, *(("disk",) if on_disk else ()))
        seconds = max(here, there) / speeds.bandwidth_efficiency
        return LaneTask("host", name, seconds, on_disk, takes, bound_by)

    # ------------------------------------------------------------------------------ gradients, step

    def newton_schulz(self, policy: Policy) -> float:
        """Return the seconds in which Muon orthogonalizes the matrices that this rank steps, in
        bf16 and five iterations.
        """
        flops = 0.0
        for one in self.laid_out.groups if self.training.optimizer == "muon" else ():
            for piece in one.pieces(policy.default.optim, 0) if one.group.trained else ():
                if piece.name in one.group.matrices:
                    slot = one.layout.slots[piece.index]
                    part = piece.numel / slot.numel
                    flops += one.count * part * 5 * 2.0 * newton_schulz(slot.shape)
        return flops / (self.machine.flops("bf16") * self.machine.speeds.compute_efficiency)

    def grad_copy(self, numel: int, formats: Formats) -> LaneTask:
        """Return the copy of gradients into the buffer that is reduced."""
        sizes = formats.weight.bytes_per_element + formats.reduce.plain.bytes_per_element
        return self.in_memory("compute", "copy", numel * sizes)


# ------------------------------------------------------------------------------------- a checkpoint
# Every element is saved once, and the bytes are exact: of trained parameters the fp32 master and
# the optimizer's state, of frozen ones the weight, decoded (checkpoint/rank_part.py). Padding is
# not. Random generators (some kilobytes per rank), buffers, schedulers and the files' headers come
# on top.
#
# Times are a model; where a machine has no disk, times of files are None.
#
#     save        what rests on the device over the host link, then all of it to the node's disks
#                 (what rests on disk is read there first)
#     background  the copy alone: over the host link, or in the host's memory; where a state rests
#                 on disk, all of the save (checkpoint/save.py: Saver)
#     load        all that a rank holds from the node's disks (what rests on disk twice, and written
#                 back), then what rests on the device over the host link

_MASTER_BYTES = 4


@dataclass(frozen=True)
class CheckpointTimes:
    """Seconds that one checkpoint takes; None: not known, on a machine without a disk."""

    load: float | None  # zs.load
    save: float | None  # zs.save
    background: float | None  # for which zs.Saver holds training up


def checkpoint_bytes(laid_out: LaidOut, training: Training, rank: int | None = None) -> int:
    """Return the bytes of parameters and optimizer state that all ranks write, or `rank` does."""
    total = 0
    for one in laid_out.groups:
        layout = one.layout
        parts = layout.slots if rank is None else layout.pieces(rank)
        total += one.count * sum(_saved_bytes(one, part, training) for part in parts)
    return total


def checkpoint_times(
    laid_out: LaidOut, policy: Policy, machine: Machine, training: Training
) -> CheckpointTimes:
    """Return how long rank 0 takes; its node's other ranks do as much at the same time."""
    speeds, cells, ranks = machine.speeds, policy.default, machine.node_size
    part = speeds.bandwidth_efficiency
    link, memory = speeds.host_link * part, speeds.host * part / ranks
    saved, held = checkpoint_bytes(laid_out, training, 0), 0
    # rank 0 reads masters and moments that it steps, and its share of frozen weights, or all of
    # those that every rank keeps (runtime/rest.py)
    for one in laid_out.groups:
        scope = one.layout.scope(cells.optim)
        if not one.group.trained and (scope, cells.weight.scope) != (Scope.FULL, Scope.FULL):
            scope = Scope.SHARD
        pieces = one.layout.pieces_in(one.layout.span(0, scope))
        held += one.count * sum(_saved_bytes(one, piece, training) for piece in pieces)
    away = 0.0 if cells.optim.tier is Tier.DEVICE else training.fraction
    on_disk = away if cells.optim.tier is Tier.DISK else 0.0
    copied = saved * (1.0 - away) / link
    uses_disk = Tier.DISK in (cells.weight.tier, cells.grad.tier, cells.optim.tier)
    behind = None if uses_disk else copied + 2.0 * saved * away / memory
    if not machine.disk:
        return CheckpointTimes(None, None, behind)
    disks = speeds.disk * part / ranks
    save = copied + saved * (1.0 + on_disk) / disks
    load = held * (1.0 + 2.0 * on_disk) / disks + held * (1.0 - away) / link
    return CheckpointTimes(load, save, save if behind is None else behind)


def _saved_bytes(one: LaidOutGroup, part: Slot | Piece, training: Training) -> int:
    if one.group.trained:
        states = training.state_bytes(part.numel, is_matrix=part.name in one.group.matrices)
        return _MASTER_BYTES * part.numel + states
    return round(part.numel * training.formats(one.group.dtype).weight.bytes_per_element)
