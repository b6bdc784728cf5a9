"""Every operation of a run, on the lanes that it has on CUDA: none touches memory that another lane
has not finished with, and no memory goes back to its allocator while a lane still uses it.

One process of a fake process group of 8, over the NCCL transport, on CPU tensors: values mean
nothing, order and lifetime are those of a device (tests/support/lane_sanitizer.py). The host is
one, too: what it writes while a lane copies from there is found.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from benchmarks.fake_world import fake_world
from tests.support.activations import using
from tests.support.adversary import ForgetfulReduction, tiles_without_marks
from tests.support.lane_sanitizer import LaneSanitizer
from zeroshard import memory
from zeroshard.runtime import bucket
from zeroshard.runtime.shelf import ActivationStore
from zeroshard.tier.stores import HostStore

WIDTH = 64
DEVICE = torch.device("cpu")  # named as such: the sanitizer's device
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{row: (row, {}) for row in ("ddp", "zero1", "zero2", "zero3", "zero3-keep")},
    **{row: (row, {"node_size": 4}) for row in ("hpz", "mics", "hfsdp")},
    "two levels": ("zero3", {"node_size": 4, "hierarchical": True}),
    "ordered": ("zero3", {"ordered": True}),
    "weight codec": ("zero3", {"weight_codec": "int8"}),
    "gradient codec": ("zero3", {"grad_codec": "int4"}),
    "both codecs, hpz": ("hpz", {"node_size": 4, "weight_codec": "int8", "grad_codec": "int4"}),
}

TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "optimizer": {"optimizer": "host"},
    "grad": {"grad": "host", "optimizer": "host"},
    "grad alone": {"grad": "host"},
    "all": {"weight": "host", "grad": "host", "optimizer": "host"},
    "fraction": {"grad": "host", "optimizer": "host", "fraction": 0.4},
    "near fraction": {"optimizer": "host", "fraction": 0.4},
    "ahead": {"grad": "host", "optimizer": "host", "step_in_backward": True},
    "late": {"grad": "host", "optimizer": "host", "delayed_update": 1},
    "all, late": {
        "weight": "host", "grad": "host", "optimizer": "host", "delayed_update": 1,
    },
}  # fmt: skip
WHOLE_WEIGHTS = ("ddp", "zero1", "zero2", "hfsdp")  # whose weights are refused on the host
TIERED = [
    *((case, "grad" if case in WHOLE_WEIGHTS else "all") for case in CASES),
    *((case, "fraction") for case in ("ddp", "zero2", "zero3", "mics", "ordered")),
    *((case, "late") for case in ("zero1", "zero3")),
    *(("zero3", tier) for tier in TIERS),
]


class _Net(nn.Module):
    """Blocks, the last of which runs only when asked to."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, WIDTH, device=DEVICE),
                nn.Tanh(),
                nn.Linear(WIDTH, WIDTH, device=DEVICE),
            )
            for _ in range(blocks)
        )
        self.uses_all = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks if self.uses_all else self.blocks[:-1]:
            x = x + block(x)
        return x.square().mean()


