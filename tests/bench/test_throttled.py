"""benchmarks/throttled.py: whose turn it is on a core, and what is printed."""

from __future__ import annotations

import pytest

from benchmarks.throttled import _slots, _summary, main, table


def test_a_fast_rank_has_two_of_three_slots_and_shares_its_core_with_a_slow_one() -> None:
    assert _slots([10, 11, 12, 13]) == [(10, 10, 12), (11, 11, 13)]
    assert _slots([10, 11]) == [(10, 10, 11)]


def test_ratios_are_those_of_turns_that_followed_each_other() -> None:
    found = {
        "speeds": [20.0, 10.0],
        "ideal_s": 1.0,
        "sizes": {"equal": [15, 15], "unequal": [20, 10]},
        "step_s": {"equal": [1.5, 3.0], "unequal": [1.0, 2.0]},
        "largest_relative_difference_of_losses": 1e-6,
    }
    found["summary"] = summary = _summary(found)
    assert summary["times_faster"]["median"] == 1.5
    assert summary["times_the_ideal"]["median"] == 1.5
    assert "unequal is 1.50 times as fast" in table(found)


@pytest.mark.parametrize("options", [["--ranks", "3"], ["--batch", "30"]])
def test_ranks_come_in_pairs_that_share_a_batch(options: list[str]) -> None:
    with pytest.raises(SystemExit):
        main(options)
