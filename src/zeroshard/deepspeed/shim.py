"""``import deepspeed`` without DeepSpeed: a finder on sys.meta_path, for this process alone.

    zeroshard run --as-deepspeed train.py                  each rank, before the script
    zeroshard as-deepspeed COMMAND ...                     each process that imports it (on_path/)
    python -m zeroshard.integrations.deepspeed train.py    under any other launcher

The finder answers for ``deepspeed`` and everything below it, and importlib.metadata for the
distribution of that name, before an installed DeepSpeed would. A module's names stand in the tables
below and are imported when they are first asked for. A name that is not there is an AttributeError,
or an ImportError, that says what to use; ``hasattr()`` is False for it.

Nothing is installed, and torch is imported only with the first name that needs it.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import multiprocessing
import os
import runpy
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from zeroshard.system.safe_files import replacing

# the file of variables for other hosts, in the home directory or the current one
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
_NAME = "deepspeed"
_STAND_IN = "zeroshard.deepspeed"
_UNUSED = (
    "zeroshard: nothing was sharded: no deepspeed.initialize() in this run. Transformers drops the"
    " DeepSpeed configuration where use_cpu=True is set, or none is given\n"
)


def install() -> None:
    """Let ``deepspeed`` be the stand-in in this process. Does nothing the second time."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    for name in [one for one in sys.modules if one.split(".")[0] == _NAME]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())
    atexit.register(_warn_where_unused)


def main() -> None:
    """Run ``sys.argv[1]`` as ``__main__`` with the arguments after it."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m zeroshard.integrations.deepspeed SCRIPT [ARGUMENTS]")
    del sys.argv[0]
    sys.path[0:1] = [] if sys.flags.safe_path else [os.path.dirname(os.path.realpath(sys.argv[0]))]
    install()
    runpy.run_path(sys.argv[0], run_name="__main__")


def _warn_where_unused() -> None:
    """Say so on rank 0 where a program took the stand-in and never called initialize(). A launcher
    takes it to start the ranks, and a child of the program may import what the program does.
    """
    held = sys.modules.get(f"{_STAND_IN}.held_parameters")
    took = _NAME in sys.modules and os.environ.get("RANK", "0") == "0"
    took = took and f"{_NAME}.launcher.runner" not in sys.modules
    took = took and multiprocessing.parent_process() is None
    if took and not (held is not None and held.was_used()):
        sys.stderr.write(_UNUSED)


def _missing(path: str) -> str:
    """Return the message for a name that is not there."""
    parts = path.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    use = next((INSTEAD[prefix] for prefix in prefixes if prefix in INSTEAD), "")
    end = f": use {use}" if use else "; docs/deepspeed-features.md says what there is"
    return f"{_NAME}.{path} is not part of zeroshard's stand-in for DeepSpeed{end}"


class _Module(ModuleType):
    """One module of the stand-in."""

    def __getattr__(self, name: str) -> Any:
        path = self.__name__.partition(".")[2]
        inside = f"{path}.{name}" if path else name
        home = MODULES[path].get(name)
        if home is not None:
            module, _, attribute = home.partition(":")
            source = module if module == "torch" else f"{_STAND_IN}.{module}"
            value = getattr(importlib.import_module(source), attribute)
        elif inside in MODULES:
            value = importlib.import_module(f"{_NAME}.{inside}")
        elif name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        else:
            other = importlib.import_module(FALLBACKS[path]) if path in FALLBACKS else None
            if not hasattr(other, name):
                raise AttributeError(_missing(inside))
            value = getattr(other, name)
        setattr(self, name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep a function where its module has the same name, as DeepSpeed's package does: an
        import of ``utils.z3_leaf_module`` leaves the function of that name in ``utils``.
        """
        path = self.__name__.partition(".")[2]
        if not (isinstance(value, _Module) and name in MODULES.get(path, {})):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        path = self.__name__.partition(".")[2]
        prefix = f"{path}." if path else ""
        below = (one[len(prefix) :] for one in MODULES if one.startswith(prefix) and one != path)
        children = (one.partition(".")[0] for one in below)
        return sorted({*super().__dir__(), *MODULES[path], *children})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the modules of the stand-in, and its distribution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module of ours, None for other packages. Raises
        ModuleNotFoundError, with what to use, for one of DeepSpeed's that is not there.
        """
        top, _, inside = fullname.partition(".")
        if top != _NAME:
            return None
        if inside not in MODULES:
            raise ModuleNotFoundError(_missing(inside))  # without a name: `from` would swallow it
        is_package = not inside.endswith("__main__")
        return importlib.machinery.ModuleSpec(
            fullname, self, origin=_STAND_IN, is_package=is_package
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return an empty module."""
        return _Module(spec.name, __doc__)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names are looked up when they are first asked for."""

    def get_code(self, fullname: str) -> Any:
        """Return what ``python -m`` runs of a module that is a program."""
        home = MODULES[fullname.partition(".")[2]].get("main", "")
        text = f"from {_STAND_IN}.{home.partition(':')[0]} import main\nmain()" if home else ""
        return compile(text, fullname, "exec")

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        """Return ours, where it is asked for, or all are."""
        name = getattr(context, "name", None)
        return [_Distribution()] if name is None or name.lower() == _NAME else []


class _Distribution(importlib.metadata.Distribution):
    """The distribution ``deepspeed``, as importlib.metadata finds it."""

    def read_text(self, filename: str) -> str | None:
        """Return one of the files of a distribution."""
        fields = ("Metadata-Version: 2.1", f"Name: {_NAME}", f"Version: {VERSION}")
        metadata = "\n".join([*fields, "Summary: zeroshard's stand-in\n"])
        return {"METADATA": metadata, "top_level.txt": f"{_NAME}\n"}.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Return where a file would be."""
        return Path(__file__).parent / path


