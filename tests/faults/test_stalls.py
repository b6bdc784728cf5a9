"""Stalls where no host waits for collectives (NCCL's transport, here over gloo): the error names
the ranks and what each has entered last, and a rank that waits for its device is ended.
"""

from __future__ import annotations

import gc
import os
import re
import threading
import time
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from tests.support import inside
from tests.support.harness import is_running, on_ranks, run_ranks, spawn_ranks
from tests.support.training import Sharded, batch, logged, make_sharded, take_steps
from zeroshard.errors import PeerLostError, StallError
from zeroshard.runtime.streams import Streams
from zeroshard.sharding import api

STALL_S = 1.5


class Device(Streams):
    """Lanes on which collectives are under way until `hangs` is False."""

    hangs = False

    def is_idle(self) -> bool:
        return not self.hangs


def _trained(rank: int, row: str = "zero2") -> Sharded:
    """Return a sharded model that has taken a step."""
    parts = make_sharded(row, "nccl", stall_timeout_s=STALL_S)
    take_steps(rank, 1, *parts)
    return parts


def _sleeps_before_its_step(rank: int, world: int) -> str:
    """Rank 1 comes to its second step late; return what the ranks said."""
    model, optimizer, engine = _trained(rank)
    model(*batch(rank, 1)).backward()
    said = "nothing"
    if rank == 1:
        time.sleep(2 * STALL_S)
    else:
        begin = time.monotonic()
        with pytest.raises(StallError) as caught:
            optimizer.step()
        said = f"{caught.value}"
        assert time.monotonic() - begin < 2 * STALL_S
    engine.reset()
    take_steps(rank, 1, model, optimizer, engine)  # over gloo ranks can go on
    engine.close()
    return said


def test_a_rank_that_sleeps_is_named_with_the_unit_that_it_entered_last() -> None:
    said, _ = run_ranks(2, _sleeps_before_its_step, timeout=40)
    assert re.search(
        r"^exchange of optimizer.step\(\).*: rank\(s\) \[1\] did not come within", said
    )
    # the last unit of a backward is the first of the model, and its gradient is reduced
    started = r"\(collectives started last: (gather \S+, )*reduce (\S+, reduce )*\S+\)"
    assert re.search(
        rf"Entered last: .*rank 1 reduce of unit '\S+' in step 1 {started}, [123] s ago", said
    ), said
    assert re.search(rf"rank 0 step in step 1 {started}, [012] s ago", said), said
    assert "nothing goes on after this" in said, said


def _waits_for_its_device(rank: int, world: int) -> str | None:
    """Rank 0 waits in a read of its device that never ends; return what rank 1 says, which is
    still there when that one has ended.
    """
    device = Device()
    api.make_streams = lambda _: device  # type: ignore[assignment]
    _, _, engine = _trained(rank, "zero3")
    pids: list[Any] = [None] * world
    dist.all_gather_object(pids, os.getpid())
    device.hangs = rank == 0
    while rank == 0 or is_running(pids[0]):
        time.sleep(0.05)
    with pytest.raises(PeerLostError) as caught:
        inside.exchange(engine, b"")
    return str(caught.value)


def test_a_rank_that_waits_for_its_device_is_ended_and_the_others_lose_it() -> None:
    waits, computes = spawn_ranks(2, _waits_for_its_device, timeout=60)
    assert waits.exitcode == StallError.exit_code == 71, waits
    assert re.search(
        r"StallError: rank 0: collectives have not ended on the device \d\.\d s after step in"
        r" step 0: a rank did not come. Entered last: ranks 0, 1 step in step 0, \d s ago",
        waits.stderr,
    ), waits.stderr
    assert "nothing goes on after this" in waits.stderr
    assert computes.exitcode == 0, computes  # its collectives have ended
    assert "rank(s) [0] ended without finishing" in computes.result, computes


