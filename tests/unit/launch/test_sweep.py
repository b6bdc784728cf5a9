"""``zeroshard plan --sweep``: numbers, tables, a picture, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.plan_command import run_plan
from zeroshard.core.policy import ROWS
from zeroshard.errors import ConfigError
from zeroshard.planner.plan import parse_sweep

MODEL = ("--params", "1.3B", "--gpu", "A100-40", "--sequence", "512")


def test_a_sweep_doubles() -> None:
    assert parse_sweep("gpus=8..16384") == [8 << power for power in range(12)]
    assert parse_sweep("gpus=6..40") == [6, 12, 24]
    assert parse_sweep("gpus=1..1") == [1]
    for wrong in ("8..64", "gpus=64..8", "gpus=0..8", "nodes=1..2", "gpus=8"):
        with pytest.raises(ConfigError, match="sweep="):
            parse_sweep(wrong)


def test_the_sweep_says_of_every_row_how_well_it_uses_the_gpus(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_plan(*MODEL, "--sweep", "gpus=8..64", "--network", "1GB", "--json") == 0
    points = json.loads(capsys.readouterr().out)["sweep"]
    assert [(one["gpus"], one["row"]) for one in points] == [
        (gpus, name) for gpus in (8, 16, 32, 64) for name in ROWS
    ]
    assert all(0 < one["efficiency"] <= 1 for one in points)
    by = {(one["gpus"], one["row"]): one for one in points}
    # slower between nodes than inside one; less memory on more GPUs; what bounds is named
    assert by[16, "zero3"]["efficiency"] < 0.5 * by[8, "zero3"]["efficiency"]
    assert by[64, "zero3"]["rest_bytes"] < by[8, "zero3"]["rest_bytes"] / 7
    assert by[64, "zero3"]["bound_by"] == "links between nodes"
    assert by[16, "hpz"]["efficiency"] > by[16, "zero3"]["efficiency"]


def test_tables_name_what_bounds_each_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan(*MODEL, "--sweep", "gpus=8..32", "--network", "1GB") == 0
    lines = capsys.readouterr().out.splitlines()
    *lines, fewest = lines
    assert fewest.split()[:2] == ["fewest", "8"]
    bounds = dict(line.split(maxsplit=1) for line in lines[-len(ROWS) :])
    assert list(bounds) == list(ROWS)
    assert bounds["zero3"].endswith("16-32 links between nodes")
    assert sum(line.split()[:1] == ["32"] for line in lines) == 2


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "sweep.png"
    assert run_plan(*MODEL, "--sweep", "gpus=1..4", "--plot", str(file)) == 0
    assert file.read_bytes().startswith(b"\x89PNG") and str(file) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--sweep", "8..64"], "is not of the form gpus=8..16384"),
        (["--sweep", "gpus=8..64", "--node-size", "3"], "node_size=3 does not divide"),
        (["--sweep", "gpus=1..2", "--write", "zero.json"], "leave --sweep out"),
        (["--plot", "x.png"], "--plot draws a --sweep"),
        (["--sweep", "gpus=1..2", "--plot", "x.png"], "pip install '.[report]' in a checkout"),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as where it is not installed
    assert run_plan(*MODEL, *argv) == 2
    seen = capsys.readouterr()
    assert seen.out == "" and seen.err.count("\n") == 1 and message in seen.err


def test_the_largest_micro_batch_of_each_row_fits_and_one_more_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_plan(*MODEL, "--gpus", "4", "--sweep", "batch", "--json") == 0
    rows = json.loads(capsys.readouterr().out)["sweep"]
    assert [one["tokens_per_s"] for one in rows] == sorted(
        (one["tokens_per_s"] for one in rows), reverse=True
    )
    for batch, wanted in ((0, True), (1, False)):
        for one in rows[:3]:
            given = "--batch", str(one["batch"] + batch)
            run_plan(*MODEL, "--gpus", "4", *given, "--json")
            planned = json.loads(capsys.readouterr().out)["rows"]
            (row,) = (
                two for two in planned if (two["row"], two["tiers"]) == (one["row"], one["tiers"])
            )
            assert row["fits"] is wanted
            assert wanted is False or row["peak_bytes"] == one["peak_bytes"]


def test_the_price_of_the_largest_micro_batch_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = (*MODEL, "--gpus", "4", "--sweep", "batch")
    assert run_plan(*argv) == 0
    hours = capsys.readouterr().out.splitlines()
    assert run_plan(*argv, "--price", "2") == 0
    priced = capsys.readouterr().out.splitlines()
    assert hours[3].split()[-1] == "GPU-hours" and priced[3].split()[-1] == "price"
    assert float(priced[5].split()[-1]) == pytest.approx(2 * float(hours[5].split()[-1]), rel=0.01)
    assert run_plan("--params", "175B", "--gpu", "RTX4090", "--sweep", "batch") == 1
    assert "no row fits with one sequence" in capsys.readouterr().out
    for other in (("--batch", "2"), ("--plot", "x.png"), ("--write", "x.json"), ("--tp", "2")):
        assert run_plan(*argv, *other) == 2
        assert "leave --" in capsys.readouterr().err
