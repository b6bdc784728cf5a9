"""Masters that rest as remainders of the bf16 weights (``Precision("bf16", master="remainder")``):
the bits of fp32 masters in every row, in checkpoints and after whatever the user does, with two
bytes an element less.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.fuzz.optimizers import Lamb, ScheduleFree
from tests.support import inside
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import batch, differences, make_model, take_steps, two_groups
from zeroshard.config.native import build_config
from zeroshard.core.placement import VALUE, Mesh
from zeroshard.core.policy import ROWS as POLICIES
from zeroshard.planner.exact import LaidOut, rest_bytes
from zeroshard.planner.modules import shape_of_module
from zeroshard.runtime.context import Tiering
from zeroshard.runtime.engine import states_of
from zeroshard.state.remainder import RemainderStorage

ROWS = ("ddp", "zero1", "zero2", "zero3")
MASTERS: tuple[Any, ...] = ("fp32", "remainder")
State = dict[str, torch.Tensor]


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return two_groups(model)


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    """SGD whose first parameters stay as they are: ties among them stay ties."""
    first, *others = model.parameters()
    groups = [{"params": [first], "lr": 0.0}, {"params": others}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


RULES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "momentum": _momentum,
}


def _ties(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers half-way between two of bf16, near `numbers`, every other one an odd one."""
    return ((numbers.view(torch.int32) & -65536) | 0x8000).view(torch.float32)


def _rewrite(engine: zs.Engine, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the masters of every first half of a piece."""
    states = states_of(engine)
    with states.rewriting():
        for table in states.tables():
            for piece in table.pieces({VALUE}):
                with piece.borrowed() as there:
                    numbers = there.clone()
                half = numbers[: numbers.numel() // 2]
                half.copy_(change(half.clone()))
                piece.write(numbers)


def _bits(engine: zs.Engine) -> State:
    """Return every number that rests here, by kind and parameter, as bits; NaN as one."""
    found: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for table in states_of(engine).tables():
        for piece in table.pieces():
            with piece.borrowed() as there:
                numbers = torch.where(there.isnan(), torch.nan, there).view(torch.int32)
            found.setdefault(f"{piece.kind} {piece.name}", []).append((piece.start, numbers))
    return {
        f"{name} from {min(start for start, _ in pieces)}": torch.cat(
            [one for _, one in sorted(pieces, key=itemgetter(0))]
        )
        for name, pieces in found.items()
    }


def _engine(
    row: str, master: Any, rule: str = "adamw", **options: Any
) -> tuple[Any, torch.optim.Optimizer, zs.Engine]:
    model = make_model(layers=1)
    optimizer = RULES[rule](model)
    precision = zs.Precision("bf16", master=master, accumulate=options.pop("accumulate", "fp32"))
    return model, optimizer, zs.shard(model, optimizer, policy=row, precision=precision, **options)


def _both(
    row: str, act: Callable[..., list[Any]], rule: str = "adamw", **options: Any
) -> list[str]:
    """Return in what an engine with remainders differs from one with fp32 masters after `act`."""
    found: list[tuple[State, State, list[Any]]] = []
    for master in MASTERS:
        model, optimizer, engine = _engine(row, master, rule, **options)
        told = act(model, optimizer, engine)
        found.append((_bits(engine), engine.full_state_dict(rank0_only=False), told))
        engine.close()
        found[-1][1].update({f"closed {n}": p.detach() for n, p in model.named_parameters()})
    (bits, state, told), (ours, weights, also) = found
    lines = differences(ours, bits, "remainders", "fp32 masters")
    lines += differences(weights, state, "remainders", "fp32 masters")
    return lines + ([] if told == also else [f"{also} against {told}"])


class Train:
    """Steps on this rank's batches, with what each of them may have; ties on the way."""

    def __init__(self, rank: int, steps: int, **options: Any) -> None:
        self.rank, self.steps, self.options = rank, steps, options

    def __call__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, engine: zs.Engine
    ) -> list[Any]:
        def after(step: int) -> None:
            if step % 20 == 7:
                _rewrite(engine, _ties)

        steps = range(self.steps)
        return take_steps(self.rank, steps, model, optimizer, engine, after=after, **self.options)


