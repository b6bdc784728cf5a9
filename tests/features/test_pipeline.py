"""Stages of torch.distributed.pipelining, sharded over their data parallel ranks: schedules drive
the engine, and train what one process trains.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining.schedules import get_schedule_class

import zeroshard as zs
from tests.features.test_double_backward import PassedOn
from tests.support import inside
from tests.support.covering import pairs
from tests.support.harness import on_ranks, run_ranks
from tests.support.pipelines import (
    SCHEDULES,
    Llama,
    Piped,
    State,
    alone,
    loss_of,
    mesh_of,
    part,
    piped,
    tokens,
)
from tests.support.training import (
    differences,
    final_state,
    has_parameters,
    muon_and_adamw,
    step_plainly,
)
from zeroshard import ConfigError, PlanMismatch, StateError
from zeroshard.core.timeline import Timeline

ROWS = ("ddp", "zero1", "zero2", "zero3", "zero3-keep")
ADDED_FIRST = ("ddp", "zero1")  # micro-batches before ranks
SHARDED = ("zero3", "zero3-keep")
ROOM = "1MiB"  # for all stages
CLIP = 0.3


def _equal(one: State, other: State) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _close(states: list[State], expected: State) -> None:
    """All stages together are the whole model, within 1e-5 of `expected`."""
    together = {name: value for state in states for name, value in state.items()}
    assert together.keys() == expected.keys()
    for name, value in expected.items():
        error = (together[name] - value).norm() / value.norm()
        assert error < 1e-5, (name, float(error))


# --------------------------------------------------------------------------- training, and its bits


EVERY = [(row, budget) for row in ROWS for budget in ((None, ROOM) if row in SHARDED else (None,))]


def _rows(
    rank: int,
    world: int,
    name: str,
    micro_batches: int,
    steps: int,
    no_sync: bool,
    rows: list[tuple[str, str | None]],
) -> tuple[list[list[float]], list[float], State]:
    """Train with every one of `rows`, each with its budget; return the first one's."""
    mesh, first = mesh_of(), None
    for row, budget in rows:
        options = {"micro_batches": micro_batches, "no_sync": no_sync, "budget": budget}
        own = piped(mesh, name, row, **options)
        own.train(steps, 2 * micro_batches, clip=CLIP)
        told = own.losses, own.norms, own.state()
        assert inside.is_at_rest(own.engine) or row not in SHARDED
        own.engine.close()
        if first is None or (no_sync and row == "zero2"):
            first = told  # another order of sums begins
        assert told[:2] == first[:2], (row, budget)
        assert _equal(told[2], first[2]), (row, budget)
    assert first is not None
    return first


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B"])
@on_ranks(4, timeout=60)
def test_hidden_gradients_of_a_schedule_train_to_the_same_bits(name: str) -> None:
    """Train with hidden gradients, of a step before which others were discarded."""
    mesh, plain = mesh_of(), None
    for row, hides in (
        ("ddp", False), ("ddp", True), ("zero2", False), ("zero2", True), ("zero3", True),
    ):  # fmt: skip
        own = piped(mesh, name, row)
        if hides:
            own.engine.hide_gradients()
            own.run(5, 8)
            parameters = [p for stage in own.stages for p in stage.submod.parameters()]
            assert all(parameter.grad is None for parameter in parameters), row
            own.optimizer.zero_grad()
        own.train(2, 8, clip=CLIP)
        told = own.losses[-2:], own.norms, own.state()
        own.engine.close()
        plain = plain if hides else told
        assert plain is not None and told[:2] == plain[:2], row
        assert _equal(told[2], plain[2]), row


