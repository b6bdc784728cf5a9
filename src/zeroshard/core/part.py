"""The part of a parameter that a rank has, where tensor parallelism or experts cut it.

A part is a box of the whole parameter: all of a plain parameter, the local tensor of a DTensor.
Layout, shards and optimizer know the box alone, flattened row by row; checkpoints and
``full_state_dict`` know where it lies in the whole::

    weight [8, 6], Shard(0) over two ranks      Shard(1) over two ranks
    rank 0  start (0, 0)  sizes (4, 6)          start (0, 0)  sizes (8, 3)
    rank 1  start (4, 0)  sizes (4, 6)          start (0, 3)  sizes (8, 3)

Pure: no torch.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Part:
    """A rank's box of one parameter."""

    shape: tuple[int, ...]  # of the whole parameter
    start: tuple[int, ...]  # where the box begins, a number per dimension
    sizes: tuple[int, ...]  # of the box
    axes: frozenset[str] = frozenset()  # the axes of the mesh along which other ranks have others

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Part:
        """Return all of a parameter of `shape`."""
        return cls(shape, (0,) * len(shape), shape)

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the parameter."""
        return self.sizes == self.shape

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return prod(self.sizes)

    def counts(self, alike: Iterable[str], first_along: Container[str]) -> bool:
        """Whether its elements count on a rank that is the first along the axes `first_along`: of
        the ranks with the same part the first counts. `alike`: the axes along which what is not cut
        is the same.
        """
        return all(axis in self.axes or axis in first_along for axis in alike)
