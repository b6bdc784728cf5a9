"""A simulated step beside a measured one: whole, lane by lane, and in the order of several.

    from benchmarks.predicted import compare

    machine = ...       # as `zeroshard doctor` has measured it
    timelines = {"zero3": ...}      # one traced step of rank 0 for each row
    print(compare(shape_of_module(model, training), machine, training, timelines))

What is compared is one step: from the first event of the measured timeline to its last. Nothing is
fitted here. Which speeds the machine has is the caller's to say.

`in_order` says of which two of several programs a plan names the faster one rightly. Two programs
differ where the 95% interval of their ratio, turn by turn, leaves out 1 and they are further apart
than the same program is from itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from benchmarks.stats import bootstrap_median
from zeroshard.core.policy import Policy
from zeroshard.core.policy import row as policy_row
from zeroshard.core.timeline import LANES, Timeline
from zeroshard.planner import Machine, ModelShape, Training
from zeroshard.planner.exact import LaidOut
from zeroshard.planner.simulate import simulate

__all__ = ["Ordered", "Steps", "busy", "compare", "in_order", "span"]


def span(timeline: Timeline) -> float:
    """Return the seconds from the first event to the end of the last."""
    first = min((event.start for event in timeline.events), default=0.0)
    return timeline.stop - first


def busy(timeline: Timeline) -> dict[str, float]:
    """Return the seconds in which each lane works; what compute waits for is no work."""
    seconds = dict.fromkeys(LANES, 0.0)
    for event in timeline.events:
        if not event.waits_for:
            seconds[event.lane] += event.duration
    return {lane: each for lane, each in seconds.items() if each}


def compare(
    model: ModelShape,
    machine: Machine,
    training: Training,
    measured: Mapping[str | Policy, Timeline],
) -> str:
    """Return a table: for each row (a name, or a Policy on its tiers) predicted and measured
    milliseconds of a step and of each lane, and predicted over measured.
    """
    laid_out = LaidOut(model, machine.mesh)
    lines = [f"{'row':12} {'what':12} {'predicted ms':>12} {'measured ms':>12} {'ratio':>6}"]
    for row, there in measured.items():
        policy = policy_row(row) if isinstance(row, str) else row
        here = simulate(laid_out, policy, machine, training)
        parts = {"step": (span(here), span(there))}
        seen = busy(there)
        for lane, seconds in busy(here).items():
            parts[lane] = (seconds, seen.get(lane, 0.0))
        for what, (predicted, found) in parts.items():
            ratio = f"{predicted / found:6.2f}" if found else f"{'-':>6}"
            lines.append(
                f"{policy.name:12} {what:12} {1e3 * predicted:12.2f} {1e3 * found:12.2f} {ratio}"
            )
    return "\n".join(lines)


@dataclass(frozen=True)
class Steps:
    """Seconds of a step: as predicted, and of every turn. The turns of all programs alternate."""

    predicted: float
    turns: Sequence[float]


@dataclass(frozen=True)
class Ordered:
    """The pairs of programs of which one is faster, measured."""

    right: int  # and as predicted
    undecided: int
    wrong: tuple[str, ...]  # in words

    def __str__(self) -> str:
        decided = self.right + len(self.wrong)
        lines = [
            f"order: {self.right} of {decided} pairs that differ are predicted in their order;"
            f" {self.undecided} more differ by less than the noise"
        ]
        return "\n".join([*lines, *(f"  not {one}" for one in self.wrong)])


def in_order(steps: Mapping[str, Steps], *, noise: float) -> Ordered:
    """Compare each two of `steps`; `noise` is how far a program was from itself: 0.02."""
    right, undecided, wrong = 0, 0, []
    for (name, one), (other_name, other) in combinations(steps.items(), 2):
        ratios = [a / b for a, b in zip(one.turns, other.turns, strict=True)]
        found = bootstrap_median(ratios)
        if found.low <= 1 <= found.high or abs(found.median - 1) <= noise:
            undecided += 1
        elif (one.predicted - other.predicted) * (found.median - 1) > 0:
            right += 1
        else:
            predicted = one.predicted / other.predicted
            said = f"{name} over {other_name}: predicted {predicted:.3f}, measured"
            wrong.append(f"{said} {found.median:.3f} ({found.low:.3f} to {found.high:.3f})")
    return Ordered(right, undecided, tuple(wrong))
