"""Sizes as people write them: units are needed, decimal and binary ones differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.core.sizes import parse_bytes, parse_count
from zeroshard.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [("7.5B", 7_500_000_000), ("350M", 350_000_000), ("1t", 10**12), ("0.1K", 100)],
)
def test_counts_have_decimal_suffixes(text: str, size: int) -> None:
    assert parse_count(text, "params") == size


@pytest.mark.parametrize(
    ("text", "size"),
    [("32GiB", 32 << 30), ("32GB", 32 * 10**9), ("3.2tb", 3_200_000_000_000), ("1 KiB", 1024)],
)
def test_bytes_are_decimal_or_binary(text: str, size: int) -> None:
    assert parse_bytes(text, "disk") == size


@pytest.mark.parametrize("text", ["", "many", "-1GB", "1e3GB", "3.GB", "1GX", "nanGB", "0KB", "B"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^disk="):
        parse_bytes(text, "disk")


def test_a_number_without_a_unit_is_refused_with_an_example() -> None:
    with pytest.raises(ConfigError, match=r"params='7' has no unit.*as in 7\.5B"):
        parse_count("7", "params")


@given(st.integers(1, 10**6), st.sampled_from(["K", "M", "B", "T"]))
def test_whole_numbers_are_exact(number: int, unit: str) -> None:
    powers = {"K": 3, "M": 6, "B": 9, "T": 12}
    assert parse_count(f"{number}{unit}", "params") == number * 10 ** powers[unit]
