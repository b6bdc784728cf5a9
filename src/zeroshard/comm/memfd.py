"""Memory that several processes map: anonymous files (memfd), passed as descriptors.

A memfd has no name in any file system: nothing is left after kill -9, and the size of /dev/shm does
not matter. It is reserved with `posix_fallocate` before anybody maps it, so that a shortage of
memory is an error here and now, not a SIGBUS at the first touch.

Invariant: a mapping outlives its descriptor and lasts as long as a tensor on it; no descriptor
stays open. (torch.from_file is told /proc/self/fd/N, maps, and closes what it opened.)

Cost, measured on 200 MB: reserving 90 ms, first writing touch 280 ms (private memory: 1060 ms),
later ones 16 ms. So memory is made once and kept.
"""

from __future__ import annotations

import os

import torch


def create(num_bytes: int, *, reserved: bool = True) -> int:
    """Return the descriptor of a new memfd of `num_bytes` zero bytes; the caller closes it.
    Raises OSError.
    """
    fd = os.memfd_create("zeroshard", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, max(num_bytes, 1))
        if reserved:
            reserve(fd, 0, num_bytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def reserve(fd: int, start: int, stop: int) -> None:
    """Have the kernel allocate bytes [start, stop) of `fd` now, on this process's NUMA node.
    Raises OSError when memory is short.
    """
    if stop > start:
        os.posix_fallocate(fd, start, stop - start)


def map_bytes(fd: int, num_bytes: int) -> torch.Tensor:
    """Return the first `num_bytes` of `fd` as a shared uint8 tensor; `fd` stays the caller's to
    close.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8)
