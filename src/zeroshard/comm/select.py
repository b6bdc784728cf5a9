"""Make the transport and the control plane of a group of ranks: the only place that looks at
backends and devices.

Invariant: decided from what is the same on every rank. It does not downgrade silently: what was
asked for by name is made or refused. A world of one has `OneProcess`: its windows are whole
already, and a reduce is a cast; the bits are the same as in one rank's part of any other transport,
and `traffic` counts calls under the link class "local", without bytes.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import distributed as dist

from zeroshard.comm.cpu.collectives import Collectives
from zeroshard.comm.cpu.control import PeerControl, every
from zeroshard.comm.cpu.gloo_peers import Connections, Subgroup, notices_of
from zeroshard.comm.cpu.rendezvous import HostGroups, find_hosts
from zeroshard.comm.cpu.windows import Windows
from zeroshard.comm.groups import connected, gather_bytes, job_timeout, make_group, timeout_of
from zeroshard.comm.job import Seat, choose_interface, same_device
from zeroshard.comm.levels import Levels, PrivateWindow
from zeroshard.comm.native_transport import NativeTransport
from zeroshard.comm.ordered import sum_parts
from zeroshard.comm.ranks import AlongAxes, Ranks
from zeroshard.comm.transport import CommSpec, DoneWork, ReduceRequest, Traffic, Transport, Work
from zeroshard.core.digest import Digest
from zeroshard.core.layout import Range
from zeroshard.core.placement import Mesh, Scope
from zeroshard.core.wire import all_gather, goes_deep, reduce_scatter
from zeroshard.errors import ConfigError
from zeroshard.memory import Pool
from zeroshard.system.device import Device
from zeroshard.system.this_host import raise_file_limit


class OneProcess:
    """A Transport without peers."""

    def __init__(self, spec: CommSpec, traffic: Traffic | None = None) -> None:
        self.name = "one_process"
        self.rank = 0
        self.size = 1
        self.one_sided = True
        self.keyed = True
        self.traffic = Traffic() if traffic is None else traffic
        self.device_sum: Callable[[torch.Tensor], None] | None = lambda tensor: None
        self.control = Ranks()
        self._pool = Pool(spec.pool_bytes)

    def window(
        self,
        key: str,
        ranges: Sequence[Range],
        dtype: torch.dtype,
        device: torch.device,
        *,
        replicated: bool,
    ) -> PrivateWindow:
        assert len(ranges) == 1, (key, ranges)
        return PrivateWindow(self, key, ranges, dtype, device, replicated=True, aliased=True)

    def register(self, key: str) -> None: ...

    def grad_buffer(
        self, key: str, numel: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self._pool.take(numel, dtype, device)

    def return_buffer(self, buffer: torch.Tensor) -> None:
        self._pool.give(buffer)

    def reduce(
        self,
        request: ReduceRequest,
        buffer: torch.Tensor | None,
        out: torch.Tensor,
        *,
        accumulate: bool,
    ) -> Work:
        sum_parts(
            [buffer],
            out,
            codec=request.codec,
            node_size=None,
            accumulate=accumulate,
            sums=request.sums,
        )
        self.traffic.add("reduce_scatter", "local", 0)
        if buffer is not None:
            self._pool.give(buffer)
        return DoneWork()

    def all_gather(
        self, key: str, local: torch.Tensor, ranges: Sequence[Range], out: torch.Tensor
    ) -> Work:
        if out.data_ptr() != local.data_ptr():
            out.copy_(local)
        self.traffic.add("all_gather", "local", 0)
        return DoneWork()

    def begin_write(self) -> None: ...

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        assert source == 0, source

    def watch(self, digest: Digest, is_idle: Callable[[], bool]) -> None: ...

    progress = None

    def give_up(self) -> None: ...

    def abandon(self) -> None: ...

    def close(self) -> None:
        self._pool.clear()


# ------------------------------------------------------------------------------------ several ranks


_logger = logging.getLogger(__name__)

# ----------------------------------------------------------------------- the transport of CPU ranks
# Near peers share memory with us, far peers exchange messages (gloo); every pair of ranks is one or
# the other.
#
# "shared_memory" is the case without far peers, "gloo" the one without near peers, "mixed" has
# both; there is one implementation. A gather copies (or aliases) near slices and receives far ones
# (``windows.py``). A reduce announces our slot to near peers, sends slices to far peers, and sums
# our slice of everybody's part in the canonical order once it is complete (``collectives.py``,
# ``ordered.py``). Both wait through the control plane (``control.py``).
#
# Invariant: every blocking call serves the near peers of all engines of the process while it waits,
# so ranks may run units in different order. One-sided without far peers: a gather needs nothing
# from the peers' programs but that they have published. With far peers the n-th operation of a key
# meets the n-th.
#
# Cost per rank, N equal shares, buffer of B bytes: a gather and a reduce bring ``B (N-1)/N`` each;
# of that, near gathers of aliased windows move nothing. One control record per near peer and
# operation, one message per far peer. Calls are for one thread at a time.


class PairedTransport:
    """A Transport over shared memory, gloo messages, or both, as `control` is connected."""

    def __init__(self, control: PeerControl, spec: CommSpec) -> None:
        self.control = control
        self.rank = control.rank
        self.size = control.size
        self.name = control.name
        self.one_sided = not control.far
        self.keyed = True
        self.traffic = control.traffic
        self.device_sum: Callable[[torch.Tensor], None] | None = None
        self.collectives = collectives = Collectives(control, pool_bytes=spec.pool_bytes)
        sums = collectives.matching.pending
        self.windows = windows = Windows(control, alias=spec.alias, sums=sums)
        # the calls of the protocol are theirs
        self.window = windows.make
        self.begin_write = windows.begin_write
        self.register = control.messages.register
        self.grad_buffer = collectives.grad_buffer
        self.return_buffer = collectives.slots.give
        self.reduce = collectives.reduce
        self.all_gather = collectives.all_gather
        self.broadcast = collectives.broadcast
        self.progress = control.progress
        self.give_up = control.give_up
        self.abandon = control.abandon
        self.close = control.close

    def watch(self, digest: Digest, is_idle: Callable[[], bool]) -> None: ...


# --------------------------------------------------------------------- the control plane of a group
# Invariant: decided by all ranks together before anything is mapped; a rank never maps memory that
# a peer serves by messages.


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
        text = f"ranks of one host cannot share memory ({'; '.join(hosts.problems[:3])})"
        if spec.name != "auto":
            for sock in hosts.sockets.values():
                sock.close()
            raise ConfigError(f"{text}: make it possible, or choose transport 'gloo'")
        if subgroup.rank == 0:
            _logger.warning("%s: using gloo sockets between them, which is slower", text)
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
    """Return the same peers over a control plane that counts its bytes in `traffic`. Collective."""
    if axes.size == 1:
        return axes
    told = axes.share([secrets.token_hex(16), dist.get_rank()], "shard()")
    members = tuple(rank for _, rank in told)
    subgroup = Subgroup(told[0][0], axes.rank, axes.size, members)
    control = make_control(subgroup, replace(spec, mesh=Mesh(1, axes.size)), traffic)
    return AlongAxes(axes.places, axes.place, control)


# ------------------------------------------------------------------------- the transport of a group

STALL_TIMEOUT_S, FIRST_STALL_TIMEOUT_S = 300.0, 900.0  # unless the user says otherwise

_NAMES = ("auto", "one_process", "shared_memory", "gloo", "mixed", "nccl")


def make_transport(
    group: dist.ProcessGroup | None, device: torch.device, spec: CommSpec
) -> Transport:
    """Make the transport of `group` as a mesh of one node; see `make_levels`. Collective."""
    levels = make_levels(group, device, spec)
    assert not levels.is_deep, spec
    return levels.flat


def make_levels(
    group: dist.ProcessGroup | None,
    device: torch.device,
    spec: CommSpec,
    traffic: Traffic | None = None,
) -> Levels:
    """Make the transports of `group` (None: the default group, or one process where there is
    none) for tensors on `device`, which count their bytes in `traffic`. Collective.

    Raises ConfigError for a transport that was asked for by name and cannot be had.
    """
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    world = 1 if group is None else group.size()
    if spec.name not in _NAMES:
        raise ConfigError(f"unknown transport {spec.name!r}; one of: {', '.join(_NAMES)}")
    if group is None and spec.name not in ("auto", "one_process"):
        raise ConfigError(
            f"transport {spec.name!r} needs torch.distributed: call zeroshard.init_distributed()"
            " first"
        )
    if spec.name == "one_process" and world > 1:
        raise ConfigError(
            f"transport 'one_process' serves one rank, and there are {world}; use 'auto'"
        )
    assert spec.mesh.size == world, (spec.mesh, world)
    if group is None or (world == 1 and spec.name in ("auto", "one_process")):
        return Levels(OneProcess(spec, traffic), spec=spec)
    traffic = Traffic() if traffic is None else traffic
    on_cpu = device.type == "cpu"
    if spec.name == "nccl" or (spec.name == "auto" and not on_cpu and has_native(group, device)):
        return _make_native(group, device, spec, traffic)
    if spec.ordered is False:
        raise ConfigError(
            "ordered=False: on CPU ranks the ordered exchange is the only reduce (and the fast"
            " one); leave it out"
        )
    if spec.separate_reduce_group:
        raise ConfigError(
            "comm.separate_reduce_group=True is for NCCL: other transports run gathers and reduces"
            " beside each other anyway; leave it out"
        )
    if spec.name == "auto" and not on_cpu:
        spec = replace(spec, name="gloo")
    if not on_cpu and spec.name != "gloo":
        raise ConfigError(
            f"transport {spec.name!r} serves CPU tensors, not {device}: use 'auto', 'nccl' or"
            " 'gloo'"
        )
    return _make_paired(group, spec, traffic)


def _make_paired(group: dist.ProcessGroup, spec: CommSpec, traffic: Traffic) -> Levels:
    everyone, mesh = _met(group, spec, ()), spec.mesh

    def make(subgroup: Subgroup, spec: CommSpec, traffic: Traffic) -> PairedTransport:
        return PairedTransport(make_control(subgroup, spec, traffic), spec)

    flat = make(everyone, spec, traffic)
    # one host has no slow wire to spare
    is_fast = flat.name == "shared_memory" and spec.two_level is None
    if mesh.num_nodes == 1 or not (spec.columns or (_ever_deep(spec) and not is_fast)):
        return Levels(flat, spec=spec)
    inside, between = _levels(spec)
    return Levels(
        flat,
        make(everyone.part(mesh.node(everyone.rank)), inside, flat.traffic),
        make(everyone.part(mesh.column(everyone.rank)), between, flat.traffic),
        spec=spec,
    )


def _make_native(
    group: dist.ProcessGroup, device: torch.device, spec: CommSpec, traffic: Traffic
) -> Levels:
    mesh, devices = spec.mesh, () if device.type == "cpu" else (Device.of(device),)
    named = _met(group, spec, devices)
    control = make_control(named, replace(spec, name="nccl"), traffic)
    _check_ordered(spec, control)
    connect = partial(connected, device=device, limit_s=spec.stall_timeout_s)
    connect(lambda: group, name="shard(): the group of all ranks")

    def for_reduces(subsets: list[tuple[int, ...]], name: str) -> dist.ProcessGroup | None:
        if not spec.separate_reduce_group:
            return None
        return connect(partial(_subgroup, group, subsets), name=f"shard(): {name}, for reduces")

    apart = for_reduces([tuple(range(mesh.size))], "the group of all ranks")
    flat = NativeTransport(group, device, spec, control, apart)
    if mesh.num_nodes == 1 or not (spec.columns or _ever_deep(spec)):
        _warn_of_timeout([group], device, spec)
        return Levels(flat, spec=spec)
    levels = (
        [mesh.node(node * mesh.node_size) for node in range(mesh.num_nodes)],
        [mesh.column(local) for local in range(mesh.node_size)],
    )
    names = ("the group inside a node", "the group between nodes")
    node, column = (
        connect(partial(_subgroup, group, subsets), name=f"shard(): {name}")
        for subsets, name in zip(levels, names, strict=True)
    )
    _warn_of_timeout([group, node, column], device, spec)
    inside, between = _levels(spec)
    return Levels(
        flat,
        NativeTransport(node, device, inside, control, for_reduces(levels[0], names[0])),
        NativeTransport(column, device, between, control, for_reduces(levels[1], names[1])),
        spec=spec,
    )


def _met(group: dist.ProcessGroup, spec: CommSpec, devices: Sequence[Device]) -> Subgroup:
    """Return the ranks of `group`, which take one device each where they say `devices`, ready for
    sockets to each other. Collective. Raises ConfigError, on every rank.
    """
    raise_file_limit()  # somebody else may have made the job's group
    mine = json.dumps([secrets.token_hex(16), asdict(Seat.of(*devices))])
    answers = gather_bytes(group, mine.encode(), call="shard()", limit_s=spec.stall_timeout_s)
    told = [json.loads(answer) for answer in answers]
    seats = Seat.told([seat for _, seat in told])
    choose_interface([seat.host for seat in seats])
    members = spec.members or tuple(range(group.size()))
    shared = same_device(seats, [0 if seat.uuids else None for seat in seats])
    # a fake group answers for every rank with what the only one has said
    if shared and len({name for name, _ in told}) == len(told):
        device = devices[0].device
        raise ConfigError(
            f"rank(s) {[members[rank] for rank in shared]} compute on one device (uuid"
            f" {seats[shared[0]].uuids[0]}; on rank {members[group.rank()]} the model is on"
            f" {device}), and {devices[0].backend} takes one device for each rank: call"
            f" torch.{device.type}.set_device(LOCAL_RANK), or zs.init_distributed(), before the"
            " model is made"
        )
    return Subgroup(told[0][0], group.rank(), group.size(), members)


def _check_ordered(spec: CommSpec, control: PeerControl) -> None:
    """Raise ConfigError, on every rank, for an ordered exchange that would go flat over hosts of
    several ranks, unless it was asked for. (Two levels would sum in another order than the mesh
    says, so they are not taken instead.)
    """
    if not spec.ordered or spec.two_level is not None or spec.mesh.num_nodes > 1:
        return
    if control.name == "mixed":
        control.close()
        raise ConfigError(
            f"comm.ordered=True: {spec.mesh.size} ranks on several hosts are one node of the mesh,"
            " so every rank would send its gradients to every rank of the other hosts. Set"
            " comm.node_size to the ranks of one host (sums are then formed by nodes, in two"
            " levels), leave ordered out, or ask for this exchange with comm.hierarchical=False"
        )


def first_stall_timeout_s(group: dist.ProcessGroup | None, device: torch.device) -> float:
    """Return how long ranks of `group` wait for each other until the first step is over, where the
    user has not said: for what is compiled on a cold cache, and a first batch from afar; less where
    the backend would end the job before.
    """
    timeout = None if group is None else timeout_of(group, device)
    if timeout is None:
        return FIRST_STALL_TIMEOUT_S
    within = timeout.total_seconds() - 2 * every(FIRST_STALL_TIMEOUT_S) - 1
    return max(STALL_TIMEOUT_S, min(within, FIRST_STALL_TIMEOUT_S))


def _warn_of_timeout(
    groups: Sequence[dist.ProcessGroup], device: torch.device, spec: CommSpec
) -> None:
    """Warn where the backend would end the job before a stall is told."""
    timeouts = [timeout_of(group, device) for group in groups]
    timeout_s = min((one.total_seconds() for one in timeouts if one), default=math.inf)
    told_s = spec.stall_timeout_s + 2 * every(spec.stall_timeout_s)
    if timeout_s <= told_s and groups[0].rank() == 0:
        _logger.warning(
            "the process group's timeout of %g s is not above stall_timeout_s of %g s: the backend"
            " would end a job that stalls before it is told where its ranks are; lower"
            " stall_timeout_s, or make the group with a timeout above %g s",
            timeout_s,
            spec.stall_timeout_s,
            told_s,
        )


def _ever_deep(spec: CommSpec) -> bool:
    """Whether any gather, or any reduce of fp32 or half precision buffers, goes in two levels."""
    hop = float(spec.hop_dtype.itemsize)
    reduces = [(reduce_scatter, Scope.SHARD, whole, hop) for whole in (4.0, 2.0)]
    moves = [(all_gather, Scope.SHARD, Scope.FULL, 1.0), *reduces]
    return spec.node_sums or any(goes_deep(spec.mesh, spec.two_level, *move) for move in moves)


def _levels(spec: CommSpec) -> tuple[CommSpec, CommSpec]:
    """Return what to ask of the transports of a node's ranks, and of a column's.

    Buffers of a column have neither the size nor the dtype of those that the spec's `pool_bytes`
    are for.
    """
    mesh = spec.mesh
    between = replace(spec, mesh=Mesh(mesh.num_nodes, 1), pool_bytes=None)
    return replace(spec, mesh=Mesh(1, mesh.node_size)), between


def _subgroup(group: dist.ProcessGroup, subsets: list[tuple[int, ...]]) -> dist.ProcessGroup:
    """Make the process group of that one of `subsets`, ranks of `group`, in which this rank is.
    Collective over `group`, which may be a part of the job.
    """
    in_job = [[dist.get_global_rank(group, rank) for rank in ranks] for ranks in subsets]
    mine = next(index for index, ranks in enumerate(subsets) if group.rank() in ranks)
    if group.size() < dist.get_world_size():
        return make_group(in_job[mine], lambda payload: gather_bytes(group, payload))
    made: list[dist.ProcessGroup] = [dist.new_group(ranks, job_timeout()) for ranks in in_job]
    return made[mine]


def has_native(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether `group` has a backend of `device`'s own, such as NCCL."""
    try:
        return dist.get_backend(group) != "gloo" and group._get_backend(device) is not None
    except RuntimeError:
        return False
