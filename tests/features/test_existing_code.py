"""Code that people already have works on a sharded model, or fails loudly: never a silent no-op,
a NaN in a file, or a hang.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard as zs
from tests.support.harness import on_ranks
from tests.support.training import (
    ROWS,
    State,
    batch,
    differences,
    equal,
    final_state,
    make_model,
    make_sharded,
    take_steps,
    train,
    two_groups,
    wrapped,
)
from zeroshard.errors import ConfigError, StateError

# ---------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_reading_a_gradient_between_backward_and_step_raises_with_the_remedy(
    rank: int, row: str
) -> None:
    model, optimizer, engine = make_sharded(row)
    pieces = [p for group in optimizer.param_groups for p in group["params"]]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    loss = model(*batch(rank, 0))
    scaler.scale(loss)
    loss.backward()
    remedy = r"the gradient of '\S+' rests sharded .*engine.clip_grad_norm_"
    for parameters in (list(model.parameters()), pieces):
        for read in (
            lambda ps: nn.utils.clip_grad_norm_(ps, 1.0),
            lambda ps: nn.utils.clip_grad_norm_(ps, 1.0, foreach=True),
            lambda ps: nn.utils.clip_grad_value_(ps, 0.1),
            lambda ps: nn.utils.get_total_norm([p.grad for p in ps]),
            lambda ps: ps[0].grad.norm(),
            lambda ps: ps[0].grad + 1,
            lambda ps: ps[0].grad.sum().item(),
            lambda ps: ps[0].grad.clone(),
            lambda ps: ps[0].grad.data.abs(),
            lambda ps: ps[0].grad.tolist(),
            lambda ps: ps[0].grad.numpy(),
            lambda ps: ps[0].grad[0],
            lambda ps: bool((ps[0].grad == 0).all()),
            lambda ps: ps[0].grad.mul_(0.5),
            lambda ps: ps[0].grad.copy_(torch.zeros(ps[0].shape)),
            lambda ps: torch.save(ps[0].grad, io.BytesIO()),
        ):
            with pytest.raises(StateError, match=remedy):
                read(parameters)
    with pytest.raises(StateError, match=remedy):
        scaler.unscale_(optimizer)
    with pytest.raises(StateError, match=remedy):
        scaler.unscale_(torch.optim.SGD(model.parameters(), lr=1.0))
    assert model.head.weight.grad.shape == model.head.weight.shape and "head.weight" in repr(
        model.head.weight.grad
    )
    norm = engine.clip_grad_norm_(0.1)
    assert norm.dtype is torch.float32 and norm.shape == () and norm > 0.1
    optimizer.step()
    # still there after the step, as under torch until zero_grad()
    with pytest.raises(StateError, match=remedy):
        model.head.weight.grad.norm()
    optimizer.zero_grad()
    engine.close()


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_full_grad_equals_ddps_gradient(rank: int, row: str) -> None:
    model, optimizer, engine = make_sharded(row)
    plain = make_model()
    reference = DistributedDataParallel(plain)
    reference(*batch(rank, 0)).backward()
    model(*batch(rank, 0)).backward()
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(engine.full_grad(parameter), other.grad), name
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(engine.clip_grad_norm_(0.1), norm)
    torch.testing.assert_close(engine.full_grad(model.head.weight), plain.head.weight.grad)
    optimizer.step()
    engine.close()


# ------------------------------------------------------------------------------------ the optimizer


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_an_optimizer_attached_after_shard_works_and_one_never_attached_raises(
    rank: int, row: str
) -> None:
    model = make_model()
    engine = zs.shard(model, policy=row)
    model(*batch(rank, 0))
    never = torch.optim.SGD(model.parameters(), lr=0.1)
    model(*batch(rank, 0)).backward()
    with pytest.raises(StateError, match=r"engine.attach\(\)"):
        never.step()
    model.zero_grad()
    optimizer = two_groups(model)
    engine.attach(optimizer)
    with pytest.raises(ConfigError, match="attached already"):
        engine.attach(never)
    take_steps(rank, 3, model, optimizer)
    assert equal(engine.full_state_dict(rank0_only=False), train(rank, "torch-ddp", 3).state), row
    engine.close()


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_param_groups_changed_after_shard_are_refused_at_the_step(rank: int, row: str) -> None:
    model, optimizer, engine = make_sharded(row)
    names = [id(group) for group in optimizer.param_groups]
    extra = nn.Parameter(torch.zeros(3))
    optimizer.add_param_group({"params": [extra]})
    model(*batch(rank, 0)).backward()
    with pytest.raises(StateError, match=r"add_param_group\(\)"):
        optimizer.step()
    optimizer.param_groups.pop()
    assert [id(group) for group in optimizer.param_groups] == names
    taken = optimizer.param_groups[0]["params"].pop()
    with pytest.raises(StateError, match="param group 0 no longer holds the pieces"):
        optimizer.step()
    optimizer.param_groups[0]["params"].append(taken)
    optimizer.step()
    engine.close()


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_step_with_a_closure_finishes_the_gradients_after_the_closure(rank: int, row: str) -> None:
    expected = train(rank, "torch-ddp", 4).state
    model, optimizer, engine = make_sharded(row)
    for step in range(4):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(*batch(rank, step))
            loss.backward()
            return loss

        loss = optimizer.step(closure) if step % 2 else optimizer.step(closure=closure)
        assert loss.isfinite()
    assert equal(engine.full_state_dict(rank0_only=False), expected), row
    engine.close()


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_schedulers_made_before_and_after_shard_and_edited_options_act(rank: int, row: str) -> None:
    states = []
    for kind in ("torch-ddp", row):
        inner = module = make_model()
        optimizer = two_groups(inner)
        before = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        engine = None
        if kind == "torch-ddp":
            module = DistributedDataParallel(inner)
        else:
            engine = zs.shard(inner, optimizer, policy=row)
        after = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        for step in range(4):
            take_steps(rank, [step], module, optimizer)
            before.step()
            after.step()
            optimizer.param_groups[1]["weight_decay"] = 0.01 * step
        states.append(engine.full_state_dict(rank0_only=False) if engine else inner.state_dict())
        if engine:
            engine.close()
    assert equal(*states), row


# -------------------------------------------------------------------------------- the module itself


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_a_sharded_model_is_not_converted_or_moved(rank: int, row: str) -> None:
    model, optimizer, engine = make_sharded(row)
    model.register_buffer("scale", torch.ones(3))
    for change in (
        lambda: model.half(),
        lambda: model.to(torch.bfloat16),
        lambda: model.double(),
        lambda: model.to("meta"),
        lambda: model.to_empty(device="cpu"),
        lambda: model.blocks[1].half(),
        lambda: model.head.to(torch.float64),
        lambda: nn.Sequential(model).half(),
    ):
        with pytest.raises(
            StateError,
            match=(
                r"parameter '\S+' is sharded: its dtype, device and memory format cannot be changed"
            ),
        ):
            change()
    for same in (
        lambda: model.to("cpu"),
        lambda: model.cpu(),
        lambda: model.float(),
        lambda: model.to(torch.float32),
        lambda: model.train(),
    ):
        assert same() is model
    take_steps(rank, 1, model, optimizer)
    engine.close()
    assert model.half().head.weight.dtype is torch.float16


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_a_sharded_model_is_not_copied_or_pickled(rank: int, row: str) -> None:
    model, optimizer, engine = make_sharded(row)
    for copier in (
        lambda: copy.deepcopy(model),
        lambda: copy.deepcopy(model.blocks),
        lambda: copy.deepcopy([model.head]),
        lambda: pickle.dumps(model),
        lambda: pickle.dumps(nn.Sequential(model)),
        lambda: torch.save(model, io.BytesIO()),
    ):
        with pytest.raises(
            StateError,
            match=r"is sharded and cannot be copied or pickled: .*engine.full_state_dict\(\)",
        ):
            copier()
    take_steps(rank, 1, model, optimizer)
    engine.close()
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert equal(again.state_dict(), model.state_dict())
    assert not any(
        key.startswith(("__", "_apply", "_zeroshard"))
        for module in model.modules()
        for key in vars(module)
    )


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_close_gives_back_a_plain_module_and_optimizer_that_train_and_may_be_sharded_again(
    rank: int, row: str
) -> None:
    expected = train(rank, row, 3).state
    model, optimizer, engine = make_sharded(row)
    parameters = list(model.parameters())
    hooks = [
        len(module._forward_hooks) + len(module._forward_pre_hooks)
        for module in make_model().modules()
    ]
    take_steps(rank, 3, model, optimizer)
    model(*batch(rank, 0)).backward()
    engine.close()
    engine.close()
    assert equal(model.state_dict(), expected)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert [p for group in optimizer.param_groups for p in group["params"]] == [
        p for p in parameters if p.ndim > 1
    ] + [p for p in parameters if p.ndim <= 1]
    assert [
        len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()
    ] == hooks
    assert all(p.grad is None and not p._backward_hooks for p in parameters)
    with pytest.raises(StateError, match="this engine is closed"):
        engine.full_state_dict()
    plain, theirs = make_model(), None
    plain.load_state_dict(expected)
    theirs = two_groups(plain)
    for step in range(3):
        for module, each in ((model, optimizer), (plain, theirs)):
            module(*batch(rank, step)).backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            each.step()
            each.zero_grad()
    assert equal(model.state_dict(), plain.state_dict()), row
    model.load_state_dict(expected)
    with zs.shard(model, optimizer, policy=row).gathered():  # and may be sharded again
        assert equal(dict(model.state_dict()), expected)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x)).square().mean()


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_ranks_that_start_differently_are_told_or_take_one_ranks_weights_and_buffers(
    rank: int, row: str
) -> None:
    torch.manual_seed(rank)
    model = Normed()
    model.norm.running_mean.fill_(rank + 1.0)
    with pytest.raises(zs.PlanMismatch, match=r"initial value of first\.weight"):
        zs.shard(model, policy=row)
    torch.manual_seed(1)
    expected = Normed().state_dict()
    engine = zs.shard(model, two_groups(model), policy=row, sync_from=1)
    state = engine.full_state_dict(rank0_only=False)
    assert torch.equal(state["first.weight"], expected["first.weight"])
    assert torch.equal(state["norm.running_mean"], torch.full((5,), 2.0))
    engine.close()


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(11, 13), nn.Tanh(), nn.Linear(13, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).mean()


@pytest.mark.parametrize("row", ROWS)
@on_ranks(2)
def test_two_engines_train_against_each_other_as_under_ddp(rank: int, row: str) -> None:
    """Two engines in one process: one model's loss runs through the other."""
    states = []
    for kind in ("torch-ddp", row):
        torch.manual_seed(0)
        maker, critic = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 11)), Critic()
        modules: list[Any] = [maker, critic]
        optimizers = [torch.optim.Adam(module.parameters(), lr=1e-2) for module in modules]
        engines = []
        if kind == "torch-ddp":
            modules = [DistributedDataParallel(module) for module in modules]
        else:
            engines = [
                zs.shard(module, each, policy=row)
                for module, each in zip(modules, optimizers, strict=True)
            ]
        for step in range(4):
            noise = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))
            real = torch.randn(5, 11, generator=torch.Generator().manual_seed(10 * step + rank + 5))
            (modules[1](modules[0](noise).detach()) - modules[1](real)).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            (-modules[1](modules[0](noise))).backward()
            optimizers[0].step()
            for each in optimizers:
                each.zero_grad()
        states.append(
            [engine.full_state_dict(rank0_only=False) for engine in engines]
            or [maker.state_dict(), critic.state_dict()]
        )
        for engine in engines:
            engine.close()
    assert all(equal(a, b) for a, b in zip(*states, strict=True)), row


