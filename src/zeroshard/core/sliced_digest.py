"""Sums of mixed bits that add up over slices: what is cut over ranks has one digest, however it was
cut, and nobody gathers it.

    rank 0   a[:5]    h(a[0]) + .. + h(a[4])
    rank 1   a[5:]    h(a[5]) + .. + h(a[9])     both sums modulo 2**64: the digest of a

``h`` mixes bits with their place (core/digest.py). Where several parameters go into one sum, each
is counted from a place of its own (`place_of`), so that two of them in each other's place are seen.

Two of them, one for each cut:

    placed_sum    any cut: every element is mixed with its place, about 15 passes over words of 64
                  bits, 5 ns for an element on one core
    block_total   cuts on multiples of 64 elements, as layouts cut: the words of a block
                  are multiplied by a key each and added, and the sum is mixed with the block's
                  place; about 0.4 ns for an element of fp32. No wait of the host for a device.

Invariant: one word that differs is always seen by `placed_sum`, and by `block_total`: its keys are
odd. Any other difference is missed with a probability of 2**-64, and where only signs of several
elements of a block differ 2**-33, if it was not made to be.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Generic, TypeVar

import torch
import xxhash

from zeroshard.core.digest import CHUNK_BYTES, ODD, digest_of, mixed
from zeroshard.core.layout import ALIGN, Slot

_Key = TypeVar("_Key", bound=Hashable)

MASK = (1 << 64) - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size of an element
_CACHED_WORDS = 1 << 16  # on the CPU three chunks of words stay in its caches
_MOST_PENDING = 1 << 20  # blocks; their sums are kept before they are mixed


def placed_sum(tensor: torch.Tensor, first: int) -> int:
    """Return a 64-bit sum of the mixed bits of elements [first, first + numel) of something whole,
    which `tensor` holds: the sums of its parts add up to the same number however it was cut.
    """
    flat = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    size, total = _chunk_words(flat), 0
    for start in range(0, flat.numel(), size):
        words = flat[start : start + size].to(torch.int64, copy=True)
        begin = first + start
        words.add_(torch.arange(begin, begin + words.numel(), device=words.device).mul_(ODD))
        total += int(mixed(words).sum())
    return total & MASK


def block_total(tensor: torch.Tensor, first: int) -> torch.Tensor:
    """Return the same of blocks, as a signed number on the tensor's device, int64 [1]: of parts
    that begin and, but for the last one, end on multiples of 64 elements. `first`: the place of the
    first element, from where something whole is counted.
    """
    return _totals([_block_sums(tensor)], [first])


class BlockTotals(Generic[_Key]):
    """The totals of many slices by key, mixed together: a few kernels for all of them.

    Of each slice the sums of its blocks are kept until then, 8 bytes for 64 elements. Where slices
    are on a device nothing waits for it before `read`.
    """

    def __init__(self) -> None:
        # by device: keys, sums of blocks and the places of the slices that are not mixed yet
        self._pending: dict[torch.device, list[tuple[Sequence[_Key], torch.Tensor, int]]] = {}
        self._num_pending = 0
        self._mixed: list[tuple[list[Sequence[_Key]], torch.Tensor]] = []

    def add(self, keys: Sequence[_Key], tensor: torch.Tensor, first: int) -> None:
        """Add the total of a slice, as in `block_total`, to each of `keys`."""
        sums = _block_sums(tensor)
        self._pending.setdefault(sums.device, []).append((keys, sums, first))
        self._num_pending += sums.numel()
        if self._num_pending > _MOST_PENDING:
            self._mix()

    def read(self) -> dict[_Key, int]:
        """Return the totals, as numbers modulo 2**64."""
        self._mix()
        out: dict[_Key, int] = {}
        for slices, totals in self._mixed:
            for keys, total in zip(slices, totals.tolist(), strict=True):
                for key in keys:
                    out[key] = (out.get(key, 0) + total) & MASK
        return out

    def _mix(self) -> None:
        for slices in self._pending.values():
            keys, sums, places = map(list, zip(*slices, strict=True))
            self._mixed.append((keys, _totals(sums, places)))
        self._pending, self._num_pending = {}, 0


def _block_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Return the words of each block, multiplied by their keys and added up, int64 [blocks]."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    width = ALIGN * tensor.element_size()
    num_whole, left = divmod(data.numel(), width)
    whole = data[: num_whole * width].view(torch.int64)
    sums = _keyed(whole.view(num_whole, width // 8))
    if not left:
        return sums
    last = torch.zeros(width, dtype=torch.uint8, device=data.device)  # the end of a parameter
    last[:left].copy_(data[num_whole * width :])
    return torch.cat([sums, _keyed(last.view(torch.int64).view(1, -1))])


def _keyed(words: torch.Tensor) -> torch.Tensor:
    """Return the sums of words [blocks, words of a block] multiplied by their keys, [blocks]."""
    num_words = words.shape[1]
    low, high = _keys(num_words, words.device)
    size = _chunk_words(words) // num_words
    sums = torch.empty(words.shape[0], dtype=torch.int64, device=words.device)
    for start in range(0, words.shape[0], size):
        part = words[start : start + size]
        # the high half once more: of its top bits a product keeps too little
        if words.device.type == "cpu":
            found = torch.mv(part, low).add_(torch.mv(part >> 32, high))
        else:  # which has no such product of integers
            found = (part * low).add_((part >> 32).mul_(high)).sum(1)
        sums[start : start + size] = found
    return sums


def _totals(sums: Sequence[torch.Tensor], firsts: Sequence[int]) -> torch.Tensor:
    """Return the total of each slice from the `sums` of its blocks and its first place, int64
    [slices], on their device.
    """
    together = torch.cat(list(sums))
    counts = [one.numel() for one in sums]
    stops = list(accumulate(counts))
    # of block i of all slices: its place in the one that it is of
    shifts = [
        first - ALIGN * (stop - count)
        for first, stop, count in zip(firsts, stops, counts, strict=True)
    ]
    places = torch.repeat_interleave(torch.tensor(shifts), torch.tensor(counts))
    places.add_(torch.arange(places.numel()).mul_(ALIGN)).mul_(ODD)
    mixed(together.add_(places.to(together.device)))
    ends = torch.cat([together.new_zeros(1), together.cumsum(0)])  # modulo 2**64
    at = torch.tensor([0, *stops]).to(together.device)
    return ends[at].diff()


@lru_cache
def _keys(num_words: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two odd keys for each word of a block."""
    keys = mixed(torch.arange(1, 2 * num_words + 1).mul_(ODD)).bitwise_or_(1).to(device)
    return keys[:num_words], keys[num_words:]


