"""Weights that are written between steps: what their masters learn of it, and what plain torch
would have made of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.covering import by_pairs
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import State, make_model, take_steps, two_groups
from zeroshard.deepspeed import held_parameters
from zeroshard.deepspeed.zero import GatheredParameters
from zeroshard.errors import StateError
from zeroshard.runtime.engine import states_of

# ---------------------------------------------------------------- edits and masters

LOW = ("bf16", "fp16")


def _gathered(engine: zs.Engine, model: nn.Module) -> AbstractContextManager[Any]:
    return engine.gathered(writeback=True)


@contextmanager
def _stand_in(engine: zs.Engine, model: nn.Module) -> Iterator[None]:
    held_parameters.own(engine, engine.close)
    try:
        with GatheredParameters(model.parameters(), modifier_rank=0):
            yield
    finally:
        held_parameters.release(engine)


class _Loaded:
    """A ``load_state_dict()`` of what the body has made of the model's state."""

    def __init__(self, engine: zs.Engine, model: nn.Module) -> None:
        self._model = model
        with engine.gathered():
            self._state = {name: one.clone() for name, one in model.state_dict().items()}

    def __enter__(self) -> State:
        return self._state

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._model.load_state_dict(self._state)


WAYS: dict[str, Callable[[zs.Engine, nn.Module], AbstractContextManager[Any]]] = {
    "gathered": _gathered,
    "stand-in": _stand_in,
    "load_state_dict": _Loaded,
}


def _masters(engine: zs.Engine) -> State:
    """Return what this rank has of the masters, by parameter and first element."""
    found = {}
    for piece in states_of(engine).resting_pieces():
        with piece.borrowed() as numbers:
            found[f"{piece.name}[{piece.start}]"] = numbers.clone()
    return found


def _changed(before: State, after: State) -> list[str]:
    """Return the elements that differ, by parameter and number."""
    out = []
    for key, numbers in before.items():
        name, first = key.rstrip("]").split("[")
        places = (numbers != after[key]).nonzero().flatten().tolist()
        out += [f"{name}[{int(first) + place}]" for place in places]
    return out


def _edit(
    way: str, engine: zs.Engine, model: nn.Module, change: Callable[[str, torch.Tensor], object]
) -> None:
    with WAYS[way](engine, model) as state, torch.no_grad():
        weights: Iterable[tuple[str, torch.Tensor]] = (
            state.items() if way == "load_state_dict" else model.named_parameters()
        )
        for name, weight in weights:
            change(name, weight)


def _engine(
    stage: int, precision: str, offload: zs.Offload | None = None
) -> tuple[Any, Any, zs.Engine]:
    model = make_model()
    optimizer = two_groups(model)
    engine = zs.shard(
        model, optimizer, stage=stage, precision=precision, offload=offload or zs.Offload()
    )
    return model, optimizer, engine


def _set_one(name: str, weight: torch.Tensor) -> None:
    if name == "head.weight":
        weight[1, 2] = 3.0


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_an_edit_of_one_element_leaves_the_masters_of_all_others(
    rank: int, stage: int, precision: str
) -> None:
    wrong = []
    for offload in (zs.Offload(), zs.Offload(optimizer="host")):
        for way in WAYS:
            model, optimizer, engine = _engine(stage, precision, offload)
            take_steps(rank, 1, model, optimizer, engine=engine)
            before = _masters(engine)
            _edit(way, engine, model, _set_one)
            changed = _changed(before, _masters(engine))
            if not set(changed) <= {"head.weight[21]"}:
                wrong.append(f"{way}, {offload.optimizer}: {len(changed)} masters changed")
            master = zs.ParameterStates(engine, model.head.weight).master()
            if master[1, 2] != 3.0:
                wrong.append(f"{way}, {offload.optimizer}: the edit is not in the master")
            engine.close()
    assert wrong == []


