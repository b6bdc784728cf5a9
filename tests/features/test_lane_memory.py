"""On an accelerator the host runs ahead of the lanes: collectives are enqueued, not waited for, and
memory that a lane still uses is held until compute has joined it.

No device is here: the streams of these tests only say that they enqueue, and the process group's
collectives only copy. What is looked at is who keeps which tensor alive, and for how long.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import zeroshard as zs
from benchmarks.fake_world import fake_world
from tests.support import inside
from zeroshard import memory
from zeroshard.comm import native_transport, select
from zeroshard.comm.codec import Codec
from zeroshard.comm.levels import NodeSum
from zeroshard.comm.native_transport import NativeTransport
from zeroshard.comm.transport import CommSpec, ReduceRequest
from zeroshard.core.placement import Mesh
from zeroshard.core.work import Work
from zeroshard.errors import ConfigError, StateError
from zeroshard.runtime.streams import Streams
from zeroshard.runtime.weights import Weights
from zeroshard.sharding import api
from zeroshard.state.state import DeviceMemory, FullBuffer
from zeroshard.system.device import Device
from zeroshard.tier.store import Direct
from zeroshard.tier.stores import HostStore

WORLD = 8


class Enqueuing(Streams):
    """Streams on which the host enqueues and goes on."""

    enqueues = has_lanes = True


def _recorder(calls: list[bool], result: Any = None) -> Callable[..., Any]:
    def call(*tensors: Any, async_op: bool, **options: Any) -> Any:
        calls.append(async_op)
        return result

    return call


def test_collectives_of_an_accelerator_are_operations_of_the_current_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[bool] = []
    for name in ("group_all_gather", "group_reduce_scatter"):
        monkeypatch.setattr(native_transport, name, lambda *given: calls.append(given[-1].asyncOp))
    for name in ("broadcast", "reduce", "all_to_all", "all_to_all_single"):
        monkeypatch.setattr(dist, name, _recorder(calls))
    equal = tuple((4 * rank, 4 * rank + 4) for rank in range(WORLD))
    uneven = tuple((4 * rank, 4 * rank + 4) for rank in reversed(range(WORLD)))
    with fake_world(WORLD):
        for ordered in (False, True):
            spec = CommSpec(Mesh(1, WORLD), name="nccl", ordered=ordered)
            control: Any = select.make_control(None, spec, None)  # type: ignore[arg-type]
            assert dist.group.WORLD is not None
            transport = NativeTransport(dist.group.WORLD, torch.device("cuda"), spec, control)
            for ranges in (equal, uneven):
                full, own = torch.zeros(4 * WORLD), torch.zeros(4)
                works = [transport.all_gather("a", own, ranges, full)]
                request = ReduceRequest("a", ranges, torch.float32, None)
                works.append(transport.reduce(request, None, own, accumulate=False))
                assert all(work.done() for work in works)
                for work in works:
                    work.wait()
            transport.close()
    assert len(calls) > 2 * WORLD  # uneven shares take one per rank
    assert not any(calls)


def test_what_a_rank_has_enqueued_alone_is_aborted_or_the_reset_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cannot(backend: object) -> None:
        raise RuntimeError("Backend does not support abort")

    aborted: list[object] = []
    with fake_world(2):
        assert dist.group.WORLD is not None
        device, spec = torch.device("cuda"), CommSpec(Mesh(1, 2), name="nccl")
        backend = type(dist.group.WORLD._get_backend(device))
        control: Any = select.make_control(None, spec, None)  # type: ignore[arg-type]
        transport = NativeTransport(dist.group.WORLD, device, spec, control)
        transport.abandon()
        transport.all_gather("a", torch.zeros(1), ((0, 1), (1, 2)), torch.zeros(2))
        monkeypatch.setattr(control, "agree", lambda *_, value: [value, [0, [0, 1]]])
        monkeypatch.setattr(backend, "abort", cannot, raising=False)
        said = r"rank 0: 1; rank 1: 0\), which wait on the device for ever"
        with pytest.raises(StateError, match=said):
            transport.abandon()
        monkeypatch.setattr(backend, "abort", lambda one: aborted.append(one))
        transport.abandon()
        assert aborted == [dist.group.WORLD._get_backend(device)]
        assert transport._group is not dist.group.WORLD
        transport.close()


def test_shares_that_the_backend_takes_one_by_one_are_one_call_where_it_groups_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def share(operation: str) -> Callable[..., None]:
        def call(data: torch.Tensor, *, async_op: bool, **root: Any) -> None:
            owner = root.get("group_src", root.get("group_dst"))
            calls.append(f"{operation} of {data.numel()} at {owner}")

        return call

    @contextmanager
    def group_of_calls(group: dist.ProcessGroup, device: torch.device) -> Iterator[None]:
        calls.append("begin")
        yield
        calls.append("end")

    for name in ("broadcast", "reduce"):
        monkeypatch.setattr(dist, name, share(name))
    monkeypatch.setattr(dist.distributed_c10d, "_coalescing_manager", group_of_calls)
    by_columns = ((0, 4), (8, 12), (4, 8), (12, 12))
    with fake_world(4):
        assert dist.group.WORLD is not None
        device = torch.device("cuda")
        backend = type(dist.group.WORLD._get_backend(device))
        monkeypatch.setattr(backend, "supports_coalescing", True)
        spec = CommSpec(Mesh(1, 4), name="nccl")
        control: Any = select.make_control(None, spec, None)  # type: ignore[arg-type]
        transport = NativeTransport(dist.group.WORLD, device, spec, control)
        own = torch.zeros(4)
        transport.all_gather("a", own, by_columns, torch.zeros(12)).wait()
        request = ReduceRequest("a", by_columns, torch.float32)
        transport.reduce(request, None, own, accumulate=False).wait()
        transport.all_gather("b", own[:0], ((0, 0),) * 4, own[:0]).wait()
        transport.close()
    gathers, sums = (
        [f"{name} of {size} at {owner}" for owner in range(3)]
        for name, size in (("broadcast", 16), ("reduce", 4))  # bytes, and numbers
    )
    assert calls == ["begin", *gathers, "end", "begin", *sums, "end"]


def _train(
    monkeypatch: pytest.MonkeyPatch, policy: str, **comm: Any
) -> tuple[zs.Engine, nn.Module, torch.optim.Optimizer]:
    monkeypatch.setattr(api, "make_streams", lambda device: Enqueuing())
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = zs.Comm(transport="nccl", **comm)
    engine = zs.shard(model, optimizer, policy=policy, units=["0", "1", "2", "3"], comm=options)
    return engine, model, optimizer


def _is_alive(references: list[weakref.ref[torch.Tensor]]) -> bool:
    return references[-1]() is not None


def test_a_buffer_that_is_encoded_on_a_lane_is_held_until_its_reduce_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoded: list[weakref.ref[torch.Tensor]] = []
    encode = Codec.encode

    def spy(self: Codec, source: torch.Tensor, out: torch.Tensor) -> None:
        encoded.append(weakref.ref(source))
        encode(self, source, out)

    monkeypatch.setattr(Codec, "encode", spy)
    with fake_world(WORLD):
        engine, model, optimizer = _train(monkeypatch, "zero3", grad_codec="int8")
        model(torch.randn(2, 64)).square().mean().backward()
        assert inside.reducing(engine)
        assert _is_alive(encoded)
        optimizer.step()
        assert not _is_alive(encoded)


@pytest.mark.parametrize("policy", ["mics", "hfsdp"])
def test_the_sum_of_a_node_is_held_until_the_reduce_between_nodes_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    taken: list[weakref.ref[torch.Tensor]] = []
    between = NodeSum.between

    def spy(self: NodeSum, held: torch.Tensor | None) -> Work:
        taken.extend([] if held is None else [weakref.ref(held)])
        return between(self, held)

    monkeypatch.setattr(NodeSum, "between", spy)
    with fake_world(WORLD):
        engine, model, optimizer = _train(monkeypatch, policy, node_size=4)
        with engine.no_sync():
            model(torch.randn(2, 64)).square().mean().backward()
        model(torch.randn(2, 64)).square().mean().backward()
        assert inside.reducing(engine)
        assert _is_alive(taken)
        optimizer.step()
        assert not _is_alive(taken)


def test_the_buffer_of_the_next_unit_is_borrowed_while_a_reduce_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    under_way: list[int] = []
    borrow = NativeTransport.grad_buffer
    with fake_world(WORLD):
        engine, model, optimizer = _train(monkeypatch, "zero3")

        def spy(self: NativeTransport, *args: Any) -> torch.Tensor:
            under_way.append(len(inside.reducing(engine)))
            return borrow(self, *args)

        monkeypatch.setattr(NativeTransport, "grad_buffer", spy)
        for _ in range(2):  # the first pass gathers nothing ahead
            under_way.clear()
            model(torch.randn(2, 64)).square().mean().backward()
            optimizer.step()
    assert under_way == [0, 1, 1, 2]  # in the order of the units' backwards


class _Streams:
    """A device's module whose events are never over and note the streams that they are on."""

    def __init__(self) -> None:
        self.current = "compute"
        self.notes: list[str] = []
        self.Event = lambda: self

    def current_stream(self, device: torch.device) -> str:
        return f"{self.current} of {device}"

    def record(self, stream: str) -> None:
        self.notes.append(f"record on {stream}")

    def wait(self, stream: str) -> None:
        self.notes.append(f"{stream} waits")

    def query(self) -> bool:
        return False


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> _Streams:
    """The module of every device in this test, a CPU's included."""
    fake = _Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    monkeypatch.setattr(memory, "mark", memory.Mark)
    return fake


