"""Bytes: at rest as the formula says, at peak within three units, and gone when the model is."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.support import inside
from tests.support.harness import on_ranks
from tests.support.training import Net, batch, make_model, make_sharded, take_steps, two_groups
from zeroshard.core.layout import ALIGN
from zeroshard.core.placement import Mesh
from zeroshard.core.policy import row as policy_row
from zeroshard.core.precision import PRECISIONS
from zeroshard.memory import MemoryCounter, Trimmer, heap_bytes


def _live_storages() -> dict[int, int]:
    """Return every live tensor storage by address with its bytes, found without the engine's
    help.
    """
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and type(thing).__name__ not in (
            "SealedGrad",
            "FakeTensor",
            "FunctionalTensor",
        ):
            if thing.layout is not torch.strided:  # those of other tests
                continue
            storage = thing.untyped_storage()
            if storage.nbytes() > 1024:
                found[storage.data_ptr()] = storage.nbytes()
    return found


@pytest.mark.parametrize(
    ("world", "precision"),
    [
        (2, "bf16"),
        (4, "fp32"),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in ((2, "fp32"), (4, "bf16"))),
    ],
)
@pytest.mark.parametrize("row", ["ddp", "zero1", "zero2", "zero3", "zero3-keep"])
@on_ranks()
def test_bytes_at_rest_are_the_formulas_within_padding(
    rank: int, world: int, row: str, precision: str
) -> None:
    gc.collect()
    before = _live_storages()
    model = make_model(width=48, layers=4)
    numel = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = zs.shard(
        model, optimizer, policy=row, precision=precision, comm=zs.Comm(transport="gloo")
    )
    take_steps(rank, 2, model, optimizer)
    with torch.no_grad():  # finishes the publish of replicated rows
        model(batch(rank, 0)[0])
    gc.collect()
    reported = engine.memory()
    live = sum(size for address, size in _live_storages().items() if address not in before)
    with engine.no_sync():
        model(*batch(rank, 9)).backward()
    between = engine.memory()
    optimizer.zero_grad()
    num_slots, num_units = len(list(model.parameters())), len(engine.units)
    engine.close()
    policy, mesh = policy_row(row), Mesh(1, world)
    seen = {
        "numel": numel,
        "report": reported,
        "between": between,
        "live": live,
        "slots": num_slots,
        "units": num_units,
    }
    for point, report in (
        ("after_step", seen["report"]),
        ("between_micro_batches", seen["between"]),
    ):
        formula = policy.bytes_at_rest(
            point, numel=seen["numel"], mesh=mesh, precision=PRECISIONS[precision]
        )
        padding = ALIGN * (seen["slots"] + world * seen["units"])  # elements per state
        for state, width in (("weight", 4), ("master", 4), ("grad", 4), ("optimizer", 8)):
            excess = report.at_rest[state] - getattr(formula, state)
            slack = padding * width
            assert -slack <= excess <= slack, (point, state, excess, slack)
    assert seen["report"].at_rest["grad"] == 0
    # gradient buffers between steps: three of the largest unit, which is under a quarter here
    pooled = 3 * 4 * seen["numel"] / 4
    assert seen["live"] <= seen["report"].total + pooled, "something else is alive"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("row", ["ddp", "zero2", "zero3-keep"])
@on_ranks(2)
def test_close_gives_memory_back_before_the_collector_comes(
    rank: int, row: str, precision: str
) -> None:
    gc.collect()
    before = _live_storages()
    model, optimizer, engine = make_sharded(
        row, "gloo", model=make_model(width=48, layers=4), precision=precision
    )
    take_steps(rank, 2, model, optimizer)
    gc.disable()  # the engine is in cycles
    try:
        engine.close()
        left = _live_storages()
    finally:
        gc.enable()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    left = {at: size for at, size in left.items() if at not in own | before.keys()}
    assert not left


@pytest.mark.parametrize("row", ["zero3"])
@on_ranks(2)
def test_full_weights_and_gradients_stay_within_three_units(rank: int, row: str) -> None:
    """Sample live full weights and gradient buffers at every hook of every module."""
    model, optimizer, engine = make_sharded(row, "gloo", model=make_model(width=64, layers=6))
    peak = 0

    def sample(*_: Any) -> None:
        nonlocal peak
        peak = max(peak, inside.full_bytes(engine) + inside.gradient_buffer_bytes(engine))

    for module in model.modules():
        module.register_forward_pre_hook(sample)
        module.register_forward_hook(sample)
        module.register_full_backward_hook(sample)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(sample)
    take_steps(rank, 3, model, optimizer)
    largest = inside.largest_unit_bytes(engine)
    reported = engine.memory().peak
    engine.close()
    seen = {"peak": peak, "largest": largest, "reported": reported}
    assert 0 < seen["peak"] <= 3 * seen["largest"], seen
    assert seen["reported"] <= 3 * seen["largest"], seen


@on_ranks(2)
def test_the_operating_system_agrees_that_shards_lie_once_per_host() -> None:
    """Look at private plus proportional bytes of this process before and after sharding, and the
    model's bytes.
    """

    def pss() -> int:
        gc.collect()
        # what the C allocator keeps for itself is not ours to measure
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/smaps_rollup") as lines:
            kib = {
                name.strip(): int(rest.split()[0])
                for name, _, rest in (line.partition(":") for line in lines)
                if rest.endswith("kB\n")
            }
        # what the kernel may take at any moment is not held
        return 1024 * (kib["Pss"] - kib["LazyFree"])

    def train(layers: int) -> tuple[int, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *(torch.nn.Linear(1024, 1024, bias=False) for _ in range(layers))
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        engine = zs.shard(model, optimizer, stage=3, comm=zs.Comm(transport="shared_memory"))
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        return 4 * sum(p.numel() for p in model.parameters()), engine

    train(1)[1].close()  # what is imported and allocated once
    before = pss()
    num_bytes, engine = train(24)
    after = pss()
    engine.close()
    assert after - before < num_bytes / 2 + 40 * 2**20, (
        f"{(after - before) / 2**20:.0f} MiB for shards of {num_bytes / 2**21:.0f} MiB"
    )


@on_ranks(1)
def test_a_model_of_24_blocks_gets_at_least_24_units() -> None:
    model = Net(width=24, layers=24)
    engine = zs.shard(model, stage=3)
    names = list(engine.units)
    engine.close()
    assert len(names) >= 24
    assert [name for name in names if name.startswith("blocks.")] == [
        f"blocks.{i}" for i in range(24)
    ]


@pytest.mark.parametrize(
    "transport", ["shared_memory", pytest.param("gloo", marks=pytest.mark.slow)]
)
@on_ranks(2)
def test_steps_leave_no_growth_and_deleting_the_model_frees_everything(
    rank: int, transport: str
) -> None:
    """Train 200 steps; return live tensors by shape at step 5 and at the end, whether all is
    gone after `del`, and the pool's bytes and bound.

    The pool's slots (the only uint8 tensors here) are made when a rank first is late, at any step,
    so they are held to their bound instead.
    """
    model = make_model()
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, stage=3, comm=zs.Comm(transport=transport))

    def census() -> Counter[str]:
        gc.collect()
        return Counter(
            str(tuple(t.shape))
            for t in gc.get_objects()
            if isinstance(t, torch.Tensor) and t.dtype is not torch.uint8
        )

    seen = []
    for step in range(200 if transport == "shared_memory" else 40):
        take_steps(rank, [step], model, optimizer)
        if step == 5:
            seen.append(census())
    seen.append(census())
    pool = inside.slot_bytes(engine)
    watched = [weakref.ref(thing) for thing in (model, optimizer, engine, *model.parameters())]
    del model, optimizer, engine
    gc.collect()
    early, late, gone, (pooled, limit) = seen[0], seen[1], [ref() is None for ref in watched], pool
    assert 0 < pooled <= limit + 4096
    assert late - early == Counter(), late - early
    assert all(gone), gone


@pytest.mark.parametrize("bias", [False, True])
def test_no_gradient_is_left_of_autograd_when_the_sum_of_its_unit_begins(bias: bool) -> None:
    model = torch.nn.Linear(37, 41, bias=bias)  # autograd ends with the weight
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    left: list[int] = []

    def note(event: str, unit: str) -> None:
        if event == "reduce":
            found = {at: size for at, size in _live_storages().items() if at not in before}
            left.append(list(found.values()).count(4 * 37 * 41))  # no padding

    engine = zs.shard(model, optimizer, stage=1, units=[torch.nn.Linear])
    before = _live_storages()
    with inside.traced(engine, note):
        model(torch.ones(3, 37)).sum().backward()
    engine.close()
    assert left == [0]


def test_the_heap_is_trimmed_when_it_is_larger_than_what_a_step_uses_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trims: list[int] = []
    monkeypatch.setattr("zeroshard.memory.return_freed_memory", lambda: trims.append(1))
    trimmer = Trimmer(80)
    for passed, heap, trimmed in (
        (80, (60, 120), 0),  # in use, and all of it
        (80, (10, 169), 0),  # less than 1.5 times the most that was in use, and 80
        (40, (10, 170), 1),
        (40, (10, 170), 1),  # not before another 80 have passed
        (1, (10, 900), 1),  # too little to look
        (40, (10, 170), 2),
        (80, (0, 0), 3),  # an allocator that does not say
    ):
        monkeypatch.setattr("zeroshard.memory.heap_bytes", lambda heap=heap: heap)
        trimmer.passed(passed)
        assert len(trims) == trimmed, (passed, heap)
    Trimmer(None).passed(1 << 40)
    assert len(trims) == 3


def test_the_allocator_says_how_large_its_heap_is() -> None:
    before = heap_bytes()
    held = [torch.empty(4000) for _ in range(500)]  # below what is mapped by itself
    after = heap_bytes()
    assert after == (0, 0) or after[0] - before[0] >= 0.9 * 500 * 16000
    assert after[0] <= after[1] and len(held) == 500


def test_a_gradient_buffer_lent_again_before_its_reduce_has_ended_counts_once() -> None:
    meter, pooled, other = MemoryCounter(), torch.empty(8), torch.empty(8)
    first = meter.lend(pooled, 32)
    second = meter.lend(other, 32)
    third = meter.lend(pooled, 16)  # less of it
    assert (meter.live, meter.peak, first.lent_again) == (80, 64, True)
    for loan in (first, second, third):
        meter.end_loan(loan)
    assert (meter.live, meter.peak) == (0, 64)
