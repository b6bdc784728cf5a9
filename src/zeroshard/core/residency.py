"""Why the weights of one unit are here, and how far their gather is.

    RESTING --START--> GATHERING --WAIT--> FULL --RELEASE--> RESTING

A unit stays gathered while anything uses it (`Use`). One that nothing uses may still be here: it
is *dozing* where its next use is expected soon, *ahead* where it was gathered for a use that has
not come (core/schedule). Torch is not imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

__all__ = ["Residency", "Traits", "UnitState", "Use"]


class UnitState(Enum):
    """Where the weights of a unit are."""

    RESTING = "resting"
    GATHERING = "gathering"
    FULL = "full"


class Use(IntEnum):
    """Why a unit has to be here."""

    FORWARD = 0  # forwards of its modules are under way
    BACKWARD = 1  # the backward of a forward has come to it; counted once
    DIRECT = 2  # something outside its modules has used it
    USER = 3  # gathered(), or a load
    SCHEDULE = 4  # a pipeline's schedule holds its stage, or accumulate() a section


@dataclass(frozen=True)
class Traits:
    """What decisions about a unit depend on, which does not change."""

    full_bytes: int  # that gathering takes beyond what rests, and a release gives back
    nominal_bytes: int  # of all of its weights, wherever they are
    is_sharded: bool = True  # its weights rest sharded
    is_kept: bool = False  # ... and stay gathered between forward and backward
    is_published: bool = False  # its weights rest whole, its optimizer state sharded
    reads_first: bool = False  # a gather begins with a read of another tier
    spans_one_module: bool = True  # one module's forward is all that needs it


class Residency:
    """The state of one unit's weights and their uses; the schedule moves it."""

    __slots__ = ("_uses", "index", "is_dozing", "state", "traits")

    def __init__(self, index: int, traits: Traits) -> None:
        self.index = index
        self.traits = traits
        self.is_dozing = False  # gathered, and in no use that is known
        self.state = UnitState.RESTING if traits.is_sharded else UnitState.FULL
        self._uses = [0] * len(Use)

    def acquire(self, use: Use) -> None:
        """Note a use of the weights; the caller has them gathered."""
        if use is not Use.BACKWARD or not self._uses[use]:
            self._uses[use] += 1

    def release(self, use: Use) -> None:
        """Note the end of a use."""
        self._uses[use] = max(0, self._uses[use] - 1)

    @property
    def in_use(self) -> bool:
        """Whether anything uses the weights."""
        return any(self._uses)

    @property
    def in_backward(self) -> bool:
        """Whether a backward has come to the unit and is not over."""
        return self._uses[Use.BACKWARD] > 0

    @property
    def is_held(self) -> bool:
        """Whether anything but a backward uses the weights."""
        uses = self._uses
        return bool(uses[Use.FORWARD] or uses[Use.DIRECT] or uses[Use.USER] or uses[Use.SCHEDULE])

    @property
    def is_used_directly(self) -> bool:
        """Whether something outside its modules has used the unit, and it is held for that."""
        return self._uses[Use.DIRECT] > 0

    def reset(self) -> None:
        """Rest, in no use, after an exception."""
        self.state = UnitState.RESTING
        self.is_dozing = False
        self._uses = [0] * len(Use)
