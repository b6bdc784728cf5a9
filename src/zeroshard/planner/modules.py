"""``zs.plan``: a model, as a module, a number or a file, planned on a machine before any launch;
and ``zs.shard(policy="auto")``, which takes the fastest row that fits.

What the planner cannot know without torch is here: the units that ``shard`` would cut a module
into, the dtypes in which their parameters would compute, and its activations, traced where it can
run (activations.py). A family that is not known in closed form (families.py) is built as a module,
by Transformers' class.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from logging import ERROR
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from zeroshard._version import __version__
from zeroshard.config import Config, Offload
from zeroshard.core.placement import Tier
from zeroshard.core.policy import ROWS, Policy
from zeroshard.core.precision import PRECISIONS, dtype_name
from zeroshard.errors import ConfigError
from zeroshard.hetero import free_memory
from zeroshard.nn.deferred import fingerprint_of
from zeroshard.optim.several import each_of
from zeroshard.planner import Axes, Machine, ModelShape, Plan, Training, describe, make_plan
from zeroshard.planner.activations import trace_activations
from zeroshard.planner.families import (
    config_of,
    is_foreign,
    positions_of,
    read_config,
    read_model,
    shape_of_config,
)
from zeroshard.planner.machine import Speeds, machine_of, nearest_preset, read_report
from zeroshard.planner.model import GroupShape, UnitShape, fitted
from zeroshard.planner.rows import candidates, describe_row
from zeroshard.runtime.build import compute_dtypes
from zeroshard.runtime.units import partition_units
from zeroshard.system.device import Device, all_devices
from zeroshard.system.this_host import HostMemory
from zeroshard.tier.swapdir import free_bytes


def plan(
    model: nn.Module | ModelShape | str | Path,
    machine: Machine | None = None,
    training: Training | None = None,
    *,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
    axes: Axes | None = None,
) -> Plan:
    """Plan every row of the policy table for `model` on `machine`, before any launch.

    `model` is a module (its parameters may be deferred), a number of parameters ("7.5B"), or the
    path of a Transformers ``config.json``, of safetensors or of a directory of them. `machine`
    (default: one H100) is made by ``zs.Machine.of("A100-80", gpus=64)``; `training` (default:
    ``zs.Training()``) says precision, optimizer and batch. `inputs` is an example of what a
    module's forward takes for one micro-batch, a tuple or a dict of keywords, in tensors of any
    kind: with it activations are traced on fake tensors. `loss(output)` is what the backward starts
    from; without it ``output.loss``, or the sum of the first tensor. A Transformers model is traced
    without either. `axes` (``zs.Axes(tp=4, pp=2)``, or "auto" for a number) add tensor and pipeline
    parallelism to data parallelism; `training` then describes one pipeline. Bytes at rest and on
    the wire are what ``engine.memory()`` and ``engine.traffic()`` will report; peaks and times are
    modelled (docs/planner.md).

        plan = zs.plan("7.5B", zs.Machine.of("V100-32", gpus=64))
        plan.recommended.row, plan.recommended.reason
        zs.shard(model, optimizer, config=plan.config())

    Raises ConfigError for a model or a size that cannot be understood, for `axes` that do not fit
    the machine or the model, and for `inputs` with which the module does not run.
    """
    chosen = Training() if training is None else training
    if isinstance(model, nn.Module):
        shape = shape_with_activations(model, chosen, inputs, loss)
    elif isinstance(model, ModelShape):
        shape = model
    else:
        suffixes = (".json", ".safetensors")
        is_path = isinstance(model, Path) or model.endswith(suffixes) or Path(model).exists()
        shape = shape_of_path(Path(model), chosen) if is_path else describe(str(model))
    where = Machine.of() if machine is None else machine
    return make_plan(shape, where, chosen, axes=axes)


# ------------------------------------------------------------------ a module as the planner sees it


def shape_with_activations(
    model: nn.Module,
    training: Training,
    inputs: Sequence[Any] | Mapping[str, Any] | None = None,
    loss: Callable[[Any], torch.Tensor] | None = None,
) -> ModelShape:
    """Return `shape_of_module` with its activations, traced where that is possible; its note says
    how they are known. Raises ConfigError where the module does not run with `inputs`.
    """
    shape, given = shape_of_module(model, training), inputs is not None
    if inputs is not None:  # the shape of the token ids that they begin with, if they do
        first = next((one for one in tree_leaves(inputs) if isinstance(one, torch.Tensor)), None)
        ids = None
        if first is not None and first.dim() == 2 and first.dtype in (torch.int32, torch.int64):
            ids = first.shape[0], first.shape[1]
        shape = replace(shape, inputs=ids)
    training = fitted(shape, training)[1]
    if inputs is None and getattr(model, "main_input_name", None) == "input_ids":  # Transformers
        tokens = torch.empty(training.batch, training.sequence, dtype=torch.int64, device="meta")
        inputs = {"input_ids": tokens, "labels": tokens}
    if inputs is None:
        known = "in closed form" if shape.decoder is not None else "not known: no inputs were given"
        return replace(shape, note=f"activations {known}")
    try:
        with _checkpointing(model, training.checkpointing and not given):
            trace = trace_activations(model, shape, training, inputs, loss)
    except Exception as error:  # whatever the model's code raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if given:
            raise ConfigError(f"{type(model).__name__} does not run on inputs: {reason}") from error
        known = "not known" if shape.decoder is None else "in closed form"
        return replace(shape, note=f"activations {known}: the model could not be traced ({reason})")
    if not given and shape.decoder is None:  # token ids were made above
        shape = replace(shape, inputs=(training.batch, training.sequence))
    return replace(shape, note="activations traced", trace=trace)


@contextmanager
def _checkpointing(model: nn.Module, wanted: bool) -> Iterator[None]:
    """Have a Transformers model recompute its layers inside, if `wanted`; others do so by
    themselves.
    """
    checkpoints: Any = model
    if not wanted or checkpoints.is_gradient_checkpointing:
        yield
        return
    checkpoints.gradient_checkpointing_enable({"use_reentrant": False})
    try:
        yield
    finally:
        checkpoints.gradient_checkpointing_disable()


def shape_of_module(model: nn.Module, training: Training, spec: Any = None) -> ModelShape:
    """Return `model` as the planner sees it, in the units that ``shard(units=spec)`` would cut.

    A model of Transformers brings its config with it, from which activations follow.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"a model to plan is an nn.Module, not a {type(model).__name__}")
    if next(model.parameters(), None) is None:
        raise ConfigError(f"{type(model).__name__} has no parameters: there is nothing to plan")
    dtypes = compute_dtypes(model, PRECISIONS[training.precision]).of
    units, plans = [], partition_units(model, spec)
    # A forward comes to each unit once, and again wherever a parameter of it is another module's,
    # too, and other units lie between (in the order of definition).
    unit_of = {id(p): number for number, plan in enumerate(plans) for p in plan.parameters.values()}
    uses, seen, last = Counter(range(len(plans))), set[int](), -1
    for _, parameter in model.named_parameters(remove_duplicate=False):
        number = unit_of[id(parameter)]
        uses[number] += id(parameter) in seen and number != last
        seen.add(id(parameter))
        last = number
    for number, unit in enumerate(plans):
        groups: dict[tuple[str, bool], list[tuple[str, tuple[int, ...]]]] = {}
        for name, parameter in unit.parameters.items():
            if not parameter.is_floating_point() or parameter.dtype.itemsize == 1:
                raise ConfigError(
                    f"parameter {name!r} is {parameter.dtype}: plans know fp32, bf16 and fp16; plan"
                    " the model without quantization, and name a row to shard this one"
                )
            key = (dtype_name(dtypes[id(parameter)]), parameter.requires_grad)
            groups.setdefault(key, []).append((name, tuple(parameter.shape)))
        shapes = (GroupShape(tuple(part), *key) for key, part in groups.items())
        units.append(UnitShape(unit.name, tuple(shapes), uses[number]))

    decoder, used, positions = None, None, None
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if callable(to_dict):
        fields: dict[str, Any] = to_dict()
        positions = positions_of(fields)
        text = fields.get("text_config")  # of a model with images beside text, the text alone
        with suppress(ConfigError):  # not a family that is known in closed form
            known = shape_of_config(
                text if isinstance(text, dict) else fields, type(model).__name__
            )
            decoder = known.decoder
            used = known.numel if known.used_numel is None and text else known.used_numel
    return ModelShape(
        type(model).__name__,
        tuple(units),
        decoder,
        used,
        tokenwise=decoder is not None,
        positions=positions,
    )


