"""The optimizers of random programs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.fuzz.program import Program

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adamw fused": (torch.optim.AdamW, {"fused": True}),
    "adamw foreach": (torch.optim.AdamW, {"foreach": True}),
    "adam amsgrad": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.01}),
    "sgd": (torch.optim.SGD, {}),
    "sgd momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    # with momentum it fails where a parameter is first used late
    "sgd fused": (torch.optim.SGD, {"fused": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adagrad foreach": (torch.optim.Adagrad, {"foreach": True, "lr_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
}


def make_optimizer(program: Program, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Return the program's optimizer over `parameters`; frozen ones are in it, as users leave
    them.
    """
    cls, options = OPTIMIZERS[program.optimizer]
    groups: list[dict[str, Any]] = [{"params": list(parameters.values())}]
    if program.groups:
        matrices = [p for p in parameters.values() if p.ndim > 1]
        others = [p for p in parameters.values() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0, "lr": 5e-3},
        ]
    return cls(groups, **{"lr": 1e-2, **options})
