"""Checkpoints of other programs as a step of ours.

conversion.py              recognises them, reads torch's and Transformers', writes the step
deepspeed_zero.py          DeepSpeed's ZeRO 1, 2 and 3
importer.py                what an import has found, on its way to become a step; pickles read as
                           data: no code runs that one of them chose
"""

from __future__ import annotations

from zeroshard.formats.conversion import READERS, Imported, import_checkpoint, recognise
from zeroshard.formats.export import export, whole_weights

__all__ = [
    "READERS", "Imported", "export", "import_checkpoint", "recognise", "whole_weights",
]  # fmt: skip
