"""The pretended device itself: it shows races, gives the CPU's bits, and waits where CUDA waits."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from typing import Any

import pytest

from tests.device.meetings import Call, strayed, unmet
from tests.support.harness import RankError, run_ranks

SCHEDULES = ("threads", "fifo", "random", "compute_first", "compute_last")
CASES = "tests.device.cases"  # which loads the device, in processes that run nothing else
EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)


def _named(rank: int, world: int, name: str, *args: Any) -> Any:
    """Call a function of tests/device/cases.py, which loads the device."""
    return getattr(importlib.import_module(CASES), name)(*args)


def call(name: str, *args: Any) -> Any:
    (value,) = run_ranks(1, _named, name, *args, device=CASES)
    return value


@EVERY_SCHEDULE
def test_waits_and_holds_give_the_right_numbers(schedule: str) -> None:
    for seed in range(4 if schedule == "random" else 1):
        assert call("join", schedule, seed, True) == 8.0
        assert call("dropped", schedule, seed, "reference") == 3.0
        assert call("dropped", schedule, seed, "record_stream") == 3.0
        assert call("copied", schedule, seed, True) == 5.0
        assert call("pinned_again", schedule, seed) == 3.0


def test_a_missing_join_is_found() -> None:
    assert call("join", "compute_first", 0, False) == 1.0
    assert 1.0 in {call("join", "random", seed, False) for seed in range(4)}


def test_a_block_that_is_dropped_too_early_is_found() -> None:
    assert call("dropped", "threads", 0, "nothing") == 99.0
    assert call("dropped", "compute_first", 0, "nothing") == 99.0
    assert any(call("dropped", "random", seed, "nothing") != 3.0 for seed in range(4))


@EVERY_SCHEDULE
def test_a_pinned_copy_that_is_read_too_early_is_found(schedule: str) -> None:
    assert math.isnan(call("copied", schedule, 0, False))


def test_a_lazy_schedule_repeats_by_its_seed() -> None:
    orders = [call("order_of_random", seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_a_stream_or_a_device_can_be_slow() -> None:
    slow, fast = call("delayed", False)
    assert slow >= 0.08 > fast
    assert min(call("delayed", True)) >= 0.08


@pytest.mark.parametrize(
    "name",
    [
        "memory_is_reused_in_stream_order",
        "statistics",
        "limit",
        "storages_and_files",
        "host_memory",
        "two_devices",
        "random_numbers",
        "a_failed_kernel_is_raised_at_the_next_wait",
    ],
)
def test_memory_devices_and_generators_behave_as_an_accelerators(name: str) -> None:
    call(name)


@pytest.mark.parametrize(
    "name", ["convolution", "dense", "attention", "autocast", "optimizers", "scaler", "shapes"]
)
def test_operators_give_the_bits_of_the_cpu(name: str) -> None:
    call(name)


def test_operators_that_read_numbers_make_the_host_wait() -> None:
    waits = call("operators_that_read")
    assert {name for name, count in waits.items() if count} == {
        "aten::_index_put_impl_",
        "aten::_local_scalar_dense",
        "aten::index.Tensor_out",
        "aten::nonzero",
    }


def test_a_step_of_a_transformer_makes_the_host_wait_for_nothing() -> None:
    assert call("waits_of_a_step") == {}


def test_an_error_on_the_device_has_its_traceback() -> None:
    with pytest.raises(RankError, match=r"set_schedule[\s\S]*no schedule 'later': one of threads"):
        call("join", "later", 0, True)


@pytest.mark.parametrize(
    ("access", "verb"),
    [("ctypes.c_float.from_address(where).value", "read"), ("ctypes.memset(where, 0, 4)", "wrote")],
)
def test_a_host_that_touches_device_memory_ends_by_name(access: str, verb: str) -> None:
    program = (
        "import ctypes, torch, tests.device.zsim\n"
        "where = torch.empty(4, device='zsim').data_ptr()\n"
        f"{access}\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -11
    assert f"zsim: the host {verb} device memory at 0x" in done.stderr
    assert "16 bytes allocated by aten::empty: call .cpu()" in done.stderr


def _together(rank: int, world: int, name: str) -> None:
    getattr(importlib.import_module(CASES), name)(rank, world)


def test_lanes_run_on_while_the_host_waits_for_a_peer_that_waits_for_them() -> None:
    run_ranks(2, _together, "the_host_waits_for_a_peer", device=CASES)


def test_collectives_give_the_numbers_of_gloo() -> None:
    run_ranks(2, _together, "collectives", device=CASES)


@pytest.mark.parametrize(
    "name",
    [
        "calls_meet_by_their_order_alone",
        "only_dtypes_of_nccl_are_taken",
        "a_refused_group_of_calls_ends",
        "collectives_in_another_order_are_seen",
    ],
)
def test_collectives_have_the_habits_of_nccl(name: str) -> None:
    run_ranks(2, _together, name, device=CASES)


A, B, C = (Call("gather", group, 2, "allgather 16", "Byte", group) for group in "abc")
SUM = Call("reduce", "a", 2, "reduce_scatter 16", "Float", "reduce of c")


@pytest.mark.parametrize(
    ("logs", "found"),
    [
        ([[A, B, SUM], [A, B, SUM]], ""),
        ([[A, B], [A], [B]], ""),  # each communicator has ranks of its own
        ([[A, B], [B, A]], "no rank can go on"),
        ([[A, B], [B, C], [C, A]], "no rank can go on"),  # though no two ranks differ
        ([[A, SUM], [A]], "no rank can go on"),
        ([[A], [SUM]], "calls that meet are not the same"),
        ([[A], [A._replace(dtype="Float")]], "calls that meet are not the same"),
        ([[A], [A._replace(lane="compute")]], "calls that meet are not the same"),
    ],
)
def test_calls_meet_where_all_ranks_can_take_their_logs_in_order(
    logs: list[list[Call]], found: str
) -> None:
    assert unmet(logs).partition("\n")[0] == found


def test_calls_of_a_unit_are_on_one_lane() -> None:
    assert not strayed([A, B, SUM, A])
    assert strayed([SUM._replace(lane="compute")]).startswith("not on reduce: ")
    assert strayed([A, A._replace(lane="compute")]).startswith("not on gather: ")
