"""Print what has run on the pretended device, as Markdown.

python -m tests.device.table            # a row for each kind of case
python -m tests.device.table --cases    # a row for each case, with what differs
python -m tests.device.table --waits    # each wait left out: the schedules that find it

``--json FILE`` keeps each result in FILE, a line each, and runs only what is not there, so that the
table may be made in parts; ``--seconds`` ends a part.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.device.programs import ALL, CASES, Case, Outcome, Schedule, measure
from tests.device.test_waits import WAITS, finds
from tests.support.harness import close_pools, run_ranks

_DEVICE = "tests.device.zsim"
_RANKS = (1, 2, 4)
Result = tuple[Case, int, Outcome]  # on that many ranks


def _results(file: Path | None, seconds: float) -> Iterator[Result]:
    """Yield the outcome of each case, from `file` or by running it."""
    ends = time.monotonic() + seconds
    lines = file.read_text().splitlines() if file is not None and file.exists() else []
    kept = {
        (one["case"], one["ranks"]): Outcome(**one["outcome"]) for one in map(json.loads, lines)
    }
    for world in _RANKS:
        for name, case in CASES.items():
            if world in case.worlds and (name, world) not in kept and time.monotonic() < ends:
                outcome, *_ = run_ranks(world, measure, name, ALL, device=_DEVICE, timeout=300)
                kept[name, world] = outcome
                if file is not None:
                    line = {"case": name, "ranks": world, "outcome": asdict(outcome)}
                    with file.open("a") as out:
                        out.write(json.dumps(line) + "\n")
            if (name, world) in kept:
                yield case, world, kept[name, world]


def print_cases(results: Iterator[Result]) -> None:
    """Print a row for each case."""
    print("| case | ranks | runs | CPU seconds of a run | waits of a step | bits |")
    print("|---|---|---|---|---|---|")
    for case, ranks, outcome in results:
        bits = "plain PyTorch's" if case.is_plain else "equal"
        figures = f"{outcome.num_runs} | {outcome.cpu_s / outcome.num_runs:.2f}"
        waits = ", ".join(f"{count} {reason}" for reason, count in outcome.waits.items()) or "0"
        first = outcome.found[0] if outcome.found else bits
        print(f"| {case.name} | {ranks} | {figures} | {waits} | {first} |", flush=True)


def print_kinds(results: list[Result]) -> None:
    """Print a row for each kind of case."""
    print("| what | cases on 1, 2, 4 ranks | runs | with other bits | CPU s of a run | waits |")
    print("|---|---|---|---|---|---|")
    for kind in dict.fromkeys(case.kind for case, _, _ in results):
        ours = [(ranks, outcome) for case, ranks, outcome in results if case.kind == kind]
        cases = ", ".join(str(sum(ranks == wanted for ranks, _ in ours)) for wanted in _RANKS)
        runs = sum(outcome.num_runs for _, outcome in ours)
        different = sum(bool(outcome.found) for _, outcome in ours)
        each_s = sum(outcome.cpu_s for _, outcome in ours) / runs
        waits = [sum(outcome.waits.values()) for _, outcome in ours]
        span = " to ".join(map(str, sorted({min(waits), max(waits)})))
        print(f"| {kind} | {cases} | {runs} | {different} | {each_s:.2f} | {span} |")


def print_waits() -> None:
    """Leave out every wait in the case that needs it."""
    print("| wait | case | found by |\n|---|---|---|")
    for wait, (case, _) in WAITS.items():
        (found,) = run_ranks(1, finds, wait, case, ALL, device=_DEVICE, timeout=120)
        print(f"| `{wait}` | {case} | {', '.join(map(_name, found))} |", flush=True)


def _name(schedule: Schedule) -> str:
    name, seed = schedule
    return f"random {seed}" if name == "random" else name


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--waits", action="store_true")
    parser.add_argument("--cases", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    if options.waits:
        print_waits()
        return
    results = _results(options.json, options.seconds)
    print_cases(results) if options.cases else print_kinds(list(results))


if __name__ == "__main__":
    main()
    close_pools()
