"""Several optimizers over one model: ``zs.shard(model, [muon, adamw])`` has the bits of both in
plain torch, and ``[sgd(a), sgd(b)]`` the bits of one SGD with two param groups, whatever else is
used.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.features.test_whole_states import Odd
from tests.fuzz.optimizers import Lamb
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import plainly_trained, resumed
from zeroshard import deepspeed
from zeroshard.deepspeed import optimizers

STEPS, LEAVES, CLIP = 4, 12, 0.05
Optimizers = list[torch.optim.Optimizer]


class Tied(nn.Module):
    """A head that shares its weight with the embedding, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(24, 40)
        self.first, self.norm, self.last = nn.Linear(40, 72), nn.LayerNorm(72), nn.Linear(72, 40)
        self.frozen = nn.Linear(40, 40, bias=False).requires_grad_(False)
        self.head = nn.Linear(40, 24, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.ones(()))
        last = self.last.weight  # it lies column by column
        self.last.weight = nn.Parameter(last.detach().t().contiguous().t())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out = self.frozen(self.emb(tokens))
        out = self.last(self.norm(self.first(out)).tanh()) * self.scale
        return nn.functional.cross_entropy(self.head(out).flatten(0, -2), tokens.flatten())


def _model() -> Tied:
    torch.manual_seed(0)
    return Tied()


