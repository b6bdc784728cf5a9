"""Find the ranks that share a host's memory; all ranks agree before anything is mapped.

Two ranks are near when they name the same host (boot id and network namespace), both can make a
memfd, and one could connect to the other's abstract Unix socket.
Nearness must be an equivalence, so a host where any pair failed to connect counts as separate
hosts.

Invariant: every rank computes the same groups, from what was exchanged. Cost: three small exchanges
and a socket per pair, once.
"""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path

from zeroshard.comm import memfd
from zeroshard.comm.cpu.links import peer_credentials
from zeroshard.comm.ranks import Ranks

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")


@dataclass
class HostGroups:
    """The result of `find_hosts`."""

    groups: list[list[int]]  # the ranks of each host, in rank order; the same on every rank
    # to the other ranks of our group
    sockets: dict[int, socket.socket] = field(default_factory=dict)
    # why ranks of one host are not together; the same on every rank
    problems: list[str] = field(default_factory=list)

    def group_of(self, rank: int) -> list[int]:
        """Return the ranks that share memory with `rank`, itself included."""
        return next(group for group in self.groups if rank in group)


def boot_id() -> str:
    """Return what tells this host from others: the kernel's boot id, and (containers on one
    machine) the network namespace.

    Abstract sockets do not reach from one network namespace into another.
    """
    return f"{_BOOT_ID.read_text().strip()} {_NETWORK.stat().st_ino}"


def find_hosts(ranks: Ranks, call: str) -> HostGroups:
    """Find the ranks among `ranks` on this host and connect to them. Collective; never raises on
    one rank only.
    """
    rank = ranks.rank
    listener, own = _introduce()
    everyone = ranks.share(own, call)
    sockets: dict[int, socket.socket] = {}
    report: dict[str, str] = {}  # rank we could not connect to -> why
    for peer in range(rank):
        if (
            not own["error"]
            and not everyone[peer]["error"]
            and everyone[peer]["host"] == own["host"]
        ):
            try:
                sockets[peer] = _connect(everyone[peer]["name"], rank, everyone[peer]["token"])
            except OSError as error:
                report[str(peer)] = str(error)
    found = HostGroups(*_agree(everyone, ranks.share(report, call)))
    mine = found.group_of(rank)
    trouble = ""
    try:
        sockets.update(_accept(listener, own["token"], [peer for peer in mine if peer > rank]))
    except OSError as error:
        trouble = f"rank {rank}: {error}"
    finally:
        if listener is not None:
            listener.close()
    troubles = [text for text in ranks.share(trouble, call) if text]
    if troubles:
        found.groups, found.problems = (
            [[peer] for peer in range(len(everyone))],
            [*found.problems, *troubles],
        )
    found.sockets = {peer: sock for peer, sock in sockets.items() if peer in found.group_of(rank)}
    for peer, sock in sockets.items():
        if peer not in found.sockets:
            sock.close()
    return found


def _introduce() -> tuple[socket.socket | None, dict[str, str]]:
    """Open a listener and try the memory; errors are sent to the others instead of
    raised.
    """
    listener = None
    token = secrets.token_hex(16)
    name = f"zeroshard-{secrets.token_hex(16)}"
    try:
        host = boot_id()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind("\0" + name)
        listener.listen(4096)
        fd = memfd.create(4096)
        try:
            memfd.map_bytes(fd, 4096)[0] = 1
        finally:
            os.close(fd)
    except (OSError, RuntimeError, AttributeError) as error:
        return listener, {
            "host": "",
            "name": "",
            "token": "",
            "error": f"{type(error).__name__}: {error}",
        }
    return listener, {"host": host, "name": name, "token": token, "error": ""}


def _connect(name: str, rank: int, token: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(10.0)
        sock.connect("\0" + name)
        _check_owner(sock)
        sock.send(f"{token} {rank}".encode(), socket.MSG_NOSIGNAL)
    except OSError:
        sock.close()
        raise
    return sock


def _accept(
    listener: socket.socket | None, token: str, peers: list[int]
) -> dict[int, socket.socket]:
    """Take the connections of `peers`, which are known to have been made. Strangers are turned
    away.
    """
    accepted: dict[int, socket.socket] = {}
    while listener is not None and len(accepted) < len(peers):
        listener.settimeout(10.0)
        sock, _ = listener.accept()
        sock.settimeout(10.0)
        greeting = sock.recv(4096).decode(errors="replace").split()
        if (
            len(greeting) == 2
            and secrets.compare_digest(greeting[0], token)
            and int(greeting[1]) in peers
        ):
            _check_owner(sock)
            accepted[int(greeting[1])] = sock
        else:
            sock.close()
    return accepted


def _check_owner(sock: socket.socket) -> None:
    _, uid = peer_credentials(sock)
    if uid != os.getuid():
        raise PermissionError(f"the socket belongs to user {uid}, not {os.getuid()}")


def _agree(
    everyone: list[dict[str, str]], reports: list[dict[str, str]]
) -> tuple[list[list[int]], dict[int, socket.socket], list[str]]:
    """Return the groups of ranks that may share memory, and what kept others apart. Pure: the
    same on every rank.
    """
    problems = [
        f"rank {rank}: {entry['error']}" for rank, entry in enumerate(everyone) if entry["error"]
    ]
    hosts: dict[str, list[int]] = {}
    for rank, entry in enumerate(everyone):
        hosts.setdefault(entry["host"] if not entry["error"] else f"alone {rank}", []).append(rank)
    groups: list[list[int]] = []
    for ranks in hosts.values():
        failures = [
            f"rank {rank} to rank {peer}: {why}"
            for rank in ranks
            for peer, why in reports[rank].items()
        ]
        problems += failures
        groups += [[rank] for rank in ranks] if failures else [ranks]
    return sorted(groups), {}, problems
