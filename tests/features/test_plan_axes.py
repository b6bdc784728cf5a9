"""``zeroshard plan --tp --pp``: bytes at rest and on the wire are those of engines that have a
stage, or a part of every layer; what cannot be planned is refused in one line.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support import inside, pipelines
from tests.support.harness import run_ranks
from tests.support.pipelines import mesh_of, piped, whole
from tests.support.plan_command import run_plan
from zeroshard.core.pipeline_orders import PipelineOrder
from zeroshard.core.policy import ROWS
from zeroshard.planner.axes import Grid, cut_stages, cut_tensors
from zeroshard.planner.exact import LaidOut, rest_bytes
from zeroshard.planner.families import shape_of_config
from zeroshard.planner.grid import GridPlan
from zeroshard.planner.modules import shape_of_module

SCHEDULES = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved": "Interleaved1F1B", "zb:2":
    "InterleavedZeroBubble",
}  # fmt: skip
BARE = ("ddp", "zero1", "zero2", "zero3", "zero3-keep")
SIZES = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 100,
}  # fmt: skip
LLAMA_70B = {
    "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
    "vocab_size": 128256,
}  # fmt: skip


# ------------------------------------------------------------------ bytes of engines


def _differences(rank: int, world: int, name: str, rows: list[str]) -> list[Any]:
    """Return, of every row, what the plan and this rank's engine say otherwise."""
    mesh, training = mesh_of(), zs.Training("fp32", micro_batches=4)
    pipelines.LAYERS = 8  # two a stage: of one layer, shard() cuts other units
    grid = Grid(1, 2, 2, PipelineOrder.parse(name), 4)
    plan = GridPlan(grid, shape_of_module(whole(), training), zs.Machine.of("CPU", gpus=4),
                    training)  # fmt: skip
    out: list[Any] = []
    for row in rows:
        policy, pp = ROWS[row], mesh.get_local_rank("pp")
        own = piped(mesh, SCHEDULES[name], row, budget=plan.budget(policy) or None)
        for step in range(2):  # the first one also sets up what later ones find
            inside.wait_published(own.engine)
            own.engine.reset_traffic()
            own.train(1, 8, first=step)
        inside.wait_published(own.engine)
        report = own.engine.traffic()
        with own.engine.no_sync():
            own.run(9, 8)
        tiers = {state: by for state, by in own.engine.memory().tiers.items() if by}
        dp = own.engine.rank
        own.engine.close()

        rest = rest_bytes(plan.ranks[pp], policy, plan.training, dp)
        planned = {s: {t.value: n for t, n in by.items()} for s, by in rest.items() if by}
        payload = report.total - report.bytes.get("exchange", 0)
        routes = plan.axis_bytes(pp, plan.traffic(pp, policy))["dp"]
        out += [
            (row, *pair) for pair in ((planned, tiers), (routes, payload)) if pair[0] != pair[1]
        ]
    return out


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
def test_counted_bytes_of_a_pipeline_are_the_sum_over_its_routes(name: str) -> None:
    assert run_ranks(4, _differences, name, ["zero1", "zero3"], timeout=100) == [[]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_row_and_schedule_is_planned_to_the_byte(name: str) -> None:
    assert run_ranks(4, _differences, name, list(BARE), timeout=280) == [[]] * 4


def test_parameters_of_a_tensor_parallel_rank_are_those_of_torchs_dtensors() -> None:
    """Cut by hand as ``ColwiseParallel`` and ``RowwiseParallel`` cut, and sharded."""
    shape = shape_of_config(SIZES, "tiny")
    local = cut_tensors(shape, 4)
    sizes = {name: size for unit in local.units for group in unit.groups
             for name, size in group.shapes}  # fmt: skip
    block = "model.layers.0."
    assert sizes[f"{block}self_attn.q_proj.weight"] == (16, 64)
    assert sizes[f"{block}self_attn.k_proj.weight"] == (8, 64)
    assert sizes[f"{block}self_attn.o_proj.weight"] == (64, 16)
    assert sizes[f"{block}mlp.down_proj.weight"] == (64, 24)
    assert sizes[f"{block}input_layernorm.weight"] == (64,)
    assert sizes["model.embed_tokens.weight"] == sizes["lm_head.weight"] == (25, 64)

    model = nn.Module()
    blocks = nn.ModuleList(_block(sizes, f"model.layers.{number}.") for number in range(4))
    model.embed = nn.Embedding(25, 64)
    model.layers = blocks
    model.norm, model.head = nn.RMSNorm(64), nn.Linear(64, 25, bias=False)
    engine = zs.shard(model, torch.optim.AdamW(model.parameters()), policy="zero3")
    assert [unit.numel for unit in local.units] == [unit.numel for unit in
            shape_of_module(model, zs.Training("fp32")).units]  # fmt: skip
    held = engine.memory().tiers["weight"]["device"]
    engine.close()
    laid_out = LaidOut(local, Grid(4, 1, 1, PipelineOrder(), 1).share(zs.Machine.of(gpus=4)).mesh)
    rest = rest_bytes(laid_out, ROWS["zero3"], zs.Training("fp32"))
    assert sum(rest["weight"].values()) == held


def _block(sizes: dict[str, tuple[int, ...]], prefix: str) -> nn.Module:
    out = nn.Module()
    for name, size in sizes.items():
        if name.startswith(prefix):
            holder = nn.Module()
            holder.weight = nn.Parameter(torch.zeros(size))
            out.add_module(name.removeprefix(prefix).replace(".", "_"), holder)
    return out


# ------------------------------------------------------------------ the command


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SIZES))
    return str(file)


