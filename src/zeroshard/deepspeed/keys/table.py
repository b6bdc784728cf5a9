"""The keys of DeepSpeed's configuration, as its JSON nests them, and what each does here.

Defaults come from DeepSpeed's code, also where its documentation says otherwise. A row says
that a key *becomes* options of ours, *tunes* nothing here, or is *refused* at another value than
its default. A new key is a new line.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import zeroshard.deepspeed.keys.lower as to
from zeroshard.config.strict_json import flattened

# ------------------------------------------------- the form of a row, and the kinds of values

Kind = Callable[[Any], str]  # the end of a sentence about a value of another kind, or ""
Test = Callable[[Any], bool]
Idle = Callable[[Any, Mapping[str, Any]], str]
# options of ours ("comm.node_size") and their values, of a value, of all values of the file (those
# left out, and "auto", are DeepSpeed's default), and of more; raises ConfigError with the reason
Lower = Callable[..., dict[str, Any]]


def _kind(*tests: tuple[Test, str]) -> Kind:
    """Take values that pass every test; say of another what its first failing test says."""
    return lambda value: next((complaint for test, complaint in tests if not test(value)), "")


_NUMBERS = (int, float)
_FINITE: tuple[Test, str] = (lambda v: type(v) in _NUMBERS and isfinite(v), "is not a number")

flag = _kind((lambda v: type(v) is bool, "is neither true nor false"))
number = _kind(_FINITE, (lambda v: v >= 0, "is negative"))
# also as DeepSpeed's files write whole numbers: 5e8
count = _kind(_FINITE, (lambda v: v >= 1 and v == int(v), "is not a whole number from 1"))
whole = _kind((lambda v: type(v) is int and v >= 0, "is not a whole number"))
# infinity stands for never, and -1 for no ranks
every = _kind((lambda v: type(v) in _NUMBERS and v >= 0, "is not a number of steps"))
ranks = _kind((lambda v: type(v) is int and (v >= 1 or v == -1), "is not a number of ranks"))
levels = _kind((
    lambda v: type(v) in (int, str) and bool(re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", str(v))),
    "is neither a number of leaves nor levels such as '3x2x2'",
))  # fmt: skip
texts = _kind((
    lambda v: isinstance(v, list) and all(isinstance(one, str) for one in v),
    "is not a list of names",
))  # fmt: skip
patterns = _kind(
    (lambda v: isinstance(v, list), "is neither 'auto' nor a list of names"),
    (lambda v: all(isinstance(one, str) and _is_pattern(one) for one in v), "has a bad pattern"),
)
text = _kind((lambda v: isinstance(v, str), "is not text"))
# null and false stand for an empty object
an_object = _kind((lambda v: isinstance(v, dict | None) or v is False, "is not an object"))
anything = _kind()  # for keys that make no difference here


def pattern_of(name: str) -> re.Pattern[str]:
    """Return what a name, in which * stands for any characters, searches for. Raises re.error."""
    return re.compile(name.replace("*", ".*"))


def _is_pattern(name: str) -> bool:
    try:
        return bool(pattern_of(name))
    except re.error:
        return False


def one_of(*choices: Any, also: tuple[Any, ...] = ()) -> Kind:
    """Take one of `choices`, or of older forms, `also`; a number is not a truth value."""
    known = [(type(one), one) for one in (*choices, *also)]
    complaint = f"is not one of {', '.join(map(str, choices))}"
    return _kind((lambda value: (type(value), value) in known, complaint))


@dataclass(frozen=True)
class Key:
    """The effect of one of DeepSpeed's keys here.

    With `lower` it becomes an option of ours. Else a value that is not `harmless` is refused,
    because it would change a run; all others make no difference here.
    """

    default: Any
    why: str  # one sentence
    kind: Kind = anything
    lower: Lower | None = None
    more: tuple[str, ...] = ()  # arguments of `lower`
    harmless: Test = lambda value: True
    instead: str = ""  # of a refused value
    tells_default: bool = False  # also where it is left out, its default has an effect
    idle: Idle | None = None  # of the value and all values: why it has no effect, or ""
    done: str = ""  # of a key that only watches: what initialize() writes for it

    only_watches: bool = False

    def watches_in_vain(self, value: Any) -> bool:
        """Whether `value` asks to be shown something that nothing shows here."""
        return self.only_watches and not self.done and self.is_on(value)

    def is_on(self, value: Any) -> bool:
        """Whether a section of switches, or a flag, is switched on."""
        return _is_on(value, "enabled") if isinstance(value, dict) else bool(value)


def becomes(default: Any, kind: Kind, why: str, lower: Lower, *more: str, **rest: Any) -> Key:
    """Return a key that is an option of ours, too: `lower` of its value, all values and `more`."""
    return Key(default, why, kind, lower, more, **rest)


tunes = Key  # a key that changes speed or memory there, and nothing here


def refuses(default: Any, why: str, instead: str = "leave it out") -> Key:
    """Return a key that asks for something else than happens here, unless it has its default."""
    usual = (type(None), None), (type(default), default)
    return Key(default, why, harmless=lambda v: (type(v), v) in usual, instead=instead)


def section(why: str, instead: str = "leave it out", switch: str = "enabled") -> Key:
    """Return a whole section that asks for something else than happens here, unless each `switch`
    in it, at any depth, is off or left out; without a switch, unless it is empty.
    """

    def is_off(value: Any) -> bool:
        return not value or (bool(switch) and not _is_on(value, switch))

    return Key(None, why, an_object, harmless=is_off, instead=instead)


def watches(default: Any, kind: Kind, why: str, done: str = "") -> Key:
    """Return a key that changes no number: `done` is what initialize() writes for it, `why` what
    to use elsewhere.
    """
    return Key(default, why, kind, done=done, only_watches=True)


def _is_on(value: Any, switch: str) -> bool:
    """Whether a `switch` in an object is on, at any depth."""
    held = value.items() if isinstance(value, dict) else ()
    return any((key == switch and bool(one)) or _is_on(one, switch) for key, one in held)


# ------------------------------------------------------------------------------------ the table

_STAGES = one_of(0, 1, 2, 3, also=(False, True))
_DTYPES, _DEVICES = one_of("fp32", "fp16", "bf16"), one_of(*to.TIERS)
_PINNED = "host memory is pinned where that helps"
_STAGING = "offload.staging_bytes bounds the buffers"
_SMALL = "small parameters are gathered with the others of their unit"
_LEAF = "a unit is always gathered whole; units= names others"
_HALF = "weights, activations and gradients in {} beside fp32 masters"
_MEAN = "the mean or sum over the ranks is the same"
_GIVEN = (
    "shard() and ZeroTrainer take the object that they are given; DeepSpeed's initialize() makes it"
)
_MADE = tunes(None, _GIVEN)
_CALLS = "only models that call deepspeed.checkpointing have it"
_TRACE = "use engine.trace(DIRECTORY) and zeroshard report"
_METRICS = "log engine.memory(), engine.traffic() and your losses in the training loop"
_AS_IS = "models are trained as they are"
_BUFFERS = "buffers keep the dtype that they have"
_LEVELS = ("debug", "info", "warning", "error", "critical")

_ZERO: dict[str, Any] = {
    "stage": becomes(0, _STAGES, "which states are sharded", to.stage, tells_default=True),
    "contiguous_gradients": tunes(True, "a unit's gradients always lie in one buffer"),
    "reduce_scatter": tunes(True, "gradients are reduced to where they rest"),
    "reduce_bucket_size": tunes(5e8, "a unit's gradients are reduced at once"),
    "use_multi_rank_bucket_allreduce": tunes(True, "a unit's gradients are reduced at once"),
    "allgather_partitions": tunes(True, "weights are always all-gathered"),
    "allgather_bucket_size": tunes(5e8, "a unit's weights are gathered at once"),
    "overlap_comm": tunes(None, "communication always overlaps compute"),
    "round_robin_gradients": tunes(False, "each unit's gradients are cut over all ranks"),
    "parameter_alignment": tunes(False, "no step depends on where a parameter begins", flag),
    "compute_grad_norm": tunes(
        True, "a step takes the norm anyway, to see that gradients are finite", flag),
    "load_from_fp32_weights": refuses(True, "a checkpoint always restores the fp32 masters"),
    "elastic_checkpoint": tunes(False, "a checkpoint loads on any number of ranks"),
    "ignore_unused_parameters": refuses(
        True, "parameters without gradient are allowed in every stage"),
    "legacy_stage1": refuses(False, "DeepSpeed refuses it, too", "use stage"),
    "offload_optimizer": {
        "device": becomes("none", _DEVICES,
            "where masters and moments rest; gradients rest on the host then (stages 2, 3)",
            to.device, "offload_optimizer", "optimizer"),
        "nvme_path": becomes(None, text, "the directory of what rests on disk",
            to.path, "offload_optimizer", "offload_param"),
        "ratio": becomes(1.0, number, "the share that leaves the device", to.ratio),
        "pin_memory": tunes(True, _PINNED),
        "buffer_count": tunes(4, _STAGING),
        "pipeline_read": tunes(False, "reads always overlap the step"),
        "pipeline_write": tunes(False, "writes always overlap the step"),
        "fast_init": tunes(False, "states are made where they rest"),
        "super_offload": tunes(False, "the step on the host always overlaps copies"),
        "cpuadam_cores_perc": tunes(0.8, "torch.set_num_threads() says it")},
    "offload_param": {
        "device": becomes("none", _DEVICES, "where weights rest",
            to.device, "offload_param", "weight", idle=to.below_stage_3),
        "nvme_path": becomes(None, text, "the directory of what rests on disk",
            to.path, "offload_param", "offload_optimizer", idle=to.below_stage_3),
        "pin_memory": tunes(True, _PINNED),
        "buffer_count": tunes(5, _STAGING),
        "buffer_size": tunes(1e8, _STAGING),
        "max_in_cpu": tunes(1e9, "weights on disk rest there alone")},
    "sub_group_size": tunes(1e9, "offload.staging_bytes bounds a tile of the step"),
    "cpu_offload": becomes(None, flag, "an older form of offload_optimizer.device",
        to.device, "offload_optimizer", "optimizer"),
    "cpu_offload_param": becomes(None, flag, "an older form of offload_param.device",
        to.device, "offload_param", "weight", idle=to.below_stage_3),
    "cpu_offload_use_pin_memory": tunes(None, _PINNED),
    "zenflow": refuses(None, "updates of the most important gradients alone are not there",
                       "offload.delayed_update hides the step on the host"),
    "stage3_prefetch_bucket_size": tunes(5e7, "prefetch_bytes says it, in bytes"),
    "stage3_param_persistence_threshold": tunes(1e5, _SMALL),
    "stage3_model_persistence_threshold": tunes(2**63 - 1, _SMALL),
    "stage3_max_live_parameters": tunes(
        1e9, "weights live while their unit runs; prefetch_bytes bounds those gathered ahead"),
    "stage3_max_reuse_distance": tunes(1e9, "policy='zero3-keep' keeps weights for backward"),
    "stage3_gather_16bit_weights_on_model_save": tunes(
        False,
        "engine.full_state_dict() and ZeroTrainer.save_model() always gather whole weights"),
    "stage3_gather_fp16_weights_on_model_save": tunes(
        False, "an older name of stage3_gather_16bit_weights_on_model_save"),
    "stage3_module_granularity_threshold": tunes(0, "units are found; units= names others"),
    "stage3_use_all_reduce_for_fetch_params": tunes(False, "weights are all-gathered"),
    "stage3_allgather_sequential": tunes(False, "a unit's weights are gathered at once"),
    "leaf_module": {"classes": tunes("3 MoE classes of Transformers", _LEAF, texts),
                    "names, name_suffixes": tunes([], _LEAF, texts)},
    "memory_efficient_linear": tunes(True, "linear layers save no gathered weight"),
    "override_module_apply": tunes(True, "zs.deferred_init() needs no such thing"),
    "pipeline_loading_checkpoint": tunes(False, "each rank reads its own pieces"),
    "log_trace_cache_warnings": tunes(False, "there is no such cache"),
    "enable_sanity_checks": tunes(False, "the ranks always compare what they do"),
    "save_muon_momentum_buffer_in_memory": tunes(False, "Muon's states rest on the device"),
    "zero_hpz_partition_size": becomes(1, ranks,
        "hpZ: the ranks of a node keep the weights between forward and backward", to.node, "hpz"),
    "zero_quantized_weights": becomes(False, flag, "qwZ: weights travel as int8",
        to.quantized, "comm.weight_codec", "int8"),
    "zero_quantized_nontrainable_weights": becomes(False, flag,
        "MixZ++: weights that are not trained rest and travel as int8",
        to.quantized, "comm.frozen_codec", "int8"),
    "zero_quantized_gradients": becomes(False, flag, "qgZ: gradients travel as int4",
        to.quantized, "comm.grad_codec", "int4"),
    "zeropp_loco_param": {
        "err_beta": becomes(0.8, number, "LoCo: the weight of each new error",
            to.feedback, "beta"),
        "reset_T": becomes(1024, count, "LoCo: after how many sums errors are dropped",
            to.feedback, "reset")},
    "mics_shard_size": becomes(-1, ranks, "MiCS: the ranks that together hold all states",
        to.node, "mics"),
    "mics_hierarchical_params_gather": tunes(False, "comm.hierarchical says it"),
}  # fmt: skip

_TABLE: dict[str, Any] = {
    "zero_optimization": _ZERO,
    "train_batch_size": becomes(None, count,
        "the samples of a step, compared with the other two and the ranks",
        to.option, "train_batch_size"),
    "train_micro_batch_size_per_gpu": becomes(None, count, "the samples of a rank's forward",
        to.option, "train_micro_batch_size_per_gpu"),
    "gradient_accumulation_steps": becomes(None, count, "the forwards of a step",
        to.option, "gradient_accumulation_steps"),
    "managed_gradient_accumulation": tunes(
        True, "a loop steps where it calls step(); DeepSpeed's initialize() takes it", flag),
    "zeroshard": {
        "leaves": becomes(None, levels,
            "no key of DeepSpeed's: the micro-batches of a step; their sum is the same on any"
            " number of ranks", to.given, "leaves"),
        "ownership": becomes(None, one_of("whole"),
            "no key of DeepSpeed's: each rank owns whole parameters, as Adafactor, LAMB, Muon and"
            " 8-bit optimizers need; initialize() sets it for them", to.given, "ownership")},
    "gradient_clipping": becomes(1.0, number,
        "the norm that a step clips to; left out it is 1.0, and 0 switches it off",
        to.clipping, tells_default=True),
    "dataloader_drop_last": tunes(False, "the DataLoader says it", flag),
    "fp16": {
        "enabled": becomes(False, flag, _HALF.format("fp16"), to.half, "fp16"),
        "loss_scale": becomes(0, number, "the scale of every step; 0 for one that moves",
            to.static_scale),
        "initial_scale_power": becomes(16, whole, "the first scale, a power of 2",
            to.first_scale, tells_default=True),
        "loss_scale_window": becomes(1000, count, "the good steps after which the scale doubles",
            to.moving, "growth_interval", tells_default=True),
        "hysteresis": becomes(2, count, "the overflows that halve the scale",
            to.moving, "hysteresis", tells_default=True),
        "consecutive_hysteresis": becomes(False, flag,
            "whether a good step starts that count anew", to.moving, "consecutive_hysteresis"),
        "min_loss_scale": becomes(1, number, "the smallest scale", to.moving, "min"),
        "auto_cast": tunes(False, "inputs of the model are always cast"),
        "fp16_master_weights_and_grads": refuses(False, "masters are fp32")},
    "bf16": {
        "enabled": becomes(False, flag, _HALF.format("bf16"), to.half, "bf16"),
        "immediate_grad_update": tunes(False, "gradients are reduced as they are made"),
        "check_grad_overflow": tunes(True, "a step with gradients that are not finite is skipped"),
        "bf16_master_weights_and_grads": becomes(False, flag,
            "bf16 weights are the masters, and gradients rest in bf16", to.low_masters),
        "bf16_optimizer_states": becomes(False, flag,
            "moments of bf16 masters, as torch's optimizers round them: in each operation, where"
            " DeepSpeed's kernels round once a step", to.low_moments)},
    "bfloat16": {"enabled": becomes(False, flag, "an older name of bf16", to.half, "bf16")},
    "torch_autocast": {
        "enabled": refuses(False, "nothing enters autocast by itself",
                           "use precision='bf16', or torch.autocast around the forward"),
        "dtype, lower_precision_safe_modules": tunes(None, "torch.autocast() says it")},
    "amp": section("Apex is not used", "use bf16 or fp16"),
    "communication_data_type": becomes(None, _DTYPES, "the dtype of gradients on the wire",
        to.dtype, "communication_data_type", "reduce"),
    "data_types": {
        "grad_accum_dtype": becomes(None, _DTYPES, "the dtype of gradients at rest",
            to.dtype, "data_types.grad_accum_dtype", "accumulate"),
        "param_dtype": becomes(None, _DTYPES,
            "compared with what bf16 and fp16 say, as there", to.same_dtype),
        "buffer_dtype": tunes(None, f"{_BUFFERS}, cast them in the model", _DTYPES,
            done="buffers are cast, as there"),
        "keep_in_fp32_modules": tunes(
            "auto", f"{_BUFFERS}, so that a routing bias in fp32 stays in fp32", patterns,
            done="buffers that it names are fp32, as there; by default those of the model's own"
            " lists")},
    "gradient_allreduce_op": becomes(
        "mean", one_of("mean", "sum", also=("MEAN", "SUM", "Mean", "Sum")),
        "whether a step takes the mean of the ranks' gradients, or their sum; at every stage",
        to.reduction),
    "prescale_gradients": tunes(False, _MEAN),
    "gradient_predivide_factor": tunes(1.0, _MEAN),
    "sparse_gradients": refuses(False, "gradients are dense", "use nn.Embedding(sparse=False)"),
    "fp32_allreduce": refuses(False, "a flag has no dtype of its own",
                              "use communication_data_type: 'fp32'"),
    "disable_allgather": tunes(False, "stepped weights are always gathered where they are used"),
    "sequence_parallel_size": refuses(
        1, "sequences are not cut over ranks",
        "give shard() a mesh that has a dimension of your own for it"),
    "seq_parallel_communication_data_type": tunes("fp32", "sequences are not cut over ranks"),
    "data_parallel_size": refuses(None, "all ranks are data parallel",
                                  "give shard() a mesh with the other dimensions"),
    "optimizer": {"type": _MADE, "params": {"*": _MADE}, "legacy_fusion": tunes(False, _GIVEN)},
    "scheduler": {"type": _MADE, "params": {"*": _MADE}},
    "zero_allow_untested_optimizer": tunes(
        False, "every optimizer is taken that steps by elements, or by whole parameters"),
    "zero_force_ds_cpu_optimizer": tunes(
        True, "the host steps with the optimizer that is given"),
    "activation_checkpointing": {
        "partition_activations": tunes(
            False, f"{_CALLS}; zs.nn.checkpoint(fn, x, partition=group)"),
        "cpu_checkpointing": tunes(
            False, f"{_CALLS}; zs.nn.checkpoint_blocks(model, tier='host')"),
        "contiguous_memory_optimization": tunes(False, "saved activations lie as they were made"),
        "synchronize_checkpoint_boundary": tunes(False, "checkpoints wait for nothing"),
        "number_checkpoints": tunes(None, "the model says how many there are"),
        "profile": tunes(False, f"{_CALLS}; {_TRACE}")},
    "aio": {
        "block_size": tunes(1048576, "files are read and written in pieces of a chosen size"),
        "queue_depth": tunes(8, "reads and writes are queued as far as buffers allow"),
        "intra_op_parallelism": tunes(1, "threads are chosen"),
        "thread_count": tunes(1, "threads are chosen; DeepSpeed does not read it either"),
        "single_submit": tunes(False, "reads and writes are submitted by threads"),
        "overlap_events": tunes(True, "reads and writes always overlap"),
        "use_gds": tunes(False, "files are read through host memory")},
    "checkpoint": {
        "tag_validation": tunes("WARN", "the ranks always agree on what they save",
            one_of("WARN", "FAIL", "IGNORE", also=("Warn", "Fail", "Ignore"))),
        "load_universal": tunes(False, "every checkpoint loads on any number of ranks"),
        "use_node_local_storage": refuses(False, "a checkpoint is one directory that all ranks see",
                                          "save to a shared directory"),
        "parallel_write": {"pipeline_stage": tunes(False, "each rank writes its own pieces")},
        "checkpoint_serialization": tunes(True, "checkpoints are safetensors and JSON"),
        "writer": tunes(None, "zs.Saver writes in the background")},
    "datastates_ckpt": tunes(None, "zs.Saver writes in the background"),
    "load_universal_checkpoint": tunes(False, "every checkpoint loads on any number of ranks"),
    "log_level": watches(
        None, one_of(*_LEVELS, also=tuple(map(str.upper, _LEVELS))),
        "set that of logging.getLogger('zeroshard')",
        "DeepSpeed's logger has it; otherwise it shows lines from info on"),
    "disable_python_gc": watches(False, flag, "call gc.disable() in the script",
        "the garbage collector is off until engine.destroy(); engine.collect_python_gc() runs it"),
    "steps_per_print": tunes(
        None, "DeepSpeed's initialize() logs steps; shard() prints nothing", every),
    "wall_clock_breakdown": watches(False, flag, _TRACE,
        "the times of forward, backward and step are logged"),
    "memory_breakdown": watches(False, flag, "print engine.memory() or zs.memory_table()",
        "the bytes of each state are logged"),
    "dump_state": watches(False, flag, "zeroshard config explain FILE shows it",
        "the configuration is logged"),
    "flops_profiler": watches(None, an_object, "use torch.utils.flop_counter.FlopCounterMode",
        "the floating point operations of the forward of profile_step are logged"),
    "comms_logger": watches(None, an_object, "print engine.traffic()",
        "the bytes of each collective are logged"),
    "timers": watches(None, an_object, "engine.tput_timer counts samples per second"),
    "tensorboard": watches(None, an_object, _METRICS,
        "loss, rate and scale are written where the package tensorboard is installed"),
    "csv_monitor": watches(None, an_object, _METRICS,
        "loss, rate and scale are written to OUTPUT_PATH/JOB_NAME/*.csv"),
    "wandb": watches(None, an_object, _METRICS,
        "loss, rate and scale are logged where the package wandb is installed"),
    "comet": watches(None, an_object, _METRICS),
    "compile": section("nothing is compiled by itself", "use torch.compile(model)", "deepcompile"),
    "tensor_parallel": section(
        "layers are not cut over ranks",
        "use torch's parallelize_module, and give shard() the mesh with its 'tp'", "autotp_size"),
    "expert_parallel": section("experts are not cut over ranks", switch=""),
    "use_data_before_expert_parallelism": tunes(False, "experts are not cut over ranks", flag),
    "pipeline": section(
        "layers are not cut into stages",
        "use torch.distributed.pipelining, and give shard() the mesh with its 'pp'", ""),
    "hybrid_engine": section("there is no engine for inference",
                             "generate inside engine.gathered()"),
    "elasticity": section("batch sizes do not follow the number of ranks",
                          "use zeroshard run --elastic, and resume on any number of ranks"),
    "autotuning": section("nothing is tuned by trial", "use zeroshard plan, or policy='auto'"),
    "curriculum_learning, data_efficiency": section("data are the DataLoader's",
                                                    "choose samples there"),
    "compression_training": section(_AS_IS, "use torch.ao for quantized or pruned models"),
    "progressive_layer_drop": section(_AS_IS, "drop layers in the model"),
    "eigenvalue": section(_AS_IS),
    "quantize_training": section(_AS_IS, "use torch.ao for quantized models"),
    "weight_quantization": section(
        "weights are encoded for inference alone", "use comm.frozen_codec", ""),
    "vocabulary_size": tunes(None, "DeepSpeed warns where 8 does not divide it"),
    "sparse_attention": section(_AS_IS, "use attention of your model's", ""),
    "nebula": section("checkpoints are files", "use zs.Saver"),
}  # fmt: skip

# a last part "*" stands for every key of a section
KEYS: dict[str, Key] = {
    f"{section}{dot}{key}": row
    for names, row in flattened(_TABLE, lambda name, value: True)
    for section, dot, last in [names.rpartition(".")]
    for key in last.split(", ")
}
SECTIONS = frozenset(name[:at] for name in KEYS for at, mark in enumerate(name) if mark == ".")


def key_of(name: str) -> Key | None:
    """Return the row of a key: its own, or the row of all keys of its section."""
    return KEYS.get(name) or KEYS.get(f"{name.rpartition('.')[0]}.*")


# ----------------------------------------------------------------------------- the page of the keys
# The page is docs/deepspeed-keys.md.


def deepspeed_markdown() -> str:
    """Return the table of DeepSpeed's keys in Markdown."""
    rows = []
    for name, key in KEYS.items():
        default = f"`{json.dumps(key.default)}`" if key.default is not None else ""
        if type(key.default) is float:
            default = f"`{key.default:g}`".replace("e+0", "e")
        if key.lower is not None:
            effect = f"becomes ours: {key.why}"
        elif key.done:
            effect = "watches: " if key.only_watches else ""
            effect += f"with initialize() {key.done}; elsewhere: {key.why}"
        elif not key.instead:
            effect = f"no difference: {key.why}"
        else:
            where = "where it is on" if key.kind is an_object else "otherwise"
            effect = f"refused {where}: {key.why} ({key.instead})"
        rows.append(f"| `{name}` | {default} | {effect} |")
    return "\n".join([_HEAD, "| key | its default | here |", "|---|---|---|", *rows]) + "\n"


_HEAD = """# DeepSpeed's keys

What each key of a DeepSpeed configuration does here: it *becomes* an option of ours, it makes *no
difference*, it *watches*, or it is *refused* where it asks for something else than happens here
anyway. Defaults come from DeepSpeed's code. `zeroshard config explain FILE` says the same of one
file. Keys of stage 3 may leave out their `stage3_`. A key at the top that is not in this table is a
warning, with the nearest one, since DeepSpeed drops it; inside of a section it is refused. A file
may be HJSON: comments, keys without quotes, commas where they are not needed.

Made by `python -m zeroshard.config.reference deepspeed`.
"""
