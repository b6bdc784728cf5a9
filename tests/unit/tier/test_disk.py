"""The disk tier by itself: what a disk can do wrong, what a killed process leaves, and how
transfers are cut, ordered and buffered.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import itertools
import logging
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paced_link import Paced
from tests.support.broken_storage import file_limit
from tests.support.harness import ROOT
from tests.support.launched import PATHS
from zeroshard.core.layout import round_up
from zeroshard.errors import StorageError
from zeroshard.tier import disk, swapdir
from zeroshard.tier.disk import UNIT, DiskStore
from zeroshard.tier.swapdir import BLOCK, SwapDirectory, safe_name
from zeroshard.tier.transfer import Staging, TierTransfer, cut

CPU = torch.device("cpu")
NUMEL = 3 << 18  # 3 MiB of fp32
KEY = "blocks.3:fp32 exp_avg"
MAX_SECONDS = 300.0


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    store = DiskStore(SwapDirectory(tmp_path, rank=0), CPU)
    yield store
    store.close()


@pytest.fixture
def checked(tmp_path: Path) -> Iterator[DiskStore]:
    """A store that verifies."""
    store = DiskStore(SwapDirectory(tmp_path, rank=0), CPU, verify=True)
    yield store
    store.close()


def filled(store: DiskStore, key: str = KEY, numel: int = NUMEL, value: float = 1.0) -> Any:
    storage = store.allocate(key, numel, torch.float32)
    storage.write(0, numel, torch.full((numel,), float(value))).wait()
    return storage


def read(storage: Any, start: int, stop: int) -> torch.Tensor:
    out = torch.empty(stop - start, dtype=storage.dtype)
    storage.read(start, stop, out).wait()
    return out


def run_python(
    program: str, *arguments: str, prefix: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment(),
    )


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": PATHS}


# ----------------------------------------------------------------------------------------- O_DIRECT


def test_files_are_opened_past_the_page_cache_wherever_the_file_system_can(
    store: DiskStore, tmp_path: Path
) -> None:
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT))
        can = True
    except OSError:
        can = False
    storage = store.allocate(KEY, 10, torch.float32)
    assert store.direct is can
    assert bool(fcntl.fcntl(storage._fd, fcntl.F_GETFL) & os.O_DIRECT) is can


@pytest.mark.parametrize("refuses", ["open", "write"])
@pytest.mark.parametrize("rank", [0, 1])
def test_where_o_direct_is_refused_rank_0_says_so_once_and_all_works(
    refuses: str,
    rank: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real_open, real_write = os.open, os.pwritev

    def refusing_open(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, *arguments, **options)

    def refusing_write(fd: int, *arguments: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(fd, *arguments)

    monkeypatch.setattr(
        os,
        "open" if refuses == "open" else "pwritev",
        refusing_open if refuses == "open" else refusing_write,
    )
    with caplog.at_level(logging.WARNING, "zeroshard"):
        store = DiskStore(SwapDirectory(tmp_path, rank=rank), CPU)
        storages = [filled(store, value=index) for index in range(2)]
    assert not store.direct and [read(storage, 5, 9).tolist() for storage in storages] == [
        [0] * 4,
        [1] * 4,
    ]
    store.close()
    assert len(caplog.records) == (rank == 0) and all(
        "O_DIRECT" in record.message for record in caplog.records
    )


def test_aligned_buffers_go_to_the_disk_without_a_copy(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, copies = filled(store), []
    real = ctypes.memmove
    monkeypatch.setattr(
        disk.ctypes, "memmove", lambda *arguments: (copies.append(arguments[2]), real(*arguments))
    )
    buffer = store.staging.tensor(NUMEL, torch.float32)
    storage.read(0, NUMEL, buffer).wait()
    storage.write(1024, NUMEL, buffer[: NUMEL - 1024]).wait()
    assert copies == [] and (buffer == 1).all()
    storage.read(0, NUMEL - 1, buffer[:-1]).wait()
    assert copies == [BLOCK - 4]  # only the last block is not whole
    store.staging.give(buffer)


def test_a_large_transfer_is_several_requests_in_flight(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    numel = 16 << 18
    storage = filled(store, numel=numel)
    real, meeting = os.preadv, threading.Barrier(8, timeout=MAX_SECONDS)

    def meet(*arguments: Any) -> int:
        meeting.wait()  # passes only if all eight are there at once
        return real(*arguments)

    buffer = store.staging.tensor(numel, torch.float32)
    monkeypatch.setattr(os, "preadv", meet)
    storage.read(0, numel, buffer).wait()
    monkeypatch.undo()
    assert (buffer == 1).all()


units = st.sampled_from([BLOCK, 4 * BLOCK])


@given(
    storage_bytes=st.integers(0, 60 * BLOCK),
    data=st.data(),
    unit=units,
    per_chunk=st.integers(1, 3),
)
def test_pieces_tile_the_transfer_and_share_no_unit(
    storage_bytes: int, data: st.DataObject, unit: int, per_chunk: int
) -> None:
    start = data.draw(st.integers(0, storage_bytes))
    stop = data.draw(st.integers(start, storage_bytes))
    pieces = cut(start, stop, storage_bytes=storage_bytes, unit=unit, chunk=unit * per_chunk)
    assert sum(piece.stop - piece.start for piece in pieces) == stop - start
    assert all(a.stop == b.start and a.high == b.low for a, b in itertools.pairwise(pieces))
    for piece in pieces:
        assert piece.low <= piece.start < piece.stop <= piece.high <= round_up(storage_bytes, BLOCK)
        assert piece.low % unit == 0 and (
            piece.high % unit == 0 or piece.high == round_up(storage_bytes, BLOCK)
        )
        assert piece.high - piece.low <= unit * per_chunk
        assert piece.whole or piece.high - piece.low <= unit, (
            "only a single unit may be read, changed and written"
        )
    assert all(piece.whole for piece in pieces[1:-1])
    if pieces:
        assert (pieces[0].start, pieces[-1].stop) == (start, stop)


# -------------------------------------------------------------------------------------------- order


class Gate:
    """Holds every write until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()
        real: Callable[..., int] = getattr(os, call)

        def held(*arguments: Any) -> int:
            self.reached.set()
            assert self.open.wait(MAX_SECONDS)
            return real(*arguments)

        monkeypatch.setattr(os, call, held)


