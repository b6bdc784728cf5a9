"""Peaks and times: a model with few constants, all of them here and in docs/planner.md.

    device peak = at rest + gathered weights and gradient buckets + weights kept for the backward
                  + activations + logits, and an allowance
    step        = max(compute, links, host link) + what is left of the transfers at both ends
                  + the optimizer's step

What is at rest and what travels is exact (exact.py); the rest is a closed form or an assumption.
Nothing here has been fitted to a measurement, and nothing is simulated: a lane is a number of bytes
over a bandwidth. Activations: arXiv 2205.05198, section 4.1, without dropout and with attention
that keeps no s x s matrix. FLOPs: 6 per parameter and token, and attention's, as arXiv 2204.02311,
appendix B, counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.core.cost import LinkBytes
from zeroshard.core.placement import Tier
from zeroshard.core.policy import Policy
from zeroshard.core.route import Hop
from zeroshard.planner.exact import LaidOut, StateBytes, step_routes
from zeroshard.planner.machine import Machine
from zeroshard.planner.training import Training

__all__ = ["StepTime", "activation_bytes", "logit_bytes", "peak_bytes", "step_time"]

COMPUTE_EFFICIENCY = 0.5  # of the peak FLOP/s
LINK_EFFICIENCY = 0.8  # of every bandwidth
LATENCY_S = 25e-6  # of one collective
FRAGMENTATION = 0.05  # of everything else on the device
CONTEXT_BYTES = 1 << 30  # of the driver and the libraries, on an accelerator
STAGING_BYTES = 64 << 20  # Offload.staging_bytes


def activation_bytes(laid_out: LaidOut, training: Training) -> int:
    """Return the bytes that one micro-batch's forward leaves for its backward, logits aside; 0
    where the model's sizes are not known.

    Per token and layer: the inputs of both norms, of the projections and of the MLP, q, k, v and
    the attention's output; of the MLP what goes into its activation and out of it, of a gated one
    both factors as well. With `checkpointing` each layer keeps its input, and one layer everything.
    """
    decoder = laid_out.model.decoder
    if decoder is None:
        return 0
    q, kv = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    attention = 3 * decoder.hidden + 2 * q + 2 * kv
    mlp = decoder.hidden + (4 if decoder.gated else 2) * decoder.ffn
    layer = (attention + mlp) * training.tokens * _itemsize(training)
    if not training.checkpointing:
        return layer * decoder.layers
    return layer + decoder.hidden * training.tokens * _itemsize(training) * decoder.layers


def logit_bytes(laid_out: LaidOut, training: Training) -> int:
    """Return the bytes of the logits in the compute dtype, in fp32, and of their gradient."""
    decoder = laid_out.model.decoder
    vocab = 0 if decoder is None else decoder.vocab
    return vocab * training.tokens * (_itemsize(training) + 8)


def peak_bytes(
    laid_out: LaidOut, policy: Policy, machine: Machine, training: Training, rest: StateBytes
) -> dict[Tier, int]:
    """Return the most bytes of one rank during a step, by tier."""
    cells = policy.default
    out = {tier: sum(by_tier.get(tier, 0) for by_tier in rest.values()) for tier in Tier}
    if any(cell.tier is not Tier.DEVICE for cell in (cells.weight, cells.grad, cells.optim)):
        out[Tier.HOST] += STAGING_BYTES

    # runtime/budget.py: the unit in use, the next one, one ahead, where the host runs ahead another
    buffers = (4 if machine.accelerator else 3) if cells.weight.is_sharded else 2
    held = [out[Tier.DEVICE], buffers * laid_out.largest_unit_bytes(training)]
    for one in laid_out.groups:  # a larger part of the weights, beside those at rest
        kept = one.held(cells.between, 0)
        if kept > one.held(cells.weight, 0):
            held.append(one.count * kept * _itemsize(training))
    held += [activation_bytes(laid_out, training), logit_bytes(laid_out, training)]
    context = CONTEXT_BYTES if machine.accelerator else 0
    out[Tier.DEVICE] = round(sum(held) * (1 + FRAGMENTATION)) + context
    return out


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by what takes them."""

    compute: float
    local: float  # links inside the node, with the latency of all collectives
    node: float  # links between nodes
    host_link: float  # between device and host, and disks behind it
    optimizer: float
    num_units: int

    @property
    def total(self) -> float:
        """The step: lanes run beside each other, but for the first and the last unit."""
        transfers = self.local + self.node, self.host_link
        lanes = max(self.compute, *transfers)
        return lanes + sum(transfers) / max(1, self.num_units) + self.optimizer

    @property
    def bound_by(self) -> str:
        """The part that takes longest."""
        parts = {
            "compute": self.compute,
            "links inside nodes": self.local,
            "links between nodes": self.node,
            "host link and disk": self.host_link,
            "optimizer step": self.optimizer,
        }
        return max(parts, key=lambda name: parts[name])


