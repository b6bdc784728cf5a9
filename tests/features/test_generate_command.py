"""``zeroshard generate``: text and JSON, one rank and two, and one line for what cannot be done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.harness import ROOT
from zeroshard.launch import cli

transformers = pytest.importorskip("transformers")

VOCABULARY = [f"w{number}" for number in range(61)]


def _write(directory: Path, *, tokenizer: bool = True, **options: Any) -> Any:
    """Write a tiny model whose words are w0, w1, ...; return it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64}
    config = transformers.LlamaConfig(
        num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, **sizes, **options
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(directory)
    if tokenizer:
        from tokenizers import Tokenizer, models, pre_tokenizers

        words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(VOCABULARY)}, "w0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
    return model


def _tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def _run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    capsys.readouterr()  # what writing the model has said
    code = cli.main(["generate", *map(str, argv)])
    told = capsys.readouterr()
    return code, told.out, told.err


@pytest.mark.parametrize(
    "options",
    [
        ["--offload", "host"],
        ["--offload", "disk", "--kv-device-bytes", "0"],
        ["--offload", "device", "--batch", "1", "--kv-device-bytes", "2KB"],
        ["--offload", "disk", "--prefetch-bytes", "100KB", "--dtype", "fp32"],
    ],
    ids=" ".join,
)
def test_prompts_of_several_lengths_are_gone_on_with_as_the_plain_model_does(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _write(tmp_path)
    options += ["--disk-path", str(tmp_path)] if "disk" in options else []
    prompts = ["--prompt", "w1 w2 w3", "--prompt", "w7"]
    code, out, err = _run(capsys, tmp_path, *prompts, "--max-new-tokens", 5, "--json", *options)
    assert (code, err) == (0, "")
    report = json.loads(out)
    first, second = report["completions"]
    assert first["tokens"] == _tokens(model, [1, 2, 3], 5)
    assert second["tokens"] == _tokens(model, [7], 5)
    assert first["text"].split() == [f"w{token}" for token in first["tokens"]]
    assert report["new_tokens"] == 10 and report["tokens_per_s"] > 0
    assert (report["peak_bytes"] > 0) == (report["offload"] != "device")


def test_without_json_the_text_comes_and_a_line_about_speed_and_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _write(tmp_path, tokenizer=False)
    arguments = ["--prompt", "4 5", "--max-new-tokens", 3, "--codec", "int8"]
    code, out, err = _run(capsys, tmp_path, *arguments)
    assert (code, err) == (0, "")
    text, told = out.splitlines()
    assert text.startswith("4 5 ") and len(text.split()) == 5
    assert "tokens/s: 3 in " in told and "1 rank(s)" in told and "on the host in int8" in told
    assert model.config.vocab_size == 61


def test_tied_weights_and_a_model_in_bf16_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _write(tmp_path, tie_word_embeddings=True)
    code, out, _ = _run(capsys, tmp_path, "--prompt", "w3", "--max-new-tokens", 4, "--json")
    assert code == 0 and json.loads(out)["completions"][0]["tokens"] == _tokens(model, [3], 4)
    model.bfloat16().save_pretrained(tmp_path)
    code, out, _ = _run(capsys, tmp_path, "--prompt", "w3", "--max-new-tokens", 4, "--json")
    assert code == 0 and json.loads(out)["completions"][0]["tokens"] == _tokens(model, [3], 4)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["none", "--prompt", "w1"], "none holds no config.json: name a model's directory"),
        ([".", "--prompt", ""], "--prompt '' has no tokens"),
        ([".", "--prompt", "w1", "--disk-path", "."], "--disk-path has no effect without"),
        (
            [".", "--prompt", "w1", "--offload", "disk", "--disk-path", "none"],
            "--disk-path none is not a directory",
        ),
        ([".", "--prompt", "w1", "--kv-device-bytes", "2"], "--kv-device-bytes='2' has no unit"),
        ([".", "--prompt", "w1", "--prefetch-bytes", "x"], "--prefetch-bytes='x' is not a size"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(
    argv: list[str],
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _write(tmp_path)
    monkeypatch.chdir(tmp_path)
    code, out, err = _run(capsys, *argv)
    assert (code, out) == (2, "") and line in err and err.count("\n") == 1


def test_token_numbers_are_checked_and_a_model_without_weights_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path, tokenizer=False)
    for prompt, line in (("hello", "holds no tokenizer"), ("3 61", "knows 61 tokens")):
        code, _, err = _run(capsys, tmp_path, "--prompt", prompt)
        assert code == 2 and line in err and err.count("\n") == 1
    (tmp_path / "model.safetensors").unlink()
    code, _, err = _run(capsys, tmp_path, "--prompt", "3")
    assert code == 73 and "holds neither model.safetensors" in err and err.count("\n") == 1
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    code, _, err = _run(capsys, tmp_path, "--prompt", "3")
    assert code == 2 and "describes no model" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "argument", [["--max-new-tokens", "0"], ["--batch", "x"], ["--codec", "3"]]
)
def test_numbers_and_choices_are_checked_by_the_parser(
    argument: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", str(tmp_path), "--prompt", "w1", *argument])
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_two_ranks_share_the_prompts_and_the_first_prints(tmp_path: Path) -> None:
    model = _write(tmp_path)
    prompts = [[1, 2, 3], [7], [8, 9]]
    words = [f"--prompt={' '.join(f'w{one}' for one in prompt)}" for prompt in prompts]
    start = [sys.executable, "-m", "zeroshard", "run", "--nproc", "2", "-m", "zeroshard"]
    options = ["--offload=disk", f"--disk-path={tmp_path}", "--max-new-tokens=4", "--json"]
    options += ["--batch=1"]  # rank 1 has one prompt, and takes part in the second of rank 0
    ended = subprocess.run(
        [*start, "generate", str(tmp_path), *words, *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["ranks"] == 2
    tokens = [one["tokens"] for one in report["completions"]]
    assert tokens == [_tokens(model, prompt, 4) for prompt in prompts]
