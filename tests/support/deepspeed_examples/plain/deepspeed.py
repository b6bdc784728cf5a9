"""Plain torch under the names that DeepSpeed's example scripts use: no sharding, nothing of
zeroshard. Every rank holds the whole model, adds up gradients in fp32, averages them over the ranks
and steps torch's optimizer on fp32 weights; bf16 or fp16 weights are rounded copies of those.

    PYTHONPATH=tests/support/deepspeed_examples/plain torchrun ... script.py --deepspeed ...

A scale of fp16 starts at 2**16 and halves with the second overflow in a row (DeepSpeed's
`hysteresis` of 2); a step that overflows moves nothing. Gradients are clipped at 1.0 unless the
configuration says otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

_DTYPES = {"bf16": torch.bfloat16, "bfloat16": torch.bfloat16, "fp16": torch.float16}


class Engine(nn.Module):
    """A model, its optimizer on fp32 weights, and the schedule that moves with its steps."""

    def __init__(self, model: nn.Module, optimizer: Any, config: dict[str, Any], rates: Any):
        super().__init__()
        self.module, self.optimizer, self.rates, self.config = model, optimizer, rates, config
        self.device = torch.device("cpu")
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.tput_timer = argparse.Namespace(update_epoch_count=lambda: None)
        enabled = [key for key in _DTYPES if config.get(key, {}).get("enabled")]
        self.compute = _DTYPES[enabled[0]] if enabled else torch.float32
        self.scale, self.patience = 2.0**16 if self.compute is torch.float16 else 1.0, 2
        self.weights = [
            one for group in optimizer.param_groups for one in group["params"] if one.requires_grad
        ]
        self.masters = [nn.Parameter(one.detach().float().clone()) for one in self.weights]
        taken = dict(zip(map(id, self.weights), self.masters, strict=True))
        for group in optimizer.param_groups:
            group["params"] = [taken[id(one)] for one in group["params"] if id(one) in taken]
        for one in model.parameters():
            one.data = one.data.to(self.compute)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def bfloat16_enabled(self) -> bool:
        return self.compute is torch.bfloat16

    def fp16_enabled(self) -> bool:
        return self.compute is torch.float16

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        (loss.float() * self.scale / self.config.get("gradient_accumulation_steps", 1)).backward()
        for weight, master in zip(self.weights, self.masters, strict=True):
            if weight.grad is not None:
                gradient = weight.grad.float()
                master.grad = gradient if master.grad is None else master.grad + gradient
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        gradients = [one.grad for one in self.masters if one.grad is not None]
        for one in gradients:
            dist.all_reduce(one)
            one.div_(dist.get_world_size() * self.scale)
        # in fp64, since the last bit of an fp32 sum is that of its order
        norm = torch.cat([one.flatten().double() for one in gradients]).norm().float()
        most = self.config.get("gradient_clipping", 1.0)
        for one in gradients:
            one.mul_(torch.clamp(most / (norm + 1e-6), max=1.0))
        if norm.isfinite():
            self.optimizer.step()
            if self.rates is not None:
                self.rates.step()
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)
        elif self.patience > 1:
            self.patience -= 1
        else:
            self.scale /= 2
        self.optimizer.zero_grad()

    def save_checkpoint(self, save_dir: Any, client_state: Any = None, **_: Any) -> None:
        state = {
            "masters": self.masters,
            "optimizer": self.optimizer.state_dict(),
            "client": client_state,
        }
        if dist.get_rank() == 0:
            torch.save(state, Path(save_dir) / "plain.pt")
        dist.barrier()

    @torch.no_grad()
    def load_checkpoint(self, load_dir: Any, **_: Any) -> tuple[str, Any]:
        state = torch.load(Path(load_dir) / "plain.pt", weights_only=False)
        for weight, master, saved in zip(self.weights, self.masters, state["masters"], strict=True):
            master.copy_(saved)
            weight.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])
        return str(load_dir), state["client"]


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    config: Any = None,
    collate_fn: Any = None,
    **_: Any,
) -> tuple[Any, Any, Any, Any]:
    init_distributed()
    if config is None:
        config = json.loads(Path(args.deepspeed_config).read_text())
    if optimizer is None:
        optimizer = adam(model_parameters, **config["optimizer"]["params"])
    if lr_scheduler is None and "scheduler" in config:
        lr_scheduler = warmup(optimizer, **config["scheduler"]["params"])
    engine = Engine(model, optimizer, config, lr_scheduler)
    loader = None
    if training_data is not None:
        ranks = dist.get_world_size()
        size = config.get("train_micro_batch_size_per_gpu") or config["train_batch_size"] // ranks
        sampler = DistributedSampler(training_data)
        loader = DataLoader(training_data, size, sampler=sampler, collate_fn=collate_fn)
    return engine, optimizer, loader, lr_scheduler


def adam(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, **{"weight_decay": 0.0, **options})


def warmup(
    optimizer: Any, warmup_min_lr: float, warmup_max_lr: float, warmup_num_steps: int
) -> Any:
    """The rates of WarmupLR, which rises with the logarithm of the step; twice with that of 1."""
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"] = 1.0

    def rate(step: int) -> float:
        part = math.log(max(step, 1)) / math.log(warmup_num_steps)
        return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * min(1.0, part)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--deepspeed", action="store_true")
    parser.add_argument("--deepspeed_config")
    parser.set_defaults(local_rank=int(os.environ["LOCAL_RANK"]))
    return parser


def init_distributed(**_: Any) -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


class Accelerator:
    """The CPU."""

    def is_available(self) -> bool:
        return False

    def device_name(self, index: int | None = None) -> str:
        return "cpu"

    current_device_name = device_name

    def set_device(self, index: int) -> None: ...

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)


def get_accelerator() -> Accelerator:
    return Accelerator()


class ZeroParamStatus(Enum):
    """Never NOT_AVAILABLE here."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2


@contextlib.contextmanager
def gathered(*_: Any, **__: Any) -> Iterator[None]:
    yield


def recursive_getattr(model: nn.Module, name: str) -> Any:
    return model.get_submodule(name)


def recursive_setattr(model: nn.Module, name: str, value: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, value)


def _module(name: str, **names: Any) -> None:
    made = ModuleType(f"{__name__}.{name}")
    vars(made).update(names)
    sys.modules[made.__name__] = made
    parent, _, last = made.__name__.rpartition(".")
    setattr(sys.modules[parent], last, made)


__version__ = "0.19.6"
__path__: list[str] = []
_module("comm", get_rank=lambda: dist.get_rank(), get_world_size=lambda: dist.get_world_size())
_module("accelerator", get_accelerator=get_accelerator)
_module("ops")
_module("ops.adam", DeepSpeedCPUAdam=adam, FusedAdam=adam)
_module("zero", GatheredParameters=gathered)
_module("runtime")
_module("runtime.zero")
_module("runtime.zero.partition_parameters", ZeroParamStatus=ZeroParamStatus)
_module("compression")
_module(
    "compression.helper", recursive_getattr=recursive_getattr, recursive_setattr=recursive_setattr
)
_module("utils", set_z3_leaf_modules=lambda *_: None)
_module("moe")
_module("moe.utils", split_params_into_different_moe_groups_for_optimizer=lambda groups: groups)
