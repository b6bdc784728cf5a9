"""An engine without an optimizer: weights on the host and on disk, encoded at rest, read around the
end of a forward; Transformers' ``generate()`` as it is.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support import inside
from tests.support.broken_storage import Broken
from tests.support.harness import RankError, on_ranks, run_ranks
from zeroshard.comm.codec import Codec, codec
from zeroshard.tier import disk

pytest.importorskip("transformers")

TOKENS = 6
PROMPT = torch.arange(1, 5)[None]


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).eval()


def _generate(model: Any) -> list[list[int]]:
    tokens: list[list[int]] = model.generate(
        PROMPT, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0
    ).tolist()
    return tokens


def _offload(tier: str, path: Path | str) -> zs.Offload:
    disk = {"disk_path": str(path)} if tier == "disk" else {}
    return zs.Offload.model_validate({"weight": tier, **disk})


def _round(coder: Codec, model: nn.Module) -> None:
    """Give every parameter the numbers that it has after the codec."""
    for parameter in model.parameters():
        data = torch.empty(coder.encoded_bytes(parameter.numel()), dtype=torch.uint8)
        coder.encode(parameter.data.flatten(), data)
        coder.decode(data, parameter.data.view(-1))


# ------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_weights_on_every_tier_generate_the_tokens_and_logits_of_the_plain_model(
    world: int, tmp_path: Path
) -> None:
    plain = _llama()
    expected, logits = _generate(plain), plain(PROMPT).logits
    for tier in ("device", "host", "disk"):
        for frozen in (False, True):
            model = _llama().requires_grad_(not frozen)
            engine = zs.shard(model, None, policy="zero3", offload=_offload(tier, tmp_path))
            assert _generate(model) == expected
            with torch.no_grad():
                assert torch.equal(model(PROMPT).logits, logits)
            memory = engine.memory()
            numel = sum(p.numel() for p in model.parameters())
            assert numel / world <= memory.tiers["weight"][tier] / 4 <= 1.1 * numel / world
            engine.close()


@pytest.mark.parametrize(("world", "name"), [(1, "int8"), (2, "int8"), (1, "int4")])
@on_ranks()
def test_weights_that_rest_encoded_generate_as_the_plain_model_with_the_codecs_weights(
    rank: int, world: int, name: str, tmp_path: Path
) -> None:
    coder, plain = codec(name), _llama()
    _round(coder, plain)
    expected, logits = _generate(plain), plain(PROMPT).logits
    for tier in ("device", "host", "disk"):
        model = _llama().requires_grad_(False)
        comm = zs.Comm(frozen_codec=name)
        engine = zs.shard(model, None, policy="zero3", offload=_offload(tier, tmp_path), comm=comm)
        assert _generate(model) == expected
        with torch.no_grad():
            assert torch.equal(model(PROMPT).logits, logits)
        shares = [
            stop - start
            for one in inside.segments(engine)
            for start, stop in [one.flat.layout.ranges[rank]]
        ]
        resting = {tier: sum(map(coder.encoded_bytes, shares))}
        assert engine.memory().tiers["weight"] == resting
        engine.close()


class Relus(nn.Module):
    """A model whose outputs can be bounded by hand: an error of a layer grows by its weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        y: torch.Tensor = self.layers[-1](x)
        return y


def _bound(model: Relus, x: torch.Tensor, coder: Codec) -> torch.Tensor:
    """Return how far each output may be off when each weight is off by its block's bound."""
    off = torch.zeros_like(x)
    for index, layer in enumerate(model.layers):
        assert isinstance(layer, nn.Linear)
        weight = layer.weight.detach()  # a row is one block
        error = torch.tensor([coder.error_bound(amax) for amax in weight.abs().amax(1).tolist()])
        off = off @ (weight.abs() + error[:, None]).T + x.abs() @ error.expand(256, 256)
        x = layer(x).relu() if index < 2 else layer(x)
    return off * (1 + 1e-5) + 1e-5  # fp32's own rounding of the products


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_outputs_are_off_by_no_more_than_the_codecs_bound_allows(name: str, tmp_path: Path) -> None:
    coder, x = codec(name), torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, bound = Relus()(x), _bound(Relus(), x, coder)
        model = Relus().requires_grad_(False)
        comm = zs.Comm(frozen_codec=name)
        engine = zs.shard(model, None, offload=_offload("disk", tmp_path), comm=comm)
        off = (model(x) - expected).abs()
        assert off.max() > 0 and (off <= bound).all(), (off / bound).max()
        engine.close()


