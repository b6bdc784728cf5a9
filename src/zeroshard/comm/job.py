"""``zeroshard.init_distributed``: the ranks of a job meet, and take one backend by one rule.

    1. every rank comes to a store: a private file of ``zeroshard run``, or TCP at MASTER_ADDR
    2. each says its host, its place there, and the devices that it sees
    3. all decide the same of what all have said (`seated`), and make the group

A rank alone cannot decide: it may see its own device alone (as ``srun --gpus-per-task``, MPI's
wrappers and Kubernetes start it) or all of them, and LOCAL_RANK does not say which. Uuids tell
devices apart.

NCCL is bound to the device of its rank while it connects, and not longer: of a bound group torch
splits every other one, in which all ranks of the job take part, and a library that makes a group
of some ranks with these alone (``use_local_synchronization``) would wait for ever.

At the end of a program NCCL's communicators can be destroyed by all ranks of a host together, and
only once nothing is under way. So the ranks that end well meet in the store once more, and leave
the group to the end of the process where some have failed, or do not come soon.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from hashlib import sha256
from threading import Event, Thread
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from zeroshard.comm.cpu.rendezvous import boot_id
from zeroshard.comm.groups import connected
from zeroshard.errors import ConfigError, PeerLostError, StallError, ZeroshardError
from zeroshard.system.device import Device, all_devices
from zeroshard.system.keeper_client import who_restarts
from zeroshard.system.this_host import (
    interface_towards,
    raise_file_limit,
    rank_variables,
    stat_of,
)

_log = logging.getLogger("zeroshard")
_LEAVE_S = 10.0  # how long a rank that ends well waits for its device, and for the others
_LOOK_S = 0.5  # between two looks at where the ranks meet
_num_calls = 0  # of this process: each meets under keys of its own


@dataclass(frozen=True)
class Seat:
    """One rank's host, and the devices that it sees: the ranks tell each other, as JSON."""

    host: str
    place: int | None = None  # LOCAL_RANK, where somebody has set it
    type: str = ""  # of the devices that it sees; "": there are none
    backend: str | None = None  # that serves them
    uuids: tuple[str, ...] = ()  # of these devices

    @classmethod
    def of(cls, *devices: Device) -> Seat:
        """Return this rank's, which sees `devices`."""
        try:
            host = boot_id()
        except OSError:
            host = socket.gethostname()
        place = os.environ.get("LOCAL_RANK")
        own = cls(host, None if place is None else int(place))
        if not devices:
            return own
        uuids = tuple(device.uuid for device in devices)
        return cls(own.host, own.place, devices[0].type, devices[0].backend, uuids)

    @classmethod
    def told(cls, said: Iterable[Mapping[str, Any]]) -> list[Seat]:
        """Return the seats of all ranks; each rank has `said` its fields."""
        return [cls(**{**one, "uuids": tuple(one["uuids"])}) for one in said]

    @property
    def kind(self) -> tuple[str, str | None]:
        """The type of its devices, and the backend of that."""
        return self.type, self.backend

    @property
    def machine(self) -> str:
        """The machine of its devices: containers of one machine are hosts of their own, and may
        share some.
        """
        return self.host.partition(" ")[0]


