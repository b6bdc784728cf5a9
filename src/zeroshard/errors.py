"""The errors that zeroshard raises on purpose, all under :class:`ZeroshardError`.

Each message is the fact, the full name of the parameter, unit or option, and the remedy. An error
about something that could differ between ranks is raised on *every* rank, so that no rank is left
waiting for one that has already given up.

What it does not do: our own invariants are plain ``assert`` statements with values, never one of
these.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "ConfigError",
    "PeerLostError",
    "PlanMismatch",
    "StallError",
    "StateError",
    "StorageError",
    "ZeroshardError",
]


class ZeroshardError(Exception):
    """Base of every error that zeroshard raises on purpose. ``exit_code`` is what the command
    line ends with.
    """

    exit_code = 70


class ConfigError(ZeroshardError, ValueError):
    """The request makes no sense or is not supported; nothing has been changed."""

    exit_code = 3


class StateError(ZeroshardError, RuntimeError):
    """A call came at a time when it cannot be answered rightly (a released parameter, a sealed
    gradient, stale weights).
    """

    exit_code = 1


class PlanMismatch(ZeroshardError, RuntimeError):
    """The ranks disagree about the model, the options or the order of what they do; names the
    first difference.
    """

    exit_code = 72


class StallError(ZeroshardError, RuntimeError):
    """A rank waited longer than ``stall_timeout_s``; names what it waited for and the ranks that
    did not come.
    """

    exit_code = 71


class PeerLostError(ZeroshardError, RuntimeError):
    """A rank that this one was waiting for has ended."""

    exit_code = 71


class CheckpointError(ZeroshardError, RuntimeError):
    """A checkpoint is missing, incomplete, damaged or of another format."""

    exit_code = 73


class StorageError(ZeroshardError, OSError):
    """Memory or a file that states rest in cannot be made, read or written, or holds other bytes
    than were written; names the file and the tensor.
    """

    exit_code = 74
