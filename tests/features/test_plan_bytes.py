"""The bytes at rest and on the wire that a plan says are those the engine reports: of every row,
tier, codec, fraction and optimizer, on three families of models and up to four ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import combinations, count, product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support import inside
from tests.support.families import FAMILIES, TINY
from tests.support.harness import run_ranks
from zeroshard.checkpoint.manifest import Manifest
from zeroshard.core.placement import Mesh, Scope, Tier
from zeroshard.core.policy import ROWS, Policy
from zeroshard.core.shares import WholeParameters, shares_of
from zeroshard.planner.durations import checkpoint_bytes
from zeroshard.planner.exact import LaidOut, rest_bytes, traffic_bytes, with_budget
from zeroshard.planner.modules import shape_of_module

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
MODELS = ("Llama", "GPT-2 (tied head)", "Mixtral (experts)")
MIXES = (
    (DEVICE, DEVICE, DEVICE),
    (DEVICE, DEVICE, HOST),
    (DEVICE, HOST, HOST),
    (HOST, HOST, HOST),
    (DEVICE, HOST, DISK),
    (DISK, DISK, DISK),
)
CODECS: tuple[dict[str, Any], ...] = (
    {},
    {"weight_codec": "int8"},
    {"grad_codec": "int4", "error_feedback": True},
    {"weight_codec": "fp8", "grad_codec": "fp8", "codec_block": 192},
    {"frozen_codec": "int4", "codec_block": 128},
    {"frozen_codec": "int8", "weight_codec": "int4", "grad_codec": "int8", "error_feedback": True},
    {"grad_codec": "bf16"},
)
RANKS = ((1, None), (2, None), (2, 1), (4, None), (4, 2))  # and how many of them form a node


class Bf16Adam(torch.optim.Optimizer):
    """AdamW whose moments are bf16, elementwise."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                for key in () if state else ("first", "second"):
                    state[key] = torch.zeros_like(param, dtype=torch.bfloat16)
                first = state["first"].float().lerp_(param.grad, 0.1)
                second = state["second"].float().lerp_(param.grad.square(), 0.01)
                param.sub_(first / (second.sqrt() + 1e-8), alpha=group["lr"])
                state["first"].copy_(first)
                state["second"].copy_(second)


