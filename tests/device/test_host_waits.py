"""Where the host waits for the device in a step: never in forward and backward, once in a step, and
not there where the optimizer leaves out by itself what is not finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.device.programs import DEVICE, FIFO, set_schedule
from tests.support.harness import run_ranks
from tests.support.training import ROWS, batch, make_model, two_groups

STEPS = 2
OFTEN = ((1, "fp16"), (2, "bf16"))
CASES = [
    pytest.param(world, precision, marks=[pytest.mark.slow] * ((world, precision) not in OFTEN))
    for world in (1, 2)
    for precision in ("fp32", "bf16", "fp16")
]
Waits = dict[str, int]


@contextmanager
def _counted(into: Waits) -> Iterator[None]:
    """Add the waits of the body, by reason, to `into`."""
    from tests.device import zsim

    before = zsim.host_waits()
    yield
    for reason, count in zsim.host_waits().items():
        if count > before.get(reason, 0):
            into[reason] = into.get(reason, 0) + count - before.get(reason, 0)


def _count(
    rank: int, world: int, rows: tuple[str, ...], fused: bool, options: dict[str, Any]
) -> dict[str, tuple[Waits, Waits]]:
    """Return the waits of forward and backward, and those of the step, of each row."""
    out: dict[str, tuple[Waits, Waits]] = {}
    for row in rows:
        set_schedule(FIFO)
        passes: Waits = {}
        steps: Waits = {}
        model = make_model(width=32).to(DEVICE)
        optimizer = two_groups(model, torch.optim.AdamW, **({"fused": True} if fused else {}))
        engine = zs.shard(model, optimizer, policy=row, **options)
        data = [[tokens.to(DEVICE) for tokens in batch(rank, step)] for step in range(STEPS + 2)]
        for number, (x, y) in enumerate(data):
            is_warm = number >= 2  # the first steps trace what is prefetched, and make the moments
            with _counted(passes if is_warm else {}):
                engine.backward(model(x, y))
            with _counted(steps if is_warm else {}):
                engine.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        engine.close()
        out[row] = passes, steps
    return out


@pytest.mark.parametrize("world, precision", CASES)
def test_the_host_waits_once_in_a_step_and_never_before(world: int, precision: str) -> None:
    counted = run_ranks(
        world, _count, ROWS, False, {"precision": precision}, device="tests.device.zsim"
    )
    for ranks in counted:
        for row, (passes, steps) in ranks.items():
            assert not passes, (row, passes)
            assert sum(steps.values()) <= STEPS, (row, steps)


def test_a_fused_optimizer_waits_for_nothing() -> None:
    (ranks,) = run_ranks(
        1, _count, ("zero1", "zero3"), True, {"precision": "bf16"}, device="tests.device.zsim"
    )
    for row, waits in ranks.items():
        assert waits == ({}, {}), (row, waits)
