"""From a seed to a program. The same seed draws the same program, also while features are held
back.

A feature that the engine is known to get wrong is listed in ``HELD_BACK`` with its reason; it is
drawn, so that the seeds keep their meaning, and then switched off.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

from tests.fuzz.optimizers import APART, OPTIMIZERS, WHOLE
from tests.fuzz.program import (
    CODED_ROWS,
    CROSSING,
    CUT_OFF,
    EVENTS,
    INTERRUPTS,
    OWNED_EXPERTS,
    READS,
    WHOLE_TIERS,
    WRITES,
    Layer,
    Micro,
    Program,
    Step,
    num_leaves,
    repair,
    tiers_allowed,
)
from zeroshard.core.policy import ROWS

LATER = 93_300  # from this seed on programs are disturbed, too (_with_disturbances)
LATEST = 98_000  # from this seed on layers may get inputs without gradients (_on_data)
OWNED = 103_000  # from this seed on ranks may own whole parameters
SEVERAL = 105_000  # from this seed on two optimizers may step one model
BOTH = 109_000  # from this seed on with parameters that are owned whole on any tier
SHAPED = 104_000  # from this seed on with states of other shapes
AHEAD = 108_000  # from this seed on the host may step in the backward (_ahead)
GRAINS = 112_000  # from this seed on they own parts of matrices, or blocks (_in_grains)
PAIRS = 111_000  # from this seed on several of them do so, or one is schedule-free (_in_pairs)
NATIVE = 102_000  # from this seed on collectives may meet by their order alone (_over_native)
REMAINDERS = 107_000  # from this seed on masters may rest as remainders
TIERS = ("device", "host", "disk")
SHARDED = [name for name, row in ROWS.items() if row.default.weight.is_sharded]
KINDS = (
    "linear",
    "linear",
    "block",
    "block",
    "gate",
    "norm",
    "nest",
    "table",
    "position",
    "fork",
    "batchnorm",
)


def draw(seed: int) -> Program:
    """Return the program of `seed`, without the features that are held back."""
    program = _drawn(seed)
    for switch in HELD_BACK.values():
        program = switch(program)
    return repair(program)


def _drawn(seed: int) -> Program:
    rng = random.Random(seed)
    program = _with_options(Program(seed), rng)
    program = replace(program, shares=_shares(seed, program.world))
    own = random.Random(f"ownership of {seed}")
    if seed >= OWNED and own.random() < (0.4 if seed < WHOLE_TIERS else 0.8):
        program = replace(program, shares=None, ownership="whole")
        if own.random() < (0.5 if seed < WHOLE_TIERS else 0.8):
            more = APART if SHAPED <= seed < SEVERAL or seed >= BOTH else ()
            program = replace(program, optimizer=own.choice([*WHOLE, *more]))
        if seed >= WHOLE_TIERS and own.random() < 0.7:
            by_cost = program.optimizer in WHOLE and own.random() < 0.4
            tiers = own.choice(_choices(program.row))
            program = replace(program, ownership="whole_by_cost" if by_cost else "whole")
            program = replace(
                program, weight_tier=tiers[0], grad_tier=tiers[1], optimizer_tier=tiers[2]
            )
    may_have_several = SEVERAL <= seed < WHOLE_TIERS or seed >= BOTH
    if may_have_several and own.random() < 0.6:
        program = replace(program, several=True)
        if program.ownership and own.random() < 0.5:
            program = replace(program, optimizer="muon")
    share = 0.6 if seed < 108_000 else 0.2
    if seed >= REMAINDERS and random.Random(f"remainders of {seed}").random() < share:
        tiers = {f"{state}_tier": "device" for state in ("weight", "grad", "optimizer")}
        program = replace(program, precision="bf16", remainder=True, **tiers)
    has_experts = seed >= OWNED_EXPERTS and bool(program.ownership) and own.random() < 0.5
    if has_experts:
        program = replace(program, world=own.choice((2, 3, 4, 4, 4)), node_size=None)
    layers = tuple(_layer(rng, index) for index in range(rng.randint(1, 4)))
    if has_experts:
        layers = (replace(layers[0], kind="experts"), *layers[1:])
    program = replace(program, layers=layers)
    branches = rng.random() < 0.15
    varied = rng.random() < 0.2  # the same on every rank, but not every layer once
    steps = tuple(_step(rng, program, branches, varied) for _ in range(rng.randint(2, 3)))
    program = _with_leaves(_with_meetings(replace(program, steps=steps)))
    program = _with_writes(_with_interrupts(_with_looks(program)))
    if seed >= LATER:
        program = _with_disturbances(program)
        program = _on_data(program) if seed >= LATEST else program
        program = _over_native(program) if seed >= NATIVE else program
        program = _ahead(program) if seed >= AHEAD else program
        program = _in_pairs(program) if seed >= PAIRS else program
        return _in_grains(program) if seed >= GRAINS else program
    if any("load" in step.between for step in program.steps):
        return replace(program, counted=False)
    return program


def _with_disturbances(program: Program) -> Program:
    """Draw what happens beside the loop, or to it: threads that read, ranks without data, late
    updates that are read, runs that go back, exceptions of one rank or out of a signal's handler,
    and trails.
    """
    rng = random.Random(f"disturbances of {program.seed}")
    if program.leaves is None and rng.random() < 0.2:
        program = replace(program, leaves=rng.choice(("4", "6", "7", "8", "2x3")))
    if program.leaves is not None:
        layers = tuple(replace(x, dropout=x.dropout or rng.random() < 0.4) for x in program.layers)
        counted, trailed = rng.random() < 0.6, rng.random() < 0.5
        program = replace(program, layers=layers, counted=counted, trailed=trailed)
    if rng.random() < 0.25:
        program = replace(program, watched=rng.choice(("all", "one")))
    if rng.random() < 0.35:
        program = _with_late_updates(program, rng)
    events = [*rng.sample(CUT_OFF, 2), *READS] if rng.random() < 0.6 else []
    if rng.random() < 0.45:
        events += ["save", "save", "back", "load"]
        more = tuple(_step(rng, program, False, False) for _ in range(2))
        program = replace(
            program, steps=program.steps + more, keep_last=rng.choice((None, 1, 2, 3))
        )
    absences = 0.6 if rng.random() < 0.4 else 0.0
    steps = []
    for step in program.steps:
        between = list(step.between)
        for _ in range(rng.choice((0, 1, 2)) if events else 0):
            between.insert(rng.randint(0, len(between)), rng.choice(events))
        ranks = rng.sample(range(program.world), rng.randint(1, max(1, program.world - 1)))
        absent = tuple(ranks) if rng.random() < absences else ()
        steps.append(replace(step, between=tuple(between), absent=absent))
    averaged = program.averaged or (absences > 0 and rng.random() < 0.8)
    return replace(program, steps=tuple(steps), averaged=averaged)


def _on_data(program: Program) -> Program:
    """Let the layers of half of the programs run on inputs that get no gradient, the first of them
    often several times.
    """
    rng = random.Random(f"inputs of {program.seed}")
    if rng.random() < 0.5:
        return program
    first, *others = program.layers
    if rng.random() < 0.5:
        first = replace(first, kind="plain")
    again = [
        replace(first, same_as=0, same_module=True) if rng.random() < 0.6 else layer
        for layer in others or [first]
    ]
    return replace(program, detached=True, layers=(first, *again))


def _over_native(program: Program) -> Program:
    """Let half of the programs run over the process group's own collectives, most of them with
    weights that rest whole, so that each rank may take branches of its own.
    """
    rng = random.Random(f"transport of {program.seed}")
    if rng.random() < 0.5:
        return program
    program = replace(program, transport="nccl")
    if rng.random() < 0.3:
        return program
    steps = tuple(
        replace(
            step,
            micros=_step(rng, program, True, False).micros,
            between=tuple(event for event in step.between if event not in SHARDED),
        )
        for step in program.steps
    )
    return replace(program, row=rng.choice(("ddp", "zero1", "zero2")), steps=steps)


def _ahead(program: Program) -> Program:
    """Let the host step in the backward, in most programs."""
    rng = random.Random(f"ahead of {program.seed}")
    tiers = [
        (w, g, "host") for w in TIERS for g in TIERS if tiers_allowed(program.row, w, g, "host")
    ]
    if not tiers or rng.random() < 0.2:
        return program
    weight, grad, optimizer = rng.choice(tiers)
    return replace(
        program,
        weight_tier=weight,
        grad_tier=grad,
        optimizer_tier=optimizer,
        fraction=rng.choice((1.0, 1.0, 0.5)),
        delayed=None,
        ahead=True,
    )


def _in_pairs(program: Program) -> Program:
    """Let two optimizers, or one of whole parameters, be stepped in the backward in most programs;
    in others a schedule-free one moves its parameters between steps.
    """
    rng = random.Random(f"pairs of {program.seed}")
    if rng.random() < 0.1:
        return program
    whole = rng.random() < 0.6
    rules = ("muon", "muon", "adafactor", "sgd momentum", "adamw") if whole else list(OPTIMIZERS)
    program = replace(
        program,
        optimizer=rng.choice(rules),
        several=rng.random() < 0.8,
        ownership="whole" if whole else None,
        shares=None if whole else program.shares,
        remainder=False,
    )
    if rng.random() < (0.6 if program.ahead else 0.1):
        return program
    tiers = {f"{state}_tier": "device" for state in ("grad", "optimizer")}
    steps = []
    for step in program.steps:
        between = list(step.between)
        for _ in range(rng.choice((0, 1, 2))):
            between.insert(rng.randint(0, len(between)), "modes")
        steps.append(replace(step, between=tuple(between)))
    precision = "bf16" if program.precision == "fp16" else program.precision
    return replace(
        program,
        several=True,
        modes=True,
        ahead=False,
        precision=precision,
        steps=tuple(steps),
        **tiers,
    )


def _in_grains(program: Program) -> Program:
    """Let matrices be stepped in parts in half of the programs, and in others parameters by blocks,
    between which some are cut; most have a layer that is large enough for either.
    """
    rng = random.Random(f"grains of {program.seed}")
    if rng.random() < 0.1:
        return program
    by_blocks = rng.random() < 0.4
    rules = ("muon", "muon", "adafactor", "adafactor", "hybrid", "lamb", "sgd momentum")
    optimizer = "blocks" if by_blocks else rng.choice(rules)
    by_cost = optimizer in ("muon", "hybrid") and rng.random() < 0.3
    layers = list(program.layers)
    if rng.random() < (0.95 if by_blocks else 0.6):
        at = rng.randrange(len(layers))
        layers[at] = replace(layers[at], kind="wide")
    if rng.random() < 0.4:
        world = rng.choice((2, 3, 4))
        program = replace(program, world=world, node_size=2 if world == 4 else None)
    if not program.ahead and rng.random() < 0.6:
        tiers = rng.choice(_choices(program.row))
        program = replace(
            program,
            weight_tier=tiers[0],
            grad_tier=tiers[1],
            optimizer_tier=tiers[2],
            modes=False,
            delayed=rng.choice((None, None, 0, 1)),
        )
    steps = []
    for step in program.steps:
        between = list(step.between)
        for _ in range(rng.choice((0, 0, 1, 2))):
            event = rng.choice((*EVENTS, *WRITES, *ROWS, "save", "load"))
            between.insert(rng.randint(0, len(between)), event)
        steps.append(replace(step, between=tuple(between)))
    return replace(
        program,
        optimizer=optimizer,
        several=program.modes or rng.random() < (0.8 if optimizer == "muon" else 0.5),
        ownership="whole_by_cost" if by_cost else "whole",
        shares=None,
        remainder=False,
        parts=rng.random() < (0.3 if by_blocks else 0.95),
        blocks=rng.randint(2, 6),
        layers=tuple(layers),
        steps=tuple(steps),
    )


def _with_late_updates(program: Program, rng: random.Random) -> Program:
    """Let the optimizer's state rest elsewhere and step late, and read whole weights meanwhile."""
    tiers = [
        (w, g, o)
        for w in TIERS
        for g in TIERS
        for o in ("host", "disk")
        if tiers_allowed(program.row, w, g, o)
    ]
    if not tiers:
        return program
    weight, grad, optimizer = rng.choice(tiers)
    steps = []
    for step in program.steps:
        micros = tuple(replace(micro, reads=rng.choice(("", "", *READS))) for micro in step.micros)
        reads = rng.choice(((), READS[:1], READS[1:]))
        steps.append(replace(step, micros=micros, between=(*step.between, *reads)))
    return replace(
        program,
        weight_tier=weight,
        grad_tier=grad,
        optimizer_tier=optimizer,
        fraction=1.0,
        delayed=rng.choice((0, 0, 1, 2)),
        steps=tuple(steps),
    )


