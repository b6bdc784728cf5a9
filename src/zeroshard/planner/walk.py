"""A step, frame by frame: each command of the schedule, and what every rank holds after it.

The third reading of a replay (replay.py), beside bytes and jobs: `Walk` plays one optimizer step of
equal layers as `peak.Playback` does and writes a `Frame` for each command that the schedule
returns, and for what the executor does by itself (FORWARD, BACKWARD, REDUCE, ADD, AVERAGE, STEP,
PUBLISH, ZERO_GRAD). Commands that are equal and follow each other are one frame. Ranks that own
layers whole hold other bytes each: then there is a walk per rank. film.py draws them.

Invariant (tests/unit/planner/test_walk.py): the last frame of an event holds what the replay counts
after it; before zero_grad() the states at rest are those of ``exact.rest_bytes``. Not counted: the
optimizer's temporaries, staging between tiers, and what pools keep of buckets that are over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zeroshard.core.placement import Scope, Tier
from zeroshard.core.policy import Policy
from zeroshard.core.residency import UnitState
from zeroshard.core.route import Axis, Kind, Route
from zeroshard.core.schedule import RELEASES, Command, Op
from zeroshard.core.shares import WholeParameters
from zeroshard.errors import ConfigError
from zeroshard.planner.exact import LaidOut, rest_bytes, sum_by_tier
from zeroshard.planner.machine import Machine
from zeroshard.planner.model import Decoder, GroupShape, ModelShape, Training, UnitShape
from zeroshard.planner.peak import Playback, closed_form
from zeroshard.planner.replay import PlannedGroup, Reduced, TransportTraits

MOST = 8  # layers and ranks: more are too small in a picture
HIDDEN = 4096  # each layer is as large as one of a model with 7 billion parameters
_MERGED = set(Op.__members__)  # commands; what is computed has frames of its own
STATES = ("weights", "gradients", "optimizer", "activations")


@dataclass(frozen=True)
class LayerState:
    """One layer as every rank has it after a frame."""

    weights: str  # "part", "column", "coming", "whole"; of those that rest whole also "stale"
    buckets: int  # of gradients of this rank's batch, whole: of two micro-batches there may be two
    reducing: bool  # ... the reduce of one is under way
    waits: bool  # sums of micro-batches that no reduce has taken
    rests: bool  # there is memory for the part of the sum over all ranks that rests here
    summed: bool  # ... and that sum is in it
    averaged: bool  # ... and where every rank steps everything, the parts of the others
    activations: bool


@dataclass(frozen=True)
class Frame:
    """One command, and what a rank holds after it."""

    phase: str
    command: str
    units: tuple[int, ...]  # numbers of layers, from 0; none: of all
    text: str
    route: str
    over: str  # to whom every rank sends; "": nothing travels
    layers: tuple[LayerState, ...]
    held: Mapping[str, int]  # bytes on the device of a rank, by state (STATES)
    away: Mapping[str, int]  # bytes of a rank on "host" and "disk"

    @property
    def total(self) -> int:
        """The bytes on the device."""
        return sum(self.held.values())


def layers_of(count: int) -> ModelShape:
    """Return a model of so many equal layers."""
    shapes = (("weight", (12 * HIDDEN, HIDDEN)),)
    units = tuple(UnitShape(f"layers.{at}", (GroupShape(shapes),)) for at in range(count))
    decoder = Decoder(HIDDEN, count, 32, 32, HIDDEN // 32, 4 * HIDDEN, False, 0)
    return ModelShape(f"{count} layers", units, decoder)


class _WalkedReduces(Reduced):
    """Gradients on their way, and a frame where each leaves and is waited for."""

    def __init__(self, walk: Walk, exchange: TransportTraits) -> None:
        super().__init__(walk, exchange)
        self._walk = walk

    def end(self, key: tuple[int, int]) -> None:
        super().end(key)
        self._walk.add(Op.WAIT_REDUCE.name, key[0])

    def _hand_over(self, key: tuple[int, int], sync: bool) -> None:
        super()._hand_over(key, sync)
        self._walk.add_reduce(key[0])

    def state(self, unit: int) -> tuple[int, bool, bool, bool]:
        """Return the buckets of a unit, and whether it has one that is being reduced, sums that
        wait, and the sum of all ranks.
        """
        key = (unit, 0)
        flight = self._flights.get(key)
        reducing = flight is not None and not flight.arrived
        buckets = (key in self._open) + (flight is not None)
        return buckets, reducing, key in self._partial, key in self._rest


class Walk(Playback):
    """The frames of one step in one row; ``frames`` has those of a run that goes on, on a `rank`
    that owns layers whole where ranks have such `shares`. Elsewhere ranks are alike.
    """

    def __init__(
        self,
        policy: Policy,
        machine: Machine,
        training: Training,
        num_units: int,
        *,
        shares: Literal["whole"] | None = None,
        rank: int = 0,
    ) -> None:
        order = list(range(machine.gpus))  # in which the rank comes first
        order[0], order[rank] = order[rank], order[0]
        self.laid_out = LaidOut(
            layers_of(num_units),
            machine.mesh,
            shares=WholeParameters() if shares else None,
            order=tuple(order),
        )
        self.policy, self.training = policy, training
        exchange = TransportTraits.of(machine)
        super().__init__(self.laid_out, policy, training, exchange)
        self.reduced: _WalkedReduces = _WalkedReduces(self, exchange)
        self.frames: list[Frame] = []
        self.by_rank = [self.frames] * machine.gpus
        self._rest = rest_bytes(self.laid_out, policy, training)
        published = [one.index for one in self.schedule.units if one.traits.is_published]
        self._gathered = dict.fromkeys(published, 1)  # the step before has brought them together
        self._text, self._fresh, self._begins, self._reduce = "", True, 0, Route("")
        self._activations, self._active, self._handed_over = 0, set[int](), False
        self._summed, self._averaged = set[int](), False
        for _ in range(2):  # the first one shows the order
            self.frames.clear()
            self._step()

    @property
    def group(self) -> PlannedGroup:
        """The only group of the first unit; those of the others are equal."""
        return self.planned[0].groups[0]

    @property
    def owners(self) -> list[int]:
        """The rank that owns each layer; none where ranks own parts."""
        if self.laid_out.shares is None:
            return []
        layouts = [unit.groups[0].one.layout for unit in self.planned]
        return [layout.shares.index(layout.numel) for layout in layouts]

    @property
    def reduced_scope(self) -> Scope:
        """The part of a sum over all ranks that a reduce leaves on each."""
        hops = [hop for hop in self.group.routes.reduce if hop.axis is not None]
        cell = self.policy.default.optim
        return hops[-1].target.scope if hops else self.group.one.layout.scope(cell)

    # ------------------------------------------------------------------------------- the step

    def _step(self) -> None:
        count = self.training.micro_batches
        self._fresh = True
        for number in range(count):
            self._walk_micro_batch(number, f" of micro-batch {number + 1}" if count > 1 else "")
        self._text = "step"
        self._begins = len(self.frames)
        self.reduced.wait()
        if self.group.routes.average.hops:
            self._averaged = True
            self.add("AVERAGE")
        self._fresh = False
        self.add("STEP")
        self.run(self.schedule.publish())
        is_published = self.schedule.units[0].traits.is_published
        if not is_published and _over(self.group.routes.publish):
            self.add("PUBLISH")
        self.reduced.drop()
        self._averaged = False
        self._summed.clear()
        self.add("ZERO_GRAD")

    def _walk_micro_batch(self, number: int, which: str) -> None:
        training = self.training
        self._text = f"forward{which}"
        self._reduce = self.group.reduce(number, training.micro_batches)
        trace = closed_form(self.laid_out.model, training)
        self._begins = len(self.frames)
        for instant in self.play(trace, sync=number == training.micro_batches - 1):
            moment, unit = instant.moment, instant.moment.unit
            self._activations = moment.activations
            is_back = self._text.startswith("backward")
            if moment.event == "turn":
                self._text = f"backward{which}"
            elif moment.event == "gradient" or (moment.event == "gather" and not is_back):
                self._active.add(unit)
                self.add("BACKWARD" if is_back else "FORWARD", unit)
            elif moment.event == "release" and is_back:
                self._active.discard(unit)
            elif moment.event == "reduce" and not self._handed_over:
                self.add_reduce(unit)
            if len(self.frames) > self._begins:  # what the event has changed after its last command
                last = self.frames[-1]
                layers, held, away = self._layers(), self._held(), self._away()
                self.frames[-1] = replace(last, layers=layers, held=held, away=away)
            self._begins, self._handed_over = len(self.frames), False
        self._summed = {unit for unit in range(len(self.planned)) if self.reduced.state(unit)[3]}

    def add_reduce(self, unit: int) -> None:
        """Add the frame of a unit's gradients, which leave for their sums, or stay."""
        self._handed_over = True
        self.add("REDUCE" if _over(self._reduce) else "ADD", unit, self._reduce)

    def execute(self, command: Command, repeats: int) -> None:
        """Count the bytes of one command, and add its frame."""
        op, unit = command.op, command.unit
        routes = self.planned[unit].groups[0].routes
        is_published = self.schedule.units[unit].traits.is_published
        route = Route("")
        if op is Op.START:
            kept = routes.unshard_backward if unit in self._columns else routes.unshard_forward
            route = routes.regather if is_published else kept
        super().execute(command, repeats)
        if op is Op.WAIT_REDUCE or op is Op.USE or (op in RELEASES and is_published):
            return  # Reduced.end() adds a frame; a use is a forward's; stale weights go nowhere
        self.add(op.name, unit, route, moving=op in (Op.START, Op.WAIT))

    # ------------------------------------------------------------------------------- a frame

    def add(
        self,
        command: str,
        unit: int | None = None,
        route: Route | None = None,
        *,
        moving: bool = False,
    ) -> None:
        """Add the frame of `command`, which leaves the replay as it is now."""
        units = () if unit is None else (unit,)
        last = self.frames[-1] if self.frames else None
        follows = last is not None and (last.command, last.phase) == (command, self._text)
        if last is not None and follows and command in _MERGED:
            units = (*last.units, *units)
            self.frames.pop()
        if route is None:
            routes = self.group.routes
            route = {"AVERAGE": routes.average, "PUBLISH": routes.publish}.get(command, Route(""))
        layers = list(self._layers())
        if moving and unit is not None:  # the schedule moves its own state after the command
            now = "coming" if command == "START" else "whole"
            layers[unit] = replace(layers[unit], weights=now)
        elif command.startswith("RELEASE") and unit is not None:
            layers[unit] = replace(layers[unit], weights=self._at_rest(unit))
        self.frames.append(
            Frame(
                self._text,
                command,
                units,
                self._said(command, units, route),
                str(route),
                _over(route),
                tuple(layers),
                self._held(),
                self._away(),
            )
        )

    def _at_rest(self, unit: int) -> str:
        return "column" if self._columns.get(unit) else "part"

    def _layers(self) -> tuple[LayerState, ...]:
        out = []
        for unit in self.schedule.units:
            buckets, reducing, waits, rests = self.reduced.state(unit.index)
            weights = {
                UnitState.RESTING: self._at_rest(unit.index),
                UnitState.GATHERING: "coming",
                UnitState.FULL: "whole",
            }[unit.state]
            if not unit.traits.is_sharded and unit.state is not UnitState.GATHERING:
                is_stale = unit.traits.is_published and not self._fresh
                weights = "stale" if is_stale else "whole"
            summed = rests and (not reducing or unit.index in self._summed)
            active = unit.index in self._active
            state = (buckets, reducing, waits, rests, summed, summed and self._averaged, active)
            out.append(LayerState(weights, *state))
        return tuple(out)

    def _held(self) -> dict[str, int]:
        """Return the bytes on the device of a rank, by state."""
        gathered = sum(self.planned[unit].full for unit in self._gathered)
        buckets = self.meter.live - gathered
        rest = {name: tiers.get(Tier.DEVICE, 0) for name, tiers in self._rest.items()}
        return {
            "weights": rest["weight"] + gathered + sum(self._columns.values()),
            "gradients": buckets + self.reduced.resting,
            "optimizer": rest["master"] + rest["optimizer"],
            "activations": self._activations,
        }

    def _away(self) -> dict[str, int]:
        """Return the bytes of a rank that rest on other tiers."""
        states = {name: tiers for name, tiers in self._rest.items() if name != "grad"}
        by_tier = sum_by_tier(states.values())
        for tier, num_bytes in self._rest["grad"].items():
            if tier is not Tier.DEVICE:
                here = [self.reduced.state(unit) for unit in range(len(self.planned))]
                with_sums = sum(waits or rests for _, _, waits, rests in here)
                by_tier[tier] += num_bytes * with_sums // len(self.planned)
        away = {tier.value: size for tier, size in by_tier.items() if tier is not Tier.DEVICE}
        return {tier: size for tier, size in away.items() if size}

    # ------------------------------------------------------------------------------- in words

    def _said(self, command: str, units: Sequence[int], route: Route) -> str:
        """Return what `command` is, for somebody who sees it for the first time."""
        named = [str(unit + 1) for unit in units]
        if len(units) == len(self.planned) > 1 or not named:
            layers, its = "all layers", "their"
        else:
            layers = f"layer {named[0]}" if len(named) == 1 else f"layers {_and(named)}"
            its = "its" if len(named) == 1 else "their"
        world, cells = self.laid_out.mesh.size, self.policy.default
        if command == "START":
            read = next((hop for hop in route if hop.kind is Kind.READ), None)
            what = "its part" if world > 1 else layers
            reads = "" if read is None else f"Read {what} from the {read.source.tier.value}. "
            if not _over(route):
                return reads or f"All of {layers} is here: nothing has to travel."
            if self.owners:
                return f"Broadcast: rank {self.owners[units[0]]} sends {layers}, which it owns."
            whom, part = _over(route), f"part of {layers}"
            if self.schedule.units[units[0]].traits.is_published:
                part = "new weights"
            elif route.hops[0].source.scope is Scope.NODE_SHARD:
                part = f"column of {layers}"
            return f"{reads}All-gather: every rank sends its {part} to {whom}."
        if command == "WAIT":
            return f"The weights of {layers} are complete on every rank."
        if command == "REDUCE":
            inside = _over(route) == "the ranks of its node"
            nodes = "the ranks of each node" if inside else "the ranks"
            if self.owners:
                owner = self.owners[units[0]]
                return f"Reduce: all ranks send their gradients of {layers} to rank {owner}."
            kept = "its part of the sum"
            if cells.grad.tier is not Tier.DEVICE and not cells.grad.is_partial:
                kept += f", on the {cells.grad.tier.value}"
            return f"Reduce-scatter: {nodes} add up their gradients of {layers}; each keeps {kept}."
        if command == "STEP":
            owns = cells.optim.is_sharded and world > 1
            part, tier = "the part that it owns" if owns else "all weights", cells.optim.tier
            part = "the layers that it owns" if owns and self.owners else part
            beside = "" if tier is Tier.DEVICE else f", with states from the {tier.value}"
            return f"optimizer.step(): each rank updates {part}{beside}."
        spread = "Broadcasts" if self.owners else "All-gather"
        released = f"Release {layers}: each rank gives back what is not its own part."
        if world == 1:
            released = f"{layers.capitalize()}: done."
        elif self.owners:
            released = f"Release {layers}: all ranks but the owner give {its} weights back."
        elif units and self._columns.get(units[0]):
            released = f"Release {layers}: a node keeps {its} weights together, for the backward."
        return {
            "FORWARD": f"Forward of {layers}: each rank computes its own batch.",
            "BACKWARD": f"Backward of {layers}: each rank has gradients of its own batch alone.",
            "ADD": f"Gradients of {layers} are added up where they are. Nothing travels.",
            "AVERAGE": f"{spread}: every rank sends the sums that it has to {_over(route)}.",
            "PUBLISH": f"{spread}: every rank sends its new weights to {_over(route)}.",
            "ZERO_GRAD": "zero_grad(): the gradients are gone. The next step can begin.",
            "WAIT_REDUCE": f"The sums of {layers} are there: {its} buckets of gradients are free.",
            "IDLE": f"The weights of {layers} stay gathered: the backward needs them again.",
            "RESUME": f"The weights of {layers} are still here: no gather.",
            "ADVANCE": f"What was read of {layers} goes on to the other ranks.",
            "POLL_REDUCE": f"Are the sums of {layers} there? Nobody waits.",
        }.get(command, released)


