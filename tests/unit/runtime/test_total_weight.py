"""The sum of the weights of losses is the same number, however backwards are dealt out."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from zeroshard.runtime.backward_pass import WEIGHTED, Accumulation, total_weight

WEIGHTS = st.lists(st.floats(1e-20, 1e20), min_size=1, max_size=12)


def _total(dealt: list[list[float]]) -> float | None:
    ranks = []
    for weights in dealt:
        ranks.append(Accumulation())
        for weight in weights:
            ranks[-1].weigh(weight)
    return total_weight([WEIGHTED] * len(ranks), [rank.weight for rank in ranks])


@given(WEIGHTS, st.integers(1, 5))
def test_it_is_the_exact_sum_rounded_once(weights: list[float], ranks: int) -> None:
    dealt = [weights[rank::ranks] for rank in range(ranks)]
    assert _total(dealt) == _total([weights]) == math.fsum(weights)
