"""The cases that bend every engine of this kind, each against torch's DDP (or data parallel
training by hand) with equal bits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.support import inside
from tests.support.cases import (
    WIDTH,
    Backward,
    Case,
    Chain,
    compare_case,
    lora,
    seeded,
    simple,
    train_case,
)
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import (
    ROWS,
    TRANSPORTS,
    Block,
    Net,
    batch,
    make_model,
    make_sharded,
    take_steps,
    two_groups,
)
from zeroshard.errors import StateError

# --------------------------------------------------------------------------------------- the models


class Tied(Net):
    def __init__(self) -> None:
        super().__init__(WIDTH, 4)
        self.head.weight = self.embed.weight


class Borrowing(Net):
    """Uses the embedding's weight outside its module, as a head; a unit that the whole model
    spans has it there.
    """

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        logits = nn.functional.linear(self.norm(h), self.embed.weight) + self.head(h)
        assert y is not None
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


class Checkpointed(Net):
    """Blocks recomputed inside backward: one at a time, two together (`span`), or within each
    other (`nested`).

    `ahead`: a weight of one is used before, outside of its module and of the checkpoint.
    """

    def __init__(
        self, *, reentrant: bool, span: int = 1, nested: bool = False, ahead: bool = False
    ) -> None:
        super().__init__(WIDTH, 4)
        self.reentrant, self.span, self.nested, self.ahead = reentrant, span, nested, ahead

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embed(x)
        if self.ahead:
            weight = self.blocks[1].up.weight
            h = nn.functional.linear(nn.functional.linear(h, weight), weight.t())
        for start in range(0, len(self.blocks), self.span):
            h = checkpoint(self._run, h, start, use_reentrant=self.reentrant)
        logits = self.head(self.norm(h))
        assert y is not None
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    def _run(self, h: torch.Tensor, start: int) -> torch.Tensor:
        for block in self.blocks[start : start + self.span]:
            h = checkpoint(block, h, use_reentrant=self.reentrant) if self.nested else block(h)
        return h


class InnerCheckpoint(Block):
    """Only a part of the block is recomputed."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(
            lambda t: nn.functional.gelu(self.up(self.norm(t))), x, use_reentrant=self.reentrant
        )
        return x + self.down(hidden)


class ReentrantInner(InnerCheckpoint):
    reentrant = True


class Fork(nn.Module):
    """A block of which a rank runs one half, the other, or both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(width, width + 2), nn.Linear(width + 2, width))
        self.right = nn.Sequential(nn.Linear(width, width + 3), nn.Linear(width + 3, width))

    def forward(self, x: torch.Tensor, halves: str) -> torch.Tensor:
        if "l" in halves:
            x = x + self.left(x)
        if "r" in halves:
            x = x + self.right(x)
        return x


class Routed(Net):
    """Runs the blocks that it is told to, in that order; `spare` runs where it is told to."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4)
        self.spare = Block(WIDTH)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, route: list[int], spare: bool = False
    ) -> torch.Tensor:  # type: ignore[override]
        h = self.embed(x)
        for index in route:
            h = self.blocks[index](h)
        if spare:
            h = self.spare(h)
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


@dataclass
class Output:
    hidden: torch.Tensor
    extra: torch.Tensor | None = None


class Wrapping(Block):
    """Returns its result in a container, with views and its own input in it; `kind` is set per
    block.
    """

    kind = "tuple"

    def forward(self, value: Any) -> Any:  # type: ignore[override]
        x = _hidden(value)
        h = super().forward(x)
        if self.kind == "dict":
            return {"h": h.transpose(0, 1), "x": x, "none": None, "deep": [(h,)]}
        if self.kind == "dataclass":
            return Output(h, x)
        if self.kind == "tuple":
            return (h, h, x, "text", 3)
        if self.kind == "chunks":
            return list(h.chunk(2, dim=0))
        if self.kind == "input":
            return x
        return x.view(-1, WIDTH)  # a view of its input


