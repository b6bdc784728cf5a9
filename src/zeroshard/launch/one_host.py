"""Rendezvous on one host: nothing listens to other hosts, and nothing is unpickled.

torch's own rendezvous opens two TCP stores that listen on all addresses, and its agent unpickles
from one of them. Here the agent keeps its state in memory, and opens one TCP store on loopback for
``init_process_group()`` (MASTER_ADDR, MASTER_PORT). ``zeroshard.init_distributed()`` uses a file in
the launcher's private directory instead (``comm/launched.py``).

Invariant: one agent, one group of ranks, a new store for each start of the group.
"""

from __future__ import annotations

import socket
from typing import Any

from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

__all__ = ["BACKEND", "LOOPBACK", "OneHost", "register"]

BACKEND = "zeroshard"
LOOPBACK = "127.0.0.1"


class OneHost(RendezvousHandler):
    """torch's rendezvous for one agent alone. `port` 0 takes a new free port for each start."""

    def __init__(self, run_id: str, port: int) -> None:
        self._run_id = run_id
        self._port = port
        self._store_of_ranks: Any = None
        self._closed = False

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._store_of_ranks = None  # gives a pinned port back
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((LOOPBACK, self._port))
            port = listener.getsockname()[1]
            descriptor = listener.detach()  # the store's from now on
        self._store_of_ranks = TCPStore(
            LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor
        )
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store_of_ranks = None
        return True


def register() -> None:
    """Make the backend known to torch's launcher. Idempotent."""
    rendezvous_handler_registry.register(BACKEND, _create)


def _create(parameters: RendezvousParameters) -> OneHost:
    return OneHost(parameters.run_id, int(parameters.endpoint.rpartition(":")[2]))
