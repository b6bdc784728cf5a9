"""Two GPUs over NCCL: data, groups, order, and what is told where ranks differ or end.

``scripts/gpus.sh`` runs this, part by part. Where there are no two GPUs, two pretended devices
stand for them (slow set), so that it is known to run.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from tests.device.meetings import Call, strayed
from tests.device.programs import CASES, DEVICE, NODE_ROWS, PRECISIONS, Schedule, compare
from tests.gpu.chosen import HAS_CUDA, PRETENDED
from tests.support.harness import run_ranks, spawn_ranks
from tests.support.inside import lanes_of, levels
from tests.support.training import ROWS, Net, batch, two_groups
from zeroshard.comm.native_transport import NativeTransport

HAS_TWO = torch.cuda.device_count() > 1
PAIR = "tests.gpu.own_gpu" if HAS_TWO else PRETENDED
PLAIN_PAIR = f"{PAIR} cuda:nccl" if HAS_TWO else PRETENDED  # no CPU tensors in the job's group
STALL_S = 40.0
pytestmark = [
    pytest.mark.skipif(HAS_CUDA and not HAS_TWO, reason="needs two GPUs, and there is one"),
    *([] if HAS_TWO else [pytest.mark.slow]),
]

OPTIONS = (
    *(f"ordered {row}" for row in ROWS),
    "weights in int8", "gradients in int4", "error feedback", "codecs and no_sync", "codecs, hpz",
    "average", "save and load", "repartition", "a rank leaves", "leaves zero3", "shares shift",
    "integers of 16 bits, equal", "integers of 16 bits, shares", "reduces apart, zero3",
    "reduces apart, hpz", *NODE_ROWS, "two levels of 2, zero1", "two levels of 2, zero3",
)  # fmt: skip
UNDER_PLAIN = ("zero3 bf16", *NODE_ROWS, "codecs and no_sync", "average", "save and load")
LATE: tuple[Schedule, ...] = (("compute_first", 0), ("compute_last", 0))  # lanes, compute
DISTURBED = (
    "zero1 bf16", "zero3 bf16", "zero3-keep fp32", *NODE_ROWS, "ordered zero3", "codecs, hpz",
    "two levels of 2, zero3", "reduces apart, zero3", "states on the host", "a fraction", "no_sync",
)  # fmt: skip


# ------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_the_bits_of_plain_pytorch(row: str, precision: str) -> None:
    """A sum of two has one order, so equality shows the data and not the order."""
    _same(f"{row} {precision}", PAIR)


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_runs_and_repeats(name: str) -> None:
    _same(name, PAIR)


@pytest.mark.parametrize("name", UNDER_PLAIN)
def test_so_it_does_in_a_group_without_cpu_tensors(name: str) -> None:
    _same(name, PLAIN_PAIR)


@pytest.mark.parametrize("name", DISTURBED)
def test_late_lanes_late_compute_and_poison_change_no_bit_here(name: str) -> None:
    _same(name, PAIR, LATE)


def _same(name: str, device: str, schedules: tuple[Schedule, ...] = (("fifo", 0),)) -> None:
    for outcome in run_ranks(2, compare, name, schedules, timeout=100, device=device):
        assert not outcome.found, "\n".join(outcome.found)


# ------------------------------------------------------------------------------------------ order


def _logged(rank: int, world: int, name: str) -> list[Call]:
    """Return this rank's collectives with their lanes, in the order of their launches."""
    log: list[Call] = []
    lanes: dict[int, str] = {}
    module = torch.get_device_module(DEVICE)

    def noting(kind: str, original: Any) -> Any:
        def noted(transport: Any, first: Any, *args: Any, **kw: Any) -> Any:
            key = first if isinstance(first, str) else getattr(first, "key", "a tensor")
            lane = lanes.get(module.current_stream().stream_id, "compute")
            log.append(
                Call(lane, str(transport.size), transport.size, kind, "", f"{kind} of {key}")
            )
            return original(transport, first, *args, **kw)

        return noted

    def take_lanes(run: Any, step: int) -> None:
        lanes.update(lanes_of(run.engine))

    originals = {kind: getattr(NativeTransport, kind) for kind in ("all_gather", "reduce")}
    for kind, original in originals.items():
        setattr(NativeTransport, kind, noting(kind, original))
    try:
        replace(CASES[name].program, after=take_lanes).train(DEVICE, rank=rank)
    finally:
        for kind, original in originals.items():
            setattr(NativeTransport, kind, original)
    first_step = len(log) // CASES[name].program.steps  # before the lanes were known
    return log[first_step:]


@pytest.mark.parametrize("name", ["zero3 bf16", "zero1 bf16", *NODE_ROWS, "two levels of 2, zero3"])
def test_ranks_launch_the_same_collectives_in_one_order_on_their_lanes(name: str) -> None:
    first, second = run_ranks(2, _logged, name, timeout=100, device=PAIR)
    assert first == second and first
    assert not strayed(first)


# ------------------------------------------------------------------------------ ranks that differ