def init_distributed(
    backend: str | None = None, *, timeout_s: float = 1800.0, join_timeout_s: float = 600.0
) -> None:
    """Join the process group that torchrun (or ``zeroshard run``) describes in the environment.

    Does nothing for a single process (no ``RANK`` in the environment) or where a group exists
    already. Tasks of a Slurm step or of an MPI job become ranks: without ``RANK``, torchrun's
    variables are set from srun's or mpirun's; the latter do not say ``MASTER_ADDR`` of several
    hosts. So does the process on each of several nodes of a SkyPilot task with at most one GPU
    each.

    The ranks meet first, for at most `join_timeout_s` (or `timeout_s`, if that is less), and each
    says which devices it sees. Where every rank has an accelerator of its own, its device number
    ``LOCAL_RANK``, or the only one that it sees, becomes the current device, and the backend is the
    one of its type (nccl, xccl), which connects here and now, and gloo for CPU tensors. Ranks of
    one host that share devices all meet over gloo, with a warning; of several hosts that is a
    ConfigError. After `timeout_s` the backend ends a collective. Ranks that ``zeroshard run`` has
    started on one host meet in a file that only this user can read. The group is destroyed when the
    program ends, unless the program has done so.

    Raises StallError, which names them, where some ranks have not come, and PeerLostError where the
    process that they meet in is gone.
    """
    global _num_calls
    if dist.is_initialized():
        return
    os.environ.update(rank_variables(os.environ))
    if "RANK" not in os.environ:
        return
    raise_file_limit()
    _num_calls += 1
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit_s = min(join_timeout_s, timeout_s)
    store = _store(rank, size, limit_s)
    store, seats = introduced(store, rank, size, limit_s, Seat.of(*all_devices()))
    name, index = seated(seats, rank, backend)
    choose_interface([seat.host for seat in seats])
    device = None if index is None else all_devices()[0].make_current(index)
    bound = device if device is not None and str(seats[rank].backend) in name else None
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)

    def join() -> dist.ProcessGroup:
        whole = PrefixStore("default_pg", store)
        dist.init_process_group(
            name, store=whole, rank=rank, world_size=size, timeout=timeout, device_id=bound
        )
        return dist.group.WORLD  # type: ignore[return-value]

    group = connected(join, bound or torch.device("cpu"), "init_distributed()", limit_s)
    group.bound_device_id = None
    atexit.register(_leave, group, store, bound, os.getpid())


def seated(seats: Sequence[Seat], rank: int, asked: str | None) -> tuple[str, int | None]:
    """Return the backend of all ranks with these `seats`, and the index of the device of `rank`,
    None where it takes none. `asked` is the backend that the program wants. The same on every rank,
    but for the index. Raises ConfigError.
    """
    indices = _indices(seats)
    shared = same_device(seats, indices)
    own = None if shared else indices[rank]
    natives = {seat.backend for seat in seats if seat.uuids} - {None, "gloo"}
    wanted = natives if asked is None else {one for one in natives if one and one in asked}
    if not wanted:
        return asked or "gloo", own
    first = next(seat.kind for seat in seats if seat.uuids)
    others = [number for number, seat in enumerate(seats) if seat.kind != first]
    if others:
        raise ConfigError(
            f"rank(s) {others} do not see devices of type {first[0]!r}, and the others do: start"
            " ranks where each sees one, or call init_distributed('gloo') on all"
        )
    if not shared:
        return asked or f"cpu:gloo,{first[0]}:{first[1]}", own
    here = [number for number, seat in enumerate(seats) if seat.machine == seats[shared[0]].machine]
    num_devices = len({seats[number].uuids[indices[number] or 0] for number in here})
    found = (
        f"a host has {num_devices} {first[0]} device(s) for {len(here)} ranks: ranks {shared} take"
        " the same one"
    )
    if asked is not None or len({seat.host for seat in seats}) > 1:
        raise ConfigError(
            f"{found}; start one rank for each device, or call init_distributed('gloo') on all"
        )
    if rank == 0:
        _log.warning(
            "%s; all meet over gloo, and share what they compute on; for the device's own"
            " collectives start one rank for each",
            found,
        )
    return "gloo", None


def same_device(seats: Sequence[Seat], indices: Sequence[int | None]) -> list[int]:
    """Return the first ranks that take one device, by their `indices`; [] where none do."""
    taken: dict[tuple[str, str], list[int]] = {}
    for rank, (seat, index) in enumerate(zip(seats, indices, strict=True)):
        if index is not None:
            taken.setdefault((seat.machine, seat.uuids[index]), []).append(rank)
    return next((ranks for ranks in taken.values() if len(ranks) > 1), [])


