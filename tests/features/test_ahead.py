"""Units that the schedule has gathered ahead for the next forward, or keeps idle for another use,
beside what takes their states away or changes them: offload_states(), repartition(), EMA.swapped(),
gathered(writeback=True).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support import inside
from tests.support.harness import on_ranks
from tests.support.training import batch, make_model, make_sharded
from zeroshard.core.residency import UnitState


def _sleeps(engine: zs.Engine, model: nn.Module) -> None:
    engine.offload_states()
    assert not _on_its_way(engine)
    with pytest.raises(zs.StateError, match="reload_states"), torch.no_grad():
        model(batch(0, 0)[0])
    engine.reload_states()


def _moves(engine: zs.Engine, model: nn.Module) -> None:
    engine.repartition(policy="zero3", offload=zs.Offload(weight="device"))


def _edits(engine: zs.Engine, model: nn.Module) -> None:
    with engine.gathered(writeback=True):
        for parameter in model.parameters():
            parameter.data.mul_(2)


def _on_its_way(engine: zs.Engine) -> int:
    """Return how many units are gathered, or being gathered, for a forward that has not begun."""
    return sum(unit.residency.state is not UnitState.RESTING for unit in inside.units(engine))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("change", [_sleeps, _moves, _edits])
@on_ranks()
def test_units_that_are_ahead_give_the_numbers_that_rest_then(
    rank: int, world: int, change: Callable[[zs.Engine, nn.Module], None]
) -> None:
    """Without an optimizer, the last units of a forward start the reads of the next one."""
    x, plain, model = batch(rank, 0)[0], make_model(), make_model()
    engine = zs.shard(model, None, policy="zero3", offload=zs.Offload(weight="host"))
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), plain(x))
        assert _on_its_way(engine)
        change(engine, model)
        if change is _edits:
            for parameter in plain.parameters():
                parameter.mul_(2)
        for _ in range(2):
            assert torch.equal(model(x), plain(x))
    engine.close()


def _train(row: str, disturb: Callable[[zs.Engine, Any, nn.Module], None] | None, rank: int) -> Any:
    """Train three steps; between them an evaluation ends early, by an exception in its loss, so
    that what its forward has left is still here; `disturb` comes then.
    """
    model, optimizer, engine = make_sharded(row, prefetch_bytes=1 << 20)
    ema = zs.EMA(engine, decay=0.5)
    for step in range(3):
        x, y = batch(rank, step)
        engine.backward(model(x, y))
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        with torch.no_grad():
            model(x)
        if disturb is not None:
            disturb(engine, ema, model)
    whole = engine.full_state_dict(rank0_only=False)
    return {name: value.clone() for name, value in whole.items()}


def _looks_at_the_average(engine: zs.Engine, ema: Any, model: nn.Module) -> None:
    with ema.swapped(), torch.no_grad():
        model(batch(0, 0)[0])


def _sleeps_in_between(engine: zs.Engine, ema: Any, model: nn.Module) -> None:
    engine.offload_states()
    engine.reload_states()


@pytest.mark.parametrize("row", ["zero1", "zero3", "zero3-keep"])
@on_ranks(2)
def test_averages_and_sleep_between_passes_change_no_bit(rank: int, row: str) -> None:
    expected = _train(row, None, rank)
    for disturb in (_looks_at_the_average, _sleeps_in_between):
        found = _train(row, disturb, rank)
        assert all(torch.equal(found[name], value) for name, value in expected.items()), disturb


@on_ranks(2)
def test_inside_a_forward_they_are_refused_and_training_goes_on(rank: int) -> None:
    """A block asks from within its forward, when the unit before it is idle."""
    model, optimizer, engine = make_sharded()
    ema = zs.EMA(engine, decay=0.5)
    told: list[str] = []

    def ask(module: nn.Module, args: Any) -> None:
        for call in (
            engine.offload_states,
            lambda: engine.repartition(policy="zero1"),
            ema.swapped().__enter__,
        ):
            with pytest.raises(zs.StateError) as refused:
                call()
            told.append(str(refused.value))

    handle = model.blocks[-1].register_forward_pre_hook(ask)
    x, y = batch(rank, 0)
    loss = model(x, y)
    handle.remove()
    engine.backward(loss)
    optimizer.step()
    assert len(told) == 3 and all("between steps" in text or "inside" in text for text in told), (
        told
    )
