"""``zeroshard plan`` as it is typed and read: names, prices, equal rows, errors of one line."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.support.plan_command import run_plan
from zeroshard.launch.cli import main
from zeroshard.planner import machine
from zeroshard.planner.families import shape_of_config
from zeroshard.planner.modules import shape_of_module


def _printed(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> list[str]:
    assert run_plan(*argv) == code
    return capsys.readouterr().out.splitlines()


# ------------------------------------------------------------------ rows that are equal


def test_one_gpu_has_a_line_for_each_mix_of_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _printed(capsys, "--params", "7B", "--disk", "4TB")
    (head,) = (number for number, line in enumerate(lines) if line.startswith("row "))
    (told,) = (number for number, line in enumerate(lines) if line.startswith("one GPU: all rows"))
    table = [line.split()[:3] for line in lines[head + 2 : told]]
    assert [words[0] for words in table] == ["ddp", "zero1", "zero2", "zero3", "zero3", "zero3"]
    assert [words[1] for words in table] == ["-", "optim", "grad+optim", "all", "grad", "all"]
    assert not any(line.startswith(("hpz ", "mics ", "zero3-keep ")) for line in lines)
    assert run_plan("--params", "7B", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 14


def test_rows_of_nodes_are_named_on_several_nodes_alone_and_explained_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = _printed(capsys, "--params", "7B", "--gpus", "8")
    assert not any(name in line for line in lines for name in ("hpz", "mics", "hfsdp", "equal to"))
    legend = [line for line in lines if line.startswith("zero3-keep zero3 with weights that stay")]
    assert len(legend) == 1 and not any(line.startswith("hpz  ") for line in lines)
    lines = _printed(capsys, "--params", "7B", "--gpus", "16")
    assert not any("equal to" in line for line in lines)
    for name in ("zero3-keep", "hpz", "mics", "hfsdp"):
        assert sum(line.startswith(f"{name:10} ") for line in lines) == 2, "a line and a legend"


def test_where_a_model_does_not_fit_the_adapters_that_would_are_named_and_planned(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cards = ("--params", "70B", "--gpus", "8", "--gpu", "RTX4090")
    text = "\n".join(_printed(capsys, *cards, code=1))
    line = "adapters  checkpoint activations, --trainable 1% (LoRA): zero3, all on host would fit"
    assert line in text
    assert "change    checkpoint activations, 3.2 TB of disk a node: zero3, all on disk" in text
    text = "\n".join(_printed(capsys, *cards, "--checkpointing", "--trainable", "1%"))
    assert "frozen, and 700,000,000 trained beside them (adapters)" in text
    assert "gradients 2.8 GB, master and moments 8.4 GB" in text
    assert "take      zero3, all on host: the fastest" in text
    assert "1 micro-batch(es) x 1 sequence(s) x 2048 tokens a step and GPU" in text
    for wrong in ("x%", "0%", "140%", "40"):
        assert run_plan("--params", "7B", "--trainable", wrong) == 2
        assert f"trainable={wrong!r}" in capsys.readouterr().err


def test_every_table_fits_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    grids = ("--tp", "2", "--pp", "2", "--micro-batches", "4")
    for argv, start in (
        (("--gpus", "64", "--disk", "4TB"), "row "),
        (("--gpus", "64", *grids), "tp "),
        (("--gpus", "8", *grids, "--disk", "4TB"), "tp "),
        (("--gpu-memory", "80GiB,60GiB"), "row "),
        (("--sweep", "gpus=8..16384"), "  GPUs "),
    ):
        lines = _printed(capsys, "--params", "7B", *argv)
        heads = [number for number, line in enumerate(lines) if line.startswith(start)]
        assert heads
        for head in heads:
            table = lines[head : head + 10]
            assert max(map(len, table)) <= 80 and not any("…" in line for line in table), argv


# ------------------------------------------------------------------ names and numbers as typed


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ({"optimizer": "adamw"}, {"optimizer": "adam"}),
        ({"optimizer": "AdamW"}, {"optimizer": "adam"}),
        ({"optimizer": "adamw_torch_fused"}, {"optimizer": "adam-fused"}),
        ({"optimizer": "adamw_8bit"}, {"optimizer": "adam-8bit"}),
        ({"precision": "bfloat16"}, {"precision": "bf16"}),
        ({"precision": torch.bfloat16}, {"precision": "bf16"}),
        (
            {"precision": "half", "accumulate": "float16"},
            {"precision": "fp16", "accumulate": "fp16"},
        ),
        ({"precision": "float32"}, {"precision": "fp32"}),
    ],
    ids=str,
)
def test_names_are_taken_as_people_write_them(typed: dict[str, Any], meant: dict[str, Any]) -> None:
    assert zs.Training(**typed) == zs.Training(**meant)


def test_names_that_mean_nothing_are_refused_as_they_were_typed() -> None:
    with pytest.raises(zs.ConfigError, match="optimizer='Lion' is not one of adam"):
        zs.Training(optimizer="Lion")
    with pytest.raises(zs.ConfigError, match="precision='fp8' is not one of fp32, bf16"):
        zs.Training(precision="fp8")


def test_the_command_takes_the_same_names(capsys: pytest.CaptureFixture[str]) -> None:
    lines = _printed(capsys, "--params", "1B", "--optimizer", "adamw", "--precision", "bfloat16")
    assert any(line.startswith("training  bf16, gradients rest in fp32, adam;") for line in lines)


def test_gpus_that_make_no_whole_nodes_come_with_the_remedy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_plan("--params", "7B", "--gpus", "12") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "give node_size=6, or gpus=8 or gpus=16" in error
    assert run_plan("--params", "1B", "--gpus", "12", "--node-size", "6") == 0


def test_a_preset_that_lacks_a_key_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = machine.presets()
    for key in ("memory_gbs", "node_size"):
        short = {name: value for name, value in known["H100"].items() if name != key}
        monkeypatch.setattr(machine, "presets", lambda short=short: {**known, "Mine": short})
        assert run_plan("--params", "1B", "--gpu", "Mine") == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"machines.toml: preset 'Mine' lacks {key}" in error


# ------------------------------------------------------------------ money


def test_a_price_is_gpu_hours_and_money_for_a_billion_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ("--params", "7B", "--gpus", "8", "--price", "2.50")
    (line,) = (one for one in _printed(capsys, *argv) if one.startswith("price"))
    assert run_plan(*argv, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    best = next(row for row in plan["rows"] if row["row"] == plan["recommended"]["row"])
    hours = 8 * 1e9 / best["tokens_per_s"] / 3600
    assert best["gpu_hours_per_billion_tokens"] == pytest.approx(hours)
    assert plan["price"] == {"gpu_hour": 2.5, "billion_tokens": pytest.approx(2.5 * hours)}
    assert (
        line
        == f"price     a billion tokens take {hours:.3g} GPU-hours: {2.5 * hours:.3g} at 2.5 each"
    )
    assert run_plan(*argv[:-2], "--json") == 0
    assert "price" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("price", ["0", "-1", "cheap", "inf", "nan"])
def test_a_price_that_is_none_is_refused(price: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("--params", "7B", "--price", price) == 2
    assert "--price must be a positive number" in capsys.readouterr().err


def test_a_sweep_ends_with_the_fewest_gpus_that_hold_the_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ("--params", "70B", "--checkpointing", "--sweep", "gpus=8..64", "--price", "2")
    lines = _printed(capsys, *argv)
    assert lines[-1] == "fewest     32 GPUs, with zero3, hpz, hfsdp"
    assert lines[-2].startswith("cheapest   32 GPUs, ")
    assert run_plan(*argv[:-4], "--sweep", "gpus=8..16") == 1
    out = capsys.readouterr().out.splitlines()
    assert out[-1].startswith("fewest     no number of GPUs from 8 to 16 ")


# ------------------------------------------------------------------ families of config.json

# of published models: parameters, and those that a token uses, as the models' cards say them
PUBLISHED: dict[str, tuple[dict[str, Any], int, float | None]] = {
    "DeepSeek-V3": ({
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
        "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "num_experts_per_tok": 8,
    }, 671_026_404_352, 37e9),
    "DeepSeek-V2": ({
        "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 5120,
        "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_hidden_layers": 60,
        "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 2,
        "n_routed_experts": 160, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    }, 235_741_434_880, 21e9),
    "Qwen3-30B-A3B": ({
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "vocab_size": 151936,
    }, 30_532_122_624, 3.3e9),
    "Qwen1.5-MoE-A2.7B": ({
        "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632,
        "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16,
        "vocab_size": 151936,
    }, 14_315_784_192, 2.7e9),
    "Llama-4-Scout, text": ({"model_type": "llama4_text"}, 107_769_861_120, 17e9),
    "Phi-3-mini": ({
        "model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192,
        "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32064,
    }, 3_821_079_552, None),
    "gemma-2-2b": ({"model_type": "gemma2"}, 2_614_341_888, None),
    "gemma-3-1b": ({
        "model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912,
        "num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144,
    }, 999_885_952, None),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_parameters_that_their_cards_say(name: str) -> None:
    fields, numel, used = PUBLISHED[name]
    model = shape_of_config(fields, name)
    assert model.numel == numel
    assert model.used_numel == (None if used is None else pytest.approx(used, rel=0.03))


SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
VISION |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
IMAGES = {"text_config": {**SMALL, "head_dim": 16}, "vision_config": VISION}


@pytest.mark.parametrize(
    "fields",
    [{"model_type": "olmo2", **SMALL, "eos_token_id": 1}, {"model_type": "gemma3", **IMAGES}],
    ids=lambda fields: str(fields["model_type"]),
)
def test_any_other_family_is_built_by_transformers(
    fields: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields))
    assert run_plan(str(file), "--gpu", "CPU", "--json") == 0
    seen = capsys.readouterr()
    assert seen.err == "", "no warnings of Transformers"
    plan = json.loads(seen.out)
    rest = {name: value for name, value in fields.items() if name != "model_type"}
    config = transformers.AutoConfig.for_model(fields["model_type"], **rest)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert plan["model"]["parameters"] == numel
    assert plan["model"]["units"] == len(shape_of_module(model, zs.Training()).units)
    assert plan["rows"][0]["tokens_per_s"] > 0
    again = zs.plan(str(file), zs.Machine.of("CPU"))
    assert again.to_dict()["rows"] == plan["rows"]


def test_images_beside_text_are_no_parameters_that_a_token_uses(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "gemma3", **IMAGES}))
    model = zs.plan(str(file)).model
    text = shape_of_config({"model_type": "gemma3_text", **IMAGES["text_config"]}, "text")
    assert model.used_numel == text.numel < model.numel


def test_a_family_that_nobody_knows_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    for fields, message in (
        ({"model_type": "nonsense"}, "Transformers that is installed knows model_type='nonsense'"),
        ({"model_type": "olmo2", "hidden_size": "x"}, "Transformers does not build it"),
        ({"model_type": "llama", "hidden_size": 0}, "hidden_size=0 is not a positive whole number"),
        ({"model_type": "qwen3_moe", **SMALL, "mlp_only_layers": 3}, "not a list of whole numbers"),
    ):
        file.write_text(json.dumps(fields))
        assert run_plan(str(file)) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and message in error
    for version in ("", "4.57.6", "5.2.0"):  # not there, or runs code that a config.json names
        _pretend_transformers(monkeypatch, version)
        file.write_text(json.dumps({"model_type": "olmo2", **SMALL}))
        assert run_plan(str(file)) == 2
        assert "pip install '.[transformers]' in a checkout of zeroshard" in capsys.readouterr().err


def _pretend_transformers(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Let the Transformers that is installed be `version`; "": none is."""

    def find(package: str) -> str:
        if not version:
            raise PackageNotFoundError(package)
        return version

    monkeypatch.setattr("importlib.metadata.version", find)


def test_no_command_hands_a_config_to_a_transformers_that_runs_code_which_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lightglue"}))
    for version in ("4.57.6", "5.2.0"):
        _pretend_transformers(monkeypatch, version)
        assert main(["generate", str(tmp_path), "--prompt", "1 2"]) == 2
        assert "Transformers 5.3 or newer" in capsys.readouterr().err
