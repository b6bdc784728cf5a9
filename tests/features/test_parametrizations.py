"""Weights that are computed from other parameters at every use: torch's parametrizations, and
the hooks that came before them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from tests.support.cases import WIDTH, Case, Chain, compare_case, seeded, simple
from tests.support.harness import on_ranks


class Symmetric(nn.Module):
    """Keeps a matrix symmetric."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).mT


class Scaled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH, 1))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.scale


def _linear(change: Callable[[nn.Linear], nn.Module]) -> Callable[[int], nn.Module]:
    def make(width: int) -> nn.Module:
        return nn.Sequential(change(nn.Linear(width, width)), nn.GELU(), nn.Linear(width, width))

    return make


def _registered(*added: Callable[[], nn.Module]) -> Callable[[nn.Linear], nn.Module]:
    def change(linear: nn.Linear) -> nn.Module:
        for make in added:
            parametrize.register_parametrization(linear, "weight", make())
        return linear

    return change


def _cached(change: Callable[[nn.Linear], nn.Module]) -> Callable[[int], nn.Module]:
    class Cached(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.inner = _linear(change)(width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with parametrize.cached():
                return self.inner(self.inner(x))

    return Cached


def _for_one_forward(linear: nn.Linear) -> nn.Module:
    """As PEFT's adapters on parameters do (target_parameters, for fused experts): a parametrization
    that is there for the length of each forward.
    """

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.scaled = linear, Scaled()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = self.base.weight
            trained = weight.requires_grad
            parametrize.register_parametrization(self.base, "weight", self.scaled)
            weight.requires_grad_(trained)
            try:
                with parametrize.cached():
                    return self.base(x)
            finally:
                parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)

    return Adapted()


CHANGES: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "weight norm": lambda linear: parametrizations.weight_norm(linear),
    "spectral norm": lambda linear: parametrizations.spectral_norm(linear),
    "orthogonal": lambda linear: parametrizations.orthogonal(linear),
    "a parametrization": _registered(Symmetric),
    "two, one with a parameter": _registered(Symmetric, Scaled),
    "weight norm by hook": lambda linear: weight_norm(linear),
    "spectral norm by hook": lambda linear: spectral_norm(linear),
    "for the length of a forward": _for_one_forward,
    "pruning": lambda linear: prune.random_unstructured(linear, "weight", 0.3),
}
CASES = {name: Case(seeded(Chain, _linear(change)), simple) for name, change in CHANGES.items()}
# DDP's hooks do not survive what torch does to a trained parameter there
CASES["for the length of a forward"] = replace(CASES["for the length of a forward"], ddp=None)
CASES["weight norm, cached"] = Case(seeded(Chain, _cached(CHANGES["weight norm"])), simple)


CASES["for the length of a forward, on a frozen weight"] = Case(
    seeded(Chain, _linear(lambda linear: _for_one_forward(linear.requires_grad_(False)))), simple
)


@pytest.mark.parametrize("name", CASES)
@on_ranks(2)
def test_a_parametrized_model_trains_to_ddps_bits_in_every_row(rank: int, name: str) -> None:

    differences = compare_case(rank, CASES[name])
    assert not any(differences.values()), differences
