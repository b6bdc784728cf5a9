"""Trainer runs of one feature each, on every rank, started by ``zeroshard run``: argument 1 is a
folder for checkpoints, argument 2 the file for rank 0's results, the others name the features. Each
feature runs twice, under Transformers' own class (DDP) and under ours; "moves" runs as it says.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from zeroshard.integrations.transformers import ZeroTrainer, ZeroTrainerMixin

IGNORED = -100


class ZeroSeq2SeqTrainer(ZeroTrainerMixin, Seq2SeqTrainer):
    """A subclass of Trainer that trains sharded."""


class Generates(TrainerCallback):
    """Generates from the model in the middle of training."""

    def __init__(self) -> None:
        self.tokens: list[list[int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model = kwargs["model"]
        model.eval()
        prompt = torch.arange(1, 5)[None]
        made = model.generate(prompt, max_new_tokens=3, do_sample=False, pad_token_id=0)
        model.train()
        self.tokens += made.tolist()


def llama(*, tied: bool = False) -> LlamaForCausalLM:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, tie_word_embeddings=tied, **sizes, **heads))


def lora() -> Any:
    options: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
    return get_peft_model(llama(), LoraConfig(task_type="CAUSAL_LM", **options))


def t5() -> T5ForConditionalGeneration:
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=61, decoder_start_token_id=0, dropout_rate=0.0, **sizes)
    )


def rows(seed: int, count: int, *, ragged: bool = False) -> list[dict[str, torch.Tensor]]:
    """Return token rows; with `ragged` each counts another number of labels."""
    tokens = torch.randint(1, 61, (count, 12), generator=torch.Generator().manual_seed(seed))
    labels = tokens.clone()
    if ragged:
        for index, row in enumerate(labels):
            row[1 + index * 5 % 11 :] = IGNORED
    return [{"input_ids": row, "labels": label} for row, label in zip(tokens, labels, strict=True)]


class Runs:
    """Trains one kind of trainer: Transformers' own, or ours."""

    def __init__(self, folder: Path, *, ours: bool) -> None:
        self.folder = folder / ("ours" if ours else "plain")
        self.ours = ours
        self.trainer: Any = None

    def make(self, name: str, make: Callable[[], Any], zero: dict[str, Any], **changes: Any) -> Any:
        """Make the trainer of run `name`; `changes` are training arguments."""
        set_seed(3 + int(os.environ["RANK"]))  # training makes the ranks' models one
        given: dict[str, Any] = {
            "output_dir": str(self.folder / name),
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "seed": 3,
        }
        sequences = make is t5
        kind: Any = Seq2SeqTrainingArguments if sequences else TrainingArguments
        options: dict[str, Any] = {
            "args": kind(**given | changes),
            "train_dataset": rows(0, 96, ragged=name == "ragged"),
            "eval_dataset": rows(1, 6),
        }
        options |= {"model_init": lambda: make()} if name == "model_init" else {"model": make()}
        if self.ours:
            chosen: Any = ZeroSeq2SeqTrainer if sequences else ZeroTrainer
            self.trainer = chosen(zero=zero, **options)
        else:
            self.trainer = (Seq2SeqTrainer if sequences else Trainer)(**options)
        return self.trainer

    def logged(self, key: str) -> list[float]:
        return [float(entry[key]) for entry in self.trainer.state.log_history if key in entry]

    def losses(self) -> dict[str, list[float]]:
        return {"losses": self.logged("loss"), "norms": self.logged("grad_norm")}

    def close(self) -> None:
        if self.ours:
            self.trainer.engine.close()
        torch.distributed.barrier()


def stage(zero: dict[str, Any], runs: Runs) -> dict[str, Any]:
    """Train at one stage, generating inside and outside training, and predicting."""
    trainer = runs.make("stage", llama, zero)
    inside = Generates()
    trainer.add_callback(inside)
    trainer.train()
    outside = Generates()
    outside.on_step_end(None, None, None, model=trainer.model)
    predicted = trainer.predict(rows(2, 6))
    out = runs.losses() | {
        "tokens": inside.tokens + outside.tokens,
        "predicted": torch.as_tensor(predicted.predictions).double().sum().item(),
    }
    runs.close()
    return out


