// Operators: one kernel for all of them. Shapes are known at once; the CPU's kernel computes the
// results when the lane gets there.
#include "operators.h"

#include <ATen/ops/empty_strided.h>

#include <mutex>
#include <set>

#include "allocator.h"
#include "generator.h"
#include "lanes.h"
#include "shapes.h"
#include "tensors.h"
#include "torch_headers.h"

namespace zsim {

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

std::mutex counts_mutex;
std::map<std::string, uint64_t> synchronous, launched;

// A name that lives as long as the process, for tasks.
const char* count_launch(const OperatorHandle& op) {
  const std::lock_guard<std::mutex> lock(counts_mutex);
  auto entry = launched.try_emplace(toString(op.operator_name())).first;
  ++entry->second;
  return entry->first.c_str();
}

const std::set<std::string>& names_that_read() {  // sizes of their results depend on numbers
  static const std::set<std::string> names = {
      "aten::nonzero",           "aten::nonzero.out", "aten::masked_select",
      "aten::masked_select.out", "aten::_unique2",    "aten::unique_dim",
      "aten::unique_consecutive", "aten::bincount",   "aten::repeat_interleave.Tensor"};
  return names;
}

bool is_mask(const Tensor& tensor) {
  return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
}

// Whether the host needs numbers of the device to go on.
bool reads_numbers(const OperatorHandle& op, const std::vector<IValue>& arguments) {
  if (names_that_read().count(toString(op.operator_name()))) return true;
  for (const IValue& value : arguments)  // an index by a mask
    if (value.isOptionalTensorList())
      for (const Tensor& index : tensors_in(value))
        if (is_mask(index)) return true;
  for (const auto& result : op.schema().returns()) {  // a number for the host
    const auto& type = *result.type();
    const bool is_list = type.kind() == c10::TypeKind::ListType;
    const auto kind = (is_list ? *type.castRaw<c10::ListType>()->getElementType() : type).kind();
    if (kind != c10::TypeKind::TensorType) return true;
  }
  return false;
}

// CUDA's operators take numbers from the host where they are 0-dimensional, and indices.
bool takes_host_tensors(const OperatorHandle& op) {
  static const std::set<std::string> names = {"aten::index", "aten::index_put_",
                                              "aten::_index_put_impl_"};
  return names.count(op.operator_name().name);
}

int device_of_call(const OperatorHandle& op, const std::vector<IValue>& arguments) {
  int device = -1;
  for (const IValue& value : arguments) {
    if (value.isDevice() && value.toDevice().is_privateuseone() && device < 0)
      device = value.toDevice().has_index() ? value.toDevice().index() : current_device();
    for (const Tensor& one : tensors_in(value)) {
      if (is_ours(one) && device < 0) device = one.device().index();
    }
  }
  for (const IValue& value : arguments) {
    for (const Tensor& one : tensors_in(value)) {
      if (!one.defined() || (is_ours(one) && one.device().index() == device)) continue;
      TORCH_CHECK(one.is_cpu() && (one.dim() == 0 || takes_host_tensors(op)),
                  "Expected all tensors to be on the same device, but found at least two devices, "
                  "zsim:", device, " and ", one.device(), "! (when calling ", op.operator_name(),
                  ")");
    }
  }
  return device < 0 ? current_device() : device;
}

// An argument of a launch: its tensors are taken out, so that none is held.
class Argument {
 public:
  Argument() = default;
  explicit Argument(const IValue& value) {
    if (value.isTensor()) kind_ = Kind::kTensor;
    if (value.isTensorList()) kind_ = Kind::kList;
    if (value.isOptionalTensorList()) kind_ = Kind::kOptionalList;
    if (kind_ == Kind::kPlain) plain_ = value.isDevice() ? IValue(c10::Device(at::kCPU)) : value;
    if (kind_ == Kind::kOptionalList)  // what is None keeps its place
      for (const auto& one : value.toOptionalTensorVector())
        tensors.push_back(for_kernel(one.value_or(Tensor())));
    else
      for (const Tensor& one : tensors_in(value)) tensors.push_back(for_kernel(one));
  }
  static Argument seeded(uint64_t seed) {
    Argument out;
    out.kind_ = Kind::kGenerator;
    out.seed_ = seed;
    return out;
  }

  IValue for_cpu() const {
    if (kind_ == Kind::kGenerator) return at::detail::createCPUGenerator(seed_);
    if (kind_ == Kind::kTensor) return on_cpu(tensors[0]);
    if (kind_ == Kind::kPlain) return plain_;
    c10::List<Tensor> list;
    c10::List<std::optional<Tensor>> optional;
    for (const KernelTensor& one : tensors) {
      if (kind_ == Kind::kList) list.push_back(on_cpu(one));
      else optional.push_back(one.is_defined ? std::optional(on_cpu(one)) : std::nullopt);
    }
    return kind_ == Kind::kList ? IValue(list) : IValue(optional);
  }

