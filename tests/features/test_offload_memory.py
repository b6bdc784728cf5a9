"""Bytes of the tiers: what leaves the device is gone from it, what rests on disk is gone from
memory, and the accounts say so.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from benchmarks.model import GPT
from benchmarks.plan import Size
from tests.features.test_memory import _live_storages
from tests.support import inside
from tests.support.harness import run_ranks, spawn_ranks
from tests.support.training import batch, make_model, take_steps
from zeroshard.core.layout import ALIGN
from zeroshard.core.placement import Mesh, Tier
from zeroshard.core.policy import row as policy_row
from zeroshard.core.precision import PRECISIONS
from zeroshard.runtime.engine import states_of

MIB = 1 << 20
LAYERS = 12  # units are small beside the model: a state that was left behind stands out

# --------------------------------------------------------------------------------------- the device


@dataclass
class Census:
    """What rests on one rank at one moment: counted, and as the engine says."""

    live: int  # bytes of live tensor storages
    tiers: dict[str, dict[str, int]]
    at_rest: dict[str, int]
    accounts: dict[str, tuple[int, int]]  # tier -> live, peak
    peaks: dict[str, int]
    idle: dict[str, int]  # tier -> bytes that are kept for the next gradient

    @property
    def on_device(self) -> int:
        return sum(by_tier.get("device", 0) for by_tier in self.tiers.values())

    def on(self, tier: str) -> int:
        return sum(by_tier.get(tier, 0) for by_tier in self.tiers.values())


def _census(engine: Any, before: dict[int, int]) -> Census:
    inside.flush_gradients(engine)  # a sum on its way to another tier is still here
    gc.collect()
    report = engine.memory()
    live = sum(size for address, size in _live_storages().items() if address not in before)
    accounts = {
        tier.value: (store.account.live, store.account.peak)
        for tier, store in inside.stores(engine).items()
    }
    idle = inside.idle_gradient_bytes(engine)
    return Census(live, report.tiers, report.at_rest, accounts, report.tier_peaks, idle)


def _rests(
    rank: int, world: int, row: str, precision: str, tiers: dict[str, Any], path: str
) -> dict[str, Any]:
    gc.collect()
    before = _live_storages()
    model = make_model(width=48, layers=LAYERS)
    numel = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    disk = {"disk_path": path} if "disk" in tiers.values() else {}
    engine = zs.shard(
        model,
        optimizer,
        policy=row,
        precision=precision,
        comm=zs.Comm(transport="gloo"),
        offload=zs.Offload(**tiers, **disk),
    )
    take_steps(rank, 2, model, optimizer)
    with torch.no_grad():  # finishes the publish of replicated rows
        model(batch(rank, 0)[0])
    after_step = _census(engine, before)
    readable = _readable(engine, optimizer)
    with engine.no_sync():
        model(*batch(rank, 9)).backward()
    between = _census(engine, before)
    readable += _readable(engine, optimizer)
    optimizer.zero_grad()
    largest = inside.largest_unit_bytes(engine)
    out = {
        "numel": numel,
        "after_step": after_step,
        "between_micro_batches": between,
        "readable": readable,
    }
    out |= {"largest": largest, "slots": len(list(model.parameters())), "units": len(engine.units)}
    engine.close()
    return out


def _readable(engine: Any, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return what of the optimizer can be read as numbers although it rests elsewhere, or cannot
    although it rests here.
    """
    away = inside.pieces_off_device(engine)
    wrong = []
    for group in optimizer.param_groups:
        for piece in group["params"]:
            values = {"piece": piece.detach(), **optimizer.state.get(piece, {})}
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and value.dim() and value.numel():
                    is_nan = bool(value.isnan().all()) and value.untyped_storage().nbytes() <= 16
                    if is_nan is not (id(piece) in away):
                        wrong.append(f"{name} {list(value.shape)}")
    return wrong


