"""Find the module that made the first number that is not finite: ``zs.detect_anomaly(engine)``.

A step with gradients that are not finite is skipped, and named by parameter (finalize.py); by then
the number has gone through every module. Here each module's outputs are looked at as it returns,
and their gradients as they come back:

    forward     the first output with a NaN. Inner modules return first, so this is the innermost
                one; where all that it read is finite, the NaN is its own
    backward    else the first gradient that is not finite, of the output of a module

Infinity in a forward is told but is no anomaly by itself: masks of attention have it. Of what ranks
have found, the earliest is told: a NaN goes on to ranks that exchange activations (experts, 'tp').

Invariant: nothing is changed, and the ranks do what they would do without: what is found is raised
at the end, on every rank. A compiled forward runs as it was compiled, and is one module. Cost: the
host waits for the device at every module.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from zeroshard.errors import StateError
from zeroshard.runtime.engine import Engine, states_of
from zeroshard.runtime.released import is_released
from zeroshard.runtime.trees import tensors_in
from zeroshard.state.local import local_of

_CALL = "zs.detect_anomaly()"


def _has(tensor: torch.Tensor) -> str:
    """Return which number that is not finite `tensor` has: "nan", "inf", or "" for none."""
    local = local_of(tensor).detach()
    if not (local.is_floating_point() or local.is_complex()) or bool(local.isfinite().all()):
        return ""
    return "nan" if bool(local.isnan().any()) else "inf"


class _Anomaly:
    """The findings of one rank so far."""

    def __init__(self, module: nn.Module) -> None:
        self._names = {inner: name for name, inner in module.named_modules()}
        self._seen: set[nn.Module] = set()  # modules that have returned
        self._num_outputs = 0  # that have been looked at
        self._num_grads = 0
        self._forward = ""  # the first NaN of a forward
        self._infinity = ""  # the first infinity
        self._backward = ""  # the first gradient

    @property
    def found(self) -> str:
        """Return the finding in words, "" for none."""
        before = f" (before it, {self._infinity})" if self._infinity else ""
        text = self._forward or self._backward
        return f"{text}{before}" if text else ""

    @property
    def place(self) -> int:
        """Return what grows with the time of the finding, alike on all ranks."""
        return self._num_outputs if self._forward else self._num_outputs + self._num_grads

    def look(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A module returns: look at its outputs, and let their gradients be looked at."""
        if self._forward or torch.compiler.is_compiling():
            return
        self._num_outputs += 1
        self._seen.add(module)
        where = f"module {self._names[module] or '(the model itself)'!r} ({type(module).__name__})"
        for tensor in tensors_in(output):
            kind = _has(tensor)
            if kind == "nan":
                self._forward = f"the output of {where} has nan; {self._reason(module, inputs)}"
                return
            if kind and not self._infinity:
                self._infinity = f"the output of {where} had inf"
            if tensor.requires_grad and not self._backward:
                arrived = partial(self._look_back, where)
                tensor.register_hook(arrived)  # type: ignore[no-untyped-call]

    def _reason(self, module: nn.Module, inputs: Iterable[Any]) -> str:
        """Return which of a module's parameters and inputs were not finite before it ran."""
        for name, inner in module.named_modules():
            is_own = inner is module or inner not in self._seen  # as in a compiled forward
            for own, parameter in inner.named_parameters(name, recurse=False) if is_own else ():
                if not is_released(parameter) and (kind := _has(parameter)):
                    return f"its parameter {own!r} has {kind}"
        kinds = [kind for tensor in tensors_in(inputs) if (kind := _has(tensor))]
        if kinds:
            return f"its input has {kinds[0]}, which no module of the model has returned"
        return "its inputs and its own parameters are finite"

    def _look_back(self, where: str, grad: torch.Tensor) -> None:
        self._num_grads += not self._backward
        if not self._backward and (kind := _has(grad)):
            self._backward = (
                f"the forward had no nan, and on the way back the gradient of the output of {where}"
                f" is the first with {kind}: the backward of what follows that module made it"
            )


@contextmanager
def detect_anomaly(engine: Engine) -> Iterator[None]:
    """Look for the first number that is not finite in the forwards and backwards inside, and raise
    StateError at the end, on every rank, that names the module which made it::

        with zs.detect_anomaly(engine):
            engine.backward(model(x, y))

    It waits for the device at every module: use it for one step. Where the body raises, what was
    found is a note of that error. Collective at the end; StateError of a closed engine.
    """
    ranks = states_of(engine).everyone
    anomaly = _Anomaly(engine.module)
    # before the hooks that release weights
    handles = [
        module.register_forward_hook(anomaly.look, prepend=True)
        for module in engine.module.modules()
    ]
    try:
        yield
    except BaseException as error:  # the ranks may be anywhere: nothing collective
        if anomaly.found:
            error.add_note(f"{_CALL}: {anomaly.found}")
        raise
    finally:
        for handle in handles:
            handle.remove()
    told = ranks.share([anomaly.place, anomaly.found], _CALL)
    found = [(place, rank, text) for rank, (place, text) in enumerate(told) if text]
    if found:
        _, rank, text = min(found)
        raise StateError(f"{_CALL}: on rank {rank}, {text}")
