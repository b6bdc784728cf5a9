"""The film of a step shows what the schedule does: commands, bytes, and what is drawn of them."""

from __future__ import annotations

import itertools
import json
import re
from argparse import Namespace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from zeroshard.core.placement import Tier
from zeroshard.core.policy import ROWS, Policy
from zeroshard.core.schedule.__main__ import played
from zeroshard.errors import ConfigError
from zeroshard.launch.cli import main
from zeroshard.planner import film
from zeroshard.planner.exact import rest_bytes, sum_by_tier
from zeroshard.planner.machine import Machine
from zeroshard.planner.peak import Playback, closed_form
from zeroshard.planner.replay import TransportTraits
from zeroshard.planner.walk import STATES, Walk, walk

MADE = {"FORWARD", "BACKWARD", "AVERAGE", "STEP", "PUBLISH", "ZERO_GRAD"}  # by no schedule
D, H, N = Tier.DEVICE, Tier.HOST, Tier.DISK
TIERS = {
    "zero1": ((D, D, H), (D, H, H)),
    "zero2": ((D, D, H), (D, H, N)),
    "zero3": ((D, H, H), (H, H, H), (N, N, N)),
    "mics": ((H, D, H),),
}
POLICIES = [*ROWS.values()] + [ROWS[row].tiered(*of) for row, all_ in TIERS.items() for of in all_]
CASES = [*itertools.product(POLICIES, (1, 2, 3, 4), (1, 2, 3))]


