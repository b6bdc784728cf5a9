#include <Python.h>

#include "lanes.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>
#include <utility>

#include "environment.h"

namespace zsim {

namespace {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

constexpr size_t kPool = 32;
constexpr std::chrono::milliseconds kBetweenLooks{20};
constexpr uint64_t kNever = ~uint64_t{0};

enum class Schedule { kThreads, kFifo, kRandom, kComputeFirst, kComputeLast };

const std::vector<std::pair<std::string, Schedule>> kSchedules = {
    {"threads", Schedule::kThreads},
    {"fifo", Schedule::kFifo},
    {"random", Schedule::kRandom},
    {"compute_first", Schedule::kComputeFirst},
    {"compute_last", Schedule::kComputeLast},
};

Schedule schedule_named(const std::string& name) {
  for (const auto& [known, schedule] : kSchedules)
    if (known == name) return schedule;
  throw std::invalid_argument("zsim: no schedule " + name);
}

// Whether no other thread of this process runs, or could.
bool all_others_sleep() {
  const std::string own = std::to_string(gettid());
  std::error_code gone;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task", gone)) {
    std::string line;
    if (thread.path().filename() == own) continue;
    std::getline(std::ifstream(thread.path() / "stat"), line);
    const size_t state = line.rfind(") ");
    if (state != std::string::npos && line[state + 2] != 'S') return false;
  }
  return true;
}

double now() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

// Tasks may run Python, and some of PyTorch's calls come here with its lock held.
class WithoutPythonLock {
 public:
  WithoutPythonLock() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPythonLock() {
    if (state_) PyEval_RestoreThread(state_);
  }
  WithoutPythonLock(const WithoutPythonLock&) = delete;

 private:
  PyThreadState* const state_;
};

struct Task {
  const char* name;
  std::function<void()> work;  // empty: nothing but a place in the order
  MarkPtr after, mark;
  uint64_t number;  // in the order of launches
};

struct Queue {
  Lane lane;
  int64_t delay_us;
  std::deque<Task> tasks{};
  bool runs = false;
  bool has_thread = false;
  std::condition_variable turn{};  // of its thread

  bool is_idle() const { return tasks.empty() && !runs; }
  bool is_ready() const {
    return !runs && !tasks.empty() && (!tasks.front().after || tasks.front().after->reached);
  }
};

struct Device {
  std::vector<std::unique_ptr<Queue>> queues;  // by stream
  size_t next_in_pool = 0;
  int64_t delay_us = 0;

  bool is_idle() const {
    return std::all_of(queues.begin(), queues.end(), [](auto& queue) { return queue->is_idle(); });
  }
};

class Lanes {
 public:
  Lanes() : devices_(number_from("ZSIM_DEVICES", 2)), random_(number_from("ZSIM_SEED", 0)) {
    for (size_t device = 0; device < devices_.size(); ++device) add(static_cast<int>(device));
    if (const char* name = std::getenv("ZSIM_SCHEDULE")) schedule_ = schedule_named(name);
  }

  int device_count() const { return static_cast<int>(devices_.size()); }

  int64_t new_stream(int device) {
    const Lock lock(mutex_);
    Device& of = devices_.at(device);
    if (of.queues.size() <= kPool) return add(device);
    return static_cast<int64_t>(1 + of.next_in_pool++ % kPool);
  }

  void enqueue(Lane lane, Task task) {
    const Lock lock(mutex_);
    Queue& queue = at(lane);
    start_threads(queue);
    task.number = launched_++;
    host_is_elsewhere_ = false;
    queue.tasks.push_back(std::move(task));
    if (!is_lazy()) wake_if_ready(queue);
    else if (paid_ || !waiters_.empty()) lazy_turn_.notify_one();
  }

  MarkPtr mark(Lane lane) {
    auto mark = std::make_shared<Mark>();
    {
      const Lock lock(mutex_);
      if (at(lane).is_idle()) {
        reach(*mark);
        return mark;
      }
    }
    enqueue(lane, {"mark", nullptr, nullptr, mark, 0});
    return mark;
  }

