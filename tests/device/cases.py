"""What ``test_zsim.py`` calls on a rank of the device's pool: importing this loads the device."""

from __future__ import annotations

import copy
import io
import pickle
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import tests.device.zsim as zsim
from tests.device.meetings import meeting
from tests.device.zsim import module as device
from zeroshard.comm.select import make_levels
from zeroshard.comm.transport import CommSpec, ReduceRequest
from zeroshard.core.placement import Mesh

BUSY = 20_000_000  # cycles of `_sleep`: 10 ms
N = 1000
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# ------------------------------------------------------------------------- races


def join(schedule: str, seed: int, waits: bool) -> float:
    """8 where the compute stream waits for the side stream, else perhaps 1."""
    zsim.set_schedule(schedule, seed)
    side = device.Stream()
    value = torch.zeros(N, device="zsim")
    side.wait_stream(device.current_stream())
    with device.stream(side):
        device._sleep(BUSY)
        value.fill_(7.0)
        done = side.record_event()
    if waits:
        done.wait()
    return (value + 1).mean().item()


def dropped(schedule: str, seed: int, keeps: str) -> float:
    """3 where the block that a side stream reads is kept from its next owner, else perhaps 99."""
    zsim.set_schedule(schedule, seed)
    side = device.Stream()
    value = torch.full((N,), 3.0, device="zsim")
    out = torch.zeros(N, device="zsim")
    side.wait_stream(device.current_stream())
    with device.stream(side):
        device._sleep(BUSY)
        out.copy_(value)
        done = side.record_event()
    if keeps == "record_stream":
        value.record_stream(side)
    held = value if keeps == "reference" else None
    del value
    torch.full((N,), 99.0, device="zsim")
    done.wait()
    del held
    return out.mean().item()


def copied(schedule: str, seed: int, waits: bool) -> float:
    """5 where the host waits before it reads a pinned copy, else NaN."""
    zsim.set_schedule(schedule, seed)
    value = torch.zeros(N, device="zsim")
    device._sleep(BUSY)
    value.fill_(5.0)
    host = torch.empty(N, pin_memory=True)
    host.copy_(value, non_blocking=True)
    if waits:
        device.synchronize()
    return host.mean().item()


def pinned_again(schedule: str, seed: int) -> float:
    """3: pinned memory is not lent again while a lane still reads it."""
    zsim.set_schedule(schedule, seed)
    device._sleep(BUSY)
    host = torch.full((N,), 3.0).pin_memory()
    value = host.to("zsim", non_blocking=True)
    del host
    torch.full((N,), 99.0).pin_memory()
    return value.mean().item()


def order_of_random(seed: int) -> list[bool]:
    """Return the order in which `random` runs two streams: whether each task is the default's."""
    zsim.set_schedule("random", seed)
    side = device.Stream()
    zsim.take_log(True)
    for _ in range(8):
        torch.zeros(4, device="zsim")
        with device.stream(side):
            torch.ones(4, device="zsim")
        side.query()
        side.synchronize()
    device.synchronize()
    return [entry.startswith("0.0:") for entry in zsim.take_log(False)]


def delayed(whole_device: bool) -> tuple[float, float]:
    """Return the seconds of four tasks of a delayed stream, and of another stream's."""
    zsim.set_schedule("threads")
    slow, fast = device.Stream(), device.Stream()
    device.synchronize()
    zsim.set_delay(torch.device("zsim", 0) if whole_device else slow, 20_000)
    seconds = []
    for stream in (slow, fast):
        value = torch.zeros(4)
        begin = time.perf_counter()
        with device.stream(stream):
            for _ in range(4):
                value.to("zsim", non_blocking=True)
        stream.synchronize()
        seconds.append(time.perf_counter() - begin)
    zsim.set_delay(torch.device("zsim", 0), 0)
    return seconds[0], seconds[1]


# ------------------------------------------------------------------------ memory


