"""``fraction="auto"`` finds the split at which device and host finish together, on links and
optimizers of known speed.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from benchmarks.paced_link import Paced
from tests.support import inside
from tests.support.harness import run_ranks
from zeroshard.core.resting import balanced

STEP_S = 4e-6  # per element, on either side
WIDTH, LAYERS = 96, 12
TILE = WIDTH**2  # elements of a tile: a quarter of staging_bytes, in fp32


class SlowAdamW(torch.optim.AdamW):
    """Takes time for every element that it steps."""

    sleeps = True

    def step(self, closure: Any = None) -> Any:
        numel = sum(
            p.numel() for group in self.param_groups for p in group["params"] if p.grad is not None
        )
        if self.sleeps:
            time.sleep(numel * STEP_S)
        return super().step(closure)


def _train(
    seconds_per_element: float | None, steps: int, fraction: Any, grad: str = "host"
) -> tuple[float | None, dict[str, torch.Tensor], int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    SlowAdamW.sleeps = False  # not in the probe
    optimizer = SlowAdamW(model.parameters(), lr=1e-3)
    link = None if seconds_per_element is None else Paced(4 / seconds_per_element)
    offload = zs.Offload(grad=grad, optimizer="host", fraction=fraction, staging_bytes=16 * TILE)
    with inside.linked(link):
        engine = zs.shard(model, optimizer, policy="zero2", offload=offload)
    SlowAdamW.sleeps = seconds_per_element is not None
    x = torch.randn(4, WIDTH)
    settled_after = 0
    for step in range(steps):
        model(x).square().mean().backward()
        engine.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        if not settled_after and inside.is_balanced(engine):
            settled_after = step + 1
            if link is not None:
                break
    chosen, state = engine.offload_fraction, engine.full_state_dict()
    engine.close()
    return chosen, state, settled_after


def _found(rank: int, world: int, ratio: float) -> tuple[float, int, list[str]]:
    messages: list[str] = []
    logger = logging.getLogger("zeroshard")
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        # no segment with a gradient on either side
        chosen, _, settled = _train(ratio * STEP_S, 24, "auto", "device")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert chosen is not None
    return chosen, settled, messages


@pytest.mark.parametrize(
    "ratio",
    [pytest.param(0.5, marks=pytest.mark.slow), 2.0, pytest.param(4.0, marks=pytest.mark.slow)],
)
def test_the_split_comes_within_5_percent_of_the_known_optimum(ratio: float) -> None:
    chosen, settled, messages = run_ranks(1, _found, ratio, timeout=60)[0]
    # The host steps and sends tiles at the same time: the slower of the two counts, and the first
    # or the last tile of the faster.
    alone = min(1.0, ratio) * TILE / (LAYERS * WIDTH**2)
    best = (1.0 - alone) / (1.0 + max(1.0, ratio))
    assert abs(chosen - best) <= 0.05, (chosen, best)
    assert 0 < settled <= 20, settled
    assert any(f"{chosen:.3f}" in message for message in messages), messages


def _same(rank: int, world: int, grad: str) -> list[str]:
    _, expected, _ = _train(None, 14, 0.5, grad)
    _, state, _ = _train(None, 14, "auto", grad)
    return [name for name, value in state.items() if not torch.equal(value, expected[name])]


@pytest.mark.parametrize("grad", ["device", "host"])
@pytest.mark.parametrize("world", [1, 2])
def test_moving_the_split_changes_no_bit(world: int, grad: str) -> None:
    assert run_ranks(world, _same, grad, timeout=60) == [[]] * world


def test_balanced_is_where_both_sides_would_have_taken_the_same_time() -> None:
    assert balanced(0.5, 1.0, 3.0) == 0.25
    assert balanced(0.5, 3.0, 1.0, least=0.9) == 0.9
    assert balanced(0.2, 1.0, 1.0) == pytest.approx(0.2)