def test_a_row_says_how_its_ranks_are_spread(tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [tiny, "--gpus", "16", "--tp", "2", "--pp", "2", "--micro-batches", "4"]
    assert run_plan(*argv, "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["axes"] == {"tp": 2, "pp": 2, "schedule": None}
    assert {(row["tp"], row["pp"], row["dp"]) for row in plan["rows"]} == {(2, 2, 4)}
    assert {"ddp", "zero1", "zero2", "zero3"} <= {row["row"] for row in plan["rows"]}
    row = plan["rows"][0]
    assert set(row["axis_bytes"]) == {"dp", "tp", "pp"} and 0 < row["bubble"] < 1
    activations = 2048 * 64 * 2
    assert row["axis_bytes"]["pp"] == 4 * activations  # a gradient of each micro-batch, or an input
    # an all-reduce moves once its size between two ranks: 2 layers of 2 + 2, and one at the end
    assert row["axis_bytes"]["tp"] == 4 * 9 * activations
    assert sum(row["traffic_bytes"].values()) == row["axis_bytes"]["dp"]
    assert plan["recommended"]["pp"] == 2
    assert run_plan(*argv) == 0
    text = capsys.readouterr().out
    assert "take      tp 2 x pp 2 x dp 4, " in text and "bubble" in text


def test_a_search_names_the_best_grids_and_says_how_data_parallel_ranks_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    argv = [str(tmp_path), "--gpus", "1024", "--sequence", "8192", "--tp", "auto", "--pp", "auto"]
    argv += ["--checkpointing", "--network", "2GB", "--json"]
    begin = time.process_time()
    assert run_plan(*argv) == 0
    assert time.process_time() - begin < 8  # under 2 on a quiet machine
    plan = json.loads(capsys.readouterr().out)
    grids = [(row["tp"], row["pp"], row["dp"]) for row in plan["rows"]]
    assert len(set(grids)) == len(grids) >= 8 and (1, 1, 1024) in grids
    assert all(tp * pp * dp == 1024 for tp, pp, dp in grids)
    # a step has the same tokens everywhere, so that steps can be compared
    assert {round(row["step_s"] * row["tokens_per_s"]) for row in plan["rows"]} == {1024 * 8192}
    steps = [row["step_s"] for row in plan["rows"] if row["fits"]]
    assert steps == sorted(steps)
    best = plan["rows"][0]
    assert best["tp"] > 1, "a slow network is what tensor parallelism inside nodes is for"
    assert "times as long" in plan["recommended"]["reason"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--gpus", "8", "--tp", "3"], "tp=3 does not divide gpus=8"),
        (["--gpus", "8", "--tp", "8"], "tp=8 does not divide the 4 key-value heads of llama"),
        (["--gpus", "8", "--tp", "4", "--pp", "4"], "tp=4 x pp=4 takes 16 GPUs: there are 8"),
        (["--gpus", "8", "--pp", "8"], "pp=8 makes 8 stages: llama has 4 layers"),
        (["--gpus", "4", "--pp", "4", "--schedule", "interleaved"], "pp=4 makes 8 stages"),
        (["--gpus", "2", "--pp", "2"], "as many micro-batches as stages"),
        (["--gpus", "2", "--schedule", "zb"], "schedule='zb' has no effect without a pipeline"),
        (["--gpus", "2", "--pp", "2", "--schedule", "x"], "schedule='x' is not one of 1f1b"),
        (["--gpus", "2", "--tp", "0"], "tp=0 is neither a number of ranks nor 'auto'"),
        (["--gpus", "2", "--pp", "some"], "pp='some' is neither a number of ranks nor 'auto'"),
        (["--sweep", "gpus=8..16", "--tp", "2"], "leave --tp out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_axes_that_cannot_be_are_one_line_and_exit_code_2(
    tiny: str, argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan(tiny, *argv) == 2
    seen = capsys.readouterr()
    assert seen.out == "" and seen.err.count("\n") == 1 and message in seen.err


def test_tensor_parallelism_over_nodes_is_planned_and_called_slow(
    tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [tiny, "--gpus", "8", "--node-size", "2", "--json", "--tp"]
    steps = []
    for tp in ("2", "4"):
        assert run_plan(*argv, tp) == 0
        steps.append(json.loads(capsys.readouterr().out)["rows"][0]["step_s"])
    assert steps[1] > 1.5 * steps[0]
    assert run_plan(tiny, "--gpus", "8", "--node-size", "2", "--tp", "4") == 0
    assert "tp 4 does not fit in a node of 2" in capsys.readouterr().out


def test_a_module_is_planned_in_stages_from_python() -> None:
    machine = zs.Machine.of("A100-80", gpus=8)
    training = zs.Training(micro_batches=8)
    plan = zs.plan(whole(), machine, training, axes=zs.Axes(pp=2, schedule="zb"))
    assert {one.spread.dp for one in plan.rows} == {4}
    assert plan.config()["policy"] in ROWS
    with pytest.raises(zs.ConfigError, match="needs a decoder's sizes"):
        zs.plan(whole(), machine, training, axes=zs.Axes(tp=2))
    stages = cut_stages(plan.model, 2)
    assert sum(stage.numel for stage in stages) == plan.model.numel
