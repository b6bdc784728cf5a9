"""Bubbles and exposed communication of pipelines, predicted beside measured, stage by stage.

    python -m benchmarks.validate_pipeline --stages 2 --dp 2 --size small

trains the benchmark's GPT in stages (torch.distributed.pipelining) on CPU ranks with GPipe and
1F1B, each stage sharded over its data parallel ranks, and traces steps with ``engine.trace()``.
Of every rank: seconds of a step that its compute lane computes, that it waits for its own gathers
and reduces (exposed), and that are left: for other stages, and for the host (bubble). Predictions
take the rates of ``zeroshard doctor``, the FLOP/s that the whole model reaches here in one process
per rank, and gloo's rates between stages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import zeroshard as zs
from benchmarks.contenders import adamw
from benchmarks.model import GPT, Batches
from benchmarks.plan import SIZES, Size
from benchmarks.ranks import start_with_report
from benchmarks.validate import shape_of
from zeroshard.core.pipeline_orders import PipelineOrder
from zeroshard.core.policy import ROWS
from zeroshard.core.timeline import Timeline
from zeroshard.planner import Machine, Training
from zeroshard.planner.axes import Grid
from zeroshard.planner.durations import Durations
from zeroshard.planner.exact import LaidOut
from zeroshard.planner.grid import GridPlan
from zeroshard.planner.machine import machine_of

__all__ = ["main"]

_SCHEDULES: dict[str, Callable[..., Any]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_ROWS = ("zero1", "zero2", "zero3")


@dataclass(frozen=True)
class _Passed:
    """How a rank's compute lane passes one step, in seconds."""

    step: float
    computing: float
    bubble: float
    exposed: float


class _Stage(nn.Module):
    """The layers of one stage of a GPT, with the embeddings or the head."""

    def __init__(self, model: GPT, layers: Sequence[int], *, first: bool, last: bool) -> None:
        super().__init__()
        self.token: nn.Embedding | None = model.token if first else None
        self.position: nn.Embedding | None = model.position if first else None
        self.blocks = nn.ModuleDict({str(number): model.blocks[number] for number in layers})
        self.norm: nn.LayerNorm | None = model.norm if last else None
        self.head: nn.Linear | None = model.head if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Tokens, or what the stage before has sent, to what goes on, or logits."""
        if self.token is not None and self.position is not None:
            x = self.token(x) + self.position(torch.arange(x.shape[1]))
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


# ---------------------------------------------------------------------------------------- measured


@dataclass(frozen=True)
class _Run:
    """What is trained, and on how many ranks."""

    size: Size
    stages: int
    dp: int
    micro_batches: int
    steps: int

    @property
    def training(self) -> Training:
        """What is planned."""
        return Training("fp32", batch=self.size.batch, sequence=self.size.context,
                        micro_batches=self.micro_batches)  # fmt: skip

    def grid(self, schedule: str) -> Grid:
        """Return its grid of ranks."""
        return Grid(1, self.stages, self.dp, PipelineOrder(schedule), self.micro_batches)


def _trained(run: _Run, name: str, row: str, budget: int, directory: str) -> _Passed:
    """Train under a schedule; return how this rank has passed a step."""
    mesh = init_device_mesh("cpu", (run.stages, run.dp), mesh_dim_names=("pp", "dp"))
    number, per = mesh.get_local_rank("pp"), run.size.layers // run.stages
    more = run.size.layers % run.stages
    start = number * per + min(number, more)
    torch.manual_seed(0)
    layers = range(start, start + per + (number < more))
    module = _Stage(GPT(run.size), layers, first=number == 0, last=number == run.stages - 1)
    group = mesh.get_group("pp")
    stage = PipelineStage(module, number, run.stages, torch.device("cpu"), group=group)
    optimizer = adamw(module.parameters())
    engine = zs.shard(stage, optimizer, policy=row, mesh=mesh)
    schedule = _SCHEDULES[name](stage, n_microbatches=run.micro_batches, loss_fn=_loss)
    engine.follow(schedule, budget=budget or None)
    batches = Batches(run.size, rank=engine.rank, num_ranks=run.dp, device=torch.device("cpu"))

    def step(at: int) -> None:
        drawn = [batches[at * run.micro_batches + one] for one in range(run.micro_batches)]
        tokens, targets = (torch.cat([pair[side] for pair in drawn]) for side in (0, 1))
        inputs = [tokens] if stage.is_first else []
        schedule.step(*inputs, target=targets if stage.is_last else None)
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    dist.barrier()
    begin = time.perf_counter()
    with engine.trace(directory):
        for at in range(run.steps):
            step(at)
    dist.barrier()
    seconds = (time.perf_counter() - begin) / run.steps
    engine.close()
    (file,) = Path(directory).glob(f"rank-{dist.get_rank():05d}.json")
    return _passed(Timeline.from_chrome(json.loads(file.read_text())), seconds, run.steps)


def _passed(trace: Timeline, seconds: float, steps: int) -> _Passed:
    compute = [event for event in trace.events if event.lane == "compute"]
    exposed = sum(event.duration for event in compute if event.waits_for) / steps
    computing = sum(event.duration for event in compute if not event.waits_for) / steps
    return _Passed(seconds, computing, max(0.0, seconds - computing - exposed), exposed)


def _alone(run: _Run) -> float:
    """Return the seconds of a forward and backward of the whole model in each rank's process."""
    torch.manual_seed(0)
    model = GPT(run.size)
    batches = Batches(run.size, rank=dist.get_rank(), num_ranks=dist.get_world_size(),
                      device=torch.device("cpu"))  # fmt: skip
    times = []
    for at in range(run.steps + 1):
        begin = time.perf_counter()
        model(*batches[at]).backward()
        model.zero_grad()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


