"""zeroshard: ZeRO (Zero Redundancy Optimizer), whole, in Python on PyTorch.

    import zeroshard as zs

    zs.init_distributed()
    engine = zs.shard(model, optimizer, stage=3)      # in place: model and optimizer stay the
                                                      objects they were

Names are looked up when they are first used, so that the command line answers without importing
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from zeroshard._version import __version__

if TYPE_CHECKING:
    from zeroshard import nn
    from zeroshard.batches import GlobalBatchSampler, LeafSampler, UnevenBatchSampler
    from zeroshard.checkpoint.load import Restored, latest_step, load
    from zeroshard.checkpoint.save import Saver, save
    from zeroshard.config import (
        Comm,
        Config,
        ErrorFeedback,
        LossScale,
        Offload,
    )
    from zeroshard.core.policy import Policy
    from zeroshard.core.precision import Precision
    from zeroshard.core.shares import split_batch
    from zeroshard.deepspeed.file import DeepSpeedFile, read_deepspeed
    from zeroshard.deepspeed.keys.findings import Finding
    from zeroshard.errors import (
        CheckpointError,
        ConfigError,
        PeerLostError,
        PlanMismatch,
        StallError,
        StateError,
        StorageError,
        ZeroshardError,
    )
    from zeroshard.formats.pretrained import LoadReport, load_pretrained
    from zeroshard.planner.axes import Axes
    from zeroshard.planner.machine import Machine
    from zeroshard.planner.model import Training
    from zeroshard.planner.modules import plan
    from zeroshard.planner.plan import Plan
    from zeroshard.runtime.anomaly import detect_anomaly
    from zeroshard.runtime.ema import EMA
    from zeroshard.runtime.engine import Engine
    from zeroshard.runtime.ledger import MemoryTable, memory_table
    from zeroshard.runtime.parameter_states import OptimizerStates, ParameterStates
    from zeroshard.runtime.reports import MemoryReport, TrafficReport
    from zeroshard.sharding.api import deferred_init, init_distributed, materialize, shard

__all__ = [
    "EMA",
    "Axes",
    "CheckpointError",
    "Comm",
    "Config",
    "ConfigError",
    "DeepSpeedFile",
    "Engine",
    "ErrorFeedback",
    "Finding",
    "GlobalBatchSampler",
    "LeafSampler",
    "LoadReport",
    "LossScale",
    "Machine",
    "MemoryReport",
    "MemoryTable",
    "Offload",
    "OptimizerStates",
    "ParameterStates",
    "PeerLostError",
    "Plan",
    "PlanMismatch",
    "Policy",
    "Precision",
    "Restored",
    "Saver",
    "StallError",
    "StateError",
    "StorageError",
    "TrafficReport",
    "Training",
    "UnevenBatchSampler",
    "ZeroshardError",
    "__version__",
    "deferred_init",
    "detect_anomaly",
    "init_distributed",
    "latest_step",
    "load",
    "load_pretrained",
    "materialize",
    "memory_table",
    "nn",
    "plan",
    "read_deepspeed",
    "save",
    "shard",
    "split_batch",
]

_HOMES = {
    "zeroshard.sharding.api": ("deferred_init", "init_distributed", "materialize", "shard"),
    "zeroshard.batches": ("GlobalBatchSampler", "LeafSampler", "UnevenBatchSampler"),
    "zeroshard.checkpoint.load": ("Restored", "latest_step", "load"),
    "zeroshard.checkpoint.save": ("Saver", "save"),
    "zeroshard.formats.pretrained": ("LoadReport", "load_pretrained"),
    "zeroshard.config": (
        "Comm",
        "Config",
        "ErrorFeedback",
        "LossScale",
        "Offload",
    ),
    "zeroshard.core.shares": ("split_batch",),
    "zeroshard.core.policy": ("Policy",),
    "zeroshard.core.precision": ("Precision",),
    "zeroshard.deepspeed.file": ("DeepSpeedFile", "read_deepspeed"),
    "zeroshard.deepspeed.keys.findings": ("Finding",),
    "zeroshard.errors": (
        "CheckpointError",
        "ConfigError",
        "PeerLostError",
        "PlanMismatch",
        "StallError",
        "StateError",
        "StorageError",
        "ZeroshardError",
    ),
    "zeroshard.planner.axes": ("Axes",),
    "zeroshard.planner.machine": ("Machine",),
    "zeroshard.planner.modules": ("plan",),
    "zeroshard.planner.plan": ("Plan",),
    "zeroshard.planner.model": ("Training",),
    "zeroshard.runtime.anomaly": ("detect_anomaly",),
    "zeroshard.runtime.ema": ("EMA",),
    "zeroshard.runtime.engine": ("Engine",),
    "zeroshard.runtime.ledger": ("MemoryTable", "memory_table"),
    "zeroshard.runtime.parameter_states": ("OptimizerStates", "ParameterStates"),
    "zeroshard.runtime.reports": ("MemoryReport", "TrafficReport"),
}
# what users of DeepSpeed and FSDP type first
_ELSEWHERE = {
    "initialize": "zs.shard(model, optimizer, config='ds_config.json'), or DeepSpeed's own calls of"
    " zeroshard.integrations.deepspeed",
    "fully_shard": "zs.shard(model, optimizer, stage=3), once for the whole model",
    "FullyShardedDataParallel": "zs.shard(model, optimizer, stage=3)",
    "MixedPrecisionPolicy": "zs.shard(..., precision='bf16'), or zs.Precision",
    "CPUOffloadPolicy": "zs.Offload(weight='host', grad='host', optimizer='host')",
    "Init": "zs.deferred_init()",
    "zero": "zs.deferred_init() for zero.Init(), engine.gathered() for zero.GatheredParameters()",
    "GatheredParameters": "engine.gathered(params, writeback=True)",
    "clip_grad_norm_": "engine.clip_grad_norm_(max_norm)",
    "save_checkpoint": "zs.save(directory, engine, step=n)",
    "load_checkpoint": "zs.load(directory, engine)",
    "init_inference": "zs.shard(model, None, policy='zero3')",
    "ZeroTrainer": "zeroshard.integrations.transformers.ZeroTrainer",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker would take every misspelled name for an attribute

    def __getattr__(name: str) -> object:
        if name == "nn":  # a package of ours, which becomes an attribute when it is imported
            return importlib.import_module("zeroshard.nn")
        if name not in _HOME_OF:
            told = f"module 'zeroshard' has no attribute {name!r}"
            raise AttributeError(
                f"{told}: use {_ELSEWHERE[name]}" if name in _ELSEWHERE else told, name=name
            )
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
