"""Settings that suit the machine: one line each, and never instead of the user's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroshard.launch import on_host
from zeroshard.launch.options import RunOptions
from zeroshard.launch.run import THREADS, _set_environment, settings_for


def _lines(environ: dict[str, str], num_ranks: int = 1) -> list[str]:
    return [str(setting) for setting in settings_for(environ, num_ranks=num_ranks)]


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert _lines({}, 3) == ["OMP_NUM_THREADS=2: 8 core(s) for 3 rank(s)"]
    assert _lines({}, 100)[0].startswith("OMP_NUM_THREADS=1:")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_expand_on_cuda_unless_the_user_has_set_the_allocator(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    threads = {"OMP_NUM_THREADS": "5"}
    assert _lines(threads) == [
        "PYTORCH_ALLOC_CONF=expandable_segments:True: CUDA memory that fragments less"
    ]
    assert _lines({**threads, name: "max_split_size_mb:64"}) == []


@pytest.fixture
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has said how many threads a rank has."""
    left = {name: value for name, value in os.environ.items() if name != THREADS}
    monkeypatch.setattr(os, "environ", left)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


@pytest.mark.usefixtures("eight_cores")
def test_fewer_ranks_have_as_many_threads_each_as_the_first_ones(tmp_path: Path) -> None:
    for num_ranks in (4, 3, 1):
        options = RunOptions("script.py", elastic=1)
        _set_environment(options, str(tmp_path), num_ranks=num_ranks, restarts=False)
        assert os.environ[THREADS] == "2"


@pytest.mark.usefixtures("eight_cores")
def test_the_launchers_of_a_host_give_as_many_threads_as_its_first_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str | None] = []

    class Orders:
        def wait_for(self, *words: str) -> Any:
            options = {"elastic": 1, "nproc": "1"}
            return {"again": {"options": options, "environment": {}, "whole": {}}}

    def launched(job: Any, orders: Any, keeper: Any) -> bool:
        seen.append(os.environ.get(THREADS))
        return len(seen) < 3

    monkeypatch.setattr(on_host, "_guard_one", launched)
    on_host._guard({"options": {"elastic": 1, "nproc": "4"}}, Orders())  # type: ignore[arg-type]
    assert seen == [None, "2", "2"]  # the first launcher chooses by itself
