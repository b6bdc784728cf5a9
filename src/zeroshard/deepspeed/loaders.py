"""The data loader of ``initialize(training_data=)`` and of ``engine.deepspeed_io()``."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import zeroshard as zs
from zeroshard.deepspeed.leaf_walk import LoaderSampler

_RENAMED = {"data_sampler": "sampler", "num_local_io_workers": "num_workers"}
_DROPPED = ("route", "data_parallel_world_size", "data_parallel_rank")  # of pipelines and meshes


def make_loader(
    data: Any, engine: Any, *, batch_size: int | None = None, **options: Any
) -> DataLoader[Any]:
    """Return a loader of this rank's part of `data`. `options` are torch's, or DeepSpeed's names of
    them. Raises ConfigError for what has no samples by number, in a run with leaves.
    """
    given = {
        _RENAMED.get(name, name): value
        for name, value in options.items()
        if value is not None and name not in _DROPPED
    }
    batch = engine.batch
    if batch.leaves is not None:
        if isinstance(data, IterableDataset):
            raise zs.ConfigError(
                f"leaves={batch.leaves} takes the samples of a leaf by its number, and"
                " training_data has none: give a dataset with __len__() and __getitem__()"
            )
        leaves = LoaderSampler(data, batch.leaves, batch.micro, engine)
        return DataLoader(data, batch_sampler=leaves, **given)
    if not isinstance(data, IterableDataset) and "sampler" not in given:
        given["sampler"] = DistributedSampler(data, engine.dp_world_size, engine.global_rank)
    given.setdefault("drop_last", engine.config.get("dataloader_drop_last") is True)
    return DataLoader(
        data, batch_size=batch_size or engine.train_micro_batch_size_per_gpu(), **given
    )
