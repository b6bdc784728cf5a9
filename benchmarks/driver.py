"""Runs contenders in turn: starts their processes, gives one of them at a time the machine, and
writes down what came back.

Life of a block (see `plan.blocks`): all its contenders are started, and warmed up one after
another; then the turns, A B A B ..., as many rounds as the block's most demanding comparison wants
pairs; then its processes end and the next block begins. What a contender holds and sends is
measured in the first block it appears in, in steps that nobody times.

A contender that is not installed is skipped, one that breaks is reported as failed; both are said
aloud, and the others go on. No turn is ever discarded.
"""

from __future__ import annotations

import json
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks import PATH
from benchmarks.plan import Comparison, Size, blocks
from benchmarks.results import ComparisonResult, ContenderResult, Run

__all__ = ["ContenderError", "Group", "Options", "measure"]

NUM_LOSSES = 8
LOG_LINES = 12


@dataclass(frozen=True)
class Options:
    """How to measure. ``pairs`` None means each comparison's own number."""

    num_ranks: int = 2
    threads: int = 1  # per rank
    steps: int = 5  # timed steps per turn
    warmup: int = NUM_LOSSES  # steps before the first turn
    pairs: int | None = None
    alive: int = 4
    device: str = "cpu"
    files: tuple[str, ...] = ()
    deepspeed_python: str = sys.executable
    profile: bool = False
    traces: str | None = None  # a directory for a trace of each contender
    max_norm: float = 1.0  # to which every contender clips
    optimizer: str = "adamw"  # or "muon"
    disk_path: str | None = None  # for contenders that put something on disk
    deferred: bool = False  # the model is built in no memory
    device_bytes: int | None = None  # of the accelerator, for each rank; None: all of it
    timeout_s: float = 1800.0


class ContenderError(Exception):
    """A contender cannot run. ``failed`` tells something broken from something not installed."""

    def __init__(self, message: str, *, failed: bool) -> None:
        super().__init__(message)
        self.failed = failed


