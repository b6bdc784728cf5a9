"""Errors of one rank's disk or host memory, raised on every rank.

A read that fails on one rank must not end its forward there: the others would wait in their next
collective. So it is noted, the pass goes on with NaNs, and all ranks are told where they meet
anyway::

    what fails                     goes on with  told at                     refused until
    a read of weights              NaN           end of the forward, or step engine.reset()
    a read or write of a gradient  NaN           next forward, or step       engine.reset()
    a write of state (a step, ...) nothing       end of the step, load, ...  zs.load()

Refused are forwards and steps. After a failed gradient no master has been written; after a failed
write of state what rests is *lost*, half old and half new.

Also here: parameters of a deferred model that the ranks have built with different values. Only
files can give them values that are the same.

Invariant: nothing computed from a failed read reaches a master: the step asks first. Cost: one
small exchange per forward where weights leave the device, and three per step where any state does.
What it does not do: retry, or look after errors that are no StorageError.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from zeroshard.comm.transport import Transport
from zeroshard.errors import PlanMismatch, StateError, StorageError

_RESET = (
    "call engine.reset() on every rank, which drops the gradients, and go on with the next batch"
)
_UNTOUCHED = "shard() has failed on every rank, and the model is as it was"
_ANEW = "shard() has failed on every rank: build the model and the optimizer anew"
_LOAD = "what rests is half old and half new: load a checkpoint with zs.load()"


class Faults:
    """What has gone wrong on this rank and has not been told, and what is refused since all
    ranks were told.
    """

    def __init__(self, transport: Transport, *, active: bool, differing: Mapping[int, str]) -> None:
        """Made inside shard(); `differing`: by id of each parameter whose values differ between
        ranks, how; the same keys on every rank.
        """
        self.refusal: str | None = None  # why forwards and steps are refused, on every rank
        self._differing = dict(differing)
        self._in_shard = True  # there is no engine yet
        # on some rank what rests is not whole: told, and so known on every rank
        self.is_lost = False
        self.is_suspect = False  # something has failed since the last repair: files may be damaged
        self._since = "a tier failed"
        self._transport = transport
        self._active = active  # some state rests on another tier
        self._error: StorageError | None = None  # the first, not yet told
        self._loses = False  # whether what rests is lost with one not yet told

    def end_shard(self) -> None:
        """There is an engine."""
        self._in_shard = False

    def note(self, error: StorageError, *, lost: bool = False) -> None:
        """Keep the first error until the ranks meet; `lost`: what rests is no longer whole."""
        if self._error is None:
            error.__traceback__ = None  # its frames hold tensors
            self._error = error
        self._loses = self._loses or lost

    @contextmanager
    def noted(self, *, lost: bool = False) -> Iterator[None]:
        """Note a StorageError of the body instead of raising it."""
        try:
            yield
        except StorageError as error:
            self.note(error, lost=lost)

    @contextmanager
    def together(self, *, lost: bool = False) -> Iterator[None]:
        """`agree` at the end of the body. Collective."""
        with self.noted(lost=lost):
            yield
        self.agree()

    @property
    def unsaved(self) -> str | None:
        """Why what rests here must not be saved, if so: told or not."""
        if self.is_lost:
            return self.refusal
        return f"{self._error}; {_LOAD}" if self._error is not None and self._loses else None

    def agree(self) -> None:
        """Raise StorageError on every rank where one has noted an error: its own, or the first of
        the others'. Collective.
        """
        if not self._active:
            return
        own, loses = self._error, self._loses
        self._error, self._loses = None, False
        mine = "" if own is None else f"{'!' if loses else '?'}{own}"
        answers = self._transport.control.exchange(mine.encode(), "the exchange of tier errors")
        told = {rank: answer.decode() for rank, answer in enumerate(answers) if answer}
        if not told:
            return
        self.is_suspect = True
        self.is_lost = self.is_lost or any(reason.startswith("!") for reason in told.values())
        first = next(iter(told))
        if self._in_shard:
            remedy = _ANEW if self.is_lost else _UNTOUCHED
        else:
            remedy = _LOAD if self.is_lost else _RESET
        self.refusal = f"rank {first}: {told[first][1:]}; {remedy}"
        raise StorageError(self.refusal if own is None else f"{own}; {remedy}")

    def check(self, *, passes: bool = True) -> None:
        """Raise StateError, the same on every rank, where forwards and steps are refused
        (`passes` off: only where what rests is lost).

        Raises PlanMismatch where the ranks have built different values and nothing has overwritten
        them.
        """
        if self._differing:
            raise PlanMismatch(next(iter(self._differing.values())))
        if self.refusal is not None and (passes or self.is_lost):
            raise StateError(f"refused since {self._since}: {self.refusal}")

    def lose(self, since: str, reason: str) -> None:
        """What rests is not whole `since` something, as every rank knows: only a load of
        everything helps.
        """
        if not self.is_lost:
            self._since, self.refusal, self.is_lost = since, f"{reason}; {_LOAD}", True

    def overwritten(self, parameters: Iterable[int]) -> None:
        """Every rank has read the same values for these parameters, given by id."""
        for key in parameters:
            self._differing.pop(key, None)

    def reset(self) -> None:
        """The pass in which something failed is given up; what is lost stays lost."""
        if not self._loses:
            self._error = None
        if not self.is_lost:
            self.refusal = None

    def repaired(self) -> None:
        """Everything that rests has been written anew."""
        self.refusal, self.is_lost, self.is_suspect, self._since = (
            None,
            False,
            False,
            "a tier failed",
        )
        self._differing.clear()
        self._error, self._loses = None, False
