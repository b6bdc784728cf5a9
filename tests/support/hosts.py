"""Ranks of one machine that pretend to live on different hosts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zeroshard.comm import rendezvous

__all__ = ["pretended_host"]


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
