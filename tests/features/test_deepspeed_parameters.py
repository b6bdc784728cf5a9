"""DeepSpeed's parameters and their states under the stand-in: ``engine.optimizer.state`` wherever
it rests, edits of gathered parameters, and ``initialize()`` inside ``zero.Init()``.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.harness import PLAIN, run_ranks
from tests.support.training import batch, make_model
from zeroshard.deepspeed import held_parameters as states
from zeroshard.deepspeed import zero
from zeroshard.deepspeed.helpers import logger
from zeroshard.integrations import deepspeed


def _config(stage: int, **zero_keys: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": stage} | zero_keys,
    }


def _made(stage: int, **zero_keys: Any) -> Any:
    return deepspeed.initialize(model=make_model(layers=1), config=_config(stage, **zero_keys))[0]


def _step(engine: Any, rank: int, number: int) -> None:
    engine.backward(engine(*batch(rank, number)))
    engine.step()


def _numbers(engine: Any) -> dict[str, torch.Tensor]:
    """This rank's part of the state, in the order of the param groups, and its whole counts."""
    optimizer = engine.optimizer
    tensors = [one for group in optimizer.param_groups for one in group["params"] if one.numel()]
    assert all(one in optimizer.state for one in tensors) and len(optimizer.state) == len(tensors)
    assert {id(one) for one in optimizer.state} == {id(one) for one in tensors}
    return {
        key: torch.cat([optimizer.state[one][key].reshape(-1) for one in tensors])
        for key in ("exp_avg", "exp_avg_sq", "step")
    }


def _same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def _rests(rank: int, world: int, path: str) -> None:
    for stage in (1, 3):
        expected = _made(stage)
        after = []
        for number in range(2):
            _step(expected, rank, number)
            after.append({key: value.clone() for key, value in _numbers(expected).items()})
        for state in expected.optimizer.state.values():
            assert state["exp_avg"].zero_().sum() == 0, "which rests here, and is no copy"
        assert not _numbers(expected)["exp_avg"].any()
        optimizer = expected.optimizer
        expected.destroy()
        with pytest.raises(zs.StateError, match="holds no optimizer's states"):
            len(optimizer.state)
        for device in ("cpu", "nvme"):
            engine = _made(stage, offload_optimizer={"device": device, "nvme_path": path})
            assert len(engine.optimizer.state) == 0
            _step(engine, rank, 0)  # whose end runs into the next forward
            _same(_numbers(engine), after[0])
            engine.save_checkpoint(f"{path}/{stage}{device}")
            _step(engine, rank, 1)
            _same(_numbers(engine), after[1])
            engine.load_checkpoint(f"{path}/{stage}{device}")
            _same(_numbers(engine), after[0])
            _changed_in_place(engine)
            _step(engine, rank, 1)
            _same(_numbers(engine), after[1])
            engine.destroy()


def _changed_in_place(engine: Any) -> None:
    """A copy is not written to, where the write would be lost; what is made of it is plain."""
    state = next(iter(engine.optimizer.state.values()))
    assert type(state["exp_avg"] * 2) is torch.Tensor
    with pytest.raises(zs.StateError, match=r"in a copy: .*safe_set_full_optimizer_state"):
        state["exp_avg"].zero_()
    with pytest.raises(zs.StateError, match="in a copy"):
        torch.add(state["exp_avg"], 1, out=state["exp_avg_sq"])
    with pytest.raises(TypeError, match="item assignment"):
        state["exp_avg"] = torch.zeros(())
    for parameter in engine.module.parameters():
        moment = states.safe_get_full_optimizer_state(parameter, "exp_avg")
        states.safe_set_full_optimizer_state(parameter, moment * 1, "exp_avg")


@pytest.mark.parametrize("world", [1, 2])
def test_the_optimizers_state_is_there_after_a_step_and_a_load_wherever_it_rests(
    world: int, tmp_path: Path
) -> None:
    run_ranks(world, _rests, str(tmp_path))


