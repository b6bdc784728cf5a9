// The seats that PyTorch keeps for a backend: the guard (devices, streams, events) and the hooks.
#include <algorithm>

#include "allocator.h"
#include "generator.h"
#include "lanes.h"
#include "memory.h"
#include "pinned.h"
#include "torch_headers.h"

namespace zsim {

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

Device device_at(int index) {
  return {DeviceType::PrivateUse1, static_cast<DeviceIndex>(index)};
}

Lane lane_of(const Stream& stream) {
  return {stream.device_index() < 0 ? current_device() : stream.device_index(), stream.id()};
}

Stream stream_of(Lane lane) {
  return Stream(Stream::UNSAFE, device_at(lane.device), lane.stream);
}

void check(DeviceIndex index) {
  TORCH_CHECK(index < device_count(), "zsim: there is no device ", static_cast<int>(index), " of ",
              device_count());
}

// PyTorch keeps an event as a pointer that is null until it is recorded.
MarkPtr& mark_of(void* event) { return *static_cast<MarkPtr*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::PrivateUse1;
  Guard() = default;
  explicit Guard(DeviceType) {}
  DeviceType type() const override { return static_type; }

  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(device_count());
  }
  Device getDevice() const override { return device_at(current_device()); }
  void setDevice(Device device) const override {
    check(device.index());
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) set_current_device(device.index());
  }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    host_waits_for_device(device, "synchronize");
  }

  Stream getStream(Device device) const override { return stream_of(current_lane(device.index())); }
  Stream getDefaultStream(Device device) const override {
    return stream_of({current_lane(device.index()).device, 0});
  }
  Stream getNewStream(Device device, int) const override {
    const int index = current_lane(device.index()).device;
    check(static_cast<DeviceIndex>(index));
    return stream_of({index, new_stream(index)});
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return getNewStream(device, 0);
  }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = getStream(stream.device());
    set_current_lane(lane_of(stream));
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(stream.id() + 1);
  }
  bool queryStream(const Stream& stream) const override { return is_idle(lane_of(stream)); }
  void synchronizeStream(const Stream& stream) const override {
    host_waits_for(lane_of(stream), "stream.synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    device_allocator().recordStream(pointer, stream);
  }

  void record(void** event, const Stream& stream, const DeviceIndex,
              const c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr;
    mark_of(*event) = mark(lane_of(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event) lane_waits(lane_of(stream), mark_of(event));
  }
  bool queryEvent(void* event) const override { return !event || is_reached(mark_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (event) host_waits(mark_of(event), "event.synchronize");
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    for (void* event : {first, second}) host_waits(mark_of(event), "event.elapsed_time");
    return (mark_of(second)->seconds - mark_of(first)->seconds) * 1e3;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }

  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(device_count()); }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(current_device());
  }
  void setCurrentDevice(DeviceIndex device) const override {
    check(device);
    set_current_device(device);
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex before = getCurrentDevice();
    setCurrentDevice(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }

  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool isPinnedPtr(const void* address) const override { return is_registered(address); }
  Device getDeviceFromPtr(void* address) const override {
    return device_at(std::max(device_of(address), 0));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override { return new_generator(device); }
};

const bool is_registered_with_torch = [] {
  c10::SetAllocator(DeviceType::PrivateUse1, &device_allocator());
  at::setHostAllocator(DeviceType::PrivateUse1, &pinned_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace zsim
