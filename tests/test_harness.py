"""The harness itself: results in rank order, every failure named, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

import zeroshard
from tests.device import omission
from tests.support import harness
from tests.support.harness import RankError, is_running, on_ranks, run_ranks, spawn_ranks
from tests.support.pretended_device import site_of_caller
from tests.support.sync_census import Census


def _rank_and_sum(rank: int, world_size: int, offset: int) -> tuple[int, float]:
    value = torch.tensor([float(rank + offset)])
    dist.all_reduce(value)
    return rank, value.item()


def _sleep(rank: int, world_size: int, seconds: float) -> None:
    time.sleep(seconds)


def _spin_on(rank: int, world_size: int, core: set[int]) -> float:
    """Return for how long this rank waited while it needed the core for half a second."""
    os.sched_setaffinity(0, core)
    this = [SimpleNamespace(process=SimpleNamespace(pid=os.getpid()))]
    before, begin = harness._kept_waiting_s(this), time.process_time()
    while time.process_time() - begin < 0.5:
        pass
    return harness._kept_waiting_s(this) - before


def _has_imported(rank: int, world_size: int, name: str) -> bool:
    return name in sys.modules


def _pid(rank: int, world_size: int) -> int:
    return os.getpid()


def _fail_on(rank: int, world_size: int, failing: int) -> None:
    if rank == failing:
        raise ValueError(f"rank {rank} says no")


def _fail_while_others_wait(rank: int, world_size: int) -> None:
    if rank == 1:
        raise KeyError("gone")
    dist.barrier()


def _hang(rank: int, world_size: int) -> None:
    if rank == 1:
        _sleep_in_a_function_with_this_name()


def _sleep_in_a_function_with_this_name() -> None:
    time.sleep(600)


def _die(rank: int, world_size: int, dying: int) -> str:
    print(f"hello from {rank}")
    if rank == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def _assert_something(rank: int, world_size: int) -> None:
    answer = 41 + rank
    assert answer == 42


def _change_the_environment(rank: int, world_size: int) -> None:
    os.environ["ZS_TEST_LEFTOVER"] = "1"
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)


def _read_the_environment(rank: int, world_size: int) -> tuple[str | None, int, torch.dtype]:
    return os.environ.get("ZS_TEST_LEFTOVER"), torch.get_num_threads(), torch.get_default_dtype()


def _leave_the_group(rank: int, world_size: int) -> None:
    dist.destroy_process_group()


def _seed_and_pid(rank: int, world_size: int) -> tuple[int, int]:
    return hash("a string"), os.getpid()


def _read_variable(rank: int, world_size: int, name: str) -> str | None:
    return os.environ.get(name)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_results_come_in_rank_order_from_one_group(world_size: int) -> None:
    expected = sum(rank + 10 for rank in range(world_size))
    assert run_ranks(world_size, _rank_and_sum, 10) == [
        (rank, expected) for rank in range(world_size)
    ]


def test_a_pool_keeps_its_processes_between_calls() -> None:
    assert run_ranks(2, _pid) == run_ranks(2, _pid)


def test_an_error_names_the_rank_its_type_and_message_and_keeps_the_pool() -> None:
    pids = run_ranks(2, _pid)
    with pytest.raises(RankError, match="rank 1 says no") as caught:
        run_ranks(2, _fail_on, 1)
    assert (caught.value.rank, caught.value.type_name, caught.value.message) == (
        1,
        "ValueError",
        "rank 1 says no",
    )
    assert list(caught.value.errors) == [1]
    assert "_fail_on" in caught.value.errors[1].traceback
    assert run_ranks(2, _pid) == pids


def test_a_rank_that_waits_for_a_failed_one_is_ended_and_the_first_failure_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(harness, "PEER_GRACE_S", 0.5)
    pids = run_ranks(2, _pid)
    with pytest.raises(RankError) as caught:
        run_ranks(2, _fail_while_others_wait)
    assert caught.value.type_name == "KeyError"
    assert caught.value.errors[0].type_name == "Timeout"
    assert "_fail_while_others_wait" in caught.value.errors[0].traceback
    assert not any(map(is_running, pids))
    assert run_ranks(2, _rank_and_sum, 0) == [(0, 1.0), (1, 1.0)]


def test_a_hang_shows_the_stack_of_the_rank_that_hangs() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, _hang, timeout=1)
    assert list(caught.value.errors) == [1]
    assert "_sleep_in_a_function_with_this_name" in caught.value.errors[1].traceback


def test_a_dead_rank_is_an_error_with_its_signal_and_a_new_pool_follows() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, _die, 0)
    assert (caught.value.rank, caught.value.message) == (0, "signal SIGKILL")
    assert run_ranks(2, _rank_and_sum, 0) == [(0, 1.0), (1, 1.0)]


def test_a_failed_assert_shows_the_values_beside_it() -> None:
    with pytest.raises(RankError, match="answer = 41"):
        run_ranks(2, _assert_something)


@pytest.mark.parametrize("world", [1, 3])
@on_ranks()
def test_a_test_may_run_on_ranks_and_take_pytests_arguments(
    rank: int, world: int, tmp_path: Path
) -> None:
    assert (rank, world) == (dist.get_rank(), dist.get_world_size())
    assert tmp_path.is_dir()


@on_ranks(2)
def _on_ranks(rank: int, failing: int, returned: Any) -> Any:
    assert rank != failing
    return returned


def test_a_test_on_ranks_fails_where_one_rank_does_or_returns_what_nobody_looks_at() -> None:
    _on_ranks(failing=2, returned=None)
    with pytest.raises(RankError, match="failing = 1") as failed:
        _on_ranks(failing=1, returned=None)
    assert list(failed.value.errors) == [1]
    with pytest.raises(RankError, match="_on_ranks returns what nobody looks at: False"):
        _on_ranks(failing=2, returned=False)


def test_settings_are_put_back_after_each_call() -> None:
    run_ranks(2, _change_the_environment)
    assert run_ranks(2, _read_the_environment) == [(None, 1, torch.float32)] * 2


def test_a_group_that_was_destroyed_is_replaced() -> None:
    run_ranks(2, _leave_the_group)
    assert run_ranks(2, _rank_and_sum, 0) == [(0, 1.0), (1, 1.0)]


def test_a_local_function_is_refused_before_any_rank_sees_it() -> None:
    with pytest.raises(TypeError, match="top level"):
        run_ranks(2, lambda rank, world_size: None)


@pytest.mark.slow
def test_a_pool_dies_with_the_process_that_started_it() -> None:
    code = (
        "from tests.support.harness import run_ranks\nfrom tests.test_harness import"
        " _pid\nprint(*run_ranks(2, _pid), flush=True)\ninput()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(
        command, cwd=harness.ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2 and all(map(is_running, pids))
        owner.kill()
    deadline = time.monotonic() + 300
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_fresh_processes_report_death_output_and_results() -> None:
    dead, alive = spawn_ranks(2, _die, 0, env={"ZS_TEST": "1"})
    assert (dead.exitcode, dead.stdout, dead.result) == (-signal.SIGKILL, "hello from 0\n", None)
    assert (alive.exitcode, alive.stdout, alive.result) == (0, "hello from 1\n", "survived")


def test_fresh_processes_take_an_environment_and_show_tracebacks() -> None:
    assert [
        r.result
        for r in spawn_ranks(2, _read_variable, "ZS_TEST", env={"ZS_TEST": "x"}, init_group=False)
    ] == ["x", "x"]
    good, bad = spawn_ranks(2, _fail_on, 1, init_group=False)
    assert (good.exitcode, bad.exitcode) == (0, 1)
    assert "ValueError: rank 1 says no" in bad.stderr


def test_neighbours_order_their_sets_as_separate_interpreters_do() -> None:
    (first, _), (second, _) = run_ranks(2, _seed_and_pid)
    assert first != second
    fresh = [process.result for process in spawn_ranks(2, _seed_and_pid, init_group=False)]
    assert [seed for seed, _ in fresh] == [first, second]
    assert not any(is_running(pid) for _, pid in fresh)


def test_time_that_others_have_the_cores_counts_against_no_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept_waiting_s = iter([10.0, 40.0, 40.0])  # when it begins, at the limit, at the next one
    monkeypatch.setattr(harness, "_kept_waiting_s", lambda workers: next(kept_waiting_s))
    assert spawn_ranks(1, _sleep, 1.0, timeout=0.1, init_group=False)[0].exitcode == 0
    kept_waiting_s = iter([10.0, 10.5, 10.5])
    (late,) = spawn_ranks(1, _sleep, 600.0, timeout=0.1, init_group=False)
    assert late.exitcode == -signal.SIGKILL


def test_a_process_that_shares_a_core_is_kept_waiting() -> None:
    core = {min(os.sched_getaffinity(0))}
    ranks = spawn_ranks(2, _spin_on, core, init_group=False)
    assert [rank.result > 0.05 for rank in ranks] == [True, True]


def test_libraries_that_start_threads_are_left_to_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyarrow does, beside Transformers, and a fork would lose its thread."""
    library = tmp_path / "accelerate.py"
    library.write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.setattr(harness, "_zygotes", [])
    monkeypatch.setattr(harness, "_shared", [None])
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)
    (rank,) = spawn_ranks(1, _has_imported, "accelerate", init_group=False)
    (zygote,) = harness._zygotes
    zygote.close()
    assert rank.result is False


