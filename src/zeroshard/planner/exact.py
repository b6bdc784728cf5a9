"""Bytes at rest and on the wire, to the byte: those that ``engine.memory()`` and
``engine.traffic()`` report.

Every number comes from what the engine itself runs on: ``core/layout`` (padding and ranges),
``core/policy`` (cells) and ``core/route`` (hops). Here they are only added up. Units of the same
shapes are laid out once.

At rest means between the micro-batches of a step, where the gradient rests, too: the count of ZeRO
(arXiv 1910.02054, section 3.1 and figure 1). Fractions of a state and codecs are not planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from zeroshard.core.cost import LinkBytes
from zeroshard.core.layout import Layout
from zeroshard.core.placement import Cell, Mesh, Tier
from zeroshard.core.policy import Policy
from zeroshard.core.route import Route, Routes
from zeroshard.core.wire import Wire
from zeroshard.planner.model import GroupShape, ModelShape
from zeroshard.planner.training import Training

__all__ = ["LaidOut", "LaidOutGroup", "StateBytes", "rest_bytes", "step_routes", "traffic_bytes"]

StateBytes = dict[str, dict[Tier, int]]  # state -> tier -> bytes


@dataclass(frozen=True)
class LaidOutGroup:
    """A group of one unit in its flat buffer; `count` units have one of the same shapes."""

    group: GroupShape
    layout: Layout
    count: int
    unit: int  # number of the first such unit

    def held(self, cell: Cell, rank: int) -> int:
        """Return the elements of a state in `cell` that `rank` holds, padding included."""
        start, stop = self.layout.span(rank, self.layout.scope(cell))
        return stop - start

    def num_moments(self, cell: Cell, rank: int) -> int:
        """Return the elements that `rank`'s optimizer keeps moments of.

        On the device these are tensors of the optimizer's own, one per piece of a parameter and
        without padding (``engine.memory()`` counts none of a single element); elsewhere they are
        flat.
        """
        if cell.tier is not Tier.DEVICE:
            return self.held(cell, rank)
        pieces = self.layout.pieces_in(self.layout.span(rank, self.layout.scope(cell)))
        return sum(piece.numel for piece in pieces if piece.numel > 1)


@dataclass(frozen=True)
class LaidOut:
    """A model's units on a mesh."""

    model: ModelShape
    mesh: Mesh

    @cached_property
    def groups(self) -> tuple[LaidOutGroup, ...]:
        """The groups of all units, those of equal units once."""
        first: dict[object, tuple[int, int]] = {}  # shapes -> number of the first, how many
        for number, unit in enumerate(self.model.units):
            key = tuple(
                (tuple(shape for _, shape in group.shapes), group.dtype, group.trained)
                for group in unit.groups
            )
            at, count = first.get(key, (number, 0))
            first[key] = (at, count + 1)
        return tuple(
            LaidOutGroup(group, Layout.build(group.shapes, self.mesh), count, number)
            for number, count in first.values()
            for group in self.model.units[number].groups
        )

    def largest_unit_bytes(self, training: Training) -> int:
        """Return the bytes of the largest unit when it is gathered."""
        sizes: dict[int, int] = {}
        for one in self.groups:
            num_bytes = _bytes(one.layout.numel, training.formats(one.group.dtype).weight)
            sizes[one.unit] = sizes.get(one.unit, 0) + num_bytes
        return max(sizes.values(), default=0)


def rest_bytes(laid_out: LaidOut, policy: Policy, training: Training, rank: int = 0) -> StateBytes:
    """Return the bytes that rest on `rank` between micro-batches, by state and tier: "weight",
    "master" (where it is not the weight), "grad", "optimizer".
    """
    cells = policy.default
    states: StateBytes = {"weight": {}, "master": {}, "grad": {}, "optimizer": {}}

    def add(state: str, cell: Cell, num_bytes: int) -> None:
        if num_bytes:
            states[state][cell.tier] = states[state].get(cell.tier, 0) + num_bytes

    for one in laid_out.groups:
        formats, count = training.formats(one.group.dtype), one.count
        add("weight", cells.weight, count * _bytes(one.held(cells.weight, rank), formats.weight))
        if not one.group.trained:
            continue
        is_master = formats.weight == formats.master and cells.weight.tier is cells.optim.tier
        if not is_master:
            add("master", cells.optim, count * _bytes(one.held(cells.optim, rank), formats.master))
        add("grad", cells.grad, count * _bytes(one.held(cells.grad, rank), formats.grad))
        moments = one.num_moments(cells.optim, rank) * training.moment_bytes
        add("optimizer", cells.optim, count * moments)
    return states


def step_routes(
    laid_out: LaidOut, policy: Policy, training: Training
) -> Iterator[tuple[LaidOutGroup, Routes, Route]]:
    """Yield the routes of one step in order, group by group, each with all of its group's."""
    for one in laid_out.groups:
        routes = policy.routes(laid_out.mesh, training.formats(one.group.dtype))
        if one.group.trained:
            for route in routes.step(micro_batches=training.micro_batches, no_sync=True):
                yield one, routes, route
            continue
        for _ in range(training.micro_batches):
            yield one, routes, routes.unshard_forward
            yield one, routes, routes.unshard_backward


def traffic_bytes(laid_out: LaidOut, policy: Policy, training: Training) -> LinkBytes:
    """Return the payload that one rank receives per step, inside its node and from others."""
    steps = step_routes(laid_out, policy, training)
    return sum((route.bytes(one.layout.numel) * one.count for one, _, route in steps), LinkBytes())


def _bytes(numel: int, wire: Wire) -> int:
    return round(numel * wire.bytes_per_element)
