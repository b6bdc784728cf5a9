"""The peak of a step: what rests, what the engine takes beside it, and activations, added up at
every event of the step, not maximum to maximum.

    each micro-batch, forward and backward     weights and optimizer states at rest, gradients that
                                               rest so far, the engine's buffers (`Playback`) and
                                               activations (model.py)
    optimizer.step()                           weights and optimizer states at rest, the gradients
                                               of what a rank steps, and the optimizer's temporaries

Activations are those that were traced (activations.py), or of a decoder's sizes in closed form:
arXiv 2205.05198, section 4.1, without dropout and with attention that keeps no s x s matrix.
On an accelerator, what no tensor counts is an allowance. Nothing has been fitted to a measurement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zeroshard.core.placement import Tier
from zeroshard.core.policy import Policy
from zeroshard.core.schedule import RELEASES, STAGING_BYTES, Command, Op
from zeroshard.planner.exact import (
    LaidOut,
    StateBytes,
    beside_bytes,
    sum_by_tier,
)
from zeroshard.planner.machine import Machine
from zeroshard.planner.model import (
    REMAINDER,
    ActivationTrace,
    Decoder,
    ModelShape,
    Moment,
    Training,
    UnitShape,
)
from zeroshard.planner.replay import CODEC_SCRATCH_BYTES, PlanReplay, Reduced, TransportTraits

# ----------------------------------------------------------------------------------------- playback
# The engine's own memory in a step, beyond what rests: its schedule (core/schedule), executed on
# bytes at the events of a pass (model.py).
#
#     gathered      units in use and ahead of use, within the budget; what a row keeps between
#                   forward and backward
#     gradients     the pool of buckets (comm/cpu/slots.py), which keeps its memory
#     staging       slices of other ranks on their way into a sum, and sums between two levels,
#                   which keep their memory, too; sums on their way to another tier
#     resting       gradients that rest on the device so far, with the sums of micro-batches that no
#                   reduce has taken
#
# Invariant: a reduce that was handed over with one unit has ended when the next one has been: CPU
# ranks look after their messages then, and an accelerator has two under way. What the engine counts
# (``engine.memory().peak``) is `metered`. Cost: microseconds per event. What it does not know: how
# long anything takes.


@dataclass(frozen=True)
class Instant:
    """An event of a pass, and the engine's memory from it to the next."""

    moment: Moment
    gathered: int
    gradients: int
    staging: int
    resting: int  # of gradients, sums that no reduce has taken among them, on the device


class Playback(PlanReplay):
    """The engine's memory over passes of one model in one row."""

    def __init__(
        self, laid_out: LaidOut, policy: Policy, training: Training, exchange: TransportTraits
    ) -> None:
        """Begin with an engine that holds no gradient, before its first pass."""
        super().__init__(laid_out, policy, training, exchange)
        is_coded = any(
            unit.encoded or any(group.is_encoded for group in unit.groups) for unit in self.planned
        )
        self.scratch = 0 if exchange.enqueues else CODEC_SCRATCH_BYTES * is_coded
        self.reduced = Reduced(self, exchange)
        self._gathered: dict[int, int] = {}  # unit -> equal units that it stands for
        self._columns: dict[int, int] = {}  # unit -> bytes kept of it for its backward
        self._decoding = 0  # bytes of the encoding of the unit that was needed last

    @property
    def metered(self) -> int:
        """The most bytes that the engine's own meter has counted: ``engine.memory().peak``."""
        return self.meter.most

    @property
    def pooled(self) -> tuple[int, int]:
        """The bytes that pools keep now: of buckets, and of what arrives."""
        return self.reduced.pool.num_bytes, self.reduced.arriving

    def play(self, trace: ActivationTrace, *, sync: bool) -> Iterator[Instant]:
        """Yield what is held at every event of a pass; `sync` False: inside ``no_sync()``."""
        reduced, units = self.reduced, self.planned
        self.begin("forward")
        for moment in trace.moments:
            unit = moment.unit
            self._decoding = reduced.passed = 0
            if moment.event == "gather":
                self.need(unit)
            elif moment.event == "release":
                self.release(unit, moment.repeats)
            elif moment.event == "gradient":
                reduced.take((unit, moment.group), sync=sync)
            elif moment.event == "reduce":
                reduced.reduce(unit, moment.repeats, sync=sync)
            else:
                self.begin("backward" if moment.event == "turn" else "forward")
            gathered = sum(units[one].full * count for one, count in self._gathered.items())
            gathered += sum(self._columns.values()) + self._decoding
            gathered += sum(units[one].encoded for one in self.schedule.ahead)
            buckets, arrivals = self.pooled
            yield Instant(
                moment,
                gathered,
                buckets + reduced.own,
                arrivals + reduced.passing + reduced.passed,
                reduced.resting,
            )

    def execute(self, command: Command, repeats: int) -> None:
        """Count the bytes of one command; a unit that is kept stands for `repeats`."""
        op, unit = command.op, command.unit
        if op is Op.START:
            self._gathered[unit] = 1
        elif op is Op.USE:
            self._decoding = self.planned[unit].encoded
        elif op in RELEASES:
            self.meter.folded -= self.planned[unit].full * (self._gathered.pop(unit) - 1)
            if op is Op.RELEASE_FOR_BACKWARD:
                self._columns[unit] = self.planned[unit].column * repeats
            elif op is Op.RELEASE_ALL:
                self._columns.pop(unit, None)
        elif op is Op.IDLE:
            self.meter.fold(self.planned[unit].full * (repeats - self._gathered[unit]))
            self._gathered[unit] = repeats
        elif op is Op.WAIT_REDUCE:
            self.reduced.end((unit, command.segment))


