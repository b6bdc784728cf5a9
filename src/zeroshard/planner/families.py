"""A model from files: a Transformers ``config.json``, safetensors (headers only), or a directory of
them.

The parameters of the families in `FAMILIES` are known by name, shape and definition order, as
tables of text that one decoder reads: a plan then takes no torch and a fraction of a second.
tests/features/test_plan.py compares each with the model that Transformers builds. Other families
are built from Transformers' class where that is installed (modules.py), and refused with the list
elsewhere: nothing is guessed.

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

# ----------------------------------------------------------------------------------------- families
# A line of a table is one parameter: its name, its sizes, and words
#
#     bias          it has a bias (of its first size; of its last with bias-1: GPT-2's Conv1D)
#     FIELD         ... where the field says so, or, left out, the family's default
#     FIELD?        the line counts where the file does not say null for the field
#     FIELD!        ... where it does
#
# A size is a sum of products of numbers, fields and `_WORDS`; a/b is rounded down.

_WORDS = {
    "hidden": "hidden_size", "heads": "num_attention_heads", "ffn": "intermediate_size",
    "vocab": "vocab_size", "q": "heads*head_dim", "kv": "num_key_value_heads*head_dim",
    "q_mla": "qk_nope_head_dim+qk_rope_head_dim", "kv_mla": "qk_nope_head_dim+v_head_dim",
    "moe": "moe_intermediate_size", "chosen": "num_experts_per_tok",
    "shared": "n_shared_experts*moe",
}  # fmt: skip
# what a file may leave out, whatever the family
_DEFAULTS: dict[str, int | str] = {
    "num_key_value_heads": "heads", "head_dim": "hidden/heads",
    "num_experts_per_tok": 2, "decoder_sparse_step": 1, "interleave_moe_layer_step": 1,
    "n_positions": 1024,
}  # fmt: skip
# what newer versions of Transformers call a field
_NEWER = {"num_experts": "num_local_experts"}


def _attention(bias: str = "attention_bias", bias_of_output: str = "attention_bias") -> str:
    return f"""self_attn.q_proj.weight  q,hidden   {bias}
               self_attn.k_proj.weight  kv,hidden  {bias}
               self_attn.v_proj.weight  kv,hidden  {bias}
               self_attn.o_proj.weight  hidden,q   {bias_of_output}"""


def _mlp(name: str = "mlp", inner: str = "ffn") -> str:
    return f"""{name}.gate_proj.weight  {inner},hidden  mlp_bias
               {name}.up_proj.weight    {inner},hidden  mlp_bias
               {name}.down_proj.weight  hidden,{inner}  mlp_bias"""


def _experts(count: str, inner: str = "moe") -> tuple[str, str]:
    """Return the router, and the two tensors of all experts, so many of an inner size."""
    return (
        f"mlp.gate.weight  {count},hidden",
        f"""
        mlp.experts.gate_up_proj  {count},2*{inner},hidden
        mlp.experts.down_proj     {count},hidden,{inner}""",
    )


_NORMED = f"""{_attention()}
    self_attn.q_norm.weight  head_dim
    self_attn.k_norm.weight  head_dim"""
# MLA: q, and keys and values together, each through a latent of its own
_LATENT = """
    self_attn.q_proj.weight         heads*q_mla,hidden  q_lora_rank!
    self_attn.q_a_proj.weight       q_lora_rank,hidden  q_lora_rank?  attention_bias
    self_attn.q_a_layernorm.weight  q_lora_rank  q_lora_rank?
    self_attn.q_b_proj.weight       heads*q_mla,q_lora_rank  q_lora_rank?
    self_attn.kv_a_proj_with_mqa.weight  kv_lora_rank+qk_rope_head_dim,hidden  attention_bias
    self_attn.kv_a_layernorm.weight  kv_lora_rank
    self_attn.kv_b_proj.weight      heads*kv_mla,kv_lora_rank
    self_attn.o_proj.weight         hidden,heads*v_head_dim  attention_bias"""
_FUSED = """
    self_attn.o_proj.weight    hidden,q
    self_attn.qkv_proj.weight  q+2*kv,hidden"""
_FUSED_MLP = """
    mlp.gate_up_proj.weight  2*ffn,hidden
    mlp.down_proj.weight     hidden,ffn"""
_GPT2 = """
    ln_1.weight         hidden           bias
    attn.c_attn.weight  hidden,3*hidden  bias-1
    attn.c_proj.weight  hidden,hidden    bias-1
    ln_2.weight         hidden           bias
    mlp.c_fc.weight     hidden,ffn       bias-1
    mlp.c_proj.weight   ffn,hidden       bias-1"""
_GPT_NEOX = """
    input_layernorm.weight            hidden           bias
    post_attention_layernorm.weight   hidden           bias
    attention.query_key_value.weight  q+2*kv,hidden    attention_bias
    attention.dense.weight            hidden,hidden    attention_bias
    mlp.dense_h_to_4h.weight          ffn,hidden       bias
    mlp.dense_4h_to_h.weight          hidden,ffn       bias"""
_NORMS = """
    input_layernorm.weight           hidden
    post_attention_layernorm.weight  hidden"""
_SANDWICH = f"""{_NORMS}
    pre_feedforward_layernorm.weight   hidden
    post_feedforward_layernorm.weight  hidden"""


@dataclass(frozen=True)
class ExpertLayers:
    """The experts of a layer, beside which some families have an MLP of every token."""

    shapes: str
    there: str  # the field that counts them
    inner: str  # size of all that one token uses
    # the layers that have them, of so many
    layers: Callable[[ConfigFields, int], Collection[int]] = lambda read, num_layers: range(
        num_layers
    )


@dataclass(frozen=True)
class Family:
    """The differences of a family from llama."""

    attention: str = _attention()
    mlp: str = _mlp()
    inner: str = "ffn"  # size of the MLP
    experts: ExpertLayers | None = None
    norms: str = _NORMS
    defaults: Mapping[str, int | str] = field(default_factory=dict)  # beside those of all
    head_dim: str = "head_dim"  # q and v of a head are of other sizes: of deepseek
    before: str = "model.embed_tokens.weight  vocab,hidden"
    layers: str = "model.layers"
    after: str = "model.norm.weight  hidden"
    gated: bool = True
    words: Mapping[str, str] = field(default_factory=dict)  # names of fields, where others


def _qwen_layers(read: ConfigFields, num_layers: int) -> Collection[int]:
    step, dense = read.number("decoder_sparse_step"), read.numbers("mlp_only_layers") or []
    return {index for index in range(step - 1, num_layers, step) if index not in dense}


def _deepseek_layers(read: ConfigFields, num_layers: int) -> Collection[int]:
    return range(min(num_layers, read.number("first_k_dense_replace", least=0)), num_layers)


def _llama4_layers(read: ConfigFields, num_layers: int) -> Collection[int]:
    named, step = read.numbers("moe_layers"), read.number("interleave_moe_layer_step")
    return set(range(step - 1, num_layers, step) if named is None else named)


def _families() -> dict[str, Family]:
    """Return the families by ``model_type``."""
    router, bank = _experts("num_local_experts", "ffn")
    mixtral = ExpertLayers(f"{router}\n{bank}", "num_local_experts", "chosen*ffn")
    router, bank = _experts("num_experts")
    qwen3 = ExpertLayers(f"{bank}\n{router}", "num_experts", "chosen*moe", _qwen_layers)
    size = "shared_expert_intermediate_size"
    qwen2 = replace(
        qwen3,
        shapes=f"""{router}\n{bank}\n{_mlp("mlp.shared_expert", size)}
                   mlp.shared_expert_gate.weight  1,hidden""",
        inner=f"chosen*moe+{size}",
    )
    router, bank = _experts("n_routed_experts")
    deepseek = ExpertLayers(
        f"{bank}\n{router}\n{_mlp('mlp.shared_experts', 'shared')}",
        "n_routed_experts", "chosen*moe+shared", _deepseek_layers,
    )  # fmt: skip
    llama4 = ExpertLayers(
        f"""feed_forward.experts.gate_up_proj  num_local_experts,hidden,2*ffn
            feed_forward.experts.down_proj     num_local_experts,ffn,hidden
            feed_forward.router.weight         num_local_experts,hidden
            {_mlp("feed_forward.shared_expert")}""",
        "num_local_experts", "chosen*ffn+ffn", _llama4_layers,
    )  # fmt: skip
    gemma = {
        "tie_word_embeddings": True, "hidden_size": 2304, "intermediate_size": 9216,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 256,
    }  # fmt: skip
    latent = Family(_LATENT, experts=deepseek, head_dim="q_mla")
    latents: dict[str, int | str] = {
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }  # fmt: skip
    return {
        "llama": Family(),
        "mistral": Family(),
        "qwen2": Family(_attention("qkv_bias", ""), defaults={"qkv_bias": True}),
        "qwen3": Family(_NORMED),
        "phi3": Family(_FUSED, _FUSED_MLP),
        "gemma": Family(defaults={"tie_word_embeddings": True}),
        "gemma2": Family(norms=_SANDWICH, defaults={**gemma, "vocab_size": 256_000}),
        "gemma3_text": Family(
            _NORMED, norms=_SANDWICH, defaults={**gemma, "vocab_size": 262_208}
        ),
        "mixtral": Family(experts=mixtral, defaults={"num_local_experts": 8}),
        "qwen2_moe": Family(_attention("qkv_bias", ""), experts=qwen2, defaults={
            "qkv_bias": True, "num_experts": 60, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        }),
        "qwen3_moe": Family(_NORMED, experts=qwen3, defaults={
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        }),
        "deepseek_v2": replace(latent, defaults=latents | {
            "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0,
        }),
        "deepseek_v3": replace(latent, defaults=latents | {
            "n_routed_experts": 256, "n_shared_experts": 1, "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3, "num_experts_per_tok": 8,
        }),
        "llama4_text": Family(
            mlp=_mlp("feed_forward", "intermediate_size_mlp"), inner="intermediate_size_mlp",
            experts=llama4, defaults={
                "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192,
                "intermediate_size_mlp": 16_384, "num_hidden_layers": 48,
                "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
                "num_local_experts": 16, "num_experts_per_tok": 1,
            }),
        "gpt2": Family(
            "", _GPT2, norms="", layers="transformer.h", gated=False,
            before="""transformer.wte.weight  vocab,hidden
                      transformer.wpe.weight  n_positions,hidden""",
            after="transformer.ln_f.weight  hidden  bias",
            defaults={"tie_word_embeddings": True, "n_inner": "4*hidden"},
            words={"hidden_size": "n_embd", "num_hidden_layers": "n_layer",
                   "num_attention_heads": "n_head", "intermediate_size": "n_inner"},
        ),
        "gpt_neox": Family(
            "", _GPT_NEOX, norms="", layers="gpt_neox.layers", gated=False,
            before="gpt_neox.embed_in.weight  vocab,hidden",
            after="gpt_neox.final_layer_norm.weight  hidden  bias",
            defaults={"attention_bias": True},
        ),
    }  # fmt: skip


FAMILIES = _families()
_HEAD = "lm_head.weight"

# ------------------------------------------------------------------ one decoder that reads them


class ConfigFields:
    """The fields of a config.json; a missing or wrong one is a ConfigError that names it."""

    def __init__(self, fields: Mapping[str, Any], where: str, family: Family) -> None:
        """`where` is said in errors."""
        self._fields = fields
        self._where = where
        self._family = family

    def _given(self, name: str) -> Any:
        """Return what the file says, else the default; None without either."""
        value = self._fields.get(name)
        value = self._fields.get(_NEWER.get(name, name)) if value is None else value
        return self._family.defaults.get(name, _DEFAULTS.get(name)) if value is None else value

    def number(self, name: str, *, least: int = 1) -> int:
        """Return a whole number of `least` or more."""
        name = self._family.words.get(name, name)
        value = self._given(name)
        if isinstance(value, str) and self._fields.get(name) is None:
            return self.size(value)
        if type(value) is not int or value < least:
            kind = "positive whole number" if least else "whole number"
            raise ConfigError(f"{self._where}: {name}={value!r} is not a {kind}")
        return value

    def numbers(self, name: str) -> list[int] | None:
        """Return a list of whole numbers, None where there is none."""
        value = self._fields.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(one) is not int for one in value):
            raise ConfigError(f"{self._where}: {name}={value!r} is not a list of whole numbers")
        return value

    def size(self, text: str) -> int:
        """Return a size of a table."""

        def value(word: str) -> int:
            if "/" in word:
                above, below = word.split("/")
                return max(1, value(above) // value(below))
            if word in _WORDS:
                return self.size(_WORDS[word])
            return int(word) if word.isdecimal() else self.number(word)

        return sum(math.prod(map(value, term.split("*"))) for term in text.split("+"))

    def shapes(self, table: str) -> list[Shape]:
        """Return the parameters of a table."""
        out: list[Shape] = []
        for line in filter(str.strip, table.splitlines()):
            name, sizes, *words = line.split()
            nulls = [word for word in words if word[-1] in "?!"]
            if any((self._fields.get(n[:-1], 0) is None) is (n[-1] == "?") for n in nulls):
                continue
            shape = tuple(map(self.size, sizes.split(",")))
            out.append((name, shape))
            for word in words:
                if word.startswith("bias") or (word not in nulls and self._given(word)):
                    bias = shape[-1:] if word == "bias-1" else shape[:1]
                    out.append((f"{name.removesuffix('weight')}bias", bias))
        return out

    def decoder(self) -> tuple[list[Shape], list[str], Decoder]:
        """Return the parameters, the names of the layers, and the sizes of the decoder, with the
        mean of the layers as its inner size.
        """
        family, experts = self._family, self._family.experts
        hidden, vocab = self.number("hidden_size"), self.number("vocab_size")
        num_layers = self.number("num_hidden_layers")
        names = [f"{family.layers}.{index}" for index in range(num_layers)]
        sparse = () if experts is None else experts.layers(self, num_layers)
        attention, norms = self.shapes(family.attention), self.shapes(family.norms)
        dense = [] if len(sparse) == num_layers else self.shapes(family.mlp)
        chosen = self.shapes(experts.shapes) if experts is not None and sparse else []

        parameters = self.shapes(family.before)
        for index, name in enumerate(names):
            block = [*attention, *(chosen if index in sparse else dense), *norms]
            parameters += [(f"{name}.{part}", shape) for part, shape in block]
        parameters += self.shapes(family.after)
        if not self._given("tie_word_embeddings"):
            parameters.append((_HEAD, (vocab, hidden)))

        inner = self.size(family.inner) * (num_layers - len(sparse)) if dense else 0
        inner += self.size(experts.inner) * len(sparse) if experts is not None and sparse else 0
        heads, kv_heads = self.number("num_attention_heads"), self.number("num_key_value_heads")
        return parameters, names, Decoder(
            hidden, num_layers, heads, kv_heads, self.size(family.head_dim), inner // num_layers,
            family.gated, vocab,
        )  # fmt: skip


def read_config(file: Path) -> dict[str, Any]:
    """Return the fields of a Transformers config.json. Raises ConfigError if it is none."""
    why = "cannot be read"
    try:
        data, why = read_file(file), "is not a Transformers config.json"
        fields = from_json(data)
    except NotReadable as error:
        raise ConfigError(f"model {str(file)!r} {why}: {error}") from None
    if not isinstance(fields, dict) or "model_type" not in fields:
        raise ConfigError(
            f"model {str(file)!r} is not a Transformers config.json: it names no model_type"
        )
    return fields


def positions_of(fields: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a sequence, where the `fields` of a config.json say it."""
    given = (fields.get(name) for name in ("n_positions", "max_position_embeddings"))
    return next((one for one in given if type(one) is int and one > 0), None)