def ragged(runs: Runs) -> dict[str, Any]:
    """Average over labels of uneven number, smoothed, not clipped, with recomputed activations."""
    runs.make(
        "ragged",
        llama,
        {"stage": 3},
        label_smoothing_factor=0.1,
        max_grad_norm=0.0,
        gradient_checkpointing=True,
    ).train()
    out = runs.losses()
    runs.close()
    return out


def mean_of_labels(runs: Runs) -> dict[str, Any]:
    """The model's own loss over labels of uneven number."""
    runs.make("ragged", llama, {"stage": 2}, average_tokens_across_devices=True).train()
    out = runs.losses()
    runs.close()
    return out


def half(runs: Runs) -> dict[str, Any]:
    """fp16 from the training arguments (plain: the same from the configuration)."""
    if runs.ours:
        trainer = runs.make("fp16", llama, {"stage": 2}, fp16=True)
    else:
        runs.ours = True
        trainer = runs.make("fp16", llama, {"stage": 2, "precision": "fp16"})
    assert trainer.accelerator.mixed_precision == "no" and trainer.accelerator.scaler is None
    assert trainer.args.fp16 in (True, False)
    trainer.train()
    out = runs.losses() | {"dtype": str(next(trainer.model.parameters()).dtype)}
    assert trainer.engine.loss_scale > 1
    runs.close()
    return out


def best(runs: Runs) -> dict[str, Any]:
    """Keep one checkpoint, of weights alone, and end with the best; the head is tied. The last bits
    of the norm differ between the two, which clips: SGD leaves them there, where Adam would make
    whole steps of them.
    """
    trainer = runs.make(
        "best",
        lambda: llama(tied=True),
        {"stage": 3},
        max_steps=6,
        optim="sgd",
        max_grad_norm=0.5,
        learning_rate=0.3,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # what is best is over before training ends
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=1,
        save_steps=1,
        save_total_limit=1,
        save_only_model=True,
        load_best_model_at_end=True,
    )
    trainer.train()
    final = runs.folder / "best" / "final"
    trainer.save_model(str(final))
    torch.distributed.barrier()
    kept = sorted(path.name for path in (runs.folder / "best").glob("checkpoint-*"))
    loaded = LlamaForCausalLM.from_pretrained(final)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    out = runs.losses() | {
        "evaluated": trainer.evaluate()["eval_loss"],
        "best": trainer.state.best_metric,
        "kept": kept,
        "step": trainer.state.best_global_step,
        "files": sorted(path.name for path in (runs.folder / "best" / kept[0]).iterdir()),
        "tensors": len(load_file(final / "model.safetensors")),
        "weights": sum(p.double().abs().sum().item() for p in loaded.parameters()),
    }
    runs.close()
    return out


def adapter(runs: Runs) -> dict[str, Any]:
    """Train an adapter: once in six steps, and once with an end after three."""
    out: dict[str, Any] = {}
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
    options |= {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 9}
    for name, steps, resumes in (("lora", 6, False), ("halves", 3, False), ("halves", 6, True)):
        trainer = runs.make(name, lora, {"stage": 3}, max_steps=steps, **options)
        torch.distributed.barrier()
        trainer.train(resume_from_checkpoint=resumes or None)
        out[f"{name} {steps}"] = runs.losses()
        frozen = [p for n, p in trainer.model.named_parameters() if not p.requires_grad]
        if runs.ours:
            with trainer.engine.gathered():
                out["base"] = sum(p.double().abs().sum().item() for p in frozen)
        else:
            out["base"] = sum(p.double().abs().sum().item() for p in frozen)
        runs.close()
    saved = runs.folder / "halves" / "checkpoint-6"
    files = [path for path in saved.rglob("*") if path.is_file()]
    out["base bytes"] = sum(4 * p.numel() for p in frozen)
    out["bytes"] = sum(path.stat().st_size for path in files if path.suffix == ".safetensors")
    out["adapter"] = {
        name: value.double().sum().item()
        for name, value in load_file(saved / "adapter_model.safetensors").items()
    }
    return out


def grouped(runs: Runs) -> dict[str, Any]:
    """Train in an order of samples that is drawn from torch's own generator: at once, and resumed
    in the middle.
    """
    out: dict[str, Any] = {}
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
    options |= {"train_sampling_strategy": "group_by_length", "lr_scheduler_type": "constant"}
    for name, resumes in (("whole", None), ("resumed", runs.folder / "whole" / "checkpoint-2")):
        trainer = runs.make(name, llama, {"stage": 2}, **options)
        torch.distributed.barrier()
        trainer.train(resume_from_checkpoint=None if resumes is None else str(resumes))
        out[name] = runs.losses()
        runs.close()
    return out