def test_marks_are_on_streams_of_their_own_device_whichever_is_current(streams: _Streams) -> None:
    one = memory.mark(torch.device("cuda", 3))
    memory.order_after(one)
    assert streams.notes == ["record on compute of cuda:3", "compute of cuda:3 waits"]


def test_a_pool_lends_what_a_lane_still_uses_only_where_its_limit_leaves_nothing_else(
    streams: _Streams,
) -> None:
    pool, device = memory.Pool(2 * 400), torch.device("cpu")
    first = pool.take(100, torch.float32, device)
    address = first.data_ptr()
    pool.give(first)
    second = pool.take(100, torch.float32, device)
    assert (second.data_ptr() == address, streams.notes) == (False, ["record on compute of cpu"])
    third = pool.take(100, torch.float32, device)
    assert (third.data_ptr() == address, streams.notes[1:]) == (True, ["compute of cpu waits"])


def test_a_buffer_that_a_pool_frees_goes_back_to_the_stream_it_came_from(streams: _Streams) -> None:
    pool, device = memory.Pool(400), torch.device("meta")
    first = pool.take(100, torch.float32, device)
    pool.give(first)
    streams.current = "reduce"
    pool.take(200, torch.float32, device)  # larger: the first one has to go
    assert streams.notes == ["record on compute of meta", "compute of meta waits"]


