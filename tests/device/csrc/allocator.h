// Device memory: a caching allocator whose blocks are lent again in the order of a stream.
#pragma once
#include "torch_headers.h"

namespace zsim {

c10::DeviceAllocator& device_allocator();
void resize_storage(const c10::Storage& storage, size_t bytes);  // keeps what fits

// Names the operator that allocates, for the line that a host access ends with.
class AllocatesFor {
 public:
  explicit AllocatesFor(const char* name);  // the outermost of a thread counts
  ~AllocatesFor();
  AllocatesFor(const AllocatesFor&) = delete;

 private:
  bool is_outermost_;
};

}  // namespace zsim
