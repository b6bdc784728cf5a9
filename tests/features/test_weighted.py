"""Micro-batches of unequal size: ``engine.backward(loss, weight=n)`` and ``batch_shares``.

The gradient of the concatenated batch, in the order that docs/design/exactness.md defines,
which the reference here forms by hand: it computes the gradients of all ranks in each.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zeroshard as zs
from tests.support.harness import on_ranks, run_ranks
from tests.support.sums import sum_of_micro_batches
from tests.support.training import (
    ROWS,
    VOCABULARY,
    State,
    differences,
    final_state,
    make_model,
    make_sharded,
    two_groups,
)

STEPS = 2
# samples of each rank in each micro-batch of a step; none: the mean over nothing is NaN
SIZES = [[3, 1], [2, 0], [5, 4]]
FULL = [[1, 1], [2, 2], [4, 4]]
SHARES = {2: [0.3, 0.7], 3: [0.1, 0.3, 0.6]}


def _batch(rank: int, step: int, micro: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    tokens = torch.randint(0, VOCABULARY, (size, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def _gradients(
    model: nn.Module, step: int, micro: int, sizes: Sequence[int], factors: Sequence[float]
) -> list[list[torch.Tensor]]:
    """Return each rank's gradients of its loss times its factor, zeros where that is 0."""
    out = []
    for rank, (size, factor) in enumerate(zip(sizes, factors, strict=True)):
        loss = model(*_batch(rank, step, micro, size))
        assert math.isnan(loss) == (size == 0)
        grads = torch.autograd.grad(loss * factor, list(model.parameters()))
        out.append([grad if factor else torch.zeros_like(grad) for grad in grads])
    return out


def _by_hand(world: int, *, shares: Sequence[float] = (), micro_batches_first: bool) -> State:
    """Train with the defined order of sums; weights are samples, or `shares` where given."""
    model = make_model()
    optimizer = two_groups(model)
    sizes = list(zip(*(FULL if shares else SIZES)[:world], strict=True))  # by micro-batch
    for step in range(STEPS):
        micros = [_gradients(model, step, m, sizes[m], shares or sizes[m]) for m in range(2)]
        for index, parameter in enumerate(model.parameters()):
            of = [[micros[m][rank][index] for rank in range(world)] for m in range(2)]
            total = sum_of_micro_batches(of, micro_batches_first=micro_batches_first)
            weight = 1 if shares else sum(map(sum, SIZES[:world]))
            parameter.grad = total / weight
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def _train(
    rank: int,
    row: str,
    *,
    no_sync: bool,
    weighted: bool,
    clip: float | None = None,
    set_to_none: bool = True,
    accumulates: bool = False,
    discards: bool = False,
    **options: Any,
) -> State:
    """Train in a row, each loss by its samples, or (not `weighted`) by the share of its rank;
    `discards`: before each step gradients that are cleared, which `no_sync` holds back.
    """
    model, optimizer, engine = make_sharded(row, **options)
    for step in range(STEPS):
        for number in (step + STEPS, step) if discards else (step,):
            sizes = (SIZES if weighted else FULL)[rank]
            batches = [_batch(rank, number, micro, size) for micro, size in enumerate(sizes)]
            if accumulates:
                engine.accumulate(batches, lambda one: (model(*one), len(one[0])))
            for micro, one in enumerate(() if accumulates else batches):
                held = no_sync and (number != step or not micro)
                with engine.no_sync() if held else contextlib.nullcontext():
                    loss = model(*one)
                    weight = len(one[0]) if step else torch.tensor(len(one[0]))
                    engine.backward(loss, weight=weight if weighted else None)
            if number != step:
                optimizer.zero_grad(set_to_none=set_to_none)
        if clip is not None:
            engine.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    assert engine.steps_skipped == 0
    return final_state(model, engine)


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@on_ranks(timeout=100)
def test_weighted_losses_give_the_bits_of_the_defined_order_in_every_row(
    rank: int, world: int
) -> None:
    ranks_first = _by_hand(world, micro_batches_first=False)
    micro_batches_first = _by_hand(world, micro_batches_first=True)
    assert differences(ranks_first, micro_batches_first), "two orders that cannot be told apart"
    out = {}
    for row in ROWS:
        for way in (True, False):
            run = _train(rank, row, no_sync=False, weighted=True, set_to_none=way)
            out[f"{row}, zero_grad(set_to_none={way})"] = differences(run, ranks_first)
    for row, held in (("ddp", micro_batches_first), ("zero3", ranks_first)):
        out[f"{row} no_sync"] = differences(_train(rank, row, no_sync=True, weighted=True), held)
    assert not any(out.values()), out


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow)])
@on_ranks(timeout=100)
def test_a_loss_under_batch_shares_counts_its_share_in_every_row(rank: int, world: int) -> None:
    expected = _by_hand(world, shares=SHARES[world], micro_batches_first=False)
    options = {"no_sync": False, "weighted": False, "batch_shares": SHARES[world]}
    found = {row: differences(_train(rank, row, **options), expected) for row in ROWS}
    assert not any(found.values()), found


