// Autocast: CUDA's lists of operators, each with a boxed kernel that casts its arguments.
#include "tensors.h"
#include "torch_headers.h"

namespace zsim {

namespace {

using at::Tensor;
using c10::IValue;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

enum class Cast { kLower, kFp32, kFp32Result, kPromote };

at::ScalarType dtype_for(Cast cast, const IValue* first, const IValue* last) {
  if (cast == Cast::kFp32) return at::kFloat;
  auto dtype = at::autocast::get_autocast_dtype(kDevice);
  if (cast == Cast::kPromote)
    for (const IValue* value = first; value != last; ++value)
      for (const Tensor& one : tensors_in(*value))
        dtype = at::autocast::prioritize(dtype, one, kDevice);
  return dtype;
}

template <Cast cast>
void autocast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::AutocastPrivateUse1);
  const auto& schema = op.schema();
  IValue* last = stack->data() + stack->size();
  IValue* first = last - schema.arguments().size();
  if (cast == Cast::kFp32Result) {  // the kernel converts as it reads
    const auto dtype = schema.argumentIndexWithName("dtype");
    if (dtype && first[*dtype].isNone() && at::autocast::is_eligible(first->toTensor(), kDevice))
      first[*dtype] = at::kFloat;
  } else {
    const auto dtype = dtype_for(cast, first, last);
    for (IValue* value = first; value != last; ++value)
      *value = with_tensors(*value, [&](const Tensor& one) {
        return at::autocast::cached_cast(dtype, one, kDevice);
      });
  }
  op.callBoxed(stack);
}

template <Cast cast>
void add(torch::Library& library, std::string name) {  // "name", or "name, overload"
  if (const auto comma = name.find(", "); comma != std::string::npos) name.replace(comma, 2, ".");
  library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&autocast<cast>>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define LOWER(...) add<Cast::kLower>(m, #__VA_ARGS__);
#define FP32(...) add<Cast::kFp32>(m, #__VA_ARGS__);
#define FP32_RESULT(...) add<Cast::kFp32Result>(m, #__VA_ARGS__);
#define PROMOTE(...) add<Cast::kPromote>(m, #__VA_ARGS__);

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_RESULT)
  AT_FORALL_PROMOTE(PROMOTE)
  for (const char* name : {"norm.Scalar", "norm.ScalarOpt_dim"}) add<Cast::kFp32>(m, name);
}

}  // namespace
}  // namespace zsim
