"""Routes: they connect, they count what the closed forms of core/wire.py say, and they read as
docs/design/routes.md draws them.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from zeroshard.comm.codec import CODECS, codec
from zeroshard.core.layout import Layout
from zeroshard.core.placement import Cell, Cells, Mesh, Portion, Scope, Tier
from zeroshard.core.policy import ROWS, Policy, row
from zeroshard.core.route import Kind, Place, Route, Routes, TierBytes, routes
from zeroshard.core.route.__main__ import main
from zeroshard.core.wire import (
    CODEC_BITS,
    Formats,
    LinkBytes,
    Wire,
    all_gather,
    goes_deep,
    reduce_scatter,
    step_bytes,
)
from zeroshard.core.work import Axis

NUMEL = 1 << 20
MESH = Mesh(2, 4)
BF16 = Formats.of("bf16")
SHARD = Scope.SHARD
DTYPES = ("fp32", "bf16", "fp16")
LOWERINGS = (None, False, True)
GRAD_CODECS = (None, "bf16", *CODEC_BITS)

meshes = st.builds(Mesh, st.integers(1, 5), st.integers(1, 5))


@st.composite
def placed(draw: st.DrawFn) -> Cells:
    """Draw a row of the table, or any other cells that make sense, on any tiers."""
    if draw(st.booleans()):
        cells = ROWS[draw(st.sampled_from(list(ROWS)))].default
    else:
        state = st.sampled_from(("S S", "R S", "R R"))
        grad = draw(st.sampled_from(("S S", "P S", "P P")))
        cells = _made(draw(state), draw(state), grad, draw(state))
    tiers = {name: draw(st.sampled_from(list(Tier))) for name in ("weight", "grad", "optim")}
    try:
        return replace(
            cells,
            **{name: replace(getattr(cells, name), tier=tier) for name, tier in tiers.items()},
        )
    except ValueError:
        return cells


def _made(*texts: str) -> Cells:
    try:
        return Cells(*(Cell.parse(text) for text in texts))
    except ValueError:
        assume(False)
        raise


@st.composite
def formats_of(draw: st.DrawFn, cells: Cells) -> Formats:
    """Draw formats that `cells` may have: only weights sharded over all ranks travel encoded."""
    may_encode = cells.weight.scope is Scope.SHARD
    compute = draw(st.sampled_from(DTYPES))
    return Formats.of(
        compute,
        reduce=draw(st.sampled_from(DTYPES)),
        accumulate=draw(st.sampled_from(("fp32", compute))),
        weight_codec=draw(st.sampled_from((None, *CODEC_BITS))) if may_encode else None,
        grad_codec=draw(st.sampled_from(GRAD_CODECS)),
        block=draw(st.sampled_from((64, 256, 2048))),
    )


@st.composite
def portions(draw: st.DrawFn, mesh: Mesh) -> float | Portion:
    """Draw equal shares of a buffer, or what a rank of `mesh` has where shares are drawn."""
    if draw(st.booleans()):
        return NUMEL
    blocks = draw(st.lists(st.integers(0, 9), min_size=mesh.size, max_size=mesh.size))
    shares = [64 * count for count in blocks]
    assume(sum(shares))
    layout = Layout.build([("p", (sum(shares),))], mesh, shares=shares)
    return layout.portion(draw(st.integers(0, mesh.size - 1)))


def total(made: Routes, *names: str, buffer: float | Portion = NUMEL, **step: object) -> LinkBytes:
    """Return the bytes by link of the routes of a step that are called `names`."""
    taken = made.step(**step)  # type: ignore[arg-type]
    return sum((way.bytes(buffer) for way in taken if way.name in names), LinkBytes())


def texts(made: Routes) -> dict[str, str]:
    """Return the routes as they read, those without a hop left out."""
    return {way.name: str(way) for way in made if way}


# ------------------------------------------------------------------------------------ closed forms


@given(st.data(), placed(), meshes, st.sampled_from(LOWERINGS), st.integers(1, 4), st.booleans())
def test_the_routes_of_a_step_move_what_the_closed_forms_say(
    data: st.DataObject,
    cells: Cells,
    mesh: Mesh,
    two_level: bool | None,
    micro_batches: int,
    no_sync: bool,
) -> None:
    formats, buffer = data.draw(formats_of(cells)), data.draw(portions(mesh))
    made = routes(cells, mesh, formats, two_level=two_level)
    expected = step_bytes(
        cells,
        numel=buffer,
        mesh=mesh,
        wires=formats.wires,
        micro_batches=micro_batches,
        no_sync=no_sync,
        two_level=two_level,
    )
    names = {
        "gather": ("unshard_forward", "unshard_backward"),
        "reduce": ("reduce", "reduce_partial"),
        "publish": ("average", "publish"),
    }
    for part, ways in names.items():
        seen = total(made, *ways, buffer=buffer, micro_batches=micro_batches, no_sync=no_sync)
        want = getattr(expected, part)
        assert (seen.inside, seen.between) == pytest.approx((want.inside, want.between)), part


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("two_level", LOWERINGS)
@pytest.mark.parametrize("no_sync", [False, True])
def test_every_row_is_its_closed_form_on_two_nodes_of_four(
    name: str, two_level: bool | None, no_sync: bool
) -> None:
    made = routes(row(name).cells(), MESH, BF16, two_level=two_level)
    step = {"micro_batches": 3, "no_sync": no_sync}
    seen = sum((way.bytes(NUMEL) for way in made.step(**step)), LinkBytes())  # type: ignore[arg-type]
    expected = row(name).wire_bytes(
        numel=NUMEL,
        mesh=MESH,
        wires=BF16.wires,
        two_level=two_level,
        **step,  # type: ignore[arg-type]
    )
    assert seen.total > 0
    assert (seen.inside, seen.between) == pytest.approx(
        (expected.links.inside, expected.links.between)
    )


@given(meshes, st.sampled_from(LOWERINGS), st.sampled_from(GRAD_CODECS), st.sampled_from(DTYPES))
def test_the_lowering_is_that_of_the_closed_forms(
    mesh: Mesh, two_level: bool | None, grad_codec: str | None, dtype: str
) -> None:
    """Two levels are two collectives, but on nodes of one rank."""
    formats = Formats.of(dtype, grad_codec=grad_codec)
    made = routes(row("zero3").cells(), mesh, formats, two_level=two_level)
    whole, hop = formats.reduce.bytes_per_element, formats.node_sum.bytes_per_element
    for way, levels in (
        (made.unshard_forward, goes_deep(mesh, two_level, all_gather, SHARD, Scope.FULL, 1.0)),
        (made.reduce, goes_deep(mesh, two_level, reduce_scatter, SHARD, whole, hop)),
    ):
        axes = [hop.axis for hop in way if hop.axis is not None]
        if min(mesh.num_nodes, mesh.node_size) > 1:
            assert len(axes) == (2 if levels else 1)
        else:
            assert len(axes) == (mesh.size > 1)


LONG = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@pytest.mark.parametrize("block", [64, 256])
def test_formats_have_the_bytes_of_dtypes_and_codecs(block: int) -> None:
    assert set(CODEC_BITS) == set(CODECS)
    for name in CODECS:
        made = codec(name, block=block)
        assert Wire.of("bf16", name, block=block).bytes_per_element == made.stride / made.block
    for short, long in LONG.items():
        dtype = getattr(torch, long)
        assert Wire.of(short) == Wire.of(dtype)
        assert Wire.of(short).bytes_per_element == dtype.itemsize
    assert Wire.of(torch.int64).bytes_per_element == 8
    with pytest.raises(ValueError, match="dtype 'fp8' is not one of fp32, bf16, fp16"):
        Wire.of("fp8")


# -------------------------------------------------------------------------------------- connection


def same(place: Place, mesh: Mesh) -> tuple[int, Tier]:
    """Return how many parts a buffer is cut into at `place`, which tells scopes apart."""
    shards = {Scope.SHARD: mesh.size, Scope.NODE_SHARD: mesh.node_size, Scope.FULL: 1}
    return shards[place.scope], place.tier


def check_connected(way: Route, wire: Wire | None = None) -> None:
    """Each hop starts where the one before has ended, and what is encoded travels so until it is
    decoded; `wire`: in which it is encoded before the first.
    """
    assert all(hop.source == before.after for before, hop in itertools.pairwise(way)), str(way)
    for hop in way:
        if hop.kind is Kind.ENCODE:
            assert wire is None, str(way)
            wire = hop.wire
        elif hop.kind is Kind.DECODE:
            assert wire is not None, str(way)
            wire = None
        else:
            assert hop.wire == wire or (wire is None and hop.wire.codec is None), str(way)
    assert wire is None, str(way)


@given(st.data(), placed(), meshes, st.sampled_from(LOWERINGS), st.booleans(), st.booleans())
def test_routes_connect_what_rests(
    data: st.DataObject, cells: Cells, mesh: Mesh, two_level: bool | None, held: bool, again: bool
) -> None:
    formats = data.draw(formats_of(cells))
    made = routes(cells, mesh, formats, two_level=two_level)
    kept = [hop.target for hop in made.unshard_forward if hop.kind is Kind.KEEP]
    weight = Place(cells.weight.scope, cells.weight.tier)
    whole, own = Place(Scope.FULL), Place(Scope.SHARD, cells.grad.tier)
    shared = Place(cells.optim.scope, own.tier)
    ends = {
        "unshard_forward": (weight, whole),
        "unshard_backward": (kept[0] if kept else weight, whole),
        "raw": (weight, whole),
        "reduce": (whole, own),
        "average": (own, shared),
    }
    assert not kept or cells.between.scope is Scope.NODE_SHARD
    for way in (way.for_pass(held=held, again=again) for way in made):
        is_kept = way.name == "unshard_backward" and bool(kept)
        is_encoded = is_kept and formats.gather.codec is not None
        check_connected(way, formats.gather if is_encoded else None)
        if way.name in ends and (way.name != "unshard_backward" or cells.between.is_sharded):
            start, stop = ends[way.name]
            assert same(way.hops[0].source if way else stop, mesh) == same(start, mesh), str(way)
            assert same(way.hops[-1].after if way else start, mesh) == same(stop, mesh), str(way)


@given(placed(), meshes, st.sampled_from(DTYPES))
def test_what_is_published_arrives_where_weights_rest(cells: Cells, mesh: Mesh, dtype: str) -> None:
    way = routes(cells, mesh, Formats.of(dtype)).publish
    if way:
        goal = same(Place(cells.weight.scope, cells.weight.tier), mesh)
        assert same(way.hops[-1].after, mesh) == goal, str(way)
        start = way.hops[0].source.tier
        assert start is (Tier.HOST if cells.optim.tier is Tier.DISK else cells.optim.tier)
    if not way or dtype == "fp32":
        assert all(hop.kind is not Kind.CAST for hop in way)
    else:
        assert [hop.kind for hop in way].count(Kind.CAST) == 1


@given(st.data(), placed(), meshes, st.sampled_from(LOWERINGS))
def test_no_hop_runs_over_a_single_rank(
    data: st.DataObject, cells: Cells, mesh: Mesh, two_level: bool | None
) -> None:
    made = routes(cells, mesh, data.draw(formats_of(cells)), two_level=two_level)
    for hop in (hop for way in made for hop in way):
        assert hop.axis is None or hop.axis.num_ranks(mesh) > 1
        assert (hop.link_bytes(NUMEL).total > 0) == (hop.axis is not None)
        assert (hop.tier_bytes(NUMEL) != TierBytes()) == (hop.source.tier is not hop.target.tier), (
            str(hop)
        )


@pytest.mark.parametrize("name", ROWS)
def test_one_process_has_nothing_to_do(name: str) -> None:
    made = routes(row(name).cells(), Mesh(1, 1), Formats.of("fp32"), two_level=True)
    assert not any(made), texts(made)


# ------------------------------------------------------------------------------------------- texts

GATHER = "shard, all_gather between nodes bf16 -> node shard, all_gather inside nodes bf16 -> full"
REDUCE = "full, reduce_scatter inside nodes bf16 -> node shard"
ACROSS = "reduce_scatter between nodes fp32 -> shard"


def test_zero3_gathers_and_reduces_in_two_levels() -> None:
    assert texts(routes(row("zero3").cells(), MESH, BF16)) == {
        "unshard_forward": GATHER,
        "unshard_backward": GATHER,
        "raw": GATHER,
        "reduce": f"{REDUCE}, {ACROSS}",
        "reduce_partial": f"{REDUCE}, {ACROSS}",
        "publish": "shard, cast bf16 -> shard",
    }


def test_hpz_keeps_a_column_for_the_backward() -> None:
    assert texts(routes(row("hpz").cells(), MESH, BF16)) == {
        "unshard_forward": f"{GATHER}, keep bf16 -> node shard",
        "unshard_backward": "node shard, all_gather inside nodes bf16 -> full",
        "raw": GATHER,
        "reduce": f"{REDUCE}, {ACROSS}",
        "reduce_partial": f"{REDUCE}, {ACROSS}",
        "publish": "shard, cast bf16 -> shard",
    }


def test_mics_stays_inside_nodes_but_for_one_sum_and_its_average() -> None:
    gather = "node shard, all_gather inside nodes bf16 -> full"
    assert texts(routes(row("mics").cells(), MESH, BF16)) == {
        "unshard_forward": gather,
        "unshard_backward": gather,
        "raw": gather,
        "reduce": f"{REDUCE}, add fp32 -> node shard if held, {ACROSS}",
        "reduce_partial": REDUCE,
        "average": "shard, all_gather between nodes fp32 -> node shard",
        "publish": "node shard, cast bf16 -> node shard",
    }


def test_zero_plus_plus_encodes_each_hop_and_keeps_the_encoded_column() -> None:
    formats = Formats.of("bf16", weight_codec="int8", grad_codec="int4")
    made = texts(routes(row("hpz").cells(), MESH, formats))
    across, inside = "all_gather between nodes int8", "all_gather inside nodes int8 -> full"
    assert made["unshard_forward"] == (
        f"shard, encode int8 -> shard, {across} -> node shard, {inside}, keep int8 -> node shard,"
        " decode bf16 -> full"
    )
    assert made["unshard_backward"] == f"node shard, {inside}, decode bf16 -> full"
    assert made["raw"] == GATHER
    assert made["reduce"] == (
        "full, encode int4 -> full, reduce_scatter inside nodes int4 -> node shard,"
        " decode fp32 -> node shard, encode int4 -> node shard,"
        " reduce_scatter between nodes int4 -> shard, decode fp32 -> shard"
    )


def test_frozen_weights_that_rest_packed_are_only_decoded() -> None:
    formats = Formats.of("bf16", weight_codec="int4", rests_packed=True)
    made = routes(row("zero3").cells(), Mesh(1, 4), formats)
    expected = "shard, all_gather all ranks int4 -> full, decode bf16 -> full"
    assert str(made.unshard_forward) == str(made.raw) == expected


def test_a_policy_has_the_routes_of_each_unit() -> None:
    mixed = Policy("mixed", row("zero3").cells(), {"head": row("zero2").cells()})
    for unit, name in (("", "zero3"), ("body", "zero3"), ("head", "zero2")):
        expected = routes(row(name).cells(), MESH, BF16, two_level=False)
        assert mixed.routes(MESH, BF16, two_level=False, unit=unit) == expected


def test_partial_sums_wait_inside_no_sync() -> None:
    holds = {name for name in ROWS if routes(row(name).cells(), MESH, BF16).holds}
    assert holds == {"ddp", "zero1", "mics", "hfsdp"}
    assert not routes(row("ddp").cells(), MESH, BF16).reduce_partial
    one_node = routes(row("mics").cells(), Mesh(1, 8), BF16)
    assert not one_node.holds and one_node.reduce_partial.hops == one_node.reduce.hops


def test_a_codec_for_weights_that_are_not_sharded_over_all_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="weight codec int8: weight=R S is not sharded over all"):
        routes(row("mics").cells(), MESH, Formats.of("bf16", weight_codec="int8"))


# ------------------------------------------------------------------------------------------- tiers


def tiered(name: str, weight: str, grad: str, optim: str, formats: Formats = BF16) -> Routes:
    """Return the routes of a row on 2 x 4 ranks with its states on these tiers."""
    return routes(row(name).tiered(Tier(weight), Tier(grad), Tier(optim)).cells(), MESH, formats)


def crossed(*ways: Route) -> TierBytes:
    """Return the bytes read and written per element of this rank's own part."""
    return sum((way.tier_bytes(MESH.size) for way in ways), TierBytes())


