"""Moves of states beside each other, and beside what else holds them: repartition(),
offload_states(), averages, savers, a split that moves, columns that are published between nodes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import zeroshard as zs
from tests.support.broken_storage import patched
from tests.support.harness import on_ranks
from tests.support.repartitions import Trained, loaded, made, rests
from tests.support.training import batch
from zeroshard.core.work import Work
from zeroshard.optim.runner import TileRunner
from zeroshard.runtime.flat_weights import FlatWeights
from zeroshard.runtime.relayout import Facts
from zeroshard.runtime.segment_states import SegmentStates
from zeroshard.runtime.step_tiles import Balance
from zeroshard.sharding import repartition

NODES = zs.Comm(transport="gloo", node_size=2, hierarchical=True)


class _Late:
    """A column that arrives when it is waited for, and not before."""

    def __init__(self, work: Work, scratch: torch.Tensor, column: torch.Tensor) -> None:
        self.has_arrived = False
        self._work, self._scratch, self._column = work, scratch, column

    def wait(self) -> None:
        self._work.wait()
        self._column.copy_(self._scratch)
        self.has_arrived = True

    def done(self) -> bool:
        return self.has_arrived


@contextmanager
def _late_columns() -> Iterator[list[_Late]]:
    """Let every column that is published meanwhile be late, and list them."""
    late: list[_Late] = []
    publish = FlatWeights.publish

    def published(flat: FlatWeights) -> None:
        gathers = flat.context.levels.gathers

        def slow(axes: Any, key: str, own: Any, ranges: Any, column: torch.Tensor) -> list[Any]:
            scratch = column.clone()
            (start,) = gathers(axes, key, own, ranges, scratch)

            def begin() -> _Late:
                late.append(_Late(start(), scratch, column))
                return late[-1]

            return [begin]

        with patched(flat.context.levels, "gathers", slow):
            publish(flat)

    with patched(FlatWeights, "publish", published):
        yield late


def _same(run: Trained, other: Trained, what: object) -> None:
    found, expected = rests(run), rests(other)
    wrong = [name for name in expected if found.get(name) != expected[name]]
    assert not wrong and found.keys() == expected.keys(), (what, wrong[:5])


@pytest.mark.parametrize(
    "change",
    [{"policy": "zero3"}, {"shares": [0.1, 0.2, 0.3, 0.4]}, {"policy": "hpz"}],
    ids=["zero3", "shares", "hpz"],
)
@on_ranks(4, timeout=100)
def test_columns_on_their_way_arrive_before_states_move_and_are_not_saved(
    rank: int, tmp_path: Path, change: dict[str, Any]
) -> None:
    """Save, and lay out anew, right after a step whose columns are on their way."""
    run = made(policy="hfsdp", comm=NODES, averaged=True)
    run.train(rank, range(2))
    saver = zs.Saver(tmp_path, run.engine, states=run.states)
    with _late_columns() as late:
        run.train(rank, range(2, 3))
        assert late and not all(column.has_arrived for column in late)
        saver.save(1)
        assert not all(column.has_arrived for column in late), "a save reads masters alone"
        of_step = list(late)
        run.engine.repartition(**change)
        assert all(column.has_arrived for column in of_step)
        saver.save(2)  # the new layout's columns may be on their way
        saver.close()
        other = loaded(run, Path(tmp_path), comm=NODES, **{"policy": "hfsdp", **change})
        _same(run, other, change)
        assert run.train(rank, range(3, 5)) == other.train(rank, range(3, 5))
        _same(run, other, change)
        zs.load(tmp_path, run.engine, step=1, states=run.states)
        zs.load(tmp_path, other.engine, step=2, states=other.states)
        _same(run, other, "one step, in two layouts")
    run.engine.close()
    other.engine.close()


def _sleep(run: Trained) -> None:
    run.engine.offload_states()
    with pytest.raises(zs.StateError, match="reload_states"):
        run.engine.repartition(policy="ddp")
    with pytest.raises(zs.StateError, match="reload_states"):
        assert run.average is not None
        run.average.update()
    run.engine.reload_states()


def _looked(run: Trained, moves: list[dict[str, Any]], rank: int) -> list[float]:
    """Train, with `moves` between steps, before and after each of which states sleep; return the
    losses of training and of evaluations with the average, and the sums of the averages.
    """
    losses = []
    assert run.average is not None
    for step, change in enumerate(moves):
        losses += run.train(rank, range(step, step + 1))
        if change:
            _sleep(run)
            run.engine.repartition(**change)
            _sleep(run)
        with run.average.swapped(), torch.no_grad():
            losses.append(run.model(*batch(7, step)).item())
            whole = run.engine.full_state_dict(rank0_only=False)
        losses += [value.double().sum().item() for value in whole.values()]
    return losses


@pytest.mark.parametrize(("world", "transport"), [(1, "gloo"), (2, "gloo"), (2, "shared_memory")])
@on_ranks(timeout=100)
def test_averages_go_with_states_that_sleep_and_move(rank: int, world: int, transport: str) -> None:
    comm = zs.Comm.model_validate({"transport": transport})
    moves: list[dict[str, Any]] = [
        {"policy": "zero3"}, {"shares": [0.25, 0.75]}, {"offload": {"weight": "host"}},
        {"policy": "zero1", "offload": {"grad": "host"}},
        {"policy": "ddp", "shares": "equal", "offload": {}},
    ]  # fmt: skip
    if world == 1:
        moves[1:2] = []
    still = made(policy="zero2", averaged=True, comm=comm)
    expected = _looked(still, [{} for _ in moves], rank)
    moved = made(policy="zero2", averaged=True, comm=comm)
    assert _looked(moved, moves, rank) == expected
    for run in (still, moved):
        run.engine.close()


def _split(rank: int, world: int, path: str, moving: bool) -> list[float]:
    """Train with a split that moves with every step, or stays; return losses, and numbers of one
    parameter's states.
    """
    fractions = iter([0.9, 0.2, 0.6, 0.4])
    offload = {"optimizer": "host", "fraction": "auto" if moving else 0.5}
    with patched(Balance, "after_step", lambda *_: next(fractions)):
        run = made(policy="zero2", offload=offload)
        losses, seen = run.train(rank, range(2)), []
        for step in (2, 3):
            states = zs.ParameterStates(run.engine, run.model.embed.weight)
            seen += [states.master(), states.state("exp_avg"), states.state("exp_avg_sq")]
            states.set_state("exp_avg", seen[-2] * 2)
            run.engine.offload_states()
            run.engine.reload_states()
            losses += run.train(rank, range(step, step + 1))
    zs.save(path, run.engine, step=1)
    run.engine.repartition(policy="zero3", offload={})
    other = loaded(run, Path(path), policy="zero3")
    _same(run, other, "a split that has moved")
    losses += run.train(rank, range(4, 6))
    for one in (run, other):
        one.engine.close()
    return losses + [value.double().sum().item() for value in seen if value is not None]


@on_ranks(2, timeout=100)
def test_a_split_that_moves_goes_with_states_that_are_set_sleep_and_move(
    rank: int, world: int, tmp_path: Path
) -> None:
    found = [_split(rank, world, f"{tmp_path}/{moving}", moving) for moving in (True, False)]
    assert found[0] == found[1]


@on_ranks(2)
def test_a_repartition_looks_at_states_that_no_step_is_making(rank: int) -> None:
    step, looks, facts_of = TileRunner._step, [], repartition.facts_of

    def slowly(runner: TileRunner, *args: Any) -> None:
        time.sleep(0.02)
        step(runner, *args)

    def looked(tables: Mapping[str, SegmentStates]) -> Facts:
        facts = facts_of(tables)
        looks.append(all("state.exp_avg" in kinds for kinds in facts.states.values()))
        return facts

    late = zs.Offload(grad="host", optimizer="host", delayed_update=0)
    run = made(policy="zero3", offload=late)
    with (
        mock.patch.object(TileRunner, "_step", slowly),
        mock.patch.object(repartition, "facts_of", looked),
    ):
        run.train(rank, range(1))
        run.engine.repartition(policy="zero1")
    assert looks == [True]
    run.engine.close()
