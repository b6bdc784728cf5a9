"""A "universal" checkpoint of DeepSpeed's: what its ds_to_universal writes, one folder a parameter.

    DIR/mp_rank_00_model_states.pt        names, shapes, buffers, frozen weights, as in any other
    DIR/zero/optimizer_state.pt           param groups
    DIR/zero/NAME/fp32.pt                 the whole master; exp_avg.pt, exp_avg_sq.pt, step.pt

Each tensor is whole, perhaps flat and padded (stage 3), perhaps in a dictionary under "param".
Stages 1 and 2 also leave a folder with fp32.pt for every buffer, frozen weight and second name of a
tied one: those are taken from the model's file. Read as deepspeed.py reads the others. Tensor
parallel ones have been merged: nothing of them is lost. Experts and pipelines raise ConfigError
there. Source: checkpoint/ds_to_universal.py of DeepSpeed 0.19.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from zeroshard.checkpoint.manifest import STATE, VALUE
from zeroshard.errors import CheckpointError
from zeroshard.formats.importer import Importer

_MASTER = "fp32"


class UniversalFiles:
    """The folder ``zero`` of a universal checkpoint."""

    def __init__(self, directory: Path, load: Callable[[Path], Any]) -> None:
        """`load` reads one file as data. Raises CheckpointError without a parameter's folder."""
        self.directory = directory / "zero"
        self._load = load
        self.names = {
            path.name
            for path in self.directory.iterdir()
            if path.is_dir() and not path.is_symlink()
        }
        if not self.names:
            raise CheckpointError(f"{self.directory} holds no parameter")

    def groups(self) -> list[Mapping[str, Any]]:
        """Return the optimizer's param groups, which number their parameters."""
        path = self.directory / "optimizer_state.pt"
        content = self._load(path) if path.exists() else {}
        return list(content.get("param_groups") or ())

    def take(
        self,
        shapes: Sequence[Mapping[str, tuple[int, ...]]],
        saved: Iterable[str],
        importer: Importer,
    ) -> dict[str, dict[str, Any]]:
        """Take masters and moments of the parameters; return the numbers beside them, by name.
        Of what else is `saved` in the model's file, folders are passed over.
        """
        known = [name for group in shapes for name in group]
        for name in sorted(self.names - {*known, *saved}):
            raise CheckpointError(f"{self.directory} has {name!r}, and the model's file has not")
        scalars: dict[str, dict[str, Any]] = {}
        held: dict[str, set[str]] = {}  # the tensors that each parameter has
        for name in known:
            if name not in self.names:  # which are those of folders there, and no paths
                raise CheckpointError(f"{self.directory} has no folder for parameter {name!r}")
            shape = importer.parameters[name].shape
            for path in sorted((self.directory / name).glob("*.pt")):
                value = self._value(path)
                if path.stem == "step" or not isinstance(value, torch.Tensor) or not value.dim():
                    scalars.setdefault(name, {})[path.stem] = value
                    continue
                held.setdefault(name, set()).add(path.stem)
                kind = VALUE if path.stem == _MASTER else f"{STATE}{path.stem}"
                importer.piece(name, kind, 0, _whole(path, value, shape))
        self._require_all(known, held)
        return scalars

    def _require_all(self, known: Sequence[str], held: Mapping[str, set[str]]) -> None:
        """Raise CheckpointError where a parameter lacks a tensor of those that others have."""
        sets = {frozenset(one) for one in held.values()}
        for name in known:
            mine = held.get(name, set())
            more = next((other - mine for other in sets if mine < other), frozenset[str]())
            for kind in sorted({_MASTER} - mine or more):
                raise CheckpointError(f"{self.directory / name} lacks {kind}.pt, or a tensor in it")

    def _value(self, path: Path) -> Any:
        content = self._load(path)
        return content["param"] if isinstance(content, dict) else content


def _whole(path: Path, value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the elements of a parameter, without padding. Raises CheckpointError."""
    numel = prod(shape)
    flat = value.reshape(-1)
    is_padded = value.dim() == 1 and flat.numel() > numel
    if flat.numel() != numel and not is_padded:
        raise CheckpointError(f"{path} has {flat.numel()} elements, and the parameter {numel}")
    return flat[:numel]
