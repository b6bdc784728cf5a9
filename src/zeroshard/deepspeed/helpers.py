"""Small parts of DeepSpeed that programs import from its inner modules: loaders, the logger,
activation checkpointing, the accelerator, memory and seeds, attributes by dotted name, experts.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import nullcontext
from enum import Enum
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import zeroshard as zs
from zeroshard.deepspeed import comm
from zeroshard.deepspeed.shim import remedy

# ------------------------------------------------------------------------------------------ loaders
# The data loader of ``initialize(training_data=)`` and of ``engine.deepspeed_io()``.


_RENAMED = {"data_sampler": "sampler", "num_local_io_workers": "num_workers"}
_DROPPED = ("route", "data_parallel_world_size", "data_parallel_rank")  # of pipelines and meshes


def make_loader(
    data: Any, engine: Any, *, batch_size: int | None = None, **options: Any
) -> DataLoader[Any]:
    """Return a loader of this rank's part of `data`. `options` are torch's, or DeepSpeed's names of
    them. Raises ConfigError for what has no samples by number, in a run with leaves.
    """
    given = {
        _RENAMED.get(name, name): value
        for name, value in options.items()
        if value is not None and name not in _DROPPED
    }
    batch = engine.batch
    if batch.leaves is not None:
        if isinstance(data, IterableDataset):
            raise zs.ConfigError(
                f"leaves={batch.leaves} takes the samples of a leaf by its number, and"
                " training_data has none: give a dataset with __len__() and __getitem__()"
            )
        leaves = LoaderSampler(data, batch.leaves, batch.micro, engine)
        return DataLoader(data, batch_sampler=leaves, **given)
    if not isinstance(data, IterableDataset) and "sampler" not in given:
        given["sampler"] = DistributedSampler(data, engine.dp_world_size, engine.global_rank)
    given.setdefault("drop_last", engine.config.get("dataloader_drop_last") is True)
    return DataLoader(
        data, batch_size=batch_size or engine.train_micro_batch_size_per_gpu(), **given
    )


class LoaderSampler(zs.LeafSampler):
    """The samples of this rank's leaves, from the step on that the engine is at."""

    def __init__(self, data: Sized, leaves: int, size: int, engine: Any) -> None:
        """`engine` is the one that ``initialize()`` returns."""
        super().__init__(data, leaves, size, engine=engine.engine)
        self._progress = engine.progress

    def __iter__(self) -> Iterator[list[int]]:
        self.set_step(self._progress.global_steps)
        yield from super().__iter__()


# ------------------------------------------------- the logger, copies, and activation checkpointing


def _make_logger() -> logging.Logger:
    """Return DeepSpeed's logger, which shows lines from INFO on, on stdout."""
    made = logging.getLogger("DeepSpeed")
    if not made.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] %(message)s"))
        made.addHandler(handler)
        made.setLevel(logging.INFO)
        made.propagate = False
    return made


logger = _make_logger()


def log_dist(message: str, ranks: Iterable[int] | None = None, level: int = logging.INFO) -> None:
    """Log `message` on these ranks (None, or -1 among them: on all)."""
    wanted = list(ranks or ())
    if not wanted or -1 in wanted or comm.get_rank() in wanted:
        logger.log(level, "[Rank %d] %s", comm.get_rank(), message)


