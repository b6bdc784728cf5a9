"""The measurements of ``zeroshard doctor``: seconds of work each, about 20 s together.

Between two ranks collectives are measured: processes of this module, which meet in a file in
DIRECTORY. Rank 0 prints its answer as one line of JSON.

    python -m zeroshard.commands.probes DIRECTORY RANK TRANSPORT...

The transports are the library's own (comm/transport.py): these are the rates that a gather and a
reduce get.

Grade "probe": one process (two for collectives), warmed up once, the best of a few repetitions, and
nobody else kept off the machine. Good enough to tell which link is slow and to calibrate a plan;
``zeroshard bench`` compares.

Rates are per second of wall time: floating-point operations, or bytes of payload one way.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from zeroshard.comm.select import make_transport
from zeroshard.comm.transport import CommSpec, ReduceRequest, Transport
from zeroshard.core.placement import Mesh
from zeroshard.core.work import Work
from zeroshard.errors import ConfigError
from zeroshard.memory import synchronize
from zeroshard.system.device import Device
from zeroshard.tier.disk import DiskStore
from zeroshard.tier.store import Storage
from zeroshard.tier.swapdir import BLOCK, SwapDirectory, free_bytes

_BUDGET_S = 0.4  # of one rate
# on the CPU, and on an accelerator
_COPY_BYTES = 64 << 20, 256 << 20
_MATMUL_SIDES = 512, 4096
RANKS_TIMEOUT_S = 40.0
_DISK_BYTES = 256 << 20
_DISK_CHUNK = 16 << 20
_DISK_BUDGET_S = 2.0  # each way
_LONE_READS = 25


def matmul(device: torch.device) -> list[dict[str, Any]]:
    """Return "flops_per_s" of square products on `device`, in fp32 and bf16."""
    side, out = _MATMUL_SIDES[device.type != "cpu"], []
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        seconds = _best(partial(torch.matmul, a, b), device)
        rate = 2 * side**3 / seconds
        name = str(dtype).removeprefix("torch.")
        out.append({"device": str(device), "dtype": name, "side": side, "flops_per_s": rate})
    return out


def copies(device: torch.device) -> list[dict[str, Any]]:
    """Return "bytes_per_s" of copies within `device` and, beside an accelerator, to and from the
    host, pinned and not.
    """
    num_bytes = _COPY_BYTES[device.type != "cpu"]
    here = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    pairs: list[tuple[str, torch.Tensor, torch.Tensor, bool | None]] = [
        ("within", torch.empty_like(here), here, None)
    ]
    if device.type != "cpu":
        for pinned in (True, False):
            host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=pinned)
            pairs += [("to device", here, host, pinned), ("to host", host, here, pinned)]
    out = []
    for way, target, source, is_pinned in pairs:
        seconds = _best(partial(target.copy_, source), device)
        rate = num_bytes / seconds
        out.append({"device": str(device), "way": way, "pinned": is_pinned, "bytes_per_s": rate})
    return out


def collectives(*transports: str) -> list[dict[str, Any]]:
    """Return "latency_s" (a call of 256 bytes) and "bytes_per_s" (received by a rank) of each
    collective of `transports` between 2 ranks on this host. Raises RuntimeError where that fails.
    """
    with tempfile.TemporaryDirectory(prefix="zeroshard-doctor-") as directory:
        command = [sys.executable, "-m", "zeroshard.commands.probes", directory]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), *transports], stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            for rank in range(2)
        ]
        stop = time.monotonic() + RANKS_TIMEOUT_S
        try:
            ended = [rank.communicate(timeout=max(stop - time.monotonic(), 0.1)) for rank in ranks]
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no answer within {RANKS_TIMEOUT_S:g} s") from None
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    for rank, (_, stderr) in zip(ranks, ended, strict=True):
        if rank.returncode:
            last = stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(*last or [f"a rank ended with {rank.returncode}"])
    answer: list[dict[str, Any]] = json.loads(ended[0][0])
    return answer


def disk(directory: Path) -> list[dict[str, Any]]:
    """Return "write_bytes_per_s" and "read_bytes_per_s" of the disk tier below `directory`,
    "free_bytes" there, whether it goes past the page cache ("direct"), the seconds of cores that a
    byte takes ("core_s_per_byte"), and how long a read of one block takes: "latency_s", and
    "busy_latency_s" where every core computes, so that the disk's thread waits for one.

    Raises OSError.
    """
    free = free_bytes(directory)
    num_bytes = min(_DISK_BYTES, free // 4) // _DISK_CHUNK * _DISK_CHUNK
    if not num_bytes:
        raise OSError("hardly any free space")
    files = SwapDirectory(directory, rank=0, run="doctor")
    store = DiskStore(files, torch.device("cpu"), staging_bytes=4 * _DISK_CHUNK)
    try:
        storage = store.allocate("doctor", num_bytes, torch.uint8)
        ring = [store.staging.tensor(_DISK_CHUNK, torch.uint8).random_() for _ in range(4)]
        before = time.process_time()
        written, write_rate = _stream(storage.write, ring, num_bytes)
        read, read_rate = _stream(storage.read, ring, written)
        core_s = (time.process_time() - before) / (written + read)
        latency = _latency(storage, ring[0])
        with _busy_cores():
            busy_latency = _latency(storage, ring[0])
    finally:
        store.close()
    rates = {"write_bytes_per_s": write_rate, "read_bytes_per_s": read_rate}
    facts = {"path": str(directory), "direct": store.direct, "bytes": written, "free_bytes": free}
    costs = {"core_s_per_byte": core_s, "latency_s": latency, "busy_latency_s": busy_latency}
    return [facts | rates | costs]


# ------------------------------------------------------------------------------------------ helpers


def _best(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of the fastest of the runs that fit the budget, after one to warm up."""
    seconds: list[float] = []
    while sum(seconds[1:]) < _BUDGET_S:
        start = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _latency(storage: Storage, buffer: torch.Tensor) -> float:
    """Return the median seconds of a read of one block by itself."""
    seconds = []
    for number in range(_LONE_READS):
        begin = time.perf_counter()
        storage.read(number * BLOCK, (number + 1) * BLOCK, buffer[:BLOCK]).wait()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


