"""The trail of a run with leaves: hashes of what every step read, summed and wrote, and where two
trails part. Ranks, rows and tiers of the two need not be the same.

A rank's file has a header, and a record per step::

    {"trail": 1, "rank": 1, "world": 2, "row": "zero3", "leaves": "8", "units": [...], ...}
    {"step": 10, "hashes": {"weight": {UNIT: HASH}, "leaf 4": {UNIT: HASH}, "norm": {"": HEX}}}

Hashes of two kinds, by phase (`PHASES`)::

    a slice     rank 0: h(a[:5])   rank 1: h(a[5:])     they add up to h(a), modulo 2**64
    a copy      rank 0: h(a)       rank 1: h(a)         each is compared

Ranks of one *group* hold the slices of one whole: all ranks where a state is cut over all, those of
a node where every node has the whole, one rank where every rank has.

Invariant: nothing is compared but whole hashes of steps of which every rank's record is there, and
phases in the order in which a step runs, so that the first difference is where the fault is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FORMAT", "PHASES", "Comparison", "Difference", "Header", "Held", "Trail", "compare"]

FORMAT = 1
# in the order of a step; a name may have a detail: "leaf 4", "state exp_avg"
PHASES = {
    "seed": "the seed of the leaves' random numbers",
    "weight": "the weights at rest when the step begins",
    "gather": "the weights as gathered for a backward",
    "leaf": "the gradient of a leaf, before it is sent",
    "sum": "the sum of the leaves' gradients",
    "norm": "the norm of the gradient",
    "grad": "the gradient that the optimizer takes, averaged and clipped",
    "option": "an option of the optimizer",
    "state": "the optimizer's state after the step",
    "master": "the masters after the step",
    "published": "the weights at rest after the step",
}
_SLICED = {"weight", "sum", "grad", "state", "master", "published"}
_ORDER = {name: place for place, name in enumerate(PHASES)}
ABSENT = "absent"

Hashes = Mapping[str, Mapping[str, str]]  # by phase, and by unit


@dataclass(frozen=True)
class Header:
    """What a rank's file says of the run."""

    rank: int
    world: int
    row: str
    leaves: str
    every: int
    units: tuple[str, ...]
    groups: Mapping[str, int]  # by unit: ranks of one number hold slices of one whole
    cut: str  # a hash of which rank holds which slice
    curve: Mapping[str, str]

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
        return cls(**numbers, **texts, units=units, groups=groups, curve=curve)

    def group(self, phase: str, unit: str) -> int:
        """Return the number of the group of ranks whose hashes of a phase add up."""
        if phase == "sum":  # each rank has its own slice, in every row
            return 0
        return self.groups.get(unit, 0) if phase in _SLICED else self.rank


@dataclass(frozen=True)
class Record:
    """What one rank has written of one step."""

    header: Header
    step: int
    hashes: Hashes

    @classmethod
    def parse(cls, header: Header, data: Mapping[str, Any]) -> Record:
        """Return the record that a line after `header` is. Raises ValueError."""
        step, hashes = data["step"], data["hashes"]
        if type(step) is not int or step < 0:
            raise ValueError(f"step {step!r} is no number")
        for phase, by_unit in hashes.items():
            name, _, detail = phase.partition(" ")
            if name not in PHASES or (name == "leaf" and not detail.isdecimal()):
                raise ValueError(f"phase {phase!r} is not known")
            for value in by_unit.values():
                if not isinstance(value, str):
                    raise ValueError(f"a hash of step {step} is no text")
                if name in _SLICED:
                    int(value, 16)
        return cls(header, step, hashes)


@dataclass(frozen=True)
class Held:
    """A whole hash, and the ranks of one run that hold it, or its slices."""

    run: int  # of the two that are compared
    value: str
    parts: Mapping[int, str]  # by rank

    @property
    def ranks(self) -> list[int]:
        """The ranks, in order."""
        return sorted(self.parts)


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


def held(records: Sequence[Record], run: int) -> dict[tuple[str, str], list[Held]]:
    """Return whole hashes of one step by phase and unit, from the records of all ranks."""
    parts: dict[tuple[str, str], dict[int, dict[int, str]]] = {}
    for record in records:
        for phase, by_unit in record.hashes.items():
            name = phase.partition(" ")[0]
            for unit, value in by_unit.items():
                group = record.header.group(name, unit)
                found = parts.setdefault((phase, unit), {}).setdefault(group, {})
                found[record.header.rank] = value
    return {
        key: [Held(run, _whole(key[0], group), group) for group in groups.values()]
        for key, groups in parts.items()
    }


