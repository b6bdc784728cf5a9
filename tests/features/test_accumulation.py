"""Micro-batches before a step, and two features at a time, where a fault in either alone would
stay unseen: micro-batches and tiers, parts of a unit and zero_grad, kernels and zeros.
"""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeroshard as zs
from tests.support import inside
from tests.support.harness import run_ranks
from tests.support.training import (
    ROWS,
    TRANSPORTS,
    Net,
    Run,
    batch,
    differences,
    make_model,
    train,
    two_groups,
)
from zeroshard.runtime import segment as segment_module
from zeroshard.runtime.engine import states_of
from zeroshard.state import gradient as resting

State = dict[str, torch.Tensor]

# ------------------------------------------------------------------------ gradients on another tier


def _first_sum_is_bad(rank: int, world: int, row: str, tier: str, path: str) -> list[str]:
    """The only sum of a step brings a NaN: nobody steps, nothing changes, and all train on as on
    the device, with two sums.
    """
    offloads = {
        "device": None,
        tier: zs.Offload(grad=tier, optimizer=tier, disk_path=path if tier == "disk" else None),
    }  # type: ignore[arg-type]
    states = {}
    for name, offload in offloads.items():
        model = make_model()
        optimizer = two_groups(model)
        engine = zs.shard(
            model,
            optimizer,
            policy=row,
            **({} if offload is None else {"offload": offload}),
        )
        before = engine.full_state_dict(rank0_only=False)
        for bad in (True, False):
            for micro in range(1 if bad else 2):  # a second sum would be looked at as a whole
                handle = (
                    model.blocks[2].up.bias.register_hook(lambda grad: grad * float("nan"))
                    if bad and rank == 1
                    else None
                )
                model(*batch(rank, micro)).backward()
                if handle is not None:
                    handle.remove()
            optimizer.step()
            optimizer.zero_grad()
            if bad:
                changed = differences(
                    engine.full_state_dict(rank0_only=False), before, row, "before"
                )
                assert engine.steps_skipped == 1 and not changed, changed
        states[name] = engine.full_state_dict(rank0_only=False)
        engine.close()
    return differences(states[tier], states["device"], f"{row} on {tier}", f"{row} on the device")


@pytest.mark.parametrize(("row", "tier"), [("zero3", "host"), ("zero2", "disk"), ("zero1", "host")])
def test_a_nan_in_the_first_sum_of_a_gradient_on_another_tier_skips_the_step(
    row: str, tier: str, tmp_path: Any
) -> None:
    assert run_ranks(2, _first_sum_is_bad, row, tier, str(tmp_path)) == [[], []]


def _cleared_there(rank: int, world: int) -> list[str]:
    """The gradient of one piece of one group is cleared on the optimizer's side: the other
    parameters of its group are stepped.
    """
    model = make_model()
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, policy="zero2")
    before = engine.full_state_dict(rank0_only=False)
    model(*batch(rank, 0)).backward()
    pieces = inside.param_shards(engine)
    cleared = "blocks.1.up.weight"
    for piece in pieces:
        if piece.name == cleared:
            piece.tensor.grad = None
    optimizer.step()
    after = engine.full_state_dict(rank0_only=False)
    engine.close()
    return [name for name in before if torch.equal(before[name], after[name])]


def test_a_gradient_cleared_on_the_optimizers_side_leaves_the_rest_of_its_group_alone() -> None:
    assert run_ranks(1, _cleared_there) == [["blocks.1.up.weight"]]


