"""Replay one random program, shrink it, or run many.

python -m tests.fuzz 17                    run seed 17 and print it
python -m tests.fuzz 17 --shrink           reduce it while it fails the same way
python -m tests.fuzz --from 0 --to 3000    run many; a summary by outcome at the end
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter

from rich.console import Console
from rich.progress import Progress

from tests.fuzz.draw import HELD_BACK, draw
from tests.fuzz.program import Program
from tests.fuzz.runner import Outcome, report, run_program
from tests.fuzz.shrink import shrink
from tests.support.harness import close_pools


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz",
        description="Run random programs against data parallel training by hand.",
    )
    parser.add_argument("seed", nargs="?", type=int, help="run this one")
    parser.add_argument(
        "--shrink", action="store_true", help="reduce the program while it fails in the same way"
    )
    parser.add_argument(
        "--from",
        dest="first",
        type=int,
        default=0,
        metavar="SEED",
        help="the first of many (default 0)",
    )
    parser.add_argument(
        "--to",
        dest="last",
        type=int,
        default=300,
        metavar="SEED",
        help="the one after the last (default 300)",
    )
    parser.add_argument("--all-features", action="store_true", help="also those that are held back")
    return parser.parse_args()


def _one(program: Program, path: str, *, reduce: bool) -> bool:
    outcome = run_program(program, path)
    if reduce and not outcome.is_good:
        print(report(program, outcome), flush=True)
        program = shrink(program, lambda smaller: run_program(smaller, path).kind == outcome.kind)
        outcome = run_program(program, path)
        print("\nsmaller:")
    print(report(program, outcome))
    return outcome.is_good


def _many(first: int, last: int, path: str) -> bool:
    console = Console(stderr=True)
    counts: Counter[str] = Counter()
    failed: list[tuple[int, Outcome]] = []
    with Progress(console=console) as progress:
        task = progress.add_task("programs", total=last - first)
        for seed in range(first, last):
            program = draw(seed)
            outcome = run_program(program, path)
            counts[outcome.kind] += 1
            if not outcome.is_good:
                failed.append((seed, outcome))
                progress.console.print(
                    f"{seed} {outcome.kind}: {outcome.detail[:300]}", markup=False, highlight=False
                )
            progress.advance(task)
    for kind, count in counts.most_common():
        print(f"{count:6} {kind}")
    for seed, outcome in failed:
        print(f"python -m tests.fuzz {seed}   # {outcome.kind}: {outcome.detail[:160]}")
    return not [1 for _, outcome in failed if outcome.kind != "impossible"]


def main() -> int:
    arguments = _arguments()
    if arguments.all_features:
        HELD_BACK.clear()
    with tempfile.TemporaryDirectory(prefix="zeroshard-fuzz-") as path:
        try:
            if arguments.seed is not None:
                good = _one(draw(arguments.seed), path, reduce=arguments.shrink)
            else:
                good = _many(arguments.first, arguments.last, path)
        finally:
            close_pools()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
