"""The trainable parameters of an engine: where autograd's gradients of them go, and what the user
finds as their ``.grad``, or assigns to it.

Released parameters answer here what they refuse elsewhere (``DisableTorchFunctionSubclass``).

Gradient surgery, noise that is added to gradients and evolution strategies assign to ``.grad``:

    p.grad = t, then a backward    autograd adds to t, and the sum is reduced as any gradient is
    p.grad = t, then a step        t is the averaged gradient: each rank steps its slice of it

Both are what DistributedDataParallel makes of it. An assigned gradient stays the user's tensor and
stands on the parameter until a backward or ``zero_grad()`` takes it away: the step reads what it
holds then, and a clip scales it, too.

Invariant: a gradient assigned before a step is the same on every rank that has the parameter. The
ranks compare which ones are assigned with the step's decisions, and their digests right after (of
those assigned after the gradients were averaged: in the next step). Cost: nothing where none is
assigned; else one small exchange per step, and a copy and a digest of each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter

import torch
from torch import nn

from zeroshard.comm.ranks import Ranks
from zeroshard.core.digest import digest_of, holders
from zeroshard.errors import ConfigError, PlanMismatch, StateError
from zeroshard.optim.sealed import GradientOwner, SealedGrad, SealedShards
from zeroshard.runtime.bucket import Bucket
from zeroshard.runtime.decisions import Decisions
from zeroshard.runtime.segment import Segment
from zeroshard.runtime.unit import Unit
from zeroshard.state.local import gradient_taker

ASSIGNED = "the parameters with a .grad that was assigned by hand"


@dataclass(eq=False, slots=True)
class Trained:
    """A trainable parameter, and where its gradient goes."""

    unit: Unit
    segment: Segment
    bucket: Bucket
    index: int  # in the segment
    parameter: nn.Parameter
    to_local: Callable[[torch.Tensor], torch.Tensor] | None  # of a DTensor's gradients
    sealed: SealedGrad | None = None  # made once, and put on after every backward

    @property
    def name(self) -> str:
        """The parameter's qualified name."""
        return self.segment.names[self.index]

    def take(self) -> torch.Tensor:
        """Take its gradient, which is there, off and return it."""
        grad, self.parameter.grad = self.parameter.grad, None
        assert grad is not None, self.name
        return grad

    def local(self, grad: torch.Tensor) -> torch.Tensor:
        """Return what lies here of a gradient of it, without a graph. Raises ConfigError for a
        sparse one.
        """
        if grad.layout is not torch.strided:
            raise ConfigError(
                f"parameter {self.name!r} has a sparse gradient, which cannot be sharded: use"
                " sparse=False"
            )
        grad = grad.detach() if grad.requires_grad else grad
        return grad if self.to_local is None else self.to_local(grad)

    def make_sealed(self, owner: GradientOwner) -> SealedGrad:
        """Make its sealed gradient."""
        self.sealed = SealedGrad(self.parameter, self.name, owner, self.parameter)
        return self.sealed


def seal(trained: Iterable[Trained], owner: GradientOwner) -> None:
    """Give `trained` their sealed gradients, but for assigned ones."""
    with torch._C.DisableTorchFunctionSubclass():
        for one in trained:
            parameter, sealed = one.parameter, one.sealed
            grad = parameter.grad
            if grad is not None and type(grad) is not SealedGrad:
                continue
            if sealed is None or sealed.dtype is not parameter.dtype:
                sealed = one.make_sealed(owner)
            parameter.grad = sealed


