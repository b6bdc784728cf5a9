// A pretended accelerator: lanes (streams) that run later, events, memory the host cannot touch.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace zsim {

struct Record {  // one place in one lane's order
  std::atomic<bool> done{false};
  double when = 0;  // seconds
};
using RecordPtr = std::shared_ptr<Record>;

struct Lane {
  int device;
  int64_t stream;
};

int device_count();
int current_device();
void set_current_device(int device);
int64_t current_stream(int device);
void set_current_stream(int device, int64_t stream);
int64_t new_stream(int device, int priority);

// `work` runs on the lane once `after` is done; `mark` is done afterwards
void enqueue(Lane lane, const char* name, std::function<void()> work, RecordPtr after = nullptr,
             RecordPtr mark = nullptr);
RecordPtr record(Lane lane);
void lane_waits(Lane lane, RecordPtr record);
void host_waits(const RecordPtr& record, const char* why);
bool poll(const RecordPtr& record);
bool lane_is_idle(Lane lane);
void synchronize(Lane lane, const char* why);
void synchronize_device(int device, const char* why);
// "threads": a thread per lane, at once. "fifo", "random", "compute_first", "compute_last":
// one thread, only while the host waits, in that order of lanes
void set_schedule(const std::string& mode, uint64_t seed);
std::string schedule();
void set_delay(int device, int64_t stream, int64_t microseconds);  // threads mode: before each of its tasks
std::vector<std::string> take_log(bool on);            // names of tasks in the order they ran
uint64_t host_wait_count();
std::vector<std::pair<std::string, uint64_t>> host_wait_reasons();

// memory
char* take_range(int device, size_t bytes);  // a device address; touching it on the host is SIGSEGV
char* at_kernel(const void* device_address);  // where the device's own kernels reach it
bool is_device_address(const void* address);
int device_of(const void* address);
void register_host(uintptr_t address, size_t bytes);
void unregister_host(uintptr_t address);
bool is_registered(const void* address);
size_t memory_limit(int device);
void set_memory_limit(size_t bytes, int device);

}  // namespace zsim
