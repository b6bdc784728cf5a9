"""The line that ``zeroshard run`` takes: torchrun's options as torchrun has them, and a script
whose arguments nobody touches.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.launch.options import (
    REFUSED,
    RUN,
    TORCHRUN_FLAGS,
    TORCHRUN_VALUES,
    RunOptions,
    parse_run,
)
from zeroshard.terminal import LineParser, UsageError

SCRIPT = __file__


def _parse(*argv: str) -> RunOptions:
    parser = LineParser(prog="zeroshard run", allow_abbrev=False)
    RUN.declare(parser)
    return parse_run(parser, list(argv))


def test_the_table_of_torchruns_options_is_that_of_the_installed_torch() -> None:
    from torch.distributed.run import get_args_parser

    flags, values = set(), set()
    for action in get_args_parser()._actions:
        names = {
            name for name in action.option_strings if name.startswith("--") and "_" not in name
        }
        (flags if action.nargs == 0 else values).update(names)
    # not in torch 2.11, and not before 2.14
    newer = {"--shutdown-timeout", "--log-line-prefix-template"} - values
    assert set(TORCHRUN_FLAGS) == flags - {"--help", *REFUSED}
    assert set(TORCHRUN_VALUES) - newer == values - {"--nproc-per-node", *REFUSED}


@given(st.lists(st.text(st.characters(exclude_characters="\0"))))
def test_what_follows_the_script_is_passed_on_as_it_is(args: list[str]) -> None:
    assert _parse("--nproc", "2", SCRIPT, *args).args == args


@pytest.mark.parametrize(
    "argv",
    [["--nnodes", "2", "--rdzv-endpoint=host:1"], ["--nnodes=2", "--rdzv_endpoint", "host:1"]],
    ids=["dashes", "underscores"],
)
def test_torchruns_options_pass_in_every_spelling(argv: list[str]) -> None:
    options = _parse(*argv, SCRIPT)
    assert options.torchrun == ["--nnodes=2", "--rdzv-endpoint=host:1"]
    assert not options.standalone


def test_without_a_place_for_the_job_it_stands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _parse(SCRIPT).standalone
    assert _parse("--nnodes=1", "--node-rank=0", SCRIPT).standalone
    assert _parse("--master-addr=127.0.0.1", SCRIPT).standalone
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    assert (
        _parse(f"--master-port={port}", SCRIPT).standalone,
        _parse(f"--master-port={port}", SCRIPT).port,
    ) == (True, port)
    assert not _parse("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", SCRIPT).standalone
    assert not _parse("--nnodes=1", "--node-rank=1", SCRIPT).standalone
    monkeypatch.setenv("PET_NNODES", "2")  # torchrun reads its defaults from such variables
    assert not _parse(SCRIPT).standalone


def test_the_only_node_of_a_job_stands_alone_whatever_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kubeflow gives the pod of a TrainJob of one node these variables."""
    monkeypatch.setenv("PET_NODE_RANK", "0")
    monkeypatch.setenv("PET_MASTER_ADDR", "gpt-node-0-0.gpt")
    monkeypatch.setenv("PET_MASTER_PORT", "29500")
    monkeypatch.setenv("PET_NNODES", "2")
    assert not _parse(SCRIPT).standalone
    with pytest.raises(UsageError, match="needs one launcher for all ranks"):
        _parse("--elastic", SCRIPT)
    monkeypatch.setenv("PET_NNODES", "1")
    assert (_parse(SCRIPT).standalone, _parse(SCRIPT).port) == (True, 29500)
    assert _parse("--elastic", SCRIPT).elastic == 1
    monkeypatch.setenv("PET_MAX_RESTARTS", "3")
    with pytest.raises(UsageError, match="--elastic and --max-restarts exclude each other"):
        _parse("--elastic", SCRIPT)
    monkeypatch.delenv("PET_NNODES")
    assert not _parse(SCRIPT).standalone


@pytest.mark.parametrize(
    ("argv", "kind"),
    [(["-m", "json.tool"], "module"), (["--no-python", "ls"], "command"), ([SCRIPT], "script")],
)
def test_scripts_modules_and_programs_can_be_started(argv: list[str], kind: str) -> None:
    assert _parse(*argv, "-x").kind == kind
    assert _parse(*argv, "-x").args == ["-x"]


def test_two_dashes_end_the_launchers_options() -> None:
    assert _parse("--nproc=2", "--", SCRIPT, "--nproc", "3").args == ["--nproc", "3"]


