"""Damage on disk: whatever is flipped, cut, lost or mixed up is found before anything changes,
named by file, and the step before is offered.

One checkpoint of two ranks is damaged again and again; one process reads it, which needs all that
any rank would but what is each rank's own (random generators, and buffers of rank 1). A flip there
is found by reading everything, and changes nothing of what is loaded.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.checkpoints import Training, check_everything, make, train_and_save
from tests.support.harness import run_ranks
from zeroshard import CheckpointError
from zeroshard.checkpoint.steps import MANIFEST, list_steps, read_manifest

FILES = (MANIFEST, "rank-00000-of-00002.safetensors", "rank-00001-of-00002.safetensors")
NEWEST, BEFORE = "step-0000000002", "step-0000000001"
NUM_FLIPS = 200  # per file


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 1 and 2 of a run on two ranks; not to be written to."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run_ranks(2, train_and_save, folder)
    assert check_everything(folder) == []
    return folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(pristine, tmp_path / "checkpoints"))


@pytest.fixture(scope="module")
def training() -> Iterator[Training]:
    """One process that has trained elsewhere: whatever a load takes over can be told from what
    it had.
    """
    training = make("zero2", seed=9)
    training.step(0, 77)
    yield training
    training.engine.close()


@pytest.fixture(scope="module")
def loaded(pristine: Path, training: Training) -> dict[str, str]:
    """The fingerprint after a load of step 2 as it was saved."""
    assert training.load(pristine).step == 2
    return training.fingerprint()


@contextmanager
def flipped(path: Path, position: int, bit: int) -> Iterator[None]:
    """Have one bit of a file the other way round, for a while."""
    fd = os.open(path, os.O_RDWR)
    try:
        before = os.pread(fd, 1, position)
        os.pwrite(fd, bytes([before[0] ^ 1 << bit]), position)
        yield
        os.pwrite(fd, before, position)
    finally:
        os.close(fd)


def refused(training: Training, folder: Path, name: str) -> str:
    """Return what load says; it must raise, name the file, offer the step before, and have
    changed nothing.
    """
    before = training.fingerprint()
    with pytest.raises(
        CheckpointError, match=r"Step 1 is there, too: fallback='previous' takes it$"
    ) as error:
        training.load(folder)
    assert f"{NEWEST}/{name}" in str(error.value)
    assert training.fingerprint() == before
    return str(error.value)


def falls_back(training: Training, folder: Path, name: str) -> None:
    """See that load takes the step before when it may, and says what it passed over."""
    restored = training.load(folder, fallback="previous")
    assert restored.step == 1 and restored.path.name == BEFORE
    (why,) = restored.damaged
    assert f"{NEWEST}/{name}" in why


# ------------------------------------------------------------------------------------- flipped bits


def _positions(path: Path) -> list[tuple[int, int]]:
    """Return positions and bits spread over a whole file: its first and last bytes one by one,
    and every so many between.
    """
    size, generator = path.stat().st_size, random.Random(path.name)
    spread = {round(index * (size - 1) / NUM_FLIPS) for index in range(NUM_FLIPS + 1)}
    return [
        (position, generator.randrange(8))
        for position in sorted({*range(16), *spread, *range(size - 60, size)})
    ]


def _needed(folder: Path, name: str, position: int) -> bool:
    """Return whether a load of one process reads the byte: each rank's own values are not for
    it.
    """
    manifest = read_manifest(folder / NEWEST)
    number = FILES.index(name) - 1
    if number < 0 or position < manifest.files[number].header_bytes:
        return True
    inside = position - manifest.files[number].header_bytes
    (hit,) = [
        entry
        for entry in manifest.tensors
        if entry.file == number and entry.offset <= inside < entry.offset + entry.num_bytes
    ]
    return hit.parameter is not None or not (hit.kind.startswith("rng") or hit.kind.endswith("@1"))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name.startswith("rank") else [])
        for name in FILES
    ],
)
def test_every_flipped_bit_is_found_before_anything_changes(
    folder: Path, training: Training, loaded: dict[str, str], name: str
) -> None:
    path = folder / NEWEST / name
    flips = [(position, bit, _needed(folder, name, position)) for position, bit in _positions(path)]
    assert len(flips) >= NUM_FLIPS and sum(needed for *_, needed in flips) >= 120
    for position, bit, needed in flips:
        with flipped(path, position, bit):
            try:
                assert any(name in text for text in check_everything(folder)), (position, bit)
            except CheckpointError as error:
                assert f"{NEWEST}/{name}" in str(error), (position, bit)
            if needed:
                refused(training, folder, name)
            else:
                training.load(folder)
                assert training.fingerprint() == loaded
                training.step(0, position)  # elsewhere again
    training.load(folder)
    assert training.fingerprint() == loaded, "every bit is back in its place"


# ------------------------------------------------------------------------------ cut, lost, mixed up


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_at_any_sixteenth_is_named_and_passed_over(
    folder: Path, training: Training, name: str
) -> None:
    path = folder / NEWEST / name
    size = path.stat().st_size
    for part in reversed(range(16)):
        os.truncate(path, size * part // 16)
        refused(training, folder, name)
    falls_back(training, folder, name)


def _delete(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / NEWEST / name).unlink()


def _swap(folder: Path) -> None:
    one, other = (folder / NEWEST / name for name in FILES[1:])
    aside = one.with_suffix(".aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def _from_before(name: str) -> Callable[[Path], object]:
    return lambda folder: shutil.copy(folder / BEFORE / name, folder / NEWEST / name)


def _empty(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / NEWEST / name).write_bytes(b"")


def _grown(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / NEWEST / name).write_bytes(
        (folder / NEWEST / name).read_bytes() + b"\0"
    )


@pytest.mark.parametrize(
    ("damage", "name", "message"),
    [
        *((_delete(name), name, "cannot be read: No such file|is missing") for name in FILES),
        (_swap, FILES[1], r"has \d+ bytes and should have \d+|is damaged in its header"),
        *((_from_before(name), name, "is damaged in its header") for name in FILES[1:]),
        (_from_before(MANIFEST), MANIFEST, "belongs to step 1, and its directory says 2"),
        *(
            (_empty(name), name, "is damaged: its hash|has 0 bytes and should have")
            for name in FILES
        ),
        *(
            (
                _grown(name),
                name,
                "is damaged: its hash|it was cut short, or is not of this checkpoint",
            )
            for name in FILES
        ),
    ],
    ids=lambda value: (
        value.__qualname__.split(".")[0].strip("_")
        if callable(value)
        else value
        if value in FILES
        else ""
    ),
)
def test_a_file_lost_swapped_or_of_another_step_is_named_and_passed_over(
    folder: Path, training: Training, damage: Callable[[Path], object], name: str, message: str
) -> None:
    damage(folder)
    said = refused(training, folder, name)
    with pytest.raises(CheckpointError, match=message):
        raise CheckpointError(said)
    falls_back(training, folder, name)


def test_a_step_under_another_number_is_refused(folder: Path, training: Training) -> None:
    (folder / BEFORE).rename(folder / "step-0000000003")
    with pytest.raises(
        CheckpointError,
        match=r"step-0000000003/manifest\.json belongs to step 1, and its directory says 3",
    ):
        training.load(folder)
    assert training.load(folder, fallback="previous").step == 2


@pytest.mark.parametrize(
    "name", ["rank-00002-of-00003.safetensors", "rank-00000-of-00001.safetensors"]
)
def test_a_file_that_the_manifest_does_not_know_is_named(folder: Path, name: str) -> None:
    shutil.copy(folder / BEFORE / FILES[1], folder / NEWEST / name)
    with pytest.raises(
        CheckpointError,
        match=f"{NEWEST}/{name} is not of this checkpoint: its manifest does not know it",
    ):
        check_everything(folder)


def test_without_a_step_that_is_whole_the_error_remains(folder: Path, training: Training) -> None:
    before = training.fingerprint()
    for step in list_steps(folder).values():
        os.truncate(step / FILES[1], 100)
    with pytest.raises(CheckpointError, match=f"{BEFORE}/{FILES[1]} has 100 bytes"):
        training.load(folder, fallback="previous")
    assert training.fingerprint() == before
    shutil.rmtree(folder / BEFORE)
    # no other step to offer
    with pytest.raises(CheckpointError, match=r"or is not of this checkpoint$"):
        training.load(folder)


# ------------------------------------------------------------------------------------- on two ranks


def _load_on_two(rank: int, world: int, folder: Path) -> str:
    training = make("zero3", seed=9)
    training.step(rank, 5)
    before = training.fingerprint()
    with pytest.raises(CheckpointError) as error:
        training.load(folder)
    assert training.fingerprint() == before
    training.step(rank, 6)  # goes on
    before = training.fingerprint()
    restored = training.load(folder, fallback="previous")
    assert restored.step == 1 and len(restored.damaged) == 1
    assert training.fingerprint() != before
    training.engine.close()
    return str(error.value)


@pytest.mark.parametrize("place", ["piece", "generator"])
def test_what_one_rank_reads_damaged_stops_both(folder: Path, place: str) -> None:
    manifest = read_manifest(folder / NEWEST)
    own = [entry for entry in manifest.tensors if entry.file == 1]
    hit = next(
        entry
        for entry in own
        if (
            entry.kind == "state.exp_avg"
            if place == "piece"
            else entry.kind.startswith("rng") and entry.kind.endswith("@1")
        )
    )
    with flipped(folder / NEWEST / FILES[2], manifest.files[1].header_bytes + hit.offset + 5, 3):
        answers = run_ranks(2, _load_on_two, folder)
    for said in answers:
        assert f"{NEWEST}/{FILES[2]} is damaged" in said and "Step 1 is there, too" in said
    assert (
        "state.exp_avg of parameter" if place == "piece" else "tensor rng.torch@1 elements 0 to"
    ) in answers[0]
    assert "rank 1: " in answers[0], "the other rank says whose file it is"
