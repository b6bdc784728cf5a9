"""One contract, every store: bytes that go in come out, in order, and at rest nobody sees them.

The disk is cut into units of 8 KiB and requests of 16 KiB here, so that small slabs have ragged
edges, several pieces and neighbours.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.paced_link import Paced
from zeroshard.core.placement import Tier
from zeroshard.core.work import Work
from zeroshard.tier import checksums, disk
from zeroshard.tier.disk import DiskStore
from zeroshard.tier.host import HostStore
from zeroshard.tier.store import Slab, Store

CPU = torch.device("cpu")
NUMEL = 20_000
STORES = [
    "host",
    "host-paced",
    "disk",
    "disk-verify",
    "disk-paced",
    "disk-buffered",
    "disk-buffered-verify",
]


@dataclass
class Made:
    """Stores of one kind, each new."""

    kind: str
    make: Callable[[], Store]


def _make(kind: str, folder: Path) -> Store:
    link = Paced(5e9) if kind.endswith("paced") else None
    if kind.startswith("host"):
        return HostStore(CPU, link=link)
    return DiskStore(
        folder, CPU, rank=0, verify=kind.endswith("verify"), staging_bytes=4 << 20, link=link
    )


@pytest.fixture(params=STORES)
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.setattr(disk, "UNIT", 8192)
    monkeypatch.setattr(checksums, "UNIT", 8192)
    monkeypatch.setattr(disk, "_CHUNK", 16384)
    if "buffered" in request.param:
        monkeypatch.setattr(disk, "accepts_direct", lambda *_: False)
    return Made(request.param, lambda: _make(request.param, tmp_path))


@pytest.fixture
def store(made: Made) -> Iterator[Store]:
    store = made.make()
    yield store
    store.close()


def pattern(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Numbers that differ from place to place and that no rounding makes equal to NaN."""
    raw = torch.randint(
        0, 100, (numel,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32
    )
    return raw.to(dtype)


def read(slab: Slab, start: int, stop: int) -> torch.Tensor:
    out = torch.empty(stop - start, dtype=slab.dtype)
    slab.read(start, stop, out).wait()
    return out


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.float64]
)
@pytest.mark.parametrize("numel", [1, 3, 1024, 4096, 4097, NUMEL])
def test_what_is_written_is_read(store: Store, dtype: torch.dtype, numel: int) -> None:
    slab = store.slab(f"blocks.3:{dtype} state", numel, dtype)
    values = pattern(numel, dtype)
    work = slab.write(0, numel, values)
    assert isinstance(work, Work)
    work.wait()
    work.wait()
    assert work.done()
    assert torch.equal(read(slab, 0, numel), values)
    assert torch.equal(
        read(slab, numel // 3, numel - numel // 5), values[numel // 3 : numel - numel // 5]
    )


def test_an_empty_slab_and_empty_ranges_move_nothing(store: Store) -> None:
    empty, slab = store.slab("nothing", 0, torch.float32), store.slab("some", 10, torch.float32)
    for each in (empty, slab):
        each.write(0, 0, torch.empty(0)).wait()
        each.read(0, 0, torch.empty(0)).wait()
        with each.borrowed(0, 0, write=True) as tensor:
            assert tensor.shape == (0,)
    slab.read(7, 7, torch.empty(0)).wait()
    assert store.account.live == 40


def test_several_slabs_do_not_mix(store: Store) -> None:
    slabs = [store.slab("the same key", 5000 + index, torch.float32) for index in range(4)]
    sources = [pattern(slab.numel, slab.dtype, seed=index) for index, slab in enumerate(slabs)]
    for work in [
        slab.write(0, slab.numel, source) for slab, source in zip(slabs, sources, strict=True)
    ]:
        work.wait()
    for slab, source in zip(slabs, sources, strict=True):
        assert torch.equal(read(slab, 0, slab.numel), source)


steps = st.lists(
    st.tuples(
        st.sampled_from(["read", "write", "write", "borrow", "change", "wait"]),
        st.integers(0, NUMEL),
        st.one_of(st.integers(0, 40), st.integers(0, NUMEL), st.sampled_from([1024, 2048, 4096])),
        st.integers(0, 3),  # how far the tensor is from the start of its memory: 0 is aligned
    ),
    max_size=25,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps)
def test_any_sequence_of_overlapping_reads_and_writes_is_as_on_a_plain_tensor(
    made: Made, steps: list[tuple[str, int, int, int]]
) -> None:
    store = made.make()
    slab = store.slab("state", NUMEL, torch.float32)
    slab.write(0, NUMEL, torch.zeros(NUMEL)).wait()
    plain = torch.zeros(NUMEL)
    under_way: list[Work] = []
    expected: list[tuple[torch.Tensor, torch.Tensor]] = []  # what was read, what it should be
    keep: list[torch.Tensor] = []
    try:
        for seed, (verb, start, length, shift) in enumerate(steps):
            start -= start % 1024 if shift == 0 else 0
            stop = min(NUMEL, start + length)
            if verb == "wait":
                for work in under_way:
                    work.wait()
                under_way.clear()
            elif verb == "write":
                source = aligned(stop - start, shift).copy_(
                    pattern(stop - start, torch.float32, seed)
                )
                keep.append(source)
                plain[start:stop] = source
                under_way.append(slab.write(start, stop, source))
            elif verb == "read":
                out = aligned(stop - start, shift)
                expected.append((out, plain[start:stop].clone()))
                under_way.append(slab.read(start, stop, out))
            else:
                with slab.borrowed(start, stop, write=verb == "change") as lent:
                    assert torch.equal(lent, plain[start:stop])
                    if verb == "change":
                        lent.add_(1)
                        plain[start:stop] += 1
        for work in under_way:
            work.wait()
        for out, value in expected:
            assert torch.equal(out, value)
        assert torch.equal(read(slab, 0, NUMEL), plain)
    finally:
        store.close()


def aligned(numel: int, shift: int) -> torch.Tensor:
    """Memory that starts `shift` elements after a multiple of the block."""
    memory = torch.empty(numel + 1024 + shift)
    start = -memory.data_ptr() // 4 % 1024
    return memory[start + shift : start + shift + numel]


def test_many_small_neighbours_written_at_once_all_arrive(store: Store) -> None:
    slab = store.slab("state", 9000, torch.float32)
    slab.write(0, 9000, torch.zeros(9000)).wait()
    values = pattern(9000, torch.float32)
    works = [
        slab.write(start, min(start + 37, 9000), values[start : start + 37])
        for start in range(0, 9000, 37)
    ]
    out = torch.empty(9000)
    works.append(slab.read(0, 9000, out))
    for work in works:
        work.wait()
    assert torch.equal(out, values)


def test_different_slabs_may_be_used_by_different_threads(store: Store) -> None:
    def use(index: int) -> bool:
        slab = store.slab(f"state {index}", 6000, torch.float32)
        right = True
        for seed in range(5):
            values = pattern(6000, torch.float32, seed)
            slab.write(0, 6000, values).wait()
            right = right and torch.equal(read(slab, 0, 6000), values)
        return right

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(use, range(6)))


