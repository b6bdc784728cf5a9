"""The parts of ``zeroshard bench offload`` beside whole training steps (which `driver` takes): a
step by itself, and the largest model.

    host step   the streamed step of states on the host, beside torch's fused AdamW on one tensor of
                as many elements: with the weights on the host too, so that stepping is all there
                is; and "weights back" to the device (on a CPU that is one more pass over memory)
    backward    the same step after the backward, and in it (``step_in_backward``), on a link that
                takes the time of a bus: seconds of ``optimizer.step()`` until nothing of it is
                under way, and of an iteration with its forward and backward. The step is hidden
                by 1 - (in it / after it)
    disk step   the streamed step of states on disk: read | step | write, beside two bounds that are
                measured in the same turns:
                    raw      the same bytes read and written by plain threads (raw_disk.py), with no
                             step and no order among them
                    compute  the same step with the same states on the host: what it takes when the
                             disk takes no time
    largest     the model is doubled until it no longer trains, with states on one tier after the
                other

    copies      the bytes between host and device alone, from pinned and from pageable memory: what
                the link gives

Steps run in this process, through a real engine, on one thread; contenders take turns (A B C A B C
...) and the first round warms up. What is timed is the step of the tiles alone
(`TileRunner.step_s`): forward, backward and what the engine does with gradients are not in it;
``optimizer.step()``, until nothing of it is under way, has a row of its own.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import zeroshard as zs
from benchmarks.contenders import adamw
from benchmarks.driver import ContenderError, Group, Options
from benchmarks.paced_link import Paced
from benchmarks.plan import LARGEST, LARGEST_SIZE, Size
from benchmarks.raw_disk import Options as DiskOptions
from benchmarks.raw_disk import Raw
from benchmarks.results import ComparisonResult, ContenderResult, Largest, Run
from zeroshard.core.placement import Tier
from zeroshard.runtime.engine import states_of
from zeroshard.sharding import api
from zeroshard.tier.disk import DiskStore
from zeroshard.tier.swapdir import SwapDirectory

__all__ = [
    "BACKWARD_TARGET",
    "DISK_TARGET",
    "HOST_TARGET",
    "OVERLAP_TARGET",
    "backward_step",
    "copies",
    "disk_step",
    "host_step",
    "largest",
]

HOST_TARGET = 0.9  # of torch's elements per second
DISK_TARGET = 0.85  # of the raw bandwidth
OVERLAP_TARGET = 1 / 1.15  # of the speed that the slower of disk and computation allows
BACKWARD_TARGET = 1 / 0.3  # seconds of the step after the backward by those in it: 70% are hidden
_WIDTH = 2048
_NARROW = 512  # many layers: sums of the last two to come are not seen to arrive in the backward
_ROWS = 512  # of a micro-batch, with which the backward is as long as the step or longer
_LINK = 8e9  # bytes per second, each way
_PIECE = 1 << 20  # elements: as many as a tile has by default
# bytes per parameter that must be free for an attempt: states, and what pinning rounds up
_RESERVE = {Tier.HOST: 24, Tier.DISK: 20}

Advance = Callable[[str], None]


class _Rig:
    """A stack of square layers whose states rest where `offload` says, in this process."""

    def __init__(
        self, numel: int, row: str, offload: zs.Offload, *, widest: int = _WIDTH, rows: int = 1
    ) -> None:
        width = min(widest, max(1, math.isqrt(numel)))
        torch.manual_seed(0)
        self._model = nn.Sequential(
            *(nn.Linear(width, width, bias=False) for _ in range(max(1, numel // width**2)))
        )
        for parameter in self._model.parameters():
            parameter.data *= math.sqrt(3)  # as large after many layers: denormal numbers are slow
        self.numel = sum(parameter.numel() for parameter in self._model.parameters())
        self._optimizer = adamw(self._model.parameters())
        self._engine = zs.shard(self._model, self._optimizer, policy=row, offload=offload)
        self._input = torch.randn(rows, width)
        sharded = self._engine._sharded
        assert sharded is not None, offload
        self._runner = sharded.runner
        self.whole_s = 0.0  # of the last step, from the call until nothing of it is under way
        self.iteration_s = 0.0  # with the forward and the backward

    def step(self) -> float:
        """Make a gradient, step, and return the seconds of the tiles."""
        start = time.perf_counter()
        self._model(self._input).square().sum().backward()
        for store in self._engine._context.tiering.stores.values():
            for storage in getattr(store, "storages", []) if store.tier is Tier.DISK else []:
                storage.flush()  # gradients on their way to the disk are the backward's
        begin = time.perf_counter()
        self._optimizer.step()
        states_of(self._engine).join_step()
        self.whole_s = time.perf_counter() - begin
        self.iteration_s = time.perf_counter() - start
        self._optimizer.zero_grad()
        return self._runner.step_s

    def close(self) -> None:
        self._engine.close()


class _Torch:
    """torch's fused AdamW on `numel` elements, in tensors of at most `piece`."""

    def __init__(self, numel: int, piece: int) -> None:
        whole, grad = torch.split(torch.randn(numel), piece), torch.split(torch.randn(numel), piece)
        self._parameters = [nn.Parameter(part) for part in whole]
        for parameter, part in zip(self._parameters, grad, strict=True):
            parameter.grad = part
        self._optimizer = adamw(self._parameters)

    def step(self) -> float:
        begin = time.perf_counter()
        self._optimizer.step()
        return time.perf_counter() - begin


