"""A test's own activation store, in place of the program's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zeroshard.core.placement import Tier
from zeroshard.runtime import shelf
from zeroshard.runtime.shelf import ActivationStore


@contextmanager
def using(
    store: ActivationStore, tier: Tier = Tier.HOST, disk_path: str | None = None
) -> Iterator[ActivationStore]:
    """Have `store` stand for the program's own one inside the context; it is closed at the end."""
    stores, key = shelf._stores, (tier, store.device, disk_path or "")
    before = stores.get(key)
    stores[key] = store
    try:
        yield store
    finally:
        store.close()
        stores.pop(key)
        if before is not None:
            stores[key] = before
