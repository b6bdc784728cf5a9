"""What the engine's tests share: a small model on odd shapes, its data, and one training loop
for every contender.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.support import inside
from zeroshard.state.local import is_dtensor, local_of

State = dict[str, torch.Tensor]

ROWS = ("ddp", "zero1", "zero2", "zero3", "zero3-keep")
TRANSPORTS = ("shared_memory", "gloo")
VOCABULARY = 37


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """A language model without attention: embedding, repeated blocks, final norm, head; no size
    is a round number.
    """

    def __init__(self, width: int = 19, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        return (
            logits
            if y is None
            else nn.functional.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
        )


class Recomputed(Net):
    """A net whose blocks are recomputed in the backward."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        assert y is not None
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


class Routed(Net):
    """A net that runs the blocks of a route, which each rank may choose for itself."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, y: torch.Tensor, route: Sequence[int] = (0, 1, 2, 3)
    ) -> torch.Tensor:
        h = self.embed(x)
        for index in route:
            h = self.blocks[index](h)
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token batch of `rank` at `step`, different for every pair."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (3, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def leaf_loss(
    model: nn.Module, step: int, leaf: int, *, leaves: int = 12, width: int = 40
) -> torch.Tensor:
    """Return the mean square of what `model` makes of a leaf's row; a step has as many as `leaves`,
    different from those of every other step.
    """
    rows = torch.randn(leaves, width, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(rows[leaf : leaf + 1]).square().mean()
    return loss


def resumed(folder: Path | None, engine: zs.Engine, **options: Any) -> int:
    """Return the step of `folder` that was loaded into `engine`, 0 where there is none."""
    if folder is None or zs.latest_step(folder) is None:
        return 0
    return zs.load(folder, engine, **options).step


def has_parameters(name: str, module: nn.Module) -> bool:
    """Whether a module has parameters of its own: for ``units=``."""
    return any(True for _ in module.parameters(recurse=False))


def make_model(**sizes: int) -> Net:
    torch.manual_seed(0)
    return Net(**sizes)


def two_groups(
    model: nn.Module, make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> torch.optim.Optimizer:
    """Return an optimizer with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return make(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        **{"lr": 1e-2, **options},
    )


def one_step(
    engine: zs.Engine, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int
) -> None:
    """Train one step on the first batch, counting traffic from zero."""
    engine.reset_traffic()
    take_steps(rank, 1, model, optimizer)


def bytes_between_nodes(engine: zs.Engine) -> int:
    """Return the payload that came from other nodes, small exchanges aside."""
    return sum(
        num_bytes
        for operation, num_bytes in engine.traffic().between_nodes.items()
        if operation != "exchange"
    )


@dataclass
class Run:
    """What one training run leaves behind."""

    losses: list[float]
    state: dict[str, torch.Tensor]
    extra: dict[str, Any] = field(default_factory=dict)
    row: str = "this run"

    def differs_from(self, other: Run) -> list[str]:
        """Return a line per parameter that differs in any bit (see `differences`), and one for
        the losses where those differ.
        """
        lines = differences(self.state, other.state, self.row, other.row)
        steps = [
            step
            for step, pair in enumerate(zip(self.losses, other.losses, strict=False))
            if pair[0] != pair[1]
        ]
        if self.losses == other.losses:
            return lines
        if not steps:
            return [
                *lines,
                (
                    f"{len(self.losses)} losses in {self.row} against {len(other.losses)} in"
                    f" {other.row}"
                ),
            ]
        first = steps[0]
        return [
            *lines,
            (
                f"losses[{first}]: {self.losses[first]!r} in {self.row} against"
                f" {other.losses[first]!r} in {other.row}"
            ),
        ]


def differences(
    ours: State, expected: State, row: str = "this run", other: str = "the reference"
) -> list[str]:
    """Return a line per tensor that differs in any element: its name, the first index, both
    values with their rows, and how many differ.
    """
    lines = [
        f"{name} is only in {row if name in ours else other}"
        for name in sorted(ours.keys() ^ expected.keys())
    ]
    for name in [name for name in ours if name in expected]:
        mine, theirs = ours[name], expected[name]
        if torch.equal(mine, theirs):
            continue
        if mine.shape != theirs.shape:
            lines.append(
                f"{name}: shape {tuple(mine.shape)} in {row} against {tuple(theirs.shape)} in"
                f" {other}"
            )
            continue
        wrong = (mine != theirs).nonzero().tolist()
        values = (
            f"{mine[tuple(wrong[0])].item()!r} in {row} against {theirs[tuple(wrong[0])].item()!r}"
            f" in {other}"
        )
        lines.append(f"{name}{wrong[0]}: {values} ({len(wrong)} of {mine.numel()} elements differ)")
    return lines