def _watch(
    case: str,
    *,
    world: int = 8,
    precision: str = "fp32",
    blocks: int = 3,
    tier: str = "device",
    program: Callable[[zs.Engine, _Net, torch.optim.Optimizer], None],
    drop: int | None = None,
    without: Collection[str] = (),
) -> LaneSanitizer:
    """Run `program` under the sanitizer, which leaves out the `drop`-th fork or join, and the waits
    for events `without` which it is to run.
    """
    policy, comm = CASES[case]
    torch.manual_seed(0)
    sanitizer = LaneSanitizer(drop=drop, without=without)
    with fake_world(world), sanitizer.watching():
        model = _Net(blocks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        units = [f"blocks.{index}" for index in range(blocks)]
        options = zs.Comm(transport="nccl", **comm)
        engine = zs.shard(
            model,
            optimizer,
            policy=policy,
            units=units,
            comm=options,
            precision=precision,
            offload=TIERS[tier] or None,
        )
        program(engine, model, optimizer)
    return sanitizer


def _batch() -> torch.Tensor:
    return torch.randn(16, WIDTH, device=DEVICE)  # 4 KiB: checkpoints keep less where it is


def _steps(engine: zs.Engine, model: _Net, optimizer: torch.optim.Optimizer) -> None:
    """Two steps of two micro-batches with clipping, a block unused in one, and an evaluation."""
    for step in range(2):
        with engine.no_sync():
            engine.backward(model(_batch()))
        model.uses_all = step == 0
        engine.backward(model(_batch()))
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(_batch())


def _steps_and_close(engine: zs.Engine, model: _Net, optimizer: torch.optim.Optimizer) -> None:
    """The same, and everything back to the device."""
    _steps(engine, model, optimizer)
    engine.close()


def _asleep_in_between(engine: zs.Engine, model: _Net, optimizer: torch.optim.Optimizer) -> None:
    """Off the device with gradients at rest, between two steps."""
    _one_step(engine, model, optimizer)
    engine.backward(model(_batch()))
    engine.offload_states()
    engine.reload_states()
    optimizer.step()
    engine.close()


def _checkpointed(engine: zs.Engine, model: _Net, optimizer: torch.optim.Optimizer) -> None:
    """With the blocks' inputs on the host."""
    zs.nn.checkpoint_blocks(model, tier="host")
    store = ActivationStore(HostStore(DEVICE), DEVICE)
    with using(store):
        _steps(engine, model, optimizer)
        assert store.most_used > 0


def _one_step(engine: zs.Engine, model: _Net, optimizer: torch.optim.Optimizer) -> None:
    model(_batch()).backward()
    optimizer.step()
    optimizer.zero_grad()
    model(_batch())


def _reset_in_between(engine: zs.Engine, model: _Net, optimizer: torch.optim.Optimizer) -> None:
    """A backward that an exception cuts off, `reset()`, and a step."""

    def fail(grad: torch.Tensor) -> None:
        raise ZeroDivisionError

    handle = model.blocks[0][0].weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(_batch()).backward()
    handle.remove()
    engine.reset()
    _one_step(engine, model, optimizer)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("case", list(CASES))
def test_no_lane_touches_what_another_has_not_finished_with(case: str, precision: str) -> None:
    sanitizer = _watch(case, precision=precision, program=_steps)
    assert sanitizer.findings == []
    assert sanitizer.num_operations > 200
    assert len(sanitizer.syncs) >= 12


def test_nor_in_a_world_of_sixty_four() -> None:
    assert _watch("zero3", world=64, program=_steps).findings == []


@pytest.mark.parametrize("case", ["zero3", "mics", "gradient codec"])
def test_nor_after_an_exception_and_reset(case: str) -> None:
    assert _watch(case, program=_reset_in_between).findings == []


@pytest.mark.parametrize("case", ["zero1", "zero3", "hpz"])
def test_each_wait_that_is_left_out_is_found(case: str) -> None:
    """A join of the reduce lane that a later one covers, before anybody reads the sum, is none."""
    whole = _watch(case, blocks=2, program=_one_step)
    assert whole.findings == []
    for number, sync in enumerate(whole.syncs):
        found = _watch(case, blocks=2, program=_one_step, drop=number).findings
        is_covered = sync.startswith("join(reduce") and sync in whole.syncs[number + 1 :]
        assert found or is_covered, (number, sync)


@pytest.mark.parametrize(
    "case, lane",
    [("gradient codec", "reduce"), ("mics", "reduce between"), ("hfsdp", "reduce between")],
)
def test_memory_that_a_reduce_does_not_hold_is_found(
    case: str, lane: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "Reduction", ForgetfulReduction)
    findings = _watch(case, program=_steps).findings
    assert {finding.kind for finding in findings} == {"drop"}
    assert {finding.other_lane for finding in findings} == {lane}


def test_a_pool_that_waits_for_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "order_after", lambda event: None)
    findings = _watch("zero3", blocks=6, program=_steps).findings
    assert "race" in {finding.kind for finding in findings}


# ------------------------------------------------------------------------------------------- tiers


@pytest.mark.parametrize("case, tier", TIERED)
def test_nor_do_the_host_and_the_thread_of_the_step(case: str, tier: str) -> None:
    near = ("fraction", "grad alone")  # stepped on the device, by the step's thread
    precision = "fp32" if tier in near else "bf16"  # in fp32 masters are the weights
    sanitizer = _watch(case, tier=tier, precision=precision, program=_steps_and_close)
    assert sanitizer.findings == []
    threads = {"zeroshard-step"} if tier != "device" else set()
    assert threads <= set(sanitizer.clocks)


@pytest.mark.parametrize("tier", ["all", "fraction"])
def test_nor_with_tiers_in_a_world_of_sixty_four(tier: str) -> None:
    assert _watch("zero3", world=64, tier=tier, program=_steps_and_close).findings == []


