"""A forked child of a rank is no rank: it holds copies of the rank's sockets and of its shared
memory, and every use of them corrupts the job.

A data loader's workers are such children, and whatever a program starts with ``os.fork()`` or
``multiprocessing`` in its "fork" mode. In the child every use of a sharded module, of its optimizer
and of its engine raises StateError; the parents do not notice.

The engines of a forked child are kept alive until it ends: destroying them would wait for threads
that a fork does not copy.

Cost: nothing in the parents; one callback per fork. What it does not do: look after an engine of
one process, which has no peers.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable

# what makes every later use of an engine raise StateError, by engine
_REFUSALS: weakref.WeakKeyDictionary[object, Callable[[str], None]] = weakref.WeakKeyDictionary()
_KEPT: list[object] = []  # in a forked child only


def refuse_in_children(engine: object, refuse: Callable[[str], None] | None) -> None:
    """From now on call `refuse` (None: nothing) with the reason in processes that are forked off
    this one.

    It must not hold `engine`, which would live for ever.
    """
    if refuse is None:
        _REFUSALS.pop(engine, None)
    else:
        _REFUSALS[engine] = refuse


def _in_child() -> None:
    for engine, refuse in list(_REFUSALS.items()):
        _KEPT.append(engine)
        refuse(
            f"process {os.getpid()} was forked off a rank and cannot use its sharded module,"
            f" optimizer or engine: use them in process {os.getppid()}, and give a child numbers"
            " instead (engine.full_state_dict())"
        )


os.register_at_fork(after_in_child=_in_child)
