"""Print the commands of a step: what is gathered, waited for, released and reduced, in order.

    python -m zeroshard.core.schedule zero3 --units 4 --micro-batches 2
    python -m zeroshard.core.schedule zero3 --tape
    python -m zeroshard.core.schedule zero3 --units 2 --micro-batches 4 --pipeline 1f1b --stages 2

Units are of one size. The step is one of a run that goes on: the order of units is known. Bytes are
counted on one rank after each command: of gathered weights, and of buckets with a reduce under way.
``--tape`` prints an event a line, with the commands that it returns. REDUCE, ADD and STEP are no
commands: they are what the executor does by itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import attrgetter

from zeroshard.core.pipeline_orders import RESHARD, SCHEDULES, UNSHARD, PipelineOrder, place
from zeroshard.core.placement import Mesh
from zeroshard.core.policy import row
from zeroshard.core.residency import Residency, UnitTraits
from zeroshard.core.route import Kind, Routes
from zeroshard.core.schedule import RELEASES, Commands, Op, Phase, Rules, Schedule
from zeroshard.core.sizes import parse_bytes
from zeroshard.core.wire import Formats
from zeroshard.errors import ConfigError


@dataclass(frozen=True)
class WrittenLine:
    """One command, or (no `unit`) an event."""

    text: str
    unit: int | None = None
    route: str = ""
    gathered: int = 0
    buckets: int = 0
    event: str = ""  # of the schedule, which returned it


class WrittenStep:
    """Executes the commands of one step by writing them down."""

    def __init__(self, schedule: Schedule, routes: Routes, meter: Count) -> None:
        self.lines: list[WrittenLine] = []
        self._schedule, self._routes, self._meter = schedule, routes, meter
        self._kept: set[int] = set()  # units with a part that is kept for their backward
        self._buckets = 0
        self._at = ""  # the schedule's event that is being executed

    def micro_batch(self, number: int, units: Sequence[int], *, sync: bool) -> None:
        """Run one forward and backward over `units`; not `sync`: inside ``no_sync()``."""
        self.forward(number, units)
        self.backward(number, units, sync=sync)

    def forward(self, number: int, units: Sequence[int]) -> None:
        """Run one forward over `units`."""
        schedule = self._schedule
        self._event(f"forward of micro-batch {number}")
        self._run("begin forward", schedule.begin("forward"))
        for unit in units:
            self._need(unit, "forward")
            after = schedule.after_forward(schedule.units[unit], keeps=True)
            self._run(f"after_forward {unit}", after)

    def backward(self, number: int, units: Sequence[int], *, sync: bool) -> None:
        """Run its backward."""
        schedule, routes = self._schedule, self._routes
        self._event(f"backward of micro-batch {number}")
        self._run("begin backward", schedule.begin("backward"))
        route = routes.reduce if sync else routes.reduce_partial
        route_now = route.for_pass(held=sync and routes.holds and number > 0)
        crosses = any(hop.axis is not None for hop in route_now)
        for unit in reversed(units):
            self._need(unit, "backward")
            size = schedule.units[unit].traits.nominal_bytes
            if crosses:
                self._run(f"make_room {unit}", schedule.reduces.make_room(size))
                self._meter.live += size
                self._buckets += size
            if crosses:
                self._run(f"reduce {unit}", schedule.reduces.before((unit, 0)))
                schedule.reduces.start((unit, 0))
            self._at = f"reduce {unit}"
            self._line("REDUCE" if crosses else "ADD", unit, str(route_now))
            self._run(f"handed_over {unit}", schedule.reduces.handed_over())
            after = schedule.after_backward(schedule.units[unit])
            self._run(f"after_backward {unit}", after)

    def optimizer_step(self) -> None:
        """Run the optimizer's step, and publish what it has written."""
        self._event("optimizer.step()")
        self._run("finish", self._schedule.reduces.finish())
        for unit in range(len(self._schedule.units)):
            self._at = "step"
            self._line("STEP", unit)
        self._run("publish", self._schedule.publish())

    def hold(self, units: Sequence[int], *, held: bool) -> None:
        """A stage's units are held from here on, or no longer."""
        schedule, residencies = self._schedule, [self._schedule.units[unit] for unit in units]
        self._event("UNSHARD stage" if held else "RESHARD stage")
        if held:
            self._run("hold_stage", schedule.hold_stage(residencies))
        else:
            self._run("release_stage", schedule.release_stage(residencies))

    def _need(self, unit: int, phase: Phase) -> None:
        commands = self._schedule.need(self._schedule.units[unit], phase, keeps=True)
        self._run(f"need {unit}", commands)

    def _run(self, event: str, commands: Commands) -> None:
        self._at = event
        for command in commands:
            op, unit = command.op, command.unit
            traits = self._schedule.units[unit].traits
            route = ""
            if op is Op.START:
                self._meter.live += traits.full_bytes
                route = str(self._gather(unit))
            elif op in RELEASES:
                self._meter.live -= traits.full_bytes
                route = self._release(unit, op)
            elif op is Op.WAIT_REDUCE:
                self._meter.live -= traits.nominal_bytes
                self._buckets -= traits.nominal_bytes
            if op is not Op.USE:
                self._line(op.name, unit, route)

    def _gather(self, unit: int) -> object:
        routes = self._routes
        if self._schedule.units[unit].traits.is_published:
            return routes.regather
        return routes.unshard_backward if unit in self._kept else routes.unshard_forward

    def _release(self, unit: int, op: Op) -> str:
        """Return what stays of a unit that is released."""
        keeps = any(hop.kind is Kind.KEEP for hop in self._routes.unshard_forward)
        if op is Op.RELEASE_ALL:
            self._kept.discard(unit)
        elif keeps and op is Op.RELEASE_FOR_BACKWARD:
            self._kept.add(unit)
            return "its column stays for the backward"
        return ""

    def _line(self, text: str, unit: int, route: str = "") -> None:
        gathered = self._meter.live - self._buckets
        self.lines.append(WrittenLine(text, unit, route, gathered, self._buckets, self._at))

    def _event(self, text: str) -> None:
        self.lines.append(WrittenLine(text))


