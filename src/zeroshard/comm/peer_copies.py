"""Anonymous files of one rank copied to a rank of another host.

The messages travel over a gloo group of their own, made when the first file does, on the CPU beside
any backend of the job's. Where a peer ends, gloo's error ends the copy.

Invariant: ranks that copy call in the same order. Cost: each byte once over the network, without a
copy on either side: the files are mapped.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

from zeroshard.comm import memfd
from zeroshard.comm.groups import make_group


class Copies:
    """Copies between `ranks`, which are given by their place in it. Made by all of them together;
    `ranks` are numbers in the job, and `exchange` takes a few bytes of each.
    """

    def __init__(self, ranks: Sequence[int], exchange: Callable[[bytes], list[bytes]]) -> None:
        self._ranks = list(ranks)
        self._exchange = exchange
        self._group = make_group(ranks, exchange, backend="gloo")

    def __enter__(self) -> Copies:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._exchange(b"")  # all that was sent has come
        self.close()

    def close(self) -> None:
        """Give back the group, its threads and descriptors. No copy is under way on any rank."""
        with suppress(ValueError):  # with the job's own group it has gone
            dist.destroy_process_group(self._group)

    def sending(self, peer: int, files: Sequence[int]) -> list[Any]:
        """Begin to send whole files to `peer`; return what `wait` takes."""
        maps = [memfd.map_bytes(file, os.fstat(file).st_size) for file in files]
        return [self._begin(dist.isend, data, peer) for data in maps if len(data)]

    def receiving(self, peer: int, files: Sequence[int], sizes: Sequence[int]) -> list[Any]:
        """Begin to receive the first `sizes` bytes of files from `peer`; return what `wait`
        takes.
        """
        maps = [memfd.map_bytes(file, size) for file, size in zip(files, sizes, strict=True)]
        return [self._begin(dist.irecv, data, peer) for data in maps if len(data)]

    def wait(self, begun: Sequence[Any]) -> None:
        """Wait for everything that was begun."""
        for work, _ in begun:
            work.wait()

    def _begin(self, call: Callable[..., Any], data: torch.Tensor, peer: int) -> tuple[Any, Any]:
        # the mapping must live until the work is done
        return call(data, self._ranks[peer], group=self._group), data
