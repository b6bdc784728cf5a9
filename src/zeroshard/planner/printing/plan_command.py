"""``zeroshard plan``: what rests where, what travels, and whether it fits, before any launch.

Only ``--model package.module:factory`` and a config.json of a family that is not known in closed form
import torch; the factory, or Transformers' class, runs in this process, with parameters that take no
memory. Whatever cannot be understood is a usage error of one line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.planner.printing.ranks_table import (
    BELOW_REST,
    elsewhere,
    is_below_rest,
    is_uneven,
    leave_out,
    memories_of,
    plan_and_print,
)
from zeroshard.terminal.console import (
    Table,
    note,
    print_json,
    say,
    say_facts,
    size_text,
    three_digits,
)
from zeroshard.terminal.declared import JSON, Option, Subcommand, UsageError, as_usage, made

if TYPE_CHECKING:
    from zeroshard.planner import Axes, Machine, ModelShape, Plan, PlannedRow, Training

__all__ = ["command"]

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
        print_json(plan.to_dict())
    else:
        _print_plan(plan)
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
        print_sweep(model, machines[-1], points)
    return 0


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
    """Return the model that the options name."""
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


# ------------------------------------------------------------------ the table

_FITS = "fits: bound by"
_ALWAYS = ("row", "rest", "peak")  # columns that are there even if they are empty


def _print_plan(plan: Plan) -> None:
    say_facts(_facts(plan), width=9)
    say("GB of one GPU: at rest and received per step (exact), at peak (modelled)")
    cells = [_cells(row, plan.axes) for row in plan.rows]
    shown = [name for name in cells[0] if name in _ALWAYS or any(one[name] != "-" for one in cells)]
    best = plan.recommended.row
    Table(
        shown,
        [[texts[name] for name in shown] for texts in cells],
        text=("row", "elsewhere", _FITS),
        folded=(_FITS,),
        is_framed=False,
        styles=["bold" if row is best else ("" if row.fits else "dim") for row in plan.rows],
    ).print(width=100)
    if any(is_below_rest(row.peak_bytes, row.rest_bytes) for row in plan.rows):
        say(BELOW_REST)
    say("")
    say_facts(_advice(plan), width=9)


def _advice(plan: Plan) -> Iterator[tuple[str, str | None]]:
    from zeroshard.planner.rows import describe_row

    advice = plan.recommended
    words = "none" if advice.row is None else describe_row(advice.row)
    yield "take", f"{words}: {advice.reason}"
    if advice.row is not None:
        yield from _explained(advice.row)
    yield "smaller", advice.smaller
    yield "change", advice.change
    if advice.offer is not None:
        yield "offer", f"--accumulate {plan.training.precision}: {advice.offer}"


def _explained(row: PlannedRow) -> Iterator[tuple[str, str]]:
    """Yield what the peak of `row` is made of, and what its checkpoints take."""
    parts = (f"{three_digits(size / 1e9)} {part}" for part, size in row.parts.items() if size)
    yield "peak", f"{' + '.join(parts)} = {size_text(row.peak_bytes['device'])}"
    whole, mine = (size_text(row.checkpoint_bytes[part]) for part in ("all", "rank"))
    yield "save", f"{whole}, {mine} of a rank: {', '.join(_save_times(row))}"


def _save_times(row: PlannedRow) -> Iterator[str]:
    """Yield how long a save and a load take, as far as that is known."""
    save, behind = row.save_s["foreground"], row.save_s["background"]
    if save is not None:
        yield f"{three_digits(save)} s"
    if behind is not None:
        yield f"in the background {three_digits(behind)} s"
    timed = row.load_s is not None and f"load {three_digits(row.load_s)} s"
    yield timed or "load and save are timed with a --disk"


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    model, machine, training = plan.to_dict()["model"], plan.machine, plan.training
    note = f", {model['note']}" if model["note"] else ""
    yield "model", f"{model['name']}: {model['parameters']:,} parameters{note}"
    states = {name: size_text(num_bytes) for name, num_bytes in model["states_bytes"].items()}
    yield (
        "states",
        f"weights {states['weight']}, gradients {states['grad']}, master and moments"
        f" {states['optimizer']}: {size_text(sum(model['states_bytes'].values()))} unsharded",
    )
    yield "machine", _machine(machine)
    if machine.note:
        yield "note", machine.note
    encoded = ", ".join(f"{name}={value}" for name, value in training.comm().items())
    if encoded:
        yield "codecs", f"{encoded}; without the rows that take none"
    if training.fraction < 1.0:
        yield "fraction", f"{training.fraction:g} of each state that leaves the device does"
    if plan.axes is not None:
        yield from _axes(plan, plan.axes)
    step = f"{training.micro_batches} x {training.batch} x {training.sequence} tokens"
    if not plan.model.takes_tokens:
        step = f"{training.micro_batches} micro-batch(es)"
    of = "a step and GPU"
    if training.leaves is not None:
        step, of = f"{training.leaves} leaves of {training.batch} x {training.sequence}", "a step"
    activations = "recomputed" if training.checkpointing else "kept"
    if training.accumulation_bytes is not None:
        held = f"{size_text(training.accumulation_bytes)} of gradients between micro-batches"
        most = f"up to {max(row.whole_gradients for row in plan.rows)} of {len(plan.model.units)}"
        yield "budget", f"{held}: {most} units keep theirs whole"
    yield (
        "training",
        f"{training.precision}, gradients rest in {training.accumulate}, {training.optimizer};"
        f" {step} {of}, activations {activations}",
    )
    from zeroshard.planner.machine import presets

    if training.precision == "bf16" and not presets().get(machine.name, {}).get("bf16", True):
        yield "note", f"{machine.name} has no bf16 arithmetic: times are fp16's, take fp16 there"
    if training.optimizer == "adam-8bit":
        yield "note", "8-bit Adam is planned only: zs.shard refuses what is not elementwise"
    yield from _unknown(plan)


def _unknown(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what is not known of the model, and what would tell it."""
    model = plan.model
    # a traced pass is of the whole model, not of its stages
    lacks_activations = model.decoder is None and (model.trace is None or plan.axes is not None)
    lacks_times = any(row.step_s is None for row in plan.rows)
    lacks = ["peaks are without activations"] if lacks_activations else []
    lacks += ["steps are without times"] if lacks_times else []
    if not lacks:
        return
    why = "no decoder's sizes and no inputs are known: have the factory return (module, inputs)"
    if model.trace is not None:
        why = "no matrix product or convolution was counted"
        why = "what was traced is not cut along tp and pp" if plan.axes is not None else why
    yield "note", f"{', '.join(lacks)}: {why}"


