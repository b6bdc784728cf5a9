"""``zs.detect_anomaly(engine)``: the module that made the first number that is not finite."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.features.test_experts import _batch, _mesh, _sharded
from tests.support.experts import Stacked
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import ROWS, Block, Net, batch, equal, two_groups
from zeroshard.errors import StateError


class _Odd(nn.Module):
    """Divides by zero on one rank, in the forward or on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.breaks = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
            if self.breaks == "root":  # its derivative at 0 is infinite
                hidden = (hidden * 0).sqrt()
        if self.breaks == "zero":
            hidden = (hidden * 0) / (hidden * 0)
        return hidden.square().mean()


def _found(rank: int, world: int, row: str) -> list[str]:
    out = []

    def step(breaks: str) -> None:
        model.breaks = breaks if rank == 1 else ""
        with zs.detect_anomaly(engine):
            engine.backward(model(torch.randn(2, 8)))

    torch.manual_seed(0)
    model = _Odd()
    engine = zs.shard(model, two_groups(model), policy=row)
    step("")
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    for breaks in ("zero", "root"):
        with pytest.raises(StateError) as caught:
            step(breaks)
        out.append(str(caught.value))
        engine.optimizer.zero_grad()
        engine.reset()
    if row == "zero3":
        with torch.no_grad(), engine.gathered(writeback=True):
            model.blocks[1].bias[3] = float("nan")
        with pytest.raises(StateError) as caught:
            step("")
        out.append(str(caught.value))
    engine.reset()
    engine.close()
    return out


@pytest.mark.parametrize("row", ROWS)
def test_the_module_that_made_the_first_nan_is_named_on_every_rank(row: str) -> None:
    one, other = run_ranks(2, _found, row)
    assert one == other
    assert (
        "on rank 1, the output of module '(the model itself)' (_Odd) has nan; its inputs" in one[0]
    )
    assert (
        "the gradient of the output of module 'blocks.2' (Linear) is the first with nan" in one[1]
    )
    if row == "zero3":
        assert (
            "on rank 0, the output of module 'blocks.1' (Linear) has nan; its parameter 'bias'"
            in (one[2])
        )


@on_ranks(2)
def test_a_module_that_was_not_called_is_not_gathered_to_be_looked_at(rank: int) -> None:
    torch.manual_seed(0)
    model = _Odd()
    model.spare = nn.Linear(8, 8)  # whose weights rest, and come by a gather of both ranks
    comm = zs.Comm(transport="gloo")
    engine = zs.shard(model, two_groups(model), stage=3, comm=comm)
    model.breaks = "zero" if rank == 1 else ""
    with pytest.raises(StateError) as caught, zs.detect_anomaly(engine):
        engine.backward(model(torch.randn(2, 8)))
    engine.reset()
    engine.close()
    told = str(caught.value)
    assert "'(the model itself)' (_Odd) has nan; its inputs and its own parameters are" in told


# ------------------------------------------------------------------------------- beside the others


class _Block(Block):
    breaks = False  # on the way back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(self.norm(x))
        if self.breaks:  # the root's derivative at 0 is infinite
            hidden = hidden + (0 * hidden).sqrt()
        return x + self.down(functional.gelu(hidden))


class _Breaking(Net):
    """A net in which a block's output becomes NaN in the forwards that `breaks` has, by number."""

    def __init__(self) -> None:
        super().__init__(layers=0)
        self.blocks.extend(_Block(19) for _ in range(3))
        self.breaks: dict[int, int] = {}
        self._count = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        number = self.breaks.get(self._count)
        self._count += 1
        h = self.embed(x)
        for index, block in enumerate(self.blocks):
            h = block(h) * (torch.nan if index == number else 1.0)
        return functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


@dataclass(frozen=True)
class _Way:
    """What a step is beside which it is looked for anomalies."""

    options: dict[str, Any] = field(default_factory=dict)
    tier: str = ""  # engine.accumulate(tier=)
    micro_batches: int = 1
    prepare: Callable[[Any], object] = lambda model: None
    broken: str = "blocks.1.up' (Linear) has nan; its parameter 'bias' has nan"


def _compile(model: Any) -> None:
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")


def _recompute(model: Any, *, use_reentrant: bool = False) -> None:
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=use_reentrant)


_ALL = ("weight", "grad", "optimizer")
WAYS = {
    "host": _Way({"offload": dict.fromkeys(_ALL, "host")}),
    "disk": _Way({"offload": dict.fromkeys(_ALL, "disk")}),
    "delayed": _Way({"offload": {"optimizer": "host", "delayed_update": 1}}),
    "leaves": _Way({"leaves": 4}, micro_batches=4),
    "leaves at once": _Way({"leaves": 4}, tier="device", micro_batches=4),
    "no_sync": _Way(micro_batches=3),
    "accumulate": _Way(tier="device", micro_batches=3),
    "accumulate on the host": _Way(tier="host", micro_batches=3),
    "budget": _Way({"accumulation_budget": 40_000}, micro_batches=3),
    "recomputed": _Way(prepare=_recompute),
    "reentrant": _Way(prepare=partial(_recompute, use_reentrant=True)),
    "checkpoints on the host": _Way(prepare=partial(zs.nn.checkpoint_blocks, tier="host")),
    "compiled": _Way(
        prepare=_compile, broken="blocks.1' (_Block) has nan; its parameter 'up.bias' has nan"
    ),
}


