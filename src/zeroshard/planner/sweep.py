"""One model on more and more GPUs: how well each row uses them, what it takes of their memory, and
what bounds it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from zeroshard.core.placement import Tier
from zeroshard.core.policy import ROWS
from zeroshard.errors import ConfigError
from zeroshard.planner.durations import Durations
from zeroshard.planner.exact import LaidOut
from zeroshard.planner.machine import Machine
from zeroshard.planner.model import ModelShape, fitted
from zeroshard.planner.rows import plan_row, takes
from zeroshard.planner.training import Training

_SWEEP = re.compile(r"gpus=(\d+)\.\.(\d+)")


@dataclass(frozen=True)
class Point:
    """One row on one number of GPUs, all states on the device."""

    gpus: int
    row: str
    tokens_per_s_per_gpu: float | None  # None: of a model that takes no tokens
    efficiency: float  # seconds of forward and backward alone over seconds of the step
    rest_bytes: int  # of one GPU
    peak_bytes: int
    fits: bool
    bound_by: str  # as of PlannedRow

    def to_dict(self) -> dict[str, Any]:
        """Return it as ``--json`` prints it."""
        return asdict(self)


def parse_sweep(text: str) -> list[int]:
    """Return the numbers of GPUs that `text` ("gpus=8..16384") says, each twice the one before.

    Raises ConfigError for anything else.
    """
    found = _SWEEP.fullmatch(text)
    if found is None:
        raise ConfigError(f"sweep={text!r} is not of the form gpus=8..16384")
    first, last = int(found[1]), int(found[2])
    if not 1 <= first <= last:
        raise ConfigError(f"sweep={text!r} goes from {first} to {last}: nothing lies between them")
    out = [first]
    while out[-1] * 2 <= last:
        out.append(out[-1] * 2)
    return out


def make_sweep(
    model: ModelShape, machines: Sequence[Machine], training: Training
) -> tuple[Point, ...]:
    """Plan every row on each of the `machines`, whether it fits or not. Raises ConfigError for a
    model whose FLOPs are not known.
    """
    model, training = fitted(model, training)
    if not model.is_timed:
        raise ConfigError(
            f"a sweep compares times, and the FLOPs of {model.name} are not known: have the factory"
            " return (module, inputs)"
        )
    points = []
    for machine in machines:
        laid_out = LaidOut(model, machine.mesh, training.align)
        compute_s = Durations(laid_out, machine, training.on(machine.gpus)).compute_s()
        for policy in (one for one in ROWS.values() if takes(one, training)):
            row = plan_row(laid_out, policy, machine, training)
            points.append(
                Point(
                    machine.gpus,
                    row.row,
                    None if row.tokens_per_s is None else row.tokens_per_s / machine.gpus,
                    compute_s / row.time.seconds,
                    row.rest_bytes[Tier.DEVICE.value],
                    row.peak_bytes[Tier.DEVICE.value],
                    row.fits,
                    row.bound_by,
                )
            )
    return tuple(points)