@dataclass(frozen=True)
class Case:
    """One run; its fields are what a covering sample covers."""

    ranks: tuple[int, int | None]
    model: str
    row: str
    mix: int = 0
    codec: int = 0
    fraction: float = 1.0
    optimizer: str = "adam"
    precision: str = "bf16"
    accumulate: str = "fp32"
    shares: tuple[float, ...] | Literal["whole"] | None = None
    kept: float = 0.0  # what `accumulation_budget` holds of what whole gradients take beyond shards

    @property
    def is_possible(self) -> bool:
        """Whether ``zs.shard`` takes it."""
        try:
            ROWS[self.row].tiered(*MIXES[self.mix])
        except ValueError:
            return False
        codecs, (world, node_size) = CODECS[self.codec], self.ranks
        if "weight_codec" in codecs or "frozen_codec" in codecs:
            return ROWS[self.row].default.weight.scope is Scope.SHARD
        one_node = world > 1 and node_size is None
        return not (codecs.get("grad_codec") == "bf16" and one_node)

    @property
    def training(self) -> zs.Training:
        """What is planned."""
        return zs.Training(
            self.precision,
            self.accumulate,
            optimizer=self.optimizer,
            micro_batches=2,
            fraction=self.fraction,
            **CODECS[self.codec],
        )

    def build(self) -> nn.Module:
        """Return the model, partly frozen where a codec is about that."""
        model = FAMILIES[self.model].model(TINY)
        if "frozen_codec" in CODECS[self.codec]:
            frozen = ("attn", "embed", "wte") if "weight_codec" in CODECS[self.codec] else ("attn",)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not any(part in name for part in frozen))
        return model

    def optimize(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of what is trained."""
        trained = [one for one in model.parameters() if one.requires_grad]
        if self.optimizer == "adam-bf16":
            return Bf16Adam(trained)
        if self.optimizer == "adam":
            return torch.optim.AdamW(trained, lr=1e-3)
        momentum = 0.9 if self.optimizer == "momentum" else 0.0
        return torch.optim.SGD(trained, lr=1e-3, momentum=momentum)

    def offload(self, path: Path) -> zs.Offload:
        """Return the tiers, and the fraction where there are any."""
        weight, grad, optimizer = (tier.value for tier in MIXES[self.mix])
        away: dict[str, Any] = {} if self.mix == 0 else {"fraction": self.fraction}
        if DISK in MIXES[self.mix]:
            away["disk_path"] = str(path)
        return zs.Offload(weight=weight, grad=grad, optimizer=optimizer, **away)


def _compare(rank: int, world: int, cases: Sequence[Case], path: Path) -> list[Any]:
    """Train each case; return those of which the plan and the engine say something else."""
    return [(case, *pair) for case in cases for pair in _pairs(rank, case, path)]


def _sharded(
    case: Case,
    model: Any,
    optimizer: torch.optim.Optimizer,
    comm: zs.Comm,
    path: Path,
    budget: int | str | None = None,
) -> zs.Engine:
    return zs.shard(
        model,
        optimizer,
        policy=case.row,
        precision=zs.Precision(case.precision, accumulate=case.accumulate),
        offload=case.offload(path),
        comm=comm,
        shares=None if case.shares == "whole" else case.shares,
        ownership="whole" if case.shares == "whole" else None,
        accumulation_budget=budget,
    )


def _pairs(rank: int, case: Case, path: Path) -> list[tuple[str, Any, Any]]:
    """Train one case; return what was planned and what the engine reports where they differ."""
    (world, node_size), training, model = case.ranks, case.training, case.build()
    mesh, cut = Mesh.of(world, node_size), None
    if case.shares is not None:
        cut = WholeParameters() if case.shares == "whole" else shares_of(case.shares)
    laid_out = LaidOut(shape_of_module(model, training), mesh, training.align, cut)
    policy, family = ROWS[case.row].tiered(*MIXES[case.mix]), FAMILIES[case.model]
    optimizer = case.optimize(model)
    comm = zs.Comm(transport="gloo", node_size=node_size, **training.comm())
    if case.kept:
        training = replace(training, accumulation_budget=_budget(case.kept, laid_out, policy))
        policy = with_budget(laid_out, policy, training)
        assert policy.units
    engine = _sharded(case, model, optimizer, comm, path, training.accumulation_budget)
    whole = {name for name, cells in engine.policy.units.items() if cells.grad.is_partial}
    assert whole == set(policy.units), (case, whole)
    for step in range(2):  # the first one also sets up what later ones find
        inside.wait_published(engine)
        engine.reset_traffic()
        for micro in range(2):
            with nullcontext() if micro else engine.no_sync():
                family.loss(model, family.data(TINY, rank, 2 * step + micro)).backward()
        optimizer.step()
        optimizer.zero_grad()
        inside.wait_published(engine)
        report = engine.traffic()
    with engine.no_sync():
        family.loss(model, family.data(TINY, rank, 9)).backward()
    resting = {state: tiers for state, tiers in engine.memory().tiers.items() if tiers}
    engine.close()

    rest = rest_bytes(laid_out, policy, training, rank)
    planned = {s: {t.value: n for t, n in by.items()} for s, by in rest.items() if by}
    links = traffic_bytes(laid_out, policy, training, rank=rank)
    small = report.bytes.get("exchange", 0)
    between = sum(n for kind, n in report.between_nodes.items() if kind != "exchange")
    compared = (
        ("at rest", planned, resting),
        ("traffic", round(links.total), report.total - small),
        ("between nodes", round(links.between), between),
    )
    return [one for one in compared if one[1] != one[2]]


def _budget(kept: float, laid_out: LaidOut, policy: Policy) -> int:
    """Return the bytes (of fp32) that hold all shards, and `kept` of what whole gradients take
    beyond them, or the first unit at least.
    """
    sizes = [
        (sum(one.layout.numel for one in of), sum(one.held(policy.default.grad, 0) for one in of))
        for of in ([one for one in unit if one.group.trained] for unit in laid_out.by_unit)
    ]
    shards = sum(shard for _, shard in sizes)
    extras = [whole - shard for whole, shard in sizes if whole > shard]
    return 4 * (shards + max(min(extras), round(kept * sum(extras))))


def _every_case() -> list[Case]:
    """Return every row, tier, codec, model and number of ranks, with the other choices in turn."""
    dtypes = (("bf16", "fp32"), ("fp32", "fp32"), ("bf16", "bf16"))
    others = list(product((1.0, 0.4), ("adam", "momentum", "sgd", "adam-bf16"), dtypes))
    shapes = product(RANKS, MODELS, ROWS, range(len(MIXES)), range(len(CODECS)))
    chosen = (others[number % len(others)] for number in count())
    cases = [
        Case(*shape, fraction, optimizer, *dtypes)
        for shape, (fraction, optimizer, dtypes) in zip(shapes, chosen, strict=False)
    ]
    return [case for case in cases if case.is_possible]


@pytest.fixture(scope="module")
def covering() -> list[Case]:
    return _covering(_every_case())


def _covering(cases: Sequence[Case]) -> list[Case]:
    """Return some of `cases` in which each pair of ranks, model, row, tiers and codecs is found
    that is in any of them, and each fraction, optimizer and precision.
    """

    def choices(case: Case) -> set[tuple[Any, ...]]:
        alone = ("fraction", "optimizer", "precision", "accumulate", "shares")
        chosen = [(name, value) for name, value in vars(case).items() if name not in alone]
        return {*combinations(chosen, 2), *((name, getattr(case, name)) for name in alone)}

    found = {case: choices(case) for case in cases}
    left, out = set().union(*found.values()), []
    while left:
        needed = min(left, key=repr)
        having = [case for case in cases if needed in found[case]]
        out.append(max(having, key=lambda case: len(found[case] & left)))
        left -= found[out[-1]]
    return out


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(ranks, marks=pytest.mark.slow if ranks[0] == 4 else ()) for ranks in RANKS],
    ids=str,
)
def test_predicted_bytes_are_the_engines(
    ranks: tuple[int, int | None], covering: list[Case], tmp_path: Path
) -> None:
    cases = [case for case in covering if case.ranks == ranks]
    assert cases
    for differences in run_ranks(ranks[0], _compare, cases, tmp_path, timeout=1500):
        assert not differences, differences[0]


def _planned_and_held(rank: int, world: int) -> list[tuple[str, Any, Any]]:
    """Return what rests between micro-batches, as planned with defaults, and as the engine that is
    given the same options, or the written configuration, counts it.
    """
    family, machine, out = FAMILIES["Llama"], zs.Machine.of("CPU", gpus=world, node_size=world), []
    for name, precision in product(("ddp", "zero1", "zero3"), ("fp32", "bf16")):
        training = zs.Training(precision, micro_batches=2)
        plan = zs.plan(family.model(TINY), machine, training)
        laid_out = LaidOut(plan.model, machine.mesh, training.align)
        rest = rest_bytes(laid_out, ROWS[name], training, rank)
        planned = {s: {t.value: n for t, n in by.items()} for s, by in rest.items() if by}
        written = {**plan.config(), "policy": name}
        for given in ({"policy": name, "precision": precision}, {"config": written}):
            model = family.model(TINY)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            engine = zs.shard(model, optimizer, **given)
            family.loss(model, family.data(TINY, rank, 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            with engine.no_sync():
                family.loss(model, family.data(TINY, rank, 1)).backward()
            held = {state: tiers for state, tiers in engine.memory().tiers.items() if tiers}
            out.append((f"{precision}, {given}", planned, held))
            engine.close()
    return out


def test_a_plan_has_the_precision_that_shard_has_by_default() -> None:
    for of_rank in run_ranks(2, _planned_and_held):
        for options, planned, held in of_rank:
            assert planned == held, options


BUDGETED = [
    Case((2, None), MODELS[0], "zero2", kept=0.5),
    Case((2, None), MODELS[1], "zero3", mix=2, fraction=0.4, kept=0.3),
    Case((2, None), MODELS[2], "zero3", codec=3, kept=0.6),
    Case((2, None), MODELS[0], "zero3-keep", codec=2, kept=0.01),
    Case((2, 1), MODELS[0], "hpz", kept=0.5),
]


def test_predicted_bytes_are_the_engines_where_a_budget_keeps_whole_gradients(
    tmp_path: Path,
) -> None:
    for differences in run_ranks(2, _compare, BUDGETED, tmp_path):
        assert not differences, differences[0]


def test_a_gradient_of_padding_alone_is_held_by_no_reduce_under_way(tmp_path: Path) -> None:
    cases = [
        Case((4, None), MODELS[1], "zero2", mix=2, fraction=fraction, optimizer=name)
        for fraction, name in ((0.4, "adam"), (1.0, "momentum"))
    ]
    for differences in run_ranks(4, _compare, cases, tmp_path):
        assert not differences, differences[0]


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0.01, 0.5, 1.0])
def test_predicted_bytes_are_the_engines_where_a_budget_keeps_whole_gradients_of_four_ranks(
    kept: float, tmp_path: Path
) -> None:
    cases = [replace(case, ranks=(4, nodes)) for case in BUDGETED[:-1] for nodes in (None, 2)]
    cases += [Case((4, 2), model, row) for row in ("hpz", "mics", "hfsdp") for model in MODELS]
    cases = [replace(case, kept=kept) for case in cases]
    for differences in run_ranks(4, _compare, cases, tmp_path, timeout=600):
        assert not differences, differences[0]


def test_predicted_bytes_are_the_engines_where_ranks_own_whole_parameters(tmp_path: Path) -> None:
    rows = [("zero1", None), ("zero3", 2), ("mics", 2), ("hfsdp", 2)]
    cases = [Case((4, nodes), MODELS[0], row, shares="whole") for row, nodes in rows]
    cases += [
        Case((4, 2), MODELS[1], "zero3", codec=5, shares="whole"),
        Case((4, None), MODELS[1], "zero3", mix=3, fraction=0.4, shares="whole"),
        Case((4, None), MODELS[0], "zero2", mix=2, fraction=0.4, shares="whole"),
        Case((4, 2), MODELS[2], "zero3", mix=4, fraction=0.4, optimizer="momentum", shares="whole"),
        Case((4, None), MODELS[0], "zero2", shares="whole", kept=0.5),
    ]
    for differences in run_ranks(4, _compare, cases, tmp_path, timeout=300):
        assert not differences, differences[0]


@pytest.mark.slow
def test_predicted_bytes_are_the_engines_with_unequal_shares(tmp_path: Path) -> None:
    few, codes = (0.05, 0.0, 0.6, 0.35), 5
    rows = [(row, number % 2 * 2) for number, row in enumerate(ROWS) if row != "ddp"]
    cases = [
        Case((4, nodes or None), MODELS[0], row, fraction=1.0, precision="fp32", shares=few)
        for row, nodes in [*rows, *((row, 2 - nodes) for row, nodes in rows[-3:])]
    ]
    cases += [
        Case((4, 2), MODELS[0], "zero3", codec=codes, shares=few),
        Case((4, 2), MODELS[1], "zero3", mix=3, fraction=0.4, shares=few),
        Case((4, None), MODELS[1], "zero3", mix=4, optimizer="momentum", shares=few[::-1]),
    ]
    for differences in run_ranks(4, _compare, cases, tmp_path, timeout=300):
        assert not differences, differences[0]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("ranks", RANKS, ids=str)
def test_predicted_bytes_are_the_engines_in_every_case(
    ranks: tuple[int, int | None], model: str, tmp_path: Path
) -> None:
    cases = [case for case in _every_case() if (case.ranks, case.model) == (ranks, model)]
    for differences in run_ranks(ranks[0], _compare, cases, tmp_path, timeout=1500):
        assert not differences, differences[0]


def _saved_and_planned(rank: int, world: int, path: Path) -> list[tuple[str, int, int]]:
    """Save checkpoints; return what this rank has written of parameters and optimizer state, and
    what was planned, of each.
    """
    out = []
    for number, case in enumerate(
        (
            Case((world, None), "GPT-2 (tied head)", "zero3"),
            Case((world, None), "Llama", "ddp", optimizer="momentum", precision="fp32"),
            Case((world, None), "Llama", "zero3", codec=5, mix=5, fraction=0.4, optimizer="sgd"),
            Case((world, None), "GPT-2 (tied head)", "zero1", mix=1, optimizer="adam-bf16"),
        )
    ):
        training, model, family = case.training, case.build(), FAMILIES[case.model]
        laid_out = LaidOut(shape_of_module(model, training), Mesh(1, world), training.align)
        optimizer = case.optimize(model)
        engine = _sharded(case, model, optimizer, zs.Comm(**training.comm()), path)
        family.loss(model, family.data(TINY, rank, 0)).backward()
        optimizer.step()
        step = zs.save(path / str(number), engine, step=1)
        engine.close()
        manifest = Manifest.parse((step / "manifest.json").read_bytes(), "")
        sizes = [(step / file.name).stat().st_size - file.header_bytes for file in manifest.files]
        for entry in manifest.tensors:  # of random generators
            sizes[entry.file] -= entry.num_bytes if entry.parameter is None else 0
        out.append((f"{case} of all", sum(sizes), checkpoint_bytes(laid_out, training)))
        out.append((f"{case}", sizes[rank], checkpoint_bytes(laid_out, training, rank)))
    return out


def test_a_checkpoint_has_the_bytes_that_were_planned(tmp_path: Path) -> None:
    for of_rank in run_ranks(2, _saved_and_planned, tmp_path):
        for case, written, planned in of_rank:
            assert written == planned > 0, case


@dataclass(frozen=True)
class LeafCase:
    """One run with leaves."""

    world: int
    row: str
    leaves: int | str
    precision: str = "bf16"
    mix: int = 0
    node_size: int | None = None


LEAF_CASES = [
    LeafCase(2, "ddp", 8),  # ranks add up their own leaves
    LeafCase(2, "zero1", 8, "fp32"),
    LeafCase(2, "zero1", 6),  # 0 to 2 are no node of the tree
    LeafCase(2, "zero1", "2x3", mix=2),
    LeafCase(2, "zero2", 8, mix=2),
    LeafCase(2, "zero3", 7),
    LeafCase(2, "zero3", 8, node_size=1),
    LeafCase(2, "zero3-keep", 2),
    LeafCase(3, "ddp", 8),
    LeafCase(3, "zero2", 8, "fp32"),
    LeafCase(3, "zero3", "3x2", mix=3),
    LeafCase(3, "zero1", "3x2"),
    LeafCase(3, "hpz", 8, node_size=1),
    LeafCase(3, "mics", 7, node_size=3),
    LeafCase(4, "zero3", 8, node_size=2),
    LeafCase(4, "mics", 7, node_size=2),  # the last round goes flat
    LeafCase(4, "zero1", 8, "fp32", node_size=2),
]


def _leaf_pairs(rank: int, world: int, cases: Sequence[LeafCase], path: Path) -> list[Any]:
    """Train each case; return what was planned and what the engine reports where they differ."""
    out = []
    for case in cases:
        family, mix = FAMILIES[MODELS[0]], MIXES[case.mix]
        plain = Case(
            (world, case.node_size), MODELS[0], case.row, case.mix, precision=case.precision
        )
        training = replace(plain.training, leaves=case.leaves).on(world)
        model, mesh = plain.build(), Mesh.of(world, case.node_size)
        laid_out = LaidOut(shape_of_module(model, training), mesh, training.align)
        policy, optimizer = ROWS[case.row].tiered(*mix), plain.optimize(model)
        engine = zs.shard(
            model,
            optimizer,
            policy=case.row,
            precision=case.precision,
            offload=plain.offload(path),
            comm=zs.Comm(transport="gloo", node_size=case.node_size),
            leaves=case.leaves,
        )
        most: dict[str, int] = {}
        for step in range(2):
            inside.wait_published(engine)
            engine.reset_traffic()
            for leaf in engine.leaves(step):
                engine.backward(family.loss(model, family.data(TINY, leaf, step)))
                inside.wait_reduced(engine)
                held = engine.memory().tiers["grad"]
                most = max(most, held, key=lambda tiers: sum(tiers.values()))
            optimizer.step()
            optimizer.zero_grad()
            inside.wait_published(engine)
            report = engine.traffic()
        engine.close()
        rest = rest_bytes(laid_out, policy, training, rank)["grad"]
        planned = {tier.value: num_bytes for tier, num_bytes in rest.items()}
        links = traffic_bytes(laid_out, policy, training, rank=rank)
        between = sum(n for kind, n in report.between_nodes.items() if kind != "exchange")
        compared = (
            ("at rest", planned, most),
            ("traffic", round(links.total), report.total - report.bytes.get("exchange", 0)),
            ("between nodes", round(links.between), between),
        )
        out += [(case, *one) for one in compared if one[1] != one[2]]
    return out


@pytest.mark.parametrize("world", [2, 3, 4])
def test_predicted_bytes_are_the_engines_with_leaves(world: int, tmp_path: Path) -> None:
    cases = [case for case in LEAF_CASES if case.world == world]
    for differences in run_ranks(world, _leaf_pairs, cases, tmp_path, timeout=200):
        assert not differences, differences


def test_a_plan_counts_leaves_over_all_gpus() -> None:
    def planned(gpus: int, **training: Any) -> dict[str, Any]:
        machine = zs.Machine.of("A100-80", gpus=gpus)
        plan = zs.plan("1.3B", machine, zs.Training(**training))
        assert plan.config().get("leaves") == training.get("leaves")
        return {row.row: row for row in plan.rows if set(row.tiers.values()) == {"device"}}

    # in turn: gathers and reduces are those of as many micro-batches outside no_sync()
    alike, plain = planned(8, leaves=32), planned(8, micro_batches=4)
    assert alike["zero3"].traffic_bytes == plain["zero3"].traffic_bytes
    slices = alike["zero3"].peak_bytes["device"] - plain["zero3"].peak_bytes["device"]
    fp32 = 4 * 1.3e9 / 8  # 0 to 15, and 16 to 23
    assert slices == pytest.approx(1.05 * fp32, rel=0.05)
    assert alike["zero3"].tokens_per_s == pytest.approx(plain["zero3"].tokens_per_s)
    # each rank adds up its own, and sums in fp32 are reduced once
    moved = [sum(rows["zero1"].traffic_bytes.values()) for rows in (alike, plain)]
    assert moved[0] / moved[1] == pytest.approx(1.5, rel=0.01)
    uneven = planned(8, leaves=33)
    assert uneven["zero3"].spread.micro_batches == 5
    with pytest.raises(zs.ConfigError, match="leaves=4 gives 4 micro-batches to 8"):
        planned(8, leaves=4)
    with pytest.raises(zs.ConfigError, match="leaves=8 fixes the bits"):
        planned(2, leaves=8, grad_codec="int8")
    with pytest.raises(zs.ConfigError, match="leaves='3x'"):
        planned(2, leaves="3x")
    with pytest.raises(zs.ConfigError, match="leaves are planned for data parallel ranks alone"):
        zs.plan("1.3B", zs.Machine.of(gpus=8), zs.Training(leaves=8), axes=zs.Axes(tp=2))
