"""Two ranks that train and save, and a driver that kills them and looks at what they left.
test_killed.py runs it; so can you:

    # SIGKILL at random moments
    python -m tests.support.killed moments --seed 7 --kills 10
    # at every system call of a save
    python -m tests.support.killed calls --case new --rank 0 --background 1

The driver imports torch once and forks the ranks, so that a kill costs tenths of a second. It
trains once without a kill, for the *reference*: the losses, and the content of the checkpoint of
each step. Then it makes chains: ranks resume, train and save until they are killed, and the next
ones resume from what is there. Each link of a chain must

- find a checkpoint no older than the last one that was reported complete (by rank 0, when
  ``save()`` in the foreground or ``wait()`` returned);
- find every step that can be seen whole: each byte has its hash, and is what the reference has,
  optimizer, random generators and data included;
- go on from the newest of them, and have the reference's losses from there on, bit for bit.

Ranks that lost a peer and do not end by themselves are counted, and killed when ``--patience`` is
over.

What it does not show: what a power cut does to data that a disk had said were written. A killed
process loses none of them.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import random
import select
import shutil
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # an optimizer imports it when it is first made: here once, not in every rank
import torch.distributed as dist
import xxhash

import zeroshard as zs
from tests.support.harness import die_with_parent
from tests.support.training import VOCABULARY, make_model, two_groups
from zeroshard.checkpoint.steps import list_steps, read_manifest

WORLD = 2
NUM_STEPS = 30  # of the reference; a chain that gets there starts again
STEPS_PER_LINK = 8  # a random kill comes within so many
LINK_S = 60.0
# what changes files and directories
CALLS = (
    "mkdir",
    "posix_fallocate",
    "write",
    "fsync",
    "rename",
    "unlink",
    "rmdir",
    "ftruncate",
    "pwrite",
)
CASES = ("new", "again", "leftovers")


class Lost(AssertionError):
    """What no kill may do: the message says what, and how to see it again."""


# ---------------------------------------------------------------------------------------- the ranks


@dataclass(frozen=True)
class Plan:
    """What the ranks of one link do."""

    root: Path
    background: bool = False
    save_every: int = 1
    keep_last: int | None = None
    again: bool = False  # save the step that was loaded once more, before training
    stop_at: int = NUM_STEPS
    # which calls are counted: "save" (from the first one inside the hidden directory), "before"
    # (until there), "" none
    counted: str = ""
    die_at: tuple[int, int] | None = None  # (rank, number of the call that kills it)

    @property
    def directory(self) -> Path:
        return self.root / "checkpoints"


class Position:
    """A data loader: the step it is at, and its generator."""

    def __init__(self, rank: int) -> None:
        self.step, self.generator = 0, torch.Generator().manual_seed(rank)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.generator.set_state(state["generator"])

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tokens that depend on this generator and on the global ones of Python, numpy
        and torch.
        """
        tokens = torch.randint(VOCABULARY, (2, 5), generator=self.generator) + torch.randint(
            VOCABULARY, (2, 5)
        )
        tokens += random.randrange(VOCABULARY) + np.random.randint(VOCABULARY)
        return tokens[:, :-1] % VOCABULARY, tokens[:, 1:] % VOCABULARY


