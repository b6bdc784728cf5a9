"""``import deepspeed`` where this folder's parent is in PYTHONPATH: becomes the stand-in.

``zeroshard as-deepspeed`` and ``--as-deepspeed`` put it there, for the processes that they start
and all their children, with a folder that has the distribution's METADATA. Nothing else imports it.
"""

from __future__ import annotations

import importlib
import sys

from zeroshard.deepspeed.shim import install

__all__: list[str] = []

install()  # takes this module out of sys.modules, and answers for its name from now on
sys.modules[__name__] = importlib.import_module(__name__)
