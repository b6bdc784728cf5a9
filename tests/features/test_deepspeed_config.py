"""DeepSpeed's configuration read as ours, and what of it has an effect in the engine: clipping
at the step, batch sizes compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.support.harness import run_ranks
from tests.support.training import train
from zeroshard import Config, ConfigError


def test_the_keys_that_are_read(tmp_path: Path) -> None:
    source = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
    }
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(source))
    config = Config.from_deepspeed(path)
    assert config == Config.from_deepspeed(source) == Config.read(path) == Config.read(source)
    assert (
        config.resolved_policy().name == "zero2"
        and config.precision == "bf16"
        and config.gradient_clipping == 0.5
    )
    assert (
        config.train_batch_size,
        config.train_micro_batch_size_per_gpu,
        config.gradient_accumulation_steps,
    ) == (32, 4, None)
    assert Config.from_json(config.to_json()) == config


def test_defaults_are_those_of_deepspeeds_code_and_auto_is_left_open() -> None:
    assert Config.from_deepspeed({}).resolved_policy().name == "ddp"
    assert Config.from_deepspeed({}).gradient_clipping == 1.0, "leaving it out still clips"
    assert Config.from_deepspeed({"gradient_clipping": 0}).gradient_clipping is None
    auto = Config.from_deepspeed(
        {
            "gradient_clipping": "auto",
            "fp16": {"enabled": "auto"},
            "zero_optimization": {"stage": 3},
        }
    )
    assert auto.gradient_clipping is None and "precision" not in auto.model_fields_set
    assert Config.from_deepspeed({"zero_optimization": {"stage": True}}).stage == 1


def test_offload_is_read_as_tiers() -> None:
    cpu = Config.from_deepspeed(
        {
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "ratio": 0.3, "pin_memory": True},
            }
        }
    ).offload
    assert (cpu.weight, cpu.grad, cpu.optimizer) == ("device", "host", "host") and cpu.fraction == {
        "optimizer": 0.3,
        "grad": 0.3,
    }
    nvme = {"device": "nvme", "nvme_path": "/mnt/nvme"}
    disk = Config.from_deepspeed(
        {"zero_optimization": {"stage": 3, "offload_optimizer": nvme, "offload_param": nvme}}
    ).offload
    assert (disk.weight, disk.grad, disk.optimizer, disk.disk_path) == (
        "disk",
        "host",
        "disk",
        "/mnt/nvme",
    )
    assert (
        Config.from_deepspeed(
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
        ).offload.grad
        == "device"
    )
    assert not Config.from_deepspeed(
        {"zero_optimization": {"offload_param": {"device": "none"}}}
    ).offload.away


def test_plus_plus_and_mics_are_read_as_rows_and_codecs() -> None:
    plus = {
        "stage": 3,
        "zero_hpz_partition_size": 8,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
    }
    config = Config.from_deepspeed(
        {"zero_optimization": {**plus, "zeropp_loco_param": {"err_beta": 0.5, "reset_T": 7}}}
    )
    comm = config.comm
    assert (config.resolved_policy().name, comm.node_size, comm.weight_codec, comm.grad_codec) == (
        "hpz",
        8,
        "int8",
        "int4",
    )
    feedback = comm.codecs().feedback
    assert feedback is not None and (feedback.beta, feedback.reset) == (0.5, 7)
    mics = Config.from_deepspeed(
        {"zero_optimization": {"stage": 3, "mics_shard_size": 4, "zero_hpz_partition_size": 1}}
    )
    assert (mics.resolved_policy().name, mics.comm.node_size) == ("mics", 4)
    assert (
        Config.from_deepspeed(
            {
                "zero_optimization": {
                    "stage": 3,
                    "mics_shard_size": -1,
                    "zero_quantized_weights": False,
                }
            }
        ).comm
        == zs.Comm()
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            {"zero_optimisation": {"stage": 3}},
            r"zero_optimisation=.* is not a key of DeepSpeed's; did you mean 'zero_optimization'",
        ),
        (
            {"zero_optimization": {"stage": 2, "zero_quantized_weights": True}},
            "ZeRO\\+\\+ and MiCS are stage 3, not 2",
        ),
        (
            {"zero_optimization": {"stage": 3, "mics_shard_size": 2, "zero_hpz_partition_size": 2}},
            "are both set",
        ),
        (
            {"zero_optimization": {"stage": 3, "zeropp_loco_param": {"err_bet": 1}}},
            r"zeropp_loco_param.err_bet=1 is not .*; did you mean 'err_beta'",
        ),
        (
            {"zero_optimization": {"stage": 3, "overlap_com": {}}},
            r"zero_optimization.overlap_com={} is not a key of DeepSpeed's",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}},
            "zero_optimization.offload_optimizer.devise='cpu' is not .* mean 'device'",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "tpu"}}},
            "device='tpu' is not one of none, cpu, nvme",
        ),
        ({"zero_optimization": 3}, "zero_optimization=3 is not an object"),
        ({"zero_optimization": {"stage": 4}}, "stage=4 is not one of 0, 1, 2, 3"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16 are both enabled"),
        ({"gradient_clipping": -1}, "gradient_clipping=-1 is negative"),
        ([1], "is a JSON object, not a list"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(source: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_deepspeed(source)


def _clipped(rank: int, world: int) -> None:
    def trained(clips: bool, **options: Any) -> dict[str, torch.Tensor]:
        return train(rank, "zero3", 4, clip=0.1 if clips else None, **options).state

    by_hand = trained(True)
    for options in ({"gradient_clipping": 0.1}, {"config": {"gradient_clipping": 0.1}}):
        by_itself = trained(False, **options)
        assert all(torch.equal(by_itself[name], value) for name, value in by_hand.items())
    both = trained(True, gradient_clipping=0.001)
    assert all(torch.equal(both[name], value) for name, value in by_hand.items()), (
        "what the user clips is not clipped again"
    )
    with pytest.raises(
        ConfigError,
        match=(
            "train_batch_size=24 is not train_micro_batch_size_per_gpu=3 x"
            " gradient_accumulation_steps=2 x 2 ranks"
        ),
    ):
        trained(
            False,
            train_batch_size=24,
            train_micro_batch_size_per_gpu=3,
            gradient_accumulation_steps=2,
        )
    trained(
        False, train_batch_size=12, train_micro_batch_size_per_gpu=3, gradient_accumulation_steps=2
    )


def test_clipping_and_batch_sizes_have_their_effect() -> None:
    run_ranks(2, _clipped)
