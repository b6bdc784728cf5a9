"""Counts where the host waits for the device, with the line that waits.

CUDA itself reports operations that synchronise (``torch.cuda.set_sync_debug_mode("warn")``):
``.item()``, copies to memory that is not pinned, ``nonzero()``. Waits that are asked for by name
(of the device, a stream or an event) it does not report; these are counted as calls. The pretended
device of tests/device counts all of them itself, by reason.
"""

from __future__ import annotations

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

REPORTED = "called a synchronizing CUDA operation"
TORCH = f"{Path(torch.__file__).parent}/"
BETWEEN = ("/sync_census.py", "/warnings.py", "/contextlib.py")  # the wait and us
NUM_FRAMES = 4  # of a stack, those nearest to the wait


@dataclass
class Census:
    """Who has waited: one entry per wait, the innermost frames outside torch and this file."""

    waits: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(f"{count} x {where}" for where, count in Counter(self.waits).most_common())

    def note(self, what: str) -> None:
        """Add a wait of the calling thread."""
        ours = [
            f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"
            for frame in traceback.extract_stack()
            if not frame.filename.startswith(TORCH) and not frame.filename.endswith(BETWEEN)
        ]
        self.waits.append(f"{what}: {' < '.join(reversed(ours[-NUM_FRAMES:]))}")


@contextmanager
def census(device: torch.device | str = "cuda") -> Iterator[Census]:
    """Count inside."""
    found = Census()
    if torch.device(device).type == "zsim":
        with _counted_by_device(found):
            yield found
        return

    def shown(message: Any, *_: Any, **__: Any) -> None:
        if REPORTED in str(message):
            found.note("synchronises")

    def counted(name: str, wait: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            found.note(name)
            return wait(*args, **options)

        return call

    asked = [(torch.cuda, "synchronize")]
    asked += [(cls, "synchronize") for cls in (torch.cuda.Event, torch.cuda.Stream)]
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("always")
        warnings.showwarning = shown
        for owner, name in asked:
            call = counted(f"{owner.__name__}.{name}", getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, call))
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
        yield found


@contextmanager
def _counted_by_device(found: Census) -> Iterator[None]:
    from tests.device.zsim import host_waits

    before = Counter(host_waits())
    yield
    found.waits += (Counter(host_waits()) - before).elements()
