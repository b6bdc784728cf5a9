#include "tensors.h"

#include <ATen/ops/from_blob.h>

#include "memory.h"

namespace zsim {

namespace {

KernelTensor layout_of(const at::Tensor& tensor) {
  return {true, nullptr, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(),
          tensor.is_conj(), tensor.is_neg(), {}};
}

}  // namespace

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_privateuseone();
}

KernelTensor for_kernel(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  KernelTensor out = layout_of(tensor);
  const bool is_number = tensor.unsafeGetTensorImpl()->is_wrapped_number();
  if (!is_ours(tensor))
    out.value = is_number ? tensor : tensor.detach().clone();
  else if (tensor.numel())
    out.data = kernel_view(tensor.storage().data()) +
               tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
  return out;
}

KernelTensor host_memory(const at::Tensor& tensor) {
  KernelTensor out = layout_of(tensor);
  out.data = static_cast<char*>(tensor.data_ptr());
  return out;
}

at::Tensor on_cpu(const KernelTensor& tensor) {
  if (!tensor.is_defined || tensor.value.defined()) return tensor.value;
  at::Tensor out = at::from_blob(tensor.data, tensor.sizes, tensor.strides,
                                 at::TensorOptions().dtype(tensor.dtype).device(at::kCPU));
  out._set_conj(tensor.is_conj);
  out._set_neg(tensor.is_neg);
  return out;
}

std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  std::vector<at::Tensor> out;
  with_tensors(value, [&](const at::Tensor& one) {
    out.push_back(one);
    return one;
  });
  return out;
}

}  // namespace zsim
