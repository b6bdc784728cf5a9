"""``zeroshard bench kernels``: the work of a GPU in a step, by name, and the gaps in which it
waits, from the traces of ``zeroshard bench step --traces DIR``.

    kernels    how many run in a step, and for how long in all, those of one name together
    busy       the time in which any kernel, copy or fill runs
    gaps       the times in which none does, of more than `--gap-us`, and their neighbours

What it does not do: tell which Python waits for what; Chrome's trace viewer shows that.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.tables import grid, publish
from zeroshard.errors import ConfigError

__all__ = ["DeviceTrace", "Options", "read", "run"]

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_NAME = 70  # characters of a kernel's name that are shown


@dataclass(frozen=True)
class DeviceTrace:
    """The work of one GPU; times in ms, per step."""

    trace: str
    steps: int
    span_ms: float  # from the first kernel to the end of the last
    busy_ms: float
    num_kernels: float
    names: list[tuple[str, float, float]]  # name, ms, how many, most expensive first
    gaps: list[tuple[float, str, str]]  # us, the kernel before, the kernel after, longest first


def read(path: Path, *, steps: int, gap_us: float) -> DeviceTrace:
    """Read a trace of so many `steps`. Raises ConfigError where it is none, or of no GPU."""
    try:
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        events = json.loads(text)["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a trace of torch's profiler ({error})") from error
    found = sorted(
        (event["ts"], event["dur"], event["name"])
        for event in events
        if event.get("cat") in _ON_DEVICE and "dur" in event
    )
    if not found:
        raise ConfigError(f"{path}: no kernel of a GPU in it: trace with --device cuda")
    names: dict[str, list[float]] = {}
    gaps: list[tuple[float, str, str]] = []
    end, busy, last = found[0][0], 0.0, ""
    for begin, length, name in found:
        names.setdefault(name, []).append(length)
        if begin - end > gap_us:
            gaps.append((begin - end, last[:_NAME], name[:_NAME]))
        busy += max(0.0, begin + length - max(begin, end))
        if begin + length > end:
            end, last = begin + length, name
    sums = [
        (name[:_NAME], sum(each) / 1000 / steps, len(each) / steps) for name, each in names.items()
    ]
    return DeviceTrace(
        path.name,
        steps,
        (end - found[0][0]) / 1000 / steps,
        busy / 1000 / steps,
        len(found) / steps,
        sorted(sums, key=lambda one: -one[1]),
        sorted(gaps, reverse=True),
    )


@dataclass(frozen=True)
class Options:
    """What is read, and how much of it is shown."""

    files: Sequence[Path]
    steps: int = 3
    gap_us: float = 50.0
    top: int = 12


def run(options: Options, *, out: Path | None, as_json: bool) -> int:
    """Print a table of each trace (or JSON), and save all of it; return the exit code."""
    found = [read(file, steps=options.steps, gap_us=options.gap_us) for file in options.files]
    facts = {"kind": "kernels", "traces": [asdict(one) for one in found]}
    tables, notes = [], []
    for one in found:
        title = (
            f"{one.trace}: {one.num_kernels:.0f} kernels a step, busy {one.busy_ms:.1f} of"
            f" {one.span_ms:.1f} ms; {len(one.gaps)} gaps in {options.steps} steps"
        )
        rows = [(name, f"{ms:.2f}", f"{count:.0f}") for name, ms, count in one.names[: options.top]]
        tables.append(grid(title, ("kernel", "ms a step", "how many"), rows))
        notes += [
            f"{one.trace}: a gap of {us:.0f} us between {before} and {after}"
            for us, before, after in one.gaps[: options.top]
        ]
    return publish(facts, tables, notes, out=out, as_json=as_json)
