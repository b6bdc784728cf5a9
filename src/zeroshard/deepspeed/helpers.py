"""Small functions of DeepSpeed's that programs import from its inner modules: memory and seeds,
attributes by dotted name, and parameters of experts.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_map

import zeroshard as zs
from zeroshard.deepspeed import comm
from zeroshard.deepspeed.accelerator import get_accelerator

OffloadDeviceEnum = Enum(  # type: ignore[misc]
    "OffloadDeviceEnum", {name: name for name in ("none", "cpu", "nvme")}, type=str
)
OffloadStateTypeEnum = Enum(  # type: ignore[misc]
    "OffloadStateTypeEnum",
    {name: name for name in
     ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")},
    type=str,
)  # fmt: skip
ZeroStageEnum = Enum(
    "ZeroStageEnum",
    {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3},
    type=int,
)
torch_info = {  # of torch, as deepspeed.git_version_info tells it
    "version": ".".join(torch.__version__.split(".")[:2]),
    "cuda_version": torch.version.cuda or "0.0",
    "hip_version": torch.version.hip or "0.0",
    "nccl_version": "0.0",
    "bf16_support": True,
}
default_git = "zeroshard"  # in the place of a branch and a commit


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print `message` and the memory in use, on rank 0; nothing without `force`, as there."""
    if not force or comm.get_rank() != 0:
        return
    device = get_accelerator()
    numbers = {
        "allocated": device.memory_allocated(),
        "most allocated": device.max_memory_allocated(),
        "reserved": device.memory_reserved(),
        "most reserved": device.max_memory_reserved(),
    }
    print(message)
    print(", ".join(f"{name} {count / 2**30:.2f} GiB" for name, count in numbers.items()))
    print(zs.memory_table())
    device.reset_peak_memory_stats()


def set_random_seed(seed: int) -> None:
    """Seed the generators of random, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def move_to_device(
    item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Return `item` with its tensors, in nested containers, on `device`: those that
    `criterion_func` is true of.
    """

    def moved(one: Any) -> Any:
        takes = criterion_func is None or criterion_func(one)
        return one.to(device) if isinstance(one, torch.Tensor) and takes else one

    return tree_map(moved, item)


def ensure_directory_exists(filename: str) -> None:
    """Make the directory that a file is to lie in."""
    os.makedirs(os.path.dirname(filename), exist_ok=True)


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return `func`, whose calls a profiler sees under its name."""

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(func.__qualname__):
            return func(*args, **kwargs)

    return wrapped


def required_torch_version(
    min_version: float | None = None, max_version: float | None = None
) -> bool:
    """Whether torch's version lies between these two: of DeepSpeed's form 2.1, or text."""
    here = torch.torch_version.TorchVersion(torch.__version__.partition("+")[0])
    low = min_version is None or here >= str(min_version)
    return bool(low and (max_version is None or here <= str(max_version)))


def is_compile_supported() -> bool:
    """Whether torch.compile is there: it is."""
    return True


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Return the attribute with a dotted name."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Set the attribute with a dotted name."""
    parent, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, last, module)


# ------------------------------------------------------------------ experts


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return (False, 0): DeepSpeed's MoE layer is not here, and experts are the model's own."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether the parameter is an expert's: its attribute ``allreduce`` is False."""
    return getattr(param, "allreduce", True) is False


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that are no expert's, and those that are."""
    held = list(params)
    return [one for one in held if not is_moe_param(one)], list(filter(is_moe_param, held))


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a param group is one of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]],
    max_group_size: float = 178956971,
) -> list[dict[str, Any]]:
    """Return the groups as a list, with parameters of experts in groups of their own, by their
    ``group_name``. `max_group_size` says nothing here: states are cut per unit.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    out: list[dict[str, Any]] = []
    for group in groups:
        group["params"], experts = split_params_into_shared_and_expert_params(group["params"])
        by_name: dict[Any, list[nn.Parameter]] = {}
        for one in experts:
            by_name.setdefault(getattr(one, "group_name", "experts"), []).append(one)
        out += [{**group, "name": name, "moe": True, "params": held} for name, held in
                by_name.items()]  # fmt: skip
    return [*groups, *out]


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Return param groups of parameters, or of groups, those of experts apart."""
    groups = model_parameters
    if model_parameters and not isinstance(model_parameters[0], dict):
        groups = [{"params": list(model_parameters), "name": "dense_params"}]
    return split_params_into_different_moe_groups_for_optimizer(groups)
