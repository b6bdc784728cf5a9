"""Disks that are full, read-only or shared: every rank gets the same typed error, and what was
there before stays and loads.

Then the directory of steps itself: who may write, what a killed save leaves behind, which steps go,
and a step that is saved again.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest

import zeroshard as zs
import zeroshard.checkpoint.save as saving
import zeroshard.checkpoint.steps as steps
from tests.support import inside
from tests.support.broken_storage import file_limit
from tests.support.checkpoints import Training, check_everything, make, train_and_save
from tests.support.harness import on_ranks, run_ranks
from zeroshard import CheckpointError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def training() -> Iterator[Training]:
    training = make("zero2")
    training.step(0, 0)
    yield training
    training.engine.close()


# ----------------------------------------------------------------------------------------- no space


@contextmanager
def broken_leave(name: str, code: int) -> Iterator[None]:
    """Fail when the small file `name` is written."""
    real = saving._leave

    def leave(path: Path, content: str | bytes) -> None:
        if path.name == name:
            raise OSError(code, os.strerror(code))
        real(path, content)

    with mock.patch.object(saving, "_leave", leave):
        yield


@contextmanager
def late() -> Iterator[None]:
    """Write the shard when the others have long finished, or failed."""
    real = saving.write_shard

    def write(*args: Any, **options: Any) -> Any:
        time.sleep(0.3)
        return real(*args, **options)

    with mock.patch.object(saving, "write_shard", write):
        yield


@contextmanager
def fault(kind: str, rank: int, failing: tuple[int, ...]) -> Iterator[None]:
    """Have the disk fail on the ranks `failing`; every other rank but the first is late."""
    with ExitStack() as stack:
        if rank > 0:
            stack.enter_context(late())
        if rank in failing and kind == "limit":
            stack.enter_context(file_limit(20_000))
        elif rank in failing:
            stack.enter_context(
                broken_leave("manifest.json", errno.ENOSPC)
                if kind == "manifest"
                else broken_leave(f"rank-{rank}.json", errno.EIO)
            )
        yield


def _full_on(
    rank: int, world: int, folder: Path, kind: str, failing: tuple[int, ...], background: bool
) -> str:
    """Save, fail, train on and save again; return what the failure said."""
    training = make("zero3")
    training.step(rank, 0)
    training.save(folder, 1)
    kept = training.fingerprint()
    training.step(rank, 1)
    before = training.fingerprint()
    with zs.Saver(
        folder, training.engine, states={"schedule": training.schedule}, background=background
    ) as saver:
        with fault(kind, rank, failing), pytest.raises(CheckpointError) as error:
            saver.save(2)
            saver.wait()
        assert training.fingerprint() == before
        assert names(folder) == [".lock", "step-0000000001"] and check_everything(folder) == []
        training.step(rank, 2)  # goes on, also with the same saver
        saver.save(3)
    assert (
        names(folder) == [".lock", "step-0000000001", "step-0000000003"]
        and check_everything(folder) == []
    )
    assert training.load(folder, step=1).step == 1 and training.fingerprint() == kept
    training.engine.close()
    return str(error.value)


def _slow_note(rank: int, world: int, folder: Path) -> list[bool]:
    """Rank 1 takes its time to leave a note that its disk is full; return whether the directory
    was still there.
    """
    training = make("zero3")
    training.step(rank, 0)
    there: list[bool] = []

    def late(path: Path, content: str | bytes, leave: Callable[..., None] = saving._leave) -> None:
        time.sleep(0.3)
        there.append(path.parent.is_dir())
        leave(path, content)

    with (
        zs.Saver(folder, training.engine, background=True) as saver,
        mock.patch.object(saving, "_leave", late),
    ):
        with fault("limit", rank, (1,)), pytest.raises(CheckpointError, match="no space"):
            saver.save(2)
            saver.wait()
        assert names(folder) == [".lock"]
    training.engine.close()
    return there


def test_the_directory_of_a_failed_save_goes_when_no_rank_writes_any_more(tmp_path: Path) -> None:
    assert run_ranks(2, _slow_note, tmp_path) == [[], [True]]


@pytest.mark.parametrize(
    ("failing", "background"),
    [
        pytest.param(
            failing, background, id=f"{failing} {'in the background' if background else 'now'}"
        )
        for failing in ((0,), (1,), (0, 1))
        for background in (False, True)
    ],
)
def test_no_space_on_some_ranks_is_the_same_error_on_all(
    tmp_path: Path, failing: tuple[int, ...], background: bool
) -> None:
    said = run_ranks(2, _full_on, tmp_path, "limit", failing, background)
    for rank, text in enumerate(said):
        assert (
            "no space for" in text
            and "File too large" in text
            and "what was there before is untouched" in text
        ), text
        assert (
            "needs " in text
            and " are free" in text
            and ".safetensors" in text
            and str(tmp_path) in text
        )
        if rank not in failing:
            assert text.startswith(f"rank {failing[0]}: "), text


@pytest.mark.parametrize("background", [False, True], ids=["now", "in the background"])
@pytest.mark.parametrize(
    ("kind", "failing", "message"),
    [("manifest", 0, "No space left"), ("part", 1, "Input/output error")],
    ids=["manifest", "part"],
)
def test_small_files_that_cannot_be_written_are_the_same_error_on_all(
    tmp_path: Path, kind: str, failing: int, message: str, background: bool
) -> None:
    for text in run_ranks(2, _full_on, tmp_path, kind, (failing,), background):
        assert f"cannot be written: {message}" in text and str(tmp_path) in text


def test_too_little_space_is_seen_before_the_first_byte(tmp_path: Path, training: Training) -> None:
    training.save(tmp_path, 1)
    real = os.statvfs(tmp_path)
    small = os.statvfs_result((real.f_bsize, 512, 100, 50, 40, *list(real)[5:]))
    with (
        mock.patch.object(os, "statvfs", lambda path: small),
        mock.patch.object(saving, "write_shard", side_effect=AssertionError("written")),
        pytest.raises(
            CheckpointError,
            match=(
                rf"no space for step 2 in {tmp_path}: it needs \d+ bytes .*, and {40 * 512} are"
                r" free"
            ),
        ) as error,
    ):
        training.save(tmp_path, 2)
    needed = int(str(error.value).split("needs ")[1].split()[0])
    assert needed == (1 << 20) + sum(
        file.stat().st_size for file in (tmp_path / "step-0000000001").glob("*.safetensors")
    )
    assert names(tmp_path) == [".lock", "step-0000000001"]


SMALL_MOUNT = """
import os, sys
from contextlib import nullcontext
from pathlib import Path
sys.path.insert(0, ROOT)
import zeroshard as zs
import zeroshard.checkpoint.steps as steps
from tests.support.checkpoints import check_everything, make
from tests.faults.test_checkpoint_disk import late
from tests.support import inside