def _hidden(value: Any) -> torch.Tensor:
    if isinstance(value, dict):
        return value["h"].transpose(0, 1) + 0.5 * value["deep"][0][0]
    if isinstance(value, Output):
        return value.hidden + value.extra
    if isinstance(value, tuple):
        return value[0] + 0.25 * value[1] - value[2]
    if isinstance(value, list):
        return torch.cat(value)
    return value.view(3, -1, WIDTH) if value.dim() == 2 else value


class Containers(Net):
    def __init__(self) -> None:
        super().__init__(WIDTH, 1)
        self.blocks = nn.ModuleList(Wrapping(WIDTH) for _ in range(6))
        for block, kind in zip(
            self.blocks, ["dict", "dataclass", "tuple", "chunks", "input", "view"], strict=True
        ):
            block.kind = kind

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h: Any = self.embed(x)
        for block in self.blocks:
            h = block(h)
        assert y is not None
        return nn.functional.cross_entropy(
            self.head(self.norm(_hidden(h))).flatten(0, 1), y.flatten()
        )


class InPlace(Block):
    """Writes into its input's successor, its output and, through a view, part of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu_(self.up(self.norm(x)))
        out = self.down(h)
        out += x
        out[:, 0].mul_(0.5)
        return out


class Convolutions(nn.Module):
    """Convolutions whose weights lie in channels_last order, and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(5, 5, 3, padding=1) for _ in range(3))
        self.to(memory_format=torch.channels_last)
        self.mix = nn.Linear(5, 7)
        self.mix.weight = nn.Parameter(torch.randn(5, 7).t())
        self.last = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        for conv in self.convs:
            x = torch.relu(conv(x))
        return self.last(self.mix(x.mean((2, 3)))).square().mean()


# --------------------------------------------------------------------------------- what a step does


def _two_forwards(
    module: nn.Module, backward: Backward, rank: int, step: int
) -> list[torch.Tensor]:
    first, second = module(*batch(rank, 2 * step)), module(*batch(rank, 2 * step + 1))
    backward(first + 0.5 * second)
    return [first.detach(), second.detach()]


def _two_losses(module: nn.Module, backward: Backward, rank: int, step: int) -> list[torch.Tensor]:
    losses = [module(*batch(rank, 2 * step + i)) for i in range(2)]
    for loss in losses if step % 2 else reversed(losses):
        backward(loss)
    return [loss.detach() for loss in losses]


def _retained(module: nn.Module, backward: Backward, rank: int, step: int) -> list[torch.Tensor]:
    loss = module(*batch(rank, step))
    backward(loss, retain_graph=True)
    backward(loss)
    return [loss.detach()]


def _halves(module: nn.Module, backward: Backward, rank: int, step: int) -> list[torch.Tensor]:
    tell = [("l", "r", "lr")[(rank + step + index) % 3] for index in range(3)]
    loss = module(*batch(rank, step), tell)
    backward(loss)
    return [loss.detach()]


def _routes_by_rank(
    module: nn.Module, backward: Backward, rank: int, step: int
) -> list[torch.Tensor]:
    route = [[0, 1, 2, 3], [0, 3], [3, 1], []][(step + 2 * rank) % 4]
    loss = module(*batch(rank, step), route, rank == step % 2)
    backward(loss)
    return [loss.detach()]


def _routes_by_step(
    module: nn.Module, backward: Backward, rank: int, step: int
) -> list[torch.Tensor]:
    route = [[0, 1, 2, 3], [3, 2, 1, 0], [1, 1, 2], [2, 0, 2, 0, 3], [0], [0, 1, 2, 3]][step]
    with torch.no_grad():
        module.eval()
        before = module(*batch(9, step), [2, 1])
        module.train()
    loss = module(*batch(rank, step), route, step % 2 == 0)
    backward(loss)
    return [before, loss.detach()]