def test_borrowed_lends_the_contents_and_takes_back_what_was_written(store: Store) -> None:
    slab = store.slab("state", NUMEL, torch.float32)
    values = pattern(NUMEL, torch.float32)
    slab.write(0, NUMEL, values)  # not waited for: borrowed does
    with slab.borrowed(10, 5000, write=True) as tensor:
        assert tensor.device == CPU and torch.equal(tensor, values[10:5000])
        tensor.mul_(2)
    values[10:5000] *= 2
    assert torch.equal(read(slab, 0, NUMEL), values)
    with slab.borrowed(0, NUMEL, write=False) as tensor:
        assert torch.equal(tensor, values)
    assert torch.equal(read(slab, 0, NUMEL), values)


def test_an_exception_inside_borrowed_leaves_the_slab_usable_and_the_disk_unchanged(
    made: Made, store: Store
) -> None:
    slab = store.slab("state", 3000, torch.float32)
    slab.write(0, 3000, torch.ones(3000)).wait()
    with suppress(KeyError), slab.borrowed(0, 3000, write=True) as tensor:
        tensor.fill_(7)
        raise KeyError
    assert tensor.isnan().all()
    # Host memory is lent in place: what was written to it before the exception stays. The disk
    # lends a copy, which is dropped.
    assert (read(slab, 0, 3000) == (7 if made.kind.startswith("host") else 1)).all()
    slab.write(0, 3000, torch.zeros(3000)).wait()
    assert not read(slab, 0, 3000).any()


