"""The whole engine under the checking streams, on CPU: every wait is there, and every wait is
needed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.support.checking_streams import CheckingStreams
from tests.support.harness import run_ranks
from tests.support.training import ROWS, batch, make_model, two_groups
from zeroshard.sharding import api

HOST = ("zero2+grad", "zero3+all")  # rows whose states rest on the host
QUICK = {"zero1": 1, "zero3": 5}  # row -> how many waits, one of which is dropped
MESH = ("hpz", "mics", "hfsdp", "hpz+coded")  # on a mesh of two nodes
CODED = {"weight_codec": "int8", "grad_codec": "int8", "error_feedback": True}
OFFLOAD = {
    "grad": {"grad": "host", "optimizer": "host"},
    "all": {"weight": "host", "grad": "host", "optimizer": "host"},
}


def _observe(
    rank: int, case: str, transport: str, drop: int | None, clip: bool = True
) -> CheckingStreams:
    """Train two steps and evaluate once, under streams that leave out the `drop`-th wait."""
    row, _, tiers = case.partition("+")
    streams = CheckingStreams(drop=drop, collect=True)
    original = api.make_streams
    api.make_streams = lambda device: streams  # type: ignore[assignment]
    try:
        model = make_model(width=8, layers=2)
        optimizer = two_groups(model)
        mesh = {"node_size": 1} if case in MESH else {}
        comm = zs.Comm(transport=transport, **mesh, **(CODED if tiers == "coded" else {}))  # type: ignore[arg-type]
        engine = zs.shard(
            model, optimizer, policy=row, comm=comm, stall_timeout_s=20, offload=OFFLOAD.get(tiers)
        )
    finally:
        api.make_streams = original
    for step in range(2):
        x, y = batch(rank, step)
        with engine.no_sync():
            model(x, y).backward()
        model(x, y).backward()
        if clip:
            engine.clip_grad_norm_(0.01)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(x)
    engine.close()
    return streams


def _clean(rank: int, world: int, transport: str) -> dict[str, Any]:
    out = {}
    for row in ROWS + HOST + MESH:
        streams = _observe(rank, row, transport, None)
        out[row] = (streams.num_syncs, streams.num_accesses, [str(race) for race in streams.races])
    return out


@pytest.mark.parametrize("transport", ["gloo", "shared_memory"])
def test_every_row_runs_without_a_race(transport: str) -> None:
    for rows in run_ranks(2, _clean, transport):
        for row, (num_syncs, num_accesses, races) in rows.items():
            assert races == [], row
            assert num_syncs > 10 and num_accesses > 30, row


def _drop_each(rank: int, world: int, row: str, every: int) -> tuple[int, list[str]]:
    complete = _observe(rank, row, "gloo", None)
    missed = [
        f"{k}: {complete.syncs[k]}"
        for k in range(0, complete.num_syncs, every)
        if not _observe(rank, row, "gloo", k).races
    ]
    return complete.num_syncs, missed


@pytest.mark.parametrize(
    ("row", "every"),
    [
        *QUICK.items(),
        *(pytest.param(row, 1, marks=pytest.mark.slow) for row in (*ROWS, *HOST, *MESH)),
    ],
)
def test_each_dropped_wait_is_caught(row: str, every: int) -> None:
    """Of zero3, whose waits take half a minute, every fifth: the slow set drops each."""
    for num_syncs, missed in run_ranks(2, _drop_each, row, every, timeout=110):
        assert missed == [], (
            f"{len(missed)} of {num_syncs} waits are not needed, or their absence is not seen"
        )
