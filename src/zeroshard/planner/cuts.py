"""A model cut for other axes: the parameters of one rank along ``tp``, and of one stage along
``pp``.

    tp   columns   q, k, v, gate, up, the fused qkv, with their biases      cut
         rows      o, down; their biases are whole                          cut
         ends      embedding and output layer, over the vocabulary          cut
         whole     norms, learned positions, routers, latents of MLA        on every rank
    pp   layers as evenly as possible, the first stages one more; what stands before the layers on
         the first stage, what follows them on the last

The parts are those of the first rank along ``tp``, as a DTensor's: the larger one where a size does
not divide. A tied embedding is planned as two where there are several stages: one on the first,
one, the output layer, on the last.

Invariant: the parts of a stage, added up over tp, and the stages, added up, are the model (of two
embeddings). Nothing here knows a rank of the data parallel axes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from zeroshard.errors import ConfigError
from zeroshard.planner.model import Decoder, GroupShape, ModelShape, Shape, UnitShape, pack_units

_COLUMNS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "q_b_proj", "kv_b_proj", "gate_proj",
            "up_proj", "gate_up_proj", "qkv", "up", "query_key_value", "dense_h_to_4h")  # fmt: skip
_ROWS = ("o_proj", "down_proj", "out", "down", "dense", "dense_4h_to_h")
_VOCABULARY = ("embed_tokens", "embed", "wte", "embed_in", "embed_out", "embedding", "token",
               "lm_head", "head")  # fmt: skip
_WHOLE = ("wpe", "position", "gate", "router", "shared_expert_gate", "q_a_proj",
          "kv_a_proj_with_mqa", "norm_1", "norm_2")  # fmt: skip
# name of a layer -> the dimension of its weight that is cut; Conv1D's weights are [in, out]
_CUT = dict.fromkeys((*_COLUMNS, "c_proj"), -2) | dict.fromkeys((*_ROWS, "c_attn", "c_fc"), -1)
_CUT |= dict.fromkeys(_VOCABULARY, -2)
_BIAS_IS_CUT = {*_COLUMNS, *_VOCABULARY, "c_attn", "c_fc"}
_NUMBERED = re.compile(r"(?:(.*)\.)?\d+")
_HEAD = "lm_head.weight"


def cut_tensors(model: ModelShape, ranks: int) -> ModelShape:
    """Return the part of `model` that the first of `ranks` ranks along ``tp`` has.

    Raises ConfigError for a matrix of which no rule says how it is cut.
    """
    if ranks == 1:
        return model

    def part(group: GroupShape) -> GroupShape:
        shapes = tuple((name, _part(name, shape, ranks)) for name, shape in group.shapes)
        return replace(group, shapes=shapes)

    units = [
        replace(unit, groups=tuple(part(group) for group in unit.groups)) for unit in model.units
    ]
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
    if stages > 1:
        units = _untied(model, layers)
    units = _with_lookups(units, layers)
    least, more = divmod(len(layers), stages)
    counts = [least + (stage < more) for stage in range(stages)]
    ends = [layers[sum(counts[: stage + 1]) - 1] + 1 for stage in range(stages - 1)]
    starts = [0, *ends, len(units)]
    first: dict[tuple[bool, bool, int], ModelShape] = {}  # those between the ends are alike
    out = []
    for stage, count in enumerate(counts):
        kind = (stage == 0, stage == stages - 1, count)
        if kind not in first:
            part = units[starts[stage] : starts[stage + 1]]
            first[kind] = _stage(model, part, count, is_last=kind[1], is_whole=stages == 1)
        out.append(first[kind])
    return out


def _stage(
    model: ModelShape, units: Sequence[UnitShape], layers: int, *, is_last: bool, is_whole: bool
) -> ModelShape:
    decoder = model.decoder
    if decoder is not None:  # logits come on the last stage
        decoder = replace(decoder, layers=layers, vocab=decoder.vocab if is_last else 0)
    return _scaled(model, tuple(units) if is_whole else _packed(units), decoder)


def layer_numbers(model: ModelShape) -> list[int]:
    """Return the numbers of the units that are layers: those of the longest stack."""
    stacks: dict[str, list[int]] = {}
    for number, unit in enumerate(model.units):
        found = _NUMBERED.fullmatch(unit.name)
        if found is not None:
            stacks.setdefault(found[1] or "", []).append(number)
    return max(stacks.values(), key=len, default=[])


def _untied(model: ModelShape, layers: Sequence[int]) -> list[UnitShape]:
    """Return the units with an output layer of their own, where the embedding is it."""
    units = list(model.units)
    first = units[0]
    if 0 in layers or (first.uses == 1 and not is_assumed(model)):
        return units
    group = first.groups[0]
    head = replace(group, shapes=((_HEAD, group.shapes[0][1]),))
    return [replace(first, uses=1), *units[1:], UnitShape(_HEAD, (head,))]


def is_assumed(model: ModelShape) -> bool:
    """Whether the model is that of `describe`, whose embedding is its output layer."""
    return model.units[0].name == "embedding"


def _with_lookups(units: list[UnitShape], layers: Sequence[int]) -> list[UnitShape]:
    """Return the units, in which tables before the layers are looked up in, not multiplied by,
    where an output layer follows the layers.
    """
    follows = units[layers[-1] + 1 :] if layers else []
    tables = [group for unit in follows for group in unit.groups if _tables(group)]
    if not tables or not layers:
        return units
    out = list(units)
    for number in range(layers[0]):
        groups = (replace(one, looked_up=_tables(one)) for one in units[number].groups)
        out[number] = replace(units[number], groups=tuple(groups))
    return out


def _tables(group: GroupShape) -> int:
    """Return the elements of a group's matrices over the vocabulary, or over positions."""
    kinds = (*_VOCABULARY, "wpe", "position")
    return sum(
        math.prod(shape)
        for name, shape in group.shapes
        if any(word in kinds for word in name.split(".")) and not name.endswith("bias")
    )


