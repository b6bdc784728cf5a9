"""Predicted beside measured: plans of this machine for a small GPT, and the runs themselves.

    python -m benchmarks.validate --ranks 2 --size small        every row, three tier mixes

Bytes at rest and payload per step are compared to the byte. Steps are predicted twice: with the
rates of ``zeroshard doctor`` alone, and with the FLOP/s that this model's own forward and backward
reach here in one process per rank, which no probe of square matrices can know. All cases train in
one run, in turn, so that a slow minute meets them all; medians of their turns are compared. One of
them trains twice, as two: how far the two are from each other is the noise, which no order between
others is asked to beat (predicted.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zeroshard as zs
from benchmarks.contenders import adamw
from benchmarks.model import GPT, Batches
from benchmarks.plan import SIZES, Size
from benchmarks.predicted import Steps, in_order
from benchmarks.ranks import start_with_report, timed
from benchmarks.tables import grid
from zeroshard.core.placement import Mesh, Placement, Tier
from zeroshard.core.policy import ROWS, Policy
from zeroshard.planner import Machine, ModelShape, Training
from zeroshard.planner.durations import Durations
from zeroshard.planner.exact import LaidOut
from zeroshard.planner.machine import machine_of
from zeroshard.planner.model import Decoder
from zeroshard.planner.modules import shape_of_module
from zeroshard.planner.rows import plan_row
from zeroshard.runtime.reports import TrafficReport

__all__ = ["main", "shape_of"]

_MIXES = {
    "zero2, optimizer on host": ("zero2", {"optimizer": "host"}),
    "zero3, grad and optimizer on host": ("zero3", {"grad": "host", "optimizer": "host"}),
    "zero3, all on disk": ("zero3", {"weight": "disk", "grad": "disk", "optimizer": "disk"}),
}


@dataclass(frozen=True)
class _Case:
    """One row on one mix of tiers."""

    name: str
    policy: Policy
    node_size: int  # of ranks that count as one node

    @property
    def tiers(self) -> dict[str, str]:
        cells = self.policy.default
        named = {"weight": cells.weight, "grad": cells.grad, "optimizer": cells.optim}
        away = {name: cell.tier.value for name, cell in named.items()}
        return {name: tier for name, tier in away.items() if tier != Tier.DEVICE.value}


_TWIN = "zero3", "zero3, again"  # one program, twice


def _cases(ranks: int) -> Iterator[_Case]:
    yield _Case(_TWIN[1], ROWS[_TWIN[0]], ranks)
    for name, policy in ROWS.items():
        if name in ("hpz", "mics", "hfsdp"):  # rows of several nodes: each rank is one
            if ranks > 1:
                yield _Case(f"{name}, nodes of 1", policy, 1)
        else:
            yield _Case(name, policy, ranks)
    for name, (row, tiers) in _MIXES.items():
        places = [Tier(tiers.get(state, "device")) for state in ("weight", "grad", "optimizer")]
        yield _Case(name, ROWS[row].tiered(*places), ranks)


# ---------------------------------------------------------------------------------------- measured


def _step(model: GPT, optimizer: torch.optim.Optimizer, batches: Batches, number: int) -> None:
    model(*batches[number]).backward()
    optimizer.step()
    optimizer.zero_grad()


def _let_arrive(case: _Case, model: GPT, batches: Batches) -> None:
    """Wait for the weights that the last step of a row with whole weights has published."""
    if case.policy.default.weight.node is Placement.REPLICATE:
        with torch.no_grad():
            model(*batches[1])


def _payload(report: TrafficReport) -> dict[str, int]:
    """Return the bytes of a step by link, without small exchanges of the ranks."""
    node = sum(size for name, size in report.between_nodes.items() if name != "exchange")
    return {"local": report.total - report.bytes.get("exchange", 0) - node, "node": node}


def _measure(size: Size, turns: int, steps: int, disk: str) -> dict[str, dict[str, Any]]:
    """Return for each case "seconds" of every turn, "rest" and "traffic"; of "compute" seconds."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = Batches(size, rank=rank, num_ranks=ranks, device=torch.device("cpu"))

    def compute(number: int) -> None:
        plain(*batches[number]).backward()
        plain.zero_grad()

    torch.manual_seed(0)
    plain = GPT(size)
    running: dict[str, Callable[[int], None]] = {"compute": compute}
    found: dict[str, dict[str, Any]] = {"compute": {}}
    for case in _cases(ranks):
        torch.manual_seed(0)
        model = GPT(size)
        optimizer = adamw(model.parameters())
        path = disk if "disk" in case.tiers.values() else None
        engine = zs.shard(
            model,
            optimizer,
            policy=case.policy.name,
            comm=zs.Comm(node_size=case.node_size) if case.node_size < ranks else None,
            offload=zs.Offload(disk_path=path, **case.tiers),
        )

        step = partial(_step, model, optimizer, batches)
        step(0)
        with engine.no_sync():  # between micro-batches, where every state exists
            model(*batches[0]).backward()
        tiers = engine.memory().tiers
        optimizer.step()
        optimizer.zero_grad()
        # a publish is counted when it has arrived: the one of the step before must not count here
        _let_arrive(case, model, batches)
        engine.reset_traffic()
        step(1)
        _let_arrive(case, model, batches)
        found[case.name] = {
            "rest": {
                tier.value: sum(by_tier.get(tier.value, 0) for by_tier in tiers.values())
                for tier in Tier
            },
            "traffic": _payload(engine.traffic()),
        }
        running[case.name] = step
    for _ in range(turns):
        for name, run in running.items():
            found[name].setdefault("seconds", []).append(timed(run, steps))
    return found


