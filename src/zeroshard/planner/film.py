"""The frames of a step (walk.py) as a film: an SVG that CSS animates, or a page with a slider.

    svg(walk)     columns are layers, rows are ranks; a cell is what a rank has of a layer: weights,
                  gradients, the optimizer's states, activations. Solid: a part that no other rank
                  has. Light: a copy of what others have, too. Striped: gradients of one rank's own
                  batch, not summed yet. Hollow: on the host or on disk. Lines are collectives.
    html(walk)    the same picture, stopped, and moved by a slider

Every colour is a literal attribute, which programs without CSS variables draw, below a variable
that follows the reader's light or dark scheme (`Picture`, which also draws docs/img). Where nothing
moves, the picture shows the frame with the most memory. No file loads anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from textwrap import wrap

from zeroshard.core.placement import Scope, Tier
from zeroshard.core.policy import ROWS, STAGES
from zeroshard.planner.walk import STATES, LayerState, Walk, walk
from zeroshard.terminal import size_text

COLOURS = {  # light, dark
    "ink": ("#1f2733", "#e6eaf2"), "soft": ("#5a6575", "#a8b2c4"), "line": ("#aab4c3", "#5b6678"),
    "own": ("#3566c8", "#7ea6f4"), "all": ("#c6d6f5", "#33466b"), "sum": ("#f0b860", "#8a5a17"),
    "on": ("#ffffff", "#10141c"), "paper": ("#f6f8fb", "#151a23"), "glow": ("#e3e8f1", "#2a3242"),
    "grad": ("#d9822b", "#f0a04b"), "grads": ("#f7dfbf", "#5c4122"),
    "optim": ("#2c8a5b", "#58c08c"), "optims": ("#c3e6d3", "#244a39"),
    "act": ("#8b62c9", "#b493ea"),
}  # fmt: skip


@dataclass
class Picture:
    """An SVG that is drawn on: boxes, words and arrows. Colours are names of COLOURS, or "none"."""

    width: int
    height: int
    title: str
    shapes: list[str] = field(default_factory=list)
    style: str = ""  # more of it
    painted: set[tuple[str, str]] = field(default_factory=set)

    def paint(self, fill: str = "none", stroke: str = "none", more: str = "") -> str:
        """Return the attributes that colour a shape, with `more` classes."""
        out, classes = "", more.split()
        for key, name in (("fill", fill), ("stroke", stroke)):
            if name in COLOURS:
                out += f' {key}="{COLOURS[name][0]}"'
                classes.append(f"{key[0]}-{name}")
                self.painted.add((key, name))
            elif key == "fill" or name != "none":
                out += f' {key}="{name}"'
        return out + (f' class="{" ".join(classes)}"' if classes else "")

    def box(
        self, x: float, y: float, w: float, h: float, fill: str = "none", line: str = "line"
    ) -> None:
        """Draw a rectangle."""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3"'
            f"{self.paint(fill, line)}/>"
        )

    def path(self, d: str, colour: str, width: float = 1.0) -> None:
        """Draw a line."""
        self.shapes.append(f'<path d="{d}" stroke-width="{width:g}"{self.paint("none", colour)}/>')

    def words(
        self, x: float, y: float, text: str, *, size: int = 13, colour: str = "ink",
        anchor: str = "start", bold: bool = False,
    ) -> None:  # fmt: skip
        """Write `text` with its base line at `y`."""
        how = f' font-size="{size}"' + ' font-weight="600"' * bold
        how += f' text-anchor="{anchor}"' * (anchor != "start")
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}"{how}{self.paint(colour)}>{escape(text)}</text>'
        )

    def arrow(self, x: float, y: float, to_x: float, to_y: float, colour: str = "soft") -> None:
        """Draw an arrow, horizontal or vertical."""
        self.path(f"M{x:g} {y:g}L{to_x:g} {to_y:g}", colour, 1.5)
        along_x, along_y = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
        left, right = (-7 * along_x + 4 * along_y, -7 * along_y + 4 * along_x), (
            -7 * along_x - 4 * along_y, -7 * along_y - 4 * along_x,
        )  # fmt: skip
        self.shapes.append(
            f'<path d="M{to_x:g} {to_y:g}l{left[0]} {left[1]}L{to_x + right[0]:g}'
            f' {to_y + right[1]:g}Z"{self.paint(colour)}/>'
        )

    def label(self, x: float, y: float, w: float, h: float, text: str, fill: str) -> None:
        """Draw a filled box with words in its middle; lines are divided by ``|``."""
        self.box(x, y, w, h, fill, "none" if fill != "none" else "line")
        lines = text.split("|")
        colour = "on" if fill == "own" else "ink"
        for number, line in enumerate(lines):
            middle = y + h / 2 + 4.5 + 15 * (number - (len(lines) - 1) / 2)
            self.words(x + w / 2, middle, line, size=12, colour=colour, anchor="middle")

    def text(self) -> str:
        """Return the file. Programs that know no variables skip what is inside @supports."""
        names = sorted({name for _, name in self.painted})
        light, dark = (
            ".zs{" + ";".join(f"--{name}:{COLOURS[name][scheme]}" for name in names) + "}"
            for scheme in (0, 1)
        )
        rules = "".join(
            f".{key[0]}-{name}{{{key}:var(--{name})}}" for key, name in sorted(self.painted)
        )
        return (
            f'<svg class="zs" xmlns="http://www.w3.org/2000/svg" width="{self.width}"'
            f' height="{self.height}" viewBox="0 0 {self.width} {self.height}" role="img"'
            f' font-family="system-ui,sans-serif"><title>{escape(self.title)}</title><style>'
            f"{light}@media(prefers-color-scheme:dark){{{dark}}}"
            f'[data-md-color-scheme="default"] {light}[data-md-color-scheme="slate"] {dark}'
            f"@supports(color:var(--a)){{.zs{{max-width:100%;height:auto}}{rules}}}{self.style}"
            "</style>\n" + "\n".join(self.shapes) + "\n</svg>\n"
        )


# ----------------------------------------------------------------------------------------- the film

SECONDS = {"START": 1.0, "FORWARD": 1.2, "BACKWARD": 1.2, "REDUCE": 1.4, "STEP": 2.0}  # of a frame
OTHERS_S = 0.8
_WIDE, _LEFT, _CELLS, _TOP = 640, 74, 388, 160  # of the picture; where cells begin, and their width
_LINE = 64  # between two captions, all but one of which are hidden


@dataclass
class _Film:
    """One walk, drawn frame by frame; `poster` is the frame that is shown where nothing moves."""

    walk: Walk
    scale: int  # bytes of a full bar
    name: str
    poster: int

    def __post_init__(self) -> None:
        self.frames = self.walk.frames
        self.seconds = [SECONDS.get(one.command, OTHERS_S) for one in self.frames]
        self.starts = [sum(self.seconds[:at]) for at in range(len(self.frames) + 1)]
        self._made: dict[tuple[str, ...], str] = {}
        self._css: list[str] = []
        mesh = self.walk.laid_out.mesh
        self.ranks, self.units = mesh.size, len(self.walk.planned)
        self.owned = " with layers owned whole" if self.walk.owners else ""
        few = self.ranks <= 4
        self.strip, self.pitch = (16, 84) if few else (10, 68)
        self.picture = Picture(
            _WIDE, _TOP + self.pitch * self.ranks + 70,
            f"A step of {self.walk.policy.name}{self.owned}: {self.units} layers on"
            f" {self.ranks} ranks",
        )  # fmt: skip
        self.across = _CELLS / self.units
        self.wide = self.across - 10  # of a cell

    # ------------------------------------------------------------------------------- what moves

    def moved(self, values: Sequence[str]) -> str:
        """Return the classes of what has these declarations, one for each frame."""
        key = tuple(values)
        if len(set(key)) == 1:
            return ""
        if key not in self._made:
            name = self._made[key] = f"{self.name}-{len(self._made)}"
            at: dict[str, list[str]] = {}
            for number, value in enumerate(values):
                start, before = self.starts[number], values[max(number - 1, 0)]
                if number == 0:
                    at.setdefault(value, []).append("0%")
                elif value != before:
                    at.setdefault(before, []).append(self._percent(start))
                    at.setdefault(value, []).append(self._percent(start + 0.35))
            at.setdefault(values[-1], []).append("to")
            keyframes = "".join(f"{','.join(when)}{{{value}}}" for value, when in at.items())
            self._css.append(
                f"@keyframes {name}{{{keyframes}}}.zs .{name}{{animation-name:{name}}}"
            )
        return f"{self.name} {self._made[key]}"

    def _percent(self, second: float) -> str:
        return f"{100 * second / self.starts[-1]:.2f}".rstrip("0").rstrip(".") + "%"

    def group(self, shapes: Iterable[str], shown: Sequence[float]) -> None:
        """Draw shapes that are there as far as `shown` says of each frame."""
        if not any(shown):
            return
        classes = self.moved([f"opacity:{value:g}" for value in shown])
        now = f' opacity="{shown[self.poster]:g}"' if shown[self.poster] != 1 else ""
        named = f' class="{classes}"' if classes else ""
        self.picture.shapes.append(f"<g{named}{now}>{''.join(shapes)}</g>")

    # ------------------------------------------------------------------------------- what is where

    def x(self, unit: int) -> float:
        """Return where the cells of a layer begin."""
        return _LEFT + self.across * unit

    def y(self, rank: int, strip: int = 0) -> float:
        """Return where a strip of a rank's cells begins."""
        return _TOP + self.pitch * rank + 4 + strip * (self.strip + 3)

    def parts(
        self, unit: int, strip: int, scope: Scope, fill: str, line: str = "none"
    ) -> list[str]:
        """Return, for every rank, the range of a layer that it has in `scope`."""
        layout = self.walk.planned[unit].groups[0].one.layout
        height = self.strip if strip < 3 else self.strip // 2
        out = []
        for rank in range(self.ranks):
            start, stop = (self.wide * end / layout.numel for end in layout.span(rank, scope))
            if start == stop:
                continue
            out.append(
                f'<rect x="{self.x(unit) + start:.4g}" y="{self.y(rank, strip):g}"'
                f' width="{stop - start:.4g}" height="{height}"{self.picture.paint(fill, line)}/>'
            )
        return out

    def lines(self, unit: int, strip: int, over: str, colour: str, *, back: bool) -> list[str]:
        """Return the ways from each rank to those that it sends to, or `back` to it."""
        layout, mesh = self.walk.planned[unit].groups[0].one.layout, self.walk.laid_out.mesh
        d, dots = "", ""
        for rank in range(self.ranks):
            start, stop = layout.ranges[rank]
            if start == stop:
                continue
            x = self.x(unit) + self.wide * (start + stop) / 2 / layout.numel
            here = self.y(rank, strip) + self.strip / 2
            others = {"the ranks of its node": mesh.node(rank)}.get(over, range(self.ranks))
            if over.startswith("the same rank"):
                others = mesh.column(rank)
            for other in {min(others), max(others)} - {rank}:
                there = self.y(other, strip) + self.strip / 2
                d += f"M{x:.4g} {there:g}V{here:g}" if back else f"M{x:.4g} {here:g}V{there:g}"
            dots += f"M{x:.4g} {here:g}h0"
        paint = self.picture.paint
        return [
            f'<path d="{d}" stroke-width="2" stroke-dasharray="4 5"'
            f"{paint('none', colour, 'zs-flow')}/>",
            f'<path d="{dots}" stroke-width="7" stroke-linecap="round"{paint("none", colour)}/>',
        ]

    # ------------------------------------------------------------------------------- drawing

    def drawn(self) -> str:
        """Return the file."""
        picture, height = self.picture, self.picture.height
        striped = f"url(#{self.name}-stripes)"
        clip = f'<clipPath id="{self.name}-clip"><rect width="{_WIDE}" height="60"/></clipPath>'
        picture.shapes.append(
            f'<defs>{clip}<pattern id="{self.name}-stripes" width="6" height="6"'
            ' patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6"'
            f' height="6"{picture.paint("grads")}/><rect width="2.5" height="6"'
            f"{picture.paint('grad')}/></pattern></defs>"
        )
        picture.shapes.append(
            f'<rect width="{_WIDE}" height="{height}" rx="10"{picture.paint("paper")}/>'
        )
        self._head()
        for unit in range(self.units):
            active = [float(unit in one.units and "WARD" in one.command) for one in self.frames]
            box = f'<rect x="{self.x(unit) - 5:.4g}" y="{_TOP - 24}" width="{self.wide + 10:.4g}"'
            box += f' height="{self.pitch * self.ranks + 22}" rx="6"{picture.paint("glow")}/>'
            self.group([box], active)
            word = "layer " if self.units <= 4 else ""
            middle = self.x(unit) + self.wide / 2
            picture.words(middle, _TOP - 7, f"{word}{unit + 1}", size=15, anchor="middle")
        for rank in range(self.ranks):
            picture.words(14, self.y(rank, 1) + 6, f"rank {rank}", size=14, bold=True)
            for unit in range(self.units):
                for strip in range(4):
                    tall = self.strip if strip < 3 else self.strip // 2
                    picture.box(self.x(unit), self.y(rank, strip), self.wide, tall, "on")
        mesh = self.walk.laid_out.mesh
        for node in range(1, mesh.num_nodes):
            y = _TOP + self.pitch * mesh.node_size * node - 4
            picture.path(f"M14 {y}H{_WIDE - 14}", "line", 1.5)
        for unit in range(self.units):
            self._layer(unit, striped)
        self._bars()
        self._legend(striped)
        name, total = self.name, self.starts[-1]
        steps = "".join(
            f"{self._percent(start)}{{transform:translateY({-_LINE * number}px)}}"
            for number, start in enumerate(self.starts[:-1])
        )
        picture.style += (
            f".zs .{name}{{animation:{total:g}s linear infinite}}{''.join(self._css)}"
            f"@keyframes {name}-strip{{{steps}}}.zs .{name}-strip{{animation-name:{name}-strip;"
            "animation-timing-function:step-end}"
            ".zs .zs-flow{animation:zs-flow .5s linear infinite}"
            "@keyframes zs-flow{from{stroke-dashoffset:9}}"
            "@media(prefers-reduced-motion:reduce){.zs *{animation:none!important}}"
        )
        return picture.text()

    def _head(self) -> None:
        picture, mesh = self.picture, self.walk.laid_out.mesh
        nodes = f" in {mesh.num_nodes} nodes" if mesh.num_nodes > 1 else ""
        row = self.walk.policy.name
        stages = {name: f"ZeRO stage {number}: " for number, name in STAGES.items()}
        title = f"{stages.get(row, '')}one step of {row}"
        title = f"One step of {row}{self.owned}" if self.owned else title
        title = title[:1].upper() + title[1:]
        picture.words(14, 32, title, size=20, bold=True)
        many = "1 rank" if self.ranks == 1 else f"{self.ranks} ranks{nodes}"
        about = f"{self.units} layer{'s' * (self.units > 1)}, {many}"
        picture.words(_WIDE - 14, 32, about, size=15, colour="soft", anchor="end")
        texts = ""
        for number, frame in enumerate(self.frames):
            lines = (frame.phase[:1].upper() + frame.phase[1:], *wrap(frame.text, 64))
            for at, line in enumerate(lines):
                small = "" if at else ' font-size="13" font-weight="600"'
                y = _LINE * number + 14 + 20 * at
                texts += f'<text x="14" y="{y}"{small}>{escape(line)}</text>'
        picture.shapes.append(self._strip(texts, 0, 44))
        last = self.starts[-1]
        done = [f"transform:scaleX({start / last:.3f})" for start in self.starts[1:]]
        now = f' transform="scale({self.starts[self.poster + 1] / last:.3f} 1)"'
        bar = f'<rect width="612" height="3"{now}{picture.paint("own", more=self.moved(done))}/>'
        picture.shapes.append(f'<g transform="translate(14 114)"><rect width="612" height="3"'
                      f"{picture.paint('glow')}/>{bar}</g>")  # fmt: skip

    def _strip(self, texts: str, x: float, y: float) -> str:
        """Return texts below each other in a window that shows the one of the frame."""
        return (
            f'<g transform="translate({x:g} {y:g})" clip-path="url(#{self.name}-clip)"><g'
            f' font-size="16"{self.picture.paint("ink", more=f"{self.name} {self.name}-strip")}'
            f' transform="translate(0 {-_LINE * self.poster})">{texts}</g></g>'
        )

    def _layer(self, unit: int, striped: str) -> None:
        """Draw the states of one layer on every rank."""
        group, policy = self.walk.group, self.walk.policy
        layout, cells = group.one.layout, policy.default

        def where(
            scope: Scope, solid: str, light: str, tier: Tier = Tier.DEVICE
        ) -> tuple[Scope, str, str]:
            if tier is not Tier.DEVICE:
                return scope, "none", solid
            return scope, solid if scope is Scope.SHARD else light, "none"

        def shown(level: Callable[[LayerState], float]) -> list[float]:
            return [float(level(frame.layers[unit])) for frame in self.frames]

        always = [1.0] * len(self.frames)
        rests, steps = layout.scope(cells.weight), layout.scope(cells.optim)
        levels = {"whole": 1.0, "coming": 0.35, "stale": 0.15}
        self.group(
            self.parts(unit, 0, Scope.FULL, "all"), shown(lambda one: levels.get(one.weights, 0.0))
        )
        kept = [float(one.weights == "column") for one in (f.layers[unit] for f in self.frames)]
        self.group(self.parts(unit, 0, Scope.NODE_SHARD, "all"), kept)
        if cells.weight.is_sharded:
            self.group(self.parts(unit, 0, *where(rests, "own", "all", cells.weight.tier)), always)
        else:  # what each rank has stepped, until the others have it, too
            new = shown(lambda one: one.weights in ("stale", "coming"))
            self.group(self.parts(unit, 0, *where(steps, "own", "all")), new)
        waits = group.waits or Scope.FULL
        self.group(self.parts(unit, 1, waits, striped), shown(lambda one: one.waits))
        self.group(self.parts(unit, 1, Scope.FULL, striped), shown(lambda one: one.buckets > 0))
        target = layout.scope(cells.optim)
        if self.walk.reduced_scope is not target:  # where all ranks step all
            self.group(self.parts(unit, 1, target, "grads"), shown(lambda one: one.averaged))
        self.group(
            self.parts(unit, 1, *where(self.walk.reduced_scope, "grad", "grads", cells.grad.tier)),
            shown(lambda one: one.summed),
        )
        self.group(self.parts(unit, 2, *where(steps, "optim", "optims", cells.optim.tier)), always)
        self.group(self.parts(unit, 3, Scope.FULL, "act"), shown(lambda one: one.activations))
        stepped = [float(one.command == "STEP") for one in self.frames]
        self.group(self.parts(unit, 2, steps, "none", "ink"), stepped)
        self._flows(unit)

    def _flows(self, unit: int) -> None:
        """Draw the collectives of one layer while they are under way."""
        ways: dict[tuple[int, str, bool], list[float]] = {}
        gathers = (f.over for f in reversed(self.frames) if f.command == "START" if unit in f.units)
        weights, sums = next(gathers, ""), ""  # of the step before
        for number, frame in enumerate(self.frames):
            layer = frame.layers[unit]
            if frame.over and (unit in frame.units or not frame.units):
                strip = 1 if frame.command in ("REDUCE", "AVERAGE") else 0
                weights, sums = (weights, frame.over) if strip else (frame.over, sums)
            comes = layer.weights == "coming" or frame.command == "PUBLISH"
            for strip, over, back, is_on in (
                (0, weights, False, comes),
                (1, sums, True, layer.reducing),
                (1, sums, False, frame.command == "AVERAGE"),
            ):
                if is_on and over:
                    shown = ways.setdefault((strip, over, back), [0.0] * len(self.frames))
                    shown[number] = 1.0
        for (strip, over, back), shown in ways.items():
            colour = "grad" if strip else "own"
            self.group(self.lines(unit, strip, over, colour, back=back), shown)

    def _bars(self) -> None:
        """Draw what a rank holds, as bars and in figures."""
        picture, x, wide = self.picture, _LEFT + _CELLS + 8, 156
        picture.words(x, _TOP - 22, "memory in use,", size=13, colour="soft")
        text = f"of {size_text(self.scale)} at stage 0"
        picture.words(x, _TOP - 7, text, size=13, colour="soft")
        for rank in range(self.ranks):
            picture.box(x - 1, self.y(rank) - 1, wide + 2, self.strip + 6, "on")
        # ranks that hold the same at all times, together
        alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for rank, frames in enumerate(self.walk.by_rank):
            held = tuple(tuple(frame.held[state] for state in STATES) for frame in frames)
            alike.setdefault(held, []).append(rank)
        for ranks in alike.values():
            self._bars_of(ranks, x, wide)

    def _bars_of(self, ranks: Sequence[int], x: float, wide: int) -> None:
        """Draw the bars of `ranks` that hold the same."""
        picture, frames = self.picture, self.walk.by_rank[ranks[0]]
        begins = [0.0] * len(frames)
        for state, colour in zip(STATES, ("own", "grad", "optim", "act"), strict=True):
            sizes = [frame.held[state] / self.scale for frame in frames]
            bars = "".join(
                f'<rect y="{self.y(rank):g}" width="{wide}" height="{self.strip + 4}"/>'
                for rank in ranks
            )
            places = list(zip(begins, sizes, strict=True))
            moves = (f"translateX({at * wide:.1f}px) scaleX({size:.4f})" for at, size in places)
            classes = self.moved([f"transform:{move}" for move in moves])
            at, size = places[self.poster]
            how = f' transform="translate({at * wide:.1f} 0) scale({size:.4f} 1)"'
            how += picture.paint(colour, more=classes)
            picture.shapes.append(f'<g transform="translate({x} 0)"><g{how}>{bars}</g></g>')
            begins = [at + size for at, size in places]
        texts = ""
        for number, frame in enumerate(frames):
            y = _LINE * number + 18
            texts += f'<text y="{y}" font-weight="600">{size_text(frame.total)}</text>'
            for line, (tier, size) in enumerate(frame.away.items(), 1):
                texts += f'<text y="{y + 15 * line}" font-size="13">'
                texts += f"+ {size_text(size)} on {tier}</text>"
        shapes, name = picture.shapes, f"{self.name}-held" + (f"-{ranks[0]}" if ranks[0] else "")
        shapes.append(f'<defs><g id="{name}">{texts}</g></defs>')
        used, below = f'<use href="#{name}"/>', self.strip + 6
        shapes += [self._strip(used, x, self.y(rank) + below) for rank in ranks]

    def _legend(self, striped: str) -> None:
        picture, y = self.picture, self.picture.height - 54
        names = ("weights", "gradients", "optimizer states", "activations")
        for x, name, solid, light in zip(
            (14, 142, 286, 478), names, ("own", "grad", "optim", "act"),
            ("all", "grads", "optims", "act"), strict=True,
        ):  # fmt: skip
            picture.box(x, y, 11, 14, solid, "none")
            picture.box(x + 12, y, 11, 14, light, "none")
            picture.words(x + 29, y + 12, name, size=14)
        text = "solid: this rank alone has it   light: a copy   striped: not yet summed over ranks"
        if any(frame.away for frame in self.frames):
            text = "solid: only here   light: a copy   striped: not yet summed   hollow: host, disk"
        picture.words(14, y + 38, text.replace("   ", " \u00b7 "), size=14, colour="soft")


