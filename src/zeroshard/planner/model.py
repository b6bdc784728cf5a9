"""A model as the planner sees it, shapes of parameters in the runtime's units and the activations
of a pass, traced; and a training run, per GPU: precision, optimizer, batch, codecs, the share that
leaves.

A model is described by a number of parameters (a decoder of typical shape is assumed, and said), by
a Transformers ``config.json`` (families.py), or built without memory by whoever may import torch
(modules.py).

Invariant: the units are as ``runtime/units.py: partition_units`` cuts them: one per repeated block,
and what is left over packed in definition order up to max(block, largest parameter, 1/8 of the
model).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from zeroshard.core.layout import ALIGN
from zeroshard.core.placement import Mesh, Scope
from zeroshard.core.policy import Policy
from zeroshard.core.resting import packed, unit_limit
from zeroshard.core.sizes import any_of, budget_bytes, parse_count
from zeroshard.core.tree import Deal, Tree, deal
from zeroshard.core.wire import CODEC_BITS, Formats, Wire
from zeroshard.errors import ConfigError

# ----------------------------------------------------------------------------------- a training run


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
    "muon": 4.0,  # of a matrix; of the others AdamW's 8
    "sgd": 0.0,
}
# words in the names of matrices over the vocabulary, and over positions
VOCABULARY = ("embed_tokens", "embed", "wte", "embed_in", "embed_out", "embedding", "token",
              "lm_head", "head")  # fmt: skip
TABLES = (*VOCABULARY, "wpe", "position")
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
_FP32_STATES = ("adam", "adam-fused", "momentum")
_LOW_MASTERS = ("bf16", "remainder")  # of bf16 weights
REMAINDER = Wire("remainder", None, 2.0)  # of a master, beside its bf16 weight


@dataclass(frozen=True)
class Training:
    """One training run. Raises ConfigError for values that make no sense.

    `accumulate` is the dtype in which gradients rest: "fp32" (as in ``zs.shard``) or the dtype of
    `precision`, as the papers count. Both take torch's names and dtypes, too ("bfloat16").
    `master` ("fp32", "bf16", "remainder") and `moments` ("fp32", "bf16") are as in `zs.Precision`:
    rows on the device alone are planned where states are decoded for their step.
    `optimizer` is "adam" or "adamw", "adam-fused" (the same with ``fused=True``: no temporaries in
    a step), "adam-bf16" (moments in bf16), "adam-8bit" (owned whole), "momentum" (SGD with it),
    "muon" (of matrices, AdamW of tables and vectors) or "sgd". `batch` sequences of `sequence`
    tokens are one micro-batch of one GPU; `micro_batches` of them, all but the last inside
    ``no_sync()``, are a step. `checkpointing`: every block is recomputed in the backward.

    `weight_codec`, `grad_codec`, `frozen_codec`, `codec_block` and `error_feedback` are as in
    ``zs.Comm``; rows that take no such codec are not planned. `fraction` is as in ``zs.Offload``:
    the share of each state that leaves the device where the row's tiers let it leave, and
    `step_in_backward`: states on the host take their bytes there once more.
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
    step_in_backward: bool = False
    accumulation_budget: int | str | None = None
    leaves: int | str | None = None
    master: str = "fp32"
    moments: str = "fp32"

    def __post_init__(self) -> None:
        for name, names in (
            ("precision", _DTYPES), ("accumulate", _DTYPES), ("optimizer", _OPTIMIZERS),
        ):  # fmt: skip
            text = str(getattr(self, name)).removeprefix("torch.")  # a dtype, too
            lower = text.lower().replace("_", "-")
            known = names.get(lower, lower if lower in names.values() else text)
            object.__setattr__(self, name, known)
        for name, value, choices in (
            ("precision", self.precision, PRECISIONS),
            ("optimizer", self.optimizer, tuple(MOMENT_BYTES)),
            ("accumulate", self.accumulate, tuple(dict.fromkeys(("fp32", self.precision)))),
            ("master", self.master, ("fp32", *_LOW_MASTERS[: 2 * (self.precision == "bf16")])),
            ("moments", self.moments, ("fp32", "bf16")),
            ("weight_codec", self.weight_codec, (None, *_CODECS)),
            ("grad_codec", self.grad_codec, (None, *_CODECS, "bf16")),
            ("frozen_codec", self.frozen_codec, (None, *_CODECS)),
        ):
            if value not in choices:
                known = ", ".join(choice for choice in choices if choice)
                raise ConfigError(f"{name}={value!r} is not one of {known}")
        if self.decodes and self.optimizer in ("muon", "adam-8bit"):
            option = "master='remainder'" if self.master == "remainder" else "moments='bf16'"
            raise ConfigError(
                f"optimizer={self.optimizer!r} steps whole parameters, and {option} steps them in"
                " parts: leave one of them out"
            )
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
        for name, plain in (("grad_codec", None), ("accumulate", "fp32")):
            if self.tree is not None and getattr(self, name) != plain:
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
        given = MOMENT_BYTES[self.optimizer]
        return given / 2 if self.moments == "bf16" and self.optimizer in _FP32_STATES else given

    @property
    def decodes(self) -> bool:
        """Whether states are decoded for their step."""
        return self.master == "remainder" or (self.moments != "fp32" and self.master == "fp32")

    def state_bytes(self, numel: int, *, is_matrix: bool = True) -> int:
        """Return the bytes that the optimizer keeps of `numel` elements of one tensor: of a matrix
        that Muon would step, or not.
        """
        if self.optimizer == "muon" and not is_matrix:
            return 8 * numel
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
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value != getattr(Training, name)}

    def formats(
        self, dtype: str | None, *, trained: bool = True, rests_packed: bool = False
    ) -> Formats:
        """Return the formats of parameters that compute in `dtype` (None: the precision).

        `rests_packed`: they rest in `frozen_codec`.
        """
        compute = dtype or self.precision
        accumulate = "fp32" if self.accumulate == "fp32" else compute
        frozen = None if trained else self.frozen_codec
        formats = Formats.of(
            compute,
            accumulate=accumulate,
            weight_codec=frozen or self.weight_codec,
            grad_codec=self.grad_codec,
            block=self.codec_block,
            rests_packed=rests_packed,
        )
        masters = {"bf16": Wire.of("bf16"), "remainder": REMAINDER}
        low = masters.get(self.master) if compute == "bf16" else None
        return formats if low is None else replace(formats, master=low)


