"""The task of an MPI job that a process is, from the variables of several launchers."""

from __future__ import annotations

import pytest

from zeroshard.errors import ConfigError
from zeroshard.system.this_host import MpiTask, rank_variables, read_task

FAMILIES = {
    "open mpi": ("OMPI_COMM_WORLD_{}", "RANK SIZE LOCAL_RANK LOCAL_SIZE"),
    "mvapich": ("MV2_COMM_WORLD_{}", "RANK SIZE LOCAL_RANK LOCAL_SIZE"),
    "hydra": ("{}", "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS"),
    "pals": ("PMI_{}", "RANK SIZE LOCAL_RANK LOCAL_SIZE"),
}
SLURM = {
    "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "a,b",
}  # fmt: skip


def _set(family: str, *numbers: int, **others: str) -> dict[str, str]:
    form, words = FAMILIES[family]
    values = map(str, numbers)
    return dict(zip(map(form.format, words.split()), values, strict=True)) | others


@pytest.mark.parametrize("family", FAMILIES)
def test_every_launcher_of_mpi_says_which_rank_of_which_host_this_is(family: str) -> None:
    environ = _set(family, 5, 8, 1, 4, PMIX_NAMESPACE="77")
    task = read_task(environ)
    assert task is not None and task == MpiTask(5, 8, 1, 4, task.port)
    found = rank_variables({**environ, "MASTER_ADDR": "first"})
    assert found.pop("MASTER_PORT") == str(task.port)
    assert found == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "first",
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_on_several_hosts_somebody_has_to_say_where_the_first_is(family: str) -> None:
    with pytest.raises(ConfigError, match=r"4 of 8 ranks on this host.*set MASTER_ADDR"):
        rank_variables(_set(family, 5, 8, 1, 4))


@pytest.mark.parametrize("family", FAMILIES)
def test_on_one_host_ranks_meet_at_loopback_at_the_same_port(family: str) -> None:
    found = [rank_variables(_set(family, rank, 2, rank, 2)) for rank in range(2)]
    assert {one["MASTER_ADDR"] for one in found} == {"127.0.0.1"}
    assert len({one["MASTER_PORT"] for one in found}) == 1
    assert [one["RANK"] for one in found] == ["0", "1"]
    assert rank_variables(_set(family, 0, 2, 0, 2, MASTER_PORT="99"))["MASTER_PORT"] == "99"


def test_jobs_on_one_host_have_ports_of_their_own() -> None:
    ports = [
        rank_variables(_set("open mpi", 0, 2, 0, 2, PMIX_NAMESPACE=job))["MASTER_PORT"]
        for job in ("1455489025", "1455489026")
    ]
    assert ports[0] != ports[1]


def test_one_task_alone_and_one_that_is_a_rank_already_are_left_as_they_are() -> None:
    for family in FAMILIES:
        assert rank_variables(_set(family, 0, 1, 0, 1)) == {}
        assert rank_variables(_set(family, 0, 2, 0, 2, RANK="0")) == {}
    assert rank_variables({}) == {} and rank_variables({"PMI_RANK": "0", "PMI_SIZE": "1"}) == {}


def test_mpirun_in_an_allocation_goes_before_the_step_of_its_daemons_and_srun_before_pmi() -> None:
    inside = _set("hydra", 3, 4, 1, 2, MASTER_ADDR="a") | SLURM
    assert rank_variables(inside)["RANK"] == "3"
    by_srun = {**SLURM, "PMI_RANK": "1", "PMI_SIZE": "2", "PMIX_RANK": "1"}
    assert rank_variables(by_srun) == rank_variables(SLURM) != {}
    alone = {**by_srun, "SLURM_STEP_NUM_TASKS": "1"}
    assert rank_variables(alone) == {}


@pytest.mark.parametrize("environ", [{"PMI_RANK": "0", "PMI_SIZE": "2"}, {"PMIX_RANK": "0"}])
def test_a_rank_of_which_more_is_not_known_does_not_train_alone(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR"):
        rank_variables(environ)


def test_a_number_that_is_none_is_named() -> None:
    environ = {**_set("open mpi", 0, 2, 0, 2), "OMPI_COMM_WORLD_SIZE": "x"}
    with pytest.raises(ConfigError, match="OMPI_COMM_WORLD_SIZE='x' is not a whole number"):
        rank_variables(environ)