def _rows(
    rank: int, world: int, rows: tuple[str, ...], steps: int, options: dict[str, Any]
) -> list[str]:
    out = []
    for number, row in enumerate(rows):
        rule = list(RULES)[(number + world) % 2]
        accumulates = {"micro_batches": 2, "no_sync": True} if number % 3 == 0 else {}
        act = Train(rank, steps, clip=0.3 if number % 2 else None, **accumulates)
        # tiles of 1,024 elements, which cut parameters, or one for all
        size = (16 << 10) if number % 2 else (64 << 20)
        accumulate = "bf16" if number == 2 else "fp32"
        with mock.patch.object(Tiering, "staging_bytes", size):
            lines = _both(row, act, rule, accumulate=accumulate, **options)
        out += [f"{row} {rule}: {text}" for text in lines]
    return out


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_remainders_have_the_bits_of_fp32_masters(world: int) -> None:
    for found in run_ranks(world, _rows, ROWS, 60, {}):
        assert found == []


def test_they_do_in_rows_with_nodes_and_where_ranks_send_messages() -> None:
    rows = ("zero3-keep", "hpz", "mics", "hfsdp")
    for transport in ("shared_memory", "gloo"):
        comm = zs.Comm.model_validate({"transport": transport, "node_size": 2})
        for found in run_ranks(4, _rows, rows, 10, {"comm": comm}):
            assert found == []


def test_they_do_beside_codecs_shares_and_owned_parameters() -> None:
    codecs = zs.Comm(weight_codec="int8", grad_codec="int8", error_feedback=True)
    for options in ({"comm": codecs}, {"shares": [0.7, 0.3]}, {"ownership": "whole"}):
        for found in run_ranks(2, _rows, ("zero3",), 10, options):
            assert found == []


# ------------------------------------------------------------------------------------ what is saved


def _saved(
    rank: int, world: int, folder: Path, row: str, master: Any, begin: int, steps: int
) -> State:
    """Train from what `folder` holds of step `begin` on, and save there; return all masters."""
    model, optimizer, engine = _engine(row, master)
    if begin:
        assert zs.load(folder, engine).step == begin
    data = [batch(0, step) for step in range(steps)]  # the same on every rank, however many
    for step in range(begin, steps):
        engine.backward(model(*data[step]))
        optimizer.step()
        optimizer.zero_grad()
        _rewrite(engine, _ties) if step == begin else None
    zs.save(folder, engine, step=steps)
    engine.close()
    return {name: one.detach() for name, one in model.named_parameters()}


@pytest.mark.parametrize("first", MASTERS)
def test_a_checkpoint_moves_between_both_forms_rows_and_worlds(first: str, tmp_path: Path) -> None:
    second = MASTERS[first == "fp32"]
    plan = ((2, "zero3", first), (3, "zero1", second), (1, "zero2", first), (2, "ddp", second))
    for folder, masters in (("mixed", {}), ("fp32", dict.fromkeys(MASTERS, "fp32"))):
        for number, (world, row, master) in enumerate(plan):
            form = masters.get(master, master)
            args = (tmp_path / folder, row, form, 2 * number, 2 * number + 2)
            found = run_ranks(world, _saved, *args)
        if folder == "mixed":
            expected = found[0]
    assert differences(found[0], expected) == []


# ---------------------------------------------------------------------------------- what is counted


@on_ranks(2)
def test_two_bytes_an_element_are_saved_and_planned(rank: int) -> None:
    for row in ROWS:
        held, numels = {}, {}
        for master in MASTERS:
            training = zs.Training("bf16", micro_batches=2, master=master)
            model, optimizer, engine = _engine(row, master)
            laid_out = LaidOut(shape_of_module(model, training), Mesh.of(2), training.align)
            take_steps(rank, 1, model, optimizer)
            with engine.no_sync():
                engine.backward(model(*batch(rank, 1)))
            held[master] = {name: tiers for name, tiers in engine.memory().tiers.items() if tiers}
            rest = rest_bytes(laid_out, POLICIES[row], training, rank)
            planned = {s: {t.value: n for t, n in by.items()} for s, by in rest.items() if by}
            assert planned == held[master], (row, master)
            numels[master] = sum(one.weight.numel for one in inside.segments(engine))
            if master == "remainder":  # a list beside it is counted, too
                optimizer.zero_grad()
                _rewrite(engine, _ties)
                ties = engine.memory().at_rest["master"] - held[master]["master"]["device"]
                assert ties > 0 == ties % 12
            engine.close()
        saved = held["fp32"]["master"]["device"] - held["remainder"]["master"]["device"]
        assert saved == 2 * numels["remainder"] == 2 * numels["fp32"]
        assert held["remainder"]["master"]["device"] == 2 * numels["fp32"]


