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
from tests.support.launched import PATHS
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


def _says(directory: Path, **options: Any) -> None:
    """Let generation_config.json say `options`, too."""
    path = directory / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


def _as_transformers(directory: Path, prompt: list[int], **options: Any) -> list[int]:
    """What ``from_pretrained(directory).generate()`` adds to a prompt."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


SAYS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 1, "min_length": 9},
    {"eos_token_id": [5, 11, 23, 31, 47], "pad_token_id": 2},
    {"max_length": 9, "max_new_tokens": None},
    {"do_sample": True, "temperature": 0.7, "top_k": 11, "repetition_penalty": 1.2},
    {"num_beams": 3, "length_penalty": 0.5},
    {"suppress_tokens": list(range(30)), "bad_words_ids": [[40], [41, 41]]},
    {"prefill_chunk_size": 2},
    {"use_cache": False},
]


@pytest.mark.parametrize("says", SAYS, ids=lambda says: " ".join(says))
def test_tokens_are_those_of_transformers_with_what_generation_config_says(
    says: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path, tokenizer=False)
    _says(tmp_path, max_new_tokens=12)
    _says(tmp_path, **says)
    torch.manual_seed(7)
    wanted = _as_transformers(tmp_path, [1, 2, 3])
    for kv in [], ["--kv-device-bytes", "0"]:
        if kv and not {"num_beams", "do_sample", "use_cache"} & set(says):
            continue
        torch.manual_seed(7)
        code, out, err = _run(capsys, tmp_path, "--prompt", "1 2 3", "--json", *kv)
        assert (code, err) == (0, "")
        (told,) = json.loads(out)["completions"]
        assert told["tokens"] == wanted, kv


@pytest.mark.parametrize("says", [{"repetition_penalty": 0.2}, *SAYS[1:4]], ids=" ".join)
def test_a_prompt_beside_a_longer_one_is_gone_on_with_as_alone(
    says: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path, tokenizer=False)
    _says(tmp_path, max_new_tokens=8)
    _says(tmp_path, **says)
    prompts = ["--prompt", "0 4 4 1 2 3", "--prompt", "7 9"]
    code, out, _ = _run(capsys, tmp_path, *prompts, "--json")
    told = [one["tokens"] for one in json.loads(out)["completions"]]
    assert code == 0
    assert told == [_as_transformers(tmp_path, ids) for ids in ([0, 4, 4, 1, 2, 3], [7, 9])]


def test_options_outrank_generation_config_and_32_tokens_come_where_nothing_says_how_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = _write(tmp_path, tokenizer=False)

    def tokens(*options: object) -> list[int]:
        code, out, _ = _run(capsys, tmp_path, "--prompt", "4 5", "--json", *options)
        assert code == 0
        told: list[int] = json.loads(out)["completions"][0]["tokens"]
        return told

    assert tokens() == _tokens(model, [4, 5], 32)
    _says(tmp_path, do_sample=True, max_new_tokens=6, min_new_tokens=6, temperature=3.0)
    torch.manual_seed(3)
    drawn = tokens()
    assert len(drawn) == 6 and drawn != _tokens(model, [4, 5], 6)
    _says(tmp_path, min_new_tokens=None, return_dict_in_generate=True, output_scores=True)
    assert tokens("--no-sample", "--max-new-tokens", 4) == _tokens(model, [4, 5], 4)
    (tmp_path / "generation_config.json").unlink()  # as older models: config.json says it
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_beams": 2, "eos_token_id": None, "max_length": 11}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert tokens() == _as_transformers(tmp_path, [4, 5])


@pytest.mark.parametrize(
    ("says", "line"),
    [
        ({"num_return_sequences": 3, "do_sample": True}, "asks for num_return_sequences=3, which"),
        ({"prompt_lookup_num_tokens": 2}, "asks for assisted generation, which"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "asks for contrastive search, which"),
        ({"cache_implementation": "paged"}, "asks for a paged cache, which"),
        ({"eos_token_id": "end"}, "eos_token_id=['end'] is no list of token numbers"),
        ({"repetition_penalty": "much"}, "refuses how it says to generate"),
        ({"stop_strings": ["w1"]}, "refuses how it says to generate"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_what_generation_config_cannot_have_is_one_line(
    says: dict[str, Any], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path, tokenizer=False)
    _says(tmp_path, **says)
    code, out, err = _run(capsys, tmp_path, "--prompt", "4 5", "--max-new-tokens", 3)
    assert (code, out) == (2, "") and line in err and err.count("\n") == 1


@pytest.mark.parametrize("where", ["config", "model", "tokenizer"])
def test_no_python_of_the_models_directory_is_run_and_nobody_is_asked(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path)
    name, more = {
        "config": ("config.json", {"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}),
        "model": (
            "config.json",
            {"model_type": "vit", "auto_map": {"AutoModelForCausalLM": "own.M"}},
        ),
        "tokenizer": (
            "tokenizer_config.json",
            {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.T", "own.T"]}},
        ),
    }[where]
    path = tmp_path / name
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nC = M = T = None\n")
    monkeypatch.setattr("builtins.input", lambda *asked: "y")
    code, out, err = _run(capsys, tmp_path, "--prompt", "w1")
    assert not ran.exists()
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "Python code of its own (auto_map), which zeroshard generate never runs" in err


def test_attention_from_a_hub_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attn_implementation": "a/kernel"}))
    code, _, err = _run(capsys, tmp_path, "--prompt", "w1")
    assert code == 2 and "asks for attention from a hub ('a/kernel')" in err


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("config.json", b"[" * 100_000, "nested deeper than 100 levels"),
        ("config.json", b"[]", "it is not a JSON object"),
        ("config.json", b'{"model_type": "llama", "hidden_size": "wide"}', "describes no model"),
        ("generation_config.json", b"{", "it is not JSON"),
        ("generation_config.json", b"7", "it is not a JSON object"),
        ("tokenizer.json", b'{"model": 5}', "holds no tokenizer that this Transformers knows"),
        ("tokenizer.json", None, "is not a regular file"),
        ("model.safetensors", None, "is not a regular file"),
        ("chat_template.jinja", None, "is not a regular file"),
    ],
)
def test_odd_files_of_a_models_directory_are_one_line(
    name: str, content: bytes | None, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    if content is None:
        os.mkfifo(tmp_path / name)  # a read of it waits
    else:
        (tmp_path / name).write_bytes(content)
    code, out, err = _run(capsys, tmp_path, "--prompt", "w1", "--max-new-tokens", 1)
    assert (code, out) == (2, "") and line in err and err.count("\n") == 1


def test_words_that_a_terminal_obeys_are_printed_with_escapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys.modules[__name__], "VOCABULARY", ["w0", *(f"\x1b[{number}m" for number in range(60))]
    )
    _write(tmp_path)
    code, out, _ = _run(capsys, tmp_path, "--prompt", "w0", "--max-new-tokens", 2)
    assert code == 0 and "\x1b" not in out and "\\x1b[" in out


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
    _write(tmp_path)
    _says(tmp_path, repetition_penalty=1.7, min_length=7)
    prompts = [[1, 2, 3], [7], [8, 9]]
    words = [f"--prompt={' '.join(f'w{one}' for one in prompt)}" for prompt in prompts]
    start = [sys.executable, "-m", "zeroshard", "run", "--nproc", "2", "-m", "zeroshard"]
    options = ["--offload=disk", f"--disk-path={tmp_path}", "--max-new-tokens=4", "--json"]
    options += ["--batch=1"]  # rank 1 has one prompt, and takes part in the second of rank 0
    ended = subprocess.run(
        [*start, "generate", str(tmp_path), *words, *options],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": PATHS},
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["ranks"] == 2
    tokens = [one["tokens"] for one in report["completions"]]
    assert tokens == [_as_transformers(tmp_path, one, max_new_tokens=4) for one in prompts]
