#!/usr/bin/env python3
"""Train every family of tests/support/families.py on 2 ranks, under torch DDP and at stages 1, 2
and 3, and write the table of docs/models.md.

    # measure all, write the table between the marks in docs/models.md
    python scripts/models_table.py
    # print raw numbers and medians, write nothing
    python scripts/models_table.py --families Llama ViT --json

The four contenders of a family are alive at once on the same two ranks and take turns (A B C D A B
C D ...), so that the ratio of a round is steadier than its times; the median over the rounds is
reported. All have taken the same steps on the same data in the end: their losses and final weights
are compared bit by bit, and where they differ the table has the largest difference. One thread per
rank. Tables and numbers go to stdout, progress to stderr. Exit code 1 when a family differs from
DDP or fails.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.results import machine_facts  # noqa: E402
from benchmarks.stats import Interval, bootstrap_median  # noqa: E402
from tests.support.families import FAMILIES, SMALL, TINY  # noqa: E402
from tests.support.family_training import STAGES, Measured, measure  # noqa: E402
from tests.support.harness import RankError, close_pools, run_ranks  # noqa: E402
from zeroshard.terminal import JSON, Option, Table, print_json, progress  # noqa: E402  # noqa: E402

SIZES = {"small": SMALL, "tiny": TINY}
NUM_RANKS = 2
DOCUMENT = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- models table: begin -->", "<!-- models table: end -->"
HEADER = (
    "family",
    "parameters",
    "same bits as DDP, stages 1 / 2 / 3",
    "MB at rest per rank, DDP / 1 / 2 / 3",
    "samples/s of DDP",
    "times as fast as DDP, 1 / 2 / 3",
)


@dataclass(frozen=True)
class Line:
    """One family's figures."""

    family: str
    num_parameters: int
    difference: dict[str, float]  # per stage, to DDP; 0.0 is equal bits
    at_rest_bytes: dict[str, int]  # per contender
    samples_per_s: float  # of DDP, all ranks together
    ratio: dict[str, Interval]  # per stage: DDP's seconds / this stage's
    turn_s: dict[str, list[float]]  # per contender, of the slowest rank

    @property
    def cells(self) -> tuple[str, ...]:
        """What the table says, as text."""
        stages = [str(stage) for stage in STAGES]
        bits = [
            "yes" if self.difference[stage] == 0 else f"{self.difference[stage]:.1e}"
            for stage in stages
        ]
        megabytes = [f"{self.at_rest_bytes[kind] / 1e6:.1f}" for kind in ("torch-ddp", *stages)]
        speeds = [f"{self.ratio[stage].median:.2f}" for stage in stages]
        return (
            self.family,
            f"{self.num_parameters:,}",
            " / ".join(bits),
            " / ".join(megabytes),
            f"{self.samples_per_s:.0f}",
            " / ".join(speeds),
        )


def line(family: str, ranks: list[Measured], samples: int) -> Line:
    """Put together what the ranks saw; a turn takes as long as its slowest rank."""
    turn_s = {
        kind: [max(turn) for turn in zip(*(rank.turn_s[kind] for rank in ranks), strict=True)]
        for kind in ranks[0].turn_s
    }
    reference = turn_s["torch-ddp"]
    ratio = {
        str(stage): bootstrap_median(
            [a / b for a, b in zip(reference, turn_s[str(stage)], strict=True)]
        )
        for stage in STAGES
    }
    difference = {kind: max(rank.difference[kind] for rank in ranks) for kind in turn_s}
    at_rest = {kind: max(rank.at_rest_bytes[kind] for rank in ranks) for kind in turn_s}
    return Line(
        family,
        ranks[0].num_parameters,
        difference,
        at_rest,
        samples / bootstrap_median(reference).median,
        ratio,
        turn_s,
    )


def table(lines: list[Line], failures: dict[str, str]) -> str:
    """Return the table as markdown; a family that failed says so in its row."""
    failed = [
        (name, "", "failed: " + reason.split(":")[0], *[""] * (len(HEADER) - 3))
        for name, reason in failures.items()
    ]
    rows = [*(each.cells for each in lines), *failed]
    return Table(HEADER, rows, text=HEADER[:1]).markdown().rstrip("\n")


def foot(arguments: argparse.Namespace, machine: dict[str, Any]) -> str:
    """Say what was run, where and how."""
    size = SIZES[arguments.size]
    words, kernel = " ".join(sys.argv[1:]), ".".join(machine["kernel"].split(".")[:2])
    return (
        f"`python scripts/models_table.py{' ' + words if words else ''}`: width {size.width},"
        f" {size.layers} layers, {size.batch} samples of {size.length} tokens (images: {size.side}"
        f" x {size.side} pixels) per rank and step, fp32 unless the name says otherwise, AdamW,"
        f" {NUM_RANKS} ranks x 1 thread, shared memory; medians of {arguments.rounds} rounds of"
        f" {arguments.steps} steps, bits after {(arguments.rounds + 2) * arguments.steps} steps."
        f" {machine['processor']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux"
        f" {kernel}, Python {machine['python']}, {_versions()}."
    )


def _versions() -> str:
    from importlib.metadata import version

    return ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))


def write(document: Path, text: str) -> None:
    """Put `text` between the two marks of `document`."""
    whole = document.read_text(encoding="utf-8")
    if whole.count(BEGIN) != 1 or whole.count(END) != 1:
        raise SystemExit(f"{document.name}: the lines {BEGIN} and {END} must stand there once each")
    before, rest = whole.split(BEGIN)
    document.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


def run(names: list[str], arguments: argparse.Namespace) -> tuple[list[Line], dict[str, str]]:
    """Measure every family; return the lines, and by name why those failed that have none."""
    size = SIZES[arguments.size]
    lines: list[Line] = []
    failures: dict[str, str] = {}
    with progress(total=len(names)) as bar:
        for name in names:
            bar.tell(name)
            turns = (arguments.rounds, arguments.steps)
            try:
                ranks = run_ranks(NUM_RANKS, measure, name, size, *turns, timeout=arguments.timeout)
            except RankError as error:
                failures[name] = f"{error.type_name}: {error.message}"
                bar.say(f"FAILED {name}: {failures[name]}")
            else:
                lines.append(line(name, ranks, NUM_RANKS * size.batch * arguments.steps))
                bar.say(" | ".join(lines[-1].cells))
            bar.advance()
    return lines, failures


OPTIONS = (
    Option("--families NAME ...", "default: all; one of " + "; ".join(FAMILIES),
           choices=list(FAMILIES)),
    Option("--size", choices=tuple(SIZES), default="small"),
    Option("--rounds N", "rounds that count; two more warm up (default: 12)", int, 12),
    Option("--steps N", "steps per turn (default: 2)", int, 2),
    Option("--timeout S", "seconds per family (default: 600)", float, 600.0),
    replace(JSON, help="print raw numbers as JSON and leave the document as it is"),
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option in OPTIONS:
        option.add_to(parser)
    arguments = parser.parse_args()
    machine = machine_facts()
    try:
        lines, failures = run(arguments.families or list(FAMILIES), arguments)
    finally:
        close_pools()
    if arguments.json:
        machine["load_after"] = list(os.getloadavg())
        found = [asdict(each) for each in lines]
        print_json({"machine": machine, "lines": found, "failures": failures})
    else:
        print(table(lines, failures))
        if arguments.families is None:
            write(DOCUMENT, f"{table(lines, failures)}\n\n{foot(arguments, machine)}")
    return 1 if failures or any(max(each.difference.values()) > 0 for each in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
