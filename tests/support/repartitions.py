"""What a test of ``engine.repartition()`` compares: everything that rests in an engine, as bits,
with what rests in an engine of the new layout that has loaded a checkpoint of the old one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import zeroshard as zs
from tests.support.training import make_model, take_steps, two_groups
from zeroshard.checkpoint.manifest import digest
from zeroshard.checkpoint.shard_files import as_bytes
from zeroshard.runtime.engine import states_of


@dataclass
class Trained:
    """A model, what steps it, and its average, which another tier than the device does not take."""

    model: Any
    optimizer: torch.optim.Optimizer
    engine: zs.Engine
    average: zs.EMA | None

    def train(self, rank: int, steps: range) -> list[float]:
        """Train on this rank's batches of `steps`; return the losses."""
        losses = []
        for step in steps:
            losses += take_steps(rank, [step], self.model, self.optimizer, self.engine)
            if self.average is not None:
                self.average.update()
        return losses

    @property
    def states(self) -> dict[str, Any]:
        """What is saved beside the engine."""
        return {} if self.average is None else {"average": self.average}


def made(seed: int = 0, *, averaged: bool = False, **options: Any) -> Trained:
    """Return a run that begins, sharded with `options`."""
    model = make_model()
    if seed:
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, **options)
    return Trained(model, optimizer, engine, zs.EMA(engine, 0.9) if averaged else None)


def loaded(run: Trained, folder: Path, **options: Any) -> Trained:
    """Return a run in an engine of its own, sharded with `options`, that has loaded what is in
    `folder`.
    """
    other = made(1, averaged=run.average is not None, **options)
    zs.load(folder, other.engine, states=other.states)
    return other


def rests(run: Trained) -> dict[str, str]:
    """Return a digest of everything that rests on this rank, by name and range."""
    engine, states, out = run.engine, states_of(run.engine), {}
    for table in states.tables():
        for name, others in table.numbers().items():
            out |= {f"{name} {key}": repr(value) for key, value in others.items()}
        for piece in table.pieces():
            with piece.borrowed() as numbers:
                what = f"{piece.name} {piece.kind}"
                out[f"{what}[{piece.start}:{piece.stop}]"] = _digest(numbers)
    out["entries of the optimizer's state"] = str(sum(map(bool, run.optimizer.state.values())))
    for number, average in enumerate([] if run.average is None else run.average.averages):
        out[f"average {number}"] = _digest(average)
    for index, group in enumerate(run.optimizer.param_groups):
        options: Mapping[str, Any] = {k: v for k, v in group.items() if k != "params"}
        out[f"options {index}"] = json.dumps(options, default=str)
        out[f"shards {index}"] = str([list(one.shape) for one in group["params"]])
    whole = engine.full_state_dict(rank0_only=False)
    out |= {f"whole {name}": _digest(value) for name, value in whole.items()}
    out["scale"] = repr(states.scaler_state())
    out["generator"] = _digest(torch.get_rng_state())
    return out


def _digest(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {digest(as_bytes(tensor.detach().cpu().contiguous()))}"
