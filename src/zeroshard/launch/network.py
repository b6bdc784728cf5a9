"""Find the address at which the first host of a job listens. Standard library only."""

from __future__ import annotations

import socket

from zeroshard.launch.options import UsageError
from zeroshard.system.sockets import is_loopback


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
