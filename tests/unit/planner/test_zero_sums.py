"""The numbers of docs/zero-sums.md: what introductions to ZeRO quote, beside what is planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroshard.planner import Machine, Plan, PlannedRow, Training, describe, make_plan
from zeroshard.planner.plan import make_sweep

PAGE = (Path(__file__).parents[3] / "docs" / "zero-sums.md").read_text(encoding="utf-8")
PAPER = Training("bf16", "bf16")  # gradients of 2 bytes
FP16 = Training("fp16", "fp16")
RECOMPUTED = Training("bf16", "bf16", checkpointing=True)


def _plan(params: str, gpu: str, gpus: int, training: Training, **machine: str) -> Plan:
    return make_plan(describe(params), Machine.of(gpu, gpus=gpus, **machine), training)


def _on_device(plan: Plan) -> dict[str, PlannedRow]:
    """Return the rows all of whose states are on the device, by name."""
    return {row.row: row for row in plan.rows if set(row.tiers.values()) == {"device"}}


def _gigabytes(row: PlannedRow) -> tuple[float, float]:
    """Return what rests on the device, and the peak."""
    return row.rest_bytes["device"] / 1e9, row.peak_bytes["device"] / 1e9


def _is(seen: float, shown: float) -> bool:
    """Whether a number is the one that is shown with three digits."""
    return seen == pytest.approx(shown, rel=5.1e-3)


def test_24_gb_at_1_5b_are_states_alone() -> None:
    plan = _plan("1.5B", "V100-32", 1, FP16)
    rest, peak = _gigabytes(_on_device(plan)["ddp"])
    assert _is(rest, 24) and _is(peak, 38.9)
    assert not _on_device(plan)["ddp"].fits
    best = plan.recommended.row
    assert best is not None and best.tiers["optimizer"] == "host", "it fits with states on the host"


def test_1_2_tb_at_100b_are_adams_and_the_whole_is_1_6() -> None:
    for training, whole in ((PAPER, 1.6e12), (Training(), 1.8e12)):
        states = _plan("100B", "H100", 64, training).to_dict()["model"]["states_bytes"]
        assert states["optimizer"] == 1.2e12 and sum(states.values()) == whole


def test_16_tb_at_1t_are_16_gb_of_each_of_1024_gpus_which_do_not_hold_them() -> None:
    plan = _plan("1T", "A100-80", 1024, RECOMPUTED)
    assert sum(plan.to_dict()["model"]["states_bytes"].values()) == 16e12
    row = _on_device(plan)["zero3"]
    rest, peak = _gigabytes(row)
    assert _is(rest, 15.6) and _is(peak, 90.8) and not row.fits
    best = plan.recommended.row
    assert best is not None and set(best.tiers.values()) == {"device", "host"}
    assert _is(best.parts["gathered"] / 1e9, 23.3) and _is(best.peak_bytes["device"] / 1e9, 78.5)


def test_16_6_gb_a_gpu_are_what_rests_at_stage_2() -> None:
    rows = _on_device(_plan("7.5B", "A100-80", 64, PAPER))
    shown = {"ddp": (120, 191), "zero1": (31.4, 30.4), "zero2": (16.6, 30.4), "zero3": (1.88, 15.8)}
    for name, (rest, peak) in shown.items():
        seen = _gigabytes(rows[name])
        assert _is(seen[0], rest) and _is(seen[1], peak), name
    assert rows["zero2"].parts["activations"] > 0.3 * rows["zero2"].peak_bytes["device"]
    assert _is(_gigabytes(_on_device(_plan("7.5B", "A100-80", 64, Training()))["zero2"])[0], 16.9)
    assert _is(_gigabytes(_on_device(_plan("7.5B", "A100-80", 64, RECOMPUTED))["zero2"])[1], 21.6)


def test_17_5_gb_of_70b_on_eight_cards_are_the_weights_alone() -> None:
    plan = _plan("70B", "RTX4090", 8, Training())
    assert plan.to_dict()["model"]["states_bytes"]["weight"] / 8 == 17.5e9
    rest, peak = _gigabytes(_on_device(plan)["zero3"])
    assert _is(rest, 158) and _is(peak, 207) and rest == pytest.approx(9 * 17.5)
    (away,) = (
        row for row in plan.rows if row.row == "zero3" and row.tiers["grad"] == "host"
        and row.tiers["weight"] == "device"
    )  # fmt: skip
    assert _is(_gigabytes(away)[0], 17.5) and _is(_gigabytes(away)[1], 72.3) and not away.fits
    assert plan.recommended.row is None
    change = "checkpoint activations, 3.2 TB of disk a node: zero3, all on disk would fit"
    assert plan.recommended.change == change and change.partition(": ")[0] in PAGE


def test_what_fits_70b_on_24_gb_cards() -> None:
    training = Training(checkpointing=True)
    for machine, tier, step_s in (
        ({"host_memory": "2TiB"}, "host", 32.4),
        ({"disk": "4TB"}, "disk", 282),
    ):
        best = _plan("70B", "RTX4090", 8, training, **machine).recommended.row
        assert best is not None and (best.row, set(best.tiers.values())) == ("zero3", {tier})
        assert best.step_s is not None and _is(best.step_s, step_s)
        assert _is(best.peak_bytes["device"] / 1e9, 13.4)
    machines = [Machine.of("RTX4090", gpus=gpus) for gpus in (64, 128)]
    points = make_sweep(describe("70B"), machines, training)
    fitting = [(point.gpus, point.row) for point in points if point.fits]
    assert fitting == [(128, "zero3")]
    row = _on_device(_plan("70B", "RTX4090", 128, training))["zero3"]
    assert _is(_gigabytes(row)[1], 22.4) and row.step_s is not None and _is(row.step_s, 57.7)


def test_16_gpus_instead_of_64_hold_four_times_as_much_and_take_as_long() -> None:
    many, few = (_on_device(_plan("7.5B", "V100-32", gpus, FP16)) for gpus in (64, 16))
    assert _is(_gigabytes(many["zero3"])[0], 1.88) and _is(_gigabytes(few["zero3"])[0], 7.5)
    assert many["zero3"].fits and few["zero3"].fits
    for rows in (many, few):
        assert not rows["ddp"].fits and _is(_gigabytes(rows["ddp"])[0], 120)
        hours = rows["zero3"].gpu_hours_per_billion_tokens
        assert hours is not None and round(2 * hours) == 451
    tokens = [rows["zero3"].tokens_per_s or 0 for rows in (many, few)]
    assert tokens[0] == pytest.approx(4 * tokens[1], rel=2e-3)
    assert _is(tokens[0], 78_800) and _is(tokens[1], 19_700)


@pytest.mark.parametrize(
    ("name", "fits", "too_large", "times"),
    [
        ("ddp", "1.28B", "1.29B", 1),
        ("zero1", "12.6B", "12.7B", 9.8),
        ("zero2", "12.6B", "12.7B", 9.8),
        ("zero3", "73B", "74B", 57),
    ],
)
def test_eight_times_the_parameters_are_other_numbers_beside_activations(
    name: str, fits: str, too_large: str, times: float
) -> None:
    training = Training("fp16", "fp16", checkpointing=True)
    rows = [_on_device(_plan(size, "V100-32", 64, training))[name] for size in (fits, too_large)]
    assert [row.fits for row in rows] == [True, False]
    assert _is(float(fits[:-1]) / 1.28, times)
    assert fits in PAGE


def test_eight_times_is_stage_2_on_very_many_gpus() -> None:
    def least(gpus: int) -> float:
        rows = _on_device(_plan("7.5B", "V100-32", gpus, FP16))
        return rows["ddp"].rest_bytes["device"] / rows["zero2"].rest_bytes["device"]

    assert _is(least(64), 7.2) and 7.95 < least(2048) < 8