# --------------------------------------------------------------------------------------------- peak

FRAGMENTATION = 0.05  # of everything else on an accelerator
CONTEXT_BYTES = 1 << 30  # of the driver and the libraries, on an accelerator
_STEPS = 3  # after which pools have grown as far as they will
_TILE = STAGING_BYTES // 16  # elements that are stepped at a time on the host (optim/tiles.py)


@dataclass(frozen=True)
class Peak:
    """The most bytes of one rank during a step; `parts` divides the bytes on the device: "states",
    "gathered" (units), "gradients" (in flight), "staging", "activations", "logits", "allowance".
    """

    parts: dict[str, int]
    away: dict[str, int]  # by tier, all but the device's

    @property
    def total(self) -> int:
        """The bytes of all parts: the peak of the device."""
        return sum(self.parts.values())

    @property
    def by_tier(self) -> dict[str, int]:
        """The bytes on each tier."""
        return {"device": self.total, **self.away}


@dataclass(frozen=True)
class InFlight:
    """Memory of a rank of a pipeline beside one micro-batch: activations of others between their
    forward and their backward, and the gathered weights of stages.
    """

    activations: int
    gathered: int


def peak_bytes(
    laid_out: LaidOut,
    policy: Policy,
    machine: Machine,
    training: Training,
    rest: StateBytes,
    *,
    exchange: TransportTraits | None = None,
    held: InFlight | None = None,
) -> Peak:
    """Return the most bytes of one rank during a step, on the device by what they hold.

    `exchange` (default: what the machine takes) says how the ranks meet; `held`, what a pipeline
    holds beside one micro-batch.
    """
    # as traced, if that was with as much recomputing, else in closed form
    model, trace = laid_out.model, laid_out.model.trace
    if trace is None or (trace.checkpointing != training.checkpointing and model.decoder):
        trace = closed_form(model, training)
    else:
        trace = trace.scaled(training.tokens)
    if held is not None:
        trace = trace.above(held.activations)
    meets = TransportTraits.of(machine) if exchange is None else exchange
    playback = Playback(laid_out, policy, training, meets)
    resting = sum_by_tier(rest.values())
    at_rest = resting[Tier.DEVICE] - rest["grad"].get(Tier.DEVICE, 0)
    states = at_rest + trace.buffers + playback.scratch
    states += beside_bytes(laid_out, policy, training)

    found = [(states, 0, 0, 0, 0, 0)]
    leaves = training.deal(policy, laid_out.mesh)
    reduces = leaves is not None and not leaves.is_local  # each micro-batch is reduced
    # Of several micro-batches inside ``no_sync()`` one stands for all. The second step gathers
    # ahead, and both later ones find the pools as those before have left them.
    syncs = (reduces, True) if training.micro_batches > 1 else (True,)
    pooled = (-1, -1)
    for step in range(_STEPS):
        if step > 1 and playback.pooled == pooled:
            break  # the next would be the same
        pooled = playback.pooled
        playback.reduced.drop()  # zero_grad()
        for sync in syncs:
            for one in playback.play(trace, sync=sync):
                logits = one.moment.logits
                gathered = one.gathered if held is None else held.gathered
                buffers = gathered, one.gradients, one.staging
                others = one.moment.activations - logits
                found.append((states + one.resting, *buffers, others, logits))
        playback.reduced.wait()  # optimizer.step()
    temporaries = _optimizer_bytes(laid_out, policy, machine, training)
    on_host = _host_bytes(laid_out, policy, machine, training)
    if not machine.accelerator:  # the device is the host, and they need not come together
        temporaries, on_host = max(temporaries, on_host), 0
    buckets, arrivals = playback.pooled
    found.append((states + playback.reduced.resting, 0, buckets, arrivals + temporaries, 0, 0))

    names = ("states", "gathered", "gradients", "staging", "activations", "logits")
    parts = dict(zip(names, max(found, key=sum), strict=True))
    context = CONTEXT_BYTES if machine.accelerator else 0
    slack = FRAGMENTATION if machine.accelerator else 0.0
    parts["allowance"] = round(sum(parts.values()) * slack) + context
    resting[Tier.HOST] += on_host
    away = {tier.value: size for tier, size in resting.items() if tier is not Tier.DEVICE}
    return Peak(parts, away)


