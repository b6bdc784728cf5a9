"""Runs a program twice on every rank, by hand and sharded, and says how it came out."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import itertools
import json
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zeroshard as zs
from tests.fuzz.model import FEATURES, ROWS_IN_BATCH, VOCABULARY, AllRanks, BadBatchError, FuzzNet
from tests.fuzz.optimizers import free_of, make_optimizer, parts_of
from tests.fuzz.program import (
    CUT_OFF,
    EVENTS,
    INTERRUPTS,
    NEUTRAL,
    READS,
    WRITES,
    Micro,
    Program,
    Step,
    describe,
    experts_apart,
    num_leaves,
)
from tests.fuzz.reference import DECAY, DTYPES, ByHand, ByLeaves, Change, Saves, sum_of
from tests.support import inside
from tests.support.harness import RankError, run_ranks
from tests.support.training import has_parameters
from zeroshard.core.policy import ROWS
from zeroshard.errors import StateError, ZeroshardError
from zeroshard.launch.cli import main

STALL_S = 120.0
SHORT_STALL_S = 1.0  # where a stall may be the right answer
TIMEOUT_S = 200.0
READS_EVERY_S = 0.001  # of a thread beside the loop
PACKAGE = str(Path(zs.__file__).parent)


@dataclass(frozen=True)
class Outcome:
    """`kind`: same, refused, differs, error, crash, hang, or impossible (torch itself cannot run
    it).
    """

    kind: str
    detail: str = ""

    @property
    def is_good(self) -> bool:
        return self.kind in ("same", "refused")


class Trainer(Protocol):
    """What a program's loop needs; `ByHand` and `Sharded` have it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def no_sync(self) -> contextlib.AbstractContextManager[None]: ...
    def looking(self) -> contextlib.AbstractContextManager[None]: ...
    def backward(
        self, loss: torch.Tensor, *, retain_graph: bool = False, weights: Sequence[float] = ()
    ) -> None: ...
    def shadow(self, *, sync: bool, weights: Sequence[float]) -> None: ...
    def joined(self, here: bool) -> contextlib.AbstractContextManager[bool]: ...
    def leaves(self, step: int) -> Iterator[int]: ...
    def clip(self, max_norm: float) -> float: ...
    def step(self) -> None: ...
    def zero_grad(self, kind: str) -> None: ...
    def zero_part(self, names: list[str]) -> None: ...
    def assign(self, grads: Mapping[str, torch.Tensor]) -> None: ...
    def average(self) -> None: ...
    def swapped(self) -> contextlib.AbstractContextManager[None]: ...
    def edit(self, change: Change) -> None: ...
    def climb(self, change: Change) -> None: ...
    def write(self, change: Change) -> None: ...
    def offload(self) -> None: ...
    def repartition(self, row: str) -> None: ...
    def save(self) -> None: ...
    def load(self) -> None: ...
    def back(self) -> None: ...
    def modes(self) -> float: ...
    def read(self, how: str, *, within: bool = False) -> float: ...
    def cut_off(self, attempt: Callable[[], None], *, loads: bool) -> None: ...
    def reset(self) -> None: ...
    def finish(self) -> dict[str, torch.Tensor]: ...


