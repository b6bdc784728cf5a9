#!/usr/bin/env python3
"""Measure generation: the plain model, stage 3, and stage 3 inside ``engine.gathered()``, in
turn on the same 2 ranks.

    python scripts/generation.py             # a table: tokens per second and rank, ratios to the
                                             plain model
    python scripts/generation.py --json      # the same, with the seconds of every turn

Each rank generates for itself, greedily, from a Llama of random weights. The three take turns (A B
C A B C ...); medians of the ratios of the rounds. One thread per rank.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.stats import bootstrap_median  # noqa: E402
from tests.support.families import SMALL  # noqa: E402
from tests.support.family_training import GENERATIONS as KINDS  # noqa: E402
from tests.support.family_training import measure_generation  # noqa: E402
from tests.support.harness import close_pools, run_ranks  # noqa: E402

NUM_RANKS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64, help="tokens per turn (default: 64)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds that count (default: 15)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    arguments = parser.parse_args()
    try:
        ranks = run_ranks(
            NUM_RANKS, measure_generation, arguments.tokens, arguments.rounds, SMALL, timeout=900
        )
    finally:
        close_pools()
    slowest = {
        kind: [max(turns) for turns in zip(*(rank[kind] for rank in ranks), strict=True)]
        for kind in KINDS
    }
    ratios = {
        kind: bootstrap_median(
            [a / b for a, b in zip(slowest["plain"], slowest[kind], strict=True)]
        )
        for kind in KINDS
    }
    if arguments.json:
        print(
            json.dumps(
                {
                    "turn_s": slowest,
                    "ratio": {kind: ratio.median for kind, ratio in ratios.items()},
                },
                indent=1,
            )
        )
        return 0
    print("| | tokens/s per rank | times as fast as plain |\n| --- | ---: | ---: |")
    for kind in KINDS:
        rate = arguments.tokens / bootstrap_median(slowest[kind]).median
        print(
            f"| {kind} | {rate:.0f} | {ratios[kind].median:.3f} [{ratios[kind].low:.3f},"
            f" {ratios[kind].high:.3f}] |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