Sharded = tuple[Any, torch.optim.Optimizer, zs.Engine]


def make_sharded(
    row: str = "zero3",
    transport: str = "auto",
    *,
    model: nn.Module | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = two_groups,
    **options: Any,
) -> Sharded:
    """Return a model, its optimizer and the engine that shards them in `row`."""
    model = make_model() if model is None else model
    tied = optimizer(model)
    comm = zs.Comm.model_validate({"transport": transport})
    return (model, tied, zs.shard(model, tied, policy=row, **{"comm": comm, **options}))


def wrapped(
    model: nn.Module, optimizer: torch.optim.Optimizer, kind: str, **options: Any
) -> tuple[nn.Module, zs.Engine | None]:
    """Return what is called to train `model` as `kind` says, and the engine if there is one.

    `kind` is a row, with the `options` of shard(); "torch-ddp"; or "plain", one process.
    """
    if kind == "plain":
        return model, None
    if kind == "torch-ddp":
        return DistributedDataParallel(model), None
    return model, zs.shard(model, optimizer, policy=kind, **options)


def take_steps(
    rank: int,
    steps: int | Iterable[int],
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    engine: zs.Engine | None = None,
    *,
    micro_batches: int = 1,
    no_sync: bool = False,
    clip: float | None = None,
    norms: list[float] | None = None,
    data: Callable[[int, int], Sequence[Any]] = batch,
    after: Callable[[int], None] | None = None,
) -> list[float]:
    """Train on this rank's batches of `steps` (a number: from 0 on); return the losses, which are
    read at the end: a device may run behind the whole loop.

    `data` gives the arguments of `module` for a rank and a micro-batch, and `module` the loss. With
    an `engine`, its ``backward()`` and clipping are used. The norms before clipping go to `norms`.
    `after` is called with the number of each step that has been taken.
    """
    syncs: Any = engine or module
    losses = []
    for step in range(steps) if isinstance(steps, int) else steps:
        for micro in range(micro_batches):
            hold = no_sync and micro < micro_batches - 1
            with syncs.no_sync() if hold else contextlib.nullcontext():
                loss = module(*data(rank, step * micro_batches + micro))
                engine.backward(loss) if engine else loss.backward()
            losses.append(loss.detach())
        if clip is not None:
            norm = _clipped(module, engine, clip)
            if norms is not None:
                norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(step)
    return [loss.item() for loss in losses]


def _clipped(module: nn.Module, engine: zs.Engine | None, clip: float) -> torch.Tensor:
    if engine is not None:
        return engine.clip_grad_norm_(clip)
    return nn.utils.clip_grad_norm_(module.parameters(), clip)


def final_state(model: nn.Module, engine: zs.Engine | None) -> State:
    """Return the whole ``state_dict()`` of `model` on every rank, and close the engine."""
    if engine is None:
        return {name: value.clone() for name, value in model.state_dict().items()}
    state = engine.full_state_dict(rank0_only=False)
    engine.close()
    return state


def train(
    rank: int,
    kind: str,
    steps: int,
    *,
    micro_batches: int = 1,
    no_sync: bool = False,
    clip: float | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = two_groups,
    model: Callable[[], nn.Module] = make_model,
    **options: Any,
) -> Run:
    """Train `model` on this rank for `steps`; `kind` is as in `wrapped`."""
    inner = model()
    tied = optimizer(inner)
    module, engine = wrapped(inner, tied, kind, **options)
    norms: list[float] = []
    losses = take_steps(
        rank,
        steps,
        module,
        tied,
        engine,
        micro_batches=micro_batches,
        no_sync=no_sync,
        clip=clip,
        norms=norms,
    )
    extra: dict[str, Any] = {"norms": norms}
    if engine is not None:
        extra |= {"memory": engine.memory(), "traffic": engine.traffic(), "units": engine.units}
    return Run(losses, final_state(inner, engine), extra, kind)


