"""The sum of squares of gradients: one number for any cut, any order and any chunk."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.core.layout import ALIGN
from zeroshard.state import norms
from zeroshard.state.norms import (
    ExactSum,
    SquaresRequest,
    SquaresSum,
    digits_of,
    read_squares,
    squares_of,
    total_of,
)

NUMBERS = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1e-45, -1e-45, 1.1754944e-38, 1e30, -1e30, 3.4028235e38]),
)


def numbers(numel: int, seed: int = 0) -> torch.Tensor:
    """Return `numel` numbers of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-30, 30, (numel,), generator=generator)
    return torch.randn(numel, generator=generator) * torch.exp2(exponents.float())


def halved(block: list[float]) -> float:
    """Return the sum of squares of a block, as it is defined: in halves."""
    squares = [number * number for number in [*block, *[0.0] * (ALIGN - len(block))]]
    while len(squares) > 1:
        half = len(squares) // 2
        squares = [a + b for a, b in zip(squares[:half], squares[half:], strict=True)]
    return squares[0]


def defined(parameter: torch.Tensor) -> ExactSum:
    """Return the sum of squares of a parameter, number by number."""
    blocks = [halved(block.tolist()) for block in torch.split(parameter.double(), ALIGN)]
    assert math.fsum(blocks) == float(sum(map(ExactSum.of, blocks), ExactSum()))
    return sum(map(ExactSum.of, blocks), ExactSum())


def summed(*slices: torch.Tensor) -> ExactSum:
    squares = SquaresSum()
    for one in slices:
        squares.add(one)
    return squares.read()


def read(*slices: torch.Tensor) -> list[ExactSum]:
    found: list[ExactSum] = []
    read_squares([SquaresRequest(one, found.append) for one in slices])
    return found


@given(st.lists(NUMBERS, min_size=1, max_size=200))
def test_it_is_the_exact_sum_of_blocks_that_are_added_in_halves(values: list[float]) -> None:
    parameter = torch.tensor(values)
    assert summed(parameter) == defined(parameter) == read(parameter)[0]


@given(
    st.lists(st.integers(0, 12), max_size=6),
    st.integers(1, 12 * ALIGN),
    st.integers(1, 5),
    st.integers(0, 3),
)
def test_any_cut_at_blocks_any_order_and_any_chunk_give_the_same_integer(
    cuts: list[int], numel: int, chunk: int, seed: int
) -> None:
    parameter, other = numbers(numel, seed), numbers(100, seed + 1)
    bounds = sorted({0, numel, *(cut * ALIGN for cut in cuts if cut * ALIGN < numel)})
    pieces = [parameter[low:high] for low, high in itertools.pairwise(bounds)]
    whole = defined(parameter) + defined(other)
    with (
        mock.patch.object(norms, "_chunk", lambda: chunk * ALIGN),
        mock.patch.object(norms, "_BATCH", 1 + seed),
    ):
        assert summed(parameter, other) == whole
        assert summed(*pieces[::-1], other) == whole
        found = read(other, *pieces)
    assert sum(found, ExactSum()) == whole and found[0] == defined(other)
    assert found[1:] == [defined(piece) for piece in pieces]


def test_full_chunks_and_batches_change_nothing() -> None:
    parameter = numbers(3 * norms._chunk() + 77)
    whole = defined(parameter)
    assert summed(parameter) == whole == summed(parameter[: 5 * ALIGN], parameter[5 * ALIGN :])
    with mock.patch.object(norms, "_BATCH", 2):
        assert [summed(parameter)] == read(parameter) == [whole]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_of_half_the_width_are_squared_exactly(dtype: torch.dtype) -> None:
    parameter = torch.randn(333).to(dtype)
    assert summed(parameter) == defined(parameter) == read(parameter)[0]


def test_nothing_is_zero() -> None:
    assert summed() == summed(torch.empty(0), torch.zeros(70)) == ExactSum()
    assert read(torch.zeros(70), torch.empty(0), torch.ones(2)) == [
        ExactSum(),
        ExactSum(),
        ExactSum.of(2.0),
    ]


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan, -math.nan])
def test_numbers_that_are_not_finite_show_in_their_own_sum_alone(odd: float) -> None:
    bad = torch.ones(200)
    bad[150] = odd
    good, found, last = read(torch.ones(200), bad, torch.ones(1))
    assert float(good) == 200.0 and float(last) == 1.0 and not found.is_finite
    assert repr(float(found)) == repr(float(summed(bad))) == repr(odd * odd)
    bad[3] = math.nan
    bad[70] = math.inf
    assert math.isnan(float(read(bad)[0])) and math.isnan(float(summed(bad)))


# ------------------------------------------------------------------------ a total on the device


def told(*ranks: torch.Tensor) -> tuple[float, float]:
    """Return the total of the tables of `ranks` as a device forms it, and as the host does."""
    digits = [digits_of(table).sum(0) for table in ranks]
    exact = [norms._exact(row) for table in ranks for row in table.tolist()]
    return total_of(sum(digits[1:], digits[0])).item(), float(sum(exact, ExactSum()))


def same(device: float, host: float) -> bool:
    return device == host or (math.isnan(device) and math.isnan(host))


@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=90), min_size=1, max_size=4))
def test_a_device_rounds_the_sum_of_all_ranks_as_the_host_does(ranks: list[list[float]]) -> None:
    assert same(*told(*(squares_of([torch.tensor(values)]) for values in ranks)))


BINS = st.tuples(
    st.integers(0, norms._BINS - 1),
    st.one_of(st.integers(0, (1 << 62) - 1), st.sampled_from([0, 1, 15, 16, 255, (1 << 62) - 1])),
)


@given(st.lists(st.lists(BINS, max_size=norms._BINS), min_size=1, max_size=4), st.booleans())
def test_so_it_does_any_table_with_every_carry(
    ranks: list[list[tuple[int, int]]], full: bool
) -> None:
    tables = [torch.full((2, norms._BINS + 2), 15 * full) for _ in ranks]
    for table, bins in zip(tables, ranks, strict=True):
        table[:, -2:] = 0
        for index, (place, count) in enumerate(bins):
            table[index % 2, place] = count
    assert same(*told(*tables))


def test_ties_are_rounded_to_even_and_what_lies_far_below_decides_them() -> None:
    table = torch.zeros(1, norms._BINS + 2, dtype=torch.int64)
    for last in (0, 1):  # 53 bits and a half of the last one
        for below in (0, 1):
            table[0, 60] = ((1 << 52) + last << 1) + 1
            table[0, 0] = below
            assert same(*told(table))


@pytest.mark.parametrize("odd", [(1, 0), (0, 1), (1, 1)])
def test_infinity_and_nan_of_any_rank_are_the_sum(odd: tuple[int, int]) -> None:
    finite, other = squares_of([torch.ones(3)]), squares_of([torch.ones(3)])
    other[0, -2:] = torch.tensor(odd)
    assert same(*told(finite, other))
