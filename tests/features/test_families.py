"""Families of models that people train: the same losses and the same weights as torch DDP, bit
for bit, at stages 1, 2 and 3.
"""

from __future__ import annotations

import functools
import random
import time
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.families import FAMILIES, TINY
from tests.support.family_training import STAGES, Contender, compare, train
from tests.support.harness import on_ranks, run_ranks

STEPS = 6
# a decoder, a tied and a shared embedding, buffers, experts, and frozen weights of two dtypes
IN_BF16 = (
    "Llama",
    "GPT-2 (tied head)",
    "T5 (shared embedding)",
    "ResNet (batch norm)",
    "Mixtral (experts)",
    "LoRA on fp32",
    "LoRA on int8",
    "Mamba",
)


@pytest.mark.parametrize("steps", [3, pytest.param(STEPS, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if FAMILIES[name].slow else [])
        for name in FAMILIES
    ],
)
def test_family_trains_to_ddps_bits_at_every_stage(name: str, steps: int) -> None:
    for differences in run_ranks(2, compare, name, steps, timeout=100):
        assert not any(differences.values()), differences


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((name, 3) for name in IN_BF16),
        *(pytest.param(name, STEPS, marks=pytest.mark.slow) for name in FAMILIES),
    ],
)
def test_family_trains_in_bf16_to_the_bits_of_ddp_over_fp32_parameters(
    name: str, steps: int
) -> None:
    for differences in run_ranks(2, compare, name, steps, (3,), None, "auto", "bf16", timeout=100):
        assert not any(differences.values()), differences


@pytest.mark.slow
# its ranks gather different units
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "mixture of expert modules"])
def test_family_trains_to_ddps_bits_over_sockets(name: str) -> None:
    for differences in run_ranks(2, compare, name, STEPS, (3,), None, "gloo", timeout=100):
        assert not any(differences.values()), differences


@pytest.mark.parametrize("name", ["mixture of expert modules", "Mixtral (experts)"])
def test_ranks_use_different_experts(name: str) -> None:
    """What the catalogue says of them, or the test above proves less than it seems to."""
    family = FAMILIES[name]
    used: list[set[Any]] = []
    for rank in range(2):
        model = family.model(TINY)
        family.loss(model, family.data(TINY, rank, 0)).backward()
        grads = {
            key: p.grad
            for key, p in model.named_parameters()
            if ".experts." in key and p.grad is not None
        }
        # Mixtral's experts are rows of one parameter
        rows = {key: grad if grad.ndim == 3 else grad[None] for key, grad in grads.items()}
        used.append(
            {
                (key, index)
                for key, grad in rows.items()
                for index in range(len(grad))
                if grad[index].any()
            }
        )
    assert used[0] != used[1]


# -------------------------------------------------------------------------------------- two engines


class _Late(torch.autograd.Function):
    """The identity, whose backward is late now and then."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, chance: random.Random) -> torch.Tensor:
        ctx.chance = chance
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.chance.random() < 0.3:
            time.sleep(0.003)
        return grad, None


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_backward_through_two_engines_does_not_stall_when_ranks_are_late(
    rank: int, stage: int
) -> None:
    """A rank that waits in one engine is awaited by its peers in the other."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16))
    second = nn.Sequential(
        *[nn.Linear(16, 16) for _ in range(8)], nn.Linear(16, 600), nn.Linear(600, 1)
    )
    optimizers = [torch.optim.AdamW(model.parameters()) for model in (first, second)]
    engines = [
        zs.shard(model, optimizer, stage=stage)
        for model, optimizer in zip((first, second), optimizers, strict=True)
    ]
    chance = random.Random(rank)
    for layer in second:
        layer.register_forward_hook(lambda module, args, output: _Late.apply(output, chance))
    for _ in range(100):
        second(first(torch.randn(4, 16))).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        optimizers[1].zero_grad()  # what the first loss left there is not wanted
        second(torch.randn(4, 16)).square().mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    for engine in engines:
        engine.close()


# ------------------------------------------------------------------------- activation checkpointing


def _recompute(model: Any, *, use_reentrant: bool) -> None:
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant}
    )
    if not next(model.get_input_embeddings().parameters()).requires_grad:
        # reentrant checkpoints see no gradient to compute otherwise
        model.enable_input_require_grads()
    assert model.is_gradient_checkpointing


_T5 = "T5 (shared embedding)"
_CHECKPOINTED = ["Llama", "GPT-2 (tied head)", _T5, "ViT", "LoRA on fp32"]


@pytest.mark.parametrize(
    ("name", "use_reentrant"),
    [
        *((name, False) for name in _CHECKPOINTED if name != _T5),
        ("Llama", True),
        ("LoRA on fp32", True),
        pytest.param(_T5, False, marks=pytest.mark.slow),
        *(
            pytest.param(name, True, marks=pytest.mark.slow)
            for name in ("GPT-2 (tied head)", _T5, "ViT")
        ),
    ],
)
def test_gradient_checkpointing_gives_the_bits_of_ddp_with_it(
    name: str, use_reentrant: bool
) -> None:
    prepare = functools.partial(_recompute, use_reentrant=use_reentrant)
    for differences in run_ranks(2, compare, name, 4, STAGES, prepare, timeout=100):
        assert not any(differences.values()), differences


# --------------------------------------------------------------------------------------- generation


def _generate(model: Any, prompt: torch.Tensor, rank: int, **options: Any) -> torch.Tensor:
    torch.manual_seed(rank)
    mask = torch.ones_like(prompt)
    tokens: torch.Tensor = model.generate(prompt, attention_mask=mask, pad_token_id=0, **options)
    return tokens


def _generates(rank: int, world: int, name: str) -> list[int]:
    """Train, generate in the middle, train on; return how many tokens each generation has."""
    family = FAMILIES[name]
    contender = Contender(family, 3, rank)
    sharded, engine = contender.players[0].inner, contender.players[0].engine
    assert engine is not None
    for _ in range(2):
        contender.step()
    plain: nn.Module = family.model(TINY)
    plain.load_state_dict(engine.full_state_dict(rank0_only=False))
    prompt = family.data(TINY, rank, 99)["input_ids"][:1, : 3 + rank]
    sampled = _generate(
        plain.eval(), prompt, rank, do_sample=True, max_new_tokens=16, eos_token_id=None
    )
    # the ranks end after different numbers of tokens: at the first of these
    ends = int(sampled[0, -1 if rank else -10])
    lengths = []
    sharded.eval()
    for options in (
        {"do_sample": True, "max_new_tokens": 16, "eos_token_id": ends},
        {"do_sample": False, "max_new_tokens": 4 + 7 * rank, "eos_token_id": None},
        {"do_sample": False, "num_beams": 2, "max_new_tokens": 9 - 4 * rank, "eos_token_id": None},
    ):
        expected = _generate(plain, prompt, rank, **options)
        assert torch.equal(_generate(sharded, prompt, rank, **options), expected), options
        with engine.gathered():
            assert torch.equal(_generate(sharded, prompt, rank, **options), expected), options
        lengths.append(expected.shape[1])
    sharded.train()
    for _ in range(2):
        contender.step()
    assert contender.finish().differs_from(train(rank, family, None, 4)) == []
    return lengths


@pytest.mark.parametrize("name", ["Llama", "GPT-2 (tied head)", "T5 (shared embedding)", "Mamba"])
def test_ranks_that_finish_at_different_lengths_generate_the_tokens_of_the_plain_model(
    name: str,
) -> None:
    first, second = run_ranks(2, _generates, name, timeout=100)
    assert all(a != b for a, b in zip(first, second, strict=True)), (first, second)