def _check_rows(
    name: str,
    micro_batches: int,
    steps: int,
    *,
    no_sync: bool,
    rows: Sequence[tuple[str, str | None]] = EVERY,
) -> None:
    answers = run_ranks(4, _rows, name, micro_batches, steps, no_sync, rows, timeout=280)
    losses, state, norms = alone(steps, 2 * micro_batches, micro_batches=micro_batches, clip=CLIP)
    _close([answer[2] for answer in answers], state)
    # ranks 2 and 3 have the last stage, and of ZBV's V it is ranks 0 and 1
    both = [answer[0] for answer in answers if any(answer[0])]
    for step in range(steps):
        pairs = zip(*(one[step] for one in both), strict=True)
        assert [sum(pair) / 2 for pair in pairs] == pytest.approx(losses[step], rel=1e-5)
    for answer in answers:
        assert answer[1] == answers[0][1] == pytest.approx(norms, rel=1e-5)
    assert min(norms) > CLIP


TRAINED: dict[str, Sequence[Any]] = {
    "row": ROWS,
    "name": ("1F1B", "Interleaved1F1B"),
    "budget": (None, ROOM),
}


def _budgets_what_is_gathered(case: dict[str, Any]) -> bool:
    return case["budget"] is None or case["row"] in SHARDED


@pytest.mark.parametrize("name", TRAINED["name"])
def test_every_row_trains_the_model_of_one_process(name: str) -> None:
    """`ddp` and `zero1` add micro-batches first, the others ranks: equal bits among each."""
    cases = [one for one in pairs(TRAINED, _budgets_what_is_gathered) if one["name"] == name]
    rows = sorted(((one["row"], one["budget"]) for one in cases), key=EVERY.index)
    assert [row for row, _ in rows] == list(ROWS)
    _check_rows(name, 4, 2, no_sync=True, rows=rows)


def _owned(rank: int, world: int, name: str, folder: Path) -> list[str]:
    """Train stages by owners of whole parameters, and the second half in another row from a
    checkpoint, beside plain torch with the gradients of an engine; return the differences.
    """
    mesh = mesh_of()
    passes = piped(mesh, name, "ddp", no_sync=False, make=lambda named: None)
    numbers = [stage.stage_index for stage in passes.stages]
    plain = [part(number, 2 * len(numbers)) for number in numbers]
    own = [p for stage in passes.stages for p in stage.submod.parameters()]
    theirs = [one for module in plain for one in module.named_parameters()]
    optimizers, norms = muon_and_adamw(theirs), []
    pairs = [*zip(own, [parameter for _, parameter in theirs], strict=True)]
    for step in range(4):
        passes.run(step, 8)
        norms.append(
            step_plainly(passes.engine, pairs, lambda: [o.step() for o in optimizers], clip=CLIP)
        )
    expected, losses, found = passes.state(), passes.losses, list[str]()
    passes.engine.close()
    owned: Any = {"no_sync": False, "make": muon_and_adamw}
    for row, first, ownership in (("zero3", 0, "whole"), ("zero1", 2, "whole_by_cost")):
        run = piped(mesh, name, row, ownership=ownership, **owned)
        if first:
            zs.load(folder, run.engine)
        else:
            run.train(2, 8, clip=CLIP)
            zs.save(folder, run.engine, step=2)
        run.train(2, 8, clip=CLIP, first=2)
        assert run.engine.explain_optimizer().groups[0].kind == "matrix"
        found += differences(run.state(), expected, row)
        run.engine.close()
        if run.losses != losses[first:] or run.norms != norms[first:]:
            found.append(f"{row}: {run.losses} {run.norms}, and {losses} {norms}")
    return found


@pytest.mark.parametrize("name", TRAINED["name"])
def test_stages_of_owners_are_stepped_as_by_plain_torch(name: str, tmp_path: Path) -> None:
    assert not any(run_ranks(4, _owned, name, tmp_path, timeout=100))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TRAINED["name"], "ZBVZeroBubble"])
