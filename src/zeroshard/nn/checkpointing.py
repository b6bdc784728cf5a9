"""Activation checkpointing with inputs on another tier or in slices (ZeRO-R, section 6.1).

    checkpoint(fn, *args)        forward: run fn, keep its inputs alone
                                 backward: run fn again from them

    tier="host", "disk"          P_a+cpu, and ZeRO-Infinity's section 5.1.2: the inputs leave the
                                 device (runtime/shelf.py)
    partition=group              P_a: of each input only this rank's 1/T stays; in backward the
                                 ranks of the group gather it

It is torch's checkpoint without reentry. That packs intermediate tensors by hooks of its own, so a
pair of saved-tensor hooks around it sees the inputs and nothing else.

    forward     pack each input: [slice it,] start its copy to the tier
    backward    start the reads of the previous call, wait for this one's, [gather,] run fn again

runtime/shelf.py says which inputs leave. Tensors in containers other than list, tuple and dict
stay.

Invariant: the same bits as without. Inside another checkpoint inputs are recomputed by that one and
stay. Cost: fn twice; one copy of the inputs each way; the inputs of two calls on the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from zeroshard.errors import ConfigError, StateError
from zeroshard.runtime.shelf import RestPlace, Shelf
from zeroshard.runtime.trees import is_cache
from zeroshard.runtime.units import UnitSpec, find_blocks

_MARK = "_zeroshard_checkpoint"  # in the instance dictionary of a block
_TENSOR = object()  # stands for a tensor among the arguments


def checkpoint(
    fn: Callable[..., Any],
    *args: Any,
    tier: str = "device",
    partition: Any = None,
    disk_path: str | None = None,
    **kwargs: Any,
) -> Any:
    """Return ``fn(*args, **kwargs)``, recomputed in backward; its tensor inputs rest on `tier`.

    `disk_path` is a directory on a local disk. `partition` is a torch ProcessGroup of ranks that
    call this with equal inputs (tensor parallel ranks do): each keeps a slice, and backward
    gathers, a collective of that group. Random generators and autocast are in backward what they
    were. Without gradients it is a plain call. Raises ConfigError for a tier or group that does not
    exist and for a key-value cache among the inputs, which running twice would fill twice;
    StorageError where the tier is full or fails.
    """
    return _call(RestPlace.of(tier, partition, disk_path), fn, args, kwargs)


@torch._disable_dynamo  # type: ignore[attr-defined]  # as for torch's: only fn is to be compiled
def _call(
    place: RestPlace, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    leaves, spec = tree_flatten(
        (args, kwargs), is_leaf=lambda value: type(value) not in (list, tuple, dict)
    )
    for leaf in filter(is_cache, leaves):
        raise ConfigError(
            f"a checkpointed function was given a {type(leaf).__name__}, which would be"
            " filled twice: call the model with use_cache=False"
        )
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    leaves = [_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    given = [(args, kwargs)]  # the first run is given the caller's containers

    def run(*tensors: torch.Tensor) -> Any:
        coming = iter(tensors)
        if given:
            own, named = given.pop()
        else:
            own, named = tree_unflatten(
                [next(coming) if leaf is _TENSOR else leaf for leaf in leaves], spec
            )
        return fn(*own, **named)

    hooks: AbstractContextManager[Any] = nullcontext()
    if place.is_elsewhere and not _is_recomputed():
        hooks = saved_tensors_hooks(Shelf(place).pack, Shelf.unpack)
    with hooks:
        return torch_checkpoint(run, *tensors, use_reentrant=False)


def _is_recomputed() -> bool:
    """Return whether another checkpoint will compute, or computes, our inputs again."""
    if torch._C._current_graph_task_id() >= 0:
        return True
    around: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return (
        around is not None and getattr(around[0], "__module__", "") == torch_checkpoint.__module__
    )


# --------------------------------------------------------------------------------- a model's blocks


@dataclass(frozen=True)
class _Checkpointed:
    """The settings of a checkpointed block."""

    place: RestPlace
    inner: Callable[..., Any] | None  # a ``forward`` that the block had in its instance dictionary

    def __deepcopy__(self, memo: Any) -> _Checkpointed:
        # a process group cannot be copied
        return replace(self, inner=copy.deepcopy(self.inner, memo))


def checkpoint_blocks(
    model: nn.Module,
    *,
    tier: str = "device",
    partition: Any = None,
    disk_path: str | None = None,
    blocks: UnitSpec | None = None,
) -> list[str]:
    """Checkpoint the repeated blocks of `model` from now on; return their names.

    `blocks` are module classes, qualified names or a callable(name, module) -> bool (default: the
    blocks that ``shard()`` finds by itself). It may be called before or after ``shard()``;
    `uncheckpoint_blocks` undoes it. Compile a block's forward before, not after. A block that
    counts its forwards (batch norm's running statistics) counts twice. Raises ConfigError, with
    nothing changed, where no block is found and where one is checkpointed already.
    """
    place = RestPlace.of(tier, partition, disk_path)
    found = find_blocks(model, blocks, option="blocks")
    if not found:
        raise ConfigError(f"{type(model).__name__} has no repeated blocks: say which with blocks=")
    for name, module in found:
        if _MARK in module.__dict__:
            raise ConfigError(
                f"block {name!r} is checkpointed already: call uncheckpoint_blocks() first"
            )
    for _, module in found:
        module.__dict__[_MARK] = _Checkpointed(place, module.__dict__.get("forward"))
        # a method: copy.deepcopy() binds it to the copy
        module.__dict__["forward"] = MethodType(_forward, module)
    return [name for name, _ in found]


def uncheckpoint_blocks(model: nn.Module) -> list[str]:
    """Undo `checkpoint_blocks`; return the names. Raises StateError for a replaced forward."""
    marked = [(name, module) for name, module in model.named_modules() if _MARK in module.__dict__]
    for name, module in marked:
        if getattr(module.__dict__.get("forward"), "__func__", None) is not _forward:
            raise StateError(
                f"block {name!r} has been given another forward since checkpoint_blocks(): take"
                " that off first"
            )
    for _, module in marked:
        before: _Checkpointed = module.__dict__.pop(_MARK)
        if before.inner is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before.inner
    return [name for name, _ in marked]


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Stand for the forward of a checkpointed block."""
    known: _Checkpointed = self.__dict__[_MARK]
    forward = partial(type(self).forward, self) if known.inner is None else known.inner
    return _call(known.place, forward, args, kwargs)
