"""Three steps at stage 3, then more of them until the rank is killed: what launch lines start.

    LAUNCHER tests/support/launched_runs.py FOLDER [native]

Each rank writes its losses to FOLDER/losses-N and its process id to FOLDER/pid-N. `native` takes
DeepSpeed's engine by its own name, else it is found as `deepspeed`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS = 3


def model() -> nn.Module:
    """Return the model, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def batch(step: int, rank: int) -> torch.Tensor:
    """Return the batch of a rank, [4, 8]."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))


def ddp_losses(rank: int, world_size: int, steps: int = STEPS) -> list[float]:
    """Return the losses of `steps` steps of DDP on these ranks."""
    shared = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        loss = shared(batch(step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    dist.barrier()
    return losses


def write(path: Path, text: str) -> None:
    """Write a file that is whole where it is there."""
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


def main() -> None:
    """Train as a rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("native", nargs="?")
    parser.add_argument("--local_rank", type=int, default=-1)
    given = parser.parse_args()
    name = "zeroshard.integrations.deepspeed" if given.native else "deepspeed"
    deepspeed: Any = importlib.import_module(name)
    deepspeed.init_distributed()
    rank = dist.get_rank()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine, *_ = deepspeed.initialize(model=model(), config=config)
    losses: list[float] = []
    for step in range(100_000):
        loss = engine(batch(step, rank)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if len(losses) == STEPS:
            found = {"losses": losses, "local_rank": given.local_rank, "engine": engine.__module__}
            found["cores"] = sorted(os.sched_getaffinity(0))
            found["theirs"] = [os.environ.get(name) for name in ("LOCAL_SIZE", "CROSS_SIZE")]
            write(given.folder / f"losses-{rank}", json.dumps(found))
            write(given.folder / f"pid-{rank}", str(os.getpid()))
        time.sleep(0.01)


if __name__ == "__main__":
    main()
