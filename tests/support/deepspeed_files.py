"""Configurations as DeepSpeed's and Transformers' users have them: the keys of the documentation's
examples, each with a value of its kind, and the list of all documented keys.
"""

from __future__ import annotations

from typing import Any

_FP16: dict[str, Any] = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_ADAMW: dict[str, Any] = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
_WARMUP: dict[str, Any] = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
_AUTO: dict[str, Any] = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
_CPU: dict[str, Any] = {"device": "cpu", "pin_memory": True}
_NVME: dict[str, Any] = {"device": "nvme", "nvme_path": "/local_nvme"}

FILES: dict[str, dict[str, Any]] = {
    "transformers zero2": {
        "fp16": _FP16,
        "optimizer": _ADAMW,
        "scheduler": _WARMUP,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "pin_memory": True},
            "allgather_partitions": True,
            "allgather_bucket_size": 2e8,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 2e8,
            "contiguous_gradients": True,
        },
        **_AUTO,
    },
    "transformers zero3": {
        "fp16": _FP16,
        "bf16": {"enabled": "auto"},
        "optimizer": _ADAMW,
        "scheduler": _WARMUP,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": _CPU,
            "offload_param": _CPU,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1e9,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        **_AUTO,
    },
    "getting started": {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
        "fp16": {"enabled": True},
        "zero_optimization": True,
    },
    "stage 1": {
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8},
        "fp16": {"enabled": True, "loss_scale": 128, "loss_scale_window": 1000},
    },
    "stage 2": {
        "zero_optimization": {
            "stage": 2,
            "contiguous_gradients": True,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 5e8,
            "allgather_bucket_size": 5e8,
        },
        "bf16": {"enabled": True},
    },
    "stage 3": {
        "zero_optimization": {
            "stage": 3,
            "contiguous_gradients": True,
            "stage3_max_live_parameters": 1e9,
            "stage3_max_reuse_distance": 1e9,
            "stage3_prefetch_bucket_size": 1e7,
            "stage3_param_persistence_threshold": 1e5,
            "reduce_bucket_size": 1e7,
            "sub_group_size": 1e9,
        }
    },
    "offload": {
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {**_CPU, "ratio": 0.3},
            "round_robin_gradients": True,
        },
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    },
    "infinity": {
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 1e8,
            "offload_optimizer": {
                **_NVME,
                "pin_memory": True,
                "buffer_count": 4,
                "pipeline_read": True,
                "pipeline_write": True,
                "fast_init": False,
            },
            "offload_param": {
                **_NVME,
                "pin_memory": True,
                "buffer_count": 5,
                "buffer_size": 1e8,
                "max_in_cpu": 1e9,
            },
        },
        "aio": {
            "block_size": 262144,
            "queue_depth": 32,
            "thread_count": 1,
            "intra_op_parallelism": 4,
            "single_submit": False,
            "overlap_events": True,
        },
    },
    "zero++": {
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 10000000,
            "reduce_scatter": True,
            "zero_quantized_weights": True,
            "zero_hpz_partition_size": 16,
            "zero_quantized_gradients": True,
            "contiguous_gradients": True,
            "overlap_comm": True,
        },
        "communication_data_type": "fp32",
    },
    "mixz++": {
        "zero_optimization": {
            "stage": 3,
            "zero_quantized_nontrainable_weights": True,
            "zero_hpz_partition_size": 8,
        },
        "bf16": {"enabled": True},
        "communication_data_type": "bf16",
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "all that is off": {
        "tensorboard": {"enabled": False, "output_path": "logs", "job_name": "a"},
        "wandb": {"enabled": False},
        "csv_monitor": {"enabled": False},
        "flops_profiler": {"enabled": False, "profile_step": 1, "detailed": True},
        "comms_logger": {"enabled": False, "verbose": False},
        "compile": {"deepcompile": False},
        "tensor_parallel": {"autotp_size": 0},
        "compression_training": {"weight_quantization": {"shared": {"enabled": False}}},
        "amp": {"enabled": False, "opt_level": "O1"},
        "torch_autocast": {"enabled": False, "dtype": "bfloat16"},
        "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
        "zero_optimization": {"stage": 0, "offload_optimizer": None},
        "checkpoint": {"tag_validation": "Fail", "load_universal": True},
        "elasticity": {},
    },
}

# every key that DeepSpeed 0.19 documents or reads
_ZERO = """stage contiguous_gradients reduce_scatter reduce_bucket_size
use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size overlap_comm
load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer zenflow sub_group_size
stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save
stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params
stage3_allgather_sequential ignore_unused_parameters legacy_stage1 round_robin_gradients
zero_hpz_partition_size zero_quantized_weights zero_quantized_nontrainable_weights
zero_quantized_gradients zeropp_loco_param mics_shard_size mics_hierarchical_params_gather
memory_efficient_linear override_module_apply pipeline_loading_checkpoint log_trace_cache_warnings
enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module cpu_offload cpu_offload_param
cpu_offload_use_pin_memory stage3_gather_fp16_weights_on_model_save"""
_SECTIONS = {
    "": """train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
    managed_gradient_accumulation gradient_clipping steps_per_print communication_data_type
    gradient_allreduce_op prescale_gradients gradient_predivide_factor sparse_gradients
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer disable_allgather dump_state
    wall_clock_breakdown memory_breakdown dataloader_drop_last seq_parallel_communication_data_type
    sequence_parallel_size data_parallel_size fp16 bf16 bfloat16 torch_autocast amp data_types
    optimizer scheduler activation_checkpointing aio checkpoint compile tensor_parallel
    expert_parallel hybrid_engine elasticity autotuning flops_profiler comms_logger tensorboard
    wandb comet csv_monitor curriculum_learning data_efficiency compression_training""",
    "zero_optimization": _ZERO,
    "zero_optimization.offload_param": """device nvme_path buffer_count buffer_size max_in_cpu
    pin_memory""",
    "zero_optimization.offload_optimizer": """device nvme_path buffer_count pin_memory
    pipeline_read pipeline_write fast_init ratio super_offload cpuadam_cores_perc""",
    "zero_optimization.zeropp_loco_param": "err_beta reset_T",
    "zero_optimization.leaf_module": "classes names name_suffixes",
    "fp16": """enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis
    consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads""",
    "bf16": """enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads
    bf16_optimizer_states""",
    "torch_autocast": "enabled dtype lower_precision_safe_modules",
    "data_types": "grad_accum_dtype param_dtype buffer_dtype",
    "optimizer": "type params",
    "scheduler": "type params",
    "activation_checkpointing": """partition_activations cpu_checkpointing
    contiguous_memory_optimization synchronize_checkpoint_boundary profile number_checkpoints""",
    "aio": """block_size queue_depth intra_op_parallelism thread_count single_submit overlap_events
    use_gds""",
    "checkpoint": "tag_validation load_universal use_node_local_storage parallel_write writer",
}
NAMES = [
    f"{section}.{name}".strip(".") for section, names in _SECTIONS.items() for name in names.split()
]
