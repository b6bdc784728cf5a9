"""Dtypes by name, their defaults, and the combinations that are refused."""

from __future__ import annotations

import pytest
import torch

from zeroshard.core.precision import PRECISIONS, Precision, dtype_name, parse_dtype

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize(("name", "dtype"), [("fp32", FP32), ("bf16", BF16), ("fp16", FP16)])
def test_a_short_name_stands_for_compute_and_wire_with_fp32_at_rest(
    name: str, dtype: torch.dtype
) -> None:
    precision = PRECISIONS[name]
    assert precision == Precision(name) == Precision(dtype)  # type: ignore[arg-type]
    assert (precision.compute, precision.wire, precision.accumulate, precision.master) == (
        dtype,
        dtype,
        FP32,
        FP32,
    )
    assert precision.weight_is_master == (name == "fp32")
    assert precision.needs_loss_scaling == (name == "fp16")


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_names_and_dtypes_are_one_to_one(dtype: torch.dtype) -> None:
    assert parse_dtype(dtype_name(dtype)) is dtype is parse_dtype(dtype)


def test_any_field_may_be_given_by_name() -> None:
    precision = Precision("bf16", reduce="fp32", accumulate="bf16", master="fp32")  # type: ignore[arg-type]
    assert precision == Precision(BF16, FP32, BF16, FP32)
    assert precision.describe() == "compute=bf16, reduce=fp32, accumulate=bf16, master=fp32"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compute": "fp8"}, "'fp8' is not one of fp32, bf16, fp16"),
        ({"compute": torch.int8}, "int8"),
        ({"compute": "fp32", "reduce": "int8"}, "'int8'"),
        ({"compute": "fp16", "master": "fp16"}, "master='fp16' is not supported"),
        (
            {"compute": "bf16", "accumulate": "fp16"},
            "accumulate='fp16' must be 'fp32' or the compute dtype 'bf16'",
        ),
        ({"compute": "fp32", "accumulate": "bf16"}, "accumulate='bf16'"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Precision(**fields)  # type: ignore[arg-type]


def test_a_precision_is_a_value() -> None:
    assert len({Precision(BF16), Precision(BF16, BF16), Precision(BF16, FP32)}) == 2