class _Plain:
    """The bytes of a step on disk, moved by plain threads: three states each way, and the
    gradient if it is read, too.
    """

    def __init__(self, numel: int, path: Path, *, with_gradient: bool) -> None:
        self._store = DiskStore(SwapDirectory(path, rank=0, run="plain"), torch.device("cpu"))
        self.direct = self._store.direct
        self._states = self._raw(12 * numel)
        self._gradient = self._raw(4 * numel) if with_gradient else None

    def _raw(self, num_bytes: int) -> Raw:
        raw = Raw(
            self._store,
            DiskOptions(path=None, num_bytes=num_bytes, rounds=0, queue_depth=8, verify=False),
        )
        raw.turn("write")  # what was never written is not read from the disk either
        return raw

    def step(self) -> float:
        begin = time.perf_counter()
        self._states.turn("mix")
        if self._gradient is not None:
            self._gradient.turn("read")
        return time.perf_counter() - begin

    def close(self) -> None:
        for raw in (self._states, self._gradient):
            if raw is not None:
                raw.close()
        self._store.close()


def _turns(
    ways: dict[str, Callable[[], float]], pairs: int, advance: Advance
) -> dict[str, list[float]]:
    """Return the seconds of every way of doing it, round by round."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for number in range(pairs + 1):
            for name, way in ways.items():
                taken = way()
                if number:
                    seconds[name].append(taken)
            advance(f"round {number}")
    finally:
        torch.set_num_threads(threads)
    return seconds


def _run(
    title: str,
    numel: int,
    seconds: dict[str, list[float]],
    moved: dict[str, int],
    targets: Sequence[tuple[str, str, float | None]],
) -> Run:
    run = Run(title, "fp32", 1, 1, "cpu", numel, 0)
    run.contenders = [
        ContenderResult(
            name,
            facts={
                "bytes": moved.get(name, 0),
                "versions": {"torch": torch.__version__, "zeroshard": zs.__version__},
            },
            step_s=taken,
        )
        for name, taken in seconds.items()
    ]
    for ours, other, target in targets:
        pairs = [[a, b] for a, b in zip(seconds[ours], seconds[other], strict=True)]
        run.comparisons.append(ComparisonResult(ours, other, target, 1, pairs))
    return run


def copies(
    num_bytes: int, pairs: int, advance: Advance = lambda _: None, device: str = "cuda"
) -> Run:
    """Measure copies of `num_bytes` between `device` and the host, each way."""
    away = device != "cpu"
    near = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    hosts = {
        "pinned": torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=away),
        "pageable": torch.zeros(num_bytes, dtype=torch.uint8),
    }

    def way(out: torch.Tensor, source: torch.Tensor) -> Callable[[], float]:
        def copy() -> float:
            begin = time.perf_counter()
            out.copy_(source, non_blocking=True)
            if away:
                torch.cuda.synchronize()
            return time.perf_counter() - begin

        return copy

    ways = {f"to the host, {kind}": way(host, near) for kind, host in hosts.items()}
    ways |= {f"to the device, {kind}": way(near, host) for kind, host in hosts.items()}
    seconds = _turns(ways, pairs, advance)
    targets = [
        (f"{to}, pinned", f"{to}, pageable", None) for to in ("to the host", "to the device")
    ]
    return _run("copies", num_bytes, seconds, dict.fromkeys(ways, num_bytes), targets)


def host_step(numel: int, pairs: int, advance: Advance = lambda _: None) -> Run:
    """Measure the streamed step of about `numel` elements whose master, moments and gradient
    rest on the host.
    """
    rig = _Rig(numel, "zero3", zs.Offload(weight="host", grad="host", optimizer="host"))
    bringing = _Rig(numel, "zero2", zs.Offload(grad="host", optimizer="host"))
    one, many = _Torch(rig.numel, rig.numel), _Torch(rig.numel, _PIECE)
    ours, brought, whole = "host step", "host step, weights back", "optimizer.step(), weights back"
    theirs, pieces = "torch AdamW", "torch AdamW, tensors of 1 Mi"
    whole_s: list[float] = []

    def bring() -> float:
        taken = bringing.step()
        whole_s.append(bringing.whole_s)
        return taken

    seconds = _turns(
        {ours: rig.step, theirs: one.step, brought: bring, pieces: many.step}, pairs, advance
    )
    seconds[whole] = whole_s[1:]
    rig.close()
    bringing.close()
    targets = [
        (ours, theirs, HOST_TARGET),
        (ours, pieces, None),
        (brought, theirs, None),
        (whole, theirs, None),
    ]
    return _run("host step", rig.numel, seconds, {}, targets)


def backward_step(numel: int, pairs: int, advance: Advance = lambda _: None) -> Run:
    """Measure the host's step of about `numel` elements after the backward and in it."""

    def rig(**options: Any) -> _Rig:
        link = Paced(_LINK)
        with mock.patch.object(api, "link_of", lambda device: link):
            offload = zs.Offload(grad="host", optimizer="host", **options)
            return _Rig(numel, "zero2", offload, widest=_NARROW, rows=_ROWS)

    rigs = {"after the backward": rig(), "in it": rig(step_in_backward=True)}
    iterations: dict[str, list[float]] = {name: [] for name in rigs}

    def step(name: str) -> float:
        rigs[name].step()
        iterations[name].append(rigs[name].iteration_s)
        return rigs[name].whole_s

    ways: dict[str, Callable[[], float]] = {
        f"optimizer.step(), {name}": partial(step, name) for name in rigs
    }
    seconds = _turns(ways, pairs, advance)
    for name, taken in iterations.items():
        seconds[f"iteration, {name}"] = taken[1:]
    after, ahead, whole, whole_ahead = seconds
    numel = rigs["in it"].numel
    for one in rigs.values():
        one.close()
    targets = [(ahead, after, BACKWARD_TARGET), (whole_ahead, whole, None)]
    return _run("step in the backward", numel, seconds, {}, targets)


