"""Process groups that ``shard()`` connects, and refuses, on pretended devices."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support import inside
from tests.support.harness import on_ranks
from tests.support.training import logged
from zeroshard.comm import groups, select

_DEVICE = "tests.device.zsim"
MIB = 1 << 20


def _sharded(**options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to("zsim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zs.shard(model, optimizer, **{"stall_timeout_s": 20, **options})
    return model, optimizer, engine


@on_ranks(2, device=_DEVICE, timeout=60)
def test_groups_are_connected_before_weights_are_allocated_and_their_bytes_are_told() -> None:
    """Look at what shard() connects, in the order of the allocations, and its bytes."""
    free, connect, seen = torch.zsim.mem_get_info, groups.all_gather_single, []  # type: ignore[attr-defined]
    cost = 0

    def counted(device: Any = None) -> tuple[int, int]:
        return free(device)[0] - cost, free(device)[1]

    def gathered(out: torch.Tensor, mine: torch.Tensor, **options: Any) -> Any:
        nonlocal cost
        if mine.device.type == "cpu":  # a message
            return connect(out, mine, **options)
        cost += 3 * MIB
        seen.append((options["group"].size(), torch.zsim.memory_allocated() < 4096))  # type: ignore[attr-defined]
        return connect(out, mine, **options)

    torch.zsim.mem_get_info, groups.all_gather_single = counted, gathered  # type: ignore[attr-defined]
    groups._taken.clear()
    try:
        for _ in range(2):  # the second has new groups of its nodes, and the same one of all ranks
            engine = _sharded(policy="hfsdp", comm=zs.Comm(node_size=1))[2]
            engine.close()
        process = zs.memory_table().process
        table = str(zs.memory_table())
    finally:
        torch.zsim.mem_get_info, groups.all_gather_single = free, connect  # type: ignore[attr-defined]
    line = next((one for one in table.splitlines() if "connections of process groups" in one), "")
    seen, counted, line = seen, [process.device_connections], line
    assert seen[:3] == [(2, True), (1, True), (2, True)]
    assert [size for size, _ in seen[3:]] == [1, 2]
    assert counted[0] is not None and counted[0] >= 9 * MIB
    assert "MB" in line, line


@on_ranks(2, device=_DEVICE, timeout=60)
def test_reduces_have_a_communicator_of_their_own_where_asked() -> None:
    """Look at the groups of gathers and of reduces in a step, at stage 3 and in two levels."""
    from tests.device import zsim

    seen = []
    for options in ({}, {"node_size": 1, "hierarchical": True}):
        comm = zs.Comm(separate_reduce_group=True, **options)
        model, optimizer, engine = _sharded(policy="zero3", comm=comm)
        zsim.take_collectives()
        engine.backward(model(torch.ones(2, 8, device="zsim")).sum())
        optimizer.step()
        kinds = ("allgather", "reduce_scatter", "allreduce")
        groups_of: dict[str, set[str]] = {kind: set() for kind in kinds}
        for call in zsim.take_collectives():
            _, group, size, kind, *_ = call.split("|")
            if int(size) > 1:
                groups_of[kind.split()[0]].add(group)
        seen.append(groups_of)
        engine.close()
    flat, deep = seen
    for groups_of in (flat, deep):
        assert len(groups_of["allgather"]) == len(groups_of["reduce_scatter"]) == 1
        assert not groups_of["allgather"] & groups_of["reduce_scatter"]
    assert flat["allgather"] != deep["allgather"]
    assert flat["allreduce"] == flat["reduce_scatter"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [("unhandled system error", "ConfigError"), ("Timed out waiting 20000ms", "StallError")],
)
@on_ranks(2, device=_DEVICE, timeout=60)
def test_a_group_that_cannot_be_connected_is_named(text: str, kind: str) -> None:
    def fails(out: torch.Tensor, mine: torch.Tensor, **options: Any) -> Any:
        if mine.device.type == "cpu":  # a message
            return original(out, mine, **options)
        raise RuntimeError(text)

    original, groups.all_gather_single = groups.all_gather_single, fails
    groups._taken.clear()
    try:
        with pytest.raises((zs.ConfigError, zs.StallError)) as caught:
            _sharded(policy="zero3")
    finally:
        groups.all_gather_single = original
    said = f"{type(caught.value).__name__} {caught.value}"
    assert said.startswith(f"{kind} shard(): the group of all ranks, ranks [0, 1] of the job")
    assert text in said and "NCCL_DEBUG=INFO" in said


@on_ranks(2, device=_DEVICE, timeout=60)
def test_ranks_that_forgot_to_set_their_device_are_told_on_every_rank() -> None:
    """Both ranks compute on device 0 of their host, under a group of their own."""
    os.environ["ZSIM_FIRST"] = "0"
    try:
        with pytest.raises(zs.ConfigError) as caught:
            _sharded(policy="zero3")
        _sharded(policy="zero3", comm=zs.Comm(transport="gloo"))[2].close()  # shares it
    finally:
        del os.environ["ZSIM_FIRST"]
    said = str(caught.value)
    assert "rank(s) [0, 1] compute on one device (uuid" in said
    assert "call torch.zsim.set_device(LOCAL_RANK)" in said


@on_ranks(2, device=_DEVICE, timeout=60)
def test_one_queue_for_all_streams_is_told_once(rank: int) -> None:
    queues = {"ZSIM_DEVICE_MAX_CONNECTIONS": "1"}
    with logged() as told, mock.patch.dict(os.environ, queues):
        _sharded(policy="zero3")[2].close()
    told = [one for one in told if "ZSIM_DEVICE_MAX_CONNECTIONS" in one]
    assert len(told) == (rank == 0)
    assert rank or "ZSIM_DEVICE_MAX_CONNECTIONS=1" in told[0]


@on_ranks(2, device=_DEVICE, timeout=60)
def test_ranks_wait_for_900_s_until_the_first_step_is_over_then_for_300_s() -> None:
    """As `_timeouts`, of a backend that ends nothing for long."""
    select.timeout_of = lambda *_: None  # type: ignore[assignment]
    try:
        model, optimizer, engine = _sharded(stall_timeout_s=None, policy="zero3")
        control: Any = inside.levels(engine).flat.control
        waits = [control.stall_timeout_s, control.dispatcher.links.stall_timeout_s]
        for _ in range(2):
            model(torch.ones(2, 8, device="zsim")).sum().backward()
            optimizer.step()
            waits += [control.stall_timeout_s, control.dispatcher.links.stall_timeout_s]
        engine.close()
    finally:
        select.timeout_of = groups.timeout_of
    assert waits == [900.0, 900.0, 300.0, 300.0, 300.0, 300.0]
