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
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.planner.plan_table import (
    elsewhere,
    is_uneven,
    leave_out,
    memories_of,
    plan_and_print,
    print_plan,
)
from zeroshard.terminal import (
    JSON,
    Option,
    Subcommand,
    Table,
    UsageError,
    as_usage,
    count_text,
    made,
    note,
    print_json,
    say,
    say_facts,
    size_text,
    three_digits,
)

if TYPE_CHECKING:
    from zeroshard.planner import Machine, ModelShape, Training
    from zeroshard.planner.plan import Point

# -------------------------------------------------------------------------------------- sweep table
# ``zeroshard plan --sweep gpus=8..16384``: one model on more and more GPUs, in tables, as JSON and
# as a picture.


def print_sweep(
    model: ModelShape, machine: Machine, points: Sequence[Point], price: float | None = None
) -> None:
    """Print efficiency and memory by number of GPUs (`machine` has the most) and row, what bounds
    each row, and the fewest GPUs on which one fits; `price`, of a GPU-hour: and where a billion
    tokens cost least.
    """
    numbers = list(dict.fromkeys(point.gpus for point in points))
    rows = _by_row(points)

    def percent(point: Point) -> str:
        text = f"{100 * point.efficiency:.3g}"
        return text if point.fits else f"({text})"

    span = f"{numbers[0]} to {numbers[-1]} x {machine.name}, {machine.node_size} in a node"
    say_facts([("model", f"{model.name}: {model.numel:,} parameters"), ("machine", span)], width=9)
    best = max(points, key=lambda point: point.efficiency)
    speed = ""
    if best.tokens_per_s_per_gpu is not None:
        per_gpu = best.tokens_per_s_per_gpu / best.efficiency
        speed = f" 100% are {per_gpu:,.0f} tokens/s a GPU;"
    for title, text_of in (
        (
            f"efficiency, %: forward and backward alone over the step;{speed} (does not fit)",
            percent,
        ),
        (
            f"GB of one GPU at peak, of {machine.gpu_memory / 1e9:.3g}",
            lambda point: three_digits(point.peak_bytes / 1e9),
        ),
    ):
        say(title)
        lines = zip(*(map(text_of, line) for line in rows.values()), strict=True)
        cells = [(f"{gpus:,}", *line) for gpus, line in zip(numbers, lines, strict=True)]
        Table(("GPUs", *rows), cells, is_framed=False).print()
    say("bound by, on how many GPUs")
    for name, line in rows.items():  # "8-16 device memory; 32-512 compute"
        parts = []
        for bound_by, group in groupby(line, key=lambda point: point.bound_by):
            gpus = [point.gpus for point in group]
            between = f"{gpus[0]}" if len(gpus) == 1 else f"{gpus[0]}-{gpus[-1]}"
            parts.append(f"{between} {bound_by}")
        say_facts([(name, "; ".join(parts))], width=10)
    fitting = [point for point in points if point.fits]
    costs = {
        point: 1e9 / point.tokens_per_s_per_gpu / 3600 * price
        for point in fitting
        if price is not None and point.tokens_per_s_per_gpu is not None
    }
    if costs:
        best = min(costs, key=costs.__getitem__)
        cost = f"{three_digits(costs[best])} for a billion tokens at {price:g} a GPU-hour"
        say_facts([("cheapest", f"{best.gpus:,} GPUs, {best.row}: {cost}")], width=10)
    fewest = f"no number of GPUs from {numbers[0]} to {numbers[-1]} holds any row on its devices"
    if fitting:
        least = fitting[0].gpus
        names = ", ".join(point.row for point in fitting if point.gpus == least)
        fewest = f"{least:,} GPUs, with {names}"
    say_facts([("fewest", fewest)], width=10)


def _by_row(points: Sequence[Point]) -> dict[str, list[Point]]:
    rows: dict[str, list[Point]] = {}
    for point in points:
        rows.setdefault(point.row, []).append(point)
    return rows


