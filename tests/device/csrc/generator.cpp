#include "generator.h"

#include <ATen/ops/empty.h>

#include "lanes.h"

namespace zsim {

namespace {

struct State {
  uint64_t seed = c10::default_rng_seed_val;
  uint64_t offset = 0;  // launches since the seed was set
};

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(c10::DeviceIndex device)
      : GeneratorImpl({at::kPrivateUse1, device},
                      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  static c10::DeviceType device_type() { return at::kPrivateUse1; }

  void set_current_seed(uint64_t seed) override { state_ = {seed, 0}; }
  uint64_t current_seed() const override { return state_.seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state_.seed;
  }
  void set_offset(uint64_t offset) override { state_.offset = offset; }
  uint64_t get_offset() const override { return state_.offset; }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor out = at::empty({sizeof(State)}, at::TensorOptions().dtype(at::kByte));
    std::memcpy(out.mutable_data_ptr(), &state_, sizeof(State));
    return out.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == sizeof(State) && state.is_cpu(),
                "zsim: a generator's state is ", sizeof(State), " bytes on the CPU");
    std::memcpy(&state_, state.data(), sizeof(State));
  }

  uint64_t next() {  // splitmix64
    const std::lock_guard<std::mutex> lock(mutex_);
    uint64_t x = state_.seed * 0x9E3779B97F4A7C15ull + ++state_.offset;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  }

 private:
  DeviceGenerator* clone_impl() const override {
    auto* out = new DeviceGenerator(device().index());
    out->state_ = state_;
    return out;
  }

  State state_;
};

}  // namespace

at::Generator new_generator(int device) {
  if (device < 0) device = current_device();
  return at::make_generator<DeviceGenerator>(static_cast<c10::DeviceIndex>(device));
}

const at::Generator& default_generator(int device) {
  static auto* made = [] {
    auto* out = new std::vector<at::Generator>;
    for (int index = 0; index < device_count(); ++index) out->push_back(new_generator(index));
    return out;
  }();
  return made->at(device < 0 ? current_device() : device);
}

uint64_t next_seed(const at::Generator& generator) {
  return at::check_generator<DeviceGenerator>(generator)->next();
}

}  // namespace zsim
