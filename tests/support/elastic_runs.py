"""Ranks that train, keep every step in memory, and die as a plan says: the script of the tests of
``zeroshard run --elastic``, and the same training without a death to compare with.

    zeroshard run --elastic --nproc 2 tests/support/elastic_runs.py DIRECTORY '{"deaths": [...]}'

Each rank appends to DIRECTORY/log-RANK what it does, with the time (CLOCK_MONOTONIC, the same for
all processes of the machine).
"""

from __future__ import annotations

import time

_begin = time.monotonic()  # before torch is imported

import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
from dataclasses import asdict, dataclass, field  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import zeroshard as zs  # noqa: E402
from zeroshard.core.digest import digest_of  # noqa: E402

WIDTH = 24


@dataclass(frozen=True)
class Death:
    """One rank's end, in the start of the job that has `world` ranks."""

    world: int
    rank: int
    step: int  # the step that it does not finish; 0: while it starts
    # "start" (before it joins the others), "load", "forward", "step" (taken, not kept), "keep"
    where: str = "forward"
    call: int = 0  # of "keep": which change of its memory is the last
    code: int | None = None  # exit code; None: SIGKILL


@dataclass(frozen=True)
class Plan:
    """What the ranks do."""

    steps: int = 12
    keeps: bool = True
    save_every: int = 0  # on disk
    redundancy: int = 0
    pause_s: float = 0.0  # per step, for those who kill from outside
    deaths: list[Death] = field(default_factory=list)
    leaves: int | None = None  # of a step, on however many ranks
    gate: int = 0  # the step that begins only when the file "open" is in the directory
    saves_on_sigterm: bool = False  # finish the step, keep it, and leave with exit code 75
    device: str = "cpu"  # "zsim": the pretended accelerator

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Plan:
        raw = json.loads(text)
        return Plan(**{**raw, "deaths": [Death(**one) for one in raw.get("deaths", [])]})


@dataclass(frozen=True)
class Event:
    """A line of a log."""

    at: float
    pid: int
    world: int
    rank: int
    name: str  # "begin", "imported", "joined", "loaded", "step", "kept", "dies"
    step: int = 0
    value: str = ""  # the loss in hexadecimal; where what was loaded lay


def events(directory: Path) -> list[Event]:
    """Return what all ranks have written, in order of time."""
    lines = [line for path in directory.glob("log-*") for line in path.read_text().splitlines()]
    return sorted((Event(**json.loads(line)) for line in lines), key=lambda event: event.at)


