"""Which store serves which tier: the one place that makes them, and knows tiers by name.

A store whose host memory can be stepped in place (``borrowed`` lends the memory itself) needs
nothing else; a store that lends copies, as the disk's does, is stepped through a ring of buffers
(runtime/step_tiles.py).
"""

from __future__ import annotations

import torch

from zeroshard.core.placement import Tier
from zeroshard.core.sizes import any_of
from zeroshard.errors import ConfigError
from zeroshard.tier.host import HostStore
from zeroshard.tier.link import Link
from zeroshard.tier.store import Store


def make_store(
    tier: Tier,
    device: torch.device,
    *,
    disk_path: str | None = None,
    rank: int = 0,
    run: str = "run",
    verify: bool = False,
    link: Link | None = None,
) -> Store:
    """Return a new store of `tier` for the states of a model on `device`. The disk's has a
    directory of `run` and `rank` below `disk_path`: StorageError where none can be made.
    """
    if tier is Tier.HOST:
        return HostStore(device, link=link)
    from zeroshard.tier.disk import DiskStore  # lazily: it is rarely used
    from zeroshard.tier.swapdir import SwapDirectory

    assert tier is Tier.DISK and disk_path is not None, (tier, disk_path)
    directory = SwapDirectory(disk_path, rank=rank, run=run)
    return DiskStore(directory, device, verify=verify, link=link)


def tier_named(name: str, disk_path: str | None) -> Tier:
    """Return the tier of this name. Raises ConfigError, also where a disk has no directory, or
    another tier has one.
    """
    tiers = {one.value: one for one in Tier}
    if name not in tiers:
        raise ConfigError(f"tier={name!r} is not a tier: use {any_of(map(repr, tiers))}")
    if (tiers[name] is Tier.DISK) != (disk_path is not None):
        raise ConfigError("tier='disk' and disk_path=, a directory on a local disk, go together")
    return tiers[name]
