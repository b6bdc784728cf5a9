"""One step, on disk or in memory, opened to be read: any range of any part of a parameter, in
any memory order, and every other tensor by its key.

Invariant: everything that is returned has been verified. Cost: the bytes that are asked for, plus
at most a chunk at either end of each range. It does not know an engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch

from zeroshard.checkpoint.kept import KeptStep
from zeroshard.checkpoint.manifest import TensorEntry, digest
from zeroshard.checkpoint.shard_files import OpenShards
from zeroshard.checkpoint.spans import read_span
from zeroshard.checkpoint.steps import StepFiles
from zeroshard.core.boxes import Span
from zeroshard.memory import Trimmer

_T = TypeVar("_T")


class StepReader:
    """The tensors of the step in `path`, or of one that is kept in memory; `stack` closes its
    files. Raises CheckpointError.
    """

    def __init__(
        self, step: Path | KeptStep, stack: ExitStack, trimmer: Trimmer, *, verify: bool
    ) -> None:
        options: Any = {"verify": verify}
        if isinstance(step, KeptStep):
            self.path, self.manifest, self.text_hash = step.path, *step.manifest()
            options["open_file"] = step.open_file
        else:
            self.path, files = step, StepFiles(step, stack)
            self.manifest, text = files.manifest()
            self.text_hash = digest(text)
            files.check(self.manifest)
            options["open_file"] = files.open
        self.pieces = self.manifest.pieces()  # by parameter and kind
        self.loose = self.manifest.loose()
        self._shards = OpenShards(self.path, self.manifest, stack, **options)
        self._trimmer, self._trimmed = trimmer, 0

    @property
    def bytes_read(self) -> int:
        """The bytes read so far."""
        return self._shards.bytes_read

    def fetch(self, key: str) -> torch.Tensor:
        """Return the tensor called `key`, which is no piece of a parameter."""
        return self.whole(self.loose[key])

    def whole(self, entry: TensorEntry) -> torch.Tensor:
        """Return all of the tensor of `entry` [its shape]."""
        return self._shards.read(entry, 0, entry.numel).view(entry.shape)

    def identity(self, rank: int, value: Any) -> str:
        """Return a text that is the same for encoded values of two ranks, tensors included, where
        they are the same.
        """

        def with_content(found: dict[str, Any]) -> Any:
            key = found.get("$tensor", found.get("$array"))
            entry = self.loose.get(f"{key}@{rank}")
            return found if entry is None else [found, entry.dtype, entry.shape, entry.hashes]

        return json.dumps(json.loads(json.dumps(value), object_hook=with_content))

    def range(self, name: str, kind: str, wanted: Span) -> torch.Tensor:
        """Return the elements `wanted` of a parameter's `kind` [wanted.numel]."""
        entry, pieces = self.manifest.parameters[name], self.pieces.get((name, kind), ())
        return read_span(self._shards, entry, pieces, wanted, f"{kind} of parameter {name!r}")

    def held(self, read: Callable[[], _T], *, again: bool) -> Callable[[], _T]:
        """Read and verify now; return a function that returns the result, or rereads (`again`)."""
        if again:
            read()
            self.release_memory()
            return read
        result = read()
        return lambda: result

    def release_memory(self) -> None:
        """Release the memory that a piece was read into."""
        self._shards.pages.clear()
        self._trimmer.passed(self.bytes_read - self._trimmed)
        self._trimmed = self.bytes_read
