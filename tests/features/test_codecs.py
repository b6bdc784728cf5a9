"""Encoded weights and gradients: what a step may lose, what it may not touch, what travels, and
what is refused.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

import zeroshard as zs
from tests.support import inside
from tests.support.harness import on_ranks, run_ranks
from tests.support.training import (
    Net,
    batch,
    bytes_between_nodes,
    final_state,
    make_model,
    one_step,
    take_steps,
    train,
    two_groups,
)
from zeroshard.comm.codec import Codec, codec
from zeroshard.core.placement import Mesh
from zeroshard.core.policy import row as policy_row
from zeroshard.core.precision import PRECISIONS
from zeroshard.core.wire import Wires
from zeroshard.errors import ConfigError

MESH = Mesh(2, 2)
PLUS_PLUS = {"weight_codec": "int8", "grad_codec": "int4"}
WIDTH = 64


# ------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize(
    ("name", "row", "precision"),
    [("int8", "hpz", "fp32"), ("int4", "zero3", "fp32"), ("fp8", "hpz", "bf16")],
)
@on_ranks(4, timeout=60)
def test_weights_travel_encoded_and_masters_stay(
    rank: int, name: str, row: str, precision: str
) -> None:
    """Look at the weights that a forward computes with, and at what rests."""
    model = make_model(width=WIDTH)
    given = {key: value.clone() for key, value in model.state_dict().items()}
    comm = zs.Comm(transport="gloo", node_size=2, weight_codec=name)
    engine = zs.shard(model, two_groups(model), policy=row, precision=precision, comm=comm)
    seen: dict[str, torch.Tensor] = {}
    block = model.blocks[1]
    block.up.register_forward_hook(
        lambda module, args, out: seen.update(up=module.weight.detach().clone())
    )
    loss = model(*batch(rank, 0))
    exact = given["blocks.1.up.weight"].to(seen["up"].dtype)
    coder = codec(name)
    encoded = torch.empty(coder.encoded_bytes(exact.numel()), dtype=torch.uint8)
    coder.encode(exact.flatten(), encoded)  # every parameter begins on a block
    decoded = torch.empty_like(exact).flatten()
    coder.decode(encoded, decoded)
    in_forward = torch.equal(seen.pop("up"), decoded.view_as(exact))
    backward = {}
    block.up.weight.register_hook(lambda grad: backward.update(up=block.up.weight.detach().clone()))
    loss.backward()
    with engine.gathered():
        shown = torch.equal(block.up.weight, exact)
    whole = final_state(model, engine)
    seen = {
        "the forward computes with decoded weights": in_forward,
        "so does the backward": torch.equal(backward["up"], decoded.view_as(exact)),
        "gathered() shows what rests": shown,
        "masters are untouched": all(
            torch.equal(whole[key], value.to(whole[key].dtype)) for key, value in given.items()
        ),
        "close() gives back what rests": all(
            torch.equal(value, given[key]) for key, value in model.state_dict().items()
        ),
    }
    assert all(seen.values()), seen


@on_ranks(2, timeout=30)
def test_an_edit_writes_back_what_rests_and_not_what_was_decoded() -> None:
    model = make_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    engine = zs.shard(model, two_groups(model), comm=zs.Comm(weight_codec="int4"))
    with engine.gathered(writeback=True), torch.no_grad():
        model.head.weight.add_(1.0)
    after = final_state(model, engine)
    before["head.weight"] += 1.0
    found = [key for key, value in before.items() if not torch.equal(value, after[key])]
    assert found == []


# --------------------------------------------------------------------------- frozen weights at rest


class Adapted(Net):
    """A frozen base with a small adapter after every block, as LoRA has."""

    def __init__(self) -> None:
        super().__init__(width=WIDTH)
        self.requires_grad_(False)
        self.adapters = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in self.blocks
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        h = self.embed(x)
        for block, adapter in zip(self.blocks, self.adapters, strict=True):
            h = block(h) + 0.1 * adapter(h)
        logits = self.head(self.norm(h))
        return (
            logits
            if y is None
            else torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        )


@on_ranks(2, timeout=60)
def test_frozen_weights_rest_encoded_and_checkpoints_read_and_write_them(
    rank: int, world: int, tmp_path: Path
) -> None:
    coder = codec("int8")
    sizes, states, losses = {}, {}, {}
    for name, comm, rounded in (
        ("encoded", {"frozen_codec": "int8"}, False),
        ("rounded", {}, True),
    ):
        torch.manual_seed(0)
        model = Adapted()
        if rounded:  # the reference: the same numbers, at rest as they are
            for parameter in model.parameters():
                if not parameter.requires_grad:
                    data = torch.empty(coder.encoded_bytes(parameter.numel()), dtype=torch.uint8)
                    coder.encode(parameter.data.flatten(), data)
                    coder.decode(data, parameter.data.view(-1))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        engine = zs.shard(model, optimizer, comm=zs.Comm(**comm))  # type: ignore[arg-type]
        losses[name] = []
        for step in range(4):
            loss = model(*batch(rank, step))
            loss.backward()
            losses[name].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            if step == 1 and name == "encoded":
                zs.save(tmp_path, engine, step=2)
        num_bytes, numel = inside.frozen_bytes_and_numel(engine)
        sizes[name] = num_bytes / (numel / world)
        states[name] = engine.full_state_dict(rank0_only=False)
        if name == "encoded":
            zs.load(tmp_path, engine)
            states["loaded"] = {
                key: value
                for key, value in engine.full_state_dict(rank0_only=False).items()
                if "adapters" not in key
            }
        engine.close()
    seen = {
        "bytes": sizes,
        "losses are equal": losses["encoded"] == losses["rounded"],
        "differ": [
            key
            for key, value in states["rounded"].items()
            if not torch.equal(value, states["encoded"][key])
        ],
        "loaded": [
            key
            for key, value in states["loaded"].items()
            if not torch.equal(value, states["encoded"][key])
        ],
    }
    assert seen["bytes"] == {"encoded": pytest.approx(1 + 4 / 256), "rounded": pytest.approx(4.0)}
    assert seen["losses are equal"] and seen["differ"] == [] and seen["loaded"] == []


# ---------------------------------------------------------------------------------------- gradients


def _gradients(
    rank: int, world: int, names: list[str], levels: bool
) -> dict[str, tuple[float, float]]:
    """Return, per codec, the largest error of an averaged gradient and its bound from the values
    that were sent.
    """
    grads: dict[str, dict[str, torch.Tensor]] = {}
    sent: dict[str, float] = {}
    for name in ["", *names]:
        model = make_model(width=WIDTH)
        comm = zs.Comm(transport="gloo", node_size=2, hierarchical=levels, grad_codec=name or None)
        engine = zs.shard(model, two_groups(model), comm=comm)
        model(*batch(rank, 0)).backward()
        parameters = dict(model.named_parameters())
        grads[name] = {key: engine.full_grad(parameter) for key, parameter in parameters.items()}  # type: ignore[misc]
        engine.close()
    model = make_model(width=WIDTH)
    model(*batch(rank, 0)).backward()
    sent["amax"] = max(
        float(parameter.grad.abs().max())
        for parameter in model.parameters()
        if parameter.grad is not None
    )
    out = {}
    for name in names:
        coder: Codec = codec(name)
        worst = max(
            float((grads[name][key] - value).abs().max()) for key, value in grads[""].items()
        )
        out[name] = (worst, coder.error_bound(sent["amax"]))
    return out


@pytest.mark.parametrize("levels", [True, False], ids=["two levels", "flat"])
def test_a_gradient_is_off_by_what_the_codec_states(levels: bool) -> None:
    names = ["int8", "int4", "fp8"]
    seen = run_ranks(4, _gradients, names, levels, timeout=60)
    for name in names:
        # one encoding of values up to the largest gradient of any rank
        amax_bound = max(bounds[name][1] for bounds in seen)
        # four ranks' first hop, averaged: one bound; the second hop encodes two sums of two such
        # values, averaged over four: one more
        for errors in seen:
            assert 0 < errors[name][0] <= (2.05 if levels else 1.02) * amax_bound, (
                name,
                errors[name],
                amax_bound,
            )


@on_ranks(4, timeout=30)
def test_what_is_not_finite_is_never_hidden(rank: int) -> None:
    """One rank's gradient is Inf once: the step is skipped on every rank."""
    model = make_model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = two_groups(model)
    comm = zs.Comm(
        transport="gloo", node_size=2, hierarchical=True, **PLUS_PLUS, error_feedback=True
    )  # type: ignore[arg-type]
    engine = zs.shard(model, optimizer, policy="hpz", comm=comm)
    loss = model(*batch(rank, 0))
    (loss * float("inf") if rank == 3 else loss).backward()
    optimizer.step()
    optimizer.zero_grad()
    skipped = engine.skipped_steps if hasattr(engine, "skipped_steps") else 1
    after = engine.full_state_dict(rank0_only=False)
    take_steps(rank, 2, model, optimizer)
    last = final_state(model, engine)
    changed = [key for key, value in before.items() if not torch.equal(value, after[key])]
    found = skipped, changed + [key for key, value in last.items() if not value.isfinite().all()]
    assert found == (1, [])


