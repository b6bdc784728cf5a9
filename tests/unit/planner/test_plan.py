"""The plan: properties of its bytes, and what it recommends (test_published.py: the papers)."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroshard.config import Config, build_config
from zeroshard.core.placement import Mesh, Tier
from zeroshard.core.policy import ROWS, Policy, row
from zeroshard.core.precision import Precision
from zeroshard.errors import ConfigError
from zeroshard.planner import Axes, Machine, Plan, Training, describe, make_plan
from zeroshard.planner.durations import checkpoint_bytes
from zeroshard.planner.exact import LaidOut, rest_bytes, traffic_bytes
from zeroshard.planner.families import read_model, shape_of_config
from zeroshard.planner.machine import nearest_preset
from zeroshard.planner.model import GroupShape, ModelShape, UnitShape
from zeroshard.planner.peak import Playback, closed_form, layer_bytes, logit_bytes, peak_bytes
from zeroshard.planner.plan import Search
from zeroshard.planner.replay import TransportTraits
from zeroshard.planner.rows import PlannedRow, candidates, plan_row

LLAMA = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}


def test_a_hundred_billion_need_over_a_terabyte_for_adams_states_alone() -> None:
    plan = make_plan(describe("100B"), Machine.of(), Training())
    assert plan.to_dict()["model"]["states_bytes"]["optimizer"] == 12 * 100 * 10**9


def test_seventy_billion_parameters_of_a_config_are_counted() -> None:
    assert shape_of_config(LLAMA, "config").numel == 68_976_648_192  # Llama-2-70B's


@given(st.integers(1, 10**13))
def test_a_described_model_has_exactly_the_parameters_it_was_asked_for(numel: int) -> None:
    text = f"{numel // 1000}.{numel % 1000:03d}K"
    assert describe(text).numel == numel


def _small(shapes: list[tuple[int, ...]], trained: bool = True) -> ModelShape:
    units = [
        UnitShape(f"u{number}", (GroupShape(((f"u{number}.w", shape),), trained=trained),))
        for number, shape in enumerate(shapes)
    ]
    return ModelShape("small", tuple(units))


_SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(2, 40)), min_size=1, max_size=4)


@settings(deadline=None)
@given(_SHAPES, st.integers(1, 3), st.integers(1, 4), st.sampled_from(list(ROWS)))
def test_ranks_together_hold_each_sharded_state_once_for_each_copy(
    shapes: list[tuple[int, int]], nodes: int, local: int, name: str
) -> None:
    mesh, training = Mesh(nodes, local), Training("bf16", "bf16")
    laid_out, cells = LaidOut(_small(list(shapes)), mesh), row(name).default
    ranks = [rest_bytes(laid_out, row(name), training, rank) for rank in range(mesh.size)]
    padded = sum(one.layout.numel * one.count for one in laid_out.groups)
    numel = laid_out.model.numel
    for state, cell, whole in (
        ("weight", cells.weight, 2 * padded),
        ("master", cells.optim, 4 * padded),
        ("grad", cells.grad, 2 * padded),
        ("optimizer", cells.optim, 8 * numel),
    ):
        held = sum(rank[state].get(Tier.DEVICE, 0) for rank in ranks)
        copies = mesh.size // cell.num_shards(mesh)
        # pieces of a single element are not counted: at most one per cut; and a gradient of
        # padding alone is gone at once
        missing = {"optimizer": 8 * mesh.size * len(shapes), "grad": 2 * (padded - numel) * copies}
        assert 0 <= whole * copies - held <= missing.get(state, 0)


@settings(deadline=None)
@given(_SHAPES, st.integers(1, 3), st.integers(1, 4), st.sampled_from(list(ROWS)))
def test_bytes_are_the_policys_closed_forms_but_for_padding(
    shapes: list[tuple[int, int]], nodes: int, local: int, name: str
) -> None:
    mesh, training = Mesh(nodes, local), Training("bf16", "bf16", micro_batches=3)
    laid_out, policy = LaidOut(_small(list(shapes)), mesh), row(name)
    padded = sum(one.layout.numel * one.count for one in laid_out.groups)
    precision = Precision("bf16", accumulate="bf16")
    formula = policy.bytes_at_rest(
        "between_micro_batches", numel=padded, mesh=mesh, precision=precision
    )
    rest = rest_bytes(laid_out, policy, training)
    for state in ("weight", "master", "grad"):
        assert sum(rest[state].values()) == getattr(formula, state), state
    links = policy.wire_bytes(
        numel=padded,
        mesh=mesh,
        wires=training.formats(None).wires,
        micro_batches=3,
        no_sync=True,
    ).links
    seen = traffic_bytes(laid_out, policy, training)
    assert (seen.inside, seen.between) == pytest.approx((links.inside, links.between))


def test_frozen_weights_have_no_other_state_and_send_no_gradients() -> None:
    laid_out = LaidOut(_small([(64, 64)], trained=False), Mesh(1, 4))
    assert rest_bytes(laid_out, row("zero3"), Training()) == {
        "weight": {Tier.DEVICE: 2 * 64 * 64 // 4}, "master": {}, "grad": {}, "residual": {},
        "optimizer": {},
    }  # fmt: skip
    assert traffic_bytes(laid_out, row("zero1"), Training()).total == 0
    # a backward comes to no frozen unit before all that is trained
    both = replace(laid_out.model, units=(*_small([(64, 64)]).units, *laid_out.model.units))
    alone = LaidOut(_small([(64, 64)]), Mesh(1, 4))
    gather = 2 * 64 * 64 * 3 / 4
    seen = traffic_bytes(LaidOut(both, Mesh(1, 4)), row("zero3"), Training()).total
    assert seen == traffic_bytes(alone, row("zero3"), Training()).total + 2 * gather


@settings(deadline=None)
@given(
    _SHAPES,
    st.integers(1, 4),
    st.floats(0.01, 1.0),
    st.sampled_from(["zero1", "zero2", "zero3"]),
    st.sampled_from([None, "int8"]),
)
def test_a_fraction_moves_bytes_and_adds_none_but_masters(
    shapes: list[tuple[int, int]], ranks: int, fraction: float, name: str, codec: str | None
) -> None:
    whole = Training(precision="fp32", grad_codec=codec)
    policy = row(name).tiered(Tier.DEVICE, Tier.DEVICE, Tier.HOST)
    laid_out = LaidOut(_small(list(shapes)), Mesh(1, ranks), whole.align)
    here, part, away = (
        rest_bytes(laid_out, one, replace(whole, fraction=share))
        for one, share in ((row(name), 1.0), (policy, fraction), (policy, 1.0))
    )
    units = laid_out.by_unit
    held = [one.held(row(name).default.optim, 0) for unit in units for one in unit]
    moved = round(fraction * sum(held) / whole.align) * whole.align  # elements, in blocks
    for state in ("weight", "grad", "residual"):
        assert here[state] == part[state] == away[state], state
    # where it stays, a master is the weight
    assert part["master"].get(Tier.HOST, 0) == 4 * moved
    assert part["master"].get(Tier.DEVICE, 0) == 0
    assert part["optimizer"].get(Tier.HOST, 0) <= 8 * moved


def test_eight_bit_moments_are_a_byte_each_and_a_maximum_per_block() -> None:
    training = Training(optimizer="adam-8bit")
    assert training.state_bytes(4095) == 4095 * 8  # small tensors stay fp32
    assert training.state_bytes(4096) == 2 * (4096 + 4 * 16)
    assert training.state_bytes(4097) == 2 * (4097 + 4 * 17)
    laid_out = LaidOut(_small([(64, 128)]), Mesh(1, 2))
    rest = rest_bytes(laid_out, row("zero3"), training)
    assert rest["optimizer"] == {Tier.DEVICE: 2 * (4096 + 4 * 16)}
    saved = checkpoint_bytes(laid_out, training)
    assert saved == 2 * checkpoint_bytes(laid_out, training, 1) == 4 * 8192 + 2 * (8192 + 4 * 32)


def test_the_parts_of_a_peak_are_its_total() -> None:
    for training in (Training(), Training(fraction=0.5, grad_codec="int4", error_feedback=True)):
        plan = make_plan(describe("7.5B"), Machine.of(gpus=16, disk="20TB"), training)
        for one in plan.rows:
            assert sum(one.parts.values()) == one.peak_bytes["device"]
            # gradients come to rest while the peak passes
            assert 0 <= one.parts["states"] <= one.rest_bytes["device"]
            assert one.checkpoint_bytes["all"] == 12 * 7_500_000_000
            on_disk = "disk" in one.tiers.values()
            behind, save = one.save_s["background"], one.save_s["foreground"]
            assert behind is not None and save is not None and (behind < save) is not on_disk


def test_files_have_no_times_where_no_disk_is_known() -> None:
    plain, disk = (
        make_plan(describe("1B"), Machine.of(gpus=8, disk=size), Training())
        for size in (None, "4TB")
    )
    timed = {(one.row, *one.tiers.values()): one for one in disk.rows}
    for one in plain.rows:
        assert (one.load_s, one.save_s["foreground"]) == (None, None)
        with_disk = timed[(one.row, *one.tiers.values())]
        assert one.save_s["background"] == with_disk.save_s["background"] is not None
        assert with_disk.load_s is not None and with_disk.save_s["foreground"] is not None
        assert one.step_s == with_disk.step_s


def test_rows_that_take_no_weight_codec_are_not_planned() -> None:
    machine = Machine.of(gpus=16)
    rows = make_plan(describe("1B"), machine, Training(weight_codec="int8")).rows
    assert {one.row for one in rows} == {"zero3", "zero3-keep", "hpz"}
    assert {one.row for one in make_plan(describe("1B"), machine, Training(grad_codec="int4")).rows}
    with pytest.raises(ConfigError, match="frozen_codec='int8' has no effect"):
        make_plan(describe("1B"), machine, Training(frozen_codec="int8"))
    with pytest.raises(ConfigError, match="all 8 GPUs are one"):
        make_plan(describe("1B"), Machine.of(gpus=8), Training(grad_codec="bf16"))


def test_a_tied_unit_is_gathered_once_more_by_a_forward() -> None:
    model = _small([(64, 64), (64, 64)])
    tied = replace(model, units=(replace(model.units[0], uses=2), model.units[1]))
    for name, more in (("zero2", 0), ("zero3", 1), ("zero3-keep", 0)):
        once, twice = (
            traffic_bytes(LaidOut(one, Mesh(1, 2)), row(name), Training()) for one in (model, tied)
        )
        assert twice.total - once.total == more * 64 * 64 * 2 / 2, name


_GB = st.integers(1, 400)


@settings(deadline=None, max_examples=6)
@given(_GB, _GB, st.sampled_from(["1.3B", "13B"]), st.sampled_from([1, 64]))
def test_what_fits_fits_in_more_memory(first: int, second: int, params: str, gpus: int) -> None:
    _fits_in_more(first, second, params, gpus)


@pytest.mark.slow
@settings(deadline=None, max_examples=25)
@given(_GB, _GB, st.sampled_from(["1.3B", "13B", "70B"]), st.sampled_from([1, 8, 64]))
def test_what_fits_fits_in_more_memory_of_larger_models(
    first: int, second: int, params: str, gpus: int
) -> None:
    _fits_in_more(first, second, params, gpus)


def _fits_in_more(first: int, second: int, params: str, gpus: int) -> None:
    less, more = (
        make_plan(
            describe(params),
            Machine.of(gpus=gpus, gpu_memory=gib << 30, disk=gib << 32),
            Training(),
        )
        for gib in sorted((first, second))
    )
    for small, large in zip(less.rows, more.rows, strict=True):
        assert large.fits or not small.fits, (small.row, small.tiers)
    if less.recommended.row is not None and more.recommended.row is not None:
        assert more.recommended.row.step_s <= less.recommended.row.step_s


def test_what_rests_rules_out_no_row_that_fits() -> None:
    search, training = Search(describe("1.3B"), candidates), Training(sequence=128)
    for megabytes in (3_000, 4_500, 5_000, 8_000, 9_000):
        machine = Machine.of(gpus=8, gpu_memory=megabytes * 10**6)
        fits = [one for one in search.rows(machine, training) if one.fits]
        assert search.fitting(machine, training) == fits, megabytes


def test_the_recommendation_is_the_fastest_that_fits() -> None:
    plan = make_plan(describe("7.5B"), Machine.of("V100-32", gpus=64), Training(precision="fp16"))
    best = plan.recommended.row
    assert best is not None and best.fits
    assert all(best.step_s <= one.step_s for one in plan.rows if one.fits)
    assert "fastest" in plan.recommended.reason and best.bound_by in plan.recommended.reason
    assert "half of the GPUs (32)" in str(plan.recommended.smaller)


@pytest.mark.parametrize(
    ("params", "machine", "training", "change"),
    [
        ("7.5B", {"gpus": 8, "gpu_memory": "28GiB"}, {"sequence": 8192}, "checkpoint activations"),
        ("1B", {"gpus": 1, "gpu_memory": "24GiB"}, {"batch": 32}, "a micro-batch of"),
        ("200B", {"gpus": 1}, {"accumulate": "bf16"}, "3.2 TB of disk a node"),
        ("1T", {"gpus": 8, "disk": "1TB"}, {"accumulate": "bf16"}, "64 GPUs: "),
    ],
)
def test_where_nothing_fits_the_cheapest_change_that_would_is_named(
    params: str, machine: dict[str, Any], training: dict[str, Any], change: str
) -> None:
    plan = make_plan(
        describe(params),
        Machine.of("H100", **machine),
        Training(**{"checkpointing": "gpu_memory" not in machine, **training}),
    )
    assert plan.recommended.row is None and not any(one.fits for one in plan.rows)
    assert change in str(plan.recommended.change)
    with pytest.raises(ConfigError, match="nothing fits"):
        plan.config()


def _plans() -> list[Plan]:
    """Return plans that recommend each kind of tiers."""
    return [
        make_plan(describe(params), machine, Training(checkpointing=True))
        for params, machine in (
            ("1B", Machine.of(gpus=1)),
            ("7.5B", Machine.of(gpus=64)),
            ("7.5B", Machine.of(gpus=1)),
            ("100B", Machine.of(gpus=1)),
            ("200B", Machine.of(gpus=1, disk="20TB")),
        )
    ]


def test_every_written_configuration_is_one_that_shard_takes() -> None:
    tiers = set()
    for plan in _plans():
        config = build_config(plan.config(disk_path="/scratch"))
        config.refuse_unsupported()
        best = plan.recommended.row
        assert best is not None
        cells = config.resolved_policy().default
        assert config.resolved_policy().name == best.row
        assert {
            "weight": cells.weight.tier.value,
            "grad": cells.grad.tier.value,
            "optimizer": cells.optim.tier.value,
        } == best.tiers
        assert config.resolved_precision() == Precision("bf16")
        assert Config.from_json(config.to_json()) == config
        tiers.add(tuple(best.tiers.values()))
    assert len(tiers) >= 3, tiers


def test_a_written_configuration_has_the_codecs_and_the_fraction() -> None:
    codecs = {"weight_codec": "int8", "grad_codec": "int4", "codec_block": 128}
    training = Training(**codecs, error_feedback=True, fraction=0.75, checkpointing=True)  # type: ignore[arg-type]
    plan = make_plan(describe("7.5B"), Machine.of(gpus=1), training)
    best = plan.recommended.row
    assert best is not None and "host" in best.tiers.values()
    config = build_config(plan.config())
    config.refuse_unsupported()
    assert set(config.offload.fractions().values()) == {0.75}
    seen = {name: getattr(config.comm, name) for name in codecs}
    assert seen == codecs and config.comm.error_feedback is True


def test_a_budget_moves_traffic_into_memory_until_the_row_is_zero1() -> None:
    model, machine = shape_of_config(LLAMA, "config"), Machine.of(gpus=16)

    def planned(name: str, budget: int | None) -> PlannedRow:
        training = Training(micro_batches=4, accumulation_budget=budget)
        return plan_row(LaidOut(model, machine.mesh), row(name), machine, training)

    plain, zero1 = planned("zero2", None), planned("zero1", None)
    assert planned("zero2", 1) == plain and planned("zero1", 1 << 40) == zero1
    all_of_them = 4 * model.numel
    some = [planned("zero2", round(share * all_of_them)) for share in (0.3, 0.6, 0.9, 1.1)]
    for less, more, share in zip([plain, *some], some, (0.3, 0.6, 0.9, 1.1), strict=False):
        assert less.whole_gradients < more.whole_gradients
        assert less.traffic_bytes["node"] > more.traffic_bytes["node"]
        assert less.peak_bytes["device"] < more.peak_bytes["device"]
        grads = more.rest_bytes["device"] - (plain.rest_bytes["device"] - all_of_them // 16)
        assert grads <= share * all_of_them * 1.01  # padding
    whole = replace(some[-1], row="zero1", whole_gradients=0)
    assert (whole.rest_bytes, whole.traffic_bytes) == (zero1.rest_bytes, zero1.traffic_bytes)
    assert whole.step_s == zero1.step_s and whole.peak_bytes == zero1.peak_bytes


def test_a_written_configuration_has_the_budget_where_it_has_an_effect() -> None:
    training = Training(micro_batches=2, accumulation_budget="1GB")
    for policy, has in ((row("zero2"), True), (row("zero1"), False)):
        plan = make_plan(describe("1B"), Machine.of(gpus=8), training, lambda _, one=policy: [one])
        config = plan.config()
        assert config.get("accumulation_budget") == (10**9 if has else None)
        build_config(config).refuse_unsupported()


def test_one_node_says_nothing_about_nodes() -> None:
    one, many = (
        make_plan(describe("1B"), Machine.of(gpus=gpus), Training()).config() for gpus in (8, 16)
    )
    assert "comm" not in one and many["comm"] == {"node_size": 8}


def _zero1(machine: Machine) -> list[Policy]:
    return [row("zero1")]


def test_gradients_of_two_bytes_are_an_offer_that_says_what_it_saves() -> None:
    model, machine = describe("7B"), Machine.of(gpus=8)
    training = Training(micro_batches=8)
    plan, half = (
        make_plan(model, machine, one, _zero1)
        for one in (training, replace(training, accumulate="bf16"))
    )
    saved = plan.rows[0].peak_bytes["device"] - half.rows[0].peak_bytes["device"]
    assert f"save {saved / 1e9:.3g} GB of a GPU" in str(plan.recommended.offer)
    assert plan.config()["precision"] == {"compute": "bf16", "accumulate": "fp32"}
    assert half.recommended.offer is None
    small = make_plan(model, Machine.of(gpus=8, gpu_memory="60GB"), training, _zero1)
    assert small.recommended.row is None and "zero1 would fit" in str(small.recommended.offer)
    assert make_plan(model, machine, Training("fp32"), _zero1).recommended.offer is None


def test_the_offer_is_of_the_grid_that_is_recommended() -> None:
    machine, training = Machine.of(gpus=64), Training(micro_batches=8)
    plan, half = (
        make_plan(describe("13B"), machine, one, _zero1, Axes(4, 2))
        for one in (training, replace(training, accumulate="bf16"))
    )
    saved = plan.rows[0].peak_bytes["device"] - half.rows[0].peak_bytes["device"]
    assert f"save {saved / 1e9:.3g} GB of a GPU" in str(plan.recommended.offer)


def test_checkpointing_keeps_less_and_computes_more() -> None:
    kept = LaidOut(shape_of_config(LLAMA, "config"), Mesh(1, 8))
    plain, saved = Training(), Training(checkpointing=True)
    most = [
        max(one.activations - one.logits for one in closed_form(kept.model, training).moments)
        for training in (saved, plain)
    ]
    assert most[0] < most[1] / 10
    slow, fast = (
        make_plan(kept.model, Machine.of(gpus=8), training).rows[0].step_s
        for training in (saved, plain)
    )
    assert slow > fast


def test_activations_are_the_closed_form_in_small_numbers() -> None:
    """h = 4, 2 heads of 2, MLP of 16 without a gate, 3 tokens of 2 bytes: per layer and token norms
    and projections 3 x 4, q and output 2 x 4, k and v 2 x 4, MLP 4 + 2 x 16.
    """
    config = {
        "model_type": "gpt2", "n_embd": 4, "n_head": 2, "n_layer": 5, "vocab_size": 11,
        "n_positions": 8,
    }  # fmt: skip
    model, training = shape_of_config(config, "config"), Training(sequence=3)
    assert model.decoder is not None
    layer, kept = (12 + 8 + 8 + 4 + 32) * 3 * 2, 4 * 3 * 2
    assert layer_bytes(model.decoder, training) == layer
    assert logit_bytes(model.decoder, training) == 11 * 3 * (2 + 4 + 4)
    for recomputes, most in ((False, 5 * layer), (True, 4 * kept + layer)):
        moments = closed_form(model, replace(training, checkpointing=recomputes)).moments
        assert max(one.activations - one.logits for one in moments) == most


def test_a_step_casts_gradients_and_makes_denominators_in_small_numbers() -> None:
    """Of 8 x 100 weights in two parameters: 4 bytes each for the gradients, all at once; on the CPU
    twice 4 bytes for the denominators of one parameter, on a GPU once for those of all.
    """
    shapes = (("a", (8, 64)), ("b", (8, 36)))
    model = ModelShape("two", (UnitShape("a", (GroupShape(shapes),)),))
    for gpu, accumulate, optimizer, staging in (
        ("CPU", "bf16", "adam", 4 * 800 + 8 * 512),
        ("CPU", "fp32", "adam", 8 * 512),
        ("CPU", "fp32", "adam-fused", 0),
        ("H100", "bf16", "adam", 4 * 800 + 4 * 800),
        ("H100", "bf16", "adam-fused", 4 * 800),
        ("H100", "fp32", "adam-fused", 0),
    ):
        machine, training = Machine.of(gpu), Training("bf16", accumulate, optimizer)
        laid_out, policy = LaidOut(model, machine.mesh), ROWS["zero1"]
        rest = rest_bytes(laid_out, policy, training)
        peak = peak_bytes(laid_out, policy, machine, training, rest)
        assert peak.parts["staging"] == staging, (gpu, accumulate, optimizer)


@pytest.mark.parametrize("micro_batches", [1, 2])  # of two, the first one's gradients rest
def test_layers_that_are_taken_as_one_change_no_peak(
    micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, machine = shape_of_config(LLAMA, "config"), Machine.of(gpus=8)
    training = Training(batch=32, micro_batches=micro_batches)  # activations decide
    folded = Search(model, candidates).rows(machine, training)
    monkeypatch.setattr("zeroshard.planner.peak._SHOWN", 1000)
    assert folded == Search(model, candidates).rows(machine, training)


@pytest.mark.parametrize("name", ["mics", "hfsdp"])
def test_a_node_of_one_rank_keeps_one_bucket_and_two_sums_on_their_way(name: str) -> None:
    model, training = _small([(64, 64)] * 5), Training("bf16")
    machine = replace(Machine.of("CPU", gpus=2), node_size=1)
    laid_out = LaidOut(model, machine.mesh, training.align)
    playback = Playback(laid_out, row(name), training, TransportTraits.of(machine, "gloo"))
    for _ in range(2):
        for _ in playback.play(closed_form(model, training), sync=True):
            pass
        playback.reduced.wait()
    # buckets in bf16; sums in fp32, and the other node's half of them
    assert playback.pooled == (64 * 64 * 2, 2 * (64 * 64 * 4 + 64 * 32 * 4))


def test_the_ranks_of_a_node_share_its_host_and_its_disk() -> None:
    """7.5B on 8 GPUs: all states on the host are 120 GB a node, whoever holds which part."""
    for needs, fits in (("119GB", False), ("122GB", True)):
        machine = Machine.of(gpus=8, host_memory=needs, disk=needs)
        machine = replace(machine, host_process=0, page_cache=0.0)
        plan = make_plan(describe("7.5B"), machine, Training("bf16", "bf16"))
        last = {one.tiers["weight"]: one for one in plan.rows if one.row == "zero3"}
        assert (last["host"].fits, last["disk"].fits) == (fits, fits), needs
        if not fits:
            assert (last["host"].bound_by, last["disk"].bound_by) == ("host memory", "disk space")


@pytest.mark.parametrize(("params", "host"), [("7B", 128), ("5.45B", 99)])
def test_a_host_has_room_beside_its_ranks_programs_and_its_page_cache(
    params: str, host: int
) -> None:
    """All states of 7B on the host are 126 of 128 GB: Python, torch and data loaders take 2 GiB a
    rank, the page cache 5%.
    """
    for more, fits in ((0, False), (5, False), (15, True)):
        machine = Machine.of(gpus=1, host_memory=f"{host + more}GB")
        plan = make_plan(describe(params), machine, Training(checkpointing=True))
        (line,) = (one for one in plan.rows if one.tiers["weight"] == "host")
        assert 0.98 * host < line.peak_bytes["host"] / 1e9 < host
        assert line.fits is fits, (machine, line)
    small = Machine.of("CPU", gpus=2, node_size=2, gpu_memory="16GB", host_memory="16GB")
    assert small.host_allowance == 2 * (2 << 30) + 800_000_000
    advice = make_plan(describe("1B"), small, Training(batch=1, sequence=8)).recommended
    assert advice.row is None
    assert "and has 10.91 GB beside the 5.09 GB that Python, torch" in advice.reason


@pytest.mark.parametrize(
    ("gpu", "least", "most"),
    [
        ("A100-80", 79.1, 79.4),
        ("H100", 79.1, 79.6),
        ("H200", 139.7, 139.9),
        ("RTX4090", 23.5, 23.7),
    ],
)
def test_a_preset_has_the_memory_that_torch_reports(gpu: str, least: float, most: float) -> None:
    assert least <= Machine.of(gpu).gpu_memory / 2**30 <= most
    assert nearest_preset(f"NVIDIA {gpu}", Machine.of(gpu).gpu_memory) == gpu


def test_slower_links_between_nodes_bind_and_hpz_is_faster_there() -> None:
    plan = make_plan(
        describe("70B"), Machine.of(gpus=64, network="1GB"), Training(checkpointing=True)
    )
    by_row = {one.row: one for one in plan.rows if set(one.tiers.values()) == {"device"}}
    assert by_row["zero3"].bound_by == "links between nodes"
    assert by_row["hpz"].step_s < by_row["zero3"].step_s


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a Transformers config.json"),
        ("[]", "names no model_type"),
        ('{"model_type": "bert"}', "model_type='bert' is not one of llama"),
        ('{"model_type": "llama"}', "hidden_size=None is not a positive whole number"),
        ('{"model_type": "gpt2", "n_embd": "x"}', "n_embd='x' is not a positive whole number"),
    ],
)
def test_a_file_that_is_no_config_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_model(path.parent)


def test_pipes_are_not_waited_for_and_levels_have_a_limit(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    os.mkfifo(tmp_path / "model.safetensors")
    for path in (tmp_path / "config.json", tmp_path / "model.safetensors"):
        with pytest.raises(ConfigError, match="cannot be read: it is not a regular file"):
            read_model(path)
    (tmp_path / "deep.json").write_text('{"a":' * 900 + "1" + "}" * 900)
    with pytest.raises(ConfigError, match="nested deeper than 100 levels"):
        read_model(tmp_path / "deep.json")


def _write_header(path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


def test_headers_of_safetensors_give_blocks_and_leftovers(tmp_path: Path) -> None:
    shapes = [
        ("embed.weight", "BF16", (9, 4)),
        ("h.0.w", "BF16", (4, 4)),
        ("h.1.w", "BF16", (4, 4)),
    ]
    shapes += [("h.1.mask", "BOOL", (4, 4)), ("norm.weight", "F32", (4,))]
    for number, part in enumerate((shapes[:2], shapes[2:])):
        entries = {
            name: {"dtype": dtype, "shape": shape, "data_offsets": [at, at + 1]}
            for at, (name, dtype, shape) in enumerate(part)
        }
        _write_header(tmp_path / f"model-{number}.safetensors", {"__metadata__": {}, **entries})
    for config in (None, {"model_type": "unknown"}):
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
        model = read_model(tmp_path)
        assert [unit.name for unit in model.units] == ["embed.weight", "h.0", "h.1", "norm.weight"]
        assert model.numel == 36 + 16 + 16 + 4 and model.decoder is None


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff" * 16, b"\x04\0\0\0\0\0\0\0[{]}", b'\x07\0\0\0\0\0\0\0{"a":1}'],
    ids=["empty", "too long", "no JSON", "no tensor"],
)
def test_a_file_that_is_no_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        read_model(path)
    _write_header(path, {})
    with pytest.raises(ConfigError, match="holds no floating-point tensor"):
        read_model(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int8"}, "precision='int8' is not one of fp32, bf16, fp16"),
        ({"accumulate": "fp16"}, "accumulate='fp16' is not one of fp32, bf16"),
        ({"optimizer": "lion"}, "optimizer='lion' is not one of"),
        ({"batch": 0}, "batch=0 is less than one"),
        ({"weight_codec": "int2"}, "weight_codec='int2' is not one of int8, int4, fp8"),
        ({"codec_block": 100}, "codec_block=100 is not a positive multiple of 64"),
        ({"error_feedback": True, "grad_codec": "bf16"}, "error_feedback has no effect"),
        ({"fraction": 0.0}, "fraction=0.0 is not in"),
        ({"accumulation_budget": 0}, "accumulation_budget=0 is less than one byte"),
        ({"accumulation_budget": "2"}, "accumulation_budget='2' has no unit"),
    ],
)
def test_training_that_makes_no_sense_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Training(**options)  # type: ignore[arg-type]
