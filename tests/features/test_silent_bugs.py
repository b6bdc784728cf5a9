"""Bugs by which sharded training has gone wrong elsewhere without a word: here each gives DDP's
numbers or an error that names it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.support.cases import WIDTH, Case, Chain, compare_case, seeded, simple, train_case
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import (
    ROWS,
    batch,
    equal,
    final_state,
    make_model,
    make_sharded,
    take_steps,
    train,
    two_groups,
)
from zeroshard import ConfigError
from zeroshard.runtime.flight import Flight

# ---------------------------------------------------------------------------- models that are odd


class Twice(nn.Module):
    """A block that runs twice in one forward, around another."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(torch.tanh(self.outer(x)))
        return x + torch.tanh(self.outer(torch.tanh(h)))


class Shared(Chain):
    """One block in every place, and a head that runs before and after."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, tell: Any = None) -> torch.Tensor:
        h = self.embed(x)
        for _ in range(3):
            h = self.blocks[0](h)
        early = self.head(h).flatten(0, 1)
        late = self.head(self.blocks[1](self.blocks[2](h))).flatten(0, 1)
        return nn.functional.cross_entropy(early, y.flatten()) + nn.functional.cross_entropy(
            late, y.flatten()
        )


class OnData(nn.Module):
    """One block runs three times, first on data, which gets no gradient; `first`: as a block,
    inside a checkpoint with the second, or its layers, one by one.
    """

    def __init__(self, first: str) -> None:
        super().__init__()
        # its output is that of its last layer
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.head, self.first = nn.Linear(WIDTH, 37), first

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = nn.functional.one_hot(x % WIDTH, WIDTH).float()
        if self.first == "checkpoint":
            h = checkpoint(lambda h: self.block(self.block(h)), h, use_reentrant=False)
        else:
            for layer in [self.block] if self.first == "block" else self.block:
                h = layer(h)
            h = self.block(torch.tanh(h) if self.first == "layers and a function" else h)
        return nn.functional.cross_entropy(self.head(self.block(h)).flatten(0, 1), y.flatten())


class Several(nn.Module):
    """A leaf with several outputs: a tuple, one of them in a dict, one that nobody uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.mix = nn.Parameter(torch.eye(width) * 0.5 + 0.01)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor], None]:
        mixed = x @ self.mix
        return x * self.scale, {"mixed": mixed, "unused": mixed.sum()}, None


