"""The trail of a run: hashes of what every step read, summed and wrote, and where two trails part.
Ranks (with leaves), rows and tiers of the two need not be the same.

A rank's file has a header, and a record per step::

    {"trail": 1, "rank": 1, "world": 2, "row": "zero3", "leaves": "8", "units": [...], ...}
    {"step": 10, "hashes": {"weight": {UNIT: HASH}, "leaf 4": {UNIT: HASH}, "norm": {"": HEX}}}

Units of a phase of a leaf stand in the order in which they were run. Of a run without leaves (its
"leaves" are "") micro-batch k of a rank is number k * world + rank, in the place of a leaf.

Hashes of two kinds, by phase (`PHASES`)::

    a slice     rank 0: h(a[:5])   rank 1: h(a[5:])     they add up to h(a), modulo 2**64
    a copy      rank 0: h(a)       rank 1: h(a)         each is compared

Ranks of one *group* hold the slices of one whole: all ranks where a state is cut over all, those of
a node where every node has the whole, one rank where every rank has. A replay (core/replay.py) also
writes the hashes of the slices that the ranks of the run had, as "slices": {PHASE: {UNIT: {RANK:
HASH}}}.

Invariant: a step counts where every rank's record of it is there. Two trails are compared in
core/trail_compare.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zeroshard.core.layout import Range

FORMAT = 1
# in the order of a step; a name may have a detail: "leaf 4", "gather forward", "state exp_avg"
PHASES = {
    "seed": "the seed of the leaves' random numbers",
    "weight": "the weights at rest when the step begins",
    "gather": "the weights as gathered",
    "forward": "the output of the unit in a leaf",
    "loss": "the loss of a leaf",
    "leaf": "the gradient of a leaf, before it is sent",
    "backward": "the gradient that the unit returns to its inputs in a leaf",
    "sum": "the sum of the leaves' gradients",
    "reduced": "the gradient of all ranks, before it is clipped",
    "norm": "the norm of the gradient",
    "grad": "the gradient that the optimizer takes, averaged and clipped",
    "option": "an option of the optimizer",
    "state": "the optimizer's state after the step",
    "master": "the masters after the step",
    "published": "the weights at rest after the step",
}
SLICED = {"weight", "sum", "reduced", "grad", "state", "master", "published"}
OF_LEAF = {"forward", "loss", "leaf", "backward"}

Hashes = Mapping[str, Mapping[str, str]]  # by phase, and by unit


@dataclass(frozen=True)
class Header:
    """What a rank's file says of the run."""

    rank: int
    world: int
    row: str
    leaves: str  # "": the run has none
    every: int
    units: tuple[str, ...]
    groups: Mapping[str, int]  # by unit: ranks of one number hold slices of one whole
    cut: str  # a hash of which rank holds which slice
    curve: Mapping[str, str]
    # by parameter, the elements of it that the rank steps, and those whose sum it forms
    stepped: Mapping[str, Range] = field(default_factory=dict)
    summed: Mapping[str, Range] = field(default_factory=dict)

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Header:
        """Return the header that a line is. Raises ValueError."""
        if data["trail"] != FORMAT:
            raise ValueError(f"format {data['trail']!r} is not {FORMAT}")
        numbers = {name: data[name] for name in ("rank", "world", "every")}
        texts = {name: data[name] for name in ("row", "leaves", "cut")}
        if any(type(one) is not int for one in [*numbers.values(), *data["groups"].values()]):
            raise ValueError("a number is none")
        if not 0 <= numbers["rank"] < numbers["world"] or numbers["every"] < 1:
            raise ValueError(f"rank {numbers['rank']} of {numbers['world']}")
        if any(not isinstance(one, str) for one in [*texts.values(), *data["units"]]):
            raise ValueError("a name is no text")
        curve = {str(name): str(value) for name, value in data["curve"].items()}
        units, groups = tuple(data["units"]), dict(data["groups"])
        stepped, summed = (ranges_in(data.get(name, {})) for name in ("stepped", "summed"))
        return cls(
            **numbers, **texts, units=units, groups=groups, curve=curve, stepped=stepped,
            summed=summed,
        )  # fmt: skip

    def group(self, phase: str, unit: str) -> int:
        """Return the number of the group of ranks whose hashes of a phase add up."""
        if phase == "sum":  # each rank has its own slice, in every row
            return 0
        return self.groups.get(unit, 0) if phase in SLICED else self.rank


@dataclass(frozen=True)
class Record:
    """What one rank has written of one step."""

    header: Header
    step: int
    hashes: Hashes
    slices: Mapping[str, Mapping[str, Mapping[int, str]]]  # of a replay, by rank of the run

    @classmethod
    def parse(cls, header: Header, data: Mapping[str, Any]) -> Record:
        """Return the record that a line after `header` is. Raises ValueError."""
        step, hashes = data["step"], data["hashes"]
        if type(step) is not int or step < 0:
            raise ValueError(f"step {step!r} is no number")
        for phase, by_unit in hashes.items():
            name, _, detail = phase.partition(" ")
            if name not in PHASES or (name in OF_LEAF and not detail.isdecimal()):
                raise ValueError(f"phase {phase!r} is not known")
            for value in by_unit.values():
                if not isinstance(value, str):
                    raise ValueError(f"a hash of step {step} is no text")
                if name in SLICED:
                    int(value, 16)
        slices = {
            phase: {
                unit: {int(rank): f"{int(value, 16):016x}" for rank, value in by_rank.items()}
                for unit, by_rank in by_unit.items()
            }
            for phase, by_unit in data.get("slices", {}).items()
        }
        return cls(header, step, hashes, slices)


def ranges_in(data: Mapping[str, Any]) -> dict[str, Range]:
    """Return the range of each parameter that JSON has. Raises ValueError, TypeError."""
    out = {name: (start, stop) for name, (start, stop) in data.items()}
    if any(type(number) is not int for span in out.values() for number in span):
        raise ValueError("a range has no numbers")
    return out


class Trail:
    """The records of one run."""

    def __init__(self, files: Iterable[Sequence[Any]]) -> None:
        """`files`: the lines of each rank's file, as JSON. Where a step was run more than once, the
        last time counts. Raises ValueError, TypeError or LookupError where they are none.
        """
        last: dict[int, dict[int, Record]] = {}  # by step and rank
        for lines in files:
            header: Header | None = None
            for line in lines:
                if "trail" in line:
                    header = Header.parse(line)
                elif header is None:
                    raise ValueError("it does not begin with a header")
                else:
                    record = Record.parse(header, line)
                    last.setdefault(record.step, {})[header.rank] = record
        self.steps: dict[int, list[Record]] = {}  # of which every rank's record is there
        for step in sorted(last):
            world = last[step][min(last[step])].header.world
            there = [one for _, one in sorted(last[step].items()) if one.header.world == world]
            if len(there) == world:
                self.steps[step] = there
