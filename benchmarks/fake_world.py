"""The CPU time of the engine itself beside FSDP2's, in a world that does not exist:
``zeroshard bench overhead --fake-world 8``.

One process is rank 0 of a process group whose collectives only copy (torch's fake backend), so a
step is Python, dispatch and next to no arithmetic: 50 units of 8 parameters, one thread, the NCCL
transport on CPU tensors, gradients clipped. Plain PyTorch, stage 3 and FSDP2 train the same model
in turn (A B A B); a contender's time is its CPU time less plain PyTorch's in the same round,
divided by units and steps.

Invariant: each round times all three on the same machine. What it does not do: measure
communication, or devices.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ReduceScatterOptions
from torch.nn.utils import clip_grad_norm_

import zeroshard as zs
from benchmarks.contenders import adamw
from benchmarks.results import machine_facts
from benchmarks.stats import Interval, bootstrap_median
from benchmarks.tables import grid, publish
from zeroshard.comm import select
from zeroshard.comm.groups import group_reduce_scatter
from zeroshard.comm.ranks import Ranks
from zeroshard.comm.transport import Traffic
from zeroshard.errors import ConfigError
from zeroshard.system.device import Device
from zeroshard.terminal import progress

__all__ = ["Options", "fake_group", "fake_world", "measure", "run"]

_WIDTH = 16
_WARMUP = 3  # steps: the first two trace what they prefetch
_CONTENDERS = ("zero3", "fsdp2")


@dataclass(frozen=True)
class Options:
    """What to measure."""

    world: int = 8
    units: int = 50
    steps: int = 5  # timed steps per turn
    rounds: int = 12


class _Block(nn.Module):
    """Eight parameters in four modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.layers = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        residual, hidden = hidden, self.norm(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        return residual + hidden


class _FakeControl(Ranks):
    """A control plane whose other ranks say what this one says."""

    def __init__(self, *_: Any) -> None:
        super().__init__(0, dist.get_world_size())
        self.name = "shared_memory"
        self.traffic = Traffic()
        self.stall_timeout_s = 60.0
        self.notices = None

    def exchange(self, payload: bytes, call: str = "exchange()") -> list[bytes]:
        return [payload] * self.size


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """Be rank 0 of `size`, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with fake_group(size):
            yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def fake_group(size: int) -> Iterator[None]:
    """Be rank 0 of `size` in a process group whose collectives only copy: what comes from other
    ranks has the numbers of this one.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ConfigError("--fake-world makes a process group of its own, and there is one already")
    accelerator = Device.accelerator()
    backend = "fake" if accelerator is None else f"cpu:fake,{accelerator.type}:fake"
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=size)
    try:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(select, "make_control", _FakeControl))
            if not _copies(size):
                for name in ("reduce_scatter_tensor", "all_to_all_single"):
                    copying = _copying(getattr(dist, name))
                    stack.enter_context(mock.patch.object(dist, name, copying))
                ours = _copying_method(group_reduce_scatter)
                stack.enter_context(
                    mock.patch("zeroshard.comm.native_transport.group_reduce_scatter", ours)
                )
            yield
    finally:
        dist.destroy_process_group()


def _copies(size: int) -> bool:
    """Whether the fake backend of this torch writes to the outputs of every collective: before 2.13
    they stay as they were, often NaN.
    """
    out = torch.zeros(1)
    group_reduce_scatter(dist.group.WORLD, out, torch.ones(size), ReduceScatterOptions())
    return bool(out)


def _copying(collective: Callable[..., Any]) -> Callable[..., Any]:
    """Return `collective`, and write the first numbers of its input to its output."""

    def call(output: torch.Tensor, input: torch.Tensor, *args: Any, **options: Any) -> Any:
        work = collective(output, input, *args, **options)
        numel = min(output.numel(), input.numel())
        output.view(-1)[:numel].copy_(input.view(-1)[:numel])
        output.view(-1)[numel:].zero_()
        return work

    return call


def _copying_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same for a `method` of a process group."""

    def call(group: Any, output: torch.Tensor, input: torch.Tensor, options: Any) -> Any:
        return _copying(lambda output, input: method(group, output, input, options))(output, input)

    return call


def measure(options: Options, advance: Callable[[], None] = lambda: None) -> dict[str, list[float]]:
    """Return, per contender and "plain", the CPU seconds of a step in every round. Calls
    `advance` after each round.
    """
    with fake_world(options.world):
        turns = {name: _trainee(name, options) for name in ("plain", *_CONTENDERS)}
        for step in turns.values():
            _cpu_s(step, _WARMUP)
        seconds: dict[str, list[float]] = {name: [] for name in turns}
        for _ in range(options.rounds):
            for name, step in turns.items():
                seconds[name].append(_cpu_s(step, options.steps))
            advance()
    return seconds


def _trainee(name: str, options: Options) -> Callable[[], None]:
    """Return one training step of contender `name`."""
    torch.manual_seed(0)
    model = nn.Sequential(*(_Block() for _ in range(options.units)))
    if name == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (options.world,))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
    optimizer = adamw(model.parameters())
    clip: Callable[[float], object] = partial(clip_grad_norm_, list(model.parameters()))
    if name == "zero3":
        comm = zs.Comm(transport="nccl")
        clip = zs.shard(model, optimizer, stage=3, units=[_Block], comm=comm).clip_grad_norm_
    data = torch.randn(4, _WIDTH)

    def step() -> None:
        model(data).pow(2).mean().backward()
        clip(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _cpu_s(step: Callable[[], None], steps: int) -> float:
    """Return the CPU seconds of this process per step."""
    begin = time.process_time()
    for _ in range(steps):
        step()
    return (time.process_time() - begin) / steps


def _us_per_unit(name: str, seconds: dict[str, list[float]], units: int) -> Interval:
    pairs = zip(seconds[name], seconds["plain"], strict=True)
    return bootstrap_median([1e6 * (own - plain) / units for own, plain in pairs])


def run(options: Options, *, out: Path | None, as_json: bool) -> int:
    """Measure, and print a table (or JSON). Raises ConfigError inside a process group."""
    machine = machine_facts()
    with progress("fake world", options.rounds) as bar:
        seconds = measure(options, bar.advance)
    own = {name: _us_per_unit(name, seconds, options.units) for name in _CONTENDERS}
    facts = {
        "kind": "fake-world",
        "machine": machine,
        **asdict(options),
        "torch": torch.__version__,
        "cpu_s_per_step": seconds,
        "us_per_unit_and_step": {name: asdict(interval) for name, interval in own.items()},
    }
    title = (
        f"CPU time less plain PyTorch's, rank 0 of a fake world of {options.world}, {options.units}"
        f" units of 8 parameters, one thread, median of {options.rounds} rounds of {options.steps}"
        " steps"
    )
    rows = [
        (name, f"{interval.median:.0f}", f"{interval.low:.0f} to {interval.high:.0f}")
        for name, interval in own.items()
    ]
    table = grid(title, ("contender", "µs per unit and step", "95% interval"), rows)
    return publish(facts, [table], (), out=out, as_json=as_json)
