"""What ``engine.trail(DIR, every=n)`` costs, beside the same steps without it.

    python -m benchmarks.trail
    python -m benchmarks.trail --size tiny --leaves 2 --pairs 3 --json

    step      a training step with leaves
    between   the same inside a trail that records none of these steps
    recorded  the same inside a trail, each step recorded

A run with ``every=n`` records one step of n, so its cost is that of `between`, and an n-th of what
`recorded` costs more. Contenders take turns (A B C A B C ...) in one process per rank; each turn is
timed between two barriers, after an untimed step. CPU time is that of rank 0, all steps of the
turn: of one rank it says more where others use the machine, too.

What it does not do: GPUs, several hosts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import zeroshard as zs
from benchmarks.contenders import adamw
from benchmarks.model import GPT, Batches
from benchmarks.plan import SIZES, Size
from benchmarks.ranks import answer, parser_of_turns, start, timed
from benchmarks.results import machine_facts
from benchmarks.stats import bootstrap_median

__all__ = ["main", "table"]

_NEVER = 1 << 40


Turns = dict[str, list[float]]  # by contender the seconds of a step, turn by turn


def _measure(size: Size, asked: argparse.Namespace, directory: Path) -> dict[str, Turns]:
    """On a rank: return what a step of each contender takes, and of CPU time."""
    torch.manual_seed(0)
    model = GPT(size)
    optimizer = adamw(model.parameters())
    engine = zs.shard(model, optimizer, stage=asked.stage, leaves=asked.leaves)
    batches = Batches(size, rank=0, num_ranks=1, device=torch.device("cpu"))
    number = 0

    def step(_: int) -> None:
        nonlocal number
        number += 1
        for leaf in engine.leaves(number):
            engine.backward(model(*batches[number * asked.leaves + leaf]))
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds: Turns = {"step": [], "between": [], "recorded": []}
    cpu: Turns = {name: [] for name in seconds}

    def turn(name: str) -> None:
        begin = time.process_time()
        seconds[name].append(timed(step, asked.steps))
        cpu[name].append((time.process_time() - begin) / (asked.steps + 1))

    step(0)
    for _ in range(asked.pairs):
        turn("step")
        for name, every in (("between", _NEVER), ("recorded", 1)):
            with engine.trail(directory / name, every=every):
                turn(name)
    engine.close()
    return {"seconds": seconds, "CPU time": cpu}


def _costs(turns: Turns) -> str:
    """Return in words what a trail adds to a step."""
    of = list(zip(turns["step"], turns["between"], turns["recorded"], strict=True))
    added = {
        "every=10": [(0.9 * between + 0.1 * recorded) / step - 1 for step, between, recorded in of],
        "a recorded step": [recorded / step - 1 for step, _, recorded in of],
        "another one": [between / step - 1 for step, between, _ in of],
    }
    found = {name: bootstrap_median(ratios) for name, ratios in added.items()}
    return ", ".join(
        f"{name} {one.median:+.1%} [{one.low:+.1%}, {one.high:+.1%}]" for name, one in found.items()
    )


def table(result: dict[str, Any]) -> str:
    """Return the result as a few lines of text."""
    lines = [
        f"{result['size']}, {result['parameters'] / 1e6:.1f} M parameters, stage {result['stage']},"
        f" {result['ranks']} rank(s), {result['leaves']} leaves of {result['tokens']} tokens"
    ]
    for name in ("seconds", "CPU time"):
        turns = result[name]
        lines.append(
            f"{name}: step {statistics.median(turns['step']) * 1e3:.1f} ms; {_costs(turns)}"
        )
    return "\n".join(lines)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of_turns("Measure engine.trail() beside training steps.")
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--leaves", type=int, default=8, help="of a step (default: 8)")
    parser.add_argument("--ranks", type=int, default=2)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one of them; return the exit code."""
    asked = _parse(arguments)
    size = SIZES[asked.size]
    if asked.out is not None:
        answer(lambda: _measure(size, asked, asked.out.parent), asked.out)
        return 0
    names = ("size", "stage", "leaves", "ranks", "pairs", "steps")
    facts = {name: getattr(asked, name) for name in names}
    with tempfile.TemporaryDirectory(prefix="zeroshard-trail-") as directory:
        out = Path(directory, "out.json")
        line = [word for name in names for word in (f"--{name}", str(facts[name]))]
        if code := start(os.path.abspath(__file__), asked.ranks, [*line, "--out", str(out)]):
            return code
        facts |= {"parameters": size.num_parameters, "tokens": size.tokens}
        result = {**facts, **json.loads(out.read_text())}
    if asked.json:
        about = {"machine": machine_facts(), "at": datetime.now(UTC).isoformat()}
        print(json.dumps({**result, **about}))
    else:
        print(table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
