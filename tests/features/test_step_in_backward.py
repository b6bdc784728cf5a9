"""``Offload(step_in_backward=True)``: the host steps in the backward what may be stepped otherwise
later, and the bits are those of the step that comes after it.
"""

from __future__ import annotations

import functools
import random
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support import inside
from tests.support.harness import run_ranks
from tests.support.pipelines import mesh_of, piped
from tests.support.training import Block, Net, batch, logged, make_model, two_groups
from zeroshard.core.placement import Mesh, Tier
from zeroshard.core.policy import ROWS
from zeroshard.optim.runner import TileStep
from zeroshard.planner.exact import LaidOut, rest_bytes
from zeroshard.planner.modules import shape_of_module
from zeroshard.runtime.drafts import DraftRunner

STEPS = 42
MICROS = ("one", "one", "one", "no_sync", "added", "accumulate")
BETWEEN = (
    *("nothing",) * 8,
    *(
        "clipped",
        "loosely clipped",
        "lr",
        "decay",
        "lr and back",
        "read",
        "saved",
        "loaded",
        "dropped",
    ),
    *("assigned", "edited", "counted", "raised", "twice", "kept", "zeroed", "weighed", "written"),
)
CLIPS = {"clipped": 0.01, "loosely clipped": 1e9}
WHOLE = ("muon", "adafactor", "transformers")  # of whole parameters


class _Block(Block):
    def forward(self, x: torch.Tensor, *, whole: bool = True) -> torch.Tensor:
        return super().forward(x) if whole else x + self.norm(x)