class _Rank:
    def __init__(self, directory: Path, plan: Plan, rank: int, world: int) -> None:
        self.directory, self.plan, self.rank, self.world = directory, plan, rank, world
        self.told = False
        if plan.saves_on_sigterm:
            signal.signal(signal.SIGTERM, self.remember)

    def note(self, name: str, step: int = 0, value: str = "", at: float | None = None) -> None:
        now = time.monotonic() if at is None else at
        event = Event(now, os.getpid(), self.world, self.rank, name, step, value)
        fd = os.open(self.directory / f"log-{self.rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, json.dumps(asdict(event)).encode() + b"\n")
        os.close(fd)

    def pass_gate(self, step: int) -> None:
        """Wait at the gate, also after SIGTERM if nobody handles it."""
        while step == self.plan.gate and not self.told and not (self.directory / "open").exists():
            time.sleep(0.01)

    def remember(self, *_: object) -> None:
        self.told = True

    def leave_if_told(self) -> None:
        """Leave, as preempted, where any rank was told to. Collective."""
        told = torch.tensor(int(self.told))
        if self.world > 1:
            dist.all_reduce(told, op=dist.ReduceOp.MAX)
        if told:
            sys.exit(75)

    def death(self, step: int, where: str) -> Death | None:
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
            return None  # as many ranks again, and they live
        here = (self.world, self.rank, step, where)
        found = (d for d in self.plan.deaths if (d.world, d.rank, d.step, d.where) == here)
        return next(found, None)

    def may_die(self, step: int, where: str) -> None:
        death = self.death(step, where)
        if death is not None:
            self.die(death)

    def die(self, death: Death) -> None:
        self.note("dies", death.step)
        if death.code is None:
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(death.code or 0)


def make(
    leaves: int | None = None, device: str = "cpu"
) -> tuple[torch.nn.Module, torch.optim.Optimizer, zs.Engine]:
    """Return the model, the optimizer and the engine that every training here has; with dropout in
    a run with `leaves`, whose random numbers are theirs.
    """
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    dropout = torch.nn.Dropout(0.0 if leaves is None else 0.1)
    model = torch.nn.Sequential(*layers, dropout, torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = zs.shard(model, optimizer, stage=3, units=[torch.nn.Linear], leaves=leaves)
    return model, optimizer, engine


def step_once(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int, rank: int, world: int
) -> float:
    """Take one step with a batch that depends on its number, the rank and the world alone."""
    generator = torch.Generator().manual_seed(1000 * number + 10 * world + rank)
    loss = model(torch.randn(4, WIDTH, generator=generator)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def leaves_once(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, engine: zs.Engine, number: int
) -> float:
    """Take one step of leaves; return the loss of the last one here."""
    loss, device = torch.zeros(()), next(model.parameters()).device
    for leaf in engine.leaves(number):
        generator = torch.Generator().manual_seed(1000 * number + leaf)
        x = torch.randn(4, WIDTH, generator=generator)
        loss = model(x.to(device)).square().mean()
        engine.backward(loss)
    engine.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def weights_of(engine: zs.Engine) -> str:
    """Return a hash of all weights, on rank 0. Collective."""
    state = engine.full_state_dict()
    return digest_of(*(state[name] for name in sorted(state))) if state else ""


def train_leaves(rank: int, world: int, steps: int, leaves: int, device: str = "cpu") -> str:
    """Train without a death; return the hash of the weights. For `run_ranks`."""
    model, optimizer, engine = make(leaves, device)
    for number in range(1, steps + 1):
        leaves_once(model, optimizer, engine, number)
    found = weights_of(engine)
    engine.close()
    return found


def main() -> None:
    imported, directory, plan = time.monotonic(), Path(sys.argv[1]), Plan.from_json(sys.argv[2])
    me = _Rank(directory, plan, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    me.note("begin", at=_begin)
    me.note("imported", at=imported)
    me.may_die(0, "start")
    if plan.device == "zsim":
        importlib.import_module("tests.device.zsim")  # and else never: its lanes are threads
    zs.init_distributed()
    me.note("joined")
    model, optimizer, engine = make(plan.leaves, plan.device)
    steps, begin = directory / "steps", 0
    with zs.Saver(steps, engine, background=False, redundancy=plan.redundancy) as saver:
        me.may_die(0, "load")
        if zs.latest_step(steps) is not None:
            restored = zs.load(steps, engine)
            begin = restored.step
            me.note("loaded", begin, "memory" if restored.from_memory else "disk")
        for number in range(begin + 1, plan.steps + 1):
            me.pass_gate(number)
            me.may_die(number, "forward")
            if plan.leaves is None:
                loss = step_once(model, optimizer, number, me.rank, me.world)
            else:
                loss = leaves_once(model, optimizer, engine, number)
            me.note("step", number, loss.hex())
            me.may_die(number, "step")
            if plan.keeps:
                _keep(me, saver, number)
            if plan.save_every and number % plan.save_every == 0:
                saver.save(number)
            if plan.saves_on_sigterm:
                me.leave_if_told()
            time.sleep(plan.pause_s)
    if plan.leaves is not None:
        me.note("weights", plan.steps, weights_of(engine))
    engine.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _keep(me: _Rank, saver: zs.Saver, step: int) -> None:
    death, count = me.death(step, "keep"), 0
    pwrite, ftruncate = os.pwrite, os.ftruncate

    def counting(call: Any) -> Any:
        def counted(*arguments: Any) -> Any:
            nonlocal count
            count += 1
            if death is not None and count > death.call:
                if call is pwrite:  # a part of it, so that it is torn
                    call(arguments[0], arguments[1][: len(arguments[1]) // 2], arguments[2])
                me.die(death)
            return call(*arguments)

        return counted

    os.pwrite, os.ftruncate = counting(pwrite), counting(ftruncate)
    try:
        saver.keep(step)
    finally:
        os.pwrite, os.ftruncate = pwrite, ftruncate
    me.note("kept", step, str(count))


def save_every_step(rank: int, world: int, directory: Path, steps: int) -> list[str]:
    """Train without a death and save each step on disk; return the losses. For `run_ranks`."""
    model, optimizer, engine = make()
    losses = []
    for number in range(1, steps + 1):
        losses.append(step_once(model, optimizer, number, rank, world).hex())
        zs.save(directory, engine, step=number)
    engine.close()
    return losses


def resume(
    rank: int, world: int, directory: Path, step: int, steps: int, saved: Path | None = None
) -> list[str]:
    """Go on from `step` on disk, save each step in `saved`; return the losses. For `run_ranks`."""
    model, optimizer, engine = make()
    if step:
        zs.load(directory, engine, step=step)
    losses = []
    for number in range(step + 1, steps + 1):
        losses.append(step_once(model, optimizer, number, rank, world).hex())
        if saved is not None:
            zs.save(saved, engine, step=number)
    engine.close()
    return losses


def losses_from(found: list[Event], world: int, step: int) -> list[list[str]]:
    """Return the losses of the last start with `world` ranks after `step`, by rank."""
    return [
        [one.value for one in found if (one.name, one.world, one.rank) == ("step", world, rank)
         and one.step > step]
        for rank in range(world)
    ]  # fmt: skip


if __name__ == "__main__":
    main()
