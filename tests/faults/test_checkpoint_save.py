"""Saves that meet a failing disk or another job: every rank hears of it, no rank waits for
itself, and the order of system calls is the safe one.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zeroshard as zs
import zeroshard.checkpoint.save as saving
import zeroshard.checkpoint.steps as steps
from tests.support import inside
from tests.support.checkpoints import check_everything, make
from tests.support.harness import on_ranks, run_ranks
from zeroshard import CheckpointError, ConfigError, PlanMismatch

# ------------------------------------------------------------------------------------- system calls

CALLS = {
    os: (
        "open",
        "close",
        "mkdir",
        "fsync",
        "ftruncate",
        "write",
        "pwrite",
        "rename",
        "unlink",
        "rmdir",
        "scandir",
        "statvfs",
        "posix_fallocate",
        "listdir",
    ),
    fcntl: ("flock",),
}


@contextmanager
def watched(folder: Path, called: Callable[[str, str], None]) -> Iterator[None]:
    """Tell `called` (name, path) of every system call on what lies at or under `folder`; of
    close() once it is done, of the others before.
    """

    def watch(owner: Any, name: str) -> Any:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            path = _path_of(args[0]) if args else ""
            if not path.startswith(str(folder)):
                return real(*args, **options)
            if name == "close":  # which closes whatever it says
                real(*args)
                return called(name, path)
            called(name, path)
            return real(*args, **options)

        return mock.patch.object(owner, name, call)

    exchange = steps._exchange

    def swap(one: Path, other: Path) -> bool:
        called("rename", str(one))
        return exchange(one, other)

    with ExitStack() as stack:
        for owner, names in CALLS.items():
            for name in names:
                stack.enter_context(watch(owner, name))
        stack.enter_context(mock.patch.object(steps, "_exchange", swap))
        yield


def _path_of(argument: Any) -> str:
    if isinstance(argument, int):
        with suppress(OSError):
            return os.readlink(f"/proc/self/fd/{argument}")
        return ""
    return os.fsdecode(argument) if isinstance(argument, str | bytes | os.PathLike) else ""


def test_what_is_written_is_on_disk_before_it_is_seen_and_its_name_after(tmp_path: Path) -> None:
    training = make("zero2")
    training.step(0, 0)
    folder = tmp_path / "new" / "parents" / "run"
    for again in (False, True):
        calls: list[tuple[str, str]] = []
        with watched(tmp_path, lambda name, path: calls.append((name, path))):  # noqa: B023
            training.save(folder, 1)
        last = {call: index for index, call in enumerate(calls)}
        (working,) = {
            path
            for name, path in calls
            if name == "rename" and Path(path).name.startswith(".saving")
        }
        # again, this is the swap; the old one is renamed later to be removed
        seen = calls.index(("rename", working))
        files = {
            path
            for name, path in calls
            if name in ("write", "posix_fallocate") and path.startswith(working)
        }
        assert len(files) == 1, "the file of pieces; the manifest goes through Python's file"
        for path in [*files, f"{working}/.manifest.json", working]:
            assert last["fsync", path] < seen, path
        renamed = last["rename", f"{working}/.manifest.json"]
        assert (
            last["fsync", f"{working}/.manifest.json"]
            < renamed
            < last["fsync", working]
            < seen
            < last["fsync", str(folder)]
        )
        if not again:
            for parent in (tmp_path, tmp_path / "new", tmp_path / "new" / "parents"):
                assert last["fsync", str(parent)] < seen, f"{parent} has a new entry"
    training.engine.close()


# ----------------------------------------------------------------------------- each call fails once


def _faults(rank: int, world: int, folder: Path, background: bool, failing: int) -> list[str]:
    """Save with each system call of rank `failing` failing in turn; return what it was told, or
    "" where the save came through.
    """
    training = make("zero3")
    engine = training.engine
    training.step(rank, 0)
    told = []
    with zs.Saver(folder, engine, background=background, keep_last=2) as saver:
        saver.save(0)
        saver.wait()
        for number in range(1, 1000):
            left = number

            def fail(name: str, path: str) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))

            with watched(folder, fail) if rank == failing else ExitStack():
                try:
                    saver.save(number)
                    saver.wait()
                    told.append("")
                except CheckpointError as error:
                    told.append(str(error))
            if rank == 0 and told[-1]:
                assert ("is complete, but" in told[-1]) == (number in steps.list_steps(folder))
            if inside.exchange(engine, b"on" if left <= 0 else b"over")[failing] == b"over":
                break
        saver.save(1000)
    assert check_everything(folder) == [] and not list(folder.glob(".saving*"))
    engine.close()
    return told


@pytest.mark.parametrize(
    ("background", "failing"),
    [
        (False, 0),
        pytest.param(True, 0, marks=pytest.mark.slow),
        pytest.param(False, 1, marks=pytest.mark.slow),
        (True, 1),
    ],
)
def test_every_system_call_that_fails_is_told_on_all_ranks(
    tmp_path: Path, background: bool, failing: int
) -> None:
    zero, one = run_ranks(2, _faults, tmp_path, background, failing)
    assert [bool(text) for text in zero] == [bool(text) for text in one]
    assert zero[-1] == "" and sum(map(bool, zero)) >= (12 if failing == 0 else 3)
    for text in filter(None, zero):
        assert "Input/output error" in text


@pytest.mark.parametrize("background", [False, True])
@on_ranks(2)
def test_a_clean_up_that_fails_too_hides_no_error_from_the_other_ranks(
    rank: int, tmp_path: Path, background: bool
) -> None:
    """Save where every close() of the hidden directory fails on rank 0, the clean-up's too."""
    training = make("zero3")
    training.step(rank, 0)

    def fail(name: str, path: str) -> None:
        if name == "close" and Path(path).name.startswith(".saving"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with zs.Saver(tmp_path, training.engine, background=background) as saver:
        with (
            watched(tmp_path, fail) if rank == 0 else ExitStack(),
            pytest.raises(CheckpointError) as error,
        ):
            saver.save(1)
            saver.wait()
        saver.save(2)
    training.engine.close()
    assert list(steps.list_steps(tmp_path)) == [2] and not list(tmp_path.glob(".saving*"))
    text = str(error.value)
    assert "cannot be put in place: No space left on device" in text


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o027])
def test_all_files_of_a_step_have_the_umasks_mode_and_the_lock_is_the_owners(
    tmp_path: Path, umask: int
) -> None:
    training, before = make("zero2"), os.umask(umask)
    try:
        training.save(tmp_path, 1)
        (tmp_path / ".lock").chmod(0o644)  # as older versions have made it
        training.save(tmp_path, 2)
    finally:
        os.umask(before)
    training.engine.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    assert {path.name for path in files} == {
        "manifest.json", "rank-00000-of-00001.safetensors"
    }  # fmt: skip
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~umask}
    assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("background", [False, True])
