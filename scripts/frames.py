"""How far it is from a module's hook to the wire: frames on the stack, and files that a step runs.

    python scripts/frames.py            # a table; or --json
    python scripts/frames.py --check    # exit code 1 where a count is above its limit

For each transport two ranks (four for two levels) train a small model at stage 3. Counted are the
library's own frames from the hook to the wire, both ends included, of a gather that nothing has
started ahead and of a reduce: the longest way in forwards and backwards, waits included (a hook
that is a method of ours counts once). The wire is reached by the function that calls
torch.distributed, or, on CPU ranks, the control plane's ``progress``, which copies and sends
whatever has begun. What ``progress`` and ``serve`` do for transfers under way
depends on how fast the other ranks are: it is not counted as a way to the wire, and `deepest` is
the deepest frame in ``comm/`` with it (so `deepest` has no limit). The files are those of which
each of five ``optimizer.step()`` runs a function: what only a late rank brings is left out, and
so is what `progress` and `serve` run. So it is of what five whole steps (forward, backward, step)
each run: `lines`, distinct ones, `functions`, and the files that these are in, `ring`. `calls` are
all of a step, those of transfers too.

A limit is today's value and goes down, never up; `aim` is where it is to go. `scripts/shape.py`
counts what the source says by itself, `tests/features/test_budgets.py` the Python calls of a unit
and step (MOST_CALLS), `zeroshard bench overhead --fake-world 8` their time beside FSDP2's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch import nn

import zeroshard as zs
from zeroshard.comm.groups import group_all_gather, group_reduce_scatter

SOURCE = str(Path(zs.__file__).parent)
BACKEND = str(Path(dist.__file__).parent)
WIRE = (group_all_gather, group_reduce_scatter)
BESIDE = ("mesh.py", "transport.py")  # arithmetic and counting, not on the way
SERVING = ("progress", "serve")  # of comm/: functions that go on with whatever has begun
# by a function on the way: of Loop, of Backward
KINDS = {"gather": ("begin_module", "begin_units"), "reduce": ("complete",)}
HOOKED = (["begin_units"], ["take_grad"])  # hooks themselves
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "nccl": (2, {"transport": "nccl"}),
    "shared memory": (2, {"transport": "shared_memory"}),
    "two levels": (4, {"transport": "gloo", "node_size": 2, "hierarchical": True}),
}
LIMITS = {
    "nccl": {"gather": 5, "reduce": 5, "files": 34, "lines": 1550, "functions": 335, "ring": 43},
    "shared memory": {
        "gather": 6,
        "reduce": 8,
        "files": 34,
        "lines": 1660,
        "functions": 385,
        "ring": 43,
    },
    "two levels": {
        "gather": 8,
        "reduce": 7,
        "files": 37,
        "lines": 1780,
        "functions": 415,
        "ring": 45,
    },
}
AIMS = {
    "nccl": {"gather": 5, "reduce": 5, "files": 20, "lines": 900, "functions": 150, "ring": 15},
    "shared memory": {"gather": 7, "reduce": 9, "files": 20},
    "two levels": {"gather": 6, "files": 20},
}
STEPS = 5


@dataclass(frozen=True)
class Counts:
    """What one rank has counted for a transport."""

    frames: Mapping[str, int]  # by kind
    deepest: Mapping[str, int]
    step: tuple[str, ...]  # files
    # lines, functions, files and calls of a step with its forward and backward
    whole: Mapping[str, int]

    def value(self, what: str) -> int:
        """Return one count: of a kind, of a whole step, or the files."""
        return len(self.step) if what == "files" else {**self.frames, **self.whole}[what]


class Lines:
    """Sees every line of the library that runs on this thread while it is entered."""

    def __init__(self) -> None:
        self.lines: set[tuple[str, int]] = set()
        self.functions: set[tuple[str, int]] = set()  # by their first line
        self.calls = 0

    def __enter__(self) -> Lines:
        self._before = sys.gettrace()
        sys.settrace(self._seen)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _seen(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if event == "call":
            self.calls += 1
            if _is_served(frame):
                return None
            self.functions.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))
        elif event == "line":
            self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._seen


class Watch:
    """Sees every call of the library's functions while it is entered, on this thread."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.frames = dict.fromkeys(KINDS, 0)
        self.deepest = dict.fromkeys(KINDS, 0)

    def __enter__(self) -> Watch:
        self._before = sys.getprofile()
        sys.setprofile(self._seen)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)

    def _seen(self, frame: FrameType, event: str, argument: object) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "c_call":  # a collective of the process group itself, called by `frame`
            owner = type(getattr(argument, "__self__", None))
            is_method = owner.__module__ == "torch._C._distributed_c10d" or argument in WIRE
            if is_method and file.startswith(SOURCE):
                self._count(frame, self.frames)
        elif event == "call" and file.startswith(BACKEND) and frame.f_back is not None:
            if frame.f_back.f_code.co_filename.startswith(SOURCE):
                self._count(frame.f_back, self.frames)
        elif event == "call" and file.startswith(SOURCE):
            if not _is_served(frame):
                self.files.add(file)
            if not file.startswith(f"{SOURCE}/comm/") or file.endswith(BESIDE):
                return
            self._count(frame, self.deepest, serves=True)
            if name in SERVING and frame.f_back is not None:
                self._count(frame.f_back, self.frames)

    def _count(self, frame: FrameType, into: dict[str, int], *, serves: bool = False) -> None:
        """Count the frames from `frame` up to a hook; `serves`: also below `SERVING`."""
        names: list[str] = []
        above: FrameType | None = frame
        while above is not None and not above.f_code.co_filename.endswith("runtime/hooks.py"):
            if above.f_code.co_filename.startswith(SOURCE):
                names.append(above.f_code.co_name)
            above = above.f_back
        is_hooked = above is not None or names[-1:] in HOOKED
        if not is_hooked or (not serves and not set(SERVING).isdisjoint(names)):
            return
        num_frames = len(names) + (above is not None)
        for kind, starts in KINDS.items():
            if not set(starts).isdisjoint(names):
                into[kind] = max(into[kind], num_frames)