@pytest.mark.parametrize("precision", LOW)
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_a_block_that_puts_weights_back_gives_their_masters_all_digits_again(
    rank: int, stage: int, precision: str
) -> None:
    """A climb and a return, as SAM and an average swapped by hand do; with one element that the
    return leaves changed.
    """
    wrong = []
    for way in WAYS:
        model, optimizer, engine = _engine(stage, precision)
        take_steps(rank, 1, model, optimizer, engine=engine)
        before = _masters(engine)
        saved: State = {}

        def climb(name: str, weight: torch.Tensor, saved: State = saved) -> None:
            saved.setdefault(name, weight.clone())
            weight.add_(0.5)

        def go_back(name: str, weight: torch.Tensor, saved: State = saved) -> None:
            weight.copy_(saved[name])
            _set_one(name, weight)

        _edit(way, engine, model, climb)
        _edit(way, engine, model, climb)
        climbed = _changed(before, _masters(engine))
        _edit(way, engine, model, go_back)
        changed = _changed(before, _masters(engine))
        if not climbed or not set(changed) <= {"head.weight[21]"}:
            wrong.append(f"{way}: {len(climbed)} masters climbed, {len(changed)} are not back")
        # the next step leaves other masters: what was overwritten before is forgotten
        take_steps(rank, [1], model, optimizer, engine=engine)
        stepped = _masters(engine)
        _edit(way, engine, model, lambda name, weight: weight.fill_(0.25))
        if any((one != 0.25).any() for one in _masters(engine).values()):
            wrong.append(f"{way}: an edit is not in the masters")
        _edit(way, engine, model, go_back)
        after = _masters(engine)
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
        for key, left in before.items():
            came_back = (after[key] == left) & (left.to(low).float() != left)
            same = stepped[key].to(low) == left.to(low)
            if (came_back & ~same).any():
                wrong.append(f"{way}: {key} has digits of two steps ago")
        engine.close()
    assert wrong == []


@on_ranks(2)
def test_masters_keep_their_digits_with_averages_set_masters_and_repartitions_between(
    rank: int,
) -> None:
    """Between an edit and the block that puts it back: an average in the weights' place, a master
    that was set, a repartition.
    """
    model, optimizer, engine = _engine(3, "bf16")
    take_steps(rank, 1, model, optimizer, engine=engine)
    ema = zs.EMA(engine, 0.9)
    before = _masters(engine)
    saved: State = {}
    with engine.gathered(writeback=True), torch.no_grad():
        for name, weight in model.named_parameters():
            saved[name] = weight.clone()
            weight.mul_(2)
    with ema.swapped():
        engine.full_state_dict()
    exact = torch.full((19,), 1 / 3)
    zs.ParameterStates(engine, model.norm.bias).set_master(exact)
    with engine.gathered(writeback=True), torch.no_grad():
        for name, weight in model.named_parameters():
            if name != "norm.bias":
                weight.copy_(saved[name])
    changed = _changed(before, _masters(engine))
    assert {one.split("[")[0] for one in changed} <= {"norm.bias"}
    assert torch.equal(zs.ParameterStates(engine, model.norm.bias).master(), exact)
    with engine.gathered(writeback=True), torch.no_grad():
        _set_one("head.weight", model.head.weight)
        model.norm.bias[0] = 2.0
    exact[0] = 2.0
    assert torch.equal(zs.ParameterStates(engine, model.norm.bias).master(), exact)
    expected = zs.ParameterStates(engine, model.head.weight).master()
    engine.repartition(stage=1)
    assert torch.equal(zs.ParameterStates(engine, model.head.weight).master(), expected)
    engine.close()


# ---------------------------------------------------------------- writes outside gathered()


def _noise(p: torch.Tensor, step: int) -> torch.Tensor:
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(p.dtype) * 0.1


def _by_numpy(p: torch.Tensor, step: int) -> None:
    wanted = (p.detach() * 0.9).contiguous().view(-1).view(torch.uint8).numpy()
    p.detach().view(-1).view(torch.uint8).numpy()[:] = wanted


def _by_storage(p: torch.Tensor, step: int) -> None:
    there = p.detach()
    whole = torch.empty(0, dtype=p.dtype).set_(there.untyped_storage())  # type: ignore[call-overload]
    whole[there.storage_offset() : there.storage_offset() + there.numel()].mul_(0.9)


def _by_new_data(p: torch.Tensor, step: int) -> None:
    p.data = p.data * 0.9


# every way to write to a weight that plain torch knows; under no_grad(), after each step
WRITES: dict[str, Callable[[torch.Tensor, int], object]] = {
    "p.mul_": lambda p, step: p.mul_(0.9),
    "p.mul_ by its norm": lambda p, step: p.mul_(0.9 / (1 + p.norm())),
    "p.sub_(p)": lambda p, step: p.sub_(0.1 * p),
    "p.lerp_": lambda p, step: p.lerp_(torch.zeros_like(p), 0.1),
    "p.view": lambda p, step: p.view(-1).mul_(0.9),
    "p[...] =": lambda p, step: p.__setitem__(0, 0.125 * step),
    "p.copy_": lambda p, step: p.copy_(p * 0.9),
    "out=": lambda p, step: torch.mul(p, 0.9, out=p.detach()),
    "nn.init": lambda p, step: nn.init.constant_(p, 0.01 * (step + 1)),
    "_foreach": lambda p, step: torch._foreach_mul_([p], 0.9),
    "p.detach": lambda p, step: p.detach().mul_(0.9),
    "p.data.mul_": lambda p, step: p.data.mul_(0.9),
    "p.data.add_": lambda p, step: p.data.add_(_noise(p, step)),
    "p.data.clamp_": lambda p, step: p.data.clamp_(-0.05, 0.05),
    "p.data[...] =": lambda p, step: p.data.__setitem__(0, 0.125 * step),
    "_foreach of .data": lambda p, step: torch._foreach_mul_([p.data], 0.9),
    "numpy": _by_numpy,
    "dlpack": lambda p, step: torch.from_dlpack(p.detach()).mul_(0.9),
    "storage": _by_storage,
    "p.data =": _by_new_data,
    "p.set_": lambda p, step: p.set_(torch.full(tuple(p.shape), 0.1, dtype=p.dtype)),  # type: ignore[call-overload]
}