def _with_interrupts(program: Program) -> Program:
    """Draw steps that end by an exception in their backward, and who numbers steps of leaves; from
    numbers of their own.
    """
    rng = random.Random(f"interrupts of {program.seed}")
    if rng.random() < 0.6:
        return program
    steps = tuple(
        replace(step, between=(*step.between, rng.choice(INTERRUPTS)))
        if rng.random() < 0.5
        else step
        for step in program.steps
    )
    return replace(program, steps=steps, counted=rng.random() < 0.6)


def _with_writes(program: Program) -> Program:
    """Write weights by hand between the steps of a quarter of the programs; from numbers of their
    own.
    """
    rng = random.Random(f"writes of {program.seed}")
    if rng.random() < 0.75:
        return program
    steps = []
    for step in program.steps:
        between = list(step.between)
        for _ in range(rng.choice((0, 1, 1, 2))):
            between.insert(rng.randint(0, len(between)), rng.choice(WRITES))
        steps.append(replace(step, between=tuple(between)))
    return replace(program, steps=tuple(steps))


def _with_meetings(program: Program) -> Program:
    """Draw the features that meet the states of others: averages, weights of losses, gradients
    that cross ranks, and what happens between steps. Their numbers are their own, so that older
    seeds keep their programs.
    """
    rng = random.Random(f"meetings of {program.seed}")
    if rng.random() < 0.4:
        return program
    layers = tuple(
        replace(layer, kind=rng.choice(CROSSING)) if rng.random() < 0.12 else layer
        for layer in program.layers
    )
    events = (*EVENTS, *ROWS)
    steps = tuple(
        replace(
            step,
            between=tuple(rng.choice(events) for _ in range(rng.choice((0, 1, 1, 2)))),
            assigned=rng.random() < 0.1,
        )
        for step in program.steps
    )
    return replace(
        program,
        layers=layers,
        steps=steps,
        averaged=rng.random() < 0.4,
        weights=rng.choice(("",) * 5 + ("losses", "losses", "batches")),
        gathered_features=rng.random() < 0.15,
        along_cp=rng.random() < 0.1,
    )


