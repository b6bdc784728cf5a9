// Tensors as kernels see them, later: a launch holds no reference to device memory. What the host
// drops too early is lent again under the kernel's feet, as on a device.
#pragma once
#include "torch_headers.h"

namespace zsim {

struct KernelTensor {
  bool is_defined = false;
  char* data = nullptr;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
  bool is_conj = false, is_neg = false;
  at::Tensor value;  // defined: a tensor of the host, as it was at the launch
};

KernelTensor for_kernel(const at::Tensor& tensor);
KernelTensor host_memory(const at::Tensor& tensor);  // touched when the lane gets there
at::Tensor on_cpu(const KernelTensor& tensor);       // for the kernel

bool is_ours(const at::Tensor& tensor);
std::vector<at::Tensor> tensors_in(const c10::IValue& value);

// Kernels are called below autograd, as PyTorch calls them.
struct BelowAutograd {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autograd_dispatch_keyset_with_ADInplaceOrView};
};

// `value` with `change` applied to its tensors.
template <typename Change>
c10::IValue with_tensors(const c10::IValue& value, Change&& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& one : value.toTensorVector()) out.push_back(change(one));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (const auto& one : value.toOptionalTensorVector())
      out.push_back(one && one->defined() ? std::optional(change(*one)) : std::nullopt);
    return out;
  }
  return value;
}

}  // namespace zsim