def _optimizer_bytes(
    laid_out: LaidOut, policy: Policy, machine: Machine, training: Training
) -> int:
    """Return what ``optimizer.step()`` takes on the device: gradients cast to the masters' dtype,
    all at once, and Adam's denominators: torch makes them of all parameters together on an
    accelerator (foreach), twice of one after another on the CPU. Muon makes an update in fp32, two
    in bf16, and three squares of one matrix after another. Masters that rest as remainders are
    there a tile at a time, and with them the rest.
    """
    cell, cast, total, largest, matrix, tile = policy.default.optim, 0, 0, 0, 0, 0
    if cell.tier is not Tier.DEVICE:
        return 0
    for one in laid_out.groups:
        if not one.group.trained:
            continue
        pieces, casts = one.pieces(cell, 0), training.formats(one.group.dtype)
        if training.decodes:
            adam = training.optimizer == "adam"
            numbers = (casts.master == REMAINDER) + (casts.grad.dtype != "fp32")
            numbers += adam and machine.accelerator
            each = 4 * numbers + training.moment_bytes * (training.moments != "fp32")
            most = max((piece.numel for piece in pieces), default=0)
            numel, piece_numel = min(_TILE, one.held(cell, 0)), min(_TILE, most)
            adams = 0 if machine.accelerator or not adam else 8 * piece_numel
            tile = max(tile, round(each) * numel + adams, 10 * numel)  # the last: to encode it
            continue
        cast += one.count * sum(piece.numel for piece in pieces) * (casts.grad != casts.master)
        for piece in pieces:
            if training.optimizer == "muon" and piece.name in one.group.matrices:
                side = min(one.layout.slots[piece.index].shape)
                matrix = max(matrix, 8 * piece.numel + 6 * side**2)
            elif training.optimizer in ("adam", "muon"):
                total += one.count * piece.numel
                largest = max(largest, piece.numel)
    own = 4 * cast + max(matrix, 4 * total if machine.accelerator else 8 * largest)
    return max(own, tile)


def _host_bytes(laid_out: LaidOut, policy: Policy, machine: Machine, training: Training) -> int:
    """Return what the host needs for states that rest there, or pass it, beside them."""
    cells = policy.default
    tiers = [cell.tier for cell in (cells.weight, cells.grad, cells.optim)]
    if all(tier is Tier.DEVICE for tier in tiers):
        return 0
    if machine.accelerator or cells.optim.tier in (Tier.DEVICE, Tier.DISK):
        return STAGING_BYTES
    # a tile of what is stepped last: its new moments are there twice in the first step; later the
    # denominators of one parameter, with the gradients of a tile in the dtype of the master
    trained = [one for one in laid_out.groups if one.group.trained]
    tiles = [min(_TILE, one.held(cells.optim, 0)) for one in trained]
    pieces = [min(_TILE, piece.numel) for one in trained for piece in one.pieces(cells.optim, 0)]
    last = [one for one in laid_out.by_unit[-1] if one.group.trained]
    first = sum(min(_TILE, one.held(cells.optim, 0)) for one in last)
    formats = training.formats(None)
    cast = 4 * max(tiles, default=0) if formats.grad != formats.master else 0
    adam = training.optimizer == "adam"
    return max(round(training.moment_bytes * first), cast + 8 * adam * max(pieces, default=0))


