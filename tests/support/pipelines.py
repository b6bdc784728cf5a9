"""What the tests of pipelines share: a small Llama that is cut into stages, every schedule, and one
loop that trains it with an engine, beside the same training in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.utils.checkpoint import checkpoint

import zeroshard as zs

State = dict[str, torch.Tensor]

VOCABULARY = 29
LAYERS = 4
LENGTH = 6
SINGLE = ("GPipe", "1F1B")  # one stage on each rank
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")  # stages rank, rank + ranks
SCHEDULES = (*SINGLE, *LOOPED, "ZBVZeroBubble")

if torch.__version__ < (2, 13):  # stages first greet their neighbours; gloo cannot on one rank
    _greetings: Any = PipelineStage._get_init_p2p_neighbors_ops
    PipelineStage._get_init_p2p_neighbors_ops = lambda stage: [  # type: ignore[method-assign]
        one for one in _greetings(stage) if one.group_peer != stage.group_rank
    ]


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Layer(nn.Module):
    """One of Llama's: attention with rotary positions, SwiGLU, norms before both."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(width, dim=-1)
        )
        attended = nn.functional.scaled_dot_product_attention(
            _turned(q), _turned(k), v, is_causal=True
        )
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def _turned(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    rates = 100.0 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.outer(torch.arange(x.shape[-2], device=x.device).float(), rates).to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


class Llama(nn.Module):
    """A part of a Llama: whatever is cut away is None, and names are those of the whole."""

    def __init__(self, layers: Sequence[int], *, first: bool, last: bool, width: int = 8) -> None:
        super().__init__()
        self.recomputes = False
        self.embed = nn.Embedding(VOCABULARY, width) if first else None
        self.layers = nn.ModuleDict({str(number): Layer(width, heads=2) for number in layers})
        self.norm = Norm(width) if last else None
        self.head = nn.Linear(width, VOCABULARY, bias=False) if last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        for layer in self.layers.values():
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def whole(width: int = 8) -> Llama:
    """Return all of it."""
    torch.manual_seed(0)
    return Llama(range(LAYERS), first=True, last=True, width=width)


def part(number: int, num_stages: int, width: int = 8) -> Llama:
    """Return stage `number`, with the weights of the whole."""
    full = whole(width)
    each = LAYERS // num_stages
    own = range(each * number, each * (number + 1))
    stage = Llama(own, first=number == 0, last=number == num_stages - 1, width=width)
    state = full.state_dict()
    stage.load_state_dict({name: state[name] for name in stage.state_dict()})
    return stage


def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())


def tokens(dp_rank: int, step: int, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a data parallel rank."""
    generator = torch.Generator().manual_seed(1000 * step + dp_rank)
    drawn = torch.randint(0, VOCABULARY, (sequences, LENGTH + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def numbers_of(schedule: str, rank: int, ranks: int) -> list[int]:
    """Return which stages a rank has under a schedule."""
    if schedule in SINGLE:
        return [rank]
    if schedule == "ZBVZeroBubble":
        return [rank, 2 * ranks - 1 - rank]
    return [rank, ranks + rank]


@dataclass
class Piped:
    """One rank's part of a model under a schedule."""

    mesh: DeviceMesh
    stages: list[PipelineStage]
    optimizer: torch.optim.Optimizer
    engine: zs.Engine
    schedule: Any
    following: Any = None
    losses: list[list[float]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)

    @property
    def pp(self) -> int:
        return self.mesh.get_local_rank("pp")

    def run(self, step: int, sequences: int) -> None:
        """Run the schedule on this rank's batch."""
        device = self.stages[0].device
        x, y = (part.to(device) for part in tokens(self.engine.rank, step, sequences))
        losses: list[torch.Tensor] = []
        has_first = any(stage.is_first for stage in self.stages)
        has_last = any(stage.is_last for stage in self.stages)
        self.schedule.step(
            *([x] if has_first else []),
            target=y if has_last else None,
            losses=losses if has_last else None,
        )
        self.losses.append([loss.item() for loss in losses])

    def train(
        self, steps: int, sequences: int, *, clip: float | None = None, first: int = 0
    ) -> None:
        """Take steps."""
        for step in range(first, first + steps):
            self.run(step, sequences)
            if clip is not None:
                self.norms.append(float(self.engine.clip_grad_norm_(clip)))
            self.optimizer.step()
            self.optimizer.zero_grad()

    def state(self) -> State:
        """Return this rank's part of the weights."""
        full = self.engine.full_state_dict(rank0_only=False)
        return {name: value.clone() for name, value in full.items()}


def _adamw(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named], lr=1e-2, weight_decay=0.1)


