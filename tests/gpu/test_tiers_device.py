"""States on host and disk beside one device: pinned memory, real copies on streams of their own,
the step on the host.

The host's AdamW does not round as the device's does, so tiers are compared with the device within a
tolerance; host and disk, which step alike, with each other bit for bit.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.gpu.chosen import HAS_CUDA, PRETENDED, chosen_device, most_reserved, slow_unless_cuda
from tests.support import inside
from tests.support.harness import run_ranks
from tests.support.training import Net, batch, take_steps, two_groups
from zeroshard import memory
from zeroshard.core.placement import Tier
from zeroshard.memory import return_freed_memory
from zeroshard.optim.copies import TileOptimizer
from zeroshard.optim.shards import StepMethod
from zeroshard.runtime.engine import states_of
from zeroshard.tier.store import link_of

pytestmark = pytest.mark.usefixtures("device")

STEPS = 20 if HAS_CUDA else 4
RANKS = "" if HAS_CUDA else PRETENDED
SMALL = {"width": 64, "layers": 6 if HAS_CUDA else 2}
LARGE = {"width": 512, "layers": 12} if HAS_CUDA else {"width": 128, "layers": 3}
MANY = 50 if HAS_CUDA else 8
SETTLED = 5 if HAS_CUDA else 2  # steps after which nothing may grow
HOST = {"grad": "host", "optimizer": "host"}
ON_HOST = {"weight": "host", **HOST}
ON_DISK = {"weight": "disk", "grad": "disk", "optimizer": "disk"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gradient and optimizer on the host": ("zero2", HOST),
    "optimizer alone on the host": ("zero2", {"optimizer": "host"}),
    "replicated, on the host": ("ddp", {"optimizer": "host"}),
    "a fraction on the host": ("zero2", {**HOST, "fraction": 0.4}),
    "a fraction of stage 3": ("zero3", {**ON_HOST, "fraction": 0.4}),
    "everything on the host": ("zero3", ON_HOST),
    "weights alone on the host": ("zero3", {"weight": "host"}),
    "optimizer on disk": ("zero2", {"optimizer": "disk"}),
    "everything on disk": ("zero3", ON_DISK),
    "delayed from a step that never comes": ("zero2", {**HOST, "delayed_update": 10 * STEPS}),
}


def _offload(tiers: dict[str, Any], path: Any) -> zs.Offload:
    return zs.Offload(**tiers, disk_path=str(path) if "disk" in tiers.values() else None)


def _net(sizes: dict[str, int] = SMALL) -> Net:
    torch.manual_seed(0)
    return Net(**sizes).to(chosen_device())


def _data(rank: int, step: int) -> list[torch.Tensor]:
    return [tokens.to(chosen_device()) for tokens in batch(rank, step)]


def _train(
    row: str,
    tiers: dict[str, Any],
    path: Any,
    *,
    rank: int = 0,
    precision: str = "fp32",
    **options: Any,
) -> dict[str, Any]:
    """Train on the device; return losses, the weights afterwards, and what was seen of tiers."""
    model = _net()
    optimizer = two_groups(model)
    engine = zs.shard(
        model, optimizer, policy=row, precision=precision, offload=_offload(tiers, path), **options
    )
    losses = take_steps(rank, STEPS, model, optimizer, engine, clip=1.0, data=_data)
    state = engine.full_state_dict(rank0_only=False)
    pieces = [
        (piece.tensor.device.type, piece.method is not StepMethod.BY_USER)
        for piece in states_of(engine).stepped_pieces()
    ]
    out = {"losses": losses, "state": state, "tiers": engine.memory().tiers, "pieces": pieces}
    engine.close()
    return out


@functools.cache
def _on_device(row: str, precision: str) -> dict[str, Any]:
    return _train(row, {}, None, precision=precision)


@pytest.mark.parametrize(
    ("precision", "tolerance"), [pytest.param("fp32", 1e-3, marks=slow_unless_cuda), ("bf16", 3e-2)]
)
@pytest.mark.parametrize("case", CASES)
def test_steps_with_states_on_another_tier_are_those_of_the_device(
    case: str, precision: str, tolerance: float, tmp_path: Path
) -> None:
    row, tiers = CASES[case]
    plain, run = _on_device(row, precision), _train(row, tiers, tmp_path, precision=precision)
    torch.testing.assert_close(run["losses"], plain["losses"], rtol=tolerance, atol=tolerance)
    if HAS_CUDA:  # the others take too few steps
        assert run["losses"][-1] < run["losses"][0]
    for name, value in run["state"].items():
        torch.testing.assert_close(
            value,
            plain["state"][name],
            rtol=0.1,
            atol=20 * tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_host_and_disk_step_the_same_bits(precision: str, tmp_path: Path) -> None:
    host, disk = (
        _train("zero3", ON_HOST, None, precision=precision),
        _train("zero3", ON_DISK, tmp_path, precision=precision),
    )
    assert host["losses"] == disk["losses"]
    assert all(torch.equal(value, disk["state"][name]) for name, value in host["state"].items())


def test_a_delayed_update_trains_within_reach_of_the_exact_one() -> None:
    exact, late = _train("zero2", HOST, None), _train("zero2", {**HOST, "delayed_update": 2}, None)
    assert late["losses"][:3] == exact["losses"][:3] and late["losses"] != exact["losses"]
    torch.testing.assert_close(late["losses"], exact["losses"], rtol=0, atol=0.5)


@pytest.mark.parametrize(
    ("fraction", "expected"), [(1.0, {("cpu", True)}), (0.4, {("cpu", True), ("device", False)})]
)
def test_what_is_stepped_on_the_host_is_a_cpu_tensor_to_the_optimizer(
    fraction: float, expected: set[tuple[str, bool]]
) -> None:
    # Gradients stay on the device: with them on the host, too, the device's part of a fraction is
    # stepped in tiles as well.
    run = _train("zero2", {"optimizer": "host", "fraction": fraction}, None)
    kind = torch.device(chosen_device()).type
    assert {(place.replace(kind, "device"), tiled) for place, tiled in run["pieces"]} == expected
    moments = run["tiers"]["optimizer"]
    assert moments["host"] / sum(moments.values()) == pytest.approx(fraction, abs=0.02)


@pytest.mark.parametrize(
    ("row", "tiers"),
    [("zero2", HOST), ("zero3", ON_HOST), ("zero3", ON_DISK)],
    ids=["stage 2", "stage 3", "disk"],
)
def test_the_host_step_works_in_pinned_memory(
    row: str, tiers: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, bool]] = []
    step = TileOptimizer.step

    def watched(self: TileOptimizer, parameters: Any, states: Any) -> Any:
        for parameter in itertools.chain.from_iterable(parameters.values()):
            moments = [value for value in states[parameter].values() if value.numel() > 1]
            seen.extend(
                (tensor.device.type, tensor.is_pinned())
                for tensor in (parameter.data, parameter.grad, *moments)
            )
        return step(self, parameters, states)

    model = _net()
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, policy=row, offload=_offload(tiers, tmp_path))
    for number in range(2):
        if number == 1:
            # the first step makes its moments anew
            monkeypatch.setattr(TileOptimizer, "step", watched)
        model(*_data(0, number)).backward()
        optimizer.step()
        optimizer.zero_grad()
    states_of(engine).join_step()
    assert len(seen) > 4 * len(list(model.parameters())) / 2 and set(seen) == {("cpu", True)}
    for storage in getattr(inside.stores(engine).get(Tier.HOST), "storages", []):
        assert torch.frombuffer(storage._memory, dtype=torch.uint8).is_pinned(), storage.key
    engine.close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.gpu
def test_pinned_memory_is_exact_and_waits_for_its_copies() -> None:
    num_bytes = 101 << 20  # torch's own allocator would take 128 MiB
    out = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda:0")
    assert not bool((out == 7).all())  # a first kernel takes memory of the host
    gc.collect()  # the engines before
    before = _resident_bytes()
    view = memory.host_memory(num_bytes, pinned=True)
    there = torch.frombuffer(view, dtype=torch.uint8)
    assert there.is_pinned() and there[5:].is_pinned()
    assert num_bytes <= _resident_bytes() - before < num_bytes + (4 << 20)
    there.fill_(7)
    torch.cuda._sleep(200_000_000)
    copy = link_of(torch.device("cuda:0")).copy(out, there, "to_device")
    assert not copy.done()
    del view, there  # waits, then unregisters
    assert copy.done() and bool((out == 7).all())
    assert _resident_bytes() - before < 4 << 20


@pytest.mark.gpu
def test_what_the_host_holds_is_what_the_engine_counts() -> None:
    model = _net(LARGE)
    torch.cuda.synchronize()
    gc.collect()  # the engines before
    return_freed_memory()  # shard() does it, too
    before = _resident_bytes()
    engine = zs.shard(model, two_groups(model), stage=3, offload=_offload({"weight": "host"}, None))
    counted = engine.memory().tiers["weight"]["host"]
    grown = _resident_bytes() - before
    print(f"counted {counted >> 20} MiB, resident {grown >> 20} MiB more")
    assert counted <= grown < 1.05 * counted + (32 << 20)
    for storage in getattr(inside.stores(engine).get(Tier.HOST), "storages", []):
        there = torch.frombuffer(storage._memory, dtype=torch.uint8)
        assert there.is_pinned() and there.numel() == storage.num_bytes, storage.key
    engine.close()


def test_what_travels_is_pinned_and_lent_again() -> None:
    device = torch.device(chosen_device())
    module = torch.get_device_module(device)
    first = memory.bounce_buffer(1000, torch.bfloat16, device)
    assert first.is_pinned()
    module._sleep(200_000_000)
    link_of(device).copy(torch.empty_like(first, device=device), first, "to_device")
    address = first.data_ptr()
    del first
    other = memory.bounce_buffer(1000, torch.bfloat16, device)
    assert other.data_ptr() != address  # the copy reads the first
    del other
    module.synchronize()
    again = [memory.bounce_buffer(1000, torch.bfloat16, device) for _ in range(2)]
    assert address in [tensor.data_ptr() for tensor in again]


def test_weights_that_rest_elsewhere_gather_right(tmp_path: Path) -> None:
    for tiers in (ON_HOST, ON_DISK, {"weight": "host"}):
        model = _net()
        expected = {name: value.cpu().clone() for name, value in model.state_dict().items()}
        x, y = (t.to(chosen_device()) for t in batch(0, 0))
        loss = model(x, y).detach()
        engine = zs.shard(model, two_groups(model), stage=3, offload=_offload(tiers, tmp_path))
        assert all(
            torch.equal(value, expected[name]) for name, value in engine.full_state_dict().items()
        ), tiers
        with engine.gathered():
            for name, parameter in model.named_parameters():
                assert parameter.device.type == x.device.type and torch.equal(
                    parameter.cpu(), expected[name]
                ), (tiers, name)
        torch.testing.assert_close(model(x, y).detach(), loss, rtol=1e-6, atol=1e-6)
        engine.close()


# ---------------------------------------------------------------------- step counts


@pytest.mark.parametrize("how", ["fused", "capturable"])
@pytest.mark.parametrize(
    "what", ["stepped before", "load_state_dict", "load", "repartition", "auto", "off and back"]
)
def test_step_counts_lie_where_what_they_count_does(what: str, how: str, tmp_path: Path) -> None:
    """A fused step has them beside the parameter: on the device, and on the host."""
    model = _net(SMALL)
    backwards = [*model.parameters()][::-1]  # the first of the group is on the host
    optimizer = torch.optim.AdamW(backwards, lr=1e-3, **{how: True})  # type: ignore[arg-type]
    if what == "stepped before":
        model(*_data(0, 0)).backward()
        optimizer.step()
    fraction: Any = "auto" if what == "auto" else 0.4
    offload = _offload({**HOST, "fraction": fraction}, None)
    engine = zs.shard(model, optimizer, stage=2, offload=offload)
    steps = iter(range(100))

    def step(count: int) -> None:
        for number in itertools.islice(steps, count):
            model(*_data(0, number)).backward()
            optimizer.step()
            optimizer.zero_grad()

    step(8 if what == "auto" else 2)
    if what == "load_state_dict":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif what == "load":
        zs.save(tmp_path, engine, step=2)
        zs.load(tmp_path, engine)
    elif what == "repartition":
        engine.repartition(policy="zero3")
    elif what == "off and back":
        engine.offload_states()
        engine.reload_states()
    step(2)
    states_of(engine).join_step()
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    devices = {one.device.type for one in parameters}
    assert devices == {"cpu", torch.device(chosen_device()).type}
    for one in parameters:
        assert optimizer.state[one]["step"].device == one.device
    engine.close()


# ---------------------------------------------------------------------- memory


@pytest.mark.usefixtures("in_order", "collected")
@pytest.mark.parametrize(
    ("row", "tiers"), [("zero2", HOST), ("zero3", ON_HOST)], ids=["stage 2", "stage 3"]
)
def test_memory_is_steady(row: str, tiers: dict[str, str]) -> None:
    module = torch.get_device_module(chosen_device())
    model = _net(LARGE)
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, policy=row, offload=_offload(tiers, None))
    module._sleep(200_000_000)  # a pool takes its second buffer while the first is in use
    allocated, reserved, held = [], [], []
    for step in range(MANY):
        loss = model(*_data(0, step))  # waits for the step before, which went on by itself
        if step:
            module.synchronize()
            allocated.append(module.memory_allocated())
            reserved.append(module.memory_reserved())
            held.append(engine.memory().tier_peaks["host"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert allocated[-1] == allocated[SETTLED], allocated
    assert reserved[-1] <= most_reserved(reserved[SETTLED]), reserved
    assert held[-1] == held[SETTLED], held
    assert module.memory_stats()["num_alloc_retries"] == 0
    engine.close()


@pytest.mark.usefixtures("in_order", "collected")
def test_what_leaves_the_device_leaves_its_memory() -> None:
    module, used = torch.get_device_module(chosen_device()), {}
    for name, tiers in (("device", {}), ("optimizer", {"optimizer": "host"}), ("all", ON_HOST)):
        gc.collect()  # the engine before, which is in cycles
        before = module.memory_allocated()
        # buffers of a unit or two stay: they must be few beside the model
        model = _net(LARGE if HAS_CUDA else {"width": 64, "layers": 16})
        numel = sum(parameter.numel() for parameter in model.parameters())
        optimizer = two_groups(model)
        engine = zs.shard(model, optimizer, stage=3, offload=_offload(tiers, None))
        model(*_data(0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        states_of(engine).join_step()
        module.synchronize()
        used[name] = (module.memory_allocated() - before) / numel  # bytes per parameter
        engine.close()
        del model, optimizer, engine
    # two moments; the master of fp32 weights is a copy on the host
    assert used["device"] - used["optimizer"] >= 7.5, used
    assert used["optimizer"] - used["all"] >= 3.5, used  # the weights


# ----------------------------------------------------------------- several ranks, and the sanitizer


def _over_gloo(rank: int, world: int, row: str, tiers: dict[str, str], path: str) -> dict[str, Any]:
    run = _train(row, tiers, path, rank=rank, comm=zs.Comm(transport="gloo"))
    return {"losses": run["losses"], "state": run["state"]}


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=slow_unless_cuda)])
def test_two_ranks_share_one_device_and_their_host(precision: str, tmp_path: Path) -> None:
    plain = run_ranks(2, _over_gloo, "zero3", {}, str(tmp_path), timeout=100, device=RANKS)
    for tiers in (ON_HOST, ON_DISK):
        runs = run_ranks(2, _over_gloo, "zero3", tiers, str(tmp_path), timeout=100, device=RANKS)
        for run, other in zip(runs, plain, strict=True):
            torch.testing.assert_close(run["losses"], other["losses"], rtol=1e-3, atol=1e-3)
        assert all(
            torch.equal(value, runs[1]["state"][name]) for name, value in runs[0]["state"].items()
        )


@pytest.mark.gpu
def test_the_stream_sanitizer_finds_no_race(tmp_path: Path) -> None:
    code = (
        "from tests.gpu import test_tiers_device as t\n"
        "t.STEPS = 3\n"
        f"for row, tiers in t.CASES.values(): t._train(row, tiers, {str(tmp_path)!r})\n"
    )
    environment = {**os.environ, "TORCH_CUDA_SANITIZER": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "CSAN detected" not in done.stderr, done.stderr[-4000:]