# ----------------------------------------------------------------------- activations in closed form
# arXiv 2205.05198, section 4.1, without dropout and with attention that keeps no s x s matrix. With
# `checkpointing` every layer keeps its input, and the one under way everything. Where only the
# parameters of a model are known, its trace has no activations.
#
# Cost: at most 9 layers are walked, whatever the model's depth: between the first and the last of
# them everything grows or shrinks evenly.

_SHOWN = 8  # equal layers that are walked one by one; those between them are taken as one


def layer_bytes(decoder: Decoder, training: Training) -> int:
    """Return the bytes that the forward of one layer leaves for its backward.

    Per token: the inputs of both norms, of the projections and of the MLP, q, k, v and the
    attention's output; of the MLP what goes into its activation and out of it, of a gated one both
    factors as well.
    """
    q, kv = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    attention = 3 * decoder.hidden + 2 * q + 2 * kv
    mlp = decoder.hidden + (4 if decoder.gated else 2) * decoder.ffn
    return (attention + mlp) * training.tokens * _itemsize(training)


def kept_bytes(decoder: Decoder | None, training: Training) -> int:
    """Return the bytes of one layer that stay between its forward and its backward."""
    if decoder is None:
        return 0
    if training.checkpointing:  # its input
        return decoder.hidden * training.tokens * _itemsize(training)
    return layer_bytes(decoder, training)


def logit_bytes(decoder: Decoder, training: Training) -> int:
    """Return the bytes of the logits in the compute dtype, in fp32, and of their gradient."""
    return decoder.vocab * training.tokens * (_itemsize(training) + 8)


def closed_form(model: ModelShape, training: Training) -> ActivationTrace:
    """Return the trace of a model that runs its units in order, the layers of its decoder as
    `layer_bytes` says. Without a decoder there are no activations in it.
    """
    decoder = model.decoder
    layer = 0 if decoder is None else layer_bytes(decoder, training)
    kept = kept_bytes(decoder, training)
    logits = 0 if decoder is None else logit_bytes(decoder, training)

    order = list(_in_order(model.units, 0 if decoder is None else decoder.layers))
    forward, held = [], 0
    for unit, repeats, is_layer in order:
        inside = held + (layer if is_layer else 0)
        forward.append(Moment("gather", unit, 0, inside, 0, repeats))
        held += kept * repeats if is_layer else 0
        forward.append(Moment("release", unit, 0, held, 0, repeats))
    turn = Moment("turn", activations=held + logits, logits=logits)
    backward = []
    for unit, repeats, is_layer in reversed(order):
        # the logits' gradient lives until the unit that made them is done
        loss = logits if unit == order[-1][0] else 0
        extra = layer - kept if is_layer else 0
        first, held = held + extra, held - (kept * repeats if is_layer else 0)
        last = held + (layer if is_layer else 0)
        backward.append(Moment("gather", unit, 0, first + loss, loss, repeats))
        for number, group in enumerate(model.units[unit].groups):
            if group.trained:
                backward.append(Moment("gradient", unit, number, first + loss, loss, repeats))
        backward.append(Moment("reduce", unit, 0, last, 0, repeats))
        backward.append(Moment("release", unit, 0, held, 0, repeats))
    moments = (*forward, turn, *backward, Moment("end"))
    return ActivationTrace(moments, training.tokens, training.checkpointing)


def _in_order(units: Sequence[UnitShape], layers: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the units that are walked: number, how many equal ones it stands for, and whether it
    is a layer.
    """
    shapes = [
        tuple(tuple(shape for _, shape in group.shapes) for group in unit.groups) for unit in units
    ]
    common, count = Counter(shapes).most_common(1)[0]
    run = [number for number, shape in enumerate(shapes) if shape == common]
    skipped = run[_SHOWN // 2 : -_SHOWN // 2] if len(run) > _SHOWN + 1 else []
    if run != list(range(run[0], run[0] + len(run))):
        skipped = []
    left_out = set(skipped[1:])
    for number in range(len(units)):
        if number not in left_out:
            is_layer = bool(layers) and (count != layers or shapes[number] == common)
            yield number, len(skipped) if skipped[:1] == [number] else 1, is_layer


def _itemsize(training: Training) -> int:
    return round(training.formats(None).weight.bytes_per_element)
