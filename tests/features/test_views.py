"""What leaves a module although it lies in the module's weights, or leaves where nobody looks:
views, parameters, objects, dicts passed in.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from benchmarks.fake_world import fake_world
from tests.support.harness import on_ranks
from tests.support.training import ROWS, TRANSPORTS, train_row
from zeroshard import StateError

WIDTH = 8


class Holder:
    """An object of a class that nobody knows."""

    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


class Slotted:
    __slots__ = ("shift",)

    def __init__(self, shift: torch.Tensor) -> None:
        self.shift = shift


@dataclass
class Output:
    shift: torch.Tensor


class Part(nn.Module):
    """Holds a parameter of its own and gives `give` of it away."""

    def __init__(self, give: Callable[[nn.Parameter], Any]) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(3, WIDTH))
        self.give = give

    def forward(self) -> Any:
        return self.give(self.shift)


class Block(nn.Module):
    """Reads a parameter of its own; beside its output, what it computes for the loss goes into
    `aside`.
    """

    def __init__(self, aside: str = "") -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.penalty: Any = None
        self.aside = aside

    def forward(
        self, x: torch.Tensor, shift: torch.Tensor | None = None, notes: Any = None
    ) -> torch.Tensor:
        h = self.linear(self.norm(x)) if shift is None else self.linear(self.norm(x)) * shift
        result = x + torch.tanh(h * self.scale.detach()) * self.scale
        # made last: its backward comes before that of the result
        penalty = (result * self.scale.exp()).square().mean()
        if self.aside == "dict":
            notes.setdefault("penalties", []).append(penalty)
        elif self.aside == "object":
            notes.penalties = [*notes.penalties, penalty]
        elif self.aside == "attribute":
            self.penalty = penalty
        return result


class Model(nn.Module):
    """Embeds, adds what a part gives away, runs blocks."""

    def __init__(
        self,
        give: Callable[[nn.Parameter], Any],
        take: Callable[[Any], torch.Tensor],
        aside: str = "",
    ) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.part = Part(give)
        self.blocks = nn.ModuleList(Block(aside) for _ in range(3))
        self.take = take
        self.last = nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> Any:
        notes: Any = {} if self.blocks[0].aside == "dict" else Holder(penalties=[])
        shift = self.take(self.part())
        h = self.first(x) + shift
        for block in self.blocks:
            h = block(h, shift, notes=notes)
        penalties = [block.penalty for block in self.blocks if block.penalty is not None]
        penalties += notes.get("penalties", []) if isinstance(notes, dict) else notes.penalties
        return Holder(
            normal=torch.distributions.Normal(self.last(h), self.temperature),
            scale=self.temperature,
            penalties=penalties,
        )


Give = tuple[Callable[[nn.Parameter], Any], Callable[[Any], torch.Tensor]]
GIVES: dict[str, Give] = {
    "a view": (lambda p: p[:1], lambda out: out),
    "a transposed view in a tuple": (lambda p: (1, p.t()), lambda out: out[1].t()[1]),
    "a detached view in a dict": (
        lambda p: OrderedDict(x=p.detach()[:1], y=p[1]),
        lambda out: out["x"] + out["y"],
    ),
    "a view in a dataclass": (lambda p: Output(p[:1]), lambda out: out.shift),
    "a view in an object": (
        lambda p: Holder(inner=Holder(shift=p[:1])),
        lambda out: out.inner.shift,
    ),
    "a view in slots": (lambda p: Slotted(p[:1]), lambda out: out.shift),
    "a view in a closure": (lambda p: _closing_over(p[:1]), lambda out: out()),
    "the parameter": (lambda p: p, lambda out: out[:1]),
    "the parameter in an object": (lambda p: Holder(shift=p), lambda out: out.shift[0] * 2),
    "the parameter as it is in float": (lambda p: p, lambda out: out.float().sum(0)),
}


def _closing_over(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor


def _loss(output: Any, x: torch.Tensor) -> torch.Tensor:
    loss = (
        -output.normal.log_prob(x).mean()
        - 0.01 * output.normal.entropy().mean()
        + output.scale.float().square()
    )
    return loss + sum(output.penalties, torch.zeros(()))


# over sockets released weights are really gone
MEMORY_RETURNED_FIRST = ("gloo", pytest.param("shared_memory", marks=pytest.mark.slow))
MODES = (
    "one backward",
    "two forwards",
    "retained",
    "an evaluation in between",
    "checkpointed",
    "checkpointed reentrantly",
)


def _step(model: nn.Module, x: torch.Tensor, mode: str) -> None:
    if mode == "two forwards":
        (_loss(model(x), x) + _loss(model(2 * x), x)).backward()
    elif mode == "retained":
        loss = _loss(model(x), x)
        loss.backward(retain_graph=True)
        loss.backward()  # the same again: twice a sum is the sum of two in every order
    elif mode == "an evaluation in between":
        loss = _loss(model(x), x)
        with torch.no_grad():
            before = model(3 * x)
            after = model(x)
            assert (
                before.normal.scale.isfinite().all() and before.normal.log_prob(x).isfinite().all()
            )
            kept = after.normal.sample()
        assert kept.isfinite().all()
        loss.backward()
    elif mode.startswith("checkpointed"):
        x = x.clone().requires_grad_()
        _loss_of = lambda x: _loss(model(x), x)  # noqa: E731
        loss = checkpoint(_loss_of, x, use_reentrant=mode.endswith("reentrantly"))
        assert isinstance(loss, torch.Tensor)
        loss.backward()
    else:
        _loss(model(x), x).backward()


def _train(
    rank: int, row: str, transport: str, make: Callable[[], nn.Module], mode: str, units: Any = None
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = make()

    def step(number: int) -> None:
        torch.manual_seed(10 * number + rank)
        _step(model, torch.randn(5, WIDTH), mode)

    return train_row(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        row,
        step,
        steps=3,
        transport=transport,
        units=units,
    )


def _compare(
    rank: int,
    transport: str,
    make: Callable[[], nn.Module],
    mode: str,
    rows: tuple[str, ...],
    cuts: tuple[Any, ...] = (None,),
) -> None:
    expected = _train(rank, "plain", transport, make, mode)
    for row in rows:
        for units in cuts:
            state = _train(rank, row, transport, make, mode, units)
            different = [
                name for name, value in expected.items() if not torch.equal(value, state[name])
            ]
            assert not different, (row, units, different)


CUTS = (None, ["part", Block], [Block, nn.Linear], [""])


@pytest.mark.parametrize("transport", MEMORY_RETURNED_FIRST)
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=[pytest.mark.slow] * (index % 2))
        for index, mode in enumerate(MODES)
    ],
)
@on_ranks(2)
def test_what_lies_in_the_weights_may_leave_its_module(
    rank: int, mode: str, transport: str
) -> None:
    for what, (give, take) in GIVES.items():
        try:
            _compare(
                rank, transport, lambda give=give, take=take: Model(give, take), mode, ("zero3",)
            )  # type: ignore[misc]
        except Exception as error:
            raise AssertionError(what) from error


@pytest.mark.parametrize("transport", MEMORY_RETURNED_FIRST)
@pytest.mark.parametrize("mode", ["two forwards", "retained"])
@on_ranks(2)
def test_a_view_may_leave_its_module_in_every_row_and_cut(
    rank: int, mode: str, transport: str
) -> None:
    """Over sockets cut only the rows that release weights; the others read them where they lie."""
    for row in ROWS:
        cuts = CUTS if row.startswith("zero3") or transport == "shared_memory" else (None,)
        _compare(rank, transport, lambda: Model(*GIVES["a view"]), mode, (row,), cuts)


@pytest.mark.parametrize("transport", MEMORY_RETURNED_FIRST)
@pytest.mark.parametrize(
    "aside",
    ["dict", *(pytest.param(aside, marks=pytest.mark.slow) for aside in ("object", "attribute"))],
)
@on_ranks(2)
def test_a_result_may_leave_its_module_through_what_was_passed_in_or_as_an_attribute(
    rank: int, aside: str, transport: str
) -> None:
    for mode in MODES:
        if aside == "attribute" and mode in ("two forwards", "an evaluation in between"):
            continue
        _compare(
            rank,
            transport,
            lambda: Model(*GIVES["a view"], aside=aside),
            mode,
            ("zero3", "zero3-keep"),
            (None, [Block, nn.Linear]),
        )


class Borrower(nn.Module):
    """Uses a block's weight outside it, after it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 3 * WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(3 * WIDTH, 3 * WIDTH), nn.Tanh()) for _ in range(4)
        )
        self.last = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        borrowed = self.blocks[1][0].weight
        h = h + nn.functional.linear(h, borrowed)
        return Holder(
            normal=torch.distributions.Normal(self.last(h), 1.0),
            scale=borrowed.mean(),
            penalties=[],
        )


