"""``zs.shard(policy="auto")``: the fastest row that fits on the machine it finds itself on.

    facts(...)      on every rank: what this rank may take of device, host and disk, and speeds
    decide(...)     from all ranks' facts, the same on each: the settings with the row in them

The planner plans what it knows: states, gathered units, buffers. Activations and batches are not
known here, so `RESERVE` of the free memory is left to them. Where the user has said nothing about
tiers, states leave the device only if no row fits on it.

Invariant: `decide` looks at nothing but the facts that all ranks have exchanged, the model, and
settings that are compared. Nothing is measured: speeds are those that ``zeroshard doctor`` has
kept of rank 0's machine, or a preset's. Cost: two exchanges of text, and a plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeroshard._version import __version__
from zeroshard.config import Config, Offload
from zeroshard.core.placement import Tier
from zeroshard.core.policy import ROWS, Policy
from zeroshard.core.precision import dtype_name
from zeroshard.errors import ConfigError
from zeroshard.hetero import free_memory
from zeroshard.nn.deferred import fingerprint_of
from zeroshard.planner import Machine, Plan, Training, make_plan
from zeroshard.planner.machine import Speeds, machine_of, nearest_preset, read_report
from zeroshard.planner.modules import shape_of_module
from zeroshard.planner.rows import candidates, describe_row
from zeroshard.system.device import Device, all_devices
from zeroshard.system.this_host import HostMemory
from zeroshard.tier.swapdir import free_bytes

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
    if not offload.away and (offload.fraction != 1.0 or offload.delayed_update is not None):
        option = "fraction" if offload.fraction != 1.0 else "delayed_update"
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
    machine = _machine(everyone, node_size)
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
        return possible(_on_tiers(settings))

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
    return _taken(plan, settings)


def _taken(plan: Plan, settings: Config) -> tuple[Config, str]:
    """Return `settings` as `plan` recommends, and a sentence. Raises ConfigError where nothing
    fits.
    """
    advice, machine, row = plan.recommended, plan.machine, plan.recommended.row
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


# ------------------------------------------------------------------ rows


def _on_tiers(settings: Config) -> Iterator[Policy]:
    """Yield the rows on the tiers that the user has named; those that cannot rest there are left
    to the check of the settings.
    """
    offload = settings.offload
    tiers = offload.tier("weight"), offload.tier("grad"), offload.tier("optimizer")
    for policy in ROWS.values():
        with suppress(ValueError):
            yield policy.tiered(*tiers)


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


def _machine(everyone: Sequence[dict[str, Any]], node_size: int | None) -> Machine:
    """Return rank 0's machine with as many GPUs as ranks, each with what is free on the rank that
    has least, less the reserve.
    """
    world, first = len(everyone), everyone[0]
    local = first["node_size"] if node_size is None else node_size
    on_device = first["device_memory"] is not None

    def least(name: str) -> int:
        return int(min(one[name] for one in everyone) * (1 - RESERVE))

    host = least("host_memory") * local
    return Machine(
        name=first["machine"],
        gpus=world,
        node_size=local,
        gpu_memory=least("device_memory") if on_device else host,
        host_memory=host,
        disk=least("disk") * local,
        speeds=Speeds(**first["speeds"]),
        accelerator=on_device,
    )


def _training(optimizer: torch.optim.Optimizer | None, settings: Config) -> Training:
    """Return what is known of the training. Without an optimizer nothing is kept for one."""
    precision = settings.resolved_precision()
    kind = "adam"  # the most that is usual
    if optimizer is None:
        kind = "sgd"
    elif isinstance(optimizer, torch.optim.SGD):
        has_momentum = any(group["momentum"] for group in optimizer.param_groups)
        kind = "momentum" if has_momentum else "sgd"
    elif isinstance(optimizer, _ONE_STATE):
        kind = "momentum"
    elif any(group.get("fused") for group in optimizer.param_groups):
        kind = "adam-fused"
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