def test_a_read_waits_for_the_overlapping_write_before_it_and_for_no_other(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, other = filled(store), filled(store, "other")
    gate = Gate(monkeypatch, "pwritev")
    write = storage.write(0, 1000, torch.full((1000,), 2.0))
    out, beside = torch.empty(10), torch.empty(1024)
    behind = storage.read(990, 1000, out)
    storage.read(NUMEL - 1024, NUMEL, beside).wait()
    other.read(0, 1024, beside).wait()
    assert gate.reached.wait(MAX_SECONDS)
    time.sleep(0.02)
    assert not write.done() and not behind.done()
    gate.open.set()
    behind.wait()
    assert (out == 2).all() and (read(storage, 1000, 1100) == 1).all()


def test_a_write_waits_for_the_overlapping_read_before_it(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, out = filled(store), torch.empty(NUMEL)
    gate = Gate(monkeypatch, "preadv")
    reading, writing = storage.read(0, NUMEL, out), storage.write(0, NUMEL, torch.zeros(NUMEL))
    time.sleep(0.02)
    assert not writing.done()
    gate.open.set()
    writing.wait()
    reading.wait()
    assert (out == 1).all() and not read(storage, 0, NUMEL).any()


# ------------------------------------------------------------------------------- full, no directory


def check_full(store: DiskStore, num_bytes: int) -> None:
    """A storage that does not fit is refused where it is made, leaves nothing, and others go on."""
    small = filled(store, "small", 1024)
    live, names = store.account.live, os.listdir(store.path)
    with pytest.raises(StorageError) as error:
        store.allocate(KEY, num_bytes // 4, torch.float32)
    for part in (KEY, str(round_up(num_bytes, BLOCK)), "are free", str(store.path)):
        assert part in str(error.value), (part, str(error.value))
    assert store.account.live == live and os.listdir(store.path) == names
    small.write(0, 1024, torch.zeros(1024)).wait()
    assert not read(small, 0, 1024).any()


def test_a_storage_that_does_not_fit_is_refused_when_it_is_made(store: DiskStore) -> None:
    with file_limit(100_000):
        check_full(store, 200_000)


FULL_THEN_READ_ONLY = """
import subprocess, sys
from pathlib import Path
from types import FrameType
import torch
from tests.unit.tier.test_disk import check_full
from zeroshard.errors import StorageError
from zeroshard.tier.disk import DiskStore
from zeroshard.tier.swapdir import SwapDirectory
folder, other, may_mount = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "yes"
left = DiskStore(SwapDirectory(other, rank=0), torch.device("cpu"))  # closed by nobody
storage = left.allocate("state", 100_000, torch.float32)
storage.write(0, 100_000, torch.ones(100_000))
if not may_mount:
    sys.exit()
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], check=True)
store = DiskStore(SwapDirectory(folder, rank=0), torch.device("cpu"))
check_full(store, 1 << 20)
rest = [store.allocate(str(i), 4096, torch.float32) for i in range(8)]
try:
    for i in range(100):
        rest.append(store.allocate(str(i), 4096, torch.float32))
except StorageError as error:
    print("full:", error)
for storage in rest:
    storage.write(0, 4096, torch.ones(4096)).wait()
store.close()
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
try:
    DiskStore(SwapDirectory(folder, rank=0), torch.device("cpu"))
except StorageError as error:
    print("read-only:", error)
"""


def test_a_full_and_a_read_only_file_system_are_told_and_a_normal_exit_leaves_nothing(
    tmp_path: Path,
) -> None:
    may_mount = not subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode
    (tmp_path / "small").mkdir()
    (tmp_path / "left").mkdir()
    arguments = (str(tmp_path / "small"), str(tmp_path / "left"), "yes" if may_mount else "no")
    done = run_python(
        FULL_THEN_READ_ONLY, *arguments, prefix=("unshare", "-rm") if may_mount else ()
    )
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "left").iterdir()) == []
    if not may_mount:
        pytest.skip(
            "CANNOT MOUNT A SMALL tmpfs HERE (unshare -rm is refused): a full file system is only"
            " pretended by RLIMIT_FSIZE"
        )
    full, read_only = done.stdout.splitlines()
    assert "16384 bytes are needed" in full and "No space left" in full
    assert read_only.startswith(f"read-only: disk_path {tmp_path / 'small'} cannot be written to")


def test_a_directory_that_cannot_be_used_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for name, reason in (("nothing", "does not exist"), ("file", "is not a directory")):
        with pytest.raises(StorageError, match=reason) as error:
            DiskStore(SwapDirectory(tmp_path / name, rank=0), CPU)
        assert str(tmp_path / name) in str(error.value)


def test_a_directory_that_others_own_is_refused() -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        folder.chmod(0o755 if os.geteuid() == 0 else 0o555)
        if os.geteuid() == 0:
            os.seteuid(65534)
        try:
            with pytest.raises(StorageError, match="cannot be written to"):
                DiskStore(SwapDirectory(folder, rank=0), CPU)
        finally:
            if os.getuid() == 0:
                os.seteuid(0)
    finally:
        shutil.rmtree(folder)


def test_too_many_open_files_are_told_with_the_remedy(store: DiskStore) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.open("/dev/null", os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 3, hard))
    try:
        with pytest.raises(StorageError, match="ulimit -n"):
            for index in range(100):
                store.allocate(f"{KEY} {index}", 4, torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_files_are_set_aside_in_whole_blocks_and_named_readably(store: DiskStore) -> None:
    storage = store.allocate(KEY, 1025, torch.float32)
    facts = os.stat(storage.path)
    assert facts.st_size == 2 * BLOCK and facts.st_blocks * 512 >= 2 * BLOCK
    assert (
        storage.path.name == "0000-blocks.3_fp32_exp_avg.storage"
        and stat.S_IMODE(facts.st_mode) == 0o600
    )
    assert stat.S_IMODE(os.stat(store.path).st_mode) == 0o700
    for key in ("../../outside", "a/b", "", "ä" * 300, "x" * 500, ".", "same", "same"):
        assert store.allocate(key, 1, torch.float32).path.parent == store.path
    assert len(os.listdir(store.path)) == 10 and safe_name("..") == ".."
    storage.close()
    assert not storage.path.exists()


# --------------------------------------------------------------------------- what a disk does wrong


def test_a_file_that_was_cut_off_is_told_by_name_again_and_again_and_others_go_on(
    store: DiskStore,
) -> None:
    storage, other = filled(store), filled(store, "other", value=2.0)
    os.truncate(storage.path, BLOCK)
    out = torch.empty(NUMEL)
    work = storage.read(0, NUMEL, out)
    messages = set()
    for _ in range(3):
        with pytest.raises(StorageError) as error:
            work.wait()
        messages.add(str(error.value))
    assert len(messages) == 1 and work.done()
    assert (
        KEY in messages.pop()
        and str(storage.path) in str(error.value)
        and f"byte {BLOCK}" in str(error.value)
    )
    with pytest.raises(StorageError, match="cut off"), storage.borrowed(0, 10, write=True):
        pass
    assert store.staging.lent_bytes == 0
    assert (read(other, 0, NUMEL) == 2).all()


def test_writing_to_a_file_that_was_cut_off_does_not_hide_the_hole(store: DiskStore) -> None:
    storage = filled(store)
    os.truncate(storage.path, 0)
    with pytest.raises(StorageError, match="cut off"):
        storage.write(NUMEL - 1024, NUMEL, torch.ones(1024)).wait()
    with pytest.raises(StorageError, match=KEY):
        read(storage, 0, 10)


def test_a_short_read_is_an_error(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, real = filled(store), os.preadv
    monkeypatch.setattr(
        os,
        "preadv",
        lambda fd, views, offset: real(fd, [views[0][:BLOCK]], offset) if offset == 0 else 0,
    )
    with pytest.raises(StorageError, match=f"ends at byte {BLOCK}"):
        read(storage, 0, 4096)
    monkeypatch.undo()
    assert (read(storage, 0, 4096) == 1).all()


def test_partial_reads_and_writes_are_continued(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, real_read, real_write = (
        store.allocate(KEY, NUMEL, torch.float32),
        os.preadv,
        os.pwritev,
    )
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, offset: real_read(fd, [views[0][: 2 * BLOCK]], offset)
    )
    monkeypatch.setattr(
        os, "pwritev", lambda fd, views, offset: real_write(fd, [views[0][: 2 * BLOCK]], offset)
    )
    values = torch.arange(float(NUMEL))
    storage.write(0, NUMEL, values).wait()
    assert torch.equal(read(storage, 0, NUMEL), values)


def test_a_deleted_or_replaced_file_goes_on_working(store: DiskStore) -> None:
    deleted, replaced = filled(store), filled(store, "other")
    os.unlink(deleted.path)
    os.unlink(replaced.path)
    replaced.path.write_bytes(bytes(100))
    for storage in (deleted, replaced):
        storage.write(0, 10, torch.zeros(10)).wait()
        assert read(storage, 8, 12).tolist() == [0, 0, 1, 1]
        storage.close()


def broken(real: Callable[..., int], fd: int, code: int = errno.EIO) -> Callable[..., int]:
    def call(which: int, *arguments: Any) -> int:
        if which == fd:
            raise OSError(code, os.strerror(code))
        return real(which, *arguments)

    return call


def test_a_read_error_surfaces_at_wait_and_passes_when_the_disk_recovers(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, other = filled(store), filled(store, "other")
    monkeypatch.setattr(os, "preadv", broken(os.preadv, storage._fd))
    work = storage.read(0, NUMEL, torch.empty(NUMEL))
    for _ in range(2):
        with pytest.raises(StorageError, match="Input/output error") as error:
            work.wait()
        assert (
            KEY in str(error.value)
            and str(storage.path) in str(error.value)
            and "cannot read bytes" in str(error.value)
        )
    with pytest.raises(StorageError, match=KEY), storage.borrowed(0, NUMEL, write=False):
        raise AssertionError("must not be entered")
    assert (read(other, 0, NUMEL) == 1).all()
    monkeypatch.undo()
    assert (read(storage, 0, NUMEL) == 1).all()


@pytest.mark.parametrize("edge", [False, True], ids=["whole", "edge"])
def test_after_a_write_error_nothing_stale_is_ever_read(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, edge: bool
) -> None:
    storage, other = filled(store), filled(store, "other")
    stop = 10 if edge else NUMEL
    call = "preadv" if edge else "pwritev"  # an edge is read first: that may fail as well
    monkeypatch.setattr(os, call, broken(getattr(os, call), storage._fd))
    write, behind = (
        storage.write(0, stop, torch.zeros(stop)),
        storage.read(0, stop, torch.empty(stop)),
    )
    for work in (write, behind):
        with pytest.raises(StorageError, match=KEY):
            work.wait()
    monkeypatch.undo()
    with pytest.raises(StorageError, match="an earlier write to it failed"):
        read(storage, 0, stop)
    with pytest.raises(StorageError, match="an earlier write to it failed"):
        storage.write(0, NUMEL, torch.ones(NUMEL)).wait()
    other.write(0, 5, torch.zeros(5)).wait()
    assert read(other, 4, 6).tolist() == [0, 1]
    storage.close()


def test_a_failed_write_back_of_borrowed_is_an_error_and_gives_its_buffer_back(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = filled(store)
    with (
        pytest.raises(StorageError, match="cannot write"),
        storage.borrowed(0, NUMEL, write=True) as tensor,
    ):
        monkeypatch.setattr(os, "pwritev", broken(os.pwritev, storage._fd))
    assert tensor.isnan().all() and store.staging.lent_bytes == 0


def test_a_failed_work_that_is_kept_keeps_no_tensor_alive(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, out = filled(store), torch.empty(NUMEL)
    monkeypatch.setattr(os, "preadv", broken(os.preadv, storage._fd))
    work, alive = storage.read(1, NUMEL, out[1:]), weakref.ref(out)
    with pytest.raises(StorageError):
        work.wait()
    del out
    gc.collect()
    assert alive() is None and work.done()


def test_an_interrupted_borrower_keeps_its_buffer_until_the_disk_is_done_with_it(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = filled(store)
    gate = Gate(monkeypatch, "preadv")
    ended: list[BaseException] = []

    def interrupted(_: TierTransfer) -> None:
        assert gate.reached.wait(MAX_SECONDS)
        raise KeyboardInterrupt

    def borrow() -> None:
        try:
            with storage.borrowed(0, NUMEL, write=True):
                pass
        except KeyboardInterrupt as error:
            ended.append(error)

    monkeypatch.setattr(TierTransfer, "wait", interrupted)
    thread = threading.Thread(target=borrow)
    thread.start()
    assert gate.reached.wait(MAX_SECONDS)
    time.sleep(0.02)
    assert thread.is_alive() and store.staging.lent_bytes == 4 * NUMEL
    gate.open.set()
    thread.join(MAX_SECONDS)
    assert len(ended) == 1 and store.staging.lent_bytes == 0


def test_our_own_mistakes_surface_at_wait_too(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = filled(store)

    def wrong(*_: Any) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(os, "preadv", wrong)
    work = storage.read(0, NUMEL, torch.empty(NUMEL))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            work.wait()
    monkeypatch.undo()
    assert (read(storage, 0, 10) == 1).all()


# ---------------------------------------------------------------------------------------- checksums


def test_with_verify_a_changed_byte_is_found_wherever_its_unit_is_read(checked: DiskStore) -> None:
    storage = filled(checked)
    with storage.path.open("r+b") as file:
        file.seek(UNIT + 77)
        file.write(b"\x01")
        os.fsync(file.fileno())
    first = UNIT // 4
    for start, stop in ((0, NUMEL), (first, 2 * first), (2 * first - 3, 2 * first)):
        with pytest.raises(StorageError) as error:
            read(storage, start, stop)
        for part in (
            KEY,
            str(storage.path),
            f"bytes {UNIT} to {2 * UNIT} are not what was written",
        ):
            assert part in str(error.value)
    assert (read(storage, 0, first) == 1).all() and (read(storage, 2 * first, NUMEL) == 1).all()
    # the rest of the unit would be made valid by a new sum
    with pytest.raises(StorageError, match="are not what was written"):
        storage.write(first, first + 1, torch.zeros(1)).wait()


def test_with_verify_a_write_that_never_arrived_is_found(
    checked: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = filled(checked)
    monkeypatch.setattr(os, "pwritev", lambda fd, views, offset: len(views[0]))
    storage.write(0, NUMEL, torch.zeros(NUMEL)).wait()
    monkeypatch.undo()
    with pytest.raises(StorageError, match="are not what was written"):
        read(storage, 0, 10)


def test_with_verify_a_file_whose_older_contents_are_put_back_is_found(checked: DiskStore) -> None:
    storage = filled(checked, value=1.0)
    old = storage.path.read_bytes()
    storage.write(0, NUMEL, torch.zeros(NUMEL)).wait()
    with storage.path.open("r+b") as file:
        file.write(old)
        os.fsync(file.fileno())
    with pytest.raises(StorageError, match="are not what was written"):
        read(storage, 0, NUMEL)


def test_with_verify_ragged_ranges_and_ends_are_still_right(checked: DiskStore) -> None:
    numel = UNIT // 4 + 1500
    storage, plain = checked.allocate(KEY, numel, torch.float32), torch.zeros(numel)
    for start, stop in ((0, 5), (UNIT // 4 - 3, numel), (5, UNIT // 4 - 3), (100, numel - 1)):
        values = torch.rand(stop - start)
        plain[start:stop] = values
        storage.write(start, stop, values).wait()
    assert torch.equal(read(storage, 0, numel), plain)


def test_without_verify_nothing_is_hashed(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr(disk, "xxhash", None)
    assert (read(filled(store), 0, NUMEL) == 1).all()


# ------------------------------------------------------------------------ directories and processes

WRITE_AND_WAIT = """
import sys, torch
from zeroshard.tier.disk import DiskStore
from zeroshard.tier.swapdir import SwapDirectory
store = DiskStore(SwapDirectory(sys.argv[1], rank=0), torch.device("cpu"))
storage = store.allocate("state", 100_000, torch.float32)
work = storage.write(0, 100_000, torch.ones(100_000))
print(store.path, flush=True)
sys.stdin.read()
"""


def test_what_a_killed_process_leaves_the_next_one_removes_and_the_living_keep_theirs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = DiskStore(SwapDirectory(tmp_path, rank=1), CPU)
    arguments = [sys.executable, "-c", WRITE_AND_WAIT, str(tmp_path)]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        dead = Path(process.stdout.readline().strip())
        second = DiskStore(SwapDirectory(tmp_path, rank=2), CPU)
        assert {dead, first.path, second.path} == set(tmp_path.iterdir()), (
            "it lives, in another process"
        )
        process.kill()
    assert (dead / "0000-state.storage").exists()
    with caplog.at_level(logging.INFO, "zeroshard"):
        third = DiskStore(SwapDirectory(tmp_path, rank=3), CPU)
    assert {first.path, second.path, third.path} == set(tmp_path.iterdir())
    assert [record.message for record in caplog.records] == [
        f"removed {dead}, left by a process that was killed"
    ]
    for store in (first, second, third):
        store.close()


def test_a_store_that_is_forgotten_leaves_nothing(tmp_path: Path) -> None:
    before = threading.active_count()
    descriptors = len(os.listdir("/proc/self/fd"))
    store = DiskStore(SwapDirectory(tmp_path, rank=0), CPU)
    filled(store)
    path = store.path
    assert path.exists() and threading.active_count() == before + 8
    del store
    gc.collect()
    assert list(tmp_path.iterdir()) == []
    wait_until(lambda: threading.active_count() == before)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MAX_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_threads_are_named_daemons_and_end_with_the_store(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    store = DiskStore(SwapDirectory(tmp_path, rank=0), CPU, queue_depth=3)
    threads = set(threading.enumerate()) - before
    assert sorted(thread.name for thread in threads) == [
        f"zeroshard-disk-{index}" for index in range(3)
    ]
    assert all(thread.daemon for thread in threads)
    storage = filled(store)
    store.close()
    assert not any(thread.is_alive() for thread in threads) and list(tmp_path.iterdir()) == []
    with pytest.raises(AssertionError, match="closed"):
        storage.read(0, 1, torch.empty(1))


def test_what_is_under_way_when_the_process_ends_still_ends(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = filled(store)
    gate = Gate(monkeypatch, "pwritev")
    # each waits for the one before
    works = [storage.write(0, NUMEL, torch.ones(NUMEL)) for _ in range(3)]
    store._end()  # what happens at exit, before others close their stores there
    gate.open.set()
    for work in works:
        work.wait()
    with pytest.raises(AssertionError, match="closed"):
        storage.read(0, 1, torch.empty(1))
    store.close()


def test_two_stores_in_one_directory_do_not_meet(tmp_path: Path) -> None:
    stores = [DiskStore(SwapDirectory(tmp_path, rank=0, run="same run"), CPU) for _ in range(2)]
    storages = [filled(store, value=index) for index, store in enumerate(stores)]
    assert [read(storage, 0, 1).item() for storage in storages] == [0, 1]
    assert all("zeroshard-swap-same_run-0-" in store.path.name for store in stores)
    stores[0].close()
    assert read(storages[1], NUMEL - 1, NUMEL).item() == 1 and list(tmp_path.iterdir()) == [
        stores[1].path
    ]
    stores[1].close()


def abandoned(folder: Path, *, hidden: bool = False, lock: bool = True, number: int = 0) -> Path:
    path = folder / f"{'.' * hidden}zeroshard-swap-run-0-{2**22 + number}-0123abcd"
    path.mkdir()
    (path / "0000-state.storage").write_bytes(bytes(10))
    if lock:
        (path / "lock").touch()
    return path


def test_ranks_that_start_at_once_remove_what_is_abandoned_and_never_each_other(
    tmp_path: Path,
) -> None:
    for _ in range(10):
        left = [abandoned(tmp_path, number=number) for number in range(4)]
        start = threading.Barrier(8)

        def make(rank: int, start: threading.Barrier = start) -> SwapDirectory:
            start.wait()
            return SwapDirectory(tmp_path, run="run", rank=rank)

        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(make, range(8)))
        assert all((each.path / "lock").exists() for each in made) and not any(
            path.exists() for path in left
        )
        assert set(tmp_path.iterdir()) == {each.path for each in made}
        for each in made:
            each.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_has_its_name_only_once_its_lock_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    real = fcntl.flock

    def flock(fd: int, how: int) -> None:
        seen.append(sorted(os.listdir(tmp_path)))
        SwapDirectory(tmp_path, run="other", rank=1).remove() if len(seen) == 1 else None
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    directory = SwapDirectory(tmp_path, run="run", rank=0)
    assert all(name.startswith(".zeroshard-swap-run-0-") for name in seen[0]) and os.listdir(
        directory.path
    ) == ["lock"]
    directory.remove()


def test_only_what_is_ours_and_dead_is_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "0000-state.storage").write_text("mine")
    (target / "lock").touch()
    link = tmp_path / "zeroshard-swap-run-0-1-aaaaaaaa"
    link.symlink_to(target)
    inner = abandoned(tmp_path, number=1)
    (inner / "0001-link.storage").symlink_to(target / "0000-state.storage")
    foreign = abandoned(tmp_path, number=2)
    (foreign / "notes.txt").write_text("not made by zeroshard")
    (foreign / "folder.storage").mkdir()
    others = tmp_path / "zeroshard-swap-is-my-folder"
    others.mkdir()
    fresh, old = (
        abandoned(tmp_path, hidden=True, lock=False, number=3),
        abandoned(tmp_path, hidden=True, number=4),
    )
    os.utime(old, (0, 0))
    half = abandoned(tmp_path, lock=False, number=5)
    SwapDirectory(tmp_path, run="run", rank=0).remove()
    kept = {target, link, foreign, others, fresh}
    if os.geteuid() == 0:
        strange = abandoned(tmp_path, number=6)
        os.chown(strange, 65534, 65534)
        kept.add(strange)
        SwapDirectory(tmp_path, run="run", rank=0).remove()
    assert set(tmp_path.iterdir()) == kept and not half.exists()
    assert (target / "0000-state.storage").read_text() == "mine" and (target / "lock").exists()
    assert (
        sorted(os.listdir(foreign)) == ["folder.storage", "notes.txt"]
        and str(foreign) in caplog.text
    )


def test_a_forked_child_is_refused_and_removes_nothing(store: DiskStore) -> None:
    storage = filled(store)
    child = os.fork()
    if child == 0:
        try:
            storage.read(0, 1, torch.empty(1))
        except StorageError as error:
            store.close()
            store.files.remove()
            os._exit(0 if KEY in str(error) and "forked child" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert storage.path.exists() and (read(storage, 0, NUMEL) == 1).all()


# ---------------------------------------------------------------------------------- staging buffers


def _interrupted(call: Callable[[], Any], at: int) -> bool:
    """Call, and raise KeyboardInterrupt at line `at` of the tier's code; return whether there is
    one, as where the handler of a signal raises.
    """
    left = at

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(str(Path(disk.__file__).parent)):
            return None
        left -= event == "line"
        if left == 0 and event == "line":
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)


def test_a_write_that_a_signal_interrupts_anywhere_blocks_nothing_after_it(tmp_path: Path) -> None:
    lines = 0
    for lines in itertools.count(1):
        store = DiskStore(SwapDirectory(tmp_path, rank=lines), CPU)
        storage = filled(store, numel=1024)
        if not _interrupted(partial(storage.write, 0, 1024, torch.zeros(1024)), lines):
            store.close()
            break
        after: list[torch.Tensor] = []

        def go_on(store: DiskStore, storage: Any, after: list[torch.Tensor]) -> None:
            storage.write(8, 1016, torch.full((1008,), 3.0))
            after.append(read(storage, 8, 1016))
            store.close()

        thread = threading.Thread(target=go_on, args=(store, storage, after), daemon=True)
        thread.start()
        thread.join(MAX_SECONDS / 5)
        assert not thread.is_alive(), f"blocked after an interrupt at line {lines}"
        assert after[0].eq(3.0).all(), f"another write came after, at line {lines}"
    assert lines > 20


def test_staging_lends_aligned_memory_and_uses_it_again() -> None:
    staging = Staging(1 << 20)
    first = staging.tensor(1000, torch.bfloat16)
    address = first.data_ptr()
    assert (
        address % BLOCK == 0
        and first.shape == (1000,)
        and first.dtype is torch.bfloat16
        and staging.lent_bytes == BLOCK
    )
    first.zero_()
    staging.give(first)
    assert first.isnan().all() and staging.lent_bytes == 0 and staging.account.live == BLOCK
    again = staging.take(4000)
    assert again.data_ptr() == address and again.dtype is torch.uint8
    staging.give(again[:10])  # what starts there stands for it
    # alone it may be larger than the limit; idle memory makes room
    large = staging.tensor(1 << 20, torch.float32)
    assert staging.account.live == 4 << 20 and large.data_ptr() % BLOCK == 0
    staging.give(large)
    staging.give(staging.tensor(0, torch.float32))
    with pytest.raises(AssertionError, match="no buffer was lent"):
        staging.give(torch.empty(3))
    staging.close()
    staging.close()
    assert staging.account.live == 0


def test_what_a_buffer_counts_for_is_what_was_asked_for() -> None:
    staging = Staging(3 * BLOCK)
    staging.give(staging.take(2 * BLOCK))
    # a larger idle buffer in place of one of them would leave no room for the last
    held = [staging.take(BLOCK) for _ in range(3)]
    assert staging.lent_bytes == staging.account.live == 3 * BLOCK
    for tensor in held:
        staging.give(tensor)


def test_a_full_pool_makes_others_wait_until_something_is_given_back() -> None:
    staging = Staging(2 * BLOCK)
    first, second = staging.take(BLOCK), staging.take(BLOCK)
    got: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: got.append(staging.take(2 * BLOCK)))
    thread.start()
    for tensor in (first, second):
        time.sleep(0.02)
        assert not got
        staging.give(tensor)
    thread.join(MAX_SECONDS)
    assert got[0].numel() == 2 * BLOCK and staging.account.peak == 2 * BLOCK
    staging.give(got[0])


def test_a_wait_that_nobody_could_end_is_an_error() -> None:
    staging = Staging(2 * BLOCK)
    first = staging.take(2 * BLOCK)
    with pytest.raises(
        StorageError,
        match=(
            f"staging_bytes={2 * BLOCK} is too small: {BLOCK} bytes .* raise it to at least"
            f" {3 * BLOCK}"
        ),
    ):
        staging.take(1)
    staging.give(first)
    meeting, errors, done = threading.Barrier(2), [], []

    def two_at_once() -> None:
        held = staging.take(BLOCK)
        meeting.wait()
        try:
            staging.give(staging.take(BLOCK))
            done.append(1)
        except StorageError as error:
            errors.append(error)
        finally:
            staging.give(held)

    threads = [threading.Thread(target=two_at_once) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(MAX_SECONDS)
    assert len(errors) == 1 and len(done) == 1, (
        "the second one to wait is refused, and the first one goes on"
    )
    assert staging.lent_bytes == 0


def test_a_waiter_that_was_woken_is_not_taken_for_one_that_waits_forever() -> None:
    staging = Staging(2 * BLOCK)
    mine = staging.take(BLOCK)

    def two_after_another() -> None:
        first = staging.take(BLOCK)
        staging.give(staging.take(BLOCK))
        staging.give(first)

    thread = threading.Thread(target=two_after_another)
    thread.start()
    wait_until(lambda: bool(staging._waiting))
    # the other thread is woken, but cannot go on before this one asks for more
    with staging._changed:
        staging.give(mine)
        staging.give(staging.take(2 * BLOCK))
    thread.join(MAX_SECONDS)
    assert staging.lent_bytes == 0


def test_many_threads_share_a_small_pool() -> None:
    staging = Staging(16 * BLOCK)

    def use(seed: int) -> None:
        for turn in range(60):
            tensor = staging.take((seed * 7 + turn * 3) % 20 * BLOCK + 1)
            assert staging.lent_bytes <= max(16 * BLOCK, tensor.numel() + BLOCK)
            tensor.fill_(seed)
            assert (tensor == seed).all()
            staging.give(tensor)

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(use, seed) for seed in range(8)]:
            future.result(MAX_SECONDS)
    assert staging.lent_bytes == 0 and staging.account.peak <= 20 * BLOCK


def test_transfers_go_on_while_the_callers_hold_the_whole_pool(tmp_path: Path) -> None:
    store = DiskStore(SwapDirectory(tmp_path, rank=0), CPU, staging_bytes=BLOCK)
    storage = filled(store)
    held = store.staging.take(BLOCK)
    assert (read(storage, 1, NUMEL - 1) == 1).all()  # not aligned: through the workers' own buffers
    with pytest.raises(StorageError, match="staging_bytes"), storage.borrowed(0, 10, write=False):
        pass
    store.staging.give(held)
    with storage.borrowed(0, NUMEL, write=False) as tensor:  # larger than the limit, alone
        assert (tensor == 1).all()
    store.close()


def test_a_pretended_device_is_reached_over_its_link_and_staging_is_not(tmp_path: Path) -> None:
    link = Paced(1e12)
    store = DiskStore(SwapDirectory(tmp_path, rank=0), CPU, link=link)
    storage = filled(store, numel=1000)
    assert link.busy_s == pytest.approx(4000 / 1e12)
    buffer = store.staging.tensor(1000, torch.float32)
    storage.read(1, 1000, buffer[1:]).wait()
    storage.write(1, 1000, buffer[1:]).wait()
    with storage.borrowed(0, 7, write=True):
        pass
    assert link.busy_s == pytest.approx(4000 / 1e12) and (buffer[1:] == 1).all()
    store.staging.give(buffer)
    store.close()


def test_reading_blocks_names_where_the_file_ends(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    with path.open("r+b") as file, pytest.raises(OSError, match="ends at byte 10"):
        swapdir.read_blocks(file.fileno(), memoryview(bytearray(20)), 0)
    assert disk._CHUNK % UNIT == 0 and UNIT % BLOCK == 0
