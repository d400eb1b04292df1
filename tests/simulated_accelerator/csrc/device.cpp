// The device as torch sees it: guard, streams, events, hooks.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>

#include "copies.h"
#include "device.h"
#include "generator.h"
#include "memory.h"
#include "timelines.h"

namespace simulated {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point recorded;
  bool was_queried = false;
};

void count_sync() {
  Lock lock(state());
  counters().syncs++;
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return DEVICE; }
  Device exchangeDevice(Device device) const override {
    auto previous = getDevice();
    if (device.index() >= 0) set_current_device(device.index());
    return previous;
  }
  Device getDevice() const override { return Device(DEVICE, current_device()); }
  void setDevice(Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) set_current_device(device.index());
  }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }

  Stream getStream(Device device) const override { return current_stream(device.index()); }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, Device(DEVICE, device.index() < 0 ? current_device() : device.index()), 0);
  }
  Stream getNewStream(Device device, int) const override { return new_stream(device.index()); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return new_stream(device.index()); }
  Stream exchangeStream(Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& stream) const override {
    count_sync();
    host_waits_for(clock_of(timeline_of(stream)));
  }
  void synchronizeDevice(const DeviceIndex) const override {
    count_sync();
    host_waits_for_device();
  }

  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    const auto timeline = timeline_of(stream);
    launch(timeline);
    *static_cast<Event*>(*event) = {clock_of(timeline), std::chrono::steady_clock::now(), false};
  }
  void block(void* event, const Stream& stream) const override {
    if (event) order_after(timeline_of(stream), static_cast<Event*>(event)->clock);
  }
  // Not done at the first question: code that goes on as if it were fails.
  bool queryEvent(void* event) const override {
    if (!event) return true;
    auto* found = static_cast<Event*>(event);
    if (!std::exchange(found->was_queried, true)) return false;
    host_waits_for(found->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    count_sync();
    host_waits_for(static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    const auto between = static_cast<Event*>(end)->recorded - static_cast<Event*>(start)->recorded;
    return std::chrono::duration<double, std::milli>(between).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const Stream& stream) const override {
    allocator().recordStream(pointer, stream);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(DeviceIndex device) const override { set_current_device(device); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto previous = current_device();
    set_current_device(device);
    return previous;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current_device() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override { return new_generator(device); }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage, bytes); }
};

}  // namespace

void register_device() {
  static auto* hooks = new Hooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
  forbid_in_forked_children();
}

}  // namespace simulated