def _whole(phase: str, parts: Mapping[int, str]) -> str:
    """Return what the slices of a group add up to; of a copy there is one."""
    if phase.partition(" ")[0] not in _SLICED:
        return next(iter(parts.values()))
    return f"{sum(int(value, 16) for value in parts.values()) % (1 << 64):016x}"


@dataclass(frozen=True)
class Difference:
    """Where two trails part, or the ranks of one."""

    step: int
    phase: str
    unit: str  # a unit, an option of the optimizer, or ""
    holders: tuple[Held, ...]
    # by run, the ranks that hold something else than most; where nobody can tell: of both runs
    suspects: tuple[tuple[int, ...], tuple[int, ...]]

    @property
    def leaf(self) -> int | None:
        """The leaf, where it is the gradient of one."""
        name, _, detail = self.phase.partition(" ")
        return int(detail) if name == "leaf" else None

    @property
    def meaning(self) -> str:
        """What differs, in words."""
        name, _, detail = self.phase.partition(" ")
        words = PHASES[name]
        if name == "leaf":
            return words.replace("a leaf", f"leaf {detail}")
        return f"{words} ({detail})" if detail else words


@dataclass(frozen=True)
class Comparison:
    """What a comparison of two trails has found."""

    steps: tuple[int, ...]  # that both have
    differences: tuple[Difference, ...]  # of the first step that differs, in the order of a step
    notes: tuple[str, ...] = field(default=())  # what is not the same and need not be


def compare(first: Trail, second: Trail, *, steps: Sequence[int] | None = None) -> Comparison:
    """Compare the `steps` (None: all) that both trails have, up to the first one that differs.
    Raises ValueError where the runs are not comparable.
    """
    both = [step for step in first.steps if step in second.steps]
    if steps is not None:
        both = [step for step in both if step in steps]
    if not both:
        raise ValueError("no step is there of every rank in both trails")
    headers = [trail.steps[both[0]][0].header for trail in (first, second)]
    _check_comparable(*headers)
    for step in both:
        if found := tuple(_differences(step, first.steps[step], second.steps[step])):
            return Comparison(tuple(both), found, _notes(*headers))
    return Comparison(tuple(both), (), _notes(*headers))


def _check_comparable(first: Header, second: Header) -> None:
    if first.leaves != second.leaves:
        raise ValueError(f"one run has leaves={first.leaves} and the other {second.leaves}")
    if first.units != second.units:
        raise ValueError("the models are cut into other units")


def _notes(first: Header, second: Header) -> tuple[str, ...]:
    names = [name for name in first.curve if first.curve[name] != second.curve.get(name)]
    return tuple(
        f"{name} is {first.curve[name]} in one run and {second.curve.get(name, 'not set')} in the"
        " other"
        for name in names
    )


def _differences(
    step: int, first: Sequence[Record], second: Sequence[Record]
) -> Iterator[Difference]:
    """Yield what differs in one step, in the order in which a step runs."""
    ours, theirs = held(first, 0), held(second, 1)
    units = {unit: place for place, unit in enumerate(first[0].header.units)}
    same_cut = first[0].header.cut == second[0].header.cut

    def order(key: tuple[str, str]) -> tuple[int, int, str, int]:
        name, _, detail = key[0].partition(" ")
        place = units.get(key[1], 0)
        leaf = int(detail) if name == "leaf" else 0
        # a backward comes to the last unit first
        return _ORDER[name], leaf, detail, -place if name == "leaf" else place

    for key in sorted({**ours, **theirs}, key=order):
        here, there = ours.get(key, []), theirs.get(key, [])
        if key[0] != "gather":  # of units that a rank's first leaf has run
            here = here or [Held(0, ABSENT, {})]
            there = there or [Held(1, ABSENT, {})]
        holders = (*here, *there)
        if len({one.value for one in holders}) > 1:
            yield Difference(step, *key, holders, _suspects(holders, same_cut))


def _suspects(holders: Sequence[Held], same_cut: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of each run that hold something else than most holders do; of slices that
    are cut alike in both runs, those whose own slice differs.
    """
    counted = Counter(one.value for one in holders).most_common()
    tied = len(counted) > 1 and counted[0][1] == counted[1][1]
    wrong = [one for one in holders if tied or one.value != counted[0][0]]
    right = [one for one in holders if one not in wrong]
    found: list[set[int]] = [set(), set()]
    for one in wrong:
        # those with the same slices, if any
        others = [
            other
            for other in (*right, *(wrong if tied else ()))
            if same_cut and other.run != one.run and other.ranks == one.ranks and len(one.parts) > 1
        ]
        found[one.run] |= {
            rank
            for rank, part in one.parts.items()
            if not others or any(other.parts[rank] != part for other in others)
        }
    return tuple(sorted(found[0])), tuple(sorted(found[1]))
