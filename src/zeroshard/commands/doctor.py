"""``zeroshard doctor``: what this machine has, how fast it is, and what is missing for what.

    zeroshard doctor --disk /mnt/nvme          everything, in about 20 s
    zeroshard doctor --quick                   without measuring
    zeroshard doctor --json                    for programs

The JSON has "versions", "host", "devices", "backends", "limits" and "missing" (`facts`),
"problems" (why the library cannot run), "grade" ("probe") and "measured": null, or a list of
entries for each of `KINDS` (probes.py), where an entry with "error" could not be measured. Sizes
are in bytes, rates per second, times in seconds; null is "no limit", or "not here". What was
measured is kept in the user's cache directory for ``zeroshard plan --this-machine`` and
``policy="auto"`` (planner/machine.py). Where others were computing, a warning names the load and
nothing is kept.

Exit code 1 where the library cannot run here at all, with the reason; else 0, whatever optional
thing is missing and whichever measurement has failed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard._version import __version__
from zeroshard.system.device import DRIVERS, all_devices, library_versions
from zeroshard.system.this_host import HostMemory
from zeroshard.terminal import (
    JSON,
    Option,
    Subcommand,
    Table,
    UsageError,
    note,
    print_json,
    progress,
    say,
)

if TYPE_CHECKING:
    from zeroshard.planner.machine import Machine

EXIT_UNABLE = 1
BUDGET_S = 15.0  # after which nothing more is begun
KINDS = ("matmul", "copies", "collectives", "disk")
GRADE = (
    "Measured rates are of probe grade: a second each, best or median of a few runs, other programs"
    " not kept off. zeroshard bench compares with care."
)


def _doctor(arguments: argparse.Namespace) -> int:
    from zeroshard.planner.machine import busy, keep_report

    if arguments.disk is not None and not arguments.disk.is_dir():
        raise UsageError(f"--disk {arguments.disk} is not a directory")
    report = examine(arguments.disk, quick=arguments.quick)
    kept, warning = keep_report(report), busy(report)
    if arguments.json:
        print_json(report)
    elif report["versions"]["rich"] is None:
        print("\n".join(report["problems"]))
    else:
        missing = [(one["what"], f"{one['for']}: {one['command']}") for one in report["missing"]]
        for title, rows in (
            ("versions", [(name, text or "not here") for name, text in report["versions"].items()]),
            ("machine", _machine(report)),
            ("measured", _rates(report["measured"])),
            ("missing", missing),
            ("problems", [("this library cannot run here", why) for why in report["problems"]]),
        ):
            if rows:
                Table(("", ""), rows, title, text=("",)).print()
        if report["measured"] is not None:
            say(GRADE)
        if kept is not None:
            print(f"Kept for zeroshard plan --this-machine: {kept}")
    if warning is not None:
        note(warning)
    return EXIT_UNABLE if report["problems"] else 0


def examine(disk: Path | None = None, *, quick: bool = False) -> dict[str, Any]:
    """Return what ``--json`` prints: facts about this machine and, unless `quick`, what it has been
    measured to do; `disk` is a directory to measure, too.
    """

    found = facts()
    problems = find_problems(found)
    measured = None if problems or quick else _measure(found, disk)
    return {
        **found,
        "grade": "probe",
        "measured": measured,
        "missing": find_missing(found),
        "problems": problems,
    }


def this_machine(ranks: int | None) -> Machine:
    """Return this machine as the last ``zeroshard doctor`` has measured it, or measure it now."""
    from zeroshard.planner.machine import busy, keep_report, machine_of, read_report

    found = facts()
    report = read_report([one["name"] for one in found["devices"]], found["versions"])
    if report is None:
        note("measuring this machine, about 20 s")
        report = examine()
        if report["problems"]:
            raise UsageError(f"plan: --this-machine: {report['problems'][0]}")
        if (warning := busy(report)) is not None:
            note(warning)
        keep_report(report)
    else:
        note(f"as measured {report['date']}; zeroshard doctor renews it")
    return machine_of(report, ranks=ranks)


# ---------------------------------------------------------------------------------------- measuring


def _measure(found: dict[str, Any], disk: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Return the entries of every kind; one with "what" and "error" for what could not be
    measured.
    """
    steps, stop = list(_steps(found, disk)), time.monotonic() + BUDGET_S
    measured: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with progress(total=len(steps)) as bar:
        for kind, what, run in steps:
            bar.tell(what)
            try:
                if time.monotonic() > stop:
                    raise TimeoutError("left out: what came before has taken too long")
                measured[kind] += run()
            except (RuntimeError, OSError) as error:  # memory, a driver, a disk, a socket
                lines = str(error).splitlines() or [type(error).__name__]
                measured[kind].append({"what": what, "error": lines[0]})
            bar.advance()
    return measured


