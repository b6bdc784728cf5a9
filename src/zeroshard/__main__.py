"""``python -m zeroshard`` is the ``zeroshard`` program."""

import sys

from zeroshard.launch.cli import main

if __name__ == "__main__":
    sys.exit(main())
