"""Other axes in a plan: how models are cut, what pipelines wait for, what activations take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zeroshard.core.pipeline_orders import PipelineOrder
from zeroshard.core.policy import ROWS
from zeroshard.core.timeline import LaneTask
from zeroshard.errors import ConfigError
from zeroshard.planner import Axes, Machine, ModelShape, Training, describe, make_plan
from zeroshard.planner.axes import Grid, cut_stages, cut_tensors, grids
from zeroshard.planner.durations import TensorParallel, activation_bytes
from zeroshard.planner.exact import LaidOut, staged_routes
from zeroshard.planner.families import FAMILIES, shape_of_config
from zeroshard.planner.grid import GridPlan
from zeroshard.planner.peak import layer_bytes
from zeroshard.planner.pipeline_time import Pipeline, PipelineTime, StageWork

_LLAMA = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 10, "num_attention_heads": 16, "num_key_value_heads": 8,
    "vocab_size": 32000,
}  # fmt: skip


def _llama(**fields: Any) -> ModelShape:
    return shape_of_config({**_LLAMA, **fields}, "llama")


# ------------------------------------------------------------------------------------ bubbles


def _work(forward: float, backward: float) -> StageWork:
    seconds = {"F": forward, "B": backward, "I": backward / 2, "W": backward / 2}
    compute = {kind: LaneTask("compute", kind, value) for kind, value in seconds.items()}
    nothing = {"forward": None, "backward": None}
    return StageWork(compute, (0, 0, 0), nothing, None, (None, None, None), None, 0, 0, 0.0)


def _free(text: str, ranks: int, micro_batches: int) -> PipelineTime:
    """Return a step of even stages of one second forward and two backward, of free sends."""
    schedule = PipelineOrder.parse(text)
    stages = ranks * schedule.chunks
    work = _work(1 / schedule.chunks, 2 / schedule.chunks)
    links = ["local"] * (stages - 1)
    sends = [0.0] * (stages - 1)
    return Pipeline(schedule, ranks, micro_batches, [work] * stages, sends, links).time()


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 7), (4, 8), (8, 64)])
def test_bubbles_are_those_of_the_papers_where_communication_is_free(
    ranks: int, micro_batches: int
) -> None:
    """arXiv 2104.04473, sections 2.2.1 and 2.2.2: (p - 1) / (v m + p - 1) of the step."""
    depth = ranks - 1
    plain = depth / (micro_batches + depth)
    assert _free("gpipe", ranks, micro_batches).bubble == pytest.approx(plain)
    assert _free("1f1b", ranks, micro_batches).bubble == pytest.approx(plain)
    if micro_batches % ranks == 0:
        half = depth / (2 * micro_batches + depth)
        assert _free("interleaved", ranks, micro_batches).bubble == pytest.approx(half)


def test_schedules_that_were_made_for_smaller_bubbles_have_smaller_ones() -> None:
    names = ("zb", "interleaved:4", "interleaved", "1f1b")
    zb, four, two, plain = (_free(name, 4, 16).bubble for name in names)
    assert four < two < plain and zb < plain
    # of F, I and W of a second each, ZB-H1 leaves a third of 1F1B's (arXiv 2401.10241, table 1)
    assert zb * _free("zb", 4, 16).total == pytest.approx(3.0)


def test_many_rounds_are_as_long_as_if_all_had_been_run() -> None:
    schedule, works = PipelineOrder(), [_work(1.0, 2.0), _work(1.5, 2.5), _work(1.0, 2.0)]
    run = Pipeline(schedule, 3, 31, works, [0.3, 0.1], ["local", "network"])
    all_of_them, time = run._run(31), run.time()
    assert time.total == pytest.approx(all_of_them.total)
    assert time.bubble == pytest.approx(all_of_them.bubble)


def test_a_step_passes_computing_or_waiting() -> None:
    plan = _plan(Grid(2, 4, 2, PipelineOrder(), 8), network="5GB")
    for row in ("ddp", "zero1", "zero3", "hpz"):
        time = plan.pipeline_time(ROWS[row])
        for rank in time.ranks:
            parts = rank.computing + rank.bubble + rank.exposed
            assert parts == pytest.approx(time.total)
            assert sum(rank.shares.values()) == pytest.approx(time.total)
        assert time.total >= plan.least_s


def test_gathers_that_are_hidden_expose_only_the_first() -> None:
    """Weights stay gathered over a stage's micro-batches: more of them expose nothing more."""
    exposed = []
    for micro_batches in (8, 32):
        plan = _plan(Grid(1, 4, 4, PipelineOrder(), micro_batches), grad_tier=False)
        exposed.append(plan.pipeline_time(ROWS["zero3"]).ranks[0].exposed)
    assert 0 < exposed[0] == pytest.approx(exposed[1], rel=0.2)


