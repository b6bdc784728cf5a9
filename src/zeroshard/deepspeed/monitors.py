"""Lines of the log, and files, for the keys of a configuration that only watch.

    wall_clock_breakdown   milliseconds of forward, backward and step
    memory_breakdown       engine.memory()
    comms_logger           engine.traffic(), since the line before
    flops_profiler         operations of the forward of profile_step
    csv_monitor            OUTPUT_PATH/JOB_NAME/Train_Samples_lr.csv ...
    tensorboard, wandb     the same numbers, where the package of that name is installed

The numbers are loss, rate and scale of each step; with ``wall_clock_breakdown`` milliseconds, too.
Lines come at the steps of ``steps_per_print`` (each step without it), on rank 0. Cost: nothing
where the keys are off; times wait for the accelerator.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import zeroshard as zs
from zeroshard.deepspeed.helpers import logger as _log
from zeroshard.deepspeed.shim import remedy

Event = tuple[str, Any, int]  # a name, a number, and the samples so far
Write = Callable[[list[Event], bool], None]  # events, and whether they are on disk then


def _is_on(config: dict[str, Any], name: str) -> bool:
    value = config.get(name)
    return bool(value.get("enabled")) if isinstance(value, dict) else value is True


class MonitorMaster:
    """Writes numbers where the sections `_MONITORS` of the configuration say, on rank 0."""

    def __init__(self, config: dict[str, Any], rank: int = 0) -> None:
        """`config` is the whole configuration."""
        asked = [name for name in _MONITORS if _is_on(config, name)]
        self.enabled = bool(asked)
        self._writes: dict[str, Write] = {}  # by the section's name
        for name in asked if rank == 0 else ():
            try:
                section = config[name] if isinstance(config[name], dict) else {}
                self._writes[name] = _MONITORS[name](section)
            except ImportError:
                package = name.partition("_")[0]
                _log.warning(
                    "%s: nothing is written without its package: pip install %s", name, package
                )
            except Exception as error:  # another rank would wait for this one
                _log.warning("%s: nothing is written: %s", name, error)

    def write_events(self, event_list: list[Event], flush: bool = True) -> None:
        """Write (name, number, samples so far) of each event. A monitor that cannot, says so once,
        and writes no more.
        """
        for name, write in list(self._writes.items()):
            try:
                write(event_list, flush)
            except Exception as error:  # another rank would wait for this one
                del self._writes[name]
                _log.warning("%s: nothing more is written: %s", name, error)


def _folder(section: dict[str, Any]) -> Path:
    """Make and return the directory of a section."""
    job: str = section.get("job_name", "DeepSpeedJobName")
    folder = Path(section.get("output_path") or "") / job
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _csv(section: dict[str, Any]) -> Write:
    folder = _folder(section)

    def write(events: list[Event], flush: bool) -> None:
        for name, value, step in events:
            path = folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            is_new = not path.exists()
            with path.open("a", newline="", encoding="utf-8") as file:
                rows = csv.writer(file)
                if is_new:
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([step, value])

    return write


def _tensorboard(section: dict[str, Any]) -> Write:
    from torch.utils.tensorboard import SummaryWriter

    summary: Any = SummaryWriter(str(_folder(section)))

    def write(events: list[Event], flush: bool) -> None:
        for event in events:
            summary.add_scalar(*event)
        if flush:
            summary.flush()

    return write


def _wandb(section: dict[str, Any]) -> Write:
    import wandb

    project = section.get("project", "deepspeed")
    wandb.init(project=project, group=section.get("group"), entity=section.get("team"))

    def write(events: list[Event], flush: bool) -> None:
        for name, value, step in events:
            wandb.log({name: value}, step=step)

    return write


_MONITORS = {"csv_monitor": _csv, "tensorboard": _tensorboard, "wandb": _wandb}


class ThroughputTimer:
    """Counts samples per second between ``start()`` and ``stop(global_step=True)``."""

    def __init__(self, batch_size: int, start_step: int = 2) -> None:
        """The first `start_step` steps are not counted: they warm up."""
        self.batch_size = batch_size
        self.start_step = start_step
        self.global_step_count = self.epoch_count = self.micro_step_count = 0
        self.total_elapsed_time = 0.0
        self._begin: float | None = None

    def __getattr__(self, name: str) -> Any:
        otherwise = "avg_samples_per_sec() is; wall_clock_breakdown in the configuration logs times"
        raise AttributeError(remedy("the throughput timer", name, {}, otherwise))

    def update_epoch_count(self) -> None:
        """Begin another epoch."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Begin a stretch of time."""
        self._begin = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """End it; with `global_step` it ends a step, too."""
        if self._begin is None:
            return
        self.micro_step_count += 1
        self.global_step_count += global_step
        if self.global_step_count > self.start_step:
            self.total_elapsed_time += time.perf_counter() - self._begin
        self._begin = None

    def avg_samples_per_sec(self) -> float:
        """Return the samples of a second so far; minus infinity where no step was counted."""
        steps = self.global_step_count - self.start_step
        if steps <= 0 or not self.total_elapsed_time:
            return float("-inf")
        return self.batch_size * steps / self.total_elapsed_time


