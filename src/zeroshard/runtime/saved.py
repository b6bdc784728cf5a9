"""Finds what reads released weights in a backward: watched are the tensors that autograd saves in a
forward, for some steps after one that was not finite.

A saved tensor that lies in the gathered memory of a unit is noted with the parameter's name; where
it is read while that unit is released, NaN is what it gives, and the name is kept for the error.

Cost: nothing, but for the steps that are watched.
"""

from __future__ import annotations

import torch

from zeroshard.core.residency import UnitState
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.weights import Weights
from zeroshard.state.local import local_of

# after one that had to be skipped: what is computed rarely (a penalty every 16 steps) is to come
# again
_WATCHED_STEPS = 20


class SavedTensors:
    """The tensors that autograd saves in forwards of the model."""

    def __init__(self, weights: Weights) -> None:
        # the first parameter that the gradients here have read while it was released
        self.read_released: str | None = None
        self._weights = weights
        self._steps_to_watch = 0
        self._watched: torch.autograd.graph.saved_tensors_hooks | None = None

    def watch_steps(self) -> None:
        """A step had to be skipped: watch those that follow."""
        self._steps_to_watch = _WATCHED_STEPS

    def end_step(self) -> None:
        """A step is taken or skipped."""
        self._steps_to_watch = max(0, self._steps_to_watch - 1)

    def clear(self) -> None:
        """No gradient rests here any more."""
        self.read_released = None

    def begin(self) -> None:
        """A forward begins: watch it, if a step asks for it."""
        if self._steps_to_watch and torch.is_grad_enabled():
            self._watched = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._watched.__enter__()

    def end(self) -> None:
        """It ends."""
        if self._watched is not None:
            self._watched.__exit__()
            self._watched = None

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Unit | None, str]:
        """Note of which unit a tensor is that autograd saves, and of which parameter."""
        address = local_of(tensor).data_ptr()
        for unit in self._weights.units:
            for segment in unit.segments if unit.residency.state is UnitState.FULL else ():
                place = (address - segment.flat.full.data_ptr()) // segment.flat.dtype.itemsize
                for name, slot in zip(segment.names, segment.flat.layout.slots, strict=True):
                    if slot.offset <= place < slot.stop:
                        return tensor, unit, name
        return tensor, None, ""

    def _unpack(self, saved: tuple[torch.Tensor, Unit | None, str]) -> torch.Tensor:
        tensor, unit, name = saved
        if unit is None or unit.residency.state is UnitState.FULL:
            return tensor
        self.read_released = self.read_released or name
        return torch.full_like(tensor, float("nan"))