def _with_leaves(program: Program) -> Program:
    """Draw the leaves of a step, and ranks for them, in a quarter of the programs; from numbers of
    their own.
    """
    rng = random.Random(f"leaves of {program.seed}")
    if rng.random() < 0.75:
        return program
    world = rng.choice((program.world, 1, 2, 3, 3, 4))
    if world != program.world:
        node_size = 2 if world == 4 else None
        program = replace(program, world=world, node_size=node_size, shares=None)
        if program.ownership is None:
            program = replace(program, shares=_shares(program.seed, world))
    return replace(program, leaves=rng.choice(("3", "4", "5", "6", "7", "8", "3x2", "2x3")))


def _with_looks(program: Program) -> Program:
    """Look for anomalies in some programs, but of fp16, whose first scales overflow."""
    looks = random.Random(f"looks of {program.seed}").random() < 0.2
    return replace(program, looks=looks and program.precision != "fp16")


def _choices(row: str) -> list[tuple[str, str, str]]:
    """Return the tiers that weights, gradients and optimizer may rest on."""
    every = itertools.product(TIERS, repeat=3)
    return [(w, g, o) for w, g, o in every if tiers_allowed(row, w, g, o)]


def _with_options(program: Program, rng: random.Random) -> Program:
    world = rng.choice((2,) * 16 + (1, 1, 3, 4))
    row = rng.choice((*ROWS, "zero3", "zero1"))
    precision = rng.choice(("fp32", "fp32", "fp32", "bf16", "fp16"))
    tiers = ("device",) * 3
    if rng.random() < 0.4:
        tiers = rng.choice(_choices(row))
    tokens = rng.random() < 0.25
    codec = rng.choice(("int8", "fp8")) if rng.random() < 0.08 else None
    return replace(
        program,
        world=world,
        node_size=2 if world == 4 else rng.choice((None, None, None, 1)),
        row=row,
        transport=rng.choice(("shared_memory", "gloo")),
        precision=precision,
        weight_tier=tiers[0],
        grad_tier=tiers[1],
        optimizer_tier=tiers[2],
        fraction=rng.choice((1.0, 1.0, 0.5, 0.3)),
        units=rng.choice(("default", "default", "leaves", "root", "random")),
        strict=rng.random() < 0.3,
        verify_every=1 if rng.random() < 0.15 else None,
        prefetch_bytes=0 if rng.random() < 0.15 else None,
        weight_codec=codec if row in CODED_ROWS else None,
        grad_codec=codec if rng.random() < 0.5 else None,
        optimizer=rng.choice(list(OPTIMIZERS)),
        groups=rng.random() < 0.3,
        schedule=rng.random() < 0.2,
        width=rng.choice((3, 5, 8, 13, 24)),
        tokens=tokens,
        tied_ends=tokens and rng.random() < 0.6,
        returns=rng.choice(("",) * 8 + ("parameter", "view")),
        parameter_hooks=rng.random() < 0.1,
        input_grad=rng.random() < 0.4,
    )


