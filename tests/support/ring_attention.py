"""torch's context parallelism on CPU ranks: `context_parallel` dispatches attention to its ring for
CUDA's kernels alone, and this adds the CPU's.

The ring itself, the cut of the sequences and their order (a rank has a part of the head and one of
the tail) are torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@contextmanager
def in_parts(mesh: DeviceMesh, *tensors: tuple[torch.Tensor, int]) -> Iterator[None]:
    """Cut `tensors` along their sequence dimensions over `mesh` inside, and let attention go over
    all of its ranks; forward and backward run inside.
    """
    added = {_FORWARD: _forward, _BACKWARD: _backward}
    ring.custom_ops.update(added)
    try:
        with context_parallel(
            mesh, buffers=[one for one, _ in tensors], buffer_seq_dims=[dim for _, dim in tensors]
        ):
            yield
    finally:
        for operation in added:
            del ring.custom_ops[operation]


def _forward(operation: Any, args: Any, kwargs: Any) -> Any:
    query, key, value, dropout, is_causal = (*map(_local, args), *(0.0, False)[len(args) - 3 :])
    results = ring._templated_ring_attention(
        args[0].device_mesh.get_group(), 2, operation, query, key, value,
        is_causal=is_causal, dropout_p=dropout, **kwargs,
    )  # fmt: skip
    return _wrapped(args[0].device_mesh, results[:2])


def _backward(operation: Any, args: Any, kwargs: Any) -> Any:
    grad, query, key, value, out, logsumexp, dropout, is_causal = map(_local, args)
    results = ring._templated_ring_attention_backward(
        args[0].device_mesh.get_group(), 2, operation, grad, "grad_out", query, key, value, out,
        logsumexp, is_causal, dropout_p=dropout, **kwargs,
    )  # fmt: skip
    return _wrapped(args[0].device_mesh, results[:3])


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _wrapped(mesh: DeviceMesh, tensors: Any) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(one, mesh, [Shard(2)], run_check=False) for one in tensors)
