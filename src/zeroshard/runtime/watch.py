"""Whether the model still is the one that was sharded: parameters that came or went since would
silently not be trained.

    model.blocks.append(Block())            a new parameter: no unit gathers it, no rank averages
                                            its gradient, no optimizer steps it
    model.head = nn.Linear(8, 8)            the same, and the sharded head is stepped without ever
                                            being used

A step refuses both by name. Frozen parameters that came later (adapters for inference, say) are
left alone.

Cost: per step the identities of all modules and parameters are compared as one list: 10
microseconds for 300 of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import nn

from zeroshard.errors import ConfigError, StateError
from zeroshard.runtime.unit import Unit

_REMEDY = (
    "change the model before shard(), or call engine.close(), change it, build the optimizer again"
    " and shard() again"
)


class Watch:
    """The modules and parameters of one sharded model."""

    def __init__(self, model: nn.Module, units: Sequence[Unit]) -> None:
        self._model = model
        segments = [segment for unit in units for segment in unit.segments]
        self._sharded = {id(parameter) for one in segments for parameter in one.parameters}
        self._frozen = [
            (name, parameter)
            for segment in segments
            if segment.grad is None
            for name, parameter in zip(segment.names, segment.parameters, strict=True)
        ]
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._remember()

    def check(self) -> None:
        """Raise StateError where a trained parameter was added, or one of ours is no longer in
        the model.
        """
        if list(map(id, chain.from_iterable(map(dict.values, self._tables)))) == self._ids:
            return
        there = {
            id(parameter): (name, parameter.requires_grad)
            for name, parameter in self._model.named_parameters()
        }
        for key, (name, trained) in there.items():
            if trained and key not in self._sharded:
                raise StateError(
                    f"parameter {name!r} came into the model after shard() and is not trained:"
                    f" {_REMEDY}"
                )
        for key in self._sharded:
            if key not in there:
                raise StateError(
                    f"parameter {self._names[key]!r} was taken out of the model after shard():"
                    f" {_REMEDY}"
                )
        self._remember()

    def check_frozen(self) -> None:
        """Raise ConfigError where a parameter that was frozen at shard() requires a gradient
        now.
        """
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigError(
                    f"parameter {name!r} was frozen when the model was sharded and requires a"
                    " gradient now: set requires_grad before shard(), or close() the engine and"
                    " shard() again"
                )

    def _remember(self) -> None:
        self._tables: list[dict[str, Any]] = []
        for module in self._model.modules():
            self._tables += [module._modules, module._parameters]
        # so that no other object takes their ids
        self._held = [*chain.from_iterable(entries.values() for entries in self._tables)]
        self._ids = list(map(id, self._held))