def disk_step(
    numel: int,
    pairs: int,
    path: Path,
    *,
    grad: str,
    verify: bool = False,
    advance: Advance = lambda _: None,
) -> Run:
    """Measure the streamed step of about `numel` elements with master and moments on the disk
    below `path`, the gradient on `grad`.
    """
    on_disk = grad == "disk"
    rig = _Rig(
        numel,
        "zero2",
        zs.Offload(
            grad="disk" if on_disk else "device",
            optimizer="disk",
            disk_path=str(path),
            verify=verify,
        ),
    )
    host = _Rig(numel, "zero2", zs.Offload(grad="host" if on_disk else "device", optimizer="host"))
    plain = _Plain(rig.numel, path, with_gradient=on_disk)
    try:
        seconds = _turns(
            {"disk step": rig.step, "raw": plain.step, "compute": host.step}, pairs, advance
        )
    finally:
        plain.close()
        rig.close()
        host.close()
    seconds["max(raw, compute)"] = [
        max(both) for both in zip(seconds["raw"], seconds["compute"], strict=True)
    ]
    moved = (28 if on_disk else 24) * rig.numel  # master and two moments each way, and the gradient
    targets = [
        ("disk step", "raw", DISK_TARGET),
        ("disk step", "max(raw, compute)", OVERLAP_TARGET),
    ]
    way = "" if plain.direct else ", BUFFERED (no O_DIRECT there)"
    title = f"disk step, gradient on {'disk' if on_disk else 'the device'}{way}"
    return _run(title, rig.numel, seconds, {"disk step": moved, "raw": moved}, targets)


