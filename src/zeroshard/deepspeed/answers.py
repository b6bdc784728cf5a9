"""The engine's answers about its configuration and its training: DeepSpeed's three batch sizes, the
counts of a training, and a table with a line for each getter and attribute: a new one is a line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeroshard import Config, ConfigError
from zeroshard.deepspeed.comm import data_parallel_group, get_local_rank
from zeroshard.deepspeed.keys.table import key_of
from zeroshard.deepspeed.shim import ENGINE_FIXED, OF_KEYS


@dataclass
class Batch:
    """train = micro * steps * ranks; with leaves micro * leaves, and steps are this rank's."""

    train: int
    micro: int
    steps: int  # of gradient accumulation
    ranks: int
    leaves: int | None = None

    def set_train(self, train_batch_size: int) -> None:
        """Set the whole batch, and with it the accumulation. Raises ConfigError."""
        if self.leaves is not None:
            raise ConfigError(
                f"train_batch_size={train_batch_size} would be another number of leaves than"
                f" {self.leaves}: initialize() another engine"
            )
        steps, rest = divmod(train_batch_size, self.micro * self.ranks)
        if rest:
            raise ConfigError(
                f"train_batch_size={train_batch_size} is no multiple of {self.micro} per rank x"
                f" {self.ranks} ranks"
            )
        self.train, self.steps = train_batch_size, steps

    def set_micro(self, micro_batch_size: int) -> None:
        """Set the batch of one rank and backward, and with it the whole."""
        self.train, self.micro = self.train // self.micro * micro_batch_size, micro_batch_size


@dataclass(frozen=True)
class Client:
    """The caller's objects at ``initialize()``, and the parameters that its optimizer lacks."""

    optimizer: Any = None
    lr_scheduler: Any = None
    left_out: tuple[nn.Parameter, ...] = ()  # frozen while the engine is open


@dataclass
class Progress:
    """The counts of a training."""

    micro_steps: int = 0  # calls of step()
    global_steps: int = 0
    global_samples: int = 0
    skipped_steps: int = 0
    backwards: int = 0  # calls of backward() since the last step
    applied: bool = False  # whether the last step() moved the weights
    norm: torch.Tensor | None = None  # of the gradient of the last step taken, before clipping

    def counts(self) -> dict[str, int]:
        """Return what a checkpoint keeps."""
        names = ("micro_steps", "global_steps", "global_samples", "skipped_steps")
        return {name: getattr(self, name) for name in names}


def complete_batch(settings: Config, ranks: int, rank: int = 0) -> Batch:
    """Return the batch sizes that `settings` give `rank` of `ranks`. Raises ConfigError.

    One of the two sizes is enough, with or without the accumulation, as in DeepSpeed.
    """
    sizes = settings.train_batch_size, settings.train_micro_batch_size_per_gpu
    if sizes == (None, None):
        raise ConfigError(
            "the configuration names neither train_batch_size nor train_micro_batch_size_per_gpu:"
            " give one of them"
        )
    counts = settings.leaves_of(ranks)
    if counts is None and None in sizes and settings.gradient_accumulation_steps is None:
        settings = settings.model_copy(update={"gradient_accumulation_steps": 1})
    train, micro, steps = settings.batch_sizes(ranks)
    assert train is not None and micro is not None and steps is not None
    if counts is not None:
        return Batch(train, micro, counts[rank], ranks, sum(counts))
    return Batch(train, micro, steps, ranks)


@contextmanager
def as_config_error(what: str) -> Iterator[None]:
    """Raise what torch says of values that it does not take as a ConfigError."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        reason = str(error).partition("__init__() ")[2] or str(error) or type(error).__name__
        raise ConfigError(f"{what}: {reason}") from None


def torch_class(home: Any, base: type, key: str, name: str, ours: Iterable[str]) -> Any:
    """Return the class below `base` that torch's module `home` calls `name`. Raises ConfigError."""
    found = getattr(home, name, None)
    if not (inspect.isclass(found) and issubclass(found, base) and found is not base):
        known = ", ".join(ours)
        raise ConfigError(f"{key} is neither {known} nor a class of {home.__name__}")
    return found


Source = str | Callable[[Any], Any]  # the dotted name of an attribute, or a function of the object


def _reader(source: Source) -> Callable[[Any], Any]:
    return attrgetter(source) if isinstance(source, str) else source


def attribute(source: Source, doc: str) -> Any:
    """Return a property that reads `source`."""
    return property(_reader(source), doc=doc)


def call(source: Source, doc: str) -> Any:
    """Return a method without arguments that reads `source`."""
    read = _reader(source)

    def method(self: Any) -> Any:
        return read(self)

    method.__doc__ = doc
    return method


def _zero(engine: Any) -> dict[str, Any]:
    section = engine.config.get("zero_optimization")
    return section if isinstance(section, dict) else {"stage": int(bool(section))}


