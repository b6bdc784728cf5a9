"""The pretended link: how long a copy takes, and when it is over."""

from __future__ import annotations

import pytest
import torch

from benchmarks.paced_link import Paced


@pytest.mark.parametrize("overlap", [True, False])
def test_a_copy_is_over_when_it_returns_only_where_the_link_does_not_overlap(overlap: bool) -> None:
    link, out = Paced(1e9, latency_s=0.5, overlap=overlap), torch.zeros(8)
    try:
        work = link.copy(out, torch.ones(8), "to_host")
        assert work.done() is not overlap  # half a second is long enough to look
        work.wait()
        assert out.eq(1.0).all() and link.busy_s >= 0.5
    finally:
        link.close()
