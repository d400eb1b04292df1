// Operators of the device: each runs the CPU's kernel over the device's memory, on the current stream.
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <set>

#include "copies.h"
#include "generator.h"
#include "memory.h"
#include "reports.h"
#include "timelines.h"

namespace simulated {
namespace {

using at::Tensor;
using c10::Device;
using BelowAutograd = c10::impl::ExcludeDispatchKeyGuard;

// --- memory and views -------------------------------------------------------------------------------------------------

constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

Device resolved(std::optional<Device> device) {
  return Device(DEVICE, device && device->index() >= 0 ? device->index() : current_device());
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(resolved(device));
  return at::detail::empty_generic(size, &allocator(), KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(resolved(device));
  return at::detail::empty_strided_generic(size, stride, &allocator(), KEYS, c10::dtype_or_default(dtype));
}

Tensor empty_like_layout(const Tensor& values, Device device) {
  return empty_strided(values.sizes(), values.strides(), values.scalar_type(), {}, device, {});
}

Tensor as_strided(const Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

Tensor reshape_alias(const Tensor& tensor, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, tensor.storage_offset());
}

const Tensor& resize_(const Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* implementation = tensor.unsafeGetTensorImpl();
  implementation->set_sizes_contiguous(size);
  const auto bytes = size_t(implementation->numel() + implementation->storage_offset()) * implementation->itemsize();
  if (implementation->numel() && bytes > tensor.storage().nbytes()) resize_storage(tensor.storage(), bytes);
  return tensor;
}

Tensor& set_storage_part(Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* implementation = tensor.unsafeGetTensorImpl();
  implementation->set_storage_keep_dtype(std::move(storage));
  implementation->set_storage_offset(offset);
  if (stride.size() == size.size())
    implementation->set_sizes_and_strides(size, stride);
  else
    implementation->set_sizes_contiguous(size);
  return tensor;
}

Tensor& set_storage(Tensor& tensor, at::Storage storage) {
  const auto count = int64_t(storage.nbytes() / tensor.itemsize());
  return set_storage_part(tensor, std::move(storage), 0, {count}, {});
}

// --- copies -----------------------------------------------------------------------------------------------------------

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.numel() != source.numel()) target.resize_(source.sizes());
  return copy_from(source, target, false);
}

void foreach_copy_(at::TensorList targets, at::TensorList sources, bool non_blocking) {
  for (size_t i = 0; i < targets.size(); i++) targets[i].copy_(sources[i], non_blocking);
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  ReportScope scope;
  wait_for_values(tensor, "item");
  return on_host(tensor).item();
}

void record_stream(Tensor& tensor, c10::Stream stream) { allocator().recordStream(tensor.storage().data_ptr(), stream); }

// --- kernels ----------------------------------------------------------------------------------------------------------

// CUDA takes indices in host memory, and copies them.
const std::set<std::string> TAKES_HOST_INDICES = {
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_",
    "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put"};

// Results whose size or value the host has to know.
const std::set<std::string> WAITS_FOR_VALUES = {
    "aten::nonzero", "aten::nonzero.out", "aten::masked_select", "aten::masked_select.out", "aten::_unique", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::repeat_interleave.Tensor",
    "aten::bincount", "aten::equal"};

[[noreturn]] void refuse(const std::string& one, const std::string& other, const std::string& operation) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ", other,
              "! (when checking arguments of ", operation, ")");
}

bool is_scalar_of_host(const Tensor& tensor) { return tensor.is_cpu() && tensor.dim() == 0; }