def shape_of_config(fields: dict[str, Any], where: str) -> ModelShape:
    """Return the model that the `fields` of a config.json describe; `where` is said in errors."""
    name = str(fields.get("model_type"))
    if name not in FAMILIES:
        raise ConfigError(
            f"{where}: model_type={name!r} is not one of {', '.join(FAMILIES)}, and others are"
            " built by Transformers 5.3 or newer: pip install '.[transformers]' in a checkout of"
            " zeroshard, give --params, or --model package.module:factory"
        )
    read = ConfigFields(fields, where, FAMILIES[name])
    parameters, layers, decoder = read.decoder()
    used, family = None, FAMILIES[name].experts
    experts = sum(math.prod(shape) for part, shape in parameters if ".experts." in part)
    if family is not None and experts:
        there = read.number(family.there)
        chosen = experts * min(read.number("num_experts_per_tok"), there) // there
        used = sum(math.prod(shape) for _, shape in parameters) - experts + chosen
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
    return (
        config is not None
        and read_config(config)["model_type"] not in FAMILIES
        and has_transformers()
    )


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
        if fields["model_type"] in FAMILIES or not tensors:
            return shape_of_config(fields, str(config))
    parameters: list[Shape] = []
    for file in tensors:  # in the order of their bytes
        try:
            with open_file(file) as stream:
                length = int.from_bytes(stream.read(8), "little")
                header: dict[str, Any] = json.loads(stream.read(min(length, _HEADER_BYTES)))
            entries = [(name, entry) for name, entry in header.items() if name != "__metadata__"]
            entries.sort(key=lambda named: named[1]["data_offsets"][0])
            for name, entry in entries:
                if entry["dtype"] in _FLOATS:
                    sizes = tuple(entry["shape"])
                    if not all(type(size) is int and size > 0 for size in sizes):
                        raise ValueError(name)
                    parameters.append((name, sizes))
        except NotReadable as error:
            raise ConfigError(f"model {str(file)!r} cannot be read: {error}") from None
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            raise ConfigError(f"model {str(file)!r} is not a safetensors file") from None
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
