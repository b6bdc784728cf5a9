"""``zeroshard plan`` and ``zs.plan()``: models and machines in, a table, JSON and a configuration
out. That the bytes are the engine's: test_plan_bytes.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.plan_command import run_plan
from tests.support.training import make_model
from zeroshard.core.policy import ROWS
from zeroshard.planner.families import shape_of_config
from zeroshard.planner.modules import shape_of_module

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4}
GROUPED = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN_MOE = {**GROUPED, **EXPERTS, "num_experts": 6}
LATENT = {
    **SIZES, **EXPERTS, "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "n_routed_experts": 8,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
LLAMA4 = {**GROUPED, "head_dim": 16, "intermediate_size_mlp": 56, "num_local_experts": 4}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "llama with biases": ("LlamaConfig", {**GROUPED, "attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("LlamaConfig", {**GROUPED, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", GROUPED),
    "qwen2": ("Qwen2Config", GROUPED),
    "qwen3": ("Qwen3Config", {**GROUPED, "head_dim": 16}),
    "phi3": ("Phi3Config", {**GROUPED, "pad_token_id": 0, "eos_token_id": 1}),
    "gemma": ("GemmaConfig", {**GROUPED, "head_dim": 16}),
    "gemma2": ("Gemma2Config", {**GROUPED, "head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", {**GROUPED, "head_dim": 16}),
    "mixtral": ("MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeConfig", {**QWEN_MOE, "shared_expert_intermediate_size": 40}),
    "qwen2_moe, one dense layer": ("Qwen2MoeConfig", {**QWEN_MOE, "mlp_only_layers": [1]}),
    "qwen2_moe, no biases": ("Qwen2MoeConfig", {**QWEN_MOE, "qkv_bias": False}),
    "qwen3_moe": ("Qwen3MoeConfig", {**QWEN_MOE, "head_dim": 16}),
    "qwen3_moe, every other layer": ("Qwen3MoeConfig", {**QWEN_MOE, "decoder_sparse_step": 2}),
    "deepseek_v2": ("DeepseekV2Config", {**LATENT, "n_shared_experts": 2}),
    "deepseek_v2, q as it is": ("DeepseekV2Config", {**LATENT, "q_lora_rank": None}),
    "deepseek_v3": ("DeepseekV3Config", LATENT),
    "deepseek_v3 with biases": ("DeepseekV3Config", {**LATENT, "attention_bias": True}),
    "llama4": ("Llama4TextConfig", {**LLAMA4, "interleave_moe_layer_step": 2}),
    "llama4, named layers": ("Llama4TextConfig", {**LLAMA4, "moe_layers": [2]}),
    "gpt2": ("GPT2Config", {"vocab_size": 97, "n_embd": 32, "n_layer": 3, "n_head": 4}),
    "gpt_neox": ("GPTNeoXConfig", SIZES),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_json_gives_the_units_of_the_model_that_transformers_builds(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    class_name, sizes = FAMILIES[family]
    config = getattr(transformers, class_name)(**sizes)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    built = shape_of_module(model, zs.Training("fp32"))
    described = shape_of_config(json.loads(config.to_json_string(use_diff=False)), family)
    units = [
        [
            (unit.name, unit.uses, [shape for _, shape in unit.groups[0].shapes])
            for unit in shape.units
        ]
        for shape in (described, built)
    ]
    assert units[0] == units[1]
    assert built.decoder == described.decoder is not None
    assert described.numel == sum(parameter.numel() for parameter in model.parameters())


# ------------------------------------------------------------------ the command


def test_the_command_prints_the_contracts_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("--params", "7.5B", "--gpus", "64", "--precision", "bf16", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert {"model", "machine", "rows", "recommended"} <= set(plan)
    for row in plan["rows"]:
        assert set(row) == {
            "row", "tiers", "rest_bytes", "peak_bytes", "traffic_bytes", "step_s", "tokens_per_s",
            "fits", "bound_by", "parts", "checkpoint_bytes", "load_s", "save_s", "tp", "pp", "dp",
            "micro_batches", "stage", "axis_bytes", "bubble", "budget", "whole_gradients",
            "gpu_hours_per_billion_tokens",
        }  # fmt: skip
        assert set(row["parts"]) == {
            "states", "gathered", "gradients", "staging", "activations", "logits", "allowance",
        }  # fmt: skip
        assert set(row["checkpoint_bytes"]) == {"all", "rank"}
        assert set(row["save_s"]) == {"foreground", "background"}
        assert set(row["tiers"]) == {"weight", "grad", "optimizer"}
        assert set(row["rest_bytes"]) == set(row["peak_bytes"]) == {"device", "host", "disk"}
        assert set(row["traffic_bytes"]) == {"local", "node"}
    assert plan["recommended"]["row"] in {row["row"] for row in plan["rows"]}


def test_the_command_prints_the_papers_table(capsys: pytest.CaptureFixture[str]) -> None:
    papers = ("--precision", "bf16", "--accumulate", "bf16")  # gradients of 2 bytes
    assert run_plan("--params", "7.5B", "--gpus", "64", *papers) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rest = {line[0]: line[2] for line in lines if len(line) > 5 and line[1] == "-"}
    assert [rest[name] for name in ("ddp", "zero1", "zero2", "zero3")] == [
        "120", "31.4", "16.6", "1.88",
    ]  # fmt: skip


def test_a_gpu_without_bf16_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for precision, told in (("bf16", True), ("fp16", False)):
        assert run_plan("--params", "1B", "--gpu", "V100-32", "--precision", precision) == 0
        assert ("has no bf16" in capsys.readouterr().out) is told


FACTORY = """
import torch
from torch import nn