def _stage(engine: Any) -> int:
    stage = _zero(engine).get("stage")
    return 3 if stage == "auto" else int(stage or 0)  # our default, where nobody filled it in


def _computes_in(dtype: torch.dtype) -> Source:
    return lambda engine: engine.engine.precision.compute is dtype


def _of_groups(*names: str) -> Source:
    """Read the first of these options that each param group has; None where it has none."""

    def read(engine: Any) -> list[Any]:
        groups = engine.optimizer.param_groups
        return [next((group[one] for one in names if one in group), None) for group in groups]

    return read


def _value(key: str) -> Callable[[Any], Any]:
    """Read a key of the configuration, DeepSpeed's default where it is left out or "auto"."""
    *sections, last = key.split(".")
    row = key_of(key)
    default = None if row is None else row.default

    def read(engine: Any) -> Any:
        within: Any = engine.config
        for section in sections:
            within = within.get(section) if isinstance(within, dict) else None
        found = within.get(last) if isinstance(within, dict) else None
        return default if found is None or found == "auto" else found

    return read


def _section_part(section: str, part: str) -> Callable[[Any], Any]:
    """Read ``type`` or ``params`` of a section; None where there is none."""

    def read(engine: Any) -> Any:
        held = engine.config.get(section)
        found = held.get(part) if isinstance(held, dict) else None
        return found.lower() if part == "type" and section == "optimizer" and found else found

    return read


def _is_on_tier(*devices: str) -> Callable[[Any], bool]:
    def read(engine: Any) -> bool:
        section = _zero(engine).get("offload_optimizer") or {}
        return section.get("device", "none") in devices

    return read


def _dynamic_scale(engine: Any) -> bool:
    return engine.engine.precision.needs_loss_scaling and not _value("fp16.loss_scale")(engine)


def _scale_arguments(engine: Any) -> dict[str, Any] | None:
    if not _dynamic_scale(engine):
        return None
    names = {
        "scale_window": "loss_scale_window",
        "min_scale": "min_loss_scale",
        "delayed_shift": "hysteresis",
        "consecutive_hysteresis": "consecutive_hysteresis",
    }
    rest = {name: _value(f"fp16.{key}")(engine) for name, key in names.items()}
    return {"init_scale": 2 ** _value("fp16.initial_scale_power")(engine), **rest}


