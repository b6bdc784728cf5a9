"""``zeroshard.shard``: from what the user asks to an engine, in one direction.

    asked.py     the options, understood, and compared between the ranks
    checks.py    what cannot be done, refused before anything changes
    auto.py      policy="auto": the row that a plan for this machine recommends
    api.py       shard() itself, which makes transports, stores and the engine
    repartition.py, rejoin.py    the same for an engine that is there: other rows, tiers and ranks

The folder cannot be called ``shard``: importing it would put a module in the place of the function.
"""

from __future__ import annotations

__all__: list[str] = []
