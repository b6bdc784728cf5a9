// Operators with a kernel of their own: memory, views, copies, and the number that `item` reads.
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_native.h>

#include "allocator.h"
#include "lanes.h"
#include "memory.h"
#include "operators.h"
#include "pinned.h"
#include "tensors.h"
#include "torch_headers.h"

namespace zsim {

namespace {

using at::Tensor;
using c10::IntArrayRef;

const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

// ------------------------------------------------------------------------------ memory and views

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  const AllocatesFor name("aten::empty");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &device_allocator(), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device,
                     std::optional<bool>) {
  const AllocatesFor name("aten::empty_strided");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &device_allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride,
                  std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }

Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

const Tensor& resize_(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.element_size(),
                                                                  self.storage_offset());
  if (bytes > self.storage().nbytes()) resize_storage(self.storage(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve)
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage_at(Tensor& self, c10::Storage source, int64_t offset, IntArrayRef size,
                       IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage_at(self, std::move(source), 0, {numel}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_at(self, source.storage(), source.storage_offset(), source.sizes(),
                        source.strides());
}

void record_stream(Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

// ---------------------------------------------------------------------------------------- copies

void copy_on(Lane lane, const char* name, KernelTensor from, KernelTensor to) {
  enqueue(lane, name, [from = std::move(from), to = std::move(to)] {
    const BelowAutograd below;
    on_cpu(to).copy_(on_cpu(from));
  });
}

void copy_on_device(const Tensor& from, const Tensor& to) {
  const Lane source = current_lane(from.device().index());
  const Lane target = current_lane(to.device().index());
  const bool crosses = source.device != target.device;
  if (crosses) lane_waits(source, mark(target));
  copy_on(source, "copy", for_kernel(from), for_kernel(to));
  if (crosses) lane_waits(target, mark(source));
}

// The driver copies bytes: the same dtype on both sides, and the same order of elements.
bool is_plain(const Tensor& from, const Tensor& to) {
  const bool is_dense = from.is_contiguous() ? to.is_contiguous()
                                             : from.strides() == to.strides() &&
                                                   from.is_non_overlapping_and_dense();
  return is_dense && from.scalar_type() == to.scalar_type() && from.is_conj() == to.is_conj() &&
         from.is_neg() == to.is_neg();
}

void copy_to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
  const Lane lane = current_lane(to.device().index());
  if (non_blocking && !is_registered(from.data_ptr())) {  // the driver has staged it on return
    copy_on(lane, "copy to device", for_kernel(from), for_kernel(to));
    return;
  }
  copy_on(lane, "copy to device", host_memory(from), for_kernel(to));
  if (non_blocking) note_use(from.data_ptr(), mark(lane));
  else host_waits_for(lane, "copy to device");
}

void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
  const Lane lane = current_lane(from.device().index());
  copy_on(lane, "copy to host", for_kernel(from), host_memory(to));
  if (non_blocking && is_registered(to.data_ptr())) note_use(to.data_ptr(), mark(lane));
  else host_waits_for(lane, "copy to host");
}

Tensor copy_from(const Tensor& self, const Tensor& out, bool non_blocking) {
  if (!self.numel()) return out;
  const Tensor from = self.sizes() == out.sizes() ? self : self.expand(out.sizes());
  if (is_ours(from) && is_ours(out)) {
    copy_on_device(from, out);
  } else if (is_plain(from, out)) {
    (is_ours(from) ? copy_to_host : copy_to_device)(from, out, non_blocking);
  } else {  // as CUDA: the source's side converts, and another copy orders the elements
    const Tensor plain = from.to(out.scalar_type()).contiguous().resolve_conj().resolve_neg();
    const Tensor target = out.is_contiguous() ? out : at::empty(out.sizes(), out.options());
    (is_ours(from) ? copy_to_host : copy_to_device)(plain, target, non_blocking);
    if (!target.is_same(out)) out.copy_(target, non_blocking);
  }
  return out;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& out) {
  out.resize_(self.sizes());
  return copy_from(self, out, false);
}

at::Scalar item(const Tensor& self) {
  count_synchronous("aten::_local_scalar_dense");
  host_waits_for(current_lane(self.device().index()), "item");
  return at::native::_local_scalar_dense_cpu(on_cpu(for_kernel(self)));
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage_at);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
}

// The lazy bits of conjugate and negative views reach the copy; else PyTorch would resolve them by
// a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace
}  // namespace zsim
