"""What ``zeroshard replay`` asks of the run that it starts: a file in the directory of its trail,
which `REPLAY_VARIABLE` of the run's environment names; a file of this name that others have put
beside a trail asks for nothing.

    {"step": 120, "leaf": 5, "stepped": [{PARAMETER: [START, STOP]}, ...], "summed": [...]}

With a leaf, of that step only the leaf is computed, and the run ends after it. The ranges are those
that the ranks of the run have held, so that a replay on any number of ranks writes the hash of each
rank's slice, too::

    rank 0 of the run   a[:128]     the replay   a[:128] -> rank 0,  a[128:] -> rank 1,  their sum
    rank 1 of the run   a[128:]

Pure. Cost: a range for each parameter that a rank has held a part of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from zeroshard.core.layout import Range
from zeroshard.core.trail import Header, ranges_in

REPLAY_FILE = "replay.json"
REPLAY_VARIABLE = "ZEROSHARD_REPLAY"


@dataclass(frozen=True)
class Replay:
    """Which step is replayed, which leaf of it (None: all), and what each rank of the run held."""

    step: int
    leaf: int | None
    stepped: Sequence[Mapping[str, Range]]
    summed: Sequence[Mapping[str, Range]]

    @classmethod
    def of(cls, headers: Sequence[Header], step: int, leaf: int | None) -> Replay:
        """Return the request to replay `step` of a run with `headers`, one per rank."""
        return cls(step, leaf, [one.stepped for one in headers], [one.summed for one in headers])

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Replay:
        """Return what `to_json` has written. Raises ValueError, TypeError or LookupError."""
        stepped, summed = (
            [ranges_in(held) for held in data[name]] for name in ("stepped", "summed")
        )
        leaf = data["leaf"]
        return cls(int(data["step"]), None if leaf is None else int(leaf), stepped, summed)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "step": self.step,
            "leaf": self.leaf,
            "stepped": list(map(dict, self.stepped)),
            "summed": list(map(dict, self.summed)),
        }

    def cut(
        self, phase: str, name: str, start: int, stop: int
    ) -> Iterator[tuple[int, int, list[int]]]:
        """Cut elements [start, stop) of parameter `name` where a rank of the run had its slice of
        `phase`; yield each part with the ranks that held it.
        """
        ranks = self.summed if phase == "sum" else self.stepped
        held = {rank: spans[name] for rank, spans in enumerate(ranks) if name in spans}
        bounds = {bound for span in held.values() for bound in span if start < bound < stop}
        for low, high in pairwise(sorted({start, stop, *bounds})):
            there = [rank for rank, (begin, end) in held.items() if begin <= low and high <= end]
            yield low, high, there

    def first(self, name: str) -> list[int]:
        """Return the ranks that stepped the first element of parameter `name`."""
        return [rank for rank, spans in enumerate(self.stepped) if spans.get(name, (1, 1))[0] == 0]
