"""The orders of pipeline schedules, per rank: the stage and the micro-batch of each computation,
and what is gathered, released and reduced between them.

    gpipe         all forwards, then all backwards                 arXiv 1811.06965
    1f1b          as few forwards first as the depth needs, then   arXiv 2104.04473, section 2.2
                  one forward and one backward in turn
    interleaved   the same with `chunks` stages on each rank       ... section 2.2.2
    zb            ... with backwards in two: "I" for the input,    arXiv 2401.10241, ZB-H1
                  which the stage before waits for, and "W" for
                  the weights, which fills what would be idle

    interleaved, 2 ranks of 2 stages, 4 micro-batches (stage, computation, micro-batch)
    rank 0   0F0 0F1 2F0 2F1  0F2 2B0  0F3 2B1  2F2 0B0 ...

Invariant: the orders equal torch.distributed.pipelining's schedules of these names
(tests/unit/core/test_pipeline_orders.py), which knows them when it has a process group; here they
are lists. Rank r of p has the stages r, p + r, 2p + r, ...
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zeroshard.errors import ConfigError

# --------------------------------------------------------------------- gathers between computations
# A pure function over the list of one rank's actions: `place`.
#
#     F B I W          forward, backward, its two halves (of the input, of the weights)
#     OVERLAP_F_B      several computations at once, which are its parts
#     UNSHARD s        gather the weights of stage s
#     RESHARD s        release them
#     REDUCE_GRAD s    the gradients of stage s are complete: reduce those that rest unreduced
#
# Names and meaning are as in torch.distributed.pipelining's action lists; their other actions
# (sends and receives) stay where they are. Two stages on a rank, room for one of them::
#
#     0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
#
#     0UNSHARD 0F0 0F1 0RESHARD 2UNSHARD 2F0 2F1 2B0 2B1 2RESHARD 2REDUCE_GRAD
#     0UNSHARD 0B0 0B1 0RESHARD 0REDUCE_GRAD
#
# A stage stays gathered until its last computation, or until another one needs the room: then the
# stage that is needed last goes first (Belady, 1966), which gathers least where stages are of one
# size. A gather starts one computation early where the room is there by then.
#
# Invariants: the list computes the same in the same order; every computation finds its stages
# gathered; what is gathered fits the budget or is what one computation needs; a stage is gathered
# once where all fit, and at most once for each run of computations of it. Cost: n log n.


UNSHARD, RESHARD, REDUCE_GRAD = "UNSHARD", "RESHARD", "REDUCE_GRAD"
_PLACED = frozenset((UNSHARD, RESHARD, REDUCE_GRAD))
BACKWARDS = frozenset("BW")  # what brings gradients of weights
COMPUTATIONS = frozenset("FIWB")


class Action(NamedTuple):
    """One entry of a rank's list."""

    stage: int
    kind: str
    micro_batch: int | None = None
    parts: tuple[Action, ...] = ()  # of an action that runs several computations

    @property
    def computations(self) -> tuple[Action, ...]:
        """The computations that it runs."""
        if self.parts:
            return tuple(one for part in self.parts for one in part.computations)
        return (self,) if self.kind in COMPUTATIONS else ()

    @property
    def stages(self) -> frozenset[int]:
        """The stages that it computes."""
        return frozenset(one.stage for one in self.computations)


def place(
    actions: Sequence[Action], stage_bytes: Mapping[int, int], budget: int | None
) -> list[Action]:
    """Return `actions` with UNSHARD, RESHARD and REDUCE_GRAD where they belong; any that are
    there are dropped.

    `stage_bytes`: what gathering each stage takes; `budget`: bytes that gathered stages may take
    together (None: gather and release nothing here).
    """
    plain = [action for action in actions if action.kind not in _PLACED]
    uses = _positions([action.stages for action in plain])
    gradients = _positions(
        [
            frozenset(one.stage for one in action.computations if one.kind in BACKWARDS)
            for action in plain
        ]
    )
    room = _GatheredStages(stage_bytes, budget, uses)
    out: list[Action] = []
    following = _next_computations(plain)
    for index, action in enumerate(plain):
        if action.stages and budget is not None:
            out += room.gather(action.stages, index)
            after = following[index]
            if after is not None:
                out += room.gather_ahead(plain[after].stages, action.stages, index)
        out.append(action)
        for stage in sorted(action.stages):
            out += room.end(stage, index)
            if stage in gradients and gradients[stage][-1] == index:
                out.append(Action(stage, REDUCE_GRAD))
    return out