# --------------------------------------------------------------------------------- a pass in events
# The activations of a pass, event by event: plain numbers, made by whoever may import torch
# (activations.py), or by ``peak.closed_form``.
#
#     gather u   unit u is needed         gradient u g   the first gradient of group g of u is there
#     release u  it is needed no longer   reduce u       all of its gradients are
#     turn       the forward is over      end            the backward is over
#
# At these events the engine takes and gives back memory (runtime/loop.py), whatever the row.
# Between two of them activations grow and shrink by themselves; a `Moment` holds the most of them
# from its event to the next.

Event = Literal["gather", "release", "gradient", "reduce", "turn", "end"]


@dataclass(frozen=True)
class Moment:
    """An event, and the most bytes of activations, logits among them, from it to the next."""

    event: Event
    unit: int = -1  # number in ``ModelShape.units``
    group: int = 0  # number in ``UnitShape.groups``, of a gradient
    activations: int = 0
    logits: int = 0
    repeats: int = 1  # equal units that it stands for


@dataclass(frozen=True)
class ActivationTrace:
    """One forward and backward of a micro-batch of `tokens`, from its first event to its last."""

    moments: tuple[Moment, ...]
    tokens: int
    checkpointing: bool
    buffers: int = 0  # bytes of the model's own buffers, which are there all the time
    # FLOPs of the forward and the backward of each unit, recomputing included, that were counted
    flops: tuple[tuple[float, float], ...] = ()

    def scaled(self, tokens: int) -> ActivationTrace:
        """Return the trace of a micro-batch of so many tokens, to which activations are taken as
        proportional.
        """
        if tokens == self.tokens:
            return self
        factor = tokens / self.tokens
        moments = tuple(
            replace(
                one, activations=round(one.activations * factor), logits=round(one.logits * factor)
            )
            for one in self.moments
        )
        flops = tuple((ahead * factor, back * factor) for ahead, back in self.flops)
        return replace(self, moments=moments, tokens=tokens, flops=flops)

    def above(self, num_bytes: int) -> ActivationTrace:
        """Return the trace beside so many bytes of other activations."""
        moments = tuple(
            replace(one, activations=one.activations + num_bytes) for one in self.moments
        )
        return replace(self, moments=moments)


