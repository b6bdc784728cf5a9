"""Digests by which ranks compare: a rolling one of the collectives that this rank has issued, and
one of the bits of tensors.

Transformer blocks have identical shapes, so two ranks that gather different layers would mix them
without an error. So every collective folds (operation, unit, dtype, numel, step) into one number,
which ranks compare once per step. Gathers on two-sided transports fold in order; reduces (and
whatever may differ in order between ranks) fold as a set, and in order, too, where the transport's
operations meet in the order in which they begin. An order counts for collectives among the same
ranks: ranks that hold other experts may run theirs in another order.

Beside them stands what this rank has entered last, for the errors of stalls (comm/cpu/control.py).

Invariant: equal histories give equal digests, different ones with probability 2**-64. Cost: half a
microsecond per collective (each is hashed once, and looked up from then on), 8 bytes per step on
the wire; for what is entered, one store per module that needs a unit, and per reduce.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from functools import cache
from time import monotonic
from typing import Any

import torch
import xxhash

# "forward", "backward", "read" or "reduce" and unit, or "step"; number of step; monotonic seconds
Entered = tuple[str, str, int, float]
Ranks = tuple[int, ...]  # that take part in a collective

_MASK = (1 << 64) - 1
_PRIME = 0x100000001B3  # FNV-1a
# entries kept to name a difference by: a process that only runs forwards never begins another step
_MOST_LOGGED = 1 << 16


class Digest:
    """The collectives of one rank since the last comparison."""

    def __init__(self) -> None:
        self.step = 0
        # how often, since the last `advance`, this rank has begun what ranks do together although
        # nothing may be sent: forwards, and reads of weights outside of them
        self.num_begun = 0
        self.entered: Entered = ("shard()", "", 0, monotonic())
        self._ordered: dict[Ranks, int] = {}
        self._asked: int | None = None  # the order at the last `has_news`
        self._unordered = 0
        self._log: deque[tuple[str, Ranks | None]] = deque(maxlen=_MOST_LOGGED)

    def enter(self, event: str, unit: str) -> None:
        """Note that this rank has come to `event` of `unit`."""
        self.entered = (event, unit, self.step, monotonic())

    def begin(self, counts: bool = True) -> None:
        """Note that this rank has begun what ranks do together; see `num_begun`."""
        self.num_begun += counts

    def fold(
        self, operation: str, unit: str, dtype: str, numel: int, among: Ranks, *, ordered: bool
    ) -> None:
        """Add one collective `among` these ranks."""
        entry, value = _hashed(operation, unit, dtype, numel)
        if ordered:
            self._ordered[among] = (self._ordered.get(among, 0) ^ value) * _PRIME & _MASK
        if not ordered or operation == "reduce":
            self._unordered = (self._unordered + value) & _MASK
        self._log.append((entry, among if ordered else None))

    def value(self, among: Ranks) -> int:
        """Return the digest of what has been folded since the last `advance`, 64 bits."""
        start = _hash(f"step {self.step}") ^ self._ordered.get(among, 0)
        return (start * _PRIME ^ self._unordered) & _MASK

    def has_news(self, among: Ranks) -> bool:
        """Whether ordered collectives `among` these ranks were folded since this was last asked."""
        before, self._asked = self._asked, self._ordered.get(among)
        return self._asked not in (None, before)

    def reduced(self) -> int:
        """Return the digest of what folds as a set, 64 bits. Replicas along the mesh reduce the
        same, though their units may be of other sizes and are gathered in an order of their own.
        """
        return (_hash(f"step {self.step}") ^ self._unordered) & _MASK

    def log(self, among: Ranks) -> list[str]:
        """Return the folded entries: the ordered ones, then the unordered ones sorted."""
        return [entry for entry, ranks in self._log if ranks == among] + sorted(
            entry for entry, ranks in self._log if ranks is None
        )

    def last(self, number: int) -> list[str]:
        """Return the last `number` collectives of this step, or fewer, the newest last; in any
        thread.
        """
        entries = [entry.split()[:2] for entry, _ in self._log.copy()]
        return [" ".join(entry) for entry in entries if entry[0] in ("gather", "reduce")][-number:]

    def advance(self, step: int | None = None) -> None:
        """Start the next step, or that numbered `step`."""
        self.step = self.step + 1 if step is None else step
        self.num_begun = 0
        self._ordered.clear()
        self._asked = None
        self._unordered = 0
        self._log.clear()


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@cache
def _hashed(operation: str, unit: str, dtype: str, numel: int) -> tuple[str, int]:
    """Return the entry of a collective and its hash."""
    entry = f"{operation} {unit} {dtype} {numel}"
    return entry, _hash(entry)


def first_difference(logs: Sequence[Sequence[str]]) -> tuple[int, list[str]]:
    """Return (position, entry of each rank) of the first difference between `logs`."""
    length = max((len(log) for log in logs), default=0)
    for position in range(length):
        entries = [log[position] if position < len(log) else "nothing" for log in logs]
        if len(set(entries)) > 1:
            return position, entries
    return length, ["the same"] * len(logs)


def first_unlike(held: Sequence[Sequence[Ranks]], of_ranks: Sequence[Any]) -> dict[int, Any]:
    """Return, by rank, the first of `of_ranks` (by rank, and number in `held`) in which ranks that
    meet in collectives differ; `held`: the groups of ranks that hold the same parameters.
    """
    for number, groups in enumerate(held):
        for group in groups:
            found = [of_ranks[rank][number] for rank in group]
            if found.count(found[0]) < len(found):
                return dict(zip(group, found, strict=True))
    return {}


def describe_unlike(held: Sequence[Sequence[Ranks]], logs: Sequence[Sequence[list[str]]]) -> str:
    """Return where the `logs`, by rank and number in `held`, first differ, and the remedy."""
    unlike = first_unlike(held, logs)
    position, entries = first_difference(list(unlike.values()))
    return (
        f"the first difference is number {position}: {holders(entries, list(unlike))}. Units must"
        " run on every rank in the same order, as often, and in the same no_sync() contexts"
    )


def holders(entries: Sequence[str], ranks: Sequence[int] | None = None) -> str:
    """Return which of `ranks` (default: all) hold each of the `entries`:
    ``"ranks 0, 2: a; rank 1: b"``.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, entry in zip(range(len(entries)) if ranks is None else ranks, entries, strict=True):
        ranks_of.setdefault(entry, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}: {entry}"
        for entry, ranks in ranks_of.items()
    )