@pytest.mark.parametrize("above", ["tests/zeroshard", "zeroshard/tests", "torch"])
def test_the_name_of_a_folder_above_decides_nothing(above: str) -> None:
    """`git clone` makes a folder named zeroshard, and .venv lies in it."""
    library = f"{Path(str(zeroshard.__file__)).parent}/runtime/of_this_test.py"
    foreign = f"/home/{above}/.venv/lib/site-packages/of_this_test.py"

    def calling(name: str, file: str, function: Callable[[], str]) -> Callable[[], str]:
        names: dict[str, Any] = {"function": function}
        exec(compile(f"def {name}(): return function()", file, "exec"), names)
        return cast("Callable[[], str]", names[name])

    def noted() -> str:
        (found := Census()).note("waits")
        return found.waits[0]

    foreign_call = calling("foreign", foreign, lambda: omission._site())
    assert calling("engine", library, foreign_call)() == "engine"
    assert calling("foreign", foreign, site_of_caller)() == "foreign"
    assert " foreign < " in calling("foreign", foreign, noted)()


def test_fresh_processes_that_hang_are_killed() -> None:
    fine, hung = spawn_ranks(2, _hang, timeout=1, init_group=False)
    assert (fine.exitcode, hung.exitcode) == (0, -signal.SIGKILL)
    assert "_sleep_in_a_function_with_this_name" in hung.stderr
