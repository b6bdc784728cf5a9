"""Assemble elements of any part of a parameter, in any memory order, from the pieces of a step.

    wanted   a part, the stride of its memory, elements [start, stop) there      core/boxes.py
    stored   pieces: each a range of the box that its entry names, likewise

Invariant: the result is complete, or it raises. Cost: the bytes between the first and the
last element that are needed of each piece, a chunk at a time where others lie between; none is read
twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from zeroshard.checkpoint.manifest import ITEMSIZE, ParameterEntry, TensorEntry
from zeroshard.checkpoint.shard_files import DTYPES, OpenShards
from zeroshard.core.boxes import Shared, Span, common, dense_stride, part_at
from zeroshard.core.part import Part
from zeroshard.errors import CheckpointError


def stored_span(entry: ParameterEntry, piece: TensorEntry) -> Span:
    """Return which elements of the parameter of `entry` a piece has."""
    part = part_at(entry.shape, piece.box)
    stride = dense_stride(entry.stride, entry.shape, part.sizes) if piece.box else entry.stride
    return Span(part, stride, piece.start, piece.stop)


def whole_stride(part: Part, stride: tuple[int, ...]) -> tuple[int, ...]:
    """Return in which order a whole parameter lies in memory, of which `part` has `stride`."""
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
    found = [(piece, shared) for piece, shared in _shared(entry, pieces, wanted) if shared]
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


def _shared(
    entry: ParameterEntry, pieces: Sequence[TensorEntry], wanted: Span
) -> Iterator[tuple[TensorEntry, list[Shared]]]:
    for piece in pieces:
        yield piece, common(wanted, stored_span(entry, piece))


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
