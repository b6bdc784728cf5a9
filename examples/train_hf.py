"""Train a random Llama on local text with Transformers' Trainer, sharded, in either of two ways.

Natively the one changed line is ``ZeroTrainer`` for ``Trainer``:

    zeroshard run --nproc 2 examples/train_hf.py --config examples/zero.json --max-steps 60

A script for DeepSpeed stays as it is, with ``Trainer`` and ``TrainingArguments(deepspeed=FILE)``;
``--as-deepspeed`` lets zeroshard answer in DeepSpeed's place:

    zeroshard run --nproc 2 --as-deepspeed examples/train_hf.py --deepspeed zero.json

Nothing is downloaded: the model is built from a small configuration, the text is the source of
Python's own standard library, byte by byte.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from zeroshard.integrations.transformers import ZeroTrainer


class Bytes(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Windows of `length` bytes of all files together."""

    def __init__(self, files: list[Path], length: int) -> None:
        self.data = torch.frombuffer(
            bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8
        )
        self.length = length

    def __len__(self) -> int:
        return self.data.numel() // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        window = self.data[index * self.length : (index + 1) * self.length].long()
        return {"input_ids": window, "labels": window}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--config",
        default=str(Path(__file__).with_name("zero.json")),
        help="JSON for ZeroTrainer: zeroshard's keywords, or DeepSpeed's form",
    )
    way.add_argument("--deepspeed", help="DeepSpeed's JSON, for Trainer itself")
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument(
        "--output", help="where checkpoints go, the same for all ranks (default: none are made)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in --output"
    )
    # one rank says what is wrong
    with (
        contextlib.redirect_stderr(io.StringIO())
        if os.environ.get("RANK", "0") != "0"
        else contextlib.nullcontext()
    ):
        options = parser.parse_args()
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    library = Path(sysconfig.get_path("stdlib"))
    train, validation = (
        Bytes(sorted(library.glob("[a-s]*.py")), 128),
        Bytes(sorted(library.glob("[t-z]*.py")), 128),
    )
    with tempfile.TemporaryDirectory() as temporary:
        arguments = TrainingArguments(
            output_dir=options.output or temporary,
            max_steps=options.max_steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=2e-3,
            warmup_steps=10,
            logging_steps=10,
            save_strategy="steps" if options.output else "no",
            save_steps=max(1, options.max_steps // 2),
            report_to=[],
            # with DeepSpeed's JSON Accelerate would drop the configuration
            use_cpu=options.deepspeed is None and not torch.accelerator.is_available(),
            deepspeed=options.deepspeed,
        )
        subset = torch.utils.data.Subset(validation, range(64))
        given: dict[str, Any] = {"model": model, "args": arguments, "train_dataset": train}
        if options.deepspeed is None:
            trainer = ZeroTrainer(zero=options.config, eval_dataset=subset, **given)
        else:
            trainer = Trainer(eval_dataset=subset, **given)
        trainer.train(resume_from_checkpoint=options.resume or None)
        result = trainer.evaluate()
        if options.output:
            trainer.save_model()
        if trainer.is_world_process_zero():
            if isinstance(trainer, ZeroTrainer):
                assert trainer.engine is not None
                print(trainer.engine)
                print(trainer.engine.memory())
            print(f"validation loss: {result['eval_loss']:.3f} nats per byte")


if __name__ == "__main__":
    main()
