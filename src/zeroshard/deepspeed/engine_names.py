"""The names of DeepSpeed's engine and optimizer beside the loop's own, as tables.

    OF_KEYS     a getter that says what a key of the configuration is
    OF_ENGINE   a getter or an attribute, and where its value lies
    REFUSED     what there is not, and what to use

A new name is a new line. Plain data: deepspeed_engine.py and optimizers.py make attributes of it.
"""

from __future__ import annotations

from typing import Any

_ZERO = "zero_optimization"
_ZERO_KEYS = (
    "allgather_bucket_size allgather_partitions contiguous_gradients elastic_checkpoint"
    " ignore_unused_parameters legacy_stage1 load_from_fp32_weights log_trace_cache_warnings"
    " offload_optimizer offload_param overlap_comm reduce_bucket_size reduce_scatter"
    " round_robin_gradients save_muon_momentum_buffer_in_memory sub_group_size"
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
    **{f"zero_{key}": f"{_ZERO}.{key}" for key in _ZERO_KEYS.split()},
    **{f"zero_{key}": f"{_ZERO}.zero_{key}" for key in _WITH_PREFIX.split()},
    **{f"zero_{key}": f"{_ZERO}.stage3_{key}" for key in _STAGE_3.split()},
    "zero_multi_rank_bucket_allreduce": f"{_ZERO}.use_multi_rank_bucket_allreduce",
    "zeropp_loco_param": f"{_ZERO}.zeropp_loco_param",
    "mics_shard_size": f"{_ZERO}.mics_shard_size",
    "is_sanity_checks_enabled": f"{_ZERO}.enable_sanity_checks",
    "cpuadam_cores_perc": f"{_ZERO}.offload_optimizer.cpuadam_cores_perc",
    "super_offload": f"{_ZERO}.offload_optimizer.super_offload",
    "zenflow_config": f"{_ZERO}.zenflow",
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
    "dataloader_drop_last dump_state gradient_predivide_factor memory_breakdown steps_per_print"
    " wall_clock_breakdown zero_allow_untested_optimizer zero_force_ds_cpu_optimizer"
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