@pytest.mark.parametrize(
    ("row", "options", "tolerance"),
    [
        ("zero3", {}, 2e-6),
        ("ddp", {}, 2e-6),
        ("zero2", {"offload": {"grad": "host", "optimizer": "host"}}, 2e-6),
        ("zero3", {"precision": "bf16"}, 0.05),
        ("zero1", {"precision": "fp16", "loss_scale": {"initial": 256.0}}, 0.02),
    ],
    ids=["zero3", "ddp", "host", "bf16", "fp16"],
)
@on_ranks(2)
def test_the_gradient_is_that_of_the_concatenated_batch(
    rank: int, world: int, row: str, options: dict[str, Any], tolerance: float
) -> None:
    """See how far gradients and norm are from those of one batch of all samples."""
    plain = make_model()
    everything = [
        _batch(r, 0, m, SIZES[r][m]) for m in range(2) for r in range(world) if SIZES[r][m]
    ]
    plain(*(torch.cat(parts) for parts in zip(*everything, strict=True))).backward()
    norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
    model, _, engine = make_sharded(row, **options)
    for micro in range(2):
        loss = model(*_batch(rank, 0, micro, SIZES[rank][micro]))
        engine.backward(loss, weight=8 * SIZES[rank][micro])
    out = {"norm": float(engine.clip_grad_norm_(0.1) / norm - 1)}
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        ours = engine.full_grad(parameter)
        assert ours is not None and other.grad is not None
        expected = other.grad * (0.1 / norm)
        out[name] = float((ours - expected).abs().max() / expected.abs().max())
    engine.close()
    assert all(abs(distance) < tolerance for distance in out.values()), out


FP16: dict[str, Any] = {"precision": "fp16", "loss_scale": {"initial": 256.0}}
HOST = {"grad": "host", "optimizer": "host"}
LATE = {**HOST, "delayed_update": 1}
PAIRS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "clipped": ("zero3", {}, "ddp", {}),
    "host": ("zero2", {"offload": HOST}, "zero2", {}),
    "a part on the host": ("zero3", {"offload": {**HOST, "fraction": 0.5}}, "zero3", {}),
    "verified": ("zero1", {"verify_every": 1}, "zero3", {}),
    "bf16": ("zero3", {"precision": "bf16"}, "ddp", {"precision": "bf16"}),
    "fp16": ("zero2", FP16, "zero3", FP16),
    "a step late": ("zero2", {"offload": LATE}, "zero3", {"offload": LATE}),
    "shares of states": ("zero3", {"shares": [0.2, 0.8]}, "ddp", {}),
    "nodes": ("mics", {"comm": zs.Comm(node_size=1)}, "zero3", {}),
}


@on_ranks(2, timeout=100)
def test_clips_tiers_and_precisions_keep_the_bits_of_weighted_losses(rank: int) -> None:
    names = list(PAIRS)
    out = {}
    for name in names:
        row, options, other, others = PAIRS[name]
        ours = _train(rank, row, no_sync=False, weighted=True, clip=0.1, **options)
        theirs = _train(rank, other, no_sync=False, weighted=True, clip=0.1, **others)
        out[name] = differences(ours, theirs, row, other)
    assert not any(out.values()), out


