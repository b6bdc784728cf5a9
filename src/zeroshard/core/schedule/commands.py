"""The commands of a schedule, and the words that its events use."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Literal, NamedTuple

Phase = Literal["forward", "backward", "read"]  # a read, outside a pass, is in no order
Key = tuple[int, int]  # of a reduce: unit, trained segment of the unit


class Op(IntEnum):
    """Operations on a unit's weights and (the last two) on the reduce of one of its segments."""

    START = 0  # start gathering
    WAIT = 1  # wait for the gather
    USE = 2  # compute reads the weights from here on
    ADVANCE = 3  # start the collective of a gather that began with a read of another tier
    RELEASE_ALL = 4  # give the gathered memory back, and what is kept for a backward
    RELEASE_FOR_BACKWARD = 5  # give it back, but for what the row keeps for a backward
    RELEASE_GATHERED = 6  # give it back; what an earlier forward has kept for its backward stays
    IDLE = 7  # no use is known, and another one may follow at once: it has to be noticed
    RESUME = 8  # the next use has come
    WAIT_REDUCE = 9
    POLL_REDUCE = 10  # take note where it is over


RELEASES = frozenset((Op.RELEASE_ALL, Op.RELEASE_FOR_BACKWARD, Op.RELEASE_GATHERED))


class Command(NamedTuple):
    """One entry of a schedule."""

    op: Op
    unit: int
    segment: int = 0  # of the unit: which reduce


Commands = Iterable[Command]  # some are decided as one iterates


class Until(IntEnum):
    """The time for which a unit is held that is used outside its modules, where no hook tells its
    end; the count of ``Use.DIRECT``.
    """

    FORWARD_ENDS = 1  # used without gradients
    BACKWARD_ENDS = 2  # used with gradients: until as many backwards as forwards have run
    STEP = 3  # left the model; a graph may refer to the weights that no hook announces