class RepeatingLoader:
    """Yields from a loader without end."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self._left: Iterator[Any] = iter(loader)

    def __iter__(self) -> RepeatingLoader:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._left)
        except StopIteration:
            self._left = iter(self.loader)
            return next(self._left)


def clone_tensors_for_torch_save(item: Any, device: Any = "cpu") -> Any:
    """Return copies on `device` of the tensors in nested dictionaries, lists and tuples; what is
    one tensor under two names (tied weights) stays one.
    """
    copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def copied(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            place = (one.data_ptr(), one.dtype, one.shape, one.stride())
            if not one.numel() or place not in copies:
                copies[place] = one.detach().to(device, copy=True)
            return copies[place]
        if isinstance(one, dict):
            return type(one)({key: copied(value) for key, value in one.items()})
        if isinstance(one, (list, tuple)):
            return type(one)(copied(value) for value in one)
        return one

    return copied(item)


class _Checkpointing:
    tier: str | None = None  # None: configure() was not called


_NOTHING = "checkpointing.configure(%s=...) changes nothing here: only model parallel ranks have it"


def configure(mpu_: Any = None, deepspeed_config: Any = None, **options: Any) -> None:
    """Say where `checkpoint` keeps inputs: `checkpoint_in_cpu`, or the configuration's
    ``activation_checkpointing.cpu_checkpointing``, takes them to the host.
    """
    data = {} if deepspeed_config is None else zs.read_deepspeed(deepspeed_config).data
    section = data.get("activation_checkpointing") or {}
    on_host = options.pop("checkpoint_in_cpu", None)
    on_host = section.get("cpu_checkpointing") if on_host is None else on_host
    for name, value in options.items():
        if value:
            logger.info(_NOTHING, name)
    _Checkpointing.tier = "host" if on_host else "device"


def is_configured() -> bool:
    """Whether `configure` was called."""
    return _Checkpointing.tier is not None


def checkpoint(function: Any, *args: Any) -> Any:
    """Return ``function(*args)``, computed again in backward."""
    return zs.nn.checkpoint(function, *args, tier=_Checkpointing.tier or "device")


# -------------------------------------------------------------------------------------- accelerator
# ``get_accelerator()``: the device that a rank computes on, under DeepSpeed's names.
#
# Where torch's module of the device (``torch.xpu``, say) has a name, it is that. Names
# that the module lacks come from a table, which on CPU says what DeepSpeed's CPU accelerator does:
# streams and graphs are nothing, memory is the process's.


_PAGE = os.sysconf("SC_PAGE_SIZE")
_DTYPES = {
    "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "DoubleTensor": torch.float64,
    "FloatTensor": torch.float32, "HalfTensor": torch.float16, "IntTensor": torch.int32,
    "LongTensor": torch.int64,
}  # fmt: skip
_KERNELS = "torch's own operators: no kernel is compiled here"
_LAUNCHER = "the launcher, which says which devices a rank sees"
_REFUSED = {
    **dict.fromkeys(("visible_devices_envs", "set_visible_devices_envs"), _LAUNCHER),
    **dict.fromkeys(("create_op_builder", "get_op_builder", "build_extension"), _KERNELS),
}


def _resident() -> int:
    """Return the bytes of this process in memory."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return 0


def _peak() -> int:
    # the kernel counts the two apart, and the peak may lag behind
    return max(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, _resident())


def _nothing(*_: Any, **__: Any) -> None:
    return None


# on CPU, before what torch.cpu has: a call of the name returns this
_ON_CPU: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("memory_allocated", "memory_reserved", "memory_cached"),
        lambda device_index=None: _resident()),
    **dict.fromkeys(
        ("max_memory_allocated", "max_memory_reserved", "max_memory_cached"),
        lambda device_index=None: _peak()),
    **dict.fromkeys(
        ("set_device", "current_stream", "default_stream", "Stream", "Event", "create_graph",
         "replay_graph"),
        _nothing),
    "memory_stats": lambda device_index=None: {
        "allocated_bytes.all.current": _resident(), "allocated_bytes.all.peak": _peak(),
    },
    "total_memory": lambda device_index=None: os.sysconf("SC_PHYS_PAGES") * _PAGE,
    "available_memory": lambda device_index=None: os.sysconf("SC_AVPHYS_PAGES") * _PAGE,
    "device_count": lambda: int(
        os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1
    ),
    "current_device": lambda: "cpu",  # a number would be an accelerator's
    "device": lambda device_index=None: nullcontext(),
    "stream": lambda stream=None: nullcontext(),
    "set_rng_state": lambda new_state, device_index=None: torch.set_rng_state(new_state),
    "get_rng_state": lambda device_index=None: torch.get_rng_state(),
    "default_generator": lambda device_index=None: torch.default_generator,
    "capture_to_graph": lambda graph, pool=None, stream=None: nullcontext(),
    "is_triton_supported": lambda: False,
    "pin_memory": lambda tensor, make_copy=True, match_shape=True: tensor,
    "is_pinned": lambda tensor: False,
}  # fmt: skip
# on every device, where its module has no such name
_ANYWHERE: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("empty_cache", "reset_peak_memory_stats", "reset_max_memory_allocated",
         "reset_max_memory_cached", "synchronize", "range_push", "range_pop"),
        _nothing),
    "manual_seed": torch.manual_seed,
    "manual_seed_all": torch.manual_seed,
    "initial_seed": torch.initial_seed,
    "lazy_call": lambda callback: callback(),
    "supported_dtypes": lambda: [torch.float32, torch.float16, torch.bfloat16],
    "is_triton_supported": lambda: torch.utils._triton.has_triton(),
    "prefer_triton_grouped_mm": lambda: False,
    "is_pinned": lambda tensor: tensor.is_pinned(),
    "pin_memory": lambda tensor, make_copy=True, match_shape=True: tensor.pin_memory(),
    "unpin_memory": lambda tensor: tensor,
    "communication_backend_version": lambda: (0, 0, 0),
    "memory_cached": lambda device_index=None: torch.accelerator.memory_reserved(device_index),
    "max_memory_cached": lambda device_index=None: torch.accelerator.max_memory_reserved(
        device_index),
    "available_memory": lambda device_index=None: torch.accelerator.get_memory_info(
        device_index)[0],
    "total_memory": lambda device_index=None: torch.accelerator.get_memory_info(device_index)[1],
    "op_builder_dir": lambda: "deepspeed.ops.op_builder",
    "export_envs": list,
}  # fmt: skip


