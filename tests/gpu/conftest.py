"""What every test of a device shares: the device, deterministic kernels, and a process group of
one rank over the device's own backend.

Where there is no CUDA device, tests take the pretended one of tests/device. Its lanes are threads,
so they run in a second session (tests/support/other_session.py); those marked ``gpu`` need CUDA
itself, and are skipped.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.device.build import build, compiler_missing
from tests.gpu.chosen import HAS_CUDA, chosen_device, order_of
from tests.support import other_session
from tests.support.other_session import OtherSession

# cuBLAS reads it when it is first used
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

HERE = Path(__file__).parent
_session = pytest.StashKey[OtherSession]()


@pytest.fixture
def device() -> str:
    """The device, which is the current one."""
    return chosen_device()


@pytest.fixture
def native_group(device: str, tmp_path: Path) -> Iterator[Any]:
    """A real process group of one rank, the device's own backend (NCCL) for its tensors."""
    kind = torch.device(device).type
    dist.init_process_group(
        f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(kind)}",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=60),
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits in every run."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def in_order(device: str) -> Iterator[None]:
    """The pretended device takes its tasks in the order of their launches: whether a pool needs a
    second buffer is left to chance by threads.
    """
    with nullcontext() if HAS_CUDA else order_of("fifo"):
        yield


@pytest.fixture
def collected(device: str) -> Iterator[None]:
    """Nothing of the tests before is on the device, or goes from it meanwhile: engines are in
    cycles, and the collector comes when it likes.
    """
    gc.collect()
    gc.disable()
    torch.get_device_module(device).empty_cache()
    yield
    gc.enable()


# ------------------------------------------------------------------- where there is no CUDA device


def _is_elsewhere(item: pytest.Item) -> bool:
    """Whether `item` runs in the second session, and this is the first."""
    is_ours = item.path.parent == HERE and not other_session.is_second()
    return is_ours and not HAS_CUDA and compiler_missing() is None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = None if HAS_CUDA else compiler_missing()
    for item in items if missing else ():
        if item.path.parent == HERE and not item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=f"no GPU, and no pretended device: {missing}"))


@pytest.hookimpl(specname="pytest_runtest_protocol", wrapper=True, tryfirst=True)
def pytest_start_other_session(item: pytest.Item) -> Iterator[object]:
    # outside the time limit of a test
    if _is_elsewhere(item):
        session = item.config.stash.get(_session, None)
        if session is None or session.is_over:
            build()
            item.config.stash[_session] = OtherSession(HERE, item.config)
    return (yield)


def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not _is_elsewhere(item):
        return None
    if nextitem is not None and not _is_elsewhere(nextitem):
        nextitem = None
    hook = item.config.hook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in item.config.stash[_session].run(item, nextitem):
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (other := session.config.stash.get(_session, None)) is not None:
        other.close()
