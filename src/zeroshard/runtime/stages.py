"""The stages of a pipeline that one rank has, as the model of one engine.

``torch.distributed.pipelining`` cuts a model into stages, whose modules keep the names of the whole
model where the user cuts it so (``layers`` a ModuleDict by number). One stage is its module.
Several are a `Stages`, which holds their modules and calls every parameter and module what its
stage calls it, so that checkpoints speak of the whole model.

Invariant: no name stands for two parameters or buffers, no parameter is in two stages. A `Stages`
is never called: schedules call the modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from zeroshard.errors import ConfigError


class Stages(nn.Module):
    """The modules of several stages, whose names are those that each stage has."""

    def __init__(self, modules: Sequence[nn.Module], numbers: Sequence[int]) -> None:
        """`numbers`: those of the stages in the pipeline."""
        super().__init__()
        for number, module in zip(numbers, modules, strict=True):
            self.add_module(str(number), module)
        self._refuse_shared_names()

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield every module under the name that its stage has for it."""
        memo = set() if memo is None else memo
        if self not in memo:
            memo.add(self)
            yield prefix, self
        for stage in self.children():
            yield from stage.named_modules(memo, prefix, remove_duplicate)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of all stages, under their names."""
        out: dict[str, Any] = {}
        for stage in self.children():
            out |= stage.state_dict(*args, **options)
        return out

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Load a state that `state_dict` has returned, or that of the whole model."""
        for stage in self.children():
            named = dict(stage.named_parameters(remove_duplicate=False))
            names = [*named, *dict(stage.named_buffers(remove_duplicate=False))]
            own = {name: state_dict[name] for name in names if name in state_dict}
            result = stage.load_state_dict(own, *args, **options)
        return result

    def _refuse_shared_names(self) -> None:
        holder: dict[str, str] = {}
        named: dict[int, tuple[str, str]] = {}
        for number, stage in self.named_children():
            members = [*stage.named_parameters(), *stage.named_buffers()]
            for name, tensor in members:
                if name in holder:
                    raise ConfigError(
                        f"{name!r} names one tensor of stage {holder[name]} and another of stage"
                        f" {number}: cut the model so that stages keep its names (a ModuleDict of"
                        " layers by number, not a Sequential of a slice)"
                    )
                if isinstance(tensor, nn.Parameter) and id(tensor) in named:
                    raise ConfigError(
                        f"parameter {name!r} of stage {number} is {named[id(tensor)][1]!r} of stage"
                        f" {named[id(tensor)][0]}, too: a parameter is in one stage; give each a"
                        " parameter of its own"
                    )
                holder[name], named[id(tensor)] = number, (number, name)


def model_of(model: Any) -> Any:
    """Return the module to shard where `model` is a stage of a pipeline, a list of stages, or
    torch.compile() around a module; else `model` itself. Raises ConfigError.
    """
    if type(model).__module__ == "torch._dynamo.eval_frame":  # which may not be imported
        return model._orig_mod
    stages = list(model) if isinstance(model, (list, tuple)) else [model]
    if not stages or not all(_is_stage(stage) for stage in stages):
        return model
    if len(stages) == 1:
        return stages[0].submod
    numbers = [int(stage.stage_index) for stage in stages]
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"the stages {numbers} name one stage twice: give each stage once")
    return Stages([stage.submod for stage in stages], numbers)


def roots_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose forwards are those of the whole `model`."""
    return list(model.children()) if isinstance(model, Stages) else [model]


def _is_stage(model: Any) -> bool:
    # by its attributes: torch's own class is private, and importing it takes half a second
    return isinstance(getattr(model, "submod", None), nn.Module) and hasattr(model, "stage_index")
