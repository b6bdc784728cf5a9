"""What large models need is done to small ones: states that pass between tiers in many tiles and blocks keep the bits of the device.

The sizes at which states are cut (a million elements) are set to a few hundred in the ranks, so that a model of 70,000 parameters has dozens of
tiles and blocks per unit, and one that goes to another's place shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import zeroshard as zs
from tests.engine.common import Run, make_model, train
from tests.harness import run_ranks
from zeroshard.optim import resting
from zeroshard.runtime import recut, unit

TIERS = {
    "gradients and optimizer on the host": {"grad": "host", "optimizer": "host"},
    "all on the host": {"weight": "host", "grad": "host", "optimizer": "host"},
    "a part on the host": {"grad": "host", "optimizer": "host", "fraction": 0.6},
    "all on disk": {"weight": "disk", "grad": "disk", "optimizer": "disk"},
    "optimizer on disk": {"optimizer": "disk"},
}


def _small_tiles(rank: int, world: int, path: str, row: str, precision: str) -> dict[str, list[str]]:
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
        with mock.patch.multiple(resting, _BLOCK=512, _CHUNK=128), mock.patch.object(unit, "_TILE", 320), mock.patch.object(recut, "_TILE", 320):
            run: Run = train(rank, row, offload=offload, **same)
        out[name] = run.differs_from(expected) + (["norms"] if run.extra["norms"] != expected.extra["norms"] else [])
    return out


@pytest.mark.parametrize(("row", "precision"), [("zero3", "fp32"), ("zero2", "bf16"), pytest.param("zero3", "bf16", marks=pytest.mark.slow)])
def test_states_that_pass_in_many_tiles_keep_the_bits(row: str, precision: str, tmp_path: Path) -> None:
    for differences in run_ranks(2, _small_tiles, str(tmp_path), row, precision, timeout=100):
        assert not any(differences.values()), differences
