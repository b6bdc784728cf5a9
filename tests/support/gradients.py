"""An accumulator without an engine: of one rank, whose segment is a list of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from zeroshard.core.layout import Layout
from zeroshard.core.placement import Cell, Mesh
from zeroshard.core.work import Probe
from zeroshard.errors import StorageError
from zeroshard.runtime.grad import Accumulator
from zeroshard.runtime.streams import Streams
from zeroshard.state.state import DeviceMemory
from zeroshard.tier.store import Store


def one_accumulator(
    memory: DeviceMemory,
    sizes: Sequence[int],
    *,
    dtype: torch.dtype = torch.float32,
    split: int | None = None,
    store: Store | None = None,
    note: Callable[[StorageError], None],
) -> Accumulator:
    """Return the accumulator of parameters of these `sizes`, whose gradient rests on the device up
    to element `split` (None: all of it).
    """
    named = [(f"p{index}", (size,)) for index, size in enumerate(sizes)]
    layout = Layout.build(named, Mesh(1, 1), align=1)
    whole = (0, layout.numel)
    plan: Any = SimpleNamespace(
        cells=SimpleNamespace(optim=Cell.parse("S S")),
        num_stepped=layout.numel,
        precision=lambda context: SimpleNamespace(accumulate=dtype),
    )
    flat: Any = SimpleNamespace(
        key="unit", layout=layout, own_span=whole, stepped=whole, probe=Probe()
    )
    context: Any = SimpleNamespace(
        transport=SimpleNamespace(rank=0, size=1),
        streams=Streams(),
        memory=memory,
        faults=SimpleNamespace(note=note),
        leaves=None,
    )
    split = layout.numel if split is None else split
    return Accumulator(
        plan, flat, context, store=store, split=split, off_device=split < layout.numel
    )
