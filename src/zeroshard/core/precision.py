"""Mixed precision: the dtype of each state of a trained parameter.

Mixed precision training (Micikevicius et al., 2018) keeps an fp32 master beside half-precision
weights; ZeRO, section 3.1, counts its bytes: 2 (weight) + 4 (master) + 8 (Adam's moments), and the
gradient. In fp32 the weight, or this rank's slice of it, *is* the master. As a remainder the master
takes 2: the bits that its bf16 weight lacks (state/remainder.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NAMES: dict[Any, str] = {dtype: name for name, dtype in _DTYPES.items()}


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """Return the dtype called "fp32", "bf16" or "fp16". Raises ValueError."""
    if isinstance(name, torch.dtype):
        name = _NAMES.get(name, str(name))
    if name not in _DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {', '.join(_DTYPES)}")
    return _DTYPES[name]


@cache
def dtype_name(dtype: torch.dtype | str) -> str:
    """Return the short name of `dtype` ("fp32"), or torch's own."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


@dataclass(frozen=True)
class Precision:
    """The dtypes of one training run; each may be given as a dtype or by its short name.

    compute: weights, activations and gradients as autograd makes them. reduce: gradients on the
    wire (default: compute). accumulate: gradients at rest, fp32 or compute. master: what the
    optimizer steps, fp32, or bf16 weights themselves; "remainder": fp32, at rest as what bf16
    weights lack of it. moments: states of a parameter's shape between steps, rounded to bf16
    (default: as the optimizer makes them).
    """

    compute: torch.dtype = torch.float32
    reduce: torch.dtype | None = None
    accumulate: torch.dtype = torch.float32
    master: torch.dtype | Literal["remainder"] = torch.float32
    moments: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("compute", "reduce", "accumulate", "master"):
            value = getattr(self, name)
            if name != "master" or value != "remainder":
                value = self.compute if value is None else parse_dtype(value)
            object.__setattr__(self, name, value)
        if self.moments is not None:
            object.__setattr__(self, "moments", parse_dtype(self.moments))
        is_low = self.stepped is self.compute is torch.bfloat16
        if self.stepped is not torch.float32 and not is_low:
            raise ValueError(
                f"master={dtype_name(self.stepped)!r} is not supported: the optimizer steps fp32"
                " masters, or bf16 weights"
            )
        if self.moments not in (None, torch.bfloat16):
            raise ValueError("moments rest in bf16, or (None) as the optimizer makes them")
        if self.has_remainders and self.compute is not torch.bfloat16:
            raise ValueError(
                "master='remainder' is what bf16 weights lack of fp32 masters: take compute='bf16',"
                f" not {dtype_name(self.compute)!r}"
            )
        if self.accumulate not in (torch.float32, self.compute):
            raise ValueError(
                f"accumulate={dtype_name(self.accumulate)!r} must be 'fp32' or the compute dtype"
                f" {dtype_name(self.compute)!r}"
            )

    @property
    def wire(self) -> torch.dtype:
        """The dtype of gradients on the wire."""
        assert self.reduce is not None
        return self.reduce

    def at(self, compute: torch.dtype) -> Precision:
        """Return these dtypes for a parameter that computes in `compute` instead."""
        reduce = compute if self.reduce is self.compute else self.reduce
        accumulate = torch.float32 if self.accumulate is torch.float32 else compute
        master = self.master if compute is self.compute else torch.float32
        return replace(self, compute=compute, reduce=reduce, accumulate=accumulate, master=master)

    @property
    def has_remainders(self) -> bool:
        """Whether masters rest as remainders of the weights."""
        return self.master == "remainder"

    @property
    def rounds_moments(self) -> bool:
        """Whether moments rest in fewer bits than the optimizer steps them in."""
        return self.moments is not None and self.stepped is torch.float32

    @property
    def decodes(self) -> bool:
        """Whether states are decoded for their step."""
        return self.has_remainders or self.rounds_moments

    @property
    def stepped(self) -> torch.dtype:
        """The dtype in which the optimizer steps masters, however they rest."""
        return torch.float32 if isinstance(self.master, str) else self.master

    @property
    def master_bytes(self) -> int:
        """Bytes of a master at rest beside its weight."""
        return 2 if self.has_remainders else self.stepped.itemsize

    @property
    def weight_is_master(self) -> bool:
        """Whether the optimizer steps the weights themselves, without a second copy."""
        return self.compute is self.master

    @property
    def needs_loss_scaling(self) -> bool:
        """Whether small gradients would underflow (fp16)."""
        return self.compute is torch.float16

    def describe(self) -> str:
        """Return the dtypes in one line."""
        return ", ".join(f"{name}={given}" for name, given in self.names().items())

    def names(self) -> dict[str, str]:
        """Return the short names of the dtypes."""
        return {name: dtype_name(one) for name, one in vars(self).items() if one is not None}


PRECISIONS: dict[str, Precision] = {name: Precision(dtype) for name, dtype in _DTYPES.items()}
