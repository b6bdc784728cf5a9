"""A KV cache for Transformers' ``generate()``: its layers rest on the device, on the host, or on
both, split by a budget of bytes (FlexGen, arXiv 2303.06865, and ZeRO-Inference keep it there).

    cache = KVCache(model.config, device_bytes=2 << 30)
    model.generate(**inputs, past_key_values=cache)

    layer         0   1   2   3   4   5
    rests on      device ------>| host --->         the last layers leave when the budget is used up

A layer on the host sends the new token's keys and values there, and brings all of its own back for
its attention. The numbers equal those that ``DynamicCache`` holds, the base of this one; layers
that hold a sliding window or a recurrent state are small and stay on the device.

Invariant: after every update, keys and values at rest on the device are within the budget, unless
layers that stay exceed it alone. Cost: per token and host layer, its keys and values over the link
once, and host memory of up to twice its bytes. Beside a CPU both sides are the same memory, and
nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

import zeroshard as zs

__all__ = ["KVCache", "layers_to_move"]


def layers_to_move(sizes: Sequence[int], movable: Sequence[int], budget: int) -> list[int]:
    """Return which of the `movable` layers, by index, leave the device so that its layers of
    `sizes` bytes fit `budget`: the last ones first, all where that is not enough.
    """
    excess: int = sum(sizes) - budget
    out: list[int] = []
    for index in sorted(movable, reverse=True):
        if excess <= 0:
            break
        excess -= sizes[index]
        out.append(index)
    return out


class _Room:
    """Host memory of one tensor [batch, heads, tokens, width] that grows by tokens."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def extended(self, held: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        """Return `held`, on the host, with the `new` tokens after it: in the same memory where
        there is room behind it, else in twice as much. Of an empty `held`, `new` alone.
        """
        tokens = held.shape[-2] if held.numel() else 0
        whole, room = tokens + new.shape[-2], self._memory
        is_there = held.data_ptr() == room.data_ptr() and held.stride() == room.stride()
        if not tokens or not is_there or room.shape[-2] < whole:
            shape = (*new.shape[:-2], max(2 * tokens, whole), new.shape[-1])
            room = torch.empty(shape, dtype=new.dtype, pin_memory=torch.accelerator.is_available())
            if tokens:
                room[..., :tokens, :].copy_(held)
            self._memory = room
        # the copy is waited for: this memory is read for the attention that follows
        room[..., tokens:whole, :].copy_(new)
        return room[..., :whole, :]


class _SplitLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer with keys and values [batch, heads, tokens, width] on either side."""

    _layer_type = None  # else Transformers would make every cache of these layers

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)  # type: ignore[no-untyped-call]
        self.is_on_host = False
        self._rooms = _Room(), _Room()

    def leave(self) -> None:
        """Rest on the host from here on."""
        self.is_on_host = True
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.to("cpu"), self.values.to("cpu")

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the new tokens; return all keys and values, on the device."""
        if not self.is_on_host:
            out: tuple[torch.Tensor, torch.Tensor] = super().update(
                key_states, value_states, *args, **kwargs
            )
            return out
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        keys, values = self._rooms
        self.keys = keys.extended(self.keys, key_states)
        self.values = values.extended(self.values, value_states)
        device = key_states.device
        return (
            self.keys.to(device, non_blocking=True),
            self.values.to(device, non_blocking=True),
        )


class KVCache(DynamicCache):
    """A ``DynamicCache`` for a model of `config`, with at most `device_bytes` on the device; 0: all
    of it rests on the host, None: all on the device.

    Raises ConfigError for a negative budget.
    """

    def __init__(self, config: Any, *, device_bytes: int | None = None) -> None:
        if device_bytes is not None and device_bytes < 0:
            raise zs.ConfigError(
                f"device_bytes={device_bytes} is negative: 0 keeps all keys and values on the host"
            )
        super().__init__(config=config)
        self._budget = device_bytes
        self.layers = [_SplitLayer() if type(one) is DynamicLayer else one for one in self.layers]
        if device_bytes == 0:
            self._keep_within(-1)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Add the new tokens of a layer; return all of its keys and values, on the device. Layers
        that no longer fit the budget leave.
        """
        out: tuple[torch.Tensor, torch.Tensor] = super().update(
            key_states, value_states, layer_idx, *args, **kwargs
        )
        if self._budget is not None:
            self._keep_within(self._budget)
        return out

    def bytes_by_place(self) -> dict[str, int]:
        """Return the bytes of keys and values that rest on the device and on the host."""
        return {
            "device": sum(_bytes_of(layer) for layer in self._layers(on_host=False)),
            "host": sum(_bytes_of(layer) for layer in self._layers(on_host=True)),
        }

    def _keep_within(self, budget: int) -> None:
        layers = self._layers(on_host=False)
        movable = [index for index, one in enumerate(layers) if isinstance(one, _SplitLayer)]
        for index in layers_to_move([_bytes_of(one) for one in layers], movable, budget):
            layers[index].leave()

    def _layers(self, *, on_host: bool) -> list[Any]:
        """Return the layers that rest there."""
        return [
            layer
            for layer in self.layers
            if isinstance(layer, CacheLayerMixin)
            and on_host == (isinstance(layer, _SplitLayer) and layer.is_on_host)
        ]


def _bytes_of(layer: CacheLayerMixin) -> int:
    held = (layer.keys, layer.values)
    return sum(one.numel() * one.element_size() for one in held if one is not None)