def _film(one: Walk) -> _Film:
    mesh, training = one.laid_out.mesh, one.training
    plain = walk(
        ROWS["ddp"], mesh.size, units=len(one.planned), micro_batches=training.micro_batches
    )
    scale = max(frame.total for frames in (plain.frames, *one.by_rank) for frame in frames)
    most = max(range(len(one.frames)), key=lambda at: one.frames[at].total)
    return _Film(one, scale, one.policy.name.replace("-", "") + "owned" * bool(one.owners), most)


def svg(one: Walk) -> str:
    """Return the film of a step as an SVG that needs no script."""
    return _film(one).drawn()


_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>TITLE</title>
<style>
body{max-width:720px;margin:1em auto;padding:0 8px;font-family:system-ui,sans-serif;
color-scheme:light dark}
.zs{width:100%;height:auto}
.zs *{animation-play-state:paused!important;animation-delay:calc(var(--t,0)*-1s)!important}
form{display:flex;gap:8px;margin:8px 0}input{flex:1;min-width:0}
button{font-size:1em;min-width:5em}output{white-space:nowrap}
</style>
SVG
<form><button type="button">play</button><input type="range" min="0" max="LAST" value="AT"
aria-label="frame"><output></output></form>
<script>
const starts = STARTS, svg = document.querySelector("svg"), slider = document.querySelector("input")
const button = document.querySelector("button"), output = document.querySelector("output")
let time = 0, before = 0, plays = false
function show(seconds) {
  time = seconds % starts[starts.length - 1]
  svg.style.setProperty("--t", time)
  slider.value = starts.findLastIndex(start => start <= time)
  output.value = `${+slider.value + 1} of ${starts.length - 1}`
}
function go(now) {
  if (plays) { show(time + (now - before) / 1000); before = now; requestAnimationFrame(go) }
}
function stop(at) {  // a frame, when all has moved
  plays = false; button.textContent = "play"; show(starts[at] + 0.5)
}
slider.oninput = () => stop(+slider.value)
button.onclick = () => {
  plays = !plays; button.textContent = plays ? "stop" : "play"
  before = performance.now(); requestAnimationFrame(go)
}
stop(AT)
</script>
</html>
"""


def html(one: Walk) -> str:
    """Return a page with the film and a slider, in one file that loads nothing."""
    film = _film(one)
    fields = {
        "TITLE": film.picture.title,
        "STARTS": str([round(start, 2) for start in film.starts]),
        "LAST": str(len(film.frames) - 1),
        "AT": str(film.poster),
        "SVG": film.drawn(),
    }
    page = _PAGE
    for name, text in fields.items():
        page = page.replace(name, text)
    return page