def _never(module: nn.Module, backward: Backward, rank: int, step: int) -> list[torch.Tensor]:
    loss = module(*batch(rank, step), [0, 1, 2, 3])
    backward(loss)
    return [loss.detach()]


def _no_longer(module: nn.Module, backward: Backward, rank: int, step: int) -> list[torch.Tensor]:
    loss = module(*batch(rank, step), [0, 1, 2, 3], step < 2)
    backward(loss)
    return [loss.detach()]


def _evaluated(module: nn.Module, backward: Backward, rank: int, step: int) -> list[torch.Tensor]:
    loss = module(*batch(rank, step))
    module.eval()
    with torch.inference_mode() if step % 2 else torch.no_grad():
        between = module(*batch(rank, step + 50)).clone()
    module.train()
    backward(loss)
    with torch.no_grad():
        after = module(*batch(rank, step + 60)).clone()
    return [loss.detach(), between, after]


def _images(module: nn.Module, backward: Backward, rank: int, step: int) -> list[torch.Tensor]:
    loss = module(
        torch.randn(2, 5, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank))
    )
    backward(loss)
    return [loss.detach()]


_UNUSED = {"find_unused_parameters": True}

CASES = {
    "tied embedding and head": Case(seeded(Tied), simple),
    "tied, two forwards": Case(seeded(Tied), _two_forwards),
    "a weight used outside its module": Case(
        seeded(Borrowing), simple, options={"units": [Block, ""]}
    ),
    "checkpoint": Case(seeded(Checkpointed, reentrant=False), simple),
    "checkpoint reentrant": Case(seeded(Checkpointed, reentrant=True), simple),
    "checkpoint over two blocks": Case(seeded(Checkpointed, reentrant=False, span=2), simple),
    "checkpoint reentrant over two blocks": Case(
        seeded(Checkpointed, reentrant=True, span=2), simple
    ),
    "checkpoint nested": Case(seeded(Checkpointed, reentrant=False, span=2, nested=True), simple),
    "checkpoint reentrant nested": Case(
        seeded(Checkpointed, reentrant=True, span=2, nested=True), simple, ddp=None
    ),
    "a weight used outside and reentrant": Case(
        seeded(Checkpointed, reentrant=True, ahead=True), simple, ddp=None
    ),
    "checkpoint inside a block": Case(seeded(Chain, InnerCheckpoint), simple),
    "checkpoint reentrant inside a block": Case(seeded(Chain, ReentrantInner), simple),
    "checkpoint, two losses": Case(
        seeded(Checkpointed, reentrant=False, span=2), _two_losses, ddp=None
    ),
    "two forwards, one backward": Case(make_model, _two_forwards),
    "two losses, two backwards": Case(make_model, _two_losses, ddp=None),
    "retained graph": Case(make_model, _retained, ddp=None),
    "a unit that runs in part": Case(seeded(Chain, Fork), _halves, ddp=_UNUSED),
    "units that run on some ranks": Case(seeded(Routed), _routes_by_rank, ddp=_UNUSED, gloo=False),
    "unused on all ranks": Case(seeded(Routed), _never, ddp=_UNUSED),
    "no longer used": Case(seeded(Routed), _no_longer, ddp=_UNUSED),
    "order changes between steps and in eval": Case(seeded(Routed), _routes_by_step, ddp=None),
    "evaluation between and inside steps": Case(make_model, _evaluated),
    "containers and views": Case(seeded(Containers), simple, ddp=_UNUSED),
    "in-place edits of outputs": Case(seeded(Chain, InPlace), simple),
    "frozen base, LoRA adapters": Case(seeded(lora), simple),
    "memory formats": Case(seeded(Convolutions), _images),
}