def _saved_and_loaded(rank: int, world: int, path: Path) -> None:
    """Checkpoints and gathered() see what rests, around a generation that reads ahead."""
    coder, plain = codec("int8"), _llama()
    _round(coder, plain)
    engines = []
    for tier in ("host", "disk"):
        model = _llama().requires_grad_(False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        comm = zs.Comm(frozen_codec="int8", transport="gloo")
        engine = zs.shard(model, None, policy="zero3", offload=_offload(tier, path), comm=comm)
        _generate(model)
        zs.load_pretrained(engine, path / "model")
        assert _generate(model) == _generate(plain)
        state = engine.full_state_dict(rank0_only=False)
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
        zs.save(path / tier, engine, step=1)
        with engine.gathered(writeback=True):
            for parameter in model.parameters():
                parameter.zero_()
        assert _generate(model) != _generate(plain)
        zs.load(path / tier, engine)
        assert _generate(model) == _generate(plain)
        engines.append(engine)
    for engine in engines:
        engine.close()
        assert _generate(engine.module) == _generate(plain)


@pytest.mark.parametrize("world", [1, 2])
def test_encoded_weights_on_host_and_disk_are_loaded_saved_and_edited(
    world: int, tmp_path: Path
) -> None:
    _llama().save_pretrained(tmp_path / "model")
    run_ranks(world, _saved_and_loaded, tmp_path)


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_a_fraction_of_encoded_weights_is_cut_between_blocks(world: int) -> None:
    coder, plain = codec("int8", block=192), _llama()
    _round(coder, plain)
    expected = _generate(plain)
    for fraction in (0.3, 0.9):
        model = _llama().requires_grad_(False)
        engine = zs.shard(
            model,
            None,
            policy="zero3",
            offload=zs.Offload(weight="host", fraction=fraction),
            comm=zs.Comm(frozen_codec="int8", codec_block=192),
        )
        assert _generate(model) == expected
        tiers = engine.memory().tiers["weight"]
        assert tiers["host"] / sum(tiers.values()) == pytest.approx(fraction, abs=0.02)
        engine.close()


def test_a_block_that_does_not_divide_a_tile_of_the_load_is_no_hindrance(tmp_path: Path) -> None:
    model, x = nn.Linear(1100, 1000, bias=False).requires_grad_(False), torch.ones(1, 1100)
    coder = codec("int8", block=192)
    plain = nn.Linear(1100, 1000, bias=False)
    plain.load_state_dict(model.state_dict())
    _round(coder, plain)
    comm = zs.Comm(frozen_codec="int8", codec_block=192)
    engine = zs.shard(model, None, offload=_offload("disk", tmp_path), comm=comm)
    assert torch.equal(model(x), plain(x))
    engine.close()


# -------------------------------------------------------------------------------------- reads ahead


def _order(engine: zs.Engine, model: nn.Module, passes: int) -> list[tuple[str, str]]:
    events: list[tuple[str, str]] = []
    with inside.traced(engine, lambda what, name: events.append((what, name))), torch.no_grad():
        for _ in range(passes):
            model(PROMPT)
            events.append(("end", ""))
    return events


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_the_last_units_of_a_forward_start_the_reads_of_the_next_one(
    world: int, tmp_path: Path
) -> None:
    model = _llama()
    engine = zs.shard(model, None, policy="zero3", offload=_offload("disk", tmp_path))
    events = _order(engine, model, 3)
    ends = [index for index, event in enumerate(events) if event == ("end", "")]
    first_used = next(name for what, name in events if what == "use")
    for before, after in pairwise(ends):
        between = events[before:after]
        used = next(index for index, (what, _) in enumerate(between) if what == "use")
        # it is there or on its way: the forward before has started it
        assert ("gather", first_used) not in between[:used], between
    # of the first forward the order is that of definition: all but one are started ahead
    late = [
        name
        for (what, name), after in pairwise(events[: ends[0]])
        if what == "gather" and after == ("use", name)
    ]
    assert late == [first_used], late
    ahead = engine.memory().temporary
    assert 0 < ahead <= 2 * inside.largest_unit_bytes(engine)
    assert engine.memory().peak <= 4 * inside.largest_unit_bytes(engine)
    engine.close()


def test_what_is_ahead_stays_within_prefetch_bytes(tmp_path: Path) -> None:
    for num_bytes in (0, 40_000, 10**9):
        model = _llama()
        engine = zs.shard(
            model,
            None,
            policy="zero3",
            offload=_offload("disk", tmp_path),
            prefetch_bytes=num_bytes,
        )
        _generate(model)
        assert engine.memory().temporary <= num_bytes
        assert (engine.memory().temporary > 0) == (num_bytes > 0)
        engine.close()


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_gradients_and_an_optimizer_may_follow_a_forward_that_reads_ahead(
    world: int, tmp_path: Path
) -> None:
    """Forwards with gradients and backwards come between forwards without."""
    plain, model = _llama(), _llama()
    engine = zs.shard(model, None, policy="zero3", offload=_offload("disk", tmp_path))
    embedded = torch.randn(1, 4, 32)
    grads = []
    for one in (plain, model):
        x = embedded.clone().requires_grad_()
        with torch.no_grad():
            one(PROMPT)
        loss = one(inputs_embeds=x).logits.square().sum()
        with torch.no_grad():
            one(PROMPT)  # reads ahead, and the backward follows
        loss.backward()
        grads.append(x.grad)
    assert grads[0] is not None and grads[1] is not None and torch.equal(grads[0], grads[1])
    model.zero_grad()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with torch.no_grad():
        model(PROMPT)
    engine.attach(optimizer)  # from here on steps rewrite the weights
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    plain.zero_grad()
    for one, stepped in ((plain, other), (model, optimizer)):
        for _ in range(2):
            one(PROMPT, labels=PROMPT).loss.backward()
            stepped.step()
            stepped.zero_grad()
            with torch.no_grad():
                one(PROMPT)
    assert engine.memory().temporary == 0
    assert _generate(model) == _generate(plain)
    with torch.no_grad():
        assert torch.equal(model(PROMPT).logits, plain(PROMPT).logits)
    engine.close()


class Wide(nn.Module):
    """Layers whose weights are huge pages, so that reads of the disk need no copy."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_without_gradients_the_disk_writes_into_the_gathered_buffer_itself(
    world: int, tmp_path: Path
) -> None:
    copied: list[int] = []
    put = disk._HostBytes.put

    def counted(self: Any, start: int, memory: Any, low: int, num_bytes: int) -> None:
        copied.append(num_bytes)
        put(self, start, memory, low, num_bytes)

    x = torch.randn(2, 1024, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = Wide()(x)
    model = Wide()
    engine = zs.shard(model, None, policy="zero3", offload=_offload("disk", tmp_path))
    disk._HostBytes.put = counted  # type: ignore[method-assign]
    try:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(model(x), expected)
                kept = model.layers[1].weight  # outside a forward it rests
                assert kept.shape == (1024, 1024)
        assert not copied, copied
        assert torch.equal(model(x), expected)  # with gradients the storage is autograd's
        assert copied
    finally:
        disk._HostBytes.put = put  # type: ignore[method-assign]
    engine.close()


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_encoded_weights_that_cannot_be_read_are_an_error_on_every_rank(
    rank: int, world: int, tmp_path: Path
) -> None:
    broken = Broken("read", "layers.2")
    with broken.installed():
        model = _llama().requires_grad_(False)
        comm = zs.Comm(frozen_codec="int8")
        engine = zs.shard(
            model, None, policy="zero3", offload=_offload("disk", tmp_path), comm=comm
        )
        expected, outputs = _generate(model), list[Any]()
        watched = model.model.layers[2].register_forward_hook(lambda *a: outputs.append(a[-1]))
        broken.armed = rank == world - 1
        with torch.no_grad(), pytest.raises(zs.StorageError, match=r"layers\.2"):
            for _ in range(2):  # one forward is read already
                model(PROMPT)
        broken.armed = False
        watched.remove()
        last = outputs[-1] if isinstance(outputs[-1], torch.Tensor) else outputs[-1][0]
        assert last.isnan().any()
        engine.reset()
        assert _generate(model) == expected
        engine.close()


def test_a_codec_at_rest_says_how_weights_become_frozen() -> None:
    with pytest.raises(zs.ConfigError, match=r"model\.requires_grad_\(False\)"):
        zs.shard(_llama(), None, policy="zero3", comm=zs.Comm(frozen_codec="int8"))


def _disagree(rank: int, world: int) -> None:
    model = _llama().requires_grad_(rank == 0)
    zs.shard(model, None, policy="zero3")


def test_ranks_that_froze_different_parameters_are_told_so() -> None:
    with pytest.raises(RankError, match="trained"):
        run_ranks(2, _disagree)