def _large(rank: int, world: int, options: dict[str, Any]) -> Run:
    """Train one matrix whose shard is longer than a block of a gradient and a tile of a state at
    rest, its numbers all different.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1031, 2053), nn.GELU(), nn.Linear(2053, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine = zs.shard(
        model,
        optimizer,
        units=lambda name, module: isinstance(module, nn.Linear),
        **options,
    )
    assert max(engine.units.values()) > 2 * (1 << 20)
    losses = []
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        for _micro in range(2):
            loss = model(torch.randn(4, 1031, generator=generator)).pow(2).mean()
            loss.backward()
            losses.append(loss.item())
        losses.append(float(engine.clip_grad_norm_(0.01)))
        optimizer.step()
        optimizer.zero_grad()
    state = engine.full_state_dict(rank0_only=False)
    engine.close()
    return Run(losses, state, row=str(options))


def _large_tiers(rank: int, world: int, row: str, path: str) -> list[str]:
    reference = _large(rank, world, {"policy": row})
    tiers = [
        zs.Offload(grad="host", optimizer="host", fraction=0.9),
        zs.Offload(grad="host", optimizer="disk", disk_path=path),
    ]
    if row == "zero3":
        tiers = [
            zs.Offload(optimizer="host"),
            tiers[0],
            zs.Offload(weight="disk", grad="disk", optimizer="disk", disk_path=path),
        ]
    runs = [_large(rank, world, {"policy": row, "offload": offload}) for offload in tiers]
    return [line for run in runs for line in run.differs_from(reference)]


@pytest.mark.parametrize(("world", "row"), [(1, "zero3"), (2, "ddp")])
def test_states_longer_than_a_tile_and_a_block_give_the_bits_of_the_device_on_every_tier(
    world: int, row: str, tmp_path: Any
) -> None:
    assert resting._BLOCK <= 1 << 20 and segment_module._TILE <= 1 << 20, (
        "the model of this test must be larger"
    )
    for found in run_ranks(world, _large_tiers, row, str(tmp_path), timeout=120):
        assert not found, found


# ------------------------------------------------------------------------------ zero_grad of a part


def _clear(model: Net, optimizer: torch.optim.Optimizer, what: str) -> None:
    """Clear the gradients of a part of a unit, on the model's side."""
    part = [model.blocks[1].up.weight, model.blocks[1].norm.bias, model.head.weight]
    for parameter in part:
        if what == "to None":
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.zero_()


def _reference(rank: int, what: str) -> State:
    """The arithmetic of DDP by hand: each rank's micro-batches are added, then the ranks' sums."""
    model = make_model(layers=2)
    optimizer = two_groups(model)
    for step in range(3):
        for micro in range(3):
            model(*batch(rank, 3 * step + micro)).backward()
            if micro == 0:
                _clear(model, optimizer, what)
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad.div_(2)
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


def _part(rank: int, world: int, what: str, transport: str) -> dict[str, list[str]]:
    expected = _reference(rank, what)
    out = {}
    states: dict[str, State] = {}
    for row in ROWS:
        model = make_model(layers=2)
        optimizer = two_groups(model)
        engine = zs.shard(
            model,
            optimizer,
            policy=row,
            comm=zs.Comm.model_validate({"transport": transport}),
        )
        for step in range(3):
            for micro in range(3):
                if micro < 2:
                    with engine.no_sync():
                        model(*batch(rank, 3 * step + micro)).backward()
                else:
                    model(*batch(rank, 3 * step + micro)).backward()
                if micro == 0:
                    _clear(model, optimizer, what)
            optimizer.step()
            optimizer.zero_grad()
        states[row] = engine.full_state_dict(rank0_only=False)
        engine.close()
        # these add a rank's micro-batches before the ranks, as the reference does
        if row in ("ddp", "zero1"):
            out[row] = differences(states[row], expected, row, "by hand")
        else:
            out[row] = differences(states[row], states["zero2"], row, "zero2")
            close = all(
                torch.allclose(value, expected[name], rtol=1e-3, atol=1e-5)
                for name, value in states[row].items()
            )
            out[row] += [] if close else ["far from the reference"]
    return out


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("what", ["to None", "to zeros"])
def test_clearing_a_part_of_a_unit_between_two_no_sync_backwards_clears_that_part_alone(
    what: str, transport: str
) -> None:
    for found in run_ranks(2, _part, what, transport):
        assert not any(found.values()), found


# -------------------------------------------------------------------------------- kernels and zeros


