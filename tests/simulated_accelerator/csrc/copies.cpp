#include "copies.h"

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <ATen/ops/equal.h>

#include <cstdlib>
#include <cstring>

#include "memory.h"
#include "reports.h"

namespace simulated {
namespace {

std::map<const char*, size_t> pinned;

void free_pinned(void* memory) {
  {
    Lock lock(state());
    pinned.erase(static_cast<const char*>(memory));
  }
  free(memory);
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    constexpr size_t ALIGNMENT = 64;
    void* memory = aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT) / ALIGNMENT * ALIGNMENT);
    memset(memory, POISON, bytes);
    Lock lock(state());
    pinned[static_cast<const char*>(memory)] = bytes;
    return {memory, memory, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
};

PinnedAllocator the_pinned_allocator;

void copy_values(const at::Tensor& source, const at::Tensor& target) {
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
  target.copy_(source);
}

bool same_bytes(const at::Tensor& left, const at::Tensor& right) {
  const auto a = left.contiguous(), b = right.contiguous();
  return memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0;
}

void copy_within(const at::Tensor& source, const at::Tensor& target) {
  const auto from = current_timeline(source.device().index()), to = current_timeline(target.device().index());
  order_after(from, clock_of(to));
  carry_out_before(from);
  use(source, Use::Read, from, "copy_");
  use(target, Use::Write, from, "copy_");
  copy_values(on_host(source), on_host(target));
  order_after(to, clock_of(from));
}

void copy_to_device(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const auto timeline = current_timeline(target.device().index());
  carry_out_before(timeline);
  const auto time = use(target, Use::Write, timeline, "copy_");
  const auto memory = on_host(target);
  if (!non_blocking) {
    Lock lock(state());
    counters().blocking_to_device++;
  }
  if (!non_blocking || !is_pinned(source.const_data_ptr())) return copy_values(source, memory);
  const auto given = source.clone();
  enqueue(timeline, time, false, [source, memory, given] {
    if (!same_bytes(source, given))
      report("HOST: pinned memory was changed before a copy to the device had read it (" +
             std::to_string(source.nbytes()) + " bytes)");
    copy_values(source, memory);
  });
}

void copy_to_host(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const auto timeline = current_timeline(source.device().index());
  carry_out_before(timeline);
  const auto time = use(source, Use::Read, timeline, "copy_");
  if (non_blocking && is_pinned(target.const_data_ptr())) {
    const auto values = on_host(source).clone();
    poison(target);
    enqueue(timeline, time, true, [values, target] { copy_values(values, target); });
    return;
  }
  {
    Lock lock(state());
    counters().blocking_to_host++;
  }
  host_waits_for(clock_of(timeline));
  copy_values(on_host(source), target);
}

}  // namespace

c10::Allocator* pinned_allocator() { return &the_pinned_allocator; }

bool is_pinned(const void* pointer) {
  Lock lock(state());
  auto found = pinned.upper_bound(static_cast<const char*>(pointer));
  if (found == pinned.begin()) return false;
  --found;
  return static_cast<const char*>(pointer) < found->first + std::max<size_t>(found->second, 1);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  ReportScope scope;
  if (!source.numel()) return target;
  if (source.is_cpu())
    copy_to_device(source, target, non_blocking);
  else if (target.is_cpu())
    copy_to_host(source, target, non_blocking);
  else
    copy_within(source, target);
  return target;
}

void wait_for_values(const at::Tensor& tensor, const std::string& operation) {
  const auto timeline = current_timeline(tensor.device().index());
  carry_out_before(timeline);
  use(tensor, Use::Read, timeline, operation);
  {
    Lock lock(state());
    counters().blocking_to_host++;
  }
  host_waits_for(clock_of(timeline));
}

}  // namespace simulated
