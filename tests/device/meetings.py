"""The collectives that the ranks of a program launch, and whether they meet.

A communicator of NCCL knows no names: the n-th call of a rank meets the n-th of each other, and
those of several communicators may wait for each other as well. So it is enough that the ranks can
take their logs from the front, each call with all ranks of its group at once, on the same lane and
for the same unit. That holds whatever lanes do, since it is about the order of launches alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist

from zeroshard.comm.groups import gather_bytes
from zeroshard.comm.native_transport import NativeTransport
from zeroshard.runtime.streams import AcceleratorStreams


class Call(NamedTuple):
    """One collective of one rank."""

    lane: str
    group: str
    size: int  # of the group
    kind: str  # with its root and its bytes
    dtype: str
    key: str = ""  # of the engine, where it is the engine's

    def __str__(self) -> str:
        key = self.key or "the program"
        return f"{self.kind} of {self.dtype} on {self.lane} in group {self.group} ({key})"


def unmet(logs: Sequence[Sequence[Call]]) -> str:
    """Return which calls of the ranks' `logs` do not meet, "" where all do."""
    members = {
        call.group: [rank for rank, log in enumerate(logs) if call.group in {c.group for c in log}]
        for log in logs
        for call in log
    }
    left = [list(reversed(log)) for log in logs]
    while any(left):
        heads = {rank: calls[-1] for rank, calls in enumerate(left) if calls}
        for call in heads.values():
            ranks = members[call.group]
            here = [heads[rank] for rank in ranks if rank in heads]
            if len(here) == call.size and {one.group for one in here} == {call.group}:
                break
        else:
            return _told("no rank can go on", heads)
        if len(set(here)) > 1:
            return _told("calls that meet are not the same", {rank: heads[rank] for rank in ranks})
        for rank in ranks:
            left[rank].pop()
    return ""


def strayed(log: Sequence[Call]) -> str:
    """Return which calls of the engine in a `log` are on a lane that is not theirs, "" where none
    is.
    """
    lanes: dict[tuple[str, str], str] = {}
    for call in log:
        if call.key:
            expected = call.lane
            if call.key.startswith("reduce of ") and not expected.startswith("reduce"):
                expected = "reduce"
            is_gather = call.key.startswith("all_gather of ") and not call.key.endswith(".master")
            if is_gather and expected == "compute":
                expected = "gather"
            if call.lane != lanes.setdefault((call.group, call.key), expected):
                return f"not on {lanes[call.group, call.key]}: {call}"
    return ""


def _told(what: str, heads: dict[int, Call]) -> str:
    return "\n  ".join([what, *(f"rank {rank}: {call}" for rank, call in heads.items())])


@contextmanager
def meeting(world: int) -> Iterator[None]:
    """Raise AssertionError on every rank at the end of the body where calls in it do not meet, or
    a unit's are not on one lane, which for its reduces is a reduce lane. Collective.
    """
    from tests.device import zsim

    lanes: dict[str, str] = {}  # by stream

    def make_streams(original: Callable[..., None], streams: Any, *args: Any) -> None:
        original(streams, *args)
        lanes.update({str(one.stream_id): lane for lane, one in streams._lanes.items()})

    def named(
        original: Callable[..., Any], transport: Any, first: Any, *args: Any, **kw: Any
    ) -> Any:
        key = first if isinstance(first, str) else getattr(first, "key", "a tensor")
        zsim.name_collectives(f"{original.__name__} of {key}")
        try:
            return original(transport, first, *args, **kw)
        finally:
            zsim.name_collectives("")

    patches: list[tuple[Any, str, Callable[..., Any]]] = [
        (AcceleratorStreams, "__init__", make_streams),
        *((NativeTransport, name, named) for name in ("all_gather", "reduce", "broadcast")),
    ]
    with ExitStack() as stack:
        for target, name, make in patches:
            method = _method(make, getattr(target, name))
            stack.enter_context(mock.patch.object(target, name, method))
        zsim.take_collectives()
        yield
    calls = [one.split("|") for one in zsim.take_collectives()]
    log = [
        Call(lanes.get(stream, "compute"), group, int(size), *rest)
        for stream, group, size, *rest in calls
        if int(size) > 1
    ]
    if world > 1:
        told = gather_bytes(dist.group.WORLD, json.dumps(log).encode())  # type: ignore[arg-type]
        logs = [[Call(*one) for one in json.loads(each)] for each in told]
        found = unmet(logs) or next(filter(None, map(strayed, logs)), "")
        assert not found, found


def _method(stand_in: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def method(target: Any, *args: Any, **options: Any) -> Any:
        return stand_in(original, target, *args, **options)

    return method
