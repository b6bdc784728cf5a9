"""The trail of a run: hashes of all that every step read, summed and wrote; what a replay asks for;
and the place where two trails part. Ranks (with leaves), rows and tiers of the two may differ.

A rank's file has a header, and a record per step::

    {"trail": 1, "rank": 1, "world": 2, "row": "zero3", "leaves": "8", "units": [...], ...}
    {"step": 10, "hashes": {"weight": {UNIT: HASH}, "leaf 4": {UNIT: HASH}, "norm": {"": HEX}}}

Units of a phase of a leaf stand in the order in which they were run. Of a run without leaves (its
"leaves" are "") micro-batch k of a rank is number k * world + rank, in the place of a leaf.

Hashes of two kinds, by phase (`PHASES`)::

    a slice     rank 0: h(a[:5])   rank 1: h(a[5:])     they add up to h(a), modulo 2**64
    a copy      rank 0: h(a)       rank 1: h(a)         each is compared

Ranks of one *group* hold the slices of one whole: all ranks where a state is cut over all, the
ranks of a node where every node has the whole, one rank where every rank has. A replay also writes
the hashes of the slices that the ranks of the run had, as "slices": {PHASE: {UNIT: {RANK: HASH}}}.

Invariant: a step counts where every rank's record of it is there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

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
    """The header of a rank's file: facts of the run."""

    rank: int
    world: int
    row: str
    leaves: str  # "": the run has none
    every: int
    units: tuple[str, ...]
    groups: Mapping[str, int]  # by unit: ranks of one number hold slices of one whole
    cut: str  # a hash of the slices that each rank holds
    curve: Mapping[str, str]
    # by parameter, the elements that the rank steps, and the elements that it sums
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
        """Return the number of the group of ranks that hold the slices of one whole in a phase."""
        if phase == "sum":  # each rank has its own slice, in every row
            return 0
        return self.groups.get(unit, 0) if phase in SLICED else self.rank


@dataclass(frozen=True)
class Record:
    """The record of one step on one rank."""

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
        self.steps: dict[int, list[Record]] = {}  # with a record of every rank
        for step in sorted(last):
            world = last[step][min(last[step])].header.world
            there = [one for _, one in sorted(last[step].items()) if one.header.world == world]
            if len(there) == world:
                self.steps[step] = there


# ------------------------------------------------------------------------------------------- replay
# ``zeroshard replay`` asks for it in a file in the directory of the trail, which `REPLAY_VARIABLE`
# of the run's environment names; such a file that others have put beside a trail asks for nothing.
#
#     {"step": 120, "leaf": 5, "stepped": [{PARAMETER: [START, STOP]}, ...], "summed": [...]}
#
# With a leaf, of that step only the leaf is computed, and the run ends after it. The ranges are
# those that the ranks of the run have held, so that a replay on any number of ranks writes the hash
# of each rank's slice, too::
#
#     rank 0 of the run   a[:128]     the replay   a[:128] -> rank 0,  a[128:] -> rank 1,  their sum
#     rank 1 of the run   a[128:]
#
# Cost: a range for each parameter that a rank has held a part of.

REPLAY_FILE = "replay.json"
REPLAY_VARIABLE = "ZEROSHARD_REPLAY"


@dataclass(frozen=True)
class Replay:
    """The step to replay, its leaf (None: all), and the elements that each rank of the run held."""

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

    def holders(self, name: str, element: int) -> list[int]:
        """Return the ranks that stepped an element of parameter `name`."""
        spans = [by_name.get(name, (0, 0)) for by_name in self.stepped]
        return [rank for rank, (low, high) in enumerate(spans) if low <= element < high]


# ---------------------------------------------------------------------------- where two trails part
# Invariant: nothing is compared but whole hashes, and phases in the order in which a step runs, so
# that the first difference is where the fault is. A leaf's forward comes before its backward, and
# units are in the order in which they were run.
#
# A rank is blamed if its copy is not like most, or if its slice differs, where both trails cut
# alike or a replay has cut as the run had; a replay itself never. Where that does not tell, the
# ranks that hold the whole together are blamed.

_ORDER = {name: place for place, name in enumerate(PHASES)}
_ABSENT = "absent"
_Key: TypeAlias = tuple[str, str]  # a phase and a unit