def write_distribution(folder: Path) -> None:
    """Have `folder`, in a path of Python's, hold the distribution: for processes in which nobody
    has imported the stand-in yet. Raises OSError.
    """
    facts = folder / f"{_NAME}.dist-info"
    facts.mkdir(parents=True, exist_ok=True)
    for name in ("METADATA", "top_level.txt"):
        with replacing(facts / name) as file:
            file.write(str(_Distribution().read_text(name)).encode())


# -------------------------------------------------------------------------------------------- names
# Every name of DeepSpeed's that exists here, as tables: module by module with its home, then the
# names of the engine and the optimizer.
#
#     MODULES["zero"]["Init"] = "zero:Init"     deepspeed.zero.Init is zeroshard.deepspeed.zero.Init
#     INSTEAD["init_inference"]                 what to use for what does not exist
#
# A new name stands once in `_HOMES`, and in each module of DeepSpeed's that has it.


# the version of DeepSpeed with this interface, and who offers it
VERSION = "0.19.8+zeroshard"
VERSION_MAJOR, VERSION_MINOR, VERSION_PATCH = map(int, VERSION.partition("+")[0].split("."))

SAFE = [
    f"safe_{verb}_{extent}_{state}"
    for verb in ("get", "set")
    for extent in ("full", "local")
    for state in ("fp32_param", "grad", "optimizer_state")
]
_SAFE = " ".join(SAFE)
_ZERO = (
    "Init GatheredParameters register_external_parameter TiledLinear MiCS_Init"
    " unwrap_model_for_generation ZeroParamStatus ZeroParamType"
)
_SCHEDULES = "VALID_LR_SCHEDULES LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR"
CONSTANTS = (
    "LR_RANGE_TEST ONE_CYCLE WARMUP_LR WARMUP_DECAY_LR WARMUP_COSINE_LR WARMUP_LOG_RATE"
    " WARMUP_LINEAR_RATE LR_SCHEDULE LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_RATE"
    " LR_RANGE_TEST_STEP_SIZE LR_RANGE_TEST_STAIRCASE CYCLE_FIRST_STEP_SIZE"
    " CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STEP_SIZE CYCLE_SECOND_STAIR_COUNT DECAY_STEP_SIZE"
    " CYCLE_MIN_LR CYCLE_MAX_LR DECAY_LR_RATE CYCLE_MIN_MOM CYCLE_MAX_MOM DECAY_MOM_RATE"
    " WARMUP_MIN_LR WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_MIN_RATIO COS_MIN_RATIO"
    " TOTAL_NUM_STEPS"
)
_LEAVES = (
    "set_z3_leaf_modules unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module"
    " z3_leaf_parameter set_z3_leaf_module set_z3_leaf_modules_by_name"
    " set_z3_leaf_modules_by_suffix"
)
_EXPERTS = (
    "has_moe_layers is_moe_param is_moe_param_group split_params_into_shared_and_expert_params"
    " split_params_into_different_moe_groups_for_optimizer configure_moe_param_groups"
)
_UTILS = "see_memory_usage set_random_seed ensure_directory_exists move_to_device"
_ENUMS = "OffloadDeviceEnum OffloadStateTypeEnum ZeroStageEnum"
_FP32 = (
    "get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict"
    " load_state_dict_from_zero_checkpoint"
)
_CHECKPOINTING = "configure is_configured checkpoint"
_COMM = "init_distributed is_initialized get_rank get_world_size get_local_rank"
_OPTIMIZERS = "DeepSpeedCPUAdam FusedAdam DeepSpeedCPUAdagrad DeepSpeedCPULion FusedLamb FusedLion"

