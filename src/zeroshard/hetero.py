"""Ranks that are not alike: what each has and can do, and the shares that follow.

    measure(group, device)   on every rank: free memory, speed of products, of memory, of its link
    resolved(...)            ``shares="memory"`` or "auto" as numbers, and a log of why

States follow memory: a rank that rests more of them costs the others nothing, since every rank
gathers the whole and reduces the whole whatever the shares. Speed is for batches
(``Cluster.speeds``); a slow link is told, and changes nothing, since a rank receives the same
weights whatever it owns.

Invariant: every rank computes the shares from all ranks' answers, so that they are the same
everywhere. Cost: under two seconds for "auto", two exchanges of text for "memory".
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from zeroshard.comm.groups import on_cpu, ranks_through
from zeroshard.comm.select import has_native
from zeroshard.memory import synchronize
from zeroshard.system.device import Device
from zeroshard.system.this_host import HostMemory

_log = logging.getLogger("zeroshard")
_CALL = "zs.measure()"
_ALIKE = 1.05  # free memory that differs by less counts as equal
_DIGITS = 3  # of shares: more would be noise
_PRODUCT_S = 0.3
_COPY_S = 0.1
# on the CPU, and on an accelerator
_SIDES = 512, 4096
_COPY_BYTES = 32 << 20, 256 << 20
_LINK_BYTES = 1 << 20


@dataclass(frozen=True)
class RankFacts:
    """The memory and speed of one rank; rates are per second, 0.0 where not measured."""

    memory: int  # bytes that are free for states
    device: str = "cpu"
    flops: float = 0.0  # of products in fp32
    copied: float = 0.0  # bytes in its own memory
    sent: float = 0.0  # bytes to the others; inf for a single rank


@dataclass(frozen=True)
class Cluster:
    """The facts of all ranks, in rank order, the same on every one."""

    ranks: tuple[RankFacts, ...] = field(default=())

    @property
    def speeds(self) -> tuple[float, ...]:
        """The speed of each rank relative to all together: numbers that sum to 1."""
        return _relative([rank.flops for rank in self.ranks])

    @property
    def memory_shares(self) -> tuple[float, ...]:
        """The shares of states that follow free memory, of three digits, and equal where it
        differs by less than 5%.
        """
        free = [float(rank.memory) for rank in self.ranks]
        if max(free) <= _ALIKE * min(free):
            return (1 / len(free),) * len(free)
        rounded = [round(share, _DIGITS) for share in _relative(free)]
        largest = rounded.index(max(rounded))
        rounded[largest] = round(rounded[largest] + 1 - sum(rounded), _DIGITS)
        return tuple(rounded)

    def __str__(self) -> str:
        """Return a line per rank."""
        lines = []
        for number, one in enumerate(self.ranks):
            line = f"rank {number}: {one.memory / 2**30:.3g} GiB free ({one.device})"
            if one.flops:
                line += f", {one.flops / 1e9:.3g} GFLOP/s, {one.copied / 1e9:.3g} GB/s of memory"
            if 0.0 < one.sent < float("inf"):
                line += f", {one.sent / 1e9:.2g} GB/s to the others"
            lines.append(line)
        return "\n".join(lines)


def measure(group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> Cluster:
    """Measure all ranks of `group` (None: of the job, or this process alone) at the same time, as
    they share hosts while they train. Takes about a second. Collective.
    """
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    return _gathered(group, torch.device(device), rates=True)


def resolved(
    shares: str, group: dist.ProcessGroup | None, device: torch.device, own_bytes: int
) -> tuple[float, ...]:
    """Return `shares`, "memory" or "auto", as a number per rank of `group`; the first rank logs
    why. Collective.

    `own_bytes`: what of this rank's memory the model takes, which is about to become shards.
    """
    cluster = _gathered(group, device, rates=shares == "auto", own_bytes=own_bytes)
    numbers = cluster.memory_shares
    told = ", ".join(f"{number:.3g}" for number in numbers)
    is_equal = len(set(numbers)) == 1
    why = "free memory differs by less than 5%" if is_equal else "they follow free memory"
    text = f"shares={shares!r}: states {told} ({why})"
    if shares == "auto":
        speeds = ", ".join(f"{speed:.3g}" for speed in cluster.speeds)
        text += f"; batches at the ranks' speeds: batch_shares=[{speeds}]"
    if group is None or group.rank() == 0:
        _log.info("%s\n%s", text, cluster)
    return numbers


def free_memory(device: torch.device) -> int:
    """Return the bytes of the memory that states on `device` rest in that are free now."""
    if device.type == "cpu":
        return HostMemory.now().available
    return Device.of(device).free_bytes()


def _gathered(
    group: dist.ProcessGroup | None, device: torch.device, *, rates: bool, own_bytes: int = 0
) -> Cluster:
    of_all = partial(ranks_through(group).share, call=_CALL)
    free, place = free_memory(device), _memory_of(device)
    everyone = of_all((free, place, own_bytes))  # before anybody is busy with the rest
    sharing = Counter(where for _, where, _ in everyone)
    mine = free // sharing[place] + own_bytes
    facts = RankFacts(mine, str(device))
    if rates:
        sent = _link_seconds(group, device)
        worst = [max(column) for column in zip(*of_all(sent), strict=True)]
        rank = 0 if group is None else group.rank()
        side, num_bytes = _SIDES[device.type != "cpu"], _COPY_BYTES[device.type != "cpu"]
        a, b = (torch.randn(side, side, device=device) for _ in range(2))
        product_s = _mean_seconds(lambda: torch.matmul(a, b), device, _PRODUCT_S)
        here = torch.ones(num_bytes, dtype=torch.uint8, device=device)
        there = torch.empty_like(here)
        copy_s = _mean_seconds(lambda: there.copy_(here), device, _COPY_S)
        sent_s = _LINK_BYTES / worst[rank] if worst[rank] else float("inf")
        facts = RankFacts(mine, str(device), 2 * side**3 / product_s, num_bytes / copy_s, sent_s)
    return Cluster(tuple(RankFacts(**one) for one in of_all(asdict(facts))))


def _memory_of(device: torch.device) -> str:
    """Return a name of the memory that states on `device` rest in, which ranks that share it have
    in common: the device, the host, or the control group that limits it.
    """
    host = _text("/proc/sys/kernel/random/boot_id")
    if device.type != "cpu":
        return f"{host} {Device.of(device).facts()['uuid']}"
    limited = HostMemory.now().limit is not None
    return f"{host} {_text('/proc/self/cgroup')}" if limited else host


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _relative(numbers: Sequence[float]) -> tuple[float, ...]:
    total = sum(numbers)
    if not total:
        return (1 / len(numbers),) * len(numbers)
    return tuple(number / total for number in numbers)


def _mean_seconds(run: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Return the mean seconds of the runs that fit the budget, after one to warm up: a rank that
    is slowed down every now and then keeps no other pace.
    """
    seconds: list[float] = []
    while sum(seconds[1:]) < budget_s:
        begin = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return max(sum(seconds[1:]) / (len(seconds) - 1), 1e-9)


def _link_seconds(group: dist.ProcessGroup | None, device: torch.device) -> list[float]:
    """Return how long this rank waits for a message of `_LINK_BYTES` from each rank, its own
    being on its way to all others.
    """
    if group is None or group.size() == 1:
        return [0.0]
    where, served = device, group
    if not has_native(group, device):
        where, served = torch.device("cpu"), on_cpu(group)
    message = torch.zeros(_LINK_BYTES, dtype=torch.uint8, device=where)
    out = [float("inf")] * group.size()
    for number in range(3):  # as many on every rank
        for source, rank in enumerate(dist.get_process_group_ranks(group)):
            since = time.perf_counter()
            dist.broadcast(message, rank, group=served)
            synchronize(message.device)
            if number:  # the first connects
                out[source] = min(out[source], time.perf_counter() - since)
    return out