def _small() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    """Return a loss that is the same on every rank, whose plain run is one process."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    return (model(x).float() - 1).pow(2).mean()


def _trained(write: Callable[[nn.Module, int], object], **options: Any) -> State:
    """Return the weights after four steps, of which `write` follows each (`before`: comes between
    backward and step), and the last of all is a step.
    """
    before = options.pop("before", False)
    model, optimizer = _small()
    engine = zs.shard(model, optimizer, **options) if options else None
    try:
        for step in range(4):
            loss = _loss(model, step)
            engine.backward(loss) if engine else loss.backward()
            if before:
                write(model, step)
            optimizer.step()
            optimizer.zero_grad()
            if not before and step < 3:
                write(model, step)
        state = engine.full_state_dict(rank0_only=False) if engine else model.state_dict()
        masters = _masters(engine) if engine else {}
        state = {name: one.detach().float().clone() for name, one in state.items()}
        for key, numbers in masters.items():  # what is trained is what is seen
            name, first = key.rstrip("]").split("[")
            seen = state[name].flatten()[int(first) : int(first) + numbers.numel()]
            assert torch.allclose(seen, numbers, rtol=1e-2, atol=1e-4), key
        return state
    finally:
        if engine is not None:
            engine.close()


def _on_all(write: Callable[[torch.Tensor, int], object]) -> Callable[[nn.Module, int], object]:
    def on_all(model: nn.Module, step: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                write(parameter, step)

    return on_all


def _through_state_dict(model: nn.Module, step: int) -> None:
    for tensor in model.state_dict().values():
        tensor.mul_(0.9)


WHOLE: dict[str, Callable[[nn.Module, int], object]] = {
    **{name: _on_all(write) for name, write in WRITES.items()},
    "state_dict()": _through_state_dict,
}
MOVED = ("p.data =", "p.set_")  # the parameter is given other memory


def _every_way(
    rank: int, world: int, stage: int, precision: str, transport: str, before: bool
) -> list[str]:
    wrong = []
    options: dict[str, Any] = {
        "stage": stage, "precision": precision, "comm": zs.Comm(transport=transport)
    }  # fmt: skip
    if precision == "fp16":
        options["loss_scale"] = zs.LossScale(initial=8.0)  # no step is skipped
    for name, write in WHOLE.items():
        right = _trained(write, before=before)
        try:
            found = _trained(write, before=before, **options)
        except StateError as error:
            told = r"parameter '\d.(weight|bias)' (was written to|rests sharded)|rests sharded"
            refused = stage == 3 or name in MOVED
            if not refused or not re.search(told, str(error)):
                wrong.append(f"{name}: {error}")
            continue
        far = max(float((found[key] - one).abs().max()) for key, one in right.items())
        if far > (1e-5 if precision == "fp32" else 1e-2):
            wrong.append(f"{name}: off by {far:.1e} without a word")
    return wrong


WHEN = {
    "after a step": ("shared_memory", False),
    "after a step, over sockets": ("gloo", False),
    "before a step": ("shared_memory", True),
}


@by_pairs(
    {"stage": (0, 1, 2, 3), "precision": ("fp32", "bf16", "fp16"), "when": tuple(WHEN)},
    # masters that rest apart from whole weights: of a slice, in half precision, before a step
    also=[{"stage": 1, "precision": "bf16", "when": "before a step"}],
)
def test_a_weight_that_is_written_outside_gathered_has_plain_torchs_numbers_or_is_an_error(
    stage: int, precision: str, when: str
) -> None:
    assert run_ranks(2, _every_way, stage, precision, *WHEN[when]) == [[], []]


class _Halves(nn.Module):
    """A layer that rescales its own weight in its forward, by a way that counts no version."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 24)
        self.then = nn.Linear(24, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        if torch.is_grad_enabled():
            self.linear.weight.data.mul_(0.9)
        return self.then(torch.tanh(h))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_a_module_that_writes_to_its_weight_through_data_is_trained_or_told(
    stage: int, precision: str
) -> None:
    def train(**options: Any) -> State:
        torch.manual_seed(0)
        model = _Halves()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        engine = zs.shard(model, optimizer, **options) if options else None
        for step in range(3):
            loss = _loss(model, step)
            engine.backward(loss) if engine else loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        state = engine.full_state_dict(rank0_only=False) if engine else model.state_dict()
        state = {name: one.float().clone() for name, one in state.items()}
        if engine is not None:
            engine.close()
        return state

    options = {"stage": stage, "precision": precision}
    if stage == 3:
        told = r"parameter 'linear\.weight' was written to outside engine\.gathered.*checkpoint"
        with pytest.raises(StateError, match=told):
            train(**options)
        return
    found, right = train(**options), train()
    for key, one in right.items():
        assert torch.allclose(found[key], one, atol=1e-5 if precision == "fp32" else 1e-2), key


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("row", [0, 1])
@on_ranks(2)
def test_averages_checkpoints_and_moves_see_what_was_written_before_them(
    row: int, precision: str, tmp_path: Any
) -> None:
    """What others read between a write and the next step is what was written."""
    model, optimizer = _small()
    engine = zs.shard(model, optimizer, stage=row, precision=precision)
    parameter = model[0].weight
    ema = zs.EMA(engine, 0.0)

    def write(value: float) -> torch.Tensor:
        engine.backward(_loss(model, 0))
        optimizer.step()
        optimizer.zero_grad()
        before = zs.ParameterStates(engine, parameter).master()
        parameter.data[3] = value
        before[3] = value
        return before

    expected = write(0.25)
    assert torch.equal(zs.ParameterStates(engine, parameter).master(), expected)
    expected = write(0.5)
    ema.update()  # of decay 0: the masters themselves
    with ema.swapped():
        shown = engine.full_state_dict(rank0_only=False)["0.weight"]
    assert bool((shown[3] == 0.5).all())
    assert torch.equal(zs.ParameterStates(engine, parameter).master(), expected)
    expected = write(0.75)
    zs.save(tmp_path, engine, step=1)
    write(0.125)
    zs.load(tmp_path, engine)
    assert torch.equal(zs.ParameterStates(engine, parameter).master(), expected)
    expected = write(1.0)
    engine.offload_states()
    engine.reload_states()
    assert torch.equal(zs.ParameterStates(engine, parameter).master(), expected)
    expected = write(1.25)
    with engine.gathered(writeback=True), torch.no_grad():
        model[0].bias.fill_(1.0)
    assert torch.equal(zs.ParameterStates(engine, parameter).master(), expected)
    if precision != "fp32":
        told = pytest.raises(StateError, match=r"'0\.weight' was written to inside EMA\.swapped")
        with told, ema.swapped():
            parameter.data.mul_(2)
        assert torch.equal(zs.ParameterStates(engine, parameter).master(), expected)
    expected = write(1.5)
    engine.repartition(stage=3)
    assert torch.equal(zs.ParameterStates(engine, parameter).master(), expected)
    engine.close()
    assert torch.equal(parameter.detach(), expected)


@on_ranks(2)
def test_a_write_to_weights_that_are_a_step_behind_their_masters_is_an_error() -> None:
    model, optimizer = _small()
    offload = zs.Offload(optimizer="host", delayed_update=1)
    engine = zs.shard(model, optimizer, stage=1, precision="bf16", offload=offload)
    for step in range(3):
        engine.backward(_loss(model, step))
        optimizer.step()
        optimizer.zero_grad()
    model[0].weight.data.mul_(0.9)
    engine.backward(_loss(model, 3))
    with pytest.raises(StateError, match=r"'0\.weight' was written to outside"):
        optimizer.step()
    engine.reset()
    engine.close()


# ---------------------------------------------------------------- embeddings that renorm


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_with_max_norm_is_refused_by_name_where_its_rows_would_be_lost(
    kind: type[nn.Module],
) -> None:
    for options, where in (
        ({"stage": 3}, "policy='zero3'"),
        ({"stage": 1, "precision": "bf16"}, "its weight in bf16"),
        ({"stage": 0, "precision": "fp16"}, "its weight in fp16"),
    ):
        model = nn.Sequential(kind(9, 4, max_norm=1.0), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        told = rf"module '0' rescales rows of its weight in each forward \(max_norm=1\.0\).*{where}"
        with pytest.raises(zs.ConfigError, match=told):
            zs.shard(model, optimizer, **options)  # type: ignore[arg-type]
    engine = zs.shard(model, optimizer, stage=1)
    with pytest.raises(zs.ConfigError, match="module '0' rescales rows"):
        engine.repartition(stage=3)
    engine.close()
