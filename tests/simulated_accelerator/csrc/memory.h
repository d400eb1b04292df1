// The device's memory: blocks that remember who used them, poisoned while nothing was written to them.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "timelines.h"

namespace simulated {

constexpr int POISON = 0xFF;  // NaN in every floating dtype, -1 in signed integers

c10::DeviceAllocator& allocator();
void set_detecting(bool on);

enum class Use { Read, Write };
// Note that a stream uses a tensor's memory, and report accesses that nothing orders with this one.
uint64_t use(const at::Tensor& tensor, Use how, Timeline timeline, const std::string& operation);

// A CPU tensor over the memory of a tensor of the device.
at::Tensor on_host(const at::Tensor& tensor);
void poison(const at::Tensor& host_tensor);
void resize_storage(const c10::Storage& storage, size_t bytes);

}  // namespace simulated
