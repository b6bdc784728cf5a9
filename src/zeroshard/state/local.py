"""The local tensor of a parameter: of a DTensor this rank's part, of a plain parameter itself.

Whoever tensor parallelism gives DTensors sees DTensors: only their local tensors are laid out,
gathered and released.

    the user's parameter     DTensor [8, 6], Shard(0) over 'tp'; the same object before and after
      ._local_tensor         [4, 6]: its memory is swapped, as a plain parameter's is
      .grad                  a DTensor with placements of its own: brought to Shard(0), then local

Invariant: torch.distributed.tensor is imported where there are DTensors, and nowhere else (it takes
a second).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import nn

from zeroshard.core.placement import Part
from zeroshard.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_DTENSOR = "torch.distributed.tensor"


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether `tensor` is a DTensor."""
    kind = type(tensor)
    if kind is torch.Tensor or kind is nn.Parameter:
        return False
    dtensor = getattr(sys.modules.get(_DTENSOR), "DTensor", None)  # not imported: there is none
    return dtensor is not None and issubclass(kind, dtensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that is here of a DTensor; any other tensor itself. No copy."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def part_of(name: str, tensor: torch.Tensor) -> Part:
    """Return which part of parameter `name` is here.

    Raises ConfigError for placements that do not say where an element lies once.
    """
    shape = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return Part.whole(shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    odd = [str(one) for one in placements if one.is_partial() or "Strided" in repr(one)]
    if odd:
        raise ConfigError(
            f"parameter {name!r} is a DTensor placed as {odd[0]}: give shard() parameters that are"
            " Shard or Replicate, as parallelize_module() makes them"
        )
    names = mesh.mesh_dim_names
    if names is None:
        raise ConfigError(
            f"parameter {name!r} is a DTensor on a mesh without names: make it with mesh_dim_names"
        )
    sizes, start = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    cut = [axis for axis, one in zip(names, placements, strict=True) if one.is_shard()]
    return Part(shape, tuple(start), tuple(sizes), frozenset(cut))


def whole_shape(tensor: torch.Tensor) -> str:
    """Return the whole shape of `tensor`, and how a DTensor is placed, as text that ranks
    compare.
    """
    shape = str(tuple(tensor.shape))
    if not is_dtensor(tensor):
        return shape
    names = tensor.device_mesh.mesh_dim_names or ()
    placed = ", ".join(
        f"{one} along {name!r}" for name, one in zip(names, tensor.placements, strict=True)
    )
    return f"{shape} {placed}"


def retype(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Let a DTensor say that it is of `dtype`; its local tensor is left as it is."""
    if not is_dtensor(parameter) or parameter.dtype is dtype:
        return
    local = parameter._local_tensor
    like = torch.empty((), dtype=dtype, device=local.device).expand(local.shape)
    told = _wrapped(parameter, like)
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = told  # what torch knows of it: the local tensor is an attribute
    parameter._spec = told._spec


def point_at(parameter: nn.Parameter, tensor: torch.Tensor) -> None:
    """Let `tensor` be the memory of a parameter, or of the local tensor of a DTensor."""
    retype(parameter, tensor.dtype)
    local_of(parameter).data = tensor


def leave_hollow(parameter: nn.Parameter, stride: tuple[int, ...], dtype: torch.dtype) -> None:
    """Take a parameter's memory, and let it be of `dtype` and lie in `stride`. No DTensor, and
    released: a kernel that reads memory which is not there ends the process.
    """
    hollow = torch.empty_strided(parameter.shape, stride, dtype=dtype, device=parameter.device)
    hollow.untyped_storage().resize_(0)
    with torch._C.DisableTorchFunctionSubclass():
        parameter.data = hollow


def gradient_taker(
    parameter: nn.Parameter, name: str
) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return how to bring a gradient of a DTensor to its own placements and take the local tensor;
    None for a plain parameter. A partial sum is reduced, so every rank of the DTensor's mesh calls
    it.
    """
    if not is_dtensor(parameter):
        return None
    placements = parameter.placements

    def take(grad: torch.Tensor) -> torch.Tensor:
        if not is_dtensor(grad):
            raise ConfigError(
                f"parameter {name!r} is a DTensor and its gradient is a plain tensor: give it a"
                " DTensor"
            )
        if grad.placements != placements:
            grad = grad.redistribute(placements=placements)
        return _arrived(grad._local_tensor)

    return take


def whole_of(tensor: torch.Tensor, part: torch.Tensor | None = None) -> torch.Tensor:
    """Return all of a DTensor; `part` of it (default: its local tensor) is here; any other tensor,
    or its `part`, itself. Collective over the DTensor's mesh.
    """
    if not is_dtensor(tensor):
        return tensor if part is None else part
    local = tensor._local_tensor if part is None else part
    return _arrived(_wrapped(tensor, local.detach()).full_tensor())


def part_within(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return as a DTensor what lies here of the whole `value` of a DTensor; `value` itself for a
    plain parameter, of another shape, or where it is a DTensor.
    """
    if not is_dtensor(parameter) or is_dtensor(value) or value.shape != parameter.shape:
        return value
    box = part_of("", parameter)
    ranges = zip(box.start, box.sizes, strict=True)
    return _wrapped(parameter, value[tuple(slice(first, first + size) for first, size in ranges)])


def _wrapped(like: DTensor, local: torch.Tensor) -> DTensor:
    """Return a DTensor as `like` with the local tensor `local`."""
    from torch.distributed.tensor import DTensor

    with torch._C.DisableTorchFunctionSubclass():
        shape, stride = like.shape, like.stride()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )


def _arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that a collective has made, once it is here."""
    wait = getattr(tensor, "wait", None)  # AsyncCollectiveTensor
    return tensor if wait is None else wait()