@pytest.mark.parametrize("case", ["ddp", "zero1", "zero2", "zero3"])
def test_nor_where_one_process_goes_on_into_the_forward(case: str) -> None:
    """A step that is not waited for; the gathers that publish weights share one fork."""
    sanitizer = _watch(case, world=1, tier="fraction", precision="bf16", program=_steps_and_close)
    assert sanitizer.findings == []


@pytest.mark.parametrize("tier", ["device", "fraction"])
@pytest.mark.parametrize("case", ["zero1", "zero3"])
def test_nor_off_the_device_and_back(case: str, tier: str) -> None:
    assert _watch(case, tier=tier, program=_asleep_in_between).findings == []


@pytest.mark.parametrize("tier", ["device", "all"])
def test_nor_with_the_inputs_of_checkpoints_on_the_host(tier: str) -> None:
    sanitizer = _watch("zero3", tier=tier, blocks=6, program=_checkpointed)
    assert sanitizer.findings == []
    assert sanitizer.clocks["activation gather"] and sanitizer.clocks["activation reduce"]


def _put_away(drop: int | None = None) -> LaneSanitizer:
    """Return what a chain of checkpoints did whose inputs rest on the host."""
    sanitizer = LaneSanitizer(drop=drop)
    with sanitizer.watching(), using(ActivationStore(HostStore(DEVICE), DEVICE)):
        x = _batch().requires_grad_() * 1
        for _ in range(6):
            x = zs.nn.checkpoint(torch.tanh, x, tier="host")
        x.sum().backward()
    return sanitizer


def test_each_fork_before_a_copy_of_checkpointed_inputs_is_needed() -> None:
    """Its join is covered: whoever waits for a copy is ordered after it by the copy itself."""
    whole = _put_away()
    forks = [number for number, sync in enumerate(whole.syncs) if sync.startswith("fork")]
    assert not whole.findings and len(forks) == 9
    for number in forks:
        assert _put_away(drop=number).findings, (number, whole.syncs[number])


@pytest.mark.parametrize(
    "without, case, tier, precision",
    [
        (["NativeTransport.grad_buffer"], "zero3", "device", "bf16"),
        (["Segment.wait_uploads"], "zero3", "optimizer", "bf16"),
        (["Segment.wait_uploads"], "zero3", "fraction", "fp32"),
        (["TileRunner.wait"], "zero3", "late", "bf16"),
        (["TileRunner._step_on_host"], "zero3", "optimizer", "fp32"),
        (["Gradient.wait_writes"], "zero3", "grad", "fp32"),
        (["HostStorage.flush"], "zero3", "grad", "fp32"),
        (["State.borrowed"], "zero3", "fraction", "bf16"),
        (["Bucket._move_sum"], "zero1", "grad", "bf16"),
        (["gather_bytes"], "zero3", "device", "bf16"),
        (["_fill"], "zero3", "optimizer", "bf16"),
        (["read_squares"], "zero3", "fraction", "fp32"),
        # the host has read the norm of the gradients by then, and so waited for compute
        (["read_squares", "TileRunner._call_on_stream"], "zero3", "optimizer", "fp32"),
    ],
)
def test_each_wait_for_an_event_that_is_left_out_is_found(
    without: list[str], case: str, tier: str, precision: str
) -> None:
    options: dict[str, Any] = {"tier": tier, "precision": precision, "program": _steps_and_close}
    less = _watch(case, without=without[:-1], **options)
    assert without[-1] in less.waits
    found = _watch(case, without=without, **options).findings
    assert set(map(str, found)) - set(map(str, less.findings))


def test_weights_stepped_on_the_device_without_a_mark_behind_them_are_found() -> None:
    with tiles_without_marks():
        found = _watch("zero3", tier="grad alone", precision="fp32", program=_steps).findings
    assert {finding.other_lane for finding in found} == {"stream 1"}


@pytest.mark.parametrize("waits", [True, False])
def test_host_memory_that_the_host_writes_while_a_lane_copies_from_there_is_found(
    waits: bool,
) -> None:
    without = [] if waits else ["HostStorage._wait_for_opposite"]
    sanitizer = LaneSanitizer(without=without)
    with sanitizer.watching():
        storage = HostStore(DEVICE).allocate("weights", 8, torch.float32)
        numbers = torch.zeros(8)
        storage.write(0, 8, numbers)
        with sanitizer.on("gather"):
            arrived = torch.empty(8, device=DEVICE)
            storage.read(0, 8, arrived)
        storage.write(4, 8, numbers[4:])
        storage.close()
    found = {(one.kind, one.lane, one.other_lane) for one in sanitizer.findings}
    assert found == (set() if waits else {("race", "host", "gather")})
