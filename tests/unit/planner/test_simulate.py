"""The simulated step: what holds of it on every machine, and what theory says of the rows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.predicted import compare
from zeroshard.core.placement import Mesh, Tier
from zeroshard.core.policy import ROWS, Policy, row
from zeroshard.core.timeline import LANES, Event, Timeline
from zeroshard.planner import Machine, Training, describe
from zeroshard.planner.durations import Durations
from zeroshard.planner.exact import LaidOut, rest_bytes, step_routes, traffic_bytes
from zeroshard.planner.model import GroupShape, ModelShape, UnitShape
from zeroshard.planner.simulate import Program, simulate, step_time

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
MIXES = [
    *ROWS.values(),
    row("zero1").tiered(DEVICE, DEVICE, HOST),
    row("zero2").tiered(DEVICE, HOST, HOST),
    row("zero3").tiered(HOST, HOST, HOST),
    row("zero3").tiered(DEVICE, HOST, DISK),
    row("zero3").tiered(DISK, DISK, DISK),
]
IDS = [
    f"{one.name} {one.default.weight.tier.value} {one.default.optim.tier.value}" for one in MIXES
]
LINKS = ("local", "network", "host_link", "host", "disk", "memory")
LATENCIES = ("local_latency", "network_latency", "host_latency", "disk_latency")


def _model(frozen: bool = False) -> ModelShape:
    """Return a small model with blocks, a larger head, and a unit of two groups."""
    shapes = [(64, 32), *[(64, 64)] * 4, (256, 64)]
    units = [
        UnitShape(f"u{number}", (GroupShape(((f"u{number}.w", shape),)),))
        for number, shape in enumerate(shapes)
    ]
    extra = GroupShape((("u2.scale", (64,)),), "fp32", trained=not frozen)
    units[2] = UnitShape("u2", (*units[2].groups, extra))
    return ModelShape("small", tuple(units))


def _machine(nodes: int, ranks: int, gpu: str = "A100-40", **speeds: float) -> Machine:
    """Return `nodes` nodes of `ranks` GPUs each, with other `speeds` where they are given."""
    machine = Machine.of(gpu, gpus=nodes * ranks, node_size=ranks, disk="1TB")
    return replace(machine, speeds=replace(machine.speeds, **speeds))


def _simulated(policy: Policy, machine: Machine, training: Training) -> Timeline:
    return simulate(LaidOut(_model(), machine.mesh), policy, machine, training)


def _busy(events: list[Event]) -> float:
    return math.fsum(event.duration for event in events)


def _working(timeline: Timeline, lane: str) -> list[Event]:
    return [event for event in timeline.events if event.lane == lane and not event.waits_for]


_meshes = st.sampled_from([(1, 1), (1, 4), (2, 2), (3, 1)])
_gpus = st.sampled_from(["A100-40", "CPU"])
_micro_batches = st.integers(1, 3)


def test_units_that_differ_in_uses_or_in_reach_have_their_own_groups_once() -> None:
    frozen, trained = (
        [UnitShape("u", (GroupShape((("w", (64, 64)),), trained=trained),))]
        for trained in (False, True)
    )
    adapted = LaidOut(ModelShape("adapter", (*frozen, *trained, *frozen)), Mesh(1, 2))
    tied = replace(trained[0], uses=2)
    twice = LaidOut(ModelShape("tied", (*trained, tied, *trained)), Mesh(1, 2))
    assert [len(unit) for unit in adapted.by_unit] == [1, 1, 1]
    assert [len(unit) for unit in twice.by_unit] == [1, 1, 1]
    assert sum(one.count for one in twice.groups) == 3


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(MIXES), _meshes, _gpus, _micro_batches)
def test_no_lane_does_two_things_at_once_and_the_step_is_as_long_as_each(
    policy: Policy, mesh: tuple[int, int], gpu: str, micro_batches: int
) -> None:
    training = Training(micro_batches=micro_batches)
    machine = _machine(*mesh, gpu)
    timeline = _simulated(policy, machine, training)
    for lane in LANES:
        events = sorted(
            (one for one in timeline.events if one.lane == lane),
            key=lambda one: (one.start, one.stop),
        )
        for before, after in pairwise(events):
            assert after.start >= before.stop * (1 - 1e-12), (before, after)
        assert timeline.stop >= _busy(events) * (1 - 1e-9)
    durations = Durations(LaidOut(_model(), machine.mesh), machine, training)
    assert timeline.stop >= durations.compute_s() * (1 - 1e-9)
    shares = step_time(durations.laid_out, policy, machine, training).shares
    assert math.fsum(shares.values()) == pytest.approx(timeline.stop)
    # compute computes or says what it waits for, from the beginning to the end
    assert _busy([one for one in timeline.events if one.lane == "compute"]) == pytest.approx(
        timeline.stop
    )


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(MIXES),
    _meshes,
    _gpus,
    _micro_batches,
    st.sampled_from(["plain", "frozen", "tied"]),
    st.sampled_from([1.0, 0.5]),
)
def test_every_byte_of_the_routes_moves_once(
    policy: Policy,
    mesh: tuple[int, int],
    gpu: str,
    micro_batches: int,
    kind: str,
    fraction: float,
) -> None:
    machine = _machine(*mesh, gpu)
    training = Training(micro_batches=micro_batches, fraction=fraction)
    model = _model(kind == "frozen")
    if kind == "tied":
        model = replace(model, units=(replace(model.units[0], uses=2), *model.units[1:]))
    laid_out = LaidOut(model, machine.mesh)
    timeline = simulate(laid_out, policy, machine, training)
    moved: Counter[str] = Counter()
    for event in timeline.events:
        if event.name in ("all_gather", "reduce_scatter", "read", "write"):
            moved["links" if "_" in event.name else event.name] += round(event.num_bytes)
    assert moved["links"] == round(traffic_bytes(laid_out, policy, training).total)
    tiers = [
        (route.tier_bytes(one.layout.numel), one.count)
        for one, _, route in step_routes(laid_out, policy, training)
    ]
    if policy.default.optim.tier is DEVICE:  # else the step has reads and writes of its own
        assert moved["read"] == sum(round(moved.read) * count for moved, count in tiers)
        assert moved["write"] == sum(round(moved.write) * count for moved, count in tiers)
    else:
        assert moved["read"] >= sum(round(moved.read) * count for moved, count in tiers)


@pytest.mark.parametrize("policy", MIXES, ids=IDS)
def test_links_that_take_no_time_leave_compute_alone(policy: Policy) -> None:
    free = dict.fromkeys(LINKS, math.inf) | dict.fromkeys(LATENCIES, 0.0)
    machine, training = _machine(2, 2, **free), Training(micro_batches=2)
    durations = Durations(LaidOut(_model(), machine.mesh), machine, training)
    timeline = _simulated(policy, machine, training)
    assert timeline.stop == pytest.approx(durations.compute_s())
    time = step_time(LaidOut(_model(), machine.mesh), policy, machine, training)
    assert (time.total, time.bound_by) == (pytest.approx(timeline.stop), "compute")


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(MIXES),
    st.sampled_from([*LINKS, "half_flops", *LATENCIES]),
    st.sampled_from([2, 10, 1000]),
)
def test_what_is_slower_never_makes_a_step_faster(policy: Policy, speed: str, times: int) -> None:
    """But for what the order of jobs on a shared link gives: Graham's anomalies (1969), below 3% on
    units of a few microseconds.
    """
    fast, training = _machine(2, 2), Training(micro_batches=2, sequence=32)
    value = getattr(fast.speeds, speed)
    slower = value * times if speed in LATENCIES else value / times
    slow = replace(fast, speeds=replace(fast.speeds, **{speed: slower}))
    before, after = (_simulated(policy, machine, training).stop for machine in (fast, slow))
    assert after >= 0.97 * before


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(MIXES), _meshes, _gpus, _micro_batches)
def test_no_unit_computes_before_it_is_gathered_and_the_budget_is_kept(
    policy: Policy, mesh: tuple[int, int], gpu: str, micro_batches: int
) -> None:
    machine, training = _machine(*mesh, gpu), Training(micro_batches=micro_batches)
    laid_out = LaidOut(_model(), machine.mesh)
    program = Program(Durations(laid_out, machine, training), policy)
    timeline = simulate(laid_out, policy, machine, training)
    for unit in laid_out.model.units:
        computed = [one for one in _working(timeline, "compute") if one.unit == unit.name]
        runs = [one for one in computed if one.name in ("forward", "backward")]
        gathered = [one for one in timeline.events if (one.unit, one.lane) == (unit.name, "gather")]
        for event in gathered:  # into memory that no run of the unit uses
            assert all(
                run.stop <= event.start * (1 + 1e-12) or event.stop <= run.start * (1 + 1e-12)
                for run in runs
            ), (event, runs)
        assert not gathered or min(one.stop for one in gathered) <= runs[0].start
    if policy.name != "zero3-keep":  # which needs everything at the same time
        most = max(one.num_bytes["gathered"] + one.num_bytes["buckets"] for one in timeline.levels)
        assert most <= program.schedule.rules.budget_bytes


@pytest.mark.parametrize(("gpu", "units"), [("A100-40", 4), ("CPU", 2)])
def test_slow_reduces_fill_the_budget_and_compute_waits_for_room(gpu: str, units: int) -> None:
    """core/schedule: four of the largest unit where the host runs ahead. Between CPU hosts ranks
    that hold whole weights may run units in different order, and the pool has room for two.
    """
    machine, training = _machine(2, 2, gpu, network=1e6), Training(precision="fp32")
    model = ModelShape(
        "equal",
        tuple(UnitShape(f"u{n}", (GroupShape(((f"u{n}.w", (64, 64)),)),)) for n in range(9)),
    )
    levels = simulate(LaidOut(model, machine.mesh), row("zero2"), machine, training).levels
    most = max(level.num_bytes["gathered"] + level.num_bytes["buckets"] for level in levels)
    assert most == units * 64 * 64 * 4


@pytest.mark.parametrize("policy", MIXES, ids=IDS)
@pytest.mark.parametrize(("micro_batches", "node_size"), [(1, 2), (3, 2), (3, 1)])
def test_levels_end_with_what_rests_and_nothing_gathered(
    policy: Policy, micro_batches: int, node_size: int
) -> None:
    machine, training = _machine(2, node_size), Training(micro_batches=micro_batches)
    laid_out = LaidOut(_model(), machine.mesh)
    levels = simulate(laid_out, policy, machine, training).levels
    rest = rest_bytes(laid_out, policy, training)
    expected = {
        state if tier is DEVICE else f"{state} ({tier.value})": num_bytes
        for state, by_tier in rest.items()
        for tier, num_bytes in by_tier.items()
    }
    last = {name: size for name, size in levels[-1].num_bytes.items() if size}
    assert last == pytest.approx(expected)
    assert all(size >= 0 for level in levels for size in level.num_bytes.values())
    assert levels[0].num_bytes.get("grad", 0) == 0


@pytest.mark.parametrize(("name", "parts"), [("ddp", 1), ("zero1", 8), ("zero3", 8), ("mics", 4)])
def test_a_rank_steps_its_shard_alone(name: str, parts: int) -> None:
    def step_s(policy: Policy) -> float:
        events = _simulated(policy, _machine(2, 4), Training()).events
        return _busy([one for one in events if (one.lane, one.name) == ("compute", "step")])

    assert step_s(row(name)) == pytest.approx(step_s(row("ddp")) / parts)


def test_a_tied_unit_is_gathered_again_at_the_end_of_a_forward_and_reduced_last() -> None:
    machine, training, plain = _machine(2, 2), Training(), _model()
    model = replace(plain, units=(replace(plain.units[0], uses=2), *plain.units[1:]))
    events = simulate(LaidOut(model, machine.mesh), row("zero3"), machine, training).events
    name = model.units[0].name
    runs = [one.name for one in events if (one.lane, one.unit) == ("compute", name)]
    runs = [one for one in runs if one in ("forward", "backward")]
    assert runs == ["forward", "forward", "backward", "backward"]
    reduces = [one.unit for one in events if one.lane == "reduce"]
    assert reduces[-1] == name
    compute = Durations(LaidOut(model, machine.mesh), machine, training).compute_s()
    busy = [one for one in events if one.name in ("forward", "backward")]
    assert _busy(busy) == pytest.approx(compute)


def test_a_fraction_leaves_the_last_units_to_the_host() -> None:
    machine, policy = _machine(1, 2), row("zero2").tiered(DEVICE, DEVICE, HOST)
    names = [unit.name for unit in _model().units]
    for fraction, first in ((1.0, 0), (0.5, 1)):
        timeline = _simulated(policy, machine, Training(fraction=fraction))
        on_host = [one.unit for one in timeline.events if (one.lane, one.name) == ("host", "step")]
        here = [one for one in timeline.events if (one.lane, one.name) == ("compute", "step")]
        assert on_host and set(on_host) <= set(names[first:]) and bool(here) == (fraction < 1.0)


def test_weights_that_are_kept_are_gathered_once_and_columns_inside_the_node() -> None:
    machine, training = _machine(2, 4), Training()

    def gathers(name: str) -> tuple[int, float]:
        events = [
            one
            for one in _simulated(row(name), machine, training).events
            if one.name == "all_gather" and one.unit == "u3"
        ]
        return len(events), sum(one.num_bytes for one in events)

    padded = 64 * 64 * 2
    inside, between = padded * 3 / 4, padded * 1 / 8  # of a gather in two levels
    assert gathers("zero3") == (4, 2 * (inside + between))
    assert gathers("zero3-keep") == (2, inside + between)
    assert gathers("hpz") == (3, inside + between + inside)


def test_the_rows_stand_in_the_order_that_theory_says() -> None:
    """ZeRO, section 7: with slow links stage 3 moves half as much again as stage 2; ZeRO++, section
    3: hpz half as much as stage 3 in the backward, between nodes.
    """
    model = describe("7.5B")
    for network in (1e8, 1e9, 5e9):
        machine = _machine(8, 8, network=network)
        laid_out = LaidOut(model, machine.mesh)
        training = Training("bf16", "bf16", sequence=512)
        time = {
            name: step_time(laid_out, policy, machine, training).total
            for name, policy in ROWS.items()
        }
        assert time["zero2"] <= time["zero3"] and time["zero1"] <= time["ddp"]
        assert time["hpz"] < time["zero3"] and time["mics"] < time["zero3"]
        if network == 1e8:  # nothing but bytes between nodes
            assert time["zero3"] / time["zero2"] == pytest.approx(4 / 3, rel=0.1)


def test_micro_batches_are_extrapolated_as_if_each_were_run() -> None:
    machine = _machine(2, 2, network=1e9)
    laid_out = LaidOut(_model(), machine.mesh)
    for policy in MIXES:
        training = Training(micro_batches=9)
        timeline = simulate(laid_out, policy, machine, training)
        assert step_time(laid_out, policy, machine, training).total == pytest.approx(
            timeline.stop, rel=1e-3
        )


def test_codecs_make_a_slow_wire_faster() -> None:
    machine = _machine(4, 4, network=1e9)
    plain, coded = (
        step_time(
            LaidOut(describe("1B"), machine.mesh, training.align), row("hpz"), machine, training
        ).total
        for training in (Training(), Training(weight_codec="int8", grad_codec="int4"))
    )
    assert coded < plain / 1.5


def test_on_the_host_itself_collectives_take_the_cores_time() -> None:
    training = Training(precision="fp32")
    machine = _machine(1, 4, "CPU")
    timeline = _simulated(row("zero2"), machine, training)
    working = sorted(
        (one for one in timeline.events if not one.waits_for and one.duration),
        key=lambda one: one.start,
    )
    for before, after in pairwise(working):
        assert after.start >= before.stop * (1 - 1e-12), (before, after)
    # sharded weights are read where they lie
    sharded = _simulated(row("zero3"), machine, training)
    gathers = _working(sharded, "gather")
    assert gathers and _busy(gathers) == 0 < sum(one.num_bytes for one in gathers)


def _step_s(policy: Policy, machine: Machine, training: Training) -> float:
    return step_time(LaidOut(_model(), machine.mesh), policy, machine, training).total


@pytest.mark.parametrize("ranks", [1, 2])
def test_on_the_host_itself_states_of_another_tier_cost_copies_and_passes(ranks: int) -> None:
    """Gradients that rest on the host are copied there, summed up, and divided in a copy; stepped
    weights are copied back. Nothing of it saves time, since device and host are one memory.
    """
    machine, training = _machine(1, ranks, "CPU"), Training("fp32")
    there = row("zero3").tiered(DEVICE, HOST, HOST)
    events = _simulated(there, machine, training).events
    seconds = {
        name: _busy([one for one in events if one.name == name])
        for name in ("sum", "write", "step")
    }
    own = sum(4.0 * one.layout.numel * one.count for one in LaidOut(_model(), machine.mesh).groups)
    own /= ranks
    speeds = machine.speeds
    memory = speeds.memory * speeds.bandwidth_efficiency
    assert seconds["sum"] == pytest.approx(own / memory)
    assert seconds["write"] >= own / (speeds.host_link * speeds.bandwidth_efficiency)
    passes = 2 * 3 + (1 if ranks == 1 else 5)  # masters and two moments; gradients
    shared = speeds.host * speeds.bandwidth_efficiency / ranks
    assert seconds["step"] == pytest.approx(passes * own / shared)
    assert _step_s(row("zero3"), machine, training) < _step_s(there, machine, training)
    working = sorted((one for one in events if not one.waits_for), key=lambda one: one.start)
    for before, after in pairwise(one for one in working if one.duration):
        assert after.start >= before.stop * (1 - 1e-12), (before, after)


def test_the_disks_threads_take_cores_that_compute() -> None:
    policy, training = row("zero3").tiered(DISK, DISK, DISK), Training("fp32")
    free = _machine(1, 2, "CPU", disk=1e12, disk_latency=0.0)
    busy = replace(free, speeds=replace(free.speeds, disk_core_s=1e-9))
    moved = sum(one.num_bytes for one in _simulated(policy, busy, training).events if one.num_bytes)
    without, beside = (_step_s(policy, machine, training) for machine in (free, busy))
    assert without < beside <= without + 1e-9 * moved
    gpu = _machine(1, 2, disk_core_s=1e-9)
    plain = _machine(1, 2)
    assert _step_s(policy, gpu, training) == _step_s(policy, plain, training)


def test_attention_and_recomputation_cost_what_the_papers_say() -> None:
    """arXiv 2204.02311, appendix B: 6 N + 12 L H Q T per token; recomputing is a third more."""
    machine = _machine(1, 1)
    laid_out = LaidOut(describe("1.3B"), machine.mesh)
    decoder = laid_out.model.decoder
    assert decoder is not None
    training = Training(batch=2, sequence=1024)
    width = decoder.layers * decoder.heads * decoder.head_dim
    flops = (6 * laid_out.model.numel + 12 * width * 1024) * 2048
    seconds = flops / (machine.flops("bf16") * machine.speeds.compute_efficiency)
    assert Durations(laid_out, machine, training).compute_s() == pytest.approx(seconds)
    recomputed = replace(training, checkpointing=True)
    assert Durations(laid_out, machine, recomputed).compute_s() == pytest.approx(seconds * 4 / 3)


def test_a_prediction_stands_beside_what_was_measured() -> None:
    """benchmarks/predicted.py, with a measured step that took twice as long as it should."""
    machine, training = _machine(2, 2), Training()
    measured = _simulated(row("zero3"), machine, training)
    slower = [
        replace(event, start=1 + 2 * event.start, duration=2 * event.duration)
        for event in measured.events
    ]
    table = compare(_model(), machine, training, {"zero3": Timeline(0, 0.0, tuple(slower))})
    lines = table.splitlines()[1:]
    assert [line.split()[1] for line in lines] == ["step", "compute", "gather", "reduce"]
    assert all(line.split()[-1] == "0.50" for line in lines)
