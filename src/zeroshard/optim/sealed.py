"""SealedGrad: what a parameter and its pieces carry as ``.grad`` while the gradient rests with
the engine.

Between a backward and the optimizer's step the gradient of a sharded model is a set of sums in
progress, one slice per rank. Code that reads ``param.grad`` there
(``torch.nn.utils.clip_grad_norm_``, ``GradScaler.unscale_``, a logger) would get nothing, or a
rank-local norm. A sealed gradient answers every such read with StateError naming the parameter and
what to call instead.

It does answer what keeps ordinary code working: ``is None`` (it is not), metadata, ``zero_()``, and
being thrown away (``zero_grad()``), which is how the engine learns that the user dropped the
gradient: it releases resting memory once no sealed gradient of it is left. One is made for each
parameter and shard, and put back on after every backward. And what autograd adds to it (where a
backward begins with that parameter) is kept for the engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zeroshard.errors import StateError

_ATTRIBUTES = (
    "shape dtype device grad_fn requires_grad is_leaf layout ndim is_sparse"
    " is_cuda is_cpu"
    # Dynamo asks for these
    " grad _base _version is_meta is_mkldnn is_nested is_quantized is_sparse_csr"
)
_METHODS = (
    "size dim numel nelement ndimension element_size is_floating_point is_complex get_device"
    " __hash__ _is_view is_conj is_contiguous is_inference is_neg is_shared storage_offset stride"
    " untyped_storage"
)
_METADATA = frozenset(getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split())
_QUERIES = frozenset(getattr(torch.Tensor, name) for name in _METHODS.split())
_KEEPERS = frozenset((torch.Tensor.requires_grad_, torch.Tensor.detach_))

# What a parameter without numbers (released, or deferred) answers as it is: nothing of this reads
# them.
ANSWERED = (
    _METADATA
    | _QUERIES
    | {
        getattr(torch.Tensor, name).__get__
        for name in ("itemsize", "nbytes", "output_nr", "name", "_post_accumulate_grad_hooks")
    }
    | {getattr(torch.Tensor, name).__set__ for name in ("grad", "requires_grad")}
    | {
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.Tensor.requires_grad_,
    }
)
SET_DATA = getattr(torch.Tensor, "data").__set__  # noqa: B009 (mypy knows no such descriptor)


def name_of(func: Callable[..., Any]) -> str:
    """Return the name of a torch function, or of the attribute that it reads or sets."""
    name = getattr(func, "__name__", str(func))
    return (
        getattr(getattr(func, "__self__", None), "__name__", name)
        if name in ("__get__", "__set__")
        else name
    )


class Guarded:
    """A class of tensors with numbers that are not to be read, or not to be written. What is in
    `_answered` is done as with any tensor; all else comes to `_use`.
    """

    _answered: frozenset[Callable[..., Any]] = frozenset()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in cls._answered:
            return cls._use(func, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def _use(cls, func: Any, types: Iterable[type], args: Any, kwargs: dict[str, Any]) -> Any:
        """Do `func`, or raise StateError."""
        raise NotImplementedError


class GradientOwner(Protocol):
    """The holder of the resting gradient."""

    def zero_gradient(self, parameter: nn.Parameter | None) -> None:
        """Set the resting gradient of `parameter` to zero; None: of a param group that has nothing
        here.
        """


class SealedShards(Protocol):
    """The optimizer's side of the resting gradients: its shards carry sealed ones."""

    optimizer: torch.optim.Optimizer
    parameters: list[list[nn.Parameter]]  # the model's own, per param group

    def seal(self) -> None:
        """Let every shard without a gradient carry a sealed one."""

    def clear(self) -> None:
        """Take the sealed gradients off."""

    def dropped(self) -> list[nn.Parameter]:
        """Return the model's parameters with a gradient that the user has cleared on the
        optimizer's side.
        """


class SealedGrad(Guarded, torch.Tensor):
    """A gradient of the right shape, dtype and device; its numbers are not to be read."""

    _answered = _METADATA | _QUERIES
    _name: str
    _owner: weakref.ref[GradientOwner]  # a gradient must not keep the engine alive
    _parameter: weakref.ref[nn.Parameter] | None
    _accumulated: torch.Tensor | None = None

    @staticmethod
    def __new__(
        cls,
        like: torch.Tensor,
        name: str,
        owner: GradientOwner,
        parameter: nn.Parameter | None,
    ) -> SealedGrad:
        """`parameter`: the model's own; `like` is a shard of it, or it itself."""
        sealed = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, dtype=like.dtype, device=like.device
        )
        sealed._name = name
        sealed._owner = weakref.ref(owner)
        sealed._parameter = None if parameter is None else weakref.ref(parameter)
        return sealed

    def accumulated(self) -> torch.Tensor | None:
        """Return the gradient that autograd has just added to this one, once."""
        grad, self._accumulated = self._accumulated, None
        return grad

    def _zero(self) -> None:
        """Do what ``zero_()`` of a plain gradient does, where the resting one is still there."""
        owner = self._owner()
        parameter = None if self._parameter is None else self._parameter()
        if owner is not None and (parameter is None) == (self._parameter is None):
            owner.zero_gradient(parameter)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SealedGrad({self._name})"

    @classmethod
    def _use(cls, func: Any, types: Iterable[type], args: Any, kwargs: dict[str, Any]) -> Any:
        if func in _KEEPERS:
            return args[0]
        if func is torch.Tensor.__repr__:
            return args[0].__repr__()
        if func is torch.Tensor.zero_:
            args[0]._zero()
            return args[0]
        if func is torch._foreach_zero_:
            for grad in args[0]:
                grad.zero_()
            return None
        raise _refusal(name_of(func), (args, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # autograd, in a backward that began with it
        if func is torch.ops.aten.add_.Tensor and torch._C._current_graph_task_id() >= 0:
            args[0]._accumulated = args[1]
            return args[0]
        raise _refusal(str(func), (args, kwargs))


def _refusal(operation: str, arguments: Any) -> StateError:
    sealed = (one for one in tree_leaves(arguments) if isinstance(one, SealedGrad))
    name = next((one._name for one in sealed), "?")
    return StateError(
        f"the gradient of {name!r} rests sharded and cannot be read by"
        f" {operation.strip('_') or operation}: clip with engine.clip_grad_norm_(max_norm), read it"
        " whole with engine.full_grad(param) on every rank, change it by param.grad = tensor, scale"
        " fp16 losses with engine.backward(loss), and step only an optimizer that was given to"
        " zs.shard() or engine.attach()"
    )
