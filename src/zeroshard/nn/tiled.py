"""A linear layer in tiles: the weights of one huge operator are gathered a tile at a time
(ZeRO-Infinity, section 5.1.3, memory-centric tiling).

    y[..., o] = x W^T + b        W [out, in] is cut into out_tiles x in_tiles matrices

                 in_tiles = 2
              +--------+-------+
    W    =    | 0,0    | 0,1   |  out_tiles = 3     each tile is an nn.Linear of its own; tiles of
              +--------+-------+                    the first column have the bias
              | 1,0    | 1,1   |
              +--------+-------+                    y[rows of i] = sum over j of
              | 2,0    | 2,1   |                                   tile_i_j(x[columns of j])
              +--------+-------+

Sharded at stage 3 a tile is a unit of its own (``unit_of_its_own``, read by runtime/units.py):
it and its gradient are gathered, used and released before the next one, in forward and backward.

Invariants: only one tile's weights are needed at any time; each tile's part is written into the one
output and freed. Cost: working memory falls by the number of tiles; as many gathers and reduces as
tiles. With in_tiles > 1 the output is a sum of in_tiles rounded products, so bits differ from the
untiled layer's; out_tiles changes no sum. There is no ``weight`` attribute: code that computes with
``layer.weight`` cannot be tiled.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from zeroshard.errors import ConfigError, StateError
from zeroshard.nn.deferred import deferred_init, is_deferred

Tiles = int | tuple[int, int]  # out_tiles, or (out_tiles, in_tiles)

_TILE_KEY = re.compile(
    r"(?P<prefix>(?:.*\.)?)tile_(?P<row>\d+)_(?P<column>\d+)\.(?P<kind>weight|bias)"
)


class LinearTile(nn.Linear):
    """One tile of a TiledLinear; `fan_in` is the in_features of the whole layer."""

    unit_of_its_own: ClassVar[bool] = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        *,
        fan_in: int,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        self.__dict__["fan_in"] = fan_in  # before nn.Linear's __init__, which draws the values
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Draw weight and bias from nn.Linear's distribution for the whole layer."""
        bound = 1 / math.sqrt(self.__dict__["fan_in"])
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def _load_from_state_dict(self, *args: Any) -> None:
        # the whole layer names what is missing
        super()._load_from_state_dict(*args[:4], [], *args[5:])  # type: ignore[call-arg]


