"""A random program as data: the model, its training steps, and the options of ``shard()``.

Every field has a neutral default, so that a program prints as its differences from the plainest
one, and a shrinker removes a feature by setting its field back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from zeroshard.core.placement import Tier
from zeroshard.core.policy import ROWS, row

# whose weights rest sharded over all ranks, so that a codec takes them
CODED_ROWS = ("zero3", "hpz")
OWNED_EXPERTS = 110_000  # from this seed on ranks may own whole experts
WHOLE_TIERS = 106_000  # from this seed on steps of whole parameters may rest on other tiers
CHECKPOINTABLE = ("linear", "block", "gate", "norm", "nest", "table", "fork", "wide")
LENDING = ("linear", "gate", "block")  # kinds of layers with a parameter that others can use
EVENTS = ("average", "offload", "save", "load", "reset")  # between steps; the others are rows
INTERRUPTS = ("early", "late")  # between steps, too
WRITES = ("edit", "climb", "write")  # ... and those that change weights by hand
READS = ("read", "show")  # ... and those that look at whole weights
CUT_OFF = (  # ... and steps that one rank gives up alone, or that signals end
    "alone forward",
    "alone backward",
    "alone step",
    "signal forward",
    "signal backward",
    "signal clip",
    "signal step",
    "signal gather",
)
NEUTRAL = (*CUT_OFF, *READS, *INTERRUPTS, "climb", "offload")  # after which all is as it was
CROSSING = ("experts", "attend")  # kinds whose gradients come from the losses of other ranks, too
_OF_WHOLE = (
    "lamb",
    "hybrid",
    "muon",
    "adafactor",
    "blocks",
)  # optimizers that step whole parameters


@dataclass(frozen=True)
class Layer:
    """One module between the first and the last; its input and output have the same shape."""

    # linear, block, gate, norm, batchnorm, nest, table, position, fork, experts, attend, wide
    kind: str = "linear"
    checkpoint: str = ""  # "reentrant" or "saved" (use_reentrant=False)
    same_as: int | None = None  # the layer before it whose weight (or module) this one is
    same_module: bool = False
    borrows: int | None = None  # the layer whose weight is used after this one, outside its module
    container: str = ""  # "tuple", "dict" or "dataclass": how the output leaves the module
    hook: str = ""  # "module" (scales the output) or "tensor" (scales the output's gradient)
    frozen: bool = False
    dropout: bool = False


@dataclass(frozen=True)
class Micro:
    """One micro-batch: forwards, then one or more backwards."""

    forwards: int = 1
    no_sync: bool = False
    backward: str = "once"  # "twice" (retain_graph), or "each" forward's loss on its own
    before: str = ""  # "grad" (autograd.grad) or "penalty" (the same with create_graph)
    penalty: str = ""  # "square" (p.square()) or "float" (p.float()) over all parameters
    evaluate: str = ""  # "no_grad" or "inference", between forward and backward
    zero_part: bool = False  # clear the gradients of some parameters after the backward
    # whole weights are read between forward and backward ("show"), or after it ("read")
    reads: str = ""
    routes: tuple[tuple[int, ...], ...] = ()  # per rank: which layers run, in which order
    halves: tuple[str, ...] = ()  # per rank: which halves of forks run, "l", "r" or "lr"


@dataclass(frozen=True)
class Step:
    """One step of the optimizer."""

    micros: tuple[Micro, ...] = (Micro(),)
    clip: float | None = None
    zero: str = "none"  # "zeros" (set_to_none=False), "model", "keep" (not at all)
    assigned: bool = False  # .grad of some parameters is assigned by hand before the step
    absent: tuple[int, ...] = ()  # the ranks that have no data for it: it runs in engine.join()
    # what happens between this step and the next, in this order: "average" (an evaluation inside
    # EMA.swapped()), "offload" (offload_states() and back), a row to repartition() to, "save",
    # "load" (the newest save), "modes" (eval() and train() of a schedule-free optimizer), "reset"
    # (an exception in a forward, then engine.reset()), "early" and "late" (the same in a backward,
    # of the first leaf: at its loss, or when it comes to the first layer), "edit" (rows are set
    # inside gathered()), "climb" (all are changed there, and put back in the next such context),
    # "write" (weights are written outside of it, where every rank has them whole), "back" (an
    # earlier save is loaded, whose number saves go on from), "read" (full_state_dict()), "show"
    # (gathered()), or one of CUT_OFF: a step that one rank gives up by an exception, or in which a
    # signal's handler raises on some ranks, then engine.reset()
    between: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """A model, its training, and how it is sharded."""

    seed: int
    world: int = 2
    node_size: int | None = None
    row: str = "zero3"
    transport: str = "shared_memory"
    precision: str = "fp32"
    remainder: bool = False  # masters rest as remainders of bf16 weights
    weight_tier: str = "device"
    grad_tier: str = "device"
    optimizer_tier: str = "device"
    fraction: float = 1.0
    units: str = "default"  # "leaves", "root", "random"
    strict: bool = False
    verify_every: int | None = None
    prefetch_bytes: int | None = None
    shares: tuple[float, ...] | None = None
    ownership: str | None = None
    weight_codec: str | None = None
    grad_codec: str | None = None
    optimizer: str = "adamw"
    several: bool = False  # matrices by that one, all else by an AdamW of its own
    modes: bool = False  # ... or by a schedule-free one, with train() and eval()
    parts: bool = False  # some matrices are stepped as several (`parts_of`)
    groups: bool = False  # matrices in one param group, the rest in another
    schedule: bool = False
    width: int = 5
    blocks: int = 2  # of 4096 elements, in the weight of a "wide" layer
    tokens: bool = False  # integer inputs through an embedding
    tied_ends: bool = False  # the last linear has the embedding's weight
    returns: str = ""  # "parameter", "view": what the model returns beside its output
    parameter_hooks: bool = False
    input_grad: bool = False
    detached: bool = False  # the layers get inputs without gradients, as data is
    averaged: bool = False  # zs.EMA, updated after each step
    weights: str = ""  # "losses" (engine.backward(loss, weight=)) or "batches" (batch_shares)
    gathered_features: bool = False  # the loss compares this rank's outputs with all ranks'
    along_cp: bool = False  # the ranks lie along the mesh's "cp"
    # the leaves of a step: each is one of its micro-batches in turn, whoever computes it; the
    # routes and halves are those of leaves, not of ranks
    leaves: str | None = None
    counted: bool = False  # the engine numbers the steps of leaves
    looks: bool = False  # for anomalies, in every step
    delayed: int | None = None  # Offload(delayed_update=)
    ahead: bool = False  # Offload(step_in_backward=)
    keep_last: int | None = None  # of the saves
    watched: str = ""  # a thread reads weights meanwhile, on "all" ranks or on "one"
    trailed: bool = False  # in engine.trail(), which is compared with that of an undisturbed run
    layers: tuple[Layer, ...] = (Layer(),)
    steps: tuple[Step, ...] = (Step(), Step())

    @property
    def micros(self) -> list[Micro]:
        """Every micro-batch of every step."""
        return [micro for step in self.steps for micro in step.micros]

    @property
    def coded(self) -> bool:
        """Whether anything travels encoded, so that only closeness is promised."""
        return self.weight_codec is not None or self.grad_codec is not None

    @property
    def has_experts(self) -> bool:
        """Whether some parameters are other ones on other ranks."""
        return any(layer.kind == "experts" for layer in self.layers)

    @property
    def branches(self) -> bool:
        """Whether some rank runs other layers, or halves of layers, than another."""
        forks = any(layer.kind == "fork" for layer in self.layers)
        return any(
            len(set(m.routes)) > 1 or (forks and len(set(m.halves)) > 1) for m in self.micros
        )

    @property
    def gathers_in_step(self) -> bool:
        """Whether every rank must take part in every gather of a weight (docs/not-tested.md)."""
        if self.world == 1 or not row(self.row).default.weight.is_sharded:
            return False
        apart = self.node_size is not None and self.node_size < self.world
        return (
            self.transport != "shared_memory"
            or self.weight_tier != "device"
            or self.weight_codec is not None
            or apart
        )


def num_leaves(program: Program) -> int:
    """Return the leaves of a step."""
    return math.prod(int(size) for size in (program.leaves or "1").split("x"))


def experts_apart(world: int) -> int:
    """Return over how many ranks experts are divided; the others hold the same ones again."""
    return 2 if world == 4 else world


def tiers_allowed(name: str, weight: str, grad: str, optimizer: str) -> bool:
    """Return whether the row called `name` may rest on these tiers."""
    try:
        row(name).tiered(Tier(weight), Tier(grad), Tier(optimizer))
    except ValueError:
        return False
    return True


def repair(program: Program) -> Program:
    """Return `program` without what torch itself, or the table of rows, has no meaning for."""
    program = replace(program, layers=_repaired_layers(program.layers))
    if not tiers_allowed(
        program.row, program.weight_tier, program.grad_tier, program.optimizer_tier
    ):
        program = replace(
            program, weight_tier="device", grad_tier="device", optimizer_tier="device"
        )
    on_device = program.weight_tier == program.grad_tier == program.optimizer_tier == "device"
    if on_device:
        program = replace(program, fraction=1.0)
    if program.remainder:  # others are refused, and so are averages of these
        takes = program.precision == "bf16" and on_device
        program = replace(program, remainder=takes, averaged=program.averaged and not takes)
    if program.row not in CODED_ROWS:
        program = replace(program, weight_codec=None)
    if program.world == 1:
        program = replace(program, node_size=None, weight_codec=None, grad_codec=None)
    if program.row == "ddp" or len(program.shares or ()) != program.world:
        program = replace(program, shares=None)
    if program.coded and program.optimizer not in ("sgd", "adamw"):
        # others make small errors of a gradient large
        program = replace(program, optimizer="adamw")
    if program.node_size is not None and program.world % program.node_size:
        program = replace(program, node_size=None)
    if program.optimizer in _OF_WHOLE:
        has_none = program.ownership is None or program.remainder
        if has_none or (program.optimizer == "muon" and not program.several):
            program = replace(program, optimizer="adamw")
        elif program.seed < WHOLE_TIERS:
            tiers = {f"{state}_tier": "device" for state in ("weight", "grad", "optimizer")}
            program = replace(program, **tiers)
    if program.optimizer not in _OF_WHOLE and program.ownership:
        program = replace(program, ownership="whole")
    program = replace(program, parts=program.parts and program.ownership is not None)
    if program.transport == "nccl" and (program.shares or program.ownership):
        # gloo in NCCL's place exchanges slices of one size alone, where they lie by columns
        program = replace(program, node_size=None)
    if not program.tokens:
        program = replace(program, tied_ends=False)
    reentrant = any(layer.checkpoint == "reentrant" for layer in program.layers)
    steps = tuple(_repaired_step(step, program, reentrant) for step in program.steps)
    program = replace(program, steps=steps)
    if program.branches or program.world == 1:  # every rank takes part in a layer that crosses
        program = replace(program, gathered_features=False, along_cp=False)
        layers = tuple(
            replace(layer, kind="linear") if layer.kind in CROSSING else layer
            for layer in program.layers
        )
        program = replace(program, layers=_repaired_layers(layers))
    if program.leaves is None:
        program = replace(program, counted=False, trailed=False)
    else:
        program = _repaired_leaves(program)
    if program.optimizer_tier == "device" or program.fraction != 1.0:
        program = replace(program, delayed=None)
    if program.optimizer_tier != "host":
        program = replace(program, ahead=False)
    away = program.remainder or {program.grad_tier, program.optimizer_tier} != {"device"}
    if not program.several or away or program.coded or program.precision == "fp16":
        program = replace(program, modes=False)  # a step that is skipped counts there
    if program.delayed is not None or program.precision == "fp16":
        # the run beside it has other numbers; NaN of a sum that overflows is any NaN
        program = replace(program, trailed=False)
    program = _repaired_joins(program)
    program = _repaired_options(program)
    rows = (program.row, *(e for step in program.steps for e in step.between if e in ROWS))
    if any(row(name).default.weight.is_sharded for name in rows):
        program = replace(program, watched="")  # gathered weights go while a thread reads them
        if program.branches or any(step.absent for step in program.steps):
            # gathers that meet by their order alone would mix units
            native = program.transport == "nccl"
            program = replace(program, transport="gloo" if native else program.transport)
    if program.branches:  # a rank cannot clear a gradient that it does not have
        kept = [
            replace(
                step,
                micros=tuple(replace(micro, zero_part=False, reads="") for micro in step.micros),
            )
            for step in program.steps
        ]
        program = replace(program, steps=tuple(kept))
    return program


def _repaired_leaves(program: Program) -> Program:
    """Take out what is refused beside leaves, or reaches over the ranks inside of one."""
    if num_leaves(program) < program.world * (3 if program.weights == "batches" else 1):
        program = replace(program, leaves="12")
    kinds = (*CROSSING, "batchnorm")
    layers = tuple(
        replace(layer, kind="linear") if layer.kind in kinds else layer for layer in program.layers
    )
    # a rank without a leaf shadows one forward and one backward of the others
    uneven = program.weights == "batches" or num_leaves(program) % program.world > 0
    steps = tuple(
        replace(
            step,
            micros=tuple(_one_backward(micro, is_alone=uneven) for micro in step.micros[:1]),
            zero="model" if step.zero == "model" else "none",
        )
        for step in program.steps
    )
    return replace(
        program,
        layers=_repaired_layers(layers),
        steps=tuple(_repaired_step(step, program, False) for step in steps),
        weight_codec=None,
        grad_codec=None,
        gathered_features=False,
        along_cp=False,
    )


def _one_backward(micro: Micro, *, is_alone: bool) -> Micro:
    """Return what the micro-batches of a step have in common, with one backward; `is_alone`: and
    one forward.
    """
    forwards = 1 if is_alone or micro.backward != "once" else micro.forwards
    micro = replace(micro, backward="once", before="", zero_part=False, forwards=forwards, reads="")
    return replace(micro, penalty="", evaluate="") if is_alone else micro


def _repaired_joins(program: Program) -> Program:
    """Take out of steps that some ranks sit out what these do not follow, and the steps where
    nobody can.
    """
    barred = program.leaves is not None or program.has_experts or program.branches
    barred = barred or program.gathered_features or program.weights == "batches"
    barred = barred or any(layer.kind in CROSSING for layer in program.layers)
    in_step = program.gathers_in_step
    if in_step and not barred and any(step.absent for step in program.steps):
        # a rank without data follows the gathers of the last step that it took part in
        program = _without_routes(program)
    steps = []
    for number, step in enumerate(program.steps):
        absent = tuple(sorted({rank for rank in step.absent if rank < program.world}))
        if barred or len(absent) == program.world or (in_step and not number):
            absent = ()
        if absent:
            micros = tuple(
                replace(
                    micro,
                    forwards=1 if in_step else micro.forwards,
                    backward="once" if in_step else micro.backward,
                    before="",
                    penalty="",
                    evaluate="",
                    zero_part=False,
                    reads="",
                )
                for micro in step.micros
            )
            step = replace(step, micros=micros, zero="none", assigned=False)
        steps.append(replace(step, absent=absent))
    if any(step.absent for step in steps):  # that context meets the ranks
        program = replace(program, looks=False)
    return replace(program, steps=tuple(steps))


def _without_routes(program: Program) -> Program:
    steps = tuple(
        replace(step, micros=tuple(replace(m, routes=(), halves=()) for m in step.micros))
        for step in program.steps
    )
    return replace(program, steps=steps)


def _repaired_options(program: Program) -> Program:
    """Take out what is refused by name beside another option."""
    if program.has_experts:  # no columns of nodes, no shares
        owned = program.ownership if program.seed >= OWNED_EXPERTS else None
        program = replace(program, node_size=None, shares=None, ownership=owned, along_cp=False)
        if program.optimizer in _OF_WHOLE and not owned:
            program = replace(program, optimizer="adamw")
        saves = any("save" in step.between for step in program.steps)
        if program.optimizer in ("adafactor", "blocks") and saves:  # of experts in one parameter
            program = replace(program, optimizer="hybrid")
        apart = tuple(  # a module with two names is matched by one of them
            replace(layer, same_as=None, same_module=False) if layer.kind == "experts" else layer
            for layer in program.layers
        )
        program = replace(program, layers=apart)
    if program.coded:  # a loss of products makes small errors of an output large
        program = replace(program, gathered_features=False)
    if program.along_cp:
        program = replace(program, node_size=None)
    if any(micro.backward == "twice" for micro in program.micros):
        program = replace(program, weights="")  # engine.backward() has no retain_graph
    if program.optimizer_tier != "device":
        program = replace(program, averaged=False)
    steps = []
    events: list[str] = []
    for step in program.steps:
        zero = "none" if step.zero == "keep" and program.weights else step.zero
        before = len(events)
        if zero != "keep" and not program.branches:
            for event in step.between:
                if _may_happen(program, event, events):
                    events.append(event)
        steps.append(replace(step, between=tuple(events[before:]), zero=zero))
    return replace(program, steps=tuple(steps))


def _may_happen(program: Program, event: str, earlier: Sequence[str]) -> bool:
    if event == "average":
        return program.averaged
    if event == "modes":
        return program.modes
    if event in ("load", "back"):
        return "save" in earlier
    if event in CUT_OFF:  # the user's own collectives would wait for who has given up
        # (and those in the process group's own until the time is up)
        crosses = any(layer.kind in CROSSING for layer in program.layers)
        return not (crosses or program.gathered_features or program.transport == "nccl")
    if event == "write" and program.delayed is not None:
        return False  # an error, where weights are a step behind their masters
    return event in (*EVENTS, *INTERRUPTS, *WRITES, *READS) or _may_become(program, event)


def _may_become(program: Program, name: str) -> bool:
    """Return whether the program may be repartitioned to the row called `name`."""
    tiers = (program.weight_tier, program.grad_tier, program.optimizer_tier)
    return (
        tiers_allowed(name, *tiers)
        and not program.has_experts
        and not program.coded
        and (name != "ddp" or program.shares is None)
    )


def _repaired_layers(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    out: list[Layer] = []
    for index, layer in enumerate(layers):
        other = layer.same_as
        if other is not None and (
            not 0 <= other < index
            or layers[other].kind != layer.kind
            or layers[other].same_as is not None
        ):
            other = None
        lender = layer.borrows
        if lender is not None and (
            not 0 <= lender < len(layers) or layers[lender].kind not in LENDING
        ):
            lender = None
        checkpoint = layer.checkpoint if layer.kind in CHECKPOINTABLE else ""
        container = "" if checkpoint == "reentrant" or layer.kind == "position" else layer.container
        hook = (
            "" if layer.hook == "module" and (container or layer.kind == "position") else layer.hook
        )
        same = layer.same_module and other is not None
        out.append(
            replace(
                layer,
                same_as=other,
                same_module=same,
                borrows=lender,
                checkpoint=checkpoint,
                container=container,
                hook=hook,
            )
        )
    return tuple(out)


def _repaired_step(step: Step, program: Program, reentrant: bool) -> Step:
    micros = []
    for micro in step.micros:
        # engine.backward(loss) has no retain_graph
        if program.precision == "fp16" and micro.backward == "twice":
            micro = replace(micro, backward="once")
        if reentrant or program.tokens or program.precision == "fp16" or not program.input_grad:
            # autograd.grad needs an input, and refuses reentrant checkpoints
            micro = replace(micro, before="")
        if micro.backward == "each" and micro.forwards == 1:
            micro = replace(micro, backward="once")
        if micro.routes:
            known = [tuple(i for i in route if i < len(program.layers)) for route in micro.routes]
            known += [known[0]] * (program.world - len(known))
            micro = replace(micro, routes=tuple(known[: program.world]))
        if micro.halves:
            micro = replace(micro, halves=tuple((micro.halves * program.world)[: program.world]))
        micros.append(micro)
    zero = "none" if step.zero == "keep" and step.assigned else step.zero
    if zero == "keep" and (program.world == 3 or program.precision == "fp16"):
        zero = "none"  # the average is multiplied back, which is exact for powers of two
    return replace(step, micros=tuple(micros), zero=zero)


def _differences(value: Any) -> dict[str, Any]:
    default = type(value)(0) if isinstance(value, Program) else type(value)()
    return {
        f.name: getattr(value, f.name)
        for f in fields(value)
        if getattr(value, f.name) != getattr(default, f.name)
    }


def _line(value: Any) -> str:
    shown = {
        name: item
        for name, item in _differences(value).items()
        if name not in ("layers", "steps", "micros")
    }
    return ", ".join(f"{name}={item!r}" for name, item in shown.items())


def describe(program: Program) -> str:
    """Return the program as text: what differs from the plainest program, a line per part."""
    lines = [f"Program({_line(program)})"]
    lines += [
        f"  layer {index}: Layer({_line(layer)})" for index, layer in enumerate(program.layers)
    ]
    for index, step in enumerate(program.steps):
        lines.append(f"  step {index}: Step({_line(step)})")
        lines += [f"    Micro({_line(micro)})" for micro in step.micros]
    return "\n".join(lines)
