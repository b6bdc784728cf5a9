"""Loaded into other people's pytest by tests/peers/run.py: writes a line for each test, lifts their
demand for one or two GPUs, and makes the tiny models that they would load from a hub, with random
weights.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_LIFTED = {
    "accelerate.test_utils.testing": ["require_non_cpu", "require_multi_device"],
    "transformers.testing_utils": ["require_torch_accelerator"],
}
_SMALL = {"vocab_size": 1000, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
_T5 = {
    "vocab_size": 1000,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 37,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_MOE = {
    "vocab_size": 1000,
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # Transformers' class, its configuration
    "gpt2": ("GPT2LMHeadModel", _SMALL),
    "sshleifer/tiny-gpt2": ("GPT2LMHeadModel", _SMALL),
    "hf-internal-testing/tiny-random-gpt2": ("GPT2LMHeadModel", _SMALL),
    "hf-internal-testing/tiny-random-gptj": ("GPTJModel", {**_SMALL, "rotary_dim": 4}),
    "patrickvonplaten/t5-tiny-random": ("T5ForConditionalGeneration", _T5),
    "peft-internal-testing/tiny-random-qwen-1.5-MoE": ("Qwen2MoeForCausalLM", _MOE),
    "apple/mobilevit-xx-small": ("MobileViTModel", {}),
}
_report = Path(os.environ["PEERS_REPORT"])


def _write(**line: str) -> None:
    with _report.open("a") as file:
        file.write(json.dumps(line) + "\n")


def pytest_configure() -> None:
    """Prepare what a suite finds: its decorators, its hub."""
    library = os.environ["PEERS_LIBRARY"]
    for module, names in _LIFTED.items():
        if library and module.startswith(library):
            vars(importlib.import_module(module)).update(dict.fromkeys(names, lambda test: test))
    if library == "transformers":
        counts = importlib.import_module("transformers.testing_utils").BACKEND_DEVICE_COUNT
        counts["cpu"] = lambda: 2  # ranks that a launched test starts
        arguments = importlib.import_module("transformers.training_args")
        vars(arguments)["is_torch_bf16_gpu_available"] = lambda: True
    if library:
        _offer_disk()
        for name, (cls, options) in _MODELS.items():
            folder = f"models--{name.replace('/', '--')}"
            _make(Path(os.environ["HF_HUB_CACHE"], folder), cls, options)


def _offer_disk() -> None:
    """Answer what tests of the disk tier ask before they run: whether a kernel is there."""
    vars(importlib.import_module("deepspeed.ops"))["__compatible_ops__"] = {"async_io": True}
    aio = ModuleType("deepspeed.ops.aio")
    vars(aio)["AsyncIOBuilder"] = type("AsyncIOBuilder", (), {"NAME": "async_io"})
    sys.modules[aio.__name__] = aio


def _make(folder: Path, cls: str, options: dict[str, Any]) -> None:
    """Save a model, and a tokenizer of bytes, where the hub's client looks for a download."""
    import transformers

    made = getattr(transformers, cls)
    made(made.config_class(**options)).save_pretrained(folder / "snapshots" / "made")
    _tokenizer(cls).save_pretrained(folder / "snapshots" / "made")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("made")


def _tokenizer(cls: str) -> Any:
    import tokenizers
    import transformers

    if cls.startswith("T5"):
        return transformers.T5Tokenizer()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*alphabet, "<|endoftext|>"])}
    bytewise = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    bytewise.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    marks = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    fast: Any = transformers.PreTrainedTokenizerFast
    return fast(tokenizer_object=bytewise, **marks)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Name the test that runs: the last one where pytest is ended."""
    _write(test=nodeid, outcome="started", why="")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Count a file that cannot be read as a test that failed."""
    if not report.passed:
        _write(test=report.nodeid, outcome=report.outcome, why=_why(report))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write what a test came to; a set-up counts where it fails or skips."""
    if report.when == "call" or not report.passed:
        _write(test=report.nodeid, outcome=report.outcome, why=_why(report))


def _why(report: pytest.CollectReport | pytest.TestReport) -> str:
    """Return the reason of a failure or of a skip."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    said = "" if report.passed else report.longreprtext
    if "CalledProcessError" in said:  # what the process said is in what pytest has captured
        said += "\n" + report.capstderr
    return said[-20000:]
