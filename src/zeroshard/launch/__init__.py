"""The command line: the ``zeroshard`` program and what it starts.

Reading order: ``cli.py`` (commands and exit codes), ``options.py`` (what ``zeroshard run`` takes),
``run.py`` (the launcher, on ``torch.distributed.run``), ``supervisor.py`` (which rank failed
first), ``worker.py`` (what stands between the launcher and a script), ``outcome.py`` (how a job
ended, in words). On several hosts ``hosts.py`` starts one such launcher on each, over a
``connection.py`` to ``on_host.py``; ``elastic.py`` starts again with those that are left.
Launchers meet by ``agent_rendezvous.py``. ``doctor.py`` prints facts of the machine and what
``probes.py`` measures. Options and tables come from ``zeroshard.terminal``; ``zeroshard plan`` is
``planner/plan_command.py``.

Invariant: ``--help``, ``--version`` and usage errors never import torch.
"""

__all__: list[str] = []
