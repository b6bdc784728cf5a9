"""Samplers say which samples a rank computes: `GlobalBatchSampler`, for runs that resume on any
number of ranks, `LeafSampler`, for runs with leaves, and `UnevenBatchSampler`, of micro-batches of
unequal size for ranks that are not equally fast.

    order of an epoch    7 2 9 4 1 8 0 5 3 6        of 10 samples, the same on every rank
    global batches       7 2 9 4|1 8 0 5|3 6        of 4
    shares 0.25, 0.75    7|2 9 4 1|8 0 5 -|3 6      the last one is split by largest remainder

Invariant: the batches of all ranks together are every sample of the epoch once (with `drop_last`:
of whole batches), and every rank has as many batches. The samples of a step follow from its number,
and the samples of a leaf from the step and the leaf's number, whoever computes them. No sampler
talks to other ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized

import torch
from torch.utils.data import Sampler

from zeroshard.core.shares import split_batch
from zeroshard.core.tree import Tree
from zeroshard.errors import ConfigError
from zeroshard.runtime.engine import Engine, parts_of, states_of


class _StepSampler(Sampler[list[int]]):
    """Counts steps through all epochs: a step's samples follow from its number."""

    def __init__(self, numel: int, batch_size: int, seed: int | None) -> None:
        """`batch_size` counts the samples of a step, of all ranks together."""
        self._numel, self._batch_size, self._seed = numel, batch_size, seed
        self.num_steps = numel // batch_size  # of an epoch
        self._first = 0
        self._order: tuple[int, list[int]] | None = None  # of the epoch used last

    def set_step(self, step: int) -> None:
        """Iterate from `step` on, to the end of its epoch."""
        self._first = step

    def _steps(self) -> range:
        """Return the steps from the one that was set to the end of its epoch."""
        return range(self._first, (self._first // self.num_steps + 1) * self.num_steps)

    def _samples(self, step: int) -> list[int]:
        """Return the samples of `step`, of all ranks together."""
        epoch, number = divmod(step, self.num_steps)
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, _order_of(self._numel, self._seed, epoch))
        return self._order[1][number * self._batch_size : (number + 1) * self._batch_size]


def _order_of(numel: int, seed: int | None, epoch: int) -> list[int]:
    """Return the samples in the order of `epoch`; without a `seed` as they are."""
    if seed is None:
        return list(range(numel))
    return torch.randperm(numel, generator=torch.Generator().manual_seed(seed + epoch)).tolist()


class GlobalBatchSampler(_StepSampler):
    """Yields this rank's part of the batch of every step, as a list of indices: the
    ``batch_sampler`` of a DataLoader.

    The samples of a step follow from its number alone, so a run that resumes on any number of ranks
    goes on with those that come next::

        loader = DataLoader(data, batch_sampler=sampler)
        while step < num_epochs * sampler.num_steps:
            sampler.set_step(step)
            for batch in loader:
                ...
                step += 1

    An epoch has ``num_steps`` steps and leaves out the samples that fill no batch. Ranks take equal
    parts, or parts by ``batch_shares``; where `batch_size` does not divide, some have one sample
    more, and ``engine.backward(loss, weight=num_samples)`` counts each sample once.
    """

    def __init__(
        self, data: Sized | int, batch_size: int, engine: Engine, *, seed: int | None = 0
    ) -> None:
        """`data` is the dataset, or the number of its samples; `batch_size` counts the samples of
        all ranks together; `seed` shuffles every epoch anew (None: in order). Raises ConfigError
        for less data than a batch, and a batch that leaves a rank without a sample.
        """
        numel = data if isinstance(data, int) else len(data)
        if not 0 < engine.world <= batch_size <= numel:
            raise ConfigError(
                f"batch_size={batch_size} counts the samples of all ranks: give at least"
                f" {engine.world}, one per rank, and at most {numel}, the whole data"
            )
        super().__init__(numel, batch_size, seed)
        self.engine = engine

    def __len__(self) -> int:
        return len(self._steps())

    def __iter__(self) -> Iterator[list[int]]:
        world, rank = self.engine.world, self.engine.rank
        shares = parts_of(self.engine).context.options.batch_shares or [1 / world] * world
        sizes = split_batch(self._batch_size, shares)
        start = sum(sizes[:rank])
        for step in self._steps():
            yield self._samples(step)[start : start + sizes[rank]]


class LeafSampler(_StepSampler):
    """The samples of every leaf of ``zs.shard(..., leaves=V)``, `size` of them each.

    ``sampler[step, leaf]`` is the list of a leaf's indices; as the ``batch_sampler`` of a
    DataLoader it yields the indices of the leaves that `engine` gives this rank, in the order of
    ``engine.leaves()``, to the end of the epoch::

        loader = iter(DataLoader(data, batch_sampler=sampler))
        for step in range(sampler.num_steps):
            for leaf in engine.leaves(step):
                engine.backward(loss_of(next(loader)))

    An epoch has ``num_steps`` steps, of V x `size` samples each, and leaves out what is left over;
    steps are counted through all epochs.
    """

    def __init__(
        self,
        data: Sized | int,
        leaves: int | str,
        size: int,
        *,
        engine: Engine | None = None,
        seed: int | None = 0,
    ) -> None:
        """`data` is the dataset, or the number of its samples; `engine` says who computes which
        leaf, where this is iterated; `seed` shuffles every epoch anew (None: in order). Raises
        ConfigError where the engine has other leaves, or the data not enough for a step.
        """
        try:
            self._leaves = Tree.parse(leaves).leaves
        except ValueError as error:
            raise ConfigError(f"leaves={leaves!r}: {error}") from None
        self.engine = engine  # may be given later, before this is iterated
        self._size = size
        numel = data if isinstance(data, int) else len(data)
        if not 0 < self._leaves * size <= numel:
            raise ConfigError(
                f"{numel} samples are none for a step of {self._leaves} leaves of {size}"
            )
        super().__init__(numel, self._leaves * size, seed)
        if engine is not None:
            self._own()

    def __len__(self) -> int:
        return len(self._steps()) * len(self._own())

    def __getitem__(self, place: tuple[int, int]) -> list[int]:
        step, leaf = place
        if not 0 <= leaf < self._leaves or step < 0:
            raise IndexError(f"step {step}, leaf {leaf} of {self._leaves}")
        return self._samples(step)[leaf * self._size : (leaf + 1) * self._size]

    def __iter__(self) -> Iterator[list[int]]:
        for step in self._steps():
            for leaf in self._own():
                yield self[step, leaf]

    def _own(self) -> list[int]:
        """Return this rank's leaves, in order."""
        if self.engine is None:
            raise ConfigError(
                "LeafSampler needs engine= where it is iterated: the engine deals the leaves out;"
                " sampler[step, leaf] needs none"
            )
        tree = states_of(self.engine).tree
        if tree is None or tree.leaves != self._leaves:
            raise ConfigError(
                f"LeafSampler has leaves={self._leaves}, and the engine"
                f" {'none' if tree is None else tree.leaves}: give both the same"
            )
        return states_of(self.engine).own_leaves


class UnevenBatchSampler(Sampler[list[int]]):
    """Yields this rank's part of every global batch, as a list of indices: the ``batch_sampler`` of
    a DataLoader.

    `data` is the dataset, or the number of its samples; `batch_size` counts the samples of all
    ranks together; `shares` are the parts of the ranks, as ``batch_shares`` of ``zs.shard()``. The
    last batch of an epoch is smaller where the samples do not divide, or dropped with `drop_last`.
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
        order = _order_of(self._numel, self._seed if self._shuffle else None, self._epoch)
        for number in range(self._first, self._num_batches):
            batch = order[number * self._batch_size : (number + 1) * self._batch_size]
            sizes = split_batch(len(batch), self._shares)
            start = sum(sizes[: self._rank])
            yield batch[start : start + sizes[self._rank]]
