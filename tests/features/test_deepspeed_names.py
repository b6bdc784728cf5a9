"""DeepSpeed's names as programs use them: attributes of engine, optimizer and accelerator,
functions of its inner modules, whole fp32 weights from a checkpoint; and what there is not, with
the remedy.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.harness import run_ranks
from tests.support.training import batch, make_model
from zeroshard.deepspeed import (
    fp32_weights,
    helpers,
    optimizers,
    shim,
    start,
    zero,
)
from zeroshard.deepspeed import held_parameters as states
from zeroshard.integrations import deepspeed

ADAM = {"type": "Adam", "params": {"lr": 1e-2}}
IMPORTS = """
from deepspeed.runtime.utils import see_memory_usage, set_random_seed
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
from deepspeed.compression.helper import recursive_getattr, recursive_setattr
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.lr_schedules import WARMUP_LR, WARMUP_MAX_LR
from deepspeed.utils import instrument_w_nvtx, safe_update_full_grad_vectorized
from deepspeed.utils.z3_leaf_module import set_z3_leaf_modules
from deepspeed.utils import z3_leaf_module
from deepspeed.git_version_info import version, git_hash
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.utils.torch import required_torch_version
import deepspeed.utils.z3_leaf_module; from deepspeed.utils import z3_leaf_module
"""
ACCELERATOR = """
supported_dtypes memory_allocated max_memory_allocated memory_reserved max_memory_reserved
empty_cache reset_peak_memory_stats total_memory available_memory manual_seed_all get_rng_state
default_generator is_available device_count current_device synchronize is_triton_supported range_pop
is_synchronized_device resolves_data_dependency FloatTensor is_fp16_supported is_bf16_supported
communication_backend_version communication_backend_name memory_stats current_stream Event Stream
use_host_timers get_compile_backend device_name current_device_name export_envs op_builder_dir
initial_seed memory_cached
"""
# what each is with two ranks, stage 2 and this configuration
ENGINE: dict[str, Any] = {
    "world_size": 2, "mp_world_size": 1, "get_model_parallel_rank()": 0, "optimizer_name()": "adam",
    "scheduler_name()": "WarmupLR", "get_batch_info()": (8, 2, 2), "wall_clock_breakdown()": False,
    "steps_per_print()": None, "zero_reduce_bucket_size()": 5e8, "dynamic_loss_scale()": False,
    "zero_optimization_partition_gradients()": True, "zero_cpu_offload()": False,
    "zero_prefetch_bucket_size()": 7, "zero_optimization_partition_weights()": False,
    "gradient_predivide_factor()": 1.0, "amp_enabled()": False, "get_pld_theta()": None,
    "monitor.enabled": False, "fp16_enabled()": False, "client_optimizer": None,
    "get_type()": ["AdamW"], "communication_data_type": torch.float32,
    "optimizer.has_overflow()": False, "optimizer.dynamic_loss_scale": False,
    "optimizer.loss_scaler.cur_scale": 1.0, "optimizer.needs_scaler()": False,
    "optimizer.partition_count": [2], "allreduce_gradients()": None, "optimizer.get_lr()": 0.25,
}  # fmt: skip


def _config(**keys: Any) -> dict[str, Any]:
    base = {"train_micro_batch_size_per_gpu": 2, "optimizer": ADAM}
    return base | {"zero_optimization": {"stage": 2}} | keys


def test_every_import_line_of_public_scripts_finds_deepspeeds_object() -> None:
    lines = [*IMPORTS.strip().splitlines(), "assert z3_leaf_module.__module__.endswith('start')"]
    code = "from zeroshard.deepspeed.shim import install; install()\n" + "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_accelerator_has_deepspeeds_names_on_every_device() -> None:
    device = helpers.get_accelerator()
    for name in ACCELERATOR.split():
        assert callable(getattr(device, name)), name
    if device.device_name() == "cpu":
        assert 0 < device.memory_allocated() <= device.max_memory_allocated()
        assert device.total_memory() >= device.available_memory() > 0
        assert device.current_device_name() == "cpu"
        assert torch.ones(1, device=device.current_device()).device.type == "cpu"
    assert device.FloatTensor([1, 2]).dtype is torch.float32 and device.ByteTensor(3).shape == (3,)
    assert torch.bfloat16 in device.supported_dtypes()
    for name, text in (("create_op_builder", "torch's own operators"), ("nothing", "torch.")):
        with pytest.raises(AttributeError, match=text):
            getattr(device, name)
    assert not hasattr(device, "nothing")


def _attributes(rank: int, world: int) -> None:
    model = make_model(layers=1)
    zero2 = {"stage": 2, "prefetch_bucket_size": 7}
    keys: dict[str, Any] = {"gradient_accumulation_steps": 2, "scheduler": {"type": "WarmupLR"}}
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, config=_config(zero_optimization=zero2, **keys)
    )
    engine.set_lr(0.25)
    for expression, expected in ENGINE.items():
        assert eval(f"engine.{expression}", {"engine": engine}) == expected, expression
    assert engine.local_rank == int(os.environ.get("LOCAL_RANK", "0"))
    assert engine.get_data_parallel_rank() == engine.global_rank == rank
    assert engine.basic_optimizer is optimizer.optimizer
    with pytest.raises(AttributeError, match=r"no 'step_elapsed_time'.*avg_samples_per_sec"):
        _ = engine.tput_timer.step_elapsed_time
    loader = engine.deepspeed_io([1.0, 2.0, 3.0, 4.0], num_local_io_workers=0)
    assert loader.batch_size == 2 and len(loader) == 1
    for name in (*shim.REFUSED, "nothing"):
        with pytest.raises(AttributeError, match=rf"the engine has no '{name}'.*: "):
            getattr(engine, name)
    for name in (*shim.OPTIMIZER_REFUSED, "nothing"):
        with pytest.raises(AttributeError, match=rf"the optimizer has no '{name}'.*: "):
            getattr(optimizer, name)
        assert not hasattr(optimizer, name)
    for _ in range(2):
        engine.backward(engine(*batch(rank, 0)))
    before = optimizer.get_fp32_grad_for_param(model.head.weight)
    states.safe_update_full_grad_vectorized([model.head.weight], lambda grad, param: grad * 3)
    after = optimizer.get_fp32_grad_for_param(model.head.weight)
    torch.testing.assert_close(after, before * 3)
    whole = {"module": {name: one + 1 for name, one in engine.module_state_dict().items()}}
    engine.load_module_state_dict(whole)
    assert torch.equal(engine.module_state_dict()["head.weight"], whole["module"]["head.weight"])
    engine.destroy()


def test_attributes_of_the_engine_and_its_optimizer_have_values_or_a_remedy() -> None:
    run_ranks(2, _attributes)


def test_a_tiled_layer_takes_a_layers_numbers_and_names_its_tiles() -> None:
    linear = nn.Linear(6, 4)
    tiled = zero.TiledLinear(6, 4, in_splits=2, out_splits=2)
    tiled.copy_params_from(linear)
    assert torch.equal(tiled.state_dict()["weight"], linear.weight)
    with pytest.raises(AttributeError, match=r"TiledLinear has no 'linears'.*tile_ROW_COLUMN"):
        _ = tiled.linears
    assert not hasattr(tiled, "in_parts")


def test_torchs_adam_is_an_instance_of_the_classes_that_make_one() -> None:
    one = [nn.Parameter(torch.zeros(1))]
    kinds = (optimizers.FusedAdam, optimizers.DeepSpeedCPUAdam)
    for make in kinds:
        assert all(isinstance(made, kinds) for made in (make(one), torch.optim.Adam(one)))
    assert not isinstance(torch.optim.SGD(one), kinds)


def _marked(rank: int, world: int) -> None:
    """LLaVA's and FastChat's ``maybe_zero_3``, asked of a model that no engine holds yet."""
    for stage in (2, 3):
        torch.manual_seed(rank)
        with zero.Init(config_dict_or_path=_config()), zero.Init():
            model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 1))
        for one in model.parameters():
            facts = one.ds_shape, one.ds_numel, one.ds_persist
            assert facts == (one.shape, one.numel(), False)
            with pytest.raises(AttributeError, match=r"'ds_tensor'.*safe_get_local_fp32_param"):
                _ = one.ds_tensor.data
            with pytest.raises(AttributeError, match="safe_set_local_fp32_param"):
                one.ds_tensor.data = torch.zeros(1)
            assert one.ds_status is states.ZeroParamStatus.NOT_AVAILABLE
        numbers = [one.ds_id for one in model.parameters()]
        assert len(set(numbers)) == len(numbers)
        with zero.GatheredParameters(model[0].weight):
            first = model[0].weight.detach().clone()
        assert model[0].weight.ds_status is states.ZeroParamStatus.AVAILABLE
        config = _config(zero_optimization={"stage": stage})
        engine, *_ = deepspeed.initialize(model=model, config=config)
        assert torch.equal(engine.module_state_dict()["0.weight"], first)
        assert all(hasattr(one, "ds_id") == (stage == 3) for one in model.parameters())
        engine.destroy()
    assert not hasattr(nn.Linear(2, 2).weight, "ds_id"), "outside of the context"


def test_parameters_made_inside_init_say_that_they_must_be_gathered() -> None:
    run_ranks(2, _marked)


def test_init_joins_the_group_that_a_launcher_describes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import deepspeed, torch.distributed as dist\n"
        "with deepspeed.zero.Init(enabled=False): print(dist.is_initialized())\n"
        "with deepspeed.zero.Init(): print(dist.is_initialized())\n"
    )
    line = [sys.executable, "-m", "zeroshard", "run", "--nproc", "1", "--as-deepspeed", str(script)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    said = [line for line in done.stdout.splitlines() if "[Gloo]" not in line]  # torch 2.10's own
    assert said == ["False", "True"], done.stderr


def _joint(rank: int, world: int) -> None:
    """The loop of DeepSpeed's docs before 0.18.3: one loss of several engines."""
    weights: list[list[torch.Tensor]] = []
    for epilogue in (False, True):
        torch.manual_seed(0)
        engines = [deepspeed.initialize(model=nn.Linear(4, 4), config=_config())[0]
                   for _ in range(2)]  # fmt: skip
        inputs = torch.full((2, 4), float(rank + 1))
        loss = sum(engine(inputs).square().mean() for engine in engines)
        loss.backward()  # type: ignore[union-attr]
        for engine in engines:
            if epilogue:
                getattr(engine, "_backward_epilogue")()  # noqa: B009
            engine.step()
        weights.append([engine.module_state_dict()["weight"] for engine in engines])
        for engine in engines:
            engine.destroy()
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_the_end_of_a_backward_may_be_called_and_changes_nothing() -> None:
    run_ranks(2, _joint)


