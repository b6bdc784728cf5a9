"""Finds what reads released weights in a backward: watched are the tensors that autograd saves in a
forward, for some steps after one that was not finite.

A saved tensor that lies in the gathered memory of a unit is noted with the parameter's name; where
it is read while that unit is released, NaN is what it gives, and the name is kept for the error.
"""

from __future__ import annotations

import torch

from zeroshard.runtime.backward import Backward
from zeroshard.runtime.unit import Unit, UnitState
from zeroshard.runtime.weights import Weights

__all__ = ["SavedTensors"]


class SavedTensors:
    """The tensors that autograd saves in forwards of the model."""

    def __init__(self, weights: Weights, backward: Backward) -> None:
        self._weights = weights
        self._backward = backward
        self._watched: torch.autograd.graph.saved_tensors_hooks | None = None

    def begin(self) -> None:
        """A forward begins: watch it, if a step asks for it."""
        if self._backward.traced_steps and torch.is_grad_enabled():
            self._watched = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
            self._watched.__enter__()

    def end(self) -> None:
        """It ends."""
        if self._watched is not None:
            self._watched.__exit__()
            self._watched = None

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Unit | None, str]:
        """Note of which unit a tensor is that autograd saves, and of which parameter."""
        for unit in self._weights.units:
            if unit.state is UnitState.FULL and unit.cells.weight.is_sharded:
                name = unit.parameter_at(tensor.data_ptr())
                if name is not None:
                    return tensor, unit, name
        return tensor, None, ""

    def _unpack(self, saved: tuple[torch.Tensor, Unit | None, str]) -> torch.Tensor:
        tensor, unit, name = saved
        if unit is None or unit.state is UnitState.FULL:
            return tensor
        self._backward.note_read_released(name)
        return torch.full_like(tensor, float("nan"))
