"""Unequal shares of the states, and ranks on different tiers: the bits of equal ones, whatever the
row, transport and share, zero among them.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.harness import RankError, on_ranks, run_ranks
from tests.support.training import (
    batch,
    differences,
    final_state,
    make_model,
    make_sharded,
    take_steps,
    train,
    two_groups,
)
from zeroshard import hetero

STEPS, SLOW_STEPS = 8, 22
TWO = ((0.1, 0.9), (1.0, 0.0))
FOUR = (0.05, 0.0, 0.6, 0.35)
FLAT_ROWS = ("zero1", "zero2", "zero3", "zero3-keep")
NODE_ROWS = ("hpz", "mics", "hfsdp")
Case = tuple[str, Sequence[float], dict[str, Any]]  # row, shares, options


def _runs(
    rank: int, world: int, cases: list[Case], steps: int, plain: dict[str, Any]
) -> dict[str, list[str]]:
    """Train each case; return what differs from the same without shares, in one row for all."""
    expected, out = {}, {}
    for row, shares, options in cases:
        clip = options.get("clip")
        if clip not in expected:
            expected[clip] = train(rank, "zero1", steps, clip=clip, **plain)
        run = train(rank, row, steps, shares=shares, **{**plain, **options})
        name = f"{row} {shares} {options}"
        out[name] = run.differs_from(expected[clip])
        if run.extra["norms"] != expected[clip].extra["norms"]:
            out[name].append(f"norms {run.extra['norms']} {expected[clip].extra['norms']}")
    return out


def _check(world: int, cases: list[Case], steps: int = STEPS, **plain: Any) -> None:
    for found in run_ranks(world, _runs, cases, steps, plain, timeout=300):
        assert not any(found.values()), found


def test_any_shares_and_rows_give_the_bits_of_equal_shares() -> None:
    gloo, nccl = zs.Comm(transport="gloo"), zs.Comm(transport="nccl", ordered=True)
    clip = {"clip": 0.1}
    _check(
        2,
        [
            ("zero1", TWO[0], clip),
            ("zero2", TWO[1], clip),
            ("zero3", TWO[0], clip),
            ("zero3", TWO[1], {}),
            ("zero3-keep", TWO[1], {"comm": gloo}),
            ("zero3", TWO[0], {"comm": nccl}),
        ],
    )


def test_rows_with_nodes_give_the_bits_of_equal_shares() -> None:
    deep = zs.Comm(transport="gloo", node_size=2, hierarchical=True)
    cases: list[Case] = [(row, FOUR, {"clip": 0.1}) for row in NODE_ROWS]
    cases += [("zero3", FOUR, {"comm": deep, "clip": 0.1})]
    small = functools.partial(make_model, layers=1)
    _check(4, cases, comm=zs.Comm(transport="auto", node_size=2), model=small)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "gloo", "nccl"])
@pytest.mark.parametrize("node_size", [None, 2])
def test_the_whole_matrix_gives_the_bits_of_equal_shares(
    transport: str, node_size: int | None
) -> None:
    ordered = True if transport == "nccl" else None
    comm = zs.Comm.model_validate(
        {"transport": transport, "node_size": node_size, "ordered": ordered}
    )
    vectors = (FOUR, (1.0, 0.0, 0.0, 0.0), (0.0, 0.3, 0.2, 0.5))
    rows = FLAT_ROWS if node_size is None else (*FLAT_ROWS, *NODE_ROWS)
    cases: list[Case] = [
        (row, shares, {"clip": 0.1} if number % 2 else {})
        for row in rows
        for number, shares in enumerate(vectors)
    ]
    small = functools.partial(make_model, layers=2)
    _check(4, cases, SLOW_STEPS, comm=comm, model=small)


@on_ranks(2)
def test_half_precision_micro_batches_and_codecs_give_the_same_bits(rank: int) -> None:
    options = {"precision": "bf16", "micro_batches": 2, "no_sync": True, "clip": 0.1}
    equal = train(rank, "zero2", 8, **options)  # type: ignore[arg-type]
    found = []
    for row, shares in (("zero2", TWO[0]), ("zero3", TWO[1])):
        found += train(rank, row, 8, shares=shares, **options).differs_from(equal)  # type: ignore[arg-type]
    codes = zs.Comm(weight_codec="int8", grad_codec="int4", error_feedback=True)
    equal = train(rank, "zero3", 8, comm=codes)
    seen = found + train(rank, "zero3", 8, comm=codes, shares=TWO[0]).differs_from(equal)
    assert seen == []


@on_ranks(2, timeout=60)
def test_updates_that_are_late_have_the_bits_of_equal_shares(rank: int) -> None:
    """Take updates a step late with unequal shares; compare with equal ones."""
    out = {}
    for row, start in (("zero1", 2), ("zero2", 0), ("zero3", 0)):
        late = {"clip": 0.1, "offload": zs.Offload(optimizer="host", delayed_update=start)}
        equal = train(rank, row, 5, **late)  # type: ignore[arg-type]
        for shares, transport in ((TWO[0], "shared_memory"), (TWO[1], "gloo")):
            comm = zs.Comm.model_validate({"transport": transport})
            run = train(rank, row, 5, shares=shares, comm=comm, **late)  # type: ignore[arg-type]
            out[f"{row} {shares}"] = run.differs_from(equal)
            if run.extra["norms"] != equal.extra["norms"]:
                out[f"{row} {shares}"].append("norms")
        assert train(rank, row, 5, clip=0.1).differs_from(equal), "a late update is another one"
    assert not any(out.values()), out


# --------------------------------------------------------------------------------------------------
# what rests


def _resting(rank: int, world: int, row: str, shares: Sequence[float]) -> dict[str, int]:
    model, optimizer, engine = make_sharded(row, shares=shares, precision="bf16")
    take_steps(rank, 1, model, optimizer)
    engine.backward(model(*batch(rank, 1)))
    at_rest = engine.memory().at_rest
    engine.close()
    return at_rest


@pytest.mark.parametrize("row", ["zero1", "zero3"])
def test_bytes_at_rest_follow_the_shares_to_within_a_block(row: str) -> None:
    sizes = {"master": 4} if row == "zero1" else {"master": 4, "weight": 2, "grad": 4}
    small, large = run_ranks(2, _resting, row, (0.1, 0.9))
    for name, itemsize in sizes.items():
        whole = small[name] + large[name]
        assert abs(small[name] - 0.1 * whole) < 64 * itemsize, (name, small[name], whole)
    nothing, everything = run_ranks(2, _resting, row, (0.0, 1.0))
    for name, itemsize in sizes.items():
        assert (nothing[name], nothing["optimizer"]) == (0, 0), nothing
        numel = sum(p.numel() for p in make_model().parameters())
        assert everything[name] == small[name] + large[name] >= itemsize * numel, everything


# --------------------------------------------------------------------------------------------------
# everything else that an engine does, with a rank that rests nothing


@on_ranks(2)
def test_a_rank_that_rests_nothing_takes_part_in_everything(rank: int, tmp_path: Path) -> None:
    """Gather, average, offload, recover and load, with all states on rank 1; compare with the same
    with equal shares.
    """
    ends, seen = [], []
    for shares in (None, (0.0, 1.0)):
        model, optimizer, engine = make_sharded("zero3", shares=shares)
        ema = zs.EMA(engine, 0.9)
        take_steps(rank, 2, model, optimizer)
        ema.update()
        with engine.gathered(writeback=True):
            model.head.weight.data[0, 0] = 3.0
        engine.offload_states()
        engine.reload_states()
        engine.backward(model(*batch(rank, 2)))
        grad = engine.full_grad(model.head.weight)
        assert grad is not None
        engine.reset()
        with engine.join():
            take_steps(rank, [3] if rank else [3, 4], model, optimizer)
        zs.save(tmp_path / str(shares), engine, step=1, states={"ema": ema})
        with ema.swapped():
            seen.append({"grad": grad, **engine.full_state_dict(rank0_only=False)})
        ends.append(final_state(model, engine))
    found = [*differences(seen[1], seen[0]), *differences(ends[1], ends[0])]
    assert found == []


@on_ranks(2)
def test_checkpoints_move_between_share_vectors(rank: int, tmp_path: Path) -> None:
    """Save with one share vector and go on with another; compare with going on."""
    found = []
    ways: list[dict[str, Any]] = [
        {},
        {"shares": (0.1, 0.9)},
        {"shares": (1.0, 0.0), "offload": {"optimizer": ["device", "host"]}},
        {"shares": (0.6, 0.4), "offload": {"grad": ["host", "device"], "optimizer": "host"}},
    ]
    for number, way in enumerate(ways):
        model, optimizer, engine = make_sharded("zero3", **way)
        take_steps(rank, 2, model, optimizer)
        zs.save(tmp_path / str(number), engine, step=1)
        take_steps(rank, [2, 3], model, optimizer)
        expected = final_state(model, engine)
        for other in [one for one in ways if one is not way]:
            model, optimizer, engine = make_sharded("zero2", **other)
            take_steps(rank, [7], model, optimizer)  # something else to be overwritten
            zs.load(tmp_path / str(number), engine)
            take_steps(rank, [2, 3], model, optimizer)
            name = f"{way} loaded with {other}"
            found += differences(final_state(model, engine), expected, name)
    assert found == []


# --------------------------------------------------------------------------------------------------
# tiers that differ between ranks


@on_ranks(2, timeout=110)
def test_ranks_on_different_tiers_give_the_same_bits(rank: int, world: int, tmp_path: Path) -> None:
    host, disk = ["device", "host"], ["device", "disk"]
    cases = [
        ("zero1", {"offload": {"optimizer": host}}),
        ("zero3", {"offload": {"weight": host, "grad": host, "optimizer": host}}),
        ("zero3", {"offload": {"weight": disk, "grad": host, "optimizer": disk}}),
        ("zero3", {"offload": {"weight": disk, "optimizer": host}, "shares": (0.3, 0.7)}),
        ("zero3", {"offload": {"weight": disk}, "comm": zs.Comm(transport="nccl", ordered=True)}),
        ("zero3", {"offload": {"weight": "host", "optimizer": "disk"}, "shares": (0.0, 1.0)}),
        ("zero3", {"offload": {"weight": "host", "fraction": 0.4}, "shares": (0.2, 0.8)}),
        ("zero2", {"offload": {"grad": "host", "optimizer": "host"}, "shares": (0.0, 1.0)}),
    ]
    expected = train(rank, "zero3", 4, clip=0.1)
    out = {}
    for row, options in cases:
        offload = dict(options["offload"])
        if any("disk" in tiers for tiers in offload.values() if not isinstance(tiers, float)):
            offload["disk_path"] = str(tmp_path)
        run = train(rank, row, 4, clip=0.1, **{**options, "offload": offload})
        out[f"{row} {options}"] = run.differs_from(expected)
        away = run.extra["memory"].tier_peaks
        for state in ("weight", "grad", "optimizer"):
            tiers = options["offload"].get(state, "device")
            mine = tiers if isinstance(tiers, str) else tiers[rank]
            if mine != "device" and options.get("shares", (1,) * world)[rank]:
                assert away.get(mine, 0) > 0, (row, options, away)
        if not away:
            assert rank == 0, (row, options)
    assert not any(out.values()), out


class _Narrowing(nn.Module):
    """Linear layers of three sizes. In a backward the smallest come first, so that many sums are
    under way when a larger one is next.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = [(64, 16), (16, 32), (32, 16), *[(16, 16)] * 16]
        self.layers = nn.Sequential(*(nn.Linear(*size) for size in sizes))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layers(nn.functional.one_hot(x, 64).float()).square().mean()


