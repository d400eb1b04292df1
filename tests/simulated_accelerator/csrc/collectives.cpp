#include "collectives.h"

#include <ATen/Functions.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <unistd.h>

#include <set>

#include "memory.h"
#include "reports.h"

namespace simulated {
namespace {

using at::Tensor;
using c10d::OpType;
using c10d::ReduceOp;
using Tensors = Collectives::Tensors;

const std::set<at::ScalarType> DTYPES = {
    at::kByte, at::kChar, at::kInt, at::kLong, at::kHalf, at::kFloat, at::kDouble, at::kBFloat16, at::kBool,
    at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kFloat8_e4m3fnuz, at::kFloat8_e5m2fnuz};

// --- what NCCL refuses ------------------------------------------------------------------------------------------------

void check(const Tensor& tensor, c10::DeviceIndex device, const std::string& name) {
  TORCH_CHECK(tensor.is_privateuseone(), BACKEND_NAME, ": ", name, " of a tensor on ", tensor.device(),
              ", expected one of the device: No backend type associated with device type ", tensor.device().type());
  TORCH_CHECK(tensor.device().index() == device, BACKEND_NAME, ": ", name, " of tensors on devices ", int(device), " and ",
              int(tensor.device().index()), ", expected all on one");
  TORCH_CHECK(tensor.is_contiguous(), BACKEND_NAME, ": ", name, ": Tensors must be contiguous");
  TORCH_CHECK(!tensor.is_sparse(), BACKEND_NAME, ": ", name, ": Tensors must be dense");
  TORCH_CHECK(DTYPES.count(tensor.scalar_type()), BACKEND_NAME, ": ", name, ": Input tensor data type is not supported: ",
              tensor.scalar_type());
}

void check_reduction(const ReduceOp& op, const Tensor& tensor, const std::string& name) {
  const auto kind = ReduceOp::RedOpType(op);
  TORCH_CHECK(kind != ReduceOp::BAND && kind != ReduceOp::BOR && kind != ReduceOp::BXOR, BACKEND_NAME, ": ", name,
              ": Cannot use bitwise reductions with NCCL");
  TORCH_CHECK(tensor.scalar_type() != at::kBool || kind != ReduceOp::AVG, BACKEND_NAME, ": ", name,
              ": Cannot use ReduceOp.AVG with Boolean inputs");
}

void check_same_dtype(const Tensor& output, const Tensor& input, const std::string& name) {
  TORCH_CHECK(output.scalar_type() == input.scalar_type(), BACKEND_NAME, ": ", name,
              ": output tensor must have the same type as input tensor");
}

void check_one(const Tensors& tensors, const std::string& name) {
  TORCH_CHECK(tensors.size() == 1, BACKEND_NAME, ": ", name, " of ", tensors.size(), " tensors, expected one");
}

// --- reductions that gloo lacks ---------------------------------------------------------------------------------------

struct Reduction {
  ReduceOp op;
  double before = 1, after = 1;  // factors of the inputs and of the result
};

Reduction on_gloo(const ReduceOp& op, const Tensor& tensor, int size) {
  const auto kind = ReduceOp::RedOpType(op);
  if (tensor.scalar_type() == at::kBool && kind == ReduceOp::SUM) return {ReduceOp::MAX};
  if (kind == ReduceOp::AVG) return {ReduceOp::SUM, 1, 1.0 / size};
  if (kind != ReduceOp::PREMUL_SUM) return {op};
  const auto* given = dynamic_cast<c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(given, BACKEND_NAME, ": PREMUL_SUM without its factor");
  return {ReduceOp::SUM, given->tensor_factor.defined() ? given->tensor_factor.item<double>() : given->double_factor};
}

Tensor bytes_of(const Tensor& tensor) { return tensor.reshape({-1}).view(at::kByte); }

Tensors bytes_of(const Tensors& tensors) {
  Tensors bytes;
  for (const auto& tensor : tensors) bytes.push_back(bytes_of(tensor));
  return bytes;
}

Tensors like(const Tensors& tensors) {
  Tensors made;
  for (const auto& tensor : tensors) made.push_back(at::empty(tensor.sizes(), tensor.options().device(at::kCPU)));
  return made;
}

// --- a collective in flight -------------------------------------------------------------------------------------------

class Launch final : public c10d::Work {
 public:
  Launch(int rank, OpType type, c10::DeviceIndex device, Tensors outputs, c10::intrusive_ptr<c10d::Work> gloo)
      : c10d::Work(rank, type), device_(device), outputs_(std::move(outputs)), gloo_(std::move(gloo)) {}

