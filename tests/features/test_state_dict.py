"""``state_dict()`` and ``load_state_dict()`` of the model and of the optimizer."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import zeroshard as zs
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import (
    ROWS,
    Net,
    equal,
    make_model,
    make_sharded,
    take_steps,
    train,
    two_groups,
)
from zeroshard.errors import PlanMismatch, StateError
from zeroshard.formats import export

SHARDED = ("zero3", "zero3-keep")  # rows whose weights rest in slices


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_state_dict_gives_full_tensors_inside_gathered_and_raises_outside(
    rank: int, row: str
) -> None:
    model, optimizer, engine = make_sharded(row)
    take_steps(rank, 1, model, optimizer)
    expected = engine.full_state_dict(rank0_only=False)
    for save in (model.state_dict, model.blocks[1].state_dict, model.head.state_dict):
        if row in SHARDED:
            with pytest.raises(StateError, match=r"state_dict\(\) of .*engine.full_state_dict\(\)"):
                save()
    with engine.gathered():
        inside = {name: value.clone() for name, value in model.state_dict().items()}
        assert list(inside) == list(expected)
    assert equal(inside, expected)
    only = engine.full_state_dict()
    assert equal(only, expected) if rank == 0 else only == {}
    if row == "ddp":
        assert equal(model.state_dict(), expected)
    with engine.gathered(model.head.weight):
        assert torch.equal(model.head.state_dict()["weight"], expected["head.weight"])
        if row in SHARDED:
            with pytest.raises(StateError, match="state_dict"):
                model.state_dict()
    take_steps(rank, [1], model, optimizer)
    engine.close()


def _loaded(rank: int, world: int, row: str, precision: str) -> None:
    torch.manual_seed(7)
    other = Net().state_dict()
    expected = {
        name: value.to(torch.bfloat16 if precision == "bf16" else torch.float32)
        for name, value in other.items()
    }
    model, optimizer, engine = make_sharded(row, precision=precision)
    take_steps(rank, 1, model, optimizer)
    assert model.load_state_dict(other).missing_keys == []
    assert equal(engine.full_state_dict(rank0_only=False), expected)
    part = {
        name.removeprefix("blocks.1."): value * 2
        for name, value in other.items()
        if name.startswith("blocks.1.")
    }
    model.blocks[1].load_state_dict(part)
    assert torch.equal(
        engine.full_state_dict(rank0_only=False)["blocks.1.up.weight"],
        2 * expected["blocks.1.up.weight"],
    )
    with pytest.raises(StateError, match="assign=True"):
        model.load_state_dict(other, assign=True)
    with pytest.raises(RuntimeError, match="size mismatch for head"):
        model.load_state_dict({**other, "head.weight": torch.zeros(3)})
    result = model.load_state_dict({"head.weight": other["head.weight"]}, strict=False)
    assert "embed.weight" in result.missing_keys
    take_steps(rank, [1], model, optimizer)
    assert all(
        value.isfinite().all() for value in engine.full_state_dict(rank0_only=False).values()
    )
    engine.close()


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_load_state_dict_goes_into_the_shards_and_masters(rank: int, world: int, row: str) -> None:
    for precision in ("fp32", "bf16"):
        _loaded(rank, world, row, precision)


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_ranks_that_load_other_numbers_are_told_on_every_rank(rank: int, row: str) -> None:
    model, optimizer, engine = make_sharded(row)
    before = engine.full_state_dict(rank0_only=False)
    state = {name: value + 1 for name, value in before.items()}
    for changed in ("head.weight", None):  # one parameter, or what a rank without the file has
        mine = {**state, "head.weight": state["head.weight"] + rank} if changed else state
        with pytest.raises(PlanMismatch) as error:
            model.load_state_dict(mine if changed or rank == 0 else {}, strict=False)
        told = str(error.value)
        assert "the ranks disagree, first about 'the numbers of " in told, told
        assert not changed or f"'the numbers of {changed}'" in told, told
        assert "same state on every rank" in told
    assert not torch.equal(before["head.weight"], state["head.weight"])
    if rank:  # on one rank, as the error says
        state = {}
    with engine.gathered(writeback=True):
        model.load_state_dict(state, strict=False)
    loaded = engine.full_state_dict(rank0_only=False)
    assert all(torch.equal(value, before[name] + 1) for name, value in loaded.items())
    take_steps(rank, 1, model, optimizer)
    engine.close()


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_the_optimizers_state_dict_is_labelled_and_resumes_to_the_same_bits(
    rank: int, world: int, row: str
) -> None:
    straight = train(rank, row, 4).state
    model, optimizer, engine = make_sharded(row)
    # Accelerate's prepare() does so, before the first step
    optimizer.load_state_dict(optimizer.state_dict())
    take_steps(rank, 2, model, optimizer)
    if row == "ddp":
        # every rank holds all of it
        assert optimizer.state_dict()["zeroshard"] == engine.optimizer_part()["zeroshard"]
    else:
        with pytest.raises(
            StateError,
            match=r"optimizer.state_dict\(\): .*zeroshard.save\(\).*engine.optimizer_part\(\)",
        ):
            optimizer.state_dict()
    saved, weights = (
        pickle.loads(pickle.dumps(engine.optimizer_part())),
        engine.full_state_dict(rank0_only=False),
    )
    label = saved["zeroshard"]
    assert (label["rank"], label["world"]) == (rank, world)
    assert [len(group) for group in label["pieces"]] == [
        len(group["params"]) if label["pieces"][i] else 0
        for i, group in enumerate(saved["param_groups"])
    ]
    assert all(
        {"name", "start", "stop", "shape"} <= piece.keys()
        for group in label["pieces"]
        for piece in group
    )
    engine.close()
    model, optimizer, engine = make_sharded(row)
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    take_steps(rank, range(2, 4), model, optimizer)
    assert equal(engine.full_state_dict(rank0_only=False), straight), row
    for wrong, message in (
        ({**saved, "zeroshard": {**label, "rank": 7}}, "another rank"),
        ({**saved, "zeroshard": {**label, "world": 7}}, "another world"),
        ({**saved, "zeroshard": {**label, "pieces": [[], []]}}, "another pieces"),
        (two_groups(make_model()).state_dict(), "not saved from a sharded optimizer"),
    ):
        with pytest.raises(StateError, match=message):
            optimizer.load_state_dict(wrong)
    engine.close()


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_optimizer_state_from_before_shard_is_cut_and_goes_on(rank: int, row: str) -> None:
    """Two steps of plain training on the same data everywhere, then sharding: the moments go on."""
    states = []
    for kind in ("torch-ddp", row):
        inner = module = make_model()
        optimizer = two_groups(inner)
        take_steps(0, 2, inner, optimizer)
        engine = None
        if kind == "torch-ddp":
            module = DistributedDataParallel(inner)
        else:
            engine = zs.shard(inner, optimizer, policy=row)
        take_steps(rank, range(2, 4), module, optimizer)
        states.append(engine.full_state_dict(rank0_only=False) if engine else inner.state_dict())
        if engine:
            engine.close()
    assert equal(*states), row


class _Scaled(nn.Module):
    """A block with a buffer, whose hook gives the weight another name, as those of timm do."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))
        self.register_state_dict_post_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}renamed"] = state.pop(f"{prefix}inner.weight")
        state[f"{prefix}inner.bias"] = state[f"{prefix}inner.bias"].clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


