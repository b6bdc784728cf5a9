"""Make the transport of a group of CPU ranks: who is near, what to do when shared memory cannot
be had.

Invariant: decided by all ranks together before anything is mapped; a rank never maps memory that a
peer serves by messages.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import Any

from zeroshard.comm.gloo_peers import Subgroup, connect, notices_of
from zeroshard.comm.paired import PairedTransport
from zeroshard.comm.rendezvous import HostGroups, meet_neighbours
from zeroshard.comm.spec import CommSpec
from zeroshard.comm.transport import Traffic
from zeroshard.errors import ConfigError

__all__ = ["make_gloo", "make_paired"]

_logger = logging.getLogger(__name__)
_MEETING_S = 60.0  # ranks start at different times: connecting never waits for less


def make_gloo(subgroup: Subgroup, spec: CommSpec, traffic: Traffic) -> PairedTransport:
    """Return a transport that sends messages to every rank of `subgroup`."""
    return PairedTransport(
        subgroup,
        _alone(subgroup),
        spec,
        traffic,
        connections=_connections(subgroup, spec),
        notices=notices_of(subgroup),
    )


def make_paired(subgroup: Subgroup, spec: CommSpec, traffic: Traffic) -> PairedTransport:
    """Return a transport that shares memory with the ranks of this host and sends messages to
    the others.

    Where ranks of one host cannot share memory, a transport asked for by name raises ConfigError on
    every rank; else those use gloo, said once in a warning.
    """
    connections = _connections(subgroup, spec)
    patient = replace(spec, stall_timeout_s=max(spec.stall_timeout_s, _MEETING_S))
    meeting = PairedTransport(
        subgroup, _alone(subgroup), patient, Traffic(), connections=connections
    )
    try:
        neighbours = meet_neighbours(
            subgroup.rank, partial(meeting.exchange_quietly, call="shard()")
        )
    finally:
        meeting.close()
    if neighbours.problems:
        text = f"ranks of one host cannot share memory ({'; '.join(neighbours.problems[:3])})"
        if spec.name != "auto":
            for sock in neighbours.sockets.values():
                sock.close()
            raise ConfigError(f"{text}: make it possible, or choose transport 'gloo'")
        if subgroup.rank == 0:
            _logger.warning("%s: using gloo sockets between them, which is slower", text)
    return PairedTransport(
        subgroup,
        neighbours,
        spec,
        traffic,
        connections=connections,
        notices=notices_of(subgroup),
    )


def _alone(subgroup: Subgroup) -> HostGroups:
    return HostGroups([[rank] for rank in range(subgroup.size)])


def _connections(subgroup: Subgroup, spec: CommSpec) -> Any:
    return connect(subgroup, stall_timeout_s=max(spec.stall_timeout_s, _MEETING_S))
