"""How the ranks of one mesh exchange bytes, in one frozen value.

Invariant: every rank gives `make_transport` an equal one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zeroshard.core.placement import Mesh

__all__ = ["CommSpec"]


@dataclass(frozen=True)
class CommSpec:
    """What a transport is asked for."""

    mesh: Mesh  # of the group's ranks: its nodes shape the canonical sum
    # "auto" takes what fits the device; "one_process", "shared_memory", "gloo", "mixed" and "nccl"
    # are made or refused
    name: str = "auto"
    # sum canonically also where the backend has a faster sum of its own
    ordered: bool | None = None
    stall_timeout_s: float = 300.0
    # of the gradient buffers, of which at least one is always given; None: twice the largest
    pool_bytes: int | None = None
    # let sharded windows of one host be one mapping, which is the full buffer
    alias: bool = True
    # collectives go in two levels, inside nodes and between; None: where fewer bytes leave a host
    two_level: bool | None = None
    columns: bool = False  # the row keeps columns
    node_sums: bool = False  # the row keeps sums of nodes
    hop_dtype: torch.dtype = torch.float32  # in which sums of nodes travel
    # what errors call the ranks; (): their numbers in the group
    members: tuple[int, ...] = ()
