"""The launcher as a rank sees it: where the ranks of this host meet, the rank's heartbeat, and the
report of a failure that its program cannot raise.

``zeroshard run`` starts each rank through ``launch/worker.py``, which leaves itself in
``sys.modules`` under `NAME` (children of the rank would inherit an environment variable). Under
another launcher there is nothing.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from zeroshard.errors import ZeroshardError

NAME = "zeroshard_launched"


def _launcher() -> Any:
    return sys.modules.get(NAME)


def meeting_file() -> str | None:
    """Return the path of a new private file for a FileStore of all ranks, or None.

    The n-th call on a rank gives the file of the n-th call on the others.
    """
    launcher = _launcher()
    return None if launcher is None else launcher.meeting_file()


def heartbeat() -> Callable[[], None] | None:
    """Return a function for an engine to call on progress, None where nobody listens; it costs
    under a microsecond.
    """
    launcher = _launcher()
    return None if launcher is None else launcher.beat


def keeper_address() -> str | None:
    """Return where the keeper of this host is asked (keeper_client.py); None: it has none."""
    launcher = _launcher()
    return None if launcher is None else launcher.keeper_address()


def end_process(error: ZeroshardError) -> NoReturn:
    """End this process with the exit code of `error`, which its main thread cannot raise: it waits
    for what never comes. Nothing is torn down.
    """
    launcher = _launcher()
    if launcher is not None:
        launcher.report(error)
    else:
        sys.stderr.write("".join(traceback.format_exception(error)))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(error.exit_code)