class Sharded:
    """Trains the same model through zeroshard."""

    def __init__(self, model: nn.Module, program: Program, path: str, trail: str = "") -> None:
        """`trail`: the folder in `path` to which a trail is written."""
        self.model, self.program, self.path = model, program, path
        self.optimizer = make_optimizer(program, model.parameters())
        self.engine = zs.shard(model, self.optimizer, **_options(program, model, path))
        self.waits = random.Random(program.seed)  # for what the host steps in the backward
        self.ema = zs.EMA(self.engine, DECAY) if program.averaged else None
        self.saves = Saves(program.keep_last)
        self.savers: list[zs.Saver] = []
        if any("save" in step.between for step in program.steps):
            self.savers.append(self._saver())
        self.trail = Path(path) / trail if trail else None
        self.trailing = contextlib.ExitStack()
        self._enter_trail()

    def _enter_trail(self) -> None:
        if self.trail is not None:
            self.trailing.enter_context(self.engine.trail(self.trail, every=1))

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.engine.no_sync()

    def looking(self) -> contextlib.AbstractContextManager[None]:
        return zs.detect_anomaly(self.engine)

    def backward(
        self, loss: torch.Tensor, *, retain_graph: bool = False, weights: Sequence[float] = ()
    ) -> None:
        if weights and self.program.weights == "losses":
            of_rank = weights[0] if self.program.leaves else weights[self.engine.rank]
            self.engine.backward(loss, weight=of_rank)
        elif retain_graph:
            loss.backward(retain_graph=True)
        else:
            self.engine.backward(loss)
        if self.program.ahead and self.waits.random() < 0.8:
            inside.await_drafts(self.engine)

    def shadow(self, *, sync: bool, weights: Sequence[float]) -> None:
        """join() does it at its end."""

    @contextlib.contextmanager
    def joined(self, here: bool) -> Iterator[bool]:
        with self.engine.join():
            yield here

    def leaves(self, step: int) -> Iterator[int]:
        number = None if self.program.counted else step
        return self.engine.leaves(number, seed=self.program.seed)

    def clip(self, max_norm: float) -> float:
        return float(self.engine.clip_grad_norm_(max_norm))

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self, kind: str) -> None:
        if kind == "model":
            self.model.zero_grad()
        elif kind != "keep":
            self.optimizer.zero_grad(set_to_none=kind != "zeros")

    def zero_part(self, names: list[str]) -> None:
        parameters = dict(self.model.named_parameters())
        for name in names:
            parameters[name].grad = None

    def assign(self, grads: Mapping[str, torch.Tensor]) -> None:
        parameters = dict(self.model.named_parameters())
        for name, grad in grads.items():
            parameters[name].grad = grad

    def average(self) -> None:
        assert self.ema is not None
        self.ema.update()

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        assert self.ema is not None
        with self.ema.swapped():
            for call in (self.ema.update, self.ema.swapped().__enter__, self.optimizer.step):
                _refused(call)
            yield

    @torch.no_grad()
    def edit(self, change: Change) -> None:
        with self.engine.gathered(writeback=True):
            for _, parameter in self._trained():
                change(parameter)

    @torch.no_grad()
    def climb(self, change: Change) -> None:
        saved = {}
        with self.engine.gathered(writeback=True):
            for name, parameter in self._trained():
                saved[name] = parameter.clone()
                change(parameter)
        with self.engine.gathered(writeback=True):
            for name, parameter in self._trained():
                parameter.copy_(saved[name])

    @torch.no_grad()
    def write(self, change: Change) -> None:
        """Write by one way after another; sharded weights refuse, and are edited."""
        if self.program.remainder:  # refused in every row
            self.edit(change)
            return
        for place, (_, parameter) in enumerate(self._trained()):
            try:
                view = parameter.data if place % 2 else parameter.detach()
            except StateError:
                self.edit(change)
                return
            change(view if place % 3 else torch.from_dlpack(view))

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]

    def offload(self) -> None:
        """Part with the states, and ask for them all the same, which changes nothing."""
        self.engine.offload_states()
        _refused(lambda: self.engine.clip_grad_norm_(1.0))
        if self.program.optimizer_tier == "device":
            _refused(lambda: zs.EMA(self.engine))
        if self.ema is not None:
            _refused(self.ema.update)
        self.engine.reload_states()

    def repartition(self, row: str) -> None:
        self.trailing.close()
        self.engine.repartition(policy=row)
        self._enter_trail()

    @property
    def _states(self) -> dict[str, zs.EMA]:
        return {} if self.ema is None else {"ema": self.ema}

    def _saver(self, **options: Any) -> zs.Saver:
        keep = self.program.keep_last
        return zs.Saver(self.path, self.engine, states=self._states, keep_last=keep, **options)

    def save(self) -> None:
        """Save with the newest saver; the others were made before."""
        step = self.saves.save()
        if self.saves.count % 2 == 0:
            self.savers.append(self._saver(background=False))
        self.savers[-1].save(step)
        self.savers[-1].wait()
        if self.engine.rank == 0:
            there = sorted(int(found.name[5:]) for found in Path(self.path).glob("step-*"))
            newest = zs.latest_step(self.path)
            assert (there, newest) == (sorted(self.saves.there), step), (there, newest, step)

    def load(self) -> None:
        newest = self.saves.load(back=False)
        restored = zs.load(self.path, self.engine, states=self._states)
        assert restored.step == newest, f"step {restored.step} is not {newest}, the newest"

    def back(self) -> None:
        step = self.saves.load(back=True)
        zs.load(self.path, self.engine, step=step, states=self._states)

    def modes(self) -> float:
        """Evaluate as the optimizer with modes says, and train on."""
        free = free_of(self.optimizer)
        free.eval()
        out = self.read("read")
        free.train()
        return out

    def read(self, how: str, *, within: bool = False) -> float:
        named = dict(self.model.named_parameters())
        if how == "read":
            state = self.engine.full_state_dict(rank0_only=False)
            return sum_of([state[name].to(parameter.dtype) for name, parameter in named.items()])
        with self.engine.gathered():
            return sum_of(named.values())

    def cut_off(self, attempt: Callable[[], None], *, loads: bool) -> None:
        """Begin a step that ends by an exception, and reset; `loads`: it may have been taken in
        part, and what was before is loaded.
        """
        before = f"{self.path}/before"
        self.read("read")  # else some may still be in the step before
        if loads:
            zs.save(before, self.engine, step=1, states=self._states)
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        try:
            attempt()
            raise AssertionError("nothing has raised")
        except (BadBatchError, KeyboardInterrupt, StateError) as error:
            if isinstance(error, StateError) and "gave up this step" not in str(error):
                raise  # else another rank was there before
        self.engine.reset()
        if loads:
            zs.load(before, self.engine, states=self._states)
        for buffer, value in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(value)

    def reset(self) -> None:
        self.engine.reset()

    def finish(self) -> dict[str, torch.Tensor]:
        self.trailing.close()
        for saver in self.savers:
            saver.close()
        state = self.engine.full_state_dict(rank0_only=False)
        self.engine.close()
        for name, parameter in self.model.named_parameters():  # has its master's numbers
            given = parameter.detach().to(state[name].dtype)
            same = torch.equal(given.nan_to_num(), state[name].nan_to_num())
            assert same or self.program.coded, f"close() gives other numbers of {name} back"
        return state


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[None]:
    """Read weights in a thread of its own, which has them or is told why not."""
    told, over = list[Exception](), threading.Event()

    def read() -> None:
        for number in itertools.count():
            for parameter in model.parameters():
                with contextlib.suppress(StateError), torch.no_grad():
                    # a tensor of its own, which holds its memory
                    float((parameter.data if number % 2 else parameter.detach()).sum())
            if over.wait(READS_EVERY_S):
                return

    def look() -> None:
        try:
            read()
        except Exception as error:
            told.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if told:
        raise AssertionError(f"a thread beside the loop got {told[0]!r}")


