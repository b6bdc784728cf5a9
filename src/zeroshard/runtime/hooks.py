"""Everything that is hung on the user's modules and tensors, in one file, and taken off again by
``remove``.

    module.forward  pre: gather the unit(s) whose parameters it needs
                    post: hook the outputs, release
    output tensor   grad: gather for backward
    input tensors   grad: the unit's backward is over
    parameter       after its gradient is accumulated: take it; used while released: gather it, or
                    refuse (released.py)
    module          state_dict: refuse released weights; load_state_dict: gather, then write back

Each module that holds parameters itself is hooked, and each module that spans a unit. So a
submodule called directly gathers its unit, and a gradient that enters a unit by a side door (an
auxiliary loss on an inner output) still finds the weights there.

Nothing of torch is patched. The hooks hold the engine's parts, the user's tensors hold nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zeroshard.core.launched import heartbeat
from zeroshard.errors import ConfigError, StateError
from zeroshard.runtime.backward import Backward, retains_graph
from zeroshard.runtime.casts import cast, casting_hooks, explain
from zeroshard.runtime.guards import compiled_whole, guard, is_traced
from zeroshard.runtime.recomputed import count_recomputations, is_checkpointed, is_recomputed
from zeroshard.runtime.released import release_class, restore_class
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.trees import tensors_in, tensors_within
from zeroshard.runtime.unit import Unit, UnitState, Use
from zeroshard.runtime.units import UnitPlan
from zeroshard.runtime.weights import Phase, Until, Weights, in_transform

__all__ = ["Hooks"]


_OWN_ATTRIBUTES = frozenset(nn.Module().__dict__)  # what every module has


class _Tie:
    """What a parameter knows of its engine (released.py); it is an attribute of the parameter
    until it is removed.
    """

    def __init__(self, hooks: Hooks, unit: Unit, parameter: nn.Parameter, name: str) -> None:
        self.name = name
        self._hooks = weakref.ref(hooks)  # [Note: weak hooks]
        self._unit = weakref.ref(unit)
        self._parameter = weakref.ref(parameter)
        parameter.__dict__["_zeroshard"] = self

    def gather(self, operation: str) -> None:
        hooks, unit = self._hooks(), self._unit()
        if hooks is None or unit is None:
            raise StateError(
                f"parameter {self.name!r} was sharded by an engine that is gone: keep the engine as"
                " long as the model"
            )
        hooks.use(unit, self.name, operation)

    def watch(self, result: Any) -> None:
        hooks, unit = self._hooks(), self._unit()
        if hooks is not None and unit is not None and torch.is_grad_enabled():
            hooks.watch_outputs([unit], result)
            hooks.hold_parameters(result)  # p.float() is p itself, and what follows is not seen

    def hold(self) -> None:
        hooks, unit = self._hooks(), self._unit()
        if hooks is not None and unit is not None:
            hooks.hold(unit)

    def remove(self) -> None:
        parameter = self._parameter()
        if parameter is not None:
            restore_class(parameter)
            parameter.__dict__.pop("_zeroshard", None)


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
        weights: Weights,
        backward: Backward,
        *,
        input_dtype: torch.dtype | None,
    ) -> None:
        self.model = model
        self.may_save = False  # inside gathered(): state_dict() gives full tensors
        # set by the engine: store what load_state_dict wrote
        self.write_back: Callable[[Unit, list[torch.Tensor]], None] | None = None
        self._check: Callable[[], None] = lambda: None
        self._agree: Callable[[], None] | None = None
        self._broadcast: Callable[[torch.Tensor], None] | None = None
        self._weights = weights
        self._backward = backward
        self._input_dtype = input_dtype
        self._beat = heartbeat()
        # while a forward is watched, after steps that were not finite
        self._trace: torch.autograd.graph.saved_tensors_hooks | None = None
        self._handles: list[Any] = []
        # load_state_dict under way: per unit its context, its copies, modules still to load
        self._loads: dict[int, list[Any]] = {}
        # the hooks of outputs, by units, and the epoch that they belong to
        self._arrivals: dict[tuple[Unit, ...], tuple[int, Callable[[torch.Tensor], None]]] = {}
        spans, needed = _needed(plans, weights.units)
        self._handles += guard(model)
        for module, units in needed.values():
            ends = [unit for unit in units if (id(module), unit.index) in spans]
            inside = [
                unit
                for part in module.modules()
                if part is not module and id(part) in needed
                for unit in needed[id(part)][1]
            ]
            for unit in units:
                unit.holds_others = unit.holds_others or any(other is not unit for other in inside)
            self._install_module(module, units, ends)
        layers = {} if input_dtype is None else casting_hooks(model, input_dtype)
        casts = {
            layer: layer.register_forward_pre_hook(hook, with_kwargs=True)
            for layer, hook in layers.items()
        }
        self._handles += casts.values()
        self._bare = _Bare([module for module, _ in needed.values() if module is not model], casts)
        # after the modules: its pre-hook then comes before theirs, its post-hook after
        self._install_root(model)
        for module, units in needed.values():
            self._install_state(module, units)
        for unit in weights.units:
            for segment in unit.segments:
                self._tie_parameters(unit, segment)
        self._install_parameters()

    def connect(
        self,
        *,
        check: Callable[[], None],
        agree: Callable[[], None] | None,
        broadcast: Callable[[torch.Tensor], None] | None,
    ) -> None:
        """Take what a forward of the model calls: before it `check`, which refuses it after a tier
        has failed, and `broadcast`, which gives a buffer of rank 0's to every rank; after it
        `agree`, which raises on every rank what a tier has failed with on one.
        """
        self._check, self._agree, self._broadcast = check, agree, broadcast

    def remove(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # ------------------------------------------------------------------ the model as a whole

    def _install_root(self, model: nn.Module) -> None:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if torch.compiler.is_compiling() or is_traced():
                raise compiled_whole(f"torch.compile around {type(model).__name__}")
            self._bare.enter(self._weights.nothing_to_do)
            if torch._C._current_graph_task_id() < 0:
                if self._backward.running:
                    raise StateError(
                        "the last backward did not finish: call engine.reset() on every rank after"
                        " an exception"
                    )
                self._check()
                self._check_frozen()
                self._backward.tell("forward")
                self._beat()
                self._weights.begin("forward")
                self._weights.enter()
                self._weights.evaluates = not (torch.is_grad_enabled() or is_checkpointed())
                if self._backward.traced_steps and torch.is_grad_enabled():
                    self._trace = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
                    self._trace.__enter__()
                if self._broadcast is not None:
                    for buffer in model.buffers():
                        self._broadcast(buffer)
            return (
                None
                if self._input_dtype is None
                else (cast(args, self._input_dtype), cast(kwargs, self._input_dtype))
            )

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._input_dtype is not None:
                explain(sys.exc_info()[1], model, self._input_dtype)
            if torch._C._current_graph_task_id() < 0:
                if self._trace is not None:
                    self._trace.__exit__()
                    self._trace = None
                if self._weights.running == 1 and not self._weights.nothing_to_do:
                    self.hold_parameters(output)
                self._weights.end_pass()
                self._weights.leave()
                self._weights.evaluates = False
            self._bare.leave()

        self._handles.append(
            model.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        )

        def agree(module: nn.Module, args: Any, output: Any) -> None:
            if (
                self._agree is not None
                and torch._C._current_graph_task_id() < 0
                and not self._weights.nothing_to_do
            ):
                self._agree()

        self._handles.append(model.register_forward_hook(after, always_call=True))
        # not after an exception: the other ranks may not be here
        self._handles.append(model.register_forward_hook(agree))

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Unit | None, str]:
        """Note of which unit a tensor is that autograd saves, and of which parameter."""
        for unit in self._weights.units:
            if unit.state is UnitState.FULL and unit.cells.weight.is_sharded:
                name = unit.parameter_at(tensor.data_ptr())
                if name is not None:
                    return tensor, unit, name
        return tensor, None, ""

    def _unpack(self, saved: tuple[torch.Tensor, Unit | None, str]) -> torch.Tensor:
        tensor, unit, name = saved
        if unit is None or unit.state is UnitState.FULL:
            return tensor
        self._backward.read_released = self._backward.read_released or name
        return torch.full_like(tensor, float("nan"))

    def shadow_forward(self) -> None:
        """Take part in a forward of the other ranks, without one of our own: what their gathers
        need of us.
        """
        for _ in self._weights.shadow("forward"):
            pass
        if self._broadcast is not None:
            for buffer in self.model.buffers():
                self._broadcast(buffer)
        if self._agree is not None:
            self._agree()

    def _check_frozen(self) -> None:
        for unit in self._weights.units:
            if not unit.has_frozen:
                continue
            for segment in unit.segments:
                if segment.grad is None:
                    for name, parameter in zip(segment.names, segment.parameters, strict=True):
                        if parameter.requires_grad:
                            raise ConfigError(
                                f"parameter {name!r} was frozen when the model was sharded and"
                                " requires a gradient now: set requires_grad before shard(), or"
                                " close() the engine and shard() again"
                            )

    # ------------------------------------------------------------------ one module

    def _install_module(self, module: nn.Module, units: list[Unit], ends: list[Unit]) -> None:
        weights = self._weights
        # a tile: recomputed one at a time, too
        apart = bool(getattr(type(module), "unit_of_its_own", False))
        # by code that is not torch's
        reads_parameters = bool(module._parameters) and not type(module).__module__.startswith(
            "torch.nn."
        )
        # of forwards under way, the number of the first autograd node that they can make
        begun: list[int] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if weights.nothing_to_do or torch.compiler.is_compiling():
                return  # or inside a compiled forward, around which the unit is gathered
            if reads_parameters:
                begun.append(torch._C._autograd._get_sequence_nr())
            in_backward = torch._C._current_graph_task_id() >= 0
            weights.enter()
            for unit in units:
                unit.acquire(Use.FORWARD)
                weights.unshard(unit, "backward" if in_backward else "forward")
            if in_backward == torch.is_grad_enabled() and not weights.evaluates:
                count_recomputations(units, ends_one=in_backward)
            if ends and torch.is_grad_enabled() and not in_transform():
                self._watch_inputs(ends, args, kwargs)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if weights.nothing_to_do or torch.compiler.is_compiling():
                return
            first = begun.pop() if begun else 0
            if output is not None and torch.is_grad_enabled() and not in_transform():
                self.watch_outputs(units, output)
                if reads_parameters:
                    elsewhere = (
                        args,
                        kwargs,
                        [
                            value
                            for name, value in vars(module).items()
                            if name not in _OWN_ATTRIBUTES
                        ],
                    )
                    self.watch_outputs(units, elsewhere, since=first)
            in_backward = torch._C._current_graph_task_id() >= 0
            for unit in units:
                unit.release(Use.FORWARD)
                if not unit.is_held:
                    if in_backward and (not apart or unit.in_backward):
                        unit.acquire(Use.BACKWARD)  # recomputed: its own backward follows
                    else:
                        weights.after_forward(unit)
            if weights.running == 1 and not in_backward:
                self.hold_parameters(output)
            weights.leave()

        self._handles.append(
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        )
        self._handles.append(
            module.register_forward_hook(after, with_kwargs=True, always_call=True)
        )

    def watch_outputs(self, units: Sequence[Unit], output: Any, *, since: int = 0) -> None:
        """Have `units` gathered when a gradient arrives at a tensor of `output` that autograd
        has made `since`; leave views their memory.
        """
        arrived = self._arrival_at(tuple(units))
        may_be_views = [unit for unit in units if unit.full_bytes]
        for tensor in (output,) if isinstance(output, torch.Tensor) else tensors_within(output):
            for unit in may_be_views:
                unit.leave_views(tensor)
            # held: torch 2.13 crashes in register_hook on a view whose base was written to,
            # otherwise
            node = tensor.grad_fn
            # a leaf needs no weights, and would keep the hook
            if node is not None and (not since or node._sequence_nr() >= since):
                tensor.register_hook(arrived)  # type: ignore[no-untyped-call]
            del node

    def _arrival_at(self, units: tuple[Unit, ...]) -> Callable[[torch.Tensor], None]:
        """Return the hook of outputs of modules that need `units`, as they are in this forward."""
        epoch, backward = self._weights.epoch, self._backward
        known = self._arrivals.get(units)
        if known is not None and known[0] == epoch:
            return known[1]

        def arrived(grad: torch.Tensor) -> None:
            for unit in units:
                backward.before_unit(unit, epoch)

        self._arrivals[units] = (epoch, arrived)
        return arrived

    def _watch_inputs(self, units: list[Unit], args: Any, kwargs: Any) -> None:
        inputs = [
            tensor
            for tensor in tensors_in((args, kwargs))
            if tensor.requires_grad and not isinstance(tensor, nn.Parameter)
        ]
        if not inputs:
            return
        backward = self._backward
        # hooks that would stay for ever; autograd hands gradients of leaves over before it runs the
        # other nodes
        on_leaves: list[Any] = []
        num_inputs = len(inputs)
        waiting: dict[int, int] = {}  # graph task -> inputs still without a gradient
        # else nothing comes here: the first forward's hooks run
        counts = torch._C._current_graph_task_id() < 0 or is_recomputed()
        for unit in units:
            unit.forwards += counts

        def arrived(grad: torch.Tensor) -> None:
            if grad.grad_fn is not None:  # create_graph=True
                self.watch_outputs(units, grad)
            task = torch._C._current_graph_task_id()
            waiting[task] = waiting.get(task, num_inputs) - 1
            if not waiting[task]:
                del waiting[task]
                # else this graph's backward may follow once more
                done = counts and not retains_graph()
                for unit in units:
                    unit.forwards = max(0, unit.forwards - done)
                    backward.after_inputs(unit, before_others=bool(on_leaves))
                for hook in on_leaves:
                    hook.remove()

        # not torch's multi-grad hook, whose closure holds the graph that holds it
        for tensor in inputs:
            hook = tensor.register_hook(arrived)  # type: ignore[no-untyped-call]
            if tensor.grad_fn is None:
                on_leaves.append(hook)

    # ------------------------------------------------------------------ parameters

    def _tie_parameters(self, unit: Unit, segment: Segment) -> None:
        for name, parameter in zip(segment.names, segment.parameters, strict=True):
            self._handles.append(_Tie(self, unit, parameter, name))
            if unit.state is not UnitState.FULL:
                release_class(parameter)

    def use(self, unit: Unit, name: str, operation: str) -> None:
        """A released parameter is about to be read outside the modules that hold it: bring its
        unit here, or refuse.
        """
        in_backward = torch._C._current_graph_task_id() >= 0
        phase: Phase = "backward" if in_backward else "forward"
        if not unit.cells.weight.is_sharded:
            self._weights.unshard(unit, phase)  # on its way to every rank already
            return
        # .data is how code looks, or writes
        training = torch.is_grad_enabled() and operation != ".data"
        if not (in_backward or self._weights.running or training):
            late = (
                ""
                if self._backward.optimizer is not None
                else "; an optimizer made after shard() needs engine.attach(optimizer)"
            )
            raise StateError(
                f"parameter {name!r} rests sharded and cannot be read here ({operation}): read it"
                f" inside engine.gathered(), on every rank{late}"
            )
        self._weights.hold(
            unit,
            phase,
            Until.BACKWARD_ENDS if in_backward or torch.is_grad_enabled() else Until.FORWARD_ENDS,
        )

    def hold_parameters(self, output: Any) -> None:
        """Keep the units of parameters in `output`, which has left the model, until the next
        step: they may be used anywhere, on one rank alone.
        """
        for tensor in tensors_within(output):
            if isinstance(tensor, nn.Parameter) and hasattr(tensor, "_zeroshard"):
                tensor._zeroshard.hold()

    def hold(self, unit: Unit) -> None:
        """Keep `unit` gathered until the next step."""
        if unit.cells.weight.is_sharded:
            self._weights.hold(unit, "forward", Until.STEP)

    def _install_parameters(self) -> None:
        # [Note: weak hooks] what hangs on a tensor is invisible to the garbage collector
        backward = weakref.ref(self._backward)
        own: dict[int, int] = {}

        def hook_for(number: int) -> Callable[[torch.Tensor], None]:
            def taken(parameter: torch.Tensor) -> None:
                alive = backward()
                if alive is not None:
                    alive.take(number)
                    if next(reversed(parameter._post_accumulate_grad_hooks)) != own[number]:
                        alive.seal_again(number)

            return taken

        for number, leaf in enumerate(self._backward.leaves):
            hooked: Any = leaf.parameter  # the method is untyped in torch
            handle = hooked.register_post_accumulate_grad_hook(hook_for(number))
            self._handles.append(handle)
            own[number] = handle.id

    # ------------------------------------------------------------------ state_dict, load_state_dict

    def _install_state(self, module: nn.Module, units: list[Unit]) -> None:
        def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            for unit in units:
                if not unit.cells.weight.is_sharded:
                    self._weights.unshard(unit, "forward")  # its publish may be under way
                elif not (self.may_save and unit.state is UnitState.FULL):
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
            for unit in units:
                if unit.index not in self._loads:
                    unit.acquire(Use.USER)
                    self._weights.unshard(unit, "forward")
                    context = unit.writable()
                    self._loads[unit.index] = [context, context.__enter__(), 0]
                self._loads[unit.index][2] += 1

        def after_load(module: nn.Module, incompatible: Any) -> None:
            for unit in units:
                self._loads[unit.index][2] -= 1
                if self._loads[unit.index][2]:
                    continue
                context, copies, _ = self._loads.pop(unit.index)
                context.__exit__(None, None, None)
                unit.release(Use.USER)
                assert self.write_back is not None
                self.write_back(unit, copies)

        hooked: Any = module  # these three are untyped in torch
        self._handles.append(hooked.register_state_dict_pre_hook(before_save))
        self._handles.append(hooked.register_load_state_dict_pre_hook(before_load))
        self._handles.append(hooked.register_load_state_dict_post_hook(after_load))


def _needed(
    plans: Sequence[UnitPlan], units: Sequence[Unit]
) -> tuple[set[tuple[int, int]], dict[int, tuple[nn.Module, list[Unit]]]]:
    """Return which modules span which units, by id and index, and by id of each module whose
    forward needs units, the module and these.
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
