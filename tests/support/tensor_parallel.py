"""Models with tensor parallelism, and the same training in one process on the same global batch.

A case says how a model is built and how ``parallelize_module`` cuts it. Data parallel ranks have
batches of their own, ranks along 'tp' the same; micro-batches are of different sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.support.training import Net, final_state, two_groups

VOCABULARY = 48
# Adam divides by a gradient's size, and with it rounding errors of very small ones: not below this
_EPS = 1e-4
Plan = dict[str, ParallelStyle]
State = dict[str, torch.Tensor]


class Narrow(nn.Module):
    """A net through whose middle a single feature goes, so that all ranks but one have nothing of
    two of its matrices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 10)
        self.inner = nn.Linear(10, 1)
        self.outer = nn.Linear(1, 10)
        self.head = nn.Linear(10, VOCABULARY)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        h = h + self.outer(nn.functional.gelu(self.inner(h)))
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Attention(nn.Module):
    """Llama's: grouped queries, turned by their place."""

    def __init__(self, width: int, heads: int, key_heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, key_heads * self.head_width, bias=False)
        self.v_proj = nn.Linear(width, key_heads * self.head_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], -1, self.head_width)  # of as many heads as are here
        q, k, v = (
            proj(x).view(shape).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        angles = torch.outer(
            torch.arange(x.shape[1], device=x.device),
            0.01 ** torch.linspace(0, 1, self.head_width // 2, device=x.device),
        )
        q, k = self._turned(q, angles), self._turned(k, angles)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    @staticmethod
    def _turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        (one, other), cos, sin = x.chunk(2, -1), angles.cos(), angles.sin()
        return torch.cat([one * cos - other * sin, other * cos + one * sin], -1).to(x.dtype)


class LlamaBlock(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(width)
        self.attention = Attention(width, 4, 2)
        self.norm = nn.RMSNorm(width)
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_norm(x))
        h = self.norm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(h)) * self.up_proj(h))


class Llama(nn.Module):
    """A small Llama, which imports nothing."""

    def __init__(self, inner: int = 64, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 32)
        self.blocks = nn.ModuleList(LlamaBlock(32, inner) for _ in range(2))
        self.norm = nn.RMSNorm(32)
        self.head = nn.Linear(32, vocabulary, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


class Recomputed(Llama):
    """A Llama whose blocks are recomputed in the backward."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def llama_plan() -> Plan:
    """Return how a `Llama` is cut; its norms stay plain parameters."""
    return {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        **{f"blocks.*.attention.{name}_proj": ColwiseParallel() for name in "qkv"},
        "blocks.*.attention.o_proj": RowwiseParallel(),
        # of uneven parts a local output would not say the whole size
        "blocks.*.gate_proj": ColwiseParallel(use_local_output=False),
        "blocks.*.up_proj": ColwiseParallel(use_local_output=False),
        "blocks.*.down_proj": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }


def _sequence_plan() -> Plan:
    """Activations between blocks are cut along the sequence, the loss along the vocabulary."""
    return {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "blocks.*.norm": SequenceParallel(),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }


def _narrow_plan() -> Plan:
    return {
        "embed": ColwiseParallel(output_layouts=Replicate()),
        "inner": ColwiseParallel(use_local_output=False),
        "outer": RowwiseParallel(),
    }


@dataclass(frozen=True)
class Case:
    """A model, and how it is cut."""

    build: Callable[[], nn.Module]
    plan: Callable[[], Plan]
    around_loss: Callable[[], AbstractContextManager[None]] = nullcontext
    vocabulary: int = VOCABULARY

    def model(self) -> nn.Module:
        """Return the model with the values that every rank begins with."""
        torch.manual_seed(0)
        return self.build()


CASES = {
    "llama": Case(Llama, llama_plan),
    # neither the vocabulary nor the features between divide by two
    "uneven": Case(lambda: Llama(45, 37), llama_plan, vocabulary=37),
    "sequence and loss": Case(lambda: _net(VOCABULARY), _sequence_plan, loss_parallel),
    "recomputed": Case(lambda: Recomputed(reentrant=False), llama_plan),
    "recomputed inside": Case(lambda: Recomputed(reentrant=True), llama_plan),
    "empty": Case(Narrow, _narrow_plan),
}


def _net(vocabulary: int) -> Net:
    net = Net(width=18)
    net.embed = nn.Embedding(vocabulary, 18)
    net.head = nn.Linear(18, vocabulary, bias=False)
    return net


def mesh_of(device: str = "cpu", **sizes: int) -> DeviceMesh:
    """Return a mesh of all ranks, with an axis per keyword."""
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def micro_batches(
    rank: int, step: int, vocabulary: int, most: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the micro-batches of a data parallel rank at `step`: from 1 to `most`, of different
    sizes.
    """
    for number in range(1 + step % most):
        generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
        shape = (1 + (rank + number) % 3, 9)
        tokens = torch.randint(0, vocabulary, shape, generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


@dataclass
class Trained:
    """What a training run leaves behind."""

    losses: list[float]  # of this data parallel rank
    norms: list[float]
    state: State

    def same_bits(self, other: Trained) -> str:
        """Return the first thing that is not the same in every bit, or ""."""
        for what in ("losses", "norms"):
            if getattr(self, what) != getattr(other, what):
                return f"{what}: {getattr(self, what)} and {getattr(other, what)}"
        for name, value in self.state.items():
            if not torch.equal(value, other.state[name]):
                return name
        return ""


def alone(
    case: Case, dp: int, steps: int, *, most: int = 1, clip: float | None = None
) -> list[Trained]:
    """Train in one process on the batches of `dp` ranks; return the losses of each."""
    model = case.model()
    optimizer = two_groups(model, eps=_EPS)
    losses: list[list[float]] = [[] for _ in range(dp)]
    norms = []
    for step in range(steps):
        for rank in range(dp):
            for x, y in micro_batches(rank, step, case.vocabulary, most):
                loss = model(x, y)
                (loss / dp).backward()
                losses[rank].append(float(loss))
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    return [Trained(one, norms, state) for one in losses]


def train(
    case: Case,
    mesh: DeviceMesh,
    steps: int,
    *,
    most: int = 1,
    clip: float | None = None,
    **options: Any,
) -> Trained:
    """Train over `mesh`, cut along 'tp' first; the engine is closed."""
    model = parallelize_module(case.model().to(mesh.device_type), mesh["tp"], case.plan())
    optimizer = two_groups(model, eps=_EPS)
    engine = zs.shard(model, optimizer, mesh=mesh, **{"policy": "zero3", **options})
    losses, norms = [], []
    for step in range(steps):
        batches = list(micro_batches(engine.rank, step, case.vocabulary, most))
        for number, (x, y) in enumerate(batches):
            last = number + 1 == len(batches)
            with nullcontext() if last else engine.no_sync(), case.around_loss():
                loss = model(x.to(mesh.device_type), y.to(mesh.device_type))
                engine.backward(loss)
            whole = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
            losses.append(float(whole))
        if clip is not None:
            norms.append(float(engine.clip_grad_norm_(clip)))
        optimizer.step()
        optimizer.zero_grad()
    state = final_state(model, engine)
    return Trained(losses, norms, state)


def difference(one: State, other: State) -> float:
    """Return the largest relative difference between two states, by parameter."""
    assert one.keys() == other.keys()
    return max(
        float((one[name] - other[name]).norm() / other[name].norm().clamp(min=1e-12))
        for name in one
    )
