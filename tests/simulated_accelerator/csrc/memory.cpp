#include "memory.h"

#include <ATen/ops/from_blob.h>

#include <cstdlib>
#include <cstring>
#include <set>

#include "reports.h"

namespace simulated {
namespace {

constexpr size_t ALIGNMENT = 64;
constexpr size_t MANY_ACCESSES = 64;

struct Access {
  Timeline timeline;
  uint64_t time;
  size_t begin, end;  // bytes within the block
  std::string operation;
};

struct Block {
  void* memory;
  size_t bytes;
  c10::DeviceIndex device;
  Timeline home;  // the stream that it was allocated on, which may reuse it as soon as it is freed
  std::vector<Access> writes, reads;
  std::set<Timeline> recorded;
};

struct Freed {
  Timeline timeline;
  uint64_t time;
  std::string text;
};

struct DeviceMemory {
  size_t allocated = 0, peak = 0, reserved = 0, reserved_peak = 0;
};

std::map<c10::DeviceIndex, DeviceMemory> memory_of;
std::map<Timeline, std::vector<Freed>> freed_on;
bool is_detecting = true;

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    Lock lock(state());
    auto note = [&](const std::vector<Access>& accesses, const char* how) {
      for (const auto& access : accesses) {
        if (access.timeline == block->home || block->recorded.count(access.timeline)) continue;
        freed_on[block->home].push_back(
            {access.timeline, access.time,
             access.operation + how + std::to_string(block->bytes) + " bytes on " + name_of(access.timeline)});
      }
    };
    if (is_detecting) {
      note(block->writes, " may still write ");
      note(block->reads, " may still read ");
    }
    memory_of[block->device].allocated -= block->bytes;
  }
  if (block->memory) {
    memset(block->memory, POISON, block->bytes);
    free(block->memory);
  }
  delete block;
}

Block* block_of(const c10::DataPtr& pointer) {
  return pointer.get_deleter() == &free_block ? static_cast<Block*>(pointer.get_context()) : nullptr;
}

void* poisoned(size_t bytes) {
  if (!bytes) return nullptr;
  void* memory = aligned_alloc(ALIGNMENT, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
  TORCH_CHECK(memory, "simulated accelerator: out of memory, tried to allocate ", bytes, " bytes");
  memset(memory, POISON, bytes);
  return memory;
}

c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes) {
  ReportScope scope;
  TORCH_CHECK(device >= 0 && device < device_count(), "simulated accelerator: invalid device ordinal ", int(device),
              ", there are ", int(device_count()), " devices");
  const auto home = current_timeline(device);
  auto* block = new Block{poisoned(bytes), bytes, device, home, {}, {}, {}};
  launch(home);
  Lock lock(state());
  auto& memory = memory_of[device];
  memory.allocated += bytes;
  memory.peak = std::max(memory.peak, memory.allocated);
  memory.reserved = std::max(memory.reserved, memory.allocated);
  memory.reserved_peak = std::max(memory.reserved_peak, memory.reserved);
  if (bytes) {
    for (const auto& freed : std::exchange(freed_on[home], {}))
      if (!is_ordered(home, freed.timeline, freed.time))
        report("REUSE: an allocation on " + name_of(home) + " may get freed memory of which " + freed.text);
  }
  return {block->memory, block, &free_block, c10::Device(DEVICE, device)};
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_device(), bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Lock lock(state());
    for (auto& [device, memory] : memory_of) memory.reserved = memory.allocated;
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    Lock lock(state());
    if (auto* block = block_of(pointer)) block->recorded.insert(timeline_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(state());
    const auto& memory = memory_of[device];
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& allocated = stats.allocated_bytes[0];
    allocated.current = int64_t(memory.allocated);
    allocated.peak = int64_t(memory.peak);
    auto& reserved = stats.reserved_bytes[0];
    reserved.current = int64_t(memory.reserved);
    reserved.peak = int64_t(memory.reserved_peak);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(state());
    auto& memory = memory_of[device];
    memory.peak = memory.allocated;
    memory.reserved_peak = memory.reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    constexpr size_t TOTAL = size_t(80) << 30;
    Lock lock(state());
    return {TOTAL - memory_of[device].allocated, TOTAL};
  }
};

