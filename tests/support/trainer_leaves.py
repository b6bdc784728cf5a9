"""Trainer runs with leaves on every rank, for test_transformers.py."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

import zeroshard as zs
from tests.support.trainer_features import IGNORED, rows
from zeroshard.core.digest import digest_of
from zeroshard.integrations.transformers import ZeroTrainer

# by number of ranks; two ranks have a subtree of the even leaves each, which stage 1 reduces once
STAGES = {1: 1, 2: 3, 3: 2}
EVEN_STAGES = {1: 2, 2: 1, 3: 3}
EVEN, UNEVEN = "2x3", 7
SIZE, STEPS = 2, 5
_SCHEDULE: dict[str, Any] = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 9}


class Mean(nn.Module):
    """A model that knows nothing of the other micro-batches: its loss is a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 16)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(16, 61)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.dropout(self.embed(input_ids))).flatten(0, 1)
        return {"loss": nn.functional.cross_entropy(logits, labels.flatten())}


def gpt() -> GPT2LMHeadModel:
    """Return a GPT-2 with dropout, the default."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=61, n_positions=16, n_embd=32, n_layer=2, n_head=4)
    )


def masked(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch without some of its labels, which three generators choose."""
    batch = {name: torch.stack([one[name] for one in samples]) for name in samples[0]}
    kept = torch.rand(batch["labels"].shape) < 0.9
    batch["labels"] = torch.where(kept, batch["labels"], IGNORED)
    for place in (random.randrange(12), np.random.randint(12)):
        batch["labels"][:, place] = IGNORED
    return batch


def trainer_of(
    folder: Path,
    model: nn.Module,
    zero: dict[str, Any],
    data: Any = None,
    collate: Any = None,
    **changes: Any,
) -> ZeroTrainer:
    """Return a trainer of ragged samples, three steps of which are an epoch."""
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": SIZE,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        **_SCHEDULE,
    }
    arguments = TrainingArguments(**given | changes)
    samples = rows(0, 45, ragged=True) if data is None else data
    options: dict[str, Any] = {"train_dataset": samples, "data_collator": collate}
    return ZeroTrainer(zero=zero, model=model, args=arguments, **options)


def _trained(
    folder: Path, model: nn.Module, zero: dict[str, Any], resume: str | None = None, **changes: Any
) -> dict[str, Any]:
    trainer = trainer_of(folder, model, zero, **changes)
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.engine is not None
    log = trainer.state.log_history
    out = {
        "hash": _hash(trainer.engine),
        "losses": [entry["loss"] for entry in log if "loss" in entry],
        "rates": [entry["learning_rate"] for entry in log if "learning_rate" in entry],
        "norms": [float(entry["grad_norm"]) for entry in log if "grad_norm" in entry],
        "accumulated": trainer.args.gradient_accumulation_steps,
        "samples": trainer._samples(),
    }
    trainer.engine.close()
    torch.distributed.barrier()
    return out


def _hash(engine: zs.Engine) -> str:
    state = engine.full_state_dict()
    return digest_of(*(state[name] for name in sorted(state))) if state else ""


def _by_hand(zero: dict[str, Any]) -> str:
    """Train `Mean` in a loop of one's own; return the hash of its weights."""
    set_seed(3)
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine = zs.shard(model, optimizer, **zero)
    data = rows(0, 45)
    sampler = zs.LeafSampler(data, zero["leaves"], SIZE, seed=3)
    for step in range(STEPS):
        for leaf in engine.leaves(step, seed=3):
            samples = [data[index] for index in sampler[step, leaf]]
            batch = {name: torch.stack([one[name] for one in samples]) for name in samples[0]}
            engine.backward(model(**batch)["loss"])
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    found = _hash(engine)
    engine.close()
    return found


def run(rank: int, world: int, root: str) -> dict[str, Any]:
    """Train every run; return what this rank has seen."""
    torch.set_num_threads(1)
    folder, stage = Path(root), STAGES[world]
    out: dict[str, Any] = {}
    for name, leaves in (("even", EVEN), ("uneven", UNEVEN)):
        zero = {"stage": EVEN_STAGES[world] if name == "even" else stage, "leaves": leaves}
        saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
        data: dict[str, Any] = {}
        if name == "even":  # on two ranks, another process reads the data
            data = {"collate": masked, "dataloader_num_workers": int(world == 2)}
        set_seed(3 + rank)  # training makes the ranks' models one
        out[name] = _trained(folder / f"{name} {world}", gpt(), zero, **saving, **data)
        other = folder / f"{name} {world + 1}" / "checkpoint-2"
        if other.is_dir():
            resumed = _trained(folder / f"{name} resumed {world}", gpt(), zero, str(other), **data)
            out[f"{name} resumed"] = resumed
    shares = [5 / 7, 2 / 7] if world == 2 else None
    zero = {"stage": stage, "leaves": UNEVEN, "batch_shares": shares}
    plain: dict[str, Any] = {"optim": "sgd", "lr_scheduler_type": "constant", "warmup_steps": 0}
    set_seed(3)
    out["mean"] = _trained(folder / "mean", Mean(), zero, data=rows(0, 45), **plain)
    out["by hand"] = _by_hand(zero)
    half: dict[str, Any] = {
        "fp16": {"enabled": True},
        "gradient_clipping": "auto",
        "train_batch_size": SIZE * UNEVEN,
        "zero_optimization": {"stage": stage},
        "zeroshard": {"leaves": UNEVEN},
    }
    set_seed(3)
    out["fp16"] = _trained(folder / "fp16", gpt(), half)
    return out