def _is_served(frame: FrameType | None) -> bool:
    """Whether `frame` is below a function of `SERVING`: it runs for whatever has begun."""
    while frame is not None:
        caller = frame.f_back
        if caller is not None and caller.f_code.co_name in SERVING:
            return caller.f_code.co_filename.startswith(f"{SOURCE}/comm/")
        frame = caller
    return False


def count(rank: int, world_size: int, options: Mapping[str, Any]) -> Counts:
    """Train on one rank of the process group; return its counts. Collective."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = zs.shard(model, optimizer, stage=3, prefetch_bytes=0, comm=zs.Comm(**options))
    batch = torch.randn(4, 64)
    threads = torch.autograd.is_multithreading_enabled()
    passes, files = Watch(), []
    whole: list[Lines] = []
    for step in range(2 + STEPS):
        torch.autograd.set_multithreading_enabled(step < 2)
        watched = step >= 2
        if watched:
            with passes:
                model(batch).square().mean().backward()
            with Watch() as stepping:
                optimizer.step()
            files.append(stepping.files)
        else:
            model(batch).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
    for _ in range(STEPS):
        with Lines() as lines:
            model(batch).square().mean().backward()
            optimizer.step()
        whole.append(lines)
        optimizer.zero_grad()
    torch.autograd.set_multithreading_enabled(threads)
    engine.close()
    step_files = tuple(sorted(name.removeprefix(SOURCE) for name in set.intersection(*files)))
    lines, functions = (
        set.intersection(*(getattr(one, what) for one in whole)) for what in ("lines", "functions")
    )
    sizes = {
        "lines": len(lines), "functions": len(functions), "ring": len({file for file, _ in lines}),
        "calls": min(one.calls for one in whole),
    }  # fmt: skip
    return Counts(passes.frames, passes.deepest, step_files, sizes)


def too_large(counted: Mapping[str, Counts]) -> list[str]:
    """Return a line per count that is above its limit, or missing."""
    return [
        f"{name}, {what}: {value}, limit {limit}"
        for name, counts in counted.items()
        for what, limit in LIMITS[name].items()
        if not 0 < (value := counts.value(what)) <= limit
    ]


def run(world_size: int, options: Mapping[str, Any]) -> Counts:
    """Return the counts of rank 0, in fresh processes."""
    queue = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(  # type: ignore[attr-defined, no-untyped-call]
            _run_rank, (world_size, f"{folder}/store", options, queue), nprocs=world_size
        )
    counts: Counts = queue.get()
    return counts


def _run_rank(rank: int, world: int, store: str, options: Mapping[str, Any], queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    counts = count(rank, world, options)
    if rank == 0:
        queue.put(counts)
    dist.barrier()
    dist.destroy_process_group()


def main(say: Callable[[str], None] = print) -> int:
    """Count and print; return 1 where --check finds a count above its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--check", action="store_true", help="say only which counts are too large")
    args = parser.parse_args()
    counted = {name: run(*case) for name, case in CASES.items()}
    if args.check:
        above = too_large(counted)
        for line in above:
            print(line, file=sys.stderr)
        return 1 if above else 0
    if args.json:
        say(json.dumps({name: asdict(counts) for name, counts in counted.items()}, indent=2))
        return 0
    say(f"{'transport':<14} {'counted':<7} {'value':>6} {'limit':>6} {'aim':>4} {'deepest':>8}")
    for name, counts in counted.items():
        for what, limit in LIMITS[name].items():
            aim, deepest = AIMS[name].get(what, ""), counts.deepest.get(what, "")
            line = f"{name:<14} {what:<7} {counts.value(what):>6} {limit:>6} {aim:>4} {deepest:>8}"
            say(line.rstrip())
        # of one step, the least of several: a wait for a late rank calls more
        say(f"{name:<14} {'calls':<7} {counts.value('calls'):>6}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
