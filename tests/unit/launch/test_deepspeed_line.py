"""The line of DeepSpeed's launcher: what each option becomes, and which are refused with what to
use. Nothing is started.
"""

from __future__ import annotations

import importlib.metadata
import os
import stat
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.deepspeed.shim import VERSION
from zeroshard.launch import cli, deepspeed_line
from zeroshard.launch.deepspeed_line import REFUSED, Line, parse
from zeroshard.launch.options import Host, HostPlace
from zeroshard.system.device import VISIBLE_DEVICES
from zeroshard.terminal import UsageError

SCRIPT = __file__
HOSTS = "worker-0 slots=4\nworker-1 slots=4\n"
# every option of deepspeed/launcher/runner.py, 0.19, but --help
THEIRS = {
    "-H", "--hostfile", "-i", "--include", "-e", "--exclude", "--num_nodes", "--min_elastic_nodes",
    "--max_elastic_nodes", "--num_gpus", "--num_accelerators", "--master_port", "--master_addr",
    "--node_rank", "--launcher", "--launcher_args", "--module", "--no_python", "--no_local_rank",
    "--no_ssh", "--no_ssh_check", "--force_multi", "--save_pid", "--enable_each_rank_log",
    "--autotuning", "--comment", "--account", "--elastic_training", "--bind_cores_to_rank",
    "--bind_core_list", "--ssh_port", "--venv_script",
}  # fmt: skip


