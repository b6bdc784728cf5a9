"""examples/zero_by_hand.py is an independent oracle: it ends with the bits of the library."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import zeroshard as zs
from tests.support.harness import ROOT, on_ranks

SCRIPT = ROOT / "examples" / "zero_by_hand.py"
STEPS = 5


def _load() -> ModuleType:
    specification = importlib.util.spec_from_file_location("zero_by_hand", SCRIPT)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["zero_by_hand"] = module
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("world", [2, 4])
@on_ranks()
def test_zero_by_hand_ends_with_the_bits_of_the_library_at_every_stage(
    rank: int, world: int
) -> None:
    """Train at every stage by hand and with the library; compare with stage 0's."""
    example = _load()
    first = example.train(0, STEPS)
    num_bytes, held, differs = 4 * first.weights.numel(), {}, []
    for stage in range(4):
        result = example.train(stage, STEPS)
        held[stage] = result.held
        if not torch.equal(result.weights, first.weights) or result.losses != first.losses:
            differs.append(f"by hand, stage {stage}")
        sent = (12 if stage == 3 else 8) / 4 * num_bytes * (world - 1) / world
        assert sent <= result.sent <= sent * 1.01, (stage, result.sent, sent)

        model, losses = example.make_model(), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = zs.shard(model, optimizer, stage=stage)
        for step in range(STEPS):
            inputs, targets = example.make_batch(rank, step)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        state = engine.full_state_dict(rank0_only=False)
        engine.close()
        weights = torch.cat([state[name].flatten() for name, _ in model.named_parameters()])
        if not torch.equal(weights, first.weights) or losses != first.losses:
            differs.append(f"the library, stage {stage}")
    for name, sharded_from in (("weights", 3), ("gradients", 2), ("moments", 1)):
        whole = num_bytes * (2 if name == "moments" else 1)
        for stage, of in held.items():
            expected = whole / world if stage >= sharded_from else whole
            assert expected <= of[name] <= expected * 1.01, (name, stage, of[name], expected)
    assert differs == []


def test_zero_by_hand_is_short_and_needs_only_torch() -> None:
    text = SCRIPT.read_text()
    assert text.count("\n") <= 250
    assert "import zeroshard" not in text and "from zeroshard" not in text
