"""A mixture of experts that ranks divide: tokens go to the ranks of their experts by all-to-all,
and their results come back.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import zeroshard as zs
from tests.support.training import VOCABULARY, final_state, two_groups

WIDTH, HIDDEN, NUM_EXPERTS, LAYERS = 12, 20, 4, 2


class _Exchange(torch.autograd.Function):
    """Send rows to other ranks; their gradients come back the same way."""

    @staticmethod
    def forward(
        context: Any, rows: torch.Tensor, send: list[int], receive: list[int], group: Any
    ) -> torch.Tensor:
        context.args = (send, receive, group)
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(context: Any, *grads: torch.Tensor) -> Any:
        send, receive, group = context.args
        return _Exchange.apply(grads[0], receive, send, group), None, None, None


class Stacked(nn.Module):
    """Experts in one parameter of every matrix."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, WIDTH, HIDDEN) * 0.2)
        self.down = nn.Parameter(torch.randn(num_experts, HIDDEN, WIDTH) * 0.2)

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        parts = [
            functional.silu(part @ self.up[index]) @ self.down[index]
            for index, part in enumerate(rows.split(counts))
        ]
        return torch.cat(parts)


class _Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.up(rows)))


class Listed(nn.ModuleList):
    """Experts as modules, of which those without a token do not run."""

    def __init__(self, num_experts: int) -> None:
        super().__init__(_Expert() for _ in range(num_experts))


def _inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the permutation that undoes `order`."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


class _Layer(nn.Module):
    """Router, two experts of each token, and their weighted sum."""

    def __init__(self, kind: type[nn.Module], group: Any) -> None:
        super().__init__()
        self.group = group  # of the ranks that divide the experts; None: all are here
        self.num_ranks = 1 if group is None else group.size()
        self.num_local = NUM_EXPERTS // self.num_ranks
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.experts = kind(self.num_local)

    def forward(self, x: torch.Tensor, banned: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).flatten(0, 1)
        scores = self.router(rows).unflatten(0, x.shape[:2])
        scores = scores.masked_fill(functional.one_hot(banned, NUM_EXPERTS).bool()[:, None], -1e9)
        weight, chosen = scores.flatten(0, 1).softmax(-1).topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        back = _inverse(order)
        per_expert = torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS)
        out = self._on_their_ranks(rows[order // 2], per_expert)[back].unflatten(0, (-1, 2))
        return x + (out * weight[..., None]).sum(1).unflatten(0, x.shape[:2])

    def _on_their_ranks(self, rows: torch.Tensor, per_expert: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return self._run(rows, per_expert.tolist())
        theirs = torch.empty_like(per_expert)
        dist.all_to_all_single(theirs, per_expert, group=self.group)
        by_source = theirs.view(self.num_ranks, self.num_local)
        send = per_expert.view(self.num_ranks, self.num_local).sum(1).tolist()
        receive = by_source.sum(1).tolist()
        arrived = _Exchange.apply(rows, send, receive, self.group)
        experts = torch.arange(self.num_local, device=rows.device).repeat(self.num_ranks)
        order = torch.repeat_interleave(experts, theirs).argsort(stable=True)
        back = _inverse(order)
        out = self._run(arrived[order], by_source.sum(0).tolist())[back]
        return _Exchange.apply(out, receive, send, self.group)

    def _run(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        if isinstance(self.experts, Stacked):
            return self.experts(rows, counts)
        parts = zip(self.experts, rows.split(counts), strict=True)
        return torch.cat([expert(part) if len(part) else part for expert, part in parts])


class Mixture(nn.Module):
    """A language model of layers of experts; `group` divides them."""

    def __init__(self, kind: type[nn.Module] = Stacked, group: Any = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(_Layer(kind, group) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor, banned: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h, banned)
        return functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def whole_mixture(kind: type[nn.Module]) -> Mixture:
    """Return the model with all experts."""
    torch.manual_seed(0)
    return Mixture(kind)


def local_part(
    state: dict[str, torch.Tensor], kind: type[nn.Module], place: int, num_ranks: int
) -> dict[str, torch.Tensor]:
    """Return of the whole model's `state` what the rank at `place` of `num_ranks` holds."""
    num_local, out = NUM_EXPERTS // num_ranks, {}
    for name, value in state.items():
        if ".experts." not in name:
            out[name] = value
        elif kind is Stacked:
            out[name] = value[place * num_local : (place + 1) * num_local].clone()
        else:
            before, _, after = name.partition(".experts.")
            number, _, rest = after.partition(".")
            if int(number) // num_local == place:
                out[f"{before}.experts.{int(number) % num_local}.{rest}"] = value
    return out


class InTurn(nn.Module):
    """Experts of one size that run one after another, in the order that the caller says."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        h = self.first(x)
        for index in order:
            h = h + self.experts[index](h).tanh()
        return self.last(h).square().mean()


def in_turn(
    rank: int, row: str, orders: dict[int, tuple[int, ...]], *, device: str = "cpu", **options: Any
) -> dict[str, torch.Tensor]:
    """Train experts that pairs of four ranks hold, each rank in the order that `orders` has for it;
    return this rank's weights.
    """
    mesh = init_device_mesh(device.partition(":")[0], (2, 2), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(0)
    model = InTurn()
    with torch.no_grad():  # other experts, other numbers
        for parameter in model.experts.parameters():
            parameter.mul_(1 + mesh.get_local_rank("ep"))
    optimizer = two_groups(model.to(device))
    options = {"mesh_of": {"experts.*": mesh}, **options}
    engine = zs.shard(model, optimizer, policy=row, **options)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        engine.backward(model(torch.randn(4, WIDTH, generator=generator).to(device), orders[rank]))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.cpu() for name, value in final_state(model, engine).items()}
