"""How much memory this host has for us: of the system, or of the control group (a container's, a
batch job's) where that allows less.

Read from /proc and /sys, in well under a millisecond; where neither says anything, sysconf does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class HostMemory:
    """Bytes of this host's memory that this process and its peers may use."""

    total: int
    available: int  # of these, not in use; what the page cache holds counts as free
    limit: int | None  # of the control group; None: none below `total`

    @classmethod
    def now(cls, root: Path = Path("/")) -> HostMemory:
        """Ask the system, whose files are below `root`."""
        meminfo = numbers_of(root / "proc/meminfo")
        page = os.sysconf("SC_PAGE_SIZE")
        total = meminfo.get("MemTotal:", 0) << 10 or os.sysconf("SC_PHYS_PAGES") * page
        available = meminfo.get("MemAvailable:", total >> 10) << 10
        limit = None
        for limit_file, usage_file, cache in _groups(root):
            most = _number(root / limit_file)
            if most is None or most >= total:  # unlimited
                continue
            stat = numbers_of((root / limit_file).with_name("memory.stat"))
            used = (_number(root / usage_file) or 0) - stat.get(cache, 0)
            limit = most if limit is None else min(limit, most)
            available = min(available, max(0, most - used))
        return cls(total if limit is None else limit, available, limit)


def _groups(root: Path) -> Iterator[tuple[Path, Path, str]]:
    """Yield limit, usage and the name of the page cache's part of it, of this process's control
    group and of those around it, in both versions of the interface.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        inner = Path(name.lstrip("/"))
        if not controllers:
            for group in (inner, *inner.parents):
                at = Path("sys/fs/cgroup") / group
                yield at / "memory.max", at / "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            for group in (inner, *inner.parents):
                at = Path("sys/fs/cgroup/memory") / group
                limit, usage = at / "memory.limit_in_bytes", at / "memory.usage_in_bytes"
                yield limit, usage, "total_inactive_file"


def _number(path: Path) -> int | None:
    """Return the number in `path`; None where there is none ("max")."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def numbers_of(path: Path) -> dict[str, int]:
    """Return the numbers of `path`, by the first word of their lines; {} if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    words = [line.split() for line in lines]
    return {one[0]: int(one[1]) for one in words if len(one) > 1 and one[1].isdecimal()}
