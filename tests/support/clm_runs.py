"""A script as Transformers' run_clm.py is: nothing in it knows of zeroshard, or imports deepspeed.

    LAUNCHER clm_runs.py --model_name_or_path DIR --train_file text.txt --output_dir out
    LAUNCHER clm_runs.py --config_name DIR ...    # the same model, from random weights

The model learns the bytes of a text. Rank 0 writes the losses and the rates to
`output_dir`/losses.json. With ``--waits`` each rank writes its process id there, and waits after
its second step. ``--plain_warmup N`` is for the run to compare with, which no configuration gives
a schedule: it has DeepSpeed's WarmupLR over N steps, as torch alone computes it.
"""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    HfArgumentParser,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    initialization,
    set_seed,
)
from transformers.integrations import is_deepspeed_zero3_enabled


@dataclass
class ModelArguments:
    """Which model."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "a folder of save_pretrained()"}
    )
    config_name: str | None = field(
        default=None, metadata={"help": "the same, of which only the configuration is read"}
    )
    plain_warmup: int = field(default=0, metadata={"help": "steps of a schedule made of torch"})


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


class WarmTrainer(Trainer):
    """A Trainer whose rate rises with the logarithm of the step, and then stays."""

    plain_warmup = 0

    def create_scheduler(self, num_training_steps, optimizer=None):  # type: ignore[no-untyped-def]
        if self.plain_warmup and self.lr_scheduler is None:
            steps = math.log(self.plain_warmup)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer or self.optimizer,
                # the first two steps have a rate of 0: the count begins after the first
                lambda step: min(1.0, math.log(max(step, 1)) / steps),
            )
        return super().create_scheduler(num_training_steps, optimizer)


def from_scratch(name: str) -> torch.nn.Module:
    """Return a model of random weights, drawn in the order in which Transformers draws them at
    stage 3: no layer draws while it is made.
    """
    config = AutoConfig.from_pretrained(name)
    if is_deepspeed_zero3_enabled():
        return AutoModelForCausalLM.from_config(config)
    with initialization.no_init_weights():
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.initialize_weights()
    model.tie_weights()
    return model


def main() -> None:
    """Train, and write the losses."""
    kinds = (ModelArguments, DataTrainingArguments, TrainingArguments)
    model_args, data_args, training_args = HfArgumentParser(kinds).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    if model_args.config_name is not None:
        model = from_scratch(model_args.config_name)
    else:
        model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
    folder = Path(training_args.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    WarmTrainer.plain_warmup = model_args.plain_warmup
    trainer = WarmTrainer(
        model=model,
        args=training_args,
        train_dataset=Blocks(data_args.train_file, data_args.block_size),
        callbacks=[Waits(folder)] if data_args.waits else None,
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = {
        "losses": [entry["loss"] for entry in steps],
        "rates": [entry["learning_rate"] for entry in steps],
        "engine": type(trainer.model_wrapped).__module__,
    }
    if trainer.is_world_process_zero():
        (folder / "losses.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