@pytest.mark.parametrize(
    "rows",
    [("zero1", "zero3"), pytest.param(ROWS, marks=pytest.mark.slow)],
    ids=["two rows", "every row"],
)
@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_hard_case_trains_to_ddps_bits(rank: int, name: str, rows: tuple[str, ...]) -> None:

    differences = compare_case(rank, CASES[name], rows)
    assert not any(differences.values()), differences


def _routed(rank: int, step: int) -> tuple[Any, ...]:
    return *batch(rank, step), [0, 1, 2, 3]


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_what_was_gathered_ahead_of_a_forward_that_ended_early_is_released(
    rank: int, transport: str
) -> None:
    model = seeded(Routed)()
    optimizer = two_groups(model)
    comm = zs.Comm(transport=transport, node_size=None)  # type: ignore[arg-type]
    engine = zs.shard(model, optimizer, comm=comm)
    take_steps(rank, 2, model, optimizer, data=_routed)
    with torch.no_grad():
        model(*batch(rank, 2), [0])  # while the next block is on its way
    gathered = inside.gathered(engine)
    engine.close()
    assert gathered == []


@on_ranks(2)
def test_what_is_no_longer_used_is_not_stepped_on_another_tier_either(
    rank: int, tmp_path: Path
) -> None:
    """Moments and weight decay would go on moving a block that is no longer used, if a step on
    another tier took it along.
    """
    case = CASES["no longer used"]
    reference = train_case(rank, "reference", case)
    offloads = {
        "host": zs.Offload(optimizer="host"),
        "disk": zs.Offload(optimizer="disk", disk_path=str(tmp_path)),
    }
    differences = {
        tier: train_case(rank, "zero2", case, units=[""], offload=offload).differs_from(reference)
        for tier, offload in offloads.items()
    }
    assert not any(differences.values()), differences


# ---------------------------------------------------------------------- parameters without gradient


def _unused(rank: int, world: int, row: str) -> None:
    model = seeded(Routed)()
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, policy=row)
    spare = engine.full_state_dict(rank0_only=False)["spare.up.weight"]
    for step in range(3):
        model(*batch(rank, step), [0, 1]).backward()
        assert model.spare.up.weight.grad is None
        assert engine.full_grad(model.spare.up.weight) is None
        assert engine.full_grad(model.blocks[0].up.weight) is not None
        optimizer.step()
        optimizer.zero_grad()
    names = {piece.name for piece in inside.param_shards(engine) if piece.tensor in optimizer.state}
    assert not any(name.startswith(("spare", "blocks.2", "blocks.3")) for name in names), names
    assert torch.equal(engine.full_state_dict(rank0_only=False)["spare.up.weight"], spare)
    engine.close()


def test_a_parameter_that_no_rank_uses_keeps_value_and_state_and_has_no_gradient() -> None:
    for row in ROWS:
        run_ranks(2, _unused, row)


@on_ranks(2)
def test_a_unit_whose_gradients_come_at_different_times_on_different_ranks(rank: int) -> None:
    """One block runs twice: a rank uses one half each time, the other both at once."""

    def run(module: nn.Module, backward: Backward, rank: int, step: int) -> list[torch.Tensor]:
        x, y = batch(rank, step)
        tells = ["l", "r"] if rank == step % 2 else ["lr", "lr"]
        loss = module(x, y, tells)
        backward(loss)
        return [loss.detach()]

    class Twice(Chain):
        def __init__(self) -> None:
            super().__init__(Fork, 1)
            self.blocks.append(self.blocks[0])

    case = Case(seeded(Twice), run, ddp=None)
    reference = train_case(rank, "reference", case)
    differences = {row: train_case(rank, row, case).differs_from(reference) for row in ROWS}
    assert not any(differences.values()), differences


