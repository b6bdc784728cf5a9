"""Which stage computes which micro-batch, and when: the orders of pipeline schedules, per rank.

    gpipe         all forwards, then all backwards                 arXiv 1811.06965
    1f1b          as few forwards first as the depth needs, then   arXiv 2104.04473, section 2.2
                  one forward and one backward in turn
    interleaved   the same with `chunks` stages on each rank       ... section 2.2.2
    zb            ... with backwards in two: "I" for the input,    arXiv 2401.10241, ZB-H1
                  which the stage before waits for, and "W" for
                  the weights, which fills what would be idle

    interleaved, 2 ranks of 2 stages, 4 micro-batches (stage, computation, micro-batch)
    rank 0   0F0 0F1 2F0 2F1  0F2 2B0  0F3 2B1  2F2 0B0 ...

Invariant: the orders are those of torch.distributed.pipelining's schedules of these names
(tests/unit/core/test_pipeline_orders.py), which knows them when it has a process group; here they
are lists. Rank r of p has the stages r, p + r, 2p + r, ...
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from zeroshard.core.pipeline_gathers import Action
from zeroshard.errors import ConfigError

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