ON_HOST = {"weight": "host", "grad": "host", "optimizer": "host"}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "optimizer on host": ("zero1", "fp32", {"optimizer": "host"}),
    "replicated, gradient and optimizer on host": (
        "ddp",
        "bf16",
        {"grad": "host", "optimizer": "host"},
    ),
    "ZeRO-Offload": ("zero2", "bf16", {"grad": "host", "optimizer": "host"}),
    "all on host, fp32": ("zero3", "fp32", ON_HOST),
    "all on host, bf16": ("zero3", "bf16", ON_HOST),
    "ZeRO-Infinity": ("zero3", "bf16", {"weight": "host", "grad": "disk", "optimizer": "disk"}),
    "all on disk": ("zero3-keep", "fp32", {"weight": "disk", "grad": "disk", "optimizer": "disk"}),
    "gradient on disk": ("zero2", "fp32", {"grad": "disk"}),
    "a fraction": ("zero3", "fp32", {**ON_HOST, "fraction": 0.5}),
}


IN_THE_SLOW_SET = (
    "replicated, gradient and optimizer on host",
    "all on host, fp32",
    "gradient on disk",
    "all on disk",
)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in IN_THE_SLOW_SET)) for name in CASES],
)
def test_what_leaves_the_device_is_gone_from_it_and_the_accounts_agree(
    name: str, tmp_path: Path
) -> None:
    row, precision, tiers = CASES[name]
    moved = policy_row(row).tiered(
        *(Tier(tiers.get(state, "device")) for state in ("weight", "grad", "optimizer"))
    )
    for seen in run_ranks(2, _rests, row, precision, tiers, str(tmp_path)):
        assert seen["readable"] == []
        padding = ALIGN * (seen["slots"] + 2 * seen["units"])  # elements per state
        for point in ("after_step", "between_micro_batches"):
            census: Census = seen[point]
            formula = moved.bytes_at_rest(
                point, numel=seen["numel"], mesh=Mesh(1, 2), precision=PRECISIONS[precision]
            )
            for state, width in (("weight", 4), ("master", 4), ("grad", 4), ("optimizer", 8)):
                assert abs(census.at_rest[state] - getattr(formula, state)) <= padding * width, (
                    point,
                    state,
                    census,
                    formula,
                )
                tier = tiers.get({"master": "optimizer"}.get(state, state), "device")
                if "fraction" not in tiers and (state != "master" or formula.master):
                    assert set(census.tiers[state]) <= {tier}, (point, state, census.tiers)
                    assert census.tiers[state].get(tier, 0) == census.at_rest[state]
                elif "fraction" in tiers and census.at_rest[state]:
                    share = census.tiers[state][tier] / census.at_rest[state]
                    assert abs(share - tiers["fraction"]) < 0.1, (point, state, census.tiers)
            for tier, (live, peak) in census.accounts.items():
                assert live == census.on(tier) + census.idle.get(tier, 0), (tier, census)
                assert census.peaks[tier] == peak >= live
            # gradient buffers on loan and idle, in fp32
            pooled = 3 * seen["largest"] * (2 if precision == "bf16" else 1)
            assert census.live <= census.on_device + pooled + padding, (
                point,
                census,
                "something else is alive",
            )
            if tiers == ON_HOST:
                assert census.on_device <= 4 * padding, census
                # less than the least of the states
                assert census.live <= pooled + 4 * padding < seen["numel"] * 4 / 2, census


# ---------------------------------------------------------------------------------- resident memory


def _status() -> dict[str, int]:
    """Return the sizes in /proc/self/status in bytes."""
    with open("/proc/self/status") as lines:
        fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    return {name: 1024 * int(rest[0]) for name, rest in fields.items() if rest and rest[-1] == "kB"}


