"""Each wait and each hold of docs/design/streams.md, left out one at a time, changes a number under
some schedule of the pretended device: with it there, none does (test_matrix.py).

`python -m tests.device.table --waits` prints which schedule finds which.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from tests.device.omission import Omission
from tests.device.programs import ALL, CASES, FIFO, Schedule, trained
from tests.support.adversary import ForgetfulReduction, tiles_without_marks
from tests.support.harness import on_ranks, run_ranks
from zeroshard.comm.native_transport import NativeTransport
from zeroshard.errors import ZeroshardError
from zeroshard.memory.host_pages import PinnedPages
from zeroshard.runtime import bucket
from zeroshard.runtime.segment import Segment

_DEVICE = "tests.device.zsim"


@contextmanager
def _tiles_on_the_device_hold_no_gradient() -> Iterator[None]:
    bring = Segment.bring

    def forgetful(self: Segment, start: int, stop: int, master: Any, stays: bool, *_: Any) -> Any:
        return bring(self, start, stop, master, stays, None)

    with mock.patch.object(Segment, "bring", forgetful):
        yield


HOLDS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "Reduction.uses": partial(mock.patch.object, bucket, "Reduction", ForgetfulReduction),
    "the mark of Segment.bring": tiles_without_marks,
    "PinnedPages.note": partial(mock.patch.object, PinnedPages, "note", lambda *_: None),
    "the gradient of Segment.bring": _tiles_on_the_device_hold_no_gradient,
}


def met(rank: int, world: int, case: str) -> dict[str, int]:
    """Return the waits of a case, and how often each is met."""
    with Omission().active() as omission:
        trained(CASES[case].program, rank, world, FIFO)
    return dict(Counter(omission.waits))


def finds(
    rank: int, world: int, wait: str, case: str, schedules: Sequence[Schedule], first: bool = False
) -> list[Schedule]:
    """Return the schedules (or the `first` of them) under which a run without `wait` has other
    numbers, or none at all.
    """
    program = CASES[case].program
    expected = trained(program, rank, world, FIFO)
    found: list[Schedule] = []
    for schedule in schedules:
        if found and first:
            break
        without = HOLDS[wait]() if wait in HOLDS else Omission([wait]).active()
        try:
            with without:
                run = trained(program, rank, world, schedule)
        except (ZeroshardError, ValueError):
            found.append(schedule)  # numbers that nobody can go on with
        else:
            if run.differs_from(expected):
                found.append(schedule)
    return found


# the wait or hold that is left out: the case that needs it, and a schedule that shows it
WAITS: dict[str, tuple[str, Schedule]] = {
    "fork(gather)": ("native zero3", ("compute_last", 0)),
    "join(gather)": ("native zero3", ("compute_first", 0)),
    "fork(reduce)": ("native zero3", ("compute_last", 0)),
    "join(reduce)": ("native zero3", ("compute_first", 0)),
    "NativeTransport.grad_buffer": ("native zero3", ("compute_first", 0)),
    "Reduction.uses": ("native codecs", ("compute_first", 0)),
    "Segment.wait_uploads": ("optimizer on the host", ("compute_first", 0)),
    "the mark of Segment.bring": ("gradients on the host, fp32", ("compute_first", 0)),
    "the gradient of Segment.bring": ("a fraction, fp32", ("compute_first", 0)),
    "Gradient.wait_writes": ("states on the host", ("compute_first", 0)),
    "State.borrowed.<locals>.<listcomp>": ("a fraction", ("compute_first", 0)),
    "TileRunner._step_on_host": ("optimizer on the host", ("compute_first", 0)),
    "LateFinalizer._named": ("zero3 bf16", ("compute_first", 0)),
    "read_squares": ("optimizer on the host", ("compute_first", 0)),
    "BounceBuffers._carry": ("everything on disk", ("compute_first", 0)),
    "BounceBuffers.of.<locals>.carry": ("everything on disk", ("compute_last", 0)),
    "DeviceStorage.read": ("optimizer on disk", ("compute_first", 0)),
    "Gradient.fetch": ("gradients on disk", ("compute_first", 0)),
    "TileRunner._call_on_stream": ("evaluated, gradients on the host", ("compute_last", 0)),
    "TileRunner.wait": ("save and load, gradients on the host", ("compute_first", 0)),
    "HostStorage._wait_for_opposite": ("evaluate and load, on the host", ("compute_first", 0)),
    "write_shard.<locals>.parts": ("save and load", ("compute_first", 0)),
    "Whole.full_state_dict": ("zero3 bf16", ("compute_first", 0)),
    "SegmentStates.read": ("repartition", ("compute_first", 0)),
    "_fill": ("optimizer on the host", ("compute_first", 0)),
    "digest_of": ("edited", ("compute_first", 0)),
    "HostStorage.flush": ("zeroed, gradients on the host", ("compute_first", 0)),
    "PinnedPages.note": ("registered pages", ("compute_first", 0)),
    "drain": ("reset, memory taken", ("compute_first", 0)),
    "_Room.extended": ("decode, all on the host", ("compute_first", 0)),
}
# copies that the host reads from pageable memory, for which a driver would wait
READ_AT_ONCE = ("Whole.full_state_dict", "SegmentStates.read", "_fill", "digest_of")
# waits that no case has needed, and one that meets each: docs/design/streams.md says why they stay
COVERED: dict[str, str] = {
    "NativeTransport.reduce": "native zero3",
    "OneProcess.grad_buffer": "zero3 bf16",
    "_Reads.wait": "everything on the host",
    "_Buffers.wait": "optimizer on disk",
    "Segment._bring": "late",
    "State.put": "evaluate and load, on the host",
    "Whole._copy_of.<locals>.read": "everything on the host",
    "move": "off the device and back",
}


@pytest.mark.parametrize(
    "wait",
    [pytest.param(wait, marks=[pytest.mark.slow] * (wait in READ_AT_ONCE)) for wait in WAITS],
)
def test_a_wait_that_is_left_out_changes_a_number(wait: str) -> None:
    case, schedule = WAITS[wait]
    # a schedule does not order the step's thread, which can miss the race once in twenty runs
    found = run_ranks(1, finds, wait, case, [schedule] * 3, True, device=_DEVICE)
    assert found == [[schedule]]


@pytest.mark.slow
@pytest.mark.parametrize("wait", COVERED)
def test_a_covered_wait_that_is_left_out_changes_none(wait: str) -> None:
    """Where this fails, a case has been found that needs it: then it belongs to WAITS."""
    assert run_ranks(1, finds, wait, COVERED[wait], ALL[:5], device=_DEVICE) == [[]]


@pytest.mark.slow
@on_ranks(1, device=_DEVICE, timeout=500)
def test_each_fork_and_join_but_a_covered_one_changes_a_number(rank: int, world: int) -> None:
    """A join of the reduce lane that a later one covers, before anybody reads the sum, is none.
    Look at the waits of a run, and which of its forks and joins no schedule misses.
    """
    program = CASES["native, all read"].program
    expected = trained(program, rank, world, FIFO)
    with Omission().active() as whole:
        trained(program, rank, world, FIFO)
    likely = {"fork": "compute_last", "join": "compute_first"}
    unmet = []
    for number, wait in enumerate(whole.waits):
        kind, _, lane = wait.partition("(")
        if kind not in likely or not lane:
            continue
        for schedule in sorted(ALL[:5], key=lambda one: one[0] != likely[kind]):
            try:
                with Omission(drop=[number]).active():
                    if trained(program, rank, world, schedule).differs_from(expected):
                        break
            except (ZeroshardError, ValueError):
                break
        else:
            unmet.append(number)
    waits = whole.waits
    join = "join(reduce)"
    assert unmet == [
        number
        for number, wait in enumerate(waits)
        if wait == join and join in waits[number + 1 : waits.index("LateFinalizer._named", number)]
    ]


@on_ranks(1, device=_DEVICE)
def test_the_joins_of_reduces_under_way_each_order_their_own_sum(rank: int, world: int) -> None:
    """Two reduces are under way at a time: marks of the pool order those before. See how many
    parameters change without the last join of a reduce, and the last two.
    """
    program = replace(CASES["native, all read"].program, steps=1)
    expected = trained(program, rank, world, FIFO).state
    with Omission().active() as whole:
        trained(program, rank, world, FIFO)
    joins = [number for number, wait in enumerate(whole.waits) if wait == "join(reduce)"]
    changed = []
    for count in (1, 2):
        # the sum of verdicts would order them, too: it is a collective of the same communicator
        alone = mock.patch.object(NativeTransport, "_add_up", lambda transport, tensor: None)
        with alone, Omission(drop=joins[-count:]).active():
            state = trained(program, rank, world, ("compute_first", 0)).state
        changed.append(sum(not torch.equal(state[name], expected[name]) for name in expected))
    last, both = changed
    assert 0 < last < both
