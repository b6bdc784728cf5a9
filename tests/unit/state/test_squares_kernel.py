"""The Triton kernel of the sum of squares gives the integers of the torch code.

As in tests/unit/comm/test_sum_kernel.py: interpreted where Triton is installed, compared on a GPU
where there is one.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

from tests.support.triton_process import run_here
from zeroshard.state import norms
from zeroshard.state.norms import squares_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUMELS = (1, 63, 64, 65, 4096, 4097, 20_000)


def hard(numel: int, dtype: torch.dtype, *, odd: float = 0.0) -> torch.Tensor:
    """Return numbers of very different sizes [numel], zeros and denormals among them, and `odd`."""
    generator = torch.Generator().manual_seed(numel)
    numbers = torch.randn(numel, generator=generator)
    numbers *= torch.exp2(torch.randint(-30, 5, (numel,), generator=generator).float())
    numbers[numel // 3 : numel // 2] = 0
    numbers = numbers.to(dtype)
    numbers[numel // 5 :: 777] = torch.finfo(dtype).smallest_normal / 4
    numbers[numel // 7 :: 999] = torch.finfo(dtype).max
    if odd:
        numbers[numel // 2] = odd
    return numbers


def all_hard() -> list[torch.Tensor]:
    """Return slices of every dtype and size."""
    slices = [hard(numel, dtype) for dtype in DTYPES for numel in NUMELS]
    return [
        *slices,
        *(hard(1000, torch.float32, odd=odd) for odd in (math.inf, -math.inf, math.nan)),
    ]


def interpret() -> None:
    """Compare the interpreted kernel with the torch code; runs under TRITON_INTERPRET=1."""
    from zeroshard.comm import kernels

    expected = squares_of(all_hard())
    with mock.patch.object(norms, "kernels_for", lambda tensor: kernels):
        actual = squares_of(all_hard())
    assert torch.equal(actual, expected), (actual != expected).nonzero()[:5]
    print("same integers")


if find_spec("triton") is not None:

    def test_the_interpreted_kernel_gives_the_integers_of_the_torch_code() -> None:
        done = run_here(__name__, "interpret", TRITON_INTERPRET="1")
        assert done.returncode == 0 and done.stdout == "same integers\n", done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("way", ["triton", "torch"])
def test_a_gpu_gives_the_integers_of_the_cpu(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = [*all_hard(), hard(3_000_001, torch.float32), hard(3_000_001, torch.bfloat16)]
    expected = squares_of(slices)
    if way == "torch":
        monkeypatch.setattr(norms, "kernels_for", lambda tensor: None)
    assert torch.equal(squares_of([one.cuda() for one in slices]).cpu(), expected)