def _forget_peak() -> int:
    """Begin a new peak of resident memory; return what is resident now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status()["VmRSS"]


WIDTH, DEPTH = 768, 24
STAGING = 8 * MIB


def _tower(width: int, depth: int) -> nn.Module:
    with zs.deferred_init():
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(depth)))


def _run(model: nn.Module, offload: zs.Offload, folder: Path, steps: int) -> None:
    """Shard, train, save, load and train on."""
    width = model[0].in_features  # type: ignore[index,union-attr]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = zs.shard(model, optimizer, stage=3, units=[nn.Linear], offload=offload)
    x = torch.ones(4, width)
    for step in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            zs.save(folder, engine, step=step)
            zs.load(folder, engine)
    inside.close_stores(engine)


def _resident(rank: int, world: int, path: str, optimizer: str) -> tuple[int, int]:
    """Return the peak of resident memory of a run beyond a small run's, and the bytes of the
    weights.
    """
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    offload = zs.Offload(
        weight="disk", grad="disk", optimizer=optimizer, disk_path=path, staging_bytes=STAGING
    )
    # what is imported, compiled and allocated once
    _run(_tower(64, 3), offload, Path(path) / "small", 3)
    base = _forget_peak()
    model = _tower(WIDTH, DEPTH)
    _run(model, offload, Path(path) / "large", 3)
    return _status()["VmHWM"] - base, 4 * WIDTH * WIDTH * DEPTH


def _bound() -> int:
    """Return what a run may take beyond a small run."""
    unit = 4 * WIDTH * WIDTH
    gathered = 3 * unit  # one in use, one being read, one kept from the last
    # autograd's own, two buffers, a sum being formed, two being written, two idle
    gradients = (1 + 2 + 1 + 2 + 2) * unit
    # freed: what two threads' temporaries leave in the allocator between two trims
    ring, freed = STAGING, 2 * STAGING
    scratch = 8 * 2 * MIB  # of the disk's threads
    # a tile on its way between tiers, a piece on its way into or out of a checkpoint
    loans = 2 * 4 * MIB
    # interpreter, autograd's graph, activations (4 x 1024 x 4 bytes per layer), the checkpoint's
    # manifest
    other = 16 * MIB
    return gathered + gradients + ring + freed + scratch + loans + other


def test_what_rests_on_disk_is_not_in_memory(tmp_path: Path) -> None:
    (seen,) = spawn_ranks(1, _resident, str(tmp_path), "disk", timeout=110, init_group=False)
    assert seen.error is None, seen.stderr
    peak, weights = seen.result
    assert _bound() < 2 * weights, "the optimizer's state alone"
    assert peak < _bound(), (
        f"{peak / MIB:.0f} MiB, {_bound() / MIB:.0f} allowed, for states of {4 * weights / MIB:.0f}"
    )


@pytest.mark.slow
def test_a_state_that_stays_in_memory_would_be_seen(tmp_path: Path) -> None:
    (seen,) = spawn_ranks(1, _resident, str(tmp_path), "device", timeout=110, init_group=False)
    assert seen.error is None, seen.stderr
    peak, weights = seen.result
    assert peak > _bound() and peak > 2 * weights


# ------------------------------------------------------------------------------------ a large model

LARGE = Size("4 GB", layers=12, width=1280, heads=16, vocabulary=4096)


def _large(rank: int, world: int, path: str) -> dict[str, Any]:
    imported = _forget_peak()
    torch.manual_seed(0)
    with zs.deferred_init():
        model = GPT(LARGE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = zs.shard(
        model,
        optimizer,
        stage=3,
        offload=zs.Offload(weight="disk", grad="disk", optimizer="disk", disk_path=path),
    )
    losses, seconds = [], []
    tokens, targets = torch.randint(LARGE.vocabulary, (2, 1, LARGE.context)).unbind()
    for _ in range(3):
        begin = time.perf_counter()
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    states_of(engine).join_step()
    peak = _status()["VmHWM"]
    states = 16 * sum(p.numel() for p in model.parameters())
    inside.close_stores(engine)
    return {
        "peak": peak,
        "imported": imported,
        "states": states,
        "losses": losses,
        "seconds": seconds,
    }


@pytest.mark.slow
def test_a_model_of_4_gb_of_states_trains_in_1200_mb(tmp_path: Path) -> None:
    (seen,) = spawn_ranks(1, _large, str(tmp_path), timeout=500, init_group=False)
    assert seen.error is None, seen.stderr
    result = seen.result
    print(
        {name: value / MIB if isinstance(value, int) else value for name, value in result.items()}
    )
    assert result["states"] > 3.9e9
    assert result["peak"] - result["imported"] < 1.2e9, result
    assert result["losses"][-1] < result["losses"][0]
