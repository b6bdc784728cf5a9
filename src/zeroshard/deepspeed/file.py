"""``zs.read_deepspeed``: a DeepSpeed configuration, and what it becomes here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroshard.config import Config
from zeroshard.deepspeed.keys.findings import FileFindings, read


@dataclass(frozen=True)
class DeepSpeedFile(FileFindings):
    """A DeepSpeed configuration, read; the engine's `Config` if nothing is refused."""

    def config(self) -> Config:
        """Return our configuration. Raises ConfigError with every refused key."""
        return Config.read(self.checked_fields())


def read_deepspeed(source: str | Path | dict[str, Any]) -> DeepSpeedFile:
    """Read a DeepSpeed configuration (a path to its JSON, or the dict), key by key.

    Raises ConfigError where there is no JSON object. Keys never raise here: see `findings`, and
    ``config()``.
    """
    return DeepSpeedFile(**vars(read(source)))
