"""Unite the parameters and param groups of all pipeline stages of a mesh.

    stage pp=0    embed.weight, layers.0.weight     groups: decay [...], no decay [...]
    stage pp=1    layers.1.weight, head.weight      groups: decay [...], no decay [...]
    checkpoint    all of these names, once          groups: decay [...], no decay [...]

A name that two stages have is one parameter if it is the same there, bit for bit: the first stage
writes it, and every stage reads it. Else it is refused: the stages have trained it apart.

Invariant: every rank comes to the same union, or all raise. Cost: one exchange of names, shapes and
options, and a digest of what several stages have; nothing where all ranks are data parallel.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from zeroshard.checkpoint.manifest import Entries, ParameterEntry, digest
from zeroshard.checkpoint.rank_part import Experts, RankPart, names_of, persistent_buffers
from zeroshard.checkpoint.shard_files import opened
from zeroshard.core.sliced_digest import placed_sum
from zeroshard.errors import CheckpointError
from zeroshard.optim.several import class_name
from zeroshard.runtime.engine import Engine, states_of

_CALL = "zs.save()"


@dataclass(frozen=True)
class _PipelineStage:
    name: str  # "pp=1"
    parameters: Entries
    groups: list[dict[str, Any]]
    optimizer: str  # its class


_STAGE = TypeAdapter(_PipelineStage)


def unite(engine: Engine, part: RankPart) -> None:
    """Give `part` the names of the parameters and param groups of all stages, and take out the
    tensors that an earlier stage holds. Collective.

    Raises CheckpointError, on every rank, for a name that stages have with other contents.
    """
    states = states_of(engine)
    if not states.everyone.places:
        return
    stages = _stages(engine, part)
    for stage in stages:
        if stage.optimizer != stages[0].optimizer:
            named = {one.name: one.optimizer or "none" for one in (stages[0], stage)}
            raise CheckpointError(
                f"the stages have other optimizers ({named}): give every stage one of the same"
                " class, or save each under a directory of its own"
            )
    first: dict[str, str] = {}
    again: list[tuple[str, str]] = []  # names, and the stages that have them again
    for stage in stages:
        for name, entry in stage.parameters.items():
            if name not in first:
                first[name] = stage.name
                continue
            again.append((name, stage.name))
            before = next(one for one in stages if one.name == first[name]).parameters[name]
            if entry != before:
                raise CheckpointError(
                    f"parameter {name!r} is {_text(before)} at {first[name]} of the mesh and"
                    f" {_text(entry)} at {stage.name}: give parameters of stages names of their own"
                )
    if again:
        _refuse_other_numbers(engine, part, again, first)
    mine = {name for name, stage in again if stage == states.everyone.stage}
    part.stored = [one for one in part.stored if one[0].parameter not in mine]
    part.parameters = {name: one for stage in stages for name, one in stage.parameters.items()}
    part.groups = united_groups([stage.groups for stage in stages])


def names_elsewhere(engine: Engine, call: str) -> set[str]:
    """Return all names of parameters and buffers that other stages, or other ranks of experts,
    have and this one has not. Collective.
    """
    states, experts = states_of(engine), Experts.of(engine)
    mine = {
        *(one for names in names_of(engine.module).values() for one in map(experts.name, names)),
        *persistent_buffers(engine.module),
    }
    every = mine | experts.divided()
    if not states.everyone.places:
        return every - mine
    told = states.everyone.share(sorted(every) if engine.rank == 0 else [], call)
    return {name for names in told for name in names} - mine


def rank_there(engine: Engine, world: int, places: Sequence[str]) -> int | None:
    """Return which of the `world` ranks that saved at `places` had this rank's place; None where
    the ranks were laid out in another way.
    """
    states = states_of(engine)
    if set(places) != set(states.everyone.places) or world != states.everyone.size:
        return None
    rank = states.everyone.rank
    return places.index(states.everyone.places[rank]) if places else rank


def united_groups(stages: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the param groups of all `stages`: a group joins that with its options, first of all
    the one in its own place.
    """
    out: list[dict[str, Any]] = []
    for groups in stages:
        taken: set[int] = set()
        for index, group in enumerate(groups):
            alike = [
                place
                for place, other in enumerate(out)
                if place not in taken and other["options"] == group["options"]
            ]
            if alike:
                place = index if index in alike else alike[0]
                known = set(out[place]["params"])
                params = [name for name in group["params"] if name not in known]
                out[place] = {**out[place], "params": [*out[place]["params"], *params]}
            else:
                place = len(out)
                out.append(group)
            taken.add(place)
    return out


def _stages(engine: Engine, part: RankPart) -> list[_PipelineStage]:
    """Return every stage, in mesh order. Collective."""
    states, told = states_of(engine), "null"
    if engine.rank == 0:  # of a data parallel group; its ranks have the same
        kind = "" if engine.optimizer is None else class_name(engine.optimizer)
        stage = _PipelineStage(states.everyone.stage, part.parameters, part.groups, kind)
        told = json.dumps(vars(stage), default=vars)
    answers = [json.loads(answer) for answer in states.everyone.exchange(told.encode(), _CALL)]
    stages = [_STAGE.validate_python(raw) for raw in answers if raw is not None]
    return list({stage.name: stage for stage in reversed(stages)}.values())[::-1]


def _refuse_other_numbers(
    engine: Engine, part: RankPart, again: Iterable[tuple[str, str]], first: dict[str, str]
) -> None:
    """Raise CheckpointError for a parameter with numbers that differ between stages. Collective."""
    names = {name for name, _ in again}
    sums: dict[str, dict[str, int]] = {}
    for entry, numbers in part.stored:
        if entry.parameter in names:
            kinds = sums.setdefault(entry.parameter, {})
            box = int(digest(repr((entry.box, entry.dtype)).encode())[:16], 16)
            with opened(numbers) as tensor:
                number_here = placed_sum(tensor, entry.start) + box * (entry.stop - entry.start)
            kinds[entry.kind] = kinds.get(entry.kind, 0) + number_here
    everyone = states_of(engine).everyone
    total: dict[tuple[str, str], dict[str, int]] = {}  # by stage and name, of each kind
    for stage, found in everyone.share([everyone.stage, sums], _CALL):
        for name, kinds in found.items():
            held = total.setdefault((stage, name), {})
            for kind, number in kinds.items():
                held[kind] = (held.get(kind, 0) + number) % (1 << 64)
    for name, stage in again:
        if total.get((stage, name)) != total.get((first[name], name)):
            raise CheckpointError(
                f"parameter {name!r} is at {first[name]} and at {stage} of the mesh, with other"
                " numbers: give each stage a name of its own for it, or keep them alike (reduce"
                " their gradients) before you save"
            )


def _text(entry: ParameterEntry) -> str:
    kind = "trained" if entry.trained else "frozen"
    also = f", also called {list(entry.aliases)}" if entry.aliases else ""
    return f"{list(entry.shape)} ({kind}, stride {list(entry.stride)}{also})"
