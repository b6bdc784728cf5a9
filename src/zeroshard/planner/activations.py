"""The activations of a module, traced on fake tensors: a forward and a backward that allocate
nothing, with the storages counted that a real one would hold.

    with FakeTensorMode():                 shapes and dtypes, no memory
        loss = model(inputs)               hooks note when units are needed and let go,
        loss.backward()                    every operation which storages come into being

Parameters stand in the dtype in which they compute, and are not counted: where they are is the
engine's affair (planner/peak.py). Everything else is: saved and passing activations, gradients
until the engine takes them, what checkpointing recomputes, logits and loss.

The FLOPs of each operation count for one unit: the one that runs its module, or the last one that
received gradients of its outputs.

Invariant: the events come in the order in which runtime/loop.py meets them; the module, its
parameters and the random generators are as they were. Cost: some 0.1 ms per operation. It does not
see what a kernel allocates inside itself, and traces the kernels of the CPU.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from zeroshard.core.precision import PRECISIONS
from zeroshard.errors import ConfigError
from zeroshard.planner.model import ActivationTrace, Event, ModelShape, Moment, Training
from zeroshard.runtime.build import compute_dtypes
from zeroshard.runtime.guards import cast, casting_hooks
from zeroshard.runtime.trees import tensors_in, tensors_within
from zeroshard.runtime.units import UnitPlan, holding_others, partition_units

# ---------------------------------------------------------------------------------- operation flops
# FLOPs of one operation: those that ``torch.utils.flop_counter`` knows (matrix products,
# convolutions, attention), and two kernels of the CPU that it does not.
#
#     attention on the CPU     as torch counts it elsewhere
#     oneDNN's recurrent layer 2 per token and weight in the forward, 4 in the backward
#
# Everything else, elementwise operations above all, counts nothing. Invariant: only shapes are
# read.


_aten = torch.ops.aten


def _recurrent(args: Sequence[Any]) -> float:
    """Return the FLOPs of a layer with input [..., features] and weights of input and state."""
    given, weights = args[0], args[1:3]
    tokens: int = given.numel() // given.shape[-1]
    num_weights: int = sum(weight.numel() for weight in weights)
    return 2.0 * tokens * num_weights


_OF_THE_CPU: dict[Any, Callable[[Sequence[Any]], float]] = {
    _aten.mkldnn_rnn_layer: _recurrent,
    _aten.mkldnn_rnn_layer_backward: lambda args: 2 * _recurrent(args),
    # query, key, value; in the backward after the gradient
    _aten._scaled_dot_product_flash_attention_for_cpu: lambda args: float(
        sdpa_flop_count(*(tensor.shape for tensor in args[:3]))  # type: ignore[no-untyped-call]
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda args: float(
        sdpa_backward_flop_count(*(one.shape for one in args[:4]))  # type: ignore[no-untyped-call]
    ),
}


# -------------------------------------------------------------------------------------- activations

Loss = Callable[[Any], torch.Tensor]


def trace_activations(
    model: nn.Module,
    shape: ModelShape,
    training: Training,
    inputs: Sequence[Any] | Mapping[str, Any],
    loss: Loss | None = None,
) -> ActivationTrace:
    """Return what one forward and backward of `model`, which is `shape` to the planner, holds.

    `inputs` are the arguments of its forward: a tuple, or a dict of keywords, of tensors of any
    kind (real, fake, meta); their shapes and dtypes count. `loss(output)` is a scalar; without it,
    it is what the forward returns: ``output.loss``, or the sum of the first tensor. Raises whatever
    the forward raises; ConfigError where there is no tensor to take a loss of.
    """
    plans = partition_units(model)
    counted = _Counted(shape.decoder.vocab if shape.decoder is not None else 0)
    events = _Events(plans, counted)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        # Fake parameters in the dtypes in which they compute, and fake buffers, by their names in a
        # `_TracedStep`.
        dtypes, out = compute_dtypes(model, PRECISIONS[training.precision]).of, {}
        for name, parameter in model.named_parameters():
            like = torch.empty(tuple(parameter.shape), dtype=dtypes[id(parameter)])
            out[f"model.{name}"] = nn.Parameter(like, requires_grad=parameter.requires_grad)
        buffers = {f"model.{name}": _imitation(buffer) for name, buffer in model.named_buffers()}
        tensors, buffer_bytes = out | buffers, sum(buffer.nbytes for buffer in buffers.values())
        step = _TracedStep(model, events, loss)
        arguments = tree_map_only(torch.Tensor, _imitation, inputs)
        stack.enter_context(_hooked(model, plans, events, training))
        for module in model.modules():  # all of it in training mode
            stack.callback(setattr, module, "training", module.training)
            module.training = True
        with counted, torch.enable_grad():
            torch.func.functional_call(step, tensors, (arguments,))
    return ActivationTrace(
        tuple(events.moments),
        training.tokens,
        training.checkpointing,
        buffer_bytes,
        tuple(
            (counted.flops[unit, False], counted.flops[unit, True]) for unit in range(len(plans))
        ),
    )


def _imitation(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor of the same shape and dtype, on the CPU."""
    out = torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
    return out.requires_grad_(tensor.requires_grad) if tensor.is_leaf else out


