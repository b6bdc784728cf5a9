"""core/schedule: what is gathered, released and waited for, decided without a process.

Random programs (units of random sizes, passes in random orders, micro-batches, units used outside
their modules, stages of a pipeline) are executed on a meter.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.core.pipeline_orders import PipelineOrder
from zeroshard.core.residency import Residency, UnitState, UnitTraits, Use
from zeroshard.core.schedule import RELEASES, Command, Commands, Op, Phase, Rules, Schedule, Until
from zeroshard.core.schedule.__main__ import main
from zeroshard.core.schedule.rules import is_ordered

SOURCE = Path(__file__).parents[3] / "src" / "zeroshard"


@dataclass
class Executor:
    """Executes commands on counters, and asserts what must hold for each."""

    sizes: Sequence[int]
    rules: Rules
    kept: bool = False
    live: int = 0
    gathered: dict[int, bool] = field(default_factory=dict)  # unit -> was its gather waited for
    buckets: dict[tuple[int, int], int] = field(default_factory=dict)
    commands: list[Command] = field(default_factory=list)
    idle: set[int] = field(default_factory=set)
    over_budget_for: int = 0  # bytes that one event needs, whatever the budget

    def __post_init__(self) -> None:
        traits = [UnitTraits(size, size, is_kept=self.kept) for size in self.sizes]
        self.units = [Residency(index, one) for index, one in enumerate(traits)]
        self.schedule = Schedule(self.units, self.rules, self)

    def run(self, commands: Commands, *, needs: int = 0) -> None:
        for command in commands:
            self.commands.append(command)
            op, unit = command.op, command.unit
            if op is Op.START:
                assert unit not in self.gathered
                self.gathered[unit] = False
                self.live += self.sizes[unit]
                self._check(needs)
            elif op is Op.WAIT:
                assert self.gathered[unit] is False
                self.gathered[unit] = True
            elif op is Op.USE:
                assert self.gathered[unit], "used before its gather was waited for"
            elif op in RELEASES:
                assert self.gathered.pop(unit), "released while the gather is under way"
                self.live -= self.sizes[unit]
                self.idle.discard(unit)
            elif op is Op.IDLE:
                self.idle.add(unit)
            elif op is Op.RESUME:
                self.idle.remove(unit)
            elif op is Op.WAIT_REDUCE:
                self.live -= self.buckets.pop((unit, command.segment))

    def _check(self, needs: int) -> None:
        """Nothing beyond the budget is gathered, but for what one event needs by itself; kept
        weights come on top.
        """
        kept = sum(self.sizes[unit] for unit in self.idle) if self.kept else 0
        buckets = sum(self.buckets.values())
        assert self.live - kept <= max(self.rules.budget_bytes, needs + buckets), self.commands

    def need(self, unit: int, phase: Phase) -> None:
        in_use = sum(self.sizes[u.index] for u in self.units if u.in_use or u.index == unit)
        self.run(self.schedule.need(self.units[unit], phase, keeps=True), needs=in_use)
        assert self.gathered[unit] and unit not in self.idle

    def forward(self, order: Sequence[int]) -> None:
        self.run(self.schedule.begin("forward"))
        self.schedule.enter(evaluates=False)
        for unit in order:
            self.units[unit].acquire(Use.FORWARD)
            self.need(unit, "forward")
            self.units[unit].release(Use.FORWARD)
            self.run(self.schedule.after_forward(self.units[unit], keeps=True))
        self.run(self.schedule.end_pass(keeps=True))
        self.run(self.schedule.leave(graph=True))

    def backward(self, order: Sequence[int]) -> None:
        self.run(self.schedule.begin("backward"))
        for unit in dict.fromkeys(reversed(order)):
            self.units[unit].acquire(Use.BACKWARD)
            self.need(unit, "backward")
            key = (unit, 0)
            self.run(self.schedule.reduces.before(key))
            self.run(self.schedule.reduces.make_room(self.sizes[unit]))
            self.buckets[key] = self.sizes[unit]
            self.live += self.sizes[unit]
            self.run(self.schedule.after_backward(self.units[unit]))
            self.schedule.reduces.start(key)
            self.run(self.schedule.reduces.handed_over())
        self.run(self.schedule.end_pass(keeps=False))
        self.run(self.schedule.end_backward())

    def step(self) -> None:
        self.run(self.schedule.reduces.finish())
        assert not self.buckets and not self.schedule.reduces.under_way
        self.run(self.schedule.end_step())
        self.run(self.schedule.publish())

    def check_rests(self) -> None:
        assert not self.gathered and self.live == 0
        assert all(unit.state is UnitState.RESTING and not unit.in_use for unit in self.units)


@st.composite
def _programs(draw: st.DrawFn) -> tuple[list[int], list[list[list[int]]], int | None, bool]:
    """Sizes, per step the orders of its micro-batches, bytes gathered ahead, does the row keep."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    units = st.integers(0, len(sizes) - 1)
    usual = draw(st.lists(units, min_size=1, max_size=8))
    order = st.one_of(st.just(usual), st.lists(units, min_size=1, max_size=8))
    steps = draw(st.lists(st.lists(order, min_size=1, max_size=3), min_size=1, max_size=4))
    return sizes, steps, draw(st.none() | st.integers(0, 20)), draw(st.booleans())


