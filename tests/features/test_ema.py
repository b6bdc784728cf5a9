"""The sharded moving average beside torch's AveragedModel over DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zeroshard as zs
from tests.support.harness import on_ranks
from tests.support.training import (
    ROWS,
    TRANSPORTS,
    batch,
    differences,
    final_state,
    make_model,
    make_sharded,
    take_steps,
    two_groups,
)
from zeroshard import ConfigError, StateError
from zeroshard.runtime.engine import states_of

DECAY, STEPS = 0.9, 5


def _reference(rank: int) -> tuple[dict[str, torch.Tensor], list[float], dict[str, torch.Tensor]]:
    """Return the averaged weights, the losses evaluated with them after each step, and the
    trained weights.
    """
    model = make_model()
    runs, optimizer, losses = DistributedDataParallel(model), two_groups(model), []
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    averaged.update_parameters(model)  # the first update copies
    for step in range(STEPS):
        take_steps(rank, [step], runs, optimizer)
        averaged.update_parameters(model)
        with torch.no_grad():
            losses.append(averaged.module(*batch(7, step)).item())
    return dict(averaged.module.state_dict()), losses, dict(model.state_dict())


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_the_average_and_the_training_beside_it_are_torchs_to_the_bit(
    rank: int, transport: str
) -> None:
    averages, losses, trained = _reference(rank)
    for row in ROWS:
        model, optimizer, engine = make_sharded(row, transport)
        ema = zs.EMA(engine, DECAY)
        ours = []
        for step in range(STEPS):
            take_steps(rank, [step], model, optimizer)
            engine.reset_traffic()
            ema.update()
            assert engine.traffic().total == 0, "an update sends nothing"
            with ema.swapped(), torch.no_grad():
                ours.append(model(*batch(7, step)).item())
        assert ours == losses, (row, ours, losses)
        with ema.swapped():
            state = engine.full_state_dict(rank0_only=False)
        assert not (found := differences(state, averages, row, "torch's averages")), found
        state = engine.full_state_dict(rank0_only=False)
        assert not (found := differences(state, trained, row, "torch's model")), found
        whole = 4 * sum(p.numel() for p in model.parameters())
        assert ema.bytes < (whole if row == "ddp" else whole / 2) * 1.2
        engine.close()


@on_ranks(2)
def test_bf16_averages_its_fp32_masters(rank: int) -> None:
    states = []
    for row in ("zero1", "zero3"):
        model, optimizer, engine = make_sharded(row, precision="bf16")
        ema = zs.EMA(engine, DECAY)
        for step in range(3):
            take_steps(rank, [step], model, optimizer)
            ema.update()
            with ema.swapped(), torch.no_grad():
                model(*batch(7, step))
        states.append(final_state(model, engine))
    assert all(torch.equal(states[0][name], value) for name, value in states[1].items())


def test_misuse_is_refused() -> None:
    model = make_model()
    engine = zs.shard(model)
    with pytest.raises(ConfigError, match="EMA needs an engine with an optimizer"):
        zs.EMA(engine)
    optimizer = two_groups(model)
    engine.attach(optimizer)
    with pytest.raises(ConfigError, match=r"decay=1.0 is not in \[0, 1\)"):
        zs.EMA(engine, 1.0)
    ema = zs.EMA(engine)
    loss, later = model(*batch(0, 0)), model(*batch(0, 1))
    with ema.swapped():
        for backward in (loss.backward, model(*batch(0, 0)).backward):
            with pytest.raises(StateError, match=r"train, .* outside EMA\.swapped\(\)"):
                backward()
        with pytest.raises(StateError, match=r"step outside EMA\.swapped\(\)"):
            optimizer.step()
    with pytest.raises(StateError, match="backward through unit"):
        later.backward()
    engine.close()


@on_ranks(2)
def test_the_average_gives_gradients_of_its_inputs() -> None:
    def make() -> torch.nn.Sequential:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zs.shard(model, optimizer, stage=3)
    ema = zs.EMA(engine, 0.5)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    x = torch.ones(2, 4, requires_grad=True)
    with ema.swapped():
        (guided,) = torch.autograd.grad(model(x).sum(), x)
        state = engine.full_state_dict(rank0_only=False)
    plain = make()
    plain.load_state_dict(state)
    (expected,) = torch.autograd.grad(plain(x).sum(), x)
    assert torch.equal(guided, expected)
    engine.close()


def _boom(*args: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("transport", [*TRANSPORTS, "nccl"])
@on_ranks(2, timeout=60)
def test_a_backward_that_fails_and_a_reset_leave_no_trace_in_the_average(
    rank: int, transport: str
) -> None:
    """Average with and without steps whose backward raises in the middle, on every rank;
    compare.
    """
    out = {}
    for row in ROWS:
        averages, trained = [], []
        for fails in (False, True):
            model, optimizer, engine = make_sharded(row, transport)
            ema = zs.EMA(engine, DECAY)
            for step in range(3):
                if fails:
                    handle = model.blocks[1].register_full_backward_pre_hook(_boom)
                    with pytest.raises((ZeroDivisionError, StateError)):
                        model(*batch(rank, step + 10)).backward()
                    handle.remove()
                    engine.reset()
                take_steps(rank, [step], model, optimizer)
                ema.update()
            with ema.swapped():
                averages.append(engine.full_state_dict(rank0_only=False))
            trained.append(final_state(model, engine))
        out[row] = differences(*averages, row) + differences(*trained, row)
    assert not any(out.values()), out


@pytest.mark.parametrize(
    "at", ["before entering", "after entering", "before leaving", "after leaving"]
)
@on_ranks(2)
def test_a_swap_that_fails_keeps_both_and_trains_no_average(rank: int, at: str) -> None:
    """End a swap by an exception: before or after the masters are exchanged, at its beginning or
    its end.
    """
    model, optimizer, engine = make_sharded("zero1")
    ema = zs.EMA(engine, DECAY)
    take_steps(rank, 1, model, optimizer)
    rest = states_of(engine).rest
    trained = [master.clone() for master in rest.masters()]
    averages = [average.clone() for average in ema.averages]
    assert not torch.equal(trained[0], averages[0])
    name = "before_writing" if "before" in at else "publish"
    method, calls = getattr(rest, name), list[int]()

    def failing(**options: Any) -> None:
        calls.append(0)
        if len(calls) == (2 if "leaving" in at else 1):
            raise RuntimeError("planned")
        method(**options)

    setattr(rest, name, failing)
    with pytest.raises(RuntimeError, match="planned"), ema.swapped():
        assert "leaving" in at
    setattr(rest, name, method)
    assert all(torch.equal(*pair) for pair in zip(rest.masters(), trained, strict=True))
    assert all(torch.equal(*pair) for pair in zip(ema.averages, averages, strict=True))
    if at == "before entering":
        model(*batch(rank, 0))
    else:
        with pytest.raises(StateError, match=r"since EMA\.swapped\(\) ended by an exception"):
            model(*batch(rank, 0))
    engine.reset()
    engine.close()
