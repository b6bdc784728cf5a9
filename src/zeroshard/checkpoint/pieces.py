"""What an engine saves, and where what is loaded goes: the one file here that knows both engines
and manifests.

Saved are, on the ranks together, each element once: values (the fp32 master of a trained parameter,
the weight of a frozen one), the optimizer's state of it, and averages; then buffers, the states of
what the user hands over, and the random generators. See docs/design/checkpoints.md.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from zeroshard.checkpoint.manifest import BUFFER, STATE, VALUE, ParameterEntry, TensorEntry, digest
from zeroshard.checkpoint.shards import Lent, Stored, as_bytes, dtype_code
from zeroshard.checkpoint.values import encode
from zeroshard.core.layout import Range
from zeroshard.core.repartition import overlap
from zeroshard.errors import CheckpointError, ConfigError
from zeroshard.optim.shards import ParamShard
from zeroshard.runtime.ema import EMA
from zeroshard.runtime.engine import Engine

__all__ = [
    "EXTRA",
    "RNG",
    "SCALER",
    "RankPart",
    "Stateful",
    "buffers_of",
    "collect",
    "divide",
    "generators",
    "parameters_of",
    "restore_generators",
]

RNG, EXTRA, SCALER = "rng", "extra", "scaler"  # our own names among the states
_RESERVED = (RNG, EXTRA, SCALER)


class Stateful(Protocol):
    """What can be handed to save() and load(): LR schedulers, data loaders, anything with these
    two methods.
    """

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass
class RankPart:
    """What one rank contributes: the tensors of its file, and what of the manifest it alone
    knows.
    """

    stored: list[Stored]
    # states and buffers: JSON, and tensors by key
    encoded: dict[str, tuple[Any, dict[str, torch.Tensor]]] = field(default_factory=dict)
    states: dict[str, Any] = field(default_factory=dict)  # those of `encoded` that this rank writes
    # parameter -> the optimizer's numbers
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)  # the optimizer's param groups


def parameters_of(engine: Engine) -> dict[str, ParameterEntry]:
    """Return what is known of every parameter, by the first of its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in engine.module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    layouts = engine.states.parameter_layouts()
    out = {}
    for first, parameter in engine.module.named_parameters():
        stride, trained = layouts[id(parameter)]
        out[first] = ParameterEntry(
            tuple(parameter.shape), stride, trained, tuple(names[id(parameter)][1:])
        )
    return out


def check_arguments(directory: object, engine: object, states: object) -> None:
    """Raise ConfigError, naming the argument, for what cannot be a directory, an engine or
    states.
    """
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
        if not (
            hasattr(state, "state_dict") and hasattr(state, "load_state_dict")
        ) and not isinstance(state, EMA):
            raise ConfigError(
                f"states[{name!r}] is a {type(state).__name__}, which has no state_dict() and"
                " load_state_dict(): give plain values as extra="
            )


def buffers_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Return the buffers that a state_dict holds, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, module in engine.module.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def collect(engine: Engine, states: Mapping[str, Stateful], extra: Any) -> RankPart:
    """Return what this rank holds, before `divide`. Raises CheckpointError for state that has no
    form in a checkpoint.
    """
    part = RankPart([])
    if engine.states.unsaved is not None:
        raise CheckpointError(f"what rests must not be saved: {engine.states.unsaved}")
    if engine.states.has_pending_gradients:
        raise CheckpointError(
            "there are gradients that no step has taken, and a checkpoint holds none: save after"
            " optimizer.step()"
        )
    averages = {name: state for name, state in states.items() if isinstance(state, EMA)}
    for name in states:
        if name in _RESERVED or not name or "|" in name or "@" in name:
            raise CheckpointError(
                f"states: the name {name!r} cannot be used (no '|' or '@', and not"
                f" {', '.join(_RESERVED)})"
            )
    _collect_pieces(engine, averages, part)
    _collect_groups(engine, part)
    values: dict[str, Any] = {
        name: _state_dict(name, state) for name, state in states.items() if name not in averages
    }
    values |= {RNG: generators(), EXTRA: extra, SCALER: engine.states.scaler_state()}
    part.encoded = {name: _encoded(name, value) for name, value in values.items()}
    part.encoded |= {
        f"{BUFFER}{name}": (None, {f"{BUFFER}{name}": tensor})
        for name, tensor in buffers_of(engine).items()
    }
    for _, tensors in part.encoded.values():
        for key, tensor in tensors.items():
            dtype_code(tensor.dtype, key)  # raises
    return part