class _Put(torch.autograd.Function):
    """Copy or add a tile's part to its columns of the output; its gradient is a view."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, part: torch.Tensor, start: int, stop: int, first: bool
    ) -> torch.Tensor:
        ctx.start, ctx.numel = start, stop - start
        ctx.mark_dirty(out)
        place = out.narrow(-1, start, stop - start)
        place.copy_(part) if first else place.add_(part)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, grad.narrow(-1, ctx.start, ctx.numel), None, None, None


class TiledLinear(nn.Module):
    """An nn.Linear [..., in_features] -> [..., out_features] that needs one tile at a time.

    Sizes that do not divide are cut as evenly as possible. ``state_dict()`` gives, and
    ``load_state_dict()`` takes, nn.Linear's ``weight`` and ``bias``, copies of the tiles' parts;
    tiles' own names are taken as well. ``named_parameters()`` are the tiles' (``tile_3_0.weight``:
    row 3, column 0). Raises ConfigError for more tiles than features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        out_tiles: int = 1,
        in_tiles: int = 1,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.out_sizes = _cut(out_features, out_tiles, "out")
        self.in_sizes = _cut(in_features, in_tiles, "in")
        self.has_bias = bias
        for row, rows in enumerate(self.out_sizes):
            for column, columns in enumerate(self.in_sizes):
                with_bias = bias and column == 0
                tile = LinearTile(
                    columns, rows, with_bias, fan_in=in_features, device=device, dtype=dtype
                )
                self.add_module(f"tile_{row}_{column}", tile)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, out_tiles: int = 1, in_tiles: int = 1
    ) -> TiledLinear:
        """Return a tiled copy of `linear`: numbers, dtype, device, mode and requires_grad.

        Takes a deferred `linear` as well (zs.deferred_init): the tiles are then deferred. Raises
        StateError for a sharded one.
        """
        if any(hasattr(parameter, "_zeroshard") for parameter in linear.parameters()):
            raise StateError(
                "a sharded layer cannot be tiled: tile it before shard(), or after engine.close()"
            )
        options: Any = {"out_tiles": out_tiles, "in_tiles": in_tiles, "device": "meta"}
        sizes = (linear.in_features, linear.out_features, linear.bias is not None)
        tiled = cls(*sizes, **options, dtype=linear.weight.dtype)
        defers = any(is_deferred(parameter) for parameter in linear.parameters())
        with deferred_init() if defers else nullcontext(), torch.no_grad():
            for name, part in tiled._parts({"weight": linear.weight, "bias": linear.bias}):
                tile, _, kind = name.partition(".")
                trains = getattr(linear, kind).requires_grad
                value = torch.empty(part.shape, dtype=part.dtype, device=part.device).copy_(part)
                parameter = nn.Parameter(value, requires_grad=trains)
                setattr(tiled.get_submodule(tile), kind, parameter)
        return tiled.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x W^T + b``."""
        columns = torch.split(x, self.in_sizes, dim=-1) if len(self.in_sizes) > 1 else (x,)
        out: torch.Tensor | None = None
        start = 0
        for row, rows in enumerate(self.out_sizes):
            for column, part_of_x in enumerate(columns):
                # An input of its own for each tile: a frozen tile is released when the gradient of
                # its input is there.
                part = self._modules[f"tile_{row}_{column}"](part_of_x.view_as(part_of_x))  # type: ignore[misc]
                if out is None:
                    out = part.new_empty((*part.shape[:-1], self.out_features))
                out = _Put.apply(out, part, start, start + rows, column == 0)  # type: ignore[no-untyped-call]
                del part
            start += rows
        assert out is not None
        return out

    def extra_repr(self) -> str:
        """Return the layer's facts for ``print(model)``."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        tiles = f"out_tiles={len(self.out_sizes)}, in_tiles={len(self.in_sizes)}"
        return f"{sizes}, bias={self.has_bias}, {tiles}"

    def _parts(
        self, whole: Mapping[str, torch.Tensor | None]
    ) -> Iterable[tuple[str, torch.Tensor]]:
        """Yield each tile's parameters by name, as views of the layer's ``weight`` and ``bias``."""
        weight, bias = whole.get("weight"), whole.get("bias")
        if weight is not None:
            for row, rows in enumerate(torch.split(weight, self.out_sizes)):
                for column, part in enumerate(torch.split(rows, self.in_sizes, dim=1)):
                    yield f"tile_{row}_{column}.weight", part
        if bias is not None:
            for row, part in enumerate(torch.split(bias, self.out_sizes)):
                yield f"tile_{row}_0.bias", part

    # ------------------------------------------------------------- nn.Linear's names in checkpoints

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Return ``weight`` and ``bias`` of the whole layer, copies."""
        tiles: Any = super().state_dict(prefix=prefix, keep_vars=keep_vars)
        joined = join_tiles(tiles)
        if destination is None:
            destination = tiles
            destination.clear()  # it keeps its _metadata
        else:
            destination._metadata.update(tiles._metadata)
        destination.update(joined)
        return destination

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Split the whole layer's numbers, if `state_dict` has them, for the tiles."""
        _, _, missing, _, errors = args
        shapes = {"weight": (self.out_features, self.in_features), "bias": (self.out_features,)}
        for kind in ("weight", "bias") if self.has_bias else ("weight",):
            whole = state_dict.pop(prefix + kind, None)
            if whole is None:
                parts = [prefix + name for name in self.state_names(kind)]
                absent = [name for name in parts if name not in state_dict]
                missing += [prefix + kind] if absent == parts else absent
            elif tuple(whole.shape) != shapes[kind]:
                shape = f"{tuple(whole.shape)} in the checkpoint, {shapes[kind]} in the model"
                errors.append(f"size mismatch for {prefix}{kind}: a shape of {shape}")
            else:
                state_dict |= {prefix + name: part for name, part in self._parts({kind: whole})}
        super()._load_from_state_dict(state_dict, prefix, *args)

    def state_names(self, kind: str) -> list[str]:
        """Return the tiles' names of `kind`, "weight" or "bias"."""
        return [name for name, _ in self.named_parameters() if name.endswith(f".{kind}")]


