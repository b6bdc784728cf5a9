"""One file of pieces, in the safetensors format: eight bytes of header length, a JSON header,
the data. Written and read in hashed chunks.

Files for other programs, and spans of a parameter, have sections of their own.

Writing reserves the space first, so that a full disk is noticed before the first byte. Reading
verifies each chunk that it touches, and touches no others. Any safetensors reader opens the files.

Invariant: `ShardReader.read` returns bytes with the manifest's hash (unless verification is off).
Cost: one pass over the bytes.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zeroshard._version import __version__
from zeroshard.checkpoint.manifest import (
    CHUNK_BYTES,
    ITEMSIZE,
    Manifest,
    ParameterEntry,
    ShardEntry,
    TensorEntry,
    digest,
)
from zeroshard.checkpoint.steps import (
    make_directory,
    open_regular,
    os_errors,
    remove_tree,
    require_space,
    sync_directory,
)
from zeroshard.core.boxes import Shared, Span, common, dense_stride, part_at
from zeroshard.core.placement import Part
from zeroshard.errors import CheckpointError, ConfigError
from zeroshard.memory import Pages

# ------------------------------------------------------------------------- files for other programs
# They are written under a hidden name, synced, and renamed; on failure they are removed.
#
# Invariant: a file or directory with its final name is complete. `published` never overwrites, and
# removes what a killed process has left of the same name: a folder that nobody holds the lock of.
# Cost: one rename, one fsync per file and directory.


_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def published(out: Path, num_bytes: int) -> Iterator[Path]:
    """Yield a path in a hidden folder beside `out` for `num_bytes`; rename it to `out`, or remove
    it on error.

    Raises ConfigError where `out` is there already (an empty directory does not count),
    CheckpointError where there is no space.
    """
    out = Path(os.path.abspath(out))
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty: name a new directory, or remove what is there")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise ConfigError(f"{out} exists: name a path that does not, or remove it")
    make_directory(out.parent)
    require_space(out.parent, num_bytes, str(out))
    _remove_leftovers(out)
    folder = out.parent / f".exporting-{out.name}-{secrets.token_hex(4)}"
    working = folder / out.name
    with ExitStack() as stack:
        stack.callback(remove_tree, folder)
        folder.mkdir()
        _hold(folder, stack)
        yield working
        if working.is_dir():
            sync_directory(working)
        elif out.is_dir():
            out.rmdir()
        os.rename(working, out)
        sync_directory(out.parent)


def _remove_leftovers(out: Path) -> None:
    """Remove what killed exports to `out` have left."""
    name = re.compile(re.escape(f".exporting-{out.name}-") + "[0-9a-f]{8}")
    with suppress(OSError):  # a folder that may be written and not read
        for path in [out.parent / one for one in os.listdir(out.parent) if name.fullmatch(one)]:
            with ExitStack() as stack:
                if _hold(path, stack):
                    remove_tree(path)


def _hold(path: Path, stack: ExitStack) -> bool:
    """Lock a folder until `stack` ends; return whether nobody else holds it, and it can be held."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        stack.callback(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def write_new(path: Path, num_bytes: int, parts: Iterable[Any]) -> None:
    """Write `parts` (buffers of bytes, `num_bytes` in all) to the new file `path` and fsync it.
    The umask says who may read it.

    The space is reserved first. Raises CheckpointError when there is none, or the disk fails; the
    file may be left behind.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _reserve(fd, num_bytes)
            for part in parts:
                _write(fd, memoryview(part))
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise _cannot_write(path, num_bytes, error) from error


def _reserve(fd: int, num_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise
            with suppress(OSError):  # this file system cannot reserve
                os.ftruncate(fd, 0)


def _write(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _cannot_write(path: Path, num_bytes: int, error: OSError) -> CheckpointError:
    if error.errno not in _NO_SPACE:
        return CheckpointError(f"{path} cannot be written: {error.strerror}")
    try:
        space = os.statvfs(path.parent)
        free = f", and {space.f_bavail * space.f_frsize} are free"
    except OSError:
        free = ""
    return CheckpointError(
        f"no space for {path}: it needs {num_bytes} bytes{free} ({error.strerror}); what was there"
        " before is untouched"
    )


# ---------------------------------------------------------------------------------- files of pieces

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


# ----------------------------------------------------------------------------- spans of a parameter
# Elements of any part of a parameter, in any memory order, are assembled from the pieces of a step.
#
#     wanted   a part, the stride of its memory, elements [start, stop) there      core/boxes.py
#     stored   pieces: each a range of the box that its entry names, likewise
#
# Invariant: the result is complete, or it raises. Cost: the bytes between the first and the last
# element that are needed of each piece, a chunk at a time where others lie between; none is read
# twice.


def stored_span(entry: ParameterEntry, piece: TensorEntry) -> Span:
    """Return which elements of the parameter of `entry` a piece has."""
    part = part_at(entry.shape, piece.box)
    stride = dense_stride(entry.stride, entry.shape, part.sizes) if piece.box else entry.stride
    return Span(part, stride, piece.start, piece.stop)


def whole_stride(part: Part, stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return in which order a whole parameter lies in memory, if its `part` has `stride`."""
    return stride if part.is_whole else dense_stride(stride, part.sizes, part.shape)