def _executor(
    sizes: Sequence[int], prefetch: int | None, *, kept: bool, ordered: bool = True
) -> Executor:
    rules = Rules.of(
        [UnitTraits(size, size) for size in sizes],
        ordered=ordered,
        keyed=False,
        prefetch_bytes=prefetch,
    )
    return Executor(sizes, rules, kept)


@given(_programs())
@settings(max_examples=200, deadline=None)
def test_what_is_used_was_waited_for_and_what_is_gathered_is_released_within_the_budget(
    program: tuple[list[int], list[list[list[int]]], int | None, bool],
) -> None:
    sizes, steps, prefetch, kept = program
    executor = _executor(sizes, prefetch, kept=kept)
    for step in steps:
        for order in step:
            executor.forward(order)
            executor.backward(order)
        executor.step()
        executor.check_rests()


@given(_programs())
@settings(max_examples=100, deadline=None)
def test_the_same_events_give_the_same_commands(
    program: tuple[list[int], list[list[list[int]]], int | None, bool],
) -> None:
    sizes, steps, prefetch, kept = program
    ranks = [_executor(sizes, prefetch, kept=kept) for _ in range(2)]
    for rank in ranks:
        for step in steps:
            for order in step:
                rank.forward(order)
                rank.backward(order)
            rank.step()
    assert ranks[0].commands == ranks[1].commands


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 4), st.booleans())
def test_a_unit_that_runs_once_is_gathered_once_a_pass_when_every_pass_is_the_same(
    sizes: list[int], micro_batches: int, kept: bool
) -> None:
    executor, order = _executor(sizes, None, kept=kept), range(len(sizes))
    for _ in range(3):
        executor.commands.clear()
        for _ in range(micro_batches):
            executor.forward(order)
            executor.backward(order)
        executor.step()
    starts = Counter(one.unit for one in executor.commands if one.op is Op.START)
    assert set(starts.values()) == {micro_batches * (1 if kept else 2)}


def test_the_next_unit_is_on_its_way_before_one_is_used() -> None:
    executor = _executor([4] * 4, None, kept=False)
    for _ in range(2):
        executor.commands.clear()
        executor.forward(range(4))
    ops = [(one.op, one.unit) for one in executor.commands if one.op is not Op.USE]
    assert ops[:4] == [(Op.START, 0), (Op.WAIT, 0), (Op.START, 1), (Op.RELEASE_FOR_BACKWARD, 0)]
    assert ops.index((Op.START, 2)) < ops.index((Op.RELEASE_FOR_BACKWARD, 1))


def test_reduces_of_a_backward_before_keep_no_gather_from_going_ahead() -> None:
    executor = _executor([4] * 4, None, kept=False)
    for micro_batch in range(3):  # of one step
        executor.commands.clear()
        executor.forward(range(4))
        ops = [(one.op, one.unit) for one in executor.commands]
        ahead = [
            ops.index((Op.START, unit + 1)) < ops.index((Op.RELEASE_FOR_BACKWARD, unit))
            for unit in range(3)
        ]
        assert all(ahead) or micro_batch == 0  # which says what comes next
        executor.backward(range(4))


def test_the_last_pass_has_the_units_that_were_kept_for_it_and_no_other() -> None:
    executor = _executor([4] * 3, None, kept=True)
    for used in ([0, 1, 2], [0, 2]):
        executor.forward(used)
        executor.backward(used)
    executor.run(executor.schedule.begin("backward"))
    assert executor.schedule.last_pass("backward") == [2, 0]