# -------------------------------------------------------------------------------- digest of tensors
# On CPU the digest of tensors (64 bits) is xxh3 of the bytes, at about the speed of memory. On a
# device, from which they would all travel through pageable memory, it is formed where they are, and
# 8 bytes travel: words of 64 bits are mixed with their places and added up::
#
#     sum of mix(word[i] + i * ODD)  modulo 2**64,  i = 0, 1, ...
#
# Invariant: equal bits give equal digests on devices of one kind, since integers have one sum in
# every order. `mix` is a bijection, so one word that differs is always seen; any other difference
# (two elements in each other's place, several that changed) is missed with probability 2**-64, if
# it was not made to be. Bits count, not numbers: 0.0 is not -0.0, and a NaN equals itself.
#
# Cost on a device: about 15 passes over the bytes, with scratch of three chunks, and one wait of
# the host per tensor. ``torch.hash_tensor`` is no substitute: it forgets the places of elements.


CHUNK_BYTES = 1 << 24
ODD = -0x61C8864680B583EB  # 2**64 / the golden ratio, as a signed number
_FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # splitmix64's, odd


def digest_of(*tensors: torch.Tensor) -> str:
    """Return one digest of the bits of `tensors`, of any dtypes and devices, as 16 hexadecimal
    digits.
    """
    state = xxhash.xxh3_64()
    for tensor in tensors:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        here = data if data.device.type == "cpu" else mixed_sum(data).cpu()
        state.update(here.numpy())  # type: ignore[arg-type]  # a buffer
    return state.hexdigest()


def mixed_sum(data: torch.Tensor) -> torch.Tensor:
    """Return the sum of the mixed words of `data` [n], uint8, as int64 [1] on its device. Does not
    wait for it.
    """
    total = torch.full((1,), data.numel(), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), CHUNK_BYTES):
        part = data[start : start + CHUNK_BYTES]
        words = torch.zeros(-(-part.numel() // 8), dtype=torch.int64, device=data.device)
        words.view(torch.uint8)[: part.numel()].copy_(part)  # which need not begin on a word
        first = start // 8
        places = torch.arange(first, first + words.numel(), device=data.device)
        words.add_(places.mul_(ODD))
        total.add_(mixed(words).sum())
    return total


def mixed(words: torch.Tensor) -> torch.Tensor:
    """Mix the bits of each word, in place."""
    for factor in _FACTORS:
        _fold(words)
        words.mul_(factor)
    _fold(words)
    return words


def _fold(words: torch.Tensor) -> None:
    """Combine the low half of each word with its high half, which stays."""
    # >> repeats the sign
    words.bitwise_xor_((words >> 32).bitwise_and_(0xFFFFFFFF))