  bool isCompleted() override { return gloo_->isCompleted(); }
  bool isSuccess() const override { return true; }
  // As NCCL's: the current stream waits, the host does not, except for a barrier.
  bool wait(std::chrono::milliseconds) override {
    order_after(current_timeline(device_), clock);
    if (opType_ == OpType::BARRIER) {
      {
        Lock lock(state());
        counters().syncs++;
      }
      host_waits_for(clock);
    }
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(outputs_));
    return future;
  }

  Clock clock;

 private:
  c10::DeviceIndex device_;
  Tensors outputs_;
  c10::intrusive_ptr<c10d::Work> gloo_;
};

class AllDone final : public c10d::Work {
 public:
  explicit AllDone(std::vector<Collectives::Work> works) : works_(std::move(works)) {}
  bool wait(std::chrono::milliseconds timeout) override {
    for (auto& work : works_) work->wait(timeout);
    return true;
  }
  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](auto& work) { return work->isCompleted(); });
  }

 private:
  std::vector<Collectives::Work> works_;
};

}  // namespace

Collectives::Collectives(c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store,
                         std::chrono::milliseconds timeout)
    : c10d::Backend(gloo->getRank(), gloo->getSize()),
      gloo_(std::move(gloo)),
      store_(std::move(store)),
      options_(c10::make_intrusive<c10d::Backend::Options>(BACKEND_NAME, timeout)) {}

Collectives::~Collectives() {
  for (const auto& [device, stream] : streams_) forget(stream);
}

void Collectives::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  gloo_->setTimeout(timeout);
}

Timeline Collectives::stream_on(c10::DeviceIndex device) {
  {
    Lock lock(state());
    auto found = streams_.find(device);
    if (found != streams_.end()) return found->second;
    streams_[device] = timeline_of(new_stream(device));
  }
  meet_on(device);
  return streams_[device];
}

// NCCL makes a communicator at the first collective of a device, and refuses two ranks on one device.
void Collectives::meet_on(c10::DeviceIndex device) {
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  const auto own = std::string(host) + " " + std::to_string(device);
  const auto number = std::to_string(streams_.size());
  const auto key_of = [&](int rank) { return "device " + number + " of rank " + std::to_string(rank); };
  store_->set(key_of(getRank()), own);
  for (int rank = 0; rank < getSize(); rank++) {
    if (rank == getRank()) continue;
    const auto other = store_->get(key_of(rank));
    TORCH_CHECK(own != std::string(other.begin(), other.end()), BACKEND_NAME, ": Duplicate GPU detected: rank ", getRank(),
                " and rank ", rank, " both on device ", int(device), " of host ", host);
  }
}

// Collectives of a group run one after the other, so that one may take the output of another without a wait.
bool Collectives::uses_output_in_flight(const Request& request) {
  Lock lock(state());
  for (const auto* tensors : {&request.inputs, &request.outputs})
    for (const auto& tensor : *tensors)
      if (in_flight_->count(tensor.storage().data())) return true;
  return false;
}

Collectives::Work Collectives::launch(const Request& request, const std::function<Launched(Tensors&)>& start) {
  ReportScope scope;
  const auto& first = request.inputs.empty() ? request.outputs : request.inputs;
  const auto device = first.empty() ? current_device() : first[0].device().index();
  for (const auto* tensors : {&request.inputs, &request.outputs})
    for (const auto& tensor : *tensors) check(tensor, device, request.name);
  const auto own = stream_on(device);
  const auto current = current_timeline(device);
  const auto timeline = request.is_async ? own : current;
  order_after(timeline, clock_of(current));
  carry_out_before(current);
  if (uses_output_in_flight(request)) carry_out_before(timeline);
  const auto name = std::string(BACKEND_NAME) + " " + request.name;
  Tensors copies;
  for (const auto& input : request.inputs) {
    use(input, Use::Read, timeline, name);
    copies.push_back(on_host(input).clone());
  }
  for (const auto& output : request.outputs) use(output, Use::Write, timeline, name);
  auto started = start(copies);
  for (const auto& output : request.outputs) poison(on_host(output));
  const auto time = simulated::launch(timeline);
  {
    Lock lock(state());
    for (const auto& output : request.outputs) in_flight_->insert(output.storage().data());
  }
  enqueue(timeline, time, false, [started, request, in_flight = in_flight_] {
    c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
    started.work->wait();
    for (size_t i = 0; i < request.outputs.size(); i++) {
      const auto& output = request.outputs[i];
      auto values = started.values[i].view(output.scalar_type()).view(output.sizes());
      on_host(output).copy_(started.factor == 1 ? values : values * started.factor);
    }
    Lock lock(state());
    for (const auto& output : request.outputs) in_flight->erase(in_flight->find(output.storage().data()));
  });
  auto work = c10::make_intrusive<Launch>(getRank(), request.type, device, request.outputs, started.work);
  work->clock = clock_of(timeline);
  return work;
}

