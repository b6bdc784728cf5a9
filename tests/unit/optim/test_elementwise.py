"""Known optimizers give the same bits on aligned pieces; others are judged by a probe that
leaves no trace; old state is cut by shape.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from zeroshard.core.layout import ALIGN, Layout
from zeroshard.core.placement import Mesh
from zeroshard.errors import ConfigError
from zeroshard.optim.copies import (
    ELEMENTWISE,
    REFUSED,
    RULES,
    HiddenMethod,
    check_rule,
    known_rule,
    shard_state,
    tried_rule,
)

# -- whole parameters against pieces
# --------------------------------------------------------------------------------------------------

# 100,007 elements: more than torch gives to one thread at a time, and a tail that no vector length
# divides.
SHAPES = {
    "matrix": (97, 1031),
    "odd": (3, 7, 11),
    "vector": (129,),
    "aligned": (2, 64),
    "short": (5,),
    "one": (1,),
    "kernel": (4, 3, 5, 5),
}
LAYOUT = Layout.build(
    list(SHAPES.items()), Mesh(1, 4), shares=(ALIGN, 641 * ALIGN, 0, 1000 * ALIGN)
)
NUM_STEPS = 210
NUM_QUICK_STEPS = 10  # more than ASGD's t0, and than the gradients of the bank

OPTIONS: dict[type[torch.optim.Optimizer], list[dict[str, Any]]] = {
    torch.optim.ASGD: [{"lr": 1e-2, "t0": 5, "weight_decay": 0.01}],
    torch.optim.Adadelta: [{"lr": 1.0, "weight_decay": 0.01}],
    torch.optim.Adagrad: [
        {"lr": 1e-2, "weight_decay": 0.01, "lr_decay": 1e-3, "initial_accumulator_value": 0.1}
    ],
    torch.optim.Adam: [{"lr": 1e-3, "weight_decay": 0.01}, {"lr": 1e-3, "amsgrad": True}],
    torch.optim.AdamW: [
        {"lr": 1e-3, "weight_decay": 0.01},
        {"lr": 1e-3, "amsgrad": True, "maximize": True},
    ],
    torch.optim.Adamax: [{"lr": 1e-3, "weight_decay": 0.01}],
    torch.optim.NAdam: [
        {"lr": 1e-3, "weight_decay": 0.01},
        {"lr": 1e-3, "decoupled_weight_decay": True, "weight_decay": 0.01},
    ],
    torch.optim.RAdam: [{"lr": 1e-3, "weight_decay": 0.01}],
    torch.optim.RMSprop: [
        {"lr": 1e-3, "momentum": 0.9, "centered": True, "weight_decay": 0.01},
        {"lr": 1e-3},
    ],
    torch.optim.Rprop: [{"lr": 1e-3}],
    torch.optim.SGD: [
        {"lr": 1e-2},
        {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        {"lr": 1e-2, "momentum": 0.9},
    ],
}
FUSED = (torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


def variants() -> Iterator[Any]:
    for cls, all_options in OPTIONS.items():
        for options, kernel in itertools.product(all_options, ("single", "foreach", "fused")):
            if kernel == "fused" and cls not in FUSED:
                continue
            switch = {"foreach": False} if kernel == "single" else {kernel: True}
            extra = "-".join(key for key in options if key not in ("lr", "weight_decay"))
            name = "-".join(filter(None, (cls.__name__, kernel, extra)))
            if kernel == ("fused" if cls in FUSED else "single") and options is all_options[0]:
                yield pytest.param(cls, options | switch, NUM_QUICK_STEPS, id=f"{name}-quick")
            yield pytest.param(cls, options | switch, NUM_STEPS, marks=pytest.mark.slow, id=name)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(("cls", "options", "steps"), list(variants()))
def test_a_known_optimizer_gives_the_same_bits_on_pieces(
    cls: Any, options: dict[str, Any], steps: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(LAYOUT.numel, generator=generator)
    bank = torch.randn(7, LAYOUT.numel, generator=generator)
    bank[:, ::17] = 0
    ours = [
        (piece, LAYOUT.ranges[rank][0])
        for rank in range(LAYOUT.num_shards)
        for piece in LAYOUT.pieces(rank)
    ]
    whole = [
        nn.Parameter(values[slot.offset : slot.stop].clone().view(slot.shape))
        for slot in LAYOUT.slots
    ]
    flat = values.clone()
    cut = [
        nn.Parameter(flat[start + piece.shard_start : start + piece.shard_stop])
        for piece, start in ours
    ]
    assert len(cut) > len(whole)
    of_whole, of_cut = cls(whole, **options), cls(cut, **options)
    for step in range(steps):
        grad = bank[step % len(bank)] * (1 + step / 50)
        for parameter, slot in zip(whole, LAYOUT.slots, strict=True):
            parameter.grad = grad[slot.offset : slot.stop].view(slot.shape)
        for parameter, (piece, start) in zip(cut, ours, strict=True):
            parameter.grad = grad[start + piece.shard_start : start + piece.shard_stop]
        of_whole.step()
        of_cut.step()
    for parameter, slot in zip(whole, LAYOUT.slots, strict=True):
        expected, found = parameter.detach().reshape(-1), flat[slot.offset : slot.stop]
        assert torch.isfinite(expected).all()
        assert torch.equal(expected.view(torch.int32), found.view(torch.int32)), (
            f"{slot.name}: {(expected != found).sum()} elements differ"
        )


def test_every_known_class_is_tested() -> None:
    known = {name for name, rule in RULES.items() if rule.kind is ELEMENTWISE}
    assert {f"torch.{cls.__name__}" for cls in OPTIONS} == known


# -- which optimizers may be sharded
# --------------------------------------------------------------------------------------------------


class LocalRule(torch.optim.Optimizer):
    """A user's own elementwise rule, with an attribute and state of its own."""

    def __init__(self, params: Any, lr: float = 1e-2, scale: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.scale = scale
        self.log: list[str] = []

    def direction(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        state = self.state[param]
        state["average"] = (
            grad.clone()
            if "average" not in state
            else state["average"].mul_(0.9).add_(grad, alpha=0.1)
        )
        return state["average"].sign()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.log.append("step")
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(self.direction(param, param.grad), alpha=-group["lr"] * self.scale)


class TrustRatio(LocalRule):
    """LARS (You et al., 2017): the step is scaled by norms of the whole parameter."""

    def direction(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad * (param.norm() / grad.norm())


class MatrixRule(LocalRule):
    """Looks at the shape: one norm per row of a matrix, elementwise for vectors."""

    def direction(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return grad if grad.dim() == 1 else grad / grad.norm(dim=-1, keepdim=True)


class BlockRule(LocalRule):
    """One scale per 256 elements, as 8-bit optimizers keep: finer than a parameter, coarser than
    the alignment.
    """

    def direction(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        padded = nn.functional.pad(grad.reshape(-1), (0, -grad.numel() % 256)).view(-1, 256)
        return (
            (padded / padded.abs().amax(dim=1, keepdim=True))
            .reshape(-1)[: grad.numel()]
            .view_as(grad)
        )


class GlobalClip(LocalRule):
    """Clips by a norm over all parameters that it was given."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [
            param
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        total = torch.stack([param.grad.norm() for param in params]).norm()
        for param in params:
            param.sub_(param.grad / total, alpha=1e-2)


class Raises(LocalRule):
    def direction(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("only matrices")


class Idle(LocalRule):
    def direction(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(grad)


class Explodes(LocalRule):
    def direction(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, torch.inf)


class MyAdam(torch.optim.AdamW):
    pass


class MyAdagrad(torch.optim.Adagrad):  # makes its state in the constructor
    pass


class Wrapper(torch.optim.Optimizer):
    """Steps another optimizer, which holds the user's parameters."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(
            [param for group in inner.param_groups for param in group["params"]], {"lr": 0.1}
        )
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def model_params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(7))]


class TwoSteps(torch.optim.Optimizer):
    """SAM as in many scripts: two methods in the place of step()."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


class Sharpness(TwoSteps):
    """SAM as published: it drives another optimizer."""

    def __init__(self, params: Any) -> None:
        params = list(params)
        super().__init__(params)
        self.base_optimizer = torch.optim.SGD(params, lr=0.1)


class Closed(LocalRule):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        super().step(closure())


class Silent(LocalRule):
    def direction(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Modes(LocalRule):
    """It steps only after train(), as schedule-free optimizers do."""

    is_training = False

    def train(self) -> None:
        self.is_training = True

    def eval(self) -> None:
        self.is_training = False

    def direction(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        if not self.is_training:
            raise RuntimeError("not in train mode")
        return super().direction(param, grad)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (
            Sharpness,
            r"Sharpness cannot be sharded: it drives another optimizer, its 'base_optimizer'"
            r" \(SGD\), which would go on with whole parameters; use .*AdamW, or that SGD alone$",
        ),
        (TwoSteps, r"TwoSteps cannot be sharded: it has no step\(\) of its own, .*AdamW$"),
        (Closed, r"Closed cannot be sharded: its step\(\) needs 'closure', .*AdamW$"),
        (Silent, r"a trial step raised NotImplementedError; use an elementwise"),
    ],
)
def test_what_takes_no_step_with_one_gradient_is_refused_in_words_of_its_own(
    cls: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_rule(cls(model_params()))


def test_an_optimizer_with_modes_is_probed_in_training_and_stays_as_it_was() -> None:
    optimizer = Modes(model_params())
    check_rule(optimizer)
    assert not optimizer.is_training


@pytest.mark.parametrize("cls", OPTIONS)
def test_known_classes_pass(cls: Any) -> None:
    check_rule(cls(model_params(), lr=1e-3))


@pytest.mark.parametrize("cls", [LocalRule, MyAdam, MyAdagrad])
@pytest.mark.parametrize("lr", [0.0, 1e-3])
def test_an_unknown_elementwise_class_passes(cls: Any, lr: float) -> None:
    check_rule(cls(model_params(), lr=lr))


@pytest.mark.parametrize("cls", [TrustRatio, MatrixRule, BlockRule, GlobalClip])
@pytest.mark.parametrize("lr", [0.0, 1e-6, 1e-2])
def test_a_rule_that_sees_more_than_an_element_is_refused(cls: Any, lr: float) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"{cls.__name__} \(param group 0\) is not elementwise: .* of 32805 elements",
    ):
        check_rule(cls(model_params(), lr=lr))


def test_only_one_of_the_groups_options_need_be_wrong() -> None:
    class Switched(TrustRatio):
        def direction(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            return super().direction(param, grad) if self.param_groups[0]["trust"] else grad

    first, second = model_params()
    fine = Switched([{"params": [first], "trust": False}, {"params": [second], "trust": False}])
    check_rule(fine)
    with pytest.raises(ConfigError, match="param group 1"):
        check_rule(
            Switched([{"params": [first], "trust": False}, {"params": [second], "trust": True}])
        )


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (torch.optim.LBFGS, "dot products"),
        (torch.optim.Adafactor, "per row and column"),
        (torch.optim.Muon, "whole matrices"),
        (torch.optim.SparseAdam, "sparse gradients"),
    ],
)
def test_known_classes_that_are_not_elementwise_are_refused_with_the_reason(
    cls: Any, reason: str
) -> None:
    with pytest.raises(ConfigError, match=f"{cls.__name__} cannot be sharded: .*{reason}.*AdamW"):
        check_rule(cls([nn.Parameter(torch.ones(4, 4))], lr=1e-3))


def test_a_subclass_of_a_refused_class_is_refused_too() -> None:
    class MyMuon(torch.optim.Muon):
        pass

    with pytest.raises(ConfigError, match="MyMuon"):
        check_rule(MyMuon([nn.Parameter(torch.ones(4, 4))]))


def _called(name: str) -> torch.optim.Optimizer:
    """Return an elementwise optimizer with a class of this name."""
    module, _, last = name.rpartition(".")
    cls = type(last, (LocalRule,), {"__module__": module})
    return cls([nn.Parameter(torch.ones(4, 4))])


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lomo_optim.lomo.Lomo", "inside the backward"),
        ("lomo_optim.adalomo.AdaLomo", "inside the backward"),
        ("transformers.trainer_pt_utils.LayerWiseDummyOptimizer", "inside the backward"),
        ("galore_torch.adamw.AdamW", "to a low rank"),
        ("galore_torch.adafactor.Adafactor", "to a low rank"),
        ("apollo_torch.apollo.AdamW", "to a low rank"),
        ("heavyball.optim.SOAP", "by views of a parameter"),
        ("grokadamw.grokadamw.GrokAdamW", "in its param groups"),
        ("torch_npu.optim.npu_fused_adamw.NpuFusedAdamW", "tensors of its own"),
    ],
)
def test_classes_of_other_packages_are_refused_by_name_with_the_reason(
    name: str, reason: str
) -> None:
    for whole in (False, True):
        with pytest.raises(ConfigError, match=f"{name.rpartition('.')[2]} cannot .*{reason}"):
            check_rule(_called(name), whole=whole)
    check_rule(_called("mine.adamw.AdamW"))


@pytest.mark.parametrize("name", ["torchao.optim.adam.AdamW8bit", "transformers.opt.Adafactor"])
def test_classes_that_need_whole_parameters_are_told_so_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be sharded: it .*ownership='whole'"):
        check_rule(_called(name))
    check_rule(_called(name), whole=True)
    assert known_rule(_called(name)) is not None


def test_every_kind_that_is_refused_or_needs_more_says_why() -> None:
    for name, rule in RULES.items():
        assert rule.why and (rule.kind is REFUSED) == (rule.kind.needs == "another optimizer"), name


class Prepared(LocalRule):
    """Makes its state in the constructor, and has none to make later."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        for param in self.param_groups[0]["params"]:
            self.state[param]["sum"] = torch.zeros_like(param)

    def direction(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.state[param]["sum"].add_(grad)
        return total


class OnlyMatrices(LocalRule):
    def direction(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        assert param.dim() > 1
        return grad


@pytest.mark.parametrize(
    ("cls", "kind", "why"),
    [
        (LocalRule, "elementwise", "itself alone"),
        (Prepared, "elementwise", "itself alone"),
        (Modes, "elementwise with modes", r"train\(\) and eval\(\)"),
        (BlockRule, "blockwise", "whole blocks"),
        (TrustRatio, "per tensor", "otherwise"),
        (MatrixRule, "matrix", "otherwise than the vector"),
        (OnlyMatrices, "matrix", "raised AssertionError"),
    ],
)
def test_trial_steps_show_the_kind_of_a_class_that_is_not_known(
    cls: Any, kind: str, why: str
) -> None:
    optimizer = cls(model_params())
    rule = tried_rule(optimizer, 0)
    assert rule.kind.name == kind and re.search(why, rule.why)
    assert known_rule(optimizer) is None


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (Raises, "a trial step raised NotImplementedError: only matrices"),
        (Idle, "changed nothing"),
        (Explodes, "not finite"),
    ],
)
def test_a_class_that_cannot_be_probed_is_refused_and_told_why(cls: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_rule(cls(model_params()))


def test_a_wrapper_is_refused_and_cannot_reach_the_users_parameters() -> None:
    params = model_params()
    for param in params:
        param.grad = torch.ones_like(param)
    before = [param.detach().clone() for param in params]
    with pytest.raises(ConfigError):
        check_rule(Wrapper(torch.optim.SGD(params, lr=0.1)))
    assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))


def test_a_probe_leaves_no_trace() -> None:
    params = model_params()
    optimizer = LocalRule(params, lr=1e-3)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    handle = register_optimizer_step_post_hook(lambda *_: calls.append("global"))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # shadows optimizer.step
    for param in params:
        param.grad = torch.full_like(param, 2.0)
    optimizer.step()
    calls.clear()
    state, groups = (
        copy.deepcopy(optimizer.state_dict()),
        [id(group) for group in optimizer.param_groups],
    )
    before, attributes, log = (
        [param.detach().clone() for param in params],
        set(vars(optimizer)),
        list(optimizer.log),
    )
    rng = torch.get_rng_state()
    check_rule(optimizer)
    handle.remove()
    assert calls == []
    assert torch.equal(torch.get_rng_state(), rng)
    assert [id(group) for group in optimizer.param_groups] == groups
    assert (set(vars(optimizer)), optimizer.log) == (attributes, log)
    assert list(optimizer.state) == params
    torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)
    for param, old in zip(params, before, strict=True):
        assert torch.equal(param, old)
        assert param.grad is not None and torch.equal(param.grad, torch.full_like(param, 2.0))