# --------------------------------------------------------------------------------------- predicted


def shape_of(size: Size, training: Training) -> ModelShape:
    """Return the benchmark's GPT of `size`, with what attention costs."""
    shape = shape_of_module(GPT(size), training)
    width, heads = size.width, size.heads
    inner = Decoder(
        width, size.layers, heads, heads, width // heads, 4 * width, False, size.vocabulary
    )
    return replace(shape, decoder=inner)


def _compare(size: Size, report: dict[str, Any], found: dict[str, dict[str, Any]]) -> list[Any]:
    """Return a line for each case: what was predicted and measured."""
    ranks = dist.get_world_size()
    training = Training("fp32", batch=size.batch, sequence=size.context)
    shape, here = shape_of(size, training), machine_of(report, ranks=ranks)
    sockets = [one for one in report["measured"]["collectives"] if one.get("transport") == "gloo"]
    lines = []
    computed = statistics.median(found["compute"]["seconds"])
    for case in _cases(ranks):
        speeds = here.speeds
        if case.node_size < ranks:  # nodes on one host meet over sockets
            speeds = replace(
                speeds,
                network=statistics.median(one["bytes_per_s"] for one in sockets),
                network_latency=statistics.median(one["latency_s"] for one in sockets),
            )
        machine = replace(here, node_size=case.node_size, speeds=speeds)
        laid_out = LaidOut(shape, Mesh(ranks // case.node_size, case.node_size))
        alone = Durations(laid_out, machine, training).compute_s()
        own: Machine = replace(machine, speeds=replace(speeds, compute_efficiency=alone / computed))
        by_doctor, by_model = (
            plan_row(laid_out, case.policy, one, training) for one in (machine, own)
        )
        measured = found[case.name]
        seconds = statistics.median(measured["seconds"])
        lines.append(
            {
                "case": case.name,
                "rest_bytes": {"predicted": by_model.rest_bytes, "measured": measured["rest"]},
                "traffic_bytes": {
                    "predicted": by_model.traffic_bytes,
                    "measured": measured["traffic"],
                },
                "step_s": {
                    "doctor": by_doctor.step_s,
                    "own_compute": by_model.step_s,
                    "measured": seconds,
                    "turns": measured["seconds"],
                },
            }
        )
    return lines


def _order(lines: list[Any]) -> str:
    """Return how well the order of the cases is predicted."""
    steps = {
        one["case"]: Steps(one["step_s"]["own_compute"], one["step_s"]["turns"]) for one in lines
    }
    one, twin = (steps[name].turns for name in _TWIN)
    noise = abs(statistics.median(a / b for a, b in zip(one, twin, strict=True)) - 1)
    del steps[_TWIN[1]]
    return f"noise: {noise:.1%}\n{in_order(steps, noise=noise)}"


def _print(lines: list[Any]) -> None:
    columns = ("", "bytes at rest", "bytes received", "predicted ms, doctor",
               "... with the model's FLOP/s", "measured ms", "off")  # fmt: skip
    rows = []
    for one in lines:
        step = one["step_s"]
        exact = [
            f"{sum(one[what]['measured'].values()):,}"
            + (", equal" if one[what]["predicted"] == one[what]["measured"] else ", NOT equal")
            for what in ("rest_bytes", "traffic_bytes")
        ]
        off = 100 * (step["own_compute"] / step["measured"] - 1)
        times = [f"{1e3 * step[name]:.1f}" for name in ("doctor", "own_compute", "measured")]
        rows.append((one["case"], *exact, *times, f"{off:+.0f}%"))
    print(grid("", columns, rows).markdown())
    print(_order(lines))


# ------------------------------------------------------------------------------------ command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.validate", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--turns", type=int, default=6, help="of every case, one after another")
    parser.add_argument("--steps", type=int, default=4, help="of a turn")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)  # given to the ranks
    return parser


def main(arguments: list[str]) -> int:
    """Measure this machine, then start the ranks; a rank compares."""
    given = _parser().parse_args(arguments)
    if given.report is None:
        return start_with_report(__file__, given.ranks, arguments, with_disk=True)
    zs.init_distributed()
    if not dist.is_initialized():  # a single rank
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    torch.set_num_threads(1)
    report = json.loads(given.report.read_text(encoding="utf-8"))
    found = _measure(SIZES[given.size], given.turns, given.steps, str(given.report.parent))
    if dist.get_rank() == 0:
        lines = _compare(SIZES[given.size], report, found)
        print(json.dumps(lines, indent=1)) if given.json else _print(lines)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
