"""``zeroshard bench leaves``: bytes that are counted are those of the closed forms."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import leaves
from benchmarks.leaves import WAYS, Options, Row, measure
from tests.support.harness import run_ranks
from zeroshard.errors import ConfigError
from zeroshard.launch.cli import main


def _rows(rank: int, world: int, number: str) -> list[Row]:
    return measure(Options(world, number, rounds=1, layers=2, width=32))


@pytest.mark.parametrize(
    ("world", "number", "sums"),
    [
        # of whole gradients at stages 0 and 1, of slices at 2 and 3
        pytest.param(2, "8", [2, 2, 2, 2], marks=pytest.mark.slow),
        (3, "9", [2, 2, 2, 2]),  # three leaves of 9 are no node: slices, in every row
        (3, "3x2", [1, 1, 2, 2]),
    ],
)
def test_bytes_on_the_wire_and_sums_held_are_the_closed_forms(
    world: int, number: str, sums: list[int]
) -> None:
    rows: list[Row] = run_ranks(world, _rows, number, timeout=120)[0]
    assert [(row.stage, row.way) for row in rows] == [(s, way) for s in range(4) for way in WAYS]
    for row in rows:
        assert row.wire_bytes == row.wire_closed > 0, row
        assert row.held_bytes == row.held_closed > 0, row
        assert len(row.step_s) == 1 and row.step_s[0] > 0
    assert [row.sums for row in rows if row.way == "leaves"] == sums
    assert {row.sums for row in rows if row.way != "leaves"} == {1}


def test_the_command_prints_ratios_and_saves_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = [
        Row(3, way, 2e6, 20 if way == "leaves" else 10, 1, 2e6, 10, [seconds] * 12)
        for way, seconds in zip(WAYS, (0.5, 0.4, 0.6), strict=True)
    ]

    def ranks(script: str, ranks: int, arguments: list[str]) -> int:
        assert ranks == 2 and json.loads(arguments[0])["leaves"] == "4"
        rows = json.dumps([asdict(row) for row in ways])
        Path(arguments[1], "rows.json").write_text(rows)
        return 0

    monkeypatch.setattr(leaves, "start", ranks)
    out = tmp_path / "out.json"
    assert main(["bench", "leaves", "--leaves", "4", "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "1.250 [1.250, 1.250]" in shown and "1.500" in shown
    assert "stage 3, leaves: 10 bytes held, 20 in closed form" in shown
    assert [row["way"] for row in json.loads(out.read_text())["rows"]] == list(WAYS)


def test_leaves_that_ranks_cannot_share_alike_are_refused() -> None:
    with pytest.raises(ConfigError, match="leaves=8 is no multiple of 3 ranks"):
        Options(3, "8")
    with pytest.raises(ConfigError, match="leaves='x'"):
        Options(2, "x")
