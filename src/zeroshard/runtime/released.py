"""A parameter answers for itself while its unit rests: it is gathered when it is used, or the
use is refused by name.

A module's own forward finds its weights gathered by the hooks. What is used elsewhere
(``F.linear(x, model.embed.weight)``, a penalty over ``model.parameters()``, a method called instead
of ``forward``) meets the released parameter with NaN for its numbers. Therefore a parameter changes
class with its memory::

    attach   class: what it was (nn.Parameter)    data: its view of the gathered buffer
             torch's own speed, nothing intercepted
    detach   class: ReleasedParameter             data: its NaN
             every torch function comes here first

metadata (shape, grad, hooks, ...)  answered as it is
a write (``zero_``, ``out=``)       StateError: it would be lost
a use in a forward or backward, or with gradients enabled   the unit is gathered and stays until
                                                            that pass (with gradients: its backward)
                                                            is over; a collective like any gather,
                                                            so every rank must do the same
any other use                       StateError with the remedy: code that only looks is often run on
                                    one rank alone

Rows that rest replicated have their weights under way to every rank already: there any use waits
for them.

A DTensor becomes a released DTensor in the same way; what is asked of its local tensor
(``to_local()``, ``full_tensor()``) is a use.

Invariant: no function of torch reads the NaN of a released parameter. Not seen are reads in C++
that dispatch nothing (TorchScript): NaN is what they get. Cost: none while gathered; 2 microseconds
per attribute that is read while released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import nn

from zeroshard.errors import StateError
from zeroshard.optim.sealed import ANSWERED, SET_DATA, Guarded, SealedGrad, name_of
from zeroshard.runtime.trees import tensors_in
from zeroshard.state.local import is_dtensor

_OF_LOCAL = ("to_local", "full_tensor", "redistribute")  # methods that read the local tensor
_WRITES = frozenset((torch.Tensor.__setitem__, SET_DATA))


class Tie(Protocol):
    """A parameter's way back to its engine; it holds the engine weakly."""

    name: str

    @property
    def keeps_writes(self) -> bool:
        """Whether the parameter may be written to once it is here."""

    @property
    def keeps_memory(self) -> bool:
        """Whether it may be given other memory then."""

    def gather(self, operation: str) -> None:
        """Bring the parameter's unit here for a use of it by `operation`; StateError where that
        may not be done.
        """

    def watch(self, result: Any) -> None:
        """Note that `result` was computed from the parameter."""


class _Released(Guarded, torch.Tensor):
    """A parameter of a unit that rests, whatever its class."""

    _answered = ANSWERED | {torch.Tensor.data_ptr, torch.Tensor.retain_grad}
    _zeroshard: Tie

    @classmethod
    def _use(cls, func: Any, types: Iterable[type], args: Any, kwargs: dict[str, Any]) -> Any:
        if any(issubclass(kind, SealedGrad) for kind in types):
            # a step with gradients that are not to be read: the more telling refusal
            return NotImplemented
        released = [
            tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, _Released)
        ]
        if func is torch.Tensor.__repr__ or func is torch.Tensor.__format__:
            return _describe(released[0])
        operation = _name_of(func)
        for parameter in written_to(func, args, kwargs, _Released):
            tie = parameter._zeroshard
            if tie.keeps_memory if func is SET_DATA else tie.keeps_writes:
                continue
            raise StateError(
                f"parameter {parameter._zeroshard.name!r} was written to while it was released, and"
                " the write is lost: edit it inside engine.gathered(writeback=True) (a model that"
                " rescales its own weights: around the evaluation and one forward after"
                " model.train())"
            )
        ties = {id(parameter): parameter._zeroshard for parameter in released}
        for tie in ties.values():
            tie.gather(operation)
        assert not any(isinstance(parameter, _Released) for parameter in released), operation
        result = func(*args, **kwargs)
        for tie in ties.values():
            tie.watch(result)
        return result


class ReleasedParameter(_Released, nn.Parameter):
    """A plain parameter of a unit that rests."""


_RELEASED: dict[type, type] = {nn.Parameter: ReleasedParameter}  # by the class that it was
_PLAIN: dict[type, type] = {ReleasedParameter: nn.Parameter}


def _using(name: str) -> Callable[..., Any]:
    """Return what stands in for a DTensor's method `name`, which is no function of torch's."""

    def use(parameter: Any, *args: Any, **kwargs: Any) -> Any:
        tie: Tie = parameter._zeroshard
        tie.gather(name)
        result = getattr(parameter, name)(*args, **kwargs)
        tie.watch(result)
        return result

    return use


def classes_of(parameter: nn.Parameter) -> tuple[type, type]:
    """Return the class of `parameter` while its unit is gathered, and while it rests: the same
    where its class allows no other.
    """
    plain = _PLAIN.get(type(parameter), type(parameter))
    if is_dtensor(parameter) and plain not in _RELEASED:
        # torch.distributed.tensor is imported where there are DTensors alone (state/local.py)
        entries = {"__slots__": ()} | {name: _using(name) for name in _OF_LOCAL}
        released = type(f"Released{plain.__name__}", (_Released, plain), entries)
        _RELEASED[plain], _PLAIN[released] = released, plain
    return plain, _RELEASED.get(plain, plain)


def is_released(parameter: nn.Parameter) -> bool:
    """Whether `parameter` has no numbers here."""
    return isinstance(parameter, _Released)


def _describe(parameter: _Released) -> str:
    shape, dtype = tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")
    kind, name = type(parameter).__name__, parameter._zeroshard.name
    return (
        f"{kind}({name}, shape={shape}, dtype={dtype}: rests sharded, read it inside"
        " engine.gathered())"
    )


def _name_of(func: Callable[..., Any]) -> str:
    """Return what to call `func` in a message: ``x.data`` comes as the ``__get__`` of a
    descriptor.
    """
    is_attribute = getattr(func, "__name__", "") in ("__get__", "__set__")
    return f".{name_of(func)}" if is_attribute else name_of(func)


def written_to(func: Callable[..., Any], args: Any, kwargs: Any, kind: type) -> list[Any]:
    """Return the tensors of class `kind` that `func` would write to (nn.init's name theirs)."""
    name = _name_of(func)
    by_name = name.startswith("__i") if name.endswith("__") else name.endswith("_")
    in_place = by_name or func in _WRITES
    targets = [(args or [*kwargs.values()])[:1] if in_place else (), kwargs.get("out", ())]
    return [tensor for tensor in tensors_in(targets) if isinstance(tensor, kind)]
