"""Rows on a mesh of nodes: the same bits from every row and lowering, and between nodes exactly
the bytes of docs/design/routes.md.
"""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.support import inside
from tests.support.harness import on_ranks, run_ranks
from tests.support.hosts import pretended_host
from tests.support.training import (
    ROWS,
    Net,
    batch,
    bytes_between_nodes,
    final_state,
    make_model,
    make_sharded,
    one_step,
    take_steps,
    train,
    two_groups,
)
from zeroshard.core.placement import Mesh, Tier
from zeroshard.core.policy import row as policy_row
from zeroshard.core.precision import PRECISIONS
from zeroshard.core.wire import Wires
from zeroshard.errors import ConfigError, PlanMismatch, ZeroshardError

MESH = Mesh(2, 2)
MESH_ROWS = ("hpz", "mics", "hfsdp")
LOWERINGS = {"flat": False, "two levels": True, "cheapest": None}
SMALL = functools.partial(make_model, layers=2)
WIDTH = 64  # every parameter but the embedding and the head fills whole slots, so padding is small


# --------------------------------------------------------------------------------------------- bits


@pytest.mark.parametrize(
    ("transport", "precision", "steps"),
    [
        ("gloo", "fp32", 2),
        pytest.param("gloo", "fp32", 4, marks=pytest.mark.slow),
        pytest.param("shared_memory", "bf16", 4, marks=pytest.mark.slow),
    ],
)
@on_ranks(4, timeout=110)
def test_rows_and_lowerings_give_the_same_bits(
    rank: int, transport: str, precision: str, steps: int
) -> None:
    """Train every row with every lowering; compare with ddp, flat."""
    micro_batches = 2
    make = functools.partial(two_groups, fused=True, foreach=False)
    options = {
        "optimizer": make,
        "precision": precision,
        "micro_batches": micro_batches,
        "clip": 0.1,
        "model": SMALL,
    }
    runs = {}
    for row in ROWS + MESH_ROWS:
        for name, lowering in LOWERINGS.items():
            if name != "cheapest" and row not in ("ddp", "zero3", "hpz"):
                continue
            comm = zs.Comm(transport=transport, node_size=2, hierarchical=lowering)
            runs[f"{row}, {name}"] = train(rank, row, steps, comm=comm, **options)
    differences = {name: run.differs_from(runs["ddp, flat"]) for name, run in runs.items()}
    assert not any(differences.values()), differences


@pytest.mark.parametrize(
    "transport", ["shared_memory", pytest.param("gloo", marks=pytest.mark.slow)]
)
@on_ranks(4, timeout=110)
def test_inside_no_sync_rows_are_equal_within_each_class(rank: int, transport: str) -> None:
    """Train every row with micro-batches inside no_sync; compare with the first row of its
    class.
    """
    out = {}
    options = {"micro_batches": 3, "no_sync": True, "clip": 0.1, "model": SMALL}
    for rows in (("ddp", "zero1"), ("zero3", "zero2", "hpz"), ("mics", "hfsdp")):
        runs = {}
        for row in rows:
            comm = zs.Comm(transport=transport, node_size=2)
            runs[row] = train(rank, row, 3, comm=comm, **options)
        out[rows[0]] = {row: run.differs_from(runs[rows[0]]) for row, run in runs.items()}
    for differences in out.values():
        assert not any(differences.values()), differences


