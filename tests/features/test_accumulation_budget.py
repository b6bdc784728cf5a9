"""``accumulation_budget=``: whole gradients while they fit, traffic and memory to the byte, and the
bits of one order of summation or the other for each unit.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.support import inside
from tests.support.harness import RankError, run_ranks
from tests.support.training import batch, differences, make_model, make_sharded
from zeroshard.core.placement import Mesh
from zeroshard.core.precision import PRECISIONS
from zeroshard.core.wire import Wires
from zeroshard.runtime.engine import states_of

Sizes = dict[str, tuple[int, int]]  # by unit: the bytes of its whole gradient, and of a shard
MESHES = {"zero2": Mesh(1, 2), "zero3": Mesh(1, 2), "mics": Mesh(2, 2), "hpz": Mesh(2, 2)}


def _sizes(row: str) -> Sizes:
    mesh = MESHES[row]
    options = {"comm": zs.Comm(node_size=mesh.node_size)} if mesh.num_nodes > 1 else {}
    _, _, engine = make_sharded(row, **options)
    sizes = {}
    for unit in inside.units(engine):
        numel = sum(segment.flat.layout.numel for segment in unit.trainable)
        sizes[unit.name] = (4 * numel, 4 * numel // unit.cells.grad.num_shards(MESHES[row]))
    engine.close()
    return sizes


def _budgets(sizes: Sizes) -> list[int]:
    """Return the budgets at which one unit more rests, the smallest first."""
    shards = sum(shard for _, shard in sizes.values())
    extras = sorted(whole - shard for whole, shard in sizes.values())
    return [shards + sum(extras[: taken + 1]) for taken in range(len(extras))]


def _one_step(
    rank: int, row: str, micro_batches: int, mesh: Mesh, **options: Any
) -> dict[str, Any]:
    """Return what one step's gradients are, what they have moved and what rested at the most."""
    if mesh.num_nodes > 1:
        options["comm"] = zs.Comm(node_size=mesh.node_size)
    model, optimizer, engine = make_sharded(row, **options)
    model(*batch(rank, 0)).backward()  # a first step gathers nothing ahead
    optimizer.step()
    optimizer.zero_grad()
    engine.reset_traffic()
    rested, seen = 0, [0]

    def note(what: str, name: str) -> None:
        at_rest = states_of(engine).accounts.report().at_rest["grad"]
        seen.append(at_rest + inside.gradient_buffer_bytes(engine))

    with inside.traced(engine, note):
        for micro in range(micro_batches):
            with engine.no_sync() if micro < micro_batches - 1 else nullcontext():
                model(*batch(rank, micro)).backward()
            if micro < micro_batches - 1:
                rested = max(rested, engine.memory().at_rest["grad"])
    engine.clip_grad_norm_(1e9)  # what is under way has come
    moved = engine.traffic()
    grads = {name: engine.full_grad(p) for name, p in model.named_parameters()}
    optimizer.step()
    names = {name: list(unit.segments[0].names) for name, unit in _by_name(engine).items()}
    out = {
        "grads": {name: grad for name, grad in grads.items() if grad is not None},
        "moved": moved.total - moved.bytes.get("exchange", 0),
        "rested": rested,
        "whole": [name for name in names if str(engine.policy.cells(name).grad) == "P P"],
        "names": names,
        "formula": _formula(engine, mesh, micro_batches),
        "peak": max(seen),
        "largest": inside.largest_unit_bytes(engine),
    }
    engine.close()
    return out


def _by_name(engine: zs.Engine) -> dict[str, Any]:
    return {unit.name: unit for unit in inside.units(engine)}


def _formula(engine: zs.Engine, mesh: Mesh, micro_batches: int) -> float:
    """Return the closed form of the bytes of a step before the optimizer's, unit by unit."""
    forms = [
        engine.policy.wire_bytes(
            numel=sum(segment.flat.layout.numel for segment in unit.trainable),
            mesh=mesh,
            wires=Wires.of(PRECISIONS["fp32"]),
            micro_batches=micro_batches,
            no_sync=True,
            unit=unit.name,
        )
        for unit in inside.units(engine)
    ]
    averages = engine.policy.name == "mics"  # several ranks step the same, and gather them before
    return sum(form.total if averages else form.total - form.publish.total for form in forms)


def _by_budget(rank: int, world: int, row: str, micro_batches: int) -> list[dict[str, Any]]:
    """Return one step of zero1, of the row, and of the row with each budget that differs."""
    mesh = MESHES[row]
    steps = [_one_step(rank, name, micro_batches, mesh) for name in ("zero1", row)]
    for budget in _budgets(_sizes(row))[::-3][::-1]:  # every third, with the largest
        step = _one_step(rank, row, micro_batches, mesh, accumulation_budget=budget)
        steps.append(step | {"budget": budget})
    return steps


