"""CheckingStreams against an oracle and against the discipline it exists to prove;
AcceleratorStreams against a simulated device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checking_streams import CheckingStreams, StreamRace
from zeroshard.errors import ConfigError
from zeroshard.runtime.streams import (
    LANES,
    AcceleratorStreams,
    Lane,
    NoStreams,
    Streams,
    make_streams,
)

# -- the discipline of the module docstring
# ------------------------------------------------------------------------------------------------


def gather_use_free(streams: Streams) -> None:
    """Gather one buffer on its lane, use it on compute, free it; then again, with the same
    memory.
    """
    for _ in range(2):
        streams.alloc("full")
        streams.fork("gather")
        with streams.on("gather"):
            streams.write("full")
        event = streams.mark("gather")
        streams.join(event)
        streams.read("full")
        streams.free("full")


def reduce_and_free(streams: Streams) -> None:
    """Fill a gradient buffer on compute, reduce it on its lane, read the shard and free the
    buffer on compute.
    """
    streams.alloc("grad")
    streams.write("grad")
    streams.fork("reduce")
    with streams.on("reduce"):
        streams.read("grad")
        streams.write("shard")
    streams.join(streams.mark("reduce"))
    streams.read("shard")
    streams.free("grad")


@pytest.mark.parametrize("program", [gather_use_free, reduce_and_free])
def test_the_discipline_has_no_race(program: Callable[[Streams], None]) -> None:
    checking = CheckingStreams()
    program(checking)
    assert checking.num_syncs > 0
    assert not checking.races


@pytest.mark.parametrize("program", [gather_use_free, reduce_and_free])
def test_every_single_synchronisation_is_needed(program: Callable[[Streams], None]) -> None:
    checking = CheckingStreams()
    program(checking)
    for k, what in enumerate(checking.syncs):
        with pytest.raises(StreamRace):
            program(CheckingStreams(drop=k))
            pytest.fail(f"nothing needs {what}, the synchronisation with number {k}")


def test_a_synchronisation_that_nothing_needs_is_found_by_dropping_it() -> None:
    def wasteful(streams: Streams) -> None:
        gather_use_free(streams)
        streams.fork("reduce")

    checking = CheckingStreams()
    wasteful(checking)
    wasteful(CheckingStreams(drop=checking.num_syncs - 1))


def test_a_race_names_the_buffer_both_operations_and_both_lanes() -> None:
    checking = CheckingStreams()
    checking.alloc("layer3.full")
    with (
        pytest.raises(
            StreamRace,
            match=(
                r"'layer3.full': write on lane gather \(access 2\) .* alloc on lane compute"
                r" \(access 1\)"
            ),
        ) as caught,
        checking.on("gather"),
    ):
        checking.write("layer3.full")
    assert isinstance(caught.value, AssertionError)
    assert (caught.value.buffer, caught.value.first.operation, caught.value.second.lane) == (
        "layer3.full",
        "alloc",
        "gather",
    )
    checking.write("other")  # the lane was left in spite of the exception
    checking.free("other")


def test_collecting_goes_on_after_a_race() -> None:
    checking = CheckingStreams(collect=True)
    for buffer in ("a", "b"):
        checking.write(buffer)
        with checking.on("reduce"):
            checking.read(buffer)
    assert [race.buffer for race in checking.races] == ["a", "b"]


def test_an_event_covers_what_came_before_it_and_nothing_after() -> None:
    checking = CheckingStreams()
    with checking.on("gather"):
        checking.write("early")
        event = checking.mark("gather")
        checking.write("late")
    checking.join(event)
    checking.read("early")
    with pytest.raises(StreamRace, match="late"):
        checking.read("late")


def test_order_is_transitive_through_a_third_lane() -> None:
    checking = CheckingStreams()
    with checking.on("gather"):
        checking.write("x")
    checking.join(checking.mark("gather"))
    checking.fork("reduce")
    with checking.on("reduce"):
        checking.write("x")


def test_reads_need_no_order_between_them() -> None:
    checking = CheckingStreams()
    checking.write("weight")
    checking.fork("gather")
    checking.fork("reduce")
    checking.read("weight")
    for lane in LANES[1:]:
        with checking.on(lane):
            checking.read("weight")
    with pytest.raises(StreamRace, match="write on lane compute"):
        checking.write("weight")


@pytest.mark.parametrize("operation", ["read", "write"])
def test_memory_is_not_used_after_it_was_freed_even_in_order(operation: str) -> None:
    checking = CheckingStreams()
    checking.alloc("x")
    checking.free("x")
    with pytest.raises(StreamRace, match="given back by free on lane compute"):
        getattr(checking, operation)("x")


def test_memory_freed_on_another_lane_must_be_ordered_for_the_lane_that_will_get_it_again() -> None:
    """A caching allocator returns a block to the stream that allocated it: its next owner there
    would not wait for the reader.
    """
    checking = CheckingStreams()
    checking.alloc("x")
    checking.fork("gather")
    with checking.on("gather"):
        checking.read("x")
        with pytest.raises(StreamRace, match="gives memory back to lane compute"):
            checking.free("x")
    checking = CheckingStreams()
    checking.alloc("x")
    checking.fork("gather")
    with checking.on("gather"):
        checking.read("x")
    checking.join(checking.mark("gather"))
    with checking.on("gather"):
        checking.free("x")


# -- the oracle: all pairs, by reachability
# ------------------------------------------------------------------------------------------------

Step = tuple[str, Lane, str]  # what, lane, buffer
STEPS = st.tuples(
    st.sampled_from(["read", "write", "alloc", "fork", "mark", "join"]),
    st.sampled_from(LANES),
    st.sampled_from("ab"),
)


def oracle(program: list[Step]) -> bool:
    """Whether some pair of conflicting accesses is not connected by program order and events."""
    after: list[set[int]] = []  # per node: all nodes it comes after
    # per lane: what its next access comes after
    last: dict[Lane, set[int]] = {lane: set() for lane in LANES}
    accesses: list[tuple[str, str]] = []
    events: list[set[int]] = []
    for what, lane, buffer in program:
        if what == "fork":
            last[lane] = last[lane] | last["compute"]
        elif what == "mark":
            events.append(set(last[lane]))
        elif what == "join":
            last["compute"] = last["compute"] | (events[-1] if events else set())
        else:
            node = len(accesses)
            accesses.append((what, buffer))
            after.append(set(last[lane]))
            last[lane] = last[lane] | {node}
    return any(
        accesses[i][1] == accesses[j][1]
        and {accesses[i][0], accesses[j][0]} != {"read"}
        and i not in after[j]
        for i, j in combinations(range(len(accesses)), 2)
    )


@settings(max_examples=400, deadline=None)
@given(st.lists(STEPS, max_size=24))
def test_a_race_is_reported_exactly_when_the_oracle_finds_one(program: list[Step]) -> None:
    checking, event = CheckingStreams(collect=True), None
    for what, lane, buffer in program:
        if what == "fork":
            checking.fork(lane)
        elif what == "mark":
            event = checking.mark(lane)
        elif what == "join":
            if event is not None:
                checking.join(event)
        else:
            with checking.on(lane):
                getattr(checking, what)(buffer)
    assert bool(checking.races) == oracle(program)


# -- the other implementations
# --------------------------------------------------------------------------------------------------


def test_no_streams_takes_every_call() -> None:
    streams = NoStreams()
    gather_use_free(streams)
    reduce_and_free(streams)
    with streams.on("gather"), streams.on("reduce"):
        pass


def test_make_streams_answers_by_device() -> None:
    assert isinstance(make_streams("cpu"), NoStreams)
    with pytest.raises(ConfigError, match="'meta'"):
        make_streams("meta")


class FakeStream:
    """A stream that keeps a log; events are (stream name, length of its log)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.log: list[object] = []
        self.is_over = True

    def query(self) -> bool:
        return self.is_over

    def record_event(self) -> tuple[str, int]:
        return self.name, len(self.log)

    def wait_event(self, event: tuple[str, int]) -> None:
        self.log.append(("wait", *event))


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> list[FakeStream]:
    """A stand-in for torch.cuda's streams; the value is the stack of current streams."""
    current = [FakeStream("user")]
    names = iter(["gather", "reduce"])

    @contextmanager
    def enter(stream: FakeStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: FakeStream(next(names)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", enter)
    return current


def test_fork_and_join_order_the_users_current_stream_with_a_lane(
    fake_cuda: list[FakeStream],
) -> None:
    streams = AcceleratorStreams("cuda:0")
    user = fake_cuda[0]
    user.log.append("kernel")
    streams.fork("gather")
    with streams.on("gather"):
        gather = fake_cuda[-1]
        gather.log.append("copy")
    assert fake_cuda == [user]
    assert gather.log == [("wait", "user", 1), "copy"]
    streams.join(streams.mark("gather"))
    assert user.log == ["kernel", ("wait", "gather", 2)]


def test_inside_a_lane_compute_is_still_the_users_stream(fake_cuda: list[FakeStream]) -> None:
    streams = AcceleratorStreams("cuda:0")
    user = fake_cuda[0]
    with streams.on("gather"):
        streams.fork("reduce")
        with streams.on("reduce"):
            reduce = fake_cuda[-1]
            streams.join(streams.mark("gather"))
            with streams.on("compute"):
                assert fake_cuda[-1] is user
    assert reduce.log == [("wait", "user", 0)]
    assert user.log == [("wait", "gather", 0)]


def test_compute_follows_the_user_to_another_stream(fake_cuda: list[FakeStream]) -> None:
    streams = AcceleratorStreams("cuda:0")
    other = FakeStream("other")
    with torch.cuda.stream(other):  # type: ignore[arg-type]
        streams.join(streams.mark("gather"))
    assert other.log == [("wait", "gather", 0)]
    assert fake_cuda[0].log == []


@pytest.mark.parametrize("lane", ["gather", "reduce"])
def test_a_lane_that_holds_work_is_not_idle(fake_cuda: list[FakeStream], lane: Lane) -> None:
    streams = AcceleratorStreams("cuda:0")
    assert streams.is_idle()
    with streams.on(lane):
        fake_cuda[-1].is_over = False
    assert not streams.is_idle()


@pytest.mark.gpu
def test_a_copy_on_a_lane_is_seen_by_compute() -> None:
    streams = make_streams("cuda")
    source = torch.arange(1 << 24, device="cuda")
    for _ in range(10):
        full = torch.zeros_like(source)
        streams.fork("gather")
        with streams.on("gather"):
            torch.cuda._sleep(1_000_000)  # type: ignore[no-untyped-call]
            full.copy_(source)
        streams.join(streams.mark("gather"))
        assert torch.equal(full, source)


@pytest.mark.gpu
def test_lanes_are_idle_once_the_device_has_done_what_they_hold() -> None:
    streams = make_streams("cuda")
    torch.cuda.synchronize()
    assert streams.is_idle()
    with streams.on("reduce"):
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
    assert not streams.is_idle()
    streams.drain()
    assert streams.is_idle()
