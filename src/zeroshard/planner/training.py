"""A training run, per GPU: precision, optimizer, batch, codecs, and the share that leaves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from zeroshard.core.gradient_budget import budget_bytes
from zeroshard.core.layout import ALIGN
from zeroshard.core.placement import Mesh, Scope
from zeroshard.core.policy import Policy
from zeroshard.core.sizes import any_of
from zeroshard.core.tree import Deal, Tree, deal
from zeroshard.core.wire import CODEC_BITS, Formats
from zeroshard.errors import ConfigError

# 8-bit Adam as bitsandbytes keeps it (optim/optimizer.py, Optimizer2State; torchao's has the same
# block): of a tensor of 4096 elements or more one byte per moment and an fp32 maximum per block of
# 256, of a smaller one fp32
_BLOCK_8BIT, _LEAST_8BIT = 256, 4096

# state per parameter beside the master
MOMENT_BYTES = {
    "adam": 8.0,
    "adam-fused": 8.0,
    "adam-8bit": 2 * (1 + 4 / _BLOCK_8BIT),
    "adam-bf16": 4.0,
    "momentum": 4.0,
    "sgd": 0.0,
}
PRECISIONS = ("fp32", "bf16", "fp16")
# names as people and other libraries write them, in lower case and with dashes
_DTYPES = {
    "float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16",
}  # fmt: skip
_OPTIMIZERS = {
    "adamw": "adam", "adam-torch": "adam", "adamw-torch": "adam", "adamw-fused": "adam-fused",
    "adamw-torch-fused": "adam-fused", "adamw-bf16": "adam-bf16", "adam8bit": "adam-8bit",
    "adamw8bit": "adam-8bit", "adamw-8bit": "adam-8bit", "adamw-bnb-8bit": "adam-8bit",
    "sgd-momentum": "momentum",
}  # fmt: skip
_CODECS = tuple(CODEC_BITS)


@dataclass(frozen=True)
class Training:
    """One training run. Raises ConfigError for values that make no sense.

    `accumulate` is the dtype in which gradients rest: "fp32" (as in ``zs.shard``) or the dtype of
    `precision`, as the papers count. Both take torch's names and dtypes, too ("bfloat16").
    `optimizer` is "adam" or "adamw", "adam-fused" (the same with ``fused=True``: no temporaries in
    a step), "adam-bf16" (moments in bf16), "adam-8bit" (planned only), "momentum" (SGD with it) or
    "sgd". `batch` sequences of `sequence` tokens are one micro-batch of one GPU; `micro_batches` of
    them, all but the last inside ``no_sync()``, are a step. `checkpointing`: every block is
    recomputed in the backward.

    `weight_codec`, `grad_codec`, `frozen_codec`, `codec_block` and `error_feedback` are as in
    ``zs.Comm``; rows that take no such codec are not planned. `fraction` is as in ``zs.Offload``:
    the share of each state that leaves the device where the row's tiers let it leave.
    `accumulation_budget` is as in ``zs.shard``, in bytes or text ("2GiB"): rows in which it has no
    effect, or holds no unit, are planned as they are without. `leaves` is as in ``zs.shard``: the
    micro-batches of a step over all GPUs, in place of `micro_batches`.
    """

    precision: str = "bf16"
    accumulate: str = "fp32"
    optimizer: str = "adam"
    batch: int = 1
    sequence: int = 2048
    micro_batches: int = 1
    checkpointing: bool = False
    weight_codec: str | None = None
    grad_codec: str | None = None
    frozen_codec: str | None = None
    codec_block: int = 256
    error_feedback: bool = False
    fraction: float = 1.0
    accumulation_budget: int | str | None = None
    leaves: int | str | None = None

    def __post_init__(self) -> None:
        for name, names in (
            ("precision", _DTYPES), ("accumulate", _DTYPES), ("optimizer", _OPTIMIZERS),
        ):  # fmt: skip
            object.__setattr__(self, name, _known(getattr(self, name), names))
        for name, value, choices in (
            ("precision", self.precision, PRECISIONS),
            ("optimizer", self.optimizer, tuple(MOMENT_BYTES)),
            ("accumulate", self.accumulate, tuple(dict.fromkeys(("fp32", self.precision)))),
            ("weight_codec", self.weight_codec, (None, *_CODECS)),
            ("grad_codec", self.grad_codec, (None, *_CODECS, "bf16")),
            ("frozen_codec", self.frozen_codec, (None, *_CODECS)),
        ):
            if value not in choices:
                known = ", ".join(choice for choice in choices if choice)
                raise ConfigError(f"{name}={value!r} is not one of {known}")
        for name in ("batch", "sequence", "micro_batches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is less than one")
        if self.codec_block < ALIGN or self.codec_block % ALIGN:
            raise ConfigError(
                f"codec_block={self.codec_block} is not a positive multiple of {ALIGN}"
            )
        if self.error_feedback and self.grad_codec not in _CODECS:
            raise ConfigError(
                f"error_feedback has no effect without an {any_of(_CODECS)} grad_codec"
            )
        given: object = self.fraction
        if isinstance(given, str):
            raise ConfigError(
                f"fraction={given!r} is found by measuring steps, which a plan has none of:"
                " give a number from 0 to 1, such as the one that the run's log names"
            )
        if not 0.0 < self.fraction <= 1.0:
            raise ConfigError(
                f"fraction={self.fraction} is not in (0, 1]: it is the share that leaves the device"
            )
        budget_bytes(self.accumulation_budget)
        self._check_leaves()

    def _check_leaves(self) -> None:
        if self.tree is None:
            return
        for name, plain in (("grad_codec", None), ("accumulate", "fp32")):
            if getattr(self, name) != plain:
                raise ConfigError(
                    f"leaves={self.leaves} fixes the bits of every sum, and"
                    f" {name}={getattr(self, name)!r} rounds sums: leave one of them out"
                )

    @cached_property
    def tree(self) -> Tree | None:
        """The tree of the leaves. Raises ConfigError."""
        try:
            return None if self.leaves is None else Tree.parse(self.leaves)
        except ValueError as error:
            raise ConfigError(f"leaves={self.leaves!r}: {error}") from None

    def on(self, num_ranks: int) -> Training:
        """Return it with the micro-batches that the first of `num_ranks` computes of the leaves.
        Raises ConfigError where a rank has none.
        """
        if self.tree is None:
            return self
        counts = deal(self.tree.leaves, num_ranks)
        if min(counts) < 1:
            raise ConfigError(
                f"leaves={self.leaves} gives {self.tree.leaves} micro-batches to {num_ranks} data"
                " parallel ranks: every rank needs one at least"
            )
        return replace(self, micro_batches=counts[0])

    def deal(self, policy: Policy, mesh: Mesh) -> Deal | None:
        """Return how the ranks of `mesh` add up the leaves in a row; None without leaves."""
        if self.tree is None:
            return None
        cells = policy.all_cells
        whole = all(one.grad.is_partial and one.grad.scope is Scope.FULL for one in cells)
        return Deal(self.tree, tuple(deal(self.tree.leaves, mesh.size)), mesh, whole)

    @property
    def accumulation_bytes(self) -> int | None:
        """The budget for gradients between micro-batches, in bytes."""
        return budget_bytes(self.accumulation_budget)

    @property
    def moment_bytes(self) -> float:
        """Bytes that the optimizer keeps per parameter beside the master."""
        return MOMENT_BYTES[self.optimizer]

    def state_bytes(self, numel: int) -> int:
        """Return the bytes that the optimizer keeps of one tensor of `numel` elements."""
        if self.optimizer != "adam-8bit":
            return round(numel * self.moment_bytes)
        if numel < _LEAST_8BIT:
            return 8 * numel
        return 2 * (numel + 4 * -(-numel // _BLOCK_8BIT))

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch of one GPU."""
        return self.batch * self.sequence

    @property
    def align(self) -> int:
        """Shares are cut at multiples of so many elements: a codec's blocks stay whole."""
        named = {self.weight_codec, self.grad_codec, self.frozen_codec} - {None, "bf16"}
        return max(ALIGN, self.codec_block) if named else ALIGN

    def comm(self) -> dict[str, object]:
        """Return what ``zs.Comm`` is given for the codecs; {} without any."""
        names = ("weight_codec", "grad_codec", "frozen_codec", "codec_block", "error_feedback")
        plain = Training()
        return {
            name: getattr(self, name)
            for name in names
            if getattr(self, name) != getattr(plain, name)
        }

    def formats(
        self, dtype: str | None, *, trained: bool = True, rests_packed: bool = False
    ) -> Formats:
        """Return the formats of parameters that compute in `dtype` (None: the precision).

        `rests_packed`: they rest in `frozen_codec`.
        """
        compute = dtype or self.precision
        accumulate = "fp32" if self.accumulate == "fp32" else compute
        frozen = None if trained else self.frozen_codec
        return Formats.of(
            compute,
            accumulate=accumulate,
            weight_codec=frozen or self.weight_codec,
            grad_codec=self.grad_codec,
            block=self.codec_block,
            rests_packed=rests_packed,
        )


def _known(given: object, names: dict[str, str]) -> str:
    """Return the name that is meant by `given`, a text or a dtype; as it is, where none is."""
    text = str(given).removeprefix("torch.")
    lower = text.lower().replace("_", "-")
    return names.get(lower, lower if lower in names.values() else text)
