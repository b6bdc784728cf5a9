"""The device that a rank computes on: the only file that names a type of device.

Everything else goes by the functions that torch expects of the module of a type: ``torch.cuda``
(ROCm's, too), ``torch.xpu``, ``torch.npu``, or one that was registered. The seats that are taken:

    is_available device_count current_device set_device    which device is a rank's own
    Stream Event current_stream stream synchronize         lanes; without streams there is one lane
    get_rng_state set_rng_state                            dropout, after a resume and in a replay
    mem_get_info memory_allocated memory_reserved          what is free, and what is in use
    empty_cache get_device_properties                      (name, total_memory, uuid)

Invariant: a seat that is empty and needed is a ConfigError that names it; no other device takes its
place. torch is imported when it is asked: the command line reads names of variables without it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroshard.errors import ConfigError

if TYPE_CHECKING:
    import torch

# type -> the variable that names the devices of that type which a process sees
VISIBLE_DEVICES = {
    "cuda": "CUDA_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "mlu": "MLU_VISIBLE_DEVICES",
    "musa": "MUSA_VISIBLE_DEVICES",
}
# how variables of the devices' libraries begin
LIBRARIES = (
    "NCCL", "CUDA", "RCCL", "HIP", "CCL", "ZE", "HCCL", "ASCEND", "CNCL", "MLU", "MCCL", "MUSA",
)  # fmt: skip
# of torch's allocator; torch reads the second, older name, too
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# what a driver shows -> the build of torch that sees its devices
DRIVERS = {Path("/dev/nvidiactl"): "CUDA", Path("/dev/kfd"): "ROCm"}
TRITON = ("cuda",)  # the types that comm/kernels.py has been compiled for
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of this process


@dataclass(frozen=True)
class Device:
    """A device, or (without an index) the current one of its type, and the module of the type."""

    device: torch.device
    module: Any

    @classmethod
    def of(cls, device: torch.device | str) -> Device:
        """Return `device`. Raises ConfigError where torch has no module for its type."""
        import torch

        device = torch.device(device)
        try:
            return cls(device, torch.get_device_module(device))
        except RuntimeError:
            raise ConfigError(
                f"device {str(device)!r}: torch has no module for {device.type!r}; use a cpu, or a"
                " device that torch.accelerator names"
            ) from None

    @classmethod
    def accelerator(cls) -> Device | None:
        """Return the current device of the accelerator that torch has; None where it has none."""
        import torch

        found = torch.accelerator.current_accelerator(check_available=True)
        return None if found is None else cls.of(found)

    @property
    def type(self) -> str:
        """The name of its type."""
        return self.device.type

    def _seat(self, name: str) -> Any:
        found = getattr(self.module, name, None)
        if found is None:
            raise ConfigError(f"device {str(self.device)!r}: torch.{self.type} has no {name}()")
        return found

    @property
    def _which(self) -> tuple[Any, ...]:
        """Arguments of its functions: where a type has but one device (MPS) they take none."""
        return (self.device,) if hasattr(self.module, "current_device") else ()

    def count(self) -> int:
        """Return how many devices of this type there are."""
        return int(self._seat("device_count")())

    def make_current(self, index: int) -> torch.device:
        """Make the device of this type with `index` the current one, and return it."""
        import torch

        if self._which:
            self._seat("set_device")(index)
        return torch.device(self.type, index)

    def check_current(self) -> None:
        """Raise ConfigError where this is not the current device of its type: collectives and
        kernels that name no device would run on another.
        """
        if self.type == "cpu" or not self._which:
            return
        current = self.module.current_device()
        if self.device.index not in (None, current):
            raise ConfigError(
                f"the model is on {self.device}, and the current device is {self.type}:{current}:"
                f" call torch.{self.type}.set_device({self.device.index}) before shard()"
            )

    @property
    def backend(self) -> str | None:
        """The backend of its collectives in torch.distributed; None where it knows none."""
        import torch.distributed as dist

        try:
            return dist.get_default_backend_for_device(self.type) if dist.is_available() else None
        except ValueError:
            return None

    # ------------------------------------------------------------------ streams

    @property
    def has_streams(self) -> bool:
        """Whether work is enqueued on streams; else all of it is in program order, as on MPS."""
        return self.type != "cpu" and hasattr(self.module, "current_stream")

    def make_stream(self, priority: int = 0) -> Any:
        """Return a new stream."""
        return self._seat("Stream")(self.device, priority=priority)

    def current_stream(self) -> Any:
        """Return the stream that is current in this thread."""
        return self.module.current_stream(self.device)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which `stream` is the current one."""
        context: AbstractContextManager[Any] = self.module.stream(stream)
        return context

    def synchronize(self) -> None:
        """Make the host wait until everything that was enqueued has been done."""
        if self.type != "cpu":
            self._seat("synchronize")(*self._which)

    # ------------------------------------------------------------------ random numbers

    def generator_state(self) -> torch.Tensor:
        """Return the state of its default generator."""
        import torch

        if self.type == "cpu":
            return torch.get_rng_state()
        state: torch.Tensor = self._seat("get_rng_state")(*self._which)
        return state

    def set_generator_state(self, state: torch.Tensor) -> None:
        """Restore what `generator_state` returned."""
        import torch

        if self.type == "cpu":
            torch.set_rng_state(state)
        else:
            self._seat("set_rng_state")(state, *self._which)

    # ------------------------------------------------------------------ memory

    def mem_get_info(self) -> tuple[int, int]:
        """Return the bytes that are free on the device, and all."""
        free, total = self._seat("mem_get_info")(*self._which)
        return int(free), int(total)

    def free_bytes(self) -> int:
        """Return the bytes that this process can still have, with those that its allocator keeps
        for reuse.
        """
        allocated, reserved = self.usage() or (0, 0)
        return self.mem_get_info()[0] + reserved - allocated

    def usage(self) -> tuple[int, int] | None:
        """Return the bytes that are allocated in tensors, and those that torch's allocator has
        reserved; None where the device is not in use yet, or nobody counts.
        """
        in_use = getattr(self.module, "is_initialized", lambda: True)
        if not (hasattr(self.module, "memory_reserved") and in_use()):
            return None
        allocated = self._seat("memory_allocated")(*self._which)
        return int(allocated), int(self.module.memory_reserved(*self._which))

    def host_register(self) -> DriverRegister | None:
        """Return what locks pages of the host for it; None where torch knows no such driver."""
        return DriverRegister(self) if self.type == "cuda" else None

    # ------------------------------------------------------------------ what it is

    @property
    def uuid(self) -> str:
        """Its name among all devices of this host, also where this process sees only some."""
        found = getattr(self.module, "get_device_properties", lambda *_: None)(*self._which)
        seen = os.environ.get(VISIBLE_DEVICES.get(self.type, ""), "").split(",")
        number = ("".join(seen[self.device.index or 0 :][:1]) or self.device.index) or 0
        return str(getattr(found, "uuid", f"{self.type}:{number}"))

    def facts(self) -> dict[str, Any]:
        """Return its "name", "type" and "index", all of its memory ("memory_bytes"), and
        "capability", "backend" and "uuid", which no other device of this host has.
        """
        found = getattr(self.module, "get_device_properties", lambda *_: None)(*self._which)
        total = getattr(found, "total_memory", None)
        major, minor = getattr(found, "major", None), getattr(found, "minor", None)
        return {
            "name": str(getattr(found, "name", self.type)),
            "type": self.type,
            "index": self.device.index,
            "memory_bytes": self.mem_get_info()[1] if total is None else int(total),
            "capability": None if major is None else f"{major}.{minor}",
            "backend": self.backend,
            "uuid": self.uuid,
        }


