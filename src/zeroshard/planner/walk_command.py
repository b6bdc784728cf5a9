"""``zeroshard walk``: a step frame by frame, as the schedule has it: a table, JSON, a film."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from zeroshard.terminal import (
    JSON,
    Option,
    Subcommand,
    Table,
    UsageError,
    as_usage,
    count,
    note,
    print_json,
    say,
    three_digits,
)

if TYPE_CHECKING:
    from zeroshard.core.policy import Policy
    from zeroshard.planner.walk import Walk


def _walk(arguments: argparse.Namespace) -> int:
    from zeroshard.planner import film
    from zeroshard.planner.walk import walk

    with as_usage("walk: "):
        one = walk(
            _row_of(arguments),
            arguments.ranks,
            units=arguments.units,
            micro_batches=arguments.micro_batches,
            node_size=arguments.node_size,
            shares=arguments.shares,
        )
    for path, draw in ((arguments.svg, film.svg), (arguments.html, film.html)):
        if path is not None:
            try:
                path.write_text(draw(one), encoding="utf-8")
            except OSError as error:
                raise UsageError(f"walk: {path}: {error.strerror}") from None
            note(f"wrote {path}")
    if arguments.json:
        mesh = one.laid_out.mesh
        frames = [asdict(frame) for frame in one.frames]
        head = {"row": one.policy.name, "ranks": mesh.size, "node_size": mesh.node_size}
        if one.owners:  # frames of rank 0
            held = [[dict(frame.held) for frame in frames_of] for frames_of in one.by_rank]
            head |= {"owners": one.owners, "held_by_rank": held}
        print_json({**head, "units": len(one.planned), "frames": frames})
    else:
        _print(one)
    return 0


def _row_of(arguments: argparse.Namespace) -> Policy:
    """Return the row that the options name, on their tiers. Raises UsageError for others."""
    from zeroshard.core.placement import Tier
    from zeroshard.core.policy import STAGES, row

    if arguments.row is not None and arguments.stage is not None:
        raise UsageError("walk: --row and --stage name the same thing: leave one of them out")
    stage = 3 if arguments.stage is None else arguments.stage
    if stage not in STAGES:
        raise UsageError(f"walk: --stage {stage} is not one of 0, 1, 2, 3")
    tiers = dict.fromkeys(("weight", "grad", "optimizer"), Tier.DEVICE)
    for text in "" if arguments.offload is None else arguments.offload.split(","):
        state, _, tier = text.partition("=")
        if state not in tiers or tier not in [one.value for one in Tier]:
            raise UsageError(
                f"walk: --offload {text!r} is not STATE=TIER: states are {', '.join(tiers)}, tiers"
                f" {', '.join(one.value for one in Tier)}"
            )
        tiers[state] = Tier(tier)
    try:
        return row(arguments.row or STAGES[stage]).tiered(*tiers.values())
    except ValueError as error:
        raise UsageError(f"walk: {error}") from None


def _print(one: Walk) -> None:
    """Print a line for each frame, in GB of one rank, and what happens."""
    mesh = one.laid_out.mesh
    nodes = f", {mesh.node_size} in a node" if mesh.num_nodes > 1 else ""
    say(
        f"{one.policy.name}: {len(one.planned)} layers of {one.laid_out.model.units[0].numel:,}"
        f" parameters on {mesh.size} ranks{nodes}; GB of one rank"
    )
    away = [tier for tier in ("host", "disk") if any(tier in frame.away for frame in one.frames)]
    rows, phase = [], ""
    for number, frame in enumerate(one.frames, 1):
        sizes = [*frame.held.values(), frame.total, *(frame.away.get(tier, 0) for tier in away)]
        rows.append(
            (
                "" if frame.phase == phase else frame.phase,
                number,
                frame.command,
                ",".join(str(unit + 1) for unit in frame.units),
                *(three_digits(size / 1e9) for size in sizes),
            )
        )
        phase = frame.phase
    columns = ("phase", "#", "command", "layer", "weight", "grad", "optim", "act", "all", *away)
    Table(columns, rows, text=("phase", "command", "layer"), is_framed=False).print()


COMMAND = Subcommand(
    "walk", "a step frame by frame: who gathers, holds and releases what; as a film",
    "zeroshard walk --stage 3 --ranks 4 --units 4 --svg film.svg\n"
    "zeroshard walk --row hpz --micro-batches 2 --html film.html",
    (
        Option("--stage N", "of ZeRO, 0 to 3 (default 3)", int),
        Option("--row NAME", "a row of the table instead: zero3-keep, hpz, mics, hfsdp, ..."),
        Option("--ranks N", "1 to 8 GPUs (default 4)", count(1), 4),
        Option("--node-size N", "GPUs of one node (default: all; two nodes for hpz, mics, hfsdp)",
               count(1)),
        Option("--units N", "1 to 8 layers, each of a model of 7B (default 4)", count(1), 4),
        Option("--micro-batches N", "of one step (default 1)", count(1), 1),
        Option("--shares whole", "each layer belongs to one rank, as papers draw it",
               choices=("whole",)),
        Option("--offload S=T", "tiers of weight, grad, optimizer: grad=host,optimizer=disk"),
        Option("--svg FILE", "draw a film that needs no script", Path),
        Option("--html FILE", "draw it with a slider, in one file", Path),
        JSON,
        Option("--debug", argparse.SUPPRESS),
    ),
    _walk, description="Walk through one step's schedule, and draw it.", allow_abbrev=False,
)  # fmt: skip