_HOMES = {  # our modules and the names that they make; "theirs=ours" where ours differs
    "start": f"initialize add_config_arguments {_LEAVES}",
    "deepspeed_engine": "DeepSpeedEngine",
    "optimizers": f"{_OPTIMIZERS} ZeROOptimizer DeepSpeedOptimizer=ZeROOptimizer",
    "helpers": f"{_CHECKPOINTING} logger log_dist RepeatingLoader clone_tensors_for_torch_save"
    f" {_EXPERTS} {_UTILS} {_ENUMS} get_accelerator instrument_w_nvtx is_compile_supported"
    " required_torch_version recursive_getattr recursive_setattr"
    " git_hash=default_git git_branch=default_git __git_hash__=default_git"
    " __git_branch__=default_git torch_info",
    "fp32_weights": f"{_FP32} main",
    "monitors": "MonitorMaster ThroughputTimer",
    "zero": f"{_ZERO} OnDevice zero_wrapper_for_fp_tensor_constructor=keep_constructor",
    "held_parameters": f"{_SAFE} safe_update_full_grad_vectorized",
    "lr_schedules": f"{_SCHEDULES} {CONSTANTS}",
    "comm": f"{_COMM} _get_data_parallel_world_size=get_world_size"
    " _get_data_parallel_rank=get_rank get_data_parallel_world_size=get_world_size"
    " get_data_parallel_rank=get_rank get_data_parallel_group=data_parallel_group"
    " _get_data_parallel_group=data_parallel_group",
    "answers": "DeepSpeedConfigError=ConfigError",
    "torch": "_orig_torch_arange=arange",
    "shim": "DEEPSPEED_ENVIRONMENT_NAME __version__=VERSION version=VERSION"
    " __version_major__=VERSION_MAJOR"
    " __version_minor__=VERSION_MINOR __version_patch__=VERSION_PATCH",
}
_PLACES = {  # DeepSpeed's modules and their names
    "": "initialize add_config_arguments init_distributed DeepSpeedEngine DeepSpeedOptimizer"
    " ZeROOptimizer OnDevice get_accelerator log_dist logger is_compile_supported __version__"
    " version git_hash git_branch DeepSpeedConfigError __version_major__ __version_minor__"
    " __version_patch__ __git_hash__ __git_branch__",
    "zero": _ZERO,
    "comm": _COMM,
    "utils": f"logger log_dist RepeatingLoader OnDevice {_SAFE} {_LEAVES} instrument_w_nvtx"
    " safe_update_full_grad_vectorized",
    "utils.nvtx": "instrument_w_nvtx",
    "utils.torch": "required_torch_version",
    "utils.timer": "ThroughputTimer",
    "utils.zero_to_fp32": _FP32,
    "utils.zero_to_fp32.__main__": "main",
    "utils.logging": "logger log_dist",
    "utils.groups": "_get_data_parallel_group _get_data_parallel_world_size"
    " _get_data_parallel_rank get_data_parallel_group get_data_parallel_world_size"
    " get_data_parallel_rank",
    "utils.tensor_fragment": f"{_SAFE} safe_update_full_grad_vectorized",
    "utils.z3_leaf_module": _LEAVES,
    "accelerator": "get_accelerator",
    "accelerator.real_accelerator": "get_accelerator",
    "git_version_info": "version git_hash git_branch torch_info",
    "moe": "",
    "moe.utils": _EXPERTS,
    "compression": "",
    "compression.helper": "recursive_getattr recursive_setattr",
    "monitor": "",
    "monitor.monitor": "MonitorMaster",
    "checkpointing": _CHECKPOINTING,
    "checkpoint": "",
    "checkpoint.utils": "clone_tensors_for_torch_save",
    "ops": "",
    "ops.adam": "DeepSpeedCPUAdam FusedAdam",
    "ops.adagrad": "DeepSpeedCPUAdagrad",
    "ops.lamb": "FusedLamb",
    "ops.lion": "DeepSpeedCPULion FusedLion",
    "runtime": "",
    "runtime.engine": "DeepSpeedEngine",
    "runtime.dataloader": "RepeatingLoader",
    "runtime.lr_schedules": f"{_SCHEDULES} {CONSTANTS}",
    "runtime.utils": _UTILS,
    "runtime.config": "DeepSpeedConfigError",
    "runtime.compiler": "is_compile_supported",
    "runtime.base_optimizer": "ZeROOptimizer DeepSpeedOptimizer",
    "runtime.zero.config": "ZeroStageEnum",
    "runtime.zero.offload_config": "OffloadDeviceEnum OffloadStateTypeEnum",
    "runtime.zero": _ZERO,
    # Transformers replaces the first, and compares with the second, while it builds a model
    "runtime.zero.partition_parameters": "zero_wrapper_for_fp_tensor_constructor"
    f" _orig_torch_arange get_accelerator {_ZERO}",
    "runtime.zero.tiling": "TiledLinear",
    "runtime.activation_checkpointing": "",
    "runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    # `accelerate launch` asks for it, and writes that file for several machines
    "launcher": "",
    "launcher.runner": "DEEPSPEED_ENVIRONMENT_NAME",
}
_HOME = {
    name.partition("=")[0]: f"{module}:{name.rpartition('=')[2]}"
    for module, names in _HOMES.items()
    for name in names.split()
}
MODULES: dict[str, dict[str, str]] = {
    module: {name: _HOME[name] for name in names.split()} for module, names in _PLACES.items()
}
# modules that take other names from another module
FALLBACKS = {"comm": "torch.distributed"}

