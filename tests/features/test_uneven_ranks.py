"""Ranks that run a unit a different number of times, and units whose gradients come in several
parts: one reduce per backward, DDP's bits.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.support import inside
from tests.support.cases import Backward, ByHand, Case, seeded, simple, train_case
from tests.support.covering import by_pairs
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import (
    ROWS,
    TRANSPORTS,
    Run,
    batch,
    final_state,
    has_parameters,
    make_sharded,
    take_steps,
    two_groups,
)
from zeroshard.errors import PlanMismatch

WIDTH = 16
STEPS = 4


class Halves(nn.Module):
    """Two layers, of which each call runs one, or none."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, half: str) -> torch.Tensor:
        runs = {"a": self.a, "b": self.b}.get(half)
        return torch.tanh(x if runs is None else runs(x))


class Route(nn.Module):
    """Runs the blocks and halves that it is told to, some of them inside a checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, WIDTH)
        self.blocks = nn.ModuleList(Halves() for _ in range(3))
        self.head = nn.Linear(WIDTH, 37)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor, route: list[tuple[int, str, str]]
    ) -> torch.Tensor:
        h = self.embed(x)
        for index, half, how in route:
            block = self.blocks[index]
            h = block(h, half) if how == "plain" else _CHECKPOINTS[how](block, h, half)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class _ForeignCheckpoint(torch.autograd.Function):
    """A reentrant checkpoint as other libraries write their own: nothing tells that its forward
    is run again.
    """

    @staticmethod
    def forward(ctx: Any, block: nn.Module, half: str, h: torch.Tensor) -> torch.Tensor:
        ctx.call = block, half
        ctx.save_for_backward(h)
        with torch.no_grad():
            return block(h, half)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        block, half = ctx.call
        h = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = block(h, half)
        torch.autograd.backward(out, grad)
        return None, None, h.grad


_CHECKPOINTS: dict[str, Any] = {
    "reentrant": lambda block, h, half: checkpoint(block, h, half, use_reentrant=True),
    "recomputed": lambda block, h, half: checkpoint(block, h, half, use_reentrant=False),
    "twice": lambda block, h, half: checkpoint(
        _CHECKPOINTS["reentrant"], block, h, half, use_reentrant=True
    ),
    "foreign": lambda block, h, half: _ForeignCheckpoint.apply(block, half, h),
}


def _runs(routes: Any) -> Any:
    """Return what a step does: the forward along `routes` of this rank, and its backward."""

    def run(module: nn.Module, backward: Backward, rank: int, step: int) -> list[torch.Tensor]:
        options = routes[rank]
        loss = module(*batch(rank, step), options[step % len(options)])
        backward(loss)
        return [loss.detach()]

    return run


def _plain(*calls: str) -> list[tuple[int, str, str]]:
    return [(int(call[0]), call[1], "plain") for call in calls]


def _checkpointed(how: str, *calls: str) -> list[tuple[int, str, str]]:
    return [(int(call[0]), call[1], how) for call in calls]


_TWICE = [_plain("0a", "0b", "1a", "2a")], [_plain("0a", "1a", "2a")]
_RANDOM = tuple(
    [
        _plain(*(f"{rolls.randrange(3)}{rolls.choice('ab')}" for _ in range(rolls.randint(0, 7))))
        for _ in range(STEPS)
    ]
    for rolls in (random.Random(3), random.Random(4))
)
_RECOMPUTED_TWICE = ([_checkpointed("reentrant", "0a", "1a", "0a", "0b")],) * 2
_RECOMPUTED_UNEVENLY = (
    [_checkpointed("reentrant", "0a", "0a", "1b"), _checkpointed("recomputed", "0b", "0a")],
    [
        _plain("0b") + _checkpointed("reentrant", "0a", "2a"),
        _checkpointed("reentrant", "1a", "0b", "0a"),
    ],
)
_INSIDE_AND_OUTSIDE = ([_plain("0a", "1a") + _checkpointed("reentrant", "0a", "1b", "0b")],) * 2

ROUTES = {
    "one rank calls a unit twice": _TWICE,
    "random routes": _RANDOM,
    "a weight is recomputed twice": _RECOMPUTED_TWICE,
    "ranks recompute different calls": _RECOMPUTED_UNEVENLY,
    "a unit runs inside a checkpoint and outside": _INSIDE_AND_OUTSIDE,
}
CUTS: dict[str, Any] = {"auto": None, "halves": [Halves], "layers": [nn.Linear, nn.Embedding]}


FACTORS: dict[str, Sequence[str]] = {
    "name": tuple(ROUTES),
    "row": ROWS,
    "cut": tuple(CUTS),
    "transport": TRANSPORTS,
}


def _gathers_alike(case: dict[str, str]) -> bool:
    routes = ROUTES[case["name"]]
    alike = routes[0] is routes[1] or not case["row"].startswith("zero3")
    return alike or case["transport"] != "gloo"


@by_pairs(FACTORS, _gathers_alike, slow_by="name")
@on_ranks(2, timeout=300)
def test_a_unit_that_runs_unevenly_trains_to_the_bits_of_data_parallel_training(
    rank: int, cases: list[dict[str, str]]
) -> None:
    """Train each of `cases`; compare with data parallel training by hand."""

    def along(name: str) -> Case:
        return Case(seeded(Route), _runs(ROUTES[name]), ddp=None)

    @functools.cache
    def reference(name: str) -> Run:
        return train_case(rank, "reference", along(name), STEPS)

    out = {}
    for case in cases:
        name, row, cut, transport = case.values()
        comm = zs.Comm.model_validate({"transport": transport})
        run = train_case(rank, row, along(name), STEPS, units=CUTS[cut], comm=comm)
        out[", ".join(case.values())] = run.differs_from(reference(name))
    assert len(out) == len(cases)
    assert not any(out.values()), out


class Scaled(nn.Module):
    """A layer, and a scale of its own that is used after it: no hook but the block's own gathers
    it for backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * torch.tanh(self.layer(x))


