"""The codecs' contract, run on every codec: error bounds, zeros, NaN and Inf, slices, sums,
dtypes; and the layout of each on the wire.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from zeroshard.comm import codec as codecs
from zeroshard.comm.codec import CODECS, Codec, Fp8, Int4, Int8, codec, engine_of

ALL = [codec(name, block=block) for name in CODECS for block in (64, 192, 256)]
HALVES = (torch.bfloat16, torch.float16)
every_codec = pytest.mark.parametrize("coder", ALL, ids=lambda c: f"{c.name}-{c.block}")

MAX = torch.finfo(torch.float32).max
SPECIAL = [0.0, -0.0, 1.0, -3e-7, 1e20, -1e-42, 1.4e-45, 1.1754944e-38, MAX, -MAX]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """fp32 of any size and magnitude, with zeros, denormals, huge and arbitrary numbers put
    anywhere.
    """
    numel = draw(st.integers(1, 700))
    values = normal(numel, seed=draw(st.integers(0, 1000))) * 10.0 ** draw(
        st.sampled_from([-43, -38, -30, -4, 0, 5, 30])
    )
    placed = st.tuples(
        st.integers(0, numel - 1),
        st.sampled_from(SPECIAL) | st.floats(width=32, allow_nan=False, allow_infinity=False),
    )
    for place, value in draw(st.lists(placed, max_size=8)):
        values[place] = value
    return values.clamp(-MAX, MAX)


def encoded(coder: Codec, source: torch.Tensor) -> torch.Tensor:
    out = torch.full((coder.encoded_bytes(source.numel()),), 0xAB, dtype=torch.uint8)
    coder.encode(source, out)
    return out


def decoded(
    coder: Codec, data: torch.Tensor, numel: int, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    out = torch.full((numel,), math.nan, dtype=dtype)
    coder.decode(data, out)
    return out


def round_trip(coder: Codec, source: torch.Tensor) -> torch.Tensor:
    return decoded(coder, encoded(coder, source), source.numel())


def normal(numel: int, seed: int = 0) -> torch.Tensor:
    """Values over many magnitudes, as gradients are."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(numel, generator=generator) * torch.exp(
        3 * torch.randn(numel, generator=generator)
    )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return a.dtype == b.dtype and torch.equal(a.view(kind), b.view(kind))


def check_bounds(coder: Codec, source: torch.Tensor) -> None:
    error = (round_trip(coder, source).double() - source.double()).abs()
    for values, errors in zip(
        source.double().split(coder.block), error.split(coder.block), strict=True
    ):
        amax = values.abs().max().item()
        assert errors.max().item() <= coder.error_bound(amax), (amax, errors.max())
        if coder.name == "fp8":  # half an ulp, which is smaller for smaller values
            scale = coder.error_bound(amax) / (16 + 448 * 2.0**-22)
            assert (
                errors <= (values.abs() / 16).clamp(min=scale * 2.0**-10) + values.abs() * 2.0**-21
            ).all()


@pytest.mark.parametrize(
    ("name", "near"), [("int9", "int8"), ("fp88", "fp8"), ("INT4", "int4"), ("", "")]
)
def test_an_unknown_name_is_refused_with_the_nearest_one(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"{name!r} is not one of int8, int4, fp8.*{near}"):
        codec(name)


@pytest.mark.parametrize("block", [0, -64, 1, 63, 100])
@pytest.mark.parametrize("name", CODECS)
def test_a_block_that_shards_could_cut_is_refused(name: str, block: int) -> None:
    with pytest.raises(ValueError, match=f"{name}: block={block} is not a positive multiple of 64"):
        codec(name, block=block)


def test_codecs_are_values() -> None:
    assert (
        codec("int8") == Int8(256)
        and codec("int8") != codec("int4")
        and len({Int8(), Int8(256), Int8(64)}) == 2
    )
    assert (Int8.largest, Int4.largest, Fp8.largest) == (127, 7, 448)
    assert (Int8().bits, Int4().bits, Fp8().bits) == (8, 4, 8)
    assert (Int8().stride, Int4().stride, Fp8(64).stride, Int4(64).stride) == (260, 132, 68, 36)
    assert engine_of(torch.zeros(1)) == "torch"


