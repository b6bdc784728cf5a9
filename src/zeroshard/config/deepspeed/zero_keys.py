"""The keys of ``zero_optimization`` and what each does here."""

from __future__ import annotations

import zeroshard.config.deepspeed.lower as to
from zeroshard.config.deepspeed.rows import (
    Key,
    anything,
    becomes,
    count,
    flag,
    number,
    one_of,
    ranks,
    refuses,
    text,
    tunes,
)

__all__ = ["ZERO_KEYS"]

_Z = "zero_optimization."
_OPTIMIZER, _PARAM = f"{_Z}offload_optimizer.", f"{_Z}offload_param."

_STAGE = (
    becomes(f"{_Z}stage", 0, one_of(0, 1, 2, 3, also=(False, True)), to.stage,
            "which states are sharded", tells_default=True),
    tunes(f"{_Z}contiguous_gradients", True, "a unit's gradients always lie in one buffer"),
    tunes(f"{_Z}reduce_scatter", True, "gradients are reduced to where they rest"),
    tunes(f"{_Z}reduce_bucket_size", 5e8, "a unit's gradients are reduced at once"),
    tunes(f"{_Z}use_multi_rank_bucket_allreduce", True, "a unit's gradients are reduced at once"),
    tunes(f"{_Z}allgather_partitions", True, "weights are always all-gathered"),
    tunes(f"{_Z}allgather_bucket_size", 5e8, "a unit's weights are gathered at once"),
    tunes(f"{_Z}overlap_comm", None, "communication always overlaps compute"),
    tunes(f"{_Z}round_robin_gradients", False, "each unit's gradients are cut over all ranks"),
    refuses(f"{_Z}load_from_fp32_weights", True, "a checkpoint always restores the fp32 masters"),
    tunes(f"{_Z}elastic_checkpoint", False, "a checkpoint loads on any number of ranks"),
    refuses(f"{_Z}ignore_unused_parameters", True,
            "parameters without gradient are allowed in every stage"),
    refuses(f"{_Z}legacy_stage1", False, "DeepSpeed refuses it, too", "use stage"),
)  # fmt: skip

_OFFLOAD = (
    becomes(f"{_OPTIMIZER}device", "none", one_of(*to.TIERS),
            to.device("offload_optimizer", "optimizer"),
            "where masters and moments rest; gradients rest on the host then (stages 2, 3)"),
    becomes(f"{_OPTIMIZER}nvme_path", None, text, to.path("offload_optimizer", "offload_param"),
            "the directory of what rests on disk"),
    becomes(f"{_OPTIMIZER}ratio", 1.0, number, to.ratio, "the share that leaves the device"),
    tunes(f"{_OPTIMIZER}pin_memory", True, "host memory is pinned where that helps"),
    tunes(f"{_OPTIMIZER}buffer_count", 4, "offload.staging_bytes bounds the buffers"),
    tunes(f"{_OPTIMIZER}pipeline_read", False, "reads always overlap the step"),
    tunes(f"{_OPTIMIZER}pipeline_write", False, "writes always overlap the step"),
    tunes(f"{_OPTIMIZER}fast_init", False, "states are made where they rest"),
    tunes(f"{_OPTIMIZER}super_offload", False, "the step on the host always overlaps copies"),
    tunes(f"{_OPTIMIZER}cpuadam_cores_perc", 0.8, "torch.set_num_threads() says it"),
    becomes(f"{_PARAM}device", "none", one_of(*to.TIERS), to.device("offload_param", "weight"),
            "where weights rest"),
    becomes(f"{_PARAM}nvme_path", None, text, to.path("offload_param", "offload_optimizer"),
            "the directory of what rests on disk"),
    tunes(f"{_PARAM}pin_memory", True, "host memory is pinned where that helps"),
    tunes(f"{_PARAM}buffer_count", 5, "offload.staging_bytes bounds the buffers"),
    tunes(f"{_PARAM}buffer_size", 1e8, "offload.staging_bytes bounds the buffers"),
    tunes(f"{_PARAM}max_in_cpu", 1e9, "weights on disk rest there alone"),
    tunes(f"{_Z}sub_group_size", 1e9, "offload.staging_bytes bounds a tile of the step"),
    becomes(f"{_Z}cpu_offload", None, flag, to.device("offload_optimizer", "optimizer"),
            "an older form of offload_optimizer.device"),
    becomes(f"{_Z}cpu_offload_param", None, flag, to.device("offload_param", "weight"),
            "an older form of offload_param.device"),
    tunes(f"{_Z}cpu_offload_use_pin_memory", None, "host memory is pinned where that helps"),
    refuses(f"{_Z}zenflow", None, "updates of the most important gradients alone are not there",
            "offload.delayed_update hides the step on the host"),
)  # fmt: skip