class UsesSeveral(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.leaf = Several(width)
        self.after = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled, others, _ = self.leaf(x)
        return torch.tanh(self.after(scaled)) + torch.relu(others["mixed"])


class Tiny(nn.Module):
    """Parameters smaller than the number of ranks, of one element and of none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor([0.1]))
        self.pair = nn.Parameter(torch.tensor([0.3, -0.2]))
        self.none = nn.Parameter(torch.empty(0, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nothing = (x[..., :1] @ self.none.sum(0, keepdim=True)).mean()
        return x * self.gain + self.shift + self.pair.prod() + nothing


CASES = {
    "a module runs twice": Case(seeded(Chain, Twice), simple),
    "one module in several places": Case(seeded(Shared, Twice), simple),
    **{
        f"one module on data and again, {first}": Case(
            seeded(OnData, first), simple, options={"units": [nn.Sequential]}
        )
        for first in ("block", "checkpoint", "layers", "layers and a function")
    },
    "a leaf with several outputs": Case(seeded(Chain, UsesSeveral), simple),
    "parameters smaller than the ranks": Case(seeded(Chain, Tiny), simple),
}


def _differences(rank: int, world: int, name: str) -> dict[str, list[str]]:
    if world == 2:
        return compare_case(rank, CASES[name], ("zero1", "zero2", "zero3", "zero3-keep"))
    # torch adds the numbers of three ranks in an order of its own
    reference = train_case(rank, "reference", CASES[name])
    runs = {row: train_case(rank, row, CASES[name]) for row in ROWS}
    assert runs["ddp"].losses == pytest.approx(reference.losses, rel=1e-4)
    return {row: run.differs_from(runs["ddp"]) for row, run in runs.items()}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_an_odd_model_trains_to_ddps_bits(name: str, world: int) -> None:
    for differences in run_ranks(world, _differences, name):
        assert not any(differences.values()), differences


@on_ranks(3)
def test_empty_shares_are_saved_and_loaded(rank: int, tmp_path: Path) -> None:
    """Ranks whose share of every parameter but the large ones is empty save and load, too."""

    def sharded(row: str) -> tuple[nn.Module, torch.optim.Optimizer, zs.Engine]:
        model = seeded(Chain, Tiny)()
        optimizer = two_groups(model)
        return model, optimizer, zs.shard(model, optimizer, policy=row)

    model, optimizer, engine = sharded("zero3")
    take_steps(rank, 2, model, optimizer)
    zs.save(tmp_path, engine, step=2)
    take_steps(rank, 2, model, optimizer)
    expected = engine.full_state_dict(rank0_only=False)
    for row in ("zero1", "zero3"):
        model, optimizer, engine = sharded(row)
        zs.load(tmp_path, engine)
        take_steps(rank, 2, model, optimizer)
        assert equal(engine.full_state_dict(rank0_only=False), expected), row


# --------------------------------------------------------------------------------- ties at a load


class Tied(Chain):
    def __init__(self) -> None:
        super().__init__(Twice)
        self.head.weight = self.embed.weight


@on_ranks(2)
def test_ties_survive_every_way_to_load(rank: int, tmp_path: Path) -> None:
    """Load over a tied model in every way; then train: the two names stay one parameter."""
    torch.manual_seed(1)
    source = Tied()
    reference = two_groups(source)
    state = {name: value.clone() for name, value in source.state_dict().items()}
    if rank == 0:
        save_file(
            {n: v for n, v in state.items() if n != "head.weight"}, tmp_path / "model.safetensors"
        )
    engine = zs.shard(source, reference, stage=2)
    zs.save(tmp_path / "ours", engine, step=0)
    take_steps(rank, 2, source, reference)
    expected = final_state(source, engine)

    def load(model: nn.Module, engine: zs.Engine, way: str) -> None:
        if way == "zs.load":
            zs.load(tmp_path / "ours", engine)
        elif way == "load_pretrained":
            zs.load_pretrained(engine, tmp_path)
        elif way == "load_state_dict":
            model.load_state_dict(state)
        else:
            with engine.gathered(writeback=True):
                if rank == 0 or way == "all in gathered":
                    model.load_state_dict(state)

    ways = ("zs.load", "load_pretrained", "load_state_dict", "all in gathered", "one in gathered")
    for row in ROWS:
        for way in ways:
            model = seeded(Tied)()
            optimizer = two_groups(model)
            engine = zs.shard(model, optimizer, policy=row)
            load(model, engine, way)
            assert model.head.weight is model.embed.weight
            take_steps(rank, 2, model, optimizer)
            found = engine.full_state_dict(rank0_only=False)
            assert equal(found, expected), (row, way)
            assert torch.equal(found["head.weight"], found["embed.weight"])
            engine.close()


def test_edits_in_a_nested_gathered_are_not_lost_without_a_word() -> None:
    model = make_model()
    engine = zs.shard(model)
    with engine.gathered(writeback=True):
        with engine.gathered():
            pass
        with (
            pytest.raises(zs.StateError, match="inside another one"),
            engine.gathered(model.head.weight, writeback=True),
        ):
            pass
    engine.close()


# --------------------------------------------------------------------- an optimizer without effect


def _replaced(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model whose parameters became others after its optimizer was made."""
    model = make_model()
    optimizer = two_groups(model)
    if kind == "loaded with assign":
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    elif kind == "another head":
        model.head = nn.Linear(WIDTH, 37, bias=False)
    else:
        model = make_model()
    return model, optimizer


@pytest.mark.parametrize("kind", ["loaded with assign", "another head", "another model"])
@pytest.mark.parametrize("row", ROWS)
def test_an_optimizer_over_other_parameters_is_refused(kind: str, row: str) -> None:
    model, optimizer = _replaced(kind)
    with pytest.raises(ConfigError, match=r"not one of this model's|not in the optimizer"):
        zs.shard(model, optimizer, policy=row)
    engine = zs.shard(model, policy=row)
    with pytest.raises(ConfigError, match=r"not one of this model's|not in the optimizer"):
        engine.attach(optimizer)
    engine.close()


@on_ranks(2)
def test_an_optimizer_made_before_the_model_was_moved_or_loaded_steps(rank: int) -> None:
    """What keeps the parameters keeps the optimizer: a load in place, a move."""
    expected = train(rank, "torch-ddp", 3).state
    for row in ROWS:
        model = make_model()
        optimizer = two_groups(model)
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        model.to("cpu", torch.float64).to(torch.float32)
        engine = zs.shard(model, optimizer, policy=row)
        take_steps(rank, 3, model, optimizer)
        assert equal(engine.full_state_dict(rank0_only=False), expected), row
        engine.close()


# ------------------------------------------------------------------------------------- accumulation


@pytest.mark.parametrize("no_sync", [False, True], ids=["every backward", "no_sync"])
@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_micro_batches_accumulate(rank: int, world: int, row: str, no_sync: bool) -> None:
    """The gradient of two micro-batches is the sum of both, and the average over the ranks."""
    plain = make_model()
    for other in range(world):
        for micro in range(2):
            (plain(*batch(other, micro)) / world).backward()
    model, optimizer, engine = make_sharded(row)
    if no_sync:
        with engine.no_sync():
            model(*batch(rank, 0)).backward()
    else:
        model(*batch(rank, 0)).backward()
    model(*batch(rank, 1)).backward()
    for mine, expected in zip(model.parameters(), plain.parameters(), strict=True):
        found = engine.full_grad(mine)
        assert found is not None and expected.grad is not None
        torch.testing.assert_close(found, expected.grad, rtol=1e-5, atol=1e-7)
    before = engine.full_state_dict(rank0_only=False)
    optimizer.step()
    after = engine.full_state_dict(rank0_only=False)
    assert all(not torch.equal(before[name], after[name]) for name in before), "every one moved"
    engine.close()


# --------------------------------------------------------------------------------- mistyped names


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ({"stages": 3}, "stages"),
        ({"stage": 3, "precison": "bf16"}, "precison"),
        ({"stage": 3, "offload": {"optimiser": "host"}}, "optimiser"),
        ({"zero_optimization": {"stge": 3}}, "stge"),
        ({"zero_optimization": {"stage": 3}, "bf16": {"enable": True}}, "enable"),
    ],
)
def test_a_mistyped_key_is_named(tmp_path: Path, data: dict[str, Any], name: str) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=name):
        zs.Config.read(file)


def test_a_mistyped_key_that_deepspeed_drops_is_named_in_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3}, "gradient_cliping": 1.0}))
    zs.Config.read(file)
    assert "did you mean 'gradient_clipping'?" in caplog.text


def test_a_mistyped_keyword_of_shard_is_named() -> None:
    with pytest.raises((TypeError, ConfigError), match="stge"):
        zs.shard(make_model(), stge=3)  # type: ignore[call-arg]


def test_a_unit_is_not_used_before_its_gather_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    engine = zs.shard(model, two_groups(model), stage=3)
    monkeypatch.setattr(Flight, "wait", lambda self, lane="compute": None)
    with pytest.raises(AssertionError, match="is used too early"):
        model(*batch(0, 0))
    monkeypatch.undo()
    engine.close()
