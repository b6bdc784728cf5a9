"""The norm and the overflow of gradients on an accelerator: one table, read once per step.

There is no accelerator here. Reads of the CPU are said to wait for a device, so that the way of an
accelerator is taken with tensors of the CPU, and every read of a number is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard as zs
from tests.support import inside
from tests.support.gradients import one_accumulator
from tests.support.harness import on_ranks
from tests.support.training import batch, final_state, make_model
from zeroshard.memory import Pages
from zeroshard.runtime import finalize
from zeroshard.runtime.grad import Accumulator
from zeroshard.state import gradient, norms
from zeroshard.state.gradient import Gradient, average
from zeroshard.state.norms import ExactSum, SquaresRequest, SquaresSum
from zeroshard.state.state import DeviceMemory
from zeroshard.tier.store import Direct

CPU = torch.device("cpu")


class Reads(TorchDispatchMode):
    """Counts the reads of single numbers, and the tables that `squares_of` makes to be read."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0
        self.vectors: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.numbers += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))

    def squares_of(self, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        self.vectors.append(len(slices))
        return SQUARES_OF(slices)


SQUARES_OF = norms.squares_of


@contextmanager
def on_an_accelerator() -> Iterator[Reads]:
    """Take the way of an accelerator inside, and count what the host reads."""
    reads = Reads()
    waits = mock.Mock(return_value=True)
    with (
        mock.patch.object(norms, "squares_of", reads.squares_of),
        mock.patch.object(norms, "reads_wait", waits),
        mock.patch.object(gradient, "reads_wait", waits),
        mock.patch.object(finalize, "reads_wait", waits),
        reads,
    ):
        yield reads


def gradient_of(numbers: torch.Tensor, sizes: Sequence[int]) -> tuple[Accumulator, Gradient]:
    """Return the accumulator of parameters of these `sizes`, and `numbers`, which rest there."""
    memory = DeviceMemory(CPU, Pages(), Direct())
    made = one_accumulator(memory, sizes, dtype=numbers.dtype, note=lambda error: None)
    gradient, _ = made.open()
    gradient.numbers.whole.copy_(numbers)
    return made, gradient


def squares(slices: Sequence[torch.Tensor]) -> list[float]:
    """Return the sums of squares of `slices`, as one read tells them."""
    found: list[ExactSum] = []
    norms.read_squares([SquaresRequest(one, found.append) for one in slices])
    return [float(one) for one in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_table_holds_the_sum_of_squares_of_each_slice(dtype: torch.dtype) -> None:
    slices = [torch.randn(numel).to(dtype) for numel in (1, 64, 1000, 0)]
    found = squares(slices)
    assert len(found) == 4
    for value, numbers in zip(found, slices, strict=True):
        assert value == pytest.approx(float((numbers.double() ** 2).sum()), rel=1e-12)


def test_numbers_that_are_finite_never_overflow_in_it_and_others_always_show() -> None:
    largest = torch.full((1 << 12,), torch.finfo(torch.float32).max)
    assert math.isfinite(squares([largest])[0])
    for odd in (float("inf"), float("-inf"), float("nan")):
        largest[77] = odd
        (found,) = squares([largest])
        assert math.isnan(found) if math.isnan(odd) else found == math.inf


def test_gradients_are_divided_scaled_and_zeroed_without_a_read_and_then_read_together() -> None:
    numbers = [torch.randn(60), torch.randn(60)]
    spans = [(0, 40), (40, 60)]
    expected = [
        [float((one[low:high].double() / 4).square().sum()) for low, high in spans]
        for one in numbers
    ]
    with on_an_accelerator() as reads:
        made = [gradient_of(one, [40, 20]) for one in numbers]
        accumulators, gradients = [one for one, _ in made], [one for _, one in made]
        assert average(gradients, 4.0) == [], "nothing is known of it yet"
        asked = [each for one in accumulators for each in one.unread([True, False])]
        assert (reads.numbers, reads.vectors) == (0, [])
        norms.read_squares(asked)
        assert reads.vectors == [4]
        assert [one.unread([True, False]) for one in accumulators] == [[], []]
        for one, squares in zip(gradients, expected, strict=True):
            for span, value in zip(spans, squares, strict=True):
                total = SquaresSum()
                one.add_squares([(span,)], total)
                assert float(total.read()) == pytest.approx(value, rel=1e-12)
                assert one.is_finite(*span)
        gradients[0].scale(0.5)
        accumulators[1].zero({0})
        asked = [one.unread([True, False]) for one in accumulators]
        assert list(map(len, asked)) == [2, 2], "they have changed"
    assert (reads.numbers, reads.vectors) == (0, [4])


def test_what_is_not_finite_is_known_once_it_has_been_read() -> None:
    numbers = torch.randn(100)
    numbers[50] = float("inf")
    with on_an_accelerator():
        accumulator, one = gradient_of(numbers, [40, 60])
        assert average([one], 2.0) == []
        norms.read_squares(accumulator.unread([True, False]))
        assert average([one], 2.0) == [one.key]
        assert one.is_finite(0, 40) and not one.is_finite(40, 100)


def test_a_unit_of_used_parameters_is_one_slice_and_a_number_that_is_not_finite_has_its_place() -> (
    None
):
    numbers = torch.randn(100)
    expected = float((numbers.double() / 2).square().sum())
    with on_an_accelerator() as reads:
        accumulator, one = gradient_of(numbers, [40, 60])
        average([one], 2.0)
        norms.read_squares(accumulator.unread([True, True]))
        total = SquaresSum()
        accumulator.add_squares([True, True], total, of_all=False)
        assert reads.vectors == [1] and float(total.read()) == pytest.approx(expected, rel=1e-12)
        assert one.is_finite(0, 40) and one.is_finite(40, 100)
        one.numbers.whole[50] = float("nan")
        one.scale(0.5)
        norms.read_squares(accumulator.unread([True, True]))
        assert average([one], 2.0) == [one.key]
        assert one.is_finite(0, 40) and not one.is_finite(40, 100)
    assert reads.vectors == [1, 1]


def test_passes_over_many_tensors_stay_in_a_cache_and_are_few() -> None:
    tensors = [torch.arange(size) for size in (3, 4, 1, 0, 20, 2, 2, 5)]
    with mock.patch.object(norms, "_chunk", lambda: 8):
        groups = [[len(one) for one in group] for group in norms.passes(tensors)]
        parts = [one for group in norms.passes(tensors) for one in group]
    assert groups == [[3, 4, 1, 0], [8], [8], [4, 2, 2], [5]]
    assert torch.equal(torch.cat(parts), torch.cat(tensors))
    with on_an_accelerator():
        assert list(norms.passes(tensors)) == [tensors], "one kernel for all"
        assert list(norms.passes([])) == []


class Launches(TorchDispatchMode):
    """Counts what an accelerator would launch a kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += not (func.is_view or "empty" in func.name() or "split" in func.name())
        return func(*args, **(kwargs or {}))


def test_without_triton_a_norm_takes_few_kernels_for_a_billion_elements() -> None:
    slices = [torch.empty(125_000_000, device="meta") for _ in range(8)]
    with mock.patch.object(norms, "reads_wait", lambda tensor: True), Launches() as seen:
        SQUARES_OF(slices)
    assert 0 < seen.count < 700  # with chunks of 2^20 elements: 9,385


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero2", "zero3"])
@on_ranks(2, timeout=60)
def test_a_step_with_its_norm_reads_one_vector_and_nothing_else(rank: int, row: str) -> None:
    def run(accelerated: bool) -> dict[str, Any]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = zs.shard(model, optimizer, policy=row, comm=zs.Comm(transport="gloo"))
        norms, reads = [], []
        for step in range(3):
            loss = model(*batch(rank, step))
            (loss * float("inf") if step == 2 and rank == 0 else loss).backward()
            if accelerated:
                with on_an_accelerator() as seen:
                    norms.append(inside.gradient_norm(engine))
                reads.append((seen.numbers, len(seen.vectors)))
            else:
                norms.append(engine.clip_grad_norm_(1e6))
            optimizer.step()
            optimizer.zero_grad()
        bad = engine.steps_skipped
        state = final_state(model, engine)
        return {
            "norms": [float(norm) for norm in norms],
            "reads": reads,
            "bad": bad,
            "state": state,
        }

    plain, ours = run(False), run(True)
    seen = {
        "reads": ours["reads"],
        "norms": list(zip(plain["norms"], ours["norms"], strict=True)),
        "bad": (plain["bad"], ours["bad"]),
        "differ": [k for k, v in plain["state"].items() if not torch.equal(v, ours["state"][k])],
    }
    assert seen["reads"][:2] == [(0, 1), (0, 1)]  # a bad step looks for the parameter
    assert seen["bad"] == (1, 1) and not seen["differ"]
    for plain, ours in seen["norms"][:2]:
        assert ours == pytest.approx(plain, rel=1e-6)
    assert not any(math.isfinite(norm) for norm in seen["norms"][2])