def test_the_grace_is_three_seconds_unless_the_user_says_otherwise() -> None:
    assert _parse(SCRIPT).grace_s == 3
    assert _parse("--shutdown-timeout", "10", SCRIPT).grace_s == 10


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no script given"),
        (["--nproc", "2"], "no script given"),
        (["--nproc"], "--nproc needs a value"),
        (["--nproc", "0", SCRIPT], "--nproc must be a number of at least 1"),
        (["--nproc", "-1", SCRIPT], "--nproc must be a number of at least 1"),
        (["--nproc", "two", SCRIPT], "not 'two'"),
        (["--nprocs", "2", SCRIPT], r"unknown option --nprocs, did you mean --nproc\?"),
        (["--standalone=1", SCRIPT], "--standalone takes no value"),
        (["--run-path", SCRIPT], "--run-path has no place here"),
        (["-m", "--no-python", "json.tool"], "exclude each other"),
        (["--standalone", "--nnodes", "2", SCRIPT], "--standalone and --nnodes exclude each other"),
        (["--shutdown-timeout", "soon", SCRIPT], "--shutdown-timeout must be a number"),
        (["--include", "a", SCRIPT], "--include goes with --hostfile"),
        (["--rejoin-after=0", SCRIPT], "--rejoin-after goes with --hostfile"),
        (["--hostfile", "h", "--rejoin-after=5", SCRIPT], "--rejoin-after goes with --elastic"),
        (["--hostfile", "h", "--elastic", "--rejoin-after=-1", SCRIPT], "a number of seconds"),
        (["--hostfile", "h", "--nproc", "2", SCRIPT], "--hostfile and --nproc exclude each other"),
        (["--hostfile", "h", "--nnodes=2", SCRIPT], "--hostfile and --nnodes exclude each other"),
        (["--hostfile", "h", "--max-restarts=1", SCRIPT], "--hostfile and --max-restarts exclude"),
        (["--master-port", "http", SCRIPT], "--master-port must be a port number"),
        (["-m", "no_such_module_here"], "module 'no_such_module_here' not found"),
        (["no_such_script.py"], "script 'no_such_script.py' not found in"),
        (["."], "is not a file that can be read"),
    ],
)
def test_a_line_that_makes_no_sense_is_refused_with_the_reason(
    argv: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        _parse(*argv)
    assert "\n" not in str(caught.value)


def test_a_pinned_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(UsageError, match=f"--master-port {port} cannot be used"):
            _parse("--master-port", port, SCRIPT)


def test_a_module_is_looked_up_without_running_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "explosive.py").write_text("raise SystemExit('ran')")
    monkeypatch.chdir(tmp_path)
    assert _parse("-m", "explosive").kind == "module"
    assert "explosive" not in sys.modules


def test_an_option_of_ours_after_the_script_goes_to_the_script_and_is_hinted_at(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _parse(SCRIPT, "--steps", "3").args == ["--steps", "3"] and capsys.readouterr().err == ""
    for late in (["--nproc", "2"], ["--nproc=2"], ["--nproc-per-node", "2"]):
        assert _parse(SCRIPT, *late).args == late
        said = capsys.readouterr().err
        assert "options of zeroshard run come before the script" in said and said.count("\n") == 1


STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "7",
    "SLURM_PROCID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[08-09]",
}


def test_one_task_per_node_of_a_slurm_step_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    place = _parse(SCRIPT).place
    assert place is not None and not _parse(SCRIPT).standalone
    assert (place.node_rank, place.num_nodes, place.master_addr) == (1, 2, "gpu08")
    chosen = _parse("--master-port=5000", "--master-addr=x", SCRIPT).place
    assert chosen is not None and (chosen.master_addr, chosen.master_port) == ("x", 5000)
    assert _parse("--standalone", SCRIPT).place is None
    assert _parse("--rdzv-backend=c10d", "--rdzv-endpoint=x:1", SCRIPT).place is None
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "16")
    with pytest.raises(UsageError, match=r"16 task\(s\) on 2 node\(s\).*one task per node"):
        _parse(SCRIPT)
    monkeypatch.delenv("SLURM_STEP_ID")  # a batch script
    assert _parse(SCRIPT).standalone and _parse(SCRIPT).place is None


def test_one_task_of_mpirun_per_host_takes_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    task = {"RANK": 1, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 1}
    for name, value in task.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    with pytest.raises(UsageError, match=r"one task on each of 2 hosts.*--master-addr HOST"):
        _parse(SCRIPT)
    chosen = _parse("--master-port=5000", "--master-addr=x", SCRIPT).place
    assert chosen is not None and (chosen.node_rank, chosen.num_nodes) == (1, 2)
    assert (chosen.master_addr, chosen.master_port) == ("x", 5000)
    assert _parse("--standalone", SCRIPT).place is None
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    with pytest.raises(UsageError, match=r"2 of 2 tasks on this host.*one per host"):
        _parse(SCRIPT)


def test_a_hostfile_takes_a_master_and_torchruns_options(tmp_path: Path) -> None:
    options = _parse("--hostfile=h", "--master-port=5", "--export=A,B", "--tee=3", SCRIPT)
    assert options.hosts is not None and options.hosts.export == ("A", "B")
    assert options.hosts.master_port == 5 and "--tee=3" in options.torchrun
    assert not options.standalone
    assert options.hosts.rejoin_after == 60
    options = _parse("--hostfile=h", "--elastic", "--rejoin-after=2.5", SCRIPT)
    assert options.hosts is not None and options.hosts.rejoin_after == 2.5