class _Net(Net):
    """A net that runs all, half or nothing of each block, as a route says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(19) for _ in range(4))

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, y: torch.Tensor, route: str = "wwww"
    ) -> torch.Tensor:
        h = self.embed(x)
        for block, how in zip(self.blocks, route, strict=True):
            h = h if how == "-" else block(h, whole=how == "w")
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def _model() -> _Net:
    torch.manual_seed(0)
    return _Net()


class _Mine(torch.optim.AdamW):
    """Of a class that is not known."""


def _optimizer(kind: str, model: nn.Module) -> Any:
    """Return an optimizer, or several as a list."""
    matrices = [
        p for name, p in model.named_parameters() if name.endswith(("up.weight", "down.weight"))
    ]
    rest = [p for p in model.parameters() if not any(p is one for one in matrices)]
    if kind == "muon":
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=1e-3)]
    if kind == "two":
        return [torch.optim.AdamW(rest, lr=1e-3), torch.optim.SGD(matrices, lr=0.1, momentum=0.9)]
    if kind == "mine":
        return [_Mine(rest, lr=1e-3), torch.optim.SGD(matrices, lr=0.1, momentum=0.9)]
    if kind == "adafactor":
        return two_groups(model, torch.optim.Adafactor)
    if kind == "transformers":
        from transformers.optimization import Adafactor

        return two_groups(model, Adafactor, beta1=0.9, relative_step=False)
    if kind in ("sgd", "plain"):
        return two_groups(model, torch.optim.SGD, momentum=0.9 if kind == "sgd" else 0.0)
    return two_groups(model, torch.optim.AdamW, fused=kind == "fused", lr=1e-3)


def _first_edited(model: _Net) -> nn.Parameter:
    return model.blocks[1].up.weight  # type: ignore[return-value]


class _Program:
    """A random loop: the same events in every run and on every rank."""

    def __init__(
        self, rank: int, seed: int, row: str, precision: str, path: str, kind: str, **tiers: Any
    ) -> None:
        self.rank, self.path, self.events = rank, path, random.Random(seed)
        self.row, self.precision = row, precision
        self.model = _model()
        drawn = self.events.choice(("adamw", "fused", "sgd"))
        given = _optimizer(kind or drawn, self.model)
        self.waits = random.Random(f"{seed} {rank}")
        self.ahead = tiers.get("step_in_backward", False)
        tiers = {"grad": self.events.choice(("host", "device")), "optimizer": "host", **tiers}
        if self.events.random() < 0.3:
            tiers["fraction"] = {"optimizer": 0.6}
        if row.startswith("zero3") and precision != "fp32" and self.events.random() < 0.5:
            tiers["weight"] = "host"
        self.tiers = tiers
        self.engine = zs.shard(
            self.model,
            given,
            policy=row,
            ownership="whole" if kind in WHOLE else None,
            precision=precision,
            offload=zs.Offload(**tiers, staging_bytes=1 << 16),
        )
        assert self.engine.optimizer is not None
        self.optimizer = self.engine.optimizer
        self.each = given if isinstance(given, list) else [given]
        self.log: list[Any] = []
        self.number = 0
        self.saved: int | None = None

    def loss(self, factor: float = 1.0, route: str = "wwww") -> torch.Tensor:
        self.number += 1
        return self.model(*batch(self.rank, self.number), route) * factor

    def backward(self, micro: str, factor: float, weight: float | None) -> None:
        may_differ = self.row in ("ddp", "zero1", "zero2")
        routes = [self.events.choice(("wwww", "whww", "wwhh", "w-hw")) for _ in range(3)]
        skips = "w-hw" in routes and not may_differ  # a unit that all gather, or none
        route = "w-hw" if skips else routes[self.rank]
        run = functools.partial(self.engine.backward, weight=weight)
        if micro == "accumulate":
            first = self.number
            self.number += 2
            batches = [batch(self.rank, first + 1), batch(self.rank, first + 2)]

            def loss_of(one: Any) -> Any:
                loss = self.model(*one) * factor
                return loss if weight is None else (loss, weight)

            self.engine.accumulate(batches, loss_of)
            return
        if micro == "no_sync":
            with self.engine.no_sync():
                run(self.loss(1.0, route))
        elif micro == "added":
            run(self.loss(1.0, route))
            self.wait()
        run(self.loss(factor, route))

    def wait(self) -> None:
        if self.ahead and self.waits.random() < 0.7:
            inside.await_drafts(self.engine)

    def step(self, number: int) -> None:
        events, engine, optimizer = self.events, self.engine, self.optimizer
        micro, between = events.choice(MICROS), events.choice(BETWEEN)
        overflows = number % 4 == 2 and events.random() < 0.5
        if overflows and between in ("kept", "twice"):
            between = "nothing"
        factor = float("inf") if overflows and self.rank == number % engine.world else 1.0
        if between == "raised":
            self._raise()
            engine.reset()
        self.backward(micro, factor, 2.0 + self.rank if between == "weighed" else None)
        self.wait()
        group = optimizer.param_groups[0]
        if between in CLIPS and not overflows:
            self.log.append(float(engine.clip_grad_norm_(CLIPS[between])))
        elif between.startswith("lr"):
            before, group["lr"] = group["lr"], group["lr"] * 0.9
            group["lr"] = before if between == "lr and back" else group["lr"]
        elif between == "decay":
            group["weight_decay"] += 0.01
        elif between == "read":
            engine.memory()
            engine.full_state_dict()
            engine.optimizer_part()
        elif between == "saved":
            zs.save(f"{self.path}/{self.ahead}-{number}", engine, step=number, drop_gradients=True)
            self.saved = number
        elif between == "loaded" and self.saved is not None:
            zs.load(f"{self.path}/{self.ahead}-{self.saved}", engine)
        elif between == "assigned":
            edited = _first_edited(self.model)
            edited.grad = torch.full(edited.shape, 0.01, dtype=edited.dtype)
        elif between == "edited":
            with engine.gathered(writeback=True):
                _first_edited(self.model).data.mul_(1.01)
        elif between == "written" and self.row in ("ddp", "zero1", "zero2"):  # whole on every rank
            with torch.no_grad():
                _first_edited(self.model).mul_(1.01)
        elif between == "counted":
            for state in optimizer.state.values():
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] += 3
        taken = {"dropped": 0, "loaded": 0, "twice": 2}.get(between, 1)
        for one in (self.each if number % 2 else self.each[::-1]) * taken:
            one.step()
        if between == "zeroed":
            optimizer.zero_grad(set_to_none=False)
        elif between != "kept":
            optimizer.zero_grad()
        row = events.choice((*("",) * 12, "zero1", "zero2", "zero3", "zero3-keep"))
        if row and between not in ("kept", "zeroed", "dropped") and "weight" not in self.tiers:
            engine.repartition(policy=row)
            self.row = row
        state = engine.full_state_dict(rank0_only=False)
        self.log += [between, micro, overflows, engine.steps_skipped]
        self.log += [float(value.double().sum()) for value in state.values()]

    def _raise(self) -> None:
        def stop(grad: torch.Tensor) -> None:
            self.wait()
            raise ZeroDivisionError  # in the middle of a backward

        def watch(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            output.register_hook(stop)

        handle = self.model.blocks[1].register_forward_hook(watch)
        # or what a rank is told that waits for one which has raised
        with pytest.raises((ZeroDivisionError, zs.StateError), match=r"^$|gave up this step"):
            self.engine.backward(self.loss())
        handle.remove()

    def run(self) -> tuple[list[Any], dict[str, torch.Tensor], dict[str, Any], dict[str, int]]:
        for number in range(STEPS):
            self.step(number)
        state = self.engine.full_state_dict(rank0_only=False)
        part = self.engine.optimizer_part()
        part = {
            (index, number): state
            for index, one in enumerate(part.get("optimizers", [part]))
            for number, state in one["state"].items()
        }
        counts = self.engine.tiles_ahead
        self.engine.close()
        return self.log, state, part, counts


def _runs(
    rank: int, world: int, seed: int, row: str, precision: str, path: str, kind: str
) -> dict[str, int]:
    log, state, part, counts = _Program(rank, seed, row, precision, path, kind).run()
    assert counts == {"kept": 0, "dropped": 0}
    ahead = _Program(rank, seed, row, precision, path, kind, step_in_backward=True).run()
    first = next(
        (
            n
            for n, pair in enumerate(zip(log, ahead[0], strict=True))
            if len({*map(repr, pair)}) > 1
        ),
        None,
    )
    assert first is None, (first, [one for one in log[:first] if isinstance(one, str)][-4:])
    assert [name for name in state if not torch.equal(state[name], ahead[1][name])] == []
    assert part.keys() == ahead[2].keys()
    for number, mine in part.items():
        for key, value in mine.items():
            theirs = ahead[2][number][key]
            assert theirs is value or torch.equal(value, theirs), (number, key)
    return ahead[3]


@pytest.mark.parametrize(
    ("seed", "world", "row", "precision", "kind"),
    [
        (0, 1, "zero1", "fp32", ""),
        (1, 1, "zero3", "fp16", ""),
        (2, 2, "zero2", "fp16", ""),
        (3, 2, "zero3", "bf16", ""),
        (4, 3, "zero1", "fp16", ""),
        (5, 3, "zero3", "fp16", ""),
        (6, 1, "zero1", "fp16", "muon"),
        (7, 2, "zero3", "fp16", "muon"),
        (8, 3, "zero2", "bf16", "muon"),
        (9, 2, "zero3", "fp16", "two"),
        (10, 3, "zero1", "fp32", "two"),
        (11, 1, "zero3", "bf16", "adafactor"),
        (12, 2, "zero2", "fp16", "adafactor"),
        pytest.param(13, 2, "zero3", "fp16", "transformers", marks=pytest.mark.slow),
    ],
)
def test_any_loop_has_the_bits_of_the_step_after_the_backward(
    seed: int, world: int, row: str, precision: str, kind: str, tmp_path: Path
) -> None:
    for counts in run_ranks(world, _runs, seed, row, precision, str(tmp_path), kind, timeout=120):
        assert counts["kept"] > 0 and counts["dropped"] > 0, counts


def _three_steps(
    rank: int = 0, row: str = "zero2", kind: str = "adamw", **tiers: Any
) -> tuple[list[torch.Tensor], dict[str, int], zs.MemoryReport]:
    model = make_model()
    optimizer = _optimizer(kind, model)
    offload = zs.Offload(grad="host", optimizer="host", **tiers)
    ownership: Any = "whole" if kind in WHOLE else None
    engine = zs.shard(
        model, optimizer, policy=row, precision="fp16", offload=offload, ownership=ownership
    )
    assert engine.optimizer is not None
    optimizer = engine.optimizer
    for number in range(3):
        engine.backward(model(*batch(rank, number)))
        if number < 2:
            inside.await_drafts(engine)
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "adafactor"):
            optimizer.step()
        optimizer.zero_grad()
    out = [*engine.full_state_dict().values()], engine.tiles_ahead, engine.memory()
    with logged() as lines:
        engine.close()
    assert lines == [], "all memory is given back"
    return out


def _plain_loop(rank: int, world: int) -> None:
    expected, nothing, plain = _three_steps()
    state, counts, report = _three_steps(step_in_backward=True)
    assert all(map(torch.equal, expected, state))
    assert nothing == {"kept": 0, "dropped": 0}
    tiles = 6
    assert counts["dropped"] - tiles <= tiles, "the first step makes the moments"
    assert counts["kept"] >= tiles and sum(counts.values()) == 3 * tiles, counts
    masters = plain.tiers["master"]["host"]
    ahead = report.tiers["optimizer"]["host"]
    assert ahead == 2 * plain.tiers["optimizer"]["host"] + masters
    training = zs.Training("fp16", batch=1, step_in_backward=True)
    laid_out = LaidOut(shape_of_module(make_model(), training), Mesh.of(1), training.align)
    policy = ROWS["zero2"].tiered(Tier.DEVICE, Tier.HOST, Tier.HOST)
    assert rest_bytes(laid_out, policy, training)["optimizer"][Tier.HOST] == ahead


def test_what_nobody_changes_is_stepped_in_the_backward_and_takes_the_planned_bytes() -> None:
    run_ranks(1, _plain_loop)


def _without_states(rank: int, world: int) -> None:
    expected, _, _ = _three_steps(kind="plain")
    state, counts, _ = _three_steps(kind="plain", step_in_backward=True)
    assert counts["kept"] > 0 and all(map(torch.equal, expected, state))


def test_a_rule_that_keeps_no_states_is_stepped_in_the_backward() -> None:
    run_ranks(1, _without_states)


def _not_known(rank: int, world: int) -> None:
    expected, _, _ = _three_steps(kind="mine")
    with logged() as lines:
        state, counts, _ = _three_steps(kind="mine", step_in_backward=True)
    assert lines == [
        "offload.step_in_backward has no effect on _Mine + SGD: a step of _Mine is not known to go"
        " by options, gradients and states alone"
    ]
    assert counts == {"kept": 0, "dropped": 0} and all(map(torch.equal, expected, state))


def test_a_class_that_is_not_known_is_told_in_one_line() -> None:
    run_ranks(1, _not_known)


def _averaged(rank: int, world: int) -> None:
    expected, _, _ = _three_steps(rank, "ddp")
    state, counts, _ = _three_steps(rank, "ddp", step_in_backward=True)
    assert all(map(torch.equal, expected, state))
    assert counts == {"kept": 0, "dropped": 0}


def test_sums_that_other_ranks_average_are_stepped_after_the_backward() -> None:
    run_ranks(2, _averaged)


def _divided_meanwhile(rank: int, world: int) -> None:
    step_ahead = DraftRunner._step_ahead

    def wait_first(runner: DraftRunner, draft: Any, step: TileStep) -> None:
        begin = time.monotonic()
        while not step.gradient.divided_by and time.monotonic() - begin < 10:
            time.sleep(1e-3)
        step_ahead(runner, draft, step)

    expected, _, _ = _three_steps()
    with (
        mock.patch.object(DraftRunner, "_step_ahead", wait_first),
        mock.patch.object(inside, "await_drafts"),
    ):
        state, counts, _ = _three_steps(step_in_backward=True)
    assert all(map(torch.equal, expected, state))
    assert counts["kept"] == 0


def test_a_gradient_that_is_divided_while_the_thread_reads_it_is_read_again() -> None:
    run_ranks(1, _divided_meanwhile)


def _products_in_fewer_bits(rank: int, world: int) -> None:
    expected, _, _ = _three_steps(kind="adafactor")
    state, counts, _ = _three_steps(kind="adafactor", step_in_backward=True)
    assert all(map(torch.equal, expected, state))
    assert counts["kept"] == 0


def test_products_of_matrices_under_autocast_are_made_in_the_step() -> None:
    run_ranks(1, _products_in_fewer_bits)


def _under_a_schedule(rank: int, world: int, name: str, row: str, no_sync: bool) -> dict[str, int]:
    runs = []
    for ahead in (False, True):
        offload = zs.Offload(grad="host", optimizer="host", step_in_backward=ahead)
        run = piped(mesh_of(2, world // 2), name, row, no_sync=no_sync, offload=offload)
        for number in range(4):
            run.run(number, 4)
            if ahead and number % 2:
                inside.await_drafts(run.engine)
            run.engine.clip_grad_norm_(1e9 if number < 3 else 0.1)
            run.optimizer.step()
            run.optimizer.zero_grad()
        runs.append((run.state(), run.losses, run.engine.tiles_ahead))
        run.engine.close()
    (state, losses, _), (other, others, counts) = runs
    assert losses == others
    assert all(torch.equal(state[key], other[key]) for key in state)
    return counts


@pytest.mark.parametrize(
    ("world", "name", "row", "no_sync"),
    [
        (2, "GPipe", "zero2", False),
        (2, "1F1B", "zero3", True),
        (2, "Interleaved1F1B", "zero1", True),
        (2, "ZBVZeroBubble", "zero2", False),
        (4, "1F1B", "zero2", True),
    ],
)
def test_a_pipelines_schedule_keeps_what_its_last_computation_brings(
    world: int, name: str, row: str, no_sync: bool
) -> None:
    ranks = run_ranks(world, _under_a_schedule, name, row, no_sync)
    assert all(counts["kept"] > 0 and counts["dropped"] > 0 for counts in ranks), ranks