def memory_is_reused_in_stream_order() -> None:
    zsim.set_schedule("fifo")
    waits = zsim.host_waits()
    first = torch.empty(N, device="zsim")
    where = first.data_ptr()
    del first
    with device.stream(device.Stream()):
        other = torch.empty(N, device="zsim").data_ptr()
    assert torch.empty(N, device="zsim").data_ptr() == where != other
    assert zsim.host_waits() == waits
    assert torch.empty(N, device="zsim").isnan().all().item()


def statistics() -> None:
    device.empty_cache()
    device.reset_peak_memory_stats()
    before, reserved = device.memory_allocated(), device.memory_reserved()
    held = torch.empty(1000, device="zsim")  # 4000 bytes, in blocks of 512
    assert device.memory_allocated() - before == 4096
    del held
    assert device.memory_allocated() == before
    assert device.max_memory_allocated() == before + 4096
    assert device.memory_reserved() == reserved + 4096
    assert device.memory_stats()["allocated_bytes.all.peak"] == before + 4096
    device.empty_cache()
    assert device.memory_reserved() == reserved


def limit() -> None:
    before = device.mem_get_info(1)[1]
    zsim.set_memory_limit(1 << 20, 1)
    assert device.mem_get_info(1)[1] == 1 << 20
    held = torch.empty(1 << 19, dtype=torch.uint8, device="zsim:1")
    with device.stream(device.Stream(1)):  # cached on another stream, so given up and lent
        del held
        torch.empty(3 << 18, dtype=torch.uint8, device="zsim:1")
    try:
        torch.empty(2 << 20, dtype=torch.uint8, device="zsim:1")
    except torch.OutOfMemoryError as error:
        assert "Tried to allocate 2097152 bytes on zsim:1" in str(error)
    else:
        raise AssertionError("no error")
    finally:
        zsim.set_memory_limit(before, 1)


def storages_and_files() -> None:
    value = torch.randn(4, 4, device="zsim")
    file = io.BytesIO()
    torch.save({"value": value, "view": value[1:]}, file)
    for target in (None, "cpu", "zsim:1"):
        file.seek(0)
        loaded = torch.load(file, map_location=target)
        assert loaded["value"].device == torch.device(target or "zsim:0")
        assert loaded["value"].tolist() == value.tolist()
        view, whole = loaded["view"].untyped_storage(), loaded["value"].untyped_storage()
        assert view.data_ptr() == whole.data_ptr()
    for copied in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), value.cpu()):
        assert copied.tolist() == value.tolist()
    storage = value.untyped_storage()
    again = torch.empty(0, device="zsim").set_(storage.clone())  # type: ignore[no-untyped-call]
    assert again.tolist() == value.flatten().tolist()
    storage.resize_(0)
    assert storage.nbytes() == 0
    assert torch.ones(4).untyped_storage().to(device="zsim").device.type == "zsim"


def host_memory() -> None:
    pinned, plain = torch.ones(4).pin_memory(), torch.ones(1024)
    assert pinned.is_pinned() and not plain.is_pinned()
    zsim.register_host(plain.data_ptr(), 4096)
    assert plain.is_pinned()
    zsim.unregister_host(plain.data_ptr())
    assert not plain.is_pinned()


def two_devices() -> None:
    first = torch.arange(3.0, device="zsim:0")
    second = first.to("zsim:1") + 1
    assert second.device.index == 1
    assert second.to("zsim:0").tolist() == [1, 2, 3]
    for mixed in (second, torch.ones(3)):
        try:
            first + mixed
        except RuntimeError as error:
            assert "same device" in str(error)
        else:
            raise AssertionError("no error")
    with device.device(1):
        assert torch.ones(1, device="zsim").device.index == 1
    uuids = {str(device.get_device_properties(index).uuid) for index in range(2)}
    assert len(uuids) == device.device_count() == 2


