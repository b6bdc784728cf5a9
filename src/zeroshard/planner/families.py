"""A Transformers ``config.json`` as a model: the parameters of the common decoder families in
closed form, by name, shape and definition order.

    llama, mistral, qwen2, qwen3, gemma    q, k, v, o; gate, up, down; two RMS norms a layer
    mixtral                                the same with experts in two 3-d tensors
    gpt2                                   fused qkv, biases, learned positions
    gpt_neox                               fused qkv, biases, an output layer of its own

tests/features/test_plan.py compares each with the model that Transformers builds. What it does not
do: guess. A family that is not here is refused with the list.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from zeroshard.errors import ConfigError
from zeroshard.planner.model import Decoder, ModelShape, Shape, pack_units
from zeroshard.system.safe_files import NotReadable, from_json, read_file

__all__ = ["is_known", "positions_of", "read_config", "shape_of_config"]

_HEAD = "lm_head.weight"
# the model's parameters, the names of its layers, its decoder
_Family = Callable[["_Fields"], tuple[list[Shape], list[str], Decoder]]


class _Fields:
    """The fields of a config.json; a missing or wrong one is a ConfigError that names it."""

    def __init__(self, fields: dict[str, Any], where: str) -> None:
        self._fields = fields
        self._where = where

    def number(self, name: str, default: int | None = None) -> int:
        """Return a positive whole number."""
        value = self._fields.get(name)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ConfigError(f"{self._where}: {name}={value!r} is not a positive whole number")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a truth value."""
        value = self._fields.get(name)
        return default if value is None else bool(value)

    def text(self, name: str) -> str:
        """Return a word, empty where there is none."""
        return str(self._fields.get(name) or "")


def read_config(file: Path) -> dict[str, Any]:
    """Return the fields of a Transformers config.json. Raises ConfigError if it is none."""
    try:
        data = read_file(file)
    except NotReadable as error:
        raise ConfigError(f"model {str(file)!r} cannot be read: {error}") from None
    try:
        fields = from_json(data)
    except NotReadable as error:
        raise ConfigError(
            f"model {str(file)!r} is not a Transformers config.json: {error}"
        ) from None
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ConfigError(
            f"model {str(file)!r} is not a Transformers config.json: it names no model_type"
        )
    return fields


def is_known(fields: dict[str, Any]) -> bool:
    """Whether the family that the `fields` of a config.json name is one of these."""
    return fields.get("model_type") in _FAMILIES


def shape_of_config(fields: dict[str, Any], where: str) -> ModelShape:
    """Return the model that the `fields` of a config.json describe; `where` is said in errors."""
    family = str(fields.get("model_type"))
    if family not in _FAMILIES:
        raise ConfigError(
            f"{where}: model_type={family!r} is not one of {', '.join(_FAMILIES)}: give --params,"
            " or --model package.module:factory"
        )
    read = _Fields(fields, where)
    parameters, layers, decoder = _FAMILIES[family](read)
    numel = sum(math.prod(shape) for _, shape in parameters)
    used = None
    if family == "mixtral":
        num_experts, chosen = read.number("num_local_experts", 8), _chosen(read)
        experts = sum(math.prod(shape) for name, shape in parameters if ".experts." in name)
        used = numel - experts + experts * chosen // num_experts
    units = pack_units(parameters, layers)
    if not any(name == _HEAD for name, _ in parameters):  # the first unit's embedding is the head
        units = (replace(units[0], uses=2), *units[1:])
    return ModelShape(family, units, decoder, used, positions=positions_of(fields))


def positions_of(fields: dict[str, Any]) -> int | None:
    """Return the most tokens of a sequence, where the `fields` of a config.json say it."""
    given = (fields.get(name) for name in ("n_positions", "max_position_embeddings"))
    return next((one for one in given if type(one) is int and one > 0), None)


def _chosen(read: _Fields) -> int:
    """Return how many experts a token uses."""
    chosen, there = read.number("num_experts_per_tok", 2), read.number("num_local_experts", 8)
    return min(chosen, there)


def _llama(read: _Fields) -> tuple[list[Shape], list[str], Decoder]:
    family = read.text("model_type")
    hidden, ffn = read.number("hidden_size"), read.number("intermediate_size")
    heads = read.number("num_attention_heads")
    kv_heads = read.number("num_key_value_heads", heads)
    head_dim = read.number("head_dim", max(1, hidden // heads))
    vocab, num_layers = read.number("vocab_size"), read.number("num_hidden_layers")
    names = [f"model.layers.{index}" for index in range(num_layers)]
    q, kv = heads * head_dim, kv_heads * head_dim

    biased = read.flag("attention_bias", False)
    block: list[Shape] = []
    for name, rows, columns in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden),
                                ("o", hidden, q)):  # fmt: skip
        block.append((f"self_attn.{name}_proj.weight", (rows, columns)))
        if biased or (family == "qwen2" and name != "o"):
            block.append((f"self_attn.{name}_proj.bias", (rows,)))
    if family == "qwen3":
        block += [(f"self_attn.{name}_norm.weight", (head_dim,)) for name in ("q", "k")]
    block += _experts(read, hidden, ffn) if family == "mixtral" else _gated(read, hidden, ffn)
    block += [(f"{name}_layernorm.weight", (hidden,)) for name in ("input", "post_attention")]

    parameters: list[Shape] = [("model.embed_tokens.weight", (vocab, hidden))]
    parameters += _stack(names, block)
    parameters.append(("model.norm.weight", (hidden,)))
    parameters += _head(read, vocab, hidden, tied=family == "gemma")
    inner = ffn * _chosen(read) if family == "mixtral" else ffn
    decoder = Decoder(hidden, num_layers, heads, kv_heads, head_dim, inner, True, vocab)
    return parameters, names, decoder


