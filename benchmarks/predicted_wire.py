"""Predicted steps beside those that benchmarks/slow_wire.py has measured, and their order.

    sudo .venv/bin/python -m benchmarks.slow_wire --out wire.json
    .venv/bin/python -m benchmarks.predicted_wire wire.json

The machine is what `zeroshard doctor` measures here now; the wire carries what bare transfers got
through it, and forward and backward take what they took alone. A row that was run in another
lowering than the one a plan takes is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.plan import Size
from benchmarks.predicted import Steps, in_order
from benchmarks.slow_wire import MESH, ROWS, Row
from benchmarks.validate import shape_of
from zeroshard.core.policy import row as policy_row
from zeroshard.planner import Machine, Training
from zeroshard.planner.durations import Durations
from zeroshard.planner.exact import LaidOut
from zeroshard.planner.machine import machine_of
from zeroshard.planner.rows import plan_row

__all__ = ["main", "predicted"]


def predicted(
    row: Row, size: Size, precision: str, *, machine: Machine, compute_s: float
) -> float | None:
    """Return the seconds of a step of `row` where forward and backward alone take `compute_s`;
    None where a plan lowers the row in another way.
    """
    training = Training(
        precision,
        accumulate="fp32",
        batch=size.batch,
        sequence=size.context,
        weight_codec=row.weight_codec,
        grad_codec=row.grad_codec,
    )
    policy, formats = policy_row(row.policy), training.formats(None)
    planned, run = (policy.routes(MESH, formats, two_level=one) for one in (None, row.hierarchical))
    if planned != run:
        return None
    laid_out = LaidOut(shape_of(size, training), MESH, training.align)
    alone = Durations(laid_out, machine, training).compute_s()
    speeds = replace(machine.speeds, compute_efficiency=alone / compute_s)
    return plan_row(laid_out, policy, replace(machine, speeds=speeds), training).step_s


def _lines(report: Mapping[str, Any], here: Machine, latency: float) -> Iterator[str]:
    size = Size(**report["size"])
    for at in report["rates"]:
        # both ranks of a node were given their share of the wire at once
        network = at["wire_mbit"] * 1e6 / 8 / MESH.node_size
        speeds = replace(here.speeds, network=network, network_latency=latency)
        machine = replace(here, node_size=MESH.node_size, speeds=speeds)
        yield f"\n{at['rate']}: bare transfers got {at['wire_mbit']:.0f} Mbit/s each way\n"
        yield "| | predicted ms | measured ms | off |\n|---|---|---|---|"
        steps = {}
        for name, measured in at["rows"].items():
            seconds = predicted(
                ROWS[name],
                size,
                report["precision"],
                machine=machine,
                compute_s=report["compute_s"],
            )
            if seconds is None:
                continue
            steps[name] = Steps(seconds, measured["step_s"])
            median = statistics.median(measured["step_s"])
            off = f"{100 * (seconds / median - 1):+.0f}%"
            yield f"| {name} | {1e3 * seconds:.0f} | {1e3 * median:.0f} | {off} |"
        yield f"\n{in_order(steps, noise=0.02)}"


def main(arguments: list[str]) -> int:
    """Print a table for each rate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path, metavar="WIRE.json")
    report = json.loads(parser.parse_args(arguments).report.read_text(encoding="utf-8"))
    from zeroshard.commands.doctor import examine

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="zeroshard-wire-") as directory:
        found = examine(Path(directory))
    sockets = [one for one in found["measured"]["collectives"] if one.get("transport") == "gloo"]
    latency = statistics.median(one["latency_s"] for one in sockets)
    for line in _lines(report, machine_of(found, ranks=MESH.size), latency):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
