"""Every contender really trains: its losses beside torch DDP's, on two ranks, in both
precisions.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from benchmarks.contenders import Missing, Setup, _GatheredMuon, _OwnedMuon, builder_for
from benchmarks.fake_world import fake_group
from benchmarks.model import Batches, build
from benchmarks.plan import CONTENDERS, SIZES, Size, fake_ranks
from tests.support.harness import on_ranks, run_ranks

STEPS = 4
INSTALLED = [
    name for name in CONTENDERS if not (name.startswith(("deepspeed", "dmuon")) or fake_ranks(name))
]


def losses(
    rank: int,
    world_size: int,
    name: str,
    precision: str,
    optimizer: str = "adamw",
    of: str = "tiny",
) -> list[float]:
    """Train a tiny model for a few steps as contender `name`."""
    size, device = SIZES[of], torch.device("cpu")
    torch.manual_seed(0)
    setup = Setup(size, precision, device, optimizer=optimizer)
    trainee = builder_for(name, optimizer)(build(size), setup)
    batches = Batches(size, rank=rank, num_ranks=world_size, device=device)
    seen = []
    for step in range(STEPS):
        loss = trainee.forward(*batches[step])
        trainee.backward(loss)
        trainee.update()
        seen.append(loss.item())
    trainee.contexts.close()
    if trainee.engine is not None:
        trainee.engine.close()
    return seen


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", INSTALLED)
def test_a_contender_trains_as_torch_ddp_does(name: str, precision: str) -> None:
    ours, theirs = (
        run_ranks(2, losses, name, precision),
        run_ranks(2, losses, "torch-ddp", precision),
    )
    # the same weights and tokens
    assert ours[0][0] == pytest.approx(theirs[0][0], abs=2e-2 if precision == "bf16" else 1e-6)
    if name in ("compute", "plain"):
        assert ours[0][-1] != ours[0][0]
    elif precision == "bf16":
        assert ours[0] == pytest.approx(theirs[0], abs=2e-2)
    elif name.startswith(("fsdp2", "torch-zero1")):
        assert ours[0] == pytest.approx(theirs[0], abs=1e-4)
    else:
        assert ours == theirs


@pytest.mark.parametrize(
    ("of", "precision"), [("tiny", "fp32"), ("tiny", "bf16"), ("tiny-llama", "fp32")]
)
def test_with_muon_they_train_as_torch_ddp_does_too(of: str, precision: str) -> None:
    names = ("torch-ddp", "zero1", "zero2", "zero3", "fsdp2", "dmuon")
    found = {name: run_ranks(2, losses, name, precision, "muon", of) for name in names}
    for name, (first, _) in found.items():
        apart = 5e-4 if precision == "bf16" else 0.0  # in fp32 to the bit
        assert first == pytest.approx(found["torch-ddp"][0], rel=0, abs=apart), name
    assert found["zero1"] == found["zero2"] == found["zero3"]
    assert found["fsdp2"] == found["dmuon"]


def test_who_has_one_optimizer_says_so() -> None:
    for name, optimizer in (("dmuon", "adamw"), ("torch-zero1", "muon"), ("deepspeed3", "muon")):
        with pytest.raises(Missing, match="alone"):
            builder_for(name, optimizer)


@on_ranks(3)
def test_muon_beside_fsdp2_has_the_bits_of_torch_s(rank: int) -> None:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (3,))
    shapes = [(6, 9), (7, 4), (16, 5), (2, 12), (12, 12)]  # rows that three ranks cannot halve
    whole = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    plain = torch.optim.Muon([nn.Parameter(p.detach().clone()) for p in whole], lr=0.1)
    ours = [
        cls([nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])) for p in whole], lr=0.1)
        for cls in (_GatheredMuon, _OwnedMuon)
    ]
    for _ in range(3):
        grads = [torch.randn(shape) for shape in shapes]
        for optimizer in (plain, *ours):
            held = optimizer.param_groups[0]["params"]
            for p, grad in zip(held, grads, strict=True):
                p.grad = grad if optimizer is plain else distribute_tensor(grad, mesh, [Shard(0)])
            optimizer.step()
    for optimizer in ours:
        stepped = [p.full_tensor() for p in optimizer.param_groups[0]["params"]]
        assert all(map(torch.equal, stepped, plain.param_groups[0]["params"]))
    assert 0 < len(ours[1].state) < len(shapes)  # the owner keeps it


@pytest.mark.parametrize("name", ["zero3@fake8", "fsdp2@fake8"])
def test_a_rank_of_a_fake_world_holds_its_share_and_says_that_it_does_not_train(name: str) -> None:
    with fake_group(8):
        size, device = SIZES["tiny"], torch.device("cpu")
        trainee = builder_for(name)(build(size), Setup(size, "bf16", device))
        for step in range(2):
            batches = Batches(size, rank=0, num_ranks=1, device=device)
            loss = trainee.forward(*batches[step])
            trainee.backward(loss)
            trainee.update()
            assert math.isfinite(loss.item())
        assert trainee.facts["trains"] is False
        if trainee.engine is not None:
            assert trainee.engine.steps_skipped == 0
            held = sum(trainee.engine.memory().at_rest.values())
            assert held < 16 * size.num_parameters / 6


def test_batches_differ_between_ranks_and_steps_and_repeat() -> None:
    size, device = SIZES["tiny"], torch.device("cpu")
    first, second = (Batches(size, rank=rank, num_ranks=2, device=device) for rank in (0, 1))
    tokens, targets = first[3]
    assert tokens.shape == targets.shape == (size.batch, size.context) and torch.equal(
        tokens[:, 1:], targets[:, :-1]
    )
    assert torch.equal(tokens, first[3][0])
    assert not torch.equal(tokens, second[3][0]) and not torch.equal(tokens, first[4][0])


def test_bytes_of_a_text_are_tokens(tmp_path: Path) -> None:
    device = torch.device("cpu")
    text, short = tmp_path / "text", tmp_path / "short"
    text.write_bytes(bytes(range(256)))
    short.write_bytes(b"abc")
    tokens, targets = Batches(SIZES["tiny"], rank=0, num_ranks=1, device=device, files=[str(text)])[
        0
    ]
    assert torch.equal(tokens + 1, targets)
    with pytest.raises(ValueError, match="too small for bytes"):
        Batches(
            Size("narrow", 1, 8, 1, vocabulary=100),
            rank=0,
            num_ranks=1,
            device=device,
            files=[str(text)],
        )
    with pytest.raises(ValueError, match="too few"):
        Batches(SIZES["tiny"], rank=0, num_ranks=1, device=device, files=[str(short)])