def step_time(laid_out: LaidOut, policy: Policy, machine: Machine, training: Training) -> StepTime:
    """Return what one step of `training.micro_batches` takes."""
    speeds, links, calls, away = machine.speeds, LinkBytes(), 0, dict.fromkeys(Tier, 0.0)
    for one, _, route in step_routes(laid_out, policy, training):
        links += route.bytes(one.layout.numel) * one.count
        calls += sum(one.count for hop in route if hop.axis is not None)
        for hop in route:
            away[_tier(hop)] += one.count * _moved(hop, one.layout.numel)
    host_link = (away[Tier.HOST] + away[Tier.DISK]) / speeds.host_link
    disk = away[Tier.DISK] * machine.node_size / speeds.disk
    flops = _flops(laid_out, training) * training.micro_batches
    return StepTime(
        compute=flops / (machine.flops(training.precision) * COMPUTE_EFFICIENCY),
        local=links.inside / (speeds.local * LINK_EFFICIENCY) + calls * LATENCY_S,
        node=links.between / (speeds.network * LINK_EFFICIENCY),
        host_link=max(host_link, disk) / LINK_EFFICIENCY,
        optimizer=_optimizer_s(laid_out, policy, machine, training),
        num_units=len(laid_out.model.units),
    )


def _optimizer_s(laid_out: LaidOut, policy: Policy, machine: Machine, training: Training) -> float:
    """Return how long the optimizer reads and writes masters and moments, and reads gradients."""
    cell, speeds = policy.default.optim, machine.speeds
    trained = [one for one in laid_out.groups if one.group.trained]
    stepped = sum(one.count * one.held(cell, 0) for one in trained)
    state = 2 * (4 + training.moment_bytes) * stepped
    grad = stepped * training.formats(None).grad.bytes_per_element
    if cell.tier is Tier.DEVICE:
        return (state + grad) / (speeds.memory * LINK_EFFICIENCY)
    here = (state + grad) * machine.node_size / (speeds.host * LINK_EFFICIENCY)
    if cell.tier is Tier.HOST:
        return here
    return max(here, state * machine.node_size / (speeds.disk * LINK_EFFICIENCY))


def _flops(laid_out: LaidOut, training: Training) -> float:
    """Return the FLOPs of one micro-batch on one GPU; recomputing is a third more."""
    model, decoder = laid_out.model, laid_out.model.decoder
    per_token = 6.0 * (model.numel if model.used_numel is None else model.used_numel)
    if decoder is not None:
        width = decoder.layers * decoder.heads * decoder.head_dim
        per_token += 12.0 * width * training.sequence
    return per_token * training.tokens * (4 / 3 if training.checkpointing else 1)


def _tier(hop: Hop) -> Tier:
    """Return the tier other than the device that a hop reads or writes, if any."""
    return hop.target.tier if hop.target.tier is not Tier.DEVICE else hop.source.tier


def _moved(hop: Hop, numel: int) -> float:
    moved = hop.tier_bytes(numel)
    return moved.read + moved.write


def _itemsize(training: Training) -> int:
    return round(training.formats(None).weight.bytes_per_element)
