"""One run, one curve: with ``leaves=V`` the weights are the same, to the bit, on any number of
ranks, in every row, on every tier, over one level or two.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.support.covering import by_pairs
from tests.support.families import FAMILIES, TINY
from tests.support.harness import run_ranks
from zeroshard.core.digest import digest_of

LEAVES = 8
ROWS = ("ddp", "zero1", "zero2", "zero3", "zero3-keep")


class Model(nn.Module):
    """Two blocks with dropout around an embedding; `both`: whether the second one runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 24)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 50), nn.GELU(), nn.Linear(50, 24))
            for _ in range(2)
        )
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(24, 31, bias=False)

    def forward(self, tokens: torch.Tensor, *, both: bool = True) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks if both else self.blocks[:1]:
            hidden = hidden + self.dropout(block(hidden))
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


class Again(Model):
    """Its first block runs twice, the second time inside a reentrant checkpoint."""

    def forward(self, tokens: torch.Tensor, *, both: bool = True) -> torch.Tensor:
        block, hidden = self.blocks[0], self.embed(tokens)
        hidden = hidden + block(hidden)
        hidden = hidden + checkpoint(block, hidden, use_reentrant=True)
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


class Half(nn.Module):
    """A block, one layer of which runs alone where not `both` do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, hidden: torch.Tensor, *, both: bool) -> torch.Tensor:
        return self.second(torch.tanh(self.first(hidden) if both else hidden))  # type: ignore[no-any-return]


class Halved(Model):
    """Its blocks all run, one half or both: leaves enter the same units, and use other parameters
    of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Half() for _ in range(2))

    def forward(self, tokens: torch.Tensor, *, both: bool = True) -> torch.Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + self.dropout(block(hidden, both=both))
        logits = self.head(hidden)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