def _shares(seed: int, world: int) -> tuple[float, ...] | None:
    """Draw shares from numbers of their own, so that older seeds keep their programs."""
    rng = random.Random(f"shares of {seed}")
    tenths = sorted(rng.randint(0, 10) for _ in range(world - 1))
    if rng.random() < 0.7:
        return None
    ends = zip([0, *tenths], [*tenths, 10], strict=True)
    return tuple((stop - start) / 10 for start, stop in ends)


def _layer(rng: random.Random, index: int) -> Layer:
    kind = rng.choice(KINDS)
    return Layer(
        kind=kind,
        checkpoint=rng.choice(("",) * 5 + ("reentrant", "saved")),
        same_as=rng.randrange(index) if index and rng.random() < 0.25 else None,
        same_module=rng.random() < 0.4,
        borrows=rng.randrange(4) if rng.random() < 0.12 else None,
        container=rng.choice(("",) * 8 + ("tuple", "dict", "dataclass")),
        hook=rng.choice(("",) * 10 + ("module", "tensor")),
        frozen=rng.random() < 0.1,
        dropout=rng.random() < 0.1,
    )


def _step(rng: random.Random, program: Program, branches: bool, varied: bool) -> Step:
    micros = tuple(_micro(rng, program, branches, varied) for _ in range(rng.choice((1, 1, 2, 3))))
    return Step(
        micros,
        clip=rng.choice((None, None, 0.1, 1.0)),
        zero=rng.choice(("none",) * 5 + ("zeros", "model", "keep")),
    )


