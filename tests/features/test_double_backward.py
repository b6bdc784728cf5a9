"""A backward through a backward (``create_graph=True``): gradient penalties train as under DDP."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.support.covering import by_pairs
from tests.support.harness import on_ranks
from tests.support.training import ROWS, TRANSPORTS, differences, has_parameters, train_row
from zeroshard import StateError

WIDTH = 8


class Block(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.recompute = recompute

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = checkpoint(self.inner, x, use_reentrant=False) if self.recompute else self.inner(x)
        assert isinstance(result, torch.Tensor)
        return result


def _critic(recompute: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), *(Block(recompute) for _ in range(3)), nn.Linear(WIDTH, 1)
    )


def _penalty(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    between = (x + y).div(2).requires_grad_()
    (gradient,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    return 10 * (gradient.norm(2, 1) - 1).square().mean()


def _wasserstein(model: nn.Module, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    loss = model(x).mean() - model(y).mean()
    if step % 2:  # lazily
        loss = loss + _penalty(model, x, y)
    loss.backward()


def _penalty_after_another_backward(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, step: int
) -> None:
    penalty = _penalty(model, x, y)
    (model(x).mean() - model(y).mean()).backward()
    with torch.no_grad():
        model(x)
    penalty.backward()


def _inner_gradient(model: nn.Module, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    """The gradient with respect to what lies in the middle of the model (path length
    regularisation), two orders up.
    """
    assert isinstance(model, nn.Sequential)
    middle = model[1](model[0](x))
    (gradient,) = torch.autograd.grad(
        model[4](model[3](model[2](middle))).sum(), middle, create_graph=True
    )
    (second,) = torch.autograd.grad(gradient.square().sum(), middle, create_graph=True)
    (gradient.square().sum() + 1e-2 * second.square().sum()).backward()


def _retained_graph(model: nn.Module, x: torch.Tensor, y: torch.Tensor, step: int) -> None:
    """Two backwards of one graph, with weights used outside their modules and a block that runs
    on its own output.
    """
    assert isinstance(model, nn.Sequential)
    middle = model[1](model[1](model[0](x)))
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    loss = model[4](model[3](model[2](middle))).mean() + 1e-2 * penalty
    loss.backward(retain_graph=True)
    loss.backward()


PROGRAMS: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor, int], None]] = {
    "a lazy penalty": _wasserstein,
    "another backward in between": _penalty_after_another_backward,
    "the gradient of an inner tensor": _inner_gradient,
    "a retained graph": _retained_graph,
}


def _train(
    rank: int, row: str, transport: str, program: str, recompute: bool, units: Any
) -> dict[str, torch.Tensor]:
    model = _critic(recompute)

    def step(number: int) -> None:
        torch.manual_seed(10 * number + rank)
        PROGRAMS[program](model, torch.randn(6, WIDTH), torch.randn(6, WIDTH), number)

    return train_row(
        model,
        torch.optim.Adam(model.parameters(), lr=1e-2),
        row,
        step,
        steps=3,
        transport=transport,
        units=units,
    )


CUTS: dict[str, Any] = {"auto": None, "layers": [nn.Linear, Block], "one": [""]}
FACTORS: dict[str, Sequence[Any]] = {
    "program": tuple(PROGRAMS),
    "row": ROWS,
    "recompute": (False, True),
    "cut": tuple(CUTS),
}


def _cuts_what_is_released(case: dict[str, Any]) -> bool:
    other = "layers" if case["recompute"] else "one"
    return case["cut"] == "auto" or (case["row"].startswith("zero3") and case["cut"] != other)


# over sockets released weights are really gone
@pytest.mark.parametrize(
    "transport", ["gloo", pytest.param("shared_memory", marks=pytest.mark.slow)]
)
@by_pairs(FACTORS, _cuts_what_is_released, slow_by="program")
@on_ranks(2, timeout=120)
def test_a_gradient_penalty_trains_as_under_ddp(
    rank: int, cases: list[dict[str, Any]], transport: str
) -> None:
    @functools.cache
    def plain(program: str, recompute: bool) -> dict[str, torch.Tensor]:
        return _train(rank, "plain", transport, program, recompute, None)

    for case in cases:
        program, row, recompute, cut = case.values()
        state = _train(rank, row, transport, program, recompute, CUTS[cut])
        # two backwards are summed over the ranks one by one, in another order
        for name, value in plain(program, recompute).items():
            if program == "another backward in between":
                torch.testing.assert_close(state[name], value, rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(state[name], value), (case, name)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_a_second_backward_after_the_step_is_an_error(transport: str) -> None:
    model = _critic()
    optimizer = torch.optim.Adam(model.parameters())
    engine = zs.shard(
        model, optimizer, stage=3, comm=zs.Comm.model_validate({"transport": transport})
    )
    middle = model[0](torch.randn(6, WIDTH))
    (gradient,) = torch.autograd.grad(
        model[4](model[3](model[2](model[1](middle)))).sum(), middle, create_graph=True
    )
    model(torch.randn(6, WIDTH)).sum().backward()
    optimizer.step()
    with pytest.raises(StateError, match=r"of a forward that ran before the last optimizer\.step"):
        gradient.sum().backward()
    engine.reset()
    engine.close()


class PassedOn(nn.Module):
    """A tensor that several modules return: the last layer's output is the module's, and goes
    through a layer that it may skip.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.skipped = Skipped(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.skipped(self.first(x * self.scale))
        return self.last(torch.tanh(h))  # type: ignore[no-any-return]


class Skipped(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "nccl"])
@pytest.mark.parametrize(
    ("row", "node_size"), [("zero3", 2), ("hpz", 1), ("hpz", 2), ("mics", 1), ("hfsdp", 1)]
)
@on_ranks(2)
def test_units_whose_modules_return_one_tensor_keep_their_weights_until_they_have_run(
    row: str, node_size: int, transport: str
) -> None:
    """Look at the gradient of the input alone, which brings none of a parameter."""
    torch.manual_seed(0)
    model, plain = PassedOn(), PassedOn()
    plain.load_state_dict(model.state_dict())
    comm = zs.Comm.model_validate({"transport": transport, "node_size": node_size})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zs.shard(model, optimizer, policy=row, units=has_parameters, comm=comm)
    for _ in range(3):
        x = torch.randn(4, WIDTH, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
        (expected,) = torch.autograd.grad(plain(x).square().sum(), x)
        assert torch.equal(gradient, expected)
    engine.close()


def _passes_on(
    rank: int, row: str, *, reentrant: bool | None, **options: Any
) -> dict[str, torch.Tensor]:
    """Return the weights after steps, and the gradients of inputs, which (but for `reentrant`
    checkpoints) brought none of a parameter. None: nothing is computed again.
    """
    torch.manual_seed(0)
    model = nn.Sequential(PassedOn(), PassedOn())
    gradients = {}

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        for block in model:
            x = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
        return x.square().sum()

    def step(number: int) -> None:
        torch.manual_seed(10 * number + rank)
        x = torch.randn(4, WIDTH, requires_grad=True)
        gradient = None if reentrant else torch.autograd.grad(loss_of(x), x)[0]
        loss_of(x).backward()
        assert x.grad is not None
        gradients[f"input {number}"] = x.grad if gradient is None else gradient

    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return train_row(model, optimizer, row, step, steps=3, **options) | gradients


@pytest.mark.parametrize(
    ("rows", "offload"),
    [
        (("ddp", "zero3"), {}),
        (("zero3",), {"weight": "host", "optimizer": "host"}),
        (("zero2", "zero3-keep"), {"grad": "host", "optimizer": "host", "fraction": 0.5}),
    ],
    ids=["device", "host", "a part on the host"],
)
@on_ranks(2, timeout=60)
def test_modules_that_return_one_tensor_train_as_under_ddp(
    rank: int, rows: Sequence[str], offload: dict[str, Any]
) -> None:
    options = {"transport": "gloo", "offload": offload or None}
    found, expected = [], _passes_on(rank, "plain", reentrant=None)
    for row in rows:
        for reentrant in (None, False, True):
            ours = _passes_on(rank, row, reentrant=reentrant, units=has_parameters, **options)
            found += differences(ours, expected, f"{row}, reentrant: {reentrant}", "plain")
    assert found == []


def test_gradients_that_rest_keep_no_graph() -> None:
    model = _critic()
    engine = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), units=[Block])
    hidden = model[1](model[0](torch.randn(2, WIDTH)))
    graph = weakref.ref(hidden)
    model[4](model[3](model[2](hidden))).sum().backward(create_graph=True)
    del hidden
    gc.collect()
    assert graph() is None
    engine.close()
