"""Trainer runs on every rank, for test_transformers.py."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import zeroshard as zs
from zeroshard.integrations.transformers import ZeroTrainer

# A schedule that changes at every step, and does not know how many there will be: a run of three
# steps is the first half of one of six.
_WARMUP: dict[str, Any] = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 9}

Data = list[dict[str, torch.Tensor]]


def _data(seed: int, rows: int) -> Data:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 61, (rows, 12), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def _clip(parameters: Iterable[torch.Tensor], max_norm: float, *_: Any) -> torch.Tensor:
    """Clip as torch does, by a norm that is rounded once: torch's fp32 sums have other last bits on
    other processors, and the library's norm is exact.
    """
    every = list(parameters)
    squares = [one.grad.double().square().sum() for one in every if one.grad is not None]
    norm = torch.stack(squares).sum().sqrt().float()
    torch.nn.utils.clip_grads_with_norm_(every, max_norm, norm)
    return norm


def _train(
    folder: Path,
    name: str,
    zero: Any = None,
    *,
    steps: int = 6,
    resume: bool = False,
    accumulated: int = 2,
    **changes: Any,
) -> dict[str, Any]:
    # the ranks' models differ until the trainer makes them one
    set_seed(3 + int(os.environ["RANK"]))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    if name == "fp16":  # one gradient of the third step is not finite
        backwards = iter(range(1000))
        model.model.norm.weight.register_hook(
            lambda grad: grad * float("inf") if next(backwards) == 5 else grad
        )
    arguments = TrainingArguments(
        output_dir=str(folder / name),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulated,
        learning_rate=1e-2,
        weight_decay=0.1,
        max_grad_norm=0.5,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **changes,
    )
    options: dict[str, Any] = {
        "model": model,
        "args": arguments,
        "train_dataset": _data(0, 64),
        "eval_dataset": _data(1, 8),
    }
    trainer = Trainer(**options) if name.startswith("plain") else ZeroTrainer(zero=zero, **options)
    if name == "plain":
        trainer.accelerator.clip_grad_norm_ = _clip
    before = trainer.evaluate()["eval_loss"] if name == "stage3" else None
    trainer.train(resume_from_checkpoint=resume or None)
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(folder / name / "final"))
    out: dict[str, Any] = {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "norms": [
            round(float(entry["grad_norm"]), 5)
            for entry in trainer.state.log_history
            if "grad_norm" in entry
        ],
        "evaluated": evaluated,
        "before": before,
        "rates": [
            entry["learning_rate"]
            for entry in trainer.state.log_history
            if "learning_rate" in entry
        ],
    }
    if isinstance(trainer, ZeroTrainer):
        assert (
            trainer.engine is not None
            and trainer.model is model
            and type(model) is LlamaForCausalLM
        )
        out["skipped"] = trainer.engine.steps_skipped
        out["policy"], out["fraction"] = (
            trainer.engine.policy.name,
            trainer.engine.memory().total / (16 * sum(p.numel() for p in model.parameters())),
        )
        prompt = torch.arange(1, 5)[None]
        tokens = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
        trainer.engine.close()
        assert (
            tokens
            == model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
        )
    torch.distributed.barrier()
    return out


def _refusals(folder: Path) -> list[str]:
    messages = []
    for changes, zero in (
        ({"fp16": True}, {"precision": "bf16"}),
        ({"bf16": True}, {"precision": "fp32"}),
        ({}, {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.7}),
        ({}, {"train_micro_batch_size_per_gpu": 7}),
        ({}, {"zero_optimization": {"stage": 2, "overlap_com": True}}),
    ):
        try:
            _train(folder, "refused", zero, **changes)
        except zs.ConfigError as error:
            messages.append(str(error))
    return messages


def _lacks(folder: Path) -> list[str]:
    """Return the messages where a checkpoint is not what the trainer would have saved."""
    copies = {"of plain": "plain", "of weights": "constant", "of samples": "constant"}
    if os.environ["RANK"] == "0":
        for name, source in copies.items():
            shutil.copytree(folder / source / "checkpoint-3", folder / name / "checkpoint-3")
        shutil.rmtree(folder / "of weights" / "checkpoint-3" / "zeroshard")
    torch.distributed.barrier()
    messages: list[str] = []
    try:
        _train(folder, "of plain", resume=True)
    except zs.CheckpointError as error:
        messages.append(str(error))
    listener = logging.Handler()
    listener.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroshard").addHandler(listener)
    _train(folder, "of weights", resume=True, steps=4, **_WARMUP)
    _train(folder, "of samples", {"stage": 1}, resume=True, steps=4, accumulated=4, **_WARMUP)
    logging.getLogger("zeroshard").removeHandler(listener)
    return messages


def run(folder: Path) -> dict[str, Any]:
    """Train every run, with checkpoints in `folder`; return what rank 0 has seen."""
    torch.set_num_threads(1)
    runs = {"plain": _train(folder, "plain")}
    for stage in (1, 2, 3):
        runs[f"stage{stage}"] = _train(folder, f"stage{stage}", {"stage": stage})
    deepspeed = {
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
    }
    runs["whole bf16"] = _train(folder, "whole bf16", deepspeed)
    half = {
        "zero_optimization": {"stage": 2},
        "fp16": {"enabled": True},
        "gradient_clipping": "auto",
    }
    runs["fp16"] = _train(folder, "fp16", half, steps=12)
    _train(folder, "halves", deepspeed, steps=3, **_WARMUP)
    runs["constant"] = _train(folder, "constant", deepspeed, **_WARMUP)
    runs["halves"] = _train(folder, "halves", deepspeed, resume=True, **_WARMUP)
    refused, lacks = _refusals(folder), _lacks(folder)
    if os.environ["RANK"] != "0":
        return {}
    weights = {name: load_file(folder / name / "final" / "model.safetensors") for name in runs}
    for name, one in runs.items():
        like = {"halves": "constant", "whole bf16": "whole bf16", "fp16": "fp16"}.get(name, "plain")
        one["same as"] = [
            like,
            all(torch.equal(value, weights[like][key]) for key, value in weights[name].items()),
        ]
        one["dtype"] = str(next(iter(weights[name].values())).dtype)
    return {"runs": runs, "refused": refused, "lacks": lacks}