def test_a_pool_lends_the_same_tensor_where_the_same_is_asked_for() -> None:
    pool, device = memory.Pool(), torch.device("cpu")
    lent = []
    for numel, dtype in ((100, torch.float32), (100, torch.float32), (100, torch.bfloat16)):
        lent.append(pool.take(numel, dtype, device))
        assert (lent[-1].numel(), lent[-1].dtype) == (numel, dtype)
        pool.give(lent[-1])
    lent.append(pool.take(60, torch.bfloat16, device))
    assert lent[0] is lent[1] and lent[3].numel() == 60
    assert len({one.data_ptr() for one in lent}) == 1


def test_views_of_a_lent_buffer_are_made_once_and_end_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[torch.Tensor] = []
    views_of = FullBuffer.views_of

    def spy(self: FullBuffer, flat: torch.Tensor) -> list[torch.Tensor]:
        made.append(flat)
        return views_of(self, flat)

    with fake_world(WORLD):
        engine, model, optimizer = _train(monkeypatch, "zero3")
        for _ in range(4):
            model(torch.randn(2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            monkeypatch.setattr(FullBuffer, "views_of", spy)  # after the first step
        num_kept = inside.cut_buffers(engine)
        assert not made and 0 < max(num_kept) <= 3
        engine.close()  # the pool gives its buffers back
        assert not any(inside.cut_buffers(engine))


def test_where_streams_order_collectives_only_second_levels_are_asked_for_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_world(WORLD):
        engine, _, _ = _train(monkeypatch, "zero3")
        assert inside.levels(engine).progress == ()
        engine.close()
        engine, _, _ = _train(monkeypatch, "mics", node_size=4)
        assert inside.levels(engine).progress == (inside.levels(engine).serve,)
        engine.close()


def test_reset_returns_when_no_lane_uses_what_it_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    abandon = Weights.abandon
    monkeypatch.setattr(Enqueuing, "drain", lambda self: order.append("drain"), raising=False)
    monkeypatch.setattr(
        Weights, "abandon", lambda self: (order.append("release"), abandon(self))[1]
    )
    monkeypatch.setattr(api, "make_streams", lambda device: Enqueuing())
    engine = zs.shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    engine.reset()
    assert order == ["drain", "release"]


class _Copy:
    """A copy under way on a stream."""

    def __init__(self) -> None:
        self.waits: list[str] = []

    def wait(self) -> None:
        self.waits.append("stream")

    def synchronize(self) -> None:
        self.waits.append("host")

    def done(self) -> bool:
        return False


class _Enqueued:
    """A link whose copies are never over."""

    def __init__(self) -> None:
        self.copies: list[_Copy] = []

    def copy(self, out: torch.Tensor, source: torch.Tensor, direction: str) -> _Copy:
        self.copies.append(_Copy())
        return self.copies[-1]

    def close(self) -> None: ...


@pytest.mark.parametrize(("device", "waits"), [("cpu", "host"), ("meta", "stream")])
def test_the_host_writes_over_host_memory_only_when_a_copy_from_there_is_over(
    device: str, waits: str
) -> None:
    link: Any = _Enqueued()
    store = HostStore(torch.device("cpu"), link=link)
    storage = store.allocate("weight", 8, torch.float32)
    storage.read(0, 8, torch.empty(8, device="meta"))
    storage.write(0, 8, torch.zeros(8, device=device))
    assert link.copies[0].waits == [waits]


def test_a_model_on_another_device_than_the_current_one_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    Device.of("cuda:0").check_current()
    with pytest.raises(ConfigError, match=r"on cuda:3, and .* torch\.cuda\.set_device\(3\)"):
        Device.of("cuda:3").check_current()


def test_memory_that_nothing_uses_is_given_back_to_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emptied: list[str] = []
    module = type("module", (), {"empty_cache": lambda: emptied.append("device")})
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    for device in ("cpu", "meta"):
        DeviceMemory(torch.device(device), memory.Pages(), Direct()).release_idle()
    assert emptied == ["device"]