def _zeros(rank: int, world: int, row: str, kernel: str) -> list[str]:
    """zero_grad(set_to_none=False) keeps gradients as zeros: with them, parameters that a step
    does not use still decay.
    """
    runs = {}
    for kind in ("torch-ddp", row):
        model = make_model(layers=2)
        optimizer = two_groups(model, **{kernel: True})
        engine = None if kind == "torch-ddp" else zs.shard(model, optimizer, policy=kind)
        module = nn.parallel.DistributedDataParallel(model) if engine is None else model
        losses = []
        for step, side in zip(range(6), itertools.cycle((optimizer, model)), strict=False):
            loss = module(*batch(rank, step))
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            side.zero_grad(set_to_none=False)
        optimizer.step()  # on zeros: momentum and weight decay go on
        state = model.state_dict() if engine is None else engine.full_state_dict(rank0_only=False)
        runs[kind] = Run(
            losses, {name: value.clone() for name, value in state.items()}, row=f"{kind} {kernel}"
        )
        if engine is not None:
            engine.close()
    return runs[row].differs_from(runs["torch-ddp"])


@pytest.mark.parametrize("kernel", ["foreach", "fused"])
def test_gradients_set_to_zero_stay_zeros_with_every_kernel(kernel: str) -> None:
    for row in ROWS:
        assert run_ranks(2, _zeros, row, kernel) == [[], []], row


# ----------------------------------------------------------------------------------------- replicas


def _moment_differs(rank: int, world: int, row: str, key: str) -> str:
    """Change one moment that every rank holds, on rank 1; the weights are still the same in the
    comparison of the same step.
    """
    model = make_model()
    optimizer = two_groups(model)
    options = {"comm": zs.Comm(node_size=1)} if row == "mics" else {}
    engine = zs.shard(model, optimizer, policy=row, verify_every=1, **options)
    for step in range(3):
        model(*batch(rank, step)).backward()
        if step == 2 and rank == 1:
            piece = next(
                piece
                for piece in states_of(engine).stepped_pieces()
                if piece.name == "blocks.1.up.weight"
            )
            optimizer.state[piece.tensor][key].view(-1).view(torch.int32)[-1] ^= 1
        try:
            optimizer.step()
        except zs.PlanMismatch as error:
            return f"step {step}: {error}"
        optimizer.zero_grad()
    return "nothing"


@pytest.mark.parametrize(("row", "key"), [("ddp", "exp_avg_sq"), ("mics", "exp_avg")])
def test_replicas_that_differ_in_a_moment_alone_are_found(row: str, key: str) -> None:
    for said in run_ranks(2, _moment_differs, row, key):
        assert said.startswith("step 2: ") and "optimizer state of blocks.1.up.weight" in said, said


# ----------------------------------------------------------------------------- the tests' own words


def test_a_mismatch_names_the_parameter_the_index_both_values_and_the_rows() -> None:
    ours = Run(
        [1.0, 2.0], {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.ones(2)}, row="zero3"
    )
    other = Run(
        [1.0, 2.5], {"a": torch.tensor([[1.0, 2.0], [3.5, 4.5]]), "b": torch.ones(2)}, row="ddp"
    )
    assert ours.differs_from(other) == [
        "a[1, 0]: 3.0 in zero3 against 3.5 in ddp (2 of 4 elements differ)",
        "losses[1]: 2.0 in zero3 against 2.5 in ddp",
    ]
    assert ours.differs_from(ours) == []
    assert differences({"a": torch.ones(2)}, {"c": torch.ones(2)}) == [
        "a is only in this run",
        "c is only in the reference",
    ]


def _accumulated(
    rank: int, world: int, no_sync: bool, precision: str, steps: int
) -> dict[str, Run]:
    kinds = [*ROWS, "torch-ddp"] if precision == "fp32" else ROWS
    options = {} if precision == "fp32" else {"precision": precision}
    return {
        kind: train(
            rank,
            kind,
            steps,
            micro_batches=3,
            no_sync=no_sync,
            model=partial(make_model, layers=2),
            **({} if kind == "torch-ddp" else options),
        )
        for kind in kinds
    }


