"""``zeroshard doctor``: what this machine has, how fast it is, and what is missing for what.

    zeroshard doctor --disk /mnt/nvme          everything, in about 20 s
    zeroshard doctor --quick                   without measuring
    zeroshard doctor --json                    for programs

The JSON has "versions", "host", "devices", "backends", "limits" and "missing" (machine_facts.py),
"problems" (why the library cannot run), "grade" ("probe") and "measured": null, or a list of
entries for each of `KINDS` (probes.py), where an entry with "error" could not be measured. Sizes
are in bytes, rates per second, times in seconds; null is "no limit", or "not here". What was
measured is kept in the user's cache directory for ``zeroshard plan --this-machine`` and
``policy="auto"`` (planner/measured.py). Where others were computing, a warning names the load and
nothing is kept.

Exit code 1 where the library cannot run here at all, with the reason; else 0, whatever optional
thing is missing and whichever measurement has failed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.terminal.console import Table, note, print_json, progress, say
from zeroshard.terminal.declared import JSON, Option, Subcommand, UsageError

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
    from zeroshard.planner.measured import busy, write

    if arguments.disk is not None and not arguments.disk.is_dir():
        raise UsageError(f"--disk {arguments.disk} is not a directory")
    report = examine(arguments.disk, quick=arguments.quick)
    kept, warning = write(report), busy(report)
    if arguments.json:
        print_json(report)
    elif report["versions"]["rich"] is None:
        print("\n".join(report["problems"]))
    else:
        _print(report)
        if kept is not None:
            print(f"Kept for zeroshard plan --this-machine: {kept}")
    if warning is not None:
        note(warning)
    return EXIT_UNABLE if report["problems"] else 0


def examine(disk: Path | None = None, *, quick: bool = False) -> dict[str, Any]:
    """Return what ``--json`` prints: facts about this machine and, unless `quick`, what it has been
    measured to do; `disk` is a directory to measure, too.
    """
    from zeroshard.launch.machine_facts import facts, find_missing, find_problems

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
    from zeroshard.launch.machine_facts import facts
    from zeroshard.planner import measured

    found = facts()
    report = measured.read([one["name"] for one in found["devices"]], found["versions"])
    if report is None:
        note("measuring this machine, about 20 s")
        report = examine()
        if report["problems"]:
            raise UsageError(f"plan: --this-machine: {report['problems'][0]}")
        if (warning := measured.busy(report)) is not None:
            note(warning)
        measured.write(report)
    else:
        note(f"as measured {report['date']}; zeroshard doctor renews it")
    return measured.machine_of(report, ranks=ranks)


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

    from zeroshard.launch import probes

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


def _print(report: dict[str, Any]) -> None:
    missing = [(one["what"], f"{one['for']}: {one['command']}") for one in report["missing"]]
    for title, rows in (
        ("versions", _versions(report)),
        ("machine", _machine(report)),
        ("measured", _rates(report["measured"])),
        ("missing", missing),
        ("problems", [("this library cannot run here", why) for why in report["problems"]]),
    ):
        if rows:
            Table(("", ""), rows, title, text=("",)).print()
    if report["measured"] is not None:
        say(GRADE)


def _place(device: dict[str, Any]) -> str:
    return f"{device['type']}:{device['index']}"


def _versions(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name, text or "not here") for name, text in report["versions"].items()]


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