# ----------------------------------------------------------------------------------- error feedback


def _loco(rank: int, world: int, feedback: object) -> tuple[float, int]:
    """Return how far the sum of many equal steps' gradients is off, relative to int4's step, and
    the bytes of the residual.
    """
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.weight.detach().clone()
    comm = zs.Comm(grad_codec="int4", error_feedback=feedback)  # type: ignore[arg-type]
    engine = zs.shard(layer, optimizer, comm=comm)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    for _ in range(32):
        (layer(x) * weight).sum().backward()  # its gradient never changes
        optimizer.step()
        optimizer.zero_grad()
    expected = before - 32 * weight.t() @ x
    error = float((engine.full_state_dict(rank0_only=False)["weight"] - expected).abs().mean())
    residual = engine.memory().at_rest.get("residual", 0)
    engine.close()
    return error, residual


def test_error_feedback_keeps_what_encoding_takes() -> None:
    (without, none), *_ = run_ranks(2, _loco, False, timeout=30)
    (with_it, held), *_ = run_ranks(2, _loco, True, timeout=30)
    (forgotten, _), *_ = run_ranks(2, _loco, {"beta": 1.0, "reset": 1}, timeout=30)
    assert none == 0 and held == 2 * 64 * 64
    assert with_it < 0.2 * without, (with_it, without)
    assert forgotten == pytest.approx(without, rel=0.01), (
        "a residual that is reset after each sum helps nothing"
    )