class Tied(Model):
    """Its head has the embedding's weight, in the unit of the model itself, and a bias in that of
    the layer before: two modules in a row need one unit, and one that is here between them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24))
        self.before = nn.Linear(24, 24)
        self.head = nn.Linear(24, 31)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, *, both: bool = True) -> torch.Tensor:
        hidden = self.embed(tokens) * self.scale
        for block in self.blocks if both else self.blocks[:1]:
            hidden = hidden + self.dropout(block(hidden))
        logits = self.head(self.before(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


@dataclass(frozen=True)
class Run:
    """One way to train."""

    options: dict[str, Any] = field(default_factory=dict)
    no_sync: bool = False
    accumulate: str = ""  # the tier of engine.accumulate(), in place of the loop
    weighted: bool = False
    skips: bool = False  # leaves 0, 3, 6 do not run the second block
    own: type[Model] = Model  # what is trained, unless it is a family
    frozen: bool = False  # the first block is not trained
    hidden: bool = False  # by engine.hide_gradients()
    counted: bool = False  # the engine counts the steps
    leaves: int | str = LEAVES
    reads: bool = False  # whole weights after each step
    family: str = ""  # in place of Model
    steps: int = 3
    shares: Sequence[float] = ()  # of ranks in turn, for `uneven`
    uneven: str = ""  # the option that gets them: "shares" or "batch_shares"

    def on(self, world: int) -> Run:
        """Return it with shares for `world` ranks."""
        if not self.uneven or world == 1:
            return self
        parts = [self.shares[rank % len(self.shares)] for rank in range(world)]
        return replace(
            self, options=self.options | {self.uneven: [part / sum(parts) for part in parts]}
        )


def tokens_of(step: int, leaf: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + leaf)
    return torch.randint(31, (2, 7), generator=generator)


class Training:
    """A run under way on this rank."""

    def __init__(self, run: Run) -> None:
        torch.manual_seed(0)
        family = FAMILIES[run.family] if run.family else None
        self.run, self.family = run, family
        self.model = run.own() if family is None else family.model(TINY)
        if family is not None:  # engine.accumulate() would fill a cache twice
            self.model.config.use_cache = False
        if run.frozen:
            self.model.blocks[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        self.optimizer = optimizer
        self.engine = zs.shard(self.model, optimizer, leaves=run.leaves, **run.options)
        if run.hidden:
            self.engine.hide_gradients()
        self.norms: list[torch.Tensor] = []

    def loss(self, step: int, leaf: int) -> torch.Tensor:
        if self.family is not None:
            return self.family.loss(self.model, self.family.data(TINY, leaf, step))
        both = not self.run.skips or leaf % 3 > 0
        loss: torch.Tensor = self.model(tokens_of(step, leaf), both=both)
        return loss

    def weight(self, leaf: int) -> float | None:
        # sums that fp64 would round
        return 1.1 * 10.0 ** (3 * (leaf % 5) - 6) if self.run.weighted else None

    def weighed(self, step: int, leaf: int) -> Any:
        loss, weight = self.loss(step, leaf), self.weight(leaf)
        return loss if weight is None else (loss, weight)

    def step(self, step: int) -> None:
        run, engine = self.run, self.engine
        before = torch.get_rng_state()
        leaves = engine.leaves(None if run.counted else step)
        if run.accumulate:
            with engine.no_sync() if run.no_sync else nullcontext():
                engine.accumulate(leaves, partial(self.weighed, step), tier=run.accumulate)
        for leaf in () if run.accumulate else leaves:
            loss, weight = self.loss(step, leaf), self.weight(leaf)
            if run.no_sync:
                with engine.no_sync():
                    engine.backward(loss, weight=weight)
            else:
                engine.backward(loss, weight=weight)
        assert torch.equal(torch.get_rng_state(), before)
        if run.hidden:
            assert not any(isinstance(p.grad, torch.Tensor) for p in self.model.parameters())
        self.norms.append(engine.clip_grad_norm_(0.5).reshape(1))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        if run.reads:
            engine.full_state_dict()

    def end(self) -> str:
        """Return the hash of weights and norms, on rank 0."""
        state = self.engine.full_state_dict()
        self.engine.close()
        return digest_of(*(state[name] for name in sorted(state)), *self.norms) if state else ""


def _hashes(rank: int, world: int, runs: Sequence[Run]) -> list[str]:
    out = []
    for run in runs:
        training = Training(run.on(world))
        for step in range(run.steps):
            training.step(step)
        out.append(training.end())
    return out


def hashes(world: int, runs: Sequence[Run], timeout: float = 200) -> list[str]:
    """Return the hash of each of `runs` on `world` ranks."""
    found: list[str] = run_ranks(world, _hashes, runs, timeout=timeout)[0]
    return found


@pytest.fixture(scope="module")
def expected() -> str:
    """The hash of one rank, all of whose states are on the device."""
    return hashes(1, [Run()])[0]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_row_on_any_number_of_ranks_trains_to_one_hash(world: int, expected: str) -> None:
    found = dict(zip(ROWS, hashes(world, [Run({"policy": row}) for row in ROWS]), strict=True))
    assert set(found.values()) == {expected}, found


def _nodes(size: int, **options: Any) -> Run:
    return Run(
        {"comm": {"node_size": size, "transport": "gloo"} | options.pop("comm", {})} | options
    )


def _tiers(tier: str, **options: Any) -> dict[str, Any]:
    return {"offload": dict.fromkeys(("weight", "grad", "optimizer"), tier) | options}


def test_nodes_tiers_budgets_and_shares_train_to_the_same_hash(
    expected: str, tmp_path: Path
) -> None:
    runs = {
        "two levels": _nodes(2, stage=2, comm={"hierarchical": True}),
        "flat": _nodes(2, stage=1, comm={"hierarchical": False}),
        **{row: _nodes(2, policy=row) for row in ("hpz", "mics", "hfsdp")},
        "host": Run({"stage": 3} | _tiers("host")),
        "half on the host": Run({"stage": 3} | _tiers("host", fraction=0.5)),
        "disk": Run({"stage": 3} | _tiers("disk", disk_path=str(tmp_path))),
        "budget": Run({"stage": 3, "accumulation_budget": 40_000}),
        "uneven states": Run({"stage": 3}, uneven="shares", shares=(1, 2, 3)),
        "uneven ranks": Run({"stage": 3}, uneven="batch_shares", shares=(1, 2, 3)),
        "uneven ranks, ddp": Run({"stage": 0}, uneven="batch_shares", shares=(3, 1)),
        "no_sync": Run({"stage": 1}, no_sync=True),
        "no_sync, stage 3": Run({"stage": 3}, no_sync=True),
    }
    found = dict(zip(runs, hashes(4, list(runs.values())), strict=True))
    assert set(found.values()) == {expected}, found


def test_leaves_may_use_other_parameters_of_a_unit_where_collectives_meet_in_order() -> None:
    kind = Run(skips=True, own=Halved)
    ordered = {"units": [Half], "comm": {"transport": "nccl"}}
    rows = ("ddp", "zero1", "zero2", "zero3")
    runs = [replace(kind, options=ordered | {"policy": row}) for row in rows]
    runs += [replace(run, no_sync=True) for run in runs]
    assert set(hashes(2, runs, timeout=30)) == set(hashes(1, [kind]))


def test_hidden_gradients_of_leaves_train_to_the_same_hash(expected: str) -> None:
    runs = [Run({"policy": row}, hidden=True) for row in ("ddp", "zero2", "zero3")]
    runs += [replace(run, no_sync=True) for run in runs]
    assert set(hashes(2, runs)) == {expected}


@pytest.fixture(scope="module")
def accumulated() -> list[str]:
    """The hashes of ACCUMULATED on one rank."""
    return hashes(1, ACCUMULATED)


# with dropout between sections, and a unit that two of them use
ACCUMULATED = [
    Run(accumulate="device"),
    Run(accumulate="device", weighted=True),
    Run({"precision": "bf16"}, accumulate="device", leaves=7),
    Run({"precision": "fp16"}, accumulate="device", leaves="3x2x2"),
]


@by_pairs(
    {"world": (3, 2), "row": ROWS, "run": tuple(range(len(ACCUMULATED)))},
    slow_by="world",
)
def test_accumulate_trains_to_one_hash_on_any_number_of_ranks(
    cases: list[dict[str, Any]], accumulated: list[str], tmp_path: Path
) -> None:
    disk = _tiers("disk", disk_path=str(tmp_path))
    others = [
        Run({"stage": 3} | _tiers("host", fraction=0.5), accumulate="host"),
        Run({"stage": 3} | disk, accumulate="device"),
        Run({"stage": 3, "accumulation_budget": 40_000}, accumulate="device"),
        Run({"stage": 3}, accumulate="device", uneven="batch_shares", shares=(1, 3)),
        Run({"stage": 3}, accumulate="device", no_sync=True),
    ]
    for world in sorted({case["world"] for case in cases}):
        own = [case for case in cases if case["world"] == world]
        runs = [ACCUMULATED[case["run"]] for case in own]
        runs = [
            replace(run, options=run.options | {"policy": case["row"]})
            for run, case in zip(runs, own, strict=True)
        ]
        assert hashes(world, runs) == [accumulated[case["run"]] for case in own], own
        assert set(hashes(world, others)) == {accumulated[0]}


def test_accumulate_trains_to_one_hash_on_nodes(accumulated: list[str]) -> None:
    runs = [_nodes(2, policy=row) for row in ("hpz", "mics", "hfsdp", "zero1", "zero2")]
    found = hashes(4, [replace(run, accumulate="device") for run in runs])
    assert set(found) == {accumulated[0]}, found


def test_accumulate_has_the_hash_of_the_loop_where_blocks_pass_on_one_tensor() -> None:
    loop = Run({"precision": "bf16"}, family="GPT-2 (tied head)")
    alone = hashes(1, [loop])
    for stage, tier in ((1, "device"), (3, "host")):
        run = replace(loop, options=loop.options | {"stage": stage}, accumulate=tier)
        assert hashes(3, [run]) == alone, stage


def test_a_rank_without_a_leaf_hands_a_tied_head_over_when_the_others_do(tmp_path: Path) -> None:
    loop = Run(family="GPT-2 (tied head)")
    disk = _tiers("disk", disk_path=str(tmp_path))  # reduces are waited for in order
    run, alone = replace(loop, options={"stage": 3} | disk), hashes(1, [loop])
    assert hashes(3, [run]) == alone
    leaves = [replace(one, leaves=5) for one in (run, loop)]  # one has a single leaf, and shadows
    assert hashes(3, leaves[:1]) == hashes(1, leaves[1:])


@pytest.mark.parametrize("frozen", [False, True])
def test_a_rank_without_a_leaf_follows_tied_units_wherever_gathers_are_collective(
    frozen: bool, tmp_path: Path
) -> None:
    kind = Run(own=Tied, frozen=frozen, weighted=True, leaves=5, reads=True)
    disk = _tiers("disk", disk_path=str(tmp_path))
    ways = [
        Run({"stage": 3, "comm": {"transport": "gloo"}}),
        Run({"stage": 3, "units": [nn.Linear, nn.Embedding], "comm": {"transport": "gloo"}}),
        Run({"policy": "zero3-keep", "comm": {"transport": "gloo"}}),
        *(_nodes(1, policy=row) for row in ("hpz", "mics", "hfsdp")),
        Run({"stage": 3} | disk),
        Run({"stage": 3, "accumulation_budget": 40_000} | _tiers("host")),
    ]
    alone = hashes(1, [kind])[0]
    runs = [replace(kind, options=way.options) for way in ways]
    assert set(hashes(2, runs)) == {alone}
    # one rank shadows several rounds
    runs = [replace(run, uneven="batch_shares", shares=(3, 1)) for run in runs[:4]]
    assert set(hashes(2, runs)) == {alone}


@pytest.mark.parametrize(
    ("world", "stage"),
    # a subtree for each rank, and whole gradients that wait for it; slices of uneven ranks
    [(2, 1), (3, 3), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((2, 3), (3, 1)))],
)
def test_weights_of_losses_units_that_leaves_skip_and_bf16_do_not_part_worlds(
    world: int, stage: int
) -> None:
    kinds = [
        Run(weighted=True),
        Run(skips=True),
        Run({"precision": "bf16"}),
        Run({"precision": "fp16"}),
        Run(leaves="3x2x2"),
        Run(leaves=7),
    ]
    runs = [replace(kind, options=kind.options | {"stage": stage}) for kind in kinds]
    alone = hashes(1, kinds)
    assert hashes(world, runs) == alone
    assert len(set(alone)) == len(kinds), "they are other runs"


def test_parts_of_a_leafs_gradient_are_added_before_leaves_are() -> None:
    for options in ({}, {"precision": "bf16"}):
        runs = [Run({"stage": stage} | options, own=Again) for stage in (0, 1, 3)]
        assert len(set(hashes(2, runs))) == 1, options


def _reduced(rank: int, world: int, runs: Sequence[Run]) -> list[tuple[int, int]]:
    """Return the calls and bytes of a step's reduces, for each run."""
    out = []
    for run in runs:
        training = Training(run.on(world))
        training.step(0)
        training.engine.reset_traffic()
        training.step(1)
        traffic = training.engine.traffic()
        calls = traffic.calls["reduce_scatter"]
        out.append((calls // len(training.engine.units), traffic.bytes["reduce_scatter"]))
        training.end()
    return out


def test_rows_that_keep_whole_gradients_reduce_once_where_ranks_have_a_subtree_each() -> None:
    rows = [Run({"stage": stage}) for stage in (0, 1, 2)]
    for of_rank in run_ranks(2, _reduced, [*rows, Run({"stage": 2}, leaves=2)]):
        (calls, whole), (zero1, _), (zero2, shards), (_, once) = of_rank
        assert calls == zero1 == 1 and zero2 == 4
        assert whole == once and shards == 4 * once
    for of_rank in run_ranks(3, _reduced, rows):
        assert [calls for calls, _ in of_rank] == [3, 3, 3], "3 ranks have no subtree of 8 each"
    declared = [Run({"stage": stage}, leaves="3x2x2") for stage in (0, 1)]
    uneven = Run({"stage": 1}, uneven="batch_shares", shares=(2, 1, 1))
    for of_rank in run_ranks(3, _reduced, [*declared, uneven]):
        assert [calls for calls, _ in of_rank] == [1, 1, 1]
    assert hashes(3, [*declared, uneven]) == hashes(1, [*declared, Run()])


def _moved(rank: int, world: int, runs: Sequence[Run]) -> list[tuple[float, float]]:
    """Return how often a step gathers and reduces each unit, for each run."""
    out = []
    for run in runs:
        training = Training(run)
        training.step(0)
        training.engine.reset_traffic()
        training.step(1)
        calls, units = training.engine.traffic().calls, len(training.engine.units)
        out.append((calls["all_gather"] / units, calls["reduce_scatter"] / units))
        training.end()
    return out


def test_accumulate_gathers_a_unit_twice_a_step_and_reduces_it_as_the_loop_does() -> None:
    runs = [Run({"stage": 3}), Run({"stage": 3}, accumulate="device")]
    runs += [replace(run, options={"stage": 1}) for run in runs]
    for looped, at_once, *whole in run_ranks(2, _moved, runs):
        assert at_once[0] < 2.5 < looped[0] and at_once[1] == looped[1] == 4
        assert whole == [(1, 1), (1, 1)]


def test_declared_levels_are_another_tree() -> None:
    binary, declared, flat = hashes(1, [Run(leaves=6), Run(leaves="2x3"), Run(leaves="3x2")])
    assert binary == flat != declared


def _sampled(rank: int, world: int, stage: int) -> list[tuple[tuple[int, int], list[int]]]:
    """Return the samples of every leaf of three steps that a DataLoader would get here."""
    training = Training(Run({"stage": stage}))
    sampler = zs.LeafSampler(2 * 16 + 3, LEAVES, 2, engine=training.engine)
    assert sampler.num_steps == 2
    out = []
    for start in (0, 2):
        sampler.set_step(start)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        batches.reverse()
        for step in (start, start + 1):
            for leaf in training.engine.leaves(step):
                out.append(((step, leaf), batches.pop()))
                training.engine.backward(training.loss(step, leaf))
            training.optimizer.zero_grad()
    with pytest.raises(zs.ConfigError, match="leaves=4, and the engine 8"):
        zs.LeafSampler(100, 4, 2, engine=training.engine)
    training.engine.close()
    return out


@pytest.mark.parametrize("stage", [1, 3])
def test_a_leaf_has_its_samples_whoever_computes_it(stage: int) -> None:
    alone = dict(run_ranks(1, _sampled, stage)[0])
    sampler = zs.LeafSampler(2 * 16 + 3, LEAVES, 2)
    assert alone == {place: sampler[place] for place in alone} and len(alone) == 4 * LEAVES
    for world in (2, 3):
        dealt = [one for of_rank in run_ranks(world, _sampled, stage) for one in of_rank]
        assert len(dealt) == len(alone) and dict(dealt) == alone


def _drawn(
    rank: int, world: int, accumulate: bool = False
) -> dict[tuple[int, int], tuple[float, float]]:
    """Return random numbers drawn before and after the model in every leaf of two steps on this
    rank.
    """
    training, out = Training(Run()), {}
    for step in range(2):
        leaves = training.engine.leaves(step, seed=5)

        def loss(leaf: int, step: int = step) -> torch.Tensor:
            before = float(torch.rand(()))
            loss = training.loss(step, leaf)
            out[step, leaf] = before, float(torch.rand(()))
            return loss

        if accumulate:
            training.engine.accumulate(leaves, loss)
        for leaf in () if accumulate else leaves:
            training.engine.backward(loss(leaf))
        training.optimizer.zero_grad()
    training.engine.close()
    return out


def test_every_leaf_has_random_numbers_of_its_own_whoever_computes_it() -> None:
    (alone,) = run_ranks(1, _drawn)
    assert len(set(alone.values())) == len(alone) == 2 * LEAVES
    for accumulate in (False, True):
        of_ranks = run_ranks(3, _drawn, accumulate)
        assert {place: two for drawn in of_ranks for place, two in drawn.items()} == alone


# ------------------------------------------------------------------------------------ changed ranks


def _saved(rank: int, world: int, run: Run, steps: range, path: Path) -> tuple[str, list[str]]:
    """Go on from `path` where it holds a step; train `steps`, and save the last one. Return the
    hash of the weights, and what was logged about the curve.
    """
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeroshard").addHandler(handler)
    training = Training(run)
    states = {"scheduler": training.scheduler}
    if zs.latest_step(path) is not None:
        zs.load(path, training.engine, states=states)
    for step in steps:
        training.step(step)
    zs.save(path, training.engine, step=steps.stop, states=states)
    training.norms.clear()
    logging.getLogger("zeroshard").removeHandler(handler)
    return training.end(), [record for record in records if "curve" in record]


def test_a_run_goes_on_with_other_ranks_and_rows_on_the_same_curve(tmp_path: Path) -> None:
    whole = run_ranks(2, _saved, Run({"stage": 2}), range(4), tmp_path / "whole")[0]
    parts = [(4, 3, range(1)), (3, 1, range(1, 2)), (1, 0, range(2, 3)), (2, 3, range(3, 4))]
    for world, stage, steps in parts:
        found = run_ranks(world, _saved, Run({"stage": stage}), steps, tmp_path / "parts")[0]
        assert not found[1]
    assert found[0] == whole[0]
    other = Run({"stage": 2}, leaves=4)
    _, told = run_ranks(2, _saved, other, range(4, 5), tmp_path / "parts")[0]
    assert len(told) == 1 and "leaves was 8 and is 4" in told[0]


def _saved_by(rank: int, world: int, threads: int, *more: Any) -> list[str]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _saved(rank, world, Run(), *more)[1]
    finally:
        torch.set_num_threads(before)


def test_a_run_that_goes_on_with_other_threads_per_rank_is_told(tmp_path: Path) -> None:
    assert run_ranks(1, _saved_by, 1, range(1), tmp_path) == [[]]
    told = run_ranks(1, _saved_by, 2, range(1, 2), tmp_path)[0]
    assert len(told) == 1 and "threads was 1 and is 2" in told[0]


def _repartitioned(rank: int, world: int, changes: Sequence[dict[str, Any]]) -> str:
    training = Training(Run({"policy": "ddp"}))
    for step, change in enumerate([{}, *changes]):
        if change:
            training.engine.repartition(**change)
        training.step(step)
    return training.end()


def test_repartition_between_steps_changes_no_bit() -> None:
    changes = [{"policy": "zero3"}, {"policy": "zero1", "offload": {"optimizer": "host"}}]
    alone = run_ranks(1, _repartitioned, [{}, {}])[0]
    assert run_ranks(3, _repartitioned, changes)[0] == alone


# ---------------------------------------------------------------------------------------- bad input


def _refusals(rank: int, world: int, path: Path) -> dict[str, str]:
    """Return what every wrong use raises."""

    def raised(act: Callable[[], object]) -> str:
        try:
            act()
        except (zs.ZeroshardError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    out: dict[str, str] = {}
    torch.manual_seed(0)
    model = Model()

    def made(**options: Any) -> Callable[[], object]:
        return lambda: zs.shard(Model(), leaves=8, **options)

    out["few"] = raised(lambda: zs.shard(Model(), leaves=world - 1))
    out["levels"] = raised(lambda: zs.shard(Model(), leaves="3x"))
    out["differs"] = raised(lambda: zs.shard(Model(), leaves=8 + rank))
    out["codec"] = raised(made(comm={"grad_codec": "int8"}))
    out["ordered"] = raised(made(comm={"ordered": False}))
    out["rounded"] = raised(made(precision=zs.Precision("bf16", accumulate="bf16")))
    norm = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    out["batch norm"] = raised(lambda: zs.shard(norm, leaves=8))
    out["no share"] = raised(made(batch_shares=[1.0, 0.0]))

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zs.shard(model, optimizer, leaves=4, stage=2)

    def backward() -> None:
        engine.backward(model(tokens_of(0, 0)))

    out["outside"] = raised(backward)
    engine.reset()

    def walk(inside: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            for _ in engine.leaves(0):
                inside()

        return run

    out["no backward"] = raised(walk(lambda: None))
    engine.reset()
    out["twice"] = raised(walk(lambda: (backward(), backward())))
    engine.reset()
    out["cleared"] = raised(walk(lambda: (backward(), optimizer.zero_grad())))
    engine.reset()
    out["read"] = raised(walk(lambda: (backward(), engine.clip_grad_norm_(1.0))))
    engine.reset()

    def left() -> None:
        for _ in engine.leaves(0):
            backward()
            break
        optimizer.step()

    out["left"] = raised(left)
    engine.reset()
    walk(backward)()
    out["gradients there"] = raised(walk(backward))
    optimizer.zero_grad()
    out["join"] = raised(lambda: engine.join().__enter__())

    def loss(leaf: int) -> torch.Tensor:
        return model(tokens_of(0, leaf))  # type: ignore[no-any-return]

    out["accumulate"] = raised(lambda: engine.accumulate([0], loss))
    begun = engine.leaves(0)
    next(begun)
    out["begun"] = raised(partial(engine.accumulate, begun, loss))
    del begun
    engine.reset()

    def trailed() -> None:
        with engine.trail(path):
            engine.accumulate(engine.leaves(0), loss)

    out["trail"] = raised(trailed)
    engine.reset()
    for name, act in (
        ("assigned", walk(backward)),
        ("assigned at once", lambda: engine.accumulate(engine.leaves(0), loss)),
    ):
        model.head.weight.grad = torch.ones(31, 24)
        out[name] = raised(act)
        engine.reset()
        optimizer.zero_grad()
    walk(backward)()  # and on it goes
    optimizer.step()
    engine.close()
    torch.manual_seed(0)
    plain = zs.shard(Model())
    out["not given"] = raised(lambda: plain.leaves(0))
    plain.close()
    return out


def test_wrong_uses_are_refused_on_every_rank_in_one_line(tmp_path: Path) -> None:
    wanted = {
        "few": "ConfigError: leaves=1 gives 1 micro-batches to 2 data parallel ranks",
        "levels": "ConfigError: leaves='3x': a number of leaves or levels",
        "differs": "PlanMismatch: the ranks disagree, first about 'leaves': rank 0: leaves = 8",
        "codec": "ConfigError: leaves=8 fixes the bits of every sum, and comm.grad_codec='int8'",
        "ordered": "ConfigError: leaves=8 fixes the bits of every sum, and comm.ordered=False",
        "rounded": "ConfigError: leaves=8 adds gradients in fp32",
        "batch norm": "ConfigError: leaves=8: the running statistics of module '1'",
        "no share": "every rank needs one at least",
        "outside": "StateError: leaves=4: a backward outside of engine.leaves()",
        "no backward": "no backward has run",
        "twice": "StateError: a second backward inside one leaf",
        "cleared": "StateError: gradients were cleared between the leaves of a step",
        "read": "StateError: leaves=4: some leaves of this step are missing",
        "left": "StateError: leaves=4: some leaves of this step are missing",
        "gradients there": "StateError: gradients rest here from before this step",
        "join": "ConfigError: engine.join() does not run leaves=4",
        "accumulate": "ConfigError: engine.accumulate() of leaves=4 takes the leaves of a step",
        "begun": "ConfigError: engine.accumulate() was given leaves of another engine, or some",
        "trail": "ConfigError: engine.accumulate() inside engine.trail()",
        "assigned": "StateError: the gradient assigned to 'head.weight' would be added to one leaf",
        "assigned at once": "StateError: the gradient assigned to 'head.weight' would be added to",
        "not given": "ConfigError: engine.leaves() needs zs.shard(..., leaves=V)",
    }
    of_ranks = run_ranks(2, _refusals, tmp_path)
    for name, text in wanted.items():
        told = [found.pop(name) for found in of_ranks]
        assert any(text in one for one in told), (name, told)
        for one in told:  # a rank may hear first that the other one gave up
            assert (text in one or "gave up this step" in one) and "\n" not in one, (name, one)
    assert of_ranks == [{}, {}]


# ------------------------------------------------------------------------------------------- slow


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "GPT-2 (tied head)"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fifty_steps_of_a_family_train_to_one_hash(
    family: str, precision: str, tmp_path: Path
) -> None:
    base = Run({"precision": precision}, family=family, steps=50)
    alone = hashes(1, [base], timeout=600)[0]

    def run(**options: Any) -> Run:
        return replace(base, options=base.options | options)

    comm = {"node_size": 2, "transport": "gloo"}
    for world in (2, 3, 4, 5, 8):
        runs = {f"stage {stage}": run(stage=stage) for stage in range(4)}
        if world % 2 == 0:
            runs |= {f"stage {stage}, nodes": run(stage=stage, comm=comm) for stage in range(4)}
        if world % 2 == 0 and world > 2:
            runs |= {row: run(policy=row, comm=comm) for row in ("hpz", "mics", "hfsdp")}
        runs["host"] = run(stage=3, **_tiers("host", fraction=0.5))
        runs["disk"] = run(stage=3, **_tiers("disk", disk_path=str(tmp_path)))
        runs["uneven"] = replace(run(stage=2), uneven="shares", shares=(1, 2))
        runs["no_sync"] = replace(run(stage=1), no_sync=True)
        runs["accumulate"] = replace(run(stage=3), accumulate="device")
        runs["accumulate, stage 1"] = replace(run(stage=1), accumulate="host")
        runs["budget"] = run(stage=3, accumulation_budget=100_000)
        found = dict(zip(runs, hashes(world, list(runs.values()), timeout=1500), strict=True))
        assert set(found.values()) == {alone}, (world, found)
