"""The part of a schedule that is about gradients: which reduces are under way, and which of them
are waited for.
"""

from __future__ import annotations

from zeroshard.core.schedule.commands import Command, Commands, Key, Op
from zeroshard.core.schedule.rules import MAX_FLUSHING, Allowance, Rules


class Reduces:
    """The reduces of one engine that are under way, oldest first: nothing looks through all units
    for what is over.
    """

    def __init__(self, rules: Rules, room: Allowance) -> None:
        self._rules, self._room = rules, room
        # oldest first; whether the sum rests on another tier
        self.under_way: dict[Key, bool] = {}

    def make_room(self, num_bytes: int) -> Commands:
        """Wait for reduces under way, oldest first, until `num_bytes` fit the budget."""
        rules = self._rules
        for key in list(self.under_way) if rules.waits_for_room and rules.budget_bytes else ():
            if num_bytes <= self._room.left:
                return
            yield Command(Op.WAIT_REDUCE, *key)
            self.over(key)

    def before(self, key: Key) -> Commands:
        """Wait for the reduce of the same segment that is under way: they complete in order."""
        if key in self.under_way:
            yield Command(Op.WAIT_REDUCE, *key)
            self.over(key)

    def start(self, key: Key, *, off_device: bool = False) -> None:
        """A reduce has been started; `off_device`: its sum rests on another tier."""
        self.under_way[key] = off_device

    def over(self, key: Key) -> None:
        """A reduce is over, and its bucket is free."""
        self.under_way.pop(key, None)

    def handed_over(self) -> Commands:
        """The gradients of a unit have been handed over: note which sums are over.

        Where gathers are ordered, of sums that rest on another tier two stay under way: the others
        would wait on the device for the end of the pass. Not those that stay on the device: a wait
        gives a buffer back, and what fits beside it is gathered ahead on every rank or on none.
        """
        if not self._rules.ordered:
            for key in list(self.under_way):
                yield Command(Op.POLL_REDUCE, *key)
            return
        op = Op.WAIT_REDUCE if self._rules.waits_for_room else Op.POLL_REDUCE
        if True not in self.under_way.values():
            return
        leaving = [key for key, off_device in self.under_way.items() if off_device]
        for key in leaving[:-MAX_FLUSHING]:
            yield Command(op, *key)
            if op is Op.WAIT_REDUCE:
                self.over(key)
            elif key in self.under_way:
                return  # its other parts have not come, perhaps, and nobody waits for them

    def finish(self) -> Commands:
        """Wait for every reduce under way, in the order in which they were started: the last wait
        then covers those before it.
        """
        for key in list(self.under_way):
            yield Command(Op.WAIT_REDUCE, *key)
            self.over(key)

    def reset(self) -> None:
        """Nothing is under way."""
        self.under_way.clear()
