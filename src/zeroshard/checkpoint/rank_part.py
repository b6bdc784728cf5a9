"""The part of a checkpoint that one rank writes, collected from its engine.

The ranks together save each element once: values (the fp32 master of a trained parameter, the
weight of a frozen one), optimizer state and averages; then buffers, the user's states and the
random generators. See docs/design/checkpoints.md.

The manifest is put together (`Manifest.of_ranks`) from JSON that lies beside the files of a save
under way, and in the notes of a step that is kept in memory:

    heading (one rank's)    step, world, parameters, param groups, ...
    index (each rank's)     its file, the tensors in it with their hashes, its states
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from zeroshard.checkpoint.manifest import (
    BUFFER,
    CUT,
    ParameterEntry,
    ShardEntry,
    TensorEntry,
    digest,
    range_in,
    ranged,
)
from zeroshard.checkpoint.shard_files import WRITTEN_BY, Stored, as_bytes, dtype_code, whole_stride
from zeroshard.core.boxes import Box, box_of
from zeroshard.core.layout import Range
from zeroshard.core.placement import STATE, VALUE, Part
from zeroshard.core.values import decode, encode, no_tensors
from zeroshard.errors import CheckpointError, ConfigError
from zeroshard.optim.copies import KEPT_STATES, joined
from zeroshard.optim.several import class_name
from zeroshard.optim.tiles import is_apart
from zeroshard.runtime.access import curve_of
from zeroshard.runtime.ema import EMA
from zeroshard.runtime.engine import Engine, states_of
from zeroshard.runtime.units import OwnMeshes, matching
from zeroshard.runtime.whole import extra_modules, saved_names
from zeroshard.state.local import is_dtensor, local_of, part_of
from zeroshard.system.device import Device

# --------------------------------------------------------------------------------- names of experts
# Ranks divide experts (``shard(mesh_of=)``). Each rank counts its own from 0. In a checkpoint, as
# in a model with all of them, one count goes over the ranks along the other dimensions of their
# mesh::
#
#     'ep' 2                         rank 0 of it                rank 1
#     a list of modules              experts.0  experts.1        experts.0  experts.1
#     in the checkpoint              experts.0  experts.1        experts.2  experts.3
#     one parameter, [2, 12, 20]     [0:2] of [4, 12, 20]        [2:4] of [4, 12, 20]
#
# A name has an expert's number where the name of the module that the pattern matches ends with a
# number, or where one follows; a parameter without is cut along its first dimension.
#
# Other parameters have the names of the model's ``state_dict()``, hooks included.
#
# Invariant: ranks agree without a message, since shard() has compared all names and shapes. Ranks
# that divide the experts otherwise, or one rank with all of them, read the same checkpoint.


class Experts:
    """The names and parts of all parameters of a model with experts that ranks divide.

    `places`: by pattern of `mesh_of`, which of how many ranks with other experts this one is.
    """

    def __init__(self, module: nn.Module, places: Mapping[str, tuple[int, int]]) -> None:
        self._module = module
        self._places = {one: at for one, at in places.items() if matching(one, module)}
        self._meshes = OwnMeshes(module, list(self._places))
        self._saved_names = saved_names(module)

    @classmethod
    def of(cls, engine: Engine) -> Experts:
        """Return the names and parts of `engine`."""
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
                " checkpoint can put all ranks' experts together: give it one"
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
        module = self._module.get_submodule(".".join(segments[:index]))
        numbers = [int(one) for one in (*module._modules, *module._parameters) if one.isdigit()]
        number, here = int(segments[index]), 1 + max(numbers)
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


# ------------------------------------------------------------------------------- the part of a rank

# our own names among the states
RNG, EXTRA, SCALER, OF_MODULES = RESERVED = ("rng", "extra", "scaler", "get_extra_state()")


class Stateful(Protocol):
    """An object that save() and load() accept as a state: an LR scheduler, a data loader, ..."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass
