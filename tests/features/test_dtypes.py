"""Models whose parameters are not all alike: several dtypes, batch norm in half precision,
frozen integers, no elements, shared elements.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard as zs
from tests.support.cases import Case, Chain, compare_case, seeded, simple
from tests.support.covering import by_pairs
from tests.support.family_training import InBf16, narrowed
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import (
    ROWS,
    TRANSPORTS,
    Block,
    Run,
    batch,
    make_model,
    take_steps,
    two_groups,
)
from zeroshard.errors import ConfigError
from zeroshard.runtime.engine import states_of

BF16 = torch.bfloat16


class AdaptedLinear(nn.Module):
    """An fp32 adapter on a frozen bf16 base, as PEFT builds it."""

    def __init__(self, width: int, rank: int = 3) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, dtype=BF16).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype is self.base.weight.dtype is BF16 and self.down.weight.dtype is torch.float32
        return x + self.base(x) + self.up(self.down(x.float())).to(x.dtype)


def _adapted() -> Chain:
    model = Chain(AdaptedLinear)
    model.embed.to(BF16).requires_grad_(False)
    model.head.to(BF16).requires_grad_(False)
    return model


class Odd(nn.Module):
    """Parameters that are not floats, that have no elements, one element, or elements that share
    memory.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.empty = nn.Parameter(torch.empty(0, width))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.expanded = nn.Parameter(
            torch.randn(1, width).expand(width, width), requires_grad=False
        )
        self.steps = nn.Parameter(torch.tensor([3, -1]), requires_grad=False)
        self.mask = nn.Parameter(torch.arange(width) % 3 > 0, requires_grad=False)
        self.codes = nn.Parameter(
            torch.randint(-127, 127, (width, width), dtype=torch.int8), requires_grad=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.scalar * self.linear(x) * self.mask + 0.01 * nn.functional.linear(x, self.expanded)
        x = x.roll(self.steps.tolist(), (0, 1)) + nn.functional.linear(x, 1e-3 * self.codes)
        rows = torch.cat([x.flatten(0, 1), self.empty])
        return rows.view_as(x)


CASES = {
    "fp32 adapters on a bf16 base": Case(seeded(_adapted), simple, options={"precision": "bf16"}),
    # it cannot write to shared elements
    "integers, no elements, shared elements": Case(
        seeded(Chain, Odd), simple, ddp={"init_sync": False}
    ),
}


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_parameters_of_several_kinds_train_to_ddps_bits_in_every_row(rank: int, name: str) -> None:

    differences = compare_case(rank, CASES[name])
    assert not any(differences.values()), differences


# ------------------------------------------------------------------- half precision, not everywhere


class KeepingNorm(Block):
    """A block whose norm computes in fp32, on fp32 weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.norm.weight.dtype is torch.float32, self.norm.weight.dtype
        h = self.norm(x.float()).to(self.up.weight.dtype)
        return x + self.down(nn.functional.gelu(self.up(h)))


def _norms_in_fp32() -> nn.Module:
    """A bf16 model with fp32 norms; its numbers are those of the reference, rounded where the
    weights are bf16.
    """
    model = Chain(KeepingNorm).to(BF16)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
    return model


class Pictures(nn.Module):
    """Convolutions with batch norm, whose running statistics are fp32 whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Sequential(nn.Conv2d(5, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU())
            for _ in range(3)
        )
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.convolutions:
            x = part(x)
        return self.last(x.mean((2, 3))).float().square().mean()


def _images(rank: int, step: int) -> tuple[torch.Tensor]:
    return (torch.randn(4, 5, 6, 6, generator=torch.Generator().manual_seed(100 * step + rank)),)


NORMS: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.BatchNorm2d)


