"""Ranks, planned: data parallel ones alone, or a grid tp x pp x dp; bytes of the rank that takes
most, and the step.

Of a grid the data parallel part is planned as ever (exact.py, peak.py), on the parameters that one
rank along ``tp`` and one stage have (axes.py) and on their share of the machine. Of a pipeline the
first and the last rank are planned: the first has most layers, most micro-batches in flight and the
embedding, the last one the output layer and the logits; the one that takes more of the device is
shown. Without a pipeline the step is simulated unit by unit (simulate.py), with one stage by stage
(pipeline_time.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zeroshard.core.pipeline_orders import UNSHARD, PipelineOrder, most_in_flight
from zeroshard.core.placement import Mesh, Scope, Tier
from zeroshard.core.policy import Policy
from zeroshard.core.wire import LinkBytes
from zeroshard.planner.axes import Grid, cut_stages, cut_tensors
from zeroshard.planner.durations import (
    Durations,
    TensorParallel,
    activation_bytes,
    checkpoint_bytes,
)
from zeroshard.planner.exact import (
    LaidOut,
    StateBytes,
    made_once,
    rest_bytes,
    traffic_bytes,
    with_budget,
)
from zeroshard.planner.machine import Machine
from zeroshard.planner.model import ModelShape, Training
from zeroshard.planner.peak import InFlight, Peak, kept_bytes, peak_bytes
from zeroshard.planner.pipeline_time import (
    Pipeline,
    PipelineTime,
    StageWork,
    phases,
    placed_actions,
    room,
    stage_work,
)
from zeroshard.planner.simulate import StepTime, step_time


@dataclass(frozen=True)
class RankPlan:
    """The bytes of one rank of the pipeline in one row."""

    rank: int
    laid_out: LaidOut
    rest: StateBytes
    peak: Peak


class RanksPlan:
    """A model and a training on data parallel ranks alone."""

    def __init__(self, laid_out: LaidOut, machine: Machine, training: Training) -> None:
        self.laid_out = laid_out
        self.share = machine  # of the data parallel ranks
        self.training = training.on(laid_out.mesh.size)
        batches = self.training.micro_batches
        self.grid = Grid(1, 1, machine.gpus, PipelineOrder(), batches)

    def as_run(self, policy: Policy) -> Policy:
        """Return the row with whole gradients where a budget holds them."""
        return with_budget(self.laid_out, policy, self.training)

    def rests(self, policy: Policy) -> Iterator[StateBytes]:
        """Yield what rests on the ranks that are planned."""
        yield rest_bytes(self.laid_out, policy, self.training)

    def worst(self, policy: Policy) -> RankPlan:
        """Return the bytes of the rank that needs most of its device."""
        policy, training = self.as_run(policy), self.training
        rest = rest_bytes(self.laid_out, policy, training)
        peak = peak_bytes(self.laid_out, policy, self.share, training, rest)
        return RankPlan(0, self.laid_out, rest, peak)

    def traffic(self, rank: int, policy: Policy) -> LinkBytes:
        """Return what a rank receives in a step over the data parallel axes."""
        return traffic_bytes(self.laid_out, self.as_run(policy), self.training)

    def axis_bytes(self, rank: int, along_dp: LinkBytes) -> dict[str, int]:
        """Return what a rank receives in a step by axis: states `along_dp`, and activations along
        "tp" and "pp".
        """
        return {"dp": round(along_dp.total), "tp": 0, "pp": 0}

    def budget(self, policy: Policy) -> int:
        """Return the bytes that gathered stages may take together; 0 where none come and go."""
        return 0

    def saved_bytes(self) -> int:
        """Return the bytes of a checkpoint that all ranks write: every element once."""
        return checkpoint_bytes(self.laid_out, self.training)

    def step(self, policy: Policy) -> StepTime:
        """Return how long a step takes."""
        return step_time(self.laid_out, self.as_run(policy), self.share, self.training)


class GridPlan(RanksPlan):
    """A model and a training on one grid of a machine."""

    def __init__(
        self,
        grid: Grid,
        model: ModelShape,
        machine: Machine,
        training: Training,
        parts: dict[int, ModelShape] | None = None,
    ) -> None:
        """`parts`: the model by number of tensor parallel ranks, as far as it was cut before."""
        self.grid = grid
        self.model = model
        self.machine = machine
        self.share = grid.share(machine)
        self.training = replace(training, micro_batches=grid.micro_batches)
        known = {} if parts is None else parts
        if grid.tp not in known:
            known[grid.tp] = cut_tensors(model, grid.tp)
        self.stages = cut_stages(known[grid.tp], grid.stages)
        self._worked: dict[Policy, Sequence[StageWork]] = {}

    # ------------------------------------------------------------------------------ bytes

    @cached_property
    def ranks(self) -> dict[int, LaidOut]:
        """The first and the last rank of the pipeline; its stages together are one model."""
        out = {}
        for rank in dict.fromkeys((0, self.grid.pp - 1)):
            own = [self.stages[stage] for stage in self._own(rank)]
            model = own[-1]
            if len(own) > 1:
                decoder = model.decoder
                if decoder is not None:
                    layers = sum(one.decoder.layers for one in own if one.decoder)
                    decoder = replace(decoder, layers=layers)
                used = (
                    None if own[0].used_numel is None else sum(one.used_numel or 0 for one in own)
                )
                units = tuple(unit for one in own for unit in one.units)
                model = replace(own[0], units=units, decoder=decoder, used_numel=used)
            out[rank] = LaidOut(model, self.share.mesh, self.training.align)
        return out

    @cached_property
    def _laid_out(self) -> list[LaidOut]:
        """Every stage; those that are alike are one object."""
        mesh, align = self.share.mesh, self.training.align
        return made_once(self.stages, lambda stage: LaidOut(stage, mesh, align))

    def _own(self, rank: int) -> range:
        """The stages of a rank."""
        return range(rank, self.grid.stages, self.grid.pp)

    def as_run(self, policy: Policy) -> Policy:
        return policy

    def worst(self, policy: Policy) -> RankPlan:
        plans = []
        for rank, laid_out in self.ranks.items():
            rest = rest_bytes(laid_out, policy, self.training)
            held = self._in_flight(rank, policy) if self.grid.pp > 1 else None
            peak = peak_bytes(laid_out, policy, self.share, self.training, rest, held=held)
            plans.append(RankPlan(rank, laid_out, rest, peak))
        return max(plans, key=lambda one: one.peak.total)

    def rests(self, policy: Policy) -> Iterator[StateBytes]:
        for laid_out in self.ranks.values():
            yield rest_bytes(laid_out, policy, self.training)

    def _in_flight(self, rank: int, policy: Policy) -> InFlight:
        """Return what `rank` holds beside one micro-batch that goes through all of its stages."""
        kept = []
        for stage in self._own(rank):
            decoder = self.stages[stage].decoder
            layers = 0 if decoder is None else decoder.layers
            kept.append(layers * kept_bytes(decoder, self.training))
        grid = self.grid
        order = grid.schedule.order(rank, grid.pp, min(grid.micro_batches, 4 * grid.stages))
        most = most_in_flight(order, kept)
        if grid.schedule.name == "gpipe":
            most = sum(kept) * grid.micro_batches
        weight, gathered = policy.default.weight, 0
        if weight.scope is not Scope.FULL or weight.tier is not Tier.DEVICE:
            works = self._works(policy)
            own = sum(works[stage].gathered_bytes for stage in self._own(rank))
            gathered = min(own, room([work.gathered_bytes for work in works], grid.pp))
        return InFlight(max(0, most - sum(kept)), gathered)

    def budget(self, policy: Policy) -> int:
        if self.grid.pp == 1:
            return 0
        return room([work.whole_bytes for work in self._works(policy)], self.grid.pp)

    # ------------------------------------------------------------------------------ traffic

    def traffic(self, rank: int, policy: Policy) -> LinkBytes:
        if self.grid.pp == 1:
            return traffic_bytes(self._laid_out[0], policy, self.training)
        grid, sizes = self.grid, [work.whole_bytes for work in self._works(policy)]
        actions = placed_actions(grid.schedule, rank, grid.pp, grid.micro_batches, sizes)
        # how often each stage is gathered before forwards, and before backwards
        gathers = dict.fromkeys(self._own(rank), (0, 0))
        what_for = phases(actions)
        for at, action in enumerate(actions):
            if action.kind == UNSHARD:
                ahead, back = gathers[action.stage]
                is_ahead = what_for[at] == "forward"
                gathers[action.stage] = (ahead + is_ahead, back + (not is_ahead))
        total = LinkBytes()
        for stage in self._own(rank):
            laid_out = self._laid_out[stage]
            total = total + traffic_bytes(laid_out, policy, self.training, gathers[stage])
        return total

    def axis_bytes(self, rank: int, along_dp: LinkBytes) -> dict[str, int]:
        along_tp = along_pp = 0
        one = activation_bytes(self.stages[0], self.training)
        for stage in self._own(rank):
            along_tp += self._tensor(stage).step_bytes(self.stages[stage], self.training)
            arrivals = (stage > 0) + (stage < self.grid.stages - 1)
            along_pp += arrivals * one * self.grid.micro_batches
        return {
            "dp": round(along_dp.total),
            "tp": along_tp,
            "pp": along_pp if self.grid.pp > 1 else 0,
        }

    def saved_bytes(self) -> int:
        def of_stage(stage: ModelShape) -> int:
            laid_out = LaidOut(stage, Mesh(1, 1), self.training.align)
            return checkpoint_bytes(laid_out, self.training)

        return sum(made_once(cut_stages(self.model, self.grid.stages), of_stage))

    # ------------------------------------------------------------------------------ time

    def _tensor(self, stage: int) -> TensorParallel:
        nodes = self.grid.tensor_nodes(self.machine)
        return TensorParallel(self.grid.tp, nodes, stage == 0, stage == self.grid.stages - 1)

    @cached_property
    def _durations(self) -> list[Durations]:
        first: dict[int, Durations] = {}
        for stage, laid_out in enumerate(self._laid_out):
            made = Durations(laid_out, self.share, self.training, self._tensor(stage))
            first.setdefault(id(laid_out), made)
        return [first[id(laid_out)] for laid_out in self._laid_out]

    @cached_property
    def least_s(self) -> float:
        """Seconds that a step takes at least: computations and their order, or what gradients and
        weights take between nodes, once each way.
        """
        grid, m = self.grid, self.grid.micro_batches
        stages = made_once(self._durations, lambda one: one.compute_s() / m)
        ranks = [sum(stages[stage] for stage in self._own(rank)) for rank in range(grid.pp)]
        fill = (grid.pp - 1) * min(stages)
        computing = m * max(ranks) + (fill / 3 if grid.schedule.splits_backwards else fill)
        mesh, speeds = self.share.mesh, self.machine.speeds
        if mesh.num_nodes == 1:
            return computing
        size = self.training.formats(None).weight.bytes_per_element
        moved = 2 * size * self.ranks[0].model.numel / mesh.node_size
        part = (mesh.num_nodes - 1) / mesh.num_nodes
        return max(computing, part * moved / (speeds.network * speeds.bandwidth_efficiency))

    def _works(self, policy: Policy) -> Sequence[StageWork]:
        if policy not in self._worked:
            works = made_once(self._durations, lambda one: stage_work(one, policy))
            self._worked[policy] = works
        return self._worked[policy]

    def step(self, policy: Policy) -> StepTime:
        if self.grid.pp == 1:
            return step_time(self._laid_out[0], policy, self.share, self.training, self._tensor(0))
        return self.pipeline_time(policy)

    def pipeline_time(self, policy: Policy) -> PipelineTime:
        """Return how long a step of the pipeline takes, by rank."""
        grid, num_bytes = self.grid, activation_bytes(self.stages[0], self.training)
        sends, links, speeds = [], [], self.machine.speeds
        for stage in range(grid.stages - 1):
            rank = stage % grid.pp
            one_node = self.machine.gpus == self.machine.node_size
            is_near = one_node or (rank + 1 < grid.pp and grid.is_near(self.machine, rank))
            rate = speeds.local if is_near else speeds.network
            latency = speeds.local_latency if is_near else speeds.network_latency
            sends.append(latency + num_bytes / (rate * speeds.bandwidth_efficiency))
            links.append("local" if is_near else "network")
        works = self._works(policy)
        return Pipeline(grid.schedule, grid.pp, grid.micro_batches, works, sends, links).time()
