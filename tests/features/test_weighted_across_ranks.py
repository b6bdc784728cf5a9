"""Weights of losses and ``batch_shares`` where autograd crosses ranks: the gradient of a parameter
comes from the losses of several ranks, and each of them counts its own weight.

The reference has the inputs of all ranks in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from tests.support.harness import run_ranks

WIDTH, ROWS = 6, 4
# rows that count, of each rank in each micro-batch; none: the mean over nothing is NaN
COUNTS = ([1, 3], [4, 0])
CROSSINGS = ("experts", "keys", "features", "norm")


class _AllSum(torch.autograd.Function):
    """The sum over all ranks; so is its gradient, of the losses of all ranks."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _AllSum.apply(grads[0])


Exchange = Callable[[list[torch.Tensor]], torch.Tensor]


def _sum_of_ranks(own: list[torch.Tensor]) -> torch.Tensor:
    return _AllSum.apply(own[0])


def _sum_here(all_of_them: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(all_of_them).sum(0)


class _Net(nn.Module):
    """A model for the rows of `ranks`, all or one, which meet by `total`."""

    def __init__(self, crossing: str, ranks: Sequence[int], total: Exchange) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.crossing, self.ranks, self.total = crossing, ranks, total
        self.first = nn.Linear(WIDTH, WIDTH)
        every = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        self.experts = nn.ModuleList(every[rank] for rank in ranks)
        self.last = nn.Linear(WIDTH, WIDTH)

    def everyone(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the rows of all ranks, in rank order, [2 * ROWS, WIDTH]."""
        placed = []
        for rank, part in zip(self.ranks, parts, strict=True):
            before, after = rank * ROWS, (1 - rank) * ROWS
            placed.append(nn.functional.pad(part, (0, 0, before, after)))
        return self.total(placed)

    def forward(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        h = [torch.tanh(self.first(x)) for x in inputs]
        if self.crossing == "experts":
            rows = self.everyone(h)
            out = self.total([expert(rows).sin() for expert in self.experts])
            h = [out[rank * ROWS :][:ROWS] for rank in self.ranks]
        elif self.crossing == "keys":
            keys = self.everyone(h)
            h = [(one @ keys.T).softmax(-1) @ keys for one in h]
        elif self.crossing == "norm":
            mean = self.everyone(h).mean(0)
            h = [(one - mean).sin() for one in h]
        return [self.last(one) for one in h]

    def losses(self, inputs: list[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        """Return the mean over so many rows of each."""
        out = self(inputs)
        if self.crossing == "features":
            every = self.everyone(out)
            rows = [(one @ every.T).logsumexp(1) for one in out]
        else:
            rows = [one.pow(2).mean(1) for one in out]
        return [one[:n].sum() / n for one, n in zip(rows, counts, strict=True)]


def _inputs(micro: int) -> list[torch.Tensor]:
    seeds = [torch.Generator().manual_seed(10 * micro + rank) for rank in range(2)]
    return [torch.randn(ROWS, WIDTH, generator=seed) for seed in seeds]


def _by_hand(
    rank: int, crossing: str, counts: Sequence[Sequence[int]], shares: Sequence[float] | None
) -> dict[str, torch.Tensor]:
    """Return the gradients of one process, by the names that they have on `rank`."""
    net = _Net(crossing, range(2), _sum_here)
    for micro, counted in enumerate(counts):
        weights = shares or [n / sum(map(sum, counts)) for n in counted]
        pairs = zip(weights, net.losses(_inputs(micro), counted), strict=True)
        sum(weight * loss for weight, loss in pairs if weight).backward()
    net.experts = nn.ModuleList([net.experts[rank]])
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def _run(
    engine: zs.Engine, net: _Net, how: str, counts: Sequence[Sequence[int]], weighted: bool
) -> None:
    rank = net.ranks[0]

    def loss_of(micro: int) -> tuple[torch.Tensor, int | None]:
        (loss,) = net.losses([_inputs(micro)[rank]], [counts[micro][rank]])
        return loss, counts[micro][rank] if weighted else None

    if how == "accumulate":
        engine.accumulate(
            range(len(counts)), loss_of if weighted else lambda micro: loss_of(micro)[0]
        )
        return
    for micro in range(len(counts)):
        holds = how == "no_sync" and micro < len(counts) - 1
        with engine.no_sync() if holds else contextlib.nullcontext():
            loss, weight = loss_of(micro)
            engine.backward(loss, weight=weight)


def _distances(
    rank: int,
    world: int,
    row: str,
    how: str,
    counts: Sequence[Sequence[int]] = COUNTS,
    shares: Sequence[float] | None = None,
) -> dict[str, float]:
    """Return how far gradients are from those of one process, by what crosses ranks."""
    found = {}
    meshes = {
        "experts": init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "ep")),
        "keys": init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp")),
    }
    for crossing in CROSSINGS:
        expected = _by_hand(rank, crossing, counts, shares)
        net = _Net(crossing, [rank], _sum_of_ranks)
        before = {name: value.detach().clone() for name, value in net.named_parameters()}
        options: dict[str, Any] = {"batch_shares": shares}
        if crossing == "experts":
            options["mesh_of"] = {"experts": meshes["experts"]}
        if crossing == "keys":
            options["mesh"] = meshes["keys"]
        if crossing != "experts":
            net.experts = nn.ModuleList()
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        engine = zs.shard(net, optimizer, policy=row, **options)
        _run(engine, net, how, counts, weighted=shares is None)
        optimizer.step()
        assert engine.steps_skipped == 0
        with engine.gathered():
            for name, parameter in net.named_parameters():
                grad = before[name] - parameter.detach()
                distance = (grad - expected[name]).abs().max() / expected[name].abs().max()
                found[f"{crossing} {name}"] = float(distance)
        engine.close()
    return found


@pytest.mark.parametrize(
    ("row", "how"),
    [("zero1", "no_sync"), ("zero3", "each"), ("zero2", "accumulate"), ("ddp", "each")],
)
def test_losses_of_all_ranks_count_their_weights_where_gradients_cross_ranks(
    row: str, how: str
) -> None:
    for found in run_ranks(2, _distances, row, how):
        assert all(far < 2e-5 for far in found.values()), found


@pytest.mark.parametrize("how", ["each", "accumulate"])
@pytest.mark.parametrize("shares", [[0.25, 0.75], [0.0, 1.0]], ids=["1:3", "0:1"])
def test_losses_of_all_ranks_count_their_shares_where_gradients_cross_ranks(
    shares: list[float], how: str
) -> None:
    counts = [[4 if share else 0 for share in shares]] * 2
    for found in run_ranks(2, _distances, "zero2", how, counts, shares):
        assert all(far < 2e-5 for far in found.values()), found
