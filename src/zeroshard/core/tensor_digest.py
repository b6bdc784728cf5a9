"""A 64-bit digest of the bits of tensors, by which ranks compare what they hold.

On CPU it is xxh3 of the bytes, at about the speed of memory. On a device, from which they would all
travel through pageable memory, it is formed where they are, and 8 bytes travel: words of 64 bits
are mixed with their places and added up::

    sum of mix(word[i] + i * ODD)  modulo 2**64,  i = 0, 1, ...

Invariant: equal bits give equal digests on devices of one kind, since integers have one sum in
every order. `mix` is a bijection, so one word that differs is always seen; any other difference
(two elements in each other's place, several that changed) is missed with probability 2**-64, if it
was not made to be. Bits count, not numbers: 0.0 is not -0.0, and a NaN equals itself.

Cost on a device: about 15 passes over the bytes, with scratch of three chunks, and one wait of the
host per tensor. ``torch.hash_tensor`` is no substitute: it forgets the places of elements.
"""

from __future__ import annotations

import torch
import xxhash

CHUNK_BYTES = 1 << 24
ODD = -0x61C8864680B583EB  # 2**64 / the golden ratio, as a signed number
_FACTORS = (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)  # splitmix64's, odd


def digest_of(*tensors: torch.Tensor) -> str:
    """Return one digest of the bits of `tensors`, of any dtypes and devices, as 16 hexadecimal
    digits.
    """
    state = xxhash.xxh3_64()
    for tensor in tensors:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        here = data if data.device.type == "cpu" else mixed_sum(data).cpu()
        state.update(here.numpy())  # type: ignore[arg-type]  # a buffer
    return state.hexdigest()


def mixed_sum(data: torch.Tensor) -> torch.Tensor:
    """Return the sum of the mixed words of `data` [n], uint8, as int64 [1] on its device. Does not
    wait for it.
    """
    total = torch.full((1,), data.numel(), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), CHUNK_BYTES):
        part = data[start : start + CHUNK_BYTES]
        words = torch.zeros(-(-part.numel() // 8), dtype=torch.int64, device=data.device)
        words.view(torch.uint8)[: part.numel()].copy_(part)  # which need not begin on a word
        first = start // 8
        places = torch.arange(first, first + words.numel(), device=data.device)
        words.add_(places.mul_(ODD))
        total.add_(mixed(words).sum())
    return total


def mixed(words: torch.Tensor) -> torch.Tensor:
    """Mix the bits of each word, in place."""
    for factor in _FACTORS:
        _fold(words)
        words.mul_(factor)
    _fold(words)
    return words


def _fold(words: torch.Tensor) -> None:
    """Combine the low half of each word with its high half, which stays."""
    # >> repeats the sign
    words.bitwise_xor_((words >> 32).bitwise_and_(0xFFFFFFFF))