@on_ranks(2)
def test_every_rank_waits_for_sums_that_leave_the_device_of_one(rank: int) -> None:
    """What a wait gives back is room, in which the next unit is gathered on every rank or none."""
    options: dict[str, Any] = {"model": _Narrowing, "units": [nn.Linear]}
    expected, found = train(rank, "zero3", 2, **options), []
    options["comm"] = zs.Comm(transport="gloo")
    for tiers, shares in ((["device", "host"], None), ("host", (0.0, 1.0))):
        offload = {"grad": tiers, "optimizer": tiers}
        run = train(rank, "zero3", 2, offload=offload, shares=shares, **options)
        found += run.differs_from(expected)
    assert found == []


# --------------------------------------------------------------------------------------------------
# "memory" and "auto"


def _measured(rank: int, world: int, shares: str) -> tuple[list[str], dict[str, int]]:
    hetero.free_memory = lambda device: (3 if rank else 1) << 34  # type: ignore[assignment]
    hetero._memory_of = lambda device: f"of rank {rank}"
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("zeroshard")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        model, optimizer, engine = make_sharded("zero3", shares=shares)
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    take_steps(rank, 1, model, optimizer)
    at_rest = engine.memory().at_rest
    engine.close()
    return [line for line in told if line.startswith("shares=")], at_rest


