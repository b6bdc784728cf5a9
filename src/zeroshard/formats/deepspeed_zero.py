"""A checkpoint that DeepSpeed's ZeRO wrote, stages 1, 2 and 3: fp32 masters and the optimizer's
state, by the names of the parameters.

    DIR/latest                                              the name of the newest tag
    DIR/global_step10/mp_rank_00_model_states.pt            names, shapes, buffers, frozen weights
                                                            (stages 1, 2)
    DIR/global_step10/zero_pp_rank_R_mp_rank_00_*.pt        the same (stage 3) and the optimizer of
                                                            rank R; "bf16_" may stand before it

Each rank has one flat tensor per group and kind (master, exp_avg, ...). In stages 1 and 2 the
ranks' tensors, one after another, are all parameters of the group, one after another ("." is
padding):
                                                         | a a a b b b b c | c c d d d . . . |
In stage 3 each rank has a slice of each parameter:      | a a b b c d d | a . b b c d . |

Every slice becomes a piece of ours, a view of the mapped file. The files are opened with
``weights_only=True`` and stand-ins for four of DeepSpeed's classes. Sources: stage_1_and_2.py,
stage3.py, utils/zero_to_fp32.py of DeepSpeed 0.19. A "universal" checkpoint has a folder for each
parameter instead. Tensor or pipeline parallel and mixture-of-experts ones raise
ConfigError.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from zeroshard.core.placement import STATE, VALUE
from zeroshard.errors import CheckpointError, ConfigError
from zeroshard.formats.importer import Importer, is_flat_state, load_tensors, optimizer_class

# ---------------------------------------------------------------------------------------- universal
# A "universal" checkpoint of DeepSpeed's: what its ds_to_universal writes, one folder a parameter.
#
#     DIR/mp_rank_00_model_states.pt        names, shapes, buffers, frozen weights, as in any other
#     DIR/zero/optimizer_state.pt           param groups
#     DIR/zero/NAME/fp32.pt                 the whole master; exp_avg.pt, exp_avg_sq.pt, step.pt
#
# Each tensor is whole, perhaps flat and padded (stage 3), perhaps in a dictionary under "param".
# Stages 1 and 2 also leave a folder with fp32.pt for every buffer, frozen weight and second name of
# a tied one: those are taken from the model's file. Read as this file reads the others. Tensor
# parallel ones have been merged: nothing of them is lost. Experts and pipelines raise ConfigError
# there. Source: checkpoint/ds_to_universal.py of DeepSpeed 0.19.


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
            if name not in self.names:  # those name folders there, and no paths
                raise CheckpointError(f"{self.directory} has no folder for parameter {name!r}")
            shape = importer.parameters[name].shape
            for path in sorted((self.directory / name).glob("*.pt")):
                content = self._load(path)
                value = content["param"] if isinstance(content, dict) else content
                if path.stem == "step" or not isinstance(value, torch.Tensor) or not value.dim():
                    scalars.setdefault(name, {})[path.stem] = value
                    continue
                held.setdefault(name, set()).add(path.stem)
                kind = VALUE if path.stem == _MASTER else f"{STATE}{path.stem}"
                importer.piece(name, kind, 0, _whole(path, value, shape))
        # no parameter may lack a tensor of those that others have
        sets = {frozenset(one) for one in held.values()}
        for name in known:
            mine = held.get(name, set())
            more = next((other - mine for other in sets if mine < other), frozenset[str]())
            for kind in sorted({_MASTER} - mine or more):
                raise CheckpointError(f"{self.directory / name} lacks {kind}.pt, or a tensor in it")
        return scalars


def _whole(path: Path, value: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return the elements of a parameter, without padding. Raises CheckpointError."""
    numel = prod(shape)
    flat = value.reshape(-1)
    is_padded = value.dim() == 1 and flat.numel() > numel
    if flat.numel() != numel and not is_padded:
        raise CheckpointError(f"{path} has {flat.numel()} elements, and the parameter {numel}")
    return flat[:numel]


# ---------------------------------------------------------------------------------------- deepspeed

_RANK_FILE = re.compile(
    r"(?:bf16_|fp16_)?(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_(model|optim)_states\.pt"
)
_TAG = re.compile(r"[\w.-]+")


