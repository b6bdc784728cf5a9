"""One short run of a trainer of TRL's: ``trl_runs.py SFT|DPO|GRPO plain|native|deepspeed FOLDER``.

Rank 0 prints the losses. A random Llama is saved by ``make`` and loaded by each run, at stage 3
through ``zero.Init``.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import datasets.fingerprint
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

from zeroshard.integrations.transformers import ZeroTrainerMixin

# names of cached results: dill cannot pickle a class of pyarrow's to form them
datasets.fingerprint.Hasher.hash = classmethod(lambda cls, value: os.urandom(8).hex())

TEXT = "".join(chr(97 + (number * number) % 26) for number in range(4096))
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {"stage": 3},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "SFT": {"max_length": 32},
    "DPO": {"max_length": 32},
    "GRPO": {"max_completion_length": 8, "num_generations": 2, "beta": 0.1},
}


def _tokenizer() -> Any:
    vocabulary = {chr(number): number for number in range(128)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=chr(0), pad_token=chr(1), bos_token=chr(2)
    )


def _rows(kind: str) -> list[dict[str, str]]:
    pieces = [TEXT[start : start + 32] for start in range(0, len(TEXT), 32)]
    if kind == "SFT":
        return [{"text": piece} for piece in pieces]
    return [
        {"prompt": piece[:8], "chosen": piece[8:20], "rejected": piece[20:]} for piece in pieces
    ]


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


def main(kind: str, way: str, folder: str) -> None:
    set_seed(0)
    base = Path(folder, "base")
    if way == "make":
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=256, **sizes)
        LlamaForCausalLM(config).save_pretrained(base)
        return
    trainer_class = getattr(trl, f"{kind}Trainer")
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(Path(folder, f"{kind} {way}")),
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        gradient_checkpointing=False,
        **({"deepspeed": CONFIG} if way == "deepspeed" else {"use_cpu": True}),
        **OPTIONS[kind],
    )
    more: dict[str, Any] = {"reward_funcs": _reward} if kind == "GRPO" else {}
    if way == "native":
        trainer_class = type("Sharded", (ZeroTrainerMixin, trainer_class), {})
        more["zero"] = {"stage": 3}
    trainer = trainer_class(
        model=LlamaForCausalLM.from_pretrained(base, dtype=torch.float32),
        args=arguments,
        train_dataset=Dataset.from_list(_rows(kind)),
        processing_class=_tokenizer(),
        **more,
    )
    trainer.train()
    if os.environ["RANK"] == "0":
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(json.dumps({"losses": losses}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