@pytest.mark.parametrize("shares", ["memory", "auto"])
def test_states_follow_free_memory_and_rank_0_says_why(shares: str) -> None:
    (told, small), (silent, large) = run_ranks(2, _measured_apart, shares)
    assert not silent and len(told) == 1
    assert told[0].startswith(f"shares='{shares}': states 0.25, 0.75 (they follow free memory)")
    assert ("batch_shares=[" in told[0]) == (shares == "auto")
    assert "rank 1: 48" in told[0]
    assert abs(small["weight"] / (small["weight"] + large["weight"]) - 0.25) < 0.01


def _measured_apart(rank: int, world: int, shares: str) -> tuple[list[str], dict[str, int]]:
    kept = hetero.free_memory, hetero._memory_of
    try:
        return _measured(rank, world, shares)
    finally:
        hetero.free_memory, hetero._memory_of = kept


def _alike(rank: int, world: int) -> tuple[list[float], list[float]]:
    cluster = hetero.measure()
    return list(cluster.memory_shares), list(cluster.speeds)


def test_ranks_that_share_one_memory_are_alike_and_measure_the_same_cluster() -> None:
    first, second = run_ranks(2, _alike)
    assert first == second
    assert first[0] == [0.5, 0.5]
    assert sum(first[1]) == pytest.approx(1.0)


