"""Generate with a model larger than this process may allocate: TIER PATH [CAP].

The weights are random, from a seed; without CAP the model is plain. Prints JSON: the tokens, the
bytes of the weights, and what the engine has gathered at most.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zeroshard as zs

LAYERS, WIDTH = 48, 768
TOKENS = 4


def _data_bytes() -> int:
    """Return this process's private writable memory, which RLIMIT_DATA limits."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def _model() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": WIDTH, "intermediate_size": 2048}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **sizes, **heads))


def main() -> None:
    tier, path = sys.argv[1:3]
    cap = int(sys.argv[3]) if len(sys.argv) > 3 else None
    if cap is None:
        model, engine = _model(), None
    else:
        zs.shard(torch.nn.Linear(8, 8)).close()  # imports at first use
        resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + cap, resource.RLIM_INFINITY))
        with zs.deferred_init():
            model = _model()
        disk = {"disk_path": path} if tier == "disk" else {}
        offload = zs.Offload.model_validate({"weight": tier, **disk})
        engine = zs.shard(model.requires_grad_(False), None, policy="zero3", offload=offload)
    model.eval()
    tokens = model.generate(
        torch.arange(1, 9)[None], max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
    )
    out = {
        "tokens": tokens.tolist(),
        "weight_bytes": sum(4 * parameter.numel() for parameter in model.parameters()),
        "peak": 0 if engine is None else engine.memory().peak,
    }
    print(json.dumps(out))


if __name__ == "__main__":
    main()
