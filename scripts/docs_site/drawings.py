#!/usr/bin/env python3
"""Draw the pictures of docs/img: a table, routes, lanes, tiers and what pages show of their own.

    python -m scripts.docs_site.drawings         # write the SVG files

Pictures follow the site's light or dark scheme, and the reader's where they are opened alone
(planner/film.py: Picture). The table is drawn from ``core.policy.ROWS``, films from the schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from zeroshard.core.placement import Cell, Mesh, Scope
from zeroshard.core.policy import ROWS
from zeroshard.core.precision import PRECISIONS
from zeroshard.core.shares import deal, shares_of
from zeroshard.planner.film import Picture, svg
from zeroshard.planner.walk import walk

__all__ = ["DRAWINGS", "write"]

FOLDER = Path(__file__).parents[2] / "docs" / "img"
PARTS = 4  # ranks of the table's picture: 2 nodes of 2


def _cell(picture: Picture, x: float, y: float, cell: Cell) -> None:
    """Draw what each of four ranks holds of one state: the filled part of its bar."""
    for rank in range(PARTS):
        left = x + 23 * rank + (8 if rank >= PARTS // 2 else 0)
        picture.box(left, y, 17, 32)
        first, count = 0, PARTS
        if cell.scope is Scope.SHARD:
            first, count = rank, 1
        elif cell.scope is Scope.NODE_SHARD:
            first, count = 2 * (rank % 2), 2
        fill = "sum" if cell.is_partial else "own" if count < PARTS else "all"
        picture.box(left + 1, y + 1 + 7.5 * first, 15, 7.5 * count, fill, "none")


def table() -> str:
    """Draw the table: rows of the policy, columns of states, bars of ranks."""
    picture = Picture(800, 104 + 46 * len(ROWS), "The table: where each state rests on four ranks")
    columns = {
        "weight": "weight", "between": "weight between", "grad": "gradient between",
        "optim": "master, moments",
    }  # fmt: skip
    below = {"between": "forward, backward", "grad": "micro-batches"}
    for number, (name, title) in enumerate(columns.items()):
        picture.words(130 + 172 * number, 20, title, bold=True)
        picture.words(130 + 172 * number, 37, below.get(name, ""), bold=True)
    for number, (row, policy) in enumerate(ROWS.items()):
        y = 52 + 46 * number
        picture.words(8, y + 21, row, size=14, bold=True)
        for place, name in enumerate(columns):
            _cell(picture, 130 + 172 * place, y, getattr(policy.default, name))
    y = 52 + 46 * len(ROWS) + 14
    for x, colour, text in (
        (8, "all", "whole on every rank"), (190, "own", "a part of it"),
        (318, "sum", "a sum not yet formed over the ranks"),
    ):  # fmt: skip
        picture.box(x, y, 14, 14, colour, "none")
        picture.words(x + 21, y + 12, text, colour="soft")
    picture.words(792, y + 12, "a bar is a rank: 2 nodes of 2", colour="soft", anchor="end")
    return picture.text()


ROUTE = {  # phase: what stages 1, 2 and 3 do there, by its kind
    "before forward": ("nothing", "nothing", "all-gather|weights"),
    "forward": ("compute", "compute", "compute,|then reshard"),
    "before backward": ("nothing", "nothing", "all-gather|weights"),
    "backward": ("compute", "compute", "compute,|then reshard"),
    "gradients": (
        "reduce-scatter,|last micro-batch",
        "reduce-scatter,|each micro-batch",
        "reduce-scatter,|each micro-batch",
    ),
    "step": ("own part", "own part", "own part"),
    "after the step": ("all-gather|weights", "all-gather|weights", "nothing"),
}


def route() -> str:
    """Draw the way of one unit through a step at stages 1, 2 and 3."""
    width, left = 124, 70
    picture = Picture(left + width * len(ROUTE) + 4, 262, "The route of one unit through a step")
    for column, (phase, texts) in enumerate(ROUTE.items()):
        x = left + width * column
        picture.words(x + 55, 20, phase, bold=True, anchor="middle")
        for row, text in enumerate(texts):
            y = 36 + 64 * row
            moves = "gather" in text or "scatter" in text
            fill = "none" if text == "nothing" else "own" if moves else "all"
            picture.label(x, y, 110, 44, "" if text == "nothing" else text, fill)
            if column:
                picture.arrow(x - 13, y + 22, x - 2, y + 22)
    for row in range(3):
        picture.words(4, 62 + 64 * row, f"stage {row + 1}", size=14, bold=True)
    for x, colour, text in ((70, "own", "moves between ranks"), (246, "all", "this rank alone")):
        picture.box(x, 236, 14, 14, colour, "none")
        picture.words(x + 21, 248, text, colour="soft")
    return picture.text()


def lanes() -> str:
    """Draw three units on the three lanes at stage 3."""
    picture = Picture(884, 226, "Lanes: gathers and reduces run beside compute")
    step, begin = 71.0, 84.0
    for row, (name, about) in enumerate(
        (("gather", "weights"), ("compute", "your stream"), ("reduce", "gradients"))
    ):
        picture.words(4, 52 + 56 * row, name, size=14, bold=True)
        picture.words(4, 68 + 56 * row, about, size=11, colour="soft")
        picture.path(f"M{begin} {76 + 56 * row}H876", "line")

    def put(row: int, slot: float, text: str, fill: str, length: float = 1.0) -> None:
        picture.label(begin + step * slot, 36 + 56 * row, step * length - 4, 36, text, fill)

    for slot, unit in ((0.0, "A"), (1.0, "B"), (2.0, "C")):
        put(0, slot, f"gather {unit}", "own")
        put(1, slot + 1, f"forward {unit}", "all")
    for slot, unit in ((4.0, "C"), (5.0, "B"), (6.5, "A")):
        put(0, slot, f"gather {unit}", "own")
    for slot, unit in ((5.0, "C"), (6.5, "B"), (8.0, "A")):
        put(1, slot, f"backward {unit}", "all", 1.5)
        put(2, slot + 1.5, f"reduce {unit}", "sum")
    put(1, 10.5, "step", "all", 0.6)
    picture.words(begin, 20, "time", size=12, colour="soft")
    picture.arrow(begin + 32, 16, 876, 16)
    picture.words(
        begin, 216, "Units are gathered ahead in the order of the last pass. Compute waits for the"
        " first gather of each pass, and for the last reduce.", size=12, colour="soft",
    )  # fmt: skip
    return picture.text()


def tiers() -> str:
    """Draw the three memories, and what of each state may rest in which."""
    picture = Picture(820, 268, "Tiers: device, host and disk")
    for row, (name, about) in enumerate(
        (
            ("device", "the GPU's memory; on CPU the host's"),
            ("host", "the CPU's memory, pinned on CUDA"),
            ("disk", "a directory on a local NVMe disk"),
        )
    ):
        y = 8 + 88 * row
        picture.box(8, y, 804, 62)
        picture.words(20, y + 26, name, size=15, bold=True)
        picture.words(20, y + 46, about, size=11, colour="soft")
    for x, text in ((330, "weights"), (490, "gradients"), (650, "master,|moments")):
        for row in range(3):
            picture.label(x, 16 + 88 * row, 140, 46, text, "own" if row == 0 else "all")
        for row in range(2):
            picture.arrow(x + 58, 63 + 88 * row, x + 58, 102 + 88 * row)
            picture.arrow(x + 82, 103 + 88 * row, x + 82, 64 + 88 * row)
    return picture.text()


def uneven() -> str:
    """Draw a step of a fast rank and one of half its speed, with equal batches and unequal ones."""
    picture = Picture(820, 244, "Equal batches wait for the slow rank; unequal ones end together")
    scale, begin = 80.0, 120.0
    cases = (("equal", 3, 3), ("batch_shares", 4, 2))  # samples of the fast rank and the slow one
    for row, (name, fast, slow) in enumerate(cases):
        y = 8 + 104 * row
        picture.words(4, y + 46, name, size=14, bold=True)
        ends = max(fast, 2 * slow)
        for rank, (samples, time) in enumerate(((fast, fast), (slow, 2 * slow))):
            top = y + 42 * rank
            each = scale * time / samples
            for number in range(samples):
                picture.label(begin + each * number, top, each - 3, 36, "sample", "own")
            if time < ends:
                picture.label(
                    begin + scale * time, top, scale * (ends - time) - 3, 36, "waits", "none"
                )
        picture.label(begin + scale * ends, y, 66, 78, "reduce,|step", "sum")
    picture.words(
        begin, 228, "Six samples on a fast rank (above) and one of half its speed. Gradients are"
        " weighted 1/2, 1/2 and 2/3, 1/3.", size=12, colour="soft",
    )  # fmt: skip
    return picture.text()


def shares() -> str:
    """Draw three segments that two ranks share, 1 to 3, beside what they gather and compute."""
    picture = Picture(800, 236, "Shares: who rests which blocks, and what stays the same")
    numbers, block, blocks, left = shares_of([0.25, 0.75]), 17, (10, 14, 8), 96
    assert numbers is not None
    dealt, x = [0, 0], left
    rows = (("rank 0", "rests a quarter"), ("rank 1", "rests the rest"), ("both", "in use"))
    for row, (name, about) in enumerate(rows):
        picture.words(4, 57 + 62 * row, name, size=14, bold=True)
        picture.words(4, 73 + 62 * row, about, size=11, colour="soft")
    for number, count in enumerate(blocks):
        mine = deal(numbers, dealt, count)
        picture.words(x, 24, f"unit {number}: {count} blocks, {mine[0]} + {mine[1]}", bold=True)
        for row, (first, own) in enumerate(((0, mine[0]), (mine[0], mine[1]), (0, count))):
            picture.box(x, 40 + 62 * row, block * count, 38)
            fill = "own" if row < 2 else "all"
            for index in range(first, first + own):
                picture.box(x + block * index + 2, 42 + 62 * row, block - 4, 34, fill, "none")
        dealt = [have + more for have, more in zip(dealt, mine, strict=True)]
        x += block * count + 26
    picture.words(
        left, 224, f"{dealt[0]} and {dealt[1]} of {sum(dealt)} blocks after three units. Every rank"
        " gathers all of a unit, and computes its own batches.", size=12, colour="soft",
    )  # fmt: skip
    return picture.text()


def inference() -> str:
    """Draw four units that are read from disk, token after token."""
    picture = Picture(884, 176, "Inference: units are read ahead, around the end of a forward")
    step, begin, units = 78.0, 84.0, "ABCD"
    for row, (name, about) in enumerate((("disk", "weights"), ("compute", "one token"))):
        picture.words(4, 52 + 56 * row, name, size=14, bold=True)
        picture.words(4, 68 + 56 * row, about, size=11, colour="soft")
        picture.path(f"M{begin} {76 + 56 * row}H876", "line")
    for slot in range(10):
        unit = units[slot % 4]
        picture.label(begin + step * slot, 36, step - 4, 36, f"read {unit}", "own")
        if slot:
            done = units[(slot - 1) % 4]
            picture.label(begin + step * slot, 92, step * 0.6, 36, done, "all")
    for token in (1, 2):
        x = begin + step * (4 * token + 1) - 2
        picture.path(f"M{x} 26V132", "ink")
        picture.words(x - 4, 20, f"token {token}", size=12, colour="soft", anchor="end")
    picture.words(
        begin, 166, "While the last unit of a forward computes, the first ones of the next forward"
        " are read: the disk never waits for a token.", size=12, colour="soft",
    )  # fmt: skip
    return picture.text()


def repartition() -> str:
    """Draw the bytes at rest on a rank over a run that goes from stage 1 to stage 3."""
    picture = Picture(820, 262, "Bytes at rest on one of 8 ranks, from stage 1 to stage 3")
    mesh, base, scale, width = Mesh(1, 8), 208, 48.0, 38
    states = (("optimizer", "own"), ("master", "sum"), ("weight", "all"))
    bf16 = PRECISIONS["bf16"]
    rests = {
        name: ROWS[name].bytes_at_rest("after_step", numel=1, mesh=mesh, precision=bf16)
        for name in ("zero1", "zero3")
    }
    columns = [0.0] * 4 + [unit / 8 for unit in range(1, 8)] + [1.0] * 4  # the part that has moved
    for index, moved in enumerate(columns):
        x, y = 70 + 44 * index, float(base)
        for state, fill in states:
            before, after = (getattr(rests[name], state) for name in ("zero1", "zero3"))
            height = scale * (before * (1 - moved) + after * moved)
            y -= height
            picture.box(x, y, width, height, fill, "none")
    for number in range(5):
        y = base - scale * number
        picture.words(56, y + 4, str(number), size=11, colour="soft", anchor="end")
    picture.words(8, 14, "bytes per parameter (bf16, Adam)", size=12, colour="soft")
    for x, text in ((156, "steps at stage 1"), (398, "repartition: unit by unit"),
                    (640, "steps at stage 3")):  # fmt: skip
        picture.words(x, base + 22, text, anchor="middle", bold=True)
    for x, (text, fill) in zip(
        (240, 400, 520),
        (("optimizer's states", "own"), ("masters", "sum"), ("weights", "all")),
        strict=True,
    ):
        picture.box(x, base + 36, 14, 14, fill, "none")
        picture.words(x + 20, base + 48, text, size=12)
    return picture.text()


def elastic() -> str:
    """Draw where the parts of a checkpoint rest in an elastic run on two hosts."""
    picture = Picture(820, 262, "An elastic run: memory that outlives the ranks")
    for host, left in enumerate((8, 416)):
        picture.box(left, 8, 396, 216)
        picture.words(left + 12, 28, f"host {host}", size=14, bold=True)
        picture.label(left + 12, 40, 372, 44, f"rank {host}|trains; may die", "all")
        picture.words(left + 12, 128, "memory of the launcher", size=12, colour="soft")
        for slot, text in enumerate((f"part {host}|step 56", f"part {host}|step 57")):
            picture.label(left + 12 + 94 * slot, 140, 84, 62, text, "own")
            picture.label(
                left + 206 + 94 * slot, 140, 84, 62, f"part {1 - host}|step {56 + slot}", "sum"
            )
        picture.arrow(left + 148, 88, left + 148, 136)
        picture.words(left + 156, 108, "keep(57)", size=12)
    picture.arrow(570, 112, 322, 112)
    picture.arrow(322, 112, 322, 136)
    picture.words(470, 108, "redundancy=1", size=12, anchor="middle")
    for x, colour, text in (
        (8, "all", "gone with the rank"), (170, "own", "stays when the rank dies"),
        (370, "sum", "the other host's part: stays when that host is gone"),
    ):  # fmt: skip
        picture.box(x, 236, 14, 14, colour, "none")
        picture.words(x + 21, 248, text, colour="soft")
    return picture.text()


def orders() -> str:
    """Draw two orders of three micro-batches in three units, and the reads of weights of each."""
    picture = Picture(820, 262, "Two orders of three micro-batches in three units")
    one_by_one = [(unit, micro) for micro in (1, 2, 3) for unit in "ABC"]
    plain_backward = [(unit, micro) for micro in (1, 2, 3) for unit in "CBA"]
    together = [(unit, micro) for unit in "ABC" for micro in (1, 2, 3)]
    backward = [(unit, micro) for unit in "CBA" for micro in (1, 2, 3)]
    for top, title, reads, halves in (
        (8, "one micro-batch after another", "18 reads", (one_by_one, plain_backward)),
        (140, "engine.accumulate(): one unit after another", "6 reads", (together, backward)),
    ):
        picture.words(8, top + 14, title, bold=True)
        picture.words(812, top + 14, reads, colour="soft", anchor="end")
        for half, order in enumerate(halves):
            before = ""
            for place, (unit, micro) in enumerate(order):
                x = 8 + 412 * half + 43.5 * place
                if unit != before:
                    picture.label(x, top + 28, 40, 24, f"read {unit}", "sum")
                    picture.arrow(x + 20, top + 53, x + 20, top + 66)
                picture.label(x, top + 68, 40, 24, f"{unit} {micro}", "all")
                before = unit
            picture.words(
                8 + 412 * half, top + 110, ("forward", "backward")[half], size=12, colour="soft"
            )
    return picture.text()


RING = {  # the files of a step: (columns, rows, lines of what it does)
    "runtime/hooks.py": ((0, 0), (0, 2), "what torch does,|as events"),
    "runtime/loop.py": ((1, 1), (0, 0), "the events|of a step"),
    "runtime/weights.py": ((2, 2), (0, 0), "executes the|commands"),
    "runtime/unit.py": ((3, 3), (0, 0), "param.data:|views, or NaN"),
    "runtime/flat_weights.py": ((4, 4), (0, 0), "at rest and|gathered"),
    "runtime/flight.py": ((5, 5), (0, 2), "the hops, one|after another"),
    "comm/transport.py": ((6, 6), (0, 2), "one of NCCL,|mapped memory,|gloo, or two levels"),
    "core/schedule": ((2, 4), (1, 1), "decides what is gathered, waited for, released"),
    "runtime/backward.py": ((1, 1), (2, 2), "a gradient,|a unit, the end"),
    "runtime/reductions.py": ((2, 2), (2, 2), "hands a unit's|buckets over"),
    "runtime/bucket.py": ((3, 3), (2, 2), "gradients before|a reduce"),
    "runtime/grad.py": ((4, 4), (2, 2), "where the sums|rest"),
    "state/gradient.py": (
        (1, 6),
        (3, 3),
        "this rank's share: a sum, and once in a step its average",
    ),
    "optim/sharded.py": ((0, 0), (4, 4), "torch's hooks|around step()"),
    "runtime/finalize.py": ((1, 1), (4, 4), "average, agree,|clip"),
    "state/norms.py": ((2, 2), (4, 4), "the exact norm,|finite or not"),
    "runtime/rest.py": ((3, 3), (4, 4), "peers have read|the weights"),
    "optim/shards.py": ((4, 4), (4, 4), "this rank's tiles,|their gradients"),
    "runtime/segment.py": ((6, 6), (4, 4), "casts masters|into weights"),
}


def ring() -> str:
    """Draw the files that a step at stage 3 runs, from the hooks around to the hooks again."""
    wide, high, across, down = 116, 68, 138, 92
    picture = Picture(1000, 492, "The ring: the files that a step runs, in the order of the calls")

    def left(column: int) -> float:
        return 30 + across * column

    def top(row: int) -> float:
        return 14 + down * row

    for path, ((first, last), (upper, lower), does) in RING.items():
        x, y = left(first), top(upper)
        w, h = left(last) + wide - x, top(lower) + high - y
        picture.box(x, y, w, h)
        folder, _, name = path.removesuffix(".py").rpartition("/")
        middle = x + w / 2
        lines = [(f"{folder}/", 11, "soft", False), (name, 13, "ink", True)]
        lines += [(line, 11, "soft", False) for line in does.split("|")]
        for number, (line, size, colour, bold) in enumerate(lines):
            at = y + h / 2 + 4 + 15 * (number - (len(lines) - 1) / 2)
            picture.words(middle, at, line, size=size, colour=colour, anchor="middle", bold=bold)
    picture.label(left(5), top(4), wide, high, "your optimizer's|step()", "all")

    for row, columns, colour in (
        (0, range(6), "own"), (2, range(6), "sum"), (4, range(6), "ink"),
    ):  # fmt: skip
        for column in columns:
            y = top(row) + high / 2
            picture.arrow(left(column) + wide + 2, y, left(column + 1) - 2, y, colour)
    for column, row, to, colour in (
        (2, 0, 1, "own"), (2, 2, 1, "sum"), (6, 2, 3, "sum"), (1, 4, 3, "ink"), (4, 3, 4, "ink"),
    ):  # fmt: skip
        x = left(column) + wide / 2
        if to > row:
            picture.arrow(x, top(row) + high + 2, x, top(to) - 2, colour)
        else:
            picture.arrow(x, top(row) - 2, x, top(to) + high + 2, colour)

    def bent(points: str, colour: str) -> None:
        picture.path(f"M{points}", colour, 1.5)

    x, y = left(2) + 18, top(1) + high / 2
    bent(f"{left(1) + wide / 2:g} {top(2) - 2}V{top(1) - 12}H{x}", "sum")
    picture.arrow(x, top(1) - 12, x, top(0) + high + 2, "sum")
    for number, word in enumerate(("weights", "again")):
        at = y + 15 * number
        picture.words(left(1) + wide / 2 + 8, at, word, size=11, colour="soft")
    end = top(4) + high
    bent(f"{left(6) + wide / 2:g} {end + 2}V{end + 14}H12V{top(1)}H{left(0) - 4}", "ink")
    picture.arrow(left(0) - 12, top(1), left(0) - 2, top(1), "ink")
    picture.words(left(6) - 4, end + 29, "the next forward", size=11, colour="soft", anchor="end")
    for x, colour, text in ((30, "own", "forward"), (130, "sum", "backward"), (240, "ink", "step")):
        picture.arrow(x, end + 25, x + 24, end + 25, colour)
        picture.words(x + 31, end + 29, text, size=12, colour="soft")
    return picture.text()


NUMBERS = ((1, 2, 3, 4), (1, 0, 2, 1), (0, 3, 1, 1), (2, 1, 1, 0))  # of four ranks
SUMS = tuple(map(sum, zip(*NUMBERS, strict=True)))


def collective(name: str) -> str:
    """Draw what four ranks have before and after a collective, in small numbers."""
    picture = Picture(560, 222, f"{name} of four ranks: before and after")
    whole = name != "all-gather"
    for half, title in enumerate(("before", "after")):
        left = 66 + 270 * half
        picture.words(left, 24, title, bold=True)
        for rank in range(4):
            y = 36 + 46 * rank
            picture.words(left - 8, y + 23, f"rank {rank}", anchor="end", colour="soft")
            for part in range(4):
                is_own = part == rank
                text, fill = str(NUMBERS[rank][part]), "grads"
                if not whole and not half:
                    text, fill = (str(SUMS[part]), "own") if is_own else ("", "none")
                elif half and (
                    name in ("all-gather", "all-reduce") or (name == "reduce" and not rank)
                ):
                    text, fill = str(SUMS[part]), "own" if not whole and is_own else "all"
                elif half and name == "reduce-scatter":
                    text, fill = (str(SUMS[part]), "own") if is_own else ("", "none")
                picture.label(left + 46 * part, y, 42, 36, text, fill)
    picture.arrow(258, 124, 282, 124, "ink")
    return picture.text()


def parallel() -> str:
    """Draw the weights that four ranks have of four layers, in four kinds of parallelism."""
    picture = Picture(420, 426, "Data, model, pipeline parallelism and ZeRO: who has what")
    for number, (title, does, batches) in enumerate(
        (
            ("data parallel", "a copy of everything", "own batch"),
            ("model (tensor) parallel", "a part of each layer", "same batch"),
            ("pipeline parallel", "a layer", "all in turn"),
            ("ZeRO, stage 3", "a part of each, at rest", "own batch"),
        )
    ):
        left, top = 8 + 212 * (number % 2), 202 * (number // 2)
        picture.words(left, top + 20, title, size=14, bold=True)
        picture.words(left, top + 38, does, size=12, colour="soft")
        for rank in range(4):
            y = top + 50 + 36 * rank
            for layer in range(4):
                x = left + 29 * layer
                picture.box(x, y, 26, 28)
                if number == 0:
                    picture.box(x, y, 26, 28, "all", "none")
                elif number == 2 and layer == rank:
                    picture.box(x, y, 26, 28, "own", "none")
                elif number in (1, 3):
                    picture.box(x, y + 7 * rank, 26, 7, "own", "none")
            picture.words(left + 122, y + 18, batches, size=12, colour="soft")
    text = "Rows are ranks, squares layers. Solid: one rank alone has it."
    picture.words(8, 416, text, size=12, colour="soft")
    return picture.text()


def owner() -> str:
    """Draw an owner that broadcasts a layer, and ranks that gather their parts of it."""
    picture = Picture(350, 500, "A layer that its owner broadcasts, and one that all ranks gather")
    for half, (title, about) in enumerate(
        (
            ("as papers draw it", "rank 1 owns layer 2, and broadcasts it"),
            ("as it is done here", "each rank owns a quarter, and sends it"),
        )
    ):
        left, top = 66, 256 * half
        picture.words(8, top + 20, title, size=14, bold=True)
        picture.words(8, top + 38, about, size=12, colour="soft")
        for rank in range(4):
            y = top + 52 + 46 * rank
            picture.words(left - 8, y + 21, f"rank {rank}", anchor="end", colour="soft", size=12)
            for layer in range(4):
                x = left + 66 * layer
                here = layer == 1
                picture.box(x, y, 60, 32, "all" if here else "none")
                if half:
                    picture.box(x + 15 * rank, y, 15, 32, "own", "none")
                elif layer == rank:
                    picture.box(x, y, 60, 32, "own", "none")
        for part in range(4):
            source = top + 68 + 46 * (part if half else 1)
            middle = left + 66 + (7.5 + 15 * part if half else 30)
            for stop in (top + 68, top + 206):
                if stop != source and (half or part == 0):
                    above = -18 if stop < source else 18
                    picture.arrow(middle, source + above, middle, stop, "ink")
    return picture.text()


def film(row: str, micro_batches: int = 1, shares: Literal["whole"] | None = None) -> str:
    """Draw a step of four layers on four ranks as `zeroshard walk --svg` does."""
    return svg(walk(ROWS[row], 4, micro_batches=micro_batches, shares=shares))


DRAWINGS: dict[str, Callable[[], str]] = {
    "ring": ring,
    "table": table,
    "route": route,
    "lanes": lanes,
    "tiers": tiers,
    "shares": shares,
    "uneven": uneven,
    "inference": inference,
    "repartition": repartition,
    "elastic": elastic,
    "orders": orders,
    **{
        name: partial(collective, name)
        for name in ("reduce", "all-gather", "reduce-scatter", "all-reduce")
    },
    "parallel": parallel,
    "owner": owner,
    # of two micro-batches, stage 1 keeps whole gradients between them, and stage 2 parts
    **{f"film-{name}": partial(film, name, 2) for name in ("zero1", "zero2")},
    **{f"film-{name}": partial(film, name) for name in ("zero3", "zero3-keep", "hpz")},
    "film-owned": partial(film, "zero3", 1, "whole"),
}


def write() -> None:
    """Write every picture to docs/img."""
    for name, draw in DRAWINGS.items():
        (FOLDER / f"{name}.svg").write_text(draw())


if __name__ == "__main__":
    write()
