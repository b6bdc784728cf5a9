"""What the host does not read (runtime/late_finalize.py): steps of which some are not finite have
the bits of a loop that reads each, on the pretended device, in which reads are counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.device.programs import DEVICE, FIFO, set_schedule
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import ROWS, batch, logged, make_model, two_groups
from zeroshard.memory import Mark
from zeroshard.optim.several import JointOptimizer
from zeroshard.runtime import assembly

STEPS = 6


def _two(model: nn.Module) -> torch.optim.Optimizer:
    """Return two optimizers as one."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    return JointOptimizer([
        torch.optim.AdamW(matrices, lr=1e-2, fused=True),
        torch.optim.Adam(others, lr=5e-3, fused=True, amsgrad=True),
    ])  # fmt: skip


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: two_groups(model, torch.optim.AdamW, fused=True),
    "amsgrad": lambda model: two_groups(model, torch.optim.Adam, fused=True, amsgrad=True),
    "momentum": lambda model: two_groups(model, torch.optim.SGD, fused=True, momentum=0.9),
    "sgd": lambda model: two_groups(model, torch.optim.SGD, fused=True),
    "foreach": lambda model: two_groups(model, torch.optim.AdamW, foreach=True),
    "rmsprop": lambda model: two_groups(model, torch.optim.RMSprop),
    "two": _two,
}
Found = dict[str, Any]


