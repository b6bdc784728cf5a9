"""AcceleratorStreams against a simulated device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from zeroshard.errors import ConfigError
from zeroshard.runtime.streams import LANES, AcceleratorStreams, Lane, Streams, make_streams


def test_no_streams_takes_every_call() -> None:
    streams = Streams()
    streams.fork("gather")
    streams.join(streams.mark("gather"))
    with streams.on("gather"), streams.on("reduce"):
        pass


def test_only_an_accelerator_has_lanes_that_are_enqueued_on() -> None:
    assert AcceleratorStreams.has_lanes and AcceleratorStreams.enqueues
    assert not Streams.has_lanes and not Streams.enqueues


def test_make_streams_answers_by_device() -> None:
    assert type(make_streams("cpu")) is Streams
    assert type(make_streams("mps")) is Streams  # torch's module for it has no streams
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
    names = iter(LANES[1:])

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