  void wait_for(const MarkPtr& mark, const std::string& reason) {
    wait([&] { return !mark || mark->reached; }, reason);
  }
  void wait_for(Lane lane, const std::string& reason) {
    wait([&] { return at(lane).is_idle(); }, reason);
  }
  void wait_for_device(int device, const std::string& reason) {
    wait([&] { return devices_.at(device).is_idle(); }, reason);
  }

  bool is_reached(const MarkPtr& mark) {
    return asks([&] { return !mark || mark->reached; });
  }
  bool is_idle(Lane lane) {
    return asks([&] { return at(lane).is_idle(); });
  }

  void finish(double seconds) {
    const WithoutPythonLock others_run;
    Lock lock(mutex_);
    const std::function<bool()> is_over = [&] {
      return std::all_of(devices_.begin(), devices_.end(), [](auto& one) { return one.is_idle(); });
    };
    waiters_.push_back(&is_over);
    lazy_turn_.notify_one();
    host_turn_.wait_for(lock, std::chrono::duration<double>(seconds), is_over);
    std::erase(waiters_, &is_over);
  }

  std::map<std::string, uint64_t> wait_counts() {
    const Lock lock(mutex_);
    return wait_counts_;
  }

  void set_schedule(const std::string& name, uint64_t seed) {
    const Schedule schedule = schedule_named(name);
    for (int device = 0; device < device_count(); ++device) wait_for_device(device, "set_schedule");
    const Lock lock(mutex_);
    schedule_ = schedule;
    random_.seed(seed);
    lazy_turn_.notify_one();
    wake_ready();
  }

  std::string schedule() {
    const Lock lock(mutex_);
    for (const auto& [name, schedule] : kSchedules)
      if (schedule == schedule_) return name;
    return "";
  }

  void set_delay(int device, int64_t stream, int64_t microseconds) {
    const Lock lock(mutex_);
    Device& of = devices_.at(device);
    if (stream < 0) of.delay_us = microseconds;  // also of streams to come
    for (auto& queue : of.queues)
      if (stream < 0 || queue->lane.stream == stream) queue->delay_us = microseconds;
  }

  std::vector<std::string> take_log(bool on) {
    const Lock lock(mutex_);
    logs_ = on;
    return std::exchange(log_, {});
  }

 private:
  bool is_lazy() const { return schedule_ != Schedule::kThreads; }
  Queue& at(Lane lane) { return *devices_.at(lane.device).queues.at(lane.stream); }

  int64_t add(int device) {
    Device& of = devices_[device];
    const auto stream = static_cast<int64_t>(of.queues.size());
    of.queues.push_back(std::unique_ptr<Queue>(new Queue{{device, stream}, of.delay_us}));
    return stream;
  }

  static void wake_if_ready(Queue& queue) {
    if (queue.is_ready()) queue.turn.notify_one();
  }
  void wake_ready() {
    for (auto& device : devices_)
      for (auto& queue : device.queues) wake_if_ready(*queue);
  }

  static void reach(Mark& mark) {
    mark.seconds = now();
    mark.reached = true;
  }

  // The lock is open while the task's work runs, and while what the work holds is released.
  void run_first(Queue& queue, Lock& lock) {
    Task task = std::move(queue.tasks.front());
    queue.tasks.pop_front();
    queue.runs = true;
    if (logs_ && task.work)
      log_.push_back(std::to_string(queue.lane.device) + "." + std::to_string(queue.lane.stream) +
                     ":" + task.name);
    const auto delay = std::chrono::microseconds(is_lazy() || !task.work ? 0 : queue.delay_us);
    lock.unlock();

    std::string error;
    if (delay.count()) std::this_thread::sleep_for(delay);
    try {
      if (task.work) task.work();
    } catch (const std::exception& problem) {
      error = std::string(task.name) + ": " + problem.what();
      error = error.substr(0, error.find("\nException raised from"));  // PyTorch's frames
    }
    task.work = nullptr;

    lock.lock();
    if (error_.empty()) error_ = std::move(error);
    queue.runs = false;
    ++ended_;
    if (task.mark) reach(*task.mark);
    if (!is_lazy()) wake_ready();
    if (paid_ || some_wait_is_over()) host_turn_.notify_all();
  }

