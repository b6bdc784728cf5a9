"""700M parameters: no rank ever holds more than its shards, two units and a little."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.support.harness import ROOT
from tests.support.large_model import LAYERS, VOCABULARY, WIDTH

MB = 2**20


def _write_checkpoint(directory: Path) -> int:
    """Write 2.8 GB in shards of 6 blocks each, one after another; return the bytes."""
    shapes = {f"attention.{index}.weight": (WIDTH, WIDTH) for index in range(4)} | {
        "up.weight": (4 * WIDTH, WIDTH),
        "down.weight": (WIDTH, 4 * WIDTH),
    }
    weight_map, total = {}, 0
    for first in range(0, LAYERS, 6):
        tensors = {
            f"blocks.{layer}.{name}": torch.full(shape, float(layer))
            for layer in range(first, first + 6)
            for name, shape in shapes.items()
        }
        if first == 0:
            tensors |= {
                "embed.weight": torch.ones(VOCABULARY, WIDTH),
                "head.weight": torch.ones(VOCABULARY, WIDTH),
            }
        file = f"model-{first // 6:05d}.safetensors"
        save_file(tensors, directory / file)
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.numel() * 4 for tensor in tensors.values())
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return total


@pytest.mark.slow
def test_building_sharding_and_loading_700m_parameters_stays_within_shards_and_two_units(
    tmp_path: Path,
) -> None:
    total = _write_checkpoint(tmp_path)
    script = ROOT / "tests" / "support" / "large_model.py"
    command = [
        sys.executable,
        "-m",
        "zeroshard",
        "run",
        "--nproc",
        "2",
        str(script),
        str(tmp_path),
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        seen = json.loads((tmp_path / f"{rank}.json").read_text())
        print({name: round(value / MB) for name, value in seen.items()})
        assert seen["parameters"] > 700e6 and total > 2.8e9
        assert seen["deferred"] < 100 * MB + seen["unit"], seen
        for when in ("sharded", "loaded"):
            assert seen[when] <= seen["rest"] + 2 * seen["unit"] + 300 * MB, (when, seen)
        assert seen["bytes_read"] <= total / 2 + 50 * MB, seen
