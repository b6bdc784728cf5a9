"""Every option is described where it is declared: the reference, the JSON schema, the keywords of
``shard()`` for editors, and ``zeroshard config``, which explains a file key by key.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel

import zeroshard as zs
from tests.support.deepspeed_files import FILES
from zeroshard.commands.config import explain
from zeroshard.config import ShardOptions
from zeroshard.config.reference import options, reference_markdown, schema
from zeroshard.launch.cli import main

DOCS = Path(__file__).parents[2] / "docs"


def test_every_option_has_a_sentence() -> None:
    for name, field in options().items():
        assert field.description and field.description.endswith("."), name
    assert "node_size: The number of ranks of a node" in str(zs.Comm.__doc__), "help() says it"
    rows = reference_markdown().splitlines()
    assert len(rows) == 2 + len(options())
    assert any(row.startswith("| `comm.node_size` | `None` | The number of ranks") for row in rows)


def test_the_keywords_of_shard_are_the_fields_of_the_configuration() -> None:
    fields, hints = zs.Config.model_fields, get_type_hints(ShardOptions)
    named = set(inspect.signature(zs.shard).parameters)
    assert set(hints) == fields.keys() - named, "those that shard() does not name itself"
    for name, hint in hints.items():
        annotation = fields[name].annotation
        one_kind = get_origin(annotation) in (None, Literal)
        kinds = {annotation} if one_kind else set(get_args(annotation))
        models = [one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel)]
        extra = {dict[str, Any]} if models else set()
        assert set(get_args(hint)) == kinds | extra | {NoneType}, name


def test_the_published_schema_is_the_current_one() -> None:
    published = json.loads((DOCS / "zeroshard.schema.json").read_text())
    assert published == schema(), "zeroshard config schema > docs/zeroshard.schema.json"


def test_the_schema_names_every_option_with_its_type() -> None:
    made = schema()
    assert made["properties"].keys() == zs.Config.model_fields.keys()
    assert made["properties"]["policy"]["anyOf"][0]["enum"][-2:] == ["hfsdp", "auto"]
    assert made["properties"]["precision"]["anyOf"][0]["enum"] == ["fp32", "bf16", "fp16"]
    assert made["properties"]["units"]["anyOf"][0] == {"type": "array", "items": {"type": "string"}}
    assert made["additionalProperties"] is False
    assert made["$defs"].keys() == {"Comm", "ErrorFeedback", "LossScale", "Offload"}
    assert "link" not in made["$defs"]["Offload"]["properties"]


def test_a_file_of_ours_is_explained_with_what_it_leaves_out() -> None:
    form, findings = explain({"stage": 2, "offload": {"optimizer": "host"}, "comm": {}})
    said = {finding.key: finding for finding in findings}
    assert form == "zeroshard" and said["stage"].source == "file"
    assert said["offload.optimizer"].value == "host"
    assert (said["offload.grad"].source, said["offload.grad"].value) == ("default", "device")
    assert "tier of masters" in said["offload.optimizer"].why
    _, findings = explain({"stage": 2, "comm": {"node_sise": 2}})
    [refused] = [finding for finding in findings if finding.verdict == "refused"]
    assert refused.key == "comm.node_sise" and "did you mean 'node_size'" in refused.why
    _, findings = explain({"stage": 2, "comm": {"weight_codec": "int8"}})
    [refused] = [finding for finding in findings if finding.verdict == "refused"]
    assert refused.key == "" and "encodes gathers of weights" in refused.why, "a combination"


def test_the_command_explains_a_file_and_ends_with_3_where_a_key_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FILES["transformers zero3"]))
    assert main(["config", "explain", str(path)]) == 0
    text = capsys.readouterr().out
    assert "mapped        zero_optimization.offload_param.device" in text
    assert 'filled in     train_batch_size = "auto"  (auto)' in text
    assert "no difference zero_optimization.overlap_comm = true  (file)" in text
    assert "communication always overlaps compute" in text
    assert "ignored" not in text and "counts where fp16.enabled is true" in text
    path.write_text(json.dumps({"zero_optimization": {"stage": 7}, "amp": {"enabled": True}}))
    assert main(["config", "explain", str(path), "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert (told["form"], told["refused"]) == ("deepspeed", 2)
    assert {key["key"]: key["source"] for key in told["keys"]}["gradient_clipping"] == "default"
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema()
    assert main(["config", "explain", str(tmp_path / "none.json")]) == 3
    assert "cannot be read" in capsys.readouterr().err


def test_help_fits_a_screen_and_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["config", "--help"], ["config", "explain", "--help"]):
        with pytest.raises(SystemExit):
            main(command)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) < 25 and "  zeroshard config explain ds_config.json" in lines