@dataclass(frozen=True)
class Held:
    """A whole hash, and the ranks of one run that hold it, or its slices."""

    run: int  # of the two that are compared
    value: str
    parts: Mapping[int, str]  # by rank
    slices: Mapping[int, str] = field(default_factory=dict)  # of a replay, by rank of the run

    @property
    def ranks(self) -> list[int]:
        """The ranks, in order."""
        return sorted(self.parts)


def _held(records: Sequence[Record], run: int) -> dict[_Key, list[Held]]:
    """Return whole hashes of one step by phase and unit, from the records of all ranks."""
    parts: dict[_Key, dict[int, dict[int, str]]] = {}
    for record in records:
        for phase, by_unit in record.hashes.items():
            name = phase.partition(" ")[0]
            for unit, value in by_unit.items():
                group = record.header.group(name, unit)
                of_group = parts.setdefault((phase, unit), {}).setdefault(group, {})
                of_group[record.header.rank] = value
    of_rank = {record.header.rank: record for record in records}
    held: dict[_Key, list[Held]] = {}
    for (phase, unit), groups in parts.items():
        is_sliced = phase.partition(" ")[0] in SLICED
        for of_ranks in groups.values():
            slices: dict[int, list[str]] = {}  # that the ranks of a replayed run had
            for rank in of_ranks:
                for other, value in of_rank[rank].slices.get(phase, {}).get(unit, {}).items():
                    slices.setdefault(other, []).append(value)
            # slices of a group add up; of a copy there is one
            whole = _sum(of_ranks.values()) if is_sliced else next(iter(of_ranks.values()))
            sums = {other: _sum(values) for other, values in slices.items()}
            held.setdefault((phase, unit), []).append(Held(run, whole, of_ranks, sums))
    return held


def _sum(values: Iterable[str]) -> str:
    return f"{sum(int(value, 16) for value in values) % (1 << 64):016x}"


