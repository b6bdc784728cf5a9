"""Every name of DeepSpeed's that exists here: module by module, and where it comes from. Those of
its engine are in engine_names.py.

    MODULES["zero"]["Init"] = "zero:Init"      deepspeed.zero.Init is zeroshard.deepspeed.zero.Init
    INSTEAD["init_inference"]                  what to use for what does not exist

Plain data: importing this imports nothing of torch's. A new name stands once in `_HOMES`, and in
each module of DeepSpeed's that has it.
"""

from __future__ import annotations

# DeepSpeed's version whose interface this is, and whose it is
VERSION = "0.19.6+zeroshard"
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
_CONSTANTS = (
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
_OPTIMIZERS = "DeepSpeedCPUAdam FusedAdam DeepSpeedCPUAdagrad DeepSpeedCPULion FusedLion"

_HOMES = {  # our modules and the names that they make; "theirs=ours" where ours differs
    "start": f"initialize add_config_arguments {_LEAVES}",
    "deepspeed_engine": "DeepSpeedEngine",
    "optimizers": f"{_OPTIMIZERS} ZeROOptimizer DeepSpeedOptimizer=ZeROOptimizer",
    "helpers": f"{_EXPERTS} {_UTILS} {_ENUMS} get_accelerator instrument_w_nvtx"
    " is_compile_supported required_torch_version recursive_getattr recursive_setattr"
    " git_hash=default_git git_branch=default_git __git_hash__=default_git"
    " __git_branch__=default_git torch_info",
    "fp32_weights": f"{_FP32} main",
    "monitors": "MonitorMaster ThroughputTimer",
    "zero": f"{_ZERO} OnDevice zero_wrapper_for_fp_tensor_constructor=keep_constructor",
    "held_parameters": f"{_SAFE} safe_update_full_grad_vectorized",
    "lr_schedules": f"{_SCHEDULES} {_CONSTANTS}",
    "comm": f"{_COMM} _get_data_parallel_world_size=get_world_size"
    " _get_data_parallel_rank=get_rank get_data_parallel_world_size=get_world_size"
    " get_data_parallel_rank=get_rank get_data_parallel_group=data_parallel_group"
    " _get_data_parallel_group=data_parallel_group",
    "small": f"{_CHECKPOINTING} logger log_dist RepeatingLoader clone_tensors_for_torch_save",
    "answers": "DeepSpeedConfigError=ConfigError",
    "torch": "_orig_torch_arange=arange",
    "shim": "DEEPSPEED_ENVIRONMENT_NAME",
    "names": "__version__=VERSION version=VERSION __version_major__=VERSION_MAJOR"
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
    "ops.lion": "DeepSpeedCPULion FusedLion",
    "runtime": "",
    "runtime.engine": "DeepSpeedEngine",
    "runtime.dataloader": "RepeatingLoader",
    "runtime.lr_schedules": f"{_SCHEDULES} {_CONSTANTS}",
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
# modules whose other names are another module's
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