def random_numbers() -> None:
    torch.manual_seed(3)
    first, state, host = torch.randn(64, device="zsim"), device.get_rng_state(), torch.rand(4)
    torch.manual_seed(3)
    _same(first, torch.randn(64, device="zsim"))
    assert torch.equal(host, torch.rand(4)), "the device took the host's random numbers"
    ones = torch.ones(64, device="zsim")
    wanted = F.dropout(ones)
    device.set_rng_state_all([state, *device.get_rng_state_all()[1:]])
    _same(wanted, F.dropout(ones))
    assert 0 < int(wanted.count_nonzero()) < 64

    linear = nn.Linear(8, 8)
    model = nn.Sequential(linear, nn.Dropout()).to("zsim")
    grads: list[Tensor] = []
    for call in (model, partial(checkpoint, model, use_reentrant=False)):
        torch.manual_seed(4)
        model.zero_grad()
        torch.autograd.backward(call(torch.ones(4, 8, device="zsim")).sum())
        assert linear.weight.grad is not None
        grads.append(linear.weight.grad.clone())
    _same(*grads)


def a_failed_kernel_is_raised_at_the_next_wait() -> None:
    torch.zeros(3, device="zsim").index_select(0, torch.tensor([5], device="zsim"))
    try:
        device.synchronize()
    except RuntimeError as error:
        assert "aten::index_select: index out of range" in str(error)
    else:
        raise AssertionError("no error")


# --------------------------------------------------------------------- operators


def _same(a: Tensor, b: Tensor) -> None:
    assert torch.equal(a.detach().cpu(), b.detach().cpu()), (a, b)


def _train(make: Callable[[], nn.Module], shape: Sequence[int], dtype: torch.dtype) -> None:
    """Compare results and gradients with the CPU's, bit for bit."""
    torch.manual_seed(0)
    ours = make().to(dtype)
    theirs = copy.deepcopy(ours).to("zsim")
    x = torch.randn(shape).to(dtype)
    y = x.to("zsim").requires_grad_()
    a, b = ours(x.requires_grad_()), theirs(y)
    _same(a, b)
    a.float().pow(2).sum().backward()
    b.float().pow(2).sum().backward()
    assert x.grad is not None and y.grad is not None
    _same(x.grad, y.grad)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        _same(p.grad, q.grad)


def _convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, stride=2, bias=False),
        nn.GroupNorm(2, 4),
        nn.ConvTranspose2d(4, 2, 3),
    )


def _dense() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16),
        nn.LayerNorm(16),
        nn.GELU(),
        nn.Linear(16, 16),
        nn.SiLU(),
        nn.Linear(16, 8),
        nn.Mish(),
    )


def convolution() -> None:
    for dtype in DTYPES:
        _train(_convolutions, (2, 3, 8, 8), dtype)


def dense() -> None:
    for dtype in DTYPES:
        _train(_dense, (4, 8), dtype)


def attention() -> None:
    for dtype in DTYPES:
        q = torch.randn(2, 2, 8, 16).to(dtype)
        z = q.to("zsim").requires_grad_()
        q.requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):
            a = F.scaled_dot_product_attention(q, q, q, is_causal=True)
        b = F.scaled_dot_product_attention(z, z, z, is_causal=True)
        _same(a, b)
        torch.autograd.backward([a.float().sum(), b.float().sum()])
        assert q.grad is not None and z.grad is not None
        _same(q.grad, z.grad)


def autocast() -> None:
    model, target = _dense().to("zsim"), torch.zeros(4, dtype=torch.long, device="zsim")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("zsim", dtype=dtype):
            y = model(torch.randn(4, 8, device="zsim"))
            assert y.dtype == dtype
            wide = (y.softmax(-1), F.cross_entropy(y, target), y.norm(), y.sum(), y.exp())
            assert {one.dtype for one in wide} == {torch.float32}
            assert torch.addcmul(y.float(), y, y).dtype == torch.float32
            convolved = _convolutions().to("zsim")(torch.randn(2, 3, 8, 8, device="zsim"))
            assert convolved.dtype == dtype
        (wide[1] + convolved.float().sum()).backward()
    device.synchronize()


def optimizers() -> None:
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        for options in ({"fused": True}, {"foreach": True}, {}):
            models = nn.Linear(8, 8), nn.Linear(8, 8).to("zsim")
            models[1].load_state_dict(models[0].state_dict())
            for model, where in zip(models, ("cpu", "zsim"), strict=True):
                optimizer = kind(model.parameters(), lr=1e-2, **options)  # type: ignore[arg-type]
                for step in range(3):
                    model(torch.full((4, 8), 1.0 + step, device=where)).sum().backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
            _same(models[0].weight, models[1].weight)


