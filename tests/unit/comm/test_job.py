"""How ranks join a job: one rule for all, of what all have said."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zeroshard as zs
from zeroshard.comm import job
from zeroshard.comm.job import Seat, seated

UUIDS = tuple(f"GPU-{number}" for number in range(8))


def _seats(
    *uuids: Sequence[str], places: Sequence[int | None] = (), host: str = "a 1"
) -> list[Seat]:
    """Return the seats of ranks of one host, each of which sees the devices of `uuids`."""
    numbers = places or range(len(uuids))
    return [
        Seat(host, place, "cuda", "nccl", tuple(seen))
        for place, seen in zip(numbers, uuids, strict=True)
    ]


def _all(seats: Sequence[Seat], asked: str | None = None) -> list[tuple[str, int | None]]:
    return [seated(seats, rank, asked) for rank in range(len(seats))]


@pytest.mark.parametrize("places", [(0, 1, 2, 3), (0, 0, 0, 0), (None,) * 4])
def test_ranks_that_see_their_own_device_alone_all_take_the_devices_backend(
    places: Sequence[int | None],
) -> None:
    seats = _seats(*[[uuid] for uuid in UUIDS[:4]], places=places)
    assert _all(seats) == [("cpu:gloo,cuda:nccl", 0)] * 4


@pytest.mark.parametrize("places", [(0, 1, 2, 3), (None,) * 4])
def test_ranks_that_see_all_devices_take_that_of_their_place(places: Sequence[int | None]) -> None:
    seats = _seats(*[UUIDS] * 4, places=places)
    both = [*seats, *(Seat("b 1", seat.place, "cuda", "nccl", UUIDS[4:]) for seat in seats)]
    assert _all(seats) == [("cpu:gloo,cuda:nccl", index) for index in range(4)]
    assert _all(both) == [("cpu:gloo,cuda:nccl", index) for index in (0, 1, 2, 3) * 2]


def test_pairs_that_a_rank_sees_alone_are_told_apart() -> None:
    assert [index for _, index in _all(_seats(UUIDS[:2], UUIDS[2:4], UUIDS[4:6]))] == [0, 1, 0]


def test_devices_without_uuids_are_told_apart_by_their_hosts() -> None:
    seats = [Seat(host, 0, "npu", "hccl", ("npu:0",)) for host in ("a 1", "b 1")]
    assert _all(seats) == [("cpu:gloo,npu:hccl", 0)] * 2
    seats = [Seat(f"a {room}", 0, "npu", "hccl", ("npu:0",)) for room in (1, 2)]
    with pytest.raises(zs.ConfigError, match="take the same one"):  # two containers of one machine
        _all(seats)


def test_ranks_that_share_a_device_all_meet_over_gloo(caplog: pytest.LogCaptureFixture) -> None:
    assert _all(_seats(*[UUIDS[:4]] * 5)) == [("gloo", None)] * 5
    (told,) = caplog.messages
    assert "4 cuda device(s) for 5 ranks: ranks [0, 4] take the same one; all meet over" in told
    assert _all(_seats(*[UUIDS[:1]] * 3)) == [("gloo", None)] * 3
    assert "1 cuda device(s) for 3 ranks: ranks [0, 1, 2] take" in caplog.messages[1]


@pytest.mark.parametrize("asked", [None, "nccl", "cpu:gloo,cuda:nccl"])
def test_they_are_refused_on_every_rank_where_gloo_would_be_no_answer(asked: str | None) -> None:
    seats = _seats(*[UUIDS[:1]] * 2)
    if asked is None:  # other hosts have enough
        seats += [Seat("b 1", 0, "cuda", "nccl", UUIDS[4:5])]
    for rank in range(len(seats)):
        with pytest.raises(zs.ConfigError, match="one rank for each device, or call init_dist"):
            seated(seats, rank, asked)
        assert seated(seats, rank, "gloo") == ("gloo", None)


def test_a_rank_that_sees_no_device_is_named_on_every_rank() -> None:
    seats = [*_seats(UUIDS[:1]), Seat("a 1", 1), *_seats(UUIDS[2:3])]
    for rank in range(3):
        with pytest.raises(
            zs.ConfigError, match=r"rank\(s\) \[1\] do not see devices of type 'cuda'"
        ):
            seated(seats, rank, None)
    assert _all(seats, "gloo") == [("gloo", 0), ("gloo", None), ("gloo", 0)]
    assert _all([Seat("a 1", 0), Seat("a 1", 1)]) == [("gloo", None)] * 2


def test_a_device_that_no_backend_serves_is_taken_beside_gloo() -> None:
    assert _all([Seat("a 1", 0, "mps", None, ("mps",))]) == [("gloo", 0)]


def _joined(
    kind: str, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> list[tuple[str, Any]]:
    """Pretend that this host has four devices of `kind`, and as many ranks, with the local ranks 0
    to 3, have come; return what will be done to join.
    """
    made: list[tuple[str, Any]] = []
    module = torch.get_device_module(kind)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind)
    )
    monkeypatch.setattr(module, "device_count", lambda: 4)
    monkeypatch.setattr(module, "set_device", lambda index: made.append(("set", index)))
    monkeypatch.setattr(
        module,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=UUIDS[torch.device(device).index or 0]),
    )
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda backend, *, device_id, **_: made.append((backend, device_id)),
    )
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    store, own = dist.HashStore(), Seat.of(*job.all_devices())
    for number in range(int(environment["WORLD_SIZE"])):
        near = number // 4 == int(environment["RANK"]) // 4
        host = own.host if near else "another host"
        seat = Seat(host, number % 4, own.type, own.backend, own.uuids)
        if number != int(environment["RANK"]):
            size = int(environment["WORLD_SIZE"])
            Thread(target=job.introduced, args=(store, number, size, 60, seat), daemon=True).start()
    monkeypatch.setattr(job, "_store", lambda *_: store)
    made_job = SimpleNamespace(bound_device_id=torch.device(kind, 0))
    monkeypatch.setattr(job, "connected", lambda make, *_: (make(), made_job)[1])
    ends = SimpleNamespace(register=lambda *_: made.append(("unbound", made_job.bound_device_id)))
    monkeypatch.setattr(job, "atexit", ends)
    return made


@pytest.mark.parametrize(
    ("kind", "asked", "backend", "has_device"),
    [
        ("cuda", None, "cpu:gloo,cuda:nccl", True),
        ("cuda", "nccl", "nccl", True),
        ("cuda", "gloo", "gloo", False),
        ("xpu", None, "cpu:gloo,xpu:xccl", True),
        ("xpu", "xccl", "xccl", True),
        ("xpu", "gloo", "gloo", False),
    ],
)
def test_the_backend_of_an_accelerator_is_told_the_device_of_the_rank(
    kind: str, asked: str | None, backend: str, has_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = _joined(kind, monkeypatch, {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2"})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    zs.init_distributed(asked)
    own = torch.device(kind, 2) if has_device else None
    assert made == [("set", 2), (backend, own), ("unbound", None)]


@pytest.mark.parametrize("hosts", [1, 2])
def test_gloo_takes_the_way_to_the_first_host_where_hosts_are_several(
    hosts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.7")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    job.choose_interface(["a", "b"][:hosts] * 2)
    assert os.environ.pop("GLOO_SOCKET_IFNAME", None) == (None if hosts == 1 else "lo")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    job.choose_interface(["a", "b"])
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"


class _GivenUp:
    """A store whose process ends at one of its calls."""

    def __init__(self, at: str) -> None:
        self.at = at
        self.ended = False

    def __getattr__(self, name: str) -> Any:
        def call(*_: object) -> None:
            self.ended |= name == self.at
            if self.ended:
                raise dist.DistNetworkError("Failed to recv, got 0 bytes")
            if name == "wait":
                raise dist.DistStoreError("wait timeout after 1000ms")

        return call


def test_ranks_meet_those_of_their_start_in_a_store_that_others_have_left_full() -> None:
    store, found = dist.HashStore(), list[Any]()

    def come(rank: int, start: int, limit_s: float = 60.0) -> None:
        own, seats = job.introduced(store, rank, 3, limit_s, Seat(f"start {start}", rank))
        found.append((start, {seat.host for seat in seats}, own.add("ranks", 1)))

    for start in (0, 1):
        ranks = [Thread(target=come, args=(rank, start)) for rank in (2, 1, 0)]
        for rank in ranks:  # those that come before rank 0 find what the start before has left
            rank.start()
            time.sleep(0.1)
        for rank in ranks:
            rank.join(60)
        with pytest.raises(zs.StallError, match=r"rank\(s\) \[0\] did not come within 0.7 s"):
            come(1, -1, 0.7)  # and rank 0 does not come
    assert sorted(found, key=repr) == [
        (start, {f"start {start}"}, count) for start in (0, 1) for count in (1, 2, 3)
    ]


@pytest.mark.parametrize("at", ["set", "wait", "check"])
def test_a_store_that_is_gone_is_told_as_such_whenever_it_goes(at: str) -> None:
    with pytest.raises(zs.PeerLostError, match="has ended or given up"):
        job.introduced(_GivenUp(at), 0, 2, 1, Seat("host"))