// One call of an operator: its arguments as the CPU's kernel takes them, and its results as tensors of the device.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(stack), name_(op.schema().name()) {
    if (!op.schema().overload_name().empty()) name_ += "." + op.schema().overload_name();
    is_foreach_ = name_.rfind("aten::_foreach_", 0) == 0 || name_.rfind("aten::_amp_foreach", 0) == 0;
  }

  void run() {
    find_device();
    timeline_ = current_timeline(device_->index());
    carry_out_before(timeline_);
    const auto arguments = op_.schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++) argument(i) = to_host(argument(i), arguments[i]);
    count_waits();
    if (op_.hasTag(at::Tag::nondeterministic_seeded) && !has_generator_)
      with_default_numbers(device_->index(), [this] { op_.callBoxed(stack_); });
    else
      op_.callBoxed(stack_);
    for (auto& each : given_)
      if (each.is_resized && each.host.numel()) write_resized(each);
    BelowAutograd guard(c10::autograd_dispatch_keyset);
    const auto returns = op_.schema().returns();
    const auto first = stack_->size() - returns.size();
    for (size_t i = 0; i < returns.size(); i++) (*stack_)[first + i] = to_device((*stack_)[first + i], returns[i]);
  }

 private:
  struct Given {
    Tensor device, host;
    const c10::Argument* argument;
    bool is_resized;  // an empty output, to which the kernel gives its size
  };

  c10::IValue& argument(size_t i) { return (*stack_)[stack_->size() - op_.schema().arguments().size() + i]; }

  void find_device() {
    std::string host;
    std::vector<std::optional<Device>> of_positions;
    const auto see = [&](const Tensor& tensor, std::optional<Device>& found) {
      if (!tensor.defined() || is_scalar_of_host(tensor)) return;
      if (tensor.is_cpu() && TAKES_HOST_INDICES.count(name_)) return;
      if (found && *found != tensor.device()) refuse(found->str(), tensor.device().str(), name_);
      found = tensor.device();
    };
    std::optional<Device> of_all;
    const auto count = op_.schema().arguments().size();
    for (size_t i = 0; i < count; i++) {
      const auto& value = argument(i);
      if (value.isTensor()) {
        see(value.toTensor(), of_all);
      } else if (value.isList()) {
        const auto elements = value.toListRef();
        if (of_positions.size() < elements.size()) of_positions.resize(elements.size());
        for (size_t k = 0; k < elements.size(); k++)
          if (elements[k].isTensor()) see(elements[k].toTensor(), is_foreach_ ? of_positions[k] : of_all);
      } else if (value.isDevice() && value.toDevice().type() == DEVICE) {
        device_ = resolved(value.toDevice());
      }
    }
    for (const auto& each : of_positions)
      if (each && each->type() == DEVICE) device_ = each;
    if (of_all && of_all->type() == DEVICE) device_ = of_all;
    if (!device_) device_ = resolved({});
    if (of_all && of_all->is_cpu()) refuse(device_->str(), "cpu", name_);
  }

  Tensor to_host(const Tensor& tensor, const c10::Argument& argument) {
    if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
    const bool is_written = argument.alias_info() && argument.alias_info()->isWrite();
    use(tensor, is_written ? Use::Write : Use::Read, timeline_, name_);
    const bool is_resized = is_written && tensor.numel() == 0;
    auto host = is_resized ? at::empty(tensor.sizes(), at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU))
                           : on_host(tensor);
    given_.push_back({tensor, host, &argument, is_resized});
    return host;
  }

  c10::IValue to_host(const c10::IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) return to_host(value.toTensor(), argument);
    if (value.isTensorList()) {
      c10::List<Tensor> tensors;
      for (const Tensor& tensor : value.toTensorList()) tensors.push_back(to_host(tensor, argument));
      return tensors;
    }
    if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
      c10::List<std::optional<Tensor>> tensors;
      for (const c10::IValue& each : value.toListRef())
        tensors.push_back(each.isTensor() ? std::optional<Tensor>(to_host(each.toTensor(), argument)) : std::nullopt);
      return tensors;
    }
    if (value.isDevice()) return Device(at::kCPU);
    if (argument.name() == "generator" && (value.isNone() || value.isGenerator())) {
      has_generator_ = true;
      const auto generator = value.isNone() ? default_generator(device_->index()) : value.toGenerator();
      TORCH_CHECK(is_of_device(generator), "Expected a '", Device(DEVICE).str(), "' device type for generator but found '",
                  generator.device().type(), "'");
      return for_next_kernel(generator);
    }
    return value;
  }

  void count_waits() {
    bool waits = WAITS_FOR_VALUES.count(name_) > 0;
    if (TAKES_HOST_INDICES.count(name_)) {  // masks are indices of a number that the host has to know
      bool fills = false;  // CUDA fills one value in without this number
      for (const auto& each : given_) fills |= each.argument->name() == "values" && each.host.numel() == 1;
      for (const auto& each : given_)
        waits |= !fills && each.argument->name() == "indices" && (each.host.scalar_type() == at::kBool || each.host.scalar_type() == at::kByte);
    }
    if (!waits) return;
    {
      Lock lock(state());
      counters().blocking_to_host++;
    }
    host_waits_for(clock_of(timeline_));
  }

  void write_resized(const Given& given) {
    resize_(given.device, given.host.sizes(), {});
    on_host(given.device).copy_(given.host);
    use(given.device, Use::Write, timeline_, name_);
  }

  Tensor to_device(const Tensor& tensor, const c10::Argument& argument) {
    if (!tensor.defined() || !tensor.is_cpu()) return tensor;
    for (const auto& each : given_)
      if (each.host.is_same(tensor)) return each.device;
    if (argument.alias_info() && !argument.alias_info()->isWrite()) {
      for (const auto& each : given_) {
        if (!each.argument->alias_info() || each.is_resized || each.host.itemsize() != tensor.itemsize()) continue;
        const auto bytes = static_cast<const char*>(tensor.const_data_ptr()) - static_cast<const char*>(each.host.const_data_ptr());
        const auto offset = each.device.storage_offset() + bytes / int64_t(tensor.itemsize());
        return at::native::as_strided_tensorimpl(each.device, tensor.sizes(), tensor.strides(), offset);
      }
    }
    auto result = empty_like_layout(tensor, *device_);
    on_host(result).copy_(tensor);
    use(result, Use::Write, timeline_, name_);
    return result;
  }

  c10::IValue to_device(const c10::IValue& value, const c10::Argument& argument) {
    if (value.isTensor()) return to_device(value.toTensor(), argument);
    if (!value.isTensorList()) return value;
    c10::List<Tensor> tensors;
    for (const Tensor& tensor : value.toTensorList()) tensors.push_back(to_device(tensor, argument));
    return tensors;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  std::string name_;
  bool is_foreach_ = false, has_generator_ = false;
  std::optional<Device> device_;
  Timeline timeline_ = 0;
  std::vector<Given> given_;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ReportScope scope;
  Call(op, stack).run();
}