@on_ranks(2, timeout=90)
def test_gradients_accumulate_inside_no_sync_on_one_node_and_on_nodes_of_one_rank(
    rank: int,
) -> None:
    """Accumulate inside no_sync where a node is all ranks, and where it is one; compare with zero3
    or zero1.
    """
    options = {"micro_batches": 3, "no_sync": True, "clip": 0.1, "model": SMALL}
    tiers = {"device": None, "host": zs.Offload(grad="host", optimizer="host", fraction=0.4)}
    runs = {row: train(rank, row, 3, **options) for row in ("zero1", "zero3")}
    out = {}
    for row in MESH_ROWS:
        for tier, offload in tiers.items():
            run = train(rank, row, 3, offload=offload, **options)
            out[f"{row}, one node, {tier}"] = run.differs_from(runs["zero3"])
    # of nodes of one rank, each keeps the sum of its own micro-batches, as zero1 does
    for row in ("mics", "hfsdp"):
        for tier, offload in tiers.items():
            run = train(rank, row, 3, comm=zs.Comm(node_size=1), offload=offload, **options)
            out[f"{row}, nodes of one rank, {tier}"] = run.differs_from(runs["zero1"])
    assert not any(out.values()), out


def _with_checkpoints(model: Net, rank: int, step: int) -> torch.Tensor:
    x, y = batch(rank, step)
    h = model.embed(x)
    for block in model.blocks:
        h = checkpoint(block, h, use_reentrant=False)
    return torch.nn.functional.cross_entropy(model.head(model.norm(h)).flatten(0, 1), y.flatten())


def _twice(model: Net, rank: int, step: int) -> torch.Tensor:
    first = model(*batch(rank, 2 * step))
    with torch.no_grad():
        model(*batch(rank, 77))
    return first + model(*batch(rank, 2 * step + 1))


@pytest.mark.parametrize("row", ["hpz", pytest.param("mics", marks=pytest.mark.slow), "hfsdp"])
@on_ranks(4, timeout=60)
def test_recomputation_and_several_forwards_keep_the_bits(rank: int, row: str) -> None:
    """Train with recomputed blocks, and with two forwards before each backward; compare with
    zero3.
    """
    comm = zs.Comm(transport="gloo", node_size=2)
    out = []
    for forward in (_with_checkpoints, _twice):
        runs = []
        for kind in ("zero3", row):
            model = SMALL()
            optimizer = two_groups(model)
            engine = zs.shard(model, optimizer, policy=kind, comm=comm)
            for step in range(3):
                forward(model, rank, step).backward()
                with torch.no_grad():
                    model(*batch(rank, 99))  # between backward and step
                optimizer.step()
                optimizer.zero_grad()
            runs.append(final_state(model, engine))
        out.append(
            [name for name, value in runs[0].items() if not torch.equal(value, runs[1][name])]
        )
    assert out == [[], []]


@on_ranks(4, timeout=90)
def test_states_on_other_tiers_keep_the_bits(rank: int, tmp_path: Path) -> None:
    """Train rows with states on other tiers; compare with zero3 on the device."""
    comm = zs.Comm(node_size=2)
    reference = train(rank, "zero3", 3, comm=comm, micro_batches=2, clip=0.1)
    out = {}
    for row, states in (
        ("hpz", {"weight": "host", "grad": "host", "optimizer": "host"}),
        ("hpz", {"weight": "disk", "optimizer": "disk"}),
        ("mics", {"weight": "host", "grad": "host", "optimizer": "disk"}),
        ("hfsdp", {"grad": "host", "optimizer": "host", "fraction": 0.5}),
    ):
        offload = zs.Offload(
            disk_path=str(tmp_path) if "disk" in states.values() else None, **states
        )  # type: ignore[arg-type]
        run = train(rank, row, 3, comm=comm, micro_batches=2, clip=0.1, offload=offload)
        out[f"{row} {states}"] = run.differs_from(reference)
    assert not any(out.values()), out


