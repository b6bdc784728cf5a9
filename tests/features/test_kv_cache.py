"""A KV cache on the device, on the host, or split by bytes gives the tokens of the plain cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zeroshard as zs

transformers = pytest.importorskip("transformers")

from zeroshard.integrations.kv_cache import KVCache, layers_to_move  # noqa: E402

LAYERS = 4
PROMPTS = torch.arange(1, 9).reshape(2, 4)
TOKENS = 9
TOKEN_BYTES = 2 * 2 * 8 * 4  # of a layer and a sequence: keys and values, 2 heads of 8, fp32


def _model(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    kind = transformers.MistralForCausalLM if options else transformers.LlamaForCausalLM
    return kind(kind.config_class(num_hidden_layers=LAYERS, **sizes, **heads, **options)).eval()


def _generate(model: Any, cache: Any = None, **options: Any) -> list[list[int]]:
    options = {"do_sample": False, "max_new_tokens": TOKENS, "min_new_tokens": TOKENS} | options
    tokens: list[list[int]] = model.generate(
        PROMPTS, past_key_values=cache, pad_token_id=0, **options
    ).tolist()
    return tokens


@pytest.mark.parametrize("num_layers", [None, 0, 1, 2.5, 4, 100])
def test_tokens_are_the_plain_caches_and_the_device_stays_within_its_bytes(
    num_layers: float | None,
) -> None:
    model = _model()
    last = 2 * (PROMPTS.shape[1] + TOKENS - 1) * TOKEN_BYTES  # of a layer, at the end
    budget = None if num_layers is None else int(num_layers * last)
    cache = KVCache(model.config, device_bytes=budget)
    assert _generate(model, cache) == _generate(model)
    held = cache.bytes_by_place()
    assert sum(held.values()) == LAYERS * last
    whole = LAYERS if num_layers is None else min(LAYERS, int(num_layers))
    assert held["device"] == whole * last, held


def test_beams_and_a_second_turn_of_a_conversation_go_on_from_a_split_cache() -> None:
    model = _model()
    beams = {"num_beams": 3, "num_return_sequences": 2}
    expected = _generate(model, **beams)
    assert _generate(model, KVCache(model.config, device_bytes=3000), **beams) == expected
    plain, split = (
        transformers.DynamicCache(config=model.config),
        KVCache(model.config, device_bytes=3000),
    )
    for cache in (plain, split):
        _generate(model, cache)
    longer = torch.cat([torch.tensor(_generate(model)), PROMPTS], 1)
    turns = [
        model.generate(longer, past_key_values=cache, max_new_tokens=3, do_sample=False).tolist()
        for cache in (plain, split)
    ]
    assert turns[0] == turns[1]
    split.crop(-2)
    assert split.get_seq_length() == plain.get_seq_length() - 2
    split.reset()
    assert _generate(model, split) == _generate(model)


def test_layers_of_a_sliding_window_stay_on_the_device() -> None:
    model = _model(sliding_window=5)
    cache = KVCache(model.config, device_bytes=0)
    assert _generate(model, cache) == _generate(model)
    held = cache.bytes_by_place()
    assert held["host"] == 0 < held["device"]


def test_the_cache_makes_no_other_cache_of_its_layers() -> None:
    KVCache(_model().config, device_bytes=0)
    layers = transformers.DynamicCache(config=_model().config).layers
    assert {type(layer).__name__ for layer in layers} == {"DynamicLayer"}


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(zs.ConfigError, match="device_bytes=-1 is negative"):
        KVCache(_model().config, device_bytes=-1)


def test_the_cache_serves_a_sharded_model_whose_weights_rest_on_the_host() -> None:
    model = _model()
    expected = _generate(model)
    engine = zs.shard(model, None, policy="zero3", offload=zs.Offload(weight="host"))
    assert _generate(model, KVCache(model.config, device_bytes=4000)) == expected
    engine.close()


@given(st.lists(st.integers(0, 9), max_size=8), st.integers(-1, 50), st.data())
def test_the_last_layers_leave_and_no_more_than_needed(
    sizes: list[int], budget: int, data: st.DataObject
) -> None:
    movable = [index for index in range(len(sizes)) if data.draw(st.booleans())]
    moved = layers_to_move(sizes, movable, budget)
    assert moved == sorted(movable, reverse=True)[: len(moved)]
    left = sum(sizes) - sum(sizes[index] for index in moved)
    assert left <= budget or len(moved) == len(movable)
    assert not moved or left + sizes[moved[-1]] > budget
