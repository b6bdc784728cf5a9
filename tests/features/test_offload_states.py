"""``offload_states()`` empties the device between phases, ``reload_states()`` brings everything
back bit for bit.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.features.test_memory import _live_storages
from tests.support.harness import run_ranks
from tests.support.training import batch, make_model, two_groups
from zeroshard.runtime.engine import states_of


def _train(
    rank: int, row: str, sleeps: bool, seen: dict[str, Any], before: Any = (), **options: Any
) -> dict[str, torch.Tensor]:
    model = make_model(width=48)
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, policy=row, **options)
    for step in range(6):
        for micro in range(2):
            model(*batch(rank, 2 * step + micro)).backward()
            # once with gradients at rest, once without
            if sleeps and step in (1, 3) and micro == step // 2:
                if not micro:
                    optimizer.step()
                    optimizer.zero_grad()
                _sleep(engine, model, optimizer, rank, seen, before)
                if not micro:
                    break
        else:
            optimizer.step()
            optimizer.zero_grad()
            continue
    state = engine.full_state_dict(rank0_only=False)
    engine.close()
    return state


def _sleep(
    engine: Any, model: Any, optimizer: Any, rank: int, seen: dict[str, Any], before: Any
) -> None:
    at_rest = engine.memory()
    seen["bytes"] = engine.offload_states()
    gc.collect()
    seen["expected"] = sum(by_tier.get("device", 0) for by_tier in at_rest.tiers.values())
    seen["live"] = sum(size for address, size in _live_storages().items() if address not in before)
    errors = []
    for use in (lambda: model(*batch(rank, 0)), optimizer.step, lambda: engine.full_state_dict()):
        try:
            use()
        except zs.StateError as error:
            errors.append(str(error))
    seen["errors"] = errors
    seen["pieces"] = all(
        bool(piece.tensor.isnan().all()) for piece in states_of(engine).stepped_pieces()
    )
    engine.reload_states()


def _case(
    rank: int, world: int, row: str, transport: str, precision: str, host: bool
) -> tuple[dict[str, Any], list[str]]:
    options: dict[str, Any] = {
        "precision": precision,
        "comm": zs.Comm(transport=transport) if world > 1 else zs.Comm(),
    }
    if host:
        options["offload"] = zs.Offload(grad="host", optimizer="host", fraction=0.5)
    gc.collect()
    before = _live_storages()
    seen: dict[str, Any] = {}
    slept = _train(rank, row, True, seen, before, **options)
    # the same steps without sleep: step 1 takes one micro-batch only
    model = make_model(width=48)
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, policy=row, **options)
    for step in range(6):
        for micro in range(1 if step == 1 else 2):
            model(*batch(rank, 2 * step + micro)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = engine.full_state_dict(rank0_only=False)
    engine.close()
    return seen, [name for name, value in slept.items() if not torch.equal(value, expected[name])]


@pytest.mark.parametrize(
    ("row", "world", "transport", "precision", "host"),
    [
        pytest.param("ddp", 1, "gloo", "fp32", True, marks=pytest.mark.slow),
        ("zero1", 2, "shared_memory", "fp32", False),
        ("zero2", 2, "gloo", "bf16", True),
        pytest.param("zero3", 1, "gloo", "fp32", True, marks=pytest.mark.slow),
        ("zero3", 2, "shared_memory", "fp32", False),
        pytest.param("zero3-keep", 2, "gloo", "bf16", False, marks=pytest.mark.slow),
    ],
)
def test_states_leave_the_device_and_come_back_with_the_same_bits(
    row: str, world: int, transport: str, precision: str, host: bool
) -> None:
    for seen, differs in run_ranks(world, _case, row, transport, precision, host, timeout=60):
        assert differs == [], (row, transport, differs)
        assert abs(seen["bytes"] - seen["expected"]) <= 4096 + 0.01 * seen["expected"], seen
        assert len(seen["errors"]) == 3 and all(
            "reload_states" in error for error in seen["errors"]
        ), seen
        assert seen["pieces"]
        if transport != "shared_memory":
            # gradient buffers of the pool, and what tests hold
            assert seen["live"] < 0.35 * seen["bytes"] + 200_000, seen
