"""Cut a module tree into units: groups of parameters that are gathered together.

Automatic units are the repeated blocks (siblings of one class and one set of parameter shapes, as
in a ModuleList of layers), and what is left over (embeddings, final norms, heads), packed in
definition order. A module of a class that says ``unit_of_its_own = True`` (a tile of a linear
layer, nn/tiled.py) is a unit by itself wherever it stands, automatic cut or chosen one, unless the
module that holds it was chosen.

Invariants: every parameter is in exactly one unit, a tied one where it is met first; no unit is
larger than max(one repeated block without such modules, the largest single parameter, 1/8 of the
model where there are none); the cut depends on the module tree alone, so that it is the same on
every rank.

Modules that match a pattern of ``shard(mesh_of=)`` are units of their own, since a unit lies over
one mesh. One without a forward (a ModuleList) is gathered around the forward of the module that
holds it, so that ranks may run other parts of it.

What it does not do: it touches no parameter and installs nothing; it reads names, classes, shapes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from zeroshard.core.resting import packed, unit_limit
from zeroshard.errors import ConfigError
from zeroshard.memory import storage_of
from zeroshard.state.local import local_of

# ------------------------------------------------------------------------------------------- stages
# The stages of a pipeline that one rank has, as the model of one engine.
#
# ``torch.distributed.pipelining`` cuts a model into stages; their modules keep the names of the
# whole model where the user cuts it so (``layers`` a ModuleDict by number). One stage is its
# module. Several are a `Stages`, which holds their modules and calls every parameter and module
# what its stage calls it, so that checkpoints speak of the whole model.
#
# Invariant: no name stands for two parameters or buffers, no parameter is in two stages. A `Stages`
# is never called: schedules call the modules.


class Stages(nn.Module):
    """The modules of several stages, under the names that each stage has."""

    def __init__(self, modules: Sequence[nn.Module], numbers: Sequence[int]) -> None:
        """`numbers`: the stages' in the pipeline."""
        super().__init__()
        holder: dict[str, str] = {}
        named: dict[int, tuple[str, str]] = {}
        for number, stage in zip(map(str, numbers), modules, strict=True):
            self.add_module(number, stage)
            for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
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

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
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
        """Load a state that `state_dict` has returned, or the state of the whole model."""
        for stage in self.children():
            named = dict(stage.named_parameters(remove_duplicate=False))
            names = [*named, *dict(stage.named_buffers(remove_duplicate=False))]
            own = {name: state_dict[name] for name in names if name in state_dict}
            result = stage.load_state_dict(own, *args, **options)
        return result


def model_of(model: Any) -> Any:
    """Return the module to shard where `model` is a stage of a pipeline, a list of stages, or
    torch.compile() around a module; else `model` itself. Raises ConfigError.
    """
    if type(model).__module__ == "torch._dynamo.eval_frame":  # which may not be imported
        return model._orig_mod
    stages = list(model) if isinstance(model, (list, tuple)) else [model]
    # by their attributes: torch's own class is private, and importing it takes half a second
    modules: list[Any] = [
        getattr(stage, "submod", None) for stage in stages if hasattr(stage, "stage_index")
    ]
    if not stages or sum(isinstance(module, nn.Module) for module in modules) < len(stages):
        return model
    if len(stages) == 1:
        return modules[0]
    numbers = [int(stage.stage_index) for stage in stages]
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"the stages {numbers} name one stage twice: give each stage once")
    return Stages(modules, numbers)


