"""Steps in memory that outlives the ranks, which ``saver.keep()`` fills: a job goes on from them
with the ranks that are left (``zeroshard run --elastic``), or with as many again (torchrun).

The repeated deaths are in ``tests/faults/test_elastic.py``.
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from tests.support.elastic_runs import (
    Death,
    Plan,
    events,
    losses_from,
    make,
    resume,
    save_every_step,
    step_once,
)
from tests.support.harness import RankError, on_ranks, run_ranks
from tests.support.hosts import descendants
from tests.support.launched import PROGRAM, wait_until
from tests.support.training import equal
from zeroshard.checkpoint import kept as kept_steps
from zeroshard.launch.connection import HostLoss
from zeroshard.launch.elastic import (
    dead_ranks,
    go_on,
    grow,
    killed_ranks,
    loss_of,
    source,
    visible_devices,
)
from zeroshard.launch.options import Host
from zeroshard.launch.outcome import Outcome
from zeroshard.launch.supervisor import Failure
from zeroshard.system.keeper import KeeperServer
from zeroshard.system.keeper_client import (
    Keeper,
    KeptPart,
    newest,
    note_of,
    partners,
    read_note,
    who_restarts,
    whole_steps,
)

PART = KeptPart("/runs/gpt", "writer", "nonce", step=7, world=2, rank=0, file_bytes=100)

# ------------------------------------------------------------------ the note, and whole saves: pure


def test_a_note_is_read_as_it_was_written_and_torn_it_is_none() -> None:
    note = note_of(PART, b'{"file": {}}\nand more')
    found = read_note(note)
    assert found == (replace(PART, note_bytes=len(note)), b'{"file": {}}\nand more')
    assert all(read_note(note[:length]) is None for length in range(len(note)))
    for place in range(len(note)):
        flipped = note[:place] + bytes([note[place] ^ 1]) + note[place + 1 :]
        assert place == 32 or read_note(flipped) is None, place


def test_the_newest_save_is_the_last_one_that_every_rank_has_finished() -> None:
    older = [replace(PART, nonce="a", rank=rank) for rank in range(2)]
    newer = [replace(PART, nonce="b", step=8, rank=rank) for rank in range(2)]
    assert newest([]) is None
    assert newest([*older, newer[1]]) == (0, 7, "a", 2)  # rank 0 died before it had finished step 8
    assert newest([*newer, older[1]]) == (0, 8, "b", 2)  # and here in step 9
    again = [replace(PART, nonce="c", rank=0)]  # another save of step 7, of which a part is missing
    assert newest([older[0], *again]) is None
    assert newest([*newer, *newer]) == (0, 8, "b", 2)  # each on two hosts
    gone_back = [replace(one, nonce="d", step=3, branch=1) for one in older]
    assert newest([*newer, *gone_back]) == (1, 3, "d", 2)


@pytest.mark.parametrize(
    ("homes", "expected"),
    [
        (["a", "a"], [None, None]),
        (["a", "b"], [1, 0]),
        (["a", "a", "b", "b"], [2, 3, 0, 1]),
        (["a", "a", "a", "b"], [3, 3, 3, 0]),
        (["a", "b", "c"], [1, 2, 0]),
    ],
)
def test_each_part_has_its_copy_on_the_next_host(homes: list[str], expected: list[Any]) -> None:
    assert partners(homes) == expected


# ------------------------------------------------------------------ who has died, and what is said


def _failure(rank: int, status: int | None, **more: Any) -> Failure:
    return Failure(rank, 100 + rank, at=float(rank), status=status, **more)


def test_the_dead_are_those_that_nobody_else_has_ended() -> None:
    killed, lost = _failure(1, -9), _failure(0, 74, message="PeerLostError", consequence=True)
    told_to_end, aborted = _failure(2, -15), _failure(3, -6)
    assert dead_ranks(Outcome([killed, lost, told_to_end, aborted])) == {1}
    assert dead_ranks(Outcome([killed, _failure(2, -9)])) == {1, 2}
    assert dead_ranks(Outcome([killed, _failure(2, -9, consequence=True)])) == {1}
    broken = {"message": "ValueError: no"}
    assert dead_ranks(Outcome([_failure(0, 1, **broken), _failure(1, 1, **broken)])) == {0, 1}
    assert dead_ranks(Outcome([_failure(0, 1, **broken), _failure(1, 1, message="NCCL")])) == {0}


def test_where_a_host_was_lost_other_ranks_are_dead_only_if_they_were_killed() -> None:
    told_to_end, killed = _failure(0, -15), _failure(2, -9)
    assert killed_ranks(Outcome([told_to_end, killed, _failure(3, 1, message="NCCL")])) == {2}


@pytest.mark.parametrize("code", [3, 71, 72, 73, 74, 75])
def test_what_all_ranks_raise_together_is_nobodys_death(code: int) -> None:
    assert dead_ranks(Outcome([_failure(0, code), _failure(1, code)])) == set()


def test_a_job_that_was_told_to_end_or_has_stalled_has_no_dead() -> None:
    failures = [_failure(0, -9)]
    assert dead_ranks(Outcome(failures, ended_by=15)) == set()
    assert dead_ranks(Outcome(failures, stalled=True)) == set()
    assert dead_ranks(Outcome([])) == set()


def test_after_a_stall_the_dead_are_those_that_did_not_even_answer() -> None:
    waited = _failure(0, 71, message="StallError: rank(s) [1] did not come", stalled=True)
    stopped = _failure(1, -9, consequence=True, hung=True)
    asleep = _failure(2, -9, consequence=True, stacks="in sleep")
    assert dead_ranks(Outcome([waited, stopped, asleep])) == {1}
    assert dead_ranks(Outcome([asleep, stopped], stalled=True)) == {1}
    assert dead_ranks(Outcome([waited, asleep])) == set()
    loss = loss_of(Outcome([waited, stopped]), {1}, 1, 2)
    assert loss.reason == "rank 1 hung: asked for its stacks, it did not answer"


def test_the_launcher_says_from_where_the_ranks_go_on() -> None:
    parts = [vars(replace(PART, rank=rank)) for rank in range(2)]
    halves = [{"parts": [part], "saved": {}} for part in parts]
    assert source(halves) == "from memory (step 7)"
    assert source(halves[:1]) == "from the start: no step is saved"
    on_disk: dict[str, Any] = {"parts": [], "saved": {"/runs/gpt": [0, 8]}}
    assert source([*halves, on_disk]) == "from checkpoint (step 8)"
    assert source([halves[0], on_disk]) == "from checkpoint (step 8)"
    older: dict[str, Any] = {"parts": [], "saved": {"/runs/gpt": [0, 6]}}
    assert source([older, on_disk]) == source([on_disk, older]) == "from checkpoint (step 8)"
    gone_back: dict[str, Any] = {"parts": [], "saved": {"/runs/gpt": [1, 2]}}
    assert source([*halves, on_disk, gone_back]) == "from checkpoint (step 2)"


@dataclass
class _Host:
    """A host of a job that has ended, as `go_on` and `grow` see a connection."""

    host: Host
    loss: HostLoss | None = None
    came_back: bool = False
    kept: dict[str, Any] = field(default_factory=lambda: {"parts": [], "saved": {}})

    @property
    def waits(self) -> bool:
        return self.loss is None


def test_a_host_that_refuses_ends_the_job_but_not_after_it_has_come_back() -> None:
    refused = HostLoss(1.0, "b: no script", 2)
    there, other = _Host(Host("a", (0, 1), 2)), _Host(Host("b", (0,), 1), refused)
    job: Any = [there, other]
    assert go_on(job, Outcome(), 1) is None
    other.came_back = True
    assert go_on(job, Outcome(), 1) == [(there, there.host)]


def test_a_job_grows_by_the_hosts_that_are_back_unless_one_was_lost_meanwhile(
    capsys: pytest.CaptureFixture[str],
) -> None:
    part = asdict(KeptPart("/run", "w", "n", 7, 1, 0, 0))
    there = _Host(Host("a", (0, 1), 2), kept={"parts": [part], "saved": {"/run": [0, 3]}})
    back = _Host(Host("b", (0,), 1))
    job: Any = [there]
    new: Any = [back]
    assert grow(job, new) == [(there, there.host), (back, back.host)]
    assert capsys.readouterr().err == (
        "zeroshard run: b came back: 3 rank(s) go on, from memory (step 7)\n"
    )
    # latest_step() on the new host must know of the step, too
    assert there.kept["whole"] == back.kept["whole"] == {"/run": [0, 7]}
    assert back.came_back and not there.came_back
    assert grow(job, []) is None
    there.loss = HostLoss(1.0, "a was lost", 74)
    assert grow(job, new) is None


def test_the_device_of_a_dead_rank_is_left_alone() -> None:
    assert visible_devices(["0", "1", "2"], 3, [1]) == ["0", "2"]
    assert visible_devices(["4", "GPU-5"], 2, [0]) == ["GPU-5"]
    assert visible_devices(["0"], 2, [1]) == ["0"]  # two ranks share it


# ------------------------------------------------------------------ the memory, without a launcher


@contextmanager
def servers(count: int) -> Iterator[list[KeeperServer]]:
    """Yield the keepers of so many hosts."""
    made = [KeeperServer() for _ in range(count)]
    try:
        yield made
    finally:
        for server in made:
            server.close()


@contextmanager
def kept_at(address: str) -> Iterator[None]:
    """Let this rank find the keeper at `address`."""
    real = kept_steps.keeper_address
    kept_steps.keeper_address = lambda: address
    try:
        yield
    finally:
        kept_steps.keeper_address = real


def _train(
    rank: int, world: int, homes: list[str], directory: Path, last: int, redundancy: int
) -> list[str]:
    """Load what there is, train up to `last`, keep each step; return the losses."""
    with kept_at(homes[rank]):
        model, optimizer, engine = make()
        begin, losses = 0, []
        with zs.Saver(directory, engine, redundancy=redundancy) as saver:
            if zs.latest_step(directory) is not None:
                restored = zs.load(directory, engine)
                assert restored.from_memory
                begin = restored.step
            for number in range(begin + 1, last + 1):
                losses.append(step_once(model, optimizer, number, rank, world).hex())
                assert saver.keep(number)
        engine.close()
    return losses


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (3, 2)])
def test_what_is_kept_goes_on_as_a_checkpoint_does_on_any_number_of_ranks(
    before: int, after: int, tmp_path: Path
) -> None:
    run_ranks(before, save_every_step, tmp_path / "disk", 3)
    expected = run_ranks(after, resume, tmp_path / "disk", 3, 6)
    with servers(1) as (server,):
        homes = [server.address] * 3
        run_ranks(before, _train, homes, tmp_path / "run", 3, 0)
        server.whole = {str(tmp_path / "run"): [0, 3]}  # as the launcher says when it starts again
        assert run_ranks(after, _train, homes, tmp_path / "run", 6, 0) == expected
        parts = server.summary()["parts"]
    # of the ranks before nothing is left, of these two saves
    assert sorted((part["step"], part["world"], part["rank"]) for part in parts) == [
        (step, after, rank) for step in (5, 6) for rank in range(after)
    ]
    assert not (tmp_path / "run").exists()


def test_with_redundancy_a_host_that_is_gone_takes_nothing_with_it(tmp_path: Path) -> None:
    run_ranks(3, save_every_step, tmp_path / "disk", 3)
    expected = run_ranks(2, resume, tmp_path / "disk", 3, 5)
    with servers(3) as (one, other, third):
        run_ranks(3, _train, [one.address, one.address, other.address], tmp_path / "run", 3, 1)
        # the first host is gone, the second has a new rank beside it, on a host of its own
        homes = [other.address, third.address]
        other.whole = third.whole = {str(tmp_path / "run"): [0, 3]}
        assert run_ranks(2, _train, homes, tmp_path / "run", 5, 1) == expected


def _load(rank: int, world: int, homes: list[str], directory: Path) -> tuple[int, bool]:
    with kept_at(homes[rank]):
        _, _, engine = make()
        restored = zs.load(directory, engine)
        engine.close()
    return restored.step, restored.from_memory


def test_without_redundancy_a_host_that_is_gone_leaves_the_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, save_every_step, tmp_path, 2)
    with servers(2) as (one, other):
        run_ranks(2, _train_beside, [one.address, other.address], tmp_path)
        assert run_ranks(2, _load, [one.address, one.address], tmp_path) == [(2, False)] * 2
        assert run_ranks(2, _load, [one.address, other.address], tmp_path) == [(4, True)] * 2


def _train_beside(rank: int, world: int, homes: list[str], directory: Path) -> None:
    with kept_at(homes[rank]):
        model, optimizer, engine = make()
        zs.load(directory, engine)
        with zs.Saver(directory, engine) as saver:
            for number in (3, 4):
                step_once(model, optimizer, number, rank, world)
                saver.keep(number)
        engine.close()


def test_a_damaged_part_is_refused_by_name_and_the_checkpoint_is_there(tmp_path: Path) -> None:
    run_ranks(2, save_every_step, tmp_path, 2)
    with servers(1) as (server,):
        homes = [server.address] * 2
        run_ranks(2, _train_beside, homes, tmp_path)
        _flip(server.address, tmp_path, step=4)
        with pytest.raises(RankError) as error:
            run_ranks(2, _load, homes, tmp_path)
        assert "step-0000000004 in memory" in str(error.value) and "is damaged" in str(error.value)
        assert "Step 2 is there, too: fallback='previous' takes it" in str(error.value)


def _flip(address: str, directory: Path, step: int) -> None:
    """Change the last byte of a part."""
    keeper = Keeper(address)
    parts = keeper.parts(os.path.realpath(directory))
    number, part = next(found for found in parts if found[1].step == step)
    file, note = keeper.open(number)
    (last,) = os.pread(file, 1, part.file_bytes - 1)
    os.pwrite(file, bytes([last ^ 1]), part.file_bytes - 1)
    os.close(file)
    os.close(note)


def _stops(rank: int, world: int, address: str, directory: Path, call: int) -> tuple[int, int]:
    """Keep steps 1 and 2; in the second rank 1 stops at its `call`-th change of the memory. Return
    the step that can then be loaded, and how many changes there were.
    """
    with kept_at(address):
        model, optimizer, engine = make()
        saver, count = zs.Saver(directory, engine), 0
        for number in (1, 2, 3):  # the third writes where the first is
            step_once(model, optimizer, number, rank, world)
            if number == 3 and rank == 1:
                count = _torn(saver, call)
            elif number == 3:
                with suppress(zs.CheckpointError):
                    saver.keep(3)
            else:
                saver.keep(number)
        restored = zs.load(directory, engine)
        engine.close()
    assert restored.from_memory
    return restored.step, count


def _torn(saver: zs.Saver, call: int) -> int:
    """Keep step 3, and stop in the middle of the `call`-th change."""
    real, count = (os.pwrite, os.ftruncate), 0

    def pwrite(fd: int, data: Any, position: int) -> int:
        nonlocal count
        count += 1
        if count <= call:
            return real[0](fd, data, position)
        real[0](fd, data[: len(data) // 2], position)
        raise OSError("killed here")

    def ftruncate(fd: int, size: int) -> None:
        nonlocal count
        count += 1
        if count > call:
            raise OSError("killed here")
        real[1](fd, size)

    os.pwrite, os.ftruncate = pwrite, ftruncate
    try:
        with suppress(zs.CheckpointError):
            saver.keep(3)
    finally:
        os.pwrite, os.ftruncate = real
    return count


def test_a_copy_that_stops_at_any_point_leaves_the_step_before(tmp_path: Path) -> None:
    call, count = -1, 0
    while call < count:
        call += 1
        with servers(1) as (server,):
            (step, _), (same, count) = run_ranks(2, _stops, server.address, tmp_path, call)
        assert (step, same) == ((2, 2) if call < count else (3, 3)), call
    assert call > 10  # header, pieces, notes


@on_ranks(2)
def test_without_an_elastic_launcher_nothing_is_kept(tmp_path: Path) -> None:
    _, _, engine = make()
    with zs.Saver(tmp_path, engine, redundancy=1) as saver:
        answer = saver.keep(1)
    engine.close()
    found = answer, zs.latest_step(tmp_path)
    assert found == (False, None)


def test_redundancy_is_one_other_host_or_none(tmp_path: Path) -> None:
    engine = zs.shard(torch.nn.Linear(2, 2))
    with pytest.raises(zs.ConfigError, match="redundancy=2: each part rests on 0 or 1 other hosts"):
        zs.Saver(tmp_path, engine, redundancy=2)
    engine.close()


def test_strangers_and_nonsense_change_nothing_in_a_keeper() -> None:
    with servers(1) as (server,):
        keeper = Keeper(server.address)
        keeper.saved("/runs", 0, 3)
        deep, huge = b"[" * 60000, b'{"saved": "/runs", "step": 1e400}'
        short = b'{"put": ["a", "b"]}'
        for nonsense in (b"", b"no JSON", b"[]", short, b'{"open": 99}', deep, huge):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
                client.settimeout(10)
                client.connect("\0" + server.address)
                client.send(nonsense)
                assert client.recv(100) == b""
        assert server.summary() == {"parts": [], "saved": {"/runs": [0, 3]}}


# ------------------------------------------------------------------ the memory, in its own process


RANK = """
import os, sys
from zeroshard.system.keeper_client import Keeper, KeptPart, note_of
keeper, step = Keeper(sys.argv[1]), int(sys.argv[2])
keeper.start(int(sys.argv[3]), float(sys.argv[4]))
file, note = os.memfd_create("file"), os.memfd_create("note")
os.write(note, note_of(KeptPart("/runs", "writer", "nonce", step, 1, 0, 0), b"{}"))
keeper.put(["/runs", "writer", 0, 0], file, note)
if "well" in sys.argv:
    keeper.leave()
