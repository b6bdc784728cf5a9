"""The conditions, beside code and data, that decide the bits of a run with leaves: saved with it,
and compared when it goes on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from zeroshard.runtime.access import StateAccess
from zeroshard.system.device import Device


def curve_of(states: StateAccess) -> dict[str, str]:
    """Return the tree of an engine's leaves, and with what its kernels run; empty without
    leaves.
    """
    return {} if states.tree is None else {"leaves": str(states.tree), **kernels_of(states.device)}


def kernels_of(device: torch.device) -> dict[str, str]:
    """Return what chooses the kernels of a process that computes on `device`."""
    return {
        "torch": torch.__version__,
        "device": device.type if device.type == "cpu" else Device.of(device).facts()["name"],
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


def departures(saved: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return in which respects a run goes on otherwise than it was `saved`; empty where it had no
    leaves, of which nothing was promised.
    """
    return [
        f"{name} was {value} and is {here.get(name, 'not set')}"
        for name, value in saved.items()
        if here.get(name) != value
    ]