@on_ranks(2, timeout=60)
def test_the_residual_is_forgotten_where_it_is_of_other_gradients(rank: int) -> None:
    """Look at the bytes of the residual before and after what makes it stale."""

    def train(engine: zs.Engine, steps: int, factor: float = 1.0) -> int:
        for step in range(steps):
            engine.backward(model(*batch(rank, step)) * factor)
            optimizer.step()
            optimizer.zero_grad()
        return engine.memory().at_rest.get("residual", 0)

    out = {}
    for event in ("a good step", "reset", "another loss scale"):
        model = make_model()
        optimizer = two_groups(model)
        comm = zs.Comm(grad_codec="int8", error_feedback=True)
        engine = zs.shard(model, optimizer, stage=2, precision="fp16", comm=comm)
        before = train(engine, 2)
        if event == "reset":
            engine.reset()
            out[event] = before, engine.memory().at_rest.get("residual", 0)
        else:
            out[event] = (
                before,
                train(engine, 1, factor=1.0 if event == "a good step" else float("inf")),
            )
        engine.close()
    (before, after), *stale = out["a good step"], out["reset"], out["another loss scale"]
    assert before == after > 0
    assert stale == [(before, 0)] * 2


# ------------------------------------------------------------------------------------------ traffic


def _counted(
    rank: int, world: int, row: str, options: dict[str, object], precision: str
) -> tuple[int, int]:
    torch.manual_seed(0)
    model = Net(width=WIDTH, layers=3)
    optimizer = two_groups(model)
    comm = zs.Comm(transport="gloo", node_size=2, hierarchical=True, **options)  # type: ignore[arg-type]
    engine = zs.shard(model, optimizer, policy=row, precision=precision, comm=comm)
    for _ in range(2):
        one_step(engine, model, optimizer, rank)
        assert not inside.is_gathering(engine)
    counted = (bytes_between_nodes(engine), inside.padded_numel(engine))
    engine.close()
    return counted