def _some(rank: int, world: int) -> None:
    for stage in (0, 1, 2, 3):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        first = model[0].weight.detach().clone()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model[1].parameters(),
            config=_config(zero_optimization={"stage": stage}),
        )  # fmt: skip
        start = engine.module_state_dict()
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
        end = engine.module_state_dict()
        assert torch.equal(start["0.weight"], end["0.weight"]), "which no optimizer has"
        assert not torch.equal(start["1.weight"], end["1.weight"])
        assert states.safe_get_full_fp32_param(model[0].weight) is None, "as of a frozen one"
        assert states.safe_get_full_optimizer_state(model[0].weight, "exp_avg") is None
        assert states.safe_get_full_grad(model[0].weight) is None
        # once more, of the same module: the first engine ends
        again, *_ = deepspeed.initialize(
            model=model, config=_config(zero_optimization={"stage": stage})
        )
        again.backward(again(torch.ones(2, 4)).square().mean())
        again.step()
        assert not torch.equal(again.module_state_dict()["0.weight"], start["0.weight"])
        again.destroy()
        assert all(one.requires_grad for one in model.parameters())
        assert first.shape == model[0].weight.shape


def test_an_optimizer_may_have_some_parameters_and_a_model_a_second_engine() -> None:
    run_ranks(2, _some)


