"""A device is known by the functions of torch's module for its type, and no device is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from zeroshard.checkpoint.rank_part import generators, restore_generators
from zeroshard.commands import doctor
from zeroshard.errors import ConfigError
from zeroshard.memory import mark, pinned_pages
from zeroshard.planner import modules
from zeroshard.planner.machine import nearest_preset
from zeroshard.runtime.ledger import ProcessMemory
from zeroshard.runtime.streams import Streams, make_streams
from zeroshard.system import device as devices
from zeroshard.system.device import Device, all_devices, undisturbed
from zeroshard.tier.store import Direct, link_of


class _Module:
    """A module of a type with two devices, as torch.xpu is one."""

    def __init__(self, **seats: Any) -> None:
        self.notes: list[Any] = []
        self.states = [torch.full((4,), index, dtype=torch.uint8) for index in range(2)]
        self.current = 0
        vars(self).update(seats)

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return self.current

    def set_device(self, index: int) -> None:
        self.current = index

    def _index(self, device: torch.device) -> int:
        return self.current if device.index is None else device.index

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        return self.states[self._index(device)].clone()

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[self._index(device)] = state.clone()

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 600, 1000

    def memory_allocated(self, device: torch.device) -> int:
        return 100

    def memory_reserved(self, device: torch.device) -> int:
        return 150

    def synchronize(self, device: torch.device) -> None:
        self.notes.append(("synchronize", device))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> _Module:
    """The module of the machine's accelerator, which calls itself xpu in this test."""
    return _accelerate(monkeypatch, "xpu", _Module())


def _accelerate(monkeypatch: pytest.MonkeyPatch, kind: str, module: Any) -> Any:
    real = torch.get_device_module

    def get(device: Any = None) -> Any:
        return module if torch.device(device).type == kind else real(device)

    monkeypatch.setattr(torch, "get_device_module", get)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind)
    )
    return module


def test_a_type_without_a_module_is_refused_with_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"'meta': torch has no module .* use a cpu"):
        Device.of("meta")


def test_a_function_that_a_module_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _accelerate(monkeypatch, "xpu", SimpleNamespace(current_stream=None, current_device=None))
    with pytest.raises(ConfigError, match=r"device 'xpu:1': torch\.xpu has no mem_get_info\(\)"):
        Device.of("xpu:1").free_bytes()
    with pytest.raises(ConfigError, match=r"torch\.xpu has no Stream\(\)"):
        make_streams("xpu:0")


def test_a_machine_without_an_accelerator_has_no_devices() -> None:
    if not torch.accelerator.is_available():
        assert Device.accelerator() is None and all_devices() == []
    assert not Device.of("cpu").has_streams


def test_free_memory_counts_what_the_allocator_keeps(module: _Module) -> None:
    assert Device.of("xpu:1").mem_get_info() == (600, 1000)
    assert Device.of("xpu:1").usage() == (100, 150)
    assert Device.of("xpu:1").free_bytes() == 650


def test_what_is_allocated_shows_in_the_ledger_once_the_device_is_in_use(module: _Module) -> None:
    found = ProcessMemory.now()
    assert (found.device_allocated, found.device_reserved) == (100, 150)
    module.is_initialized = lambda: False  # type: ignore[attr-defined]
    assert ProcessMemory.now().device_allocated is None


def test_facts_of_a_device_whose_module_tells_nothing_are_its_type_and_place(
    module: _Module,
) -> None:
    assert [one.facts() for one in all_devices()] == [
        {
            "name": "xpu", "type": "xpu", "index": index, "memory_bytes": 1000,
            "capability": None, "backend": "xccl", "uuid": f"xpu:{index}",
        }
        for index in range(2)
    ]  # fmt: skip


def test_facts_come_from_the_properties_where_there_are_any(module: _Module) -> None:
    told = SimpleNamespace(name="Max 1550", total_memory=1 << 36, uuid="f00", major=9, minor=0)
    module.get_device_properties = lambda device: told  # type: ignore[attr-defined]
    facts = Device.of("xpu:0").facts()
    assert (facts["name"], facts["memory_bytes"], facts["uuid"]) == ("Max 1550", 1 << 36, "f00")
    assert facts["capability"] == "9.0"


