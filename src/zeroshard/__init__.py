"""zeroshard: ZeRO (Zero Redundancy Optimizer), whole, in Python on PyTorch.

    import zeroshard as zs

    zs.init_distributed()
    engine = zs.shard(model, optimizer, stage=3)      # in place: model and optimizer stay the objects they were
"""

from zeroshard._version import __version__
from zeroshard.api import init_distributed, shard
from zeroshard.config import Comm, Config, Offload
from zeroshard.core.policy import Policy
from zeroshard.core.precision import Precision
from zeroshard.errors import CheckpointError, ConfigError, PeerLostError, PlanMismatch, StallError, StateError, ZeroshardError
from zeroshard.runtime.engine import Engine
from zeroshard.runtime.reports import MemoryReport, TrafficReport

__all__ = [
    "CheckpointError",
    "Comm",
    "Config",
    "ConfigError",
    "Engine",
    "MemoryReport",
    "Offload",
    "PeerLostError",
    "PlanMismatch",
    "Policy",
    "Precision",
    "StallError",
    "StateError",
    "TrafficReport",
    "ZeroshardError",
    "__version__",
    "init_distributed",
    "shard",
]
