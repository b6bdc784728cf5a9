"""Processes that have loaded the pretended device: pytest's own never does."""

from __future__ import annotations

import importlib
import multiprocessing
import traceback
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Worker", "WorkerError"]


class WorkerError(AssertionError):
    """What a function in a worker raised: its traceback."""


class Worker:
    """A process that runs functions of one module, by name, until it is closed.

    The module may import ``tests.device.zsim``; only the worker imports it. Arguments and results
    are pickled: numbers and strings, not tensors of the device.
    """

    def __init__(self, module: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(module, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def start(self, name: str, *args: Any) -> None:
        """Call a function; `result` returns what it returns."""
        self._connection.send((name, args))

    def result(self) -> Any:
        """Return what the function that was started last returned, or raise `WorkerError`."""
        try:
            value, error = self._connection.recv()
        except EOFError:
            self._process.join()
            raise WorkerError(f"the worker ended with {self._process.exitcode}") from None
        if error is not None:
            raise WorkerError(error)
        return value

    def call(self, name: str, *args: Any) -> Any:
        """Call a function and return what it returns."""
        self.start(name, *args)
        return self.result()

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(module: str, connection: Connection) -> None:
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            return
        try:
            function = getattr(importlib.import_module(module), name)
            connection.send((function(*args), None))
        except BaseException:
            connection.send((None, traceback.format_exc()))