def small():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(4)))

class ConvLstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.Sequential(*(nn.Conv1d(16, 16, 3, padding=1) for _ in range(2)))
        self.lstm = nn.LSTM(16, 32, batch_first=True)

    def forward(self, x):
        return self.lstm(self.convs(x).transpose(1, 2))[0].sum()

def traced():
    return ConvLstm(), (torch.empty(4, 16, 20, device="meta"),)

def larger():
    return ConvLstm(), (torch.empty(4, 16, 2000, device="meta"),)

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return (self.weight * x).sum()

def scale():
    return Scale(), (torch.empty(4, 8),)

def broken():
    raise RuntimeError("no such\\nlayer")

def nothing():
    return 7
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module of factories in the current directory."""
    (tmp_path / "planned_factories.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "planned_factories", raising=False)
    return "planned_factories"


def test_a_factory_is_planned_in_the_runtimes_units(
    factories: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan("--model", f"{factories}:small", "--json") == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert (model["parameters"], model["units"]) == (4 * 72, 4)


def _planned(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[dict[str, Any], list[str]]:
    """Return the JSON of a plan, and the lines that the command prints."""
    assert run_plan(*argv, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert run_plan(*argv) == 0
    return plan, capsys.readouterr().out.splitlines()


def _notes(lines: list[str]) -> str:
    return " ".join(line for line in lines if line.startswith(("note", "model")))


def test_a_model_that_is_no_decoder_has_times_where_its_flops_were_counted(
    factories: str, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = []
    for name in ("ConvLstm", "traced", "larger", "scale"):
        plan, lines = _planned(capsys, "--model", f"{factories}:{name}", "--gpu", "CPU")
        (head,) = (line for line in lines if line.startswith("row "))
        rows, text = plan["rows"], "\n".join(lines)
        assert all(row["tokens_per_s"] is None for row in rows) and "tok/s" not in head
        is_timed = name in ("traced", "larger")
        assert all((row["step_s"] is not None) is is_timed for row in rows), name
        assert ("step" in head) is is_timed
        assert ("steps are without times" in _notes(lines)) is not is_timed
        assert ("peaks are without activations" in _notes(lines)) is (name == "ConvLstm")
        assert ("return (module, inputs)" in _notes(lines)) is (name == "ConvLstm")
        assert ("activations traced" in _notes(lines)) is (name != "ConvLstm")
        assert "tokens a step" not in text and plan["recommended"]["row"] is not None
        assert ("fastest" in plan["recommended"]["reason"]) is is_timed
        seconds += [rows[0]["step_s"]] if is_timed else []
    assert seconds[1] > 10 * seconds[0]


def test_a_sweep_and_stages_of_a_model_without_flops_say_so(
    factories: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan("--model", f"{factories}:ConvLstm", "--sweep", "gpus=1..4") == 2
    error = capsys.readouterr().err
    assert "the FLOPs of ConvLstm are not known" in error and "return (module, inputs)" in error
    assert run_plan("--model", f"{factories}:traced", "--sweep", "gpus=1..2") == 0
    assert "tokens" not in capsys.readouterr().out
    stages = ("--gpus", "2", "--pp", "2", "--micro-batches", "4")
    plan, lines = _planned(capsys, "--model", f"{factories}:traced", *stages)
    assert all(row["step_s"] is None and row["bubble"] == 0 for row in plan["rows"])
    assert "what was traced is not cut along tp and pp" in _notes(lines)


def test_sequences_are_no_longer_than_the_model_has_positions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 97, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    plan, lines = _planned(capsys, str(tmp_path))
    assert plan["training"]["sequence"] == 64 and "1 sequence(s) x 64 tokens a step" in "\n".join(
        lines
    )
    assert "sequences of 64 tokens, as many as it has positions" in _notes(lines)
    plan, lines = _planned(capsys, str(tmp_path), "--sequence", "32")
    assert plan["training"]["sequence"] == 32 and "positions" not in _notes(lines)
    for more in ((), ("--sweep", "gpus=1..2"), ("--gpus", "2", "--shares", "memory")):
        assert run_plan(str(tmp_path), "--sequence", "128", *more) == 2
        assert "longer than the 64 positions" in capsys.readouterr().err


def test_what_was_traced_with_token_ids_is_planned_for_as_many(
    factories: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = torch.zeros(3, 8, dtype=torch.int64, device="meta")
    plan = zs.plan(make_model(), zs.Machine.of("CPU"), inputs=(tokens, tokens))
    assert (plan.training.batch, plan.training.sequence) == (3, 8)
    for row in plan.rows:
        assert row.step_s is not None and row.tokens_per_s == pytest.approx(24 / row.step_s)
    assert all(row.step_s is None for row in zs.plan(make_model(), zs.Machine.of("CPU")).rows)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give one model"),
        (["--params", "7B", "--model", "a:b"], "give one model"),
        (["--params", "7"], "params='7' has no unit"),
        (["--params", "7B", "--gpu-memory", "32"], "gpu_memory='32' has no unit"),
        (["--params", "7B", "--gpu", "H10"], "did you mean 'H100'?"),
        (["--params", "7B", "--gpus", "0"], "gpus=0 is less than one"),
        (["--params", "7B", "--gpus", "many"], "invalid int value"),
        (["--params", "7B", "--this-machine", "--gpu", "H100"], "leave --gpu out"),
        (["--params", "7B", "--this-machine", "--host-memory", "1TB"], "leave --host-memory out"),
        (["--params", "7B", "--gpus", "8", "--node-size", "3"], "node_size=3 does not divide"),
        (["planned_factories.py"], "is not a Transformers config.json"),
        (["not_there.json"], "cannot be read"),
        (["--model", "planned_factories"], "is not of the form package.module:factory"),
        (["--model", "planned_factories:broken"], "RuntimeError: no such layer"),
        (["--model", "planned_factories:nothing"], "an nn.Module, not a int"),
        (["--model", "no_such_module:f"], "ModuleNotFoundError"),
        (["--params", "7B", "--gpuz", "8"], "--gpuz"),
        (["--params", "7B", "--comm", "int8"], "--comm 'int8' is not KEY=VALUE"),
        (["--params", "7B", "--comm", "codec_block=x"], "codec_block takes no 'x'"),
        (["--params", "7B", "--comm", "frozen_codec=int8"], "frozen_codec='int8' has no effect"),
        (["--params", "7B", "--fraction", "2"], "fraction=2.0 is not in (0, 1]"),
        (["--params", "7B", "--fraction", "auto"], "'auto' is found by measuring steps"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(
    factories: str, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan(*argv) == 2
    seen = capsys.readouterr()
    assert seen.out == "" and seen.err.count("\n") == 1 and message in seen.err


def test_the_help_fits_a_screen_and_its_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan("--help") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 50
    examples = [line.split()[2:] for line in lines if line.startswith("  zeroshard plan ")]
    assert len(examples) == 2
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    for argv in examples:
        assert run_plan(*argv) == 0
    assert zs.Config.read("zero.json").resolved_policy().name in ROWS


def test_a_written_configuration_shards_a_model(
    factories: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "zero.json"
    assert run_plan("--model", f"{factories}:small", "--gpu", "CPU", "--write", str(path)) == 0
    model = nn.Sequential(nn.Linear(8, 8))
    engine = zs.shard(model, torch.optim.AdamW(model.parameters()), config=path)
    assert engine.policy.name == json.loads(path.read_text())["policy"]
    engine.close()


def test_a_model_with_integer_parameters_is_refused_by_the_parameters_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    whole = torch.zeros(8, 8, dtype=torch.int8)
    model[0].weight = torch.nn.Parameter(whole, requires_grad=False)
    with pytest.raises(zs.ConfigError, match=r"'0\.weight' is torch\.int8"):
        zs.plan(model, zs.Machine.of("CPU"))


def test_a_configuration_with_codecs_and_a_fraction_shards_a_model() -> None:
    training = zs.Training(
        checkpointing=True,
        weight_codec="int8",
        grad_codec="int4",
        error_feedback=True,
        fraction=0.75,
    )
    plan = zs.plan("7.5B", zs.Machine.of(gpus=1), training)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    engine = zs.shard(model, optimizer, config=plan.config())
    for _ in range(2):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    tiers = engine.memory().tiers
    engine.close()
    assert set(tiers["optimizer"]) == {"device", "host"}


def test_the_table_fits_eighty_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_plan("--params", "100B", "--gpus", "64", "--disk", "20TB") == 0
    lines = capsys.readouterr().out.splitlines()
    (head,) = (number for number, line in enumerate(lines) if line.startswith("row "))
    assert {"node", "disk", "step", "tok/s", "fits"} <= set(lines[head].split())
    table = lines[head : lines.index("", head)]
    assert len(table) >= 2 + 16 and max(map(len, table)) <= 80
    assert not any("…" in line for line in table)
    words = [line.split()[0] for line in lines[lines.index("", head) + 1 :]]
    assert words == ["take", "peak", "save", "smaller"]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--gpus", "8"], True),
        (["--gpus", "8", "--micro-batches", "2"], False),
        (["--gpu-memory", "80GiB,60GiB"], True),
    ],
    ids=["one micro-batch", "two", "unequal GPUs"],
)
def test_a_peak_below_what_rests_is_explained(
    argv: list[str], told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan("--params", "7B", *argv) == 0
    out = capsys.readouterr().out
    assert ("a rest above the peak counts whole gradients" in out) is told
    below = [line.split() for line in out.splitlines() if line.startswith("zero1      -   ")]
    if told and len(argv) == 2 and argv[0] == "--gpus":
        assert float(below[0][3]) < float(below[0][2])


def test_a_checkpoint_is_timed_where_a_disk_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for disk, told in (((), False), (("--disk", "4TB"), True)):
        assert run_plan("--params", "1B", "--gpus", "8", *disk) == 0
        (line,) = (one for one in capsys.readouterr().out.splitlines() if one.startswith("save"))
        assert "in the background" in line and ("; load" in line or ", load" in line)
        assert ("timed with a --disk" in line) is not told


def test_nothing_that_fits_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "zero.json"
    assert run_plan("--params", "5T", "--write", str(path)) == 1
    seen = capsys.readouterr()
    assert "change" in seen.out or "none" in seen.out
    assert seen.err.count("\n") == 1 and "nothing fits" in seen.err and not path.exists()
    for other in (("--json",), ("--gpus", "2", "--shares", "memory"), ("--sweep", "gpus=1..2")):
        assert run_plan("--params", "5T", *other) == 1


def test_a_config_of_70b_is_planned_without_torch(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    sizes |= {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    program = (
        "import atexit, sys\n"
        "from zeroshard.launch.cli import main\n"
        "atexit.register(lambda: print('modules:', *sys.modules))\n"
        f"sys.exit(main(['plan', {str(tmp_path)!r}, '--gpus', '64', '--json']))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert answer.returncode == 0, answer.stderr
    text, _, modules = answer.stdout.rpartition("modules:")
    assert json.loads(text)["model"]["parameters"] == 70_553_706_496  # Llama-3-70B's
    assert not {"torch", "numpy", "pydantic"} & set(modules.split())


def test_a_module_a_number_and_a_path_are_planned_from_python(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    machine = zs.Machine.of("A100-80", gpus=8)
    for model in ("1.5B", tmp_path, str(tmp_path / "config.json"), make_model()):
        plan = zs.plan(model, machine, zs.Training(batch=2))
        assert plan.recommended.row is not None and plan.machine is machine
    with pytest.raises(zs.ConfigError, match="nothing to plan"):
        zs.plan(nn.ReLU())
    with zs.deferred_init():
        deferred = make_model()
    assert zs.plan(deferred).model == zs.plan(make_model()).model
