"""``deepspeed.initialize``: from a model, a configuration and what the caller brings to an engine.

    configuration . process group . optimizer . shard (rank 0's values count) . schedule . loader

Every argument of DeepSpeed's is taken or refused with the reason, before the model is changed.
"""

from __future__ import annotations

import argparse
import base64
import copy
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import zeroshard as zs
from zeroshard.deepspeed import comm, held_parameters
from zeroshard.deepspeed.answers import complete_batch
from zeroshard.deepspeed.deepspeed_engine import DeepSpeedEngine
from zeroshard.deepspeed.leaf_walk import LeafWalk, LoaderSampler
from zeroshard.deepspeed.lr_schedules import make_schedule
from zeroshard.deepspeed.optimizers import make_optimizer
from zeroshard.deepspeed.verdict import accepted, section, try_schedule

__all__ = ["add_config_arguments", "initialize"]

_log = logging.getLogger("DeepSpeed")
_OPTIONS = (
    "distributed_port", "mpu", "dist_init_required", "collate_fn", "config", "mesh_param",
    "config_params",
)  # fmt: skip


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    **options: Any,
) -> tuple[DeepSpeedEngine, Any, DataLoader[Any] | None, Any]:
    """Shard `model` and return (engine, optimizer, data loader, schedule). Collective.

    `optimizer` and `lr_scheduler` may be callables, of the parameters and of the optimizer; they go
    before the configuration's sections. `training_data` becomes a loader of this rank's part.
    Options are distributed_port, dist_init_required, collate_fn and the configuration (`config`,
    `config_params` or ``args.deepspeed_config``: a dict, a path, JSON or base64). `mpu` and
    `mesh_param` are refused: other axes than the data parallel one are zeroshard.shard(mesh=).
    """
    for name in options:
        if name not in _OPTIONS:
            raise zs.ConfigError(f"initialize() has no argument {name!r}")
    if model is None:
        raise zs.ConfigError("initialize() needs a model")
    for name in ("mpu", "mesh_param"):
        if options.get(name) is not None:
            raise zs.ConfigError(
                f"initialize({name}=): only data parallel ranks are known here; for tensor or"
                " pipeline parallel ones call zeroshard.shard(mesh=) with a DeviceMesh"
            )
    file = zs.read_deepspeed(_read_config(args, options))
    comm.init_distributed(
        distributed_port=options.get("distributed_port", 29500),
        dist_init_required=options.get("dist_init_required"),
    )
    if isinstance(model, DeepSpeedEngine):
        raise zs.ConfigError("the model is an engine already: give initialize() engine.module")
    holder = held_parameters.engine_of(next(model.parameters(), None))
    if holder is not None and holder.module is model:
        raise zs.ConfigError(
            "the model belongs to an engine of an earlier initialize(): call its engine.destroy()"
            " first"
        )
    objects = {"optimizer": optimizer, "scheduler": lr_scheduler}
    given = [name for name, one in objects.items() if one is not None]
    settings = accepted(file, comm.get_world_size(), given)
    made = _optimizer(optimizer, model_parameters, model, file.data)
    schedule = None if lr_scheduler is not None else section(file.data, "scheduler")
    if schedule is not None and made is not None:
        try_schedule(*schedule, groups=len(made.param_groups))
    engine = _sharded(model, made, settings, file.data)
    engine.lr_scheduler = _schedule(lr_scheduler, schedule, engine)
    engine.training_dataloader = _loader(training_data, engine, options.get("collate_fn"))
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _read_config(args: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the one configuration that is given. Raises ConfigError."""
    named = [options.get("config"), options.get("config_params")]
    of_args = getattr(args, "deepspeed_config", None)
    given = next((one for one in [*named, of_args] if one is not None), None)
    if of_args is not None and given is not of_args:
        raise zs.ConfigError(
            "args.deepspeed_config and config= both name a configuration: leave out one of them"
        )
    if given is None:
        raise zs.ConfigError("initialize() needs a configuration: config=, or --deepspeed_config")
    return copy.deepcopy(given) if isinstance(given, dict) else _parsed(given)


def _parsed(text: Any) -> dict[str, Any]:
    """Return the configuration in a file, or in JSON text, also in base64."""
    if isinstance(text, os.PathLike) or os.path.exists(text):
        return zs.read_deepspeed(Path(text)).data
    try:
        decoded = text if text.lstrip().startswith("{") else base64.urlsafe_b64decode(text)
        data = json.loads(decoded)
    except ValueError:
        raise zs.ConfigError(
            f"config={text!r} is neither a file, nor JSON, nor JSON in base64"
        ) from None
    return zs.read_deepspeed(data).data


def _optimizer(given: Any, parameters: Any, model: nn.Module, config: dict[str, Any]) -> Any:
    if isinstance(given, torch.optim.Optimizer):
        return given
    if parameters is None:
        parameters = [one for one in model.parameters() if one.requires_grad]
    if given is not None:
        return given(list(parameters))
    found = section(config, "optimizer")
    return None if found is None else make_optimizer(*found, list(parameters))


def _sharded(
    model: nn.Module, optimizer: Any, settings: zs.Config, config: dict[str, Any]
) -> DeepSpeedEngine:
    batch = complete_batch(settings, comm.get_world_size(), comm.get_rank())
    clipping = settings.gradient_clipping or 0.0
    settings = settings.model_copy(update={"gradient_clipping": None})  # the engine clips
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        model.to(accelerator)
    engine = zs.shard(model, optimizer, config=settings, sync_from=0)
    held_parameters.own(engine)
    walk = None
    if batch.leaves is not None:
        walk = LeafWalk(engine, _common_seed(next(model.parameters()).device))
    out = DeepSpeedEngine(engine, config, batch, clipping, walk)
    if out.zero_optimization_stage() == 3:
        held_parameters.mark(model.parameters())
    if engine.rank == 0:
        _tell(f"in DeepSpeed's place: {engine!r}, {batch}")
    return out


def _common_seed(device: torch.device) -> int:
    """Return rank 0's seed, by way of `device`."""
    seed = torch.tensor([torch.initial_seed() % 2**63], device=device)
    if comm.is_initialized():
        dist.broadcast(seed, 0)
    return int(seed)


def _tell(line: str) -> None:
    """Log what is in force; where it stands in for DeepSpeed, on stderr, since Transformers sets
    the logger's level.
    """
    if "deepspeed" in sys.modules:
        sys.stderr.write(f"zeroshard: {line}\n")
    else:
        _log.info("zeroshard %s", line)


def _schedule(given: Any, found: tuple[str, dict[str, Any]] | None, engine: DeepSpeedEngine) -> Any:
    if given is not None:
        return given if hasattr(given, "step") or not callable(given) else given(engine.optimizer)
    if found is None or engine.optimizer is None:
        return None
    return make_schedule(*found, engine.optimizer)


def _loader(data: Any, engine: DeepSpeedEngine, collate_fn: Any) -> DataLoader[Any] | None:
    if data is None:
        return None
    batch = engine.batch
    if batch.leaves is not None:
        if isinstance(data, IterableDataset):
            raise zs.ConfigError(
                f"leaves={batch.leaves} takes the samples of a leaf by its number, and"
                " training_data has none: give a dataset with __len__() and __getitem__()"
            )
        leaves = LoaderSampler(data, batch.leaves, batch.micro, engine)
        return DataLoader(data, batch_sampler=leaves, collate_fn=collate_fn)
    sampler: DistributedSampler[Any] | None = None
    if not isinstance(data, IterableDataset):
        sampler = DistributedSampler(data, engine.dp_world_size, engine.global_rank)
    return DataLoader(
        data,
        batch_size=engine.train_micro_batch_size_per_gpu(),
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=engine.config.get("dataloader_drop_last") is True,
    )


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to a program's parser.

    A ``--local_rank`` that the parser has already takes its default from LOCAL_RANK: no launcher
    of ours passes the option.
    """
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="for the program's own use")
    group.add_argument("--deepspeed_config", help="DeepSpeed's configuration, a JSON file")
    if any(action.dest == "local_rank" for action in parser._actions):
        parser.set_defaults(local_rank=comm.get_local_rank())
    return parser