DISCARDED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "no_sync": ("ddp", {"no_sync": True}, {}),
    "no_sync, host": ("zero1", {"no_sync": True}, {"offload": HOST}),
    "no_sync, a part on the host": (
        "zero3",
        {"no_sync": True, "clip": 0.1},
        {"offload": {**HOST, "fraction": 0.5}},
    ),
    "accumulate": ("zero3", {"accumulates": True}, {}),
    "accumulate, host": ("zero2", {"accumulates": True, "clip": 0.1}, {"offload": HOST}),
    "a step late": ("zero2", {}, {"offload": LATE}),
}


@on_ranks(2, timeout=60)
def test_weights_of_gradients_that_are_set_to_zero_are_forgotten_however_they_were_added(
    rank: int,
) -> None:
    """Compare runs whose gradients are set to zero, those of a step and of losses that are
    discarded, with runs on the device that have no such losses and no gradients between steps.
    """
    out = {}
    for name, (row, how, options) in DISCARDED.items():
        how = {"no_sync": False, "weighted": True, **how}
        late = options if "late" in name else {}
        ours = _train(rank, row, discards=True, set_to_none=False, **how, **options)
        out[name] = differences(ours, _train(rank, row, **how, **late))
    assert not any(out.values()), out


@on_ranks(2)
def test_equal_weights_of_a_power_of_two_and_equal_shares_change_no_bit(rank: int) -> None:
    """Train without weights, with equal ones of 4, and with equal shares."""
    states = {}
    for name, weight, shares in (
        ("plain", None, None),
        ("weights", 4, None),
        ("shares", None, [0.5, 0.5]),
    ):
        model, optimizer, engine = make_sharded("zero2", batch_shares=shares)
        for step in range(STEPS):
            engine.backward(model(*_batch(rank, step, 0, 3)), weight=weight)
            engine.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
        states[name] = final_state(model, engine)
    found = {name: differences(state, states["plain"], name) for name, state in states.items()}
    assert not any(found.values()), found


@pytest.mark.parametrize(("row", "offload"), [("ddp", {}), ("zero2", HOST)], ids=["ddp", "host"])
@on_ranks(2)
def test_more_weighted_losses_are_added_to_an_average(
    rank: int, row: str, offload: dict[str, str]
) -> None:
    """Look at the gradient between two weighted backwards: the sum goes on as if it had not been
    averaged, to fp32 tolerance.
    """
    grads = []
    for looks in (True, False):
        model, _, engine = make_sharded(row, offload=offload or None)
        for micro, weight in enumerate((3, 4 - rank)):
            engine.backward(model(*_batch(rank, 0, micro, 2)), weight=weight)
            if looks:
                engine.full_grad(model.head.weight)
                engine.clip_grad_norm_(1e9)
        grads.append([engine.full_grad(parameter) for parameter in model.parameters()])
        engine.close()
    found = [
        f"{float((a - b).abs().max())}"
        for a, b in zip(*grads, strict=True)
        if not torch.allclose(a, b, rtol=1e-5, atol=1e-7)
    ]
    assert found == []


@pytest.mark.parametrize("row", ["ddp", "zero1", "zero3"])
@on_ranks(2)
def test_weights_of_gradients_that_are_zeroed_in_part_divide_the_others(
    rank: int, row: str
) -> None:
    """Set the head's gradient to zero between two weighted backwards: the weights of both divide
    what the others keep. Compare with sums by hand.
    """
    model, _, engine = make_sharded(row)
    plain = make_model()
    sums = [torch.zeros_like(parameter) for parameter in plain.parameters()]
    for micro, weights in enumerate(((3, 3), (4, 1))):
        engine.backward(model(*_batch(rank, 0, micro, 2)), weight=weights[rank])
        of = _gradients(plain, 0, micro, (2, 2), weights)
        for (name, _), total, *grads in zip(plain.named_parameters(), sums, *of, strict=True):
            if micro and name.startswith("head"):
                total.zero_()
            total += sum(grads)
        if not micro:
            model.head.zero_grad(set_to_none=False)
    found = [engine.full_grad(parameter) for parameter in model.parameters()]
    engine.close()
    seen = [
        name
        for (name, _), grad, total in zip(plain.named_parameters(), found, sums, strict=True)
        if not torch.allclose(grad, total / 11, rtol=1e-5, atol=1e-7)
    ]
    assert seen == []