class StepWatch:
    """Shows what one engine's configuration asks for."""

    def __init__(self, config: dict[str, Any], engine: zs.Engine, batch_size: int) -> None:
        self._config = config
        self._engine = engine
        self._seconds: dict[str, float] = {}  # of the step under way, by part
        self._losses: list[torch.Tensor] = []  # of the step under way
        self.monitor = MonitorMaster(config, engine.rank)
        self.tput_timer = ThroughputTimer(batch_size)
        if _is_on(config, "dump_state") and engine.rank == 0:
            _log.info("configuration: %s", config)

    @contextmanager
    def part(self, name: str, step: int) -> Iterator[None]:
        """Time what happens inside; count its operations where `step` is the profiled one."""
        profiler = self._config.get("flops_profiler") or {}
        counts = name == "forward" and _is_on(self._config, "flops_profiler")
        counts = counts and step + 1 == profiler.get("profile_step", 1)
        times = _is_on(self._config, "wall_clock_breakdown")
        with ExitStack() as stack:
            flops = stack.enter_context(FlopCounterMode(display=False)) if counts else None
            begin = _now() if times else 0.0
            yield
        if times:
            self._seconds[name] = self._seconds.get(name, 0.0) + _now() - begin
        if flops is not None and self._engine.rank == 0:
            parameters = sum(one.numel() for one in self._engine.module.parameters())
            _log.info(
                "flops_profiler: step=%d, forward=%d operations of this rank, parameters=%d",
                step + 1, flops.get_total_flops(), parameters,
            )  # fmt: skip

    def saw(self, loss: Any) -> None:
        """Note a micro-batch's loss."""
        if self.monitor.enabled and isinstance(loss, torch.Tensor) and self._engine.rank == 0:
            self._losses.append(loss.detach().float().mean())

    def end_step(self, step: int, samples: int, rates: list[Any]) -> None:
        """Show what is asked for, after `step` steps."""
        if self._engine.rank == 0:
            if self.monitor.enabled:
                self.monitor.write_events(list(self._events(samples, rates)))
            every = self._config.get("steps_per_print")
            every = every if isinstance(every, (int, float)) and every else 1
            for line in self._lines() if step % every == 0 else ():
                _log.info("step=%d, %s", step, line)
        self._seconds.clear()
        self._losses.clear()

    def _events(self, samples: int, rates: list[Any]) -> Iterator[Event]:
        if self._losses:
            yield "Train/Samples/train_loss", torch.stack(self._losses).mean().item(), samples
        yield "Train/Samples/lr", float(rates[0]), samples
        for part, seconds in self._seconds.items():
            yield f"Train/Samples/elapsed_time_ms_{part}", seconds * 1e3, samples
        if self._engine.precision.needs_loss_scaling:
            yield "Train/Samples/loss_scale", self._engine.loss_scale, samples

    def _lines(self) -> Iterator[str]:
        if self._seconds:
            yield "ms: " + ", ".join(f"{k}={v * 1e3:.2f}" for k, v in self._seconds.items())
        if _is_on(self._config, "memory_breakdown"):
            memory = self._engine.memory()
            states = ", ".join(f"{name}={count}" for name, count in memory.at_rest.items())
            yield f"bytes at rest: {states}; peak of gathered and buffers={memory.peak}"
        if _is_on(self._config, "comms_logger"):
            traffic = self._engine.traffic()
            self._engine.reset_traffic()
            yield "bytes received: " + ", ".join(f"{k}={v}" for k, v in traffic.bytes.items())


def _now() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()
