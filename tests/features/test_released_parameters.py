"""Parameters used outside their module's forward: gathered when they are used, or refused by
name; never NaN.
"""

from __future__ import annotations

import copy
import functools
import gc
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.support import inside
from tests.support.covering import by_pairs
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
    wrapped,
)
from zeroshard import StateError
from zeroshard.runtime.released import ReleasedParameter

VOCABULARY, WIDTH = 37, 19


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Borrower(nn.Module):
    """A model whose forward reads parameters of other units: a tied head by hand, a block's
    weight, a scale of its own.
    """

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.recompute = recompute

    def tail(self, h: torch.Tensor) -> torch.Tensor:
        # another unit's weight, used as it lies there
        mixed = F.linear(h * self.scale, self.blocks[1].up.weight)
        return F.linear(mixed[..., :WIDTH], self.embed.weight)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        logits = checkpoint(self.tail, h, use_reentrant=False) if self.recompute else self.tail(h)
        return logits if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())


def _penalised(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = model(x, y)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return loss + 1e-2 * sum((p.square().sum() for p in inner.parameters()), torch.zeros(()))


def _method(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """What was meant by the caller who bypasses ``forward``: submodules one by one, and a method
    that reads parameters itself.
    """
    inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
    if isinstance(model, DistributedDataParallel):
        return model(x, y)
    h = inner.embed(x)
    for block in inner.blocks:
        h = block(h)
    return F.cross_entropy(inner.tail(h).flatten(0, 1), y.flatten())


def _functional(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if isinstance(model, DistributedDataParallel):
        return model(x, y)
    loss = functional_call(model, dict(model.named_parameters()), (x, y))
    assert isinstance(loss, torch.Tensor)
    return loss


USES: dict[str, Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "in a forward": lambda model, x, y: model(x, y),
    "a penalty": _penalised,
    "a method": _method,
    "functional_call": _functional,
}


# automatically, embed lies in one unit with the model's own scale
UNITS: dict[str, Any] = {"automatic": None, "apart": ["embed", Block]}


def _train(
    rank: int, kind: str, use: str, transport: str, recompute: bool, units: str
) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = Borrower(recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options: dict[str, Any] = {
        "comm": zs.Comm.model_validate({"transport": transport}),
        "units": UNITS[units],
    }
    runs, engine = wrapped(model, optimizer, kind, **options)
    losses = []
    for step in range(4):
        loss = USES[use](runs, *batch(rank, step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if engine is not None and kind == "zero3":
            assert all(isinstance(p, ReleasedParameter) for p in model.parameters()), (
                "nothing stays gathered after the step"
            )
        with torch.no_grad():
            losses.append(model(*batch(7, step)).item())
    state = final_state(model, engine)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    return losses, state


FACTORS: dict[str, Sequence[Any]] = {
    "use": tuple(USES),
    "row": ROWS,
    "transport": TRANSPORTS,
    "units": tuple(UNITS),
    "recompute": (False, True),
}


def _in_a_forward_if_recomputed(case: dict[str, Any]) -> bool:
    return case["use"] == "in a forward" or not case["recompute"]


@by_pairs(FACTORS, _in_a_forward_if_recomputed, slow_by="use")
@on_ranks(2, timeout=120)
def test_a_parameter_used_elsewhere_trains_as_under_ddp(
    rank: int, cases: list[dict[str, Any]]
) -> None:
    """Also in a part that is recomputed."""

    @functools.cache
    def by_ddp(use: str, recompute: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        return _train(rank, "torch-ddp", use, "auto", recompute, "automatic")

    for case in cases:
        use, row, transport, units, recompute = case.values()
        losses, state = by_ddp(use, recompute)
        ours, values = _train(rank, row, use, transport, recompute, units)
        assert ours == losses, (case, ours, losses)
        assert not (found := differences(values, state, row, "torch-ddp")), (case, found)


def test_reading_without_gradients_is_refused_by_name_outside_a_forward_and_served_inside() -> None:
    torch.manual_seed(0)
    model = Borrower()
    expected = model(*batch(0, 0)).item()
    engine = zs.shard(model)
    weight = model.blocks[1].up.weight
    remedy = (
        r"parameter 'blocks.1.up.weight' rests sharded and cannot be read here \({}\):"
        r" .*engine.gathered\(\)"
    )
    with torch.no_grad():
        assert model(*batch(0, 0)).item() == expected
        for operation, read in {
            "norm": lambda: weight.norm(),
            "add": lambda: weight + 1,
            "__getitem__": lambda: weight[0],
            "detach": lambda: weight.detach(),
            "tolist": lambda: weight.tolist(),
            "cat": lambda: torch.cat([torch.ones(1, WIDTH), weight]),
        }.items():
            with pytest.raises(StateError, match=remedy.format(operation)):
                read()
        with engine.gathered(weight):
            assert weight.norm().isfinite()
    with pytest.raises(StateError, match=remedy.format(r"\.data")):
        copy.deepcopy(weight)
    assert (
        isinstance(weight, nn.Parameter)
        and weight.shape == (3 * WIDTH, WIDTH)
        and weight.dtype is torch.float32
        and weight.is_leaf
    )
    assert "blocks.1.up.weight, shape=(57, 19), dtype=float32: rests sharded" in repr(weight)
    assert weight in {weight} and weight.numel() == 57 * 19 and weight.device.type == "cpu"
    with torch.inference_mode():
        assert model(*batch(0, 0)).item() == expected
    engine.close()
    assert copy.deepcopy(weight).norm().isfinite()


def test_a_use_keeps_its_unit_to_the_end_of_the_backward_and_no_longer() -> None:
    torch.manual_seed(0)
    model = Borrower()
    engine = zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), units=["embed", Block])
    loss = model(*batch(0, 0))
    assert type(model.embed.weight) is type(model.blocks[1].up.weight) is nn.Parameter, (
        "a backward may follow"
    )
    assert isinstance(model.blocks[0].up.weight, ReleasedParameter)
    with torch.no_grad():
        model(*batch(0, 1))
    assert type(model.embed.weight) is nn.Parameter, "an evaluation in between takes nothing away"
    loss.backward()
    assert all(isinstance(p, ReleasedParameter) for p in model.parameters())
    with torch.no_grad():
        model(*batch(0, 1))
    assert all(isinstance(p, ReleasedParameter) for p in model.parameters())
    model(*batch(0, 2))
    engine.reset()
    assert all(isinstance(p, ReleasedParameter) for p in model.parameters())
    engine.close()


@on_ranks(2)
def test_the_backward_of_a_use_before_the_step_is_an_error(rank: int) -> None:
    row = "zero3"
    torch.manual_seed(0)
    model = Borrower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zs.shard(model, optimizer, policy=row)
    penalty = model.scale.square().sum()
    model(*batch(rank, 0)).backward()
    optimizer.step()
    with pytest.raises(StateError, match=r"of a forward that ran before the last optimizer\.step"):
        penalty.backward()
    engine.reset()
    engine.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("row", ["ddp", "zero1", "zero2"])
@on_ranks(2)
def test_replicated_weights_can_be_read_and_saved_right_after_a_step(
    rank: int, row: str, transport: str
) -> None:
    model, optimizer, engine = make_sharded(row, transport)
    for step in range(2):
        take_steps(rank, [step], model, optimizer)
        with torch.no_grad():
            norms = {name: p.norm() for name, p in model.named_parameters()}
        state = engine.full_state_dict(rank0_only=False)
        assert all(torch.equal(norms[name], value.norm()) for name, value in state.items())
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    engine.close()


def test_parameters_of_two_engines_meet_in_one_function() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    expected = (first.weight @ second.weight).sum()
    expected.backward()
    grad = first.weight.grad
    first.zero_grad()
    second.zero_grad()
    engines = [
        zs.shard(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in (first, second)
    ]
    product = (first.weight @ second.weight).sum()
    assert torch.equal(product, expected)
    product.backward()
    full = engines[0].full_grad(first.weight)
    assert grad is not None and full is not None and torch.equal(full, grad)
    assert isinstance(first.weight, ReleasedParameter) and isinstance(
        second.weight, ReleasedParameter
    )
    for engine in engines:
        engine.close()


def test_a_parameter_whose_engine_is_gone_says_so() -> None:
    model = nn.Linear(4, 4)
    engine = zs.shard(model)
    weight = model.weight
    del model, engine
    gc.collect()
    with pytest.raises(
        StateError, match=r"parameter 'weight' was sharded by an engine that is gone"
    ):
        weight.sum()


@pytest.mark.parametrize("row", ["zero3", "zero3-keep"])
@pytest.mark.parametrize("trained", [True, False])
def test_every_unit_rests_after_shard(row: str, trained: bool) -> None:
    """What shard() itself looks at gathers nothing."""
    model = make_model()
    engine = zs.shard(model, two_groups(model) if trained else None, policy=row)
    assert inside.is_at_rest(engine)
    engine.close()


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero2", "zero3"])
@on_ranks(2)
def test_a_thread_that_reads_weights_beside_the_loop_has_them_or_is_told_and_the_loop_goes_on(
    rank: int, row: str
) -> None:
    def train(reads: bool) -> tuple[list[float], list[str]]:
        model, optimizer, engine = make_sharded(row)
        losses, told = [], []

        def read() -> None:
            try:
                with torch.no_grad():
                    told.append(str(float(model.head.weight.norm())))
            except StateError as error:
                told.append(str(error))

        for step in range(3):
            loss = model(*batch(rank, step))
            loss.backward()
            optimizer.step()  # after which weights are on their way to every rank
            optimizer.zero_grad()
            losses.append(loss.item())
            if reads:
                thread = threading.Thread(target=read)
                thread.start()
                thread.join()
        with engine.gathered():
            read()
            if reads:
                thread = threading.Thread(target=read)
                thread.start()
                thread.join()
                assert told[-1] == told[-2]
        engine.close()
        return losses, told

    (expected, _), (losses, told) = train(reads=False), train(reads=True)
    assert losses == expected
    if row == "ddp":
        assert all(float(one) for one in told)
    else:
        (line,) = set(told[:3])
        assert re.match(
            r"parameter 'head\.weight' cannot be read here \(\w+\): this is not the thread of the"
            r" training loop.*inside engine\.gathered\(\)",
            line,
        )


@on_ranks(2)
def test_a_loop_may_change_its_thread(rank: int) -> None:
    model = make_model()
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, stage=2)

    def step() -> None:
        take_steps(rank, 1, model, optimizer)

    for _ in range(2):  # as a pool's threads do
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    with torch.no_grad():
        assert float(model.head.weight.norm())  # the loop's thread has ended
    engine.close()
