"""Whose turn it is, and what happens when a contender is missing or breaks: with processes that
only pretend.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import commands, driver
from benchmarks.driver import ContenderError, Options, measure
from benchmarks.plan import SIZES, Comparison
from benchmarks.results import ComparisonResult, ContenderResult, Report, Run

AB = (Comparison("zero3", "torch-ddp", 1.0, pairs=3), Comparison("zero3", "fsdp2", 1.8, pairs=2))


class Stage:
    """What the pretended groups share: who did what, and who is to break."""

    def __init__(self, *, missing: str = "", breaks_at: dict[str, int] | None = None) -> None:
        self.turns: list[str] = []
        self.alive: list[str] = []
        self.most_alive = 0
        self.missing, self.breaks_at = missing, breaks_at or {}


def pretend(stage: Stage) -> type:
    class Group:
        def __init__(self, name: str, *_: Any) -> None:
            self.name, self.num_turns = name, 0
            self.started = {"own_network": True, "replies": [{"versions": {"torch": "2"}}]}
            stage.alive.append(name)
            stage.most_alive = max(stage.most_alive, len(stage.alive))

        def wait(self) -> None:
            pass

        def do(self, command: str, **arguments: Any) -> dict[str, Any]:
            if self.name == stage.missing:
                text = f"{self.name}: not installed\n    | where it was"
                raise ContenderError(text, failed=False)
            train = {"losses": [1.0] * arguments.get("steps", 0), "step_s": [0.1], "total_s": 0.1}
            rest = {"live_after_backward": 16, "live_after_update": 12}
            reply = {"build": {}, "train": train, "rest": rest}[command]
            return {
                "replies": [reply, reply],
                "interface_bytes": 800,
                "base_bytes": [5, 6],
                "peak_bytes": [9, 8],
            }

        def turn(self, steps: int) -> tuple[float, dict[str, Any]]:
            self.num_turns += 1
            if self.num_turns == stage.breaks_at.get(self.name):
                raise ContenderError(f"{self.name}: broke", failed=True)
            stage.turns.append(self.name)
            return {"zero3": 1.0, "torch-ddp": 2.0}.get(self.name, 3.0), {
                "replies": [{"step_s": [0.1] * steps}]
            }

        def close(self) -> None:
            stage.alive.remove(self.name)

    return Group


def run_stage(
    monkeypatch: pytest.MonkeyPatch, stage: Stage, **options: Any
) -> tuple[Run, list[str]]:
    monkeypatch.setattr(driver, "Group", pretend(stage))
    said: list[str] = []
    run = measure(SIZES["tiny"], "fp32", AB, Options(**{"alive": 2, **options}), say=said.append)
    assert stage.alive == [], "processes were left alive"
    return run, said


def test_two_at_a_time_take_turns_a_b_a_b(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage()
    run, said = run_stage(monkeypatch, stage)
    assert stage.turns == ["zero3", "torch-ddp"] * 3 + ["zero3", "fsdp2"] * 2
    assert stage.most_alive == 2 and said == []
    assert [(c.reference, c.pairs) for c in run.comparisons] == [
        ("torch-ddp", [[1.0, 2.0]] * 3),
        ("fsdp2", [[1.0, 3.0]] * 2),
    ]
    assert run.comparisons[0].ratio.median == 2.0
    ours = run.contender("zero3")
    assert ours is not None and (ours.above_imports, ours.wire_bytes, len(ours.step_s)) == (
        4,
        100.0,
        25,
    )


def test_a_shared_block_serves_every_comparison_with_one_turn_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage()
    run, _ = run_stage(monkeypatch, stage, alive=3)
    assert stage.turns == ["zero3", "torch-ddp", "fsdp2"] * 2 + ["zero3", "torch-ddp"]
    assert [len(c.pairs) for c in run.comparisons] == [3, 2]


def test_what_is_measured_is_kept_contender_by_contender(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, kept = Stage(breaks_at={"fsdp2": 1}), []
    monkeypatch.setattr(driver, "Group", pretend(stage))

    def keep(run: Run) -> None:
        kept.append(([c.name for c in run.contenders], len(run.comparisons), len(stage.turns)))

    measure(SIZES["tiny"], "fp32", AB, Options(alive=2), keep=keep)
    assert kept == [
        (["zero3"], 0, 0),
        (["zero3", "torch-ddp"], 0, 0),
        (["zero3", "torch-ddp"], 1, 6),
        (["zero3", "torch-ddp"], 1, 6),
        (["zero3", "torch-ddp", "fsdp2"], 1, 6),
        (["zero3", "torch-ddp", "fsdp2"], 1, 7),
    ]


def test_the_callers_number_of_pairs_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = run_stage(monkeypatch, Stage(), pairs=1)
    assert [len(c.pairs) for c in run.comparisons] == [1, 1]


@pytest.mark.parametrize("alive", [2, 3])
def test_a_missing_library_is_said_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, alive: int
) -> None:
    run, said = run_stage(monkeypatch, Stage(missing="torch-ddp"), alive=alive)
    assert said == ["skipped torch-ddp: not installed\n    | where it was"]
    assert [c.reference for c in run.comparisons] == ["fsdp2"]
    record = next(c for c in run.contenders if c.name == "torch-ddp")
    assert (record.skipped, record.failed) == ("torch-ddp: not installed", False)


def test_a_contender_that_breaks_keeps_its_pairs_and_ends_its_comparisons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, said = run_stage(monkeypatch, Stage(breaks_at={"torch-ddp": 2}), alive=3)
    assert said == ["FAILED torch-ddp: broke"]
    assert [(c.reference, len(c.pairs)) for c in run.comparisons] == [
        ("torch-ddp", 1),
        ("fsdp2", 2),
    ]
    assert [c.failed for c in run.contenders] == [False, True, False]


def arguments(**changes: Any) -> argparse.Namespace:
    settings = {
        "sizes": ["tiny"],
        "precision": ["fp32", "bf16"],
        "optimizer": "adamw",
        "contenders": ["zero3", "torch-ddp"],
        "nproc": 2,
        "warmup": 8,
        "alive": None,
        "device": "cpu",
        "max_norm": 1.0,
        "data": [],
        "deepspeed_python": None,
        "profile": False,
        "traces": None,
        "pairs": 2,
        "steps": 7,
        "out": None,
        "json": True,
    }
    return argparse.Namespace(**settings | changes)


@pytest.fixture
def asked(
    monkeypatch: pytest.MonkeyPatch,
) -> list[tuple[str, str, Options, list[Comparison], bytes]]:
    """What the commands asked to be measured, one entry per run."""
    calls = []

    def fake(
        size: Any,
        precision: str,
        comparisons: list[Comparison],
        options: Options,
        *,
        keep: Callable[[Run], None] = lambda run: None,
        **_: Any,
    ) -> Run:
        text = b"".join(Path(file).read_bytes() for file in options.files)
        calls.append((size.name, precision, options, comparisons, text))
        records = [ContenderResult("zero3", failed=bool(text)), ContenderResult("plain")]
        compared = [ComparisonResult("zero3", "plain", None, 5, [[1.0, 2.0]])]
        run = Run(size.name, precision, 2, 1, "cpu", 1, 1, records, compared)
        for _ in range(2):
            keep(run)
        return run

    monkeypatch.setattr(commands, "measure", fake)
    return calls


def test_step_measures_every_size_and_precision_and_saves_each(
    asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.step(arguments(out=tmp_path / "new" / "out.json"), threads=3) == 0
    assert [call[:2] for call in asked] == [("tiny", "fp32"), ("tiny", "bf16")]
    options = asked[0][2]
    assert (options.threads, options.steps, options.pairs, options.alive) == (
        3,
        7,
        2,
        SIZES["tiny"].alive,
    )
    assert len(Report.load(tmp_path / "new" / "out.json").runs) == 2
    assert '"kind": "step"' in capsys.readouterr().out


def test_all_contenders_read_one_copy_of_the_text_and_a_broken_one_is_in_the_exit_code(
    asked: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(b"one")
    (tmp_path / "b").write_bytes(b"two")
    assert commands.step(arguments(data=[tmp_path / "a", tmp_path / "b"]), threads=1) == 70
    assert asked[0][4] == b"one\ntwo"


def test_overhead_is_one_process_and_a_target_of_three_percent(
    asked: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert commands.overhead(arguments(pairs=None, json=False), threads=2) == 0
    assert [call[0] for call in asked] == ["overhead", "tiny"]
    assert all(options.num_ranks == 1 for _, _, options, _, _ in asked)
    assert [options.threads for _, _, options, _, _ in asked] == [1, 2]
    assert [comparisons[0].target for *_, comparisons, _ in asked] == [None, 1 / 1.03]
    assert all(comparisons[0].pairs == 30 for *_, comparisons, _ in asked)
    assert "zero3 / plain" in capsys.readouterr().out
