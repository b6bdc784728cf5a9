"""This machine as ``zeroshard doctor`` has measured it, in the place of a preset.

    busy(report)                     others were computing while it was measured
    write(report)                    doctor keeps what it has found in the user's cache directory
    read(devices, versions)          ... and a plan takes it from there while it is fresh
    machine_of(report, ranks=4)      ... as a Machine of 4 ranks here

Invariant: every speed of the Machine is one that was reached, so its efficiencies are 1. Links to
other nodes, which nobody can measure on one machine, and the latency of copies are the nearest
preset's. Ranks on CPUs share cores, memory and its bandwidth. Where no core is spare, the disk's
threads take theirs from those that compute, and a request ends when the kernel gives them one.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from zeroshard.errors import ConfigError
from zeroshard.planner.machine import Machine, Speeds, nearest_preset
from zeroshard.system.safe_files import read_json

Report = Mapping[str, Any]  # what ``zeroshard doctor --json`` prints

FRESH = timedelta(days=30)
_NEEDED = ("matmul", "copies", "collectives")  # kinds without which a report is of no use
_BUSY = 0.5  # programs that run or wait for a CPU, per CPU, from which on rates are too low
_VERSIONS = ("zeroshard", "torch")  # another one may be faster or slower


# ------------------------------------------------------------------ the file


def busy(report: Report) -> str | None:
    """Return why the rates of `report` are lower than this machine's: others were computing before
    it was measured. None where they were not, or nothing was measured.
    """
    host = report["host"]
    load, cpus = host.get("load", 0.0), host.get("cpus") or host["cores"]
    if report["measured"] is None or load <= max(1.0, _BUSY * cpus):
        return None
    return (
        f"measured at load {load:.1f} on {cpus} CPU(s): rates are lower than those of this machine,"
        " and are not kept; run zeroshard doctor where nothing else runs"
    )


def cache_file(devices: Sequence[str]) -> Path:
    """Return where the report of this host with these `devices` (names) is kept."""
    cores = os.sched_getaffinity(0)
    facts = [platform.node(), platform.machine(), len(cores), *devices]
    fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "zeroshard" / f"machine-{fingerprint}.json"


def write(report: Report) -> Path | None:
    """Keep `report` for `read`; return the file, or None where something in it could not be
    measured, others were computing, or the directory cannot be written.
    """
    measured = report["measured"]
    if measured is None or busy(report) is not None:
        return None
    if any("error" in one for kind in _NEEDED for one in measured[kind]):
        return None
    file = cache_file([one["name"] for one in report["devices"]])
    part = file.with_name(f"{file.name}.{os.getpid()}")
    dated = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **report}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps(dated, indent=1), encoding="utf-8")
        part.replace(file)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        return None
    return file


def read(devices: Sequence[str], versions: Mapping[str, str | None]) -> dict[str, Any] | None:
    """Return the report that `write` has kept of this host, with its "date"; None where there is
    none, it is older than 30 days, or another version has measured it.
    """
    try:
        report: dict[str, Any] = read_json(cache_file(devices))
        age = datetime.now(UTC) - datetime.fromisoformat(report["date"])
        known = all(report["versions"][name] == versions[name] for name in _VERSIONS)
        machine_of(report, ranks=1)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ConfigError):
        return None
    return report if known and age < FRESH else None


# ------------------------------------------------------------------ the machine


def machine_of(report: Report, *, ranks: int | None = None) -> Machine:
    """Return the machine of `report` with `ranks` ranks on it (default: one per GPU; without a
    GPU, one).

    Links between ranks that were not measured are the nearest preset's, which the note says. Raises
    ConfigError for more ranks than GPUs, and where anything else was not measured.
    """
    devices = report["devices"]
    num = (len(devices) or 1) if ranks is None else ranks
    if num < 1:
        raise ConfigError(f"gpus={num} is less than one")
    if devices and num > len(devices):
        raise ConfigError(f"gpus={num} is more than this machine has ({len(devices)})")
    limit = report["limits"].get("memory_bytes")
    host_memory = limit or report["host"]["memory_bytes"]
    if devices:
        memory = min(one["memory_bytes"] for one in devices)
        name, preset = devices[0]["name"], nearest_preset(devices[0]["name"], memory)
    else:
        memory, name, preset = host_memory, "CPU", "CPU"
    disk, like = next(_entries(report, "disk"), None), Machine.of(preset)
    links, note = _links(report, num), ""
    if links is None:
        missing = _unmeasured(report, "collectives", " and ".join(_transports(report)))
        note = f"links between ranks are preset {preset}'s: {missing}"
        links = like.speeds.local * like.speeds.bandwidth_efficiency, like.speeds.local_latency
    return Machine(
        name=f"{name} (this machine)",
        gpus=num,
        node_size=num,
        gpu_memory=memory,
        host_memory=host_memory,
        disk=0 if disk is None else disk["free_bytes"],
        speeds=_speeds(report, num, like.speeds, disk, links),
        accelerator=bool(devices),
        host_process=like.host_process,
        page_cache=like.page_cache,
        note=note,
    )


def _speeds(
    report: Report, ranks: int, preset: Speeds, disk: Report | None, links: tuple[float, float]
) -> Speeds:
    """Return what each of `ranks` ranks has of the measured rates, of `links` (rate and latency)
    among them, and what was not measured of the `preset`. A copy reads and writes.
    """
    on_gpu, host = bool(report["devices"]), report["host"]
    threads_each = host["cores"] / ranks
    sharing = 1.0 if on_gpu else max(1.0, host["threads"] / threads_each)
    # cores beside one that computes
    spare = min(max(threads_each / host["threads"] - 1.0, 0.0), 1.0)
    measured = {one["device"] for one in _entries(report, "matmul")}
    device = next(iter(measured - {"cpu"}), "cpu") if on_gpu else "cpu"

    def matmul(dtype: str) -> float:
        return _rate(report, "matmul", {"device": device, "dtype": dtype}) / sharing

    def copy(where: str, way: str = "within", pinned: bool | None = None) -> float:
        return _rate(report, "copies", {"device": where, "way": way, "pinned": pinned})

    host_link = copy("cpu") / sharing
    if on_gpu:
        host_link = _mean(*(copy(device, way, pinned=True) for way in ("to device", "to host")))
    local, latency = links
    return Speeds(
        half_flops=matmul("bfloat16"),
        fp32_flops=matmul("float32"),
        memory=2 * copy(device) / sharing,
        local=local or host_link,
        network=preset.network,
        host_link=host_link,
        host=2 * copy("cpu"),
        disk=preset.disk * preset.bandwidth_efficiency
        if disk is None
        else _mean(disk["read_bytes_per_s"], disk["write_bytes_per_s"]),
        local_latency=latency,
        network_latency=preset.network_latency,
        host_latency=preset.host_latency,
        disk_latency=preset.disk_latency if disk is None else _disk_latency(disk, spare, preset),
        disk_core_s=0.0 if disk is None else disk.get("core_s_per_byte", 0.0) * (1.0 - spare),
    )


def _disk_latency(disk: Report, spare: float, preset: Speeds) -> float:
    """Return the seconds of a read of one block, with `spare` cores beside one that computes."""
    idle = float(disk.get("latency_s", preset.disk_latency))
    return spare * idle + (1.0 - spare) * float(disk.get("busy_latency_s", idle))


def _transports(report: Report) -> tuple[str, ...]:
    """Return the transports that would be taken here, the first one that works."""
    return ("nccl",) if report["devices"] else ("shared_memory", "gloo")


def _links(report: Report, ranks: int) -> tuple[float, float] | None:
    """Return the bytes per second of one rank's collectives inside the node and the latency of one,
    over the transport that would be taken: measured between two ranks, which on CPUs share with the
    others. Without a measurement None; one rank sends nothing: 0.
    """
    by_transport: dict[str, list[Report]] = {}
    for one in _entries(report, "collectives"):
        by_transport.setdefault(one["transport"], []).append(one)
    names = _transports(report)
    taken = next((by_transport[name] for name in names if name in by_transport), None)
    if taken is None:
        return None if ranks > 1 else (0.0, 0.0)
    rate = _mean(*(one["bytes_per_s"] for one in taken))
    latency = sum(one["latency_s"] for one in taken) / len(taken)
    return rate if report["devices"] else rate * min(1.0, 2 / ranks), latency


def _entries(report: Report, kind: str) -> Iterator[Report]:
    return (one for one in report["measured"][kind] if "error" not in one)


def _rate(report: Report, kind: str, wanted: Report) -> float:
    """Return the rate of the entry of `kind` that has all that is `wanted`."""
    for one in _entries(report, kind):
        if all(one[name] == value for name, value in wanted.items()):
            return float(one["flops_per_s" if kind == "matmul" else "bytes_per_s"])
    raise ConfigError(_unmeasured(report, kind, f"{kind}, {wanted['device']}"))


def _unmeasured(report: Report, kind: str, what: str) -> str:
    """Return that there is no rate of `what`, with the reason where doctor has one."""
    reasons = [one["error"] for one in report["measured"][kind] if "error" in one]
    reason = f" ({reasons[0]})" if reasons else ""
    return f"{what} could not be measured{reason}: run zeroshard doctor"


def _mean(*rates: float) -> float:
    """Return the rate of as many bytes at each of `rates`, one after another."""
    return len(rates) / sum(1 / rate for rate in rates)