class _Struck(KeyboardInterrupt):
    """Raised by a signal's handler."""


class _Strike:
    """A signal at the n-th place inside the package where Python looks for one."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __enter__(self) -> None:
        if self.left > 0:
            self._handler = signal.signal(signal.SIGUSR2, self._raise)
            sys.setprofile(self._look)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        if self.left >= 0 and hasattr(self, "_handler"):
            signal.signal(signal.SIGUSR2, self._handler)

    def _look(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(PACKAGE):
            self.left -= 1
            if not self.left:
                sys.setprofile(None)
                signal.raise_signal(signal.SIGUSR2)

    @staticmethod
    def _raise(number: int, frame: FrameType | None) -> None:
        raise _Struck


def _refused(call: Callable[[], object]) -> None:
    """Make a call that has no meaning now; it says so."""
    try:
        call()
    except StateError:
        return
    raise AssertionError(f"{call} was not refused")


def _options(program: Program, model: nn.Module, path: str) -> dict[str, Any]:
    tiers = (program.weight_tier, program.grad_tier, program.optimizer_tier)
    comm = zs.Comm.model_validate(
        {
            "transport": program.transport if program.world > 1 else "auto",
            "node_size": program.node_size,
            "weight_codec": program.weight_codec,
            "grad_codec": program.grad_codec,
            "ordered": program.transport == "nccl" or None,  # else sums are the backend's
        }
    )
    stall = STALL_S
    if _may_refuse(program):
        stall = SHORT_STALL_S if program.branches else 4 * SHORT_STALL_S
    precision: Any = program.precision
    if program.remainder:
        precision = zs.Precision(program.precision, master="remainder")
    options: dict[str, Any] = {
        "policy": program.row,
        "precision": precision,
        "comm": comm,
        "stall_timeout_s": stall,
    }
    if set(tiers) != {"device"}:
        disk = {"disk_path": path} if "disk" in tiers else {}
        weight, grad, optimizer = tiers
        options["offload"] = zs.Offload.model_validate(
            {
                "weight": weight,
                "grad": grad,
                "optimizer": optimizer,
                "fraction": program.fraction,
                **disk,
                **({} if program.delayed is None else {"delayed_update": program.delayed}),
                **({"step_in_backward": True} if program.ahead else {}),
            }
        )
    if program.leaves is not None:
        options["leaves"] = program.leaves
    if program.weights == "batches":
        options["batch_shares"] = _weights(program, 0)
    if program.along_cp:
        shape = (1, program.world)
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    if program.has_experts:
        apart = experts_apart(program.world)
        mesh = init_device_mesh("cpu", (program.world // apart, apart), mesh_dim_names=("dp", "ep"))
        options["mesh_of"] = {"*.experts": mesh}
    for name in ("strict", "verify_every", "prefetch_bytes", "shares", "ownership"):
        if getattr(program, name) is not None:
            options[name] = getattr(program, name)
    if parts := parts_of(program, dict(model.named_parameters())):
        options["matrix_parts"] = parts
    is_unit = functools.partial(_is_unit, program)
    if program.units != "default" and any(
        is_unit(name, module) for name, module in model.named_modules()
    ):
        options["units"] = is_unit
    return options


def _is_unit(program: Program, name: str, module: nn.Module) -> bool:
    if program.units == "root":
        return not name
    if program.units == "leaves":
        return has_parameters(name, module)
    return (
        any(True for _ in module.parameters())
        and random.Random(f"{program.seed} {name}").random() < 0.4
    )


def _may_refuse(program: Program) -> tuple[str, ...]:
    """Return the errors that are a right answer to this program; see docs/not-tested.md."""
    rows = (program.row, *(event for step in program.steps for event in step.between))
    gathers = [replace(program, row=row).gathers_in_step for row in rows if row in ROWS]
    absent = any(step.absent for step in program.steps)
    # a rank without data gathers as in its own last pass
    if (program.branches and program.gathers_in_step) or (absent and any(gathers)):
        return ("StallError", "PlanMismatch")
    return ()


# ----------------------------------------------------------------------------------------- the loop


def _inputs(program: Program, rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100_000 * program.seed + 100 * number + rank)
    dtype = DTYPES[program.precision]
    if program.tokens:
        shape = (ROWS_IN_BATCH,)
        return torch.randint(0, VOCABULARY, shape, generator=generator), torch.randint(
            0, VOCABULARY, shape, generator=generator
        )
    x = torch.randn(ROWS_IN_BATCH, FEATURES, generator=generator).to(dtype)
    return x.requires_grad_(program.input_grad), torch.randn(
        ROWS_IN_BATCH, FEATURES, generator=generator
    )


def _weights(program: Program, number: int) -> list[float]:
    """Return the weight of each rank's loss in backward `number`, not all of them 0."""
    rng = random.Random(f"{program.seed} weights {number}")
    if program.weights == "batches":
        cuts = sorted(rng.randint(0, 8) for _ in range(program.world - 1))
        ends = zip([0, *cuts], [*cuts, 8], strict=True)
        parts = [stop - start + (program.leaves is not None) for start, stop in ends]
        return [part / sum(parts) for part in parts]  # of leaves each rank has one at least
    weights = [rng.choice((0.0, 1.0, 2.0, 3.0, 0.75)) for _ in range(program.world)]
    return weights if any(weights) else [1.0, *weights[1:]]