class BackToBack(nn.Module):
    """Runs one block three times in a row: each output is the next call's input."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, WIDTH)
        self.block = Scaled()
        self.head = nn.Linear(WIDTH, 37)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        h = checkpoint(self._run, h, use_reentrant=True) if self.reentrant else self._run(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())

    def _run(self, h: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(self.block(h)))  # type: ignore[no-any-return]


BACK_TO_BACK: dict[str, Sequence[Any]] = {
    "reentrant": (False, True),
    "row": (*ROWS, "hpz"),
    "transport": TRANSPORTS,
}


@by_pairs(BACK_TO_BACK, slow_by="reentrant")
@on_ranks(2, timeout=200)
def test_a_block_that_runs_on_its_own_output_has_its_weights_in_every_backward(
    rank: int, cases: list[dict[str, Any]]
) -> None:
    """Train with every module its own unit; compare with data parallel training by hand."""

    def blocks(reentrant: bool) -> Case:
        return Case(seeded(BackToBack, reentrant), simple, ddp=None)

    references = [train_case(rank, "reference", blocks(each), STEPS) for each in (False, True)]
    out = []
    for case in cases:
        reentrant, row, transport = case.values()
        comm = zs.Comm(transport=transport)
        run = train_case(rank, row, blocks(reentrant), STEPS, units=has_parameters, comm=comm)
        out.append(run.differs_from(references[reentrant]))
    found = zip(cases, out, strict=True)
    assert not any(out), [each for each in found if each[1]]


@on_ranks(2, timeout=60)
def test_gradients_of_different_units_wait_inside_no_sync_for_the_step(rank: int) -> None:
    """Take all backwards inside no_sync, along different routes; compare with data parallel
    training by hand.
    """
    routes = ([_plain("0a"), _plain("1b", "0b"), []], [_plain("2a", "2b"), [], _plain("1a")])[rank]
    out, states = {}, {}
    for kind in ("by hand", *ROWS):
        model = seeded(Route)()
        optimizer = two_groups(model)
        engine = None if kind == "by hand" else zs.shard(model, optimizer, policy=kind)
        hand = ByHand(model)
        for step, route in enumerate(routes):
            loss = model(*batch(rank, step), route)
            with contextlib.nullcontext() if engine is None else engine.no_sync():
                hand.backward(loss) if engine is None else loss.backward()
            if engine is None:
                hand.finish()
            optimizer.step()
            optimizer.zero_grad()
        states[kind] = (
            dict(model.state_dict()) if engine is None else engine.full_state_dict(rank0_only=False)
        )
        out[kind] = [
            name
            for name, value in states[kind].items()
            if not torch.equal(value, states["by hand"][name])
        ]
        if engine is not None:
            engine.close()
    assert not any(out.values()), out


@pytest.mark.parametrize("row", ["zero1", "zero3"])
@on_ranks(2, timeout=60)
def test_a_look_at_gradients_between_micro_batches_changes_no_bit(rank: int, row: str) -> None:
    """Accumulate inside no_sync, with and without a look at gradients by torch.autograd.grad in
    between; compare.
    """
    states = []
    for looks in (False, True):
        model = seeded(Route)()
        optimizer = two_groups(model)
        engine = zs.shard(model, optimizer, policy=row)
        for step in range(STEPS):
            with engine.no_sync():
                for micro in range(2):
                    model(*batch(rank, 3 * step + micro), _plain("0a", "1b")).backward()
            if looks:
                x = torch.randn(
                    2, WIDTH, generator=torch.Generator().manual_seed(step)
                ).requires_grad_()
                torch.autograd.grad(model.blocks[0](x, "a").sum(), x)
            model(*batch(rank, 3 * step + 2), _plain("0a", "2b")).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(final_state(model, engine))
    found = [name for name, value in states[0].items() if not torch.equal(value, states[1][name])]
    assert found == []


@on_ranks(2, timeout=60)
def test_gradients_that_come_late_are_in_the_step_whichever_rank_has_them(rank: int) -> None:
    """Recompute a unit several times, and differently often per rank, in a way that cannot be
    foreseen; look at the largest errors.
    """
    routes = (
        [_checkpointed("foreign", "0a", "1a", "0a", "0a")],
        [_checkpointed("foreign", "0a", "2b")],
    )
    case = Case(seeded(Route), _runs(routes), ddp=None)
    reference = train_case(rank, "reference", case, STEPS)
    out = {}
    for row in ROWS:
        run = train_case(
            rank, row, case, STEPS, units=CUTS["halves"], comm=zs.Comm(transport="shared_memory")
        )
        out[row] = max(
            float((value - reference.state[name]).abs().max()) for name, value in run.state.items()
        )
    assert max(out.values()) < 1e-6, out


def _verified(rank: int, world: int, row: str) -> str:
    """Compare replicated state in every step, along different routes; flip a bit of a unit that
    only the other rank runs.
    """
    model = seeded(Route)()
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, policy=row, verify_every=1, units=CUTS["halves"])
    routes = [_plain("0a", "2b"), _plain("1a")][rank]
    take_steps(rank, 3, model, optimizer, data=lambda rank, step: (*batch(rank, step), routes))
    loss = model(*batch(rank, 3), routes)
    if rank == 1:
        inside.full_weights(engine, "blocks.1")[5] += 1.0
    loss.backward()
    try:
        optimizer.step()
    except PlanMismatch as error:
        return str(error)
    return "nothing noticed"


@pytest.mark.parametrize("row", ["ddp", "zero1"])
def test_comparing_replicas_compares_every_unit_on_ranks_that_run_different_ones(row: str) -> None:
    for told in run_ranks(2, _verified, row, timeout=60):
        assert "about 'weights of unit blocks.1'" in told and "memory was corrupted" in told, told


class Recomputed(nn.Module):
    """A layer that is recomputed inside backward, and whose parameters the loss uses, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 37)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self.norm, self.embed(x), use_reentrant=True)
        loss = nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())
        return loss + 0.1 * (self.norm.weight.square().sum() + self.norm.bias.square().sum())