def roots_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that have forwards of the whole `model`."""
    return list(model.children()) if isinstance(model, Stages) else [model]


# --------------------------------------------------------------------------------------- own meshes
# The modules of a model that lie over meshes of their own: their names match a pattern of
# ``shard(mesh_of=)``, or they are inside such a module.


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
                " parameters; take names of model.named_modules()"
            )


class OwnMeshes:
    """The modules of a model that lie over meshes of their own."""

    def __init__(self, model: nn.Module, patterns: Sequence[str]) -> None:
        """Raises ConfigError; see `partition_units`."""
        self._pattern_of: dict[str, str] = {}  # of the outermost modules that match, by name
        self.modules: list[tuple[str, nn.Module]] = []  # these
        for name, module in model.named_modules() if patterns else ():
            found = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
            if not name or not found or not has_parameters(module):
                continue
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
        refuse_unmatched(model, patterns)
        tied: dict[int, tuple[str, str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False) if patterns else ():
            pattern = self.of(name.rpartition(".")[0])
            first, other = tied.setdefault(id(parameter), (name, pattern))
            if other != pattern:
                raise ConfigError(
                    f"mesh_of: parameters {first!r} and {name!r} are one tensor, which would lie"
                    " over two meshes: untie them, or let a pattern match both of their modules"
                )

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


# ------------------------------------------------------------------------------------------ overlap
# Two parameters over one memory: a tie that only the memory knows of, which sharding would cut
# without a word.
#
#     b.weight = nn.Parameter(a.weight.data.t())      # plain torch: what the optimizer adds to one,
#                                                     the other sees
#
# ``shard()`` copies each parameter into its unit's buffer, where every parameter has a place of its
# own. One parameter under two names is kept tied; two parameters over the same elements are refused
# by name, and so is a buffer over the elements of a parameter.
#
# Invariant: elements are compared, not storages: the slices of one flat buffer
# (``nn.LSTM.flatten_parameters``) are no tie. Cost: one sort of the addresses; a byte per element
# for two tensors that interleave.


@dataclass(frozen=True)
class _Extent:
    """A tensor's place: from byte `start` to before byte `stop` of `home`, an address space."""

    name: str
    trained: bool
    is_buffer: bool
    home: tuple[str, int]
    start: int
    stop: int
    itemsize: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def spots(self, start: int, stop: int) -> torch.Tensor:
        """Return which bytes of ``[start, stop)`` are its own [stop - start], bool."""
        marks = torch.zeros(stop - start, dtype=torch.bool)
        steps = (*(step * self.itemsize for step in self.stride), 1)
        marks.as_strided((*self.shape, self.itemsize), steps, self.start - start).fill_(True)
        return marks


def check_overlap(model: nn.Module) -> None:
    """Raise ConfigError where a trained parameter of `model` shares elements with another
    parameter or with a buffer.
    """
    extents = [
        _extent(name, parameter, False)
        for name, parameter in named_parameters_once(model).items()
        if local_of(parameter).numel()
    ]
    extents += [
        _extent(name, buffer, True)
        for name, buffer in model.named_buffers()
        if local_of(buffer).numel() and storage_of(local_of(buffer)) is not None
    ]
    open_ones: list[_Extent] = []  # with bytes that go on where the current one begins
    for one in sorted(extents, key=lambda extent: (extent.home, extent.start)):
        open_ones = [two for two in open_ones if two.home == one.home and two.stop > one.start]
        for other in open_ones:
            start, stop = min(one.start, other.start), max(one.stop, other.stop)
            if (
                not (one.trained or other.trained)
                or (one.is_buffer and other.is_buffer)
                or not bool((one.spots(start, stop) & other.spots(start, stop)).any())
            ):
                continue
            first, second = sorted((other, one), key=lambda extent: extent.is_buffer)
            kind = "buffer" if second.is_buffer else "parameter"
            remedy = (
                "compute it from the parameter in forward"
                if second.is_buffer
                else "use one nn.Parameter in both places, transposed in forward where need be"
            )
            raise ConfigError(
                f"{kind} {second.name!r} lies in the memory of parameter {first.name!r}, and"
                f" shard() would give each its own, which unties them: {remedy}; or give one a copy"
                " (.clone())"
            )
        open_ones.append(one)


def _extent(name: str, tensor: torch.Tensor, is_buffer: bool) -> _Extent:
    with torch._C.DisableTorchFunctionSubclass():
        local = local_of(tensor)
        storage, size, offset = storage_of(local), local.element_size(), int(local.storage_offset())
        shape, stride = tuple(local.shape), local.stride()
    assert storage is not None, name
    # of tensors without memory: deferred ones, those on meta
    start, home = offset * size, ("storage", storage._cdata)
    if storage.nbytes() and storage.data_ptr():
        start, home = storage.data_ptr() + offset * size, (str(tensor.device), 0)
    last = sum((length - 1) * step for length, step in zip(shape, stride, strict=True))
    trained, stop = tensor.requires_grad and not is_buffer, start + (last + 1) * size
    return _Extent(name, trained, is_buffer, home, start, stop, size, shape, stride)


# -------------------------------------------------------------------------------------------- units

UnitSpec = Callable[[str, nn.Module], bool] | Sequence[str | type[nn.Module]]


@dataclass
class UnitPlan:
    """One unit to be: its parameters, and the modules that need them in their forward."""

    name: str
    pattern: str = ""  # of the mesh of its own that it lies over
    # qualified name -> parameter, in definition order
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    # modules with a forward that spans the unit
    roots: list[tuple[str, nn.Module]] = field(default_factory=list)
    # modules that hold the parameters themselves
    owners: list[tuple[str, nn.Module]] = field(default_factory=list)

    @property
    def numel(self) -> int:
        """The number of elements of all parameters."""
        return sum(parameter.numel() for parameter in self.parameters.values())

    @property
    def local_numel(self) -> int:
        """The number of elements that are here: a DTensor's local tensor counts."""
        return sum(local_of(parameter).numel() for parameter in self.parameters.values())

    @property
    def spans_one_module(self) -> bool:
        """Whether one module's forward is all that needs the unit."""
        modules = {id(module) for _, module in self.roots or self.owners}
        return len(modules) == 1


