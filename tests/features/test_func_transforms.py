"""torch.func's transforms over a sharded model: plain torch's numbers where the weights stay,
one line on every rank where they are released.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

import zeroshard as zs
from tests.support.harness import on_ranks
from tests.support.training import (
    TRANSPORTS,
    Net,
    batch,
    final_state,
    make_model,
    two_groups,
    wrapped,
)
from zeroshard.errors import StateError

X, Y = batch(0, 0)  # the same on every rank, so that an average is what plain torch has
Program = Callable[[Net], torch.Tensor]


def _per_sample_losses(model: Net) -> torch.Tensor:
    return vmap(lambda x, y: model(x[None], y[None]))(X, Y).sum()


def _tangents(model: Net) -> torch.Tensor:
    value, tangent = jvp(lambda scale: model(X, Y) * scale, (torch.ones(()),), (torch.ones(()),))
    return value + tangent


def _dual_numbers(model: Net) -> torch.Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.ones(2, 19), torch.ones(2, 19))
        value, tangent = torch.autograd.forward_ad.unpack_dual(model.blocks[0](dual))
    return value.sum() + tangent.sum()


def _gradient_by_inputs(model: Net) -> torch.Tensor:
    return grad(lambda h: model.head(model.norm(model.blocks[0](h))).square().sum())(
        torch.ones(2, 19)
    ).sum()


def _per_sample_gradients(model: Net) -> torch.Tensor:
    """Of other weights, as an ensemble or meta-learning has them."""
    values = {name: value.detach() for name, value in make_model().named_parameters()}
    of_one = grad(lambda weights, x, y: functional_call(model, weights, (x[None], y[None])))
    return vmap(of_one, in_dims=(None, 0, 0))(values, X, Y)["head.weight"].sum() + model(X, Y)


PROGRAMS: tuple[Program, ...] = (
    _per_sample_losses,
    _tangents,
    _dual_numbers,
    _gradient_by_inputs,
    _per_sample_gradients,
)


def _numbers(
    program: Program, row: str | None, transport: str, gathered: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    model = make_model()
    optimizer = two_groups(model)
    _, engine = wrapped(model, optimizer, row or "plain", comm=zs.Comm(transport=transport))
    for _ in range(2):
        with engine.gathered() if engine is not None and gathered else nullcontext():
            loss = program(model)
            loss.backward()
        if program is _gradient_by_inputs:  # no parameter has a gradient of it
            model(X, Y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), final_state(model, engine)


@pytest.mark.parametrize(
    ("row", "transport", "gathered"),
    [
        ("ddp", "gloo", False),
        ("zero1", "gloo", False),
        ("zero1", "shared_memory", False),
        ("zero3", "gloo", True),
        ("zero3", "shared_memory", True),
    ],
)
@on_ranks(2)
def test_transforms_give_plain_torchs_numbers_where_the_weights_stay(
    row: str, transport: str, gathered: bool
) -> None:
    for program in PROGRAMS:
        (loss, state), (expected_loss, expected) = (
            _numbers(program, row, transport, gathered),
            _numbers(program, None, transport, gathered),
        )
        assert loss == expected_loss, program.__name__
        assert not [
            name for name, value in state.items() if not torch.equal(value, expected[name])
        ], program.__name__


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_transforms_are_refused_on_every_rank_where_the_weights_would_be_released_inside(
    transport: str,
) -> None:
    model = make_model()
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, comm=zs.Comm(transport=transport))
    for program in PROGRAMS:
        with pytest.raises(
            StateError,
            match=(
                r"would be gathered inside a transform .*inside engine.gathered\(\), on every rank"
            ),
        ) as caught:
            program(model)
        assert "\n" not in str(caught.value)
        engine.reset()
    with torch.no_grad():
        model(X, Y)
    # no transform: what it gets is what it uses
    functional_call(model, dict(model.named_parameters()), (X, Y)).backward()
    optimizer.step()
    engine.close()
