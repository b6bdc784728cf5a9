"""The manifest of a step, put together from what each rank says of its own file.

    heading (one rank's)    step, world, parameters, param groups, ...
    index (each rank's)     its file, the tensors in it with their hashes, its states

Both are JSON: they lie beside the files of a save under way (``save.py``), and in the notes of a
step that is kept in memory (``keeping.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zeroshard._version import __version__
from zeroshard.checkpoint.manifest import Manifest, ShardEntry, TensorEntry
from zeroshard.checkpoint.pieces import RankPart
from zeroshard.runtime.engine import Engine, states_of

__all__ = ["heading_of", "index_of", "manifest_of"]


def index_of(part: RankPart, file: ShardEntry, tensors: Sequence[TensorEntry]) -> dict[str, Any]:
    """Return what this rank says of its file."""
    return {
        "file": vars(file),
        "tensors": [entry.to_json() for entry in tensors],
        "states": part.states,
        "scalars": part.scalars,
    }


def heading_of(engine: Engine, part: RankPart, step: int) -> dict[str, Any]:
    """Return what is the same on all ranks."""
    optimizer = None
    if engine.optimizer is not None:
        optimizer = {"class": type(engine.optimizer).__name__, "groups": part.groups}
    everyone = states_of(engine).everyone
    return {
        "step": step,
        "world": everyone.size,
        "written_by": f"zeroshard {__version__}, torch {torch.__version__}",
        "policy": engine.policy.name,
        "precision": engine.precision.describe(),
        "parameters": {name: vars(entry) for name, entry in part.parameters.items()},
        "optimizer": optimizer,
        "places": everyone.places,
    }


def manifest_of(heading: dict[str, Any], indices: Sequence[dict[str, Any]]) -> Manifest:
    """Return the manifest of a step: a rank's `heading`, the `indices` of all ranks in order."""
    states: dict[str, Any] = dict(indices[0]["states"])
    for name, value in states.items():
        if "same" not in value:
            states[name] = {"ranks": [index["states"][name]["own"] for index in indices]}
    optimizer = heading["optimizer"]
    if optimizer is not None:
        scalars = dict[str, Any]()
        for index in reversed(indices):
            scalars |= index["scalars"]
        optimizer = {**optimizer, "scalars": scalars}
    return Manifest.build(
        {
            **heading,
            "optimizer": optimizer,
            "files": [index["file"] for index in indices],
            "tensors": [entry for index in indices for entry in index["tensors"]],
            "states": states,
        }
    )
