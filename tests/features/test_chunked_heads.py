"""Heads that make logits a chunk at a time, as TRL's chunked loss and Liger's fused linear cross
entropy do: weights used outside of their layer, in chunks that are not as many on every rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.support.harness import run_ranks
from tests.support.training import Net, Run, equal, train

CHUNKS = (4, 2, 3)  # of each rank
STEPS = 3


class Fused(torch.autograd.Function):
    """Sums the loss over chunks; the forward makes the gradients, too, as Liger's does."""

    @staticmethod
    def forward(ctx: Any, h: Any, weight: Any, y: Any, chunks: int) -> torch.Tensor:
        loss, grads, grad_weight = h.new_zeros(()), [], torch.zeros_like(weight)
        for part, labels in zip(h.chunk(chunks), y.chunk(chunks), strict=True):
            logits = part @ weight.t()
            loss += cross_entropy(logits, labels, reduction="sum")
            grad = logits.softmax(-1)
            grad[torch.arange(len(labels)), labels] -= 1
            grads.append(grad @ weight)
            grad_weight += grad.t() @ part
        ctx.save_for_backward(torch.cat(grads), grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:  # type: ignore[override]
        h, weight = ctx.saved_tensors
        return grad * h, grad * weight, None, None


class Chunked(Net):
    """A net that never calls its head."""

    def __init__(self, kind: str, chunks: int, tied: bool) -> None:
        super().__init__(layers=2)
        self.kind, self.chunks = kind, chunks
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        assert y is not None
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        h, y = self.norm(h).flatten(0, 1), y.flatten()
        if self.kind == "fused":
            return Fused.apply(h, self.head.weight, y, self.chunks) / len(y)  # type: ignore[no-any-return, no-untyped-call]

        def part(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return cross_entropy(linear(h, self.head.weight), y, reduction="sum")

        parts = zip(h.chunk(self.chunks), y.chunk(self.chunks), strict=True)
        losses = [checkpoint(part, *one, use_reentrant=False) for one in parts]
        return torch.stack(losses).sum() / len(y)


def _trained(rank: int, world: int, kind: str, tied: bool, transport: str) -> None:
    def run(row: str, chunks: int) -> Run:
        def model() -> nn.Module:
            torch.manual_seed(0)
            return Chunked(kind, chunks, tied)

        return train(rank, row, STEPS, model=model, comm=comm)

    comm = zs.Comm.model_validate({"transport": transport})
    expected, found = run("ddp", CHUNKS[rank]), run("zero3", CHUNKS[rank])
    assert found.losses == expected.losses and equal(found.state, expected.state)
    # the price: the whole head, as often as without chunks
    traffic, whole = found.extra["traffic"], run("zero3", 1).extra["traffic"]
    assert (traffic.calls, traffic.bytes) == (whole.calls, whole.bytes)
    units = found.extra["units"]
    assert len(units) == 4  # embedding, two blocks, norm and head (tied: norm)
    # each unit once in the forward and once in the backward. A recomputed head stays in between;
    # a tied one is gathered anew, since its unit rests after the embedding
    gathers = 2 * len(units) - (kind == "recomputed") + tied
    assert traffic.calls["all_gather"] == STEPS * gathers


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["recomputed", "fused"])
def test_a_head_in_chunks_has_the_bits_of_ddp(kind: str, tied: bool, transport: str) -> None:
    run_ranks(len(CHUNKS), _trained, kind, tied, transport)
