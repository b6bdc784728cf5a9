// The seats that PyTorch gives a backend: allocators, guard (streams, events), hooks, generator.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace zsim {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

Lane here(int device) {
  if (device < 0) device = current_device();
  return {device, current_stream(device)};
}

Lane lane_of(const Stream& stream) {
  return {stream.device_index() < 0 ? current_device() : stream.device_index(), stream.id()};
}

// ------------------------------------------------------------------------------ device memory

namespace {

// "alloc": what a device may do at the earliest, its next owner writes; "free": stricter, as if the
// home stream wrote at once; "0": never
char poisons() {
  static const char value = std::getenv("ZSIM_POISON") ? std::getenv("ZSIM_POISON")[0] : 'a';
  return value;
}

struct Block {
  char* address;
  size_t size;
  int device;
  int64_t home;
  size_t asked = 0;
  std::set<int64_t> others;  // streams that were told of by record_stream
  std::vector<RecordPtr> pending;
};

// As CUDA's: what is given back is lent again at once to the stream it was taken on, in the order
// of that stream; nobody waits.
class CachingAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int device = current_device();
    const Device where(DeviceType::PrivateUse1, static_cast<DeviceIndex>(device));
    if (!bytes) return {nullptr, nullptr, &free_block, where};
    std::lock_guard<std::mutex> lock(m_);
    const size_t size = (bytes + 511) / 512 * 512;
    const int64_t stream = current_stream(device);
    take_deferred();
    Block* block = find({device, stream}, size);
    if (!block) block = find({device, -1}, size);
    auto& stats = stats_[device];
    if (!block) {
      if (stats.reserved_bytes[0].current + size > memory_limit(device)) {
        give_up_cache(device);
        block = find({device, -1}, size);
      }
      if (!block) {
        TORCH_CHECK_WITH(OutOfMemoryError,
            stats.reserved_bytes[0].current + size <= memory_limit(device), "zsim out of memory. Tried to allocate ",
            bytes, " bytes; allocated ", stats.allocated_bytes[0].current, ", reserved ",
            stats.reserved_bytes[0].current, " of ", memory_limit(device));
        block = new Block{take_range(device, size), size, device, stream};
        stats.num_device_alloc++;
        stats.reserved_bytes[0].increase(size);
        if (poisons() == 'f') poison(*block);
      }
    }
    block->home = stream;
    block->asked = bytes;
    if (poisons() == 'a') poison(*block);
    stats.allocated_bytes[0].increase(block->size);
    stats.active_bytes[0].increase(block->size);
    stats.allocation[0].increase(1);
    live_[block->address] = block;
    return {block->address, block->address, &free_block, where};
  }

  void free(void* address) {
    if (!address) return;
    std::lock_guard<std::mutex> lock(m_);
    auto found = live_.find(address);
    if (found == live_.end()) return;
    Block* block = found->second;
    live_.erase(found);
    auto& stats = stats_[block->device];
    stats.allocated_bytes[0].decrease(block->size);
    stats.active_bytes[0].decrease(block->size);
    stats.allocation[0].decrease(1);
    for (int64_t stream : block->others) block->pending.push_back(record({block->device, stream}));
    block->others.clear();
    if (block->pending.empty()) {
      if (poisons() == 'f') poison(*block);
      idle_[{block->device, block->home}][block->size].push_back(block);
    } else {
      deferred_.push_back(block);
    }
  }

  static void free_block(void* address);
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  bool initialized() override { return true; }
  void copy_data(void* out, const void* from, size_t count) const override {
    char *target = at_kernel(out), *source = at_kernel(from);
    enqueue(here(), "copy_data", [=] { std::memcpy(target, source, count); });
  }

  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    for (int device = 0; device < device_count(); ++device) synchronize_device(device, "empty_cache");
    std::lock_guard<std::mutex> lock(m_);
    take_deferred();
    for (int device = 0; device < device_count(); ++device) give_up_cache(device);
  }

  void recordStream(const c10::DataPtr& pointer, Stream stream) override {
    std::lock_guard<std::mutex> lock(m_);
    auto found = live_.find(pointer.get());
    if (found != live_.end() && stream.id() != found->second->home)
      found->second->others.insert(stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(m_);
    return stats_[device];
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(m_);
    stats_[device].allocated_bytes[0].reset_accumulated();
    stats_[device].reserved_bytes[0].reset_accumulated();
  }
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(m_);
    stats_[device].allocated_bytes[0].reset_peak();
    stats_[device].reserved_bytes[0].reset_peak();
    stats_[device].active_bytes[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(m_);
    return {memory_limit(device) - stats_[device].reserved_bytes[0].current, memory_limit(device)};
  }

 private:
  using Pool = std::pair<int, int64_t>;  // device, stream (-1: given up by all)

  Block* find(Pool pool, size_t size) {
    auto& sizes = idle_[pool];
    auto found = sizes.lower_bound(size);
    if (found == sizes.end() || found->first > 4 * size) return nullptr;
    Block* block = found->second.back();  // the one that came back last
    found->second.pop_back();
    if (found->second.empty()) sizes.erase(found);
    if (pool.second < 0) stats_[block->device].reserved_bytes[0].increase(block->size);
    return block;
  }

  void poison(const Block& block) {
    char* target = at_kernel(block.address);
    const size_t size = block.size;
    enqueue({block.device, block.home}, "poison", [=] { std::memset(target, 0xFF, size); });
  }

  void take_deferred() {
    std::vector<Block*> kept;
    for (Block* block : deferred_) {
      bool over = true;
      for (auto& one : block->pending) over = over && one->done;
      if (over) {
        block->pending.clear();
        if (poisons() == 'f') poison(*block);
        idle_[{block->device, block->home}][block->size].push_back(block);
      } else {
        kept.push_back(block);
      }
    }
    deferred_ = std::move(kept);
  }

  void give_up_cache(int device) {
    for (auto& [pool, sizes] : idle_) {
      if (pool.first != device || pool.second < 0) continue;
      for (auto& [size, blocks] : sizes)
        for (Block* block : blocks) {
          stats_[device].reserved_bytes[0].decrease(size);
          idle_[{device, -1}][size].push_back(block);
        }
      sizes.clear();
    }
  }

  std::mutex m_;
  std::map<Pool, std::map<size_t, std::vector<Block*>>> idle_;
  std::unordered_map<void*, Block*> live_;
  std::vector<Block*> deferred_;
  std::map<int, c10::CachingDeviceAllocator::DeviceStats> stats_;
};

