"""Run a script with the stand-in in DeepSpeed's place: for launchers other than ``zeroshard run``.

torchrun --nproc-per-node 2 -m zeroshard.integrations.deepspeed train.py --deepspeed zero.json
"""

from __future__ import annotations

from zeroshard.deepspeed.__main__ import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