class Group:
    """The processes of one contender, alive until `close`."""

    def __init__(self, name: str, size: Size, precision: str, options: Options) -> None:
        self.name, self.options = name, options
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115, lives as long as the processes
        # its processes are ended, not asked to clean up: what they put on disk goes with this
        # folder
        self.disk = None
        if options.disk_path is not None:
            self.disk = tempfile.TemporaryDirectory(
                dir=options.disk_path, ignore_cleanup_errors=True
            )
        specification = {
            "contender": name,
            "size": asdict(size),
            "precision": precision,
            "num_ranks": options.num_ranks,
            "threads": options.threads,
            "device": options.device,
            "files": list(options.files),
            "disk_path": None if self.disk is None else self.disk.name,
            "deferred": options.deferred,
            "max_norm": options.max_norm,
            "optimizer": options.optimizer,
            "device_bytes": options.device_bytes,
            "path": PATH,
            "python": options.deepspeed_python if name.startswith("deepspeed") else sys.executable,
        }
        # as a script: it needs nothing of this package, and so no torch
        leader = str(Path(__file__).with_name("leader.py"))
        command = [sys.executable, "-P", leader, json.dumps(specification)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )

    @cached_property
    def started(self) -> dict[str, Any]:
        """What every rank answers once it has imported its library; waits for it."""
        return self._answer()

    def wait(self) -> bool:
        """Wait for an answer, or the end of the processes; return whether either came in time."""
        assert self.process.stdout is not None
        return bool(select.select([self.process.stdout], [], [], self.options.timeout_s)[0])

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not self.wait():
            raise ContenderError(
                f"{self.name}: no answer within {self.options.timeout_s:.0f} s{self._log_end()}",
                failed=True,
            )
        line = self.process.stdout.readline()
        if not line:
            raise ContenderError(f"{self.name}: its processes ended{self._log_end()}", failed=True)
        answer: dict[str, Any] = json.loads(line)
        for reply in answer["replies"]:
            if "missing" in reply:
                raise ContenderError(f"{self.name}: {reply['missing']}", failed=False)
            if "error" in reply:
                raise ContenderError(f"{self.name}: {reply['error']}{self._log_end()}", failed=True)
        return answer

    def _log_end(self) -> str:
        self.log.seek(0)
        lines = self.log.read().splitlines()[-LOG_LINES:]
        return "".join(f"\n    | {line}" for line in lines)

    def do(self, command: str, *, sample: bool = False, **arguments: Any) -> dict[str, Any]:
        """Have every rank do `command`; raises ContenderError when one cannot."""
        assert self.process.stdin is not None and self.started
        self.process.stdin.write(json.dumps({"do": command, "sample": sample, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def turn(self, steps: int) -> tuple[float, dict[str, Any]]:
        """Run `steps` timed steps; returns the seconds of the slowest rank and the whole answer."""
        answer = self.do("train", steps=steps)
        return max(reply["total_s"] for reply in answer["replies"]), answer

    def close(self) -> None:
        """End the processes."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()  # its ranks die with it
            self.process.wait()
        self.process.stdout.close()
        self.log.close()
        if self.disk is not None:
            self.disk.cleanup()


def introduce(group: Group, result: ContenderResult, run: Run, options: Options) -> None:
    """Build and warm up; fill in losses, memory and bytes on the wire."""
    built = group.do("build", sample=True)["replies"]
    warm = group.do("train", sample=True, settle=0, steps=max(options.warmup, NUM_LOSSES))
    if result.losses:  # introduced before, in another block
        return
    replies = warm["replies"]
    result.losses = [
        sum(losses) / len(losses)
        for losses in zip(*(reply["losses"] for reply in replies), strict=True)
    ][:NUM_LOSSES]
    result.warmup_step_s = replies[0]["step_s"]
    result.base_bytes, result.peak_bytes = max(
        zip(warm["base_bytes"], warm["peak_bytes"], strict=True),
        key=lambda base_and_peak: base_and_peak[1] - base_and_peak[0],
    )
    result.facts = built[0] | {"versions": group.started["replies"][0]["versions"]}
    if replies[0].get("steps_skipped"):
        result.facts["steps_skipped"] = replies[0]["steps_skipped"]
    result.wire_exclusive = group.started["own_network"]
    rest = group.do("rest")["replies"]
    result.live_after_backward = max(reply["live_after_backward"] for reply in rest)
    result.live_after_update = max(reply["live_after_update"] for reply in rest)
    result.live_by_device = rest[0].get("live_by_device", {})
    result.device_peak_bytes = max(reply.get("device_peak", 0) for reply in rest)
    result.memory = {
        when: rest[0][f"memory_{when}"]
        for when in ("after_backward", "after_update")
        if f"memory_{when}" in rest[0]
    }
    wire = group.do("train", settle=0, steps=4)
    result.wire_bytes = wire["interface_bytes"] / 4 / options.num_ranks
    result.payload_bytes = wire["replies"][0].get("payload_bytes")
    if options.profile or options.traces is not None:
        name = f"{run.size}-{run.precision}-{re.sub('[@+]', '-', result.name)}.json.gz"
        trace = "" if options.traces is None else str(Path(options.traces, name))
        result.operators = group.do("profile", steps=3, trace=trace)["replies"][0]["operators"]


def measure(
    size: Size,
    precision: str,
    comparisons: Sequence[Comparison],
    options: Options,
    *,
    say: Callable[[str], None] = lambda _: None,
    advance: Callable[[str], None] = lambda _: None,
    keep: Callable[[Run], None] = lambda _: None,
) -> Run:
    """Measure `comparisons`, block by block. `say` gets what a user must know, `advance` a word
    for every turn, `keep` what has been measured so far: after each contender's warm-up and after
    each block.
    """
    run = Run(
        size.name,
        precision,
        options.num_ranks,
        options.threads,
        options.device,
        size.num_parameters,
        size.tokens,
    )
    results: dict[str, ContenderResult] = {}
    for members, inside in blocks(comparisons, alive=options.alive):
        groups: dict[str, Group] = {}
        try:
            for name in members:
                if not results.setdefault(name, ContenderResult(name)).skipped:
                    groups[name] = Group(name, size, precision, options)
            for group in groups.values():  # nobody imports while another is warmed up
                group.wait()
            for name in list(groups):
                result = results[name]
                run.contenders += [] if result in run.contenders else [result]
                advance(f"starting {name}")
                try:
                    introduce(groups[name], result, run, options)
                except ContenderError as error:
                    result.skipped, result.failed = str(error).splitlines()[0], error.failed
                    say(f"{'FAILED' if error.failed else 'skipped'} {error}")
                    groups.pop(name).close()
                keep(run)
            run.comparisons += take_turns(groups, inside, results, options, say, advance)
            keep(run)
        finally:
            for group in groups.values():
                group.close()
    return run


def take_turns(
    groups: dict[str, Group],
    comparisons: Sequence[Comparison],
    results: dict[str, ContenderResult],
    options: Options,
    say: Callable[[str], None],
    advance: Callable[[str], None],
) -> list[ComparisonResult]:
    """Run the rounds of one block: in each, every contender that still has pairs to make takes
    one turn, in a fixed order.
    """
    wanted = {
        c: options.pairs or c.pairs
        for c in comparisons
        if {c.contender, c.reference} <= groups.keys()
    }
    measured = {
        c: ComparisonResult(c.contender, c.reference, c.target, options.steps) for c in wanted
    }
    for pair in range(max(wanted.values(), default=0)):
        unfinished = [c for c in wanted if pair < wanted[c]]
        seconds: dict[str, float] = {}
        for name, group in groups.items():
            if any(name in (c.contender, c.reference) for c in unfinished):
                advance(f"{name} {pair + 1}")
                try:
                    seconds[name], answer = group.turn(options.steps)
                except ContenderError as error:
                    results[name].skipped, results[name].failed = str(error).splitlines()[0], True
                    say(f"FAILED {error}")
                    continue
                results[name].step_s += answer["replies"][0]["step_s"]
        for comparison in unfinished:
            if {comparison.contender, comparison.reference} <= seconds.keys():
                measured[comparison].pairs.append(
                    [seconds[comparison.contender], seconds[comparison.reference]]
                )
        broken = [name for name in groups if results[name].skipped]
        for name in broken:
            groups.pop(name).close()
        wanted = {c: n for c, n in wanted.items() if {c.contender, c.reference} <= groups.keys()}
    return [m for m in measured.values() if m.pairs]
