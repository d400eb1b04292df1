#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <cstring>

#include "timelines.h"

namespace simulated {
namespace {

constexpr uint64_t NUMBERS_OF_A_KERNEL = 4;  // CUDA's offsets are multiples of four, too
constexpr c10::DeviceIndex MOST_DEVICES = 16;

class GeneratorImpl final : public c10::GeneratorImpl {
 public:
  explicit GeneratorImpl(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(DEVICE, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(false));
    return seed_;
  }
  void set_offset(uint64_t offset) override {
    TORCH_CHECK(offset % NUMBERS_OF_A_KERNEL == 0, "offset must be a multiple of 4");
    offset_ = offset;
  }
  uint64_t get_offset() const override { return offset_; }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({int64_t(sizeof(seed_) + sizeof(offset_))}, at::kByte, {}, {}, {}, {});
    auto* bytes = state.data_ptr<uint8_t>();
    memcpy(bytes, &seed_, sizeof(seed_));
    memcpy(bytes + sizeof(seed_), &offset_, sizeof(offset_));
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.device_type() == c10::DeviceType::CPU, "RNG state must be a tensor of the CPU");
    TORCH_CHECK(state.numel() == int64_t(sizeof(seed_) + sizeof(offset_)), "RNG state is wrong size");
    const auto* bytes = static_cast<const uint8_t*>(state.data());
    memcpy(&seed_, bytes, sizeof(seed_));
    memcpy(&offset_, bytes + sizeof(seed_), sizeof(offset_));
  }
  GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t next_kernel() {
    const auto place = offset_;
    offset_ += NUMBERS_OF_A_KERNEL;
    uint64_t mixed = seed_ + 0x9E3779B97F4A7C15ull * (place + 1);  // splitmix64
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
    return mixed ^ (mixed >> 31);
  }

 private:
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

}  // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex i = 0; i < MOST_DEVICES; i++) made->push_back(new_generator(i));
    return made;
  }();
  return generators->at(size_t(device < 0 ? current_device() : device));
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<GeneratorImpl>(device < 0 ? current_device() : device);
}

bool is_of_device(const at::Generator& generator) { return generator.device().type() == DEVICE; }

at::Generator for_next_kernel(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return at::detail::createCPUGenerator(static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl())->next_kernel());
}

void with_default_numbers(c10::DeviceIndex device, const std::function<void()>& kernel) {
  const auto numbers = for_next_kernel(default_generator(device));
  auto host = at::detail::getDefaultCPUGenerator();
  const auto set = [&](const at::Tensor& state) {
    std::lock_guard<std::mutex> lock(host.mutex());
    host.set_state(state);
  };
  at::Tensor before;
  {
    std::lock_guard<std::mutex> lock(host.mutex());
    before = host.get_state();
  }
  set(numbers.get_state());
  try {
    kernel();
  } catch (...) {
    set(before);
    throw;
  }
  set(before);
}

}  // namespace simulated
