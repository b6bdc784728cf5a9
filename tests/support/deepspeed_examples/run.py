#!/usr/bin/env python3
"""Run DeepSpeed's example scripts through the stand-in and on plain torch, and compare the losses
that they print.

    python tests/support/deepspeed_examples/run.py FOLDER               # a row for each run
    python tests/support/deepspeed_examples/run.py FOLDER --only chat   # those of this name
    python tests/support/deepspeed_examples/run.py FOLDER --show        # and the losses

FOLDER is a checkout of deepspeedai/DeepSpeedExamples, the caller's. Nothing of it is part of this
repository, and nothing in it is changed: the scripts get models of random weights, a tokenizer and
texts from a temporary folder, by their own arguments. On plain torch, `import deepspeed` is
plain/deepspeed.py. Needs datasets, fire, loguru, pytz, sh, tensorboard, wandb and Transformers 4.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
KINDS = ("zeroshard", "plain")
SCRIPTS = {
    "hello": "training/HelloDeepSpeed/train_bert_ds.py",
    "chat": "applications/DeepSpeed-Chat/training/step1_supervised_finetuning/main.py",
    "super": "training/DeepSpeed-SuperOffload/finetune_zero3.py",
    "cifar": "training/cifar/cifar10_deepspeed.py",
    "gan": "training/gan/gan_deepspeed_train.py",
}
LOSSES = {  # what a script prints, in order
    "hello": r"\[Rank 0\] Loss: ([\d.]+)",
    "chat": r"(Epoch: \d+, Step: +\d+, Rank: \d+, loss = [\d.naif]+|ppl: .*)",
    "super": r"INFO - Step +(\d+ \| Loss: [\d.]+)",
    "cifar": r"\] loss: ([\d. ]+)",
    "gan": r"Loss_D: .*",
}
ARGUMENTS = {
    "hello": "--checkpoint_dir out/{name} --tokenizer model/opt --num_layers 2 --h_dim 32"
    " --num_heads 2 --ff_dim 64 --max_seq_length 64 --batch_size 4 --num_iterations 12"
    " --log_every 1",
    "chat": "--data_path {work}/Dahoas/rm-static --data_split 10,0,0 --print_loss"
    " --data_output_path {work}/shuffled --model_name_or_path model/opt --max_seq_len 32"
    " --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --learning_rate 1e-3",
    "super": "--model_name model/llama --dataset_name {work}/alpaca --lr 1e-5 --batch_size {ranks}"
    " --output_dir out/{name} --attn_implementation sdpa --max_length 64 --bench_steps 12"
    " --deepspeed_config {config} --save_checkpoint",
    "cifar": "--epochs 2 --log-interval 4",
    "gan": "--dataset fake --workers 0 --batchSize 8 --imageSize 64 --nz 8 --ngf 4 --ndf 4"
    " --epochs 2 --tensorboard_path {work}/boards --outf {work}/images"
    " --deepspeed_config {folder}/training/gan/gan_deepspeed_config.json",
}


@dataclass(frozen=True)
class Run:
    """A script on some ranks, with arguments of its own beside ARGUMENTS."""

    script: str
    ranks: int
    more: str = ""
    resumed_from: int = 0  # ranks that have trained the first half, whose checkpoint it loads

    @property
    def name(self) -> str:
        resumed = f"from {self.resumed_from}" if self.resumed_from else ""
        return " ".join(filter(None, [self.script, f"{self.ranks} ranks", resumed, self.more]))


# at stage 3 Transformers draws a new embedding where DeepSpeed-Chat asks for one of the same size:
# the random numbers of dropout, and of LoRA's weights, would be others
RUNS = [
    Run("hello", 1), Run("hello", 2), Run("hello", 2, "--dtype fp16"),
    Run("hello", 2, resumed_from=1),
    Run("chat", 1, "--dtype bf16 --zero_stage 2"),
    Run("chat", 2, "--dtype bf16 --zero_stage 0"),
    Run("chat", 2, "--dtype bf16 --zero_stage 2 --output_dir out/{kind}-chat2"),
    Run("chat", 2, "--dtype bf16 --zero_stage 3 --dropout 0 --output_dir out/{kind}-chat3"),
    Run("chat", 2, "--dtype bf16 --zero_stage 3 --offload --gradient_checkpointing --dropout 0"),
    Run("chat", 2, "--dtype fp16 --zero_stage 2"),
    Run("chat", 2, "--dtype bf16 --zero_stage 2 --lora_dim 4 --only_optimize_lora"),
    Run("chat", 2, "--dtype bf16 --zero_stage 3 --gradient_accumulation_steps 2 --dropout 0"),
    Run("super", 1, "superoffload"), Run("super", 2, "superoffload --activation_checkpointing"),
    Run("super", 2, "zerooffload"),
    *(Run("cifar", 2, f"--dtype {dtype} --stage {stage}")
      for dtype, stage in (("fp32", 0), ("fp32", 3), ("bf16", 2), ("fp16", 2))),
    Run("gan", 1),  # all ranks print, and say not which they are
]  # fmt: skip


def prepare(work: Path) -> None:
    """Write the models, the tokenizer and the texts."""
    import torch
    from datasets import Dataset, DatasetDict
    from tokenizers import ByteLevelBPETokenizer
    from transformers import (
        GPT2TokenizerFast,
        LlamaConfig,
        LlamaForCausalLM,
        OPTConfig,
        OPTForCausalLM,
    )

    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if len(line) > 20]
    trained = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained.train_from_iterator(lines, vocab_size=512, special_tokens=special)
    names = ("bos_token", "pad_token", "eos_token", "unk_token", "mask_token")
    tokenizer = GPT2TokenizerFast(
        tokenizer_object=trained._tokenizer, **dict(zip(names, special, strict=True))
    )
    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2}
    opt = OPTForCausalLM(
        OPTConfig(**sizes, ffn_dim=64, num_attention_heads=2, word_embed_proj_dim=32)
    )
    llama = LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=64, num_attention_heads=2))
    for name, model in {"opt": opt, "llama": llama.bfloat16()}.items():
        model.save_pretrained(work / "model" / name)
        tokenizer.save_pretrained(work / "model" / name)

    (work / "wikitext").mkdir()
    (work / "wikitext" / "README.md").write_text(
        "---\nconfigs:\n- config_name: wikitext-2-v1\n  data_files:\n  - split: train\n"
        "    path: train.jsonl\n---\n"
    )
    (work / "alpaca").mkdir()
    _rows(work / "wikitext" / "train.jsonl", [{"text": f"{line}\n"} for line in lines])
    halves = [(line[: len(line) // 2], line[len(line) // 2 :]) for line in lines]
    _rows(
        work / "alpaca" / "train.jsonl",
        [{"instruction": first, "input": "", "output": then} for first, then in halves],
    )
    rows = [{"prompt": f"Human: {a} Assistant:", "chosen": b, "rejected": a} for a, b in halves]
    splits = {"train": Dataset.from_list(rows[:48]), "test": Dataset.from_list(rows[48:56])}
    DatasetDict(splits).save_to_disk(work / "Dahoas" / "rm-static")
    zero = {"stage": 3, "overlap_comm": False, "reduce_bucket_size": 4e8, "sub_group_size": 4e8}
    offload = {"device": "cpu", "pin_memory": True}
    more = {"ratio": 0.80, "super_offload": True, "cpuadam_cores_perc": 0.90}
    for mode, kind in {"superoffload": offload | more, "zerooffload": offload}.items():
        for ranks in (1, 2):  # as the shell scripts beside finetune_zero3.py write them
            config = {
                "train_batch_size": ranks,
                "gradient_accumulation_steps": 1,
                "bf16": {"enabled": True},
                "zero_optimization": {**zero, "offload_optimizer": kind},
                "wall_clock_breakdown": True,
            }
            (work / f"{mode}-{ranks}.json").write_text(json.dumps(config))


def _rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def run(folder: Path, work: Path, one: Run, kind: str) -> tuple[list[str], str]:
    """Run a script on the stand-in ("zeroshard") or on "plain" torch; return the losses that it
    prints, and the last lines where it fails.
    """
    script = folder / SCRIPTS[one.script]
    name = re.sub(r"\W+", "-", f"{kind} {one.name}")
    more, config, usual = one.more.format(kind=kind), "", ARGUMENTS[one.script]
    if one.resumed_from:
        half = Run(one.script, one.resumed_from, f"{more} --num_iterations 6")
        losses, failed = run(folder, work, half, kind)
        if failed:
            return losses, failed
        (saved,) = (work / "out" / re.sub(r"\W+", "-", f"{kind} {half.name}")).iterdir()
        usual = usual.replace("--checkpoint_dir out/{name}", f"--load_checkpoint_dir {saved}")
    if one.script == "super":
        mode, _, more = more.partition(" ")
        config = f"{work}/{mode}-{one.ranks}.json"
    filled = usual.format(
        name=name, folder=folder, work=work, ranks=one.ranks, config=config
    ).split()
    (work / "out").mkdir(exist_ok=True)
    if kind == "zeroshard":
        launcher = [sys.executable, "-m", "zeroshard", "deepspeed", f"--num_gpus={one.ranks}"]
        first = ROOT / "src"
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                    f"--nproc-per-node={one.ranks}"]  # fmt: skip
        first = HERE / "plain"
        more = more.replace("--zero_stage 3", "--zero_stage 0")  # at 3 the model is not built whole
    paths = [first, folder / "applications" / "DeepSpeed-Chat"]
    if one.script in ("cifar", "gan"):
        paths.append(HERE / "data")  # a torchvision of random images
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "HF_DATASETS_CACHE": str(work / "cache"),
        "LOGURU_COLORIZE": "NO",
        "PRETEND_CUDA": "1" if one.script == "gan" else "",
    }
    ended = subprocess.run([*launcher, str(script), *filled, *more.split()], cwd=work, env=environ,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                           timeout=300, check=False)  # fmt: skip
    (work / "out" / f"{name}.log").write_text(ended.stdout)
    found = sorted(re.findall(LOSSES[one.script], ended.stdout), key=_numbers)
    return found, "" if ended.returncode == 0 else ended.stdout[-3000:]


def _numbers(line: str) -> list[int]:
    """Return the numbers by which lines of several ranks are sorted; a line without them is rank
    0's, and stays in its place.
    """
    return [int(number) for number in re.findall(r"(?:Epoch|Step|Rank): +(\d+)", line)]


def _difference(ours: str, plain: str) -> float:
    """Return the largest relative difference of the numbers in two lines."""
    numbers = [[float(one) for one in re.findall(r"\d+\.\d+", line)] for line in (ours, plain)]
    return max((abs(a - b) / abs(b) for a, b in zip(*numbers, strict=False)), default=0.0)


def _saved(work: Path, one: Run) -> str:
    """Compare the weights that a script has saved at its end, in the dtype that computed."""
    folder = re.search(r"--output_dir (\S+)", one.more)
    if folder is None:
        return ""
    import torch

    paths = [work / folder[1].format(kind=kind) / "pytorch_model.bin" for kind in KINDS]
    ours, plain = (torch.load(path, weights_only=True) for path in paths)
    equal = sum(torch.equal(one.to(plain[name].dtype), plain[name]) for name, one in ours.items())
    return f"saved: {len(ours)} tensors, {equal} equal; plain torch saved {len(plain)}"


def main() -> None:
    """Run the scripts and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--work", type=Path, help="keep models, texts and logs there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        work = (arguments.work or Path(made)).resolve()
        if not (work / "model").exists():
            prepare(work)
        print("| run | lines | equal | largest difference |\n|---|---|---|---|", flush=True)
        for one in [one for one in RUNS if arguments.only in one.name]:
            both = [run(arguments.folder.resolve(), work, one, kind) for kind in KINDS]
            (ours, failed), (plain, plain_failed) = both
            pairs = list(zip(ours, plain, strict=False))
            lines = f"{len(ours)}" if len(ours) == len(plain) else f"{len(ours)}, {len(plain)}"
            apart = max((_difference(a, b) for a, b in pairs), default=math.nan)
            equal = sum(a == b for a, b in pairs)
            print(f"| {one.name} | {lines} | {equal} | {apart:.1e} |", flush=True)
            why = [failed, plain_failed] if failed or plain_failed else [_saved(work, one)]
            print(*filter(None, why), sep="\n", end="\n" if any(why) else "")
            if arguments.show:
                print(*(f"    {a}    {b}" for a, b in pairs), sep="\n")


if __name__ == "__main__":
    main()
