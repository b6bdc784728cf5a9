"""``torch.compile`` of the blocks: the same numbers, one graph per block, none per step."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch._dynamo
from torch import nn

import zeroshard as zs
from tests.support import inside
from tests.support.harness import run_ranks
from tests.support.training import batch, make_model, two_groups
from zeroshard import ConfigError, StateError

LAYERS = 4


def _compiled(rank: int, world: int, transport: str, row: str) -> None:
    losses: dict[bool, list[float]] = {}
    for compiled in (False, True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = make_model(layers=LAYERS)
        optimizer = two_groups(model)
        engine = zs.shard(
            model, optimizer, policy=row, comm=zs.Comm.model_validate({"transport": transport})
        )
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
                frames["ok"] == frames["total"] <= LAYERS
                and not torch._dynamo.utils.counters["graph_break"]
            ), torch._dynamo.utils.counters
        if row == "zero3" and transport == "gloo":
            assert events.index(("gather", "blocks.2")) < events.index(("release", "blocks.1")), (
                "prefetch still overlaps"
            )
        engine.close()
    torch._dynamo.reset()
    assert losses[True] == losses[False]


@pytest.mark.parametrize(
    ("transport", "row"),
    [
        ("shared_memory", "zero3"),
        pytest.param("gloo", "zero3", marks=pytest.mark.slow),
        pytest.param("shared_memory", "zero1", marks=pytest.mark.slow),
    ],
)
def test_compiled_blocks_train_to_the_same_numbers_without_compiling_again(
    transport: str, row: str
) -> None:
    run_ranks(2, _compiled, transport, row, timeout=120)


def test_compiling_the_hooks_is_refused_with_the_remedy() -> None:
    model = make_model()
    engine = zs.shard(model)
    with pytest.raises(
        StateError,
        match=r"blocks\.0\.compile\(\) would compile the hooks.*module\.forward = torch\.compile",
    ):
        model.blocks[0].compile()
    engine.close()
    model.blocks[0].compile()
    with pytest.raises(ConfigError, match=r"module 'blocks\.0' was compiled with its hooks"):
        zs.shard(model)


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero3"])
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compiling_around_the_whole_model_is_refused_with_the_remedy(row: str) -> None:
    model = make_model()
    engine = zs.shard(model, two_groups(model), policy=row)
    compiled = torch.compile(model, backend="aot_eager")
    with pytest.raises(
        StateError,
        match=(
            r"torch\.compile around Net would compile the hooks.*module\.forward = torch\.compile"
        ),
    ):
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
