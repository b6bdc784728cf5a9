"""One piece of one parameter, as the optimizer on this rank sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from zeroshard.core.layout import Piece

__all__ = ["ParamShard"]


@dataclass
class ParamShard:
    """One piece that this rank steps."""

    name: str  # of the parameter
    parameter: nn.Parameter
    piece: Piece
    stride: tuple[int, ...]  # of the parameter in the flat buffer
    # [piece.numel] fp32: a view of the master, or of one NaN while it rests on another tier
    tensor: nn.Parameter
    # whether any rank used the parameter since the gradients were cleared
    is_used: Callable[[], bool]
    # its slice of the averaged gradient, or None where no rank used the parameter
    grad: Callable[[], torch.Tensor | None]
    holds: Callable[[], object]  # what keeps the resting gradient alive
    on_device: bool  # where its master rests
    at_rest: Callable[[], torch.Tensor]  # its master, if on the device
    # stepped tile by tile (optim/streamed.py), not by the optimizer's own step
    streamed: bool = False