def _mesh(policy: Policy, world: int) -> Machine:
    nodes = 2 if policy.keeps_columns and world % 2 == 0 else 1
    return Machine.of(gpus=world, node_size=world // nodes)


def test_frames_hold_what_a_replay_of_the_same_step_counts() -> None:
    """For every row and mix of tiers on 1 to 4 ranks with 1 to 3 micro-batches."""
    for policy, world, micro_batches in CASES:
        one = walk(policy, world, units=3, micro_batches=micro_batches)
        machine, rest = _mesh(policy, world), rest_bytes(one.laid_out, policy, one.training)
        again = Playback(one.laid_out, policy, one.training, TransportTraits.of(machine))
        again._gathered = dict.fromkeys(range(3), 1) if policy.default.optim.is_sharded else {}
        trace, counted = closed_form(one.laid_out.model, one.training), []
        for _ in range(2):
            counted.clear()
            again.reduced.drop()
            for number in range(micro_batches):
                back = False
                for now in again.play(trace, sync=number == micro_batches - 1):
                    back |= now.moment.event == "turn"
                    if now.moment.event == ("gradient" if back else "gather"):
                        full = sum(again.planned[unit].full for unit in again._gathered)
                        columns = now.gathered - full
                        buckets = again.meter.live - full
                        weights = rest["weight"].get(D, 0) + full + columns
                        activations = now.moment.activations
                        counted.append((weights, buckets + now.resting, activations))
            again.reduced.wait()
            again.run(again.schedule.publish())
        held = [
            tuple(frame.held[state] for state in STATES if state != "optimizer")
            for frame in one.frames
            if frame.command in ("FORWARD", "BACKWARD")
        ]
        assert held == counted, (policy, world, micro_batches)
        assert one.metered == again.metered, (policy, world, micro_batches)


def test_before_zero_grad_all_states_rest_as_the_plan_says() -> None:
    for policy, world, micro_batches in CASES:
        one = walk(policy, world, units=3, micro_batches=micro_batches)
        rest = rest_bytes(one.laid_out, policy, one.training)
        (frame,) = [frame for frame in one.frames if frame.command == "STEP"]
        by_tier = sum_by_tier(rest.values())
        on_device = {
            "weights": rest["weight"].get(D, 0),
            "gradients": rest["grad"].get(D, 0),
            "optimizer": rest["master"].get(D, 0) + rest["optimizer"].get(D, 0),
            "activations": 0,
        }
        if policy.default.grad.is_partial:  # a plan counts sums that wait: after one micro-batch
            whole = max(frame.held["gradients"] for frame in one.frames)
            assert whole >= rest["grad"].get(D, 0) or micro_batches == 1 or rest["grad"].get(H)
            on_device["gradients"] = frame.held["gradients"]
        else:
            assert frame.away == {tier.value: by_tier[tier] for tier in (H, N) if by_tier[tier]}
        assert frame.held == on_device, (policy, world, micro_batches)
        last = one.frames[-1]
        assert (last.command, last.held["gradients"]) == ("ZERO_GRAD", 0)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_frames_are_the_commands_that_the_schedule_prints(name: str, micro_batches: int) -> None:
    """Command for command, with the bytes of gathered weights and of buckets after each."""
    one = walk(ROWS[name], 4, units=3, micro_batches=micro_batches)
    mesh, policy = one.laid_out.mesh, one.policy
    size = one.planned[0].whole
    arguments = Namespace(
        row=name, units=3, micro_batches=micro_batches, no_sync=True, unit_bytes=f"{size >> 20}MiB",
        prefetch=None, budget=None, nodes=mesh.num_nodes, local=mesh.node_size, pipeline=None,
    )  # fmt: skip
    lines = [line for line in played(arguments)[1] if line.unit is not None]
    if not policy.default.weight.is_sharded:  # what is stale holds no memory: no frame
        lines = [line for line in lines if not line.text.startswith("RELEASE")]
    expected = [(line.text, line.unit) for line in lines if line.text != "STEP"]
    shown = [
        (frame.command, unit)
        for frame in one.frames
        for unit in frame.units
        if frame.command not in MADE
    ]
    assert shown == expected
    if policy.default.weight.is_sharded:
        after, kept = iter(lines), set[int]()
        for frame in one.frames:
            count = len(frame.units) * (frame.command not in MADE)
            for line in itertools.islice(after, count):
                gathered = line.gathered
            kept |= {unit for unit in frame.units if frame.layers[unit].weights == "column"}
            kept -= {unit for unit in frame.units if frame.layers[unit].weights == "part"}
            columns = len(kept) * one.planned[0].column
            if count:
                assert frame.held["weights"] - one._rest["weight"][D] - columns == gathered


def test_what_is_drawn_of_layers_is_what_the_bytes_beside_them_count() -> None:
    for policy, world, micro_batches in CASES:
        one = walk(policy, world, units=3, micro_batches=micro_batches)
        sharded, kept = policy.default.weight.is_sharded, set[int]()
        group, rests = one.group, one._rest["weight"].get(D, 0)
        for frame in one.frames:
            weights, gradients = rests, 0
            for unit, layer in enumerate(frame.layers):
                if layer.weights == "column":
                    kept.add(unit)
                elif layer.weights == "part":
                    kept.discard(unit)
                is_here = sharded and layer.weights in ("coming", "whole")
                weights += one.planned[unit].full * is_here
                weights += one.planned[unit].column * (unit in kept)
                gradients += group.bucket * layer.buckets + group.partial * layer.waits
                gradients += group.rest * layer.rests
            case = (policy, world, micro_batches, frame)
            after = {"START": {"coming"}, "WAIT": {"whole"}}.get(frame.command)
            if frame.command.startswith("RELEASE"):
                after = {"part", "column"}
            elif frame.command == "STEP" and one.schedule.units[0].traits.is_published:
                after = {"stale"}
            named = frame.units or range(3)
            assert after is None or {frame.layers[unit].weights for unit in named} <= after, case
            assert weights == frame.held["weights"], case
            if frame.command not in ("REDUCE", "ADD", "WAIT_REDUCE"):  # inside their event
                assert gradients == frame.held["gradients"], case
            active = sum(layer.activations for layer in frame.layers)
            most = max(one.held["activations"] for one in one.frames)
            assert frame.held["activations"] == most // 3 * active, case


OWNED = [ROWS[name] for name in ("zero1", "zero2", "zero3", "zero3-keep")]


def test_frames_of_layers_that_are_owned_whole_are_those_of_each_rank() -> None:
    """The same commands as with equal parts, and the bytes that a plan gives each rank."""
    for policy, world, units in itertools.product(OWNED, (1, 2, 3, 4), (1, 3, 4)):
        one = walk(policy, world, units=units, micro_batches=2, shares="whole")
        equal = walk(policy, world, units=units, micro_batches=2)
        case = (policy.name, world, units)
        counts = [one.owners.count(rank) for rank in range(world)]
        assert max(counts) - min(counts) <= 1 and sum(counts) == units, case
        shown = [(frame.command, frame.units, frame.over) for frame in one.frames]
        assert shown == [(frame.command, frame.units, frame.over) for frame in equal.frames], case
        sharded, group = policy.default.weight.is_sharded, one.group
        for rank, frames in enumerate(one.by_rank):
            mine = one.owners.count(rank)
            rest = rest_bytes(one.laid_out, policy, one.training, rank)
            layer = rest_bytes(equal.laid_out, ROWS["ddp"], equal.training)["weight"][D] // units
            assert rest["weight"].get(D, 0) == layer * (mine if sharded else units), case
            for frame in frames:
                here = [layer.weights in ("coming", "whole") for layer in frame.layers]
                gathered = sum(here) * group.full if sharded else 0
                assert frame.held["weights"] == rest["weight"].get(D, 0) + gathered, (case, frame)
                assert frame.held["optimizer"] == sum(
                    rest[state].get(D, 0) for state in ("master", "optimizer")
                )
                rests = {at for at, layer in enumerate(frame.layers) if layer.rests}
                if frame.command not in ("REDUCE", "ADD", "WAIT_REDUCE"):
                    assert frame.held["gradients"] == sum(
                        group.bucket * layer.buckets + one.planned[at].groups[0].partial
                        * layer.waits + 4 * group.one.layout.numel
                        * (at in rests and one.owners[at] == rank)
                        for at, layer in enumerate(frame.layers)
                    ), (case, rank, frame)  # fmt: skip
        for frame, *others in zip(equal.frames, *one.by_rank, strict=True):
            if frame.command == "ZERO_GRAD":  # the same in all, as far as parts are not padded
                every = sum(other.total for other in others)
                assert every == pytest.approx(world * frame.total, rel=1e-5), case


def test_what_is_said_and_drawn_of_an_owner_is_what_it_has() -> None:
    one = walk(ROWS["zero3"], 4, units=5, shares="whole")
    for frame in one.frames:
        owner = [one.owners[unit] for unit in frame.units]
        if frame.command == "START":
            assert f"Broadcast: rank {owner[0]} sends layer {frame.units[0] + 1}" in frame.text
        elif frame.command == "REDUCE":
            assert f"gradients of layer {frame.units[0] + 1} to rank {owner[0]}." in frame.text
    text = film.svg(one)
    drawn = film._film(one)
    for unit, owner_of in enumerate(one.owners):  # solid where it rests, and on no other rank
        boxes = re.findall(r'<rect x="(\S+)" y="(\S+)"[^>]* fill="#3566c8" class="f-own"/>', text)
        at = [float(y) for x, y in boxes if float(x) == float(f"{drawn.x(unit):.4g}")]
        assert at == [drawn.y(owner_of)]
    (start,) = [frame for frame in one.frames if frame.command == "START"][:1]
    _, dots = drawn.lines(start.units[0], 0, "all others", "own", back=False)
    assert dots.count("M") == 1  # one rank sends
    assert text.count('font-size="16"') == 1 + 4 and len(text) < 125_000
    at = max(range(len(one.frames)), key=lambda at: len({of[at].total for of in one.by_rank}))
    drawn.poster = at
    root = ElementTree.fromstring(drawn.drawn())
    bars: dict[float, float] = {}  # how long all states together are, by where a rank's bars are
    for group in root.iter():
        move = re.fullmatch(r"translate\(\S+ 0\) scale\((\S+) 1\)", group.get("transform", ""))
        for bar in group if move is not None else ():
            y = float(bar.get("y", ""))
            bars[y] = bars.get(y, 0) + float(move[1]) if move else 0
    for rank, frames in enumerate(one.by_rank):
        assert bars[drawn.y(rank)] == pytest.approx(frames[at].total / drawn.scale, abs=1e-3)
    assert len(set(bars.values())) > 1


def _film(policy: Policy, **how: int) -> tuple[Walk, str]:
    one = walk(policy, **{"ranks": 4, **how})  # type: ignore[arg-type]
    return one, film.svg(one)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda one: f"{one.name}-{one.default.optim.tier}")
