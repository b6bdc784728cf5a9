"""``python -m benchmarks.repartition``: how long ``engine.repartition()`` takes, beside saving,
sharding anew and loading, which gives the same bits.

    python -m benchmarks.repartition --json                  # this table as JSON
    python -m benchmarks.repartition --ranks 2 --mib 256 --turns 5

Both take turns (A B A B ...) on the same states, fp32 weights and Adam moments of a stack of square
layers, on as many ranks as asked for (this process starts them). A turn is the way there and back;
of the way there the slowest rank's seconds count. Checkpoints go to a directory in memory where
there is one (/dev/shm), so that the disk is not what is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from benchmarks.tables import grid, publish

__all__ = ["CASES", "main"]

_WIDTH = 1024
_RANK = "ZEROSHARD_BENCH_RANK"
_HOST = {"optimizer": "host", "grad": "host"}
# by name: the options of shard() before, and after
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "stage 1 to 3": ({"policy": "zero1", "offload": {}}, {"policy": "zero3", "offload": {}}),
    "stage 3 to 1": ({"policy": "zero3", "offload": {}}, {"policy": "zero1", "offload": {}}),
    "device to host": ({"policy": "zero2", "offload": {}}, {"policy": "zero2", "offload": _HOST}),
}


def _made(layers: int, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, zs.Engine]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    engine = zs.shard(model, optimizer, units=[nn.Linear], **options)
    model(torch.ones(2, _WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, engine


def _timed(action: Any) -> float:
    """Return the seconds of the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    action()
    seconds = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return seconds.item()


def _measure(case: str, layers: int, turns: int, folder: Path) -> dict[str, Any]:
    before, after = CASES[case]
    model, optimizer, engine = _made(layers, **before)
    ours, others, number = [], [], 0

    def by_checkpoint(options: dict[str, Any]) -> None:
        nonlocal engine, number
        number += 1
        zs.save(folder / "steps", engine, step=number, keep_last=1)
        engine.close()
        engine = zs.shard(model, optimizer, units=[nn.Linear], **options)
        zs.load(folder / "steps", engine)

    for turn in range(turns + 1):  # the first one warms both up
        one = _timed(lambda: engine.repartition(**after))
        engine.repartition(**before)
        other = _timed(lambda: by_checkpoint(after))
        by_checkpoint(before)
        if turn:
            ours.append(one)
            others.append(other)
    engine.close()
    return {
        "case": case,
        "repartition_s": statistics.median(ours),
        "save_shard_load_s": statistics.median(others),
        "ratio": statistics.median(b / a for a, b in zip(ours, others, strict=True)),
        "turns": turns,
    }


def _rank(arguments: argparse.Namespace, folder: Path) -> None:
    """Measure on one rank; rank 0 writes the results."""
    rank = int(os.environ[_RANK])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "meeting"), arguments.ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=arguments.ranks)
    layers = max(1, arguments.mib * (1 << 20) // (4 * _WIDTH * _WIDTH))
    rows = [_measure(case, layers, arguments.turns, folder) for case in CASES]
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    root = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=root if root.is_dir() else None) as name:
        command = [sys.executable, "-m", "benchmarks.repartition", "--folder", name]
        for option in ("ranks", "mib", "turns"):
            command += [f"--{option}", str(getattr(arguments, option))]
        ranks = [
            subprocess.Popen(command, env={**os.environ, _RANK: str(rank)})
            for rank in range(arguments.ranks)
        ]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        rows: list[dict[str, Any]] = json.loads((Path(name) / "rows.json").read_text())
    return rows


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=128, help="of fp32 weights")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        _rank(arguments, arguments.folder)
        return 0
    rows = _run(arguments)
    report = {"mib": arguments.mib, "ranks": arguments.ranks, "rows": rows}
    cells = [
        (row["case"], f"{row['repartition_s']:.3f} s", f"{row['save_shard_load_s']:.3f} s",
         f"{row['ratio']:.1f}x")
        for row in rows
    ]  # fmt: skip
    table = grid("", ("", "repartition", "save, shard, load", "ratio"), cells)
    return publish(report, [table], (), out=None, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
