"""What the library asks of the operating system, without torch.

    safe_files.py       files that others wrote, and files that are written whole or not at all
    host_memory.py      the memory of this host, or of its control group
    keeper_client.py    the process that keeps memory for ranks of this host
    mpi.py, slurm.py    the place of this process in an MPI job or a Slurm step

`core` decides without any of these. Nothing here imports torch: the command line uses it, too.
"""

__all__: list[str] = []
