"""Ranks that join a job on pretended devices: real processes, as a launcher starts them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.launched import PATHS

BEGIN = """
import logging, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import tests.device.zsim
import zeroshard as zs
from zeroshard.comm import job
rank = int(os.environ["RANK"])
"""


def _run(text: str, ranks: Sequence[Mapping[str, str]], *, timeout: float = 100) -> list[str]:
    """Run a program on `ranks` with these variables; return what each has written and its code."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": PATHS}
    world = {"WORLD_SIZE": str(len(ranks))}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN + dedent(text)],
            env=os.environ | common | world | {"RANK": str(rank)} | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, own in enumerate(ranks)
    ]
    try:
        written = [process.communicate(timeout=timeout)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    noise = re.compile(r"(\[rank\d\]:)?\[[WE]|frame #|Exception raised from|<omitting|$")
    own = [
        "".join(f"{line}\n" for line in text.splitlines() if not noise.match(line))
        for text in written
    ]
    return [f"{text}code {one.returncode}" for text, one in zip(own, started, strict=True)]


OWN = [{"ZSIM_DEVICES": "1", "ZSIM_FIRST": str(rank), "LOCAL_RANK": str(rank)} for rank in range(3)]
TOGETHER = """
    zs.init_distributed()
    print(dist.get_backend_config(), torch.zsim.current_device(), dist.group.WORLD.bound_device_id)
    if rank:  # as a library makes a group of some ranks; rank 0 takes no part
        group = dist.new_group([1, 2], use_local_synchronization=True)
        total = torch.ones(1, device="zsim")
        dist.all_reduce(total, group=group)
        print(total.item())
    destroyed = dist.destroy_process_group
    dist.destroy_process_group = lambda: (print("destroyed"), destroyed())
"""


def test_ranks_that_see_their_own_device_alone_join_its_backend_and_leave_in_order() -> None:
    first, *others = _run(TOGETHER, OWN)
    assert first == "cpu:gloo,zsim:zccl 0 None\ndestroyed\ncode 0"
    assert others == ["cpu:gloo,zsim:zccl 0 None\n2.0\ndestroyed\ncode 0"] * 2


ABSENT = """
    if rank == 1:
        sys.exit(0)
    Path(os.environ["READY"], str(rank)).touch()
    while len(os.listdir(os.environ["READY"])) < 2:  # one may be slower to import torch
        time.sleep(0.01)
    try:
        zs.init_distributed(join_timeout_s=4)
    except (zs.StallError, zs.PeerLostError) as error:
        print(error)
"""


@pytest.mark.parametrize("absent", [0, 1])
def test_who_does_not_come_is_named(absent: int, tmp_path: Path) -> None:
    text = ABSENT.replace("rank == 1", f"rank == {absent}")
    written = _run(text, [{**own, "READY": str(tmp_path)} for own in OWN])
    assert written[absent] == "code 0"
    named = f"init_distributed(): rank(s) [{absent}] did not come within 4 s"
    lost = "the process where all ranks meet, of rank 0 or of its launcher, has ended"
    told = [one for rank, one in enumerate(written) if rank != absent]
    assert named in told[0] and (named in told[1] or lost in told[1]), written


LEAVES = """
    job._LEAVE_S = 3.0
    zs.init_distributed()
    destroyed = dist.destroy_process_group
    dist.destroy_process_group = lambda: (print("destroyed"), destroyed())
    value = torch.ones(1, device="zsim")
    way = os.environ["WAY"]
    if way == "raises" and rank == 1:
        raise ValueError("no more")
    if way == "hangs" and rank == 0:  # a collective that no other rank comes to
        dist.all_reduce(value, async_op=True)
    if way == "itself":
        dist.destroy_process_group()
    if way == "its own":
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method="env://")
    print("ends")
"""


@pytest.mark.parametrize(
    ("way", "counts"),
    [("raises", [0, 0]), ("hangs", [0, 0]), ("itself", [1, 1]), ("its own", [1, 1])],
)
def test_the_group_is_destroyed_at_the_end_by_all_or_by_none(way: str, counts: list[int]) -> None:
    written = _run(LEAVES, [{**own, "WAY": way, "ZSIM_STALL_S": "1"} for own in OWN[:2]])
    assert [text.count("destroyed\n") for text in written] == counts, written
    assert ("ValueError" in written[1]) is (way == "raises"), written
    assert written[0].count("ends\n") == 1, written