zs.init_distributed()
rank, folder = int(os.environ["RANK"]), Path(MOUNT) / "checkpoints"
training = make("zero3", width=48)
training.step(rank, 0)

def refused(save, *words):
    training.step(rank, 1)
    before = training.fingerprint()
    try:
        save()
    except zs.CheckpointError as error:
        expected = ("no space", "needs", "are free", str(folder), *words)
        assert all(word in str(error) for word in expected), error
    else:
        raise AssertionError("there was space?")
    assert training.fingerprint() == before
    assert sorted(os.listdir(folder)) == [".lock", "step-0000000001"]
    assert check_everything(folder) == []

training.save(folder, 1)
sizes = [file.stat().st_size for file in folder.rglob("*.safetensors")]
free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
assert 10**5 < max(sizes) < sum(sizes) < free, (sizes, free)
if rank == 0:
    # room for one file of the two
    (folder.parent / "ballast").write_bytes(bytes(free - max(sizes) - 10**5))
inside.exchange(training.engine, b"")
refused(lambda: training.save(folder, 2), "step 2")
steps.SLACK_BYTES = -(1 << 40)  # as if the space had gone after it was looked at
refused(lambda: training.save(folder, 2), "No space left on device", "safetensors")
with late() if rank == 1 else nullcontext():
    saver = zs.Saver(folder, training.engine)
    file = "rank-00001-of-00002.safetensors"
    refused(lambda: (saver.save(2), saver.wait()), "No space left on device", file)
    saver.close()
