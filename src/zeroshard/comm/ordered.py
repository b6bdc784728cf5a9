"""The ordered sum: what makes every policy row, tier and transport give the same bits.

Floating point addition is not associative, so "the sum over ranks" is a number only once its order
is fixed. Ours is a balanced tree (core/tree.py), in fp32 and without rounding in between: over the
ranks of each node, and over the nodes. With 4 ranks::

    sum = (g0 + g1) + (g2 + g3)          however many of them form a node

and with 6, (((0+1) + (2+3)) + (4+5)), or as two nodes ((0+1) + 2) + ((3+4) + 5): the size of a node
changes bits only where it is no power of two. Where a run has leaves, the tree is theirs, and a
reduce forms the sums of several of its nodes.

A rank that contributes nothing counts as zeros: the bits are as if a tensor of +0.0 was added,
which turns -0.0 into +0.0 and changes nothing else, so that one addition of 0.0 stands for any
number of them.

Cost: one pass over the inputs and `out`. On a GPU, where Triton is installed and the inputs are the
rows of one tensor, it is one kernel (comm/kernels.py) without scratch; else it goes a chunk at a
time, on CPU of a mebibyte, so that partial sums stay in cache, with scratch of a chunk for each
level of the tree. It does not move anything between ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zeroshard.comm import kernels_for
from zeroshard.core.tree import Expression, balanced
from zeroshard.core.wire import BlockCodec

CHUNK_NUMEL = 1 << 18  # measured: 64 Ki elements cost 30% more in calls, 4 Mi lose the cache
_DEVICE_CHUNK_NUMEL = 1 << 24  # on an accelerator a chunk only bounds the scratch


def ordered_sum(
    contributions: Sequence[torch.Tensor | None] | torch.Tensor,
    out: torch.Tensor,
    *,
    node_size: int | None = None,
    accumulate: bool = False,
) -> None:
    """Store (or add) the ordered sum of `contributions`, one per rank in rank order, in `out`.

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
    num_nodes = len(contributions) // size
    if isinstance(contributions, torch.Tensor):
        kernels = kernels_for(contributions)
        if kernels is not None and max(num_nodes, size) <= kernels.MOST:
            kernels.sum_rows(contributions, out, node_size=size, accumulate=accumulate)
            return
        contributions = contributions.unbind()
    add_up(contributions, balanced(num_nodes, size), out, accumulate=accumulate)


def add_up(
    contributions: Sequence[torch.Tensor | None] | torch.Tensor,
    tree: Expression,
    out: torch.Tensor,
    *,
    accumulate: bool = False,
) -> None:
    """Store (or add) the sum of `contributions` by `tree`, which names them by position; else as
    `ordered_sum`.
    """
    if isinstance(contributions, torch.Tensor):
        contributions = contributions.unbind()
    for one in contributions:
        if one is None:
            tree = _present(tree, contributions)
            break
    if isinstance(tree, int):
        _take(contributions[tree], out, accumulate)
        return
    numel = out.numel()
    chunk = min(numel, CHUNK_NUMEL if out.device.type == "cpu" else _DEVICE_CHUNK_NUMEL)
    needed = _depth(tree) + (out.dtype != torch.float32 or accumulate)
    scratch = [torch.empty(chunk, dtype=torch.float32, device=out.device) for _ in range(needed)]
    for start in range(0, numel, max(chunk, 1)):
        span = slice(start, min(start + chunk, numel))
        target = out[span]
        spare = [one[: target.numel()] for one in scratch]
        total = spare.pop() if accumulate or out.dtype != torch.float32 else target
        _store_sum(contributions, tree, span, total, spare)
        if accumulate and target.dtype == torch.float32:
            target.add_(total)
        elif total is not target:  # rounded once
            target.copy_(total.add_(target) if accumulate else total)


def sum_parts(
    parts: Sequence[torch.Tensor | None] | torch.Tensor,
    out: torch.Tensor,
    *,
    codec: BlockCodec | None,
    node_size: int | None,
    accumulate: bool,
    sums: Sequence[Expression] = (),
) -> None:
    """Store (or add) the sum of all ranks' `parts` in `out`; None stands for zeros. They may be the
    rows of one tensor. With `sums`, form each of these in a row of `out`.

    Numbers are summed by the tree; encoded parts (`codec`, uint8) are decoded and added
    from first to last.
    """
    if sums:
        assert codec is None, "encoded parts are summed as they come"
        for tree, row in zip(sums, out.view(len(sums), -1), strict=True):
            add_up(parts, tree, row, accumulate=accumulate)
        return
    if codec is None:
        ordered_sum(parts, out, node_size=node_size, accumulate=accumulate)
        return
    here = [part for part in parts if part is not None]
    if not here or not out.numel():
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


def _present(tree: Expression, contributions: Sequence[torch.Tensor | None]) -> Expression:
    """Return `tree` with one position for every part that nobody has contributed to: adding +0.0 a
    second time changes no bit.
    """
    if isinstance(tree, int):
        return tree
    left, right = (_present(part, contributions) for part in tree)
    if _is_none(left, contributions) and _is_none(right, contributions):
        return left
    return left, right


def _is_none(part: Expression, contributions: Sequence[torch.Tensor | None]) -> bool:
    return isinstance(part, int) and contributions[part] is None


def _depth(tree: Expression) -> int:
    """Return how many partial sums are held beside the one that is formed."""
    if isinstance(tree, int):
        return 0
    left, right = tree
    return max(_depth(left), 0 if isinstance(right, int) else 1 + _depth(right))


def _store_sum(
    contributions: Sequence[torch.Tensor | None],
    tree: Expression,
    span: slice,
    total: torch.Tensor,
    spare: Sequence[torch.Tensor],
) -> None:
    """Store the sum of `tree` over `span` in `total` (fp32)."""
    if isinstance(tree, int):
        there = contributions[tree]
        total.zero_() if there is None else total.copy_(there[span])
        return
    left, right = tree
    if isinstance(left, int) and isinstance(right, int):
        one, other = contributions[left], contributions[right]
        if one is not None and other is not None and one.dtype == other.dtype == torch.float32:
            torch.add(one[span], other[span], out=total)
            return
    _store_sum(contributions, left, span, total, spare)
    if isinstance(right, int):
        last = contributions[right]
        # type promotion: a bf16 or fp16 contribution is widened exactly
        total.add_(0.0 if last is None else last[span])
    else:
        _store_sum(contributions, right, span, spare[0], spare[1:])
        total.add_(spare[0])
