"""``zero_grad()`` of the optimizer and of modules drops the gradients at rest."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard as zs
from tests.support import inside
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import (
    ROWS,
    batch,
    differences,
    equal,
    final_state,
    make_model,
    make_sharded,
    train,
    two_groups,
)

State = dict[str, torch.Tensor]


HOWS = ("optimizer", "optimizer, zeros", "model", "model, zeros", "by hand")
Discard = tuple[str, bool]  # one of HOWS, or "" for none; whether it was computed inside no_sync()


def _every_discard(first: int) -> list[Discard]:
    """Return each of HOWS twice, in order from number `first` on; of two neighbours, and of the two
    of a kind, one is inside no_sync().
    """
    return [(HOWS[n % len(HOWS)], n % 2 == 1) for n in range(first, first + 2 * len(HOWS))]


def _discarding(
    rank: int, row: str, discards: list[Discard], **options: Any
) -> tuple[list[float], State]:
    """Return the losses and the weights of a step for each of `discards`, before which a backward's
    gradients are discarded so; half of the steps are under another policy.
    """
    model, optimizer, engine = make_sharded(row, **options)
    losses = []
    for step, (how, no_sync) in enumerate(discards):
        if how:
            with engine.no_sync() if no_sync else nullcontext():
                model(*batch(rank, step + 50)).backward()  # to be thrown away
        match how:
            case "optimizer":
                optimizer.zero_grad()
            case "optimizer, zeros":
                optimizer.zero_grad(set_to_none=False)
            case "model":
                model.zero_grad()
            case "model, zeros":
                model.zero_grad(set_to_none=False)
            case "by hand":
                for parameter in model.parameters():
                    parameter.grad = None
        loss = model(*batch(rank, step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step == len(HOWS) - 1 and row != "zero1" and not options:
            engine.repartition(policy="zero1")
    state = final_state(model, engine)
    return losses, state


@on_ranks(2, timeout=90)
def test_every_zero_grad_forgets_the_resting_gradient(rank: int) -> None:
    expected = train(rank, "torch-ddp", 2 * len(HOWS))
    for number, row in enumerate(ROWS):
        discards = _every_discard(number)  # another is the first in each row
        losses, state = _discarding(rank, row, discards)
        # the first loss that differs tells which gradients were not forgotten
        assert losses == expected.losses, (row, discards)
        assert equal(state, expected.state), (row, discards)


def _zeroed_beside(rank: int, world: int, cases: list[tuple[str, zs.Comm]]) -> list[str]:
    out = []
    for row, comm in cases:
        discards = _every_discard(0)
        _, expected = _discarding(rank, row, [("", False)] * len(discards), comm=comm)
        _, found = _discarding(rank, row, discards, comm=comm)
        out += [f"{row}: {line}" for line in differences(found, expected)]
    return out


def test_gradients_that_were_summed_over_nodes_are_forgotten() -> None:
    comms = [zs.Comm(transport=name, node_size=2) for name in ("shared_memory", "nccl")]
    assert not any(run_ranks(4, _zeroed_beside, [("hpz", comm) for comm in comms], timeout=60))


def test_gradients_that_came_encoded_are_forgotten() -> None:
    """But for what encoding took of them, where error feedback adds that to the next ones."""
    cases = [
        ("zero2", zs.Comm(grad_codec="int8")),
        ("zero3", zs.Comm(transport="gloo", grad_codec="int4", weight_codec="int8")),
        ("hpz", zs.Comm(node_size=1, grad_codec="int4")),
    ]
    assert run_ranks(2, _zeroed_beside, cases, timeout=60) == [[], []]


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_zeroing_one_modules_gradient_drops_that_one_alone(rank: int, row: str) -> None:
    """Code that drops the gradient of one module (frozen for a while) drops that one alone."""
    model, optimizer, engine = make_sharded(row)
    plain = make_model()
    ours, theirs = DistributedDataParallel(plain), two_groups(plain)
    for step in range(3):
        for module, inner in ((model, model), (ours, plain)):
            module(*batch(rank, step)).backward()
            inner.blocks[1].zero_grad()
            inner.head.zero_grad(set_to_none=False)
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
    assert equal(engine.full_state_dict(rank0_only=False), plain.state_dict()), row
    engine.close()


@pytest.mark.parametrize("row", ("zero1", "zero3", "mics", "hfsdp"))
@on_ranks(4)
def test_zeroing_a_part_of_a_unit_inside_no_sync_drops_that_part_alone(rank: int, row: str) -> None:
    """Also where the sum of a node's ranks waits for the other nodes, whose sums are rounded in
    another order than DDP's.
    """
    model, optimizer, engine = make_sharded(row, comm=zs.Comm(node_size=2))
    plain = make_model()
    ours, theirs = DistributedDataParallel(plain), two_groups(plain)
    for step in range(3):
        for module, inner, no_sync in ((model, model, engine.no_sync), (ours, plain, ours.no_sync)):
            with no_sync():
                module(*batch(rank, step + 50)).backward()
                part = next(iter(inner.blocks[1].children()))  # of a unit
                part.zero_grad(set_to_none=False)
                inner.head.zero_grad()
            module(*batch(rank, step)).backward()
        for each in (optimizer, theirs):
            each.step()
            each.zero_grad()
    expected = plain.state_dict()
    for name, value in engine.full_state_dict(rank0_only=False).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=f"{row} {name}")
    engine.close()


@pytest.mark.parametrize("how", ["zero_grad", "one unit", "by hand", "model"])
@pytest.mark.parametrize("inside_step", [False, True], ids=["after", "inside"])
def test_the_memory_of_a_gradient_is_given_back_when_it_is_dropped_and_no_sooner(
    how: str, inside_step: bool
) -> None:
    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # not SGD's, which torch may have hooked, too
            for entry in self.param_groups[0]["params"]:
                if entry.grad is not None:
                    entry.data.add_(entry.grad, alpha=-0.1)
            if inside_step:
                self.zero_grad()  # the step's own: those at rest stay until they are dropped

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = Optimizer(model.parameters(), lr=0.1)
    engine = zs.shard(model, optimizer, policy="zero3", units=[nn.Linear])
    sealed: list[Any] = []
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        entries = optimizer.param_groups[0]["params"]
        sealed = sealed or [entry.grad for entry in entries]
        assert all(entry.grad is one for entry, one in zip(entries, sealed, strict=True))
        held = inside.resting_gradients(engine)
        optimizer.step()
        assert engine.full_grad(model[0].weight).abs().sum() > 0
        assert len(held) == 2 and None not in [one() for one in held]
        match how:
            case "zero_grad":
                optimizer.zero_grad()
                assert [one() for one in held] == [None, None], "at once"
            case "one unit":
                for number, left in ((0, 2), (1, 1)):  # its weight, and then its bias
                    entries[number].grad = None
                    assert engine.full_grad(model[1].weight).abs().sum() > 0
                    assert len([one for one in held if one() is not None]) == left
                optimizer.zero_grad()
            case "by hand":
                for entry in entries:
                    entry.grad = None
            case "model":
                model.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        assert [one() for one in held] == [None, None]
        optimizer.zero_grad()
    engine.close()


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, hidden: torch.Tensor, which: tuple[int, ...]) -> torch.Tensor:
        return torch.stack([self.layers[index](hidden) for index in which]).sum()


@on_ranks(2, timeout=30)
def test_what_other_ranks_have_used_is_dropped_on_the_optimizers_side_by_hand_as_well(
    rank: int,
) -> None:
    """Drop gradients of a layer that only the other rank has used, and of one that this has."""
    states = []
    for by_hand in (False, True):
        torch.manual_seed(0)
        model = _Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = zs.shard(model, optimizer, policy="zero3", units=[nn.Linear])
        model(torch.ones(2, 8), (rank,)).backward()
        if by_hand:
            for entry in optimizer.param_groups[0]["params"]:
                entry.grad = None
        else:
            optimizer.zero_grad()
        model(torch.ones(2, 8), (0, 1)).backward()
        optimizer.step()
        states.append(final_state(model, engine))
    called, by_hand = states
    assert equal(by_hand, called)


class _Skips(nn.Module):
    """Two layers, the second only where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, data: torch.Tensor, both: bool) -> torch.Tensor:
        hidden: torch.Tensor = self.first(data)
        return self.second(hidden) if both else hidden


@pytest.mark.parametrize("leaves", [None, 4])
def test_what_rests_of_a_unit_that_was_not_used_ends_with_the_gradients_of_the_others(
    leaves: int | None,
) -> None:
    """The model's zero_grad() clears those alone that it has."""
    model = _Skips()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zs.shard(model, optimizer, policy="zero3", units=[nn.Linear], leaves=leaves)
    held: list[Any] = []
    for both in (False, True):
        for _ in [None] if leaves is None else engine.leaves(range(leaves)):
            engine.backward(model(torch.ones(2, 8), both).sum())
        held = held or inside.resting_gradients(engine)
        optimizer.step()
        model.zero_grad()
    assert len(held) == 2 and [one() for one in held] == [None, None]
    engine.close()
