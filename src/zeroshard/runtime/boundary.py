"""One micro-batch's visit of one section: what passes in and out, and the section's backward.

    forward    inputs --kept--> [section without gradients] --> outputs, the ends of a graph
    backward   gradients of the outputs (from what runs after the section) ..... collected here
               inputs --> [section again, with gradients] --> backward --> gradients of the inputs
               ..... pushed into what ran before the section, down to the sections before

The graph of a micro-batch between sections is autograd's own and complete; it ends at outputs,
whose node hands gradients over to the visit. A visit keeps the edge to that graph of each input, so
that no activation stays in memory on its behalf but where it is kept.

Invariants: the section is run with the numbers, the random generators, the buffers and the autocast
of its forward; gradients of an output are added in the order in which they come. Cost: the inputs
at rest, the section's forward a second time.

What it does not do: gather weights, or decide when anything runs (runtime/accumulate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from zeroshard.errors import ConfigError, StateError
from zeroshard.runtime.micro_batches import Autocast
from zeroshard.runtime.sections import Section
from zeroshard.runtime.shelf import Shelf
from zeroshard.runtime.trees import is_cache, tensors_within
from zeroshard.runtime.weighting import silence
from zeroshard.system.device import Device


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
        self._device = device
        self._autocast = Autocast(device)
        self._leaves, self._spec = tree_flatten(inputs, is_leaf=is_cache)
        self._refuse_caches()
        # by place among the leaves: the edge of an input through which its gradient goes on
        self._edges = {
            place: torch.autograd.graph.get_gradient_edge(leaf)
            for place, leaf in enumerate(self._leaves)
            if _travels(leaf) and leaf.requires_grad and torch.is_grad_enabled()
        }
        self.needs_backward = torch.is_grad_enabled() and (bool(self._edges) or section.trains)
        self._versions: dict[int, int] = {}
        self._generators: tuple[torch.Tensor, torch.Tensor | None] | None = None
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
            if not _equal(generators, self._states()):
                self._generators = generators
            self._keep(inputs, versions)
            self._places = [place for place, leaf in enumerate(leaves) if _is_float(leaf)]
            self._grads = [None] * len(self._places)
            if checks:
                self._refuse_hidden()
        self._leaves = []

    def _keep(self, inputs: Sequence[Any], versions: Sequence[int]) -> None:
        """Put the inputs away."""
        for leaf, version in zip(inputs, versions, strict=True):
            if _travels(leaf) and leaf._version != version:
                raise StateError(
                    f"module {self.section.name!r} writes to its input in place, and"
                    " engine.accumulate() runs it again from that: let it write to a copy"
                )
        self._packed = [
            (self._shelf.pack(leaf) if leaf.is_floating_point() else leaf)
            if _travels(leaf)
            else leaf
            for leaf in inputs
        ]
        self._versions = {
            place: leaf._version for place, leaf in enumerate(self._packed) if _travels(leaf)
        }

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

    # ------------------------------------------------------------------ random generators

    def _states(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._device.type == "cpu":
            return torch.get_rng_state(), None
        return torch.get_rng_state(), Device.of(self._device).generator_state()

    def _set_states(self, states: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        torch.set_rng_state(states[0])
        if states[1] is not None:
            Device.of(self._device).set_generator_state(states[1])

    # ------------------------------------------------------------------ refusals

    def _refuse_caches(self) -> None:
        for leaf in self._leaves:
            if is_cache(leaf):
                raise ConfigError(
                    f"module {self.section.name!r} was given a {type(leaf).__name__}, which"
                    " engine.accumulate() would fill twice: call the model with use_cache=False"
                )

    def _refuse_hidden(self) -> None:
        """Raise ConfigError where tensors that need gradients pass in or out inside of objects,
        where nobody can take their place.
        """
        assert self._output is not None
        for leaves, verb, which in (
            (self._leaves, "is given", _needs_gradient),
            (self._output[0], "returns", _is_float),
        ):
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor):
                    continue
                if any(which(tensor) for tensor in tensors_within(leaf)):
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
    """Whether `leaf` is a tensor whose numbers are an input; a parameter stands for itself."""
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _needs_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and not isinstance(tensor, nn.Parameter)


def _equal(
    one: tuple[torch.Tensor, torch.Tensor | None], other: tuple[torch.Tensor, torch.Tensor | None]
) -> bool:
    same_device = one[1] is None or other[1] is None or torch.equal(one[1], other[1])
    return torch.equal(one[0], other[0]) and same_device
