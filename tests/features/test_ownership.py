"""Ranks that own whole parameters (``ownership="whole"``): the bits of every row, and optimizers
that go by whole parameters with the bits of one process.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.fuzz.optimizers import Hybrid, Lamb
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import leaf_loss, plainly_trained, resumed, train
from zeroshard.optim.copies import unhooked_step

FLAT_ROWS = ("ddp", "zero1", "zero2", "zero3", "zero3-keep")
NODE_ROWS = ("hpz", "mics", "hfsdp")
STEPS, LEAVES = 4, 12


def _muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.02)


def _hybrid(params: Any) -> torch.optim.Optimizer:
    first, *others = params
    groups = [{"params": [first], "weight_decay": 0.1}, {"params": others}]
    return Hybrid(groups, lr=0.02)  # one rank has a part of the first group, the others nothing


RULES: dict[str, Any] = {
    "muon": _muon,
    "lamb": functools.partial(Lamb, lr=0.01),
    "hybrid": _hybrid,
}


def _emerging(name: str, params: Any) -> torch.optim.Optimizer:
    pytest.importorskip("emerging_optimizers")  # from Python 3.12 on
    from emerging_optimizers import orthogonalized_optimizers, registry, soap  # noqa: F401

    return registry.get_optimizer_cls(name)(params, lr=0.02)  # type: ignore[no-any-return]


EMERGING = {f"emerging {name}": functools.partial(_emerging, name) for name in ("muon", "soap")}
ANY_RULE: dict[str, Any] = {
    **RULES,
    **EMERGING,
    "adamw": functools.partial(torch.optim.AdamW, lr=0.01),
}


def _make(rule: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    bias = rule not in ("muon", *EMERGING)  # they take matrices alone
    layers = [nn.Linear(40, 72, bias), nn.Tanh(), nn.Linear(72, 72, bias), nn.Linear(72, 24, bias)]
    model = nn.Sequential(*layers)
    last = model[3].weight  # it lies column by column
    model[3].weight = nn.Parameter(last.detach().t().contiguous().t())
    return model, ANY_RULE[rule](model.parameters())


def _batch(step: int) -> torch.Tensor:
    return torch.randn(LEAVES, 40, generator=torch.Generator().manual_seed(step))


def _plain(rule: str, steps: int = STEPS, late: int | None = None) -> list[torch.Tensor]:
    """Return the weights after `steps` of torch alone, with the gradients of an engine's leaves."""
    (model, optimizer), (passes, _) = _make(rule), _make(rule)
    return plainly_trained(model, passes, steps, LEAVES, leaf_loss, optimizer.step, late=late)


def _train(
    rank: int,
    world: int,
    rule: str,
    row: str,
    steps: int = STEPS,
    folder: Path | None = None,
    comm: zs.Comm | None = None,
) -> tuple[list[torch.Tensor], list[int]]:
    """Train from what `folder` holds, and save there; return all weights, and what this rank owns
    of each parameter.
    """
    model, optimizer = _make(rule)
    options: Any = {"units": [nn.Linear], "ownership": "whole", "comm": comm}
    engine = zs.shard(model, optimizer, policy=row, leaves=LEAVES, **options)
    for step in range(resumed(folder, engine), steps):
        for leaf in engine.leaves(step):
            engine.backward(leaf_loss(model, step, leaf))
        optimizer.step()
        optimizer.zero_grad()
    if folder is not None:
        zs.save(folder, engine, step=steps)
    owned = [piece.numel() for group in optimizer.param_groups for piece in group["params"]]
    full = engine.full_state_dict(rank0_only=False)
    engine.close()
    return [full[name] for name, _ in _make(rule)[0].named_parameters()], owned


@pytest.mark.parametrize("rule", RULES)
def test_optimizers_of_whole_parameters_have_the_bits_of_one_process(rule: str) -> None:
    expected, sizes = _plain(rule), {p.numel() for p in _make(rule)[0].parameters()}
    for world, row in ((1, "zero3"), (2, "zero1"), (2, "zero3"), (3, "zero2"), (3, "zero3-keep")):
        ranks = run_ranks(world, _train, rule, row)
        for found, owned in ranks:
            assert all(map(torch.equal, found, expected)), (world, row)
            assert set(owned) <= {0, *sizes}
        assert sum(sum(owned) for _, owned in ranks) == sum(p.numel() for p in expected)


