// Lanes: each stream of a device is a queue of tasks. The host puts tasks there and goes on; a
// schedule decides when they run. Events are marks in a lane's order.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace zsim {

struct Mark {  // a place in a lane's order
  std::atomic<bool> reached{false};
  double seconds = 0;  // when it was reached, by the steady clock
};
using MarkPtr = std::shared_ptr<Mark>;

struct Lane {
  int device;
  int64_t stream;  // 0: the default stream
};

int device_count();  // ZSIM_DEVICES

// What is current, by thread.
int current_device();
void set_current_device(int device);
Lane current_lane(int device = -1);
void set_current_lane(Lane lane);
int64_t new_stream(int device);  // from a pool of 32, as CUDA's

// Puts `work` on the lane. It runs once `after` is reached; then `mark` is.
void enqueue(Lane lane, const char* name, std::function<void()> work, MarkPtr after = nullptr,
             MarkPtr mark = nullptr);
MarkPtr mark(Lane lane);
void lane_waits(Lane lane, const MarkPtr& mark);

// The host waits. Each wait that is not over at once is counted under its reason.
void host_waits(const MarkPtr& mark, const std::string& reason);
void host_waits_for(Lane lane, const std::string& reason);
void host_waits_for_device(int device, const std::string& reason);
std::map<std::string, uint64_t> host_wait_counts();
void finish(double seconds);  // at the end of a process: all lanes, but no longer

// A question that waits for nothing. Under a lazy schedule it pays for one task: a host that polls
// gets there.
bool is_reached(const MarkPtr& mark);
bool is_idle(Lane lane);

// "threads": a thread for each lane, at once. The others are lazy: one thread runs one task at a
// time, only while the host waits. "fifo": in the order of launches. "random": by `seed`, in any
// order that marks allow. "compute_first", "compute_last": default streams before or after others.
void set_schedule(const std::string& name, uint64_t seed);
std::string schedule();
// Before each task of a stream (-1: of all streams of the device). Only "threads" has time.
void set_delay(int device, int64_t stream, int64_t microseconds);
// Tasks that ran since the last call, "device.stream:name"; `on`: write on.
std::vector<std::string> take_log(bool on);

}  // namespace zsim
