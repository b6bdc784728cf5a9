"""The canonical sum against a naive one, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.sums import sum_in_tree
from zeroshard.comm.ordered import CHUNK_NUMEL, ordered_sum


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bits, so that -0.0 differs from +0.0."""
    return tensor.contiguous().view(torch.uint8)


def naive_sum(
    contributions: list[torch.Tensor | None], numel: int, node_size: int | None
) -> torch.Tensor:
    """Sum as the docstring says, one operation at a time, with real zeros."""
    whole = [torch.zeros(numel) if c is None else c.float() for c in contributions]
    size = len(whole) if node_size is None else node_size
    return sum_in_tree([sum_in_tree(whole[at : at + size]) for at in range(0, len(whole), size)])


def contribution(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of very different sizes, with both zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.exp2(
        torch.randint(-12, 12, (numel,), generator=generator).float()
    )
    values[::7], values[3::7] = -0.0, 0.0
    return values.to(dtype)


@given(
    shape=st.sampled_from(
        [
            (1, None),
            (2, None),
            (2, 1),
            (3, None),
            (4, 2),
            (4, None),
            (6, 3),
            (6, 2),
            (7, None),
            (9, 3),
        ]
    ),
    present=st.lists(st.booleans(), min_size=9, max_size=9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    out_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    accumulate=st.booleans(),
    numel=st.sampled_from([0, 1, 64, 1000]),
)
def test_bits_are_those_of_a_naive_sum_with_real_zeros(
    shape: tuple[int, int | None],
    present: list[bool],
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    accumulate: bool,
    numel: int,
) -> None:
    size, node_size = shape
    parts = [contribution(rank, numel, dtype) if present[rank] else None for rank in range(size)]
    before = contribution(99, numel, out_dtype)
    out = before.clone()
    ordered_sum(parts, out, node_size=node_size, accumulate=accumulate)
    expected = naive_sum(parts, numel, node_size)
    expected = (before.float() + expected if accumulate else expected).to(out_dtype)
    assert torch.equal(bits(out), bits(expected))
    there = [part for part in parts if part is not None]
    if len(there) == size:  # as the rows of one tensor
        ordered_sum(torch.stack(there), before, node_size=node_size, accumulate=accumulate)
        assert torch.equal(bits(before), bits(expected))


@pytest.mark.parametrize("accumulate", [False, True])
def test_chunks_change_no_bit(accumulate: bool) -> None:
    numel = 2 * CHUNK_NUMEL + 65
    parts: list[torch.Tensor | None] = [
        contribution(rank, numel, torch.float32) for rank in range(4)
    ]
    out = torch.ones(numel)
    ordered_sum(parts, out, node_size=2, accumulate=accumulate)
    expected = naive_sum(parts, numel, 2)
    assert torch.equal(bits(out), bits(1 + expected if accumulate else expected))


def test_an_out_in_bf16_is_rounded_once() -> None:
    parts: list[torch.Tensor | None] = [
        contribution(rank, 640, torch.bfloat16) for rank in range(3)
    ]
    before = contribution(5, 640, torch.bfloat16)
    out = before.clone()
    ordered_sum(parts, out, accumulate=True)
    assert torch.equal(out, (before.float() + naive_sum(parts, 640, None)).to(torch.bfloat16))


def test_the_sum_is_a_balanced_tree_and_its_nodes_are_cut_off_first() -> None:
    four: list[torch.Tensor | None] = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1e-8)]
    whole, nodes = torch.empty(1), torch.empty(1)
    ordered_sum(four, whole)
    ordered_sum(four, nodes, node_size=2)
    assert whole.item() == nodes.item() == 0.0, "(1e8 + 1) + (-1e8 + 1e-8)"
    six: list[torch.Tensor | None] = [
        torch.tensor([value]) for value in (1.0, 0.0, 1e8, 0.0, 0.0, -1e8)
    ]
    ordered_sum(six, whole)
    ordered_sum(six, nodes, node_size=3)
    assert whole.item() == 0.0 and nodes.item() == 0.0
    six = [torch.tensor([value]) for value in (0.0, 0.0, 1e8, -1e8, 0.0, 1.0)]
    ordered_sum(six, whole)
    ordered_sum(six, nodes, node_size=3)
    assert (whole.item(), nodes.item()) == (1.0, 0.0), "1e8 + ((-1e8 + 0) + 1), in nodes of three"