def num_gathers(actions: Sequence[Action]) -> dict[int, int]:
    """Return how often each stage is gathered."""
    out: dict[int, int] = {}
    for action in actions:
        if action.kind == UNSHARD:
            out[action.stage] = out.get(action.stage, 0) + 1
    return out


class _GatheredStages:
    """The stages that are gathered at one place of the list."""

    def __init__(
        self, stage_bytes: Mapping[int, int], budget: int | None, uses: Mapping[int, Sequence[int]]
    ) -> None:
        self._bytes = stage_bytes
        self._budget = budget or 0
        self._uses = uses
        self._held: dict[int, None] = {}  # an ordered set

    def gather(self, stages: Collection[int], index: int) -> list[Action]:
        """Return what brings `stages` here for the computation at `index`."""
        missing = sorted(set(stages) - self._held.keys())
        victims, _ = self._victims(missing, set(stages), index)
        return self._change(victims, missing)

    def gather_ahead(
        self, stages: Collection[int], busy: Collection[int], index: int
    ) -> list[Action]:
        """Return what brings `stages` here for the computation after `index`, if they fit beside
        those that are `busy` until then.
        """
        missing = sorted(set(stages) - self._held.keys())
        victims, fits = self._victims(missing, set(stages), index)
        early = fits and not set(busy) & set(victims)  # the same go as one computation later
        return self._change(victims, missing) if early else []

    def end(self, stage: int, index: int) -> list[Action]:
        """Return what releases `stage` where no computation after `index` needs it."""
        if stage not in self._held or self._uses[stage][-1] > index:
            return []
        return self._change([stage], [])

    def _victims(
        self, missing: Sequence[int], keep: Collection[int], index: int
    ) -> tuple[list[int], bool]:
        """Return which stages go so that those `missing` fit, and whether they do then."""
        excess = sum(self._bytes[stage] for stage in (*self._held, *missing)) - self._budget
        others = [stage for stage in self._held if stage not in keep]
        victims = []
        for stage in sorted(others, key=lambda stage: self._next(stage, index), reverse=True):
            if excess <= 0:
                break
            victims.append(stage)
            excess -= self._bytes[stage]
        return victims, excess <= 0

    def _next(self, stage: int, index: int) -> int:
        """Return where `stage` is needed next after `index`; behind all where it is not."""
        uses = self._uses[stage]
        after = bisect_right(uses, index)
        return uses[after] if after < len(uses) else sys.maxsize

    def _change(self, victims: Sequence[int], arriving: Sequence[int]) -> list[Action]:
        for stage in victims:
            del self._held[stage]
        self._held.update(dict.fromkeys(arriving))
        return [
            *(Action(stage, RESHARD) for stage in victims),
            *(Action(stage, UNSHARD) for stage in arriving),
        ]


def _positions(stages: Sequence[Collection[int]]) -> dict[int, list[int]]:
    """Return at which indices each stage stands."""
    out: dict[int, list[int]] = {}
    for index, here in enumerate(stages):
        for stage in here:
            out.setdefault(stage, []).append(index)
    return out


def _next_computations(actions: Sequence[Action]) -> list[int | None]:
    """Return for each index the index of the next computation after it."""
    out: list[int | None] = [None] * len(actions)
    after: int | None = None
    for index in range(len(actions) - 1, -1, -1):
        out[index] = after
        after = index if actions[index].stages else after
    return out


# --------------------------------------------------------------------------- orders of computations

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zb")
_CHUNKS = 2  # stages of a rank, where a schedule takes several and no number is given


