"""Checkpoints made to harm: nothing is executed, no file outside the directory is opened, memory
and time stay small, and the error is a typed one.

A forger can write right hashes (they find damage, not forgery), so most of these reach the checks
behind them.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.support.checkpoints import Training, make
from tests.unit.checkpoint.test_manifest import sealed
from zeroshard import CheckpointError
from zeroshard.checkpoint.manifest import ITEMSIZE, VERSION, Manifest, digest, num_chunks
from zeroshard.checkpoint.steps import MANIFEST, open_regular

STEP, FILE = "step-0000000001", "rank-00000-of-00001.safetensors"
MAX_GROWTH = 50 << 20


@pytest.fixture(scope="module")
def training() -> Iterator[Training]:
    training = make("zero2", seed=9)
    training.step(0, 3)
    yield training
    training.engine.close()


@pytest.fixture
def folder(training: Training, tmp_path: Path) -> Path:
    """A checkpoint that nobody has touched yet; reading it once has imported what reading
    imports.
    """
    training.save(tmp_path / "checkpoints", 1)
    training.load(tmp_path / "checkpoints")
    training.step(0, 4)
    return tmp_path / "checkpoints"


# ------------------------------------------------------------------------------- what a load may do

_watched: list[tuple[str, str]] | None = None
FORBIDDEN = (
    "pickle.find_class",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "marshal.loads",
    "exec",
)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watched is None:
        return
    if event == "open" and not isinstance(args[0], int):  # a number is a file that is open already
        path = Path(os.fsdecode(args[0]))
        followed = path.parent.resolve() / path.name if args[2] & os.O_NOFOLLOW else path.resolve()
        _watched.append((event, str(followed)))
    elif event in FORBIDDEN:
        _watched.append((event, str(args)))


sys.addaudithook(_audit)  # it stays for the life of the process, and looks away unless told to look


def _opened(
    really: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
) -> int:
    """Stand in for os.open(): of a file in an open folder, the event above has the name alone."""
    global _watched
    if dir_fd is None or _watched is None:
        return int(really(path, flags, mode, dir_fd=dir_fd))
    assert flags & os.O_NOFOLLOW, path
    seen, _watched = _watched, None
    try:
        return int(really(path, flags, mode, dir_fd=dir_fd))
    finally:
        _watched = [*seen, ("open", str(Path(f"/proc/self/fd/{dir_fd}").resolve() / path))]


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[None]:
    """Fail where a pickle is read, a program run, or a file opened that does not lie in
    `folder`; and where that takes long or much memory.
    """
    global _watched

    def forbidden(*args: Any, **options: Any) -> None:
        raise AssertionError("a pickle was read")

    with monkeypatch.context() as patch:
        for owner, name in (
            (pickle, "load"),
            (pickle, "loads"),
            (pickle, "Unpickler"),
            (pickle, "_Unpickler"),
            (torch, "load"),
        ):
            patch.setattr(owner, name, forbidden)
        patch.setattr(os, "open", partial(_opened, os.open))
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        before, _watched = _memory("VmRSS"), []
        try:
            yield
        finally:
            seen, _watched = _watched, None
    assert _memory("VmHWM") - before < MAX_GROWTH
    for event, what in seen:
        assert event == "open" and Path(what).is_relative_to(folder.resolve()), (event, what)


def _memory(field: str) -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    )
    return int(line.split()[1]) << 10


def test_the_watch_sees(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="a pickle was read"), watched(monkeypatch, tmp_path):
        torch.load(io.BytesIO())
    with (
        pytest.raises(AssertionError, match="passwd"),
        watched(monkeypatch, tmp_path),
        open("/etc/passwd"),
    ):
        pass
    with pytest.raises(AssertionError, match=r"os\.system"), watched(monkeypatch, tmp_path):
        os.system("true")
    with pytest.raises(AssertionError), watched(monkeypatch, tmp_path):
        bytearray(MAX_GROWTH + (1 << 20))[::4096] = b"x" * ((MAX_GROWTH + (1 << 20)) // 4096)


def test_a_good_checkpoint_passes_the_watch(
    monkeypatch: pytest.MonkeyPatch, training: Training, folder: Path
) -> None:
    with watched(monkeypatch, folder):
        assert training.load(folder).step == 1


# --------------------------------------------------------------------------------------- the corpus


def forge(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what the manifest says, with a hash that fits."""
    path = folder / STEP / MANIFEST
    raw = json.loads(path.read_bytes())
    del raw["hash"]
    change(raw)
    path.write_bytes(sealed(raw))


