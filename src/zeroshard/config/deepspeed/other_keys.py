"""The keys outside ``zero_optimization`` and what each does here."""

from __future__ import annotations

import zeroshard.config.deepspeed.lower as to
from zeroshard.config.deepspeed.rows import (
    Key,
    becomes,
    count,
    every,
    flag,
    number,
    one_of,
    refuses,
    refuses_section,
    tunes,
    whole,
)

__all__ = ["OTHER_KEYS"]

_DTYPES = one_of("fp32", "fp16", "bf16")
_TRACE = "use engine.trace(DIRECTORY) and zeroshard report"
_CALLS = "only models that call deepspeed.checkpointing have it"
_METRICS = "log engine.memory(), engine.traffic() and your losses in the training loop"
_GIVEN = (
    "shard() and ZeroTrainer take the object that they are given; DeepSpeed's initialize() makes it"
)

_BATCH = (
    becomes("train_batch_size", None, count, to.option("train_batch_size"),
            "the samples of a step, compared with the other two and the ranks"),
    becomes("train_micro_batch_size_per_gpu", None, count,
            to.option("train_micro_batch_size_per_gpu"), "the samples of a rank's forward"),
    becomes("gradient_accumulation_steps", None, count, to.option("gradient_accumulation_steps"),
            "the forwards of a step"),
    tunes("managed_gradient_accumulation", True,
          "a loop steps where it calls step(); DeepSpeed's initialize() takes it", flag),
    becomes("gradient_clipping", 1.0, number, to.clipping,
            "the norm that a step clips to; left out it is 1.0, and 0 switches it off",
            tells_default=True),
    tunes("dataloader_drop_last", False, "the DataLoader says it", flag),
)  # fmt: skip

_HALF = (
    becomes("fp16.enabled", False, flag, to.half("fp16", ("bf16", "bfloat16")),
            "weights, activations and gradients in fp16 beside fp32 masters"),
    becomes("fp16.loss_scale", 0, number, to.static_scale,
            "the scale of every step; 0 for one that moves"),
    becomes("fp16.initial_scale_power", 16, whole, to.first_scale, "the first scale, a power of 2",
            tells_default=True),
    becomes("fp16.loss_scale_window", 1000, count, to.moving("growth_interval"),
            "the good steps after which the scale doubles", tells_default=True),
    becomes("fp16.hysteresis", 2, count, to.moving("hysteresis"),
            "the overflows that halve the scale", tells_default=True),
    becomes("fp16.consecutive_hysteresis", False, flag, to.moving("consecutive_hysteresis"),
            "whether a good step starts that count anew"),
    becomes("fp16.min_loss_scale", 1, number, to.moving("min"), "the smallest scale"),
    tunes("fp16.auto_cast", False, "inputs of the model are always cast"),
    refuses("fp16.fp16_master_weights_and_grads", False, "masters are fp32"),
    becomes("bf16.enabled", False, flag, to.half("bf16", ("fp16",)),
            "weights, activations and gradients in bf16 beside fp32 masters"),
    becomes("bfloat16.enabled", False, flag, to.half("bf16", ("fp16",)), "an older name of bf16"),
    tunes("bf16.immediate_grad_update", False, "gradients are reduced as they are made"),
    tunes("bf16.check_grad_overflow", True, "a step whose gradients are not finite is skipped"),
    refuses("bf16.bf16_master_weights_and_grads", False, "masters are fp32"),
    refuses("bf16.bf16_optimizer_states", False, "moments are fp32"),
    refuses("torch_autocast.enabled", False, "nothing enters autocast by itself",
            "use precision='bf16', or torch.autocast around the forward"),
    tunes("torch_autocast.dtype", None, "torch.autocast() says it"),
    tunes("torch_autocast.lower_precision_safe_modules", None, "torch.autocast() says it"),
    refuses_section("amp", "Apex is not used", "use bf16 or fp16"),
    becomes("communication_data_type", None, _DTYPES, to.dtype("reduce"),
            "the dtype of gradients on the wire"),
    becomes("data_types.grad_accum_dtype", None, _DTYPES, to.dtype("accumulate"),
            "the dtype of gradients at rest"),
    refuses("data_types.param_dtype", None, "bf16 and fp16 say it", "leave it out"),
    refuses("data_types.buffer_dtype", None, "buffers keep their dtype", "cast them in the model"),
)  # fmt: skip

_REDUCE = (
    refuses("gradient_allreduce_op", "mean", "gradients are averaged over the ranks",
            "multiply the loss by the number of ranks for their sum"),
    tunes("prescale_gradients", False, "the mean over the ranks is the same"),
    tunes("gradient_predivide_factor", 1.0, "the mean over the ranks is the same"),
    refuses("sparse_gradients", False, "gradients are dense", "use nn.Embedding(sparse=False)"),
    refuses("fp32_allreduce", False, "a flag has no dtype of its own",
            "use communication_data_type: 'fp32'"),
    tunes("disable_allgather", False, "stepped weights are always gathered where they are used"),
    refuses("sequence_parallel_size", 1, "sequences are not cut over ranks",
            "give shard() a mesh that has a dimension of your own for it"),
    tunes("seq_parallel_communication_data_type", "fp32", "sequences are not cut over ranks"),
    refuses("data_parallel_size", None, "all ranks are data parallel",
            "give shard() a mesh with the other dimensions"),
)  # fmt: skip

