"""Uneven numbers of batches: ``engine.join()`` against torch's Join over DDP, and what it
refuses.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

import zeroshard as zs
from tests.support.covering import by_pairs
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import (
    ROWS,
    TRANSPORTS,
    Net,
    State,
    batch,
    differences,
    final_state,
    make_model,
    make_sharded,
    take_steps,
    two_groups,
    wrapped,
)
from zeroshard import ConfigError, PlanMismatch


def _train(
    rank: int,
    kind: str,
    transport: str,
    steps: list[int],
    *,
    micro_batches: int = 1,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Train for ``steps[rank]`` steps on this rank's own data, with clipping (ours) and a
    schedule.
    """
    model = make_model()
    optimizer = two_groups(model)
    comm = zs.Comm.model_validate({"transport": transport})
    module, engine = wrapped(model, optimizer, kind, comm=comm, **options)
    joined: contextlib.AbstractContextManager[Any] = engine.join() if engine else Join([module])
    clip = 0.1 if engine and options.get("precision") == "bf16" else None
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    with joined:
        for step in range(steps[rank]):
            take_steps(
                rank,
                [step],
                module,
                optimizer,
                engine,
                micro_batches=micro_batches,
                no_sync=True,
                clip=clip,
            )
            schedule.step()
    if engine is not None:
        model(*batch(rank, 0)).backward()  # everybody goes on together
        optimizer.zero_grad()
    return final_state(model, engine)


UNEVEN = {"2, 5": [2, 5], "4, 0": [4, 0]}


@by_pairs({"steps": tuple(UNEVEN), "row": ROWS, "transport": TRANSPORTS}, slow_by="transport")
@on_ranks(2)
def test_uneven_batches_end_with_the_weights_of_ddp_and_its_join(
    rank: int, cases: list[dict[str, str]]
) -> None:
    expected = {name: _train(rank, "torch-ddp", "auto", UNEVEN[name]) for name in UNEVEN}
    for case in cases:
        name, row, transport = case.values()
        ours = _train(rank, row, transport, UNEVEN[name])
        assert not (found := differences(ours, expected[name], row, "torch-ddp")), (case, found)