def test_a_film_is_an_svg_with_every_frame_and_no_script(policy: Policy) -> None:
    one, text = _film(policy, micro_batches=2)
    root = ElementTree.fromstring(text)
    tags = {element.tag.rpartition("}")[2] for element in root.iter()}
    assert tags <= {"svg", "title", "style", "defs", "clipPath", "pattern", "g", "rect", "path",
                    "text", "use"}  # fmt: skip
    style, body = re.findall("<style>(.*?)</style>", text)[0], text.partition("</style>")[2]
    assert "var(" not in body and "http" not in style
    used = set(re.findall(r'class="([^"]*)"', body))
    names = {name for classes in used for name in classes.split() if "-" in name}
    assert {name for name in names if f".{name}{{" not in style} == set()
    steps = re.findall(rf"@keyframes {one.policy.name.replace('-', '')}-strip\{{(.*?)\}}\}}", style)
    assert steps[0].count("translateY") == len(one.frames)
    for frame in one.frames:
        assert frame.text.split()[0] in body
    assert len(text) < 125_000


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero3", "hpz", "hfsdp"])
def test_each_picture_of_a_film_shows_its_frame(name: str) -> None:
    """Bars are as long as the bytes, and lines are drawn where a collective is under way."""
    one = walk(ROWS[name], 4, micro_batches=2)
    plain = max(frame.total for frame in walk(ROWS["ddp"], 4, micro_batches=2).frames)
    for number, frame in enumerate(one.frames):
        root = ElementTree.fromstring(film._Film(one, plain, "name", number).drawn())
        groups = [element for element in root.iter() if element.tag.endswith("}g")]
        moves = [element.get("transform", "") for element in groups]
        bars = [re.fullmatch(r"translate\(\S+ 0\) scale\((\S+) 1\)", move) for move in moves]
        shares = [float(bar[1]) for bar in bars if bar is not None]
        assert shares == pytest.approx([frame.held[state] / plain for state in STATES], abs=1e-4)
        flows = [
            element.get("opacity", "1") != "0"
            for element in groups
            if any("zs-flow" in child.get("class", "") for child in element)
        ]
        travels = sum((layer.weights == "coming") + layer.reducing for layer in frame.layers)
        if frame.command in ("AVERAGE", "PUBLISH"):
            travels += 4
        assert sum(flows) == travels, (number, frame)
        window = f"translate(0 {-film._LINE * number})"
        assert moves.count(window) == 5  # the text, and the bytes of four ranks