// --- kernels that the CPU has under other names -----------------------------------------------------------------------

// Run a function of CPU tensors on tensors of the device.
template <class Function>
auto on_current_stream(const char* name, std::initializer_list<Tensor> inputs, Function function) {
  ReportScope scope;
  const auto device = inputs.begin()->device();
  const auto timeline = current_timeline(device.index());
  carry_out_before(timeline);
  for (const auto& input : inputs) {
    if (!input.defined()) continue;
    if (input.device() != device) refuse(device.str(), input.device().str(), name);
    use(input, Use::Read, timeline, name);
  }
  BelowAutograd guard(c10::autograd_dispatch_keyset);
  return function([&](const Tensor& values) {
    if (!values.defined()) return values;
    auto result = empty_like_layout(values, device);
    on_host(result).copy_(values);
    use(result, Use::Write, timeline, name);
    return result;
  });
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding,
                   int64_t groups) {
  return on_current_stream("convolution", {input, weight, bias.value_or(Tensor())}, [&](auto result) {
    const auto host_bias = bias && bias->defined() ? std::optional<Tensor>(on_host(*bias)) : std::nullopt;
    return result(at::convolution(on_host(input), on_host(weight), host_bias, stride, padding, dilation, transposed,
                                  output_padding, groups));
  });
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& input, const Tensor& weight,
                                                        at::IntArrayRef stride, at::IntArrayRef padding,
                                                        at::IntArrayRef dilation, bool transposed,
                                                        at::IntArrayRef output_padding, int64_t groups,
                                                        std::array<bool, 3> mask) {
  return on_current_stream("convolution_backward", {gradient, input, weight}, [&](auto result) {
    const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
    auto [of_input, of_weight, of_bias] = at::convolution_backward(
        on_host(gradient), on_host(input), on_host(weight), at::OptionalIntArrayRef(at::IntArrayRef({channels})), stride,
        padding, dilation, transposed, output_padding, groups, mask);
    return std::make_tuple(result(of_input), result(of_weight), result(of_bias));
  });
}

// CUDA counts integers, too.
Tensor histc(const Tensor& tensor, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  return on_current_stream("histc", {tensor}, [&](auto result) {
    return result(at::histc(on_host(tensor).to(at::kFloat), bins, least, most).to(tensor.scalar_type()));
  });
}

// torch has one operator for the cell of an LSTM on a device, and its backward; here autograd sees the parts.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell,
                                             const std::optional<Tensor>& input_bias,
                                             const std::optional<Tensor>& hidden_bias) {
  auto gates = input_gates + hidden_gates;
  for (const auto& bias : {input_bias, hidden_bias})
    if (bias && bias->defined()) gates = gates + *bias;
  const auto parts = gates.chunk(4, 1);  // input, forget, cell, output
  auto next = parts[1].sigmoid() * cell + parts[0].sigmoid() * parts[2].tanh();
  return {parts[3].sigmoid() * next.tanh(), next, gates};
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_part);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_foreach_copy_", &foreach_copy_);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("histc", &histc);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
}

// A lazily conjugated or negated tensor reaches the copies as it is: torch would resolve it first, by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
  m.impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) { m.impl("_thnn_fused_lstm_cell", &lstm_cell); }

}  // namespace simulated
