"""The names of Transformers' ``TrainingArguments(optim=...)``, one line of docs/optimizers.md each:
all are there, they say what the table of rules says, and what is marked as tried trains with the
bits of one process. Packages that are not here were: schedulefree 1.4.1, bitsandbytes 0.50.2,
torchao 0.18, torch-optimi 0.3.3, in a folder on PYTHONPATH.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.harness import run_ranks
from tests.support.training import leaf_loss, plainly_trained, resumed
from zeroshard.optim.copies import REFUSED, RULES

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
PARTS, WHOLE = "equal parts", '`ownership="whole"`'
STEPS, LEAVES = 4, 12


def _lines() -> dict[str, list[str]]:
    """Return class, kind, what runs, and how that is known, by name."""
    rows = re.findall(
        r"^\| ((?:`[a-z0-9_]+`(?:, )?)+) \| `(\S+)`[^|]* \| (.*)\|$", PAGE.read_text(), re.M
    )
    return {
        name.strip("` "): [cls, *(cell.strip() for cell in cells.split("|"))]
        for names, cls, cells in rows
        for name in names.split(",")
    }


def test_each_name_of_transformers_has_a_line() -> None:
    from transformers.training_args import OptimizerNames

    names, lines = {one.value for one in OptimizerNames}, _lines()
    assert names - lines.keys() == set(), "add a line for each to docs/optimizers.md"
    for name, (cls, kind, runs, known) in lines.items():
        package, *_, last = cls.split(".")
        rule = RULES.get(f"{package}.{last}") or RULES.get(package)
        if rule is not None:
            assert kind == rule.kind.name, name
        assert runs.startswith("refused" if kind == REFUSED.name else (PARTS, WHOLE)), name
        assert known in ("tried", "read"), name
        if runs.startswith(PARTS):
            assert kind.startswith("elementwise"), name


# of these, what is installed: a skip would say no more
TRIED = sorted(
    name
    for name, (cls, kind, _, known) in _lines().items()
    if known == "tried" and kind != REFUSED.name and find_spec(cls.partition(".")[0]) is not None
)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 128), nn.Linear(128, 24))


def _make(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model, and the optimizer that Transformers' Trainer makes for it."""
    from transformers import Trainer, TrainingArguments

    model = _model()
    arguments = TrainingArguments("unused", optim=name, learning_rate=0.01, use_cpu=True)
    cls, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    optimizer = cls(model.parameters(), **options)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return model, optimizer


def _train(
    rank: int, world: int, name: str, whole: bool, steps: int, folder: Path
) -> tuple[list[torch.Tensor], str]:
    model, optimizer = _make(name)
    options: Any = {"ownership": "whole"} if whole else {}
    engine = zs.shard(model, optimizer, leaves=LEAVES, units=[nn.Linear], **options)
    kind = engine.explain_optimizer().groups[0].kind
    for step in range(resumed(folder, engine), steps):
        for leaf in engine.leaves(step):
            engine.backward(leaf_loss(model, step, leaf))
        optimizer.step()
        optimizer.zero_grad()
    assert engine.explain_optimizer().groups[0].kind == kind
    zs.save(folder, engine, step=steps)
    full = engine.full_state_dict(rank0_only=False)
    engine.close()
    return [full[name] for name, _ in model.named_parameters()], kind


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_what_was_tried_trains_and_goes_on_elsewhere_with_the_bits_of_one_process(
    name: str, tmp_path: Path
) -> None:
    _, kind, runs, _ = _lines()[name]
    model, optimizer = _make(name)
    expected = plainly_trained(model, _model(), STEPS, LEAVES, leaf_loss, optimizer.step)
    for world, steps in ((2, 2), (3, STEPS)):
        ranks = run_ranks(world, _train, name, runs.startswith(WHOLE), steps, tmp_path)
        assert {told for _, told in ranks} == {kind}
    assert all(map(torch.equal, ranks[0][0], expected))