def test_a_model_on_another_device_than_the_current_one_is_refused(module: _Module) -> None:
    Device.of("xpu:0").check_current()
    Device.of("cpu").check_current()
    with pytest.raises(ConfigError, match=r"on xpu:1, and .* torch\.xpu\.set_device\(1\)"):
        Device.of("xpu:1").check_current()
    assert Device.of("xpu").make_current(1) == torch.device("xpu", 1)
    Device.of("xpu:1").check_current()


def test_generators_of_devices_and_of_the_cpu_are_put_back(module: _Module) -> None:
    on_cpu = torch.get_rng_state()
    with undisturbed(torch.device("xpu", 1), torch.device("meta")):
        module.states[1] += 7
        torch.rand(1)
    assert module.states[1].tolist() == [1] * 4
    assert torch.equal(torch.get_rng_state(), on_cpu)


def test_the_generator_of_any_accelerator_is_saved_and_restored(module: _Module) -> None:
    saved = generators()
    assert saved["xpu"].tolist() == [0] * 4
    module.states[0] += 7
    restore_generators({"xpu": saved["xpu"]})
    assert module.states[0].tolist() == [0] * 4


def test_a_state_of_another_type_of_accelerator_is_left_alone(module: _Module) -> None:
    module.states[0] += 7
    restore_generators({"cuda": torch.zeros(4, dtype=torch.uint8)})  # saved on another machine
    assert module.states[0].tolist() == [7] * 4


def test_a_state_that_was_saved_on_a_gpu_is_restored_there(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _accelerate(monkeypatch, "cuda", _Module())
    restore_generators({"cuda": torch.full((4,), 9, dtype=torch.uint8)})
    assert gpu.states[0].tolist() == [9] * 4


def test_the_doctor_tells_an_accelerator_without_a_backend(
    module: _Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = doctor.facts()
    assert [one["type"] for one in found["devices"]] == ["xpu", "xpu"]
    assert found["backends"]["xccl"] is False
    missing = [one["what"] for one in doctor.find_missing(found)]
    assert "XCCL in torch" in missing
    assert ("xpu:1", "xpu, 1.0 kB") in doctor._machine({**found, "measured": None})


def test_a_plan_of_an_unknown_device_takes_the_preset_of_nearest_memory(module: _Module) -> None:
    told = SimpleNamespace(name="Unheard-of", total_memory=80 * 10**9)
    module.get_device_properties = lambda device: told  # type: ignore[attr-defined]
    name, _ = modules._speeds(torch.device("xpu:0"), 1)
    assert name == f"preset {nearest_preset('Unheard-of', 80 * 10**9)}"


def test_a_type_with_one_device_is_asked_without_naming_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch.mps: no index, no streams, no current_device()."""
    state = torch.zeros(3, dtype=torch.uint8)
    module = SimpleNamespace(
        device_count=lambda: 1,
        synchronize=lambda: None,
        get_rng_state=lambda: state.clone(),
        set_rng_state=state.copy_,
    )
    _accelerate(monkeypatch, "mps", module)
    own = Device.of("mps:0")
    with undisturbed(torch.device("mps:0")):
        own.set_generator_state(torch.ones(3, dtype=torch.uint8))
    assert state.tolist() == [0, 0, 0]
    own.synchronize()
    own.check_current()
    assert own.make_current(0) == torch.device("mps", 0)
    assert type(make_streams("mps:0")) is Streams
    assert isinstance(link_of(torch.device("mps:0")), Direct)
    assert mark(torch.device("mps:0")) is None


def test_pages_are_registered_only_where_the_driver_does_it(
    module: _Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Device.of("xpu").host_register() is None
    pinned_pages.cache_clear()
    assert pinned_pages() is None
    pinned_pages.cache_clear()
    monkeypatch.undo()
    assert Device.of("cuda").host_register() is not None


def test_a_backend_is_the_one_that_torch_knows_for_the_type(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backends = {kind: Device.of(kind).backend for kind in ("cpu", "cuda", "xpu")}
    assert backends == {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
    monkeypatch.delitem(dist.Backend.default_device_backend_map, "xpu")
    assert Device.of("xpu").backend is None


def test_only_devices_whose_segments_grow_get_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", None)  # as in a build for ROCm
    assert devices.allocator_setting({}) is None
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert devices.allocator_setting({}) == (
        "PYTORCH_ALLOC_CONF", "expandable_segments:True", "CUDA memory that fragments less"
    )  # fmt: skip
    assert devices.allocator_setting({"PYTORCH_CUDA_ALLOC_CONF": ""}) is None
