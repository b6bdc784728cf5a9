"""What every rank decides by itself, and must decide alike: options of param groups, the clip
value, zero_grad(), micro-batches.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import (
    ROWS,
    TRANSPORTS,
    Net,
    Routed,
    batch,
    final_state,
    make_model,
    make_sharded,
    two_groups,
)
from zeroshard import PlanMismatch
from zeroshard.runtime.decisions import Decisions

Step = Callable[[int, Net, torch.optim.Optimizer, zs.Engine], None]


def _backward(rank: int, model: Net, step: int = 0) -> None:
    model(*batch(rank, step)).backward()


# ----------------------------------------------------------------------- one rank decides otherwise


def _lr(rank: int, model: Net, optimizer: torch.optim.Optimizer, engine: zs.Engine) -> None:
    optimizer.param_groups[1]["lr"] = (1e-2, 1e-3)[rank]
    _backward(rank, model)
    optimizer.step()


def _betas(rank: int, model: Net, optimizer: torch.optim.Optimizer, engine: zs.Engine) -> None:
    optimizer.param_groups[0]["betas"] = ((0.9, 0.999), (0.9, 0.95))[rank]
    _backward(rank, model)
    optimizer.step()


def _lr_tensor(rank: int, model: Net, optimizer: torch.optim.Optimizer, engine: zs.Engine) -> None:
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(1e-2)
    _backward(rank, model)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"].fill_((0.25, 0.5)[rank])
    _backward(rank, model)
    optimizer.step()


def _lr_after_clip(
    rank: int, model: Net, optimizer: torch.optim.Optimizer, engine: zs.Engine
) -> None:
    """Between the clip, where the ranks have compared, and the step: told in the next one."""
    _backward(rank, model)
    engine.clip_grad_norm_(1.0)
    optimizer.param_groups[0]["lr"] = (1e-2, 1e-3)[rank]
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 1e-2
    _backward(rank, model)
    optimizer.step()


def _clip(rank: int, model: Net, optimizer: torch.optim.Optimizer, engine: zs.Engine) -> None:
    _backward(rank, model)
    engine.clip_grad_norm_((1.0, 0.5)[rank])


def _no_clip(rank: int, model: Net, optimizer: torch.optim.Optimizer, engine: zs.Engine) -> None:
    _backward(rank, model)
    if rank == 0:
        engine.clip_grad_norm_(1.0)
    optimizer.step()


def _micro_batches(
    rank: int, model: Net, optimizer: torch.optim.Optimizer, engine: zs.Engine
) -> None:
    with engine.no_sync():
        for step in range(1 + rank):
            _backward(rank, model, step)
    _backward(rank, model)
    optimizer.step()


def _zero_grad(rank: int, model: Net, optimizer: torch.optim.Optimizer, engine: zs.Engine) -> None:
    _backward(rank, model)
    optimizer.step()
    if rank == 0:
        optimizer.zero_grad()
    _backward(rank, model)
    optimizer.step()


def _zero_grad_of_a_micro_batch(
    rank: int, model: Net, optimizer: torch.optim.Optimizer, engine: zs.Engine
) -> None:
    with engine.no_sync():
        _backward(rank, model)
    if rank == 1:
        model.zero_grad()
    _backward(rank, model, 1)
    optimizer.step()


def _zero_grad_of_a_part(
    rank: int, model: Net, optimizer: torch.optim.Optimizer, engine: zs.Engine
) -> None:
    _backward(rank, model)
    optimizer.step()
    for parameter in (model.head, model.blocks[1])[rank].parameters():
        parameter.grad = None
    _backward(rank, model)
    optimizer.step()


def _zero_grad_to_zeros(
    rank: int, model: Net, optimizer: torch.optim.Optimizer, engine: zs.Engine
) -> None:
    _backward(rank, model)
    optimizer.step()
    if rank == 0:
        optimizer.zero_grad(set_to_none=False)
    _backward(rank, model)
    optimizer.step()


def _load_on_one_rank(
    rank: int, model: Net, optimizer: torch.optim.Optimizer, engine: zs.Engine
) -> None:
    if rank == 0:
        optimizer.load_state_dict(engine.optimizer_part())
    _backward(rank, model)
    optimizer.step()


def _load_of_another_step(
    rank: int, model: Net, optimizer: torch.optim.Optimizer, engine: zs.Engine
) -> None:
    parts = [engine.optimizer_part()]
    _backward(rank, model)
    optimizer.step()
    optimizer.zero_grad()
    parts.append(engine.optimizer_part())
    optimizer.load_state_dict(parts[rank])
    _backward(rank, model)
    optimizer.step()


@on_ranks(2)
def test_a_no_sync_that_ranks_disagree_about_trains_where_each_micro_batch_is_reduced(
    rank: int,
) -> None:
    for row in ("zero2", "zero3"):
        told = []
        for inside in ((0, 1), (0,)):
            torch.manual_seed(0)
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            engine = zs.shard(model, optimizer, policy=row, comm=zs.Comm(transport="gloo"))
            for _ in range(2):
                with engine.no_sync() if rank in inside else nullcontext():
                    _backward(rank, model)
                _backward(rank, model, 1)
                optimizer.step()
                optimizer.zero_grad()
            told.append(final_state(model, engine))
        assert all(torch.equal(value, told[1][name]) for name, value in told[0].items()), row


CASES: dict[Step, str] = {
    _lr: (
        r"option 'lr' of optimizer param group 1 differs between ranks in step 1 \(rank 0: 0.01;"
        r" rank 1: 0.001\)"
    ),
    _betas: (
        r"option 'betas' of optimizer param group 0 differs between ranks in step 1 \(rank 0:"
        r" \(0.9, 0.999\); rank 1: \(0.9, 0.95\)\)"
    ),
    _lr_tensor: (
        r"option 'lr' of optimizer param group 0 differs between ranks in step 2 \(rank 0: 0.25;"
        r" rank 1: 0.5\)"
    ),
    _lr_after_clip: (
        r"option 'lr' of optimizer param group 0, changed after the gradients of step 1 were"
        r" averaged differs .* rank 1: 0.001"
    ),
    _clip: (
        r"max_norm of clip_grad_norm_\(\) differs between ranks in step 1 \(rank 0: 1.0; rank 1:"
        r" 0.5\)"
    ),
    _no_clip: (
        r"max_norm of clip_grad_norm_\(\) differs between ranks in step 1 \(rank 0: 1.0; rank 1:"
        r" nothing\)"
    ),
    _micro_batches: (
        r"different numbers of backwards since zero_grad\(\) in step 1 \(rank 0: 2; rank 1: 3\)"
    ),
    _zero_grad: (
        r"different numbers of backwards since zero_grad\(\) in step 2 \(rank 0: 1; rank 1: 2\)"
    ),
    _zero_grad_of_a_micro_batch: (
        r"different numbers of backwards since zero_grad\(\) in step 1 \(rank 0: 2; rank 1: 1\)"
    ),
    _zero_grad_of_a_part: (
        r"gradients cleared by zero_grad\(\) differs between ranks in step 2 \(rank 0: head.weight;"
        r" rank 1: blocks.1.norm"
    ),
    _zero_grad_to_zeros: (
        r"zero_grad\(set_to_none=False\) differs between ranks in step 2 \(rank 0: called; rank 1:"
        r" nothing\)"
    ),
    _load_on_one_rank: (
        r"optimizer.load_state_dict\(\) differs between ranks in step 1 \(rank 0: step count 1;"
        r" rank 1: nothing\)"
    ),
    _load_of_another_step: (
        r"optimizer.load_state_dict\(\) differs between ranks in step 2 \(rank 0: step count 1;"
        r" rank 1: step count 2\)"
    ),
}


def _cases(row: str) -> list[Step]:
    """Return the cases that end in the comparison: where every micro-batch is reduced, one too
    many waits for its peer before that.
    """
    return [case for case in CASES if case is not _micro_batches or row in ("ddp", "zero1")]


@pytest.mark.parametrize(
    ("row", "transport"),
    [
        ("zero1", "shared_memory"),
        ("zero3", "gloo"),
        pytest.param("ddp", "gloo", marks=pytest.mark.slow),
    ],
)
@on_ranks(2, timeout=90)
def test_a_decision_that_differs_between_ranks_is_told_on_every_rank_with_both_values(
    rank: int, row: str, transport: str
) -> None:
    """Look at what every case says on this rank, in the second step of a run; afterwards all
    go on.
    """
    said = {}
    for case in _cases(row):
        model, optimizer, engine = make_sharded(row, transport)
        _backward(rank, model)
        optimizer.step()
        optimizer.zero_grad()
        try:
            case(rank, model, optimizer, engine)
            said[case.__name__] = "nothing"
        except PlanMismatch as error:
            said[case.__name__] = str(error)
        engine.close()
    for case in _cases(row):
        assert re.search(CASES[case], said[case.__name__]), (case.__name__, said[case.__name__])


# -------------------------------------------------------------------------- programs that are right


def _plateau(rank: int, world: int, mean: bool) -> str:
    """The commonest divergence: a scheduler that is fed with each rank's own loss."""
    for row in ("zero1", "zero3"):
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = zs.shard(model, optimizer, policy=row)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
        generator = torch.Generator().manual_seed(rank)
        try:
            for _ in range(20):
                x = torch.randn(4, 8, generator=generator)
                loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                value = loss.detach()
                if mean:
                    torch.distributed.all_reduce(value)
                scheduler.step(value.item())
        except PlanMismatch as error:
            return str(error)
        finally:
            engine.close()
    return "nothing"