def plot_sweep(file: Path, model: ModelShape, machine: Machine, points: Sequence[Point]) -> None:
    """Draw efficiency and memory against the number of GPUs into the PNG `file`. Raises UsageError
    without matplotlib, and where the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "plan: --plot needs matplotlib: pip install '.[report]' in a checkout of zeroshard"
        ) from None
    figure = Figure(figsize=(12, 5.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    numbers = list(dict.fromkeys(point.gpus for point in points))
    panels: Sequence[tuple[Any, Callable[[Point], float]]] = (
        (left, lambda point: 100 * point.efficiency),
        (right, lambda point: point.peak_bytes / 1e9),
    )
    # lines that lie on each other are told apart by style, width and marker
    styles = zip(("-", "--", "-.", ":") * 2, "osD^vPX*", strict=True)
    for (name, line), (style, marker) in zip(_by_row(points).items(), styles, strict=True):
        fitting = [point for point in line if point.fits]
        for axes, value in panels:
            (drawn,) = axes.plot(
                [point.gpus for point in line],
                [value(point) for point in line],
                style,
                marker=marker,
                fillstyle="none",
                label=name,
                alpha=0.85,
            )
            axes.plot(
                [point.gpus for point in fitting],
                [value(point) for point in fitting],
                marker,
                color=drawn.get_color(),
            )
    left.set(title="efficiency", ylabel="forward and backward alone / step, %", ylim=(0, 103))
    right.set(title="memory at peak", ylabel="GB of one GPU", yscale="log")
    limit = machine.gpu_memory / 1e9
    right.axhline(limit, color="black", linewidth=1)
    right.annotate(
        f"{machine.name}: {limit:.3g} GB",
        (numbers[-1], limit),
        (0, 3),
        textcoords="offset points",
        horizontalalignment="right",
    )
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [f"{number:,}" for number in numbers], rotation=45)
        axes.set_xlabel("GPUs")
        axes.grid(visible=True, which="major", alpha=0.3)
    left.legend(title="hollow: does not fit", fontsize=9, ncols=2)
    figure.suptitle(f"{model.name} on {machine.name}, {machine.node_size} GPUs in a node")
    try:
        figure.savefig(file, format="png", dpi=120)
    except OSError as error:
        raise UsageError(f"plan: --plot {file}: {error.strerror}") from None


# ------------------------------------------------------------------------------------- plan command

NOTHING_FITS = 1  # exit code
Measured = Callable[[int | None], "Machine"]  # of so many ranks (None: as many as devices)


def _plan(this_machine: Measured, arguments: argparse.Namespace) -> int:
    from zeroshard.planner import Axes, Training, make_plan

    with as_usage("plan: "):
        _take_preset(arguments)
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
    from zeroshard.planner.plan import make_sweep, parse_sweep

    if arguments.write is not None:
        leave_out(arguments, "--write writes the plan of one machine", "sweep")
    leave_out(arguments, "--sweep plans data parallel ranks alone", "tp", "pp")
    if arguments.sweep == "batch":
        leave_out(arguments, "--sweep batch finds it, and draws nothing", "batch", "plot")
        return _sweep_batches(arguments, training, this_machine)
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
        print_json({"model": sizes, "sweep": [asdict(one) for one in points]})
    else:
        print_sweep(model, machines[-1], points, arguments.price)
    return 0 if any(point.fits for point in points) else NOTHING_FITS


def _sweep_batches(
    arguments: argparse.Namespace, training: Training, this_machine: Measured
) -> int:
    """Print the largest micro-batch of each row, its speed and its price."""
    from zeroshard.planner.plan import largest_batches

    machine = _machine_of(arguments, arguments.gpus, this_machine)
    model = _describe(arguments, training)
    found = largest_batches(model, machine, training)
    if arguments.json:
        rows: list[dict[str, Any]] = [{"batch": batch, **row.to_dict()} for batch, row in found]
        print_json({"model": {"name": model.name, "parameters": model.numel}, "sweep": rows})
        return 0 if found else NOTHING_FITS
    span = f"{machine.gpus} x {machine.name} of {size_text(machine.gpu_memory)}"
    say_facts([("model", f"{model.name}: {model.numel:,} parameters"), ("machine", span)], width=9)
    if not found:
        say("no row fits with one sequence")
        return NOTHING_FITS
    lines = []
    for batch, row in found:
        hours = row.gpu_hours_per_billion_tokens or 0.0
        speed = three_digits(row.step_s or 0.0), count_text(row.tokens_per_s or 0.0)
        cost = three_digits(hours * (arguments.price or 1.0))
        peak = three_digits(row.peak_bytes["device"] / 1e9)
        lines.append((row.row, elsewhere(row.tiers), f"{batch:,}", peak, *speed, cost))
    cost_of = "GPU-hours" if arguments.price is None else "price"
    say(f"the largest micro-batch of a GPU that fits; {cost_of} of a billion tokens")
    columns = ("row", "elsewhere", "batch", "peak", "step", "tok/s", cost_of)
    Table(columns, lines, text=("row", "elsewhere"), is_framed=False).print()
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


def _take_preset(arguments: argparse.Namespace) -> None:
    """Set what the run called ``--preset`` says of the options that are not given."""
    if arguments.preset is None:
        return
    text = files("zeroshard.planner").joinpath("runs.toml").read_text(encoding="utf-8")
    runs = tomllib.loads(text)
    if arguments.preset not in runs:
        raise UsageError(f"plan: --preset {arguments.preset!r} is not one of {', '.join(runs)}")
    arguments.run = runs[arguments.preset]
    arguments.checkpointing = True if arguments.run["checkpointing"] else arguments.checkpointing
    for name in ("gpus",) if arguments.this_machine else ("gpu", "gpus"):
        if getattr(arguments, name) is None:
            setattr(arguments, name, arguments.run[name])


def _describe(arguments: argparse.Namespace, training: Training) -> ModelShape:
    """Return the model that the options name, with adapters where --trainable counts them."""
    from zeroshard.planner.families import is_foreign, read_model, shape_of_config
    from zeroshard.planner.model import describe, with_adapters

    given = [arguments.path, arguments.params, arguments.model, arguments.preset]
    if sum(one is not None for one in given) != 1:
        raise UsageError("plan: give one model: --params 7.5B, --model package.module:factory,"
                         " --preset mt-nlg-530b, or a path")  # fmt: skip
    if arguments.preset is not None:
        model = shape_of_config(arguments.run["config"], arguments.preset)
        model = replace(model, name=arguments.preset, note=arguments.run["source"])
    elif arguments.params is not None:
        model = describe(arguments.params)
    elif arguments.path is None:
        model = _built(arguments.model, training)
    elif is_foreign(arguments.path):
        from zeroshard.planner.modules import shape_of_path

        model = shape_of_path(arguments.path, training)
    else:
        model = read_model(arguments.path)
    return model if arguments.trainable is None else with_adapters(model, arguments.trainable)


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
    Option("--preset RUN", "a run that papers name: mt-nlg-530b, falcon, ..."),
    Option("--model M:F", "package.module:factory, built without memory"),
    Option("--trainable N", "train adapters alone (LoRA), so many: 40M"),
    Option("--this-machine", "as zeroshard doctor measures it (20 s, kept)"),
    Option("--gpu NAME", "preset (default H100; CPU, RTX4090, B200, ...)"),
    Option("--gpus N", "number of GPUs, or of ranks here (default 1)", int),
    Option("--node-size N", "GPUs of one node", int),
    Option("--gpu-memory SIZE", "of one GPU: 32GiB, or of each: 24GiB,80GiB"),
    Option("--shares S", "of states: 0.1,0.9, memory, auto, whole(_by_cost)"),
    Option("--host-memory SIZE", "of one node: 1TiB"),
    Option("--disk SIZE", "of one node: 3.2TB (default: none)"),
    Option("--network SIZE", "bytes a second of one GPU to other nodes: 25GB"),
    Option("--precision TYPE", "bf16 (default), fp16 or fp32", default="bf16"),
    Option("--accumulate TYPE", "of gradients at rest (default fp32)", default="fp32"),
    Option("--optimizer NAME", "adamw, adam-fused, adam-8bit, adam-bf16, momentum, muon, sgd",
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
    Option("--sweep WHAT", "on gpus=8..16384; or batch: the largest that fits"),
    Option("--plot FILE", "draw the sweep into a PNG (needs matplotlib)", Path),
    Option("--comm KEY=VALUE", "weight_codec=int8, ... of zs.Comm; may be repeated",
           action="append", default=[]),
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
    usage="%(prog)s (--params N | --preset RUN | --model M:F | PATH) [options]",
    allow_abbrev=False,
)  # fmt: skip


def command(this_machine: Measured) -> Subcommand:
    """Return the command, for a launcher that knows how to measure `this_machine`."""
    return replace(_COMMAND, handler=partial(_plan, this_machine))
