"""Files of pieces: any dtype and size comes back, readers of safetensors open them, no chunk is
read that is not asked for, each is verified.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

import zeroshard.checkpoint.shard_files as shards
from zeroshard import CheckpointError
from zeroshard.checkpoint.manifest import ShardEntry, TensorEntry, digest
from zeroshard.checkpoint.shard_files import (
    DTYPES,
    ShardReader,
    Stored,
    as_bytes,
    dtype_code,
    shard_bytes,
    write_shard,
)
from zeroshard.memory import Pages

METADATA = {"format": "zeroshard", "rank": "0", "step": "7"}


def loose(key: str, tensor: torch.Tensor) -> Stored:
    return TensorEntry(0, 0, dtype_code(tensor.dtype, key), tuple(tensor.shape), (), key), tensor


def piece(name: str, start: int, tensor: torch.Tensor) -> Stored:
    return (
        TensorEntry(
            0,
            0,
            dtype_code(tensor.dtype, name),
            tuple(tensor.shape),
            (),
            "value",
            name,
            start,
            start + tensor.numel(),
        ),
        tensor,
    )


def some(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of random bits (zeros and ones for bool)."""
    numel = torch.Size(shape).numel()
    raw = torch.randint(
        0, 2 if dtype is torch.bool else 256, (numel * dtype.itemsize,), dtype=torch.uint8
    )
    return raw.view(dtype).view(shape) if numel else torch.empty(shape, dtype=dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(as_bytes(tensor))


def reader(path: Path, file: ShardEntry, chunk_bytes: int, **options: Any) -> ShardReader:
    return ShardReader(path, file, chunk_bytes=chunk_bytes, **options)


# ----------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("chunk_bytes", [8, 64, 4 << 20])
def test_every_dtype_and_shape_comes_back_and_safetensors_reads_the_same(
    tmp_path: Path, chunk_bytes: int
) -> None:
    torch.manual_seed(0)
    tensors = {
        f"{code}/{shape}": some(dtype, shape)
        for code, dtype in DTYPES.items()
        for shape in [(), (0,), (1,), (3, 5), (2, 0, 3), (40,)]
    }
    stored = [loose(key, tensor) for key, tensor in tensors.items()]
    path = tmp_path / "rank-00000-of-00001.safetensors"
    file, entries = write_shard(path, 0, stored, METADATA, chunk_bytes=chunk_bytes)
    assert (
        path.stat().st_size == file.bytes == shard_bytes(stored, METADATA)
        and file.header_bytes % 64 == 0
    )
    with reader(path, file, chunk_bytes) as opened:
        for entry, tensor in zip(entries, tensors.values(), strict=True):
            back = opened.read(entry, 0, entry.numel, Pages())
            assert back.dtype is tensor.dtype and bits(back) == bits(tensor), entry.key
            assert opened.check(entry) == []
    with safe_open(path, framework="pt") as there:
        assert there.metadata() == METADATA and set(there.keys()) == set(tensors)
        for key, tensor in tensors.items():
            back = there.get_tensor(key)
            assert (
                back.dtype is tensor.dtype
                and back.shape == tensor.shape
                and bits(back) == bits(tensor)
            ), key


def test_keys_with_any_text_are_read_by_safetensors(tmp_path: Path) -> None:
    stored = [
        loose('a "quoted"\n\\ key|é\U0001f600', torch.ones(2)),
        piece("blocks.0.weight", 7, torch.ones(3)),
    ]
    path = tmp_path / "rank-00000-of-00001.safetensors"
    write_shard(path, 0, stored, METADATA)
    with safe_open(path, framework="pt") as there:
        assert set(there.keys()) == {'a "quoted"\n\\ key|é\U0001f600', "blocks.0.weight|value|7:10"}


def test_a_file_without_tensors(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000-of-00001.safetensors"
    file, entries = write_shard(path, 0, [], METADATA)
    assert entries == [] and file.bytes == file.header_bytes
    with reader(path, file, 64) as opened:
        assert opened.bytes_read == 0
    with safe_open(path, framework="pt") as there:
        assert list(there.keys()) == []


@settings(max_examples=200)
@given(st.data())
def test_any_range_is_read_with_at_most_one_chunk_more_at_either_end(
    shard: tuple[Path, ShardEntry, list[TensorEntry]], data: st.DataObject
) -> None:
    path, file, entries = shard
    entry = data.draw(st.sampled_from(entries))
    start = data.draw(st.integers(0, entry.numel))
    stop = data.draw(st.integers(start, entry.numel))
    whole = EXPECTED[entry.key]
    size = whole.element_size()
    with reader(path, file, CHUNK) as opened:
        back = opened.read(entry, start, stop, Pages())
        assert bits(back) == bits(whole[start:stop])
        assert (stop - start) * size <= opened.bytes_read <= (stop - start) * size + 2 * CHUNK
    with reader(path, file, CHUNK, verify=False) as opened:
        assert bits(opened.read(entry, start, stop, Pages())) == bits(whole[start:stop])
        assert opened.bytes_read == (stop - start) * size


CHUNK = 56  # of which no power of two is a multiple
EXPECTED: dict[str, torch.Tensor] = {}


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ShardEntry, list[TensorEntry]]:
    """A file of 1-D tensors, hashed in small chunks; `EXPECTED` has their numbers."""
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("shard") / "rank-00000-of-00001.safetensors"
    tensors = [
        some(dtype, (numel,))
        for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8)
        for numel in (0, 3, 56, 333)
    ]
    stored = [piece(f"p{index}", 100, tensor) for index, tensor in enumerate(tensors)]
    EXPECTED.update((entry.key, tensor) for entry, tensor in stored)
    file, entries = write_shard(path, 0, stored, METADATA, chunk_bytes=CHUNK)
    return path, file, entries


