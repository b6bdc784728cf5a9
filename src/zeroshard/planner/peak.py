"""The peak of a step: what rests, what the engine takes beside it, and activations, added up at
every event of the step, not maximum to maximum.

    each micro-batch, forward and backward     weights and optimizer states at rest, gradients that
                                               rest so far, the engine's buffers (playback.py) and
                                               activations (activation_trace.py)
    optimizer.step()                           weights and optimizer states at rest, the gradients
                                               of what a rank steps, and the optimizer's temporaries

Activations are those that were traced (modules/activations.py), or of a decoder's sizes in closed
form: arXiv 2205.05198, section 4.1, without dropout and with attention that keeps no s x s matrix.
On an accelerator, what no tensor counts is an allowance. Nothing has been fitted to a measurement.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zeroshard.core.placement import Tier
from zeroshard.core.policy import Policy
from zeroshard.core.schedule import STAGING_BYTES
from zeroshard.planner.activation_trace import ActivationTrace
from zeroshard.planner.closed_form import closed_form
from zeroshard.planner.exact import LaidOut, StateBytes, beside_bytes, sum_by_tier
from zeroshard.planner.held import TransportTraits
from zeroshard.planner.machine import Machine
from zeroshard.planner.model import ModelShape
from zeroshard.planner.playback import Instant, Playback
from zeroshard.planner.training import Training

FRAGMENTATION = 0.05  # of everything else on an accelerator
CONTEXT_BYTES = 1 << 30  # of the driver and the libraries, on an accelerator
_STEPS = 3  # after which pools have grown as far as they will
_TILE = STAGING_BYTES // 16  # elements that are stepped at a time on the host (optim/tiles.py)


@dataclass(frozen=True)
class Peak:
    """The most bytes of one rank during a step; `parts` are those of the device: "states",
    "gathered" (units), "gradients" (in flight), "staging", "activations", "logits", "allowance".
    """

    parts: dict[str, int]
    host: int
    disk: int

    @property
    def total(self) -> int:
        """The bytes of all parts: the peak of the device."""
        return sum(self.parts.values())

    @property
    def by_tier(self) -> dict[str, int]:
        """The bytes on "device", "host" and "disk"."""
        return {"device": self.total, "host": self.host, "disk": self.disk}


@dataclass(frozen=True)
class InFlight:
    """What a rank of a pipeline holds beside one micro-batch: activations of others between their
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
    """Return the most bytes of one rank during a step, those of the device by what they hold.

    `exchange` (default: what the machine takes) says how the ranks meet; `held`, what a pipeline
    holds beside one micro-batch.
    """
    trace = trace_of(laid_out.model, training)
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
    reduces = leaves is not None and not leaves.is_local  # each micro-batch
    for one in _instants(playback, trace, training, reduces=reduces):
        logits = one.moment.logits
        gathered = one.gathered if held is None else held.gathered
        buffers = gathered, one.gradients, one.staging
        found.append((states + one.resting, *buffers, one.moment.activations - logits, logits))
    temporaries = _optimizer_bytes(laid_out, policy, machine, training)
    on_host = _host_bytes(laid_out, policy, machine, training)
    if not machine.accelerator:  # the device is the host, and they need not come together
        temporaries, on_host = max(temporaries, on_host), 0
    buckets, arrivals = playback.pooled
    found.append((states + playback.resting, 0, buckets, arrivals + temporaries, 0, 0))

    names = ("states", "gathered", "gradients", "staging", "activations", "logits")
    parts = dict(zip(names, max(found, key=sum), strict=True))
    context = CONTEXT_BYTES if machine.accelerator else 0
    slack = FRAGMENTATION if machine.accelerator else 0.0
    parts["allowance"] = round(sum(parts.values()) * slack) + context
    return Peak(parts, resting[Tier.HOST] + on_host, resting[Tier.DISK])


def trace_of(model: ModelShape, training: Training) -> ActivationTrace:
    """Return the activations of one micro-batch: as traced, if that was with as much recomputing,
    else in closed form.
    """
    trace = model.trace
    if trace is None or (trace.checkpointing != training.checkpointing and model.decoder):
        return closed_form(model, training)
    return trace.scaled(training.tokens)


def _instants(
    playback: Playback, trace: ActivationTrace, training: Training, *, reduces: bool
) -> Iterator[Instant]:
    """Yield what the engine holds in three steps: the second gathers ahead, and both later ones
    find the pools as those before have left them. Of several micro-batches inside ``no_sync()`` one
    stands for all, which `reduces` its gradients or not.
    """
    syncs = (reduces, True) if training.micro_batches > 1 else (True,)
    pooled = (-1, -1)
    for step in range(_STEPS):
        if step > 1 and playback.pooled == pooled:
            return  # the next would be the same
        pooled = playback.pooled
        playback.drop_gradients()
        for sync in syncs:
            yield from playback.run(trace, sync=sync)
        playback.wait()


def _optimizer_bytes(
    laid_out: LaidOut, policy: Policy, machine: Machine, training: Training
) -> int:
    """Return what ``optimizer.step()`` takes on the device: gradients cast to the masters' dtype,
    all at once, and Adam's denominators: torch makes them of all parameters together on an
    accelerator (foreach), twice of one after another on the CPU.
    """
    cell, total, largest = policy.default.optim, 0, 0
    if cell.tier is not Tier.DEVICE:
        return 0
    adam = training.optimizer == "adam"
    for one in laid_out.groups:
        if not one.group.trained:
            continue
        pieces = [piece.numel for piece in one.pieces(cell, 0)]
        numel, largest = sum(pieces), max([largest, *pieces])
        casts = training.formats(one.group.dtype)
        total += one.count * numel * ((casts.grad != casts.master) + (adam and machine.accelerator))
    return 4 * total + (0 if machine.accelerator or not adam else 8 * largest)


def _host_bytes(laid_out: LaidOut, policy: Policy, machine: Machine, training: Training) -> int:
    """Return what the host needs for states that rest there, or pass it, beside them."""
    cells = policy.default
    tiers = [cell.tier for cell in (cells.weight, cells.grad, cells.optim)]
    if all(tier is Tier.DEVICE for tier in tiers):
        return 0
    if machine.accelerator or cells.optim.tier is not Tier.HOST:
        return STAGING_BYTES
    # a tile of what is stepped last, whose new moments are there twice in the first step; later
    # the denominators of one parameter, with the gradients of a tile in the dtype of the master
    trained = [one for one in laid_out.groups if one.group.trained]
    tiles = [min(_TILE, one.held(cells.optim, 0)) for one in trained]
    pieces = [min(_TILE, piece.numel) for one in trained for piece in one.pieces(cells.optim, 0)]
    last = [one for one in laid_out.by_unit[-1] if one.group.trained]
    first = sum(min(_TILE, one.held(cells.optim, 0)) for one in last)
    formats = training.formats(None)
    cast = 4 * max(tiles, default=0) if formats.grad != formats.master else 0
    adam = training.optimizer == "adam"
    return max(round(training.moment_bytes * first), cast + 8 * adam * max(pieces, default=0))