Collectives::Work Collectives::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  check_one(tensors, "broadcast");
  return launch({OpType::BROADCAST, "broadcast", tensors, tensors, options.asyncOp}, [&](Tensors& copies) {
    auto bytes = bytes_of(copies);
    return Launched{gloo_->broadcast(bytes, options), bytes};
  });
}

Collectives::Work Collectives::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  check_one(tensors, "allreduce");
  check_reduction(options.reduceOp, tensors[0], "allreduce");
  const auto reduction = on_gloo(options.reduceOp, tensors[0], getSize());
  return launch({OpType::ALLREDUCE, "allreduce", tensors, tensors, options.asyncOp}, [&](Tensors& copies) {
    auto on = options;
    on.reduceOp = reduction.op;
    if (reduction.before != 1) copies[0].mul_(reduction.before);
    return Launched{gloo_->allreduce(copies, on), copies, reduction.after};
  });
}

Collectives::Work Collectives::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  std::vector<Work> works;
  for (auto& tensor : tensors) {
    Tensors one{tensor};
    works.push_back(allreduce(one, options));
  }
  return c10::make_intrusive<AllDone>(std::move(works));
}

Collectives::Work Collectives::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  check_one(tensors, "reduce");
  check_reduction(options.reduceOp, tensors[0], "reduce");
  const auto reduction = on_gloo(options.reduceOp, tensors[0], getSize());
  return launch({OpType::REDUCE, "reduce", tensors, tensors, options.asyncOp}, [&](Tensors& copies) {
    auto on = options;
    on.reduceOp = reduction.op;
    if (reduction.before != 1) copies[0].mul_(reduction.before);
    return Launched{gloo_->reduce(copies, on), copies, reduction.after};
  });
}

Collectives::Work Collectives::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  check_one(inputs, "all_gather");
  for (const auto& output : outputs[0]) check_same_dtype(output, inputs[0], "all_gather");
  return launch({OpType::ALLGATHER, "all_gather", inputs, outputs[0], options.asyncOp}, [&](Tensors& copies) {
    auto bytes = bytes_of(copies);
    std::vector<Tensors> received{bytes_of(like(outputs[0]))};
    return Launched{gloo_->allgather(received, bytes, options), received[0]};
  });
}

Collectives::Work Collectives::_allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) {
  check_same_dtype(output, input, "all_gather_into_tensor");
  TORCH_CHECK(output.numel() == input.numel() * getSize(), BACKEND_NAME,
              ": output tensor size must be equal to world_size times input tensor size");
  return launch({OpType::_ALLGATHER_BASE, "all_gather_into_tensor", {input}, {output}, options.asyncOp}, [&](Tensors& copies) {
    auto given = bytes_of(copies[0]), received = bytes_of(like({output})[0]);
    return Launched{gloo_->_allgather_base(received, given, options), {received}};
  });
}

Collectives::Work Collectives::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                               const c10d::AllgatherOptions& options) {
  std::vector<Work> works;
  for (size_t i = 0; i < outputs.size(); i++) works.push_back(_allgather_base(outputs[i], inputs[i], options));
  return c10::make_intrusive<AllDone>(std::move(works));
}

Collectives::Work Collectives::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                              const c10d::ReduceScatterOptions& options) {
  check_one(outputs, "reduce_scatter");
  for (const auto& input : inputs[0]) {
    check_same_dtype(outputs[0], input, "reduce_scatter");
    TORCH_CHECK(input.numel() == outputs[0].numel(), BACKEND_NAME, ": reduce_scatter of tensors of different sizes");
  }
  check_reduction(options.reduceOp, outputs[0], "reduce_scatter");
  const auto reduction = on_gloo(options.reduceOp, outputs[0], getSize());
  return launch({OpType::REDUCE_SCATTER, "reduce_scatter", inputs[0], outputs, options.asyncOp}, [&](Tensors& copies) {
    Tensors flat;
    for (const auto& copy : copies) flat.push_back(copy.reshape({-1}));
    auto given = at::cat(flat), received = at::empty({outputs[0].numel()}, given.options());
    if (reduction.before != 1) given.mul_(reduction.before);
    auto on = options;
    on.reduceOp = reduction.op;
    return Launched{gloo_->_reduce_scatter_base(received, given, on), {received}, reduction.after};
  });
}