@on_ranks(2, timeout=60)
def test_a_unit_that_gets_more_in_a_nested_backward_is_reduced_after_it(rank: int) -> None:
    """Look at the units reduced in a backward whose nested backward adds to gradients that are here
    already.
    """
    model = seeded(Recomputed)()
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, policy="zero2", units=has_parameters)
    reduced: list[str] = []

    def note(event: str, name: str) -> None:
        if event == "reduce":
            reduced.append(name)

    with inside.traced(engine, note):
        model(*batch(rank, 0)).backward()
    found = {"reduced": reduced, "left": inside.has_local_gradient(engine, "norm")}
    assert sorted(found["reduced"]) == ["embed", "head", "norm"] and not found["left"], found


class Either(nn.Module):
    """Runs the layers that it is told to. Nothing else is there: two gradient buffers fill the
    budget.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor, route: tuple[int, ...]) -> torch.Tensor:
        for index in route:
            x = torch.tanh(self.layers[index](x))
        return x.square().mean()


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero2"])
@on_ranks(2, timeout=60)
def test_ranks_that_share_no_unit_do_not_wait_for_each_other_over_sockets(
    rank: int, world: int, row: str
) -> None:
    """Run three layers on one rank and the three others on the other, over sockets; compare with
    their halved gradients.
    """
    model, expected = Either(), Either()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    options = {"comm": zs.Comm(transport="gloo"), "prefetch_bytes": 0}
    engine = zs.shard(model, optimizer, policy=row, units=has_parameters, **options)
    batches = [
        torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(each))
        for each in range(world)
    ]
    routes = [(0, 1, 2), (3, 4, 5)]
    model(batches[rank], routes[rank]).backward()
    optimizer.step()
    for each in range(world):
        expected(batches[each], routes[each]).backward()
    torch.optim.SGD(expected.parameters(), lr=0.25).step()
    state = final_state(model, engine)
    found = [
        name for name, value in expected.state_dict().items() if not torch.equal(value, state[name])
    ]
    assert found == []


def _cleared_on_one_rank(rank: int, world: int, row: str) -> float:
    """Clear gradients of a layer that only rank 1 has used; return the norm."""
    model = Either()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    engine = zs.shard(model, optimizer, policy=row, units=has_parameters)
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
    model(x, (0, 1)[: rank + 1]).backward()
    for parameter in model.layers[1].parameters():
        parameter.grad = None  # on rank 0 it is None already
    norm = float(engine.clip_grad_norm_(1e9))
    used = (
        float(sum(engine.full_grad(p).square().sum() for p in model.layers[0].parameters())) ** 0.5
    )
    engine.close()
    return abs(norm - used) / used


@pytest.mark.parametrize("row", ["zero2", "zero3"])
def test_the_norm_leaves_out_gradients_that_are_cleared_where_they_were_made(row: str) -> None:
    assert max(run_ranks(2, _cleared_on_one_rank, row, timeout=60)) < 1e-6


class Mixture(nn.Module):
    """Experts that are modules, of which each rank runs others, and another number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for index in ((0,), (1, 2, 3))[rank]:
            x = x + self.experts[index](x)
        return x