def _micro(rng: random.Random, program: Program, branches: bool, varied: bool) -> Micro:
    count = len(program.layers)
    routes = [
        tuple(rng.randrange(count) for _ in range(rng.randint(0, count + 1))) for _ in range(4)
    ]
    halves = tuple(rng.choice(("l", "r", "lr")) for _ in range(4))
    if not branches:
        routes, halves = [routes[0]] * 4, (halves[0],) * 4
    shown = branches or varied
    return Micro(
        forwards=rng.choice((1, 1, 1, 1, 2)),
        no_sync=rng.random() < 0.3,
        backward=rng.choice(("once",) * 5 + ("twice", "each")),
        before=rng.choice(("",) * 5 + ("grad", "penalty")),
        penalty=rng.choice(("",) * 10 + ("square", "float")),
        evaluate=rng.choice(("",) * 8 + ("no_grad", "inference")),
        zero_part=rng.random() < 0.05,
        routes=tuple(routes[: program.world]) if shown else (),
        halves=halves[: program.world] if shown else (),
    )


# ----------------------------------------------------------------------------------------- switches


def _micros(change: Callable[[Micro], Micro]) -> Callable[[Program], Program]:
    def switch(program: Program) -> Program:
        steps = tuple(replace(s, micros=tuple(change(m) for m in s.micros)) for s in program.steps)
        return replace(program, steps=steps)

    return switch


