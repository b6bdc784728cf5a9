"""While states are off the device, and while averages rest in the place of weights, every call that
needs the trained numbers raises StateError on every rank and changes nothing.

Every public call of an engine and of what holds one is in a table here; a new one has to be, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.support.harness import on_ranks
from tests.support.training import State, batch, final_state, make_model, two_groups
from zeroshard.runtime.engine import states_of

DECAY = 0.5


class Run:
    """A small training run with an average, a saver and a checkpoint of its first step."""

    def __init__(self, rank: int, path: str, **options: Any) -> None:
        self.rank, self.path = rank, path
        self.model = make_model()
        self.optimizer = two_groups(self.model)
        self.engine = zs.shard(self.model, self.optimizer, **options)
        self.ema = zs.EMA(self.engine, DECAY)
        self.saver = zs.Saver(path, self.engine, states={"ema": self.ema}, background=False)
        self.parameter = next(self.model.parameters())
        self.states = zs.ParameterStates(self.engine, self.parameter)
        self.train(0)
        self.part = self.engine.optimizer_part()
        self.saver.save(1)

    def train(self, step: int) -> None:
        self.model(*batch(self.rank, step)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.ema.update()

    def forward(self) -> torch.Tensor:
        loss = self.model(*batch(self.rank, 5))
        assert isinstance(loss, torch.Tensor)
        return loss

    def end(self) -> dict[str, State]:
        """Return the weights and their average after one more step."""
        self.train(1)
        weights = self.engine.full_state_dict(rank0_only=False)
        with self.ema.swapped():
            averages = self.engine.full_state_dict(rank0_only=False)
        self.saver.close()
        self.engine.close()
        return {"weights": weights, "averages": averages}


Call = Callable[[Run], Any]


def _inside(enter: Callable[[Run], Any]) -> Call:
    def call(run: Run) -> None:
        with enter(run):
            pass

    return call


def _written(run: Run) -> None:
    with run.engine.gathered(writeback=True):
        run.parameter.data.fill_(7)


def _joined(run: Run) -> None:
    with run.engine.join():
        run.forward().backward()


def _numbers(run: Run, value: float = 3.0) -> torch.Tensor:
    return torch.full(run.parameter.shape, value)


# by owner and name: what needs the trained numbers
TRAINED: dict[str, Call] = {
    "engine.hide_gradients": lambda r: r.engine.hide_gradients(),
    "engine.accumulate": lambda r: r.engine.accumulate([5], lambda n: r.model(*batch(r.rank, n))),
    "engine.attach": lambda r: r.engine.attach(two_groups(r.model)),
    "engine.backward": lambda r: r.engine.backward(r.forward()),
    "engine.clip_grad_norm_": lambda r: r.engine.clip_grad_norm_(1.0),
    "engine.full_grad": lambda r: r.engine.full_grad(r.parameter),
    "engine.join": _joined,
    "engine.leaves": lambda r: r.engine.leaves(),
    "engine.offload_states": lambda r: r.engine.offload_states(),
    "engine.optimizer_part": lambda r: r.engine.optimizer_part(),
    "engine.repartition": lambda r: r.engine.repartition(stage=2),
    "optimizer states": lambda r: len(zs.OptimizerStates(r.engine)),
    "ema.swapped": _inside(lambda r: r.ema.swapped()),
    "ema.update": lambda r: r.ema.update(),
    "saver.keep": lambda r: r.saver.keep(2),
    "saver.save": lambda r: r.saver.save(2),
    "states.grad": lambda r: r.states.grad(),
    "states.master": lambda r: r.states.master(),
    "states.set_grad": lambda r: r.states.set_grad(_numbers(r)),
    "states.set_master": lambda r: r.states.set_master(_numbers(r)),
    "states.set_state": lambda r: r.states.set_state("exp_avg", _numbers(r)),
    "states.state": lambda r: r.states.state("exp_avg"),
    "optimizer.load_state_dict": lambda r: r.optimizer.load_state_dict(r.part),
    "optimizer.state_dict": lambda r: r.optimizer.state_dict(),
    "optimizer.step": lambda r: r.optimizer.step(),
    "loss.backward": lambda r: r.forward().backward(),
    "model.load_state_dict": lambda r: r.model.load_state_dict(make_model().state_dict()),
    "engine.gathered(writeback=True)": _written,
    # the last guard, for whoever holds the states without having asked
    "masters at rest": lambda r: states_of(r.engine).rest.masters(),
    "zs.EMA": lambda r: zs.EMA(r.engine),
    "zs.load": lambda r: zs.load(r.path, r.engine, states={"ema": r.ema}),
    "zs.save": lambda r: zs.save(r.path, r.engine, step=2, states={"ema": r.ema}),
}
# what reads the weights, whichever they are
READING: dict[str, Call] = {
    "engine.full_state_dict": lambda r: r.engine.full_state_dict(),
    "engine.gathered": _inside(lambda r: r.engine.gathered()),
    "model.forward": lambda r: r.forward(),
}
# what asks for no number of a state
ALWAYS: dict[str, Call] = {
    "engine.explain_optimizer": lambda r: str(r.engine.explain_optimizer()),
    "engine.exchange": lambda r: r.engine.exchange(b"1"),
    "engine.memory": lambda r: r.engine.memory(),
    "engine.no_sync": _inside(lambda r: r.engine.no_sync()),
    "engine.reset": lambda r: r.engine.reset(),
    "engine.reset_traffic": lambda r: r.engine.reset_traffic(),
    "engine.trace": _inside(lambda r: r.engine.trace(Path(r.path) / "trace")),
    "engine.traffic": lambda r: r.engine.traffic(),
    "saver.wait": lambda r: r.saver.wait(),
    "optimizer.zero_grad": lambda r: r.optimizer.zero_grad(),
    "zs.memory_table": lambda r: zs.memory_table(r.engine),
}
# follow() takes a schedule, trail() a run with leaves, and neither asks for a state; what ends the
# engine or the state of it
ELSEWHERE = {
    "engine.follow", "engine.trail", "engine.close", "engine.reload_states", "saver.close",
}  # fmt: skip


def test_every_public_call_is_in_one_of_the_tables() -> None:
    owners = {"engine": zs.Engine, "ema": zs.EMA, "saver": zs.Saver, "states": zs.ParameterStates}
    calls = {
        f"{owner}.{name}"
        for owner, cls in owners.items()
        for name in dir(cls)
        if not name.startswith("_") and callable(getattr(cls, name))
    }
    known = [*TRAINED, *READING, *ALWAYS, *ELSEWHERE]
    assert not calls - set(known), "say what these calls do while states are away or swapped"
    assert len(known) == len(set(known))


def _told(run: Run, calls: dict[str, Call]) -> dict[str, str]:
    """Make each call; return what it has raised, "" where it has raised nothing."""
    told = {}
    for name, call in calls.items():
        try:
            call(run)
            told[name] = ""
        except zs.StateError as error:
            told[name] = str(error)
    return told


def _differences(one: dict[str, State], other: dict[str, State]) -> list[str]:
    return [
        f"{what} {name}"
        for what, state in other.items()
        for name, value in state.items()
        if not torch.equal(one[what][name], value)
    ]


@pytest.mark.parametrize(
    ("world", "options"),
    [(1, {"stage": 1}), (2, {"stage": 1}), (2, {"stage": 3, "precision": "bf16"})],
    ids=["one rank", "zero1", "zero3 bf16"],
)
@on_ranks(timeout=60)
def test_what_needs_trained_numbers_is_refused_while_they_are_away_or_swapped(
    rank: int, world: int, options: dict[str, Any], tmp_path: Path
) -> None:
    expected = Run(rank, f"{tmp_path}/undisturbed", **options).end()
    run = Run(rank, f"{tmp_path}/away", **options)
    run.engine.offload_states()
    refused = {**TRAINED, **READING}
    del refused["engine.offload_states"]  # it says again how many bytes are away
    for name, told in _told(run, refused).items():
        assert "call engine.reload_states() on every rank first" in told, (name, told)
    assert set(_told(run, ALWAYS).values()) == {""}
    run.engine.reload_states()
    assert not _differences(run.end(), expected)

    run = Run(rank, f"{tmp_path}/swapped", **options)
    with run.ema.swapped():
        for name, told in _told(
            run, {**TRAINED, "engine.close": lambda r: r.engine.close()}
        ).items():
            assert "outside EMA.swapped()" in told, (name, told)
        others = {**READING, **ALWAYS}
        assert _told(run, others) == dict.fromkeys(others, "")
    assert not _differences(run.end(), expected)


@on_ranks(2)
def test_gradients_that_rest_outlast_what_is_refused(rank: int) -> None:
    """Gradients that rest from before are neither lost nor clipped."""
    states = []
    for disturbed in (False, True):
        model = make_model()
        optimizer = two_groups(model)
        engine = zs.shard(model, optimizer, stage=2)
        ema = zs.EMA(engine, DECAY)
        model(*batch(rank, 0)).backward()
        if disturbed:
            with ema.swapped(), pytest.raises(zs.StateError, match=r"outside EMA\.swapped"):
                engine.clip_grad_norm_(1e-3)
            engine.offload_states()
            for call in (partial(engine.clip_grad_norm_, 1e-3), optimizer.step, ema.update):
                with pytest.raises(zs.StateError, match="reload_states"):
                    call()
            engine.reload_states()
        optimizer.step()
        states.append(final_state(model, engine))
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
