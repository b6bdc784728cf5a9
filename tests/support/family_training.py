"""Train one family under torch DDP or at a stage: the loop that the tests and
``scripts/models_table.py`` share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard as zs
from tests.support.families import FAMILIES, TINY, Family, Size
from tests.support.training import Run

STAGES = (1, 2, 3)
GENERATIONS = ("plain", "stage 3, gathered()", "stage 3")
# their running statistics are fp32
KEEP: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._BatchNorm,)


class InBf16(nn.Module):
    """Computes in bf16 with fp32 parameters, but for modules of the classes `keep`: what
    precision="bf16" is, for DDP, whose sums are then fp32 too.
    """

    def __init__(self, model: nn.Module, keep: tuple[type[nn.Module], ...] = KEEP) -> None:
        super().__init__()
        self.model = model
        self.keep = keep

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parameters = narrowed(self.model, dict(self.model.named_parameters()), self.keep)
        arguments = {name: _narrow(value) for name, value in kwargs.items()}
        return torch.func.functional_call(
            self.model,
            parameters,
            tuple(_narrow(value) for value in args),
            arguments,
            tie_weights=True,
        )


def narrowed(
    model: nn.Module, values: dict[str, torch.Tensor], keep: tuple[type[nn.Module], ...] = KEEP
) -> dict[str, torch.Tensor]:
    """Return `values` (by the names of the model's parameters and buffers) in bf16, but for
    those of modules of the classes `keep`.
    """
    kept = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, keep)
        for name in (*module._parameters, *module._buffers)
    }
    return {name: value if name in kept else _narrow(value) for name, value in values.items()}


def _narrow(value: Any) -> Any:
    return (
        value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
    )


class Player:
    """One model of a family: what is called, its optimizer, and where its weights are."""

    def __init__(
        self, model: nn.Module, family: Family, stage: int | None, *, trained: bool, **options: Any
    ) -> None:
        self.module = self.inner = model
        self.engine: zs.Engine | None = None
        # else the model is taken as it is
        alike = len({p.dtype for p in model.parameters() if p.is_floating_point()}) == 1
        self.rounded = family.precision == "bf16" and trained and alike
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3) if trained else None
        if stage is not None:
            if trained:
                options = {
                    "precision": family.precision,
                    "broadcast_buffers": family.buffers,
                } | options
            self.engine = zs.shard(model, self.optimizer, stage=stage if trained else 3, **options)
        elif trained:
            self.module = DistributedDataParallel(
                InBf16(model) if self.rounded else model,
                find_unused_parameters=family.unused,
                broadcast_buffers=family.buffers,
            )

    def learn(self, loss: torch.Tensor) -> float:
        """Take one step."""
        assert self.optimizer is not None
        self.optimizer.zero_grad()  # a GAN's generator leaves gradients in its critic
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def rest(self) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def state(self) -> dict[str, torch.Tensor]:
        """Return the whole state_dict, which outlives the training."""
        if self.engine is not None:
            return self.engine.full_state_dict(rank0_only=False)
        state = {name: value.clone() for name, value in self.inner.state_dict().items()}
        # full_state_dict() gives weights, not masters: those of DDP are rounded as a step publishes
        # them
        if self.rounded:
            state = narrowed(self.inner, state)
        return state


class Contender:
    """The models of one family on this rank, trained by torch DDP (`stage` None) or sharded; a
    frozen model beside them rests at stage 3.
    """

    def __init__(
        self, family: Family, stage: int | None, rank: int, *, size: Size = TINY, **options: Any
    ) -> None:
        self.family, self.stage, self.rank, self.size = family, stage, rank, size
        self.players = [Player(family.model(size), family, stage, trained=True, **options)]
        beside = family.partner(size)
        if beside is not None:
            self.players.append(
                Player(beside, family, stage, trained=family.beside_loss is not None, **options)
            )
        self.losses: list[float] = []

    def step(self) -> None:
        """Train every model on the next batch."""
        batch = self.family.data(self.size, self.rank, len(self.losses))
        first, *others = self.players
        loss = first.learn(
            self.family.loss(first.module, batch, *(other.module for other in others))
        )
        if self.family.beside_loss is not None:
            loss += others[0].learn(self.family.beside_loss(others[0].module, batch, first.module))
        self.losses.append(loss)

    def evaluate(self) -> None:
        """Note the losses on the next batch in evaluation mode, where modules take other paths
        than in training; not the fused kernels of nn.TransformerEncoderLayer and
        nn.MultiheadAttention, which torch takes for modules without hooks alone.
        """
        batch = self.family.data(self.size, self.rank, len(self.losses))
        modules = [player.module for player in self.players]
        for player in self.players:
            player.module.eval()
        with torch.no_grad(), _without_fused_layers():
            self.losses.append(self.family.loss(modules[0], batch, *modules[1:]).item())
            if self.family.beside_loss is not None:
                self.losses.append(self.family.beside_loss(modules[1], batch, modules[0]).item())
        for player in self.players:
            player.module.train(player.optimizer is not None)

    def at_rest_bytes(self) -> int:
        """Bytes of this rank, gradients cleared: what `engine.memory()` says, or what DDP holds
        (weights and two moments).
        """
        total = 0
        for player in self.players:
            player.rest()
            if player.engine is not None:
                total += player.engine.memory().total
                continue
            tensors = list(player.inner.parameters())
            for state in player.optimizer.state.values() if player.optimizer else ():
                tensors += [value for value in state.values() if value.ndim]
            total += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return total

    def finish(self) -> Run:
        """Return losses and final weights, and give plain modules back."""
        state = {
            f"{index}.{name}": value
            for index, player in enumerate(self.players)
            for name, value in player.state().items()
        }
        for player in self.players:
            if player.engine is not None:
                player.engine.close()
        return Run(self.losses, state)


def train(
    rank: int, family: Family, stage: int | None, steps: int, *, size: Size = TINY, **options: Any
) -> Run:
    """Train `family` for `steps` on this rank."""
    contender = Contender(family, stage, rank, size=size, **options)
    for _ in range(steps):
        contender.step()
    return contender.finish()


def apart(run: Run, reference: Run) -> float:
    """Return the largest difference between two runs' losses and weights, in fp32; 0.0 says
    equal bits.
    """
    assert run.state.keys() == reference.state.keys(), run.state.keys() ^ reference.state.keys()
    if not run.differs_from(reference):
        return 0.0
    pairs = [(value.double(), reference.state[name].double()) for name, value in run.state.items()]
    pairs.append((torch.tensor(run.losses), torch.tensor(reference.losses)))
    return max(float((a - b).abs().max()) for a, b in pairs)


@contextmanager
def _without_fused_layers() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def compare(
    rank: int,
    world: int,
    name: str,
    steps: int,
    stages: tuple[int, ...] = STAGES,
    prepare: Callable[[nn.Module], Any] | None = None,
    transport: str = "auto",
    precision: str | None = None,
) -> dict[int, list[str]]:
    """Train a family under DDP and at every stage, evaluating now and then; return per stage
    what differs.

    `prepare` is done to the trained model first.
    """
    family = replace(FAMILIES[name], precision=precision or FAMILIES[name].precision)
    runs: dict[int | None, Run] = {}
    for stage in (None, *stages):
        options = {} if stage is None else {"strict": True, "comm": zs.Comm(transport=transport)}
        contender = Contender(family, stage, rank, **options)
        if prepare is not None:
            prepare(contender.players[0].inner)
        for step in range(steps):
            contender.step()
            if step % 3 == 1:
                contender.evaluate()
        runs[stage] = contender.finish()
    reference = runs.pop(None)
    assert all(loss == loss for loss in reference.losses), (
        f"the reference is NaN: {reference.losses}"
    )
    for run in runs.values():
        assert run.state.keys() == reference.state.keys(), run.state.keys() ^ reference.state.keys()
    return {stage: run.differs_from(reference) for stage, run in runs.items() if stage is not None}


@dataclass
class Measured:
    """What one rank saw of one family: per contender ("torch-ddp", "1", ...) the seconds of each
    turn, bytes, and the difference to DDP.
    """

    num_parameters: int
    turn_s: dict[str, list[float]]
    at_rest_bytes: dict[str, int]
    difference: dict[str, float]


def measure(rank: int, world: int, name: str, size: Size, rounds: int, steps: int) -> Measured:
    """Train a family under DDP and at every stage in turn (A B C D A B C D ...), a turn being
    `steps` steps between two barriers.

    Two rounds before the first are not counted. All have taken the same steps on the same data in
    the end, and are compared.
    """
    family = FAMILIES[name]
    contenders = {
        "torch-ddp" if stage is None else str(stage): Contender(family, stage, rank, size=size)
        for stage in (None, *STAGES)
    }
    num_parameters = sum(
        p.numel() for player in contenders["torch-ddp"].players for p in player.inner.parameters()
    )
    turn_s: dict[str, list[float]] = {kind: [] for kind in contenders}
    for turn in range(rounds + 2):
        for kind, contender in contenders.items():
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                contender.step()
            dist.barrier()
            if turn >= 2:
                turn_s[kind].append(time.perf_counter() - begin)
    at_rest_bytes = {kind: contender.at_rest_bytes() for kind, contender in contenders.items()}
    runs = {kind: contender.finish() for kind, contender in contenders.items()}
    difference = {kind: apart(run, runs["torch-ddp"]) for kind, run in runs.items()}
    return Measured(num_parameters, turn_s, at_rest_bytes, difference)


def measure_generation(
    rank: int, world: int, tokens: int, rounds: int, size: Size
) -> dict[str, list[float]]:
    """Return the seconds of every turn, per kind; two rounds warm up."""
    torch.manual_seed(0)
    models: dict[str, Any] = {kind: FAMILIES["Llama"].model(size).eval() for kind in GENERATIONS}
    engines = {kind: zs.shard(models[kind], stage=3) for kind in GENERATIONS if kind != "plain"}
    prompt = torch.arange(1, 9)[None]

    def turn(kind: str) -> float:
        dist.barrier()
        start = time.perf_counter()
        models[kind].generate(
            prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
        )
        return time.perf_counter() - start

    seconds: dict[str, list[float]] = {kind: [] for kind in GENERATIONS}
    with engines["stage 3, gathered()"].gathered():
        for number in range(rounds + 2):
            for kind in GENERATIONS:
                took = turn(kind)
                if number >= 2:
                    seconds[kind].append(took)
    for engine in engines.values():
        engine.close()
    return seconds
