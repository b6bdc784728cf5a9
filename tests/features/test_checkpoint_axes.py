"""Checkpoints know the axes of a mesh: what any layout of (dp, tp, pp) saves, any other loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.harness import run_ranks
from tests.support.mesh_checkpoints import Layout, begin, exported
from tests.support.tensor_parallel import CASES
from tests.support.training import Net
from zeroshard.checkpoint.steps import step_path
from zeroshard.checkpoint.verify import verify

CASE = CASES["sequence and loss"]  # matrices cut by rows and by columns, norms replicated

# ------------------------------------------------------------------------------ any layout to any


def _stages(model: nn.Module, stage: int, count: int) -> None:
    """Leave one of two stages of a Net."""
    assert isinstance(model, Net) and count == 2
    blocks = dict(model.blocks.named_children())
    kept = {name: block for name, block in blocks.items() if int(name) // 2 == stage}
    model.blocks = nn.ModuleDict(kept)  # type: ignore[assignment]
    for name in ("norm", "head") if stage == 0 else ("embed",):
        delattr(model, name)


def _write(rank: int, world: int, name: str, layout: Layout, folder: Path) -> None:
    run = begin(CASES[name], layout)
    run.train(range(2))
    run.save(folder, 1)
    run.engine.close()


def _pass_on(rank: int, world: int, name: str, layout: Layout, source: Path, folder: Path) -> None:
    """Load into a run of zeros, and save."""
    stages = _stages if name == "sequence and loss" else _llama_stages
    run = begin(CASES[name], layout, stages, zeros=True)
    restored = run.load(source)
    assert not [what for what in restored.skipped if not what.startswith("states['rng']")]
    assert run.schedule.last_epoch == 2 and run.optimizer.param_groups[0]["lr"] == 1e-2 * 0.81
    run.save(folder, 1)
    run.engine.close()


def _chain(name: str, first: Layout, others: list[Layout], folder: Path) -> None:
    """Save under the first layout, load and save under each of the others, one after another; all
    of these checkpoints are the same.
    """
    run_ranks(4, _write, name, first, folder / "0", timeout=100)
    expected = exported(folder / "0", 1, folder / "0.pt")
    assert any(key.endswith("|exp_avg_sq") for key in expected)
    for number, layout in enumerate(others, 1):
        source, target = folder / f"{number - 1}", folder / f"{number}"
        run_ranks(4, _pass_on, name, layout, source, target, timeout=100)
        assert verify(step_path(target, 1)) == []
        found = exported(target, 1, folder / f"{number}.pt")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert torch.equal(found[key], value), (layout, key)


def test_a_checkpoint_goes_from_tensor_to_data_to_pipeline_parallel_and_back(
    tmp_path: Path,
) -> None:
    first = Layout.of(dp=2, tp=2)
    others = [
        Layout.of(dp=4),
        Layout.of("zero1", tp=2, dp=2),
        Layout.of("zero1", pp=2, dp=2),
        Layout.of("zero2", pp=2, dp=1, tp=2),
        first,
    ]
    _chain("sequence and loss", first, others, tmp_path)


def _llama_stages(model: Any, stage: int, count: int) -> None:
    """Leave one of two stages of a Llama of two layers."""
    inner = model.llama.model
    inner.layers = nn.ModuleDict({str(stage): inner.layers[stage]})
    if stage == 0:
        del inner.norm, model.llama.lm_head
    else:
        del inner.embed_tokens


LAYOUTS: dict[str, dict[str, int]] = {
    "dp 2, tp 2": {"dp": 2, "tp": 2},
    "dp 4": {"dp": 4},
    "tp 4": {"dp": 1, "tp": 4},
    "pp 2, dp 2": {"pp": 2, "dp": 2},
}
OFFLOADED = {"offload": zs.Offload(optimizer="host")}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("row", "options"),
    [("zero1", {}), ("zero3", {}), ("zero3", OFFLOADED)],
    ids=["zero1", "zero3", "zero3 on the host"],
)
def test_every_layout_of_a_llama_reads_every_other(
    tmp_path: Path, row: str, options: dict[str, Any]
) -> None:
    def layout(name: str) -> Layout:
        return Layout.of(row, options, **LAYOUTS[name])

    tensor, data, wide, pipeline = map(layout, LAYOUTS)
    _chain(
        "llama",
        tensor,
        [data, tensor, wide, tensor, pipeline, tensor, wide, data, pipeline, wide, pipeline, data],
        tmp_path,
    )


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", ["uneven", "empty"])
def test_uneven_and_empty_parts_are_saved_and_loaded(tmp_path: Path, name: str) -> None:
    layouts = [Layout.of(dp=4), Layout.of(dp=1, tp=4), Layout.of("zero1", dp=2, tp=2)]
    _chain(name, Layout.of("zero1", dp=2, tp=2), layouts, tmp_path)
