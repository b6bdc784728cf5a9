"""``zeroshard bench overhead --fake-world``: its rounds and its JSON, on a model too small to mean
anything.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ReduceScatterOptions

from benchmarks.fake_world import Options, _copying, fake_group, measure
from zeroshard.comm import native_transport


def test_every_round_times_all_three_and_the_world_is_gone_afterwards() -> None:
    rounds: list[None] = []
    seconds = measure(Options(world=4, units=2, steps=1, rounds=3), lambda: rounds.append(None))
    assert len(rounds) == 3 and set(seconds) == {"plain", "zero3", "fsdp2"}
    assert all(len(turns) == 3 and min(turns) > 0 for turns in seconds.values())
    assert not dist.is_initialized()


@pytest.mark.slow
def test_the_command_prints_and_saves_the_time_per_unit(tmp_path: Path) -> None:
    saved = tmp_path / "fake.json"
    command = "-m zeroshard bench overhead --fake-world 2 --steps 1 --pairs 2 --json --out"
    done = subprocess.run(
        [sys.executable, *command.split(), str(saved)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads(saved.read_text())
    assert (report["world"], report["units"], report["rounds"]) == (2, 50, 2)
    assert set(report["us_per_unit_and_step"]) == {"zero3", "fsdp2"}
    assert report["us_per_unit_and_step"]["fsdp2"]["median"] > 0


def test_collectives_that_the_fake_backend_leaves_out_copy_what_there_is() -> None:
    calls: list[dict[str, object]] = []
    copying = _copying(lambda output, input, **options: calls.append(options))
    output = torch.full((4,), float("nan"))
    copying(output, torch.arange(8.0), group=None)
    assert output.tolist() == [0.0, 1.0, 2.0, 3.0]
    copying(output=output, input=torch.ones(2))
    assert output.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert calls == [{"group": None}, {}]


def test_what_comes_from_the_others_is_finite_on_every_torch() -> None:
    with fake_group(4):
        share, whole = torch.full((2,), float("nan")), torch.full((8,), float("nan"))
        native_transport.group_reduce_scatter(
            dist.group.WORLD, share, torch.arange(8.0), ReduceScatterOptions()
        )
        dist.all_to_all_single(whole, torch.arange(8.0))
        assert share.tolist() == [0.0, 1.0] and whole.isfinite().all()
