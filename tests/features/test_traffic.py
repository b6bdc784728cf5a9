"""Bytes on the wire: one function of (row, ranks, dtypes, micro-batches), met exactly by
payloads and within 5% by the interface.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

import zeroshard as zs
from tests.support import inside
from tests.support.harness import ROOT, on_ranks, run_ranks
from tests.support.training import ROWS, Net, batch, take_steps, two_groups
from zeroshard.core.placement import Mesh
from zeroshard.core.policy import row as policy_row
from zeroshard.core.precision import PRECISIONS, Precision
from zeroshard.core.wire import Wires
from zeroshard.runtime.engine import states_of

WIDTH = 64  # every parameter but the embedding and the head fills whole slots, so padding is small


def _counted(
    rank: int, world: int, transport: str, precision: Precision
) -> dict[tuple[str, int, bool], dict[str, int]]:
    """Train one step after a first, for every row, number of micro-batches and no_sync; return
    the counted payload.
    """
    out = {}
    for row in ROWS:
        torch.manual_seed(0)
        model = Net(width=WIDTH, layers=3)
        optimizer = two_groups(model)
        engine = zs.shard(
            model, optimizer, policy=row, precision=precision, comm=zs.Comm(transport=transport)
        )
        padded = inside.padded_numel(engine)
        for micro_batches, no_sync in ((1, False), (1, False), (2, False), (2, True)):
            engine.reset_traffic()
            for micro in range(micro_batches):
                hold = no_sync and micro < micro_batches - 1
                with engine.no_sync() if hold else nullcontext():
                    model(*batch(rank, micro)).backward()
            optimizer.step()
            optimizer.zero_grad()
            counted = engine.traffic().bytes
            small = counted.get("exchange", 0)
            out[row, micro_batches, no_sync] = {
                "counted": engine.traffic().total - small,
                "exchange": small,
                "padded": padded,
            }
        engine.close()
    return out


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("world", "transport"),
    [
        (2, "shared_memory"),
        (2, "gloo"),
        pytest.param(4, "shared_memory", marks=pytest.mark.slow),
        (4, "gloo"),
    ],
)
def test_counted_payload_is_the_formula(world: int, transport: str, precision: str) -> None:
    _check_counted(world, transport, PRECISIONS[precision])


def test_averages_travel_in_the_dtype_in_which_gradients_rest() -> None:
    _check_counted(2, "gloo", Precision("bf16", accumulate="bf16"))


def _check_counted(world: int, transport: str, precision: Precision) -> None:
    for seen in run_ranks(world, _counted, transport, precision, timeout=100):
        for (row, micro_batches, no_sync), numbers in seen.items():
            formula = policy_row(row).wire_bytes(
                numel=numbers["padded"],
                mesh=Mesh(1, world),
                wires=Wires.of(precision),
                micro_batches=micro_batches,
                no_sync=no_sync,
            )
            assert numbers["counted"] == formula.total, (row, micro_batches, no_sync)
            assert numbers["exchange"] < 1024


def _interface(rank: int, world: int, row: str) -> tuple[int, int, float]:
    """Return bytes that crossed the loopback interface during 4 steps (all ranks), payload of
    this rank, and the formula's total.
    """

    def loopback() -> int:
        with open("/proc/net/dev") as lines:
            return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))

    torch.manual_seed(0)
    model = Net(width=256, layers=6)  # 19 MB of weights: message headers vanish
    optimizer = two_groups(model)
    engine = zs.shard(model, optimizer, policy=row, comm=zs.Comm(transport="gloo"))
    take_steps(rank, 1, model, optimizer)
    torch.distributed.barrier()
    engine.reset_traffic()
    before = loopback()
    torch.distributed.barrier()
    take_steps(rank, 4, model, optimizer)
    with torch.no_grad():
        if row in ("zero1", "zero2"):
            model(batch(rank, 0)[0])  # the last publish arrives
    torch.distributed.barrier()
    crossed = loopback() - before
    padded = inside.padded_numel(engine)
    formula = (
        4
        * policy_row(row)
        .wire_bytes(numel=padded, mesh=Mesh(1, world), wires=Wires.of(PRECISIONS["fp32"]))
        .total
    )
    counted = engine.traffic().total
    engine.close()
    return crossed, counted, formula


ALONE = f"""
import fcntl, json, socket, struct, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    # SIOCSIFFLAGS: up and running
    fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh22x", b"lo", 0x41))
sys.path.insert(0, {str(ROOT)!r})
from tests.features.test_traffic import _interface
from tests.support.harness import close_pools, on_ranks, run_ranks
print(json.dumps(run_ranks(int(sys.argv[1]), _interface, sys.argv[2], timeout=100)))
close_pools()
"""


def _alone(world: int, row: str) -> list[tuple[int, int, float]]:
    """Return what the ranks see in a network namespace of their own, where the interface counts
    nobody else's bytes.
    """
    unshare = shutil.which("unshare")
    if (
        unshare is None
        or subprocess.run([unshare, "-rn", "true"], capture_output=True, check=False).returncode
    ):
        # not permitted here: among everybody else's
        return run_ranks(world, _interface, row, timeout=100)
    command = [unshare, "-rn", sys.executable, "-c", ALONE, str(world), row]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert answer.returncode == 0, answer.stderr
    return [tuple(seen) for seen in json.loads(answer.stdout)]


@pytest.mark.slow
@pytest.mark.parametrize(("world", "row"), [(2, "zero3"), (4, "zero2"), (2, "zero2"), (4, "zero3")])
def test_the_interface_counts_the_same_within_five_percent(world: int, row: str) -> None:
    seen = _alone(world, row)
    formula = sum(expected for _, _, expected in seen)
    for crossed, _, _ in seen:
        assert 0.99 * formula <= crossed <= 1.05 * formula, (
            f"{crossed / formula:.3f} of the formula"
        )


@pytest.mark.parametrize("row", ["zero1", "zero2"])
@on_ranks(2)
def test_a_step_sends_no_weights_that_are_not_trained(rank: int, row: str) -> None:
    """Train a model of which little is trained; look at the payload of two steps, and the frozen
    weights before and after an edit.
    """
    torch.manual_seed(0)
    model = Net(width=64, layers=2)
    for parameter in list(model.parameters())[:-2]:
        parameter.requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine = zs.shard(model, optimizer, policy=row, comm=zs.Comm(transport="gloo"))
    payload = []
    for step in range(3):
        if step == 2:
            with states_of(engine).rewriting():  # as a load does: each rank writes its own part
                for piece in states_of(engine).resting_pieces():
                    if piece.name == "embed.weight":
                        piece.write(torch.full((piece.stop - piece.start,), 0.5))
        engine.reset_traffic()
        take_steps(rank, [step], model, optimizer)
        inside.wait_published(engine)
        payload.append(engine.traffic().bytes.get("all_gather", 0))
    trained = inside.padded_numel(engine, trained=True)
    frozen = model.embed.weight.detach().clone()
    engine.close()
    seen = {"payload": payload[:2], "trained": trained, "frozen": frozen}
    assert seen["payload"] == [4 * seen["trained"] // 2] * 2
    assert bool((seen["frozen"] == 0.5).all()), "what is loaded reaches every rank"