def _steps(change: Callable[[Step], Step]) -> Callable[[Program], Program]:
    return lambda program: replace(program, steps=tuple(change(s) for s in program.steps))


def _layers(change: Callable[[Layer], Layer]) -> Callable[[Program], Program]:
    return lambda program: replace(program, layers=tuple(change(layer) for layer in program.layers))


def _plain(**values: object) -> Callable[[Program], Program]:
    return lambda program: replace(program, **values)  # type: ignore[arg-type]


def _same_routes(program: Program) -> Program:
    return _micros(
        lambda m: replace(
            m, routes=m.routes[:1] * len(m.routes), halves=m.halves[:1] * len(m.halves)
        )
    )(program)


def _plain_shadows(program: Program) -> Program:
    """Where a rank without a leaf takes part in gathers, have no reentrant checkpoint, and let
    ranks take the same branches.
    """
    apart = program.node_size not in (None, program.world)
    if program.leaves is None or not (
        program.transport != "shared_memory" or program.weight_tier != "device" or apart
    ):
        return program
    if program.weights != "batches" and num_leaves(program) % program.world == 0:
        return program
    return SWITCHES["branches"](SWITCHES["reentrant checkpoint"](program))


# One feature each, and how a program loses it. A shrinker tries them in this order.
SWITCHES: dict[str, Callable[[Program], Program]] = {
    "branches": _same_routes,
    "routes": _micros(lambda m: replace(m, routes=(), halves=())),
    "codecs": _plain(weight_codec=None, grad_codec=None),
    "tiers": _plain(
        weight_tier="device", grad_tier="device", optimizer_tier="device", fraction=1.0
    ),
    "weight tier": _plain(weight_tier="device"),
    "grad tier": _plain(grad_tier="device"),
    "optimizer tier": _plain(optimizer_tier="device"),
    "fraction": _plain(fraction=1.0),
    "gloo": _plain(transport="shared_memory"),
    "node size": _plain(node_size=None),
    "half precision": _plain(precision="fp32"),
    "remainders": _plain(remainder=False),
    "units": _plain(units="default"),
    "verify": _plain(verify_every=None),
    "strict": _plain(strict=False),
    "prefetch": _plain(prefetch_bytes=None),
    "shares": _plain(shares=None, ownership=None),
    "parts": _plain(parts=False),
    "several optimizers": _plain(several=False),
    "schedule-free": _plain(modes=False),
    "optimizers": _plain(optimizer="sgd"),
    "groups": _plain(groups=False),
    "schedule": _plain(schedule=False),
    "returned parameter": lambda p: replace(
        p, returns="" if p.returns == "parameter" else p.returns
    ),
    "returned view": lambda p: replace(p, returns="" if p.returns == "view" else p.returns),
    "parameter hooks": _plain(parameter_hooks=False),
    "tied ends": _plain(tied_ends=False),
    "tokens": _plain(tokens=False),
    "evaluation": _micros(lambda m: replace(m, evaluate="")),
    "gradient penalty": _micros(
        lambda m: replace(m, before="" if m.before == "penalty" else m.before)
    ),
    "autograd.grad": _micros(lambda m: replace(m, before="" if m.before == "grad" else m.before)),
    "float penalty": _micros(
        lambda m: replace(m, penalty="" if m.penalty == "float" else m.penalty)
    ),
    "penalty": _micros(lambda m: replace(m, penalty="")),
    "retained graph": _micros(
        lambda m: replace(m, backward="once" if m.backward == "twice" else m.backward)
    ),
    "several losses": _micros(
        lambda m: replace(m, backward="once" if m.backward == "each" else m.backward)
    ),
    "several forwards": _micros(lambda m: replace(m, forwards=1)),
    "no_sync": _micros(lambda m: replace(m, no_sync=False)),
    "partial zero_grad": _micros(lambda m: replace(m, zero_part=False)),
    "no_sync of node sums": lambda p: SWITCHES["no_sync"](p) if p.row in ("mics", "hfsdp") else p,
    "half gradients away": lambda p: p if p.precision == "fp32" else replace(p, grad_tier="device"),
    "clip": _steps(lambda s: replace(s, clip=None)),
    "zero_grad": _steps(lambda s: replace(s, zero="none")),
    "averages": _plain(averaged=False),
    "weights": _plain(weights=""),
    "gathered features": _plain(gathered_features=False),
    "cp": _plain(along_cp=False),
    "leaves": _plain(leaves=None),
    "looks": _plain(looks=False),
    "declared leaves": lambda p: replace(p, leaves="6" if "x" in (p.leaves or "") else p.leaves),
    "experts": _layers(lambda x: replace(x, kind="linear" if x.kind == "experts" else x.kind)),
    "attention over ranks": _layers(
        lambda x: replace(x, kind="linear" if x.kind == "attend" else x.kind)
    ),
    "assigned gradients": _steps(lambda s: replace(s, assigned=False)),
    "between steps": _steps(lambda s: replace(s, between=())),
    "saves": _steps(
        lambda s: replace(
            s, between=tuple(e for e in s.between if e not in ("save", "load", "back"))
        )
    ),
    "repartition": _steps(
        lambda s: replace(s, between=tuple(e for e in s.between if e not in ROWS))
    ),
    "writes": _steps(lambda s: replace(s, between=tuple(e for e in s.between if e not in WRITES))),
    "reset": _steps(lambda s: replace(s, between=tuple(e for e in s.between if e != "reset"))),
    "interrupts": _steps(
        lambda s: replace(s, between=tuple(e for e in s.between if e not in INTERRUPTS))
    ),
    "counted steps": _plain(counted=False),
    "readers": _plain(watched=""),
    "late updates": _plain(delayed=None),
    "steps in the backward": _plain(ahead=False),
    "trails": _plain(trailed=False),
    "ranks without data": _steps(lambda s: replace(s, absent=())),
    "kept saves": _plain(keep_last=None),
    "going back": _steps(lambda s: replace(s, between=tuple(e for e in s.between if e != "back"))),
    "reads": _steps(lambda s: replace(s, between=tuple(e for e in s.between if e not in READS))),
    "reads in a step": _micros(lambda m: replace(m, reads="")),
    "steps that are cut off": _steps(
        lambda s: replace(s, between=tuple(e for e in s.between if e not in CUT_OFF))
    ),
    "input gradient": _plain(input_grad=False),
    "detached input": _plain(detached=False),
    "checkpoint": _layers(lambda x: replace(x, checkpoint="")),
    "reentrant checkpoint": _layers(
        lambda x: replace(x, checkpoint="saved" if x.checkpoint else "")
    ),
    "borrowed weights": _layers(lambda x: replace(x, borrows=None)),
    "shared modules": _layers(lambda x: replace(x, same_module=False)),
    "tied weights": _layers(lambda x: replace(x, same_as=None, same_module=False)),
    "containers": _layers(lambda x: replace(x, container="")),
    "hooks": _layers(lambda x: replace(x, hook="")),
    "frozen": _layers(lambda x: replace(x, frozen=False)),
    "dropout": _layers(lambda x: replace(x, dropout=False)),
    "views of parameters": _layers(
        lambda x: replace(x, kind="linear" if x.kind == "position" else x.kind)
    ),
    "batch norm": _layers(lambda x: replace(x, kind="linear" if x.kind == "batchnorm" else x.kind)),
}


# Features that the engine does not get right yet: how a program loses them, by the reason.
HELD_BACK: dict[str, Callable[[Program], Program]] = {
    # of seed 1904 one run in some hundred had other bits, and one was refused
    "a rank without a leaf keeps weights that a reentrant checkpoint does not": _plain_shadows
}