_OPTIMIZERS = (
    tunes("optimizer.type", None, _GIVEN),
    tunes("optimizer.params.*", None, _GIVEN),
    tunes("optimizer.legacy_fusion", False, _GIVEN),
    tunes("scheduler.type", None, _GIVEN),
    tunes("scheduler.params.*", None, _GIVEN),
    tunes("zero_allow_untested_optimizer", False,
          "every elementwise optimizer is taken, and no other"),
    tunes("zero_force_ds_cpu_optimizer", True, "the host steps with the optimizer that is given"),
)  # fmt: skip

_ACTIVATIONS = (
    tunes("activation_checkpointing.partition_activations", False,
          f"{_CALLS}; zs.nn.checkpoint(fn, x, partition=group)"),
    tunes("activation_checkpointing.cpu_checkpointing", False,
          f"{_CALLS}; zs.nn.checkpoint_blocks(model, tier='host')"),
    tunes("activation_checkpointing.contiguous_memory_optimization", False,
          "saved activations lie as they were made"),
    tunes("activation_checkpointing.synchronize_checkpoint_boundary", False,
          "checkpoints wait for nothing"),
    tunes("activation_checkpointing.number_checkpoints", None,
          "the model says how many there are"),
    tunes("activation_checkpointing.profile", False, f"{_CALLS}; {_TRACE}"),
)  # fmt: skip

_DISK = (
    tunes("aio.block_size", 1048576, "files are read and written in pieces of a chosen size"),
    tunes("aio.queue_depth", 8, "reads and writes are queued as far as buffers allow"),
    tunes("aio.intra_op_parallelism", 1, "threads are chosen"),
    tunes("aio.thread_count", 1, "threads are chosen; DeepSpeed does not read it either"),
    tunes("aio.single_submit", False, "reads and writes are submitted by threads"),
    tunes("aio.overlap_events", True, "reads and writes always overlap"),
    tunes("aio.use_gds", False, "files are read through host memory"),
    tunes("checkpoint.tag_validation", "WARN", "the ranks always agree on what they save"),
    tunes("checkpoint.load_universal", False, "every checkpoint loads on any number of ranks"),
    refuses("checkpoint.use_node_local_storage", False,
            "a checkpoint is one directory that all ranks see", "save to a shared directory"),
    tunes("checkpoint.parallel_write.pipeline_stage", False, "each rank writes its own pieces"),
    tunes("checkpoint.writer", None, "zs.Saver writes in the background"),
    tunes("load_universal_checkpoint", False, "every checkpoint loads on any number of ranks"),
)  # fmt: skip

_PRINTS = (
    tunes("steps_per_print", None, "DeepSpeed's initialize() logs steps; shard() prints nothing",
          every),
    refuses("wall_clock_breakdown", False, "no times are printed", _TRACE),
    refuses("memory_breakdown", False, "no memory is printed", "print zs.memory_table()"),
    refuses("dump_state", False, "no configuration is printed",
            "zeroshard config explain FILE shows it"),
    refuses_section("flops_profiler", "there is no such profiler",
                    "use torch.utils.flop_counter.FlopCounterMode"),
    refuses_section("comms_logger", "collectives are not logged", _TRACE),
    refuses_section("timers", "no times are printed", _TRACE),
    refuses_section("tensorboard", "nothing is logged", _METRICS),
    refuses_section("wandb", "nothing is logged", _METRICS),
    refuses_section("comet", "nothing is logged", _METRICS),
    refuses_section("csv_monitor", "nothing is logged", _METRICS),
)  # fmt: skip

_REST = (
    refuses_section("compile", "nothing is compiled by itself", "use torch.compile(model)",
                    switches=("deepcompile",)),
    refuses_section("tensor_parallel", "layers are not cut over ranks",
                    "use torch's parallelize_module, and give shard() the mesh with its 'tp'",
                    switches=("autotp_size",)),
    refuses_section("expert_parallel", "experts are not cut over ranks", "leave it out",
                    switches=()),
    refuses_section("pipeline", "layers are not cut into stages",
                    "use torch.distributed.pipelining, and give shard() the mesh with its 'pp'",
                    switches=()),
    refuses_section("hybrid_engine", "there is no engine for inference",
                    "generate inside engine.gathered()"),
    refuses_section("elasticity", "batch sizes do not follow the number of ranks",
                    "use zeroshard run --elastic, and resume on any number of ranks"),
    refuses_section("autotuning", "nothing is tuned by trial",
                    "use zeroshard plan, or policy='auto'"),
    refuses_section("curriculum_learning", "data are the DataLoader's", "choose samples there"),
    refuses_section("data_efficiency", "data are the DataLoader's", "choose samples there"),
    refuses_section("compression_training", "models are trained as they are",
                    "use torch.ao for quantized or pruned models"),
    refuses_section("progressive_layer_drop", "models are trained as they are",
                    "drop layers in the model"),
    refuses_section("eigenvalue", "models are trained as they are", "leave it out"),
    refuses_section("quantize_training", "models are trained as they are",
                    "use torch.ao for quantized models"),
    refuses_section("sparse_attention", "models are trained as they are",
                    "use attention of your model's", switches=()),
    refuses_section("nebula", "checkpoints are files", "use zs.Saver"),
)  # fmt: skip

OTHER_KEYS: tuple[Key, ...] = (
    *_BATCH, *_HALF, *_REDUCE, *_OPTIMIZERS, *_ACTIVATIONS, *_DISK, *_PRINTS, *_REST,
)  # fmt: skip