_WORLD = "The group of all ranks, which are data parallel."
_ANSWERS: dict[str, Any] = {
    "train_batch_size": call("batch.train", "Return the samples of a step, over all ranks."),
    "train_micro_batch_size_per_gpu": call(
        "batch.micro", "Return the samples of a rank's forward."),
    "gradient_accumulation_steps": call("batch.steps", "Return the forwards of a step."),
    "get_batch_info": call(
        lambda engine: (engine.batch.train, engine.batch.micro, engine.batch.steps),
        "Return the three batch sizes."),
    "managed_gradient_accumulation": call(
        lambda engine: engine.config.get("managed_gradient_accumulation") is not False,
        "Whether ``step()`` counts micro-batches."),
    "set_train_batch_size": attribute("batch.set_train", "Change the accumulation steps."),
    "set_train_micro_batch_size": attribute("batch.set_micro", "Change the samples of a forward."),
    "gradient_clipping": call("clipping", "Return the norm that a step clips to, 0 for none."),
    "zero_optimization_stage": call(_stage, "Return the stage; hpZ and MiCS are stage 3."),
    "zero_optimization": call(lambda engine: _stage(engine) > 0, "Whether any state is sharded."),
    "zero_optimization_partition_gradients": call(
        lambda engine: _stage(engine) >= 2, "Whether gradients are sharded."),
    "zero_optimization_partition_weights": call(
        lambda engine: _stage(engine) >= 3, "Whether weights are sharded."),
    "zero_gather_16bit_weights_on_model_save": call(
        lambda engine: bool(_zero(engine).get("stage3_gather_16bit_weights_on_model_save")),
        "Whether stage 3 gives whole weights to who saves the model."),
    "zero_cpu_offload": call(_is_on_tier("cpu"), "Whether the optimizer's state is on the host."),
    "zero_nvme_offload_optimizer": call(_is_on_tier("nvme"), "Whether it is on disk."),
    "zero_use_cpu_optimizer": call(_is_on_tier("cpu", "nvme"), "Whether it leaves the device."),
    "zero_partial_offload": call(
        _value("zero_optimization.offload_optimizer.ratio"), "Return the share that leaves it."),
    "fp16_enabled": call(_computes_in(torch.float16), "Whether it computes in fp16."),
    "bfloat16_enabled": call(_computes_in(torch.bfloat16), "Whether it computes in bf16."),
    "dynamic_loss_scale": call(_dynamic_scale, "Whether fp16's scale moves."),
    "initial_dynamic_scale": call(
        lambda engine: 2 ** _value("fp16.initial_scale_power")(engine), "Return its first value."),
    "dynamic_loss_scale_args": call(_scale_arguments, "Return how it moves, or None."),
    "get_data_types": call(
        lambda engine: (engine.engine.precision.compute, engine.engine.precision.accumulate),
        "Return the dtypes of weights and of gradients at rest."),
    "communication_data_type": attribute("engine.precision.reduce", "Of gradients on the wire."),
    "get_global_grad_norm": call(
        "progress.norm", "Return the norm of the last step that was taken, before clipping."),
    "was_step_applied": call("progress.applied", "Whether the last ``step()`` moved the weights."),
    "get_lr": call(_of_groups("lr"), "Return the learning rate of every param group."),
    "get_type": call(
        lambda engine: [type(engine.basic_optimizer).__name__ for _ in
                        engine.optimizer.param_groups], "Return the class of every param group."),
    "get_mom": call(_of_groups("betas", "momentum"), "Return the momentum of every param group."),
    "optimizer_name": call(
        lambda engine: type(engine.client_optimizer).__name__ if engine.client_optimizer
        else _section_part("optimizer", "type")(engine), "Return what the optimizer is called."),
    "optimizer_params": call(_section_part("optimizer", "params"), "Return its parameters."),
    "scheduler_name": call(_section_part("scheduler", "type"), "Return the configured schedule."),
    "scheduler_params": call(_section_part("scheduler", "params"), "Return its parameters."),
    "aio_config": call(lambda engine: engine.config.get("aio") or {}, "Return the section aio."),
    "loss_scale": attribute("engine.loss_scale", "The fp16 loss scale, 1.0 in other precisions."),
    "global_steps": attribute("progress.global_steps", "The steps so far, skipped ones too."),
    "global_samples": attribute("progress.global_samples", "The samples so far."),
    "micro_steps": attribute("progress.micro_steps", "The calls of ``step()`` so far."),
    "skipped_steps": attribute("progress.skipped_steps", "The steps that moved nothing."),
    "global_rank": attribute("engine.rank", "This rank."),
    "get_data_parallel_rank": call("engine.rank", "Return this rank."),
    "local_rank": attribute(lambda engine: get_local_rank(), "This rank on its host."),
    "world_size": attribute("engine.world", "The number of ranks."),
    "dp_world_size": attribute("engine.world", "The number of ranks."),
    "seq_dp_world_size": attribute("engine.world", "The number of ranks."),
    "mp_world_size": attribute(lambda engine: 1, "No layer is cut over ranks here."),
    "sequence_parallel_size": attribute(lambda engine: 1, "No sequence is cut over ranks here."),
    "data_parallel_group": attribute(lambda engine: data_parallel_group(), _WORLD),
    "seq_data_parallel_group": attribute(lambda engine: data_parallel_group(), _WORLD),
    "dp_process_group": attribute(lambda engine: data_parallel_group(), _WORLD),
    "basic_optimizer": attribute("optimizer.optimizer", "torch's own optimizer."),
    "client_optimizer": attribute("_client.optimizer", "The optimizer that the caller gave."),
    "client_lr_scheduler": attribute("_client.lr_scheduler", "The schedule that the caller gave."),
    "monitor": attribute("_watch.monitor", "Writes numbers where the configuration says."),
    "tput_timer": attribute("_watch.tput_timer", "Counts samples per second."),
    "has_moe_layers": attribute(lambda engine: False, "Experts are the model's own here."),
    "sparse_tensor_module_names": attribute(lambda engine: set(), "Gradients are dense here."),
    "pipeline_parallelism": attribute(lambda engine: False, "No pipeline runs here."),
    "zenflow": attribute(lambda engine: False, "ZenFlow's updates are not there."),
    "enable_backward_allreduce": attribute(lambda engine: True, "Backwards always reduce."),
    "gas_boundary_ctr": attribute("progress.global_steps", "The steps so far."),
    "inside_no_sync_ctxt": attribute("_collecting", "Whether it is inside ``no_sync()``."),
    "param_names": attribute(
        lambda engine: {p: name for name, p in engine.module.named_parameters()},
        "The names of the parameters."),
    "device": attribute(
        lambda engine: next(engine.module.parameters()).device, "Where it computes."),
}  # fmt: skip


class Answers:
    """The getters, setters and attributes of an engine: a line of a table each."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def _fixed(value: Any) -> Callable[[Any], Any]:
    return lambda engine: value


for _name, _one in _ANSWERS.items():
    setattr(Answers, _name, _one)
for _name, _key in OF_KEYS.items():
    setattr(Answers, _name, call(_value(_key), f"Return {_key} of the configuration."))
for _name, _one in ENGINE_FIXED.items():
    setattr(Answers, _name, call(_fixed(_one), f"Return {_one!r}: there is no other here."))
