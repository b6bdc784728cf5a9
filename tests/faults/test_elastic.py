"""Ranks and hosts that die under ``zeroshard run --elastic``: within ten seconds the others go on
from the last step that all have finished, with the bits of a run that was resumed from it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support import elastic_runs
from tests.support.elastic_runs import Death, Event, Plan, events, losses_from, resume
from tests.support.harness import run_ranks
from tests.support.hosts import descendants
from tests.support.launched import PROGRAM, stub_ssh, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WITHIN_S = 10.0
DEAD = "died, killed by SIGKILL (often the kernel, out of memory):"


@dataclass
class Run:
    """A job that has ended."""

    code: int
    said: list[str]
    events: list[Event]


def run(
    directory: Path,
    plan: Plan,
    *options: str,
    meanwhile: Callable[[subprocess.Popen[str]], None] = lambda process: None,
    before: Sequence[str] = (),
) -> Run:
    """Run a job in `directory` to its end; `before`: the beginning of its command."""
    script = elastic_runs.__file__
    process = subprocess.Popen(
        [*before, PROGRAM, "run", *options, script, str(directory), plan.to_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        meanwhile(process)
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    return Run(process.returncode, errors.splitlines(), events(directory))


def of(found: list[Event], name: str, world: int) -> list[Event]:
    return [one for one in found if (one.name, one.world) == (name, world)]


def went_on(found: list[Event], world: int, to: int, died_at: float) -> tuple[int, float]:
    """Check that after a death in a start with `world` ranks `to` ranks have gone on from the last
    step that all had finished; return it, and after how many seconds they had taken the next one.
    """
    kept = [max((one.step for one in of(found, "kept", world) if one.rank == rank), default=0)
            for rank in range(world)]  # fmt: skip
    (step,) = {one.step for one in of(found, "loaded", to)} or {0}
    assert {one.value for one in of(found, "loaded", to)} <= {"memory"}
    # a rank may have died when all had finished a step and before it had said so
    began = of(found, "loaded", world)
    finished = max([min(kept), *(one.step for one in began)])
    assert step in (finished, finished + 1), (step, kept)
    first = [min(one.at for one in of(found, "step", to) if one.rank == rank)
             for rank in range(to)]  # fmt: skip
    assert {one.step for one in of(found, "step", to) if one.at in first} == {step + 1}
    return step, max(first) - died_at


def where_the_seconds_go(found: list[Event], to: int, died_at: float) -> str:
    """Say when the slowest of the next ranks came to each point."""
    names = ("begin", "imported", "joined", "loaded", "step")
    points, first = [], dict[str, float]()
    for name in names:
        ats = [min((one.at for one in of(found, name, to) if one.rank == rank), default=died_at)
               for rank in range(to)]  # fmt: skip
        first[name] = max(ats) - died_at
        points.append(f"{name} {first[name]:.2f}")
    return ", ".join(points)


# ------------------------------------------------------------------ twenty deaths


def _death(draw: random.Random, world: int, after: int) -> Death:
    where = draw.choice(["forward", "step", "keep", "keep"])
    step = after + draw.randrange(2, 5)
    return Death(world, draw.randrange(world), step, where, call=draw.randrange(20))


@pytest.mark.timeout(1500)
def test_twenty_deaths_at_random_steps_cost_no_step_and_change_no_bit(tmp_path: Path) -> None:
    seconds = []
    for seed in range(10):
        draw = random.Random(seed)
        first = _death(draw, 3, 0)
        deaths = [first, _death(draw, 2, first.step)]
        directory = tmp_path / str(seed)
        directory.mkdir()
        done = run(directory, Plan(steps=12, deaths=deaths), "--elastic", "--nproc", "3")
        assert done.code == 0, (seed, done.said)
        died = [one.at for one in done.events if one.name == "dies"]
        before, reference = 0, directory / "reference-3"
        run_ranks(3, elastic_runs.save_every_step, reference, 12)
        for world, at in zip((3, 2), died, strict=True):
            step, took = went_on(done.events, world, world - 1, at)
            after = directory / f"reference-{world - 1}"
            expected = run_ranks(world - 1, resume, reference, step, 12, after)
            found = losses_from(done.events, world - 1, step)
            assert found == [one[: len(mine)] for one, mine in zip(expected, found, strict=True)]
            assert f"{world - 1} of {world} rank(s) go on, from memory (step {step})" in done.said[
                3 - world
            ], (seed, done.said)  # fmt: skip
            seconds.append(took)
            points = where_the_seconds_go(done.events, world - 1, at)
            print(f"seed {seed}, {deaths[3 - world]}: {took:.2f} s ({points})")
            before, reference = step, after
        assert before < 12 and len(found[0]) > 0
    median = sorted(seconds)[len(seconds) // 2]
    print(f"{len(seconds)} deaths: training went on after {median:.2f} s (median),"
          f" {max(seconds):.2f} s at most")  # fmt: skip
    assert len(seconds) == 20 and max(seconds) < WITHIN_S


@pytest.mark.timeout(1500)
def test_twenty_deaths_and_more_ranks_later_end_with_the_weights_of_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    """Three ranks, of which two die one after the other; then four go on from disk."""
    (undisturbed,) = run_ranks(1, elastic_runs.train_leaves, 14, 6)
    num_deaths = 0
    for seed in range(10):
        draw = random.Random(100 + seed)
        first = _death(draw, 3, 0)
        plan = Plan(steps=10, leaves=6, save_every=10, deaths=[first, _death(draw, 2, first.step)])
        directory = tmp_path / str(seed)
        directory.mkdir()
        done = run(directory, plan, "--elastic", "--nproc", "3")
        assert done.code == 0, (seed, done.said)
        num_deaths += len([one for one in done.events if one.name == "dies"])
        more = run(directory, Plan(steps=14, leaves=6), "--elastic", "--nproc", "4")
        assert more.code == 0, (seed, more.said)
        (found,) = [
            one.value
            for one in more.events
            if one.name == "weights" and one.step == 14 and one.rank == 0
        ]
        assert found == undisturbed, (seed, plan)
    assert num_deaths == 20


def test_a_rank_that_dies_on_an_accelerator_costs_no_step_and_no_bit(tmp_path: Path) -> None:
    """What is kept comes from there, and goes back. Three ranks share the two pretended devices,
    over gloo; those that are left have one each, and its own collectives.
    """
    plan = Plan(steps=8, leaves=4, device="zsim", deaths=[Death(3, 1, 3), Death(2, 0, 6, "step")])
    done = run(tmp_path, plan, "--elastic", "--nproc", "3")
    assert done.code == 0, done.said
    assert [one.value for one in of(done.events, "loaded", 1)] == ["memory"]
    (found,) = {one.value for one in done.events if one.name == "weights" and one.value}
    undisturbed = run_ranks(2, elastic_runs.train_leaves, 8, 4, "zsim", device="tests.device.zsim")
    assert found == undisturbed[0]


def _rank_after(directory: Path, world: int, rank: int, step: int) -> int:
    """Return the process of a rank, once any has kept `step`."""

    def is_there() -> bool:
        return any(one.step >= step for one in of(events(directory), "kept", world))

    wait_until(is_there)
    (pid,) = {one.pid for one in of(events(directory), "begin", world) if one.rank == rank}
    return pid


def test_ranks_killed_from_outside_at_any_moment_cost_no_step(tmp_path: Path) -> None:
    draw = random.Random(int(os.environ.get("ZEROSHARD_SEED", "5")))
    killed: list[float] = []

    def kill(_: subprocess.Popen[str]) -> None:
        for world, after in ((3, 4), (2, 9)):
            rank, pause = draw.randrange(world), draw.random() * 0.05
            pid = _rank_after(tmp_path, world, rank, after)
            time.sleep(pause)
            killed.append(time.monotonic())
            os.kill(pid, signal.SIGKILL)

    plan = Plan(steps=200, pause_s=0.02)
    done = run(tmp_path, plan, "--elastic", "--nproc", "3", meanwhile=kill)
    assert done.code == 0, done.said
    for world, at in zip((3, 2), killed, strict=True):
        print(f"went on after {went_on(done.events, world, world - 1, at)[1]:.2f} s")
    assert max(one.step for one in done.events) == 200


# ------------------------------------------------------------------ other ways to go on, or to end


def test_without_memory_the_ranks_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    plan = Plan(steps=8, keeps=False, save_every=3, deaths=[Death(2, 1, 6)])
    done = run(tmp_path, plan, "--elastic", "--nproc", "2")
    assert done.code == 0
    assert done.said == [
        f"zeroshard run: rank 1 {DEAD} 1 of 2 rank(s) go on, from checkpoint (step 3)"
    ]
    assert [(one.step, one.value) for one in of(done.events, "loaded", 1)] == [(3, "disk")]
    assert losses_from(done.events, 1, 3) == run_ranks(1, resume, tmp_path / "steps", 3, 8)


def test_the_newer_of_memory_and_disk_is_taken(tmp_path: Path) -> None:
    plan = Plan(steps=8, save_every=5, deaths=[Death(2, 1, 6, "step")])
    done = run(tmp_path, plan, "--elastic", "--nproc", "2")
    assert [(one.step, one.value) for one in of(done.events, "loaded", 1)] == [(5, "memory")]


@pytest.mark.parametrize("where", ["start", "load"])
def test_a_rank_that_dies_while_it_starts_again_is_left_out_too(where: str, tmp_path: Path) -> None:
    plan = Plan(steps=6, deaths=[Death(3, 2, 4), Death(2, 0, 0, where)])
    done = run(tmp_path, plan, "--elastic", "--nproc", "3")
    assert done.code == 0, done.said
    assert [line.partition(": ")[2] for line in done.said] == [
        f"rank 2 {DEAD} 2 of 3 rank(s) go on, from memory (step 3)",
        f"rank 0 {DEAD} 1 of 2 rank(s) go on, from memory (step 3)",
    ]
    assert {one.step for one in of(done.events, "loaded", 1)} == {3}


def test_two_ranks_that_die_at_once_are_both_left_out(tmp_path: Path) -> None:
    plan = Plan(steps=6, deaths=[Death(3, 0, 4), Death(3, 2, 4)])
    done = run(tmp_path, plan, "--elastic", "--nproc", "3")
    assert done.code == 0, done.said
    assert max(one.step for one in of(done.events, "step", 1)) == 6


def test_with_fewer_than_asked_for_the_job_ends_with_the_first_failure(tmp_path: Path) -> None:
    done = run(tmp_path, Plan(deaths=[Death(2, 1, 3)]), "--elastic=2", "--nproc", "2")
    assert done.code == 128 + signal.SIGKILL
    assert done.said == [
        f"zeroshard run: rank 1 {DEAD} 1 rank(s) are left, and --elastic=2 needs 2"
    ]


def test_a_rank_whose_script_fails_is_dead_and_the_last_ones_code_is_the_jobs(
    tmp_path: Path,
) -> None:
    plan = Plan(deaths=[Death(2, 1, 3, code=7), Death(1, 0, 4, code=9)])
    done = run(tmp_path, plan, "--elastic", "--nproc", "2")
    assert done.code == 1
    assert done.said[0] == (
        "zeroshard run: rank 1 died, exit code 7: 1 of 2 rank(s) go on, from memory (step 2)"
    )
    assert "rank 0 died, exit code 9: 0 rank(s) are left, and --elastic=1 needs 1" in done.said[1]


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    def kill(process: subprocess.Popen[str]) -> None:
        wait_until(lambda: bool(of(events(tmp_path), "kept", 2)))
        ranks = descendants(process.pid)
        process.kill()
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))

    run(tmp_path, Plan(steps=1000, pause_s=0.05), "--elastic", "--nproc", "2", meanwhile=kill)


def test_a_rank_that_is_stopped_is_left_out_after_the_stall_timeout(tmp_path: Path) -> None:
    def stop(_: subprocess.Popen[str]) -> None:
        os.kill(_rank_after(tmp_path, 3, 1, 4), signal.SIGSTOP)

    options = ["--elastic=2", "--stall-timeout=6", "--nproc", "3"]
    done = run(tmp_path, Plan(steps=60, pause_s=0.02), *options, meanwhile=stop)
    assert done.code == 0, done.said
    assert any(
        "rank 1 hung: asked for its stacks, it did not answer: 2 of 3 rank(s) go on, from memory"
        in line
        for line in done.said
    ), done.said
    assert max(one.step for one in of(done.events, "step", 2)) == 60


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_between_a_death_and_the_next_start_ends_the_job_with_its_number(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\ntime.sleep(1)\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [PROGRAM, "run", "--elastic", "--nproc", "3", str(script)],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    next(line for line in process.stderr if "go on" in line)
    process.send_signal(number)
    _, said = process.communicate(timeout=300)
    assert process.returncode == code and f"ended by {number.name}" in said, said


# ------------------------------------------------------------------ several hosts


def _hosts(directory: Path, lines: str) -> list[str]:
    hostfile = directory / "hostfile"
    hostfile.write_text(lines)
    return ["--hostfile", str(hostfile), "--ssh", stub_ssh(directory)]


def _guard_of(pid: int) -> int:
    """The process between ssh and the launcher of a rank."""
    for _ in range(2):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def _kill_host(directory: Path, world: int, rank: int, after: int) -> None:
    os.kill(_guard_of(_rank_after(directory, world, rank, after)), signal.SIGKILL)


def test_a_rank_that_dies_on_one_of_two_hosts_leaves_the_memory_of_both(tmp_path: Path) -> None:
    options = _hosts(tmp_path, "127.0.0.2 slots=2\n127.0.0.3 slots=1\n")
    plan = Plan(steps=8, deaths=[Death(3, 1, 5)])
    done = run(tmp_path, plan, "--elastic", *options)
    assert done.code == 0, done.said
    said = f"rank 1 on 127.0.0.2 {DEAD} 2 of 3 rank(s) go on, from memory (step 4)"
    # torch may warn, on the other host, that the store is gone
    assert [line for line in done.said if "[127" not in line] == [f"zeroshard run: {said}"]
    run_ranks(3, elastic_runs.save_every_step, tmp_path / "disk", 4)
    expected = run_ranks(2, resume, tmp_path / "disk", 4, 8)
    assert losses_from(done.events, 2, 4) == expected


def test_a_host_that_is_slow_to_answer_keeps_its_memory(tmp_path: Path) -> None:
    """Its guard stands still for longer than the grace, when a rank of the other host has died."""
    lines = _hosts(tmp_path, "127.0.0.2 slots=2\n127.0.0.3 slots=1\n")

    def slow(process: subprocess.Popen[str]) -> None:
        guard = _guard_of(_rank_after(tmp_path, 3, 2, 3))
        os.kill(_rank_after(tmp_path, 3, 1, 3), signal.SIGKILL)
        os.kill(guard, signal.SIGSTOP)
        time.sleep(9)
        os.kill(guard, signal.SIGCONT)

    plan = Plan(steps=400, pause_s=0.02)
    done = run(tmp_path, plan, "--elastic=2", *lines, meanwhile=slow)
    assert done.code == 0, done.said
    again = f"rank 1 on 127.0.0.2 {DEAD} 2 of 3 rank(s) go on, from memory"
    assert any(again in line for line in done.said), done.said


@pytest.mark.parametrize("gone", [0, 1])
def test_with_redundancy_a_host_that_is_gone_costs_no_step(gone: int, tmp_path: Path) -> None:
    options = _hosts(tmp_path, "127.0.0.2 slots=1\n127.0.0.3 slots=1\n")
    plan = Plan(steps=150, redundancy=1, pause_s=0.02)
    done = run(tmp_path, plan, "--elastic", *options,
               meanwhile=lambda _: _kill_host(tmp_path, 2, gone, 5))  # fmt: skip
    assert done.code == 0, done.said
    (loaded,) = of(done.events, "loaded", 1)
    assert loaded.value == "memory" and loaded.step >= 5
    host = f"127.0.0.{2 + gone}"
    assert f"zeroshard run: {host} was lost, its connection ended" in done.said[0], done.said
    assert done.said[0].endswith(f"1 of 2 rank(s) go on, from memory (step {loaded.step})")
    last = min(max(one.step for one in of(done.events, "kept", 2) if one.rank == rank)
               for rank in range(2))  # fmt: skip
    assert loaded.step in (last, last + 1)
    run_ranks(2, elastic_runs.save_every_step, tmp_path / "disk", loaded.step)
    expected = run_ranks(1, resume, tmp_path / "disk", loaded.step, 20)
    assert losses_from(done.events, 1, loaded.step)[0][: len(expected[0])] == expected[0]


def test_without_redundancy_a_host_that_is_gone_leaves_the_checkpoint(tmp_path: Path) -> None:
    options = _hosts(tmp_path, "127.0.0.2 slots=1\n127.0.0.3 slots=1\n")
    plan = Plan(steps=60, save_every=4, pause_s=0.05)
    done = run(tmp_path, plan, "--elastic", *options,
               meanwhile=lambda _: _kill_host(tmp_path, 2, 1, 6))  # fmt: skip
    assert done.code == 0, done.said
    (loaded,) = of(done.events, "loaded", 1)
    assert (loaded.value, loaded.step % 4) == ("disk", 0)
    assert done.said[0].endswith(f"1 of 2 rank(s) go on, from checkpoint (step {loaded.step})")


def test_two_hosts_of_three_may_go_one_after_the_other(tmp_path: Path) -> None:
    options = _hosts(tmp_path, "".join(f"127.0.0.{number} slots=1\n" for number in (2, 3, 4)))

    def kill(_: subprocess.Popen[str]) -> None:
        _kill_host(tmp_path, 3, 0, 4)  # the one that keeps the store
        _kill_host(tmp_path, 2, 1, 12)

    plan = Plan(steps=150, redundancy=1, pause_s=0.02)
    done = run(tmp_path, plan, "--elastic", *options, meanwhile=kill)
    assert done.code == 0, done.said
    assert [one.value for one in done.events if one.name == "loaded"] == ["memory"] * 3
    assert len(done.said) == 3  # the third: no other host for redundancy


# ------------------------------------------------------------------ a host that comes back


def check_came_back(done: Run, host: str, said: list[str], *, steps: int, leaves: int) -> None:
    """Check that the job told of `host`, which was lost and came back, and of nothing else, and has
    the weights of an undisturbed run.
    """
    alone = max(one.step for one in of(done.events, "kept", 1))
    assert said[0].startswith(f"zeroshard run: {host} was lost, its connection ended"), said
    assert said[1:] == [
        f"zeroshard run: {host} came back: 2 rank(s) go on, from memory (step {alone})"
    ]
    (undisturbed,) = run_ranks(1, elastic_runs.train_leaves, steps, leaves)
    weights = of(done.events, "weights", 2)
    assert {one.value for one in weights if one.rank == 0} == {undisturbed}


def _lost_and_back(directory: Path, gone: int, until: Callable[[], bool]) -> None:
    """Lose a host of two, let the other take two steps, and have ssh reach the lost one again;
    open the gate of the plan when `until` is met.
    """
    refuses = directory / f"ssh.without-127.0.0.{2 + gone}"
    guard = _guard_of(_rank_after(directory, 2, gone, 3))
    refuses.touch()
    os.kill(guard, signal.SIGKILL)
    wait_until(lambda: len({one.step for one in of(events(directory), "kept", 1)}) >= 2)
    refuses.unlink()
    wait_until(until)
    (directory / "open").touch()


@pytest.mark.parametrize(("gone", "saves"), [(0, False), (1, True)])
def test_a_host_that_comes_back_takes_part_again_and_the_weights_are_the_undisturbed_ones(
    gone: int, saves: bool, tmp_path: Path
) -> None:
    options = _hosts(tmp_path, "127.0.0.2 slots=1\n127.0.0.3 slots=1\n")
    plan = Plan(steps=30, gate=25, leaves=6, redundancy=1, saves_on_sigterm=saves, pause_s=0.05)

    def disturb(_: subprocess.Popen[str]) -> None:
        # the first start has loaded nothing
        _lost_and_back(tmp_path, gone, lambda: len(of(events(tmp_path), "loaded", 2)) == 2)

    done = run(tmp_path, plan, "--elastic", "--rejoin-after=0.3", *options, meanwhile=disturb)
    assert done.code == 0, done.said
    alone = max(one.step for one in of(done.events, "kept", 1))
    loaded = of(done.events, "loaded", 2)
    assert {(one.rank, one.step, one.value) for one in loaded} == {
        (rank, alone, "memory") for rank in range(2)
    }
    host = f"127.0.0.{2 + gone}"
    said = [line for line in done.said if "[127" not in line]
    check_came_back(done, host, said, steps=30, leaves=6)


def test_a_job_that_keeps_nothing_is_not_stopped_for_a_host_that_is_back(tmp_path: Path) -> None:
    options = _hosts(tmp_path, "127.0.0.2 slots=1\n127.0.0.3 slots=1\n")
    plan = Plan(steps=30, gate=25, keeps=False, save_every=1, pause_s=0.05)

    def disturb(process: subprocess.Popen[str]) -> None:
        refuses = tmp_path / "ssh.without-127.0.0.3"
        wait_until(lambda: bool(of(events(tmp_path), "step", 2)))
        (pid,) = {one.pid for one in of(events(tmp_path), "begin", 2) if one.rank == 1}
        refuses.touch()
        os.kill(_guard_of(pid), signal.SIGKILL)
        wait_until(lambda: bool(of(events(tmp_path), "step", 1)))
        refuses.unlink()
        wait_until(lambda: _num_guards(process.pid) == 2)  # it waits for orders
        time.sleep(2.5)
        (tmp_path / "open").touch()

    done = run(tmp_path, plan, "--elastic", "--rejoin-after=0.3", *options, meanwhile=disturb)
    assert done.code == 0, done.said
    assert not any("came back" in line for line in done.said), done.said
    assert [one.step for one in of(done.events, "begin", 1)] == [0]
    assert max(one.step for one in of(done.events, "step", 1)) == 30


def _num_guards(pid: int) -> int:
    """How many processes of the job are guards of hosts."""
    lines = []
    for one in descendants(pid):
        with suppress(OSError):
            lines.append(Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")[1:])
    return len([line for line in lines if line == [b"-P", b"-m", b"zeroshard.launch.on_host", b""]])


def test_plans_are_read_as_they_were_written() -> None:
    plan = Plan(deaths=[Death(2, 1, 3)])
    assert Plan.from_json(plan.to_json()) == plan != replace(plan, steps=13)
