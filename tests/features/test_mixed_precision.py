"""Half precision trains models that hold fp32 buffers or make fp32 tensors: what reaches a layer
of torch.nn's is cast, and nothing else is.
"""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard as zs
from benchmarks.fake_world import fake_world
from tests.support.harness import on_ranks
from tests.support.training import ROWS, VOCABULARY, Run, batch, make_sharded, take_steps

WIDTH = 16


class Positions(nn.Module):
    """Of PyTorch's tutorial "Language Modeling with nn.Transformer": a sinusoidal table in a
    buffer.
    """

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.by_hand = by_hand
        position, scale = (
            torch.arange(32.0)[:, None],
            torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(1e4) / WIDTH)),
        )
        self.register_buffer(
            "pe",
            torch.stack([torch.sin(position * scale), torch.cos(position * scale)], dim=-1).flatten(
                1
            ),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.pe.dtype is torch.float32
        return x + (
            self.pe[: x.shape[1]].to(torch.bfloat16) if self.by_hand else self.pe[: x.shape[1]]
        )


class Tutorial(nn.Module):
    """The tutorial's model, with the mask that it makes in its forward; `by_hand` casts all that
    as its author would.
    """

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.by_hand = by_hand
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = Positions(by_hand)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        h = self.positions(self.embed(x) * math.sqrt(WIDTH))
        h = self.encoder(h, mask.to(torch.bfloat16) if self.by_hand else mask)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1).float(), y.flatten())


class Many(nn.Module):
    """One of each layer that takes its weights' dtype alone, on fp32 tensors that the forward
    makes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            [
                nn.Linear(WIDTH, WIDTH),
                nn.LayerNorm(WIDTH),
                nn.GRU(WIDTH, WIDTH, batch_first=True),
                nn.PReLU(),
            ]
        )
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.convolutions = nn.ModuleList(
            [nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(2, WIDTH), nn.BatchNorm1d(WIDTH)]
        )
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h.float())
            h = h[0] if isinstance(h, tuple) else h
        h = self.bilinear(h.float(), h.float())
        for layer in self.convolutions:
            h = layer(h.mT.float()).mT
        h = (
            h
            + self.attention(
                h.float(),
                h.float(),
                h.float(),
                attn_mask=torch.zeros(h.shape[1], h.shape[1]),
                need_weights=False,
            )[0]
        )
        return nn.functional.cross_entropy(self.head(h.float()).flatten(0, 1).float(), y.flatten())


def _trained(
    rank: int,
    make: Callable[[], nn.Module],
    row: str = "zero3",
    precision: str = "bf16",
    steps: int = 4,
    **options: object,
) -> Run:
    torch.manual_seed(0)
    model, optimizer, engine = make_sharded(row, model=make(), precision=precision, **options)
    losses = take_steps(rank, steps, model, optimizer, engine)
    model.eval()
    with torch.no_grad(), engine.gathered():  # where the engine's own hooks are out of the way
        losses.append(model(*batch(rank, 9)).item())
    run = Run(losses, engine.full_state_dict(rank0_only=False))
    engine.close()
    with torch.no_grad():
        model(*batch(rank, 9))
    assert not any(module._forward_pre_hooks for module in model.modules())
    return run


@pytest.mark.parametrize("make", [Tutorial, Many])
@on_ranks(2)
def test_a_model_with_fp32_buffers_and_masks_trains_in_bf16_to_the_same_bits_in_every_row_and_cut(
    rank: int, make: Callable[[], nn.Module]
) -> None:
    runs = {row: _trained(rank, make, row) for row in ROWS}
    runs["fine cut"] = _trained(rank, make, units=[nn.Linear, nn.LayerNorm, nn.Embedding])
    for row, run in runs.items():
        assert all(math.isfinite(loss) for loss in run.losses)
        assert not run.differs_from(runs["ddp"]), (row, run.differs_from(runs["ddp"]))


def test_fp32_activations_are_cast_where_a_layer_reads_them() -> None:
    """The residual stream stays fp32, so that the losses are close to those of a model that
    casts its table by hand, and not the same.
    """
    ours, by_hand = _trained(0, Tutorial), _trained(0, lambda: Tutorial(by_hand=True))
    assert ours.losses == pytest.approx(by_hand.losses, rel=0.02)
    assert all(math.isfinite(loss) for loss in _trained(0, Tutorial, precision="fp16").losses)


class Shifted(nn.Module):
    """A block on an fp32 table."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("table", torch.linspace(0, 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.norm(x + self.table))


def _compiled(compiles: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Shifted() for _ in range(2)))
    for block in model if compiles else ():
        block.forward = torch.compile(block.forward, backend="eager")
    engine = zs.shard(model, precision="bf16")
    losses = [
        model(torch.full((2, WIDTH), 1.0 + number)).float().sum().item() for number in range(2)
    ]
    engine.close()
    return losses


def test_the_casts_are_part_of_a_compiled_forward() -> None:
    assert _compiled(True) == _compiled(False)


