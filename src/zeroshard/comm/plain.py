"""Bytes of every rank to every rank through a process group, without pickle:
``all_gather_object`` would execute what a peer sends.

Cost: two collectives, of 8 bytes and of the longest payload per rank.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from zeroshard.comm.compat import all_gather_single

__all__ = ["gather_bytes"]


def gather_bytes(group: dist.ProcessGroup, payload: bytes) -> list[bytes]:
    """Return every rank's `payload`, of any size, in rank order. Collective."""
    device, size = _device_of(group), group.size()
    lengths = torch.zeros(size, dtype=torch.int64, device=device)
    all_gather_single(
        lengths, torch.tensor([len(payload)], dtype=torch.int64, device=device), group=group
    )
    longest = max(1, *(int(length) for length in lengths.tolist()))
    padded = torch.frombuffer(bytearray(payload.ljust(longest, b"\0")), dtype=torch.uint8).to(
        device
    )
    rows = torch.empty(size * longest, dtype=torch.uint8, device=device)
    all_gather_single(rows, padded, group=group)
    return [
        row[:length].numpy().tobytes()
        for row, length in zip(rows.cpu().view(size, longest), lengths.tolist(), strict=True)
    ]


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Return where tensors have to lie for the collectives of `group`: the CPU where it has a
    backend for it.
    """
    try:
        group._get_backend(torch.device("cpu"))
    except RuntimeError:
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None, dist.get_backend(group)
        return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
