"""A gradient at rest, on the device, on the host and in parts: one sequence of sums, averages
and readers, in blocks of a few elements.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.endless_link import Endless
from zeroshard.memory import Pages
from zeroshard.state import gradient as module
from zeroshard.state import reduction
from zeroshard.state.allocator import GradientAllocator
from zeroshard.state.gradient import RestingGradient
from zeroshard.state.state import DeviceMemory
from zeroshard.tier.host import HostStore
from zeroshard.tier.link import Direct

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
    monkeypatch.setattr(reduction, "_CHUNK", 4)


@pytest.fixture
def resting(place: str) -> Iterator[RestingGradient]:
    split, link = (
        PLACES[place][0],
        Direct() if PLACES[place][1] == "direct" else Endless(overlaps=True),
    )
    store = HostStore(CPU, link=link)
    lost: list[object] = []
    made = GradientAllocator(
        "unit",
        NUMEL,
        torch.float32,
        DeviceMemory(CPU, Pages(), link),
        split=split,
        store=store,
        note=lost.append,
    ).open()
    assert made.on_device is (split == NUMEL)
    yield made
    assert lost == []
    store.close()


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def take(resting: RestingGradient, total: torch.Tensor, *, fresh: bool = False) -> None:
    """Do what a reduce does with the sum that it brings."""
    if not resting.on_device:
        resting.take(OWN, total, fresh=fresh)
    elif fresh:
        resting.fetch(*OWN).copy_(total)
    else:
        resting.fetch(*OWN).add_(total)


@everywhere
def test_sums_are_added_averaged_once_and_scaled_wherever_they_rest(
    resting: RestingGradient,
) -> None:
    take(resting, numbers(0), fresh=True)
    take(resting, numbers(1))
    take(resting, numbers(2))
    assert resting.average(OWN, 3.0)
    assert resting.average(OWN, 3.0), "a second time divides by nothing"
    resting.scale(0.3)
    expected = (numbers(0) + numbers(1) + numbers(2)).div(3.0).mul(0.3)
    assert torch.equal(resting.fetch(*OWN), expected)
    assert torch.equal(resting.fetch(5, 71), expected[5:71])
    for start, stop in (OWN, (5, 71), (36, 38), (50, 50)):
        assert resting.squares(start, stop) == pytest.approx(
            float((expected[start:stop].double() ** 2).sum()), rel=1e-12
        )


@everywhere
def test_what_is_added_to_an_average_is_added_to_the_sum_that_it_was(
    resting: RestingGradient,
) -> None:
    take(resting, numbers(0), fresh=True)
    assert resting.average(OWN, 4.0)
    resting.scale(0.5)
    resting.reopen(OWN)
    take(resting, numbers(1))
    assert resting.average(OWN, 4.0)
    assert torch.equal(
        resting.fetch(*OWN), (numbers(0).div(4.0).mul(0.5).mul(4.0) + numbers(1)).div(4.0)
    )


@everywhere
@pytest.mark.parametrize("element", [0, 20, 36, 37, 99])
@pytest.mark.parametrize("late", [False, True], ids=["in the first sum", "in a later sum"])
def test_a_number_that_is_not_finite_is_noticed_wherever_it_is(
    resting: RestingGradient, element: int, late: bool
) -> None:
    broken = numbers(1)
    broken[element] = float("nan") if element % 2 else float("-inf")
    for index, total in enumerate([numbers(0), broken] if late else [broken, numbers(0)]):
        take(resting, total, fresh=index == 0)
    assert not resting.average(OWN, 2.0)
    assert not resting.is_finite(element, element + 1)
    assert resting.is_finite(0, element) and resting.is_finite(element + 1, NUMEL)


@everywhere
def test_a_sum_that_overflows_by_itself_is_no_number_that_is_not_finite(
    resting: RestingGradient,
) -> None:
    take(resting, torch.full((NUMEL,), 3e38), fresh=True)
    assert resting.average(OWN, 2.0)
    assert torch.equal(resting.fetch(*OWN), torch.full((NUMEL,), 3e38) / 2.0)


@everywhere
def test_a_range_that_is_zeroed_is_zero_and_the_rest_stays(resting: RestingGradient) -> None:
    take(resting, numbers(0), fresh=True)
    resting.zero(10, 60)
    expected = numbers(0)
    expected[10:60] = 0.0
    assert torch.equal(resting.fetch(*OWN), expected)


def test_a_sum_on_the_host_is_added_to_the_part_on_the_device_over_there() -> None:
    far = torch.device("meta")
    store = HostStore(CPU)
    memory = DeviceMemory(far, Pages(), Direct())
    resting = GradientAllocator(
        "unit", NUMEL, torch.float32, memory, split=32, store=store, note=_raise
    ).open()
    for is_first in (True, False):
        resting.take(OWN, torch.ones(NUMEL), fresh=is_first)
    with resting.state.borrowed(32, NUMEL, write=False) as there:
        assert there.tolist() == [2.0] * (NUMEL - 32)


def _raise(error: Exception) -> None:
    raise error
