"""The memory of the host: the system's, or what a control group leaves of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroshard.system.this_host import HostMemory

GIB = 1 << 30


def _host(root: Path, files: dict[str, object]) -> HostMemory:
    meminfo = f"MemTotal: {64 * GIB >> 10} kB\nMemAvailable: {48 * GIB >> 10} kB\n"
    for name, text in {"proc/meminfo": meminfo, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(str(text))
    return HostMemory.now(root)


def test_without_a_control_group_the_system_counts(tmp_path: Path) -> None:
    assert _host(tmp_path, {}) == HostMemory(64 * GIB, 48 * GIB, None)


def test_the_tightest_group_counts_and_its_page_cache_is_free(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/jobs"
    files = {
        "proc/self/cgroup": "0::/jobs/mine\n",
        f"{group}/mine/memory.max": "max",
        f"{group}/memory.max": 8 * GIB,
        f"{group}/memory.current": 5 * GIB,
        f"{group}/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
    }
    assert _host(tmp_path, files) == HostMemory(8 * GIB, 5 * GIB, 8 * GIB)


@pytest.mark.parametrize(("limit", "expected"), [(8 * GIB, 8 * GIB), (1 << 63, None)])
def test_the_first_version_of_the_interface(
    tmp_path: Path, limit: int, expected: int | None
) -> None:
    group = "sys/fs/cgroup/memory/mine"
    files = {
        "proc/self/cgroup": "3:cpu:/mine\n2:memory,hugetlb:/mine\n",
        f"{group}/memory.limit_in_bytes": limit,
        f"{group}/memory.usage_in_bytes": GIB,
    }
    assert _host(tmp_path, files).limit == expected


def test_this_host_has_memory() -> None:
    memory = HostMemory.now()
    assert 0 < memory.available <= memory.total