def _gated(read: _Fields, hidden: int, ffn: int) -> list[Shape]:
    block: list[Shape] = []
    for name, rows, columns in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
        block.append((f"mlp.{name}_proj.weight", (rows, columns)))
        if read.flag("mlp_bias", False):
            block.append((f"mlp.{name}_proj.bias", (rows,)))
    return block


def _experts(read: _Fields, hidden: int, ffn: int) -> list[Shape]:
    count = read.number("num_local_experts", 8)
    return [
        ("mlp.gate.weight", (count, hidden)),
        ("mlp.experts.gate_up_proj", (count, 2 * ffn, hidden)),
        ("mlp.experts.down_proj", (count, hidden, ffn)),
    ]


def _gpt2(read: _Fields) -> tuple[list[Shape], list[str], Decoder]:
    hidden, num_layers = read.number("n_embd"), read.number("n_layer")
    ffn, vocab = read.number("n_inner", 4 * hidden), read.number("vocab_size")
    names = [f"transformer.h.{index}" for index in range(num_layers)]
    block = _with_biases(
        ("ln_1", (hidden,)),
        ("attn.c_attn", (hidden, 3 * hidden)),
        ("attn.c_proj", (hidden, hidden)),
        ("ln_2", (hidden,)),
        ("mlp.c_fc", (hidden, ffn)),
        ("mlp.c_proj", (ffn, hidden)),
    )
    parameters: list[Shape] = [
        ("transformer.wte.weight", (vocab, hidden)),
        ("transformer.wpe.weight", (read.number("n_positions", 1024), hidden)),
    ]
    parameters += _stack(names, block)
    parameters += _with_biases(("transformer.ln_f", (hidden,)))
    parameters += _head(read, vocab, hidden, tied=True)
    heads = read.number("n_head")
    dim = max(1, hidden // heads)
    return parameters, names, Decoder(hidden, num_layers, heads, heads, dim, ffn, False, vocab)


def _gpt_neox(read: _Fields) -> tuple[list[Shape], list[str], Decoder]:
    hidden, num_layers = read.number("hidden_size"), read.number("num_hidden_layers")
    ffn, vocab = read.number("intermediate_size"), read.number("vocab_size")
    names = [f"gpt_neox.layers.{index}" for index in range(num_layers)]
    biased = read.flag("attention_bias", True)
    parts = [
        *_with_biases(("input_layernorm", (hidden,)), ("post_attention_layernorm", (hidden,))),
        *_linear("attention.query_key_value", 3 * hidden, hidden, biased),
        *_linear("attention.dense", hidden, hidden, biased),
        *_linear("mlp.dense_h_to_4h", ffn, hidden, True),
        *_linear("mlp.dense_4h_to_h", hidden, ffn, True),
    ]
    parameters: list[Shape] = [("gpt_neox.embed_in.weight", (vocab, hidden))]
    parameters += _stack(names, parts)
    parameters += _with_biases(("gpt_neox.final_layer_norm", (hidden,)))
    parameters += _head(read, vocab, hidden, tied=False)
    heads = read.number("num_attention_heads")
    dim = max(1, hidden // heads)
    return parameters, names, Decoder(hidden, num_layers, heads, heads, dim, ffn, False, vocab)


def _stack(names: list[str], block: list[Shape]) -> list[Shape]:
    """Return the parameters of equal blocks with these names."""
    return [(f"{name}.{part}", shape) for name in names for part, shape in block]


def _head(read: _Fields, vocab: int, hidden: int, *, tied: bool) -> list[Shape]:
    """Return the output layer, none where it is tied; `tied` is what the family does by default."""
    return [] if read.flag("tie_word_embeddings", tied) else [(_HEAD, (vocab, hidden))]


def _with_biases(*weights: Shape) -> list[Shape]:
    """Return each weight and its bias, as long as the last dimension (GPT-2's Conv1D)."""
    pairs = [[(f"{name}.weight", shape), (f"{name}.bias", shape[-1:])] for name, shape in weights]
    return [one for pair in pairs for one in pair]


def _linear(name: str, rows: int, columns: int, biased: bool) -> list[Shape]:
    bias: list[Shape] = [(f"{name}.bias", (rows,))] if biased else []
    return [(f"{name}.weight", (rows, columns)), *bias]


_FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "mixtral"), _llama),
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
