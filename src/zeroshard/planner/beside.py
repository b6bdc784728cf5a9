"""What travels beside the data parallel axes: activations of one micro-batch, along ``tp`` and
``pp``.

    tp   an all-reduce of tokens x hidden after each row-cut matrix: 2 a layer in the forward, 2 in
         the backward (arXiv 1909.08053, section 3), 2 more where the forward is recomputed; one
         after the embedding in the forward, one before the output layer in the backward. Sequence
         parallelism makes each a reduce-scatter and an all-gather, of the same bytes.
    pp   tokens x hidden to the next stage, and its gradient back

A rank of n receives (n - 1) / n of a reduce-scatter and as much of an all-gather, in n - 1 steps
each. Compute waits for all of ``tp``'s: the next matrix needs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from zeroshard.planner.machine import Machine
from zeroshard.planner.model import ModelShape
from zeroshard.planner.training import Training


def activation_bytes(model: ModelShape, training: Training) -> int:
    """Return the bytes of what one layer hands to the next of a micro-batch; 0: not known."""
    if model.decoder is None:
        return 0
    size = training.formats(None).weight.bytes_per_element
    return round(model.decoder.hidden * training.tokens * size)


def send_seconds(num_bytes: int, machine: Machine, *, is_near: bool) -> float:
    """Return how long a stage's output takes to the next stage."""
    speeds = machine.speeds
    rate = speeds.local if is_near else speeds.network
    latency = speeds.local_latency if is_near else speeds.network_latency
    return latency + num_bytes / (rate * speeds.bandwidth_efficiency)


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
