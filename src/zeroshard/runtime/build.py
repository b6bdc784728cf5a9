"""From a model and a policy to units at rest: lay out, take the weights in, let go of the originals.

One unit after another, so that beyond the shards at most one unit exists twice (deferred parameters get their values here). Segments hold parameters of one
dtype and one trainability (LoRA's frozen base and its adapters are two segments of one unit). Collective: windows are made on every rank in unit order.

[Note: dtypes] A model in one floating dtype computes in the precision's, but for batch norms: their running statistics are fp32 and torch's
kernels want the weights alike (FSDP leaves them out, too). A model given in several floating dtypes is taken as it is: fp32 norms in a bf16
model, or fp32 adapters on a bf16 base, were meant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zeroshard.buffer import FlatBuffer, Lanes, Meter, PagePool, return_freed_memory
from zeroshard.comm.transport import Transport
from zeroshard.core.layout import Layout
from zeroshard.core.policy import Policy
from zeroshard.core.precision import Precision, dtype_name
from zeroshard.runtime.cut import UnitPlan
from zeroshard.runtime.gradients import GradientPath
from zeroshard.runtime.unit import Segment, Unit, UnitState, memory_stride

__all__ = ["Context", "Dtypes", "build_units", "compute_dtypes"]


@dataclass(frozen=True)
class Dtypes:
    """In which dtype each parameter of a model computes. See [Note: dtypes]."""

    of: dict[int, torch.dtype]  # by id of the parameter
    as_given: bool  # whether the model's own dtypes stand, so that its inputs are left alone, too

    def widest(self, precision: Precision) -> int:
        """Return the bytes of the widest gradient element on the wire."""
        return max((precision.at(dtype).wire.itemsize for dtype in set(self.of.values()) if dtype.is_floating_point), default=1)


@dataclass(frozen=True)
class Context:
    """What every part of one engine shares."""

    policy: Policy
    precision: Precision
    dtypes: Dtypes
    transport: Transport
    streams: Lanes
    meter: Meter
    pages: PagePool
    device: torch.device
    trains: bool  # an optimizer is there, or will be: masters are kept
    strict: bool = False
    verify_every: int | None = None  # steps between comparisons of replicated state
    broadcast_buffers: bool = False
    clip_norm: float | None = None  # what a step clips to where the user has not clipped
    prepare: Callable[[Sequence[torch.Tensor]], None] = lambda tensors: None  # gives a segment's parameters their initial values


def compute_dtypes(model: nn.Module, precision: Precision) -> Dtypes:
    """Return the dtypes in which the parameters of `model` compute; those that are not floating-point in their own."""
    given = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    as_given = len(given) > 1
    of = {id(p): precision.compute if p.is_floating_point() and not as_given else p.dtype for p in model.parameters()}
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            of |= {id(parameter): parameter.dtype for parameter in module.parameters(recurse=False)}
    return Dtypes(of, as_given)


def build_units(plans: Sequence[UnitPlan], context: Context) -> list[Unit]:
    """Take every planned unit's parameters over; afterwards they rest as the policy says."""
    units = []
    for index, plan in enumerate(plans):
        cells = context.policy.cells(plan.name)
        groups: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
        for name, parameter in plan.parameters.items():
            kind = (context.dtypes.of[id(parameter)], parameter.requires_grad)
            groups.setdefault(kind, {})[name] = parameter
        segments = [
            _build_segment(f"{plan.name}:{dtype_name(dtype)}{'' if trainable else ':frozen'}", members, dtype, trainable, plan.name, context)
            for (dtype, trainable), members in groups.items()
        ]
        modules = {id(module) for _, module in plan.roots} or {id(module) for _, module in plan.owners}
        unit = Unit(index, plan.name, segments, cells, spans_one_module=len(modules) == 1, strict=context.strict)
        if cells.weight.is_sharded:
            unit.state = UnitState.RESTING
        for segment in segments:
            segment.detach() if cells.weight.is_sharded else segment.attach()
            segment.flat.window.publish()
        units.append(unit)
        return_freed_memory()  # of the original parameters
    return units


def _build_segment(
    key: str, members: dict[str, nn.Parameter], dtype: torch.dtype, trainable: bool, unit: str, context: Context
) -> Segment:
    cells = context.policy.cells(unit)
    parameters = list(members.values())
    layout = Layout.build([(name, tuple(p.shape)) for name, p in members.items()], context.transport.size)
    flat = FlatBuffer(
        key,
        layout,
        [memory_stride(p) for p in parameters],
        dtype=dtype,
        device=context.device,
        transport=context.transport,
        replicated=not cells.weight.is_sharded,
        streams=context.streams,
        meter=context.meter,
    )
    segment = Segment(list(members), parameters, flat, context.transport.rank)
    whole = not cells.optim.is_sharded
    if trainable:
        if context.trains:
            segment.make_master(whole=whole, dtype=context.precision.master, pages=context.pages)
        precision = context.precision.at(dtype)
        segment.grad = GradientPath(
            flat, cells, precision, transport=context.transport, streams=context.streams, meter=context.meter, pages=context.pages
        )
    context.prepare(parameters)
    segment.store([p.data for p in parameters], whole_master=whole)
    return segment