_USE = {  # for these names, and everything below them
    "init_inference InferenceEngine inference model_implementations module_inject":
        "Transformers' generate() under zero.unwrap_model_for_generation(), or a server",
    "PipelineModule PipelineEngine pipe runtime.pipe":
        "torch.distributed.pipelining with zeroshard.shard(mesh=) for each stage",
    "tp_model_init": "torch.distributed.tensor.parallel with zeroshard.shard(mesh=), axis 'tp'",
    "sequence runtime.sequence_parallel":
        "torch's context parallelism; zeroshard.nn.checkpoint(tier='host') fits long sequences",
    "utils.groups": "torch.distributed's groups: every rank is a data parallel one here",
    "moe": "the model's own experts: stage 3 shards them as any other parameter",
    "runtime.fp16 runtime.bf16_optimizer":
        "the optimizer that initialize() returns: ZeROOptimizer, in every precision",
    "runtime.zero.config runtime.config_utils": "zeroshard.read_deepspeed()",
    "runtime.utils runtime.weight_quantizer runtime.swap_tensor runtime.eigenvalue":
        "torch's own functions; zeroshard.memory_table() for memory",
    "runtime.data_pipeline": "the DataLoader, which chooses samples and their lengths",
    "runtime.domino": "overlapping of units' gathers and reduces, which is always on",
    "checkpoint.constants checkpoint.ds_to_universal checkpoint.universal_checkpoint":
        "zeroshard checkpoint import, which reads DeepSpeed's files, universal ones, too",
    "utils.timer": "engine.tput_timer; wall_clock_breakdown in the configuration logs times",
    "linear": "PEFT's adapters, which stage 3 shards as any other parameter",
    "io nvme": "offload_optimizer's and offload_param's nvme_path",
    "runtime.hybrid_engine": "generate() inside engine.engine.gathered()",
    "compression": "torch.ao.quantization",
    "autotuning": "zeroshard plan, or zeroshard.shard(policy='auto')",
    "profiling": "torch.profiler, or engine.engine.trace() for the times of gathers and reduces",
    "monitor": "the logger of your choice in the training loop",
    "elasticity": "a checkpoint, which loads on any number of ranks",
    "DeepSpeedConfig runtime.config": "zeroshard.read_deepspeed()",
    "ops": "torch's own operators",
    "zero.estimate": "zeroshard plan",
    "runtime.zero.stage3 runtime.zero.stage_1_and_2":
        "zeroshard plan for estimates; isinstance(optimizer, deepspeed.ZeROOptimizer) in any stage",
    "utils.zero_to_fp32": "zeroshard checkpoint export",
    "launcher": "zeroshard deepspeed",
}  # fmt: skip
INSTEAD = {name: use for names, use in _USE.items() for name in names.split()}