  std::vector<KernelTensor> tensors;

 private:
  enum class Kind { kPlain, kTensor, kList, kOptionalList, kGenerator };
  Kind kind_ = Kind::kPlain;
  IValue plain_;
  uint64_t seed_ = 0;
};

// Accelerators keep the moments of a norm in fp32, the CPU's kernels in the dtype of the weight.
void fit_moments(const OperatorHandle& op, Stack& arguments) {
  struct Places {
    size_t mean, weight;  // 1 / deviation comes after the mean
  };
  static const std::map<std::string, Places> norms = {
      {"aten::native_layer_norm_backward", {3, 5}},
      {"aten::native_group_norm_backward", {2, 4}},
      {"aten::native_batch_norm_backward", {5, 2}},
  };
  const auto norm = norms.find(op.operator_name().name);
  if (norm == norms.end()) return;
  const auto [mean, weight] = norm->second;
  const bool has_weight = arguments[weight].isTensor() && arguments[weight].toTensor().defined();
  const auto dtype = arguments[has_weight ? weight : 1].toTensor().scalar_type();
  for (const size_t moment : {mean, mean + 1})
    if (arguments[moment].isTensor() && arguments[moment].toTensor().defined())
      arguments[moment] = arguments[moment].toTensor().to(dtype);
}

Stack run_on_cpu(const OperatorHandle& op, const std::vector<Argument>& arguments) {
  const BelowAutograd below;
  Stack stack;
  for (const Argument& argument : arguments) stack.push_back(argument.for_cpu());
  fit_moments(op, stack);
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &stack);
  return stack;
}

