"""A process that a rank forks is no rank: it is refused whatever it does with the model, and its
parents train on to DDP's bits.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard as zs
from tests.support.harness import on_ranks
from tests.support.training import (
    TRANSPORTS,
    Net,
    batch,
    make_model,
    make_sharded,
    take_steps,
    train,
)


class _Rank:
    """One rank's model, optimizer and engine."""

    def __init__(self, row: str, transport: str) -> None:
        self.model: Net | None
        self.optimizer: torch.optim.Optimizer | None
        self.engine: zs.Engine | None
        self.model, self.optimizer, self.engine = make_sharded(row, transport)

    def step(self, rank: int, step: int) -> None:
        take_steps(rank, [step], self.model, self.optimizer)

    def forward(self) -> None:
        with torch.no_grad():
            self.model(*batch(0, 0))

    def read(self) -> None:
        nn.functional.linear(torch.ones(2, 19), self.model.head.weight)

    def drop(self) -> None:
        self.model = self.optimizer = self.engine = None
        gc.collect()


USES: dict[str, Callable[[_Rank], Any]] = {
    "forward": lambda it: it.forward(),
    "train": lambda it: it.step(0, 0),
    "submodule": lambda it: it.model.blocks[0](torch.ones(2, 19)),
    "step": lambda it: it.optimizer.step(),
    "gathered": lambda it: it.engine.gathered().__enter__(),
    "full_state_dict": lambda it: it.engine.full_state_dict(),
    "load_state_dict": lambda it: it.model.load_state_dict(make_model().state_dict()),
    "save": lambda it: zs.save("/nowhere", it.engine, step=0),
    "load_pretrained": lambda it: zs.load_pretrained(it.engine, "/nowhere"),
    "reset": lambda it: it.engine.reset(),
    "close": lambda it: it.engine.close(),
}


def _answer_of_child(use: Callable[[], Any]) -> str:
    """Fork, call `use` in the child, and return what it raised as "class: message"; "" for
    nothing, "hung" where it did not end.
    """
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer = ""
        try:
            use()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writes, answer.encode())
        os._exit(0)
    os.close(writes)
    deadline = time.monotonic() + 300
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(reads)
            return "hung"
        time.sleep(0.005)
    with os.fdopen(reads, "rb") as pipe:
        return pipe.read().decode()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("row", ["zero3", "ddp"])
@on_ranks(2)
def test_a_forked_child_is_refused_and_its_parents_train_on(
    rank: int, row: str, transport: str
) -> None:
    expected = train(rank, "torch-ddp", 4)
    it = _Rank(row, transport)
    it.step(rank, 0)
    for name, use in USES.items():
        answer = _answer_of_child(lambda use=use: use(it))
        assert answer.startswith("StateError: process ") and "was forked off a rank" in answer, (
            name,
            answer,
        )
        assert "\n" not in answer, answer
    it.step(rank, 1)
    # what a child destroys, it does not destroy for its parent
    assert _answer_of_child(it.drop) == ""
    it.step(rank, 2)
    loss = it.model(*batch(rank, 3))
    assert _answer_of_child(loss.backward).startswith("StateError: process ")
    loss.backward()
    it.optimizer.step()
    state = it.engine.full_state_dict(rank0_only=False)
    assert not [
        name for name, value in state.items() if not torch.equal(value, expected.state[name])
    ]
    it.engine.close()
    with torch.no_grad():
        assert _answer_of_child(it.forward) == ""  # a plain module again
