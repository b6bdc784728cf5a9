"""A device for the ranks of `tests.support.harness`: of several GPUs, each rank sees its own alone,
as under a launcher that sets ``CUDA_VISIBLE_DEVICES`` for each. So "cuda:0" is that one.
"""

from __future__ import annotations

import os


def take_rank(rank: int) -> None:
    """Let this process, which has not used CUDA yet, see the GPU of `rank` alone."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    every = visible.split(",") if visible else []
    os.environ["CUDA_VISIBLE_DEVICES"] = every[rank] if every else str(rank)