# --------------------------------------------------------------------------------------- predicted


def _machine(report: dict[str, Any], run: _Run, computed: float) -> Machine:
    """Return this machine, each stage a node: stages meet over sockets, whatever their ranks do."""
    sockets = [one for one in report["measured"]["collectives"] if one.get("transport") == "gloo"]
    here = machine_of(report, ranks=run.stages * run.dp)
    speeds = replace(
        here.speeds,
        network=statistics.median(one["bytes_per_s"] for one in sockets),
        network_latency=statistics.median(one["latency_s"] for one in sockets),
    )
    machine = replace(here, node_size=run.dp, speeds=speeds)
    training = replace(run.training, micro_batches=1)
    laid_out = LaidOut(shape_of(run.size, training), machine.mesh)
    planned = Durations(laid_out, machine, training).compute_s()
    return replace(machine, speeds=replace(speeds, compute_efficiency=planned / computed))


def _compare(run: _Run, report: dict[str, Any], directory: str) -> list[dict[str, Any]]:
    """Return a line for each schedule, row and stage, on every rank the same."""
    times: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(times, _alone(run))
    machine = _machine(report, run, statistics.median(times))
    shape, lines = shape_of(run.size, run.training), []
    for name in _SCHEDULES:
        for row in _ROWS:
            plan = GridPlan(run.grid(name), shape, machine, run.training)
            budget = plan.budget(ROWS[row])
            mine = _trained(run, name, row, budget, directory)
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, mine)
            time = plan.pipeline_time(ROWS[row])
            for stage, rank in enumerate(time.ranks):
                predicted = _Passed(time.total, rank.computing, rank.bubble, rank.exposed)
                measured = found[stage * run.dp]
                lines.append(
                    {"schedule": name, "row": row, "stage": stage,
                     "predicted": asdict(predicted), "measured": asdict(measured)}
                )  # fmt: skip
    return lines


def _print(lines: Sequence[dict[str, Any]]) -> None:
    names = ("step", "computing", "bubble", "exposed")
    print(
        "milliseconds, predicted / measured\n\n| | "
        + " | ".join(names)
        + " |\n|---|---|---|---|---|"
    )
    for line in lines:
        cells = [f"{1e3 * line['predicted'][name]:.1f} / {1e3 * line['measured'][name]:.1f}"
                 for name in names]  # fmt: skip
        print(f"| {line['schedule']}, {line['row']}, stage {line['stage']} | {' | '.join(cells)} |")


# ------------------------------------------------------------------------------------ command line


def _parser() -> argparse.ArgumentParser:
    name = "python -m benchmarks.validate_pipeline"
    parser = argparse.ArgumentParser(prog=name, description=__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--dp", type=int, default=1, help="data parallel ranks of each stage")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)  # given to the ranks
    return parser


def main(arguments: list[str]) -> int:
    """Measure this machine, then start the ranks."""
    given = _parser().parse_args(arguments)
    if given.report is None:
        return start_with_report(__file__, given.stages * given.dp, arguments)
    zs.init_distributed()
    torch.set_num_threads(1)
    run = _Run(SIZES[given.size], given.stages, given.dp, given.micro_batches, given.steps)
    report = json.loads(given.report.read_text(encoding="utf-8"))
    lines = _compare(run, report, str(given.report.parent))
    if dist.get_rank() == 0:
        print(json.dumps(lines, indent=1)) if given.json else _print(lines)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