def sequences(runs: Runs) -> dict[str, Any]:
    """Predict by generating, with a subclass of Trainer."""
    options: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 8}
    trainer = runs.make("sequences", t5, {"stage": 3}, **options)
    if runs.ours:  # the plain Trainer would then train without DDP (Accelerate 1.15)
        trainer.predict(rows(2, 6))
    trainer.train()
    out = runs.losses() | {"tokens": trainer.predict(rows(2, 6)).predictions.tolist()}
    runs.close()
    return out


def twice(runs: Runs) -> dict[str, Any]:
    """Train, go on training with the same trainer; and with a model made anew each time."""
    out: dict[str, Any] = {}
    for name in ("twice", "model_init"):
        trainer = runs.make(name, llama, {"stage": 2}, max_steps=2)
        trainer.train()
        first = runs.losses()
        trainer.train()
        out[name] = [first, runs.losses()]
        runs.close()
    return out


def handed_on(runs: Runs) -> dict[str, Any]:
    """A second trainer on the model of the first: another task, another fold. And the first again,
    whose optimizer has lost its state under ours.
    """
    options: dict[str, Any] = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.5}
    first = runs.make("handed on", llama, {"stage": 2}, **options)
    first.train()
    out = [runs.losses()]
    runs.make("handed on", lambda: first.model, {"stage": 3}, **options).train()
    out.append(runs.losses())
    runs.close()
    runs.trainer = first
    first.train()
    assert len(runs.logged("loss")) == 2, runs.losses()
    runs.close()
    return {"losses": out}


def adafactor(runs: Runs) -> dict[str, Any]:
    """An optimizer with states of other shapes, which a DeepSpeed file lets ranks own whole."""
    zero = {"zero_optimization": {"stage": 3}, "zeroshard": {"ownership": "whole"}}
    runs.make("adafactor", llama, zero, optim="adafactor").train()
    out = runs.losses()
    runs.close()
    return out


def moves(folder: Path, kind: str, steps: int) -> dict[str, Any]:
    """Go to step `steps` of a run whose steps take 12 samples on any number of ranks: "plain" with
    DDP, "ours" at another stage on each number of ranks, from the newest checkpoint.
    """
    world = int(os.environ["WORLD_SIZE"])
    runs = Runs(folder, ours=kind == "ours")
    trainer = runs.make(
        "moves",
        llama,
        {"stage": {1: 1, 2: 3, 3: 2}[world]},
        max_steps=steps,
        gradient_accumulation_steps=6 // world,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=9,
        save_strategy="steps",
        save_steps=2,
    )
    trainer.train(resume_from_checkpoint=(runs.ours and steps > 2) or None)
    return runs.losses() | {"rates": runs.logged("learning_rate")}


def run(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Run the named features, with checkpoints in `folder`; return what this rank has seen."""
    torch.set_num_threads(1)
    host = {"stage": 3, "offload": {"optimizer": "host", "weight": "host"}}
    features: dict[str, Callable[[Runs], dict[str, Any]]] = {
        "stage1": partial(stage, {"stage": 1}),
        "stage2": partial(stage, {"stage": 2}),
        "stage3": partial(stage, {"stage": 3}),
        "stage3 on host": partial(stage, host),
        "ragged": ragged,
        "mean": mean_of_labels,
        "half": half,
        "best": best,
        "adapter": adapter,
        "grouped": grouped,
        "sequences": sequences,
        "twice": twice,
        "handed on": handed_on,
        "adafactor": adafactor,
    }
    answers: dict[str, Any] = {}
    for name in names:
        if name in features:
            plain, ours = Runs(folder / name, ours=False), Runs(folder / name, ours=True)
            answers[name] = {"plain": features[name](plain), "ours": features[name](ours)}
        else:
            kind, steps = name.split()
            answers[kind] = moves(folder, kind, int(steps))
    return answers


if __name__ == "__main__":
    found = run(Path(sys.argv[1]), sys.argv[3:])
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_text(json.dumps(found))
