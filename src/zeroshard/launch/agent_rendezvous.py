"""The meeting of a job's launchers, in known number and order: nothing is unpickled.

torch's own rendezvous opens TCP stores that listen on all addresses, and its agents unpickle from
one of them. Here there is one TCP store, at one address where that is possible
(``connection.listen()``):

    one host        on loopback, for ``init_process_group()`` (MASTER_ADDR, MASTER_PORT); a new one
                    for each start of the group. The agent keeps its own state in memory, and
                    ``zeroshard.init_distributed()`` uses a file in the launcher's private directory
                    instead (``comm/job.py``).
    several hosts   kept by the launcher of the first host; all other launchers and all ranks
                    connect to it. Ranks are numbered host by host. The group starts once.

Invariant: what is read from a store is JSON or a number. Who reaches the store can end the job or
spoil it, but not run code.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

from zeroshard.launch.connection import listen
from zeroshard.launch.options import HostPlace

BACKEND = "zeroshard"
LOOPBACK = "127.0.0.1"
_TIMEOUT = datetime.timedelta(seconds=600)  # torch's own


class AgentRendezvous(RendezvousHandler):
    """torch's rendezvous for the agent at `place`, or for one alone, on loopback. `port` 0 takes a
    new free port for each start.
    """

    def __init__(self, place: HostPlace | None, parameters: RendezvousParameters) -> None:
        self._run_id, self._place = parameters.run_id, place
        self._port = int(parameters.endpoint.rpartition(":")[2])
        self._store: Any = None
        self._closed = False

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        place = self._place
        if place is None:
            self._store = None  # gives a pinned port back
            self._store = self._serve(LOOPBACK, self._port)
            address = RendezvousStoreInfo(LOOPBACK, self._store.port)
            return RendezvousInfo(HashStore(), 0, 1, address)
        address = RendezvousStoreInfo(place.master_addr, place.master_port)
        if self._store is None and place.node_rank == 0:
            self._store = self._serve(place.master_addr, place.master_port, place.listener)
        elif self._store is None:
            self._store = TCPStore(
                place.master_addr, place.master_port, timeout=_TIMEOUT, wait_for_workers=False
            )
        store = PrefixStore("zeroshard", self._store)
        return RendezvousInfo(store, place.node_rank, place.num_nodes, address)

    @staticmethod
    def _serve(host: str, port: int, listener: int = -1) -> Any:
        """Return a store that listens on the descriptor `listener`, or at `port` of `host`."""
        if listener < 0:
            opened = listen(host, port)
            port, listener = opened.getsockname()[1], opened.detach()  # the store's from now on
        return TCPStore(
            host,
            port,
            is_master=True,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener,
        )

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._store = None
        return True


@cache  # the same for the same place: it may be registered again, as ``--elastic`` does
def _creator(place: HostPlace | None) -> Callable[[RendezvousParameters], AgentRendezvous]:
    return partial(AgentRendezvous, place)


def register(place: HostPlace | None) -> None:
    """Make the backend known to torch's launcher, for a launcher at `place`. Idempotent."""
    rendezvous_handler_registry.register(BACKEND, _creator(place))
