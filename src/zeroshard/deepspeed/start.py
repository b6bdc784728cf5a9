"""``deepspeed.initialize``: from a model, a configuration and what the caller brings to an engine.

    configuration . process group . optimizer . shard (rank 0's values count) . schedule . loader

Every argument of DeepSpeed's is taken or refused with the reason, before the model is changed.
"""

from __future__ import annotations

import argparse
import base64
import copy
import logging
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import zeroshard as zs
from zeroshard.comm.groups import ranks_through
from zeroshard.config.strict_json import parse_json
from zeroshard.core.precision import parse_dtype
from zeroshard.deepspeed import comm, held_parameters
from zeroshard.deepspeed.answers import Client, as_config_error, complete_batch
from zeroshard.deepspeed.deepspeed_engine import DeepSpeedEngine, LeafWalk
from zeroshard.deepspeed.helpers import default_git, log_dist, make_loader
from zeroshard.deepspeed.helpers import logger as _log
from zeroshard.deepspeed.keys.table import key_of, pattern_of
from zeroshard.deepspeed.lr_schedules import make_schedule
from zeroshard.deepspeed.optimizers import make_optimizer, mark_for_muon, steps_whole
from zeroshard.deepspeed.shim import VERSION
from zeroshard.deepspeed.zero import end_init_blocks
from zeroshard.optim.several import class_name, each_of

# ---------------------------------------------------------------- the verdict about a configuration
# One answer, for ``initialize()`` and for ``zeroshard config explain``: does it take the file?
#
#     each key . all options together . the batch sizes . optimizer . schedule . what watches
#
# A refusal is a finding, as in ``zeroshard.read_deepspeed()``. Optimizer and schedule are made, and
# take a step, on trial: over a layer of two by two. Cost: some milliseconds.


Check = Callable[[torch.optim.Optimizer, nn.Module, zs.Config], None]
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")
# values in the place of "auto" for parameters that a schedule cannot do without
_FILLED = {"total_num_steps": 100, "cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}
_MADE = "initialize() makes it; shard() and ZeroTrainer take the object that they are given"


def findings(file: zs.DeepSpeedFile, check: Check) -> list[zs.Finding]:
    """Return what each key does in ``initialize()`` on some number of ranks, where "auto" was
    filled in. `check` raises ConfigError for an optimizer that cannot be sharded.
    """
    judge = _Judge(file, filled=True)
    judge.options(None)
    judge.optimizer(check)
    judge.schedule()
    judge.watched()
    return judge.findings


def accepted(
    file: zs.DeepSpeedFile, ranks: int, given: Collection[str], tell: Callable[[int, str], None]
) -> zs.Config:
    """Return zeroshard's part of the configuration. Raises ConfigError with every refusal, one a
    line. Sections that are `given` as objects are not looked at. `tell` takes a level of logging
    and a line for each key that is none of DeepSpeed's, or for which nothing is written.
    """
    judge = _Judge(file, filled=False)
    judge.options(ranks)
    judge.watched()
    if "optimizer" not in given:
        judge.optimizer(lambda *_: None)  # shard() checks the real one
    if "scheduler" not in given:
        judge.schedule()
    judged = replace(file, findings=tuple(judge.findings))
    judged.checked_fields()
    for line in judged.unknown():
        tell(logging.WARNING, line)
    for one in judged.findings:
        if (key := key_of(one.key)) and key.watches_in_vain(one.value):
            tell(logging.INFO, f"{one.key}: nothing is written for it here; {key.why}")
    return file.config()


def section(
    data: dict[str, Any], name: str, *, filled: bool = False
) -> tuple[str, dict[str, Any]] | None:
    """Return the type and the parameters of ``optimizer`` or ``scheduler``, without those that are
    "auto", or with a value in their place where they are said to be `filled` in.
    """
    found = data.get(name)
    if not found:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("type"), str):
        raise zs.ConfigError(f"the section {name!r} needs a type: {found!r}")
    params = found.get("params") or {}
    if not isinstance(params, dict):
        raise zs.ConfigError(f"{name}.params={params!r} is not an object")
    stand_ins = _FILLED if filled else {}
    return found["type"], {
        key: stand_ins[key] if value == "auto" else value
        for key, value in params.items()
        if value != "auto" or key in stand_ins
    }