def named_parameters_once(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return every parameter under the first of its names, in definition order."""
    return dict(model.named_parameters(remove_duplicate=True))


def partition_units(
    model: nn.Module, units: UnitSpec | None = None, *, own_meshes: Sequence[str] = ()
) -> list[UnitPlan]:
    """Return the units of `model` in definition order; `units` are module classes, qualified
    names or a callable(name, module) -> bool; `own_meshes` patterns of names of modules.

    Raises ConfigError when a name, class or pattern matches nothing, a chosen module holds no
    parameter of its own, two patterns match one module, or a parameter belongs to two meshes.
    """
    if isinstance(model, Stages):
        return _of_stages(model, units, own_meshes)
    meshes = OwnMeshes(model, own_meshes)
    parameters = named_parameters_once(model)
    chosen = find_blocks(model, units)
    taken = set() if units is None else {name for name, _ in chosen}
    apart = [
        (name, module)
        for name, module in model.named_modules()
        if name and _is_apart(module) and name.rpartition(".")[0] not in taken
    ]
    if units is None:
        chosen = _innermost_first(meshes.modules) + chosen
    else:
        chosen = _innermost_first(meshes.modules + chosen)
    chosen = list(dict(_innermost_first(apart) + chosen).items())
    names = {id(parameter): name for name, parameter in parameters.items()}
    unassigned = dict.fromkeys(parameters)  # ordered set
    blocks: dict[str, UnitPlan] = {}
    for name, module in chosen:
        pattern = meshes.of(name)
        path, spanning = name, module
        # the module with the forward that spans it
        while pattern and isinstance(spanning, (nn.ModuleList, nn.ModuleDict)) and path:
            path = path.rpartition(".")[0]
            spanning = model.get_submodule(path)
        plan = UnitPlan(name or "model", pattern, roots=[(path, spanning)])
        for parameter in module.parameters():
            own = names[id(parameter)]
            if own in unassigned:
                plan.parameters[own] = parameter
                del unassigned[own]
        if plan.parameters:
            blocks[plan.name] = plan
    limit = unit_limit(
        [plan.numel for plan in blocks.values() if not plan.pattern],
        [parameter.numel() for parameter in parameters.values()],
        whole=not apart,
    )
    plans = _in_order(parameters, blocks, unassigned, limit)
    plan_of = {id(parameter): plan for plan in plans for parameter in plan.parameters.values()}
    for name, module in model.named_modules():
        own_ids = [id(p) for p in module._parameters.values() if p is not None]
        for plan in {id(plan_of[one]): plan_of[one] for one in own_ids}.values():
            plan.owners.append((name, module))
    return plans


def _of_stages(model: Stages, units: UnitSpec | None, own_meshes: Sequence[str]) -> list[UnitPlan]:
    """Return the units of every stage: none spans two."""
    if units is not None:
        find_blocks(model, units)  # raises for what matches in no stage
    refuse_unmatched(model, own_meshes)  # in any stage
    plans: list[UnitPlan] = []
    for number, stage in model.named_children():
        mine = units
        if units is not None and not callable(units):
            wanted = [units] if isinstance(units, str) else units
            mine = [want for want in wanted if _hits(want, dict(stage.named_modules()))]
        elif units is not None:
            mine = [name for name, module in stage.named_modules() if units(name, module)]
        own = [pattern for pattern in own_meshes if matching(pattern, stage)]
        for plan in partition_units(stage, mine, own_meshes=own):
            taken = any(plan.name == other.name for other in plans)
            name = f"{plan.name} of stage {number}" if taken else plan.name
            plans.append(replace(plan, name=name))
    return plans


def find_blocks(
    model: nn.Module, blocks: UnitSpec | None = None, *, option: str = "units"
) -> list[tuple[str, nn.Module]]:
    """Return the repeated blocks of `model`, or those that `blocks` chooses (classes, qualified
    names or a callable(name, module) -> bool).

    Raises ConfigError, naming `option`, when a name or class in `blocks` matches nothing, or a
    chosen module holds no parameter.
    """
    if blocks is not None:
        return _chosen_blocks(model, blocks, option)
    # siblings of one class and shape; with submodules if any such exist, else leaf modules (a plain
    # stack of layers)
    limit = _size(model) // 8
    for with_children in (True, False):
        found: list[tuple[str, nn.Module]] = []
        _search(model, "", with_children, limit, found)
        if found:
            return found
    return []


def _in_order(
    parameters: dict[str, nn.Parameter],
    blocks: dict[str, UnitPlan],
    unassigned: dict[str, None],
    limit: int,
) -> list[UnitPlan]:
    """Merge blocks and packed leftovers into one list, in definition order of their first
    parameters.
    """
    block_of = {name: plan.name for plan in blocks.values() for name in plan.parameters}
    sized = [
        (name, parameter.numel(), None if name in unassigned else block_of[name])
        for name, parameter in parameters.items()
    ]
    return [
        UnitPlan(names[0], parameters={name: parameters[name] for name in names})
        if block is None
        else blocks[block]
        for block, names in packed(sized, limit)
    ]


def _signature(module: nn.Module) -> tuple[object, ...]:
    shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in module.named_parameters())
    return (type(module), shapes)


def _is_apart(module: nn.Module) -> bool:
    return bool(getattr(type(module), "unit_of_its_own", False)) and has_parameters(module)


def _size(module: nn.Module) -> int:
    """Return the elements of `module`'s parameters, without units of their own."""
    apart = {id(p) for part in module.modules() if _is_apart(part) for p in part.parameters()}
    return sum(p.numel() for p in module.parameters() if id(p) not in apart)


def _search(
    module: nn.Module,
    prefix: str,
    with_children: bool,
    limit: int,
    found: list[tuple[str, nn.Module]],
) -> bool:
    """Collect the outermost repeated blocks below `module` that are small enough or hold no
    smaller ones; return whether there were any.
    """
    # a module that is cut into units of their own counts as a leaf
    children = [
        (name, child)
        for name, child in module.named_children()
        if has_parameters(child) and not _is_apart(child)
    ]
    eligible = [
        child
        for _, child in children
        if not with_children or any(not _is_apart(part) for part in child.children())
    ]
    counts = Counter(_signature(child) for child in eligible)
    any_found = False
    for name, child in children:
        path = f"{prefix}{name}"
        repeated = child in eligible and counts[_signature(child)] >= 2
        if repeated and _size(child) <= limit:
            found.append((path, child))
            any_found = True
            continue
        inner: list[tuple[str, nn.Module]] = []
        below = _search(child, f"{path}.", with_children, limit, inner)
        # blocks inside hold most of a stage of layers, and not of a layer with two heads
        if repeated and not (
            below and len(inner) > 3 and 2 * sum(_size(one) for _, one in inner) > _size(child)
        ):
            found.append((path, child))
            any_found = True
        else:
            found.extend(inner)
            any_found = any_found or below
    return any_found


def _hits(want: str | type[nn.Module], modules: Mapping[str, nn.Module]) -> list[str]:
    if isinstance(want, str):
        return [want] if want in modules else []
    return [name for name, module in modules.items() if isinstance(module, want)]


def _chosen_blocks(model: nn.Module, units: UnitSpec, option: str) -> list[tuple[str, nn.Module]]:
    modules = dict(model.named_modules())
    if callable(units) and not isinstance(units, type):
        picked = [name for name, module in modules.items() if units(name, module)]
        if not picked:
            raise ConfigError(
                f"{option}: the callable chose no module of {type(model).__name__}; it is given"
                " (name, module) of each"
            )
    else:
        wanted: Sequence[str | type[nn.Module]] = (
            [units] if isinstance(units, (str, type)) else units
        )
        picked = []
        for want in wanted:
            if not (hits := _hits(want, modules)):
                label = want if isinstance(want, str) else want.__name__
                raise ConfigError(
                    f"{option}: {label!r} matches no module of {type(model).__name__}; take"
                    " names of model.named_modules()"
                )
            picked += hits
    chosen = [(name, modules[name]) for name in dict.fromkeys(picked)]
    for name, module in chosen:
        if not has_parameters(module):
            raise ConfigError(
                f"{option}: module {name!r} ({type(module).__name__}) holds no parameters: choose"
                " one that does"
            )
    return chosen


def _innermost_first(modules: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """A unit inside another takes its parameters first: innermost blocks are assigned before the
    ones around them.
    """
    return sorted(modules, key=lambda item: -item[0].count(".") if item[0] else 1)


def holding_others(plans: Sequence[UnitPlan]) -> set[int]:
    """Return the numbers of the units that have modules of other units inside theirs."""
    needed: dict[int, tuple[nn.Module, set[int]]] = {}
    for index, plan in enumerate(plans):
        for _, module in (*plan.roots, *plan.owners):
            needed.setdefault(id(module), (module, set()))[1].add(index)
    found = set()
    for module, held in needed.values():
        parts = [id(part) for part in module.modules() if part is not module]
        inside = {index for part in parts if part in needed for index in needed[part][1]}
        found |= {index for index in held if inside - {index}}
    return found