class _TracedStep(nn.Module):
    """A forward and a backward of `model`, as one forward: its parameters replace the module's as
    long as that lasts.
    """

    def __init__(self, model: nn.Module, events: _Events, loss: Loss | None) -> None:
        super().__init__()
        self.model = model
        self._events = events
        self._loss = loss

    def forward(self, inputs: Any) -> None:
        self._events.watch(self.model)
        if isinstance(inputs, Mapping):
            loss = self._loss_of(self.model(**inputs))
        elif isinstance(inputs, torch.Tensor):
            loss = self._loss_of(self.model(inputs))
        else:
            loss = self._loss_of(self.model(*inputs))
        self._events.turn()
        loss.backward()  # type: ignore[no-untyped-call]
        del loss
        self._events.end()

    def _loss_of(self, output: Any) -> torch.Tensor:
        if self._loss is not None:
            return self._loss(output)
        found = getattr(output, "loss", None)
        if not isinstance(found, torch.Tensor):
            found = next(iter(tensors_in(output)), None)
        if found is None or not found.requires_grad:
            raise ConfigError("the forward returns no tensor to take a loss of: give loss=")
        return found if found.dim() == 0 else found.sum()


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make, until the last reference to each dies, and FLOPs
    by unit and pass.
    """

    def __init__(self, vocab: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.logits = 0
        # by unit, and whether in the backward
        self.flops: defaultdict[tuple[int, bool], float] = defaultdict(float)
        self._at = (0, False)  # unit and pass that operations are of
        self._inside: list[int] = []  # units with a forward under way
        self._vocab = vocab  # the last dimension of logits; 0: none
        self.most = (0, 0)  # bytes, of them logits, when there were most
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = getattr(func, "overloadpacket", None)
        if packet in _OF_THE_CPU:
            self.flops[self._at] += float(_OF_THE_CPU[packet](args))
        elif (count := flop_registry.get(packet)) is not None:
            self.flops[self._at] += float(count(*args, **(kwargs or {}), out_val=out))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and not getattr(func, "is_view", False):
                self._add(tensor)
        return out

    def begin(self, unit: int) -> None:
        """The forward of a module begins that needs `unit`."""
        self._inside.append(unit)
        self._at = (unit, self._at[1])

    def end(self) -> None:
        """It has ended: the module around it goes on."""
        self._inside.pop()
        if self._inside:
            self._at = (self._inside[-1], self._at[1])

    def turn(self, unit: int | None = None) -> None:
        """The backward goes on with `unit`."""
        self._at = (self._at[0] if unit is None else unit, True)

    def _add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known or isinstance(tensor, nn.Parameter):
            return
        num_bytes = storage.nbytes()
        of_logits = num_bytes if self._vocab and tensor.shape[-1:] == (self._vocab,) else 0

        def died(_: object) -> None:
            del self._known[key]
            self.live -= num_bytes
            self.logits -= of_logits

        self._known[key] = weakref.ref(storage, died)
        self.live += num_bytes
        self.logits += of_logits
        if self.live > self.most[0]:
            self.most = (self.live, self.logits)


class _Events:
    """The events of one pass, from what torch calls: as runtime/loop.py, weights.py and
    backward.py turn hooks into gathers, releases and reduces, but for what the row decides.
    """

    def __init__(self, plans: Sequence[UnitPlan], counted: _Counted) -> None:
        self.moments: list[Moment] = []
        self.in_backward = False
        self._plans = plans
        self._counted = counted
        self._around = holding_others(plans)
        self._gathered: set[int] = set()  # units that are gathered
        self._used = [0] * len(plans)  # forwards under way
        self._idle: int | None = None  # forward over; another use may follow at once
        self._backward: dict[int, None] = {}  # units with a backward under way
        self._finished: dict[int, None] = {}  # of these, units with all gradients
        self._pending = [0] * len(plans)
        self._groups: dict[int, tuple[int, int]] = {}  # parameter -> unit, group
        self._opened: set[tuple[int, int]] = set()
        self._reduced: set[int] = set()
        self._last: tuple[Event, int, int] | None = None

    def _note(self, event: Event, unit: int = -1, group: int = 0) -> None:
        most, logits = self._counted.most
        self._counted.most = (self._counted.live, self._counted.logits)
        if self._last is not None:
            self.moments.append(Moment(*self._last, most, logits))
        self._last = (event, unit, group)

    # ------------------------------------------------------------------ parameters

    def watch(self, model: nn.Module) -> None:
        """Take the gradients of the parameters that `model` has now as they come."""
        now = dict(model.named_parameters(remove_duplicate=True))
        for unit, plan in enumerate(self._plans):
            kinds: dict[tuple[torch.dtype, bool], int] = {}
            for name in plan.parameters:
                parameter = now[name]
                key = (parameter.dtype, parameter.requires_grad)
                group = kinds.setdefault(key, len(kinds))
                if parameter.requires_grad:
                    self._groups[id(parameter)] = unit, group
                    self._pending[unit] += 1
                    hooked: Any = parameter
                    hooked.register_post_accumulate_grad_hook(self._took)

    def _took(self, parameter: torch.Tensor) -> None:
        unit, group = self._groups[id(parameter)]
        if (unit, group) not in self._opened:
            self._opened.add((unit, group))
            self._note("gradient", unit, group)
        parameter.grad = None
        self._pending[unit] -= 1
        if self._pending[unit] == 0:
            self._reduce(unit)
            self._finished[unit] = None

    def _reduce(self, unit: int) -> None:
        if unit not in self._reduced:
            self._reduced.add(unit)
            self._note("reduce", unit)

    # ------------------------------------------------------------------ weights

    def _need(self, unit: int) -> None:
        if self._idle == unit:
            self._idle = None
        elif self._idle is not None:
            self._release_idle()
        if unit not in self._gathered:
            self._gathered.add(unit)
            self._note("gather", unit)

    def _release(self, unit: int) -> None:
        if unit in self._gathered:
            self._gathered.discard(unit)
            self._note("release", unit)

    def _release_idle(self) -> None:
        unit, self._idle = self._idle, None
        if unit is not None and not self._used[unit] and unit not in self._backward:
            self._release(unit)

    def begin_module(self, units: Sequence[int]) -> None:
        """A module's forward begins, which needs `units`."""
        self._counted.begin(units[0])
        for unit in units:
            self._used[unit] += 1
            self._need(unit)

    def end_module(self, units: Sequence[int]) -> None:
        """It has ended."""
        self._counted.end()
        for unit in units:
            self._used[unit] -= 1
            if self._used[unit]:
                continue
            if self.in_backward:  # recomputed: its own backward follows
                self._backward[unit] = None
            elif self._plans[unit].spans_one_module:
                self._release(unit)
            elif self._idle != unit:
                self._release_idle()
                self._idle = unit

    def arrived(self, units: Sequence[int]) -> None:
        """A gradient has come to the outputs of a module that needs `units`."""
        self._counted.turn(units[0])
        for unit in units:
            self._backward[unit] = None
            self._finished.pop(unit, None)
            for other in [other for other in self._finished if other not in self._around]:
                del self._finished[other]
                self._done(other)
            self._need(unit)

    def inputs_arrived(self, units: Sequence[int]) -> None:
        """The gradients of its inputs have come."""
        for unit in units:
            if unit not in self._backward:
                continue
            if any(opened == unit for opened, _ in self._opened):
                self._reduce(unit)
            self._finished.pop(unit, None)
            self._done(unit)

    def _done(self, unit: int) -> None:
        self._backward.pop(unit, None)
        if not self._used[unit]:
            self._release(unit)

    def turn(self) -> None:
        """The forward is over."""
        self._release_idle()
        self._note("turn")
        self.in_backward = True
        self._counted.turn()

    def end(self) -> None:
        """The backward is over."""
        for unit in reversed(range(len(self._plans))):
            if any(owner == unit for owner, _ in self._groups.values()):
                self._reduce(unit)
        for unit in sorted(self._gathered):
            self._release(unit)
        self._note("end")
        self._note("end")  # what is left then


