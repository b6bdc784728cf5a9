#include "allocator.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

#include "lanes.h"
#include "memory.h"

namespace zsim {

namespace {

constexpr size_t kGranule = 512;
constexpr int64_t kAnyStream = -1;  // the pool of blocks that every stream has done with
constexpr size_t kMostWaste = 4;    // a block serves requests down to this part of its size

thread_local const char* allocates_for = nullptr;

size_t rounded(size_t bytes) { return (bytes + kGranule - 1) / kGranule * kGranule; }

struct Block {
  char* address;
  size_t size;
  Lane home;  // what it was lent on; its next owner there comes later in the same order
  size_t asked = 0;
  std::set<int64_t> users{};      // other streams, which record_stream named
  std::vector<MarkPtr> pending{};  // their marks, from when it came back
};

// As CUDA's allocator: a block that comes back is lent again at once to the stream that it was lent
// on, and nobody waits. What is lent holds NaN, written by that stream: numbers of an earlier owner
// that a program reads by mistake would look right.
class CachingAllocator final : public c10::DeviceAllocator {
 public:
  CachingAllocator() : stats_(device_count()) {}

  c10::DataPtr allocate(size_t bytes) override {
    const Lane lane = current_lane();
    TORCH_CHECK(lane.device < device_count(), "zsim: there is no device ", lane.device);
    const c10::Device device(c10::DeviceType::PrivateUse1,
                             static_cast<c10::DeviceIndex>(lane.device));
    if (!bytes) return {nullptr, nullptr, &release, device};
    Block* block = take(lane, bytes);
    if (!block) {
      // As cudaFree does: what is cached may still be used by streams that have not got there.
      host_waits_for_device(lane.device, "out of memory: release of cached blocks");
      block = take(lane, bytes, /*after_release=*/true);
    }
    set_owner(block->address, bytes, allocates_for ? allocates_for : "an operator");
    char* target = kernel_view(block->address);
    const size_t size = block->size;
    enqueue(lane, "fill with NaN", [=] { std::memset(target, 0xFF, size); });
    return {block->address, block->address, &release, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  bool initialized() override { return true; }
  void copy_data(void* out, const void* from, size_t bytes) const override {
    char *target = kernel_view(out), *source = kernel_view(from);
    enqueue(current_lane(), "copy data", [=] { std::memcpy(target, source, bytes); });
  }

  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < device_count(); ++device) {
      host_waits_for_device(device, "empty_cache");
      const Lock lock(mutex_);
      release_cache(device);
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    const Lock lock(mutex_);
    auto found = lent_.find(pointer.get());
    if (found != lent_.end() && stream.id() != found->second->home.stream)
      found->second->users.insert(stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Lock lock(mutex_);
    return stats_.at(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const Lock lock(mutex_);
    for (auto* stat : stats_of(device)) (*stat)[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    const Lock lock(mutex_);
    for (auto* stat : stats_of(device)) (*stat)[0].reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const size_t total = memory_limit(device);
    const Lock lock(mutex_);
    const size_t reserved = stats_.at(device).reserved_bytes[0].current;
    return {total - std::min(total, reserved), total};
  }

 private:
  using Lock = std::lock_guard<std::mutex>;
  using Pool = std::map<size_t, std::vector<Block*>>;  // by size

  static void release(void* address) {
    if (address) static_cast<CachingAllocator&>(device_allocator()).take_back(address);
  }

  std::vector<c10::CachingAllocator::StatArray*> stats_of(int device) {
    auto& stats = stats_.at(device);
    return {&stats.allocation,     &stats.allocated_bytes, &stats.active_bytes,
            &stats.reserved_bytes, &stats.requested_bytes};
  }

  // nullptr: only once the cache is released; raises if that is done.
  Block* take(Lane lane, size_t bytes, bool after_release = false) {
    const Lock lock(mutex_);
    if (after_release) release_cache(lane.device);
    collect_pending();
    const size_t size = rounded(bytes), limit = memory_limit(lane.device);
    auto& stats = stats_[lane.device];
    const size_t reserved = stats.reserved_bytes[0].current;

    Block* block = find(pools_[{lane.device, lane.stream}], size);
    if (!block && reserved + size <= limit) {
      block = find(pools_[{lane.device, kAnyStream}], size);
      if (!block) block = new Block{reserve(lane.device, size), size, lane};
      ++stats.num_device_alloc;
      stats.reserved_bytes[0].increase(block->size);
    }
    if (!block && !after_release) {
      ++stats.num_alloc_retries;
      return nullptr;
    }
    stats.num_ooms += !block;
    TORCH_CHECK_WITH(OutOfMemoryError, block, "zsim out of memory. Tried to allocate ", bytes,
                     " bytes on zsim:", lane.device, ", which has ", limit, " bytes; ",
                     stats.allocated_bytes[0].current, " bytes are allocated.");
    block->home = lane;
    block->asked = bytes;
    lent_[block->address] = block;
    stats.allocation[0].increase(1);
    stats.requested_bytes[0].increase(bytes);
    stats.allocated_bytes[0].increase(size);
    stats.active_bytes[0].increase(size);
    return block;
  }

  void take_back(void* address) {
    const Lock lock(mutex_);
    Block* block = lent_.at(address);
    lent_.erase(address);
    auto& stats = stats_[block->home.device];
    stats.allocation[0].decrease(1);
    stats.requested_bytes[0].decrease(block->asked);
    stats.allocated_bytes[0].decrease(rounded(block->asked));
    stats.active_bytes[0].decrease(rounded(block->asked));
    for (const int64_t stream : std::exchange(block->users, {}))
      block->pending.push_back(mark({block->home.device, stream}));
    pending_.push_back(block);
    collect_pending();
  }

  // Blocks that no other stream uses any more go back to the pool of their own.
  void collect_pending() {
    std::erase_if(pending_, [&](Block* block) {
      std::erase_if(block->pending, [](const MarkPtr& mark) { return mark->reached.load(); });
      if (!block->pending.empty()) return false;
      pools_[{block->home.device, block->home.stream}][block->size].push_back(block);
      return true;
    });
  }

  static Block* find(Pool& pool, size_t size) {
    auto fits = pool.lower_bound(size);
    if (fits == pool.end() || fits->first > kMostWaste * size) return nullptr;
    Block* block = fits->second.back();  // the one that came back last
    fits->second.pop_back();
    if (fits->second.empty()) pool.erase(fits);
    return block;
  }

  void release_cache(int device) {  // the host has waited for all streams
    collect_pending();
    Pool& released = pools_[{device, kAnyStream}];
    for (auto& [key, pool] : pools_) {
      if (key.first != device || key.second == kAnyStream) continue;
      for (auto& [size, blocks] : pool) {
        for (Block* block : blocks) released[size].push_back(block);
        stats_[device].reserved_bytes[0].decrease(size * blocks.size());
      }
      pool.clear();
    }
  }

  std::mutex mutex_;
  std::map<std::pair<int, int64_t>, Pool> pools_;  // by device and stream
  std::unordered_map<void*, Block*> lent_;         // by address
  std::vector<Block*> pending_;
  std::vector<c10::CachingDeviceAllocator::DeviceStats> stats_;
};

}  // namespace

c10::DeviceAllocator& device_allocator() {
  static auto* made = new CachingAllocator;
  return *made;
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const AllocatesFor name("resize_");
  const c10::DeviceGuard guard(storage.device());
  c10::DataPtr fresh = device_allocator().allocate(bytes);
  if (const size_t kept = std::min(storage.nbytes(), bytes))
    device_allocator().copy_data(fresh.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

AllocatesFor::AllocatesFor(const char* name) : is_outermost_(!allocates_for) {
  if (is_outermost_) allocates_for = name;
}
AllocatesFor::~AllocatesFor() {
  if (is_outermost_) allocates_for = nullptr;
}

}  // namespace zsim