def test_a_lock_that_cannot_be_let_go_is_told_though_the_step_is_complete(
    tmp_path: Path, background: bool
) -> None:
    training = make("zero2")
    training.step(0, 0)

    def fail(name: str, path: str) -> None:
        if name == "close" and path.endswith(".lock"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    message = r"step 1 is complete, but .*\.lock cannot be let go: Disk quota exceeded"
    saver = zs.Saver(tmp_path, training.engine, background=background)
    with watched(tmp_path, fail), pytest.raises(CheckpointError, match=message):
        saver.save(1)
        saver.wait()
    assert zs.latest_step(tmp_path) == 1 and check_everything(tmp_path) == []
    training.save(tmp_path, 2)
    training.engine.close()


# -------------------------------------------------------------------------- nobody waits for itself


@pytest.mark.parametrize(("world", "failing"), [(1, 0), (2, 0), (2, 1)])
@on_ranks()
def test_a_background_save_whose_directory_vanishes_is_told_at_once(
    rank: int, world: int, tmp_path: Path, failing: int
) -> None:
    """A background save whose directory goes before rank `failing` has written: it can leave no
    note.
    """
    folder = tmp_path / "run"
    training = make("zero3")
    engine = training.engine
    training.step(rank, 0)
    real = saving.write_shard

    def write(path: Path, *args: Any, **options: Any) -> Any:
        if rank == failing:
            # in one call: the other rank may be writing there
            os.rename(folder, folder.with_name("gone"))
        return real(path, *args, **options)

    saver = zs.Saver(folder, engine)
    with mock.patch.object(saving, "write_shard", write), pytest.raises(CheckpointError) as error:
        saver.save(1)
        saver.close()
    assert inside.exchange(engine, b"here")
    training.save(folder, 2)
    training.engine.close()
    text = str(error.value)
    assert (
        "cannot be written: No such file" in text or "was removed" in text or "is not there" in text
    )


@pytest.mark.parametrize("failing", [0, 1, 2])
@on_ranks(3)
def test_a_rank_that_can_leave_no_note_is_heard_at_the_next_call(
    rank: int, tmp_path: Path, failing: int
) -> None:
    """A background save on a disk that turned read-only for one rank: neither its file nor its
    note can be written.
    """
    training = make("zero3")
    engine = training.engine
    training.step(rank, 0)

    def broken(*args: Any, **options: Any) -> Any:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    saver = zs.Saver(tmp_path, engine)
    with ExitStack() as stack:
        if rank == failing:
            stack.enter_context(mock.patch.object(saving, "write_shard", broken))
            stack.enter_context(mock.patch.object(saving, "_leave", broken))
        saver.save(1)
        with pytest.raises(CheckpointError) as error:
            saver.wait()
    saver.save(2)
    saver.close()
    training.engine.close()
    assert zs.latest_step(tmp_path) == 2 and not list(tmp_path.glob(".saving*"))
    text = str(error.value)
    assert "Read-only file system" in text


@pytest.mark.parametrize("failing", [0, 1])
@on_ranks(2)
def test_a_rank_without_memory_for_the_copy_is_told_on_all(
    rank: int, tmp_path: Path, failing: int
) -> None:
    training = make("zero3")
    training.step(rank, 0)

    def broken(*args: Any) -> Any:
        raise MemoryError("no memory for the copy")

    saver = zs.Saver(tmp_path, training.engine)
    with (
        mock.patch.object(saver, "_copied", broken if rank == failing else saver._copied),
        pytest.raises(CheckpointError) as error,
    ):
        saver.save(1)
        saver.wait()
    saver.save(2)
    saver.close()
    training.engine.close()
    text = str(error.value)
    assert "step 1 cannot be copied" in text and "no memory for the copy" in text


class Odd:
    """A state whose ``state_dict()`` raises."""

    def __init__(self, fails: bool) -> None:
        self.fails = fails

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise OSError(errno.EIO, "the loader's file is gone")
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


@on_ranks(2)
def test_a_state_that_raises_on_one_rank_is_told_on_all(rank: int, tmp_path: Path) -> None:
    training = make("zero3")
    with pytest.raises(CheckpointError) as error:
        zs.save(tmp_path, training.engine, step=1, states={"odd": Odd(rank == 1)})
    training.save(tmp_path, 1)
    training.engine.close()
    text = str(error.value)
    assert "states['odd']" in text and "the loader's file is gone" in text


# --------------------------------------------------------------------- ranks and jobs that disagree


@on_ranks(2)
def test_different_steps_on_different_ranks_are_named(rank: int, tmp_path: Path) -> None:
    training = make("zero3")
    with pytest.raises(PlanMismatch) as error:
        training.save(tmp_path, 5 + rank)
    for wrong in (-1, 1.5, None, True):
        with pytest.raises(ConfigError, match="is not a number of steps"):
            zs.save(tmp_path, training.engine, step=wrong)  # type: ignore[arg-type]
    training.save(tmp_path, 7)
    training.engine.close()
    text = str(error.value)
    assert "different steps: rank 0 step=5, rank 1 step=6" in text


def _other_job(rank: int, world: int, folder: Path, step: int) -> None:
    training = make("zero2")
    training.load(folder)
    training.save(folder, step)
    training.engine.close()


@pytest.mark.parametrize("step", [1, 3], ids=["over a step", "between steps"])
def test_a_directory_that_another_job_saves_to_in_turn_is_noticed(
    tmp_path: Path, step: int
) -> None:
    training = make("zero2")
    training.step(0, 0)
    training.save(tmp_path, 1)
    training.save(tmp_path, 2)
    run_ranks(1, _other_job, tmp_path, step)
    with pytest.raises(
        CheckpointError,
        match=(
            rf"step {step} in {tmp_path} was written by another job since this one last saved or"
            r" loaded there: give each job"
        ),
    ):
        training.save(tmp_path, 4)
    training.save(tmp_path, 4)  # it was told
    run_ranks(1, _other_job, tmp_path, 5)
    training.load(tmp_path, step=4)
    training.save(tmp_path, 6)  # whoever loads has seen what is there
    training.engine.close()


def test_what_a_save_needs_is_told_with_what_must_stay_free(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    engine = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    free = os.statvfs_result((512, 512, 0, 0, 2000, 0, 0, 0, 0, 255))
    with (
        mock.patch.object(os, "statvfs", lambda path: free),
        pytest.raises(CheckpointError) as error,
    ):
        zs.save(tmp_path, engine, step=1)
    words = str(error.value).split()
    needed, own, beside = (
        int(words[words.index("needs") + 1]),
        int(words[words.index("needs") + 3].lstrip("(")),
        1 << 20,
    )
    assert (
        needed == own + beside > 2000 * 512
        and "and 1024000 are free" in str(error.value)
        and f"{beside} for the manifest" in str(error.value)
    )
    engine.close()
