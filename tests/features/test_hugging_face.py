"""To Hugging Face and back: ``save_pretrained`` of a sharded model in both of its forms, of an
adapter alone, and of a checkpoint that was exported; ``from_pretrained`` reads each, bit for bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zeroshard as zs
from tests.support.harness import run_ranks
from tests.support.training import equal
from zeroshard.checkpoint.steps import list_steps, read_manifest
from zeroshard.errors import CheckpointError, ConfigError
from zeroshard.formats import import_checkpoint
from zeroshard.formats.export import export
from zeroshard.launch import cli

pytest.importorskip("transformers")


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=2, num_key_value_heads=1, **sizes))


def _lora() -> Any:
    from peft import LoraConfig, get_peft_model

    options: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
    return get_peft_model(_llama(), LoraConfig(task_type="CAUSAL_LM", **options))


def _trained(rank: int, model: Any, **options: Any) -> zs.Engine:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    engine = zs.shard(model, optimizer, **options)
    for step in range(2):
        ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(9 * step + rank))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine


def _saved(rank: int, world: int, folder: Path, precision: str) -> dict[str, torch.Tensor]:
    model = _llama()
    engine = _trained(rank, model, stage=3, precision=precision)
    state = engine.full_state_dict()
    if rank == 0:
        model.save_pretrained(folder / "first", state_dict=state)
    with engine.gathered():
        if rank == 0:
            model.save_pretrained(folder / "second")
    zs.save(folder / "run", engine, step=2)
    engine.close()  # whole masters
    return model.state_dict()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_both_forms_of_save_pretrained_and_an_export_are_read_by_from_pretrained(
    tmp_path: Path, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    expected = run_ranks(2, _saved, tmp_path, precision)[0]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    for form in ("first", "second"):
        weights = load_file(tmp_path / form / "model.safetensors")
        assert {value.dtype for value in weights.values()} == {dtype}
        assert equal(weights, {name: expected[name].to(dtype) for name in weights}), form
    for out, options in (("masters", []), ("half", ["--dtype", "bf16"])):
        command = ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / out)]
        assert cli.main([*command, "--to", "hf", *options]) == 0
        assert "config.json" not in capsys.readouterr().err
        model = AutoModelForCausalLM.from_pretrained(tmp_path / out)
        dtype = torch.bfloat16 if options else torch.float32
        assert model.dtype is dtype and type(model).__name__ == "LlamaForCausalLM"
        assert equal(model.state_dict(), {k: v.to(dtype) for k, v in expected.items()}), out
        fields = json.loads((tmp_path / out / "config.json").read_text())
        theirs = json.loads((tmp_path / "first" / "config.json").read_text())
        fields.pop("dtype"), theirs.pop("dtype")
        assert fields == theirs and fields["architectures"] == ["LlamaForCausalLM"]


def test_an_import_keeps_config_json_for_the_next_export(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = _llama()
    model.save_pretrained(tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "run")
    export(list_steps(tmp_path / "run")[0], tmp_path / "out", "hf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert equal(again.state_dict(), model.state_dict())


def _adapter(rank: int, world: int, folder: Path, options: dict[str, Any]) -> None:
    from peft import get_peft_model_state_dict

    model = _lora()
    engine = _trained(rank, model, **options)
    state = engine.full_state_dict(trained=True)
    if rank == 0:
        model.save_pretrained(folder / "adapter", state_dict=state)
    zs.save(folder / "run", engine, step=2)
    engine.close()
    whole = {name: value.clone() for name, value in get_peft_model_state_dict(model).items()}
    if rank == 0:
        assert equal(load_file(folder / "adapter" / "adapter_model.safetensors"), whole)


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1},
        {"stage": 3},
        {"stage": 3, "comm": zs.Comm(frozen_codec="int8")},
        {"stage": 3, "offload": zs.Offload(weight="host", grad="host", optimizer="host")},
    ],
    ids=["stage 1", "stage 3", "a base in int8", "on the host"],
)
def test_an_adapter_is_saved_as_peft_saves_it_and_its_checkpoint_names_no_config(
    tmp_path: Path, options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")
    run_ranks(2, _adapter, tmp_path, options)
    assert read_manifest(list_steps(tmp_path / "run")[2]).model_config == ""
    if options != {"stage": 3}:
        return
    command = ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "hf"]
    assert cli.main(command) == 0
    assert "had none when it was saved: --config FILE adds one" in capsys.readouterr().err
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "mine"}')
    command[3] = str(tmp_path / "again")
    assert cli.main([*command, "--config", str(config)]) == 0
    assert (tmp_path / "again" / "config.json").read_text() == config.read_text()


def test_a_config_that_is_none_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    _llama().save_pretrained(tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "run")
    step, odd = list_steps(tmp_path / "run")[0], tmp_path / "odd.json"
    for text, what in (("[1]", "no JSON object"), ("{", "not JSON"), ("[" * 9999, "nested deeper")):
        odd.write_text(text)
        with pytest.raises(ConfigError, match=rf"--config: .*odd.json .*{what}"):
            export(step, tmp_path / "out", "hf", config=odd)
    with pytest.raises(ConfigError, match=r"--config: .*nowhere cannot be read: No such file"):
        export(step, tmp_path / "out", "hf", config=tmp_path / "nowhere")
    assert not (tmp_path / "out").exists()


def test_a_model_config_that_is_no_object_is_a_line_of_ours(tmp_path: Path) -> None:
    from zeroshard.checkpoint.steps import MANIFEST

    _llama().save_pretrained(tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "run")
    step = list_steps(tmp_path / "run")[0]
    manifest = read_manifest(step)
    for text in ("[1, 2]", "nothing", "[" * 9999):
        object.__setattr__(manifest, "model_config", text)
        (step / MANIFEST).write_bytes(manifest.dump())
        with pytest.raises(CheckpointError, match=r"makes no sense: its model_config: "):
            export(step, tmp_path / "out", "hf")