class Singleton:
    """The device that a rank computes on: torch's module for it, and DeepSpeed's names."""

    def __init__(self) -> None:
        found = torch.accelerator.current_accelerator(check_available=True)
        self._name = "cpu" if found is None else found.type
        self._module = torch.get_device_module(self._name)
        self._compile_backend = "inductor"
        self.random = torch.random
        self.amp = getattr(self._module, "amp", torch.amp)
        for name, dtype in _DTYPES.items():
            setattr(self, name, self._maker(dtype))

    def _maker(self, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        def make(*sizes: Any) -> torch.Tensor:
            values = not (sizes and all(isinstance(one, int) for one in sizes))
            if values:
                data = sizes[0] if sizes else []
                return torch.as_tensor(data, dtype=dtype, device=self._name)
            return torch.empty(sizes, dtype=dtype, device=self._name)

        return make

    def device_name(self, device_index: int | None = None) -> str:
        """Return its type, with an index ("xpu:1") or without, or "cpu"."""
        if device_index is None or self._name == "cpu":
            return self._name
        return f"{self._name}:{device_index}"

    def current_device_name(self) -> str:
        """Return the name of this rank's device."""
        is_cpu = self._name == "cpu"
        return self.device_name(None if is_cpu else torch.accelerator.current_device_index())

    def communication_backend_name(self) -> str:
        """Return its tensors' backend."""
        return dist.get_default_backend_for_device(self._name)

    def is_bf16_supported(self) -> bool:
        """Whether bf16 computes."""
        return bool(getattr(self._module, "is_bf16_supported", lambda: True)())

    def is_fp16_supported(self) -> bool:
        """Whether fp16 computes."""
        return True

    def is_synchronized_device(self) -> bool:
        """Whether its calls return when they are done."""
        return self._name == "cpu"

    use_host_timers = resolves_data_dependency = is_synchronized_device
    handles_memory_backpressure = is_synchronized_device

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies on it."""
        return tensor.device.type == self._name

    def get_compile_backend(self) -> str:
        """Return the backend that was set, or torch.compile's own."""
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        """Set what `get_compile_backend` returns."""
        self._compile_backend = backend

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_module" not in self.__dict__:
            raise AttributeError(name)
        if self._name == "cpu" and name in _ON_CPU:
            return _ON_CPU[name]
        if hasattr(self._module, name):
            return getattr(self._module, name)
        if name in _ANYWHERE:
            return _ANYWHERE[name]
        otherwise = f"torch.{self._name}'s own names are there, and DeepSpeed's accelerator's"
        raise AttributeError(remedy("the accelerator", name, _REFUSED, otherwise))


@cache
def get_accelerator() -> Singleton:
    """Return the accelerator."""
    return Singleton()


# ------------------------------------------------------------------------------------------ helpers

OffloadDeviceEnum = Enum(  # type: ignore[misc]
    "OffloadDeviceEnum", {name: name for name in ("none", "cpu", "nvme")}, type=str
)
OffloadStateTypeEnum = Enum(  # type: ignore[misc]
    "OffloadStateTypeEnum",
    {name: name for name in
     ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")},
    type=str,
)  # fmt: skip
ZeroStageEnum = Enum(
    "ZeroStageEnum",
    {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3, "max_stage": 3},
    type=int,
)
torch_info = {  # of torch, as deepspeed.git_version_info tells it
    "version": ".".join(torch.__version__.split(".")[:2]),
    "cuda_version": torch.version.cuda or "0.0",
    "hip_version": torch.version.hip or "0.0",
    "nccl_version": "0.0",
    "bf16_support": True,
}
default_git = "zeroshard"  # in the place of a branch and a commit


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print `message` and the memory in use, on rank 0; nothing without `force`, as there."""
    if not force or comm.get_rank() != 0:
        return
    device = get_accelerator()
    numbers = {
        "allocated": device.memory_allocated(),
        "most allocated": device.max_memory_allocated(),
        "reserved": device.memory_reserved(),
        "most reserved": device.max_memory_reserved(),
    }
    print(message)
    print(", ".join(f"{name} {count / 2**30:.2f} GiB" for name, count in numbers.items()))
    print(zs.memory_table())
    device.reset_peak_memory_stats()


def set_random_seed(seed: int) -> None:
    """Seed the generators of random, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed % 2**63)


def move_to_device(
    item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None
) -> Any:
    """Return `item` with its tensors, in nested containers, on `device`: those that
    `criterion_func` is true of.
    """

    def moved(one: Any) -> Any:
        takes = criterion_func is None or criterion_func(one)
        return one.to(device) if isinstance(one, torch.Tensor) and takes else one

    return tree_map(moved, item)


def ensure_directory_exists(filename: str) -> None:
    """Make the directory that a file is to lie in."""
    os.makedirs(os.path.dirname(filename), exist_ok=True)


def instrument_w_nvtx(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return `func`; a profiler sees its calls under its name."""

    @functools.wraps(func)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(func.__qualname__):
            return func(*args, **kwargs)

    return wrapped


def required_torch_version(
    min_version: float | None = None, max_version: float | None = None
) -> bool:
    """Whether torch's version lies between these two: of DeepSpeed's form 2.1, or text."""
    here = torch.torch_version.TorchVersion(torch.__version__.partition("+")[0])
    low = min_version is None or here >= str(min_version)
    return bool(low and (max_version is None or here <= str(max_version)))


def is_compile_supported() -> bool:
    """Whether torch.compile is there: it is."""
    return True


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Return the attribute with a dotted name."""
    return functools.reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Set the attribute with a dotted name."""
    parent, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, parent) if parent else model, last, module)


# ------------------------------------------------------------------ experts


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return (False, 0): DeepSpeed's MoE layer is not here, and experts are the model's own."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether the parameter is an expert's: its attribute ``allreduce`` is False."""
    return getattr(param, "allreduce", True) is False


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters that are no expert's, and those that are."""
    held = list(params)
    return [one for one in held if not is_moe_param(one)], list(filter(is_moe_param, held))


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a param group is one of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]],
    max_group_size: float = 178956971,
) -> list[dict[str, Any]]:
    """Return the groups as a list, with parameters of experts in groups of their own, by their
    ``group_name``. `max_group_size` says nothing here: states are cut per unit.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    out: list[dict[str, Any]] = []
    for group in groups:
        group["params"], experts = split_params_into_shared_and_expert_params(group["params"])
        by_name: dict[Any, list[nn.Parameter]] = {}
        for one in experts:
            by_name.setdefault(getattr(one, "group_name", "experts"), []).append(one)
        out += [{**group, "name": name, "moe": True, "params": held} for name, held in
                by_name.items()]  # fmt: skip
    return [*groups, *out]


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Return param groups of parameters, or of groups, with experts apart."""
    groups = model_parameters
    if model_parameters and not isinstance(model_parameters[0], dict):
        groups = [{"params": list(model_parameters), "name": "dense_params"}]
    return split_params_into_different_moe_groups_for_optimizer(groups)
