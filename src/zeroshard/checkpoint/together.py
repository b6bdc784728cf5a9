"""What fails on one rank of a save or load fails on all ranks of the mesh.

Invariant: every rank leaves `on_all_ranks` and `raise_on_all` in the same way. Cost: one exchange.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zeroshard.errors import CheckpointError
from zeroshard.runtime.engine import Engine, states_of

__all__ = ["first_failure", "on_all_ranks", "raise_on_all"]


@contextmanager
def on_all_ranks(engine: Engine, call: str, what: str) -> Iterator[None]:
    """Raise CheckpointError on every rank if the context fails on any. Collective at its end.

    `what` begins the message of an error that is no CheckpointError.
    """
    error: CheckpointError | None = None
    try:
        yield
    except CheckpointError as refused:
        error = refused
    except Exception as odd:
        error = CheckpointError(f"{what}: {type(odd).__name__}: {odd}")
    raise_on_all(engine, error, call)


def raise_on_all(engine: Engine, error: Exception | None, call: str) -> None:
    """Raise CheckpointError on every rank if any rank has an `error`. Collective."""
    first = first_failure(engine, error, call)
    if error is not None:
        raise error
    if first is not None:
        raise CheckpointError(first)


def first_failure(engine: Engine, error: Exception | None, call: str) -> str | None:
    """Return the `error` of the first rank that has one, and which rank that is. Collective."""
    ranks = states_of(engine).everyone
    mine = "" if error is None else f"rank {ranks.rank}: {error}"
    answers = ranks.exchange(mine.encode(), call)
    return next((answer.decode() for answer in answers if answer), None)
