// Pinned host memory, and copies between the host and the device, which pinned memory lets arrive late.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

namespace simulated {

c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking);
void wait_for_values(const at::Tensor& tensor, const std::string& operation);  // the host needs them now

}  // namespace simulated