Allocator the_allocator;

// The bytes of its storage that a tensor spans.
std::pair<size_t, size_t> span_of(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto begin = size_t(tensor.storage_offset()) * tensor.itemsize();
  return {begin, begin + size_t(last + 1) * tensor.itemsize()};
}

void keep(std::vector<Access>& accesses, Access access) {
  accesses.erase(std::remove_if(accesses.begin(), accesses.end(),
                                [&](const Access& earlier) {
                                  return earlier.timeline == access.timeline && access.begin <= earlier.begin &&
                                      earlier.end <= access.end;
                                }),
                 accesses.end());
  if (accesses.size() >= MANY_ACCESSES)
    accesses.erase(std::remove_if(accesses.begin(), accesses.end(),
                                  [](const Access& each) { return is_known_to_host(each.timeline, each.time); }),
                   accesses.end());
  accesses.push_back(std::move(access));
}

}  // namespace

c10::DeviceAllocator& allocator() { return the_allocator; }

void set_detecting(bool on) {
  Lock lock(state());
  is_detecting = on;
  freed_on.clear();
}

uint64_t use(const at::Tensor& tensor, Use how, Timeline timeline, const std::string& operation) {
  const auto time = launch(timeline);
  if (!tensor.defined() || !tensor.has_storage() || !tensor.numel()) return time;
  auto* block = block_of(tensor.storage().data_ptr());
  if (!block || !is_detecting) return time;
  const auto [begin, end] = span_of(tensor);
  Lock lock(state());
  auto check = [&, begin = begin, end = end](const std::vector<Access>& earlier, const char* what) {
    for (const auto& access : earlier) {
      if (access.begin >= end || access.end <= begin || is_ordered(timeline, access.timeline, access.time)) continue;
      report("RACE: " + operation + (how == Use::Write ? " writes" : " reads") + " on " + name_of(timeline) + " what " +
             access.operation + what + name_of(access.timeline) + ", and nothing orders the two (" +
             std::to_string(block->bytes) + " bytes)");
    }
  };
  check(block->writes, " writes on ");
  if (how == Use::Write) {
    check(block->reads, " reads on ");
    auto covered = [&, begin = begin, end = end](const Access& access) {
      return begin <= access.begin && access.end <= end && is_ordered(timeline, access.timeline, access.time);
    };
    for (auto* accesses : {&block->writes, &block->reads})
      accesses->erase(std::remove_if(accesses->begin(), accesses->end(), covered), accesses->end());
  }
  keep(how == Use::Write ? block->writes : block->reads, {timeline, time, begin, end, operation});
  return time;
}

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  auto storage = tensor.storage();
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
  void* memory = nullptr;
  if (tensor.numel()) {
    TORCH_CHECK(storage.data_ptr().get(), "simulated accelerator: use of a tensor whose storage was freed");
    memory = static_cast<char*>(storage.mutable_data()) + tensor.storage_offset() * tensor.itemsize();
  }
  auto alias = at::from_blob(memory, tensor.sizes(), tensor.strides(), [storage](void*) {}, options);
  if (tensor.is_conj()) alias = alias.conj();
  return tensor.is_neg() ? alias._neg_view() : alias;
}

void poison(const at::Tensor& host_tensor) {
  if (host_tensor.numel() && host_tensor.is_contiguous()) memset(host_tensor.mutable_data_ptr(), POISON, host_tensor.nbytes());
}

void resize_storage(const c10::Storage& storage, size_t bytes) {
  const auto device = storage.device().index();
  const auto timeline = current_timeline(device);
  const auto kept = std::min(bytes, storage.nbytes());
  auto fresh = allocate_on(device, bytes);
  if (kept && storage.data()) {
    carry_out_before(timeline);
    auto* from = block_of(storage.data_ptr());
    auto* to = block_of(fresh);
    const auto time = launch(timeline);
    {
      Lock lock(state());
      if (from) keep(from->reads, {timeline, time, 0, kept, "resize_"});
      keep(to->writes, {timeline, time, 0, kept, "resize_"});
    }
    memcpy(fresh.get(), storage.data(), kept);
  }
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

REGISTER_ALLOCATOR(DEVICE, &the_allocator);

}  // namespace simulated