if rank == 0:
    (folder.parent / "ballast").unlink()
inside.exchange(training.engine, b"")
training.step(rank, 2)
training.save(folder, 2, keep_last=1)
assert sorted(os.listdir(folder)) == [".lock", "step-0000000002"]
assert training.load(folder).step == 2
if rank == 0:
    print("saved in the end")
"""


@pytest.mark.slow
def test_a_small_disk_fills_up_and_is_emptied(tmp_path: Path) -> None:
    """A real disk without space: a mount of 4 MB, in a mount namespace of the test's own."""
    unshare = shutil.which("unshare")
    if (
        unshare is None
        or subprocess.run([unshare, "-rm", "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("mount namespaces are not permitted here")
    mount, script = tmp_path / "mount", tmp_path / "train.py"
    mount.mkdir()
    root = Path(__file__).resolve().parent.parent.parent
    script.write_text(
        SMALL_MOUNT.replace("ROOT", repr(str(root))).replace("MOUNT", repr(str(mount)))
    )
    inside = (
        f"mount -t tmpfs -o size=4m tmpfs {mount} && exec {sys.executable} -m zeroshard run --nproc"
        f" 2 {script}"
    )
    result = subprocess.run(
        [unshare, "-rm", "sh", "-c", inside],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-3000:]
    assert "saved in the end" in result.stdout


# ---------------------------------------------------------------------------------------- read-only


@contextmanager
def unprivileged() -> Iterator[None]:
    """Lay down the right to write everywhere, for a while."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_read_only_directory_is_said_and_stays_as_it_is(training: Training) -> None:
    with tempfile.TemporaryDirectory() as name:  # not tmp_path, into which only its owner may look
        outer, folder = Path(name), Path(name) / "checkpoints"
        training.save(folder, 1)
        for path in (outer, folder):
            path.chmod(0o555)
        (folder / ".lock").chmod(0o444)
        try:
            with unprivileged():
                for target in (folder, outer / "new"):
                    with pytest.raises(
                        CheckpointError, match=f"{target} cannot be written: Permission denied"
                    ):
                        training.save(target, 2)
                assert training.load(folder).step == 1, "reading needs no right to write"
        finally:
            for path in (outer, folder):
                path.chmod(0o755)
        assert names(folder) == [".lock", "step-0000000001"] and names(outer) == ["checkpoints"]


def test_whoever_may_write_in_the_directory_may_lock_it(training: Training, tmp_path: Path) -> None:
    for mode, expected in ((0o2775, 0o660), (0o755, 0o600), (0o770, 0o660), (0o700, 0o600)):
        tmp_path.chmod(mode)
        training.save(tmp_path, 1)
        lock = (tmp_path / ".lock").stat()
        assert (lock.st_mode & 0o777, lock.st_gid) == (expected, tmp_path.stat().st_gid), oct(mode)


def test_a_lock_that_another_member_cannot_open_is_named_with_its_owner(training: Training) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, lock = Path(name), Path(name) / ".lock"
        folder.chmod(0o777)
        lock.touch(mode=0o000)  # as older versions have made it, but for its owner
        owner = f"{lock} belongs to uid {os.geteuid()} and cannot be opened by uid"
        with unprivileged(), pytest.raises(CheckpointError, match=owner):
            training.save(folder, 1)
        lock.unlink()
        training.save(folder, 1)


LACKING = [
    ("flock", errno.ENOSYS, "has no locks (Function not implemented)"),
    ("flock", errno.EOPNOTSUPP, "has no locks (Operation not supported)"),
    ("fsync", errno.EINVAL, "cannot sync a directory (Invalid argument)"),
    ("fsync", errno.EBADF, "cannot sync a directory (Bad file descriptor)"),
]


@pytest.mark.parametrize(("call", "code", "told"), LACKING)
def test_a_call_that_a_file_system_lacks_is_told_once(
    training: Training,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int,
    told: str,
) -> None:
    """Lustre without `-o flock`, and shares of other systems."""
    module = steps.fcntl if call == "flock" else os
    real = getattr(module, call)

    def lacking(fd: int, *args: int) -> None:
        if call == "flock" or Path(f"/proc/self/fd/{fd}").is_dir():
            raise OSError(code, os.strerror(code))
        real(fd, *args)

    monkeypatch.setattr(module, call, lacking)
    monkeypatch.setattr(steps, "_told", set())
    for step in (1, 2, 2):
        training.save(tmp_path, step, keep_last=1)
    monkeypatch.undo()
    assert training.load(tmp_path).step == 2 and check_everything(tmp_path) == []
    (message,) = [record.getMessage() for record in caplog.records]
    assert told in message


@on_ranks(2)
def test_a_step_of_another_open_engine_is_not_replaced(rank: int, tmp_path: Path) -> None:
    """Save as a generator and a critic do; look at the error of the second."""
    first, second = make("zero2"), make("zero2")
    for training in (first, second):
        training.step(rank, 0)
    first.save(tmp_path, 1)
    first.save(tmp_path, 1)  # its own may be replaced
    second.save(tmp_path, 2)
    with pytest.raises(CheckpointError) as error:
        second.save(tmp_path, 1)
    shutil.rmtree(tmp_path / "step-0000000001", ignore_errors=True)
    inside.exchange(first.engine, b"")
    second.save(tmp_path, 1)
    second.engine.close()
    first.save(tmp_path, 1)  # of one that is closed
    later = make("zero2")  # begins the run again, in a notebook's cell
    later.step(rank, 0)
    later.save(tmp_path, 1)
    for training in (first, later):
        training.engine.close()
    (text,) = [str(error.value)]
    assert f"{tmp_path}/step-0000000001 is of another engine of this program" in text
    assert "a directory of its own, or close() the other one first" in text


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_path_that_is_no_directory_is_said(
    tmp_path: Path, training: Training, where: str
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match=r"cannot be written: (File exists|Not a directory)"):
        training.save(tmp_path / where, 1)
    with pytest.raises(CheckpointError, match="cannot be read: Not a directory"):
        training.load(tmp_path / where)
    assert (tmp_path / "file").read_text() == "mine"


# ----------------------------------------------------------------------------------------- two jobs

HOLDER = (
    "import sys, time; from pathlib import Path; from zeroshard.checkpoint.steps import lock\nwith"
    " lock(Path(sys.argv[1])): print(flush=True); time.sleep(60)"
)


def test_a_second_job_is_told_who_writes_and_may_when_that_one_is_dead(
    tmp_path: Path, training: Training
) -> None:
    training.save(tmp_path, 1)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"\n"
        message = (
            rf"{tmp_path} is being written by process {holder.pid} on {os.uname().nodename}: give"
            r" each job a directory of its own"
        )
        with pytest.raises(CheckpointError, match=message):
            training.save(tmp_path, 2)
        assert training.load(tmp_path).step == 1, "reading needs no lock"
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    training.save(tmp_path, 2)
    assert names(tmp_path) == [".lock", "step-0000000001", "step-0000000002"]


@on_ranks(2)
def test_every_rank_is_told_that_another_job_writes(rank: int, tmp_path: Path) -> None:
    """Rank 0 alone looks at the lock, and finds another writer."""
    training = make("zero3")
    with steps.lock(tmp_path) if rank == 0 else nullcontext():
        inside.exchange(training.engine, b"")
        with pytest.raises(CheckpointError) as error:
            training.save(tmp_path, 1)
        inside.exchange(training.engine, b"")
    training.save(tmp_path, 1)
    training.engine.close()
    text = str(error.value)
    assert "is being written by process" in text


# ---------------------------------------------------------------------------------------- leftovers


def test_what_killed_saves_left_is_never_read_and_goes_with_the_next_save(
    tmp_path: Path, training: Training
) -> None:
    step = training.save(tmp_path, 1)
    for name in (
        ".saving-0000000002-0a0b0c0d",
        ".saving-0000000001-ffffffff",
        ".removing-step-0000000009",
        ".replaced-step-0000000001",
    ):
        shutil.copytree(step, tmp_path / name)
    (tmp_path / ".saving-0000000002-0a0b0c0d" / "manifest.json").unlink()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-12").mkdir()  # no name of ours
    assert list(steps.list_steps(tmp_path)) == [1] and training.load(tmp_path).path == step
    training.save(tmp_path, 2)
    assert names(tmp_path) == [
        ".lock",
        "notes.txt",
        "step-0000000001",
        "step-0000000002",
        "step-12",
    ]
    assert check_everything(tmp_path) == []


def test_a_step_that_lost_its_manifest_is_not_passed_over_in_silence(
    tmp_path: Path, training: Training
) -> None:
    for step in (1, 2):
        training.save(tmp_path, step)
    (tmp_path / "step-0000000002" / "manifest.json").unlink()
    assert zs.latest_step(tmp_path) == 2
    with pytest.raises(
        CheckpointError, match=r"step-0000000002/manifest\.json cannot be read: No such file"
    ):
        training.load(tmp_path)


# ----------------------------------------------------------------------------------- which steps go


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, range(8)),
        ({"keep_last": 3}, [5, 6, 7]),
        ({"keep_last": 1}, [7]),
        ({"keep_last": 2, "keep_every": 3}, [0, 3, 6, 7]),
    ],
    ids=["all", "three", "one", "every third"],
)
def test_only_the_steps_that_shall_stay_stay(
    tmp_path: Path, training: Training, options: dict[str, int], left: list[int]
) -> None:
    for step in range(8):
        training.save(tmp_path, step, **options)
    assert names(tmp_path) == [".lock", *(f"step-{step:010d}" for step in left)]
    assert check_everything(tmp_path) == []


def test_the_step_just_written_stays_though_newer_ones_are_there(
    tmp_path: Path, training: Training
) -> None:
    """Whoever goes back to an older step and trains on from there saves lower numbers than those
    that lie about.
    """
    for step in (1, 7, 8, 9):
        training.save(tmp_path, step)
    assert steps.prune(tmp_path, keep_last=2, keep_every=None, written=1) == [7]
    assert list(steps.list_steps(tmp_path)) == [1, 8, 9]


# ------------------------------------------------------------------------------ the same step again


class Killed(BaseException):
    """Ends a save where it stands, as SIGKILL would: no handler of ours takes it."""


@pytest.mark.parametrize(
    "exchange",
    [pytest.param(True, marks=pytest.mark.slow), False],
    ids=["in one call", "in two renames"],
)
def test_a_step_saved_again_is_replaced_and_always_there(
    tmp_path: Path, training: Training, exchange: bool
) -> None:
    training.save(tmp_path, 1)
    seen: list[int] = []
    over = threading.Event()

    def watch() -> None:
        while not over.is_set():
            seen.append(list(steps.list_steps(tmp_path)) == [1])

    watcher = threading.Thread(target=watch)
    with (
        mock.patch.object(
            steps, "_exchange", steps._exchange if exchange else lambda one, other: False
        ),
        mock.patch.object(steps, "_remove", wraps=steps._remove) as remove,
    ):
        watcher.start()
        for number in range(20):
            training.step(0, number)
            training.save(tmp_path, 1)
    over.set()
    watcher.join()
    gone = {call.args[0].name[:9] for call in remove.call_args_list}
    assert gone == {".saving-0" if exchange else ".replaced"}, (
        "in one call the old one comes to stand where the new one was written"
    )
    assert len(seen) > 20 and (all(seen) or not exchange)
    expected = training.fingerprint()
    training.step(0, 99)
    training.load(tmp_path)
    assert training.fingerprint() == expected
    assert names(tmp_path) == [".lock", "step-0000000001"] and check_everything(tmp_path) == []


def test_a_kill_between_the_two_renames_leaves_the_older_one_to_load(
    tmp_path: Path, training: Training
) -> None:
    training.save(tmp_path, 1)
    expected = training.fingerprint()
    training.step(0, 1)
    real = os.rename

    def killed(source: Path, target: Path) -> None:
        if target.name == "step-0000000001":
            raise Killed
        real(source, target)

    without = mock.patch.object(steps, "_exchange", lambda one, other: False)
    with without, mock.patch.object(os, "rename", killed), pytest.raises(Killed):
        training.save(tmp_path, 1)
    left = names(tmp_path)
    assert (
        left[:2] == [".lock", ".replaced-step-0000000001"]
        and left[2].startswith(".saving-0000000001-")
        and len(left) == 3
    )
    restored = training.load(tmp_path)
    assert (
        restored.step == 1
        and restored.path.name == ".replaced-step-0000000001"
        and training.fingerprint() == expected
    )
    training.save(tmp_path, 2)
    assert names(tmp_path) == [".lock", ".replaced-step-0000000001", "step-0000000002"], (
        "it still counts"
    )
    training.step(0, 2)
    training.save(tmp_path, 1)
    training.save(tmp_path, 3)
    assert (
        names(tmp_path) == [".lock", "step-0000000001", "step-0000000002", "step-0000000003"]
        and check_everything(tmp_path) == []
    )


@pytest.mark.parametrize("exchange", [True, False], ids=["in one call", "in two renames"])
def test_a_rename_that_fails_leaves_the_older_one(
    tmp_path: Path, training: Training, exchange: bool
) -> None:
    training.save(tmp_path, 1)
    expected = training.fingerprint()
    training.step(0, 1)

    def broken(*args: Any) -> NoReturn:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with (
        mock.patch.object(steps, "_exchange", broken if exchange else lambda one, other: False),
        mock.patch.object(os, "rename", os.rename if exchange else _after(broken, 1)),
        pytest.raises(
            CheckpointError, match="step-0000000001 cannot be put in place: Input/output"
        ),
    ):
        training.save(tmp_path, 1)
    training.load(tmp_path)
    assert training.fingerprint() == expected and not [
        name for name in names(tmp_path) if name.startswith(".saving")
    ]


def _after(broken: Any, calls: int) -> Any:
    """Return os.rename that fails once it comes to steps, after so many of them."""
    real, count = os.rename, 0

    def rename(source: Path, target: Path) -> None:
        nonlocal count
        if "step-" in target.name:
            count += 1
            if count > calls:
                broken()
        real(source, target)

    return rename


def test_two_ranks_leave_nothing_but_steps(tmp_path: Path) -> None:
    run_ranks(2, train_and_save, tmp_path, (1, 2, 2, 3))
    assert names(tmp_path) == [".lock", "step-0000000001", "step-0000000002", "step-0000000003"]
    for step in steps.list_steps(tmp_path).values():
        assert names(step) == [
            "manifest.json",
            "rank-00000-of-00002.safetensors",
            "rank-00001-of-00002.safetensors",
        ]
