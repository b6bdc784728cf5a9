"""Two parameters over one memory: a tie that only the memory knows of, which sharding would cut
without a word.

    b.weight = nn.Parameter(a.weight.data.t())      # plain torch: what the optimizer adds to one,
                                                    the other sees

``shard()`` copies each parameter into its unit's buffer, where every parameter has a place of its
own. One parameter under two names is kept tied; two parameters over the same elements are refused
by name, and so is a buffer over the elements of a parameter.

Invariant: elements are compared, not storages: the slices of one flat buffer
(``nn.LSTM.flatten_parameters``) are no tie. Cost: one sort of the addresses; a byte per element for
two tensors that interleave.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from zeroshard.core.storage import storage_of
from zeroshard.errors import ConfigError
from zeroshard.runtime.units import named_parameters_once
from zeroshard.state.local import local_of


@dataclass(frozen=True)
class _Extent:
    """Where a tensor lies: from byte `start` to before byte `stop` of `home`, an address space."""

    name: str
    trained: bool
    is_buffer: bool
    home: tuple[str, int]
    start: int
    stop: int
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def spots(self, start: int, stop: int) -> torch.Tensor:
        """Return which bytes of ``[start, stop)`` are its own [stop - start], bool."""
        marks = torch.zeros(stop - start, dtype=torch.bool)
        steps = (*(step * self.itemsize for step in self.stride), 1)
        marks.as_strided((*self.shape, self.itemsize), steps, self.start - start).fill_(True)
        return marks


def check_overlap(model: nn.Module) -> None:
    """Raise ConfigError where a trained parameter of `model` shares elements with another
    parameter or with a buffer.
    """
    extents = [
        _extent(name, parameter, False)
        for name, parameter in named_parameters_once(model).items()
        if local_of(parameter).numel()
    ]
    extents += [
        _extent(name, buffer, True)
        for name, buffer in model.named_buffers()
        if local_of(buffer).numel() and storage_of(local_of(buffer)) is not None
    ]
    for one, other in _neighbours(extents):
        if (
            (one.trained or other.trained)
            and not (one.is_buffer and other.is_buffer)
            and _share(one, other)
        ):
            first, second = sorted((one, other), key=lambda extent: extent.is_buffer)
            kind = "buffer" if second.is_buffer else "parameter"
            remedy = (
                "compute it from the parameter in forward"
                if second.is_buffer
                else "use one nn.Parameter in both places, transposed in forward where need be"
            )
            raise ConfigError(
                f"{kind} {second.name!r} lies in the memory of parameter {first.name!r}, and"
                f" shard() would give each its own, which unties them: {remedy}; or give one a copy"
                " (.clone())"
            )


def _extent(name: str, tensor: torch.Tensor, is_buffer: bool) -> _Extent:
    with torch._C.DisableTorchFunctionSubclass():
        local = local_of(tensor)
        storage, size, offset = (
            storage_of(local),
            local.element_size(),
            int(local.storage_offset()),
        )
        shape, stride = tuple(local.shape), local.stride()
    assert storage is not None, name
    # of tensors without memory: deferred ones, those on meta
    start, home = offset * size, ("storage", storage._cdata)
    if storage.nbytes() and storage.data_ptr():
        start, home = storage.data_ptr() + offset * size, (str(tensor.device), 0)
    last = sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    return _Extent(
        name,
        tensor.requires_grad and not is_buffer,
        is_buffer,
        home,
        start,
        start + (last + 1) * size,
        size,
        shape,
        stride,
    )


def _neighbours(extents: Iterable[_Extent]) -> Iterable[tuple[_Extent, _Extent]]:
    """Yield the pairs whose byte ranges meet."""
    open_ones: list[_Extent] = []
    for extent in sorted(extents, key=lambda extent: (extent.home, extent.start)):
        open_ones = [
            other for other in open_ones if other.home == extent.home and other.stop > extent.start
        ]
        yield from ((other, extent) for other in open_ones)
        open_ones.append(extent)


def _share(one: _Extent, other: _Extent) -> bool:
    """Whether two tensors whose byte ranges meet have a byte in common."""
    start, stop = min(one.start, other.start), max(one.stop, other.stop)
    return bool((one.spots(start, stop) & other.spots(start, stop)).any())
