"""Notes of ranks that gave up a step: the rank that waits looks for them, whatever came between."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.distributed as dist

from zeroshard.comm.cpu import gloo_peers
from zeroshard.comm.cpu.gloo_peers import Notices


def test_a_look_that_a_signal_has_ended_before_it_began_is_made_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gloo_peers, "_EVERY_S", 0.0)
    store = dist.HashStore()
    Notices(store, 1, 2).give_up(1)
    waits = Notices(store, 0, 2)

    def strike(look: Callable[[], None]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        waits.ahead(0, strike)
    assert waits.ahead(0, lambda look: look()) == [1]
