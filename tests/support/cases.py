"""One case, every contender: a model and what a step does with it, trained by torch DDP (or by
hand) and in every row, bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard as zs
from tests.support import inside
from tests.support.training import ROWS, Run, batch, final_state, two_groups

STEPS = 6
WIDTH = 19
Backward = Callable[..., None]


@dataclass(frozen=True)
class Case:
    """A model and what a step does with it before ``optimizer.step()``; the numbers it returns
    are compared too.
    """

    model: Callable[[], nn.Module]
    run: Callable[[nn.Module, Backward, int, int], list[torch.Tensor]]
    # how torch's DDP takes it; None: it cannot, so by hand
    ddp: dict[str, Any] | None = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # of shard()
    gloo: bool = True  # whether the ranks gather the same units in the same order


class ByHand:
    """Data parallel training in a dozen lines: what each backward adds is summed over the ranks,
    and averaged at the end. `backward` of several losses adds them on each rank first.
    """

    def __init__(self, module: nn.Module) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.totals: dict[nn.Parameter, torch.Tensor] = {}

    def backward(self, *losses: torch.Tensor, **options: bool) -> None:
        for p in self.parameters:
            p.grad = None
        for loss in losses:
            loss.backward(**options)
        for p in self.parameters:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            used = torch.tensor(float(p.grad is not None))
            dist.all_reduce(grad)
            dist.all_reduce(used)
            if used:
                self.totals[p] = self.totals[p] + grad if p in self.totals else grad

    def finish(self) -> None:
        for p in self.parameters:
            p.grad = self.totals[p] / dist.get_world_size() if p in self.totals else None
        self.totals.clear()


def simple(module: nn.Module, backward: Backward, rank: int, step: int) -> list[torch.Tensor]:
    loss = module(*batch(rank, step))
    backward(loss)
    return [loss.detach()]


def train_case(rank: int, kind: str, case: Case, steps: int = STEPS, **options: Any) -> Run:
    inner = module = case.model()
    backward: Backward = torch.Tensor.backward
    trainable = nn.ParameterList([p for p in inner.parameters() if p.requires_grad])
    optimizer = two_groups(trainable)
    engine, hand = None, None
    if kind == "reference" and case.ddp is not None:
        module = DistributedDataParallel(module, **case.ddp)
    elif kind == "reference":
        hand = ByHand(module)
        backward = hand.backward
    else:
        engine = zs.shard(module, optimizer, policy=kind, strict=True, **case.options, **options)
    seen: list[torch.Tensor] = []
    for step in range(steps):
        seen += case.run(module, backward, rank, step)
        if hand is not None:
            hand.finish()
        optimizer.step()
        optimizer.zero_grad()
    losses = [value.double().sum().item() for value in seen]
    if engine is None:
        return Run(losses, final_state(inner, None), {"state": len(optimizer.state)})
    assert inside.is_unused(engine)
    return Run(losses, final_state(inner, engine))


def compare_case(rank: int, case: Case, rows: Sequence[str] = ROWS) -> dict[str, list[str]]:
    """Train `case` in `rows`, and at stage 3 over sockets; return what differs from the
    reference.
    """
    reference = train_case(rank, "reference", case)
    assert all(loss == loss for loss in reference.losses), "the reference is NaN"
    runs = {
        row: train_case(rank, row, case, comm=zs.Comm(transport="shared_memory")) for row in rows
    }
    if case.gloo:
        runs["zero3 on gloo"] = train_case(rank, "zero3", case, comm=zs.Comm(transport="gloo"))
    return {kind: run.differs_from(reference) for kind, run in runs.items()}


class Chain(nn.Module):
    """An embedding, a chain of blocks that are each told something, a head."""

    def __init__(self, make: Callable[[int], nn.Module], layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, WIDTH)
        self.blocks = nn.ModuleList(make(WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, 37)

    def forward(self, x: torch.Tensor, y: torch.Tensor, tell: Any = None) -> torch.Tensor:
        h = self.embed(x)
        for index, block in enumerate(self.blocks):
            h = block(h) if tell is None else block(h, tell[index])
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def seeded(make: Callable[..., nn.Module], *args: Any, **options: Any) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return make(*args, **options)

    return model


class LoraLinear(nn.Module):
    def __init__(self, width: int, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.base(x) + self.up(self.down(x))


def lora() -> Chain:
    model = Chain(LoraLinear)
    model.embed.requires_grad_(False)
    model.head.requires_grad_(False)
    return model
