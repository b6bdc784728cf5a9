// Most Meta kernels are written in Python: what one has said of a call is kept.
#include "shapes.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <mutex>
#include <unordered_map>

#include "tensors.h"

namespace zsim {

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using c10::OperatorHandle;

bool is_number(const Tensor& tensor) {
  return tensor.defined() && tensor.unsafeGetTensorImpl()->is_wrapped_number();
}

// All that a Meta kernel may go by, as bytes. It sees no numbers of tensors, but those of the host
// that Python's numbers became, and neither devices nor generators.
class Key {
 public:
  Key(const OperatorHandle& op, const std::vector<IValue>& arguments) {
    is_whole_ = !at::impl::torch_function_mode_enabled() &&  // modes see Python's kernels
                !c10::impl::TorchDispatchModeTLS::any_modes_set();
    add_text(op.operator_name().name);
    add_text(op.operator_name().overload_name);
    add(at::get_default_dtype_as_scalartype());
    add(at::globalContext().deterministicAlgorithms());
    add(at::globalContext().deterministicFillUninitializedMemory());
    add(c10::GradMode::is_enabled());
    add(c10::InferenceMode::is_enabled());
    for (const IValue& value : arguments) add_value(value);
  }

  bool is_whole() const { return is_whole_; }  // else the call is not to be kept
  const std::string& bytes() const { return bytes_; }

 private:
  template <typename Plain>
  void add(Plain value) {
    static_assert(std::is_trivially_copyable_v<Plain>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  template <typename List>
  void add_list(const List& list) {
    add(list.size());
    for (const typename List::value_type one : list) add(one);
  }

  void add_text(const std::string& text) {
    add(text.size());
    bytes_ += text;
  }

  void add_value(const IValue& value) {
    if (value.isTensor()) add('t'), add_tensor(value.toTensor());
    else if (value.isInt()) add('i'), add(value.toInt());
    else if (value.isBool()) add('b'), add(value.toBool());
    else if (value.isDouble()) add('d'), add(value.toDouble());
    else if (value.isComplexDouble()) add('c'), add(value.toComplexDouble());
    else if (value.isString()) add('s'), add_text(value.toStringRef());
    else if (value.isIntList()) add('I'), add_list(value.toIntVector());
    else if (value.isDoubleList()) add('D'), add_list(value.toDoubleVector());
    else if (value.isBoolList()) add('B'), add_list(value.toBoolList().vec());
    else if (value.isTensorList()) add('T'), add_tensors(value.toTensorVector());
    else if (value.isOptionalTensorList()) add('O'), add_tensors(value.toOptionalTensorVector());
    else if (value.isNone() || value.isGenerator()) add('n');  // the kernel gets no generator
    else if (value.isDevice()) add('v');
    else is_whole_ = false;
  }

  template <typename List>
  void add_tensors(const List& list) {
    add(list.size());
    for (const auto& one : list) add_tensor(one);
  }

  void add_tensor(const std::optional<Tensor>& given) {
    const Tensor tensor = given.value_or(Tensor());
    add(tensor.defined());
    if (!tensor.defined()) return;
    add(tensor.scalar_type());
    add_list(tensor.sizes());
    add_list(tensor.strides());
    add(is_number(tensor));
    if (is_number(tensor)) return add_number(tensor);
    const auto known = std::find(seen_.begin(), seen_.end(), tensor.unsafeGetTensorImpl());
    add(known - seen_.begin());  // which of them are the same
    if (known == seen_.end()) seen_.push_back(tensor.unsafeGetTensorImpl());
  }

  void add_number(const Tensor& tensor) {
    is_whole_ = is_whole_ && tensor.is_cpu();
    if (is_whole_)
      bytes_.append(static_cast<const char*>(tensor.const_data_ptr()), tensor.element_size());
  }

  std::string bytes_;
  bool is_whole_;
  std::vector<const void*> seen_;
};

// One call of a Meta kernel.
class Question {
 public:
  Question(const OperatorHandle& op, const std::vector<IValue>& arguments)
      : op_(op), arguments_(arguments) {}

  std::shared_ptr<const Shapes> ask() {
    if (!op_.hasComputedKernelForDispatchKey(DispatchKey::Meta)) return nullptr;
    auto shapes = std::make_shared<Shapes>();
    for (const IValue& value : arguments_) {
      if (value.isDevice()) shapes->results.push_back(c10::Device(at::kMeta));
      else if (value.isGenerator()) shapes->results.push_back(IValue());
      else shapes->results.push_back(with_tensors(value, [&](auto& one) { return meta_of(one); }));
    }
    if (!run(shapes->results)) return nullptr;
    for (size_t i = 0; i < arguments_.size(); ++i)
      if (is_written(op_.schema().arguments()[i]))
        for (const Tensor& one : tensors_in(arguments_[i]))
          shapes->outs.push_back(one.defined() ? meta_of(one).sizes().vec()
                                               : std::vector<int64_t>());
    return shapes;
  }

 private:
  bool run(torch::jit::Stack& stack) const {
    try {
      const BelowAutograd below;
      op_.redispatchBoxed(c10::DispatchKeySet(DispatchKey::Meta), &stack);
    } catch (const std::exception& error) {  // also Python's
      const bool is_missing = dynamic_cast<const c10::NotImplementedError*>(&error) ||
                              std::string(error.what()).find("NotImplementedError") == 0;
      if (is_missing) return false;
      throw;
    }
    return true;
  }

  Tensor meta_of(const Tensor& one) {
    if (!one.defined() || is_number(one)) return one;
    Tensor& meta = metas_[one.unsafeGetTensorImpl()];
    if (!meta.defined())
      meta = at::empty_strided(one.sizes(), one.strides(),
                               at::TensorOptions().dtype(one.scalar_type()).device(at::kMeta));
    return meta;
  }

  const OperatorHandle& op_;
  const std::vector<IValue>& arguments_;
  std::map<const void*, Tensor> metas_;  // by tensor
};

struct Memory {
  std::mutex mutex;
  std::unordered_map<std::string, std::shared_ptr<const Shapes>> shapes;
};

Memory& memory() {
  static auto* made = new Memory;  // never destroyed: its tensors may be Python's
  return *made;
}

}  // namespace

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

std::shared_ptr<const Shapes> shapes_of(const OperatorHandle& op,
                                        const std::vector<IValue>& arguments) {
  const Key key(op, arguments);
  if (!key.is_whole()) return Question(op, arguments).ask();
  {
    const std::lock_guard<std::mutex> lock(memory().mutex);
    const auto known = memory().shapes.find(key.bytes());
    if (known != memory().shapes.end()) return known->second;
  }
  auto shapes = Question(op, arguments).ask();  // without the lock: it may run Python
  const std::lock_guard<std::mutex> lock(memory().mutex);
  memory().shapes.emplace(key.bytes(), shapes);
  return shapes;
}

}  // namespace zsim