def try_schedule(kind: str, params: dict[str, Any], groups: int) -> None:
    """Make a schedule over an optimizer with `groups` param groups, and step it. Raises
    ConfigError.
    """
    parameters = [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(groups)]
    with as_config_error(f"scheduler.params of {kind}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's: no optimizer steps here
        schedule = make_schedule(kind, params, torch.optim.Adam(parameters, lr=0.1))
        for iteration in (0, 1, 10, 10**6):
            if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                schedule.step(1.0)  # the training gives it: engine.step(lr_kwargs={"metrics": ...})
            elif isinstance(schedule, torch.optim.lr_scheduler.LRScheduler):
                schedule.step()
            else:
                schedule.step(iteration)


class _Judge:
    """One configuration's findings, to which refusals are added."""

    def __init__(self, file: zs.DeepSpeedFile, *, filled: bool) -> None:
        self.findings = list(file.findings)
        self._file = file
        self._filled = filled

    def options(self, ranks: int | None) -> None:
        """Judge the options together, and the batch sizes: over `ranks`, or over some number."""
        if self._file.refusals():
            return
        with self._refusing(""):
            settings = self._file.config()
            settings.refuse_unsupported()
        if any(one.verdict == "refused" for one in self.findings):
            return
        sizes = [self._file.data.get(name) for name in _SIZES]
        if self._filled and "auto" in sizes and not any(isinstance(one, int) for one in sizes):
            return
        with self._refusing(_SIZES[0]):
            if ranks is None:  # a number of ranks on which they hold, if there is one
                train, micro = settings.train_batch_size, settings.train_micro_batch_size_per_gpu
                steps, leaves = settings.gradient_accumulation_steps, settings.leaves_of(1)
                ranks = 1
                if leaves is not None:
                    ranks = max(1, leaves[0] // (steps or leaves[0]))
                elif train is not None and micro is not None:
                    ranks = max(1, train // (micro * (steps or 1)))
            complete_batch(settings, ranks)

    def optimizer(self, check: Check) -> None:
        """Judge the section ``optimizer``."""

        def make(kind: str, params: dict[str, Any]) -> str:
            device = torch.accelerator.current_accelerator(check_available=True)
            # zeros: an initialised layer would draw from the script's random numbers
            zeros = [torch.zeros(shape, device=device or "cpu") for shape in [(2, 2), (2,)]]
            model = nn.ParameterList(zeros)
            mark_for_muon(model)
            optimizer = make_optimizer(kind, params, list(model.parameters()))
            is_whole = steps_whole(optimizer)
            check(optimizer, model, zs.Config(ownership="whole" if is_whole else None))
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            with as_config_error(f"optimizer.params of {kind}"):
                optimizer.step(lambda: 0.0)
            kinds = map(type, each_of(optimizer))
            made = " + ".join(f"{one.__module__}.{one.__name__}" for one in kinds)
            return f"{made}, ownership='whole'" if is_whole else made

        self._make("optimizer", make)

    def schedule(self) -> None:
        """Judge the section ``scheduler``, for as many param groups as it has rates."""

        def make(kind: str, params: dict[str, Any]) -> str:
            lists = [len(one) for one in params.values() if isinstance(one, list)]
            try_schedule(kind, params, groups=max([*lists, 1]))
            return kind

        self._make("scheduler", make)

    def watched(self) -> None:
        """Say what is written for keys that only watch."""
        for place, one in enumerate(self.findings):
            key = key_of(one.key)
            plain = (one.verdict, one.source) == ("ignored", "file")
            if key is not None and key.done and plain and key.is_on(one.value):
                self.findings[place] = replace(one, verdict="honoured", why=key.done)

    def _make(self, name: str, make: Callable[[str, dict[str, Any]], str]) -> None:
        """Say that a section is honoured, and what `make` makes of it."""
        with self._refusing(f"{name}.type"):
            found = section(self._file.data, name, filled=self._filled)
            made = "" if found is None else make(*found)
            for place, one in enumerate(self.findings):
                if found and one.key.startswith(f"{name}.") and one.verdict == "ignored":
                    changes = {"becomes": made if one.key == f"{name}.type" else "", "why": _MADE}
                    self.findings[place] = replace(one, verdict="honoured", **changes)

    @contextmanager
    def _refusing(self, key: str) -> Iterator[None]:
        """Turn a ConfigError into a finding of `key`, or of all keys together."""
        try:
            yield
        except zs.ConfigError as error:
            place = next((n for n, one in enumerate(self.findings) if one.key == key), None)
            if place is None:
                self.findings.append(zs.Finding("", None, "file", "refused", "", str(error)))
            elif self.findings[place].verdict != "refused":
                one = self.findings[place]
                why = str(error).removeprefix(f"{key}={one.value!r} ")
                self.findings[place] = replace(one, verdict="refused", becomes="", why=why)


# --------------------------------------------------------------------------------------- leaf flags
# ``deepspeed.utils.z3_leaf_module``: flags on modules that are gathered as one.
#
# Nothing here depends on them: units may run in any order, and in part (mixtures of experts). They
# are kept, so that a program reads what it has set.


_flagged: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def z3_leaf_module(model: nn.Module) -> bool:
    """Whether this module has the flag."""
    return model in _flagged


def z3_leaf_parameter(model: nn.Parameter) -> bool:
    """Whether this parameter belongs to a module with the flag."""
    return any(model is one for module in _flagged for one in module.parameters())


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model` with the flag."""
    return [module for module in model.modules() if module in _flagged]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Give this module the flag, or take it."""
    (_flagged.add if flag else _flagged.discard)(model)
    vars(model)["_z3_leaf"] = flag  # programs read DeepSpeed's own attribute


def _set(
    model: nn.Module, found: Iterable[nn.Module], missing: object, flag: bool, raises: bool
) -> list[nn.Module]:
    """Set the flag of each. Raises ValueError where something is `missing` and that `raises`."""
    if missing and raises:
        raise ValueError(f"{type(model).__name__} has no module of {missing}")
    modules = list({id(one): one for one in found}.values())
    for one in modules:
        set_z3_leaf_module(one, flag)
    return modules


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[type | str], raise_if_not_found: bool = True,
    flag: bool = True,
) -> list[nn.Module]:  # fmt: skip
    """Flag the modules of these classes (or names of classes) and return them. Raises ValueError
    where there are none.
    """

    def kinds(module: nn.Module) -> set[str]:
        kind = type(module)
        return {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}

    classes = tuple(one for one in leaf_module_classes if isinstance(one, type))
    named = {one for one in leaf_module_classes if not isinstance(one, type)}
    found = [one for one in model.modules() if isinstance(one, classes) or kinds(one) & named]
    missing = [] if found else leaf_module_classes
    return _set(model, found, missing, flag, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: list[type | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Take the flag off the modules of these classes and return them."""
    return set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found, flag=False)


def _by_name(
    model: nn.Module, names: list[str], fits: Callable[[str, str], bool], flag: bool, raises: bool
) -> tuple[list[nn.Module], list[str]]:
    modules = dict(model.named_modules())
    missing = [one for one in names if not any(fits(name, one) for name in modules)]
    found = [modules[name] for one in names for name in modules if fits(name, one)]
    return _set(model, found, missing, flag, raises), missing


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: list[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Flag the modules of these names; return them and the names that there are not. Raises
    ValueError for such.
    """
    return _by_name(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: list[str], flag: bool = True,
    raise_if_not_found: bool = True,
) -> tuple[list[nn.Module], list[str]]:  # fmt: skip
    """The same of modules with names that end so."""
    return _by_name(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


# --------------------------------------------------------------------------------------- initialize

_OPTIONS = (
    "distributed_port", "mpu", "dist_init_required", "collate_fn", "config", "mesh_param",
    "config_params",
)  # fmt: skip


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    **options: Any,
) -> tuple[DeepSpeedEngine, Any, DataLoader[Any] | None, Any]:
    """Shard `model` and return (engine, optimizer, data loader, schedule). Collective.

    `optimizer` and `lr_scheduler` may be callables, of the parameters and of the optimizer; they go
    before the configuration's sections. `training_data` becomes a loader of this rank's part.
    Options are distributed_port, dist_init_required, collate_fn and the configuration (`config`,
    `config_params` or ``args.deepspeed_config``: a dict, a path, JSON or base64). `mpu` and
    `mesh_param` are refused: other axes than the data parallel one are zeroshard.shard(mesh=).
    """
    for name in options:
        if name not in _OPTIONS:
            raise zs.ConfigError(f"initialize() has no argument {name!r}")
    if model is None:
        raise zs.ConfigError("initialize() needs a model")
    for name in ("mpu", "mesh_param"):
        if options.get(name) is not None:
            raise zs.ConfigError(
                f"initialize({name}=): only data parallel ranks are known here; for tensor or"
                " pipeline parallel ones call zeroshard.shard(mesh=) with a DeviceMesh"
            )
    file = zs.read_deepspeed(_read_config(args, options))
    comm.init_distributed(
        distributed_port=options.get("distributed_port", 29500),
        dist_init_required=options.get("dist_init_required"),
    )
    git = f"git-hash={default_git}, git-branch={default_git}"
    log_dist(f"DeepSpeed info: version={VERSION}, {git}", ranks=[0])  # programs look for it
    if isinstance(model, DeepSpeedEngine):
        raise zs.ConfigError("the model is an engine already: give initialize() engine.module")
    objects = {"optimizer": optimizer, "scheduler": lr_scheduler}
    given = [name for name, one in objects.items() if one is not None]
    settings = accepted(file, comm.get_world_size(), given, _note)
    if (level := file.data.get("log_level")) not in (None, "auto"):
        _log.setLevel(level.upper())
    end_init_blocks()
    earlier = held_parameters.engine_of(next(model.parameters(), None))
    if earlier is not None and earlier.module is model:  # DeepSpeed lets one do it, too
        _note(logging.WARNING, "the model's earlier engine is closed: initialize() makes a new one")
        held_parameters.destroy(earlier)
    made: Any = optimizer
    if not isinstance(optimizer, torch.optim.Optimizer):
        parameters = model_parameters
        if parameters is None:
            parameters = [one for one in model.parameters() if one.requires_grad]
        if optimizer is not None:
            made = optimizer(list(parameters))
        elif (found := section(file.data, "optimizer")) is not None:
            if found[0].lower() == "muon":
                mark_for_muon(model)
            made = make_optimizer(*found, list(parameters))
    schedule = None if lr_scheduler is not None else section(file.data, "scheduler")
    if schedule is not None and made is not None:
        try_schedule(*schedule, groups=len(made.param_groups))
    if made is not None and settings.ownership is None and steps_whole(made):
        # a file of DeepSpeed's has no key for it, and in equal parts it would be refused
        settings = settings.model_copy(update={"ownership": "whole"})
        key = '"zeroshard": {"ownership": "whole"}'
        told = f"steps whole parameters, so each rank owns some whole, as with {key}"
        _note(logging.INFO, f"optimizer {class_name(made)} {told}")
    left_out: tuple[nn.Parameter, ...] = ()  # they stay as they are
    if made is not None:
        stepped = {id(one) for group in made.param_groups for one in group["params"]}
        trained = (one for one in model.parameters() if one.requires_grad)
        left_out = tuple(one for one in trained if id(one) not in stepped)
    client = Client(optimizer, lr_scheduler, left_out)
    with _frozen(left_out):
        engine = _sharded(model, made, settings, file.data, client)
    if schedule is not None and schedule[1].get("warmup_num_steps") == 0:
        _note(logging.INFO, f"{schedule[0]}: warmup_num_steps=0 is taken as 2, the fewest")
    if lr_scheduler is not None:
        is_made = hasattr(lr_scheduler, "step") or not callable(lr_scheduler)
        engine.lr_scheduler = lr_scheduler if is_made else lr_scheduler(engine.optimizer)
    elif schedule is not None and engine.optimizer is not None:
        engine.lr_scheduler = make_schedule(*schedule, engine.optimizer)
    if training_data is not None:
        collate_fn = options.get("collate_fn")
        engine.training_dataloader = make_loader(training_data, engine, collate_fn=collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _read_config(args: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the one configuration that is given: a dictionary, a file, or JSON text,
    also in base64. Raises ConfigError.
    """
    named = [options.get("config"), options.get("config_params")]
    of_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    given = next((one for one in [*named, of_args] if one is not None), None)
    if of_args is not None and given is not of_args:
        raise zs.ConfigError(
            "args.deepspeed_config and config= both name a configuration: leave out one of them"
        )
    if given is None:
        raise zs.ConfigError("initialize() needs a configuration: config=, or --deepspeed_config")
    if isinstance(given, dict):
        return copy.deepcopy(given)
    if isinstance(given, os.PathLike) or os.path.exists(given):
        return zs.read_deepspeed(Path(given)).data
    try:
        is_plain = given.lstrip().startswith("{")
        decoded = given if is_plain else base64.urlsafe_b64decode(given).decode()
        data = parse_json(decoded, "config", relaxed=lambda data: True)
    except (ValueError, zs.ConfigError):
        raise zs.ConfigError(
            f"config={given!r} is neither a file, nor JSON, nor JSON in base64"
        ) from None
    return zs.read_deepspeed(data).data


@contextmanager
def _frozen(parameters: tuple[nn.Parameter, ...]) -> Iterator[None]:
    """Freeze these parameters; after an error they are as they were."""
    if parameters:
        count = len(parameters)
        _note(logging.INFO, f"{count} parameters are not in the optimizer, and stay as they are")
    for one in parameters:
        one.requires_grad_(False)
    try:
        yield
    except BaseException:
        for one in parameters:
            one.requires_grad_(True)
        raise


def _note(level: int, line: str) -> None:
    """Log a line on rank 0."""
    if comm.get_rank() == 0:
        _log.log(level, "%s", line)


def _sharded(
    model: nn.Module,
    optimizer: Any,
    settings: zs.Config,
    config: dict[str, Any],
    client: Client,
) -> DeepSpeedEngine:
    batch = complete_batch(settings, comm.get_world_size(), comm.get_rank())
    clipping = settings.gradient_clipping or 0.0
    settings = settings.model_copy(update={"gradient_clipping": None})  # the engine clips
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        model.to(accelerator)
    engine = zs.shard(model, optimizer, config=settings, sync_from=0)
    _cast_buffers(model, config.get("data_types") or {}, engine.precision.compute)
    if optimizer is not None:
        engine.hide_gradients()
    walk = None
    if batch.leaves is not None:
        ranks = ranks_through(comm.data_parallel_group())
        seed = ranks.share(torch.initial_seed() % 2**63, "initialize()")[0]  # rank 0's
        walk = LeafWalk(engine, int(seed))
    out = DeepSpeedEngine(engine, config, batch, clipping, walk, client)
    held_parameters.own(engine, out.destroy)
    zero = config.get("zero_optimization")
    leaf_module = (zero.get("leaf_module") if isinstance(zero, dict) else None) or {}
    setters: dict[str, Any] = {
        "classes": set_z3_leaf_modules,
        "names": set_z3_leaf_modules_by_name,
        "name_suffixes": set_z3_leaf_modules_by_suffix,
    }
    for key, put in setters.items():
        wanted = leaf_module.get(key)
        if isinstance(wanted, list):  # no key that changes nothing is refused for its value
            names = [one for one in wanted if isinstance(one, str)]
            put(model, names, raise_if_not_found=False)
    held_parameters.unmark(model.parameters())  # that zero.Init() marked
    if out.zero_optimization_stage() == 3:
        held_parameters.mark(model.parameters())
        held_parameters.answer_state_dicts(model)
    if engine.rank == 0:
        line = f"in DeepSpeed's place: {engine!r}, {batch}"
        if "deepspeed" in sys.modules:  # Transformers sets the logger's level
            sys.stderr.write(f"zeroshard: {line}\n")
        else:
            _log.info("zeroshard %s", line)
    return out


def _cast_buffers(model: nn.Module, data_types: dict[str, Any], compute: torch.dtype) -> None:
    """Give the buffers of a model in bf16 or fp16 the configured dtype, and fp32 to those that
    `data_types` names, or the model itself, as Transformers' models do.
    """
    if compute == torch.float32:
        return
    own = ["_keep_in_fp32_modules_strict"]
    if compute == torch.float16:
        own.append("_keep_in_fp32_modules")
    given = data_types.get("keep_in_fp32_modules")
    kept: set[int] = set()
    for module in [model] if isinstance(given, list) else model.modules():
        listed = [name for one in own for name in getattr(module, one, None) or ()]
        names = given if isinstance(given, list) else listed
        for pattern in map(pattern_of, names):
            kept.update(id(one) for name, one in module.named_buffers() if pattern.search(name))
    name = data_types.get("buffer_dtype")
    wanted = None if name in (None, "auto") else parse_dtype(name)
    for buffer in model.buffers():
        dtype = torch.float32 if id(buffer) in kept else wanted
        if dtype is not None and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config`` to a program's parser.

    A ``--local_rank`` that the parser has already takes its default from LOCAL_RANK: no launcher
    of ours passes the option.
    """
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="for the program's own use")
    group.add_argument("--deepspeed_config", help="DeepSpeed's configuration, a JSON file")
    if any(action.dest == "local_rank" for action in parser._actions):
        parser.set_defaults(local_rank=comm.get_local_rank())
    return parser