def _and(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]])


def _over(route: Route) -> str:
    """Return to whom every rank sends in a route."""
    axes = {hop.axis for hop in route} - {None}
    if not axes:
        return ""
    if axes == {Axis.LOCAL}:
        return "the ranks of its node"
    return "the same rank of other nodes" if axes == {Axis.NODE} else "all others"


def walk(
    row: Policy,
    ranks: int,
    *,
    units: int = 4,
    micro_batches: int = 1,
    node_size: int | None = None,
    shares: Literal["whole"] | None = None,
) -> Walk:
    """Return the frames of a step of `units` layers on `ranks` GPUs, `node_size` to a node
    (default: all, and two nodes for a row that keeps states by node); with `shares` "whole" each
    layer belongs to one rank.

    Raises ConfigError for sizes that no picture has room for, and for what is not drawn.
    """
    for name, number in (("ranks", ranks), ("units", units)):
        if not 1 <= number <= MOST:
            raise ConfigError(f"{name}={number} is not from 1 to {MOST}: a picture has no room")
    if node_size is None:
        node_size = ranks // 2 if row.keeps_columns and ranks % 2 == 0 else ranks
    machine = Machine.of(gpus=ranks, node_size=node_size)
    cells = row.default
    tiers = {one.tier for one in (cells.weight, cells.grad, cells.optim)}
    if shares and (not cells.optim.is_sharded or machine.mesh.num_nodes > 1 or len(tiers) > 1):
        raise ConfigError(
            f"shares={shares!r} is drawn in zero1, zero2, zero3 and zero3-keep, on one node and"
            " without offload"
        )
    training = Training(micro_batches=micro_batches)
    one = Walk(row, machine, training, units, shares=shares)
    if shares:
        for at in range(1, ranks):
            one.by_rank[at] = Walk(row, machine, training, units, shares=shares, rank=at).frames
    return one
