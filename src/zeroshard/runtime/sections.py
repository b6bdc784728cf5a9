"""Where a model is cut for ``engine.accumulate()``: modules that run for all micro-batches before
the next one does.

A section is a module whose forward needs units: a block, or what holds the parameters of a unit
that no block spans (an embedding, a head). Everything else of a forward runs between sections, and
the units that it needs (parameters of a module around sections) are held as long as that lasts::

    Net                 holds `scale` itself: around
      embed             section
      blocks.0 .. 3     section each; tiles and experts inside belong to it
      norm, head        section each

Invariants: no section lies inside another; every parameter belongs to a section's module or to a
module around. The cut depends on the module tree alone, so that it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from zeroshard.runtime.unit import Unit
from zeroshard.runtime.units import UnitPlan


@dataclass(frozen=True, eq=False)
class Section:
    """A module, and the units that its forward needs."""

    name: str
    module: nn.Module
    units: tuple[Unit, ...]

    @cached_property
    def trains(self) -> bool:
        """Whether any of its parameters has a gradient."""
        return any(parameter.requires_grad for parameter in self.module.parameters())


@dataclass(frozen=True)
class Sections:
    """The sections of a model, and the units of modules around them."""

    sections: tuple[Section, ...]
    around: tuple[Unit, ...]


def sections_of(model: nn.Module, plans: Sequence[UnitPlan], units: Sequence[Unit]) -> Sections:
    """Return where `model` is cut, whose `units` were planned as `plans`."""
    needing = {id(module) for plan in plans for _, module in (*plan.roots, *plan.owners)}
    in_order = [(name, module) for name, module in model.named_modules() if id(module) in needing]
    blocks = _blocks(plans)
    found: list[tuple[str, nn.Module]] = []
    around: set[int] = set()
    covered: set[int] = set()
    for name, module in in_order:
        is_block = id(module) in blocks and module is not model and not _parts(module) & blocks
        if is_block and id(module) not in covered:
            found.append((name, module))
            covered |= {id(module), *_parts(module)}
    for name, module in in_order:
        if id(module) in covered:
            continue
        if module is model or _parts(module) & covered:
            around.add(id(module))
        else:
            found.append((name, module))
            covered |= {id(module), *_parts(module)}
    held = [
        unit
        for plan, unit in zip(plans, units, strict=True)
        if any(id(module) in around for _, module in plan.owners)
    ]
    unit_of = {id(p): unit for unit in units for s in unit.segments for p in s.parameters}
    sections = tuple(Section(name, module, _units(module, unit_of)) for name, module in found)
    return Sections(sections, tuple(held))


def _blocks(plans: Sequence[UnitPlan]) -> set[int]:
    """Return the modules that span units, but for parts of blocks: tiles, and modules with a mesh
    of their own.
    """
    return {
        id(module)
        for plan in plans
        for _, module in plan.roots
        if not plan.pattern and not getattr(type(module), "unit_of_its_own", False)
    }


def _parts(module: nn.Module) -> set[int]:
    """Return the modules inside `module`."""
    return {id(part) for part in module.modules() if part is not module}


def _units(module: nn.Module, unit_of: dict[int, Unit]) -> tuple[Unit, ...]:
    needed = dict.fromkeys(unit_of[id(parameter)] for parameter in module.parameters())
    return tuple(sorted(needed, key=lambda unit: unit.index))
