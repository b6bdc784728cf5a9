"""Environment variables for the ranks that suit the machine. A variable that is set stays."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["Setting", "settings_for"]

# torch reads the second, older name too
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class Setting:
    """A variable, its value, and the reason in a line."""

    name: str
    value: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.reason}"


def settings_for(environ: Mapping[str, str], *, num_ranks: int) -> Iterator[Setting]:
    """Yield the settings for `num_ranks` ranks on this machine that `environ` lacks.

    Nothing is set for malloc: no step of ours has been measured to gain from it.
    """
    if "OMP_NUM_THREADS" not in environ:
        cores = len(os.sched_getaffinity(0))
        reason = f"{cores} core(s) for {num_ranks} rank(s)"
        yield Setting("OMP_NUM_THREADS", str(max(cores // num_ranks, 1)), reason)
    if not any(name in environ for name in _ALLOCATOR) and _has_cuda():
        reason = "CUDA memory that fragments less"
        yield Setting(_ALLOCATOR[0], "expandable_segments:True", reason)


def _has_cuda() -> bool:
    import torch

    return torch.version.cuda is not None and torch.cuda.device_count() > 0