def copy_common(out: torch.Tensor, wanted: Span, block: torch.Tensor, stored: Span) -> int:
    """Copy into `out` [wanted.numel] what `block` [stored.numel] has of it; return how many
    elements that is.
    """
    copied = 0
    for shared in common(wanted, stored):
        target = out.as_strided(
            shared.sizes, shared.wanted_stride, out.storage_offset() + shared.wanted
        )
        source = block.as_strided(
            shared.sizes, shared.stored_stride, block.storage_offset() + shared.stored
        )
        target.copy_(source)
        copied += shared.numel
    return copied


def read_span(
    shards: OpenShards,
    entry: ParameterEntry,
    pieces: Sequence[TensorEntry],
    wanted: Span,
    what: str,
) -> torch.Tensor:
    """Return the elements `wanted` [wanted.numel], from the `pieces` of one kind of a parameter.

    Raises CheckpointError, saying `what` they are, where pieces are missing.
    """
    within = [(piece, common(wanted, stored_span(entry, piece))) for piece in pieces]
    found = [(piece, shared) for piece, shared in within if shared]
    if sum(each.numel for _, shared in found for each in shared) != wanted.numel:
        lacking = _lacking([shared for _, shared in found], wanted)
        raise CheckpointError(f"{shards.path} lacks {lacking} of {what}")
    if not found:
        return torch.empty(0)
    piece, (first, *more) = found[0]
    if len(found) == 1 and not more and first.is_run:
        return shards.read(piece, first.stored, first.stored + first.numel)
    out = shards.pages.empty(wanted.numel, DTYPES[piece.dtype], torch.device("cpu"))
    for piece, shared in found:
        span = stored_span(entry, piece)
        for start, stop in _blocks(piece, shared, shards.chunk_bytes):
            block = shards.read(piece, start, stop)
            here = Span(span.part, span.stride, span.start + start, span.start + stop)
            copy_common(out, wanted, block, here)
    return out


def _blocks(
    piece: TensorEntry, shared: Sequence[Shared], chunk_bytes: int
) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a piece to read: all that is needed where nothing lies between, else
    the chunks in which it is hashed.
    """
    start, stop = min(one.stored for one in shared), max(one.stored_stop for one in shared)
    if stop - start == sum(one.numel for one in shared):
        yield start, stop
        return
    step = max(1, chunk_bytes // ITEMSIZE[piece.dtype])
    while start < stop:
        end = min(stop, start - start % step + step)
        yield start, end
        start = end


def _lacking(found: Sequence[Sequence[Shared]], wanted: Span) -> str:
    """Return which elements are missing, as text."""
    there = torch.zeros(wanted.numel, dtype=torch.bool)
    for shared in found:
        for one in shared:
            there.as_strided(one.sizes, one.wanted_stride, one.wanted).fill_(True)
    first = int((~there).nonzero()[0])
    after = there[first:].nonzero()
    end = wanted.numel if not len(after) else first + int(after[0])
    place = "" if wanted.part.is_whole else f" of the part from {list(wanted.part.start)}"
    return f"elements {wanted.start + first} to {wanted.start + end}{place}"