def _model(policy: str = "zero3", **options: Any) -> tuple[Net, Any, zs.Engine]:
    torch.manual_seed(0)
    model = Net(layers=4).to(DEVICE)
    optimizer = two_groups(model)
    comm = options.pop("comm", zs.Comm())
    engine = zs.shard(
        model, optimizer, policy=policy, comm=comm, stall_timeout_s=STALL_S, **options
    )
    return model, optimizer, engine


def _step(rank: int, model: Net, optimizer: Any, engine: zs.Engine, number: int = 0) -> float:
    loss = model(*(one.to(DEVICE) for one in batch(rank, number)))
    engine.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def _killed(rank: int, world: int) -> str:
    model, optimizer, engine = _model()
    _step(rank, model, optimizer, engine)
    if rank == 1:
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        while True:
            _step(rank, model, optimizer, engine)
    except zs.ZeroshardError as error:
        return f"{time.monotonic() - began:.1f} s: {type(error).__name__}: {error}"


def _skips(rank: int, world: int) -> str:
    """Rank 1 leaves a block out of an evaluation, whose unit has the size of the next one's."""
    model, optimizer, engine = _model()
    _step(rank, model, optimizer, engine)
    began = time.monotonic()
    try:
        with torch.no_grad():
            for number in range(2):
                blocks = list(model.blocks)
                if rank == 1 and number == 0:
                    del model.blocks[1]
                model(*(one.to(DEVICE) for one in batch(rank, number)))
                model.blocks = torch.nn.ModuleList(blocks)
        _step(rank, model, optimizer, engine)
    except zs.ZeroshardError as error:
        return f"{time.monotonic() - began:.1f} s: {type(error).__name__}: {error}"
    return "not told"


@pytest.mark.parametrize("program", [_killed, _skips])
def test_what_one_rank_does_alone_is_told(program: Any, capsys: pytest.CaptureFixture[str]) -> None:
    ended = spawn_ranks(2, program, timeout=100, device=PAIR)
    told = [str(one.result or one.stderr.strip().splitlines()[-1:]) for one in ended]
    with capsys.disabled():
        print("", *(f"  {program.__name__} rank {n}: {text[:300]}" for n, text in enumerate(told)),
              sep="\n")  # fmt: skip
    assert "Error" in told[0] or "Mismatch" in told[0], told
    assert "not told" not in told


def _goes_on(rank: int, world: int, kind: str) -> list[float]:
    """Rank 1 fails a block later, so that it has started more; both reset, and go on."""
    model, optimizer, engine = _model()
    losses = [_step(rank, model, optimizer, engine)]
    with suppress(ZeroDivisionError, torch.OutOfMemoryError):
        failing = model.blocks[1 + rank * HAS_TWO]  # the pretended device cannot abort what waits
        handle = failing.register_forward_pre_hook(lambda *_: _fail(kind))
        try:
            _step(rank, model, optimizer, engine, 1)
        finally:
            handle.remove()
    began = time.monotonic()
    engine.reset()
    assert time.monotonic() - began < STALL_S / 2
    optimizer.zero_grad()
    return [*losses, *(_step(rank, model, optimizer, engine, number) for number in (2, 3))]


def _undisturbed(rank: int, world: int) -> list[float]:
    model, optimizer, engine = _model()
    return [_step(rank, model, optimizer, engine, number) for number in (0, 2, 3)]


def _fail(kind: str) -> None:
    if kind == "out of memory":
        torch.empty(2**50, dtype=torch.uint8, device=DEVICE)
    raise ZeroDivisionError


@pytest.mark.parametrize("kind", ["an exception", "out of memory"])
def test_both_go_on_after_a_reset(kind: str) -> None:
    failed = spawn_ranks(2, _goes_on, kind, timeout=100, device=PAIR)  # their group is aborted
    whole = run_ranks(2, _undisturbed, timeout=100, device=PAIR)
    assert [one.result for one in failed] == whole, failed


# ----------------------------------------------------------------------------------------- set-up


def _takes_device(rank: int, world: int, case: str) -> str:
    """Return the backend that `init_distributed()` has chosen, or the error of `shard()`."""
    every = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1").split(",")
    seen = {"its own": every[rank], "the first": every[0]}.get(case, ",".join(every))
    os.environ |= {"CUDA_VISIBLE_DEVICES": seen, "LOCAL_RANK": str(rank), "RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    try:
        if case == "forgotten":  # torch.cuda.set_device()
            dist.init_process_group("cpu:gloo,cuda:nccl")
        else:
            zs.init_distributed()
        model = Net(layers=1).to("cuda")
        engine = zs.shard(model, two_groups(model), stage=3)
    except zs.ZeroshardError as error:
        return f"{type(error).__name__}: {error}"
    with suppress(AttributeError):
        print(zs.memory_table().process.device_connections, "bytes of connections")
    return levels(engine).name


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_TWO, reason="needs two GPUs")
@pytest.mark.parametrize(
    ("case", "expected"),
    [("its own", "nccl"), ("all", "nccl"), ("the first", "gloo"), ("forgotten", "set_device")],
)
def test_ranks_take_their_devices(case: str, expected: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    ended = spawn_ranks(2, _takes_device, case, init_group=False, env=env, timeout=60)
    for one in ended:
        print(case, one.result, one.stdout.strip()[-200:])
        assert expected in str(one.result), one