# ---------------------------------------------------------------------------- momentum encoders


class _Encoder(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


class _MoCo(nn.Module):
    """Momentum contrast as published: an encoder of keys that follows that of queries, a queue of
    keys, and batches that are shuffled over the ranks for the norms.
    """

    def __init__(self, writes: str) -> None:
        super().__init__()
        self.writes = writes
        self.encoder_q, self.encoder_k = _Encoder(), _Encoder()
        for query, key in self._pairs():
            key.data.copy_(query.data)
            key.requires_grad = False
        self.register_buffer("queue", nn.functional.normalize(torch.randn(4, 32), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def _pairs(self) -> Any:
        return zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True)

    @torch.no_grad()
    def _follow(self) -> None:
        for query, key in self._pairs():
            if self.writes == "data":
                key.data = key.data * 0.9 + query.data * 0.1
            elif self.writes == "in place":
                key.mul_(0.9).add_(query, alpha=0.1)
            else:
                key.copy_(key * 0.9 + query * 0.1)

    def forward(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        q = nn.functional.normalize(self.encoder_q(queries))
        with torch.no_grad():
            self._follow()
            order = torch.randperm(len(keys) * dist.get_world_size())
            dist.broadcast(order, src=0)
            mine = order.view(dist.get_world_size(), -1)[dist.get_rank()]
            k = _of_all(nn.functional.normalize(self.encoder_k(_of_all(keys)[mine])))
            k = k[torch.argsort(order)]
            own = k.view(dist.get_world_size(), -1, 4)[dist.get_rank()]
        scores = [(q * own).sum(1, keepdim=True), q @ self.queue.clone()]
        at = int(self.place)
        self.queue[:, at : at + len(k)] = k.T
        self.place[0] = (at + len(k)) % self.queue.size(1)
        target = torch.zeros(len(q), dtype=torch.long)
        return nn.functional.cross_entropy(torch.cat(scores, dim=1) / 0.07, target)


def _of_all(tensor: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor)
    return torch.cat(parts)


def _contrasted(rank: int, kind: str, writes: str, *, loads: bool) -> State:
    torch.manual_seed(0)
    model = _MoCo(writes)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    module, engine = wrapped(model, optimizer, kind)
    torch.manual_seed(5 + rank)
    for step in range(4):
        if loads and step == 2:  # what is read again after a write is read before the next
            context = engine.gathered(writeback=True) if engine else contextlib.nullcontext()
            with context, torch.no_grad():
                model.encoder_k[0].weight.mul_(0.5)
        module(torch.randn(4, 8), torch.randn(4, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return final_state(model, engine)


@pytest.mark.parametrize("writes", ["data", "in place", "copy"])
@on_ranks(2)
def test_a_model_may_write_alike_to_frozen_weights_that_every_rank_keeps_whole(
    rank: int, writes: str
) -> None:
    loads = writes == "data"
    reference = _contrasted(rank, "torch-ddp", writes, loads=loads)
    found = [
        f"{row}: {line}"
        for row in ("ddp", "zero1", "zero2")
        for line in differences(_contrasted(rank, row, writes, loads=loads), reference)
        if "running_" not in line  # statistics of this rank's batches
    ]
    assert found == []


@pytest.mark.parametrize("writes", ["data", "in place"])
@on_ranks(2)
def test_a_model_that_writes_to_its_sharded_weights_is_told(rank: int, writes: str) -> None:
    with pytest.raises(StateError, match=r"'encoder_k\.0\.weight' was written to while it was"):
        _contrasted(rank, "zero3", writes, loads=False)
