"""What ranks leave in the job's store for those that a message could not reach: who has given up
a step after an exception and waits for the others in ``engine.reset()``, and where each rank is.

Ranks of one host say so on their sockets (links.py). A rank elsewhere that waits for a message
which will never come cannot be told by one: it would wait until its stall timeout, and the rank in
``reset()`` with it. So who gives up leaves a note in the job's store, and who has waited for a
while looks there.

Where a rank is it says when it has entered nothing for a while (stalls.py).

Cost: nothing, but for a look twice a second by a thread of its own while a rank waits for longer
than a quarter of a second.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

_FIRST_LOOK_S = 0.25
_EVERY_S = 0.5


class Notices:
    """The notes of the ranks of one transport, by generation (which grows with every reset).
    `store` is theirs alone.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._owner = store
        self._rank = rank
        self._peers = [peer for peer in range(size) if peer != rank]
        self._gave_up: tuple[int, list[int]] = (0, [])  # generation entered, ranks
        self._is_looking = False
        self._look_at = 0.0

    def give_up(self, generation: int) -> None:
        """Say that this rank enters `generation`."""
        try:
            self._store.set(f"{generation}/{self._rank}", b"1")
            self._store.set(f"{generation}", b"1")
        except RuntimeError:  # whoever held the store is gone: the others stall
            return

    def place(self, text: str) -> None:
        """Say where this rank is, "" where that changes all the time."""
        with contextlib.suppress(RuntimeError):  # as above: nobody can read it
            self._store.set(f"place/{self._rank}", text.encode())

    def places(self) -> dict[int, str]:
        """Return where each rank has said it is. Waits for the store, and for ranks that have
        never said anything.
        """
        ranks = sorted([*self._peers, self._rank])
        with contextlib.suppress(RuntimeError):
            said = self._store.multi_get([f"place/{rank}" for rank in ranks])
            return {rank: text.decode() for rank, text in zip(ranks, said, strict=True)}
        return {}

    @cached_property
    def _store(self) -> Any:
        """A connection of its own, made when it is first needed: the owner's may be blocked in a
        call.
        """
        return self._owner.clone()

    def begin_wait(self) -> None:
        """A wait begins."""
        self._look_at = time.monotonic() + _FIRST_LOOK_S

    def ahead(self, generation: int, run: Callable[[Callable[[], None]], None]) -> Sequence[int]:
        """Return the ranks known to have left `generation`; now and then have another thread
        look (`run` starts it).
        """
        now = time.monotonic()
        if now >= self._look_at and not self._is_looking:
            self._look_at, self._is_looking = now + _EVERY_S, True
            run(lambda: self._look(generation + 1))
        entered, ranks = self._gave_up
        return ranks if entered > generation else ()

    def _look(self, generation: int) -> None:
        try:
            if self._store.check([f"{generation}"]):
                self._gave_up = (
                    generation,
                    [peer for peer in self._peers if self._store.check([f"{generation}/{peer}"])],
                )
        except RuntimeError:
            return
        finally:
            self._is_looking = False
