"""What the user's parameters are at each moment: views of the gathered weights, or NaN.

While a unit rests, ``param.data`` is a one-element NaN expanded to the parameter's shape: shape,
dtype and device stay right, reading gives NaN instead of stale numbers, most in-place writes raise.
Its class is that of runtime/released.py then.

[Note: writes to released parameters] ``zero_``, ``fill_``, element assignment and writes to
one-element parameters do not raise on an expanded tensor. `detach` therefore records
``param._version``; a changed version at the next gather raises StateError naming the parameter.
Writes through ``.data`` do not count versions: strict mode compares the scalar itself, and so is
done always for dtypes without a NaN. ``param.data = tensor`` is seen by its address.

Cost: no copy. It does not know units, memory at rest or collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zeroshard.memory import placeholder_value
from zeroshard.runtime.released import release_class, restore_class

__all__ = ["Parameters"]


class Parameters:
    """The parameters of one segment."""

    def __init__(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], dtype: torch.dtype
    ) -> None:
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        self._dtype = dtype
        self._poison = [
            torch.full((), placeholder_value(dtype), dtype=dtype, device=p.device)
            for p in parameters
        ]
        self._released = [
            poison.expand(p.shape) for poison, p in zip(self._poison, parameters, strict=True)
        ]
        self._there: Sequence[torch.Tensor] = self._released  # what ``data`` is now
        self._versions: list[int] = [p._version for p in parameters]

    def attach(self, views: Sequence[torch.Tensor]) -> None:
        """Point the parameters at `views` of the gathered buffer."""
        for parameter, view in zip(self.parameters, views, strict=True):
            restore_class(parameter)
            parameter.data = view
        self._there = views
        self._versions = [parameter._version for parameter in self.parameters]

    def lend(self, views: Sequence[torch.Tensor]) -> None:
        """Point attached parameters at `views` until they are attached again."""
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view

    def detach(self) -> None:
        """Point the parameters at their NaN."""
        for parameter, released in zip(self.parameters, self._released, strict=True):
            restore_class(parameter)
            parameter.data = released
        self._versions = [parameter._version for parameter in self.parameters]
        self._there = self._released
        for parameter in self.parameters:
            release_class(parameter)

    def heal(self) -> None:
        """Make released parameters read as NaN again, whatever was written there."""
        for poison in self._poison:
            poison.fill_(placeholder_value(self._dtype))

    def repointed(self) -> str | None:
        """Return the name of a parameter whose ``data`` has been given other memory since attach
        or detach, if any.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter, tensor in zip(
                self.names, self.parameters, self._there, strict=True
            ):
                if parameter.data_ptr() != tensor.data_ptr():
                    return name
        return None

    def written(self, *, scalar: bool = False) -> str | None:
        """Return the name of a parameter that was written since attach or detach, if any;
        `scalar`: through ``.data`` too, at rest.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter, version in zip(
                self.names, self.parameters, self._versions, strict=True
            ):
                if parameter._version != version:
                    return name
        if scalar:
            expected = placeholder_value(self._dtype)
            for name, poison in zip(self.names, self._poison, strict=True):
                value = poison.item()
                if value != expected and not (expected != expected and value != value):
                    return name
        return None
