// zccl: a backend of torch.distributed whose collectives are tasks of a lane, over gloo.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace zsim {

// Of a `host` group with the same ranks, whose collectives nobody else calls.
c10::intrusive_ptr<c10d::Backend> zccl_over(const c10::intrusive_ptr<c10d::Backend>& host,
                                            std::chrono::milliseconds timeout);

}  // namespace zsim
