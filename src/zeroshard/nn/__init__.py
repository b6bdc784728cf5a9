"""Modules and their construction: what ``zs.nn`` offers.

    TiledLinear, tile_linears, join_tiles                    linear layers gathered a tile at a time
                                                             (tiled.py)
    checkpoint, checkpoint_blocks, uncheckpoint_blocks       activations computed again, their
                                                             inputs on another tier
                                                             (checkpointing.py)

Deferred initialisation (deferred.py, hollow.py) is offered as
``zs.deferred_init`` and ``zs.materialize``; ``zs.nn.is_deferred`` says what has no memory yet.
"""

from __future__ import annotations

from zeroshard.nn.checkpointing import checkpoint, checkpoint_blocks, uncheckpoint_blocks
from zeroshard.nn.deferred import is_deferred
from zeroshard.nn.tiled import TiledLinear, join_tiles, tile_linears

__all__ = [
    "TiledLinear",
    "checkpoint",
    "checkpoint_blocks",
    "is_deferred",
    "join_tiles",
    "tile_linears",
    "uncheckpoint_blocks",
]