"""


@contextmanager
def _job(patience_s: float) -> Iterator[tuple[Keeper, subprocess.Popen[bytes], Any]]:
    """Yield a keeper that nobody has started, the process that starts ranks, and `run_rank`."""
    with subprocess.Popen(["sleep", "600"]) as starter:
        keeper = Keeper(f"zeroshard-test-{starter.pid}-{time.monotonic_ns()}")

        def run_rank(step: int, *more: str) -> None:
            place = [keeper.address, str(step), str(starter.pid), str(patience_s)]
            subprocess.run([sys.executable, "-c", RANK, *place, *more], check=True, timeout=60)

        try:
            yield keeper, starter, run_rank
        finally:
            starter.kill()
        wait_until(lambda: not keeper.is_there())  # it ends with whoever starts the ranks


def test_a_keeper_of_its_own_stays_while_ranks_may_be_started_again() -> None:
    with _job(math.inf) as (keeper, _, run_rank):
        assert not keeper.is_there()
        run_rank(1)
        time.sleep(1.5)  # more than two looks at whether anybody needs it
        keeper.tell_whole({"/runs": [0, 1]})
        assert keeper.whole_step("/runs") == (0, 1)
        keeper.tell_whole({})  # a host with a part of it is gone
        assert keeper.whole_step("/runs") is None
        run_rank(2)  # started again, and it starts no other keeper
        assert [part.step for _, part in keeper.parts()] == [2]
        run_rank(3, "well")
        wait_until(lambda: not keeper.is_there())


def test_nothing_is_given_to_a_keeper_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with _job(math.inf) as (keeper, _, run_rank):
        run_rank(1)
        monkeypatch.setattr(os, "getuid", lambda: -7)  # the name of a keeper can be found out
        with pytest.raises(zs.CheckpointError, match="is another user's: nothing is kept there"):
            keeper.put(["/runs", "writer", 0, 1], 1, 2)


def test_a_keeper_waits_so_long_for_ranks_that_have_died() -> None:
    with _job(1.0) as (keeper, _, run_rank):
        run_rank(1)
        wait_until(lambda: not keeper.is_there())
        run_rank(2)  # starts another
        assert [part.step for _, part in keeper.parts("/runs")] == [2]


def test_ranks_that_start_a_keeper_at_once_have_one(tmp_path: Path) -> None:
    with _job(math.inf) as (keeper, starter, _):

        def start() -> None:
            Keeper(keeper.address).start(starter.pid, math.inf)

        threads = [threading.Thread(target=start) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert keeper.parts() == []


def test_who_starts_ranks_again_is_torchruns_agent_or_rays_raylet() -> None:
    assert who_restarts({}) is None
    assert who_restarts({"TORCHELASTIC_MAX_RESTARTS": "0"}) is None
    assert who_restarts({"TORCHELASTIC_MAX_RESTARTS": "2"}) == (os.getppid(), math.inf)
    assert who_restarts({"RAY_RAYLET_PID": "77"}) == (77, 600.0)


def _keep_after_going_back(rank: int, world: int, address: str, directory: Path) -> None:
    with kept_at(address):
        model, optimizer, engine = make()
        with zs.Saver(directory, engine, background=False) as saver:
            for number in range(1, 7):
                step_once(model, optimizer, number, rank, world)
                saver.save(number) if number < 5 else saver.keep(number)
            for number in (6, 5, 2, 3):  # beside one of the same number, and below those on disk
                zs.load(directory, engine, step=min(number, 4))
                step_once(model, optimizer, 10 + number, rank, world)
                saver.keep(number)
                expected = engine.full_state_dict(rank0_only=False)
                step_once(model, optimizer, 20, rank, world)
                restored = zs.load(directory, engine)
                assert (restored.step, restored.from_memory) == (number, True)
                assert equal(engine.full_state_dict(rank0_only=False), expected), number
            saver.save(3)  # memory is taken of two equal ones
            saver.save(4)
            restored = zs.load(directory, engine)
            assert (restored.step, restored.from_memory) == (4, False)
        engine.close()


def test_a_run_that_has_gone_back_resumes_the_step_that_it_has_kept_last(tmp_path: Path) -> None:
    with servers(1) as (server,):
        run_ranks(2, _keep_after_going_back, server.address, tmp_path)
        found = whole_steps([server.summary()])
        assert server.summary()["saved"] == {str(tmp_path): [3, 4]}
        assert found == {str(tmp_path): [3, 3]}
        server.whole = found
        with kept_at(server.address):
            assert zs.latest_step(tmp_path) == 4


def _alternate(rank: int, world: int, homes: list[str], directory: Path, redundancy: int) -> None:
    with kept_at(homes[rank]):
        model, optimizer, engine = make()
        savers = [zs.Saver(directory, engine, redundancy=redundancy) for _ in range(2)]
        for number in range(1, 7):
            step_once(model, optimizer, number, rank, world)
            if number == 6:  # made anew, and the other one is not closed
                savers[0] = zs.Saver(directory, engine, redundancy=redundancy)
            assert savers[number % 2].keep(number)
            restored = zs.load(directory, engine)
            assert (restored.step, restored.from_memory) == (number, True)
        for saver in savers:
            saver.close()
        engine.close()


@pytest.mark.parametrize("redundancy", [0, 1])
def test_two_savers_of_one_directory_keep_the_newest_step_in_turn(
    redundancy: int, tmp_path: Path
) -> None:
    with servers(2) as (one, other):
        homes = [one.address, other.address if redundancy else one.address]
        run_ranks(2, _alternate, homes, tmp_path, redundancy)
        kept = [part["step"] for server in (one, other) for part in server.summary()["parts"]]
        assert set(kept) == {6} and len(kept) == 2 + 2 * redundancy, "the older ones are dropped"


def _two_engines(rank: int, world: int, address: str, directory: Path) -> str:
    with kept_at(address):
        (_, _, engine), (_, _, other) = make(), make()
        zs.Saver(directory, engine).keep(1)
        with pytest.raises(zs.CheckpointError) as error:
            zs.Saver(directory, other).keep(1)
        zs.Saver(directory / "other", other).keep(1)
        zs.Saver(directory, engine).keep(2)
        engine.close()
        zs.Saver(directory, other).keep(3)
        assert zs.load(directory, other).step == 3
        other.close()
    return str(error.value)


def test_a_directory_keeps_the_steps_of_one_engine_and_the_second_is_told(tmp_path: Path) -> None:
    with servers(1) as (server,):
        for told in run_ranks(2, _two_engines, server.address, tmp_path):
            assert "keeps the steps of another engine (of Sequential)" in told, told
            assert "give each engine a directory of its own" in told


def _count_open(rank: int, world: int, homes: list[str], directory: Path) -> list[list[int]]:
    counts = []
    with kept_at(homes[rank]):
        model, optimizer, engine = make()
        for number in (1, 2, 3):
            step_once(model, optimizer, number, rank, world)
            with suppress(ZeroDivisionError), zs.Saver(directory, engine, redundancy=1) as saver:
                saver.keep(number)
                if number == 2:
                    1 / 0  # noqa: B018  # as a script that fails
            groups = len(dist.distributed_c10d._world.pg_names)
            counts.append([groups, len(os.listdir("/proc/self/fd"))])
        # to another host, where the parts are fetched
        with kept_at(homes[2 + rank]):
            assert zs.load(directory, engine).step == 3
        counts.append([len(dist.distributed_c10d._world.pg_names)])
        engine.close()
    return counts


def test_savers_and_loads_leave_no_process_group_behind(tmp_path: Path) -> None:
    with servers(3) as (one, other, third):
        homes = [one.address, other.address, one.address, third.address]
        for first, *more, fetched in run_ranks(2, _count_open, homes, tmp_path):
            assert more == [first] * 2 and fetched == first[:1]


def _fetch_at_limit(rank: int, world: int, homes: list[str], directory: Path) -> str:
    real = Keeper.put

    def put(self: Keeper, slot: list[Any], file: int, note: int) -> None:
        raise zs.CheckpointError("as many files open as it may")

    with kept_at(homes[rank]):
        _, _, engine = make()
        Keeper.put = put if rank else real  # type: ignore[method-assign]
        try:
            with pytest.raises(zs.CheckpointError) as error:
                zs.load(directory, engine)
        finally:
            Keeper.put = real  # type: ignore[method-assign]
        assert zs.load(directory, engine).step == 2
        engine.close()
    return str(error.value)


def test_a_host_that_cannot_hold_what_it_fetches_is_told_on_all(tmp_path: Path) -> None:
    with servers(3) as (one, other, third):
        homes = [one.address, other.address]
        run_ranks(2, _train, homes, tmp_path, 2, 1)
        for told in run_ranks(2, _fetch_at_limit, [one.address, third.address], tmp_path):
            assert "as many files open as it may" in told


LIMITED = """
import os, resource, sys, time
from zeroshard.system.keeper_client import Keeper, KeptPart, note_of
from zeroshard.errors import CheckpointError
from zeroshard.system.keeper import KeeperServer

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 256))
server = KeeperServer()
address, done = os.pipe(), os.pipe()
child = os.fork()
if child == 0:  # a rank
    for fd in (address[1], done[0]):
        os.close(fd)
    keeper = Keeper(os.read(address[0], 100).decode())
    def put(rank):
        file, note = os.memfd_create("file"), os.memfd_create("note")
        os.write(note, note_of(KeptPart("/runs", "writer", "nonce", 7, 200, rank, 0), b"{}"))
        try:
            keeper.put(["/runs", "writer", rank, 0], file, note)
        finally:
            os.close(file), os.close(note)
    rank = 0
    try:
        for rank in range(200):
            put(rank)
    except CheckpointError as error:
        print(rank, error)
    keeper.saved("/runs", 0, 3)  # takes no more files
    keeper.drop("/runs", but="nobody")
    os.write(done[1], b"x")
    os.read(address[0], 1)
    put(0)
    print([part.rank for _, part in keeper.parts("/runs")], keeper.whole_step("/runs"))
    sys.stdout.flush()
    os._exit(0)