# ------------------------------------------------------------------------------ what the user does


class Edits:
    """Edits of weights, some of them taken back, between steps."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(
        self, model: Any, optimizer: torch.optim.Optimizer, engine: zs.Engine
    ) -> list[Any]:
        told = take_steps(self.rank, 2, model, optimizer, engine)
        _rewrite(engine, _ties)
        with engine.gathered(writeback=True), torch.no_grad():
            model.head.weight[3:9] *= 3
            model.embed.weight[0] = torch.nan
            model.embed.weight[1] = torch.inf
            kept = model.norm.weight.clone()
            model.norm.weight.zero_()
        told += [float(engine.memory().at_rest["weight"])]
        with engine.gathered(writeback=True), torch.no_grad():
            model.norm.weight.copy_(kept)
            model.embed.weight[:2] = 0.25
        told += take_steps(self.rank, range(2, 5), model, optimizer, engine)
        state = engine.full_state_dict(rank0_only=False)
        state["blocks.0.up.bias"] += 1
        model.load_state_dict(state)
        return told + take_steps(self.rank, range(5, 8), model, optimizer, engine)


class Moves:
    """The layout changes between steps, and all states leave the device for a while."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(
        self, model: Any, optimizer: torch.optim.Optimizer, engine: zs.Engine
    ) -> list[Any]:
        told = []
        for step, stage in enumerate((1, 3, 2, 0, 3)):
            told += take_steps(self.rank, [step], model, optimizer, engine)
            _rewrite(engine, _ties)
            engine.repartition(stage=stage)
            if step % 2:
                engine.offload_states()
                assert not sum(engine.memory().at_rest[one] for one in ("grad", "residual"))
                engine.reload_states()
        engine.repartition(shares=[0.75, 0.25])
        told += take_steps(self.rank, [9], model, optimizer, engine)
        if engine.precision.has_remainders:
            with pytest.raises(zs.ConfigError, match="offload rests optimizer elsewhere"):
                engine.repartition(offload={"optimizer": "host"})
        return told


def _acts(rank: int, world: int, act: Any, rows: tuple[str, ...]) -> list[str]:
    return [f"{row}: {line}" for row in rows for line in _both(row, act(rank))]


@pytest.mark.parametrize("act", [Edits, Moves])
def test_what_the_user_does_to_weights_and_layouts_has_the_same_bits(act: Any) -> None:
    for found in run_ranks(2, _acts, act, ROWS if act is Edits else ("zero3",)):
        assert found == []


def _fail(*_: object) -> None:
    raise ZeroDivisionError


@on_ranks(2)
def test_a_step_that_raises_is_given_up_and_the_weights_are_the_masters(rank: int) -> None:
    for row in ROWS:
        model, optimizer, engine = _engine(row, "remainder")
        take_steps(rank, 2, model, optimizer, engine)
        engine.backward(model(*batch(rank, 2)))
        hook = optimizer.register_step_pre_hook(_fail)  # after ours: tiles have been stepped
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
        hook.remove()
        engine.reset()
        take_steps(rank, range(3, 5), model, optimizer, engine)
        rounded = engine.full_state_dict(rank0_only=False)
        engine.close()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.detach().to(torch.bfloat16), rounded[name]), (row, name)


@on_ranks(2)
def test_a_bit_that_one_rank_has_otherwise_is_found(rank: int) -> None:
    model, optimizer, engine = _engine("ddp", "remainder", verify_every=1)
    take_steps(rank, 2, model, optimizer, engine)
    if rank:
        storage = inside.segments(engine)[0].master.away
        assert isinstance(storage, RemainderStorage)
        storage.low[3] ^= 1
    with pytest.raises(zs.PlanMismatch, match="optimizer state of"):
        take_steps(rank, [2], model, optimizer, engine)
    engine.close()