class Reads(nn.Module):
    """What a layer gives back for fp32 numbers that bf16 does not have."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self) -> torch.Tensor:
        return self.layer(torch.full((1, 1), 1.0 + 2**-10))


class Router(nn.Linear):
    """A layer with a forward of its own, which computes in fp32 on purpose."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.float())


class _Pair(NamedTuple):
    mask: torch.Tensor
    scale: torch.Tensor


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_containers_of_inputs_keep_their_types_when_what_they_hold_is_cast(precision: str) -> None:
    given: list[Any] = [
        _Pair(torch.ones(2, dtype=torch.int64), torch.ones(2)),
        OrderedDict(b=torch.ones(2), a=[torch.ones(2), None]),
        defaultdict(list, a=(torch.ones(2), "a")),
        nn.utils.rnn.pack_sequence([torch.ones(2, 1)]),
        deque([torch.ones(2)]),  # nothing that torch's modules take is one
    ]
    taken: list[Any] = []

    class Takes(nn.Linear):
        def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            taken.extend(kwargs["given"])
            return super().forward(x)

    engine = zs.shard(Takes(2, 2), precision=precision)
    engine.module(torch.ones(1, 2), given=given)
    engine.close()
    dtype = getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[precision])
    assert [type(value) for value in taken] == [type(value) for value in given]
    assert taken[0].scale.dtype is taken[3].data.dtype is dtype
    assert taken[0].mask.dtype is taken[3].batch_sizes.dtype is torch.int64
    assert list(taken[1]) == ["b", "a"] and taken[1]["a"][0].dtype is dtype
    assert taken[2].default_factory is list and taken[2]["a"][0].dtype is dtype
    assert taken[4] is given[4]


def test_a_layer_with_a_forward_of_its_own_gets_its_inputs_as_they_are() -> None:
    for layer, expected in (
        (nn.Linear(1, 1, bias=False), 1.0),
        (Router(1, 1, bias=False), 1.0 + 2**-10),
    ):
        nn.init.ones_(layer.weight)
        model = Reads(layer)
        engine = zs.shard(model, precision="bf16")
        assert model().item() == expected
        engine.close()


def test_under_autocast_the_inputs_of_layers_are_autocasts() -> None:
    model = Reads(nn.Linear(1, 1, bias=False))
    seen: list[torch.dtype] = []
    zs.shard(model, precision="bf16")
    model.layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model()
    model()
    assert seen == [torch.float32, torch.bfloat16]


class Casts(TorchDispatchMode):
    """Counts how many bf16 copies of a [64, 64] tensor were made, and how many of them live."""

    def __init__(self) -> None:
        super().__init__()
        self._made: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and out.dtype is torch.bfloat16
        if is_cast and out.shape == (64, 64):
            self._made.append(weakref.ref(out))
        return out

    def counts(self) -> tuple[int, int]:
        return len(self._made), sum(made() is not None for made in self._made)


@pytest.mark.parametrize(("cached", "alive"), [(False, 0), (True, 4)])
def test_autocast_keeps_casts_of_released_weights_only_in_its_cache(
    cached: bool, alive: int
) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    zs.shard(model, stage=3, units=[nn.Linear])
    with Casts() as casts, torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
        model(torch.ones(1, 64)).sum().backward()
        assert casts.counts() == (4, alive)
    assert casts.counts() == (4, 0)


class Scaled(nn.Module):
    """A module of the user's own, which multiplies matrices as torch does not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.register_buffer("table", torch.ones(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.table) @ self.weight


def test_an_error_of_torchs_about_dtypes_names_the_buffer_and_the_remedy() -> None:
    model = nn.Sequential(Scaled(), nn.BatchNorm1d(3))
    zs.shard(model, precision="bf16")
    with pytest.raises(RuntimeError, match="dtype") as caught:
        model(torch.ones(2, 3))
    (note,) = caught.value.__notes__
    assert (
        "buffer '0.table' is not" in note
        and "precision='bf16'" in note
        and ".to(x.dtype)" in note
        and "\n" not in note
    )


def test_other_errors_are_left_as_they_are() -> None:
    model = nn.Sequential(Scaled())
    zs.shard(model, precision="bf16")
    with pytest.raises(RuntimeError, match="must match the size") as caught:
        model(torch.ones(2, 4))
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize(
    ("world", "precision", "comm", "told"),
    [
        (16, "bf16", {}, "of 16 ranks are summed in bf16, rounded at each hop"),
        (32, "bf16", {"node_size": 16}, "of 16 ranks"),  # fp32 between nodes
        (8, "bf16", {}, ""),
        (32, "bf16", {"node_size": 8}, ""),
        (16, zs.Precision("bf16", reduce="fp32"), {}, ""),
        (16, "bf16", {"ordered": True}, ""),
        (16, "bf16", {"grad_codec": "int8"}, ""),
    ],
)
def test_it_is_told_where_a_backend_rounds_sums_of_many_ranks_at_each_hop(
    world: int, precision: Any, comm: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_world(world):
        comms = zs.Comm(transport="nccl", **comm)
        zs.shard(nn.Linear(64, 64), stage=2, precision=precision, comm=comms).close()
    lines = [line for line in caplog.messages if "at each hop" in line]
    assert len(lines) == bool(told) and told in "".join(lines)
