"""Sums of mixed bits that add up over slices: what is cut over ranks has one digest, however it was
cut, and nobody gathers it.

    rank 0   a[:5]    h(a[0]) + .. + h(a[4])    \\
    rank 1   a[5:]    h(a[5]) + .. + h(a[9])     >  sum modulo 2**64: the digest of a

``h`` mixes the bits of an element with its place (core/tensor_digest.py). Parameters of which one
sum is formed are counted from places of their own (`place_of`), so that two of them in each other's
place are seen.

Cost: about 15 passes over the elements as words of 64 bits, 5 ns each on one core; on a device no
wait of the host for `placed_total`.
"""

from __future__ import annotations

import torch
import xxhash

from zeroshard.core.tensor_digest import CHUNK_BYTES, ODD, mixed

__all__ = ["MASK", "place_of", "placed_sum", "placed_total"]

MASK = (1 << 64) - 1
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size of an element
_CACHED_WORDS = 1 << 16  # on the CPU three chunks of words stay in its caches


def placed_sum(tensor: torch.Tensor, first: int) -> int:
    """Return a 64-bit sum of the mixed bits of elements [first, first + numel) of something whole,
    which `tensor` holds: the sums of its parts add up to the same number however it was cut.
    """
    return int(placed_total(tensor, first)) & MASK


def placed_total(tensor: torch.Tensor, first: int) -> torch.Tensor:
    """Return `placed_sum` as a signed number on the tensor's device, int64 [1]. Does not wait for
    it.
    """
    flat = tensor.detach().reshape(-1).view(_BITS[tensor.element_size()])
    size = _CACHED_WORDS if flat.device.type == "cpu" else CHUNK_BYTES // 8
    total = torch.zeros(1, dtype=torch.int64, device=flat.device)
    for start in range(0, flat.numel(), size):
        words = flat[start : start + size].to(torch.int64, copy=True)
        begin = first + start
        words.add_(torch.arange(begin, begin + words.numel(), device=words.device).mul_(ODD))
        total.add_(mixed(words).sum())
    return total


def place_of(name: str) -> int:
    """Return where the elements of a parameter are counted from: apart from those of others."""
    return (xxhash.xxh3_64_intdigest(name.encode()) >> 32) << 24