@every_codec
def test_elements_map_linearly_to_bytes(coder: Codec) -> None:
    block, stride = coder.block, coder.stride
    assert stride % 4 == 0
    assert [coder.encoded_bytes(n) for n in (0, 1, block, block + 1)] == [
        0,
        stride,
        stride,
        2 * stride,
    ]
    assert coder.bytes_of((3 * block, 7 * block)) == (3 * stride, 7 * stride)
    assert coder.bytes_of((block, block + 1)) == (stride, 2 * stride)  # the end of a tensor
    assert coder.bytes_of((2 * block, 2 * block)) == (2 * stride, 2 * stride)
    with pytest.raises(ValueError, match=f"element 1 is not the first of a block of {block}"):
        coder.bytes_of((1, block))


@every_codec
@given(source=tensors())
@settings(max_examples=40, deadline=None)
def test_a_value_is_off_by_half_a_step_at_most(coder: Codec, source: torch.Tensor) -> None:
    check_bounds(coder, source)


@every_codec
def test_half_a_step_is_what_it_takes(coder: Codec) -> None:
    source = torch.rand(100, coder.block, generator=torch.Generator().manual_seed(0))
    source[:, 0] = 1.0
    source = source.flatten()
    worst = (round_trip(coder, source) - source).abs().max().item()
    assert worst > 0.97 * coder.error_bound(1.0)