def _hooked(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(_Scaled(), nn.Linear(4, 4), nn.BatchNorm1d(4))
    if kind == "wrapped":
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        return nn.Sequential(model, checkpoint_wrapper(inner))
    return model


@pytest.mark.parametrize("kind", ["wrapped", "renamed"])
@on_ranks(2)
def test_names_are_those_of_the_models_state_dict_also_where_hooks_give_them(
    tmp_path: Path, kind: str
) -> None:
    for row in ROWS:
        model = _hooked(kind)
        plain = {name: value.clone() for name, value in model.state_dict().items()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = zs.shard(model, optimizer, policy=row)
        state = engine.full_state_dict(rank0_only=False)
        assert sorted(state) == sorted(plain), (row, list(state))
        assert all(torch.equal(state[name], value) for name, value in plain.items()), row
        some = next(iter(dict.fromkeys(plain)))
        assert list(engine.full_state_dict(rank0_only=False, names=some)) == [some]
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        trained = engine.full_state_dict(rank0_only=False)
        saved = (zs.save(tmp_path / row, engine, step=1) / "manifest.json").read_text()
        assert "_checkpoint_wrapped_module" not in saved and '"0.inner.weight"' not in saved, row
        engine.close()
        again = _hooked(kind)
        optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
        engine = zs.shard(again, optimizer, policy=row)
        assert not zs.load(tmp_path / row, engine).skipped
        loaded = engine.full_state_dict(rank0_only=False)
        assert all(torch.equal(loaded[name], value) for name, value in trained.items()), row
        engine.close()


def test_a_checkpoint_with_the_names_from_before_hooks_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _hooked("wrapped")
    engine = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=2)
    with monkeypatch.context() as patch:
        patch.setattr("zeroshard.checkpoint.rank_part.saved_names", lambda module: {})
        path = zs.save(tmp_path, engine, step=1)
    assert "_checkpoint_wrapped_module" in (path / "manifest.json").read_text()
    assert not zs.load(tmp_path, engine).skipped
    engine.close()


# ---------------------------------------------------------------------------------- get_extra_state


EXTRA = ("1._extra_state", "2._extra_state")


class Counting(nn.Linear):
    """A layer with a state of its own beside its parameters, as fp8 scales and metrics are."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def _counting() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    inner = checkpoint_wrapper(Counting(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), inner, Counting(4, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def _layers(model: nn.Module) -> list[Counting]:
    return [module for module in model.modules() if isinstance(module, Counting)]


def _extra_states(rank: int, world: int, folder: Path, stage: int, precision: str) -> None:
    model, optimizer = _counting()
    engine = zs.shard(model, optimizer, stage=stage, precision=precision)
    first, second = _layers(model)
    if world == 2:
        first.extra = {
            "amax": torch.arange(6.0).view(2, 3),
            "steps": 3,
            "of": ("a", torch.ones(())),
        }
        second.extra = torch.tensor([rank], dtype=torch.uint8)  # another one on every rank
        state = engine.full_state_dict()
        with engine.gathered():
            plain = model.state_dict()
        if rank == 0:
            assert list(state) == list(plain) and "1._extra_state" in state
            assert torch.equal(state["1._extra_state"]["amax"], first.extra["amax"])
            first.extra["amax"].zero_()
            assert state["1._extra_state"]["amax"].any(), "it is a copy"
            first.extra["amax"].copy_(torch.arange(6.0).view(2, 3))
        names = engine.full_state_dict(names="2.*", rank0_only=False)
        assert [*names] == ["2.weight", "2.bias", "2._extra_state"]
        assert "2._extra_state" not in engine.full_state_dict(trained=True, rank0_only=False)
        zs.save(folder, engine, step=1)
        first.extra = second.extra = None
    told = zs.load(folder, engine)
    assert first.extra["steps"] == 3 and first.extra["of"] == ("a", torch.tensor(1.0))
    assert torch.equal(first.extra["amax"], torch.arange(6.0).view(2, 3))
    assert second.extra.tolist() == [rank if world == 2 else 0]  # other ranks: the first one's
    assert not any("extra state" in one for one in told.skipped), told.skipped
    second.extra = {"scale": object()}
    with pytest.raises(zs.CheckpointError, match=r"\._extra_state\.scale is a object, which"):
        zs.save(folder, engine, step=2)
    engine.close()


@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (3, "bf16")])
def test_extra_states_of_modules_are_saved_loaded_and_exported(
    stage: int, precision: str, tmp_path: Path
) -> None:
    for world in (2, 3):
        run_ranks(world, _extra_states, tmp_path, stage, precision)
    for name in ("out.pt", "out"):
        export(tmp_path / "step-0000000001", tmp_path / name, "torch" if name == "out.pt" else "hf")
    state = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert state["1._extra_state"]["of"] == ("a", torch.tensor(1.0))
    assert state["2._extra_state"].tolist() == [0]
    model, _ = _counting()
    model.load_state_dict(state)
    assert _layers(model)[0].extra["steps"] == 3


def _without_extra_states(rank: int, world: int, folder: Path) -> None:
    model, optimizer = _counting()
    plain = nn.Sequential(nn.Linear(4, 4), checkpoint_wrapper(nn.Linear(4, 4)), nn.Linear(4, 4))
    engine = zs.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.1), stage=3)
    zs.save(folder, engine, step=1)
    engine.close()
    engine = zs.shard(model, optimizer, stage=3)
    _layers(model)[0].extra = "kept"
    told = zs.load(folder, engine)
    assert _layers(model)[0].extra == "kept"
    assert sorted(told.skipped) == [
        f"the extra state {name!r} is not in the checkpoint" for name in EXTRA
    ]
    zs.save(folder, engine, step=2)
    engine.close()
    engine = zs.shard(plain, torch.optim.SGD(plain.parameters(), lr=0.1), stage=3)
    told = zs.load(folder, engine)
    assert sorted(told.skipped) == [
        f"the extra state {name!r} is of no module here" for name in EXTRA
    ]
    engine.close()


def test_checkpoints_and_models_without_extra_states_fit_those_with_them(tmp_path: Path) -> None:
    run_ranks(2, _without_extra_states, tmp_path)
    manifests = [(tmp_path / f"step-{n:010d}" / "manifest.json").read_text() for n in (1, 2)]
    assert ["extra_state" in text for text in manifests] == [False, True]
