"""The reasons for which the weights of one unit are here, and the state of their gather.

    RESTING --START--> GATHERING --WAIT--> FULL --RELEASE--> RESTING

A unit stays gathered while anything uses it. One that nothing uses may still be here, for a use
that is expected. All reasons are counts of one list, by `Use`; nothing beside it says why a unit is
gathered. Torch is not imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

from zeroshard.core.placement import Cells


class UnitState(Enum):
    """The state of the weights of a unit."""

    RESTING = "resting"
    GATHERING = "gathering"
    FULL = "full"


class Use(IntEnum):
    """The reasons for which a unit is here, or will be. From EARLY on it is in no use, and may be
    released.
    """

    FORWARD = 0  # forwards of its modules are under way
    BACKWARD = 1  # the backward of a forward has come to it; counted once
    DIRECT = 2  # something outside its modules has used it; the count is an `Until`
    USER = 3  # gathered(), or a load
    EDIT = 4  # its parameters are copies that the user may edit
    SECTION = 5  # accumulate() runs all micro-batches through its section
    STAGE = 6  # a pipeline's schedule holds its stage
    EARLY = 7  # gathered before it is needed; the count is a number in order of these gathers
    IDLE = 8  # its module has run, and another use may follow at once
    KEPT = 9  # the row keeps it whole from its forward to its backward
    # expected, whether the weights are here meanwhile or not; a step ends both
    FOLLOWED = 10  # forwards that a backward follows, which is not over
    REPEATED = 11  # forwards inside reentrant checkpoints, which run again in a backward


_ONCE = (Use.BACKWARD, Use.DIRECT)
_NONE_KEPT = (0,) * (Use.FOLLOWED - Use.EARLY)
_NONE_EXPECTED = (0,) * (len(Use) - Use.FOLLOWED)


@dataclass(frozen=True)
class UnitTraits:
    """The constants on which decisions about a unit depend."""

    full_bytes: int  # that gathering takes beyond what rests, and a release gives back
    nominal_bytes: int  # of all of its weights, wherever they are
    is_sharded: bool = True  # its weights rest sharded
    is_kept: bool = False  # ... and stay gathered between forward and backward
    is_published: bool = False  # its weights rest whole, its optimizer state sharded
    reads_first: bool = False  # a gather begins with a read of another tier
    spans_one_module: bool = True  # one module's forward is all that needs it

    @classmethod
    def of(
        cls,
        cells: Cells,
        full_bytes: int,
        nominal_bytes: int,
        *,
        reads_first: bool = False,
        spans_one_module: bool = True,
    ) -> UnitTraits:
        """Return the traits of a unit with states that move between `cells`."""
        is_sharded = cells.weight.is_sharded
        return cls(
            full_bytes,
            nominal_bytes,
            is_sharded=is_sharded,
            is_kept=is_sharded and not cells.between.is_sharded,
            is_published=cells.optim.is_sharded and not is_sharded,
            reads_first=reads_first,
            spans_one_module=spans_one_module,
        )


class Residency:
    """The state of one unit's weights, and the reasons for it; the schedule moves it."""

    __slots__ = ("counts", "index", "state", "traits")

    def __init__(self, index: int, traits: UnitTraits) -> None:
        self.index = index
        self.traits = traits
        self.state = UnitState.RESTING if traits.is_sharded else UnitState.FULL
        self.counts = [0] * len(Use)  # of uses, by kind

    def acquire(self, use: Use) -> None:
        """Note a use of the weights; the caller has them gathered, but where a use is expected."""
        if use not in _ONCE or not self.counts[use]:
            self.counts[use] += 1

    def release(self, use: Use) -> None:
        """Note the end of a use."""
        self.counts[use] = 0 if use in _ONCE else max(0, self.counts[use] - 1)

    def has(self, use: Use) -> bool:
        """Whether the unit is here for `use`."""
        return self.counts[use] > 0

    @property
    def in_use(self) -> bool:
        """Whether anything uses the weights."""
        return any(self.counts[: Use.EARLY])

    @property
    def is_held(self) -> bool:
        """Whether anything but a backward uses the weights."""
        return self.counts[Use.FORWARD] > 0 or any(self.counts[Use.DIRECT : Use.EARLY])

    @property
    def is_idle(self) -> bool:
        """Whether its module has run: another use has to be noticed."""
        return self.counts[Use.IDLE] > 0 or self.counts[Use.KEPT] > 0

    def rest(self) -> None:
        """The weights are released."""
        self.state = UnitState.RESTING
        self.counts[Use.EARLY : Use.FOLLOWED] = _NONE_KEPT

    def end_step(self) -> None:
        """The weights have changed: nothing of an earlier forward can follow."""
        self.counts[Use.FOLLOWED :] = _NONE_EXPECTED

    def reset(self) -> None:
        """Rest, in no use and with none expected, after an exception."""
        self.state = UnitState.RESTING
        self.counts = [0] * len(Use)