def _parts(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices, without the embedding that is the head, too, and the rest."""
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.ndim == 2 and "emb" not in name]
    rest = [p for p in named.values() if not any(p is one for one in matrices)]
    return matrices, sorted(rest, key=lambda p: -p.ndim)  # the embedding first


def _muon(model: nn.Module) -> Optimizers:
    matrices, rest = _parts(model)
    biases = [p for p in rest if p.ndim < 2]
    groups = [{"params": [p for p in rest if p.ndim == 2]}, {"params": biases, "weight_decay": 0.0}]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(groups, lr=0.01)]


def _sgd(model: nn.Module) -> Optimizers:
    matrices, rest = _parts(model)
    return [torch.optim.SGD(rest, lr=0.1, momentum=0.9), torch.optim.AdamW(matrices, lr=0.01)]


def _three(model: nn.Module) -> Optimizers:
    matrices, (emb, *rest) = _parts(model)
    return [Lamb([emb], lr=0.01), torch.optim.Muon(matrices), torch.optim.RAdam(rest, lr=0.01)]


MAKE: dict[str, Any] = {"muon": _muon, "sgd": _sgd, "three": _three}
WHOLE = ("muon", "three")


def _schedulers(optimizers: Optimizers) -> list[Any]:
    first, *others = optimizers
    return [
        torch.optim.lr_scheduler.StepLR(first, 1, gamma=0.5),
        *(torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (step + 1)) for one in others),
    ]


def _batch(step: int) -> torch.Tensor:
    return torch.randint(24, (LEAVES, 5), generator=torch.Generator().manual_seed(step))


def _loss(model: nn.Module, step: int, leaf: int) -> torch.Tensor:
    loss: torch.Tensor = model(_batch(step)[leaf : leaf + 1])
    return loss


@functools.cache
def _plain(kind: str, steps: int = STEPS) -> list[torch.Tensor]:
    """Return the weights after `steps` of torch alone, with the clipped gradients of an engine's
    leaves.
    """
    model = _model()
    optimizers = MAKE[kind](model)
    schedulers = _schedulers(optimizers)

    def take() -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        total = nn.utils.get_total_norm(grads)  # over the parameters of all
        assert float(total) == pytest.approx(CLIP, rel=1e-4)
        for one in [*optimizers, *schedulers]:
            one.step()

    return plainly_trained(model, _model(), steps, LEAVES, _loss, take, clip=CLIP)


def _train(
    rank: int,
    world: int,
    kind: str,
    row: str,
    steps: int = STEPS,
    folder: Path | None = None,
    given: dict[str, Any] | None = None,
) -> list[torch.Tensor]:
    """Train from what `folder` holds, and save there; return all weights."""
    model = _model()
    optimizers = MAKE[kind](model)
    options: Any = {"ownership": "whole" if kind in WHOLE else None} | (given or {})
    engine = zs.shard(model, optimizers, policy=row, leaves=LEAVES, units=[nn.Linear], **options)
    schedulers = _schedulers(optimizers)
    states = {f"scheduler {index}": one for index, one in enumerate(schedulers)}
    for step in range(resumed(folder, engine, states=states), steps):
        for leaf in engine.leaves(step):
            engine.backward(model(_batch(step)[leaf : leaf + 1]))
        engine.clip_grad_norm_(CLIP)
        for one in reversed(optimizers) if step % 2 else optimizers:
            one.step()
        for one in schedulers:
            one.step()
        for one in optimizers:
            one.zero_grad()
    if folder is not None:
        zs.save(folder, engine, step=steps, states=states)
    full = engine.full_state_dict(rank0_only=False)
    engine.close()
    assert all(map(torch.equal, [full[name] for name, _ in model.named_parameters()],
                   model.parameters()))  # fmt: skip
    assert [id(p) for one in optimizers for g in one.param_groups for p in g["params"]] == [
        id(p) for one in MAKE[kind](model) for g in one.param_groups for p in g["params"]
    ]
    return [full[name] for name, _ in model.named_parameters()]


@pytest.mark.parametrize("kind", MAKE)
def test_several_optimizers_have_the_bits_of_plain_torch(kind: str) -> None:
    expected = _plain(kind)
    rows = ((1, "zero3"), (2, "ddp"), (2, "zero1"), (2, "zero3"), (3, "zero2"), (3, "zero3-keep"))
    for world, row in rows:
        for found in run_ranks(world, _train, kind, row):
            assert all(map(torch.equal, found, expected)), (world, row)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MAKE)
def test_they_do_in_every_row_with_nodes(kind: str) -> None:
    expected, options = _plain(kind), {"comm": zs.Comm(node_size=2)}
    for row in ("hpz", "mics", "hfsdp"):
        ranks = run_ranks(4, _train, kind, row, STEPS, None, options)
        assert all(map(torch.equal, ranks[0], expected)), row


OFFLOADED: tuple[dict[str, Any], ...] = (
    {"optimizer": "host", "weight": "host", "fraction": 0.5},
    {"optimizer": "host"},
    {"optimizer": "host", "grad": "host", "step_in_backward": True},
    {"optimizer": "disk", "disk_path": ""},
)


@pytest.mark.parametrize("kind", ["muon", "sgd"])
@pytest.mark.parametrize("case", range(len(OFFLOADED)))
def test_they_step_where_their_states_rest(case: int, kind: str, tmp_path: Path) -> None:
    offload = OFFLOADED[case] | (
        {"disk_path": str(tmp_path)} if "disk_path" in OFFLOADED[case] else {}
    )
    for found in run_ranks(2, _train, kind, "zero3", STEPS, None, {"offload": offload}):
        assert all(map(torch.equal, found, _plain(kind)))


@pytest.mark.parametrize("kind", ["muon", "sgd"])
def test_they_go_on_from_a_checkpoint_in_any_row_on_any_number_of_ranks(
    kind: str, tmp_path: Path
) -> None:
    for world, row, steps in ((2, "zero3", 1), (3, "zero1", 2), (1, "zero3", 3), (2, "ddp", STEPS)):
        ranks = run_ranks(world, _train, kind, row, steps, tmp_path)
    assert all(map(torch.equal, ranks[0], _plain(kind)))


@pytest.mark.parametrize("kind", ["muon", "sgd"])
@on_ranks(2)
def test_an_engine_is_laid_out_anew_between_steps(rank: int, kind: str) -> None:
    model = _model()
    optimizers = MAKE[kind](model)
    ownership: Any = "whole" if kind in WHOLE else None
    engine = zs.shard(model, leaves=LEAVES, units=[nn.Linear], ownership=ownership)
    engine.attach(optimizers)
    schedulers = _schedulers(optimizers)
    for step in range(STEPS):
        for leaf in engine.leaves(step):
            engine.backward(model(_batch(step)[leaf : leaf + 1]))
        engine.clip_grad_norm_(CLIP)
        for one in [*optimizers, *schedulers]:
            one.step()
        for one in optimizers:
            one.zero_grad()
        offload = {"offload": {"optimizer": "host"}} if kind == "sgd" and step == 1 else {}
        engine.repartition(stage=(1, 3, 2, 3)[step], **offload)
    full = engine.full_state_dict(rank0_only=False)
    engine.close()
    named = dict(zip(dict(model.named_parameters()), _plain(kind), strict=True))
    assert all(torch.equal(full[name], weight) for name, weight in named.items())


# ------------------------------------------------------------- as one optimizer with as many groups

FP16 = {"precision": "fp16"}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "fp16": FP16,
    "late": {"offload": {"optimizer": "host", "delayed_update": 1}},
    "codec": {"comm": {"weight_codec": "int8"}, "precision": "bf16"},
    "whole": {"ownership": "whole", "precision": "bf16"},
}


def _as_one(
    rank: int, world: int, row: str, feature: str, several: bool, uneven: bool
) -> dict[str, Any]:
    """Train by SGD over two groups, or by two; with averages, `uneven` numbers of batches, and a
    gradient that is not finite in fp16. Return what has come of it.
    """
    model = _model()
    matrices, rest = _parts(model)
    first = {"params": matrices, "lr": 0.1, "momentum": 0.9}
    second = {"params": rest, "lr": 0.05, "momentum": 0.0, "weight_decay": 0.1}
    optimizers: Optimizers = [torch.optim.SGD([first, second])]
    if several:
        optimizers = [torch.optim.SGD([first]), torch.optim.SGD([second])]
    engine = zs.shard(
        model, optimizers, policy=row, gradient_clipping=CLIP, **FEATURES[feature]
    )  # fmt: skip
    averages = [] if feature == "late" else [zs.EMA(engine, 0.9)]
    with engine.join() if uneven else nullcontext():
        for step in range(6 - 2 * rank * uneven):
            for is_last in (False, True):
                tokens = _batch(7 * step + 2 * rank + is_last)
                with nullcontext() if is_last else engine.no_sync():
                    bad = feature == "fp16" and step == 2 and rank == 0
                    engine.backward(model(tokens) * (float("inf") if bad else 1.0))
            for one in optimizers:
                one.step()
                for group in one.param_groups:  # as a scheduler does
                    group["lr"] *= 0.9
            for ema in averages:
                ema.update()
            for one in optimizers:
                one.zero_grad()
    out: dict[str, Any] = engine.full_state_dict(rank0_only=False)
    for ema in averages:
        with ema.swapped():
            average = engine.full_state_dict(rank0_only=False)
        out |= {f"average of {name}": one for name, one in average.items()}
    out |= {"scale": engine.loss_scale, "skipped": engine.steps_skipped}
    engine.close()
    return out


@pytest.mark.parametrize("feature", FEATURES)
@on_ranks(2)
def test_two_of_a_class_do_what_one_with_two_groups_does(
    rank: int, world: int, feature: str
) -> None:
    row = {"late": "zero2", "fp16": "zero1"}.get(feature, "zero3")
    uneven = feature in ("plain", "fp16")
    one, two = (_as_one(rank, world, row, feature, several, uneven) for several in (False, True))
    assert one.keys() == two.keys()
    assert (one["skipped"] > 0) is (feature == "fp16")
    for name, value in one.items():
        same = (
            torch.equal(value, two[name]) if isinstance(value, torch.Tensor) else value == two[name]
        )
        assert same, name


# ----------------------------------------------------------------------------- order, and zero_grad


def _ordered(order: str, stage: int | None) -> list[torch.Tensor]:
    """Train by calls in `order`, in plain torch or sharded, on the same batches everywhere."""
    model = _model()
    optimizers = _sgd(model)
    engine = None if stage is None else zs.shard(model, optimizers, stage=stage)
    for step in range(3):
        model(_batch(step)).backward()
        for call in order.split():
            one = optimizers[int(call[1])]
            {"s": one.step, "n": one.zero_grad, "z": lambda o=one: o.zero_grad(set_to_none=False)}[
                call[0]
            ]()
    if engine is not None:
        engine.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    "order",
    [
        "s0 s1 n0 n1",
        "s1 n1 s0 n0",  # cleared before the whole step has ended
        "s0 z0 s1 z1",
        "n1 s0 s1 n0 n1",  # the second steps without gradients
        "s0 s1 n1",  # the gradients of the first are added up
    ],
)
@on_ranks(2)
def test_gradients_are_cleared_by_optimizer_as_in_plain_torch(rank: int, order: str) -> None:
    expected = _ordered(order, None)
    for stage in (0, 1, 3):
        assert all(map(torch.equal, _ordered(order, stage), expected)), stage


class Raises(torch.optim.SGD):
    """Fails before its end where it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ZeroDivisionError
        return super().step(closure)


HALF = r"Raises \(optimizer 0\) stepped and AdamW \(optimizer 1\) did not"


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_step_has_ended_when_each_has_stepped_once(rank: int, stage: int, tmp_path: Path) -> None:
    model = _model()
    matrices, rest = _parts(model)
    first, second = Raises(rest, lr=0.1), torch.optim.AdamW(matrices)
    engine = zs.shard(model, [first, second], stage=stage, units=[nn.Linear])
    ema = zs.EMA(engine, 0.9)
    loss = model(_batch(0))
    loss.backward(retain_graph=True)
    with pytest.raises(zs.StateError, match=r"Raises \(optimizer 0\): step\(closure\) of one"):
        first.step(lambda: loss)
    first.step()
    refused: dict[str, Any] = {
        "step": first.step,
        "forward": lambda: model(_batch(1)),
        "backward": loss.backward,
        "save": lambda: zs.save(tmp_path, engine, step=1),
        "load": lambda: zs.load(tmp_path, engine),
        "average": ema.update,
        "clip": lambda: engine.clip_grad_norm_(1.0),
        "read": engine.full_state_dict,
        "state_dict": second.state_dict,
        "close": engine.close,
    }
    for name, call in refused.items():
        with pytest.raises(zs.ZeroshardError, match=HALF) as error:
            call()
        assert "\n" not in str(error.value), name
    with pytest.raises(zs.StateError, match="gradients rest that no step has taken"):
        engine.repartition(stage=2)
    with pytest.raises(zs.StateError, match=r"zero_grad\(\) of AdamW \(optimizer 1\) before"):
        second.zero_grad()
    second.step()
    model(_batch(1))
    for gives_up in (False, True):  # by a reset in the middle, and by an exception
        for one in (first, second):
            one.zero_grad()
        model(_batch(2)).backward()
        first.fails = gives_up
        with pytest.raises(ZeroDivisionError) if gives_up else nullcontext():
            first.step()
        if gives_up:
            with pytest.raises(zs.StateError, match="did not finish"):
                second.step()
        engine.reset()
        first.fails = False
        model(_batch(3)).backward()
        for one in (second, first):
            one.step()
    engine.close()
    assert all(p.grad is None or p.grad.shape == p.shape for p in model.parameters())


@on_ranks(2)
def test_each_has_a_part_of_its_own(rank: int, tmp_path: Path) -> None:
    model = _model()
    optimizers = _muon(model)
    engine = zs.shard(model, optimizers, ownership="whole")
    model(_batch(0)).backward()
    for one in optimizers:
        one.step()
        one.zero_grad()
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    assert engine.optimizer.param_groups == [g for one in optimizers for g in one.param_groups]
    emb, first = (zs.ParameterStates(engine, one.weight) for one in (model.emb, model.first))
    assert emb.state("momentum_buffer") is None is first.state("exp_avg")
    for states, key in ((emb, "exp_avg"), (first, "momentum_buffer")):
        found = states.state(key)
        assert found is not None and found.norm() > 0
        states.set_state(key, torch.full_like(found, 2.0))
        assert (states.state(key) == 2.0).all()
    shown = zs.OptimizerStates(engine)
    assert len(shown) == sum(len(one.state) for one in optimizers)
    assert {key for one in shown.values() for key in one} >= {"step", "exp_avg"}
    with pytest.raises(zs.StateError, match=r"optimizer_part\(\)"):
        optimizers[0].state_dict()
    part = engine.optimizer_part()
    with pytest.raises(zs.StateError, match="belongs to another pieces"):
        optimizers[1].load_state_dict(part["optimizers"][0])
    before = [p.detach().clone() for p in engine.optimizer.state]
    engine.optimizer.load_state_dict(part)
    assert len(before) == len(engine.optimizer.state)
    zs.save(tmp_path, engine, step=1)
    engine.close()
    for make, told in (
        (lambda: optimizers[::-1], r"the optimizer was Muon \+ AdamW and is AdamW \+ Muon"),
        (lambda: torch.optim.AdamW(model.parameters()), r"was Muon \+ AdamW and is AdamW"),
        (lambda: [optimizers[0], *_others(model)], r"is Muon \+ AdamW \+ AdamW"),
    ):
        engine = zs.shard(model, make(), ownership="whole")
        with pytest.raises(zs.CheckpointError, match=told):
            zs.load(tmp_path, engine)
        engine.close()


def _others(model: nn.Module) -> Optimizers:
    _, (emb, *rest) = _parts(model)
    return [torch.optim.AdamW([emb]), torch.optim.AdamW(rest)]


def _bad(model: Tied) -> Iterator[tuple[Any, str]]:
    """Yield what cannot be given, and what is said about it."""
    matrices, rest = _parts(model)
    sgd, adam = torch.optim.SGD(matrices), torch.optim.AdamW(rest)
    both = [*rest, matrices[0]]
    shares = r"'first.weight' is in SGD \(optimizer 0\) and in AdamW \(optimizer 1\)"
    yield [sgd, torch.optim.AdamW(both)], shares
    yield (
        [sgd, torch.optim.AdamW(rest[1:])],
        (r"'emb.weight' is trainable but in none of the optimizers \(SGD \+ AdamW\)"),
    )
    yield [], "an empty list"
    yield [sgd, adam, sgd], "optimizers 0 and 2 of the list are the same SGD"
    yield [sgd, model], "optimizer 1 of the list is a Tied, not a torch.optim.Optimizer"
    foreign = torch.optim.AdamW([*rest, nn.Parameter(torch.ones(3))])
    yield [sgd, foreign], r"AdamW \(optimizer 1\): param group 0 holds a parameter of shape \(3,\)"
    yield [torch.optim.Muon(matrices), adam], r"Muon cannot be sharded: .*\(ownership='whole'\)"
    yield [adam, torch.optim.LBFGS(matrices)], "LBFGS cannot be sharded"
    yield {"sgd": sgd}, "optimizer is a dict, not a torch.optim.Optimizer"


def _refused(model: nn.Module, given: Any, told: str, **options: Any) -> None:
    """Check that `given` is refused with `told`, together with the model and after it."""
    for late in (False, True):
        engine = zs.shard(model, **options) if late else None
        with pytest.raises(zs.ConfigError, match=told) as error:
            zs.shard(model, given, **options) if engine is None else engine.attach(given)
        assert "\n" not in str(error.value)
        if engine is not None:
            engine.close()


@on_ranks(2)
def test_bad_lists_are_one_clear_line_on_every_rank(rank: int) -> None:
    model = _model()
    for given, told in _bad(model):
        _refused(model, given, told)
    told = r"Muon \+ AdamW steps whole parameters, and the largest, '(first|last).weight' of 2880"
    offload = {"optimizer": "disk", "disk_path": ".", "staging_bytes": 1 << 16}
    _refused(model, _muon(model), told, ownership="whole", offload=offload)
    precision = zs.Precision("bf16", moments="bf16")
    told = r"Muon steps whole parameters on the device, and moments='bf16' steps them in parts"
    _refused(model, _muon(model), told, ownership="whole", precision=precision)
    told = r"'whole_by_cost' deals out Muon's products, and SGD \+ AdamW computes none"
    _refused(model, _sgd(model), told, ownership="whole_by_cost")
    with pytest.raises(zs.PlanMismatch, match=r"'optimizer'.*SGD \+ AdamW"):
        zs.shard(model, _sgd(model)[:: 1 - 2 * rank])
    engine = zs.shard(model, _sgd(model))
    with pytest.raises(zs.ConfigError, match=r"attached already: give all .* as a list"):
        engine.attach(_sgd(model))
    engine.close()
    late = zs.shard(model)
    refusal = zs.ConfigError if rank == 1 else zs.PlanMismatch
    with pytest.raises(refusal, match="Muon cannot be sharded"):
        late.attach(_muon(model) if rank == 1 else _sgd(model))
    late.attach(_sgd(model))
    late.close()


@on_ranks(2)
def test_what_is_stepped_by_elements_is_cut_where_that_evens_the_ranks(rank: int) -> None:
    model = _model()
    optimizers = _muon(model)
    engine = zs.shard(model, optimizers, ownership="whole", units=[nn.Linear])
    muon, adamw = ([[*group["params"]] for group in one.param_groups] for one in optimizers)
    assert {p.numel() for p in muon[0]} <= {0, 40 * 72}
    table = adamw[0][0]
    assert 0 < table.numel() < 24 * 40
    numel = sum(p.numel() for group in (*muon, *adamw) for p in group)
    trained = sum(p.numel() for p in _model().parameters() if p.requires_grad)
    assert abs(numel - trained / 2) < 4 * 64
    told = engine.explain_optimizer().groups
    kinds = [(one.optimizer.rpartition(".")[2], one.group, one.kind) for one in told]
    adam = [("AdamW", group, "elementwise") for group in (0, 1)]
    assert kinds == [("Muon", 0, "matrix"), *adam]
    assert sum(one.elements[rank] for one in told) == numel
    engine.close()


@on_ranks(2)
def test_states_of_other_shapes_move_where_the_first_optimizer_has_none(rank: int) -> None:
    def make(model: nn.Module) -> Optimizers:
        matrices, rest = _parts(model)
        return [torch.optim.AdamW(rest), Odd(matrices)]

    plain, model = _model(), _model()
    pairs = [(one, make(one)) for one in (plain, model)]
    engine = zs.shard(model, pairs[1][1], ownership="whole", units=[nn.Linear])
    for step in range(3):
        for one, of_one in pairs:
            one(_batch(step)).backward()
            for each in of_one:
                each.step()
            for each in of_one:
                each.zero_grad()
        if step == 1:
            engine.repartition(stage=1)
    engine.close()
    assert all(map(torch.equal, plain.parameters(), model.parameters()))


@on_ranks(2)
def test_what_stands_for_several_says_where_to_turn(rank: int) -> None:
    model = _model()
    engine = zs.shard(model, _sgd(model))
    with pytest.raises(zs.StateError, match="stands for several"):
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(AttributeError, match=r"each of engine\.optimizer\.optimizers"):
        engine.optimizer.register_step_post_hook(lambda *_: None)
    engine.close()


@on_ranks(2)
def test_states_from_before_are_cut_for_each(rank: int) -> None:
    plain, model = _model(), _model()
    pairs = [(one, _sgd(one)) for one in (plain, model)]
    for step in range(4):
        if step == 2:
            engine = zs.shard(model, pairs[1][1], policy="zero2")
        for module, both in pairs:
            module(_batch(step)).backward()
            for one in both:
                one.step()
                one.zero_grad()
    engine.close()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@on_ranks(2)
def test_policy_auto_takes_several(rank: int) -> None:
    model = _model()
    engine = zs.shard(model, _sgd(model), policy="auto")
    engine.close()


@on_ranks(2)
def test_options_of_what_rests_off_the_device_stand_from_the_first_step_on(rank: int) -> None:
    model = _model()
    first, second = _sgd(model)
    offload: Any = {"optimizer": "host", "fraction": 0.5}
    engine = zs.shard(model, [first, second], offload=offload)
    model(_batch(0)).backward()
    first.step()
    first.param_groups[0]["lr"] = 0.5  # as its scheduler does, before the second steps
    rate, second.param_groups[0]["lr"] = second.param_groups[0]["lr"], 0.5
    with pytest.raises(zs.StateError, match=r"options of AdamW \(optimizer 1\) have changed"):
        second.step()
    second.param_groups[0]["lr"] = rate
    second.step()
    engine.close()


@on_ranks(2)
def test_they_stand_where_a_rank_without_data_steps_with_them(rank: int) -> None:
    model = _model()
    first, second = _sgd(model)
    engine = zs.shard(model, [first, second], stage=1)
    with engine.join():
        for step in range(2 - rank):
            model(_batch(step)).backward()
            first.step()
            if step == 1:
                rate, second.param_groups[0]["lr"] = second.param_groups[0]["lr"], 0.5
                with pytest.raises(zs.StateError, match=r"options of AdamW .* engine\.join\(\)"):
                    second.step()
                second.param_groups[0]["lr"] = rate
            second.step()
    engine.close()


# ---------------------------------------------------------------------------- in DeepSpeed's place


def _muon_of_deepspeed(rank: int, world: int, stage: int, by_config: bool) -> list[torch.Tensor]:
    model = _model()
    parameters = dict(model.named_parameters())
    params = {
        "lr": 0.03,
        "muon_lr": 0.01,
        "momentum": 0.9,
        "weight_decay": 0.1,
        "betas": [0.8, 0.9],
    }
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Muon", "params": params},
    }
    if by_config:
        engine: Any = deepspeed.initialize(model=model, config=config)[0]
        for step in range(3):
            engine.backward(engine(_batch(step + rank)))
            engine.step()
        assert type(engine.optimizer.optimizer).__name__ == "MuonWithAuxAdam"
        full = engine.engine.full_state_dict(rank0_only=False)
        engine.destroy()
        return [full[name] for name in parameters]
    matrices = [p for p in parameters.values() if p.requires_grad and p.ndim == 2]
    rest = [p for p in parameters.values() if p.ndim < 2]
    muon = torch.optim.Muon(matrices, lr=0.01, momentum=0.9, weight_decay=0.1)
    adamw = torch.optim.AdamW(rest, lr=0.03, betas=(0.8, 0.9), eps=1e-10, weight_decay=0.1)
    options: Any = {"ownership": "whole", "stage": stage, "gradient_clipping": CLIP, "sync_from": 0}
    ours = zs.shard(model, [muon, adamw], **options)
    for step in range(3):
        ours.backward(model(_batch(step + rank)))
        for one in (muon, adamw):
            one.step()
            one.zero_grad()
    full = ours.full_state_dict(rank0_only=False)
    ours.close()
    return [full[name] for name in parameters]