@contextmanager
def _busy_cores() -> Iterator[None]:
    """Compute on every core that this process may use."""
    line = [sys.executable, "-S", "-c", "print(flush=True)\nwhile True: pass"]
    pipe, cores = subprocess.PIPE, len(os.sched_getaffinity(0))
    processes = [subprocess.Popen(line, stdout=pipe) for _ in range(cores)]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()  # it has started
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def _stream(
    start_one: Callable[[int, int, torch.Tensor], Work], ring: list[torch.Tensor], num_bytes: int
) -> tuple[int, float]:
    """Move at most `num_bytes`, in chunks through a ring of buffers, while the budget lasts;
    return the bytes that were moved, and their rate.
    """
    begin, moved = time.perf_counter(), 0
    under_way: list[Work] = []
    while moved < num_bytes and (time.perf_counter() - begin < _DISK_BUDGET_S or not moved):
        if len(under_way) == len(ring):
            under_way.pop(0).wait()
        buffer = ring[moved // _DISK_CHUNK % len(ring)]
        under_way.append(start_one(moved, moved + _DISK_CHUNK, buffer))
        moved += _DISK_CHUNK
    for work in under_way:
        work.wait()
    return moved, moved / (time.perf_counter() - begin)


# ----------------------------------------------------------------------------- the ranks of a probe


_SIZE = 2
_SMALL = 64  # elements of fp32 per rank: 256 bytes
_LARGE = 2 << 20  # 8 MiB
_REPEATS = {_SMALL: 100, _LARGE: 12}
_TIMEOUT = timedelta(seconds=60)


def main(argv: list[str]) -> None:
    """Measure as the rank in `argv` = [directory, rank, *transports]."""
    directory, rank, names = Path(argv[0]), int(argv[1]), argv[2:]
    device, backend = torch.device("cpu"), "gloo"
    torch.set_num_threads(1)  # as ranks that share a host
    if "nccl" in names and (accelerator := Device.accelerator()) is not None:
        device = accelerator.make_current(rank)
        backend = f"cpu:gloo,{device.type}:{accelerator.backend}"
    store = dist.FileStore(str(directory / "meeting"), _SIZE)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=_SIZE, timeout=_TIMEOUT)
    answer = []
    for name in names:
        try:
            spec = CommSpec(Mesh.of(_SIZE), name, stall_timeout_s=_TIMEOUT.total_seconds())
            transport = make_transport(None, device, spec)
            answer += measure(transport, device)
            transport.control.exchange(b"done")  # nobody leaves early
            transport.close()
        except ConfigError as error:  # on both ranks: memory cannot be shared here
            answer.append({"what": f"2 ranks, {name}", "error": str(error)})
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(answer))


def measure(transport: Transport, device: torch.device) -> list[dict[str, Any]]:
    """Return latency and bandwidth of `all_gather` and `reduce_scatter`. Collective."""
    out = []
    makers = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter}
    for operation, make in makers.items():
        seconds: dict[int, float] = {}
        for numel, repeats in _REPEATS.items():
            run, times = make(transport, numel, device), []
            for _ in range(repeats + 2):
                start = time.perf_counter()
                run()
                synchronize(device)
                times.append(time.perf_counter() - start)
            seconds[numel] = statistics.median(times[2:])  # after two to warm up
        rate = _LARGE * 4 * (_SIZE - 1) / seconds[_LARGE]
        found = {"latency_s": seconds[_SMALL], "bytes_per_s": rate}
        names = {"transport": transport.name, "operation": operation, "ranks": _SIZE}
        out.append(names | found)
    return out


def _all_gather(transport: Transport, numel: int, device: torch.device) -> Callable[[], None]:
    ranges = [(rank * numel, (rank + 1) * numel) for rank in range(_SIZE)]
    local, whole = torch.ones(numel, device=device), torch.empty(_SIZE * numel, device=device)

    def run() -> None:
        transport.all_gather(f"gather {numel}", local, ranges, whole).wait()

    return run


def _reduce_scatter(transport: Transport, numel: int, device: torch.device) -> Callable[[], None]:
    ranges = [(rank * numel, (rank + 1) * numel) for rank in range(_SIZE)]
    key, out = f"reduce {numel}", torch.empty(numel, device=device)
    request = ReduceRequest(key, ranges, torch.float32)

    def run() -> None:
        buffer = transport.grad_buffer(key, _SIZE * numel, torch.float32, device)
        buffer.fill_(1.0)  # part of the time, as in a backward
        transport.reduce(request, buffer, out, accumulate=False).wait()

    return run


if __name__ == "__main__":
    main(sys.argv[1:])