class _StandIn:
    """Stands for one of DeepSpeed's objects; keeps its arguments."""

    def __init__(self, *args: Any) -> None:
        self.args = args


class _ZeroStage(_StandIn):
    """Stands for a member of DeepSpeed's enum of stages; keeps its number."""


_CLASSES = (
    (_StandIn, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_StandIn, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_ZeroStage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_StandIn, "deepspeed.utils.tensor_fragment.fragment_address"),
)
_ENUMS = {
    _ZeroStage: {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3}
}


_TORCH_NAMES = {  # by the type in DeepSpeed's configuration
    "adam": "AdamW", "adamw": "AdamW", "sgd": "SGD", "lion": "Lion", "adagrad": "Adagrad",
}  # fmt: skip


@dataclass(frozen=True)
class _Slice:
    """Elements ``[start, start + count)`` of a parameter: in `rank`'s group `group`, from `at`."""

    rank: int
    group: int
    at: int
    start: int
    count: int


@dataclass(frozen=True)
class _Rank:
    """The content of one rank's optimizer file, by group."""

    masters: list[torch.Tensor]
    states: list[dict[str, Any]]


def read_deepspeed(source: Path, importer: Importer) -> None:
    """Take the newest tag in `source`, or the tag that it is. Raises CheckpointError."""
    directory = _tag(source, importer)
    models, optims = _files(directory)
    try:
        contents = [_load(path) for path in models]
        if (directory / "zero").is_dir():
            _take_universal(directory, contents, importer)
        else:
            _take(directory, contents, [_load(path) for path in optims], importer)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as odd:
        raise CheckpointError(
            f"{directory} is not as DeepSpeed writes it: {type(odd).__name__}: {odd}"
        ) from None


def _tag(source: Path, importer: Importer) -> Path:
    if any(source.glob("*_model_states.pt")):
        return source
    numbered = {
        int(path.name.removeprefix("global_step")): path
        for path in source.glob("global_step*")
        if path.name[11:].isdecimal()
    }
    latest = ""
    _refuse_link(source / "latest")
    if (source / "latest").is_file():
        with (source / "latest").open(encoding="utf-8", errors="replace") as file:
            latest = file.read(200).strip()
    if _TAG.fullmatch(latest) and latest not in (".", "..") and (source / latest).is_dir():
        _refuse_link(source / latest)
        return source / latest
    if not numbered:
        raise CheckpointError(
            f"{source} holds no DeepSpeed checkpoint: its file 'latest' names {latest!r}, and there"
            " is no global_step*"
        )
    newest = numbered[max(numbered)]
    importer.notes.append(
        f"{newest.name} is taken: the file 'latest' does not name a directory there"
    )
    return newest


def _refuse_link(path: Path) -> None:
    """Raise CheckpointError for a link, which may lead out of the checkpoint."""
    if path.is_symlink():
        raise CheckpointError(
            f"{path} cannot be read: it is a symbolic link, which is not followed"
        )


def _files(directory: Path) -> tuple[list[Path], list[Path]]:
    """Return the model and the optimizer files, by rank. Raises ConfigError for other layouts."""
    found: dict[str, dict[int, Path]] = {"model": {}, "optim": {}}
    for path in sorted(directory.iterdir()):
        match = _RANK_FILE.fullmatch(path.name)
        if match is None and path.suffix == ".pt":
            raise ConfigError(
                f"{path} belongs to a pipeline or a mixture of experts, which is not imported"
            )
        if match is not None and int(match[2]):
            raise ConfigError(
                f"{path} is of tensor parallel rank {int(match[2])}; such checkpoints are not"
                " imported"
            )
        if match is not None:
            found[match[3]][int(match[1] or 0)] = path
    for files in found.values():
        lacking = sorted(set(range(len(files))) - files.keys())
        if lacking:
            raise CheckpointError(f"{directory} lacks the files of rank {lacking[0]}")
    if not found["model"]:
        raise CheckpointError(f"{directory} lacks a file of model states")
    models, optims = ([found[kind][rank] for rank in sorted(found[kind])] for kind in found)
    return models, optims


def _read(path: Path) -> Any:
    _refuse_link(path)
    return load_tensors(path, str(path), _CLASSES, _ENUMS)