@on_ranks(2)
def test_a_write_outside_of_gathered_is_lost_and_told(rank: int) -> None:
    for row in ("ddp", "zero2", "zero3"):
        model, optimizer, engine = _engine(row, "remainder")
        take_steps(rank, 1, model, optimizer, engine)
        with pytest.raises(zs.StateError, match=r"written to .*gathered\(writeback=True\)"):
            with torch.no_grad():
                model.head.weight.mul_(2)
            take_steps(rank, [1], model, optimizer, engine)
        engine.reset()
        engine.close()


class Mixed(nn.Module):
    """A norm that stays in fp32, a base that is frozen, and what is trained in bf16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.norm, self.head = nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 4)
        self.base.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.base(x)).to(torch.bfloat16)).float().square().mean()


def _mixed(rank: int, world: int, late: bool) -> list[str]:
    states = []
    for master in MASTERS:
        model = Mixed()
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=0.01)
        precision = zs.Precision("bf16", master=master)
        engine = zs.shard(model, None if late else optimizer, stage=3, precision=precision)
        if late:
            engine.attach(optimizer)
        for step in range(12):
            x = torch.randn(6, 8, generator=torch.Generator().manual_seed(2 * step + rank))
            with engine.join():
                engine.backward(model(x))
                optimizer.step()
                optimizer.zero_grad()
        engine.close()
        states.append({name: one.detach().clone() for name, one in model.named_parameters()})
    return differences(*states)


@pytest.mark.parametrize("late", [False, True])
def test_segments_of_other_kinds_and_an_optimizer_that_comes_later(late: bool) -> None:
    for found in run_ranks(2, _mixed, late):
        assert found == []


# ---------------------------------------------------------------------------------- what is refused


def test_precisions_without_remainders_are_refused() -> None:
    for compute in ("fp32", "fp16"):
        with pytest.raises(ValueError, match=f"take compute='bf16', not '{compute}'"):
            zs.Precision(compute, master="remainder")
    with pytest.raises(ValueError, match="'remainder' is not one of"):
        zs.Precision("bf16", accumulate="remainder")
    precision = zs.Precision("bf16", master="remainder")
    assert precision.at(torch.float32) == zs.Precision("fp32")
    assert precision.describe().endswith("master=remainder")


def test_a_configuration_says_remainders() -> None:
    given = {"precision": {"compute": "bf16", "master": "remainder"}}
    config = build_config(given)
    assert config.resolved_precision() == zs.Precision("bf16", master="remainder")
    assert build_config(json.loads(config.to_json())) == config


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (torch.optim.AdamW, {"offload": {"optimizer": "host"}}, "offload rests optimizer elsewhere"),
    (torch.optim.AdamW, {"offload": {"grad": "host"}}, "offload rests grad elsewhere"),
    (
        partial(Lamb, lr=0.1),
        {"ownership": "whole"},
        "Lamb steps whole parameters on the device, and .* in parts",
    ),
    (torch.optim.Adafactor, {}, "Adafactor cannot be sharded"),
]


@pytest.mark.parametrize(("make", "options", "told"), BAD)
def test_what_has_no_remainders_is_one_clear_line(
    make: Any, options: dict[str, Any], told: str
) -> None:
    model = nn.Linear(8, 8)
    precision = zs.Precision("bf16", master="remainder")
    with pytest.raises(zs.ConfigError, match=told) as error:
        zs.shard(model, make(model.parameters()), precision=precision, **options)
    assert "\n" not in str(error.value)


def test_what_needs_masters_as_they_are_is_refused() -> None:
    _, _, engine = _engine("zero3", "remainder")
    with pytest.raises(zs.ConfigError, match="master= out of the precision"):
        zs.EMA(engine, decay=0.9)
    engine.close()
    model = make_model()
    optimizer = ScheduleFree(model.parameters())
    engine = zs.shard(model, optimizer, precision=zs.Precision("bf16", master="remainder"))
    with pytest.raises(zs.StateError, match="master= and moments= out of the precision"):
        optimizer.eval()
    engine.close()