def mesh_of(pp: int = 2, dp: int = 2, device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (pp, dp), mesh_dim_names=("pp", "dp"))


def piped(
    mesh: DeviceMesh,
    name: str,
    row: str,
    *,
    micro_batches: int = 4,
    budget: int | str | None = None,
    no_sync: bool = True,
    recomputes: bool = False,
    shapes: torch.Tensor | None = None,
    scale_grads: bool = True,
    follow: bool = True,
    width: int = 8,
    make: Callable[[Any], Any] = _adamw,
    **options: Any,
) -> Piped:
    """Build this rank's stages, shard them, and let the engine follow the schedule. `shapes`: an
    input of the first stage's, from which no stage has to be run to learn its shapes. `make`
    returns one optimizer or several of named parameters.
    """
    ranks, rank = mesh.size(0), mesh.get_local_rank("pp")
    numbers = numbers_of(name, rank, ranks)
    num_stages = len(numbers) * ranks
    stages, device = [], torch.device(mesh.device_type)
    for number in numbers:
        module = part(number, num_stages, width).to(device)
        module.recomputes = recomputes
        group = mesh.get_group("pp")
        given: dict[str, Any] = {}
        if shapes is not None:
            hidden = torch.zeros(*shapes.shape, width, device=device, requires_grad=True)
            logits = torch.zeros(*shapes.shape, VOCABULARY, device=device, requires_grad=True)
            given["input_args"] = shapes.to(device) if number == 0 else hidden
            given["output_args"] = logits if number == num_stages - 1 else hidden
        stages.append(PipelineStage(module, number, num_stages, device, group=group, **given))
    made = make([one for stage in stages for one in stage.submod.named_parameters()])
    engine = zs.shard(
        stages if len(stages) > 1 else stages[0], made, policy=row, mesh=mesh, **options
    )
    schedule = get_schedule_class(name)(
        stages if len(stages) > 1 or name not in SINGLE else stages[0],
        n_microbatches=micro_batches,
        loss_fn=loss_of,
        scale_grads=scale_grads,
    )
    out = Piped(mesh, stages, engine.optimizer or made, engine, schedule)
    if follow:
        out.following = engine.follow(schedule, budget=budget, no_sync=no_sync)
    return out


def alone(
    steps: int,
    sequences: int,
    *,
    dp: int = 2,
    micro_batches: int = 4,
    clip: float | None = None,
    shares: Sequence[float] | None = None,
) -> tuple[list[list[float]], State, list[float]]:
    """Train the whole in one process on the same global batch; return the losses of each step and
    micro-batch, averaged over the data parallel ranks, the weights and the norms. `shares`: how
    much a loss of each rank counts.
    """
    counts = shares or [1 / dp] * dp
    model = whole()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses, norms = [], []
    for step in range(steps):
        sums = [0.0] * micro_batches
        for rank in range(dp):
            x, y = tokens(rank, step, sequences)
            chunks = zip(x.tensor_split(micro_batches), y.tensor_split(micro_batches), strict=True)
            for index, (inputs, targets) in enumerate(chunks):
                loss = loss_of(model(inputs), targets)
                (loss * (counts[rank] / micro_batches)).backward()  # type: ignore[no-untyped-call]
                sums[index] += loss.item() / dp
        losses.append(sums)
        if clip is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict(), norms
