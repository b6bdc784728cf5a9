"""Which modules of a model lie over meshes of their own: those whose names match a pattern of
``shard(mesh_of=)``, and all inside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from zeroshard.errors import ConfigError


def has_parameters(module: nn.Module) -> bool:
    """Whether a module or any inside it holds a parameter."""
    return next(module.parameters(), None) is not None


def matching(pattern: str, model: nn.Module) -> bool:
    """Whether `pattern` matches a module of `model` that holds parameters."""
    return any(
        name and fnmatchcase(name, pattern) and has_parameters(module)
        for name, module in model.named_modules()
    )


def refuse_unmatched(model: nn.Module, patterns: Sequence[str]) -> None:
    """Raise ConfigError for a pattern that matches nothing of `model`."""
    for pattern in patterns:
        if not matching(pattern, model):
            raise ConfigError(
                f"mesh_of: {pattern!r} matches no module of {type(model).__name__} that holds"
                " parameters; names are those of model.named_modules()"
            )


class OwnMeshes:
    """Which modules of a model lie over meshes of their own."""

    def __init__(self, model: nn.Module, patterns: Sequence[str]) -> None:
        """Raises ConfigError; see `partition_units`."""
        self._pattern_of: dict[str, str] = {}  # of the outermost modules that match, by name
        self.modules: list[tuple[str, nn.Module]] = []  # these
        for name, module in model.named_modules() if patterns else ():
            self._match(name, module, patterns)
        refuse_unmatched(model, patterns)
        if patterns:
            self._refuse_ties(model)

    def _match(self, name: str, module: nn.Module, patterns: Sequence[str]) -> None:
        found = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        if not name or not found or not has_parameters(module):
            return
        around = self.of(name)
        meant = list(dict.fromkeys([around, *found] if around else found))
        if len(meant) > 1:
            raise ConfigError(
                f"mesh_of: module {name!r} belongs to {meant[0]!r} and to {meant[1]!r}: let one"
                " pattern match it"
            )
        if not around:
            self._pattern_of[name] = found[0]
            self.modules.append((name, module))

    def of(self, name: str) -> str:
        """Return the pattern of the module called `name`, "" where it has no mesh of its own."""
        return self._pattern_of.get(self.module_of(name), "")

    def module_of(self, name: str) -> str:
        """Return which module that a pattern matches the one called `name` is or is in, "" where
        none is.
        """
        parts = name.split(".")
        names = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        return next((one for one in names if one in self._pattern_of), "")

    def _refuse_ties(self, model: nn.Module) -> None:
        patterns: dict[int, tuple[str, str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            pattern = self.of(name.rpartition(".")[0])
            first, other = patterns.setdefault(id(parameter), (name, pattern))
            if other != pattern:
                raise ConfigError(
                    f"mesh_of: parameters {first!r} and {name!r} are one tensor, which would lie"
                    " over two meshes: untie them, or let a pattern match both of their modules"
                )
