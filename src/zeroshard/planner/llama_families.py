"""Decoders of llama's form in closed form: an attention, an MLP or experts, and RMS norms a layer.

    attention   q, k, v, o; of phi3 fused; of deepseek_v2 and _v3 through latents (MLA)
    mlp         gate, up, down; of phi3 gate and up fused
    experts     two 3-d tensors and a router, of some families beside an MLP that every token takes

Which layers have experts, what is normed and tied, and what a file may leave out is a row of
``LLAMA_FAMILIES``. tests/features/test_plan.py compares each with the model that Transformers
builds, by name, shape and definition order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from zeroshard.planner.config_fields import ConfigFields
from zeroshard.planner.model import Decoder, Shape

_Shapes = Callable[[ConfigFields], list[Shape]]
_HEAD = "lm_head.weight"


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
    """How a family differs from llama."""

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
    `is_biased`); that of o is one of `attention_bias` alone.
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


# ------------------------------------------------------------------ the families

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


def _linear(name: str, rows: int, columns: int, biased: bool) -> list[Shape]:
    bias: list[Shape] = [(f"{name}.bias", (rows,))] if biased else []
    return [(f"{name}.weight", (rows, columns)), *bias]
