"""A plain ``loss.backward()`` with gradient accumulation: the gradients of the model's parameters
are divided by the number of micro-batches n, as ``engine.backward(loss)`` divides the loss.

    forward     x ---------> model ---------> y
    backward    x <-- * n -- model <-- / n -- y      both are left out inside engine.backward()

Invariant: a gradient of a parameter is divided once, whatever lies between the parameter and the
loss: other outputs of the same forward, other forwards of this engine, other engines. Gradients of
tensors outside of the model are those of plain torch, also with ``create_graph=True``: a loss may
contain them. Cost: no copies; one multiplication of each gradient at the edge of the model.

Tensors are found in the containers of torch's pytree (Transformers' outputs among them),
dictionaries and dataclasses, which are copied. A plain backward through the attributes of another
object alone raises ConfigError.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import zeroshard as zs

_divided_losses: list[None] = []  # one for each engine.backward() under way, of any engine
Change = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def undivided() -> Iterator[None]:
    """Leave gradients alone inside: the loss of this backward is divided already."""
    _divided_losses.append(None)
    try:
        yield
    finally:
        _divided_losses.pop()


def divided(module: nn.Module, steps: int, args: Any, kwargs: Any) -> Any:
    """Return ``module(*args, **kwargs)``, whose parameters' gradients a plain backward divides by
    `steps`.
    """
    if steps == 1 or not torch.is_grad_enabled():
        return module(*args, **kwargs)
    edge = _Edge(steps)
    args, kwargs = edge.changed((args, kwargs), edge.enter)
    return edge.changed(module(*args, **kwargs), edge.leave, inside=edge.refuse)


class _Edge:
    """Where one forward's graph begins and ends."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._arrived = -1  # the graph task in which a gradient has come to an output

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an input whose gradient is multiplied as it leaves the model."""
        out: torch.Tensor = _Alias.apply(tensor, lambda: self._steps)  # type: ignore[no-untyped-call]
        return out

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an output whose gradient is divided as it comes to the model."""

        def factor() -> float:
            self._arrived = torch._C._current_graph_task_id()
            return 1 / self._steps

        out: torch.Tensor = _Alias.apply(tensor, factor)  # type: ignore[no-untyped-call]
        return out

    def refuse(self, holder: Any) -> None:
        """Have a plain backward that comes from `holder` alone raise ConfigError."""

        def arrived(grad: torch.Tensor) -> None:
            if not _divided_losses and self._arrived != torch._C._current_graph_task_id():
                raise zs.ConfigError(
                    f"the model returns tensors in a {type(holder).__name__}, whose gradients a"
                    " plain loss.backward() cannot divide by gradient_accumulation_steps: call"
                    " engine.backward(loss)"
                )

        for one in tree_leaves(dict(getattr(holder, "__dict__", {}))):
            if isinstance(one, torch.Tensor) and one.grad_fn is not None:
                one.register_hook(arrived)  # type: ignore[no-untyped-call]

    def changed(
        self, value: Any, change: Change, inside: Callable[[Any], None] | None = None
    ) -> Any:
        """Return `value` with its tensors that have a gradient changed; the same object where there
        is none. Other objects than containers go to `inside`.
        """
        leaves, structure = tree_flatten(value)
        made = [self._leaf(leaf, change, inside) for leaf in leaves]
        if all(one is other for one, other in zip(made, leaves, strict=True)):
            return value
        return tree_unflatten(made, structure)

    def _leaf(self, value: Any, change: Change, inside: Callable[[Any], None] | None) -> Any:
        if isinstance(value, torch.Tensor):
            differs = value.requires_grad and not isinstance(value, nn.Parameter)
            return change(value) if differs else value
        parts: dict[Any, Any] = {}
        if isinstance(value, dict):
            parts = dict(value)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        elif inside is not None:
            inside(value)
        made = {key: self.changed(part, change, inside) for key, part in parts.items()}
        if all(made[key] is part for key, part in parts.items()):
            return value
        out = copy.copy(value)
        for key, part in made.items():
            if isinstance(out, dict):
                out[key] = part
            else:
                object.__setattr__(out, key, part)  # also where it is frozen
        return out


class _Alias(torch.autograd.Function):
    """The same numbers in the same memory; gradients are multiplied by ``factor()``."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: Callable[[], float]) -> torch.Tensor:
        ctx.factor = factor
        return tensor.detach()  # no view, and one version counter: it may be changed in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        factor = ctx.factor()
        return grad if _divided_losses else _Scaled.apply(grad, factor), None  # type: ignore[no-untyped-call]


class _Scaled(torch.autograd.Function):
    """A gradient times `factor`. A plain backward through it goes on as it is: on that way the
    other edge of the model divides.
    """

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return grad * factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (grad * ctx.factor if _divided_losses else grad), None
