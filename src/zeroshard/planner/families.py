"""A Transformers ``config.json`` as a model: the parameters of the common decoder families in
closed form, by name, shape and definition order.

    llama_families.py    llama and what has its form: attention, MLP or experts, RMS norms a layer
    gpt2                 fused qkv, biases, learned positions
    gpt_neox             fused qkv, biases, an output layer of its own

tests/features/test_plan.py compares each with the model that Transformers builds. What it does not
do: guess. A family that is not here is built from Transformers' class where that is installed
(modules/built.py), and refused with the list elsewhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from zeroshard.errors import ConfigError
from zeroshard.planner.config_fields import ConfigFields, positions_of
from zeroshard.planner.llama_families import LLAMA_FAMILIES, llama_decoder
from zeroshard.planner.model import Decoder, ModelShape, Shape, pack_units

_HEAD = "lm_head.weight"
# the model's parameters, the names of its layers, its decoder
_Family = Callable[[ConfigFields], tuple[list[Shape], list[str], Decoder]]


def is_known(fields: dict[str, Any]) -> bool:
    """Whether the family that the `fields` of a config.json name is one of these."""
    return fields.get("model_type") in FAMILIES


def shape_of_config(fields: dict[str, Any], where: str) -> ModelShape:
    """Return the model that the `fields` of a config.json describe; `where` is said in errors."""
    name = str(fields.get("model_type"))
    if name not in FAMILIES:
        raise ConfigError(
            f"{where}: model_type={name!r} is not one of {', '.join(FAMILIES)}, and others are"
            " built by Transformers 5.3 or newer: pip install '.[transformers]' in a checkout of"
            " zeroshard, give --params, or --model package.module:factory"
        )
    family = LLAMA_FAMILIES.get(name)
    read = ConfigFields(fields, where, None if family is None else family.defaults)
    parameters, layers, decoder = FAMILIES[name](read)
    numel = sum(math.prod(shape) for _, shape in parameters)
    used = None
    experts = sum(math.prod(shape) for part, shape in parameters if ".experts." in part)
    if family is not None and experts:
        chosen, there = family.used(read) or (1, 1)
        used = numel - experts + experts * chosen // there
    units = pack_units(parameters, _repeated(parameters, layers))
    if not any(name == _HEAD for name, _ in parameters):  # the first unit's embedding is the head
        units = (replace(units[0], uses=2), *units[1:])
    return ModelShape(name, units, decoder, used, positions=positions_of(fields))


def _repeated(parameters: list[Shape], layers: list[str]) -> list[str]:
    """Return those of `layers` of whose form there is another one: what shard() takes for a block.
    Of a model with one layer that one.
    """
    words = layers[0].count(".") + 1
    forms: dict[str, list[Shape]] = {name: [] for name in layers}
    for name, shape in parameters:
        parts = name.split(".")
        layer = ".".join(parts[:words])
        if layer in forms:
            forms[layer].append((".".join(parts[words:]), shape))
    counts = Counter(map(tuple, forms.values()))
    return [name for name in layers if counts[tuple(forms[name])] > 1 or len(layers) == 1]


def _gpt2(read: ConfigFields) -> tuple[list[Shape], list[str], Decoder]:
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


def _gpt_neox(read: ConfigFields) -> tuple[list[Shape], list[str], Decoder]:
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


def _head(read: ConfigFields, vocab: int, hidden: int, *, tied: bool) -> list[Shape]:
    """Return the output layer, none where it is tied; `tied` is what the family does by default."""
    return [] if read.flag("tie_word_embeddings", tied) else [(_HEAD, (vocab, hidden))]


def _with_biases(*weights: Shape) -> list[Shape]:
    """Return each weight and its bias, as long as the last dimension (GPT-2's Conv1D)."""
    pairs = [[(f"{name}.weight", shape), (f"{name}.bias", shape[-1:])] for name, shape in weights]
    return [one for pair in pairs for one in pair]


def _linear(name: str, rows: int, columns: int, biased: bool) -> list[Shape]:
    bias: list[Shape] = [(f"{name}.bias", (rows,))] if biased else []
    return [(f"{name}.weight", (rows, columns)), *bias]


FAMILIES: dict[str, _Family] = {
    **{name: partial(llama_decoder, family=one) for name, one in LLAMA_FAMILIES.items()},
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
"""By ``model_type``."""
