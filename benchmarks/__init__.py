"""The project's benchmarks: ``zeroshard bench``, and `slow_wire`.

They lie beside the package, not in it: a checkout has them, an installed wheel does not.
`zeroshard.launch.cli` finds them.

`command_line` reads the arguments and `commands` carries them out. `plan` says what is compared,
`driver` takes the turns, `leader` and `worker` are the processes, `contenders` and `model` are what
they train, `stats` and `results` hold the numbers, `tables` shows them. `checkpoint`, `codec`,
`disk`, `offload`, `leaves` and `fake_world` measure one part each. docs/benchmarks.md explains the
method.
"""

from pathlib import Path

import zeroshard

__all__ = ["PATH"]

PATH = [str(Path(file).absolute().parents[1]) for file in (zeroshard.__file__, __file__)]
"""Where the processes that a benchmark starts find `zeroshard` and `benchmarks`."""