def _cut(size: int, tiles: int, side: str) -> list[int]:
    """Return the sizes of `tiles` parts of `size`, which differ by at most 1: 3, 3, 2, 2 of 10."""
    if not 1 <= tiles <= size:
        raise ConfigError(
            f"{side}_tiles={tiles} of {side}_features={size}: give from 1 to {size} tiles"
        )
    return [size // tiles + (index < size % tiles) for index in range(tiles)]


def join_tiles(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `state` with tiles joined under nn.Linear's names (``up.tile_0_0.weight``, ...).

    For ``engine.full_state_dict()`` of a tiled model, which has the tiles' names. The joined
    tensors are copies; other entries are passed on. Raises ConfigError where a tile is missing.
    """
    grids: dict[str, dict[tuple[int, int], torch.Tensor]] = {}
    out: dict[str, torch.Tensor] = {}
    for name, value in state.items():
        found = _TILE_KEY.fullmatch(name)
        key = name if found is None else found["prefix"] + found["kind"]
        out[key] = value  # of a tiled layer, to hold its place
        if found is not None:
            grids.setdefault(key, {})[int(found["row"]), int(found["column"])] = value
    for key, grid in grids.items():
        rows, columns = (range(1 + max(place[axis] for place in grid)) for axis in (0, 1))
        places = [(row, column) for row in rows for column in columns]
        absent = [f"tile_{row}_{column}" for row, column in places if (row, column) not in grid]
        if absent:
            raise ConfigError(
                f"{key} cannot be joined: {', '.join(absent)} missing; give the whole state_dict"
            )
        whole = [[grid[row, column] for column in columns] for row in rows]
        joined = [one[0] if len(one) == 1 else torch.cat(one, dim=-1) for one in whole]
        out[key] = torch.cat(joined)
    return out


# --------------------------------------------------------------------------------- a model's layers


def tile_linears(
    model: nn.Module,
    which: Mapping[str, Tiles] | Iterable[str] | Callable[[str, nn.Linear], bool],
    *,
    out_tiles: int = 1,
    in_tiles: int = 1,
) -> list[str]:
    """Replace nn.Linear layers in `model` by tiled ones with the same numbers; return names.

    `which` maps names to out_tiles or (out_tiles, in_tiles); or it is a list of names, or a
    callable(name, linear) -> bool, and the keywords say how many tiles. Call it before the
    optimizer is built and before ``shard()``; deferred models are taken. Raises ConfigError, with
    nothing changed, for a name that is no plain nn.Linear, and for a layer that is more than its
    numbers: hooks, weights tied to another module, a gradient. Raises StateError for a sharded
    model.
    """
    if any(hasattr(parameter, "_zeroshard") for parameter in model.parameters()):
        raise StateError(
            "tile_linears() of a sharded model: tile it before shard(), or after engine.close()"
        )
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    if callable(which):
        wanted: dict[str, Tiles] = {
            name: (out_tiles, in_tiles) for name, linear in linears.items() if which(name, linear)
        }
    elif isinstance(which, Mapping):
        if (out_tiles, in_tiles) != (1, 1):
            raise ConfigError(
                "tile_linears(): a mapping says how many tiles each layer gets; leave out_tiles and"
                " in_tiles out"
            )
        wanted = dict(which)
    else:
        wanted = dict.fromkeys([which] if isinstance(which, str) else which, (out_tiles, in_tiles))
    for name in wanted:
        _refuse(model, name)
    tiled: dict[nn.Module, TiledLinear] = {}
    for name, tiles in wanted.items():
        rows, columns = tiles if isinstance(tiles, tuple) else (tiles, 1)
        linear = linears[name]
        tiled[linear] = TiledLinear.from_linear(linear, out_tiles=rows, in_tiles=columns)
    for parent in list(model.modules()):
        for child, module in list(parent._modules.items()):
            if module in tiled:
                parent._modules[child] = tiled[module]
    return list(wanted)


def _refuse(model: nn.Module, name: str) -> None:
    """Raise ConfigError if the module `name` is more than a plain layer's numbers."""
    modules = dict(model.named_modules())
    if name not in modules:
        raise ConfigError(
            f"tile_linears(): {name!r} is no module of {type(model).__name__}; take names of"
            " model.named_modules()"
        )
    linear = modules[name]
    if type(linear) is not nn.Linear:
        raise ConfigError(
            f"tile_linears(): {name!r} is a {type(linear).__name__}, and only plain nn.Linear"
            " layers can be tiled"
        )
    if linear is model:
        raise ConfigError("tile_linears() of a layer itself: use TiledLinear.from_linear(layer)")
    hooks = [key for key, value in vars(linear).items() if key.endswith("_hooks") and value]
    hooks += ["forward"] if "forward" in vars(linear) else []
    if hooks:
        raise ConfigError(
            f"tile_linears(): {name!r} has {hooks[0].strip('_')} of its own, which would be lost:"
            " tile it first"
        )
    for kind, parameter in linear.named_parameters():
        others = [
            other
            for other, module in modules.items()
            if module is not linear and any(parameter is p for p in module._parameters.values())
        ]
        if others:
            raise ConfigError(
                f"tile_linears(): {name}.{kind} is tied to a parameter of {others[0]!r}, and tiling"
                " would untie it"
            )
        if parameter.grad is not None:
            raise ConfigError(
                f"tile_linears(): {name}.{kind} has a gradient: tile before the first backward, or"
                " zero_grad() first"
            )
        # deferred parameters have no values, but hooks
        with torch._C.DisableTorchFunctionSubclass():
            watched = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
        if watched:
            raise ConfigError(
                f"tile_linears(): {name}.{kind} has hooks of its own, which would be lost: tile it"
                " first"
            )
