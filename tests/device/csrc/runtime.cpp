#include "runtime.h"

#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>

namespace zsim {

namespace {

struct Task {
  const char* name;
  std::function<void()> work;
  RecordPtr after, mark;
  uint64_t number;
};

struct Queue {
  int device;
  int64_t stream;
  std::deque<Task> tasks;
  bool running = false;
  bool has_thread = false;
  int64_t delay_us = 0;
};

constexpr int kPool = 32;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

size_t number_from(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

struct Runtime {
  std::mutex m;
  std::condition_variable cv;
  std::vector<std::vector<std::unique_ptr<Queue>>> queues;  // by device, by stream
  std::vector<int> next_in_pool;
  std::map<int, int64_t> delays;  // of all streams of a device
  bool lazy = false;
  std::string mode = "threads";
  std::mt19937_64 random{0};
  int demand = 0;  // host threads that wait
  int budget = 0;  // tasks that polls have paid for
  bool has_executor = false;
  uint64_t number = 0;
  std::string error;
  bool logs = false;
  std::vector<std::string> log;
  uint64_t host_waits = 0;
  std::map<std::string, uint64_t> reasons;

  Runtime() {
    const size_t count = number_from("ZSIM_DEVICES", 2);
    queues.resize(count);
    next_in_pool.assign(count, 0);
    for (size_t device = 0; device < count; ++device) {
      add(device);
    }
    if (const char* text = std::getenv("ZSIM_SCHEDULE")) {
      mode = text;
      lazy = mode != "threads";
    }
    random.seed(number_from("ZSIM_SEED", 0));
  }

  Queue* add(int device) {
    auto queue = std::make_unique<Queue>();
    queue->device = device;
    queue->delay_us = delays[device];
    queue->stream = static_cast<int64_t>(queues[device].size());
    queues[device].push_back(std::move(queue));
    return queues[device].back().get();
  }

  Queue& at(Lane lane) { return *queues.at(lane.device).at(lane.stream); }

  static bool ready(const Queue& queue) {
    return !queue.running && !queue.tasks.empty() &&
           (!queue.tasks.front().after || queue.tasks.front().after->done);
  }

  void run_first(Queue& queue, std::unique_lock<std::mutex>& lock) {
    Task task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    queue.running = true;
    if (logs && task.work) log.push_back(std::to_string(queue.stream) + ":" + task.name);
    const int64_t delay = lazy ? 0 : queue.delay_us;
    lock.unlock();
    if (task.work) {
      if (delay) std::this_thread::sleep_for(std::chrono::microseconds(delay));
      try {
        task.work();
      } catch (const std::exception& problem) {
        std::lock_guard<std::mutex> guard(m);
        if (error.empty()) error = std::string(task.name) + ": " + problem.what();
      }
      task.work = nullptr;  // what it holds goes here
    }
    lock.lock();
    queue.running = false;
    if (task.mark) {
      task.mark->when = now();
      task.mark->done = true;
    }
    cv.notify_all();
  }

  void lane_thread(Queue* queue) {
    std::unique_lock<std::mutex> lock(m);
    for (;;) {
      cv.wait(lock, [&] { return !lazy && ready(*queue); });
      run_first(*queue, lock);
    }
  }

  Queue* pick() {
    std::vector<Queue*> candidates;
    for (auto& device : queues)
      for (auto& queue : device)
        if (ready(*queue)) candidates.push_back(queue.get());
    if (candidates.empty()) return nullptr;
    auto oldest = [](Queue* a, Queue* b) {
      return a->tasks.front().number < b->tasks.front().number;
    };
    if (mode == "random") return candidates[random() % candidates.size()];
    if (mode == "compute_first" || mode == "compute_last") {
      const bool first = mode == "compute_first";
      Queue* best = candidates[0];
      for (Queue* queue : candidates) {
        const bool is_compute = queue->stream == 0, best_is = best->stream == 0;
        if (is_compute != best_is ? is_compute == first : oldest(queue, best)) best = queue;
      }
      return best;
    }
    Queue* best = candidates[0];
    for (Queue* queue : candidates)
      if (oldest(queue, best)) best = queue;
    return best;
  }

  void executor() {
    std::unique_lock<std::mutex> lock(m);
    for (;;) {
      Queue* queue = nullptr;
      cv.wait(lock, [&] {
        queue = lazy && (demand > 0 || budget > 0) ? pick() : nullptr;
        if (!queue && budget > 0) {  // nothing to run for a poll
          budget = 0;
          cv.notify_all();
        }
        return queue != nullptr;
      });
      if (budget > 0) --budget;
      run_first(*queue, lock);
    }
  }

  void start_threads(Queue& queue) {
    if (!has_executor) {
      has_executor = true;
      std::thread([this] { executor(); }).detach();
    }
    if (!queue.has_thread) {
      queue.has_thread = true;
      Queue* pointer = &queue;
      std::thread([this, pointer] { lane_thread(pointer); }).detach();
    }
  }

  void wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& over, const char* why) {
    if (!over()) {
      ++host_waits;
      ++reasons[why];
      ++demand;
      cv.notify_all();
      const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(number_from("ZSIM_STALL_S", 120));
      while (!over()) {
        if (cv.wait_until(lock, until) == std::cv_status::timeout) {
          --demand;
          throw std::runtime_error(std::string("zsim: the device does not get there: ") + why);
        }
      }
      --demand;
    }
    if (!error.empty()) {
      std::string text = std::move(error);
      error.clear();
      throw std::runtime_error("zsim: a kernel failed: " + text);
    }
  }
};

Runtime& rt() {
  static Runtime* runtime = new Runtime;  // lives as long as its threads
  return *runtime;
}

thread_local int tl_device = 0;
thread_local std::vector<int64_t> tl_streams;

}  // namespace

int device_count() { return static_cast<int>(rt().queues.size()); }
int current_device() { return tl_device; }
void set_current_device(int device) { tl_device = device; }

int64_t current_stream(int device) {
  if (device < 0) device = tl_device;
  return static_cast<size_t>(device) < tl_streams.size() ? tl_streams[device] : 0;
}

void set_current_stream(int device, int64_t stream) {
  if (device < 0) device = tl_device;
  if (tl_streams.size() <= static_cast<size_t>(device)) tl_streams.resize(device + 1, 0);
  tl_streams[device] = stream;
}

int64_t new_stream(int device, int) {
  auto& r = rt();
  std::lock_guard<std::mutex> lock(r.m);
  if (device < 0) device = tl_device;
  if (r.queues[device].size() <= kPool) return r.add(device)->stream;
  return 1 + r.next_in_pool[device]++ % kPool;
}

void enqueue(Lane lane, const char* name, std::function<void()> work, RecordPtr after,
             RecordPtr mark) {
  auto& r = rt();
  std::lock_guard<std::mutex> lock(r.m);
  Queue& queue = r.at(lane);
  r.start_threads(queue);
  queue.tasks.push_back({name, std::move(work), std::move(after), std::move(mark), r.number++});
  r.cv.notify_all();
}

RecordPtr record(Lane lane) {
  auto& r = rt();
  {
    std::lock_guard<std::mutex> lock(r.m);
    Queue& queue = r.at(lane);
    if (queue.tasks.empty() && !queue.running) {
      auto reached = std::make_shared<Record>();
      reached->when = now();
      reached->done = true;
      return reached;
    }
  }
  auto mark = std::make_shared<Record>();
  enqueue(lane, "record", nullptr, nullptr, mark);
  return mark;
}

void lane_waits(Lane lane, RecordPtr record) {
  if (record && !record->done) enqueue(lane, "wait", nullptr, std::move(record));
}

void host_waits(const RecordPtr& record, const char* why) {
  auto& r = rt();
  std::unique_lock<std::mutex> lock(r.m);
  r.wait(lock, [&] { return !record || record->done.load(); }, why);
}

bool poll(const RecordPtr& record) {
  if (!record || record->done) return true;
  auto& r = rt();
  std::unique_lock<std::mutex> lock(r.m);
  if (r.lazy) {
    ++r.budget;
    r.cv.notify_all();
    r.cv.wait(lock, [&] { return r.budget == 0 || record->done; });
  }
  return record->done;
}

bool lane_is_idle(Lane lane) {
  auto& r = rt();
  std::unique_lock<std::mutex> lock(r.m);
  Queue& queue = r.at(lane);
  if (r.lazy && !queue.tasks.empty()) {
    ++r.budget;
    r.cv.notify_all();
    r.cv.wait(lock, [&] { return r.budget == 0; });
  }
  return queue.tasks.empty() && !queue.running;
}

void synchronize(Lane lane, const char* why) {
  auto& r = rt();
  std::unique_lock<std::mutex> lock(r.m);
  Queue& queue = r.at(lane);
  r.wait(lock, [&] { return queue.tasks.empty() && !queue.running; }, why);
}

void synchronize_device(int device, const char* why) {
  auto& r = rt();
  std::unique_lock<std::mutex> lock(r.m);
  if (device < 0) device = tl_device;
  r.wait(lock, [&] {
    for (auto& queue : r.queues[device])
      if (!queue->tasks.empty() || queue->running) return false;
    return true;
  }, why);
}

void set_schedule(const std::string& mode, uint64_t seed) {
  for (int device = 0; device < device_count(); ++device) synchronize_device(device, "set_schedule");
  auto& r = rt();
  std::lock_guard<std::mutex> lock(r.m);
  r.mode = mode;
  r.lazy = mode != "threads";
  r.random.seed(seed);
  r.cv.notify_all();
}

std::string schedule() { return rt().mode; }

void set_delay(int device, int64_t stream, int64_t microseconds) {
  auto& r = rt();
  std::lock_guard<std::mutex> lock(r.m);
  if (stream < 0) r.delays[device] = microseconds;
  for (auto& queue : r.queues.at(device))
    if (stream < 0 || queue->stream == stream) queue->delay_us = microseconds;
}

std::vector<std::string> take_log(bool on) {
  auto& r = rt();
  std::lock_guard<std::mutex> lock(r.m);
  r.logs = on;
  return std::exchange(r.log, {});
}

uint64_t host_wait_count() {
  auto& r = rt();
  std::lock_guard<std::mutex> lock(r.m);
  return r.host_waits;
}

std::vector<std::pair<std::string, uint64_t>> host_wait_reasons() {
  auto& r = rt();
  std::lock_guard<std::mutex> lock(r.m);
  return {r.reasons.begin(), r.reasons.end()};
}

// ------------------------------------------------------------------------------------- memory

namespace {

struct Arena {
  char* seen = nullptr;    // PROT_NONE: addresses that tensors have
  char* kernel = nullptr;  // the same pages, where kernels run
  size_t used = 0;
};

constexpr size_t kArena = size_t{1} << 36;  // 64 GiB of addresses; pages come when touched

std::vector<Arena>& arenas() {
  static auto* made = [] {
    auto* out = new std::vector<Arena>(device_count());
    for (Arena& arena : *out) {
      const int file = memfd_create("zsim", MFD_CLOEXEC);
      if (file < 0 || ftruncate(file, kArena)) throw std::runtime_error("zsim: memfd");
      void* seen = mmap(nullptr, kArena, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
      void* kernel = mmap(nullptr, kArena, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
      if (seen == MAP_FAILED || kernel == MAP_FAILED) throw std::runtime_error("zsim: mmap");
      close(file);
      arena.seen = static_cast<char*>(seen);
      arena.kernel = static_cast<char*>(kernel);
    }
    return out;
  }();
  return *made;
}

std::mutex host_mutex;
std::map<uintptr_t, size_t> host_ranges;

}  // namespace

char* take_range(int device, size_t bytes) {
  Arena& arena = arenas().at(device);
  bytes = (bytes + 511) / 512 * 512;
  if (arena.used + bytes > kArena) throw std::runtime_error("zsim: the arena is full");
  char* out = arena.seen + arena.used;
  arena.used += bytes;
  return out;
}

int device_of(const void* address) {
  const char* where = static_cast<const char*>(address);
  for (size_t device = 0; device < arenas().size(); ++device)
    if (where >= arenas()[device].seen && where < arenas()[device].seen + kArena)
      return static_cast<int>(device);
  return -1;
}

bool is_device_address(const void* address) { return device_of(address) >= 0; }

char* at_kernel(const void* address) {
  const int device = device_of(address);
  if (device < 0) return nullptr;
  Arena& arena = arenas()[device];
  return arena.kernel + (static_cast<const char*>(address) - arena.seen);
}

void register_host(uintptr_t address, size_t bytes) {
  std::lock_guard<std::mutex> lock(host_mutex);
  if (!host_ranges.emplace(address, bytes).second) throw std::runtime_error("zsim: registered twice");
}

void unregister_host(uintptr_t address) {
  std::lock_guard<std::mutex> lock(host_mutex);
  if (!host_ranges.erase(address)) throw std::runtime_error("zsim: not registered");
}

bool is_registered(const void* address) {
  std::lock_guard<std::mutex> lock(host_mutex);
  auto after = host_ranges.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (after == host_ranges.begin()) return false;
  --after;
  return reinterpret_cast<uintptr_t>(address) < after->first + after->second;
}

static std::map<int, size_t>& limits() {
  static auto* made = new std::map<int, size_t>;
  return *made;
}

size_t memory_limit(int device) {
  std::lock_guard<std::mutex> lock(host_mutex);
  auto found = limits().find(device);
  return found != limits().end() ? found->second : number_from("ZSIM_MEMORY", size_t{2} << 30);
}

void set_memory_limit(size_t bytes, int device) {
  std::lock_guard<std::mutex> lock(host_mutex);
  limits()[device] = bytes;
}

}  // namespace zsim
