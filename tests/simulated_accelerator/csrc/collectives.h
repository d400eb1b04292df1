// Collectives of the device: refuse what NCCL refuses, run on a stream, and arrive late.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <memory>
#include <set>

#include "timelines.h"

namespace simulated {

constexpr auto BACKEND_NAME = "simccl";

// Values travel over gloo, from a copy of the input when the collective is launched. They reach the output, which is
// poisoned until then, when something that is ordered after the collective runs.
class Collectives final : public c10d::Backend {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  Collectives(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store,
              std::chrono::milliseconds timeout);
  ~Collectives() override;

  const std::string getBackendName() const override { return BACKEND_NAME; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;

  Work broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  Work allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  Work allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override;
  Work reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  Work allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override;
  Work allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override;
  Work reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override;
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override;
  Work reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override;
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                     std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) override;
  Work alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override;
  Work gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override;
  Work scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override;
  Work send(Tensors& tensors, int to, int tag) override;
  Work recv(Tensors& tensors, int from, int tag) override;
  Work barrier(const c10d::BarrierOptions& options) override;

 private:
  struct Request {
    c10d::OpType type;
    const char* name;
    Tensors inputs, outputs;
    bool is_async = true;
  };
  // Runs a gloo collective on copies of the inputs and returns its work with the values of the outputs, in their order.
  struct Launched {
    Work work;
    Tensors values;
    double factor = 1;  // of the values, for a mean
  };
  Work launch(const Request& request, const std::function<Launched(Tensors&)>& start);
  bool uses_output_in_flight(const Request& request);
  Timeline stream_on(c10::DeviceIndex device);
  void meet_on(c10::DeviceIndex device);

  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<c10d::Store> store_;
  c10::intrusive_ptr<c10d::Backend::Options> options_;
  std::map<c10::DeviceIndex, Timeline> streams_;
  std::shared_ptr<std::multiset<const void*>> in_flight_ = std::make_shared<std::multiset<const void*>>();
};

}  // namespace simulated