@pytest.mark.parametrize("transport", MEMORY_RETURNED_FIRST)
@on_ranks(2)
def test_a_weight_used_outside_its_module_serves_several_forwards_and_backwards(
    rank: int, transport: str
) -> None:
    for mode in ("two forwards", "retained", "an evaluation in between"):
        _compare(rank, transport, Borrower, mode, ROWS)


HIDDEN: list[torch.Tensor] = []


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Hider() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return h


class Hider(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = x * self.scale
        HIDDEN.append((result * self.scale).sum())
        return result


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_a_result_that_left_unseen_is_named_in_the_step_after_the_first_bad_one(
    transport: str,
) -> None:
    torch.manual_seed(0)
    model = Hiding()
    optimizer = torch.optim.AdamW(model.parameters())
    comm = zs.Comm.model_validate({"transport": transport})
    engine = zs.shard(
        model, optimizer, stage=3, comm=comm, units=lambda name, module: isinstance(module, Hider)
    )
    message = (
        r"2 steps in a row .* first in parameter 'first\.weight', because a backward reads"
        r" parameter 'blocks\.\d\.scale' while it is released"
    )
    for outcome in (contextlib.nullcontext(), pytest.raises(StateError, match=message)):
        loss = model(torch.randn(5, WIDTH)).square().mean() + sum(HIDDEN)
        loss.backward()
        HIDDEN.clear()
        with outcome:
            optimizer.step()
        optimizer.zero_grad()
    engine.reset()
    assert engine.steps_skipped == 2
    model(torch.randn(5, WIDTH)).square().mean().backward()
    HIDDEN.clear()
    optimizer.step()
    engine.close()


class Renaming(nn.Module):
    """Keeps a part of what it computes as an attribute `name`, and takes away what it has kept."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.name = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("first", "second"):
            self.__dict__.pop(name, None)
        result = x * self.scale
        if self.name:
            setattr(self, self.name, (result * self.scale).sum())
        return result


def test_attributes_are_watched_that_a_later_forward_adds_or_renames() -> None:
    model = nn.Sequential(Renaming(), nn.Linear(WIDTH, WIDTH))
    with fake_world(2):
        comm = zs.Comm(transport="nccl")
        engine = zs.shard(model, torch.optim.AdamW(model.parameters()), stage=3, comm=comm)
        for name in ("", "first", "second"):
            model[0].name = name
            model(torch.randn(5, WIDTH)).sum().backward()
            if name:
                assert vars(model[0])[name]._backward_hooks, name
        engine.close()
