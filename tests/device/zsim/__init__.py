"""``zsim``: a pretended asynchronous accelerator on CPUs, for tests. Importing this registers it.

Its kernels are the CPU's, run later by the stream that they were launched on. See
``docs/design/streams.md`` for what it shows, and what it cannot show.

    import tests.device.zsim as zsim

    zsim.set_schedule("compute_last")       # when lanes run; `threads` until then
    x = torch.ones(4, device="zsim")        # torch.zsim is as torch.cuda
    zsim.host_waits()                       # why the host has waited, and how often

Environment: ``ZSIM_DEVICES`` (2), ``ZSIM_FIRST`` (the host's number of the first of them; by
default devices are this process's alone), ``ZSIM_SCHEDULE`` (threads), ``ZSIM_SEED`` (0),
``ZSIM_MEMORY`` (bytes of each device, 2 GiB), ``ZSIM_STALL_S`` (seconds after which a wait raises,
120).

Lanes are threads: a process that has loaded this must not fork, and pytest's own never loads it.
"""

from __future__ import annotations

import atexit
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from tests.device.zsim import module
from tests.device.zsim.library import _zsim

__all__ = [
    "SCHEDULES",
    "host_waits",
    "launched_operators",
    "name_collectives",
    "register_host",
    "schedule",
    "set_delay",
    "set_memory_limit",
    "set_schedule",
    "synchronous_operators",
    "take_collectives",
    "take_log",
    "unregister_host",
]

SCHEDULES = ("threads", "fifo", "random", "compute_first", "compute_last")


def set_schedule(name: str, seed: int = 0) -> None:
    """Decide when lanes run, after waiting for all of them.

    ``threads``: a thread per lane, at once. The others run tasks one at a time, only while the host
    waits, and repeat exactly: in the order of their launches (``fifo``), in any order that events
    allow (``random``, by `seed`), the default stream before all others (``compute_first``), or
    after them (``compute_last``).
    """
    if name not in SCHEDULES:
        raise ValueError(f"no schedule {name!r}: one of {', '.join(SCHEDULES)}")
    _zsim.set_schedule(name, seed)


def schedule() -> str:
    """Return the name of the schedule."""
    return str(_zsim.schedule())


def host_waits() -> dict[str, int]:
    """Return how often the host has waited for a lane since the start, by reason."""
    return dict(_zsim.host_waits())


def synchronous_operators() -> dict[str, int]:
    """Return how often each operator made the host wait since the start, by name."""
    return dict(_zsim.synchronous_operators())


def launched_operators() -> dict[str, int]:
    """Return how often each operator was put on a lane since the start, by name."""
    return dict(_zsim.launched_operators())


def set_delay(stream: torch.Stream | torch.device | int, microseconds: int) -> None:
    """Delay each task of a stream, or of all streams of a device (given as device or index).

    Only ``threads`` has time: the other schedules run without delay.
    """
    if isinstance(stream, torch.Stream):
        _zsim.set_delay(stream.device_index, stream.stream_id, microseconds)
    else:
        _zsim.set_delay(module._index(stream), -1, microseconds)


def set_memory_limit(bytes: int, device: int = 0) -> None:
    """Set how many bytes a device has; what is allocated already stays."""
    _zsim.set_memory_limit(bytes, device)


def take_log(on: bool) -> list[str]:
    """Return the tasks that ran since the last call, each "device.stream:name"; `on`: write on."""
    return list(_zsim.take_log(on))


def take_collectives() -> list[str]:
    """Return the collectives of all groups that were launched since the last call, in order, each
    "stream|group|its size|kind|dtype|what for".
    """
    return list(_zsim.take_collectives())


def name_collectives(name: str) -> None:
    """Say what the collectives to come are for."""
    _zsim.name_collectives(name)


def register_host(address: int, bytes: int) -> None:
    """Make host memory pinned, as ``cudaHostRegister`` does."""
    _zsim.register_host(address, bytes)


def unregister_host(address: int) -> None:
    """End what `register_host` began."""
    _zsim.unregister_host(address)


def _process_group(
    store: torch._C._distributed_c10d.Store, rank: int, size: int, timeout: timedelta
) -> dist.Backend:
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    group: dist.Backend = _zsim.zccl_over(gloo, timeout)
    return group


def _register() -> None:
    rename_privateuse1_backend("zsim")
    torch._register_device_module("zsim", module)  # type: ignore[no-untyped-call]
    generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("zccl", _process_group, devices=["zsim"])
    # Lanes end before the libraries that they run do, unless they wait for a peer that is gone.
    atexit.register(_zsim.finish, 10.0)


_register()
