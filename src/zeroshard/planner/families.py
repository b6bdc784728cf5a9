"""A model from files: a Transformers ``config.json``, safetensors (headers only), or a directory of
them.

    llama       an attention, an MLP or experts, and RMS norms a layer
    gpt2        fused qkv, biases, learned positions
    gpt_neox    fused qkv, biases, an output layer of its own

The parameters of these families are known in closed form, by name, shape and definition order;
tests/features/test_plan.py compares each with the model that Transformers builds. Other families
are built from Transformers' class where that is installed (modules.py), and refused with
the list elsewhere: nothing is guessed.

A config.json says more than safetensors, and is preferred where its family is known. Safetensors
hold names and shapes in an order of their own, not in the model's: bytes at rest and on the wire
equal the model's, but for how the pieces of the parameters fall to ranks. Blocks are repeated where
their names differ in a number and their shapes are the same. Buffers that were saved count as
parameters.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from zeroshard.errors import ConfigError
from zeroshard.planner.model import Decoder, ModelShape, Shape, pack_units
from zeroshard.system.safe_files import (
    NotReadable,
    from_json,
    has_transformers,
    open_file,
    read_file,
)

# -------------------------------------------------------------------------- fields of a config.json

# what newer versions of Transformers call a field
_NEWER = {"num_experts": "num_local_experts"}


class ConfigFields:
    """The fields of a config.json; a missing or wrong one is a ConfigError that names it."""

    def __init__(
        self, fields: Mapping[str, Any], where: str, defaults: Mapping[str, int] | None = None
    ) -> None:
        """`where` is said in errors; `defaults` come from the family's class."""
        self._fields = fields
        self._where = where
        self._defaults = {} if defaults is None else defaults

    def number(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """Return a whole number of `least` or more; the family's default goes before `default`."""
        value = self._fields.get(name)
        value = self._fields.get(_NEWER.get(name, name)) if value is None else value
        value = self._defaults.get(name, default) if value is None else value
        if type(value) is not int or value < least:
            kind = "positive whole number" if least else "whole number"
            raise ConfigError(f"{self._where}: {name}={value!r} is not a {kind}")
        return value

    def maybe(self, name: str) -> int | None:
        """Return a positive whole number, or None where the file says null; without the field the
        family's default.
        """
        if name in self._fields and self._fields[name] is None:
            return None
        return self.number(name)

    def flag(self, name: str, default: bool) -> bool:
        """Return a truth value."""
        value = self._fields.get(name)
        return default if value is None else bool(value)

    def text(self, name: str) -> str:
        """Return a word, empty where there is none."""
        return str(self._fields.get(name) or "")

    def numbers(self, name: str) -> list[int] | None:
        """Return a list of whole numbers, None where there is none."""
        value = self._fields.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(one) is not int for one in value):
            raise ConfigError(f"{self._where}: {name}={value!r} is not a list of whole numbers")
        return value


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


