"""What generation under stage 3 gathers: each unit once per token at most, nothing inside
``gathered()``.
"""

from __future__ import annotations

import pytest
import torch

import zeroshard as zs
from tests.support.harness import on_ranks

pytest.importorskip("transformers")

TOKENS = 6


@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@on_ranks(2)
def test_each_unit_is_gathered_once_per_token_and_not_at_all_inside_gathered(
    transport: str,
) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, **sizes)).eval()
    prompt = torch.arange(1, 5)[None]

    def run() -> list[list[int]]:
        tokens: list[list[int]] = model.generate(
            prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0
        ).tolist()
        return tokens

    expected = run()
    engine = zs.shard(model, stage=3, comm=zs.Comm.model_validate({"transport": transport}))
    engine.reset_traffic()
    assert run() == expected
    assert 0 < engine.traffic().calls["all_gather"] <= TOKENS * len(engine.units)
    with engine.gathered():
        engine.reset_traffic()
        assert run() == expected and run() == expected
        assert "all_gather" not in engine.traffic().calls
    engine.close()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_an_encoder_decoder_generates_in_every_precision(precision: str) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2}
    config = T5Config(num_layers=1, decoder_start_token_id=0, **sizes)
    model = T5ForConditionalGeneration(config).eval()
    prompt = torch.arange(2, 7)[None]

    def run() -> list[list[int]]:
        tokens: list[list[int]] = model.generate(prompt, max_new_tokens=TOKENS).tolist()
        return tokens

    engine = zs.shard(model, stage=2, precision=precision)
    found = run()
    engine.close()  # leaves the model in its precision
    assert found == run()
