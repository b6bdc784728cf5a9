"""The script of a run with leaves that ``zeroshard replay`` starts again:

    replayed.py TRAIL CHECKPOINT {"options": {...}, "leaves": 8} STEPS

With LEAVES in the environment it adds the number of each leaf that it computes to that file.
"""

from __future__ import annotations

import json
import os
import sys

import torch

import zeroshard as zs
from tests.features.test_leaves import Run, Training


def main() -> None:
    """Load the newest checkpoint, and train."""
    trail, checkpoint, run, steps = sys.argv[1:]
    if "RANK" in os.environ:
        zs.init_distributed()
    training = Training(Run(**json.loads(run)))
    loss = training.loss

    def counted(step: int, leaf: int) -> torch.Tensor:
        if "LEAVES" in os.environ:
            with open(os.environ["LEAVES"], "a") as file:
                print(step, leaf, file=file)
        return loss(step, leaf)

    training.loss = counted  # type: ignore[method-assign]
    first = 0
    if zs.latest_step(checkpoint) is not None:
        first = zs.load(checkpoint, training.engine).step
    with training.engine.trail(trail, every=1):
        for step in range(first, int(steps)):
            training.step(step)


if __name__ == "__main__":
    main()