def test_a_pass_that_gathers_nothing_is_no_reason_to_gather_everything() -> None:
    schedule = _executor([4] * 3, None, kept=True).schedule
    assert schedule.last_pass("backward") is None
    list(schedule.begin("backward"))
    assert schedule.last_pass("backward") is None
    list(schedule.begin("backward"))
    assert schedule.last_pass("backward") == []


def test_a_unit_gathered_for_another_order_gives_way() -> None:
    executor = _executor([4, 4, 12], 12, kept=False)
    for _ in range(2):
        executor.forward([0, 1, 2])
        executor.backward([0, 1, 2])
        executor.step()
    executor.commands.clear()
    executor.forward([0, 2, 1])
    assert Counter(one.unit for one in executor.commands if one.op is Op.START)[2] == 1
    executor.backward([0, 2, 1])
    executor.step()
    executor.check_rests()


def test_a_unit_of_several_modules_stays_until_another_one_is_needed() -> None:
    traits = UnitTraits(4, 4, spans_one_module=False)
    executor = _executor([4, 4], 0, kept=False)
    executor.units = [Residency(index, traits) for index in range(2)]
    executor.schedule = Schedule(executor.units, executor.rules, executor)
    first, second = executor.units
    executor.need(0, "forward")
    for _ in range(2):  # two of its modules run: one gather
        executor.need(0, "forward")
        executor.run(executor.schedule.after_forward(first, keeps=True))
        assert first.is_idle and 0 in executor.gathered
    executor.need(1, "forward")
    assert 0 not in executor.gathered
    executor.run(executor.schedule.after_forward(second, keeps=True))
    executor.run(executor.schedule.end_pass(keeps=True))
    executor.check_rests()


@pytest.mark.parametrize(
    ("how", "ordered"),
    [
        ({"one_sided": True, "leave": False, "coded": False}, False),
        ({"one_sided": False, "leave": False, "coded": False}, True),
        ({"one_sided": True, "leave": True, "coded": False}, True),
        ({"one_sided": True, "leave": False, "coded": True}, True),
    ],
)
def test_gathers_need_every_rank_unless_peers_map_the_weights(
    how: dict[str, bool], ordered: bool
) -> None:
    assert is_ordered(**how) == ordered
    rules = Rules.of([UnitTraits(4, 4)], ordered=ordered, keyed=True)
    assert rules.waits_for_room == ordered


@pytest.mark.parametrize("until", list(Until))
def test_a_unit_used_outside_its_modules_is_held_until_then(until: Until) -> None:
    executor = _executor([4, 4], None, kept=False)
    executor.schedule.enter(evaluates=False)
    for use in (until, Until.FORWARD_ENDS):  # a later, shorter use ends nothing earlier
        executor.run(executor.schedule.hold(executor.units[0], "forward", use, keeps=True))
    ends = [
        lambda: executor.schedule.leave(graph=True),
        executor.schedule.end_backward,
        executor.schedule.end_step,
    ]
    for number, end in enumerate(ends, start=Until.FORWARD_ENDS):
        assert executor.gathered, "released too early"
        executor.run(end())
        if number == until:
            break
    executor.check_rests()


def test_no_unit_is_inside_a_forward_once_another_one_is_left_idle_or_all_is_reset() -> None:
    traits = UnitTraits(4, 4, spans_one_module=False)
    outer, left = Residency(0, traits), Residency(1, traits)
    executor = _executor([4, 4], None, kept=False)
    schedule = Schedule([outer, left], executor.rules, executor)
    for end in (lambda: list(schedule.after_forward(left, keeps=True)), schedule.reset):
        list(schedule.need(left, "forward"))
        schedule.inside.add(outer)
        end()
        assert not schedule.inside


def test_a_stage_is_held_beside_the_budget_and_its_units_give_way_to_nothing() -> None:
    executor = _executor([9, 9, 9, 9], 0, kept=False)
    stage = executor.units[:3]
    executor.rules = executor.schedule.rules
    executor.run(executor.schedule.hold_stage(stage), needs=27)
    executor.run(executor.schedule.begin("forward"))
    for unit in range(3):
        executor.run(executor.schedule.need(executor.units[unit], "forward"), needs=36)
    assert [one.op for one in executor.commands].count(Op.START) == 3
    assert executor.schedule.room.left == executor.rules.budget_bytes
    executor.run(executor.schedule.release_stage(stage))
    executor.check_rests()


