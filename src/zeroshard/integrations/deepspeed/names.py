"""Every name of DeepSpeed's that exists here: module by module, and where it comes from.

    MODULES["zero"]["Init"] = "zero:Init"      deepspeed.zero.Init is zeroshard.integrations
                                               .deepspeed.zero.Init
    INSTEAD["init_inference"]                  what to use for what does not exist

A home of "" makes a submodule. Plain data: importing this imports nothing of torch's.
"""

from __future__ import annotations

__all__ = ["FALLBACKS", "INSTEAD", "MODULES", "VERSION"]

# DeepSpeed's version whose interface this is, and whose it is
VERSION = "0.19.6+zeroshard"

_ZERO = {
    name: f"zero:{name}"
    for name in (
        "Init", "GatheredParameters", "register_external_parameter", "TiledLinear", "MiCS_Init",
        "unwrap_model_for_generation", "ZeroParamStatus", "ZeroParamType",
    )
}  # fmt: skip
_SAFE = {
    f"safe_{verb}_{extent}_{what}": f"states:safe_{verb}_{extent}_{what}"
    for verb in ("get", "set")
    for extent in ("full", "local")
    for what in ("fp32_param", "grad", "optimizer_state")
}
_SCHEDULES = {
    name: f"schedules:{name}"
    for name in (
        "VALID_LR_SCHEDULES", "LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR",
        "WarmupCosineLR",
    )
}  # fmt: skip
_GROUPS = {
    "_get_data_parallel_group": "small:data_parallel_group",
    "_get_data_parallel_world_size": "comm:get_world_size",
    "_get_data_parallel_rank": "comm:get_rank",
}
_LEAVES = {
    "set_z3_leaf_modules": "zero:set_z3_leaf_modules",
    "unset_z3_leaf_modules": "zero:unset_z3_leaf_modules",
}
_ADAM = {"DeepSpeedCPUAdam": "optimizers:DeepSpeedCPUAdam", "FusedAdam": "optimizers:FusedAdam"}

MODULES: dict[str, dict[str, str]] = {
    "": {
        "initialize": "start:initialize",
        "add_config_arguments": "start:add_config_arguments",
        "init_distributed": "comm:init_distributed",
        "DeepSpeedEngine": "engine:DeepSpeedEngine",
        "DeepSpeedOptimizer": "optimizers:ZeROOptimizer",
        "ZeROOptimizer": "optimizers:ZeROOptimizer",
        "OnDevice": "zero:OnDevice",
        "get_accelerator": "small:get_accelerator",
        "log_dist": "small:log_dist",
        "logger": "small:logger",
    },
    "zero": _ZERO,
    "comm": {
        "init_distributed": "comm:init_distributed",
        "is_initialized": "comm:is_initialized",
        "get_rank": "comm:get_rank",
        "get_world_size": "comm:get_world_size",
        "get_local_rank": "comm:get_local_rank",
    },
    "utils": {
        "logger": "small:logger",
        "log_dist": "small:log_dist",
        "RepeatingLoader": "small:RepeatingLoader",
        "OnDevice": "zero:OnDevice",
    } | _SAFE | _LEAVES,
    "utils.logging": {"logger": "small:logger", "log_dist": "small:log_dist"},
    "utils.groups": _GROUPS,
    "utils.tensor_fragment": _SAFE,
    "utils.z3_leaf_module": _LEAVES,
    "accelerator": {"get_accelerator": "small:get_accelerator"},
    "checkpointing": {
        "configure": "small:configure",
        "is_configured": "small:is_configured",
        "checkpoint": "small:checkpoint",
    },
    "checkpoint": {},
    "checkpoint.utils": {
        "clone_tensors_for_torch_save": "small:clone_tensors_for_torch_save"
    },
    "ops": {},
    "ops.adam": _ADAM,
    "ops.adagrad": {"DeepSpeedCPUAdagrad": "optimizers:DeepSpeedCPUAdagrad"},
    "ops.lion": {
        "DeepSpeedCPULion": "optimizers:DeepSpeedCPULion",
        "FusedLion": "optimizers:FusedLion",
    },
    "runtime": {},
    "runtime.engine": {"DeepSpeedEngine": "engine:DeepSpeedEngine"},
    "runtime.dataloader": {"RepeatingLoader": "small:RepeatingLoader"},
    "runtime.lr_schedules": _SCHEDULES,
    "runtime.zero": _ZERO,
    "runtime.zero.partition_parameters": _ZERO | {
        # Transformers replaces the first, and compares with the second, while it builds a model
        "zero_wrapper_for_fp_tensor_constructor": "zero:keep_constructor",
        "_orig_torch_arange": "torch:arange",
        "get_accelerator": "small:get_accelerator",
    },
    "runtime.zero.tiling": {"TiledLinear": "zero:TiledLinear"},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": {
        "configure": "small:configure",
        "is_configured": "small:is_configured",
        "checkpoint": "small:checkpoint",
    },
}  # fmt: skip

# modules whose other names are another module's
FALLBACKS = {"comm": "torch.distributed"}

_INFERENCE = "Transformers' generate() under zero.unwrap_model_for_generation(), or a server"
_PIPELINE = "torch.distributed.pipelining with zeroshard.shard(mesh=) for each stage"
_TENSOR = "torch.distributed.tensor.parallel with zeroshard.shard(mesh=), axis 'tp'"
_SEQUENCE = "torch's context parallelism; zeroshard.nn.checkpoint(tier='host') fits long sequences"
_MOE = "the model's own experts: stage 3 shards them as any other parameter"
INSTEAD: dict[str, str] = {  # for a name, and everything below it
    "init_inference": _INFERENCE,
    "InferenceEngine": _INFERENCE,
    "inference": _INFERENCE,
    "model_implementations": _INFERENCE,
    "module_inject": _INFERENCE,
    "tp_model_init": _TENSOR,
    "PipelineModule": _PIPELINE,
    "PipelineEngine": _PIPELINE,
    "pipe": _PIPELINE,
    "runtime.pipe": _PIPELINE,
    "sequence": _SEQUENCE,
    "runtime.sequence_parallel": _SEQUENCE,
    "utils.groups": "torch.distributed's groups: every rank is a data parallel one here",
    "moe": _MOE,
    "compression": "torch.ao.quantization",
    "autotuning": "zeroshard plan, or zeroshard.shard(policy='auto')",
    "profiling": "torch.profiler, or engine.engine.trace() for the times of gathers and reduces",
    "monitor": "the logger of your choice in the training loop",
    "elasticity": "a checkpoint, which loads on any number of ranks",
    "DeepSpeedConfig": "zeroshard.read_deepspeed()",
    "runtime.config": "zeroshard.read_deepspeed()",
    "ops": "torch's own operators",
    "zero.estimate": "zeroshard plan",
    "runtime.zero.stage3": "zeroshard plan for estimates; the engine of initialize() otherwise",
    "runtime.zero.stage_1_and_2": "zeroshard plan for estimates; initialize()'s engine otherwise",
    "utils.zero_to_fp32": "zeroshard checkpoint export",
    "launcher": "zeroshard run",
}