# --------------------------------------------------------------------- the engine and the optimizer
# Names beside the loop's own:
#
#     OF_KEYS        a getter that says what a key of the configuration is
#     ENGINE_FIXED   a getter, and what it always returns
#     REFUSED        what there is not, and what to use
#
# A new name is a new line; deepspeed_engine.py and optimizers.py make attributes of it.


_ZERO_SECTION = "zero_optimization"
_ZERO_KEYS = (
    "allgather_bucket_size allgather_partitions compute_grad_norm contiguous_gradients"
    " elastic_checkpoint ignore_unused_parameters legacy_stage1 load_from_fp32_weights"
    " log_trace_cache_warnings offload_optimizer offload_param overlap_comm parameter_alignment"
    " reduce_bucket_size reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory"
    " sub_group_size"
)
_WITH_PREFIX = (
    "hpz_partition_size quantized_gradients quantized_nontrainable_weights quantized_weights"
)
_STAGE_3 = (
    "allgather_sequential max_live_parameters max_reuse_distance model_persistence_threshold"
    " module_granularity_threshold param_persistence_threshold prefetch_bucket_size"
)
# engine.zero_reduce_bucket_size() is zero_optimization.reduce_bucket_size
OF_KEYS: dict[str, str] = {
    **{f"zero_{key}": f"{_ZERO_SECTION}.{key}" for key in _ZERO_KEYS.split()},
    **{f"zero_{key}": f"{_ZERO_SECTION}.zero_{key}" for key in _WITH_PREFIX.split()},
    **{f"zero_{key}": f"{_ZERO_SECTION}.stage3_{key}" for key in _STAGE_3.split()},
    "zero_multi_rank_bucket_allreduce": f"{_ZERO_SECTION}.use_multi_rank_bucket_allreduce",
    "zeropp_loco_param": f"{_ZERO_SECTION}.zeropp_loco_param",
    "mics_shard_size": f"{_ZERO_SECTION}.mics_shard_size",
    "is_sanity_checks_enabled": f"{_ZERO_SECTION}.enable_sanity_checks",
    "cpuadam_cores_perc": f"{_ZERO_SECTION}.offload_optimizer.cpuadam_cores_perc",
    "super_offload": f"{_ZERO_SECTION}.offload_optimizer.super_offload",
    "zenflow_config": f"{_ZERO_SECTION}.zenflow",
    "fp16_auto_cast": "fp16.auto_cast",
    "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
    "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
    "bf16_optimizer_states": "bf16.bf16_optimizer_states",
    "torch_autocast_enabled": "torch_autocast.enabled",
    "torch_autocast_dtype": "torch_autocast.dtype",
    "sparse_gradients_enabled": "sparse_gradients",
    "use_node_local_storage": "checkpoint.use_node_local_storage",
    "load_universal_checkpoint": "checkpoint.load_universal",
    "optimizer_legacy_fusion": "optimizer.legacy_fusion",
}
_PLAIN = (  # the same name there and here
    "dataloader_drop_last dump_state gradient_predivide_factor log_level memory_breakdown"
    " steps_per_print wall_clock_breakdown zero_allow_untested_optimizer"
    " zero_force_ds_cpu_optimizer"
)
OF_KEYS |= {name: name for name in _PLAIN.split()}