@on_ranks(2)
def test_a_weighted_gradient_that_overflows_skips_the_step_unless_it_counts_nothing(
    rank: int,
) -> None:
    """A gradient of one rank overflows: every rank skips the step. With the weight 0 it counts
    nothing.
    """
    model, optimizer, engine = make_sharded("zero3", precision="fp16")
    before = engine.full_state_dict(rank0_only=False)
    for weight, skipped in ((3, 1), (0, 1)):
        loss = model(*_batch(rank, 0, 0, 2)) * (float("inf") if rank else 1.0)
        engine.backward(loss, weight=weight if rank else 5)
        optimizer.step()
        optimizer.zero_grad()
        assert engine.steps_skipped == skipped
        changed = differences(engine.full_state_dict(rank0_only=False), before)
        assert bool(changed) == (weight == 0)
    engine.close()


@on_ranks(2)
def test_join_averages_weighted_losses_over_the_batches_that_there_are(rank: int) -> None:
    """Rank 0 has one batch, rank 1 two: the second step is rank 1's own gradient."""
    model, optimizer, engine = make_sharded("zero2")
    with engine.join():
        for step in range(1 + rank):
            engine.backward(model(*_batch(rank, step, 0, 2)), weight=2)
            optimizer.step()
            optimizer.zero_grad()
    plain = make_model()
    other = two_groups(plain)
    for step in range(2):
        parts = [_batch(r, step, 0, 2) for r in range(step, 2)]
        plain(*(torch.cat(part) for part in zip(*parts, strict=True))).backward()
        other.step()
        other.zero_grad()
    ours = final_state(model, engine)
    found = [
        name
        for name, value in plain.state_dict().items()
        if not torch.allclose(ours[name], value, rtol=1e-3, atol=1e-4)
    ]
    assert found == []


MISTAKES: dict[str, tuple[Any, str]] = {
    "one rank": (
        lambda rank, micro: 2 if rank else None,
        "backwards with a weight and without one cannot be added (rank 0: none with a weight;"
        " rank 1: all with a weight)",
    ),
    "one micro-batch": (
        lambda rank, micro: 2 if micro else None,
        "backwards with a weight and without one cannot be added (ranks 0, 1: some with a weight)",
    ),
    "negative": (
        lambda rank, micro: -1 if rank and micro else 2,
        "a weight of engine.backward() on rank 1 is negative or not finite",
    ),
    "nan": (
        lambda rank, micro: 2 if rank else math.nan,
        "a weight of engine.backward() on rank 0 is negative or not finite",
    ),
    "nothing": (lambda rank, micro: 0, "the weights of all backwards of this step are 0"),
}


def _mistake(rank: int, world: int) -> dict[str, str]:
    """Return what each mistake is answered with, and go on after it."""
    model, optimizer, engine = make_sharded("zero3")
    answers = {}
    for name, (weight_of, _) in MISTAKES.items():
        for micro in range(2):
            loss = model(*_batch(rank, 0, micro, 2))
            engine.backward(loss, weight=weight_of(rank, micro))
        with pytest.raises(zs.StateError) as raised:
            engine.clip_grad_norm_(1.0)
        answers[name] = str(raised.value)
        optimizer.zero_grad()
        engine.backward(model(*_batch(rank, 1, 0, 2)), weight=1 + rank)
        optimizer.step()
        optimizer.zero_grad()
    assert engine.steps_skipped == 0
    engine.close()
    return answers


def test_mistakes_with_weights_are_one_line_the_same_on_every_rank() -> None:
    first, second = run_ranks(2, _mistake)
    assert first == second
    for name, (_, line) in MISTAKES.items():
        assert line in first[name] and "\n" not in first[name], first[name]


@pytest.mark.parametrize(
    ("shares", "line"),
    [
        ([[0.5, 0.6]] * 2, r"batch_shares \[0.5, 0.6\] add up to 1.1, not to 1"),
        ([[0.5, 0.25, 0.25]] * 2, "batch_shares has 3 numbers for 2 data parallel ranks"),
        ([[0.5, 0.5], [0.4, 0.6]], "batch_shares"),
    ],
    ids=["no sum", "too many", "different"],
)
@on_ranks(2)
def test_batch_shares_that_cannot_be_are_refused_on_every_rank(
    rank: int, shares: list[list[float]], line: str
) -> None:
    with pytest.raises((zs.ConfigError, zs.PlanMismatch), match=line):
        make_sharded("zero3", batch_shares=shares[rank])


