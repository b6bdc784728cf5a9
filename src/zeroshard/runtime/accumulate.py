"""``engine.accumulate()``: micro-batches in the vertical order, all of them in one section before
the next (runtime/accumulate.py), so that each unit is gathered twice per step however many
micro-batches there are.

    forward    section 1: every micro-batch . section 2: every micro-batch ... last section: one
               micro-batch, its loss, the loss's backward, the section's backward; the next one
    backward   ... section 2: every micro-batch again, with its backward . section 1 . reduce each
               unit's gradient, the sum of its micro-batches, once

The backward of what lies between sections runs piece by piece, driven from here: autograd never
waits inside a backward for another micro-batch.

In a run with leaves each micro-batch is one, and each unit is reduced once per round of them
(runtime/accumulate.py).

Invariants: a unit is gathered for a section and released when another one begins; the gradient of a
parameter that one section uses is the sum of the micro-batches in their order, in the dtype in
which gradients rest, and only then of the ranks: the bits of ``zero1`` in every row. Cost: the
forward of every section but none of what lies between runs twice; on the device, the activations
between two sections and their gradients of all micro-batches.

What it does not do: say where units are gathered (weights.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zeroshard.core.loss_scale import LossScaler
from zeroshard.core.residency import Use
from zeroshard.core.schedule import Phase
from zeroshard.errors import ConfigError, StateError
from zeroshard.runtime.backward import Backward
from zeroshard.runtime.backward_pass import is_checkpointed
from zeroshard.runtime.context import Context
from zeroshard.runtime.hooks import Hooks
from zeroshard.runtime.join import Draws, LeafLoop, silence, weighed
from zeroshard.runtime.leaves import Autocast, Leaves, MicroBatch, this_micro_batch
from zeroshard.runtime.shelf import RestPlace, Shelf
from zeroshard.runtime.trainable import Trained
from zeroshard.runtime.trees import is_cache, tensors_within
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.units import Stages, UnitPlan
from zeroshard.system.device import Device, undisturbed

# ----------------------------------------------------------------------------------------- sections
# Where a model is cut for ``engine.accumulate()``: modules that run for all micro-batches before
# the next one does.
#
# A section is a module with a forward that needs units: a block, or what holds the parameters of a
# unit that no block spans (an embedding, a head). Everything else of a forward runs between
# sections, and the units that it needs (parameters of a module around sections) are held as long as
# that lasts::
#
#     Net                 holds `scale` itself: around
#       embed             section
#       blocks.0 .. 3     section each; tiles and experts inside belong to it
#       norm, head        section each
#
# Invariants: no section lies inside another; every parameter belongs to a section's module or to a
# module around. The cut depends on the module tree alone, so that it is the same on every rank.


@dataclass(frozen=True, eq=False)
class Section:
    """A module, and the units that its forward needs."""

    name: str
    module: nn.Module
    units: tuple[Unit, ...]

    @cached_property
    def trains(self) -> bool:
        """Whether any of its parameters has a gradient."""
        return any(parameter.requires_grad for parameter in self.module.parameters())


@dataclass(frozen=True)
class Sections:
    """The sections of a model, and the units of modules around them."""

    sections: tuple[Section, ...]
    around: tuple[Unit, ...]


def sections_of(model: nn.Module, plans: Sequence[UnitPlan], units: Sequence[Unit]) -> Sections:
    """Return where `model` is cut; its `units` were planned as `plans`."""
    needing = {id(module) for plan in plans for _, module in (*plan.roots, *plan.owners)}
    in_order = [(name, module) for name, module in model.named_modules() if id(module) in needing]
    # what spans units, but for parts of blocks: tiles, and modules with a mesh of their own
    blocks = {
        id(module)
        for plan in plans
        for _, module in plan.roots
        if not plan.pattern and not getattr(type(module), "unit_of_its_own", False)
    }
    found: list[tuple[str, nn.Module]] = []
    around: set[int] = set()
    covered: set[int] = set()
    for name, module in in_order:
        is_block = id(module) in blocks and module is not model and not _parts(module) & blocks
        if is_block and id(module) not in covered:
            found.append((name, module))
            covered |= {id(module), *_parts(module)}
    for name, module in in_order:
        if id(module) in covered:
            continue
        if module is model or _parts(module) & covered:
            around.add(id(module))
        else:
            found.append((name, module))
            covered |= {id(module), *_parts(module)}
    held = [
        unit
        for plan, unit in zip(plans, units, strict=True)
        if any(id(module) in around for _, module in plan.owners)
    ]
    unit_of = {id(p): unit for unit in units for s in unit.segments for p in s.parameters}
    sections = []
    for name, module in found:
        needed = dict.fromkeys(unit_of[id(parameter)] for parameter in module.parameters())
        needs = tuple(sorted(needed, key=lambda unit: unit.index))
        sections.append(Section(name, module, needs))
    return Sections(tuple(sections), tuple(held))


def _parts(module: nn.Module) -> set[int]:
    """Return the modules inside `module`."""
    return {id(part) for part in module.modules() if part is not module}


# ----------------------------------------------------------------------------------------- boundary
# One micro-batch's visit of one section: what passes in and out, and the section's backward.
#
#     forward    inputs --kept--> [section without gradients] --> outputs, the ends of a graph
#     backward   gradients of the outputs (from what runs after the section) ..... collected here
#                inputs --> [section again, with gradients] --> backward --> gradients of the inputs
#                ..... pushed into what ran before the section, down to the sections before
#
# The graph of a micro-batch between sections is autograd's own and complete; it ends at outputs;
# their node hands gradients over to the visit. A visit keeps the edge to that graph of each input,
# so that no activation stays in memory on its behalf but where it is kept.
#
# Invariants: the section is run with the numbers, the random generators, the buffers and the
# autocast of its forward; gradients of an output are added in the order in which they come. Cost:
# the inputs at rest, the section's forward a second time.
#
# What it does not do: gather weights, or decide when anything runs (runtime/accumulate.py).


class Visit:
    """One micro-batch in one section. Made in the thread of the micro-batch."""

    def __init__(
        self,
        section: Section,
        forward: Callable[..., Any],
        inputs: tuple[tuple[Any, ...], dict[str, Any]],
        shelf: Shelf,
        device: torch.device,
    ) -> None:
        """`inputs`: the arguments of `forward`, the module's own, and the keywords."""
        self.section = section
        self._forward = forward
        self._shelf = shelf
        self._devices = [Device.of(name) for name in sorted({"cpu", str(device)})]
        self._autocast = Autocast(device)
        self._leaves, self._spec = tree_flatten(inputs, is_leaf=is_cache)
        for leaf in filter(is_cache, self._leaves):
            raise ConfigError(
                f"module {section.name!r} was given a {type(leaf).__name__}, which"
                " engine.accumulate() would fill twice: call the model with use_cache=False"
            )
        # by place among the leaves: the edge of an input through which its gradient goes on
        self._edges = {
            place: torch.autograd.graph.get_gradient_edge(leaf)
            for place, leaf in enumerate(self._leaves)
            if _travels(leaf) and leaf.requires_grad and torch.is_grad_enabled()
        }
        self.needs_backward = torch.is_grad_enabled() and (bool(self._edges) or section.trains)
        self._versions: dict[int, int] = {}
        self._generators: list[torch.Tensor] | None = None  # where the forward has drawn from them
        self._output: tuple[list[Any], TreeSpec] | None = None
        self._places: list[int] = []  # of outputs that gradients come to
        self._grads: list[torch.Tensor | None] = []  # of these outputs

    # ------------------------------------------------------------------ forward

    def run(self, *, checks: bool) -> None:
        """Run the section without gradients. `checks`: look for tensors that nobody can follow."""
        inputs = [leaf.detach() if _travels(leaf) else leaf for leaf in self._leaves]
        versions = [leaf._version if _travels(leaf) else 0 for leaf in inputs]
        generators = self._states()
        args, kwargs = tree_unflatten(inputs, self._spec)
        with torch.no_grad(), self._autocast.entered():
            value = self._forward(*args, **kwargs)
        leaves, spec = tree_flatten(value)
        self._output = leaves, spec
        if self.needs_backward:
            if not all(map(torch.equal, generators, self._states())):
                self._generators = generators
            for leaf, version in zip(inputs, versions, strict=True):
                if _travels(leaf) and leaf._version != version:
                    raise StateError(
                        f"module {self.section.name!r} writes to its input in place, and"
                        " engine.accumulate() runs it again from that: let it write to a copy"
                    )
            self._packed = [
                self._shelf.pack(leaf) if _travels(leaf) and leaf.is_floating_point() else leaf
                for leaf in inputs
            ]
            packed = enumerate(self._packed)
            self._versions = {place: leaf._version for place, leaf in packed if _travels(leaf)}
            self._places = [place for place, leaf in enumerate(leaves) if _is_float(leaf)]
            self._grads = [None] * len(self._places)
            if checks:
                self._refuse_hidden()
        self._leaves = []

    def outputs(self) -> Any:
        """In the thread: return what the module returns, as the ends of a graph."""
        assert self._output is not None, self.section.name
        (leaves, spec), self._output = self._output, None
        if self._places:
            anchor = torch.empty(0, requires_grad=True)
            ends = [leaves[place].detach() for place in self._places]
            made = _End.apply(anchor, self, ends)  # type: ignore[no-untyped-call]
            for place, tensor in zip(self._places, made, strict=True):
                leaves[place] = tensor
        return tree_unflatten(leaves, spec)

    def receive(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Gradients of the outputs have come, perhaps not the last."""
        for place, grad in enumerate(grads):
            if grad is not None:
                known = self._grads[place]
                self._grads[place] = grad if known is None else known + grad

    # ------------------------------------------------------------------ backward

    def ahead(self) -> None:
        """Start bringing the inputs back."""
        if self.needs_backward:
            self._shelf.ahead()

    def backward(self, watch: Callable[[Any], None], *, checks: bool, counts: bool = True) -> None:
        """Run the section again and its backward, and push the gradients of the inputs on.

        `watch` is given the outputs before the backward. `checks`: look for tensors that nobody can
        follow. Unless it `counts`, zeros make zeros.
        """
        if not self.needs_backward or all(grad is None for grad in self._grads):
            self._end()
            return
        inputs = self._inputs()
        args, kwargs = tree_unflatten(inputs, self._spec)
        with self._as_before(), self._autocast.entered(), torch.enable_grad():
            leaves, _ = tree_flatten(self._forward(*args, **kwargs))
        pairs = [
            (leaves[place], grad)
            for place, grad in zip(self._places, self._grads, strict=True)
            if grad is not None and leaves[place].requires_grad
        ]
        if checks:
            self._refuse_kept()
        outputs, grads = [output for output, _ in pairs], [grad for _, grad in pairs]
        watch(outputs)
        if not counts:
            before = [edge.node for edge in self._edges.values()]
            silence([*(output.grad_fn for output in outputs), *before])
        del leaves, pairs, args, kwargs
        self._grads = []
        if outputs:
            torch.autograd.backward(outputs, grads)
        del outputs, grads
        came = [
            (edge, inputs[place].grad)
            for place, edge in self._edges.items()
            if inputs[place].grad is not None
        ]
        del inputs
        self._end()
        if came:
            edges, grads = [edge for edge, _ in came], [grad for _, grad in came]
            # kept: the graphs of other inputs meet it before this one
            torch.autograd.backward(edges, grads, retain_graph=True)

    def _inputs(self) -> list[Any]:
        """Return the inputs, as leaves of a graph where their gradients go on."""
        out: list[Any] = []
        for place, packed in enumerate(self._packed):
            if self._versions.get(place, None) not in (None, getattr(packed, "_version", None)):
                raise StateError(
                    f"an input of module {self.section.name!r} was written to in place after its"
                    " forward, and engine.accumulate() runs it again from that: write to a copy"
                )
            leaf = packed
            if not isinstance(packed, nn.Parameter):
                leaf = self._shelf.unpack(packed)
            out.append(leaf.detach().requires_grad_() if place in self._edges else leaf)
        return out

    @contextmanager
    def _as_before(self) -> Iterator[None]:
        """Have the random generators inside as they were in the forward, and leave them and the
        running statistics of norms as they are now.

        A norm does not say that it has written to them, so others stand in for them.
        """
        norms = [m for m in self.section.module.modules() if isinstance(m, _NormBase)]
        own = [dict(norm._buffers) for norm in norms]
        now = None if self._generators is None else self._states()
        try:
            if self._generators is not None:
                self._set_states(self._generators)
            for norm, buffers in zip(norms, own, strict=True):
                norm._buffers.update(
                    {name: None if one is None else one.clone() for name, one in buffers.items()}
                )
            yield
        finally:
            if now is not None:
                self._set_states(now)
            for norm, buffers in zip(norms, own, strict=True):
                norm._buffers.update(buffers)

    def _end(self) -> None:
        """Let go of everything."""
        self._packed, self._edges, self._grads = [], {}, []

    def _states(self) -> list[torch.Tensor]:
        """Return the states of the random generators."""
        return [device.generator_state() for device in self._devices]

    def _set_states(self, states: Sequence[torch.Tensor]) -> None:
        for device, state in zip(self._devices, states, strict=True):
            device.set_generator_state(state)

    # ------------------------------------------------------------------ refusals

    def _refuse_hidden(self) -> None:
        """Raise ConfigError where tensors that need gradients pass in or out inside of objects,
        where nobody can take their place.
        """
        assert self._output is not None
        for leaves, verb in ((self._leaves, "is given"), (self._output[0], "returns")):
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor):
                    continue
                hidden = tensors_within(leaf)
                if leaves is self._leaves:
                    hidden = [one for one in hidden if one.requires_grad and _travels(one)]
                if any(map(_is_float, hidden)):
                    raise ConfigError(
                        f"module {self.section.name!r} {verb} a {type(leaf).__name__}, inside of"
                        " which engine.accumulate() cannot follow gradients: pass tensors, or"
                        " lists, tuples and dicts of them"
                    )

    def _refuse_kept(self) -> None:
        """Raise ConfigError where the section has kept a tensor that needs gradients in an
        attribute: what it was in the forward had none.
        """
        for name, module in self.section.module.named_modules():
            for attribute, value in vars(module).items():
                if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                    where = ".".join(filter(None, (self.section.name, name, attribute)))
                    raise ConfigError(
                        f"{where} is a tensor that needs gradients, and engine.accumulate() follows"
                        " what a module returns alone: let it return that, or keep its detach()"
                    )


class _End(torch.autograd.Function):
    """The outputs of a section, where the graph of a micro-batch ends."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, visit: Visit, outputs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ...]:
        ctx.visit = visit
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.visit.receive(grads)
        return None, None, None


def _travels(leaf: Any) -> bool:
    """Whether `leaf` is a tensor with numbers that are an input; a parameter stands for itself."""
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


# --------------------------------------------------------------------------------------- leaf turns
# The leaves of one ``engine.accumulate()``: each unit is reduced once per round of leaves, as in
# the loop over them, but unit after unit.
#
#     loop         leaf 0: units 2 1 0     leaf 3: units 2 1 0     leaf 6: units 2 1 0
#     accumulate   unit 2: leaves 0 3 6    unit 1: leaves 0 3 6    unit 0: leaves 0 3 6
#
# A unit that several sections use (an embedding and a head) gets parts of each leaf's gradient in
# all of them, and a leaf's parts are added before leaves are. So each leaf's gradients of such a
# unit are kept until its last section has run, where inputs of visits rest.
#
# Invariant: sums and random numbers are the same as in the loop. Cost: the gradients that are kept.


class LeafTurns:
    """Runs the leaves in turn, and buffers the gradients of the others."""

    def __init__(self, leaves: Leaves, draws: Draws, backward: Backward, place: RestPlace) -> None:
        """`draws` belong to this rank's leaves; gradients are kept at `place`."""
        self._leaves, self._draws, self._backward = leaves, draws, backward
        self._shelf = Shelf(place, chained=False)
        self._number = 0  # the current round, and this rank's leaf of it
        self._ending: Sequence[Unit] = ()  # units in their last section
        self._ended: set[Unit] = set()
        self._kept: dict[Unit, dict[tuple[int, Trained], Any]] = {}

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Run this rank's leaf `number` inside, with its random numbers."""
        self._go_to(number)
        with self._draws.of(number):
            yield

    def _go_to(self, number: int) -> None:
        self._number = number
        self._leaves.turn(number)

    def keep(self, trained: Trained, grad: torch.Tensor) -> bool:
        """Keep a gradient that a section to come may add to; return whether it is kept."""
        if trained.unit in self._ending or trained.unit in self._ended:
            return False
        kept, key = self._kept.setdefault(trained.unit, {}), (self._number, trained)
        if key in kept:
            grad = self._shelf.unpack(kept[key]) + grad
        kept[key] = self._shelf.pack(grad)
        return True

    def begin_section(self, ending: Sequence[Unit]) -> None:
        """The backward has come to the last section of the units `ending`."""
        self._ending = [unit for unit in ending if unit.trainable]

    def reduce(self) -> None:
        """The current leaf has run in this section: hand the ending units over."""
        reductions = self._backward.reductions
        for unit in self._ending:
            kept = self._kept.get(unit, {})
            for key in [key for key in kept if key[0] == self._number]:  # of the current leaf
                trained, grad = key[1], self._shelf.unpack(kept.pop(key))
                trained.bucket.add(trained.index, grad, sync=True)
            if self._leaves.is_last:
                self._backward.complete(unit, has_all=True)
            else:
                reductions.start(unit, sync=True, with_earlier=True)
                reductions.advance()

    def end_section(self, done: int) -> None:
        """Hand the ending units over in the rounds after this rank's first `done` leaves."""
        for number in range(done, self._leaves.num_rounds):
            self._go_to(number)
            for unit in self._ending if number >= len(self._leaves.of_rank) else ():
                self._backward.reductions.open_zeros(unit, sync=True)  # as ranks with a leaf do
            self.reduce()
        self._ended.update(self._ending)
        self._ending = ()

    def end(self, trained: Sequence[Unit]) -> None:
        """All sections have run: hand over what is left of the units `trained`."""
        for unit in reversed(trained):
            if unit not in self._ended:
                self.begin_section([unit])
                self.end_section(0)


# --------------------------------------------------------------------------------------- accumulate

# of a batch: its loss, 0-d, or the loss and what it counts
LossFn = Callable[[Any], torch.Tensor | tuple[torch.Tensor, float | torch.Tensor]]


@dataclass(frozen=True)
class Accumulated:
    """The losses of the micro-batches of one ``engine.accumulate()``, on this rank."""

    losses: torch.Tensor  # [micro-batches], without gradients
    weights: tuple[float, ...] | None  # what they count; None where `loss_fn` has not said

    @property
    def loss(self) -> torch.Tensor:
        """Their mean, 0-d: with weights that over all samples or tokens of this rank."""
        if self.weights is None:
            return self.losses.mean()
        weights = self.losses.new_tensor(self.weights)
        counted = torch.where(weights > 0, self.losses * weights, 0.0)
        return counted.sum() / weights.sum()


class Accumulate:
    """One use of ``engine.accumulate()``."""

    def __init__(
        self, hooks: Hooks, context: Context, scaler: LossScaler | None, place: RestPlace
    ) -> None:
        """`place` is where the inputs of visits rest."""
        self._loop = hooks.loop
        self._weights, self._backward = hooks.loop.weights, hooks.loop.backward
        self._watcher = hooks.watcher
        self._device = context.device
        self._scaler = scaler
        self._place = place
        cut = sections_of(hooks.model, hooks.plans, self._weights.units)
        self._sections, self._around = cut.sections, cut.around
        self._trained = [unit for unit in self._weights.units if unit.trainable]
        self._held: tuple[Unit, ...] = ()  # by the section that runs
        self._losses: list[torch.Tensor] = []
        self._counts: list[float | None] = []  # what they count
        self._left: Counter[Unit] = Counter()  # sections to come in the backward
        self._turns: LeafTurns | None = None  # of leaves

    def run(self, batches: Iterable[Any], loss_fn: LossFn) -> Accumulated:
        """Run all of it; see Engine.accumulate."""
        leaves = self._backward.leaves
        if leaves is None:
            return self._run(list(batches), loss_fn)
        if not isinstance(batches, LeafLoop):
            raise ConfigError(
                f"engine.accumulate() of leaves={leaves.tree} takes the leaves of a step for its"
                " batches: engine.accumulate(engine.leaves(step), loss_fn), and loss_fn a leaf's"
                " number"
            )
        draws = batches.begin_all(leaves)
        self._turns = LeafTurns(leaves, draws, self._backward, self._place)
        with undisturbed(self._device), leaves.at_once(self._turns.keep):
            return self._run(leaves.of_rank, loss_fn)

    def _run(self, batches: Sequence[Any], loss_fn: LossFn) -> Accumulated:
        if not batches:
            raise ConfigError("engine.accumulate() was given no batches: give one or more")
        micro_batches = [
            MicroBatch[Visit](index, partial(loss_fn, batch), self._device)
            for index, batch in enumerate(batches)
        ]
        with ExitStack() as stack:
            stack.enter_context(self._in_forward())
            stack.enter_context(self._stopping())
            for one in micro_batches:
                stack.callback(one.end)
            self._backward_of(self._forward(micro_batches, stack))
            if self._turns is not None:
                self._turns.end(self._trained)
        weights = [weight for weight in self._counts if weight is not None]
        return Accumulated(torch.stack(self._losses), tuple(weights) or None)

    @contextmanager
    def _in_forward(self) -> Iterator[None]:
        """Hold the units of modules around sections inside, for one forward of the model."""
        self._loop.begin_forward()
        try:
            self._hold(self._around, "forward")
            yield
        finally:
            self._release(self._around, "backward")
            with torch.no_grad():  # no graph is left
                self._loop.end_forward(None)

    @contextmanager
    def _stopping(self) -> Iterator[None]:
        """Let calls of sections inside wait in the threads of micro-batches."""
        before = [section.module.__dict__.get("forward") for section in self._sections]
        for section in self._sections:
            own = section.module.forward
            section.module.__dict__["forward"] = partial(self._visit, section, own)
        try:
            yield
        finally:
            self._release(self._held, "backward")
            for section, forward in zip(self._sections, before, strict=True):
                del section.module.__dict__["forward"]
                if forward is not None:
                    section.module.__dict__["forward"] = forward

    def _visit(
        self, section: Section, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Stand for the forward of a section's module."""
        here = this_micro_batch()
        if here is None:
            return forward(*args, **kwargs)
        if is_checkpointed():
            raise ConfigError(
                f"module {section.name!r} runs inside a reentrant checkpoint, which would run it"
                " again for each micro-batch by itself: pass use_reentrant=False, or leave the"
                " checkpoint out"
            )
        shelf = Shelf(self._place, chained=False)
        visit = Visit(section, forward, (args, kwargs), shelf, self._device)
        here.pause(visit)
        return visit.outputs()

    # ------------------------------------------------------------------ units that are here

    def _hold(self, units: Sequence[Unit], phase: Phase) -> None:
        for unit in units:
            unit.residency.acquire(Use.SECTION)
            self._weights.unshard(unit, phase)

    def _release(self, units: Sequence[Unit], phase: Phase) -> None:
        for unit in units:
            unit.residency.release(Use.SECTION)
            if unit.residency.is_held:
                continue
            if phase == "forward":
                self._weights.after_forward(unit)
            else:
                self._weights.after_backward(unit)

    def _enter(self, section: Section, phase: Phase) -> None:
        """Have the units of `section` here, and no longer the units of the section before."""
        before, self._held = self._held, section.units
        self._release([unit for unit in before if unit not in section.units], phase)
        self._hold([unit for unit in section.units if unit not in before], phase)

    # ------------------------------------------------------------------ forward

    def _forward(
        self, micro_batches: Sequence[MicroBatch[Visit]], stack: ExitStack
    ) -> list[list[Visit]]:
        """Run all forwards, and the backward of the last section; return the visits of the others,
        in order. The backward is begun on `stack`.
        """
        rounds: list[list[Visit]] = []
        calls = [self._go_on(one) for one in micro_batches]
        while True:
            visits = _alike(calls)
            if not visits:  # nothing of the model has run
                for one in micro_batches:
                    self._take_loss(one, stack)
                break
            self._enter(visits[0].section, "forward")
            calls = []
            for one, visit in zip(micro_batches, visits, strict=True):
                with self._turn(one.index):
                    visit.run(checks=one.index == 0)
                calls.append(self._go_on(one))
                if calls[0] is not None:
                    continue
                if one.index == 0:  # the last section has run: its backward comes first
                    sections = [there[0].section for there in (*rounds, visits)]
                    self._left = Counter(unit for section in sections for unit in section.units)
                    self._begin_backward(sections[-1])
                _alike(calls)
                self._take_loss(one, stack)
                self._backward_in(visit, one.index)
            rounds.append(visits)
            if calls[0] is None:
                if self._turns is not None:  # before ranks meet: others may have had one more leaf
                    self._turns.end_section(len(visits))
                break
        self._loop.agree()
        if rounds:
            self._complete(rounds.pop())
        return rounds

    def _go_on(self, one: MicroBatch[Visit]) -> Visit | None:
        """Let a micro-batch run to its next section."""
        with self._turn(one.index), self._loop.outside_sections():
            return one.go_on()

    def _turn(self, index: int) -> AbstractContextManager[None]:
        """Run micro-batch `index` inside."""
        return nullcontext() if self._turns is None else self._turns.of(index)

    # ------------------------------------------------------------------ backward

    def _take_loss(self, one: MicroBatch[Visit], stack: ExitStack) -> None:
        """The run of a micro-batch has ended: run the backward of its loss, down to the last
        section. The first micro-batch begins the backward of all, on `stack`.
        """
        weight, loss = None, one.take()
        if isinstance(loss, tuple) and len(loss) == 2:
            loss, weight = loss
        if not isinstance(loss, torch.Tensor) or loss.dim() or not loss.requires_grad:
            is_tensor = isinstance(loss, torch.Tensor)
            shown = f"a tensor {list(loss.shape)}" if is_tensor else repr(loss)
            raise ConfigError(
                f"loss_fn has returned {shown}: engine.accumulate() takes a loss, a 0-d tensor that"
                " needs gradients, or a pair of one and the number of samples or tokens that it"
                " counts"
            )
        for listener in self._loop.events.lost:
            listener(loss)
        with self._turn(one.index), weighed(self._backward, self._scaler, loss, weight) as scaled:
            count = self._backward.mode.weight
            if one.index:
                self._backward.accumulation.weigh(count)
            else:
                stack.enter_context(self._backward.of_schedule(self._trained, gathers=True))
            # kept: the graphs of other sections' inputs meet this one
            torch.autograd.backward([scaled], retain_graph=True)
        self._losses.append(loss.detach())
        self._counts.append(count)

    def _backward_of(self, rounds: list[list[Visit]]) -> None:
        """Run the backward of all sections but the last."""
        while rounds:
            visits = rounds.pop()
            if any(visit.needs_backward for visit in visits):
                self._enter(visits[0].section, "backward")
            self._begin_backward(visits[0].section)
            coming = [*visits[1:], *(rounds[-1][:1] if rounds else ())]
            for index, visit in enumerate(visits):
                for after in coming[index : index + 1]:
                    after.ahead()
                self._backward_in(visit, index)
            self._complete(visits)

    def _backward_in(self, visit: Visit, index: int) -> None:
        """Run the backward of micro-batch `index` in one section."""
        weight = self._counts[index]
        counts = self._backward.share if weight is None else weight
        watch = self._watcher(visit.section.units)
        scaled = self._scaler is not None
        mode = {"has_loss": True, "scaled": scaled, "weight": weight}
        with self._turn(index), self._backward.running_as(**mode):
            visit.backward(watch, checks=index == 0, counts=counts != 0)
        if self._turns is not None:
            self._turns.reduce()

    def _begin_backward(self, section: Section) -> None:
        if self._turns is not None:
            self._turns.begin_section(self._ending(section))

    def _ending(self, section: Section) -> list[Unit]:
        """Return the units that no section after `section` uses in the backward, but those around,
        which the graphs between sections may use.
        """
        return [
            unit
            for unit in section.units
            if self._left[unit] == 1
            and not (unit.residency.has(Use.DIRECT) or unit in self._around)
        ]

    def _complete(self, visits: Sequence[Visit]) -> None:
        """Hand over the units that have run their last section."""
        ending = self._ending(visits[0].section)
        self._left.subtract(visits[0].section.units)
        if self._turns is not None:
            self._turns.end_section(len(visits))
            return
        for unit in ending:
            self._backward.complete(unit, has_all=True)


def _alike(calls: Sequence[Visit | None]) -> list[Visit]:
    """Return where all micro-batches wait, the same section; nothing where all have ended.

    Raises StateError where they do not.
    """
    places = [None if call is None else call.section for call in calls]
    for index, place in enumerate(places):
        if place is not places[0]:
            first, other = (
                "its loss" if at is None else repr(at.name) for at in (places[0], place)
            )
            raise StateError(
                f"micro-batch 0 has come to {first} and micro-batch {index} to {other}:"
                " engine.accumulate() takes micro-batches that use the same modules in the same"
                " order; run others with no_sync()"
            )
    return [call for call in calls if call is not None]


def check_accumulate(hooks: Hooks, *, followed: bool) -> None:
    """Raise ConfigError where somebody else drives micro-batches, and StateError where no gradients
    are made.
    """
    if isinstance(hooks.model, Stages) or followed:
        raise ConfigError(
            "engine.accumulate() runs the micro-batches of a whole model, and a schedule runs those"
            " of these stages: call the schedule's step()"
        )
    if hooks.loop.backward.announce is not None:
        raise ConfigError(
            "engine.accumulate() inside engine.join(): a rank without data cannot shadow"
            " it; run the micro-batches with no_sync()"
        )
    if not torch.is_grad_enabled():
        raise StateError("engine.accumulate() without gradients: leave torch.no_grad() first")
