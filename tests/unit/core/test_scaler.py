"""The loss scale, step by step, and against torch.amp's own arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.core.loss_scale import LossScaler
from zeroshard.errors import ConfigError


def scales(scaler: LossScaler, overflows: str) -> list[float]:
    """Return the scale after each step; "x" overflows, "." does not."""
    out = []
    for step in overflows:
        scaler.update(step == "x")
        out.append(scaler.scale)
    return out


def test_the_defaults_are_those_of_the_papers() -> None:
    scaler = LossScaler()
    assert (
        scaler.scale,
        scaler.growth_factor,
        scaler.backoff_factor,
        scaler.growth_interval,
        scaler.min_scale,
    ) == (65536, 2, 0.5, 2000, 1)


def test_the_example_of_the_docstring() -> None:
    scaler = LossScaler(scale=8.0, growth_interval=3)
    assert scales(scaler, "...x...") == [8, 8, 16, 8, 8, 8, 16]


def test_it_grows_after_exactly_the_interval() -> None:
    scaler = LossScaler()
    assert set(scales(scaler, "." * 1999)) == {65536.0}
    assert scales(scaler, "." * 2001)[:1] == [131072.0]
    assert (scaler.scale, scaler.streak) == (262144.0, 0)


def test_an_overflow_starts_the_interval_anew() -> None:
    scaler = LossScaler(scale=8.0, growth_interval=3)
    assert scales(scaler, "..x..x...") == [8, 8, 4, 4, 4, 2, 2, 2, 4]


def test_it_stops_at_the_floor_and_says_so() -> None:
    scaler = LossScaler(scale=4.0, growth_interval=2)
    assert not scaler.at_floor
    assert scales(scaler, "xxxx") == [2, 1, 1, 1]
    assert (scaler.at_floor, scaler.num_skipped) == (True, 4)
    assert scales(scaler, "..") == [1, 2]
    assert (scaler.at_floor, scaler.num_skipped) == (False, 0)


def test_it_stops_at_the_ceiling() -> None:
    scaler = LossScaler(growth_interval=1)
    assert scales(scaler, "." * 2000)[-1] == 2.0**32
    assert scales(scaler, "x") == [2.0**31]


@given(
    st.lists(st.booleans(), max_size=40),
    st.integers(1, 5),
    st.sampled_from([1.5, 2.0, 4.0]),
    st.sampled_from([0.25, 0.5]),
)
def test_it_moves_as_torchs_scaler_does(
    overflows: list[bool], interval: int, growth: float, backoff: float
) -> None:
    scaler = LossScaler(
        growth_interval=interval,
        growth_factor=growth,
        backoff_factor=backoff,
        min_scale=2.0**-100,
        max_scale=2.0**120,
        scale=1.0,
    )
    scale, tracker = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    for overflow in overflows:
        scaler.update(overflow)
        torch._amp_update_scale_(
            scale, tracker, torch.tensor([float(overflow)]), growth, backoff, interval
        )
        assert math.isclose(scaler.scale, scale.item(), rel_tol=1e-5)  # torch rounds 1.5**n to fp32
        assert scaler.streak == tracker.item()


@given(st.text(alphabet=".x", max_size=30), st.text(alphabet=".x", max_size=30))
def test_a_saved_scaler_goes_on_where_it_was(before: str, after: str) -> None:
    first = LossScaler(scale=8.0, growth_interval=3, growth_factor=4.0)
    scales(first, before)
    second = LossScaler(growth_interval=3, growth_factor=4.0)
    second.load_state_dict(first.state_dict())
    assert first == second
    assert scales(first, after) == scales(second, after)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": math.nan}, "loss scale nan"),
        ({"scale": 0.5}, "min_scale"),
        ({"speed": 1}, "'speed' missing or unknown"),
    ],
)
def test_a_wrong_state_is_refused_and_changes_nothing(change: dict[str, Any], message: str) -> None:
    scaler = LossScaler()
    with pytest.raises(ConfigError, match=message):
        scaler.load_state_dict(LossScaler(scale=2.0).state_dict() | change)
    assert scaler == LossScaler()


@pytest.mark.parametrize(
    "options",
    [
        {"growth_factor": 1.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"max_scale": math.inf},
    ],
)
def test_a_scale_that_cannot_move_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LossScaler(**options)


def test_with_hysteresis_the_scale_outlasts_overflows_until_it_has_grown() -> None:
    scaler = LossScaler(scale=8.0, growth_interval=3, hysteresis=2)
    assert scales(scaler, "x.x") == [8, 8, 4], "the second overflow shrinks it"
    assert scales(scaler, "x") == [2], "and each that follows"
    assert scales(scaler, "...x") == [2, 2, 4, 4], "until it has grown"
    scaler = LossScaler(scale=8.0, hysteresis=2, consecutive_hysteresis=True)
    assert scales(scaler, "x.x.xx") == [8, 8, 8, 8, 8, 4], "or until a good step"


def test_a_static_scale_stays_also_when_another_is_loaded() -> None:
    scaler = LossScaler(scale=8.0, growth_interval=1, dynamic=False)
    assert scales(scaler, "..x.") == [8, 8, 8, 8]
    scaler.update(overflow=True)
    assert scaler.at_floor
    scaler.load_state_dict(LossScaler(scale=2.0).state_dict())
    assert (scaler.scale, scaler.num_skipped) == (8, 0)


def test_a_state_of_all_numbers_as_older_checkpoints_hold_it_is_taken() -> None:
    scaler = LossScaler(growth_interval=7)
    old = {"scale": 4.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}
    scaler.load_state_dict(
        old | {"min_scale": 1.0, "max_scale": 2.0**32, "streak": 3, "num_skipped": 0}
    )
    assert (scaler.scale, scaler.streak, scaler.growth_interval) == (4, 3, 7)