@on_ranks(2)
def test_uneven_batches_train_as_whole_batches_in_one_process(rank: int) -> None:
    """Train with the sampler's batches beside one process that has whole ones."""
    data = TensorDataset(*_batch(0, 0, 0, 22))
    states = []
    for shares in ([0.25, 0.75], [1.0]):
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        alone = len(shares) == 1
        sampler = zs.UnevenBatchSampler(data, 8, shares, 0 if alone else rank, seed=5)
        loader = DataLoader(data, batch_sampler=sampler)
        engine = None if alone else zs.shard(model, optimizer, policy="zero2", batch_shares=shares)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            for number, (x, y) in enumerate(loader, 1):
                loss = model(x, y)
                if engine is None:
                    loss.backward()
                elif epoch or number == len(loader):
                    assert number < len(loader) or len(x) == (2, 4)[rank], "of 6"
                    engine.backward(loss, weight=len(x))
                else:
                    engine.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        states.append(final_state(model, engine))
    ours, whole = states
    found = [n for n in whole if not torch.allclose(ours[n], whole[n], rtol=1e-4, atol=1e-6)]
    assert found == []


@on_ranks(2)
def test_a_global_batch_is_dealt_out_by_the_shares_of_the_engine(rank: int) -> None:
    """Look at this rank's batches with equal shares, and with those of the engine."""
    sizes = []
    for shares in (None, [0.25, 0.75]):
        model = make_model()
        engine = zs.shard(model, None, policy="zero2", batch_shares=shares)
        sizes.append([len(batch) for batch in zs.GlobalBatchSampler(24, 8, engine)])
        if rank == 0:  # of ten samples the last two are in no batch
            assert list(zs.GlobalBatchSampler(10, 8, engine, seed=None)) == [
                list(range(sizes[-1][0]))
            ]
        engine.close()
    assert sizes == [[4] * 3, ([2] * 3, [6] * 3)[rank]]


def _plainly(rank: int, world: int) -> list[str]:
    """Return what a backward that the engine does not see is answered with on one rank, and go on
    after it.
    """
    model, optimizer, engine = make_sharded("zero3", batch_shares=[0.25, 0.75])
    answers = []
    for call in (engine.clip_grad_norm_, lambda _: optimizer.step()):
        loss = model(*_batch(rank, 0, 0, 2))
        if rank:
            loss.backward()
        else:
            engine.backward(loss)
        with pytest.raises(zs.StateError) as raised:
            call(1.0)
        answers.append(str(raised.value))
        optimizer.zero_grad()
    engine.backward(model(*_batch(rank, 1, 0, 2)))
    optimizer.step()
    assert engine.steps_skipped == 0
    engine.close()
    return answers


def test_a_plain_backward_under_batch_shares_is_one_line_on_every_rank() -> None:
    first, second = run_ranks(2, _plainly)
    assert first == second == [first[0]] * 2
    assert "batch_shares multiply the loss" in first[0] and "call engine.backward(loss)" in first[0]


