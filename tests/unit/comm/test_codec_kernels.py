"""The Triton kernels give the bits of the torch code.

Three ways, by what is there. Triton is no dependency, and the tests that need it are not even
defined where it is not installed: a skip would spend a budget that is zero, and the marker `gpu`
would promise them to machines with a GPU, which they do not need.

- Triton installed: the kernels run on the CPU in Triton's interpreter (a process of its own: the
  variable is read at import), and are compiled for a GPU, whose instructions are looked at. Neither
  needs a GPU.
- A GPU, with or without Triton: what it encodes and decodes is compared with the CPU's.
- Neither: that the library does without Triton.
"""

from __future__ import annotations

import math
import re
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from tests.support.triton_process import run_here
from zeroshard import comm
from zeroshard.comm import codec as codecs
from zeroshard.comm.codec import CODECS, Codec, codec

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = [name for name, cls in CODECS.items() if cls.has_kernel]
CODERS = [codec(name, block=block) for name in NAMES for block in (64, 192, 256)]


def hard_values(block: int, dtype: torch.dtype, num_blocks: int = 130) -> torch.Tensor:
    """Ordinary blocks, and among them zeros, NaN, Inf, denormals, the largest number, ties, and
    a short last one.
    """
    generator = torch.Generator().manual_seed(block)
    values = torch.randn(num_blocks, block, generator=generator) * torch.exp(
        4 * torch.randn(num_blocks, block, generator=generator)
    )
    values[0] = 0.0
    values[1, 3], values[2, block - 1] = math.nan, -math.inf
    values[3] *= 1e-44
    values[4, 0], values[5, 0] = -torch.finfo(dtype).max, torch.finfo(dtype).tiny
    values[6] = torch.arange(block) - block / 2 + 0.5
    values[7] = torch.linspace(-448, 448, block)
    values[8] = torch.linspace(-0.02, 0.02, block)
    values[8, 0] = 448.0
    values[9] *= 1e-36
    return values.flatten()[: (num_blocks - 1) * block + 37].to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, -0.0 apart from 0.0; any NaN equals any other."""
    return (
        torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))
        and torch.equal(a.signbit(), b.signbit())
    )


def interpret() -> None:
    """Compare the interpreted kernels with the torch code; runs under TRITON_INTERPRET=1."""
    from zeroshard.comm import kernels

    for coder in CODERS:
        for dtype in DTYPES:
            what = f"{coder} {dtype}"
            source = hard_values(coder.block, dtype)
            data = torch.zeros(coder.encoded_bytes(source.numel()), dtype=torch.uint8)
            ours = torch.full_like(data, 0xAB)
            coder.encode(source, data)
            kernels.encode(coder, source, ours)
            assert torch.equal(ours, data), (
                f"{what}: encoded bytes {(ours != data).nonzero().flatten()[:5].tolist()} differ"
            )
            for add in (False, True) if dtype == torch.float32 else (False,):
                start = torch.linspace(-3, 3, source.numel()).to(dtype)
                expected, decoded = start.clone(), start.clone()
                coder.decode(data, expected, add=add)
                kernels.decode(coder, data, decoded, add=add)
                finite = ~expected.isnan()  # the sign of a NaN means nothing
                assert (
                    same_bits(decoded[finite], expected[finite]) and decoded[~finite].isnan().all()
                ), f"{what} add={add}"
            kernels.encode(coder, source[:0], data[:0])
            kernels.decode(coder, data[:0], source[:0], add=False)
    print("same bits")


def compile_for_a_gpu() -> None:
    """Print the floating point instructions that the kernels come to on CUDA, without a GPU."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from zeroshard.comm import kernels

    for coder in (codec(name) for name in NAMES):
        tile = kernels.tile_of(coder)
        constants = {"block": coder.block, "tile": tile, "kind": coder.name}
        kinds = {"source": "*fp32", "data": "*u8", "out": "*fp32", "numel": "i32"}
        kinds["limits"] = ("fp32", "fp32", "fp32")
        for kernel, more in ((kernels._encode, {}), (kernels._decode, {"add": True})):
            constexprs = constants | more
            signature = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
            source = ASTSource(kernel, signature, constexprs=constexprs)
            compiled = triton.compile(
                source, target=GPUTarget("cuda", 90, 32), options=dict(kernels.OPTIONS)
            )
            print(
                *sorted(
                    set(
                        re.findall(
                            r"\b(?:div|fma|mad|mul|add|sub|min|max)[.\w]*\.f32\b",
                            compiled.asm["ptx"],
                        )
                    )
                )
            )


def test_without_triton_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it raises ImportError
    monkeypatch.delitem(sys.modules, "zeroshard.comm.kernels", raising=False)
    monkeypatch.delattr("zeroshard.comm.kernels", raising=False)
    comm._kernels.cache_clear()
    try:
        there = SimpleNamespace(device=torch.device("cuda"))
        assert comm.kernels_for(cast(torch.Tensor, there)) is None
    finally:
        comm._kernels.cache_clear()


if find_spec("triton") is not None:

    def test_interpreted_kernels_give_the_bits_of_the_torch_code() -> None:
        done = run_here(__name__, "interpret", TRITON_INTERPRET="1")
        assert done.returncode == 0 and done.stdout == "same bits\n", done.stderr[-2000:]

    def test_compiled_kernels_round_every_operation_to_nearest(tmp_path: object) -> None:
        done = run_here(
            __name__, "compile_for_a_gpu", TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0"
        )
        assert done.returncode == 0, done.stderr[-2000:]
        encode, decode = "add.rn.f32 div.rn.f32 max.f32 min.f32", "add.rn.f32 mul.rn.f32"
        # nothing fused, approximate or flushed to zero
        assert done.stdout.splitlines() == [encode, decode] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("way", ["triton", "torch"])
@pytest.mark.parametrize("coder", CODERS, ids=lambda c: f"{c.name}-{c.block}")
def test_a_gpu_gives_the_bits_of_the_cpu(
    coder: Codec, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "torch":
        monkeypatch.setattr(codecs, "kernels_for", lambda tensor: None)
    elif find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    for dtype in DTYPES:
        source = hard_values(coder.block, dtype, num_blocks=5000)
        data = torch.zeros(coder.encoded_bytes(source.numel()), dtype=torch.uint8)
        coder.encode(source, data)
        on_gpu = torch.zeros_like(data, device="cuda")
        assert codecs.engine_of(on_gpu) == way
        coder.encode(source.cuda(), on_gpu)
        assert torch.equal(on_gpu.cpu(), data)
        expected, decoded = torch.empty_like(source), torch.empty_like(source, device="cuda")
        coder.decode(data, expected)
        coder.decode(on_gpu, decoded)
        finite = ~expected.isnan()
        assert (
            same_bits(decoded.cpu()[finite], expected[finite])
            and decoded.cpu()[~finite].isnan().all()
        )
        coder.decode_sum([data, data, data], expected)
        coder.decode_sum([on_gpu, on_gpu, on_gpu], decoded)
        assert (
            same_bits(decoded.cpu()[finite], expected[finite])
            and decoded.cpu()[~finite].isnan().all()
        )