@on_ranks(2, timeout=40)
def test_a_run_that_is_slow_and_moves_goes_on(rank: int) -> None:
    """Half of each step is slow on one rank, the other half on the other, and lanes are busy."""
    device, original = Device(), api.make_streams
    device.hangs = True
    api.make_streams = lambda _: device  # type: ignore[assignment]
    try:
        model, optimizer, engine = make_sharded("zero3", "nccl", stall_timeout_s=2.0)
    finally:
        api.make_streams = original
    losses = []
    for step in range(5):
        time.sleep(0.6 * (rank == step % 2))
        loss = model(*batch(rank, step))
        loss.backward()
        time.sleep(0.6 * (rank != step % 2))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    device.hangs = False
    time.sleep(3.5)  # computes for long, with nothing under way
    losses += take_steps(rank, 1, model, optimizer, engine)
    engine.close()
    assert len(losses) == 6 and torch.tensor(losses).isfinite().all(), losses


def _warnings(rank: int, world: int, stall_timeout_s: float) -> list[str]:
    """Return what shard() logs."""
    with logged() as told:
        make_sharded("zero2", "nccl", stall_timeout_s=stall_timeout_s)[2].close()
    return told


def test_a_backend_that_would_end_the_job_first_is_told_once() -> None:
    # the pool's group ends a collective after 300 s
    (told,), none = run_ranks(2, _warnings, 300.0, timeout=40)
    assert "process group's timeout of 300 s is not above stall_timeout_s of 300 s" in told
    assert not none
    assert run_ranks(2, _warnings, 280.0, timeout=40) == [[], []]


@on_ranks(2, timeout=40)
def test_groups_inside_and_between_nodes_have_the_jobs_timeout(rank: int) -> None:
    """Look at the timeouts of the groups of all levels, and how long ranks wait for each other
    before and after the first step, and where the user has said it.
    """
    waits, options = [], {"comm": {"transport": "nccl", "node_size": 1}}
    for stall_timeout_s in (None, STALL_S):
        options["stall_timeout_s"] = stall_timeout_s  # type: ignore[assignment]
        model, optimizer, engine = make_sharded("hfsdp", "nccl", **options)
        levels: Any = inside.levels(engine)
        cpu = torch.device("cpu")
        found = {one._group._get_backend(cpu).options._timeout.total_seconds() for one in levels}
        waits.append(levels.flat.control.stall_timeout_s)
        take_steps(rank, 2, model, optimizer, engine)
        waits.append(levels.flat.control.stall_timeout_s)
        engine.close()
    assert found == {300.0}  # the pool's, not torch's default
    # no more than the backend lets it, and what the user has said
    assert waits == [300.0, 300.0, STALL_S, STALL_S]


def _comes_late(rank: int, world: int) -> str:
    """Rank 1 does not call shard(); the group itself would wait for minutes."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    if rank == 1:
        time.sleep(6)
        return ""
    with pytest.raises(StallError) as caught:
        make_sharded("zero2", mesh=mesh, stall_timeout_s=STALL_S)
    return str(caught.value)


def test_shard_over_a_mesh_waits_by_its_own_limit_and_names_who_did_not_come() -> None:
    waited, _ = spawn_ranks(2, _comes_late, timeout=60)
    assert waited.result == (
        f"shard(): rank(s) [1] did not come within {STALL_S:g} s; see what they are doing, or raise"
        " stall_timeout_s if they are only slow"
    ), waited


@on_ranks(2, timeout=40)
def test_an_engine_that_is_dropped_is_watched_no_longer() -> None:
    def watching() -> int:
        return sum(thread.name == "zeroshard-stalls" for thread in threading.enumerate())

    engine: zs.Engine | None = make_sharded("zero2", "nccl", stall_timeout_s=STALL_S)[2]
    assert watching() == 1
    del engine
    gc.collect()
    deadline = time.monotonic() + 300
    while watching() and time.monotonic() < deadline:
        time.sleep(0.05)
    found = watching()
    assert found == 0
