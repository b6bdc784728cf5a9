"""Run one rank's script as ``python script.py`` would, and report to the launcher how it ended.

Started by ``zeroshard run`` as ``python -u worker.py script|module|command TARGET ARGS...``, once
per rank. It

1. asks the kernel to end this process when the launcher dies, also by SIGKILL;
2. announces itself on the launcher's FIFO, so that the launcher can watch the process;
3. runs the target as ``__main__``, with its own ``sys.argv`` and ``sys.path[0]``;
4. on an uncaught exception writes rank, time and traceback to a file, announces that too, and ends
  with the exception's exit code;
5. announces a script that ends well, too: the others may still wait for this rank.

It keeps a file with the time of the rank's last heartbeat and how far it is (``comm/job.py``), for
the launcher and for ``zeroshard top``, and writes the stacks of all threads to another on
`STACKS_SIGNAL`. The launcher prints the traceback, last.

Invariant: an end is announced *before* anything is torn down, so its time is earlier than every
failure it causes in another rank. Standard library only, and no import of zeroshard (but for the
stand-in that ``--as-deepspeed`` asks for): it must cost nothing and shadow nothing of the user's.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import faulthandler
import importlib
import importlib.machinery
import json
import mmap
import os
import runpy
import signal
import struct
import sys
import time
import traceback
import types
from collections.abc import Mapping
from typing import NoReturn, TextIO

DIRECTORY = "ZEROSHARD_RUN_DIRECTORY"
LAUNCHER_PID = "ZEROSHARD_RUN_PID"
MEETING = "ZEROSHARD_RUN_MEETING"
KEEPER = "ZEROSHARD_RUN_KEEPER"
AS_DEEPSPEED = "ZEROSHARD_RUN_AS_DEEPSPEED"
LOCAL_RANK = "ZEROSHARD_RUN_LOCAL_RANK"
BIND_CORES = "ZEROSHARD_RUN_BIND_CORES"
MODULE = "zeroshard_launched"  # as comm/job.py looks for it
PR_SET_PDEATHSIG = 1
RUN_FOLDER = "zeroshard-run-"  # how the name of a run's temporary directory begins
STACKS_SIGNAL = signal.SIGRTMIN + 9  # no user's, no library's that we know of
TIME = struct.Struct("<d")  # CLOCK_MONOTONIC; 0: no heartbeat yet
COUNT = struct.Struct("<QQ")  # after it: the rank, and how many heartbeats it has shown
# after that: the step, seconds of one, tokens a second; bytes: held, at peak, reserved by torch's
# allocator of an accelerator
STATUS = struct.Struct("<QddQQQ")


def main(argv: list[str]) -> None:
    """Run ``argv`` = [kind, target, *args]; end the process if the target fails."""
    directory, launcher = os.environ.pop(DIRECTORY), int(os.environ.pop(LAUNCHER_PID))
    die_with(launcher)
    _Launched.meeting, _Launched.directory = os.environ.pop(MEETING, None), directory
    _Launched.keeper = os.environ.pop(KEEPER, None)
    as_deepspeed = os.environ.pop(AS_DEEPSPEED, None)
    kind, target, *args = argv
    if (local_rank := os.environ.pop(LOCAL_RANK, None)) is not None:
        # those that DeepSpeed's launcher sets besides torch's
        os.environ["LOCAL_SIZE"] = os.environ["LOCAL_WORLD_SIZE"]
        os.environ["CROSS_RANK"] = os.environ["GROUP_RANK"]
        os.environ["CROSS_SIZE"] = os.environ["GROUP_WORLD_SIZE"]
        args = [f"--local_rank={_env_int('LOCAL_RANK')}"] * int(local_rank) + args
    if os.environ.pop(BIND_CORES, None) is not None:
        # this rank's part of the cores that its launcher keeps to
        cores = sorted(os.sched_getaffinity(0))
        share = len(cores) // _env_int("LOCAL_WORLD_SIZE")
        first = share * _env_int("LOCAL_RANK")
        os.sched_setaffinity(0, cores[first : first + share])
    shows = _show(directory, stacks=kind != "command")
    hello = {
        "pid": os.getpid(),
        "rank": _env_int("RANK"),
        "restart_count": _env_int("TORCHELASTIC_RESTART_COUNT"),
        "shows": int(shows),
    }
    _announce(directory, hello)
    if kind == "command":
        # keeps the process id and the wish to die with the launcher
        os.execvp(target, [target, *args])
    sys.modules[MODULE] = sys.modules[__name__]
    faulthandler.enable()
    if as_deepspeed is not None:
        importlib.import_module("zeroshard.deepspeed.shim").install()
    try:
        if kind == "script":
            _run_script(target, args)
        else:
            sys.argv[:] = [target, *args]
            sys.path[0:1] = [] if sys.flags.safe_path else [os.getcwd()]
            runpy.run_module(target, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code not in (None, 0):
            message = error.code if isinstance(error.code, str) else ""
            exit_code = error.code if isinstance(error.code, int) else 1
            report = {"message": message, "traceback": "", "exit_code": exit_code}
            _write_failure(directory, report)
        else:
            _announce(directory, {"pid": os.getpid(), "left_at": time.monotonic()})
        raise
    except BaseException as error:
        _leave(_fail(directory, error))
    _announce(directory, {"pid": os.getpid(), "left_at": time.monotonic()})
    # Where the script has sharded a model: what its engines hold that they should have given back.
    if "zeroshard.runtime.engine" in sys.modules:
        with contextlib.suppress(Exception):  # a warning must not fail a run that went well
            for line in importlib.import_module("zeroshard.runtime.ledger").leaks():
                sys.stderr.write(f"zeroshard: leak: {line}\n")


class _Launched:
    """The rank's view of its launcher, for comm/job.py."""

    directory = ""
    meeting: str | None = None
    keeper: str | None = None
    num_meetings = 0
    heart: mmap.mmap | None = None
    num_beats = 0
    stacks: TextIO | None = None