def _axes(plan: Plan, axes: Axes) -> Iterator[tuple[str, str]]:
    """Yield how the axes were chosen, and what to know about them."""
    asked = f"tp {axes.tp}, pp {axes.pp}"
    schedule = f", schedule {axes.schedule or '1f1b'}" if axes.pp != 1 else ""
    best = ""
    if axes.is_auto:
        best = "; the best row of each grid, all with the same tokens a step"
    yield "axes", f"{asked}{schedule}{best}"
    node = plan.machine.node_size
    if any(node % row.spread.tp for row in plan.rows):
        far = f"tp {axes.tp} does not fit in a node of {node}"
        yield "note", f"{far}: its all-reduces go over the network, slowly"


def _machine(machine: Machine) -> str:
    from zeroshard.planner.plan import ALLOWED_FOR

    nodes = machine.gpus // machine.node_size
    return (
        f"{machine.gpus} x {machine.name} of {size_text(machine.gpu_memory)}"
        f" ({machine.gpu_memory / 2**30:.4g} GiB) in {nodes} node(s) of {machine.node_size};"
        f" {size_text(machine.host_memory)} of host memory ({size_text(machine.host_allowance)} of"
        f" it for {ALLOWED_FOR}), {size_text(machine.disk) if machine.disk else 'no'} disk a node"
    )


