"""The command line: ``zeroshard run`` and what else the ``zeroshard`` program does. Nothing here imports torch before it must."""

__all__: list[str] = []
