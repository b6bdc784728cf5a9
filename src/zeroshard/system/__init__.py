"""The operating system and the machine's devices, as the library asks them.

    device.py           a device, by the functions of torch's module for its type
    safe_files.py       files that others wrote, and files that are written whole or not at all
    this_host.py        memory of this host or its control group, open files, interfaces; the place
                        of this process in an MPI job, a Slurm step or a SkyPilot task
    keeper_client.py    the process that keeps memory for ranks of this host

`core` decides without any of these. No module here imports torch when it is imported: the command
line uses them, too.
"""

__all__: list[str] = []
