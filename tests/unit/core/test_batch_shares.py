"""Batches cut by shares."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zeroshard import (
    ConfigError,
    GlobalBatchSampler,
    LeafSampler,
    UnevenBatchSampler,
    shard,
    split_batch,
)
from zeroshard.core.shares import check_batch_shares, unequal

parts = st.lists(st.integers(0, 50), min_size=1, max_size=8).filter(any)


def shares_of(parts: list[int]) -> list[float]:
    return [part / sum(parts) for part in parts]


@given(parts, st.integers(0, 5000))
def test_sizes_add_up_and_are_within_one_sample_of_the_shares(parts: list[int], total: int) -> None:
    shares = shares_of(parts)
    sizes = split_batch(total, shares)
    assert sum(sizes) == total and min(sizes) >= 0
    assert all(abs(n - total * share) < 1 + 1e-6 for n, share in zip(sizes, shares, strict=True))


@given(parts, st.integers(1, 20))
def test_parts_that_divide_are_exact(parts: list[int], times: int) -> None:
    assert split_batch(times * sum(parts), shares_of(parts)) == [times * part for part in parts]


def test_left_over_samples_go_by_remainder_and_then_to_lower_ranks() -> None:
    assert split_batch(10, [0.25, 0.25, 0.5]) == [3, 2, 5]
    assert split_batch(7, [0.1, 0.9]) == [1, 6]
    assert split_batch(1, [0.1, 0.9]) == [0, 1]
    assert split_batch(3, [0.0, 1.0]) == [0, 3]


@given(
    parts, st.integers(0, 100), st.integers(1, 40), st.booleans(), st.booleans(), st.integers(0, 3)
)
def test_the_ranks_together_take_every_sample_once(
    parts: list[int], numel: int, batch_size: int, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    shares = shares_of(parts)
    samplers = [
        UnevenBatchSampler(
            numel, batch_size, shares, rank, shuffle=shuffle, seed=3, drop_last=drop_last
        )
        for rank in range(len(shares))
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    steps = list(zip(*samplers, strict=True))  # as many batches on every rank
    assert len(steps) == len(samplers[0])
    seen = [[index for part in step for index in part] for step in steps]
    whole = numel - numel % batch_size if drop_last else numel
    everything = [index for batch in seen for index in batch]
    assert len(set(everything)) == len(everything) == whole
    assert all(len(batch) == batch_size for batch in seen[: numel // batch_size])
    for step in steps[: numel // batch_size]:
        assert tuple(map(len, step)) == tuple(samplers[0].sizes)
    if shuffle:
        samplers[0].set_epoch(epoch, first_batch=1)
        assert list(samplers[0]) == [step[0] for step in steps[1:]]
        assert len(samplers[0]) == max(0, len(steps) - 1)
    elif not drop_last:
        assert everything == list(range(numel))


def test_another_epoch_has_another_order() -> None:
    sampler = UnevenBatchSampler(100, 10, [0.5, 0.5], 0)
    first = list(sampler)
    assert first == list(sampler)
    sampler.set_epoch(1)
    assert list(sampler) != first


@pytest.mark.parametrize(
    ("shares", "line"),
    [
        ([0.5, 0.6], r"batch_shares \[0.5, 0.6\] add up to 1.1, not to 1: divide each by that"),
        ([1.5, -0.5], r"batch_shares \[1.5, -0.5\] must be one number >= 0 per data parallel rank"),
        ([], "must be one number"),
        ([float("nan"), 1.0], "must be one number"),
    ],
)
def test_shares_that_are_none_are_refused(shares: list[float], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        check_batch_shares(shares)
    with pytest.raises(ConfigError, match=line):
        UnevenBatchSampler(10, 4, shares, 0)


def test_a_sampler_refuses_a_rank_without_a_share_and_a_batch_of_nothing() -> None:
    with pytest.raises(ConfigError, match="rank=2 has none of the 2 batch_shares"):
        UnevenBatchSampler(10, 4, [0.5, 0.5], 2)
    with pytest.raises(ConfigError, match="batch_size=0 counts the samples of all ranks"):
        UnevenBatchSampler(10, 0, [0.5, 0.5], 1)


def test_equal_shares_weigh_nothing_and_others_add_up_to_one() -> None:
    assert unequal([1 / 3] * 3) == unequal([0.1] * 10) == unequal([1.0]) == unequal([]) == ()
    assert unequal([0.25, 0.75]) == (0.25, 0.75)
    assert sum(unequal([0.3, 0.7000001])) == pytest.approx(1.0, abs=1e-15)


# ------------------------------------------------------------------------------------------ leaves


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 60))
def test_every_sample_is_in_one_leaf_of_an_epoch(leaves: int, size: int, left: int) -> None:
    numel = 2 * leaves * size + left % (leaves * size)
    sampler = LeafSampler(numel, leaves, size, seed=3)
    assert sampler.num_steps == 2
    epochs = [
        [sampler[step, leaf] for step in (first, first + 1) for leaf in range(leaves)]
        for first in (0, 2)
    ]
    for epoch in epochs:
        seen = [index for leaf in epoch for index in leaf]
        assert len(seen) == len(set(seen)) == 2 * leaves * size and max(seen) < numel
    assert epochs[0] != epochs[1] or numel < 12


def test_without_a_seed_leaves_are_in_order() -> None:
    sampler = LeafSampler(12, "3x2", 2, seed=None)
    assert [sampler[0, leaf] for leaf in range(6)] == [[2 * n, 2 * n + 1] for n in range(6)]


@pytest.mark.parametrize(
    ("leaves", "size", "told"),
    [
        ("3x", 2, "a number of leaves"),
        (16, 2, "31 samples are none for a step of 16 leaves of 2"),
        (4, 0, "31 samples are none for a step"),
    ],
)
def test_samplers_of_too_little_are_refused(leaves: int | str, size: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LeafSampler(31, leaves, size)


def test_a_leaf_that_is_none_is_an_index_error_and_who_computes_which_the_engine_says() -> None:
    sampler = LeafSampler(31, 4, 2)
    for place in ((0, 4), (0, -1), (-1, 0)):
        with pytest.raises(IndexError):
            sampler[place]
    with pytest.raises(ConfigError, match="needs engine="):
        next(iter(sampler))


# ---------------------------------------------------------------------------------- global batches


def test_a_global_batch_follows_from_its_step_and_an_engine_of_one_rank_takes_all_of_it() -> None:
    engine = shard(torch.nn.Linear(1, 1), None, policy="zero3")
    sampler = GlobalBatchSampler(10, 4, engine, seed=3)
    assert sampler.num_steps == len(sampler) == 2
    epochs = []
    for epoch in range(2):
        sampler.set_step(2 * epoch)
        epochs.append(list(sampler))
        assert len({index for batch in epochs[-1] for index in batch}) == 8
    assert epochs[0] != epochs[1]
    sampler.set_step(3)
    assert len(sampler) == 1 and list(sampler) == epochs[1][1:]
    in_order = GlobalBatchSampler(range(8), 4, engine, seed=None)
    assert list(in_order) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for size in (0, -1, 11):
        told = f"batch_size={size} counts the samples of all ranks: give at least 1, one per rank"
        with pytest.raises(ConfigError, match=told):
            GlobalBatchSampler(10, size, engine)
    engine.close()