def largest(
    tier: str,
    precision: str,
    options: Options,
    *,
    seconds: float,
    size: Size = LARGEST_SIZE,
    max_layers: int = 1 << 12,
    advance: Advance = lambda _: None,
) -> Largest:
    """Double the layers of `size` while the model trains two steps with its states on `tier`,
    for at most about `seconds`.

    Every attempt has processes of its own. An attempt that host memory or disk could not hold is
    not begun.
    """
    begin = time.monotonic()
    found = Largest(tier, LARGEST[tier], 0, 0, 0.0, 0, options.device_bytes or 0, "")
    layers, last_s = size.layers, 0.0
    while not found.stopped:
        attempt = replace(size, layers=layers)
        left_s = seconds - (time.monotonic() - begin)
        if layers > max_layers:
            found.stopped = f"{max_layers} layers were all that was asked for"
        elif left_s < 2 * last_s or left_s <= 0:
            found.stopped = f"time: {seconds:.0f} s were allowed"
        else:
            found.stopped = _no_room(Tier(tier), attempt, options)
        if found.stopped:
            break
        advance(f"{tier}: {attempt.num_parameters / 1e9:.2f} billion parameters")
        started = time.monotonic()
        try:
            step_s, peak = _attempt(
                LARGEST[tier], attempt, precision, replace(options, timeout_s=left_s)
            )
        except ContenderError as error:
            found.stopped = str(error).splitlines()[0]
            break
        last_s = time.monotonic() - started
        found = replace(
            found,
            num_parameters=attempt.num_parameters,
            layers=layers,
            step_s=step_s,
            device_peak_bytes=peak,
        )
        layers *= 2
    return found


def _attempt(contender: str, size: Size, precision: str, options: Options) -> tuple[float, int]:
    """Train two steps; return the seconds of the second and the device's peak."""
    group = Group(contender, size, precision, options)
    try:
        group.do("build")
        replies: list[dict[str, Any]] = group.do("train", settle=0, steps=2)["replies"]
        rest = group.do("rest")["replies"]
        return max(reply["step_s"][-1] for reply in replies), max(
            reply.get("device_peak", 0) for reply in rest
        )
    finally:
        group.close()


def _no_room(tier: Tier, size: Size, options: Options) -> str:
    """Return why host memory or disk cannot hold the states, or an empty string: the kernel
    would end us rather than say so.
    """
    if tier is Tier.DEVICE:
        return ""
    need = _RESERVE[tier] * size.num_parameters
    free = shutil.disk_usage(options.disk_path or ".").free if tier is Tier.DISK else _free_memory()
    what = "disk" if tier is Tier.DISK else "host memory"
    return (
        ""
        if need <= free
        else f"{what}: {need / 1e9:.0f} GB are wanted and {free / 1e9:.0f} GB are free"
    )


def _free_memory() -> int:
    """Return the bytes of host memory that this process may still take."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (
            (group / name).read_text().strip() for name in ("memory.max", "memory.current")
        )
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))
