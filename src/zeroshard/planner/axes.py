"""The axes of a mesh beside the data parallel ones, as a plan takes them: ``zs.Axes``, and each
layout that it allows on a machine.

    rank = (pp * dp + data parallel rank) * tp + tensor parallel rank

so that tensor parallel ranks are next to each other, inside a node as far as they fit; data
parallel ranks come next, and stages of a pipeline lie farthest apart: the order of arXiv
2104.04473, section 3, and of torchtitan's mesh.

Invariant: of every layout, tp x pp x dp is the number of GPUs, tp divides heads and key-value
heads, and every stage has a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from zeroshard.core.pipeline_orders import PipelineOrder
from zeroshard.errors import ConfigError
from zeroshard.planner.cuts import is_assumed, layer_numbers
from zeroshard.planner.machine import Machine
from zeroshard.planner.model import ModelShape
from zeroshard.planner.training import Training

AUTO = "auto"
_UNEVEN = 1.25  # layers of the largest stage over their mean, up to which "auto" takes a depth


@dataclass(frozen=True)
class Axes:
    """How many ranks tensor and pipeline parallelism have, or "auto": every number that makes
    sense, and the fastest is taken. The other ranks are data parallel.

    `schedule` is that of the pipeline: "1f1b" (the default), "gpipe", "interleaved" (two stages on
    each rank; "interleaved:4": four) or "zb". Raises ConfigError for values that make no sense.
    """

    tp: int | str = 1
    pp: int | str = 1
    schedule: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tp), ("pp", self.pp)):
            if value != AUTO and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} is neither a number of ranks nor 'auto'")
        if self.schedule is not None and self.pp == 1:
            raise ConfigError(f"schedule={self.schedule!r} has no effect without a pipeline: give"
                              " pp")  # fmt: skip
        self.pipeline  # noqa: B018  raises

    @property
    def pipeline(self) -> PipelineOrder:
        """The schedule of a pipeline."""
        return PipelineOrder.parse(self.schedule or "1f1b")

    @property
    def is_auto(self) -> bool:
        """Whether any number is to be found."""
        return AUTO in (self.tp, self.pp)


@dataclass(frozen=True)
class Grid:
    """One grid of ranks: how many along each axis, its schedule, a pipeline's micro-batches."""

    tp: int
    pp: int
    dp: int
    schedule: PipelineOrder
    micro_batches: int

    @property
    def stages(self) -> int:
        """The stages of a pipeline."""
        return self.pp * self.schedule.chunks

    def share(self, machine: Machine) -> Machine:
        """Return the machine of the data parallel ranks of one stage and tensor parallel rank:
        their part of every node's memory, disk and bandwidth.
        """
        inside = gcd(self.dp, max(1, machine.node_size // self.tp))
        part = inside / machine.node_size
        speeds = machine.speeds
        return replace(
            machine,
            gpus=self.dp,
            node_size=inside,
            host_memory=int(machine.host_memory * part),
            disk=int(machine.disk * part),
            speeds=replace(speeds, host=speeds.host * part, disk=speeds.disk * part),
        )

    def tensor_nodes(self, machine: Machine) -> int:
        """Return over how many nodes tensor parallel ranks lie."""
        if machine.node_size % self.tp == 0:
            return 1
        return max(2, -(-self.tp // machine.node_size))

    def is_near(self, machine: Machine, rank: int) -> bool:
        """Whether all ranks of the pipeline's `rank` send to the next inside their node."""
        size, node = self.dp * self.tp, machine.node_size
        return all(
            (rank * size + one) // node == ((rank + 1) * size + one) // node
            for one in (0, size - 1)
        )


def grids(axes: Axes, model: ModelShape, machine: Machine, training: Training) -> tuple[Grid, ...]:
    """Return the grids of `machine` that `axes` allows.

    With "auto" a step has the tokens of ``training.micro_batches`` on every GPU in each of them:
    a pipeline of tp x pp GPUs runs tp x pp times as many. Raises ConfigError for numbers that do
    not fit the machine or the model.
    """
    _check(axes, model, machine)
    out = []
    for tp in _tensors(axes, model, machine) if axes.tp == AUTO else [axes.tp]:
        for pp in _depths(axes, model, machine.gpus // int(tp)) if axes.pp == AUTO else [axes.pp]:
            size = int(tp) * int(pp)
            if machine.gpus % size:
                continue
            more = size if axes.is_auto else 1
            schedule = axes.pipeline if int(pp) > 1 else PipelineOrder()
            one = Grid(
                int(tp), int(pp), machine.gpus // size, schedule, more * training.micro_batches
            )
            try:
                if one.pp > 1:
                    schedule.check(one.pp, one.micro_batches)
            except ConfigError:
                if not axes.is_auto:
                    raise
                continue
            out.append(one)
    return tuple(out)


def _check(axes: Axes, model: ModelShape, machine: Machine) -> None:
    """Raise ConfigError for a number that the machine or the model does not allow."""
    given = {name: size for name in ("tp", "pp") if isinstance(size := getattr(axes, name), int)}
    size = 1
    for number in given.values():
        size *= number
    named = " x ".join(f"{name}={number}" for name, number in given.items() if number > 1)
    if size > machine.gpus:
        raise ConfigError(f"{named} takes {size} GPUs: there are {machine.gpus}")
    if machine.gpus % size:
        raise ConfigError(f"{named} does not divide gpus={machine.gpus}: every data parallel rank"
                          f" takes {size}")  # fmt: skip
    _check_heads(model, given.get("tp", 1))
    stages, layers = given.get("pp", 1) * axes.pipeline.chunks, len(layer_numbers(model))
    if given.get("pp", 1) > 1 and stages > layers:
        raise ConfigError(
            f"pp={given['pp']} makes {stages} stages: {model.name} has {layers} layers, and every"
            " stage needs one"
        )


def _check_heads(model: ModelShape, tp: int) -> None:
    decoder = model.decoder
    if tp == 1:
        return
    if decoder is None:
        raise ConfigError(f"tp={tp} needs a decoder's sizes, which {model.name} does not tell: plan"
                          " a config.json, or --params")  # fmt: skip
    for what, heads in _heads(model):
        if heads % tp:
            raise ConfigError(f"tp={tp} does not divide the {heads} {what} of {model.name}")


def _heads(model: ModelShape) -> list[tuple[str, int]]:
    """Return what tensor parallelism has to divide: nothing of a model that is only assumed."""
    decoder = model.decoder
    if decoder is None or is_assumed(model):
        return []
    return [("attention heads", decoder.heads), ("key-value heads", decoder.kv_heads)]


def _tensors(axes: Axes, model: ModelShape, machine: Machine) -> Iterator[int]:
    """Yield the numbers of tensor parallel ranks that lie in one node and divide the heads."""
    for tp in range(1, machine.node_size + 1):
        fits = machine.node_size % tp == 0
        if tp == 1 or (model.decoder and fits and not any(h % tp for _, h in _heads(model))):
            yield tp


def _depths(axes: Axes, model: ModelShape, ranks: int) -> Iterator[int]:
    """Yield the depths of a pipeline of `ranks` whose stages are about as large as each other."""
    layers, chunks = len(layer_numbers(model)), axes.pipeline.chunks
    for pp in range(1, min(ranks, layers // chunks) + 1 if layers else 2):
        largest = -(-layers // (pp * chunks))
        if ranks % pp == 0 and (pp == 1 or largest * pp * chunks <= _UNEVEN * layers):
            yield pp