class RankPart:
    """One rank's part of a checkpoint: the tensors of its file and its part of the manifest."""

    stored: list[Stored]
    # states and buffers: JSON, and tensors by key
    encoded: dict[str, tuple[Any, dict[str, torch.Tensor]]] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)  # of `encoded`, what this rank writes
    # parameter -> the optimizer's numbers
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)  # the optimizer's param groups
    parameters: dict[str, ParameterEntry] = field(default_factory=dict)
    boxes: dict[str, Box] = field(default_factory=dict)  # of the parameters that are parts here

    def index(self, file: ShardEntry, tensors: Sequence[TensorEntry]) -> dict[str, Any]:
        """Return this rank's part of the manifest: its file, and the tensors in it."""
        return {
            "file": vars(file),
            "tensors": [entry.to_json() for entry in tensors],
            "states": self.states,
            "scalars": self.scalars,
        }

    def heading(self, engine: Engine, step: int, branch: int) -> dict[str, Any]:
        """Return the part of the manifest that is the same on all ranks."""
        optimizer = None
        if engine.optimizer is not None:
            optimizer = {"class": class_name(engine.optimizer), "groups": self.groups}
        everyone = states_of(engine).everyone
        return {
            "step": step,
            "branch": branch,
            "world": everyone.size,
            "written_by": WRITTEN_BY,
            "policy": engine.policy.name,
            "precision": engine.precision.describe(),
            "parameters": {name: vars(entry) for name, entry in self.parameters.items()},
            "optimizer": optimizer,
            "places": everyone.places,
            "curve": curve_of(states_of(engine)),
            "model_config": _config_of(engine.module),
        }


def _config_of(module: nn.Module) -> str:
    """Return the config.json of a Transformers model as text, "" of any other model. Of a peft
    model it would describe the base alone; a checkpoint does not have the base's names.
    """
    write = getattr(getattr(module, "config", None), "to_json_string", None)
    if not callable(write) or hasattr(module, "peft_config"):
        return ""
    try:
        fields = json.loads(write())
        return json.dumps({**fields, "architectures": [type(module).__name__]}, indent=2)
    except (TypeError, ValueError):
        return ""  # another library's, in no form of ours


def names_of(module: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by its id, in the order of the module."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def parameters_of(
    engine: Engine, experts: Experts, *, frozen: bool = True, everywhere: bool = False
) -> dict[str, ParameterEntry]:
    """Return the entry of every parameter, by the first of its names in a checkpoint; without
    `frozen` of every trained one, and with `everywhere` of the experts of other ranks, too.
    """
    names, layouts = names_of(engine.module), states_of(engine).parameter_layouts()
    out = {}
    for parameter in engine.module.parameters():
        here = names[id(parameter)]
        part, stride, trained = layouts[id(parameter)]
        if trained or frozen:
            part = experts.part(here[0], part)
            stride = whole_stride(part, stride)
            all_names = zip(*map(experts.everywhere, here), strict=True)
            for first, *others in all_names if everywhere else [map(experts.name, here)]:
                out[first] = ParameterEntry(part.shape, stride, trained, tuple(others))
    return out


def whole_parts(engine: Engine, experts: Experts) -> dict[str, tuple[Part, bool]]:
    """Return, by name of each parameter here, which part of it in a checkpoint the ranks of this
    data parallel group have, and whether it counts here (`StateAccess.parts`).
    """
    parts = states_of(engine).parts()
    return {name: (experts.part(name, part), counts) for name, (part, counts) in parts.items()}