def _close(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> bool:
    if theirs is None or ours is None:
        return ours is theirs
    return torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def _penalty(model: nn.Module, rank: int) -> torch.Tensor:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return model(x).mean() + (slope.norm(dim=1) - 1).pow(2).mean()


@on_ranks(2)
def test_a_gradient_of_inputs_is_no_backward_without_a_weight(rank: int) -> None:
    """Take the gradient of an input first, which is no backward of a loss."""
    found = []
    for how in ({"weight": 1 + 2 * rank}, {}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        plain = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        shares = None if how else [0.25, 0.75]
        engine = zs.shard(model, optimizer, policy="zero2", batch_shares=shares)
        engine.backward(_penalty(model, rank), **how)
        grads = [engine.full_grad(parameter) for parameter in model.parameters()]
        (0.25 * _penalty(plain, 0) + 0.75 * _penalty(plain, 1)).backward()
        found += [
            str(how)
            for ours, parameter in zip(grads, plain.parameters(), strict=True)
            if not _close(ours, parameter.grad)
        ]
        engine.close()
    assert found == []


@pytest.mark.parametrize("accumulates", [False, True], ids=["backward", "accumulate"])
@on_ranks(2)
def test_nan_in_a_model_whose_loss_counts_nothing_brings_zeros(
    rank: int, accumulates: bool
) -> None:
    """Rank 1 has no token at all: NaN begins in the middle of its model."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine = zs.shard(model, optimizer, policy="zero1")
    x = torch.randn(5, 4)

    def loss_of(blocks: Any, mask: torch.Tensor) -> torch.Tensor:
        h = blocks[0](x)
        h = blocks[1]((h * mask).sum(0) / mask.sum())
        return blocks[2](h).pow(2).mean()

    mask = torch.full((5, 1), 1.0 - rank)
    loss = loss_of(model["blocks"], mask)
    assert math.isnan(loss) == bool(rank)
    if accumulates:
        engine.accumulate([mask], lambda one: (loss_of(model["blocks"], one), float(one.sum())))
    else:
        engine.backward(loss, weight=mask.sum())
    grads = [engine.full_grad(parameter) for parameter in model.parameters()]
    loss_of(plain["blocks"], torch.ones(5, 1)).backward()
    engine.close()
    pairs = zip(grads, plain.named_parameters(), strict=True)
    found = [name for ours, (name, parameter) in pairs if not _close(ours, parameter.grad)]
    assert found == []


@on_ranks(2)
def test_a_loss_that_counts_is_not_silenced_by_one_of_the_same_graph_that_counts_nothing(
    rank: int,
) -> None:
    """A loss that counts nothing, and another one of the same graph, with the gradient 0 / 0."""
    model, optimizer, engine = make_sharded("zero2")
    loss = model(*_batch(rank, 0, 0, 2)) / 0.0
    engine.backward(loss, weight=0, retain_graph=True)
    engine.backward(loss * 0.0, weight=1)
    optimizer.step()
    assert engine.steps_skipped == 1
    engine.close()


class _HalfLoss(nn.Module):
    """Its loss and its gradient are bf16, its weights fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum().bfloat16()


@on_ranks(2)
def test_a_weight_counts_in_the_sum_as_much_as_in_a_loss_of_few_digits() -> None:
    model = _HalfLoss()
    engine = zs.shard(model, torch.optim.SGD(model.parameters(), lr=1.0), policy="zero2")
    engine.backward(model(torch.full((3,), 2.0)), weight=1001)  # 1000 in bf16
    grad = engine.full_grad(model.weight)
    engine.close()
    found = [] if grad is None else grad.tolist()
    assert found == [2.0] * 3


def _two_engines(rank: int, world: int, how: dict[str, Any]) -> str:
    """The loss of one engine's model passes through another's; return what that one answers."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in (first, second)]
    weight = how.pop("weight", None)
    one = zs.shard(first, optimizers[0], policy="zero2")
    other = zs.shard(second, optimizers[1], policy="zero2", **how)
    answer = ""
    for clears in (True, False):
        other.backward(second(first(torch.randn(2, 4))).pow(2).mean(), weight=weight)
        optimizers[1].step()
        if clears:  # as a GAN's discriminator, whose gradients of the generator's loss are dropped
            optimizers[0].zero_grad()
            one.backward(first(torch.randn(2, 4)).mean())
        try:
            optimizers[0].step()
        except zs.StateError as error:
            answer = str(error)
        assert bool(answer) != clears or not (weight or how)
        for optimizer in optimizers:
            optimizer.zero_grad()
    for engine in (one, other):
        engine.close()
    return answer


@pytest.mark.parametrize(
    "how",
    [{"weight": 2}, {"batch_shares": [0.25, 0.75]}, FP16, {}],
    ids=["weight", "shares", "fp16", "plain"],
)
def test_gradients_of_a_loss_that_another_engine_has_multiplied_are_one_line(
    how: dict[str, Any],
) -> None:
    first, second = run_ranks(2, _two_engines, how)
    assert first == second and "\n" not in first
    assert ("another engine's backward() has brought these gradients" in first) == bool(how)
