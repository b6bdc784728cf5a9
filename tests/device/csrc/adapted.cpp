// Operators that would miss the CPU's kernel, or its numbers, without help.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>

#include "operators.h"
#include "torch_headers.h"

namespace zsim {

namespace {

using at::Tensor;
using c10::OperatorHandle;
using torch::jit::Stack;

OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// PyTorch gives convolutions to a backend of its own under other names.
void convolution(const OperatorHandle&, Stack* stack) {
  static const OperatorHandle op = operator_named("aten::convolution");
  run_on_lane(op, stack);
}

void convolution_backward(const OperatorHandle& given, Stack* stack) {
  static const OperatorHandle op = operator_named("aten::convolution_backward");
  const auto first = stack->end() - static_cast<long>(given.schema().arguments().size());
  const int64_t channels = first->toTensor().size(1);                      // of grad_output
  stack->insert(first + 3, c10::IValue(std::vector<int64_t>{channels}));  // bias_sizes
  run_on_lane(op, stack);
}

// The CPU's kernel takes random numbers from the host's generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  if (!train.value_or(true) || p == 0)
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  const Tensor kept = at::empty_like(input).bernoulli_(1 - p);
  const Tensor mask = kept.to(at::kBool);
  return {input * kept.mul_(p == 1 ? 0 : 1 / (1 - p)), mask};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable",
         torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
  m.impl("native_dropout", native_dropout);
  // A backend without kernels for these is given compositions that round otherwise.
  for (const char* name : {"native_layer_norm", "native_group_norm", "silu_backward",
                           "mish_backward", "native_channel_shuffle"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_lane>());
}

}  // namespace
}  // namespace zsim
