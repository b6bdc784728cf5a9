"""Faults (F3, F4, F5): exceptions, dead and stalled ranks, ranks that diverge, gradients that
are not finite.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import threading
import time
import traceback
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support import inside
from tests.support.covering import by_pairs
from tests.support.harness import on_ranks, run_ranks, spawn_ranks
from tests.support.training import (
    ROWS,
    TRANSPORTS,
    Net,
    Recomputed,
    Routed,
    Run,
    batch,
    differences,
    final_state,
    make_model,
    make_sharded,
    take_steps,
    train,
    train_with_ddp,
    two_groups,
)
from zeroshard.errors import PeerLostError, PlanMismatch, StallError, StateError

State = dict[str, torch.Tensor]


# -------------------------------------------------------------------------- exceptions on all ranks


class Boom(Exception):
    pass


def _raise(*args: Any) -> None:
    raise Boom


def _in_forward(model: Net, rank: int) -> Any:
    return model.blocks[2].down.register_forward_hook(_raise)


def _before_forward(model: Net, rank: int) -> Any:
    return model.blocks[1].register_forward_pre_hook(_raise)


def _in_backward(model: Net, rank: int) -> Any:
    def hooked(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(_raise)

    return model.blocks[1].up.register_forward_hook(hooked)


def _elsewhere(model: Net, rank: int) -> Any:
    """The ranks are not at the same place when they fail."""
    return (_in_forward, _in_backward)[rank](model, rank)


def _in_recomputation(model: Net, rank: int) -> Any:
    def hooked(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if torch._C._current_graph_task_id() >= 0:
            raise Boom

    return model.blocks[1].up.register_forward_hook(hooked)


def _reference(rank: int, model: Net, steps: list[int]) -> Run:
    return train_with_ddp(rank, model, two_groups(model), steps)


WHERE = {
    fn.__name__.strip("_"): fn
    for fn in (_in_forward, _before_forward, _in_backward, _elsewhere, _in_recomputation)
}


def _meets(case: dict[str, str]) -> bool:
    """Messages need the same place: over sockets a gather without its peer is a stall."""
    return case["transport"] != "gloo" or case["where"] != "elsewhere"


@by_pairs(
    {"where": tuple(WHERE), "row": ROWS, "transport": TRANSPORTS}, _meets, slow_by="transport"
)
@on_ranks(2, timeout=120)
def test_after_an_exception_and_reset_training_goes_on_with_right_numbers(
    rank: int, cases: list[dict[str, str]]
) -> None:
    """Fail in steps 1 and 3; the other steps train as if those had not been."""

    def seeded(where: str) -> Net:
        torch.manual_seed(0)
        return Recomputed() if where == "in_recomputation" else Net()

    expected = functools.cache(lambda where: _reference(rank, seeded(where), [0, 2, 4]))
    for case in cases:
        where, row, transport = case.values()
        model, optimizer, engine = make_sharded(row, transport, model=seeded(where))
        losses = []
        for step in range(5):
            broken = step in (1, 3)
            handle = WHERE[where](model, rank) if broken else None
            if broken:
                with pytest.raises((Boom, StateError)) as caught:
                    model(*batch(rank, step)).backward()
                assert caught.type is Boom or "gave up this step" in str(caught.value), caught.value
                handle.remove()
                engine.reset()
                if row in ("ddp", "zero1", "zero2"):  # brought together, as after a step
                    assert inside.is_unused(engine)
                    assert len(inside.gathered(engine)) == len(inside.units(engine))
                else:
                    assert inside.is_at_rest(engine)
                continue
            loss = model(*batch(rank, step))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        state = final_state(model, engine)
        found = Run(losses, state, row=row).differs_from(expected(where))
        assert not found, (case, found)


@on_ranks(2)
def test_going_on_after_an_exception_without_reset_is_an_error(rank: int) -> None:
    model, optimizer, engine = make_sharded("zero3", "shared_memory")
    handle = _in_backward(model, rank)
    with pytest.raises(Boom):
        model(*batch(rank, 0)).backward()
    handle.remove()
    with pytest.raises(
        StateError, match=r"the last backward did not finish: call engine.reset\(\) on every rank"
    ):
        model(*batch(rank, 0))
    engine.reset()
    model(*batch(rank, 0)).backward()
    optimizer.step()
    engine.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_many_exceptions_leave_no_thread_and_no_descriptor(rank: int, transport: str) -> None:
    model, optimizer, engine = make_sharded("zero3", transport)

    def usage() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = (0, 0)
    for step in range(25):
        handle = (_in_forward if step % 2 else _in_backward)(model, rank)
        with pytest.raises(Boom):
            model(*batch(rank, step)).backward()
        handle.remove()
        engine.reset()
        take_steps(rank, [step], model, optimizer)
        if step == 8:
            before = usage()
    deadline = time.monotonic() + 300  # threads of transfers that were given up end by themselves
    threads, files = usage()
    while threads > before[0] + 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        threads, files = usage()
    assert threads <= before[0] + 2 and files <= before[1] + 2, (before, threads, files)
    engine.close()


def _num_descriptors(at_most: int) -> int:
    """Return how many are open; gloo closes its own in threads, after a while."""
    deadline = time.monotonic() + 300
    while (number := len(os.listdir("/proc/self/fd"))) > at_most and time.monotonic() < deadline:
        time.sleep(0.02)
    return number


@pytest.mark.parametrize("how", ["dropped", "closed"])
@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_engines_leave_no_descriptor(rank: int, transport: str, how: str) -> None:
    counts = []
    for _ in range(4):
        model, optimizer, engine = make_sharded("zero3", transport)
        take_steps(rank, 1, model, optimizer)
        if how == "closed":
            engine.close()
        del model, optimizer, engine
        gc.collect()
        counts.append(_num_descriptors(at_most=counts[1] if len(counts) > 1 else 1 << 10))
    assert counts[3] <= counts[1], counts


# ------------------------------------------------------------------------- one rank dies, or stalls


def _one_fails(rank: int, world: int, transport: str, where: str) -> str:
    model, optimizer, _engine = make_sharded("zero3", transport, stall_timeout_s=600)
    for step in range(3):
        if rank == 1 and step == 2:
            {"forward": _in_forward, "backward": _in_backward}.get(where, lambda model, rank: None)(
                model, rank
            )
        try:
            loss = model(*batch(rank, step))
            loss.backward()
            if where == "step" and rank == 1 and step == 2:
                raise Boom
            optimizer.step()
            optimizer.zero_grad()
        except Boom:
            traceback.print_exc()
            os._exit(1)
        except PeerLostError as error:
            return str(error)
    return "finished"


@pytest.mark.parametrize(
    ("transport", "where"),
    [
        pytest.param("shared_memory", "forward", marks=pytest.mark.slow),
        pytest.param("shared_memory", "step", marks=pytest.mark.slow),
        ("gloo", "backward"),
    ],
)
def test_an_exception_on_one_rank_ends_the_others_and_names_it(transport: str, where: str) -> None:
    results = spawn_ranks(2, _one_fails, transport, where, timeout=60)
    assert results[1].exitcode == 1 and "Boom" in results[1].stderr
    assert results[0].result is not None, results[0].stderr
    assert re.search(r"rank\(s\) \[1\] ended|rank 1 has ended", results[0].result), results[
        0
    ].result


@pytest.mark.parametrize(
    ("transport", "phase"),
    [
        ("shared_memory", "forward"),
        ("shared_memory", "backward"),
        ("shared_memory", "step"),
        ("gloo", "forward"),
        ("gloo", "step"),
    ],
)
@on_ranks(2)
def test_a_stalled_rank_is_reported_with_what_is_awaited(
    rank: int, transport: str, phase: str
) -> None:
    """Rank 1 sleeps; rank 0 says so. Over messages rank 1 then stalls too, in shared memory it
    is told that rank 0 gave up.
    """
    model, optimizer, engine = make_sharded("zero3", transport, stall_timeout_s=1.5)
    take_steps(rank, 1, model, optimizer)
    asleep = {phase: 2.5} if rank == 1 else {}
    said = "StallError: nothing"
    try:
        time.sleep(asleep.get("forward", 0))
        loss = model(*batch(rank, 1))
        time.sleep(asleep.get("backward", 0))
        loss.backward()
        time.sleep(asleep.get("step", 0))
        optimizer.step()
    except (StallError, StateError) as error:
        said = f"{type(error).__name__}: {error}"
    if rank == 0:
        assert re.search(
            r"^StallError: ((gather|reduce) of \S+|a gradient buffer for \S+|exchange).*rank\(s\)"
            r" \[1\] did not come within 1.5 s",
            said,
        ), said
        time.sleep(0.5 if transport == "shared_memory" else 1.8)
    elif transport == "shared_memory":
        assert re.search(
            r"^StateError: .*rank\(s\) \[0\] gave up this step after an exception", said
        ), said
    else:  # messages that rank 0 had sent before it gave up may be all that rank 1 needs
        assert said.startswith("StallError") or "rank(s) [0] gave up this step" in said, said
        assert phase == "step" or said != "StallError: nothing"
    engine.reset()
    for step in range(2):  # and all can go on
        optimizer.zero_grad()
        # but not after one rank has stepped and the other has not
        if phase == "step" and transport == "gloo":
            with pytest.raises(
                StateError,
                match=r"have finished different numbers of steps \(rank 0: 1; rank 1: 2\)",
            ):
                model(*batch(rank, step))
            break
        model(*batch(rank, step)).backward()
        optimizer.step()
    engine.close()


# ------------------------------------------------------------------------------- ranks that diverge


ROUTES = {
    "swapped": [[0, 1, 2, 3], [0, 2, 1, 3]],
    "skipped": [[0, 1, 2, 3], [0, 1, 3]],
    "extra": [[0, 1, 3], [0, 1, 2, 3]],
}


def _diverged(rank: int, world: int, transport: str, routes: list[list[int]]) -> str:
    torch.manual_seed(0)
    model, optimizer, engine = make_sharded("zero3", transport, model=Routed(), stall_timeout_s=1.5)
    said = ""
    take_steps(rank, 2, model, optimizer)
    try:
        model(*batch(rank, 2), routes[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    except (PlanMismatch, StallError) as error:
        said = f"{type(error).__name__}: {error}"
        if transport == "gloo":
            time.sleep(0.5)
            engine.reset()
    model(*batch(rank, 3), [0, 1, 2, 3]).backward()
    optimizer.step()
    engine.close()
    return said


@pytest.mark.parametrize("how", ROUTES)
def test_ranks_that_run_different_units_are_told_on_gloo_and_served_on_shared_memory(
    how: str,
) -> None:
    assert run_ranks(2, _diverged, "shared_memory", ROUTES[how]) == ["", ""]
    both = run_ranks(2, _diverged, "gloo", ROUTES[how])
    for said in both:
        if how == "swapped":
            assert re.search(
                r"PlanMismatch: .*step 2; .*rank 0: (forward|gather) blocks.1 .*; rank 1:"
                r" (forward|gather) blocks.2 ",
                said,
            ), said
        else:  # one rank waits for a gather that the other never posts: the watchdog says which
            assert re.search(
                r"PlanMismatch: .*blocks.2|StallError: (gather|reduce) of blocks\.\d.*rank\(s\)"
                r" \[\d\] did not come",
                said,
            ), said
    assert any("blocks.2" in said for said in both)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_ranks_that_disagree_about_no_sync_are_told(rank: int, transport: str) -> None:
    """One rank accumulates where the other reduces: other numbers, so an error, not a guess."""
    model, optimizer, engine = make_sharded("zero1", transport, stall_timeout_s=3)
    with pytest.raises((PlanMismatch, StallError, StateError), match=r"reduce|exchange"):
        if rank == 0:
            with engine.no_sync():
                model(*batch(rank, 0)).backward()
        else:
            model(*batch(rank, 0)).backward()
        model(*batch(rank, 1)).backward()
        optimizer.step()
    engine.reset()
    model(*batch(rank, 1)).backward()
    optimizer.step()
    engine.close()


# --------------------------------------------------------------------------------------- not finite


def _states(engine: zs.Engine, optimizer: torch.optim.Optimizer) -> State:
    out = engine.full_state_dict(rank0_only=False)
    for index, piece in enumerate(inside.param_shards(engine)):
        out[f"master {index}"] = piece.tensor.detach().clone()
        for key, value in optimizer.state[piece.tensor].items():
            out[f"state {index} {key}"] = value.clone()
    return out


PLACES = ("embed.weight", "blocks.2.up.bias", "head.weight")


def _injected(
    rank: int, world: int, row: str, precision: str, transport: str, names: tuple[str, ...]
) -> None:
    """A NaN or inf at one (rank, parameter, micro-step): nobody steps, nothing changes,
    everybody goes on.
    """
    model, optimizer, engine = make_sharded(row, transport, precision=precision)
    scales = [engine.loss_scale]
    places = [(rank, name, micro) for rank in range(world) for name in names for micro in range(2)]
    for step in range(2 * len(places)):
        bad = places[step // 2] if step % 2 else None
        before = _states(engine, optimizer) if bad else {}
        for micro in range(2):
            handle = None
            if bad is not None and bad[0] == rank and bad[2] == micro:
                value = float("nan") if step % 4 == 1 else float("-inf")
                handle = model.get_parameter(bad[1]).register_hook(
                    lambda grad, value=value: grad + torch.full_like(grad, value)
                )
            with engine.no_sync() if micro == 0 else torch.enable_grad():
                engine.backward(model(*batch(rank, 2 * step + micro)))
            if handle is not None:
                handle.remove()
        optimizer.step()
        optimizer.zero_grad()
        scales.append(engine.loss_scale)
        if bad:
            after = _states(engine, optimizer)
            changed = [
                name
                for name in after
                if name not in before or not torch.equal(before[name], after[name])
            ]
            assert not changed, (row, bad, changed)
    assert engine.steps_skipped == len(places)
    expected = (
        [65536.0 / 2 ** (step // 2) for step in range(2 * len(places) + 1)]
        if precision == "fp16"
        else [1.0] * len(scales)
    )
    assert scales == expected
    assert all(
        value.isfinite().all() for value in engine.full_state_dict(rank0_only=False).values()
    )
    engine.close()


@pytest.mark.parametrize(
    ("precision", "names"),
    [
        ("fp32", PLACES[:1]),
        ("bf16", PLACES[1:2]),
        ("fp16", PLACES[1:2]),
        *(
            pytest.param(precision, PLACES, marks=pytest.mark.slow)
            for precision in ("fp32", "bf16", "fp16")
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} places",
)
def test_gradients_that_are_not_finite_skip_the_step_on_all_ranks_and_change_nothing(
    precision: str, names: tuple[str, ...]
) -> None:
    for row in ROWS if precision == "fp32" else ("ddp", "zero1", "zero3"):
        run_ranks(2, _injected, row, precision, "shared_memory", names)
    run_ranks(2, _injected, "zero3", precision, "gloo", names)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@on_ranks(2)
def test_the_third_bad_step_in_a_row_stops_and_names_the_parameter(
    rank: int, precision: str
) -> None:
    for row in ROWS:
        model, optimizer, engine = make_sharded(row, "shared_memory", precision=precision)
        before = engine.full_state_dict(rank0_only=False)
        if rank == 1:
            model.blocks[2].up.weight.register_hook(lambda grad: grad * float("nan"))
        scales = []
        allowed = 2 if precision != "fp16" else 16
        for step in range(allowed):
            take_steps(rank, [step], model, optimizer, engine)
            scales.append(engine.loss_scale)
        engine.backward(model(*batch(rank, 0)))
        with pytest.raises(
            StateError,
            match=(
                r"steps in a row had gradients that are not finite, first in parameter"
                r" 'blocks.2.up.weight'"
            ),
        ):
            optimizer.step()
        if precision == "fp16":
            assert scales == [max(65536.0 / 2 ** (step + 1), 1.0) for step in range(allowed)]
        engine.reset()
        after = engine.full_state_dict(rank0_only=False)
        assert not (found := differences(after, before, row, "before")), found
        engine.close()


def test_forwards_watched_after_a_bad_step_leave_no_hooks_of_saved_tensors() -> None:
    model, optimizer, engine = make_sharded("zero3")
    for factor in (float("inf"), 1.0, 1.0):
        (model(*batch(0, 0)) * factor).backward()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        optimizer.step()
        optimizer.zero_grad()
    engine.close()


@on_ranks(2)
def test_a_skipped_step_leaves_no_trace(rank: int) -> None:
    """A skipped step leaves nothing behind: the run goes on as if its batch had not been."""
    out = []
    for row in ROWS:
        model, optimizer, engine = make_sharded(row, "shared_memory")
        losses = []
        for step in range(5):
            loss = model(*batch(rank, step))
            if step == 2:
                loss = loss * float("inf")
            else:
                losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        out.append(
            Run(losses, engine.full_state_dict(rank0_only=False)).differs_from(
                _reference(rank, make_model(), [0, 1, 3, 4])
            )
        )
        engine.close()
    assert not any(out), out


@on_ranks(2)
def test_steps_that_go_on_after_faults_equal_ddps(rank: int) -> None:
    """The harness itself: without a fault the reference and the rows agree."""

    run = train(rank, "zero3", 3).differs_from(_reference(rank, make_model(), [0, 1, 2]))
    assert run == []