_STAGE_3 = (
    tunes(f"{_Z}stage3_prefetch_bucket_size", 5e7, "prefetch_bytes says it, in bytes"),
    tunes(f"{_Z}stage3_param_persistence_threshold", 1e5,
          "small parameters are gathered with the others of their unit"),
    tunes(f"{_Z}stage3_model_persistence_threshold", 2**63 - 1,
          "small parameters are gathered with the others of their unit"),
    tunes(f"{_Z}stage3_max_live_parameters", 1e9,
          "weights live while their unit runs; prefetch_bytes bounds those gathered ahead"),
    tunes(f"{_Z}stage3_max_reuse_distance", 1e9, "policy='zero3-keep' keeps weights for backward"),
    tunes(f"{_Z}stage3_gather_16bit_weights_on_model_save", False,
          "engine.full_state_dict() and ZeroTrainer.save_model() always gather whole weights"),
    tunes(f"{_Z}stage3_gather_fp16_weights_on_model_save", False,
          "an older name of stage3_gather_16bit_weights_on_model_save"),
    tunes(f"{_Z}stage3_module_granularity_threshold", 0, "units are found; units= names others"),
    tunes(f"{_Z}stage3_use_all_reduce_for_fetch_params", False, "weights are all-gathered"),
    tunes(f"{_Z}stage3_allgather_sequential", False, "a unit's weights are gathered at once"),
    tunes(f"{_Z}leaf_module.classes", "3 MoE classes of Transformers",
          "a unit is always gathered whole; units= names others"),
    tunes(f"{_Z}leaf_module.names", [], "a unit is always gathered whole; units= names others"),
    tunes(f"{_Z}leaf_module.name_suffixes", [],
          "a unit is always gathered whole; units= names others"),
    tunes(f"{_Z}memory_efficient_linear", True, "linear layers save no gathered weight"),
    tunes(f"{_Z}override_module_apply", True, "zs.deferred_init() needs no such thing"),
    tunes(f"{_Z}pipeline_loading_checkpoint", False, "each rank reads its own pieces"),
    tunes(f"{_Z}log_trace_cache_warnings", False, "there is no such cache"),
    tunes(f"{_Z}enable_sanity_checks", False, "the ranks always compare what they do"),
    refuses(f"{_Z}save_muon_momentum_buffer_in_memory", False, "Muon's step is not elementwise",
            "use AdamW"),
)  # fmt: skip

_PLUS = (
    becomes(f"{_Z}zero_hpz_partition_size", 1, ranks, to.hpz,
            "hpZ: the ranks of a node keep the weights between forward and backward"),
    becomes(f"{_Z}zero_quantized_weights", False, flag, to.quantized("comm.weight_codec", "int8"),
            "qwZ: weights travel as int8"),
    becomes(f"{_Z}zero_quantized_nontrainable_weights", False, flag,
            to.quantized("comm.frozen_codec", "int8"),
            "MixZ++: weights that are not trained rest and travel as int8"),
    becomes(f"{_Z}zero_quantized_gradients", False, flag, to.quantized("comm.grad_codec", "int4"),
            "qgZ: gradients travel as int4"),
    becomes(f"{_Z}zeropp_loco_param.err_beta", 0.8, number, to.feedback("beta"),
            "LoCo: the weight of each new error"),
    becomes(f"{_Z}zeropp_loco_param.reset_T", 1024, count, to.feedback("reset"),
            "LoCo: after how many sums errors are dropped"),
    becomes(f"{_Z}mics_shard_size", -1, ranks, to.mics,
            "MiCS: the ranks that together hold all states"),
    Key(f"{_Z}mics_hierarchical_params_gather", False, "comm.hierarchical says it", anything),
)  # fmt: skip

ZERO_KEYS = (*_STAGE, *_OFFLOAD, *_STAGE_3, *_PLUS)