def test_a_write_shows_the_hash_of_every_chunk_and_of_the_header(
    shard: tuple[Path, ShardEntry, list[TensorEntry]],
) -> None:
    path, file, entries = shard
    data = path.read_bytes()
    assert file.header_hash == digest(data[: file.header_bytes])
    for entry in entries:
        own = data[file.header_bytes + entry.offset :][: entry.num_bytes]
        assert entry.hashes == tuple(
            digest(own[low : low + CHUNK]) for low in range(0, len(own), CHUNK)
        )


# ------------------------------------------------------------------------------------------- damage


def test_a_flipped_bit_in_any_part_of_a_file_is_found_and_named(
    shard: tuple[Path, ShardEntry, list[TensorEntry]], tmp_path: Path
) -> None:
    path, file, entries = shard
    whole = path.read_bytes()
    copy = tmp_path / path.name
    # each byte of the header, and of the tensors one of five: every bit of a byte in turn
    for position in (*range(file.header_bytes), *range(file.header_bytes, len(whole), 5)):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        copy.write_bytes(damaged)
        if position < file.header_bytes:
            with pytest.raises(CheckpointError, match="is damaged in its header"):
                reader(copy, file, CHUNK)
            continue
        inside = position - file.header_bytes
        (hit,) = [
            entry for entry in entries if entry.offset <= inside < entry.offset + entry.num_bytes
        ]
        element = 100 + (inside - hit.offset) // EXPECTED[hit.key].element_size()
        with reader(copy, file, CHUNK) as opened:
            found = [text for entry in entries for text in opened.check(entry)]
            assert len(found) == 1 and f"parameter {hit.parameter!r}" in found[0]
            first, last = (int(word) for word in found[0].split("elements ")[1].split(" to "))
            assert first <= element < last, found
            with pytest.raises(
                CheckpointError,
                match=(
                    rf"{copy.name} is damaged: value of parameter '{hit.parameter}', elements"
                    rf" {first} to {last}"
                ),
            ):
                opened.read(hit, element - 100, element - 99, Pages())


