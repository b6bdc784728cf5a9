"""``zeroshard as-deepspeed COMMAND ...``: a command whose Python processes find the stand-in for
DeepSpeed, as ``env`` and ``nice`` start a command.

    zeroshard as-deepspeed accelerate launch --config_file zero3.yaml train.py
    zeroshard as-deepspeed bash train.sh          # which says `deepspeed --num_gpus=8 ...`
    srun --ntasks-per-node=8 zeroshard as-deepspeed python train.py --deepspeed zero.json

One folder of this package goes first in ``PYTHONPATH``, and the folder `bin` in it first in
``PATH``. It holds a module ``deepspeed`` that becomes the stand-in when it is imported, the
METADATA of a distribution of that name, and a program ``deepspeed``, which is ``zeroshard
deepspeed``. Nothing is installed, and processes that are not the command's see nothing of it.

Where srun or mpirun has started this process as one of several, the command also gets the variables
that torchrun would set: programs look for RANK, and few of them for Slurm's and MPI's own. This
process becomes the command: no process stands between it and whoever sends signals.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from zeroshard.system.mpi import rank_variables
from zeroshard.terminal.declared import Subcommand, UsageError

PYTHON = "ZEROSHARD_PYTHON"  # the interpreter of the program `deepspeed`
COMMAND = Subcommand(
    "as-deepspeed", "run a command in which `import deepspeed` is zeroshard's stand-in",
    "zeroshard as-deepspeed accelerate launch --config_file zero3.yaml train.py\n"
    "zeroshard as-deepspeed torchrun --nproc-per-node 8 train.py --deepspeed zero.json\n"
    "srun --ntasks-per-node=8 zeroshard as-deepspeed python train.py --deepspeed zero.json",
    usage="%(prog)s COMMAND ...",
    description="Run COMMAND so that its Python processes find the stand-in for DeepSpeed, and its"
    "\nshells a program `deepspeed`, which is `zeroshard deepspeed`. Nothing is installed.",
)  # fmt: skip
_FOLDER = Path(__file__).resolve().parents[1] / "deepspeed" / "on_path"


def start(parser: argparse.ArgumentParser, argv: list[str]) -> int:
    """Become the command ``argv``. Raises UsageError where there is none, or no such program."""
    words = argv[1:] if argv[:1] == ["--"] else argv
    if not words or (words is argv and words[0].startswith("-")):
        parser.parse_args(words)  # --help, and options, of which there are no others
        raise UsageError("as-deepspeed: no command given")
    environ = environment(os.environ)
    sys.stdout.flush()
    try:
        os.execvpe(words[0], words, environ)
    except OSError as error:
        raise UsageError(f"as-deepspeed: {words[0]}: {error.strerror}") from None


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with the stand-in in its paths, and the variables of one rank of several.

    Raises:
        ConfigError: mpirun has not said where the ranks meet, or which of them this is.
    """
    return {
        **environ,
        **rank_variables(environ),
        "PYTHONPATH": on_python_path(environ),
        "PATH": _first(str(_FOLDER / "bin"), environ.get("PATH", os.defpath)),
        PYTHON: sys.executable,
    }


def on_python_path(environ: Mapping[str, str]) -> str:
    """Return ``PYTHONPATH`` with the stand-in's folder before all others."""
    return _first(str(_FOLDER), environ.get("PYTHONPATH", ""))


def _first(folder: str, path: str) -> str:
    """Return a path of folders that begins with `folder`, once."""
    others = [one for one in path.split(os.pathsep) if one and one != folder]
    return os.pathsep.join([folder, *others])
