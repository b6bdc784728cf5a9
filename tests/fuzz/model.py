"""The module that a program describes; its layers keep the shape of their input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.program import Layer, Program, experts_apart

FEATURES = 7  # of an input
VOCABULARY = 11
ROWS_IN_BATCH = 4


class Linear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.fc(x))

    def lend(self) -> torch.Tensor:
        return self.fc.weight


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def lend(self) -> torch.Tensor:
        return self.norm.weight


class Plain(nn.Module):
    """Its output is that of its last layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def lend(self) -> torch.Tensor:
        return self.up.weight


class Gate(nn.Module):
    """A vector and a scalar parameter, neither of which a submodule holds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(width))
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.gate) * self.scale

    def lend(self) -> torch.Tensor:
        return self.gate


class Nest(nn.Module):
    """Containers within containers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = nn.ModuleDict(
            {"a": nn.Sequential(nn.Linear(width, width), nn.Tanh()), "b": Gate(width)}
        )
        self.parts = nn.ModuleList([Block(width), inner])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, inner = self.parts
        assert isinstance(inner, nn.ModuleDict)
        return inner["b"](inner["a"](first(x)))


class Table(nn.Module):
    """An embedding that is added; some of its rows are never looked up."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(6, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(torch.arange(len(x)) % 4)


class Position(nn.Module):
    """Returns a view of its parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.pos = nn.Parameter(0.1 * torch.randn(ROWS_IN_BATCH + 2, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pos[: len(x)]


class Fork(nn.Module):
    """Runs one half, the other, or both, as `halves` says (set by the caller, per rank)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = nn.Linear(width, width)
        self.right = nn.Linear(width, width)
        self.halves = "lr"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "l" in self.halves:
            x = x + self.left(x)
        if "r" in self.halves:
            x = x + torch.tanh(self.right(x))
        return x


class BatchNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Wide(nn.Module):
    """A weight of some blocks of 4096 elements, on whose multiples it may be cut."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64 * blocks, 64) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        width = x.shape[-1]
        many = x.repeat(1, -(-64 // width))[:, :64]
        h = torch.tanh(F.linear(many, self.weight))
        return x + F.pad(h, (0, -h.shape[1] % width)).unflatten(1, (-1, width)).mean(1)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class AllRanks(torch.autograd.Function):
    """Concatenate a tensor over ranks; its gradient is the sum of the ranks'."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(_of_all_ranks(x))

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> torch.Tensor:
        return _OwnPart.apply(grads[0])


class _OwnPart(torch.autograd.Function):
    """Sum a tensor over ranks and keep this rank's part of it; the backward of `AllRanks`."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        each = _of_all_ranks(x)
        total = each[0]
        for other in each[1:]:
            total = total + other
        return total.chunk(len(each))[dist.get_rank() if len(each) > 1 else 0]

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> torch.Tensor:
        return AllRanks.apply(grads[0])


def _of_all_ranks(x: torch.Tensor) -> list[torch.Tensor]:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [x]
    each = [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for _ in range(dist.get_world_size())
    ]
    dist.all_gather(each, x.detach().contiguous())
    return each


class Attend(nn.Module):
    """Attention to the rows of all ranks, whose keys are gathered with gradients."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.keys = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = AllRanks.apply(self.keys(x))
        return x + (x @ keys.t() / x.shape[-1]).softmax(-1) @ keys


class Experts(nn.Module):
    """Each of `experts_apart` ranks holds one expert; the rows of all ranks are divided among
    them.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = Linear(width)
        self.apart = experts_apart(dist.get_world_size())
        self.place = dist.get_rank() % self.apart
        with torch.no_grad():
            self.experts.fc.weight.add_(0.25 * self.place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = AllRanks.apply(x)
        number = torch.arange(len(rows)) % self.apart
        mine = torch.zeros_like(rows).index_add(
            0, (number == self.place).nonzero().flatten(), self.experts(rows[number == self.place])
        )
        made = AllRanks.apply(mine).unflatten(0, (-1, len(rows)))
        rank, count = dist.get_rank(), len(x)
        first = rank - self.place  # of the ranks that hold each expert once, this one among them
        own = made[first : first + self.apart, rank * count : (rank + 1) * count]
        return x + own.sum(0)


class Wrong(Linear):
    """Computes something else while it is sharded: the generator must notice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 + 1e-6 * ("_apply" in self.__dict__))


KINDS: dict[str, type[nn.Module]] = {
    "linear": Linear,
    "block": Block,
    "plain": Plain,
    "gate": Gate,
    "norm": Norm,
    "batchnorm": BatchNorm,
    "nest": Nest,
    "table": Table,
    "position": Position,
    "fork": Fork,
    "attend": Attend,
    "experts": Experts,
    "wrong": Wrong,
}


class BadBatchError(Exception):
    """What a forward raises that is told to fail."""


@dataclass
class Output:
    hidden: torch.Tensor
    extra: torch.Tensor | None = None


class Wrapped(nn.Module):
    """A layer: its body, then dropout and a container as the program says."""

    def __init__(self, layer: Layer, body: nn.Module) -> None:
        super().__init__()
        self.layer, self.body = layer, body

    def forward(self, x: torch.Tensor) -> Any:
        h = self.body(x)
        if self.layer.dropout:
            h = F.dropout(h, 0.25, self.training)
        return _packed(self.layer.container, h, x)


def _packed(container: str, h: torch.Tensor, x: torch.Tensor) -> Any:
    if container == "dict":
        return {"h": h.t(), "x": x, "none": None, "deep": [(h,)]}
    if container == "tuple":
        return (h, x, "text", 3)
    if container == "dataclass":
        return Output(h, x)
    return h


def _unpacked(value: Any) -> torch.Tensor:
    if isinstance(value, dict):
        return value["h"].t() + 0.5 * value["deep"][0][0]
    if isinstance(value, tuple):
        return value[0] + 0.25 * value[1]
    if isinstance(value, Output):
        assert value.extra is not None
        return value.hidden + 0.25 * value.extra
    assert isinstance(value, torch.Tensor)
    return value


def _share_weight(body: nn.Module, other: nn.Module) -> None:
    """Give `body` the first parameter of `other`, which has the same structure."""
    name = next(name for name, _ in other.named_parameters())
    parent, _, leaf = name.rpartition(".")
    setattr(body.get_submodule(parent), leaf, other.get_parameter(name))


class FuzzNet(nn.Module):
    """The model of a program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        width = program.width
        self.program = program
        self.first: nn.Module = (
            nn.Embedding(VOCABULARY, width) if program.tokens else nn.Linear(FEATURES, width)
        )
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.layers = nn.ModuleList()
        for index, layer in enumerate(program.layers):
            self.layers.append(self._made(index, layer, width))
        self.last = nn.Linear(width, VOCABULARY if program.tokens else FEATURES)
        if program.tied_ends:
            self.last.weight = self.first.weight

    def _made(self, index: int, layer: Layer, width: int) -> nn.Module:
        if layer.same_module and layer.same_as is not None:
            return self.layers[layer.same_as]
        is_wide = layer.kind == "wide"
        body = Wide(self.program.blocks) if is_wide else KINDS[layer.kind](width)
        made = Wrapped(layer, body)
        if layer.same_as is not None:
            _share_weight(made.body, self.layers[layer.same_as].body)
        if layer.frozen:
            made.requires_grad_(False)
        if layer.hook == "module":
            made.register_forward_hook(lambda module, args, output: output * 1.25)
        return made

    def forward(self, x: torch.Tensor, route: tuple[int, ...], *, fails: bool = False) -> Any:
        h = first = self.first(x) * self.scale
        if self.program.detached:
            h = h.detach()
        for index in route:
            h = self._run(index, h)
        if self.program.detached:
            h = h + first
        if fails:
            raise BadBatchError
        out = self.last(h)
        if self.program.returns == "parameter":
            return out, self.scale
        if self.program.returns == "view":
            return out, self.scale[1:]
        return out, None

    def _run(self, index: int, h: torch.Tensor) -> torch.Tensor:
        layer, module = self.program.layers[index], self.layers[index]
        if layer.checkpoint:
            value = checkpoint(module, h, use_reentrant=layer.checkpoint == "reentrant")
        else:
            value = module(h)
        value = _unpacked(value)
        if layer.kind == "position":
            value = h + value
        if layer.hook == "tensor" and value.requires_grad:
            value.register_hook(lambda grad: grad * 0.75)
        if layer.borrows is not None:
            value = value + 0.1 * self._borrowed(layer.borrows, value)
        return value

    def _borrowed(self, index: int, h: torch.Tensor) -> torch.Tensor:
        weight = self.layers[index].body.lend()
        return F.linear(h, weight) if weight.dim() == 2 else h * weight