def _mid(rank: int, world: int, path: str) -> None:
    """Saved between boundaries: this run has the bits of one that does not save."""
    weights: list[torch.Tensor] = []
    for saves in (False, True):
        model = make_model(layers=1)
        engine, *_ = deepspeed.initialize(
            model=model, config=_config(gradient_accumulation_steps=2)
        )
        for micro in range(4):
            engine.backward(engine(*batch(rank, micro)))
            if saves and micro == 2:
                engine.save_checkpoint(path)
            engine.step()
        weights.append(engine.module_state_dict()["head.weight"])
        if saves:
            engine.load_checkpoint(path)
            assert engine.global_steps == 1 and not engine.is_gradient_accumulation_boundary()
            for micro in (2, 3):
                engine.backward(engine(*batch(rank, micro)))
                engine.step()
            assert torch.equal(engine.module_state_dict()["head.weight"], weights[0])
        engine.destroy()
    assert torch.equal(weights[0], weights[1])


def test_a_checkpoint_between_boundaries_leaves_the_run_as_it_is(tmp_path: Path) -> None:
    run_ranks(2, _mid, str(tmp_path))


def _half(rank: int, world: int) -> None:
    weights, norms = [], []
    for by_hand in (False, True):
        model = make_model(layers=1)
        half = {"enabled": True, "initial_scale_power": 4}
        engine, *_ = deepspeed.initialize(
            model=model, config=_config(fp16=half, gradient_accumulation_steps=2)
        )
        for micro in range(2):
            loss = engine(*batch(rank, micro))
            if by_hand:
                scaled = engine.scale(loss)
                assert torch.equal(scaled, loss.float() * 16)
                scaled.backward()
            else:
                engine.backward(loss)
            engine.step()
        weights.append(engine.module_state_dict()["head.weight"])
        norms.append(float(engine.get_global_grad_norm()))
        assert engine.dynamic_loss_scale() and engine.initial_dynamic_scale() == 16
        assert engine.optimizer.dynamic_loss_scale and engine.optimizer.needs_scaler()
        engine.destroy()
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-3, atol=1e-4)
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


