"""The small parts by themselves, in one process: sockets, slots, selection."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import replace

import pytest
import torch

from zeroshard.comm.cpu.gloo_peers import Waiters
from zeroshard.comm.cpu.links import MAX_TAIL, Links, Message, MessageKind
from zeroshard.comm.cpu.rendezvous import _agree
from zeroshard.comm.cpu.slots import FAR, Contribution, Matching, PoolSlot, SlotPool
from zeroshard.comm.select import make_transport
from zeroshard.comm.transport import CommSpec, serve
from zeroshard.core.placement import Mesh
from zeroshard.errors import ConfigError, PeerLostError, StallError

CPU = torch.device("cpu")


def pair(stall_timeout_s: float = 300.0) -> tuple[Links, Links]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return tuple(
        Links({peer: end}, members=(0, 1), stall_timeout_s=stall_timeout_s)
        for peer, end in ((1, ours), (0, theirs))
    )


def test_two_ranks_with_full_sockets_do_not_deadlock() -> None:
    links = pair()
    received: list[list[Message]] = [[], []]

    def talk(rank: int) -> None:
        for number in range(300):  # far more than a socket buffer holds
            links[rank].send(1 - rank, MessageKind.EXCHANGE, number, tail=bytes(MAX_TAIL))
        while len(received[rank]) < 300:
            received[rank] += links[rank].receive(5.0)

    threads = [threading.Thread(target=talk, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert [[message.a for message in messages] for messages in received] == [list(range(300))] * 2
    for link in links:
        link.close()


def test_what_a_peer_said_before_it_hung_up_still_counts() -> None:
    ours, theirs = pair()
    # unread when the peer closes: the kernel then reports a reset before the data
    ours.send(1, MessageKind.ACK, 1)
    for number in range(5):
        theirs.send(0, MessageKind.READ, number)
    theirs.close()
    messages = ours.receive(1.0)
    assert [message.a for message in messages] == [0, 1, 2, 3, 4]
    assert ours.lost == {1}
    ours.send(1, MessageKind.ACK, 2)  # nobody is there: whoever waits finds out
    with pytest.raises(PeerLostError, match=r"waiting: rank\(s\) \[1\]"):
        ours.require([1], "waiting")
    ours.close()


def test_a_peer_that_reads_nothing_is_a_stall() -> None:
    ours, theirs = pair(stall_timeout_s=0.3)
    with pytest.raises(StallError, match="rank 1 reads no messages"):
        for _ in range(1000):
            ours.send(1, MessageKind.EXCHANGE, tail=bytes(MAX_TAIL))
    ours.close()
    theirs.close()


def test_another_thread_can_end_a_wait() -> None:
    ours, theirs = pair()
    threading.Timer(0.05, ours.wake).start()
    assert ours.receive(10.0) == []
    ours.close()
    ours.wake()  # after the end: nothing
    theirs.close()


def test_a_wait_ends_by_what_another_transport_hears() -> None:
    ours, theirs = pair()
    waiting, silent = pair()
    threading.Timer(0.05, theirs.send, (0, MessageKind.ACK, 1)).start()
    start = time.monotonic()
    assert waiting.receive(300.0, ours.descriptors) == [] and time.monotonic() - start < 200.0
    assert [message.a for message in ours.receive(0.0)] == [1]
    assert waiting.receive(0.01, ours.descriptors) == []  # nothing is left to hear
    for links in (ours, theirs, waiting, silent):
        links.close()
        assert links.descriptors == ()


def make_pool(limit_bytes: int | None) -> tuple[SlotPool, list[int], list[int]]:
    made: list[int] = []
    dropped: list[int] = []
    return (
        SlotPool(lambda number, num_bytes, fd: made.append(num_bytes), dropped.append, limit_bytes),
        made,
        dropped,
    )


def slot_of(pool: SlotPool, buffer: torch.Tensor) -> PoolSlot:
    """Return the slot that `buffer` was lent from."""
    slot = pool.lent(buffer)
    assert slot is not None
    return slot


def test_the_pool_stays_within_its_limit_and_always_gives_one() -> None:
    pool, made, dropped = make_pool(8192)
    first = pool.take(3000, torch.float32, CPU)  # larger than the limit, but the only one
    assert first is not None and first.numel() == 3000
    assert pool.take(64, torch.float32, CPU) is None
    slot = slot_of(pool, first)
    pool.submit(slot, {0, 1, FAR})
    for reader in (0, FAR, 1):
        assert pool.take(64, torch.float32, CPU) is None
        pool.release(slot.number, reader)
    again = pool.take(64, torch.float32, CPU)  # the idle slot fits
    assert again is not None and slot_of(pool, again) is slot
    assert made == [12288] and not dropped
    pool.give(again)
    # the idle slot does not: it is dropped first
    assert pool.take(4000, torch.float32, CPU) is not None
    assert dropped == [slot.number] and pool.total_bytes() == 16384


def test_a_spilled_slot_vanishes_when_it_comes_back() -> None:
    pool, _, dropped = make_pool(4096)
    first = pool.take(1024, torch.float32, CPU)
    spilled = pool.take(1024, torch.float32, CPU, spill=True)
    assert first is not None and spilled is not None
    slot = slot_of(pool, spilled)
    pool.submit(slot, {1})
    pool.release(slot.number, 1)
    assert dropped == [slot.number] and pool.total_bytes() == 4096


def test_a_loan_from_before_an_abandon_cannot_be_given_back() -> None:
    pool, _, _ = make_pool(4096)
    old = pool.take(1024, torch.float32, CPU)
    pool.reset()
    new = pool.take(1024, torch.float32, CPU)
    assert old is not None and new is not None and old.data_ptr() == new.data_ptr()
    pool.give(old)
    assert pool.take(1024, torch.float32, CPU) is None  # `new` is still on loan


def test_relief_copies_what_is_owed_and_tells_the_owner() -> None:
    matching = Matching()
    told: list[str] = []
    data = torch.arange(8, dtype=torch.uint8)
    matching.contribute("unit", 0, 1, Contribution(data, lambda: told.append("ack"), near=True))
    matching.relieve(0)
    assert not told
    matching.relieve(1)
    assert told == ["ack"]
    data.zero_()
    assert matching.contributions["unit", 0][1].data is not None
    assert matching.contributions["unit", 0][1].data.tolist() == list(range(8))
    matching.relieve(1)
    assert told == ["ack"]


def test_waiting_threads_are_reused() -> None:
    waiters, gate = Waiters(), threading.Event()
    before = threading.active_count()
    done: list[int] = []
    for number in range(20):
        finished = threading.Event()
        waiters.run(lambda number=number, finished=finished: (done.append(number), finished.set()))  # type: ignore[misc]
        finished.wait(300)
        while waiters._crew._idle == 0 and threading.active_count() > before:
            pass
    assert done == list(range(20)) and threading.active_count() <= before + 2
    for _ in range(3):
        waiters.run(lambda: gate.wait(300) and None)
    gate.set()
    waiters.close()


def test_a_host_where_one_pair_cannot_connect_counts_as_many() -> None:
    hosts = [{"host": name, "error": ""} for name in ("a", "b", "a", "b", "a")]
    groups, _, problems = _agree(hosts, [{}] * 5)
    assert groups == [[0, 2, 4], [1, 3]] and not problems
    groups, _, problems = _agree(hosts, [{}, {}, {}, {"1": "refused"}, {}])
    assert groups == [[0, 2, 4], [1], [3]] and problems == ["rank 3 to rank 1: refused"]
    hosts[0]["error"] = "no memfd"
    groups, _, problems = _agree(hosts, [{}] * 5)
    assert groups == [[0], [1, 3], [2, 4]] and problems == ["rank 0: no memfd"]


def test_selection_refuses_what_it_cannot_give() -> None:
    alone = CommSpec(Mesh(1, 1))
    assert make_transport(None, CPU, alone).name == "one_process"
    with pytest.raises(ConfigError, match=r"init_distributed"):
        make_transport(None, CPU, replace(alone, name="gloo"))


def test_what_fails_in_another_transport_is_not_the_error_of_who_waits() -> None:
    served: list[str] = []

    class Broken:
        is_waiting = True
        descriptors = ()

        def serve(self) -> None:
            served.append("broken")
            raise PeerLostError("rank 7 has ended")

    class Fine(Broken):
        def serve(self) -> None:
            served.append("fine")

    serve([Broken(), Fine()])
    assert served == ["broken", "fine"]


def _part() -> Contribution:
    return Contribution(torch.zeros(4, dtype=torch.uint8))


@pytest.mark.parametrize("first", ["parts", "operation"])
def test_an_operation_ends_once_all_its_parts_are_here_whatever_came_first(first: str) -> None:
    matching, ended = Matching(), list[str]()
    if first == "parts":
        for rank in (0, 1):
            matching.contribute("unit", 0, rank, _part())
    pending = matching.begin("unit", 0, (0, 1), lambda parts: ended.append("unit"))
    if first == "operation":
        for rank in (0, 1):
            assert not matching.advance()
            assert matching.missing("unit", 0) == matching.awaited() == {0, 1} - {*range(rank)}
            matching.contribute("unit", 0, rank, _part())
    assert not (pending.done or ended) and matching.missing("unit", 0) == set()
    assert matching.advance() and pending.done
    assert not matching.advance() and ended == ["unit"] and not matching.contributions


def test_operations_end_oldest_first_and_one_that_raises_keeps_none_of_the_others() -> None:
    matching, ended = Matching(), list[str]()

    def fails(parts: object) -> None:
        raise ZeroDivisionError

    for name in ("a", "b", "c"):
        matching.begin(name, 0, (0,), fails if name == "b" else lambda _, n=name: ended.append(n))  # type: ignore[misc]
    for name in ("c", "b", "a"):
        matching.contribute(name, 0, 0, _part())
    with pytest.raises(ZeroDivisionError):
        matching.advance()
    assert ended == ["a"] and matching.advance() and ended == ["a", "c"]
