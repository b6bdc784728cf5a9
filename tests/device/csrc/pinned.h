// Pinned host memory: a block is lent again when no lane uses it any more.
#pragma once
#include "lanes.h"
#include "torch_headers.h"

namespace zsim {

at::HostAllocator& pinned_allocator();
// A lane uses host memory until `mark`; nothing is noted where the memory is not the allocator's.
void note_use(const void* address, MarkPtr mark);

}  // namespace zsim
