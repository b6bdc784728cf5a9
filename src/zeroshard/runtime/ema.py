"""A moving average of the weights, sharded as the optimizer's state is.

    average = decay * average + (1 - decay) * master        after each step, on this rank's pieces
                                                            alone: nothing is sent

Evaluation with the average swaps it with the masters and publishes, as a step does; leaving the
context swaps back, so that training goes on with the same bits. Polyak averaging as in torch's
``swa_utils.AveragedModel``, to which the numbers are equal.

Invariant: inside ``swapped()`` nothing reads or writes the masters as what is trained. Cost: one
copy of the masters at rest (``bytes``); a swap is a publish.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from zeroshard.errors import ConfigError
from zeroshard.runtime.engine import Engine, averages_in, states_of
from zeroshard.runtime.join import Average

_CHUNK = 1 << 17  # elements swapped at a time
_ALIKE = "Call update() at the same places, with the same decay, on every rank"


def averages_of(engine: Engine) -> list[Average]:
    """Return the averages of `engine` that are alive, in the order in which they were made."""
    return [average for ref in averages_in(engine) if (average := ref()) is not None]


def updates_of(average: Average) -> str:
    """Return how often an average has been updated, and its decay, as text that ranks compare."""
    return f"number {average.num_updates} with decay {average.decay}"


class EMA:
    """The exponential moving average of an engine's trained parameters, from their values now on.

    `decay` in [0, 1). Raises ConfigError for another, and for an engine without an optimizer
    (nothing changes there).
    """

    def __init__(self, engine: Engine, decay: float = 0.999) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(
                f"decay={decay} is not in [0, 1): 0.999 keeps 99.9% of the average at each update"
            )
        if engine.optimizer is None:
            raise ConfigError(
                "EMA needs an engine with an optimizer: give it to shard() or engine.attach()"
            )
        self.decay = decay
        self._engine = engine
        self.averages = [master.clone() for master in self._masters()]
        self.num_updates = 0  # since it was made, loaded or laid out anew; the same on every rank
        self._number = len(averages_in(engine))  # the same on every rank
        averages_in(engine).append(weakref.ref(self))

    @property
    def bytes(self) -> int:
        """Bytes of the average on this rank."""
        return sum(average.numel() * average.element_size() for average in self.averages)

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights; call it after ``optimizer.step()``. Nothing is
        sent, but inside ``engine.join()``, where ranks without data follow: the next step raises
        PlanMismatch where ranks have not all done so.
        """
        masters, states = self._masters(), states_of(self._engine)
        states.tell("average", self._number)
        torch._foreach_lerp_(self.averages, masters, 1.0 - self.decay)
        self.num_updates += 1
        states.decided("update of zs.EMA", updates_of(self))

    def _masters(self) -> list[torch.Tensor]:
        """Return the masters that the averages follow, once no step is under way."""
        states = states_of(self._engine)
        states.check_open()
        states.join_step()  # which may go on by itself
        return states.rest.masters()

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Compute with the average instead of the weights: evaluation,
        ``engine.full_state_dict()``. Collective, at both ends.

        Inside, forwards, ``torch.autograd.grad`` of inputs, ``engine.gathered()`` and
        ``full_state_dict()`` read the averages. Whatever needs the trained numbers raises
        StateError: gradients of parameters, ``optimizer.step()``, ``update()``, another
        ``swapped()``, saves, loads, writes into weights, a repartition, ``offload_states()`` and
        ``close()``. ``zs.save(..., states={"ema": ema})`` outside holds both.
        """
        states = states_of(self._engine)
        states.check_open()
        states.check_idle("EMA.swapped()")  # half of it would compute with other numbers
        states.peers.agree({"update of zs.EMA": updates_of(self)}, "EMA.swapped()", remedy=_ALIKE)
        states.join_step()
        with states.rest.swapped(self._exchange):
            yield

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, master in zip(self.averages, self._masters(), strict=True):
            for here, there in zip(
                torch.split(average, _CHUNK), torch.split(master, _CHUNK), strict=True
            ):
                saved = here.clone()
                here.copy_(there)
                there.copy_(saved)
