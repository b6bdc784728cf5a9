"""``get_accelerator()``: the device that a rank computes on, under DeepSpeed's names.

Where torch's module of the device (``torch.xpu``, say) has a name, it is that. Names
that the module lacks come from a table, which on CPU says what DeepSpeed's CPU accelerator does:
streams and graphs are nothing, memory is the process's.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.deepspeed.engine_names import remedy

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
    "memory_allocated": lambda device_index=None: _resident(),
    "memory_reserved": lambda device_index=None: _resident(),
    "memory_cached": lambda device_index=None: _resident(),
    "max_memory_allocated": lambda device_index=None: _peak(),
    "max_memory_reserved": lambda device_index=None: _peak(),
    "max_memory_cached": lambda device_index=None: _peak(),
    "memory_stats": lambda device_index=None: {
        "allocated_bytes.all.current": _resident(), "allocated_bytes.all.peak": _peak(),
    },
    "total_memory": lambda device_index=None: os.sysconf("SC_PHYS_PAGES") * _PAGE,
    "available_memory": lambda device_index=None: os.sysconf("SC_AVPHYS_PAGES") * _PAGE,
    "device_count": lambda: int(
        os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or 1
    ),
    "current_device": lambda: "cpu",  # a number would be an accelerator's
    "set_device": _nothing,
    "device": lambda device_index=None: nullcontext(),
    "current_stream": _nothing,
    "default_stream": _nothing,
    "stream": lambda stream=None: nullcontext(),
    "Stream": _nothing,
    "Event": _nothing,
    "set_rng_state": lambda new_state, device_index=None: torch.set_rng_state(new_state),
    "get_rng_state": lambda device_index=None: torch.get_rng_state(),
    "default_generator": lambda device_index=None: torch.default_generator,
    "create_graph": _nothing,
    "capture_to_graph": lambda graph, pool=None, stream=None: nullcontext(),
    "replay_graph": _nothing,
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

    def is_available(self) -> bool:
        """Whether it is there."""
        return bool(self._module.is_available())

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
