"""The loop over a step's leaves: what ``engine.leaves()`` does around the user's backwards."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from zeroshard.errors import ConfigError, StateError
from zeroshard.runtime.backward_pass import WEIGHTED
from zeroshard.runtime.leaves import Leaves
from zeroshard.runtime.loop import Loop
from zeroshard.system.device import undisturbed

__all__ = ["refuse_leaves", "seed_of", "walked"]


def walked(
    loop: Loop, leaves: Leaves, device: torch.device, *, step: int, seed: int
) -> Iterator[int]:
    """Yield this rank's leaves of `step`, with generators seeded; in rounds in which it has none,
    shadow the others. Raises StateError where gradients of an earlier step are there.
    """
    backward = loop.backward
    backward.collect_dropped()
    if backward.accumulation.has_gradient:
        raise StateError(
            "gradients rest here from before this step: call optimizer.zero_grad() before the loop"
            " over engine.leaves()"
        )
    events = loop.events
    for begun in events.before_leaves:
        begun(step, seed)
    for leaf in leaves:
        if leaf is None:
            here = backward.accumulation
            loop.shadow_forward()
            backward.shadow(sync=True, scaled=here.scaled, weighted=bool(here.kinds & WEIGHTED))
            continue
        for came in events.before_leaf:
            came(leaf)
        with undisturbed(device):
            torch.manual_seed(seed_of(seed, step, leaf))
            yield leaf
    for ended in events.after_leaves:
        ended()


def seed_of(seed: int, step: int, leaf: int) -> int:
    """Return the seed of a leaf's random numbers, of 63 bits."""
    text = f"zeroshard {seed} {step} {leaf}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def refuse_leaves(leaves: Leaves | None, method: str) -> None:
    """Raise ConfigError where a run has leaves, which `method` of its engine does not run."""
    if leaves is not None:
        raise ConfigError(
            f"engine.{method}() does not run leaves={leaves.tree}: run the micro-batches in a loop"
            " over engine.leaves()"
        )
