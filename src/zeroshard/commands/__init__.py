"""Commands of the ``zeroshard`` program that start no job: they read files, measure, and print.

``checkpoint_command.py`` (show, verify, export, import), ``config.py`` (what each key does),
``doctor.py`` (facts of the machine and what ``probes.py`` measures), ``report.py`` (traces),
``trail_command.py`` (compare, replay), ``generate.py`` (text). ``zeroshard plan`` is
``planner/plan_command.py``. ``launch/cli.py`` gathers them into the program.

Invariant: nothing here imports the launcher, and a command imports torch when it runs.
"""
