"""Late ranks, dead ranks, short memory, races: what must be an error, and what must not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import pytest

from tests.support import transport_failures as failures
from tests.support.harness import run_ranks, spawn_ranks
from tests.support.transports import MAPPED, PAIRED, Spec

SHM2, SHM4 = Spec("shm2", 2, "shared_memory"), Spec("shm4", 4, "shared_memory")
GLOO2, MIXED4 = Spec("gloo2", 2, "gloo"), Spec("mixed4", 4, "mixed", host_size=2)
TWO_LEVEL4 = Spec("two_level4", 4, "mixed", host_size=2, node_size=2, two_level=True)
by_label = pytest.mark.parametrize("spec", [*PAIRED, TWO_LEVEL4], ids=lambda spec: spec.label)
mapped = pytest.mark.parametrize("spec", MAPPED, ids=lambda spec: spec.label)


@by_label
def test_opposite_order_with_a_pool_of_one_does_not_deadlock(spec: Spec) -> None:
    num_slots = run_ranks(
        spec.world_size, failures.opposite_order_needs_one_buffer, spec, timeout=30
    )
    if spec.name == "shared_memory":
        assert num_slots == [1] * spec.world_size


def test_a_rank_that_blocks_elsewhere_ahead_of_the_others_does_not_end_them() -> None:
    ran = run_ranks(2, failures.a_rank_ahead_leaves_for_a_collective, SHM2, timeout=30)
    assert ran == [1, 2]


def test_a_waiting_rank_sleeps_also_where_it_serves_another_transport() -> None:
    looks = run_ranks(2, failures.looks_while_waiting, SHM2, timeout=30)
    assert looks[1] < 60  # some twenty: at first, ten times a second, and at the end


def test_a_slow_rank_costs_neither_copies_nor_slots() -> None:
    assert run_ranks(2, failures.a_slow_rank_costs_no_copies, SHM2, timeout=30) == [(0, 1), (0, 1)]


def test_ranks_stuck_on_one_slow_rank_need_no_more_slots() -> None:
    results = run_ranks(4, failures.a_slow_rank_costs_no_copies, SHM4, timeout=30)
    assert [slots for _, slots in results] == [1] * 4


@pytest.mark.parametrize("spec", [GLOO2, SHM2, SHM4, MIXED4], ids=lambda spec: spec.label)
def test_a_late_rank_is_named_with_its_key_and_all_can_go_on(spec: Spec) -> None:
    run_ranks(spec.world_size, failures.a_late_rank_is_named, spec, timeout=30)


@pytest.mark.parametrize(
    ("spec", "operation"),
    [
        (SHM2, 0),
        pytest.param(SHM2, 3, marks=pytest.mark.slow),
        (GLOO2, 2),
        pytest.param(MIXED4, 1, marks=pytest.mark.slow),
        pytest.param(TWO_LEVEL4, 0, marks=pytest.mark.slow),
        pytest.param(TWO_LEVEL4, 1, marks=pytest.mark.slow),
    ],
    ids=lambda value: getattr(
        value,
        "label",
        ("reduce", "gather", "exchange", "begin_write")[value] if isinstance(value, int) else "",
    ),
)
def test_a_dead_rank_is_an_error_before_its_sockets_close(spec: Spec, operation: int) -> None:
    results = spawn_ranks(
        spec.world_size, failures.a_dead_rank_is_an_error, spec, operation, timeout=50
    )
    assert results[-1].exitcode == -9
    for result in results[:-1]:
        assert result.result is not None and result.result < failures.SOCKETS_LIVE_ON_S, result


@pytest.mark.parametrize(
    "spec",
    [GLOO2, SHM2, MIXED4, TWO_LEVEL4, Spec("native2", 2, "nccl")],
    ids=lambda spec: spec.label,
)
def test_payloads_of_different_calls_never_meet_and_both_calls_are_named_on_every_rank(
    spec: Spec,
) -> None:
    said = run_ranks(
        spec.world_size, failures.payloads_of_different_calls_never_meet, spec, timeout=30
    )
    assert all("rank 0 is in zs.save(), rank 1 is in zs.load()" in text for text in said), said


@pytest.mark.parametrize(
    "spec", [SHM2, SHM4, GLOO2, Spec("gloo3", 3, "gloo")], ids=lambda spec: spec.label
)
def test_ranks_that_wait_for_each_other_in_different_calls_are_told_at_once_on_every_rank(
    spec: Spec,
) -> None:
    said = run_ranks(
        spec.world_size, failures.waiting_in_different_calls_is_told_at_once, spec, timeout=30
    )
    for texts in said:
        others = (
            "the reduce of layer.7",
            "the gather of layer.7",
            "exchange()",
            "the writing of new weights",
        )
        assert len(texts) == (4 if spec.name == "shared_memory" else 3), said
        for text, other in zip(texts, others[: len(texts)], strict=True):
            assert "rank 0 is in zs.save()" in text and re.search(
                rf"rank \d is in {re.escape(other)}", text
            ), (text, other)


def test_a_rank_whose_exchange_can_end_is_told_of_different_calls_in_its_next_one() -> None:
    results = run_ranks(4, failures.the_next_call_is_told_where_a_payload_is_late, SHM4, timeout=30)
    assert [exchanged for exchanged, _ in results] == [[bytes([rank]) for rank in range(4)]] * 4
    assert all(
        "rank 0 is in zs.save()" in said and "a broadcast from rank 0" in said
        for _, said in results
    ), results


def test_nothing_is_left_after_kill_9() -> None:
    before = _files()
    results = spawn_ranks(2, failures.kill_yourself_with_memory_mapped, SHM2, timeout=30)
    assert [result.exitcode for result in results] == [-9, -9]
    left, deadline = _files() - before, time.monotonic() + 300
    while (left := left & _files()) and time.monotonic() < deadline:
        time.sleep(0.1)  # tests that run beside this one have files of their own for a while
    assert not left
    names = {
        name.strip("\0")
        for result in results
        for name in result.stdout.split()
        if "zeroshard-" in name
    }
    assert names
    with open("/proc/net/unix") as sockets:
        text = sockets.read()
    assert not [name for name in names if name in text]


def _files() -> set[str]:
    return {
        f"{folder}/{name}"
        for folder in ("/dev/shm", "/tmp")
        for name in os.listdir(folder)
        if "zeroshard" in name or "torch_" in name
    }


@mapped
def test_memory_and_descriptors_come_back_and_dev_shm_is_not_used(spec: Spec) -> None:
    run_ranks(spec.world_size, failures.memory_and_descriptors_come_back, spec, timeout=30)


@by_label
@pytest.mark.parametrize("slow", [0, 1])
def test_a_read_never_sees_half_a_write(spec: Spec, slow: int) -> None:
    if spec.name != "shared_memory":
        slow = -1  # two-sided gathers are made by all ranks together
    run_ranks(spec.world_size, failures.a_read_never_sees_half_a_write, spec, slow, timeout=30)


def test_publishing_during_a_copy_is_noticed() -> None:
    spec = Spec("shm2_copying", 2, "shared_memory", alias=False)
    assert run_ranks(2, failures.writing_without_begin_write_is_noticed, spec, timeout=30)[0]


@by_label
def test_windows_that_differ_are_refused_by_all_ranks(spec: Spec) -> None:
    run_ranks(spec.world_size, failures.different_windows_are_refused_by_all, spec, timeout=30)


@mapped
@pytest.mark.parametrize("replicated", [False, True])
@pytest.mark.parametrize("short", [0, 1])
def test_memory_short_on_one_rank_is_an_error_on_all(
    spec: Spec, replicated: bool, short: int
) -> None:
    run_ranks(
        spec.world_size,
        failures.memory_short_on_one_rank_is_an_error_on_all,
        spec,
        replicated,
        short,
        timeout=30,
    )


def test_without_memfd_on_one_rank_all_use_gloo_and_say_so_once() -> None:
    results = run_ranks(2, failures.without_memfd_all_use_gloo, timeout=30)
    assert [name for name, _ in results] == ["gloo", "gloo"]
    assert [len(records) for _, records in results] == [1, 0]
    assert "rank 1" in results[0][1][0] and "slower" in results[0][1][0]


IN_A_CALL = """
import contextlib, datetime, time
import torch.distributed as dist
from zeroshard.comm.cpu.gloo_peers import Waiters

store = dist.TCPStore("127.0.0.1", 0, 1, True)
other = store.clone()

def look():
    with contextlib.suppress(RuntimeError):
        other.wait(["never set"], datetime.timedelta(seconds=0.2))

waiters = Waiters()
waiters.run(look)
time.sleep(0.05)
"""


def test_a_thread_inside_a_call_of_the_store_does_not_abort_the_end_of_a_program() -> None:
    command = [sys.executable, "-c", IN_A_CALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