def test_a_lent_tensor_reads_as_nan_afterwards(store: Store) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        slab = store.slab("state", 100, dtype)
        slab.write(0, 100, pattern(100, dtype) + 1).wait()
        with slab.borrowed(20, 90, write=True) as tensor:
            assert tensor.shape == (70,) and (tensor > 0).all()
        assert tensor.shape == (70,) and tensor.dtype is dtype
        assert tensor.isnan().all() if dtype.is_floating_point else not tensor.any()


# that link's worker keeps its last copy
@pytest.mark.parametrize("made", [kind for kind in STORES if "paced" not in kind], indirect=True)
def test_at_rest_no_tensor_holds_the_state(store: Store) -> None:
    def tensors() -> set[int]:
        gc.collect()
        return {id(found) for found in gc.get_objects() if issubclass(type(found), torch.Tensor)}

    def use(slab: Slab) -> None:
        slab.write(0, NUMEL, torch.ones(NUMEL)).wait()
        read(slab, 3, NUMEL)
        with slab.borrowed(1, 9000, write=True):
            pass

    slab = store.slab("state", NUMEL, torch.float32)
    use(slab)
    before = tensors()
    use(slab)
    assert tensors() <= before and (read(slab, 0, NUMEL) == 1).all()


@pytest.mark.parametrize("made", [kind for kind in STORES if "paced" not in kind], indirect=True)
def test_a_work_that_is_kept_keeps_no_tensor_alive(store: Store) -> None:
    slab = store.slab("state", NUMEL, torch.float32)
    source, out = torch.ones(NUMEL), torch.empty(NUMEL)
    works = [slab.write(0, NUMEL, source), slab.read(0, NUMEL, out)]
    for work in works:
        work.wait()
    refs = [weakref.ref(source), weakref.ref(out)]
    del source, out
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_the_account_counts_the_bytes_of_live_slabs_and_their_peak(store: Store) -> None:
    first, second = store.slab("a", 1000, torch.float32), store.slab("b", 500, torch.bfloat16)
    assert (store.account.live, store.account.peak) == (5000, 5000)
    first.close()
    first.close()
    assert (store.account.live, store.account.peak) == (1000, 5000)
    store.slab("c", 10, torch.int32)
    assert (store.account.live, store.account.peak) == (1040, 5000)
    second.close()
    store.close()
    assert (store.account.live, store.account.peak) == (0, 5000)


def test_closing_waits_for_what_is_under_way_and_is_idempotent(store: Store) -> None:
    slab, out = store.slab("state", NUMEL, torch.float32), torch.empty(NUMEL)
    works = [slab.write(0, NUMEL, torch.ones(NUMEL)), slab.read(0, NUMEL, out)]
    slab.close()
    assert all(work.done() for work in works) and (out == 1).all()
    other = store.slab("other", NUMEL, torch.float32)
    work = other.write(0, NUMEL, torch.ones(NUMEL))
    store.close()
    store.close()
    work.wait()
    assert store.account.live == 0


def test_a_slab_says_what_and_where_it_is(made: Made, store: Store) -> None:
    slab = store.slab("blocks.3:fp32 exp_avg", 7, torch.bfloat16)
    tier = Tier.HOST if made.kind.startswith("host") else Tier.DISK
    assert (slab.key, slab.numel, slab.dtype, slab.tier, store.tier) == (
        "blocks.3:fp32 exp_avg",
        7,
        torch.bfloat16,
        tier,
        tier,
    )


def test_any_contiguous_tensor_will_do(store: Store) -> None:
    slab = store.slab("state", 64, torch.float32)
    values = torch.arange(64.0)
    slab.write(0, 64, values.requires_grad_()).wait()
    strided = torch.full((1, 5), 3.0)[:, 0]
    assert strided.is_contiguous() and strided.stride() == (5,)
    slab.write(9, 10, strided).wait()
    slab.read(8, 9, strided).wait()
    assert strided.item() == 8 and read(slab, 0, 64).tolist() == [*range(9), 3, *range(10, 64)]


# that link's worker is a thread outside
@pytest.mark.parametrize("made", [kind for kind in STORES if "paced" not in kind], indirect=True)
def test_inference_mode_makes_no_difference(store: Store) -> None:
    slab = store.slab("state", 64, torch.float32)
    slab.write(0, 64, torch.arange(64.0)).wait()
    with torch.inference_mode():
        assert read(slab, 3, 64).tolist() == list(range(3, 64))
        with slab.borrowed(0, 64, write=True) as tensor:
            tensor.add_(1)
    assert read(slab, 0, 64).tolist() == list(range(1, 65))
