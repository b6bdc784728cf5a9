"""The axes of a mesh beside the data parallel ones, as a plan takes them: ``zs.Axes``, each layout
that it allows on a machine, and the part of a model that one rank of it has.

    rank = (pp * dp + data parallel rank) * tp + tensor parallel rank

so that tensor parallel ranks are next to each other, inside a node as far as they fit; data
parallel ranks come next, and stages of a pipeline lie farthest apart: the order of arXiv
2104.04473, section 3, and of torchtitan's mesh.

Invariant: of every layout, tp x pp x dp is the number of GPUs, tp divides heads and key-value
heads, and every stage has a layer. The parts of a stage, added up over tp, and the stages, added
up, are the model (of two embeddings).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd

from zeroshard.core.pipeline_orders import PipelineOrder
from zeroshard.errors import ConfigError
from zeroshard.planner.machine import Machine
from zeroshard.planner.model import (
    TABLES,
    VOCABULARY,
    Decoder,
    GroupShape,
    ModelShape,
    Training,
    UnitShape,
    pack_units,
)

# ------------------------------------------------------------------------------------------ layouts

AUTO = "auto"
_UNEVEN = 1.25  # layers of the largest stage over their mean, up to which "auto" takes a depth


@dataclass(frozen=True)
class Axes:
    """The number of ranks of tensor and of pipeline parallelism, or "auto": every number that makes
    sense is planned, and the fastest is taken. The other ranks are data parallel.

    `schedule` orders the pipeline: "1f1b" (the default), "gpipe", "interleaved" (two stages on each
    rank; "interleaved:4": four) or "zb". Raises ConfigError for values that make no sense.
    """

    tp: int | str = 1
    pp: int | str = 1
    schedule: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("tp", self.tp), ("pp", self.pp)):
            if value != AUTO and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} is neither a number of ranks nor 'auto'")
        if self.schedule is not None and self.pp == 1:
            raise ConfigError(f"schedule={self.schedule!r} has no effect without a pipeline: give"
                              " pp")  # fmt: skip
        self.pipeline  # noqa: B018  raises

    @property
    def pipeline(self) -> PipelineOrder:
        """The schedule of a pipeline."""
        return PipelineOrder.parse(self.schedule or "1f1b")

    @property
    def is_auto(self) -> bool:
        """Whether any number is to be found."""
        return AUTO in (self.tp, self.pp)


@dataclass(frozen=True)
class Grid:
    """One grid of ranks: how many along each axis, its schedule, a pipeline's micro-batches."""

    tp: int
    pp: int
    dp: int
    schedule: PipelineOrder
    micro_batches: int

    @property
    def stages(self) -> int:
        """The stages of a pipeline."""
        return self.pp * self.schedule.chunks

    def share(self, machine: Machine) -> Machine:
        """Return the machine of the data parallel ranks of one stage and tensor parallel rank:
        their part of every node's memory, disk and bandwidth.
        """
        inside = gcd(self.dp, max(1, machine.node_size // self.tp))
        part = inside / machine.node_size
        speeds = machine.speeds
        return replace(
            machine,
            gpus=self.dp,
            node_size=inside,
            host_memory=int(machine.host_memory * part),
            disk=int(machine.disk * part),
            speeds=replace(speeds, host=speeds.host * part, disk=speeds.disk * part),
        )

    def tensor_nodes(self, machine: Machine) -> int:
        """Return over how many nodes tensor parallel ranks lie."""
        if machine.node_size % self.tp == 0:
            return 1
        return max(2, -(-self.tp // machine.node_size))

    def is_near(self, machine: Machine, rank: int) -> bool:
        """Whether all ranks of the pipeline's `rank` send to the next inside their node."""
        size, node = self.dp * self.tp, machine.node_size
        return all(
            (rank * size + one) // node == ((rank + 1) * size + one) // node
            for one in (0, size - 1)
        )


def grids(axes: Axes, model: ModelShape, machine: Machine, training: Training) -> tuple[Grid, ...]:
    """Return the grids of `machine` that `axes` allows.

    With "auto" a step has the tokens of ``training.micro_batches`` on every GPU in each of them:
    a pipeline of tp x pp GPUs runs tp x pp times as many. Raises ConfigError for numbers that do
    not fit the machine or the model.
    """
    given = {name: size for name in ("tp", "pp") if isinstance(size := getattr(axes, name), int)}
    size = math.prod(given.values())
    named = " x ".join(f"{name}={number}" for name, number in given.items() if number > 1)
    if size > machine.gpus:
        raise ConfigError(f"{named} takes {size} GPUs: there are {machine.gpus}")
    if machine.gpus % size:
        raise ConfigError(f"{named} does not divide gpus={machine.gpus}: every data parallel rank"
                          f" takes {size}")  # fmt: skip
    width, decoder = given.get("tp", 1), model.decoder
    if width > 1 and decoder is None:
        raise ConfigError(
            f"tp={width} needs a decoder's sizes, which {model.name} does not tell: plan a"
            " config.json, or --params"
        )
    heads: list[tuple[str, int]] = []  # which tp divides; none of a model that is only assumed
    if decoder is not None and not is_assumed(model):
        heads = [("attention heads", decoder.heads), ("key-value heads", decoder.kv_heads)]
    for what, number in heads if width > 1 else ():
        if number % width:
            raise ConfigError(f"tp={width} does not divide the {number} {what} of {model.name}")
    layers, chunks = len(layer_numbers(model)), axes.pipeline.chunks
    if given.get("pp", 1) > 1 and given["pp"] * chunks > layers:
        raise ConfigError(
            f"pp={given['pp']} makes {given['pp'] * chunks} stages: {model.name} has {layers}"
            " layers, and every stage needs one"
        )

    tensors: list[int | str] = [axes.tp]
    if axes.tp == AUTO:  # in one node
        tensors = [
            tp
            for tp in range(1, machine.node_size + 1)
            if tp == 1
            or (decoder and machine.node_size % tp == 0 and not any(one % tp for _, one in heads))
        ]
    out = []
    for tp in tensors:
        ranks, depths = machine.gpus // int(tp), [axes.pp]
        if axes.pp == AUTO:  # with stages that are about equally large
            depths = [
                pp
                for pp in range(1, min(ranks, layers // chunks) + 1 if layers else 2)
                if ranks % pp == 0
                and (pp == 1 or -(-layers // (pp * chunks)) * pp * chunks <= _UNEVEN * layers)
            ]
        for pp in depths:
            size = int(tp) * int(pp)
            if machine.gpus % size:
                continue
            more = size if axes.is_auto else 1
            schedule = axes.pipeline if int(pp) > 1 else PipelineOrder()
            one = Grid(
                int(tp), int(pp), machine.gpus // size, schedule, more * training.micro_batches
            )
            try:
                if one.pp > 1:
                    schedule.check(one.pp, one.micro_batches)
            except ConfigError:
                if not axes.is_auto:
                    raise
                continue
            out.append(one)
    return tuple(out)


# ----------------------------------------------------------------------------- the part of one rank
#     tp   columns   q, k, v, gate, up, the fused qkv, with their biases      cut
#          rows      o, down; their biases are whole                          cut
#          ends      embedding and output layer, over the vocabulary          cut
#          whole     norms, learned positions, routers, latents of MLA        on every rank
#     pp   layers as evenly as possible, the first stages one more; what stands before the layers on
#          the first stage, what follows them on the last
#
# The parts belong to the first rank along ``tp``, as a DTensor's: the larger one where a size does
# not divide. A tied embedding is planned as two where there are several stages: one on the first,
# one, the output layer, on the last. Nothing here knows a rank of the data parallel axes.

_COLUMNS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_b_proj", "kv_b_proj", "gate_proj",
            "up_proj", "gate_up_proj", "qkv", "up", "query_key_value", "dense_h_to_4h")  # fmt: skip
_ROWS = ("o_proj", "down_proj", "out", "down", "dense", "dense_4h_to_h")
_WHOLE = ("wpe", "position", "gate", "router", "shared_expert_gate", "q_a_proj",
          "kv_a_proj_with_mqa", "norm_1", "norm_2")  # fmt: skip
# name of a layer -> the dimension of its weight that is cut; Conv1D's weights are [in, out]
_CUT = dict.fromkeys((*_COLUMNS, "c_proj"), -2) | dict.fromkeys((*_ROWS, "c_attn", "c_fc"), -1)
_CUT |= dict.fromkeys(VOCABULARY, -2)
_BIAS_IS_CUT = {*_COLUMNS, *VOCABULARY, "c_attn", "c_fc"}
_NUMBERED = re.compile(r"(?:(.*)\.)?\d+")
_HEAD = "lm_head.weight"


def cut_tensors(model: ModelShape, ranks: int) -> ModelShape:
    """Return the part of `model` that the first of `ranks` ranks along ``tp`` has.

    Raises ConfigError for a matrix that no rule cuts.
    """
    if ranks == 1:
        return model

    units = []
    for unit in model.units:
        groups = (
            replace(
                group, shapes=tuple((name, _part(name, of, ranks)) for name, of in group.shapes)
            )
            for group in unit.groups
        )
        units.append(replace(unit, groups=tuple(groups)))
    inner = model.decoder
    if inner is not None:
        inner = replace(
            inner,
            heads=-(-inner.heads // ranks),
            kv_heads=-(-inner.kv_heads // ranks),
            ffn=-(-inner.ffn // ranks),
            vocab=-(-inner.vocab // ranks),
        )
    return _scaled(model, _packed(units), inner)


def _part(name: str, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return the shape of the first rank's part of one parameter."""
    words = name.split(".")
    is_bias = words[-1] == "bias"
    owner = next((word for word in reversed(words) if word in _CUT or word in _WHOLE), "")
    if is_bias or len(shape) == 1:
        dim = 0 if (owner in _BIAS_IS_CUT if is_bias else owner == "embedding") else None
    elif owner in _CUT:
        dim = _CUT[owner]
        if words[-3:-1] == ["feed_forward", "experts"]:  # llama4's are [in, out]
            dim = -3 - dim
    elif owner in _WHOLE:
        dim = None
    else:
        raise ConfigError(
            f"tp={ranks}: no rule says how parameter {name!r} of shape {list(shape)} is cut: plan"
            " a config.json, or --params"
        )
    if dim is None:
        return shape
    cut = list(shape)
    cut[dim] = -(-cut[dim] // ranks)
    return tuple(cut)


def cut_stages(model: ModelShape, stages: int) -> list[ModelShape]:
    """Return the models of `stages` stages, in order; of those that are alike, the first.

    Raises ConfigError where there are fewer layers than stages.
    """
    layers = layer_numbers(model)
    if len(layers) < stages:
        raise ConfigError(
            f"{stages} stages of a pipeline need as many layers: {model.name} has {len(layers)}"
        )
    units = list(model.units)
    first, ties = units[0], 0 not in layers and (units[0].uses > 1 or is_assumed(model))
    if stages > 1 and ties:  # the embedding is the output layer: it gets one of its own
        head = replace(first.groups[0], shapes=((_HEAD, first.groups[0].shapes[0][1]),))
        units = [replace(first, uses=1), *units[1:], UnitShape(_HEAD, (head,))]
    # tables before the layers are looked up in, not multiplied by, where an output layer follows
    follows = units[layers[-1] + 1 :] if layers else []
    if any(_tables(group) for unit in follows for group in unit.groups):
        for number in range(layers[0]):
            groups = (replace(one, looked_up=_tables(one)) for one in units[number].groups)
            units[number] = replace(units[number], groups=tuple(groups))
    least, more = divmod(len(layers), stages)
    counts = [least + (stage < more) for stage in range(stages)]
    ends = [layers[sum(counts[: stage + 1]) - 1] + 1 for stage in range(stages - 1)]
    starts = [0, *ends, len(units)]
    made: dict[tuple[bool, bool, int], ModelShape] = {}  # those between the ends are alike
    out = []
    for stage, count in enumerate(counts):
        kind = (stage == 0, stage == stages - 1, count)
        if kind not in made:
            part = units[starts[stage] : starts[stage + 1]]
            decoder = model.decoder
            if decoder is not None:  # logits come on the last stage
                decoder = replace(decoder, layers=count, vocab=decoder.vocab if kind[1] else 0)
            made[kind] = _scaled(model, tuple(part) if stages == 1 else _packed(part), decoder)
        out.append(made[kind])
    return out


def layer_numbers(model: ModelShape) -> list[int]:
    """Return the numbers of the units that are layers: the longest stack."""
    stacks: dict[str, list[int]] = {}
    for number, unit in enumerate(model.units):
        found = _NUMBERED.fullmatch(unit.name)
        if found is not None:
            stacks.setdefault(found[1] or "", []).append(number)
    return max(stacks.values(), key=len, default=[])


def is_assumed(model: ModelShape) -> bool:
    """Whether `describe` made the model: its embedding is its output layer."""
    return model.units[0].name == "embedding"


def _tables(group: GroupShape) -> int:
    """Return the elements of a group's matrices over the vocabulary, or over positions."""
    return sum(
        math.prod(shape)
        for name, shape in group.shapes
        if any(word in TABLES for word in name.split(".")) and not name.endswith("bias")
    )


def _packed(units: Sequence[UnitShape]) -> tuple[UnitShape, ...]:
    """Return `units` as the runtime would cut them in a model of their own; as they are, where
    their parameters are of several kinds.
    """
    kinds = {(group.dtype, group.trained) for unit in units for group in unit.groups}
    if len(kinds) != 1 or any(len(unit.groups) > 1 for unit in units):
        return tuple(units)
    blocks = [unit.name for unit in units if _NUMBERED.fullmatch(unit.name)]
    before = [group for unit in units for group in unit.groups]
    looked_up = {name for one in before if one.looked_up for name, _ in one.shapes}
    uses = {unit.groups[0].shapes[0][0]: unit.uses for unit in units}
    ((dtype, trained),) = kinds
    out = []
    for unit in pack_units([shape for one in before for shape in one.shapes], blocks):
        groups = []
        for group in unit.groups:
            is_looked_up = any(name in looked_up for name, _ in group.shapes)
            found = _tables(group) if is_looked_up else 0
            groups.append(replace(group, dtype=dtype, trained=trained, looked_up=found))
        first = unit.groups[0].shapes[0][0]
        out.append(UnitShape(unit.name, tuple(groups), uses.get(first, 1)))
    return tuple(out)


def _scaled(model: ModelShape, units: tuple[UnitShape, ...], decoder: Decoder | None) -> ModelShape:
    """Return a part of `model`; a token uses as large a share of it as of the whole."""
    part = replace(model, units=units, decoder=decoder, used_numel=None, trace=None)
    if model.used_numel is None:
        return part
    return replace(part, used_numel=round(part.numel * model.used_numel / model.numel))
