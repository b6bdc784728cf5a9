"""Rows on a mesh of nodes: the same bits from every row and lowering, and between nodes exactly the bytes of docs/design/traffic.md."""

from __future__ import annotations

import functools

import pytest
import torch

import zeroshard as zs
from tests.engine.common import ROWS, Net, batch, make_model, train, two_groups
from tests.harness import run_ranks
from zeroshard.core.placement import Mesh
from zeroshard.core.policy import row as policy_row
from zeroshard.core.precision import PRECISIONS
from zeroshard.core.traffic import Wires
from zeroshard.errors import ConfigError, PlanMismatch
from zeroshard.runtime.unit import UnitState

MESH = Mesh(2, 2)
LOWERINGS = {"flat": False, "two levels": True, "cheapest": None}
WIDTH = 64  # every parameter but the embedding and the head fills whole slots, so padding is small


# ---------------------------------------------------------------------------------------------------------------- bits


def _runs(rank: int, world: int, transport: str, precision: str, steps: int, micro_batches: int) -> dict[str, list[str]]:
    """Train every row with every lowering; return what differs from ddp, flat."""
    make = functools.partial(two_groups, fused=True, foreach=False)
    options = {"optimizer": make, "precision": precision, "micro_batches": micro_batches, "clip": 0.1}
    runs = {}
    for row in ROWS:
        for name, lowering in LOWERINGS.items():
            comm = zs.Comm(transport=transport, node_size=2, hierarchical=lowering)
            runs[f"{row}, {name}"] = train(rank, row, steps, comm=comm, **options)
    return {name: run.differs_from(runs["ddp, flat"]) for name, run in runs.items()}


@pytest.mark.parametrize(("transport", "precision"), [("gloo", "fp32"), ("shared_memory", "bf16")])
def test_rows_and_lowerings_give_the_same_bits(transport: str, precision: str) -> None:
    for differences in run_ranks(4, _runs, transport, precision, 4, 2, timeout=110):
        assert not any(differences.values()), differences


def _node_sizes(rank: int, world: int) -> list[list[str]]:
    runs = [train(rank, "zero3", 5, comm=zs.Comm(transport="gloo", node_size=size)) for size in (None, 4, 2, 1)]
    return [run.differs_from(runs[0]) for run in runs]


def test_the_node_size_is_part_of_the_bits() -> None:
    for same, four, two, one in run_ranks(4, _node_sizes, timeout=60):
        assert not same and not four and two
        assert not one, "nodes of one rank are summed in rank order, as one node is"


# ---------------------------------------------------------------------------------------------------------------- traffic


def _counted(rank: int, world: int, precision: str) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Train one step after a first, for every row and lowering; return bytes between nodes, all bytes, and elements with padding."""
    out = {}
    for row in ROWS:
        for name, lowering in LOWERINGS.items():
            torch.manual_seed(0)
            model = Net(width=WIDTH, layers=3)
            optimizer = two_groups(model)
            comm = zs.Comm(transport="gloo", node_size=2, hierarchical=lowering)
            engine = zs.shard(model, optimizer, policy=row, precision=precision, comm=comm, stall_timeout_s=20)
            for _ in range(2):
                engine.reset_traffic()
                model(*batch(rank, 0)).backward()
                optimizer.step()
                optimizer.zero_grad()
                for unit in engine._weights.units:
                    if unit.state is UnitState.GATHERING:
                        unit.finish_gather()  # what is published arrives in this step
            traffic = engine.traffic()
            padded = sum(s.flat.layout.numel for unit in engine._weights.units for s in unit.segments)
            between = sum(num_bytes for operation, num_bytes in traffic.between_nodes.items() if operation != "exchange")
            out[row, name] = (between, traffic.total - traffic.bytes["exchange"], padded)
            engine.close()
    return out


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_between_nodes_are_the_formula(precision: str) -> None:
    for seen in run_ranks(4, _counted, precision, timeout=100):
        for (row, name), (between, total, padded) in seen.items():
            wires = Wires.of(PRECISIONS[precision])
            formula = policy_row(row).wire_bytes(numel=padded, mesh=MESH, wires=wires, two_level=LOWERINGS[name])
            assert (between, total) == (formula.links.between, formula.total), (row, name)


# ---------------------------------------------------------------------------------------------------------------- misuse


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
        assert text.startswith("PlanMismatch") and "comm" in text and '"node_size":4' in text and "rank 2" in text, text
