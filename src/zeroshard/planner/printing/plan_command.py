"""``zeroshard plan``: what rests where, what travels, and whether it fits, before any launch.

Only ``--model package.module:factory`` and a config.json of a family that is not known in closed
form import torch; the factory, or Transformers' class, runs in this process, with parameters that
take no memory. Whatever cannot be understood is a usage error of one line; where nothing fits, the
exit code is 1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.planner.printing.plan_table import print_plan
from zeroshard.planner.printing.ranks_table import (
    is_uneven,
    leave_out,
    memories_of,
    plan_and_print,
)
from zeroshard.terminal.console import note, print_json
from zeroshard.terminal.declared import JSON, Option, Subcommand, UsageError, as_usage, made

if TYPE_CHECKING:
    from zeroshard.planner import Machine, ModelShape, Training

NOTHING_FITS = 1  # exit code
Measured = Callable[[int | None], "Machine"]  # of so many ranks (None: as many as devices)


def _plan(this_machine: Measured, arguments: argparse.Namespace) -> int:
    from zeroshard.planner import Axes, Training, make_plan

    with as_usage("plan: "):
        axes = made(Axes, arguments)
        training = made(Training, arguments, **_codecs(arguments.comm))
        if is_uneven(arguments):
            memories = memories_of(arguments)
            machine = _machine_of(arguments, arguments.gpus, this_machine)
            model = _describe(arguments, training)
            return plan_and_print(arguments, model, machine, training, memories)
        if arguments.sweep is not None:
            return _sweep(arguments, training, this_machine)
        if arguments.plot is not None:
            raise UsageError("plan: --plot draws a --sweep: give one, as in --sweep gpus=8..1024")
        machine = _machine_of(arguments, arguments.gpus, this_machine)
        model = _describe(arguments, training)
        plan = make_plan(model, machine, training, axes=axes)
    if arguments.json:
        print_json(plan.to_dict(price=arguments.price))
    else:
        print_plan(plan, arguments.price)
    if plan.recommended.row is None:
        if arguments.write is not None:
            note(f"nothing fits: {arguments.write} was not written")
        return NOTHING_FITS
    if arguments.write is not None:
        text = json.dumps(plan.config(disk_path=arguments.disk_path), indent=2)
        arguments.write.write_text(f"{text}\n", encoding="utf-8")
        note(f"wrote {arguments.write}")
    return 0


def _sweep(arguments: argparse.Namespace, training: Training, this_machine: Measured) -> int:
    """Plan on more and more GPUs; print, and draw."""
    from zeroshard.planner.printing.sweep_table import plot_sweep, print_sweep
    from zeroshard.planner.sweep import make_sweep, parse_sweep

    if arguments.write is not None:
        leave_out(arguments, "--write writes the plan of one machine", "sweep")
    leave_out(arguments, "--sweep plans data parallel ranks alone", "tp", "pp")
    if arguments.this_machine:
        raise UsageError("plan: --sweep is of more machines than this one: name a --gpu")
    numbers = parse_sweep(arguments.sweep)
    machines = [_machine_of(arguments, gpus, this_machine) for gpus in numbers]
    model = _describe(arguments, training)
    points = make_sweep(model, machines, training)
    if arguments.plot is not None:
        plot_sweep(arguments.plot, model, machines[-1], points)
        note(f"wrote {arguments.plot}")
    if arguments.json:
        sizes = {"name": model.name, "parameters": model.numel}
        print_json({"model": sizes, "sweep": [one.to_dict() for one in points]})
    else:
        print_sweep(model, machines[-1], points, arguments.price)
    return 0 if any(point.fits for point in points) else NOTHING_FITS


# ------------------------------------------------------------------ the machine


def _machine_of(arguments: argparse.Namespace, gpus: int | None, this_machine: Measured) -> Machine:
    """Return the machine that the options name, with so many GPUs (None: one; here: a rank)."""
    from zeroshard.planner import Machine

    named = ("gpu", "node_size", "gpu_memory", "host_memory", "disk", "network")
    if arguments.this_machine:
        leave_out(arguments, "--this-machine is measured", *named)
        return this_machine(gpus)
    given = {name: getattr(arguments, name) for name in named}
    given = {name: value for name, value in given.items() if value is not None}
    return Machine.of(gpus=1 if gpus is None else gpus, **given)


_COMM: dict[str, Callable[[str], Any]] = {
    "weight_codec": str,
    "grad_codec": str,
    "frozen_codec": str,
    "codec_block": int,
    "error_feedback": {"true": True, "false": False}.__getitem__,
}


def _codecs(given: list[str]) -> dict[str, Any]:
    """Return ``KEY=VALUE`` texts as fields of Training, of the types that those have."""
    out: dict[str, Any] = {}
    for text in given:
        key, _, value = text.partition("=")
        if key not in _COMM or not value:
            raise UsageError(f"plan: --comm {text!r} is not KEY=VALUE: keys are {', '.join(_COMM)}")
        try:
            out[key] = _COMM[key](value)
        except (KeyError, ValueError):
            raise UsageError(f"plan: --comm {text!r}: {key} takes no {value!r}") from None
    return out


# ------------------------------------------------------------------ the model


def _describe(arguments: argparse.Namespace, training: Training) -> ModelShape:
    """Return the model that the options name, with adapters where --trainable counts them."""
    from zeroshard.planner.model import with_adapters

    model = _named(arguments, training)
    return model if arguments.trainable is None else with_adapters(model, arguments.trainable)


def _named(arguments: argparse.Namespace, training: Training) -> ModelShape:
    """Return the model that the options name, all of it trained."""
    given = [arguments.path, arguments.params, arguments.model]
    if sum(one is not None for one in given) != 1:
        raise UsageError("plan: give one model: --params 7.5B, --model package.module:factory, or"
                         " a path")  # fmt: skip
    if arguments.params is not None:
        from zeroshard.planner.model import describe

        return describe(arguments.params)
    if arguments.path is not None:
        from zeroshard.planner.model_files import is_foreign, read_model

        if not is_foreign(arguments.path):
            return read_model(arguments.path)
        from zeroshard.planner.modules.built import shape_of_path

        return shape_of_path(arguments.path, training)
    return _built(arguments.model, training)


def _built(name: str, training: Training) -> ModelShape:
    """Return the shape of what the factory called `name` (``package.module:factory``) builds."""
    module_name, _, factory_name = name.partition(":")
    if not module_name or not factory_name:
        raise UsageError(f"plan: --model {name!r} is not of the form package.module:factory")
    from zeroshard import deferred_init
    from zeroshard.planner.modules import shape_with_activations

    sys.path.insert(0, "")  # modules beside which the command is run, as `python -m` finds them
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
        with deferred_init():
            made = factory()
    except Exception as error:  # whatever the user's code raises
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"plan: --model {name}: {reason} (--debug shows where)") from error
    finally:
        sys.path.remove("")
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    return shape_with_activations(model, training, inputs)


# ------------------------------------------------------------------ the command


def _fraction(text: str) -> float | str:
    """Return a number, or "auto", which Training refuses with the reason."""
    return text if text == "auto" else float(text)


def _ranks(text: str) -> int | str:
    """Return a number, or the text: Axes refuses all but "auto"."""
    return int(text) if text.isdigit() else text


def _price(text: str) -> float:
    """Return a positive number."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