@pytest.mark.parametrize(
    ("row", "options", "psi"),
    [
        ("zero3", {"grad_codec": "bf16"}, 1.5),
        ("zero3", {"weight_codec": "int8"}, 1.508),
        ("zero3", {"grad_codec": "int8"}, 1.254),
        ("hpz", {}, 1.5),
        ("hpz", PLUS_PLUS, 0.383),
        ("hpz", {"weight_codec": "int8", "grad_codec": "int8"}, 0.508),
    ],
)
def test_bytes_leaving_a_node_are_the_formula(
    row: str, options: dict[str, str], psi: float
) -> None:
    def per_element(name: str | None) -> float | None:
        return None if name in (None, "bf16") else codec(name).stride / codec(name).block  # type: ignore[arg-type]

    wires = Wires.of(
        PRECISIONS["bf16"],
        weight=per_element(options.get("weight_codec")),
        grad=per_element(options.get("grad_codec")),
        hop=2.0 if options.get("grad_codec") == "bf16" else None,
    )
    seen = run_ranks(4, _counted, row, options, "bf16", timeout=60)
    numel = seen[0][1]
    formula = (
        policy_row(row)
        .wire_bytes(numel=numel, mesh=MESH, wires=wires, two_level=True)
        .leaving_a_node(MESH)
    )
    for node in (seen[:2], seen[2:]):
        assert sum(between for between, _ in node) == pytest.approx(formula, rel=0.001)
    assert formula / (2 * numel) == pytest.approx(psi, abs=0.001)


# ----------------------------------------------------------------------------------------- training


def _trained(
    rank: int, world: int, options: dict[str, object], row: str, steps: int
) -> list[float]:
    run = train(
        rank, row, steps, optimizer=functools.partial(two_groups, lr=3e-3), comm=zs.Comm(**options)
    )  # type: ignore[arg-type]
    return run.losses


@pytest.mark.slow
def test_training_with_everything_encoded_follows_the_exact_run() -> None:
    (exact, *_), (coded, *_) = (
        run_ranks(
            4,
            _trained,
            {"transport": "gloo", "node_size": 2, "hierarchical": True, **options},
            row,
            40,
            timeout=60,
        )
        for options, row in (({}, "zero3"), ({**PLUS_PLUS, "error_feedback": True}, "hpz"))
    )
    assert coded != exact and sum(coded[-10:]) == pytest.approx(sum(exact[-10:]), rel=0.05)


# ------------------------------------------------------------------------------------------- misuse


@on_ranks(2, timeout=30)
def test_what_has_no_effect_on_one_node_is_refused() -> None:
    out = []
    for options in (
        {"hierarchical": True},
        {"grad_codec": "bf16"},
        {"hierarchical": True, "node_size": 2},
    ):
        model = make_model()
        with pytest.raises(ConfigError) as caught:
            zs.shard(model, two_groups(model), comm=options)
        out.append(str(caught.value))
    levels, hop, same = out
    assert (
        levels
        == same
        == "comm.hierarchical=True has no effect: all 2 ranks are one node; set comm.node_size"
    )
    assert hop.startswith("comm.grad_codec='bf16' rounds sums over one node")


def test_parameters_that_a_codec_cannot_take_are_named() -> None:
    model = make_model()
    model.register_parameter(
        "table", torch.nn.Parameter(torch.zeros(64, dtype=torch.int64), requires_grad=False)
    )
    for setting in ("weight_codec", "frozen_codec"):
        with pytest.raises(
            ConfigError,
            match=rf"comm.{setting}='int8' takes fp32, bf16 and fp16; parameter 'table' is int64",
        ):
            zs.shard(model, two_groups(model), comm={setting: "int8"})
    zs.shard(model, two_groups(model), comm={"grad_codec": "int8"}).close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"comm": {"weight_codec": "int7"}},
            r"comm.weight_codec: codec 'int7' .* did you mean 'int",
        ),
        (
            {"comm": {"grad_codec": "int8", "codec_block": 100}},
            r"comm.grad_codec: .*block=100 is not a positive multiple of 64",
        ),
        (
            {"comm": {"weight_codec": "int8"}, "stage": 2},
            r"comm.weight_codec='int8' encodes gathers .* policy='zero2'",
        ),
        (
            {"comm": {"weight_codec": "int8", "node_size": 1}, "policy": "mics"},
            r"comm.weight_codec='int8' encodes gathers .* policy='mics'",
        ),
        (
            {"comm": {"frozen_codec": "int4"}},
            r"comm.frozen_codec='int4' has no effect: every parameter",
        ),
        ({"comm": {"error_feedback": True}}, r"comm.error_feedback has no effect without"),
        ({"comm": {"weight_codec": "bf16"}}, r"comm.weight_codec='bf16' is no codec"),
        ({"comm": {"node_size": 3}}, r"comm.node_size=3 does not divide"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(options: dict[str, object], message: str) -> None:
    model = make_model()
    with pytest.raises(ConfigError, match=message):
        zs.shard(model, two_groups(model), **options)  # type: ignore[arg-type]
