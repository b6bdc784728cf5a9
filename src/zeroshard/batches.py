"""Micro-batches of unequal size: `UnevenBatchSampler`, for ranks that are not equally fast.

    order of an epoch    7 2 9 4 1 8 0 5 3 6        of 10 samples, the same on every rank
    global batches       7 2 9 4|1 8 0 5|3 6        of 4
    shares 0.25, 0.75    7|2 9 4 1|8 0 5 -|3 6      the last one is split by largest remainder

Invariant: the batches of all ranks together are every sample of the epoch once (with `drop_last`
those of whole batches), and every rank has as many batches. It does not talk to other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized

import torch
from torch.utils.data import Sampler

from zeroshard.core.batch_shares import split_batch
from zeroshard.errors import ConfigError

__all__ = ["UnevenBatchSampler"]


class UnevenBatchSampler(Sampler[list[int]]):
    """Yields this rank's part of every global batch, as a list of indices: the ``batch_sampler`` of
    a DataLoader.

    `data` is the dataset, or the number of its samples; `batch_size` counts those of all ranks
    together; `shares` are the parts of the ranks, as ``batch_shares`` of ``zs.shard()``. The last
    batch of an epoch is smaller where the samples do not divide, or dropped with `drop_last`.
    A part may be empty: then the list is empty, for which a DataLoader needs a ``collate_fn`` that
    can make a batch of no sample.
    """

    def __init__(
        self,
        data: Sized | int,
        batch_size: int,
        shares: Sequence[float],
        rank: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        """Raises ConfigError for shares that do not add up to 1, and a rank without a share."""
        self.sizes = split_batch(batch_size, shares)  # of the ranks in a whole batch
        if not 0 <= rank < len(shares):
            raise ConfigError(f"rank={rank} has none of the {len(shares)} batch_shares")
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} counts the samples of all ranks: give >= 1")
        self._numel = data if isinstance(data, int) else len(data)
        self._batch_size = batch_size
        self._shares = tuple(shares)
        self._rank = rank
        self._shuffle = shuffle
        self._seed = seed
        whole, left = divmod(self._numel, batch_size)
        self._num_batches = whole + (left > 0 and not drop_last)
        self._epoch, self._first = 0, 0

    def set_epoch(self, epoch: int, *, first_batch: int = 0) -> None:
        """Use the order of `epoch` from now on, and leave out the batches before `first_batch`: so
        many had been trained on when a run was interrupted.
        """
        self._epoch, self._first = epoch, first_batch

    def __len__(self) -> int:
        return max(0, self._num_batches - self._first)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self._numel))
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed + self._epoch)
            order = torch.randperm(self._numel, generator=generator).tolist()
        for number in range(self._first, self._num_batches):
            batch = order[number * self._batch_size : (number + 1) * self._batch_size]
            sizes = split_batch(len(batch), self._shares)
            start = sum(sizes[: self._rank])
            yield batch[start : start + sizes[self._rank]]
