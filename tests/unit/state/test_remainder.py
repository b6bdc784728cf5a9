"""fp32 masters as bf16 weights and 16-bit remainders: every bit comes back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.memory import Pages
from zeroshard.state.remainder import RemainderStorage
from zeroshard.state.state import DeviceMemory, State
from zeroshard.tier.store import Direct

# bf16 patterns: zeros, denormals, the ends of exponents, one, its odd neighbour, the largest
# numbers, infinities
_TOPS = (0x0000, 0x0001, 0x007F, 0x0080, 0x00FF, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80)


_MEMORY = DeviceMemory(torch.device("cpu"), Pages(), Direct())


def _storage(numel: int) -> tuple[RemainderStorage, torch.Tensor]:
    weights = torch.zeros(numel, dtype=torch.bfloat16)
    return RemainderStorage("test", State(weights), _MEMORY), weights


def _floats(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, where one NaN is as good as another."""
    lost = expected.isnan()
    equal = found.view(torch.int32) == expected.view(torch.int32)
    return bool(torch.where(lost, found.isnan(), equal).all())


def _check(masters: torch.Tensor) -> None:
    storage, weights = _storage(masters.numel())
    storage.write(0, masters.numel(), masters)
    rounded = masters.to(torch.bfloat16)
    assert torch.equal(weights.view(torch.int16), rounded.view(torch.int16))
    found = torch.empty_like(masters)
    storage.read(0, masters.numel(), found)
    assert _same(found, masters)


@pytest.mark.parametrize("top", [sign | top for sign in (0, 0x8000) for top in _TOPS])
def test_every_low_half_comes_back_beside_special_tops(top: int) -> None:
    _check(_floats(torch.arange(1 << 16) | (top << 16)))


@pytest.mark.parametrize("low", [0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_every_top_comes_back_beside_special_low_halves(low: int) -> None:
    _check(_floats((torch.arange(1 << 16) << 16) | low))


@settings(deadline=None)
@given(st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=200))
def test_any_bits_come_back(numbers: list[int]) -> None:
    _check(_floats(torch.tensor(numbers)))


def test_ties_that_were_rounded_down_take_twelve_bytes_each_until_they_move() -> None:
    storage, weights = _storage(300)
    ties = _floats((torch.arange(300) + 0x3F80 << 16) | 0x8000)
    storage.write(0, 300, ties)
    assert storage.num_bytes == 2 * 300 + 12 * 150  # every other one rounds down
    storage.write(100, 200, torch.ones(100))
    assert storage.num_bytes == 2 * 300 + 12 * 100
    with storage.borrowed(0, 300, write=False) as found:
        assert _same(found, torch.cat([ties[:100], torch.ones(100), ties[200:]]))
    with storage.borrowed(50, 250, write=True) as lent:
        lent.add_(1e-3)
    with storage.borrowed(0, 300, write=False) as found:
        moved = torch.cat([ties[50:100], torch.ones(100), ties[200:250]]) + 1e-3
        assert _same(found, torch.cat([ties[:50], moved, ties[250:]]))
    assert torch.equal(weights, found.to(torch.bfloat16))


def test_masters_follow_weights_until_they_are_written() -> None:
    weights = torch.randn(50).to(torch.bfloat16)
    storage = RemainderStorage("test", State(weights), _MEMORY)
    with storage.borrowed(10, 40, write=False) as found:
        assert torch.equal(found, weights[10:40].float())


def test_what_is_lent_and_not_to_be_written_or_raises_changes_nothing() -> None:
    storage, weights = _storage(8)
    storage.write(0, 8, torch.full((8,), 1.001))
    with pytest.raises(ZeroDivisionError), storage.borrowed(0, 8, write=True) as lent:
        lent.zero_()
        raise ZeroDivisionError
    with storage.borrowed(0, 8, write=False) as lent:
        lent.zero_()
    found = torch.empty(8)
    storage.read(0, 8, found)
    assert torch.equal(found, torch.full((8,), 1.001)) and torch.equal(weights, found.bfloat16())