def _states(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return moments and counters, on the host."""
    held = [one for group in optimizer.param_groups for one in group["params"]]
    states = [optimizer.state.get(one, {}) for one in held]
    return [
        {
            key: value.cpu() if isinstance(value, torch.Tensor) else value
            for key, value in one.items()
        }
        for one in states
    ]


def _waits_of(found: Found, bad: tuple[int, ...] = ()) -> list[tuple[int, int]]:
    """Return the waits up to the clip, and of each step, but for `bad` ones: one that is read is
    searched for the parameter.
    """
    waits = found.pop("waits")
    return [pair for step, pair in enumerate(waits) if step not in bad]


def _waits() -> int:
    from tests.device import zsim

    # torch has no meta kernel of SGD's, so that the pretended device waits to run it
    told = zsim.host_waits()
    return sum(told.values()) - told.get("aten::_fused_sgd_", 0)


def _ask(engine: zs.Engine, model: Any, step: int) -> list[torch.Tensor]:
    """Ask in several orders for what a step looks at; return the norms."""
    head = model.head.weight
    if step % 3 == 1:  # averages are there before the norm is asked for
        whole = engine.full_grad(head)
        assert whole is not None
        return [whole.norm(), engine.clip_grad_norm_(0.7), engine.clip_grad_norm_(0.6)]
    if step % 3 == 2:  # and are set by hand
        return [engine.clip_grad_norm_(math.inf), *_set(engine, head, step)]
    return []


def _set(engine: zs.Engine, head: nn.Parameter, step: int) -> list[torch.Tensor]:
    """Set a gradient that is not finite, and mend it in one of two steps."""
    state = zs.ParameterStates(engine, head)
    numbers = torch.full(head.shape, 0.01, device=DEVICE)
    state.set_grad(numbers * math.nan)
    norm = engine.clip_grad_norm_(math.inf)
    if step == 2:
        state.set_grad(numbers)
    return [norm]


def _train(
    rank: int,
    world: int,
    row: str,
    kind: str,
    bad: tuple[int, ...],
    late: bool,
    options: dict[str, Any],
    weight: float | None = None,
    asks: bool = False,
) -> Found:
    """Train for `STEPS` steps, of which those in `bad` have a loss that is NaN on the last rank."""
    set_schedule(FIFO)
    norms, waits = [], []
    serves = assembly.serves if late else lambda *_: False
    with mock.patch.object(assembly, "serves", serves):
        model = make_model(width=32).to(DEVICE)
        optimizer = OPTIMIZERS[kind](model)
        engine = zs.shard(model, optimizer, policy=row, **options)
    data = [[tokens.to(DEVICE) for tokens in batch(rank, step)] for step in range(STEPS)]
    factors = [math.nan if s in bad and rank == world - 1 else 1.0 for s in range(STEPS)]
    extra = []
    for step, ((x, y), factor) in enumerate(zip(data, factors, strict=True)):
        before = _waits()
        engine.backward(model(x, y) * factor, weight=weight)
        if asks:
            extra += _ask(engine, model, step)
        norms.append(engine.clip_grad_norm_(0.5))
        clipped = _waits()
        optimizer.step()
        optimizer.zero_grad()
        waits.append((clipped - before, _waits() - clipped))
    found = {
        "weights": engine.full_state_dict(rank0_only=False),
        "states": _states(optimizer),
        "norms": torch.stack([one.cpu() for one in (*norms, *extra)]),
        "skipped": engine.steps_skipped,
        "scale": engine.loss_scale,
        "waits": waits,
    }
    engine.close()
    return found


def _same(here: Any, there: Any) -> bool:
    if isinstance(here, dict):
        return here.keys() == there.keys() and all(_same(here[key], there[key]) for key in here)
    if isinstance(here, list):
        return len(here) == len(there) and all(map(_same, here, there))
    if isinstance(here, torch.Tensor):
        return torch.equal(here.isnan(), there.isnan()) and torch.equal(
            here.nan_to_num(), there.nan_to_num()
        )
    return bool(here == there)


def _both(world: int, *case: Any, **options: Any) -> list[tuple[Found, Found]]:
    """Return what each rank finds, with and without a read."""
    row, kind, bad, given, *rest = case
    ran = [
        run_ranks(world, _train, row, kind, bad, late, given, *rest, device="tests.device.zsim")
        for late in (True, False)
    ]
    return list(zip(*ran, strict=True))


@pytest.mark.parametrize("kind", list(OPTIMIZERS))
@pytest.mark.parametrize("world", [1, 2])
def test_steps_that_are_not_finite_leave_the_bits_of_a_loop_that_reads(
    world: int, kind: str
) -> None:
    for late, read in _both(world, "zero3", kind, (0, 3), {"precision": "bf16"}):
        takes_found_inf = kind not in ("foreach", "rmsprop")
        # SGD's kernel makes the device run, so that the step after a bad one hears of it, and
        # reads; the momenta of a first step are yet to be made
        bad = {"sgd": (1, 4), "momentum": (0, 1, 4)}.get(kind, () if takes_found_inf else (0, 3))
        waits = set(_waits_of(late, bad))
        assert waits == {(0, 0) if takes_found_inf else (0, 1)}
        assert set(_waits_of(read, (0, 3))) == {(1, 0)}
        assert late["skipped"] == 2 and _same(late, read)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_them(row: str) -> None:
    for late, read in _both(2, row, "adamw", (2,), {"precision": "fp32"}):
        assert set(_waits_of(late)) == {(0, 0)} and set(_waits_of(read, (2,))) == {(1, 0)}
        assert late["skipped"] == 1 and _same(late, read)


@pytest.mark.parametrize("shares", [None, [0.25, 0.75]])
def test_norms_are_asked_for_anywhere_and_averages_are_set(shares: list[float] | None) -> None:
    options = {"precision": "fp32"} | ({} if shares is None else {"shares": shares})
    for late, read in _both(2, "zero3", "adamw", (1,), options, None, True):
        assert late["skipped"] == 2  # the first, and one that is set and not mended
        late.pop("waits"), read.pop("waits")
        assert _same(late, read)


def test_the_next_scale_of_fp16_is_one_read() -> None:
    for late, read in _both(2, "zero3", "adamw", (1, 4), {"precision": "fp16"}):
        assert set(_waits_of(late, (1, 4))) == {(0, 1)}
        assert set(_waits_of(read, (1, 4))) == {(1, 0)}
        assert late["skipped"] >= 2 and _same(late, read)


def test_masters_that_are_decoded_are_read_in_the_step() -> None:
    precision = zs.Precision("bf16", master="remainder")  # type: ignore[arg-type]
    for late, read in _both(2, "zero3", "adamw", (1, 4), {"precision": precision}):
        late.pop("waits"), read.pop("waits")
        assert late["skipped"] == 2 and _same(late, read)


def test_weights_of_losses_are_no_read() -> None:
    for late, read in _both(2, "zero3", "adamw", (2,), {"precision": "bf16"}, 3.0):
        assert set(_waits_of(late)) == {(0, 0)} and set(_waits_of(read, (2,))) == {(2, 0)}
        assert late["skipped"] == 1 and _same(late, read)


def _in_a_row(rank: int, world: int, ahead: tuple[int, ...]) -> tuple[int, str, int, list[str]]:
    """Return in which step bad ones in a row end, by what error, how many were skipped, and the
    warnings. The devices of ranks `ahead` have done everything before a step; others tell nothing.
    """
    set_schedule(FIFO)
    model = make_model(width=32).to(DEVICE)
    optimizer = OPTIMIZERS["adamw"](model)
    engine = zs.shard(model, optimizer, policy="zero3")
    block: Any = model.blocks[1]
    block.up.weight.register_hook(lambda grad: grad * (math.nan if step > 1 else 1.0))
    hears = nullcontext() if rank in ahead else mock.patch.object(Mark, "done", lambda mark: False)
    error = ""
    try:
        with logged() as told, hears:
            for step in range(8):
                engine.backward(model(*(tokens.to(DEVICE) for tokens in batch(rank, step))))
                if rank in ahead:
                    torch.accelerator.synchronize()
                engine.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
    except zs.StateError as raised:
        error = str(raised)
    finally:
        engine.reset()
    skipped = engine.steps_skipped
    engine.close()
    return step, error, skipped, told


@pytest.mark.parametrize("world", [1, 2])
def test_three_in_a_row_end_in_the_same_step_and_name_the_step_and_the_parameter(
    world: int,
) -> None:
    for rank, (step, error, skipped, told) in enumerate(
        run_ranks(world, _in_a_row, (0, 1), device="tests.device.zsim")
    ):
        assert step == 4 and error.startswith("3 steps in a row"), (step, error)
        assert "parameter 'blocks.1.up.weight'" in error and skipped == 3
        if not rank:
            assert "step 2 skipped, as is seen in step 3: a gradient of unit" in told[0]
            assert "step 3 skipped: the gradient of blocks.1.up.weight is not finite" in told[1]


def test_what_one_rank_hears_first_is_counted_when_all_have() -> None:
    first, second = run_ranks(2, _in_a_row, (0,), device="tests.device.zsim")
    assert first == second == (7, "", 6, [])


@on_ranks(2, device="tests.device.zsim")
def test_what_the_host_has_yet_to_hear_survives_a_reset(rank: int) -> None:
    """A rank asks at several places how many steps were skipped."""
    set_schedule(FIFO)
    model = make_model(width=32).to(DEVICE)
    optimizer = OPTIMIZERS["adamw"](model)
    engine = zs.shard(model, optimizer, policy="zero3")
    out = []
    for step in range(4):
        x, y = (tokens.to(DEVICE) for tokens in batch(rank, step))
        engine.backward(model(x, y) * (math.nan if step == 1 else 1.0))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            if not rank:  # a read of one rank's own changes nothing for the others
                out.append(engine.steps_skipped)
            engine.reset()
        out.append(engine.steps_skipped)
    assert not hasattr(optimizer, "found_inf")
    engine.close()
    assert out == ([0, 1, 1, 1, 1], [0, 1, 1, 1])[rank]
