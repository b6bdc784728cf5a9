"""The monitors of a DeepSpeed configuration write DeepSpeed's names, loss and rate of each step; in
the slow set with the real packages tensorboard and wandb.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.harness import run_ranks
from zeroshard.deepspeed.helpers import logger
from zeroshard.integrations import deepspeed

RATES = [0.0, 0.1, 0.2]  # of a warmup
SAMPLES = [4, 8, 12]  # of two micro-batches each
NAMES = {"Train/Samples/train_loss", "Train/Samples/lr"} | {
    f"Train/Samples/elapsed_time_ms_{part}" for part in ("forward", "backward", "step")
}


def _losses(**monitors: Any) -> list[float]:
    """Return the losses of three steps with these monitors."""
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2}, "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "scheduler": {"type": "WarmupLR", "params": {
            "warmup_num_steps": 10, "warmup_max_lr": 1.0, "warmup_type": "linear",
        }},
        "wall_clock_breakdown": True, **monitors,
    }  # fmt: skip
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(model=nn.Linear(4, 1), config=config)
    losses = []
    for _ in SAMPLES:
        two = [engine(torch.randn(2, 4)).square().mean() for _ in range(2)]
        for loss in two:
            engine.backward(loss)
            engine.step()
        losses.append(torch.stack(two).mean().item())
    engine.destroy()
    return losses


def test_the_csv_monitor_writes_a_file_of_each_number(tmp_path: Path) -> None:
    losses = _losses(csv_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "a"})
    files = {path.stem: path.read_text().splitlines() for path in (tmp_path / "a").iterdir()}
    assert set(files) == {name.replace("/", "_") for name in NAMES}
    pairs = {"lr": RATES, "train_loss": losses}
    for name, values in pairs.items():
        header, *rows = files[f"Train_Samples_{name}"]
        assert header == f"step,{name}"
        found = [(int(step), float(value)) for step, value in (row.split(",") for row in rows)]
        assert found == list(zip(SAMPLES, map(pytest.approx, values), strict=True))


def test_wandb_gets_the_sections_project_group_and_team(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, Any]] = []
    logged: list[tuple[str, float, int]] = []

    def log(data: dict[str, float], step: int) -> None:
        logged.extend((name, value, step) for name, value in data.items())

    module = SimpleNamespace(init=lambda **options: begun.append(options), log=log)
    monkeypatch.setitem(sys.modules, "wandb", module)
    losses = _losses(wandb={"enabled": True, "group": "g", "team": "t"})
    assert begun == [{"project": "deepspeed", "group": "g", "entity": "t"}]
    assert {name for name, _, _ in logged} == NAMES
    steps = zip(SAMPLES, losses, strict=True)
    assert [(step, value) for name, value, step in logged if name.endswith("loss")] == list(steps)


def _watched(rank: int, world: int, path: str, before: bool) -> list[str]:
    told, handler = list[str](), logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    folder = Path(path, "j")
    if before and rank == 0:
        folder.write_text("")
    dist.barrier()
    keys = {"enabled": True, "output_path": path, "job_name": "j"}
    config = {
        "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "csv_monitor": keys,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=nn.Linear(4, 1), config=config)
    for step in range(4):
        if not before and step == 2 and rank == 0:
            shutil.rmtree(folder)
        engine.backward(engine(torch.ones(2, 4)).mean())
        engine.step()
    engine.destroy()
    logger.removeHandler(handler)
    return [line for line in told if line.startswith("csv_monitor")]


@pytest.mark.parametrize("before", [True, False], ids=["at the start", "in the middle"])
def test_a_monitor_that_cannot_write_says_so_once_and_the_training_goes_on(
    tmp_path: Path, before: bool
) -> None:
    first, second = run_ranks(2, _watched, str(tmp_path), before)
    assert len(first) == 1 and second == []
    assert re.search("nothing (more )?is written: .*(File exists|No such file)", first[0])


def test_a_package_that_is_not_installed_is_a_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on = {"enabled": True}
    for name in ("tensorboard", "torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(caplog.handler)
    try:
        _losses(tensorboard=on, wandb=on, comet=on)
    finally:
        logger.removeHandler(caplog.handler)
    for name in ("tensorboard", "wandb"):
        line = f"{name}: nothing is written without its package: pip install {name}"
        assert caplog.text.count(line) == 1
    assert "comet: nothing is written for it here; log engine.memory()" in caplog.text


@pytest.mark.slow
def test_the_file_of_events_has_names_and_numbers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="NOTHING WAS CHECKED: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = _losses(tensorboard={"enabled": True, "output_path": f"{tmp_path}/", "job_name": "a"})
    events = EventAccumulator(str(tmp_path / "a"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == NAMES
    for name, values in (("lr", RATES), ("train_loss", losses)):
        found = [(one.step, one.value) for one in events.Scalars(f"Train/Samples/{name}")]
        assert found == list(zip(SAMPLES, map(pytest.approx, values), strict=True))


@pytest.mark.slow
def test_wandb_keeps_names_and_numbers_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="NOTHING WAS CHECKED: pip install wandb")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    losses = _losses(wandb={"enabled": True, "project": "p"})
    wandb.finish()
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    written = path.read_bytes()  # records of protobuf, with numbers as JSON
    for text in (*NAMES, *map(repr, losses), *map(repr, RATES[1:])):
        assert text.encode() in written, text