def shapes() -> None:
    """Compare calls that differ in one thing that shapes depend on: what the device remembers of
    one call says nothing of another.
    """
    aten = torch.ops.aten
    flip, var, bucketize, index = aten.flip, aten.var_mean, aten.bucketize, aten.index
    calls: dict[str, Callable[[Callable[..., Tensor]], Sequence[Any]]] = {
        "sizes": lambda on: [flip(on(2, 3), [0]), flip(on(3, 2), [0]), flip(on(6), [0])],
        "strides": lambda on: [flip(on(3, 4).t(), [0]), flip(on(4, 3), [0])],
        "dtype": lambda on: [flip(on(3), [0]), flip(on(3).half(), [0]), flip(on(3).long(), [0])],
        "dims": lambda on: [var(on(2, 3), dims)[0] for dims in ([0], [1], [0, 1])],
        "flags": lambda on: [var(on(2, 3), [0], keepdim=keep)[1] for keep in (True, False)],
        "results": lambda on: [bucketize(on(3), on(2), out_int32=small) for small in (True, False)],
        "ends": lambda on: [torch.arange(1, end, out=on(0)) for end in (3, 4, 3.5, 4.5)],
        "parts": lambda on: [torch.cat([on(2), on(rows)], out=on(0)) for rows in (1, 2)],
        "places": lambda on: [index(on(4, 5), at, out=on(0)) for at in _places(on)],
        "out": lambda on: [torch.mm(on(2, 3), on(3, 4), out=out) for out in (on(0), on(2, 4))],
        "masks": lambda on: [
            _norm_backward(on, [True, weight, weight]) for weight in (True, False)
        ],
    }
    for name in [*calls, *reversed(calls)]:
        ours, theirs = (
            calls[name](lambda *size, device=where: torch.ones(size, device=device))
            for where in ("zsim", "cpu")
        )
        for a, b in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
            if b is None or a is None:
                assert a is b, name
                continue
            seen, wanted = ((one.dtype, one.shape, one.stride()) for one in (a, b))
            assert seen == wanted, (name, seen, wanted)
            _same(a, b)
        device.synchronize()


def _places(on: Callable[..., Tensor]) -> list[list[Tensor | None]]:
    few, more = on(2).long(), on(3).long()
    return [[few], [None, few], [few, None], [few, few], [more], [None, more]]


def _norm_backward(on: Callable[..., Tensor], mask: list[bool]) -> Any:
    x, mean = on(2, 3), on(2, 1)
    backward = torch.ops.aten.native_layer_norm_backward
    return backward(x, x, [3], mean, mean, on(3), on(3), mask)


def scaler() -> None:
    """Skip the step whose gradients overflow."""
    model = nn.Linear(8, 8).to("zsim")
    for fused in (True, False):
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        scaler = torch.amp.GradScaler("zsim", init_scale=2.0)
        for scale in (1.0, torch.inf):
            before = model.weight.detach().clone()
            scaler.scale(model(torch.ones(4, 8, device="zsim")).sum() * scale).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert torch.equal(before, model.weight) == (scale != 1.0)
        assert scaler.get_scale() == 1.0


def operators_that_read() -> dict[str, int]:
    """Return the operators that made the host wait."""
    before = zsim.synchronous_operators()
    x = torch.arange(6.0, device="zsim")
    assert x[x > 2].shape == (3,)
    assert x.nonzero().shape == (5, 1)
    x[x > 3] = 0
    assert x[torch.tensor([0, 3])].tolist() == [0, 3]
    assert x.sum().item() == 6
    table = nn.Embedding(10, 4, device="zsim")
    table(torch.tensor([1, 2, 2], device="zsim")).sum().backward()
    x.scatter_(0, torch.tensor([1], device="zsim"), 1.0)
    now = zsim.synchronous_operators()
    return {name: now[name] - before.get(name, 0) for name in now}


