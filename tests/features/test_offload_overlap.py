"""Copies to and from the host overlap compute: counts of copies in flight, on a link whose
copies end only when somebody waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support import inside
from tests.support.endless_link import Endless
from tests.support.harness import run_ranks
from zeroshard.core.work import DoneWork

BLOCKS = 6
WIDTH = 32


class _Called(torch.autograd.Function):
    """Calls back when backward comes to it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.call()
        return grad, None


class Watched(nn.Module):
    """A linear layer that reports when its forward and its backward begin to compute."""

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.report = report

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.report("forward")
        return _Called.apply(self.linear(x), lambda: self.report("backward"))


def _train(
    row: str, link: Endless | None, tiers: dict[str, Any]
) -> tuple[list[tuple[str, dict[str, int]]], dict[str, torch.Tensor]]:
    """Return the log of the third step and the forward after it, each with the counts of copies,
    and the weights at the end.
    """
    log: list[tuple[str, dict[str, int]]] = []

    def report(event: str) -> None:
        if link is not None:
            counts = {
                f"{direction} in flight": link.in_flight(direction) for direction in link.started
            }
            log.append((event, counts | {"to_device ended": link.ended["to_device"]}))

    torch.manual_seed(0)
    model = nn.Sequential(*(Watched(report) for _ in range(BLOCKS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    options = {"offload": zs.Offload(**tiers)} if link is not None else {}
    with inside.linked(link):
        engine = zs.shard(model, optimizer, policy=row, **options)
    x = torch.randn(8, WIDTH, requires_grad=True)
    for step in range(3):
        if step == 2:
            log.clear()
        model(x).square().mean().backward()
        report("step")
        optimizer.step()
        report("stepped")
        optimizer.zero_grad()
    model(x)
    state = engine.full_state_dict()
    engine.close()
    return log, state


def _seen(
    rank: int, world: int, row: str, overlaps: bool, tiers: dict[str, Any]
) -> list[tuple[str, dict[str, int]]]:
    _, expected = _train(row, None, tiers)
    log, state = _train(row, Endless(overlaps=overlaps), tiers)
    assert [name for name, value in state.items() if not torch.equal(value, expected[name])] == []
    assert [event for event, _ in log] == ["forward"] * BLOCKS + ["backward"] * BLOCKS + [
        "step",
        "stepped",
    ] + ["forward"] * BLOCKS
    return log


def _counts(log: list[tuple[str, dict[str, int]]], event: str, count: str) -> list[int]:
    return [counts[count] for name, counts in log if name == event]


OVERLAPS = pytest.mark.parametrize(
    "overlaps", [True, False], ids=["a link that overlaps", "a link that does not"]
)


@OVERLAPS
def test_gradients_travel_to_the_host_while_other_blocks_compute_theirs(overlaps: bool) -> None:
    (log,) = run_ranks(1, _seen, "zero2", overlaps, {"grad": "host", "optimizer": "host"})
    first, *others = _counts(log, "backward", "to_host in flight")
    assert first == 0, "the gradients of the step before have arrived"
    assert others == [min(num_before, 2) if overlaps else 0 for num_before in range(1, BLOCKS)]


@OVERLAPS
def test_weights_stepped_on_the_host_are_awaited_by_the_forward_that_needs_them(
    overlaps: bool,
) -> None:
    (log,) = run_ranks(1, _seen, "zero2", overlaps, {"grad": "host", "optimizer": "host"})
    (before,) = _counts(log, "step", "to_device ended")
    at_the_end_of_the_step = _counts(log, "stepped", "to_device ended")[0] - before
    in_the_forward = [
        ended - before for ended in _counts(log, "forward", "to_device ended")[BLOCKS:]
    ]
    assert at_the_end_of_the_step == (0 if overlaps else BLOCKS)
    assert in_the_forward == [block + 1 if overlaps else BLOCKS for block in range(BLOCKS)]


@OVERLAPS
def test_weights_on_the_host_travel_while_the_block_before_computes(overlaps: bool) -> None:
    (log,) = run_ranks(
        1, _seen, "zero3", overlaps, {"weight": "host", "grad": "host", "optimizer": "host"}
    )
    *others, last = _counts(log, "forward", "to_device in flight")[:BLOCKS]
    assert others == [1 if overlaps else 0] * (BLOCKS - 1) and last == 0
    *others, last = _counts(log, "backward", "to_device in flight")
    assert others == [1 if overlaps else 0] * (BLOCKS - 1) and last == 0


class _Ending(threading.Event):
    """A step whose last weights are sent, and which ends, while somebody asks whether it has."""

    def __init__(self, send: Callable[[], None]) -> None:
        super().__init__()
        self._send = send

    def is_set(self) -> bool:
        if not super().is_set():
            self._send()
            self.set()
        return super().is_set()


def test_weights_that_are_sent_while_somebody_asks_for_them_are_awaited() -> None:
    engine = zs.shard(model := nn.Linear(WIDTH, WIDTH), torch.optim.SGD(model.parameters(), lr=0.1))
    segment = inside.segments(engine)[0]
    segment.step = _Ending(lambda: segment.uploads.append((DoneWork(), None)))
    segment.wait_uploads()
    assert not segment.uploads
    engine.close()