def train_with_ddp(
    rank: int, model: Net, optimizer: torch.optim.Optimizer, steps: list[int]
) -> Run:
    """Train `model` on this rank's batches of `steps` with torch's own data parallel wrapper."""
    losses = take_steps(rank, steps, DistributedDataParallel(model), optimizer)
    return Run(losses, final_state(model, None), row="torch-ddp")


def train_row(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    row: str,
    step: Callable[[int], None],
    *,
    steps: int,
    transport: str = "auto",
    **options: Any,
) -> State:
    """Return the weights after `steps` calls of `step`, each a forward and a backward; row
    "plain" adds the ranks' gradients by hand, as DDP does.
    """
    comm = zs.Comm.model_validate({"transport": transport})
    engine = (
        None if row == "plain" else zs.shard(model, optimizer, policy=row, comm=comm, **options)
    )
    for number in range(steps):
        step(number)
        if engine is None:
            average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        if engine is not None and row == "zero3":
            assert not inside.gathered(engine), "nothing stays gathered after the step"
    if engine is None:
        return {name: value.detach().clone() for name, value in model.named_parameters()}
    assert engine.steps_skipped == 0
    return final_state(model, engine)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect the lines that zeroshard logs meanwhile."""
    lines: list[str] = []
    logger, handler = logging.getLogger("zeroshard"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def average_gradients(model: nn.Module) -> None:
    """Average the gradients of `model` over the ranks by hand, as DDP does."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def equal(ours: State, expected: State) -> bool:
    """Return whether both have the same names and the same values."""
    return not differences(ours, expected)


def plainly_trained(
    model: nn.Module,
    passes: nn.Module,
    steps: int,
    leaves: int,
    loss_of: Callable[[nn.Module, int, int], torch.Tensor],
    take: Callable[[], None],
    *,
    clip: float | None = None,
    late: int | None = None,
) -> list[torch.Tensor]:
    """Return the weights of `model` after `steps` of torch alone: each `take` steps it by averages
    of the `leaves` that an engine of `passes`, a model like it, computes of `loss_of` (the module,
    step and leaf), clipped to `clip`; from step `late` on without the newest update. In one thread,
    as the ranks of tests compute.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    engine = zs.shard(passes, stage=0, leaves=leaves, units=[nn.Linear])
    pairs = [*zip(passes.parameters(), model.parameters(), strict=True)]
    for step in range(steps):
        for leaf in engine.leaves(step):
            engine.backward(loss_of(passes, step, leaf))
        step_plainly(engine, pairs, take, clip=clip, late=late is not None and step >= late)
    engine.close()
    torch.set_num_threads(threads)
    return [parameter.detach().clone() for parameter in model.parameters()]


def step_plainly(
    engine: zs.Engine,
    pairs: Sequence[tuple[nn.Parameter, nn.Parameter]],
    take: Callable[[], Any],
    *,
    clip: float | None = None,
    late: bool = False,
) -> float:
    """Let `take` step plain parameters by the gradients of those of `engine`, which keeps weights
    whole and has no optimizer; `pairs` are both (of a DTensor its part). Then both are alike, or
    the engine's as the plain ones were before. Return the norm, clipped to `clip`.
    """
    norm = 0.0 if clip is None else float(engine.clip_grad_norm_(clip))
    assert clip is None or norm > clip
    for mine, its in pairs:
        grad = engine.full_grad(mine) if mine.requires_grad else None
        if grad is not None and isinstance(mine, DTensor):
            grad = distribute_tensor(grad, mine.device_mesh, mine.placements)
        its.grad = None if grad is None else torch.empty_like(its).copy_(local_of(grad))
    engine.reset()
    before = [its.detach().clone() for _, its in pairs]
    take()
    with torch.no_grad():
        for (mine, its), old in zip(pairs, before, strict=True):
            value: torch.Tensor = old if late else its
            if isinstance(mine, DTensor):  # evenly cut
                value = DTensor.from_local(value, mine.device_mesh, mine.placements)
            mine.copy_(value)
    return norm


def muon_and_adamw(named: Iterable[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """Return Muon of the matrices, but for tables and DTensors, and AdamW of the rest."""
    matrices, rest = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in named:
        is_table = "embed" in name or "head" in name
        is_matrix = parameter.ndim == 2 and not is_table and not is_dtensor(parameter)
        (matrices if is_matrix else rest).append(parameter)
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]
