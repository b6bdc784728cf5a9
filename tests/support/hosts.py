"""Ranks of one machine that pretend to live on different hosts, and processes of a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeroshard.comm.cpu import rendezvous


@contextmanager
def pretended_host(number: int | None) -> Iterator[None]:
    """Let transports that this rank makes in the body see it on host `number`; None: on its own."""
    real = rendezvous.boot_id

    def boot_id() -> str:
        return real() if number is None else f"pretended {number} on {real()}"

    rendezvous.boot_id = boot_id
    try:
        yield
    finally:
        rendezvous.boot_id = real


def descendants(pid: int) -> set[int]:
    """Return the processes that `pid` has started, and those that they have."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                stat = (entry / "stat").read_text()
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    found, new = set[int](), {pid}
    while new:
        found |= new
        new = {one for one, parent in parents.items() if parent in new}
    return found - {pid}