@dataclass
class Count:
    """Bytes of gathered weights and of buckets."""

    live: int = 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zeroshard.core.schedule", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("row", help="a row of the table: zero3, hpz, mics ...")
    parser.add_argument("--units", type=int, default=4, help="of a stage; default: 4")
    parser.add_argument("--micro-batches", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--no-sync", action="store_true", help="all but the last in no_sync()")
    parser.add_argument("--unit-bytes", default="2MB", metavar="SIZE", help="default: 2MB")
    parser.add_argument("--prefetch", metavar="SIZE", help="gathered ahead; default: one unit")
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help="of gathered weights and buckets; with --pipeline, of stages that stay gathered",
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="M", help="default: 1")
    parser.add_argument("--local", type=int, default=8, metavar="L", help="ranks a node; default 8")
    parser.add_argument("--pipeline", choices=SCHEDULES, help="the order of a pipeline's schedule")
    parser.add_argument("--stages", type=int, default=2, help="ranks of the pipeline; default: 2")
    parser.add_argument("--stage", type=int, default=0, help="which of them; default: 0")
    parser.add_argument("--tape", action="store_true", help="one line per event of the schedule")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    return parser


def _checked(args: argparse.Namespace) -> argparse.Namespace:
    """Raise ConfigError for numbers that make no step."""
    for name in ("units", "micro_batches", "nodes", "local", "stages"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)} is less than 1")
    if not 0 <= args.stage < args.stages:
        raise ConfigError(f"--stage {args.stage} is not one of the {args.stages} stages, 0 on")
    return args