# -------------------------------------------------------------- a config.json built by Transformers
# Without memory; no code that a model brings with it is run, and nothing is loaded from elsewhere.

# in the order in which they are tried; "": whatever else there is
_HEADS = ("CausalLM", "ImageTextToText", "Seq2SeqLM", "MaskedLM", "")


def shape_of_path(path: Path, training: Training) -> ModelShape:
    """Return the model that `path` describes: see `read_model`, beside which a config.json may name
    any family that Transformers has, where it is installed. Raises ConfigError.
    """
    config = config_of(path)
    if config is None or not is_foreign(path):
        return read_model(path)
    import transformers

    fields, model = read_config(config), None
    heads = (*(("ImageTextToText",) if "vision_config" in fields else ()), *_HEADS)
    with _quiet():
        try:
            if fields["model_type"] in transformers.CONFIG_MAPPING:
                rest = {name: value for name, value in fields.items() if name != "model_type"}
                built = transformers.AutoConfig.for_model(fields["model_type"], **rest)
                autos = (
                    getattr(transformers, f"AutoModelFor{head}" if head else "AutoModel")
                    for head in heads
                )
                auto = next((one for one in autos if type(built) in one._model_mapping), None)
                with torch.device("meta"):
                    model = None if auto is None else auto.from_config(built, dtype=torch.float32)
        except Exception as error:  # whatever Transformers says of a config
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ConfigError(f"{config}: Transformers does not build it: {reason}") from error
        if model is not None:
            return shape_with_activations(model, training)
    if any(path.glob("*.safetensors")):
        return read_model(path)
    raise ConfigError(
        f"{config}: neither zeroshard nor the Transformers that is installed knows"
        f" model_type={fields['model_type']!r}: give --params, or --model package.module:factory"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave Transformers' warnings out: of token ids, losses, and what is no question of sizes."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)


# ------------------------------------------------------------------------------------ policy="auto"
#     facts(...)      on every rank: what this rank may take of device, host and disk, and speeds
#     decide(...)     from all ranks' facts, the same on each: the settings with the row in them
#
# The planner plans what it knows: states, gathered units, buffers. Activations and batches are not
# known here, so `RESERVE` of the free memory is left to them. Where the user has said nothing about
# tiers, states leave the device only if no row fits on it.
#
# Invariant: `decide` looks at nothing but the facts that all ranks have exchanged, the model, and
# settings that are compared. Nothing is measured: speeds are what ``zeroshard doctor`` has kept of
# rank 0's machine, or a preset's. Cost: two exchanges of text, and a plan.


RESERVE = 0.3  # of the free memory: for activations and whatever else the program makes
_BUDGET = f"{1 - RESERVE:.0%} of what is free"
_STATES = ("weight", "grad", "optimizer")
_ONE_STATE = (torch.optim.Adagrad, torch.optim.RMSprop)  # one number per parameter


def facts(model: nn.Module, settings: Config, world: int) -> dict[str, Any]:
    """Return, as plain values, what this rank may take of each memory now, and what its machine
    can do. Raises ConfigError for what is not planned.

    Ranks of one host (``LOCAL_WORLD_SIZE``; without a launcher all) share its memory. What the
    model itself takes is free: it is about to become shards.
    """
    offload = settings.offload
    if not isinstance(offload.fraction, str) and offload.fraction != 1.0:
        raise ConfigError("policy='auto' does not plan offload.fraction: name a row of the table")
    options = {
        "fraction": offload.fraction != 1.0,
        "delayed_update": offload.delayed_update is not None,
        "step_in_backward": offload.step_in_backward,
    }
    for option in [] if offload.away else [name for name, is_set in options.items() if is_set]:
        raise ConfigError(
            f"offload.{option} with policy='auto' needs a tier: say offload.optimizer='host'"
        )
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    local = min(int(text), world) if text.isdecimal() and int(text) else world
    device = next(model.parameters()).device
    own = sum(p.numel() * p.itemsize for p in model.parameters() if fingerprint_of(p) is None)
    host, on_device = HostMemory.now().available // local, None
    if device.type == "cpu":
        host += own
    else:
        on_device = free_memory(device) + own
    disk = 0
    if offload.disk_path is not None:  # of the nearest directory that is there
        path = Path(offload.disk_path)
        there = next(one for one in (path, *path.absolute().parents) if one.exists())
        disk = free_bytes(there) // local
    name, speeds = _speeds(device, local)
    return {
        "device_memory": on_device,
        "host_memory": host,
        "disk": disk,
        "node_size": local if world % local == 0 else world,
        "machine": name,
        "speeds": asdict(speeds),
    }


def decide(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    settings: Config,
    everyone: Sequence[dict[str, Any]],
    *,
    node_size: int | None,
    check: Callable[[Config], None],
) -> tuple[Config, str]:
    """Return `settings` with the row, and the tiers, that the planner takes, and a sentence about
    it.

    `everyone`: the facts of all ranks. `node_size`: ranks of a node where mesh or settings say so.
    `check` raises ConfigError for settings that cannot be run; such rows are passed over. Raises
    ConfigError where nothing fits.
    """
    # rank 0's machine with as many GPUs as ranks, each with what is free on the rank that has
    # least, less the reserve
    first = everyone[0]
    local = first["node_size"] if node_size is None else node_size
    on_accelerator = first["device_memory"] is not None

    def least(name: str) -> int:
        return int(min(one[name] for one in everyone) * (1 - RESERVE))

    host = least("host_memory") * local
    machine = Machine(
        name=first["machine"],
        gpus=len(everyone),
        node_size=local,
        gpu_memory=least("device_memory") if on_accelerator else host,
        host_memory=host,
        disk=least("disk") * local,
        speeds=Speeds(**first["speeds"]),
        accelerator=on_accelerator,
    )
    training = _training(optimizer, settings)
    # no activations; of whatever model, a step is taken to be of tokens
    shape = replace(
        shape_of_module(model, training, settings.units),
        decoder=None,
        tokenwise=True,
        positions=None,
    )
    refused: list[ConfigError] = []

    def possible(policies: Iterable[Policy]) -> list[Policy]:
        out = []
        for policy in policies:
            try:
                check(_with_row(settings, policy, machine))
                out.append(policy)
            except ConfigError as error:
                refused.append(error)
        return out

    def on_tiers(machine: Machine) -> list[Policy]:
        """Return the rows on the tiers that the user has named, which may not rest there."""
        offload, out = settings.offload, []
        tiers = offload.tier("weight"), offload.tier("grad"), offload.tier("optimizer")
        for policy in ROWS.values():
            with suppress(ValueError):
                out.append(policy.tiered(*tiers))
        return possible(out)

    def on_device(machine: Machine) -> list[Policy]:
        return possible(ROWS.values())

    def anywhere(machine: Machine) -> list[Policy]:
        return possible(candidates(machine))

    ways = [on_tiers] if settings.offload.away else [on_device, anywhere]
    for way in ways:
        if not way(machine):
            raise refused[0] if refused else ConfigError("no row of the table rests on these tiers")
        plan = make_plan(shape, machine, training, way)
        if plan.recommended.row is not None:
            break
    advice, row = plan.recommended, plan.recommended.row
    if row is None:
        disk = "" if settings.offload.disk_path else " (a disk is named by offload.disk_path)"
        raise ConfigError(
            f"policy='auto': {advice.reason} ({_BUDGET}). The cheapest change: {advice.change}"
            f"{disk if 'disk' in (advice.change or '') else ''}"
        )
    where, room = "device memory", machine.gpu_memory
    if not machine.accelerator:
        where, room = "memory", machine.host_memory // machine.node_size
    needs = f"{row.peak_bytes['device'] / 1e9:.3g} of {room / 1e9:.3g} GB of {where} a rank"
    tiers = (Tier(row.tiers[state]) for state in _STATES)
    return _with_row(settings, ROWS[row.row].tiered(*tiers), machine), (
        f"policy auto: {describe_row(row)} (needs {needs}, {_BUDGET}; {advice.reason}; speeds:"
        f" {machine.name})"
    )


def _with_row(settings: Config, policy: Policy, machine: Machine) -> Config:
    """Return `settings` with the row and the tiers of `policy`, on nodes as they were planned."""
    cells = policy.default
    tiers = zip(_STATES, (cells.weight.tier, cells.grad.tier, cells.optim.tier), strict=True)
    offload, away = settings.offload, {state: tier.value for state, tier in tiers}
    if Tier.DISK.value not in away.values():
        offload = offload.model_copy(update={"disk_path": None, "verify": False})
    elif offload.disk_path is None:  # on a disk that would help, and is not named yet
        offload = offload.model_copy(update={"disk_path": "."})
    if set(away.values()) == {Tier.DEVICE.value}:
        offload = Offload()
    comm = settings.comm
    if machine.mesh.num_nodes > 1 and comm.node_size is None:
        comm = comm.model_copy(update={"node_size": machine.node_size})
    changed = {"policy": policy.name, "offload": offload.model_copy(update=away), "comm": comm}
    return settings.model_copy(update=changed)


# ------------------------------------------------------------------ the plan's input


def _training(optimizer: torch.optim.Optimizer | None, settings: Config) -> Training:
    """Return what is known of the training. Without an optimizer nothing is kept for one."""
    precision = settings.resolved_precision()
    kinds = {"sgd"}
    for one in () if optimizer is None else each_of(optimizer):
        kind = "adam"  # the most that is usual
        if isinstance(one, torch.optim.SGD):
            kind = "momentum" if any(group["momentum"] for group in one.param_groups) else "sgd"
        elif isinstance(one, _ONE_STATE):
            kind = "momentum"
        elif any(group.get("fused") for group in one.param_groups):
            kind = "adam-fused"
        kinds.add(kind)
    kind = next(kind for kind in ("adam", "adam-fused", "momentum", "sgd") if kind in kinds)
    budget = settings.accumulation_budget
    return Training(
        dtype_name(precision.compute),
        dtype_name(precision.accumulate),
        kind,
        batch=settings.train_micro_batch_size_per_gpu or 1,
        # a budget is for what rests between two of them
        micro_batches=settings.gradient_accumulation_steps or (1 if budget is None else 2),
        accumulation_budget=budget,
        leaves=settings.leaves,
        master=dtype_name(precision.master),
        moments="fp32" if precision.moments is None and precision.stepped.itemsize > 2 else "bf16",
        step_in_backward=settings.offload.step_in_backward,
    )


def _speeds(device: torch.device, ranks: int) -> tuple[str, Speeds]:
    """Return the name and the speeds of this machine for one of `ranks` ranks on it."""
    names = [one.facts()["name"] for one in all_devices()]
    versions = {"zeroshard": __version__, "torch": version("torch")}
    report = read_report(names, versions)
    if report is not None and device.type == "cpu":
        report["devices"] = []
    if report is not None:
        with suppress(ConfigError):
            machine = machine_of(report, ranks=min(ranks, len(report["devices"]) or ranks))
            return machine.name, machine.speeds
    preset = "CPU"
    if device.type != "cpu":
        own = Device.of(device).facts()
        preset = nearest_preset(own["name"], own["memory_bytes"])
    return f"preset {preset}", Machine.of(preset).speeds
