"""Hostfiles, as DeepSpeed and MPI have them, and the choice of hosts and slots from one.

    # comment
    worker-0 slots=4
    worker-1 slots=4

A slot is a place for one rank: device 0, 1, ... of the host. ``--include`` and ``--exclude`` take
``HOST[:SLOT,...]`` joined by ``@``: ``worker-0@worker-1:0,2`` is all of worker-0 and two slots of
worker-1.

Invariant: a hostfile is not trusted. A name that is returned holds letters, digits, dots, dashes
and underscores only and never begins with a dash, so that it cannot be an option or more than one
word for any program.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zeroshard.launch.options import UsageError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}", re.ASCII)
_LINE = re.compile(r"(\S+)[ \t]+slots=([1-9][0-9]{0,3})", re.ASCII)
_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Host:
    """A host and the slots of it that take a rank; `num_slots` is how many it has."""

    name: str
    slots: tuple[int, ...]
    num_slots: int

    @property
    def is_whole(self) -> bool:
        """Whether every slot takes a rank."""
        return len(self.slots) == self.num_slots


def read(path: str) -> list[Host]:
    """Read a hostfile. Raises UsageError, with the line's number, for what it does not say."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"hostfile {path}: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise UsageError(f"hostfile {path}: over {_MAX_BYTES} bytes are no hostfile")
    return parse(data.decode("utf-8", "replace"), path)


def parse(text: str, path: str = "hostfile") -> list[Host]:
    """Return the hosts of a hostfile, in its order."""
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].strip(" \t\r")
        if not words:
            continue
        match = _LINE.fullmatch(words)
        where = f"hostfile {path}, line {number}"
        if match is None:
            raise UsageError(f"{where}: {words[:80]!r} is not of the form HOST slots=N")
        name, count = match[1], int(match[2])
        if _NAME.fullmatch(name) is None:
            raise UsageError(
                f"{where}: {name[:80]!r} is not a host's name: letters, digits, '.', '_' and '-',"
                " the first no '-' (a user or a port belongs into ~/.ssh/config)"
            )
        if name in hosts:
            raise UsageError(f"{where}: {name} stands there twice")
        hosts[name] = Host(name, tuple(range(count)), count)
    if not hosts:
        raise UsageError(f"hostfile {path} names no host")
    return list(hosts.values())


def choose(hosts: Sequence[Host], include: str | None, exclude: str | None) -> list[Host]:
    """Return the hosts, in their order, that `include` names or `exclude` leaves.

    Raises:
        UsageError: both are given; a host or a slot that is not there; nothing is left.
    """
    if include is not None and exclude is not None:
        raise UsageError("--include and --exclude exclude each other")
    if include is not None:
        named = _named("--include", include, hosts)
        kept = {name: slots for name, slots in named.items() if slots}
    else:
        named = {} if exclude is None else _named("--exclude", exclude, hosts)
        kept = {
            host.name: tuple(slot for slot in host.slots if slot not in named.get(host.name, ()))
            for host in hosts
        }
    chosen = [
        Host(host.name, kept[host.name], host.num_slots) for host in hosts if kept.get(host.name)
    ]
    if not chosen:
        raise UsageError(f"--exclude {exclude} leaves no slot")
    return chosen


def _named(option: str, text: str, hosts: Sequence[Host]) -> Mapping[str, tuple[int, ...]]:
    """Return the slots that a choice names, by host."""
    known = {host.name: host for host in hosts}
    named: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        name, colon, numbers = part.strip().partition(":")
        if name not in known:
            raise UsageError(f"{option}: {name!r} is not a host of the hostfile")
        if name in named:
            raise UsageError(f"{option}: {name} stands there twice")
        slots = known[name].slots
        if colon:
            slots = tuple(sorted({_slot(option, known[name], one) for one in numbers.split(",")}))
        named[name] = slots
    return named


def _slot(option: str, host: Host, text: str) -> int:
    number = text.strip()
    if not (number.isascii() and number.isdecimal()) or int(number) not in host.slots:
        raise UsageError(
            f"{option}: {host.name} has no slot {text!r}, only 0 to {host.num_slots - 1}"
        )
    return int(number)