@pytest.mark.parametrize("ordered", [True, False])
def test_nothing_is_gathered_ahead_while_a_rank_follows_where_gathers_need_it(
    ordered: bool,
) -> None:
    executor = _executor([4, 4, 4], None, kept=False, ordered=ordered)
    schedule = executor.schedule
    for all_compute, ahead in ((True, True), (False, not ordered), (True, True)):
        executor.forward([0, 1, 2])
        schedule.look_ahead(if_all_compute=all_compute)
        executor.run(schedule.begin("forward"))
        executor.need(0, "forward")
        assert bool(schedule.ahead) == ahead
        executor.run(schedule.bring_to_rest(executor.units[0]))
        executor.run(schedule.end_pass())
        schedule.end_step()


def test_a_command_that_raises_leaves_the_unit_where_it_was() -> None:
    executor = _executor([4, 4], None, kept=False)
    unit = executor.units[0]
    commands = iter(executor.schedule.need(unit, "forward"))
    assert next(commands).op is Op.START
    commands.close()  # type: ignore[attr-defined]
    assert unit.state is UnitState.RESTING  # the gather did not start
    executor.need(0, "forward")
    executor.schedule.reset()
    assert unit.state is UnitState.RESTING and executor.schedule.ahead == []


def test_where_ranks_may_differ_no_gather_and_no_bucket_waits_for_a_reduce() -> None:
    executor = _executor([4, 4, 4, 4], None, kept=False, ordered=False)
    for _ in range(2):
        executor.forward(range(4))
        executor.backward(range(4))
    before = executor.commands[: executor.commands.index(Command(Op.POLL_REDUCE, 3))]
    assert Op.POLL_REDUCE in {one.op for one in executor.commands}
    assert Op.WAIT_REDUCE not in {one.op for one in before}


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero2", "zero3", "zero3-keep", "hpz", "mics"])
@pytest.mark.parametrize(
    "how", [[], ["--micro-batches=2", "--no-sync"], ["--pipeline=1f1b", "--micro-batches=4"]]
)
def test_a_step_is_printed(row: str, how: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = [row, "--units=3", "--nodes=2", "--local=4", *how]
    assert main(options) == 0
    text = capsys.readouterr().out
    assert "optimizer.step()" in text
    assert main([*options, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["commands"][-1]["gathered_bytes"] == told["commands"][-1]["bucket_bytes"] == 0
    starts = sum(one["command"] == "START" for one in told["commands"])
    assert (row == "ddp") == (starts == 0)
    assert main([*options, "--tape"]) == 0
    words = " ".join(capsys.readouterr().out.replace(",", "").split())
    for one in told["commands"]:
        where = f"{one['event']} " if one["event"] else ""
        assert one["command"] in words and where in words
    assert words.count("START ") == starts
    assert ("need " in words) == (row != "ddp")


@pytest.mark.parametrize("wrong", [["zero9"], ["zero3", "--units=0"], ["zero3", "--budget=7"]])
def test_what_makes_no_step_is_one_line(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(wrong) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_stages_of_a_pipeline_stay_gathered_where_they_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["zero3", "--units=2", "--micro-batches=4", "--pipeline=interleaved"]
    starts = {}
    for budget in ("4MB", "8MB"):  # one stage of the two on this rank, or both
        assert main([*options, f"--budget={budget}", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)["commands"]
        counted = Counter(one["unit"] for one in told if one["command"] == "START")
        starts[budget] = max(counted.values())
        assert max(one["gathered_bytes"] for one in told) <= int(budget[0]) * 1e6
    assert starts["8MB"] == 1
    actions = PipelineOrder.parse("interleaved").order(0, 2, 4)
    runs = Counter(stage for stage, _ in groupby(action.stage for action in actions))
    assert 1 < starts["4MB"] <= max(runs.values())


def test_no_number_of_the_schedule_stands_twice() -> None:
    """The planner and the runtime import what the schedule says."""
    rules = ast.parse((SOURCE / "core/schedule/rules.py").read_text())
    constants = {
        node.targets[0].id: ast.unparse(node.value)
        for node in rules.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and node.targets[0].id.isupper()
        and not isinstance(node.value, ast.Call)
    }
    assert len(constants) == 4
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        if path.name == "rules.py":
            continue
        assert "Rules(" not in text, f"{path}: by Rules.of"
        assert "staging_bytes: int = STAGING_BYTES" in text or "staging_bytes: int =" not in text
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id.strip("_")
                assert name not in constants and name not in ("RING", "AHEAD"), (path, name)
