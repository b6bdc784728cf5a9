"""Everything that is hung on the user's modules and tensors, in one file, and taken off again by
``remove``.

    module.forward  pre: gather the unit(s) of the parameters it needs
                    post: hook the outputs, release
    output tensor   grad: gather for backward
    input tensors   grad: the unit's backward is over
    parameter       after its gradient is accumulated: take it; used while released: gather it, or
                    refuse (released.py)
    module          state_dict: refuse released weights; load_state_dict: gather, then write back

Each module that holds parameters itself is hooked, and each module that spans a unit. So a
submodule called directly gathers its unit, and a gradient that enters a unit by a side door (an
auxiliary loss on an inner output) still finds the weights there.

[Note: compiled forwards] Dynamo runs the hooks as they are where it does not trace a module's call:
around ``torch.compile(model)``, ``module.compile()`` and a compiled ``module.forward``. Inside a
graph it traces another function in their place (``_torchdynamo_inline``): hooks of modules that
span a unit end the graph. The others do nothing there, nor do the hooks of a whole model with
weights that rest whole: all of them are waited for before it.

Nothing of torch is patched. The hooks hold the engine's parts, the user's tensors hold nothing.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback as traced  # None: by nobody
from torch._C._functorch import peek_interpreter_stack as peek_stack  # is None in no transform
from torch.compiler import is_dynamo_compiling
from torch.utils.hooks import RemovableHandle

from zeroshard.core.residency import UnitState, Use
from zeroshard.errors import StateError
from zeroshard.runtime.backward_pass import is_recomputed
from zeroshard.runtime.guards import (  # fmt: skip
    Watch,
    between_graphs,
    cast,
    casting_hooks,
    explain,
    guard,
    leave_alone,
)  # fmt: skip
from zeroshard.runtime.loop import Loop
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.trees import tensors_in, tensors_within
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.units import UnitPlan, roots_of
from zeroshard.state.local import local_of, part_within

_OWN_ATTRIBUTES = frozenset(nn.Module().__dict__)  # what every module has
_HOOK_NUMBERS = itertools.count(-1, -1)  # torch's own are positive


class _ParameterTie:
    """Ties a parameter to its engine (released.py), as its attribute until it is removed."""

    def __init__(
        self, hooks: Hooks, unit: Unit, segment: Segment, parameter: nn.Parameter, name: str
    ) -> None:
        self.name = name
        self.keeps_writes = segment.is_whole
        self.keeps_memory = segment.keeps_writes
        self._hooks = weakref.ref(hooks)  # [Note: weak hooks]
        self._unit = weakref.ref(unit)
        self._parameter = weakref.ref(parameter)
        parameter.__dict__["_zeroshard"] = self
        parameter.__dict__["set_"] = self.set

    def set(self, *source: Any) -> Any:
        """Stand in for ``parameter.set_()``: a parametrization that is registered in a forward (as
        PEFT does) sets the parameter to itself, which is no write.
        """
        parameter = self._parameter()
        if len(source) == 1 and source[0] is parameter:
            return parameter
        return torch.Tensor.set_(parameter, *source)  # type: ignore[arg-type]

    def gather(self, operation: str) -> None:
        hooks, unit = self._hooks(), self._unit()
        if hooks is None or unit is None:
            raise StateError(
                f"parameter {self.name!r} was sharded by an engine that is gone: keep the engine as"
                " long as the model"
            )
        hooks.loop.use(unit, self.name, operation)

    def watch(self, result: Any) -> None:
        hooks, unit = self._hooks(), self._unit()
        if hooks is not None and unit is not None and torch.is_grad_enabled():
            hooks.watcher((unit,))(result)
            # p.float() is p itself, and what follows is not seen
            hooks.loop.hold_parameters(result)

    def hold(self) -> None:
        hooks, unit = self._hooks(), self._unit()
        if hooks is not None and unit is not None:
            hooks.loop.hold(unit)

    def remove(self) -> None:
        parameter = self._parameter()
        if parameter is not None:
            parameter.__dict__.pop("_zeroshard", None)
            parameter.__dict__.pop("set_", None)


class _Bare:
    """Takes the hooks of inner modules out of the way of a forward that needs none of them: they
    cost a token of a small model a tenth of its time.

    A module where somebody else has a hook, too, keeps them all; `casts` are ours and stay.
    """

    def __init__(
        self, modules: Sequence[nn.Module], casts: Mapping[nn.Module, RemovableHandle]
    ) -> None:
        self._modules = list(modules)
        self._casts = casts
        self._hidden: list[tuple[dict[str, Any], Any, Any]] = []
        self._depth = 0  # forwards of the model within one another

    def enter(self, bare: bool) -> None:
        self._depth += 1
        if not bare or self._depth > 1:
            return
        for module in self._modules:
            before, after = module._forward_pre_hooks, module._forward_hooks
            cast = self._casts.get(module)
            stays = {} if cast is None else {cast.id: before[cast.id]}
            if len(before) == 1 + len(stays) and len(after) == 1:
                here = module.__dict__  # not through nn.Module's own, slow __setattr__
                self._hidden.append((here, before, after))
                here["_forward_pre_hooks"], here["_forward_hooks"] = (
                    OrderedDict(stays),
                    OrderedDict(),
                )

    def leave(self) -> None:
        self._depth = max(0, self._depth - 1)
        if self._hidden and not self._depth:
            for here, before, after in self._hidden:
                here["_forward_pre_hooks"], here["_forward_hooks"] = before, after
            self._hidden = []


class Hooks:
    """The hooks of one engine."""

    def __init__(
        self,
        model: nn.Module,
        plans: Sequence[UnitPlan],
        loop: Loop,
        *,
        input_dtype: torch.dtype | None,
        watch: Watch,
        write_back: Callable[[Unit, list[torch.Tensor]], None],
        owner: object,
    ) -> None:
        """`write_back` stores what ``load_state_dict()`` wrote; `owner` lives as long as the
        model.
        """
        self.model = model
        self.plans = plans
        self._write_back = write_back
        self.loop = loop
        self._owner = owner
        self._input_dtype = input_dtype
        self._watch = watch
        self._handles: list[Any] = []
        self._hook_id = RemovableHandle.next_id  # see `_with_one_id`
        RemovableHandle.next_id += 2  # one around each module's forward, one for casts
        # load_state_dict under way: per unit its context, its copies, modules still to load
        self._loads: dict[int, list[Any]] = {}
        self._watchers: dict[tuple[Unit, ...], Callable[..., None]] = {}
        units = loop.weights.units
        spans, needed = _needed(plans, units)
        guards = guard(model)
        self._handles += guards
        # attributes of modules in which no forward leaves a tensor
        self._own_attributes = _OWN_ATTRIBUTES.union(entry.name for entry in guards)
        for module, held in needed.values():
            ends = [unit for unit in held if (id(module), unit.index) in spans]
            alone = [unit for unit in held if not plans[unit.index].roots]  # no module spans them
            self._install_module(module, held, ends, [*ends, *alone])
        layers = {} if input_dtype is None else casting_hooks(model, input_dtype)
        casts = {
            layer: self._with_one_id(
                self._hook_id + 1, layer.register_forward_pre_hook, hook, with_kwargs=True
            )
            for layer, hook in layers.items()
        }
        roots = roots_of(model)
        inner = [
            module for module, _ in needed.values() if all(module is not root for root in roots)
        ]
        self._bare = _Bare(inner, casts)
        # after the modules: its pre-hook then comes before theirs, its post-hook after
        for root in roots:
            self._install_root(root)
        for module, held in needed.values():
            self._install_state(module, held)
        for unit in units:
            for segment in unit.segments:
                for name, parameter in zip(segment.names, segment.parameters, strict=True):
                    self._handles.append(_ParameterTie(self, unit, segment, parameter, name))
                segment.user_view.tie(released=unit.residency.state is not UnitState.FULL)
        # [Note: weak hooks] what hangs on a tensor is invisible to the garbage collector: it holds
        # nothing of the engine
        ids = dict[int, int]()
        for number, leaf in enumerate(loop.backward.parameters):
            hooked: Any = leaf.parameter  # the method is untyped in torch
            taker = loop.backward.taker(number, ids)
            self._handles.append(hooked.register_post_accumulate_grad_hook(taker))
            ids[number] = self._handles[-1].id

    def remove(self) -> None:
        """Take every hook off."""
        for segment in self.loop.weights.segments:
            segment.user_view.untie()
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ------------------------------------------------------------------ the model as a whole

    def _install_root(self, model: nn.Module) -> None:
        loop, weights = self.loop, self.loop.weights
        rests_whole = not any(unit.cells.weight.is_sharded for unit in weights.units)

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if is_dynamo_compiling() or traced() is not None:
                return before_compiled(module, args, kwargs)
            if hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable"):
                loop.compiled = rests_whole
            self._bare.enter(weights.nothing_to_do)
            if torch._C._current_graph_task_id() < 0:
                if not loop.between_sections:
                    loop.begin_forward()
                for called in loop.events.called:
                    called((args, kwargs))
            if loop.compiled:
                weights.finish_published()
            if self._input_dtype is None:
                return None
            return cast(args, self._input_dtype), cast(kwargs, self._input_dtype)

        @between_graphs
        def before_compiled(module: nn.Module, args: Any, kwargs: Any) -> Any:
            loop.compiled = rests_whole
            return before(module, args, kwargs)

        @between_graphs
        def after(module: nn.Module, args: Any, output: Any) -> None:
            loop.compiled = False
            if self._input_dtype is not None:
                explain(sys.exc_info()[1], model, self._input_dtype, self._watch)
            if torch._C._current_graph_task_id() < 0 and not loop.between_sections:
                loop.end_forward(output)
            self._bare.leave()

        @between_graphs
        def agree(module: nn.Module, args: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() < 0 and not (
                loop.between_sections or weights.nothing_to_do
            ):
                loop.agree()

        leave_alone(before, callees=False)  # which looks whether Dynamo is at work
        self._handles += [
            model.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            model.register_forward_hook(after, always_call=True),
            model.register_forward_hook(agree),  # not after an exception: others may not be here
        ]

    # ------------------------------------------------------------------ one module

    def _install_module(
        self, module: nn.Module, units: list[Unit], ends: list[Unit], computed: list[Unit]
    ) -> None:
        loop, weights, events = self.loop, self.loop.weights, self.loop.events
        schedule, task = weights.schedule, torch._C._current_graph_task_id
        # a tile: recomputed one at a time, too
        apart = bool(getattr(type(module), "unit_of_its_own", False))
        # by code that is not torch's
        reads_parameters = bool(module._parameters) and not type(module).__module__.startswith(
            "torch.nn."
        )
        # entries of such a module's dictionary, and names of those that may lead to tensors
        known, own_names = 0, set[str]()
        # of forwards under way, the number of the first autograd node that they can make
        begun: list[int] = []
        # of the same, whether one around it has all units, as most modules' have
        within: list[bool] = []
        residencies = [unit.residency for unit in units]
        watch, has_grad = self.watcher(units), torch.is_grad_enabled

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if loop.between_sections or (weights.shown and weights.nothing_to_do):
                return
            if reads_parameters:
                begun.append(torch._C._autograd._get_sequence_nr())
            for begins in events.before_module:
                begins(units)
            within.append(
                schedule.inside.issuperset(residencies)
                and (has_grad() or schedule.evaluates)
                and task() < 0
            )
            if not within[-1]:
                loop.begin_module(units)
            if ends and has_grad() and peek_stack() is None:
                self._watch_inputs(ends, args, kwargs)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            nonlocal known, own_names
            if loop.between_sections or (weights.shown and weights.nothing_to_do):
                return
            first = begun.pop() if begun else 0
            if output is not None and has_grad() and peek_stack() is None:
                watch(output)
                if reads_parameters:
                    held = module.__dict__
                    if len(held) != known or not own_names <= held.keys():
                        known, own_names = len(held), held.keys() - self._own_attributes
                    own = map(held.__getitem__, own_names)
                    watch([*args, *kwargs.values(), *own], first)
            for listener in events.computed if computed else ():
                listener(computed, output)
            if not (within and within.pop()):
                loop.end_module(units, output, apart=apart)
            for ends_now in events.after_module:
                ends_now()

        def in_graph(hook: Callable[..., None]) -> Callable[..., None]:
            between: Callable[..., None] = between_graphs(lambda *given: hook(*given))

            def traced_hook(*given: Any) -> None:  # in a forward, around which others are gathered
                if computed and not (loop.compiled or loop.between_sections):
                    between(*given)

            return traced_hook

        leave_alone(before, in_graph=in_graph(before))
        leave_alone(after, in_graph=in_graph(after))
        before_it, after_it = module.register_forward_pre_hook, module.register_forward_hook
        self._with_one_id(self._hook_id, before_it, before, with_kwargs=True, prepend=True)
        self._with_one_id(self._hook_id, after_it, after, with_kwargs=True, always_call=True)

    def _with_one_id(
        self, number: int, register: Callable[..., RemovableHandle], hook: Any, **options: bool
    ) -> RemovableHandle:
        """Register a hook under an id that the like hooks of all modules have, and nobody else's:
        Dynamo guards on ids (before torch 2.13 on all with keywords, else on those that are always
        called), and would compile each of many like blocks.
        """
        coming, RemovableHandle.next_id = RemovableHandle.next_id, number
        try:
            handle = register(hook, **options)
        finally:
            RemovableHandle.next_id = coming  # else hooks of others would take ids again
        self._handles.append(handle)
        return handle

    def watcher(self, units: Sequence[Unit]) -> Callable[..., None]:
        """Return a function that has `units` gathered when a gradient arrives at a tensor in its
        argument that autograd has made `since`; it leaves views their memory, see
        [Note: views that leave] in state/state.py.
        """
        key = tuple(units)
        if key in self._watchers:
            return self._watchers[key]
        weights, events = self.loop.weights, self.loop.events
        begin = self.loop.backward.begin_units
        flats = [segment.flat for unit in units for segment in unit.segments]
        buffers = [flat.buffer for flat in flats if flat.full_bytes]

        def watch(value: Any, since: int = 0) -> None:
            for tensor in (value,) if isinstance(value, torch.Tensor) else tensors_within(value):
                is_plain = type(tensor) is torch.Tensor
                # parameters are guarded themselves
                if buffers and (is_plain or not isinstance(tensor, nn.Parameter)):
                    address = (tensor if is_plain else local_of(tensor)).data_ptr()
                    for buffer in buffers:
                        if 0 <= address - buffer.tensor.data_ptr() < buffer.num_bytes:
                            buffer.leave()
                # held, else torch 2.13 crashes in register_hook on a view after a write to its base
                node = tensor.grad_fn
                # a leaf needs no weights, and would keep the hook
                if node is not None and (not since or node._sequence_nr() >= since):
                    hooks = tensor._backward_hooks  # as Tensor.register_hook does, without a handle
                    if hooks is None:
                        tensor._backward_hooks = hooks = OrderedDict()
                        node._register_hook_dict(tensor)
                    hooks[next(_HOOK_NUMBERS)] = partial(begin, key, weights.epoch, events)
                del node

        self._watchers[key] = watch
        return watch

    def _watch_inputs(self, units: list[Unit], args: Any, kwargs: Any) -> None:
        inputs: list[torch.Tensor] = []
        for tensor in tensors_in([*args, *kwargs.values()]):
            is_plain = type(tensor) is torch.Tensor
            if tensor.requires_grad and (is_plain or not isinstance(tensor, nn.Parameter)):
                inputs.append(tensor)
        if not inputs:
            return
        loop = self.loop
        # hooks that would stay for ever; autograd hands gradients of leaves over before it runs the
        # other nodes
        on_leaves: list[Any] = []
        num_inputs = len(inputs)
        waiting: dict[int, int] = {}  # graph task -> inputs still without a gradient
        # else nothing comes here: the first forward's hooks run
        counts = torch._C._current_graph_task_id() < 0 or is_recomputed()
        for unit in units if counts else ():
            unit.residency.acquire(Use.FOLLOWED)

        def arrived(grad: torch.Tensor) -> None:
            if grad.grad_fn is not None:  # create_graph=True
                self.watcher(units)(grad)
            for listener in loop.events.returned:
                listener(units, grad)
            task = torch._C._current_graph_task_id()
            waiting[task] = waiting.get(task, num_inputs) - 1
            if not waiting[task]:
                del waiting[task]
                loop.backward.after_inputs(units, counted=counts, before_others=bool(on_leaves))
                for hook in on_leaves:
                    hook.remove()

        # not torch's multi-grad hook: its closure holds the graph that holds it
        for tensor in inputs:
            hooks = tensor._backward_hooks  # most are outputs of a module of ours
            if hooks is not None and tensor.grad_fn is not None:
                hooks[next(_HOOK_NUMBERS)] = arrived  # register_hook would make a handle
                continue
            hook = tensor.register_hook(arrived)  # type: ignore[no-untyped-call]
            if tensor.grad_fn is None:
                on_leaves.append(hook)

    # ------------------------------------------------------------------ state_dict, load_state_dict

    def _install_state(self, module: nn.Module, units: list[Unit]) -> None:
        def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            for unit in units:
                if not unit.cells.weight.is_sharded:
                    self.loop.weights.unshard(unit, "read")  # its publish may be under way
                elif not (self.loop.weights.shown and unit.residency.state is UnitState.FULL):
                    raise StateError(
                        f"state_dict() of {prefix or 'the model'!r}: unit {unit.name!r} rests"
                        " sharded, its parameters are not here. Use engine.full_state_dict() on"
                        " every rank, or call state_dict() inside engine.gathered()"
                    )

        def before_load(
            module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *args: Any
        ) -> None:
            if metadata.get("assign_to_params_buffers"):
                raise StateError(
                    "load_state_dict(assign=True) would replace parameters that are sharded: leave"
                    " assign out, the numbers are copied"
                )
            for name, parameter in module._parameters.items():
                value = None if parameter is None else state.get(prefix + name)
                if parameter is not None and isinstance(value, torch.Tensor):
                    state[prefix + name] = part_within(parameter, value)
            for unit in units:
                if unit.index not in self._loads:
                    if unit.is_lent:
                        continue  # gathered() keeps, or drops, what is loaded into its copies
                    unit.residency.acquire(Use.USER)
                    self.loop.weights.unshard(unit, "read")
                    context = unit.writable()
                    self._loads[unit.index] = [context, context.__enter__(), 0]
                self._loads[unit.index][2] += 1

        def after_load(module: nn.Module, incompatible: Any) -> None:
            for unit in units:
                if unit.index not in self._loads:
                    continue
                self._loads[unit.index][2] -= 1
                if self._loads[unit.index][2]:
                    continue
                context, copies, _ = self._loads.pop(unit.index)
                context.__exit__(None, None, None)
                unit.residency.release(Use.USER)
                self._write_back(unit, copies)

        hooked: Any = module  # these three are untyped in torch
        self._handles.append(hooked.register_state_dict_pre_hook(before_save))
        self._handles.append(hooked.register_load_state_dict_pre_hook(before_load))
        self._handles.append(hooked.register_load_state_dict_post_hook(after_load))


def _needed(
    plans: Sequence[UnitPlan], units: Sequence[Unit]
) -> tuple[set[tuple[int, int]], dict[int, tuple[nn.Module, list[Unit]]]]:
    """Return which modules span which units, by id and index; and by id each module that needs
    units in its forward, with these units.
    """
    pairs = list(zip(plans, units, strict=True))
    spans = [(module, unit) for plan, unit in pairs for _, module in plan.roots]
    owners = [(module, unit) for plan, unit in pairs for _, module in plan.owners]
    needed: dict[int, tuple[nn.Module, list[Unit]]] = {}
    for module, unit in spans + owners:
        wanted = needed.setdefault(id(module), (module, []))[1]
        if unit not in wanted:
            wanted.append(unit)
    return {(id(module), unit.index) for module, unit in spans}, needed
