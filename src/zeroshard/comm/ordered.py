"""The canonical ordered sum: what makes every policy row, tier and transport give the same bits.

Floating point addition is not associative, so "the sum over ranks" is a number only once its order
is fixed. Ours is a tree: the ranks of one node in local order, then the node sums in node order, in
fp32 and without rounding in between. With 4 ranks and ``node_size=2``::

    sum = (g0 + g1) + (g2 + g3)          a 1-D mesh is one node: ((g0 + g1) + g2) + g3

A rank that contributes nothing counts as zeros: the bits are those of adding a tensor of +0.0,
which turns -0.0 into +0.0 and changes nothing else, so that one addition of 0.0 stands for any
number of them.

Cost: one pass over the inputs and `out`. On a GPU, where Triton is installed and the inputs are the
rows of one tensor, it is one kernel (comm/kernels.py) without scratch; else it goes a chunk at a
time, on CPU of a mebibyte, so that partial sums stay in cache, with scratch of at most two chunks.
It does not move anything between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroshard.comm.compat import kernels_for
from zeroshard.core.wire import BlockCodec

__all__ = ["CHUNK_NUMEL", "ordered_sum", "sum_parts"]

CHUNK_NUMEL = 1 << 18  # measured: 64 Ki elements cost 30% more in calls, 4 Mi lose the cache
_DEVICE_CHUNK_NUMEL = 1 << 24  # on an accelerator a chunk only bounds the scratch


def ordered_sum(
    contributions: Sequence[torch.Tensor | None] | torch.Tensor,
    out: torch.Tensor,
    *,
    node_size: int | None = None,
    accumulate: bool = False,
) -> None:
    """Store (or add) the canonical sum of `contributions`, one per rank in rank order, in `out`.

    All are 1-D of ``out.numel()`` elements on out's device, in fp32, bf16 or fp16; None stands for
    zeros. They may be the rows of one tensor [ranks, numel]. `node_size` ranks form a node (None:
    all ranks form one). The sum is formed in fp32; with `accumulate` it is complete before it is
    added to `out`, and an `out` of a smaller dtype is rounded once.
    """
    assert len(contributions), "no contributions"
    size = len(contributions) if node_size is None else node_size
    assert size >= 1 and len(contributions) % size == 0, (len(contributions), node_size)
    if len(contributions) == 1:
        _take(contributions[0], out, accumulate)
        return
    if isinstance(contributions, torch.Tensor):
        kernels = kernels_for(contributions)
        if kernels is not None:
            kernels.sum_rows(contributions, out, node_size=size, accumulate=accumulate)
            return
        contributions = contributions.unbind()
    nodes = [contributions[start : start + size] for start in range(0, len(contributions), size)]
    _sum_in_chunks(nodes, out, accumulate)


def sum_parts(
    parts: Sequence[torch.Tensor | None] | torch.Tensor,
    out: torch.Tensor,
    *,
    codec: BlockCodec | None,
    node_size: int | None,
    accumulate: bool,
) -> None:
    """Store (or add) the sum of all ranks' `parts` in `out`, in rank order; None stands for zeros.
    They may be the rows of one tensor.

    Numbers are summed by the canonical tree; encoded parts (`codec`, uint8) are decoded and added
    from first to last.
    """
    if codec is None:
        ordered_sum(parts, out, node_size=node_size, accumulate=accumulate)
        return
    here = [part for part in parts if part is not None]
    if not here:
        if not accumulate:
            out.zero_()
    elif accumulate:
        total = torch.empty(out.numel(), dtype=torch.float32, device=out.device)
        codec.decode_sum(here, total)
        out.add_(total)
    else:
        codec.decode_sum(here, out)


def _take(contribution: torch.Tensor | None, out: torch.Tensor, accumulate: bool) -> None:
    """Store (or add) the only contribution."""
    if accumulate:
        out.add_(0.0 if contribution is None else contribution)
    elif contribution is None:
        out.zero_()
    else:
        out.copy_(contribution)


def _sum_in_chunks(
    nodes: Sequence[Sequence[torch.Tensor | None]], out: torch.Tensor, accumulate: bool
) -> None:
    numel = out.numel()
    chunk = min(numel, CHUNK_NUMEL if out.device.type == "cpu" else _DEVICE_CHUNK_NUMEL)

    def scratch() -> torch.Tensor:
        return torch.empty(chunk, dtype=torch.float32, device=out.device)

    total_scratch = None if out.dtype == torch.float32 and not accumulate else scratch()
    node_scratch = scratch() if len(nodes) > 1 and len(nodes[0]) > 1 else None
    for start in range(0, numel, max(chunk, 1)):
        span = slice(start, min(start + chunk, numel))
        target = out[span]
        total = target if total_scratch is None else total_scratch[: target.numel()]
        _sum_node(nodes[0], span, total)
        for node in nodes[1:]:
            if node_scratch is None:
                _add(total, node[0], span)
            else:
                partial = node_scratch[: target.numel()]
                _sum_node(node, span, partial)
                total.add_(partial)
        if total is not target:
            _finish(target, total, accumulate)


def _sum_node(node: Sequence[torch.Tensor | None], span: slice, total: torch.Tensor) -> None:
    """Store the sum of one node's contributions over `span` in `total` (fp32)."""
    first, rest = node[0], node[1:]
    if first is None:
        total.zero_()
    elif rest and rest[0] is not None and first.dtype == rest[0].dtype == torch.float32:
        torch.add(first[span], rest[0][span], out=total)
        rest = rest[1:]
    else:
        total.copy_(first[span])
    has_zero = first is None
    for contribution in rest:
        if contribution is None and has_zero:
            continue  # adding +0.0 a second time changes no bit
        has_zero = has_zero or contribution is None
        _add(total, contribution, span)


def _add(total: torch.Tensor, contribution: torch.Tensor | None, span: slice) -> None:
    if contribution is None:
        total.add_(0.0)
    else:
        # type promotion: a bf16 or fp16 contribution is widened exactly
        total.add_(contribution[span])


def _finish(target: torch.Tensor, total: torch.Tensor, accumulate: bool) -> None:
    """Move a finished fp32 chunk into `out`, rounding once."""
    if not accumulate:
        target.copy_(total)
    elif target.dtype == torch.float32:
        target.add_(total)
    else:
        target.copy_(total.add_(target))
