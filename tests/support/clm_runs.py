"""A script as Transformers' run_clm.py is: nothing in it knows of zeroshard, or imports deepspeed.

    LAUNCHER clm_runs.py --model_name_or_path DIR --train_file text.txt --output_dir out

A saved model learns the bytes of a text. Rank 0 writes the losses to `output_dir`/losses.json. With
``--waits`` each rank writes its process id there, and waits after its second step.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

__all__ = ["main"]


@dataclass
class ModelArguments:
    """Which model."""

    model_name_or_path: str = field(metadata={"help": "a folder of save_pretrained()"})


@dataclass
class DataTrainingArguments:
    """Which data."""

    train_file: str = field(metadata={"help": "a text file"})
    block_size: int = field(default=16, metadata={"help": "bytes of a sample"})
    waits: bool = field(default=False, metadata={"help": "wait to be killed"})


class Blocks(Dataset[dict[str, torch.Tensor]]):
    """The text in blocks of bytes."""

    def __init__(self, path: str, block_size: int) -> None:
        data = torch.tensor(list(Path(path).read_bytes()))
        self.blocks = data[: len(data) // block_size * block_size].view(-1, block_size)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.blocks[index], "labels": self.blocks[index]}


class Waits(TrainerCallback):
    """Waits after the second step, once the process id is written."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"pid-{os.environ.get('RANK', '0')}"

    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        if state.global_step == 2:
            self.path.with_suffix(".part").write_text(str(os.getpid()))
            self.path.with_suffix(".part").rename(self.path)
            time.sleep(600)


def main() -> None:
    """Train, and write the losses."""
    kinds = (ModelArguments, DataTrainingArguments, TrainingArguments)
    model_args, data_args, training_args = HfArgumentParser(kinds).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    folder = Path(training_args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=Blocks(data_args.train_file, data_args.block_size),
        callbacks=[Waits(folder)] if data_args.waits else None,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = {"losses": losses, "engine": type(trainer.model_wrapped).__module__}
    if trainer.is_world_process_zero():
        (folder / "losses.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