def test_a_page_is_one_file_with_a_slider_over_all_frames() -> None:
    one = walk(ROWS["zero3"], 2)
    page = film.html(one)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert f'max="{len(one.frames) - 1}"' in page and page.count("<svg") == 1
    assert not re.search(r"\b(TITLE|STARTS|LAST|SVG|AT)\b", page)


def test_a_page_is_as_wide_as_a_phone() -> None:
    """Its picture is scaled to the page, and nothing else says a width in pixels."""
    page = film.html(walk(ROWS["hpz"], 8, units=8))
    assert '<meta name="viewport" content="width=device-width">' in page
    (size,) = re.findall(r'<svg [^>]*width="(\d+)" height="(\d+)" viewBox="([^"]+)"', page)
    assert size[2] == f"0 0 {size[0]} {size[1]}" and ".zs{width:100%;height:auto}" in page
    style = page.partition("<style>")[2].partition("</style>")[0]
    assert not re.search(r"(?<!max-)\bwidth:\s*\d+px", style) and "overflow" not in style


def test_the_command_prints_frames_and_writes_films(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, page = tmp_path / "film.svg", tmp_path / "film.html"
    line = ["walk", "--stage", "3", "--ranks", "4", "--units", "4"]
    assert main([*line, "--svg", str(svg), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "zero3: 4 layers" in shown and "RELEASE_FOR_BACKWARD" in shown
    assert svg.read_text().startswith("<svg") and page.read_text().startswith("<!doctype")
    assert main(["walk", "--row", "hpz", "--offload", "grad=host", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["row"], told["node_size"], told["frames"][0]["command"]) == ("hpz", 2, "START")
    assert told["frames"][-2]["away"]["host"] > 0
    assert main(["walk", "--shares", "whole", "--units", "3", "--ranks", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    mine = [frames[-1]["optimizer"] for frames in told["held_by_rank"]]
    counts = [told["owners"].count(rank) for rank in (0, 1)]
    assert sorted(counts) == [1, 2] and mine[0] * counts[1] == mine[1] * counts[0]
    for words, said in (
        (["--row", "zero4"], "did you mean"),
        (["--stage", "4"], "is not one of 0, 1, 2, 3"),
        (["--row", "zero3", "--stage", "3"], "leave one of them out"),
        (["--ranks", "9"], "ranks=9 is not from 1 to 8"),
        (["--node-size", "3"], "node_size=3 does not divide"),
        (["--offload", "optim=host"], "is not STATE=TIER"),
        (["--row", "mics", "--offload", "grad=disk"], "cannot rest on disk"),
        (["--svg", str(tmp_path)], "Is a directory"),
        (["--shares", "whole", "--row", "hpz"], "on one node"),
        (["--shares", "whole", "--stage", "0"], "is drawn in zero1"),
        (["--shares", "whole", "--offload", "grad=host"], "without offload"),
    ):
        assert main(["walk", *words]) == 2
        assert said in capsys.readouterr().err, words
    with pytest.raises(ConfigError, match="units=9"):
        walk(ROWS["zero3"], 4, units=9)