@pytest.fixture
def hosts(tmp_path: Path) -> str:
    path = tmp_path / "hosts"
    path.write_text(HOSTS)
    return str(path)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(deepspeed_line, "DEFAULT_HOSTFILE", str(tmp_path / "none"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.chdir(tmp_path)
    for name in VISIBLE_DEVICES.values():
        monkeypatch.delenv(name, raising=False)


def _parse(*argv: str) -> Line:
    return parse(cli.build_parsers()[1]["deepspeed"], list(argv))


def test_every_option_of_deepspeeds_launcher_is_taken_or_refused() -> None:
    known = {*deepspeed_line._UNITS, *REFUSED} - {"--help", "-h"}
    assert known == THEIRS


@given(st.lists(st.text(st.characters(exclude_characters="\0"))))
def test_what_follows_the_script_is_passed_on_as_it_is(args: list[str]) -> None:
    line = _parse("--num_gpus", "2", SCRIPT, *args)
    assert line.options.args == args and line.options.nproc == "2"


@pytest.mark.parametrize("argv", [["--num_gpus=8"], ["--num_gpus", "8"], ["--num-accelerators=8"]])
def test_the_line_of_every_introduction(argv: list[str]) -> None:
    line = _parse(*argv, SCRIPT, "--deepspeed", "zero.json")
    options = line.options
    assert (options.script, options.args) == (SCRIPT, ["--deepspeed", "zero.json"])
    assert options.as_deepspeed and options.local_rank and options.standalone
    assert (options.nproc, list(line.devices), line.hosts) == ("8", list(range(8)), ())


def test_without_a_number_there_is_one_rank_per_device() -> None:
    line = _parse("--no_local_rank", "--master_port=29501", SCRIPT)
    assert (line.options.nproc, line.options.local_rank, line.options.port) == (None, False, 29501)
    assert list(line.devices) == []


@pytest.mark.parametrize(
    ("argv", "devices"),
    [(["--include", "localhost:1,3"], [1, 3]), (["-e", "localhost:0"], [1, 2, 3])],
)
def test_slots_of_this_machine_are_its_devices(
    argv: list[str], devices: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 4)
    line = _parse(*argv, SCRIPT)
    assert (list(line.devices), line.options.nproc) == (devices, str(len(devices)))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    deepspeed_line.take_devices(line.devices)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(map(str, devices))
    with pytest.raises(UsageError, match="device 4 is not there: this machine has 4"):
        deepspeed_line.take_devices([4])


@pytest.mark.parametrize(
    ("argv", "chosen"),
    [
        ([], {"worker-0": 4, "worker-1": 4}),
        (["--num_gpus=2"], {"worker-0": 2, "worker-1": 2}),
        (["--include", "worker-0@worker-1:0,2"], {"worker-0": 4, "worker-1": 2}),
        (["--exclude=worker-0:1"], {"worker-0": 3, "worker-1": 4}),
        (["--num_nodes", "1"], {"worker-0": 4}),
    ],
)
def test_hosts_and_slots_are_chosen(hosts: str, argv: list[str], chosen: dict[str, int]) -> None:
    line = _parse("-H", hosts, *argv, SCRIPT)
    assert {host.name: len(host.slots) for host in line.hosts} == chosen
    assert line.options.hosts is not None and not line.options.standalone


def test_a_single_host_that_is_this_one_needs_no_ssh(tmp_path: Path) -> None:
    path = tmp_path / "one"
    path.write_text("localhost slots=4\n")
    line = _parse(f"--hostfile={path}", "--num_gpus=2", SCRIPT)
    assert (line.options.hosts, line.options.nproc, list(line.devices)) == (None, "2", [0, 1])
    forced = _parse(f"--hostfile={path}", "--force_multi", "--ssh_port=2222", SCRIPT)
    assert forced.options.hosts is not None and forced.options.hosts.ssh == "ssh -p 2222"
    assert forced.hosts == [Host("localhost", (0, 1, 2, 3), 4)]


def test_a_line_per_host_is_a_place_among_them(hosts: str) -> None:
    options = _parse("-H", hosts, "--no_ssh", "--node_rank=1", SCRIPT).options
    assert options.place == HostPlace(1, 2, "worker-0", 29500)
    assert (options.hosts, options.nproc, options.standalone) == (None, "4", False)


def test_the_file_of_variables_goes_to_other_hosts_only(hosts: str, tmp_path: Path) -> None:
    (tmp_path / ".deepspeed_env").write_text("# names\n\nNCCL_DEBUG=INFO\nA=b=c d\n")
    choice = _parse("-H", hosts, SCRIPT).options.hosts
    assert choice is not None and choice.variables["A"] == "b=c d"
    assert choice.variables["NCCL_DEBUG"] == "INFO"
    assert choice.variables["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
    assert "A" not in os.environ
    (tmp_path / ".deepspeed_env").write_text("A=1\nNCCL_DEBUG\n")
    with pytest.raises(UsageError, match=r"line 2 is not of the form NAME=VALUE"):
        _parse("-H", hosts, SCRIPT)


def test_the_rest_of_the_options() -> None:
    options = _parse("--bind_cores_to_rank", "--bind_core_list=0,2-4", SCRIPT).options
    assert options.bind_cores and list(options.cores) == [0, 2, 3, 4]
    options = _parse("--enable_each_rank_log", "logs", "--module", "json.tool").options
    assert (options.torchrun, options.kind) == (["--redirects=3", "--log-dir=logs"], "module")
    assert _parse("--no_python", "--launcher", "PDSH", "ls").options.kind == "command"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no script given"),
        (["--num_gpus"], "--num_gpus needs a value"),
        (["--num_gpus", "0", SCRIPT], "must be a number of at least 1"),
        (["--num_gpu=2", SCRIPT], r"did you mean --num_gpus\?"),
        (["--tee=3", SCRIPT], "zeroshard run --as-deepspeed"),
        (["--module=x", SCRIPT], "--module takes no value"),
        (["--module", "--no_python", "x"], "exclude each other"),
        (["--num_nodes=2", SCRIPT], "need --hostfile FILE"),
        (["--no_ssh", "--node_rank=0", SCRIPT], "need --hostfile FILE"),
        (["--node_rank=0", SCRIPT], "--no_ssh and --node_rank N go together"),
        (["--num_gpus=1", "--include=localhost:0", SCRIPT], "do not go with --include"),
        (["--launcher=slurm", SCRIPT], "srun zeroshard as-deepspeed python train.py"),
        (["--launcher=openmpi", SCRIPT], "mpirun zeroshard as-deepspeed"),
        (["--launcher=jsrun", SCRIPT], "--hostfile FILE goes over ssh"),
        (["--bind_core_list=0", SCRIPT], "goes with --bind_cores_to_rank"),
        (["--bind_cores_to_rank", "--bind_core_list=x", SCRIPT], "'x' is no number"),
        (["no_such.py"], "script 'no_such.py' not found"),
        *([[name, "x"], "has no place here: "] for name in REFUSED),
    ],
)
def test_a_line_that_makes_no_sense_is_refused_with_the_remedy(
    argv: list[str], message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        _parse(*argv)
    assert "\n" not in str(caught.value)


def test_more_ranks_than_slots_are_refused(hosts: str) -> None:
    with pytest.raises(UsageError, match="--num_gpus 5: worker-0 has slots=4"):
        _parse("-H", hosts, "--num_gpus=5", SCRIPT)
    with pytest.raises(UsageError, match=r"--node_rank 2: there are 2 host\(s\)"):
        _parse("-H", hosts, "--no_ssh", "--node_rank=2", SCRIPT)


# ------------------------------------------------------------------ zeroshard as-deepspeed


def test_the_stand_in_goes_before_all_paths_once(tmp_path: Path) -> None:
    home = {"XDG_CACHE_HOME": str(tmp_path)}  # nothing has been written there
    paths = {"PYTHONPATH": "/a:/b", "PATH": "/usr/bin"}
    once = deepspeed_line.environment_of_stand_in(home | paths)
    assert deepspeed_line.environment_of_stand_in(once) == once
    folder, facts, *others = once["PYTHONPATH"].split(":")
    assert others == ["/a", "/b"] and (Path(folder) / "deepspeed" / "__init__.py").is_file()
    (found,) = importlib.metadata.distributions(path=[facts])
    assert (found.name, found.version) == ("deepspeed", VERSION)
    program = Path(once["PATH"].split(":")[0]) / "deepspeed"
    assert os.access(program, os.X_OK) and once[deepspeed_line.PYTHON] == sys.executable
    assert deepspeed_line.on_python_path(home) == f"{folder}:{facts}"


def test_a_home_that_cannot_be_written_gets_one_folder_for_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, temporary = {"XDG_CACHE_HOME": f"{tmp_path}/file"}, tmp_path / "temporary"
    (tmp_path / "file").touch()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    path = deepspeed_line.on_python_path(home)
    assert deepspeed_line.on_python_path(home) == path
    folder = Path(path.split(":")[1])
    assert [one.name for one in importlib.metadata.distributions(path=[str(folder)])] == [
        "deepspeed"
    ]
    assert list(temporary.iterdir()) == [folder] and stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o770)  # others could write what Python imports
    with pytest.raises(UsageError, match=r"is not a folder of uid .* with mode 0700: remove it"):
        deepspeed_line.on_python_path(home)
    folder.chmod(0o700)
    folder.rename(temporary / "moved")
    folder.symlink_to(temporary / "moved")  # another user's name for a folder of ours
    with pytest.raises(UsageError, match="with mode 0700"):
        deepspeed_line.on_python_path(home)


def test_a_task_of_mpirun_or_srun_becomes_a_rank() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    step |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    environ = deepspeed_line.environment_of_stand_in({**step, "SLURM_STEP_NODELIST": "n1"})
    found = [environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")]
    assert found == ["1", "2", "1", "n1"]
    assert "RANK" not in deepspeed_line.environment_of_stand_in({})


@pytest.mark.parametrize("argv", [[], ["--"], ["no-such-program-here"]])
def test_a_command_that_is_not_there_is_named(argv: list[str]) -> None:
    with pytest.raises(UsageError, match=r"as-deepspeed: no(-such-program-here: No such file)?"):
        deepspeed_line.become(cli.build_parsers()[1]["as-deepspeed"], argv)
