"""What large models need is done to small ones: states that pass between tiers in many tiles and
blocks keep the bits of the device.

The sizes at which states are cut (a million elements) are set to a few hundred in the ranks, so
that a model of 70,000 parameters has dozens of tiles and blocks per unit, and one that goes to
another's place shows.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import zeroshard as zs
from tests.support.harness import run_ranks
from tests.support.training import Run, batch, differences, make_model, train, two_groups
from zeroshard.runtime import segment
from zeroshard.state import gradient as resting
from zeroshard.state import norms, state
from zeroshard.tier import disk, swapdir

TIERS = {
    "gradients and optimizer on the host": {"grad": "host", "optimizer": "host"},
    "all on the host": {"weight": "host", "grad": "host", "optimizer": "host"},
    "a part on the host": {"grad": "host", "optimizer": "host", "fraction": 0.6},
    "all on disk": {"weight": "disk", "grad": "disk", "optimizer": "disk"},
    "optimizer on disk": {"optimizer": "disk"},
}


def _small_tiles(
    rank: int, world: int, path: str, row: str, precision: str
) -> dict[str, list[str]]:
    same: dict[str, Any] = {
        "steps": 3,
        "micro_batches": 2,
        "no_sync": True,
        "clip": 0.1,
        "precision": precision,
        "model": lambda: make_model(width=48, layers=2),
    }
    expected = train(rank, row, **same)
    out = {}
    for name, tiers in TIERS.items():
        if "weight" in tiers and row != "zero3":
            continue
        disk = {"disk_path": path} if "disk" in tiers.values() else {}
        offload = zs.Offload(**tiers, **disk, staging_bytes=1 << 16)  # type: ignore[arg-type]
        with (
            mock.patch.object(resting, "_BLOCK", 512),
            mock.patch.object(norms, "_CHUNK", 128),
            mock.patch.object(segment, "_TILE", 320),
            mock.patch.object(state, "_TILE", 320),
        ):
            run: Run = train(rank, row, offload=offload, **same)
        out[name] = run.differs_from(expected) + (
            ["norms"] if run.extra["norms"] != expected.extra["norms"] else []
        )
    return out


def _attached(rank: int, world: int) -> list[str]:
    """An optimizer that comes after shard() finds masters made of the weights, tile by tile."""
    runs = {}
    for name, offload in (("device", None), ("host", zs.Offload(optimizer="host"))):
        model = make_model(width=32, layers=1)
        tile = 320 if offload else 1 << 20
        with mock.patch.object(segment, "_TILE", tile), mock.patch.object(state, "_TILE", tile):
            engine = zs.shard(
                model,
                precision="bf16",
                **({} if offload is None else {"offload": offload}),
            )
            optimizer = two_groups(model)
            engine.attach(optimizer)
        model(*batch(rank, 0)).backward()
        optimizer.step()
        runs[name] = engine.full_state_dict(rank0_only=False)
        engine.close()
    return differences(runs["host"], runs["device"], "on the host", "on the device")


def test_masters_made_when_the_optimizer_comes_are_the_weights_in_every_tile() -> None:
    assert run_ranks(2, _attached) == [[], []]


def _slow_disk(rank: int, world: int, path: str) -> list[str]:
    """Let each write end long after the step has gone on to the next tile: its buffer is not to
    be read into before.
    """

    def late(*arguments: Any) -> None:
        time.sleep(0.02)
        swapdir.write_blocks(*arguments)

    same: dict[str, Any] = {"steps": 2, "model": lambda: make_model(width=32, layers=1)}
    expected = train(rank, "zero2", **same)
    with (
        mock.patch.object(segment, "_TILE", 320),
        mock.patch.object(state, "_TILE", 320),
        mock.patch.object(disk, "write_blocks", late),
    ):
        run = train(
            rank,
            "zero2",
            offload=zs.Offload(optimizer="disk", disk_path=path, staging_bytes=1 << 16),
            **same,
        )
    return run.differs_from(expected)


def test_a_disk_that_writes_late_keeps_the_bits(tmp_path: Path) -> None:
    assert run_ranks(2, _slow_disk, str(tmp_path), timeout=100) == [[], []]


@pytest.mark.parametrize(
    ("row", "precision"),
    [("zero3", "fp32"), ("zero2", "bf16"), pytest.param("zero3", "bf16", marks=pytest.mark.slow)],
)
def test_states_that_pass_in_many_tiles_keep_the_bits(
    row: str, precision: str, tmp_path: Path
) -> None:
    for wrong in run_ranks(2, _small_tiles, str(tmp_path), row, precision, timeout=100):
        assert not any(wrong.values()), wrong