def test_weights_are_read_for_every_gather_unless_a_column_is_kept() -> None:
    made = tiered("zero3", "disk", "device", "device")
    assert crossed(made.unshard_forward) == crossed(made.raw) == TierBytes(read=2)
    assert crossed(made.unshard_backward) == TierBytes(read=2)
    assert crossed(tiered("hpz", "disk", "device", "device").unshard_backward) == TierBytes()


def test_the_first_sum_is_written_and_later_ones_are_added() -> None:
    host, disk = (tiered("zero3", "device", tier, "device").reduce for tier in ("host", "disk"))
    assert crossed(host.for_pass()) == crossed(host.for_pass(again=True)) == TierBytes(write=4)
    assert crossed(disk.for_pass()) == TierBytes(write=4)
    assert crossed(disk.for_pass(again=True)) == TierBytes(read=4, write=8)


def test_held_sums_on_the_host_cross_twice_more() -> None:
    made = tiered("ddp", "device", "host", "device")
    whole = MESH.size
    step = made.step(micro_batches=3, no_sync=True)
    *held, last = (way for way in step if way.name.startswith("reduce"))
    assert [crossed(way) for way in held] == [TierBytes(write=2 * whole)] * 2
    assert crossed(last) == TierBytes(read=4 * whole, write=2 * whole + 4)
    assert crossed(made.average) == TierBytes(read=4, write=4 * whole)


