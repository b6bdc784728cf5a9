"""Settings that suit the machine: one line each, and never instead of the user's."""

from __future__ import annotations

import os

import pytest
import torch

from zeroshard.launch.run import settings_for


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
