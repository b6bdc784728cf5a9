"""Random programs train to the bits of data parallel training by hand; see
docs/design/exactness.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fuzz.draw import GRAINS, LATER, PAIRS, draw
from tests.fuzz.program import Layer, Micro, Program, Step, describe, repair
from tests.fuzz.runner import command, report, run_program
from tests.fuzz.shrink import shrink

CHUNK = 25
QUICK = 50
SLOW = 6000


def _failures(first: int, path: Path) -> list[str]:
    failures = []
    for seed in range(first, first + CHUNK):
        program = draw(seed)
        outcome = run_program(program, str(path))
        if not outcome.is_good:
            failures.append(report(program, outcome))
    return failures


@pytest.mark.parametrize("first", [*range(0, QUICK, CHUNK), LATER])
def test_random_programs_train_to_the_bits_of_the_reference(first: int, tmp_path: Path) -> None:
    failures = _failures(first, tmp_path)
    assert not failures, "\n\n".join(failures)


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        *range(QUICK, SLOW, CHUNK),
        *range(LATER + CHUNK, LATER + 600, CHUNK),
        *range(PAIRS, PAIRS + 6 * CHUNK, CHUNK),
        *range(GRAINS, GRAINS + 6 * CHUNK, CHUNK),
    ],
)
def test_more_random_programs_train_to_the_bits_of_the_reference(
    first: int, tmp_path: Path
) -> None:
    failures = _failures(first, tmp_path)
    assert not failures, "\n\n".join(failures)


FOUND = {  # what later seeds found, shrunk where that was possible
    "a weight used outside before its reentrant checkpoint": Program(
        456,
        world=1,
        row="hfsdp",
        precision="bf16",
        optimizer="sgd",
        width=24,
        layers=(Layer(borrows=1), Layer(checkpoint="reentrant")),
        steps=(Step(),),
    ),
    "encoded weights gathered ahead by timing": Program(
        490,
        units="leaves",
        weight_codec="fp8",
        grad_codec="fp8",
        optimizer="sgd",
        width=3,
        steps=(Step((Micro(forwards=2),)), Step()),
    ),
    "sums on the host while ranks take different branches": draw(586),
    "sums on the host of one rank, which has all of a unit": draw(2261),
    "the other kind of checkpoint between two reentrant ones": Program(
        622,
        world=1,
        row="ddp",
        precision="bf16",
        optimizer="sgd",
        width=3,
        tokens=True,
        layers=(Layer(checkpoint="reentrant"), Layer("gate", checkpoint="saved")),
        steps=(Step((Micro(routes=((0, 1, 0),)),), clip=1.0),),
    ),
    "a last micro-batch inside no_sync on three ranks": Program(
        654,
        world=3,
        node_size=1,
        row="mics",
        optimizer="sgd",
        width=24,
        steps=(Step((Micro(), Micro(no_sync=True))),),
    ),
    "ranks without data beside a last micro-batch inside no_sync": Program(
        100145,
        world=3,
        row="zero1",
        shares=(0.0, 0.9, 0.1),
        optimizer="sgd",
        detached=True,
        layers=(Layer("plain"),),
        steps=(Step((Micro(), Micro(no_sync=True)), absent=(1, 2)),),
    ),
    "ranks without data in no_sync, with a reset, other tiers and another row between": Program(
        7,
        world=3,
        row="zero1",
        optimizer="sgd",
        width=3,
        steps=(
            Step((Micro(no_sync=True),), zero="zeros"),
            Step(
                (Micro(), Micro(no_sync=True)),
                absent=(1,),
                between=("reset", "offload", "ddp", "alone forward"),
            ),
            Step((Micro(no_sync=True),), absent=(2,), clip=0.1),
            Step(),
        ),
    ),
    "a write that native gathers follow, whose masters rest on the host": Program(
        102205,
        row="zero1",
        transport="nccl",
        optimizer_tier="host",
        optimizer="sgd",
        width=3,
        steps=(Step(between=("write",)), Step()),
    ),
    "a write to weights in half precision between leaves over native collectives": Program(
        102178,
        transport="nccl",
        precision="bf16",
        optimizer="sgd",
        width=3,
        leaves="8",
        steps=(Step(between=("write",)),),
    ),
    "encoded gradients over native collectives of a rank with no share": Program(
        102038,
        row="zero2",
        transport="nccl",
        shares=(0.0, 1.0),
        grad_codec="int8",
        optimizer="sgd",
        width=3,
    ),
    "a weight used outside in two forwards with a backward each": Program(
        2759,
        transport="gloo",
        optimizer="sgd",
        width=3,
        layers=(Layer(borrows=1), Layer(), Layer(borrows=1)),
        steps=(Step((Micro(forwards=2, backward="each"),)),),
    ),
    "an average updated while the step of gradients on the host goes on": Program(
        5718,
        world=1,
        row="zero1",
        grad_tier="host",
        optimizer="sgd",
        width=3,
        averaged=True,
        steps=(Step(between=("average",)),),
    ),
    "gradients assigned after a backward inside no_sync alone": Program(
        3852,
        row="zero1",
        optimizer="sgd",
        width=3,
        steps=(Step((Micro(no_sync=True),), assigned=True),),
    ),
    "a rank without a leaf gathers ahead by what it holds itself": draw(513),
    "a rank without a leaf hands units over where others do not": draw(194),
    "a layer that no rank used, and a rank without a part of it": Program(
        978,
        world=3,
        row="zero2",
        optimizer="sgd",
        width=3,
        tokens=True,
        steps=(Step((Micro(routes=((), (), ())),), zero="model"), Step()),
    ),
    "a layer that no leaf of a step uses, and leaves of the next one do": Program(
        113,
        row="zero3-keep",
        optimizer="sgd nesterov",
        leaves="5",
        layers=(Layer("fork"),),
        steps=(
            Step((Micro(routes=((), ())),), clip=1.0),
            Step((Micro(routes=((0,), (0,))),), clip=1.0),
        ),
    ),
    "states taken away while a column is published between nodes": draw(7698),
    "a rank without a leaf, and a layer that no leaf uses, where weights are kept": Program(
        13076,
        row="zero3-keep",
        transport="gloo",
        units="leaves",
        optimizer="sgd",
        width=3,
        leaves="3",
        steps=(Step((Micro(routes=((), ())),)),),
    ),
    "a rank without a leaf, and kept weights that a backward uses once more": Program(
        13076,
        row="zero3-keep",
        transport="gloo",
        units="leaves",
        optimizer="sgd",
        leaves="5",
        layers=(Layer("block", frozen=True),),
        steps=(Step((Micro(routes=((0, 0), (0, 0))),)),),
    ),
    "a forward that ends by an exception, and what it had gathered ahead": Program(
        95399,
        weight_tier="host",
        optimizer="sgd",
        width=8,
        tokens=True,
        tied_ends=True,
        layers=(Layer(), Layer(kind="block")),
        steps=(Step(micros=(Micro(penalty="square"),), between=("alone forward",)),),
    ),
    "parts of matrices on two tiers": draw(112049),
    "blocks of a parameter on three ranks": draw(112024),
    "four ranks of one node": Program(
        13033,
        world=4,
        row="zero1",
        optimizer="sgd",
        width=8,
        layers=(Layer("experts"),),
        steps=(Step((Micro(), Micro())),),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_later_seeds_have_found(name: str, tmp_path: Path) -> None:
    outcome = run_program(FOUND[name], str(tmp_path))
    assert outcome.is_good, report(FOUND[name], outcome)


def test_a_seed_draws_one_program_and_describes_it() -> None:
    seeds = [first + at for first in (0, LATER, PAIRS, GRAINS) for at in range(30)]
    programs = [draw(seed) for seed in seeds]
    assert programs == [draw(seed) for seed in seeds]
    assert len(set(programs)) == 120
    assert all(repair(program) == program for program in programs), "drawn programs are in order"
    assert command(programs[7]) == "python -m tests.fuzz 7"
    assert describe(Program(7)).splitlines()[0] == "Program(seed=7)"


def test_the_shrinker_keeps_only_what_the_failure_needs() -> None:
    layers = (Layer("block", dropout=True), Layer("norm"), Layer("gate", borrows=1), Layer("nest"))
    steps = (Step((Micro(no_sync=True), Micro(forwards=2)), clip=0.1), Step())
    program = repair(
        Program(7, world=3, row="hpz", precision="bf16", width=13, layers=layers, steps=steps)
    )

    def fails(smaller: Program) -> bool:
        return any(layer.kind == "gate" for layer in smaller.layers) and any(
            micro.no_sync for micro in smaller.micros
        )

    smallest = shrink(program, fails)
    assert smallest == Program(
        7,
        world=1,
        row="hpz",
        optimizer="sgd",
        width=3,
        layers=(Layer("gate"),),
        steps=(Step((Micro(no_sync=True),)),),
    )


def test_a_wrong_number_is_told_with_its_place_and_the_command_that_replays_it(
    tmp_path: Path,
) -> None:
    program = Program(7, optimizer="sgd", layers=(Layer("wrong"),))
    outcome = run_program(program, str(tmp_path))
    assert outcome.kind == "differs", outcome
    assert re.match(
        r"differs [a-z.]+\[\d+\] is \S+ instead of \S+ \(row zero3\)", outcome.detail
    ), outcome
    assert report(program, outcome).splitlines()[1] == "python -m tests.fuzz 7"