def test_every_row_and_budget_trains_the_model_of_one_process(name: str) -> None:
    _check_rows(name, 4, 2, no_sync=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_that_reduce_every_micro_batch_have_the_same_bits(name: str) -> None:
    _check_rows(name, 4, 3, no_sync=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("micro_batches", [2, 6])
def test_every_schedule_trains_the_model_of_one_process(name: str, micro_batches: int) -> None:
    _check_rows(name, micro_batches, 3, no_sync=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GPipe", "1F1B", "LoopedBFS", "ZBVZeroBubble"])
def test_an_odd_number_of_micro_batches_is_no_matter(name: str) -> None:
    _check_rows(name, 5, 3, no_sync=True)


def _long(rank: int, world: int, name: str, row: str, steps: int) -> tuple[Any, State]:
    own = piped(mesh_of(), name, row, budget=ROOM if row in SHARDED else None)
    own.train(steps, 8)
    return own.losses, own.state()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "row"), [("1F1B", "zero3"), ("Interleaved1F1B", "zero3"), ("ZBVZeroBubble", "zero1")]
)
def test_fifty_steps_stay_beside_one_process(name: str, row: str) -> None:
    answers = run_ranks(4, _long, name, row, 50, timeout=280)
    losses, state, _ = alone(50, 8)
    both = [answer[0] for answer in answers if any(answer[0])]
    for step in range(50):
        pairs = zip(*(one[step] for one in both), strict=True)
        assert [sum(pair) / 2 for pair in pairs] == pytest.approx(losses[step], rel=1e-5)
    _close([answer[1] for answer in answers], state)


@on_ranks(4, timeout=100)
def test_stages_that_recompute_their_layers_have_the_same_bits() -> None:
    mesh = mesh_of()
    for name in ("1F1B", "Interleaved1F1B"):
        for row, budgets in (("zero3", (None, ROOM)), ("zero1", (None,))):
            states = []
            for recomputes, budget in ((False, None), *((True, budget) for budget in budgets)):
                own = piped(mesh, name, row, budget=budget, recomputes=recomputes)
                own.train(2, 8)
                states.append(own.state())
                own.engine.close()
                assert _equal(states[0], states[-1]), (name, row, budget)


@pytest.mark.parametrize("name", ["Interleaved1F1B", "ZBVZeroBubble"])
@on_ranks(2)
def test_stages_of_modules_that_return_one_tensor_train_the_whole_model(
    rank: int, name: str
) -> None:
    """Train two stages on one rank, of modules that return one tensor; compare with the whole model
    without a schedule.
    """
    mesh, found = mesh_of(1, 2), []
    for row in ("ddp", "zero3"):
        states = []
        for follows in (False, True):
            torch.manual_seed(0)
            halves = [nn.Sequential(OrderedDict({half: PassedOn()})) for half in ("one", "two")]
            whole = nn.Sequential(OrderedDict(one=halves[0].one, two=halves[1].two))
            group = mesh.get_group("pp")
            stages = [
                PipelineStage(half, number, 2, torch.device("cpu"), group=group)
                for number, half in enumerate(halves)
            ]
            optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
            engine = zs.shard(
                stages if follows else whole,
                optimizer,
                policy=row,
                units=has_parameters,
                mesh=mesh,
                comm=zs.Comm(transport="gloo"),
            )
            if follows:
                schedule = get_schedule_class(name)(stages, 2, loss_fn=nn.functional.mse_loss)
                engine.follow(schedule)
            for step in range(2):
                torch.manual_seed(10 * step + rank)
                x, y = torch.randn(2, 4, 8), torch.randn(2, 4, 8)
                if follows:
                    schedule.step(x.flatten(0, 1), target=y.flatten(0, 1))
                for micro in range(0 if follows else 2):
                    with engine.no_sync() if not micro else nullcontext():
                        engine.backward(nn.functional.mse_loss(whole(x[micro]), y[micro]) / 2)
                optimizer.step()
                optimizer.zero_grad()
            states.append(final_state(whole, engine))
        found += differences(states[1], states[0], f"{row} with {name}", "the whole")
    assert found == []


# -------------------------------------------------------------- what torch runs to learn the shapes


@pytest.mark.parametrize("name", ["GPipe", "InterleavedZeroBubble"])
@on_ranks(4, timeout=100)
def test_the_backward_by_which_torch_learns_shapes_leaves_no_trace(name: str) -> None:
    mesh = mesh_of()
    for row in ("zero1", "zero3"):
        states, reduced = [], []
        for shapes in (None, tokens(0, 0, 2)[0]):
            own = piped(mesh, name, row, shapes=shapes, comm=zs.Comm(transport="gloo"))
            own.train(1, 8)
            states.append(own.state())
            reduced.append(own.engine.traffic().bytes["reduce_scatter"])
            own.engine.close()
        assert _equal(*states), row
        assert reduced[0] == reduced[1], row


# ------------------------------------------------------------------------------- bytes on the wire


def _gathers(rank: int, world: int, name: str, room: str | None, micro_batches: int) -> Any:
    """Return how often a unit is gathered and reduced in a step, by bytes."""
    own = piped(
        mesh_of(),
        name,
        "zero3",
        micro_batches=micro_batches,
        budget=room,
        comm=zs.Comm(transport="gloo"),
    )
    own.train(1, 2 * micro_batches)
    own.engine.reset_traffic()
    own.train(1, 2 * micro_batches, first=1)
    counted, half = own.engine.traffic().bytes, inside.padded_numel(own.engine) * 4 // 2
    own.engine.close()
    return counted["all_gather"] / half, counted["reduce_scatter"] / half


@pytest.mark.parametrize(
    ("name", "gathers"), [("GPipe", 2), ("1F1B", 2), ("LoopedBFS", 2), ("ZBVZeroBubble", 3)]
)
def test_with_a_budget_every_unit_is_gathered_once_and_else_for_each_micro_batch(
    name: str, gathers: int
) -> None:
    for counted in run_ranks(4, _gathers, name, ROOM, 4):
        assert counted == (1, 4)
    # halves of backwards: forward, input and weights
    for counted in run_ranks(4, _gathers, name, None, 4):
        assert counted == (gathers * 4, 4)


def _room_for_one(rank: int, world: int, name: str) -> float:
    own = piped(mesh_of(), name, "zero3", budget="5.5KiB", comm=zs.Comm(transport="gloo"))
    own.train(1, 8)
    own.engine.reset_traffic()
    own.train(1, 8, first=1)
    gathered = own.engine.traffic().bytes["all_gather"]
    return gathered / (inside.padded_numel(own.engine) * 4 // 2)


def test_with_room_for_one_stage_breadth_first_gathers_at_most_twice() -> None:
    assert all(1 < times <= 2 for times in run_ranks(4, _room_for_one, "LoopedBFS"))


# ---------------------------------------------------------------- overlap, tiers, fp16, other steps


def _traced(rank: int, world: int, directory: str) -> list[tuple[float, str, str, str]]:
    own = piped(mesh_of(), "Interleaved1F1B", "zero1", comm=zs.Comm(transport="gloo"))
    own.train(1, 8)
    with own.engine.trace(f"{directory}/{rank}"):
        own.train(1, 8, first=1)
    (path,) = (Path(directory) / str(rank)).iterdir()
    timeline = Timeline.from_chrome(json.loads(path.read_text()))
    own.engine.close()
    return sorted((one.start, one.lane, one.name, one.unit) for one in timeline.events)


def test_a_stage_is_reduced_while_the_other_one_computes(tmp_path: Path) -> None:
    """Rank 0 has stages 0 and 2: layers 0 and 2."""
    events = run_ranks(4, _traced, str(tmp_path))[0]
    reduces = [at for at, lane, _, unit in events if lane == "reduce" and "layers.2" in unit]
    backwards = [
        at
        for at, lane, name, unit in events
        if lane == "compute" and name == "backward" and "layers.0" in unit
    ]
    assert reduces and backwards
    assert max(reduces) < max(backwards)


TIERS: list[dict[str, str]] = [
    {"weight": "host"},
    {"weight": "disk", "grad": "host", "optimizer": "host"},
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LoopedBFS", "ZBVZeroBubble"])
@on_ranks(4, timeout=100)
def test_weights_of_stages_that_wait_rest_on_other_tiers(name: str, tmp_path: Path) -> None:
    mesh, states = mesh_of(), []
    for offload in ({}, *TIERS):
        for budget in (None, ROOM):
            own = piped(
                mesh,
                name,
                "zero3",
                budget=budget,
                offload={**offload, "disk_path": str(tmp_path)}
                if "disk" in str(offload)
                else offload,
            )
            own.train(2, 8)
            states.append(own.state())
            own.engine.close()
    assert all(_equal(state, states[0]) for state in states)


def _fp16(rank: int, world: int, name: str) -> tuple[list[float], State, list[list[float]]]:
    mesh, first = mesh_of(), None
    for row in ROWS:
        own = piped(mesh, name, row, precision="fp16", no_sync=False)
        scale = own.engine.loss_scale
        assert scale > 1
        own.train(2, 8, clip=CLIP)
        before = own.state()
        told = own.norms, before, own.losses
        first = first or told
        assert told[::2] == first[::2], row
        assert _equal(told[1], first[1]), row
        own.engine.close()
    assert first is not None
    return first


@pytest.mark.parametrize("name", ["1F1B", pytest.param("ZBVZeroBubble", marks=pytest.mark.slow)])
def test_the_loss_of_fp16_is_scaled_in_the_last_stage_for_all(name: str) -> None:
    answers = run_ranks(4, _fp16, name, timeout=100)
    losses, state, norms = alone(2, 8, clip=CLIP)
    together = {name: value for answer in answers for name, value in answer[1].items()}
    for key, value in state.items():
        torch.testing.assert_close(together[key].float(), value, rtol=0.05, atol=0.01)
    for answer in answers:
        assert answer[0] == answers[0][0] == pytest.approx(norms, rel=0.02)
    told = [answer[2] for answer in answers if any(answer[2])]
    assert [sum(pair) / 2 for pair in zip(*(one[0] for one in told), strict=True)] == pytest.approx(
        losses[0], rel=0.02
    ), "the losses that the user gets are not scaled"


@on_ranks(4)
def test_an_overflow_skips_the_step_of_every_stage() -> None:
    own = piped(mesh_of(), "1F1B", "zero3", precision="fp16", loss_scale={"initial": 2.0**30})
    before = own.state()
    own.train(1, 8)
    assert own.engine.steps_skipped == 1 and _equal(before, own.state())
    assert own.engine.loss_scale == 2.0**29


def _by_shares(rank: int, world: int, name: str) -> State:
    own = piped(mesh_of(), name, "zero2", batch_shares=[0.25, 0.75])
    own.train(2, 8, clip=CLIP)
    state = own.state()
    own.engine.close()
    return state


@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_the_loss_of_a_schedule_counts_the_share_of_its_rank(name: str) -> None:
    expected = alone(2, 8, clip=CLIP, shares=[0.25, 0.75])[1]
    _close(run_ranks(4, _by_shares, name, timeout=100), expected)


@on_ranks(4)
def test_no_sync_around_a_step_of_the_schedule_says_that_more_follow() -> None:
    """Two steps of the schedule inside one of the optimizer."""
    name = "1F1B"
    mesh = mesh_of()
    for row in ("zero1", "zero3"):
        states, reduced = [], []
        for inside_no_sync in (False, True):
            own = piped(mesh, name, row, comm=zs.Comm(transport="gloo"))
            own.train(1, 8)
            own.engine.reset_traffic()
            if inside_no_sync:
                with own.engine.no_sync():
                    own.run(1, 8)
            else:
                own.run(1, 8)
            own.run(2, 8)
            own.optimizer.step()
            reduced.append(own.engine.traffic().bytes["reduce_scatter"])
            states.append(own.state())
            own.engine.close()
        for one, other in zip(states[0].values(), states[1].values(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert reduced[0] == reduced[1] * (2 if row == "zero1" else 1)


@pytest.mark.parametrize("name", ["GPipe", "Interleaved1F1B"])
@on_ranks(4)
def test_a_schedule_evaluates_between_steps(name: str) -> None:
    own = piped(mesh_of(), name, "zero3", budget=ROOM)
    own.train(1, 8)
    x, y = tokens(own.engine.rank, 1, 8)
    first = any(stage.is_first for stage in own.stages)
    last = any(stage.is_last for stage in own.stages)
    losses: list[torch.Tensor] = []
    with torch.no_grad():
        own.schedule.eval(
            *([x] if first else []), target=y if last else None, losses=losses if last else None
        )
    assert inside.is_at_rest(own.engine)
    own.train(1, 8, first=1)
    if last:
        assert [loss.item() for loss in losses] == own.losses[1]


# -------------------------------------------------------------------------- names, and the way back


@on_ranks(4)
def test_stages_keep_the_names_of_the_whole_model_and_are_given_back() -> None:
    own = piped(mesh_of(), "Interleaved1F1B", "zero3")
    names = [name for stage in own.stages for name, _ in stage.submod.named_parameters()]
    assert [name for name, _ in own.engine.module.named_parameters()] == names
    assert list(own.state()) == names and f"layers.{own.pp}.qkv.weight" in names
    own.train(1, 8)
    with own.engine.gathered():
        assert list(own.engine.module.state_dict()) == names
    state = own.state()
    own.engine.close()
    # plain modules again, and the schedule drives them by itself
    for stage in own.stages:
        for name, value in stage.submod.state_dict().items():
            assert torch.equal(value, state[name])
    assert "step" not in vars(own.schedule)
    assert not any("one_chunk" in name for stage in own.stages for name in vars(stage))
    own.schedule.step(*([tokens(0, 1, 8)[0]] if own.pp == 0 else []),
                      target=tokens(0, 1, 8)[1] if own.pp else None)  # fmt: skip
    assert all(p.grad is not None for stage in own.stages for p in stage.submod.parameters())


@on_ranks(2)
def test_reset_after_an_exception_in_a_step_releases_what_was_held() -> None:
    """Both stages on one rank, so that the exception ends the step of every stage."""
    own = piped(mesh_of(1, 2), "LoopedBFS", "zero3", budget=ROOM)
    own.train(1, 8)
    before, calls = own.state(), 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("as asked")

    hook = own.stages[1].submod.head.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="failed to run forward"):
        own.run(1, 8)
    hook.remove()
    assert not inside.is_at_rest(own.engine)
    own.engine.reset()
    assert inside.is_at_rest(own.engine) and _equal(before, own.state())
    assert not own.engine.memory().temporary
    own.train(1, 8, first=1)
    assert not _equal(before, own.state())


# ---------------------------------------------------------------------------------------- bad input


def _other_stages(own: Piped) -> None:
    other = PipelineStage(part(own.pp, 2), own.pp, 2, torch.device("cpu"),
                          group=own.mesh.get_group("pp"))  # fmt: skip
    own.engine.follow(ScheduleGPipe(other, 4, loss_fn=loss_of))


def _no_schedule(own: Piped) -> None:
    own.engine.follow(own.stages[0])


def _twice(own: Piped) -> None:
    own.engine.follow(own.schedule)
    own.engine.follow(own.schedule)


def _two_schedules(own: Piped) -> None:
    own.engine.follow(own.schedule)
    own.schedule = ScheduleGPipe(own.stages[0], 2, loss_fn=loss_of)
    own.run(0, 4)


def _small(own: Piped) -> None:
    own.engine.follow(own.schedule, budget=100)


def _no_unit(own: Piped) -> None:
    own.engine.follow(own.schedule, budget="2")


def _outside(own: Piped) -> None:
    own.engine.follow(own.schedule)
    own.run(0, 8)
    x = tokens(0, 0, 2)[0] if own.pp == 0 else torch.ones(2, 6, 8, requires_grad=True)
    own.stages[0].submod(x).sum().backward()


def _weighted(own: Piped) -> None:
    own.engine.follow(own.schedule)
    own.run(0, 8)
    x = tokens(0, 0, 2)[0] if own.pp == 0 else torch.ones(2, 6, 8, requires_grad=True)
    own.engine.backward(own.stages[0].submod(x).sum(), weight=2)


def _other_scale(own: Piped) -> None:
    own.engine.follow(own.schedule).remove()
    following = own.engine.follow(own.schedule)
    own.run(0, 8)
    following.remove()
    own.schedule = ScheduleGPipe(own.stages[0], 4, loss_fn=loss_of, scale_grads=False)
    own.engine.follow(own.schedule)
    own.run(1, 8)


def _joins(own: Piped) -> None:
    own.engine.follow(own.schedule)
    with own.engine.join():
        pass


def _differs(own: Piped) -> None:
    own.engine.follow(own.schedule, no_sync=own.pp == 0)


BAD: list[tuple[Callable[[Piped], None], str]] = [
    (_other_stages, "stage [01] of the ScheduleGPipe is not one of this engine's"),
    (_no_schedule, "schedule is a PipelineStage: engine.follow.. takes a schedule of torch"),
    (_twice, "the engine follows a Schedule1F1B already: end that with the remove"),
    (_two_schedules, "stage [01] is driven by another schedule than the Schedule1F1B"),
    (_small, "budget=100 bytes is below the weights of stage [01], [0-9]+ bytes: give as many"),
    (_no_unit, "budget='2' has no unit"),
    (_outside, r"a backward outside of Schedule1F1B.step\(\), which the engine follows"),
    (_weighted, r"a backward outside of Schedule1F1B.step\(\), which the engine follows"),
    (_other_scale, "scale_grads divides these gradients by 1, and those that rest here by 4"),
    (_joins, r"join\(\) cannot shadow a schedule"),
    (_differs, "no_sync differs along the mesh"),
]


@pytest.mark.parametrize(("deed", "expected"), BAD, ids=[deed.__name__[1:] for deed, _ in BAD])
@on_ranks(2)
def test_bad_input_is_refused_on_every_rank_in_one_line(deed: Any, expected: str) -> None:
    own = piped(mesh_of(2, 1), "1F1B", "zero3", follow=False)
    with pytest.raises((ConfigError, StateError, PlanMismatch), match=expected) as refused:
        deed(own)
    assert "\n" not in str(refused.value)


@on_ranks(2)
def test_a_budget_of_rows_that_keep_whole_weights_is_refused() -> None:
    own = piped(mesh_of(2, 1), "1F1B", "zero1", follow=False)
    with pytest.raises(ConfigError, match="budget=1048576 has no effect: policy='zero1'"):
        own.engine.follow(own.schedule, budget=ROOM)


@on_ranks(2)
def test_a_mesh_without_the_axis_of_the_stages_is_refused(rank: int) -> None:
    mesh = mesh_of(2, 1)
    stage = PipelineStage(part(rank, 2), rank, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    engine = zs.shard(stage, mesh=mesh["dp"])
    with pytest.raises(ConfigError, match="has no axis 'pp': give it the whole mesh"):
        engine.follow(ScheduleGPipe(stage, 2, loss_fn=loss_of))


def _cut(modules: list[nn.Module], numbers: tuple[int, int] = (0, 1)) -> list[PipelineStage]:
    return [
        PipelineStage(module, number, 2, torch.device("cpu"))
        for number, module in zip(numbers, modules, strict=True)
    ]


@on_ranks(1)
def test_names_and_parameters_of_two_stages_are_refused() -> None:
    rows = [nn.Linear(4, 4) for _ in range(4)]
    with pytest.raises(ConfigError, match=r"'0.weight' names one tensor of stage 0 and another of"):
        zs.shard(_cut([nn.Sequential(*rows[:2]), nn.Sequential(*rows[2:])]))
    tied = Llama([0], first=True, last=False), Llama([1], first=False, last=True)
    tied[1].head.weight = tied[0].embed.weight  # type: ignore[union-attr]
    with pytest.raises(
        ConfigError, match=r"parameter 'head.weight' of stage 1 is 'embed.weight' of"
    ):
        zs.shard(_cut(list(tied)))
    with pytest.raises(ConfigError, match="name one stage twice"):
        zs.shard(_cut([part(0, 2), part(1, 2)], (0, 0)))