def _chunk_words(data: torch.Tensor) -> int:
    return _CACHED_WORDS if data.device.type == "cpu" else CHUNK_BYTES // 8


def whole_digest(buffer: torch.Tensor, slots: Sequence[Slot]) -> int | torch.Tensor:
    """Return a digest of the parameters that a whole buffer holds, without the padding between
    them: on the CPU at the speed of memory, elsewhere a number there, int64 [1].
    """
    if buffer.device.type == "cpu":
        return int(digest_of(*(buffer[low:high] for low, high in _runs(tuple(slots)))), 16)
    views = [buffer[slot.offset : slot.stop] for slot in slots]
    return _totals(list(map(_block_sums, views)), [place_of(slot.name) for slot in slots]).sum()


def digest_at(tensor: torch.Tensor, number: int) -> int | torch.Tensor:
    """Return a digest of the bits of `tensor`, the one of this `number` among others: on the CPU at
    the speed of memory, elsewhere a number there, int64 [1].
    """
    if tensor.device.type != "cpu":
        return block_total(tensor, number << 40)
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return xxhash.xxh3_64_intdigest(data.numpy(), seed=number)  # type: ignore[arg-type]  # a buffer


@lru_cache
def _runs(slots: tuple[Slot, ...]) -> list[tuple[int, int]]:
    """Return where parameters lie, as few ranges as there are between paddings."""
    out: list[tuple[int, int]] = []
    for slot in slots:
        begin = out.pop()[0] if out and out[-1][1] == slot.offset else slot.offset
        out.append((begin, slot.stop))
    return out


def place_of(name: str) -> int:
    """Return where the elements of a parameter are counted from: apart from other parameters."""
    return (xxhash.xxh3_64_intdigest(name.encode()) >> 32) << 24
