"""Encoded sums and error feedback by hand: what is added where, what is kept, and what is
forgotten.
"""

from __future__ import annotations

import pytest
import torch

from zeroshard.comm.codec import codec
from zeroshard.comm.ordered import sum_parts
from zeroshard.comm.quantized import Feedback, Residual

CODEC = codec("int8", block=64)
NUMEL = 200


def numbers(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def encoded(values: torch.Tensor) -> torch.Tensor:
    out = torch.empty(CODEC.encoded_bytes(values.numel()), dtype=torch.uint8)
    CODEC.encode(values, out)
    return out


def decoded(data: torch.Tensor) -> torch.Tensor:
    out = torch.empty(NUMEL)
    CODEC.decode(data, out)
    return out


@pytest.mark.parametrize("accumulate", [False, True], ids=["stored", "added"])
@pytest.mark.parametrize(
    "missing", [(), (1,), (0, 1, 2)], ids=["all come", "one is missing", "nobody comes"]
)
def test_encoded_parts_are_decoded_and_added_in_order(
    missing: tuple[int, ...], accumulate: bool
) -> None:
    parts = [None if rank in missing else encoded(numbers(rank)) for rank in range(3)]
    total = torch.zeros(NUMEL)
    for part in parts:
        total = total if part is None else total + decoded(part)
    out = numbers(9)
    expected = out + total if accumulate else total
    sum_parts(parts, out, codec=CODEC, node_size=None, accumulate=accumulate)
    assert torch.equal(out, expected)


def test_the_residual_follows_the_formula_of_its_note() -> None:
    feedback = Feedback(beta=0.75, reset=4)
    residual = Residual(feedback)
    error = torch.zeros(NUMEL)
    for step in range(10):
        if step % 4 == 0:
            error = torch.zeros(NUMEL)
        corrected = numbers(step) + error
        out = torch.empty(CODEC.encoded_bytes(NUMEL), dtype=torch.uint8)
        residual.encode(CODEC, numbers(step), out)
        assert torch.equal(out, encoded(corrected)), step
        lost = corrected - decoded(out)
        error = (0.75 * lost + 0.25 * error).to(torch.bfloat16).float()


def test_what_is_not_finite_does_not_stay_in_the_residual() -> None:
    residual = Residual(Feedback())
    out = torch.empty(CODEC.encoded_bytes(NUMEL), dtype=torch.uint8)
    broken = numbers(0)
    broken[:64] = float("inf")
    residual.encode(CODEC, broken, out)
    residual.encode(CODEC, numbers(1), out)
    assert decoded(out).isfinite().all()


def test_a_residual_that_is_forgotten_takes_no_memory_and_changes_nothing() -> None:
    residual = Residual(Feedback(reset=None))
    out = torch.empty(CODEC.encoded_bytes(NUMEL), dtype=torch.uint8)
    residual.encode(CODEC, numbers(0), out)
    assert residual.num_bytes == 2 * NUMEL
    residual.reset()
    assert residual.num_bytes == 0
    residual.encode(CODEC, numbers(1), out)
    assert torch.equal(out, encoded(numbers(1)))
