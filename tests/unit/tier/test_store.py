"""One contract, every store: bytes that go in come out, in order, and at rest nobody sees them.

The disk is cut into units of 8 KiB and requests of 16 KiB here, so that small storages have ragged
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

from benchmarks.paced_link import Paced
from zeroshard.core.placement import Tier
from zeroshard.core.work import Work
from zeroshard.tier import disk
from zeroshard.tier.disk import DiskStore
from zeroshard.tier.store import Storage, Store
from zeroshard.tier.stores import HostStore
from zeroshard.tier.swapdir import SwapDirectory

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
        SwapDirectory(folder, rank=0),
        CPU,
        verify=kind.endswith("verify"),
        staging_bytes=4 << 20,
        link=link,
    )


@pytest.fixture(params=STORES)
def made(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.setattr(disk, "UNIT", 8192)
    monkeypatch.setattr(disk, "UNIT", 8192)
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


def read(storage: Storage, start: int, stop: int) -> torch.Tensor:
    out = torch.empty(stop - start, dtype=storage.dtype)
    storage.read(start, stop, out).wait()
    return out


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.float64]
)
@pytest.mark.parametrize("numel", [1, 3, 1024, 4096, 4097, NUMEL])
def test_what_is_written_is_read(store: Store, dtype: torch.dtype, numel: int) -> None:
    storage = store.allocate(f"blocks.3:{dtype} state", numel, dtype)
    values = pattern(numel, dtype)
    work = storage.write(0, numel, values)
    assert isinstance(work, Work)
    work.wait()
    work.wait()
    assert work.done()
    assert torch.equal(read(storage, 0, numel), values)
    assert torch.equal(
        read(storage, numel // 3, numel - numel // 5), values[numel // 3 : numel - numel // 5]
    )


def test_an_empty_storage_and_empty_ranges_move_nothing(store: Store) -> None:
    empty, storage = (
        store.allocate("nothing", 0, torch.float32),
        store.allocate("some", 10, torch.float32),
    )
    for each in (empty, storage):
        each.write(0, 0, torch.empty(0)).wait()
        each.read(0, 0, torch.empty(0)).wait()
        with each.borrowed(0, 0, write=True) as tensor:
            assert tensor.shape == (0,)
    storage.read(7, 7, torch.empty(0)).wait()
    assert store.account.live == 40


def test_several_storages_do_not_mix(store: Store) -> None:
    storages = [store.allocate("the same key", 5000 + index, torch.float32) for index in range(4)]
    sources = [
        pattern(storage.numel, storage.dtype, seed=index) for index, storage in enumerate(storages)
    ]
    for work in [
        storage.write(0, storage.numel, source)
        for storage, source in zip(storages, sources, strict=True)
    ]:
        work.wait()
    for storage, source in zip(storages, sources, strict=True):
        assert torch.equal(read(storage, 0, storage.numel), source)


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
    storage = store.allocate("state", NUMEL, torch.float32)
    storage.write(0, NUMEL, torch.zeros(NUMEL)).wait()
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
                under_way.append(storage.write(start, stop, source))
            elif verb == "read":
                out = aligned(stop - start, shift)
                expected.append((out, plain[start:stop].clone()))
                under_way.append(storage.read(start, stop, out))
            else:
                with storage.borrowed(start, stop, write=verb == "change") as lent:
                    assert torch.equal(lent, plain[start:stop])
                    if verb == "change":
                        lent.add_(1)
                        plain[start:stop] += 1
        for work in under_way:
            work.wait()
        for out, value in expected:
            assert torch.equal(out, value)
        assert torch.equal(read(storage, 0, NUMEL), plain)
    finally:
        store.close()


def aligned(numel: int, shift: int) -> torch.Tensor:
    """Memory that starts `shift` elements after a multiple of the block."""
    memory = torch.empty(numel + 1024 + shift)
    start = -memory.data_ptr() // 4 % 1024
    return memory[start + shift : start + shift + numel]


def test_many_small_neighbours_written_at_once_all_arrive(store: Store) -> None:
    storage = store.allocate("state", 9000, torch.float32)
    storage.write(0, 9000, torch.zeros(9000)).wait()
    values = pattern(9000, torch.float32)
    works = [
        storage.write(start, min(start + 37, 9000), values[start : start + 37])
        for start in range(0, 9000, 37)
    ]
    out = torch.empty(9000)
    works.append(storage.read(0, 9000, out))
    for work in works:
        work.wait()
    assert torch.equal(out, values)


def test_different_storages_may_be_used_by_different_threads(store: Store) -> None:
    def use(index: int) -> bool:
        storage = store.allocate(f"state {index}", 6000, torch.float32)
        right = True
        for seed in range(5):
            values = pattern(6000, torch.float32, seed)
            storage.write(0, 6000, values).wait()
            right = right and torch.equal(read(storage, 0, 6000), values)
        return right

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(use, range(6)))


def test_borrowed_lends_the_contents_and_takes_back_what_was_written(store: Store) -> None:
    storage = store.allocate("state", NUMEL, torch.float32)
    values = pattern(NUMEL, torch.float32)
    storage.write(0, NUMEL, values)  # not waited for: borrowed does
    with storage.borrowed(10, 5000, write=True) as tensor:
        assert tensor.device == CPU and torch.equal(tensor, values[10:5000])
        tensor.mul_(2)
    values[10:5000] *= 2
    assert torch.equal(read(storage, 0, NUMEL), values)
    with storage.borrowed(0, NUMEL, write=False) as tensor:
        assert torch.equal(tensor, values)
    assert torch.equal(read(storage, 0, NUMEL), values)


def test_an_exception_inside_borrowed_leaves_the_storage_usable_and_the_disk_unchanged(
    made: Made, store: Store
) -> None:
    storage = store.allocate("state", 3000, torch.float32)
    storage.write(0, 3000, torch.ones(3000)).wait()
    with suppress(KeyError), storage.borrowed(0, 3000, write=True) as tensor:
        tensor.fill_(7)
        raise KeyError
    assert tensor.isnan().all()
    # Host memory is lent in place: what was written to it before the exception stays. The disk
    # lends a copy, which is dropped.
    assert (read(storage, 0, 3000) == (1 if store.tier is Tier.DISK else 7)).all()
    storage.write(0, 3000, torch.zeros(3000)).wait()
    assert not read(storage, 0, 3000).any()


def test_a_lent_tensor_reads_as_nan_afterwards(store: Store) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        storage = store.allocate("state", 100, dtype)
        storage.write(0, 100, pattern(100, dtype) + 1).wait()
        with storage.borrowed(20, 90, write=True) as tensor:
            assert tensor.shape == (70,) and (tensor > 0).all()
        assert tensor.shape == (70,) and tensor.dtype is dtype
        assert tensor.isnan().all() if dtype.is_floating_point else not tensor.any()


# that link's worker keeps its last copy
@pytest.mark.parametrize("made", [kind for kind in STORES if "paced" not in kind], indirect=True)
def test_at_rest_no_tensor_holds_the_state(store: Store) -> None:
    def tensors() -> set[int]:
        gc.collect()
        return {id(found) for found in gc.get_objects() if issubclass(type(found), torch.Tensor)}

    def use(storage: Storage) -> None:
        storage.write(0, NUMEL, torch.ones(NUMEL)).wait()
        read(storage, 3, NUMEL)
        with storage.borrowed(1, 9000, write=True):
            pass

    storage = store.allocate("state", NUMEL, torch.float32)
    use(storage)
    before = tensors()
    use(storage)
    assert tensors() <= before and (read(storage, 0, NUMEL) == 1).all()


@pytest.mark.parametrize("made", [kind for kind in STORES if "paced" not in kind], indirect=True)
def test_a_work_that_is_kept_keeps_no_tensor_alive(store: Store) -> None:
    storage = store.allocate("state", NUMEL, torch.float32)
    source, out = torch.ones(NUMEL), torch.empty(NUMEL)
    works = [storage.write(0, NUMEL, source), storage.read(0, NUMEL, out)]
    for work in works:
        work.wait()
    refs = [weakref.ref(source), weakref.ref(out)]
    del source, out
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_the_account_counts_the_bytes_of_live_storages_and_their_peak(store: Store) -> None:
    first, second = (
        store.allocate("a", 1000, torch.float32),
        store.allocate("b", 500, torch.bfloat16),
    )
    assert (store.account.live, store.account.peak) == (5000, 5000)
    first.close()
    first.close()
    assert (store.account.live, store.account.peak) == (1000, 5000)
    store.allocate("c", 10, torch.int32)
    assert (store.account.live, store.account.peak) == (1040, 5000)
    second.close()
    store.close()
    assert (store.account.live, store.account.peak) == (0, 5000)


def test_closing_waits_for_what_is_under_way_and_is_idempotent(store: Store) -> None:
    storage, out = store.allocate("state", NUMEL, torch.float32), torch.empty(NUMEL)
    works = [storage.write(0, NUMEL, torch.ones(NUMEL)), storage.read(0, NUMEL, out)]
    storage.close()
    assert all(work.done() for work in works) and (out == 1).all()
    other = store.allocate("other", NUMEL, torch.float32)
    work = other.write(0, NUMEL, torch.ones(NUMEL))
    store.close()
    store.close()
    work.wait()
    assert store.account.live == 0


def test_a_storage_says_what_and_where_it_is(made: Made, store: Store) -> None:
    storage = store.allocate("blocks.3:fp32 exp_avg", 7, torch.bfloat16)
    tier = Tier(made.kind.partition("-")[0])
    assert (storage.key, storage.numel, storage.dtype, storage.tier, store.tier) == (
        "blocks.3:fp32 exp_avg",
        7,
        torch.bfloat16,
        tier,
        tier,
    )


def test_any_contiguous_tensor_will_do(store: Store) -> None:
    storage = store.allocate("state", 64, torch.float32)
    values = torch.arange(64.0)
    storage.write(0, 64, values.requires_grad_()).wait()
    strided = torch.full((1, 5), 3.0)[:, 0]
    assert strided.is_contiguous() and strided.stride() == (5,)
    storage.write(9, 10, strided).wait()
    storage.read(8, 9, strided).wait()
    assert strided.item() == 8 and read(storage, 0, 64).tolist() == [*range(9), 3, *range(10, 64)]


# that link's worker is a thread outside
@pytest.mark.parametrize("made", [kind for kind in STORES if "paced" not in kind], indirect=True)
def test_inference_mode_makes_no_difference(store: Store) -> None:
    storage = store.allocate("state", 64, torch.float32)
    storage.write(0, 64, torch.arange(64.0)).wait()
    with torch.inference_mode():
        assert read(storage, 3, 64).tolist() == list(range(3, 64))
        with storage.borrowed(0, 64, write=True) as tensor:
            tensor.add_(1)
    assert read(storage, 0, 64).tolist() == list(range(1, 65))
