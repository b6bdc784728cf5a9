"""The device that a rank computes on: the only file that names a type of device.

Everything else goes by the functions that torch expects of the module of a type (``torch.cuda``,
``torch.xpu``, ``torch.npu``, one that was registered). The seats that are sat on:

    Stream Event current_stream stream          lanes; a type without these has one lane
    synchronize                                 the host waits
    is_available device_count                   whether there is one, and how many
    current_device set_device                   which is a rank's own
    get_rng_state set_rng_state                 dropout after a resume
    mem_get_info memory_allocated memory_reserved empty_cache
    get_device_properties                       name, total_memory, uuid

Invariant: a seat that is empty is a ConfigError with its name where it is needed, or one lane, or a
figure that is not there; it is never another device's. torch is imported where it is first asked:
the command line reads the names of variables here without it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zeroshard.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["Device"]

_STREAMS = ("Stream", "Event", "current_stream", "stream", "synchronize")


@dataclass(frozen=True)
class Device:
    """A device and the module of its type."""

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
                f"device {str(device)!r}: torch has no module for {device.type!r}, so nothing can"
                " be computed there; use a cpu, or a device that torch.accelerator names"
            ) from None

    @property
    def has_streams(self) -> bool:
        """Whether work is enqueued on streams; else everything is in program order."""
        return self.device.type != "cpu" and all(hasattr(self.module, name) for name in _STREAMS)

    # ------------------------------------------------------------------ streams

    def make_stream(self, priority: int = 0) -> Any:
        """Return a new stream."""
        return self.module.Stream(self.device, priority=priority)

    def current_stream(self) -> Any:
        """Return the stream that is current in this thread."""
        return self.module.current_stream(self.device)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which `stream` is the current one."""
        context: AbstractContextManager[Any] = self.module.stream(stream)
        return context

    def synchronize(self) -> None:
        """Make the host wait until everything that was enqueued has been done."""
        self.module.synchronize(self.device)
