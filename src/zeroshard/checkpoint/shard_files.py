"""One file of pieces, in the safetensors format: eight bytes of header length, a JSON header,
the data. Written and read in hashed chunks.

Writing reserves the space first, so that a full disk is noticed before the first byte. Reading
verifies each chunk that it touches, and touches no others. Any safetensors reader opens the files.

Invariant: `ShardReader.read` returns bytes with the manifest's hash (unless verification is off).
Cost: one pass over the bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zeroshard._version import __version__
from zeroshard.checkpoint.atomic_files import write_new
from zeroshard.checkpoint.manifest import (
    CHUNK_BYTES,
    ITEMSIZE,
    Manifest,
    ShardEntry,
    TensorEntry,
    digest,
)
from zeroshard.checkpoint.steps import open_regular, os_errors
from zeroshard.errors import CheckpointError
from zeroshard.memory import Pages

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
WRITTEN_BY = f"zeroshard {__version__}, torch {torch.__version__}"
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ALIGN = 64  # of the start of the data

# numbers that rest on another tier: borrowed when they are written
Lent = Callable[[], AbstractContextManager[torch.Tensor]]
# an entry without hashes and place, and its numbers
Stored = tuple[TensorEntry, "torch.Tensor | Lent"]


def opened(numbers: torch.Tensor | Lent) -> AbstractContextManager[torch.Tensor]:
    """Return a context that gives the numbers of a `Stored` as a tensor."""
    return nullcontext(numbers) if isinstance(numbers, torch.Tensor) else numbers()


def dtype_code(dtype: torch.dtype, what: str) -> str:
    """Return safetensors' name of `dtype`. Raises CheckpointError naming `what` if it has none."""
    if dtype not in _CODES:
        raise CheckpointError(f"{what} is {dtype}, which safetensors has no name for")
    return _CODES[dtype]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, without a copy where it is contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    data: Any = flat.view(torch.uint8).numpy()  # an array is a buffer, which its stubs do not say
    return memoryview(data) if flat.numel() else memoryview(b"")