class TrainableParameters(list[Trained]):
    """All trainable parameters of an engine, in the order of its units."""

    def __init__(self, units: Iterable[Unit]) -> None:
        super().__init__(
            Trained(
                unit,
                segment,
                bucket,
                index,
                parameter,
                gradient_taker(parameter, segment.names[index]),
            )
            for unit in units
            for segment, bucket in zip(unit.trainable, unit.buckets, strict=True)
            for index, parameter in enumerate(segment.parameters)
        )
        self._of = {id(one.parameter): one for one in self}
        self.ids = self._of.keys()  # of the parameters
        self.hides = False  # whether ``.grad`` is None where it would be sealed

    def of(self, parameter: nn.Parameter | None) -> Trained | None:
        """Return `parameter` with where its gradient goes, if the engine trains it."""
        return None if parameter is None else self._of.get(id(parameter))

    def used(self) -> list[Trained]:
        """Return those that have a gradient since the last drop."""
        return [one for one in self if one.bucket.used[one.index]]

    def clear_gradients(self, *, assigned: bool = True) -> None:
        """Take all gradients off, or leave those that the user has `assigned`."""
        with torch._C.DisableTorchFunctionSubclass():
            for one in self:
                grad = one.parameter.grad
                if grad is not None and (assigned or type(grad) is SealedGrad):
                    one.parameter.grad = None

    def scale_assigned(self, factor: float | torch.Tensor) -> None:
        """Multiply the gradients that the user has assigned by `factor`, in place."""
        if not isinstance(factor, float) or factor != 1.0:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                for one in self.assigned():
                    assert one.parameter.grad is not None, one.name
                    one.parameter.grad.mul_(factor)

    def seal(self, owner: GradientOwner) -> None:
        """Put sealed gradients on those that have one."""
        if not self.hides:
            seal(self.used(), owner)

    def assigned(self, units: Collection[Unit] | None = None) -> list[Trained]:
        """Return those in `units` (default: all) that have a gradient which no hook has taken."""
        with torch._C.DisableTorchFunctionSubclass():
            return [
                one
                for one in self
                if (grad := one.parameter.grad) is not None  # no call for each: there are many
                and type(grad) is not SealedGrad
                and (units is None or one.unit in units)
            ]

    def take_cleared(self, cleared: Collection[int]) -> list[Trained]:
        """Forget the gradients that the user has cleared, there or at the optimizer (`cleared`: ids
        of parameters), and return their parameters.
        """
        with torch._C.DisableTorchFunctionSubclass():
            gone = [
                one
                for one in self.used()
                if (one.parameter.grad is None and not self.hides) or id(one.parameter) in cleared
            ]
            for one in gone:
                if type(one.parameter.grad) is SealedGrad:  # else assigned after that
                    one.parameter.grad = None
        for bucket, cleared_here in groupby(gone, key=attrgetter("bucket")):
            bucket.clear([one.index for one in cleared_here])
        return gone


class FrozenParameters:
    """The parameters that the user has frozen, as the ranks compare them before a step."""

    def __init__(self, parameters: TrainableParameters) -> None:
        self._parameters = parameters
        self._stepped: list[tuple[str, nn.Parameter]] = []  # frozen, and given to the optimizer

    def attach(self, optimizer: SealedShards, segments: Iterable[Segment]) -> None:
        """Find those among the parameters of `segments` that `optimizer` was given."""
        stepped = set(map(id, chain(*optimizer.parameters)))
        self._stepped = [
            (name, parameter)
            for segment in segments
            for name, parameter in zip(segment.names, segment.parameters, strict=True)
            if segment.bucket is None and id(parameter) in stepped
        ]

    def note(self, decisions: Decisions) -> str:
        """Let the ranks compare those frozen since shard(), and those that carry a gradient, which
        the optimizer would step without an engine; return the names of these.
        """
        with torch._C.DisableTorchFunctionSubclass():
            frozen = [one for one in self._parameters if not one.parameter.requires_grad]
            names = ", ".join(name for name, one in self._stepped if one.grad is not None)
        if frozen:
            decisions.note_once("parameters frozen after shard()", names_of(frozen))
        if names:
            decisions.note("the frozen parameters with a .grad", names)
        return names


def names_of(trained: Sequence[Trained]) -> str:
    """Return the names of `trained` as text that ranks compare."""
    return ", ".join(one.name for one in trained)