def check_arguments(directory: object, engine: object, states: object) -> None:
    """Raise ConfigError, naming the argument, for a wrong directory, engine or states."""
    if not isinstance(engine, Engine):
        swapped = " (directory comes first, then engine)" if isinstance(directory, Engine) else ""
        raise ConfigError(
            f"engine is a {type(engine).__name__}, not the zeroshard.Engine that shard()"
            f" returned{swapped}"
        )
    if not isinstance(directory, (str, Path)):
        raise ConfigError(f"directory is a {type(directory).__name__}, not a path")
    if not isinstance(states, Mapping | None):
        raise ConfigError(f"states is a {type(states).__name__}, not a dict of objects by name")
    for name, state in (states or {}).items():
        is_stateful = hasattr(state, "state_dict") and hasattr(state, "load_state_dict")
        if not is_stateful and not isinstance(state, EMA):
            raise ConfigError(
                f"states[{name!r}] is a {type(state).__name__}, which has no state_dict() and"
                " load_state_dict(): give plain values as extra="
            )


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a state_dict holds, by their name there: of a replicated DTensor its
    local one.

    Raises CheckpointError for a buffer that this rank has a part of.
    """
    found = {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, child in module.named_modules()
        for name, buffer in child._buffers.items()
        if buffer is not None and name not in child._non_persistent_buffers_set
    }
    for name, buffer in found.items():
        if is_dtensor(buffer) and not part_of(name, buffer).is_whole:
            raise CheckpointError(
                f"buffer {name!r} is a DTensor, and each rank has a part of it: replicate it, or"
                " register it with persistent=False"
            )
    hooked = saved_names(module)
    return {hooked.get(name, name): local_of(buffer) for name, buffer in found.items()}


def collect(
    engine: Engine,
    states: Mapping[str, Stateful],
    extra: Any,
    *,
    frozen: bool = True,
    drop_gradients: bool = False,
) -> RankPart:
    """Return this rank's part, before `divide`; without `frozen` no frozen parameter is in it.
    `drop_gradients` allows gradients that no step has taken, which stay where they are.

    Raises CheckpointError for unsupported state.
    """
    part = RankPart([])
    if states_of(engine).unsaved is not None:
        raise CheckpointError(f"what rests must not be saved: {states_of(engine).unsaved}")
    if states_of(engine).has_pending_gradients and not drop_gradients:
        raise CheckpointError(
            "there are gradients that no step has taken, and a checkpoint holds none: save after"
            " optimizer.step(), or say drop_gradients=True"
        )
    averages = {name: state for name, state in states.items() if isinstance(state, EMA)}
    for name in states:
        if name in RESERVED or not name or "|" in name or "@" in name:
            raise CheckpointError(
                f"states: the name {name!r} cannot be used (no '|' or '@', and not"
                f" {', '.join(RESERVED)})"
            )
    experts = Experts.of(engine)
    part.parameters = parameters_of(engine, experts, frozen=frozen, everywhere=True)
    _collect_pieces(engine, experts, averages, part)
    if engine.optimizer is not None:
        names = names_of(engine.module)
        options = encoded_options(engine.optimizer)
        for one, parameters in zip(options, states_of(engine).param_groups(), strict=True):
            params = [
                name
                for parameter in parameters
                for name in dict.fromkeys(experts.everywhere(names[id(parameter)][0]))
            ]
            part.groups.append({"params": params, "options": one})
    values: dict[str, Any] = {
        name: _state_dict(name, state) for name, state in states.items() if name not in averages
    }
    values[OF_MODULES] = _state_dict(OF_MODULES, ExtraStates(engine.module))
    values |= {RNG: generators(), EXTRA: extra, SCALER: states_of(engine).scaler_state()}
    part.encoded = {name: _encoded(name, value) for name, value in values.items()}
    part.encoded |= {
        f"{BUFFER}{name}": (None, {f"{BUFFER}{name}": tensor})
        for name, tensor in persistent_buffers(engine.module).items()
    }
    for _, tensors in part.encoded.values():
        for key, tensor in tensors.items():
            dtype_code(tensor.dtype, key)  # raises
    return part


class ExtraStates:
    """Holds the modules that have a ``get_extra_state()``, as one state of a checkpoint."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = extra_modules(module)

    def state_dict(self) -> dict[str, Any]:
        """Return it by its name in ``module.state_dict()``."""
        return {name: module.get_extra_state() for name, module in self.modules.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the modules what there is of each."""
        for name in self.modules.keys() & state.keys():
            self.modules[name].set_extra_state(state[name])

    @staticmethod
    def decoded(saved: dict[str, Any], fetch: Callable[[int, str], torch.Tensor]) -> dict[str, Any]:
        """Return the state that the ranks have `saved`, of each module the first rank's, as of
        buffers; `fetch(rank, key)` reads a tensor.
        """
        out = dict[str, Any]()
        of_ranks = [saved["same"]] if "same" in saved else saved["ranks"]
        for rank, values in reversed([*enumerate(of_ranks)]):
            out |= decode(values, partial(fetch, rank))
        return out


def _state_dict(name: str, state: Stateful) -> dict[str, Any]:
    try:
        return state.state_dict()
    except Exception as odd:
        raise CheckpointError(
            f"states[{name!r}] gives no state_dict(): {type(odd).__name__}: {odd}"
        ) from odd


def divide(engine: Engine, part: RankPart) -> None:
    """Assign states and buffers: the first rank that has one writes it, and others where theirs
    differ. Collective. Raises CheckpointError, on every rank, where ranks have other states.
    """
    ranks = states_of(engine).everyone
    mine = {name: _fingerprint(*pair) for name, pair in part.encoded.items()}
    everyone = ranks.share(mine, "zs.save()")
    named = [sorted(name for name in one if not name.startswith(BUFFER)) for one in everyone]
    for rank, names in enumerate(named):
        if names != named[0]:
            raise CheckpointError(
                f"rank {rank} saves the states {names}, and rank 0 {named[0]}: give every rank the"
                " same names"
            )
    for name, (value, tensors) in part.encoded.items():
        first = next(rank for rank, other in enumerate(everyone) if name in other)
        alike = all(other.get(name) == everyone[0].get(name) for other in everyone)
        is_first, is_buffer = ranks.rank == first, name.startswith(BUFFER)
        if name == OF_MODULES and alike and not value:
            continue  # no module of any rank has one
        if is_first or (mine[name] != everyone[first][name] if is_buffer else not alike):
            for key, tensor in tensors.items():
                code = dtype_code(tensor.dtype, key)
                place = f"{key}@{0 if is_first else ranks.rank}"
                part.stored.append((TensorEntry.loose(place, tuple(tensor.shape), code), tensor))
            if not is_buffer:
                part.states[name] = {"same" if alike else "own": value}


_JOINED = (
    "in a checkpoint it is one with the experts of other ranks; make experts modules of their own,"
    " by number (docs/moe.md)"
)


def _collect_pieces(
    engine: Engine, experts: Experts, averages: Mapping[str, EMA], part: RankPart
) -> None:
    names, parts = names_of(engine.module), whole_parts(engine, experts)
    beside = {name: ema.averages for name, ema in averages.items()}
    for table in states_of(engine).tables(beside):
        numbers, whole, states = table.numbers(), any(table.by_shape), table.tile_states
        cuts = {
            shard.name: states.cuts(shard, shard.group)
            for shard in table.shards
            if states is not None and whole
        }
        for piece in table.pieces(share=True):
            name = experts.name(names[id(piece.parameter)][0])
            if name not in part.parameters or not parts[piece.name][1]:
                continue
            if not parts[piece.name][0].is_whole:
                part.boxes[name] = box_of(parts[piece.name][0])
            code = dtype_code(piece.state.dtype, f"{piece.kind} of {name!r}")
            place, box = (name, piece.kind, piece.start, piece.stop), part.boxes.get(name, ())
            tensor = piece.tensor if piece.state.on_device else piece.borrowed
            part.stored.append((TensorEntry.piece(*place, code, box), tensor))
            by_range = numbers.get(piece.name, {}) if piece.kind == VALUE else {}
            alone = whole and name not in part.boxes
            for (start, stop), of_range in by_range.items():
                is_ours = piece.start <= start < piece.stop
                for key, value in of_range.items():
                    if isinstance(value, torch.Tensor) and value.dim() > 0 and not alone:
                        why = _JOINED if whole else KEPT_STATES
                        raise CheckpointError(
                            f"optimizer state {key!r} of parameter {name!r} has shape"
                            f" {list(value.shape)}, not the parameter's: {why}"
                        )
                    if alone and is_apart(value):
                        if not is_ours:  # a peer of ours that owns it saves it
                            continue
                        scalars = part.scalars.setdefault(name, {})
                        if key in cuts.get(piece.name, {}):
                            scalars[key + CUT] = cuts[piece.name][key]
                        if stop - start < parts[piece.name][0].numel:
                            key = ranged(key, start, stop)
                    path = f"optimizer state {key!r} of {name!r}"
                    of_whole = partial(_store_whole, part, path, f"{name}|{STATE}{key}")
                    store = of_whole if alone else no_tensors
                    part.scalars.setdefault(name, {})[key] = encode(value, path, store)


def _store_whole(part: RankPart, what: str, key: str, path: str, tensor: torch.Tensor) -> str:
    """Store a tensor, at `path` in `what`, of a state that is whole with its parameter."""
    key += path.removeprefix(what)
    code = dtype_code(tensor.dtype, path)
    entry = TensorEntry.loose(f"{key}@0", tuple(tensor.shape), code)
    part.stored.append((entry, tensor.detach()))
    return key


def whole_states(saved: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the states of a parameter of `shape` that were cut with it in one part. Those of parts
    that are stepped apart keep their names, which say of what elements they are.
    """
    out, parts = dict[str, Any](), dict[str, list[tuple[Range, Any]]]()
    for name, value in saved.items():
        key, span = range_in(name, prod(shape))
        if key + CUT in saved:
            parts.setdefault(key, []).append((span, value))
        elif not key.endswith(CUT):
            out[name] = value
    for key, found in parts.items():
        in_order = sorted(found, key=itemgetter(0))
        out[key] = joined(in_order, (0, prod(shape)), iter(saved[key + CUT]), shape)
    return out


def encoded_options(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of each param group as JSON. Raises CheckpointError for one that has no
    form.
    """
    return [
        {
            key: encode(value, f"optimizer param group {index}: {key}", no_tensors)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        for index, group in enumerate(optimizer.param_groups)
    ]


def _encoded(name: str, value: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    tensors: dict[str, torch.Tensor] = {}

    def store(path: str, tensor: torch.Tensor) -> str:
        key = path
        while key in tensors:
            key += "'"
        tensors[key] = tensor.detach()
        return key

    return encode(value, name, store), tensors


def _fingerprint(value: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a hash of an encoded value, the same on ranks that hold the same."""
    parts = [
        digest(as_bytes(tensor.cpu())) + str(tensor.dtype) + str(tuple(tensor.shape))
        for tensor in tensors.values()
    ]
    return digest("".join([json.dumps(value), *parts]).encode())


# ------------------------------------------------------------------ random generators


def generators() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's random generators: torch's for the CPU,
    and by the name of its type for the current accelerator.
    """
    out: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        out["numpy"] = numpy.random.get_state()
    accelerator = Device.accelerator()
    if accelerator is not None:
        out[accelerator.type] = accelerator.generator_state()
    return out


def restore_generators(state: dict[str, Any]) -> None:
    """Restore the states that `generators` returned, or some of them."""
    if "python" in state:
        random.setstate(state["python"])
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(state["numpy"])
    accelerator = Device.accelerator()
    if accelerator is not None and accelerator.type in state:
        accelerator.set_generator_state(state[accelerator.type])