@pytest.mark.parametrize("steps", [4, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("no_sync", [True, False], ids=["no_sync", "every-backward"])
def test_accumulated_micro_batches_add_up_in_the_classes_the_design_names(
    no_sync: bool, precision: str, steps: int
) -> None:
    for runs in run_ranks(2, _accumulated, no_sync, precision, steps, timeout=100):
        first = ["ddp", "zero1"] + (["torch-ddp"] if precision == "fp32" and no_sync else [])
        classes = [first, ["zero2", "zero3", "zero3-keep"]] if no_sync else [list(ROWS)]
        for members in classes:
            for member in members:
                assert runs[member].differs_from(runs[members[0]]) == []
        for name, value in runs["zero3"].state.items():
            apart = (value - runs["ddp"].state[name]).float().norm() / value.float().norm()
            assert apart < (1e-3 if precision == "fp32" else 5e-2), f"{name}: {float(apart):.2e}"


# ------------------------------------------------------------- sums that gradients are added to


class _Gated(Net):
    """A net with a part that few micro-batches use, whose gradient is -0.0, and one that is used
    inside a reentrant checkpoint and outside of it.
    """

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.quiet = nn.Parameter(torch.ones(7))
        self.twice = nn.Linear(19, 19)

    def forward(self, x: torch.Tensor, number: int = 0, again: bool = False) -> torch.Tensor:
        hidden = self.embed(x)
        if again:
            hidden = self.twice(checkpoint(self.twice, hidden, use_reentrant=True))
        for block in self.blocks:
            hidden = block(hidden)
        loss = self.head(self.norm(hidden)).float().pow(2).mean()
        return loss if number % 2 else loss + (self.quiet * -0.0).sum()


WAYS: dict[str, dict[str, Any]] = {
    "backwards": {},
    "held back": {"holds": True},
    "again in checkpoints": {"again": True},
    "set to zero": {"to_none": False},
    "not cleared": {"clears": False},
    "clipped between": {"clips": True},
    "together": {"together": True},
}
DTYPES: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "sums in bf16": zs.Precision("bf16", accumulate="bf16"),
    "bf16 sent in fp32": zs.Precision("bf16", reduce="fp32"),
    "fp32 sent in bf16": zs.Precision("fp32", reduce="bf16"),
}


def _bits(
    options: dict[str, Any],
    *,
    sends: bool = False,
    holds: bool = False,
    again: bool = False,
    to_none: bool = True,
    clears: bool = True,
    clips: bool = False,
    together: bool = False,
) -> tuple[list[bytes], set[str]]:
    """Train three steps of three micro-batches in one process; return the bits of what is stepped
    and of the weights, and the collectives that were called. `sends`: as several processes do.
    """
    torch.manual_seed(0)
    model, seen = _Gated(), list[torch.Tensor]()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    engine = zs.shard(model, optimizer, units=[type(model.blocks[0])], **options)
    if sends:
        inside.send_all_gradients(engine)
    for step in range(3):
        inputs = [(batch(0, 3 * step + micro)[0], micro + step, again) for micro in range(3)]
        if together:
            engine.accumulate(inputs, lambda one: model(*one))
        for micro, one in enumerate(() if together else inputs):
            with engine.no_sync() if holds and micro < 2 else nullcontext():
                engine.backward(model(*one))
            if clips and micro == 1:
                engine.clip_grad_norm_(0.1)
        grads = [engine.full_grad(parameter) for parameter in model.parameters()]
        seen += [torch.zeros(0) if grad is None else grad.clone() for grad in grads]
        optimizer.step()
        if clears or step == 1:
            optimizer.zero_grad(set_to_none=to_none)
    seen += engine.full_state_dict().values()
    calls = set(engine.traffic().calls)
    engine.close()
    return [one.flatten().contiguous().view(torch.uint8).numpy().tobytes() for one in seen], calls


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("row", ["ddp", "zero3"])
def test_one_process_adds_gradients_where_they_rest_with_the_bits_of_a_reduce(
    row: str, way: str, dtypes: str
) -> None:
    options = {"policy": row, "precision": DTYPES[dtypes]}
    if dtypes == "fp16":
        options["loss_scale"] = zs.LossScale(initial=64.0)  # nothing overflows
    (here, calls), (sent, of_sent) = (
        _bits(options, sends=one, **WAYS[way]) for one in (False, True)
    )
    assert here == sent
    assert "reduce_scatter" in of_sent
    if way == "backwards" and dtypes != "fp32 sent in bf16":
        assert "reduce_scatter" not in calls
