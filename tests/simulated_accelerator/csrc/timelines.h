// Streams as timelines with vector clocks, and the queues of work that a stream carries out late.
//
// Every stream has a clock: for each timeline, the time up to which its work is known to be done before the stream's
// next work begins. Waiting for an event merges the event's clock; a synchronisation merges it into the host's clock,
// from which every launch begins. One access happened before another if the other's clock has reached its time.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>

namespace simulated {

constexpr auto DEVICE = c10::DeviceType::PrivateUse1;
using Timeline = int64_t;  // one stream of one device
using Clock = std::map<Timeline, uint64_t>;

// Guards all state of this library. Never take Python's lock while holding it: a thread that holds that one frees
// tensors, which takes this one.
std::recursive_mutex& state();
using Lock = std::lock_guard<std::recursive_mutex>;

struct Counters {
  uint64_t syncs = 0;               // the host waited for a stream, an event or the device
  uint64_t blocking_to_host = 0;    // copies to the host that it waited for, .item() and data-dependent sizes included
  uint64_t blocking_to_device = 0;  // copies from pageable memory
};
Counters& counters();

c10::DeviceIndex device_count();
void set_device_count(c10::DeviceIndex count);
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);  // raises if there is no such device
void forbid_in_forked_children();

c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex device);
Timeline timeline_of(const c10::Stream& stream);
Timeline current_timeline(c10::DeviceIndex device);
std::string name_of(Timeline timeline);

uint64_t launch(Timeline timeline);  // begin work on a stream, after all that the host knows to be done
bool is_ordered(Timeline later, Timeline earlier, uint64_t time);
bool is_known_to_host(Timeline timeline, uint64_t time);
Clock clock_of(Timeline timeline);
void order_after(Timeline later, const Clock& earlier);

// Work that is carried out when something that is ordered after it needs it. `to_host`: only the host's wait does.
void enqueue(Timeline timeline, uint64_t time, bool to_host, std::function<void()> work);
void carry_out_before(Timeline timeline);  // all work that the stream's next kernel is ordered after
void host_waits_for(const Clock& clock);   // the host blocks until this clock is reached
void host_waits_for_device();
void forget(Timeline timeline);

}  // namespace simulated