# sections that are off here, or refused where they are on
_OFF = (
    "amp autotuning compile curriculum_learning data_efficiency data_sampling eigenvalue elasticity"
    " pld random_ltd"
)
ENGINE_FIXED: dict[str, Any] = {  # what a call of the name returns
    **{f"{name}_enabled": False for name in _OFF.split()},
    "curriculum_enabled_legacy": False,
    "is_deepcompile_enabled": False,
    "is_deepcompile_active": False,
    "graph_harvesting": False,
    "quantize_training": None,
    "amp_params": None,
    "get_pld_theta": None,
    "get_sequence_parallel_group": None,
    "get_model_parallel_rank": 0,
    "get_tensor_parallel_rank": 0,
    "autotp_size": 0,
    "checkpoint_tag_validation_enabled": True,
    "checkpoint_tag_validation_fail": True,
    "is_elastic_model_parallel_supported": False,
    "postscale_gradients": True,
    # DeepSpeed's docs had programs call it after a plain backward: nothing is left to reduce then
    "_backward_epilogue": None,
}

_TABLES = {
    "the reduction is part of the backward: nothing is left to call":
        "allreduce_bucket allreduce_and_copy allreduce_no_retain buffered_allreduce_fallback"
        " sparse_allreduce sparse_allreduce_bucket sparse_allreduce_no_retain sparse_all_gather"
        " all_gather_scalar average_tensor reduce_gradients reduce_ipg_grads"
        " independent_gradient_partition_epilogue overlapping_partition_gradients_reduce_epilogue",
    "gradient_clipping in the configuration, or engine.engine.clip_grad_norm_()":
        "clip_fp32_gradients",
    "engine.monitor.write_events()": "get_summary_writer summary_writer summary_events",
    "wall_clock_breakdown in the configuration logs times; engine.engine.trace() has all":
        "timers engine_timers engine_timers_cache get_wall_clock_timers print_forward_breakdown",
    "flops_profiler in the configuration logs operations; torch.utils.flop_counter counts them":
        "flops_profiler flops_profiler_profile_step flops_profiler_module_depth"
        " flops_profiler_top_modules flops_profiler_detailed flops_profiler_output_file"
        " flops_profiler_recompute_fwd_factor",
    "samples are the DataLoader's: choose them there":
        "curriculum_learning_config curriculum_params_legacy data_efficiency_config"
        " data_sampling_config random_ltd_config random_ltd_initialize set_data_post_process_func"
        " set_custom_curriculum_learning_schedule curriculum_scheduler_legacy random_ltd_scheduler",
    "the model's own experts: stage 3 shards them as any other parameter":
        "load_moe_state_dict expert_parallel_group expert_data_parallel_group num_experts"
        " all_to_all_group local_all_to_all_group gate_modules moe_layers",
    "engine.compile(), which compiles each unit":
        "register_compile_pass get_compile_time get_deepcompile_backend get_autosp_backend"
        " get_autotp_backend get_deepspeed_compile_backend compile_zero_optimization_stage",
    "checkpoints are written by save_checkpoint(), in the background by zeroshard.Saver":
        "checkpoint_engine checkpoint_serialization_enabled checkpoint_writer_enabled"
        " save_zero_checkpoint save_non_zero_checkpoint",
    "layers are dropped and quantized in the model":
        "progressive_layer_drop pld_params pld_gamma quantizer compression_scheduler eigenvalue"
        " block_eigenvalue",
}  # fmt: skip
REFUSED = {name: use for use, names in _TABLES.items() for name in names.split()}

