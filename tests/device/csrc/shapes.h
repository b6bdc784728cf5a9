// Shapes: what the results of a call look like, from the Meta kernel, once per distinct call.
#pragma once
#include <memory>
#include <vector>

#include "torch_headers.h"

namespace zsim {

struct Shapes {
  torch::jit::Stack results;               // tensors without numbers
  std::vector<std::vector<int64_t>> outs;  // sizes of the tensors that the call writes, afterwards
};

// None where the operator has no Meta kernel.
std::shared_ptr<const Shapes> shapes_of(const c10::OperatorHandle& op,
                                        const std::vector<c10::IValue>& arguments);

// Whether the call writes to that argument.
bool is_written(const c10::Argument& argument);

}  // namespace zsim