def test_a_scheduler_fed_with_each_ranks_own_loss_is_told_and_one_fed_with_the_mean_is_not() -> (
    None
):
    for said in run_ranks(2, _plateau, False):
        assert re.match(
            r"option 'lr' of optimizer param group 0 differs between ranks in step \d+ \(rank 0:"
            r" \S+; rank 1: \S+\): ",
            said,
        ), said
        assert "average it first" in said
    assert run_ranks(2, _plateau, True) == ["nothing", "nothing"]


def _cleared(model: Net, optimizer: torch.optim.Optimizer, how: str) -> None:
    if how == "of a part":
        for parameter in [
            *model.embed.parameters(),
            *model.blocks[0].parameters(),
            *model.norm.parameters(),
            *model.head.parameters(),
        ]:
            parameter.grad = None
    elif how == "of the model":
        model.zero_grad()
    else:
        optimizer.zero_grad(set_to_none=how != "to zeros")


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2, timeout=90)
def test_ranks_that_use_different_parameters_and_clear_all_they_have_are_not_refused(
    rank: int, transport: str
) -> None:
    """Each rank uses other parameters, and clears all it has, between micro-batches and after
    the step: nobody is refused.
    """
    for row in ROWS if transport == "shared_memory" else ("zero1", "zero2"):
        for how in ("of the optimizer", "of the model", "of a part", "to zeros"):
            torch.manual_seed(0)
            model = Routed()
            optimizer = two_groups(model)
            engine = zs.shard(
                model, optimizer, policy=row, comm=zs.Comm.model_validate({"transport": transport})
            )
            route = ((0,), (0, 1, 2))[rank]
            for step in range(2):
                with engine.no_sync():
                    model(*batch(rank, step), route).backward()
                _cleared(model, optimizer, how)
                for _ in range(2):
                    with engine.no_sync():
                        model(*batch(rank, step), route).backward()
                model(*batch(rank, step), route).backward()
                engine.clip_grad_norm_(1.0)
                optimizer.step()
                _cleared(model, optimizer, how)
            engine.close()


