"""The machine of a plan: GPUs in nodes, memories, speeds; a preset (machines.toml names the
sources), or this machine as ``zeroshard doctor`` has measured it.

    Machine.of("H100", gpus=8)       a preset, with what is given instead of its own
    busy(report)                     others were computing while it was measured
    keep_report(report)              doctor keeps what it has found in the user's cache directory
    read_report(devices, versions)   ... and a plan takes it from there while it is fresh
    machine_of(report, ranks=4)      ... as a Machine of 4 ranks here
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import platform
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from zeroshard.core.placement import Mesh
from zeroshard.core.sizes import parse_bytes
from zeroshard.errors import ConfigError
from zeroshard.system.safe_files import read_json


@dataclass(frozen=True)
class Speeds:
    """FLOP/s of one GPU, bytes per second in one direction, and seconds before the first byte.

    Where rates are peaks of datasheets, the efficiencies say which part of them is achieved.
    """

    half_flops: float
    fp32_flops: float
    memory: float  # of one GPU's memory
    local: float  # of one GPU's links inside its node
    network: float  # of one GPU's share of the links between nodes
    host_link: float  # between one GPU and the host
    host: float  # of one node's host memory
    disk: float  # of one node's disks
    local_latency: float = 0.0  # of one step of a collective inside a node
    network_latency: float = 0.0  # ... between nodes
    host_latency: float = 0.0  # of a copy between one GPU and the host
    disk_latency: float = 0.0  # of a read or write of the disk
    disk_core_s: float = 0.0  # that a byte of the disk takes the cores that compute
    compute_efficiency: float = 1.0  # of the FLOP/s
    bandwidth_efficiency: float = 1.0  # of every bandwidth


@dataclass(frozen=True)
class Machine:
    """`gpus` GPUs, one rank each, in nodes of `node_size`; memory in bytes."""

    name: str
    gpus: int
    node_size: int
    gpu_memory: int  # of one GPU
    host_memory: int  # of one node
    disk: int  # of one node; 0: none
    speeds: Speeds
    accelerator: bool = True  # False: the device is the host itself
    host_process: int = 0  # of host memory, for each rank: Python, torch, data loaders
    page_cache: float = 0.0  # part of host memory: for the page cache and the system
    note: str = ""  # what is not as measured, or as a preset has it

    @classmethod
    def of(
        cls,
        gpu: str = "H100",
        *,
        gpus: int = 1,
        node_size: int | None = None,
        gpu_memory: int | str | None = None,
        host_memory: int | str | None = None,
        disk: int | str | None = None,
        network: int | str | None = None,
    ) -> Machine:
        """Return the preset `gpu` with what is given instead of its own.

        Sizes are bytes, or text with a unit ("32GiB"); `host_memory` and `disk` (default: none)
        count for one node, `network` is the bytes per second that one GPU has to other nodes.
        Raises ConfigError for an unknown preset, naming the nearest, and for an impossible machine.
        """
        if gpu not in presets():
            by_lower = {known.lower(): known for known in presets()}
            near = difflib.get_close_matches(gpu.lower(), by_lower, n=1, cutoff=0.3)
            hint = f"; did you mean {by_lower[near[0]]!r}?" if near else ""
            raise ConfigError(f"gpu={gpu!r} is not a preset ({', '.join(presets())}){hint}")
        preset = presets()[gpu]
        if lacking := [key for key in _NEEDED if key not in preset]:
            raise ConfigError(f"machines.toml: preset {gpu!r} lacks {', '.join(lacking)}")
        if gpus < 1:
            raise ConfigError(f"gpus={gpus} is less than one")
        local = min(gpus, preset["node_size"]) if node_size is None else node_size
        if local < 1 or gpus % local:
            # what would make whole nodes: a size that divides them, and the nearest numbers of GPUs
            most = max(local, 1)
            fewer = next(size for size in range(min(most, gpus), 0, -1) if gpus % size == 0)
            counts = [count * most for count in (gpus // most, gpus // most + 1) if count]
            raise ConfigError(
                f"node_size={local} does not divide gpus={gpus}: every node has as many GPUs; give"
                f" node_size={fewer}, or {' or '.join(f'gpus={count}' for count in counts)}"
            )

        def size(name: str, given: int | str | None) -> int:
            value = preset.get(name, 0) if given is None else given
            out = parse_bytes(value, name) if isinstance(value, str) else value
            if given is not None and out < 1:
                raise ConfigError(f"{name}={given!r} is less than one byte")
            return out

        memory = size("gpu_memory", gpu_memory), size("host_memory", host_memory)
        return cls(
            gpu,
            gpus,
            local,
            *memory,
            size("disk", disk),
            Speeds(
                half_flops=preset["half_tflops"] * 1e12,
                fp32_flops=preset["fp32_tflops"] * 1e12,
                memory=preset["memory_gbs"] * 1e9,
                local=preset["local_gbs"] * 1e9,
                network=preset["network_gbs"] * 1e9
                if network is None
                else size("network", network),
                host_link=preset["host_link_gbs"] * 1e9,
                host=preset["host_gbs"] * 1e9,
                disk=preset["disk_gbs"] * 1e9,
                **{
                    name: preset[f"{name}_us"] / 1e6
                    for name in ("local_latency", "network_latency", "host_latency", "disk_latency")
                },
                compute_efficiency=preset["compute_efficiency"],
                bandwidth_efficiency=preset["bandwidth_efficiency"],
            ),
            preset.get("accelerator", True),
            size("host_process", None),
            preset["page_cache"],
        )

    @property
    def mesh(self) -> Mesh:
        """The ranks."""
        return Mesh(self.gpus // self.node_size, self.node_size)

    @property
    def host_allowance(self) -> int:
        """The bytes of one node's host memory in which no state can rest: what its ranks' programs
        and the page cache take.
        """
        taken = self.node_size * self.host_process + round(self.page_cache * self.host_memory)
        return min(taken, self.host_memory)

    @property
    def host_room(self) -> int:
        """The bytes of one node's host memory that states and buffers may take."""
        return self.host_memory - self.host_allowance

    def flops(self, precision: str) -> float:
        """Return the peak FLOP/s of one GPU."""
        return self.speeds.fp32_flops if precision == "fp32" else self.speeds.half_flops


