"""``engine.accumulate()``: all micro-batches in one unit before the next, with the bits of the
plain loop and weights that are read as often for any number of them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.features.test_experts import _batch, _mesh, _sharded
from tests.support import inside
from tests.support.experts import Stacked
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import Net, Recomputed, batch, differences, make_model, make_sharded

State = dict[str, torch.Tensor]
STEPS, MICRO_BATCHES = 2, 3


def _loss_of(model: nn.Module, one: tuple[Any, ...]) -> torch.Tensor:
    loss: torch.Tensor = model(*one)
    return loss


def _data(rank: int, step: int, micro_batches: int = MICRO_BATCHES) -> list[tuple[Any, ...]]:
    return [batch(rank, step * micro_batches + micro) for micro in range(micro_batches)]


def _plain(
    rank: int, row: str, *, steps: int = STEPS, clip: float | None = None, **options: Any
) -> tuple[State, list[float]]:
    """Train with no_sync() around all micro-batches but the last; return weights and losses."""
    model, optimizer, engine = make_sharded(row, **options)
    losses = []
    for step in range(steps):
        batches = _data(rank, step)
        for micro, one in enumerate(batches):
            with engine.no_sync() if micro < len(batches) - 1 else nullcontext():
                loss = model(*one)
                engine.backward(loss)
            losses.append(loss.item())
        if clip is not None:
            engine.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
    return _ended(engine), losses


def _vertical(
    rank: int,
    row: str,
    *,
    steps: int = STEPS,
    clip: float | None = None,
    tier: str = "device",
    path: str | None = None,
    **options: Any,
) -> tuple[State, list[float]]:
    """Train with accumulate(); return weights and losses."""
    model, optimizer, engine = make_sharded(row, **options)
    losses = []
    for step in range(steps):
        done = engine.accumulate(
            _data(rank, step), lambda one: model(*one), tier=tier, disk_path=path
        )
        losses += done.losses.tolist()
        if clip is not None:
            engine.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
    assert inside.is_at_rest(engine) or row in ("ddp", "zero1", "zero2")
    return _ended(engine), losses


def _ended(engine: zs.Engine) -> State:
    state = engine.full_state_dict(rank0_only=False)
    engine.close()
    return state


# ------------------------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_ranks(2)
def test_the_bits_are_those_of_zero1s_plain_loop_in_every_row(rank: int, precision: str) -> None:
    rows = ("ddp", "zero1", "zero2", "zero3", "zero3-keep")
    expected, losses = _plain(rank, "zero1", precision=precision, clip=0.5)
    told = []
    for row in rows:
        state, seen = _vertical(rank, row, precision=precision, clip=0.5)
        told += differences(state, expected, row, "the plain loop")
        told += [] if seen == losses else [f"{row}: {seen} against {losses}"]
    assert told == []


@pytest.mark.slow
@on_ranks(4)
def test_hpz_mics_and_hfsdp_have_them_on_two_nodes(rank: int) -> None:
    nodes = {"comm": zs.Comm(node_size=2)}
    expected, _ = _plain(rank, "zero1", precision="bf16", **nodes)
    told = []
    for row in ("zero3", "hpz", "mics", "hfsdp"):
        state, _ = _vertical(rank, row, precision="bf16", **nodes)
        told += differences(state, expected, row, "the plain loop")
    assert told == []


@on_ranks(2)
def test_fp16_scales_the_losses(rank: int) -> None:
    expected, losses = _plain(rank, "zero1", precision="fp16")
    state, seen = _vertical(rank, "zero3", precision="fp16")
    found = differences(state, expected) + ([] if seen == losses else [f"{seen} {losses}"])
    assert found == []


@on_ranks(2)
def test_activations_between_units_rest_on_the_host_or_on_disk(rank: int, tmp_path: Any) -> None:
    expected, _ = _vertical(rank, "zero3")
    told = []
    for tier in ("host", "disk"):
        wide = {"tier": tier, "path": str(tmp_path) if tier == "disk" else None}
        state, _ = _vertical(rank, "zero3", **wide)
        told += differences(state, expected, tier, "device")
    state, _ = _vertical(rank, "zero3", shares=[0.1, 0.9])
    found = told + differences(state, expected, "unequal shares", "equal ones")
    assert found == []


# ------------------------------------------------------------------------ what is gathered and read


def _note(seen: list[tuple[str, str]], what: str, name: str) -> None:
    seen.append((what, name))


@on_ranks(2)
def test_weights_are_gathered_and_read_as_often_for_any_number_of_micro_batches(
    rank: int, tmp_path: Any
) -> None:
    """See for 1, 4 and 16 micro-batches of a second step, how often each unit was gathered and
    reduced, and the bytes that this rank has read from disk.
    """
    out = {}
    offload = zs.Offload(weight="disk", grad="host", optimizer="disk", disk_path=str(tmp_path))
    model, optimizer, engine = make_sharded("zero3", offload=offload)
    for micro_batches in (1, 4, 16):
        for step in range(2):
            seen: list[tuple[str, str]] = []
            note = partial(_note, seen)
            with inside.traced(engine, note), inside.disk_reads(engine) as reads:
                engine.accumulate(_data(rank, step, micro_batches), lambda one: model(*one))
                optimizer.step()
                optimizer.zero_grad()
            out[micro_batches] = (Counter(seen), sum(reads))
    engine.close()
    assert out[1] == out[4] == out[16]
    events, read = out[16]
    assert read > 0
    blocks = [name for _, name in events if name.startswith("blocks.")]
    assert len(set(blocks)) == 4
    for name in blocks:
        assert events["gather", name] == 2 and events["reduce", name] == 1, name


# ------------------------------------------------------------------------------ models of all kinds


class Tied(Net):
    """The embedding is the head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