@pytest.mark.parametrize("stage", [0, 1, 3])
@on_ranks(2)
def test_a_configuration_of_deepspeed_with_muon_trains_by_both(
    rank: int, world: int, stage: int
) -> None:
    config, list_ = (_muon_of_deepspeed(rank, world, stage, one) for one in (True, False))
    assert all(map(torch.equal, config, list_))


def test_muon_in_a_configuration_is_split_by_names_and_groups() -> None:
    model = nn.ModuleDict({
        "embed": nn.Embedding(4, 4), "up": nn.Linear(4, 6), "lm_head": nn.Linear(4, 4, bias=False)
    })  # fmt: skip
    optimizers.mark_for_muon(model)
    groups = [{"params": list(model["up"].parameters()), "lr": 0.5}, *model["embed"].parameters()]
    made: Any = optimizers.make_optimizer("Muon", {"adam_lr": 0.25}, groups)
    muon, adamw = made.optimizers
    assert optimizers.steps_whole(made) and not optimizers.steps_whole(adamw)
    assert [len(group["params"]) for group in muon.param_groups] == [1]
    assert [group["lr"] for group in made.param_groups] == [0.5, 0.5, 0.25]
    assert adamw.param_groups[0]["eps"] == 1e-10 and muon.param_groups[0]["weight_decay"] == 0.0
    for params, told in (
        ({"ns_method": "cubic"}, "ns_method='cubic' is not supported"),
        ({"per_head_muon": True}, "per_head_muon is not supported"),
        ({"speed": 1}, "has no option 'speed'"),
    ):
        with pytest.raises(zs.ConfigError, match=told):
            optimizers.make_optimizer("Muon", params, groups)