_NEEDED = (
    "gpu_memory", "half_tflops", "fp32_tflops", "memory_gbs", "local_gbs", "network_gbs",
    "host_link_gbs", "node_size", "host_memory", "host_gbs", "disk_gbs",
)  # fmt: skip


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Return what machines.toml says, by name; what stands above the presets holds for each."""
    text = files("zeroshard.planner").joinpath("machines.toml").read_text(encoding="utf-8")
    read = tomllib.loads(text)
    shared = {name: value for name, value in read.items() if not isinstance(value, dict)}
    return {name: shared | value for name, value in read.items() if isinstance(value, dict)}


def nearest_preset(device: str, memory: int) -> str:
    """Return the preset of the GPU that calls itself `device` ("NVIDIA A100-SXM4-40GB"), or, where
    no name fits, of the GPU with the memory nearest to `memory` bytes.
    """
    letters = "".join(letter for letter in device.upper() if letter.isalnum())
    sizes = {
        name: parse_bytes(preset["gpu_memory"], name)
        for name, preset in presets().items()
        if preset.get("accelerator", True)
    }
    named = [name for name in sizes if name.split("-")[0] in letters]
    return min(named or sizes, key=lambda name: abs(sizes[name] - memory))


# --------------------------------------------------------------------------- this machine, measured
# Invariant: every speed of the Machine is one that was reached, so its efficiencies are 1. Links to
# other nodes, which nobody can measure on one machine, and the latency of copies are the nearest
# preset's. Ranks on CPUs share cores, memory and its bandwidth. Where no core is spare, the disk's
# threads take theirs from those that compute, and a request ends when the kernel gives them one.

Report = Mapping[str, Any]  # what ``zeroshard doctor --json`` prints

FRESH = timedelta(days=30)
_NEEDED_KINDS = ("matmul", "copies", "collectives")  # kinds without which a report is of no use
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
        f"measured at load {load:.1f} on {cpus} CPU(s): rates are lower than this machine's,"
        " and are not kept; run zeroshard doctor where nothing else runs"
    )


def cache_file(devices: Sequence[str]) -> Path:
    """Return where the report of this host with these `devices` (names) is kept."""
    cores = os.sched_getaffinity(0)
    facts = [platform.node(), platform.machine(), len(cores), *devices]
    fingerprint = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "zeroshard" / f"machine-{fingerprint}.json"


def keep_report(report: Report) -> Path | None:
    """Keep `report` for `read_report`; return the file, or None where something in it could not be
    measured, others were computing, or the directory cannot be written.
    """
    measured = report["measured"]
    if measured is None or busy(report) is not None:
        return None
    if any("error" in one for kind in _NEEDED_KINDS for one in measured[kind]):
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


def read_report(
    devices: Sequence[str], versions: Mapping[str, str | None]
) -> dict[str, Any] | None:
    """Return the report that `keep_report` has kept of this host, with its "date"; None where
    there is none, it is older than 30 days, or another version has measured it.
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

    # rates of each rank: a copy reads and writes, and ranks on CPUs share their cores
    known, on_gpu, host = like.speeds, bool(devices), report["host"]
    threads_each = host["cores"] / num
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
    disk_rate = known.disk * known.bandwidth_efficiency
    disk_latency, disk_core_s = known.disk_latency, 0.0
    if disk is not None:  # a read of one block, with `spare` cores beside one that computes
        disk_rate = _mean(disk["read_bytes_per_s"], disk["write_bytes_per_s"])
        idle = float(disk.get("latency_s", disk_latency))
        disk_latency = spare * idle + (1.0 - spare) * float(disk.get("busy_latency_s", idle))
        disk_core_s = disk.get("core_s_per_byte", 0.0) * (1.0 - spare)
    local, latency = links
    speeds = Speeds(
        half_flops=matmul("bfloat16"),
        fp32_flops=matmul("float32"),
        memory=2 * copy(device) / sharing,
        local=local or host_link,
        network=known.network,
        host_link=host_link,
        host=2 * copy("cpu"),
        disk=disk_rate,
        local_latency=latency,
        network_latency=known.network_latency,
        host_latency=known.host_latency,
        disk_latency=disk_latency,
        disk_core_s=disk_core_s,
    )
    return Machine(
        name=f"{name} (this machine)",
        gpus=num,
        node_size=num,
        gpu_memory=memory,
        host_memory=host_memory,
        disk=0 if disk is None else disk["free_bytes"],
        speeds=speeds,
        accelerator=bool(devices),
        host_process=like.host_process,
        page_cache=like.page_cache,
        note=note,
    )


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