class _Loop:
    """A program's steps on one rank; `numbers` is everything that it computes on the way."""

    def __init__(
        self, program: Program, rank: int, trainer: Trainer, *, planted: bool = False
    ) -> None:
        """`planted`: the loss of the first leaf is another one."""
        self.program, self.rank, self.trainer = program, rank, trainer
        self.planted = planted
        self.numbers: dict[tuple[int, int | None, int], float] = {}  # by step, leaf, and in order
        self._step = self._count = self._num_backwards = 0
        self._leaf: int | None = None

    def run(self) -> None:
        program, trainer = self.program, self.trainer
        scheduler = (
            torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1, 0.7) if program.schedule else None
        )
        for self._step, step in enumerate(program.steps):
            here = self.rank not in step.absent
            with trainer.joined(here) if step.absent else contextlib.nullcontext(True) as runs:
                with trainer.looking() if program.looks else contextlib.nullcontext():
                    self._take(step, here=here)
                if runs:
                    self._end(step, here=here)
            if scheduler is not None:
                with warnings.catch_warnings():
                    # an fp16 step that is skipped leaves the scheduler ahead
                    warnings.simplefilter("ignore")
                    scheduler.step()
            for event in step.between:
                if program.trailed:  # each begins as it does in the run without the others
                    self._begin_leaf(None)
                self._between(event)

    def _end(self, step: Step, *, here: bool) -> None:
        """End a step, in the place of join() where this rank is not `here`."""
        trainer = self.trainer
        if step.assigned:
            trainer.assign(self._grads())
        if step.clip is not None:
            norm = trainer.clip(step.clip)
            self._note(*[norm] * here)
        trainer.step()
        if self.program.averaged:
            trainer.average()
        trainer.zero_grad(step.zero)

    def _take(self, step: Step, *, here: bool) -> None:
        """Run the micro-batches of a step, or its leaves."""
        for micro in () if self.program.leaves else step.micros:
            if here:
                self._micro(micro)
                continue
            self._count += micro.forwards
            for _ in range({"once": 1, "twice": 2, "each": micro.forwards}[micro.backward]):
                self.trainer.shadow(sync=not micro.no_sync, weights=self._next_weights())
        for leaf in self.trainer.leaves(self._step) if self.program.leaves else ():
            self._begin_leaf(leaf)
            self._micro(step.micros[0])
        if self.program.leaves:
            self._begin_leaf(None)

    def _begin_leaf(self, leaf: int | None) -> None:
        """Count as everyone does who is at this leaf, or after all of a step."""
        every = num_leaves(self.program)
        self._leaf = leaf
        self._num_backwards = self._step * every + (every if leaf is None else leaf)
        self._count = 4 * self._num_backwards

    def _note(self, *numbers: float) -> None:
        for number in numbers:
            at = sum(place[:2] == (self._step, self._leaf) for place in self.numbers)
            self.numbers[self._step, self._leaf, at] = number

    @property
    def _place(self) -> int:
        """Whose data, route and random numbers: the rank's, or with leaves those of all."""
        return self.rank if self.program.leaves is None else self._leaf or 0

    def _grads(self) -> dict[str, torch.Tensor]:
        """Return gradients to assign, the same on every rank, of a third of the parameters."""
        trained = [(n, p) for n, p in self.trainer.model.named_parameters() if p.requires_grad]
        generator = torch.Generator().manual_seed(self.program.seed + self._count)
        return {
            name: (0.01 * torch.randn(p.shape, generator=generator)).to(p.dtype)
            for name, p in trained[self._count % 3 :: 3]
        }

    def _between(self, event: str) -> None:
        trainer = self.trainer
        if event == "average":
            with trainer.swapped():
                self._evaluate(Micro(), "no_grad")
        elif event == "reset":
            try:
                self._forward(Micro(), fails=True)
            except BadBatchError:
                trainer.reset()
        elif event in INTERRUPTS:
            self._interrupt(late=event == "late")
        elif event in CUT_OFF:
            before = self._count, self._num_backwards
            attempt = functools.partial(self._attempt, *event.split())
            trainer.cut_off(attempt, loads=event in ("signal clip", "signal step"))
            self._count, self._num_backwards = before
            self._leaf = None
        elif event in READS:
            self._note(trainer.read(event))
        elif event == "modes":
            self._note(trainer.modes())
        elif event in (*EVENTS, "back"):
            getattr(trainer, event)()
        elif event in WRITES:
            getattr(trainer, event)(_set_row if self._count % 2 else _shrink)
        else:
            trainer.repartition(event)

    def _interrupt(self, *, late: bool) -> None:
        """Begin a step whose backward raises, at its loss or (`late`) when it has come to the
        first layer; reset.
        """

        def fails(grad: torch.Tensor) -> None:
            raise BadBatchError

        def watch(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            output.register_hook(fails)

        trainer = self.trainer
        assert isinstance(trainer.model, FuzzNet)
        hook = trainer.model.first.register_forward_hook(watch) if late else None
        try:
            for leaf in trainer.leaves(self._step + 1) if self.program.leaves else (None,):
                if leaf is not None:
                    self._begin_leaf(leaf)
                loss, _ = self._forward(Micro())
                if not late:
                    loss.register_hook(fails)
                trainer.backward(loss, weights=self._next_weights())
            raise AssertionError("nothing has raised")
        except (BadBatchError, StateError) as error:
            if isinstance(error, StateError) and "gave up this step" not in str(error):
                raise  # else another rank was there before
            trainer.reset()
        if hook is not None:
            hook.remove()
        if self.program.leaves:
            self._begin_leaf(None)

    def _attempt(self, kind: str, where: str) -> None:
        """Take a step that one rank gives up by an exception `where` it says, or in which signals
        come to some.
        """
        trainer, world = self.trainer, self.program.world
        rng = random.Random(f"{self.program.seed} {kind} {where} {self._step} {self._count}")
        alone = kind == "alone" or rng.random() < 0.4
        gives_up = not alone or rng.randrange(world) == self.rank
        lefts = [int(2 ** rng.uniform(0, 10)) for _ in range(world)]
        strike = _Strike(lefts[self.rank] if kind == "signal" and gives_up else 0)
        fails = kind == "alone" and gives_up

        def within(phase: str) -> contextlib.AbstractContextManager[None]:
            return strike if phase == where else contextlib.nullcontext()

        if where == "gather":
            with within("gather"):
                for how in READS:
                    trainer.read(how)
        for leaf in trainer.leaves(self._step + 1) if self.program.leaves else (None,):
            if leaf is not None:
                self._begin_leaf(leaf)
            with within("forward"):
                loss, _ = self._forward(Micro(), fails=fails and where == "forward")
            if fails and where == "backward":
                loss.register_hook(_give_up)
            with within("backward"):
                trainer.backward(loss, weights=self._next_weights())
        if gives_up and where not in ("clip", "step"):  # after the clip others may step
            raise BadBatchError
        if (where, kind) != ("step", "alone"):  # else the others need nobody for their step
            with within("clip"):
                trainer.clip(1.0)
        if gives_up and (where, kind) != ("step", "signal"):
            raise BadBatchError
        with within("step"):
            trainer.step()
        # at the end of its clip a rank may have given all that the others need for their step, and
        # gives up there where its signal was to come later than `where` lasts
        assert kind == "signal", "nobody was told that one gave up"
        raise BadBatchError

    def _micro(self, micro: Micro) -> None:
        trainer = self.trainer
        with trainer.no_sync() if micro.no_sync else contextlib.nullcontext():
            pairs = [self._forward(micro) for _ in range(micro.forwards)]
            losses = [loss for loss, _ in pairs]
            if micro.before:
                losses[-1] = self._before(micro, *pairs[-1])
            if micro.penalty:
                losses[-1] = losses[-1] + 1e-2 * self._penalty(micro.penalty)
            if micro.evaluate:
                self._evaluate(micro, micro.evaluate)
            if micro.reads == "show":
                self._note(trainer.read("show", within=True))
            self._backward(micro, losses)
            if micro.reads == "read":
                self._note(trainer.read("read", within=True))
        self._note(*(loss.item() for loss in losses))
        if micro.zero_part:
            names = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
            trainer.zero_part(names[1 :: 1 + self._count % 3])

    def _forward(
        self, micro: Micro, number: int | None = None, *, fails: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        program, model = self.program, self.trainer.model
        assert isinstance(model, nn.Module)
        number = self._count if number is None else number
        self._count += 1
        x, target = _inputs(program, 0 if program.leaves else self.rank, number)
        if program.leaves is None:
            torch.manual_seed(1000 * number + self.rank)  # of dropout
        halves = micro.halves or ("lr",)
        for module in model.modules():
            if hasattr(module, "halves"):
                module.halves = halves[self._place % len(halves)]
        routes = micro.routes
        route = routes[self._place % len(routes)] if routes else tuple(range(len(program.layers)))
        out, extra = model(x, route, fails=fails)
        if extra is not None:
            out = out * extra.mean()
        if program.gathered_features:
            return _contrasted(out.float(), self.rank), x
        if program.tokens:
            return nn.functional.cross_entropy(out.float(), target), x
        return (out.float() - target).square().mean(), x

    def _before(self, micro: Micro, loss: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Differentiate by the input first; a penalty goes into the loss."""
        if micro.before == "grad":
            (grad,) = torch.autograd.grad(loss, x, retain_graph=True)
            self._note(grad.double().sum().item())
            return loss
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + (grad.float().norm() - 1.0).square()

    def _penalty(self, kind: str) -> torch.Tensor:
        parameters = [p for p in self.trainer.model.parameters() if p.requires_grad]
        if kind == "float":
            return torch.stack([p.float().pow(2).sum() for p in parameters]).sum()
        return torch.stack([p.square().sum().float() for p in parameters]).sum()

    def _evaluate(self, micro: Micro, how: str) -> None:
        model = self.trainer.model
        model.eval()
        with torch.inference_mode() if how == "inference" else torch.no_grad():
            loss, _ = self._forward(micro, 90 + self._count % 7)
            self._note(loss.item())
        model.train()

    def _backward(self, micro: Micro, losses: list[torch.Tensor]) -> None:
        trainer = self.trainer
        if self.planted and (self._step, self._leaf) == (0, 0):
            losses = [1.5 * loss for loss in losses]
        if micro.backward == "each":
            for loss in reversed(losses):
                trainer.backward(loss, weights=self._next_weights())
            return
        loss = torch.stack(losses).sum() if len(losses) > 1 else losses[0]
        if micro.backward == "twice":
            trainer.backward(loss, retain_graph=True)
            trainer.backward(loss * 0.5)
        else:
            trainer.backward(loss, weights=self._next_weights())

    def _next_weights(self) -> list[float]:
        """Return the weights of the next backward, none where losses have no weight."""
        if not self.program.weights:
            return []
        self._num_backwards += 1
        if self.program.weights == "losses":
            if self.program.leaves is None:
                absent = self.program.steps[self._step].absent
                weights = _weights(self.program, self._num_backwards)
                weights = [0.0 if at in absent else one for at, one in enumerate(weights)]
                first = next(at for at in range(len(weights)) if at not in absent)
                return (
                    weights if any(weights) else [float(at == first) for at in range(len(weights))]
                )
            # not 0 in the first leaf of a step
            weights = _weights(self.program, self._num_backwards)
            return [weights[0] if self._leaf else 1.5]
        if self.program.leaves is not None:  # batch_shares deal leaves out
            return []
        shares = _weights(self.program, 0)
        return shares if len(set(shares)) > 1 else []  # equal ones are none


def _give_up(grad: torch.Tensor) -> None:
    raise BadBatchError


def _set_row(weight: torch.Tensor) -> None:
    weight.reshape(-1)[:1].fill_(0.125) if weight.dim() == 0 else weight[:1].fill_(0.125)


def _shrink(weight: torch.Tensor) -> None:
    weight.mul_(0.75)


def _contrasted(mine: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a loss that compares this rank's rows with those of all ranks."""
    everyone = AllRanks.apply(mine)
    own = torch.arange(len(mine)) + rank * len(mine)
    return nn.functional.cross_entropy(mine @ everyone.t(), own)


def _model(program: Program) -> FuzzNet:
    torch.manual_seed(program.seed)
    model = FuzzNet(program)
    if program.parameter_hooks:
        for parameter in list(model.parameters())[:: 1 + program.seed % 3]:
            if parameter.requires_grad:
                parameter.register_hook(lambda grad: grad * 0.5)
    return model


# ----------------------------------------------------------------------------------------- one rank


@dataclass
class _Result:
    numbers: dict[tuple[int, int | None, int], float]
    state: dict[str, torch.Tensor]


def _by_hand(program: Program, rank: int) -> _Result:
    trainer = (ByHand if program.leaves is None else ByLeaves)(_model(program), program, rank)
    loop = _Loop(program, rank, trainer)
    loop.run()
    return _Result(loop.numbers, trainer.finish())


def _sharded(
    program: Program, rank: int, path: str, trail: str = "", *, planted: bool = False
) -> _Result:
    trainer = Sharded(_model(program), program, path, trail)
    loop = _Loop(program, rank, trainer, planted=planted)
    watches = program.watched == "all" or (program.watched == "one" and rank == 0)
    with _watched(trainer.model) if watches else contextlib.nullcontext():
        loop.run()
    return _Result(loop.numbers, trainer.finish())


def _undisturbed(program: Program) -> Program:
    """Return the same training without what leaves no trace, in another row and on one tier."""
    steps = tuple(
        replace(step, between=tuple(e for e in step.between if e not in (*NEUTRAL, *ROWS)))
        for step in program.steps
    )
    away: dict[str, Any] = dict.fromkeys(("weight_tier", "grad_tier", "optimizer_tier"), "device")
    away["ahead"] = False
    row = "zero3" if program.row == "zero2" else "zero2"
    if program.branches and replace(program, row=row).gathers_in_step:
        row = "zero1"
    return replace(program, steps=steps, row=row, fraction=1.0, watched="", **away)


def _part_of_trails(program: Program, rank: int, path: str) -> str:
    """Return what is wrong about the trails of the program, the undisturbed one, and one with
    another loss in its first leaf.
    """
    other = _undisturbed(program)
    for trail in ("undisturbed", "planted"):
        with tempfile.TemporaryDirectory(dir=path) as own:  # each rank's: saves go to rank 0's
            shared = [own]
            if program.world > 1:
                dist.broadcast_object_list(shared)
            _sharded(other, rank, shared[0], f"../{trail}", planted=trail == "planted")
            _meet(program.world)
    if rank:
        return ""
    same, first = _compared(path, "trail", "undisturbed"), None
    if not same["equal"]:
        return f"the trail of the undisturbed run is another: {same['first']}"
    first = _compared(path, "undisturbed", "planted")["first"]
    # a frozen unit has a backward alone
    in_backward = first is not None and first["phase"] in ("leaf", "backward")
    if first is None or (first["step"], in_backward, first["leaf"]) != (0, True, 0):
        return f"a leaf's other loss in step 0 is told as {first}"
    return ""


def _compared(path: str, first: str, second: str) -> dict[str, Any]:
    """Return what ``zeroshard compare --json`` says of two trails."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main(["compare", f"{path}/{first}", f"{path}/{second}", "--json"])
    found: dict[str, Any] = json.loads(said.getvalue())
    return found


def _first_difference(program: Program, mine: _Result, right: _Result) -> str:
    """Return where the two differ, "" where they do not."""
    if len(mine.numbers) != len(right.numbers) and program.leaves is None:
        return f"{len(mine.numbers)} numbers instead of {len(right.numbers)}"
    for name, value in right.state.items():
        got = mine.state[name].to(value.dtype) if value.is_floating_point() else mine.state[name]
        if program.coded:
            if not _is_near(got, value):
                return f"{name} is far from the run without codecs"
        elif not torch.equal(torch.nan_to_num(got), torch.nan_to_num(value)) or not torch.equal(
            got.isnan(), value.isnan()
        ):
            index = int((got != value).flatten().nonzero()[0])
            pair = got.flatten()[index].item(), value.flatten()[index].item()
            return f"{name}[{index}] is {pair[0]!r} instead of {pair[1]!r} (row {program.row})"
    for place, got_number in mine.numbers.items():
        number = right.numbers[place]
        if got_number != number and number == number and not program.coded:
            return f"number {place} is {got_number!r} instead of {number!r}, all weights the same"
    return ""


def _is_near(got: torch.Tensor, value: torch.Tensor) -> bool:
    if not value.is_floating_point():
        return torch.equal(got, value)
    return (
        bool((got.float() - value.float()).abs().max() <= 0.05 + 0.1 * value.float().abs().max())
        if value.numel()
        else True
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def run_on_rank(rank: int, world: int, program: Program, path: str) -> tuple[str, str]:
    """Run one program on this rank; return kind and detail."""
    torch.manual_seed(0)
    with _quiet():
        try:
            right = _by_hand(program, rank)
        except Exception as error:
            return "impossible", f"{type(error).__name__}: {error}"
        if not all(torch.isfinite(v).all() for v in right.state.values() if v.is_floating_point()):
            return "impossible", "the reference is not finite"
        try:
            mine = _sharded(program, rank, path, "trail" if program.trailed else "")
        except ZeroshardError as error:
            text = f"{type(error).__name__}: {error}"
            del error
            gc.collect()
            _meet(world)
            return "refused", text
        difference = _first_difference(program, mine, right)
        if program.trailed:
            difference = difference or _part_of_trails(program, rank, path)
    return ("differs", difference) if difference else ("same", "")


def _meet(world: int) -> None:
    """After a refusal: the next program needs ranks that are in step."""
    if world > 1:
        dist.monitored_barrier(timeout=timedelta(seconds=STALL_S + 5))


# ---------------------------------------------------------------------------------------- all ranks


def command(program: Program) -> str:
    return f"python -m tests.fuzz {program.seed}"


def run_program(program: Program, path: str) -> Outcome:
    """Run `program` on its ranks and judge it; `path` is a directory for what rests on disk."""
    try:
        with tempfile.TemporaryDirectory(dir=path) as own:
            answers = run_ranks(program.world, run_on_rank, program, own, timeout=TIMEOUT_S)
    except RankError as error:
        return _judge_failure(error)
    kinds = {kind for kind, _ in answers}
    detail = "; ".join(sorted({f"{kind} {text}".strip() for kind, text in answers}))
    if kinds == {"same"}:
        return Outcome("same")
    if "impossible" in kinds:
        return Outcome("impossible", detail)
    if kinds == {"refused"}:
        classes = {text.split(":")[0] for _, text in answers}
        right = (
            len(classes) == 1
            and classes <= set(_may_refuse(program))
            and all("\n" not in text for _, text in answers)
        )
        return Outcome("refused" if right else "error", detail)
    return Outcome("differs" if "differs" in kinds else "error", detail)


def _judge_failure(error: RankError) -> Outcome:
    names = {failure.type_name for failure in error.errors.values()}
    detail = f"rank {error.rank}: {error.type_name}: {error.message}"
    if "ProcessDied" in names:
        died = next(f for f in error.errors.values() if f.type_name == "ProcessDied")
        return Outcome("crash", f"rank {died.rank}: {died.message}")
    return Outcome("hang" if names == {"Timeout"} else "error", detail)


def report(program: Program, outcome: Outcome) -> str:
    """Return what a person needs to see of an outcome."""
    return f"{outcome.kind}: {outcome.detail}\n{command(program)}\n{describe(program)}"
