"""Find the interface by which another host is reached, and raise how many files a process may
open. Standard library only.
"""

from __future__ import annotations

import fcntl
import ipaddress
import resource
import socket
import struct

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
