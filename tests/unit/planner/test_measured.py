"""This machine instead of a preset: what doctor has measured becomes the planner's speeds."""

from __future__ import annotations

import copy
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from zeroshard.errors import ConfigError
from zeroshard.planner import Training, describe, make_plan
from zeroshard.planner.machine import (
    Machine,
    busy,
    cache_file,
    keep_report,
    machine_of,
    nearest_preset,
    read_report,
)

VERSIONS = {"zeroshard": "1", "torch": "2"}


def _report(*, gpus: int = 0) -> dict[str, Any]:
    """Return a report of a machine with `gpus` GPUs, its rates all different."""
    device = "cuda:0" if gpus else "cpu"
    copies = [("cpu", "within", None, 5e9)]
    transports = [("shared_memory", 3e9), ("gloo", 1e9)]
    if gpus:
        copies += [(device, "within", None, 800e9), (device, "to device", True, 20e9),
                   (device, "to device", False, 6e9), (device, "to host", True, 30e9),
                   (device, "to host", False, 7e9)]  # fmt: skip
        transports.append(("nccl", 200e9))
    names = ("device", "way", "pinned", "bytes_per_s")
    matmul = [("cpu", "float32", 8e10), ("cpu", "bfloat16", 4e10)]
    matmul += [(device, "float32", 5e13), (device, "bfloat16", 6e14)] if gpus else []
    collectives = [
        {"transport": name, "operation": operation, "bytes_per_s": rate, "latency_s": latency}
        for name, fastest in transports
        for operation, rate, latency in (
            ("all_gather", fastest, 2e-4),
            ("reduce_scatter", fastest / 3, 4e-4),
        )
    ]
    return {
        "versions": VERSIONS,
        "host": {"memory_bytes": 64 << 30, "cores": 8, "threads": 8},
        "limits": {"memory_bytes": None},
        "devices": [
            {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": (79 + index) << 30}
            for index in range(gpus)
        ],
        "measured": {
            "matmul": [
                dict(zip(("device", "dtype", "flops_per_s"), one, strict=True)) for one in matmul
            ],
            "copies": [dict(zip(names, one, strict=True)) for one in copies],
            "collectives": collectives,
            "disk": [],
        },
    }


def test_ranks_on_cpus_share_cores_memory_and_links() -> None:
    one, four = (machine_of(_report(), ranks=ranks) for ranks in (1, 4))
    assert (four.gpus, four.node_size, four.accelerator) == (4, 4, False)
    assert four.gpu_memory == four.host_memory == 64 << 30  # a node's, which its ranks share
    assert (one.speeds.fp32_flops, four.speeds.fp32_flops) == (8e10, 2e10)
    assert (one.speeds.memory, four.speeds.memory) == (10e9, 2.5e9)  # read and written
    assert one.speeds.host == four.speeds.host == 10e9  # of the node
    assert machine_of(_report(), ranks=2).speeds.local == pytest.approx(1.5e9)  # 3 and 1 in turn
    assert four.speeds.local == pytest.approx(0.75e9)
    one_thread = _report()
    one_thread["host"]["threads"] = 1  # of 8 cores: 4 ranks have one each, too
    assert machine_of(one_thread, ranks=4).speeds.fp32_flops == 8e10
    plan = make_plan(describe("2B"), four, Training("fp32"))
    (ddp,) = [row for row in plan.rows if row.row == "ddp"]
    assert not ddp.fits and ddp.bound_by == "host memory"  # 4 x 32 GB


def test_gpus_bring_their_own_rates_and_the_smallest_memory() -> None:
    machine = machine_of(_report(gpus=2))
    speeds = machine.speeds
    assert (machine.gpus, machine.gpu_memory, machine.accelerator) == (2, 79 << 30, True)
    assert (speeds.half_flops, speeds.fp32_flops, speeds.memory) == (6e14, 5e13, 1600e9)
    assert speeds.host_link == pytest.approx(24e9)  # pinned, 20 and 30 in turn
    assert speeds.local == pytest.approx(100e9)  # nccl's
    assert speeds.network == Machine.of("H100").speeds.network
    assert machine_of(_report(gpus=2), ranks=1).gpus == 1


def test_no_share_is_taken_of_what_was_reached_and_the_rest_is_a_presets() -> None:
    speeds, preset = machine_of(_report(), ranks=2).speeds, Machine.of("CPU").speeds
    assert (speeds.compute_efficiency, speeds.bandwidth_efficiency) == (1.0, 1.0)
    assert preset.compute_efficiency < 1.0
    assert speeds.local_latency == pytest.approx(3e-4)
    unmeasured = ("network", "network_latency", "host_latency", "disk_latency")
    assert all(getattr(speeds, name) == getattr(preset, name) for name in unmeasured)


@pytest.mark.parametrize(("gpus", "name"), [(0, "CPU"), (2, "H100")])
def test_links_that_were_not_measured_are_what_is_reached_of_a_presets(
    gpus: int, name: str
) -> None:
    report = _report(gpus=gpus)
    report["measured"]["collectives"] = [{"what": "2 ranks", "error": "no answer within 40 s"}]
    machine, preset = machine_of(report, ranks=2), Machine.of(name).speeds
    assert machine.speeds.local == preset.local * preset.bandwidth_efficiency
    assert machine.speeds.local_latency == preset.local_latency
    transport = "nccl" if gpus else "shared_memory and gloo"
    assert f"preset {name}'s: {transport} could not be measured (no answer" in machine.note
    assert machine_of(_report(gpus=gpus), ranks=2).note == ""


def test_a_disk_is_planned_with_where_it_was_measured() -> None:
    report = _report()
    without = machine_of(report)
    assert (without.disk, without.speeds.disk) == (0, 0.8 * Machine.of("CPU").speeds.disk)
    rates = {"read_bytes_per_s": 3e9, "write_bytes_per_s": 1e9}
    report["measured"]["disk"] = [{"what": "disk", "error": "full"}, {"free_bytes": 7, **rates}]
    machine = machine_of(report)
    assert (machine.disk, machine.speeds.disk) == (7, pytest.approx(1.5e9))


def test_threads_of_the_disk_take_cores_that_compute_where_none_is_spare() -> None:
    report = _report()
    rates = {"read_bytes_per_s": 1e9, "write_bytes_per_s": 1e9, "core_s_per_byte": 4e-10}
    rates |= {"latency_s": 1e-4, "busy_latency_s": 4e-3}
    report["measured"]["disk"] = [{"free_bytes": 7, **rates}]
    assert machine_of(report).speeds.disk_core_s == 4e-10  # as many threads as cores
    report["host"]["threads"] = 1  # of 8 cores
    for ranks, expected in ((1, 0.0), (4, 0.0), (5, 4e-10 * 0.4), (8, 4e-10), (16, 4e-10)):
        speeds = machine_of(report, ranks=ranks).speeds
        assert speeds.disk_core_s == pytest.approx(expected), ranks
        busy = expected / 4e-10
        assert speeds.disk_latency == pytest.approx(1e-4 + busy * 3.9e-3), ranks


def test_a_containers_limit_is_the_hosts_memory() -> None:
    report = _report()
    report["limits"]["memory_bytes"] = 8 << 30
    assert machine_of(report).host_memory == 8 << 30


@pytest.mark.parametrize(
    ("gpus", "ranks", "kind", "message"),
    [
        (2, 3, None, "gpus=3 is more than this machine has (2)"),
        (0, 0, None, "gpus=0 is less than one"),
        (0, 1, "matmul", "matmul, cpu could not be measured (no driver): run zeroshard doctor"),
        (1, 1, "copies", "copies, cpu could not be measured (no driver)"),
    ],
)
def test_what_is_not_there_is_refused(gpus: int, ranks: int, kind: str, message: str) -> None:
    report = _report(gpus=gpus)
    if kind is not None:
        report["measured"][kind] = [{"what": kind, "error": "no driver"}]
    with pytest.raises(ConfigError, match=re.escape(message)):
        machine_of(report, ranks=ranks)


@pytest.mark.parametrize(
    ("device", "memory", "preset"),
    [
        ("NVIDIA A100-SXM4-40GB", 39 << 30, "A100-40"),
        ("NVIDIA A100 80GB PCIe", 79 << 30, "A100-80"),
        ("Tesla V100-SXM2-16GB", 16 << 30, "V100-32"),
        ("NVIDIA GeForce RTX 4090", 24 << 30, "RTX4090"),
        ("AMD Instinct MI300X OAM", 191 << 30, "MI300X"),
        ("NVIDIA L40S", 45 << 30, "A100-40"),  # by memory
    ],
)
def test_a_gpu_is_known_by_its_name_or_its_memory(device: str, memory: int, preset: str) -> None:
    assert nearest_preset(device, memory) == preset


# ------------------------------------------------------------------ the file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_report_is_kept_per_host_and_read_while_it_is_fresh(cache: Path) -> None:
    report = _report()
    assert read_report([], VERSIONS) is None
    file = keep_report(report)
    assert file == cache_file([]) and file.parent == cache / "zeroshard"
    kept = read_report([], VERSIONS)
    assert kept is not None and {**kept, **report} == kept
    assert read_report(["a GPU"], VERSIONS) is None
    assert read_report([], {**VERSIONS, "torch": "3"}) is None
    kept["date"] = (datetime.now(UTC) - timedelta(days=31)).isoformat()
    file.write_text(json.dumps(kept))
    assert read_report([], VERSIONS) is None


def test_a_report_of_a_busy_machine_is_not_kept(cache: Path) -> None:
    for cpus, load, kept in ((2, 1.0, True), (2, 1.1, False), (64, 30.0, True), (64, 60.0, False)):
        report = _report()
        report["host"] |= {"cpus": cpus, "load": load}
        assert ((busy(report) is None), (keep_report(report) is not None)) == (kept, kept), (
            cpus,
            load,
        )


@pytest.mark.parametrize("text", ["", "[]", '{"date": "yesterday"}', '{"date": 3}', "[" * 200_000])
def test_a_file_that_makes_no_sense_is_none(cache: Path, text: str) -> None:
    file = keep_report(_report())
    assert file is not None
    file.write_text(text)
    assert read_report([], VERSIONS) is None


def test_a_report_with_a_gap_is_not_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quick, broken = copy.deepcopy(_report()), copy.deepcopy(_report())
    quick["measured"] = None
    broken["measured"]["copies"].append({"what": "copies, cpu", "error": "no memory"})
    assert (
        keep_report(quick) is None and keep_report(broken) is None and list(cache.iterdir()) == []
    )
    (cache / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    assert keep_report(_report()) is None