@dataclass(frozen=True)
class Difference:
    """A place where two trails part, or the ranks of one."""

    step: int
    phase: str
    unit: str  # a unit, an option of the optimizer, or ""
    holders: tuple[Held, ...]
    # by run, the ranks that hold something else than most; where nobody can tell: of both runs
    suspects: tuple[tuple[int, ...], tuple[int, ...]]
    num_ranks: int = 0  # of runs without leaves

    @property
    def leaf(self) -> int | None:
        """The leaf, where it is what one has computed."""
        name, _, detail = self.phase.partition(" ")
        return int(detail) if name in OF_LEAF and not self.num_ranks else None

    @property
    def meaning(self) -> str:
        """The difference in words."""
        name, _, detail = self.phase.partition(" ")
        words = PHASES[name]
        if name in OF_LEAF and self.num_ranks:
            number, rank = divmod(int(detail), self.num_ranks)
            return words.replace("a leaf", f"micro-batch {number} of rank {rank}")
        if name in OF_LEAF:
            return words.replace("a leaf", f"leaf {detail}")
        return f"{words} ({detail})" if detail else words


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison of two trails."""

    steps: tuple[int, ...]  # that both have
    differences: tuple[Difference, ...]  # of the first step that differs, in the order of a step
    notes: tuple[str, ...] = field(default=())  # what is not the same and need not be


def compare(
    first: Trail,
    second: Trail,
    *,
    steps: Sequence[int] | None = None,
    leaf: int | None = None,
    unit: str | None = None,
    is_replay: bool = False,
) -> Comparison:
    """Compare the `steps` (None: all) that both trails have, up to the first one that differs; of
    these, where given, what one `leaf` has computed alone, and what is of one `unit`. `is_replay`:
    the second one is right. Raises ValueError where the runs are not comparable.
    """
    both = [step for step in first.steps if step in second.steps]
    if steps is not None:
        both = [step for step in both if step in steps]
    if not both:
        raise ValueError("no step is there of every rank in both trails")
    for step in both:
        _check_comparable(step, first.steps[step][0].header, second.steps[step][0].header)
    headers = [trail.steps[both[0]][0].header for trail in (first, second)]
    if leaf is not None and not headers[0].leaves:
        raise ValueError("these runs have no leaves: none can be compared alone")
    if unit is not None and unit not in headers[0].units:
        raise ValueError(f"there is no unit {unit!r}: there are {', '.join(headers[0].units)}")
    ours, theirs = (header.curve for header in headers)
    notes = tuple(
        f"{name} is {ours[name]} in one run and {theirs.get(name, 'not set')} in the other"
        for name in ours
        if ours[name] != theirs.get(name)
    )
    found: tuple[Difference, ...] = ()
    for step in both:
        found = found or tuple(
            one
            for one in _differences(step, first.steps[step], second.steps[step], is_replay)
            if (leaf is None or one.leaf == leaf) and (unit is None or one.unit == unit)
        )
    return Comparison(tuple(both), found, notes)


def _check_comparable(step: int, first: Header, second: Header) -> None:
    if first.leaves != second.leaves:
        names = [one.leaves or "none" for one in (first, second)]
        raise ValueError(f"one run has leaves={names[0]} and the other {names[1]}")
    if not first.leaves and first.world != second.world:
        raise ValueError(
            f"step {step} was run on {first.world} ranks and on {second.world}: without leaves a"
            " sum belongs to one number of ranks; give both runs zs.shard(..., leaves=V)"
        )
    if first.units != second.units:
        raise ValueError("the models are cut into other units")


def _differences(
    step: int, first: Sequence[Record], second: Sequence[Record], is_replay: bool
) -> Iterator[Difference]:
    """Yield what differs in one step, in the order in which a step runs."""
    ours, theirs = _held(first, 0), _held(second, 1)
    header, other = first[0].header, second[0].header
    num_ranks = 0 if header.leaves else header.world
    for key in _in_order({**ours, **theirs}, header.units):
        here, there = ours.get(key, []), theirs.get(key, [])
        if num_ranks and key[0].startswith("leaf") and header.row != other.row:
            continue  # rows differ in which micro-batches they add before they reduce
        if not key[0].startswith("gather"):  # of units that a rank's first leaf has gathered
            here = here or [Held(0, _ABSENT, {})]
            there = there or [Held(1, _ABSENT, {})]
        holders = (*here, *there)
        values = {one.value for one in holders}
        if len(values) > 1:
            right = {one.value for one in there} if is_replay else set()
            suspects = _suspects(holders, right, same_cut=header.cut == other.cut)
            yield Difference(step, *key, holders, suspects, num_ranks)


def _in_order(keys: Iterable[_Key], units: Sequence[str]) -> list[_Key]:
    """Return `keys` in the order of a step; the keys of a leaf come in the order of its units."""
    order_of_units = {unit: place for place, unit in enumerate(units)}
    places: dict[str, dict[str, float]] = {}  # of units, by phase
    for phase, unit in keys:
        of_phase = places.setdefault(phase, {})
        of_phase.setdefault(unit, float(len(of_phase)))
    for phase, of_phase in places.items():
        name, _, leaf = phase.partition(" ")
        if name == "backward":
            handed_over, place = places.get(f"leaf {leaf}", {}), -0.5
            for unit in of_phase:  # after its parameters' gradients; without any, as the one before
                place = handed_over[unit] + 0.5 if unit in handed_over else place
                of_phase[unit] = place

    def order(key: _Key) -> tuple[int, int, int, float, str]:
        (name, _, detail), unit = key[0].partition(" "), key[1]
        if name not in OF_LEAF:
            late = int((name, detail) == ("gather", "backward"))
            return _ORDER[name], late, 0, order_of_units.get(unit, 0), detail
        turn = {"forward": 0, "loss": 1}.get(name, 2)
        return _ORDER["forward"], int(detail), turn, places[key[0]][unit], ""

    return sorted(keys, key=order)


def _suspects(
    holders: Sequence[Held], right: set[str], *, same_cut: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of each run that hold something else than most holders do, or than the one
    value that is `right`; of slices that both runs have, the ranks with a slice that differs.
    """
    counted = Counter(one.value for one in holders).most_common()
    tied = len(counted) > 1 and counted[0][1] == counted[1][1]
    if len(right) != 1:
        right = set() if tied else {counted[0][0]}
    wrong = [one for one in holders if one.value not in right]
    found: list[set[int]] = [set(), set()]
    for one in wrong:
        others = [other for other in holders if other.run != one.run and other.value != one.value]
        known = [slices for other in others if (slices := _cut_as(one, other, same_cut))]
        found[one.run] |= {
            rank
            for rank, part in one.parts.items()
            if not known or any(slices[rank] != part for slices in known)
        }
    return tuple(sorted(found[0])), tuple(sorted(found[1]))


def _cut_as(one: Held, other: Held, same_cut: bool) -> Mapping[int, str]:
    """Return the slices of `other` that the ranks of `one` hold; none where they are unknown."""
    if other.slices.keys() >= one.parts.keys():
        return other.slices
    return other.parts if same_cut and other.ranks == one.ranks and len(one.parts) > 1 else {}
