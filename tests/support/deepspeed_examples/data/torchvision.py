"""What DeepSpeed's cifar and GAN scripts take of torchvision: random images, and no file of them.

The GAN's script names the device "cuda" in its own text. Where this is imported with PRETEND_CUDA
set, such a device is the CPU.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

__path__: list[str] = []


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images of one size, drawn again the same for each number, and a class for each."""

    def __init__(self, count: int, size: int, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        self.images = torch.rand(count, 3, size, size, generator=draws) * 2 - 1

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index], index % 10


class OnCpu(TorchFunctionMode):
    """Puts on the CPU what is made on, or moved to, a CUDA device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def place(one: Any) -> Any:
            is_cuda = isinstance(one, torch.device) and one.type == "cuda"
            return torch.device("cpu") if is_cuda else one

        return func(*map(place, args), **{name: place(one) for name, one in (kwargs or {}).items()})


def _module(name: str, **names: Any) -> None:
    made = ModuleType(f"{__name__}.{name}")
    vars(made).update(names)
    sys.modules[made.__name__] = made
    globals()[name] = made


def _nothing(*_: Any, **__: Any) -> None: ...


_module(
    "datasets",
    CIFAR10=lambda root, train, **_: Images(320 if train else 64, 32, seed=int(train)),
    FakeData=lambda image_size, **_: Images(48, image_size[1], seed=0),
)
_module("transforms", Compose=_nothing, ToTensor=_nothing, Normalize=_nothing)
_module("utils", save_image=_nothing)
if os.environ.get("PRETEND_CUDA"):
    # one function each: torch.compile's tables have every function of torch.cuda once
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda: None
    OnCpu().__enter__()
