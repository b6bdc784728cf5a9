#include "pinned.h"

#include <bit>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "memory.h"

namespace zsim {

namespace {

constexpr size_t kPage = 4096;

struct HostBlock {
  char* address;
  size_t size;
  std::vector<MarkPtr> uses{};

  bool is_used() {
    std::erase_if(uses, [](const MarkPtr& mark) { return mark->reached.load(); });
    return !uses.empty();
  }
};

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &release, at::kCPU};
    const Lock lock(mutex_);
    HostBlock* block = take(std::bit_ceil(std::max(bytes, size_t{512})));
    std::memset(block->address, 0xFF, block->size);  // NaN
    lent_[block->address] = block;
    return {block->address, block, &release, at::kCPU};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* out, const void* from, size_t bytes) const override {
    std::memcpy(out, from, bytes);
  }
  bool record_event(void* address, void*, c10::Stream stream) override {
    note(address, mark({stream.device_index(), stream.id()}));
    return true;
  }

  void note(const void* address, MarkPtr use) {
    const Lock lock(mutex_);
    auto block = lent_.upper_bound(static_cast<const char*>(address));
    if (block == lent_.begin()) return;
    --block;
    if (address < block->second->address + block->second->size)
      block->second->uses.push_back(std::move(use));
  }

  void empty_cache() override {
    const Lock lock(mutex_);
    std::erase_if(idle_, [](HostBlock* block) {
      if (block->is_used()) return false;
      unregister_host(reinterpret_cast<uintptr_t>(block->address));
      std::free(block->address);
      delete block;
      return true;
    });
  }

  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  using Lock = std::lock_guard<std::mutex>;

  static void release(void* context) {
    if (context)
      static_cast<PinnedAllocator&>(pinned_allocator()).take_back(static_cast<HostBlock*>(context));
  }

  HostBlock* take(size_t size) {
    for (auto at = idle_.begin(); at != idle_.end(); ++at) {
      HostBlock* block = *at;
      if (block->size != size || block->is_used()) continue;
      idle_.erase(at);
      return block;
    }
    auto* address = static_cast<char*>(std::aligned_alloc(kPage, std::max(size, kPage)));
    TORCH_CHECK(address, "zsim: no host memory for ", size, " pinned bytes");
    register_host(reinterpret_cast<uintptr_t>(address), size);
    return new HostBlock{address, size};
  }

  void take_back(HostBlock* block) {
    const Lock lock(mutex_);
    lent_.erase(block->address);
    idle_.push_back(block);
  }

  std::mutex mutex_;
  std::map<const char*, HostBlock*> lent_;
  std::vector<HostBlock*> idle_;
};

}  // namespace

at::HostAllocator& pinned_allocator() {
  static auto* made = new PinnedAllocator;
  return *made;
}

void note_use(const void* address, MarkPtr mark) {
  static_cast<PinnedAllocator&>(pinned_allocator()).note(address, std::move(mark));
}

}  // namespace zsim
