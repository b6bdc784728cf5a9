"""The end of a job: its exit code, and the words for it, with the first failure last.

On several hosts each host's launcher sends its outcome as JSON to the one that was started by hand
(``hosts.py``), which joins them. The clocks of hosts differ, so a failure travels with its age, and
counts from when it arrives.
"""

from __future__ import annotations

import signal
import sys
import textwrap
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from zeroshard.launch.supervisor import (
    CONTRACT_EXIT_CODES,
    EXIT_PREEMPTED,
    EXIT_STALL,
    Failure,
    exit_code_of,
)


def say(line: str) -> None:
    """Write a message of the launcher's."""
    sys.stderr.write(f"zeroshard run: {line}\n")
    sys.stderr.flush()


@dataclass(frozen=True)
class Outcome:
    """The end of the ranks of one host, or of all."""

    failures: list[Failure] = field(default_factory=list)  # the one to blame first
    left: list[Failure] = field(default_factory=list)  # ranks that have ended well
    ended_by: int | None = None  # the signal to the launcher
    stalled: bool = False

    @property
    def was_ended(self) -> bool:
        """Whether a signal to the launcher decides the exit code."""
        saved = self.failures and self.failures[0].status in CONTRACT_EXIT_CODES
        return self.ended_by is not None and not saved

    @property
    def exit_code(self) -> int:
        """The launcher's exit code."""
        if self.was_ended:
            return 128 + (self.ended_by or 0)
        if self.stalled:
            return EXIT_STALL
        return exit_code_of(self.failures[0]) if self.failures else 0

    def tell(self, begin: float) -> None:
        """Say how the job ended that began at `begin`; nothing where it ended well. Of failures
        those that have something to say get a line each, then the first one, whole, last.
        """
        if self.was_ended:
            say(f"ended by {signal.Signals(self.ended_by or 0).name}")
        if self.was_ended or self.stalled or not self.failures:
            return
        first, *others = self.failures
        at = f"{first.at - begin:.2f} s after the start"
        for failure in others:
            if failure.stacks:
                say(f"{failure.name} was here when {first.name} gave up:\n{failure.stacks}")
            if not failure.silent and not (first.left and failure.traceback):
                line = textwrap.shorten(failure.message or failure.how, 160, placeholder=" ...")
                # the first one counts earlier than it was seen, see supervisor.py
                order = "before" if failure.at < first.at else "after"
                when = f"{abs(failure.at - first.at):.2f} s {order} the first"
                say(f"{failure.name} failed too, {when}: {line}")
        if first.left:
            # its script ended well while the others waited for it
            for failure in others:
                if failure.traceback:
                    say(f"{failure.name} waited for {first.name}:\n{failure.traceback.rstrip()}")
            say(
                f"{first.name} left first, {at}: its script ended with exit code 0 while other"
                " ranks waited for it. Where one rank has fewer batches than another, put the loop"
                " into `with engine.join():`; make the calls that all ranks take part in, zs.save()"
                " too, on all ranks"
            )
            return
        if first.status == EXIT_PREEMPTED:
            say(f"preempted {at}: exit code {EXIT_PREEMPTED}, please queue it again")
            return
        hint = " (often the kernel, out of memory)" if first.status == -signal.SIGKILL else ""
        block = f"{first.name} failed first, {at}: {first.how}{hint}"
        say("\n".join(filter(None, [block, (first.traceback or first.message).rstrip()])))

    def to_json(self) -> dict[str, Any]:
        """Return it for `from_json` on another host."""
        now = time.monotonic()
        data: dict[str, Any] = {"ended_by": self.ended_by, "stalled": self.stalled}
        for name, failures in (("failures", self.failures), ("left", self.left)):
            data[name] = [{**asdict(one), "at": now - one.at} for one in failures]
        return data

    @staticmethod
    def from_json(data: Mapping[str, Any], host: str) -> Outcome:
        """Return what `host` has sent just now."""
        now = time.monotonic()
        failures, left = (
            [replace(Failure(**one), at=now - one["at"], host=host) for one in data[name]]
            for name in ("failures", "left")
        )
        return Outcome(failures, left, data["ended_by"], data["stalled"])


def report_restart(failures: list[Failure]) -> None:
    """Say why the ranks are started again."""
    for failure in failures[:1]:
        say(
            f"starting again after {failure.name} failed:"
            f" {failure.how}\n{failure.traceback or failure.message}"
        )


def report_stall(seconds: float, stacks: dict[int, str], ends: bool) -> None:
    """Say where every rank is, and whether the job ends for it."""
    shown = [
        f"rank {rank}:\n{stack or 'shows no stacks: it is stopped, or waits in the kernel'}"
        for rank, stack in sorted(stacks.items())
    ]
    what = "ended, exit code 71" if ends else "going on; --stall-timeout SECONDS ends such a job"
    fact = f"no rank has made progress for {seconds:.0f} s, its ranks are shown above"
    say("\n".join([*shown, f"zeroshard run: {fact}: {what}"]))
