"""What the tests of damaged, hostile and full disks share: a small run with state of every kind,
and a fingerprint of all of it.
"""

from __future__ import annotations

import json
import random
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import zeroshard as zs
from tests.support.training import Net, take_steps, two_groups
from zeroshard.checkpoint.manifest import digest
from zeroshard.checkpoint.shard_files import ShardReader, as_bytes
from zeroshard.checkpoint.steps import StepFiles, list_steps
from zeroshard.runtime.engine import states_of


class Counting(Net):
    """A model with a buffer, of which each rank has its own."""

    seen: torch.Tensor

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        self.seen += int(x.sum())
        return super().forward(x, y)


@dataclass
class Training:
    """A model, what steps it, and what is saved with it."""

    model: Counting
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    engine: zs.Engine

    def step(self, rank: int, number: int) -> float:
        (loss,) = take_steps(rank, [number], self.model, self.optimizer, self.engine)
        self.schedule.step()
        return loss

    def save(self, folder: Path, step: int, **options: Any) -> Path:
        extra = {"best": float("inf"), "curve": torch.arange(50.0) + step}
        return zs.save(
            folder,
            self.engine,
            step=step,
            states={"schedule": self.schedule},
            extra=extra,
            **options,
        )

    def load(self, folder: Path, **options: Any) -> zs.Restored:
        return zs.load(folder, self.engine, states={"schedule": self.schedule}, **options)

    def fingerprint(self) -> dict[str, str]:
        """Return a hash of everything that a load may change on this rank, by name."""
        out = {
            f"{piece.name}[{piece.start}:]": digest(as_bytes(piece.tensor))
            for piece in states_of(self.engine).resting_pieces()
        }
        for owned in states_of(self.engine).stepped_pieces():
            for key, value in sorted(self.optimizer.state.get(owned.tensor, {}).items()):
                out[f"{owned.name}.{key}"] = digest(as_bytes(torch.as_tensor(value)))
        out |= {name: digest(as_bytes(buffer)) for name, buffer in self.model.named_buffers()}
        options = [
            {key: value for key, value in group.items() if key != "params"}
            for group in self.optimizer.param_groups
        ]
        out["options"] = json.dumps(options, default=str)
        out["schedule"] = json.dumps(self.schedule.state_dict(), default=str)
        out["generators"] = digest(
            repr((random.getstate(), np.random.get_state()[1].tobytes())).encode()
            + bytes(as_bytes(torch.get_rng_state()))
        )
        return out


def make(row: str = "zero3", seed: int = 0, **sizes: int) -> Training:
    """Return a run that begins; `sizes` are the model's."""
    torch.manual_seed(seed)
    model = Counting(**sizes)
    optimizer = two_groups(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    return Training(model, optimizer, schedule, zs.shard(model, optimizer, policy=row))


def train_and_save(
    rank: int, world: int, folder: Path, steps: tuple[int, ...] = (1, 2)
) -> dict[str, str]:
    """Train, save each of `steps`, and return the fingerprint after the last."""
    training = make()
    torch.manual_seed(rank)
    for step in steps:
        training.step(rank, step)
        training.save(folder, step)
    fingerprint = training.fingerprint()
    training.engine.close()
    return fingerprint


def check_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Assert that both have the same names, dtypes and values."""
    assert sorted(got) == sorted(expected)
    for name, value in expected.items():
        assert got[name].dtype is value.dtype and torch.equal(got[name], value), name


def check_everything(directory: Path) -> list[str]:
    """Read every byte of every step; return what is damaged, in words. Raises CheckpointError
    where there is no reading on.
    """
    damaged = []
    for path in list_steps(directory).values():
        with ExitStack() as stack:
            files = StepFiles(path, stack)
            manifest, _ = files.manifest()
            files.check(manifest)
        for number, file in enumerate(manifest.files):
            with ShardReader(path / file.name, file, chunk_bytes=manifest.chunk_bytes) as opened:
                damaged += [
                    f"{opened.path}: {text}"
                    for entry in manifest.tensors
                    if entry.file == number
                    for text in opened.check(entry)
                ]
    return damaged