def _plan(grid: Grid, *, grad_tier: bool = True, **machine: Any) -> GridPlan:
    gpus = grid.tp * grid.pp * grid.dp
    return GridPlan(grid, _llama(), Machine.of("A100-80", gpus=gpus, **machine), Training(batch=4))


# ------------------------------------------------------------------------------------ cuts


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("stages", [1, 3, 10])
def test_stages_and_parts_are_the_model(stages: int, tp: int) -> None:
    model = _llama()
    parts = [cut_tensors(stage, tp) for stage in cut_stages(model, stages)]
    layers = [part.decoder.layers for part in parts if part.decoder]
    assert sum(layers) == 10 and max(layers) - min(layers) <= 1
    norms = 10 * 2 * 1024 + 1024  # on every rank along tp
    assert tp * sum(part.numel for part in parts) == model.numel + (tp - 1) * norms
    assert [bool(part.decoder and part.decoder.vocab) for part in parts].count(True) == 1


def test_a_tied_embedding_is_two_in_a_pipeline() -> None:
    model = _llama(tie_word_embeddings=True)
    first, last = cut_stages(model, 2)
    assert model.units[0].uses == 2 and first.units[0].uses == 1
    assert first.numel + last.numel == model.numel + 32000 * 1024


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_rules_of_how_it_is_cut(family: str) -> None:
    fields = {
        "model_type": family, "n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 128,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_local_experts": 4, "n_positions": 16, "num_experts": 4,
        "n_routed_experts": 4, "moe_intermediate_size": 64, "intermediate_size_mlp": 96,
        "shared_expert_intermediate_size": 96, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 16,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    }  # fmt: skip
    model = shape_of_config(fields, family)
    part = cut_tensors(model, 4)
    assert model.numel / 4 < part.numel < 0.35 * model.numel
    assert len(part.units) == len(model.units)


def test_experts_are_cut_along_their_inner_size_however_they_lie() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 4, "head_dim": 16,
             "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
             "vocab_size": 128}  # fmt: skip
    for family, whole in (("mixtral", [(4, 192, 64), (4, 64, 96)]),
                          ("llama4_text", [(4, 64, 192), (4, 96, 64)])):  # fmt: skip
        model = shape_of_config({"model_type": family, **sizes}, family)
        seen = [
            [shape for name, shape in part.units[1].groups[0].shapes if ".experts." in name]
            for part in (model, cut_tensors(model, 4))
        ]
        inner = {96: 24, 192: 48}
        assert seen[0] == whole
        assert seen[1] == [tuple(inner.get(size, size) for size in shape) for shape in whole]


def test_a_matrix_without_a_rule_is_refused_by_name() -> None:
    model = _llama()
    unit = model.units[1]
    group = replace(unit.groups[0], shapes=(("model.layers.0.odd.weight", (8, 8)),))
    odd = replace(model, units=(model.units[0], replace(unit, groups=(group,))))
    with pytest.raises(ConfigError, match=r"tp=2: no rule says how .*layers\.0\.odd\.weight"):
        cut_tensors(odd, 2)


# ------------------------------------------------------------------------------------ memory