class DriverRegister:
    """The CUDA driver's register of pages of the host."""

    def __init__(self, device: Device) -> None:
        self._cuda = device.module

    def register(self, address: int, num_bytes: int) -> None:
        with self._cuda.device(self._in_use()):
            self._check(self._cuda.cudart().cudaHostRegister(address, num_bytes, _PORTABLE))

    def unregister(self, address: int) -> None:
        with self._cuda.device(self._in_use()):
            self._check(self._cuda.cudart().cudaHostUnregister(address))

    def _in_use(self) -> int:
        """Return a device that this process uses already: a thread's current one is device 0 until
        it is told otherwise, and a first call there would take hundreds of megabytes of it.
        """
        import torch

        current = int(self._cuda.current_device())
        devices = (current, *range(self._cuda.device_count()))
        is_used: Any = torch._C._cuda_hasPrimaryContext  # type: ignore[attr-defined]
        return next((index for index in devices if is_used(index)), current)

    def _check(self, result: Any) -> None:
        code = int(result)
        if not code:
            return
        # the runtime keeps the error, and the next kernel's launch would raise it as its own
        forget = getattr(ctypes.CDLL(None), "cudaGetLastError", None)
        if forget is not None:
            forget()
        raise self._cuda.CudaError(code)


def all_devices() -> list[Device]:
    """Return the devices of the accelerator that torch has."""
    accelerator = Device.accelerator()
    if accelerator is None:
        return []
    return [Device.of(f"{accelerator.type}:{index}") for index in range(accelerator.count())]


@contextmanager
def undisturbed(*devices: torch.device) -> Iterator[None]:
    """Put the default generators of `devices`, and the CPU's, back as they were."""
    names = {"cpu", *map(str, devices)} - {"meta"}
    real = [Device.of(name) for name in sorted(names)]
    states = [device.generator_state() for device in real]
    try:
        yield
    finally:
        for device, state in zip(real, states, strict=True):
            device.set_generator_state(state)


def allocator_setting(environ: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return a variable of torch's allocator, the value that suits the devices here, and the
    reason; None where there is no advice, or `environ` has its own.
    """
    import torch

    grows = torch.version.cuda is not None and torch.cuda.device_count() > 0
    if any(name in environ for name in _ALLOCATOR) or not grows:
        return None
    return _ALLOCATOR[0], "expandable_segments:True", "CUDA memory that fragments less"


def library_versions(torch: Any) -> dict[str, str | None]:
    """Return the versions of the devices' libraries that `torch`, which may be None, names."""
    if torch is None:
        return {"nccl": None, "cuda": None}
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None
    return {"nccl": nccl, "cuda": torch.version.cuda}