def train(rank: int, plan: Plan, ready: Callable[[], None]) -> None:
    """Resume, then train and save up to ``plan.stop_at``, writing losses and complete steps
    down.
    """
    model = make_model(width=7, layers=1)
    optimizer = two_groups(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    engine = zs.shard(model, optimizer, stage=3)
    position = Position(rank)
    states: dict[str, Any] = {"schedule": schedule, "position": position}
    reported = _Reports(plan, rank)
    ready()
    with zs.Saver(
        plan.directory, engine, states=states, keep_last=plan.keep_last, background=plan.background
    ) as saver:
        if zs.latest_step(plan.directory) is not None:
            zs.load(plan.directory, engine, states=states)  # no fallback: the newest must be whole
            if plan.again:
                reported.saved(
                    saver.save(position.step, extra=torch.arange(position.step)), position.step
                )
        while position.step < plan.stop_at:
            loss = model(*position.batch())
            engine.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            position.step += 1
            _append(plan.root / f"losses-{rank}", f"{position.step} {loss.item().hex()}\n")
            if position.step % plan.save_every == 0:
                reported.saved(
                    saver.save(position.step, extra=torch.arange(position.step)), position.step
                )
        saver.wait()
        reported.all()


class _Reports:
    """Writes down, on rank 0, which steps are known to be complete: in the background a save is
    when the next one has begun.
    """

    def __init__(self, plan: Plan, rank: int) -> None:
        self.path, self.background, self.writes = plan.root / "reported", plan.background, rank == 0
        self.under_way: int | None = None

    def saved(self, _: Path, step: int) -> None:
        self.all()
        self.under_way = step
        if not self.background:
            self.all()

    def all(self) -> None:
        if self.writes and self.under_way is not None:
            _append(self.path, f"{self.under_way}\n", sync=True)
        self.under_way = None


_write, _fsync = os.write, os.fsync  # as they are before `count_calls`


def _append(path: Path, line: str, *, sync: bool = False) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    _write(fd, line.encode())
    if sync:
        _fsync(fd)
    os.close(fd)


def count_calls(plan: Plan, rank: int) -> list[str]:
    """Replace the functions of `os` that change files: those on the checkpoints are counted, and
    one of them may be this process's last act.

    Returns the names of those counted so far, which grows.
    """
    counted: list[str] = []
    last = plan.die_at[1] if plan.die_at is not None and plan.die_at[0] == rank else -1
    saving = False

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(target: Any, *args: Any, **options: Any) -> Any:
            nonlocal saving
            path = _path_of(target, options.get("dir_fd"))
            if plan.directory in (path, *path.parents):
                # rank 0's first, and that of the others
                saving = saving or (
                    ".saving-" in str(path) and name in ("mkdir", "posix_fallocate")
                )
                if saving == (plan.counted == "save"):
                    if len(counted) == last:
                        if name == "write":
                            original(target, args[0][: len(args[0]) // 2])
                        os.kill(os.getpid(), signal.SIGKILL)
                    counted.append(name)
            return original(target, *args, **options)

        return call

    for name in CALLS:
        setattr(os, name, counting(name, getattr(os, name)))
    return counted


def _path_of(target: Any, dir_fd: int | None) -> Path:
    if isinstance(target, int):
        return Path(os.readlink(f"/proc/self/fd/{target}"))
    return (
        Path(os.readlink(f"/proc/self/fd/{dir_fd}"), target) if dir_fd is not None else Path(target)
    )


def rank_main(rank: int, plan: Plan, store: Path, ready_fd: int, driver: int) -> int:
    """Be one rank; return the exit code."""
    log = os.open(plan.root / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        die_with_parent(driver)
        faulthandler.dump_traceback_later(LINK_S - 5)
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(store), WORLD), rank=rank, world_size=WORLD
        )
        counted = count_calls(plan, rank) if plan.counted else []
        train(rank, plan, lambda: os.close(ready_fd))
        (plan.root / f"calls-{rank}").write_text(json.dumps(counted))
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


# --------------------------------------------------------------------------------------- the driver


@dataclass
class Totals:
    """What the kills of one run of the driver came to."""

    kills: int = 0
    links: int = 0
    inside_a_save: int = 0  # kills that left a save or a removal half done
    newer_than_reported: int = 0  # links that found a checkpoint which nobody had been told of yet
    losses_compared: int = 0
    steps_verified: int = 0
    survivors: int = 0
    slow_survivors: list[str] = field(default_factory=list)  # that had to be killed, too
    calls: Counter[str] = field(default_factory=Counter)


@dataclass
class Reference:
    """The training without a kill."""

    losses: list[dict[int, str]]  # by rank and step
    contents: dict[int, Any]  # of the checkpoint of each step
    step_s: float


class Driver:
    """Runs links of chains in one directory, and checks what each leaves."""

    def __init__(self, root: Path, patience_s: float) -> None:
        self.root, self.patience_s = root, patience_s
        self.totals = Totals()
        self.started_at = 0.0  # when the ranks of the last link were ready
        self.reference = self._train_without_a_kill()

    def _train_without_a_kill(self) -> Reference:
        plan = Plan(self.root / "reference")
        plan.root.mkdir()
        self.run(plan)
        step_s = (time.monotonic() - self.started_at) / NUM_STEPS
        contents = {
            step: verified_content(path) for step, path in list_steps(plan.directory).items()
        }
        assert list(contents) == list(range(1, NUM_STEPS + 1))
        return Reference([dict(losses(plan, rank)) for rank in range(WORLD)], contents, step_s)

    def run(self, plan: Plan, kill: Callable[[list[int]], None] | None = None) -> set[int]:
        """Run the ranks of one link to their end, which `kill` may bring about; return which
        were killed, by it or by themselves.
        """
        for rank in range(WORLD):
            (plan.root / f"losses-{rank}").unlink(missing_ok=True)
        with started(plan) as pids:
            self.started_at = time.monotonic()
            if kill is not None:
                kill(pids)
            statuses = self._wait(plan, pids)
        killed = {rank for rank, status in statuses.items() if status == -signal.SIGKILL}
        failed = {rank: status for rank, status in statuses.items() if status != 0}
        if failed and not killed:
            raise Lost(
                f"ranks ended with {failed}:\n"
                + "".join((plan.root / f"log-{rank}").read_text()[-2000:] for rank in failed)
            )
        return killed

    def _wait(self, plan: Plan, pids: list[int]) -> dict[int, int]:
        """Return each rank's exit status. One that outlives a killed peer by more than our
        patience is ended, and noted.
        """
        statuses: dict[int, int] = {}
        deadline = time.monotonic() + LINK_S
        while len(statuses) < WORLD:
            for rank, pid in enumerate(pids):
                if rank not in statuses and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    statuses[rank] = os.waitstatus_to_exitcode(ended[1])
                    if statuses[rank] == -signal.SIGKILL:
                        deadline = min(deadline, time.monotonic() + self.patience_s)
            if time.monotonic() > deadline:
                for rank in set(range(WORLD)) - set(statuses):
                    self.totals.slow_survivors.append(
                        f"rank {rank}, {'background' if plan.background else 'foreground'}"
                    )
                    os.kill(pids[rank], signal.SIGKILL)
                    os.waitpid(pids[rank], 0)
                    statuses[rank] = 1
            time.sleep(0.002)
        if -signal.SIGKILL in statuses.values():
            self.totals.survivors += sum(status != -signal.SIGKILL for status in statuses.values())
        return statuses

    def link(self, plan: Plan, kill: Callable[[list[int]], None] | None = None) -> set[int]:
        """Run one link and look at everything that it left; return which ranks were killed."""
        found, told = max(list_steps(plan.directory), default=0), last_reported(plan)
        killed = self.run(plan, kill)
        for rank in range(WORLD):
            for step, loss in losses(plan, rank):
                found += not rank
                if not rank and step != found:
                    raise Lost(
                        f"step {step} was trained, and the next one after what was found is {found}"
                    )
                if self.reference.losses[rank][step] != loss:
                    raise Lost(
                        f"the loss of step {step} on rank {rank} is {loss}, and without a kill"
                        f" {self.reference.losses[rank][step]}"
                    )
                self.totals.losses_compared += 1
        steps = list_steps(plan.directory)
        newest, told = max(steps, default=0), max(told, last_reported(plan))
        if newest < told:
            raise Lost(f"step {told} was reported complete, and the newest there is {newest}")
        for step, path in steps.items():
            if verified_content(path) != self.reference.contents[step]:
                raise Lost(f"{path} is whole and not what step {step} is without a kill")
            self.totals.steps_verified += 1
        self.totals.links += 1
        self.totals.kills += bool(killed)
        self.totals.newer_than_reported += newest > told
        self.totals.inside_a_save += bool(killed) and bool(leftovers(plan))
        return killed


@contextlib.contextmanager
def started(plan: Plan) -> Iterator[list[int]]:
    """Fork the ranks, and yield their process ids when all are about to load; none outlives the
    context.
    """
    read_fd, write_fd = os.pipe()
    driver, pids, store = os.getpid(), [], plan.root / "store"
    for rank in range(WORLD):
        pid = os.fork()
        if not pid:
            os._exit(rank_main(rank, plan, store, write_fd, driver))
        pids.append(pid)
    os.close(write_fd)
    try:
        # the end of the pipe: every rank has closed it, or is gone
        if not select.select([read_fd], [], [], LINK_S)[0]:
            raise Lost(f"the ranks of {plan} did not start within {LINK_S} s")
        yield pids
    finally:
        os.close(read_fd)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):  # that it is reaped is the usual case
                if os.waitpid(pid, os.WNOHANG) == (0, 0):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
        store.unlink(missing_ok=True)


def verified_content(path: Path) -> Any:
    """Return what a checkpoint holds, in a form that can be compared, after comparing every byte
    of it with its hash.
    """
    manifest = read_manifest(path)
    if {file.name for file in manifest.files} | {"manifest.json"} != set(os.listdir(path)):
        raise Lost(f"{path} holds {sorted(os.listdir(path))}")
    texts = [(path / file.name).read_bytes() for file in manifest.files]
    for file, text in zip(manifest.files, texts, strict=True):
        if (
            len(text) != file.bytes
            or xxhash.xxh3_128_hexdigest(text[: file.header_bytes]) != file.header_hash
        ):
            raise Lost(f"{path / file.name} is torn, and can be seen")
    for entry in manifest.tensors:
        start = manifest.files[entry.file].header_bytes + entry.offset
        data = texts[entry.file][start : start + entry.num_bytes]
        if [xxhash.xxh3_128_hexdigest(data)] != list(entry.hashes):
            raise Lost(f"{entry.key} in {path} is torn, and can be seen")
    tensors = {
        (entry.file, entry.key): (entry.dtype, entry.shape, entry.hashes)
        for entry in manifest.tensors
    }
    return tensors, manifest.states, manifest.optimizer, manifest.step


def losses(plan: Plan, rank: int) -> list[tuple[int, str]]:
    """Return the steps of the last link and their losses on `rank`, as far as it came."""
    path = plan.root / f"losses-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(step), loss) for step, loss in map(str.split, lines)]


def last_reported(plan: Plan) -> int:
    """Return the last step that was said to be complete, or 0."""
    path = plan.root / "reported"
    return int(path.read_text().split()[-1]) if path.exists() else 0


def leftovers(plan: Plan) -> list[str]:
    """Return what lies about of saves and removals that were not finished."""
    return (
        [path.name for path in plan.directory.glob(".*") if path.name != ".lock"]
        if plan.directory.exists()
        else []
    )


# -------------------------------------------------------------------------- kills at random moments


def kill_at_moments(driver: Driver, seed: int, num_kills: int) -> None:
    """One chain: how it saves, whom each kill hits and when all follow from `seed`."""
    choose = random.Random(seed)
    plan = Plan(
        driver.root / f"chain-{seed}",
        background=choose.random() < 0.6,
        save_every=choose.choice((1, 1, 2)),
        keep_last=choose.choice((None, 1, 2)),
        again=choose.random() < 0.3,
        stop_at=NUM_STEPS - 2,
    )
    plan.root.mkdir()
    done = 0
    while done < num_kills:
        victims, moment = set(choose.choice(([0], [1], [0, 1]))), choose.uniform(0, STEPS_PER_LINK)
        if driver.link(
            plan, partial(kill_at_moment, plan, victims, moment, driver.reference.step_s)
        ):
            done += 1
        else:
            finish(driver, plan)
    finish(driver, plan)


def kill_at_moment(
    plan: Plan, victims: set[int], moment: float, step_s: float, pids: list[int]
) -> None:
    """SIGKILL `victims` after `moment` steps (2.3: after two, and a third of the time that one
    takes); no more if they have ended.
    """
    whole, part = divmod(moment, 1)
    while len(losses(plan, 0)) < whole and not any(map(_ended, pids)):
        time.sleep(0.001)
    time.sleep(part * step_s)
    for rank in victims:
        if not _ended(pids[rank]):
            os.kill(pids[rank], signal.SIGKILL)


def _ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def finish(driver: Driver, plan: Plan) -> None:
    """Let a chain come to its end, at which nothing lies about, and make room for the next."""
    last = replace(
        plan,
        keep_last=1,
        save_every=1,
        stop_at=max(list_steps(plan.directory), default=0) + 2,
        counted="",
        die_at=None,
    )
    driver.link(last)
    if leftovers(last) or len(list_steps(last.directory)) != 1:
        raise Lost(
            f"{last.directory} holds {sorted(os.listdir(last.directory))} after a save that nobody"
            " disturbed"
        )
    shutil.rmtree(plan.root)
    plan.root.mkdir()


# ------------------------------------------------------------------------------ kills at every call


def kill_at_calls(
    driver: Driver, case: str, rank: int, background: bool, only: list[int] | None, sample: bool
) -> None:
    """Let `rank` die at one call after another of a save: of a new step, of one that is there
    already, or while leftovers are removed.
    """
    plan = Plan(
        driver.root / f"{case}-{rank}-{background}",
        background=background,
        keep_last=1,
        again=case == "again",
        stop_at=1,
    )
    plan.root.mkdir()
    driver.link(plan)  # a checkpoint to begin with

    def link(die_at: tuple[int, int] | None) -> set[int]:
        if case == "leftovers":
            plant_leftovers(plan)
        newest = max(list_steps(plan.directory))
        counted = "before" if case == "leftovers" else "save"
        return driver.link(
            replace(plan, stop_at=newest + (case != "again"), counted=counted, die_at=die_at)
        )

    link(None)
    names = json.loads((plan.root / f"calls-{rank}").read_text())
    for call in only or (sampled(names) if sample else range(len(names))):
        if link((rank, call)) != {rank}:
            raise Lost(
                f"call {call} of {len(names)} ({names[call]}) did not kill rank {rank}: are they"
                " others each time?"
            )
        driver.totals.calls[names[call]] += 1
    finish(driver, plan)


def plant_leftovers(plan: Plan) -> None:
    """Put there what killed saves leave: a step half written, one half removed, one that was
    moved aside.
    """
    newest = list_steps(plan.directory)[max(list_steps(plan.directory))]
    for name in (
        ".saving-0000000900-0badcafe",
        f".removing-{newest.name}",
        f".replaced-{newest.name}",
    ):
        shutil.rmtree(plan.directory / name, ignore_errors=True)
        shutil.copytree(newest, plan.directory / name)


def sampled(names: list[str]) -> list[int]:
    """Return the indices of a few calls for all: the first and the last of each run of equal
    ones.
    """
    indices: list[int] = []
    for _, run in groupby(enumerate(names), key=lambda pair: pair[1]):
        same = [index for index, _ in run]
        indices += sorted({same[0], same[-1]})
    return indices


# -------------------------------------------------------------------------------------- the command


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Kill ranks while they save, and look at what they left."
    )
    modes = parser.add_subparsers(dest="mode", required=True)
    moments = modes.add_parser("moments", help="at random moments")
    moments.add_argument("--seed", type=int, default=0, help="of the first chain")
    moments.add_argument("--chains", type=int, default=1)
    moments.add_argument("--kills", type=int, default=10, help="per chain")
    calls = modes.add_parser("calls", help="at system calls of a save")
    for mode in (moments, calls):
        mode.add_argument(
            "--patience",
            type=float,
            default=8.0,
            metavar="S",
            help="how long a rank may outlive its peer",
        )
    calls.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    calls.add_argument(
        "--rank", type=int, choices=range(WORLD), nargs="+", default=list(range(WORLD))
    )
    calls.add_argument("--background", type=int, choices=(0, 1), nargs="+", default=[0, 1])
    calls.add_argument("--call", type=int, nargs="+", help="only these, by number")
    calls.add_argument(
        "--sample",
        action="store_true",
        help="only the first and the last of each run of equal calls",
    )
    return parser.parse_args()


def main() -> None:
    args = parse()
    die_with_parent(os.getppid())
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks are forked
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zeroshard-killed-") as directory:
        driver = Driver(Path(directory), args.patience)
        if args.mode == "moments":
            for seed in range(args.seed, args.seed + args.chains):
                with replayed_by(f"moments --seed {seed} --kills {args.kills}"):
                    kill_at_moments(driver, seed, args.kills)
        else:
            for case, rank, background in [
                (c, r, b) for c in args.case for r in args.rank for b in args.background
            ]:
                if case == "leftovers" and rank:
                    continue  # rank 0 removes them
                with replayed_by(f"calls --case {case} --rank {rank} --background {background}"):
                    kill_at_calls(driver, case, rank, bool(background), args.call, args.sample)
    print(json.dumps(vars(driver.totals) | {"seconds": round(time.monotonic() - begin, 1)}))


@contextlib.contextmanager
def replayed_by(command: str) -> Iterator[None]:
    try:
        yield
    except Lost as lost:
        raise Lost(f"{lost}\nto see it again: python -m tests.support.killed {command}") from None


if __name__ == "__main__":
    main()
