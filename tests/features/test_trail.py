"""The trail of a run: equal on any number of ranks, in any row and on any tier; and a fault of one
rank, leaf or unit is named by step, phase, unit and rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.features.test_leaves import Run, Training
from tests.support.harness import RankError, on_ranks, run_ranks
from tests.support.trail_faults import AT, FAULTS, write
from zeroshard.launch.cli import main


def compare(first: Path, second: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return what ``zeroshard compare --json`` says."""
    capsys.readouterr()
    code = main(["compare", str(first), str(second), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if found["equal"] else 1)
    return found


# ----------------------------------------------------------------------------------------- no fault


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trail of one rank."""
    return write(1, Run(), tmp_path_factory.mktemp("alone") / "trail")


def _runs(tmp_path: Path) -> dict[str, tuple[int, Run]]:
    away = dict.fromkeys(("weight", "grad", "optimizer"), "host")
    on_disk = dict.fromkeys(("weight", "grad", "optimizer"), "disk") | {"disk_path": str(tmp_path)}
    nodes = {"comm": {"node_size": 2, "transport": "gloo"}}
    return {
        "zero3, 2 ranks": (2, Run({"stage": 3})),
        "zero3, 3 ranks": (3, Run({"stage": 3})),
        "zero3, 3 ranks over sockets": (3, Run({"stage": 3, "comm": {"transport": "gloo"}})),
        "ddp, 3 ranks": (3, Run({"stage": 0})),
        "zero1, 2 ranks": (2, Run({"stage": 1})),
        "zero2, 3 ranks": (3, Run({"stage": 2})),
        "keep": (2, Run({"policy": "zero3-keep"})),
        **{row: (4, Run({"policy": row} | nodes)) for row in ("hpz", "mics", "hfsdp")},
        "host": (2, Run({"stage": 3, "offload": away})),
        "half on the host": (2, Run({"stage": 3, "offload": away | {"fraction": 0.5}})),
        "disk": (2, Run({"stage": 3, "offload": on_disk})),
        "uneven": (3, Run({"stage": 3}, uneven="shares", shares=(1, 2, 3))),
        "uneven leaves": (3, Run({"stage": 1}, uneven="batch_shares", shares=(1, 2, 3))),
        "uneven leaves over sockets": (
            3,
            Run(
                {"stage": 2, "comm": {"transport": "gloo"}}, uneven="batch_shares", shares=(1, 2, 5)
            ),
        ),
        "hfsdp, idle ranks": (6, Run({"policy": "hfsdp"} | nodes)),
    }


def test_trails_of_any_ranks_rows_and_tiers_are_equal(
    alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, (world, run) in _runs(tmp_path).items():
        found = compare(alone, write(world, run, tmp_path / name), capsys)
        assert found["equal"] and found["steps"] == [0, 1, 2], (name, found["first"])
    first, second = tmp_path / "zero3, 3 ranks", tmp_path / "hpz"
    assert compare(first, second, capsys)["equal"]


@pytest.mark.parametrize("kind", ["bf16", "fp16", "weighted", "skips"])
def test_trails_of_other_precisions_weights_and_skipped_units_are_equal(
    kind: str, alone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more: dict[str, Any] = {kind: True} if kind in ("weighted", "skips") else {}
    options = {} if more else {"precision": kind}
    one = write(1, Run(options, **more), tmp_path / "one")
    two = write(2, Run(options | {"stage": 3}, **more), tmp_path / "two")
    three = write(3, Run(options | {"stage": 1}, **more), tmp_path / "three")
    assert compare(one, two, capsys)["equal"]
    assert compare(one, three, capsys)["equal"]
    assert not compare(one, alone, capsys)["equal"], "it is another run"


class _Block(torch.nn.Module):
    """A unit and an activation, which may be run again in the backward."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.unit, self.recomputes = torch.nn.Linear(8, 8), recomputes

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor
        if self.recomputes:
            out = checkpoint(self._run, hidden, use_reentrant=False)
        else:
            out = self._run(hidden)
        return out

    def _run(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.unit(hidden).tanh()


@on_ranks(1)
def test_the_output_of_a_recomputed_unit_counts_once(rank: int, tmp_path: Path) -> None:
    """Look at what a step with and without recomputed blocks has hashed."""
    out = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(_Block(recomputes) for _ in range(3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = zs.shard(model, optimizer, stage=3, leaves=2, units=[torch.nn.Linear])
        with engine.trail(tmp_path / str(recomputes), every=1):
            for _ in engine.leaves(0):
                engine.backward(model(torch.randn(2, 8)).square().mean())
            optimizer.step()
        engine.close()
        *_, line = (tmp_path / str(recomputes) / f"rank-{rank:05d}.jsonl").read_text().splitlines()
        out.append(json.loads(line)["hashes"])
    plain, recomputed = out
    for phase in ("forward 0", "forward 1"):
        assert recomputed[phase] == plain[phase] and len(plain[phase]) == 3


# ------------------------------------------------------------------------------------------- faults


class _InPart(torch.nn.Module):
    """A unit whose weights are frozen where it uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.used.requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.used(hidden)
        return out


def _in_part(rank: int, world: int, stage: int, path: Path) -> list[str]:
    """Return the units that have handed a gradient over in leaf 0."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), _InPart(), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zs.shard(model, optimizer, stage=stage, leaves=2, units=[_InPart])
    with engine.trail(path, every=1):
        for _ in engine.leaves(0, seed=0):
            engine.backward(model(torch.ones(2, 8)).square().mean())
        optimizer.step()
    engine.close()
    record = json.loads((path / f"rank-{rank:05}.jsonl").read_text().splitlines()[1])
    return list(record["hashes"]["leaf 0"])


def test_a_unit_that_is_used_in_part_has_a_gradient_in_every_row_or_in_none(tmp_path: Path) -> None:
    found = [run_ranks(1, _in_part, stage, tmp_path / str(stage))[0] for stage in (1, 2)]
    assert found[0] == found[1] and found[0], found


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, dict[str, Any]], Path]:
    """Return the trail of a run without a fault."""
    base, made = tmp_path_factory.mktemp("clean"), dict[str, Path]()

    def get(world: int, options: dict[str, Any]) -> Path:
        name = f"{world} {sorted(options)} {options.get('stage')}"
        if name not in made:
            made[name] = write(world, Run(options), base / str(len(made)))
        return made[name]

    return get


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_by_step_phase_unit_and_rank(
    name: str,
    clean: Callable[[int, dict[str, Any]], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fault = FAULTS[name]
    bad = write(2, Run(fault.options), tmp_path / "bad", name)
    others = {key: value for key, value in fault.options.items() if key != "comm"}
    for good in (clean(2, fault.options), clean(3, others | {"stage": 1})):
        first = compare(good, bad, capsys)["first"]
        phase = fault.phase.partition(" ")[0]
        told = [first[key] for key in ("step", "phase", "unit", "leaf")]
        assert told == [AT, phase, fault.unit, fault.leaf], first
        assert fault.phase.partition(" ")[2] in first["meaning"]
    first = compare(clean(2, fault.options), bad, capsys)["first"]
    if fault.leaf is not None:
        assert [one["ranks"] for one in first["holders"]] == [[1], [1]]
        return
    if phase == "norm":  # of two ranks nobody knows which is wrong
        assert len(first["holders"]) == 4
    named = set(first["suspects"][str(bad)])
    assert named == set(fault.ranks), first


def test_a_trail_refuses_what_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def raised(options: dict[str, Any], directory: str, every: Any) -> str:
        try:
            run_ranks(1, _opened, options, tmp_path / directory, every)
        except RankError as error:
            return str(error)
        return ""

    assert "ConfigError: every=0" in raised({"leaves": 4}, "trail", 0)
    assert "StorageError: trail" in raised({"leaves": 4}, "file/below", 1)


def _opened(rank: int, world: int, options: dict[str, Any], path: Path, every: int) -> None:
    with zs.shard(torch.nn.Linear(4, 4), **options).trail(path, every=every):
        pass


def _is_at(descriptor: str, directory: Path) -> bool:
    """Whether a file below `directory` is open there."""
    try:
        return str(directory) in os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return False


def _full(rank: int, world: int, path: Path) -> tuple[str, int]:
    """Train with a trail that cannot be written; return what is raised, and when."""
    training, step = Training(Run()), 0
    try:
        with training.engine.trail(path, every=1):
            (number,) = (fd for fd in os.listdir("/proc/self/fd") if _is_at(fd, path))
            with open("/dev/full", "r+b") as full:
                os.dup2(full.fileno(), int(number))
            for step in range(2):
                training.step(step)
    except zs.StorageError as error:
        return str(error), step
    finally:
        training.engine.close()
    return "", step


def test_a_full_disk_ends_the_trail_and_not_the_training(tmp_path: Path) -> None:
    said, step = run_ranks(1, _full, tmp_path)[0]
    assert "cannot write it (No space left on device)" in said and step == 1


def _beside(rank: int, world: int, path: Path) -> list[str]:
    """Return what this rank is told of each directory that somebody has prepared."""
    said, training = [], Training(Run({"stage": 3}))
    for name in ("link", "pipe", "directory", "request", "own"):
        told = "nothing"
        try:
            with training.engine.trail(path / name, every=1):
                training.step(len(said))
        except zs.StorageError as error:
            told = str(error)
        said.append(told)
    training.engine.close()
    return said


def test_a_trail_follows_no_link_waits_for_no_pipe_and_obeys_nobodys_request(
    tmp_path: Path,
) -> None:
    for name in ("link", "pipe", "directory", "request", "own"):
        (tmp_path / name).mkdir()
    (precious := tmp_path / "precious").write_text("precious")
    (tmp_path / "link" / "rank-00000.jsonl").symlink_to(precious)
    os.mkfifo(tmp_path / "pipe" / "rank-00001.jsonl")
    (tmp_path / "directory" / "rank-00001.jsonl").mkdir()
    (tmp_path / "request" / "replay.json").write_text('{"step": 3, "leaf": 0, "stepped": 1}')
    (tmp_path / "own" / "rank-00000.jsonl").write_text("")
    for said in run_ranks(2, _beside, tmp_path):
        assert "it is a symbolic link, which is not followed" in said[0]
        assert "rank-00001.jsonl: cannot write it (it is not a regular file)" in said[1]
        assert "rank-00001.jsonl: cannot write it (Is a directory)" in said[2]
        assert said[3:] == ["nothing", "nothing"]
    assert precious.read_text() == "precious"


# ----------------------------------------------------------------------------------- without leaves

PLAIN: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2 in bf16": {"stage": 2, "precision": "bf16"},
    "zero3": {"stage": 3},
    "zero3 in fp16, accumulating": {"stage": 3, "precision": "fp16", "micro_batches": 3},
    "zero1, accumulating": {"stage": 1, "micro_batches": 2, "no_sync": True},
    "hpz": {"policy": "hpz", "comm": {"node_size": 1, "transport": "gloo"}},
    "host": {"stage": 3, "offload": dict.fromkeys(("weight", "grad", "optimizer"), "host")},
    "alone": {"stage": 3, "world": 1},
}
STEPS = 3


def _plain(rank: int, world: int, path: Path, options: dict[str, Any], fault: str = "") -> None:
    """Train without leaves, from the checkpoint beside the trail if there is one; rank 1 has the
    `fault` in the first micro-batch of step AT.
    """
    options, saved = dict(options), path.parent / f"{path.name}-saved"
    num_batches, no_sync = options.pop("micro_batches", 1), options.pop("no_sync", False)
    stops, accumulates = options.pop("stops", STEPS), options.pop("accumulates", False)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    if fault == "weights":
        with torch.no_grad():
            model[1].weight[7].mul_(1.0001)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = zs.shard(model, optimizer, units=[torch.nn.Linear], sync_from=0, **options)
    first = zs.load(saved, engine).step if saved.exists() else 0

    def loss_of(batch: tuple[int, int]) -> torch.Tensor:
        torch.manual_seed(100 * batch[0] + 10 * batch[1] + rank)
        inputs = torch.randn(4, 8)
        is_here = (rank, *batch) == (world - 1, AT, 0)
        if is_here and fault == "data":
            inputs[0, 0] += 1
        if is_here and fault == "gradient":
            left = [1.01]
            model[1].weight.register_hook(lambda grad: grad * (left.pop() if left else 1.0))
        loss = model(inputs).square().mean() / num_batches
        return loss * 1.001 if is_here and fault == "loss" else loss

    with engine.trail(path, every=1):
        for step in range(first, stops):
            with torch.no_grad():
                model(torch.ones(1, 8))  # an evaluation is no micro-batch
            batches = [(step, number) for number in range(num_batches)]
            if accumulates:
                engine.accumulate(batches, loss_of)
            for batch in [] if accumulates else batches:
                waits = no_sync and batch != batches[-1]
                with engine.no_sync() if waits else nullcontext():
                    engine.backward(loss_of(batch))
            engine.clip_grad_norm_(0.01)
            optimizer.step()
            optimizer.zero_grad()
    if stops < STEPS:
        zs.save(saved, engine, step=stops)
    engine.close()


def plain(path: Path, options: dict[str, Any], fault: str = "", world: int = 2) -> Path:
    """Write the trail of a run without leaves."""
    options = dict(options)
    run_ranks(options.pop("world", world), _plain, path, options, fault)
    return path


@pytest.mark.parametrize("name", PLAIN)
def test_without_leaves_runs_of_the_same_ranks_are_compared(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = PLAIN[name]
    good, again = (plain(tmp_path / one, options) for one in ("good", "again"))
    found = compare(good, again, capsys)
    assert found["equal"] and found["steps"] == [*range(STEPS)], found
    bad = plain(tmp_path / "gradient", options, "gradient")
    first, last = compare(good, bad, capsys)["first"], options.get("world", 2) - 1
    # inside no_sync the gradient is handed over with the last micro-batch
    number = options["micro_batches"] - 1 if options.get("no_sync") else 0
    assert [first[key] for key in ("step", "phase", "unit", "leaf")] == [AT, "leaf", "1", None]
    assert f"of micro-batch {number} of rank {last}, before it is sent" in first["meaning"], first
    assert [one["ranks"] for one in first["holders"]] == [[last], [last]]


@pytest.mark.parametrize(
    ("fault", "expected"),
    {
        "data": (AT, "forward", "0", "the output of the unit in micro-batch 0 of rank 1"),
        "loss": (AT, "loss", "", "the loss of micro-batch 0 of rank 1"),
        "weights": (0, "weight", "1", "the weights at rest when the step begins"),
    }.items(),
)
def test_without_leaves_a_difference_is_named(
    fault: str, expected: tuple[Any, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = plain(tmp_path / "good", {"stage": 3})
    first = compare(good, plain(tmp_path / "bad", {"stage": 3}, fault), capsys)["first"]
    assert tuple(first[key] for key in ("step", "phase", "unit", "meaning")) == expected


def test_without_leaves_rows_are_compared_by_what_they_have_summed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = plain(tmp_path / "zero3", {"stage": 3, "micro_batches": 2})
    for stage in (0, 1, 2):
        other = plain(tmp_path / f"zero{stage}", {"stage": stage, "micro_batches": 2})
        assert compare(good, other, capsys)["equal"]
    bad = plain(tmp_path / "bad", {"stage": 1, "micro_batches": 2}, "gradient")
    first = compare(good, bad, capsys)["first"]
    # the norm, and with it every unit's clipped gradient, differs, too
    assert [first[key] for key in ("step", "phase", "unit")] == [AT, "reduced", "1"]


def test_without_leaves_a_run_that_goes_on_adds_to_its_trail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"stage": 3, "micro_batches": 2}
    good = plain(tmp_path / "good", options)
    for stops in (2, STEPS):
        plain(tmp_path / "cut", options | {"stops": stops})
    found = compare(good, tmp_path / "cut", capsys)
    assert found["equal"] and found["steps"] == [*range(STEPS)]
    for stops, fault in ((2, ""), (STEPS, "")):
        plain(tmp_path / "bad", options | {"stops": stops}, fault, world=2 if stops == 2 else 1)
    assert main(["compare", str(good), str(tmp_path / "bad")]) == 2
    assert "step 2 was run on 2 ranks and on 1" in capsys.readouterr().err


def test_without_leaves_micro_batches_of_accumulate_are_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"stage": 3, "micro_batches": 2, "accumulates": True}
    good, again = (plain(tmp_path / one, options) for one in ("good", "again"))
    assert compare(good, again, capsys)["equal"]
    first = compare(good, plain(tmp_path / "bad", options, "gradient"), capsys)["first"]
    assert [first[key] for key in ("step", "phase", "unit")] == [AT, "leaf", "1"]


def test_without_leaves_what_needs_them_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = plain(tmp_path / "run", {"stage": 3})
    leaves = write(2, Run({"stage": 3}), tmp_path / "leaves")
    other = plain(tmp_path / "other", {"stage": 3}, world=3)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in run.iterdir():
        text = file.read_text()
        (damaged / file.name).write_text(text.replace('"loss 0"', '"loss x"'))
    refused = {
        "step 0 was run on 2 ranks and on 3: without leaves": ["compare", str(run), str(other)],
        "one run has leaves=none and the other 8": ["compare", str(run), str(leaves)],
        "these runs have no leaves": ["compare", str(run), str(run), "--leaf", "0"],
        "phase 'loss x' is not known": ["compare", str(run), str(damaged)],
        "needs a run with leaves": ["replay", str(run), "--step", "0", "--", "a.py", str(run)],
    }
    capsys.readouterr()
    for said, arguments in refused.items():
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1, error


def _unlike(rank: int, world: int, path: Path) -> None:
    """Train; the first forward of step 1 ends by an exception, and rank 1 has no data in step 2."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zs.shard(model, optimizer, stage=3, units=[torch.nn.Linear])
    with engine.trail(path / "one", every=1):
        for step in range(2):
            torch.manual_seed(step)
            if step and path.name == "fails":
                with pytest.raises(RuntimeError):
                    model(torch.randn(1, 8)).square().mean().backward()
                    model(torch.randn(1, 9))
                engine.reset()
                torch.manual_seed(step)
            model(torch.randn(1, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with engine.trail(path / "two", every=1), engine.join():
        for _ in range(2 - rank):
            engine.backward(model(torch.ones(1, 8)).square().mean())
            engine.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
    engine.close()


def test_without_leaves_a_reset_and_ranks_without_data_leave_a_trail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("good", "fails"):
        run_ranks(2, _unlike, tmp_path / name)
    for part, steps in (("one", [0, 1]), ("two", [2, 3])):
        found = compare(tmp_path / "good" / part, tmp_path / "fails" / part, capsys)
        assert found["equal"] and found["steps"] == steps, found
