"""Step some of an optimizer's parameters, without the optimizer noticing.

The user's ``optimizer.step()`` walks all param groups at once; state that rests on another tier can
only be stepped a tile at a time. A shadow is the same optimizer (class, attributes) with param
groups and state of its own, so that it may step other parameters, in another thread, while the
user's own step goes on.

Invariant: the optimizer's param groups, options, state and hooks are untouched. Options that a step
itself changes in its group (a counter) are changed once per step, by the user's own call. Cost: a
copy of each group's dictionary per call.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from zeroshard.optim.elementwise import unhooked_step

__all__ = ["Shadow"]


class Shadow:
    """A stand-in for `optimizer` with the options that its groups have now; `off_device`: it
    steps on the host what computes on an accelerator.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, off_device: bool) -> None:
        cls = type(optimizer)
        self._step = unhooked_step(cls)
        self._clone = object.__new__(cls)
        for name, value in vars(optimizer).items():
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                vars(self._clone)[name] = OrderedDict()
            elif name not in ("state", "param_groups") and not callable(getattr(cls, name, None)):
                # an LR scheduler puts its own `step` there
                vars(self._clone)[name] = value
        self._options = [_options(group, off_device) for group in optimizer.param_groups]

    def step(
        self,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        states: dict[torch.Tensor, dict[str, Any]],
    ) -> dict[torch.Tensor, dict[str, Any]]:
        """Step `parameters`, by the index of their param group, with their `states`; return the
        states afterwards.
        """
        self._clone.param_groups = [
            {**dict(self._options[index]), "params": list(members)}
            for index, members in parameters.items()
        ]
        self._clone.state = defaultdict(dict, states)
        self._step(self._clone)
        return self._clone.state


def _options(group: Mapping[str, Any], off_device: bool) -> dict[str, Any]:
    """Return a group's options for a step on the host.

    A model on an accelerator leaves the choice of kernel to torch, which on the host takes the
    slowest: the fused one is asked for there.
    """
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    if not off_device:
        return options
    for key, value in options.items():
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            options[key] = value.cpu()
    if (
        "fused" in options
        and not options["fused"]
        and not options.get("foreach")
        and not options.get("differentiable")
    ):
        options["fused"] = True
    return options
