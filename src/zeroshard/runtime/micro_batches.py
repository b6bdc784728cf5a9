"""Micro-batches whose Python runs take turns: each is a function in a thread of its own, and one of
all threads runs at a time.

    main thread        go_on() ........ run the section ........ go_on(value) ........ result
    its thread                 runs --pause(call)               --runs on--   returns

A thread is how a call deep inside a model's forward can wait without the model knowing; there is no
parallelism, so that the order of everything is that of the calls of `go_on`. What torch keeps per
thread (gradients on or off, autocast, modes such as ``with torch.device(...)``, the accelerator's
device and stream) is carried over, and so are context variables.

Invariants: `go_on` returns when the thread waits or has ended; an exception in the thread is raised
there; after `end` the thread is gone.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

from zeroshard.system.device import Device

_Call = TypeVar("_Call")
_current: contextvars.ContextVar[MicroBatch[Any] | None] = contextvars.ContextVar(
    "the micro-batch in whose thread this runs", default=None
)


def this_micro_batch() -> MicroBatch[Any] | None:
    """Return the micro-batch in whose thread this runs, if any."""
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
        """`device`: that of the model."""
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