# ------------------------------------------------------------------------------------ what it costs


def test_options_are_encoded_again_only_where_one_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import zeroshard.runtime.decisions as module

    encoded: list[Any] = []
    text = module._text
    monkeypatch.setattr(module, "_text", lambda value: encoded.append(value) or text(value))
    decisions = Decisions()
    optimizer = torch.optim.AdamW(make_model().parameters(), lr=torch.tensor(1e-2), foreach=False)
    decisions.attach(optimizer)
    first = decisions.digest()
    count = len(encoded)
    for _ in range(5):
        assert decisions.digest() == first
    assert count > 0 and len(encoded) == count
    optimizer.param_groups[0]["lr"].fill_(1e-3)
    assert decisions.digest() != first and len(encoded) == 2 * count
    optimizer.param_groups[0]["lr"] = 1e-2 + 0.0
    changed = decisions.digest()
    optimizer.param_groups[0]["betas"] = [0.9, 0.95]
    assert decisions.digest() != changed


def test_options_whose_encoding_an_exception_ends_are_encoded_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import zeroshard.runtime.decisions as module

    def interrupt(value: object) -> str:
        raise KeyboardInterrupt

    decisions, others = Decisions(), Decisions()
    optimizer = torch.optim.SGD(make_model().parameters(), lr=1e-2)
    decisions.attach(optimizer)
    before = decisions.digest()
    optimizer.param_groups[0]["lr"] = 1e-3
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_text", interrupt)
        decisions.digest()
    others.attach(optimizer)
    assert decisions.digest() == others.digest() != before
    assert decisions.items() == others.items()


def test_one_number_has_one_encoding() -> None:
    def digest(**options: Any) -> int:
        decisions = Decisions()
        decisions.attach(torch.optim.SGD([nn.Parameter(torch.zeros(1))], **options))
        return decisions.digest()

    assert digest(lr=1) == digest(lr=1.0) == digest(lr=torch.tensor(1.0))
    assert digest(lr=1.0) != digest(lr=1.0 + 1e-15)
