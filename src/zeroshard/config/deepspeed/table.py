"""The keys of DeepSpeed's configuration and what each does here, section by section.

Defaults are those of DeepSpeed's code, also where its documentation says otherwise.
"""

from __future__ import annotations

from typing import Any

import zeroshard.config.deepspeed.lower as to
from zeroshard.config.deepspeed.rows import (
    Key,
    Kind,
    Lower,
    count,
    flag,
    number,
    one_of,
    ranks,
    text,
)

__all__ = ["KEYS", "SECTIONS"]


def _becomes(
    name: str, default: Any, kind: Kind, lower: Lower, why: str, *, tells_default: bool = False
) -> Key:
    """A key that is an option of ours, too."""
    return Key(name, default, why, kind, lower, tells_default=tells_default)


def _tunes(name: str, default: Any, why: str) -> Key:
    """A key that changes speed or memory there, and nothing here."""
    return Key(name, default, why)


def _refuses(
    name: str, default: Any, why: str, instead: str = "", harmless: tuple[Any, ...] = ()
) -> Key:
    """A key that would change a run, and cannot here, unless it has the default."""
    return Key(name, default, why, refused=True, instead=instead, harmless=harmless)


_BATCH = (
    _becomes("train_batch_size", None, count, to.option("train_batch_size"),
             "the samples of a step, compared with the other two and the ranks"),
    _becomes("train_micro_batch_size_per_gpu", None, count,
             to.option("train_micro_batch_size_per_gpu"), "the samples of a rank's forward"),
    _becomes("gradient_accumulation_steps", None, count, to.option("gradient_accumulation_steps"),
             "the forwards of a step"),
    _becomes("gradient_clipping", 1.0, number, to.clipping,
             "the norm that a step clips to; left out it is 1.0, and 0 switches it off",
             tells_default=True),
)  # fmt: skip

_HALF = (
    _becomes("fp16.enabled", False, flag, to.half("fp16", ("bf16", "bfloat16")),
             "weights, activations and gradients in fp16 beside fp32 masters"),
    _becomes("bf16.enabled", False, flag, to.half("bf16", ("fp16",)),
             "weights, activations and gradients in bf16 beside fp32 masters"),
    _becomes("bfloat16.enabled", False, flag, to.half("bf16", ("fp16",)),
             "an older name of bf16"),
)  # fmt: skip

_OFFLOAD = "zero_optimization.offload_"
_ZERO = (
    _becomes("zero_optimization.stage", 0, one_of(0, 1, 2, 3, False, True), to.stage,
             "which states are sharded", tells_default=True),
    _becomes(f"{_OFFLOAD}optimizer.device", "none", one_of(*to.TIERS),
             to.device("offload_optimizer", "optimizer"),
             "where masters and moments rest and are stepped"),
    _becomes(f"{_OFFLOAD}optimizer.nvme_path", None, text,
             to.path("offload_optimizer", "offload_param"), "the directory of what rests on disk"),
    _becomes(f"{_OFFLOAD}optimizer.ratio", 1.0, number, to.ratio,
             "the share that leaves the device"),
    _tunes(f"{_OFFLOAD}optimizer.pin_memory", True, "host memory is pinned where it helps"),
    _becomes(f"{_OFFLOAD}param.device", "none", one_of(*to.TIERS),
             to.device("offload_param", "weight"), "where weights rest"),
    _becomes(f"{_OFFLOAD}param.nvme_path", None, text,
             to.path("offload_param", "offload_optimizer"), "the directory of what rests on disk"),
    _tunes(f"{_OFFLOAD}param.pin_memory", True, "host memory is pinned where it helps"),
)  # fmt: skip

_PLUS = (
    _becomes("zero_optimization.zero_hpz_partition_size", 1, ranks, to.hpz,
             "hpZ: the ranks of a node keep the weights between forward and backward"),
    _becomes("zero_optimization.mics_shard_size", -1, ranks, to.mics,
             "miCS: the ranks that together hold all states"),
    _becomes("zero_optimization.zero_quantized_weights", False, flag,
             to.quantized("comm.weight_codec", "int8"), "qwZ: weights travel as int8"),
    _becomes("zero_optimization.zero_quantized_gradients", False, flag,
             to.quantized("comm.grad_codec", "int4"), "qgZ: gradients travel as int4"),
    _becomes("zero_optimization.zeropp_loco_param.err_beta", 0.8, number, to.feedback("beta"),
             "loCo: the weight of each new error"),
    _becomes("zero_optimization.zeropp_loco_param.reset_T", 1024, count, to.feedback("reset"),
             "loCo: after how many sums errors are dropped"),
)  # fmt: skip

KEYS: dict[str, Key] = {key.name: key for key in (*_BATCH, *_HALF, *_ZERO, *_PLUS)}
SECTIONS = frozenset(".".join(parts[:n]) for parts in (name.split(".") for name in KEYS)
                     for n in range(1, len(parts)))  # fmt: skip
