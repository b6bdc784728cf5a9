"""scripts/frames.py: from a hook to the wire, and the files of a step, within their limits.

The limits are lowered, in the script, as the way gets shorter, and never raised.
"""

from __future__ import annotations

import pytest

from scripts import frames
from tests.support.harness import spawn_ranks


@pytest.mark.parametrize("name", frames.CASES)
def test_no_way_to_the_wire_and_no_step_is_longer_than_its_limit(name: str) -> None:
    world_size, options = frames.CASES[name]
    # fresh processes: waits serve whatever engines of before are still there
    counted = spawn_ranks(world_size, frames.count, options, timeout=300)[0]
    assert frames.too_large({name: counted.result}) == [], counted.stderr


def test_a_count_above_its_limit_is_named_and_so_is_one_that_is_missing() -> None:
    limits = frames.LIMITS["nccl"]
    deeper = {"gather": limits["gather"] + 1, "reduce": 0}
    counts = frames.Counts(
        deeper, deeper, ("/runtime/loop.py",), {"lines": 1, "functions": 1, "ring": 1}
    )
    assert frames.too_large({"nccl": counts}) == [
        f"nccl, gather: {deeper['gather']}, limit {limits['gather']}",
        f"nccl, reduce: 0, limit {limits['reduce']}",
    ]
