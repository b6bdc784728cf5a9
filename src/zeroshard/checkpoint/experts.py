"""Names in a checkpoint of the experts that ranks divide (``shard(mesh_of=)``).

Each rank counts its own from 0. In a checkpoint, as in a model with all of them, one count goes
over the ranks along the other dimensions of their mesh::

    'ep' 2                         rank 0 of it                rank 1
    a list of modules              experts.0  experts.1        experts.0  experts.1
    in the checkpoint              experts.0  experts.1        experts.2  experts.3
    one parameter, [2, 12, 20]     [0:2] of [4, 12, 20]        [2:4] of [4, 12, 20]

A name has an expert's number where the name of the module that the pattern matches ends with a
number, or where one follows; a parameter without is cut along its first dimension.

The names of other parameters are those of the model's ``state_dict()``, hooks included.

Invariant: ranks agree without a message, since shard() has compared all names and shapes. Ranks
that divide the experts otherwise, or one rank with all of them, read the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from zeroshard.core.part import Part
from zeroshard.errors import ConfigError
from zeroshard.runtime.engine import Engine, states_of
from zeroshard.runtime.units import OwnMeshes, matching
from zeroshard.runtime.whole import saved_names


class Experts:
    """The names and parts of all parameters of a model of which ranks divide the experts.

    `places`: by pattern of `mesh_of`, which of how many ranks with other experts this one is.
    """

    def __init__(self, module: nn.Module, places: Mapping[str, tuple[int, int]]) -> None:
        self._module = module
        self._places = {one: at for one, at in places.items() if matching(one, module)}
        self._meshes = OwnMeshes(module, list(self._places))
        self._saved_names = saved_names(module)

    @classmethod
    def of(cls, engine: Engine) -> Experts:
        """Return those of `engine`."""
        return cls(engine.module, states_of(engine).own_places)

    def name(self, name: str) -> str:
        """Return the name in a checkpoint of the parameter called `name` here."""
        return self._named(name, self._place(name)[0])

    def everywhere(self, name: str) -> list[str]:
        """Return the names in a checkpoint of the parameters called `name` on the ranks that divide
        it, in their order.
        """
        return [self._named(name, place) for place in range(self._place(name)[1])]

    def divided(self) -> set[str]:
        """Return the names in a checkpoint of all parameters that ranks divide."""
        names = [name for name, _ in self._module.named_parameters(remove_duplicate=False)]
        apart = [name for name in names if self._place(name)[1] > 1]
        return {there for name in apart for there in self.everywhere(name)}

    def part(self, name: str, part: Part) -> Part:
        """Return where `part` of the parameter `name` here lies in the one of a checkpoint."""
        place, count = self._place(name)
        if count == 1 or self._number_at(name) is not None:
            return part
        if not part.shape:
            raise ConfigError(
                f"parameter {name!r} of experts (mesh_of) has no dimension along which a"
                " checkpoint can put those of all ranks together: give it one"
            )
        rows = part.shape[0]
        return replace(
            part,
            shape=(count * rows, *part.shape[1:]),
            start=(place * rows + part.start[0], *part.start[1:]),
        )

    def _named(self, name: str, place: int) -> str:
        """Return the name in a checkpoint of the parameter called `name` on the rank at `place`."""
        index = self._number_at(name)
        if index is None:
            return self._saved_names.get(name, name)
        segments = name.split(".")
        number, here = int(segments[index]), self._num_here(".".join(segments[:index]))
        return ".".join([*segments[:index], str(place * here + number), *segments[index + 1 :]])

    def _place(self, name: str) -> tuple[int, int]:
        pattern = self._meshes.of(name.rpartition(".")[0])
        return self._places[pattern] if pattern else (0, 1)

    def _number_at(self, name: str) -> int | None:
        """Return which segment of `name` is the number of an expert, if one is."""
        module = self._meshes.module_of(name.rpartition(".")[0])
        if not module:
            return None
        first = module.count(".")
        segments = name.split(".")
        return next((at for at in range(first, len(segments)) if segments[at].isdigit()), None)

    def _num_here(self, name: str) -> int:
        """Return how many numbers the children of the module called `name` have."""
        module = self._module.get_submodule(name)
        held = [*module._modules, *module._parameters]
        return 1 + max(int(one) for one in held if one.isdigit())