def header_of(
    entries: Sequence[tuple[str, str, tuple[int, ...], int]], metadata: dict[str, str]
) -> bytes:
    """Return a file's first bytes; `entries` are (key, dtype, shape, bytes) in file order."""
    table: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for key, dtype, shape, num_bytes in entries:
        place = [offset, offset + num_bytes]
        table[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": place}
        offset += num_bytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def _header(stored: Sequence[Stored], metadata: dict[str, str]) -> bytes:
    entries = [(entry.key, entry.dtype, entry.shape, entry.num_bytes) for entry, _ in stored]
    return header_of(entries, metadata)


def shard_bytes(stored: Sequence[Stored], metadata: dict[str, str]) -> int:
    """Return the size of the file that `write_shard` writes."""
    return len(_header(stored, metadata)) + sum(entry.num_bytes for entry, _ in stored)


def write_shard(
    path: Path,
    file: int,
    stored: Sequence[Stored],
    metadata: dict[str, str],
    *,
    chunk_bytes: int = CHUNK_BYTES,
    write: Callable[[Path, int, Iterable[Any]], None] = write_new,
) -> tuple[ShardEntry, list[TensorEntry]]:
    """Write and fsync the new file `path`; return the entries of the file and of its tensors.

    `write` takes the path, the number of bytes and the bytes, in parts. Raises CheckpointError when
    there is no space, or the disk fails; the file may be left behind.
    """
    header = _header(stored, metadata)
    total = len(header) + sum(entry.num_bytes for entry, _ in stored)
    entries: list[TensorEntry] = []

    def parts() -> Iterator[Any]:
        yield header
        offset = 0
        for entry, numbers in stored:
            hashes = []
            with opened(numbers) as tensor:
                data = as_bytes(tensor.cpu())
                assert len(data) == entry.num_bytes, (entry.key, len(data), entry.num_bytes)
                for start in range(0, len(data), chunk_bytes):
                    chunk = data[start : start + chunk_bytes]
                    hashes.append(digest(chunk))
                    yield chunk
            entries.append(replace(entry, file=file, offset=offset, hashes=tuple(hashes)))
            offset += entry.num_bytes

    write(path, total, parts())
    return ShardEntry(path.name, total, len(header), digest(header)), entries


def describe_range(entry: TensorEntry, start: int, stop: int) -> str:
    """Describe bytes ``[start, stop)`` of an entry as elements of the parameter or tensor."""
    size = ITEMSIZE[entry.dtype]
    first, last = entry.start + start // size, entry.start + -(-stop // size)
    if entry.parameter is None:
        return f"tensor {entry.kind} elements {first} to {last}"
    box = ", ".join(f"{begin}:{end}" for begin, end in entry.box)
    part = f"[{box}]" if box else ""
    return f"{entry.kind} of parameter {entry.parameter!r}{part}, elements {first} to {last}"


class ShardReader:
    """An open file of pieces, as its manifest describes it; counts `bytes_read`."""

    def __init__(
        self,
        path: Path,
        file: ShardEntry,
        *,
        chunk_bytes: int,
        verify: bool = True,
        open_file: Callable[[Path], int] = open_regular,
    ) -> None:
        self.path = path
        self.bytes_read = 0
        self._chunk_bytes = chunk_bytes
        self._verify = verify
        self._start = file.header_bytes
        self._fd = open_file(path)
        try:
            if hasattr(os, "posix_fadvise"):
                # a wider window of reading ahead
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            size = os.fstat(self._fd).st_size
            if size != file.bytes:
                raise CheckpointError(
                    f"{path} has {size} bytes and should have {file.bytes}: it was cut short, or is"
                    " not of this checkpoint"
                )
            header = bytearray(file.header_bytes if verify else 0)
            self._fill(memoryview(header), 0)
            if verify and digest(header) != file.header_hash:
                raise CheckpointError(f"{path} is damaged in its header")
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, entry: TensorEntry, start: int, stop: int, pages: Pages) -> torch.Tensor:
        """Return elements ``[start, stop)`` of a flattened tensor, 1-D, in memory from `pages`."""
        dtype, size = DTYPES[entry.dtype], ITEMSIZE[entry.dtype]
        try:
            out = pages.empty(stop - start, dtype, torch.device("cpu"))
        except (MemoryError, OSError, RuntimeError) as error:  # a file of holes may claim any size
            raise CheckpointError(
                f"{self.path}: no memory for {(stop - start) * size} bytes of {entry.key}"
            ) from error
        self.read_into(entry, start * size, as_bytes(out))
        return out

    def read_into(self, entry: TensorEntry, start: int, out: memoryview) -> None:
        """Fill `out` from byte `start` of `entry`. Raises CheckpointError for a damaged range."""
        stop = start + len(out)
        if not out:
            return
        if not self._verify:
            self._fill(out, self._start + entry.offset + start)
            self.bytes_read += len(out)
            return
        for number in range(start // self._chunk_bytes, -(-stop // self._chunk_bytes)):
            low, high = self._bounds(entry, number)
            first, last = max(low, start), min(high, stop)
            inside = first == low and last == high
            chunk = out[low - start : high - start] if inside else memoryview(bytearray(high - low))
            if not self._read_chunk(entry, number, chunk):
                raise CheckpointError(f"{self.path} is damaged: {describe_range(entry, low, high)}")
            if not inside:
                out[first - start : last - start] = chunk[first - low : last - low]

    def _bounds(self, entry: TensorEntry, number: int) -> tuple[int, int]:
        """Return the first byte of a chunk of `entry`, and the one after its last."""
        low = number * self._chunk_bytes
        return low, min(low + self._chunk_bytes, entry.num_bytes)

    def _read_chunk(self, entry: TensorEntry, number: int, out: memoryview) -> bool:
        """Read one chunk; return whether it has its hash."""
        self._fill(out, self._start + entry.offset + number * self._chunk_bytes)
        self.bytes_read += len(out)
        return digest(out) == entry.hashes[number]

    def check(self, entry: TensorEntry) -> list[str]:
        """Read all of a tensor; return a description of each damaged range."""
        scratch = memoryview(bytearray(min(self._chunk_bytes, entry.num_bytes)))
        damaged = []
        for number in range(len(entry.hashes)):
            low, high = self._bounds(entry, number)
            if not self._read_chunk(entry, number, scratch[: high - low]):
                damaged.append(describe_range(entry, low, high))
        return damaged

    def _fill(self, out: memoryview, position: int) -> None:
        while out:
            with os_errors(f"{self.path} cannot be read at byte {position}"):
                count = os.preadv(self._fd, [out], position)
            if not count:
                raise CheckpointError(
                    f"{self.path} ends at byte {position}: it was cut short while it was read"
                )
            position += count
            out = out[count:]


class OpenShards:
    """The files of one step, each opened when it is first needed; `stack` closes them."""

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        stack: ExitStack,
        *,
        verify: bool = True,
        open_file: Callable[[Path], int] = open_regular,
    ) -> None:
        self.pages = Pages()
        self.path, self.chunk_bytes = path, manifest.chunk_bytes
        self._manifest = manifest
        self._stack = stack
        self._options: Any = {"verify": verify, "open_file": open_file}
        self._readers: dict[int, ShardReader] = {}

    def read(self, entry: TensorEntry, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` of a tensor, flat, in its dtype."""
        if entry.file not in self._readers:
            file = self._manifest.files[entry.file]
            path, chunk_bytes = self.path / file.name, self._manifest.chunk_bytes
            reader = ShardReader(path, file, chunk_bytes=chunk_bytes, **self._options)
            self._readers[entry.file] = self._stack.enter_context(reader)
        return self._readers[entry.file].read(entry, start, stop, self.pages)

    @property
    def bytes_read(self) -> int:
        """The bytes read from all files so far."""
        return sum(reader.bytes_read for reader in self._readers.values())