def _load(path: Path) -> dict[str, Any]:
    content = _read(path)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not what DeepSpeed writes")
    return content


def _take(
    directory: Path,
    models: Sequence[Mapping[str, Any]],
    optims: Sequence[Mapping[str, Any]],
    importer: Importer,
) -> None:
    first = models[0]
    shapes = _take_model(directory, models, importer, has_states=bool(optims))
    if not optims:
        importer.notes.append(
            "the weights are the model's own, and there is no optimizer's state: ZeRO has left no"
            " *_optim_states.pt"
        )
        return
    states = [content["optimizer_state_dict"] for content in optims]
    _take_trained(directory, states, shapes, importer)
    _take_numbers(first, optims[0], shapes, importer)


def _take_model(
    directory: Path,
    models: Sequence[Mapping[str, Any]],
    importer: Importer,
    *,
    has_states: bool,
) -> list[dict[str, tuple[int, ...]]]:
    """Declare the parameters, take what is not trained, and return the shapes of the trained."""
    first = models[0]
    if first.get("mp_world_size", 1) > 1:
        raise ConfigError(
            f"{directory} is tensor parallel over {first['mp_world_size']} ranks; such checkpoints"
            " are not imported"
        )
    importer.step = int(first.get("global_steps") or 0)
    aliases: dict[str, list[str]] = {}
    for alias, name in (first.get("shared_params") or {}).items():
        aliases.setdefault(name, []).append(alias)
    shapes = _shapes(first) if has_states else []
    for group in shapes:
        for name, shape in group.items():
            importer.parameter(name, shape, aliases=aliases.get(name, ()))
    tied = {alias for others in aliases.values() for alias in others}
    _take_untrained(directory, models, importer, tied, aliases, trained=not has_states)
    return shapes


def _take_universal(
    directory: Path, models: Sequence[Mapping[str, Any]], importer: Importer
) -> None:
    """Take a universal checkpoint: whole tensors by name."""
    files = UniversalFiles(directory, _read)
    shapes = _take_model(directory, models, importer, has_states=True)
    first = models[0]
    scalars = files.take(shapes, first["module"], importer)
    keys = {entry.kind.removeprefix(STATE) for entry, _ in importer.stored if entry.kind}
    groups = files.groups()
    if not groups:
        groups = [{"params": [number]} for number in range(len(shapes))]
        importer.notes.append(
            "the options of the param groups (lr, ...) are not taken: there is no"
            " zero/optimizer_state.pt that has them"
        )
    name = importer.optimizer_name or _class(_optimizer_section(first), groups, keys)
    steps = int(first.get("global_steps") or 0) - int(first.get("skipped_steps") or 0)
    if {"exp_avg", "exp_avg_sq"} <= keys:
        for parameter in (one for group in shapes for one in group):
            held = scalars.setdefault(parameter, {})
            held["step"] = torch.tensor(float(held.get("step") or steps), dtype=torch.float32)
    importer.optimizer_numbers(name or "unknown", _named_groups(groups, shapes), scalars)


def _optimizer_section(content: Mapping[str, Any]) -> Mapping[str, Any]:
    return (content.get("ds_config") or {}).get("optimizer") or {}


def _named_groups(
    groups: Sequence[Mapping[str, Any]], shapes: list[dict[str, tuple[int, ...]]]
) -> list[dict[str, Any]]:
    """Return param groups by the names of their parameters, in place of DeepSpeed's numbers."""
    return [
        {**group, "params": [name for number in group["params"] for name in shapes[number]]}
        for group in groups
    ]


