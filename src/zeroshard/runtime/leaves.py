"""The leaves of a step: numbered micro-batches. Their gradients are added in a tree that does not
depend on the ranks (core/tree.py).

    for leaf in engine.leaves(step):         3 ranks, 8 leaves: in turn
                                             round 0   rank 0: 0   rank 1: 1   rank 2: 2
                                             round 1   rank 0: 3   rank 1: 4   rank 2: 5
                                             round 2   rank 0: 6   rank 1: 7   rank 2 shadows

Of a round each rank computes one leaf at most. In turn its gradients are reduced: the owner of a
slice forms the sums that are nodes of the tree (`Deal.sums`) and adds them to a binary counter
(runtime/grad.py). A rank without a leaf takes part in gathers and reduces, adding nothing.

Rows that keep whole gradients reduce once: where the leaves of each rank can be one node of the
tree (2 ranks: 0 to 3, and 4 to 7) they are dealt out so (`is_local`), each rank adds up its own,
and the ranks' sums are reduced in the last round.

Invariant: inside a round every rank runs one backward, and no gradient of it is left to a later
one; or all rounds are one backward, unit after unit (runtime/accumulate.py).
"""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

from zeroshard.core.layout import Range
from zeroshard.core.tree import Deal, Formed
from zeroshard.errors import StateError
from zeroshard.system.device import Device


class Leaves:
    """The leaves of one engine, and the round that is under way."""

    def __init__(self, deal: Deal, rank: int) -> None:
        """`rank` is this one's."""
        self.tree, self._rank = deal.tree, rank
        self.is_local = deal.is_local  # whether each rank adds up its own leaves
        self._rounds, self._sums, self._num_ranks = deal.rounds, deal.sums, len(deal.counts)
        self.keep: Callable[[Any, torch.Tensor], bool] = _keep_none  # see at_once
        self._walk: Callable[[], Generator[int] | None] = lambda: None
        self.abandon()

    def follow(self, walk: Generator[int] | None) -> None:
        """Let `walk` be the loop over the leaves of a step. The one before ends, and puts the
        random generators back, now: not when whoever still holds it lets go.
        """
        if (before := self._walk()) is not None:
            before.close()
        self._walk = (lambda: None) if walk is None else weakref.ref(walk)

    def abandon(self) -> None:
        """No step is under way, and nothing of one is left."""
        self.follow(None)
        self._number: int | None = None
        self._has_backward = False
        self.is_partial = False  # whether some leaves of the step are there, and others to come

    @property
    def in_step(self) -> bool:
        """Whether a step's loop is under way."""
        return self._number is not None

    def run_only(self, leaf: int) -> None:
        """Leave out every round but the one of `leaf`, for a replay that ends with it."""
        there = [leaf in [one for _, one in dealt] for dealt in self._rounds].index(True)
        self._rounds, self._sums = self._rounds[there:][:1], self._sums[there:][:1]

    # ------------------------------------------------------------------ the round under way

    def __iter__(self) -> Iterator[int | None]:
        """Go through the rounds of a step; yields this rank's leaf, None where it has none."""
        try:
            for number, dealt in enumerate(self._rounds):
                leaf = dict(dealt).get(self._rank)
                self._number, self._has_backward, self.is_partial = number, False, True
                yield leaf
                if not self._has_backward:
                    raise StateError(
                        f"leaf {leaf}: no backward has run: call engine.backward(loss) once for"
                        " every leaf of engine.leaves()"
                    )
            self.is_partial = False
        finally:
            self._number = None

    @contextmanager
    def at_once(self, keep: Callable[[Any, torch.Tensor], bool]) -> Iterator[None]:
        """Run all rounds of a step in one backward inside, in which `turn` says the round of the
        gradients that come. `keep` is given each, with its parameter, and says whether it goes no
        further yet.
        """
        self._number, self._has_backward, self.is_partial = 0, False, True
        self.keep = keep
        try:
            yield
            self.is_partial = False
        finally:
            self._number, self.keep = None, _keep_none

    def turn(self, number: int) -> None:
        """The gradients that come now, and their reduces, belong to round `number`."""
        self._number = number

    @property
    def num_rounds(self) -> int:
        """The rounds of a step."""
        return len(self._rounds)

    def begin_backward(self, *, has_late: bool) -> None:
        """A backward begins; `has_late`: gradients have come after their unit had been reduced.
        Raises StateError where it is none of a leaf, or the second one.
        """
        if self._number is None:
            raise StateError(
                f"leaves={self.tree}: a backward outside of engine.leaves(): run each in a loop"
                " `for leaf in engine.leaves(step)`"
            )
        if self._has_backward:
            raise StateError(
                "a second backward inside one leaf: its gradients would be another leaf's; add the"
                " losses, or count more leaves"
            )
        if has_late:
            self.refuse_late()
        self._has_backward = True

    def refuse_late(self) -> None:
        """Raise StateError: gradients of a leaf are left over."""
        raise StateError(
            f"leaves={self.tree}: gradients of a leaf came after their unit had been reduced (a"
            " checkpoint inside a checkpoint, or a weight used outside its module): they cannot be"
            " put into the tree"
        )

    def check_whole(self) -> None:
        """Raise StateError where some leaves of the step are there, and others to come."""
        if self.is_partial:
            raise StateError(
                f"leaves={self.tree}: some leaves of this step are missing: let the loop"
                " over engine.leaves() end before gradients are read, clipped or stepped"
            )

    @property
    def of_rank(self) -> list[int]:
        """This rank's leaves of a step, in order."""
        return [leaf for dealt in self._rounds for rank, leaf in dealt if rank == self._rank]

    @property
    def all_compute(self) -> bool:
        """Whether every rank has a leaf in this round."""
        return len(self._rounds[self._round]) == self._num_ranks

    @property
    def is_last(self) -> bool:
        """Whether this round is the step's last one."""
        return self._round == len(self._rounds) - 1

    @property
    def own(self) -> Range | None:
        """This rank's leaf of the round, if it has one."""
        leaf = dict(self._rounds[self._round]).get(self._rank)
        return None if leaf is None else (leaf, leaf + 1)

    @property
    def formed(self) -> Formed:
        """The leaves of the sums that a reduce of this round forms, and the way in which their
        parts are added (ReduceRequest.sums).
        """
        return self._sums[self._round]

    @property
    def _round(self) -> int:
        if self._number is None:
            raise StateError(f"leaves={self.tree}: gradients outside of engine.leaves()")
        return self._number