def _cells(row: PlannedRow, axes: Axes | None) -> dict[str, str]:
    """Return the texts of one line of the table, by column."""
    spread, along, bubble = row.spread, dict[str, str](), dict[str, str]()
    if axes is not None:
        along = {axis: str(getattr(spread, axis)) for axis in ("tp", "pp", "dp")}
        bubble = {"idle": f"{spread.bubble:.0%}" if spread.bubble else "-"}
    sizes = {"rest": row.rest_bytes["device"], "peak": row.peak_bytes["device"]}
    sizes |= {tier: row.rest_bytes[tier] for tier in ("host", "disk")} | row.traffic_bytes
    fits = f"{'yes' if row.fits else 'no'}: {row.bound_by}"
    return {
        **along,
        "row": row.row,
        "elsewhere": elsewhere(row.tiers),
        **{name: three_digits(size / 1e9) for name, size in sizes.items()},
        **bubble,
        "s/step": "-" if row.step_s is None else three_digits(row.step_s),
        "tokens/s": "-" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
        _FITS: "yes" if row.fits and row.step_s is None else fits,
    }


# ------------------------------------------------------------------ the command


def _fraction(text: str) -> float | str:
    """Return a number, or "auto", which Training refuses with the reason."""
    return text if text == "auto" else float(text)


def _ranks(text: str) -> int | str:
    """Return a number, or the text: Axes refuses all but "auto"."""
    return int(text) if text.isdigit() else text


_OPTIONS = (
    Option("[PATH]", "config.json, safetensors, or a directory", Path, dest="path"),
    Option("--params N", "number of parameters: 350M, 7.5B, 1T"),
    Option("--model M:F", "package.module:factory, built without memory"),
    Option("--this-machine", "as zeroshard doctor measures it (20 s, kept)"),
    Option("--gpu NAME", "preset (default H100; CPU, V100-32, ...)"),
    Option("--gpus N", "number of GPUs, or of ranks here (default 1)", int),
    Option("--node-size N", "GPUs of one node", int),
    Option("--gpu-memory SIZE", "of one GPU: 32GiB, or of each: 24GiB,80GiB"),
    Option("--shares S", "of the states of each GPU: 0.1,0.9, memory or auto"),
    Option("--host-memory SIZE", "of one node: 1TiB"),
    Option("--disk SIZE", "of one node: 3.2TB (default: none)"),
    Option("--network SIZE", "bytes a second of one GPU to other nodes: 25GB"),
    Option("--precision TYPE", "bf16 (default), fp16 or fp32", default="bf16"),
    Option("--accumulate TYPE", "of gradients at rest (default fp32)", default="fp32"),
    Option("--optimizer NAME", "adam (default), adam-fused, adam-8bit, adam-bf16, momentum, sgd",
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
    JSON,
    Option("--write FILE", "write zs.shard(config=FILE)'s configuration", Path),
    Option("--disk-path DIR", "its directory for disk states", default="."),
    Option("--debug", argparse.SUPPRESS),
)  # fmt: skip
_COMMAND = Subcommand(
    "plan", "what fits where, what travels, how fast: before the launch",
    "zeroshard plan --params 7.5B --gpus 64 --gpu A100-80 --precision bf16\n"
    "zeroshard plan config.json --gpus 8 --checkpointing --write zero.json",
    _OPTIONS, description="Plan all rows of the policy table for a model on a machine.",
    usage="%(prog)s (--params N | --model M:F | PATH) [--gpu NAME | --this-machine] [options]",
    allow_abbrev=False,
)  # fmt: skip


def command(this_machine: Measured) -> Subcommand:
    """Return the command, for a launcher that knows how to measure `this_machine`."""
    return replace(_COMMAND, handler=partial(_plan, this_machine))