@every_codec
@given(source=tensors(), seed=st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_zeros_stay_zero(coder: Codec, source: torch.Tensor, seed: int) -> None:
    source[torch.rand(source.numel(), generator=torch.Generator().manual_seed(seed)) < 0.5] = 0.0
    assert (round_trip(coder, source)[source == 0] == 0).all()
    assert (round_trip(coder, torch.zeros_like(source)) == 0).all()


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_never_hidden(coder: Codec, dtype: torch.dtype, bad: float) -> None:
    source = normal(6 * coder.block - 5).clamp(-6e4, 6e4).to(dtype)
    clean = encoded(coder, source)
    for place in (0, 2 * coder.block - 1, source.numel() - 1):
        block = place // coder.block
        broken = source.clone()
        broken[place] = bad
        data = encoded(coder, broken)
        out = decoded(coder, data, broken.numel(), dtype)
        inside = torch.arange(out.numel()) // coder.block == block
        assert out[inside].isnan().all() and out[~inside].isfinite().all()
        touched = (data != clean).nonzero() // coder.stride
        assert touched.unique().tolist() == [block]
        own = data[block * coder.stride : (block + 1) * coder.stride]
        # one pattern, whatever NaN it was and on every processor
        assert own.tolist() == [0, 0, 0xC0, 0x7F] + [0] * (coder.stride - 4)


@every_codec
@pytest.mark.parametrize(
    "amax", [1.4e-45, 2.7e-43, 1e-40, 1.1754942e-38, 1.1754944e-38, 1.4e-36, 3e38, MAX]
)
def test_denormal_and_huge_blocks_work(coder: Codec, amax: float) -> None:
    source = torch.linspace(-1, 1, 2 * coder.block - 1, dtype=torch.float64).mul(amax).float()
    assert round_trip(coder, source).isfinite().all()
    check_bounds(coder, source)
    data = encoded(coder, source)
    assert torch.equal(encoded(coder, decoded(coder, data, source.numel())), data)


@every_codec
@pytest.mark.parametrize(
    "numel", [0, 1, 63, 64, 255, 257, 1000, codecs.TILE["cpu"] - 1, 2 * codecs.TILE["cpu"] + 65]
)
def test_any_number_of_elements_goes_through(coder: Codec, numel: int) -> None:
    source = normal(numel)
    data = encoded(coder, source)
    padded = torch.zeros(-(-numel // coder.block) * coder.block)
    padded[:numel] = source
    assert torch.equal(data, encoded(coder, padded))  # a short last block is padded with zeros
    assert same_bits(decoded(coder, data, numel), decoded(coder, data, padded.numel())[:numel])


@every_codec
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_slice_on_block_boundaries_travels_by_itself(coder: Codec, data: st.DataObject) -> None:
    numel = data.draw(st.integers(1, 20 * coder.block))
    blocks = -(-numel // coder.block)
    first = data.draw(st.integers(0, blocks))
    start, stop = (
        first * coder.block,
        min(data.draw(st.integers(first, blocks)) * coder.block, numel),
    )
    start = min(start, stop)
    if start % coder.block:
        return
    source = normal(numel, seed=first)
    whole = encoded(coder, source)
    begin, end = coder.bytes_of((start, stop))
    assert torch.equal(encoded(coder, source[start:stop]), whole[begin:end])
    assert same_bits(
        decoded(coder, whole[begin:end], stop - start), decoded(coder, whole, numel)[start:stop]
    )


@every_codec
@given(source=tensors())
@settings(max_examples=40, deadline=None)
def test_encoding_what_was_decoded_gives_the_same_bytes(coder: Codec, source: torch.Tensor) -> None:
    data = encoded(coder, source)
    assert torch.equal(encoded(coder, source), data)
    assert torch.equal(encoded(coder, decoded(coder, data, source.numel())), data)


@pytest.mark.parametrize("largest", [cls.largest for cls in CODECS.values()])
def test_every_scale_comes_back_from_its_largest_value(largest: int) -> None:
    # all of [1, 2): what idempotence rests on
    amax = torch.arange(0x3F800000, 0x40000000, dtype=torch.int32).view(torch.float32)
    by = torch.tensor(float(largest))
    scale = amax / by
    assert torch.equal((scale * by) / by, scale)


@every_codec
@pytest.mark.parametrize("dtype", HALVES)
def test_half_precision_is_widened_before_and_rounded_once_after(
    coder: Codec, dtype: torch.dtype
) -> None:
    # large enough that fp16's denormals are finer than the codes
    source = normal(50 * coder.block + 17).clamp(-6e4, 6e4).to(dtype)
    data = encoded(coder, source)
    assert torch.equal(data, encoded(coder, source.float()))
    out = decoded(coder, data, source.numel(), dtype)
    assert same_bits(out, decoded(coder, data, source.numel()).to(dtype))
    assert torch.equal(encoded(coder, out), data)


@every_codec
def test_adding_adds_in_fp32(coder: Codec) -> None:
    numel = codecs.TILE["cpu"] + 100
    data, total = encoded(coder, normal(numel)), normal(numel, seed=1)
    expected = total + decoded(coder, data, numel)
    coder.decode(data, total, add=True)
    assert same_bits(total, expected)
    for dtype in HALVES:
        with pytest.raises(ValueError, match=f"codec {coder.name}: adding to {dtype} would round"):
            coder.decode(data, total.to(dtype), add=True)


@every_codec
@pytest.mark.parametrize("numel", [0, 1, 1000, codecs.TILE["cpu"] + 100])
def test_a_sum_is_formed_in_order_and_rounded_once(coder: Codec, numel: int) -> None:
    parts = [encoded(coder, normal(numel, seed=rank)) for rank in range(4)]
    values = [decoded(coder, part, numel) for part in parts]
    total = ((values[0] + values[1]) + values[2]) + values[3]
    for dtype in (torch.float32, *HALVES):
        out = torch.full((numel,), math.nan, dtype=dtype)
        coder.decode_sum(parts, out)
        assert same_bits(out, total.to(dtype))
    coder.decode_sum(parts[:1], values[1])
    assert same_bits(values[1], values[0])


@every_codec
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int32, torch.int64, torch.bool, torch.complex64]
)
def test_other_dtypes_are_refused_by_name(coder: Codec, dtype: torch.dtype) -> None:
    data = torch.zeros(coder.stride, dtype=torch.uint8)
    values = torch.zeros(coder.block, dtype=dtype)
    for call in (
        lambda: coder.encode(values, data),
        lambda: coder.decode(data, values),
        lambda: coder.decode_sum([data], values),
    ):
        with pytest.raises(
            ValueError, match=f"codec {coder.name} takes fp32, bf16 or fp16, not {dtype}"
        ):
            call()
    with pytest.raises(
        ValueError, match=f"codec {coder.name}: the encoding is torch.uint8, not {dtype}"
    ):
        coder.encode(torch.zeros(coder.block), data.to(dtype))


@every_codec
def test_buffers_that_do_not_fit_are_refused(coder: Codec) -> None:
    values, data = torch.zeros(coder.block), torch.zeros(2 * coder.stride, dtype=torch.uint8)
    for bad in (
        data,
        data[: coder.stride - 1],
        data[2 : 2 + coder.stride],
        data[::2],
        data[: coder.stride].view(2, -1),
    ):
        with pytest.raises(AssertionError):
            coder.encode(values, bad)


@pytest.mark.parametrize("coder", [Int8(), Int4(64)], ids=lambda c: c.name)
def test_whole_number_codes_are_those_of_the_formula(coder: Codec) -> None:
    source = normal(40 * coder.block)
    data = encoded(coder, source).view(-1, coder.stride)
    blocks = source.view(-1, coder.block).numpy()
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(coder.largest)
    codes = np.rint(blocks / scale)
    assert np.array_equal(data[:, :4].contiguous().view(torch.float32).numpy(), scale)
    if coder.name == "int4":
        codes = codes[:, :32] + 16 * codes[:, 32:]
    assert np.array_equal(data[:, 4:].contiguous().view(torch.int8).numpy(), codes.astype(np.int8))


def test_int4_packs_element_j_with_element_j_plus_half_a_block() -> None:
    source = torch.zeros(64)
    source[[0, 32, 1, 33, 2, 34, 3, 63]] = torch.tensor([7.0, -7, 3, -1, -7, 7, -2, 5])
    data = encoded(Int4(64), source)
    assert data[:4].view(torch.float32).item() == 1.0
    packed = data[4:].view(torch.int8)
    assert (
        packed[:5].tolist() == [7 - 16 * 7, 3 - 16, -7 + 16 * 7, -2, 0]
        and packed[31].item() == 5 * 16
    )
    assert same_bits(round_trip(Int4(64), source), source)  # no -0.0 either


def test_fp8_codes_are_torchs_and_every_one_decodes_as_torch_decodes_it() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]  # the two NaNs, which no finite block holds
    values = codes.view(torch.float8_e4m3fn).float()
    source = torch.cat([values, torch.zeros(2)])
    assert same_bits(round_trip(Fp8(), source), source)
    assert torch.equal(encoded(Fp8(), source)[4:258], codes)
    between = torch.linspace(-448, 448, 100_096).view(-1, 64)
    between[:, 0] = 448  # scale 1
    assert same_bits(
        round_trip(Fp8(64), between.flatten()), between.flatten().to(torch.float8_e4m3fn).float()
    )


class _Sizes(TorchDispatchMode):
    """The bytes of every storage that appears, by address."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return result


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scratch_does_not_grow_with_the_tensor(coder: Codec, dtype: torch.dtype) -> None:
    numel = 8 * codecs.TILE["cpu"] + 3
    source, data = (
        torch.zeros(numel, dtype=dtype),
        torch.zeros(coder.encoded_bytes(numel), dtype=torch.uint8),
    )
    with _Sizes() as sizes:
        coder.encode(source, data)
        coder.decode(data, source)
        coder.decode_sum([data, data], source)
    for own in (source, data):
        sizes.seen.pop(own.data_ptr(), None)
    assert 0 < max(sizes.seen.values()) <= 6 * codecs.TILE["cpu"]  # a tile and a half of fp32


@every_codec
def test_threads_do_not_share_scratch(coder: Codec) -> None:
    sources = [normal(30 * coder.block + 7, seed=seed) for seed in range(8)]
    expected = [encoded(coder, source) for source in sources]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert all(
                torch.equal(a, b)
                for a, b in zip(
                    pool.map(lambda source: encoded(coder, source), sources), expected, strict=True
                )
            )


def test_modes_of_the_caller_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    source = normal(1000)
    for coder in ALL:
        expected = encoded(coder, source)
        monkeypatch.setattr(codecs, "_kept", codecs._Kept())
        with torch.inference_mode():
            assert torch.equal(encoded(coder, source), expected)
        assert torch.equal(encoded(coder, source.clone().requires_grad_()), expected)
        total = torch.zeros(1000, dtype=torch.bfloat16)
        torch.set_default_dtype(torch.float64)
        try:
            with torch.device("meta"):
                monkeypatch.setattr(codecs, "_kept", codecs._Kept())
                coder.encode(source, expected)
                coder.decode_sum([expected], total)
        finally:
            torch.set_default_dtype(torch.float32)
        assert same_bits(total, decoded(coder, expected, 1000, torch.bfloat16))
