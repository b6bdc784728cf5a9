"""Plans of ranks that are not alike: each rank's bytes, and whether all of them fit."""

from __future__ import annotations

import json
import math
from typing import Any, Literal

import pytest

from zeroshard.core.policy import row
from zeroshard.core.shares import WholeParameters, shares_of
from zeroshard.errors import ConfigError
from zeroshard.launch.cli import main
from zeroshard.planner import Machine, Training, describe
from zeroshard.planner.exact import LaidOut, rest_bytes, traffic_bytes
from zeroshard.planner.model import GroupShape
from zeroshard.planner.rows import UnevenRow, plan_uneven

GIB = 1 << 30
TRAINING = Training("bf16", checkpointing=True)


def by_name(rows: tuple[UnevenRow, ...]) -> dict[str, UnevenRow]:
    """Return the rows that rest on the device."""
    return {one.row: one for one in rows if set(one.tiers.values()) == {"device"}}


def test_a_model_fits_two_gpus_of_which_one_is_small_only_with_shares() -> None:
    model, machine = describe("3B"), Machine.of("A100-80", gpus=2, network="25GB")
    memory = [24 * GIB, 80 * GIB]
    equal = by_name(plan_uneven(model, machine, TRAINING, gpu_memory=memory))["zero3"]
    uneven = by_name(plan_uneven(model, machine, TRAINING, shares="memory", gpu_memory=memory))
    assert equal.short == ("device memory of rank 0",)
    zero3 = uneven["zero3"]
    assert zero3.fits and [one.share for one in zero3.ranks] == [0.2308, 0.7692]
    small, large = (one.rest_bytes["device"] for one in zero3.ranks)
    assert small / (small + large) == pytest.approx(0.2308, abs=1e-3)


def test_auto_leaves_room_for_what_is_no_share() -> None:
    model, machine = describe("2B"), Machine.of("A100-80", gpus=2, network="25GB")
    memory = [16 * GIB, 80 * GIB]
    rows = by_name(plan_uneven(model, machine, TRAINING, shares="auto", gpu_memory=memory))
    small, large = rows["zero3"].ranks
    assert 0 < small.share < 16 / 96 < large.share
    left = [one.memory - one.peak_bytes["device"] for one in (small, large)]
    assert all(room > 0 for room in left)


def test_muon_keeps_a_number_of_a_matrix_and_owns_nothing_else_whole() -> None:
    model, machine = describe("1B"), Machine.of("A100-80", gpus=8, network="25GB")
    rows = {
        optimizer: by_name(plan_uneven(model, machine, Training(optimizer=optimizer), shares=how))
        for optimizer, how in (("adamw", "whole"), ("muon", "whole"))
    }
    adamw, muon = (rows[name]["zero3"].ranks for name in ("adamw", "muon"))
    matrices = sum(
        math.prod(shape)
        for unit in model.units
        for group in unit.groups
        for name, shape in group.shapes
        if name in group.matrices
    )
    others = model.numel - matrices
    assert matrices and others > model.units[0].numel - 1  # the embedding is a table
    tables = GroupShape((("model.embed_tokens.weight", (9, 8)), ("q_proj.weight", (8, 8))))
    assert tables.matrices == {"q_proj.weight"}
    saved = sum(one.rest_bytes["device"] for one in adamw) - sum(
        one.rest_bytes["device"] for one in muon
    )
    assert saved == pytest.approx(4 * matrices, rel=1e-3)  # but for padding
    # what AdamW steps may be cut, so ranks have as much as one another
    assert max(one.share for one in muon) < 1.01 / 8 < 1.15 / 8 < max(one.share for one in adamw)


@pytest.mark.parametrize("name", ["zero1", "zero3", "hpz", "mics", "hfsdp"])
@pytest.mark.parametrize("numbers", [(0.05, 0.0, 0.6, 0.35), "whole"], ids=str)
def test_every_rank_rests_and_moves_what_the_exact_plan_of_that_rank_says(
    name: str, numbers: tuple[float, ...] | Literal["whole"]
) -> None:
    model, training = describe("100M"), Training("bf16")
    machine = Machine.of("A100-80", gpus=4, node_size=2, network="25GB")
    planned = by_name(plan_uneven(model, machine, training, shares=numbers))[name]
    shares = WholeParameters() if isinstance(numbers, str) else shares_of(numbers)
    laid_out = LaidOut(model, machine.mesh, training.align, shares)
    for rank, one in enumerate(planned.ranks):
        rest = rest_bytes(laid_out, row(name), training, rank)
        exact = sum(sum(by_tier.values()) for by_tier in rest.values())
        units = len(model.units)
        # the last block of each unit may be a neighbour's, for the ranks are renamed
        assert one.rest_bytes["device"] == pytest.approx(exact, abs=units * 64 * 2 * 16)
        moved = traffic_bytes(laid_out, row(name), training, rank=rank).total
        assert one.traffic_bytes == pytest.approx(moved, abs=units * 64 * 2 * 16)
        if numbers != "whole":
            assert one.share == numbers[rank]
    assert sum(one.share for one in planned.ranks) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"shares": [0.5, 0.4]}, "sum to 0.9"),
        ({"shares": [1.0]}, "shares is given for 1 GPUs, and there are 2"),
        ({"shares": "speed"}, "'auto', 'whole' or 'whole_by_cost'"),
        ({"gpu_memory": [1, 2, 3]}, "gpu_memory is given for 3 GPUs, and there are 2"),
    ],
)
def test_numbers_that_do_not_fit_the_machine_are_refused(
    options: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        plan_uneven(describe("10M"), Machine.of("H100", gpus=2), Training("bf16"), **options)


def test_the_command_prints_a_line_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    muon = ["--gpus", "2", "--shares", "whole_by_cost", "--optimizer", "muon"]
    assert main(["plan", "--params", "1B", *muon]) == 0
    assert capsys.readouterr().out.count("of the mean of Muon's products") == 2
    line = ["plan", "--params", "3B", "--gpu", "A100-80", "--gpu-memory", "24GiB,80GiB"]
    assert main([*line, "--checkpointing", "--shares", "memory"]) == 0
    printed = capsys.readouterr().out
    assert "0.231" in printed and "0.769" in printed
    assert main([*line, "--checkpointing", "--shares", "0.1,0.9", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    zero3 = next(one for one in rows if one["row"] == "zero3")
    assert zero3["fits"] and [one["share"] for one in zero3["ranks"]] == [0.1, 0.9]
    assert main([*line, "--shares", "fast"]) == 2
    assert "--shares 'fast' is not numbers" in capsys.readouterr().err