@pytest.mark.slow
@pytest.mark.parametrize("rule", EMERGING)
def test_emerging_optimizers_have_them_and_go_on_on_other_ranks(rule: str, tmp_path: Path) -> None:
    expected = _plain(rule)
    for world, row, steps in ((2, "zero3", 1), (3, "zero1", 2), (1, "zero3", 3), (2, "ddp", STEPS)):
        ranks = run_ranks(world, _train, rule, row, steps, tmp_path)
    assert all(map(torch.equal, ranks[0][0], expected))


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shared_memory", "gloo"])
@pytest.mark.parametrize("rule", RULES)
def test_they_do_in_every_row_with_nodes(rule: str, transport: str) -> None:
    expected, comm = _plain(rule), zs.Comm(transport=transport, node_size=2)
    for row in NODE_ROWS:
        ranks = run_ranks(4, _train, rule, row, STEPS, None, comm)
        assert all(map(torch.equal, ranks[0][0], expected)), row


@pytest.mark.parametrize("rule", ["muon", "lamb"])
def test_they_go_on_from_a_checkpoint_in_any_row_on_any_number_of_ranks(
    rule: str, tmp_path: Path
) -> None:
    expected = _plain(rule)
    plan = ((2, "zero3", 1), (3, "zero1", 2), (1, "zero3", 3), (2, "ddp", STEPS))
    for world, row, steps in plan:
        ranks = run_ranks(world, _train, rule, row, steps, tmp_path)
    assert all(map(torch.equal, ranks[0][0], expected))


def _explained(rank: int, world: int, rule: str, row: str) -> tuple[Any, list[list[int]], str]:
    """Return what the engine says of its optimizer before and after a step, and what is there."""
    model, optimizer = _make(rule)
    whole: Any = {} if rule == "adamw" else {"ownership": "whole"}
    engine = zs.shard(model, optimizer, policy=row, units=[nn.Linear], **whole)
    before = engine.explain_optimizer().to_dict()
    engine.backward(model(_batch(0)).square().mean())
    optimizer.step()
    owned = [[p.numel() for p in group["params"] if p.numel()] for group in optimizer.param_groups]
    after = engine.explain_optimizer()
    assert after.to_dict() == before
    engine.close()
    with pytest.raises(zs.StateError, match="closed"):
        engine.explain_optimizer()
    return before, owned, str(after)


KINDS = {"muon": "matrix", "lamb": "per tensor", "hybrid": "matrix", "adamw": "elementwise"}


@pytest.mark.parametrize("rule", KINDS)
def test_an_engine_explains_its_optimizer(rule: str) -> None:
    for world, row in ((3, "zero1"), (2, "ddp")):
        ranks = run_ranks(world, _explained, rule, row)
        for rank, (told, owned, text) in enumerate(ranks):
            assert told["rank"] == rank and told["groups"] == ranks[0][0]["groups"]
            for group, sizes in zip(told["groups"], owned, strict=True):
                assert group["kind"] == KINDS[rule]
                assert group["known_by"] == ("table" if rule in ("muon", "adamw") else "probe")
                assert group["parameters"][rank] == len(sizes)
                assert group["elements"][rank] == sum(sizes)
                assert group["largest"][rank] == max(sizes, default=0)
                mean = sum(group["elements"]) / world
                assert group["imbalance"] == pytest.approx(max(group["elements"]) / mean)
                assert group["state_bytes"] == (8 if rule in ("lamb", "adamw") else 4)
                assert group["step_bytes"] == 0
                assert f"{sum(sizes):,}" in text and group["why"] in text
    (group,) = ranks[0][0]["groups"][:1]  # ddp: every rank steps everything
    assert group["imbalance"] == 1 and group["cost_imbalance"] in (None, 1)


def test_the_products_of_matrices_are_what_ranks_are_compared_by() -> None:
    told = run_ranks(2, _explained, "muon", "zero3")[0][0]["groups"][0]
    # of the layers, the middle one on a rank alone: products with squares of the smaller side, and
    # of these, as whole_by_cost deals them out and a plan counts them
    costs = [2 * side * side * other + side**3 for side, other in ((40, 72), (72, 72), (24, 72))]
    assert told["elements"] == (40 * 72 + 72 * 24, 72 * 72)
    assert told["cost_imbalance"] == pytest.approx(2 * costs[1] / sum(costs))


