"""Make the control plane of a group of ranks: who shares a host, and what to do when memory cannot
be shared there; and that of the peers along a mesh's other axes.

Invariant: decided by all ranks together before anything is mapped; a rank never maps memory that a
peer serves by messages.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import replace
from functools import partial

import torch.distributed as dist

from zeroshard.comm.cpu.control import PeerControl
from zeroshard.comm.cpu.gloo_peers import Connections, Subgroup, notices_of
from zeroshard.comm.cpu.rendezvous import HostGroups, find_hosts
from zeroshard.comm.mesh_ranks import AlongAxes
from zeroshard.comm.transport import CommSpec, Traffic
from zeroshard.core.placement import Mesh
from zeroshard.errors import ConfigError

_logger = logging.getLogger(__name__)
_MEETING_S = 60.0  # ranks start at different times: connecting never waits for less


def make_control(subgroup: Subgroup, spec: CommSpec, traffic: Traffic) -> PeerControl:
    """Return the control plane of `subgroup`: sockets to the ranks of this host, gloo to the
    others; to all, where `spec` names "gloo". Collective.

    Where ranks of one host cannot share memory, a transport that needs it and was asked for by name
    raises ConfigError on every rank; else those use gloo, said once in a warning.
    """
    patient_s = max(spec.stall_timeout_s, _MEETING_S)
    # one rank alone has nobody to connect to
    connections = Connections(subgroup, stall_timeout_s=patient_s) if subgroup.size > 1 else None
    make = partial(PeerControl, subgroup, connections=connections)
    hosts = HostGroups([[rank] for rank in range(subgroup.size)])
    if spec.name != "gloo":
        meeting = make(hosts, spec.mesh, Traffic(), stall_timeout_s=patient_s)
        try:
            hosts = find_hosts(meeting, "shard()")
        finally:
            meeting.close()
    if hosts.problems and spec.name != "nccl":
        _refuse_or_warn(hosts, subgroup, required=spec.name != "auto")
    if len(hosts.groups) == 1:
        make = partial(PeerControl, subgroup, connections=None)  # nobody is far: end gloo's thread
    control = make(
        hosts,
        spec.mesh,
        traffic,
        notices=notices_of(subgroup) if subgroup.size > 1 else None,
        stall_timeout_s=spec.stall_timeout_s,
    )
    if spec.made is not None:
        spec.made(control)
    return control


def connect_axes(axes: AlongAxes, spec: CommSpec, traffic: Traffic) -> AlongAxes:
    """Return the same peers over a control plane, whose bytes are counted in `traffic`.
    Collective.
    """
    if axes.size == 1:
        return axes
    told = axes.share([secrets.token_hex(16), dist.get_rank()], "shard()")
    members = tuple(rank for _, rank in told)
    subgroup = Subgroup(told[0][0], axes.rank, axes.size, members)
    control = make_control(subgroup, replace(spec, mesh=Mesh(1, axes.size)), traffic)
    return AlongAxes(axes.places, axes.place, control)


def _refuse_or_warn(hosts: HostGroups, subgroup: Subgroup, *, required: bool) -> None:
    text = f"ranks of one host cannot share memory ({'; '.join(hosts.problems[:3])})"
    if required:
        for sock in hosts.sockets.values():
            sock.close()
        raise ConfigError(f"{text}: make it possible, or choose transport 'gloo'")
    if subgroup.rank == 0:
        _logger.warning("%s: using gloo sockets between them, which is slower", text)