@pytest.mark.parametrize(
    ("row", "micro_batches"),
    [
        ("zero3", 3),
        pytest.param("zero2", 3, marks=pytest.mark.slow),
        pytest.param("zero3", 100, marks=pytest.mark.slow),
        pytest.param("hpz", 4, marks=pytest.mark.slow),
        pytest.param("mics", 4, marks=pytest.mark.slow),
    ],
)
def test_each_unit_has_the_bits_of_its_order_and_traffic_and_memory_are_their_formulas(
    row: str, micro_batches: int
) -> None:
    for zero1, plain, *budgeted in run_ranks(
        MESHES[row].size, _by_budget, row, micro_batches, timeout=110
    ):
        assert len(budgeted[-1]["whole"]) == len(plain["names"]) and not plain["whole"]
        for step in budgeted:
            for unit, names in step["names"].items():
                expected = zero1 if unit in step["whole"] else plain
                told = [
                    differences({n: step["grads"][n]}, {n: expected["grads"][n]}) for n in names
                ]
                assert not any(told), (unit, told)
            assert step["moved"] == step["formula"]
            assert step["rested"] <= step["budget"], "at rest between micro-batches"
            assert step["peak"] <= step["budget"] + 2 * step["largest"]
        moved = [step["moved"] for step in (plain, *budgeted)]
        assert moved == sorted(moved, reverse=True) and moved[-1] < moved[0]
        assert not differences(budgeted[-1]["grads"], zero1["grads"])
        for name, grad in plain["grads"].items():
            assert torch.allclose(grad, zero1["grads"][name], atol=1e-6), name


def _refused(rank: int, world: int, options: dict[str, Any]) -> None:
    make_sharded(**options)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"row": "zero1", "accumulation_budget": "1GiB"}, "has no effect: policy='zero1'"),
        ({"row": "zero3", "accumulation_budget": 1}, "accumulation_budget=1 bytes holds no unit"),
        ({"row": "zero3", "accumulation_budget": "2 lots"}, "accumulation_budget='2 lots'"),
        ({"row": "zero3", "accumulation_budget": 0}, "less than one byte"),
        (
            {"row": "zero3", "accumulation_budget": 9**9, "offload": {"grad": "disk"}},
            "would let whole gradients rest on disk",
        ),
    ],
)
def test_a_budget_that_holds_nothing_or_has_no_effect_is_one_line_on_every_rank(
    options: dict[str, Any], told: str, tmp_path: Any
) -> None:
    if "offload" in options:
        options = options | {"offload": options["offload"] | {"disk_path": str(tmp_path)}}
    with pytest.raises(RankError) as failed:
        run_ranks(2, _refused, options)
    assert str(failed.value).count(told) >= 2, failed.value


def _least(rank: int, world: int) -> None:
    shards = sum(shard for _, shard in _sizes("zero3").values())
    try:
        make_sharded("zero3", accumulation_budget=shards)
    except zs.ConfigError as error:
        least = int(str(error).split("whole gradient ")[1].split(":")[0])
    assert least == _budgets(_sizes("zero3"))[0]
    with pytest.raises(zs.ConfigError):
        make_sharded("zero3", accumulation_budget=least - 1)
    _, _, engine = make_sharded("zero3", accumulation_budget=least)
    assert len(engine.policy.units) == 1
    engine.close()


def test_the_error_names_the_least_budget_that_has_an_effect() -> None:
    run_ranks(2, _least)


def test_one_rank_takes_a_budget_that_its_script_gives_to_many() -> None:
    model = make_model()
    engine = zs.shard(model, stage=3, accumulation_budget="1GiB")
    assert not engine.policy.units
    engine.close()


def _on_the_host(rank: int, world: int) -> list[str]:
    """Whole gradients rest where the row's gradients do, and do not depend on shares."""
    out = []
    tiers = zs.Offload(grad="host", optimizer="host")
    for options in ({}, {"offload": tiers}, {"shares": [0.25, 0.75]}):
        step = _one_step(rank, "zero3", 3, MESHES["zero3"], accumulation_budget=10**8, **options)
        out.append(step["grads"])
    told = differences(out[1], out[0], "host", "device")
    return told + differences(out[2], out[0], "unequal shares", "equal ones")


def test_whole_gradients_rest_on_the_host_with_the_row_and_beside_unequal_shares() -> None:
    assert run_ranks(2, _on_the_host) == [[], []]
