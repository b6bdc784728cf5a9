"""Gradients assigned to ``.grad`` by hand (surgery, noise, evolution strategies): DDP's numbers in
every row, or one line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard as zs
from tests.features.test_clipping import Branches
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import ROWS, Net, Run, batch, final_state, make_model, two_groups
from zeroshard.errors import PlanMismatch, StateError


@dataclass
class Job:
    """One training run: under DDP (no engine), or sharded."""

    rank: int
    model: Net
    module: nn.Module
    optimizer: torch.optim.Optimizer
    engine: zs.Engine | None

    def backward(self, step: int, *, penalty: float = 0.0) -> None:
        loss = self.module(*batch(self.rank, step))
        if penalty:
            loss = loss + penalty * sum((p.float() ** 2).sum() for p in self.model.parameters())
        self.engine.backward(loss) if self.engine else loss.backward()

    def no_sync(self) -> Any:
        return (self.engine or self.module).no_sync()

    def grad(self, parameter: nn.Parameter) -> torch.Tensor:
        if self.engine is None:
            assert parameter.grad is not None
            return parameter.grad.clone()
        grad = self.engine.full_grad(parameter)
        assert grad is not None
        return grad.to(parameter.dtype)

    def clip(self, max_norm: float) -> float:
        if self.engine is None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        else:
            norm = self.engine.clip_grad_norm_(max_norm)
        return float(norm)

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def _noise(like: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator).to(like.dtype) * 0.01


def _one_is_zeroed(job: Job, step: int) -> None:
    job.backward(step)
    weight = job.model.blocks[1].up.weight
    weight.grad = torch.zeros_like(weight)
    job.step()


def _all_are_changed(job: Job, step: int) -> None:
    job.backward(step)
    for seed, parameter in enumerate(job.model.parameters()):
        parameter.grad = job.grad(parameter).sign() * 0.01 + _noise(parameter, seed)
    job.step()


def _before_the_backward(job: Job, step: int) -> None:
    for seed, parameter in enumerate(job.model.blocks.parameters()):
        parameter.grad = _noise(parameter, 100 * job.rank + seed)  # each rank its own
    job.backward(step)
    job.step()


def _before_a_backward_that_begins_with_it(job: Job, step: int) -> None:
    for seed, parameter in enumerate(job.model.parameters()):
        parameter.grad = _noise(parameter, 100 * job.rank + seed)
    job.backward(step, penalty=0.01)
    job.step()


def _between_two_backwards(job: Job, step: int) -> None:
    job.backward(2 * step)
    for seed, parameter in enumerate(job.model.blocks[0].parameters()):
        parameter.grad = _noise(parameter, 100 * job.rank + seed)
    job.backward(2 * step + 1)
    job.step()


def _inside_no_sync(job: Job, step: int) -> None:
    with job.no_sync():
        job.backward(2 * step)
        for seed, parameter in enumerate(job.model.blocks[0].parameters()):
            parameter.grad = _noise(parameter, 100 * job.rank + seed)
    job.backward(2 * step + 1)
    job.step()


def _after_all_inside_no_sync(job: Job, step: int) -> None:
    with job.no_sync():
        job.backward(step)
    for seed, parameter in enumerate(job.model.parameters()):
        parameter.grad = _noise(parameter, seed)
    job.step()


def _after_no_sync_then_added_to(job: Job, step: int) -> None:
    """Where nothing has been reduced, they rest beside zeros of no sum."""
    with job.no_sync():
        job.backward(2 * step)
    for seed, parameter in enumerate(job.model.parameters()):
        parameter.grad = _noise(parameter, seed)
    job.optimizer.step()  # and no zero_grad()
    job.backward(2 * step + 1)
    job.step()


def _without_a_backward(job: Job, step: int) -> None:
    for seed, parameter in enumerate(job.model.blocks.parameters()):
        parameter.grad = _noise(parameter, seed + step)
    if step == 1:
        job.clip(0.02)
    job.step()


def _changed_then_clipped(job: Job, step: int) -> None:
    job.backward(step)
    weight = job.model.head.weight
    weight.grad = job.grad(weight) + _noise(weight, step)
    assert job.clip(0.05) > 0.05
    kept = weight.grad
    job.step()
    assert 0 < float(kept.norm()) <= 0.05  # the clip scales it in place, as torch's does


def _clipped_then_noised(job: Job, step: int) -> None:
    """As differentially private SGD does."""
    job.backward(step)
    job.clip(0.05)
    for seed, parameter in enumerate(job.model.parameters()):
        parameter.grad = job.grad(parameter) + _noise(parameter, seed)
    job.step()


def _edited_in_place(job: Job, step: int) -> None:
    job.backward(step)
    weight = job.model.blocks[1].down.weight
    weight.grad = job.grad(weight)
    weight.grad.mul_(0.5)
    job.clip(1e3)
    weight.grad.data.add_(1e-3)
    assert weight.grad.isfinite().all()
    job.step()


def _buffers_that_stay(job: Job, step: int) -> None:
    buffers = vars(job.model).setdefault("kept", {})
    for seed, (name, parameter) in enumerate(job.model.named_parameters()):
        buffer = buffers.setdefault(name, torch.empty_like(parameter))
        buffer.copy_(_noise(parameter, seed + step))
        parameter.grad = buffer
    job.optimizer.step()
    for seed, (name, parameter) in enumerate(job.model.named_parameters()):
        assert parameter.grad is buffers[name]
        parameter.grad.copy_(_noise(parameter, seed + step + 1000))
    job.optimizer.step()


def _left_for_the_next_backward(job: Job, step: int) -> None:
    job.backward(step)
    weight = job.model.blocks[1].up.weight
    weight.grad = _noise(weight, step)
    job.optimizer.step()  # and no zero_grad()


def _then_zeroed(job: Job, step: int) -> None:
    first, second = job.model.blocks[0].up.weight, job.model.blocks[1].up.weight
    for clear in (
        job.optimizer.zero_grad,
        job.model.zero_grad,
        partial(job.optimizer.zero_grad, set_to_none=False),
        partial(job.model.zero_grad, set_to_none=False),
    ):
        first.grad = torch.ones_like(first)
        clear()
        second.grad = _noise(second, job.rank)
        job.backward(step)
        first.grad = torch.ones_like(first)
        clear()
        job.backward(step + 1)
        second.grad = _noise(second, 7)
        job.optimizer.step()
    job.optimizer.zero_grad()


def _inside_gathered(job: Job, step: int) -> None:
    job.backward(step)
    weight = job.model.blocks[1].up.weight
    with job.engine.gathered([weight]) if job.engine else contextlib.nullcontext():
        weight.grad = weight.detach() * 0.1
    job.step()


def _what_was_not_finite(job: Job, step: int) -> None:
    weight = job.model.blocks[1].up.weight
    handle = weight.register_hook(lambda grad: grad * float("nan"))
    job.backward(step)
    handle.remove()
    weight.grad = torch.zeros_like(weight)
    job.step()


def _around_a_local_gradient(job: Job, step: int) -> None:
    """``torch.autograd.grad`` leaves ``.grad`` alone."""
    weight = job.model.blocks[1].up.weight
    kept = weight.grad = _noise(weight, step)
    loss = job.model(*batch(job.rank, step))  # DDP's hooks want a backward
    torch.autograd.grad(loss, [weight])
    assert weight.grad is kept
    job.optimizer.step()
    job.optimizer.zero_grad()


EXACT: tuple[Callable[[Job, int], None], ...] = (
    _one_is_zeroed, _all_are_changed, _before_the_backward, _before_a_backward_that_begins_with_it,
    _after_all_inside_no_sync, _without_a_backward, _edited_in_place, _buffers_that_stay,
    _then_zeroed, _inside_gathered, _what_was_not_finite, _around_a_local_gradient,
)  # fmt: skip
# where DDP rounds otherwise without any assignment: it adds micro-batches to averages, and torch
# forms norms in fp32
ROUNDED: tuple[Callable[[Job, int], None], ...] = (
    _between_two_backwards, _inside_no_sync, _changed_then_clipped, _clipped_then_noised,
    _left_for_the_next_backward, _after_no_sync_then_added_to,
)  # fmt: skip


def _job(rank: int, kind: str, **options: Any) -> Job:
    model = make_model(layers=2)
    optimizer = two_groups(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    if kind == "torch-ddp":
        return Job(rank, model, DistributedDataParallel(model), optimizer, None)
    engine = zs.shard(model, optimizer, policy=kind, **options)
    return Job(rank, model, model, optimizer, engine)


def _trained(rank: int, kind: str, how: Callable[[Job, int], None], **options: Any) -> Run:
    job = _job(rank, kind, **options)
    for step in range(3):
        how(job, step)
    return Run([], final_state(job.model, job.engine), row=kind)


def _as_ddp(rank: int, world: int, name: str, options: dict[str, Any]) -> dict[str, list[str]]:
    how = globals()[name]
    reference = _trained(rank, "torch-ddp", how)
    out = {}
    for row in ROWS:
        run = _trained(rank, row, how, **options)
        if how in EXACT:
            out[row] = run.differs_from(reference)
        else:
            far = [
                key
                for key, value in run.state.items()
                if not torch.allclose(value, reference.state[key], rtol=1e-5, atol=1e-6)
            ]
            out[row] = far
    return out


def _names(hows: Sequence[Callable[..., None]]) -> Any:
    return pytest.mark.parametrize("how", [how.__name__ for how in hows])


@_names(EXACT + ROUNDED)
def test_an_assigned_gradient_is_stepped_or_reduced_as_ddp_does(how: str) -> None:
    for differences in run_ranks(2, _as_ddp, how, {}):
        assert not any(differences.values()), differences


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize(
    ("row", "where"),
    [("zero1", ""), ("zero3", ""), ("zero3", "repartitioned"), ("zero2", "in join()")],
)
@on_ranks(2)
def test_a_gradient_of_a_frozen_parameter_is_refused_by_name(
    rank: int, row: str, where: str, everywhere: bool
) -> None:
    model = make_model(layers=2)
    frozen = model.blocks[1].up.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told = []
    engine = zs.shard(model, optimizer, policy=row)
    if where == "repartitioned":
        engine.repartition(policy="zero1")
    for step in range(2):
        try:
            with engine.join() if where == "in join()" else contextlib.nullcontext():
                engine.backward(model(*batch(rank, step)))
                if everywhere or rank == 0:
                    frozen.grad = torch.ones_like(frozen)
                optimizer.step()
        except (StateError, PlanMismatch) as error:
            told.append(f"{type(error).__name__}: {error}")
        frozen.grad = None
        engine.reset()
        engine.backward(model(*batch(rank, step)))  # and the run goes on
        optimizer.step()
        optimizer.zero_grad()
    engine.close()
    kind = "StateError" if everywhere else "PlanMismatch"
    assert len(told) == 2
    assert all(text.startswith(kind) and "blocks.1.up.weight" in text for text in told), told


HOST = zs.Offload(grad="host", optimizer="host")


@_names([_all_are_changed, _before_the_backward, _without_a_backward, _clipped_then_noised])
def test_an_assigned_gradient_rests_on_the_host_where_others_do(how: str) -> None:
    for differences in run_ranks(2, _as_ddp, how, {"offload": HOST}):
        assert not any(differences.values()), differences


@on_ranks(3)
def test_an_assigned_gradient_is_stepped_to_the_bit_on_three_ranks(rank: int) -> None:
    """Three ranks: a sum of three divided by three need not be the tensor that was assigned."""
    reference = _trained(rank, "torch-ddp", _all_are_changed)
    found = _trained(rank, "zero2", _all_are_changed).differs_from(reference)
    assert found == []


@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_gradients_are_assigned_to_parameters_that_some_or_no_ranks_use(
    rank: int, when: str
) -> None:
    states = {}
    for kind in ("torch-ddp", *ROWS):
        torch.manual_seed(0)
        model = Branches(3)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        engine = None
        if kind != "torch-ddp":
            engine = zs.shard(model, optimizer, policy=kind)
        ddp = DistributedDataParallel(model, find_unused_parameters=True) if not engine else model
        for step in range(3):
            if when == "before":
                for parameter in model.branches.parameters():
                    parameter.grad = torch.full_like(parameter, 0.25 + rank * (step < 2))
                unused = model.branches[2]  # DDP leaves those of what nobody uses as they are
                for parameter in unused.parameters():
                    parameter.grad = torch.full_like(parameter, 0.5)
            ddp(torch.full((2, 7), 1.0 + rank + step), rank).backward()
            if when == "after":
                for parameter in model.branches.parameters():
                    parameter.grad = torch.full_like(parameter, 0.25)
            optimizer.step()
            optimizer.zero_grad()
        states[kind] = (
            model.state_dict() if engine is None else engine.full_state_dict(rank0_only=False)
        )
        if engine is not None:
            engine.close()
    for row in ROWS:
        for name, value in states["torch-ddp"].items():
            torch.testing.assert_close(states[row][name], value, msg=f"{row} {name}")


# ---------------------------------------------------------------------------- fp16


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_an_assigned_gradient_is_that_of_the_unscaled_loss_in_fp16(rank: int, row: str) -> None:
    """The same steps in fp32 and, with a loss scale, in fp16."""
    states = {}
    for precision in ("fp32", "fp16"):
        job = _job(rank, row, precision=precision)
        assert job.engine is not None
        down, up = job.model.blocks[1].down.weight, job.model.blocks[1].up.weight
        for step in range(3):
            down.grad = torch.full_like(down, 0.0625 * (1 + rank))
            up.grad = torch.full_like(up, 0.125)
            job.backward(step, penalty=0.01)
            up.grad = torch.full_like(up, 0.25)
            job.step()
            assert not job.engine.steps_skipped
        states[precision] = final_state(job.model, job.engine)
    for name, value in states["fp32"].items():
        torch.testing.assert_close(states["fp16"][name].float(), value, rtol=1e-2, atol=5e-3)


@pytest.mark.parametrize("row", ["zero1", "zero3"])
@on_ranks(2)
def test_a_step_without_a_backward_in_fp16_needs_no_scaled_loss(rank: int, row: str) -> None:
    """And a backward after it that adds to what was stepped."""
    job = _job(rank, row, precision="fp16")
    assert job.engine is not None
    weight, bias = job.model.head.weight, job.model.norm.bias
    for parameter in (weight, bias):
        parameter.grad = torch.full_like(parameter, 0.5)
    job.optimizer.step()
    job.backward(0)
    both = job.grad(bias)
    job.optimizer.zero_grad()
    bias.grad = None
    job.optimizer.zero_grad()
    job.backward(0)
    torch.testing.assert_close(both - job.grad(bias), torch.full_like(both, 0.5), atol=2e-2, rtol=0)
    job.engine.close()


# ---------------------------------------------------------------------------- weights


@pytest.mark.parametrize("how", ["weight", "batch_shares"])
@pytest.mark.parametrize("row", ["zero1", "zero3"])
@on_ranks(2)
def test_an_assigned_gradient_counts_as_the_loss_of_its_rank(rank: int, row: str, how: str) -> None:
    """Alike on all ranks, it adds what it is to the gradient, whatever the losses count."""
    shares = [0.25, 0.75] if how == "batch_shares" else None
    job = _job(rank, row, batch_shares=shares)
    assert job.engine is not None
    weight = job.model.blocks[0].up.weight
    grads = []
    for given, late in ((1.0, False), (0.0, False), (2.0, True)):
        if not late:
            weight.grad = torch.full_like(weight, given)
        loss = job.model(*batch(rank, 0))
        job.engine.backward(loss, weight=None if shares else 1 + 2 * rank)
        if late:
            weight.grad = torch.full_like(weight, given)
        grads.append(job.grad(weight))
        job.optimizer.zero_grad()
    torch.testing.assert_close(grads[0] - grads[1], torch.ones_like(weight))
    assert torch.equal(grads[2], torch.full_like(weight, 2.0))
    if shares:
        weight.grad = torch.zeros_like(weight)
        with pytest.raises(StateError, match=r"the gradient assigned to 'blocks\.0\.up\.weight'"):
            job.engine.accumulate([0, 1], lambda step: job.model(*batch(rank, step)))
        job.engine.reset()
    job.engine.close()


# ---------------------------------------------------------------------------- refusals


def _disagreeing(rank: int, world: int, row: str, how: str) -> str:
    job = _job(rank, row)
    engine, weight = job.engine, job.model.head.weight
    assert engine is not None
    job.backward(0)
    if how == "late":
        job.clip(1.0)
    if how == "one rank" and rank:
        weight.grad = torch.zeros_like(weight)
    if how in ("values", "late"):
        weight.grad = torch.full_like(weight, 1.0 + rank)
    try:
        job.step()
        job.backward(1)
        job.step()
    except PlanMismatch as error:
        engine.reset()
        job.backward(0)
        job.step()
        engine.close()
        return str(error)
    return "no error"


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("one rank", "the parameters with a .grad that was assigned by hand differs between ranks"),
        ("values", "the .grad that was assigned to 'head.weight' differs between ranks (rank 0: "),
        ("late", "the .grad that was assigned to 'head.weight' differs between ranks (rank 0: "),
    ],
)
def test_ranks_that_assign_differently_are_told_on_every_rank(
    row: str, how: str, line: str
) -> None:
    for answer in run_ranks(2, _disagreeing, row, how):
        assert line in answer


@pytest.mark.parametrize("row", ["zero1", "zero3"])
def test_a_gradient_assigned_after_a_clip_must_be_finite(row: str) -> None:
    job = _job(0, row)
    job.backward(0)
    job.clip(1.0)
    weight = job.model.head.weight
    weight.grad = torch.full_like(weight, float("nan"))
    with pytest.raises(StateError, match=r"the gradient assigned to 'head\.weight' holds NaN"):
        job.step()


@pytest.mark.parametrize("row", ROWS)
def test_a_step_with_an_assigned_gradient_that_is_not_finite_is_skipped(row: str) -> None:
    job = _job(0, row)
    assert job.engine is not None
    job.backward(0)
    weight = job.model.head.weight
    weight.grad = torch.full_like(weight, float("inf"))
    before = job.engine.full_state_dict()
    job.step()
    assert job.engine.steps_skipped == 1
    after = job.engine.full_state_dict()
    assert all(torch.equal(before[name], value) for name, value in after.items())


def test_zero_grad_is_the_optimizers_own_again_after_close() -> None:
    job = _job(0, "zero1")
    assert job.engine is not None
    job.engine.close()
    assert "zero_grad" not in vars(job.optimizer)