CachingAllocator& device_allocator() {
  static auto* made = new CachingAllocator;
  return *made;
}

void CachingAllocator::free_block(void* address) { device_allocator().free(address); }

// -------------------------------------------------------------------------------- pinned memory

struct HostBlock {
  void* address;
  size_t size;
  std::vector<RecordPtr> uses;
};

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &free_block, Device(DeviceType::CPU)};
    std::lock_guard<std::mutex> lock(m_);
    size_t size = 512;
    while (size < bytes) size *= 2;
    for (auto at = idle_.begin(); at != idle_.end(); ++at) {
      HostBlock* block = *at;
      bool over = block->size == size;
      for (auto& use : block->uses) over = over && use->done;
      if (!over) continue;
      idle_.erase(at);
      block->uses.clear();
      std::memset(block->address, 0xFF, block->size);
      live_[block->address] = block;
      return {block->address, block, &free_block, Device(DeviceType::CPU)};
    }
    void* address = nullptr;
    TORCH_CHECK(!posix_memalign(&address, 4096, size), "zsim: no pinned memory");
    std::memset(address, 0xFF, size);
    register_host(reinterpret_cast<uintptr_t>(address), size);
    auto* block = new HostBlock{address, size, {}};
    live_[address] = block;
    return {address, block, &free_block, Device(DeviceType::CPU)};
  }

  static void free_block(void* context);
  void free(HostBlock* block) {
    std::lock_guard<std::mutex> lock(m_);
    live_.erase(block->address);
    idle_.push_back(block);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* out, const void* from, size_t count) const override {
    std::memcpy(out, from, count);
  }
  bool record_event(void* address, void*, Stream stream) override {
    note(address, zsim::record(lane_of(stream)));
    return true;
  }
  void note(const void* address, RecordPtr use) {
    std::lock_guard<std::mutex> lock(m_);
    auto after = live_.upper_bound(const_cast<void*>(address));
    if (after == live_.begin()) return;
    HostBlock* block = std::prev(after)->second;
    if (address < static_cast<char*>(block->address) + block->size) block->uses.push_back(std::move(use));
  }
  void empty_cache() override {
    std::lock_guard<std::mutex> lock(m_);
    std::vector<HostBlock*> kept;
    for (HostBlock* block : idle_) {
      bool over = true;
      for (auto& use : block->uses) over = over && use->done;
      if (!over) {
        kept.push_back(block);
        continue;
      }
      unregister_host(reinterpret_cast<uintptr_t>(block->address));
      std::free(block->address);
      delete block;
    }
    idle_ = std::move(kept);
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  std::mutex m_;
  std::map<void*, HostBlock*> live_;
  std::vector<HostBlock*> idle_;
};

PinnedAllocator& pinned_allocator() {
  static auto* made = new PinnedAllocator;
  return *made;
}

void PinnedAllocator::free_block(void* context) {
  if (context) pinned_allocator().free(static_cast<HostBlock*>(context));
}

// ------------------------------------------------------------------------------------- generator

