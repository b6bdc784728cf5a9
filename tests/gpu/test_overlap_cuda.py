"""How much of what travels between host and device computation hides: printed (``pytest -s``), not
judged. A busy or slow link is no fault of the code; `zeroshard bench offload` compares.
"""

from __future__ import annotations

import statistics
import time

import pytest
import torch

import zeroshard as zs
from tests.support import inside
from tests.support.training import Net
from zeroshard.runtime.engine import states_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

DEVICE = "cuda:0"
HOST = {"grad": "host", "optimizer": "host"}


class _Timed:
    """A model of 100M parameters on `batch` sequences of 256 tokens, and the seconds of its
    steps.
    """

    def __init__(self, row: str, tiers: dict[str, str], *, batch: int) -> None:
        torch.manual_seed(0)
        self.model = Net(width=1024, layers=12).to(DEVICE)
        self.num_bytes = sum(4 * parameter.numel() for parameter in self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.engine = zs.shard(
            self.model, self.optimizer, policy=row, offload=zs.Offload.model_validate(tiers)
        )
        self.x = torch.randint(0, 37, (batch, 256), device=DEVICE)

    def seconds(self, *, step: bool, num: int = 10) -> float:
        """Return the seconds per step over `num` of them: one may end while the next one runs."""
        for number in range(num + 3):
            if number == 3:
                self._settle()
                begin = time.perf_counter()
            self.model(self.x, self.x).backward()
            if step:
                self.optimizer.step()
                self.optimizer.zero_grad()
        self._settle()
        return (time.perf_counter() - begin) / num

    def _settle(self) -> None:
        states_of(self.engine).join_step()
        torch.cuda.synchronize()

    @property
    def host_s(self) -> float:
        return inside.tile_seconds(self.engine)


def _copy_s(num_bytes: int, *, to_host: bool) -> float:
    """Return the seconds that `num_bytes` take over the link, in pinned memory, with nothing
    else on the device.
    """
    far, near = (
        torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True),
        torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE),
    )
    out, source = (far, near) if to_host else (near, far)
    taken = []
    for _ in range(6):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        out.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[1:])


def test_how_far_gathers_from_the_host_overlap_compute_is_printed() -> None:
    device = _Timed("zero3", {}, batch=8)  # about as long as the weights take over the link
    compute_s = device.seconds(step=False)
    device.engine.close()
    host = _Timed("zero3", {"weight": "host"}, batch=8)
    taken_s = host.seconds(step=False)
    copies_s = 2 * _copy_s(host.num_bytes, to_host=False)  # for forward and for backward
    host.engine.close()
    print(
        f"compute {compute_s * 1e3:.1f} ms, copies {copies_s * 1e3:.1f} ms, together"
        f" {taken_s * 1e3:.1f} ms"
    )
    assert min(compute_s, copies_s, taken_s) > 0


def test_how_far_a_step_on_the_host_overlaps_the_next_forward_is_printed() -> None:
    device = _Timed("zero2", {}, batch=32)
    compute_s = device.seconds(step=True)
    device.engine.close()
    host = _Timed("zero2", HOST, batch=32)
    taken_s = host.seconds(step=True)
    step_s = host.host_s
    there_s, back_s = _copy_s(host.num_bytes, to_host=True), _copy_s(host.num_bytes, to_host=False)
    host.engine.close()
    # Backward, two thirds of the computation, may hide the gradients' copies, the next forward the
    # step and the weights' copies.
    in_turn_s = compute_s + there_s + step_s + back_s
    hidden_s = min(2 / 3 * compute_s, there_s) + min(1 / 3 * compute_s, step_s + back_s)
    print(
        f"one after the other {in_turn_s * 1e3:.1f} ms, of which {hidden_s * 1e3:.1f} ms can be"
        f" hidden; measured {taken_s * 1e3:.1f} ms"
    )
    assert min(compute_s, there_s, step_s, back_s, taken_s) > 0
