"""Tiers change where states rest, never a bit: every row with every state on every tier, beside the same row on the device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import zeroshard as zs
from tests.engine.common import ROWS, Run, train
from tests.harness import run_ranks
from zeroshard.core.placement import Tier
from zeroshard.core.policy import row as policy_row

TIERS = ("device", "host", "disk")


def allowed(row: str, weight: str, grad: str, optimizer: str) -> bool:
    try:
        policy_row(row).tiered(Tier(weight), Tier(grad), Tier(optimizer))
    except ValueError:
        return False
    return True


PAIRS = [(row, *tiers) for row in ROWS for tiers in itertools.product(TIERS, TIERS, TIERS) if allowed(row, *tiers) and tiers != ("device",) * 3]


def offload(weight: str, grad: str, optimizer: str, path: str, **options: Any) -> zs.Offload:
    disk = {"disk_path": path} if "disk" in (weight, grad, optimizer) else {}
    return zs.Offload(weight=weight, grad=grad, optimizer=optimizer, **disk, **options)


def _matrix(rank: int, world: int, row: str, path: str, transport: str, precision: str) -> dict[str, list[str]]:
    same: dict[str, Any] = {"steps": 5, "micro_batches": 2, "no_sync": True, "clip": 0.1, "precision": precision, "comm": zs.Comm(transport=transport)}
    reference = train(rank, row, **same)
    out = {}
    for pair in PAIRS:
        if pair[0] == row:
            run: Run = train(rank, row, offload=offload(*pair[1:], path), **same)
            out[" ".join(pair)] = run.differs_from(reference) + (["norms"] if run.extra["norms"] != reference.extra["norms"] else [])
    return out


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(("transport", "precision"), [("shared_memory", "fp32"), ("gloo", "bf16")])
def test_every_row_and_tier_gives_the_bits_of_the_device(row: str, transport: str, precision: str, tmp_path: Any) -> None:
    for differences in run_ranks(2, _matrix, row, str(tmp_path), transport, precision, timeout=110):
        assert len(differences) == sum(pair[0] == row for pair in PAIRS)
        assert not any(differences.values()), differences
