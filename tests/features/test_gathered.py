"""``engine.gathered()``: full parameters inside, edits kept with `writeback`, hooks of the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support import inside
from tests.support.covering import by_pairs
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import (
    ROWS,
    TRANSPORTS,
    batch,
    equal,
    make_model,
    make_sharded,
    take_steps,
    two_groups,
)
from zeroshard.errors import StateError
from zeroshard.runtime.engine import states_of


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_gathered_with_writeback_keeps_rank_0s_edits_or_equal_ones_and_refuses_others(
    rank: int, row: str
) -> None:
    model, optimizer, engine = make_sharded(row)
    take_steps(rank, 1, model, optimizer)
    before = engine.full_state_dict(rank0_only=False)
    with engine.gathered(writeback=True), torch.no_grad():
        if rank == 0:
            model.head.weight.mul_(2.0)  # one rank's
        model.norm.bias.fill_(0.25)  # everybody's
        model.embed.weight.data[3] = 1.0  # everybody's, through .data
    after = engine.full_state_dict(rank0_only=False)
    expected = {
        **before,
        "head.weight": 2 * before["head.weight"],
        "norm.bias": torch.full_like(before["norm.bias"], 0.25),
    }
    expected["embed.weight"] = before["embed.weight"].clone()
    expected["embed.weight"][3] = 1.0
    assert equal(after, expected), row
    differently = pytest.raises(
        StateError, match=r"parameter 'head.weight' was edited differently on ranks 0 and \[1\]"
    )
    with differently, engine.gathered(writeback=True), torch.no_grad():
        model.head.weight.mul_(float(rank + 2))
    assert equal(engine.full_state_dict(rank0_only=False), expected), row
    with (
        pytest.raises(StateError, match="was edited differently"),
        engine.gathered(model.head.weight, writeback=True),
        torch.no_grad(),
    ):
        if rank == 1:
            model.head.weight.zero_()
    assert equal(engine.full_state_dict(rank0_only=False), expected), row
    take_steps(rank, [1], model, optimizer)
    engine.close()


@pytest.mark.parametrize(
    "offload", [zs.Offload(), zs.Offload(optimizer="host")], ids=["device", "host"]
)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_writeback_leaves_the_masters_of_what_was_not_edited(
    stage: int, offload: zs.Offload
) -> None:
    model = make_model()
    engine = zs.shard(model, two_groups(model), stage=stage, precision="bf16", offload=offload)

    def masters() -> dict[str, torch.Tensor]:
        found = {}
        for piece in states_of(engine).resting_pieces():
            with piece.borrowed() as numbers:
                found[piece.name] = numbers.clone()
        return found

    before = masters()
    assert not torch.equal(before["head.weight"], before["head.weight"].bfloat16().float()), (
        "bf16 cannot hold them"
    )
    with engine.gathered(writeback=True), torch.no_grad():
        model.norm.bias.fill_(2.0)
    after = masters()
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["norm.bias"]
    assert bool((after["norm.bias"] == 2.0).all())
    engine.close()


def _edit(model: Any, rank: int) -> None:
    """Every rank its own edits, in every way."""
    with torch.no_grad():
        model.head.weight.mul_(rank + 2.0)
        model.embed.weight.data.add_(0.5)  # counts no version
        model.norm.bias.data = model.norm.bias.data + rank  # other memory
        model.blocks[0].load_state_dict(model.blocks[1].state_dict())


def _discarded(rank: int, world: int, transport: str, row: str, options: dict[str, Any]) -> None:
    losses = []
    for edits in (False, True):
        model, optimizer, engine = make_sharded(row, transport, **options)
        for step in range(3):
            before = engine.full_state_dict(rank0_only=False)
            loss = model(*batch(rank, step))
            if edits:  # between the forward and the backward, which reads the weights
                with engine.gathered([model.head.weight], discard=True):
                    model.head.weight.data.zero_()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            after = engine.full_state_dict(rank0_only=False)
            if edits:
                with engine.gathered(discard=True):
                    _edit(model, rank)
                    head = model.head.weight.clone()
                    assert not torch.equal(model.norm.bias, after["norm.bias"]) or rank == 0
                    with torch.no_grad():
                        model(*batch(rank, step))  # generates with them
                    with engine.gathered(model.embed.weight, discard=True), torch.no_grad():
                        model.embed.weight.zero_()
                    assert torch.equal(model.head.weight, head), "beside another such context"
                _same_state(engine, after)
            assert not equal(before, after)
        engine.close()
    assert losses[:3] == losses[3:]


def _same_state(engine: zs.Engine, expected: dict[str, torch.Tensor]) -> None:
    assert equal(engine.full_state_dict(rank0_only=False), expected)


DISCARDS: list[tuple[str, dict[str, Any]]] = [
    ("zero1", {}), ("zero1", {"precision": "bf16"}), ("zero2", {"precision": "bf16"}),
    ("zero3", {}), ("zero3", {"precision": "bf16"}), ("zero3-keep", {}), ("ddp", {}),
    ("zero3", {"offload": zs.Offload(weight="host", optimizer="host")}),
]  # fmt: skip


@by_pairs(
    {"way": tuple(range(len(DISCARDS))), "world": (1, 2), "transport": TRANSPORTS},
    slow_by="transport",
)
def test_edits_inside_gathered_with_discard_are_each_ranks_own_and_end_with_it(
    cases: list[dict[str, Any]],
) -> None:
    for case in cases:
        run_ranks(case["world"], _discarded, case["transport"], *DISCARDS[case["way"]])


def _kept_beside_discarded(rank: int, world: int, transport: str, row: str) -> None:
    model, _, engine = make_sharded(row, transport)
    expected = engine.full_state_dict(rank0_only=False)
    with engine.gathered(discard=True), torch.no_grad():
        model.norm.bias.fill_(float(rank))
        model.head.weight.zero_()
        with engine.gathered(model.head.weight, writeback=True):
            assert torch.equal(model.head.weight, expected["head.weight"])
            if rank == 0:
                model.head.weight.fill_(3.0)
        assert (model.head.weight == 3.0).all(), "the numbers that were kept"
        model.head.weight.fill_(4.0)
    _same_state(engine, {**expected, "head.weight": torch.full_like(model.head.weight, 3.0)})
    with pytest.raises(zs.ConfigError, match="kept, or dropped"):
        engine.gathered(writeback=True, discard=True)
    engine.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_writeback_inside_discard_keeps_its_own_edits_alone(transport: str) -> None:
    for row in ("zero1", "zero3"):
        run_ranks(2, _kept_beside_discarded, transport, row)


def test_users_hooks_run_inside_gathered_and_ours_come_back_after_it() -> None:
    model, optimizer, engine = make_sharded()
    seen: list[str] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(type(module).__name__)
        if len(seen) > 3:
            raise RuntimeError("enough")

    hook = model.blocks[1].up.register_forward_hook(note)
    x, _ = batch(0, 0)
    with engine.gathered(), torch.no_grad():
        expected = model(x)
        assert torch.equal(model(x), expected) and torch.equal(
            model.blocks[0](torch.ones(2, 19)), model.blocks[0](torch.ones(2, 19))
        )
        assert seen == ["Linear", "Linear"]
        model(x)
        with pytest.raises(RuntimeError, match="enough"):
            model(x)
    hook.remove()
    with torch.no_grad():
        assert torch.equal(model(x), expected)  # gathered by our hooks again
    take_steps(0, 1, model, optimizer)
    engine.close()


# what people keep of a weight
KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "numpy": lambda weight: weight.numpy(),
    "dlpack": lambda weight: np.from_dlpack(weight),
    "view": lambda weight: weight[:3],
    "shared": lambda weight: weight.share_memory_(),
}


def _kept(model: Any, engine: zs.Engine, how: str) -> tuple[Any, list[Any]]:
    with engine.gathered():
        weight = KEPT[how](model.blocks[1].up.weight.detach())
    return weight, weight.tolist()


def _numbers_kept(rank: int, world: int, transport: str, how: str) -> None:
    losses = []
    kept: list[tuple[Any, list[Any]]] = []
    for keeps in (False, True):
        model, optimizer, engine = make_sharded(transport=transport)
        for step in range(3):
            loss = model(*batch(rank, step))
            if keeps:  # a graph refers to the weights, too
                kept.append(_kept(model, engine, how))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if keeps:
                kept.append(_kept(model, engine, how))
            losses.append(loss.item())
        if transport == "gloo":  # elsewhere what is kept is the live weight
            assert all(value.tolist() == then for value, then in kept), how
        engine.close()
    assert losses[:3] == losses[3:]


@pytest.mark.parametrize("how", KEPT)
def test_what_is_kept_of_a_weight_lives_on_while_the_engine_trains(how: str) -> None:
    for transport in TRANSPORTS:
        run_ranks(2, _numbers_kept, transport, how)


@on_ranks(2)
def test_memory_that_an_array_holds_is_left_to_it_alone(rank: int) -> None:
    model, _, engine = make_sharded(transport="gloo")
    weight = inside.unit(engine, "blocks.1").segments[0].flat
    with engine.gathered():
        array = model.blocks[1].up.weight.detach().numpy()
        storage = weight.full.untyped_storage()._cdata
    assert weight.full.untyped_storage()._cdata != storage
    assert not weight.full.untyped_storage().nbytes(), "the next gather takes other memory"
    with engine.gathered():
        assert np.array_equal(model.blocks[1].up.weight.detach().numpy().copy(), array)
    del array
    storage = weight.full.untyped_storage()._cdata
    with engine.gathered():
        assert model.blocks[1].up.weight.sum()
    loss = model(*batch(rank, 0))
    assert engine.full_state_dict(rank0_only=False)
    assert weight.full.untyped_storage()._cdata == storage, "nothing was kept"
    loss.backward()
    engine.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_saved_tensors_may_be_packed_by_numpy(rank: int, transport: str) -> None:
    losses = []
    for packs in (False, True):
        model, optimizer, engine = make_sharded(transport=transport)
        for step in range(3):
            with torch.autograd.graph.saved_tensors_hooks(
                (lambda t: t.detach().numpy().copy()) if packs else (lambda t: t), torch.as_tensor
            ):
                loss = model(*batch(rank, step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        engine.close()
    assert losses[:3] == losses[3:]


def _offloaded_after_numpy(rank: int, world: int, row: str, transport: str) -> None:
    losses = []
    for keeps in (False, True):
        model, optimizer, engine = make_sharded(row, transport)
        kept = []
        for step in range(3):
            losses += take_steps(rank, [step], model, optimizer)
            if keeps:
                with engine.gathered():
                    kept.append(model.blocks[1].up.weight.detach().numpy())
            engine.offload_states()
            engine.reload_states()
        engine.close()
    assert losses[:3] == losses[3:]


@pytest.mark.parametrize("row", ["zero1", "zero3"])
def test_states_of_weights_that_numpy_has_seen_are_offloaded_and_come_back(row: str) -> None:
    for transport in TRANSPORTS:
        run_ranks(2, _offloaded_after_numpy, row, transport)
