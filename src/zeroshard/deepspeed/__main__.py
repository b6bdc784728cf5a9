"""Run a script with the stand-in in DeepSpeed's place: for launchers other than ``zeroshard run``.

torchrun --nproc-per-node 2 -m zeroshard.integrations.deepspeed train.py --deepspeed zero.json
"""

from __future__ import annotations

import os
import runpy
import sys

from zeroshard.deepspeed.shim import install


def main() -> None:
    """Run ``sys.argv[1]`` as ``__main__`` with the arguments after it."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m zeroshard.integrations.deepspeed SCRIPT [ARGUMENTS]")
    del sys.argv[0]
    sys.path[0:1] = [] if sys.flags.safe_path else [os.path.dirname(os.path.realpath(sys.argv[0]))]
    install()
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