@contextmanager
def _hooked(
    model: nn.Module, plans: Sequence[UnitPlan], events: _Events, training: Training
) -> Iterator[None]:
    """Have `events` told of the modules that need units, as runtime/hooks.py installs its hooks."""
    needed: dict[int, tuple[nn.Module, list[int]]] = {}
    spans: set[tuple[int, int]] = set()
    for roots in (True, False):
        for unit, plan in enumerate(plans):
            for _, module in plan.roots if roots else plan.owners:
                wanted = needed.setdefault(id(module), (module, []))[1]
                if unit not in wanted:
                    wanted.append(unit)
                if roots:
                    spans.add((id(module), unit))
    handles: list[Any] = []
    for module, units in needed.values():
        ends = [unit for unit in units if (id(module), unit) in spans]
        handles += _hook_module(module, units, ends, events)
    precision = PRECISIONS[training.precision]
    if not (compute_dtypes(model, precision).as_given or precision.compute is torch.float32):
        dtype = precision.compute
        for layer, hook in casting_hooks(model, dtype).items():
            handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return cast(args, dtype), cast(kwargs, dtype)

        handles.append(model.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook_module(
    module: nn.Module, units: list[int], ends: list[int], events: _Events
) -> list[Any]:
    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        events.begin_module(units)
        inputs = [
            tensor
            for tensor in tensors_in((args, kwargs))
            if ends and tensor.requires_grad and not isinstance(tensor, nn.Parameter)
        ]
        num_inputs = len(inputs)  # not the tensors, which the hook would keep
        waiting = [num_inputs]

        def came(grad: torch.Tensor) -> None:
            waiting[0] -= 1
            if not waiting[0]:
                waiting[0] = num_inputs
                events.inputs_arrived(ends)

        for tensor in inputs:
            tensor.register_hook(came)  # type: ignore[no-untyped-call]

    def after(module: nn.Module, args: Any, output: Any) -> None:
        for tensor in tensors_within(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda grad: events.arrived(units))  # type: ignore[no-untyped-call]
        events.end_module(units)

    return [
        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        module.register_forward_hook(after, always_call=True),
    ]
