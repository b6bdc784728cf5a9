"""The Triton kernel of the canonical sum gives the bits of the torch code, on any number of ranks.

As in test_codec_kernels.py: interpreted and compiled without a GPU where Triton is installed,
compared on a GPU where there is one.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.triton_process import run_here
from tests.unit.comm.test_ordered import bits, contribution
from zeroshard.comm import kernels_for, ordered
from zeroshard.comm.ordered import ordered_sum

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RUN = 1024  # elements per program
SHAPES = st.one_of(  # ranks, ranks per node
    st.tuples(st.integers(2, 9), st.just(1)).map(lambda shape: (shape[0], shape[0])),
    st.tuples(st.integers(2, 5), st.integers(1, 4)).map(
        lambda shape: (shape[0] * shape[1], shape[1])
    ),
    st.sampled_from([(64, 8), (136, 8), (255, 255)]),
)
NUMELS = st.one_of(st.integers(0, 70), st.sampled_from([RUN, RUN + 1, 2 * RUN - 1, 3 * RUN + 64]))


def hard_rows(seed: int, ranks: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of very different sizes [ranks, numel], and among them both zeros, denormals,
    and sums that overflow or are NaN.
    """
    rows = contribution(seed, ranks * numel, dtype).view(ranks, numel)
    tiny, huge = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    for column, value in enumerate((tiny / 4, -huge, huge, math.inf, math.nan)):
        rows[seed % ranks :, column + 8 : column + 9] = value
    rows[0, 11:12] = -math.inf
    return rows


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bits; any NaN equals any other."""
    number = ~expected.isnan()
    return torch.equal(bits(actual[number]), bits(expected[number])) and bool(
        actual[~number].isnan().all()
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    shape=SHAPES,
    numel=NUMELS,
    dtype=st.sampled_from(DTYPES),
    out_dtype=st.sampled_from(DTYPES),
    accumulate=st.booleans(),
)
def _compare(
    seed: int,
    shape: tuple[int, int],
    numel: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    accumulate: bool,
) -> None:
    from zeroshard.comm import kernels

    ranks, node_size = shape
    rows = hard_rows(seed, ranks, numel, dtype)
    before = contribution(seed + 1, numel + 1, out_dtype)
    expected, actual = before.clone(), before.clone()
    ordered_sum(rows, expected[:numel], node_size=node_size, accumulate=accumulate)
    kernels.sum_rows(rows, actual[:numel], node_size=node_size, accumulate=accumulate)
    assert same(actual, expected), (actual != expected).nonzero()[:5]


def _far_rows() -> None:
    """Sum rows of which the last begins after element 2**31: memory that is reserved, and nearly
    all of it never touched.
    """
    from zeroshard.comm import kernels

    stride, numel = 2**30 + 64, 100
    rows = torch.empty(2 * stride + numel, dtype=torch.float16).as_strided((3, numel), (stride, 1))
    rows.copy_(contribution(7, 3 * numel, torch.float16).view(3, numel))
    expected, actual = torch.empty(numel), torch.empty(numel)
    ordered_sum(rows.clone(), expected)
    kernels.sum_rows(rows, actual, node_size=3, accumulate=False)
    assert same(actual, expected)


def interpret() -> None:
    """Compare the interpreted kernel with the torch code; runs under TRITON_INTERPRET=1."""
    _compare()
    _far_rows()
    print("same bits")


def compile_for_a_gpu() -> None:
    """Print what the kernel comes to on CUDA for each dtype: its floating point instructions, its
    widest loads, and what of a call it is compiled for.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from zeroshard.comm import kernels

    kernel = kernels._sum
    print(*(p.name for p in kernel.params if not p.is_constexpr and p.do_not_specialize))
    constants = {"how": (4, 2, True)}
    counts = dict.fromkeys(("numel", "stride", "num_nodes", "node_size"), "i32")
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(4)}  # shares are, too
    for pointer in ("*fp32", "*i16", "*fp16"):
        kinds = {"rows": pointer, "out": "*fp32"} | counts
        signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, constants, aligned)
        options = dict(kernels.OPTIONS)
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        text = compiled.asm["ptx"]
        found = Counter(re.findall(r"\b(?:div|fma|mad|mul|add|sub|min|max)[.\w]*\.f\d+\b", text))
        widest = max(re.findall(r"ld\.global\.(?:v\d+\.)?b\d+", text), key=_width)
        print(pointer, *sorted(found), widest)


def _width(load: str) -> int:
    return math.prod(int(number) for number in re.findall(r"\d+", load))


if find_spec("triton") is not None:

    def test_the_interpreted_kernel_gives_the_bits_of_the_torch_code() -> None:
        done = run_here(__name__, "interpret", TRITON_INTERPRET="1")
        assert done.returncode == 0 and done.stdout == "same bits\n", done.stderr[-2000:]

    def test_the_compiled_kernel_only_adds_and_is_one_for_numbers_of_ranks_of_as_many_bits(
        tmp_path: object,
    ) -> None:
        environment = {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
        done = run_here(__name__, "compile_for_a_gpu", **environment)
        assert done.returncode == 0, done.stderr[-2000:]
        # nothing fused, approximate or flushed to zero; 16 bytes per thread and load
        assert done.stdout.splitlines() == [
            "num_nodes node_size",
            "*fp32 add.rn.f32 ld.global.v4.b32",
            "*i16 add.rn.f32 ld.global.v4.b32",
            "*fp16 add.rn.f32 ld.global.v4.b32",
        ]


gpu = pytest.mark.gpu
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
@no_gpu
@pytest.mark.parametrize("way", ["triton", "torch"])
@pytest.mark.parametrize("shape", [(2, 2), (8, 8), (16, 8), (64, 8), (256, 256)])
def test_a_gpu_gives_the_bits_of_the_cpu(
    shape: tuple[int, int], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "torch":
        monkeypatch.setattr(ordered, "kernels_for", lambda tensor: None)
    elif find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    ranks, node_size = shape
    for dtype in DTYPES:
        for numel in (1, 1000, 64 * 257):
            rows = hard_rows(3, ranks, numel, dtype)
            for accumulate in (False, True):
                expected = contribution(5, numel, torch.float32)
                actual = expected.cuda()
                ordered_sum(rows, expected, node_size=node_size, accumulate=accumulate)
                ordered_sum(rows.cuda(), actual, node_size=node_size, accumulate=accumulate)
                assert same(actual.cpu(), expected), (dtype, numel, accumulate)


@gpu
@no_gpu
def test_a_gpu_sums_more_than_two_to_the_31_elements() -> None:
    numel = 2**31 + 64
    rows = torch.zeros(2, numel, dtype=torch.bfloat16, device="cuda")
    rows[0, -2:], rows[1, -2:] = 1.0, 2.0
    assert kernels_for(rows) is not None
    out = torch.full((numel,), 7.0, dtype=torch.bfloat16, device="cuda")
    ordered_sum(rows, out)
    assert out[:2].tolist() == [0.0, 0.0] and out[-3:].tolist() == [0.0, 3.0, 3.0]


@gpu
@no_gpu
def test_a_gpu_needs_no_scratch_for_the_sum() -> None:
    rows, out = torch.ones(8, 1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    ordered_sum(rows, out, node_size=4, accumulate=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ordered_sum(rows, out, node_size=4, accumulate=True)
    assert torch.cuda.max_memory_allocated() == before