class AssignedGradients:
    """The assigned gradients of one engine that a step is to take."""

    def __init__(
        self,
        parameters: TrainableParameters,
        decisions: Decisions,
        control: Ranks,
        *,
        seal: Callable[[], None],
    ) -> None:
        self._parameters, self._decisions, self._control = parameters, decisions, control
        self._seal = seal
        # of those that the step takes: the parameter, and the numbers that are here
        self._taken: list[tuple[Trained, torch.Tensor]] = []
        self._digests: dict[str, str] = {}  # not yet compared, by name of the parameter

    def _take(self, only: nn.Parameter | None = None) -> None:
        """Record the gradients that the user has assigned (for `only` alone, if given)."""
        self._taken = []
        with torch._C.DisableTorchFunctionSubclass():
            for one in self._parameters.assigned():
                if only is None or one.parameter is only:
                    assert one.parameter.grad is not None, one.name
                    self._taken.append((one, one.local(one.parameter.grad)))
        for one, numbers in self._taken:
            one.bucket.used[one.index] = True
            group = one.bucket.flat.context.holders.members[0]  # of ranks that have the parameter
            self._digests[one.name] = f"{group} {digest_of(numbers)}"
        if self._taken:
            self._decisions.note(ASSIGNED, names_of([one for one, _ in self._taken]))

    def replace_sums(self) -> bool:
        """Let the step take those that the user has assigned, in the place of what backwards have
        brought for these parameters; return whether there are any.
        """
        self._take()
        for one, _ in self._taken:
            one.bucket.zero([one.index])
            one.bucket.accumulator.open_empty()
        return bool(self._taken)

    def add_late(self, only: nn.Parameter | None) -> None:
        """Let those that were assigned since the ranks have agreed on the step (`only` that of one
        parameter) rest as averages, too. Raises StateError for one that is not finite.
        """
        self._take(only)
        for one, numbers in self._taken:
            if not torch.isfinite(numbers).all():
                raise StateError(
                    f"the gradient assigned to {one.name!r} holds NaN or infinity: assign"
                    " a finite one, or drop the step with zero_grad()"
                )
        self.store()

    def first_bad(self) -> str | None:
        """Return the segment of the first that is not finite."""
        bad = (one.bucket.key for one, numbers in self._taken if not torch.isfinite(numbers).all())
        return next(bad, None)

    def store(self) -> None:
        """Let those that the step takes rest as averages. Where nothing rests, zeros of no sum do
        beside one: whoever adds to an assigned gradient sets to zero first what rests of it.
        """
        taken, self._taken = self._taken, []
        with torch._C.DisableTorchFunctionSubclass():
            for one, numbers in taken:
                bucket, index = one.bucket, one.index
                bucket.accumulator.open_empty()
                flat = numbers.new_empty(numbers.numel())
                bucket.flat.buffer.view_in(flat, index).copy_(numbers)
                bucket.accumulator.store(index, flat)
        if taken:
            self._seal()

    def compare(self) -> None:
        """Raise PlanMismatch where ranks have assigned different gradients to one parameter.
        Collective; the ranks agree about the names.
        """
        digests, self._digests = self._digests, {}
        if not digests:
            return
        answers = self._control.share(digests, ASSIGNED)
        for name in digests:
            told = [answer[name].split() for answer in answers]
            if len({group for group, _ in told}) < len({tuple(one) for one in told}):
                raise PlanMismatch(
                    f"the .grad that was assigned to {name!r} differs between ranks"
                    f" ({holders([f'digest {digest}' for _, digest in told])}), and the step takes"
                    " it as it is: assign the same tensor on every rank, average it first with"
                    " torch.distributed.all_reduce(), or assign it before the backward, which"
                    " averages it"
                )

    def abandon(self) -> None:
        """After an exception: nothing is assigned."""
        self._taken, self._digests = [], {}