Collectives::Work Collectives::_reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) {
  check_same_dtype(output, input, "reduce_scatter_tensor");
  TORCH_CHECK(input.numel() == output.numel() * getSize(), BACKEND_NAME,
              ": input tensor must be the same size as output size times world size");
  check_reduction(options.reduceOp, input, "reduce_scatter_tensor");
  const auto reduction = on_gloo(options.reduceOp, input, getSize());
  return launch({OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_tensor", {input}, {output}, options.asyncOp}, [&](Tensors& copies) {
    auto given = copies[0].reshape({-1}), received = at::empty({output.numel()}, given.options());
    if (reduction.before != 1) given.mul_(reduction.before);
    auto on = options;
    on.reduceOp = reduction.op;
    return Launched{gloo_->_reduce_scatter_base(received, given, on), {received}, reduction.after};
  });
}

Collectives::Work Collectives::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                               const c10d::ReduceScatterOptions& options) {
  std::vector<Work> works;
  for (size_t i = 0; i < outputs.size(); i++) works.push_back(_reduce_scatter_base(outputs[i], inputs[i], options));
  return c10::make_intrusive<AllDone>(std::move(works));
}

Collectives::Work Collectives::alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes,
                                             std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  check_same_dtype(output, input, "all_to_all_single");
  return launch({OpType::ALLTOALL_BASE, "all_to_all_single", {input}, {output}, options.asyncOp}, [&](Tensors& copies) {
    auto received = like({output})[0];
    return Launched{gloo_->alltoall_base(received, copies[0], output_sizes, input_sizes, options), {received}};
  });
}

Collectives::Work Collectives::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return launch({OpType::ALLTOALL, "all_to_all", inputs, outputs, options.asyncOp}, [&](Tensors& copies) {
    auto sent = bytes_of(copies), places = bytes_of(like(outputs));
    std::vector<int64_t> sent_sizes, received_sizes;
    for (const auto& each : sent) sent_sizes.push_back(each.numel());
    for (const auto& each : places) received_sizes.push_back(each.numel());
    auto given = at::cat(sent), received = at::empty_like(at::cat(places));
    auto work = gloo_->alltoall_base(received, given, received_sizes, sent_sizes, options);
    return Launched{work, received.split_with_sizes(received_sizes)};
  });
}

Collectives::Work Collectives::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  check_one(inputs, "gather");
  const auto all = outputs.empty() ? Tensors{} : outputs[0];
  return launch({OpType::GATHER, "gather", inputs, all, options.asyncOp}, [&](Tensors& copies) {
    auto bytes = bytes_of(copies);
    std::vector<Tensors> received;
    if (!all.empty()) received.push_back(bytes_of(like(all)));
    return Launched{gloo_->gather(received, bytes, options), received.empty() ? Tensors{} : received[0]};
  });
}

Collectives::Work Collectives::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  check_one(outputs, "scatter");
  const auto all = inputs.empty() ? Tensors{} : inputs[0];
  return launch({OpType::SCATTER, "scatter", all, outputs, options.asyncOp}, [&](Tensors& copies) {
    std::vector<Tensors> given;
    if (!copies.empty()) given.push_back(bytes_of(copies));
    auto received = bytes_of(like(outputs));
    return Launched{gloo_->scatter(received, given, options), received};
  });
}

Collectives::Work Collectives::send(Tensors& tensors, int to, int tag) {
  check_one(tensors, "send");
  return launch({OpType::SEND, "send", tensors, {}}, [&](Tensors& copies) {
    auto bytes = bytes_of(copies);
    return Launched{gloo_->send(bytes, to, tag), {}};
  });
}

Collectives::Work Collectives::recv(Tensors& tensors, int from, int tag) {
  check_one(tensors, "recv");
  return launch({OpType::RECV, "recv", {}, tensors}, [&](Tensors&) {
    auto received = bytes_of(like(tensors));
    return Launched{gloo_->recv(received, from, tag), received};
  });
}

Collectives::Work Collectives::barrier(const c10d::BarrierOptions&) {
  return launch({OpType::BARRIER, "barrier", {}, {}}, [&](Tensors&) { return Launched{gloo_->barrier({}), {}}; });
}

}  // namespace simulated
