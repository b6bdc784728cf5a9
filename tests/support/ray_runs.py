"""Ray Train with two workers, by an interpreter that has Ray:

    python tests/support/ray_runs.py FOLDER

Two workers train at stage 3 on the CPU. The second is killed after its third step, Ray starts both
again, and they go on from the checkpoint. Prints a line of JSON: the losses of rank 0 by step, and
how often a worker began; then the error of the same run without a second try.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import zeroshard as zs
from tests.support.launched_runs import batch, model

STEPS, KILLED_AT = 6, 3


def train(config: dict[str, str]) -> None:
    """Train as a worker of Ray's: it has joined the ranks already."""
    zs.init_distributed()  # nothing is left to do
    rank, folder = dist.get_rank(), Path(config["folder"])
    assert dist.get_world_size() == 2
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    engine = zs.shard(own, optimizer, stage=3)
    saved = zs.load(folder / "saved", engine) if (folder / "saved").exists() else None
    first = 0 if saved is None else saved.step
    with (folder / f"began-{rank}").open("a") as file:
        file.write(f"{first}\n")
    for step in range(first, STEPS):
        loss = own(batch(step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        zs.save(folder / "saved", engine, step=step + 1)
        if rank == 0:
            with (folder / "losses").open("a") as file:
                file.write(json.dumps([step, loss.item()]) + "\n")
        dist.barrier()
        if (first, step + 1, rank) == (0, KILLED_AT, 1):
            os.kill(os.getpid(), signal.SIGKILL)


def _fit(folder: Path, tries: int) -> dict[str, Any]:
    folder.mkdir()
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=tries)
        ),
    )
    error = ""
    try:
        trainer.fit()
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    lines = (folder / "losses").read_text().splitlines()
    began = (folder / "began-0").read_text().split()
    return {"losses": dict(map(json.loads, lines)), "began": began, "error": error}


def main() -> None:
    """Run both, and print what came of it."""
    folder = Path(sys.argv[1])
    ray.init(num_cpus=4, include_dashboard=False)
    found = {"twice": _fit(folder / "twice", 1), "once": _fit(folder / "once", 0)}
    ray.shutdown()
    print("FOUND", json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