opened = []
if sys.argv[1] == "launcher":  # no descriptor is left but that of the accept() under way
    time.sleep(0.5)
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(9)]
    taken = set(map(int, os.listdir("/proc/self/fd")))
    reserved = min(set(range(256)) - taken)
    assert reserved < opened[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (reserved, 256))
os.write(address[1], server.address.encode())
os.read(done[0], 1)
for fd in opened:
    os.close(fd)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
os.write(address[1], b"x")
assert os.waitpid(child, 0)[1] == 0
assert server.summary()["saved"] == {"/runs": [0, 3]}
server.close()
"""


@pytest.mark.parametrize("full_of", ["parts", "launcher"])
def test_a_keeper_raises_its_limit_of_open_files_and_at_it_says_so_and_goes_on(
    full_of: str,
) -> None:
    line = [sys.executable, "-c", LIMITED, full_of]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    refused, after = done.stdout.splitlines()
    rank, _, told = refused.partition(" ")
    assert (100 < int(rank) < 128) if full_of == "parts" else rank == "0"
    assert re.fullmatch(
        r"the process that keeps this job's memory has as many files open as it may \(\d+\),"
        r" two for each part of a checkpoint: raise its limit \(ulimit -n\)",
        told,
    )
    assert after == "[0] None"


# ------------------------------------------------------------------ a real launch


def test_a_killed_rank_costs_no_step_and_the_other_goes_on_from_memory(tmp_path: Path) -> None:
    from tests.support import elastic_runs

    plan = Plan(steps=8, deaths=[Death(world=2, rank=0, step=5, where="forward")])
    line = [PROGRAM, "run", "--elastic", "--nproc", "2", elastic_runs.__file__, str(tmp_path)]
    done = subprocess.run(
        [*line, plan.to_json()], capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "zeroshard run: rank 0 died, killed by SIGKILL (often the kernel, out of memory): 1 of 2"
        " rank(s) go on, from memory (step 4)\n"
    )
    found = events(tmp_path)
    assert [(one.step, one.value) for one in found if one.name == "loaded"] == [(4, "memory")]
    run_ranks(2, save_every_step, tmp_path / "disk", 4)
    assert losses_from(found, 1, 4) == run_ranks(1, resume, tmp_path / "disk", 4, 8)


TORCHRUN = str(Path(PROGRAM).with_name("torchrun"))
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def _went_on(directory: Path, step: int, last: int) -> None:
    """Check that both ranks have gone on from `step` in memory, with the losses of a run that
    nobody has disturbed.
    """
    found = events(directory)
    loaded = [(one.step, one.value) for one in found if one.name == "loaded"]
    assert loaded == [(step, "memory")] * 2
    losses = run_ranks(2, save_every_step, directory / "disk", last)
    for rank in range(2):
        told = {one.step: one.value for one in found if (one.name, one.rank) == ("step", rank)}
        assert [told[number] for number in range(1, last + 1)] == losses[rank]


@pytest.mark.parametrize(
    "line",
    [
        [TORCHRUN, "--nproc-per-node", "2"],
        pytest.param([PROGRAM, "run", "--nproc", "2"], marks=pytest.mark.slow),
    ],
)
def test_ranks_that_torchrun_starts_again_go_on_from_memory(
    line: list[str], tmp_path: Path
) -> None:
    from tests.support import elastic_runs

    plan = Plan(steps=8, deaths=[Death(world=2, rank=0, step=5, where="forward")])
    line = [*line, "--max-restarts", "1", elastic_runs.__file__, str(tmp_path), plan.to_json()]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr
    _went_on(tmp_path, 4, 8)


@pytest.mark.parametrize(
    "rendezvous",
    [
        "--master-addr 127.0.0.1 --master-port {port} --node-rank {number}",
        pytest.param(
            "--rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{port} --local-addr 127.0.0.1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_pod_that_is_started_again_finds_its_part_at_the_other(
    rendezvous: str, tmp_path: Path
) -> None:
    from tests.support import elastic_runs

    plan = Plan(steps=8, redundancy=1, gate=6)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]

    def start(number: int) -> subprocess.Popen[bytes]:
        words = rendezvous.format(port=port, number=number).split()
        line = [TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "3", *words]
        return subprocess.Popen(
            [*line, elastic_runs.__file__, str(tmp_path), plan.to_json()],
            stderr=subprocess.DEVNULL,
            env={**ONE_THREAD, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )

    pods = [start(0), start(1)]
    try:
        wait_until(lambda: sum((e.name, e.step) == ("kept", 5) for e in events(tmp_path)) == 2)
        for pid in (*descendants(pods[1].pid), pods[1].pid):  # all of the pod, and its memory
            os.kill(pid, signal.SIGKILL)
        pods[1].wait()
        (tmp_path / "open").touch()
        pods.append(start(1))
        assert [pod.wait(200) for pod in (pods[0], pods[2])] == [0, 0]
    finally:
        for pod in pods:
            for pid in (*descendants(pod.pid), pod.pid) if pod.poll() is None else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pod.wait()
    _went_on(tmp_path, 5, 8)
