"""The optimizers of random programs."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tests.fuzz.program import Program
from zeroshard.core.shares import has_blocks
from zeroshard.optim.several import JointOptimizer, each_of

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


class _ByParameter(torch.optim.Optimizer):
    """A rule for one parameter at a time, which is never an empty one."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                assert p.numel(), "a rank that owns nothing of a group"
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)

    def update(
        self, p: nn.Parameter, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        raise NotImplementedError


class Lamb(_ByParameter):
    """LAMB (You et al., 2019, algorithm 2) without its corrections: by norms of parameters."""

    def update(
        self, p: nn.Parameter, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["exp_avg"].mul_(0.9).add_(grad, alpha=0.1)
        state["exp_avg_sq"].mul_(0.99).addcmul_(grad, grad, value=0.01)
        update = state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-6)
        update.add_(p, alpha=group["weight_decay"])
        p.add_(update, alpha=-group["lr"] * float(p.norm() / (update.norm() + 1e-9)))


class Hybrid(_ByParameter):
    """Muon for matrices and SGD for the others in one optimizer, as Muon's author has published
    it.
    """

    def update(
        self, p: nn.Parameter, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        update = state.setdefault("momentum_buffer", torch.zeros_like(p))
        update.lerp_(grad, 0.1)
        if p.dim() == 2:
            update = update / (update.norm() + 1e-7)
            for _ in range(3):  # Newton and Schulz
                square = update @ update.T
                update = 2 * update - 1.5 * square @ update + 0.5 * square @ square @ update
        p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])


class Blocks(_ByParameter):
    """SGD with a momentum of 8 bits in blocks of 16, of parameters with more than 32 elements, or
    of 1024, of parameters with 4096 or more.
    """

    def update(
        self, p: nn.Parameter, grad: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        size = 1024 if p.numel() >= 4096 else 16
        if "absmax" in state:
            codes = (state["momentum"].flatten().float() - 128) / 127
            before = codes * state["absmax"].repeat_interleave(size)[: p.numel()]
        else:
            before = state.get("momentum", torch.zeros_like(p)).flatten()
        momentum = before.mul(0.9).add_(grad.flatten())
        p.sub_(momentum.view(p.shape), alpha=group["lr"])
        if p.numel() <= 32:
            state["momentum"] = momentum.view(p.shape)
            return
        blocks = nn.functional.pad(momentum, (0, -p.numel() % size)).view(-1, size)
        state["absmax"] = blocks.abs().amax(1)
        codes = (blocks / state["absmax"].clamp_min(1e-12)[:, None] * 127 + 128).round()
        state["momentum"] = codes.to(torch.uint8).flatten()[: p.numel()].view(p.shape)


class ScheduleFree(torch.optim.Optimizer):
    """The rule of "The Road Less Scheduled", section 2, for SGD: gradients at y, steps of z, and x,
    the average of z, to evaluate.
    """

    def __init__(self, params: Any, lr: float = 0.5, beta: float = 0.75) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": False})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("call train() before step()")
            group["k"] += 1
            for y in group["params"]:
                if y.grad is None:
                    continue
                state = self.state[y]
                if not state:
                    state["x"], state["z"] = y.clone(), y.clone()
                state["z"].sub_(y.grad, alpha=group["lr"])
                state["x"].lerp_(state["z"], 1.0 / group["k"])
                torch.lerp(state["z"], state["x"], group["beta"], out=y)

    def train(self) -> None:
        self._move(training=True)

    def eval(self) -> None:
        self._move(training=False)

    @torch.no_grad()
    def _move(self, *, training: bool) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if state and training != group["training"]:
                    x, z = state["x"], state["z"]
                    p.copy_(torch.lerp(z, x, group["beta"]) if training else x)
            group["training"] = training


# of whole parameters
WHOLE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "lamb": (Lamb, {}),
    "hybrid": (Hybrid, {}),
}
# and with states of other shapes
APART: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adafactor": (torch.optim.Adafactor, {}),
    "blocks": (Blocks, {}),
}


# of matrices alone
MATRICES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "muon": (torch.optim.Muon, {}),
}


def make_optimizer(program: Program, every: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the program's optimizer over these parameters; frozen ones are in it, as users leave
    them.
    """
    parameters = list(every)
    cls, options = (OPTIMIZERS | WHOLE | APART | MATRICES)[program.optimizer]
    if program.several:
        matrices = [p for p in parameters if p.ndim == 2]
        others = [p for p in parameters if p.ndim != 2]
        first = cls(matrices, **{"lr": 1e-2, **options})
        if not others:
            return first
        if not program.modes:
            return JointOptimizer([first, torch.optim.AdamW(others, lr=5e-3)])
        free = ScheduleFree(others, lr=0.05)
        free.train()
        return JointOptimizer([first, free])
    groups: list[dict[str, Any]] = [{"params": parameters}]
    if program.groups:
        matrices = [p for p in parameters if p.ndim > 1]
        others = [p for p in parameters if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0, "lr": 5e-3},
        ]
    return cls(groups, **{"lr": 1e-2, **options})


def parts_of(
    program: Program, parameters: dict[str, nn.Parameter]
) -> dict[str, int | tuple[int, ...]]:
    """Return in how many equal parts, or parts of how many rows, some matrices are stepped."""
    out = dict[str, int | tuple[int, ...]]()
    for name, parameter in parameters.items():
        rng = random.Random(f"parts of {program.seed} {name}")
        is_matrix = parameter.requires_grad and parameter.ndim == 2
        if program.parts and is_matrix and rng.random() < 0.7:
            rows = parameter.shape[0]
            if rng.random() < 0.5:
                out[name] = rng.choice([n for n in range(2, 14) if not rows % n])
                continue
            cuts = sorted(rng.sample(range(1, rows), min(rng.choice((1, 1, 2, 3)), rows - 1)))
            ends = zip([0, *cuts], [*cuts, rows], strict=True)
            out[name] = tuple(stop - start for start, stop in ends)
    return out


def in_parts(
    program: Program, parameters: dict[str, nn.Parameter]
) -> dict[tuple[str, int], nn.Parameter]:
    """Return what plain torch steps, by name and first row: parameters, and views of those that
    are stepped as several.
    """
    declared, out = parts_of(program, parameters), dict[tuple[str, int], nn.Parameter]()
    for name, parameter in parameters.items():
        given = declared.get(name, 1)
        if program.optimizer == "blocks" and has_blocks(parameter.numel()):
            given = 1  # it is cut between blocks instead
        if given == 1:
            out[name, 0] = parameter
            continue
        each = parameter.detach().split(
            [*given] if isinstance(given, tuple) else len(parameter) // given
        )
        start = 0
        for part in each:
            out[name, start], start = nn.Parameter(part), start + len(part)
    return out


def free_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return the schedule-free one of several."""
    return next(one for one in each_of(optimizer) if isinstance(one, ScheduleFree))