class _Counting(torch.optim.SGD):
    """A client's optimizer, whose count has a dimension."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["count"] = torch.ones(1)
        return super().step(closure)


def test_a_state_of_an_odd_shape_is_refused_with_the_remedy(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer, config = _Counting(model.parameters(), lr=0.1), _config(1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.backward(engine(torch.ones(4, 4)).sum())
    engine.step()
    with pytest.raises(zs.CheckpointError, match=r"shape \[1\].*let the optimizer keep .*AdamW"):
        engine.save_checkpoint(str(tmp_path))
    engine.destroy()


def _write(weight: torch.Tensor, how: str) -> None:
    with torch.no_grad():
        if how == "in place":
            weight.mul_(2.0)
        elif how == "through data":
            weight.data.fill_(2.0)
        else:
            weight.data = weight.data * 2


WAYS = ("in place", "through data", "in other memory")


def _drops(rank: int, world: int) -> list[str]:
    told, handler = list[str](), logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    zero._told.clear()
    with zero.Init():
        deferred = nn.Linear(4, 4, bias=False)
    with zero.GatheredParameters([deferred.weight, None]):
        values = deferred.weight.tolist()
    for stage in (0, 1, 2, 3):
        engine = _made(stage)
        _step(engine, rank, 0)
        before = engine.module_state_dict()
        weights = [engine.module.head.weight, engine.module.blocks[0].up.weight]
        for how in WAYS:
            with zero.GatheredParameters([*weights, deferred.weight, engine.module.head.bias]):
                if rank == 0 or how == "in place":
                    _write(weights[0], how)
                    _write(deferred.weight, how)
                with zero.GatheredParameters(weights[1], modifier_rank=0):
                    pass
            assert deferred.weight.tolist() == values
            torch.testing.assert_close(engine.module_state_dict(), before, rtol=0, atol=0)
        _step(engine, rank, 1)
        engine.destroy()
    logger.removeHandler(handler)
    return [line for line in told if "modifier_rank" in line]


@pytest.mark.parametrize("world", [1, 2])
def test_an_edit_of_gathered_parameters_without_a_modifier_is_dropped_and_told_once(
    world: int,
) -> None:
    lines, *others = run_ranks(world, _drops)
    assert others == [[]] * (world - 1)
    assert len(lines) == 1 and "was changed inside GatheredParameters without" in lines[0]


def _edits(rank: int, world: int) -> None:
    for stage in (0, 1, 2, 3):
        for how in WAYS:
            engine = _made(stage, enable_sanity_checks=True)
            weights = [engine.module.head.weight, engine.module.blocks[0].up.weight]
            for modifier in (None, 0):
                with zero.GatheredParameters(weights, modifier_rank=modifier):
                    assert all(weight.isfinite().all() for weight in weights)
            with zero.GatheredParameters(engine.parameters()):  # the same numbers
                engine.module.load_state_dict(engine.module.state_dict())
            message = "in-place modification of parameter 'head.weight' inside .*: give modifier_"
            gathered = zero.GatheredParameters(weights)
            with pytest.raises(zs.StateError, match=message), gathered:  # on every rank
                if rank == world - 1:
                    _write(weights[0], how)
            with pytest.raises(ZeroDivisionError), zero.GatheredParameters(weights):
                _ = 1 // 0
            engine.destroy()


@pytest.mark.parametrize(("world", "group"), [(1, ""), (2, PLAIN)])
def test_under_sanity_checks_an_edit_without_a_modifier_is_an_error_on_every_rank(
    world: int, group: str
) -> None:
    run_ranks(world, _edits, device=group)


def test_a_parameter_of_zero_init_has_an_address() -> None:
    with zero.Init():
        model = nn.Sequential(nn.Embedding(50, 768), nn.Linear(768, 400))
    counted = {one.data_ptr(): one.numel() for one in model.parameters()}  # as run_clm.py does
    assert 0 in counted
    assert {one.data_ptr() for one in model.state_dict().values()} == set(counted)


def _inside(rank: int, world: int) -> None:
    dtype = torch.get_default_dtype()
    half = _config(3) | {"bf16": {"enabled": True}}
    with zero.Init(dtype=torch.float64), zero.Init(dtype=torch.bfloat16):
        model = make_model(layers=1)
        engine, *_ = deepspeed.initialize(model=model, config=half)
        assert torch.get_default_dtype() is dtype
        beside = nn.Linear(200, 200)
        assert not zs.nn.is_deferred(beside.weight)
    _step(engine, rank, 0)
    engine.destroy()
    assert torch.get_default_dtype() is dtype
    with zero.Init():
        model = make_model(layers=1)
        with torch.device("cpu"), pytest.raises(zs.ConfigError, match="end both blocks first"):
            deepspeed.initialize(model=model, config=_config(3))


def test_initialize_inside_zero_init_ends_the_block() -> None:
    run_ranks(2, _inside)