def _partly_bf16(
    rank: int, world: int, make: Callable[[], nn.Module], data: Callable[[int, int], Any]
) -> list[str]:
    runs = {}
    for kind in ("reference", *ROWS, "zero3 on gloo"):
        model, engine = seeded(make)(), None
        runs_module = model
        if kind == "reference":
            model.float()
            runs_module = DistributedDataParallel(InBf16(model, NORMS), broadcast_buffers=False)
        optimizer = two_groups(model)
        if kind != "reference":
            row, _, transport = kind.partition(" on ")
            engine = zs.shard(
                model,
                optimizer,
                policy=row,
                precision="bf16",
                comm=zs.Comm(transport=transport or "shared_memory"),
            )  # type: ignore[arg-type]
        losses = take_steps(rank, 5, runs_module, optimizer, data=data)
        if engine is None:
            model.eval()
            losses.append(InBf16(model, NORMS)(*data(rank, 9)).item())
            runs[kind] = Run(
                losses,
                {k: v.clone() for k, v in narrowed(model, model.state_dict(), NORMS).items()},
            )
            continue
        model.eval()
        with torch.no_grad():
            losses.append(runs_module(*data(rank, 9)).item())
        runs[kind] = Run(losses, engine.full_state_dict(rank0_only=False))
        assert {value.dtype for name, value in runs[kind].state.items() if "norm" in name} <= {
            torch.float32
        }
        engine.close()
    return [
        f"{kind}: {name}"
        for kind, run in runs.items()
        for name in run.differs_from(runs["reference"])
    ]


def test_fp32_norms_in_a_bf16_model_keep_their_dtype() -> None:
    for differences in run_ranks(2, _partly_bf16, _norms_in_fp32, batch):
        assert not differences


def test_batch_norm_keeps_fp32_in_bf16() -> None:
    for differences in run_ranks(2, _partly_bf16, Pictures, _images):
        assert not differences


# ---------------------------------------------------------------------------------- refused by name


@pytest.mark.parametrize(
    ("dtype", "precision", "message"),
    [
        (
            torch.float64,
            "fp32",
            "parameter 'blocks.1.up.weight' is float64, which is not supported",
        ),
        (
            torch.float16,
            "bf16",
            "parameter 'blocks.1.up.weight' is fp16 but precision computes in bf16",
        ),
        (
            torch.bfloat16,
            "fp32",
            "parameter 'blocks.1.up.weight' is bf16 but precision computes in fp32",
        ),
    ],
)
def test_a_parameter_of_a_dtype_that_does_not_fit_is_refused_by_name(
    dtype: torch.dtype, precision: str, message: str
) -> None:
    model = make_model()
    model.blocks[1].up.to(dtype)
    with pytest.raises(ConfigError, match=message):
        zs.shard(model, two_groups(model), precision=precision)


# ------------------------------------------------------------------------------------ after close()


@by_pairs(
    {
        "row": ("ddp", "zero1", "zero3"),
        "precision": ("fp32", "bf16", "fp16"),
        "transport": TRANSPORTS,
    }
)
@on_ranks(2)
def test_close_gives_a_plain_model_back_with_its_dtypes_and_the_masters_numbers(
    rank: int, row: str, precision: str, transport: str
) -> None:
    model = make_model()
    model.blocks[0].requires_grad_(False)
    frozen = copy.deepcopy(model.blocks[0].state_dict())
    optimizer = two_groups(nn.ParameterList([p for p in model.parameters() if p.requires_grad]))
    engine = zs.shard(
        model,
        optimizer,
        policy=row,
        precision=precision,
        comm=zs.Comm.model_validate({"transport": transport}),
    )
    take_steps(rank, 2, model, optimizer, engine)
    weights = engine.full_state_dict(rank0_only=False)
    masters = {
        piece.name: (piece.start, piece.stop, piece.tensor.clone())
        for piece in states_of(engine).resting_pieces()
    }
    engine.close()
    again = copy.deepcopy(model)
    for name, value in again.state_dict().items():
        assert value.dtype is torch.float32, name
        if name in masters and value.numel():
            start, stop, master = masters[name]
            assert torch.equal(value.flatten()[start:stop], master.float()), name
        torch.testing.assert_close(value, weights[name].float(), rtol=1e-2, atol=1e-2)
    for name, value in frozen.items():
        torch.testing.assert_close(again.blocks[0].state_dict()[name], value, rtol=1e-2, atol=1e-2)
    again(*batch(rank, 7)).backward()
    assert all(p.grad is not None for p in again.parameters() if p.requires_grad)


def _bytes_of_close(rank: int, world: int, precision: str) -> dict[str, int]:
    model = make_model()
    optimizer = two_groups(model)
    comm = zs.Comm(transport="gloo")
    engine = zs.shard(model, optimizer, policy="zero3", precision=precision, comm=comm)
    take_steps(rank, 1, model, optimizer, engine)
    engine.reset_traffic()
    engine.close()
    return engine.traffic().bytes


def test_close_gathers_masters_without_the_weights() -> None:
    (fp32, _), (bf16, _) = (run_ranks(2, _bytes_of_close, one) for one in ("fp32", "bf16"))
    assert fp32["all_gather"] == bf16["all_gather"] > 0
