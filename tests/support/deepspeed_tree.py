"""A DeepSpeed checkpoint made by hand: the files, keys and cuts that DeepSpeed 0.19.8 was seen
to write, for tests without DeepSpeed.

Also a program (``python deepspeed_tree.py STAGE OUT ...``), to be run by an interpreter that has
DeepSpeed, one process per rank: it trains and lets DeepSpeed itself save, and leaves what DeepSpeed
says its masters and moments are in ``OUT/expected.pt``.
"""

from __future__ import annotations

import enum
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

Groups = list[dict[str, torch.Tensor]]  # masters by name, one dictionary per param group
CLASSES = {
    "deepspeed.runtime.fp16.loss_scaler": "LossScaler",
    "deepspeed.runtime.zero.config": "ZeroStageEnum",
    "deepspeed.utils.tensor_fragment": "fragment_address",
}


class Tied(nn.Module):
    """An embedding that is the head, too; two groups; a frozen weight; buffers."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 7)
        self.register_buffer("scale", torch.ones(7) * 1.5)
        self.register_buffer("seen", torch.tensor(3))
        self.first = nn.Linear(7, 5)
        self.frozen = nn.Linear(5, 5)
        self.second = nn.Linear(5, 7)
        self.head = nn.Linear(7, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.weight.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens).flatten(0, 1) * self.scale.to(self.embed.weight.dtype)
        return (
            self.head(self.second(torch.tanh(self.frozen(self.first(hidden)))))
            .float()
            .logsumexp(-1)
            .mean()
        )


def make() -> Tied:
    torch.manual_seed(0)
    return Tied()


def param_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim > 1 and p.requires_grad]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 11, (2, 3), generator=torch.Generator().manual_seed(10 * step + rank))


# ------------------------------------------------------------------ by hand


@dataclass
class Tree:
    """What is written: a stage, a number of ranks, and how the ranks' optimizers look."""

    stage: int
    world: int
    sub_groups: int = 1  # stage 3 cuts each group into so many
    elastic: bool = False  # stages 1, 2: the optimizer's state as a list, without param groups
    padding: int = 0  # elements after each parameter in stages 1 and 2
    native: bool = False  # DeepSpeed's own Adam: numbers of steps that are no tensors, more options
    steps: int = 3
    enums_by_getattr: bool = False  # enums are pickled as early Pythons 3.11 pickle them
    options: dict[str, Any] = field(
        default_factory=lambda: {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-8}
    )


@dataclass
class Expected:
    """What an import has to find."""

    masters: dict[str, torch.Tensor]
    moments: dict[str, dict[str, torch.Tensor]]
    groups: list[list[str]]


