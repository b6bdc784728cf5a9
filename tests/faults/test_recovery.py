"""After an exception inside optimizer.step(), or on one rank alone: what engine.reset() and
zs.load() bring back, and what they refuse.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zeroshard as zs
from tests.support import inside
from tests.support.harness import on_ranks, run_ranks, spawn_ranks
from tests.support.launched import HELLO, Job
from tests.support.training import (
    ROWS,
    TRANSPORTS,
    Routed,
    Run,
    batch,
    differences,
    final_state,
    logged,
    make_model,
    make_sharded,
    take_steps,
    train_with_ddp,
    two_groups,
)
from zeroshard.comm import native_transport
from zeroshard.comm.cpu.links import MessageKind
from zeroshard.errors import CheckpointError, StallError, StateError, StorageError


class OutOfMemory(torch.OutOfMemoryError):
    pass


class Fragile(torch.optim.AdamW):
    """Raises in the middle of a step, after `after` parameters have taken it."""

    after: int | None = None

    def step(self, closure: Any = None) -> Any:
        if self.after is None:
            return super().step(closure)
        groups = [group["params"] for group in self.param_groups]
        kept = [parameter for params in groups for parameter in params][: self.after]
        for group in self.param_groups:
            group["params"] = [
                parameter
                for parameter in group["params"]
                if any(parameter is other for other in kept)
            ]
        try:
            with torch.no_grad():
                torch.optim.AdamW.step.__wrapped__(self)  # type: ignore[attr-defined]  # without the hooks of a step
        finally:
            for group, params in zip(self.param_groups, groups, strict=True):
                group["params"] = params
        raise OutOfMemory


def _fragile(model: nn.Module) -> Fragile:
    optimizer = two_groups(model, Fragile, foreach=False)
    assert isinstance(optimizer, Fragile)
    return optimizer


_made = functools.partial(make_sharded, optimizer=_fragile)


@contextlib.contextmanager
def _fails(optimizer: Fragile, after: int) -> Iterator[None]:
    optimizer.after = after
    with pytest.raises(OutOfMemory):
        yield
    optimizer.after = None


def _plain(rank: int, steps: list[int]) -> Run:
    model = make_model()
    return train_with_ddp(rank, model, _fragile(model), steps)


# ----------------------------------------------------------------------- all ranks fail in the step


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_after_an_exception_in_the_step_and_reset_training_goes_on(
    rank: int, transport: str
) -> None:
    """Steps 1 and 3 end by an exception before a parameter is written; the others train as if
    those had not been.
    """
    expected = _plain(rank, [0, 2, 4])
    out = {}
    rows = [(row, {}) for row in (ROWS if transport == "shared_memory" else ("zero2", "zero3"))]
    # the host's part of a step is taken beside the device's, which is what raises
    if transport == "shared_memory":
        rows += [("zero3", {"offload": zs.Offload(optimizer="host", fraction=0.5)})]
    for row, options in rows:
        model, optimizer, engine = _made(row, transport, **options)
        losses = []
        for step in range(5):
            if step in (1, 3):
                with _fails(optimizer, 0):
                    take_steps(rank, [step], model, optimizer)
                with pytest.raises(
                    StateError,
                    match=r"the last optimizer.step\(\) did not finish: call engine.reset\(\)",
                ):
                    model(*batch(rank, step))
                engine.reset()
            else:
                losses += take_steps(rank, [step], model, optimizer)
        if not options:
            out[row] = Run(losses, engine.full_state_dict(rank0_only=False)).differs_from(expected)
        engine.close()
    assert not any(out.values()), out


@on_ranks(2)
def test_after_half_a_step_the_weights_follow_the_masters_and_a_load_brings_back_whole_steps(
    rank: int, tmp_path: Path
) -> None:
    """Every rank fails after a part of its own: the weights follow the masters, and a checkpoint
    brings back whole steps.
    """
    for row in ("zero1", "zero3"):
        expected = _plain(rank, [0, 1, 2])
        model, optimizer, engine = _made(row, "shared_memory", precision="fp32")
        losses = take_steps(rank, 1, model, optimizer)
        zs.save(f"{tmp_path}/{row}", engine, step=1)
        with _fails(optimizer, 3):
            take_steps(rank, [1], model, optimizer)
        engine.reset()
        with engine.gathered():
            weights = {name: value.detach().clone() for name, value in model.named_parameters()}
        whole = engine.full_state_dict(rank0_only=False)
        assert not (found := differences(weights, whole, row, "the masters")), found
        take_steps(rank, [5], model, optimizer)  # and it trains
        with _fails(optimizer, 3):
            take_steps(rank, [1], model, optimizer)
        zs.load(f"{tmp_path}/{row}", engine)  # also without reset()
        losses += take_steps(rank, (1, 2), model, optimizer)
        found = Run(losses, engine.full_state_dict(rank0_only=False), row=row).differs_from(
            expected
        )
        assert not found, found
        engine.close()


@on_ranks(2)
def test_a_step_that_ended_half_way_is_said_once(rank: int) -> None:
    model, optimizer, engine = _made("zero2", "shared_memory")
    with logged() as said:
        with _fails(optimizer, 1):
            take_steps(rank, [0], model, optimizer)
        engine.reset()
    engine.close()
    assert len(said) == (rank == 0)
    assert rank or "optimizer.step() ended by an exception on rank(s) [0, 1]" in said[0]


# ----------------------------------------------------------------------- one rank fails in the step


def _one_in_the_step(rank: int, world: int, transport: str, row: str, directory: str) -> str:
    """Rank 1 runs out of memory in its step, rank 0 finishes it: only a load helps, and says so;
    then all train on.
    """
    expected = _plain(rank, [0, 1, 2])
    model, optimizer, engine = _made(row, transport)
    losses = take_steps(rank, 1, model, optimizer)
    zs.save(directory, engine, step=1)
    with contextlib.suppress(OutOfMemory, StateError):
        optimizer.after = 2 if rank == 1 else None
        for _ in range(2):
            take_steps(rank, [1], model, optimizer)
    optimizer.after = None
    engine.reset()
    with pytest.raises(
        StateError,
        match=(
            r"refused since an optimizer.step\(\) ended by an exception: .*load a checkpoint with"
            r" zs.load\(\)"
        ),
    ) as caught:
        model(*batch(rank, 1))
    with pytest.raises(CheckpointError, match="load a checkpoint"):
        zs.save(directory, engine, step=2)
    zs.load(directory, engine, step=1)
    losses += take_steps(rank, (1, 2), model, optimizer)
    assert Run(losses, engine.full_state_dict(rank0_only=False)).differs_from(expected) == []
    engine.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("transport", "row"),
    [
        ("shared_memory", "zero3"),
        ("gloo", "zero3"),
        ("shared_memory", "zero1"),
        ("shared_memory", "ddp"),
        ("gloo", "zero1"),
    ],
)
def test_ranks_that_have_finished_different_numbers_of_steps_are_told_after_reset_and_can_load(
    transport: str, row: str, tmp_path: Path
) -> None:
    said = run_ranks(2, _one_in_the_step, transport, row, str(tmp_path))
    assert (
        said[0] == said[1]
        and "have finished different numbers of steps (rank 0: 2; rank 1: 1)" in said[0]
    ), said


@on_ranks(2)
def test_replicas_that_have_taken_different_parts_of_a_step_are_told(rank: int) -> None:
    """ddp: every rank holds all masters, and each fails after another part of them."""
    model, optimizer, engine = _made("ddp", "shared_memory")
    take_steps(rank, [0], model, optimizer)
    with _fails(optimizer, 2 + rank):
        take_steps(rank, [1], model, optimizer)
    engine.reset()
    with pytest.raises(StateError) as caught:
        model(*batch(rank, 1))
    engine.close()
    said = str(caught.value)
    assert (
        "the ranks have taken different parts of the step" in said and "load a checkpoint" in said
    ), said


# ------------------------------------------------------------------------- one rank fails elsewhere


def _boom(*args: Any) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("transport", [*TRANSPORTS, "nccl"])
@on_ranks(2, timeout=60)
def test_hidden_gradients_stay_hidden_after_an_exception_and_reset(
    rank: int, transport: str
) -> None:
    """Hide gradients, and raise in a backward that adds to those of the one before; compare with a
    run without these steps.
    """
    expected, out = _plain(rank, [0, 1]), {}
    for row in ROWS:
        model, optimizer, engine = _made(row, transport)
        engine.hide_gradients()
        losses = []
        for step in range(2):
            with engine.no_sync() if step else contextlib.nullcontext():
                model(*batch(rank, step + 20)).backward()
            handle = model.blocks[1].register_full_backward_pre_hook(_boom)
            with pytest.raises((ZeroDivisionError, StateError)):
                model(*batch(rank, step + 10)).backward()
            handle.remove()
            engine.reset()
            model(*batch(rank, step + 30)).backward()
            assert all(parameter.grad is None for parameter in model.parameters())
            optimizer.zero_grad()
            losses += take_steps(rank, [step], model, optimizer)
        out[row] = Run(losses, engine.full_state_dict(rank0_only=False)).differs_from(expected)
        engine.close()
    assert not any(out.values()), out


@pytest.mark.parametrize("where", ["forward", "backward", "before the step"])
@pytest.mark.parametrize(
    ("transport", "row"), [("shared_memory", "zero3"), ("gloo", "zero3"), ("gloo", "zero1")]
)
@on_ranks(2, timeout=90)
def test_after_one_ranks_exception_all_ranks_reset_and_train_on(
    rank: int, transport: str, row: str, where: str
) -> None:
    """Rank 1 raises; rank 0 is told, long before its stall timeout; both call reset() and train
    as if the step had not been.
    """
    expected = _plain(rank, [0, 2])
    model, optimizer, engine = _made(row, transport, stall_timeout_s=600)
    losses = take_steps(rank, 1, model, optimizer)
    handle = None
    if rank == 1 and where == "forward":
        handle = model.blocks[2].register_forward_pre_hook(_boom)
    if rank == 1 and where == "backward":
        handle = model.blocks[1].register_full_backward_pre_hook(_boom)
    begin = time.monotonic()
    with pytest.raises((ZeroDivisionError, StateError)) as caught:
        # rank 0 may come through one step's backward with what had been sent before
        for _ in range(2):
            loss = model(*batch(rank, 1))
            loss.backward()
            if rank == 1 and where == "before the step":
                raise ZeroDivisionError
            optimizer.step()
    if handle is not None:
        handle.remove()
    assert rank == 1 or "rank(s) [1] gave up this step after an exception" in str(caught.value), (
        caught.value
    )
    assert time.monotonic() - begin < 300
    engine.reset()
    losses += take_steps(rank, [2], model, optimizer)
    differs = Run(losses, engine.full_state_dict(rank0_only=False)).differs_from(expected)
    engine.close()
    assert differs == []


# ---------------------------------------------------- where collectives meet in the order of starts


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def _one_more(rank: int, call: str) -> Iterator[None]:
    """Let rank 1 fail before its second collective of a step, and others after theirs."""
    name = f"group_{call}" if rank == 1 else "NativeWork"
    real, made = getattr(native_transport, name), 0

    def start(*args: Any, **kw: Any) -> Any:
        nonlocal made
        made += rank == 1 or kw["is_gather"] is (call == "all_gather")
        if made == 2:
            raise OutOfMemory
        return real(*args, **kw)

    with mock.patch.object(native_transport, name, start), pytest.raises(OutOfMemory):
        yield


def _apart(
    rank: int, world: int, row: str, call: str, comm: dict[str, Any]
) -> tuple[list[str], list[str], float]:
    """In the middle of a step, twice, rank 1 has no memory for a collective that the others have
    started; return what differs from a run without these steps, and what was logged.
    """
    comms = zs.Comm(transport="nccl", **comm)
    if world == 2:
        expected = _plain(rank, [0, 2, 4])
    else:  # the backend adds more ranks than two in another order than DDP's
        model, optimizer, engine = _made(row, comm=comms)
        losses = take_steps(rank, [0, 2, 4], model, optimizer)
        expected = Run(losses, engine.full_state_dict(rank0_only=False))
    model, optimizer, engine = _made(row, comm=comms)
    losses = take_steps(rank, 1, model, optimizer)
    said, took_s = _Lines(), 0.0
    logging.getLogger("zeroshard").addHandler(said)
    for step in (2, 4):
        with _one_more(rank, call):
            model(*batch(rank, step - 1)).backward()
        begin = time.monotonic()
        engine.reset()
        took_s = max(took_s, time.monotonic() - begin)
        losses += take_steps(rank, [step], model, optimizer)
    differs = Run(losses, engine.full_state_dict(rank0_only=False)).differs_from(expected)
    engine.reset()  # they have started as many
    engine.close()
    return differs, said.lines, took_s


@pytest.mark.parametrize(
    ("world", "row", "call", "comm"),
    [
        (2, "zero3", "all_gather", {}),
        (2, "zero3", "reduce_scatter", {}),
        (2, "zero2", "reduce_scatter", {}),
        (4, "hpz", "all_gather", {"node_size": 2, "hierarchical": True}),
        (4, "hfsdp", "reduce_scatter", {"node_size": 2}),
    ],
)
def test_ranks_that_have_started_different_numbers_of_collectives_connect_anew_and_train_on(
    world: int, row: str, call: str, comm: dict[str, Any]
) -> None:
    for rank, result in enumerate(spawn_ranks(world, _apart, row, call, comm)):
        assert result.result is not None, result
        differs, lines, took_s = result.result
        assert not differs, differs
        told = [line for line in lines if line.startswith("engine.reset(): ")]
        assert len(told) == 2, (rank, lines)
        assert "connect anew" in told[0] and "rank 1: " in told[0], told
        assert took_s < 10  # of 300


def _in_branches(rank: int, world: int) -> list[str]:
    """Backwards end by an exception while rank 1 holds a reduce that waits for its turn, of a block
    that rank 0 does not run; return what differs from a run without these.
    """
    states: list[dict[str, torch.Tensor]] = []
    route = ((0, 3), (0, 2))[rank]
    for fails in (False, True):
        torch.manual_seed(0)
        model = Routed()
        optimizer = two_groups(model)
        engine = zs.shard(model, optimizer, policy="zero2", comm=zs.Comm(transport="nccl"))
        for step in range(3):
            if fails:
                handle = model.blocks[0].register_full_backward_pre_hook(_boom)
                with pytest.raises(ZeroDivisionError):
                    engine.backward(model(*batch(rank, step + 10), route))
                handle.remove()
                assert inside.lent_bytes(engine)
                engine.reset()
                assert not inside.lent_bytes(engine)
            engine.backward(model(*batch(rank, step), route))
            optimizer.step()
            optimizer.zero_grad()
        states.append(final_state(model, engine))
    return differences(*states)


def test_after_a_reset_ranks_in_different_branches_reduce_in_one_order_again() -> None:
    for result in spawn_ranks(2, _in_branches):
        assert result.result == [], result


def _averaged(rank: int, world: int, directory: str) -> list[str]:
    """Average, and save in the background, beside steps in which rank 1 starts fewer collectives;
    return what differs from a run without these steps.
    """
    runs = []
    for fails in (False, True):
        model, optimizer, engine = _made("zero3", "nccl")
        ema = zs.EMA(engine, 0.9)
        folder = f"{directory}/{fails}"
        with zs.Saver(folder, engine, states={"ema": ema}) as saver:
            for step in range(3):
                if fails:  # the files of the last step may be under way
                    with _one_more(rank, "all_gather"):
                        model(*batch(rank, step + 10)).backward()
                    engine.reset()
                take_steps(rank, [step], model, optimizer)
                ema.update()
                saver.save(step)
        states = []
        for step in (2, 1):
            if step == 1:
                zs.load(folder, engine, step=1, states={"ema": ema})
            with ema.swapped():
                states.append(engine.full_state_dict(rank0_only=False))
            states.append(engine.full_state_dict(rank0_only=False))
        engine.close()
        runs.append(states)
    return [line for pair in zip(*runs, strict=True) for line in differences(*pair)]


def test_averages_and_saves_go_on_where_ranks_connect_anew(tmp_path: Path) -> None:
    for result in spawn_ranks(2, _averaged, str(tmp_path)):
        assert result.result == [], result


class _Awaited:
    """A collective that knows whether it has been waited for."""

    def __init__(self, work: Any) -> None:
        self.work, self.is_over = work, False

    def wait(self, *args: Any) -> None:
        self.work.wait(*args)
        self.is_over = True

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())


@on_ranks(2)
def test_a_reset_waits_for_collectives_that_all_ranks_have_started(rank: int) -> None:
    """The backend writes to their memory, which is released then. Raise at one place of a backward,
    while the next gather is under way.
    """
    expected, gather = _plain(rank, [0, 1]), native_transport.group_all_gather
    started: list[_Awaited] = []

    def awaited(*args: Any) -> Any:
        started.append(_Awaited(gather(*args)))
        return started[-1]

    model, optimizer, engine = _made("zero3", "nccl")
    losses = []
    for step in range(2):
        handle = model.blocks[1].register_full_backward_pre_hook(_boom)
        with mock.patch.object(native_transport, "group_all_gather", awaited):
            with pytest.raises((ZeroDivisionError, StateError)):
                model(*batch(rank, step + 10)).backward()
            engine.reset()
        handle.remove()
        losses += take_steps(rank, [step], model, optimizer)
    differs = Run(losses, engine.full_state_dict(rank0_only=False)).differs_from(expected)
    engine.close()
    found = differs, sum(not each.is_over for each in started)
    assert found == ([], 0)


@pytest.mark.slow
@on_ranks(2, timeout=120)
def test_exceptions_of_single_ranks_leave_nothing_that_meets_later_messages(rank: int) -> None:
    """More exceptions on one rank than message generations of old: nothing that was left behind
    meets what comes later.
    """
    model, optimizer, engine = _made("zero3", "gloo")
    for step in range(20):
        handle = (
            model.blocks[1].register_full_backward_pre_hook(_boom) if rank == step % 2 else None
        )
        with pytest.raises((ZeroDivisionError, StateError)):
            model(*batch(rank, step)).backward()
            optimizer.step()
        if handle is not None:
            handle.remove()
        engine.reset()
        take_steps(rank, [step], model, optimizer)
    engine.close()


def _waiting_threads() -> int:
    return sum(thread.name == "zeroshard-gloo" for thread in threading.enumerate())


@on_ranks(2)
def test_threads_that_wait_for_messages_end_with_a_reset_and_with_close(rank: int) -> None:
    """Rank 1 raises in a forward, and both ranks wait for a message of the other's; see how many
    threads wait for messages after each reset, and in the end.
    """
    model, optimizer, engine = _made("zero3", "gloo")
    handle = None
    if rank == 1:
        handle = model.blocks[2].register_forward_pre_hook(_boom)
    counts = []
    for _ in range(6):
        with pytest.raises((ZeroDivisionError, StateError)):
            for _ in range(2):  # rank 0 may come through one step
                model(*batch(rank, 0)).backward()
                optimizer.step()
        messages = inside.transport(engine).control.messages
        messages.post("nothing", messages.tag("never", 0), {}, {1 - rank: torch.empty(1)})
        engine.reset()
        counts.append(_waiting_threads())
    if handle is not None:
        handle.remove()
    take_steps(rank, 1, model, optimizer)
    engine.close()
    deadline = time.monotonic() + 300
    while _waiting_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    counts = [*counts, _waiting_threads()]
    assert counts[-1] == 0 and counts[-2] <= counts[0] + 2, counts


@on_ranks(2, timeout=60)
def test_a_reset_asks_for_what_an_exception_of_a_signals_handler_has_lost(rank: int) -> None:
    """Rank 1 takes records from its socket and notes nothing of them, as where a signal's handler
    raises in between.
    """
    model, optimizer, engine = _made("zero3", "shared_memory")
    take_steps(rank, 1, model, optimizer)
    dist.barrier()  # else rank 1 may take note of it at the end of its step
    if rank == 1:
        links, kinds = inside.transport(engine).control.dispatcher.links, set()
        while MessageKind.ABANDON not in kinds:
            kinds |= {message.kind for message in links.receive(1.0)}
    engine.reset()
    take_steps(rank, 1, model, optimizer)
    engine.close()


RESETS = """
import torch, zeroshard as zs
torch.set_num_threads(1)
zs.init_distributed()
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
engine = zs.shard(model, stage=3, comm=zs.Comm(transport="gloo"))
for step in range(3):
    try:
        loss = model(torch.randn(2, 8)).sum()
        if (step, rank) == (1, 1):
            raise ValueError
        loss.backward()
        model.zero_grad()
    except (ValueError, zs.StateError):
        engine.reset()