_OPTIONS = (
    Option("[PATH]", "config.json, safetensors, or a directory", Path, dest="path"),
    Option("--params N", "number of parameters: 350M, 7.5B, 1T"),
    Option("--model M:F", "package.module:factory, built without memory"),
    Option("--trainable N", "train adapters alone (LoRA), so many: 40M"),
    Option("--this-machine", "as zeroshard doctor measures it (20 s, kept)"),
    Option("--gpu NAME", "preset (default H100; CPU, RTX4090, B200, ...)"),
    Option("--gpus N", "number of GPUs, or of ranks here (default 1)", int),
    Option("--node-size N", "GPUs of one node", int),
    Option("--gpu-memory SIZE", "of one GPU: 32GiB, or of each: 24GiB,80GiB"),
    Option("--shares S", "of the states of each GPU: 0.1,0.9, memory or auto"),
    Option("--host-memory SIZE", "of one node: 1TiB"),
    Option("--disk SIZE", "of one node: 3.2TB (default: none)"),
    Option("--network SIZE", "bytes a second of one GPU to other nodes: 25GB"),
    Option("--precision TYPE", "bf16 (default), fp16 or fp32", default="bf16"),
    Option("--accumulate TYPE", "of gradients at rest (default fp32)", default="fp32"),
    Option("--optimizer NAME", "adamw (default), adam-fused, adam-8bit, adam-bf16, momentum, sgd",
           default="adam"),
    Option("--batch N", "sequences of a micro-batch of a GPU", int, 1),
    Option("--sequence N", "tokens of one (default 2048)", int, 2048),
    Option("--micro-batches N", "of one step (default 1)", int, 1),
    Option("--leaves V", "of one step of all GPUs (16, 3x2x2), in place of --micro-batches"),
    Option("--accumulation-budget SIZE", "for whole gradients between them: 2GiB"),
    Option("--tp N", "tensor parallel ranks, or auto", _ranks, 1),
    Option("--pp N", "stages of a pipeline, or auto", _ranks, 1),
    Option("--schedule NAME", "of the pipeline: 1f1b (default), gpipe, interleaved[:stages], zb"),
    Option("--checkpointing", "recompute activations in the backward"),
    Option("--sweep gpus=A..B", "on more and more GPUs instead: gpus=8..16384"),
    Option("--plot FILE", "draw the sweep into a PNG (needs matplotlib)", Path),
    Option("--comm KEY=VALUE", "weight_codec=int8, grad_codec=int4, ... of zs.Comm; may be"
           " repeated", action="append", default=[]),
    Option("--fraction F", "of a state, off device: 0.5", _fraction, 1.0),
    Option("--price P", "of a GPU-hour: what a billion tokens cost (2.50)", _price,
           must="a positive number such as 2.50"),
    JSON,
    Option("--write FILE", "write zs.shard(config=FILE)'s configuration", Path),
    Option("--disk-path DIR", "its directory for disk states", default="."),
    Option("--debug", argparse.SUPPRESS),
)  # fmt: skip
_COMMAND = Subcommand(
    "plan", "what fits where, what travels, how fast: before the launch",
    "zeroshard plan --params 70B --gpus 64 --gpu H100 --checkpointing\n"
    "zeroshard plan config.json --gpus 8 --checkpointing --write zero.json",
    _OPTIONS, description="Plan all rows of the policy table for a model on a machine.",
    usage="%(prog)s (--params N | --model M:F | PATH) [--gpu NAME | --this-machine] [options]",
    allow_abbrev=False,
)  # fmt: skip


def command(this_machine: Measured) -> Subcommand:
    """Return the command, for a launcher that knows how to measure `this_machine`."""
    return replace(_COMMAND, handler=partial(_plan, this_machine))