def _indices(seats: Sequence[Seat]) -> list[int | None]:
    """Return which of the devices that it sees each rank takes, by its place on its host."""
    before: Counter[str] = Counter()
    indices: list[int | None] = []
    for seat in seats:
        place = before[seat.host] if seat.place is None else seat.place
        before[seat.host] += 1
        indices.append(place % len(seat.uuids) if seat.uuids else None)
    return indices


def choose_interface(hosts: Sequence[str]) -> None:
    """Let gloo take the interface by which the first of several `hosts` is reached, unless the user
    has named one: by itself it takes the interface of the host's name, which is often loopback.
    """
    address = os.environ.get("MASTER_ADDR")
    if len(set(hosts)) == 1 or address is None or "GLOO_SOCKET_IFNAME" in os.environ:
        return
    interface = interface_towards(address)
    if interface is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface


def _store(rank: int, size: int, limit_s: float) -> Any:
    """Return where the ranks meet. Raises ConfigError and StallError."""
    path = meeting_file()
    if path is not None:
        return dist.FileStore(path, size)  # type: ignore[attr-defined]
    unset = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if unset:
        raise ConfigError(
            f"RANK is set and {unset[0]} is not: set it on all ranks to where rank 0 listens, or"
            " use zeroshard run"
        )
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    listens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            size,
            listens,
            timeout=timedelta(seconds=limit_s),
            wait_for_workers=False,  # it would count those that come
            multi_tenant=True,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
        )
    except dist.DistNetworkError as error:
        if listens:  # the port is taken, or the address is not this host's
            raise
        raise StallError(
            f"init_distributed(): rank(s) [0] did not come within {limit_s:g} s: nobody answers at"
            f" {address}:{port}; see whether rank 0 runs, and whether that address is its host's"
        ) from error
    return PrefixStore(f"zeroshard/{_num_calls}", store)


def introduced(
    store: Any, rank: int, size: int, limit_s: float, own: Seat
) -> tuple[Any, list[Seat]]:
    """Return a store for the ranks of this start alone, and what every rank says of itself. Raises
    PeerLostError and StallError.

    `store` may have keys of ranks that were there before, and hosts may have started theirs more or
    less often. So rank 0 gives the meeting a new name, the others answer under the name that they
    find, and know it for their own once rank 0 has repeated their answer.
    """
    deadline = time.monotonic() + limit_s
    mine, keys, answers = json.dumps([secrets.token_hex(8), asdict(own)]), ["zeroshard"], []

    def wait(awaited: list[str], most_s: float) -> None:
        left_s = max(deadline - time.monotonic(), 0.001)
        store.wait(awaited, timedelta(seconds=min(left_s, most_s)))

    try:
        if rank == 0:
            store.set("zeroshard", secrets.token_hex(8))
        while mine not in answers:
            wait(["zeroshard"], limit_s)
            name = store.get("zeroshard").decode()
            keys = [f"{name}/{number}" for number in range(size)]
            store.set(keys[rank], mine)
            if rank == 0:
                wait(keys, limit_s)
                said = [answer.decode() for answer in store.multi_get(keys)]
                store.set(f"{name}/all", json.dumps(said))
            try:
                wait([f"{name}/all"], _LOOK_S)
                answers = json.loads(store.get(f"{name}/all"))
            except RuntimeError:
                store.check(["zeroshard"])  # raises where the store is gone
            if mine not in answers:
                if time.monotonic() > deadline:
                    raise RuntimeError("nobody has repeated it")
                time.sleep(_LOOK_S / 10)
    except RuntimeError as error:
        try:
            absent = [number for number, key in enumerate(keys) if not store.check([key])]
        except RuntimeError:  # at any moment since: whoever gave up first may have held the store
            raise PeerLostError(
                "init_distributed(): the process where all ranks meet, of rank 0 or of its"
                " launcher, has ended or given up: see its error"
            ) from error
        raise StallError(
            f"init_distributed(): rank(s) {absent or [0]} did not come within {limit_s:g} s; see"
            " what they are doing, or raise join_timeout_s if they are only slow"
        ) from error
    return PrefixStore(name, store), Seat.told(json.loads(one)[1] for one in answers)