def _keep_none(leaf: Any, grad: torch.Tensor) -> bool:
    return False


# -------------------------------------------------------------------- micro-batches that take turns
# The Python runs of micro-batches take turns: each is a function in a thread of its own, and one of
# all threads runs at a time.
#
#     main thread        go_on() ........ run the section ........ go_on(value) ........ result
#     its thread                 runs --pause(call)               --runs on--   returns
#
# A thread is how a call deep inside a model's forward can wait without the model knowing; there is
# no parallelism, so that everything follows the order of the calls of `go_on`. What torch keeps per
# thread (gradients on or off, autocast, modes such as ``with torch.device(...)``, the accelerator's
# device and stream) is carried over, and so are context variables.
#
# Invariants: `go_on` returns when the thread waits or has ended; an exception in the thread is
# raised there; after `end` the thread is gone.


_Call = TypeVar("_Call")
_current: contextvars.ContextVar[MicroBatch[Any] | None] = contextvars.ContextVar(
    "the micro-batch that this thread runs", default=None
)


def this_micro_batch() -> MicroBatch[Any] | None:
    """Return the micro-batch that this thread runs, if any."""
    return _current.get()


class Autocast:
    """The settings of autocast in one thread."""

    def __init__(self, device: torch.device) -> None:
        self._kinds = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys((device.type, "cpu"))
        ]

    def entered(self) -> ExitStack:
        """Return a context in which it is set so, without its cache of weights: a weight that was
        cast without gradients would have none, and one that was cast for a micro-batch goes with
        that one's graph.
        """
        stack = ExitStack()
        for kind, enabled, dtype in self._kinds:
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False)
                )
        return stack


class MicroBatch(Generic[_Call]):
    """One run of a function that waits in calls of `pause`."""

    def __init__(self, index: int, run: Callable[[], Any], device: torch.device) -> None:
        """`device`: the model's."""
        self.index = index
        self._result: Any = None  # of `run`, when it has ended
        self._run = run
        self._call: _Call | None = None
        self._error: BaseException | None = None
        self._ending = False
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._stream: Any = None  # the context of the accelerator's stream, and of its device
        accelerator = Device.of(device)
        if accelerator.has_streams:
            self._stream = accelerator.stream(accelerator.current_stream())
        self._autocast = Autocast(device)
        self._modes: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        self._thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._main,), daemon=True
        )

    def go_on(self) -> _Call | None:
        """Run on until the next `pause`, and return what that was given; None where it has ended.

        Raises what the function raised.
        """
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._go.release()
        self._back.acquire()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._call

    def take(self) -> Any:
        """Return what the function has returned, and keep it no longer."""
        result, self._result = self._result, None
        return result

    def pause(self, call: _Call) -> None:
        """In the thread: wait for the next `go_on`."""
        self._call = call
        self._back.release()
        self._go.acquire()
        if self._ending:
            raise _Ended

    def end(self) -> None:
        """Let the thread end, wherever it waits: the function is left by an exception that is no
        Exception.
        """
        self._ending = True
        self._go.release()
        if self._thread.ident is not None:
            self._thread.join()

    def _main(self) -> None:
        _current.set(self)
        try:
            with ExitStack() as stack:
                if self._stream is not None:
                    stack.enter_context(self._stream)
                stack.enter_context(self._autocast.entered())
                for mode in self._modes:  # not entered, which would change the mode itself
                    _push_mode(mode)  # type: ignore[no-untyped-call]
                    stack.callback(_pop_mode)
                self._result = self._run()
        except _Ended:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._call = None
            self._back.release()


class _Ended(BaseException):
    """Leaves a function that nobody waits for any more."""