struct SimGenerator final : c10::GeneratorImpl {
  explicit SimGenerator(DeviceIndex device)
      : GeneratorImpl(Device(DeviceType::PrivateUse1, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { seed_ = seed; offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { set_current_seed(c10::detail::getNonDeterministicRandom()); return seed_; }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "zsim: a generator's state has 16 bytes");
    const auto* from = static_cast<const uint64_t*>(state.data());
    seed_ = from[0];
    offset_ = from[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto out = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* to = static_cast<uint64_t*>(out.data_ptr());
    to[0] = seed_;
    to[1] = offset_;
    return out.getIntrusivePtr();
  }
  SimGenerator* clone_impl() const override {
    auto* out = new SimGenerator(device().index());
    out->seed_ = seed_;
    out->offset_ = offset_;
    return out;
  }
  static DeviceType device_type() { return DeviceType::PrivateUse1; }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

at::Generator make_generator(DeviceIndex device) { return at::make_generator<SimGenerator>(device); }

}  // namespace

const at::Generator& default_generator(int device) {
  static auto* made = [] {
    auto* out = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); ++i) out->push_back(make_generator(i));
    return out;
  }();
  return made->at(device < 0 ? current_device() : device);
}

uint64_t next_seed(const at::Generator& generator) {
  auto* impl = static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl());
  std::lock_guard<std::mutex> lock(impl->mutex_);
  uint64_t x = impl->seed_ * 0x9E3779B97F4A7C15ull + ++impl->offset_;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

bool is_pinned(const void* address) { return is_registered(address); }
void note_host_use(const void* address, RecordPtr use) { pinned_allocator().note(address, std::move(use)); }

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const size_t before = storage.nbytes();
  const int device = storage.device().index();
  const int outer = current_device();
  set_current_device(device);
  c10::DataPtr fresh = device_allocator().allocate(bytes);
  set_current_device(outer);
  if (const size_t kept = std::min(before, bytes)) {
    char *target = at_kernel(fresh.get()), *source = at_kernel(storage.data());
    enqueue(here(device), "resize_", [=] { std::memcpy(target, source, kept); });
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

// --------------------------------------------------------------------------- guard, events, hooks

namespace {

struct Event {
  RecordPtr record;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::PrivateUse1;
  Guard() = default;
  explicit Guard(DeviceType) {}
  static Device of(int index) { return Device(static_type, static_cast<DeviceIndex>(index)); }
  DeviceType type() const override { return static_type; }
  Device exchangeDevice(Device device) const override {
    const int before = current_device();
    if (device.index() >= 0) set_current_device(device.index());
    return of(before);
  }
  Device getDevice() const override { return of(current_device()); }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) set_current_device(device.index());
  }
  Stream stream(int device, int64_t id) const { return Stream(Stream::UNSAFE, of(device), id); }
  Stream getStream(Device device) const override {
    const Lane lane = here(device.index());
    return stream(lane.device, lane.stream);
  }
  Stream getDefaultStream(Device device) const override { return stream(here(device.index()).device, 0); }
  Stream getNewStream(Device device, int priority = 0) const override {
    const int index = here(device.index()).device;
    return stream(index, new_stream(index, priority));
  }
  Stream getStreamFromGlobalPool(Device device, bool high = false) const override {
    return getNewStream(device, high ? -1 : 0);
  }
  Stream exchangeStream(Stream next) const override {
    Stream before = getStream(next.device());
    set_current_stream(next.device_index(), next.id());
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id() + 1); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->record = zsim::record(lane_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event) lane_waits(lane_of(stream), static_cast<Event*>(event)->record);
  }
  bool queryEvent(void* event) const override { return !event || poll(static_cast<Event*>(event)->record); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(device_count()); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
  bool queryStream(const Stream& stream) const override { return lane_is_idle(lane_of(stream)); }
  void synchronizeStream(const Stream& stream) const override { synchronize(lane_of(stream), "stream.synchronize"); }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits(static_cast<Event*>(event)->record, "event.synchronize");
  }
  void synchronizeDevice(const DeviceIndex device) const override { synchronize_device(device, "synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    device_allocator().recordStream(pointer, stream);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    auto a = static_cast<Event*>(first)->record, b = static_cast<Event*>(second)->record;
    host_waits(a, "elapsed_time");
    host_waits(b, "elapsed_time");
    return (b->when - a->when) * 1e3;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count()); }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(current_device()); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const int before = current_device();
    set_current_device(device);
    return static_cast<DeviceIndex>(before);
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_registered(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  Device getDeviceFromPtr(void* data) const override { return Guard::of(std::max(device_of(data), 0)); }
  const at::Generator& getDefaultGenerator(DeviceIndex device = -1) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device = -1) const override {
    return make_generator(device < 0 ? static_cast<DeviceIndex>(current_device()) : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage, bytes); }
};

struct Registrar {
  Registrar() {
    c10::SetAllocator(DeviceType::PrivateUse1, &device_allocator());
    at::setHostAllocator(DeviceType::PrivateUse1, &pinned_allocator());
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  }
} registrar;

}  // namespace
}  // namespace zsim
