"""What is compared with what, at which sizes, and in which order: names and lists, decided
before any process starts.

A **contender** is one way of training the same model on the same data with the same optimizer. A
**comparison** is a contender beside a reference, with the speed ratio (reference seconds /
contender seconds, so more than 1 is faster) that the project promises, if it does. Contenders of
one **block** are alive at the same time and take turns: A B A B ..., or A B C A B C ... . Several
comparisons share a block when memory allows it, since every turn then serves all of them; with
``alive=2`` each comparison is a block of its own.

What it does not do: import torch. The command line reads this file to answer ``--help``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "COMPARISONS",
    "CONTENDERS",
    "LARGEST",
    "LARGEST_SIZE",
    "MEMORY_CLAIMS",
    "MUON_COMPARISONS",
    "NAMED_COMPARISONS",
    "OFFLOADS",
    "OFFLOAD_ALIVE",
    "OFFLOAD_COMPARISONS",
    "OFFLOAD_CONTENDERS",
    "OFFLOAD_PARTS",
    "OVERHEAD_SIZE",
    "SIZES",
    "Comparison",
    "Size",
    "blocks",
    "comparisons_for",
    "fake_ranks",
]


@dataclass(frozen=True)
class Size:
    """A decoder-only model and what one rank feeds it in a step."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int = 128
    batch: int = 1  # sequences per rank and step
    alive: int = 4  # contenders that fit into 24 GiB together
    family: str = "gpt"  # or "llama": class in model.py

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the model of this size."""
        if self.family == "llama":  # fewer heads of keys and values, an MLP of three matrices
            kv = self.width // self.heads * max(1, self.heads // 4)
            block = (2 * self.width + 2 * kv + 3 * (self.width * 7 // 2) + 2) * self.width
            return self.layers * block + (2 * self.vocabulary + 1) * self.width
        block = 12 * self.width**2 + 4 * self.width
        return self.layers * block + (2 * self.vocabulary + self.context + 2) * self.width

    @property
    def tokens(self) -> int:
        """Tokens per rank and step."""
        return self.batch * self.context


SIZES = {
    size.name: size
    for size in (
        Size("tiny", layers=2, width=32, heads=2, vocabulary=256, context=16, batch=2),
        Size(
            "tiny-llama", 2, width=32, heads=4, vocabulary=256, context=16, batch=2, family="llama"
        ),
        Size("small-llama", 4, 384, 8, vocabulary=960, batch=4, alive=8, family="llama"),  # 8.4M
        Size("small", layers=6, width=384, heads=6, vocabulary=960, batch=4, alive=8),  # 11.4M
        Size("medium", layers=10, width=640, heads=10, vocabulary=512, batch=2),  # 49.9M
        Size("large", layers=16, width=1024, heads=16, vocabulary=4096, batch=1, alive=2),  # 209.9M
        # 1313M, for a GPU: 23 GB of bf16 weights, gradients and fp32 states in one process
        Size("1.3b", 24, width=2048, heads=16, vocabulary=24576, context=2048, batch=1, alive=2),
        # 1353M: layers of Llama-3-8B, as many as let two contenders share 78 GiB
        Size("llama", 5, 4096, 32, vocabulary=32000, context=4096, alive=2, family="llama"),
        # 1485M in few wide layers: what a GPU computes takes longer than its launches
        Size("wide", 7, width=4096, heads=32, vocabulary=8192, context=2048, batch=2, alive=2),
    )
}

OVERHEAD_SIZE = Size("overhead", layers=48, width=16, heads=1, vocabulary=256, context=8, batch=1)
"""So narrow that a step is Python and dispatch, with almost no arithmetic in it."""

LARGEST_SIZE = Size(
    "largest", layers=1, width=4096, heads=32, vocabulary=4096, context=512, batch=1
)
"""Where the search for the largest model begins: a layer is 0.2 billion parameters, and activations
are nothing beside it."""

CONTENDERS = {
    "ddp": "this library, stage 0",
    "zero1": "this library, stage 1",
    "zero2": "this library, stage 2",
    "zero3": "this library, stage 3",
    "zero3-keep": "this library, stage 3, weights kept from forward to backward",
    "zero3+whole": "this library, stage 3, ranks own whole parameters",
    "ddp@gloo": "the same over sockets",
    "zero1@gloo": "the same over sockets",
    "zero2@gloo": "the same over sockets",
    "zero3@gloo": "the same over sockets",
    "zero3-keep@gloo": "the same over sockets",
    "zero3@nccl": "the same over the process group's own collectives, also in one process",
    "zero3@nccl-apart": "the same with a communicator of their own for reduces",
    "zero3@fake8": (
        "the same in one process as rank 0 of 8, whose collectives only copy (losses mean nothing)"
    ),
    "zero1+trace": "this library, stage 1, inside engine.trace()",
    "zero3+trace": "this library, stage 3, inside engine.trace()",
    "torch-ddp": "torch DistributedDataParallel, gradients as views of its buckets",
    "torch-ddp-copy": "torch DistributedDataParallel as it comes, gradients copied into buckets",
    "torch-zero1": "torch DDP with ZeroRedundancyOptimizer",
    "fsdp2": "torch fully_shard per block",
    "fsdp2-keep": "torch fully_shard per block, reshard_after_forward=False",
    "dmuon": "torch fully_shard per block, each matrix stepped by its owner (--optimizer muon)",
    "fsdp2@fake8": "torch fully_shard as rank 0 of 8, like zero3@fake8",
    "deepspeed1": "DeepSpeed stage 1",
    "deepspeed2": "DeepSpeed stage 2",
    "deepspeed3": "DeepSpeed stage 3 (in effect keeps weights from forward to backward)",
    "deepspeed3-reshard": "DeepSpeed stage 3, made to gather again before backward",
    "compute": "forward, backward and the step on one shard, with no communication at all",
    "plain": "plain PyTorch, every rank by itself",
}

OFFLOADS: dict[str, dict[str, Any]] = {
    "zero2+host": {"grad": "host", "optimizer": "host"},
    "zero2+part": {"grad": "host", "optimizer": "host", "fraction": 0.4},
    "zero2+late": {"grad": "host", "optimizer": "host", "delayed_update": 0},
    "zero2+disk": {"optimizer": "disk"},
    "zero3+host": {"weight": "host", "grad": "host", "optimizer": "host"},
    "zero3+disk": {"weight": "disk", "grad": "disk", "optimizer": "disk"},
}
"""What `shard(offload=...)` gets, by contender."""

OFFLOAD_CONTENDERS = {
    "zero2": CONTENDERS["zero2"],
    "zero2+host": "the same, gradients and optimizer on the host",
    "zero2+part": "the same, 40% of gradients and optimizer on the host, the rest on the device",
    "zero2+late": (
        "the same, gradients and optimizer on the host, updates one step late from the first"
        " step on"
    ),
    "zero2+disk": "the same, optimizer on disk",
    "zero3": CONTENDERS["zero3"],
    "zero3+host": "the same, weights, gradients and optimizer on the host",
    "zero3+disk": "the same, weights, gradients and optimizer on disk",
    "fsdp2+host": "torch fully_shard per block with CPUOffloadPolicy (everything on the host)",
    "deepspeed2+host": "DeepSpeed stage 2, offload_optimizer cpu",
    "deepspeed3+host": "DeepSpeed stage 3, offload_optimizer cpu",
    "deepspeed3+weights": "DeepSpeed stage 3, offload_param and offload_optimizer cpu",
    "deepspeed3+disk": (
        "DeepSpeed stage 3, offload_optimizer nvme (look at its losses: on a CPU they were seen to"
        " be wrong)"
    ),
}

OFFLOAD_PARTS = {
    "steps": "whole training steps of every contender",
    "copies": "copies between host and device, pinned and pageable (CUDA only)",
    "host-step": "the streamed host step beside torch's fused AdamW on one tensor",
    "backward-step": "the host step inside the backward beside the step after it, on a paced link",
    "disk-step": (
        "the streamed disk step beside the same bytes read and written plainly, and beside the"
        " slower of disk and computation"
    ),
    "largest": "the largest model that trains on the card, per tier (CUDA only)",
}


@dataclass(frozen=True)
class Comparison:
    """`contender` beside `reference`; ``target`` is the least promised ratio of reference
    seconds to contender seconds.
    """

    contender: str
    reference: str
    target: float | None = None
    pairs: int = 12  # at least this many A/B pairs, unless the caller says otherwise


COMPARISONS = (
    Comparison("zero3", "torch-ddp", 1.0),
    Comparison("zero3", "fsdp2", 1.8),
    Comparison("zero3", "compute", 1 / 1.1, pairs=30),
    Comparison("zero3", "deepspeed3", 1.6),
    Comparison("zero3", "deepspeed3-reshard"),
    Comparison("zero3-keep", "torch-ddp", 1.0),
    Comparison("zero3-keep", "fsdp2-keep"),
    Comparison("zero2", "torch-ddp", 1.0),
    Comparison("zero2", "deepspeed2"),
    Comparison("zero1", "torch-ddp", 1.0),
    Comparison("zero1", "torch-zero1"),
    Comparison("zero1", "deepspeed1"),
    Comparison("ddp", "torch-ddp", 1.0),
    Comparison("zero3@gloo", "fsdp2", 1.4),
    Comparison("zero3@gloo", "torch-ddp"),
    Comparison("zero2@gloo", "torch-ddp"),
    Comparison("zero1@gloo", "torch-ddp"),
    Comparison("zero3-keep@gloo", "fsdp2-keep"),
    Comparison("ddp@gloo", "torch-ddp"),
    Comparison("torch-ddp-copy", "torch-ddp"),
)
"""What `bench step` measures, with the ratios that the project promises at the medium size."""

NAMED_COMPARISONS = (
    Comparison("zero3", "plain"),
    Comparison("zero3@nccl", "fsdp2"),
    Comparison("zero3@nccl-apart", "zero3@nccl"),
    Comparison("zero3@fake8", "fsdp2@fake8"),
    Comparison("zero1+trace", "zero1", 0.97, pairs=30),
    Comparison("zero3+trace", "zero3", 0.97, pairs=30),
    Comparison("zero3+whole", "zero3", pairs=30),
)
"""What it measures beside, where contenders are named: the first four with one GPU, `--nproc 1`."""

MUON_COMPARISONS = (
    Comparison("zero3", "fsdp2", 1.5),
    Comparison("zero3", "dmuon"),
    Comparison("zero2", "fsdp2"),
    Comparison("zero1", "fsdp2"),
    Comparison("zero3@gloo", "fsdp2"),
)
"""What it measures with `--optimizer muon`."""

OFFLOAD_COMPARISONS = (
    Comparison("zero2+host", "zero2"),
    Comparison("zero2+part", "zero2"),
    Comparison("zero2+late", "zero2"),
    Comparison("zero2+disk", "zero2"),
    Comparison("zero3+host", "zero3"),
    Comparison("zero3+disk", "zero3"),
    *(Comparison(name, "fsdp2+host") for name in OFFLOADS),
    *(Comparison(name, "deepspeed2+host") for name in OFFLOADS if name.startswith("zero2")),
    Comparison("zero3+host", "deepspeed3+host"),
    Comparison("zero3+host", "deepspeed3+weights"),
    Comparison("zero2+disk", "deepspeed3+disk"),
    Comparison("zero3+disk", "deepspeed3+disk"),
)
"""What `bench offload` measures: beside the same row on the device, beside FSDP2, and beside
DeepSpeed's nearest."""

