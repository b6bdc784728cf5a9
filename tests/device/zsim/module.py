"""``torch.zsim``: what ``torch.cuda`` is for CUDA, as far as PyTorch and this project ask for it.

The names are ``torch.cuda``'s.
"""

# ruff: noqa: N801

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

import torch

from tests.device.zsim.library import _zsim

DeviceLike: TypeAlias = torch.device | str | int | None

_initialized = True  # torch.utils.checkpoint keeps the generators' states only then
CYCLES_PER_US = 2000  # of `_sleep`: about a GPU's

default_generators: tuple[torch.Generator, ...] = tuple(
    _zsim.generator(index) for index in range(_zsim.device_count())
)


def _index(device: DeviceLike = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


# ---------------------------------------------------------------------- devices


def init() -> None:
    pass


def is_available() -> bool:
    return device_count() > 0


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return int(_zsim.device_count())


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: DeviceLike) -> None:
    torch.accelerator.set_device_index(_index(device))


class device:
    """Make a device current for the body of a `with` statement."""

    def __init__(self, device: DeviceLike) -> None:
        self.index = _index(device)
        self.before = -1

    def __enter__(self) -> None:
        self.before = current_device()
        set_device(self.index)

    def __exit__(self, *error: object) -> None:
        set_device(self.before)


class device_of(device):
    """Make a tensor's device current for the body of a `with` statement."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == "zsim" else None)


@dataclass(frozen=True)
class DeviceProperties:
    name: str
    total_memory: int
    uuid: uuid.UUID
    multi_processor_count: int = 1


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    index = _index(device)
    first = os.environ.get("ZSIM_FIRST")  # unset: this process's own
    number = f"{os.getpid()} {index}" if first is None else int(first) + index
    name = f"{socket.gethostname()} zsim {number}"
    return DeviceProperties("zsim", mem_get_info(index)[1], uuid.uuid5(uuid.NAMESPACE_DNS, name))


def get_device_name(device: DeviceLike = None) -> str:
    return get_device_properties(device).name


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    return (0, 0)


# ------------------------------------------------------------- streams, events


class Stream(torch.Stream):
    def __new__(cls, device: DeviceLike = None, priority: int = 0, **given: Any) -> Stream:
        if given:  # stream_id, device_index, device_type: a stream that exists
            return super().__new__(cls, priority=priority, **given)
        return super().__new__(cls, torch.device("zsim", _index(device)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False) -> torch.Event:  # noqa: N802
    # A function: `elapsed_time` takes no subclass.
    return torch.Event("zsim", enable_timing=enable_timing, blocking=blocking)


class stream:
    """Make a stream and its device current for the body of a `with` statement; None: no change."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.device_before = current_device()
            self.before = current_stream(self.stream.device)
            set_stream(self.stream)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.stream is not None:
            set_stream(self.before)
            set_device(self.device_before)


def current_stream(device: DeviceLike = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    kind = current_stream(device).device_type
    return Stream(stream_id=0, device_index=_index(device), device_type=kind)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def synchronize(device: DeviceLike = None) -> None:
    torch.accelerator.synchronize(_index(device))


def is_current_stream_capturing() -> bool:
    return False


def _sleep(cycles: int) -> None:
    """Keep the current stream busy, as ``torch.cuda._sleep`` does."""
    _zsim.sleep(cycles // CYCLES_PER_US, current_device())


# --------------------------------------------------------------------- memory


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """Return the free and the total bytes of the device."""
    free, total = _zsim.memory_info(_index(device))
    return int(free), int(total)


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def memory_stats(device: DeviceLike = None) -> dict[str, Any]:
    return dict(torch.accelerator.memory_stats(_index(device)))


def memory_allocated(device: DeviceLike = None) -> int:
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device: DeviceLike = None) -> int:
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device: DeviceLike = None) -> int:
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device: DeviceLike = None) -> int:
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(device))


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    torch.accelerator.reset_accumulated_memory_stats(_index(device))


# ------------------------------------------------------------- random numbers


def manual_seed(seed: int) -> None:
    default_generators[current_device()].manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for generator in default_generators:
        generator.manual_seed(seed)


def initial_seed() -> int:
    return default_generators[current_device()].initial_seed()


def get_rng_state(device: DeviceLike = "zsim") -> torch.Tensor:
    return default_generators[_index(device)].get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = "zsim") -> None:
    default_generators[_index(device)].set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for generator, state in zip(default_generators, new_states, strict=True):
        generator.set_state(state)


# -------------------------------------------------------------- mixed precision


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True
