"""``engine.accumulate()`` in one process: what may pass between blocks, what is refused, and what a
trace or autocast sees of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.support import inside
from tests.support.training import Net, Routed, batch, differences, make_model

BATCHES = [batch(0, number) for number in range(3)]
State = dict[str, torch.Tensor]


def _engine(model: nn.Module, **options: Any) -> tuple[zs.Engine, torch.optim.Optimizer]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, 1e-2)
    return zs.shard(model, optimizer, stage=3, **options), optimizer


def _steps(
    make: Callable[[], nn.Module], *, vertical: bool, around: Any = nullcontext, **options: Any
) -> State:
    """Train two steps in one way; return the weights."""
    torch.manual_seed(0)
    model = make()
    engine, optimizer = _engine(model, **options)
    for _ in range(2):
        with around():
            if vertical:
                engine.accumulate(BATCHES, lambda one: model(*one))
            for one in () if vertical else BATCHES:
                with engine.no_sync() if one is not BATCHES[-1] else nullcontext():
                    loss = model(*one)
                    engine.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    state = engine.full_state_dict()
    engine.close()
    return state


class Plain(nn.Module):
    """No block at all: all parameters are the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(37, 37))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.table[x].flatten(0, 1), y.flatten())


def _tiled() -> nn.Module:
    model = make_model(width=64)
    zs.nn.tile_linears(model, {f"blocks.{index}.up": 2 for index in range(4)})
    return model


def _checkpointed() -> nn.Module:
    model = make_model()
    zs.nn.checkpoint_blocks(model)
    return model


@pytest.mark.parametrize("make", [make_model, Plain, _tiled, _checkpointed])
def test_models_without_blocks_with_tiles_and_with_checkpointed_blocks_have_the_same_bits(
    make: Callable[[], nn.Module],
) -> None:
    expected = _steps(make, vertical=False)
    assert differences(_steps(make, vertical=True), expected) == []


class Cast(Net):
    """Autocast inside the model, where only the threads of micro-batches come."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x, y)


def test_autocast_reaches_blocks_in_both_runs() -> None:
    assert differences(_steps(Cast, vertical=True), _steps(Cast, vertical=False)) == []
    around = partial(torch.autocast, "cpu", torch.bfloat16)
    expected = _steps(make_model, vertical=False, around=around)
    assert differences(_steps(make_model, vertical=True, around=around), expected) == []
    assert differences(expected, _steps(make_model, vertical=False)), "autocast changes something"


class Spoken(Net):
    """Tells loss_fn what torch's modes say."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        self.device = torch.empty(0).device
        return super().forward(x, y)


def test_modes_of_the_caller_hold_in_loss_fn() -> None:
    model = Spoken()
    engine, _ = _engine(model)
    with torch.device("meta"):
        engine.accumulate(BATCHES[:1], lambda one: model(*one))
        assert torch.empty(0).device.type == "meta"
    assert model.device.type == "meta"
    assert torch.empty(0).device.type == "cpu"
    engine.close()


def test_a_trace_shows_units_gathered_once_for_all_micro_batches(tmp_path: Path) -> None:
    model = make_model()
    engine, optimizer = _engine(model)
    with engine.trace(tmp_path):
        for _ in range(2):
            engine.accumulate(BATCHES, lambda one: model(*one))
            optimizer.step()
            optimizer.zero_grad()
    engine.close()
    assert (tmp_path / "rank-00000.json").stat().st_size > 1000


# ----------------------------------------------------------------------------------------- refusals


class Cache:
    """What Transformers' key-value caches look like."""

    def get_seq_length(self) -> int:
        return 0

    def update(self) -> None: ...


class Holder:
    """An object around a tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def _with_block(forward: Callable[..., Any], call: Callable[..., torch.Tensor]) -> nn.Module:
    """Return a net whose second block has another forward and is called otherwise."""

    class Odd(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            h = self.blocks[0](self.embed(x))
            h = call(self.blocks[1], h)
            assert y is not None
            return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())

    model = Odd()
    block = model.blocks[1]
    block.forward = partial(forward, block.forward)  # type: ignore[method-assign]
    return model


def _in_place(inner: Any, h: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = inner(h.mul_(2))
    return out


REFUSED = {
    "in place": (
        _with_block, _in_place, lambda block, h: block(h * 1),
        "module 'blocks.1' writes to its input in place",
    ),
    "later": (
        _with_block, lambda inner, h: inner(h), lambda block, h: block(h) + h.mul_(2),
        "an input of module 'blocks.1' was written to in place after its forward",
    ),
    "cache": (
        _with_block, lambda inner, h, cache: inner(h), lambda block, h: block(h, Cache()),
        "was given a Cache, which engine.accumulate() would fill twice",
    ),
    "in an object": (
        _with_block, lambda inner, h: inner(h.value), lambda block, h: block(Holder(h)),
        "is given a Holder, inside of which engine.accumulate() cannot follow",
    ),
    "out in an object": (
        _with_block, lambda inner, h: Holder(inner(h)), lambda block, h: block(h).value,
        "returns a Holder, inside of which",
    ),
    "reentrant": (
        _with_block, lambda inner, h: inner(h),
        lambda block, h: checkpoint(block, h, use_reentrant=True),
        "module 'blocks.1' runs inside a reentrant checkpoint",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_blocks_whose_gradients_cannot_be_followed_are_refused_by_name(name: str) -> None:
    make, forward, call, told = REFUSED[name]
    model = make(forward, call)
    engine, _ = _engine(model)
    with pytest.raises(zs.ZeroshardError, match=told.replace("(", "\\(").replace(")", "\\)")):
        engine.accumulate(BATCHES[:2], lambda one: model(*one))
    engine.reset()
    assert inside.is_at_rest(engine)
    engine.close()


def test_join_is_refused() -> None:
    model = make_model()
    engine, _ = _engine(model)
    with pytest.raises(zs.ConfigError, match=r"inside engine\.join"), engine.join():
        engine.accumulate(BATCHES, lambda one: model(*one))
    engine.reset()
    engine.close()


def test_an_interrupted_run_leaves_no_thread_and_trains_on() -> None:
    torch.manual_seed(0)
    model = Routed()
    engine, optimizer = _engine(model)

    def interrupted(one: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if one is BATCHES[1]:
            raise KeyboardInterrupt
        return model(*one)

    with pytest.raises(KeyboardInterrupt):
        engine.accumulate(BATCHES, interrupted)
    engine.reset()
    done = engine.accumulate(BATCHES, lambda one: model(*one))
    optimizer.step()
    assert done.losses.shape == (3,) and not done.losses.requires_grad
    assert done.loss.item() == pytest.approx(done.losses.mean().item()) and done.weights is None
    engine.close()
