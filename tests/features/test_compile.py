"""``torch.compile`` of the blocks and of the whole model: the same numbers, as many graphs as plain
PyTorch has, however many blocks there are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, cast

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.exc import Unsupported

import zeroshard as zs
from tests.support import inside
from tests.support.harness import on_ranks
from tests.support.training import (
    batch,
    differences,
    final_state,
    make_model,
    make_sharded,
    take_steps,
    two_groups,
)

LAYERS = 12  # Dynamo gives a forward up that it has compiled eight times


BESIDE: dict[str, dict[str, Any]] = {
    "accumulate": {},
    "join": {},
    "offload": {"offload": zs.Offload(weight="host", grad="host", optimizer="host")},
}


def _loss(model: nn.Module, rank: int, number: int) -> torch.Tensor:
    loss: torch.Tensor = model(*batch(rank, number))
    return loss


@pytest.mark.parametrize("what", BESIDE)
@on_ranks(2, timeout=120)
def test_compiled_blocks_train_to_the_same_bits_beside(rank: int, what: str) -> None:
    """Train with and without compiled blocks in the loop that `what` says."""
    states = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model, optimizer, engine = make_sharded(model=make_model(layers=2), **BESIDE[what])
        for block in model.blocks if compiled else ():
            forward: Any = torch.compile(block.forward, backend="aot_eager")
            block.forward = forward
        if what == "accumulate":
            for step in range(2):
                engine.accumulate(range(2 * step, 2 * step + 2), partial(_loss, model, rank))
                optimizer.step()
                optimizer.zero_grad()
        else:
            with engine.join() if what == "join" else nullcontext():
                take_steps(rank, 2 + (rank if what == "join" else 0), model, optimizer)
        assert (torch._dynamo.utils.counters["frames"]["ok"] > 0) is compiled
        states.append(final_state(model, engine))
    torch._dynamo.reset()
    assert not (found := differences(*states)), found


@pytest.mark.parametrize(
    ("transport", "row"),
    [
        ("shared_memory", "zero3"),
        pytest.param("gloo", "zero3", marks=pytest.mark.slow),
        pytest.param("shared_memory", "zero1", marks=pytest.mark.slow),
    ],
)
@on_ranks(2, timeout=120)
def test_compiled_blocks_train_to_the_same_numbers_without_compiling_again(
    rank: int, transport: str, row: str
) -> None:
    losses: dict[bool, list[float]] = {}
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model, optimizer, engine = make_sharded(row, transport, model=make_model(layers=LAYERS))
        events: list[tuple[str, str]] = []
        if compiled:
            for block in model.blocks:
                forward: Any = torch.compile(block.forward, backend="aot_eager")
                block.forward = forward
        losses[compiled] = []
        for step in range(4):
            events.clear()
            with inside.traced(engine, lambda *event, seen=events: seen.append(event)):
                loss = model(*batch(rank, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[compiled].append(loss.item())
        if compiled:
            frames = torch._dynamo.utils.counters["frames"]
            assert (
                frames["ok"] == frames["total"] <= 2
                and not torch._dynamo.utils.counters["graph_break"]
            ), torch._dynamo.utils.counters
        if row == "zero3" and transport == "gloo":
            assert events.index(("gather", "blocks.2")) < events.index(("release", "blocks.1")), (
                "prefetch still overlaps"
            )
        engine.close()
    torch._dynamo.reset()
    assert losses[True] == losses[False]


# How a model is compiled, given what compiles; each returns what is called.
def _forwards(model: Any, compile_it: Callable[..., Any], **options: Any) -> Any:
    for block in model.blocks:
        block.forward = compile_it(block.forward, **options)
    return model


def _blocks(model: Any, compile_it: Callable[..., Any], **options: Any) -> Any:
    for block in model.blocks:
        block.compile(**options)
    return model


def _method(model: Any, compile_it: Callable[..., Any], **options: Any) -> Any:
    model.compile(**options)
    return model


def _wrapped(model: Any, compile_it: Callable[..., Any], **options: Any) -> Any:
    return compile_it(model, **options)


def _function(model: Any, compile_it: Callable[..., Any], **options: Any) -> Any:
    return compile_it(lambda *inputs: model(*inputs) * 1, **options)


WAYS = {
    "block.forward": _forwards,
    "block.compile()": _blocks,
    "model.compile()": _method,
    "torch.compile(model)": _wrapped,
    "a function around the model": _function,
}


def _train(
    rank: int, row: str | None, way: str | None, *, first: bool, precision: str = "fp32"
) -> tuple[list[float], int]:
    """Return the losses of some steps and of an evaluation, and how many graphs were compiled;
    `first`: before shard().
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = make_model(layers=6)  # more than the graphs that may be more
    optimizer = two_groups(model)
    call: Any = model
    compiles = partial(WAYS.get(way or "", lambda model, _, **options: model), backend="eager")
    if first:
        call = compiles(model, torch.compile)
    around = call if isinstance(call, nn.Module) else model
    engine = row and zs.shard(around, optimizer, policy=row, precision=precision)
    if not first:
        call = compiles(model, torch.compile)
    losses = []
    for step in range(2):
        loss = call(*batch(rank, step))
        engine.backward(loss) if engine else loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    if engine:
        with torch.no_grad(), engine.gathered():
            losses.append(call(*batch(rank, 3)).item())
        names = set(engine.full_state_dict(rank0_only=False))
        engine.close()
        assert names == set(model.state_dict())
    torch._dynamo.reset()
    return losses, graphs


@cache  # for both rows
def _plain_graphs(way: str) -> int:
    return _train(0, None, way, first=True)[1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("row", "precision"), [("zero1", "bf16"), ("zero3", "fp32")])
@on_ranks(2, timeout=600)
def test_blocks_and_the_model_are_compiled_in_any_way_before_and_after_shard(
    rank: int, row: str, precision: str
) -> None:
    expected, _ = _train(rank, row, None, first=False, precision=precision)
    first = rank == 0  # rank 1 after shard(): both make the same exchanges
    for way in WAYS:
        plain = _plain_graphs(way)
        losses, graphs = _train(rank, row, way, first=first, precision=precision)
        assert losses == expected, (way, first)
        if way.startswith("block") or (row != "zero3" and "model" in way and "func" not in way):
            assert graphs == plain, (way, first, graphs)
        # its graphs end where a unit begins and ends, and like ones are compiled once
        assert 0 < graphs <= plain + 4, (way, first, graphs)


def test_one_graph_around_weights_that_are_gathered_is_refused_with_the_remedy() -> None:
    model = make_model()
    engine = zs.shard(model, two_groups(model), stage=3)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(Unsupported, match="gathers the weights of a unit here: compile each block"):
        compiled(*batch(0, 0))
    torch._dynamo.reset()
    engine.reset()
    model(*batch(0, 0)).backward()
    engine.close()


class _Encoder(nn.Module):
    """Attention, whose forward looks at its parameters while Dynamo traces."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return cast(torch.Tensor, self.head(x).square().mean())


def test_a_block_is_compiled_again_while_gradients_rest() -> None:
    losses: dict[bool, list[float]] = {}
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = _Encoder()
        for block in model.blocks if compiled else ():
            block.forward = torch.compile(block.forward, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = zs.shard(model, optimizer, stage=3)
        losses[compiled] = []
        for _ in range(2):
            for length in (3, 5, 7):
                loss = model(torch.ones(2, length, 8).cumsum(1).sin())
                loss.backward()
                losses[compiled].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        engine.close()
    torch._dynamo.reset()
    assert losses[True] == losses[False]
