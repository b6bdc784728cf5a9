"""``python -m zeroshard`` is the ``zeroshard`` program."""

import sys

from zeroshard.launch.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    sys.exit(main())
