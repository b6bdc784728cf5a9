"""The user's parameters at each moment: views of the gathered weights, or NaN.

While a unit rests, ``param.data`` is a one-element NaN expanded to the parameter's shape: shape,
dtype and device stay right, reading gives NaN instead of stale numbers, most in-place writes raise.
Its class comes from runtime/released.py then, once it is tied to an engine.

[Note: writes to released parameters] ``zero_``, ``fill_``, element assignment and writes to
one-element parameters do not raise on an expanded tensor. `detach` therefore records
``param._version``; a changed version at the next gather raises StateError naming the parameter.
Writes through ``.data`` do not count versions: strict mode compares the scalar itself, and so is
done always for dtypes without a NaN. ``param.data = tensor`` is seen by its address.

Of a DTensor all of this is its local tensor's, but for the version, which writes to the DTensor
count there; it stays a DTensor, of the dtype of its memory.

Cost: no copy. It does not know units, memory at rest or collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import nn

from zeroshard.memory import placeholder_value
from zeroshard.runtime.released import classes_of
from zeroshard.state.local import local_of, retype

# asked of all parameters of a unit at once: no frame of ours for each
_DATA_PTR = torch.Tensor.data_ptr
_VERSION = attrgetter("_version")


class Parameters:
    """The parameters of one segment."""

    def __init__(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], dtype: torch.dtype
    ) -> None:
        self.names = tuple(names)
        self.parameters = tuple(parameters)
        for parameter in parameters:
            retype(parameter, dtype)
        # their memory comes and goes
        self._locals: tuple[torch.Tensor, ...] = tuple(local_of(p) for p in parameters)
        self._dtype = dtype
        # so that `lost_by_value` is always asked, too
        self.has_no_nan = not (dtype.is_floating_point or dtype.is_complex)
        self._poison = [
            torch.full((), placeholder_value(dtype), dtype=dtype, device=p.device)
            for p in parameters
        ]
        self._released = [
            poison.expand(p.shape) for poison, p in zip(self._poison, self._locals, strict=True)
        ]
        self._released_at = [tensor.data_ptr() for tensor in self._released]
        self._attached: Sequence[torch.Tensor] = self._released  # what ``data`` is now
        self._versions: list[int] = [p._version for p in parameters]
        self._seen = self._versions  # as they were asked for last
        self.lent: Sequence[torch.Tensor] | None = None  # what ``data`` is instead
        # of tied parameters: while they are attached, and while they are released
        self._classes: Sequence[Sequence[type]] = ((), ())

    def tie(self, *, released: bool) -> None:
        """The parameters are tied to an engine: from here on their classes follow their memory."""
        self._classes = [*zip(*map(classes_of, self.parameters), strict=True)]
        self.answer(released=released)

    def untie(self) -> None:
        """They are tied no longer."""
        self.answer(released=False)
        self._classes = ((), ())

    def answer(self, *, released: bool) -> None:
        """Let tied parameters answer as `released` ones, or as what they were."""
        for parameter, kind in zip(self.parameters, self._classes[released], strict=False):
            parameter.__class__ = kind

    def attach(self, views: Sequence[torch.Tensor]) -> None:
        """Point the parameters at `views`, of the gathered buffer."""
        with torch._C.DisableTorchFunctionSubclass():  # other threads never see NaN
            for local, view in zip(self._locals, views, strict=True):
                local.data = view
        for parameter, kind in zip(self.parameters, self._classes[False], strict=False):
            parameter.__class__ = kind
        self._attached, self.lent = views, None
        self._versions = list(map(_VERSION, self.parameters))

    def lend(self, views: Sequence[torch.Tensor]) -> None:
        """Point attached parameters at `views` until they are attached again."""
        self.lent = views
        for local, view in zip(self._locals, views, strict=True):
            local.data = view

    def adopt(self) -> None:
        """Take over the numbers of tensors of their kind that attached parameters have been pointed
        at since (``param.data = tensor``).
        """
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for local, view in zip(self._locals, self._attached, strict=True):
                moved = self._attached is not self._released and local.data_ptr() != view.data_ptr()
                if moved and (local.shape, local.dtype) == (view.shape, view.dtype):
                    view.copy_(local)
                    local.data = view

    def detach(self, *, writes: bool = True) -> str | None:
        """Point the parameters at their NaN; return the name of one that was `lost`, told once."""
        name = self.lost(writes=writes)
        for parameter, kind in zip(self.parameters, self._classes[True], strict=False):
            parameter.__class__ = kind
        with torch._C.DisableTorchFunctionSubclass():
            for local, released in zip(self._locals, self._released, strict=True):
                local.data = released  # which counts no version
        self._versions, self._attached, self.lent = self._seen, self._released, None
        return name

    def leave_memory(self) -> None:
        """Let go of the gathered buffer: the parameters have been pointed elsewhere for good."""
        self._attached = self._released

    def heal(self) -> None:
        """Make released parameters read as NaN again, whatever was written there."""
        for poison in self._poison:
            poison.fill_(placeholder_value(self._dtype))

    def written(self) -> list[str]:
        """Return the names of attached parameters that were written to, by any way that counts
        versions, since they were attached or this was asked last.
        """
        versions = list(map(_VERSION, self.parameters))
        if self._attached is self._released or versions == self._versions:
            return []
        moved = zip(self.names, versions, self._versions, strict=True)
        self._versions = versions
        return [name for name, now, before in moved if now != before]

    def lost(self, *, writes: bool = True) -> str | None:
        """Return the name of a parameter that has been given other memory since attach or detach,
        or (`writes`) was written to, if any.
        """
        attached = self._attached
        at = self._released_at if attached is self._released else list(map(_DATA_PTR, attached))
        with torch._C.DisableTorchFunctionSubclass():
            found = list(map(_DATA_PTR, self._locals))
            self._seen = versions = list(map(_VERSION, self.parameters))
        if found == at and (not writes or versions == self._versions):
            return None
        each = zip(self.names * 2, found + versions, at + self._versions, strict=True)
        return next(name for name, now, before in each if now != before)

    def lost_by_value(self) -> str | None:
        """Return the name of a detached parameter that was written to through ``.data``, if any."""
        expected = placeholder_value(self._dtype)
        for name, poison in zip(self.names, self._poison, strict=True):
            value = poison.item()
            if value != expected and not (expected != expected and value != value):
                return name
        return None
