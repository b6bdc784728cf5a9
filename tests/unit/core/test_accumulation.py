"""Which gradients rest whole within a budget, and what that does to traffic: pure functions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zeroshard.core.placement import Mesh
from zeroshard.core.policy import ROWS, Policy
from zeroshard.core.precision import PRECISIONS
from zeroshard.core.route import Route
from zeroshard.core.sizes import UnitGradient, least_budget, resting_whole
from zeroshard.core.wire import Formats, Wires

EXAMPLE = [
    UnitGradient("block.0", 4, 2),
    UnitGradient("block.1", 4, 2),
    UnitGradient("head", 16, 8),
]
SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)
SHARDED = sorted(name for name, policy in ROWS.items() if policy.default.grad.is_sharded)


def _units(sizes: list[int], ranks: int) -> list[UnitGradient]:
    """Return units of so many elements for each rank."""
    return [
        UnitGradient(str(index), size * ranks * 4, size * 4) for index, size in enumerate(sizes)
    ]


def _at_rest(units: list[UnitGradient], whole: tuple[str, ...]) -> int:
    return sum(unit.whole if unit.unit in whole else unit.shard for unit in units)


def test_the_smallest_units_rest_first_and_the_later_one_among_equals() -> None:
    taken = {budget: resting_whole(EXAMPLE, budget) for budget in (13, 14, 16, 23, 24)}
    assert taken[13] == ()
    assert taken[14] == taken[14] == ("block.1",)
    assert taken[16] == taken[23] == ("block.1", "block.0")
    assert taken[24] == ("block.1", "block.0", "head")
    assert least_budget(EXAMPLE) == 14


def test_units_that_a_reduce_does_not_make_smaller_are_not_in_line() -> None:
    alone = UnitGradient("on one rank", 4, 4)
    assert resting_whole([alone], 100) == ()
    assert resting_whole([alone, *EXAMPLE], 18) == ("block.1",)


@given(SIZES, st.integers(2, 8), st.integers(0, 3000))
def test_what_rests_is_within_the_budget_and_less_than_the_next_unit_is_left_over(
    sizes: list[int], ranks: int, budget: int
) -> None:
    units = _units(sizes, ranks)
    whole = resting_whole(units, budget)
    left = budget - _at_rest(units, whole)
    if budget >= sum(unit.shard for unit in units):
        assert left >= 0
        others = [unit.extra for unit in units if unit.unit not in whole]
        assert left < min(others, default=left + 1)
    assert bool(whole) == (budget >= least_budget(units))


@given(SIZES, st.integers(2, 8), st.integers(0, 3000), st.integers(0, 3000))
def test_a_larger_budget_keeps_the_same_units_and_perhaps_more(
    sizes: list[int], ranks: int, budget: int, more: int
) -> None:
    units = _units(sizes, ranks)
    smaller, larger = resting_whole(units, budget), resting_whole(units, budget + more)
    assert larger[: len(smaller)] == smaller


@given(
    st.sampled_from(SHARDED),
    SIZES,
    st.sampled_from([Mesh(1, 2), Mesh(1, 4), Mesh(2, 2), Mesh(2, 4)]),
    st.integers(1, 5),
)
def test_traffic_falls_as_the_budget_grows_and_ends_at_that_of_whole_gradients(
    row: str, sizes: list[int], mesh: Mesh, micro_batches: int
) -> None:
    units = _units(sizes, mesh.size)
    budgets = range(0, _at_rest(units, tuple(unit.unit for unit in units)) + 1, 64)
    seen = []
    for names in dict.fromkeys(resting_whole(units, budget) for budget in budgets):
        policy = ROWS[row].with_whole_gradients(names)
        seen.append(_step_bytes(policy, units, mesh, micro_batches))
    whole = ROWS[row].with_whole_gradients(unit.unit for unit in units)
    seen.append(_step_bytes(whole, units, mesh, micro_batches))
    assert seen == sorted(seen, reverse=True)
    assert seen[0] == _step_bytes(ROWS[row], units, mesh, micro_batches)


def _step_bytes(policy: Policy, units: list[UnitGradient], mesh: Mesh, micro_batches: int) -> float:
    """Return what a step moves by the closed form, which must be what its routes move."""
    total = 0.0
    for unit in units:
        numel = unit.whole // 4
        formula = policy.wire_bytes(
            numel=numel,
            mesh=mesh,
            wires=Wires.of(PRECISIONS["fp32"]),
            micro_batches=micro_batches,
            no_sync=True,
            unit=unit.unit,
        ).total
        routes = policy.routes(mesh, Formats.of("fp32"), unit=unit.unit)
        steps: list[Route] = list(routes.step(micro_batches=micro_batches, no_sync=True))
        assert formula == sum(route.bytes(numel).total for route in steps)
        total += formula
    return total


def test_a_unit_that_rests_whole_differs_in_its_gradient_alone() -> None:
    policy = ROWS["zero3"].with_whole_gradients(["head"])
    changed, others = policy.cells("head"), policy.cells("blocks.0")
    assert str(changed.grad) == "P P" and others == policy.default == ROWS["zero3"].default
    assert (changed.weight, changed.between, changed.optim) == (
        others.weight, others.between, others.optim,
    )  # fmt: skip
