"""How far it is from a module's hook to the wire: frames on the stack, and files that a step runs.

    python scripts/frames.py            # or --json

For each transport two ranks (four for two levels) train a small model at stage 3. Counted are the
library's own frames between the hook, included, and the deepest one in ``comm/``, of a gather that
nothing has started ahead and of a reduce; and the files of which one ``optimizer.step()`` runs a
function. `scripts/shape.py` counts what the source says by itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch import nn

import zeroshard as zs

SOURCE = str(Path(zs.__file__).parent)
BESIDE = ("mesh.py", "transport.py")  # arithmetic and counting, not on the way
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "nccl": (2, {"transport": "nccl"}),
    "shared memory": (2, {"transport": "shared_memory"}),
    "two levels": (4, {"transport": "gloo", "node_size": 2, "hierarchical": True}),
}


class Watch:
    """Sees every call of the library's functions while it is entered, on this thread."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.depth = {"gather": 0, "reduce": 0}

    def __enter__(self) -> Watch:
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _seen(self, frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(SOURCE):
            return
        self.files.add(file)
        if "/comm/" not in file or file.endswith(BESIDE):
            return
        names, depth, above = [], 0, frame
        while above is not None and not above.f_code.co_filename.endswith("runtime/hooks.py"):
            if above.f_code.co_filename.startswith(SOURCE):
                names.append(above.f_code.co_name)
                depth += 1
            above = above.f_back  # type: ignore[assignment]
        if above is None:
            return  # not below a hook
        for kind, starts in (
            ("gather", ("unshard", "start_gather")),
            ("reduce", ("reduce", "reduce_inside")),
        ):
            if any(name in starts for name in names):
                self.depth[kind] = max(self.depth[kind], depth + 1)


def measure(rank: int, world: int, store: str, options: dict[str, Any], send: Any) -> None:
    """Train on one rank; rank 0 sends its counts."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    zs.shard(model, optimizer, stage=3, prefetch_bytes=0, comm=zs.Comm(**options))
    batch = torch.randn(4, 64)
    for _ in range(2):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.autograd.set_multithreading_enabled(False)
    with Watch() as passes:
        model(batch).square().mean().backward()
    with Watch() as step:
        optimizer.step()
    if rank == 0:
        send.put((passes.depth, sorted(name.removeprefix(SOURCE) for name in step.files)))
    dist.barrier()
    dist.destroy_process_group()


def run(world: int, options: dict[str, Any]) -> tuple[dict[str, int], list[str]]:
    """Return the frames by kind, and the files of a step."""
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(  # type: ignore[no-untyped-call]
            _measure_rank, (world, f"{folder}/store", options, queue), nprocs=world
        )
    counts: tuple[dict[str, int], list[str]] = queue.get()
    return counts


def _measure_rank(rank: int, *rest: Any) -> None:
    torch.set_num_threads(1)
    measure(rank, *rest)


def main(say: Callable[[str], None] = print) -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON")
    as_json = parser.parse_args().json
    counted = {name: run(*case) for name, case in CASES.items()}
    if as_json:
        rows = {name: {**depth, "step": files} for name, (depth, files) in counted.items()}
        say(json.dumps(rows, indent=2))
        return
    say(f"{'transport':<14} {'gather':>7} {'reduce':>7} {'files of a step':>16}")
    for name, (depth, files) in counted.items():
        say(f"{name:<14} {depth['gather']:>7} {depth['reduce']:>7} {len(files):>16}")


if __name__ == "__main__":
    main()
