// What Python calls: zsim/__init__.py and zsim/module.py say what each function is for.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <thread>

#include "allocator.h"
#include "collectives.h"
#include "generator.h"
#include "lanes.h"
#include "memory.h"
#include "operators.h"

namespace zsim {

namespace {

namespace py = pybind11;

std::pair<size_t, size_t> memory_info(int device) {
  const size_t total = memory_limit(device);
  const auto stats = device_allocator().getDeviceStats(static_cast<c10::DeviceIndex>(device));
  const size_t reserved = stats.reserved_bytes[0].current;
  return {total - std::min(total, reserved), total};
}

void sleep(int64_t microseconds, int device) {
  enqueue(current_lane(device), "sleep",
          [=] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("device_count", &device_count);
  m.def("generator", &default_generator);
  m.def("sleep", &sleep);

  m.def("set_schedule", &set_schedule);
  m.def("schedule", &schedule);
  m.def("finish", &finish);
  m.def("set_delay", &set_delay);
  m.def("take_log", &take_log);
  m.def("host_waits", &host_wait_counts);
  m.def("synchronous_operators", &synchronous_operators);
  m.def("launched_operators", &launched_operators);

  m.def("memory_info", &memory_info);
  m.def("set_memory_limit", &set_memory_limit);
  m.def("register_host", &register_host);
  m.def("unregister_host", &unregister_host);

  m.def("zccl_over", &zccl_over);
  m.def("take_collectives", &take_collectives);
  m.def("name_collectives", &name_collectives);
}

}  // namespace zsim
