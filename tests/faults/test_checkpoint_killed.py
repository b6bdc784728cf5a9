"""Ranks killed while they save: nothing that was reported is lost, and nothing torn is ever
seen. The kills are those of killed.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import zeroshard as zs
from tests.support import killed
from tests.support.harness import ROOT
from tests.support.training import make_model


def kill(line: str, timeout: float) -> dict[str, Any]:
    """Run the driver and return its totals; it ends with an error where a checkpoint was lost or
    a torn one seen.
    """
    command = [sys.executable, "-m", "tests.support.killed", *line.split()]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    totals: dict[str, Any] = json.loads(done.stdout)
    print(
        f"{totals['kills']} kills, {totals['inside_a_save']} of them inside a save, in"
        f" {totals['seconds']} s: no checkpoint lost, no torn one seen; {totals['steps_verified']}"
        f" checkpoints verified, {totals['losses_compared']} losses equal"
    )
    return totals


@pytest.mark.slow
def test_kills_at_ten_random_moments_lose_nothing() -> None:
    totals = kill("moments --seed 0 --kills 10 --patience 1", timeout=300)
    assert totals["kills"] == 10
    # the chain went on in between
    assert totals["losses_compared"] > 20 and totals["steps_verified"] > 10


@pytest.mark.slow
def test_rank_0_can_die_at_every_kind_of_call_of_a_save() -> None:
    totals = kill("calls --rank 0 --background 0 --sample --patience 1", timeout=300)
    assert set(totals["calls"]) == set(killed.CALLS)
    assert totals["inside_a_save"] > 20


@pytest.mark.slow
def test_another_rank_can_die_at_every_kind_of_call_of_a_save_in_the_background() -> None:
    totals = kill("calls --case new --rank 1 --background 1 --sample --patience 0.5", timeout=300)
    assert set(totals["calls"]) == {"posix_fallocate", "write", "fsync", "rename"}


@pytest.mark.slow
def test_a_rank_that_saves_in_the_background_does_not_wait_long_for_a_dead_one() -> None:
    totals = kill("calls --case new --rank 1 --background 1 --call 1 --patience 8", timeout=300)
    assert (totals["survivors"], totals["slow_survivors"]) == (1, [])


def test_the_check_behind_all_of_this_finds_a_flipped_bit_a_cut_and_a_stray_file(
    tmp_path: Path,
) -> None:
    engine = zs.shard(make_model(layers=1))
    step = zs.save(tmp_path, engine, step=1)
    assert killed.verified_content(step) == killed.verified_content(step)
    (shard,) = step.glob("*.safetensors")
    whole = shard.read_bytes()
    for torn in (
        whole[:-1] + bytes([whole[-1] ^ 1]),
        whole[:-1],
        bytes([whole[0] ^ 1]) + whole[1:],
    ):
        shard.write_bytes(torn)
        with pytest.raises(killed.Lost, match="torn"):
            killed.verified_content(step)
    shard.write_bytes(whole)
    (step / "more").touch()
    with pytest.raises(killed.Lost, match="more"):
        killed.verified_content(step)
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 20, 5))
def test_two_hundred_kills_at_random_moments_lose_nothing(first: int) -> None:
    totals = kill(f"moments --seed {first} --chains 5 --kills 10 --patience 1", timeout=900)
    assert totals["kills"] == 50


@pytest.mark.slow
@pytest.mark.parametrize("rank", range(killed.WORLD))
@pytest.mark.parametrize("case", killed.CASES[:2])
def test_a_rank_can_die_at_every_call_of_a_save(case: str, rank: int) -> None:
    totals = kill(f"calls --case {case} --rank {rank} --patience 1", timeout=1200)
    assert totals["kills"] == sum(totals["calls"].values()) > 40


@pytest.mark.slow
def test_rank_0_can_die_at_every_call_while_it_removes_what_killed_saves_left() -> None:
    totals = kill("calls --case leftovers --rank 0", timeout=600)
    assert totals["kills"] == sum(totals["calls"].values()) > 10
