"""The pretended device itself: it shows races, gives the CPU's bits, and waits where CUDA waits."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.device.worker import Worker, WorkerError

SCHEDULES = ("threads", "fifo", "random", "compute_first", "compute_last")
CASES = "tests.device.cases"
EVERY_SCHEDULE = pytest.mark.parametrize("schedule", SCHEDULES)


@pytest.fixture(scope="module")
def device() -> Iterator[Worker]:
    worker = Worker(CASES)
    yield worker
    worker.close()


@EVERY_SCHEDULE
def test_waits_and_holds_give_the_right_numbers(device: Worker, schedule: str) -> None:
    for seed in range(4 if schedule == "random" else 1):
        assert device.call("join", schedule, seed, True) == 8.0
        assert device.call("dropped", schedule, seed, "reference") == 3.0
        assert device.call("dropped", schedule, seed, "record_stream") == 3.0
        assert device.call("copied", schedule, seed, True) == 5.0
        assert device.call("pinned_again", schedule, seed) == 3.0


def test_a_missing_join_is_found(device: Worker) -> None:
    assert device.call("join", "compute_first", 0, False) == 1.0
    assert 1.0 in {device.call("join", "random", seed, False) for seed in range(4)}


def test_a_block_that_is_dropped_too_early_is_found(device: Worker) -> None:
    assert device.call("dropped", "threads", 0, "nothing") == 99.0
    assert device.call("dropped", "compute_first", 0, "nothing") == 99.0
    assert any(device.call("dropped", "random", seed, "nothing") != 3.0 for seed in range(4))


@EVERY_SCHEDULE
def test_a_pinned_copy_that_is_read_too_early_is_found(device: Worker, schedule: str) -> None:
    assert math.isnan(device.call("copied", schedule, 0, False))


def test_a_lazy_schedule_repeats_by_its_seed(device: Worker) -> None:
    orders = [device.call("order_of_random", seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


def test_a_stream_or_a_device_can_be_slow(device: Worker) -> None:
    slow, fast = device.call("delayed", False)
    assert slow >= 0.08 > fast
    assert min(device.call("delayed", True)) >= 0.08


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
def test_memory_devices_and_generators_behave_as_an_accelerators(device: Worker, name: str) -> None:
    device.call(name)


@pytest.mark.parametrize(
    "name", ["convolution", "dense", "attention", "autocast", "optimizers", "scaler"]
)
def test_operators_give_the_bits_of_the_cpu(device: Worker, name: str) -> None:
    device.call(name)


def test_operators_that_read_numbers_make_the_host_wait(device: Worker) -> None:
    waits = device.call("operators_that_read")
    assert {name for name, count in waits.items() if count} == {
        "aten::_index_put_impl_",
        "aten::_local_scalar_dense",
        "aten::index.Tensor_out",
        "aten::nonzero",
    }


def test_a_step_of_a_transformer_makes_the_host_wait_for_nothing(device: Worker) -> None:
    assert device.call("waits_of_a_step") == {}


def test_an_error_in_a_worker_has_its_traceback(device: Worker) -> None:
    with pytest.raises(
        WorkerError, match=r"set_schedule[\s\S]*no schedule 'later': one of threads"
    ):
        device.call("join", "later", 0, True)


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


def test_collectives_give_the_numbers_of_gloo(tmp_path: Path) -> None:
    ranks = [Worker(CASES) for _ in range(2)]
    try:
        for rank, worker in enumerate(ranks):
            worker.start("collectives", rank, len(ranks), str(tmp_path))
        for worker in ranks:
            worker.result()
    finally:
        for worker in ranks:
            worker.close()