@on_ranks(4, timeout=90)
def test_checkpoints_lead_from_row_to_row(rank: int, tmp_path: Path) -> None:
    """Save in every mesh row, load in the next one and in zero3; compare."""
    out = []
    for save, load in (("hpz", "mics"), ("mics", "hfsdp"), ("hfsdp", "zero3"), ("zero3", "mics")):
        states = []
        for row, loads in ((save, False), (load, True)):
            model, optimizer, engine = make_sharded(row, comm=zs.Comm(node_size=2))
            if loads:
                zs.load(f"{tmp_path}/{save}", engine)
            for step in range(2):
                model(*batch(rank, step + 2 * loads)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 1 and not loads:
                    zs.save(f"{tmp_path}/{save}", engine, step=2)
            if not loads:
                take_steps(rank, range(2, 4), model, optimizer)
            states.append(final_state(model, engine))
        out += [
            f"{save} to {load}: {name}"
            for name, value in states[0].items()
            if not torch.equal(value, states[1][name])
        ]
    assert out == []


def _meets_after_backward(rank: int, world: int, row: str, own: bool) -> None:
    """`own`: all but norm and head lie over a mesh of their own, as experts that every rank holds.
    The last sums of a backward are then theirs: a wait for a later one would start them, too.
    """
    comm = zs.Comm(node_size=2, hierarchical=True)
    options: dict[str, Any] = {}
    if own:
        mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp", "ep"))
        options = {"mesh_of": {"embed": mesh, "blocks.?": mesh}}
    model, optimizer, engine = make_sharded(row, comm=comm, **options)
    for step in range(2):
        loss = model(*batch(rank, step))
        if rank == 3:
            time.sleep(0.3)  # the sums of rank 2 with it are not over when rank 2 leaves
        loss.backward()
        dist.all_reduce(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    engine.close()


@pytest.mark.parametrize("row", ["zero1", "zero3", "hfsdp"])
def test_ranks_may_meet_in_a_call_of_their_own_after_a_backward(row: str) -> None:
    """Whoever has left its backward has started all levels of its sums: others wait for them
    in theirs.
    """
    run_ranks(4, _meets_after_backward, row, False, timeout=60)


@pytest.mark.timeout(90)
@pytest.mark.parametrize("row", ["zero1", "zero3"])
def test_ranks_may_meet_after_a_backward_whose_experts_are_summed_in_two_levels(row: str) -> None:
    """The same for sums that go over transports of their own, each with two levels."""
    run_ranks(4, _meets_after_backward, row, True, timeout=60)


@on_ranks(4, timeout=60)
def test_nodes_of_a_power_of_two_do_not_change_the_bits(rank: int) -> None:
    runs = [
        train(rank, "zero3", 5, comm=zs.Comm(transport="gloo", node_size=size))
        for size in (None, 4, 2, 1)
    ]
    differing = [run.differs_from(runs[0]) for run in runs]
    assert not any(differing), differing


@on_ranks(4, timeout=100)
def test_ordered_sums_over_hosts_go_in_two_levels_by_nodes_and_are_refused_without(
    rank: int,
) -> None:
    """Train with ordered sums over the backend's collectives, as ranks of two hosts. Look at the
    error of flat ones that nobody asked for, what differs from gloo's bits on the same mesh, and
    the bytes of gradients from other nodes.
    """
    expected = {
        size: train(rank, "zero3", 3, comm=zs.Comm(transport="gloo", node_size=size))
        for size in (None, 2)
    }
    lowerings = {"flat": (None, False), "nodes": (2, None), "nodes, flat": (2, False)}
    if torch.__version__ < (2, 13):  # gloo has no all-to-all of columns
        del lowerings["nodes, flat"]
    with pretended_host(rank // 2):
        with pytest.raises(ConfigError) as caught:
            train(rank, "zero3", 1, comm=zs.Comm(transport="nccl", ordered=True))
        differing, moved = {"meshes": expected[2].differs_from(expected[None])}, {}
        for name, (size, levels) in lowerings.items():
            comm = zs.Comm(transport="nccl", ordered=True, node_size=size, hierarchical=levels)
            run = train(rank, "zero3", 3, comm=comm)
            differing[name] = run.differs_from(expected[size])
            moved[name] = run.extra["traffic"].between_nodes["reduce_scatter"]
    with pretended_host(rank):  # hosts of one rank: flat is all there is
        train(rank, "zero3", 1, comm=zs.Comm(transport="nccl", ordered=True))
    refused, differing, moved = str(caught.value), differing, moved
    assert "Set comm.node_size" in refused and "comm.hierarchical=False" in refused
    assert not differing.pop("meshes"), "nodes of two: the same tree"
    assert not any(differing.values()), differing
    assert 2 * moved["nodes"] == moved.get("nodes, flat", 2 * moved["nodes"]) > 0


# ------------------------------------------------------------------------------------------ traffic


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@on_ranks(4, timeout=100)
def test_bytes_between_nodes_are_the_formula(rank: int, precision: str) -> None:
    """Train one step after a first, for every row and lowering; look at bytes between nodes, all
    bytes, and elements with padding.
    """
    out = {}
    for row in ROWS + MESH_ROWS:
        for name, lowering in LOWERINGS.items():
            torch.manual_seed(0)
            model = Net(width=WIDTH, layers=2)
            optimizer = two_groups(model)
            comm = zs.Comm(transport="gloo", node_size=2, hierarchical=lowering)
            engine = zs.shard(model, optimizer, policy=row, precision=precision, comm=comm)
            for _ in range(2):
                one_step(engine, model, optimizer, rank)
                inside.wait_published(engine)  # what is published arrives in this step
            traffic = engine.traffic()
            out[row, name] = (
                bytes_between_nodes(engine),
                traffic.total - traffic.bytes["exchange"],
                inside.padded_numel(engine),
            )
            engine.close()
    for (row, name), (between, total, padded) in out.items():
        wires = Wires.of(PRECISIONS[precision])
        formula = policy_row(row).wire_bytes(
            numel=padded, mesh=MESH, wires=wires, two_level=LOWERINGS[name]
        )
        assert (between, total) == (formula.links.between, formula.total), (row, name)


# ------------------------------------------------------------------------------------------- memory


@on_ranks(4, timeout=60)
def test_bytes_at_rest_are_the_formula(rank: int) -> None:
    """Look at bytes at rest, what the formula says, and the bytes of columns between forward and
    backward.
    """
    out = {}
    for row in MESH_ROWS:
        torch.manual_seed(0)
        model = Net(width=WIDTH, layers=3)
        optimizer = two_groups(model)
        engine = zs.shard(model, optimizer, policy=row, precision="bf16", comm=zs.Comm(node_size=2))
        loss = model(*batch(rank, 0))
        columns = inside.column_bytes(engine)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        padded = inside.padded_numel(engine)
        formula = (
            policy_row(row)
            .bytes_at_rest("after_step", numel=padded, mesh=MESH, precision=PRECISIONS["bf16"])
            .total
        )
        out[row] = (
            sum(engine.memory().at_rest.values()),
            formula,
            columns - (padded if row == "hpz" else 0),
        )
        engine.close()
    for row, (counted, formula, columns) in out.items():
        assert counted == pytest.approx(formula, rel=0.01), row  # moments have no padding
        assert columns == 0, "hpz keeps 1/2 of the bf16 weights, the others nothing"


# ------------------------------------------------------------------------------------------- misuse


@on_ranks(4, timeout=30)
def test_the_node_size_comes_from_the_launcher() -> None:
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    model = make_model()
    with pytest.raises(ConfigError) as caught:
        zs.shard(model, two_groups(model), policy="hpz")
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    engine = zs.shard(model, two_groups(model), policy="hpz")
    name = engine.transport if hasattr(engine, "transport") else repr(engine)
    engine.close()
    refused, name = str(caught.value), str(name)
    assert (
        refused == "policy='hpz' needs to know the nodes: set comm.node_size (no launcher has set"
        " LOCAL_WORLD_SIZE)"
    )
    assert "in nodes" in name


def test_column_weights_off_the_device_need_a_column_optimizer() -> None:
    with pytest.raises(
        ValueError, match=r"weight=R S on host with optim=S S: .*take mics, or zero3"
    ):
        policy_row("hfsdp").tiered(Tier.HOST, Tier.DEVICE, Tier.HOST)


def _refused(rank: int, world: int, sizes: tuple[int, ...]) -> str:
    model = make_model()
    with pytest.raises((ConfigError, PlanMismatch)) as caught:
        zs.shard(model, two_groups(model), comm=zs.Comm(node_size=sizes[rank]))
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_node_size_that_does_not_divide_is_refused_on_every_rank() -> None:
    for text in run_ranks(4, _refused, (3, 3, 3, 3), timeout=30):
        assert text == "ConfigError: comm.node_size=3 does not divide the 4 ranks (0 to 3)"


def test_ranks_that_disagree_about_the_node_size_are_told_who_says_what() -> None:
    for text in run_ranks(4, _refused, (2, 2, 4, 2), timeout=30):
        assert (
            text.startswith("PlanMismatch")
            and "comm" in text
            and '"node_size":4' in text
            and "rank 2" in text
        ), text


# ------------------------------------------------------------------------------------------- faults


def _flipped(rank: int, world: int, row: str) -> str:
    model, optimizer, engine = make_sharded(row, comm=zs.Comm(node_size=2), verify_every=2)
    try:
        for step in range(4):
            take_steps(rank, [step], model, optimizer)
            if rank == 3 and step == 2:
                inside.alter_weights_at_rest(engine)
        engine.close()
    except PlanMismatch as error:
        return str(error)
    return "nothing noticed"


@pytest.mark.parametrize("row", ["mics", "hfsdp"])
def test_a_column_that_differs_between_nodes_is_found(row: str) -> None:
    for text in run_ranks(4, _flipped, row, timeout=30):
        assert "differ between rank 1 and rank(s) [3], which hold the same" in text, text


def _compared(rank: int, world: int, tiers: dict[str, Any], alters: bool = False) -> str:
    """Return what is told of columns; rank 3 `alters` a moment."""
    model = make_model()
    optimizer, offload = two_groups(model), zs.Offload(**tiers)
    engine = zs.shard(
        model, optimizer, policy="mics", comm=zs.Comm(node_size=2), offload=offload, verify_every=1
    )
    try:
        for step in range(2):
            take_steps(rank, [step], model, optimizer)
            if alters and rank == 3:
                next(iter(optimizer.state.values()))["exp_avg"][0] += 1.0
        engine.close()
    except PlanMismatch as error:
        return str(error)
    return "nothing noticed"


def test_a_moment_that_differs_between_nodes_is_found_where_weights_rest_elsewhere() -> None:
    for text in run_ranks(4, _compared, {"weight": "host"}, True, timeout=30):
        assert "first about 'optimizer state of " in text, text
        assert "differ between rank 1 and rank(s) [3], which hold the same" in text, text


@pytest.mark.parametrize(
    "tiers",
    [{"weight": "host"}, {"weight": "host", "optimizer": "host", "fraction": 0.3}],
    ids=["weights away", "a part of all away"],
)
def test_columns_are_compared_where_weights_rest_elsewhere(tiers: dict[str, Any]) -> None:
    assert run_ranks(4, _compared, tiers, timeout=30) == ["nothing noticed"] * 4


def _late(rank: int, world: int) -> str:
    """Rank 3 does not come; return what the others are told."""
    model = make_model()
    engine = zs.shard(
        model, two_groups(model), comm=zs.Comm(transport="gloo", node_size=2), stall_timeout_s=1.5
    )
    if rank == 3:
        time.sleep(4)
        inside.transport(engine).close()
        return ""
    try:
        model(*batch(rank, 0))
    except ZeroshardError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        time.sleep(3)
        inside.transport(engine).close()
    return "went on"


def test_a_rank_that_does_not_come_is_named_by_its_number_in_the_job() -> None:
    told = run_ranks(4, _late, timeout=30)
    assert "StallError" in told[1] and "rank(s) [3]" in told[1], told  # of its column
    assert "rank(s) [3]" in told[2], told  # of its node
    assert "rank(s) [1]" in told[0] or "rank(s) [2]" in told[0], told  # who wait for rank 3
