// Random numbers of a device: a seed and an offset that every kernel advances, as those of CUDA.
#pragma once
#include <ATen/core/Generator.h>

#include <functional>

namespace simulated {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
bool is_of_device(const at::Generator& generator);

// Return a CPU generator with the numbers of the next kernel, and advance by what that draws.
at::Generator for_next_kernel(at::Generator generator);
// Run a kernel that draws from the default generator of the CPU with the numbers of the next kernel of the device.
void with_default_numbers(c10::DeviceIndex device, const std::function<void()>& kernel);

}  // namespace simulated