class Functional(Net):
    """The head is the embedding's weight, used outside its module."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        logits = nn.functional.linear(self.norm(h), self.embed.weight)
        assert y is not None
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


class Around(Net):
    """The model holds parameters itself, around blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.linspace(-0.1, 0.1, 19))
        self.gain = nn.Parameter(torch.ones(19))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = first = self.embed(x) + self.start
        for block in self.blocks:
            h = block(self.skipped(h, first))
        logits = self.head(self.norm(h * self.gain))
        assert y is not None
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    def skipped(self, h: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return h


class Skipping(Around):
    """What goes into the first block goes into the others, too."""

    def skipped(self, h: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return h + first


class Twice(Net):
    """Every block is used twice."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embed(x)
        for block in [*self.blocks, *self.blocks]:
            h = block(h)
        assert y is not None
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


class Frozen(Net):
    """All but biases is frozen, and the embedding wholly."""

    def __init__(self) -> None:
        super().__init__()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith("bias"))


class Normed(Net):
    """Batch norms, which write to their buffers in every forward."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = nn.BatchNorm1d(19)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embed(x).flatten(0, 1)
        for block in self.blocks:
            h = block(h)
        assert y is not None
        return nn.functional.cross_entropy(self.head(self.norm(h)), y.flatten())


class Structured(Net):
    """Blocks that take and return more than a tensor."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            inner = block.forward
            block.forward = (  # type: ignore[method-assign]
                lambda h, *, extra, inner=inner: {"h": inner(h + extra["bias"][0]), "n": 1}
            )

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embed(x)
        bias = h.mean(0, keepdim=True)
        for block in self.blocks:
            h = block(h, extra={"bias": (bias, None)})["h"]
        assert y is not None
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


EXACT = (Around, Frozen, Normed, Recomputed)
CLOSE = (
    Tied,
    Functional,
    Twice,
    Structured,
    Skipping,
)  # several sections add to one parameter or tensor


def _trained(rank: int, row: str, kind: type[Net], way: Callable[..., Any]) -> State:
    torch.manual_seed(0)
    model = kind()
    trained = [p for p in model.parameters() if p.requires_grad]
    state, _ = way(rank, row, model=model, optimizer=lambda _: torch.optim.Adam(trained, 1e-2))
    return dict(state)


def _any_model(rank: int, world: int, kinds: tuple[type[Net], ...], exact: bool) -> list[str]:
    told = []
    for kind in kinds:
        expected = _trained(rank, "zero1", kind, _plain)
        state = _trained(rank, "zero3", kind, _vertical)
        if exact:
            told += differences(state, expected, kind.__name__, "the plain loop")
        for name, value in state.items():
            if not torch.allclose(value, expected[name], rtol=1e-3, atol=1e-4):
                told.append(f"{kind.__name__}: {name} is not close")
    return told


def test_parameters_around_blocks_frozen_ones_norms_and_checkpoints_have_the_same_bits() -> None:
    assert run_ranks(2, _any_model, EXACT, True) == [[], []]


def test_parameters_that_several_blocks_use_are_close() -> None:
    assert run_ranks(2, _any_model, CLOSE, False) == [[], []]


class Dropped(Net):
    """Dropout inside and between blocks."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm = nn.Sequential(nn.LayerNorm(19), nn.Dropout(0.3))  # type: ignore[assignment]
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.drop(self.embed(x))
        for block in self.blocks:
            h = self.drop(block(h))
        assert y is not None
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


@on_ranks(2)
def test_blocks_that_run_again_drop_what_they_have_dropped(rank: int) -> None:
    states = []
    for vertical in (False, True):
        torch.manual_seed(0)
        model, optimizer, engine = make_sharded("zero3", model=Dropped())
        torch.manual_seed(rank)
        for step in range(2):
            one = batch(rank, step)
            if vertical:
                engine.accumulate([one], partial(_loss_of, model))
            else:
                model(*one).backward()
            optimizer.step()
            optimizer.zero_grad()
        random = torch.rand(1).item()
        states.append(_ended(engine) | {"the next random number": torch.tensor(random)})
    found = differences(states[1], states[0], "accumulate", "the plain loop")
    assert found == []


def _llama(rank: int, world: int) -> list[str]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    states = []
    for vertical in (False, True):
        torch.manual_seed(0)
        model, optimizer, engine = make_sharded(
            "zero3" if vertical else "zero1", model=LlamaForCausalLM(config)
        )

        def loss_of(one: tuple[torch.Tensor, ...], model: Any = model) -> torch.Tensor:
            loss: torch.Tensor = model(input_ids=one[0], labels=one[1], use_cache=False).loss
            return loss

        for step in range(2):
            batches = _data(rank, step)
            if vertical:
                engine.accumulate(batches, loss_of)
            for one in () if vertical else batches:
                with engine.no_sync() if one is not batches[-1] else nullcontext():
                    loss_of(one).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(_ended(engine))
    return differences(states[1], states[0], "accumulate", "the plain loop")


@pytest.mark.slow
def test_a_llama_of_transformers_has_the_same_bits() -> None:
    pytest.importorskip("transformers")
    assert run_ranks(2, _llama) == [[], []]


@pytest.mark.slow
@on_ranks(4)
def test_experts_with_a_mesh_of_their_own_have_the_same_bits(rank: int) -> None:
    """Experts that ranks divide inside of blocks, which exchange tokens in both runs."""
    states = []
    for row, vertical, options in (
        ("zero1", False, {}),
        ("zero3", True, {}),
        ("zero3", False, {"accumulation_budget": "1GiB"}),
    ):
        model, optimizer, engine = _sharded(Stacked, _mesh(), row, **options)
        for step in range(2):
            batches = [_batch(rank, 3 * step + micro) for micro in range(3)]
            if vertical:
                engine.accumulate(batches, partial(_loss_of, model))
            for one in () if vertical else batches:
                with engine.no_sync() if one is not batches[-1] else nullcontext():
                    engine.backward(model(*one))
            optimizer.step()
            optimizer.zero_grad()
        assert bool(engine.policy.units) == bool(options)
        states.append(_ended(engine))
    told = differences(states[1], states[0], "accumulate", "the plain loop")
    found = told + differences(states[2], states[0], "whole gradients", "zero1")
    assert found == []


# ----------------------------------------------------------------------------------- other programs


@on_ranks(2)
def test_more_backwards_may_come_before_and_after_in_a_step(rank: int) -> None:
    """Add accumulate() to a plain backward before it and one after it, in one step."""
    states = []
    for row, vertical in (("zero1", False), ("zero1", True), ("zero3", True)):
        model, optimizer, engine = make_sharded(row)
        batches = _data(rank, 0, 4)
        if vertical:
            with engine.no_sync():
                model(*batches[0]).backward()
                engine.accumulate(batches[1:3], partial(_loss_of, model))
            model(*batches[3]).backward()
        for one in () if vertical else batches:
            with engine.no_sync() if one is not batches[-1] else nullcontext():
                model(*one).backward()
        engine.clip_grad_norm_(0.5)
        optimizer.step()
        states.append(_ended(engine))
    close = all(torch.allclose(one, states[0][name], atol=1e-5) for name, one in states[2].items())
    found = differences(states[1], states[0]) + ([] if close else ["zero3 is not close"])
    assert found == []


@on_ranks(2)
def test_ranks_may_have_different_numbers_of_micro_batches(rank: int, world: int) -> None:
    """Two micro-batches on rank 0 and one on rank 1, by hand in one process's sums."""
    model, optimizer, engine = make_sharded("zero3")
    batches = _data(rank, 0, 2 - rank)
    engine.accumulate(batches, lambda one: model(*one))
    found = {name: engine.full_grad(p) for name, p in model.named_parameters()}
    optimizer.step()
    engine.close()
    reference = make_model()
    for other in range(world):
        for one in _data(other, 0, 2 - other):
            (reference(*one) / world).backward()
    seen = [
        name
        for name, p in reference.named_parameters()
        if not torch.allclose(p.grad, found[name], atol=1e-6)  # type: ignore[arg-type]
    ]
    assert seen == []


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@on_ranks(2)
def test_losses_count_their_samples_with_the_bits_of_weighted_backwards(
    rank: int, precision: str
) -> None:
    """Micro-batches of 3, 2 and 1 samples, which count as many."""
    states, means = [], []
    for row, vertical in (("zero1", False), ("zero3", True)):
        model, optimizer, engine = make_sharded(row, precision=precision)
        for step in range(2):
            batches = [
                tuple(part[: 3 - micro] for part in one)
                for micro, one in enumerate(_data(rank, step))
            ]
            if vertical:
                done = engine.accumulate(batches, lambda one, m=model: (m(*one), len(one[0])))
                means.append(done.loss.item())
                assert done.weights == (3.0, 2.0, 1.0)
            total = 0.0
            for one in () if vertical else batches:
                with engine.no_sync() if one is not batches[-1] else nullcontext():
                    loss = model(*one)
                    engine.backward(loss, weight=len(one[0]))
                total += loss.item() * len(one[0]) / 6
            means.append(total)
            engine.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        states.append(_ended(engine))
    told = [] if abs(means[0] - means[2]) < 1e-3 else [f"the mean loss is {means}"]
    found = told + differences(states[1], states[0], "accumulate", "the plain loop")
    assert found == []


# ------------------------------------------------------------------------------------------- errors


class Wandering(Net):
    """Takes the blocks in the order that a batch asks for."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, route: Any = None) -> torch.Tensor:  # type: ignore[override]
        h = self.embed(x)
        for index in route or (0, 1, 2, 3):
            h = self.blocks[index](h)
        return nn.functional.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


@on_ranks(2)
def test_what_cannot_run_so_is_refused_in_one_line_and_training_goes_on(rank: int) -> None:
    """Look at what is said to programs that cannot run so, and train on after each."""
    torch.manual_seed(0)
    model, optimizer, engine = make_sharded("zero3", model=Wandering())
    x, y = batch(rank, 0)
    said: dict[str, str] = {}

    def tried(name: str, batches: list[Any], loss_fn: Any, **options: Any) -> None:
        before = threading.active_count()
        try:
            engine.accumulate(batches, loss_fn, **options)
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
        assert threading.active_count() == before, name
        assert model.blocks[0].__dict__.get("forward") is None
        engine.reset()
        assert inside.is_at_rest(engine), name
        with torch.enable_grad():
            model(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def fails(one: Any) -> torch.Tensor:
        if one == 1:
            raise ArithmeticError("in the second")
        return model(x, y)

    def keeps(one: Any) -> torch.Tensor:
        inner = model.blocks[1].up

        def keep(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            model.blocks[1].aux = out.sum()  # type: ignore[assignment]

        handle = inner.register_forward_hook(keep)
        try:
            return model(x, y)
        finally:
            handle.remove() if one == 9 else handles.append(handle)

    handles: list[Any] = []
    route = lambda one: model(x, y, one)  # noqa: E731
    tried("order", [None, (1, 0, 2, 3)], route)
    tried("fewer", [None, (0, 1, 2)], route)
    tried("more", [(0, 1, 2), None], route)
    tried("none", [], route)
    tried("raises", [0, 1, 2], fails)
    tried("scalar", [0], lambda one: model(x, y).detach())
    tried("vector", [0], lambda one: model(x, y).expand(2))
    tried("tier", [0], route, tier="tape")
    tried("kept", [0], keeps)
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        tried("no_grad", [None], route)
    engine.close()
    at = "micro-batch 0 has come to {} and micro-batch 1 to {}:"
    assert all("\n" not in line for line in said.values())
    assert at.format("'blocks.0'", "'blocks.1'") in said["order"]
    assert at.format("'blocks.3'", "'norm'") in said["fewer"]
    assert at.format("'norm'", "'blocks.3'") in said["more"]
    assert "no batches" in said["none"]
    assert said["raises"] == "ArithmeticError: in the second"
    assert "takes a loss, a 0-d tensor that needs gradients" in said["scalar"]
    assert "a tensor [2]" in said["vector"]
    assert "tier='tape' is not a tier" in said["tier"]
    assert "blocks.1.aux is a tensor that needs gradients" in said["kept"]
    assert "without gradients" in said["no_grad"]
