"""One rank of benchmarks/slow_wire.py: makes engines, and takes steps with them when told to. Not
started by hand.

Commands come as lines of JSON on stdin, each answered by one line on stdout; the end of stdin ends
the rank:

    {"make": row}                      -> {"numel": parameters} or {"refused": why}
    {"turn": name, "steps": n}         -> {"seconds", "sent", "between", "links", "loss"} of n steps
    {"compute": n}                     -> {"seconds"} of n forwards and backwards of a model of this
                                       rank's own
    {"probe": bytes}                   -> {"seconds"} to send that many to the other node's rank,
                                       and receive as many, over the bare wire

Invariant: a turn ends when the wire is quiet, so that what a row sends after its step counts as its
own.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

import zeroshard as zs
from benchmarks.model import GPT, Batches
from benchmarks.plan import Size
from zeroshard.core.precision import PRECISIONS

QUIET_S = 0.03  # no packet for so long: nothing is under way
NOISE_BYTES = 1024  # what the kernel sends by itself meanwhile (neighbour discovery)


class Rank:
    """The engines of one rank, by row."""

    def __init__(self, size: Size, precision: str, device: str) -> None:
        self.size = size
        self.precision = precision
        self.engines: dict[str, zs.Engine] = {}
        self.models: dict[str, torch.nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.steps: dict[str, int] = {}
        self._counter = Path(f"/sys/class/net/{device}/statistics/tx_bytes")
        self._batches = Batches(
            size, rank=dist.get_rank(), num_ranks=dist.get_world_size(), device=torch.device("cpu")
        )

    def make(self, row: dict[str, Any]) -> dict[str, Any]:
        """Shard a new model by `row`; a refusal is an answer, not an error."""
        torch.manual_seed(0)
        model = GPT(self.size)
        numel = sum(parameter.numel() for parameter in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        codecs = {name: row[name] for name in ("weight_codec", "grad_codec") if row[name]}
        try:
            comm = zs.Comm(
                node_size=int(os.environ["LOCAL_WORLD_SIZE"]),
                hierarchical=row["hierarchical"],
                **codecs,
            )
            engine = zs.shard(
                model, optimizer, policy=row["policy"], precision=self.precision, comm=comm
            )
        except zs.ConfigError as refused:
            return {"refused": str(refused)}
        name = row["name"]
        self.engines[name], self.models[name], self.optimizers[name], self.steps[name] = (
            engine,
            model,
            optimizer,
            0,
        )
        return {"numel": numel}

    def turn(self, name: str, steps: int) -> dict[str, Any]:
        """Take `steps` steps of one row."""
        sent = self._sent()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            loss = self._step(name)
        end = max(time.perf_counter(), self._quiet_since())
        return {
            "seconds": end - start,
            "sent": self._sent() - sent,
            "loss": loss,
            **self._counted(name),
        }

    def _counted(self, name: str) -> dict[str, Any]:
        """Return what came to this rank since the end of the last turn: what a step publishes
        may arrive while another row has its turn.
        """
        traffic = self.engines[name].traffic()
        self.engines[name].reset_traffic()
        return {"between": sum(traffic.between_nodes.values()), "links": traffic.links}

    def _step(self, name: str) -> float:
        inputs, targets = self._batches[self.steps[name]]
        self.steps[name] += 1
        loss = self.models[name](inputs, targets)
        loss.backward()
        self.optimizers[name].step()
        self.optimizers[name].zero_grad()
        return float(loss.detach())

    def _sent(self) -> int:
        """Bytes that have left this node so far, headers included."""
        return int(self._counter.read_text())

    def _quiet_since(self) -> float:
        """Wait until nothing leaves this node any more; return when it stopped."""
        sent, since = self._sent(), time.perf_counter()
        while time.perf_counter() - since < QUIET_S:
            time.sleep(0.002)
            if self._sent() > sent + NOISE_BYTES:
                sent, since = self._sent(), time.perf_counter()
        return since

    def compute(self, steps: int) -> dict[str, Any]:
        """Time forwards and backwards of a plain model."""
        model = GPT(self.size).to(PRECISIONS[self.precision].compute)
        for step in range(steps + 2):
            if step == 2:
                dist.barrier()
                start = time.perf_counter()
            model(*self._batches[step]).backward()
            model.zero_grad()
        return {"seconds": time.perf_counter() - start}

    def probe(self, num_bytes: int) -> dict[str, Any]:
        """Send `num_bytes` to this rank's like on the other node while as many come from it, by
        TCP and nothing else.
        """
        rank, size, local = (
            dist.get_rank(),
            int(os.environ["LOCAL_WORLD_SIZE"]),
            int(os.environ["LOCAL_RANK"]),
        )
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + 1 + local
        listener = socket.create_server(address) if rank < size else None
        dist.barrier()
        peer = listener.accept()[0] if listener is not None else socket.create_connection(address)
        with listener or contextlib.nullcontext(), peer:
            outgoing, incoming = bytes(num_bytes), bytearray(num_bytes)
            start = time.perf_counter()
            sender = threading.Thread(target=peer.sendall, args=(outgoing,))
            sender.start()
            peer.recv_into(incoming, num_bytes, socket.MSG_WAITALL)
            sender.join()
            return {"seconds": time.perf_counter() - start}


def main() -> None:
    size, precision, device = Size(**json.loads(sys.argv[1])), sys.argv[2], sys.argv[3]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints does not answer for us
    torch.set_num_threads(1)
    zs.init_distributed("gloo")
    rank = Rank(size, precision, device)
    print("{}", file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        if "make" in command:
            answer = rank.make(command["make"])
        elif "turn" in command:
            answer = rank.turn(command["turn"], command["steps"])
        elif "compute" in command:
            answer = rank.compute(command["compute"])
        else:
            answer = rank.probe(command["probe"])
        print(json.dumps(answer), file=answers)
    os._exit(0)  # what the groups hold ends with the process, whether or not peers are still there


if __name__ == "__main__":
    main()