# --------------------------------------------------------------------------------------------------
# refusals


def _refused(rank: int, world: int, options: dict[str, Any]) -> str:
    model = make_model()
    with pytest.raises(zs.ZeroshardError) as refused:
        zs.shard(model, two_groups(model), **options)
    assert model.head.weight.numel() > 1, "the model is as it was"
    return str(refused.value)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"shares": [0.5, 0.6]}, "shares=[0.5, 0.6] sum to 1.1: the shares of all ranks must"),
        ({"shares": [-0.5, 1.5]}, "shares[0]=-0.5 is not a share"),
        ({"shares": [1.0]}, "shares is given for 1 ranks, and there are 2 data parallel ranks"),
        ({"shares": "speed"}, "shares='speed' is not a list of a number per data parallel rank"),
        ({"shares": [0.5, 0.5], "policy": "ddp"}, "shares has no effect with policy='ddp'"),
        ({"shares": "memory", "policy": "auto"}, "policy='auto' plans ranks that are alike"),
        (
            {"offload": {"optimizer": ["host"]}},
            "offload.optimizer is given for 1 ranks, and there are 2 data parallel ranks",
        ),
        (
            {"offload": {"optimizer": ["device", "cloud"]}},
            "offload.optimizer='cloud' is not a tier",
        ),
        (
            {"offload": {"weight": ["device", "host"]}, "stage": 2},
            "policy='zero2' with this offload: weight=R R on host",
        ),
        (
            {"offload": {"optimizer": ["device", "host"]}, "stage": 0},
            "offload.optimizer per rank needs a row that shards the optimizer's state",
        ),
        (
            {"offload": {"optimizer": ["device", "host"], "delayed_update": 3}},
            "offload.delayed_update with tiers per rank",
        ),
    ],
)
def test_what_cannot_be_shared_is_one_clear_line_on_every_rank(
    options: dict[str, Any], error: str
) -> None:
    for told in run_ranks(2, _refused, options):
        assert told.startswith(error) and "\n" not in told, told


@pytest.mark.parametrize("mine", [[[0.1, 0.9], [0.9, 0.1]], ["memory", "auto"], ["auto", None]])
@on_ranks(2)
def test_ranks_that_ask_for_other_shares_are_told(rank: int, world: int, mine: list[Any]) -> None:

    told = _refused(rank, world, {"shares": mine[rank]})
    assert told.startswith("the ranks disagree, first about 'shares'"), told


def test_shares_are_read_from_json_and_written() -> None:
    config = zs.Config.from_json(json.dumps({"shares": [0.25, 0.75], "stage": 2}))
    assert config.shares == (0.25, 0.75)
    assert zs.Config.from_json(config.to_json()).shares == (0.25, 0.75)
    offload = {"optimizer": ["device", "host"]}
    assert zs.Config(offload=zs.Offload.model_validate(offload)).offload.by_rank == {"optimizer": 2}


def test_nothing_is_refused_on_one_rank_alone() -> None:
    with pytest.raises(RankError, match=r"sum to 0\.9"):
        run_ranks(2, _alone)


def _alone(rank: int, world: int) -> None:
    make_sharded("zero3", shares=[0.5, 0.5] if rank else [0.5, 0.4])
