"""``zeroshard compare`` and ``zeroshard replay``: what they print, exit codes, and bad input."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from zeroshard.commands import trail_command
from zeroshard.launch.cli import main

HEADER = {
    "trail": 1, "rank": 0, "world": 1, "row": "zero3", "leaves": "4", "every": 1,
    "units": ["a"], "groups": {"a": 0}, "cut": "0", "curve": {},
}  # fmt: skip
NAME = "rank-00000.jsonl"


def record(step: int, value: str = "1") -> dict[str, Any]:
    return {"step": step, "hashes": {"master": {"a": value}, "leaf 2": {"a": "x"}}}


def write(directory: Path, *lines: object) -> Path:
    directory.mkdir(exist_ok=True)
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (directory / NAME).write_text("\n".join(text) + "\n", errors="surrogatepass")
    return directory


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write(tmp_path / "good", HEADER, record(0), record(1), record(2))


def test_equal_trails_are_one_line_and_exit_code_0(
    good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(good), str(good)]) == 0
    said = capsys.readouterr()
    assert said.out == "equal: every hash of 3 step(s), 0 to 2, that both trails have\n"
    assert not said.err


def test_a_difference_is_told_with_its_ranks_and_exit_code_1(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = write(tmp_path / "bad", HEADER, record(0), record(1, "2"), record(2, "3"))
    assert main(["compare", str(good), str(bad)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "step 1, unit 'a': the masters after the step; 1 step(s) before it are equal"
    )
    assert f"{bad}, rank(s) 0: 0000000000000002" in lines[2]


def test_a_line_that_a_killed_process_has_torn_is_left_out(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = write(tmp_path / "torn", HEADER, record(0), '{"step": 1, "ha', HEADER, record(1))
    assert main(["compare", str(good), str(torn)]) == 0
    with (torn / NAME).open("a") as file:
        file.write('{"step": 2')
    assert main(["compare", str(good), str(torn)]) == 0
    assert "0 to 1" in capsys.readouterr().out
    damaged = write(tmp_path / "damaged", HEADER, record(0), '{"step": 1, "ha', record(2))
    assert main(["compare", str(good), str(damaged)]) == 2


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ("7",),
        ("[]",),
        (record(0),),
        (HEADER | {"trail": 2}, record(0)),
        (HEADER | {"world": 10**18, "rank": 10**19}, record(0)),
        (HEADER | {"units": 7}, record(0)),
        (HEADER | {"groups": []}, record(0)),
        (HEADER, {"step": "0", "hashes": {}}),
        (HEADER, {"step": 0, "hashes": {"master": {"a": 7}}}),
        (HEADER, {"step": 0, "hashes": {"master": {"a": "g"}}}),
        (HEADER, {"step": 0, "hashes": {"leaf x": {"a": "1"}}}),
        (HEADER, {"step": 0, "hashes": {"what": {"a": "1"}}}),
        (HEADER, {"step": 0, "hashes": []}),
        (HEADER | {"world": 10**18}, record(0)),
        ("[" * 100_000,),
        ("\ud800",),
    ],
)
def test_what_is_no_trail_is_one_line_and_exit_code_2(
    lines: tuple[object, ...], good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write(tmp_path / "other", *lines)
    for runs in ((good, other), (other, good)):
        assert main(["compare", *map(str, runs)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("zeroshard: compare: ") and error.count("\n") == 1, error


def test_missing_directories_and_links_to_devices_are_one_line(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / NAME).symlink_to("/dev/zero")
    for name, said in (("none", "not a directory"), ("empty", "has no trail"), ("device", "not a")):
        assert main(["compare", str(good), str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


def test_names_move_no_cursor(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = HEADER | {"units": ["\x1b[31m"]}
    both = [
        write(tmp_path / value, head, {"step": 0, "hashes": {"gather": {"\x1b[31m": value}}})
        for value in ("1\x1b", "2")
    ]
    assert main(["compare", *map(str, both)]) == 1
    assert "\x1b" not in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- replay

SCRIPT = f"""
import json, pathlib, sys
out = pathlib.Path(sys.argv[sys.argv.index("--trail") + 1])
ckpt = [word.partition("=")[2] for word in sys.argv if word.startswith("--ckpt=")]
begin = max([int(p.name[5:]) for p in pathlib.Path(ckpt[0]).iterdir()], default=0) if ckpt else 0
out.mkdir(exist_ok=True)
with (out / "{NAME}").open("w") as file:
    print(json.dumps({HEADER!r}), file=file)
    for step in range(begin, 3):
        hashes = {{"master": {{"a": sys.argv[1]}}, "leaf 2": {{"a": "x"}}}}
        print(json.dumps({{"step": step, "hashes": hashes}}), file=file)
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_replay_compares_what_the_script_writes_elsewhere(
    good: Path, script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = tmp_path / "ckpt"
    for step in (1, 2):
        (checkpoint / f"step-{step:010d}").mkdir(parents=True)
    before = (good / NAME).read_bytes()
    command = ["replay", str(good), "--step", "1", "--checkpoint", str(checkpoint), "--", script]
    more = ["--trail", str(good), f"--ckpt={checkpoint}"]
    assert main([*command, "1", "0", *more]) == 0
    out = capsys.readouterr().out
    assert f"from step 1 of {checkpoint}" in out and "1 step(s), 1 to 1" in out
    assert main([*command, "2", "0", *more]) == 1
    assert "step 1, unit 'a': the masters after the step" in capsys.readouterr().out
    assert (good / NAME).read_bytes() == before
    assert len(list(checkpoint.iterdir())) == 2
    assert {one.name for one in tmp_path.iterdir()} == {"good", "ckpt", "script.py"}


def test_a_replay_without_checkpoints_runs_from_the_beginning(
    good: Path, script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["replay", str(good), "--step", "2", "--json", "--", script, "1", "0"]
    assert main([*command, "--trail", str(good)]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == [0, 1, 2]


def test_a_replay_that_cannot_be_is_told_and_exit_code_2(
    good: Path,
    script: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trail_command, "_LOOKS_S", 0.01)
    run, trail = ["replay", str(good)], ["--trail", str(good)]
    missing = tmp_path / "missing.py"
    wrong = {
        "does not have step 7": [*run, "--step", "7", "--", script, "1", "0", *trail],
        "none of the script's arguments": [*run, "--step", "1", "--", script, "1", "0"],
        "exit code 2": [*run, "--step", "1", "--", str(missing), *trail],
        "not a directory": [
            *run, "--step", "1", "--checkpoint", str(tmp_path / "no"), "--", script, *trail,
        ],
    }  # fmt: skip
    for said, argv in wrong.items():
        assert main(argv) == 2
        *above, last = capsys.readouterr().err.splitlines()
        assert last.startswith("zeroshard: replay: ") and said in last
        assert all(line.startswith("zeroshard: | ") for line in above)
    assert sys.executable
