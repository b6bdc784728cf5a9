"""``zeroshard bench inference``: run on a small model as a user does; missing peers are skipped."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from zeroshard.launch.cli import main

pytest.importorskip("accelerate")
SMALL = ["--layers", "2", "--width", "64", "--tokens", "2", "--rounds", "1", "--batches", "1,2"]


def test_contenders_take_turns_and_give_the_same_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = "zeroshard+disk,zeroshard+disk int8,accelerate+disk,deepspeed+disk"
    where = ["--path", str(tmp_path), "--contenders", names]
    assert main(["bench", "inference", *SMALL, *where, "--json"]) == 0
    told = capsys.readouterr()
    report = json.loads(told.out)
    rows = {(row["contender"], row["batch"]): row for row in report["rows"]}
    assert {batch for _, batch in rows} == {1, 2}
    assert all(len(row["tokens_per_s"]) == 1 for row in rows.values())
    assert len(rows["zeroshard+disk", 1]["disk_share"]) == 1
    assert set(report["beside_the_better_peer"]) == {"disk, batch 1", "disk, batch 2"}
    if find_spec("deepspeed") is None:
        assert "skipped deepspeed+disk: deepspeed is not installed" in told.err
    assert list(tmp_path.iterdir()) == []


def test_a_contender_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "inference", "--contenders", "vllm"]) == 3
    assert "contender 'vllm' is not one of zeroshard+disk" in capsys.readouterr().err
