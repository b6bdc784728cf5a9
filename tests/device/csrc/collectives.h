// zccl: a backend of torch.distributed whose collectives are tasks of a lane, over gloo.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>
#include <vector>

namespace zsim {

// Of a `host` group with the same ranks, whose collectives nobody else calls.
c10::intrusive_ptr<c10d::Backend> zccl_over(const c10::intrusive_ptr<c10d::Backend>& host,
                                            std::chrono::milliseconds timeout);

// Collectives that were launched since the last call, of all groups, in order:
// "stream|group|its size|kind|dtype|what for", the stream being that of the call. `name_collectives`: what those to come are for.
std::vector<std::string> take_collectives();
void name_collectives(const std::string& name);

}  // namespace zsim
