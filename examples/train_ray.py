"""Train a small GPT under Ray Train, with as many workers as the cluster has room for.

    pip install "ray[train]"
    ray start --head --num-cpus 2              # on other machines: ray start --address=...
    python examples/train_ray.py --workers 1 4 --folder runs/ray

When a worker or a node is lost Ray starts the function again with the workers that are left, and
when a node has joined with more: each time it goes on from the newest step. With ``leaves`` the
losses are those of the undisturbed run, to the bit, however many workers each step had. A line of
JSON for every start of a worker, and for every step, goes to ``log.jsonl`` in the folder, which all
machines share.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from train_gpt import GPT, GPTConfig, load_text, windows

import zeroshard as zs


def train(config: dict[str, Any]) -> None:
    """Train as one worker; Ray has joined the workers already."""
    zs.init_distributed()  # does nothing here; joins the ranks under other launchers
    folder, leaves = Path(config["folder"]), config["leaves"]
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=96, heads=3, context=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine = zs.shard(model, optimizer, stage=3, leaves=leaves)
    text, _ = load_text(None)

    def log(**line: object) -> None:
        with (folder / "log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    # redundancy: a copy of each step in the memory of another node
    with zs.Saver(folder / "saved", engine, keep_last=2, redundancy=1) as saver:
        begin, in_memory = 0, False
        if zs.latest_step(folder / "saved") is not None:
            restored = zs.load(folder / "saved", engine)  # the newest of memory and disk
            begin, in_memory = restored.step, restored.from_memory
        start = {"rank": engine.rank, "world": engine.world, "begin": begin}
        log(**start, pid=os.getpid(), from_memory=in_memory)
        for step in range(begin + 1, config["steps"] + 1):
            losses = torch.zeros(leaves)
            for leaf in engine.leaves(step):
                # drawn from (seed, step, leaf): the same samples whoever computes the leaf
                starts = torch.randint(len(text) - 64, (config["batch"],))
                loss = model(*windows(text, starts, 64, torch.device("cpu")))
                engine.backward(loss)
                losses[leaf] = loss.item()
            optimizer.step()
            optimizer.zero_grad()
            if dist.is_initialized():  # not where this function is called without a launcher
                dist.all_reduce(losses)  # each leaf's, plus zeros
            if engine.rank == 0:
                log(step=step, world=engine.world, loss=losses.mean().item())
            saver.keep(step)  # in memory that outlives the worker
            if step % config["save_every"] == 0 or step == config["steps"]:
                saver.save(step)  # on disk


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT under Ray Train, elastic.")
    parser.add_argument("--workers", type=int, nargs=2, default=(1, 4), metavar=("MIN", "MAX"))
    parser.add_argument("--folder", type=Path, required=True, help="shared by all machines")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--leaves", type=int, default=4, help="micro-batches of a step")
    parser.add_argument("--batch", type=int, default=8, help="samples of a leaf")
    parser.add_argument("--save-every", type=int, default=50, help="steps")
    parser.add_argument("--failures", type=int, default=3, help="starts after failures; -1: any")
    parser.add_argument("--resize-every", type=float, default=60.0, help="seconds: look for nodes")
    args = parser.parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    trainer = TorchTrainer(
        train,
        train_loop_config={**vars(args), "folder": str(folder)},
        scaling_config=ScalingConfig(
            num_workers=tuple(args.workers), elastic_resize_monitor_interval_s=args.resize_every
        ),
        run_config=RunConfig(
            storage_path=str(folder / "ray"),
            failure_config=FailureConfig(max_failures=args.failures),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