def test_a_scaled_loss_takes_a_plain_backward_in_fp16() -> None:
    run_ranks(2, _half)


def _whole(rank: int, world: int, path: str) -> None:
    torch.manual_seed(0)
    model = make_model(layers=1)
    model.blocks[0].up.weight.requires_grad_(False)
    engine, *_ = deepspeed.initialize(
        model=model, config=_config(bf16={"enabled": True}, zero_optimization={"stage": 3})
    )
    engine.backward(engine(*batch(rank, 0)))
    engine.step()
    engine.save_checkpoint(path)
    master = states.safe_get_full_fp32_param(model.head.weight)
    state = fp32_weights.get_fp32_state_dict_from_zero_checkpoint(path)
    assert torch.equal(state["head.weight"], master) and state["head.weight"].dtype is torch.float32
    trained = fp32_weights.get_fp32_state_dict_from_zero_checkpoint(
        path, tag="global_step1", exclude_frozen_parameters=True
    )
    assert state.keys() - trained.keys() == {"blocks.0.up.weight"}
    plain = fp32_weights.load_state_dict_from_zero_checkpoint(make_model(layers=1), path)
    assert torch.equal(plain.state_dict()["head.weight"], master)
    engine.destroy()


def test_whole_fp32_weights_come_out_of_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, _whole, str(tmp_path))
    fp32_weights.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "torch")
    held = torch.load(tmp_path / "torch" / "pytorch_model.bin", weights_only=True)
    fp32_weights.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path, tmp_path / "hf", safe_serialization=True
    )
    assert held["head.weight"].dtype is torch.float32 and list(
        (tmp_path / "hf").glob("*.safetens*")
    )
    with pytest.raises(zs.ConfigError, match="max_shard_size"):
        fp32_weights.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / "b", "many")


def test_flags_of_leaf_modules_are_kept_with_all_options_of_their_kin() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    assert start.set_z3_leaf_modules(model, ["ReLU"]) == [model[1][0]]
    assert start.z3_leaf_module(model[1][0]) and not start.z3_leaf_module(model[0])
    assert start.get_z3_leaf_modules(model) == [model[1][0]]
    found, missing = start.set_z3_leaf_modules_by_suffix(
        model, ["1", "x"], raise_if_not_found=False
    )
    assert found == [model[1], model[1][1]] and missing == ["x"]
    assert start.z3_leaf_parameter(model[1][1].weight)
    assert not start.z3_leaf_parameter(model[0].weight)
    # the flag has DeepSpeed's own attribute, which programs read (Accelerate's tests do)
    assert model[1]._z3_leaf and not hasattr(model[0], "_z3_leaf")
    start.set_z3_leaf_modules_by_name(model, ["1"], flag=False)
    assert not start.z3_leaf_module(model[1]) and not model[1]._z3_leaf
    assert start.unset_z3_leaf_modules(model, [nn.ReLU]) == [model[1][0]]
    assert start.set_z3_leaf_modules(model, ["Nothing"], raise_if_not_found=False) == []
    for call in (start.set_z3_leaf_modules, start.set_z3_leaf_modules_by_name):
        with pytest.raises(ValueError, match="Nothing"):
            call(model, ["Nothing"])