def _steps(found: dict[str, Any], disk: Path | None) -> Iterator[tuple[str, str, Any]]:
    """Yield what is measured: its kind, its name, and a function that does it."""
    import torch

    from zeroshard.commands import probes

    devices = [torch.device("cpu")]
    devices += [torch.device(_place(one)) for one in found["devices"][:1]]
    for device in devices:
        yield "matmul", f"matmul, {device}", partial(probes.matmul, device)
        yield "copies", f"copies, {device}", partial(probes.copies, device)
    on_host = ("shared_memory", "gloo")
    yield "collectives", "2 ranks on the host", partial(probes.collectives, *on_host)
    backend = found["devices"][0]["backend"] if len(found["devices"]) > 1 else "gloo"
    if backend != "gloo" and found["backends"].get(backend):
        yield "collectives", f"2 ranks, {backend}", partial(probes.collectives, "nccl")
    if disk is not None:
        yield "disk", f"disk, {disk}", partial(probes.disk, disk)


# ----------------------------------------------------------------------------------------- printing


def _place(device: dict[str, Any]) -> str:
    return f"{device['type']}:{device['index']}"


def _machine(report: dict[str, Any]) -> list[tuple[str, str]]:
    from rich.filesize import decimal

    def size(num_bytes: int | None) -> str:
        return "unlimited" if num_bytes is None else decimal(num_bytes)

    host, limits = report["host"], report["limits"]
    shm, files = limits["dev_shm_bytes"], limits["open_files"]
    backends = [name for name, is_here in report["backends"].items() if is_here]
    free = "" if shm is None else f"{size(shm)}, {size(limits['dev_shm_free_bytes'])} free"
    return [
        ("host", f"{host['system']}, {host['machine']}, {host['cores']} core(s)"),
        ("memory", size(host["memory_bytes"])),
        ("memory limit", size(limits["memory_bytes"])),
        *(
            (_place(one), f"{one['name']}, {size(one['memory_bytes'])}")
            for one in report["devices"]
        ),
        ("accelerators", f"{len(report['devices'])}" if report["devices"] else "none: CPU only"),
        ("backends", ", ".join(backends) or "none"),
        ("pinned memory limit", size(limits["pinned_memory_bytes"])),
        ("open files limit", "unlimited" if files is None else str(files)),
        ("/dev/shm", free or "not here"),
    ]


def _rates(measured: dict[str, Any] | None) -> list[tuple[str, str]]:
    if measured is None:
        return []
    rows = [row for kind in KINDS for one in measured[kind] for row in _rate(kind, one)]
    if not measured["disk"]:
        rows.append(("disk", "not measured: name a directory with --disk"))
    return rows


def _rate(kind: str, one: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of one entry."""
    if "error" in one:
        return [(one["what"], f"failed: {one['error']}")]
    if kind == "matmul":
        rate = f"{one['flops_per_s'] / 1e9:,.0f} GFLOP/s ({one['side']}²)"
        return [(f"matmul, {one['dtype']}, {one['device']}", rate)]
    if kind == "copies":
        pinned = {None: "", True: ", pinned", False: ", not pinned"}[one["pinned"]]
        return [(f"copy {one['way']}{pinned}, {one['device']}", _speed(one["bytes_per_s"]))]
    if kind == "collectives":
        name = f"{one['operation']}, {one['ranks']} ranks, {one['transport']}"
        return [(name, f"{_speed(one['bytes_per_s'])}, {one['latency_s'] * 1e6:,.0f} µs")]
    how = "past the page cache" if one["direct"] else "through the page cache"
    return [
        (f"disk {way}, {one['path']}", f"{_speed(one[f'{way}_bytes_per_s'])}, {how}")
        for way in ("write", "read")
    ]


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s"


_OPTIONS = (
    Option("--quick", "measure nothing"),
    Option("--disk DIR", "measure the disk tier in this directory, too (256 MiB, removed"
           " afterwards)", Path),
    JSON,
)  # fmt: skip
COMMAND = Subcommand(
    "doctor", "say what this machine has, how fast it is, and what is missing",
    "zeroshard doctor --disk /tmp", _OPTIONS, _doctor,
)  # fmt: skip


# --------------------------------------------------------------------- facts that need no measuring
# Versions, devices, backends, limits, and what is missing for which feature: plain values, so that
# ``--json`` prints them as they are; None where a limit does not exist or nobody knows. No package
# but torch is imported to learn its version.

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
    torch: Any = None
    with contextlib.suppress(ImportError, OSError):  # a library that it links to may be missing
        torch = importlib.import_module("torch")
    backends: dict[str, bool] = {}
    if torch is not None and torch.distributed.is_available():
        names = {"gloo", "nccl", *(one.backend for one in all_devices() if one.backend)}
        backends = {name: torch.distributed.is_backend_available(name) for name in sorted(names)}
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
        "cpus": os.cpu_count(),  # of the machine; this process may use "cores"
        "load": os.getloadavg()[0],
    }
    shm = shutil.disk_usage(_SHM) if _SHM.is_dir() else None
    return {
        "versions": versions,
        "host": host,
        "devices": devices,
        "backends": backends,
        "limits": {
            "memory_bytes": HostMemory.now().limit,
            "pinned_memory_bytes": _limit(resource.RLIMIT_MEMLOCK),
            "open_files": _limit(resource.RLIMIT_NOFILE),
            "dev_shm_bytes": None if shm is None else shm.total,
            "dev_shm_free_bytes": None if shm is None else shm.free,
        },
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


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _limit(kind: int) -> int | None:
    """Return the soft limit of this process, None where there is none."""
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft
