"""``engine.trace(directory)``: what it writes is what the routes say and what ``engine.traffic()``
counts, and training goes on as if nobody had looked.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.support import inside
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import batch, make_model, take_steps
from zeroshard.core.placement import Mesh
from zeroshard.core.policy import row as policy_row
from zeroshard.core.route import Kind
from zeroshard.core.timeline import Timeline
from zeroshard.core.wire import Formats

STEPS = 2
FAST = 1e-4  # seconds by which clock readings of one moment may differ
Case = tuple[str, str, dict[str, Any]]
CASES: list[Case] = [
    ("zero1", "gloo", {}),
    ("zero2", "shared_memory", {}),
    ("zero3", "shared_memory", {}),
    ("zero3", "gloo", {}),
    ("zero3", "gloo", {"grad": "host", "optimizer": "host"}),
    ("zero3", "gloo", {"weight": "host", "optimizer": "disk"}),
]
NODES: list[tuple[str, dict[str, str]]] = [
    ("zero3", {"weight_codec": "int8", "grad_codec": "int4"}),
    ("mics", {}),
]
WEIGHTLESS = ("gathered", "grad")  # states that come and go within a step


def _read(directory: Path, rank: int = 0) -> Timeline:
    return Timeline.from_chrome(json.loads((directory / f"rank-{rank:05d}.json").read_text()))


def _train(rank: int, case: Case, directory: Path, *, traced: bool) -> dict[str, Any]:
    """Train two steps and then two more, those `traced`."""
    row, transport, offload = case
    model = make_model(width=48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    disk = {"disk_path": str(directory.parent)} if "disk" in offload.values() else {}
    engine = zs.shard(
        model,
        optimizer,
        policy=row,
        offload={**offload, **disk} if offload else None,
        comm=zs.Comm(transport=transport),
    )
    take_steps(rank, STEPS, model, optimizer)
    inside.wait_published(engine)
    engine.reset_traffic()
    if traced:
        with engine.trace(directory):
            take_steps(rank, STEPS, model, optimizer)
    else:
        take_steps(rank, STEPS, model, optimizer)
    inside.wait_published(engine)
    told = {
        "traffic": engine.traffic().bytes,
        "memory": engine.memory(),
        "units": list(engine.units),
        "recordings": inside.recordings(engine),
        "weights": engine.full_state_dict(rank0_only=False),
    }
    engine.close()
    return told


def _both(rank: int, world: int, cases: list[Case], directory: str) -> list[Any]:
    """Return what each case tells untraced (every other one) and traced."""
    return [
        [
            _train(rank, case, Path(directory) / str(number), traced=traced)
            for traced in ((False, True) if number % 2 else (True,))
        ]
        for number, case in enumerate(cases)
    ]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """Where the traces of every case are, and what each rank has told of it."""
    directory = tmp_path_factory.mktemp("traces")
    return directory, run_ranks(2, _both, CASES, str(directory), timeout=120)


every_case = pytest.mark.parametrize("number", range(len(CASES)))


@every_case
def test_each_unit_is_gathered_and_reduced_as_often_as_its_routes_say(
    trained: tuple[Path, list[Any]], number: int
) -> None:
    directory, told = trained
    hops = [hop for route in _routes(number) for hop in route]
    for rank in range(2):
        seen = Counter((event.unit, event.name) for event in _events(directory, number, rank))
        for unit in told[rank][number][-1]["units"]:
            for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
                expected = STEPS * sum(hop.kind is kind for hop in hops)
                assert seen[unit, kind.value] == expected, (CASES[number], unit, kind)


def _routes(number: int) -> list[Any]:
    return list(policy_row(CASES[number][0]).routes(Mesh(1, 2), Formats.of("fp32")).step())


def _events(directory: Path, number: int, rank: int) -> Any:
    return _read(directory / str(number), rank).events


@every_case
def test_the_bytes_of_all_events_are_the_traffic(
    trained: tuple[Path, list[Any]], number: int
) -> None:
    directory, told = trained
    for rank in range(2):
        moved: Counter[str] = Counter()
        for event in _events(directory, number, rank):
            if event.lane in ("gather", "reduce"):
                moved[event.name] += int(event.num_bytes)
        counted = dict(told[rank][number][-1]["traffic"])
        del counted["exchange"]
        assert moved == counted, CASES[number]


@every_case
def test_the_events_of_a_lane_are_in_order_and_waits_end_with_what_they_wait_for(
    trained: tuple[Path, list[Any]], number: int
) -> None:
    timeline = _read(trained[0] / str(number))
    lanes = {event.lane for event in timeline.events}
    for lane in lanes:
        own = [event for event in timeline.events if event.lane == lane]
        assert all(one.stop <= other.start + 1e-9 for one, other in pairwise(own)), lane
    waits = [event for event in timeline.events if event.waits_for in ("gather", "reduce")]
    for wait in (wait for wait in waits if wait.unit):
        ends = [e.stop for e in timeline.events if (e.lane, e.unit) == (wait.waits_for, wait.unit)]
        assert any(wait.start - FAST <= end <= wait.stop + FAST for end in ends), wait
    assert timeline.labels["steps"] == str(STEPS)
    assert {"compute", "gather", "reduce"} <= lanes
    parts = {event.name for event in timeline.events if event.lane == "compute"}
    assert {"forward", "backward", "step"} <= parts


@every_case
def test_the_levels_end_at_what_rests(trained: tuple[Path, list[Any]], number: int) -> None:
    directory, told = trained
    timeline, memory = _read(directory / str(number)), told[0][number][-1]["memory"]
    resting = {
        state if tier == "device" else f"{state} ({tier})": num_bytes
        for state, by_tier in memory.tiers.items()
        for tier, num_bytes in by_tier.items()
        if state not in WEIGHTLESS
    }
    last = timeline.levels[-1].num_bytes
    assert {state: last.get(state) for state in resting} == resting
    most = max(level.num_bytes["gathered"] for level in timeline.levels)
    assert most <= memory.peak and (most > 0 or CASES[number][1] == "shared_memory")
    assert max(sum(v for k, v in level.num_bytes.items() if k.startswith("grad"))
               for level in timeline.levels) > 0  # fmt: skip


def test_tiers_and_the_step_on_the_host_have_lanes_of_their_own(
    trained: tuple[Path, list[Any]],
) -> None:
    host = Counter((e.lane, e.name) for e in _events(trained[0], 4, 0))
    units = len(trained[1][0][4][-1]["units"])
    assert host["host", "step"] == STEPS * units
    assert host["tier write", "write"] >= STEPS * units  # gradients
    assert host["compute", "wait for host"] == STEPS
    moved: Counter[str] = Counter()
    for event in _events(trained[0], 5, 0):
        moved[event.lane] += int(event.num_bytes)
    tiers = trained[1][0][5][-1]["memory"].tiers
    weights, states = tiers["weight"]["host"], tiers["optimizer"]["disk"] + tiers["master"]["disk"]
    assert moved["tier read"] == STEPS * (2 * weights + states)
    assert moved["tier write"] == STEPS * (weights + states)


def test_a_trace_changes_no_bit_and_leaves_nothing_behind(trained: tuple[Path, list[Any]]) -> None:
    directory, told = trained
    for rank in range(2):
        for plain, traced in told[rank][1::2]:
            assert plain["traffic"] == traced["traffic"]
            for name, tensor in plain["weights"].items():
                assert torch.equal(tensor, traced["weights"][name]), name
            assert set(traced["recordings"]) == {None}, rank
    for number in range(len(CASES)):
        files = sorted(path.name for path in (directory / str(number)).iterdir())
        assert files == ["rank-00000.json", "rank-00001.json"]


@on_ranks(4, timeout=100)
def test_bytes_are_the_traffic_on_several_nodes_and_in_codecs(rank: int, tmp_path: Path) -> None:
    """Trace a step on two nodes of two ranks for each of `NODES`; look at the traffic of each."""
    out = []
    for number, (row, codecs) in enumerate(NODES):
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        comm = zs.Comm(transport="gloo", node_size=2, hierarchical=True, **codecs)  # type: ignore[arg-type]
        engine = zs.shard(model, optimizer, policy=row, precision="bf16", comm=comm)
        take_steps(rank, 1, model, optimizer)
        inside.wait_published(engine)
        engine.reset_traffic()
        with engine.trace(Path(tmp_path) / str(number)):
            take_steps(rank, 1, model, optimizer)
        inside.wait_published(engine)
        out.append(engine.traffic().bytes)
        engine.close()
    for number, counted in enumerate(out):
        moved: Counter[str] = Counter()
        for event in _events(tmp_path, number, rank):
            if event.lane in ("gather", "reduce"):
                moved[event.name] += int(event.num_bytes)
        counted.pop("exchange", None)
        assert moved == counted, (NODES[number], rank)


def _alone() -> tuple[zs.Engine, torch.nn.Module, torch.optim.Optimizer]:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return zs.shard(model, optimizer, stage=3), model, optimizer


def test_an_exception_leaves_a_whole_file_and_nothing_installed(tmp_path: Path) -> None:
    engine, model, optimizer = _alone()
    with pytest.raises(ZeroDivisionError), engine.trace(tmp_path / "made"):
        model(*batch(0, 0)).backward()
        raise ZeroDivisionError
    timeline = _read(tmp_path / "made")
    assert any(event.name == "backward" for event in timeline.events)
    assert timeline.labels["steps"] == "0" and set(inside.recordings(engine)) == {None}
    optimizer.zero_grad()
    with engine.trace(tmp_path / "made"):  # again, over the first
        take_steps(0, 1, model, optimizer)
    assert _read(tmp_path / "made").labels["steps"] == "1"
    engine.close()


def test_recomputed_forwards_stand_inside_the_backward(tmp_path: Path) -> None:
    engine, model, optimizer = _alone()
    zs.nn.checkpoint_blocks(model)
    with engine.trace(tmp_path):
        take_steps(0, 1, model, optimizer)
    engine.close()
    names = [(e.name, e.unit) for e in _read(tmp_path).events if e.lane == "compute"]
    first = names.index(("backward", "blocks.3"))
    assert ("forward", "blocks.2") in names[first:]
    last = max(number for number, (name, _) in enumerate(names) if name == "backward")
    assert not any(name == "forward" for name, _ in names[last:])


def test_a_trace_inside_a_trace_and_of_a_closed_engine_are_refused(tmp_path: Path) -> None:
    engine, model, optimizer = _alone()
    with engine.trace(tmp_path / "outer"):
        with pytest.raises(zs.StateError, match="traced already"), engine.trace(tmp_path / "inner"):
            pass
        take_steps(0, 1, model, optimizer)
    assert _read(tmp_path / "outer").labels["steps"] == "1"
    assert not (tmp_path / "inner").exists()
    with engine.trace(tmp_path / "closed"):
        engine.close()
    assert (tmp_path / "closed" / "rank-00000.json").is_file()
    with pytest.raises(zs.StateError, match="closed"):
        engine.trace(tmp_path)


def test_a_link_that_waits_in_the_directory_is_not_written_through(tmp_path: Path) -> None:
    engine, model, optimizer = _alone()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    traces = tmp_path / "traces"
    traces.mkdir()
    for name in ("rank-00000.json", f".rank-00000.json.{os.getpid()}"):
        (traces / name).symlink_to(victim)
    with engine.trace(traces):
        take_steps(0, 1, model, optimizer)
    assert victim.read_text() == "precious"
    assert not (traces / "rank-00000.json").is_symlink()
    assert Timeline.from_chrome(json.loads((traces / "rank-00000.json").read_text())).events


def test_a_directory_that_cannot_be_written_is_one_line_before_anything_is_traced(
    tmp_path: Path,
) -> None:
    engine, _, _ = _alone()
    (tmp_path / "file").write_text("here")
    with (
        pytest.raises(zs.StorageError, match=r"rank-00000\.json: cannot write it") as raised,
        engine.trace(tmp_path / "file"),
    ):
        raise AssertionError
    assert "\n" not in str(raised.value) and set(inside.recordings(engine)) == {None}
    engine.close()
