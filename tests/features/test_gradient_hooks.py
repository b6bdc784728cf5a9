"""Hooks on gradients, the user's own, and editing the optimizer's state in place: as under DDP,
or refused by name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard as zs
from tests.support.covering import by_pairs
from tests.support.harness import on_ranks
from tests.support.training import (
    ROWS,
    TRANSPORTS,
    Run,
    batch,
    final_state,
    make_model,
    make_sharded,
    take_steps,
    two_groups,
    wrapped,
)
from zeroshard.errors import StateError

Train = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def _run(
    rank: int,
    kind: str,
    transport: str,
    before: Callable[[nn.Module, list[str]], None],
    after: Callable[..., None],
) -> tuple[Run, list[str]]:
    """Train five steps; `before` and `after` hang hooks on the model before and after it is
    sharded, which write to a log.
    """
    model, log = make_model(), []
    before(model, log)
    optimizer = two_groups(model)
    comm = zs.Comm.model_validate({"transport": transport})
    module, engine = wrapped(model, optimizer, kind, comm=comm)
    after(model, log)
    losses = take_steps(rank, 5, module, optimizer)
    return Run(losses, final_state(model, engine)), log


def _nothing(model: nn.Module, log: list[str]) -> None:
    pass


def _halved(model: nn.Module, log: list[str]) -> None:
    """Each parameter's gradient is noted and halved; two hooks on one parameter run in their
    order.
    """

    def hook_for(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def hook(grad: torch.Tensor) -> torch.Tensor:
            log.append(f"{name} {tuple(grad.shape)} {grad.double().sum().item()!r}")
            return grad * 0.5

        return hook

    for name, parameter in model.named_parameters():
        parameter.register_hook(hook_for(name))
    model.head.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


def _observed(model: nn.Module, log: list[str]) -> None:
    """What this rank has computed, before the ranks' gradients meet."""
    for name, parameter in model.named_parameters():

        def hook(parameter: torch.Tensor, name: str = name) -> None:
            log.append(
                f"{name} {tuple(parameter.grad.shape)} {parameter.grad.double().sum().item()!r}"
            )

        parameter.register_post_accumulate_grad_hook(hook)


HOOKS = {
    "before": (_halved, _nothing),
    "after": (_nothing, _halved),
    "seen": (_observed, _nothing),
    "both": (_halved, _halved),
}


@by_pairs({"hooks": tuple(HOOKS), "row": ROWS, "transport": TRANSPORTS}, slow_by="hooks")
@on_ranks(2)
def test_hooks_on_gradients_see_and_change_what_they_do_under_ddp(
    rank: int, cases: list[dict[str, str]]
) -> None:
    @functools.cache
    def by_ddp(hooks: str) -> tuple[Run, list[str]]:
        return _run(rank, "torch-ddp", "auto", *HOOKS[hooks])

    out = {}
    for case in cases:
        hooks, row, transport = case.values()
        reference, expected = by_ddp(hooks)
        assert len(expected) >= 5 * len(reference.state)
        run, log = _run(rank, row, transport, *HOOKS[hooks])
        out[", ".join(case.values())] = run.differs_from(reference) + (
            [] if sorted(log) == sorted(expected) else ["log"]
        )
    assert not any(out.values()), out


@pytest.mark.parametrize("row", ROWS)
def test_a_hook_that_comes_after_ours_finds_a_sealed_gradient(row: str) -> None:
    model, optimizer, engine = make_sharded(row)
    weight = model.blocks[1].up.weight
    alone = torch.optim.SGD([weight], lr=1.0)
    seen = []
    handle = weight.register_post_accumulate_grad_hook(
        lambda parameter: seen.append(tuple(parameter.grad.shape))
    )
    for step in range(2):
        (model(*batch(0, step)) + model(*batch(0, step + 1))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen and set(seen) == {tuple(weight.shape)}
    handle.remove()
    # a step inside the backward, of an optimizer that nobody sharded
    handle = weight.register_post_accumulate_grad_hook(lambda parameter: alone.step())
    with pytest.raises(
        StateError,
        match=(
            r"the gradient of 'blocks.1.up.weight' rests sharded .*step only an optimizer that was"
            r" given to zs.shard"
        ),
    ):
        model(*batch(0, 0)).backward()
    handle.remove()
    engine.reset()
    model(*batch(0, 0)).backward()
    optimizer.step()
    engine.close()


# ---------------------------------------------------------------------------- the optimizer's state


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_the_optimizers_state_and_options_may_be_edited_in_place(rank: int, row: str) -> None:
    runs = {}
    for kind in ("torch-ddp", row):
        model = make_model()
        optimizer = two_groups(model)
        engine = None if kind == "torch-ddp" else zs.shard(model, optimizer, policy=kind)
        module = DistributedDataParallel(model) if engine is None else model
        for step in range(6):
            take_steps(rank, [step], module, optimizer)
            if step == 2:  # restart the second moments, and halve the first
                for state in optimizer.state.values():
                    state["exp_avg"].mul_(0.5)
                    state["exp_avg_sq"].zero_()
                    state["step"].fill_(1.0)
            if step == 3:
                optimizer.state.clear()  # as some schedules with restarts do
            if step == 4:
                optimizer.param_groups[0].update(lr=3e-3, betas=(0.8, 0.95), weight_decay=0.3)
        runs[kind] = Run(
            [],
            (
                {k: v.clone() for k, v in model.state_dict().items()}
                if engine is None
                else engine.full_state_dict(rank0_only=False)
            ),
        )
        if engine is not None:
            engine.close()
    found = runs[row].differs_from(runs["torch-ddp"])
    assert found == []


def _steps_in_the_backward(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


def _clears(parameter: torch.Tensor) -> None:
    parameter.grad = None


@pytest.mark.parametrize("row", ["zero1", "zero3"])
@on_ranks(2)
def test_a_hook_that_steps_or_clears_inside_the_backward_is_told_by_name(
    rank: int, row: str
) -> None:
    for hook in (_steps_in_the_backward, _clears):
        model = make_model()
        optimizer = two_groups(model)
        handle = model.head.weight.register_post_accumulate_grad_hook(hook)
        engine = zs.shard(model, optimizer, policy=row)
        with pytest.raises(
            StateError,
            match=r"a hook on parameter 'head\.weight', set before .*has taken its gradient",
        ):
            model(*batch(rank, 0)).backward()
        handle.remove()
        engine.reset()
        model(*batch(rank, 0)).backward()
        optimizer.step()
        engine.close()
