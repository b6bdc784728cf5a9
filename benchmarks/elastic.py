"""What ``saver.keep()`` costs per step, beside the step and one plain copy of the same bytes.

    python -m benchmarks.elastic --size small --pairs 12
    python -m benchmarks.elastic --size tiny --pairs 3 --json

    step    a training step, ZeRO-3
    kept    a training step, and then keep()
    copy    this rank's part of the checkpoint, copied once into warm memory

The job starts itself once more under ``zeroshard run --elastic``, whose launcher keeps the memory.
Contenders take turns (A B C A B C ...) in one process per rank; each turn is timed between two
barriers, after an untimed step.

What it does not do: redundancy over a network, GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zeroshard as zs
from benchmarks.contenders import adamw
from benchmarks.model import GPT, Batches
from benchmarks.plan import SIZES, Size
from benchmarks.ranks import answer, parser_of_turns, start, timed
from benchmarks.results import machine_facts
from benchmarks.stats import bootstrap_median

__all__ = ["main", "table"]

RANKS = 2


def _measure(size: Size, pairs: int, steps: int, directory: Path) -> dict[str, Any]:
    """On a rank: return the seconds of each contender, turn by turn."""
    rank, device = dist.get_rank(), torch.device("cpu")
    torch.manual_seed(0)
    model = GPT(size)
    optimizer = adamw(model.parameters())
    engine = zs.shard(model, optimizer, stage=3)
    batches = Batches(size, rank=rank, num_ranks=RANKS, device=device)
    part = torch.ones(size.num_parameters // RANKS * 12, dtype=torch.uint8)
    copy, number = torch.zeros_like(part), 0

    def step(_: int) -> None:
        nonlocal number
        number += 1
        engine.backward(model(*batches[number]))
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds: dict[str, list[float]] = {"step": [], "kept": [], "copy": []}
    with zs.Saver(directory, engine) as saver:

        def kept(turn: int) -> None:
            step(turn)
            saver.keep(number)

        def copied(_: int) -> None:
            copy.copy_(part)

        turns: dict[str, Callable[[int], None]] = {"step": step, "kept": kept, "copy": copied}
        kept(0)
        kept(0)  # both buffers have their memory
        for _ in range(pairs):
            for name, turn in turns.items():
                seconds[name].append(timed(turn, steps))
    engine.close()
    return {"part_bytes": part.numel(), "seconds": seconds}


def table(result: dict[str, Any]) -> str:
    """Return the result as a few lines of text."""
    seconds, num_bytes = result["seconds"], result["part_bytes"]
    pairs = list(zip(seconds["step"], seconds["kept"], seconds["copy"], strict=True))
    share = bootstrap_median([kept / step - 1 for step, kept, _ in pairs])
    extra = [kept - step for step, kept, _ in pairs]
    lines = [
        f"{result['size']}, {RANKS} ranks, {num_bytes / 1e6:.1f} MB of checkpoint per rank",
        f"step {statistics.median(seconds['step']) * 1e3:.1f} ms",
        f"keep {statistics.median(extra) * 1e3:.1f} ms: {share.median:.1%} of a step"
        f" [{share.low:.1%}, {share.high:.1%}],"
        f" {num_bytes / max(statistics.median(extra), 1e-9) / 1e9:.2f} GB/s",
        f"one plain copy {statistics.median(seconds['copy']) * 1e3:.1f} ms",
    ]
    return "\n".join(lines)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    return parser_of_turns("Measure saver.keep() beside a training step.").parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks, or be one of them; return the exit code."""
    asked = _parse(arguments)
    if asked.out is not None:
        kept = asked.out.parent / "steps"
        answer(lambda: _measure(SIZES[asked.size], asked.pairs, asked.steps, kept), asked.out)
        return 0
    with tempfile.TemporaryDirectory(prefix="zeroshard-elastic-") as directory:
        out = Path(directory, "out.json")
        line = ["--size", asked.size, "--pairs", str(asked.pairs), "--steps", str(asked.steps)]
        code = start(os.path.abspath(__file__), RANKS, [*line, "--out", str(out)], ["--elastic"])
        if code:
            return code
        result = {"size": asked.size, **json.loads(out.read_text())}
    if asked.json:
        facts = {"machine": machine_facts(), "at": datetime.now(UTC).isoformat()}
        print(json.dumps({**result, **facts}))
    else:
        print(table(result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
