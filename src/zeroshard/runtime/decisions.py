"""Decisions that every rank makes by itself and that must be the same: options of param groups,
the clip value, zero_grad().

No collective depends on them, so a rank that decides otherwise disturbs nobody: it steps its part
of one model with a learning rate of its own (a scheduler fed with each rank's own loss does so).
One number stands for all decisions since the last comparison, and travels with the exchange that
every step needs anyway. Where it differs, the ranks send the decisions themselves, and the error
names the first one with each rank's value.

Invariant: a decision that was made after a step's comparison is part of the next one. Cost: a look
at every option of every group per step; options are encoded again only where one has changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any, NoReturn

import torch

from zeroshard.comm.ranks import Ranks
from zeroshard.core.digest import Digest, describe_unlike, holders
from zeroshard.errors import PlanMismatch

_NOT_OURS = ("params", "param_names")
_PLAIN = frozenset((type(None), bool, int, float, str))  # equal as long as they are


class Decisions:
    """The decisions of one rank since the last comparison."""

    def __init__(self) -> None:
        self._optimizer: torch.optim.Optimizer | None = None
        self._noted: dict[str, str] = {}
        self._seen: list[list[Any]] = []  # the options as they were when they were encoded
        self._options: dict[str, str] = {}
        self._digest = 0
        self._compared: dict[str, str] = {}

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the options of `optimizer` among the decisions."""
        self._optimizer = optimizer

    def note(self, name: str, value: str) -> None:
        """Add a decision; several of one name stand in order."""
        before = self._noted.get(name)
        self._noted[name] = value if before is None else f"{before}, {value}"

    def note_once(self, name: str, value: str) -> None:
        """Add a decision where there is none of that name."""
        self._noted.setdefault(name, value)

    def note_late_options(self, step: int) -> None:
        """Add the options that have changed since this step's comparison: the step uses them."""
        if self._options_digest() and self._options is not self._compared:
            for name, value in self._options.items():
                if self._compared.get(name) != value:
                    self._noted[
                        f"{name}, changed after the gradients of step {step} were averaged"
                    ] = value

    def digest(self) -> int:
        """Return 64 bits that stand for all decisions."""
        options = self._options_digest()
        if not self._noted:
            return options
        return options ^ _digest_of(sorted(self._noted.items()))

    def items(self) -> dict[str, str]:
        """Return the decisions by name."""
        self._options_digest()
        return self._noted | self._options

    def compared(self) -> None:
        """The ranks have compared all of it."""
        self._noted.clear()
        self._compared = self._options

    def reset(self) -> None:
        """After an exception: ranks may have come to different places."""
        self._noted.clear()

    def _options_digest(self) -> int:
        if self._optimizer is None:
            return 0
        groups = self._optimizer.param_groups
        seen = [
            [
                value if type(value) in _PLAIN else _look(value)
                for key, value in group.items()
                if key not in _NOT_OURS
            ]
            for group in groups
        ]
        if seen != self._seen or not self._digest:
            self._options = {
                f"option {key!r} of optimizer param group {index}": _text(value)
                for index, group in enumerate(groups)
                for key, value in group.items()
                if key not in _NOT_OURS
            }
            self._digest = _digest_of(self._options.items())
            self._seen = seen  # last: an exception may come to any line before
        return self._digest


def refuse(
    control: Ranks,
    digest: Digest,
    held: tuple[Sequence[Any], Sequence[tuple[int, ...]]],
    decisions: Decisions,
    micro_batches: str,
) -> NoReturn:
    """Send what the digests stand for, and raise PlanMismatch about the first difference.
    Collective. `micro_batches`: their number, or "unknown".
    """
    groups, members = held
    mine = [digest.step, micro_batches, decisions.items(), list(map(digest.log, members))]
    answers = control.share(mine, "the comparison of steps")
    steps, counts, decided, logs = zip(*answers, strict=True)
    if len(set(steps)) > 1:  # a fault let some ranks step and others not
        shown = holders([f"step {step}" for step in steps])
        raise PlanMismatch(
            f"the ranks are in different steps ({shown}): some have taken a step that others"
            " have not; load a checkpoint"
        )
    if len(set(counts) - {"unknown"}) > 1:
        raise PlanMismatch(
            "the ranks have run different numbers of backwards since zero_grad() in step"
            f" {digest.step} ({holders(counts)}): accumulate as many micro-batches and call"
            " zero_grad() at the same places on every rank, or use engine.join() where data is"
            " uneven"
        )
    for name in dict.fromkeys(name for one in decided for name in one):
        values = [one.get(name, "nothing") for one in decided]
        if len(set(values)) > 1:
            raise PlanMismatch(
                f"{name} differs between ranks in step {digest.step} ({holders(values)}): set it"
                " alike on every rank; a scheduler or condition that looks at the loss needs the"
                " same loss on every rank (average it first)"
            )
    difference = describe_unlike(groups, logs)
    raise PlanMismatch(f"the ranks did different things in step {digest.step}; {difference}")


def _look(value: Any) -> Any:
    """Return a stand-in for an option that is equal as long as the option is."""
    if value is None or isinstance(value, (int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, (list, tuple)):
        return tuple(_look(item) for item in value)
    return float(value) if isinstance(value, Real) else type(value)


def _text(value: Any) -> str:
    """Return an option as text: the same for the same number, whatever its type."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, Real):
        number = float(value)
        return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)
    if isinstance(value, (list, tuple)):
        return f"({', '.join(_text(item) for item in value)})"
    return repr(value) if isinstance(value, str) else type(value).__name__


def _digest_of(decisions: Iterable[tuple[str, str]]) -> int:
    text = "\n".join(f"{name} = {value}" for name, value in decisions)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
