"""The trainable parameters of an engine: where autograd's gradients of them go, and what the user
finds as their ``.grad``.

Released parameters answer here what they refuse elsewhere (``DisableTorchFunctionSubclass``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import torch
from torch import nn

from zeroshard.errors import ConfigError
from zeroshard.optim.sealed import GradientOwner, SealedGrad
from zeroshard.runtime.bucket import Bucket
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.unit import Unit
from zeroshard.state.local import gradient_taker

__all__ = ["Leaf", "Leaves", "seal"]


@dataclass(eq=False, slots=True)
class Leaf:
    """A trainable parameter, and where its gradient goes."""

    unit: Unit
    segment: Segment
    bucket: Bucket
    index: int  # in the segment
    parameter: nn.Parameter
    to_local: Callable[[torch.Tensor], torch.Tensor] | None  # of a DTensor's gradients
    sealed: SealedGrad | None = None  # made once, and put on after every backward

    @property
    def name(self) -> str:
        """The parameter's qualified name."""
        return self.segment.names[self.index]

    @property
    def is_assigned(self) -> bool:
        """Whether it has a gradient that is not sealed: one that the user has assigned."""
        grad = self.parameter.grad
        return grad is not None and type(grad) is not SealedGrad

    def take(self) -> torch.Tensor:
        """Take its gradient, which is there, off and return it."""
        grad = self.parameter.grad
        assert grad is not None, self.name
        self.clear()
        return grad

    def assigned(self) -> torch.Tensor:
        """Return what lies here of its gradient, which the user has assigned and keeps."""
        grad = self.parameter.grad
        assert grad is not None, self.name
        return self.local(grad)

    def local(self, grad: torch.Tensor) -> torch.Tensor:
        """Return what lies here of a gradient of it, without a graph. Raises ConfigError for a
        sparse one.
        """
        if grad.layout is not torch.strided:
            raise ConfigError(
                f"parameter {self.name!r} has a sparse gradient, which cannot be sharded: use"
                " sparse=False"
            )
        grad = grad.detach() if grad.requires_grad else grad
        return grad if self.to_local is None else self.to_local(grad)

    def clear(self) -> None:
        """Take its gradient off."""
        self.parameter.grad = None

    def make_sealed(self, owner: GradientOwner) -> SealedGrad:
        """Make its sealed gradient."""
        self.sealed = SealedGrad(self.parameter, self.name, owner, self.parameter)
        return self.sealed


def seal(leaves: Iterable[Leaf], owner: GradientOwner, holds: object) -> None:
    """Give `leaves` their sealed gradients, which keep `holds` alive, but for assigned ones."""
    with torch._C.DisableTorchFunctionSubclass():
        for leaf in leaves:
            parameter, sealed = leaf.parameter, leaf.sealed
            grad = parameter.grad
            if grad is not None and type(grad) is not SealedGrad:
                continue
            if sealed is None or sealed.dtype is not parameter.dtype:
                sealed = leaf.make_sealed(owner)
            if sealed.holds is not holds:
                sealed.hold(holds)
            parameter.grad = sealed


class Leaves(list[Leaf]):
    """All leaves of an engine, in the order of its units."""

    def __init__(self, units: Iterable[Unit]) -> None:
        super().__init__(
            Leaf(
                unit,
                segment,
                bucket,
                index,
                parameter,
                gradient_taker(parameter, segment.names[index]),
            )
            for unit in units
            for segment, bucket in zip(unit.trainable, unit.buckets, strict=True)
            for index, parameter in enumerate(segment.parameters)
        )
        self._of = {id(leaf.parameter): leaf for leaf in self}
        self.ids = self._of.keys()  # of the parameters

    def of(self, parameter: nn.Parameter | None) -> Leaf | None:
        """Return the leaf of `parameter`, if it is a trainable one of the engine."""
        return None if parameter is None else self._of.get(id(parameter))

    def _used(self) -> list[Leaf]:
        """Return those that have a gradient since the last drop."""
        return [leaf for leaf in self if leaf.bucket.used[leaf.index]]

    def clear_gradients(self, *, assigned: bool = True) -> None:
        """Take all gradients off, or leave those that the user has `assigned`."""
        with torch._C.DisableTorchFunctionSubclass():
            for leaf in self:
                grad = leaf.parameter.grad
                if grad is not None and (assigned or type(grad) is SealedGrad):
                    leaf.parameter.grad = None

    def scale_assigned(self, factor: float) -> None:
        """Multiply the gradients that the user has assigned by `factor`, in place."""
        if factor != 1.0:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                for leaf in self.assigned():
                    assert leaf.parameter.grad is not None, leaf.name
                    leaf.parameter.grad.mul_(factor)

    def seal(self, owner: GradientOwner, *, holds: bool) -> None:
        """Put sealed gradients on those that have one. `holds`: it lives as long as they do."""
        for bucket, leaves in groupby(self._used(), key=attrgetter("bucket")):
            seal(leaves, owner, bucket.accumulator.resting() if holds else None)

    def assigned(self, units: Collection[Unit] | None = None) -> list[Leaf]:
        """Return those in `units` (default: all) that have a gradient which no hook has taken."""
        with torch._C.DisableTorchFunctionSubclass():
            return [
                leaf
                for leaf in self
                if (grad := leaf.parameter.grad) is not None  # no call for each: there are many
                and type(grad) is not SealedGrad
                and (units is None or leaf.unit in units)
            ]

    def take_cleared(self, cleared: Collection[int]) -> list[Leaf]:
        """Forget the gradients that the user has cleared, there or at the optimizer (`cleared`: ids
        of parameters), and return whose they were.
        """
        with torch._C.DisableTorchFunctionSubclass():
            gone = [
                leaf
                for leaf in self._used()
                if leaf.parameter.grad is None or id(leaf.parameter) in cleared
            ]
            for leaf in gone:
                if type(leaf.parameter.grad) is SealedGrad:  # else assigned after that
                    leaf.parameter.grad = None
        for bucket, leaves in groupby(gone, key=attrgetter("bucket")):
            bucket.clear([leaf.index for leaf in leaves])
        return gone