def _counted(rank: int, world: int, whole: bool) -> tuple[int, int, int]:
    """Return what this rank owns of the elements, and the bytes that it received and rests."""
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias=False) for a, b in ((128, 96), (96, 192), (192, 64))]
    model = nn.Sequential(*layers)  # no part is padded
    optimizer = torch.optim.AdamW(model.parameters())
    options: Any = {"ownership": "whole"} if whole else {}
    engine = zs.shard(
        model, optimizer, units=[nn.Linear], comm=zs.Comm(transport="gloo"), **options
    )
    for _ in range(2):
        engine.reset_traffic()
        model(torch.ones(1, 128)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    moved, own = engine.traffic(), engine.explain_optimizer().groups[0].elements[rank]
    received = sum(size for kind, size in moved.bytes.items() if kind != "exchange")
    at_rest = engine.memory().total
    engine.close()
    return own, received, at_rest


@pytest.mark.parametrize("world", [2, 3, 4])
def test_owned_and_equal_parts_move_and_rest_the_same_in_sum(world: int) -> None:
    """Ranks with a share s of W bytes receive (1 - s) W in each of two gathers and s (N - 1) W in
    the sums of gradients, and rest s of everything (docs/optimizers.md).
    """
    numel, sums = 128 * 96 + 96 * 192 + 192 * 64, []
    for whole in (True, False):
        ranks = run_ranks(world, _counted, whole)
        for own, received, at_rest in ranks:
            assert received == 4 * (2 * (numel - own) + own * (world - 1))
            assert at_rest == 12 * own  # weights that are masters, and two moments
        sums.append([sum(column) for column in zip(*ranks, strict=True)])
        assert (len({own for own, _, _ in ranks}) > 1) is whole
    assert sums[0] == sums[1] == [numel, 12 * numel * (world - 1), 12 * numel]


class MyAdamW(torch.optim.AdamW):
    """Of a class that is not known."""


@on_ranks(2)
def test_an_optimizer_is_explained_off_the_device_and_after_a_repartition(rank: int) -> None:
    model = _make("adamw")[0]
    optimizer = MyAdamW(model.parameters())
    offload = {"optimizer": "host", "delayed_update": 0}
    engine = zs.shard(model, optimizer, units=[nn.Linear], offload=offload)
    for changes in ({}, {"stage": 1, "offload": {}}, {"stage": 3, "shares": [0.25, 0.75]}):
        if changes:
            engine.repartition(**changes)
        model(_batch(0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        (group,) = engine.explain_optimizer().groups
        assert (group.kind, group.known_by, group.state_bytes) == ("elementwise", "probe", 8)
        owned = engine.memory().at_rest["optimizer"] // 8
        assert abs(owned - group.elements[rank]) < 64 * 6  # off the device, paddings rest
        assert sum(group.elements) == sum(p.numel() for p in _make("adamw")[0].parameters())
    assert group.imbalance == pytest.approx(1.5, rel=0.02)
    engine.close()


@on_ranks(1)
def test_an_engine_without_an_optimizer_explains_none(rank: int) -> None:
    engine = zs.shard(nn.Linear(4, 4))
    with pytest.raises(zs.StateError, match=r"explain_optimizer.*no optimizer"):
        engine.explain_optimizer()
    engine.close()


@on_ranks(2)
def test_an_engine_is_laid_out_anew_between_steps(rank: int, tmp_path: Path) -> None:
    model, optimizer = _make("lamb")
    engine = zs.shard(model, optimizer, leaves=LEAVES, units=[nn.Linear], ownership="whole")
    for step in range(STEPS):
        for leaf in engine.leaves(step):
            engine.backward(leaf_loss(model, step, leaf))
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            with pytest.raises(zs.ConfigError, match="both say what each rank owns"):
                engine.repartition(shares=[0.5, 0.5])
        engine.repartition(stage=(1, 3, 2, 3)[step])
    full = engine.full_state_dict(rank0_only=False)
    engine.close()
    expected = dict(zip(dict(model.named_parameters()), _plain("lamb"), strict=True))
    assert all(torch.equal(full[name], weight) for name, weight in expected.items())


class Raises(Lamb):
    """LAMB that fails before its end where it is told to."""

    fails = False

    def step(self, closure: Any = None) -> None:
        unhooked_step(Lamb)(self)
        if self.fails:
            raise ZeroDivisionError


@on_ranks(2)
def test_a_step_that_raises_is_given_up_and_a_load_goes_on(rank: int, tmp_path: Path) -> None:
    model, _ = _make("lamb")
    optimizer = Raises(model.parameters(), lr=0.01)
    engine = zs.shard(model, optimizer, leaves=LEAVES, units=[nn.Linear], ownership="whole")
    step, fails = 0, [2]
    while step < STEPS:
        for leaf in engine.leaves(step):
            engine.backward(leaf_loss(model, step, leaf))
        optimizer.fails = step in fails
        if step in fails:
            with pytest.raises(ZeroDivisionError):
                optimizer.step()
            engine.reset()
            zs.save(tmp_path / "given up", engine, step=1)
            assert all(
                piece.dim() == 1 for group in optimizer.param_groups for piece in group["params"]
            )
            optimizer.fails = False  # also for the load, which tries out a copy
            step = zs.load(tmp_path, engine).step
            fails.clear()
            continue
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        zs.save(tmp_path, engine, step=step)
    full = engine.full_state_dict(rank0_only=False)
    engine.close()
    names = [name for name, _ in _make("lamb")[0].named_parameters()]
    assert all(map(torch.equal, [full[name] for name in names], _plain("lamb")))


def _rows(
    rank: int, world: int, rows: tuple[str, ...], cases: list[dict[str, Any]], comm: zs.Comm
) -> list[str]:
    expected, out = train(rank, "zero1", STEPS, comm=comm), []
    for row in rows:
        for case in cases:
            run = train(rank, row, STEPS, ownership="whole", **{"comm": comm, **case})
            out += [f"{row} {case}: {text}" for text in run.differs_from(expected)]
    return out


def test_an_elementwise_optimizer_has_the_bits_of_equal_parts() -> None:
    offload = {"offload": {"optimizer": "host", "weight": "host", "fraction": 0.5}}
    cases = [{}, {"comm": zs.Comm(transport="gloo")}]
    for found in run_ranks(2, _rows, FLAT_ROWS, cases, zs.Comm()):
        assert found == []
    for found in run_ranks(2, _rows, ("zero3",), [offload], zs.Comm()):
        assert found == []


def test_and_in_rows_with_nodes() -> None:
    comm = zs.Comm(node_size=2)
    for found in run_ranks(4, _rows, NODE_ROWS, [{}], comm):
        assert found == []


@on_ranks(2)
@pytest.mark.parametrize(
    ("ownership", "owned"), [("whole", (9216, 12_288)), ("whole_by_cost", (13_312, 8192))]
)
def test_ranks_share_elements_or_the_products_of_muon(
    rank: int, ownership: Any, owned: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    sizes = [*[8] * 18, *[64] * 3]  # products per element: 17 of a thin one, 192 of a square
    model = nn.Sequential(*(nn.Linear(64, size, bias=False) for size in sizes))
    optimizer = _muon(model.parameters())
    engine = zs.shard(model, optimizer, units=[nn.Sequential], ownership=ownership)
    pieces = [piece.numel() for group in optimizer.param_groups for piece in group["params"]]
    engine.close()
    assert sum(pieces) == owned[rank]


class Global(torch.optim.SGD):
    """Clips by the norm of all that it sees."""

    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grads_with_norm_([p for g in self.param_groups for p in g["params"]], 0.1,
                                       torch.nn.utils.get_total_norm(grads))  # fmt: skip
        return super().step(closure)


BAD: list[tuple[Any, dict[str, Any], str]] = [
    (_muon, {}, r"Muon cannot be sharded: .* with shard\(ownership='whole'\)"),
    (torch.optim.Adafactor, {}, r"Adafactor cannot be .* column.* with shard\(ownership='whole'\)"),
    (torch.optim.LBFGS, {"ownership": "whole"}, "dot products over all parameters"),
    (functools.partial(Global, lr=1), {"ownership": "whole"}, "numbers of all parameters together"),
    (torch.optim.AdamW, {"ownership": "whole", "shares": [1.0]}, "leave one of them out"),
    (torch.optim.AdamW, {"ownership": "half"}, "ownership"),
    (torch.optim.AdamW, {"ownership": "whole_by_cost"}, "AdamW computes none: use ownership="),
    (torch.optim.AdamW, {"ownership": "whole", "policy": "auto"}, "without shares, ownership"),
]


@pytest.mark.parametrize(("make", "options", "told"), BAD)
def test_what_cannot_be_owned_is_one_clear_line(
    make: Any, options: dict[str, Any], told: str
) -> None:
    model = nn.Linear(8, 8, bias=False)
    with pytest.raises(zs.ConfigError, match=told) as error:
        zs.shard(model, make(model.parameters()), **options)
    assert "\n" not in str(error.value)
