"""The launcher: ``zeroshard run``, ``zeroshard deepspeed``, ``zeroshard as-deepspeed``, and the
program ``zeroshard`` itself (``cli.py``), with the other commands from ``commands/``.

Reading order: ``options.py`` (what ``zeroshard run`` takes), ``run.py`` (the launcher, on
``torch.distributed.run``), ``supervisor.py`` (which rank failed first), ``worker.py`` (what stands
between the launcher and a script), ``outcome.py`` (how a job ended, in words). On several hosts
``hosts.py`` starts one such launcher on each, over a ``connection.py`` to ``on_host.py``;
``elastic.py`` starts again with those that are left. Launchers meet by ``agent_rendezvous.py``.
Options and tables come from ``zeroshard.terminal``.

Invariant: ``--help``, ``--version`` and usage errors never import torch.
"""
