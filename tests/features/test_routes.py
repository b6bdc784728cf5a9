"""The engine moves what its routes say: bytes per collective and link, of a step and of a look at
whole weights, for every row, lowering and codec.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import zeroshard as zs
from tests.support import inside
from tests.support.harness import on_ranks
from tests.support.training import ROWS, Net, batch, two_groups
from zeroshard.core.placement import Mesh
from zeroshard.core.policy import row as policy_row
from zeroshard.core.route import Kind, Route
from zeroshard.core.wire import Formats, LinkBytes

MESH = Mesh(2, 2)
CODED = {"weight_codec": "int8", "grad_codec": "int4"}
PLAIN = [
    *((row, True, {}) for row in (*ROWS, "hpz", "mics", "hfsdp")),
    *((row, False, {}) for row in ("ddp", "zero1", "zero3", "hpz", "hfsdp")),
    ("zero3", None, {}),
]
ENCODED = [
    ("zero3", False, CODED),
    ("hpz", None, CODED),
    ("hpz", True, CODED),
    ("mics", None, {"grad_codec": "int8"}),
    ("ddp", True, {"grad_codec": "fp8"}),
    ("zero3", True, {"grad_codec": "bf16"}),
]
Case = tuple[str, bool | None, dict[str, str]]
Counted = dict[str, tuple[float, float]]  # per collective: all bytes, those from other nodes


def _taken(engine: zs.Engine) -> Counted:
    """Return what was counted since the last time."""
    seen = engine.traffic()
    engine.reset_traffic()
    kinds = (kind.value for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER))
    return {k: (seen.bytes.get(k, 0), seen.between_nodes.get(k, 0)) for k in kinds}


def _expected(ways: list[Route], numel: int, kind: Kind) -> tuple[float, float]:
    links = sum(
        (hop.link_bytes(numel) for way in ways for hop in way if hop.kind is kind), LinkBytes()
    )
    return links.total, links.between


@pytest.mark.parametrize("cases", [PLAIN, ENCODED], ids=["rows", "codecs"])
@on_ranks(4, timeout=100)
def test_the_engine_moves_what_its_routes_say(rank: int, cases: list[Case]) -> None:
    """Look at elements with padding, what a step of three micro-batches inside no_sync counts, and
    what whole weights do.
    """
    out = []
    for row, two_level, codecs in cases:
        torch.manual_seed(0)
        model = Net(width=64, layers=2)
        optimizer = two_groups(model)
        comm = zs.Comm(transport="gloo", node_size=2, hierarchical=two_level, **codecs)  # type: ignore[arg-type]
        engine = zs.shard(model, optimizer, policy=row, precision="bf16", comm=comm)
        inside.wait_published(engine)  # what shard() has published is here
        _taken(engine)
        for micro in range(3):
            with engine.no_sync() if micro < 2 else nullcontext():
                model(*batch(rank, micro)).backward()
        optimizer.step()
        optimizer.zero_grad()
        inside.wait_published(engine)  # what is published arrives in this step
        step = _taken(engine)
        with torch.no_grad():
            model(batch(rank, 0)[0])  # replicated weights are gathered by now
        _taken(engine)
        with engine.gathered():
            raw = _taken(engine)
        out.append((inside.padded_numel(engine), step, raw))
        engine.close()
    for (row, two_level, codecs), (numel, step, raw) in zip(cases, out, strict=True):
        formats = Formats.of("bf16", **codecs)  # type: ignore[arg-type]
        made = policy_row(row).routes(MESH, formats, two_level=two_level)
        for counted, ways in (
            (step, list(made.step(micro_batches=3, no_sync=True))),
            (raw, [made.raw]),
        ):
            for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
                expected = _expected(ways, numel, kind)
                assert counted[kind.value] == expected, (row, two_level, codecs, kind)
