"""What ``zeroshard doctor`` finds without measuring: versions, devices, backends, limits, and what
is missing for which feature.

Everything is plain values, so that ``--json`` prints them as they are: sizes in bytes, None where a
limit does not exist or nobody knows. No package but torch is imported to learn its version.
"""

from __future__ import annotations

import importlib
import os
import platform
import resource
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zeroshard._version import __version__
from zeroshard.system.device import DRIVERS, all_devices, library_versions
from zeroshard.system.host_memory import HostMemory

PYTHON = (3, 11)
TORCH = (2, 10)
REQUIRED = ("torch", "numpy", "pydantic", "rich", "safetensors", "xxhash")
_EXTRA = "pip install '.[{}]'  # in a checkout of zeroshard"
# package -> the features that need it, and the command that installs it
OPTIONAL = {
    "transformers": ("ZeroTrainer, examples/train_hf.py", _EXTRA.format("transformers")),
    "accelerate": ("ZeroTrainer, examples/train_hf.py", _EXTRA.format("transformers")),
    "peft": ("LoRA models of the tests", _EXTRA.format("models")),
    "deepspeed": ("DeepSpeed in zeroshard bench", _EXTRA.format("bench")),
    "triton": ("fused codec kernels on GPUs", "pip install triton"),
}
PACKAGES = (*REQUIRED, *OPTIONAL)
_SHM = Path("/dev/shm")
_OPEN_FILES = 4096  # a file per state on disk, a descriptor per unit in shared memory


def facts() -> dict[str, Any]:
    """Return "versions", "host", "devices", "backends" and "limits" of this machine."""
    torch = _torch()
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "zeroshard": __version__,
        **{name: _version(name) for name in PACKAGES},
        **library_versions(torch),
    }
    devices = [] if torch is None else [one.facts() for one in all_devices()]
    pages, page_size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    host = {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": None if torch is None else torch.get_num_threads(),
        "memory_bytes": pages * page_size,
        "cpus": os.cpu_count(),  # of the machine, of which this process may use "cores"
        "load": os.getloadavg()[0],
    }
    return {
        "versions": versions,
        "host": host,
        "devices": devices,
        "backends": _backends(torch),
        "limits": _limits(),
    }


def find_problems(found: dict[str, Any]) -> list[str]:
    """Return why the library cannot run here, a sentence with its remedy each."""
    versions, problems = found["versions"], []
    if sys.version_info < PYTHON:
        problems.append(f"Python {versions['python']} is older than 3.11: install a newer one")
    absent = [name for name in REQUIRED if versions[name] is None]
    if absent:
        problems.append(f"{', '.join(absent)} missing: pip install {' '.join(absent)}")
    torch = versions["torch"]
    if torch is not None and tuple(map(int, torch.split("+")[0].split(".")[:2])) < TORCH:
        problems.append(f"torch {torch} is older than 2.10: pip install --upgrade torch")
    elif torch is not None and not found["backends"]:
        problems.append(
            "torch cannot be imported, or was built without torch.distributed: pip install"
            " --force-reinstall torch"
        )
    return problems


def find_missing(found: dict[str, Any]) -> list[dict[str, str]]:
    """Return what is absent or set too low, each with "what", "for" (the feature that needs it)
    and "command" (what installs or sets it).
    """
    versions, limits, devices = found["versions"], found["limits"], found["devices"]
    missing = [
        {"what": name, "for": feature, "command": command}
        for name, (feature, command) in OPTIONAL.items()
        if versions[name] is None and (name != "triton" or devices)
    ]

    def lacks(what: str, feature: str, command: str) -> None:
        missing.append({"what": what, "for": feature, "command": command})

    for driver, build in DRIVERS.items():
        if driver.exists() and not devices:
            lacks(f"a {build} build of torch, or its driver", "training on this machine's GPUs",
                  "pip install --force-reinstall torch")  # fmt: skip
    backend = (devices[0].get("backend") if devices else None) or "nccl"
    if devices and not found["backends"].get(backend):
        lacks(f"{backend.upper()} in torch", "collectives between GPUs",
              "pip install --force-reinstall torch")  # fmt: skip
    memlock, files = limits["pinned_memory_bytes"], limits["open_files"]
    if devices and memlock is not None:
        lacks(f"pinned memory beyond {memlock} bytes", "offloading to the host from GPUs",
              "ulimit -l unlimited")  # fmt: skip
    if files is not None and files < _OPEN_FILES:
        lacks(f"open files beyond {files}", "large models on disk and in shared memory",
              f"ulimit -n {_OPEN_FILES}")  # fmt: skip
    return missing


# ------------------------------------------------------------------------------------------ helpers


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except (ImportError, OSError):  # a library that it links to may be missing
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _backends(torch: Any) -> dict[str, bool]:
    """Return which of torch.distributed's backends are there; empty without the package."""
    if torch is None or not torch.distributed.is_available():
        return {}
    names = {"gloo", "nccl", *(one.backend for one in all_devices() if one.backend)}
    return {name: torch.distributed.is_backend_available(name) for name in sorted(names)}


def _limits() -> dict[str, int | None]:
    """Return the limits in bytes, None for none: "memory_bytes" is that of the control group."""
    shm = shutil.disk_usage(_SHM) if _SHM.is_dir() else None
    return {
        "memory_bytes": HostMemory.now().limit,
        "pinned_memory_bytes": _limit(resource.RLIMIT_MEMLOCK),
        "open_files": _limit(resource.RLIMIT_NOFILE),
        "dev_shm_bytes": None if shm is None else shm.total,
        "dev_shm_free_bytes": None if shm is None else shm.free,
    }


def _limit(kind: int) -> int | None:
    """Return the soft limit of this process, None where there is none."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft
