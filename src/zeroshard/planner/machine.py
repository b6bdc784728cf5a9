"""The machine of a plan: GPUs in nodes, memories, speeds. Presets with their sources are in
machines.toml.
"""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from zeroshard.core.placement import Mesh
from zeroshard.core.sizes import parse_bytes
from zeroshard.errors import ConfigError


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

        Sizes are bytes, or text with a unit ("32GiB"); `host_memory` and `disk` (default: none) are
        those of one node, `network` the bytes per second that one GPU has to other nodes. Raises
        ConfigError for an unknown preset, naming the nearest, and for an impossible machine.
        """
        preset = _preset(gpu)
        if gpus < 1:
            raise ConfigError(f"gpus={gpus} is less than one")
        local = min(gpus, preset["node_size"]) if node_size is None else node_size
        if local < 1 or gpus % local:
            raise ConfigError(
                f"node_size={local} does not divide gpus={gpus}: every node has as many GPUs; give"
                f" {_whole_nodes(gpus, max(local, 1))}"
            )

        def size(name: str, given: int | str | None) -> int:
            value = preset.get(name, 0) if given is None else given
            out = parse_bytes(value, name) if isinstance(value, str) else value
            if given is not None and out < 1:
                raise ConfigError(f"{name}={given!r} is less than one byte")
            return out

        memory = size("gpu_memory", gpu_memory), size("host_memory", host_memory)
        is_accelerator = preset.get("accelerator", True)
        return cls(
            gpu,
            gpus,
            local,
            *memory,
            size("disk", disk),
            _speeds(preset, None if network is None else size("network", network)),
            is_accelerator,
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


def _whole_nodes(gpus: int, node_size: int) -> str:
    """Return what would make whole nodes: sizes that divide `gpus`, and the nearest numbers of
    GPUs.
    """
    fewer = next(size for size in range(min(node_size, gpus), 0, -1) if gpus % size == 0)
    nodes = gpus // node_size
    others = [f"gpus={count * node_size}" for count in (nodes, nodes + 1) if count]
    return f"node_size={fewer}, or {' or '.join(others)}"


def _preset(name: str) -> dict[str, Any]:
    if name in presets():
        preset = presets()[name]
        lacking = [key for key in _NEEDED if key not in preset]
        if lacking:
            raise ConfigError(f"machines.toml: preset {name!r} lacks {', '.join(lacking)}")
        return preset
    by_lower = {known.lower(): known for known in presets()}
    near = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.3)
    hint = f"; did you mean {by_lower[near[0]]!r}?" if near else ""
    raise ConfigError(f"gpu={name!r} is not a preset ({', '.join(presets())}){hint}")


def _speeds(preset: dict[str, Any], network: int | None) -> Speeds:
    """Return the speeds of `preset`, with `network` bytes per second between nodes if given."""
    return Speeds(
        half_flops=preset["half_tflops"] * 1e12,
        fp32_flops=preset["fp32_tflops"] * 1e12,
        memory=preset["memory_gbs"] * 1e9,
        local=preset["local_gbs"] * 1e9,
        network=preset["network_gbs"] * 1e9 if network is None else network,
        host_link=preset["host_link_gbs"] * 1e9,
        host=preset["host_gbs"] * 1e9,
        disk=preset["disk_gbs"] * 1e9,
        local_latency=preset["local_latency_us"] / 1e6,
        network_latency=preset["network_latency_us"] / 1e6,
        host_latency=preset["host_latency_us"] / 1e6,
        disk_latency=preset["disk_latency_us"] / 1e6,
        compute_efficiency=preset["compute_efficiency"],
        bandwidth_efficiency=preset["bandwidth_efficiency"],
    )


def nearest_preset(device: str, memory: int) -> str:
    """Return the preset of the GPU that calls itself `device` ("NVIDIA A100-SXM4-40GB"), or, where
    no name fits, of the GPU whose memory is nearest to `memory` bytes.
    """
    letters = "".join(letter for letter in device.upper() if letter.isalnum())
    sizes = {
        name: parse_bytes(preset["gpu_memory"], name)
        for name, preset in presets().items()
        if preset.get("accelerator", True)
    }
    named = [name for name in sizes if name.split("-")[0] in letters]
    return min(named or sizes, key=lambda name: abs(sizes[name] - memory))