def meeting_file() -> str | None:
    """See comm/job.py."""
    if _Launched.meeting is None:
        return None
    _Launched.num_meetings += 1
    return f"{_Launched.meeting}-{_env_int('TORCHELASTIC_RESTART_COUNT')}-{_Launched.num_meetings}"


def keeper_address() -> str | None:
    """See comm/job.py."""
    return _Launched.keeper


def beat() -> None:
    """Note that the program has made progress."""
    if _Launched.heart is not None:
        _Launched.num_beats += 1
        COUNT.pack_into(_Launched.heart, TIME.size, _env_int("RANK"), _Launched.num_beats)
        TIME.pack_into(_Launched.heart, 0, time.monotonic())


def tell(*status: float) -> None:
    """Note how far the program is: the values of `STATUS`."""
    if _Launched.heart is not None:
        STATUS.pack_into(_Launched.heart, TIME.size + COUNT.size, *status)


def report(error: BaseException) -> None:
    """Tell the launcher that this process is about to end for `error`."""
    _fail(_Launched.directory, error)


def _show(directory: str, *, stacks: bool) -> bool:
    """Make this rank's files for supervisor.py; return whether it will write its stacks."""
    prefix = os.path.join(directory, f"rank-{os.getpid()}")
    try:
        with open(f"{prefix}.heart", "w+b") as file:
            file.write(TIME.pack(0.0) + COUNT.pack(_env_int("RANK"), 0) + bytes(STATUS.size))
            file.flush()
            _Launched.heart = mmap.mmap(file.fileno(), 0)
        _Launched.stacks = open(f"{prefix}.stacks", "w", encoding="utf-8")  # noqa: SIM115 (the handler keeps its descriptor)
    except OSError:
        return False
    if not stacks:
        return False
    faulthandler.register(STACKS_SIGNAL, _Launched.stacks, all_threads=True)
    return True


def die_with(launcher: int) -> None:
    """Have the kernel kill this process when its parent, `launcher`, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it died before the kernel was asked
        os._exit(128 + signal.SIGKILL)


def _env_int(name: str) -> int:
    return int(os.environ.get(name, "0"))


def _announce(directory: str, message: Mapping[str, int | float]) -> None:
    line = json.dumps(message).encode() + b"\n"  # far below PIPE_BUF, so one write is one line
    with contextlib.suppress(OSError):  # a launcher that is gone takes this process with it
        path = os.path.join(directory, "events")
        fifo = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(fifo, line)
        finally:
            os.close(fifo)


def _run_script(path: str, args: list[str]) -> None:
    """Run ``python path args`` as the interpreter does, in a fresh ``__main__`` module."""
    sys.argv[:] = [path, *args]
    sys.path[0:1] = [] if sys.flags.safe_path else [os.path.dirname(os.path.realpath(path))]
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=os.path.abspath(path),
        __builtins__=builtins,
        __loader__=importlib.machinery.SourceFileLoader("__main__", path),
        __cached__=None,
    )
    # spawned children and pickle look the script's classes up here, also at exit
    sys.modules["__main__"] = module
    with open(path, "rb") as file:
        code = compile(file.read(), os.path.abspath(path), "exec", dont_inherit=True)
    exec(code, module.__dict__)


def _fail(directory: str, error: BaseException) -> int:
    """Write the failure down and return the exit code."""
    between = (__file__, "<frozen runpy>", "<frozen importlib._bootstrap>")
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in between:
        frames = frames.tb_next  # frames between the interpreter and the script
    zeroshard_errors = sys.modules.get("zeroshard.errors")
    exit_code = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if zeroshard_errors is not None and isinstance(error, zeroshard_errors.ZeroshardError):
        exit_code = int(getattr(error, "exit_code", 1))
    # Where the script has sharded a model, the library adds its memory to an error of memory that
    # ran out.
    if "zeroshard.runtime.engine" in sys.modules:
        with contextlib.suppress(Exception):  # memory has run out
            importlib.import_module("zeroshard.runtime.ledger").explain(error)
    text = "".join(traceback.format_exception(type(error), error, frames))
    report = {
        "message": "".join(traceback.format_exception_only(type(error), error)).strip(),
        "traceback": text,
        "exit_code": exit_code,
        "consequence": (
            type(error).__name__ == "PeerLostError"
            or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))
        ),
        "stalled": type(error).__name__ == "StallError",
    }
    hook = sys.excepthook
    if not _write_failure(directory, report):
        sys.stderr.write(text)
    elif hook is not sys.__excepthook__ and not hook.__module__.startswith("torch."):
        # the user's own; torch's only prints what the launcher will
        hook(type(error), error, frames)
    return exit_code


def _leave(exit_code: int) -> NoReturn:
    """End without the interpreter's teardown, which waits for threads, or aborts in backends."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def _write_failure(directory: str, failure: Mapping[str, object]) -> bool:
    """Write the file, then announce it; returns whether the file could be written."""
    at = time.monotonic()
    path = os.path.join(directory, f"failure-{os.getpid()}.json")
    try:
        with open(path + ".part", "w", encoding="utf-8") as file:
            json.dump({"at": at, **failure}, file)
        os.rename(path + ".part", path)
    except OSError:
        return False
    _announce(directory, {"pid": os.getpid(), "failed_at": at})
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