# ----------------------------------------------------------------------------- stale weights, races


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_backward_after_a_step_of_an_older_forward_is_an_error_in_every_row(
    rank: int, row: str
) -> None:
    model, optimizer, engine = make_sharded(row)
    losses = [model(*batch(rank, step)) for step in range(2)]
    losses[0].backward()
    optimizer.step()
    with pytest.raises(
        StateError,
        match=(
            r"backward through unit '\S+' of a forward that ran before the last optimizer.step\(\)"
        ),
    ):
        losses[1].backward()
    del losses
    engine.reset()
    take_steps(rank, 2, model, optimizer)
    loss = model(*batch(rank, 5))
    with engine.gathered(writeback=True):
        (
            model.head.weight.mul_(0.5)
            if not model.head.weight.requires_grad
            else model.head.weight.data.mul_(0.5)
        )
    with pytest.raises(StateError, match="backward through unit"):
        loss.backward()
    engine.reset()
    engine.close()


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_one_rank_evaluates_between_backward_and_step_with_delays(rank: int, row: str) -> None:
    """One rank evaluates between backward and step, slowly; the weights that it reads are those
    of before the step, all of them.
    """
    plain, model = make_model(), make_model()
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, policy=row)
    for block in model.blocks:
        block.register_forward_hook(
            lambda module, args, output: time.sleep(0.02) if not torch.is_grad_enabled() else None
        )
    for step in range(6):
        plain.load_state_dict(engine.full_state_dict(rank0_only=False))
        model(*batch(rank, step)).backward()
        if rank == step % 2:
            time.sleep(0.03 * (step % 3))
            with torch.no_grad():
                assert torch.equal(model(*batch(9, step)), plain(*batch(9, step))), step
        optimizer.step()
        optimizer.zero_grad()
        if rank != step % 2:
            time.sleep(0.02)
            with torch.no_grad():
                model(*batch(9, step))
    engine.close()


def test_parameters_with_gaps_and_with_shared_elements_train_as_dense_ones() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3)) for _ in range(2)]
    nn.init.constant_(models[0][1].bias, 0.25)
    models[1].load_state_dict(models[0].state_dict())
    models[1][1].bias = nn.Parameter(torch.tensor([0.25]).expand(3))
    models[1][1].weight = nn.Parameter(
        torch.stack([models[0][1].weight.detach()] * 2, dim=2)[:, :, 0]
    )
    assert models[1][1].weight.stride() == (10, 2) and models[1][1].bias.stride() == (0,)
    optimizers = [two_groups(model) for model in models]
    engine = zs.shard(models[1], optimizers[1])
    for _ in range(5):
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(2, 7)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    engine.close()
    for name, value in models[0].state_dict().items():
        torch.testing.assert_close(models[1].state_dict()[name], value)


LONG = "层" * 120  # 360 bytes in UTF-8


class LongNames(nn.Module):
    """A net below wrappers with long names."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict(
            {LONG: nn.ModuleDict({"_checkpoint_wrapped" * 20: make_model()})}
        )

    def forward(self, *args: torch.Tensor) -> Any:
        return self.inner[LONG]["_checkpoint_wrapped" * 20](*args)


@pytest.mark.parametrize("transport", ["gloo", "shared_memory", "nccl"])
@on_ranks(2)
def test_the_path_of_a_parameter_may_have_any_length(
    rank: int, transport: str, tmp_path: Path
) -> None:
    models, losses = [make_model(), LongNames()], []
    for model in models:
        tiers = {"offload": zs.Offload(optimizer="disk", disk_path=str(tmp_path))}
        engine = zs.shard(
            model,
            optimizer := two_groups(model),
            comm=zs.Comm(transport=transport),
            stage=3,
            **(tiers if model is models[1] else {}),
        )
        losses.append(take_steps(rank, 2, model, optimizer, engine))
        zs.save(tmp_path / type(model).__name__, engine, step=2)
        losses[-1] += take_steps(rank, [2], model, optimizer, engine)
        zs.load(tmp_path / type(model).__name__, engine)
        losses[-1] += take_steps(rank, [2], model, optimizer, engine)
        engine.close()
    assert losses[0] == losses[1] and losses[0][2] == losses[0][3]