  void start_threads(Queue& queue) {
    if (!std::exchange(has_lazy_thread_, true)) std::thread([this] { run_lazily(); }).detach();
    if (!std::exchange(queue.has_thread, true))
      std::thread([this, &queue] { run_at_once(queue); }).detach();
  }

  void run_at_once(Queue& queue) {
    for (Lock lock(mutex_);;) {
      queue.turn.wait(lock, [&] { return !is_lazy() && queue.is_ready(); });
      run_first(queue, lock);
    }
  }

  void run_lazily() {
    for (Lock lock(mutex_);;) {
      Queue* queue = nullptr;
      const auto finds_a_task = [&] {
        const bool runs = paid_ || host_is_elsewhere_ || host_still_waits();
        queue = is_lazy() && runs ? pick() : nullptr;
        if (!queue && std::exchange(paid_, 0)) host_turn_.notify_all();  // nothing can run
        return queue != nullptr;
      };
      while (!lazy_turn_.wait_for(lock, kBetweenLooks, finds_a_task)) look_for_the_host(lock);
      run_first(*queue, lock);
      if (paid_ && !--paid_) host_turn_.notify_all();
    }
  }

  // Asks again after each task: a schedule that ran on until the host wakes would not repeat.
  bool host_still_waits() const {
    return std::any_of(waiters_.begin(), waiters_.end(), [](auto* is_over) { return !(*is_over)(); });
  }

  bool some_wait_is_over() const {
    return std::any_of(waiters_.begin(), waiters_.end(), [](auto* is_over) { return (*is_over)(); });
  }

  // The host may wait for another process, whose host waits for a collective, which waits for a
  // lane here. It is taken to do so when it has launched nothing and has slept at two looks.
  void look_for_the_host(Lock& lock) {
    if (!is_lazy() || ready().empty()) return;
    const uint64_t launched = launched_;
    lock.unlock();
    const bool sleeps = all_others_sleep();
    lock.lock();
    host_is_elsewhere_ = sleeps && launched == launched_ && launched == slept_after_;
    slept_after_ = sleeps ? launched : kNever;
  }

  std::vector<Queue*> ready() {
    std::vector<Queue*> out;
    for (auto& device : devices_)
      for (auto& queue : device.queues)
        if (queue->is_ready()) out.push_back(queue.get());
    return out;
  }

  Queue* pick() {
    const std::vector<Queue*> ready = this->ready();
    if (ready.empty()) return nullptr;
    if (schedule_ == Schedule::kRandom) return ready[random_() % ready.size()];
    return *std::min_element(ready.begin(), ready.end(),
                             [&](Queue* a, Queue* b) { return runs_before(*a, *b); });
  }

  bool runs_before(const Queue& a, const Queue& b) const {
    const bool a_computes = a.lane.stream == 0, b_computes = b.lane.stream == 0;
    if (a_computes != b_computes && schedule_ == Schedule::kComputeFirst) return a_computes;
    if (a_computes != b_computes && schedule_ == Schedule::kComputeLast) return b_computes;
    return a.tasks.front().number < b.tasks.front().number;
  }

  void wait(const std::function<bool()>& is_over, const std::string& reason) {
    const WithoutPythonLock others_run;
    Lock lock(mutex_);
    if (!is_over()) {
      ++wait_counts_[reason];
      waiters_.push_back(&is_over);
      lazy_turn_.notify_one();
      const bool stalls = !wait_while_tasks_end(lock, is_over);
      std::erase(waiters_, &is_over);
      if (stalls) throw std::runtime_error("zsim: no task ends, and the host waits: " + reason);
    }
    if (!error_.empty())
      throw std::runtime_error("zsim: a kernel failed: " + std::exchange(error_, {}));
  }