"""


def test_a_script_that_has_reset_its_engine_over_gloo_ends_well_without_closing_it(
    tmp_path: Path,
) -> None:
    code, _, stderr = Job(tmp_path, HELLO + RESETS, "--nproc", "2").end()
    assert code == 0, stderr


@on_ranks(2)
def test_reset_waits_for_ranks_that_come_after_their_own_stall_timeout(rank: int) -> None:
    """Rank 0 waits in reset() for longer than its stall timeout, since rank 1 comes only after
    its own.
    """
    model, optimizer, engine = _made("zero3", "gloo", stall_timeout_s=1.5)
    take_steps(rank, [0], model, optimizer)
    inside.lose_notices(engine)  # as where the job's store is gone
    if rank == 0:
        handle = model.blocks[1].register_forward_pre_hook(_boom)
        with pytest.raises(ZeroDivisionError):
            model(*batch(rank, 1))
        handle.remove()
    else:
        time.sleep(0.5)
        with pytest.raises(StallError):
            for _ in range(2):
                model(*batch(rank, 1)).backward()
                optimizer.step()
    engine.reset()
    take_steps(rank, [1], model, optimizer)
    engine.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("world", "rows"),
    [
        (2, [("hfsdp", 1), ("hpz", 1), ("zero1", 1), ("zero3", 1), ("zero2", 2), ("zero3", 2)]),
        (4, [("hfsdp", 2), ("mics", 2)]),
    ],
)
@on_ranks()
def test_reset_right_after_a_step_keeps_the_step_on_every_rank(
    rank: int, world: int, rows: list[tuple[str, int]], transport: str
) -> None:
    """All reset after a step that rank 0 is still publishing; compare with the run in which nobody
    did.
    """
    out = []
    for row, node_size in rows:
        weights = []
        for resets in (False, True):
            comm = zs.Comm.model_validate({"transport": transport, "node_size": node_size})
            model, optimizer, engine = make_sharded(row, comm=comm)
            take_steps(rank, [0], model, optimizer)
            with inside.slow_publishes(0.03 * (rank == 0)) if resets else contextlib.nullcontext():
                take_steps(rank, [1], model, optimizer)
            if resets:
                engine.reset()
            weights.append(final_state(model, engine))
        out += differences(weights[1], weights[0], f"{row}, nodes of {node_size}", "no reset")
    assert not out


@on_ranks(2)
def test_after_a_signal_where_a_backward_begins_and_a_reset_the_next_one_is_plain(
    rank: int,
) -> None:
    """A signal's handler raises where a backward with a weight begins, before it is one."""
    expected = _plain(rank, [0, 2])
    model, optimizer, engine = _made("zero1", "shared_memory")
    losses = take_steps(rank, [0], model, optimizer)

    def boom(frame: Any, event: str, argument: Any) -> None:
        if event == "c_return" and frame.f_code.co_name == "running_as":
            sys.setprofile(None)
            raise ZeroDivisionError

    loss = model(*batch(rank, 1))
    sys.setprofile(boom)
    with pytest.raises(ZeroDivisionError):
        engine.backward(loss, weight=2.0)
    engine.reset()
    losses += take_steps(rank, [2], model, optimizer)
    state = engine.full_state_dict(rank0_only=False)
    engine.repartition(stage=2)  # which is refused inside the contexts of a backward
    engine.close()
    found = Run(losses, state).differs_from(expected)
    assert found == []


