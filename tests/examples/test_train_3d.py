"""examples/train_3d.py: the same losses on any axes as in one process, and checkpoints that go from
one set of axes to another.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

from tests.support.harness import ROOT

SCRIPT = ROOT / "examples" / "train_3d.py"
STEPS = 10
SMALL = Namespace(
    dp=1, tp=1, pp=1, micro_batches=2, batch=8, time=16, layers=4, width=32, heads=2, lr=3e-3
)


def _run(axes: str, *arguments: str, steps: int = STEPS) -> dict[int, float]:
    """Return the losses by step."""
    sizes = dict(zip(("dp", "tp", "pp"), map(int, axes.split("x")), strict=True))
    options = [f"--{name}={size}" for name, size in sizes.items()]
    small = ("micro_batches", "batch", "time", "layers", "width", "heads")
    options += [f"--{name.replace('_', '-')}={getattr(SMALL, name)}" for name in small]
    ranks = sizes["dp"] * sizes["tp"] * sizes["pp"]
    command = [sys.executable, "-m", "zeroshard", "run", "--nproc", str(ranks), str(SCRIPT)]
    done = subprocess.run(
        [*command, *options, f"--steps={steps}", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = re.findall(r"step +(\d+) +loss ([\d.]+) nats/byte", done.stdout)
    return {int(step): float(loss) for step, loss in found}


@pytest.fixture(scope="module")
def expected() -> dict[int, float]:
    """The losses of one process without any library, by step."""
    specification = importlib.util.spec_from_file_location("train_3d", SCRIPT)
    assert specification is not None and specification.loader is not None
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    model, data = example.Llama(SMALL, 0), example.text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=SMALL.lr)
    losses = {}
    for step in range(2 * STEPS):
        inputs, targets = example.batch_of(data, SMALL, step, 0)
        loss = example.loss_of(model(inputs), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses[step + 1] = loss.item()
    return losses


def _check(losses: dict[int, float], expected: dict[int, float], *steps: int) -> None:
    assert sorted(losses) == sorted(steps)
    for step, loss in losses.items():
        assert loss == pytest.approx(expected[step], abs=2e-4), step


@pytest.mark.slow
def test_two_stages_have_the_losses_of_one_process(expected: dict[int, float]) -> None:
    _check(_run("1x1x2"), expected, 1, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ("2x2x1", ()),
        ("2x1x2", ("--schedule=gpipe", "--policy=zero2")),
        ("1x2x2", ("--policy=zero1",)),
        ("2x2x2", ("--budget=1MiB",)),
    ],
)
def test_all_axes_have_the_losses_of_one_process(
    axes: str, options: tuple[str, ...], expected: dict[int, float]
) -> None:
    _check(_run(axes, *options), expected, 1, STEPS)


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_goes_on_from_its_checkpoint_on_other_axes(
    expected: dict[int, float], tmp_path: Path
) -> None:
    where = f"--checkpoint={tmp_path}"
    _check(_run("2x2x2", where), expected, 1, STEPS)
    _check(_run("4x1x1", where, steps=2 * STEPS), expected, STEPS + 1, 2 * STEPS)