def waits_of_a_step() -> dict[str, int]:
    """Return what the host waited for in forward, backward and a fused step."""
    zsim.set_schedule("fifo")
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).to("zsim")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.randn(2, 4, 16, device="zsim")
    device.synchronize()
    before = zsim.host_waits() | zsim.synchronous_operators()
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    now = zsim.host_waits() | zsim.synchronous_operators()
    device.synchronize()
    return {name: now[name] - before.get(name, 0) for name in now if now[name] != before.get(name)}


# ------------------------------------------------------------------- collectives


def collectives(rank: int, size: int) -> None:
    """Compare zccl's results with gloo's, for tensors of the host, in every schedule."""
    device.set_device(rank)
    assert dist.get_default_backend_for_device("zsim") == "zccl"
    gloo = dist.new_group(backend="gloo")
    wanted = _results(rank, size, torch.device("cpu"), gloo, is_async=False)
    for schedule in zsim.SCHEDULES:
        zsim.set_schedule(schedule, 1)
        for is_async in (False, True):
            found = _results(rank, size, torch.device("zsim", rank), None, is_async=is_async)
            for name, value in wanted.items():
                assert torch.equal(value, found[name]), (schedule, is_async, name)
        mean = torch.full((4,), 1.0 + rank, device="zsim")
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        assert mean.tolist() == [1.5] * 4
        names: list[int | None] = [None] * size
        dist.all_gather_object(names, rank)
        assert names == [0, 1]
    dist.destroy_process_group(gloo)
    device.set_device(0)


def calls_meet_by_their_order_alone(rank: int, size: int) -> None:
    """As over NCCL: those of one size mix their numbers without a word, others wait for ever."""
    zsim.set_schedule("fifo")
    ones, twos = torch.ones(4, device="zsim"), torch.full((4,), 2.0, device="zsim")
    outs = [torch.empty(8, device="zsim") for _ in range(2)]
    for out, own in zip(outs, (ones, twos) if rank == 0 else (twos, ones), strict=True):
        dist.all_gather_into_tensor(out, own)
    assert outs[0].tolist() == [1.0] * 4 + [2.0] * 4  # neither is all ones
    own = ones if rank == 0 else twos.bfloat16().repeat(2)  # of as many bytes
    out = torch.empty(8 if rank == 0 else 16, dtype=own.dtype, device="zsim")
    dist.all_gather_into_tensor(out, own)
    assert out.cpu().view(torch.uint8)[16:].view(torch.bfloat16).tolist() == [2.0] * 8
    for meant, other in (
        (partial(dist.all_reduce, ones), partial(dist.broadcast, ones, 0)),
        (partial(dist.broadcast, ones, 0), partial(dist.broadcast, ones, 1)),
        (partial(dist.all_reduce, ones), partial(dist.all_reduce, ones[:2])),
    ):
        (meant if rank == 0 else other)()
        try:
            zsim.set_schedule("fifo")  # waits for all lanes
            device.synchronize()
        except RuntimeError as error:
            assert "ranks wait for ever in collectives that do not meet:" in str(error)
        else:
            raise AssertionError("they have met")


def only_dtypes_of_nccl_are_taken(rank: int, size: int) -> None:
    """Others are refused at the call, on the host."""
    for dtype in (torch.int16, torch.uint16, torch.float8_e4m3fn, torch.complex64):
        given = torch.zeros(64, dtype=torch.uint8).view(dtype)
        group = dist.group.WORLD
        assert group is not None
        try:
            group.broadcast(given.to("zsim"), 0)
        except RuntimeError as error:
            assert "zccl: NCCL has no type for " in str(error), error
        else:
            raise AssertionError(dtype)