_MASTERS = (
    "safe_get_full_fp32_param(param), or safe_get_local_fp32_param for this rank's part: masters"
    " rest per unit, not per group"
)
_GRADS = "safe_get_full_grad(param), or safe_get_local_grad for this rank's part"
_OPTIMIZER_TABLES = {
    _MASTERS:
        "single_partition_of_fp32_groups fp32_groups_flat fp32_flat_groups"
        " fp32_partitioned_groups_flat fp16_partitioned_groups fp16_partitioned_groups_flat"
        " fp16_groups_flat bit16_groups_flat"
        " parallel_partitioned_bit16_groups params_in_partition params_not_in_partition"
        " fp32_groups_flat_partition fp16_groups_flat_partition partition_size groups_padding"
        " sub_groups",
    _GRADS:
        "averaged_gradients all_grad_tensors accumulated_grads_in_cpu ipg_buckets get_gradients"
        " grads_in_partition unscale_and_clip_grads get_fp32_grad_partitions",
    "engine.get_global_grad_norm()":
        "_global_grad_norm _get_norm_groups scaled_global_norm get_grad_norm_direct"
        " norm_for_param_grads",
    "engine.backward(loss), which counts micro-batches, too":
        "backward backward_prologue backward_epilogue enter_backward exit_backward",
    "the reduction is part of the backward: nothing is left to call":
        "all_reduce_params reduce_gradients allreduce_gradients reduce_ipg_grads average_tensor"
        " independent_gradient_partition_epilogue overlapping_partition_gradients_reduce_epilogue"
        " reduce_independent_p_g_buckets_and_remove_grads",
    "fp16's loss_scale in the configuration": "override_loss_scale update_scale",
    "loss_scale, dynamic_loss_scale and overflow of the optimizer; engine.dynamic_loss_scale_args()"
    " is how the scale moves":
        "loss_scale_config cur_iter last_overflow_iter scale_factor scale_window min_loss_scale"
        " cur_hysteresis",
    "deepspeed.utils.get_z3_leaf_modules(model)": "leaf_parameters",
    "engine.load_checkpoint()":
        "load_hp_checkpoint_state refresh_fp32_params load_hp_checkpoint_state_from_checkpoint_dir",
    "engine.engine.memory(), which says what rests where":
        "optimizer_swapper params_in_nvme_and_cpu report_ipg_memory_usage",
}  # fmt: skip
OPTIMIZER_REFUSED = {
    name: use for use, names in _OPTIMIZER_TABLES.items() for name in names.split()
}


def remedy(owner: str, name: str, table: dict[str, str], otherwise: str) -> str:
    """Return the message for a name that `owner` does not have."""
    use = f"use {table[name]}" if name in table else otherwise
    return f"{owner} has no {name!r} in zeroshard's stand-in for DeepSpeed: {use}"
