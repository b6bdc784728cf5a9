"""Print the routes of a row: every hop with its lane and its bytes.

    python -m zeroshard.core.route zero3 --nodes 2 --local 4 --weight-codec int8

Bytes are counted for one rank: what it receives (and sends) inside its node and between nodes, and
what it reads from another tier or writes there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from zeroshard.core.placement import Mesh, Tier
from zeroshard.core.policy import row
from zeroshard.core.route import Hop, Route, Routes, When
from zeroshard.core.wire import CODEC_BITS, Formats, LinkBytes

_HEAD = ("hop", "over", "from", "to", "format", "lane", "inside", "between", "tier", "")
_NUMBERS = range(6, 9)  # columns of numbers
_LOWERINGS = {"cheapest": None, "flat": False, "two-level": True}
_WHEN = {
    When.ALWAYS: "",
    When.HELD: "held sums",
    When.FIRST: "first sum",
    When.AGAIN: "later sums",
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zeroshard.core.route", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("row", help="a row of the table: zero3, hpz, mics ...")
    parser.add_argument("--nodes", type=int, default=1, metavar="M", help="default: 1")
    parser.add_argument("--local", type=int, default=8, metavar="L", help="ranks a node; default 8")
    parser.add_argument("--numel", type=int, default=1_000_000, metavar="N", help="parameters")
    parser.add_argument("--precision", choices=("fp32", "bf16", "fp16"), default="bf16")
    parser.add_argument("--weight-codec", choices=tuple(CODEC_BITS))
    parser.add_argument("--grad-codec", choices=("bf16", *CODEC_BITS))
    parser.add_argument("--lowering", choices=tuple(_LOWERINGS), default="cheapest")
    for state in ("weight", "grad", "optimizer"):
        tiers = [tier.value for tier in Tier]
        parser.add_argument(f"--{state}-tier", choices=tiers, default=Tier.DEVICE.value)
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    return parser


def _routes(args: argparse.Namespace) -> Routes:
    """Return the routes that the command line asks for; raises ValueError saying what is wrong."""
    for name in ("nodes", "local", "numel"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} {getattr(args, name)} is less than 1")
    tiers = (Tier(tier) for tier in (args.weight_tier, args.grad_tier, args.optimizer_tier))
    return (
        row(args.row)
        .tiered(*tiers)
        .routes(
            Mesh(args.nodes, args.local),
            Formats.of(args.precision, weight_codec=args.weight_codec, grad_codec=args.grad_codec),
            two_level=_LOWERINGS[args.lowering],
        )
    )


def _number(value: float) -> str:
    return f"{value:,.0f}" if value else ""


def _cells(hop: Hop, numel: int) -> tuple[str, ...]:
    """Return the cells of a hop's line, as `_HEAD` names them."""
    links, tier = hop.link_bytes(numel), hop.tier_bytes(numel)
    return (
        hop.kind.value,
        "" if hop.axis is None else hop.axis.value,
        str(hop.source),
        str(hop.target),
        str(hop.wire),
        hop.lane,
        _number(links.inside),
        _number(links.between),
        _number(tier.read + tier.write),
        _WHEN[hop.when],
    )


def _table(routes: Routes, numel: int) -> Iterator[str]:
    """Yield the lines of every transition, under one set of column widths."""
    rows = {route.name: [_cells(hop, numel) for hop in route] for route in routes}
    every = [_HEAD, *(cells for lines in rows.values() for cells in lines)]
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]

    def line(cells: Sequence[str]) -> str:
        texts = [
            text.rjust(width) if index in _NUMBERS else text.ljust(width)
            for index, (text, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(["", *texts]).rstrip()

    yield line(_HEAD)
    for name, lines in rows.items():
        yield name if lines else f"{name}: nothing to do"
        yield from map(line, lines)


def _described(route: Route, numel: int) -> list[dict[str, Any]]:
    """Return the hops of a route for JSON."""
    return [
        {
            "kind": hop.kind.value,
            "axis": None if hop.axis is None else hop.axis.name.lower(),
            "source": {"scope": hop.source.scope.name.lower(), "tier": hop.source.tier.value},
            "target": {"scope": hop.target.scope.name.lower(), "tier": hop.target.tier.value},
            "wire": asdict(hop.wire),
            "lane": hop.lane,
            "when": hop.when.value,
            "link_bytes": asdict(hop.link_bytes(numel)),
            "tier_bytes": asdict(hop.tier_bytes(numel)),
        }
        for hop in route
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the routes; return 2, with one line on stderr, where they do not exist."""
    args = _parser().parse_args(argv)
    try:
        made = _routes(args)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps({route.name: _described(route, args.numel) for route in made}))
        return 0
    print(
        f"{args.row} on {args.nodes} x {args.local} ranks, {args.numel:,} parameters in"
        f" {args.precision}: bytes per rank"
    )
    print("\n".join(_table(made, args.numel)))
    total = sum((route.bytes(args.numel) for route in made.step()), LinkBytes())
    print(
        f"a step of one micro-batch receives {total.inside:,.0f} inside nodes and"
        f" {total.between:,.0f} between them"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
