"""Equal bits give equal digests, on CPU and by the sum that devices form; a bit, a place or a
length that differs does not.
"""

from __future__ import annotations

import pytest
import torch
import xxhash
from hypothesis import assume, given
from hypothesis import strategies as st

from zeroshard.core.digest import CHUNK_BYTES, digest_of, mixed_sum

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool)


def summed(tensor: torch.Tensor) -> int:
    """Return the number that a device would form."""
    return int(mixed_sum(tensor.contiguous().view(-1).view(torch.uint8)))


def some(seed: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(st.integers(0, 99), st.sampled_from(DTYPES), st.integers(1, 300), st.data())
def test_one_bit_is_seen(seed: int, dtype: torch.dtype, numel: int, data: st.DataObject) -> None:
    tensor = some(seed, numel, dtype)
    before = summed(tensor), digest_of(tensor)
    at = data.draw(st.integers(0, 8 * numel * dtype.itemsize - 1))
    tensor.view(torch.uint8)[at // 8] ^= 1 << at % 8
    assert summed(tensor) != before[0] and digest_of(tensor) != before[1]


@given(st.integers(0, 99), st.sampled_from(DTYPES[:-1]), st.integers(2, 300), st.data())
def test_two_elements_in_each_others_place_are_seen(
    seed: int, dtype: torch.dtype, numel: int, data: st.DataObject
) -> None:
    tensor = some(seed, numel, dtype)
    one, other = data.draw(st.tuples(*[st.integers(0, numel - 1)] * 2))
    assume(tensor[one] != tensor[other])
    before = summed(tensor)
    tensor[[one, other]] = tensor[[other, one]]
    assert summed(tensor) != before


def test_every_pair_of_words_in_each_others_place_is_seen() -> None:
    words = some(1, 64).view(torch.int64)
    seen = {summed(words)}
    for one in range(words.numel()):
        for other in range(one):
            swapped = words.clone()
            swapped[[one, other]] = words[[other, one]]
            seen.add(summed(swapped))
    assert len(seen) == 1 + 32 * 31 // 2


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_word_is_not_taken_for_its_complement(word: int) -> None:
    words = torch.tensor([word])
    assert summed(words) != summed(~words)


def test_chunks_have_places_too() -> None:
    tensor = torch.zeros(CHUNK_BYTES + 13, dtype=torch.uint8)
    tensor[5] = 1
    later = tensor.roll(CHUNK_BYTES)
    assert summed(later) != summed(tensor)
    last = tensor.clone()
    last[-1] = 1
    assert summed(last) != summed(tensor)


def test_bits_count_and_not_numbers() -> None:
    zeros, others = torch.zeros(9), torch.full((9,), -0.0)
    nan = torch.full((9,), float("nan"))
    payload = (nan.view(torch.int32) + 1).view(torch.float32)
    assert payload.isnan().all()
    for make in (summed, digest_of):
        assert len({make(tensor) for tensor in (zeros, others, nan, payload)}) == 4
        assert make(nan.clone()) == make(nan)


@given(st.integers(0, 40), st.integers(0, 9))
def test_where_the_bytes_lie_does_not_count(numel: int, offset: int) -> None:
    tensor = some(3, numel)
    moved = torch.cat([torch.zeros(offset), tensor])[offset:]
    assert summed(moved) == summed(tensor) and digest_of(moved) == digest_of(tensor)
    rows = some(3, 3 * numel).view(3, numel)
    assert digest_of(rows.t()) == digest_of(rows.t().contiguous())


def test_zeros_at_the_end_count() -> None:
    assert len({summed(torch.zeros(numel, dtype=torch.uint8)) for numel in range(20)}) == 20


def test_on_cpu_it_is_a_hash_of_the_bytes_of_all_tensors() -> None:
    one, other = some(1, 10), some(2, 3, torch.bfloat16)
    data = one.numpy().tobytes() + other.view(torch.uint8).numpy().tobytes()
    assert digest_of(one, other) == xxhash.xxh3_64_hexdigest(data)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_forms_the_sum_of_the_cpu(dtype: torch.dtype) -> None:
    for numel in (0, 1, 1000, CHUNK_BYTES + 13):
        tensor = some(4, numel, dtype)
        expected = xxhash.xxh3_64_hexdigest(mixed_sum(tensor.view(torch.uint8)).numpy().tobytes())
        assert digest_of(tensor.cuda()) == expected
