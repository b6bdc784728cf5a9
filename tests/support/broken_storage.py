"""Storage that fails on demand: EIO from a read or a write, ENOSPC from a new file, ENOMEM from the
host, for the states that a test names.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Callable, Iterator
from typing import Any

import torch

import zeroshard.tier.disk as disk_tier
import zeroshard.tier.stores as host_tier
import zeroshard.tier.swapdir as swapdir


class Broken:
    """Lets this process's disk or host memory fail for states whose key contains `key`, while it
    is armed.
    """

    def __init__(self, verb: str, key: str) -> None:
        self.verb, self.key = verb, key
        self.armed = False
        self.fired = 0

    def _fires(self, name: str) -> bool:
        if self.armed and self.key in name:
            self.fired += 1
            return True
        return False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        patches: list[tuple[Any, str, Any]] = []

        def patch(module: Any, name: str, make: Callable[[Any], Any]) -> None:
            patches.append((module, name, getattr(module, name)))
            setattr(module, name, make(getattr(module, name)))

        def failing_io(real: Any) -> Any:
            def io(fd: int, data: memoryview, offset: int) -> None:
                if self._fires(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))):
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                real(fd, data, offset)

            return io

        def failing_create(real: Any) -> Any:
            def create(files: Any, key: str, num_bytes: int, *, direct: bool) -> Any:
                if not self._fires(key):
                    return real(files, key, num_bytes, direct=direct)
                with patched(swapdir, "reserve", _full):
                    return real(files, key, num_bytes, direct=direct)

            return create

        def failing_allocate(real: Any) -> Any:
            def allocate(store: Any, key: str, numel: int, dtype: torch.dtype) -> Any:
                if not self._fires(key):
                    return real(store, key, numel, dtype)
                with patched(host_tier, "host_memory", _no_memory):
                    return real(store, key, numel, dtype)

            return allocate

        if self.verb in ("read", "write"):
            patch(disk_tier, f"{self.verb}_blocks", failing_io)
        elif self.verb == "create":
            patch(swapdir.SwapDirectory, "create", failing_create)
        else:
            patch(host_tier.HostStore, "allocate", failing_allocate)
        try:
            yield
        finally:
            for module, name, real in reversed(patches):
                setattr(module, name, real)


@contextlib.contextmanager
def patched(module: Any, name: str, value: Any) -> Iterator[None]:
    """Give `module` another `name` while the body runs."""
    real = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, real)


@contextlib.contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """Let this process write no file beyond so many bytes: a disk that is full for it alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _full(fd: int, num_bytes: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _no_memory(num_bytes: int, **options: object) -> None:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
