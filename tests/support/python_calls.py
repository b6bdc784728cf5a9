"""How many functions of Python's a piece of work calls."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable


def count_calls(run: Callable[[], object]) -> int:
    """Return how many functions of Python's `run` calls.

    Garbage is collected before and not meanwhile: what earlier work left behind would end here, and
    its finalizers would be counted.
    """
    count = 0

    def on_event(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    gc.collect()
    gc.disable()
    sys.setprofile(on_event)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count
