"""The table, the cells that make no sense, and its two cost functions against the numbers of the
papers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.core.placement import Cell, Cells, Mesh, Tier
from zeroshard.core.policy import ROWS, STAGES, Policy, RestPoint, row
from zeroshard.core.precision import PRECISIONS, Precision
from zeroshard.core.wire import Wires

NUMEL = 24_000_000

TABLE = """
    ddp         R R  R R  P P  R R
    zero1       R R  R R  P P  S S
    zero2       R R  R R  S S  S S
    zero3       S S  S S  S S  S S
    zero3-keep  S S  R R  S S  S S
    hpz         S S  R S  S S  S S
    mics        R S  R S  P S  R S
    hfsdp       R S  R S  P S  S S
"""


def cells(weight: str, between: str, grad: str, optim: str) -> Cells:
    return Cells(*(Cell.parse(text) for text in (weight, between, grad, optim)))


# -- the table
# --------------------------------------------------------------------------------------------------


def test_the_rows_are_those_of_the_design() -> None:
    expected = {}
    for line in TABLE.split("\n")[1:-1]:
        name, *words = line.split()
        expected[name] = cells(*(" ".join(words[index : index + 2]) for index in range(0, 8, 2)))
    assert {name: policy.default for name, policy in ROWS.items()} == expected
    assert all(policy.name == name for name, policy in ROWS.items())


def test_stages_are_names_of_rows() -> None:
    assert [STAGES[stage] for stage in range(4)] == ["ddp", "zero1", "zero2", "zero3"]
    assert all(row(name) is ROWS[name] for name in STAGES.values())


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"'zero_3' is not a row of the table \(ddp, .*did you mean 'zero3'"
    ):
        row("zero_3")
    with pytest.raises(ValueError, match=r"\)$"):
        row("something else")


def test_units_may_have_cells_of_their_own() -> None:
    policy = replace(row("zero3"), units={"head": row("zero1").default})
    assert policy.cells("head") == row("zero1").default
    assert policy.cells("blocks.0") == policy.cells() == row("zero3").default
    assert hash(policy) == hash(row("zero3")) and policy != row("zero3")


# -- nonsense
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nonsense", "message"),
    [
        (("P R", "R R", "P P", "R R"), "weight=P R: only a gradient can be a partial sum"),
        (("R R", "R R", "R R", "S S"), "grad=R R: every rank would receive and keep the whole sum"),
        (("R R", "R R", "P R", "S S"), "grad=P R: every rank would receive and keep the whole sum"),
        (("R R", "R P", "P P", "R R"), "between=R P: only a gradient"),
        (("R R", "R R", "P P", "P P"), "optim=P P: only a gradient"),
        (
            ("R R", "R R", "S S", "R S"),
            "optim=R S is sharded less finely than grad=S S on the node axis, which it reads",
        ),
        (
            ("R R", "R R", "P S", "S R"),
            "optim=S R is sharded less finely than grad=P S on the local axis",
        ),
        (("R R", "R R", "S S", "R R"), "sharded less finely than grad"),
        (
            ("S S", "S S", "P P", "S R"),
            "optim=S R is sharded less finely than weight=S S on the local axis, which it writes",
        ),
        (
            ("R R", "S S", "S S", "S S"),
            "between=S S is sharded more finely than weight=R R on the node axis",
        ),
        (
            ("R S", "S S", "S S", "S S"),
            "between=S S is sharded more finely than weight=R S on the node axis",
        ),
    ],
)
def test_cells_that_make_no_sense_cannot_be_built(
    nonsense: tuple[str, str, str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        cells(*nonsense)


@pytest.mark.parametrize("grad", ["P P", "P S"])
def test_a_partial_sum_does_not_rest_on_disk(grad: str) -> None:
    default = row("mics").default
    replace(default, grad=Cell.parse(grad, Tier.HOST))
    with pytest.raises(ValueError, match=f"grad={grad} on disk"):
        replace(default, grad=Cell.parse(grad, Tier.DISK))


AXES = st.tuples(st.sampled_from("RSP"), st.sampled_from("RSP")).map(" ".join)


@given(st.tuples(AXES, AXES, AXES, AXES))
def test_whatever_can_be_built_has_an_optimizer_that_sees_its_gradient_and_covers_its_weight(
    texts: tuple[str, str, str, str],
) -> None:
    try:
        built = cells(*texts)
    except ValueError:
        return
    for mesh in (Mesh(1, 4), Mesh(3, 2)):
        shards = {
            name: getattr(built, name).num_shards(mesh)
            for name in ("weight", "between", "grad", "optim")
        }
        assert shards["optim"] >= max(shards["weight"], shards["grad"])
        assert shards["between"] <= shards["weight"]


# -- bytes at rest
# --------------------------------------------------------------------------------------------------


def bytes_per_parameter(name: str, point: RestPoint, precision: Precision, mesh: Mesh) -> float:
    return row(name).bytes_at_rest(point, numel=NUMEL, mesh=mesh, precision=precision).total / NUMEL


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_after_a_step_each_rank_holds_what_the_design_says(num_nodes: int, num_ranks: int) -> None:
    mesh, n = Mesh(num_nodes, num_ranks), num_nodes * num_ranks
    expected = {
        "bf16": {"ddp": 14, "zero1": 2 + 12 / n, "zero2": 2 + 12 / n, "zero3": 14 / n},
        "fp32": {"ddp": 12, "zero1": 4 + 8 / n, "zero2": 4 + 8 / n, "zero3": 12 / n},
    }
    for precision, rows in expected.items():
        for name, total in rows.items():
            assert bytes_per_parameter(
                name, "after_step", PRECISIONS[precision], mesh
            ) == pytest.approx(total), (name, precision)


@pytest.mark.parametrize("name", ["zero1", "zero3"])
def test_weights_in_fp32_are_their_own_masters_where_both_rest_on_one_tier(name: str) -> None:
    device, host = Tier.DEVICE, Tier.HOST
    for weight, optimizer, has_master in (
        (device, device, False),
        (device, host, True),
        (host, host, False),
        (host, device, True),
    ):
        if name == "zero1" and weight is host:
            continue  # refused: replicated weights stay on the device
        moved = row(name).tiered(weight, device, optimizer)
        rests = moved.bytes_at_rest(
            "after_step", numel=NUMEL, mesh=Mesh(1, 4), precision=PRECISIONS["fp32"]
        )
        # a quarter of the parameters, 4 bytes each
        assert rests.master == (NUMEL if has_master else 0), (weight, optimizer)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_between_micro_batches_the_gradient_is_added(num_ranks: int) -> None:
    mesh, n = Mesh(1, num_ranks), num_ranks
    share = {"ddp": 1, "zero1": 1, "zero2": 1 / n, "zero3": 1 / n}
    for name, precision in (
        (name, precision) for name in share for precision in PRECISIONS.values()
    ):
        at_rest = bytes_per_parameter(name, "after_step", precision, mesh)
        assert bytes_per_parameter(name, "between_micro_batches", precision, mesh) == pytest.approx(
            at_rest + 4 * share[name]
        )


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64])
def test_bf16_gradients_give_the_papers_bytes(num_ranks: int) -> None:
    """ZeRO, figure 1: K = 12 and 16 bytes per parameter for Adam."""
    n, paper = num_ranks, Precision("bf16", accumulate="bf16")  # type: ignore[arg-type]
    expected = {"ddp": 16, "zero1": 4 + 12 / n, "zero2": 2 + 14 / n, "zero3": 16 / n}
    for name, total in expected.items():
        assert bytes_per_parameter(
            name, "between_micro_batches", paper, Mesh(1, n)
        ) == pytest.approx(total), name


def test_the_papers_example_of_7_5_billion_parameters_on_64_gpus() -> None:
    paper = Precision("bf16", accumulate="bf16")  # type: ignore[arg-type]
    gigabytes = {
        name: (
            row(name)
            .bytes_at_rest(
                "between_micro_batches", numel=7_500_000_000, mesh=Mesh(1, 64), precision=paper
            )
            .total
            / 1e9
        )
        for name in STAGES.values()
    }
    assert gigabytes == pytest.approx(
        {"ddp": 120, "zero1": 31.4, "zero2": 16.6, "zero3": 1.9}, abs=0.05
    )


def test_states_are_counted_one_by_one() -> None:
    rest = row("zero1").bytes_at_rest(
        "between_micro_batches",
        numel=100,
        mesh=Mesh(1, 4),
        precision=PRECISIONS["bf16"],
        moment_bytes=4,
    )
    assert (rest.weight, rest.master, rest.grad, rest.optimizer, rest.total) == (
        200,
        100,
        400,
        100,
        800,
    )
    rest = row("zero3").bytes_at_rest(
        "after_step", numel=100, mesh=Mesh(1, 4), precision=PRECISIONS["fp32"]
    )
    assert (rest.weight, rest.master, rest.grad, rest.optimizer) == (100, 0, 0, 200)


def test_hybrid_rows_are_cut_by_node() -> None:
    mesh = Mesh(num_nodes=4, node_size=8)
    assert bytes_per_parameter("mics", "after_step", PRECISIONS["bf16"], mesh) == pytest.approx(
        14 / 8
    )
    assert bytes_per_parameter("hfsdp", "after_step", PRECISIONS["bf16"], mesh) == pytest.approx(
        2 / 8 + 12 / 32
    )
    assert bytes_per_parameter(
        "hfsdp", "between_micro_batches", PRECISIONS["bf16"], mesh
    ) == pytest.approx(2 / 8 + 12 / 32 + 4 / 8)


# -- bytes on the wire
# --------------------------------------------------------------------------------------------------


def wire(name: str, precision: Precision, size: int, k: int = 1, *, no_sync: bool = False) -> float:
    return (
        row(name)
        .wire_bytes(
            numel=NUMEL,
            mesh=Mesh(1, size),
            wires=Wires.of(precision),
            micro_batches=k,
            no_sync=no_sync,
        )
        .total
    )


@pytest.mark.parametrize("size", [1, 2, 5, 8])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("reduce", [None, "fp32"])
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_every_backward_outside_no_sync_reduces(
    compute: str, reduce: str | None, k: int, size: int
) -> None:
    precision = Precision(compute, reduce)  # type: ignore[arg-type]
    psi, r, remote = (
        NUMEL * precision.compute.itemsize,
        NUMEL * precision.wire.itemsize,
        (size - 1) / size,
    )
    expected = {
        "ddp": k * r + 4 * NUMEL,  # the fp32 sum comes back: 3 Psi in bf16
        "zero1": k * r + psi,
        "zero2": k * r + psi,
        "zero3": k * (2 * psi + r),
        "zero3-keep": k * (psi + r),
    }
    for name, total in expected.items():
        assert wire(name, precision, size, k) == pytest.approx(total * remote), name


@pytest.mark.parametrize("k", [1, 2, 4])
def test_inside_no_sync_partial_sums_are_reduced_once(k: int) -> None:
    precision, psi, remote = PRECISIONS["bf16"], 2 * NUMEL, 3 / 4
    expected = {"ddp": 3 * psi, "zero1": 2 * psi, "zero2": (k + 1) * psi, "zero3": k * 3 * psi}
    for name, total in expected.items():
        assert wire(name, precision, 4, k, no_sync=True) == pytest.approx(total * remote), name


def test_the_bytes_say_what_they_carry() -> None:
    sent = row("zero3").wire_bytes(
        numel=100, mesh=Mesh(1, 4), wires=Wires.of(PRECISIONS["bf16"]), micro_batches=2
    )
    assert (sent.gather.total, sent.reduce.total, sent.publish.total, sent.total) == (
        600,
        300,
        0,
        900,
    )
    sent = row("zero1").wire_bytes(
        numel=100, mesh=Mesh(1, 4), wires=Wires.of(PRECISIONS["bf16"]), micro_batches=2
    )
    assert (sent.gather.total, sent.reduce.total, sent.publish.total, sent.total) == (
        0,
        300,
        150,
        450,
    )


@pytest.mark.parametrize("name", ROWS)
def test_one_rank_sends_nothing(name: str) -> None:
    assert wire(name, PRECISIONS["bf16"], 1, 3) == 0


def test_the_cells_of_a_unit_count_for_that_unit() -> None:
    policy: Policy = replace(row("zero3"), units={"head": row("zero1").default})
    options = {"numel": 100, "precision": PRECISIONS["bf16"]}
    wire = {"numel": 100, "mesh": Mesh(1, 4), "wires": Wires.of(PRECISIONS["bf16"])}
    assert policy.wire_bytes(unit="head", **wire) == row("zero1").wire_bytes(**wire)  # type: ignore[arg-type]
    at_rest = policy.bytes_at_rest("after_step", mesh=Mesh(1, 4), unit="head", **options)  # type: ignore[arg-type]
    assert at_rest == row("zero1").bytes_at_rest("after_step", mesh=Mesh(1, 4), **options)  # type: ignore[arg-type]
