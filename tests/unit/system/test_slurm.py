"""Slurm's list of nodes, and the task of a step that a process is."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroshard.errors import ConfigError
from zeroshard.system.this_host import SlurmStep, expand, read_step, slurm_variables

STEP = {
    "SLURM_STEP_ID": "3",
    "SLURM_JOB_ID": "1234",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "gpu[01-03],login",
    "SLURM_JOB_NODELIST": "other[1-9]",
}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("node[9-11]", ["node9", "node10", "node11"]),
        ("a[1-2]-ib,b", ["a1-ib", "a2-ib", "b"]),
        ("r[1-2]n[08-09].x", ["r1n08.x", "r1n09.x", "r2n08.x", "r2n09.x"]),
        ("b,a", ["b", "a"]),
    ],
)
def test_a_list_of_nodes_is_expanded_in_its_order(text: str, names: list[str]) -> None:
    assert expand(text) == names


def _folded(prefix: str, width: int, numbers: list[int]) -> str:
    """As `scontrol show hostlist` writes them: runs of numbers in brackets."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] + 1 == number:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [
        f"{run[0]:0{width}d}" + (f"-{run[-1]:0{width}d}" if len(run) > 1 else "") for run in runs
    ]
    return f"{prefix}[{','.join(parts)}]"


@given(
    st.from_regex(r"\A[a-z][a-z-]{0,5}\Z"),
    st.integers(1, 4),
    st.sets(st.integers(0, 300), min_size=1, max_size=40),
)
def test_every_list_that_slurm_can_fold_is_unfolded(
    prefix: str, width: int, numbers: set[int]
) -> None:
    ordered = sorted(numbers)
    names = [f"{prefix}{number:0{width}d}" for number in ordered]
    assert expand(_folded(prefix, width, ordered)) == names
    assert expand(",".join(names)) == names


@given(st.text("ab01[]-,.;$ ", max_size=12))
def test_any_text_is_names_of_hosts_or_an_error_in_a_line(text: str) -> None:
    try:
        names = expand(text)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert names and all(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name) for name in names)


@pytest.mark.parametrize(
    "text",
    ["", "a[1-2", "a]1[", "a[[1]]", "a[]", "a[3-1]", "a[x]", "a[1-999999999]", "-oProxy", "a;b"],
)
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="SLURM_STEP_NODELIST"):
        expand(text)


def test_the_step_says_which_task_this_is() -> None:
    step = read_step(STEP)
    assert step == SlurmStep(8, 4, 5, 1, 2, ("gpu01", "gpu02", "gpu03", "login"), step.port)
    same = read_step({**STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"})
    assert same is not None and same.port == step.port and 1024 < step.port < 32768
    other = read_step({**STEP, "SLURM_JOB_ID": "1235"})
    assert other is not None and other.port != step.port
    reserved = read_step({**STEP, "SLURM_STEP_RESV_PORTS": "12005-12006"})
    assert reserved is not None and reserved.port == 12005


def test_a_batch_script_is_no_task() -> None:
    batch = {name: value for name, value in STEP.items() if "STEP" not in name}
    assert read_step(batch) is None and slurm_variables(batch) == {}


def test_a_number_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="SLURM_PROCID='x' is not a whole number"):
        read_step({**STEP, "SLURM_PROCID": "x"})


def test_a_task_of_several_becomes_a_rank_unless_somebody_has_made_it_one() -> None:
    found = slurm_variables(STEP)
    assert found.pop("MASTER_PORT").isdecimal()
    assert found == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "gpu01"}
    assert slurm_variables({**STEP, "MASTER_ADDR": "x"})["MASTER_ADDR"] == "x"
    assert slurm_variables({**STEP, "RANK": "0"}) == {}
    assert slurm_variables({**STEP, "SLURM_STEP_NUM_TASKS": "1"}) == {}
