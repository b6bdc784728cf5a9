"""Transformers' Trainer with a DeepSpeed configuration, and nothing of zeroshard's: run plain on
one process, or by ``zeroshard run --as-deepspeed``. Argument 1 is a folder, the others are runs:

    llama:3:cpu:fp32          family, stage ("plain": no configuration), offload device (or
                              "schedule": DeepSpeed's own), precision
    llama:3:cpu:fp32+resumed  the same from its third step on

Each writes FOLDER/<run>.json on rank 0 (losses, norms, rates, where its checkpoints are).
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from contextlib import nullcontext
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers.training_args
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainingArguments,
    set_seed,
)

if not torch.cuda.is_available():  # else bf16 needs use_cpu, which drops the configuration
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True

STEPS, SAMPLES, LENGTH = 6, 4, 24  # samples: of all ranks, in a micro-batch


def _data() -> list[dict[str, torch.Tensor]]:
    library = Path(sysconfig.get_path("stdlib"))
    text = b"".join((library / name).read_bytes() for name in ("abc.py", "ast.py", "bdb.py"))
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long() % 128
    rows = tokens[: tokens.numel() // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows[:200]]


def _model(family: str, folder: Path) -> Any:
    set_seed(3)
    if family == "loaded":  # the same numbers through from_pretrained, and zero.Init at stage 3
        seed = folder / "seed"
        if os.environ.get("RANK", "0") == "0":
            _model("llama", folder).save_pretrained(seed)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        return LlamaForCausalLM.from_pretrained(seed, dtype=torch.float32)
    if family == "resized":  # with more tokens, whose rows are zero
        zero3 = torch.distributed.is_initialized()
        model = _model("loaded" if zero3 else "llama", folder)
        model.resize_token_embeddings(136)
        for weight in (model.get_input_embeddings().weight, model.lm_head.weight):
            with _gathered(weight) if zero3 else nullcontext(), torch.no_grad():
                weight[128:] = 0.0
        return model
    if family == "lora":
        lora = LoraConfig(target_modules=["q_proj", "v_proj"], r=4, task_type="CAUSAL_LM")
        return get_peft_model(_model("llama", folder), lora)
    if family == "llama":
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128,
                hidden_size=32,
                intermediate_size=512,  # 64 KiB: zero.Init leaves what is smaller in memory
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
        )
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=128,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )


def _gathered(weight: torch.Tensor) -> Any:
    import deepspeed  # type: ignore[import-not-found]

    return deepspeed.zero.GatheredParameters([weight], modifier_rank=0)


def _config(stage: str, device: str) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": int(stage)}
    if stage == "3":
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if device == "cpu":
        zero["offload_optimizer"] = {"device": device}
    if device == "cpu" and stage == "3":
        zero["offload_param"] = {"device": device}
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto"},
        "zero_optimization": zero,
    }
    if stage == "2":  # takes the optimizer from the file, the others the Trainer's
        numbers = ("lr", "betas", "eps", "weight_decay")
        config["optimizer"] = {"type": "AdamW", "params": dict.fromkeys(numbers, "auto")}
    if device == "schedule":
        numbers = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
        params: dict[str, Any] = dict.fromkeys(numbers, "auto") | {"warmup_type": "linear"}
        config["scheduler"] = {"type": "WarmupLR", "params": params}
    return config


def _trainer(run: str, folder: Path, **changes: Any) -> Trainer:
    _reset()
    family, stage, device, precision = run.split(":")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if stage != "plain":
        changes["deepspeed"] = _config(stage, device)
    arguments = TrainingArguments(
        output_dir=str(folder / run),
        max_steps=STEPS,
        per_device_train_batch_size=SAMPLES // world,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        weight_decay=0.0,  # the optimizer of a file decays norms too, and the Trainer's does not
        max_grad_norm=0.5,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=4,
        logging_steps=1,
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
        seed=3,
        bf16=precision == "bf16",
        # else the Trainer multiplies T5's loss by the ranks, under DDP as well: T5 takes, and
        # does not use, the count of tokens
        average_tokens_across_devices=False,
        **changes,
    )
    return Trainer(model=_model(family, folder), args=arguments, train_dataset=_data())


def _accelerate(run: str, folder: Path) -> dict[str, Any]:
    """The same training as a loop of Accelerate's, with its state saved and loaded midway."""
    _reset()
    _, stage, device, _ = run.split(":")
    config = _config(stage, device) | {"gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    config.pop("optimizer", None)
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = _model("llama", folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    loader = torch.utils.data.DataLoader(_data(), batch_size=SAMPLES // 2)  # type: ignore[var-annotated,arg-type]
    model, optimizer, loader, rate = accelerator.prepare(model, optimizer, loader, rate)
    losses, saved = [], folder / f"{run}.state"
    again = False
    batches = list(loader)[: 2 * STEPS]
    while len(losses) < 3 * STEPS:
        for batch in batches[STEPS:] if again else batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                rate.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if len(losses) == STEPS:
                accelerator.save_state(str(saved))
        accelerator.load_state(str(saved))
        again = True
    weights = accelerator.get_state_dict(model)
    names = None if weights is None else sorted(weights)
    accelerator.free_memory()
    return {"losses": losses, "names": names, "kind": str(accelerator.distributed_type)}


def _reset() -> None:
    """Forget the run before: several are in one process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()
    GradientState._reset_state()


def _report(trainer: Trainer) -> dict[str, Any]:
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": [entry["loss"] for entry in logs],
        "norms": [entry["grad_norm"] for entry in logs],
        "rates": [entry["learning_rate"] for entry in logs],
        "engine": type(trainer.model_wrapped).__module__,
    }


def main() -> None:
    folder, runs = Path(sys.argv[1]), sys.argv[2:]
    for name in runs:
        run, _, resumes = name.partition("+")
        if run.startswith("accelerate:"):
            found = _accelerate(run, folder)
            if os.environ["RANK"] == "0":
                (folder / f"{name}.json").write_text(json.dumps(found))
            continue
        trainer = _trainer(run, folder)
        checkpoint = str(folder / run / "checkpoint-3") if resumes else None
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model(str(folder / f"{name}.model"))
        report = _report(trainer)
        if trainer.is_deepspeed_enabled:
            report["evaluated"] = trainer.evaluate(_data()[:8])["eval_loss"]
        if trainer.is_world_process_zero():
            (folder / f"{name}.json").write_text(json.dumps(report))
        trainer.accelerator.free_memory()


if __name__ == "__main__":
    main()
