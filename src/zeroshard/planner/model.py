"""A model as the planner sees it: shapes of parameters in the runtime's units, and the activations
of a pass, traced or, of a transformer decoder, in closed form.

A model is described by a number of parameters (a decoder of typical shape is assumed, and said), by
a Transformers ``config.json`` (families.py), or built without memory by whoever may import torch
(modules/).

Invariant: the units are as ``runtime/units.py: partition_units`` cuts them: one per repeated block,
and what is left over packed in definition order up to max(block, largest parameter, 1/8 of the
model).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from zeroshard.core.resting import packed, unit_limit
from zeroshard.core.sizes import parse_count
from zeroshard.errors import ConfigError
from zeroshard.planner.training import Training

# --------------------------------------------------------------------------------- a pass in events
# The activations of a pass, event by event: plain numbers, made by whoever may import torch
# (activations.py), or by `closed_form`.
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
                one,
                activations=round(one.activations * factor),
                logits=round(one.logits * factor),
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
    prefixes = {f"{block}.": block for block in blocks}

    def block_of(name: str) -> str | None:
        parts = name.split(".")
        heads = (".".join(parts[:stop]) + "." for stop in range(1, len(parts)))
        return next((prefixes[head] for head in heads if head in prefixes), None)

    members: dict[str, list[Shape]] = {}
    for shape in parameters:
        block = block_of(shape[0])
        if block is not None:
            members.setdefault(block, []).append(shape)
    limit = unit_limit(map(_numel, members.values()), [math.prod(one) for _, one in parameters])
    sized = [(name, math.prod(shape), block_of(name)) for name, shape in parameters]
    shapes = dict(parameters)
    return tuple(
        UnitShape(block, (GroupShape(tuple(members[block])),))
        if block is not None
        else UnitShape(names[0], (GroupShape(tuple((name, shapes[name]) for name in names)),))
        for block, names in packed(sized, limit)
    )


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


def _block(hidden: int) -> list[Shape]:
    """Return the parameters of one decoder layer, biases and norms included."""
    matrices = [("qkv", 3 * hidden, hidden), ("out", hidden, hidden)]
    matrices += [("up", 4 * hidden, hidden), ("down", hidden, 4 * hidden)]
    parameters: list[Shape] = [("norm_1", (2, hidden)), ("norm_2", (2, hidden))]
    for name, rows, columns in matrices:
        parameters += [(f"{name}.weight", (rows, columns)), (f"{name}.bias", (rows,))]
    return parameters


def _numel(shapes: Iterable[Shape]) -> int:
    return sum(math.prod(shape) for _, shape in shapes)


# ----------------------------------------------------------------------- activations in closed form
# arXiv 2205.05198, section 4.1, without dropout and with attention that keeps no s x s matrix. With
# `checkpointing` every layer keeps its input, and the one under way everything. Where only the
# parameters of a model are known, its trace has no activations.
#
# Cost: at most 9 layers are walked, whatever the model's depth: between the first and the last of
# them everything grows or shrinks evenly.

_SHOWN = 8  # equal layers that are walked one by one; those between them are taken as one


def layer_bytes(decoder: Decoder, training: Training) -> int:
    """Return the bytes that the forward of one layer leaves for its backward.

    Per token: the inputs of both norms, of the projections and of the MLP, q, k, v and the
    attention's output; of the MLP what goes into its activation and out of it, of a gated one both
    factors as well.
    """
    q, kv = decoder.heads * decoder.head_dim, decoder.kv_heads * decoder.head_dim
    attention = 3 * decoder.hidden + 2 * q + 2 * kv
    mlp = decoder.hidden + (4 if decoder.gated else 2) * decoder.ffn
    return (attention + mlp) * training.tokens * _itemsize(training)


def kept_bytes(decoder: Decoder | None, training: Training) -> int:
    """Return the bytes of one layer that stay between its forward and its backward."""
    if decoder is None:
        return 0
    if training.checkpointing:  # its input
        return decoder.hidden * training.tokens * _itemsize(training)
    return layer_bytes(decoder, training)


def logit_bytes(decoder: Decoder, training: Training) -> int:
    """Return the bytes of the logits in the compute dtype, in fp32, and of their gradient."""
    return decoder.vocab * training.tokens * (_itemsize(training) + 8)


def closed_form(model: ModelShape, training: Training) -> ActivationTrace:
    """Return the trace of a model that runs its units in order, the layers of its decoder as
    `layer_bytes` says. Without a decoder there are no activations in it.
    """
    decoder = model.decoder
    layer = 0 if decoder is None else layer_bytes(decoder, training)
    kept = kept_bytes(decoder, training)
    logits = 0 if decoder is None else logit_bytes(decoder, training)

    order = list(_in_order(model.units, 0 if decoder is None else decoder.layers))
    forward, held = [], 0
    for unit, repeats, is_layer in order:
        inside = held + (layer if is_layer else 0)
        forward.append(Moment("gather", unit, 0, inside, 0, repeats))
        held += kept * repeats if is_layer else 0
        forward.append(Moment("release", unit, 0, held, 0, repeats))
    turn = Moment("turn", activations=held + logits, logits=logits)
    backward = []
    for unit, repeats, is_layer in reversed(order):
        # the logits' gradient lives until the unit that made them is done
        loss = logits if unit == order[-1][0] else 0
        extra = layer - kept if is_layer else 0
        first, held = held + extra, held - (kept * repeats if is_layer else 0)
        last = held + (layer if is_layer else 0)
        backward.append(Moment("gather", unit, 0, first + loss, loss, repeats))
        for number, group in enumerate(model.units[unit].groups):
            if group.trained:
                backward.append(Moment("gradient", unit, number, first + loss, loss, repeats))
        backward.append(Moment("reduce", unit, 0, last, 0, repeats))
        backward.append(Moment("release", unit, 0, held, 0, repeats))
    moments = (*forward, turn, *backward, Moment("end"))
    return ActivationTrace(moments, training.tokens, training.checkpointing)


def _in_order(units: Sequence[UnitShape], layers: int) -> Iterator[tuple[int, int, bool]]:
    """Yield the units that are walked: number, how many equal ones it stands for, and whether it
    is a layer.
    """
    shapes = [
        tuple(tuple(shape for _, shape in group.shapes) for group in unit.groups) for unit in units
    ]
    common, count = Counter(shapes).most_common(1)[0]
    run = [number for number, shape in enumerate(shapes) if shape == common]
    skipped = run[_SHOWN // 2 : -_SHOWN // 2] if len(run) > _SHOWN + 1 else []
    if run != list(range(run[0], run[0] + len(run))):
        skipped = []
    left_out = set(skipped[1:])
    for number in range(len(units)):
        if number not in left_out:
            is_layer = bool(layers) and (count != layers or shapes[number] == common)
            yield number, len(skipped) if skipped[:1] == [number] else 1, is_layer


def _itemsize(training: Training) -> int:
    return round(training.formats(None).weight.bytes_per_element)