OFFLOAD_ALIVE = 9
"""All of them but DeepSpeed's in one block: 13 GB at the medium size on two ranks, and no contender
is started twice."""

LARGEST = {"device": "zero3", "host": "zero3+host", "disk": "zero3+disk"}
"""Which contender stands for which tier in the search for the largest model."""

MEMORY_CLAIMS = tuple((row, "torch-ddp") for row in ("zero1", "zero2", "zero3"))
"""(contender, reference): the contender's peak memory above the imports is promised to be below the
reference's."""


def fake_ranks(contender: str) -> int:
    """Return the size of the fake process group that `contender` runs in; 0: it runs in a real
    one.
    """
    return int(contender.partition("@fake")[2] or 0)


def comparisons_for(
    contenders: Sequence[str], known: Sequence[Comparison] = COMPARISONS
) -> list[Comparison]:
    """Return those of the `known` comparisons that are among `contenders`.

    A contender that has none of its own is put beside the first other one, without a target.
    """
    chosen = [c for c in known if c.contender in contenders and c.reference in contenders]
    for name in contenders:
        others = [
            other for other in ("torch-ddp", *contenders) if other in contenders and other != name
        ]
        if others and not any(name in (c.contender, c.reference) for c in chosen):
            chosen.append(Comparison(name, others[0]))
    return chosen


def blocks(
    comparisons: Iterable[Comparison], *, alive: int
) -> list[tuple[tuple[str, ...], list[Comparison]]]:
    """Cut `comparisons` into blocks of at most `alive` contenders, greedily, so that contenders
    are shared where they can be.

    Returns (contenders in the order in which they take turns, comparisons measured in this block)
    per block. Every comparison is in exactly one block. Raises ValueError when `alive` is below 2.
    """
    if alive < 2:
        raise ValueError(f"alive={alive}: a comparison needs two contenders at a time")
    remaining = list(comparisons)
    result = []
    while remaining:
        members: list[str] = []
        inside: list[Comparison] = []
        while remaining:

            def newcomers(comparison: Comparison, members: list[str] = members) -> int:
                return len({comparison.contender, comparison.reference} - set(members))

            best = min(remaining, key=newcomers)  # the first of those that bring the fewest
            if len(members) + newcomers(best) > alive:
                break
            members += [name for name in (best.contender, best.reference) if name not in members]
            inside.append(best)
            remaining.remove(best)
        result.append((tuple(members), inside))
    return result
