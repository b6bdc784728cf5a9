"""The trail of a run: equal on any number of ranks, in any row and on any tier; and a fault of one
rank, leaf or unit is named by step, phase, unit and rank.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.features.test_leaves import Run, Training
from tests.support.harness import RankError, run_ranks
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


def _recomputing(rank: int, world: int, path: Path) -> list[dict[str, Any]]:
    """Return what a step with and without recomputed blocks has hashed."""
    out = []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(_Block(recomputes) for _ in range(3)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = zs.shard(model, optimizer, stage=3, leaves=2, units=[torch.nn.Linear])
        with engine.trail(path / str(recomputes), every=1):
            for _ in engine.leaves(0):
                engine.backward(model(torch.randn(2, 8)).square().mean())
            optimizer.step()
        engine.close()
        *_, line = (path / str(recomputes) / f"rank-{rank:05d}.jsonl").read_text().splitlines()
        out.append(json.loads(line)["hashes"])
    return out


def test_the_output_of_a_recomputed_unit_counts_once(tmp_path: Path) -> None:
    plain, recomputed = run_ranks(1, _recomputing, tmp_path)[0]
    for phase in ("forward 0", "forward 1"):
        assert recomputed[phase] == plain[phase] and len(plain[phase]) == 3


# ------------------------------------------------------------------------------------------- faults


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
    assert "ConfigError: engine.trail() needs" in raised({}, "trail", 1)
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
