"""Addresses of this host: where the first host listens, and by which interface others are reached.

Standard library only.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

from zeroshard.launch.options import UsageError

__all__ = ["interface_towards", "is_loopback", "listen"]

_SIOCGIFADDR = 0x8915


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens at `port` (0: a free one) of this host's `address`.

    It listens at that address alone. Many systems give a host's own name the address 127.0.1.1,
    which no other host reaches: then it listens at all addresses.

    Raises:
        UsageError: the port is taken, or the address is not this host's.
    """
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(
            f"{address} is not known here ({error.strerror}): --master-addr names this host as the"
            " others reach it"
        ) from None
    # IPv4 where there is a choice: every host has it
    found.sort(key=lambda one: one[0] != socket.AF_INET)
    family, kind, protocol, _, where = found[0]
    if is_loopback(str(where[0])) and not is_loopback(address):
        family, where = socket.AF_INET, ("", port)
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        remedy = "--master-addr names this host as the others reach it"
        if port:
            remedy = f"--master-port {port} cannot be used; leave it out to get a free one"
        raise UsageError(f"cannot listen at {address}:{port}: {error.strerror}; {remedy}") from None
    return listener


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
