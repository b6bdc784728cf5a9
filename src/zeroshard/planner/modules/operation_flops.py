"""FLOPs of one operation: those that ``torch.utils.flop_counter`` knows (matrix products,
convolutions, attention), and two kernels of the CPU that it does not.

    attention on the CPU     as torch counts it elsewhere
    oneDNN's recurrent layer 2 per token and weight in the forward, 4 in the backward

Everything else, elementwise operations above all, counts nothing. Invariant: only shapes are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

_aten = torch.ops.aten


def flops_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> float:
    """Return the FLOPs of ``func(*args, **kwargs)``, which has returned `out`."""
    packet = getattr(func, "overloadpacket", None)
    if packet in _OF_THE_CPU:
        return float(_OF_THE_CPU[packet](args))
    count = flop_registry.get(packet)
    return 0.0 if count is None else float(count(*args, **kwargs, out_val=out))


def _recurrent(args: Sequence[Any]) -> float:
    """Return the FLOPs of a layer with input [..., features] and weights of input and state."""
    given, weights = args[0], args[1:3]
    tokens: int = given.numel() // given.shape[-1]
    num_weights: int = sum(weight.numel() for weight in weights)
    return 2.0 * tokens * num_weights


def _attention(args: Sequence[Any]) -> float:
    shapes = (tensor.shape for tensor in args[:3])  # query, key, value
    return float(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]


def _attention_backward(args: Sequence[Any]) -> float:
    shapes = (tensor.shape for tensor in args[:4])  # gradient, query, key, value
    return float(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


_OF_THE_CPU: dict[Any, Callable[[Sequence[Any]], float]] = {
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten.mkldnn_rnn_layer_backward: lambda args: 2 * _recurrent(args),
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
