"""What the data parallel groups of one mesh tell each other along its other axes.

The ranks of a group agree first, on their own. Then each meets its peers: the ranks with its place
among the data parallel ones, one of every group. Mesh (pp 2, dp 2)::

                  dp 0   dp 1
            pp 0   0 ---- 1      a group
                   |      |      peers: 0 and 2, 1 and 3
            pp 1   2 ---- 3      a group

Invariant: what a rank tells its peers is the same on every rank of its group, so all ranks of the
mesh come to one answer. Cost: one small exchange per call; none where a mesh has no other axes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch.distributed as dist

from zeroshard.comm.connect import make_control
from zeroshard.comm.gloo_peers import Subgroup
from zeroshard.comm.plain import gather_bytes
from zeroshard.comm.spec import CommSpec
from zeroshard.comm.transport import Traffic
from zeroshard.core.dims import MeshPlace
from zeroshard.core.placement import Mesh
from zeroshard.errors import PeerLostError, PlanMismatch, StallError, ZeroshardError

__all__ = ["OtherAxes", "ThroughGroups"]

_NOTHING: Mapping[str, str] = {}


class _Control(Protocol):
    """How peers meet: a control plane, or process groups while there is none."""

    def exchange(self, payload: bytes, call: str = "exchange()") -> list[bytes]: ...

    def check_peers(self, what: str) -> None: ...

    def give_up(self) -> None: ...

    def abandon(self) -> None: ...

    def close(self) -> None: ...


class ThroughGroups:
    """An exchange along several axes through the process group of each, the last one first, so
    that payloads come in the order of the mesh. Without groups: of this one rank.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup] = ()) -> None:
        self._groups = tuple(groups)

    def exchange(self, payload: bytes, call: str = "exchange()") -> list[bytes]:
        parts = [payload]
        for group in reversed(self._groups):
            packed = json.dumps([part.decode("latin-1") for part in parts]).encode()
            parts = [
                part.encode("latin-1")
                for answer in gather_bytes(group, packed)
                for part in json.loads(answer)
            ]
        return parts

    def check_peers(self, what: str) -> None: ...

    def give_up(self) -> None: ...

    def abandon(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Told:
    """What one rank tells its peers."""

    place: str
    stage: str
    error: str | None  # why its group goes no further
    common: dict[str, str]  # must be the same in every group
    alike: dict[str, str]  # must be the same in groups of one stage
    value: Any


class OtherAxes:
    """One rank's peers along the axes that are not data parallel. Every method is collective
    over the mesh.
    """

    def __init__(self, place: MeshPlace, size: int, control: _Control) -> None:
        self.place = place
        self.size = size  # the number of data parallel groups
        self._control = control

    @classmethod
    def none(cls) -> OtherAxes:
        """Return those of a mesh without other axes."""
        return cls(MeshPlace(), 1, ThroughGroups())

    def connected(self, spec: CommSpec, traffic: Traffic) -> OtherAxes:
        """Return the same with a control plane, whose bytes are counted in `traffic`."""
        if self.size == 1:
            return self
        own = dist.get_rank()
        told = self.share([secrets.token_hex(16), own], "shard()")
        members = tuple(rank for _, rank in told)
        subgroup = Subgroup(told[0][0], members.index(own), self.size, members)
        alone = replace(spec, mesh=Mesh(1, self.size))
        return OtherAxes(self.place, self.size, make_control(subgroup, alone, traffic))

    def share(
        self,
        value: Any,
        call: str,
        *,
        common: Mapping[str, str] = _NOTHING,
        alike: Mapping[str, str] = _NOTHING,
    ) -> list[Any]:
        """Return every group's `value` (anything JSON holds), in mesh order.

        Raises PlanMismatch where groups differ about what they have in `common`, or replicas
        about what must be `alike`, and where one has raised an error inside `telling`.
        """
        if self.size == 1:
            return [value]
        told = self._exchange(self._told(None, value, common, alike), call)
        for one in told:
            if one.error is not None:
                raise PlanMismatch(f"at {one.place} of the mesh: {one.error}")
        _refuse_difference([(one.place, one.common) for one in told], "along the mesh")
        for stage in dict.fromkeys(one.stage for one in told):
            replicas = [(one.place, one.alike) for one in told if one.stage == stage]
            _refuse_difference(replicas, "between replicas (plain parameters are alike along 'tp')")
        return [one.value for one in told]

    @contextmanager
    def telling(self, call: str) -> Iterator[None]:
        """Tell the peers, who are in `share`, an error of the body, on which this group agrees."""
        try:
            yield
        except (PeerLostError, StallError):
            raise  # who waits for us hears of it in the same way
        except ZeroshardError as error:
            if self.size > 1:
                with suppress(ZeroshardError):
                    self._exchange(self._told(str(error), None, _NOTHING, _NOTHING), call)
            raise

    def add(self, squares: float, call: str, *, common: Mapping[str, str]) -> float:
        """Return the sum of the groups' `squares`, in each of which replicas count where they are
        the first.
        """
        return float(sum(self.share(squares, call, common=common)))

    def check(self, during: str) -> None:
        """Raise PeerLostError where a peer is known to have ended. Never blocks."""
        self._control.check_peers(during)

    def name(self, what: str) -> str:
        """Return what other groups call `what` of this one; "" where it is nothing."""
        return f"{what} at {self.place.text}" if what and self.place.text else what

    def give_up(self) -> None:
        """After an exception: the waits of peers for this rank raise StateError. Never blocks."""
        self._control.give_up()

    def abandon(self) -> None:
        """`give_up`, meet the peers, who must come, too, and be usable again."""
        self._control.abandon()

    def close(self) -> None:
        """Release sockets and threads."""
        self._control.close()

    def _told(
        self, error: str | None, value: Any, common: Mapping[str, str], alike: Mapping[str, str]
    ) -> _Told:
        return _Told(self.place.text, self.place.stage, error, dict(common), dict(alike), value)

    def _exchange(self, told: _Told, call: str) -> list[_Told]:
        answers = self._control.exchange(json.dumps(vars(told)).encode(), call)
        return [_Told(**json.loads(answer)) for answer in answers]


def _refuse_difference(told: Sequence[tuple[str, Mapping[str, str]]], where: str) -> None:
    """Raise PlanMismatch about the first entry that is not the same everywhere."""
    for name in dict.fromkeys(name for _, entries in told for name in entries):
        by_value: dict[str, list[str]] = {}
        for place, entries in told:
            by_value.setdefault(entries.get(name, "nothing"), []).append(place)
        if len(by_value) > 1:
            shown = "; ".join(f"{' and '.join(at)}: {value}" for value, at in by_value.items())
            raise PlanMismatch(f"{name} differs {where} ({shown}): set it alike on every rank")
