"""The allocator's heap: how large it is, and when what it keeps goes back to the system."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Let the allocator give freed pages back to the system: glibc keeps what is below 32 MB,
    and small objects soon lie between.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _HeapFigures(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and later."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    ]  # fmt: skip


def heap_bytes() -> tuple[int, int]:
    """Return the bytes of the allocator's heap that are in use, and all of it; 0, 0 where it does
    not say. Cost: 0.1 ms.
    """
    ask = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if ask is None:
        return 0, 0
    ask.restype = _HeapFigures
    found = ask()
    return found.uordblks, found.arena


_LOOKS = 8  # at the heap, for every time that it may be trimmed


class Trimmer:
    """Lets the allocator give freed pages back when `every_bytes` of temporaries have come and gone
    (None: never) and the heap has grown past one and a half times the most that was in use.

    What rests on disk is meant to leave memory, but glibc keeps what is freed below 32 MB and finds
    its own holes too small for aligned memory: measured, a step on disk of 250 million parameters
    left 850 MB behind. A trim takes about 5 ms there, and activations touch their pages anew
    afterwards, which took a tenth of a step on the CPU: so none for what the next pass uses again.
    """

    def __init__(self, every_bytes: int | None) -> None:
        self._every_bytes = every_bytes
        self._passed = self._unseen = self._most_used = 0

    def passed(self, num_bytes: int) -> None:
        """Count `num_bytes` of temporaries that are no longer needed."""
        if self._every_bytes is None:
            return
        self._passed += num_bytes
        self._unseen += num_bytes
        if self._unseen < self._every_bytes // _LOOKS:
            return
        self._unseen = 0
        used, size = heap_bytes()
        self._most_used = max(self._most_used, used)
        is_large = size >= 1.5 * self._most_used + self._every_bytes or not size
        if self._passed >= self._every_bytes and is_large:
            self._passed = 0
            return_freed_memory()
