"""Whole parameters, outside a pass: read, edited, loaded, saved, and their gradients.

All of it is collective and goes a unit at a time where it can: a ``full_state_dict`` never holds
more than one unit gathered.

Invariant: edits reach the weights at rest and the masters of every rank, or raise; they are never
lost in silence.
"""

from __future__ import annotations

import fnmatch
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.utils._pytree import tree_map

from zeroshard.comm.ranks import AlongAxes
from zeroshard.core.digest import digest_of
from zeroshard.core.placement import Part
from zeroshard.core.residency import UnitState, Use
from zeroshard.errors import ConfigError, StateError
from zeroshard.runtime.context import Context
from zeroshard.runtime.finalize import Finalizer
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.unit import Unit
from zeroshard.runtime.weights import Weights
from zeroshard.state.local import is_dtensor, local_of, point_at, whole_of
from zeroshard.state.state import State

_log = logging.getLogger("zeroshard")
_LOST = "parameter %r was written to while it was released: close() gives back what was trained"
_CALL = "engine.gathered(writeback=True)"
_LOAD = "load_state_dict()"
_SAME = (
    "Call load_state_dict() with the same state on every rank, or copy it on one of them inside"
    " engine.gathered(writeback=True)"
)


def saved_names(module: nn.Module) -> dict[str, str]:
    """Return the name in ``module.state_dict()`` of each parameter, persistent buffer and extra
    state by its own name, where modules have hooks that give others (as torch's CheckpointWrapper);
    nothing of a model without any. What a hook computes anew keeps its name, and what it takes out
    is left out.

    The hooks see tensors without numbers, since weights rest sharded.
    """
    if not any(child._state_dict_hooks for child in module.modules()):
        return {}
    places: dict[int, str] = {}

    def collect(child: nn.Module, prefix: str, state: dict[str, Any]) -> dict[str, Any]:
        buffers = {
            name: buffer
            for name, buffer in child._buffers.items()
            if name not in child._non_persistent_buffers_set
        }
        extra = {_EXTRA_STATE_KEY_SUFFIX: torch.empty(0)} if _has_extra_state(child) else {}
        for name, tensor in (*child._parameters.items(), *buffers.items(), *extra.items()):
            if tensor is not None:
                state[prefix + name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                places[id(state[prefix + name])] = prefix + name
                kept.append(state[prefix + name])
        for name, inner in child._modules.items():
            if inner is not None:
                state = collect(inner, f"{prefix}{name}.", state)
        for hook in child._state_dict_hooks.values():
            changed = hook(child, state, prefix, {})
            state = state if changed is None else changed
        return state

    kept: list[torch.Tensor] = []  # their ids are theirs alone
    state = collect(module, "", OrderedDict())
    moved = {places[id(value)]: name for name, value in state.items() if id(value) in places}
    return moved | {name: name for name in places.values() if name in state and name not in moved}


def _has_extra_state(module: nn.Module) -> bool:
    """Whether the class of `module` has a ``get_extra_state()`` of its own."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def extra_modules(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that have an extra state, by the name in ``module.state_dict()`` of what
    their ``get_extra_state()`` returns.
    """
    found = {
        f"{prefix}.{_EXTRA_STATE_KEY_SUFFIX}".removeprefix("."): child
        for prefix, child in module.named_modules(remove_duplicate=False)
        if _has_extra_state(child)
    }
    hooked = saved_names(module) if found else {}
    return {hooked.get(name, name): child for name, child in found.items()}


class Whole:
    """The whole parameters of one engine."""

    def __init__(
        self,
        module: nn.Module,
        weights: Weights,
        finalizer: Finalizer,
        context: Context,
        join_step: Callable[[], None],
    ) -> None:
        self._module = module
        self._weights = weights
        self._finalizer = finalizer
        self._transports = context.transports
        self._axes = context.axes
        self._others = context.mesh.others
        self._has_replicas = bool(self._others) and all(axis.alike for axis in self._others)
        self._faults = context.faults
        self._join_step = join_step  # returns when no step is under way

    @contextmanager
    def gathered(
        self,
        params: Iterable[nn.Parameter] | nn.Parameter | None = None,
        *,
        writeback: bool = False,
        discard: bool = False,
    ) -> Iterator[None]:
        """Hold full parameters (default: all) readable inside the context, collectively.

        With `writeback`, edits inside are kept: rank 0's, or the same on every rank; others raise
        StateError at the end. With `discard` each rank's edits are its own, until the end. Edits
        without either are lost and raise where they are seen.
        """
        units = self._units_of(params)
        if writeback or self._is_sharded:
            asked = {"writeback": str(writeback)} | {f"unit {one.name}": "whole" for one in units}
            self._transports.main.flat.control.agree(asked, "engine.gathered()")
        private = [unit.is_forgotten for unit in units]
        with self._held(units):
            for segment in (segment for unit in units for segment in unit.segments):
                segment.flat.buffer.mark_user_views()
            if not writeback:
                with ExitStack() as stack:
                    for unit, is_private in zip(units, private, strict=True):
                        if discard and not unit.is_lent:
                            if is_private:
                                stack.callback(self._weights.bring_to_rest, unit)
                            stack.enter_context(unit.writable(Use.USER, is_private=is_private))
                    yield
                return
            if lent := [unit.name for unit in units if unit.residency.has(Use.EDIT)]:
                raise StateError(
                    f"gathered(writeback=True) of unit {lent[0]!r} inside another one: edit in one"
                    " of them"
                )
            with self._lending_again([unit for unit in units if unit.is_lent]):
                with ExitStack() as stack:
                    copies = [stack.enter_context(unit.writable()) for unit in units]
                    values = _by_parameter(units, copies)
                    before = [digest_of(value) for value in values.values()]
                    yield
                    self._agree_on_edits(units, values, before)
                for unit, tensors in zip(units, copies, strict=True):
                    self.store_unit(unit, tensors, refresh=False)
                self._weights.refresh(units)

    @contextmanager
    def _lending_again(self, units: Sequence[Unit]) -> Iterator[None]:
        """Show `units`, which an outer context has lent for edits that are discarded, as they rest;
        lend them again at the end, with the numbers that they have then.
        """
        segments = [segment for unit in units for segment in unit.segments]
        lent = [segment.user_view.lent for segment in segments]
        for segment in segments:
            segment.user_view.attach(segment.flat.buffer.views)
        if units:
            self._weights.refresh(units)
        yield
        for segment, views in zip(segments, lent, strict=True):
            assert views is not None, segment.key
            torch._foreach_copy_(list(views), segment.flat.buffer.views)
            segment.user_view.lend(views)

    @property
    def _is_sharded(self) -> bool:
        """Whether ranks meet where weights are gathered."""
        return any(unit.cells.weight.is_sharded for unit in self._weights.units)

    @contextmanager
    def _held(self, units: Sequence[Unit]) -> Iterator[None]:
        """Gather `units`, as they rest, and hold them inside."""
        with self._weights.showing(units):
            try:
                for unit in units:
                    unit.residency.acquire(Use.USER)
                    self._weights.unshard(unit, "read")
                self._agree_on_reads(segment for unit in units for segment in unit.segments)
                yield
            finally:
                for unit in units:
                    unit.residency.release(Use.USER)
                    self._weights.release_unused(unit)

    def _agree_on_reads(self, segments: Iterable[Segment]) -> None:
        """Raise StorageError on every rank where one of them could not read weights."""
        if any(segment.flat.reads_first for segment in segments):
            self._faults.agree()

    def _read(
        self, read: Callable[[], torch.Tensor], numel: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return what `read` gives [numel]; NaN where a storage fails, which is noted."""
        found: list[torch.Tensor] = []
        with self._faults.noted():
            found.append(read())
        if not found:
            found.append(torch.full((numel,), float("nan"), dtype=dtype, device=device))
        return found[0]

    def _copy_of(self, state: State, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """Return a copy of elements [start, stop) of a state at rest, as `_read` does."""

        def read() -> torch.Tensor:
            with state.borrowed(start, stop, write=False) as there:
                return there.to(device, copy=True)

        return self._read(read, stop - start, state.dtype, device)

    def _keep_edits(
        self, units: Sequence[Unit], values: dict[str, torch.Tensor], before: list[str]
    ) -> dict[str, bool]:
        """Bring the edits of `values` of `units` by the first rank that has them to the others,
        and return by name whether only some of several made them; raise when another rank made
        edits of its own.
        """
        control = self._transports.main.flat.control
        segments = [segment for unit in units for segment in unit.segments]
        contexts = {name: one.flat.context for one in segments for name in one.names}
        after = [digest_of(value) for value in values.values()]
        edited_here = [a != b for a, b in zip(after, before, strict=True)]
        answers, changed = zip(*control.share([after, edited_here], _CALL), strict=True)
        edits: dict[str, bool] = {}
        for position, (name, value) in enumerate(values.items()):
            context = contexts[name]
            for group in context.holders.groups:
                digest = answers[group[0]][position]
                others = [rank for rank in group if answers[rank][position] != digest]
                rivals = [rank for rank in others if changed[rank][position]]
                if rivals:
                    raise StateError(
                        f"parameter {name!r} was edited differently on ranks {group[0]} and"
                        f" {rivals}: edit on rank {group[0]} alone, or the same on every rank"
                    )
                if group != context.holders.members:
                    continue
                if others:
                    context.transport.broadcast(value, 0)
                edited = [bool(changed[rank][position]) for rank in group]
                if any(edited):
                    edits[name] = not all(edited)
        return edits

    def _agree_on_edits(
        self, units: Sequence[Unit], values: dict[str, torch.Tensor], before: list[str]
    ) -> None:
        """`_keep_edits`, and raise where replicas along the mesh have not edited alike.

        Where other ranks have other parameters, groups edit on their own and are not asked.
        """
        if not self._has_replicas:
            self._keep_edits(units, values, before)
            return
        parts = _parts_of(units)
        with self._axes.together(_CALL) as meeting:
            edits = self._keep_edits(units, values, before)
            meeting.give(edits)
            alike = {
                f"parameter {name}": digest_of(value)
                for name, value in values.items()
                if not parts[name].axes
            }
            meeting.compare(alike, self._axes.replicas)
        for name in (name for name in values if parts[name].axes):
            by_one = [one[name] for one in meeting.answers if name in one]
            if any(by_one) and len(by_one) < len(meeting.answers):
                raise StateError(
                    f"parameter {name!r} is a DTensor and was edited on one rank alone, which has a"
                    " part of it: edit it on every rank"
                )

    def load_unit(self, unit: Unit, copies: list[torch.Tensor]) -> None:
        """Write what ``load_state_dict()`` has left in `copies`; raises PlanMismatch on every rank
        where ranks with the same parameters have loaded other numbers.
        """
        values = _by_parameter([unit], [copies])
        loaded = {f"the numbers of {name}": digest_of(value) for name, value in values.items()}
        within = {
            f"the numbers of {name}": segment.flat.context.holders.groups
            for segment in unit.segments
            for name in segment.names
            if segment.flat.context.holders.differ
        }
        axes = self._axes if self._has_replicas else AlongAxes()
        control = self._transports.main.flat.control
        with axes.together(_LOAD) as meeting:
            control.agree(loaded, _LOAD, remedy=_SAME, within=within)
            parts = zip(loaded, _parts_of([unit]).values(), strict=True)
            alike = {one: loaded[one] for one, part in parts if not part.axes}
            meeting.compare(alike, axes.replicas)
        self.store_unit(unit, copies)

    def store_unit(self, unit: Unit, copies: list[torch.Tensor], *, refresh: bool = True) -> None:
        """Write copies of the weights, which the user has edited, into the weights at rest and the
        masters, on every rank; raises StorageError on every rank.

        Elements that have not been edited keep the digits of their masters.
        """
        self._join_step()
        self._transports.begin_write()
        for segment, copy in zip(unit.segments, copies, strict=True):
            with self._faults.noted(lost=True):
                segment.store(segment.flat.buffer.views_of(copy), edits=True)
            segment.flat.publish_everywhere()
        self._faults.agree()
        if refresh:
            self._weights.refresh([unit])

    def full_state_dict(
        self,
        *,
        rank0_only: bool = True,
        names: str | Iterable[str] | None = None,
        trained: bool = False,
    ) -> dict[str, Any]:
        """Return the model's ``state_dict()``, or the entries that are asked for, on CPU; see
        Engine.full_state_dict. Of parameters with a mesh of their own it has this rank's; the first
        of each group of ranks that hold the same has them.
        """
        state = self._chosen(names, trained)
        is_first = any(levels.flat.rank == 0 for levels in self._transports)
        keep = not rank0_only or (is_first and self._axes.place.is_first)
        chosen = {id(tensor) for tensor in state.values()}
        values: dict[int, torch.Tensor] = {}
        for unit in self._weights.units:
            for parameter, local in self._reading(unit, chosen):
                if keep or is_dtensor(parameter):  # all its ranks take part
                    whole = whole_of(parameter, local)
                if keep:
                    values[id(parameter)] = whole.detach().to("cpu", copy=True)
        # on every rank, since all ranks of a DTensor take part
        buffers = {id(b): whole_of(b) for b in self._module.buffers() if id(b) in chosen}
        extra = {
            id(one): tree_map(_copied, one.get_extra_state())
            for one in state.values()
            if isinstance(one, nn.Module)
        }
        if not keep:
            return {}
        out: dict[str, Any] = {}
        for name, tensor in state.items():
            if isinstance(tensor, nn.Parameter):
                out[name] = values[id(tensor)]
            elif isinstance(tensor, nn.Module):
                out[name] = extra[id(tensor)]
            else:
                out[name] = buffers[id(tensor)].detach().to("cpu", copy=True)
        return out

    def _chosen(
        self, names: str | Iterable[str] | None, trained: bool
    ) -> dict[str, torch.Tensor | nn.Module]:
        """Return the parameters and buffers that are asked for, and the modules that are
        asked for extra state, by every name that a state_dict has. Raises ConfigError for a pattern
        that matches none, PlanMismatch where ranks ask for others.
        """
        state: dict[str, torch.Tensor | nn.Module] = {}
        for prefix, module in self._module.named_modules(remove_duplicate=False):
            dot = f"{prefix}." if prefix else ""
            for name, parameter in module._parameters.items():
                if parameter is not None and (parameter.requires_grad or not trained):
                    state[dot + name] = parameter
            for name, buffer in module._buffers.items() if not trained else ():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    state[dot + name] = buffer
            if _has_extra_state(module) and not trained:
                state[dot + _EXTRA_STATE_KEY_SUFFIX] = module
        if hooked := saved_names(self._module):
            state = {there: state[name] for name, there in hooked.items() if name in state}
        is_all = names is None and not trained
        if is_all and not self._is_sharded:
            return state
        patterns = [names] if isinstance(names, str) else list(names or ("*",))
        unmatched = [one for one in patterns if not fnmatch.filter(state, one)]
        error = None
        if unmatched and all(axis.alike for axis in self._others):  # else another stage has it
            what = "trained parameter" if trained else "name"
            error = ConfigError(
                f"names: {unmatched[0]!r} matches no {what} of the {type(self._module).__name__}'s"
                " state_dict(); a pattern is a whole name, or has a * in it"
            )
        asked = {"names": str(names and patterns), "trained": str(trained)}
        call = "engine.full_state_dict()"
        self._transports.main.flat.control.agree(asked, call, error=error)
        return {
            name: tensor
            for name, tensor in state.items()
            if any(fnmatch.fnmatchcase(name, one) for one in patterns)
        }

    def _reading(self, unit: Unit, chosen: set[int]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield the parameters of `unit` that are `chosen`, by id, and their weights, whole over
        the data parallel ranks, each valid until the next. Where not all are and the unit rests
        sharded, their segments alone are gathered: an adapter, and not the base beside it.
        """
        wanted = [
            segment
            for segment in unit.segments
            if not chosen.isdisjoint(map(id, segment.parameters))
        ]
        if not wanted:
            return
        if len(wanted) < len(unit.segments) and unit.residency.traits.is_sharded:
            for segment in wanted:
                views = self._weights_at_rest(segment)
                for parameter, view in zip(segment.parameters, views, strict=True):
                    if id(parameter) in chosen:
                        yield parameter, view
            return
        with self._held([unit]):
            for parameter in (p for segment in wanted for p in segment.parameters):
                if id(parameter) in chosen:
                    yield parameter, local_of(parameter)

    def _weights_at_rest(self, segment: Segment) -> list[torch.Tensor]:
        """Return the weights of a segment that rests sharded [each parameter's shape], as they
        rest. Collective.
        """
        flat = segment.flat
        segment.wait_uploads()
        low, high = (edge - flat.rest_span[0] for edge in flat.own_span)
        own = self._copy_of(flat.rest, low, high, flat.full.device)
        whole = self._gather_own(f"{segment.key}.weight", segment, own)
        self._agree_on_reads([segment])
        return flat.buffer.views_of(whole)

    def full_grad(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return the averaged gradient of `param` [its shape, whole of a DTensor] on every rank,
        or None where no rank used it. Collective.
        """
        segment, index = self.find(param)
        bucket = segment.bucket
        if bucket is None:
            return None
        self._finalizer.finalize(param)
        if not bucket.used[index]:
            return None
        flat = segment.flat
        if not self._steps_whole(segment):
            asked = {"parameter": segment.names[index]}
            self._transports.main.flat.control.agree(asked, "engine.full_grad()")
        resting = bucket.accumulator.resting()
        numel = flat.stepped[1] - flat.stepped[0]
        dtype, device = bucket.precision.accumulate, flat.full.device
        if resting is None:
            held = torch.zeros(numel, dtype=dtype, device=device)
        else:
            held = self._read(partial(resting.fetch, 0, numel), numel, dtype, device)
        whole = self._gather(f"{segment.key}.full_grad", segment, held)
        self._faults.agree()
        local = flat.buffer.views_of(whole)[index].clone()
        return whole_of(segment.parameters[index], local)

    def restore_plain(self) -> None:
        """Give every parameter whole memory of its own, in the dtype it came in. Collective; no
        unit can be gathered afterwards.
        """
        with self._weights.showing(self._weights.units):
            for unit in self._weights.units:
                if (lost := unit.forget_writes()) is not None:
                    _log.warning(_LOST, lost)
                # masters are gathered without the weights
                is_gathered = not (
                    unit.residency.state is UnitState.RESTING
                    and all(_is_in_master(segment) for segment in unit.segments)
                )
                if is_gathered:
                    self._weights.unshard(unit, "read")
                for segment in unit.segments:
                    self._restore_plain(segment)
                    if is_gathered:
                        segment.flat.context.meter.remove(segment.flat.full_bytes)
                        segment.flat.buffer.release()

    def _restore_plain(self, segment: Segment) -> None:
        segment.user_view.answer(released=False)
        if not _is_in_master(segment):
            values = [local_of(parameter).data for parameter in segment.parameters]
        else:
            master, flat = segment.master, segment.flat
            assert master is not None
            here = master.tensor if master.on_device else None
            if here is None:
                here = self._copy_of(master, 0, master.numel, flat.full.device)
            whole = self._gather(f"{segment.key}.master", segment, here)
            values = flat.buffer.views_of(whole)
        for parameter, value, dtype in zip(segment.parameters, values, segment.given, strict=True):
            point_at(parameter, torch.empty_like(value, dtype=dtype).copy_(value))
            del parameter.grad

    def _gather(self, key: str, segment: Segment, local: torch.Tensor) -> torch.Tensor:
        """Return every rank's slice of what `local`, of the range that this rank steps, is here;
        `local` itself where that is everything.
        """
        if self._steps_whole(segment):
            return local
        start = segment.flat.stepped[0]
        low, high = segment.flat.own_span
        return self._gather_own(key, segment, local[low - start : high - start])

    def _steps_whole(self, segment: Segment) -> bool:
        """Whether every rank steps all of a segment."""
        assert segment.bucket is not None, segment.key
        # not as many elements: one rank may own all of them
        return len(segment.bucket.accumulator.members) == segment.flat.layout.num_shards

    def _gather_own(self, key: str, segment: Segment, own: torch.Tensor) -> torch.Tensor:
        """Return [numel] of all ranks' slices; `own` is this one's."""
        layout, levels = segment.flat.layout, segment.flat.context.levels
        out = torch.empty(layout.numel, dtype=own.dtype, device=own.device)
        for begin in levels.gathers(levels.axes, key, own, layout.ranges, out):
            if (work := begin()) is not None:
                work.wait()
        return out

    def find(self, parameter: nn.Parameter) -> tuple[Segment, int]:
        """Return the segment of `parameter` and its index there. Raises ConfigError."""
        for unit in self._weights.units:
            for segment in unit.segments:
                for index, other in enumerate(segment.parameters):
                    if other is parameter:
                        return segment, index
        raise ConfigError(
            f"a parameter of shape {tuple(parameter.shape)} is not one of this model's"
        )

    def _units_of(self, params: Iterable[nn.Parameter] | nn.Parameter | None) -> list[Unit]:
        if params is None:
            return list(self._weights.units)
        unit_of = {
            id(p): unit for unit in self._weights.units for s in unit.segments for p in s.parameters
        }
        wanted = [params] if isinstance(params, nn.Parameter) else list(params)
        for parameter in wanted:
            if id(parameter) not in unit_of:
                self.find(parameter)  # raises
        indices = {unit_of[id(parameter)].index for parameter in wanted}
        return [self._weights.units[index] for index in sorted(indices)]


def _is_in_master(segment: Segment) -> bool:
    """Whether the masters of a segment hold other numbers than its weights."""
    master = segment.master
    return master is not None and (master.dtype is not segment.flat.dtype or segment.lags)


def _parts_of(units: Sequence[Unit]) -> dict[str, Part]:
    """Return which part of each parameter of `units` is here, by name."""
    segments = [segment for unit in units for segment in unit.segments]
    return {
        name: part
        for segment in segments
        for name, part in zip(segment.names, segment.parts, strict=True)
    }


def _by_parameter(
    units: Sequence[Unit], copies: Sequence[Sequence[torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Return every parameter's own part [numel] of the flat `copies` (per unit, one per
    segment), by name.
    """
    parts = {}
    for unit, tensors in zip(units, copies, strict=True):
        for segment, flat in zip(unit.segments, tensors, strict=True):
            for name, slot in zip(segment.names, segment.flat.layout.slots, strict=True):
                parts[name] = flat[slot.offset : slot.stop]
    return parts


def _copied(value: Any) -> Any:
    """Return a copy of a part of an extra state, of a tensor on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    return deepcopy(value)
