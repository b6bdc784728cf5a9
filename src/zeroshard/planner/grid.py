"""One grid of ranks, tp x pp x dp, planned: bytes of the rank that takes most, and the step.

The data parallel part is planned as ever (exact.py, peak.py), on the parameters that one rank along
``tp`` and one stage have (axes.py) and on their share of the machine. Of a pipeline the first and
the last rank are planned: the first has most layers, most micro-batches in flight and the
embedding, the last one the output layer and the logits; the one that takes more of the device is
shown. Without a pipeline the step is simulated unit by unit (simulate.py), with one stage by stage
(pipeline_time.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from zeroshard.core.pipeline_orders import UNSHARD, most_in_flight
from zeroshard.core.placement import Mesh, Scope, Tier
from zeroshard.core.policy import Policy
from zeroshard.core.wire import LinkBytes
from zeroshard.planner.axes import Grid, cut_stages, cut_tensors
from zeroshard.planner.durations import (
    Durations,
    TensorParallel,
    activation_bytes,
    checkpoint_bytes,
    send_seconds,
)
from zeroshard.planner.exact import LaidOut, StateBytes, made_once, rest_bytes, traffic_bytes
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
from zeroshard.planner.simulate import step_time


class StepSeconds(Protocol):
    """Seconds of one step, and what bounds it."""

    @property
    def total(self) -> float:
        """Seconds."""
        ...

    @property
    def bound_by(self) -> str:
        """The resource, or the computation, that takes most of them."""
        ...


@dataclass(frozen=True)
class RankPlan:
    """The bytes of one rank of the pipeline in one row."""

    rank: int
    laid_out: LaidOut
    rest: StateBytes
    peak: Peak


class GridPlan:
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
    def _ranks(self) -> dict[int, LaidOut]:
        """The first and the last rank of the pipeline; its stages together are one model."""
        ranks = dict.fromkeys((0, self.grid.pp - 1))
        return {rank: LaidOut(self._joined(rank), self.share.mesh, self.training.align)
                for rank in ranks}  # fmt: skip

    @cached_property
    def _laid_out(self) -> list[LaidOut]:
        """Every stage; those that are alike are one object."""
        mesh, align = self.share.mesh, self.training.align
        return made_once(self.stages, lambda stage: LaidOut(stage, mesh, align))

    def _own(self, rank: int) -> range:
        """The stages of a rank."""
        return range(rank, self.grid.stages, self.grid.pp)

    def _joined(self, rank: int) -> ModelShape:
        own = [self.stages[stage] for stage in self._own(rank)]
        if len(own) == 1:
            return own[0]
        decoder = own[-1].decoder
        if decoder is not None:
            layers = sum(one.decoder.layers for one in own if one.decoder)
            decoder = replace(decoder, layers=layers)
        used = None if own[0].used_numel is None else sum(one.used_numel or 0 for one in own)
        units = tuple(unit for one in own for unit in one.units)
        return replace(own[0], units=units, decoder=decoder, used_numel=used)

    def worst(self, policy: Policy) -> RankPlan:
        """Return the bytes of the rank that needs most of its device."""
        plans = [self._rank(rank, policy) for rank in self._ranks]
        return max(plans, key=lambda one: one.peak.total)

    def laid_out_of(self, rank: int) -> LaidOut:
        """Return the units of the first or the last rank of the pipeline."""
        return self._ranks[rank]

    def rests(self, policy: Policy) -> Iterator[StateBytes]:
        """Yield what rests on the first and the last rank of the pipeline."""
        for laid_out in self._ranks.values():
            yield rest_bytes(laid_out, policy, self.training)

    def _rank(self, rank: int, policy: Policy) -> RankPlan:
        laid_out = self._ranks[rank]
        rest = rest_bytes(laid_out, policy, self.training)
        held = self._in_flight(rank, policy) if self.grid.pp > 1 else None
        peak = peak_bytes(laid_out, policy, self.share, self.training, rest, held=held)
        return RankPlan(rank, laid_out, rest, peak)

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
        """Return the bytes that gathered stages may take together; 0 where none come and go."""
        if self.grid.pp == 1:
            return 0
        return room([work.whole_bytes for work in self._works(policy)], self.grid.pp)

    # ------------------------------------------------------------------------------ traffic

    def traffic(self, rank: int, policy: Policy) -> LinkBytes:
        """Return what a rank receives in a step over the data parallel axes."""
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
        """Return what a rank receives in a step by axis: states `along_dp`, and activations along
        "tp" and "pp".
        """
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
        """Return the bytes of a checkpoint that all ranks write: every element once."""

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
        moved = 2 * size * self._ranks[0].model.numel / mesh.node_size
        part = (mesh.num_nodes - 1) / mesh.num_nodes
        return max(computing, part * moved / (speeds.network * speeds.bandwidth_efficiency))

    def _works(self, policy: Policy) -> Sequence[StageWork]:
        if policy not in self._worked:
            works = made_once(self._durations, lambda one: stage_work(one, policy))
            self._worked[policy] = works
        return self._worked[policy]

    def step(self, policy: Policy) -> StepSeconds:
        """Return how long a step takes."""
        if self.grid.pp == 1:
            return step_time(self._laid_out[0], policy, self.share, self.training, self._tensor(0))
        return self.pipeline_time(policy)

    def pipeline_time(self, policy: Policy) -> PipelineTime:
        """Return how long a step of the pipeline takes, by rank."""
        grid, num_bytes = self.grid, activation_bytes(self.stages[0], self.training)
        sends, links = [], []
        for stage in range(grid.stages - 1):
            rank = stage % grid.pp
            one_node = self.machine.gpus == self.machine.node_size
            is_near = one_node or (rank + 1 < grid.pp and grid.is_near(self.machine, rank))
            sends.append(send_seconds(num_bytes, self.machine, is_near=is_near))
            links.append("local" if is_near else "network")
        works = self._works(policy)
        return Pipeline(grid.schedule, grid.pp, grid.micro_batches, works, sends, links).time()