def played(args: argparse.Namespace) -> tuple[Rules, list[WrittenLine]]:
    """Return the rules, and the commands of the second step."""
    policy, size = row(args.row), parse_bytes(args.unit_bytes, "--unit-bytes")
    routes = policy.routes(Mesh(args.nodes, args.local), Formats.of("bf16"))
    order = None if args.pipeline is None else PipelineOrder.parse(args.pipeline)
    chunks = 1 if order is None else order.chunks
    cells = policy.default
    traits = UnitTraits.of(cells, size if cells.weight.is_sharded else 0, size)
    units = [Residency(index, traits) for index in range(args.units * chunks)]
    rules = Rules.of(
        [traits],
        ordered=True,
        keyed=False,
        enqueues=True,
        prefetch_bytes=None if args.prefetch is None else parse_bytes(args.prefetch, "--prefetch"),
    )
    budget = None if args.budget is None else parse_bytes(args.budget, "--budget")
    if budget is not None and order is None:
        rules = replace(rules, budget_bytes=budget)
    meter = Count()
    step = WrittenStep(Schedule(units, rules, meter), routes, meter)
    for _ in range(2):  # the first one shows the order
        step.lines.clear()
        if order is None:
            for number in range(args.micro_batches):
                sync = number == args.micro_batches - 1 or not args.no_sync
                step.micro_batch(number, range(args.units), sync=sync)
        else:
            _pipelined(step, order, args, size, budget)
        step.optimizer_step()
    return rules, step.lines


def _pipelined(
    step: WrittenStep, order: PipelineOrder, args: argparse.Namespace, size: int, budget: int | None
) -> None:
    """Run the computations of one stage's rank, in the schedule's order."""
    order.check(args.stages, args.micro_batches)
    actions = order.order(args.stage, args.stages, args.micro_batches)
    own = sorted({action.stage for action in actions})
    first = {stage: at * args.units for at, stage in enumerate(own)}
    placed = place(actions, dict.fromkeys(own, size * args.units), budget)
    for action in placed:
        units = range(first[action.stage], first[action.stage] + args.units)
        number = action.micro_batch or 0
        if action.kind in (UNSHARD, RESHARD):
            step.hold(units, held=action.kind == UNSHARD)
        elif action.kind == "F":
            step.forward(number, units)
        elif action.kind in "BW":
            step.backward(number, units, sync=number == args.micro_batches - 1)


def _table(lines: Sequence[WrittenLine]) -> Iterator[str]:
    yield f"  {'command':<20} {'unit':>4}  {'gathered':>10} {'buckets':>10}  route"
    for line in lines:
        if line.unit is None:
            yield line.text
        else:
            megabytes = (f"{number / 1e6:.1f} MB" for number in (line.gathered, line.buckets))
            gathered, buckets = megabytes
            text = f"  {line.text:<20} {line.unit:>4}  {gathered:>10} {buckets:>10}  {line.route}"
            yield text.rstrip()


def _tape(lines: Sequence[WrittenLine]) -> Iterator[str]:
    for event, group in groupby(lines, attrgetter("event")):
        commands = [
            line.text if line.unit is None else f"{line.text} {line.unit}" for line in group
        ]
        yield f"  {event:<18}{', '.join(commands)}" if event else "\n".join(commands)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the commands; return 2, with one line on stderr, where there are none."""
    args = _parser().parse_args(argv)
    try:
        rules, lines = played(_checked(args))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        commands = [
            {
                "command": line.text,
                "unit": line.unit,
                "route": line.route,
                "gathered_bytes": line.gathered,
                "bucket_bytes": line.buckets,
                "event": line.event,
            }
            for line in lines
        ]
        print(json.dumps({"budget_bytes": rules.budget_bytes, "commands": commands}))
        return 0
    print(
        f"{args.row}: {args.units} units on {args.nodes} x {args.local} ranks, a budget of"
        f" {rules.budget_bytes / 1e6:.1f} MB, {rules.prefetch_bytes / 1e6:.1f} MB of it ahead"
    )
    print("\n".join((_tape if args.tape else _table)(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