@pytest.mark.parametrize(
    ("weight", "optim", "dtype", "expected"),
    [
        ("device", "device", "bf16", TierBytes()),
        ("device", "host", "bf16", TierBytes(read=2)),
        ("device", "disk", "bf16", TierBytes(read=2)),
        ("device", "host", "fp32", TierBytes(read=4)),
        ("host", "device", "bf16", TierBytes(write=2)),
        ("host", "host", "bf16", TierBytes()),
        ("disk", "disk", "bf16", TierBytes(write=2)),
        ("disk", "disk", "fp32", TierBytes()),
    ],
)
def test_stepped_masters_go_where_weights_rest(
    weight: str, optim: str, dtype: str, expected: TierBytes
) -> None:
    made = tiered("zero3", weight, "device", optim, Formats.of(dtype))
    assert crossed(made.publish) == expected


# ------------------------------------------------------------------------------------ command line


def shown(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return what the command prints."""
    assert main(args) == 0
    return capsys.readouterr().out


def test_the_command_prints_hops_with_lanes_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "zero1", "--local", "4", "--numel", "1000").splitlines() == [
        "zero1 on 1 x 4 ranks, 1,000 parameters in bf16: bytes per rank",
        "  hop             over       from   to     format  lane     inside  between  tier",
        "unshard_forward: nothing to do",
        "unshard_backward: nothing to do",
        "raw: nothing to do",
        "reduce",
        "  cast                       full   full   bf16    compute"
        "                         held sums",
        "  reduce_scatter  all ranks  full   shard  bf16    reduce    1,500",
        "reduce_partial: nothing to do",
        "average: nothing to do",
        "publish",
        "  cast                       shard  shard  bf16    compute",
        "  all_gather      all ranks  shard  full   bf16    gather    1,500",
        "a step of one micro-batch receives 3,000 inside nodes and 0 between them",
    ]


def test_the_command_shows_codecs_and_tiers(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "2", "--local", "4", "--numel", "8192", "--lowering", "flat"]
    codecs = ["--weight-codec", "int8", "--weight-tier", "host", "--grad-tier", "host"]
    lines = shown(capsys, "zero3", *options, *codecs).splitlines()
    start = lines.index("unshard_forward") + 1
    assert lines[start : start + 4] == [
        "  read                       shard (host)  shard         bf16    tier read"
        "                    2,048",
        "  encode                     shard         shard         int8    gather",
        "  all_gather      all ranks  shard         full          int8    gather"
        "       3,120    4,160",
        "  decode                     full          full          bf16    gather",
    ]
    assert [line.split()[-2:] for line in lines if line.startswith("  add")] == [
        ["later", "sums"]
    ] * 2


def test_the_command_writes_json(capsys: pytest.CaptureFixture[str]) -> None:
    seen = json.loads(shown(capsys, "hpz", "--nodes", "2", "--local", "2", "--json"))
    made = routes(row("hpz").cells(), Mesh(2, 2), BF16)
    assert {name: len(hops) for name, hops in seen.items()} == {w.name: len(w) for w in made}
    (hop,) = seen["unshard_backward"]
    seen_hop = (hop["kind"], hop["axis"], hop["source"]["scope"])
    assert seen_hop == ("all_gather", "local", "node_shard")
    assert hop["link_bytes"] == {"inside": 1e6, "between": 0.0}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("zero33",), "did you mean 'zero3'?"),
        (("zero1", "--weight-tier", "host"), "weight=R R on host"),
        (("mics", "--weight-codec", "int8"), "weight codec int8"),
        (("zero3", "--nodes", "0"), "--nodes 0 is less than 1"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_exit_code_2(
    args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and not out


def test_routes_and_their_command_need_no_torch() -> None:
    code = "import sys, zeroshard.core.route.__main__; sys.exit('torch' in sys.modules)"
    for command in (("-c", code), ("-m", "zeroshard.core.route", "mics", "--nodes", "2")):
        done = subprocess.run(
            [sys.executable, "-W", "error", *command], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_beside_sums_of_nodes_a_whole_gradient_is_reduced_in_two_levels() -> None:
    whole = ROWS["zero1"].default
    alone, beside = (routes(whole, Mesh(2, 2), BF16, node_sums=sums) for sums in (False, True))
    axes = [
        [hop.axis for hop in one.reduce.hops if hop.kind is Kind.REDUCE_SCATTER]
        for one in (alone, beside)
    ]
    # in bf16 two levels cost more bytes between nodes, whose sums travel in fp32
    assert axes == [[Axis.FLAT], [Axis.LOCAL, Axis.NODE]]
