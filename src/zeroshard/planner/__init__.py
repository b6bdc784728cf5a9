"""Know before the launch: what rests where, what travels, whether it fits, and about how long a
step takes.

model.py        the parameters of a model, in the runtime's units, and its activations; a training
                run: precision, optimizer, batch, codecs, the fraction of a state that leaves
families.py     the same from files: config.json, headers of safetensors
machine.py      GPUs, links, host, disk; presets in machines.toml, or this machine, as `zeroshard
                doctor` has measured it
axes.py         tensor and pipeline parallelism: grids of ranks, and the part of one
exact.py        bytes at rest and on the wire, as the engine's: from core/
replay.py       the engine's schedule, asked once: bytes, jobs and frames are readings of it
peak.py         peaks: a model, said in docs/planner.md; activations in closed form
simulate.py     one step, simulated: durations.py says how long its parts take (and a checkpoint),
                core/timeline.py when they run; pipeline_time.py: of a pipeline
rows.py         one line: a row, its tiers, bytes and seconds; ranks that are not alike
grid.py         ... on one grid of tp x pp x dp ranks
plan.py         every row and tier mix, the recommendation, JSON, a configuration; a sweep
modules.py      zs.plan and policy="auto": what takes torch, a module's units; activations.py: its
                activations
walk.py         one step, frame by frame, for the eye; film.py: as a film, and any picture
plan_command.py zeroshard plan; plan_table.py: its tables; walk_command.py: zeroshard walk

Invariant: exact.py asks core/ for every byte and adds up; nothing here knows a row by name, except
which tier mixes are worth a line. torch is not imported. docs/design/planner.md has the decisions.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zeroshard.planner.axes import Axes
    from zeroshard.planner.machine import Machine
    from zeroshard.planner.model import ModelShape, Training, describe
    from zeroshard.planner.plan import Plan, Recommendation, make_plan
    from zeroshard.planner.rows import PlannedRow

__all__ = [
    "Axes", "Machine", "ModelShape", "Plan", "PlannedRow", "Recommendation", "Training", "describe",
    "make_plan",
]  # fmt: skip

# looked up when they are first used: the command's options stand in this package, too
_HOME_OF = {
    "Axes": "axes", "Machine": "machine", "ModelShape": "model", "describe": "model",
    "Plan": "plan", "Recommendation": "plan", "make_plan": "plan", "PlannedRow": "rows",
    "Training": "model",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
