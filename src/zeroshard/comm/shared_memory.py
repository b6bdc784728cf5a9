"""Make the transport of a group of CPU ranks: who is near, what to do when shared memory cannot
be had.

Invariant: decided by all ranks together before anything is mapped; a rank never maps memory that a
peer serves by messages.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from zeroshard.comm.gloo_peers import Subgroup, connect, notices_of
from zeroshard.comm.paired import PairedTransport
from zeroshard.comm.rendezvous import HostGroups, meet_neighbours
from zeroshard.errors import ConfigError

__all__ = ["make_gloo", "make_paired"]

_logger = logging.getLogger(__name__)
_MEETING_S = 60.0  # ranks start at different times: connecting never waits for less


def make_gloo(circle: Subgroup, *, stall_timeout_s: float, **options: Any) -> PairedTransport:
    """Return a transport that sends messages to every rank of `circle`. Options are
    PairedTransport's.
    """
    connections = connect(circle, stall_timeout_s=max(stall_timeout_s, _MEETING_S))
    alone = HostGroups([[rank] for rank in range(circle.size)])
    options |= {
        "connections": connections,
        "notices": notices_of(circle),
        "members": circle.members,
        "stall_timeout_s": stall_timeout_s,
    }
    return PairedTransport(circle.rank, circle.size, alone, **options)


def make_paired(
    circle: Subgroup,
    *,
    required: bool,
    stall_timeout_s: float,
    **options: Any,
) -> PairedTransport:
    """Return a transport that shares memory with the ranks of this host and sends messages to
    the others.

    Where ranks of one host cannot share memory, `required` raises ConfigError on every rank; else
    those use gloo, said once in a warning.
    """
    rank, size = circle.rank, circle.size
    connections = connect(circle, stall_timeout_s=max(stall_timeout_s, _MEETING_S))
    alone = HostGroups([[peer] for peer in range(size)])
    meeting = PairedTransport(
        rank,
        size,
        alone,
        connections=connections,
        members=circle.members,
        stall_timeout_s=max(stall_timeout_s, _MEETING_S),
    )
    try:
        neighbours = meet_neighbours(rank, partial(meeting.exchange_quietly, call="shard()"))
    finally:
        meeting.close()
    if neighbours.problems:
        text = f"ranks of one host cannot share memory ({'; '.join(neighbours.problems[:3])})"
        if required:
            for sock in neighbours.sockets.values():
                sock.close()
            raise ConfigError(f"{text}: make it possible, or choose transport 'gloo'")
        if rank == 0:
            _logger.warning("%s: using gloo sockets between them, which is slower", text)
    options |= {
        "connections": connections,
        "notices": notices_of(circle),
        "members": circle.members,
        "stall_timeout_s": stall_timeout_s,
    }
    return PairedTransport(rank, size, neighbours, **options)
