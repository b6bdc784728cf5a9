"""Parts of a checkpoint in memory that outlives its rank: the note of a part, and which saves are
whole.

    note = hash of the rest . newline . the part as JSON . newline . index

The note is emptied before the part changes, and written after it. So a note whose hash fits stands
for a part that is complete. A save is whole when the parts of all its ranks are there; there is no
other commit.

Invariant: `newest` never returns a save of which a part is missing or torn. Pure; no torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import xxhash

__all__ = ["Part", "newest", "note_of", "partners", "read_note"]

_HASH_BYTES = 32


@dataclass(frozen=True)
class Part:
    """One rank's part of one save in memory."""

    directory: str  # of the checkpoints that the save belongs to
    writer: str  # the Saver, the same on all ranks
    nonce: str  # the save, the same on all ranks
    step: int
    world: int
    rank: int
    file_bytes: int
    note_bytes: int = 0  # known once it is written

    @property
    def save(self) -> tuple[int, str, int]:
        """The save that it is a part of."""
        return self.step, self.nonce, self.world


def note_of(part: Part, index: bytes) -> bytes:
    """Return the note of a part that is complete; `index` is its part of the manifest."""
    rest = json.dumps(asdict(part)).encode() + b"\n" + index
    return xxhash.xxh3_128_hexdigest(rest).encode() + b"\n" + rest


def read_note(note: bytes) -> tuple[Part, bytes] | None:
    """Return what `note_of` was given; None where the part is not complete."""
    own, rest = note[:_HASH_BYTES], note[_HASH_BYTES + 1 :]
    if xxhash.xxh3_128_hexdigest(rest).encode() != own:
        return None
    head, _, index = rest.partition(b"\n")
    return Part(**{**json.loads(head), "note_bytes": len(note)}), index


def newest(parts: Iterable[Part]) -> tuple[int, str, int] | None:
    """Return step, nonce and number of ranks of the newest save that is whole; None: there is none.

    A part may be there several times, on several hosts.
    """
    ranks: dict[tuple[int, str, int], set[int]] = {}
    for part in parts:
        ranks.setdefault(part.save, set()).add(part.rank)
    return max((save for save, found in ranks.items() if len(found) == save[2]), default=None)


def partners(homes: list[str]) -> list[int | None]:
    """Return, for each rank, the rank of the next host that holds its copy; None on one host.

    `homes` names the host of each rank. Ranks of a host are spread over those of the next one.
    """
    hosts: dict[str, list[int]] = {}
    for rank, home in enumerate(homes):
        hosts.setdefault(home, []).append(rank)
    groups = list(hosts.values())
    found: list[int | None] = [None] * len(homes)
    for number, group in enumerate(groups):
        others = groups[(number + 1) % len(groups)]
        for place, rank in enumerate(group):
            found[rank] = others[place % len(others)] if len(groups) > 1 else None
    return found