def forge_file(folder: Path, data: bytes) -> None:
    """Put other bytes into the file of pieces, of the same length and with hashes that fit."""
    path = folder / STEP / FILE
    data = data.ljust(path.stat().st_size, b"\0")[: path.stat().st_size]
    path.write_bytes(data)

    def change(raw: dict[str, Any]) -> None:
        del raw["states"]["rng"]  # of which not every bit is a state
        start = raw["files"][0]["header_bytes"]
        raw["files"][0]["header_hash"] = digest(data[:start])
        for entry in raw["tensors"]:
            size = ITEMSIZE[entry["dtype"]] * int(torch.Size(entry["shape"]).numel())
            own = data[start + entry["offset"] :][:size]
            entry["hashes"] = [digest(own)] * num_chunks(size, raw["chunk_bytes"])

    forge(folder, change)


class Payload:
    """What executes when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["ZS_TEST_PAYLOAD"],)


def _pickle(folder: Path) -> None:
    buffer = io.BytesIO()
    torch.save(Payload(), buffer)
    (folder / STEP / FILE).write_bytes(buffer.getvalue())


def _pickle_as_manifest(folder: Path) -> None:
    (folder / STEP / MANIFEST).write_bytes(pickle.dumps(Payload()))


def _pickled_value(folder: Path) -> None:
    text = pickle.dumps(Payload()).hex()
    forge(folder, lambda raw: raw["states"].update(extra={"same": {"$pickle": text}}))


def _header_length(length: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / STEP / FILE
        path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])

    return change


def _named(name: str) -> Callable[[Path], None]:
    return lambda folder: forge(folder, lambda raw: raw["files"][0].update(name=name))


def _linked(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / STEP / name
        outside = folder.parent / f"outside-{name}"
        path.rename(outside)
        path.symlink_to(outside)

    return change


def _linked_step(folder: Path) -> None:
    (folder / STEP).rename(folder.parent / STEP)
    (folder / STEP).symlink_to(folder.parent / STEP)


def _linked_to_itself(folder: Path) -> None:
    (folder / "step-0000000009").symlink_to("step-0000000009")


def _pipe(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / STEP / name).unlink()
        os.mkfifo(folder / STEP / name)

    return change


def test_what_is_no_file_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a device may already act on it, and a pipe tells its writer."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    flags, real = [], os.open
    monkeypatch.setattr(
        os, "open", lambda path, flag, **more: flags.append(flag) or real(path, flag, **more)
    )  # type: ignore[func-returns-value]
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/null")):
        with pytest.raises(CheckpointError, match=f"{path} cannot be read: it is"):
            open_regular(path)
    assert len(flags) == 3 and all(flag & os.O_PATH and flag & os.O_NOFOLLOW for flag in flags)


def _directory(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / STEP / name).unlink()
        (folder / STEP / name).mkdir()

    return change


def _shape(*shape: int) -> Callable[[Path], None]:
    return lambda folder: forge(
        folder,
        lambda raw: raw["parameters"]["norm.weight"].update(shape=shape, stride=[*shape[1:], 1]),
    )


def _first_tensor(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: forge(folder, lambda raw: raw["tensors"][0].update(changes))


def _holes(folder: Path) -> None:
    """A file of 8 TiB, all of it a hole, of which one tensor is said to be all."""
    numel = 1 << 43

    def change(raw: dict[str, Any]) -> None:
        raw["files"][0] |= {
            "bytes": 64 + numel,
            "header_bytes": 64,
            "header_hash": digest(bytes(64)),
        }
        raw["chunk_bytes"] = 1 << 30
        raw["tensors"] = [
            {
                "file": 0,
                "offset": 0,
                "dtype": "U8",
                "shape": [numel],
                "kind": "extra@0",
                "hashes": [""] * (numel >> 30),
            }
        ]
        raw["states"]["extra"] = {"same": {"$tensor": "extra"}}

    (folder / STEP / FILE).write_bytes(b"")
    os.truncate(folder / STEP / FILE, 64 + numel)
    forge(folder, change)


def _missing_numbers(folder: Path) -> None:
    def change(raw: dict[str, Any]) -> None:
        last = raw["tensors"].pop(
            next(
                i
                for i, entry in enumerate(raw["tensors"])
                if entry.get("parameter") == "norm.weight"
            )
        )
        raw["tensors"].append(
            {
                "file": 0,
                "dtype": last["dtype"],
                "shape": last["shape"],
                "offset": last["offset"],
                "kind": "hidden",
                "hashes": last["hashes"],
            }
        )

    forge(folder, change)


def _text(change: Callable[[str], str]) -> Callable[[Path], None]:
    """Change the text of the manifest, with a hash that fits."""

    def apply(folder: Path) -> None:
        path = folder / STEP / MANIFEST
        raw = json.loads(path.read_bytes())
        del raw["hash"]
        path.write_bytes(sealed(None, change(json.dumps(raw))))

    return apply


def _state(value: Any) -> Callable[[Path], None]:
    return lambda folder: forge(folder, lambda raw: raw["states"].update(extra=value))


MANY = [*range(50_000), "last"]
CORPUS: dict[str, Callable[[Path], None]] = {
    "pickle as a shard": _pickle,
    "pickle as the manifest": _pickle_as_manifest,
    "pickle as a value": _pickled_value,
    "header of 2^63": _header_length(1 << 63),
    "header of more than the file": _header_length(1 << 30),
    "name with ..": _named("../../etc/passwd"),
    "name from the root": _named("/etc/passwd"),
    "name of a device": _named("/dev/zero"),
    "name beside": _named("../rank-00000-of-00001.safetensors"),
    "name with a NUL": _named("rank-00000-of-00001.safetensors\0"),
    "linked shard": _linked(FILE),
    "linked manifest": _linked(MANIFEST),
    "linked step": _linked_step,
    "step linked to itself": _linked_to_itself,
    "shard is a pipe": _pipe(FILE),
    "manifest is a pipe": _pipe(MANIFEST),
    "shard is a directory": _directory(FILE),
    "manifest is a directory": _directory(MANIFEST),
    "shape overflows": _shape(2**40, 2**40),
    "shape of exabytes": _shape(2**30, 2**30),
    "offset overflows": _first_tensor(offset=2**63 - 1),
    "size overflows": _first_tensor(shape=[2**62], stop=2**62),
    "no file has that number": _first_tensor(file=10**9),
    "one tensor on another": lambda folder: forge(
        folder, lambda raw: raw["tensors"][1].update(offset=0)
    ),
    "a file of holes": _holes,
    "numbers left out": _missing_numbers,
    "stride leaves the memory": lambda folder: forge(
        folder, lambda raw: raw["parameters"]["head.weight"].update(stride=[10**9, 1])
    ),
    "key twice": _text(lambda text: text.replace('"world": 1', '"world": 1, "world": 1')),
    "very many keys and the last one twice": _text(
        lambda text: text.replace(
            '"states": {', '"states": {' + "".join(f'"{i}":0,' for i in MANY) + '"last":0,'
        )
    ),
    "deep JSON": _text(
        lambda text: text.replace(
            '"states": {', '"states": {"a": ' + "[" * 10**6 + "]" * 10**6 + ","
        )
    ),
    "deep states": _text(
        lambda text: text.replace(
            '"states": {', '"states": {"extra2": {"same": ' + "[" * 500 + "]" * 500 + "},"
        )
    ),
    "number of a million digits": _text(
        lambda text: text.replace('"step": 1', '"step": ' + "9" * 10**6)
    ),
    "empty manifest of a gigabyte": lambda folder: os.truncate(folder / STEP / MANIFEST, 1 << 30),
    "unknown form": _state({"same": {"$eval": "1"}}),
    "unknown tensor": _state({"same": {"$tensor": "nowhere"}}),
    "unknown dtype": _state({"same": {"$scalar": ["os", 1]}}),
    "too few ranks": _state({"ranks": []}),
    "parameters among the options": lambda folder: forge(
        folder, lambda raw: raw["optimizer"]["groups"][0]["options"].update(params=[])
    ),
    "newer version": lambda folder: forge(folder, lambda raw: raw.update(version=VERSION + 1)),
    "a box beyond its parameter": lambda folder: forge(
        folder, lambda raw: [one.update(box=[[0, 1 << 40]]) for one in raw["tensors"]]
    ),
    "one box of many": lambda folder: forge(
        folder, lambda raw: raw["tensors"][0].update(box=[[0, 1]], start=0, stop=1)
    ),
    "places without ranks": lambda folder: forge(folder, lambda raw: raw.update(places=["a"] * 9)),
}


@pytest.mark.parametrize("name", CORPUS)
def test_a_hostile_checkpoint_is_refused_and_does_nothing(
    monkeypatch: pytest.MonkeyPatch, training: Training, folder: Path, name: str
) -> None:
    payload = folder.parent / "executed"
    monkeypatch.setenv("ZS_TEST_PAYLOAD", str(payload))
    CORPUS[name](folder)
    before = training.fingerprint()
    with watched(monkeypatch, folder), pytest.raises(CheckpointError) as error:
        training.load(folder)
    assert training.fingerprint() == before and not payload.exists()
    assert str(folder) in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.parametrize("kind", ["pickle", "torch", "header"])
def test_other_bytes_under_right_hashes_are_numbers_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, training: Training, folder: Path, kind: str
) -> None:
    """The header of a file of pieces is for other readers: ours takes places from the manifest,
    and bytes as what they are.
    """
    payload = folder.parent / "executed"
    monkeypatch.setenv("ZS_TEST_PAYLOAD", str(payload))
    buffer = io.BytesIO()
    torch.save(Payload(), buffer)
    whole = (folder / STEP / FILE).read_bytes()
    forge_file(
        folder,
        {
            "pickle": pickle.dumps(Payload()),
            "torch": buffer.getvalue(),
            "header": (1 << 63).to_bytes(8, "little") + whole[8:],
        }[kind],
    )
    with watched(monkeypatch, folder):
        try:
            assert training.load(folder).step == 1
        except CheckpointError as error:
            assert str(folder) in str(error)
    assert not payload.exists()


DENSE = {
    "empty lists": "[], ",
    "empty objects": "{}, ",
    "objects": '{"a": 1}, ',
    "short texts": '"ab", ',
    "small numbers": "1, ",
    "nested": "[[[]]], ",
}


@pytest.mark.parametrize("kind", DENSE)
def test_a_manifest_of_many_small_values_is_refused_before_it_takes_memory(
    monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str
) -> None:
    """Read in full, 20 MB of empty lists would take 400 MB, and a manifest may have 512 MB."""
    path = folder / STEP / MANIFEST
    item = DENSE[kind]
    text = path.read_bytes().replace(
        b'"states": {',
        b'"states": {\n  "many": {"same": [' + item.encode() * ((60 << 20) // len(item)) + b"0]},",
        1,
    )
    body = text[: text.rindex(b'\n "hash"')]
    data = body + f'\n "hash": "{digest(body)}"\n}}\n'.encode()
    del text, body
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    with pytest.raises(
        CheckpointError,
        match=(
            r"there holds more values than a save writes: reading its \d+ bytes would take \d+ of"
            r" memory"
        ),
    ):
        Manifest.parse(data, "there")
    assert _memory("VmHWM") - before < MAX_GROWTH


def test_states_of_more_small_values_than_are_read_again_are_not_saved(
    training: Training, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "zeroshard.checkpoint.manifest._most_bytes", lambda text: 8 * len(text) + (1 << 20)
    )
    with pytest.raises(
        CheckpointError, match="too many small values for a manifest: keep them in tensors"
    ):
        zs.save(folder, training.engine, step=7, extra=[[]] * 100_000)
    assert zs.save(folder, training.engine, step=7, extra=[[]] * 100).name == "step-0000000007"


# -------------------------------------------------------------------- saving beside what is hostile


def test_a_save_follows_no_link_out_of_the_directory(training: Training, folder: Path) -> None:
    precious = folder.parent / "precious"
    precious.write_text("mine")
    (folder / ".lock").unlink()
    (folder / ".lock").symlink_to(precious)
    with pytest.raises(
        CheckpointError, match="cannot be written: Too many levels of symbolic links"
    ):
        training.save(folder, 2)
    (folder / ".lock").unlink()
    kept = folder.parent / "kept"
    kept.mkdir()
    (kept / "file").write_text("mine")
    for name in (
        ".saving-0000000009-abc",
        ".removing-step-0000000009",
        ".replaced-step-0000000009",
        "step-0000000000",
        "step-0000000002",
    ):
        (folder / name).symlink_to(kept)
    training.save(folder, 2, keep_last=1)
    assert precious.read_text() == "mine" and (kept / "file").read_text() == "mine"
    assert (
        sorted(path.name for path in folder.iterdir()) == [".lock", "step-0000000002"]
        and not (folder / "step-0000000002").is_symlink()
    )
    assert training.load(folder).step == 2


# -------------------------------------------------------------------------------- a million entries

READ_AND_MEASURE = """
import resource, sys
from zeroshard.checkpoint.manifest import Manifest
text = open(sys.argv[1], "rb").read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
manifest = Manifest.parse(text, "there")
print(len(manifest.tensors), (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)
"""


def many_entries(count: int) -> bytes:
    """Return a manifest of one parameter in `count` pieces."""
    hashes = f'"hashes": ["{"0" * 32}"], "kind": "value", "parameter": "blocks.0.weight"'
    tensors = ",".join(
        f'{{"file": 0, "offset": {4 * i}, "dtype": "F32", "shape": [1], {hashes}, "start": {i},'
        f' "stop": {i + 1}}}'
        for i in range(count)
    )
    head = Manifest(0, 1, "", "zero3", "fp32", (), {}, (), None).dump().decode()
    head = head[: head.index('"files"')]
    return sealed(
        None,
        head + f'"files": [{{"name": "{FILE}", "bytes": {64 + 4 * count}, "header_bytes": 64,'
        ' "header_hash": ""}], '
        + f'"parameters": {{"blocks.0.weight": {{"shape": [{count}], "stride": [1], "trained":'
        f' true}}}}, "tensors": [{tensors}]}}',
    )


@pytest.mark.parametrize(
    "count",
    [100_000, pytest.param(1_000_000, marks=pytest.mark.slow)],
    ids=["a tenth of a million", "a million"],
)
def test_a_manifest_of_many_entries_is_read_within_ten_times_its_size(
    tmp_path: Path, count: int
) -> None:
    """A million entries are those of a thousand ranks; reading them takes 6 s and eight times
    the text in memory.
    """
    path = tmp_path / MANIFEST
    path.write_bytes(many_entries(count))
    found = subprocess.run(
        [sys.executable, "-c", READ_AND_MEASURE, path], capture_output=True, text=True, check=True
    ).stdout.split()
    assert int(found[0]) == count and int(found[1]) < 10 * path.stat().st_size, found


def _calls(count: int) -> int:
    """Return how many functions, Python's and C's, are called while a manifest of `count`
    entries is read.
    """
    text, calls = many_entries(count), 0

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        Manifest.parse(text, "there")
    finally:
        sys.setprofile(None)
    return calls


def test_reading_a_manifest_costs_the_same_for_every_entry() -> None:
    few, more, many = (_calls(count) for count in (500, 1000, 2000))
    assert many - more == pytest.approx(2 * (more - few), rel=0.02), (
        "the work grows with the entries, not with their square"
    )
