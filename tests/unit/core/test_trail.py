"""Where two trails part: slices of any cut add up, copies are compared, and the first difference in
the order of a step is told, with the ranks that can be blamed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.core.sliced_digest import MASK, BlockTotals, block_total, place_of, placed_sum
from zeroshard.core.trail import PHASES, Comparison, Replay, Trail, compare

UNITS = ["first", "second"]
Hashes = dict[str, dict[str, str]]


def header(rank: int, world: int, **more: Any) -> dict[str, Any]:
    return {
        "trail": 1,
        "rank": rank,
        "world": world,
        "row": "zero3",
        "leaves": "4",
        "every": 1,
        "units": UNITS,
        "groups": dict.fromkeys(UNITS, 0),
        "cut": f"{world}",
        "curve": {"torch": "2"},
    } | more


def slices(total: int, world: int) -> list[str]:
    """Cut a hash into those of `world` ranks."""
    parts = [1000 * rank + 7 for rank in range(world - 1)]
    return [f"{part & MASK:016x}" for part in (*parts, total - sum(parts))]


def hashes(rank: int, world: int, step: int) -> Hashes:
    """What a rank writes without a fault."""
    sliced = ("weight", "sum", "reduced", "grad", "state exp_avg", "master", "published")
    out = {
        phase: {unit: slices(hash((phase, unit, step)), world)[rank] for unit in UNITS}
        for phase in sliced
    }
    for leaf in range(rank, 4, world):
        out[f"forward {leaf}"] = {unit: f"{leaf}{step}{unit}" for unit in UNITS}
        out[f"loss {leaf}"] = {"": f"{leaf}{step}"}
        for phase in ("leaf", "backward"):
            out[f"{phase} {leaf}"] = {unit: f"{leaf}{step}{unit}" for unit in reversed(UNITS)}
    copies = {"seed": {"": "0"}, "norm": {"": "0x1p+0"}, "option": {"lr": "0.1"}}
    return out | copies | {"gather forward": {unit: f"g{step}{unit}" for unit in UNITS}}


def lines(
    rank: int,
    world: int,
    steps: Sequence[int] = (0, 1, 2),
    change: Callable[[int, int, Hashes], None] = lambda rank, step, hashes: None,
    **more: Any,
) -> list[dict[str, Any]]:
    out = [header(rank, world, **more)]
    for step in steps:
        found = hashes(rank, world, step)
        change(rank, step, found)
        out.append({"step": step, "hashes": found})
    return out


def trail(world: int, **how: Any) -> Trail:
    return Trail([lines(rank, world, **how) for rank in range(world)])


def changed(at: int, who: int, places: Mapping[str, str]) -> Callable[[int, int, Hashes], None]:
    """Return what changes hashes of rank `who` in step `at`, by phase the unit."""

    def change(rank: int, step: int, found: Hashes) -> None:
        for phase, unit in places.items():
            if step == at and rank == who and unit in found.get(phase, {}):
                found[phase][unit] = "abcdef"

    return change


def told(found: Comparison) -> tuple[Any, ...]:
    first = found.differences[0]
    return first.step, first.phase, first.unit, *first.suspects


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_trails_without_a_fault_are_equal_whatever_the_ranks(world: int) -> None:
    found = compare(trail(1), trail(world))
    assert found.steps == (0, 1, 2) and not found.differences and not found.notes


@pytest.mark.parametrize("phase", [*PHASES])
def test_each_phase_is_told_and_comes_before_all_later_ones(phase: str) -> None:
    details = {name: f"{name} 1" for name in ("forward", "loss", "leaf", "backward")}
    details |= {"state": "state exp_avg", "gather": "gather forward"}
    names = {"seed": "", "loss": "", "norm": "", "option": "lr"}
    later = [*PHASES][[*PHASES].index(phase) :]
    places = {details.get(one, one): names.get(one, "second") for one in later}
    bad = trail(2, change=changed(1, 1, places))
    name = details.get(phase, phase)
    expected: tuple[Any, ...] = (1, name, names.get(phase, "second"))
    found = told(compare(trail(2), bad))
    # two ranks have one leaf: nobody knows which one is wrong
    assert found == (*expected, (1,) if name != "gather" and _is_tied(phase) else (), (1,))
    assert told(compare(trail(3), bad))[:3] == expected


def _is_tied(phase: str) -> bool:
    """Whether both runs have one whole hash each, and so as much reason to be right."""
    return phase in (
        "weight",
        "forward",
        "loss",
        "leaf",
        "backward",
        "sum",
        "reduced",
        "grad",
        "state",
        "master",
        "published",
    )


def test_the_first_unit_of_a_backward_is_the_last_one() -> None:
    def change(rank: int, step: int, found: Hashes) -> None:
        if "leaf 3" in found:
            found["leaf 3"] = dict.fromkeys(reversed(UNITS), "x")
            found["sum"] = dict.fromkeys(UNITS, "5")

    first = compare(trail(1), trail(3, change=change)).differences[0]
    assert (first.step, first.leaf, first.unit) == (0, 3, "second")
    assert [one.ranks for one in first.holders] == [[0], [0]]
    assert first.meaning == "the gradient of leaf 3, before it is sent"


def test_one_leaf_or_unit_may_be_looked_at_alone() -> None:
    bad = trail(2, change=changed(1, 1, {"leaf 3": "second", "sum": "first"}))
    assert told(compare(trail(2), bad))[:3] == (1, "leaf 3", "second")
    assert told(compare(trail(2), bad, unit="first"))[:3] == (1, "sum", "first")
    assert not compare(trail(2), bad, leaf=1).differences
    assert len(compare(trail(2), bad, leaf=3, unit="second").differences) == 1
    with pytest.raises(ValueError, match="there are first, second"):
        compare(trail(2), bad, unit="third")


def test_a_copy_on_one_rank_is_blamed_against_the_most() -> None:
    bad = trail(3, change=changed(2, 0, {"gather forward": "first"}))
    assert told(compare(bad, trail(1))) == (2, "gather forward", "first", (0,), ())
    ours = compare(bad, bad).differences[0]  # ranks of one run disagree
    assert ours.suspects == ((0,), (0,))


def test_whole_states_of_every_rank_are_compared_each() -> None:
    def whole(rank: int, step: int, found: Hashes) -> None:
        for phase in ("weight", "reduced", "grad", "state exp_avg", "master", "published"):
            found[phase] = {u: f"{hash((phase, u, step)) & MASK:x}".zfill(16) for u in UNITS}

    def bad(rank: int, step: int, found: Hashes) -> None:
        whole(rank, step, found)
        changed(1, 1, {"master": "first"})(rank, step, found)

    def run(change: Callable[[int, int, Hashes], None]) -> Trail:
        groups = [dict.fromkeys(UNITS, rank) for rank in range(3)]
        return Trail([lines(r, 3, change=change, groups=groups[r]) for r in range(3)])

    assert not compare(trail(2), run(whole)).differences
    assert told(compare(trail(2), run(bad))) == (1, "master", "first", (), (1,))


def test_steps_count_where_every_rank_has_them_and_the_last_run_of_one_counts() -> None:
    first, second = lines(0, 2, [0, 1, 2]), lines(1, 2, [0, 1])
    assert list(Trail([first, second]).steps) == [0, 1]
    wrong = changed(1, 0, {"master": "first"})
    again = [*lines(0, 2, [0, 1], change=wrong), *lines(0, 2, [1])]
    assert not compare(trail(1), Trail([again, second])).differences
    # after a restart on one rank, files of the other stay
    alone = [*lines(0, 2, [0, 1]), *lines(0, 1, [1, 2])]
    found = Trail([alone, lines(1, 2, [0, 1])])
    assert [len(found.steps[step]) for step in (0, 1, 2)] == [2, 1, 1]
    assert not compare(trail(3), found).differences


def test_a_hash_that_one_run_lacks_is_a_difference() -> None:
    def without(phase: str) -> Callable[[int, int, Hashes], None]:
        return lambda rank, step, found: found.pop(phase, None) and None

    first = compare(trail(2), trail(2, change=without("norm"))).differences[0]
    assert first.phase == "norm" and first.holders[-1].value == "absent"
    assert not compare(trail(2), trail(2, change=without("gather forward"))).differences


def test_a_replay_on_one_rank_names_the_rank_whose_slice_differs() -> None:
    bad = trail(3, change=changed(1, 2, {"state exp_avg": "first"}))
    alone = lines(0, 1)
    for line in alone[1:]:
        ranks = [hashes(rank, 3, line["step"]) for rank in range(3)]
        line["slices"] = {
            phase: {
                unit: {str(rank): found[phase][unit] for rank, found in enumerate(ranks)}
                for unit in UNITS
            }
            for phase in ("weight", "state exp_avg", "master")
        }
    again = Trail([alone])
    assert not compare(trail(3), again, is_replay=True).differences
    found = compare(bad, again, is_replay=True)
    assert told(found) == (1, "state exp_avg", "first", (2,), ())
    assert told(compare(bad, trail(1), is_replay=True))[-2:] == ((0, 1, 2), ()), "no slices"


def test_what_is_asked_of_a_replay_is_read_as_it_was_written_and_cuts_as_the_ranks_did() -> None:
    held: list[dict[str, tuple[int, int]]] = [{"a": (0, 128)}, {"a": (128, 300), "b": (0, 7)}]
    asked = Replay(3, None, held, [{"a": (0, 300)}, {}])
    again = Replay.parse(asked.to_json())
    assert again == asked
    assert list(again.cut("master", "a", 64, 300)) == [(64, 128, [0]), (128, 300, [1])]
    assert list(again.cut("sum", "a", 64, 300)) == [(64, 300, [0])]
    assert list(again.cut("master", "c", 0, 5)) == [(0, 5, [])]
    assert (again.holders("a", 0), again.holders("b", 0), again.holders("c", 0)) == ([0], [1], [])


def test_a_backward_is_told_after_the_gradients_of_its_own_unit() -> None:
    places = {"backward 1": "second", "leaf 1": "first"}
    found = compare(trail(2), trail(2, change=changed(1, 1, places)))
    assert [(one.phase, one.unit) for one in found.differences] == [*places.items()]
    both = {"backward 1": "second", "leaf 1": "second"}
    first = compare(trail(2), trail(2, change=changed(1, 1, both))).differences[0]
    assert first.phase == "leaf 1"


def test_a_frozen_unit_is_told_after_the_units_that_ran_before_it() -> None:
    def run(bad: str) -> Callable[[int, int, Hashes], None]:
        def change(rank: int, step: int, found: Hashes) -> None:
            if "backward 0" in found:
                order = ["frozen", "second", "alone", "other", "first"]
                found["backward 0"] = dict.fromkeys(order, "same")
                for unit in order[order.index(bad) :] if bad else ():
                    found["backward 0"][unit] = "another"
                    if unit in UNITS:
                        found["leaf 0"][unit] = "another"

        return change

    for bad in ("frozen", "second", "alone", "other", "first"):
        first = compare(trail(1, change=run("")), trail(2, change=run(bad))).differences[0]
        assert first.unit == bad


def test_runs_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="leaves=4 and the other 8"):
        compare(trail(1), trail(1, leaves="8"))
    with pytest.raises(ValueError, match="other units"):
        compare(trail(1), trail(1, units=["first"]))
    with pytest.raises(ValueError, match="no step"):
        compare(trail(1), trail(1, steps=[7]))
    noted = compare(trail(1), trail(1, curve={"torch": "3"})).notes
    assert noted == ("torch is 2 in one run and 3 in the other",)


@given(
    st.integers(0, 999),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8]),
    st.integers(300, 340),
    st.lists(st.integers(0, 4), max_size=4),
    st.booleans(),
)
def test_digests_of_slices_add_up_and_a_bit_is_seen(
    seed: int, dtype: torch.dtype, numel: int, cuts: list[int], flips: bool
) -> None:
    whole = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).mul(9).to(dtype)
    before, place = whole.clone(), place_of("a.weight")
    bounds = sorted({0, numel, *(64 * cut for cut in cuts)})
    spans = list(pairwise(bounds))
    parts = [whole[low:high].clone() for low, high in spans]
    if flips:
        parts[-1].view(torch.uint8)[-1] ^= 1

    def total(tensor: torch.Tensor, first: int) -> int:
        return int(block_total(tensor, first)) & MASK

    for digest in (placed_sum, total):
        sums = [digest(part, place + low) for part, (low, _) in zip(parts, spans, strict=True)]
        assert (sum(sums) & MASK == digest(whole, place)) is not flips
        assert digest(whole, place) != digest(whole, place_of("b.weight"))
    assert torch.equal(whole, before)


def test_blocks_see_bits_places_and_signs() -> None:
    tensor = torch.randn(160, generator=torch.Generator().manual_seed(1))
    seen = {int(block_total(tensor, 0)), int(block_total(tensor, 64))}
    seen.add(int(block_total(-tensor, 0)))
    for at in range(8 * tensor.nbytes):
        other = tensor.clone()
        other.view(torch.uint8)[at // 8] ^= 1 << at % 8
        seen.add(int(block_total(other, 0)))
    signs = tensor.clone()
    for first in range(0, 64, 2):  # two signs of one block, in the high halves of its words
        other = signs.clone()
        other[[first + 1, 63 - first]] *= -1
        seen.add(int(block_total(other, 0)))
    # a pair of the same signs stands twice
    assert len(seen) == 3 + 8 * tensor.nbytes + 16
    longer = torch.cat([tensor, torch.zeros(1)])
    assert int(block_total(longer, 0)) == int(block_total(tensor, 0)), "padding is zeros"


def test_totals_of_many_slices_are_those_of_each() -> None:
    generator = torch.Generator().manual_seed(2)
    tensors = [torch.randn(numel, generator=generator) for numel in (64, 1, 0, 1000, 128)]
    totals = BlockTotals[str]()
    for number, tensor in enumerate(tensors):
        totals.add([str(number), "together"], tensor, 64 * number)
    expected = [int(block_total(one, 64 * number)) & MASK for number, one in enumerate(tensors)]
    found = totals.read()
    assert [found[str(number)] for number in range(5)] == expected
    assert found["together"] == sum(expected) & MASK
