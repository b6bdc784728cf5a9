"""``zeroshard bench disk``: run on a small size as a user does, and what it says where fio or
O_DIRECT is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from benchmarks.disk import Row
from zeroshard.core.layout import round_up
from zeroshard.launch.cli import main

ROUNDS = "1"
SIZE = 5_000_000  # not a multiple of anything
FIO = """#!/bin/sh
case "$*" in
*--version*) echo fio-9.99; exit;;
*ioengine=libaio*) echo "no libaio" >&2; exit 1;;
esac
echo "fio: a warning before the JSON"
echo '{"jobs": [{"read": {"bw_bytes": 2000000000}, "write": {"bw_bytes": 1000000000}}]}'
"""


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH on which there is nothing yet."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def run(tmp_path: Path, *arguments: str) -> int:
    where = tmp_path / "disk"
    where.mkdir(exist_ok=True)
    code = main(
        ["bench", "disk", "--path", str(where), "--size", str(SIZE), "--rounds", ROUNDS, *arguments]
    )
    assert list(where.iterdir()) == [], "nothing is left on the disk"
    return code


def test_every_contender_moves_every_byte_of_every_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "--json", "--out", str(tmp_path / "out.json")) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "out.json").read_text())
    assert (
        SIZE - 3 * 4096 < report["bytes"] < SIZE + 3 * 4096
        and report["rounds"] == 1
        and report["verify"] is False
    )
    assert [row["what"] for row in report["gigabytes_per_s"]] == ["read", "write", "mix", "step"]
    for row in report["gigabytes_per_s"]:
        assert len(row["raw"]) == len(row["store"]) == 1 and min(row["raw"] + row["store"]) > 0
        assert len(row["fio"]) == (1 if report["fio"] and row["what"] != "step" else 0)
    if shutil.which("fio"):
        assert report["fio"].startswith("fio-")
    assert str(tmp_path) not in json.dumps(report)


def test_the_table_says_that_fio_is_missing(
    tmp_path: Path, empty_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path) == 0
    out = capsys.readouterr().out
    assert "fio is not installed: no outside reference" in out and "store / raw" in out
    assert all(f"│ {kind} " in out for kind in ("read", "write", "mix"))


def test_fio_is_asked_for_the_engine_that_it_has(
    tmp_path: Path, empty_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program(empty_path, "fio", FIO)
    assert run(tmp_path, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fio"] == "fio-9.99, io_uring"
    assert [row["fio"] for row in report["gigabytes_per_s"]] == [[3.0]] * 3 + [[]]
    program(empty_path, "fio", "#!/bin/sh\nexit 1\n")
    assert run(tmp_path) == 0
    assert "does not run with libaio or io_uring" in " ".join(capsys.readouterr().out.split())


def test_buffered_is_said_and_checksums_are_too(
    tmp_path: Path,
    empty_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from zeroshard.tier import disk

    monkeypatch.setattr(disk, "accepts_direct", lambda *_: False)
    assert run(tmp_path, "--verify", "--queue-depth", "2") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "BUFFERED, through the page cache" in out
        and "with checksums" in out
        and "2 requests in flight" in out
    )


def test_both_ways_touch_each_byte_once(
    tmp_path: Path, empty_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes are moved through the system by both contenders, and counted so."""
    moved = {"preadv": 0, "pwritev": 0}

    def counting(name: str) -> None:
        real = getattr(os, name)

        def call(fd: int, views: list[memoryview], offset: int) -> int:
            moved[name] += len(views[0])
            return int(real(fd, views, offset))

        monkeypatch.setattr(os, name, call)

    counting("preadv")
    counting("pwritev")
    monkeypatch.setattr("benchmarks.disk.step_row", lambda *_: Row("step", raw=[1.0], store=[1.0]))
    assert run(tmp_path) == 0
    state = 3 * round_up(SIZE // 3, 4096)
    rounds, contenders, probe = 2, 2, 4096
    assert moved == {
        "preadv": 2 * rounds * contenders * state + probe,
        "pwritev": (2 * rounds + 1) * contenders * state + probe,
    }


def test_a_row_shows_medians_and_the_range_of_the_ratios() -> None:
    row = Row("read", raw=[1.0, 2.0, 4.0], store=[1.0, 1.0, 4.0])
    assert row.cells() == ("read", "2.00", "1.00", "", "1.000 [0.500, 1.000]", "")


def test_a_directory_that_is_not_there_ends_with_the_exit_code_of_storage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "disk", "--path", str(tmp_path / "nothing"), "--size", "10000"]) == 74
    assert "does not exist" in capsys.readouterr().err


def test_wrong_sizes_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "disk", "--size", "0"])
    assert ended.value.code == 2 and "0" in capsys.readouterr().err
