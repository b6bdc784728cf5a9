"""What a benchmark leaves behind: frozen records that go to JSON and come back, raw numbers
included.

A **run** is one size, precision and number of ranks; it holds one record per contender and one per
comparison. Nothing derived is stored that cannot be computed again from the raw numbers, except
what makes a file readable by itself.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.stats import Interval, bootstrap_median

__all__ = ["ComparisonResult", "ContenderResult", "Largest", "Report", "Run", "machine_facts"]

FORMAT = 1
KINDS = ("step", "overhead", "offload")


@dataclass
class ContenderResult:
    """One contender in one run. Bytes are of the rank that needs most."""

    name: str
    skipped: str = ""  # why it could not run; everything below is empty then
    # skipped because something broke, rather than because something is not installed
    failed: bool = False
    facts: dict[str, Any] = field(default_factory=dict)  # units, versions, ...
    losses: list[float] = field(default_factory=list)  # mean over ranks, from the first step on
    step_s: list[float] = field(default_factory=list)  # every timed step of rank 0
    warmup_step_s: list[float] = field(default_factory=list)  # every step before, nobody waiting
    live_after_backward: int = 0  # bytes of live tensor storages
    live_after_update: int = 0
    # when -> device type -> those bytes, on rank 0
    live_by_device: dict[str, dict[str, int]] = field(default_factory=dict)
    # this library's own account, after backward and after update
    memory: dict[str, Any] = field(default_factory=dict)
    base_bytes: int = 0  # resident after the imports
    peak_bytes: int = 0  # highest resident
    device_peak_bytes: int = 0  # highest on the accelerator, once the model was built
    wire_bytes: float = 0.0  # per rank and step, by the interface's counters
    wire_exclusive: bool = False  # whether that interface carried nothing else
    payload_bytes: float | None = None  # per rank and step, by this library's own count
    # [name, ms per step, calls per step], most expensive first
    operators: list[list[Any]] = field(default_factory=list)

    @property
    def above_imports(self) -> int:
        """Peak resident bytes above what the imports take."""
        return self.peak_bytes - self.base_bytes


@dataclass
class ComparisonResult:
    """A contender beside a reference: seconds of every pair of turns."""

    contender: str
    reference: str
    target: float | None
    steps: int  # timed steps per turn
    # [contender's seconds, reference's seconds]
    pairs: list[list[float]] = field(default_factory=list)

    @property
    def ratio(self) -> Interval:
        """How many times as fast as the reference the contender is."""
        return bootstrap_median([reference / contender for contender, reference in self.pairs])

    @property
    def difference_s(self) -> Interval:
        """Seconds per step that the contender takes more than the reference."""
        return bootstrap_median(
            [(contender - reference) / self.steps for contender, reference in self.pairs]
        )


@dataclass
class Run:
    """All contenders at one size and precision."""

    size: str
    precision: str
    num_ranks: int
    threads: int
    device: str
    num_parameters: int
    tokens: int  # per rank and step; 0 where nothing but an optimizer step runs
    contenders: list[ContenderResult] = field(default_factory=list)
    comparisons: list[ComparisonResult] = field(default_factory=list)

    def contender(self, name: str) -> ContenderResult | None:
        """Return the record of contender `name`, if it ran."""
        return next((c for c in self.contenders if c.name == name and not c.skipped), None)


@dataclass
class Largest:
    """The largest model that trained, found by doubling the number of layers, with states on one
    tier.
    """

    tier: str
    contender: str
    num_parameters: int  # 0: not even the smallest
    layers: int
    step_s: float
    device_peak_bytes: int
    device_bytes: int  # what it was allowed to use
    stopped: str  # why the next doubling was not trained


@dataclass
class Report:
    """One call of the benchmark."""

    kind: str  # one of KINDS
    command: list[str]
    started: str
    machine: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    largest: list[Largest] = field(default_factory=list)
    # what was asked for and not measured, and why
    left_out: list[str] = field(default_factory=list)
    format: int = FORMAT

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json() + "\n")

    def to_json(self) -> str:
        """Return as JSON."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def load(path: Path) -> Report:
        """Read what `save` wrote; raises ValueError when it is something else."""
        data = json.loads(path.read_text())
        if (
            not isinstance(data, dict)
            or data.get("format") != FORMAT
            or data.get("kind") not in KINDS
        ):
            raise ValueError(f"{path} is not a result of `zeroshard bench` (format {FORMAT})")
        runs = []
        for run in data.pop("runs"):
            contenders = [ContenderResult(**item) for item in run.pop("contenders")]
            comparisons = [ComparisonResult(**item) for item in run.pop("comparisons")]
            runs.append(Run(**run, contenders=contenders, comparisons=comparisons))
        largest = [Largest(**item) for item in data.pop("largest", [])]
        return Report(**data, runs=runs, largest=largest)


def machine_facts() -> dict[str, Any]:
    """Return what a reader needs to judge the numbers: processor, memory, kernel, load."""
    processor, flags = platform.processor() or platform.machine(), ""
    memory_bytes = 0
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                processor = value.strip()
            if key.strip() == "flags":
                flags = " ".join(
                    flag
                    for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
                    if flag in value.split()
                )
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": processor,
        "flags": flags,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_before": list(os.getloadavg()),
    }