@on_ranks(2)
def test_after_a_signal_between_a_buffer_and_its_count_and_a_reset_nothing_counts(
    rank: int,
) -> None:
    """A signal's handler raises between a buffer and its count, at a place of its own each time;
    look at the bytes that count after each reset.
    """
    model, optimizer, engine = _made("zero3", "gloo")
    places = ("take", "add", "remove", "release", "lend", "end_loan")
    live = []

    def boom(frame: Any, event: str, argument: Any) -> None:
        nonlocal left
        if event in ("call", "return") and frame.f_code.co_name in places:
            left -= 1
            if not left:
                sys.setprofile(None)
                raise ZeroDivisionError

    for number in range(1, 160, 5):
        left = number + rank
        sys.setprofile(boom)
        with pytest.raises((ZeroDivisionError, StateError)):
            take_steps(rank, 2, model, optimizer)
        sys.setprofile(None)
        engine.reset()
        live.append(inside.buffer_counter(engine).live)
    take_steps(rank, [1], model, optimizer)
    engine.close()
    assert not any(live), live


@on_ranks(2)
def test_reset_over_gloo_brings_the_engine_back_after_a_signals_handler_has_raised(
    rank: int,
) -> None:
    """A signal's handler raises on both ranks as soon as gloo returns to Python, at a message of
    its own each time; see how often.
    """
    transport = "gloo"
    model, optimizer, engine = _made("zero3", transport)
    take_steps(rank, [0], model, optimizer)

    def boom(frame: Any, event: str, argument: Any) -> None:
        nonlocal left
        if event == "c_return" and frame.f_code.co_name == "_add":
            left -= 1
            if not left:
                sys.setprofile(None)
                raise ZeroDivisionError

    for number in range(1, 13):
        left = number + 2 * rank
        sys.setprofile(boom)
        with pytest.raises((ZeroDivisionError, StateError)):
            for step in range(9):
                take_steps(rank, [step], model, optimizer)
        sys.setprofile(None)
        engine.reset()
    with contextlib.suppress(StorageError):
        take_steps(rank, [1], model, optimizer)
    engine.close()
    assert number == 12