# ----------------------------------------------------------------------------- shapes of parameters

Shape = tuple[str, tuple[int, ...]]  # name, shape of one parameter


@dataclass(frozen=True)
class GroupShape:
    """The parameters of one unit that share dtype and trainability, in definition order."""

    shapes: tuple[Shape, ...]
    dtype: str | None = None  # in which they compute; None: the precision's
    trained: bool = True
    looked_up: int = 0  # elements of tables, which nothing is multiplied by (axes.py)

    @cached_property
    def numel(self) -> int:
        """The number of elements."""
        return sum(math.prod(shape) for _, shape in self.shapes)

    @cached_property
    def matrices(self) -> frozenset[str]:
        """The names of what Muon steps: matrices, but for tables over vocabulary and positions, and
        for the two vectors of a norm.
        """
        return frozenset(
            name
            for name, shape in self.shapes
            if len(shape) == 2 < min(shape) and not any(word in TABLES for word in name.split("."))
        )


@dataclass(frozen=True)
class UnitShape:
    """One unit: the parameters that are gathered together."""

    name: str
    groups: tuple[GroupShape, ...]
    uses: int = 1  # by one forward, with other units between them: 2 for a tied embedding

    @property
    def numel(self) -> int:
        """The number of elements."""
        return sum(group.numel for group in self.groups)


@dataclass(frozen=True)
class Decoder:
    """The sizes of a transformer decoder, from which activations and logits follow."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # inner size of the MLP; of all experts that one token uses
    gated: bool  # the MLP has a gate (SwiGLU) beside the up projection
    vocab: int


@dataclass(frozen=True)
class ModelShape:
    """A model: its units, its decoder's sizes if they are known, and what was assumed."""

    name: str
    units: tuple[UnitShape, ...]
    decoder: Decoder | None = None
    used_numel: int | None = None  # elements that one token uses, where experts are chosen
    note: str = ""
    trace: ActivationTrace | None = None  # of its activations, where they were traced
    tokenwise: bool = True  # each token meets each parameter: FLOPs follow from their numbers
    positions: int | None = None  # the most tokens of a sequence that it takes
    inputs: tuple[int, int] | None = None  # batch and sequence of the token ids that were traced

    @cached_property
    def numel(self) -> int:
        """The number of parameters."""
        return sum(unit.numel for unit in self.units)

    @property
    def takes_tokens(self) -> bool:
        """Whether a micro-batch is sequences of tokens."""
        return self.tokenwise or self.inputs is not None

    @property
    def is_timed(self) -> bool:
        """Whether its FLOPs are known: they follow from its tokens, or were counted."""
        return self.tokenwise or (self.trace is not None and any(map(any, self.trace.flops)))

    def counted(self, unit: int) -> tuple[float, float]:
        """Return the FLOPs that were counted of a forward and a backward of one unit."""
        if self.trace is None or not self.trace.flops:
            return 0.0, 0.0
        return self.trace.flops[unit]

    @property
    def num_trained(self) -> int:
        """The number of parameters that are trained."""
        groups = [group for unit in self.units for group in unit.groups]
        return sum(group.numel for group in groups if group.trained)


def with_adapters(model: ModelShape, trainable: str) -> ModelShape:
    """Return `model` frozen, and adapters beside its parameters, as LoRA adds them: so many
    `trainable` parameters ("40M", or "1%" of the model's), shared out over the units.

    Raises ConfigError for a model that was traced: what is frozen there is known already.
    """
    if model.trace is not None or model.num_trained < model.numel:
        raise ConfigError(
            f"trainable={trainable!r} is for models of a size or a config.json: build"
            f" {model.name} with its adapters, and freeze the others"
        )
    share = re.fullmatch(r"(\d+(?:\.\d+)?)%", trainable)
    if share is None:
        numel = parse_count(trainable, "trainable")
    else:
        numel = round(model.numel * float(share[1]) / 100)
    if not 0 < numel <= model.numel:
        raise ConfigError(
            f"trainable={trainable!r} counts the parameters of adapters: give 1% or 40M, of"
            f" {model.numel:,} at most"
        )
    units, before = [], 0
    for unit in model.units:
        after = before + unit.numel
        adapter = numel * after // model.numel - numel * before // model.numel
        groups = tuple(replace(group, trained=False) for group in unit.groups)
        if adapter:
            groups += (GroupShape(((f"{unit.name}.adapter", (adapter,)),)),)
        units.append(replace(unit, groups=groups))
        before = after
    note = f"frozen, and {numel:,} trained beside them (adapters)"
    note = f"{model.note}; {note}" if model.note else note
    used = None if model.used_numel is None else model.used_numel + numel
    return replace(model, units=tuple(units), note=note, used_numel=used)


