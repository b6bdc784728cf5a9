"""Make a failing program smaller while it still fails: greedy, one feature or one part at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.draw import SWITCHES
from tests.fuzz.program import Layer, Program, repair


def shrink(program: Program, fails: Callable[[Program], bool], *, attempts: int = 200) -> Program:
    """Return the smallest program found that still `fails`, trying at most `attempts`."""
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(program):
            smaller = repair(smaller)
            if smaller == program:
                continue
            attempts -= 1
            if attempts < 0:
                return program
            if fails(smaller):
                program, changed = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for index in range(len(program.layers)):
        if len(program.layers) > 1:
            yield _without_layer(program, index)
    for index in range(len(program.steps)):
        if len(program.steps) > 1:
            yield replace(program, steps=program.steps[:index] + program.steps[index + 1 :])
    for at, step in enumerate(program.steps):
        for index in range(len(step.micros)):
            if len(step.micros) > 1:
                fewer = replace(step, micros=step.micros[:index] + step.micros[index + 1 :])
                yield replace(program, steps=(*program.steps[:at], fewer, *program.steps[at + 1 :]))
    for world in (1, 2):
        if world < program.world:
            yield replace(program, world=world)
    for switch in SWITCHES.values():
        yield switch(program)
    for index, layer in enumerate(program.layers):
        plain = replace(Layer(), same_as=layer.same_as, same_module=layer.same_module)
        for simpler in (plain, replace(layer, kind="linear")):
            yield replace(
                program, layers=(*program.layers[:index], simpler, *program.layers[index + 1 :])
            )
    for width in (3, 5):
        if width < program.width:
            yield replace(program, width=width)


def _without_layer(program: Program, gone: int) -> Program:
    def moved(index: int | None) -> int | None:
        return None if index is None or index == gone else index - (index > gone)

    layers = [
        replace(x, same_as=moved(x.same_as), borrows=moved(x.borrows))
        for i, x in enumerate(program.layers)
        if i != gone
    ]
    steps = []
    for step in program.steps:
        micros = []
        for micro in step.micros:
            routes = tuple(
                tuple(i - (i > gone) for i in route if i != gone) for route in micro.routes
            )
            micros.append(replace(micro, routes=routes))
        steps.append(replace(step, micros=tuple(micros)))
    return replace(program, layers=tuple(layers), steps=tuple(steps))