def test_damage_is_found_by_the_threads_that_read_many_chunks(
    shard: tuple[Path, ShardEntry, list[TensorEntry]], tmp_path: Path
) -> None:
    path, file, entries = shard
    longest = max(entries, key=lambda entry: entry.num_bytes)
    damaged = bytearray(path.read_bytes())
    damaged[file.header_bytes + longest.offset + longest.num_bytes // 2] ^= 1
    copy = tmp_path / path.name
    copy.write_bytes(damaged)
    with reader(copy, file, CHUNK) as opened, pytest.raises(CheckpointError, match="is damaged"):
        opened.read(longest, 0, longest.numel, Pages())


def test_a_file_of_another_size_is_refused_when_it_is_opened(
    shard: tuple[Path, ShardEntry, list[TensorEntry]], tmp_path: Path
) -> None:
    path, file, _ = shard
    whole = path.read_bytes()
    copy = tmp_path / path.name
    for size in (0, 7, file.header_bytes, file.bytes - 1, file.bytes + 1):
        copy.write_bytes((whole + b"\0")[:size])
        with pytest.raises(CheckpointError, match=f"has {size} bytes and should have {file.bytes}"):
            reader(copy, file, CHUNK)


def test_a_file_cut_short_while_it_is_read(
    shard: tuple[Path, ShardEntry, list[TensorEntry]], tmp_path: Path
) -> None:
    path, file, entries = shard
    copy = tmp_path / path.name
    copy.write_bytes(path.read_bytes())
    with reader(copy, file, CHUNK) as opened:
        os.truncate(copy, file.header_bytes)
        with pytest.raises(CheckpointError, match="it was cut short while it was read"):
            opened.read(entries[-1], 0, entries[-1].numel, Pages())


def test_a_disk_that_fails_is_a_typed_error(
    shard: tuple[Path, ShardEntry, list[TensorEntry]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, file, entries = shard

    def broken(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with reader(path, file, CHUNK) as opened:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(
            CheckpointError, match=r"cannot be read at byte \d+: Input/output error"
        ):
            opened.read(entries[-1], 0, 1, Pages())
    with pytest.raises(CheckpointError, match="cannot be read at byte 0"):
        reader(path, file, CHUNK)


def test_a_file_of_holes_cannot_claim_all_memory(tmp_path: Path) -> None:
    """A sparse file may have any size on paper; what it would take to read it is refused in
    words.
    """
    path = tmp_path / "rank-00000-of-00001.safetensors"
    numel = 1 << 43
    path.touch()
    os.truncate(path, 64 + numel)
    entry = TensorEntry(0, 0, "U8", (numel,), ("",) * 3, "extra@0")
    with (
        reader(path, ShardEntry(path.name, 64 + numel, 64, digest(bytes(64))), 4 << 20) as opened,
        pytest.raises(CheckpointError, match="no memory for"),
    ):
        opened.read(entry, 0, numel, Pages())


# ------------------------------------------------------------------------------------------ writing


def test_space_is_reserved_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def full(fd: int, start: int, num_bytes: int) -> None:
        asked.append((os.fstat(fd).st_size, num_bytes))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    stored = [loose("a", torch.zeros(1000))]
    path = tmp_path / "rank-00000-of-00001.safetensors"
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with pytest.raises(
        CheckpointError,
        match=(
            r"no space for .*rank-00000.* needs (\d+) bytes, and \d+ are free .No space left on"
            r" device"
        ),
    ) as error:
        write_shard(path, 0, stored, METADATA)
    assert (
        asked == [(0, shard_bytes(stored, METADATA))]
        and f"needs {asked[0][1]} bytes" in str(error.value)
        and free > 0
    )
    assert path.stat().st_size == 0


def test_a_file_system_that_cannot_reserve_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*args: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    path = tmp_path / "rank-00000-of-00001.safetensors"
    file, (entry,) = write_shard(path, 0, [loose("a", torch.arange(1000))], METADATA)
    with reader(path, file, 4 << 20) as opened:
        assert torch.equal(opened.read(entry, 0, 1000, Pages()), torch.arange(1000))


def test_short_writes_and_reads_are_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write, real_read = os.write, os.preadv
    monkeypatch.setattr(shards.os, "write", lambda fd, data: real_write(fd, data[:100]))
    monkeypatch.setattr(
        shards.os,
        "preadv",
        lambda fd, buffers, position: real_read(fd, [buffers[0][:70]], position),
    )
    path = tmp_path / "rank-00000-of-00001.safetensors"
    file, (entry,) = write_shard(path, 0, [loose("a", torch.arange(1000))], METADATA)
    with reader(path, file, 4 << 20) as opened:
        assert torch.equal(opened.read(entry, 0, 1000, Pages()), torch.arange(1000))


def test_a_file_that_is_there_is_never_written_over(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000-of-00001.safetensors"
    path.write_text("somebody's")
    with pytest.raises(CheckpointError, match="cannot be written: File exists"):
        write_shard(path, 0, [], METADATA)
    assert path.read_text() == "somebody's"


def test_a_dtype_without_a_name_is_refused_with_its_path() -> None:
    with pytest.raises(
        CheckpointError, match=r"extra\.a is torch\.complex128, which safetensors has no name for"
    ):
        dtype_code(torch.complex128, "extra.a")