@pytest.mark.parametrize("transport", TRANSPORTS)
@on_ranks(2)
def test_averages_follow_the_steps_that_a_rank_without_data_shadows(
    rank: int, world: int, transport: str
) -> None:
    """Compare the averages of a loop of uneven lengths with a plain loop over all batches."""
    steps = [5, 2]
    decays, plain = (0.5, 0.9), make_model()
    expected = [{k: p.detach().clone() for k, p in plain.named_parameters()} for _ in decays]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(max(steps)):
        for other in (one for one in range(world) if step < steps[one]):
            (plain(*batch(other, step)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        for average, decay in zip(expected, decays, strict=True):
            for name, parameter in plain.named_parameters():
                average[name].lerp_(parameter.detach(), 1 - decay)
    comm = zs.Comm.model_validate({"transport": transport})
    for row in ROWS:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = zs.shard(model, optimizer, policy=row, comm=comm)
        zs.EMA(engine, 0.1)  # is dropped at once, perhaps later on another rank
        averages = [zs.EMA(engine, decay) for decay in decays]
        with engine.join():
            for step in range(steps[rank]):
                take_steps(rank, [step], model, optimizer)
                for ema in averages:
                    ema.update()
        for ema, average in zip(averages, expected, strict=True):
            with ema.swapped():
                ours = engine.full_state_dict(rank0_only=False)
            for name, value in average.items():
                torch.testing.assert_close(ours[name], value, msg=f"{row}, {name}")
        engine.close()


class _Turned(Net):
    """A net that runs its blocks in another order than that in which they are defined."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        assert y is not None
        h = self.embed(x)
        for block in reversed(self.blocks):
            h = block(h)
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


def _read(engine: zs.Engine, model: nn.Module) -> None:
    engine.full_state_dict()


def _edit(engine: zs.Engine, model: nn.Module) -> None:
    with engine.gathered(model.get_parameter("blocks.2.up.weight"), writeback=True):
        pass


def _load(engine: zs.Engine, model: nn.Module) -> None:
    model.load_state_dict(engine.full_state_dict(rank0_only=False))


def _evaluate_in_gathered(engine: zs.Engine, model: nn.Module) -> None:
    with engine.gathered(), torch.no_grad():
        model(*batch(0, 9))


def _reset(engine: zs.Engine, model: nn.Module) -> None:
    engine.reset()


def _reset_and_load(engine: zs.Engine, model: nn.Module) -> None:
    engine.reset()
    _load(engine, model)


def _reset_while_offloaded(engine: zs.Engine, model: nn.Module) -> None:
    engine.offload_states()
    engine.reset()
    engine.reload_states()


def _without_a_batch(
    rank: int, world: int, transport: str, others: list[Any], codec: str | None = None
) -> None:
    """Let odd ranks have no batch of a step after each of `others`; None: in the first step."""
    for row in ("zero3", "zero3-keep") if world == 2 else ("hpz", "mics"):
        found = []
        for other in (*others, lambda engine, model: None):
            torch.manual_seed(0)
            options = {"transport": transport, "node_size": 2, "weight_codec": codec}
            comm = zs.Comm.model_validate(options)
            model, optimizer, engine = make_sharded(row, model=_Turned(), comm=comm)
            take_steps(rank, [] if None in others else 1, model, optimizer)
            with engine.join():
                if other is not None:
                    other(engine, model)
                take_steps(rank, [[1, 2], []][rank % 2], model, optimizer, engine, clip=1.0)
            take_steps(rank, [3], model, optimizer)
            found.append(final_state(model, engine))
        for state, after in zip(found, others, strict=False):
            assert not (lines := differences(state, found[-1])), (row, after, lines)


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
@pytest.mark.parametrize(
    "others",
    [[_read, _edit, _load], [_evaluate_in_gathered, _reset], [None]],
    ids=["reads", "passes", "first step"],
)
def test_a_rank_without_a_batch_gathers_what_the_others_do_whatever_came_before(
    others: list[Any], transport: str
) -> None:
    run_ranks(2, _without_a_batch, transport, others)


def test_encoded_weights_that_were_read_as_they_rest_are_gathered_anew_in_the_others_order() -> (
    None
):
    run_ranks(2, _without_a_batch, "gloo", [_evaluate_in_gathered, _edit, _read], "int8")


def test_ranks_of_two_nodes_without_a_batch_are_told_what_a_first_pass_gathers() -> None:
    run_ranks(4, _without_a_batch, "gloo", [None])


class _Skipping(_Turned):
    """A net that leaves out its first block where `skips`."""

    skips = False

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        first, self.blocks[0] = self.blocks[0], nn.Identity() if self.skips else self.blocks[0]
        try:
            return super().forward(x, y)
        finally:
            self.blocks[0] = first


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero2"])
@on_ranks(2)
def test_weights_that_rest_whole_are_not_gathered_in_a_step_whatever_came_before(
    rank: int, row: str
) -> None:
    """Use fewer weights than the rank without data has, right after they were brought together."""
    found = []

    def lay_out_anew(engine: zs.Engine, model: nn.Module) -> None:
        engine.repartition(policy="zero3")
        engine.repartition(policy=row)

    others = (_reset, _load, _reset_and_load, _reset_while_offloaded, lay_out_anew)
    for other in (*others, lambda engine, model: None):
        torch.manual_seed(0)
        model, optimizer, engine = make_sharded(row, "gloo", model=_Skipping(), stall_timeout_s=20)
        take_steps(rank, 1, model, optimizer)
        other(engine, model)
        for step in (1, 2):
            model.skips = step == 1
            with engine.join():
                take_steps(rank, [[step], []][rank], model, optimizer, engine, clip=1.0)
        take_steps(rank, [3], model, optimizer)
        found.append(final_state(model, engine))
    seen = [line for state in found for line in differences(state, found[-1])]
    assert seen == []


Way = bool | None  # set_to_none of zero_grad(); None: gradients are kept, and the next are added


def _cleared(
    rank: int, row: str, transport: str, ways: list[Way], when: str, *, joins: bool
) -> dict[str, torch.Tensor]:
    """Train five steps of two micro-batches, of which rank 1 has data for one alone, and one more
    after them; gradients are cleared in `ways`, in turn. Where none `joins`, the losses of rank 1
    count nothing where it has no data.
    """
    model, optimizer, engine = make_sharded(row, transport, stall_timeout_s=20)

    def take(step: int) -> None:
        def clear(now: str) -> None:
            if now == when and (way := ways[step % len(ways)]) is not None:
                (model if step == 2 else optimizer).zero_grad(set_to_none=way)

        clear("first")
        for micro in range(2):
            with engine.no_sync() if micro == step % 2 else contextlib.nullcontext():
                loss = model(*batch(rank, 2 * step + micro))
                if micro == 1:
                    clear("between")
                (0 * loss if rank and 1 <= step < 5 else loss).backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        clear("last")

    with engine.join() if joins else contextlib.nullcontext():
        for step in range(1 if rank and joins else 5):
            take(step)
    take(5)
    return final_state(model, engine)


@pytest.mark.parametrize(
    ("when", "transport"), [("first", "gloo"), ("between", "shared_memory"), ("last", "gloo")]
)
@pytest.mark.parametrize("ways", [[False], [True, True, False, None]], ids=["zeros", "in turn"])
@on_ranks(2)
def test_a_rank_without_data_clears_its_gradients_when_and_as_the_others_do(
    rank: int, ways: list[Way], when: str, transport: str
) -> None:
    found = []
    for row in ROWS:
        ours, plain = (
            _cleared(rank, row, transport, ways, when, joins=joins) for joins in (True, False)
        )
        found += [f"{row}: {line}" for line in differences(ours, plain)]
    assert found == []


@pytest.mark.parametrize(
    "transport", ["shared_memory", pytest.param("gloo", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16"}, {"precision": "fp16", "micro_batches": 2}],
    ids=["bf16 clipped", "fp16 accumulated"],
)
@on_ranks(4)
def test_four_ranks_that_end_one_after_another_agree_in_every_row(
    rank: int, options: dict[str, Any], transport: str
) -> None:
    first = _train(rank, "zero2", transport, [1, 4, 2, 3], **options)
    for row in ("zero3", "zero3-keep"):
        ours = _train(rank, row, transport, [1, 4, 2, 3], **options)
        assert not (found := differences(ours, first, row, "zero2")), found


HELD: dict[str, tuple[tuple[int | None, ...], dict[str, str]]] = {
    "plain": ((None,), {}),
    "weighted": ((3,), {}),
    "two weights": ((3, 5), {}),
    "two weights, host": ((3, 5), {"grad": "host", "optimizer": "host"}),
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"precision": "fp16", "loss_scale": {"initial": 256.0}},
}


@by_pairs(
    {
        "held": tuple(HELD),
        "row": ("zero2", "ddp", "zero1", "zero3"),
        "precision": tuple(PRECISIONS),
    },
    slow_by="precision",
)
@on_ranks(2, timeout=120)
def test_gradients_held_back_for_the_step_are_divided_alike_where_none_have_come(
    rank: int, cases: list[dict[str, str]]
) -> None:
    """Rank 0 alone has data, and its gradients wait for the step: nothing has come on rank 1, which
    with weights is as if it had the data, of which none counts there.
    """

    def trained(held: str, row: str, precision: str, *, joins: bool = True) -> State:
        weights, offload = HELD[held]
        options = {"offload": offload} if joins and offload else {}
        model, optimizer, engine = make_sharded(row, **PRECISIONS[precision], **options)
        with engine.join() if joins else contextlib.nullcontext():
            for step in range(0 if rank and joins else 2):
                for micro, weight in enumerate(weights):
                    with engine.no_sync():
                        loss = model(*batch(rank, 2 * step + micro))
                        engine.backward(loss, weight=0 if rank and not joins else weight)
                optimizer.step()
                optimizer.zero_grad()
        assert engine.steps_skipped == 0
        return final_state(model, engine)

    @functools.cache
    def expected(held: str, row: str, precision: str) -> State:
        return trained(held, row, precision, joins=None in HELD[held][0])

    for case in cases:
        held, row, precision = case.values()
        ours = trained(held, row, precision)
        # rows that hold whole gradients, and those that hold a part, add micro-batches alike
        alike = "ddp" if row in ("ddp", "zero1") and held != "plain" else "zero2"
        found = differences(ours, expected(held, alike, precision), row)
        assert not found, (case, found)


@on_ranks(2)
def test_ranks_with_data_that_do_different_things_are_told(rank: int) -> None:
    model = make_model()
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, stage=3)
    with (
        pytest.raises(
            PlanMismatch,
            match=(
                r"ranks with data must do the same in the same order; rank 0: backward; rank 1:"
                r" forward"
            ),
        ),
        engine.join(),
    ):
        loss = model(*batch(rank, 0))
        loss = model(*batch(rank, 1)) if rank == 1 else loss
        loss.backward()
    engine.reset()
    take_steps(rank, 2, model, optimizer)
    engine.close()


def test_join_needs_an_optimizer() -> None:
    engine = zs.shard(make_model())
    with pytest.raises(ConfigError, match=r"join\(\) needs an optimizer"), engine.join():
        pass
    engine.close()