@dataclass(frozen=True)
class PipelineOrder:
    """A schedule by name, and how many stages each rank has."""

    name: str = "1f1b"
    chunks: int = 1

    @classmethod
    def parse(cls, text: str) -> PipelineOrder:
        """Return what `text` says: "1f1b", "interleaved" (two stages on each rank),
        "interleaved:4". Raises ConfigError.
        """
        name, _, number = text.partition(":")
        if name not in SCHEDULES:
            raise ConfigError(f"schedule={text!r} is not one of {', '.join(SCHEDULES)}")
        takes = name in ("interleaved", "zb")
        if number and not takes:
            raise ConfigError(f"schedule={text!r}: {name} has one stage on each rank; interleaved"
                              " and zb take several")  # fmt: skip
        if number and not (number.isdigit() and int(number)):
            raise ConfigError(f"schedule={text!r}: {number!r} is not a number of stages, as in"
                              f" {name}:2")  # fmt: skip
        return cls(name, int(number) if number else _CHUNKS if name == "interleaved" else 1)

    @property
    def splits_backwards(self) -> bool:
        """Whether a backward is two computations."""
        return self.name == "zb"

    def check(self, ranks: int, micro_batches: int) -> None:
        """Raise ConfigError for numbers of micro-batches that torch's schedule refuses."""
        if self.name == "1f1b" and micro_batches < ranks:
            raise ConfigError(
                f"schedule='1f1b' has {ranks} stages and micro_batches={micro_batches}: it takes as"
                " many micro-batches as stages, or more"
            )
        rounds = max(1, micro_batches // ranks)
        if self.name in ("interleaved", "zb") and micro_batches % rounds:
            raise ConfigError(
                f"schedule={self.name!r} runs micro_batches={micro_batches} in {rounds} rounds,"
                f" which does not divide them: take a multiple of {ranks}"
            )

    def order(self, rank: int, ranks: int, micro_batches: int) -> list[Action]:
        """Return what `rank` of `ranks` computes in one step, in order."""
        if self.name == "gpipe":
            kinds = [("F", number) for number in range(micro_batches)]
            kinds += [("B", number) for number in range(micro_batches)]
            return [Action(rank, kind, number) for kind, number in kinds]
        return self._one_forward_one_backward(rank, ranks, micro_batches)

    def _one_forward_one_backward(self, rank: int, ranks: int, micro_batches: int) -> list[Action]:
        """Return the forwards that go ahead, then forwards and backwards in turn, then the
        backwards that are left.
        """
        in_round = micro_batches // max(1, micro_batches // ranks)
        total = micro_batches * self.chunks
        per_hop = 2 if self.name == "interleaved" else 1
        ahead = min(total, (self.chunks - 1) * in_round + per_hop * (ranks - 1 - rank))
        forwards = _counted("F", [(at // in_round) % self.chunks for at in range(total)])
        chunks = [self.chunks - 1 - (at // in_round) % self.chunks for at in range(total)]
        backwards = _counted("I" if self.splits_backwards else "B", chunks)
        weights = _counted("W", chunks) if self.splits_backwards else []

        order = forwards[:ahead]
        for at, backward in enumerate(backwards):
            order += [*forwards[ahead + at : ahead + at + 1], backward]
            order += weights[at - rank : at - rank + 1] if at >= rank else []
        order += weights[max(0, total - rank) :]
        return [action._replace(stage=action.stage * ranks + rank) for action in order]


def _counted(kind: str, chunks: Sequence[int]) -> list[Action]:
    """Return the computations of `chunks`, each with the chunk's next micro-batch."""
    seen: Counter[int] = Counter()
    out = []
    for chunk in chunks:
        out.append(Action(chunk, kind, seen[chunk]))
        seen[chunk] += 1
    return out


def most_in_flight(order: Sequence[Action], num_bytes: Sequence[int] = ()) -> int:
    """Return the most of what forwards have left for their backwards: `num_bytes` of each of the
    rank's stages, in order; micro-batches, where none are given.
    """
    stages = sorted({action.stage for action in order})
    sizes = dict(zip(stages, num_bytes or [1] * len(stages), strict=True))
    frees = "W" if any(action.kind == "W" for action in order) else "B"
    held = most = 0
    for action in order:
        if action.kind == "F":
            held += sizes[action.stage]
            most = max(most, held)
        elif action.kind == frees:
            held -= sizes[action.stage]
    return most
