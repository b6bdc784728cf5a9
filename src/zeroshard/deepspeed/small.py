"""The small modules of DeepSpeed's that programs import: the logger, a loader, activation
checkpointing, and helpers of a line.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import zeroshard as zs
from zeroshard.deepspeed import comm
from zeroshard.deepspeed.leaf_walk import LoaderSampler

# ------------------------------------------------------------------------------------------ loaders
# The data loader of ``initialize(training_data=)`` and of ``engine.deepspeed_io()``.


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


# -------------------------------------------------------------------------------------------- small


def _make_logger() -> logging.Logger:
    """Return DeepSpeed's logger, which shows lines from INFO on, on stdout."""
    made = logging.getLogger("DeepSpeed")
    if not made.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        made.addHandler(handler)
        made.setLevel(logging.INFO)
        made.propagate = False
    return made


logger = _make_logger()


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on these ranks (None, or -1 among them: on all)."""
    wanted = list(ranks or ())
    if not wanted or -1 in wanted or comm.get_rank() in wanted:
        logger.log(level, "[Rank %d] %s", comm.get_rank(), message)


class RepeatingLoader:
    """Yields from a loader without end."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._left: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._left)
        except StopIteration:
            self._left = iter(self.loader)
            return next(self._left)


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Return copies on `device` of the tensors in nested dictionaries, lists and tuples; what is
    one tensor under two names (tied weights) stays one.
    """
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copied(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            place = (one.data_ptr(), one.dtype, one.shape, one.stride())
            if not one.numel() or place not in copies:
                copies[place] = one.detach().to(device, copy=True)
            return copies[place]
        if isinstance(one, dict):
            return type(one)({key: copied(value) for key, value in one.items()})
        if isinstance(one, (list, tuple)):
            return type(one)(copied(value) for value in one)
        return one

    return copied(item)


class _Checkpointing:
    tier: str | None = None  # None: configure() was not called


_NOTHING = "checkpointing.configure(%s=...) changes nothing here: only model parallel ranks have it"


def configure(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Say where `checkpoint` keeps inputs: `checkpoint_in_cpu`, or the configuration's
    ``activation_checkpointing.cpu_checkpointing``, takes them to the host.
    """
    data = {} if deepspeed_config is None else zs.read_deepspeed(deepspeed_config).data
    section = data.get("activation_checkpointing") or {}
    on_host = options.pop("checkpoint_in_cpu", None)
    on_host = section.get("cpu_checkpointing") if on_host is None else on_host
    for name, value in options.items():
        if value:
            logger.info(_NOTHING, name)
    _Checkpointing.tier = "host" if on_host else "device"


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _Checkpointing.tier is not None


def checkpoint(function: Any, *args: Any) -> Any:
    """Return ``function(*args)``, computed again in backward."""
    return zs.nn.checkpoint(function, *args, tier=_Checkpointing.tier or "device")