def positions_of(fields: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a sequence, where the `fields` of a config.json say it."""
    given = (fields.get(name) for name in ("n_positions", "max_position_embeddings"))
    return next((one for one in given if type(one) is int and one > 0), None)


# -------------------------------------------------------------------------------------------- llama
#     attention   q, k, v, o; of phi3 fused; of deepseek_v2 and _v3 through latents (MLA)
#     mlp         gate, up, down; of phi3 gate and up fused
#     experts     two 3-d tensors and a router, of some families beside an MLP of every token
#
# A row of ``LLAMA_FAMILIES`` says which layers have experts, what is normed and tied, and what a
# file may leave out.

_Shapes = Callable[[ConfigFields], list[Shape]]


@dataclass(frozen=True)
class _ExpertLayers:
    """The experts of a layer."""

    shapes: _Shapes
    layers: Callable[[ConfigFields, int], Collection[int]]  # those that have them, of so many
    inner: Callable[[ConfigFields], int]  # of all that one token uses
    there: str  # the field that counts them
    chosen: str = "num_experts_per_tok"
    few: int = 2  # chosen by default


@dataclass(frozen=True)
class LlamaFamily:
    """The differences of a family from llama."""

    attention: _Shapes = field(default=lambda read: _attention(read))
    mlp: _Shapes = field(default=lambda read: _gated(read, "mlp", read.number("intermediate_size")))
    dense_inner: str = "intermediate_size"  # the field with the inner size of the MLP
    experts: _ExpertLayers | None = None
    norms: tuple[str, ...] = ("input", "post_attention")
    is_tied: bool = False
    defaults: Mapping[str, int] = field(default_factory=dict)
    # q and v of a head are of other sizes: of deepseek
    head_dim: Callable[[ConfigFields], int] = field(default=lambda read: _head_dim(read))

    def used(self, read: ConfigFields) -> tuple[int, int] | None:
        """Return how many experts a token uses, of how many; None where there are none."""
        if self.experts is None:
            return None
        there = read.number(self.experts.there)
        return min(read.number(self.experts.chosen, self.experts.few), there), there


def llama_decoder(
    read: ConfigFields, family: LlamaFamily
) -> tuple[list[Shape], list[str], Decoder]:
    """Return the parameters, the names of the layers, and the sizes of the decoder. Its inner size
    is the layers' mean.
    """
    hidden, vocab = read.number("hidden_size"), read.number("vocab_size")
    num_layers = read.number("num_hidden_layers")
    names = [f"model.layers.{index}" for index in range(num_layers)]
    sparse = family.experts.layers(read, num_layers) if family.experts is not None else ()
    norms: list[Shape] = [(f"{name}_layernorm.weight", (hidden,)) for name in family.norms]
    attention = family.attention(read)
    dense = [] if len(sparse) == num_layers else family.mlp(read)
    experts = family.experts.shapes(read) if family.experts is not None and sparse else []

    parameters: list[Shape] = [("model.embed_tokens.weight", (vocab, hidden))]
    for index, name in enumerate(names):
        block = [*attention, *(experts if index in sparse else dense), *norms]
        parameters += [(f"{name}.{part}", shape) for part, shape in block]
    parameters.append(("model.norm.weight", (hidden,)))
    if not read.flag("tie_word_embeddings", family.is_tied):
        parameters.append((_HEAD, (vocab, hidden)))

    inner = 0 if not dense else read.number(family.dense_inner) * (num_layers - len(sparse))
    if family.experts is not None and sparse:
        inner += family.experts.inner(read) * len(sparse)
    heads = read.number("num_attention_heads")
    kv_heads = read.number("num_key_value_heads", heads)
    head_dim = family.head_dim(read)
    return parameters, names, Decoder(
        hidden, num_layers, heads, kv_heads, head_dim, inner // num_layers, True, vocab
    )  # fmt: skip


# ------------------------------------------------------------------ attention


def _head_dim(read: ConfigFields) -> int:
    return read.number(
        "head_dim", max(1, read.number("hidden_size") // read.number("num_attention_heads"))
    )


def _attention(
    read: ConfigFields, biased: str = "attention_bias", *, is_biased: bool = False
) -> list[Shape]:
    """Return q, k, v and o, with biases where the field `biased` says so (by default:
    `is_biased`); o has one by `attention_bias` alone.
    """
    hidden, heads = read.number("hidden_size"), read.number("num_attention_heads")
    head_dim = _head_dim(read)
    q, kv = heads * head_dim, read.number("num_key_value_heads", heads) * head_dim
    out: list[Shape] = []
    for name, rows, columns in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden),
                                ("o", hidden, q)):  # fmt: skip
        has_bias = read.flag(biased, is_biased) and (name != "o" or biased == "attention_bias")
        out += _linear(f"self_attn.{name}_proj", rows, columns, has_bias)
    return out


def _qwen2_attention(read: ConfigFields) -> list[Shape]:
    return _attention(read, "qkv_bias", is_biased=True)


def _normed_attention(read: ConfigFields) -> list[Shape]:
    norms = [(f"self_attn.{name}_norm.weight", (_head_dim(read),)) for name in ("q", "k")]
    return [*_attention(read), *norms]


def _fused_attention(read: ConfigFields) -> list[Shape]:
    hidden, heads, head_dim = (
        read.number("hidden_size"), read.number("num_attention_heads"), _head_dim(read),
    )  # fmt: skip
    kv_heads = read.number("num_key_value_heads", heads)
    return [
        ("self_attn.o_proj.weight", (hidden, heads * head_dim)),
        ("self_attn.qkv_proj.weight", ((heads + 2 * kv_heads) * head_dim, hidden)),
    ]


def _latent_dim(read: ConfigFields) -> int:
    return read.number("qk_nope_head_dim") + read.number("qk_rope_head_dim")


def _latent_attention(read: ConfigFields) -> list[Shape]:
    """Return MLA's: q, and keys and values together, each through a latent of its own."""
    hidden, heads = read.number("hidden_size"), read.number("num_attention_heads")
    nope, rope, value = (
        read.number(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    rank, kv_rank = read.maybe("q_lora_rank"), read.number("kv_lora_rank")
    biased = read.flag("attention_bias", False)
    if rank is None:
        out = _linear("q_proj", heads * (nope + rope), hidden, False)
    else:
        out = _linear("q_a_proj", rank, hidden, biased)
        out.append(("q_a_layernorm.weight", (rank,)))
        out += _linear("q_b_proj", heads * (nope + rope), rank, False)
    out += _linear("kv_a_proj_with_mqa", kv_rank + rope, hidden, biased)
    out.append(("kv_a_layernorm.weight", (kv_rank,)))
    out += _linear("kv_b_proj", heads * (nope + value), kv_rank, False)
    out += _linear("o_proj", hidden, heads * value, biased)
    return [(f"self_attn.{name}", shape) for name, shape in out]


# ------------------------------------------------------------------ MLPs and experts


def _gated(read: ConfigFields, name: str, inner: int) -> list[Shape]:
    hidden, biased = read.number("hidden_size"), read.flag("mlp_bias", False)
    out: list[Shape] = []
    for part, rows, columns in (("gate", inner, hidden), ("up", inner, hidden),
                                ("down", hidden, inner)):  # fmt: skip
        out += _linear(f"{name}.{part}_proj", rows, columns, biased)
    return out


def _fused_gated(read: ConfigFields) -> list[Shape]:
    hidden, inner = read.number("hidden_size"), read.number("intermediate_size")
    return [
        ("mlp.gate_up_proj.weight", (2 * inner, hidden)),
        ("mlp.down_proj.weight", (hidden, inner)),
    ]


def _bank(read: ConfigFields, count: str, inner: str) -> list[Shape]:
    """Return the two tensors of all experts, of `count` and `inner` size."""
    hidden, there, size = read.number("hidden_size"), read.number(count), read.number(inner)
    return [
        ("mlp.experts.gate_up_proj", (there, 2 * size, hidden)),
        ("mlp.experts.down_proj", (there, hidden, size)),
    ]


def _router(read: ConfigFields, count: str) -> Shape:
    return "mlp.gate.weight", (read.number(count), read.number("hidden_size"))


def _mixtral_experts(read: ConfigFields) -> list[Shape]:
    count = "num_local_experts"
    return [_router(read, count), *_bank(read, count, "intermediate_size")]


def _qwen2_experts(read: ConfigFields) -> list[Shape]:
    hidden, shared = read.number("hidden_size"), read.number("shared_expert_intermediate_size")
    return [
        _router(read, "num_experts"),
        *_bank(read, "num_experts", "moe_intermediate_size"),
        *_gated(read, "mlp.shared_expert", shared),
        ("mlp.shared_expert_gate.weight", (1, hidden)),
    ]


def _qwen3_experts(read: ConfigFields) -> list[Shape]:
    return [*_bank(read, "num_experts", "moe_intermediate_size"), _router(read, "num_experts")]


def _deepseek_experts(read: ConfigFields) -> list[Shape]:
    count = "n_routed_experts"
    shared = read.number("moe_intermediate_size") * read.number("n_shared_experts")
    bank = [*_bank(read, count, "moe_intermediate_size"), _router(read, count)]
    return [*bank, *_gated(read, "mlp.shared_experts", shared)]


def _llama4_experts(read: ConfigFields) -> list[Shape]:
    hidden, inner = read.number("hidden_size"), read.number("intermediate_size")
    there, name = read.number("num_local_experts"), "feed_forward"
    return [
        (f"{name}.experts.gate_up_proj", (there, hidden, 2 * inner)),
        (f"{name}.experts.down_proj", (there, inner, hidden)),
        (f"{name}.router.weight", (there, hidden)),
        *_gated(read, f"{name}.shared_expert", inner),
    ]


def _every(read: ConfigFields, num_layers: int) -> Collection[int]:
    return range(num_layers)


def _qwen_layers(read: ConfigFields, num_layers: int) -> Collection[int]:
    step, dense = read.number("decoder_sparse_step", 1), read.numbers("mlp_only_layers") or []
    return {index for index in range(step - 1, num_layers, step) if index not in dense}


def _deepseek_layers(read: ConfigFields, num_layers: int) -> Collection[int]:
    return range(min(num_layers, read.number("first_k_dense_replace", least=0)), num_layers)


def _llama4_layers(read: ConfigFields, num_layers: int) -> Collection[int]:
    named, step = read.numbers("moe_layers"), read.number("interleave_moe_layer_step", 1)
    return set(range(step - 1, num_layers, step) if named is None else named)


def _chosen(read: ConfigFields, inner: str, few: int | None = None) -> int:
    return read.number("num_experts_per_tok", few) * read.number(inner)


# ------------------------------------------------------------------ llama and the families like it

_QWEN2_MOE = _ExpertLayers(
    _qwen2_experts, _qwen_layers,
    lambda read: _chosen(read, "moe_intermediate_size")
    + read.number("shared_expert_intermediate_size"),
    "num_experts",
)  # fmt: skip
_QWEN3_MOE = _ExpertLayers(
    _qwen3_experts, _qwen_layers, lambda read: _chosen(read, "moe_intermediate_size"),
    "num_experts",
)  # fmt: skip
_DEEPSEEK = _ExpertLayers(
    _deepseek_experts, _deepseek_layers,
    lambda read: read.number("moe_intermediate_size")
    * (read.number("num_experts_per_tok", 2) + read.number("n_shared_experts")),
    "n_routed_experts",
)  # fmt: skip
_LLAMA4 = _ExpertLayers(
    _llama4_experts, _llama4_layers,
    lambda read: _chosen(read, "intermediate_size") + read.number("intermediate_size"),
    "num_local_experts",
)  # fmt: skip
_MIXTRAL = _ExpertLayers(
    _mixtral_experts, _every, lambda read: _chosen(read, "intermediate_size", 2),
    "num_local_experts",
)  # fmt: skip

_LATENTS = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}  # fmt: skip
_SANDWICH = ("input", "post_attention", "pre_feedforward", "post_feedforward")

LLAMA_FAMILIES: dict[str, LlamaFamily] = {
    "llama": LlamaFamily(),
    "mistral": LlamaFamily(),
    "qwen2": LlamaFamily(_qwen2_attention),
    "qwen3": LlamaFamily(_normed_attention),
    "phi3": LlamaFamily(_fused_attention, _fused_gated),
    "gemma": LlamaFamily(is_tied=True),
    "gemma2": LlamaFamily(norms=_SANDWICH, is_tied=True, defaults={
        "vocab_size": 256_000, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256,
    }),
    "gemma3_text": LlamaFamily(_normed_attention, norms=_SANDWICH, is_tied=True, defaults={
        "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256,
    }),
    "mixtral": LlamaFamily(experts=_MIXTRAL, defaults={"num_local_experts": 8}),
    "qwen2_moe": LlamaFamily(_qwen2_attention, experts=_QWEN2_MOE, defaults={
        "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    }),
    "qwen3_moe": LlamaFamily(_normed_attention, experts=_QWEN3_MOE, defaults={
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    }),
    "deepseek_v2": LlamaFamily(
        _latent_attention, experts=_DEEPSEEK, head_dim=_latent_dim, defaults=_LATENTS | {
            "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0,
        }),
    "deepseek_v3": LlamaFamily(
        _latent_attention, experts=_DEEPSEEK, head_dim=_latent_dim, defaults=_LATENTS | {
            "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3, "num_experts_per_tok": 8,
        }),
    "llama4_text": LlamaFamily(
        mlp=lambda read: _gated(read, "feed_forward", read.number("intermediate_size_mlp")),
        dense_inner="intermediate_size_mlp", experts=_LLAMA4, defaults={
            "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192,
            "intermediate_size_mlp": 16_384, "num_hidden_layers": 48, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "num_local_experts": 16,
            "num_experts_per_tok": 1,
        }),
}  # fmt: skip
"""By ``model_type``."""


# ------------------------------------------------------------------------------------- all families

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
    # As in shard(), a layer is a block where another one has its form, or where there is no other.
    words = layers[0].count(".") + 1
    forms: dict[str, list[Shape]] = {path: [] for path in layers}
    for path, shape in parameters:
        parts = path.split(".")
        layer = ".".join(parts[:words])
        if layer in forms:
            forms[layer].append((".".join(parts[words:]), shape))
    counts = Counter(map(tuple, forms.values()))
    blocks = [path for path in layers if counts[tuple(forms[path])] > 1 or len(layers) == 1]
    units = pack_units(parameters, blocks)
    if not any(name == _HEAD for name, _ in parameters):  # the first unit's embedding is the head
        units = (replace(units[0], uses=2), *units[1:])
    return ModelShape(name, units, decoder, used, positions=positions_of(fields))


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


# -------------------------------------------------------------------------------------------- files

_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_HEADER_BYTES = 100 << 20  # the format's own limit
_BLOCK = re.compile(r"(.*?\.)(\d+)\.")


def config_of(path: Path) -> Path | None:
    """Return the config.json that `path` is or has; None where it holds safetensors alone."""
    if path.suffix == ".safetensors":
        return None
    config = path / "config.json" if path.is_dir() else path
    return config if config.is_file() or not _tensors_of(path) else None


def is_foreign(path: Path) -> bool:
    """Whether `path` has a config.json of a family that is not known in closed form, and
    Transformers is there, which may know it. Raises ConfigError.
    """
    config = config_of(path)
    return config is not None and not is_known(read_config(config)) and has_transformers()


def _tensors_of(path: Path) -> list[Path]:
    if path.suffix == ".safetensors":
        return [path]
    return sorted(path.glob("*.safetensors")) if path.is_dir() else []


def read_model(path: Path) -> ModelShape:
    """Return the model that the file or the directory `path` describes.

    Raises ConfigError where it describes none, or only one of an unknown family.
    """
    config, tensors = config_of(path), _tensors_of(path)
    if config is not None:
        fields = read_config(config)
        if is_known(fields) or not tensors:
            return shape_of_config(fields, str(config))
    parameters = [shape for file in tensors for shape in _read_header(file)]
    if not parameters:
        raise ConfigError(f"model {str(path)!r} holds no floating-point tensor")
    # the repeated blocks: layers.0, layers.1
    members: dict[tuple[str, str], set[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in parameters:
        found = _BLOCK.match(name)
        if found is not None:
            members.setdefault((found[1], found[2]), set()).add((name[found.end() :], shape))
    alike: dict[object, list[str]] = {}
    for (stack, number), block in members.items():
        alike.setdefault((stack, frozenset(block)), []).append(f"{stack}{number}")
    blocks = [name for names in alike.values() if len(names) > 1 for name in names]
    return ModelShape(path.stem, pack_units(parameters, blocks), tokenwise=False)


def _read_header(file: Path) -> list[Shape]:
    """Return the names and shapes of the tensors of one file, in the order of their bytes."""
    try:
        with open_file(file) as stream:
            length = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(min(length, _HEADER_BYTES)))
        entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
        entries.sort(key=lambda named: named[1]["data_offsets"][0])
        return [_shape(name, entry) for name, entry in entries if entry["dtype"] in _FLOATS]
    except NotReadable as error:
        raise ConfigError(f"model {str(file)!r} cannot be read: {error}") from None
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise ConfigError(f"model {str(file)!r} is not a safetensors file") from None


def _shape(name: str, entry: Any) -> Shape:
    sizes = tuple(entry["shape"])
    if not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(name)
    return name, sizes