// One call of an operator.
class Call {
 public:
  Call(const OperatorHandle& op, std::vector<IValue> arguments)
      : op_(op), schema_(op.schema()), arguments_(std::move(arguments)),
        device_(device_of_call(op, arguments_)),
        guard_(c10::Device(at::kPrivateUse1, static_cast<c10::DeviceIndex>(device_))) {
    TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(DispatchKey::CPU), "zsim: ",
                                op.operator_name(), " has no kernel for the CPU");
    TORCH_CHECK_NOT_IMPLEMENTED(!op.hasTag(at::Tag::nondeterministic_seeded) || takes_generator(),
                                "zsim: ", op.operator_name(),
                                " would take random numbers from the host's generator");
  }

  std::vector<IValue> run() {
    if (!reads_numbers(op_, arguments_)) shapes_ = shapes_of(op_, arguments_);
    if (!shapes_) return run_now();
    resize_outs();
    const std::vector<Argument> arguments = kernel_arguments();
    std::vector<IValue> results;
    std::vector<Argument> fresh;
    for (size_t i = 0; i < schema_.returns().size(); ++i) {
      results.push_back(result(i));
      fresh.push_back(schema_.returns()[i].alias_info() ? Argument() : Argument(results[i]));
    }
    if (computes()) launch(arguments, std::move(fresh));
    return results;
  }

 private:
  bool takes_generator() const {
    const auto& all = schema_.arguments();
    return std::any_of(all.begin(), all.end(), is_generator);
  }

  static bool is_generator(const c10::Argument& argument) {
    return argument.type()->str().starts_with("Generator");
  }

  // `out=` tensors of another size
  void resize_outs() const {
    auto sizes = shapes_->outs.begin();
    for (size_t i = 0; i < arguments_.size(); ++i) {
      if (!is_written(schema_.arguments()[i])) continue;
      for (const Tensor& one : tensors_in(arguments_[i])) {
        if (is_ours(one) && one.sizes() != *sizes) one.resize_(*sizes);
        ++sizes;
      }
    }
  }

  std::vector<Argument> kernel_arguments() const {
    std::vector<Argument> out;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const IValue& value = arguments_[i];
      const bool takes_default = value.isNone() && is_generator(schema_.arguments()[i]);
      if (value.isGenerator()) out.push_back(Argument::seeded(next_seed(value.toGenerator())));
      else if (takes_default) out.push_back(Argument::seeded(next_seed(default_generator(device_))));
      else out.emplace_back(value);
    }
    return out;
  }

  IValue result(size_t i) const {
    const auto* alias = schema_.returns()[i].alias_info();
    if (!alias)
      return with_tensors(shapes_->results[i], [&](const Tensor& shape) { return empty_like(shape); });
    const IValue& base = argument_of(*alias);
    if (alias->isWrite()) return base;
    return with_tensors(shapes_->results[i],
                        [&](const Tensor& shape) { return view_of(base.toTensor(), shape); });
  }

  const IValue& argument_of(const c10::AliasInfo& alias) const {
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto* own = schema_.arguments()[i].alias_info();
      if (own && own->beforeSets() == alias.beforeSets()) return arguments_[i];
    }
    TORCH_CHECK(false, "zsim: ", op_.operator_name(), ": a result aliases no argument");
  }

  Tensor empty_like(const Tensor& shape) const {
    if (!shape.defined()) return shape;
    const c10::Device device(at::kPrivateUse1, static_cast<c10::DeviceIndex>(device_));
    return at::empty_strided(shape.sizes(), shape.strides(),
                             at::TensorOptions().dtype(shape.scalar_type()).device(device));
  }

  static Tensor view_of(const Tensor& base, const Tensor& shape) {
    Tensor view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), shape.dtype());
    const auto from = static_cast<int64_t>(base.element_size());
    const auto to = static_cast<int64_t>(shape.element_size());  // view(dtype)
    view.unsafeGetTensorImpl()->set_sizes_and_strides(
        shape.sizes(), shape.strides(), base.storage_offset() * from / to + shape.storage_offset());
    return view;
  }

  bool computes() const {  // else all that it returns are views
    const auto& returns = schema_.returns();
    return returns.empty() || std::any_of(returns.begin(), returns.end(), [](const auto& one) {
      return !one.alias_info() || one.alias_info()->isWrite();
    });
  }

  void launch(std::vector<Argument> arguments, std::vector<Argument> fresh) const {
    enqueue(current_lane(device_), count_launch(op_),
            [op = op_, arguments = std::move(arguments), fresh = std::move(fresh)] {
              const Stack made = run_on_cpu(op, arguments);
              for (size_t i = 0; i < fresh.size(); ++i) {
                const std::vector<Tensor> values = tensors_in(made[i]);
                for (size_t k = 0; k < fresh[i].tensors.size(); ++k)
                  if (fresh[i].tensors[k].is_defined) put(values[k], fresh[i].tensors[k]);
              }
            });
  }

  // The host waits, runs the kernel itself, and puts the results on the device.
  std::vector<IValue> run_now() {
    const std::string name = toString(op_.operator_name());
    count_synchronous(name);
    host_waits_for(current_lane(device_), name);
    const Stack made = run_on_cpu(op_, kernel_arguments());
    std::vector<IValue> results;
    for (size_t i = 0; i < made.size(); ++i) {
      const auto* alias = schema_.returns()[i].alias_info();
      if (alias && alias->isWrite()) {
        const IValue& target = argument_of(*alias);
        if (target.isTensor() && target.toTensor().sizes() != made[i].toTensor().sizes()) {
          target.toTensor().resize_(made[i].toTensor().sizes());
          put_later(made[i].toTensor(), target.toTensor());
        }
        results.push_back(target);
        continue;
      }
      results.push_back(with_tensors(made[i], [&](const Tensor& value) {
        const Tensor out = empty_like(value);
        if (out.defined()) put_later(value, out);
        return out;
      }));
    }
    return results;
  }

  // On the lane: what the kernel made goes where the host was told to expect it.
  static void put(const Tensor& value, const KernelTensor& target) {
    TORCH_CHECK(value.sizes() == target.sizes, "the result has the sizes ", value.sizes(), ", not ",
                c10::IntArrayRef(target.sizes));
    on_cpu(target).copy_(value);
  }

  void put_later(const Tensor& value, const Tensor& target) const {
    enqueue(current_lane(device_), "result",
            [to = for_kernel(target), value = value.clone()] { put(value, to); });
  }

  const OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  const std::vector<IValue> arguments_;
  const int device_;
  const c10::DeviceGuard guard_;
  std::shared_ptr<const Shapes> shapes_;
};

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_lane>());
}

}  // namespace

void run_on_lane(const OperatorHandle& op, Stack* stack) {
  const AllocatesFor name(op.operator_name().name.c_str());
  const size_t count = op.schema().arguments().size();
  const auto given = torch::jit::last(*stack, count);
  std::vector<IValue> results = Call(op, given.vec()).run();
  torch::jit::drop(*stack, count);
  for (IValue& value : results) stack->push_back(std::move(value));
}

std::map<std::string, uint64_t> synchronous_operators() {
  const std::lock_guard<std::mutex> lock(counts_mutex);
  return synchronous;
}

std::map<std::string, uint64_t> launched_operators() {
  const std::lock_guard<std::mutex> lock(counts_mutex);
  return launched;
}

void count_synchronous(const std::string& name) {
  const std::lock_guard<std::mutex> lock(counts_mutex);
  ++synchronous[name];
}

}  // namespace zsim
