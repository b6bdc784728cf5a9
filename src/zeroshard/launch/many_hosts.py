"""Rendezvous on several hosts whose number and order are known: one TCP store, nothing unpickled.

The launcher of the first host keeps the store, at one address where that is possible
(``network.listen()``); the launchers of the others and all ranks connect to it. Ranks are numbered
host by host. torch's static rendezvous does the same with a store that listens at all addresses.

Invariant: what is read from the store is JSON or a number. Who reaches the store can end the job
or spoil it, but not run code.
"""

from __future__ import annotations

import datetime
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry

from zeroshard.launch import network
from zeroshard.launch.options import Place

__all__ = ["BACKEND", "ManyHosts", "register"]

BACKEND = "zeroshard-hosts"
_TIMEOUT = datetime.timedelta(seconds=600)  # torch's own


class ManyHosts(RendezvousHandler):
    """torch's rendezvous for the agent at `place`. The group starts once."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._store: Any = None

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        place = self._place
        if self._store is None:
            self._store = self._open_store()
        address = RendezvousStoreInfo(place.master_addr, place.master_port)
        store = PrefixStore("zeroshard", self._store)
        return RendezvousInfo(store, place.node_rank, place.num_nodes, address)

    def _open_store(self) -> Any:
        place, options = self._place, dict[str, Any]()
        if place.node_rank == 0:
            descriptor = place.listener
            if descriptor < 0:
                descriptor = network.listen(place.master_addr, place.master_port).detach()
            options = {"is_master": True, "master_listen_fd": descriptor}
        return TCPStore(
            place.master_addr,
            place.master_port,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            **options,
        )

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "zeroshard"

    def shutdown(self) -> bool:
        self._store = None
        return True


def register(place: Place) -> None:
    """Make the backend known to torch's launcher, for a launcher at `place`."""

    def create(parameters: RendezvousParameters) -> ManyHosts:
        return ManyHosts(place)

    rendezvous_handler_registry.register(BACKEND, create)
