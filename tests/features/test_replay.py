"""``zeroshard replay``, on one process: it names the step, rank, leaf, unit and phase of a fault
that a run on several ranks had, computes one leaf alone, and says nothing of a run without a fault.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zeroshard as zs
from tests.features.test_leaves import Run, Training
from tests.support.harness import run_ranks
from tests.support.launched import PATHS
from tests.support.trail_faults import AT, BF16, FAULTS, LEAF, write
from zeroshard.launch.cli import main

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "tests" / "support" / "replayed.py")
# one of each kind: a rank's slice, a copy, what a leaf has computed
QUICK = {
    "a flipped bit in a moment", "a stale gather", "a wrong kernel in the forward of one module",
}  # fmt: skip
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PATHS)


def _save(rank: int, world: int, options: dict[str, Any], path: Path) -> None:
    training = Training(Run(options))
    for step in range(AT):
        training.step(step)
    zs.save(path, training.engine, step=AT)
    training.engine.close()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Path]:
    """Return the checkpoint before the step with the fault, of one rank."""
    base = tmp_path_factory.mktemp("checkpoints")

    def get(options: dict[str, Any]) -> Path:
        path = base / str(options.get("precision", "fp32"))
        if not path.exists():
            run_ranks(1, _save, options, path)
        return path

    return get


def replay(
    run: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str], *more: str,
    options: dict[str, Any] | None = None, leaves: int = 8, step: int = AT,
) -> dict[str, Any]:  # fmt: skip
    """Return what ``zeroshard replay --json`` says of `run`, on one process with `options`."""
    script = [SCRIPT, str(run), str(checkpoint)]
    script += [json.dumps({"options": options or {}, "leaves": leaves}), str(step + 2)]
    command = ["replay", str(run), "--step", str(step), "--checkpoint", str(checkpoint), "--json"]
    capsys.readouterr()
    code = main([*command, *more, "--", *script])
    said = capsys.readouterr()
    assert code in (0, 1), said.err
    found: dict[str, Any] = json.loads(said.out)
    assert code == (0 if found["equal"] else 1)
    return found


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAULTS]
)
def test_a_replay_names_the_rank_leaf_unit_and_phase_of_a_fault(
    name: str,
    checkpoint: Callable[[dict[str, Any]], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fault = FAULTS[name]
    bad = write(2, Run(fault.options), tmp_path / "bad", name)
    options = BF16 if fault.options == BF16 else {}
    found = replay(bad, checkpoint(options), capsys, options=options)
    first = found["first"]
    assert first is not None and found["steps"] == [AT]
    told = [first[key] for key in ("step", "phase", "unit", "leaf")]
    assert told == [AT, fault.phase.partition(" ")[0], fault.unit, fault.leaf], first
    assert fault.phase.partition(" ")[2] in first["meaning"]
    assert first["suspects"] == {str(bad): list(fault.ranks), "the replay": []}, first


def test_one_leaf_is_computed_alone_with_states_on_the_host(
    checkpoint: Callable[[dict[str, Any]], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "a wrong kernel in the forward of one module"
    bad, saved, computed = write(2, Run({"stage": 3}), tmp_path / "bad", name), checkpoint({}), []
    host = {"stage": 3, "offload": dict.fromkeys(("weight", "grad", "optimizer"), "host")}
    for leaf in (LEAF, LEAF - 1):
        monkeypatch.setenv("LEAVES", str(tmp_path / f"leaves-{leaf}"))
        found = replay(bad, saved, capsys, "--leaf", str(leaf), options=host)
        computed.append((tmp_path / f"leaves-{leaf}").read_text().split())
        first = found["first"]
        assert found["equal"] is (leaf != LEAF)
        if first is not None:
            told = [first[key] for key in ("step", "phase", "unit", "leaf")]
            assert told == [AT, "forward", "blocks.0", LEAF]
            assert first["suspects"] == {str(bad): [1], "the replay": []}
    assert computed == [[str(AT), str(LEAF)], [str(AT), str(LEAF - 1)]]


@pytest.mark.slow
def test_one_leaf_is_computed_alone_on_two_processes(
    checkpoint: Callable[[dict[str, Any]], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LEAVES", str(tmp_path / "leaves"))
    bad = write(2, Run({"stage": 3}), tmp_path / "bad", "a wrong scale of one leaf")
    more = ("--leaf", str(LEAF), "--nproc", "2")
    found = replay(bad, checkpoint({}), capsys, *more, options={"stage": 3})
    first, computed = found["first"], (tmp_path / "leaves").read_text().split()[1::2]
    assert (first["phase"], first["leaf"], first["unit"]) == ("leaf", LEAF, "head.weight")
    assert first["suspects"] == {str(bad): [1], "the replay": []}
    assert sorted(computed) == ["4", "5"], "its round"


def test_a_leaf_that_the_run_does_not_have_is_refused(
    checkpoint: Callable[[dict[str, Any]], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(1, Run(), tmp_path / "run")
    command = ["replay", str(run), "--step", str(AT), "--leaf", "8", "--", SCRIPT, str(run)]
    assert main(command) == 2
    assert "--leaf 8" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_replay_agrees_with_states_on_any_tier(
    tier: str,
    checkpoint: Callable[[dict[str, Any]], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    good = write(3, Run({"stage": 3}), tmp_path / "good")
    away: dict[str, Any] = dict.fromkeys(("weight", "grad", "optimizer"), tier)
    away |= {"disk_path": str(tmp_path)} if tier == "disk" else {}
    found = replay(good, checkpoint({}), capsys, options={"stage": 3, "offload": away}, step=2)
    assert found["equal"] and found["steps"] == [1, 2]


MANY = 2000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_of_two_thousand_steps_without_a_fault_a_replay_says_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write(2, Run({"stage": 3}, leaves=2, steps=MANY), tmp_path / "run", timeout=600)
    (none := tmp_path / "none").mkdir()
    found = replay(run, none, capsys, leaves=2, step=MANY - 1)
    assert found["equal"] and found["steps"] == list(range(MANY)), found["first"]
