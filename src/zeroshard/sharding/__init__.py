"""``zeroshard.shard``: from what the user asks to an engine, in one direction.

    api.py       shard() itself, which makes transports, stores and the engine
    request.py   the settings asked for: read, checked and compared, in two meetings of the ranks
    checks.py    what cannot be done, refused before anything changes
    repartition.py   the same for an engine that is there: other rows, tiers and ranks

The folder cannot be called ``shard``: importing it would put a module in the place of the function.
"""

from __future__ import annotations

__all__: list[str] = []
