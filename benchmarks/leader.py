"""The parent of one contender's ranks: a network of their own, their memory and their bytes on
the wire, seen from outside.

    python leader.py SPECIFICATION                                    (started by `driver`)

Reads commands (lines of JSON) from stdin, passes each to every rank, and answers with one line of
JSON: the replies in rank order, the bytes that crossed the loopback interface meanwhile, and on
request the highest memory of each rank. Where the kernel lets it, the ranks get a network namespace
of their own, so that the interface counts their bytes and nobody else's; where it does not, the
answer says so.

Memory is the proportional set size (a page shared by two ranks counts half in each) of anonymous
and shared memory. File pages, the code of the libraries, are left out: how much of them a rank is
charged for depends on who else has them mapped.

What it does not do: import torch, or anything but the standard library. It sleeps while the ranks
sleep.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Rank", "interface_bytes", "main", "own_network", "resident_bytes"]

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
SAMPLE_EVERY_S = 0.01


def own_network() -> bool:
    """Move this process into a network namespace with a loopback interface of its own; False
    where that is not permitted.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNET) != 0:
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
            return False
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"0 {user} 1"),
            ("gid_map", f"0 {group} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(control, SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))
    return True


def interface_bytes(name: str = "lo") -> int:
    """Return the bytes that this network namespace's interface has received."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        interface, _, counters = line.partition(":")
        if interface.strip() == name:
            return int(counters.split()[0])
    return 0


def resident_bytes(pid: int) -> int:
    """Return the proportional set size of the anonymous and shared memory of process `pid`; 0
    when it has ended.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (OSError, ProcessLookupError):
        return 0
    return sum(
        int(line.split()[1]) * 1024
        for line in lines
        if line.startswith(("Pss_Anon:", "Pss_Shmem:"))
    )


class Rank:
    """One worker process and the pipes to it."""

    def __init__(self, rank: int, port: int, specification: dict[str, Any]) -> None:
        receive, send = os.pipe()
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(specification["num_ranks"]),
            "LOCAL_WORLD_SIZE": str(specification["num_ranks"]),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(specification["threads"]),
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join(
                path for path in (*specification["path"], os.environ.get("PYTHONPATH")) if path
            ),
        }
        command = [
            specification["python"],
            "-P",  # another package of this name may lie in the current folder
            "-m",
            "benchmarks.worker",
            str(send),
            json.dumps(specification),
        ]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
            pass_fds=[send],
            env=environment,
            preexec_fn=_die_with_parent,
        )
        os.close(send)
        self.replies = os.fdopen(receive)
        self.base_bytes = self.peak_bytes = 0

    def send(self, command: dict[str, Any]) -> None:
        """Give the rank a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")
        self.process.stdin.flush()

    def sample(self) -> None:
        """Note the highest memory seen."""
        self.peak_bytes = max(self.peak_bytes, resident_bytes(self.process.pid))


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # 1 is PR_SET_PDEATHSIG


def collect(ranks: list[Rank], *, sample: bool) -> list[dict[str, Any]]:
    """Wait for one reply per rank; returns at the first that failed, so that one that waits for
    it in vain is not waited for here.
    """
    replies: dict[int, dict[str, Any]] = {}
    while len(replies) < len(ranks):
        waiting = [i for i in range(len(ranks)) if i not in replies]
        ready, _, _ = select.select(
            [ranks[i].replies for i in waiting], [], [], SAMPLE_EVERY_S if sample else None
        )
        if sample:
            for rank in ranks:
                rank.sample()
        for i in waiting:
            if ranks[i].replies in ready:
                line = ranks[i].replies.readline()
                replies[i] = (
                    json.loads(line)
                    if line
                    else {"error": f"rank {i} ended with exit code {ranks[i].process.wait()}"}
                )
                if "error" in replies[i]:
                    return [replies[i]]
    return [replies[i] for i in range(len(ranks))]


def answer(message: dict[str, Any]) -> None:
    """Give the driver a line."""
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def stop(ranks: list[Rank]) -> NoReturn:
    """End every rank, and this process."""
    for rank in ranks:
        assert rank.process.stdin is not None
        rank.process.stdin.close()
    deadline = time.monotonic() + 5
    for rank in ranks:
        try:
            rank.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.process.kill()
            rank.process.wait()
    os._exit(0)


def main(arguments: list[str]) -> NoReturn:
    """Start the ranks, say what they imported, and serve the driver until stdin ends."""
    _die_with_parent()
    specification = json.loads(arguments[0])
    own = own_network()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [Rank(rank, port, specification) for rank in range(specification["num_ranks"])]
    replies = collect(ranks, sample=False)
    for rank in ranks:
        rank.base_bytes = rank.peak_bytes = resident_bytes(rank.process.pid)
    answer({"replies": replies, "own_network": own})
    for line in sys.stdin:
        command = json.loads(line)
        sample = command.pop("sample", False)
        before = interface_bytes()
        for rank in ranks:
            rank.send(command)
        replies = collect(ranks, sample=sample)
        answer(
            {
                "replies": replies,
                "interface_bytes": interface_bytes() - before,
                "base_bytes": [rank.base_bytes for rank in ranks],
                "peak_bytes": [rank.peak_bytes for rank in ranks],
            }
        )
    stop(ranks)


if __name__ == "__main__":
    main(sys.argv[1:])
