"""Where ``engine.accumulate()`` cuts a model: pure functions over the module tree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

import zeroshard as zs
from tests.support.training import Block, Net
from zeroshard.runtime.accumulate import Sections, sections_of
from zeroshard.runtime.units import partition_units


class _Unit(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def _cut(model: nn.Module, units: Any = None) -> Sections:
    plans = partition_units(model, units)
    made: list[Any] = [
        _Unit(
            index=index,
            name=plan.name,
            segments=[SimpleNamespace(parameters=list(plan.parameters.values()))],
        )
        for index, plan in enumerate(plans)
    ]
    return sections_of(model, plans, made)


def _shown(cut: Sections) -> dict[str, list[str]]:
    return {section.name: [unit.name for unit in section.units] for section in cut.sections}


def test_blocks_and_the_modules_of_units_without_one_are_sections() -> None:
    cut = _cut(Net(layers=2))
    assert _shown(cut) == {
        "blocks.0": ["blocks.0"],
        "blocks.1": ["blocks.1"],
        "embed": ["embed.weight"],
        "norm": ["norm.weight"],
        "head": ["norm.weight"],
    }
    assert cut.around == ()


def test_a_module_around_blocks_is_no_section_and_its_units_are_held() -> None:
    model = Net(layers=2)
    model.scale = nn.Parameter(torch.ones(19))
    cut = _cut(model)
    assert "" not in _shown(cut)
    assert [unit.name for unit in cut.around] == ["scale"]


def test_a_chosen_module_around_chosen_blocks_is_no_section() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Block(3), Block(3)))
    assert list(_shown(_cut(model, ["1", "1.0", "1.1", "0"]))) == ["0", "1.0", "1.1"]
    assert list(_shown(_cut(model, ["1"]))) == ["1", "0"]


def test_tiles_belong_to_their_block() -> None:
    model = Net(layers=2)
    zs.nn.tile_linears(model, {"blocks.0.up": 2, "blocks.1.up": 2})
    cut = _shown(_cut(model))
    assert set(cut) == {"blocks.0", "blocks.1", "embed", "norm", "head"}
    assert len(cut["blocks.0"]) == 3


def test_a_tied_parameter_belongs_to_every_section_that_uses_it() -> None:
    model = Net(layers=2)
    model.head.weight = model.embed.weight
    cut = _shown(_cut(model))
    assert cut["embed"] == cut["head"] == ["embed.weight"]
