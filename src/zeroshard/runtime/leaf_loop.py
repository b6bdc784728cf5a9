"""The loop over a step's leaves: what ``engine.leaves()`` does around the user's backwards, and the
random numbers of leaves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import torch

from zeroshard.errors import ConfigError, StateError
from zeroshard.runtime.backward_pass import WEIGHTED
from zeroshard.runtime.leaves import Leaves
from zeroshard.runtime.loop import Loop
from zeroshard.system.device import Device, undisturbed


class LeafLoop(Iterator[int]):
    """The result of ``engine.leaves()``: this rank's leaves of one step, to be gone through once,
    or given to ``engine.accumulate()``.
    """

    def __init__(
        self, loop: Loop, leaves: Leaves, device: torch.device, *, step: int, seed: int
    ) -> None:
        self.leaves = leaves
        self._loop, self._device = loop, device
        self._step, self._seed = step, seed
        self._walk: Iterator[int] | None = None  # once it has begun

    def __next__(self) -> int:
        if self._walk is None:
            walk = _walked(self._loop, self.leaves, self._device, step=self._step, seed=self._seed)
            self.leaves.follow(walk)
            self._walk = walk
        return next(self._walk)

    def begin_all(self, leaves: Leaves) -> Draws:
        """Begin the step, of which ``engine.accumulate()`` runs all leaves; return the random
        numbers of this rank's. Raises ConfigError where these are not all of that engine's
        `leaves`, or a trail is written, StateError where gradients of an earlier step are there.
        """
        if self._loop.events.before_leaf:
            raise ConfigError(
                "engine.accumulate() inside engine.trail(), which follows one leaf after another:"
                " run the loop over engine.leaves() there"
            )
        if self.leaves is not leaves or self._walk is not None:
            raise ConfigError(
                "engine.accumulate() was given leaves of another engine, or of which some have run:"
                " give it engine.leaves(step) itself"
            )
        _begin_step(self._loop, self._step, self._seed)
        self._walk = iter(())
        seeds = [seed_of(self._seed, self._step, leaf) for leaf in leaves.of_rank]
        return Draws(self._device, seeds)


class Draws:
    """The random numbers of several leaves, whose computations take turns."""

    def __init__(self, device: torch.device, seeds: list[int]) -> None:
        """`seeds` are those of the leaves; they draw on the CPU and `device`."""
        self._devices = [Device.of(name) for name in sorted({"cpu", str(device)})]
        self._seeds = seeds
        self._states: dict[int, list[torch.Tensor]] = {}  # of those that have begun

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Have the generators inside where leaf `number` of these has left them."""
        if number in self._states:
            for device, state in zip(self._devices, self._states[number], strict=True):
                device.set_generator_state(state)
        else:
            torch.manual_seed(self._seeds[number])
        try:
            yield
        finally:
            self._states[number] = [device.generator_state() for device in self._devices]


def _walked(
    loop: Loop, leaves: Leaves, device: torch.device, *, step: int, seed: int
) -> Generator[int]:
    """Yield this rank's leaves of `step`, with generators seeded; in rounds in which it has none,
    shadow the others. Raises StateError where gradients of an earlier step are there.
    """
    _begin_step(loop, step, seed)
    backward, events, schedule = loop.backward, loop.events, loop.weights.schedule
    for begun in events.before_leaves:
        begun(step, seed)
    for leaf in leaves:
        schedule.look_ahead(if_all_compute=leaves.all_compute)
        if leaf is None:
            here = backward.accumulation
            loop.shadow_forward(None)
            weighted = bool(here.kinds & WEIGHTED)
            backward.shadow(None, sync=True, scaled=here.scaled, weighted=weighted)
            continue
        for came in events.before_leaf:
            came(leaf)
        with undisturbed(device):
            torch.manual_seed(seed_of(seed, step, leaf))
            yield leaf
    schedule.look_ahead(if_all_compute=True)
    for ended in events.after_leaves:
        ended()


def _begin_step(loop: Loop, step: int, seed: int) -> None:
    """The ranks compare `step` and `seed` when they step. Raise StateError where gradients are
    there before the step's first leaf.
    """
    loop.backward.collect_dropped()
    if loop.backward.accumulation.has_gradient:
        raise StateError(
            "gradients rest here from before this step: call optimizer.zero_grad() before the loop"
            " over engine.leaves()"
        )
    loop.backward.decisions.note("step of engine.leaves()", str(step))
    loop.backward.decisions.note("seed of engine.leaves()", str(seed))


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
