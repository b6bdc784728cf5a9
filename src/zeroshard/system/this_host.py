"""This host: its memory, how many files a process may open, and the interface by which another
host is reached. Standard library only.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import resource
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# ------------------------------------------------------------------------------------------- memory
# The memory of the system, or of the control group (a container, a batch job) where that allows
# less. Read from /proc and /sys, in well under a millisecond; where neither says anything, sysconf
# does.


@dataclass(frozen=True)
class HostMemory:
    """Bytes of this host's memory that this process and its peers may use."""

    total: int
    available: int  # of these, not in use; what the page cache holds counts as free
    limit: int | None  # of the control group; None: none below `total`

    @classmethod
    def now(cls, root: Path = Path("/")) -> HostMemory:
        """Ask the system; its files are below `root`."""
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


# ------------------------------------------------------------------------ open files and interfaces

_SIOCGIFADDR = 0x8915
_MOST_FILES = 1 << 16


def raise_file_limit() -> None:
    """Let this process open as many files as its hard limit allows: a rank has a socket to each
    other rank, in several groups, and the usual soft limit is 1,024.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def is_loopback(address: str) -> bool:
    """Whether `address`, as written, reaches this host alone."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def interface_towards(address: str) -> str | None:
    """Return the network interface by which this host reaches `address`, None if unknown."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing
            own = probe.getsockname()[0]
            if is_loopback(own) and not is_loopback(address):
                return None  # the host's own name, see listen()
            names = [name for _, name in socket.if_nameindex()]
            return next((name for name in names if _has_address(probe, name, own)), None)
    except OSError:
        return None


def _has_address(probe: socket.socket, interface: str, address: str) -> bool:
    try:
        request = struct.pack("256s", interface.encode())
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError:  # it has no IPv4 address
        return False
    first = socket.inet_ntoa(answer[20:24])
    return first == address or (is_loopback(first) and is_loopback(address))