def a_refused_group_of_calls_ends(rank: int, size: int) -> None:
    """Shares that are not equal are sums that start together; one is refused, in the name of its
    unit, and what follows is not collected with it.
    """
    zsim.set_schedule("fifo")
    ranges, where = ((0, 64), (64, 256)), torch.device("zsim:0")
    flat = make_levels(None, where, CommSpec(Mesh.of(size), name="nccl")).flat
    for _ in range(2):
        buffer = flat.grad_buffer("a", 256, torch.int16, where).fill_(1)
        try:
            request = ReduceRequest("layer.7", ranges, torch.int16)
            flat.reduce(
                request, buffer, torch.zeros(ranges[rank][1], device=where), accumulate=False
            )
        except RuntimeError as error:
            assert "no type for Short" in str(error), error
            assert error.__notes__ == ["in the reduce of layer.7"]
        else:
            raise AssertionError("it was taken")
    for cut in ((0, 128), (128, 256)), ranges:  # one call, and a group of calls again
        out, (start, stop) = torch.zeros(256, device=where), cut[rank]
        flat.all_gather("a", torch.ones(stop - start, device=where), cut, out).wait()
        assert out.sum().item() == 256, cut
    flat.close()


def collectives_in_another_order_are_seen(rank: int, size: int) -> None:
    """Of one size: the ranks go on, with wrong numbers."""
    zsim.set_schedule("fifo")
    ones = torch.ones(4, device="zsim")
    try:
        with meeting(size):
            for key in ("ab", "ba")[rank]:
                zsim.name_collectives(key)
                dist.all_reduce(ones)
            zsim.name_collectives("")
    except AssertionError as error:
        told = "rank 0: allreduce 16 of Float on compute in group 0 (a)"
        assert "calls that meet are not the same" in str(error) and told in str(error), error
    else:
        raise AssertionError("nobody has seen it")


def the_host_waits_for_a_peer(rank: int, size: int) -> None:
    """The first rank waits for a message that the other sends once it has read a sum of both."""
    message = torch.zeros(1)
    for schedule in zsim.SCHEDULES:
        zsim.set_schedule(schedule, 1)
        value = torch.ones(4, device="zsim")
        dist.all_reduce(value)
        if rank == 0:
            dist.recv(message, 1)
        assert value.sum().item() == 4 * size
        if rank == 1:
            dist.send(message, 0)


def _results(
    rank: int, size: int, where: torch.device, group: dist.ProcessGroup | None, *, is_async: bool
) -> dict[str, Tensor]:
    def given(numel: int = 4, dtype: torch.dtype = torch.float32) -> Tensor:
        return ((torch.arange(numel) + 1.0) * (rank + 1)).to(dtype).to(where)

    def empty(numel: int = 4) -> Tensor:
        return torch.empty(numel, device=where)

    def run(call: Callable[..., dist.Work | None], *args: object) -> None:
        work = call(*args, group=group, async_op=is_async)
        if is_async:
            assert work is not None
            work.wait()

    out: dict[str, Tensor] = {}
    for dtype in DTYPES[:2]:
        run(dist.all_reduce, value := given(dtype=dtype))
        out[f"all_reduce {dtype}"] = value
    run(dist.broadcast, value := given(), 1)
    out["broadcast"] = value
    run(dist.all_gather_into_tensor, value := empty(8), given())
    out["all_gather_into_tensor"] = value
    run(dist.all_gather, values := [empty() for _ in range(size)], given())
    out["all_gather"] = torch.cat(values)
    run(dist.reduce_scatter_tensor, value := empty(), given(8))
    out["reduce_scatter_tensor"] = value
    run(dist.all_to_all_single, value := empty(), given())
    out["all_to_all_single"] = value
    run(dist.scatter, value := empty(), [given(), given()] if rank == 0 else None, 0)
    out["scatter"] = value
    run(dist.gather, given(), rows := [empty(), empty()] if rank == 0 else None, 0)
    out["gather"] = torch.cat(rows or [empty(0)])

    swapped, peer = empty(), 1 - rank
    pair = [dist.P2POp(dist.isend, given(), peer, group)]
    pair.append(dist.P2POp(dist.irecv, swapped, peer, group))
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    out["batch_isend_irecv"] = swapped
    value = given()
    (dist.send if rank == 0 else dist.recv)(value, peer, group)
    out["send, recv"] = value
    dist.barrier(group)
    return {name: value.cpu() for name, value in out.items()}
