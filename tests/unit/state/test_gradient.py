"""A gradient at rest, on the device, on the host and in parts: one sequence of sums, averages
and readers, in blocks of a few elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

from tests.support.endless_link import Endless
from tests.support.gradients import one_accumulator
from zeroshard.errors import StorageError
from zeroshard.memory import Pages
from zeroshard.runtime.grad import Accumulator
from zeroshard.state import gradient as module
from zeroshard.state import norms
from zeroshard.state.gradient import Gradient, average
from zeroshard.state.norms import SquaresSum
from zeroshard.state.state import DeviceMemory
from zeroshard.tier.store import Direct
from zeroshard.tier.stores import HostStore

CPU = torch.device("cpu")
NUMEL = 100
OWN = (0, NUMEL)
PLACES = {
    "device": (NUMEL, "direct"),
    "host": (0, "direct"),
    "in parts": (37, "direct"),
    "over a link": (0, "endless"),
    "in parts over a link": (37, "endless"),
}
everywhere = pytest.mark.parametrize("place", PLACES)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BLOCK", 16)
    monkeypatch.setattr(norms, "_CHUNK", 4)


@pytest.fixture
def accumulator(place: str) -> Iterator[Accumulator]:
    split, link = (
        PLACES[place][0],
        Direct() if PLACES[place][1] == "direct" else Endless(overlaps=True),
    )
    store = HostStore(CPU, link=link)
    lost: list[StorageError] = []
    memory = DeviceMemory(CPU, Pages(), link)
    made = one_accumulator(memory, [NUMEL], split=split, store=store, note=lost.append)
    assert made.open()[0].on_device is (split == NUMEL)
    yield made
    assert lost == []
    store.close()


@pytest.fixture
def gradient(accumulator: Accumulator) -> Gradient:
    resting = accumulator.resting()
    assert resting is not None
    return resting


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def take(gradient: Gradient, total: torch.Tensor, *, fresh: bool = False) -> None:
    """Do what a reduce does with the sum that it brings."""
    if not gradient.on_device:
        gradient.take(total, fresh)
    elif fresh:
        gradient.fetch(*OWN).copy_(total)
    else:
        gradient.fetch(*OWN).add_(total)


@everywhere
def test_sums_are_added_averaged_once_and_scaled_wherever_they_rest(gradient: Gradient) -> None:
    take(gradient, numbers(0), fresh=True)
    take(gradient, numbers(1))
    take(gradient, numbers(2))
    assert average([gradient], 3.0) == []
    assert average([gradient], 3.0) == [], "a second time divides by nothing"
    gradient.scale(0.3)
    expected = (numbers(0) + numbers(1) + numbers(2)).div(3.0).mul(0.3)
    assert torch.equal(gradient.fetch(*OWN), expected)
    assert torch.equal(gradient.fetch(5, 71), expected[5:71])
    for start, stop in (OWN, (5, 71), (36, 38), (50, 50)):
        squares = SquaresSum()
        gradient.add_squares([((start, stop),)], squares)
        assert float(squares.read()) == pytest.approx(
            float((expected[start:stop].double() ** 2).sum()), rel=1e-12
        )


@everywhere
def test_what_is_added_to_an_average_is_added_to_the_sum_that_it_was(
    accumulator: Accumulator, gradient: Gradient
) -> None:
    take(gradient, numbers(0), fresh=True)
    assert average([gradient], 4.0) == []
    gradient.scale(0.5)
    assert accumulator.open() == (gradient, False)
    take(gradient, numbers(1))
    assert average([gradient], 4.0) == []
    assert torch.equal(
        gradient.fetch(*OWN), (numbers(0).div(4.0).mul(0.5).mul(4.0) + numbers(1)).div(4.0)
    )


@everywhere
@pytest.mark.parametrize("element", [0, 20, 36, 37, 99])
@pytest.mark.parametrize("late", [False, True], ids=["in the first sum", "in a later sum"])
def test_a_number_that_is_not_finite_is_noticed_wherever_it_is(
    gradient: Gradient, element: int, late: bool
) -> None:
    broken = numbers(1)
    broken[element] = float("nan") if element % 2 else float("-inf")
    for index, total in enumerate([numbers(0), broken] if late else [broken, numbers(0)]):
        take(gradient, total, fresh=index == 0)
    assert average([gradient], 2.0) == [gradient.key]
    assert not gradient.is_finite(element, element + 1)
    assert gradient.is_finite(0, element) and gradient.is_finite(element + 1, NUMEL)


@everywhere
def test_a_sum_that_overflows_by_itself_is_no_number_that_is_not_finite(gradient: Gradient) -> None:
    take(gradient, torch.full((NUMEL,), 3e38), fresh=True)
    assert average([gradient], 2.0) == []
    assert torch.equal(gradient.fetch(*OWN), torch.full((NUMEL,), 3e38) / 2.0)


@pytest.mark.parametrize("divisor", [1.0, 3.0, 8.0, 0.1, 3 * 2.0**20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_gradients_are_averaged_together_with_the_bits_of_each_by_itself(
    dtype: torch.dtype, divisor: float
) -> None:
    memory = DeviceMemory(CPU, Pages(), Direct())
    sizes, made, expected = (3, 0, 1, 2, 50, 4, 1), [], []
    for index, size in enumerate(sizes):  # some end a group of elements, and some span many
        one = one_accumulator(memory, [size], dtype=dtype, note=_raise).open()[0]
        one.key = str(index)
        one.numbers.whole.copy_(torch.randn(size))
        made.append(one)
        expected.append(one.numbers.whole.clone().div_(divisor))
    assert average(made[2:4], divisor) == [], "those are averages from here on"
    assert average(made, divisor) == []
    for one, numbers in zip(made, expected, strict=True):
        assert torch.equal(one.numbers.whole, numbers)
    for bad in (0, 4):
        made[bad].numbers.whole[-1] = math.nan
    assert average(made, divisor) == ["0", "4"]


@everywhere
def test_a_range_that_is_zeroed_is_zero_and_the_rest_stays(gradient: Gradient) -> None:
    take(gradient, numbers(0), fresh=True)
    gradient.zero_range(10, 60)
    expected = numbers(0)
    expected[10:60] = 0.0
    assert torch.equal(gradient.fetch(*OWN), expected)


def test_a_sum_on_the_host_is_added_to_the_part_on_the_device_over_there() -> None:
    far = torch.device("meta")
    store = HostStore(CPU)
    memory = DeviceMemory(far, Pages(), Direct())
    gradient, _ = one_accumulator(memory, [NUMEL], split=32, store=store, note=_raise).open()
    for is_first in (True, False):
        gradient.take(torch.ones(NUMEL), is_first)
    with gradient.numbers.borrowed(32, NUMEL, write=False) as there:
        assert there.tolist() == [2.0] * (NUMEL - 32)


def test_memory_serves_the_next_gradient_when_nobody_holds_it_any_more() -> None:
    store = HostStore(CPU)
    memory = DeviceMemory(CPU, Pages(), Direct())
    accumulator = one_accumulator(memory, [NUMEL], split=40, store=store, note=_raise)
    seal, fresh = accumulator.open()  # what a sealed gradient holds
    first = seal.numbers.away
    accumulator.release()
    assert fresh and accumulator.open() == (seal, False), "it is held, and added to"
    accumulator.reset()
    other, fresh = accumulator.open()
    assert fresh and other is not seal and other.numbers.away is not first, (
        "a step may still read it"
    )
    del seal, other
    accumulator.reset()
    assert len(store.storages) == 2
    assert accumulator.open()[0].numbers.away in store.storages and len(store.storages) == 2
    accumulator.move(60)
    assert len(store.storages) == 1, "only what rests is left"
    accumulator.reset()
    moved = accumulator.open()[0].numbers
    assert (moved.split, moved.numel, len(store.storages)) == (60, NUMEL, 1), "of the new size"
    del moved
    accumulator.reset()
    accumulator.release_idle()
    assert not store.storages
    store.close()


def test_a_lost_gradient_is_noted_reads_as_nan_and_its_memory_is_closed() -> None:
    store = HostStore(CPU)
    memory = DeviceMemory(CPU, Pages(), Direct())
    lost: list[StorageError] = []
    accumulator = one_accumulator(memory, [NUMEL], split=40, store=store, note=lost.append)
    resting, _ = accumulator.open()
    error = StorageError("gone")
    resting.lose(error)
    resting.take(torch.ones(NUMEL), True)
    resting.zero_range(*OWN)
    assert average([resting], 2.0) == [resting.key]
    assert lost == [], "it takes what comes without a word"
    squares = SquaresSum()
    accumulator.add_squares([True], squares, of_all=True)
    assert math.isnan(float(squares.read())) and accumulator.first_bad() == "p0"
    with pytest.raises(StorageError, match="gone"):
        resting.fetch(*OWN)
    error.__traceback__ = None  # its frames hold the gradient
    del resting
    accumulator.reset()
    # the garbage collector may be the one that ends it, in a thread that holds a store's lock
    (storage,) = store.storages
    accumulator.open()
    assert storage not in store.storages, "something may be wrong with it"
    assert len(store.storages) == 1
    store.close()


def _raise(error: Exception) -> None:
    raise error