def _state_dict(name: str, state: Stateful) -> dict[str, Any]:
    try:
        return state.state_dict()
    except Exception as odd:
        raise CheckpointError(
            f"states[{name!r}] gives no state_dict(): {type(odd).__name__}: {odd}"
        ) from odd


def divide(engine: Engine, part: RankPart) -> None:
    """Settle who writes what is no piece: rank 0 all of it, others what they hold differently.
    Collective.
    """
    mine = {name: _fingerprint(*pair) for name, pair in part.encoded.items()}
    everyone = [
        json.loads(answer) for answer in engine.exchange(json.dumps(mine).encode(), "zs.save()")
    ]
    for name, (value, tensors) in part.encoded.items():
        alike = all(other.get(name) == everyone[0].get(name) for other in everyone)
        is_buffer = name.startswith(BUFFER)
        if engine.rank == 0 or (mine[name] != everyone[0].get(name) if is_buffer else not alike):
            part.stored += [
                (_loose(f"{key}@{engine.rank}", tensor), tensor) for key, tensor in tensors.items()
            ]
            if not is_buffer:
                part.states[name] = {"same" if alike else "own": value}


def _collect_pieces(engine: Engine, averages: Mapping[str, EMA], part: RankPart) -> None:
    stepped: dict[int, list[ParamShard]] = {}
    for owned in engine.states.stepped_pieces():
        stepped.setdefault(id(owned.parameter), []).append(owned)
    firsts = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    for piece in engine.states.resting_pieces(share=True):
        name = firsts[id(piece.parameter)]
        values = piece.tensor if piece.state.on_device else piece.borrowed
        part.stored.append(_piece(name, VALUE, piece.start, piece.stop, values, piece.state.dtype))
        for average, ema in averages.items():
            if piece.master is not None:
                number, span = piece.master
                averages_here = ema.averages[number][span]
                part.stored.append(
                    _piece(
                        name, average, piece.start, piece.stop, averages_here, averages_here.dtype
                    )
                )
        for owned in stepped.get(id(piece.parameter), ()):
            _collect_state(engine, name, owned, (piece.start, piece.stop), part)


def _collect_state(
    engine: Engine, name: str, owned: ParamShard, wanted: Range, part: RankPart
) -> None:
    """Collect the optimizer's state of what one piece has of elements `wanted` of a parameter."""
    assert engine.optimizer is not None
    common = overlap(wanted, (owned.piece.start, owned.piece.stop))
    if common is None:
        return
    start, stop = common
    for key, value in engine.optimizer.state.get(owned.tensor, {}).items():
        if not (isinstance(value, torch.Tensor) and value.dim() > 0):
            part.scalars.setdefault(name, {})[key] = encode(
                value, f"optimizer state {key!r} of {name!r}", _no_tensors
            )
            continue
        if value.shape != owned.tensor.shape:
            raise CheckpointError(
                f"optimizer state {key!r} of parameter {name!r} has shape {list(value.shape)}, not"
                " that of the parameter"
            )
        numbers = engine.states.optimizer_state(owned, key, start, stop)
        part.stored.append(_piece(name, f"{STATE}{key}", start, stop, numbers, value.dtype))


def _collect_groups(engine: Engine, part: RankPart) -> None:
    if engine.optimizer is None:
        return
    firsts = {id(parameter): name for name, parameter in engine.module.named_parameters()}
    for index, (group, parameters) in enumerate(
        zip(engine.optimizer.param_groups, engine.states.param_groups(), strict=True)
    ):
        options = {
            key: encode(value, f"optimizer param group {index}: {key}", _no_tensors)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        part.groups.append(
            {"params": [firsts[id(parameter)] for parameter in parameters], "options": options}
        )


def _no_tensors(path: str, tensor: torch.Tensor) -> str:
    raise CheckpointError(
        f"{path} is a tensor of shape {list(tensor.shape)}, which has no place in a checkpoint"
    )


def _piece(
    name: str, kind: str, start: int, stop: int, numbers: torch.Tensor | Lent, dtype: torch.dtype
) -> Stored:
    return (
        TensorEntry(
            0,
            0,
            dtype_code(dtype, f"{kind} of {name!r}"),
            (stop - start,),
            (),
            kind,
            name,
            start,
            stop,
        ),
        numbers,
    )


def _loose(key: str, tensor: torch.Tensor) -> TensorEntry:
    return TensorEntry(0, 0, dtype_code(tensor.dtype, key), tuple(tensor.shape), (), key)


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
    """Return the states of Python's, numpy's and torch's random generators."""
    out: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        out["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available():
        out["cuda"] = torch.cuda.get_rng_state()
    return out


def restore_generators(state: dict[str, Any]) -> None:
    """Take over what `generators` returned."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(state["numpy"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
