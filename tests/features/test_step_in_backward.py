"""``Offload(step_in_backward=True)``: the host steps in the backward what may be stepped otherwise
later, and the bits are those of the step that comes after it.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support import inside
from tests.support.harness import run_ranks
from tests.support.training import Routed, batch, two_groups

HOST = {"grad": "host", "optimizer": "host"}
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
    *("assigned", "edited", "counted", "raised", "twice", "kept", "zeroed", "weighed"),
)
CLIPS = {"clipped": 0.01, "loosely clipped": 1e9}


def _model() -> Routed:
    torch.manual_seed(0)
    return Routed()


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return two_groups(model, torch.optim.SGD, momentum=0.9)
    return two_groups(model, torch.optim.AdamW, fused=kind == "fused", lr=1e-3)


def _first_edited(model: Routed) -> nn.Parameter:
    return model.blocks[1].up.weight  # type: ignore[return-value]


class _Program:
    """A random loop: the same events in every run and on every rank."""

    def __init__(
        self, rank: int, seed: int, row: str, precision: str, path: str, **tiers: Any
    ) -> None:
        self.rank, self.path, self.events = rank, path, random.Random(seed)
        self.row, self.precision = row, precision
        self.model = _model()
        self.optimizer = _optimizer(self.events.choice(("adamw", "fused", "sgd")), self.model)
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
            self.optimizer,
            policy=row,
            precision=precision,
            offload=zs.Offload(**tiers, staging_bytes=1 << 16),
        )
        self.log: list[Any] = []
        self.number = 0
        self.saved: int | None = None

    def loss(self, factor: float = 1.0, route: tuple[int, ...] = (0, 1, 2, 3)) -> torch.Tensor:
        self.number += 1
        return self.model(*batch(self.rank, self.number), route) * factor

    def backward(self, micro: str, factor: float, weight: float | None) -> None:
        routes = [self.events.choice(((0, 1, 2, 3), (0, 2, 3), (0, 3))) for _ in range(3)]
        route = routes[self.rank if self.row in ("zero1", "zero2") else 0]
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
        elif between == "counted":
            for state in optimizer.state.values():
                if isinstance(state.get("step"), torch.Tensor):
                    state["step"] += 3
        if between not in ("dropped", "loaded"):
            optimizer.step()
        if between == "twice":
            optimizer.step()
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
            raise ZeroDivisionError

        def watch(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            output.register_hook(stop)

        handle = self.model.blocks[1].register_forward_hook(watch)
        with pytest.raises(ZeroDivisionError):
            self.engine.backward(self.loss())
        handle.remove()

    def run(self) -> tuple[list[Any], dict[str, torch.Tensor], dict[str, Any], dict[str, int]]:
        for number in range(STEPS):
            self.step(number)
        state = self.engine.full_state_dict(rank0_only=False)
        part = self.engine.optimizer_part()["state"]
        counts = self.engine.tiles_ahead
        self.engine.close()
        return self.log, state, part, counts


def _runs(rank: int, world: int, seed: int, row: str, precision: str, path: str) -> dict[str, int]:
    log, state, part, counts = _Program(rank, seed, row, precision, path).run()
    assert counts == {"kept": 0, "dropped": 0}
    ahead = _Program(rank, seed, row, precision, path, step_in_backward=True).run()
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
    ("seed", "world", "row", "precision"),
    [
        (0, 1, "zero1", "fp32"),
        (1, 1, "zero3", "fp16"),
        (2, 2, "zero2", "fp16"),
        (3, 2, "zero3", "bf16"),
        (4, 3, "zero1", "fp16"),
        (5, 3, "zero3", "fp16"),
    ],
)
def test_any_loop_has_the_bits_of_the_step_after_the_backward(
    seed: int, world: int, row: str, precision: str, tmp_path: Path
) -> None:
    for counts in run_ranks(world, _runs, seed, row, precision, str(tmp_path), timeout=120):
        assert counts["kept"] > 0 and counts["dropped"] > 0, counts