  // Whether it is over; false: no task has ended for ZSIM_STALL_S seconds.
  bool wait_while_tasks_end(Lock& lock, const std::function<bool()>& is_over) {
    static const std::chrono::seconds patience(number_from("ZSIM_STALL_S", 120));
    uint64_t ended;
    do {
      ended = ended_;
      const auto until = Clock::now() + patience;
      if (host_turn_.wait_until(lock, until, is_over)) return true;
    } while (ended != ended_);
    return false;
  }

  bool asks(const std::function<bool()>& is_so) {
    const WithoutPythonLock others_run;
    Lock lock(mutex_);
    if (!is_so() && is_lazy()) {
      ++paid_;
      lazy_turn_.notify_one();
      host_turn_.wait(lock, [&] { return !paid_ || is_so(); });
    }
    return is_so();
  }

  std::mutex mutex_;
  // One for each that waits: one for all would wake a thread of every stream at every task.
  std::condition_variable lazy_turn_, host_turn_;
  std::vector<Device> devices_;
  Schedule schedule_ = Schedule::kThreads;
  std::mt19937_64 random_;
  bool has_lazy_thread_ = false;
  std::vector<const std::function<bool()>*> waiters_;  // of the host: what ends each wait
  int paid_ = 0;  // tasks that questions of the host have paid for
  uint64_t launched_ = 0, ended_ = 0;
  uint64_t slept_after_ = kNever;   // launches, when the host was last looked for
  bool host_is_elsewhere_ = false;  // since its last launch
  std::string error_;  // of the first kernel that failed since the last wait, which raises it
  std::map<std::string, uint64_t> wait_counts_;
  bool logs_ = false;
  std::vector<std::string> log_;
};

Lanes& lanes() {
  static auto* made = new Lanes;  // never destroyed: its threads outlive `main`
  return *made;
}

thread_local int device_of_thread = 0;
thread_local std::vector<int64_t> streams_of_thread;  // by device

}  // namespace

int device_count() { return lanes().device_count(); }
int current_device() { return device_of_thread; }
void set_current_device(int device) { device_of_thread = device; }

Lane current_lane(int device) {
  if (device < 0) device = device_of_thread;
  const bool is_set = static_cast<size_t>(device) < streams_of_thread.size();
  return {device, is_set ? streams_of_thread[device] : 0};
}

void set_current_lane(Lane lane) {
  const auto device = static_cast<size_t>(lane.device);
  if (streams_of_thread.size() <= device) streams_of_thread.resize(device + 1, 0);
  streams_of_thread[device] = lane.stream;
}

int64_t new_stream(int device) { return lanes().new_stream(device); }

void enqueue(Lane lane, const char* name, std::function<void()> work, MarkPtr after,
             MarkPtr mark) {
  lanes().enqueue(lane, {name, std::move(work), std::move(after), std::move(mark), 0});
}

MarkPtr mark(Lane lane) { return lanes().mark(lane); }

void lane_waits(Lane lane, const MarkPtr& mark) {
  if (mark && !mark->reached) lanes().enqueue(lane, {"wait", nullptr, mark, nullptr, 0});
}

void host_waits(const MarkPtr& mark, const std::string& reason) { lanes().wait_for(mark, reason); }
void host_waits_for(Lane lane, const std::string& reason) { lanes().wait_for(lane, reason); }
void host_waits_for_device(int device, const std::string& reason) {
  lanes().wait_for_device(device < 0 ? current_device() : device, reason);
}
void finish(double seconds) { lanes().finish(seconds); }
std::map<std::string, uint64_t> host_wait_counts() { return lanes().wait_counts(); }
bool is_reached(const MarkPtr& mark) { return lanes().is_reached(mark); }
bool is_idle(Lane lane) { return lanes().is_idle(lane); }
void set_schedule(const std::string& name, uint64_t seed) { lanes().set_schedule(name, seed); }
std::string schedule() { return lanes().schedule(); }
void set_delay(int device, int64_t stream, int64_t microseconds) {
  lanes().set_delay(device, stream, microseconds);
}
std::vector<std::string> take_log(bool on) { return lanes().take_log(on); }

}  // namespace zsim