class _Beside:
    """A model trained in a way."""

    def __init__(self, way: _Way, rank: int, folder: Path) -> None:
        torch.manual_seed(0)
        self.way, self.rank, self.model = way, rank, _Breaking()
        self.optimizer = two_groups(self.model)
        way.prepare(self.model)
        options = dict(way.options)
        if "disk" in options.get("offload", {}).values():
            options["offload"] = options["offload"] | {"disk_path": str(folder)}
        comm = zs.Comm(transport="gloo")  # whose gathers need both ranks
        self.engine = zs.shard(
            self.model, self.optimizer, stage=3, precision="bf16", comm=comm,
            **options,
        )  # fmt: skip

    def loss(self, number: int) -> torch.Tensor:
        return self.model(*batch(self.rank, number))

    def backward(self, step: int) -> None:
        way, engine = self.way, self.engine
        numbers: Any = range(step * way.micro_batches, (step + 1) * way.micro_batches)
        if "leaves" in way.options:
            numbers = engine.leaves(step)
        if way.tier:
            engine.accumulate(numbers, self.loss, tier=way.tier)
            return
        for number in numbers:
            holds = way.micro_batches == 3 and number % 3 < 2
            with engine.no_sync() if holds else nullcontext():
                engine.backward(self.loss(number))

    def told(self, breaks: dict[int, int], *, back: bool = False) -> str:
        """Return what is raised where this rank breaks so."""
        self.model.breaks, self.model._count = breaks, 0
        self.model.blocks[1].breaks = back
        with pytest.raises(StateError) as caught, zs.detect_anomaly(self.engine):
            self.backward(9)
        self.model.breaks, self.model.blocks[1].breaks = {}, False
        self.engine.reset()
        self.optimizer.zero_grad()
        return str(caught.value)


def _beside(rank: int, world: int, name: str, folder: Path) -> list[str]:
    """Train with and without looking; return what is told of anomalies of a forward, a parameter
    and a backward.
    """
    states, way = [], WAYS[name]
    for looks in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        run = _Beside(way, rank, folder)
        for step in range(3):
            with zs.detect_anomaly(run.engine) if looks and step != 1 else nullcontext():
                run.backward(step)
                run.optimizer.step()
            run.optimizer.zero_grad()
        states.append(run.engine.full_state_dict(rank0_only=False))
        if not looks:
            run.engine.close()
    assert equal(*states)
    if way.prepare is _compile:
        counted = torch._dynamo.utils.counters
        assert not counted["graph_break"] and counted["frames"]["total"] <= 6, counted
    later = {1: 0} if way.micro_batches > 1 else {}
    out = [run.told({0: 1} | later if rank == 1 else {})]
    for number in (torch.nan, 0.0):
        with torch.no_grad(), run.engine.gathered(writeback=True):
            run.model.blocks[1].up.bias[3] = number
        out.append(run.told({}, back=number == 0 and rank == 1))
    run.engine.close()
    torch._dynamo.reset()
    return out


@pytest.mark.parametrize("name", WAYS)
def test_looking_changes_no_bit_and_finds_the_module_beside(name: str, tmp_path: Path) -> None:
    one, other = run_ranks(2, _beside, name, tmp_path, timeout=100)
    assert one == other
    forward, parameter, backward = one
    # in engine.accumulate() all micro-batches run a block before the next
    first = "blocks.2" if name == "compiled" else f"blocks.{1 if WAYS[name].tier else 2}.norm"
    assert f"on rank 1, the output of module {first!r}" in forward, forward
    assert "which no module of the model has returned" in forward
    before = "blocks." if name == "compiled" else "blocks.1.up'"
    assert "on rank 1, " in backward and f"of the output of module '{before}" in backward, backward
    assert WAYS[name].broken in parameter


def _experts(rank: int, world: int) -> str:
    """The experts of the second rank give NaN, which goes to the first by all-to-all."""
    states = []
    for looks in (False, True):
        model, optimizer, engine = _sharded(Stacked, _mesh(2, world), "zero3")
        for step in range(2):
            with zs.detect_anomaly(engine) if looks else nullcontext():
                engine.backward(model(*_batch(rank, step)))
                optimizer.step()
            optimizer.zero_grad()
        states.append(engine.full_state_dict(rank0_only=False))
        if not looks:
            engine.close()
    assert equal(*states)
    up = model.layers[0].experts.up
    with torch.no_grad(), engine.gathered(up, writeback=True):
        up.mul_(torch.nan if rank == 1 else 1.0)
    with pytest.raises(StateError) as caught, zs.detect_anomaly(engine):
        engine.backward(model(*_batch(rank, 0)))
    engine.reset()
    engine.close()
    return str(caught.value)


def test_of_ranks_that_pass_a_nan_on_the_one_that_made_it_is_told() -> None:
    told = set(run_ranks(2, _experts))
    assert told == {
        "zs.detect_anomaly(): on rank 1, the output of module 'layers.0.experts' (Stacked) has nan;"
        " its parameter 'up' has nan"
    }


def test_an_error_inside_carries_what_was_found_and_hooks_are_gone() -> None:
    model = _Odd()
    engine = zs.shard(model, two_groups(model))
    hooks = [len(module._forward_hooks) for module in model.modules()]
    model.breaks = "zero"
    with pytest.raises(ValueError, match="mine") as caught, zs.detect_anomaly(engine):
        model(torch.randn(2, 8))
        raise ValueError("mine")
    assert "has nan" in caught.value.__notes__[0]
    assert [len(module._forward_hooks) for module in model.modules()] == hooks
    engine.close()
    with pytest.raises(StateError, match="closed"), zs.detect_anomaly(engine):
        logging.error("not reached")


def test_infinity_in_a_mask_is_no_anomaly() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.ReLU()
            self.up = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = self.mask(torch.full((2, 8), float("inf")))
            return self.up(x).masked_fill(mask > 1e9, 0).square().mean() + self.up(x).sum()

    model = Masked()
    engine = zs.shard(model, two_groups(model))
    with zs.detect_anomaly(engine):
        model(torch.randn(2, 8)).backward()
    engine.close()