def _experts(rank: int, world: int, unit: type[nn.Module], comm: dict[str, str]) -> str:
    torch.manual_seed(0)
    model = nn.ModuleList([Mixture(), Mixture()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stall_timeout_s = 3 if unit is nn.Linear else 300
    engine = zs.shard(
        model, optimizer, stage=3, units=[unit], comm=comm, stall_timeout_s=stall_timeout_s
    )
    try:
        for _ in range(2):
            x = torch.randn(2, 16)
            for layer in model:
                x = layer(x, rank)
            engine.backward(x.square().mean())
            optimizer.step()
            optimizer.zero_grad()
    except (zs.StallError, zs.StateError) as error:
        return str(error)
    engine.close()
    return ""


@pytest.mark.parametrize("comm", [{"weight_codec": "int8"}, {"transport": "gloo"}])
def test_where_every_rank_gathers_the_same_a_stall_of_other_experts_names_the_remedy(
    comm: dict[str, str],
) -> None:
    told = run_ranks(2, _experts, nn.Linear, comm)
    assert any("comm.weight_codec" in one and "units=[its class]" in one for one in told), told
    assert run_ranks(2, _experts, Mixture, comm) == ["", ""]


# every rank enters the same units in the same order, and uses other parameters of them
_HALVES = {
    "plain": ([_plain("0a", "1a", "2b")], [_plain("0b", "1a", "2a")]),
    "none": ([_plain("0a", "1a", "2b")], [_plain("0a", "1-", "2-")]),
    "repeated": ([_plain("0a", "1a", "0b", "2a")], [_plain("0a", "1b", "0a", "2b")]),
    **{
        how: ([_checkpointed(how, "0a", "1b", "2a")], [_checkpointed(how, "0b", "1b", "2-")])
        for how in ("reentrant", "recomputed", "foreign")
    },
    "mixed": (
        [_checkpointed("reentrant", "0a") + _plain("1a") + _checkpointed("recomputed", "2a")],
        [_checkpointed("reentrant", "0b") + _plain("1b") + _checkpointed("recomputed", "2b")],
    ),
    "nested": (
        [_checkpointed("twice", "0a", "1a", "2b")],
        [_checkpointed("twice", "0b", "1-", "2b")],
    ),
}


MESH_ROWS = ("hpz", "mics", "hfsdp")
HALVED: dict[str, Sequence[Any]] = {
    "how": tuple(_HALVES),
    "row": (*ROWS, *MESH_ROWS),
    "frozen": (False, True),
}


@by_pairs(HALVED, slow_by="how")
@on_ranks(2, timeout=300)
def test_ranks_may_use_other_parameters_of_a_unit_where_collectives_meet_in_order(
    rank: int, cases: list[dict[str, Any]]
) -> None:
    """Train `cases` where collectives meet in the order in which they begin; compare with data
    parallel training by hand.
    """

    def halves(how: str, frozen: bool) -> Case:
        def model() -> nn.Module:
            made = seeded(Route)()
            for block in made.blocks if frozen else ():
                block.a.weight.requires_grad_(False)
            return made

        return Case(model, _runs(_HALVES[how]), ddp=None)

    @functools.cache
    def reference(how: str, frozen: bool) -> Run:
        return train_case(rank, "reference", halves(how, frozen), 3)

    out = []
    for case in cases:
        how, row, frozen = case.values()
        comm = zs.Comm(transport="nccl", node_size=1 if row in MESH_ROWS else None)
        run = train_case(rank, row, halves(how, frozen), 3, units=[Halves], comm=comm)
        out.append(run.differs_from(reference(how, frozen)))
    found = zip(cases, out, strict=True)
    assert not any(out), [each for each in found if each[1]]


@on_ranks(2, timeout=60)
def test_ranks_may_use_other_parameters_of_a_unit_inside_no_sync_where_they_meet_in_order(
    rank: int, world: int
) -> None:
    """Take two backwards in each step, the first inside no_sync, each along the other rank's route
    of the one before; compare with data parallel training by hand.
    """
    out, comm = {}, zs.Comm(transport="nccl")
    for how in ("none", "repeated", "foreign", "mixed"):
        routes = _HALVES[how]

        def losses(model: nn.Module, step: int, routes: Any = routes) -> list[torch.Tensor]:
            turns = ((rank + micro) % world for micro in range(2))
            data = (batch(rank, 2 * step + micro) for micro in range(2))
            return [model(*each, routes[turn][0]) for each, turn in zip(data, turns, strict=True)]

        expected = {}
        for added_first in (True, False):  # micro-batches before ranks
            model = seeded(Route)()
            optimizer, hand = two_groups(model), ByHand(model)
            for step in range(2):
                each = losses(model, step)
                for added in [each] if added_first else [[loss] for loss in each]:
                    hand.backward(*added)
                hand.finish()
                optimizer.step()
            expected[added_first] = dict(model.state_dict())
        for row in ("ddp", "zero1", "zero2", "zero3"):
            model, optimizer, engine = make_sharded(
                row, model=seeded(Route)(), units=[Halves], comm=comm
            )
            for step in range(2):
                first, second = losses(model, step)
                with engine.no_sync():
                    first.backward()
                second.backward()
                optimizer.step()
                optimizer.zero_grad()
            state = final_state(model, engine)
            other = expected[row in ("ddp", "zero1")]
            out[f"{how}, {row}"] = [
                name for name, value in state.items() if not torch.equal(value, other[name])
            ]
    assert not any(out.values()), out


@on_ranks(2, timeout=60)
def test_ranks_may_use_other_parameters_of_a_unit_that_rests_on_the_host(rank: int) -> None:
    """Train with states on the host where collectives meet in order; compare with data parallel
    training by hand.
    """
    out, comm = {}, zs.Comm(transport="nccl")
    tiers = {
        "zero1": {"optimizer": "host"},
        "zero2": {"optimizer": "host", "grad": "host"},
        "zero3": {"optimizer": "host", "grad": "host", "weight": "host"},
    }
    for how in ("none", "repeated", "mixed"):
        case = Case(seeded(Route), _runs(_HALVES[how]), ddp=None)
        reference = train_case(rank, "reference", case, 2)
        for row, offload in tiers.items():
            run = train_case(rank, row, case, 2, units=[Halves], comm=comm, offload=offload)
            out[f"{how}, {row}"] = run.differs_from(reference)
    assert not any(out.values()), out
