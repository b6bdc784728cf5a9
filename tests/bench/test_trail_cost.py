"""``python -m benchmarks.trail``: what it prints of what the ranks have measured."""

from __future__ import annotations

from benchmarks.trail import table


def test_a_tenth_of_a_recorded_step_counts_at_every_10() -> None:
    turns = {"step": [1.0, 2.0], "between": [1.0, 2.0], "recorded": [1.2, 2.4]}
    facts = {"size": "tiny", "parameters": 2_000_000, "stage": 3, "ranks": 1, "leaves": 2}
    text = table({**facts, "tokens": 128, "seconds": turns, "CPU time": turns})
    first, *lines = text.splitlines()
    assert first == "tiny, 2.0 M parameters, stage 3, 1 rank(s), 2 leaves of 128 tokens"
    for line in lines:
        assert "step 1500.0 ms; every=10 +2.0% [+2.0%, +2.0%], a recorded step +20.0%" in line