def write(directory: Path, tree: Tree, model: Tied) -> Expected:
    """Write a checkpoint of `model` into `directory`, with random masters and moments; return
    those.
    """
    torch.manual_seed(1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    named = [[names[id(p)] for p in group["params"]] for group in param_groups(model)]
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    values: dict[str, dict[str, torch.Tensor]] = {
        kind: {name: torch.randn(shapes[name]) for group in named for name in group}
        for kind in ("master", "exp_avg", "exp_avg_sq")
    }
    tag = directory / f"global_step{tree.steps}"
    tag.mkdir(parents=True)
    (directory / "latest").write_text(tag.name)
    with stand_ins() as classes:
        if tree.enums_by_getattr:
            pickle_by_getattr(classes["ZeroStageEnum"])
        for rank in range(tree.world):
            torch.save(
                _optim(tree, rank, named, values, classes),
                tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
            if tree.stage == 3 or rank == 0:
                name = (
                    f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
                    if tree.stage == 3
                    else "mp_rank_00_model_states.pt"
                )
                torch.save(_model(tree, rank, named, model), tag / name)
    moments = {
        name: {kind: values[kind][name] for kind in ("exp_avg", "exp_avg_sq")}
        for group in named
        for name in group
    }
    return Expected(values["master"], moments, named)


def _units(tree: Tree, named: list[list[str]]) -> list[list[str]]:
    """Return the names in each flat tensor of a rank."""
    if tree.stage < 3:
        return named
    units = []
    for group in named:
        size = -(-len(group) // tree.sub_groups)
        units += [group[first : first + size] for first in range(0, len(group), size)]
    return units


def _cut(
    tree: Tree, rank: int, group: list[str], values: dict[str, torch.Tensor], *, lean: bool
) -> torch.Tensor:
    """Return a rank's flat tensor of a group; `lean` without the padding at the end of the last
    rank's.
    """
    if tree.stage == 3:
        parts = []
        for name in group:
            flat = values[name].flatten()
            share = -(-flat.numel() // tree.world)
            parts.append(
                torch.nn.functional.pad(flat, (0, share * tree.world - flat.numel()), value=-7.0)[
                    rank * share : (rank + 1) * share
                ]
            )
        return torch.cat(parts)
    flat = torch.cat(
        [
            torch.nn.functional.pad(values[name].flatten(), (0, tree.padding), value=-7.0)
            for name in group
        ]
    )
    align = 2 * tree.world
    padding = -flat.numel() % align
    flat = torch.nn.functional.pad(flat, (0, padding), value=-7.0)
    share = flat.numel() // tree.world
    mine = flat[rank * share : (rank + 1) * share].clone()
    return mine[: mine.numel() - padding] if lean and rank == tree.world - 1 else mine


def _optim(
    tree: Tree,
    rank: int,
    named: list[list[str]],
    values: dict[str, dict[str, torch.Tensor]],
    classes: dict[str, Any],
) -> dict[str, Any]:
    units = _units(tree, named)
    step: Any = tree.steps if tree.native else torch.tensor(float(tree.steps))
    states = [
        {
            "step": step,
            **{
                kind: _cut(tree, rank, unit, values[kind], lean=tree.elastic)
                for kind in ("exp_avg", "exp_avg_sq")
            },
        }
        for unit in units
    ]
    groups = []
    for group, weight_decay in zip(named, (0.1, 0.0), strict=True):
        numbers = [number for number, unit in enumerate(units) if set(unit) <= set(group)]
        more = (
            {"bias_correction": True, "step": 0}
            if tree.native
            else {"amsgrad": False, "foreach": None, "decoupled_weight_decay": True}
        )
        groups.append({**tree.options, "weight_decay": weight_decay, **more, "params": numbers})
    base: Any = (
        states if tree.elastic else {"state": dict(enumerate(states)), "param_groups": groups}
    )
    masters = [_cut(tree, rank, unit, values["master"], lean=True) for unit in units]
    scaler = classes["LossScaler"]()
    held: dict[str, Any] = {
        "zero_stage": classes["ZeroStageEnum"](tree.stage),
        "loss_scaler": scaler,
        "dynamic_loss_scale": False,
        "overflow": False,
    }
    if tree.stage == 3:
        held |= {
            "partition_count": tree.world,
            "optimizer_state_dict": base,
            "fp32_flat_groups": masters,
        }
    else:
        fragment = classes["fragment_address"](1, 0)
        held |= {
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": masters,
            "partition_count": [tree.world] * len(named),
        }
        held |= {
            "param_slice_mappings": [OrderedDict(a=fragment)],
            "group_paddings": [0] * len(named),
        }
        if tree.padding:
            held["param_alignment_paddings"] = [[tree.padding] * len(group) for group in named]
    return {
        "optimizer_state_dict": held,
        "ds_config": {"zero_optimization": {"stage": tree.stage}},
        "ds_version": "0.19.8",
    }


def _model(tree: Tree, rank: int, named: list[list[str]], model: Tied) -> dict[str, Any]:
    frozen = model.frozen.weight.detach().bfloat16()
    share = -(-frozen.numel() // tree.world)
    padded = torch.nn.functional.pad(frozen.flatten(), (0, share * tree.world - frozen.numel()))
    state = {
        name: value.bfloat16() if value.is_floating_point() and name != "scale" else value
        for name, value in model.state_dict().items()
    }
    if tree.stage == 3:
        state = {
            name: value if name in ("scale", "seen") else torch.empty(0, dtype=torch.bfloat16)
            for name, value in state.items()
        }
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return {
        "module": OrderedDict(state),
        "buffer_names": ["scale", "seen"],
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, shapes[name]) for name in unit) for unit in _units(tree, named)
        ],
        "frozen_param_shapes": (
            OrderedDict({"frozen.weight": frozen.shape}) if tree.stage > 1 else None
        ),
        "shared_params": {"head.weight": "embed.weight"} if rank == 0 else {},
        "frozen_param_fragments": (
            None
            if tree.stage == 1
            else OrderedDict(
                {
                    "frozen.weight": (
                        padded[rank * share : (rank + 1) * share].clone()
                        if tree.stage == 3
                        else frozen
                    )
                }
            )
        ),
        "lr_scheduler": None,
        "global_steps": tree.steps,
        "skipped_steps": 0,
        "dp_world_size": tree.world,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": tree.stage}},
        "iteration": tree.steps,
    }


def pickle_by_getattr(kind: type[enum.Enum]) -> None:
    """Have members of `kind` pickled as early Pythons 3.11 pickle them: as a call of
    ``builtins.getattr``.
    """
    kind.__reduce_ex__ = lambda self, protocol: (getattr, (type(self), self._name_))  # type: ignore[method-assign,assignment]


@contextmanager
def stand_ins() -> Iterator[dict[str, Any]]:
    """Give classes that are pickled under the names of DeepSpeed's, while modules of these names
    exist.
    """
    stage = enum.IntEnum(
        "ZeroStageEnum", {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3}
    )
    made: dict[str, Any] = {
        "LossScaler": type(
            "LossScaler",
            (),
            {"__init__": lambda self: self.__dict__.update(cur_scale=1.0, dynamic=False)},
        ),
        "ZeroStageEnum": stage,
        "fragment_address": type(
            "fragment_address",
            (),
            {"__init__": lambda self, numel, start: self.__dict__.update(numel=numel, start=start)},
        ),
    }
    packages = {
        ".".join(module.split(".")[:length])
        for module in CLASSES
        for length in range(1, module.count(".") + 2)
    }
    before = {name: sys.modules.get(name) for name in packages}
    sys.modules.update({name: types.ModuleType(name) for name in packages})
    for module, name in CLASSES.items():
        made[name].__module__, made[name].__qualname__ = module, name
        setattr(sys.modules[module], name, made[name])
    try:
        yield made
    finally:
        for name, old in before.items():
            del sys.modules[name]
            if old is not None:
                sys.modules[name] = old


# ------------------------------------------------------------------ by DeepSpeed


def main(stage: str, out: str, precision: str, optimizer_name: str, *flags: str) -> None:
    """Train three steps with DeepSpeed on this rank and save."""
    import os

    import deepspeed
    import torch.distributed as dist
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    deepspeed.init_distributed("gloo")
    model = make()
    optimizer: Any = None
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": int(stage),
            "stage3_param_persistence_threshold": 20,
            **{flag: True for flag in flags if "=" not in flag},
        },
        "zero_allow_untested_optimizer": True,
    }
    config["zero_optimization"] |= {
        name: int(number) for name, number in (flag.split("=") for flag in flags if "=" in flag)
    }
    if precision != "fp32":
        config[precision] = {"enabled": True}
    if optimizer_name == "torch":
        optimizer = torch.optim.AdamW(param_groups(model), lr=0.01, betas=(0.8, 0.9))
    else:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01}}
    trained = None if optimizer is not None else [p for p in model.parameters() if p.requires_grad]
    engine, wrapped, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, model_parameters=trained
    )
    rank = int(os.environ["RANK"])
    for step in range(3):
        engine.backward(engine(tokens(step, rank)))
        engine.step()
    engine.save_checkpoint(out, client_state={"iteration": 3})
    # a client's optimizer has its states from the first step on, after they were looked for
    if stage != "3":
        wrapped._link_all_hp_params()
        wrapped._hp_optimizer_states_linked = False
        wrapped._lazy_init_hp_params_optimizer_state()
    expected: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            moments = {
                key: safe_get_full_optimizer_state(parameter, key).clone()
                for key in ("exp_avg", "exp_avg_sq")
            }
            expected[name] = {"value": safe_get_full_fp32_param(parameter).clone(), **moments}
    if rank == 0:
        torch.save(expected, Path(out) / "expected.pt")
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
