"""What ``zeroshard report`` says of timelines: figures of timelines made by hand, pictures that are
there, and bad input as one line.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zeroshard.commands.report import analyse, step_spans, within
from zeroshard.core.timeline import Event, Level, Timeline
from zeroshard.launch.cli import main

MS = 1e-3
TRACE = "rank-00000.json"


def _timeline(
    *, rank: int = 0, waits: dict[str, float] | None = None, forward: float = 10.0, steps: int = 2
) -> Timeline:
    """Return so many equal steps, in ms: `forward`, a gather of "a" waited for, a backward of 20, a
    reduce waited for, a step of 5, and 3 of nothing before the next.
    """
    waits = {"gather": 4.0, "reduce": 6.0} | (waits or {})
    events: list[Event] = []
    now = 1.0
    for _ in range(steps):
        parts = [("wait for gather", "a", waits["gather"]), ("forward", "a", forward),
                 ("backward", "a", 20.0), ("wait for reduce", "b", waits["reduce"]),
                 ("step", "", 5.0)]  # fmt: skip
        parts += [(f"wait for {lane}", "", waits[lane]) for lane in waits if lane == "host"]
        for name, unit, duration in parts:
            events.append(Event("compute", name, unit, now * MS, duration * MS))
            now += duration
        now += 3.0
    events.append(Event("gather", "all_gather", "a", 1.0 * MS, 4.0 * MS, 100.0))
    levels = (
        Level(0.0, {"weight": 5.0, "grad": 0.0}),
        Level(20 * MS, {"weight": 5.0, "grad": 9.0}),
    )
    return Timeline(rank, 1000.0, tuple(events), levels, {"policy": "zero3"})


def test_a_step_lasts_from_the_end_of_the_one_before() -> None:
    first, second = step_spans(_timeline())
    assert first == pytest.approx((1 * MS, 46 * MS)) and second == pytest.approx((46 * MS, 94 * MS))
    # a wait for the host's part belongs to the step that it ends
    (alone,) = step_spans(_timeline(waits={"host": 7.0}, steps=1))
    assert alone == pytest.approx((1 * MS, 53 * MS))
    unfinished = Timeline(events=(Event("compute", "forward", "a", 2.0, 3.0),))
    assert step_spans(unfinished) == [(2.0, 5.0)]


def test_exposed_is_what_compute_waits_by_unit_and_lane() -> None:
    report = analyse([_timeline()])
    assert [(one.unit, one.lane) for one in report.exposed] == [("b", "reduce"), ("a", "gather")]
    assert [one.seconds for one in report.exposed] == pytest.approx([6 * MS, 4 * MS])
    assert report.num_steps == 2 and report.step_s == pytest.approx(46.5 * MS)
    parts = report.parts_s
    assert sum(parts.values()) == pytest.approx(report.step_s)
    assert parts["wait"] == pytest.approx(10 * MS) and parts["other"] == pytest.approx(1.5 * MS)
    assert report.peak_bytes == {"weight": 5.0, "grad": 9.0}


def test_the_rank_that_waits_least_is_late_and_the_others_wait_for_it() -> None:
    ahead = _timeline(waits={"gather": 9.0, "reduce": 13.0})
    late = _timeline(rank=1, waits={"gather": 1.0, "reduce": 1.0}, forward=30.0)
    report = analyse([late, ahead])
    assert [one.rank for one in report.ranks] == [0, 1]
    assert [one.others_s for one in report.ranks] == pytest.approx([20 * MS, 0.0])
    assert [one.is_late for one in report.ranks] == [False, True]
    (sentence,) = [one for one in report.costs if "rank 1" in one]
    assert "its forward takes 20.0 ms more than theirs" in sentence
    even = analyse([_timeline(), _timeline(rank=1)])
    assert not any(one.is_late for one in even.ranks)


def test_the_three_that_cost_most_are_told_largest_first() -> None:
    costs = analyse([_timeline(waits={"gather": 2.0, "reduce": 50.0, "host": 40.0})]).costs
    assert len(costs) == 3
    assert costs[0].startswith("Compute waits for reduced gradients, 50.0 ms of a step of")
    assert "unit 'b'" in costs[0] and "no_sync" in costs[0]
    assert "the optimizer's step on the host, 40.0 ms" in costs[1]
    assert costs[2].startswith("The model's own forward (10.0 ms) and backward (20.0 ms) take")


def test_a_part_of_a_timeline_begins_at_zero_with_the_level_before() -> None:
    part = within(_timeline(), 10 * MS, 40 * MS)
    assert part.origin == pytest.approx(1000.0 + 10 * MS)
    assert min(event.start for event in part.events) == 0.0
    assert part.stop == pytest.approx(30 * MS)
    assert [(level.at, level.num_bytes["grad"]) for level in part.levels] == [
        (0.0, 0.0),
        (pytest.approx(10 * MS), 9.0),
    ]


# ------------------------------------------------------------------ the command


def _write(directory: Path, *timelines: Timeline) -> Path:
    directory.mkdir(exist_ok=True)
    for one in timelines:
        (directory / f"rank-{one.rank:05d}.json").write_text(json.dumps(one.to_chrome()))
    return directory


def test_the_command_prints_words_and_draws_both_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = _write(tmp_path / "traces", _timeline(), _timeline(rank=1))
    predicted = _write(tmp_path / "plan", _timeline(steps=1)) / TRACE
    assert main(["report", str(traces), "--predicted", str(predicted)]) == 0
    printed = capsys.readouterr()
    assert "What costs most:\n1. The model's own forward" in printed.out and not printed.err
    assert "predicted: 45.0 ms" in printed.out
    for name in ("lanes.png", "memory.png"):
        assert (traces / name).read_bytes().startswith(b"\x89PNG") and name in printed.out
    assert "matplotlib.pyplot" not in sys.modules  # no display, and no state of its own


def test_json_gives_the_same_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traces = _write(tmp_path / "traces", _timeline(), _timeline(rank=1))
    assert main(["report", str(traces), "--json", "--predicted", str(traces / TRACE)]) == 0
    figures = json.loads(capsys.readouterr().out)
    report = json.loads(json.dumps(analyse([_timeline(), _timeline(rank=1)]).to_dict()))
    assert figures.pop("predicted_step_s") == pytest.approx(report["step_s"])
    assert figures["costs"] == report["costs"] and list(figures) == list(report)
    assert figures["step_s"] == pytest.approx(report["step_s"])
    assert sorted(path.name for path in traces.iterdir()) == [TRACE, "rank-00001.json"]


def test_without_matplotlib_the_text_is_printed_and_one_line_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    traces = _write(tmp_path / "traces", _timeline())
    assert main(["report", str(traces)]) == 0
    printed = capsys.readouterr()
    assert "What costs most:" in printed.out
    assert printed.err == (
        "zeroshard: report: no pictures without matplotlib: pip install '.[report]' in a checkout"
        " of zeroshard\n"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "has no trace"),
        ("{", "is no trace of zeroshard, or torn"),
        ("", "is no trace of zeroshard, or torn"),
        ("[1]", "is no trace of zeroshard, or torn"),
        ('{"traceEvents": [], "otherData": {}}', "is no trace of zeroshard, or torn"),
        (json.dumps(Timeline().to_chrome()), "nothing was computed inside it"),
        (json.dumps(_timeline().to_chrome()).replace("100.0", '"many"'), "or torn"),
        (json.dumps(_timeline().to_chrome()).replace("100.0", "NaN"), "is not finite"),
        (json.dumps(_timeline().to_chrome()).replace("100.0", "-1"), "is negative"),
        (json.dumps(_timeline().to_chrome()).replace("100.0", "1" * 400), "is not finite"),
        (json.dumps(_timeline().to_chrome()).replace('"forward"', "5"), "5 where a name"),
        (json.dumps(_timeline().to_chrome()).replace('{"weight', '7, "x": {"weight'), "or torn"),
        ("[" * 200_000, "is nested deeper than 100 levels"),
        ("[" * 200 + "]" * 200, "is nested deeper than 100 levels"),
        ("\ud800", "or torn"),
    ],
)
def test_what_is_no_trace_is_one_line_and_exit_code_2(
    text: str | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / TRACE).write_text(text, errors="surrogatepass")
    assert main(["report", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("zeroshard: report: ") and error.count("\n") == 1 and said in error


def test_a_pipe_and_a_file_without_end_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / TRACE)  # a read of it waits
    assert main(["report", str(tmp_path)]) == 2
    assert "it is not a regular file" in (error := capsys.readouterr().err)
    assert error.count("\n") == 1
    (tmp_path / TRACE).unlink()
    (tmp_path / TRACE).write_text(json.dumps(_timeline().to_chrome()))
    monkeypatch.setattr("zeroshard.commands.report._MOST_BYTES", 100)
    assert main(["report", str(tmp_path)]) == 2
    assert "it has more than 100 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    ["$x^{$", "\x1b]0;evil\x07\x1b[31mred", "two\nlines", "\u202ederorre", "\ud800", "x" * 9999],
)
def test_names_in_a_trace_are_drawn_and_printed_as_they_are_written_and_move_no_cursor(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = _timeline()
    events = tuple(replace(one, unit=name) for one in line.events)
    levels = (*line.levels, Level(21 * MS, {f"weight ({name})": 9.0}))
    labels = {"policy": "zero3", "model": name}
    traces = _write(tmp_path, replace(line, events=events, levels=levels, labels=labels))
    assert main(["report", str(traces)]) == 0
    printed = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\u202e"} & set(printed)
    assert ascii(name)[1:-1][:20] in printed or name in printed
    for picture in ("lanes.png", "memory.png"):
        assert (traces / picture).read_bytes().startswith(b"\x89PNG")


def test_a_picture_replaces_a_link_and_not_the_file_behind_it(tmp_path: Path) -> None:
    traces = _write(tmp_path / "traces", _timeline())
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (traces / "lanes.png").symlink_to(victim)
    assert main(["report", str(traces)]) == 0
    assert victim.read_text() == "precious"
    assert (traces / "lanes.png").read_bytes().startswith(b"\x89PNG")


def test_directories_and_files_that_are_not_there_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "none is not a directory" in capsys.readouterr().err
    traces = _write(tmp_path / "traces", _timeline())
    assert main(["report", str(traces), "--predicted", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (traces / "rank-7.json").write_text((traces / TRACE).read_text())
    assert main(["report", str(traces)]) == 2
    assert "two traces of one rank" in capsys.readouterr().err
