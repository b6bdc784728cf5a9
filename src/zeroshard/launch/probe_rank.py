"""One of the two ranks between which ``zeroshard doctor`` measures collectives.

Started as ``python -m zeroshard.launch.probe_rank DIRECTORY RANK TRANSPORT...``. The ranks meet in
a file in DIRECTORY; rank 0 prints what it has measured as one line of JSON. The transports are the
library's own (comm/transport.py): these are the rates that a gather and a reduce get.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from zeroshard.comm.select import make_transport
from zeroshard.comm.transport import CommSpec, ReduceRequest, Transport
from zeroshard.core.placement import Mesh
from zeroshard.errors import ConfigError
from zeroshard.memory import synchronize
from zeroshard.system.device import Device

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
            answer += _measured_over(name, device)
        except ConfigError as error:  # on both ranks: memory cannot be shared here
            answer.append({"what": f"2 ranks, {name}", "error": str(error)})
    dist.destroy_process_group()
    if rank == 0:
        print(json.dumps(answer))


def _measured_over(name: str, device: torch.device) -> list[dict[str, Any]]:
    spec = CommSpec(Mesh.of(_SIZE), name, stall_timeout_s=_TIMEOUT.total_seconds())
    transport = make_transport(None, device, spec)
    answer = measure(transport, device)
    transport.control.exchange(b"done")  # nobody leaves early
    transport.close()
    return answer


def measure(transport: Transport, device: torch.device) -> list[dict[str, Any]]:
    """Return latency and bandwidth of `all_gather` and `reduce_scatter`. Collective."""
    out = []
    makers = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter}
    for operation, make in makers.items():
        seconds = {
            numel: _median(make(transport, numel, device), _REPEATS[numel], device)
            for numel in (_SMALL, _LARGE)
        }
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


def _median(run: Callable[[], None], repeats: int, device: torch.device) -> float:
    """Return the median seconds of `repeats` runs, after two to warm up."""
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