def _leave(group: dist.ProcessGroup, store: Any, device: torch.device | None, pid: int) -> None:
    """Destroy `group`, which `init_distributed` has made in the process `pid`, where the program
    has left it as it is.

    Over gloo one process in about 30 aborts at its end where its sockets are still connected (torch
    2.13). NCCL warns, and its end waits for the other ranks of the host.
    """
    if os.getpid() != pid or dist.group.WORLD is not group:
        return
    if device is not None:
        if sys.exc_info()[1] is not None or getattr(sys, "last_value", None) is not None:
            return  # this rank has failed, and the others may wait for it on their devices
        idle = Event()

        def wait() -> None:
            with suppress(RuntimeError):
                Device.of(device).synchronize()
                idle.set()

        Thread(target=wait, daemon=True).start()
        if not idle.wait(_LEAVE_S):  # a collective is left that the others never come to
            return
        keys = [f"zeroshard/left/{number}" for number in range(group.size())]
        try:
            store.set(keys[group.rank()], "")
            store.wait(keys, timedelta(seconds=_LEAVE_S))
        except RuntimeError:  # they go on, have failed, or whoever held the store is gone
            return
    dist.destroy_process_group()


# ------------------------------------------------------------------------------------- the launcher
# The launcher as a rank sees it: where the ranks of this host meet, the rank's heartbeat, and the
# report of a failure that its program cannot raise.
#
# ``zeroshard run`` starts each rank through ``launch/worker.py``, which leaves itself in
# ``sys.modules`` under `LAUNCHER` (children of the rank would inherit an environment variable).
# Under another launcher there is nothing.


LAUNCHER = "zeroshard_launched"


def _launcher() -> Any:
    return sys.modules.get(LAUNCHER)


def meeting_file() -> str | None:
    """Return the path of a new private file for a FileStore of all ranks, or None.

    The n-th call on a rank gives the file of the n-th call on the others.
    """
    launcher = _launcher()
    return None if launcher is None else launcher.meeting_file()


def heartbeat() -> Callable[[], None] | None:
    """Return a function for an engine to call on progress, None where nobody listens; it costs
    under a microsecond.
    """
    launcher = _launcher()
    return None if launcher is None else launcher.beat


def status() -> Callable[..., None] | None:
    """Return a function that takes the values of `STATUS` (launch/worker.py), for ``zeroshard top``
    to show; None where nobody looks.
    """
    return getattr(_launcher(), "tell", None)


def keeper_address() -> str | None:
    """Return where the keeper of this host is asked (system/keeper_client.py): the launcher's, or
    the one that ranks start; None: nobody would start them again.
    """
    launcher = _launcher()
    given = None if launcher is None else launcher.keeper_address()
    if given is not None or (restarter := who_restarts(os.environ)) is None:
        return given
    try:
        begun_at = stat_of(restarter[0])[19]
    except OSError:  # it is gone
        return None
    # the same for all ranks that this process of this host starts for this job, and for no others
    place = (boot_id(), os.getuid(), restarter[0], begun_at, os.environ.get("RAY_JOB_ID"))
    return f"zeroshard-keeper-{sha256(repr(place).encode()).hexdigest()[:32]}"


def end_process(error: ZeroshardError) -> NoReturn:
    """End this process with the exit code of `error`, which its main thread cannot raise: it waits
    for what never comes. Nothing is torn down.
    """
    launcher = _launcher()
    if launcher is not None:
        launcher.report(error)
    else:
        sys.stderr.write("".join(traceback.format_exception(error)))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(error.exit_code)
