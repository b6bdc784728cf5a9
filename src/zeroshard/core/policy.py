"""The table of policies: where each state rests, for every stage of ZeRO and its relatives.

ZeRO, section 5: P_os (zero1), P_os+g (zero2), P_os+g+p (zero3); ZeRO++, section 3.2: hpz; MiCS,
section 3: mics. `between` is the weight between a unit's forward and its backward; `grad` is the
gradient between micro-batches; `optim` is the master and the moments.

Invariant: an invalid policy cannot be built. ``bytes_at_rest`` (ZeRO, section 3.1 and figure 1),
``wire_bytes`` (ZeRO, section 7) and ``routes`` (core/route) serve planner, tests and engine.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from zeroshard.core.placement import Cell, Cells, Mesh, Placement, Scope, Tier
from zeroshard.core.route import Routes, routes
from zeroshard.core.wire import Formats, WireBytes, Wires, step_bytes

if TYPE_CHECKING:
    from zeroshard.core.precision import Precision

RestPoint = Literal["after_step", "between_micro_batches"]


@dataclass(frozen=True)
class RestBytes:
    """Bytes per rank at rest, by state."""

    weight: float
    master: float
    grad: float
    optimizer: float

    @property
    def total(self) -> float:
        """The bytes of all states."""
        return self.weight + self.master + self.grad + self.optimizer


@dataclass(frozen=True)
class Policy:
    """A row of the table. `units` overrides the cells of single units by name."""

    name: str
    default: Cells
    units: dict[str, Cells] = field(default_factory=dict, hash=False)

    def tiered(self, weight: Tier, grad: Tier, optim: Tier) -> Policy:
        """Return this row with its states on other tiers. Raises ValueError with the reason."""

        def moved(cells: Cells) -> Cells:
            parts = {"weight": weight, "grad": grad, "optim": optim}
            tiered = {
                name: replace(getattr(cells, name), tier=tier) for name, tier in parts.items()
            }
            return replace(cells, **tiered)

        units = {name: moved(cells) for name, cells in self.units.items()}
        return Policy(self.name, moved(self.default), units)

    def with_whole_gradients(self, units: Iterable[str]) -> Policy:
        """Return this row with the gradients of `units` whole between micro-batches, as in
        ``zero1``: partial sums, reduced once.
        """
        changed = dict(self.units)
        for name in units:
            cells = self.cells(name)
            whole = replace(cells.grad, node=Placement.PARTIAL, local=Placement.PARTIAL)
            changed[name] = replace(cells, grad=whole)
        return Policy(self.name, self.default, changed)

    @property
    def all_cells(self) -> tuple[Cells, ...]:
        """The default cells, and the cells of single units."""
        return (self.default, *self.units.values())

    @property
    def keeps_columns(self) -> bool:
        """Whether any state rests as one node's ranks together hold it."""
        return any(
            Scope.NODE_SHARD in (c.weight.scope, c.between.scope, c.grad.scope, c.optim.scope)
            for c in self.all_cells
        )

    @property
    def sums_nodes(self) -> bool:
        """Whether gradients rest as sums of one node's ranks."""
        grads = [cells.grad for cells in self.all_cells]
        return any(grad.is_partial and grad.scope is Scope.NODE_SHARD for grad in grads)

    @property
    def weights_leave_the_device(self) -> bool:
        """Whether any unit's weights rest on another tier."""
        return any(cells.weight.tier is not Tier.DEVICE for cells in self.all_cells)

    def cells(self, unit: str = "") -> Cells:
        """Return where the states of `unit` rest."""
        return self.units.get(unit, self.default)

    def bytes_at_rest(
        self,
        point: RestPoint,
        *,
        numel: int,
        mesh: Mesh,
        precision: Precision,
        moment_bytes: int = 8,
        unit: str = "",
    ) -> RestBytes:
        """Return the bytes per rank of `numel` trained parameters, padding excluded.

        `point` is "after_step" (and zero_grad) or "between_micro_batches" (inside ``no_sync``);
        `moment_bytes` is what the optimizer keeps per parameter (8 for Adam). Weights are their own
        masters in fp32 where both rest on one tier (and no update is late).
        """
        cells = self.cells(unit)
        is_master = precision.weight_is_master and cells.weight.tier is cells.optim.tier
        stepped = numel / cells.optim.num_shards(mesh)
        grad = numel / cells.grad.num_shards(mesh) * precision.accumulate.itemsize
        return RestBytes(
            weight=numel / cells.weight.num_shards(mesh) * precision.compute.itemsize,
            master=0.0 if is_master else stepped * precision.master_bytes,
            grad=grad if point == "between_micro_batches" else 0.0,
            optimizer=stepped * moment_bytes,
        )

    def wire_bytes(
        self,
        *,
        numel: int,
        mesh: Mesh,
        wires: Wires,
        micro_batches: int = 1,
        no_sync: bool = False,
        two_level: bool | None = None,
        unit: str = "",
    ) -> WireBytes:
        """Return ``core.wire.step_bytes`` of `unit`'s `numel` parameters."""
        return step_bytes(
            self.cells(unit),
            numel=numel,
            mesh=mesh,
            wires=wires,
            micro_batches=micro_batches,
            no_sync=no_sync,
            two_level=two_level,
        )

    def routes(
        self, mesh: Mesh, formats: Formats, *, two_level: bool | None = None, unit: str = ""
    ) -> Routes:
        """Return the routes between the cells of `unit`; see ``core.route.routes``."""
        cells, node_sums = self.cells(unit), self.sums_nodes
        return routes(cells, mesh, formats, two_level=two_level, node_sums=node_sums)


def _row(name: str, weight: str, between: str, grad: str, optim: str) -> Policy:
    return Policy(name, Cells(*(Cell.parse(text) for text in (weight, between, grad, optim))))


ROWS: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        #    row          weight  between  grad    optim
        _row("ddp", "R R", "R R", "P P", "R R"),
        _row("zero1", "R R", "R R", "P P", "S S"),
        _row("zero2", "R R", "R R", "S S", "S S"),
        _row("zero3", "S S", "S S", "S S", "S S"),
        _row("zero3-keep", "S S", "R R", "S S", "S S"),
        _row("hpz", "S S", "R S", "S S", "S S"),
        _row("mics", "R S", "R S", "P S", "R S"),
        _row("hfsdp", "R S", "R S", "P S", "S S"),
    )
}

STAGES: dict[int, str] = {0: "ddp", 1: "zero1", 2: "zero2", 3: "zero3"}


def row(name: str) -> Policy:
    """Return the row called `name`; raises ValueError naming the nearest one."""
    if name not in ROWS:
        near = difflib.get_close_matches(name, ROWS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"policy {name!r} is not a row of the table ({', '.join(ROWS)}){hint}")
    return ROWS[name]
