"""Machines: presets with sources, and what no machine can be."""

from __future__ import annotations

import pytest

from zeroshard.core.placement import Mesh
from zeroshard.errors import ConfigError
from zeroshard.planner.machine import Machine, presets


@pytest.mark.parametrize("name", presets())
def test_every_preset_is_a_machine_with_a_source(name: str) -> None:
    machine = Machine.of(name, gpus=64)
    assert machine.gpu_memory > 20 << 30 and machine.host_memory >= 256 << 30
    speeds = dict(vars(machine.speeds))
    assert speeds.pop("disk_core_s") == 0, "which only a measurement knows"
    assert all(speed > 0 for speed in speeds.values())
    assert presets()[name]["source"]


def test_the_presets_of_the_contract_are_there() -> None:
    named = {"V100-32", "A100-40", "A100-80", "H100", "H200", "B200", "RTX4090", "MI300X", "CPU"}
    assert named <= set(presets())


def test_what_is_given_stands_instead_of_the_presets() -> None:
    machine = Machine.of("H100", gpus=16, node_size=4, gpu_memory="32GiB", disk="3.2TB")
    assert machine.mesh == Mesh(4, 4)
    assert (machine.gpu_memory, machine.disk) == (32 << 30, 3_200_000_000_000)
    assert Machine.of("H100", gpus=16, network="1GB").speeds.network == 1e9


def test_fewer_gpus_than_a_node_has_are_one_node() -> None:
    assert Machine.of("H100", gpus=3).mesh == Mesh(1, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpus": 0}, "gpus=0 is less than one"),
        ({"gpus": 12}, "node_size=8 does not divide gpus=12"),
        ({"gpus": 4, "node_size": 0}, "node_size=0 does not divide"),
        ({"gpu_memory": "32"}, "gpu_memory='32' has no unit"),
        ({"host_memory": -1}, "host_memory=-1 is less than one byte"),
    ],
)
def test_an_impossible_machine_is_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Machine.of("H100", **options)  # type: ignore[arg-type]


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"gpu='a10080'.*did you mean 'A100-80'"):
        Machine.of("a10080")