def _shapes(model: Mapping[str, Any]) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of the trained parameters, by group and name."""
    groups = model.get("param_shapes") or ()
    return [{name: tuple(shape) for name, shape in group.items()} for group in groups]


def _take_untrained(
    directory: Path,
    models: Sequence[Mapping[str, Any]],
    importer: Importer,
    tied: set[str],
    aliases: Mapping[str, list[str]],
    *,
    trained: bool,
) -> None:
    """Take buffers and frozen weights: whole in the first file, or one slice per rank (stage 3)."""
    first = models[0]
    buffers = set(first["buffer_names"] or ())
    declared = {name: shape for group in _shapes(first) for name, shape in group.items()}
    frozen = first.get("frozen_param_shapes") or {} if first.get("frozen_param_fragments") else {}
    for name, shape in frozen.items():
        importer.parameter(name, shape, trained=False, aliases=aliases.get(name, ()))
        position, numel = 0, prod(shape)
        for model in models:
            part = model["frozen_param_fragments"][name].reshape(-1)[: numel - position]
            importer.piece(name, VALUE, position, part)
            position += part.numel()
        if position != numel:
            raise CheckpointError(
                f"{directory} holds {position} of the {numel} elements of frozen parameter {name!r}"
            )
    for name, tensor in first["module"].items():
        if name in importer.parameters or name in tied:
            continue
        if name in buffers:
            importer.buffer(name, tensor)
        elif not isinstance(tensor, torch.Tensor):
            importer.notes.append(
                f"{name!r} is not taken: it is a {type(tensor).__name__}, not a tensor"
            )
        elif name in declared and tuple(tensor.shape) != declared[name]:
            raise CheckpointError(
                f"{directory} lacks the files *_optim_states.pt, in which parameter {name!r} lies"
            )
        elif not tensor.numel():
            importer.notes.append(
                f"{name!r} is not taken: DeepSpeed saved nothing of it (its optimizer does not"
                " have it)"
            )
        else:
            importer.parameter(name, tensor.shape, trained=trained, aliases=aliases.get(name, ()))
            importer.piece(name, VALUE, 0, tensor)


# ------------------------------------------------------------------ sharded parameters


def _take_trained(
    directory: Path,
    optims: Sequence[Mapping[str, Any]],
    shapes: list[dict[str, tuple[int, ...]]],
    importer: Importer,
) -> None:
    stage = _stage(optims[0]["zero_stage"])
    count = optims[0]["partition_count"]
    world = max(count) if isinstance(count, list) else int(count)
    if world != len(optims):
        raise CheckpointError(
            f"{directory} holds optimizer files of {len(optims)} ranks, and {world} wrote it"
        )
    ranks = [_rank(optim, stage) for optim in optims]
    if stage == 3:
        slices = _cut_parameters(directory, ranks, shapes)
    else:
        slices = _cut_groups(directory, ranks, shapes, optims[0].get("param_alignment_paddings"))
    for name, cut in slices:
        tensors = {VALUE: ranks[cut.rank].masters[cut.group]} | {
            f"{STATE}{key}": value
            for key, value in ranks[cut.rank].states[cut.group].items()
            if is_flat_state(value)
        }
        for kind, flat in tensors.items():
            part = flat.reshape(-1)[cut.at : cut.at + cut.count]
            if part.numel() != cut.count:
                raise CheckpointError(
                    f"{directory}: rank {cut.rank} lacks elements of {kind} of parameter {name!r}"
                )
            importer.piece(name, kind, cut.start, part)


def _stage(value: Any) -> int:
    stage = int(value.args[0]) if isinstance(value, _StandIn) else int(value)
    if stage not in (1, 2, 3):
        raise ValueError(f"ZeRO stage {stage}")
    return stage


def _rank(optim: Mapping[str, Any], stage: int) -> _Rank:
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    masters = list(optim[key])
    base = optim["optimizer_state_dict"] if stage == 3 else optim["base_optimizer_state"]
    # a list where "elastic_checkpoint" was on
    states = base["state"] if isinstance(base, dict) else dict(enumerate(base))
    return _Rank(masters, [dict(states.get(group) or {}) for group in range(len(masters))])


def _cut_groups(
    directory: Path,
    ranks: list[_Rank],
    shapes: list[dict[str, tuple[int, ...]]],
    paddings: Sequence[Sequence[int]] | None,
) -> Iterator[tuple[str, _Slice]]:
    """Yield where the parameters lie in stages 1 and 2."""
    for group, parameters in enumerate(shapes):
        # of each rank's share; only the last one's has lost its padding
        size = ranks[0].masters[group].numel()
        position = 0
        for number, (name, shape) in enumerate(parameters.items()):
            stop = position + prod(shape)
            for rank in range(len(ranks)):
                low, high = max(position, rank * size), min(stop, (rank + 1) * size)
                if low < high:
                    yield name, _Slice(rank, group, low - rank * size, low - position, high - low)
            position = stop + (int(paddings[group][number]) if paddings else 0)
        align = 2 * len(ranks)  # DeepSpeed's own check: the sizes agree, but for padding
        if -(-position // align) != -(-size * len(ranks) // align):
            raise CheckpointError(
                f"{directory}: group {group} has {size * len(ranks)} elements, and its parameters"
                f" {position}"
            )


def _cut_parameters(
    directory: Path, ranks: list[_Rank], shapes: list[dict[str, tuple[int, ...]]]
) -> Iterator[tuple[str, _Slice]]:
    """Yield where the parameters lie in stage 3: the groups of a rank are one row of slices."""
    sizes = [tensor.numel() for tensor in ranks[0].masters]
    position = 0
    for parameters in shapes:
        for name, shape in parameters.items():
            numel = prod(shape)
            share = -(-numel // len(ranks))
            for rank in range(len(ranks)):
                start, stop = rank * share, min((rank + 1) * share, numel)
                for group, at, count in _spans(sizes, position, max(stop - start, 0)):
                    yield name, _Slice(rank, group, at, start, count)
                    start += count
            position += share
    if position != sum(sizes):
        raise CheckpointError(
            f"{directory}: each rank has {sum(sizes)} elements, and its share of the parameters is"
            f" {position}"
        )


def _spans(sizes: Sequence[int], position: int, count: int) -> Iterator[tuple[int, int, int]]:
    """Yield (group, first, count) of `count` elements from `position` of consecutive groups."""
    begin = 0
    for group, size in enumerate(sizes):
        low, high = max(position, begin), min(position + count, begin + size)
        if low < high:
            yield group, low - begin, high - low
        begin += size


# ------------------------------------------------------------------ the optimizer's numbers


def _take_numbers(
    model: Mapping[str, Any],
    optim: Mapping[str, Any],
    shapes: list[dict[str, tuple[int, ...]]],
    importer: Importer,
) -> None:
    """Take class, param groups and numbers of steps."""
    held = optim["optimizer_state_dict"]
    is_stage_3 = "fp32_flat_groups" in held
    base = held.get("optimizer_state_dict") if is_stage_3 else held["base_optimizer_state"]
    rank = _rank(held, _stage(held["zero_stage"]))
    entries = [entry for state in rank.states for entry in state.items()]
    keys = {key for key, value in entries if isinstance(value, torch.Tensor)}
    groups = [{"params": [number]} for number in range(len(shapes))]
    if isinstance(base, dict):
        groups = base["param_groups"]
    config = _optimizer_section(optim if optim.get("ds_config") else model)
    name = importer.optimizer_name or _class(config, groups, keys)
    if name is None:
        importer.notes.append(
            f"the optimizer's class is not known from its state ({', '.join(sorted(keys))}):"
            " --optimizer says it"
        )
    steps = int(model.get("global_steps") or 0) - int(model.get("skipped_steps") or 0)
    scalars: dict[str, dict[str, Any]] = {}
    for number, (parameters, state) in enumerate(zip(shapes, rank.states, strict=True)):
        numbers = {
            key: value for key, value in state.items() if key != "step" and not is_flat_state(value)
        }
        options: Mapping[str, Any] = next((g for g in groups if number in g["params"]), {})
        # torch's Adam wants the number of steps as a tensor
        if {"exp_avg", "exp_avg_sq"} <= state.keys():
            found = state.get("step") or held.get("base_optimizer_state_step")
            found = found or options.get("step") or steps
            numbers["step"] = torch.tensor(float(found), dtype=torch.float32)
        scalars |= dict.fromkeys(parameters, numbers)
    importer.optimizer_numbers(name or "unknown", _named_groups(groups, shapes), scalars)


def _class(
    config: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], keys: set[str]
) -> str | None:
    """Return torch's class name. DeepSpeed's "Adam" is AdamW unless ``adam_w_mode`` is off."""
    kind = str(config.get("type", "")).lower()
    if kind == "adam" and not (config.get("params") or {}).get("adam_w_mode", True):
        return "Adam"
    return optimizer_class(groups, keys) or _TORCH_NAMES.get(kind)