def fitted(model: ModelShape, training: Training) -> tuple[ModelShape, Training]:
    """Return both with the micro-batch that `model` takes: as many token ids as were traced, and
    sequences no longer than it has positions. A note then says so.

    Raises ConfigError where another sequence than the default one is longer.
    """
    if model.inputs is not None:
        batch, sequence = model.inputs
        return model, replace(training, batch=batch, sequence=sequence)
    most = model.positions
    if most is None or training.sequence <= most:
        return model, training
    if training.sequence != Training.sequence:
        raise ConfigError(
            f"sequence={training.sequence} is longer than the {most} positions of {model.name}:"
            f" give sequence={most}, or fewer"
        )
    note = f"sequences of {most} tokens, as many as it has positions"
    note = f"{model.note}; {note}" if model.note else note
    return replace(model, note=note), replace(training, sequence=most)


def pack_units(parameters: Sequence[Shape], blocks: Iterable[str]) -> tuple[UnitShape, ...]:
    """Return the units of `parameters` (definition order), those below each name of `blocks` one
    unit each.
    """
    known = set(blocks)

    def block_of(name: str) -> str | None:
        parts = name.split(".")
        heads = (".".join(parts[:stop]) for stop in range(1, len(parts)))
        return next((head for head in heads if head in known), None)

    sized = [(name, math.prod(shape), block_of(name)) for name, shape in parameters]
    members: dict[str, list[Shape]] = {}
    for shape, (_, _, block) in zip(parameters, sized, strict=True):
        if block is not None:
            members.setdefault(block, []).append(shape)
    limit = unit_limit(map(_numel, members.values()), [numel for _, numel, _ in sized])
    shapes = dict(parameters)
    units = []
    for block, names in packed(sized, limit):
        own = [(name, shapes[name]) for name in names] if block is None else members[block]
        units.append(UnitShape(block or names[0], (GroupShape(tuple(own)),)))
    return tuple(units)


def describe(text: str) -> ModelShape:
    """Return a decoder of typical shape with exactly as many parameters as `text` ("7.5B") says.

    Its layers are 64 to 128 times as wide as there are layers, as GPT-3's are, with 12 h^2 weights
    each; what is left over is the embedding, which is the output layer, too.
    """
    numel = parse_count(text, "params")
    if numel > 10**15:
        raise ConfigError(f"params={text!r} is more than 1000T: no machine here holds it")
    hidden = max(64, 64 * round(2 * (numel / (12 * 128**2)) ** (1 / 3)))
    # one layer, biases and norms included
    block: list[Shape] = [("norm_1", (2, hidden)), ("norm_2", (2, hidden))]
    for part, rows, columns in (
        ("qkv", 3 * hidden, hidden),
        ("out", hidden, hidden),
        ("up", 4 * hidden, hidden),
        ("down", hidden, 4 * hidden),
    ):
        block += [(f"{part}.weight", (rows, columns)), (f"{part}.bias", (rows,))]
    reserved = min(50_257 * hidden, numel // 8)
    layers = (numel - reserved) // _numel(block)
    left = numel - layers * _numel(block)
    parameters: list[Shape] = [("embedding", (left,))] if left else []
    names = [f"layers.{index}" for index in range(layers)]
    parameters += [(f"{name}.{part}", shape) for name in names for part, shape in block]
    decoder = None
    if layers:
        heads = hidden // 64
        vocab = max(1, min(50_257, left // hidden))  # GPT-2's, at most
        decoder = Decoder(hidden, layers, heads, heads, 64, 4 * hidden, False, vocab)
    note = f"assumed: a decoder of {layers} layers of width {hidden}"
    return ModelShape(text, pack_units(parameters, names), decoder, note=note)


def _numel(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape) for _, shape in shapes)