def test_the_configuration_flags_leaf_modules_by_class_name_and_suffix() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), nn.Tanh())
    leaf = {"classes": ["ReLU", "Nothing"], "names": ["0"], "name_suffixes": ["1.1"]}
    zero_3 = {"stage": 3, "leaf_module": leaf}
    engine, *_ = deepspeed.initialize(model=model, config=_config(zero_optimization=zero_3))
    assert start.get_z3_leaf_modules(model) == [model[0], model[1][0], model[1][1]]
    engine.destroy()


def test_helpers_do_what_their_names_say(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    helpers.recursive_setattr(model, "0.bias", None)
    assert helpers.recursive_getattr(model, "0.bias") is None
    helpers.set_random_seed(3)
    first = torch.rand(1)
    helpers.set_random_seed(3)
    assert torch.equal(first, torch.rand(1))
    helpers.see_memory_usage("first look", force=True)
    helpers.see_memory_usage("second look")
    said = capsys.readouterr().out
    assert "first look" in said and "GiB" in said and "second look" not in said
    expert = nn.Parameter(torch.ones(1))
    expert.allreduce, expert.group_name = False, "ep_2"
    groups = helpers.split_params_into_different_moe_groups_for_optimizer(
        {"params": [model[0].weight, expert], "name": "all", "lr": 1.0}
    )
    assert [len(group["params"]) for group in groups] == [1, 1]
    assert groups[1] == {"params": [expert], "name": "ep_2", "lr": 1.0, "moe": True}
    assert helpers.has_moe_layers(model) == (False, 0)
    assert helpers.required_torch_version(min_version=2.1, max_version="99")
    assert not helpers.required_torch_version(min_version=99)
    assert helpers.instrument_w_nvtx(lambda: 3)() == 3


def test_members_of_enums_are_devices_and_states() -> None:
    cpu = helpers.OffloadDeviceEnum.cpu
    config = zs.Config.from_deepspeed(
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": cpu}}}
    )
    assert config.offload.optimizer == "host" and cpu == "cpu"
    kinds = helpers.OffloadStateTypeEnum
    model = nn.Linear(4, 4)
    engine, *_ = deepspeed.initialize(model=model, config=_config())
    engine.offload_states(include=[kinds.contiguous_grad_buffer])
    engine(torch.ones(1, 4))
    engine.offload_states(include=[kinds.lp_params, kinds.optim_states])
    engine.reload_states()
    with pytest.raises(zs.ConfigError, match="together with the weights"):
        engine.offload_states(include=[kinds.hp_params])
    engine.destroy()
    with zero.GatheredParameters(model.parameters()):
        pass


def test_what_only_watches_is_logged_and_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on = {"enabled": True}
    keys: dict[str, Any] = {
        "wall_clock_breakdown": True, "memory_breakdown": True, "dump_state": True,
        "comms_logger": on, "flops_profiler": on | {"profile_step": 2}, "comet": on,
        "csv_monitor": on | {"output_path": str(tmp_path), "job_name": "run"}, "steps_per_prin": 1,
    }  # fmt: skip
    model = nn.Linear(4, 4)
    logger = logging.getLogger("DeepSpeed")
    logger.addHandler(caplog.handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        engine, *_ = deepspeed.initialize(model=model, config=_config(**keys))
        for _ in range(3):
            engine.backward(engine(torch.ones(2, 4)).square().mean())
            engine.step()
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(level)
    engine.destroy()
    said = "\n".join(record.getMessage() for record in caplog.records)
    for words in (
        "configuration: {", "step=1, ms: forward=", "backward=", "bytes at rest: weight=",
        "bytes received: ", "flops_profiler: step=2, forward=64 operations", "parameters=20",
        "comet: nothing is written for it here; log engine.memory()",
        "steps_per_prin=1 is not a key of DeepSpeed's, which drops it; did you mean 'steps_per_",
    ):  # fmt: skip
        assert words in said, words
    rows = (tmp_path / "run" / "Train_Samples_lr.csv").read_text().splitlines()
    assert rows == ["step,lr", "2,0.01", "4,0.01", "6,0.01"]
    losses = (tmp_path / "run" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert len(losses) == 4 and float(losses[1].split(",")[1]) > float(losses[3].split(",")[1])
    assert engine.tput_timer.global_step_count == 3 and engine.tput_timer.avg_samples_per_sec() > 0