def test_the_peak_of_a_pipeline_is_that_of_the_stage_that_holds_most() -> None:
    training = Training(batch=8)
    machine = Machine.of(gpus=4)
    peaks = {}
    for name in ("1f1b", "gpipe"):
        plan = GridPlan(Grid(1, 4, 1, PipelineOrder(name), 16), _llama(), machine, training)
        worst = plan.worst(ROWS["zero1"])
        assert worst.rank == 0
        decoder = plan.stages[0].decoder
        assert decoder is not None
        held = 3 * layer_bytes(decoder, plan.training)  # of a micro-batch, by 3 layers
        peaks[name] = worst.peak.parts["activations"] / held
    # 1F1B: as many micro-batches as stages; GPipe: all
    assert peaks == {"1f1b": pytest.approx(4, rel=0.1), "gpipe": pytest.approx(16, rel=0.1)}


def test_tensor_parallelism_divides_what_a_layer_keeps_but_its_inputs() -> None:
    training = Training()
    whole, part = _llama().decoder, cut_tensors(_llama(), 8).decoder
    assert whole is not None and part is not None
    inputs = 4 * 1024 * training.tokens * 2  # of norms and of what follows them
    cut = layer_bytes(whole, training) - inputs
    assert layer_bytes(part, training) == inputs + cut // 8


# ------------------------------------------------------------------------------------ traffic


def test_bytes_of_an_axis_are_the_sum_over_its_routes() -> None:
    plan = _plan(Grid(2, 2, 4, PipelineOrder(), 6))
    training, one = plan.training, activation_bytes(_llama(), plan.training)
    for rank in (0, 1):
        for row in ("ddp", "zero2", "zero3"):
            by_axis = plan.axis_bytes(rank, plan.traffic(rank, ROWS[row]))
            gathers = (1, 0) if row == "zero3" else (0, 0)  # it stays from F to B
            laid_out = LaidOut(plan.stages[rank], plan.share.mesh, training.align)
            routes = staged_routes(laid_out, ROWS[row], training, gathers)
            moved = sum(route.bytes(group.layout.numel).total * group.count
                        for group, _, route in routes)  # fmt: skip
            assert by_axis["dp"] == round(moved)
            assert by_axis["pp"] == 6 * one
            # two all-reduces of 5 layers either way, and one of the embedding or the head; between
            # two ranks each moves its size once
            assert by_axis["tp"] == 6 * (4 * 5 + 1) * one


def test_recomputing_repeats_the_all_reduces_of_the_forward() -> None:
    tensor = TensorParallel(4, is_first=False, is_last=False)
    assert tensor.all_reduces(3, Training()) == (6, 6)
    assert tensor.all_reduces(3, Training(checkpointing=True)) == (6, 12)
    assert tensor.received(1000) == 1500


# ------------------------------------------------------------------------------------ grids


def test_a_search_considers_what_the_machine_and_the_heads_allow() -> None:
    machine = Machine.of(gpus=32)
    found = grids(Axes("auto", "auto"), _llama(num_key_value_heads=4), machine, Training())
    assert {one.tp for one in found} == {1, 2, 4}
    assert {one.pp for one in found} == {
        1,
        2,
        4,
    }  # of 8 stages some have twice as many layers
    assert all(one.tp * one.pp * one.dp == 32 for one in found)
    assert all(one.micro_batches == one.tp * one.pp for one in found)


def test_a_share_is_the_part_of_a_node_that_one_stage_has() -> None:
    machine = Machine.of(gpus=32)
    inside = Grid(2, 4, 4, PipelineOrder(), 4).share(machine)  # a stage is a node
    assert (inside.mesh.num_nodes, inside.node_size) == (1, 4)
    assert inside.host_memory == machine.host_memory // 2
    over = Grid(8, 1, 4, PipelineOrder(), 4).share(machine)
    assert (over.mesh.num_nodes, over.node_size) == (4, 1)
    near = Grid(2, 8, 2, PipelineOrder(), 8)  # two stages in a node
    assert [near.is_near(machine, rank) for rank in range(4)] == [True, False, True, False]


def test_a_model_that_fits_no_gpu_is_found_a_grid_that_fits() -> None:
    machine = Machine.of("A100-40", gpus=16, network="1GB")
    plan = make_plan(describe("6B"), machine, Training(checkpointing=True),
                     axes=Axes("auto", "auto"))  # fmt: skip
    best = plan.recommended.row
    assert best is not None and best.spread.tp > 1
    assert best.step_s == min(row.step_s for row in plan.rows if row.fits)
    assert "data parallel ranks alone" in plan.recommended.reason
