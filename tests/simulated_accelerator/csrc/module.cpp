// The part of the library that Python calls.
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "collectives.h"
#include "device.h"
#include "generator.h"
#include "memory.h"
#include "reports.h"
#include "timelines.h"

namespace py = pybind11;
using namespace simulated;

namespace {

struct Metadata : c10::TensorImpl {
  using c10::TensorImpl::copy_tensor_metadata;
};

// `tensor.data = values` with values on another device, which torch allows for the devices that it knows.
void set_data(const at::Tensor& tensor, const at::Tensor& values) {
  auto* target = tensor.unsafeGetTensorImpl();
  if (auto* autograd = torch::autograd::impl::get_autograd_meta(tensor)) autograd->grad_accumulator_.reset();
  Metadata::copy_tensor_metadata(values.unsafeGetTensorImpl(), target, target->version_counter(), true);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using without_gil = py::call_guard<py::gil_scoped_release>;
  register_device();
  py::module_::import("torch.distributed");
  py::class_<Collectives, c10d::Backend, c10::intrusive_ptr<Collectives>>(m, "Collectives")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<c10d::Store> store, double seconds) {
        const auto timeout = std::chrono::milliseconds(int64_t(seconds * 1000));
        return c10::make_intrusive<Collectives>(std::move(gloo), std::move(store), timeout);
      }));
  m.def("set_device_count", &set_device_count);
  m.def("device_count", &device_count);
  m.def("set_device", &set_current_device);
  m.def("current_device", &current_device);
  m.def("default_generator", &default_generator);
  m.def("set_detecting", &set_detecting, without_gil());
  m.def("take_reports", &take_reports, without_gil());
  m.def("set_data", &set_data);
  m.def("memory_info", [](c10::DeviceIndex device) { return allocator().getMemoryInfo(device); }, without_gil());
  m.def("counters", [] {
    Lock lock(state());
    const auto& counted = counters();
    return std::map<std::string, uint64_t>{{"syncs", counted.syncs},
                                           {"blocking_to_host", counted.blocking_to_host},
                                           {"blocking_to_device", counted.blocking_to_device}};
  }, without_gil());
}
