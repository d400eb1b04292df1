#include "timelines.h"

#include <pthread.h>

#include <atomic>
#include <list>
#include <memory>

#include "reports.h"

namespace simulated {
namespace {

constexpr Timeline STREAMS_OF_A_DEVICE = 1'000'000;

struct Pending {
  Timeline timeline;
  uint64_t time;
  bool to_host;
  std::function<void()> work;
  std::mutex running;

  // The first caller carries it out, others wait until it has.
  void carry_out() {
    std::lock_guard<std::mutex> lock(running);
    if (auto once = std::exchange(work, nullptr)) once();
  }
};

std::map<Timeline, Clock> clocks;
Clock host;
std::list<std::shared_ptr<Pending>> pending;
std::atomic<size_t> pending_count{0};
int64_t next_stream = 1;
c10::DeviceIndex devices = 2;
std::atomic<bool> is_used{false};  // by a kernel
std::atomic<bool> is_forked{false};  // from a process that had used the device
thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> stream_of_thread;

uint64_t time_in(const Clock& clock, Timeline timeline) {
  auto found = clock.find(timeline);
  return found == clock.end() ? 0 : found->second;
}

void merge(Clock& into, const Clock& from) {
  for (const auto& [timeline, time] : from) {
    auto& known = into[timeline];
    known = std::max(known, time);
  }
}

// Carry out pending work in the order in which it was enqueued, without the lock: it may wait for other ranks.
void carry_out(const Clock& reached, bool host_waits) {
  while (pending_count) {
    std::shared_ptr<Pending> next;
    {
      Lock lock(state());
      for (const auto& each : pending) {
        if (each->time <= time_in(reached, each->timeline) && (host_waits || !each->to_host)) {
          next = each;
          break;
        }
      }
    }
    if (!next) return;
    struct Remove {
      const std::shared_ptr<Pending>& done;
      ~Remove() {
        Lock lock(state());
        const auto before = pending.size();
        pending.remove(done);
        pending_count -= before - pending.size();
      }
    } remove{next};
    next->carry_out();
  }
}

}  // namespace

std::recursive_mutex& state() {
  static auto* mutex = new std::recursive_mutex();  // outlives tensors that are freed at exit
  return *mutex;
}

Counters& counters() {
  static Counters counted;
  return counted;
}

c10::DeviceIndex device_count() { return devices; }
void set_device_count(c10::DeviceIndex count) { devices = count; }

c10::DeviceIndex current_device() { return device_of_thread; }

void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < devices, "simulated accelerator: invalid device ordinal ", int(index), ", there are ",
              int(devices), " devices");
  device_of_thread = index;
}

void forbid_in_forked_children() { pthread_atfork(nullptr, nullptr, [] { is_forked = is_used.load(); }); }

c10::Stream current_stream(c10::DeviceIndex device) {
  const auto index = device < 0 ? device_of_thread : device;
  auto found = stream_of_thread.find(index);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(DEVICE, index), found == stream_of_thread.end() ? 0 : found->second);
}

c10::Stream exchange_stream(c10::Stream stream) {
  auto previous = current_stream(stream.device_index());
  stream_of_thread[stream.device_index()] = stream.id();
  return previous;
}

c10::Stream new_stream(c10::DeviceIndex device) {
  Lock lock(state());
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(DEVICE, device < 0 ? device_of_thread : device), next_stream++);
}

Timeline timeline_of(const c10::Stream& stream) { return stream.device_index() * STREAMS_OF_A_DEVICE + stream.id(); }
Timeline current_timeline(c10::DeviceIndex device) { return timeline_of(current_stream(device)); }

std::string name_of(Timeline timeline) {
  const auto stream = timeline % STREAMS_OF_A_DEVICE;
  return (stream ? "stream " + std::to_string(stream) : std::string("the default stream")) + " of device " +
      std::to_string(timeline / STREAMS_OF_A_DEVICE);
}

uint64_t launch(Timeline timeline) {
  TORCH_CHECK(!is_forked, "simulated accelerator: cannot be used in a forked child of a process that has used it");
  is_used = true;
  Lock lock(state());
  auto& clock = clocks[timeline];
  merge(clock, host);
  return ++clock[timeline];
}

bool is_ordered(Timeline later, Timeline earlier, uint64_t time) {
  return later == earlier || time_in(clocks[later], earlier) >= time;
}

bool is_known_to_host(Timeline timeline, uint64_t time) { return time_in(host, timeline) >= time; }

Clock clock_of(Timeline timeline) {
  Lock lock(state());
  return clocks[timeline];
}

void order_after(Timeline later, const Clock& earlier) {
  Lock lock(state());
  merge(clocks[later], earlier);
}

void enqueue(Timeline timeline, uint64_t time, bool to_host, std::function<void()> work) {
  auto item = std::make_shared<Pending>();
  item->timeline = timeline;
  item->time = time;
  item->to_host = to_host;
  item->work = std::move(work);
  Lock lock(state());
  pending.push_back(std::move(item));
  pending_count++;
}

void carry_out_before(Timeline timeline) {
  if (!pending_count) return;
  Clock reached;
  {
    Lock lock(state());
    reached = clocks[timeline];
    merge(reached, host);
  }
  carry_out(reached, false);
}

void host_waits_for(const Clock& clock) {
  Clock reached;
  {
    Lock lock(state());
    merge(host, clock);
    reached = host;
  }
  carry_out(reached, true);
}

void host_waits_for_device() {
  Clock all;
  {
    Lock lock(state());
    for (const auto& [timeline, clock] : clocks) merge(all, clock);
  }
  host_waits_for(all);
}

void forget(Timeline timeline) {
  Lock lock(state());
  const auto before = pending.size();
  pending.remove_if([timeline](const auto& each) { return each->timeline == timeline; });
  pending_count -= before - pending.size();
}

}  // namespace simulated