def _packed(units: Sequence[UnitShape]) -> tuple[UnitShape, ...]:
    """Return `units` as the runtime would cut them in a model of their own; as they are, where
    their parameters are of several kinds.
    """
    kinds = {(group.dtype, group.trained) for unit in units for group in unit.groups}
    if len(kinds) != 1 or any(len(unit.groups) > 1 for unit in units):
        return tuple(units)
    blocks = [unit.name for unit in units if _NUMBERED.fullmatch(unit.name)]
    again = pack_units([shape for unit in units for shape in _shapes(unit)], blocks)
    looked_up = {
        name for unit in units for group in unit.groups if group.looked_up
        for name, _ in group.shapes
    }  # fmt: skip
    uses = {unit.groups[0].shapes[0][0]: unit.uses for unit in units}
    ((dtype, trained),) = kinds
    return tuple(
        UnitShape(
            unit.name,
            tuple(_kept(group, dtype, trained, looked_up) for group in unit.groups),
            uses.get(unit.groups[0].shapes[0][0], 1),
        )
        for unit in again
    )


def _kept(group: GroupShape, dtype: str | None, trained: bool, looked_up: set[str]) -> GroupShape:
    """Return a group that was packed anew, of the kind that it was."""
    own = replace(group, dtype=dtype, trained=trained)
    is_looked_up = any(name in looked_up for name, _ in group.shapes)
    return replace(own, looked_up=_tables(own)) if is_looked_up else own


def _shapes(unit: UnitShape) -> Iterator[Shape]:
    for group in unit.groups:
        yield from group.shapes


def _scaled(model: ModelShape, units: tuple[UnitShape, ...], decoder: Decoder | None) -> ModelShape:
    """Return a part of `model`, of which a token uses as large a part as of the whole."""
    part = replace(model, units=units, decoder=decoder, used_numel=None, trace=None)
    if model.used_numel is None:
        return part
    return replace(part, used_numel=round(part.numel * model.used_numel / model.numel))