def test_a_rule_that_draws_random_numbers_is_refused_and_the_generator_restored() -> None:
    class Noisy(LocalRule):
        def direction(self, param: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            return torch.randn_like(grad)

    rng = torch.get_rng_state()
    with pytest.raises(ConfigError, match="not elementwise"):
        check_rule(Noisy(model_params()))
    assert torch.equal(torch.get_rng_state(), rng)


def test_an_optimizer_over_named_parameters_is_probed_under_a_name_of_ours() -> None:
    model = nn.Linear(3, 2)
    optimizer = MyAdam(model.named_parameters())
    check_rule(optimizer)
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


def test_parameters_on_the_meta_device_are_probed_on_the_cpu() -> None:
    check_rule(LocalRule([nn.Parameter(torch.empty(3, 5, device="meta"))]))


# -- state from before the sharding
# --------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), max_size=4), st.data())
def test_the_pieces_of_a_state_make_up_the_whole(shape: list[int], data: st.DataObject) -> None:
    moment = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    cut = data.draw(st.integers(0, moment.numel()))
    state = {"step": torch.tensor(3.0), "moment": moment, "count": 7, "on": True, "none": None}
    first, second = (
        shard_state(state, shape, start, stop) for start, stop in ((0, cut), (cut, moment.numel()))
    )
    assert torch.equal(torch.cat([first["moment"], second["moment"]]), moment.reshape(-1))
    for piece in (first, second):
        assert piece["moment"].dim() == 1
        assert piece["step"].shape == () and piece["step"].item() == 3.0
        assert (piece["count"], piece["on"], piece["none"]) == (7, True, None)


def test_a_piece_of_state_shares_no_memory_with_the_whole() -> None:
    state = {"step": torch.tensor(3.0), "moment": torch.zeros(4, 64)}
    piece = shard_state(state, (4, 64), 64, 128)
    piece["moment"].add_(1)
    piece["step"].add_(1)
    assert state["step"] == 3 and not state["moment"].any()
    assert piece["moment"].untyped_storage().nbytes() == 64 * 4


def test_state_of_lower_precision_is_lifted_to_that_of_the_master() -> None:
    state = {
        dtype: torch.full((2, 3), 1.5, dtype=dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.uint8)
    }
    piece = shard_state({str(dtype): value for dtype, value in state.items()}, (2, 3), 0, 4)
    assert [value.dtype for value in piece.values()] == [
        torch.float32,
        torch.float32,
        torch.float32,
        torch.uint8,
    ]


def test_state_of_a_channels_last_parameter_is_cut_in_memory_order() -> None:
    weight = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    moment = torch.zeros_like(weight).copy_(weight)
    piece = shard_state({"moment": moment}, weight.shape, 10, 110, stride=weight.stride())
    assert torch.equal(piece["moment"], weight.as_strided((300,), (1,))[10:110])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            torch.zeros(3),
            r"'row' of parameter 'layer.weight' is a tensor of shape \(3,\).*\(3, 5\)",
        ),
        ([torch.zeros(3, 5)], "'row' of parameter 'layer.weight' is a list"),
        ("text", "is a str"),
    ],
)
def test_state_that_cannot_be_cut_is_refused_by_name(value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shard_state({"row": value}, (3, 5), 0, 15, name="layer.weight")


@pytest.mark.parametrize("cls", OPTIONS)
def test_training_goes_on_with_the_same_bits_after_its_state_was_cut(cls: Any) -> None:
    shapes = [(3, 50), (), (1,)]
    whole = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    of_whole = cls(whole, lr=1e-2)
    grads = [torch.randn(8, *shape) for shape in shapes]

    def step_whole(step: int) -> None:
        for parameter, grad in zip(whole, grads, strict=True):
            parameter.grad = grad[step].clone()
        of_whole.step()

    for step in range(4):
        step_whole(step)
    cuts = [(0, 0, 64), (0, 64, 150), (1, 0, 1), (2, 0, 1)]
    pieces = [
        nn.Parameter(whole[index].detach().reshape(-1)[start:stop].clone())
        for index, start, stop in cuts
    ]
    of_pieces = cls(pieces, lr=1e-2)
    for piece, (index, start, stop) in zip(pieces, cuts, strict=True):
        of_pieces.state[piece] = shard_state(
            of_whole.state[whole[index]], whole[index].shape, start, stop
        )
    for step in range(4, 8):
        step_whole(step)
        for piece, (index, start, stop) in zip(pieces, cuts, strict=True):
            piece.grad = grads[index][step].reshape(-1)[start:stop].clone()
        of_pieces.step()
    for piece, (index, start, stop) in zip(pieces, cuts, strict=True):
        assert torch.equal(piece, whole[index].detach().reshape(-1)[start:stop])


def test_a_method_that_is_hidden_twice_is_called_through_both() -> None:
    optimizer, called = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1), []

    def noting(who: str) -> Any:
        def call(method: Any, *args: Any, **options: Any) -> None:
            called.append(who)
            method(*args, **options)

        return call

    inner, outer = (HiddenMethod(optimizer, "zero_grad", noting(who)) for who in ("inner", "outer"))
    optimizer.zero_grad(set_to_none=False)
    assert called == ["outer", "inner"]
    outer.remove()
    optimizer.zero_grad()
    assert called == ["outer", "inner", "inner"]
    inner.remove()
    assert "zero_grad" not in vars(optimizer)
