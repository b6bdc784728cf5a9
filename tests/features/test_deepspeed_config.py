"""DeepSpeed's configuration read as ours, key by key, and what of it has an effect in the engine:
clipping at the step, batch sizes compared, fp16's loss scale.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard as zs
from tests.support.deepspeed_files import FILES, NAMES
from tests.support.harness import ROOT, run_ranks
from tests.support.training import train
from zeroshard import Config, ConfigError
from zeroshard.config import build_config
from zeroshard.config.strict_json import parse_hjson
from zeroshard.deepspeed.keys.table import KEYS, SECTIONS, deepspeed_markdown


def _leaves(data: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


@pytest.mark.parametrize("name", FILES)
def test_files_of_the_documentation_load_and_every_key_is_accounted_for(name: str) -> None:
    file = zs.read_deepspeed(FILES[name])
    assert file.refusals() == []
    file.config().refuse_unsupported()
    keys = {finding.key for finding in file.findings}
    for leaf in _leaves(FILES[name]):
        parts = leaf.split(".")
        own = {".".join(parts[: n + 1]) for n in range(len(parts))}
        assert own & keys or FILES[name].get("zero_optimization") is True, leaf
    told = {finding.verdict for finding in file.findings}
    assert told <= {"honoured", "mapped", "ignored"}
    assert all(finding.why for finding in file.findings)
    assert Config.from_json(file.config().to_json()) == file.config() == Config.read(FILES[name])


def test_every_documented_key_is_in_the_table() -> None:
    assert [name for name in NAMES if name not in KEYS and name not in SECTIONS] == []


def test_the_published_table_is_the_current_one() -> None:
    path = Path(__file__).parents[2] / "docs" / "deepspeed-keys.md"
    assert path.read_text() == deepspeed_markdown(), (
        "python -m zeroshard.config.reference deepspeed > docs/deepspeed-keys.md"
    )


def test_every_refused_key_is_told_at_once_with_its_remedy() -> None:
    source = {
        "amp": {"enabled": True},
        "bf16": {"enable": True},
        "elasticity": {"enabled": True},
        "zero_optimization": {"stage": 3, "overlap_com": True, "zenflow": {"topk_ratio": 0.1}},
        "steps_per_prnt": 10,
        "sparse_gradients": True,
    }
    with pytest.raises(ConfigError) as caught:
        Config.from_deepspeed(source)
    first, *lines = str(caught.value).split("\n")
    assert first == "6 keys of DeepSpeed's are refused:" and len(lines) == 6
    for words in (
        "amp={'enabled': True}: Apex is not used: use bf16 or fp16",
        "bf16.enable=True is not a key of DeepSpeed's; did you mean 'enabled'?",
        "elasticity={'enabled': True}: batch sizes do not follow the number of ranks",
        "overlap_com=True is not a key of DeepSpeed's; did you mean 'overlap_comm'?",
        "offload.delayed_update hides the step on the host",
        "use nn.Embedding(sparse=False)",
    ):
        assert words in str(caught.value)
    assert len(zs.read_deepspeed(source).refusals()) == 6, "which reads without raising"
    # DeepSpeed drops what is unknown at the top
    assert zs.read_deepspeed(source).unknown() == [
        "steps_per_prnt=10 is not a key of DeepSpeed's, which drops it; did you mean"
        " 'steps_per_print'?"
    ]


def test_an_unknown_key_beside_an_optimizers_type_is_dropped_with_a_line() -> None:
    keys = {
        "optimizer": {"type": "Adam", "torch_adam": True, "param": 1, "params": {"lr": 0.1}},
        "scheduler": {"type": "WarmupLR", "note": {"by": "me"}},
        "zero_optimization": {"stage": 2, "elsewhere": 1},
    }
    file = zs.read_deepspeed(keys)
    assert file.unknown() == [
        "optimizer.torch_adam=True is not a key of DeepSpeed's, which drops it",
        "optimizer.param=1 is not a key of DeepSpeed's, which drops it; did you mean 'params'?",
        "scheduler.note={'by': 'me'} is not a key of DeepSpeed's, which drops it; did you mean"
        " 'type'?",
    ]
    [refused] = file.refusals()
    assert refused.line.endswith("is not a key of DeepSpeed's (up to 0.19.8): leave it out")


def test_an_unknown_key_at_the_top_is_a_warning_by_every_door(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = {"bf16": {"enabled": True}, "steps_per_prnt": 1}
    for read in (Config.read, Config.from_deepspeed, build_config):
        caplog.clear()
        assert read(source).precision == "bf16"  # type: ignore[operator]
        [told] = [one for one in caplog.records if one.levelno == logging.WARNING]
        assert "steps_per_prnt=1 is not a key of DeepSpeed's, which drops it" in told.getMessage()


def test_keys_that_only_tune_are_told_in_one_line_by_every_door(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(FILES["transformers zero3"]))
    with caplog.at_level(logging.INFO, logger="zeroshard"):
        config = Config.read(path)
    [record] = caplog.records
    said = record.getMessage()
    assert "zero_optimization.overlap_comm" in said and "optimizer.type" in said
    assert "wall_clock_breakdown" not in said, "which has its default"
    assert config == Config.from_deepspeed(path)


def test_the_scale_of_fp16_is_deepspeeds_with_its_defaults() -> None:
    config = Config.from_deepspeed({"fp16": {"enabled": True}})
    assert config.loss_scale == zs.LossScale(growth_interval=1000, hysteresis=2)
    moved = {"initial_scale_power": 8, "min_loss_scale": 4, "consecutive_hysteresis": True}
    scaler = Config.from_deepspeed({"fp16": {"enabled": True, **moved}}).loss_scaler()
    assert scaler is not None
    assert (scaler.scale, scaler.min_scale, scaler.consecutive_hysteresis) == (256, 4, True)
    static = Config.from_deepspeed({"fp16": {"enabled": True, "loss_scale": 0.5}}).loss_scaler()
    assert static is not None and (static.scale, static.dynamic) == (0.5, False)
    assert Config.from_deepspeed({"fp16": {"enabled": False, "loss_scale": 8}}).loss_scale is None
    assert Config.from_deepspeed({"fp16": {"enabled": "auto"}}).loss_scale is None
    for wrong in ({"initial_scale_power": 40}, {"initial_scale_power": 1, "min_loss_scale": 4}):
        assert len(zs.read_deepspeed({"fp16": {"enabled": True, **wrong}}).refusals()) == 1
    with pytest.raises(ConfigError, match="loss_scale has no effect without precision='fp16'"):
        Config(loss_scale=zs.LossScale()).refuse_unsupported()
    overridden = build_config({"fp16": {"enabled": True}}, precision="bf16")
    assert (overridden.precision, overridden.loss_scale) == ("bf16", None)


def test_dtypes_of_gradients_become_a_precision() -> None:
    source: dict[str, Any] = {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
    assert Config.from_deepspeed(source).precision == zs.Precision("bf16", reduce="fp32")  # type: ignore[arg-type]
    resting = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    precision = Config.from_deepspeed(resting).precision
    assert precision == zs.Precision("bf16", accumulate="bf16")  # type: ignore[arg-type]
    usual = {**source, "communication_data_type": "bf16", "data_types": {"grad_accum_dtype": None}}
    assert Config.from_deepspeed(usual).precision == "bf16"
    with pytest.raises(ConfigError, match="grad_accum_dtype='fp16': gradients rest in fp32 or"):
        Config.from_deepspeed({**source, "data_types": {"grad_accum_dtype": "fp16"}})


def test_the_sum_over_the_ranks_becomes_a_reduction() -> None:
    for op, expected in (("sum", "sum"), ("SUM", "sum"), ("mean", "mean"), (None, "mean")):
        assert Config.from_deepspeed({"gradient_allreduce_op": op}).gradient_reduction == expected
    with pytest.raises(ConfigError, match="gradient_allreduce_op='max' is not one of mean, sum"):
        Config.from_deepspeed({"gradient_allreduce_op": "max"})
    with pytest.raises(ConfigError, match="leave one of them out"):
        Config.from_deepspeed(
            {"gradient_allreduce_op": "sum", "zeroshard": {"leaves": 4}}
        ).refuse_unsupported()


def test_optimizer_and_scheduler_are_kept_for_who_makes_them() -> None:
    file = zs.read_deepspeed(FILES["transformers zero2"])
    assert file.optimizer is not None and file.optimizer[0] == "AdamW"
    assert file.optimizer[1]["lr"] == "auto"
    assert file.scheduler is not None and file.scheduler[0] == "WarmupLR"
    assert zs.read_deepspeed({"zero_optimization": {}}).optimizer is None


def test_two_forms_in_one_file_are_refused() -> None:
    with pytest.raises(ConfigError, match="'bf16' is a key of DeepSpeed's among keywords of shard"):
        Config.read({"stage": 2, "bf16": {"enabled": True}})


def test_null_stands_for_deepspeeds_default() -> None:
    zero = {"stage": None, "mics_shard_size": None, "offload_optimizer": {"device": None}}
    config = Config.from_deepspeed({"zero_optimization": zero, "gradient_clipping": None})
    assert (config.stage, config.policy, config.gradient_clipping) == (0, None, 1.0)
    assert not config.offload.away


def test_a_section_is_refused_where_a_switch_in_it_is_on() -> None:
    for off in ({}, {"enabled": False, "min_gpus": 1}, {"min_gpus": 1}, None):
        assert zs.read_deepspeed({"elasticity": off}).refusals() == []
    nested = {"weight_quantization": {"shared_parameters": {"enabled": True}}}
    for on in (
        {"elasticity": {"enabled": True}},
        {"compression_training": nested},
        {"tensor_parallel": {"autotp_size": 4}},
        {"pipeline": {"stages": 2}},
    ):
        assert len(zs.read_deepspeed(on).refusals()) == 1, on


def test_the_keys_that_0_19_7_and_0_19_8_have_added_are_taken() -> None:
    zero = {"stage": 2, "parameter_alignment": True, "compute_grad_norm": False}
    types = {"param_dtype": "bf16", "buffer_dtype": "bf16", "keep_in_fp32_modules": ["*bias"]}
    more = {"log_level": "WARNING", "disable_python_gc": True}
    more |= {"use_data_before_expert_parallelism": True, "vocabulary_size": 50257}
    source = {"bf16": {"enabled": True}, "zero_optimization": zero, "data_types": types} | more
    file = zs.read_deepspeed(source)
    assert file.refusals() == [] and file.unknown() == []
    usual = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    assert file.config() == Config.from_deepspeed(usual)
    for value in ("auto", [], None):
        assert zs.read_deepspeed({"data_types": {"keep_in_fp32_modules": value}}).refusals() == []


def test_configurations_of_what_deepspeed_has_removed_are_taken() -> None:
    """The blocks of docs/deepspeed-removed.md."""
    page = (ROOT / "docs" / "deepspeed-removed.md").read_text()
    mics, loco, one_bit = (json.loads(one.split("```")[0]) for one in page.split("```json\n")[1:])
    assert Config.from_deepspeed(mics).resolved_policy().name == "mics"
    assert Config.from_deepspeed(loco).comm.codecs().feedback is not None
    comm = Config.from_deepspeed(one_bit).comm
    assert (comm.weight_codec, comm.grad_codec) == ("int8", "int4")


@pytest.mark.slow
def test_an_installed_deepspeed_has_no_key_that_the_table_lacks(deepspeed_python: str) -> None:
    """Prints what differs: a new release of DeepSpeed adds keys and moves defaults."""
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT / "src")}
    command = [deepspeed_python, str(ROOT / "scripts" / "deepspeed_keys.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "not in our table: 0" in done.stdout and "another default: 0" in done.stdout


def test_older_forms_are_read() -> None:
    assert Config.from_deepspeed({"zero_optimization": True}).stage == 1
    older = Config.from_deepspeed({"zero_optimization": {"stage": 2, "cpu_offload": True}})
    assert (older.offload.optimizer, older.offload.grad) == ("host", "host")
    assert Config.from_deepspeed({"bfloat16": {"enabled": True}}).precision == "bf16"


def test_two_of_the_three_batch_sizes_give_the_third() -> None:
    def sizes(total: int | None, micro: int | None, steps: int | None) -> Any:
        return Config(
            train_batch_size=total,
            train_micro_batch_size_per_gpu=micro,
            gradient_accumulation_steps=steps,
        ).batch_sizes(2)

    assert sizes(24, 3, None) == sizes(24, None, 4) == sizes(None, 3, 4) == (24, 3, 4)
    assert sizes(24, None, None) == (24, None, None)
    with pytest.raises(ConfigError, match="train_batch_size=25 is not train_micro_batch_size"):
        sizes(25, 3, None)


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
        ({"zero_optimization": {"parameter_alignment": 16}}, "alignment=16 is neither true nor"),
        ({"zero_optimization": {"compute_grad_norm": "no"}}, "norm='no' is neither true nor false"),
        ({"data_types": {"param_dtype": "int8"}}, "param_dtype='int8' is not one of fp32, fp16,"),
        (
            {"data_types": {"param_dtype": "bf16"}},
            "param_dtype='bf16': weights are fp32, as fp16 and bf16 say: leave it out",
        ),
        ({"data_types": {"buffer_dtype": "int8"}}, "buffer_dtype='int8' is not one of fp32, fp16,"),
        (
            {"data_types": {"keep_in_fp32_modules": "bias"}},
            "keep_in_fp32_modules='bias' is neither 'auto' nor a list of names",
        ),
        ({"data_types": {"keep_in_fp32_modules": ["(", "bias"]}}, "has a bad pattern"),
        ({"data_types": {"keep_in_fp32_modules": [1]}}, "has a bad pattern"),
        ({"disable_python_gc": 1}, "disable_python_gc=1 is neither true nor false"),
        ({"log_level": "loud"}, "log_level='loud' is not one of debug, info, warning, error, crit"),
        ({"use_data_before_expert_parallelism": "yes"}, "='yes' is neither true nor false"),
        ({"weight_quantization": {"post_init_quant": {}}}, "use comm.frozen_codec"),
        ([1], "is a JSON object, not a list"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(source: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_deepspeed(source)


def _scaled(rank: int, world: int) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = {"enabled": True, "initial_scale_power": 20, "hysteresis": 2, "loss_scale_window": 2}
    source = {"zero_optimization": {"stage": 2}, "fp16": scale, "gradient_clipping": 0}
    engine = zs.shard(model, optimizer, config=source)
    scales = []
    for factor in (1e4, 1e4, 1e-6, 1e-6):
        engine.backward(factor * model(torch.ones(2, 4)).float().sum())
        optimizer.step()
        optimizer.zero_grad()
        scales.append(engine.loss_scale)
    engine.close()
    return scales


def test_the_scale_of_a_deepspeed_file_is_that_of_the_engine() -> None:
    expected = [2.0**20, 2.0**19, 2.0**19, 2.0**20]
    assert run_ranks(2, _scaled) == [expected] * 2, "the second overflow halves it"


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


def test_keys_of_stage_3_may_leave_out_their_prefix() -> None:
    short = {"stage": 3, "max_live_parameters": 0, "gather_16bit_weights_on_model_save": True}
    file = zs.read_deepspeed({"zero_optimization": short})
    assert file.refusals() == []
    assert file.data["zero_optimization"] == {
        "stage": 3,
        "stage3_max_live_parameters": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    both = {"stage3_prefetch_bucket_size": 1, "prefetch_bucket_size": 2}
    held = zs.read_deepspeed({"zero_optimization": both}).data["zero_optimization"]
    assert held == {"stage3_prefetch_bucket_size": 1}


def test_weights_leave_the_device_at_stage_3_alone() -> None:
    nvme = {"device": "nvme", "nvme_path": "/a"}
    for stage, weight in ((0, "device"), (1, "device"), (2, "device"), (3, "disk")):
        zero = {"stage": stage, "offload_param": nvme}
        file = zs.read_deepspeed({"zero_optimization": zero})
        assert file.config().offload.weight == weight
        told = {one.key: one.why for one in file.findings if one.verdict == "ignored"}
        assert ("zero_optimization.offload_param.device" in told) == (stage < 3)
    # its directory does not contradict that of the optimizer's state
    other = {"device": "nvme", "nvme_path": "/b"}
    zero = {"stage": 2, "offload_param": nvme, "offload_optimizer": other}
    assert Config.from_deepspeed({"zero_optimization": zero}).offload.disk_path == "/b"


HJSON = """
{
  // as DeepSpeed reads it
  "train_batch_size": 8,   # samples
  bf16: {enabled: true}
  zero_optimization: {
    stage: 3
    "offload_param": {"device": 'cpu', nvme_path: /local/nvme
    },
    /* of no effect */ "leaf_module": {"names": [
      a
      "b", ]},
  },
  steps_per_print: 1e1,
}
"""


@pytest.mark.parametrize(
    "filling",
    [" " * 10**6, "\n" * 10**6, "#\n" * 10**6, "/**/" * 10**6, "\t//\n" * 10**6,
     "b: '" + "x" * 10**6 + "'\n", "b: " + " " * 10**6 + "x\n"],
    ids=["blanks", "lines", "comments", "stars", "both", "text", "word"],
)  # fmt: skip
def test_reading_hjson_takes_no_more_memory_than_the_file(filling: str) -> None:
    tracemalloc.start()
    try:
        read = parse_hjson("{" + filling + " train_batch_size: 8,}")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert read["train_batch_size"] == 8
    assert peak < 4 * len(filling) + 2**20


def test_a_file_may_be_hjson(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(HJSON)
    data = zs.read_deepspeed(path).data
    assert data == {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu", "nvme_path": "/local/nvme"},
            "leaf_module": {"names": ["a", "b"]},
        },
        "steps_per_print": 10.0,
    }
    assert Config.read(path).offload.weight == "host"
    for wrong in (
        '{"stage": 2, "train_batch_size": NaN, "bf16": {},}',
        '{"fp16": {"enabled": true}, "fp16": {},}',
        '{"fp16": {"enabled": true}',
        '{"fp16" {}}',
        '{"fp16": }',
        '{"train_batch_size": 1e999,}',
        '{"fp16": "a',
        "{,fp16: " + "[" * 200,
    ):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match="is not JSON"):
            zs.read_deepspeed(path)
    # our own form stays strict
    path.write_text('{"stage": 2,}')
    with pytest.raises(ConfigError, match="is not JSON"):
        Config.read(path)
